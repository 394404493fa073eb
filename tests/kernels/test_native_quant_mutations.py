"""Wrong versions of native_quant.cpp, rejected by the checks that the right one passes (test_native_mutations.py)."""

import pytest
import test_native_quant as checks
from test_native import BF16, FP32, needs_native
from test_native_mutations import rejecting

pytestmark = [pytest.mark.slow, needs_native]


def int4(ops):
    checks.check_by_hand(ops)
    for dtype in (FP32, BF16):
        checks.check_few(ops, 4, dtype, rows=(1, 3, 9))


def int8(ops):
    for dtype in (FP32, BF16):
        checks.check_few(ops, 8, dtype, rows=(1, 3, 9))


def panels(ops):
    """What a matrix unit does, where there is one."""
    for bits in (4, 8):
        checks.check_panels(ops, bits)
        checks.check_exact_sums(ops, bits)


def digits(ops):
    """Few rows on the matrix unit."""
    checks.check_digits_by_hand(ops)
    for bits in (4, 8):
        checks.check_digits(ops, bits, rows=(1, 3, 4, 5, 8))
        checks.check_not_finite_alone(ops, bits)


def unpacked(ops):
    for bits, dtype in ((4, FP32), (4, BF16), (8, FP32), (8, BF16)):
        checks.check_dequantize(ops, bits, dtype)


SHARED = [  # int4 finds them, as int8 would
    ("the neighbour's scale", "scale = looked_up(scales + at,", "scale = looked_up(scales + at + 1,"),
    ("the first row's scales", "int64_t at = (row[r] - begin) * w.Q + laid.first[s];", "int64_t at = laid.first[s];"),
    ("the first group for all", "* w.Q + laid.first[s];", "* w.Q;"),
    ("one group for all lanes", "lane[s][l] = group(l) - first[s]", "lane[s][l] = 0 * (group(l) - first[s])"),
    ("zeros forgotten", "*shifts = w.zeros ? scales + count + W : nullptr", "*shifts = nullptr"),
    ("zeros added", "sums[r][m] += shift * load(x_sums", "sums[r][m] -= shift * load(x_sums"),
    ("the first row's sum of x", "load(x_sums + (m * laid.steps + s) * W)", "load(x_sums + s * W)"),
    ("zeros not scaled", "store(shifts + i, scale * (", "store(shifts + i, (vec{} + 1.f) * ("),
    ("ragged tail dropped", "if (whole < laid.steps) step(whole, w.held - whole * B::HELD);", ""),
    ("the last rows twice", "row[r] = std::min(n + r, end - 1)", "row[r] = std::min(n + r, end - 2)"),
    ("the last rows forgotten", "r < std::min<int64_t>(R, end - n); r++", "r < std::min<int64_t>(R, end - n - 1); r++"),
    ("bias twice", "bias ? sum + load(bias + i, end - i)", "bias ? sum + 2.f * load(bias + i, end - i)"),
    ("the first bias for all", "load(bias + i, end - i)", "load(bias + i - n, end - i)"),
    ("the first row of x for all", "load(x + m * laid.pitch + (s", "load(x + (s"),
    ("the same rows of x again", "laid.x.data() + t * laid.pitch,", "laid.x.data(),"),
    ("narrow scales", "w.wide ? load((const float*)w.scales + at, l", "!w.wide ? load((const float*)w.scales + at, l"),
]  # fmt: skip
MUTATIONS = {
    int4: [
        ("the highest nibble first", "low_nibbles(words >> 4 * u)", "low_nibbles(words >> (28 - 4 * u))"),
        ("nibbles of a byte swapped", "low_nibbles(words >> 4 * u)", "low_nibbles(words >> 4 * (u ^ 1))"),
        ("zero off by one", "vec) - 8.f; }", "vec) - 7.f; }"),
        ("given zeros off by one", "U = 8, HELD = W, MIDDLE = 8;", "U = 8, HELD = W, MIDDLE = 7;"),
        ("nibbles with a sign", "convertvector(w & 15, vec) - 8.f", "convertvector(((w & 15) ^ 8) - 8, vec)"),
        ("neighbours share a lane", "return (s * W + l) * U + u; }", "return (s * U + u) * W + l; }"),
        ("columns past the end", "part[u][l] = k < w.K ?", "part[u][l] = k < w.K + 1 ?"),
        *SHARED,
    ],
    int8: [
        ("no sign", "for (int i = 0; i < W; i++) x[i] = p[i];", "for (int i = 0; i < W; i++) x[i] = (uint8_t)p[i];"),
        ("zero off by one", "HELD = U * W, MIDDLE = 0;", "HELD = U * W, MIDDLE = 1;"),
        ("vectors a lane late", "load(p + u * W, left - u * W)", "load(p + u * W + 1, left - u * W)"),
        ("a vector twice", "load(p + u * W, left - u * W)", "load(p + u / 2 * W, left - u / 2 * W)"),
        ("lanes of a step in a row", "return (s * U + u) * W + l; }", "return (s * W + l) * U + u; }"),
        ("a short group in long steps", "group % (8 * W) == 0", "group % (4 * W) == 0"),
        ("all groups in long steps", "w.Q == 1 || group % (8 * W) == 0", "true"),
    ],
    panels: [
        ("nibbles of a byte swapped", "pairs | pairs << 12", "pairs << 16 | pairs >> 4"),
        ("nibbles beyond 7 lost", "_mm512_broadcast_i64x4((__m256i)values)", "_mm512_zextsi256_si512((__m256i)values)"),
        ("zero off by one", "[at] : B::MIDDLE;", "[at] : B::MIDDLE - 1;"),
        ("scaled twice", "scales ? 1.f : own.scale<bf16>(at)", "own.scale<bf16>(at)"),
        ("sums not scaled", "scales = w.Q == 1 ? sums : nullptr;",
         "scales = w.Q == 1 ? sums : nullptr; std::fill(sums, sums + 32, 1.f); return;"),
        ("the first row's scales", "int64_t at = (n + r) * own.Q + g;", "int64_t at = n * own.Q + g;"),
        ("the first group for all", "int64_t at = (n + r) * own.Q + g;", "int64_t at = (n + r) * own.Q;"),
        ("the next group begins too late", "std::min({(g + 1) * w.group, ", "std::min({(g + 1) * w.group + 32, "),
        ("both tiles from the upper rows' sums", "panel.scales + tile % 2 * 16", "panel.scales"),
        ("columns overwritten before their use", "k + 2 * CHUNK, w.K)", "k + 3 * CHUNK, w.K)"),
        ("vectors swapped", "_mm512_cvtne2ps_pbh(high, low)", "_mm512_cvtne2ps_pbh(low, high)"),
        ("half a tile", "high = (load(row + k + W) - zero)", "high = (load(row + k) - zero)"),
    ],
    digits: [
        ("two digits", "65536.f * c2", "0.f * c2"),
        ("digits without a sign", "digit = v << 24 >> 24;", "digit = v & 255;"),
        ("no carry", "v = (v - digit) >> 8,", "v = v >> 8,"),
        ("cut off instead of rounded", "load(row + k) * up + 12582912.f) - 0x4b400000",
         "load(row + k) * up * 0.0078125f + 12582912.f) - 0x4b400000 << 7"),
        ("one bit too many", "std::ldexp(1.f, 22 - e)", "std::ldexp(1.f, 24 - e)"),
        ("the first row's unit", "digits[t / TOKENS].unit[t % TOKENS]", "digits[t / TOKENS].unit[0]"),
        ("the first block's unit", "digits[t / TOKENS].unit[t % TOKENS]", "digits[0].unit[t % TOKENS]"),
        ("the largest with its sign", "size = (vec)((ivec)y & 0x7fffffff);", "size = y;"),
        ("not finite overlooked", "std::ldexp(1.f, e - 22) + total(odd)", "std::ldexp(1.f, e - 22)"),
        ("zeros' digits forgotten", "- shifts[r * w.Q + g] * shift;", ";"),
        ("the first group's sum of x", "digits[b].sums.data() + i * 16", "digits[b].sums.data()"),
        ("the first group's scale", "g = w.Q == 1 ? 0 : i;", "g = 0;"),
        ("the first rows of x again", "_tile_loadd(6, digits[1]", "_tile_loadd(6, digits[0]"),
        ("high nibbles low", "_mm512_slli_epi16(pairs, 4)) & low", "_mm512_slli_epi16(pairs, 8)) & low"),
        ("laid out too late", "if (k + LEAD < K) lay_out(k + LEAD);", "if (k + LEAD + 64 < K) lay_out(k + LEAD + 64);"),
        ("the last rows of another block", "n = std::min(block, w.N - 16);", "n = std::min(block, w.N - 17);"),
        ("bias forgotten", "bias ? value + load(bias + n) : value", "value"),
        ("narrow scales", "vec scale = w.wide ? load((const float*)w.scales + at) : load(", "vec scale = load("),
        ("groups of 48 columns", "w.K % 64 == 0 && (w.Q == 1 || w.group % 64 == 0)", "w.K % 64 == 0"),
    ],
    unpacked: [
        ("nibbles swapped", "both[2 * i] = low[i], both[2 * i + 1] = high[i]",
         "both[2 * i] = high[i], both[2 * i + 1] = low[i]"),
        ("the tail's byte forgotten", "k / 2, (n + 1) / 2)", "k / 2, n / 2)"),
        ("writes past the group", "memcpy(to + k, both, n * sizeof(E));", "memcpy(to + k, both, sizeof both);"),
        ("zero off by one", "[at] : B::MIDDLE, scale", "[at] : B::MIDDLE + 1, scale"),
        ("the first row's scales", "int64_t at = n * w.Q + g, k", "int64_t at = g, k"),
        ("the first group's scale", "int64_t at = n * w.Q + g, k", "int64_t at = n * w.Q, k"),
        ("no zeros", "float zero = w.zeros ? ((const", "float zero = false ? ((const"),
        ("bytes: a column late", "(load(row + k, end - k) - zero)", "(load(row + k + 1, end - k) - zero)"),
    ],
}  # fmt: skip
UNIT = (panels, digits)
(
    others,
    wrong_ones,
    test_the_right_version_passes,
    test_the_wrong_version_is_rejected,
    test_there_are_enough,
) = rejecting(MUTATIONS, 1, UNIT)
