"""A linear layer for one to four tokens: the weights travel once, and nothing else matters.

    out[m] = weight . x[m] + bias

Shapes
    x        [M, K]     M = 1 to 4 rows, which may be strided; K channels
    weight   [N, K]     as nn.Linear keeps it; rows may be strided (a slice of a fused projection)
    bias     [N]        or None
    returns  [M, N]     fp32 inside, rounded once at the store

How      A program owns ROWS rows of the weight and walks along K. A thread loads 16 bytes of each row, multiplies
         them with the same stretch of every x, and keeps one sum per (row of the weight, row of x): threads first
         talk to each other after the last load, so nothing holds the loads up. The stretch of x is read again by
         every program, from L1, and serves ROWS rows there.
         A matrix instruction would multiply 16 rows of x at once. Here 12 to 15 of them would be padding, and its
         operands would have to pass through shared memory; multiply-adds suffice up to M = 4.
Rule     K is never cut: pieces would have to be added up by a second kernel, and a launch is worth megabytes of
         weights. Instead ROWS goes from 4 to 2 to 1 until there are 4 programs per processor (`tiles`): the last
         programs to finish are then a small part of all. What is under way at once does not depend on ROWS: N /
         processors rows, or as many as a processor holds, 2 KiB of each (4 warps x 32 threads x 16 bytes). With
         N = 2,048 and 132 processors that is 31 KiB for each, enough to hide 0.87 us of latency at 4.8 TB/s.
Cost     2 * M * N * K flops over N * K * itemsize bytes: M flops per byte at 16 bits; memory-bound everywhere.
Place    `python -m minserve bench gemv` measures it beside F.linear, on whatever GPU it is run.
Sources  Little's law for the bytes in flight; NVIDIA, CUDA C++ Best Practices Guide, "Coalesced access".
Story    notebooks/08_the_engine.ipynb
"""

import torch
import torch.nn.functional as F

from minserve.kernels import architecture, check_alike, check_packed, on_triton, processors, tl, triton

MOST_ROWS_OF_X = 4


# ---------------------------------------------------------------- the definition
def gemv_reference(x, weight, bias=None):
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide).to(x.dtype)  # [M, N]


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,                   # bias_ptr may be None
    x_stride, weight_stride, N,
    M: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,    # VEC numbers, 16 bytes, for each of LANES threads
):
    # Who am I?  One program = ROWS neighbouring rows of the weight: as many outputs for each row of x.
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)                                           # [ROWS]
    stretch = (tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :])[None]          # [1, LANES, VEC]
    row_ptr = weight_ptr + (n.to(tl.int64) * weight_stride)[:, None, None]                     # [ROWS, 1, 1]
    mine = (n < N)[:, None, None]                                                              # [ROWS, 1, 1]

    # What do I carry?  One sum per thread, row of the weight and row of x.
    sums = (tl.zeros([ROWS, LANES], tl.float32),) * M

    # What do I read?  My rows once, LANES * VEC channels at a time; x beside them.
    for start in range(0, K, LANES * VEC):
        k = start + stretch                                                                    # [1, LANES, VEC]
        w = tl.load(row_ptr + k, mask=mine & (k < K), other=0.0, eviction_policy="evict_first")
        w = w.to(tl.float32)                                                                   # [ROWS, LANES, VEC]
        new = ()
        for m in tl.static_range(M):
            x = tl.load(x_ptr + m * x_stride + k, mask=k < K, other=0.0).to(tl.float32)        # [1, LANES, VEC]
            new = new + (sums[m] + tl.sum(w * x, axis=2),)                                     # [ROWS, LANES]
        sums = new

    for m in tl.static_range(M):
        out = tl.sum(sums[m], axis=1)                                                          # [ROWS]
        if bias_ptr is not None:
            out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)                 # [ROWS]
        tl.store(out_ptr + m * N + n, out.to(out_ptr.dtype.element_ty), mask=n < N)
# fmt: on


# ---------------------------------------------------------------- the launcher
def gemv(x, weight, bias=None):
    """weight . x + bias for up to four rows of x. Shapes: see the module docstring."""
    _check(x, weight, bias)
    if not on_triton(x):
        return gemv_reference(x, weight, bias)
    (M, K), N = x.shape, weight.shape[0]
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if M and N:
        block = tiles(N, K, x.dtype, architecture(x.device), processors(x.device))
        _gemv_kernel[(triton.cdiv(N, block["ROWS"]),)](
            x, weight, bias, out, x.stride(0), weight.stride(0), N, M=M, K=K, **block
        )
    return out


def tiles(N: int, K: int, dtype, arch: str, processors: int) -> dict:
    """Rows per program, threads and numbers per thread for one weight: the module's docstring says why.

    4 warps, fewer where a row is shorter than the stretch they cover; a warp is 64 threads on AMD.
    """
    vec, warp = 16 // dtype.itemsize, 64 if arch.startswith("gfx") else 32
    warps = min(4, triton.next_power_of_2(max(1, triton.cdiv(K, warp * vec))))
    rows = 4
    while rows > 1 and triton.cdiv(N, rows) < 4 * processors:
        rows //= 2
    return dict(ROWS=rows, LANES=warps * warp, VEC=vec, num_warps=warps)


def _check(x, weight, bias):
    biases = {} if bias is None else {"bias": bias}
    check_alike("gemv", x=x, weight=weight, **biases)
    check_packed("gemv", 1, x=x, weight=weight, **biases)
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"gemv: x {list(x.shape)} does not go with weight {list(weight.shape)}; x is [rows, in] and the "
            f"weight [out, in]"
        )
    if len(x) > MOST_ROWS_OF_X:
        raise ValueError(
            f"gemv: {len(x)} rows of x; from {MOST_ROWS_OF_X + 1} rows on matrix instructions are worth it: use "
            f"torch.nn.functional.linear"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"gemv: bias {list(bias.shape)} must be [{len(weight)}], a number for each output")
