"""The gate of a Llama MLP: silu(gate) * up in one pass over memory.

    silu(x) = x * sigmoid(x) = x / (1 + exp(-x))

Shapes
    gate, up  [T, I]     T tokens, I channels; rows may be strided (halves of one fused projection)
    returns   [T, I]     contiguous; fp32 inside, rounded once at the store

Cost     about 5 * T * I flops over 3 * T * I * itemsize bytes. As two PyTorch calls it would be 5 * T * I:
         silu writes what mul reads back.
Sources  Shazeer 2020, "GLU variants improve Transformer" (arXiv:2002.05202).
Story    notebooks/01_one_forward_pass.ipynb
"""

import torch
import torch.nn.functional as F

from minserve.kernels import check_alike, check_packed, on_triton, tl, triton

BLOCK_I = 2048                                            # channels per program: one or two 16-byte loads per thread


# ---------------------------------------------------------------- the definition
def silu_mul_reference(gate, up):
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)                                  # [T, I]


# ---------------------------------------------------------------- the kernel
@triton.jit
def _silu_mul_kernel(
    gate_ptr, up_ptr, out_ptr,
    gate_stride, up_stride,                                 # elements from one row to the next
    I: tl.constexpr, BLOCK_I: tl.constexpr,
):
    # Who am I?  One program = BLOCK_I channels of one token.
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)                                     # [BLOCK_I]
    live = i < I                                                                               # [BLOCK_I]

    # What do I read?  My channels of both halves, once. What do I carry?  Nothing.
    gate = tl.load(gate_ptr + t * gate_stride + i, mask=live, other=0.0).to(tl.float32)        # [BLOCK_I]
    up = tl.load(up_ptr + t * up_stride + i, mask=live, other=0.0).to(tl.float32)              # [BLOCK_I]
    out = gate / (1.0 + tl.exp(-gate)) * up                                                    # [BLOCK_I]
    tl.store(out_ptr + t * I + i, out.to(out_ptr.dtype.element_ty), mask=live)


# ---------------------------------------------------------------- the launcher
def silu_mul(gate, up):
    """silu(gate) * up, row by row. Shapes: see the module docstring."""
    check_alike("silu_mul", gate=gate, up=up)
    check_packed("silu_mul", 1, gate=gate, up=up)
    if gate.ndim != 2 or gate.shape != up.shape:
        raise ValueError(f"silu_mul: gate {list(gate.shape)} and up {list(up.shape)} must both be [tokens, channels]")
    if not on_triton(gate):
        return silu_mul_reference(gate, up)
    T, I = gate.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if T:
        grid = (T, triton.cdiv(I, BLOCK_I))
        _silu_mul_kernel[grid](gate, up, out, gate.stride(0), up.stride(0), I=I, BLOCK_I=BLOCK_I)
    return out
