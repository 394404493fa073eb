"""The tests of the quantized products can fail: every wrong kernel below is rejected."""

import matmul_checks as checks
import pytest
import torch
from test_mutations import changed, load, source_of

from minserve.kernels import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="wrong kernels run in the interpreter only"),
]


def gemv(module):
    module.processors = lambda _: 1  # 2 rows per program for 10, 4 for 18
    checks.check_packed(module, "by_gemv", 4, 2, 10, 300, 32)
    checks.check_packed(module, "by_gemv", 8, 1, 7, 72, 16, zeros=False, bias=False)
    checks.check_packed(module, "by_gemv", 4, 1, 18, 1100, 8, zeros=False, dtype=torch.float16)


def dot(module):
    checks.check_packed(module, "by_dot", 4, 17, 33, 300, 32, 2)
    checks.check_packed(module, "by_dot", 8, 3, 5, 200, None, 1, zeros=False)
    checks.check_packed(module, "by_dot", 4, 2, 10, 520, 128, 3, zeros=False, dtype=torch.float16)


def dense(module):
    checks.check_packed(module, "by_dense", 4, 2, 3, 2060, 64)
    checks.check_packed(module, "by_dense", 8, 2, 3, 72, 24, zeros=False)


def w8a8(module):
    checks.check_w8a8(module, 17, 33, 100)
    checks.check_w8a8(module, 2, 3, 1100, bias=False, dtype=torch.float16, full=True)


MUTATIONS = {
    gemv: [
        ("nibbles from the top", "23 - BITS - BITS * j", "23 - BITS - BITS * (32 // BITS - 1 - j)"),
        ("a bit too few", "((1 << BITS) - 1) << (23 - BITS)", "((1 << (BITS - 1)) - 1) << (23 - BITS)"),
        ("a zero point off by one, 4 bits", "zero = 24.0 if", "zero = 23.0 if"),
        ("unsigned bytes", "8: 0x43C00000", "8: 0x43800000"),
        ("stored zero off by one", "(16.0 if BITS == 4 else 384.0)", "(17.0 if BITS == 4 else 384.0)"),
        ("the next group's scale", "(k // GROUP)[None, :]  ", "(k // GROUP + 1)[None, :] "),
        ("groups counted in words", "at = n[:, None].to(tl.int64) * Q + (k // GROUP)",
         "at = n[:, None].to(tl.int64) * Q + (k // PER // GROUP)"),
        ("the neighbouring row's scale", "at = n[:, None].to(tl.int64) * Q + (k",
         "at = (n[:, None] ^ 1).to(tl.int64) * Q + (k"),
        ("the ragged last group lost",
         "Q: tl.constexpr = (K + GROUP - 1) // GROUP\n    n = tl.program_id(0) * ROWS",
         "Q: tl.constexpr = K // GROUP\n    n = tl.program_id(0) * ROWS"),
        ("zero forgotten", "scale * (dot - zero * total)", "scale * dot"),
        ("zero scaled twice", "scale * (dot - zero * total)", "scale * (dot - zero * scale * total)"),
        ("sums over the last x only", "total += x", "total = x"),
        ("words by turns", "even + odd", "odd + even"),
        ("reads past x", "mask=c < K, other", "mask=c < K + 8, other"),
        ("the last word lost", "mine[:, None, None] & (i < W)", "mine[:, None, None] & (i < K // PER)"),
        ("rows taken for contiguous", "(n.to(tl.int64) * words_stride)[:, None, None]",
         "(n.to(tl.int64) * W)[:, None, None]"),
        ("a lane in two groups", "while group_of(group, K) % (words * per):", "while False:"),
        ("bias forgotten", "        out += tl.load(bias_ptr + n, mask=mine",
         "        out += 0 * tl.load(bias_ptr + n, mask=mine"),
    ],
    dot: [
        ("nibbles from the top", "23 - BITS - BITS * j", "23 - BITS - BITS * (32 // BITS - 1 - j)"),
        ("columns of x by turns", "even + odd", "odd + even"),
        ("a zero point off by one, 8 bits", "else 384.0\n    if", "else 383.0\n    if"),
        ("zero not scaled", "mine & (i < W), BITS) * scale ", "mine & (i < W), BITS) "),
        ("the next group's scale", "* Q + i * PER // GROUP ", "* Q + i * PER // GROUP + 1 "),
        ("groups counted in words", "* Q + i * PER // GROUP ", "* Q + i // GROUP "),
        ("the neighbouring row's scale", "at = n[:, None].to(tl.int64) * Q + i",
         "at = (n[:, None] ^ 1).to(tl.int64) * Q + i"),
        ("every split reads everything",
         "for start in range(split * share, tl.minimum(split * share + share, W)",
         "for start in range(0 * share, tl.minimum(0 * share + W, W)"),
        ("only the last split counts", "        total += tl.load(parts_ptr",
         "        total = tl.load(parts_ptr"),
        ("a bias with every split", "(n < N) & (split == 0)", "(n < N)"),
        ("splits in one place", "to = (split * tokens + m)", "to = (m)"),
        ("reads past the words", "xs = (tl.load(x_row_ptr + c, mask=seen & (c < K), other=0.0),)",
         "xs = (tl.load(x_row_ptr + c, mask=seen, other=0.0),)"),
        ("the last token lost", "(n < N)[:, None], (m < tokens)[:, None]",
         "(n < N)[:, None], (m < tokens - 1)[:, None]"),
        ("tokens taken for contiguous", "(m.to(tl.int64) * x_stride)", "(m.to(tl.int64) * K)"),
        ("weights in 8 bits", "* scale - zero).to(x_ptr", "* scale - zero).to(tl.float8e5).to(x_ptr"),
    ],
    dense: [
        ("nibbles from the top", "23 - BITS - BITS * j", "23 - BITS - BITS * (32 // BITS - 1 - j)"),
        ("columns in the order of the joins",
         "tl.join(w[0], w[4]), tl.join(w[1], w[5]), tl.join(w[2], w[6]), tl.join(w[3], w[7])",
         "tl.join(w[0], w[1]), tl.join(w[2], w[3]), tl.join(w[4], w[5]), tl.join(w[6], w[7])"),
        ("scale before zero", "(_number(words, j, magic, BITS) - zero) * scale",
         "(_number(words, j, magic, BITS) * scale - zero)"),
        ("the first tile for all", "i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)   ",
         "i = tl.arange(0, BLOCK)   "),
        ("rows taken for contiguous", "n * words_stride + i", "n * ((K + PER - 1) // PER) + i"),
        ("the first row's scales", "at = n * ((K + GROUP - 1) // GROUP) + i", "at = n * 0 + i"),
        ("the last word lost", "live = i * PER < K", "live = i * PER + PER < K"),
    ],
    w8a8: [
        ("only the last tile counts", "acc = tl.dot(w, x, acc,", "acc = tl.dot(w, x, acc * 0,"),
        ("sums in fp16", "acc.to(tl.float32) * x_scale", "acc.to(tl.float16).to(tl.float32) * x_scale"),
        ("a scale for the output from the token", "x_scale[None, :] * w_scale[:, None]",
         "x_scale[None, :] * x_scale[None, :]"),
        ("tokens' scales forgotten", "acc.to(tl.float32) * x_scale[None, :]", "acc.to(tl.float32)"),
        ("weights taken for contiguous", "n.to(tl.int64) * w_stride", "n.to(tl.int64) * K"),
        ("x taken for contiguous", "m.to(tl.int64) * x_stride", "m.to(tl.int64) * K"),
        ("reads past the columns", "live = start + k < K ", "live = start + k < K + 8 "),
        ("bias scaled", "[None, :] * w_scale[:, None]  ", "[None, :]  "),
        ("outputs transposed", "m.to(tl.int64)[None, :] * N + n[:, None]",
         "m.to(tl.int64)[None, :] + n[:, None] * tokens"),
    ],
}  # fmt: skip
FILES = {gemv: "packed_matmul", dot: "packed_matmul", dense: "packed_matmul", w8a8: "w8a8_matmul"}
CASES = [(battery, *mutation) for battery, mutations in MUTATIONS.items() for mutation in mutations]


@pytest.mark.parametrize("battery", MUTATIONS, ids=lambda b: b.__name__)
def test_the_right_kernel_passes(battery, tmp_path):
    battery(load(FILES[battery], source_of(FILES[battery]), tmp_path))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's remarks about what wrong kernels make
@pytest.mark.parametrize(
    "battery, what, right, wrong", CASES, ids=[f"{c[0].__name__}: {c[1]}" for c in CASES]
)
def test_the_wrong_kernel_is_rejected(battery, what, right, wrong, tmp_path):
    module = load(FILES[battery], changed(FILES[battery], right, wrong), tmp_path)
    with pytest.raises(AssertionError):
        battery(module)


def test_there_are_enough_of_them():
    assert all(len(mutations) >= 7 for mutations in MUTATIONS.values())
