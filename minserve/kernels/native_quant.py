"""The CPU's linears over quantized weights: kernels/native_quant.cpp and native_digits.cpp. A part of native.Native.

    linear_int8     x [T, K], qweight [N, K] int8, scales and zeros [N, Q]               -> [T, N]
    linear_int4     x [T, K], qweight [N, ceil(K/8)] int32, scales and zeros [N, Q]      -> [T, N]
    dequantize_int8, dequantize_int4   qweight, scales, zeros, group, K, dtype           -> [N, K], rounded once

Arguments as in kernels/int8_matmul.py and int4_matmul.py, all without gaps, x float32 or bfloat16.

Vectors     integers become fp32 in registers, each read once for up to eight rows of x: any shape, any CPU
Matrix unit for bf16 where K and the groups are multiples of 64, up to eight rows: x becomes bytes, too, three to a
            number, and the unit sums integers (native_digits.cpp): exact but for what lies 22 bits below x's largest.
            For more rows, or multiples of 32 from five rows on: 32 rows of the weight at a time become bf16 in the
            cache. A scale a row: exact integers, their sums scaled. A scale a group: the weight is rounded to bf16
            first, as if it had been stored so
A row's result depends on the rows beside it only by which of the roads their number takes.
Story    notebooks/09_quantization.ipynb
"""

import torch

from minserve.kernels import check_packed
from minserve.kernels.packed_check import check

SIGNATURES = {  # as in native.py
    "linear_int8": "ppppppiiiii",
    "linear_int4": "ppppppiiiii",
    "dequantize_int8": "ppppiiii",
    "dequantize_int4": "ppppiiii",
}


class WeightOps:
    """What `Native` can do with quantized weights."""

    def linear_int8(self, x, qweight, scales, zeros, group: int | None, bias=None):
        return self._quantized(8, x, qweight, scales, zeros, group, bias)

    def linear_int4(self, x, qweight, scales, zeros, group: int | None, bias=None):
        return self._quantized(4, x, qweight, scales, zeros, group, bias)

    def dequantize_int8(self, qweight, scales, zeros, group: int | None, K: int, dtype):
        return self._dequantized(8, qweight, scales, zeros, group, K, dtype)

    def dequantize_int4(self, qweight, scales, zeros, group: int | None, K: int, dtype):
        return self._dequantized(4, qweight, scales, zeros, group, K, dtype)

    def _dequantized(self, bits: int, qweight, scales, zeros, group, K, dtype):
        who = f"dequantize_int{bits}"
        check(who, bits, qweight.new_empty((0, K), dtype=dtype), qweight, scales, zeros, group, None)
        check_packed(who, 2, qweight=qweight)
        out = torch.empty((len(qweight), K), dtype=dtype)
        wide = scales.dtype == torch.float32
        self._call(who, (out, qweight, scales, zeros), *out.shape, max(1, min(group or K, K)), wide)
        return out

    def _quantized(self, bits: int, x, qweight, scales, zeros, group, bias):
        who = f"linear_int{bits}"
        check(who, bits, x, qweight, scales, zeros, group, bias)
        check_packed(who, 2, x=x, qweight=qweight)
        (T, K), N = x.shape, len(qweight)
        out = torch.empty((T, N), dtype=x.dtype)
        wide = scales.dtype == torch.float32
        self._call(who, (x, qweight, scales, zeros, bias, out), T, N, K, max(1, min(group or K, K)), wide)
        return out
