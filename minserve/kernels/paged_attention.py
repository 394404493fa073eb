"""Paged attention: each row's past lies scattered over pages, and a table says where.

    out[i, h] = softmax(q[i, h] . K[:, g]^T / sqrt(D)) . V[:, g]
                over the positions j that query i sees, with g = h // (H / G)

Position j of row b lives in page pages[b, j // S], slot j % S. A row's queries are its LAST positions, already
in the cache: query i of n stands at p = lengths[b] - n + i and sees j <= p; with a window w only j > p - w (w
positions, itself included) and j < sinks. Whatever no query of the row sees is never read: behind a window
the table may be stale, past the length it may hold anything.

Shapes
    q         [T, H, D]        the queries of all rows, one after another; tokens may be strided
    k_cache   [P, S, G, D]     P pages of S slots (a power of two), G key/value heads, H % G == 0. Pages and
    v_cache   [P, S, G, D]     slots may be strided, [G, D] contiguous: one layer of a bigger cache will do
    pages     [B, M] int32     page ids in order of position; rows may be strided
    starts_q  [B+1] int32      row b owns queries starts_q[b] : starts_q[b + 1], none is allowed
    lengths   [B] int32        positions row b sees, its own queries included; 0 gives zeros
    max_queries                at least the most queries of a row: here up to 16, one step of decode or the
                               drafts it verifies; `paged_prefill` takes any number
    max_length                 at least the longest length: it decides the splits without asking the GPU
    returns   [T, H, D]        queries past starts_q[B] are padding: what they get is undefined

How      As in decode_attention: one program serves the whole group, and each row is cut into splits that a second
         kernel merges. All query tokens of a row go into the same tile (row r is token r // (H/G)), so verifying
         a few drafts reads the cache once. A tile of keys takes one look into the table per page: the
         lanes of one page ask for the same four bytes, which is one transaction.
Cost     4 * H * D flops per visible (query, position) pair over 2 * G * D * itemsize bytes per visible position,
         plus 4 bytes per page: a table costs 4 / (2 * S * G * D * itemsize) of the cache, 0.006 % at 16 x 8 x 128.
Trap     page * S * G * D passes 2**31 before memory ends: page ids are int64 before they meet a stride.
Sources  PagedAttention, Kwon et al. 2023 (arXiv:2309.06180) section 4; Flash-Decoding, Dao et al. 2023.
Story    notebooks/05_paged_attention.ipynb
"""

import torch

from minserve.kernels import architecture, check_alike, check_packed, on_triton, processors, tl, triton
from minserve.kernels.decode_attention import LOG2_E, MERGE_TILE, _merge_kernel, splits_for
from minserve.kernels.decode_attention import tiles as decode_tiles
from minserve.kernels.prefill_attention import prefill_attention_reference

MOST_QUERIES = 16  # of one row in a decode step
MOST_ROWS = 64  # queries x heads of the group in one tile; more of them are several programs


# ---------------------------------------------------------------- the definition
def paged_attention_reference(
    q, k_cache, v_cache, pages, starts_q, lengths, window: int | None = None, sinks: int = 0
):
    """Copy what each row sees out of its pages, in order of position, and attend to that."""
    S = k_cache.shape[1]
    k, v = [], []  # per row [length, G, D]
    for b, n in enumerate(lengths.tolist()):
        first = n - int(starts_q[b + 1] - starts_q[b])  # position of the row's first query
        j = torch.arange(n, device=q.device)
        seen = j >= 0 if window is None else (j > first - window) | (j < sinks)  # by one query at least
        if first == n:
            seen = j < 0  # no query: nothing is seen
        j = j[seen]
        page = pages[b, j // S].long()
        for own, cache in ((k, k_cache), (v, v_cache)):
            own.append(cache.new_zeros(n, *cache.shape[2:]))
            own[-1][seen] = cache[page, j % S]
    starts_k = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()  # [B + 1]
    most = int((starts_q[1:] - starts_q[:-1]).max()) if len(lengths) else 0
    k, v = (torch.cat(own) if own else q.new_zeros(0, *k_cache.shape[2:]) for own in (k, v))
    return prefill_attention_reference(q, k, v, starts_q, starts_k, most, window, sinks)


# ---------------------------------------------------------------- the launcher
def paged_decode(
    q, k_cache, v_cache, pages, starts_q, lengths, max_queries: int, max_length: int,
    window: int | None = None, sinks: int = 0,
):  # fmt: skip
    """Attend up to 16 new tokens per row over its pages. Shapes: see the module docstring."""
    check(
        "paged_decode", q, k_cache, v_cache, pages, starts_q, lengths, max_queries, max_length, window, sinks
    )
    if not on_triton(q):
        return paged_attention_reference(q, k_cache, v_cache, pages, starts_q, lengths, window, sinks)


# ---------------------------------------------------------------- what cannot be
def check(who, q, k_cache, v_cache, pages, starts_q, lengths, max_queries, max_length, window, sinks):
    """Refuse what neither kernel can do. Values are read on the CPU only: a GPU would have to be waited for."""
    (T, H, D), (P, S, G, _), B = q.shape, k_cache.shape, lengths.numel()
    check_alike(who, q=q, k_cache=k_cache, v_cache=v_cache)
    check_packed(who, 2, q=q, k_cache=k_cache, v_cache=v_cache)
    if H % G:
        raise ValueError(
            f"{who}: {H} query heads cannot share {G} key/value heads evenly ({H} = {H // G} x {G} + {H % G})"
        )
    if k_cache.shape != v_cache.shape or k_cache.shape[3] != D:
        raise ValueError(
            f"{who}: caches {list(k_cache.shape)} and {list(v_cache.shape)} must be equal, with the {D} "
            f"channels of q {list(q.shape)}"
        )
    if S & (S - 1):
        raise ValueError(f"{who}: pages of {S} slots; the number of slots must be a power of two")
    for name, x, shape in (
        ("pages", pages, (B, pages.shape[-1])), ("starts_q", starts_q, (B + 1,)), ("lengths", lengths, (B,)),
    ):  # fmt: skip
        if x.shape != shape or x.dtype != torch.int32 or x.device != q.device or x.stride(-1) != 1:
            raise ValueError(
                f"{who}: {name} is {list(x.shape)} {x.dtype} on {x.device} with strides {list(x.stride())}; "
                f"{B} rows need {list(shape)} torch.int32 on {q.device}, the last stride 1"
            )
    if window is not None and window < 1:
        raise ValueError(
            f"{who}: a window of {window} positions leaves a query without even itself; use window >= 1 or None"
        )
    if sinks < 0 or (sinks and window is None):
        raise ValueError(
            f"{who}: {sinks} sinks with window {window}; sinks >= 0 are the positions kept beside a window"
        )
    if not q.is_cuda and B:
        _check_values(who, T, P, S, pages, starts_q, lengths, max_queries, max_length, window, sinks)


def _check_values(who, T, P, S, pages, starts_q, lengths, max_queries, max_length, window, sinks):
    queries = starts_q[1:] - starts_q[:-1]  # [B]
    if int(starts_q[0]) < 0 or int(starts_q[-1]) > T or int(queries.min()) < 0:
        raise ValueError(
            f"{who}: starts_q {starts_q.tolist()} must rise from 0 to at most {T}, the queries there are"
        )
    if int(queries.max()) > max_queries:
        raise ValueError(
            f"{who}: a row has {int(queries.max())} queries, more than max_queries = {max_queries}; the grid "
            f"would stop short of it: pass max_queries >= {int(queries.max())}"
        )
    low, high, room = int(lengths.min()), int(lengths.max()), pages.shape[1] * S
    if low < 0 or high > min(max_length, room):
        raise ValueError(
            f"{who}: lengths from {low} to {high} do not lie between 0 and "
            f"{min(max_length, room)} (max_length {max_length}; {pages.shape[1]} pages of {S} slots per row)"
        )
    begin = torch.arange(pages.shape[1], device=pages.device) * S  # [M] first position of each table entry
    read = (begin < lengths[:, None]) & (queries > 0)[:, None]  # [B, M]
    if window is not None:
        oldest = lengths - queries - window + 1  # [B] what the row's first query sees
        read &= (begin + S > oldest[:, None]) | (begin < sinks)
    wrong = read & ((pages < 0) | (pages >= P))
    if wrong.any():
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{who}: entry {i} of row {b}'s table is page {int(pages[b, i])}, and the cache has pages 0 to "
            f"{P - 1}; the row reads {int(lengths[b])} positions, {S} to a page"
        )
