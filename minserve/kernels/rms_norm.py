"""RMS norm, alone or fused with the residual add before it: keep a vector's direction, fix its length.

    rms_norm(x)        = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm(x, r) = (rms_norm(r + x), r + x)         the sum is the stream the next layer adds to

Shapes
    x, residual  [T, E]     T tokens, E channels; rows may be strided, channels contiguous
    weight       [E]
    returns      [T, E]     (add_rms_norm: two of them, the normed one first)

Everything is computed in fp32 and rounded once, at the store. The sum is rounded before it is normalised,
because the rounded sum is what the next layer sees: the two results agree with each other.

Cost     about 4 * T * E flops over 2 * T * E * itemsize bytes (4 * T * E with the residual): memory-bound.
         Fusing the add saves one write and one read of [T, E]; as separate steps they would move 5 * T * E.
Sources  Zhang and Sennrich 2019 (arXiv:1910.07467).
Story    notebooks/01_one_forward_pass.ipynb
"""

import torch

from minserve.kernels import check_alike, check_packed, on_triton, tl, triton


# ---------------------------------------------------------------- the definition
def rms_norm_reference(x, weight, eps: float):
    y = x.float()  # [T, E]
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)  # [T, 1]
    return (y * scale * weight.float()).to(x.dtype)  # [T, E]


def add_rms_norm_reference(x, residual, weight, eps: float):
    total = residual + x  # [T, E]
    return rms_norm_reference(total, weight, eps), total


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr,    # residual_ptr is None: no add, and no total
    x_stride, residual_stride, eps,
    E: tl.constexpr, BLOCK_E: tl.constexpr,                 # BLOCK_E: the power of two that holds E
):
    # Who am I?  One program = one token.
    t = tl.program_id(0).to(tl.int64)                       # int64: t * E passes 2**31 in a long prompt
    e = tl.arange(0, BLOCK_E)
    live = e < E                                                                               # [BLOCK_E]

    # What do I read?  My own row, once.
    x = tl.load(x_ptr + t * x_stride + e, mask=live, other=0.0)                                # [BLOCK_E]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + t * residual_stride + e, mask=live, other=0.0)       # [BLOCK_E]
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)                           # [BLOCK_E]
        tl.store(total_ptr + t * E + e, x, mask=live)
    weight = tl.load(weight_ptr + e, mask=live, other=0.0).to(tl.float32)                      # [BLOCK_E]

    # What do I carry?  One number: the mean square. Dead lanes hold 0 and E, not BLOCK_E, divides.
    y = x.to(tl.float32)                                                                       # [BLOCK_E]
    scale = 1.0 / tl.sqrt(tl.sum(y * y, axis=0) / E + eps)
    tl.store(out_ptr + t * E + e, (y * scale * weight).to(out_ptr.dtype.element_ty), mask=live)
# fmt: on


# ---------------------------------------------------------------- the launchers
def rms_norm(x, weight, eps: float):
    """Normalise every row of x. Shapes: see the module docstring."""
    _check("rms_norm", weight, x=x)
    if not on_triton(x):
        return rms_norm_reference(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(x, residual, weight, eps: float):
    """(normed, total): the residual stream after adding x, and that stream normalised."""
    _check("add_rms_norm", weight, x=x, residual=residual)
    if not on_triton(x):
        return add_rms_norm_reference(x, residual, weight, eps)
    out, total = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _launch(x, residual, weight, out, total, eps):
    T, E = x.shape
    if T == 0:
        return
    block = triton.next_power_of_2(E)
    _rms_norm_kernel[(T,)](
        x, residual, weight, out, total,
        x.stride(0), 0 if residual is None else residual.stride(0), eps,
        E=E, BLOCK_E=block, num_warps=min(8, max(1, block // 512)),    # 16 channels per thread, up to 8 warps
    )  # fmt: skip


def _check(who, weight, **rows):
    check_alike(who, **rows, weight=weight)
    check_packed(who, 1, **rows, weight=weight)
    shape = rows["x"].shape
    for name, x in rows.items():
        if x.ndim != 2 or x.shape != shape or weight.shape != shape[-1:]:
            raise ValueError(
                f"{who}: {name} {list(x.shape)} does not go with x {list(shape)} and weight "
                f"{list(weight.shape)}; x is [tokens, channels] and weight [channels]"
            )
