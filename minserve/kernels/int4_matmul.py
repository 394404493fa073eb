"""A linear layer whose weights take 4 bits each, unpacked on the way to the multiplication.

    w[n, k] = (nibble[n, k] - zero[n, k // group]) * scale[n, k // group]        out = x . w^T + bias

Shapes
    x        [M, K]             fp16, bf16 or fp32; rows may be strided
    qweight  [N, ceil(K / 8)]   int32: column 8 i + j lies in bits 4 j to 4 j + 3 of word i, the lowest nibble first,
                                as unsigned 0 to 15; rows may be strided
    scales   [N, Q]             x.dtype or fp32; Q = ceil(K / group): the last group may be shorter than the others
    zeros    [N, Q] uint8       0 to 15, or None: all 8
    bias     [N]                x.dtype, or None
    returns  [M, N]             fp32 inside, rounded once at the store

group    a multiple of 8, since the columns of one word share a scale; None, or K and more: the whole row.
Story    notebooks/09_quantization.ipynb
"""

import torch

from minserve.kernels import on_triton
from minserve.kernels.packed_check import check, grouped, multiplied
from minserve.kernels.packed_matmul import packed_matmul


# ---------------------------------------------------------------- the definition
def int4_weight(qweight, scales, zeros, group: int | None, K: int):
    """The weights as numbers: [N, K] fp32."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=qweight.device)
    nibbles = (qweight[:, :, None] >> shifts & 15).flatten(1)[:, :K]
    zeros = torch.full_like(scales, 8) if zeros is None else zeros
    return grouped(nibbles, scales, zeros, group)


def int4_matmul_reference(x, qweight, scales, zeros, group: int | None, bias=None):
    return multiplied(x, int4_weight(qweight, scales, zeros, group, x.shape[1]), bias)


# ---------------------------------------------------------------- the launcher
def int4_matmul(x, qweight, scales, zeros, group: int | None, bias=None):
    """x . w^T + bias with 4-bit weights. Shapes: see the module docstring."""
    check("int4_matmul", 4, x, qweight, scales, zeros, group, bias)
    if on_triton(x):
        return packed_matmul(4, x, qweight, scales, zeros, group, bias)
    return int4_matmul_reference(x, qweight, scales, zeros, group, bias)
