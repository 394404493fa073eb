"""RMS norm, alone or fused with the residual add before it: keep a vector's direction, fix its length."""

import torch

from minserve.kernels import check_alike, check_packed


# ---------------------------------------------------------------- the definition
def rms_norm_reference(x, weight, eps: float):
    y = x.float()                                                                              # [T, E]
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)                               # [T, 1]
    return (y * scale * weight.float()).to(x.dtype)                                            # [T, E]


def add_rms_norm_reference(x, residual, weight, eps: float):
    total = residual + x                                  # [T, E], rounded to the dtype: it is stored
    return rms_norm_reference(total, weight, eps), total


# ---------------------------------------------------------------- the launcher
def rms_norm(x, weight, eps: float):
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x, residual, weight, eps: float):
    return add_rms_norm_reference(x, residual, weight, eps)
