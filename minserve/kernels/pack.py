"""Pack a step: from rows of a plan to the flat ids, positions and cache slots that a forward pass reads.

    place t of row b  (starts[b] <= t < starts[b + 1])  holds position p = computed[b] + t - starts[b]:
    ids[t] = tokens[seats[b], p]        positions[t] = p        slots[t] = pages[seats[b], p // S] * S + p % S

Shapes
    seats      [B] int32        which row of the persistent buffers each row of the step reads
    starts     [B+1] int32      row b owns the flat places starts[b] : starts[b + 1], from starts[0] = 0 on
    computed   [B] int32        tokens of row b that are in the cache already: its first place is the next one
    tokens     [N, C] int32     the tokens of N seats, C places each; rows may be strided
    pages      [N, M] int32     their page tables: position p lives in page p // S; rows may be strided
    page_size                   S, slots per page
    total                       T places are packed, at least starts[B]; the rest is padding
    returns    ids, positions, slots    [T] int64 each; padding: id 0, position 0, slot -1, which is nowhere

How      A place does not know its row. It searches for it in `starts` by halving: log2(B) loads that all places
         share. The plan stays on the GPU as five small tensors, whatever the number of tokens.
Cost     no flops; 24 * T bytes written, about 8 * T gathered.
Trap     page * S passes 2**31 before memory ends when slots are small: slots are int64. A place of the padding
         has no row: its loads are masked, not clamped to somebody else's.
Story    notebooks/07_continuous_batching.ipynb
"""

import numpy as np
import torch

from minserve.kernels import on_triton, tl, triton

BLOCK = 128  # places per program


# ---------------------------------------------------------------- the definition
def pack_reference(seats, starts, computed, tokens, pages, page_size: int, total: int):
    """In numpy: the step waits for this on a CPU, and each small tensor operation would pay its dispatch."""
    device = starts.device
    seats, starts, computed, tokens, pages = (
        x.cpu().numpy() for x in (seats, starts, computed, tokens, pages)
    )
    live = starts[-1]
    row = np.repeat(np.arange(len(seats)), starts[1:] - starts[:-1])  # [live]: whose place is it
    position = np.arange(live) + (computed - starts[:-1])[row]
    seat = seats[row]
    out = np.zeros((3, total), dtype=np.int64)  # ids, positions, slots
    out[2, live:] = -1
    out[0, :live] = tokens[seat, position]
    out[1, :live] = position
    out[2, :live] = pages[seat, position // page_size].astype(np.int64) * page_size + position % page_size
    return torch.from_numpy(out).to(device).unbind()


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _pack_kernel(
    seats_ptr, starts_ptr, computed_ptr, tokens_ptr, pages_ptr, ids_ptr, positions_ptr, slots_ptr,
    rows, halvings, total, tokens_stride, pages_stride,     # 2 ** halvings > rows
    S: tl.constexpr, BLOCK: tl.constexpr,
):
    # Who am I?  One program = BLOCK flat places.
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)                                     # [BLOCK]
    live = place < tl.load(starts_ptr + rows)                                                  # [BLOCK]

    # What do I carry?  The rows that may be mine, low .. high - 1: starts[low] <= place < starts[high].
    low = tl.zeros([BLOCK], tl.int32)                                                          # [BLOCK]
    high = low + rows                                                                          # [BLOCK]
    for _ in range(halvings):
        middle = (low + high) // 2                                                             # [BLOCK]
        below = tl.load(starts_ptr + middle, mask=live, other=0) <= place                      # [BLOCK]
        low, high = tl.where(below, middle, low), tl.where(below, high, middle)

    # What do I read?  My row's numbers, then my token and my page.
    position = tl.load(computed_ptr + low, mask=live, other=0) + place
    position -= tl.load(starts_ptr + low, mask=live, other=0)                                  # [BLOCK]
    seat = tl.load(seats_ptr + low, mask=live, other=0).to(tl.int64)                           # [BLOCK]
    token = tl.load(tokens_ptr + seat * tokens_stride + position, mask=live, other=0)          # [BLOCK]
    page = tl.load(pages_ptr + seat * pages_stride + position // S, mask=live, other=0)        # [BLOCK]
    slot = page.to(tl.int64) * S + position % S                                                # [BLOCK]
    inside = place < total                                                                     # [BLOCK]
    tl.store(ids_ptr + place, token.to(tl.int64), mask=inside)
    tl.store(positions_ptr + place, tl.where(live, position, 0).to(tl.int64), mask=inside)
    tl.store(slots_ptr + place, tl.where(live, slot, -1), mask=inside)
# fmt: on


# ---------------------------------------------------------------- the launcher
def pack(seats, starts, computed, tokens, pages, page_size: int, total: int):
    """Flat ids, positions and slots of a step. Shapes: see the module docstring."""
    _check(seats, starts, computed, tokens, pages, page_size, total)
    return launch(seats, starts, computed, tokens, pages, page_size, total)


def launch(seats, starts, computed, tokens, pages, page_size: int, total: int):
    """Unchecked, for who made the buffers itself and need not look at them again in every step."""
    if not on_triton(starts):
        return pack_reference(seats, starts, computed, tokens, pages, page_size, total)
    ids, positions, slots = (
        torch.empty(total, dtype=torch.int64, device=starts.device) for _ in range(3)
    )  # [T] each
    if total:
        rows = len(seats)
        _pack_kernel[(triton.cdiv(total, BLOCK),)](
            seats, starts, computed, tokens, pages, ids, positions, slots,
            rows, rows.bit_length(), total, tokens.stride(0), pages.stride(0), S=page_size, BLOCK=BLOCK,
        )  # fmt: skip
    return ids, positions, slots


def _check(seats, starts, computed, tokens, pages, page_size, total):
    B = seats.numel()
    for name, x, shape in (
        ("seats", seats, (B,)),
        ("starts", starts, (B + 1,)),
        ("computed", computed, (B,)),
        ("tokens", tokens, (len(tokens), tokens.shape[-1])),
        ("pages", pages, (len(tokens), pages.shape[-1])),
    ):
        if x.shape != shape or x.dtype != torch.int32 or x.device != starts.device or x.stride(-1) != 1:
            raise ValueError(
                f"pack: {name} is {list(x.shape)} {x.dtype} on {x.device} with strides {list(x.stride())}; "
                f"{B} rows need {list(shape)} torch.int32 on {starts.device}, the last stride 1"
            )
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"pack: a page of {page_size} slots; it must be a power of two")
    if not starts.is_cuda:  # reading a tensor would make the CPU wait for the GPU
        _check_values(
            *(x.cpu().numpy() for x in (seats, starts, computed)), tokens.shape, pages.shape, page_size, total
        )


def _check_values(seats, starts, computed, tokens_shape, pages_shape, page_size, total):
    counts = starts[1:] - starts[:-1]  # [B], in numpy, as the definition
    if starts[0] or (counts < 0).any() or starts[-1] > total:
        raise ValueError(f"pack: starts {starts.tolist()} must rise from 0 to at most total = {total}")
    busy = counts > 0
    if not busy.any():
        return
    seats, computed, ends = seats[busy], computed[busy], (computed + counts)[busy]
    room = min(tokens_shape[1], pages_shape[1] * page_size)
    if ends.max() > room or computed.min() < 0:
        raise ValueError(
            f"pack: a row reaches {ends.max()} tokens; a seat holds {room} "
            f"(tokens {list(tokens_shape)}, {pages_shape[1]} pages of {page_size})"
        )
    if seats.min() < 0 or seats.max() >= tokens_shape[0]:
        raise ValueError(f"pack: seats {seats.tolist()} must lie between 0 and {tokens_shape[0] - 1}")
