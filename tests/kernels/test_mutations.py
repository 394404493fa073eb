"""The tests can fail: every wrong kernel below is rejected by the very checks the right ones pass.

A mutation is one replacement in a kernel's source, at a place that occurs exactly once. Wrong kernels run
only in the interpreter: on a GPU some of them would write where they must not and take the process with them.
"""

import importlib.util
from pathlib import Path

import kernel_checks as checks
import pytest
import torch

from minserve import kernels
from minserve.kernels import INTERPRETED, silu_mul

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="wrong kernels run in the interpreter only"),
]


def battery(name, module):
    """The checks a kernel file must pass: small, but every kind of boundary."""
    if name == "rms_norm":
        checks.check_rms_norm(module)
        checks.check_rms_norm(module, size=1e-2)
    elif name == "rope":
        checks.check_rope(module)
    elif name == "silu_mul":
        checks.check_silu_mul(module)
        checks.check_silu_mul(module, T=2, C=silu_mul.BLOCK_C + 100)
    elif name == "kv_write":
        checks.check_kv_write(module)
    elif name == "rope_and_write":
        for norms in (False, True):
            checks.check_rope_and_write(module, norms=norms)
            checks.check_rope_and_write(module, norms=norms, dtype=torch.float16, seed=1)
        checks.check_rope_and_write(module, size=1e-2)
    elif name == "gemv":
        for dtype in (torch.float32, torch.float16):
            checks.check_gemv(module, dtype=dtype)
            checks.check_gemv(module, M=2, N=255, K=40, dtype=dtype)  # 4 rows per program, and 3 in the last
            checks.check_gemv(module, M=1, N=3, K=1100, bias=False, dtype=dtype)
    elif name == "stream":
        checks.check_stream(module)
    elif name == "prefill_attention":
        checks.check_prefill(module, [2, 5, 40], [5, 5, 70])
        checks.check_prefill(module, [5], [3])
        checks.check_prefill(module, [40, 4], [70, 9], window=33, sinks=3)
        checks.check_prefill(module, [40], [70], window=7, sinks=40)
        checks.check_prefill(module, [40], [140], window=70)
        checks.check_prefill(module, [40], [70], size=40.0)
    else:
        for splits in (1, 3, 20):
            checks.check_decode(module, [100, 0, 33], splits=splits)
        checks.check_decode(module, [100, 64], size=40.0, splits=2)
        checks.check_decode(
            module, [640, 600], size=4.0, splits=20
        )  # more splits with something in them than the merge holds at once


MUTATIONS = {
    "rms_norm": [
        ("mean over the padded width", "axis=0) / E + eps", "axis=0) / BLOCK_E + eps"),
        ("eps outside the root", "tl.sqrt(tl.sum(y * y, axis=0) / E + eps)",
         "(tl.sqrt(tl.sum(y * y, axis=0) / E) + eps)"),
        ("no eps", "/ E + eps)", "/ E)"),
        ("no mean", "axis=0) / E + eps", "axis=0) + eps"),
        ("weight forgotten", "(y * scale * weight).to(out_ptr", "(y * scale).to(out_ptr"),
        ("Gemma's weight", "(y * scale * weight).to(out_ptr", "(y * scale * (1 + weight)).to(out_ptr"),
        ("x taken for contiguous", "t * x_stride + e", "t * E + e"),
        ("residual taken for contiguous", "t * residual_stride + e", "t * E + e"),
        ("residual subtracted", "+ x.to(tl.float32)", "- x.to(tl.float32)"),
        ("the old residual is passed on", "+ e, x, mask=live)", "+ e, residual, mask=live)"),
        ("last channel lost", "live = e < E ", "live = e < E - 1"),
    ],
    "rope": [
        ("turned backwards, first half", "first * cos[None, :] - second", "first * cos[None, :] + second"),
        ("turned backwards, second half", "second * cos[None, :] + first", "second * cos[None, :] - first"),
        ("neighbours paired", "pair = h * HALF * 2 + i ", "pair = h * HALF * 2 + (i // 2 + i % 2)"),
        ("position of the first token", "cos_ptr + t * HALF + i", "cos_ptr + i"),
        ("sine read from cosines", "tl.load(sin_ptr", "tl.load(cos_ptr"),
        ("queries taken for contiguous", "q_ptr + t * q_stride", "q_ptr + t * H * HALF * 2"),
        ("keys spaced like queries", "k_ptr + t * k_stride", "k_ptr + t * q_stride"),
        ("last head lost", "(h < HEADS)", "(h < HEADS - 1)"),
    ],
    "silu_mul": [
        ("exp(x)", "tl.exp(-gate)", "tl.exp(gate)"),
        ("up forgotten", "(1.0 + tl.exp(-gate)) * up", "(1.0 + tl.exp(-gate))"),
        ("sigmoid for silu", "out = gate / (1.0", "out = 1.0 / (1.0"),
        ("gate and up swapped", "gate / (1.0 + tl.exp(-gate)) * up", "up / (1.0 + tl.exp(-up)) * gate"),
        ("up taken for contiguous", "t * up_stride", "t * C"),
        ("tiles overlap", "tl.program_id(1) * BLOCK_C", "tl.program_id(1)"),
        ("last channel lost", "i < C ", "i < C - 1"),
    ],
    "kv_write": [
        ("-1 written before the cache", "slot >= 0", "slot >= -1"),
        ("slot 0 taken for none", "slot >= 0", "slot > 0"),
        ("the token's index for its slot", "slot * k_cache_stride", "t * k_cache_stride"),
        ("values one slot late", "slot * v_cache_stride", "(slot + 1) * v_cache_stride"),
        ("keys written as values", "tl.load(v_ptr + t * v_stride", "tl.load(k_ptr + t * k_stride"),
        ("keys taken for contiguous", "k_ptr + t * k_stride", "k_ptr + t * ROW"),
        ("last channel lost", "(i < ROW)", "(i < ROW - 1)"),
    ],
    "rope_and_write": [
        ("-1 written before the cache", "slot >= 0", "slot >= -1"),
        ("slot 0 taken for none", "slot >= 0", "slot > 0"),
        ("values one slot late", "slot * v_cache_stride", "(slot + 1) * v_cache_stride"),
        ("keys taken for contiguous", "slot * k_cache_stride", "slot * G * HALF * 2"),
        ("the token's index for its slot", "slot * k_cache_stride", "t * k_cache_stride"),
        ("the token's index for its position", "tl.load(positions_ptr + t).to(tl.int64) *", "t *"),
        ("the first token's position", "positions_ptr + t", "positions_ptr"),
        ("sines from the cosines", "turns_ptr + turn + HALF", "turns_ptr + turn"),
        ("turned backwards, first half", "(x * cos - y * sin)", "(x * cos + y * sin)"),
        ("turned backwards, second half", "(y * cos + x * sin)", "(y * cos - x * sin)"),
        ("values turn too", "v_place + cached, first", "v_place + cached, turned_first"),
        ("second half of the key lost", "k_place + cached + HALF, turned_second", "k_place + cached + HALF, second"),
        ("rows taken for contiguous", "qkv_ptr + t * qkv_stride + pair + HALF",
         "qkv_ptr + t * (H + 2 * G) * HALF * 2 + pair + HALF"),
        ("every group's first queries", "g * R + r,", "r,"),
        ("queries one head late", "t * H * HALF * 2 + pair", "t * H * HALF * 2 + (pair + HALF * 2) % (H * HALF * 2)"),
        ("keys and values swapped", "H + (r - R) * G + g", "H + (R + 1 - r) * G + g"),
        ("every group's first key", "H + (r - R) * G + g", "H + (r - R) * G"),
        ("keys written to the first head", "cached = g * HALF * 2 + i", "cached = i"),
        ("last channel lost", "mine = i < HALF ", "mine = i < HALF - 1"),
        ("keys normalised by the queries' weight", "tl.where(r < R, q_first, k_first)", "q_first"),
        ("halves share a weight", "q_norm_ptr + HALF + i", "q_norm_ptr + i"),
        ("eps outside the root", "tl.sqrt(square / (HALF * 2) + eps)", "(tl.sqrt(square / (HALF * 2)) + eps)"),
        ("no mean", "square / (HALF * 2)", "square"),
        ("half a head normalised", "tl.sum(x * x + y * y,", "tl.sum(x * x + x * x,"),
        ("mean over the padded width", "square / (HALF * 2)", "square / (BLOCK_HALF * 2)"),
        ("second half at its old length", "y * scale *", "y *"),
    ],
    "gemv": [
        ("the last output lost", "mine = (n < N)", "mine = (n < N - 1)"),
        ("the last channel lost", "mask=mine & (k < K)", "mask=mine & (k < K - 1)"),
        ("reads past the row", "mask=mine & (k < K)", "mask=mine"),
        ("reads past x", "mask=k < K, other", "mask=k < K + 1, other"),
        ("rows taken for contiguous", "n.to(tl.int64) * weight_stride", "n.to(tl.int64) * K"),
        ("x taken for contiguous", "m * x_stride", "m * K"),
        ("the first x for all", "x_ptr + m * x_stride", "x_ptr"),
        ("tiles overlap", "k = start + stretch", "k = stretch"),
        ("programs overlap", "tl.program_id(0) * ROWS + tl.arange", "tl.program_id(0) + tl.arange"),
        ("only the last stretch counts", "sums[m] + tl.sum(w * x, axis=2)", "tl.sum(w * x, axis=2)"),
        ("sums in 16 bits", "+ tl.sum(w * x, axis=2)", "+ tl.sum(w * x, axis=2).to(tl.float16).to(tl.float32)"),
        ("the largest product of a thread", "tl.sum(w * x, axis=2)", "tl.max(w * x, axis=2)"),
        ("bias forgotten", "out += tl.load", "out += 0 * tl.load"),
        ("the first bias for all", "bias_ptr + n", "bias_ptr + 0 * n"),
        ("outputs transposed", "out_ptr + m * N + n", "out_ptr + n * M + m"),
    ],
    "stream": [
        ("copy: last element lost", "other=0.0), mask=i < numel)", "other=0.0), mask=i < numel - 1)"),
        ("copy: one element too many", "other=0.0), mask=i < numel)", "other=0.0), mask=i < numel + 1)"),
        ("copy: tiles overlap", "tl.program_id(0).to(tl.int64) * TILE", "tl.program_id(0).to(tl.int64)"),
        ("total: reads past the end", "x_ptr + i, mask=i < numel,", "x_ptr + i, mask=i < numel + 1,"),
        ("total: last element lost", "x_ptr + i, mask=i < numel,", "x_ptr + i, mask=i < numel - 1,"),
        ("total: tiles overlap", "i = program * TILE", "i = program"),
        ("total: sums in one place", "sums_ptr + program", "sums_ptr"),
    ],
    "prefill_attention": [
        ("does not see itself", "seen = j <= position[:, None]", "seen = j < position[:, None]"),
        ("sees the next token", "seen = j <= position[:, None]", "seen = j <= position[:, None] + 1"),
        ("aligned to the top left", "offset = num_keys - num_queries", "offset = num_keys * 0"),
        ("heads dealt round", "g * R + row % R", "g + row % R * G"),
        ("output not rescaled", "acc * shrink[:, None]", "acc"),
        ("sum not rescaled", "running_sum * shrink +", "running_sum +"),
        ("stale maximum", "running_max = new_max\n", "running_max = running_max\n"),
        ("scale 1 / D", "LOG2_E * D**-0.5", "LOG2_E / D"),
        ("base 2 taken for base e", "LOG2_E * D**-0.5", "D**-0.5"),
        ("window one key too wide", "position[:, None] - WINDOW)", "position[:, None] - WINDOW - 1)"),
        ("window one key too narrow", "position[:, None] - WINDOW)", "position[:, None] - WINDOW + 1)"),
        ("one sink too many", "(j < SINKS)", "(j <= SINKS)"),
        ("sinks never read", "tl.minimum(SINKS, begin), True", "0, True"),
        ("sinks read twice", "tl.minimum(SINKS, begin), True", "SINKS, True"),
        ("unmasked tiles on the diagonal", "maximum(first + 1, 0) //", "maximum(last + 1, 0) //"),
        ("unmasked tiles at the window's edge", "last - WINDOW + 1", "first - WINDOW + 1 "),
        ("values past the end", "tl.load(v_tile, mask=live, other=0.0)", "tl.load(v_tile)"),
        ("inf - inf", 'tl.where(new_max == -float("inf"), 0.0, new_max)', "new_max"),
        ("another sequence's values", "v_ptr += k_start.to(tl.int64) * v_stride + g * D", "v_ptr += g * D"),
        ("another group's keys", "(tl.int64) * k_stride + g * D", "(tl.int64) * k_stride"),
        ("another sequence's queries", "where = (q_start + token)", "where = (token)"),
    ],
    "decode_attention": [
        ("reads past the length", "live = start + n < end", "live = start + n <= end"),
        ("misses the newest slot", "live = start + n < end", "live = start + n < end - 1"),
        ("heads dealt round", "head = g * R + r ", "head = g + r * G"),
        ("output not rescaled", "acc * shrink[:, None]", "acc"),
        ("sum not rescaled", "* shrink + tl.sum(weight, axis=1)", "+ tl.sum(weight, axis=1)"),
        ("stale maximum", "= new_max\n        v_tile", "= running_max\n        v_tile"),
        ("scale 1 / D", "LOG2_E * D**-0.5", "LOG2_E / D"),
        ("values past the length", "tl.load(v_tile, mask=mask, other=0.0)", "tl.load(v_tile)"),
        ("every split reads from the start", "begin = split * share", "begin = split * 0"),
        ("the first sequence's length", "lengths_ptr + b", "lengths_ptr"),
        ("another group's keys", "k_stride_b + g * D", "k_stride_b"),
        ("splits weigh the same", "tl.sum(weight[:, None] * partial", "tl.sum(partial"),
        ("log-sum-exp in base e", "running_max + tl.log2(", "running_max + tl.log("),
        ("log-sum-exp without the sum", "running_max + tl.log2(", "running_max + 0 * tl.log2("),
        ("dead splits count", 'mask=live, other=-float("inf")', "mask=live, other=0.0"),
        ("merge not rescaled", "acc * shrink + tl.sum", "acc + tl.sum"),
        ("inf - inf in the merge", 'tl.where(new_max == -float("inf"), 0.0, new_max)', "new_max"),
    ],
}  # fmt: skip
CASES = [(name, *mutation) for name, mutations in MUTATIONS.items() for mutation in mutations]


def load(name, source, folder):
    path = folder / f"{name}_wrong.py"  # a file, because Triton reads a kernel's source from disk
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_of(name):
    return (Path(kernels.__file__).parent / f"{name}.py").read_text()


def changed(name, right, wrong):
    """The kernel's source with its one occurrence of `right` made wrong."""
    source = source_of(name)
    if source.count(right) != 1:  # no AssertionError: that would pass for a rejection
        raise LookupError(f"{right!r} occurs {source.count(right)} times in {name}.py")
    return source.replace(right, wrong)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_right_kernel_passes(name, tmp_path):
    """Loaded in the same way as the wrong ones, so that a rejection can only come from the replacement."""
    battery(name, load(name, source_of(name), tmp_path))


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # numpy's remarks about the inf and NaN that wrong kernels make
@pytest.mark.parametrize("name, what, right, wrong", CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_the_wrong_kernel_is_rejected(name, what, right, wrong, tmp_path):
    with pytest.raises(AssertionError):
        battery(name, load(name, changed(name, right, wrong), tmp_path))


def test_there_are_enough_of_them():
    assert all(len(mutations) >= 6 for mutations in MUTATIONS.values())
