"""The CPU's linears over quantized weights equal their definitions: any group, zeros or none, every road.

A check takes the kernels, as in test_native.py. Scales, zeros, bias and x lie between numbers that would show.
"""

import itertools

import pytest
import torch
from kernel_checks import moat
from test_native import BF16, FP32, INF, NAN, close, dtypes, needs_native, randn, run, same

from minserve.kernels import native, native_build
from minserve.kernels.int4_matmul import int4_matmul_reference, int4_weight
from minserve.kernels.int8_matmul import int8_matmul_reference
from minserve.kernels.packed_check import grouped

REFERENCE = {4: int4_matmul_reference, 8: int8_matmul_reference}
bits_of_both = pytest.mark.parametrize("bits", [4, 8])


@pytest.fixture(scope="module")
def ops():
    return native.Native()


@pytest.fixture(scope="module")
def without_tiles(tmp_path_factory):
    source = "#define NO_TILES\n" + native_build.source()
    return native.Native(native_build.build(source, tmp_path_factory.mktemp("native")))


def integers(low, high, *shape, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def weight(bits, N, K, group, dtype, zeros=False, seed=0):
    """qweight, scales, zeros, group of a weight whose outputs are about 1; K <= 8 holds every number."""
    Q = -(-K // min(group or K, K))
    if bits == 4:
        qweight = integers(-(2**31), 2**31, N, -(-K // 8), seed=seed).int()
        points = integers(0, 16, N, Q, seed=seed + 1).to(torch.uint8)
    else:
        qweight, points = (integers(-128, 128, N, n, seed=seed + n).to(torch.int8) for n in (K, Q))
    scales = (randn(N, Q, seed=seed + 2).abs() + 0.5) / K**0.5 / 2 ** (bits - 1)
    return qweight, moat(scales.to(dtype)), moat_byte(points) if zeros else None, group


def moat_byte(x):
    """Between rows of the largest number there is: NaN's place, where there is none."""
    room = torch.full((len(x) + 4, *x.shape[1:]), torch.iinfo(x.dtype).max, dtype=x.dtype)
    room[2:-2] = x
    return room[2:-2]


def check(ops, bits, T=3, N=33, K=37, group=None, dtype=FP32, zeros=False, wide=False):
    x, bias = moat(randn(T, K, dtype=dtype)), moat(randn(N, dtype=dtype, seed=3))
    case = weight(bits, N, K, group, FP32 if wide else dtype, zeros)
    for b in (bias, None):
        close(run(ops, f"linear_int{bits}", x, *case, b), REFERENCE[bits](x, *case, b))


def check_few(ops, bits, dtype=FP32, rows=(1, 2, 3, 7, 8, 13)):
    """Vectors: ragged rows and groups, and a group for every way of counting them."""
    groups = [None, 8, 24, 32, 48, 64, 128, 512] + [1, 5, 20] * (bits == 8)
    for K, group in itertools.product((5, 100, 200, 320), groups):
        for T, zeros in zip(rows, itertools.cycle((False, True))):
            check(ops, bits, T, 19, K, group, dtype, zeros, wide=T % 3 == 1)


def check_panels(ops, bits):
    """What a matrix unit takes: bf16, K and groups of whole tiles."""
    for K, group in [
        (32, None),
        (96, 32),
        (576, 128),
        (320, 64),
        (416, 96),
        (96, 48),
        (288, None),
        (640, None),
    ]:
        for T, N, zeros in [(5, 70, False), (17, 32, True), (33, 45, True), (70, 64, False)]:
            check(ops, bits, T, N, K, group, BF16, zeros, wide=T == 17)


def check_exact_sums(ops, bits):
    """One scale a row: the matrix unit sums the integers themselves, so powers of two lose nothing before the store."""
    K, N, T = 96, 40, 20
    x = integers(-1, 2, T, K).to(BF16)
    qweight, scales, zeros, _ = weight(bits, N, K, None, BF16, zeros=True)
    scales.copy_(2.0 ** integers(-3, 3, N, 1))
    for z in (zeros, None):
        same(
            getattr(ops, f"linear_int{bits}")(x, qweight, scales, z, None),
            REFERENCE[bits](x, qweight, scales, z, None),
        )


def check_rows_alone(ops, bits, rows, dtype=BF16, K=96, group=32):
    """A row's result has the same bits whatever else is in the batch, for all `rows` that take one road."""
    linear, case = getattr(ops, f"linear_int{bits}"), weight(bits, 50, K, group, dtype)
    x = randn(max(rows), K, dtype=dtype)
    most = linear(x, *case)
    for T in rows:
        same(linear(x[:T], *case), most[:T])


def exact(bits, x, qweight, scales, zeros, group, bias=None):
    """The definition in float64."""
    case = qweight, scales, zeros, group
    its = int4_weight(*case, x.shape[1]) if bits == 4 else grouped(*case)
    y = x.double() @ its.double().T
    return y if bias is None else y + bias.double()


DIGITS = [
    (64, None),
    (192, 48),
    (320, None),
    (576, 64),
    (576, 128),
    (320, 192),
    (1536, 512),
    (128, 64),
]  # (K, group)


def check_digits(ops, bits, rows=range(1, 9)):
    """Few rows in bf16: no more is lost than the store's rounding, row by row, however large some numbers are."""
    for (K, group), T in itertools.product(DIGITS, rows):
        x = randn(T, K, dtype=BF16, seed=T) * torch.logspace(-12, 12, T)[:, None].bfloat16()
        x[-1, 3] *= 3000
        for N, zeros, b in ((16, False, None), (53, True, randn(53, dtype=BF16))):
            case = weight(bits, N, K, group, FP32 if T % 2 else BF16, zeros)
            expected = exact(bits, x, *case, b)
            error = (run(ops, f"linear_int{bits}", x, *case, b).double() - expected).norm(dim=1)
            assert (error <= 1.05 * (expected.bfloat16().double() - expected).norm(dim=1)).all()


def check_digits_by_hand(ops):
    """Whole numbers of up to 16 bits beside 1, and of every digit's sign: each output has the bits of its sum."""
    x = torch.zeros(6, 64)
    x[0, :2], x[1, :2], x[2, :3] = (
        torch.tensor([32512.0, 1]),
        torch.tensor([-32768.0, 1]),
        torch.tensor([128, 127, 129.0]),
    )
    x[3, 60:], x[4, 5], x[5, 63] = torch.tensor([-0.5, 255, -129, 1.0]), 2.0**-110, -(2.0**120)
    x, q8 = x.to(BF16), integers(-128, 128, 32, 64).to(torch.int8)
    words, ones = integers(-(2**31), 2**31, 32, 8).int(), torch.ones(32, 1)
    for bits, q in ((8, q8), (4, words)):
        same(
            getattr(ops, f"linear_int{bits}")(x, q, ones, None, None),
            exact(bits, x, q, ones, None, None).to(BF16),
        )
    q8[:], x[:] = -128, -128
    got = ops.linear_int8(x, q8, ones, None, None)
    assert (got == 2**20).all()


def check_not_finite_alone(ops, bits):
    """inf and NaN spoil their own row; those beside it have the bits that they have without it."""
    linear, case = getattr(ops, f"linear_int{bits}"), weight(bits, 40, 128, 64, BF16)
    x = randn(8, 128, dtype=BF16)
    before = linear(x, *case)
    x[2, 100], x[5, 7], x[7, 127] = INF, NAN, -INF
    got = linear(x, *case)
    assert not got[[2, 5, 7]].isfinite().any()
    same(got[[0, 1, 3, 4, 6]], before[[0, 1, 3, 4, 6]])


def check_dequantize(ops, bits, dtype=FP32):
    """The weight itself, rounded once: bit for bit."""
    groups = [None, 8, 32, 48, 128] + [1, 5] * (bits == 8)
    for K, group, zeros, scales in itertools.product((5, 37, 96, 576), groups, (False, True), {FP32, dtype}):
        case = weight(bits, 19, K, group, scales, zeros)
        right = int4_weight(*case, K) if bits == 4 else grouped(*case)
        same(run(ops, f"dequantize_int{bits}", *case, K, dtype), right.to(dtype))


def check_by_hand(ops):
    """Every nibble and its column, with a zero of its own in each group."""
    words = torch.tensor([[0x76543210, -0x01234568]]).int()  # the second: 0xFEDCBA98
    x, ones = torch.eye(16), torch.ones(1, 1)
    assert ops.linear_int4(x, words, ones, None, None).flatten().tolist() == [n - 8.0 for n in range(16)]
    case = torch.tensor([[1.0, 10.0]]), torch.tensor([[3, 5]], dtype=torch.uint8), 8
    expected = [n - 3.0 for n in range(8)] + [10.0 * (n - 5) for n in range(8, 16)]
    assert ops.linear_int4(x, words, *case).flatten().tolist() == expected
    x, numbers = torch.eye(4), torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8)
    assert ops.linear_int8(x, numbers, ones / 2, None, None).flatten().tolist() == [-64, -0.5, 0, 63.5]
    case = torch.tensor([[1.0, 2.0]]), torch.tensor([[-128, 7]], dtype=torch.int8), 2
    assert ops.linear_int8(x, numbers, *case).flatten().tolist() == [0, 127, -14, 240]


# ---------------------------------------------------------------- tests
@needs_native
@bits_of_both
@dtypes
@pytest.mark.parametrize("tiles", [True, False], ids=["as built", "without tiles"])
def test_dequantize(ops, without_tiles, bits, dtype, tiles):
    check_dequantize(ops if tiles else without_tiles, bits, dtype)


@needs_native
@bits_of_both
@dtypes
def test_few_rows(ops, bits, dtype):
    check_few(ops, bits, dtype)


@needs_native
@bits_of_both
@dtypes
def test_every_number_of_rows(ops, bits, dtype):
    for T, zeros in itertools.product(range(1, 41), (False, True)):
        check(ops, bits, T, 37, 96, 32, dtype, zeros)
    for N, K in [(960, 576), (576, 1536), (1, 8), (31, 32)]:
        check(ops, bits, 5, N, K, 128, dtype, True)
    assert getattr(ops, f"linear_int{bits}")(
        randn(0, 8, dtype=dtype), *weight(bits, 3, 8, None, dtype)
    ).shape == (0, 3)


@needs_native
def test_by_hand(ops):
    check_by_hand(ops)


@needs_native
@bits_of_both
@pytest.mark.parametrize("tiles", [True, False], ids=["as built", "without tiles"])
def test_panels(ops, without_tiles, bits, tiles):
    which = ops if tiles else without_tiles
    check_panels(which, bits)
    check_exact_sums(which, bits)


@needs_native
@bits_of_both
@pytest.mark.parametrize("tiles", [True, False], ids=["as built", "without tiles"])
def test_digits(ops, without_tiles, bits, tiles):
    which = ops if tiles else without_tiles
    check_digits(which, bits)
    check_digits_by_hand(which)


@needs_native
@bits_of_both
def test_a_row_that_is_not_finite_is_alone(ops, bits):
    check_not_finite_alone(ops, bits)


@needs_native
@bits_of_both
def test_a_row_does_not_depend_on_the_others(ops, without_tiles, bits):
    check_rows_alone(ops, bits, range(1, 5))
    check_rows_alone(ops, bits, range(5, 80))
    check_rows_alone(ops, bits, range(1, 9), K=256, group=64)
    check_rows_alone(ops, bits, range(9, 40), K=256, group=64)
    check_rows_alone(without_tiles, bits, range(1, 20))
    check_rows_alone(ops, bits, range(1, 20), FP32)


@needs_native
@bits_of_both
@dtypes
def test_what_is_not_finite_stays(ops, bits, dtype):
    for T, K, group in itertools.product((3, 20), (96, 100, 128), (None, 32, 64)):
        x, case = torch.ones(T, K, dtype=dtype), weight(bits, 40, K, group, dtype)
        x[1, K - 1], x[2, 0] = NAN, INF
        got = getattr(ops, f"linear_int{bits}")(x, *case)
        assert got[1].isnan().all() and not got[2].isfinite().any() and got[0].isfinite().all()
        case[1][7] = NAN
        got = getattr(ops, f"linear_int{bits}")(x, *case)
        assert got[:, 7].isnan().all() and got[0].isnan().sum() == 1


@needs_native
@bits_of_both
def test_threads_do_not_change_a_bit(ops, bits):
    before = torch.get_num_threads()
    case = weight(bits, 900, 576, 64, BF16)
    try:
        for T in (1, 7, 20):
            x, results = randn(T, 576, dtype=BF16), []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(getattr(ops, f"linear_int{bits}")(x, *case))
            same(results[1], results[0]), same(results[2], results[0])
    finally:
        torch.set_num_threads(before)


@needs_native
@bits_of_both
@dtypes
def test_a_recording_does_the_same_work_on_what_x_holds_now(ops, bits, dtype):
    x, case = randn(3, 64, dtype=dtype), weight(bits, 40, 64, 32, dtype, zeros=True)
    with ops.recording() as calls:
        out = getattr(ops, f"linear_int{bits}")(x, *case)
    ((function, arguments, _),) = calls
    x.copy_(randn(3, 64, dtype=dtype, seed=9))
    function(*arguments)
    same(out, getattr(ops, f"linear_int{bits}")(x, *case))


@needs_native
def test_grouped_weights_are_rounded_to_bf16_for_the_matrix_unit(ops):
    """One row of x at a time, a single 1: what comes out is the weight itself."""
    qweight, scales, zeros, group = weight(4, 64, 64, 32, FP32, zeros=True)
    exact = int4_weight(qweight, scales, zeros, group, 64).T
    got = ops.linear_int4(torch.eye(64, dtype=BF16), qweight, scales, zeros, group)
    same(got, exact.to(BF16))


@needs_native
def test_wrong_arguments_are_named(ops):
    x, (q, s, z, _) = torch.ones(2, 16), weight(4, 8, 16, 8, FP32, zeros=True)
    q8, s8, z8, _ = weight(8, 8, 16, 8, FP32, zeros=True)
    for wrong, call in [
        ("linear_int4: qweight .* holds 8 columns", lambda: ops.linear_int4(x, q[:, :1], s, z, 8)),
        ("linear_int4: scales", lambda: ops.linear_int4(x, q, s, z, 16)),
        ("linear_int4: zeros", lambda: ops.linear_int4(x, q, s, z.int(), 8)),
        ("linear_int4: groups of 12 columns", lambda: ops.linear_int4(x, q, s, z, 12)),
        ("linear_int8: qweight", lambda: ops.linear_int8(x, q8.int(), s8, z8, 8)),
        ("linear_int8: scales", lambda: ops.linear_int8(x, q8, s8.bfloat16(), z8, 8)),
        ("linear_int8: bias", lambda: ops.linear_int8(x, q8, s8, z8, 8, torch.ones(7))),
        ("linear_int8: qweight .*contiguous", lambda: ops.linear_int8(x, q8.repeat(1, 2)[:, :16], s8, z8, 8)),
        ("dequantize_int4: qweight", lambda: ops.dequantize_int4(q, s, z, 8, 24, FP32)),
        ("dequantize_int8: scales", lambda: ops.dequantize_int8(q8, s8[:, :1], z8, 8, 16, FP32)),
        ("float16", lambda: ops.dequantize_int8(q8, s8, z8, 8, 16, torch.float16)),
        ("float16", lambda: ops.linear_int8(x.half(), q8, s8, z8, 8)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=wrong):
            call()
