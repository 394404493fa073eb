"""A linear layer whose weights take 8 bits each, converted on the way to the multiplication.

    w[n, k] = (q[n, k] - zero[n, k // group]) * scale[n, k // group]             out = x . w^T + bias

Shapes
    x        [M, K]        fp16, bf16 or fp32; rows may be strided
    qweight  [N, K] int8   rows may be strided
    scales   [N, Q]        x.dtype or fp32; Q = ceil(K / group): the last group may be shorter than the others
    zeros    [N, Q] int8   or None: all 0
    bias     [N]           x.dtype, or None
    returns  [M, N]        fp32 inside, rounded once at the store

group    1 or more columns; None, or K and more: the whole row, a scale for each output.
Story    notebooks/09_quantization.ipynb
"""

import torch

from minserve.kernels import on_triton
from minserve.kernels.packed_check import check, grouped, multiplied
from minserve.kernels.packed_matmul import packed_matmul


# ---------------------------------------------------------------- the definition
def int8_matmul_reference(x, qweight, scales, zeros, group: int | None, bias=None):
    return multiplied(x, grouped(qweight, scales, zeros, group), bias)


# ---------------------------------------------------------------- the launcher
def int8_matmul(x, qweight, scales, zeros, group: int | None, bias=None):
    """x . w^T + bias with 8-bit weights. Shapes: see the module docstring."""
    check("int8_matmul", 8, x, qweight, scales, zeros, group, bias)
    if on_triton(x) and in_words(qweight, group):
        return packed_matmul(8, x, qweight.view(torch.int32), scales, zeros, group, bias)
    return int8_matmul_reference(x, qweight, scales, zeros, group, bias)


def in_words(qweight, group: int | None) -> bool:
    """Can rows and groups be read four columns at a time?"""
    K = qweight.shape[1]
    return not any(n % 4 for n in (K, qweight.stride(0), qweight.storage_offset(), min(group or K, K)))
