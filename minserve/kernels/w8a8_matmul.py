"""A linear layer in integers: 8-bit weights times 8-bit activations, summed exactly, scaled once at the end.

    out[m, n] = (sum over k of x8[m, k] * qweight[n, k]) * x_scales[m] * w_scales[n] + bias[n]

Shapes
    x8        [M, K] int8    a scale for each row (each token); rows may be strided
    x_scales  [M]    fp32
    qweight   [N, K] int8    a scale for each row (each output); rows may be strided
    w_scales  [N]            fp32 or out_dtype
    bias      [N]            out_dtype, or None
    returns   [M, N]         out_dtype: the sum is an integer below 2^31, scaled and shifted in fp32, rounded once

How      The weights are the first operand of the matrix instruction: a tile has 64 or 128 of their rows however few
         tokens there are, and Hopper's instruction wants 64.
Cost     2 * M * N * K integer operations, at twice the rate of 16-bit floats where there are matrix units for them.
Sources  SmoothQuant, Xiao et al. 2022 (arXiv:2211.10438), eq. 2: scales outside of the sum, not along it.
Story    notebooks/09_quantization.ipynb
"""

import torch

from minserve.kernels import architecture, check_packed, on_triton, tl, triton

MOST_COLUMNS = 2**31 // 128**2 - 1  # 128 * 128 * K must stay below 2^31


# ---------------------------------------------------------------- the definition
def integer_sums(x8, qweight):
    """[M, N] int32. In fp64 where there is no integer product: it has 53 bits, and the sums take 31."""
    if x8.is_cpu and x8.numel() and qweight.numel():
        return torch._int_mm(x8.contiguous(), qweight.T)
    return (x8.double() @ qweight.double().T).int()


def w8a8_matmul_reference(x8, x_scales, qweight, w_scales, bias, out_dtype):
    out = integer_sums(x8, qweight).float() * x_scales[:, None] * w_scales.float()
    return (out if bias is None else out + bias.float()).to(out_dtype)


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _w8a8_kernel(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, bias_ptr, out_ptr,   # bias_ptr may be None
    x_stride, w_stride, tokens, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # Who am I?  One program = BLOCK_N outputs of BLOCK_M tokens.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)                                     # [N]
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)                                     # [M]
    k = tl.arange(0, BLOCK_K)                                                                  # [K]
    w_tile_ptr = w_ptr + (n.to(tl.int64) * w_stride)[:, None] + k[None, :]                     # [N, K]
    x_tile_ptr = x_ptr + (m.to(tl.int64) * x_stride)[None, :] + k[:, None]                     # [K, M]

    # What do I carry?  The transposed sums, as integers.
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)                                               # [N, M]

    # What do I read?  A tile of weights and one of x at a time.
    for start in range(0, K, BLOCK_K):
        live = start + k < K                                                                   # [K]
        w = tl.load(w_tile_ptr + start, mask=(n < N)[:, None] & live[None, :], other=0)        # [N, K]
        x = tl.load(x_tile_ptr + start, mask=(m < tokens)[None, :] & live[:, None], other=0)   # [K, M]
        acc = tl.dot(w, x, acc, out_dtype=tl.int32)

    x_scale = tl.load(x_scales_ptr + m, mask=m < tokens, other=0.0)                            # [M]
    w_scale = tl.load(w_scales_ptr + n, mask=n < N, other=0.0).to(tl.float32)                  # [N]
    out = acc.to(tl.float32) * x_scale[None, :] * w_scale[:, None]                             # [N, M]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    to = m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < tokens)[None, :])
# fmt: on


# ---------------------------------------------------------------- the launcher
def w8a8_matmul(x8, x_scales, qweight, w_scales, bias=None, out_dtype=torch.bfloat16):
    """The scaled integer product. Shapes: see the module docstring."""
    _check(x8, x_scales, qweight, w_scales, bias, out_dtype)
    its = torch.empty(0, dtype=out_dtype, device=x8.device)
    if not on_triton(its) or architecture(x8.device) == "sm_75":  # for which Triton has no integer product
        return w8a8_matmul_reference(x8, x_scales, qweight, w_scales, bias, out_dtype)
    (M, K), N = x8.shape, len(qweight)
    out = torch.empty((M, N), dtype=out_dtype, device=x8.device)
    if out.numel():
        block = tiles(M, architecture(x8.device))
        _w8a8_kernel[(triton.cdiv(N, block["BLOCK_N"]), triton.cdiv(M, block["BLOCK_M"]))](
            x8, x_scales, qweight, w_scales, bias, out, x8.stride(0), qweight.stride(0), M, N, K=K, **block
        )
    return out


def tiles(M: int, arch: str) -> dict:
    """64 rows of the weight for few tokens, for more programs; 128 x 128 results per program for many."""
    block = dict(BLOCK_M=min(128, max(16, triton.next_power_of_2(M))), BLOCK_N=64, BLOCK_K=128, num_warps=4)
    if arch == "interpreter":
        return block | dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=64, num_stages=1)
    if arch.startswith("gfx"):
        return block | dict(BLOCK_M=min(64, block["BLOCK_M"]), num_stages=1)
    return block | dict(num_stages=3) | (dict(BLOCK_N=128, num_warps=8) if block["BLOCK_M"] > 32 else {})


def _check(x8, x_scales, qweight, w_scales, bias, out_dtype):
    who = "w8a8_matmul"
    if x8.ndim != 2 or qweight.ndim != 2 or x8.shape[1] != qweight.shape[1]:
        raise ValueError(
            f"{who}: x8 {list(x8.shape)} does not go with qweight {list(qweight.shape)}; they are [rows, in] and "
            f"[out, in]"
        )
    (M, K), N = x8.shape, len(qweight)
    if K > MOST_COLUMNS:
        raise ValueError(
            f"{who}: {K:,} columns could sum up to 128 * 128 * {K:,} = {128 * 128 * K:,}, and 32 bits end at 2^31: cut "
            f"the columns into pieces of {MOST_COLUMNS:,} and add the results"
        )
    for name, its, dtypes, shape in [
        ("x8", x8, [torch.int8], (M, K)),
        ("qweight", qweight, [torch.int8], (N, K)),
        ("x_scales", x_scales, [torch.float32], (M,)),
        ("w_scales", w_scales, [torch.float32, out_dtype], (N,)),
        ("bias", bias, [out_dtype], (N,)),
    ]:
        if its is not None and (its.dtype not in dtypes or its.shape != shape or its.device != x8.device):
            raise ValueError(
                f"{who}: {name} is {list(its.shape)} {its.dtype} on {its.device}; it must be {list(shape)} "
                f"{' or '.join(map(str, dtypes))} on {x8.device}"
            )
        if its is not None:
            check_packed(who, 1, **{name: its})
