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

from functools import partial
from itertools import chain
from typing import NamedTuple

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
        self.config, self.num_pages, self.page_size, self.sinks = config, num_pages, page_size, sinks
        self.example = torch.empty(
            0, dtype=dtype, device=device
        )  # like all that is read and written around it
        self.k, self.v = self.pools = [self.pool(config.head_dim, dtype=dtype) for _ in "kv"]

    def pool(self, *shape, dtype, every=None):
        """One tensor per layer: [P, S, G, *shape], or [P, *every, *shape]."""
        every = (self.page_size, self.config.num_kv_heads) if every is None else every
        whole = self.num_pages, *every, *shape
        return [untouched(whole, dtype, self.example.device) for _ in range(self.config.num_layers)]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for pool in self.pools for x in pool)

    @property
    def branches(self) -> bool:
        """Can a draft be a tree? Not behind a window: it counts in slots, and siblings lie in different ones."""
        return not any(self.config.windows)

    def move(self, source: list[int], target: list[int]) -> None:
        """Bring what these slots hold to those: the path that was accepted through a tree."""
        for x in chain(*self.pools):
            slots = x.flatten(0, 1)
            slots[target] = slots[source]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Carry out copies (from, to) of whole pages: all are read before any is written, so order does not matter."""
        if pairs:
            source, target = torch.tensor(pairs, device=self.k[0].device).T
            for x in chain(*self.pools):
                x[target] = x[source]

    def read_pages(self, layer: int, pages: list[int]) -> list[torch.Tensor]:
        """What lies in these pages of a layer, [n, S, G, ...] each: keys, values, and the scales they may have."""
        return [pool[layer][pages] for pool in self.pools]

    def write_pages(self, layer: int, pages: list[int], contents: list[torch.Tensor]) -> None:
        for pool, content in zip(self.pools, contents, strict=True):
            pool[layer][pages] = content.to(self.example.device)

    def targets(self, batch):
        """Where a step's keys and values are put: slots [T], and a layer's two tensors to which they belong."""
        return batch.slots, self.slots_of

    def attend_for(self, batch):
        """The `attend` of one step (a batch.Batch): stores keys and values, then lets every row look at its past."""
        (slots, caches), look = self.targets(batch), self.look_for(batch)

        def attend(layer: int, q, k, v):
            kv_write(k, v, *caches(layer), slots)
            return look(layer, q)

        return attend

    def slots_of(self, layer: int):
        """A layer's keys and values without their pages: two views [P * S, G, D]."""
        return self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1)

    on_native = True  # can the CPU's C++ kernels read it?
    watch = None  # called as watch(layer, batch) when a layer's keys and values of a step are written

    def look_for(self, batch, native=None):
        """look(layer, q [T, H, D]) -> [T, H, D] of one step whose keys and values are where `targets` said.

        `native`: a kernels.native.Native, whose kernels then see to the rows of one token.
        """
        B, starts, tables, lengths = len(batch.counts), batch.starts, batch.tables, batch.lengths
        on_kernels, native = on_triton(self.example), native if self.on_native else None
        n = batch.num_singles if on_kernels or native else 0
        trees = None if batch.trees is None else batch.trees[:n]
        single = Rows(tables[:n], starts[: n + 1], lengths[:n], max(batch.host_lengths), trees=trees)
        chunks = Rows(tables[n:], starts[n:] - n, lengths[n:], max(batch.counts[n:], default=0))
        gathered = {}
        if n < B and not on_kernels:
            windows = set(self.config.windows)
            gathered = {w: Gathered(batch, self.page_size, w, self.sinks, n) for w in windows}

        def look(layer: int, q):
            self.store(layer, batch, native)
            if self.watch:
                self.watch(layer, batch)
            if n == B:
                return self.singles(layer, q, single, native)
            out = torch.empty_like(q)
            if n:
                out[:n] = self.singles(layer, q[:n], single, native)
            if on_kernels:
                out[n:] = self.chunks(layer, q[n:], chunks)
                return out
            return gathered[self.config.windows[layer]].attend(q, *self.readers(layer, q.dtype), out)

        return look

    def seen(self, layer: int) -> tuple[int | None, int]:
        """The layer's window and sinks."""
        window = self.config.windows[layer]
        return window, self.sinks if window else 0

    # ---------------------------------------------------------------- what a cache of another kind does differently
    padding: dict[
        str, int
    ] = {}  # what a recorded step (graphs.Step) has to know of each row besides, and its padding

    def more_of(self, batch) -> dict[str, torch.Tensor]:
        """Those things, for single tokens: [B] int64 each."""
        return {}

    def targets_of(self, step):
        """`targets` of a recorded step."""
        return self.targets(step)

    def again(self, request, num_tokens: int) -> int:
        """How many tokens to compute in place of these, whose step failed somewhere between two layers."""
        return num_tokens

    def store(self, layer: int, step, native) -> None:
        """What is left to do before the step's keys and values can be read: here they lie in their pages already."""

    def singles(self, layer: int, q, rows: "Rows", native=None):
        pools = self.k[layer], self.v[layer]
        if native:
            return native.attend(q, *pools, rows.tables, rows.lengths, *self.seen(layer), rows.trees)
        its = rows.tables, rows.starts, rows.lengths, 1, rows.most
        return paged_decode(q, *pools, *its, *self.seen(layer), rows.trees)

    def chunks(self, layer: int, q, rows: "Rows"):
        pools = self.k[layer], self.v[layer]
        return paged_prefill(q, *pools, rows.tables, rows.starts, rows.lengths, rows.most, *self.seen(layer))

    def readers(self, layer: int, dtype):
        """Two functions from slots [n] to keys and values [n, G * D]."""
        return map(reader, self.slots_of(layer))


def reader(slots):
    """From the numbers of some of these slots [S, G, D] to what they hold, [n, G * D]."""
    return partial(torch.index_select, slots.flatten(1), 0)


class Rows(NamedTuple):
    """Some rows of a step, as the kernels want them."""

    tables: torch.Tensor  # [B, M] int32
    starts: torch.Tensor  # [B + 1] int32, of their queries
    lengths: torch.Tensor  # [B] int32
    most: int  # single tokens: the longest length. Chunks: the most queries of a row
    homes: torch.Tensor | None = (
        None  # [B] int64, where what has no page yet begins (quantized_cache.Int4Cache)
    )
    trees: torch.Tensor | None = None  # [B] int64, which of the last positions a drafted token sees


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

    def attend(self, q, keys, values, out):
        """q and out [T, H, D]; keys, values: from slots [n] to [n, G * D]."""
        for group in self.groups:
            group.attend(q, keys, values, out)
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
        if batch.trees is not None:  # only rows of one query have one; of a chunk all bits are set
            before = (p[:, :, None] - j[:, None]).clip(0, 63)
            seen &= (before == 63) | (batch.trees.numpy()[rows][:, None, None] >> before & 1 == 1)
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

    def attend(self, q, keys, values, out) -> None:
        (C, n), (_, H, D) = self.place.shape, q.shape
        keys, values = (
            read(self.index).view(C, self.index.numel() // C, -1, D).transpose(1, 2)
            for read in (keys, values)
        )
        G = keys.shape[1]
        R = H // G
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
