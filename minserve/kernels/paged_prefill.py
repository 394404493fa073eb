"""Paged prefill: a chunk of many new tokens per row, each attending to everything before it in its pages.

The definition, the shapes and what is never read are `paged_attention`'s; here a row may have any number of
queries, in chunks or whole prompts, and the first of them may stand anywhere.

How      prefill_attention's two loops, with a look into the page table before each tile of keys: first the
         tiles that every query of the program sees in full, which need no mask at all, not even on the table;
         then the diagonal. With a window, the sinks and the window's edge come before, masked.
         A chunk late in a long prompt has few rows and a long past: this kernel does not split the past.
Cost     As prefill_attention: 4 * H * D flops per visible (query, position) pair; a table entry per page and tile.
Sources  As prefill_attention; chunked prefill, Agrawal et al. 2024 (arXiv:2403.02310).
Story    notebooks/05_paged_attention.ipynb
"""

import torch

from minserve.kernels import architecture, on_triton, tl, triton
from minserve.kernels.decode_attention import LOG2_E
from minserve.kernels.paged_attention import attend_page_tile, paged_attention_reference, with_lookup
from minserve.kernels.paged_check import check_paged
from minserve.kernels.prefill_attention import tiles as prefill_tiles


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _paged_prefill_kernel(
    q_ptr, k_ptr, v_ptr, pages_ptr, starts_q_ptr, lengths_ptr, out_ptr,
    q_stride, k_stride_p, k_stride_s, v_stride_p, v_stride_s, pages_stride, scale,    # log2(e) / sqrt(D)
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,              # WINDOW: positions a query sees, or None for all
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # Who am I?  One program = BLOCK_M rows (query x head of the group) of one key head of one row of the step.
    # The last tile of a chunk sees most positions, so it goes first: no long straggler at the end.
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
    k_ptr += g * D                                          # my group's head, in every slot
    v_ptr += g * D

    # What do I carry?  The online softmax: running maximum, running sum, unnormalised output.
    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)                                # [M]
    running_sum = tl.zeros([BLOCK_M], tl.float32)                                              # [M]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)                                             # [M, D]

    # What do I read?  Positions 0 .. last, a tile at a time; [free, diagonal) is what all my rows see in full.
    offset = length - num_queries
    position = offset + token                                                                  # [M]
    first = offset + first_row // R                         # position of my first row
    last = offset + tl.minimum((first_row + BLOCK_M - 1) // R, num_queries - 1)              # and of my last
    stop = tl.maximum(last + 1, 0)
    free, oldest = 0, 0
    if WINDOW is not None:
        # Positions below `oldest` are out of every row's window, except the sinks; below `free`, out of some.
        oldest = tl.maximum(first - WINDOW + 1, 0)
        begin = oldest // BLOCK_N * BLOCK_N
        free = tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
        for start in range(0, tl.minimum(SINKS, begin), BLOCK_N):
            running_max, running_sum, acc = attend_page_tile(
                running_max, running_sum, acc, q, k_ptr, v_ptr, table_ptr,
                k_stride_p, k_stride_s, v_stride_p, v_stride_s, scale, start, position, oldest, last,
                True, S, D, WINDOW, SINKS, BLOCK_N, BLOCK_D,
            )
        for start in range(begin, tl.minimum(free, stop), BLOCK_N):
            running_max, running_sum, acc = attend_page_tile(
                running_max, running_sum, acc, q, k_ptr, v_ptr, table_ptr,
                k_stride_p, k_stride_s, v_stride_p, v_stride_s, scale, start, position, oldest, last,
                True, S, D, WINDOW, SINKS, BLOCK_N, BLOCK_D,
            )
    diagonal = tl.maximum(tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N, free)
    for start in range(free, diagonal, BLOCK_N):
        running_max, running_sum, acc = attend_page_tile(
            running_max, running_sum, acc, q, k_ptr, v_ptr, table_ptr,
            k_stride_p, k_stride_s, v_stride_p, v_stride_s, scale, start, position, oldest, last,
            False, S, D, WINDOW, SINKS, BLOCK_N, BLOCK_D,
        )
    for start in range(diagonal, stop, BLOCK_N):
        running_max, running_sum, acc = attend_page_tile(
            running_max, running_sum, acc, q, k_ptr, v_ptr, table_ptr,
            k_stride_p, k_stride_s, v_stride_p, v_stride_s, scale, start, position, oldest, last,
            True, S, D, WINDOW, SINKS, BLOCK_N, BLOCK_D,
        )

    out = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]    # [M, D]; rows that saw nothing: 0 / 1
    out_offset = ((where * H + head) * D)[:, None] + d[None, :]                                # [M, D]
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=live)
# fmt: on


# ---------------------------------------------------------------- the launcher
def paged_prefill(
    q, k_cache, v_cache, pages, starts_q, lengths, max_queries: int,
    window: int | None = None, sinks: int = 0,
):  # fmt: skip
    """Causal attention of chunks over their rows' pages. Shapes: see paged_attention's docstring."""
    (T, H, D), (_, S, G, _), B = q.shape, k_cache.shape, len(lengths)
    room = pages.shape[-1] * S
    check_paged(
        "paged_prefill", q, k_cache, v_cache, pages, starts_q, lengths, max_queries, room, window, sinks
    )
    if not on_triton(q):
        return paged_attention_reference(q, k_cache, v_cache, pages, starts_q, lengths, window, sinks)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block = tiles(D, q.dtype, architecture(q.device))
    if T and B and max_queries:
        grid = (B * G, triton.cdiv(max_queries * (H // G), block["BLOCK_M"]))
        _paged_prefill_kernel[grid](
            q, k_cache, v_cache, pages, starts_q, lengths, out,
            q.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2], pages.stride(0), LOG2_E * D**-0.5,
            H=H, G=G, D=D, S=S, WINDOW=window, SINKS=sinks, **block,
        )  # fmt: skip
    return out


def tiles(D: int, dtype, arch: str) -> dict:
    return with_lookup(prefill_tiles(D, dtype, arch))
