"""Both paged kernels, pack, and kv_write into pages: every page boundary, and not one slot too many."""

import kernel_checks as checks
import paged_checks as paged
import pytest
import torch
from kernel_checks import DEVICE, DTYPES, NAN, needs_kernel, randn, starts
from paged_checks import paged_case
from test_definitions import sdpa, seen_by
from test_mutations import load, source_of

from minserve.kernels import INTERPRETED, decode_attention, kv_write, pack, paged_prefill, prefill_attention
from minserve.kernels import paged_attention as decode

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HEADS = [(6, 2, 64, 8), (4, 1, 24, 16), (4, 4, 128, 32), (6, 3, 24, 64)]  # (H, G, D, S)
slow = pytest.mark.slow
unwritten = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is merged from parts nobody wrote


# ---------------------------------------------------------------- the definitions, against others
@pytest.mark.parametrize("H, G", [(6, 2), (6, 3), (4, 4), (4, 1)])
@pytest.mark.parametrize("window, sinks", [(None, 0), (4, 0), (4, 2), (5, 0), (1, 1), (300, 7)])
@pytest.mark.parametrize("S", [1, 4, 16])
def test_the_definition_is_sdpa(H, G, window, sinks, S):
    definition_is_sdpa(decode, H, G, window, sinks, S)


def definition_is_sdpa(module, H, G, window, sinks, S):
    queries, lengths = [2, 5, 0, 4, 1, 1], [5, 5, 3, 21, 4, 0]
    case, k, v = paged_case(queries, lengths, H, G, 16, S, window=window, sinks=sinks)
    got, at = module.paged_attention_reference(*case, window, sinks), case[4].tolist()
    for b, (n, m) in enumerate(zip(queries, lengths)):
        mask = torch.tensor(seen_by(n, m, window, sinks), device=DEVICE, dtype=torch.bool).view(n, m)
        rows = slice(at[b], at[b + 1])
        expected = sdpa(case[0][rows], k[b], v[b], mask) if m else torch.zeros_like(got[rows])
        torch.testing.assert_close(got[rows], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries, lengths", [([1, 1, 1, 0], [62, 63, 130, 4]), ([5, 1, 3], [66, 1, 7])])
def test_the_definition_of_a_tree(queries, lengths):
    """Seen and hidden positions by a mask; the launcher gives the same; a chain is what there was before."""
    case, k, v = paged_case(queries, lengths, H=6, G=2, D=8, S=4)
    trees, T = paged.some_trees(len(case[0])), sum(queries)
    expected = paged.attend_to_trees(case[0], k, v, queries, lengths, trees)
    launched = decode.paged_decode(*case, max(queries), max(lengths), trees=trees)
    for got in (decode.paged_attention_reference(*case, trees=trees), launched):
        torch.testing.assert_close(got[:T], expected, rtol=1e-5, atol=1e-5)
    chain = decode.paged_attention_reference(*case, trees=torch.full_like(trees, -1))
    torch.testing.assert_close(chain, decode.paged_attention_reference(*case))


def test_siblings_by_hand():
    """Slots 0, 1: the text. 2 and 3: two drafts after it, 4: the child of the first."""
    v = torch.tensor([1.0, 3.0, 5.0, 100.0, 7.0], device=DEVICE).view(1, 5, 1, 1).expand(1, 5, 1, 2)
    v = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, 3))
    pages, length = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.tensor([5], dtype=torch.int32)
    trees = torch.tensor([0b111, 0b1101, 0b11101], device=DEVICE)
    case = randn(3, 1, 2), torch.zeros_like(v), v.contiguous(), pages, starts([3]), length.to(DEVICE)
    got = decode.paged_decode(*case, 3, 5, trees=trees)
    assert [round(x, 3) for x in got[:, 0, 0].tolist()] == [3.0, round(104 / 3, 3), 4.0]


def test_pages_by_hand():
    """Keys all equal, so every weight is 1/n, and values that say where they lie."""
    k, v = torch.zeros(4, 2, 1, 2, device=DEVICE), torch.full((4, 2, 1, 2), NAN, device=DEVICE)
    v[3, 0], v[3, 1], v[1, 0] = 10.0, 20.0, 60.0
    pages = torch.tensor([[3, 1, -1]], dtype=torch.int32, device=DEVICE)
    q, length = randn(2, 1, 2), torch.tensor([3], dtype=torch.int32, device=DEVICE)
    case = q, k, v, pages, starts([2]), length
    run = paged_prefill.paged_prefill
    assert decode.paged_attention_reference(*case)[:, 0, 0].tolist() == [15.0, 30.0]
    for out in (run(*case, 2), decode.paged_decode(*case, 2, 3)):
        torch.testing.assert_close(out[:, 0, 0], torch.tensor([15.0, 30.0], device=DEVICE))
    assert run(*case, 2, window=1)[:, 0, 0].tolist() == [20.0, 60.0]
    assert run(*case, 2, window=1, sinks=1)[:, 0, 0].tolist() == [15.0, 35.0]


def test_the_definition_of_pack_one_place_at_a_time():
    definition_of_pack(pack)


def definition_of_pack(module):
    queries, computed = [5, 0, 1, 10], [7, 3, 0, 12]
    seats, at, done, tokens, pages, S, total = case = paged.pack_case(queries, computed)
    ids, positions, slots = (x.tolist() for x in module.pack_reference(*case))
    t = 0
    for b, n in enumerate(queries):
        for p in range(computed[b], computed[b] + n):
            seat = int(seats[b])
            expected = int(tokens[seat, p]), p, int(pages[seat, p // S]) * S + p % S
            assert (ids[t], positions[t], slots[t]) == expected
            t += 1
    assert (ids[t:], positions[t:], slots[t:]) == ([0] * 3, [0] * 3, [-1] * 3)


def definition_is_right(module):
    definition_is_sdpa(module, 6, 2, 4, 2, 4)
    queries, lengths = [5, 1, 3, 1], [66, 1, 7, 63]
    case, k, v = paged_case(queries, lengths, H=6, G=2, D=8, S=4)
    trees = paged.some_trees(len(case[0]), seed=2)
    expected = paged.attend_to_trees(case[0], k, v, queries, lengths, trees)
    got = module.paged_attention_reference(*case, trees=trees)[:10]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


WRONG = [
    (
        "paged_attention",
        "(trees[t] >> back.clamp(max=NEAR) & 1 == 1)",
        "(trees[t] >> back.clamp(max=NEAR) & 2 == 2)",
    ),
    ("paged_attention", "(back >= NEAR) |", "(back >= NEAR - 1) |"),
    ("paged_attention", "(back >= NEAR) |", "(back < 0) |"),
    ("paged_attention", "trees[t] >> back", "trees[b] >> back"),
    ("paged_attention", "back = j.flip(0)", "back = j"),
    ("paged_attention", "n - queries[b] - window", "n - window"),
    ("paged_attention", "n - queries[b] - window", "n - queries[b] - window - 1"),
    ("paged_attention", "page = pages[b, j // S].long()", "page = pages[0, j // S].long()"),
    ("paged_attention", "cache[page, j % S]", "cache[page, (j + 1) % S]"),
    ("paged_attention", "lengths * (queries > 0)", "lengths + 0"),
    ("pack", "np.arange(len(seats))", "np.arange(len(seats))[::-1]"),
    ("pack", "(computed - starts[:-1])[row]", "computed[row]"),
    ("pack", "out[2, live:] = -1", "pass"),
    ("pack", ".astype(np.int64) * page_size", ""),
    ("pack", "seat = seats[row]", "seat = row"),
]


@pytest.mark.parametrize("name, right, wrong", WRONG, ids=[f"{w[0]}: {w[2]}" for w in WRONG])
def test_a_wrong_definition_is_rejected(name, right, wrong, tmp_path):
    source = source_of(name)
    assert source.count(right) == 1, f"{right!r} occurs {source.count(right)} times in {name}.py"
    module = load(name, source.replace(right, wrong), tmp_path)
    with pytest.raises((AssertionError, IndexError)):  # IndexError: a page that does not exist
        definition_of_pack(module) if name == "pack" else definition_is_right(module)


# ---------------------------------------------------------------- decode
@needs_kernel
@dtypes
@pytest.mark.parametrize("H, G, D, S", HEADS)
def test_decode_heads(H, G, D, S, dtype):
    paged.check_paged_decode(decode, [1, 0, 1, 3], [5, 9, 70, 33], H=H, G=G, D=D, S=S, dtype=dtype)


@needs_kernel
@unwritten
@dtypes
@pytest.mark.parametrize("S, splits", [
    (8, None), (32, 3), (64, 1), pytest.param(1, 3, marks=slow), pytest.param(16, 20, marks=slow),
])  # fmt: skip
def test_decode_at_page_boundaries(S, splits, dtype):
    lengths = [1, 2 * S - 1, 2 * S, 2 * S + 1, 0]
    paged.check_paged_decode(decode, [1] * 5, lengths, D=24, S=S, splits=splits, dtype=dtype, seed=S)


@needs_kernel
@unwritten
@dtypes
@pytest.mark.parametrize("queries", [[16, 1], pytest.param([7, 4, 2], marks=slow)], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_of_several_queries(queries, splits, dtype):
    """16 queries of 3 heads are 48 rows: one tile in the matrix kernels, three in the others."""
    lengths = [16, 70, 2][: len(queries)]
    paged.check_paged_decode(decode, queries, lengths, splits=splits, dtype=dtype)


@needs_kernel
@unwritten
@dtypes
@pytest.mark.parametrize("masks", [dict(), dict(window=20, sinks=3)], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_that_pad_a_graph_read_nothing_and_get_zeros(splits, masks, dtype):
    """One query each, of which nothing is known, no length, and tables full of pages that do not exist."""
    (q, *rest), _, _ = paged_case([1, 1, 1, 1], [33, 0, 9, 0], S=8, dtype=dtype, **masks)
    q[1], q[3] = NAN, NAN
    got = decode.attend_in_splits(q, *rest, 1, splits, **masks)
    assert torch.equal(got[1:4:2], torch.zeros_like(got[1:4:2]))
    q[1], q[3] = 0, 0
    checks.close(got[:4], decode.paged_attention_reference(q, *rest, **masks)[:4])


@needs_kernel
@unwritten
@slow
@dtypes
def test_decode_of_more_rows_than_a_tile(dtype):
    paged.check_paged_decode(decode, [16, 5], [47, 33], G=1, splits=2, dtype=dtype)


WINDOWS = [(1, 0), (4, 2), (16, 0), (17, 33), pytest.param(5, 0, marks=slow), pytest.param(70, 1, marks=slow)]


@needs_kernel
@unwritten
@dtypes
@pytest.mark.parametrize("window, sinks", WINDOWS)
def test_decode_window(window, sinks, dtype):
    masks = dict(window=window, sinks=sinks, dtype=dtype)
    paged.check_paged_decode(decode, [1, 1, 1], [140, window, window + 1], splits=3, **masks)
    paged.check_paged_decode(decode, [3, 4], [120, 40], S=8, splits=1, **masks)


@needs_kernel
@unwritten
@dtypes
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("queries, lengths", [([1, 1, 1, 0], [62, 63, 130, 4]), ([16, 1, 3], [70, 1, 7])])
def test_decode_of_trees(queries, lengths, splits, dtype):
    paged.check_trees(decode, queries, lengths, splits, S=8, D=24, dtype=dtype)


@needs_kernel
@unwritten
def test_decode_merges_more_splits_than_one_tile_of_them():
    paged.check_paged_decode(decode, [1, 2], [640, 600], splits=20, size=4.0)


@needs_kernel
@unwritten
def test_large_scores_do_not_overflow():
    paged.check_paged_decode(decode, [1, 3], [100, 40], splits=3, size=40.0)
    paged.check_paged_prefill(paged_prefill, [40], [70], size=40.0)


# ---------------------------------------------------------------- chunks
@needs_kernel
@dtypes
@pytest.mark.parametrize("H, G, D, S", HEADS)
def test_prefill_heads(H, G, D, S, dtype):
    paged.check_paged_prefill(paged_prefill, [5, 0, 33, 1], [5, 3, 70, 40], H=H, G=G, D=D, S=S, dtype=dtype)


@needs_kernel
@dtypes
@pytest.mark.parametrize("S", [8, 32, 64, pytest.param(1, marks=slow), pytest.param(16, marks=slow)])
def test_prefill_at_page_boundaries(S, dtype):
    lengths = [1, 2 * S - 1, 2 * S, 2 * S + 1, 0]
    paged.check_paged_prefill(
        paged_prefill, [1, 1, S // 2, min(S, 20), 1], lengths, D=24, S=S, dtype=dtype, seed=S
    )


@needs_kernel
@dtypes
@pytest.mark.parametrize("window, sinks", WINDOWS)
def test_prefill_window(window, sinks, dtype):
    masks = dict(window=window, sinks=sinks, dtype=dtype)
    paged.check_paged_prefill(paged_prefill, [40], [140], **masks)
    paged.check_paged_prefill(paged_prefill, [3, 1, 20], [3, window + 1, 50], S=8, **masks)


@needs_kernel
def test_more_queries_than_positions_and_none_at_all():
    paged.check_paged_prefill(paged_prefill, [5, 2], [3, 0])
    paged.check_paged_decode(decode, [5, 2], [3, 0])
    case, _, _ = paged_case([0, 0], [3, 5])
    for out in (paged_prefill.paged_prefill(*case, 0), decode.paged_decode(*case, 0, 5)):
        assert out.shape == case[0].shape


# ---------------------------------------------------------------- both
@needs_kernel
@unwritten
def test_tables_padded_with_page_zero():
    """Page 0 is real, belongs to nobody, and holds NaN: weight 0 times NaN must not come out."""
    paged.check_paged_decode(decode, [1, 1], [3, 9], S=4, unused=0)
    paged.check_paged_prefill(paged_prefill, [2, 7], [3, 9], S=4, unused=0)


@needs_kernel
@unwritten
def test_slots_further_apart_than_they_are_long():
    case, _, _ = paged_case([3, 1], [30, 9])
    q, k, v, *plan = case
    both = torch.stack((k, v), dim=2)  # [P, S, 2, G, D]: K and V of a slot side by side
    for run, more in ((paged_prefill.paged_prefill, (3,)), (decode.paged_decode, (3, 30))):
        got = run(q, both[:, :, 0], both[:, :, 1], *plan, *more)
        checks.close(got[:4], decode.paged_attention_reference(*case)[:4])


def exactly(got, expected):
    assert torch.equal(got, expected)


@needs_kernel
def test_contiguous_pages_are_the_dense_kernels():
    """Pages in order are a dense cache, and the answers are the dense kernels': interpreted, bit for bit."""
    same = checks.close if DEVICE == "cuda" else exactly  # compiled, a sum may be taken in another order
    S, B, M, lengths = 16, 2, 3, [40, 33]
    q, k, v = randn(2, 6, 32), randn(B * M, S, 2, 32, seed=1), randn(B * M, S, 2, 32, seed=2)
    pages = torch.arange(B * M, dtype=torch.int32, device=DEVICE).view(B, M)
    length = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    for splits in (1, 3):
        dense = [x.view(B, M * S, 2, 32) for x in (k, v)]
        expected = decode_attention.attend_in_splits(q, *dense, length, splits)
        got = decode.attend_in_splits(q, k, v, pages, starts([1, 1]), length, 1, splits)
        same(got, expected)
    queries, q = [20, 7], randn(27, 6, 32)
    rows = [torch.cat([x[b, :n] for b, n in enumerate(lengths)]) for x in dense]
    for masks in (dict(), dict(window=10, sinks=3)):
        expected = prefill_attention.prefill_attention(
            q, *rows, starts(queries), starts(lengths), 20, **masks
        )
        got = paged_prefill.paged_prefill(q, k, v, pages, starts(queries), length, 20, **masks)
        same(got, expected)


@pytest.mark.parametrize("masks", [dict(), dict(window=4, sinks=1)], ids=str)
@pytest.mark.parametrize("cuts", [(3, 2), (1, 4), (1, 1, 1, 2)], ids=str)
def test_chunks_equal_one_shot(cuts, masks):
    """A chunk's first query sees all that came before it: positions are absolute, whatever is cut where."""
    (q, k, v, pages, _, _), _, _ = paged_case([5], [5], S=4)
    whole = paged_prefill.paged_prefill(q, k, v, pages, starts([5]), starts([5])[1:], 5, **masks)
    done = 0
    for n in cuts:
        plan = pages, starts([n]), starts([done + n])[1:]
        chunk = q[done : done + n]
        for out in (
            paged_prefill.paged_prefill(chunk, k, v, *plan, n, **masks),
            decode.paged_decode(chunk, k, v, *plan, n, done + n, **masks),
        ):
            checks.close(out, whole[done : done + n])
        done += n


@unwritten
@pytest.mark.parametrize("window", [None, 20])
def test_rows_need_not_begin_at_place_zero(window):
    """A mixed step: the launcher is given the last two rows, and all the queries."""
    case, _, _ = paged_case([3, 1, 5], [40, 70, 33], window=window)
    (q, k, v, pages, at, lengths), whole = case, decode.paged_attention_reference(*case, window)
    rest = q, k, v, pages[1:], at[1:], lengths[1:]
    for out in (
        paged_prefill.paged_prefill(*rest, 5, window),
        decode.paged_decode(*rest, 5, 70, window),
    ):
        checks.close(out[3:9], whole[3:9])


@needs_kernel
@pytest.mark.parametrize("masks", [dict(), dict(window=20, sinks=3)], ids=str)
def test_rows_permuted_give_answers_permuted(masks):
    """No row depends on its place in the batch, nor on who else is there."""
    queries, lengths, order = [3, 1, 5, 2], [40, 70, 5, 33], [2, 0, 3, 1]
    (q, k, v, pages, at, length), _, _ = paged_case(queries, lengths, **masks)
    places = [p for b in order for p in range(int(at[b]), int(at[b + 1]))]
    moved = q[places], k, v, pages[order], starts([queries[b] for b in order]), length[order]
    for run, more in ((paged_prefill.paged_prefill, (5,)), (decode.paged_decode, (5, 70))):
        before = run(q, k, v, pages, at, length, *more, **masks)
        assert torch.equal(run(*moved, *more, **masks), before[places])


@pytest.mark.skipif(not INTERPRETED, reason="the order of programs can only be chosen in the interpreter")
def test_no_program_depends_on_another(monkeypatch):
    """The interpreter runs programs one after another and hides races: run them backwards, same bits."""
    from triton.runtime.interpreter import interpreter_builder

    case, _, _ = paged_case([3, 8], [40, 20])
    packed = paged.pack_case([150, 3, 200], [7, 3, 0], C=240)

    def everything():
        return [
            paged_prefill.paged_prefill(*case, 8)[:11], decode.attend_in_splits(*case, 8, 3)[:11],
            *pack.pack(*packed),
        ]  # fmt: skip

    forwards, place, seen = everything(), interpreter_builder.set_grid_idx, []

    def backwards(*index):
        seen.append(index)
        place(*(size - 1 - i for i, size in zip(index, interpreter_builder.grid_dim)))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)
    for a, b in zip(forwards, everything(), strict=True):
        assert torch.equal(a, b)
    assert len(set(seen)) > 3


@needs_kernel
def test_pages_beyond_two_to_the_31():
    definition, run = decode.paged_attention_reference, paged_prefill.paged_prefill
    paged.check_far_pages(lambda *case: run(*case, 3), definition)
    paged.check_far_pages(lambda *case: decode.attend_in_splits(*case, 3, 2), definition)


# ---------------------------------------------------------------- pack and kv_write
@needs_kernel
@pytest.mark.parametrize("queries, computed", [
    ([1, 1, 1], [0, 39, 7]), ([5, 0, 1, 10], [7, 3, 0, 12]), ([0, 0, 2], [1, 1, 1]), ([3], [0]),
    ([0, 0], [5, 5]), ([], []),
])  # fmt: skip
@pytest.mark.parametrize("S, extra", [(4, 3), (1, 0), (8, 200)])
def test_pack(queries, computed, S, extra):
    paged.check_pack(pack, queries, computed, S=S, extra=extra)


@needs_kernel
def test_pack_many_rows_and_far_pages():
    """Rows across three programs; slots beyond 2**31."""
    queries = [7 * b % 5 for b in range(140)]
    paged.check_pack(pack, queries, [b % 30 for b in range(140)], N=200, extra=9)
    paged.check_pack(pack, [5, 9], [3, 0], far=True)
    assert int(pack.pack(*paged.pack_case([5, 9], [3, 0], far=True))[2].max()) > 2**31


@dtypes
def test_kv_write_to_pages(dtype):
    paged.check_kv_write_to_pages(kv_write, dtype=dtype)


@needs_kernel
def test_kv_write_beyond_two_to_the_31():
    S, G, D = 16, 16, 64
    P = 2**31 // (S * G * D) + 3
    cache, x = paged.far_cache(2 * P, S, G, D)[P:], randn(2, G, D, dtype=torch.float16)
    slots = torch.tensor([(P - 1) * S + 3, -1], device=DEVICE)
    kv_write.kv_write(x, x, cache.flatten(0, 1), cache.flatten(0, 1), slots)
    assert torch.equal(cache[P - 1, 3], x[0])


# ---------------------------------------------------------------- bad input, on every road
def test_refusals_say_what_to_change():
    (q, k, v, pages, at, lengths), _, _ = paged_case([3, 1], [30, 9], H=6, G=2, D=8)
    run, step = paged_prefill.paged_prefill, decode.paged_decode
    rest = pages, at, lengths
    cases = [
        (lambda: run(randn(6, 5, 8), k, v, *rest, 3), r"5 query heads cannot share 2 .*5 = 2 x 2 \+ 1"),
        (lambda: run(q, k.half(), v, *rest, 3), "k_cache is torch.float16"),
        (lambda: step(q, k, randn(9, 16, 2, 8), *rest, 3, 30), "must be equal"),
        (lambda: step(q, k[:, :15], v[:, :15], *rest, 3, 30), "15 slots.*power of two"),
        (lambda: step(q, k, v, pages.long(), at, lengths, 3, 30), "pages is .* torch.int64"),
        (lambda: step(q, k, v, pages.T, at, lengths, 3, 30), r"pages is \[3, 2\].*2 rows need \[2, 2\]"),
        (lambda: step(q, k, v, pages, at[:2], lengths, 3, 30), r"starts_q is \[2\].*2 rows need \[3\]"),
        (lambda: step(q, k, v, pages, at, lengths.float(), 3, 30), "lengths is .* torch.float32"),
        (lambda: step(q, k, v, *rest, 17, 30), "17 queries per row.*at most 16; use paged_prefill"),
        (lambda: run(q, k, v, *rest, 3, window=0), "window of 0"),
        (
            lambda: step(q, k, v, *rest, 3, 30, trees=lengths),
            r"trees is \[2\] torch.int32.*be \[6\] torch.int64",
        ),
        (
            lambda: step(q, k, v, *rest, 3, 30, 5, trees=torch.zeros(6, dtype=torch.int64, device=DEVICE)),
            "trees with a window of 5",
        ),
        (lambda: run(q, k, v, *rest, 3, sinks=2), "2 sinks with window None"),
    ]
    if DEVICE == "cpu":  # on a GPU these would cost a wait on every call
        more = torch.tensor([200, 9], dtype=torch.int32)
        cases += [
            (lambda: run(q, k, v, *rest, 2), "3 queries, more than max_queries = 2"),
            (lambda: run(q, k, v, pages, starts([3, 9]), lengths, 9), r"\[0, 3, 12\] must rise.*most 6"),
            (lambda: step(q, k, v, *rest, 3, 29), "from 9 to 30 do not lie between 0 and 29"),
            (lambda: run(q, k, v, pages, at, more, 3), "between 0 and 48 .*3 pages of 16 slots"),
            (
                lambda: run(q, k, v, pages + 9, *rest[1:], 3),
                r"entry 0 of row 0's table is page \d+.*pages 0 to 5",
            ),
        ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_pack_refusals_say_what_to_change():
    seats, at, done, tokens, pages, S, total = paged.pack_case([5, 2], [3, 0])
    rest = tokens, pages
    cases = [
        (lambda: pack.pack(seats.long(), at, done, *rest, S, total), r"seats is \[2\] torch.int64"),
        (lambda: pack.pack(seats, at[:2], done, *rest, S, total), r"starts is \[2\].*need \[3\]"),
        (lambda: pack.pack(seats, at, done, tokens, pages[:3], S, total), r"pages is \[3, 10\].*\[7, 10\]"),
        (lambda: pack.pack(seats, at, done, *rest, 12, total), "12 slots; it must be a power of two"),
    ]
    if DEVICE == "cpu":
        cases += [
            (lambda: pack.pack(seats, at, done, *rest, S, 6), "must rise from 0 to at most total = 6"),
            (lambda: pack.pack(seats, at, done + 34, *rest, S, total), "reaches 42 tokens; a seat holds 40"),
            (lambda: pack.pack(seats + 7, at, done, *rest, S, total), "must lie between 0 and 6"),
        ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
