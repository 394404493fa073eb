"""The KV cache as pages: tensors, and three ways to attend to them. Who owns a page is pages.py's business.

Layout   one pair of tensors per layer, k[layer] and v[layer], each [P, S, G, D]: P pages of S slots, G key/value
         heads, D channels. One slot's number everywhere is page * S + offset.

    CUDA, or the interpreter    kernels/paged_attention.py: the pages are read where they lie
    a plain CPU                 Gathered, below: what each row sees is copied side by side, then PyTorch's own
                                fused attention runs on the padded rectangle. No loop over requests: rows of
                                similar size form a group, and a group is one call.

The pool is allocated once, as large as was asked for. On a CPU its pages cost no memory until they are written.

Invariants   a slot is written by the step that computes its token, before any row reads it, and then never again
             rows read only slots they own: not those past their length, not those left behind by a window
Sources      PagedAttention, Kwon et al. 2023 (arXiv:2309.06180), sec. 4
Story        notebooks/05_paged_attention.ipynb
"""

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from minserve.config import ModelConfig
from minserve.kernels import on_triton
from minserve.kernels.kv_write import kv_write
from minserve.kernels.paged_attention import paged_decode
from minserve.kernels.paged_prefill import paged_prefill

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # (output, log of the sum of exponentials)


def untouched(shape, dtype, device):
    """Zeros. On a CPU the system hands memory out when it is first written; torch.zeros would write all of it."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(dtype)


class PagedCache:
    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int = 16,
        dtype=torch.float32,
        device="cpu",
        sinks: int = 0,
    ):
        shape = num_pages, page_size, config.num_kv_heads, config.head_dim
        self.config, self.sinks = config, sinks
        self.k = [untouched(shape, dtype, device) for _ in range(config.num_layers)]
        self.v = [untouched(shape, dtype, device) for _ in range(config.num_layers)]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.k, *self.v))

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Carry out copies (from, to) of whole pages: all are read before any is written, so order does not matter."""
        if pairs:
            source, target = torch.tensor(pairs, device=self.k[0].device).T
            for pool in (*self.k, *self.v):
                pool[target] = pool[source]

    def attend_for(self, batch):
        """The `attend` of one step (a batch.Batch): stores keys and values, then lets every row look at its past."""
        look = self.look_for(batch)

        def attend(layer: int, q, k, v):
            kv_write(k, v, *self.slots_of(layer), batch.slots)
            return look(layer, q)

        return attend

    def slots_of(self, layer: int):
        """A layer's keys and values without their pages: two views [P * S, G, D]."""
        return self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1)

    def look_for(self, batch, singles=None):
        """look(layer, q [T, H, D]) -> [T, H, D] of one step whose keys and values are stored already.

        `singles`: a kernel for the rows of one token, with the signature of `kernels.native.Native.attend`.
        """
        if on_triton(self.k[0]):
            return lambda layer, q: self._in_place(batch, q, layer)
        n, S = batch.num_singles if singles else 0, self.k[0].shape[1]
        chunks = {}
        if n < len(batch.plan):
            chunks = {w: Gathered(batch, S, w, self.sinks, n) for w in set(self.config.windows)}

        def look(layer: int, q):
            window, out = self.config.windows[layer], None
            if n:
                pools, sinks = (self.k[layer], self.v[layer]), self.sinks if window else 0
                out = singles(q[:n], *pools, batch.tables[:n], batch.lengths[:n], window, sinks)
            if not chunks:
                return out
            made = torch.empty_like(q)
            if n:
                made[:n] = out
            return chunks[window].attend(q, *self.slots_of(layer), made)

        return look

    def _in_place(self, batch, q, layer: int):
        """Two kernels on two slices: single tokens, then chunks."""
        pools, window = (self.k[layer], self.v[layer]), self.config.windows[layer]
        n, out, sinks = batch.num_singles, torch.empty_like(q), self.sinks if window else 0
        tables, lengths, longest = batch.tables, batch.lengths, max(batch.host_lengths)
        if n:
            rows = tables[:n], batch.starts[: n + 1], lengths[:n]
            out[:n] = paged_decode(q[:n], *pools, *rows, 1, longest, window, sinks)
        if n < len(batch.plan):
            rows, most = (tables[n:], batch.starts[n:] - n, lengths[n:]), max(batch.counts[n:])
            out[n:] = paged_prefill(q[n:], *pools, *rows, most, window, sinks)
        return out


class Gathered:
    """One step's attention on a CPU, for layers of one window: where to read, prepared once for all of them."""

    def __init__(self, batch, page_size: int, window: int | None, sinks: int, first: int = 0):
        """`first`: only the rows from this one on."""
        counts, lengths = np.array(batch.counts), np.array(batch.host_lengths)  # [B]
        rows = np.lexsort((-lengths, -counts))  # the largest first
        rows = rows[rows >= first]
        self.groups = []
        while len(rows):
            alike = (2 * counts[rows] > counts[rows[0]]) & (2 * lengths[rows] > lengths[rows[0]])
            self.groups.append(_Group(batch, rows[alike], counts, lengths, page_size, window, sinks))
            rows = rows[~alike]

    def attend(self, q, k, v, out=None):
        """q and out [T, H, D]; k and v [slots, G, D]."""
        out = torch.empty_like(q) if out is None else out
        for group in self.groups:
            group.attend(q, k, v, out)
        return out


class _Group:
    """Rows that are padded to one rectangle: C rows of n queries that see w positions."""

    def __init__(self, batch, rows, counts, lengths, page_size: int, window: int | None, sinks: int):
        counts, lengths, starts = counts[rows], lengths[rows], batch.starts.numpy()[rows]  # [C]
        first = lengths - counts  # position of each row's first query
        begin = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0)
        extra = min(sinks, int(begin.max())) if window else 0  # columns for sinks that lie before the window
        j = begin[:, None] + np.arange(-extra, int((lengths - begin).max()))  # [C, w]
        j[:, :extra] = np.arange(extra)
        query = np.arange(int(counts.max()))
        p = first[:, None] + query  # [C, n] position of each query
        seen = j[:, None] <= np.minimum(p, lengths[:, None] - 1)[:, :, None]  # [C, n, w]
        if window is not None:
            seen &= (j[:, None] > p[:, :, None] - window) | (j < sinks)[:, None]
            seen[..., :extra] &= np.arange(extra) < begin[:, None, None]  # a sink in the window counts once
        own = np.where(seen.any(1), j, lengths[:, None] - 1)  # [C, w]; what nobody sees: a slot surely theirs
        pages = np.take_along_axis(batch.tables.numpy()[rows], own // page_size, 1).astype(np.int64)
        self.index = torch.from_numpy(pages * page_size + own % page_size).flatten()  # [C w]
        self.place = torch.from_numpy(starts[:, None] + np.minimum(query, counts[:, None] - 1))  # [C, n]
        self.real = (
            None if (counts == counts[0]).all() else torch.from_numpy(query < counts[:, None])
        )  # [C, n]
        split = window is None and counts.max() > 1 and (len(rows) == 1 or not first.any())
        self.past = (
            int(first[0]) if split else None
        )  # what all queries see: then no mask is made, none is read
        seen[:, :, 0] |= ~seen.any(-1)  # padding queries see something, so that no softmax is 0/0
        self.seen = None if split or seen.all() else torch.from_numpy(seen)[:, None]  # [C, 1, n, w]
        self.bias = None

    def attend(self, q, k, v, out) -> None:
        (C, n), (_, H, D), G = self.place.shape, q.shape, k.shape[1]
        R = H // G
        keys, values = (
            x.flatten(1).index_select(0, self.index).view(C, -1, G, D).transpose(1, 2) for x in (k, v)
        )
        whole = slice(int(self.place[0, 0]), int(self.place[0, 0]) + n) if C == 1 else None  # no copy, then
        rows = q[None, whole] if whole else q[self.place]  # [C, n, H, D]
        if self.past is not None:
            made = behind(self.past, rows, keys, values)
        else:
            rows = rows.view(C, n, G, R, D).transpose(1, 2).reshape(C, G, n * R, D)
            if self.seen is not None and self.bias is None:
                seen = self.seen.repeat_interleave(R, 2)  # [C, 1, n R, w]
                self.bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
            made = scaled_dot_product_attention(rows, keys, values, attn_mask=self.bias)  # [C, G, n R, D]
            made = made.view(C, G, n, R, D).transpose(1, 2).reshape(C, n, H, D)
        if whole:
            out[whole] = made[0]
        elif self.real is None:
            out[self.place] = made
        else:
            out[self.place[self.real]] = made[self.real]


def behind(past: int, q, keys, values):
    """Queries [C, n, H, D] that see `past` positions and then each other, causally: [C, n, H, D].

    keys, values: [C, G, past + n, D]. Two calls without a mask, merged by their sums of exponentials.
    """
    (C, n, H, D), G = q.shape, keys.shape[1]
    R = H // G
    own = (x[:, :, past:].repeat_interleave(R, 1) for x in (keys, values))  # a copy, but a small one
    made, lse = flash(q.transpose(1, 2), *own, is_causal=True)  # [C, H, n, D], [C, H, n]
    if past:
        rows = q.view(C, n, G, R, D).transpose(1, 2).reshape(C, G, n * R, D)
        before, its = flash(rows, keys[:, :, :past], values[:, :, :past])
        before = before.reshape(C, G, n, R, D).transpose(2, 3).reshape(C, H, n, D)
        share = torch.sigmoid(its.reshape(C, G, n, R).transpose(2, 3).reshape(C, H, n) - lse)
        made = made.float().lerp(before.float(), share[..., None]).to(q.dtype)
    return made.transpose(1, 2)
