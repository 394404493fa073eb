"""Wrong paged kernels, each rejected by the checks the right ones pass; the rules are test_mutations.py's."""

from functools import partial

import paged_checks as paged
import pytest
import torch
from test_mutations import changed, load, source_of

from minserve.kernels import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="wrong kernels run in the interpreter only"),
]


def battery(name, module):
    """The checks a kernel file must pass: small, but every kind of boundary.

    Entries nobody needs name page 0, which is all NaN: a page id that does not exist would end the process.
    """
    if name == "pack":
        paged.check_pack(module, [5, 0, 1, 10], [7, 3, 0, 12])
        paged.check_pack(module, [150, 3], [7, 3], C=240, extra=200)
        paged.check_pack(module, [5, 9], [3, 0], far=True)
        paged.check_pack(module, [b % 3 for b in range(9)], [b for b in range(9)], N=12)
    elif name == "paged_prefill":
        check = partial(paged.check_paged_prefill, unused=0)
        check(module, [2, 0, 5, 20], [5, 7, 5, 50])
        check(module, [5], [3], S=8)
        check(module, [20, 4], [70, 9], window=33, sinks=3)
        check(module, [20], [60], window=7, sinks=40, S=8)
        check(module, [12], [140], window=70)
        check(module, [20], [50], G=1, size=40.0)
    else:
        check = partial(paged.check_paged_decode, unused=0)
        check(module, [1, 0, 3, 1], [33, 9, 40, 0], splits=1, S=8)
        check(module, [4, 1], [3, 70], splits=3)
        check(module, [7, 1], [20, 64], G=1, splits=2, size=20.0)
        check(module, [1, 3], [140, 60], window=33, sinks=3, splits=3, S=8)
        check(module, [2], [75], window=7, sinks=70, splits=2)
        paged.check_trees(module, [1, 1, 3, 9], [63, 130, 66, 20], 2, D=24)
        check(module, [1], [300], H=2, G=1)  # the launcher's own choice of splits
        paged.check_far_pages(
            lambda *case: module.attend_in_splits(*case, 3, 1), module.paged_attention_reference
        )


MUTATIONS = {
    "paged_attention": [
        ("the table read backwards", "page = tl.load(table_ptr + j // S, mask=mine, other=0)",
         "page = tl.load(table_ptr + newest // S - j // S, mask=mine, other=0)"),
        ("one page for the whole tile", "page = tl.load(table_ptr + j // S, mask=mine, other=0)",
         "page = tl.load(table_ptr + start // S + 0 * j, mask=mine, other=0)"),
        ("pages counted in 32 bits", "page = page.to(tl.int64)", "page = page.to(tl.int32)"),
        ("pages taken for contiguous", "page * k_stride_p + j % S", "page * S * k_stride_s + j % S"),
        ("slots counted through pages", "k_stride_p + j % S *", "k_stride_p + j *"),
        ("values from the keys' slot 0", "(page * v_stride_p + j % S * v_stride_s)", "(page * v_stride_p + 0 * j)"),
        ("reads past the length", "mine = j <= newest", "mine = j <= newest + 1"),
        ("misses the newest position", "mine = j <= newest", "mine = j < newest"),
        ("reads behind the window", "(j >= oldest) | (j < SINKS)", "(j >= oldest - 1) | (j < SINKS)"),
        ("one sink too few", "(j < SINKS)[None, :])", "(j < SINKS - 1)[None, :])"),
        ("a draft sees the next one", "(j[None, :] <= position[:, None])", "(j[None, :] <= position[:, None] + 1)"),
        ("a draft does not see itself", "(j[None, :] <= position[:, None])", "(j[None, :] < position[:, None])"),
        ("window one too wide", "position[:, None] - WINDOW)", "position[:, None] - WINDOW - 1)"),
        ("window one too narrow", "position[:, None] - WINDOW)", "position[:, None] - WINDOW + 1)"),
        ("masked values are multiplied", "v = tl.load(v_tile, mask=live, other=0.0)", "v = tl.load(v_tile)"),
        ("inf - inf", 'tl.where(new_max == -float("inf"), 0.0, new_max)', "new_max"),
        ("output not rescaled", "acc * shrink[:, None]", "acc"),
        ("sum not rescaled", "running_sum * shrink +", "running_sum +"),
        ("an empty row reads a slot", "length = tl.load(starts_q_ptr + b), tl.load(lengths_ptr + b)",
         "length = tl.load(starts_q_ptr + b), tl.maximum(tl.load(lengths_ptr + b), 1)"),
        ("an empty row is divided by its sum", "acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]",
         "acc / running_sum[:, None]"),
        ("drafts at the first position", "first = length - num_queries", "first = num_queries * 0"),
        ("the first row's table", "table_ptr = pages_ptr + b.to(tl.int64) * pages_stride", "table_ptr = pages_ptr"),
        ("table rows taken for contiguous", "pages_ptr + b.to(tl.int64) * pages_stride",
         "pages_ptr + b.to(tl.int64) * tl.cdiv(length, S)"),
        ("the first row's queries", "where = (q_start + token)", "where = (0 * q_start + token)"),
        ("heads dealt round", "g * R + row % R", "g + row % R * G"),
        ("another group's values", "    v_ptr += g * D\n", "    v_ptr += 0\n"),
        ("only the first tile of rows", "first_row = tl.program_id(2) * BLOCK_R", "first_row = 0"),
        ("sinks never read", "tl.cdiv(tl.minimum(SINKS, begin), BLOCK_N)", "0"),
        ("sinks read twice", "tl.cdiv(tl.minimum(SINKS, begin), BLOCK_N)", "tl.cdiv(SINKS, BLOCK_N)"),
        ("the last tile is nobody's", "share = tl.cdiv(tiles, splits)", "share = tiles // splits"),
        ("every split reads from the start", "range(split * share,", "range(0 * split,"),
        ("splits in one place", "(tl.cast(split, tl.int64) * tokens + where)", "(where)"),
        ("log-sum-exp without the sum", "running_max + tl.log2(", "running_max + 0 * tl.log2("),
        ("a tree's bits one off", ">> (back & 31) & 1", ">> (back + 1 & 31) & 1"),
        ("half a word of a tree", "tl.where(back < 32, low, high)", "tl.where(back < 99, low, high)"),
        ("siblings are seen", "(back >= 0) & (bit == 1)", "(back >= 0) & (bit >= 0)"),
        ("what lies far back is hidden", "(back >= 63) |", "(back >= 99) |"),
        ("a tree only sees 62 positions", "(back >= 63) |", "(back >= 62) |"),
        ("the first query's tree", "trees_ptr + where,", "trees_ptr + 0 * where,"),
        ("trees by the row", "trees_ptr + where,", "trees_ptr + b + 0 * where,"),
        ("scale 1 / D", "LOG2_E * D**-0.5", "LOG2_E / D"),
    ],
    "paged_prefill": [
        ("aligned to the top left", "offset = length - num_queries", "offset = length * 0"),
        ("heads dealt round", "g * R + row % R", "g + row % R * G"),
        ("the first row's table", "table_ptr = pages_ptr + b.to(tl.int64) * pages_stride", "table_ptr = pages_ptr"),
        ("another group's keys", "    k_ptr += g * D ", "    k_ptr += 0 "),
        ("another row's queries", "where = (q_start + token)", "where = (token)"),
        ("unmasked tiles on the diagonal", "maximum(first + 1, 0) //", "maximum(last + 1, 0) //"),
        ("unmasked tiles at the window's edge", "last - WINDOW + 1", "first - WINDOW + 1 "),
        ("reads behind the window", "oldest = tl.maximum(first - WINDOW + 1, 0)",
         "oldest = tl.maximum(first - WINDOW, 0)"),
        ("window cut short", "oldest = tl.maximum(first - WINDOW + 1, 0)",
         "oldest = tl.maximum(last - WINDOW + 1, 0)"),
        ("sinks never read", "range(0, tl.minimum(SINKS, begin), BLOCK_N)", "range(0, 0, BLOCK_N)"),
        ("sinks read twice", "range(0, tl.minimum(SINKS, begin), BLOCK_N)", "range(0, SINKS, BLOCK_N)"),
        ("the last rows lost", "(first_row + BLOCK_M - 1) // R, num_queries - 1)", "first_row // R, num_queries - 1)"),
        ("base 2 taken for base e", "LOG2_E * D**-0.5", "D**-0.5"),
    ],
    "pack": [
        ("the row before", "tl.where(below, middle, low)", "tl.where(below, middle - 1, low)"),
        ("an empty row's places", "mask=live, other=0) <= place", "mask=live, other=0) < place"),
        ("too few halvings", "rows, rows.bit_length(), total", "rows, rows.bit_length() - 2, total"),
        ("seat taken for row", "seat * tokens_stride", "low * tokens_stride"),
        ("the other way round", "seat * pages_stride", "low * pages_stride"),
        ("positions from zero", "position = tl.load(computed_ptr + low, mask=live, other=0) + place",
         "position = place + 0"),
        ("positions of the batch", "position -= tl.load(starts_ptr + low, mask=live, other=0)", "position -= 0"),
        ("tokens taken for contiguous", "seat * tokens_stride + position", "seat * (tokens_stride - 5) + position"),
        ("slots in 32 bits", "page.to(tl.int64) * S", "page * S"),
        ("slots of the last page", "* S + position % S", "* S + position % S + S"),
        ("padding writes to slot 0", "tl.where(live, slot, -1)", "tl.where(live, slot, 0)"),
        ("padding is live", "live = place < tl.load(starts_ptr + rows)",
         "live = place < tl.load(starts_ptr + rows) + 1"),
        ("places overlap", "tl.program_id(0) * BLOCK + tl.arange", "tl.program_id(0) + tl.arange"),
    ],
}  # fmt: skip
CASES = [(name, *mutation) for name, mutations in MUTATIONS.items() for mutation in mutations]


@pytest.fixture(autouse=True)
def same_rubbish_each_time(monkeypatch):
    """Memory nobody wrote holds NaN: a kernel that leaves a place out is found out at once, not now and then."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        if out.is_floating_point() and out.numel() < 10**6:
            out.fill_(float("nan"))
        return out

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_right_kernel_passes(name, tmp_path):
    battery(name, load(name, source_of(name), tmp_path))


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # numpy's remarks about the inf and NaN of wrong kernels
@pytest.mark.parametrize("name, what, right, wrong", CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_the_wrong_kernel_is_rejected(name, what, right, wrong, tmp_path):
    with pytest.raises(AssertionError):
        battery(name, load(name, changed(name, right, wrong), tmp_path))


def test_there_are_enough_of_them():
    assert all(len(mutations) >= 12 for mutations in MUTATIONS.values())
