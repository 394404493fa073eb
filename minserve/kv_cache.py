"""The KV cache of one request: keys and values of every token so far, so that no token is projected twice.

Layout   one pair of tensors per layer, k[layer] and v[layer], each [S, G, D]: S slots, G key/value heads, D channels.

            slot 0   | head 0: D numbers | head 1: D numbers | ...      token 0
            slot 1   | head 0: D numbers | head 1: D numbers | ...      token 1
            ...
         k[layer][s, g, d] lies (s * G + g) * D + d elements after the start: a token's heads are neighbours, a head's
         tokens are G * D apart. Figure: figures/03_layout.png

Cost     2 (keys and values) * layers * G * D * itemsize bytes per token, whatever the number of *query* heads.

Ring     a layer with a sliding window w never looks further back than w tokens, so it keeps w slots and reuses
         them: token p lives in slot p % w. With `sinks` = s, the first s tokens stay for ever in slots 0 .. s - 1
         and the ring is behind them: slot s + (p - s) % w. Order in the ring does not matter to attention:
         softmax is a sum, and each key was turned by its own position before it was stored.

Invariants
    0 <= length <= capacity; slots of a full layer at or past `length` are never read
    every layer has written the same tokens between two calls of advance()
    a ring layer holds exactly the last min(length, w) tokens (and the sinks)

Sources  multi-query attention, Shazeer 2019 (arXiv:1911.02150); grouped queries (arXiv:2305.13245); attention sinks,
         Xiao et al. 2023 (arXiv:2309.17453; there positions are renumbered inside the cache, here they stay absolute)
Story    notebooks/03_kv_cache.ipynb
"""

import torch

from minserve.config import ModelConfig
from minserve.kernels.decode_attention import decode_attention
from minserve.kernels.kv_write import kv_write
from minserve.kernels.prefill_attention import prefill_attention


# ---------------------------------------------------------------- the arithmetic
def bytes_per_token(
    layers: int, kv_heads: int, head_dim: int, itemsize: int = 2, kind: str | None = None, page_size: int = 16
) -> float:
    """What one token of context weighs: 2 x layers x kv_heads x head_dim x bytes. Llama-3.1-8B at 16 bits: 131,072.

    `kind`: of a quantized cache, with its scales (quantized_cache.py). "int8" and "fp8" add 4 bytes per head and
    token; "int4" adds 4 to each value, and to each channel of keys, once per page.
    """
    key, value = {
        None: (head_dim * itemsize,) * 2,
        "int8": (head_dim + 4,) * 2,
        "fp8": (head_dim + 4,) * 2,
        "int4": (head_dim / 2 + 4 * head_dim / page_size, head_dim / 2 + 4),
    }[kind]
    per_token = layers * kv_heads * (key + value)
    return int(per_token) if per_token == int(per_token) else per_token


def cache_bytes(layers: int, kv_heads: int, head_dim: int, tokens: int, itemsize: int = 2) -> int:
    """What one request of that many tokens weighs."""
    return tokens * bytes_per_token(layers, kv_heads, head_dim, itemsize)


def users_that_fit(memory: int, weights: int, per_token: int, context: int) -> int:
    """Requests of `context` tokens that fit at once: (memory - weights) / (bytes per token x context), all in bytes."""
    return max(0, int((memory - weights) // (per_token * context)))


# ---------------------------------------------------------------- the cache
class KVCache:
    def __init__(self, config: ModelConfig, capacity: int, dtype=torch.float32, device="cpu", sinks: int = 0):
        """Room for `capacity` tokens (layers with a window take fewer slots). `sinks` only acts on those layers.

        Raises ValueError for a capacity below 1 or beyond the model's context, or for negative sinks.
        """
        if not 1 <= capacity <= config.context:
            raise ValueError(
                f"a cache of {capacity:,} tokens: this model's context allows 1 to {config.context:,}"
            )
        if sinks < 0:
            raise ValueError(f"sinks is {sinks}; the number of first tokens to keep cannot be negative")
        self.config, self.capacity, self.sinks, self.length = config, capacity, sinks, 0
        heads = config.num_kv_heads, config.head_dim
        slots = [capacity if w is None else min(capacity, w + sinks) for w in config.windows]
        self.k = [torch.zeros(n, *heads, dtype=dtype, device=device) for n in slots]
        self.v = [torch.zeros(n, *heads, dtype=dtype, device=device) for n in slots]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.k, *self.v))

    def attend(self, layer: int, q, k, v):
        """Store k, v [T, G, D] of the T newest tokens, then let q [T, H, D] look at everything it may see.

        Raises ValueError when the T tokens do not fit behind the `length` that are there.
        """
        T = len(q)
        if self.length + T > self.capacity:
            raise ValueError(
                f"the cache holds {self.length:,} of {self.capacity:,} tokens and {T:,} more do not fit "
                f"({self.length + T - self.capacity:,} too many).\n  Build it with a larger capacity, or truncate() it."
            )
        if len(self.k[layer]) < self.capacity:
            return self._attend_ring(layer, q, k, v)
        end = self.length + T
        slots = torch.arange(self.length, end, device=q.device)
        kv_write(k, v, self.k[layer], self.v[layer], slots)
        return self._attention(q, self.k[layer], self.v[layer], end, self.config.windows[layer])

    def _attend_ring(self, layer: int, q, k, v):
        """One token: write it over the oldest, then see all slots. A chunk: see the past and itself, then write."""
        T, ring_k, ring_v = len(q), self.k[layer], self.v[layer]
        if T == 1:
            kv_write(k, v, ring_k, ring_v, self._slots(layer, self.length, self.length + 1))
            return self._attention(q, ring_k, ring_v, min(self.length + 1, len(ring_k)), None)
        window = self.config.windows[layer]
        oldest = max(self.sinks, self.length - window + 1)  # what the chunk's first query still sees
        kept = [*range(min(self.sinks, self.length)), *range(oldest, self.length)]  # positions, in order
        past = self._slots(layer, 0, self.length)[torch.tensor(kept, dtype=torch.int64, device=q.device)]
        all_k, all_v = torch.cat([ring_k[past], k]), torch.cat([ring_v[past], v])  # [kept + T, G, D]
        out = self._attention(q, all_k, all_v, len(all_k), window)
        new = torch.arange(self.length, self.length + T, device=q.device)
        stays = (new < self.sinks) | (new >= self.length + T - window)  # the rest is overwritten at once
        slots = torch.where(stays, self._slots(layer, self.length, self.length + T), -1)
        kv_write(k, v, ring_k, ring_v, slots)
        return out

    def _slots(self, layer: int, start: int, end: int):
        """The slots of positions start .. end - 1 in a ring layer, int64."""
        positions = torch.arange(start, end, device=self.k[layer].device)
        ring = self.sinks + (positions - self.sinks) % self.config.windows[layer]
        return torch.where(positions < self.sinks, positions, ring)

    def _attention(self, q, k, v, end: int, window: int | None):
        """q's rows are the last of the first `end` slots of k and v."""
        if len(q) == 1 and (window is None or end <= window):
            lengths = torch.tensor([end], dtype=torch.int32, device=q.device)
            return decode_attention(q, k[None], v[None], lengths, end)
        starts_q = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
        starts_k = torch.tensor([0, end], dtype=torch.int32, device=q.device)
        return prefill_attention(q, k[:end], v[:end], starts_q, starts_k, len(q), window, self.sinks)

    def advance(self, num_tokens: int) -> None:
        """Call once all layers have stored the step's tokens."""
        self.length += num_tokens

    def truncate(self, length: int) -> None:
        """Forget everything from `length` on: a rejected draft, or a conversation that goes on differently.

        Raises ValueError when a ring has already overwritten what would be needed again.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length:,} tokens to {length:,}")
        for window, k in zip(self.config.windows, self.k, strict=True):
            if length and length < self.length and len(k) < self.capacity and self.length > len(k):
                raise ValueError(
                    f"cannot go back from {self.length:,} to {length:,} tokens: a layer keeps only the last "
                    f"{window:,}, and the older ones are overwritten.\n  Start again from an empty cache: truncate(0)."
                )
        self.length = length
