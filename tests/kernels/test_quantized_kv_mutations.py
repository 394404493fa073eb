"""Wrong kernels over quantized pages, each rejected by what the right ones pass; the rules are test_mutations.py's."""

from functools import partial

import pytest
import quantized_checks as quantized
import torch
from test_mutations import changed, load, source_of
from test_paged_mutations import same_rubbish_each_time  # noqa: F401

from minserve.kernels import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="wrong kernels run in the interpreter only"),
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning"
    ),  # numpy's remarks about the inf and NaN of wrong kernels
]


def write_battery(module):
    quantized.check_write(module)
    quantized.check_write(module, "fp8", G=3, D=20, dtype=torch.float16, seed=1)
    quantized.check_seal(module)
    quantized.check_seal(module, S=4, G=3, D=20, dtype=torch.float16, seed=1)


def decode_battery(module):
    """Entries nobody needs name page 0, which is all NaN: a page id that does not exist would end the process."""
    check = partial(quantized.check_decode, module, unused=0)
    for kind, most in (("int4", 1), ("int8", 3)):
        check(kind, [1, 0, most, 1], [33, 9, 40, 0], splits=1, S=8)
        check(kind, [1, most], [3, 70], splits=3, D=20, dtype=torch.float16)
        check(kind, [1, most], [140, 60], window=33, sinks=3, splits=3, S=8)
        check(kind, [1, 1], [75, 68], window=7, sinks=70, splits=2)
        check(kind, [1], [300], H=2, G=1)  # the launcher's own choice of splits
    check("int8", [7, 1], [20, 64], G=1, splits=2, size=20.0)
    check("fp8", [1], [40])
    quantized.check_trees(module, [1, 5, 3], [63, 140, 7], 2, S=8)
    quantized.check_far_slots(module)


def prefill_battery(module):
    check = partial(quantized.check_prefill, module, unused=0)
    for kind in ("int4", "int8"):
        check(kind, [2, 0, 5, 20], [5, 7, 5, 50], S=8)
        check(kind, [5], [3], S=8)
        check(kind, [20, 4], [70, 9], window=33, sinks=3, dtype=torch.float16)
        check(kind, [20], [60], window=7, sinks=40, S=8)
        check(kind, [12], [140], window=70)
        check(kind, [20], [50], G=1, size=20.0)


def battery(name, source, folder, batteries=None):
    module, batteries = load(name, source, folder), batteries or BATTERIES
    if name != "quantized_tiles":
        return batteries[name](module)
    for user in (
        "quantized_prefill",
        "quantized_attention",
    ):  # as if these had imported it; the quicker one first
        importer = load(user, source_of(user), folder)
        for tile in ("attend_stored_tile", "attend_fresh_tile"):
            setattr(importer, tile, getattr(module, tile))
        batteries[user](importer)


BATTERIES = {
    "kv_quantize": write_battery, "quantized_attention": decode_battery, "quantized_prefill": prefill_battery,
}  # fmt: skip
MUTATIONS = {
    "kv_quantize": [
        ("truncated", "        q = _nearest(q)\n", "        q = tl.where(q < 0, tl.ceil(q), tl.floor(q))\n"),
        ("ties away from zero", "return x + 12582912.0 - 12582912.0",
         "return tl.where(x < 0, tl.ceil(x - 0.5), tl.floor(x + 0.5)) * 1.0"),
        ("e4m3 truncated", "bits + 0x7FFFF + (bits >> 20 & 1)", "bits"),
        ("small e4m3 as large ones", "tl.abs(x) < 0.015625", "tl.abs(x) < 0.0"),
        ("the sign is lost in the size", "tl.max(tl.abs(x).to(", "tl.max(x.to("),
        ("NaN overlooked", "size = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1)",
         "size = tl.max(tl.where(x == x, tl.abs(x), 0.0).to(tl.int32, bitcast=True), axis=1)"),
        ("rows of zeros divided by zero", 'sound = (scale > 0) & (scale < float("inf"))',
         'sound = scale < float("inf")'),
        ("the first head's scale", "scale = tl.div_rn(size.to(tl.float32, bitcast=True), LARGEST)",
         "scale = tl.div_rn(size.to(tl.float32, bitcast=True) * 0 + tl.max(x), LARGEST)"),
        ("scales of the slot before", "scales_ptr + slot * G + g", "scales_ptr + (slot - 1) * G + g"),
        ("-1 is the last slot", "(tl.arange(0, BLOCK_D) < D)[None, :] & (slot >= 0)",
         "(tl.arange(0, BLOCK_D) < D)[None, :]"),
        ("values where keys are", "_write_rows(v_ptr + t * v_stride", "_write_rows(k_ptr + t * k_stride"),
        ("tokens taken for contiguous", "_write_rows(k_ptr + t * k_stride", "_write_rows(k_ptr + t * G * D"),
        ("16 steps", "high - low, 15.0)", "high - low, 16.0)"),
        ("the minimum forgotten", "n = tl.div_rn(x - minimum,", "n = tl.div_rn(x + 0 * minimum,"),
        ("levels truncated", "n = _nearest(tl.minimum(tl.maximum(n, 0.0), 15.0))",
         "n = tl.floor(tl.minimum(tl.maximum(n, 0.0), 15.0))"),
        ("levels of the exact range",
         "return scale.to(tl.float16).to(tl.float32), minimum.to(tl.float16).to(tl.float32)",
         "return scale, minimum"),
        ("NaN in a page overlooked",
         'tl.where(poisoned, float("nan"), scale), tl.where(poisoned, float("nan"), minimum)',
         "scale, minimum"),
        ("halves swapped", "<< (4 * half)", "<< (4 - 4 * half)"),
        ("halves of values swapped", "packed = _levels(a, scale[:, None], minimum[:, None]) | _levels(b,",
         "packed = _levels(b, scale[:, None], minimum[:, None]) | _levels(a,"),
        ("the lower half's range", "tl.minimum(a, b), float(\"inf\")", "a, float(\"inf\")"),
        ("scale and minimum swapped", "tl.store(at + G * 2 * HALF, minimum",
         "tl.store(at + G * 2 * HALF, scale"),
        ("the page before", "page = tl.load(pages_ptr + i).to(tl.int64)",
         "page = tl.load(pages_ptr + i).to(tl.int64) - 1"),
        ("-1 is a page", "if page < 0:", "if page < -1:"),
        ("every page from the first token", "tl.load(starts_ptr + i)", "tl.load(starts_ptr)"),
    ],
    "quantized_tiles": [
        ("siblings are seen", "seen = seen & on_branch(tree, position, j)", "seen = seen & True"),
        ("the next token's key scale", "k_scales_ptr + slot * G, mask",
         "k_scales_ptr + (slot ^ 1) * G, mask"),
        ("the next page's value scale", "v_scales_ptr + slot * G, mask",
         "v_scales_ptr + (slot ^ S) * G, mask"),
        ("key scale forgotten", "other=OTHER) * scale)[None, :]", "other=OTHER) * 0 + scale)[None, :]"),
        ("slots in 32 bits", "page = tl.load(table_ptr + j // S, mask=mine, other=OTHER).to(tl.int64)",
         "page = tl.load(table_ptr + j // S, mask=mine, other=OTHER)"),
        ("one page for the whole tile", "table_ptr + j // S", "table_ptr + start // S + 0 * j"),
        ("nibbles swapped", "shift = (d // HALF * 4)", "shift = (4 - d // HALF * 4)"),
        ("neighbours share a byte", "(d % HALF)[None, :]", "(d // 2)[None, :]"),
        ("seven bits", ">> shift & 15)", ">> shift & 127)"),
        ("zero point of 8", "- 8388608.0", "- 8388616.0"),
        ("key minimum forgotten", "k = (k_least[None, :] + _nibbles", "k = (0 * k_least[None, :] + _nibbles"),
        ("value minimum forgotten", "v = (v_least[:, None] + _nibbles",
         "v = (0 * v_least[:, None] + _nibbles"),
        ("the next channel's scale", "k_scales_ptr + page * 2 * G * D + d ",
         "k_scales_ptr + page * 2 * G * D + (d ^ 1) "),
        ("the first page's channels", "k_scales_ptr + page * 2 * G * D", "k_scales_ptr + 0 * page"),
        ("the next head's minimum", "channel + G * D, mask", "channel + D, mask"),
        ("scale for minimum", "tl.load(token + 1, mask", "tl.load(token, mask"),
        ("the own page read sealed", "(j[None, :] <= limit[:, None])", "(j[None, :] <= position[:, None])"),
        ("sealed pages read fresh", "(start // S == position // S)[:, None]", "(start >= 0)"),
        ("a query sees the next one", "(j[None, :] <= position[:, None]) & (start",
         "(j[None, :] <= position[:, None] + 1) & (start"),
        ("fresh tokens one too early", "at = ((place + j) * G * D)", "at = ((place + j - 1) * G * D)"),
        ("reads behind the window", "(start // S + 1) * S - WINDOW + 1)", "(start // S + 1) * S - WINDOW)"),
        ("window one too wide", "    if PARTIAL:\n        mine",
         "    position -= 1\n    if PARTIAL:\n        mine"),
        ("tiles of small pages overlap",
         "mine = (j <= newest) & (n < STEP)                                                      # [N]\n        if",
         "mine = j <= newest\n        if"),
        ("masked values are multiplied", "v = tl.load(v_ptr + at, mask=live, other=0.0)   ",
         "v = tl.load(v_ptr + at)   "),
        ("inf - inf", 'tl.where(new_max == -float("inf"), 0.0, new_max)', "new_max"),
        ("output not rescaled", "acc * shrink[:, None]", "acc"),
        ("sum not rescaled", "running_sum * shrink +", "running_sum +"),
    ],
    "quantized_attention": [
        ("another head's key scale", "k_scales_ptr += g * (D if INT4 else 1)", "k_scales_ptr += 0"),
        ("another head's value scale", "v_scales_ptr += g * (2 if INT4 else 1)", "v_scales_ptr += 0"),
        ("heads as wide as channels", "BYTES: tl.constexpr = D // 2 if INT4 else D",
         "BYTES: tl.constexpr = D"),
        ("the page before is the own one", "stop = tl.maximum(length - 1, 0) // S * S",
         "stop = length // S * S"),
        ("the own page is skipped", "range(stop, tl.where(split == splits - 1, length, stop), STEP)",
         "range(stop, stop, STEP)"),
        ("every split reads the own page", "tl.where(split == splits - 1, length, stop)", "length"),
        ("the first row's fresh tokens", "tl.load(home_ptr + b)", "tl.load(home_ptr)"),
        ("home taken for position 0", ".to(tl.int64) - stop ", ".to(tl.int64) "),
        ("another head's fresh tokens", "fresh_k_ptr + g * D", "fresh_k_ptr"),
        ("unmasked to the end", "tl.maximum(stop if INT4 else plain, 0) // STEP", "tl.cdiv(stop, STEP)"),
        ("unmasked into a tree", "plain = first - 62", "plain = first - 0"),
        ("another query's tree", "trees_ptr + where,", "trees_ptr + where * 0,"),
        ("the last tile is nobody's", "share = tl.cdiv(tiles, splits)", "share = tiles // splits"),
        ("sinks never read", "sink_tiles = tl.cdiv(tl.minimum(SINKS, begin), STEP)", "sink_tiles = 0"),
        ("reads behind the window", "oldest = tl.maximum(first - WINDOW + 1, 0)",
         "oldest = tl.maximum(first - WINDOW, 0)"),
        ("window cut short", "oldest = tl.maximum(first - WINDOW + 1, 0)",
         "oldest = tl.maximum(first - WINDOW + 2, 0)"),
        ("splits in one place", "(tl.cast(split, tl.int64) * tokens + where)", "(where)"),
    ],
    "quantized_prefill": [
        ("another head's key scale", "k_scales_ptr += g * (D if INT4 else 1)", "k_scales_ptr += 0"),
        ("sealed up to the query", "limit = position // S * S - 1", "limit = position + 0"),
        ("the last query's page for all", "tl.maximum(first, 0) // S * S\n        limit",
         "tl.maximum(last, 0) // S * S\n        limit"),
        ("the own pages are skipped", "range(full, last + 1, STEP)", "range(full, full, STEP)"),
        ("the last own page is skipped", "range(full, last + 1, STEP)", "range(full, stop, STEP)"),
        ("home is the first query's", "tl.maximum(offset, 0) // S * S ", "tl.maximum(offset, 0) "),
        ("home is the program's", "tl.maximum(offset, 0) // S * S ", "tl.maximum(first, 0) // S * S "),
        ("unmasked tiles on the diagonal", "tl.maximum(first + 1, 0), position",
         "tl.maximum(last + 1, 0), position"),
        ("window cut short", "oldest = tl.maximum(first - WINDOW + 1, 0)",
         "oldest = tl.maximum(last - WINDOW + 1, 0)"),
        ("unmasked tiles at the window's edge", "last - WINDOW + 1", "first - WINDOW + 1 "),
        ("sinks read twice", "tl.minimum(SINKS, begin), STEP)", "SINKS, STEP)"),
        ("the last rows lost", "(first_row + BLOCK_M - 1) // R, num_queries - 1)",
         "first_row // R, num_queries - 1)"),
    ],
}  # fmt: skip
CASES = [(name, *mutation) for name, mutations in MUTATIONS.items() for mutation in mutations]


@pytest.mark.parametrize("name", BATTERIES)
def test_the_right_kernel_passes(name, tmp_path):
    battery(name, source_of(name), tmp_path)


def test_the_right_tiles_pass(tmp_path):
    """The same code again: one case for each who imports them."""
    both = dict(quantized_attention=quantized.check_decode, quantized_prefill=quantized.check_prefill)
    one = {user: partial(check, kind="int4", queries=[1], lengths=[40]) for user, check in both.items()}
    battery("quantized_tiles", source_of("quantized_tiles"), tmp_path, one)


@pytest.mark.parametrize("name, what, right, wrong", CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_the_wrong_kernel_is_rejected(name, what, right, wrong, tmp_path):
    source = changed(name, right, wrong)
    with pytest.raises(AssertionError):
        battery(name, source, tmp_path)


def test_there_are_enough_of_them():
    assert all(len(mutations) >= 12 for mutations in MUTATIONS.values())
