"""Two kernels that do nothing but move memory: the ceilings every other kernel is compared with."""

import torch

TILE = 8192                                               # elements one program moves


# ---------------------------------------------------------------- the definitions
def copy_reference(src, dst) -> None:
    dst.copy_(src)


def total_reference(x):
    """fp32 sums of x's elements, TILE at a time: [ceil(x.numel() / TILE)]."""
    x = x.reshape(-1)
    whole = x.numel() // TILE * TILE
    sums = x[:whole].view(-1, TILE).sum(1, dtype=torch.float32)
    if whole == x.numel():
        return sums
    return torch.cat((sums, x[whole:].sum(dtype=torch.float32)[None]))


# ---------------------------------------------------------------- the launchers
def copy(src, dst) -> None:
    copy_reference(src, dst)


def total(x):
    return total_reference(x)
