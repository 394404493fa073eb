"""A quantized linear on the fast road: which matmul multiplies packed weights, by the number of rows.

    CUDA                     kernels/int4_matmul.py, int8_matmul.py, which choose for themselves
    a CPU, few rows          kernels/native_quant.cpp: unpacked in registers, every byte of the weight read once
    a CPU, many rows         unpacked as a whole, once per call, for the matmul of the activations' dtype: the more
                             rows share it, the less it costs
    a CPU without a compiler PyTorch's own kernels for few rows, where they apply, else the definition. Its int4 kernel
                             wants a layout of its own: those weights are then held twice

Several linears of one input become one, as in fused.py: their packed weights, scales and zeros are laid side by side
*in place*. Act-order permutes the input; linears that want it in different orders stay apart.

Story    notebooks/09_quantization.ipynb
"""

import torch
from torch.nn.functional import linear

from minserve.quantization import QuantLinear, unpack

FEW = 32  # without a matrix unit: up to so many rows are multiplied by packed weights (`bench matmul`)
TILED = 128  # with one
TORCHED = 32  # without a compiler: up to so many rows are multiplied by PyTorch's kernels


class QuantizedLinear:
    """x W^T + b. `native`: a kernels.native.Native, or None."""

    def __init__(self, native, part: QuantLinear):
        self.native, self.part = native, part
        recordable = native is not None and part.order is None
        self.few = self.most_rows(part.scales.dtype) if recordable else 0
        self.packed, self.by_torch = (None, None) if native or not part.qweight.is_cpu else torch_kernel(part)

    def most_rows(self, dtype) -> int:
        return TILED if self.native.matrix_units and dtype == torch.bfloat16 else FEW

    def __call__(self, x):
        part = self.part
        if not x.is_cpu:
            return part(x)
        if not self.native:
            return self.by_torch(x) if self.by_torch and len(x) <= TORCHED else part(x)
        if part.order is not None:
            x = x[:, part.order]
        held = part.qweight, part.scales, part.zeros, part.group
        if len(x) <= self.most_rows(x.dtype):
            by_native = self.native.linear_int4 if part.bits == 4 else self.native.linear_int8
            return by_native(x, *held, part.bias)
        unpacked = self.native.dequantize_int4 if part.bits == 4 else self.native.dequantize_int8
        return linear(x, unpacked(*held, part.in_features, x.dtype), part.bias)


def torch_kernel(part: QuantLinear) -> tuple:
    """(what it holds a second time or None, a function of x), or (None, None): PyTorch's kernel for bfloat16."""
    (N, Q), K, packed = part.scales.shape, part.in_features, None
    if part.scales.dtype != torch.bfloat16 or part.order is not None:
        return None, None
    if part.bits == 8 and Q == 1 and part.zeros is None:
        multiply = lambda x: torch._weight_int8pack_mm(x, part.qweight, part.scales.flatten())
    elif part.bits == 4 and part.group in (32, 64, 128, 256) and K % part.group == 0 and N % 16 == 0:
        zeros = torch.full_like(part.scales, 8) if part.zeros is None else part.zeros.to(part.scales)
        pairs = (
            torch.stack([part.scales, (8 - zeros) * part.scales], -1).transpose(0, 1).contiguous()
        )  # [Q, N, 2]
        aten, integers = torch.ops.aten, unpack(part.qweight, K).int()
        packed = aten._convert_weight_to_int4pack_for_cpu(integers, 1)
        multiply = lambda x: aten._weight_int4pack_mm_for_cpu(x, packed, part.group, pairs)
    else:
        return None, None
    return packed, lambda x: multiply(x) if part.bias is None else multiply(x) + part.bias


def alike(parts: list[QuantLinear]) -> bool:
    """Can they be one? One scheme, one order of the input, and all or none with zeros and biases."""
    first = parts[0]

    def kind(part):
        given = part.zeros is None, part.bias is None, part.order is None
        return part.scheme, part.in_features, part.scales.dtype, given

    same_order = all(first.order is None or torch.equal(part.order, first.order) for part in parts)
    return all(kind(part) == kind(first) for part in parts) and same_order


def joined(parts: list[QuantLinear]) -> QuantLinear:
    """One with the outputs of all, whose tensors theirs become views of."""
    first, held = parts[0], {}
    if len(parts) == 1:
        return first
    for name in ("qweight", "scales", "zeros", "bias"):
        pieces = [getattr(part, name) for part in parts]
        held[name] = None if pieces[0] is None else torch.cat([piece.data for piece in pieces])
        for piece, view in zip(
            pieces, () if pieces[0] is None else held[name].split([len(p) for p in pieces])
        ):
            piece.data = view
    return QuantLinear(**held, order=first.order, in_features=first.in_features, scheme=first.scheme)
