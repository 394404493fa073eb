"""The gate of a Llama MLP: silu(gate) * up in one pass over memory.

    silu(x) = x * sigmoid(x) = x / (1 + exp(-x))

Shapes
    gate, up  [T, C]     T tokens, C channels; rows may be strided (halves of one fused projection)
    returns   [T, C]     contiguous; fp32 inside, rounded once at the store

Cost     about 5 * T * C flops over 3 * T * C * itemsize bytes. As two PyTorch calls it would be 5 * T * C:
         silu writes what mul reads back.
Sources  Shazeer 2020, "GLU variants improve Transformer" (arXiv:2002.05202).
Story    notebooks/01_one_forward_pass.ipynb
"""

import torch
import torch.nn.functional as F

from minserve.kernels import check_alike, check_packed, on_triton, tl, triton

BLOCK_C = 2048  # channels per program: one or two 16-byte loads per thread


# ---------------------------------------------------------------- the definition
def silu_mul_reference(gate, up):
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)  # [T, C]


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _silu_mul_kernel(
    gate_ptr, up_ptr, out_ptr,
    gate_stride, up_stride,                                 # elements from one row to the next
    C: tl.constexpr, BLOCK_C: tl.constexpr,
):
    # Who am I?  One program = BLOCK_C channels of one token.
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)                                     # [BLOCK_C]
    live = i < C                                                                               # [BLOCK_C]

    # What do I read?  My channels of both halves, once. What do I carry?  Nothing.
    gate = tl.load(gate_ptr + t * gate_stride + i, mask=live, other=0.0).to(tl.float32)        # [BLOCK_C]
    up = tl.load(up_ptr + t * up_stride + i, mask=live, other=0.0).to(tl.float32)              # [BLOCK_C]
    out = gate / (1.0 + tl.exp(-gate)) * up                                                    # [BLOCK_C]
    tl.store(out_ptr + t * C + i, out.to(out_ptr.dtype.element_ty), mask=live)
# fmt: on


# ---------------------------------------------------------------- the launcher
def silu_mul(gate, up):
    """silu(gate) * up, row by row. Shapes: see the module docstring."""
    check_alike("silu_mul", gate=gate, up=up)
    check_packed("silu_mul", 1, gate=gate, up=up)
    if gate.ndim != 2 or gate.shape != up.shape:
        raise ValueError(
            f"silu_mul: gate {list(gate.shape)} and up {list(up.shape)} must both be [tokens, channels]"
        )
    if not on_triton(gate):
        return silu_mul_reference(gate, up)
    T, C = gate.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if T:
        grid = (T, triton.cdiv(C, BLOCK_C))
        _silu_mul_kernel[grid](gate, up, out, gate.stride(0), up.stride(0), C=C, BLOCK_C=BLOCK_C)
    return out
