"""Rotary position embedding: a token's position becomes an angle by which its queries and keys are turned.

Channel i and channel i + D/2 of a head are the two coordinates of one point ("rotate half", the pairing of
Hugging Face checkpoints), and the point is turned by its own angle a[i] = position * frequency[i]:

    x'[i]       = x[i] cos a[i] - x[i + D/2] sin a[i]
    x'[i + D/2] = x[i + D/2] cos a[i] + x[i] sin a[i]

A dot product of two turned points depends on the difference of their angles alone: on relative position.

Shapes
    q        [T, H, D]         T tokens, H query heads, D channels (even)
    k        [T, G, D]         G key heads; q and k may have strided rows (slices of a fused projection)
    cos, sin [T, D/2] fp32     a row per token, made once per step and shared by all layers
    returns  q', k'            new and contiguous. Out of place: no program reads what another writes

Cost     6 flops per pair over 2 * T * (H + G) * D * itemsize bytes: memory-bound.
Sources  Su et al. 2021 (arXiv:2104.09864).
Story    notebooks/01_one_forward_pass.ipynb
"""

import torch

from minserve.kernels import check_alike, check_packed, on_triton, tl, triton


# ---------------------------------------------------------------- the definition
def rope_reference(q, k, cos, sin):
    return _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)


def _rotate_reference(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)  # [T, heads, D/2]
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, D/2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_stride, k_stride,                                     # elements from one token's row to the next
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr,   # HALF = D / 2
    BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_HALF: tl.constexpr,
):
    # Who am I?  One program = one token, all its heads.
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_HALF)

    # What do I carry?  This token's angles: every head, of queries and of keys, turns by the same ones.
    cos = tl.load(cos_ptr + t * HALF + i, mask=i < HALF, other=0.0)                            # [BLOCK_HALF]
    sin = tl.load(sin_ptr + t * HALF + i, mask=i < HALF, other=0.0)                            # [BLOCK_HALF]

    # What do I read?  My token's queries, then its keys.
    _rotate(q_ptr + t * q_stride, q_out_ptr + t * H * HALF * 2, cos, sin, H, HALF, BLOCK_H, BLOCK_HALF)
    _rotate(k_ptr + t * k_stride, k_out_ptr + t * G * HALF * 2, cos, sin, G, HALF, BLOCK_G, BLOCK_HALF)


@triton.jit
def _rotate(
    x_ptr, out_ptr, cos, sin,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):
    h = tl.arange(0, BLOCK_HEADS)[:, None]                                                  # [BLOCK_HEADS, 1]
    i = tl.arange(0, BLOCK_HALF)[None, :]                                                    # [1, BLOCK_HALF]
    live = (h < HEADS) & (i < HALF)                                                # [BLOCK_HEADS, BLOCK_HALF]
    pair = h * HALF * 2 + i                                                        # [BLOCK_HEADS, BLOCK_HALF]
    first = tl.load(x_ptr + pair, mask=live, other=0.0).to(tl.float32)             # [BLOCK_HEADS, BLOCK_HALF]
    second = tl.load(x_ptr + pair + HALF, mask=live, other=0.0).to(tl.float32)     # [BLOCK_HEADS, BLOCK_HALF]
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + pair, (first * cos[None, :] - second * sin[None, :]).to(kind), mask=live)
    tl.store(out_ptr + pair + HALF, (second * cos[None, :] + first * sin[None, :]).to(kind), mask=live)
# fmt: on


# ---------------------------------------------------------------- the launcher
def rope(q, k, cos, sin):
    """(q', k'), turned by each token's angles. Shapes: see the module docstring."""
    (T, H, D), G = q.shape, k.shape[1]
    _check(q, k, cos, sin)
    if not on_triton(q):
        return rope_reference(q, k, cos, sin)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if T == 0:
        return q_out, k_out
    block_h, block_g, block_half = (triton.next_power_of_2(n) for n in (H, G, D // 2))
    _rope_kernel[(T,)](
        q, k, cos, sin, q_out, k_out, q.stride(0), k.stride(0),
        H=H, G=G, HALF=D // 2, BLOCK_H=block_h, BLOCK_G=block_g, BLOCK_HALF=block_half,
        num_warps=min(8, max(1, block_h * block_half // 512)),
    )  # fmt: skip
    return q_out, k_out


def _check(q, k, cos, sin):
    T, _, D = q.shape
    check_alike("rope", q=q, k=k)
    check_packed("rope", 2, q=q, k=k, cos=cos, sin=sin)
    if D % 2:
        raise ValueError(
            f"rope: head dimension {D} is odd, and channels turn in pairs (i, i + D/2); it must be even"
        )
    if k.shape[0] != T or k.shape[2] != D:
        raise ValueError(
            f"rope: k {list(k.shape)} must have the {T} tokens and {D} channels of q {list(q.shape)}"
        )
    for name, x in (("cos", cos), ("sin", sin)):
        if x.shape != (T, D // 2) or x.dtype != torch.float32 or x.device != q.device:
            raise ValueError(
                f"rope: {name} is {list(x.shape)} {x.dtype} on {x.device}; {T} tokens of {D} channels need "
                f"[{T}, {D // 2}] torch.float32 on {q.device}: one angle per pair of channels"
            )
