"""Paged attention over keys and values of 8 or 4 bits, which become numbers only where they are used.

    scaled_decode    int8 or fp8 pages, a scale per token and head
    int4_decode      4-bit pages; the page that a query stands in is read from the fresh tokens

What is attended to, and every argument not named here, is as in paged_attention. Chunks: quantized_prefill.

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
         d + D/2 ask for the same byte; the second time it comes from the cache. A tile of a small page
         does the work of a softmax for few positions: pages of 64 cost the least.
Cost     As paged_attention, over 2 * G * (D + 4) bytes per position at 8 bits, 2 * G * (D/2 + 2 D / S + 2) at 4.
Sources  KIVI, Liu et al. 2024 (arXiv:2402.02750).
Story    notebooks/10_smaller_kv_cache.ipynb
"""

import torch

from minserve.kernels import architecture, has_matrix_units, on_triton, processors, tl, triton
from minserve.kernels.decode_attention import LOG2_E, MERGE_TILE, _merge_kernel, splits_for
from minserve.kernels.kv_quantize import dequantize_rows, read_keys, read_values
from minserve.kernels.paged_attention import MOST_QUERIES, paged_attention_reference
from minserve.kernels.paged_attention import tiles as paged_tiles
from minserve.kernels.paged_check import check_plan, check_trees
from minserve.kernels.prefill_attention import prefill_attention_reference
from minserve.kernels.quantized_check import check_int4, check_scaled
from minserve.kernels.quantized_tiles import attend_fresh_tile, attend_stored_tile, quantized_tiles


# ---------------------------------------------------------------- the definitions
def scaled_attention_reference(
    q, k_cache, v_cache, k_scales, v_scales, pages, starts_q, lengths,
    window: int | None = None, sinks: int = 0, trees=None,
):  # fmt: skip
    """Dequantise all that the tables name, as a cache of B * M pages in order, and attend to that."""
    (B, M), P = pages.shape, len(k_cache)
    near = pages.clamp(0, P - 1).long().flatten()  # entries that nobody reads may say anything
    caches = ((k_cache, k_scales), (v_cache, v_scales))
    k, v = (dequantize_rows(x.view(torch.uint8)[near].view(x.dtype), s[near]) for x, s in caches)
    table = torch.arange(B * M, dtype=torch.int32, device=pages.device).view(B, M)
    return paged_attention_reference(q, k, v, table, starts_q, lengths, window, sinks, trees)


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


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _quantized_decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, fresh_k_ptr, fresh_v_ptr, home_ptr,  # 8 bits: no fresh, no home
    pages_ptr, starts_q_ptr, lengths_ptr, trees_ptr,        # trees_ptr may be None, and is with 4 bits
    out_ptr, lse_ptr,                                  # [splits, T, H, D], [splits, T, H] or None: 1 split
    q_stride, pages_stride, tokens, splits, scale,          # T; log2(e) / sqrt(D)
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,              # WINDOW: positions a query sees, or None for all
    BLOCK_R: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # Who am I?  As in _paged_decode_kernel: one split of BLOCK_R rows (query x head of one group) of one row.
    INT4: tl.constexpr = home_ptr is not None
    R: tl.constexpr = H // G
    b, g, split = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    q_start, length = tl.load(starts_q_ptr + b), tl.load(lengths_ptr + b)
    num_queries = tl.load(starts_q_ptr + b + 1) - q_start
    first_row = tl.program_id(2) * BLOCK_R
    if first_row >= num_queries * R:
        return                                              # fewer queries than the most; padding has none
    row = first_row + tl.arange(0, BLOCK_R)                                                    # [R]
    d = tl.arange(0, BLOCK_D)                                                                  # [D]
    token, head = row // R, g * R + row % R                                                    # [R]
    own = (token < num_queries)[:, None] & (d < D)[None, :]                                    # [R, D]
    where = (q_start + token).to(tl.int64)                                                     # [R]
    q = tl.load(q_ptr + (where * q_stride + head * D)[:, None] + d[None, :], mask=own, other=0.0)     # [R, D]
    first = length - num_queries                            # position of the first query
    position, tree = first + token, None                                                       # [R]
    plain = first + 1                                       # positions that all queries see in full
    if trees_ptr is not None:
        tree = tl.load(trees_ptr + where, mask=token < num_queries, other=0)                   # [R]
        plain = first - 62
    table_ptr = pages_ptr + b.to(tl.int64) * pages_stride
    BYTES: tl.constexpr = D // 2 if INT4 else D             # my group's head, in every slot
    k_ptr += g * BYTES
    v_ptr += g * BYTES
    k_scales_ptr += g * (D if INT4 else 1)
    v_scales_ptr += g * (2 if INT4 else 1)

    # What do I carry?  The online softmax: running maximum, running sum, unnormalised output.
    running_max = tl.full([BLOCK_R], -float("inf"), tl.float32)                                # [R]
    running_sum = tl.zeros([BLOCK_R], tl.float32)                                              # [R]
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)                                             # [R, D]

    # What do I read?  My share of the stored tiles, sinks first; then the page of the query, if it is fresh.
    stop = length                                           # positions below are stored
    if INT4:
        stop = tl.maximum(length - 1, 0) // S * S
    begin, oldest, sink_tiles = 0, 0, 0
    if WINDOW is not None:
        oldest = tl.maximum(first - WINDOW + 1, 0)
        begin = tl.minimum(oldest // STEP * STEP, stop)
        sink_tiles = tl.cdiv(tl.minimum(SINKS, begin), STEP)
    tiles = sink_tiles + tl.cdiv(stop - begin, STEP)
    share = tl.cdiv(tiles, splits)
    mine, end = split * share, tl.minimum((split + 1) * share, tiles)
    if WINDOW is None:                                      # tiles that all queries see in full need no mask
        full = tl.maximum(mine, tl.minimum(end, tl.maximum(stop if INT4 else plain, 0) // STEP))
        for i in range(mine, full):
            running_max, running_sum, acc = attend_stored_tile(
                running_max, running_sum, acc, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, scale,
                i * STEP, position, position, oldest, stop - 1,
                False, INT4, S, G, D, WINDOW, SINKS, STEP, BLOCK_N, BLOCK_D,
            )
        mine = full
    for i in range(mine, end):
        start = i * STEP
        if WINDOW is not None:
            start = tl.where(i < sink_tiles, start, begin + (i - sink_tiles) * STEP)
        running_max, running_sum, acc = attend_stored_tile(
            running_max, running_sum, acc, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, scale,
            start, position, position, oldest, stop - 1,
            True, INT4, S, G, D, WINDOW, SINKS, STEP, BLOCK_N, BLOCK_D, tree,
        )
    if INT4:
        place = tl.load(home_ptr + b).to(tl.int64) - stop   # of position 0 among the fresh tokens, were it there
        for start in range(stop, tl.where(split == splits - 1, length, stop), STEP):
            running_max, running_sum, acc = attend_fresh_tile(
                running_max, running_sum, acc, q, fresh_k_ptr + g * D, fresh_v_ptr + g * D, place, scale,
                start, position, oldest, length - 1, S, G, D, WINDOW, SINKS, STEP, BLOCK_N, BLOCK_D,
            )

    out = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]    # [R, D]; rows that saw nothing: 0 / 1
    at = (tl.cast(split, tl.int64) * tokens + where) * H + head                                # [R]
    tl.store(out_ptr + at[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=own)
    if lse_ptr is not None:
        # Base 2, like everything here. A split that saw nothing has max -inf: its weight in the merge is 0.
        lse = running_max + tl.log2(tl.where(running_sum > 0, running_sum, 1.0))               # [R]
        tl.store(lse_ptr + at, lse, mask=token < num_queries)
# fmt: on


# ---------------------------------------------------------------- the launchers
def scaled_decode(
    q, k_cache, v_cache, k_scales, v_scales, pages, starts_q, lengths, max_queries: int, max_length: int,
    window: int | None = None, sinks: int = 0, trees=None,
):  # fmt: skip
    """Attend up to 16 new tokens per row over its 8-bit pages. Shapes: see the module docstring."""
    if max_queries > MOST_QUERIES:
        raise ValueError(
            f"scaled_decode: up to {max_queries} queries per row, and one step of decode has at most "
            f"{MOST_QUERIES}; use scaled_prefill"
        )
    cache, plan = (k_cache, v_cache, k_scales, v_scales), (pages, starts_q, lengths)
    limits = max_queries, max_length, window, sinks
    check_scaled("scaled_decode", *cache)
    check_plan("scaled_decode", q, k_cache, v_cache, *plan, *limits, q.shape[2])
    check_trees("scaled_decode", q, trees, window)
    if not on_triton(q):
        return scaled_attention_reference(q, *cache, *plan, window, sinks, trees)
    return attend_in_splits(q, cache, (None, None, None), plan, *limits, trees=trees)


def int4_decode(
    q, k4, v4, k_affine, v_affine, fresh_k, fresh_v, home, pages, starts_q, lengths,
    max_queries: int, max_length: int, window: int | None = None, sinks: int = 0,
):  # fmt: skip
    """Attend one new token per row over its 4-bit pages and its own fresh one."""
    if max_queries > 1:
        raise ValueError(
            f"int4_decode: up to {max_queries} queries per row may stand in different pages; use int4_prefill"
        )
    cache, fresh = (k4, v4, k_affine, v_affine), (fresh_k, fresh_v, home)
    plan, limits = (pages, starts_q, lengths), (max_queries, max_length, window, sinks)
    check_int4("int4_decode", q, *cache, *fresh, *plan, *limits)
    if not on_triton(q):
        return int4_attention_reference(q, *cache, *fresh, *plan, window, sinks)
    return attend_in_splits(q, cache, fresh, plan, *limits)


def attend_in_splits(
    q, cache, fresh, plan, max_queries: int, max_length: int, window: int | None, sinks: int,
    splits: int | None = None, trees=None,
):  # fmt: skip
    """The launch itself. The number of splits changes the time, never the answer."""
    (T, H, D), B, (_, S, G, _) = q.shape, len(plan[2]), cache[0].shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if T == 0 or B == 0 or max_queries == 0:
        return out
    block = tiles(
        D, q.dtype, architecture(q.device), max_queries * (H // G), S if fresh[0] is not None else None
    )
    programs = B * G, triton.cdiv(max_queries * (H // G), block["BLOCK_R"])
    if splits is None:
        visible = max_length if window is None else min(max_length, window + max_queries - 1 + sinks)
        stored = triton.cdiv(visible, block["STEP"])
        splits = splits_for(programs[0] * programs[1], stored, processors(q.device))
    partial, lse = out, None
    if splits > 1:
        partial = torch.empty((splits, T, H, D), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, T, H), dtype=torch.float32, device=q.device)
    _quantized_decode_kernel[(programs[0], splits, programs[1])](
        q, *cache, *fresh, *plan, trees, partial, lse, q.stride(0), plan[0].stride(0),
        T, splits, LOG2_E * D**-0.5, H=H, G=G, D=D, S=S, WINDOW=window, SINKS=sinks, **block,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(T * H,)](
            partial, lse, out, T * H, splits, D=D, TILE=MERGE_TILE, BLOCK_D=block["BLOCK_D"]
        )  # fmt: skip
    return out


def tiles(D: int, dtype, arch: str, rows: int, page_size: int | None) -> dict:
    block = quantized_tiles(paged_tiles(D, dtype, arch, rows), page_size)
    if not has_matrix_units(dtype, arch):
        block["num_warps"] = (
            4 if page_size is None and arch == "sm_80" else 8
        )  # multiply-adds spill with the other
    return block
