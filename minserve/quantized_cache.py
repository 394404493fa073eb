"""The paged KV cache in fewer bytes: int8, fp8, or int4 numbers where there were 16-bit ones.

    int8, fp8   a scale per token and head: each key and value is rounded when it is written, and that is all
    int4        16 levels between a minimum and a maximum: keys per channel, because a few channels of all keys are
                large; values per token and head. A channel's range is that of a whole page, so a page is *sealed* when
                it is full. The page that is being filled is the recent window: it stays as it was computed.

What a query sees does not depend on how its tokens came to be computed. With int8 and fp8 everybody sees rounded keys
and values, also a chunk its own. With int4 the query at position p sees position j unrounded if both lie in the same
page, else sealed. So chunks, prefix hits, copies and preemption leave every token as it is, and a request alone is
the oracle for all of them.

    int4: where a row's unsealed tokens are
        open    [seats * S] slots per layer; a running request's page-in-progress is at seat * S
        fresh   what one layer of one step writes, for all layers the same memory. A single token moves on to its open
                page. A chunk finds the beginning of its page carried in from there, in front of its own tokens:
                its pages are sealed out of `fresh`, and what is left over is carried out again

Cost     bytes per token: kv_cache.bytes_per_token with `kind`. int4 also keeps one open page per seat.
Invariants   a sealed page is never written again; a page is sealed in the step that computes its last token
             forked requests share whole pages only (PagePool's `whole`): nobody else may fill an open page
Sources  KIVI, Liu et al. 2024 (arXiv:2402.02750): keys per channel, values per token, a recent window in full
Story    notebooks/10_smaller_kv_cache.ipynb
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from minserve.batch import to_device
from minserve.kernels import on_triton
from minserve.kernels.kv_quantize import kv_write_scaled, read_keys, read_scaled, read_values, seal
from minserve.kernels.kv_write import kv_write
from minserve.kernels.quantized_attention import int4_decode, scaled_decode
from minserve.kernels.quantized_prefill import int4_prefill, scaled_prefill
from minserve.paged_attention import PagedCache, Rows, untouched

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class ScaledCache(PagedCache):
    """int8 or fp8: k, v [P, S, G, D] and a scale for each of their [P, S, G] rows."""

    def __init__(
        self, config, num_pages, page_size, dtype, device, sinks, kind: str, seats: int, tokens: int
    ):
        """`seats`: most requests that run. `tokens`: most of one step."""
        super().__init__(config, num_pages, page_size, DTYPES[kind], device, sinks)
        self.kind, self.on_native = kind, kind == "int8"
        self.k_scales, self.v_scales = scales = [self.pool(dtype=torch.float32) for _ in "kv"]
        self.pools += scales
        self.example = torch.empty(0, dtype=dtype, device=device)
        self.fresh = fresh(config, tokens, self.example)
        self.order = torch.arange(tokens, device=device)

    def targets(self, batch):
        return self.order[: len(batch.slots)], lambda layer: self.fresh

    def store(self, layer, step, native) -> None:
        write = native.kv_write_scaled if native else kv_write_scaled
        new = (x[: len(step.slots)] for x in self.fresh)
        scales = self.k_scales[layer].flatten(0, 1), self.v_scales[layer].flatten(0, 1)
        write(*new, *self.slots_of(layer), *scales, step.slots)

    def singles(self, layer, q, rows, native=None):
        pools = [pool[layer] for pool in self.pools]
        if native:
            return native.attend_scaled(q, *pools, rows.tables, rows.lengths, *self.seen(layer), rows.trees)
        its = rows.tables, rows.starts, rows.lengths, 1, rows.most
        return scaled_decode(q, *pools, *its, *self.seen(layer), rows.trees)

    def chunks(self, layer, q, rows):
        pools = [pool[layer] for pool in self.pools]
        its = rows.tables, rows.starts, rows.lengths, rows.most
        return scaled_prefill(q, *pools, *its, *self.seen(layer))

    def readers(self, layer, dtype):
        def read(slots, scales, index):
            return read_scaled(slots, scales.flatten(0, 1), index).to(dtype).flatten(1)

        scales = self.k_scales[layer], self.v_scales[layer]
        return map(partial, [read] * 2, self.slots_of(layer), scales)


class Int4Cache(PagedCache):
    """int4: k, v [P, S, G, D/2] of two nibbles a byte, and what the 16 levels of each channel or row mean."""

    padding = dict(homes=0, opens=-1, sealed=-1)
    branches = False  # a page in progress is read in order of position

    def __init__(
        self, config, num_pages, page_size, dtype, device, sinks, kind: str, seats: int, tokens: int
    ):
        if config.head_dim % 2:
            raise ValueError(f"heads of {config.head_dim} channels cannot be packed two to a byte: use int8")
        super().__init__(
            replace(config, head_dim=config.head_dim // 2), num_pages, page_size, torch.uint8, device, sinks
        )
        self.kind, self.config, self.example = kind, config, torch.empty(0, dtype=dtype, device=device)
        k_affine = self.pool(2, config.num_kv_heads, config.head_dim, dtype=torch.float16, every=())
        self.pools += k_affine, self.pool(2, dtype=torch.float16)
        self.open = [fresh(config, seats * page_size, self.example) for _ in range(config.num_layers)]
        self.fresh = fresh(config, tokens + seats * page_size, self.example)

    @property
    def nbytes(self) -> int:
        """The open pages included."""
        return super().nbytes + sum(x.nbytes for pair in self.open for x in pair)

    # ---------------------------------------------------------------- where a step's tokens go
    def more_of(self, batch):
        """Single tokens: where each row's open page begins, its token's place in it, and the page it fills, or -1."""
        owners, S = batch.owners[: batch.num_singles], self.page_size
        lengths = np.array(batch.host_lengths[: len(owners)], np.int64)
        homes = np.array([r.seat * S for r in owners], np.int64)
        full = [r.pages[(n - 1) // S] if n % S == 0 else -1 for r, n in zip(owners, lengths.tolist())]
        numbers = np.stack([homes, homes + (lengths - 1) % S, np.array(full, np.int64)])
        return dict(zip(("homes", "opens", "sealed"), to_device(numbers, self.example.device)))

    def targets_of(self, step):
        return step.more["opens"], lambda layer: self.open[layer]

    def targets(self, batch):
        return Chunks.of(batch, self.page_size, self.example.device).slots, lambda layer: self.fresh

    def store(self, layer, step, native) -> None:
        """The keys and values of single tokens are in their open pages; those that are full now are sealed."""
        self._seal(self.open[layer], step.more["homes"], step.more["sealed"], layer, native)

    def again(self, request, num_tokens: int) -> int:
        """What was carried out may lie where the beginning of a chunk's page was: that is computed again."""
        begun = request.computed % self.page_size if num_tokens > 1 else 0
        request.computed -= begun
        return num_tokens + begun

    def _seal(self, tokens, starts, pages, layer, native) -> None:
        (native.seal if native else seal)(*tokens, starts, pages, *(pool[layer] for pool in self.pools))

    def look_for(self, batch, native=None):
        n, B, device = batch.num_singles, len(batch.counts), self.example.device
        more, chunks = self.more_of(batch), Chunks.of(batch, self.page_size, device)
        tables, starts, lengths = batch.tables, batch.starts, batch.lengths
        longest, most = max(batch.host_lengths), max(batch.counts[n:], default=0)
        single = Rows(tables[:n], starts[: n + 1], lengths[:n], longest, more["homes"])
        chunked = Rows(tables[n:], starts[n:] - n, lengths[n:], most, chunks.homes)

        def look(layer: int, q):
            out, opened = torch.empty_like(q), self.open[layer]
            if n:
                kv_write(*(x[:n] for x in self.fresh), *opened, more["opens"])
                self._seal(opened, more["homes"], more["sealed"], layer, native)
                out[:n] = self.singles(layer, q[:n], single, native)
            if n < B:
                for x, y in zip(self.fresh, opened):
                    x[chunks.begun] = y[chunks.kept]
                self._seal(self.fresh, chunks.starts, chunks.sealed, layer, None)
                out[n:] = self.chunks(layer, q[n:], chunked)
                for x, y in zip(self.fresh, opened):
                    y[chunks.places] = x[chunks.left]
            return out

        return look

    # ---------------------------------------------------------------- attention
    def singles(self, layer, q, rows, native=None):
        pools, its = [pool[layer] for pool in self.pools], (rows.tables, rows.lengths)
        if native:
            return native.attend_int4(q, *pools, *self.open[layer], rows.homes, *its, *self.seen(layer))
        if not on_triton(self.example):
            return self._by_hand(layer, q, rows, self.open[layer])
        its = rows.homes, rows.tables, rows.starts, rows.lengths, 1, rows.most
        return int4_decode(q, *pools, *self.open[layer], *its, *self.seen(layer))

    def chunks(self, layer, q, rows):
        if not on_triton(self.example):
            return self._by_hand(layer, q, rows, self.fresh)
        pools, its = [pool[layer] for pool in self.pools], (rows.tables, rows.starts, rows.lengths, rows.most)
        return int4_prefill(q, *pools, *self.fresh, rows.homes, *its, *self.seen(layer))

    def _by_hand(self, layer: int, q, rows, unsealed):
        """On a CPU, row by row: sealed pages made readable, unsealed tokens behind them, and a mask over both."""
        made, starts, homes = torch.empty_like(q), rows.starts.tolist(), rows.homes.tolist()
        for b, length in enumerate(rows.lengths.tolist()):
            mine = slice(starts[b], starts[b + 1])
            made[mine] = self._row(layer, q[mine], rows.tables[b], length, homes[b], unsealed)
        return made

    def _row(self, layer: int, q, table, length: int, home: int, unsealed):
        """q [n, H, D], the last n of `length` positions."""
        (n, H, D), (window, sinks), S = q.shape, self.seen(layer), self.page_size
        p = torch.arange(length - n, length)[:, None]  # [n, 1]
        first = (length - n) // S * S  # where the unsealed begin
        old = torch.arange((length - 1) // S * S)  # sealed, for one query at least
        if window is not None:
            old = old[(old > length - n - window) | (old < sinks)]
        j = torch.cat((old, torch.arange(first, length)))  # [w]
        slots = table[old // S].long() * S + old % S
        k, v, k_affine, v_affine = (pool[layer] for pool in self.pools)
        sealed = read_keys(k, k_affine, slots), read_values(v, v_affine, slots)
        keys, values = (
            torch.cat((x.to(q.dtype), y[home : home + length - first])).transpose(0, 1)  # [G, w, D]
            for x, y in zip(sealed, unsealed)
        )
        its_page = torch.arange(len(j)) >= len(old)  # seen unrounded, and by queries of that page only
        seen = torch.where(its_page, (j // S == p // S) & (j <= p), j // S < p // S)  # [n, w]
        if window is not None:
            seen &= (j > p - window) | (j < sinks)
        G = len(keys)
        rows = q.view(n, G, H // G, D).transpose(0, 1).reshape(G, -1, D)
        made = scaled_dot_product_attention(rows, keys, values, attn_mask=seen.repeat_interleave(H // G, 0))
        return made.view(G, n, H // G, D).transpose(0, 1).reshape(n, H, D)


class Chunks(NamedTuple):
    """Where the tokens of a step are in `fresh`, and what has to be moved for rows of several tokens. All int64."""

    slots: (
        torch.Tensor
    )  # [T] of each new token: single ones, then row by row, each behind its page's beginning
    homes: torch.Tensor  # [C] where a row of several tokens begins
    begun: torch.Tensor  # tokens of pages already begun: where they go ...
    kept: torch.Tensor  # ... and where in `open` they are
    starts: torch.Tensor  # pages that become full: where their tokens begin ...
    sealed: torch.Tensor  # ... and their ids
    left: torch.Tensor  # tokens of the page that is still being filled at the end ...
    places: torch.Tensor  # ... and where in `open` they go

    @classmethod
    def of(cls, batch, S: int, device) -> "Chunks":
        n, lengths, counts = batch.num_singles, np.array(batch.host_lengths), np.array(batch.counts)
        requests, lengths, counts = batch.owners[n:], lengths[n:], counts[n:]
        past, seats = lengths - counts, np.array([r.seat for r in requests], np.int64)
        begun, full, left = past % S, lengths // S - past // S, lengths % S  # tokens, pages, tokens
        homes = n + np.cumsum(begun + counts) - (begun + counts)
        tokens, pages = np.arange, range(len(requests))
        numbers = (
            np.concatenate([tokens(n), spans(homes + begun, counts)]), homes,
            spans(homes, begun), spans(seats * S, begun),
            np.concatenate([homes[i] + S * np.arange(full[i]) for i in pages] or [[]]),
            [page for i in pages for page in requests[i].pages[past[i] // S : lengths[i] // S]],
            spans(homes + full * S, left), spans(seats * S, left),
        )  # fmt: skip
        return cls(*(to_device(np.asarray(x, np.int64), device) for x in numbers))


def spans(starts, counts):
    """starts[0], starts[0] + 1, ... counts[0] of them; then the next."""
    return np.concatenate([np.arange(a, a + c) for a, c in zip(starts, counts)] or [np.zeros(0, np.int64)])


def fresh(config, tokens: int, like):
    """Room for keys and values of some tokens: [tokens, G, D] each."""
    shape = tokens, config.num_kv_heads, config.head_dim
    return [untouched(shape, like.dtype, like.device) for _ in "kv"]


def page_for(kind: str | None) -> int:
    """The usual page: 16 tokens. int4's are 64, for the keys of a page share their scales."""
    return 64 if kind == "int4" else 16


def cache_for(kind: str | None, *arguments, seats: int, tokens: int) -> PagedCache:
    """A cache of that kind, None for the model's own numbers. Raises ValueError for a kind there is not."""
    if kind is None:
        return PagedCache(*arguments)
    if kind not in KINDS:
        raise ValueError(
            f"kv_cache_dtype is {kind!r}; use None (the model's own), {', '.join(map(repr, KINDS))}"
        )
    return KINDS[kind](*arguments, kind, seats, tokens)


KINDS = {"int8": ScaledCache, "fp8": ScaledCache, "int4": Int4Cache}
