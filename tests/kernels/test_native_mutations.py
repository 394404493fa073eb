"""The tests of the CPU's kernels can fail: every wrong version of the C++ below is rejected by their checks.

Of a wrong version only the part that it is wrong in is compiled, without optimising, and for a plain CPU where
the compiler knows one: that is quick, and the right version passes in the same form. None of them leaves the
memory its check has made.
"""

import ctypes
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import test_native as checks
from test_native import BF16, FP32, needs_native
from test_native import tools as without_a_cache  # noqa: F401  (a fixture, used by name below)

from minserve import kernels
from minserve.kernels import native, native_build, native_kv

pytestmark = [pytest.mark.slow, needs_native]


def rows(ops):
    for dtype in (FP32, BF16):
        checks.check_embed(ops, dtype)
        checks.check_norms(ops, dtype)
        checks.check_norms(ops, dtype, size=1e-2)
        checks.check_silu_mul(ops, dtype)


def numbers(ops):
    checks.check_exp(ops)
    checks.check_rounding(ops)
    checks.check_nan_stays(ops)


def best(ops):
    for dtype in (FP32, BF16):
        checks.check_best(ops, dtype)
        checks.check_best(ops, dtype, V=1000)


def linear(ops):
    for T in (1, 3, 7, 16):
        checks.check_linear(ops, T=T)
        checks.check_linear(ops, BF16, T=T)
    checks.check_rows_alone(ops)


def rope(ops):
    for norms in (False, True):
        checks.check_rope_and_write(ops, norms=norms)
        checks.check_rope_and_write(ops, BF16, H=9, G=3, D=64, norms=norms)


def attend(ops):
    for window, sinks in [(None, 0), (5, 0), (5, 3), (40, 4), (500, 7)]:
        checks.check_attend(ops, [1, 0, 21, 300], window=window, sinks=sinks)
        checks.check_attend(ops, [1, 0, 21, 130], H=9, G=3, D=24, S=4, window=window, sinks=sinks)
    checks.check_attend(ops, [700, 3, 128, 129], H=7, G=1, size=200.0)
    checks.check_trees(ops, [1, 0, 62, 63, 64, 65, 300, 20])
    checks.check_not_finite(ops)


def tiles(ops):
    """What a matrix unit does, where there is one."""
    for T in (1, 16, 17, 33):
        checks.check_linear(ops, BF16, T=T, N=70, K=96)


HOME, PATH = str(Path.home()), os.environ["PATH"]
PLAIN, OWN = "-O0", "-O1 -march=native"  # quick to compile; for this very machine

MUTATIONS = {
    rows: [
        ("an id too many", "ids[t] < V)", "ids[t] <= V)"),
        ("-1 is a token", "ids[t] >= 0 && ", "ids[t] >= -1 && "),
        ("no mean", "total(squares) / n + eps", "total(squares) + eps"),
        ("no eps", "total(squares) / n + eps", "total(squares) / n"),
        ("eps outside the root", "std::sqrt(total(squares) / n + eps)", "(std::sqrt(total(squares) / n) + eps)"),
        ("weight forgotten", "scale * load(weight + i, n - i), n - i)", "scale, n - i)"),
        ("x taken for contiguous", "normalise(x + t * stride, weight", "normalise(x + t * width, weight"),
        ("residual spaced like x", "residual + t * residual_stride", "residual + t * width"),
        ("subtracted", "load(a + i, width - i) + load(b", "load(a + i, width - i) - load(b"),
        ("the sum before it was rounded", "normalise(sum + t * width, weight", "normalise(a, weight"),
        ("writes past the row", "i < n; i++) p[i] = part[i];", "i < W; i++) p[i] = part[i];"),
        ("reads past the row", "i < n; i++) part[i] = p[i];", "i < W; i++) part[i] = p[i];"),
        ("gate and up swapped", "gate / (1.f + exp(-gate)) * up", "up / (1.f + exp(-up)) * gate"),
        ("exp(x)", "gate / (1.f + exp(-gate))", "gate / (1.f + exp(gate))"),
        ("up one channel late", "stride + I + i, I - i)", "stride + I + i + 1, I - i)"),
        ("rows of silu taken for contiguous", "load(x + t * stride + i, I - i)", "load(x + t * 2 * I + i, I - i)"),
        ("lanes lost in a sum", "(x[0] + x[2]) + (x[1] + x[3])", "(x[0] + x[2]) + (x[1] + x[2])"),
    ],
    numbers: [
        ("cut off instead of rounded", "(u + 0x7fff + ((u >> 16) & 1)) >> 16", "u >> 16"),
        ("ties upwards", "(u + 0x7fff + ((u >> 16) & 1)) >> 16", "(u + 0x8000) >> 16"),
        ("ties downwards", "(u + 0x7fff + ((u >> 16) & 1)) >> 16", "(u + 0x7fff) >> 16"),
        ("NaN rounded like a number", "x == x ? rounded : uvec{} + 0x7fc0", "rounded"),
        ("exp: ln 2 in one piece", " - whole * 1.42860677e-6f", ""),
        ("exp: a term too few", "\n            + r * 1.38888889e-3f", ""),
        ("exp: not limited", "x = x < -150.f ? vec{} - 150.f : x > 150.f ? vec{} + 150.f : x;", ""),
        ("exp: overflows too early", "x > 150.f ? vec{} + 150.f", "x > 80.f ? vec{} + 80.f"),
        ("exp: 2^n at once", "ivec half = n >> 1;", "ivec half = n;"),
    ],
    best: [
        ("the last of the largest", "x > most ? here", "x >= most ? here"),
        ("NaN overlooked", "nans |= x != x;", ""),
        ("infinity chosen", "broken = !std::isfinite(top)", "broken = std::isnan(top)"),
        ("a lane's own first", "first = std::min<int64_t>(first, at[j])", "first = at[j]"),
        ("the tail forgotten", "if (i < V) {", "if (V < W) {"),
        ("rows taken for contiguous", "logits + t * stride", "logits + t * V"),
        ("starts at 0", "vec most = vec{} - INF;\n        ivec at", "vec most = vec{};\n        ivec at"),
    ],
    linear: [
        ("the tail forgotten", "if (k < K) step(k, K - k);", ""),
        ("bias forgotten", "(bias ? load(bias + n + r, 1)[0] : 0.f)", "0.f"),
        ("the first bias for all", "load(bias + n + r, 1)[0]", "load(bias + r, 1)[0]"),
        ("writes rows that are not there", "r < R && n + r < end", "r < R && n + r < end + 1"),
        ("the first row for all", "load(x + m * pitch + k)", "load(x + k)"),
        ("the last rows twice", "std::min(n + r, end - 1) * K", "std::min(n + r, end - 2) * K"),
        ("every fourth row forgotten", "some(std::integral_constant<int, 1>{});", ""),
        ("the same rows again", "multiply<E, M, R>(own + t * pitch,", "multiply<E, M, R>(own,"),
    ],
    rope: [
        ("turned backwards", "a * c - b * s", "a * c + b * s"),
        ("sine and cosine swapped", "c = load(turns + i, n), s = load(turns + half + i, n)",
         "s = load(turns + i, n), c = load(turns + half + i, n)"),
        ("the token's index for its position", "turns + positions[t] * D", "turns + t * D"),
        ("-1 written before the cache", "if (slots[t] < 0) continue;", "if (slots[t] < -1) continue;"),
        ("slot 0 taken for none", "if (slots[t] < 0) continue;", "if (slots[t] <= 2) continue;"),
        ("keys normalised like queries", "ready(k + g * D, k_norm", "ready(k + g * D, q_norm"),
        ("queries not normalised", "ready(q + h * D, q_norm", "ready(q + h * D, (const E*)nullptr"),
        ("keys written as values", "v_stride, v, G * D", "v_stride, k, G * D"),
        ("values half written", "v, G * D * sizeof(E)", "v, G * D * sizeof(E) / 2"),
        ("slots taken for contiguous", "slots[t] * k_stride", "slots[t] * G * D"),
        ("rows taken for contiguous", "qkv + t * stride", "qkv + t * (H + 2 * G) * D"),
        ("queries where keys are", "*k = q + H * D", "*k = q + (H - 1) * D"),
    ],
    attend: [
        ("no scale", " / std::sqrt((float)D)", ""),
        ("misses the newest", "count = kept + length - oldest", "count = kept + length - oldest - (length > 1)"),
        ("window one too wide", "length - window)", "length - window - 1)"),
        ("window one too narrow", "length - window)", "length - window + (length > window))"),
        ("one sink too many", "std::min(sinks, oldest)", "std::min(sinks + 1, oldest)"),
        ("sinks seen twice", "std::min(sinks, oldest)", "std::min(sinks, length)"),
        ("sinks never read", "std::min(sinks, oldest)", "std::min<int64_t>(0, oldest)"),
        ("the first row's table", "tables[b * table_stride + ", "tables["),
        ("tables taken for contiguous", "tables[b * table_stride + ", "tables[b * (table_stride - 3) + "),
        ("the first row's length", "length = lengths[b]", "length = lengths[B - 1]"),
        ("values like keys", "v_cache + page", "k_cache + page"),
        ("the first group's keys", "slot * k_slot + g * D", "slot * k_slot"),
        ("heads dealt round", "from = q + (b * H + g * group + h) * D",
         "from = q + (b * H + g + h * G) * D"),
        ("sum not rescaled", "sum[r] = sum[r] * shrink + total", "sum[r] = sum[r] + total"),
        ("output not rescaled", "load(acc[r] + d) * shrink", "load(acc[r] + d)"),
        ("stale maximum", "top[r] = high;", ""),
        ("inf - inf", "base = high == -INF ? 0.f : high", "base = high"),
        ("dead lanes count", "scores[r][j] = -INF;", "scores[r][j] = 0;"),
        ("the maximum of a tile", "vec most = vec{} + top[r], weights", "vec most = vec{} - INF, weights"),
        ("not divided", "load(acc[r] + d) / sum[r]", "load(acc[r] + d)"),
        ("three heads at most", "heads == 4) attend_heads<4>", "heads == 4) attend_heads<3>"),
        ("a tree's bits one off", "(length - 1 - p) & 1", "(length - p) & 1"),
        ("a tree read from the wrong end", "(length - 1 - p) & 1", "(p - kept) & 1"),
        ("the first row's tree", "trees[b] >>", "trees[0] >>"),
        ("one position too many is always seen", "std::max<int64_t>(0, length - NEAR)",
         "std::max<int64_t>(0, length - NEAR + 1)"),
        ("siblings are seen", "if (trees[b] >> (length - 1 - p) & 1) near", "near"),
        ("empty rows not written", "memset(to, 0, heads * D * sizeof(E))", "(void)0"),
    ],
    tiles: [
        ("bias forgotten", "sums[tile][t] * scale + (bias ? load(bias + row) : vec{})", "sums[tile][t] * scale"),
        ("not transposed", "turn_over(sums[tile]);", ""),
        ("the last row forgotten", "std::min(i, N - 32)", "std::min(i, N - 33)"),
        ("the first tokens again", "ours + (K + k) * 16", "ours + k * 16"),
        ("upper rows twice", "panel.at(k) + 16 * panel.row", "panel.at(k)"),
        ("tokens that are not there", "std::min<int64_t>(16, T - first)", "std::min<int64_t>(16, T + 1 - first)"),
        ("half of each pair", "k + 2 * p, 4)", "k + 2 * p, 2)"),
    ],
}  # fmt: skip


def changed(right, wrong):
    source = native_build.source()
    if source.count(right) != 1:  # no AssertionError: that would pass for a rejection
        raise LookupError(f"{right!r} occurs {source.count(right)} times in the C++")
    return source.replace(right, wrong)


def make(source, *arguments):
    command = [*native_build._compiler(), "-std=c++17", "-fPIC", *arguments]
    result = subprocess.run(command, input=source, capture_output=True, text=True)
    if result.returncode:
        raise native.Unavailable(result.stderr)


def built(source, flags, part, out):
    make(source, *flags.split(), f"-DPART={part}", "-c", "-x", "c++", "-", "-o", out)
    return out


def linked(flags, objects, out):
    """The first of the objects decides what several of them hold."""
    make(None, "-shared", *flags.split(), *objects, "-o", out)
    return native.Native(ctypes.CDLL(str(out)))


def rejecting(mutations: dict, part: int, unit=(), least: int = 6):
    """A fixture and three tests, for a module to name: `mutations` by battery, in one part of the C++.

    `unit`: batteries for a machine with a matrix unit.
    """
    cases = [(battery, *mutation) for battery, its in mutations.items() for mutation in its]

    @pytest.fixture(scope="module")
    def others(tmp_path_factory):
        """The parts that nothing is wrong in, and that are only there to be loaded with the one that matters."""
        folder, source = tmp_path_factory.mktemp("others"), native_build.source()
        return [built(source, PLAIN, i, folder / f"{i}.o") for i in range(native_build.PARTS) if i != part]

    @pytest.fixture(scope="module")
    def wrong_ones(others, tmp_path_factory):
        """Each of them, when it is asked for: two are being compiled while another is checked."""
        folder, has_unit = tmp_path_factory.mktemp("wrong"), native.Native().matrix_units

        def build(i):
            battery, _, before, after = cases[i]
            flags = OWN if battery in unit else PLAIN
            own = built(changed(before, after), flags, part, folder / f"{i}.o")
            return linked(flags, [own, *others], folder / f"{i}.so")

        with ThreadPoolExecutor(2) as pool:
            yield {
                i: pool.submit(build, i) for i, case in enumerate(cases) if has_unit or case[0] not in unit
            }

    @pytest.mark.parametrize("flags", [PLAIN, OWN, "-O2 -mavx2 -mfma -fopenmp", "-O3 -march=native"])
    def right(flags, others, tmp_path):
        """In the form of the wrong ones, and with vectors of every width this machine has."""
        try:
            own = built(native_build.source(), flags, part, tmp_path / "right.o")
        except native.Unavailable as error:
            pytest.skip(f"not for this machine: {error}")
        ops = linked(flags, [own, *others], tmp_path / "right.so")
        for battery in mutations:
            battery(ops)

    @pytest.mark.parametrize("i", range(len(cases)), ids=[f"{c[0].__name__}: {c[1]}" for c in cases])
    def wrong(wrong_ones, i):
        if i not in wrong_ones:
            pytest.skip("no matrix unit here")
        ops = wrong_ones[i].result()
        with pytest.raises(AssertionError):
            cases[i][0](ops)

    def enough():
        assert all(len(its) >= least for its in mutations.values())

    return others, wrong_ones, right, wrong, enough


(
    others,
    wrong_ones,
    test_the_right_version_passes,
    test_the_wrong_version_is_rejected,
    test_there_are_enough,
) = rejecting(MUTATIONS, 0, (tiles,))


# ---------------------------------------------------------------- the Python beside them
def built_once(tools, tmp_path, capfd):
    checks.test_built_once_then_loaded_without_a_compiler(tools, tmp_path, capfd)


def on(check, *arguments):
    return lambda *_: check(checks.native.Native(), *arguments)


PYTHON = native, native_build, native_kv, kernels
WRONG_PYTHON = [
    ("a recording without an end", "self._calls = before", "pass",
     on(checks.test_a_recording_does_the_same_work_on_what_its_inputs_hold_now, FP32)),
    ("recorded, not done", "        function(*arguments)\n        if", "        if",
     on(checks.test_a_recording_does_the_same_work_on_what_its_inputs_hold_now, FP32)),
    ("tensors not kept", "(function, arguments, tensors)", "(function, arguments, ())",
     on(checks.test_recordings_keep_their_tensors_and_belong_to_their_instance)),
    ("the source does not count", "made_of = [source, ", "made_of = [", built_once),
    ("silent", 'print(f"{what} ..."', '0 and print(f"{what} ..."', built_once),
    ("unfinished files stay", "Path(unfinished).unlink(missing_ok=True)", "pass",
     lambda tools, tmp_path, _: checks.test_what_the_compiler_said_is_in_the_message(tools, tmp_path)),
    ("shapes unchecked", "x.shape != shape or ", "", on(checks.test_wrong_arguments_are_named)),
    ("dtypes unchecked", " or x.dtype != dtype", "", on(checks.test_wrong_arguments_are_named)),
    ("rows of logits contiguous", "T, V, logits.stride(0)", "T, V, V", on(checks.check_best)),
    ("caches alike", "*v_cache.stride()[:2]", "*k_cache.stride()[1::-1]", on(checks.check_attend, [21, 130])),
    ("window forgotten", "window is None else (window, sinks)", "True else 0", on(lambda ops: attend(ops))),
]  # fmt: skip


def python(module, source, monkeypatch):
    """The module in that version, in the place of ours."""
    another = ModuleType("another")
    another.__file__ = module.__file__
    exec(compile(source, module.__file__, "exec"), another.__dict__)
    monkeypatch.setenv("HOME", HOME)  # where the library is built already
    monkeypatch.setenv("PATH", PATH)
    if module is kernels:
        monkeypatch.setattr(native, "check_match", another.check_match)
    elif module is native_kv:
        monkeypatch.setattr(native, "check_queries", another.check_queries)
    else:
        monkeypatch.setattr(checks, module.__name__.split(".")[-1], another)


@pytest.mark.usefixtures("without_a_cache")
@pytest.mark.parametrize("i", range(len(WRONG_PYTHON)), ids=[case[0] for case in WRONG_PYTHON])
def test_wrong_python_is_rejected(i, monkeypatch, tmp_path_factory, capfd):
    _, right, wrong, check = WRONG_PYTHON[i]
    sources = {module: Path(module.__file__).read_text(encoding="utf-8") for module in PYTHON}
    if (times := sum(source.count(right) for source in sources.values())) != 1:
        raise LookupError(f"{right!r} occurs {times} times in the Python")
    ((module, source),) = ((module, source) for module, source in sources.items() if right in source)
    python(module, source, monkeypatch)
    check(monkeypatch, tmp_path_factory.mktemp("right"), capfd)
    python(module, source.replace(right, wrong), monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(monkeypatch, tmp_path_factory.mktemp("wrong"), capfd)
