"""x times weights of 4 or 8 bits: unpacked in registers, scaled, multiplied. int4_matmul and int8_matmul call it.

    out = x . w^T + bias            w[n, k] = (number[n, k] - zero[n, k // GROUP]) * scale[n, k // GROUP]

Shapes
    x        [M, K]              rows may be strided
    words    [N, W]  int32       PER = 32 / BITS columns each, the first in the lowest bits; W = ceil(K / PER)
    scales   [N, Q]              zeros [N, Q] uint8 (4 bits), int8 (8 bits) or None; Q = ceil(K / GROUP)
    bias     [N] or None         returns [M, N], summed in fp32, rounded once at the store

Number   Bits put where a float keeps the top of its fraction, under the exponent of 2^BITS, are the float
         2^BITS + number: a shift, and one instruction that masks and sets the exponent. A conversion would take a
         quarter of the rate. (8-bit numbers are signed: turning their top bit over adds 128.) The exponent is an
         argument, `magic`, because two constants do not fit into one instruction.
Rows     M = 1 or 2     _gemv_kernel. A thread loads 16 bytes of a row, 32 or 16 columns of one group, and the same
                        stretch of x; splits both into single columns without leaving its registers; multiplies in
                        fp32; and scales once per group: scale * (sum of f x - f(zero) * sum of x).
         up to DOT_ROWS _dot_kernel. Matrix instructions, weights as their first operand, from registers: number j
                        of every word is a matrix of its own, multiplied with columns j, j + PER, ... of x; the sum
                        over k does not mind the order. Weights are rounded to x.dtype, their products are not.
                        K is cut until there are 2 programs per processor; _add_splits_kernel adds the pieces, in
                        order, so a result does not depend on who finished first.
         beyond         _dequantize_kernel, N K numbers of x.dtype for as long as the product takes, then F.linear.
Cost     N * K * (BITS / 8 + 2 / GROUP) bytes; at M = 1 on 132 processors at 4.8 TB/s there is time for 3 instructions
         per 4-bit weight. DOT_ROWS follows from counting instructions; `python -m minserve bench matmul` measures it.
Limits   An infinite x gives NaN in the GEMV, where the definition may give inf: sums of f x and of x are subtracted.
Sources  Kim et al. 2022, "Who Says Elephants Can't Run" (arXiv:2211.10017), sec. 3: integers to floats by or-ing bits.
         Stream-K, Osama et al. 2023 (arXiv:2301.03598), on cutting K.
Story    notebooks/09_quantization.ipynb
"""

import torch
import torch.nn.functional as F

from minserve.kernels import architecture, has_matrix_units, processors, tl, triton

GEMV_ROWS, DOT_ROWS, DOT_ROWS_WITHOUT_UNITS = 2, 256, 16
BLOCK, BLOCK_SUM = 256, 1024  # words that a program dequantises; numbers that a program sums over the splits
WHOLE_ROW = 1 << 30  # a group that is a multiple of every tile
MAGIC = {4: 0x41800000, 8: 0x43C00000}  # 2^BITS as a float; at 8 bits with the number's top bit turned over


# ---------------------------------------------------------------- the kernels
# fmt: off
@triton.jit
def _halves(parts, shape: tl.constexpr):
    """Each part, whose last dimension is even, taken apart into its even and its odd columns."""
    even, odd = (), ()
    for p in tl.static_range(len(parts)):
        a, b = tl.split(tl.reshape(parts[p], shape))
        even, odd = even + (a,), odd + (b,)
    return even + odd


@triton.jit
def _number(words, j: tl.constexpr, magic, BITS: tl.constexpr):
    """2^BITS + number j of each word, as fp32."""
    UP: tl.constexpr = 23 - BITS - BITS * j
    words = words << UP if UP > 0 else words >> -UP
    return ((words & (((1 << BITS) - 1) << (23 - BITS))) ^ magic).to(tl.float32, bitcast=True)


@triton.jit
def _zero(zeros_ptr, at, mask, BITS: tl.constexpr):
    """What _number gives for the weight 0."""
    zero = 24.0 if BITS == 4 else 384.0
    if zeros_ptr is not None:
        zero = tl.load(zeros_ptr + at, mask=mask, other=0).to(tl.float32) + (16.0 if BITS == 4 else 384.0)
    return zero


@triton.jit
def _gemv_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr,    # zeros_ptr, bias_ptr may be None
    x_stride, words_stride, N, magic,
    BITS: tl.constexpr, M: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, VEC: tl.constexpr,    # VEC numbers of x, 16 bytes
):
    # Who am I?  One program = ROWS neighbouring rows of the weight; a lane takes WORDS words of each at a time.
    PER: tl.constexpr = 32 // BITS
    W: tl.constexpr = (K + PER - 1) // PER
    Q: tl.constexpr = (K + GROUP - 1) // GROUP
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)                                           # [ROWS]
    lane = tl.arange(0, LANES)                                                                 # [LANES]
    row_ptr = words_ptr + (n.to(tl.int64) * words_stride)[:, None, None]                       # [ROWS, 1, 1]
    mine = n < N                                                                               # [ROWS]

    # What do I carry?  One sum per lane, row of the weight and row of x; a row's only scale, if it has just one.
    sums = (tl.zeros([ROWS, LANES], tl.float32),) * M
    if Q == 1:
        scale = tl.load(scales_ptr + n, mask=mine, other=0.0).to(tl.float32)[:, None]          # [ROWS, 1]
        zero = _zero(zeros_ptr, n[:, None], mine[:, None], BITS)

    # What do I read?  My rows once, their scales once per lane; x beside them.
    for start in range(0, W, LANES * WORDS):
        i = start + (lane[:, None] * WORDS + tl.arange(0, WORDS)[None, :])[None]               # [1, LANES, WORDS]
        live = mine[:, None, None] & (i < W)
        words = (tl.load(row_ptr + i, mask=live, other=0, eviction_policy="evict_first"),)
        if WORDS == 4:
            words = _halves(words, [ROWS, LANES, 2, 2])
        if WORDS > 1:
            words = _halves(words, [ROWS, LANES, 2])                                           # WORDS x [ROWS, LANES]
        else:
            words = (tl.reshape(words[0], [ROWS, LANES]),)
        k = (start + lane * WORDS) * PER                                                       # [LANES]
        if Q > 1:
            at = n[:, None].to(tl.int64) * Q + (k // GROUP)[None, :]                           # [ROWS, LANES]
            live = mine[:, None] & (k < K)[None, :]
            scale = tl.load(scales_ptr + at, mask=live, other=0.0).to(tl.float32)              # [ROWS, LANES]
            zero = _zero(zeros_ptr, at, live, BITS)
        new = ()
        for m in tl.static_range(M):
            dot = tl.zeros([ROWS, LANES], tl.float32)
            total = tl.zeros([1, LANES], tl.float32)
            for t in tl.static_range(WORDS * PER // VEC):
                c = k[:, None] + t * VEC + tl.arange(0, VEC)[None, :]                          # [LANES, VEC]
                xs = (tl.load(x_ptr + m * x_stride + c, mask=c < K, other=0.0).to(tl.float32),)
                if VEC == 8:
                    xs = _halves(xs, [LANES, 4, 2])
                xs = _halves(_halves(xs, [LANES, 2, 2]), [LANES, 2])                           # VEC x [LANES]
                for v in tl.static_range(VEC):
                    x = xs[v][None, :]
                    total += x
                    dot += _number(words[(t * VEC + v) // PER], (t * VEC + v) % PER, magic, BITS) * x
            new = new + (sums[m] + scale * (dot - zero * total),)
        sums = new

    for m in tl.static_range(M):
        out = tl.sum(sums[m], axis=1)                                                          # [ROWS]
        if bias_ptr is not None:
            out += tl.load(bias_ptr + n, mask=mine, other=0.0).to(tl.float32)
        tl.store(out_ptr + m * N + n, out.to(out_ptr.dtype.element_ty), mask=mine)


@triton.jit
def _dot_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr,    # out [splits, tokens, N], fp32 if splits > 1
    x_stride, words_stride, tokens, N, splits, magic,
    BITS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):
    # Who am I?  One program = BLOCK_N outputs of BLOCK_M tokens, over one share of the columns.
    PER: tl.constexpr = 32 // BITS
    W: tl.constexpr = (K + PER - 1) // PER
    Q: tl.constexpr = (K + GROUP - 1) // GROUP
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)                                     # [N]
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)                                     # [M]
    split = tl.program_id(2)
    row_ptr = words_ptr + (n.to(tl.int64) * words_stride)[:, None]                             # [N, 1]
    x_row_ptr = x_ptr + (m.to(tl.int64) * x_stride)[:, None]                                   # [M, 1]
    mine, seen = (n < N)[:, None], (m < tokens)[:, None]

    # What do I carry?  The transposed result.
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)                                             # [N, M]

    # What do I read?  A tile of words with a scale for each, in the layout of the words; a tile of x.
    share = tl.cdiv(tl.cdiv(W, BLOCK_W), splits) * BLOCK_W
    for start in range(split * share, tl.minimum(split * share + share, W), BLOCK_W):
        i = start + tl.arange(0, BLOCK_W)[None, :]                                             # [1, W]
        words = tl.load(row_ptr + i, mask=mine & (i < W), other=0)                             # [N, W]
        at = n[:, None].to(tl.int64) * Q + i * PER // GROUP                                    # [N, W]
        scale = tl.load(scales_ptr + at, mask=mine & (i < W), other=0.0).to(tl.float32)        # [N, W]
        zero = _zero(zeros_ptr, at, mine & (i < W), BITS) * scale                              # [N, W]
        c = start * PER + tl.arange(0, BLOCK_W * PER)[None, :]                                 # [1, W * PER]
        xs = (tl.load(x_row_ptr + c, mask=seen & (c < K), other=0.0),)
        if PER == 8:
            xs = _halves(xs, [BLOCK_M, BLOCK_W * 4, 2])
        xs = _halves(_halves(xs, [BLOCK_M, BLOCK_W * 2, 2]), [BLOCK_M, BLOCK_W, 2])            # PER x [M, W]
        for j in tl.static_range(PER):
            w = (_number(words, j, magic, BITS) * scale - zero).to(x_ptr.dtype.element_ty)     # [N, W]
            acc = tl.dot(w, tl.trans(xs[j]), acc, input_precision="ieee")

    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=(n < N) & (split == 0), other=0.0).to(tl.float32)    # [N]
        acc += bias[:, None]
    to = (split * tokens + m).to(tl.int64)[None, :] * N + n[:, None]                           # [N, M]
    tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=mine & (m < tokens)[None, :])


@triton.jit
def _add_splits_kernel(parts_ptr, out_ptr, numel, splits, BLOCK: tl.constexpr):
    # Who am I?  One program = BLOCK numbers of the result, summed over the splits in their order.
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)                                         # [BLOCK]
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(0, splits):
        total += tl.load(parts_ptr + tl.cast(split, tl.int64) * numel + i, mask=i < numel, other=0.0)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < numel)


@triton.jit
def _dequantize_kernel(
    words_ptr, scales_ptr, zeros_ptr, out_ptr,                     # out [N, K]
    words_stride, magic,
    BITS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):
    # Who am I?  One program = BLOCK words of one row: a word per thread, its columns side by side at the store.
    PER: tl.constexpr = 32 // BITS
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)                                         # [BLOCK]
    live = i * PER < K
    words = tl.load(words_ptr + n * words_stride + i, mask=live, other=0)
    at = n * ((K + GROUP - 1) // GROUP) + i * PER // GROUP
    scale = tl.load(scales_ptr + at, mask=live, other=0.0).to(tl.float32)
    zero = _zero(zeros_ptr, at, live, BITS)
    w = ()
    for j in tl.static_range(PER):
        w = w + ((_number(words, j, magic, BITS) - zero) * scale,)                             # PER x [BLOCK]
    if PER == 8:
        w = (tl.join(w[0], w[4]), tl.join(w[1], w[5]), tl.join(w[2], w[6]), tl.join(w[3], w[7]))
    out = tl.join(tl.join(w[0], w[2]), tl.join(w[1], w[3])).reshape(BLOCK * PER)
    k = tl.program_id(1) * BLOCK * PER + tl.arange(0, BLOCK * PER)
    tl.store(out_ptr + n * K + k, out.to(out_ptr.dtype.element_ty), mask=k < K)
# fmt: on


# ---------------------------------------------------------------- the launcher
def packed_matmul(bits: int, x, words, scales, zeros, group: int | None, bias):
    """The product, by the kernel that suits the number of rows."""
    rows = len(x)
    arch = architecture(x.device)
    most = DOT_ROWS if has_matrix_units(x.dtype, arch) else DOT_ROWS_WITHOUT_UNITS
    how = by_gemv if rows <= GEMV_ROWS else by_dot if rows <= most else by_dense
    return how(bits, x, words, scales, zeros, group, bias)


def by_gemv(bits: int, x, words, scales, zeros, group: int | None, bias):
    (M, K), N = x.shape, len(words)
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    block = gemv_tiles(bits, N, K, group, x.dtype, architecture(x.device), processors(x.device))
    if block["WORDS"] * 32 // bits < block["VEC"]:
        return by_dot(bits, x, words, scales, zeros, group, bias)
    if out.numel():
        _gemv_kernel[(triton.cdiv(N, block["ROWS"]),)](
            x, words, scales, zeros, bias, out, x.stride(0), words.stride(0), N, MAGIC[bits],
            BITS=bits, M=M, K=K, GROUP=group_of(group, K), **block,
        )  # fmt: skip
    return out


def by_dot(bits: int, x, words, scales, zeros, group: int | None, bias, splits: int | None = None):
    (M, K), N = x.shape, len(words)
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block = dot_tiles(bits, M, x.dtype, architecture(x.device))
    tiles = triton.cdiv(N, block["BLOCK_N"]), triton.cdiv(M, block["BLOCK_M"])
    if splits is None:
        along = triton.cdiv(words.shape[1], block["BLOCK_W"])
        splits = max(1, min(triton.cdiv(2 * processors(x.device), tiles[0] * tiles[1]), along // 4))
    parts = out if splits == 1 else torch.empty((splits, M, N), dtype=torch.float32, device=x.device)
    _dot_kernel[(*tiles, splits)](
        x, words, scales, zeros, bias, parts, x.stride(0), words.stride(0), M, N, splits, MAGIC[bits],
        BITS=bits, K=K, GROUP=group_of(group, K), **block,
    )  # fmt: skip
    if splits > 1:
        _add_splits_kernel[(triton.cdiv(M * N, BLOCK_SUM),)](parts, out, M * N, splits, BLOCK=BLOCK_SUM)
    return out


def by_dense(bits: int, x, words, scales, zeros, group: int | None, bias):
    K, N = x.shape[1], len(words)
    weight = torch.empty((N, K), dtype=x.dtype, device=x.device)
    if weight.numel():
        _dequantize_kernel[(N, triton.cdiv(words.shape[1], BLOCK))](
            words, scales, zeros, weight, words.stride(0), MAGIC[bits],
            BITS=bits, K=K, GROUP=group_of(group, K), BLOCK=BLOCK,
        )  # fmt: skip
    return F.linear(x, weight, bias)


def group_of(group: int | None, K: int) -> int:
    return WHOLE_ROW if group is None or group >= K else group


def gemv_tiles(bits: int, N: int, K: int, group: int | None, dtype, arch: str, processors: int) -> dict:
    """Rows per program as kernels/gemv.py has them; 16 bytes of words per lane, fewer where a group is smaller."""
    words, per, warp = 4, 32 // bits, 64 if arch.startswith("gfx") else 32
    while group_of(group, K) % (words * per):
        words //= 2
    warps = min(4, triton.next_power_of_2(max(1, triton.cdiv(K, warp * words * per))))
    rows = 4
    while rows > 1 and triton.cdiv(N, rows) < 4 * processors:
        rows //= 2
    return dict(ROWS=rows, LANES=warps * warp, WORDS=words, VEC=16 // dtype.itemsize, num_warps=warps)


def dot_tiles(bits: int, M: int, dtype, arch: str) -> dict:
    """64 KiB or so of words and x under way with asynchronous copies; small tiles where multiply-adds do the work."""
    block = dict(BLOCK_M=min(64, max(16, triton.next_power_of_2(M))), BLOCK_W=16, num_warps=4, num_stages=1)
    if not has_matrix_units(dtype, arch):
        return block | dict(BLOCK_M=16, BLOCK_N=32)
    if arch.startswith("gfx"):
        return block | dict(BLOCK_N=64)
    return block | dict(BLOCK_N=128, num_stages=3, num_warps=4 if block["BLOCK_M"] == 16 else 8)
