"""The gate of a Llama MLP: silu(gate) * up in one pass over memory."""

import torch.nn.functional as F


# ---------------------------------------------------------------- the definition
def silu_mul_reference(gate, up):
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)                                  # [T, I]


# ---------------------------------------------------------------- the launcher
def silu_mul(gate, up):
    return silu_mul_reference(gate, up)
