"""Wrong versions of native_quant.cpp, rejected by the checks that the right one passes (test_native_mutations.py)."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import test_native_quant as checks
from test_native import BF16, FP32, needs_native
from test_native_mutations import OWN, PLAIN, changed, compiled

from minserve.kernels import native, native_build

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
    ("bias twice", "bias ? number(bias[n + r])", "bias ? 2 * number(bias[n + r])"),
    ("the first bias for all", "number(bias[n + r])", "number(bias[r])"),
    ("the first row of x for all", "load(x + m * laid.pitch + (s", "load(x + (s"),
    ("the same rows of x again", "laid.x.data() + t * laid.pitch,", "laid.x.data(),"),
    ("narrow scales", "vec scale = w.wide ? load((const float*)", "vec scale = !w.wide ? load((const float*)"),
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
        ("all groups taken for whole vectors", "else linear_quantized<Bytes<1>>", "else linear_quantized<Bytes<2>>"),
        ("a short group in long steps", "group % (8 * W) == 0", "group % (4 * W) == 0"),
        ("a shorter one in short steps", "group % (2 * W) == 0", "group % W == 0"),
    ],
    panels: [
        ("nibbles of a byte swapped", "pairs | pairs << 12", "pairs << 16 | pairs >> 4"),
        ("nibbles beyond 7 lost", "_mm512_broadcast_i64x4((__m256i)values)", "_mm512_zextsi256_si512((__m256i)values)"),
        ("zero off by one", "[at] : B::MIDDLE;", "[at] : B::MIDDLE - 1;"),
        ("scaled twice", "scales ? 1.f : own.scale<bf16>(at)", "own.scale<bf16>(at)"),
        ("sums not scaled", "scales = w.Q == 1 ? sums : nullptr;",
         "scales = w.Q == 1 ? sums : nullptr; std::fill(sums, sums + 32, 1.f); return;"),
        ("the first row's scales", "int64_t at = (n + r) * own.Q + g;", "int64_t at = n * own.Q + g;"),
        ("the first group for all", "g = done / w.group, next", "g = 0, next"),
        ("the next group begins too late", "std::min({(g + 1) * w.group, ", "std::min({(g + 1) * w.group + 32, "),
        ("both tiles from the upper rows' sums", "panel.scales + tile % 2 * 16", "panel.scales"),
        ("columns overwritten before their use", "k + 2 * CHUNK, w.K)", "k + 3 * CHUNK, w.K)"),
        ("vectors swapped", "_mm512_cvtne2ps_pbh(high, low)", "_mm512_cvtne2ps_pbh(low, high)"),
        ("half a tile", "high = (load(row + k + W) - zero)", "high = (load(row + k) - zero)"),
        ("groups of 48 columns", "(w.Q == 1 || w.group % 32 == 0) && has", "(w.Q == 1 || w.group % 16 == 0) && has"),
    ],
}  # fmt: skip
CASES = [(battery, *mutation) for battery, mutations in MUTATIONS.items() for mutation in mutations]


@pytest.fixture(scope="module")
def wrong_ones(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")

    def build(i):
        battery, _, right, wrong = CASES[i]
        return compiled(changed(right, wrong), OWN if battery is panels else PLAIN, folder / f"{i}.so")

    with ThreadPoolExecutor(2) as pool:
        yield [pool.submit(build, i) for i in range(len(CASES))]


@pytest.mark.parametrize("flags", [PLAIN, OWN, "-O2 -mavx2 -mfma -fopenmp", "-O3 -march=native"])
def test_the_right_version_passes(flags, tmp_path):
    try:
        ops = compiled(native_build.source(), flags, tmp_path / "right.so")
    except native.Unavailable as error:
        pytest.skip(f"not for this machine: {error}")
    for battery in MUTATIONS:
        battery(ops)


@pytest.mark.parametrize("i", range(len(CASES)), ids=[f"{c[0].__name__}: {c[1]}" for c in CASES])
def test_the_wrong_version_is_rejected(wrong_ones, i):
    battery = CASES[i][0]
    if battery is panels and not native.Native().matrix_units:
        pytest.skip("no matrix unit here")
    ops = wrong_ones[i].result()
    with pytest.raises(AssertionError):
        battery(ops)


def test_there_are_enough_of_them():
    assert all(len(mutations) >= 6 for mutations in MUTATIONS.values())
