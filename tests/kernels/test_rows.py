"""The kernels that work row by row equal their definitions, on strided rows in poisoned memory."""

import kernel_checks as checks
import pytest
import torch
from kernel_checks import DEVICE, DTYPES, needs_kernel, randn

from minserve.kernels import gemv, kv_write, rms_norm, rope, rope_and_write, silu_mul, stream

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@needs_kernel
@dtypes
@pytest.mark.parametrize("T, E, seed", [(1, 64, 0), (3, 100, 1), (2, 576, 2), (4, 1025, 3), (0, 64, 0)])
def test_rms_norm(T, E, seed, dtype):
    checks.check_rms_norm(rms_norm, T, E, dtype, seed)


@needs_kernel
def test_rms_norm_of_tiny_rows_is_governed_by_eps():
    checks.check_rms_norm(rms_norm, size=1e-3)
    checks.check_rms_norm(rms_norm, size=0.0)


@needs_kernel
@dtypes
@pytest.mark.parametrize(
    "T, H, G, D", [(3, 6, 2, 64), (1, 4, 4, 128), (2, 4, 1, 96), (2, 9, 3, 80), (2, 9, 3, 24), (0, 6, 2, 64)]
)
def test_rope(T, H, G, D, dtype):
    checks.check_rope(rope, T, H, G, D, dtype)


@needs_kernel
@dtypes
@pytest.mark.parametrize(
    "T, C", [(1, 64), (3, 100), (2, silu_mul.BLOCK_C), (2, silu_mul.BLOCK_C + 1), (0, 64)]
)
def test_silu_mul(T, C, dtype):
    checks.check_silu_mul(silu_mul, T, C, dtype)


@needs_kernel
@pytest.mark.filterwarnings(
    "ignore:overflow encountered"
)  # numpy's remark under the interpreter: 1 / inf is meant
def test_silu_mul_does_not_overflow():
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=DEVICE)
    assert silu_mul.silu_mul(gate, torch.ones_like(gate)).tolist() == [[0.0, 0.0, 0.0, 100.0, 1e4]]


@needs_kernel
@dtypes
@pytest.mark.parametrize("slots", [[0], [7, 0], [5, -1, 0, 7], [-1, -1], []], ids=str)
@pytest.mark.parametrize("G, D", [(2, 64), (1, 24), (3, 80)])
def test_kv_write(slots, G, D, dtype):
    checks.check_kv_write(kv_write, slots, G=G, D=D, dtype=dtype) if slots else _nothing_to_write(G, D, dtype)


def _nothing_to_write(G, D, dtype):
    empty, cache = randn(0, G, D, dtype=dtype), randn(4, G, D, dtype=dtype)
    before = cache.clone()
    kv_write.kv_write(empty, empty, cache, cache, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert torch.equal(cache, before)


@needs_kernel
@dtypes
@pytest.mark.parametrize("slots", [[3], [5, -1, 0, 7], [-1, -1], []], ids=str)
@pytest.mark.parametrize("H, G, D, norms", [
    (6, 2, 64, False), (4, 2, 128, True), (9, 3, 64, False), (4, 4, 24, True), (14, 2, 80, False), (4, 1, 96, True),
])  # fmt: skip
def test_rope_and_write(slots, H, G, D, norms, dtype):
    checks.check_rope_and_write(rope_and_write, slots, H, G, D, norms, dtype, seed=D)


@needs_kernel
def test_rope_and_write_of_tiny_heads_is_governed_by_eps():
    checks.check_rope_and_write(rope_and_write, size=1e-3)
    checks.check_rope_and_write(rope_and_write, size=0.0)


@needs_kernel
@dtypes
@pytest.mark.parametrize("M", [1, 2, 3, 4])
@pytest.mark.parametrize("N, K", [(1, 8), (10, 300), (129, 64), (255, 40), (3, 2500)])
def test_gemv(M, N, K, dtype):
    """The interpreter's 16 processors take 1 row per program below N = 127, 2 below 253, then 4."""
    checks.check_gemv(gemv, M, N, K, bias=N % 2, dtype=dtype, seed=M)


@needs_kernel
def test_gemv_of_nothing():
    assert gemv.gemv(randn(0, 8), randn(3, 8)).shape == (0, 3)
    assert gemv.gemv(randn(2, 8), randn(0, 8)).shape == (2, 0)


@needs_kernel
@pytest.mark.parametrize("N, K, dtype, processors, rows, warps", [
    (4096, 4096, torch.bfloat16, 132, 4, 4), (2048, 2048, torch.bfloat16, 132, 2, 4),
    (576, 576, torch.bfloat16, 132, 1, 4), (28672, 256, torch.float16, 108, 4, 1),
    (28672, 260, torch.float16, 108, 4, 2), (28672, 260, torch.float32, 108, 4, 4),
])  # fmt: skip
def test_gemv_has_four_programs_per_processor_or_one_row_each(N, K, dtype, processors, rows, warps):
    block = gemv.tiles(N, K, dtype, "sm_90", processors)
    assert (block["ROWS"], block["num_warps"]) == (rows, warps)
    assert block["LANES"] == 32 * warps and block["VEC"] * dtype.itemsize == 16
    assert N // rows >= 4 * processors or rows == 1
    assert gemv.tiles(N, K, dtype, "gfx942", processors)["LANES"] % 64 == 0


@needs_kernel
@dtypes
@pytest.mark.parametrize("numel", [1, 8191, 8192, 8193, 20_000])
def test_stream(numel, dtype):
    checks.check_stream(stream, numel, dtype)


# ---------------------------------------------------------------- bad input, on every road
def test_refusals_say_what_to_change():
    x, w = randn(2, 8), randn(8)
    q, k, angle = randn(2, 4, 8), randn(2, 2, 8), randn(2, 4)
    cache, slots = randn(5, 2, 8), torch.tensor([0, 1], device=DEVICE)

    def fused(row=64, turns=None, where=slots):
        return randn(2, row), randn(9, 8) if turns is None else turns, slots, where, cache, cache.clone()

    for call, message in [
        (lambda: rms_norm.rms_norm(x, randn(7), 1e-5), r"weight \[7\]"),
        (lambda: rms_norm.rms_norm(x.half(), w, 1e-5), "x is torch.float16 .* weight is torch.float32"),
        (lambda: rms_norm.rms_norm(randn(8, 2).T, w, 1e-5), r"strides \[1, 2\].*x.contiguous\(\)"),
        (
            lambda: rms_norm.add_rms_norm(x, randn(3, 8), w, 1e-5),
            r"residual \[3, 8\] does not go with x \[2, 8\]",
        ),
        (lambda: rope.rope(randn(2, 4, 7), randn(2, 2, 7), angle, angle), "dimension 7 is odd"),
        (lambda: rope.rope(q, randn(3, 2, 8), angle, angle), "the 2 tokens and 8 channels"),
        (
            lambda: rope.rope(q, k, angle.half(), angle),
            r"cos is \[2, 4\] torch.float16.*\[2, 4\] torch.float32",
        ),
        (lambda: rope.rope(q, k, angle, angle[:1]), r"sin is \[1, 4\]"),
        (lambda: silu_mul.silu_mul(x, randn(2, 9)), r"gate \[2, 8\] and up \[2, 9\]"),
        (lambda: kv_write.kv_write(k, k, cache, cache, slots.int()), r"slots is \[2\] torch.int32"),
        (lambda: kv_write.kv_write(k, k, cache, randn(5, 2, 9), slots), "must agree"),
        (lambda: kv_write.kv_write(k, k, cache.half(), cache, slots), "k_cache is torch.float16"),
        (lambda: gemv.gemv(randn(5, 8), randn(3, 8)), "5 rows of x; .*functional.linear"),
        (lambda: gemv.gemv(x, randn(3, 9)), r"x \[2, 8\] does not go with weight \[3, 9\]"),
        (lambda: gemv.gemv(x, randn(3, 8), randn(4)), r"bias \[4\] must be \[3\]"),
        (lambda: gemv.gemv(x, randn(8, 3).T), r"weight.contiguous\(\)"),
        (lambda: rope_and_write.rope_and_write(*fused(row=65)), r"rows of 65 do not hold \(H \+ 2 x 2\) x 8"),
        (lambda: rope_and_write.rope_and_write(*fused(row=56)), "for some multiple H of 2"),
        (lambda: rope_and_write.rope_and_write(*fused(row=32)), "for some multiple H of 2"),
        (
            lambda: rope_and_write.rope_and_write(*fused(), q_norm=randn(8)),
            r"\{'q_norm': \[8\]\}; .* or neither",
        ),
        (
            lambda: rope_and_write.rope_and_write(*fused(), q_norm=randn(8), k_norm=randn(4)),
            r"k_norm': \[4\]",
        ),
        (
            lambda: rope_and_write.rope_and_write(*fused(turns=randn(9, 4))),
            r"\[positions, 8\] .* 4 cosines",
        ),
        (
            lambda: rope_and_write.rope_and_write(*fused(where=slots.int())),
            r"slots is \[2\] torch.int32",
        ),
        (lambda: stream.copy(x, randn(3, 8)), "differ in shape"),
        (lambda: stream.total(randn(8, 2).T), r"x.contiguous\(\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
