"""Chunked prefill over quantized pages: many new tokens per row, each attending to everything before it.

    scaled_prefill    int8 or fp8 pages
    int4_prefill      4-bit pages, and for every query the page it stands in from the fresh tokens

Definitions, shapes and what is seen are quantized_attention's; a row may have any number of queries.

How      paged_prefill's loops over the stored tiles: what every query of the program sees in full without a mask, then
         the diagonal. With 4 bits the diagonal goes in steps of pages, and is crossed twice: once in sealed pages, by
         the queries that stand behind them, and once in fresh tokens, by the queries that stand among them.
Cost     As paged_prefill. Every program dequantises the keys it reads: a chunk of many programs does it many
         times, and gains nothing over 16-bit pages but the bytes.
Sources  As quantized_attention; chunked prefill, Agrawal et al. 2024 (arXiv:2403.02310).
Story    notebooks/10_smaller_kv_cache.ipynb
"""

import torch

from minserve.kernels import architecture, on_triton, tl, triton
from minserve.kernels.decode_attention import LOG2_E
from minserve.kernels.paged_check import check_plan
from minserve.kernels.paged_prefill import tiles as paged_tiles
from minserve.kernels.quantized_attention import int4_attention_reference, scaled_attention_reference
from minserve.kernels.quantized_check import check_int4, check_scaled
from minserve.kernels.quantized_tiles import attend_fresh_tile, attend_stored_tile, quantized_tiles


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _quantized_prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, fresh_k_ptr, fresh_v_ptr, home_ptr,  # 8 bits: no fresh, no home
    pages_ptr, starts_q_ptr, lengths_ptr, out_ptr, q_stride, pages_stride, scale,              # log2(e) / sqrt(D)
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,              # WINDOW: positions a query sees, or None for all
    BLOCK_M: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # Who am I?  As in _paged_prefill_kernel: BLOCK_M rows (query x head) of one key head of one row, last ones first.
    INT4: tl.constexpr = home_ptr is not None
    R: tl.constexpr = H // G
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    q_start, length = tl.load(starts_q_ptr + b), tl.load(lengths_ptr + b)
    num_queries = tl.load(starts_q_ptr + b + 1) - q_start
    if first_row >= num_queries * R:
        return                                              # fewer queries than the most; padding has none
    row = first_row + tl.arange(0, BLOCK_M)                                                    # [M]
    d = tl.arange(0, BLOCK_D)                                                                  # [D]
    token, head = row // R, g * R + row % R                                                    # [M]
    live = (token < num_queries)[:, None] & (d < D)[None, :]                                   # [M, D]
    where = (q_start + token).to(tl.int64)                                                     # [M]
    q = tl.load(q_ptr + (where * q_stride + head * D)[:, None] + d[None, :], mask=live, other=0.0)    # [M, D]
    table_ptr = pages_ptr + b.to(tl.int64) * pages_stride
    BYTES: tl.constexpr = D // 2 if INT4 else D             # my group's head, in every slot
    k_ptr += g * BYTES
    v_ptr += g * BYTES
    k_scales_ptr += g * (D if INT4 else 1)
    v_scales_ptr += g * (2 if INT4 else 1)

    # What do I carry?  The online softmax: running maximum, running sum, unnormalised output.
    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)                                # [M]
    running_sum = tl.zeros([BLOCK_M], tl.float32)                                              # [M]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)                                             # [M, D]

    # What do I read?  Stored positions 0 .. stop - 1, of which all my rows see the first `full`.
    offset = length - num_queries
    position = offset + token                                                                  # [M]
    first = offset + first_row // R                         # position of my first row
    last = offset + tl.minimum((first_row + BLOCK_M - 1) // R, num_queries - 1)              # and of my last
    stop, full, limit = tl.maximum(last + 1, 0), tl.maximum(first + 1, 0), position
    if INT4:
        stop, full = tl.maximum(last, 0) // S * S, tl.maximum(first, 0) // S * S
        limit = position // S * S - 1                                                          # [M]
    free, oldest = 0, 0
    if WINDOW is not None:
        # Positions below `oldest` are out of every row's window, except the sinks; below `free`, out of some.
        oldest = tl.maximum(first - WINDOW + 1, 0)
        begin = tl.minimum(oldest // STEP * STEP, stop)
        free = tl.cdiv(tl.maximum(last - WINDOW + 1, 0), STEP) * STEP
        sink_tiles = tl.cdiv(tl.minimum(SINKS, begin), STEP)
        for i in range(0, sink_tiles + tl.cdiv(tl.maximum(tl.minimum(free, stop) - begin, 0), STEP)):
            start = tl.where(i < sink_tiles, i * STEP, begin + (i - sink_tiles) * STEP)
            running_max, running_sum, acc = attend_stored_tile(
                running_max, running_sum, acc, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, scale,
                start, position, limit, oldest, stop - 1,
                True, INT4, S, G, D, WINDOW, SINKS, STEP, BLOCK_N, BLOCK_D,
            )
    diagonal = tl.maximum(full // STEP * STEP, free)
    for start in range(free, diagonal, STEP):
        running_max, running_sum, acc = attend_stored_tile(
            running_max, running_sum, acc, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, scale,
            start, position, limit, oldest, stop - 1,
            False, INT4, S, G, D, WINDOW, SINKS, STEP, BLOCK_N, BLOCK_D,
        )
    for start in range(diagonal, stop, STEP):
        running_max, running_sum, acc = attend_stored_tile(
            running_max, running_sum, acc, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, scale,
            start, position, limit, oldest, stop - 1,
            True, INT4, S, G, D, WINDOW, SINKS, STEP, BLOCK_N, BLOCK_D,
        )
    if INT4:
        place = tl.load(home_ptr + b).to(tl.int64) - tl.maximum(offset, 0) // S * S     # of position 0, were it fresh
        for start in range(full, last + 1, STEP):
            running_max, running_sum, acc = attend_fresh_tile(
                running_max, running_sum, acc, q, fresh_k_ptr + g * D, fresh_v_ptr + g * D, place, scale,
                start, position, oldest, last, S, G, D, WINDOW, SINKS, STEP, BLOCK_N, BLOCK_D,
            )

    out = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]    # [M, D]; rows that saw nothing: 0 / 1
    out_offset = ((where * H + head) * D)[:, None] + d[None, :]                                # [M, D]
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=live)
# fmt: on


# ---------------------------------------------------------------- the launchers
def scaled_prefill(
    q, k_cache, v_cache, k_scales, v_scales, pages, starts_q, lengths, max_queries: int,
    window: int | None = None, sinks: int = 0,
):  # fmt: skip
    """Causal attention of chunks over their rows' 8-bit pages. Shapes: see quantized_attention's docstring."""
    cache, plan = (k_cache, v_cache, k_scales, v_scales), (pages, starts_q, lengths)
    room = pages.shape[-1] * k_cache.shape[1]
    check_scaled("scaled_prefill", *cache)
    check_plan("scaled_prefill", q, k_cache, v_cache, *plan, max_queries, room, window, sinks, q.shape[2])
    if not on_triton(q):
        return scaled_attention_reference(q, *cache, *plan, window, sinks)
    return _attend(q, cache, (None, None, None), plan, max_queries, window, sinks)


def int4_prefill(
    q, k4, v4, k_affine, v_affine, fresh_k, fresh_v, home, pages, starts_q, lengths, max_queries: int,
    window: int | None = None, sinks: int = 0,
):  # fmt: skip
    """Causal attention of chunks over their rows' 4-bit pages, and the fresh pages they stand in."""
    cache, fresh, plan = (k4, v4, k_affine, v_affine), (fresh_k, fresh_v, home), (pages, starts_q, lengths)
    room = pages.shape[-1] * k4.shape[1]
    check_int4("int4_prefill", q, *cache, *fresh, *plan, max_queries, room, window, sinks)
    if not on_triton(q):
        return int4_attention_reference(q, *cache, *fresh, *plan, window, sinks)
    return _attend(q, cache, fresh, plan, max_queries, window, sinks)


def _attend(q, cache, fresh, plan, max_queries: int, window: int | None, sinks: int):
    (T, H, D), B, (_, S, G, _) = q.shape, len(plan[2]), cache[0].shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block = tiles(D, q.dtype, architecture(q.device), S if fresh[0] is not None else None)
    if T and B and max_queries:
        grid = (B * G, triton.cdiv(max_queries * (H // G), block["BLOCK_M"]))
        _quantized_prefill_kernel[grid](
            q, *cache, *fresh, *plan, out, q.stride(0), plan[0].stride(0), LOG2_E * D**-0.5,
            H=H, G=G, D=D, S=S, WINDOW=window, SINKS=sinks, **block,
        )  # fmt: skip
    return out


def tiles(D: int, dtype, arch: str, page_size: int | None) -> dict:
    return quantized_tiles(paged_tiles(D, dtype, arch), page_size)
