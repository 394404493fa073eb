"""Two kernels that do nothing but move memory: the ceilings every other kernel is compared with.

    copy(src, dst)    dst = src               2 * bytes moved: read + write
    total(x)          fp32 sums of x          1 * bytes moved: read only, as decode reads weights and KV cache

Shapes   any, contiguous; `total` returns [ceil(x.numel() / TILE)] partial sums, too few bytes to count
Cost     at most one flop per element: nothing but the memory system can be what limits them.
Sources  McCalpin 1995, STREAM.
Story    notebooks/00_the_machine.ipynb
"""

import torch

from minserve.kernels import check_alike, on_triton, tl, triton

TILE = 8192  # elements per program; 32 to 64 per thread, all in flight


# ---------------------------------------------------------------- the definitions
def copy_reference(src, dst) -> None:
    dst.copy_(src)


def total_reference(x):
    x = x.view(-1)
    whole = x.numel() // TILE * TILE
    sums = x[:whole].view(-1, TILE).sum(1, dtype=torch.float32)  # [whole / TILE]
    if whole == x.numel():
        return sums
    return torch.cat((sums, x[whole:].sum(dtype=torch.float32)[None]))


# ---------------------------------------------------------------- the kernels
# fmt: off
@triton.jit
def _copy_kernel(src_ptr, dst_ptr, numel, TILE: tl.constexpr):
    # Who am I?  One program = TILE neighbouring elements. int64: buffers here are bigger than 2**31 elements.
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)                              # [TILE]
    tl.store(dst_ptr + i, tl.load(src_ptr + i, mask=i < numel, other=0.0), mask=i < numel)


@triton.jit
def _total_kernel(x_ptr, sums_ptr, numel, TILE: tl.constexpr):
    # Who am I?  One program = TILE neighbouring elements and their sum.
    program = tl.program_id(0).to(tl.int64)
    i = program * TILE + tl.arange(0, TILE)                                                    # [TILE]
    x = tl.load(x_ptr + i, mask=i < numel, other=0.0).to(tl.float32)                           # [TILE]
    tl.store(sums_ptr + program, tl.sum(x, axis=0))
# fmt: on


# ---------------------------------------------------------------- the launchers
def copy(src, dst) -> None:
    """dst = src, as fast as this memory goes."""
    check_alike("copy", src=src, dst=dst)
    _check("copy", src=src, dst=dst)
    if src.shape != dst.shape:
        raise ValueError(f"copy: src {list(src.shape)} and dst {list(dst.shape)} differ in shape")
    if not on_triton(src):
        return copy_reference(src, dst)
    if src.numel():
        _copy_kernel[(triton.cdiv(src.numel(), TILE),)](src, dst, src.numel(), TILE=TILE, num_warps=8)


def total(x):
    """Read every element of x once: fp32 partial sums, TILE elements each."""
    _check("total", x=x)
    if not on_triton(x):
        return total_reference(x)
    programs = triton.cdiv(x.numel(), TILE)
    sums = torch.empty(programs, dtype=torch.float32, device=x.device)
    if programs:
        _total_kernel[(programs,)](x, sums, x.numel(), TILE=TILE, num_warps=8)
    return sums


def _check(who, **tensors):
    for name, x in tensors.items():
        if not x.is_contiguous():
            raise ValueError(
                f"{who}: {name} {list(x.shape)} has strides {list(x.stride())}; memory is streamed front to "
                f"back, so it must be contiguous: pass {name}.contiguous()"
            )
