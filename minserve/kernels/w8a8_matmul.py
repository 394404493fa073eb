"""A linear layer in integers: 8-bit weights times 8-bit activations, summed exactly, scaled once at the end.

    out[m, n] = (sum over k of x8[m, k] * qweight[n, k]) * x_scales[m] * w_scales[n] + bias[n]

Shapes
    x8        [M, K] int8    a scale for each row (each token); rows may be strided
    x_scales  [M]    fp32
    qweight   [N, K] int8    a scale for each row (each output); rows may be strided
    w_scales  [N]            fp32 or out_dtype
    bias      [N]            out_dtype, or None
    returns   [M, N]         out_dtype: the sum is an integer below 2^31, scaled and shifted in fp32, rounded once

Cost     2 * M * N * K integer operations, at twice the rate of 16-bit floats where there are matrix units for them.
Sources  SmoothQuant, Xiao et al. 2022 (arXiv:2211.10438), eq. 2: scales outside of the sum, not along it.
Story    notebooks/09_quantization.ipynb
"""

import torch

from minserve.kernels import check_packed

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


# ---------------------------------------------------------------- the launcher
def w8a8_matmul(x8, x_scales, qweight, w_scales, bias=None, out_dtype=torch.bfloat16):
    """The scaled integer product. Shapes: see the module docstring."""
    _check(x8, x_scales, qweight, w_scales, bias, out_dtype)
    return w8a8_matmul_reference(x8, x_scales, qweight, w_scales, bias, out_dtype)


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
