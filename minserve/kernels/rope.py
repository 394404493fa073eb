"""Rotary position embedding: a token's position becomes an angle by which its queries and keys are turned."""

import torch


# ---------------------------------------------------------------- the definition
def _rotate(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)                                                 # [T, heads, D/2]
    cos, sin = cos[:, None], sin[:, None]                                                      # [T, 1, D/2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_reference(q, k, cos, sin):
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


# ---------------------------------------------------------------- the launcher
def rope(q, k, cos, sin):
    return rope_reference(q, k, cos, sin)
