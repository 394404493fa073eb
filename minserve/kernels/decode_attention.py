"""Decode attention: one new token per sequence, over everything its cache holds.

    out[b, h] = softmax(q[b, h] . K[b, :, g]^T / sqrt(D)) . V[b, :, g]
                over slots 0 .. lengths[b] - 1, with g = h // (H / G)

Shapes
    q        [B, H, D]        one token of B sequences; H query heads, H % G == 0
    k_cache  [B, S, G, D]     S slots per sequence, G key/value heads; slots past the length are never used.
    v_cache  [B, S, G, D]     Sequences and slots may be strided, [G, D] contiguous
    lengths  [B] int32        slots each sequence sees, the new token included; 0 gives zeros
    max_length                at least the longest length: it decides the splits without asking the GPU
    returns  [B, H, D]

The order of the slots does not matter, because softmax is a sum: a ring that has wrapped is read as it lies.

How      One program serves a whole group: the H/G query heads that share a key head are the rows of one tile,
         padded to the 16 that `tl.dot` asks for, so each key and value is read once, not H/G times.
         B * G programs may be far fewer than the GPU has processors, so each sequence is cut into splits
         (`splits_for`). A split leaves its own softmax, output and log-sum-exp in fp32; a second small kernel
         weighs them together. With one split there is nothing to merge: the first kernel writes the result.
Cost     4 * sum(lengths) * H * D flops over 2 * sum(lengths) * G * D * itemsize bytes: H/G flops per byte
         at 16 bits, far below any GPU's ridge. Decode waits for memory.
Sources  Flash-Decoding, Dao et al. 2023; the split rule is FlashAttention-3's, Shah et al. 2024
         (arXiv:2407.08608).
Story    notebooks/02_prefill_and_decode.ipynb
"""

import torch

from minserve.kernels import (
    architecture,
    check_alike,
    check_packed,
    has_matrix_units,
    on_triton,
    processors,
    tl,
    triton,
)

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E), and GPUs have only exp2
MERGE_TILE = 16  # splits the merge holds at once


# ---------------------------------------------------------------- the definition
def decode_attention_reference(q, k_cache, v_cache, lengths, max_length: int):
    B, H, D = q.shape
    G = k_cache.shape[2]
    out = torch.zeros_like(q)  # [B, H, D]
    for b, n in enumerate(lengths.tolist()):
        if n == 0:
            continue  # nothing to see: zeros, not 0/0
        k, v = k_cache[b, :n].float(), v_cache[b, :n].float()  # [n, G, D]
        rows = q[b].float().view(G, H // G, D)  # row r of group g is head g * H/G + r
        weights = (rows @ k.permute(1, 2, 0) * D**-0.5).softmax(-1)  # [G, H/G, n]
        out[b] = (weights @ v.transpose(0, 1)).view(H, D).to(q.dtype)
    return out


# ---------------------------------------------------------------- the kernels
# fmt: off
@triton.jit
def _decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr,
    out_ptr, lse_ptr,                                  # [splits, B, H, D], [splits, B, H] or None: 1 split
    q_stride, k_stride_b, k_stride_s, v_stride_b, v_stride_s, splits, scale,  # log2(e) / sqrt(D)
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # Who am I?  One program = one split of one group of one sequence.
    R: tl.constexpr = H // G
    b, g, split = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    length = tl.load(lengths_ptr + b)
    r = tl.arange(0, BLOCK_R)                                                                  # [R]
    n = tl.arange(0, BLOCK_N)                                                                  # [N]
    d = tl.arange(0, BLOCK_D)                                                                  # [D]
    own = (r < R)[:, None] & (d < D)[None, :]                                                  # [R, D]
    head = g * R + r                                                                           # [R]
    q_ptr += b.to(tl.int64) * q_stride
    q = tl.load(q_ptr + head[:, None] * D + d[None, :], mask=own, other=0.0)                   # [R, D]
    k_ptr += b.to(tl.int64) * k_stride_b + g * D            # my sequence's slot 0, my group's head
    v_ptr += b.to(tl.int64) * v_stride_b + g * D

    # What do I carry?  The online softmax: running maximum, running sum, unnormalised output.
    running_max = tl.full([BLOCK_R], -float("inf"), tl.float32)                                # [R]
    running_sum = tl.zeros([BLOCK_R], tl.float32)                                              # [R]
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)                                             # [R, D]

    # What do I read?  My share of this sequence's own tiles: short ones are split as evenly as long ones.
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, length)
    for start in range(begin, end, BLOCK_N):
        base = tl.cast(start, tl.int64)                     # int64: base * stride passes 2**31 in a big cache
        live = start + n < end                                                                 # [N]
        mask = live[:, None] & (d < D)[None, :]                                                # [N, D]
        k_tile = k_ptr + base * k_stride_s + n[:, None] * k_stride_s + d[None, :]              # [N, D]
        k = tl.load(k_tile, mask=mask, other=0.0)                                              # [N, D]
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale                         # [R, N]
        score = tl.where(live[None, :], score, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(score, axis=1))   # finite: a tile has at least one live slot
        shrink = tl.exp2(running_max - new_max)             # rescales what was summed under the old maximum
        weight = tl.exp2(score - new_max[:, None])                                             # [R, N]
        running_sum = running_sum * shrink + tl.sum(weight, axis=1)                            # [R]
        running_max = new_max
        v_tile = v_ptr + base * v_stride_s + n[:, None] * v_stride_s + d[None, :]              # [N, D]
        v = tl.load(v_tile, mask=mask, other=0.0)                                              # [N, D]
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")     # [R, D]

    out = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]                           # [R, D]
    row = (split * tl.num_programs(0) // G + b).to(tl.int64) * H + head                        # [R]
    tl.store(out_ptr + row[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=own)
    if lse_ptr is not None:
        # Base 2, like everything here. A split that saw nothing has max -inf: its weight in the merge is 0.
        lse = running_max + tl.log2(tl.where(running_sum > 0, running_sum, 1.0))               # [R]
        tl.store(lse_ptr + row, lse, mask=r < R)


@triton.jit
def _merge_kernel(
    partial_ptr, lse_ptr, out_ptr, rows, splits,          # partial [splits, rows, D] fp32; lse [splits, rows]
    D: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # Who am I?  One program = one query head of one sequence; rows = B * H.
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, TILE)                                                                     # [TILE]
    d = tl.arange(0, BLOCK_D)                                                                  # [D]

    # What do I carry?  An online softmax again, over splits instead of slots.
    running_max = -float("inf")
    running_sum = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)                                                      # [D]

    # What do I read?  My row of every split, TILE splits at a time.
    for start in range(0, splits, TILE):
        live = start + s < splits                                                              # [TILE]
        at = (start + s) * rows + row                                                          # [TILE]
        lse = tl.load(lse_ptr + at, mask=live, other=-float("inf"))                            # [TILE]
        mask = live[:, None] & (d < D)[None, :]                                                # [TILE, D]
        partial = tl.load(partial_ptr + at[:, None] * D + d[None, :], mask=mask, other=0.0)    # [TILE, D]
        new_max = tl.maximum(running_max, tl.max(lse, axis=0))
        base = tl.where(new_max == -float("inf"), 0.0, new_max)      # an empty sequence: no inf - inf
        shrink = tl.exp2(running_max - base)
        weight = tl.exp2(lse - base)                                                           # [TILE]
        running_sum = running_sum * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink + tl.sum(weight[:, None] * partial, axis=0)                         # [D]
        running_max = new_max
    out = acc / tl.where(running_sum > 0, running_sum, 1.0)                                    # [D]
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
# fmt: on


# ---------------------------------------------------------------- the launcher
def decode_attention(q, k_cache, v_cache, lengths, max_length: int):
    """Attend one new token per sequence over its cache. Shapes: see the module docstring."""
    _check(q, k_cache, v_cache, lengths, max_length)
    if not on_triton(q):
        return decode_attention_reference(q, k_cache, v_cache, lengths, max_length)
    (B, _, D), G = q.shape, k_cache.shape[2]
    block_n = tiles(D, q.dtype, architecture(q.device), q.shape[1] // G)["BLOCK_N"]
    splits = splits_for(B * G, triton.cdiv(max_length, block_n), processors(q.device))
    return attend_in_splits(q, k_cache, v_cache, lengths, splits)


def attend_in_splits(q, k_cache, v_cache, lengths, splits: int):
    """The launch itself, for a given number of splits: it changes the time, never the answer."""
    (B, H, D), G = q.shape, k_cache.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if B == 0:
        return out
    block = tiles(D, q.dtype, architecture(q.device), H // G)
    partial, lse = out, None
    if splits > 1:
        partial = torch.empty((splits, B, H, D), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, B, H), dtype=torch.float32, device=q.device)
    _decode_attention_kernel[(B * G, splits)](
        q, k_cache, v_cache, lengths, partial, lse,
        q.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2], splits, LOG2_E * D**-0.5,
        H=H, G=G, D=D, **block,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(B * H,)](
            partial, lse, out, B * H, splits, D=D, TILE=MERGE_TILE, BLOCK_D=block["BLOCK_D"]
        )  # fmt: skip
    return out


def splits_for(programs: int, tiles: int, processors: int, most: int = 128) -> int:
    """How many pieces to cut each sequence into: FlashAttention-3's rule.

    One, when the programs fill 80 % of the processors anyway, or when a sequence has 4 tiles or fewer.
    Otherwise programs * splits run in waves of `processors`, the last wave partly empty; efficiency =
    waves / ceil(waves) says how full they are. The fewest splits within 85 % of the best are taken, because
    every split costs a merge.
    """
    if programs >= 0.8 * processors or tiles <= 4:
        return 1
    waves = [programs * splits / processors for splits in range(1, min(most, processors, tiles) + 1)]
    efficiency = [w / -(-w // 1) for w in waves]
    return next(i for i, e in enumerate(efficiency, 1) if e >= 0.85 * max(efficiency))


def tiles(D: int, dtype, arch: str, group: int) -> dict:
    """Tile sizes, warps and pipeline stages for one head size, dtype, architecture and H / G.

    The kernel only waits for memory, so what counts is bytes in flight: with asynchronous copies (sm_80 on),
    3 stages of 64 keys and values (32 KiB each for head 128 at 16 bits). AMD's 64 KiB hold one stage. Without
    matrix units, multiply-adds keep their operands in registers and want small tiles.
    """
    block_d = max(16, triton.next_power_of_2(D))
    block = dict(BLOCK_R=max(16, triton.next_power_of_2(group)), BLOCK_D=block_d, num_warps=4)
    keys = 1 if block_d <= 128 else 2  # head 256: half as many keys per tile, as many bytes
    if not has_matrix_units(dtype, arch):
        return dict(block, BLOCK_N=32 // keys, num_stages=1)
    if arch.startswith("gfx"):
        return dict(block, BLOCK_N=64 // keys, num_stages=1)
    return dict(block, BLOCK_N=64 // keys, num_stages=3)


def _check(q, k_cache, v_cache, lengths, max_length):
    who = "decode_attention"
    (B, H, D), (_, S, G, _) = q.shape, k_cache.shape
    check_alike(who, q=q, k_cache=k_cache, v_cache=v_cache)
    check_packed(who, 2, q=q, k_cache=k_cache, v_cache=v_cache)
    if H % G:
        raise ValueError(
            f"{who}: {H} query heads cannot share {G} key/value heads evenly ({H} = {H // G} x {G} + {H % G})"
        )
    if k_cache.shape != v_cache.shape or k_cache.shape[0] != B or k_cache.shape[3] != D:
        raise ValueError(
            f"{who}: caches {list(k_cache.shape)} and {list(v_cache.shape)} must be equal, with the {B} "
            f"sequences and {D} channels of q {list(q.shape)}"
        )
    if lengths.shape != (B,) or lengths.dtype != torch.int32 or lengths.device != q.device:
        raise ValueError(
            f"{who}: lengths is {list(lengths.shape)} {lengths.dtype} on {lengths.device}; "
            f"{B} sequences need [{B}] torch.int32 on {q.device}"
        )
    if max_length > S:
        raise ValueError(f"{who}: max_length {max_length} is more than the {S} slots of the cache")
    if not q.is_cuda and B:  # reading a tensor would make the CPU wait for the GPU
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > max_length:
            raise ValueError(
                f"{who}: lengths from {low} to {high} do not lie between 0 and max_length {max_length}"
            )
