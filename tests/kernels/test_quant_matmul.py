"""Products with quantized weights equal their definitions on every road; and those equal other people's."""

from itertools import cycle, product

import matmul_checks as checks
import pytest
import torch
from kernel_checks import DEVICE, DTYPES, needs_kernel, randn

from minserve.kernels import INTERPRETED, w8a8_matmul
from minserve.kernels import int4_matmul as int4
from minserve.kernels import int8_matmul as int8
from minserve.kernels import packed_matmul as packed

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both = pytest.mark.parametrize("bits", [4, 8])
SHAPES = [  # N, K, group: ragged rows, columns and last groups
    (1, 8, None), (10, 300, 32), (33, 520, 128), (18, 64, None), (5, 1100, 64), (3, 2500, 8), (40, 72, 24),
    (9, 36, 40),
]  # fmt: skip


def by_dtype(shapes):
    """An interpreter takes dtypes in turn, a GPU every pair."""
    pairs = list(product(shapes, DTYPES) if DEVICE == "cuda" else zip(shapes, cycle(DTYPES)))
    return pytest.mark.parametrize("shape, dtype", pairs, ids=str)


# ---------------------------------------------------------------- the definitions
@pytest.mark.parametrize("group", [None, 8, 16])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_nibble_is_where_it_is_said_to_be(group, zeros, N=3, K=20):
    """Weight by weight, with Python's integers: all of 0 to 15 occur, at every place of a word."""
    _, qweight, scales, zeros, _, _ = checks.case(4, 1, N, K, group, zeros=zeros)
    got, seen = int4.int4_weight(qweight, scales, zeros, group, K), set()
    for n in range(N):
        for k in range(K):
            nibble = (int(qweight[n, k // 8]) & 0xFFFFFFFF) >> (4 * (k % 8)) & 15
            q = 0 if group is None else k // group
            zero = 8 if zeros is None else int(zeros[n, q])
            assert float(got[n, k]) == pytest.approx((nibble - zero) * float(scales[n, q]), rel=1e-6)
            seen.add(nibble)
    assert len(seen) > 12


@pytest.mark.skipif(DEVICE == "cuda", reason="PyTorch's kernels for a CPU")
def test_the_definitions_equal_pytorchs_own_kernels(M=3, N=32, K=128):
    bf16 = torch.bfloat16
    x, q, scales, _, _, _ = checks.case(8, M, N, K, None, zeros=False)
    x, scales = x.to(bf16).contiguous(), scales.to(bf16).contiguous()
    theirs = torch._weight_int8pack_mm(x, q.contiguous(), scales[:, 0])
    torch.testing.assert_close(
        theirs, int8.int8_matmul_reference(x, q, scales, None, None), rtol=2e-2, atol=2e-2
    )
    _, q, scales, zeros, group, _ = checks.case(4, M, N, K, 32, zeros=True)
    nibbles = (q[:, :, None] >> (4 * torch.arange(8)) & 15).flatten(1).int()
    scales = scales.to(bf16)
    pairs = torch.stack([scales, scales * (8 - zeros.to(bf16))], -1).transpose(0, 1).contiguous()  # [Q, N, 2]
    layout = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    theirs = torch.ops.aten._weight_int4pack_mm_for_cpu(x, layout, group, pairs)
    torch.testing.assert_close(
        theirs, int4.int4_matmul_reference(x, q, scales, zeros, group), rtol=2e-2, atol=4e-2
    )


# ---------------------------------------------------------------- the kernels
@needs_kernel
@both
@by_dtype(SHAPES)
def test_gemv(bits, shape, dtype, monkeypatch):
    """One processor: 4 rows per program from N = 13 on, 2 from 7 on; the interpreter's 16 would get 1 each."""
    monkeypatch.setattr(packed, "processors", lambda _: 1)
    (N, K, group), (M, zeros) = shape, (2, False) if dtype == torch.float32 else (1, True)
    checks.check_packed(packed, "by_gemv", bits, M, N, K, group, zeros=zeros, bias=N % 2, dtype=dtype, seed=M)


@needs_kernel
@both
@by_dtype(SHAPES)
def test_dot(bits, shape, dtype):
    N, K, group = shape
    for M, zeros, splits in ((3, False, None), (17, True, 1), (2, True, 3)):
        kind = dict(zeros=zeros, bias=N % 2, dtype=dtype, seed=M)
        checks.check_packed(packed, "by_dot", bits, M, N, K, group, splits, **kind)


@needs_kernel
@both
@by_dtype([(2, 4100, 512), *SHAPES])
def test_dense(bits, shape, dtype):
    N, K, group = shape
    for zeros in (False, True):
        checks.check_packed(
            packed, "by_dense", bits, 4, N, K, group, zeros=zeros, bias=zeros, dtype=dtype, seed=N
        )


@needs_kernel
@pytest.mark.parametrize("splits", [2, 5, 40])
def test_the_number_of_splits_changes_nothing(splits):
    """40 pieces of 17 tiles: some have nothing to do, and say 0."""
    checks.check_packed(packed, "by_dot", 4, 5, 40, 2120, 128, splits)


@needs_kernel
@both
def test_scales_in_fp32_beside_16_bits(bits):
    for road, M in (("by_gemv", 2), ("by_dot", 5), ("by_dense", 5)):
        checks.check_packed(packed, road, bits, M, 10, 160, 32, dtype=torch.float16, wide_scales=True)


@needs_kernel
@both
@pytest.mark.parametrize("M", [0, 1, 2, 3, 16, 17])
def test_the_launchers_choose_a_road(bits, M, monkeypatch):
    taken = []
    for road in ("by_gemv", "by_dot", "by_dense"):
        run = getattr(packed, road)
        monkeypatch.setattr(packed, road, lambda *a, run=run, road=road: (taken.append(road), run(*a))[1])
    monkeypatch.setattr(packed, "DOT_ROWS", packed.DOT_ROWS_WITHOUT_UNITS)
    case = checks.case(bits, M, 10, 96, 32)
    got = {4: int4.int4_matmul, 8: int8.int8_matmul}[bits](*case)
    checks.close(got, checks.REFERENCE[bits](*case), 96)
    assert taken == ["by_gemv" if M <= 2 else "by_dot" if M <= 16 else "by_dense"]


@needs_kernel
@both
def test_nothing_in_nothing_out(bits):
    for M, N in ((0, 5), (3, 0)):
        for road in ("by_gemv", "by_dot", "by_dense"):
            x, q, *rest = checks.case(bits, M, N, 16, None)
            assert getattr(packed, road)(bits, x, checks.words(bits, q), *rest).shape == (M, N)
    assert w8a8_matmul.w8a8_matmul(
        *(torch.empty(s, dtype=d, device=DEVICE) for s, d in (((0, 8), torch.int8), ((0,), torch.float32),
          ((3, 8), torch.int8), ((3,), torch.float32)))
    ).shape == (0, 3)  # fmt: skip


@needs_kernel
@pytest.mark.parametrize("N, K, group", [(3, 21, None), (3, 24, 6)])
def test_8_bit_rows_that_are_no_words_take_the_definition(N, K, group, monkeypatch):
    monkeypatch.setattr(int8, "packed_matmul", None)
    case = checks.case(8, 3, N, K, group)
    assert torch.equal(int8.int8_matmul(*case), int8.int8_matmul_reference(*case))


@needs_kernel
@pytest.mark.slow
def test_offsets_beyond_two_to_the_31(N=3, K=40):
    x, q, *rest = checks.case(4, 2, N, K, 8, dtype=torch.float16)
    try:
        room = torch.empty(
            (2**30 + 64) * 2 + 64, dtype=torch.int32, device=DEVICE
        )  # 8.6 GB, a page or two touched
    except RuntimeError as error:
        pytest.skip(f"no room for the test: {error}")
    far = room.as_strided(q.shape, (2**30 + 64, 1))
    far.copy_(q)
    for road in ("by_gemv", "by_dot", "by_dense"):
        checks.close(getattr(packed, road)(4, x, far, *rest), int4.int4_matmul_reference(x, q, *rest), K)


@pytest.mark.skipif(not INTERPRETED, reason="the order of programs can only be chosen in the interpreter")
def test_no_program_depends_on_another(monkeypatch):
    from triton.runtime.interpreter import interpreter_builder

    x, q, *rest = checks.case(4, 2, 10, 300, 32)
    runs = [
        lambda road=road: getattr(packed, road)(4, x, q, *rest) for road in ("by_gemv", "by_dot", "by_dense")
    ]
    forwards = [run() for run in runs]
    place = interpreter_builder.set_grid_idx

    def backwards(*at):
        return place(*(n - 1 - i for i, n in zip(at, interpreter_builder.grid_dim)))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)
    assert all(torch.equal(run(), before) for run, before in zip(runs, forwards))


@needs_kernel
@dtypes
@pytest.mark.parametrize("M, N, K", [(1, 5, 8), (3, 40, 200), (17, 33, 300), (2, 3, 129)])
def test_w8a8(M, N, K, dtype):
    checks.check_w8a8(w8a8_matmul, M, N, K, bias=N % 2, dtype=dtype, seed=M)


@needs_kernel
def test_w8a8_of_the_largest_sums():
    checks.check_w8a8(w8a8_matmul, 2, 3, 4000, bias=False, full=True)


# ---------------------------------------------------------------- choices
@needs_kernel
def test_a_lane_keeps_to_one_group_and_16_bytes():
    def words(bits, group, K=4096):
        return packed.gemv_tiles(bits, 4096, K, group, torch.bfloat16, "sm_90", 132)["WORDS"]

    assert [words(4, group) for group in (None, 128, 64, 32, 16, 24, 8)] == [4, 4, 4, 4, 2, 1, 1]
    assert [words(8, group) for group in (None, 128, 32, 16, 8, 4)] == [4, 4, 4, 4, 2, 1]
    assert words(4, 40, K=40) == 4, "one group only"
    with pytest.MonkeyPatch.context() as patch:  # a group smaller than a load of x
        patch.setattr(packed, "by_dot", lambda *a: "by_dot")
        assert packed.by_gemv(8, *(x if i != 1 else checks.words(8, x) for i, x in enumerate(
            checks.case(8, 1, 3, 16, 4, dtype=torch.float16)))) == "by_dot"  # fmt: skip


# ---------------------------------------------------------------- bad input, on every road
def test_refusals_say_what_to_change():
    x, q, scales, zeros, group, bias = checks.case(4, 2, 3, 40, 8)
    x8, q8, scales8, _, _, _ = checks.case(8, 2, 3, 40, None)

    def four(**changes):
        return int4.int4_matmul(
            **dict(dict(x=x, qweight=q, scales=scales, zeros=zeros, group=8, bias=bias), **changes)
        )

    def eight(**changes):
        return w8a8_matmul.w8a8_matmul(**dict(dict(
            x8=q8[:2], x_scales=randn(2), qweight=q8, w_scales=randn(3), bias=None, out_dtype=torch.float32), **changes,
        ))  # fmt: skip

    for call, message in [
        (lambda: four(group=12), "groups of 12 columns; .* multiple of 8.* 32, 64 or 128"),
        (lambda: four(group=-1), "groups of -1 columns"),
        (lambda: four(group=16), r"scales is \[3, 5\] .* groups of 16 columns need \[3, 3\]"),
        (lambda: four(x=x[:, :20]), r"qweight \[3, 5\] holds 40 columns at 4 bits, and x \[2, 20\] has 20"),
        (lambda: four(x=x[0]), r"x \[40\] and qweight \[3, 5\] must be"),
        (lambda: four(qweight=q.long()), r"qweight is \[3, 5\] torch.int64"),
        (lambda: four(scales=scales.double()), r"scales is \[3, 5\] torch.float64"),
        (lambda: four(zeros=zeros.int()), r"zeros is \[3, 5\] torch.int32 .* torch.uint8"),
        (lambda: four(bias=bias[:2]), r"bias is \[2\]"),
        (lambda: four(scales=scales.T.contiguous().T), r"scales \[3, 5\] has strides .*scales.contiguous\(\)"),
        (lambda: int8.int8_matmul(x8, q8, scales8, None, 0), "groups of 0 columns"),
        (lambda: int8.int8_matmul(x8, q8[:, :39], scales8, None, None), "holds 39 columns at 8 bits"),
        (lambda: eight(x8=q8[:2, :39]), r"x8 \[2, 39\] does not go with qweight \[3, 40\]"),
        (lambda: eight(x_scales=randn(3)), r"x_scales is \[3\]"),
        (lambda: eight(bias=randn(3).half()), "bias is .* torch.float16"),
        (lambda: eight(x8=torch.zeros(1, 2**17, dtype=torch.int8, device=DEVICE).expand(2, -1),
                       qweight=torch.zeros(1, 2**17, dtype=torch.int8, device=DEVICE).expand(3, -1)),
         "131,072 columns could sum up to .* 2,147,483,648, and 32 bits end at 2.31: .* pieces of 131,071"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
