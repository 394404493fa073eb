"""A tile of keys and values on its way from quantized pages into the online softmax: what both attentions share.

    attend_stored_tile   loads positions start .. start + STEP - 1 through the page table and makes numbers of them
    attend_fresh_tile    the same for tokens whose page is not sealed yet (4 bits), which are numbers already
    quantized_tiles      the dense kernel's tile sizes, changed to what a quantized tile wants

paged_attention.attend_page_tile is the same step over pages in 16 bits; here only the loads differ. A scale per key
multiplies its score; everything else is applied before the dot product, in fp32, and rounded to q's type. (A value's
scale could multiply its weight, but a weight times a scale may be too small for fp16.)

A 4-bit tile lies within one page, whose channels have their scales once: STEP = min(S, BLOCK_N) positions of it. Pages
of fewer than the 16 positions that `tl.dot` asks for leave the rest of the tile empty.
Story    notebooks/10_smaller_kv_cache.ipynb
"""

from minserve.kernels import tl, triton
from minserve.kernels.paged_attention import on_branch


# fmt: off
@triton.jit
def _softmax_step(running_max, running_sum, acc, q, k, v, factor, seen, MASKED: tl.constexpr):
    """One step of the online softmax: keys and values [N, D] pass the rows of q; a factor multiplies their scores."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * factor                            # [R, N]
    if MASKED:
        score = tl.where(seen, score, -float("inf"))
    new_max = tl.maximum(running_max, tl.max(score, axis=1))                                   # [R]
    base_max = new_max
    if MASKED:
        base_max = tl.where(new_max == -float("inf"), 0.0, new_max)    # nothing seen yet: no inf - inf
    shrink = tl.exp2(running_max - base_max)                # rescales what was summed under the old maximum
    weight = tl.exp2(score - base_max[:, None])                                                # [R, N]
    running_sum = running_sum * shrink + tl.sum(weight, axis=1)                                # [R]
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")         # [R, D]
    return new_max, running_sum, acc


@triton.jit
def _nibbles(bytes_ptr, live, shift):
    """The numbers 0 .. 15 in fp32, without a conversion: as the last bits of 2**23."""
    byte = tl.load(bytes_ptr, mask=live, other=0).to(tl.int32)
    return ((byte >> shift & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def attend_stored_tile(
    running_max, running_sum, acc, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, scale,
    start, position, limit, oldest, newest,     # a row sees up to its limit; oldest .. newest are mine to read
    MASKED: tl.constexpr, INT4: tl.constexpr, S: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    tree=None,                                              # [R] words, if there are trees
):
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)                                        # [N], [D]
    j = start + n                                                                              # [N]
    PARTIAL: tl.constexpr = MASKED or STEP < BLOCK_N
    live, mine, seen = (d < D)[None, :], None, None         # [1, D]; all true when D is a power of 2
    OTHER: tl.constexpr = 0 if PARTIAL else None
    if PARTIAL:
        mine = (j <= newest) & (n < STEP)                                                      # [N]
        if WINDOW is not None:
            if INT4:                                        # the first to see a page as sealed stands behind it
                oldest = tl.maximum(oldest, (start // S + 1) * S - WINDOW + 1)
            mine = mine & ((j >= oldest) | (j < SINKS))
        live = live & mine[:, None]                                                            # [N, D]
        seen = (j[None, :] <= limit[:, None]) & mine[None, :]                                  # [R, N]
        if WINDOW is not None:
            seen = seen & ((j[None, :] > position[:, None] - WINDOW) | (j < SINKS)[None, :])
        if tree is not None:
            seen = seen & on_branch(tree, position, j)
    if INT4:
        HALF: tl.constexpr = D // 2
        page = tl.load(table_ptr + start // S, mask=(start + STEP > oldest) | (start < SINKS), other=0).to(tl.int64)
        slot = page * S + j % S                             # [N]; int64: slot * G * D passes 2**31 in a big cache
        at = (slot * G * HALF)[:, None] + (d % HALF)[None, :]                                  # [N, D]
        shift = (d // HALF * 4)[None, :]                    # 4 for the upper half of the channels
        channel = k_scales_ptr + page * 2 * G * D + d                                          # [D]
        k_scale = tl.load(channel, mask=d < D, other=0.0).to(tl.float32)                       # [D]
        k_least = tl.load(channel + G * D, mask=d < D, other=0.0).to(tl.float32)               # [D]
        k = (k_least[None, :] + _nibbles(k_ptr + at, live, shift) * k_scale[None, :]).to(q.dtype)
        token = v_scales_ptr + slot * G * 2                                                    # [N]
        v_scale = tl.load(token, mask=mine, other=OTHER).to(tl.float32)                        # [N]
        v_least = tl.load(token + 1, mask=mine, other=OTHER).to(tl.float32)                    # [N]
        v = (v_least[:, None] + _nibbles(v_ptr + at, live, shift) * v_scale[:, None]).to(q.dtype)
        factor = scale
    else:
        page = tl.load(table_ptr + j // S, mask=mine, other=OTHER).to(tl.int64)                # [N]
        slot = page * S + j % S                                                                # [N]
        at = (slot * G * D)[:, None] + d[None, :]                                              # [N, D]
        k = tl.load(k_ptr + at, mask=live, other=0.0).to(q.dtype)                              # [N, D]
        v_scale = tl.load(v_scales_ptr + slot * G, mask=mine, other=OTHER)                     # [N]
        v = (tl.load(v_ptr + at, mask=live, other=0.0).to(tl.float32) * v_scale[:, None]).to(q.dtype)
        factor = (tl.load(k_scales_ptr + slot * G, mask=mine, other=OTHER) * scale)[None, :]   # [1, N]
    return _softmax_step(running_max, running_sum, acc, q, k, v, factor, seen, PARTIAL)


@triton.jit
def attend_fresh_tile(
    running_max, running_sum, acc, q, k_ptr, v_ptr, place, scale,           # place: fresh token of position 0
    start, position, oldest, newest,
    S: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, STEP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """A row sees here what is in its own page, up to itself."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)                                        # [N], [D]
    j = start + n                                                                              # [N]
    mine = (j <= newest) & (n < STEP)                                                          # [N]
    seen = (j[None, :] <= position[:, None]) & (start // S == position // S)[:, None]          # [R, N]
    if WINDOW is not None:
        mine = mine & ((j >= oldest) | (j < SINKS))
        seen = seen & ((j[None, :] > position[:, None] - WINDOW) | (j < SINKS)[None, :])
    live = mine[:, None] & (d < D)[None, :]                                                    # [N, D]
    at = ((place + j) * G * D)[:, None] + d[None, :]        # [N, D]; place is int64
    k = tl.load(k_ptr + at, mask=live, other=0.0)                                              # [N, D]
    v = tl.load(v_ptr + at, mask=live, other=0.0)                                              # [N, D]
    return _softmax_step(running_max, running_sum, acc, q, k, v, scale, seen & mine[None, :], True)
# fmt: on


def quantized_tiles(block: dict, page_size: int | None) -> dict:
    """`block` as the kernel over 16-bit pages has it; page_size of 4-bit pages, or None.

    8 bits: a decode tile of head 128 takes twice the keys, which are as many bytes, and pays for the softmax half as
    often. Smaller heads and more rows of queries spill with that.
    """
    if page_size is None:
        if block["BLOCK_D"] == 128 and block["num_stages"] > 1 and block.get("BLOCK_R") == 16:
            block = dict(block, BLOCK_N=128, num_stages=3)
        return dict(block, STEP=block["BLOCK_N"])
    step = min(page_size, block["BLOCK_N"])
    return dict(block, STEP=step, BLOCK_N=max(16, step))
