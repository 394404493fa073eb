"""Paged attention over keys and values of 8 or 4 bits, which become numbers only where they are used.

    scaled_decode, scaled_prefill    int8 or fp8 pages, a scale per token and head
    int4_decode, int4_prefill        4-bit pages; the page that a query stands in is read from the fresh tokens

What is attended to, and every argument not named here, is as in paged_attention and paged_prefill.

Shapes
    k_cache, v_cache     [P, S, G, D] int8 or float8_e4m3fn, k_scales, v_scales [P, S, G] fp32
    k4, v4               [P, S, G, D/2] uint8, k_affine [P, 2, G, D] fp16, v_affine [P, S, G, 2] fp16
    fresh_k, fresh_v     [Z, G, D] of q's type: tokens whose page is not sealed yet, and all of this step's
    home                 [B] int64: position j >= first of row b is fresh token home[b] + j - first, where first is
                         the beginning of the page its first query stands in, (lengths[b] - queries) // S * S

A query at position p sees j in full precision if j // S == p // S, else as the sealed page holds it. So what it sees
depends on p and j alone: not on how a prompt was cut into chunks, what was a prefix hit, or who was preempted.
Pages that a chunk fills are sealed before it attends.

How      The dequantisation is a tile's last step before the dot product. A key's scale is one factor for its whole row
         of scores, so it multiplies the score: int8 and e4m3 are exact in 16 bits. A 4-bit key's scale belongs
         to a channel: a tile lies within one page and reads the page's two rows of channels once. Channels d and
         d + D/2 ask for the same byte; the second time it comes from the cache.
Cost     As paged_attention, over 2 * G * (D + 4) bytes per position at 8 bits, 2 * G * (D/2 + 2 D / S + 2) at 4.
Sources  KIVI, Liu et al. 2024 (arXiv:2402.02750).
Story    notebooks/10_smaller_kv_cache.ipynb
"""

import torch

from minserve.kernels.kv_quantize import dequantize_rows, read_keys, read_values
from minserve.kernels.paged_attention import MOST_QUERIES, paged_attention_reference
from minserve.kernels.paged_check import check_plan
from minserve.kernels.prefill_attention import prefill_attention_reference
from minserve.kernels.quantized_check import check_scaled, check_sealed


# ---------------------------------------------------------------- the definitions
def scaled_attention_reference(
    q, k_cache, v_cache, k_scales, v_scales, pages, starts_q, lengths, window: int | None = None, sinks: int = 0
):  # fmt: skip
    """Dequantise all that the tables name, as a cache of B * M pages in order, and attend to that."""
    (B, M), P = pages.shape, len(k_cache)
    near = pages.clamp(0, P - 1).long().flatten()  # entries that nobody reads may say anything
    caches = ((k_cache, k_scales), (v_cache, v_scales))
    k, v = (dequantize_rows(x.view(torch.uint8)[near].view(x.dtype), s[near]) for x, s in caches)
    table = torch.arange(B * M, dtype=torch.int32, device=pages.device).view(B, M)
    return paged_attention_reference(q, k, v, table, starts_q, lengths, window, sinks)


def int4_attention_reference(
    q, k4, v4, k_affine, v_affine, fresh_k, fresh_v, home, pages, starts_q, lengths,
    window: int | None = None, sinks: int = 0,
):  # fmt: skip
    """Page by page of every row's queries: the pages before it as they are sealed, its own one fresh."""
    S, at = k4.shape[1], starts_q.tolist()
    out = torch.zeros_like(q)
    for b, n in enumerate(lengths.tolist()):
        first = n - (at[b + 1] - at[b])  # position of the row's first query
        own = max(first, 0) // S * S
        place = int(home[b]) - own  # of position 0 among the fresh tokens, were it there
        for begin in range(own, n if at[b + 1] > at[b] else 0, S):
            p, end = max(first, begin), min(begin + S, n)  # positions p .. end - 1 stand in this page
            j = torch.arange(end, device=q.device)
            seen = j >= 0 if window is None else (j > p - window) | (j < sinks)
            old, new = j[seen & (j < begin)], j[seen & (j >= begin)]
            slots = pages[b, old // S].long() * S + old % S
            k, v = (q.new_zeros(end, *fresh_k.shape[1:], dtype=torch.float32) for _ in range(2))
            k[old], k[new] = read_keys(k4, k_affine, slots), fresh_k[place + new].float()
            v[old], v[new] = read_values(v4, v_affine, slots), fresh_v[place + new].float()
            rows, span = (
                slice(at[b] + p - first, at[b] + end - first),
                torch.tensor([[0, 0], [end - p, end]]).T,
            )
            out[rows] = prefill_attention_reference(q[rows], k, v, *span, end - p, window, sinks)
    return out


# ---------------------------------------------------------------- the launchers
def scaled_decode(
    q, k_cache, v_cache, k_scales, v_scales, pages, starts_q, lengths, max_queries: int, max_length: int,
    window: int | None = None, sinks: int = 0,
):  # fmt: skip
    """Attend up to 16 new tokens per row over its 8-bit pages. Shapes: see the module docstring."""
    if max_queries > MOST_QUERIES:
        raise ValueError(
            f"scaled_decode: up to {max_queries} queries per row, and one step of decode has at most "
            f"{MOST_QUERIES}; use scaled_prefill"
        )
    cache, plan = (k_cache, v_cache, k_scales, v_scales), (pages, starts_q, lengths)
    check_scaled("scaled_decode", *cache)
    check_plan(
        "scaled_decode", q, k_cache, v_cache, *plan, max_queries, max_length, window, sinks, q.shape[2]
    )
    return scaled_attention_reference(q, *cache, *plan, window, sinks)


def scaled_prefill(
    q, k_cache, v_cache, k_scales, v_scales, pages, starts_q, lengths, max_queries: int,
    window: int | None = None, sinks: int = 0,
):  # fmt: skip
    """Causal attention of chunks over their rows' 8-bit pages."""
    cache, plan = (k_cache, v_cache, k_scales, v_scales), (pages, starts_q, lengths)
    room = pages.shape[-1] * k_cache.shape[1]
    check_scaled("scaled_prefill", *cache)
    check_plan("scaled_prefill", q, k_cache, v_cache, *plan, max_queries, room, window, sinks, q.shape[2])
    return scaled_attention_reference(q, *cache, *plan, window, sinks)


def int4_decode(
    q, k4, v4, k_affine, v_affine, fresh_k, fresh_v, home, pages, starts_q, lengths,
    max_queries: int, max_length: int, window: int | None = None, sinks: int = 0,
):  # fmt: skip
    """Attend one new token per row over its 4-bit pages and its own fresh one."""
    if max_queries > 1:
        raise ValueError(
            f"int4_decode: up to {max_queries} queries per row may stand in different pages; use int4_prefill"
        )
    cache, plan = (k4, v4, k_affine, v_affine, fresh_k, fresh_v, home), (pages, starts_q, lengths)
    _check_int4("int4_decode", q, *cache, *plan, max_queries, max_length, window, sinks)
    return int4_attention_reference(q, *cache, *plan, window, sinks)


def int4_prefill(
    q, k4, v4, k_affine, v_affine, fresh_k, fresh_v, home, pages, starts_q, lengths, max_queries: int,
    window: int | None = None, sinks: int = 0,
):  # fmt: skip
    """Causal attention of chunks over their rows' 4-bit pages, and the pages they stand in."""
    cache, plan = (k4, v4, k_affine, v_affine, fresh_k, fresh_v, home), (pages, starts_q, lengths)
    room = pages.shape[-1] * k4.shape[1]
    _check_int4("int4_prefill", q, *cache, *plan, max_queries, room, window, sinks)
    return int4_attention_reference(q, *cache, *plan, window, sinks)


def _check_int4(
    who, q, k4, v4, k_affine, v_affine, fresh_k, fresh_v, home, pages, starts_q, lengths, *limits
):  # fmt: skip
    check_sealed(who, fresh_k, fresh_v, k4, v4, k_affine, v_affine)
    if fresh_k.dtype != q.dtype or fresh_k.shape[2] != q.shape[2] or fresh_k.device != q.device:
        raise ValueError(
            f"{who}: fresh_k is {list(fresh_k.shape)} {fresh_k.dtype} on {fresh_k.device}, q is {list(q.shape)} "
            f"{q.dtype} on {q.device}; they must agree on channels, type and device"
        )
    if home.shape != lengths.shape or home.dtype != torch.int64 or home.device != q.device:
        raise ValueError(
            f"{who}: home is {list(home.shape)} {home.dtype} on {home.device}; {lengths.numel()} rows need "
            f"[{lengths.numel()}] torch.int64 on {q.device}, each where its fresh page begins"
        )
    check_plan(who, q, k4, v4, pages, starts_q, lengths, *limits, k4.shape[3])
