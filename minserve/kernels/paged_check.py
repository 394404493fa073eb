"""What no paged kernel can do, and the message that says so: shapes always, values where they can be read.

The arguments are those of kernels/paged_attention.py, which explains them. On a GPU a value costs a wait for
everything before it, so there the kernels trust the plan, as they trust the page ids in it.
"""

import torch

from minserve.kernels import check_alike, check_packed


def check_paged(who, q, k_cache, v_cache, pages, starts_q, lengths, max_queries, max_length, window, sinks):
    check_alike(who, q=q, k_cache=k_cache, v_cache=v_cache)
    check_packed(who, 2, q=q, k_cache=k_cache, v_cache=v_cache)
    check_plan(
        who, q, k_cache, v_cache, pages, starts_q, lengths, max_queries, max_length, window, sinks, q.shape[2]
    )


def check_plan(
    who, q, k_cache, v_cache, pages, starts_q, lengths, max_queries, max_length, window, sinks, stored
):  # fmt: skip
    """All but the types, for caches that hold `stored` numbers per slot and head."""
    (T, H, D), (P, S, G, _), B = q.shape, k_cache.shape, lengths.numel()
    if H % G:
        raise ValueError(
            f"{who}: {H} query heads cannot share {G} key/value heads evenly ({H} = {H // G} x {G} + {H % G})"
        )
    if k_cache.shape != v_cache.shape or k_cache.shape[3] != stored:
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


def check_trees(who, q, trees, window) -> None:
    """A word per query; beside a window it would have no meaning, as positions are no longer those of the text."""
    if trees is None:
        return
    shape, device = q.shape[:1], q.device
    if (
        trees.shape != shape
        or trees.dtype != torch.int64
        or trees.device != device
        or not trees.is_contiguous()
    ):
        raise ValueError(
            f"{who}: trees is {list(trees.shape)} {trees.dtype} on {trees.device}; it must be {list(shape)} "
            f"torch.int64 on {device}, contiguous: a word of 63 bits for each query"
        )
    if window is not None:
        raise ValueError(
            f"{who}: trees with a window of {window} positions, and slots of a tree are not in order of position; "
            f"draft chains there (trees=None)"
        )


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
    busy = lengths[queries > 0].tolist()  # a row without queries may say anything
    low, high, room = min(busy, default=0), max(busy, default=0), pages.shape[1] * S
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
