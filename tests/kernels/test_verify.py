"""Judged drafts keep the target's distribution exactly; kernel and definition agree; and wrong rules do not."""

from fractions import Fraction
from itertools import product

import kernel_checks as checks
import pytest
import torch
from kernel_checks import DEVICE, NAN, needs_kernel
from test_mutations import changed, load, source_of
from test_sample import INF, given, in_the_interpreter

from minserve.kernels import INTERPRETED, verify
from minserve.kernels.sample import ACCEPT, DRAFT, TARGET, sample_reference, uniform, weights_reference

P, Q = (
    [0.3, 0.5, 0.2],
    [0.6, 0.3, 0.1],
)  # worked by hand: 0 is kept half of the time, else 2/3 of 1 and 1/3 of 2


def judged(V, seed=0, **options):
    """(logits, chances, drafts, the rest): most drafts are drawn from their chances, one is not, one is none."""
    logits, *rest = given(V, seed=seed, **options)
    chances = given(V, seed=seed + 7, **options)[0]
    mixed = chances.clone()
    mixed[::2] = (logits[::2].float() + chances[::2].float() / 4).to(logits.dtype)  # some like the target's
    chances.copy_(mixed)
    drafts = sample_reference(chances, *rest, DRAFT)
    drafts[1], drafts[-1] = (drafts[1] + 1) % V, -1
    return logits, chances, drafts, *rest


def by_hand(logits, chances, drafts, *rest):
    """One row after the other, in fractions."""
    p, q = (weights_reference(x, *rest[:4]).tolist() for x in (logits, chances))
    u, accept = (uniform(*rest[4:], stream).tolist() for stream in (TARGET, ACCEPT))
    tokens = []
    for r, (x, greedy) in enumerate(zip(drafts.tolist(), (rest[0] < 1e-5).tolist())):
        p_r, q_r = ([Fraction(w, sum(row[r])) for w in row[r]] for row in (p, q))
        left = p_r
        if x >= 0 and q_r[x] and not greedy:
            if Fraction(accept[r]) * q_r[x] < p_r[x]:
                tokens.append(x)
                continue
            left = [max(a - b, Fraction(0)) for a, b in zip(p_r, q_r)]
        ticket = Fraction(u[r]) * sum(left)
        tokens.append(next(v for v in range(len(left)) if sum(left[: v + 1]) > ticket))
    return tokens


def agree(module, case):
    assert torch.equal(module.verify(*case), module.verify_reference(*case))


def rows_of(n, logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3):
    """n rows alike, at positions 0, 1, ..."""
    full = lambda x, dtype: torch.full((n,), x, dtype=dtype, device=DEVICE)
    cuts = (temperature, torch.float32), (top_k, torch.int64), (top_p, torch.float64), (min_p, torch.float64)
    rest = *(full(*cut) for cut in cuts), full(seed, torch.int64), torch.arange(n, device=DEVICE)
    return torch.tensor(logits, device=DEVICE).expand(n, -1), *rest


def logs(p):
    return torch.tensor(p).log().tolist()


# ---------------------------------------------------------------- verify
def check_every_number(module, n=60):
    """All drafts with their chances, all pairs of random numbers: a sum over them is the distribution itself."""
    grid = list(product(range(3), range(n), range(n)))
    x, i, j = (torch.tensor(column, device=DEVICE) for column in zip(*grid))
    numbers = {TARGET: (i + 0.5) / n, ACCEPT: (j + 0.5) / n}
    module.uniform = lambda seeds, positions, stream=TARGET: numbers[stream].double()
    logits, *rest = rows_of(len(grid), logs(P))
    got = module.verify_reference(logits, rows_of(len(grid), logs(Q))[0], x, *rest)
    module.uniform = uniform
    weight = torch.tensor(Q, dtype=torch.float64, device=DEVICE)[x] / n**2
    made = torch.zeros(3, dtype=torch.float64, device=DEVICE).index_add(0, got, weight)
    torch.testing.assert_close(made.cpu(), torch.tensor(P, dtype=torch.float64), rtol=0, atol=1e-7)
    kept = (got == x).double() @ weight
    assert abs(float(kept) - sum(map(min, P, Q))) < 1e-7, "a refused draft was drawn again"


def chi_square(tokens, p):
    seen = torch.bincount(tokens, minlength=len(p)).double().cpu()
    expected = p.double().cpu() * len(tokens)
    assert not seen[expected == 0].any(), "a token that p cuts off"
    return float(((seen - expected) ** 2 / expected)[expected > 0].sum())


CUTS = [
    dict(),
    dict(temperature=0.6),
    dict(top_k=4),
    dict(temperature=1.7, top_p=0.8),
    dict(top_p=0.9, min_p=0.15),
]


def check_distribution(module, n=8_000):
    """With the numbers of one request at n positions. 30: for 6 degrees of freedom one sample in 25,000 is above."""
    pairs = [  # p and q: unlike, equal, disjoint but for one token, one-hot q, one-hot p
        (checks.randn(7).tolist(), checks.randn(7, seed=1).tolist()),
        (checks.randn(7).tolist(), checks.randn(7).tolist()),
        ([0.0, 1.0, 0.5, -INF, -INF, -INF, -INF], [-INF, -INF, 0.0, 1.0, 2.0, 0.0, 0.0]),
        (checks.randn(7).tolist(), [-INF] * 3 + [0.0] + [-INF] * 3),
        ([-INF] * 3 + [0.0] + [-INF] * 3, checks.randn(7).tolist()),
    ]
    for (p, q), cuts in product(pairs, CUTS):
        logits, *rest = rows_of(n, p, **cuts)
        chances = rows_of(n, q)[0]
        drafts = sample_reference(chances, *rest, DRAFT)
        got = module.verify_reference(logits, chances, drafts, *rest)
        weights = weights_reference(logits[:1], *(x[:1] for x in rest[:4]))[0]
        assert chi_square(got, weights / weights.sum()) < 30, (p, q, cuts)
        if p == q:
            assert torch.equal(got, drafts), "p = q keeps every draft"


def check_greedy_and_none(module, run):
    logits, chances, drafts, *rest = judged(40)
    draw = sample_reference(logits, *rest)
    assert torch.equal(run(logits, chances, torch.full_like(drafts, -1), *rest), draw), (
        "no draft: a plain draw"
    )
    assert torch.equal(run(logits, chances * NAN, drafts, *rest), draw), "no q: a plain draw"
    x = logits.argmax(-1)
    never = chances.scatter(1, x[:, None], -INF)
    assert torch.equal(run(logits, never, x, *rest), draw), "q never drew it: a plain draw"
    cold = torch.zeros_like(rest[0]), *rest[1:]
    for one in (sample_reference(chances, *cold), x, drafts):
        assert torch.equal(run(logits, chances, one, *cold), sample_reference(logits, *cold))


def check_broken(module, run, V=20):
    logits, chances, drafts, *rest = judged(V)
    logits[0, 3] = logits[1, V - 1] = NAN
    logits[2], logits[3, 2] = -INF, INF
    got = run(logits, chances, drafts, *rest)
    assert (got[:4] == -1).all() and (got[4:] >= 0).all()


def test_every_number():
    check_every_number(verify)


def test_distribution():
    check_distribution(verify)


@pytest.mark.parametrize("V", [1, 2, 24, 65])
def test_by_hand(V):
    for seed in range(6):
        case = judged(V, seed)
        assert verify.verify_reference(*case).tolist() == by_hand(*case)


@pytest.mark.parametrize("run", [verify.verify, verify.verify_reference], ids=["launched", "defined"])
def test_greedy_none_and_broken(run):
    check_greedy_and_none(verify, run)
    check_broken(verify, run)


@needs_kernel
@pytest.mark.parametrize("V, seed", [(1, 0), (2, 1), (63, 2), (64, 3), (65, 4), (130, 5)])
def test_verify(V, seed, monkeypatch):
    monkeypatch.setattr(verify, "BLOCK", 64)  # rows of one tile and of several
    agree(verify, judged(V, seed, rows=8 if V < 64 else 4))


@needs_kernel
def test_worked():
    check_worked(verify)


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_more_rows(seed, monkeypatch):
    monkeypatch.setattr(verify, "BLOCK", 32)
    agree(verify, judged(100, seed, rows=16, rounding=[1e-3, 1.0][seed % 2]))


def test_rejections_say_what_to_change():
    logits, chances, drafts, *rest = judged(8)
    for wrong, message in [
        ((logits, chances[:3], drafts, *rest), r"chances \[3, 8\].*a row for each of the logits, \[8, 8\]"),
        ((logits, chances, drafts.int(), *rest), r"verify: drafts is \[8\] torch.int32"),
        ((logits, chances, drafts, rest[0].double(), *rest[1:]), "verify: temperature is"),
    ]:
        with pytest.raises(ValueError, match=message):
            verify.verify(*wrong)
    places, starts = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 3], dtype=torch.int32)
    for wrong, message in [
        ((places, places, places, starts, 2), r"walk: parents is \[3\] torch.int64 .* \[3\] torch.int32"),
        ((places, places[:2], places.int(), starts, 2), r"walk: ids is \[2\]"),
        ((places, places, places.int(), starts, 0), "walk: 0 places per path"),
        ((places, places, places.int(), starts, 2, places), "walk: accepted is .* torch.bool"),
    ]:
        with pytest.raises(ValueError, match=message):
            verify.walk(*wrong)


# ---------------------------------------------------------------- walk
def forest(sizes, seed=0, words=3):
    """Rows of random trees over a few token ids, so that siblings are often alike. One token is -1."""
    gen = torch.Generator().manual_seed(seed)
    parents = [p for n in sizes for p in [-1] * (n > 0) + [int(torch.randint(max(0, i - 4), i, (), generator=gen))
                                                            for i in range(1, n)]]  # fmt: skip
    T, starts = sum(sizes), [0, *torch.tensor(sizes).cumsum(0).tolist()]
    tokens, ids = (torch.randint(0, words, (T,), generator=gen) for _ in range(2))
    tokens[-2] = -1
    ids[-1] = -1  # not even such a token follows it
    whole = lambda x: torch.tensor(x, dtype=torch.int32, device=DEVICE)
    return tokens.to(DEVICE), ids.to(DEVICE), whole(parents), whole(starts)


def paths_by_hand(tokens, ids, parents, starts, most, accepted=None):
    """Every path there is, and of them the longest that ends first."""
    tokens, ids, parents, starts = (x.tolist() for x in (tokens, ids, parents, starts))
    right = lambda c, p: (
        tokens[p] >= 0 and (ids[c] == tokens[p] or accepted is not None and bool(accepted[c]))
    )
    rows = []
    for start, end in zip(starts, starts[1:]):
        paths = [[start]] if start < end else [[]]
        for path in paths:  # grows meanwhile
            if len(path) < most:
                after = [c for c in range(start + 1, end) if start + parents[c] == path[-1]]
                paths += [[*path, c] for c in after if right(c, path[-1])]
        path = min(paths, key=lambda path: (-len(path), path[-1:]))
        rows.append(path + [-1] * (most - len(path)))
    return rows


def check_walk(module, run):
    for sizes, most, seed in [
        ([4, 0, 1, 9], 9, 0),
        ([30, 64, 7], 12, 1),
        ([40, 63], 5, 2),
        ([3], 1, 3),
        ([2, 2], 2, 4),
    ]:
        for words in (1, 2, 3):
            case = forest(sizes, seed, words)
            assert run(*case, most).tolist() == paths_by_hand(*case, most)
            accepted = case[1] == 1  # typical acceptance of some
            assert run(*case, most, accepted).tolist() == paths_by_hand(*case, most, accepted)


def check_walk_by_example(module, run):
    whole = lambda x, dtype=torch.int64: torch.tensor([*x], dtype=dtype, device=DEVICE)
    starts = whole([0, 4], torch.int32)
    chain = whole([-1, 0, 1, 2], torch.int32)
    for tokens, path in [  # of a chain 5, 6, 7
        ([5, 6, 7, 8], [0, 1, 2, 3]),  # all kept: the token at 3 is the bonus
        ([5, 6, 9, 7], [0, 1, 2, -1]),
        ([9, 6, 7, 8], [0, -1, -1, -1]),  # the root's own draw refuses the first
        ([5, -1, 7, 8], [0, 1, -1, -1]),
    ]:
        assert run(whole(tokens), whole([5, 5, 6, 7]), chain, starts, 4).tolist() == [path]
    tree = whole([-1, 0, 0, 2], torch.int32)  # two candidates alike, the second goes on
    assert run(whole([5, 9, 6, 7]), whole([0, 5, 5, 6]), tree, starts, 3).tolist() == [[0, 2, 3]]
    assert run(whole([5, 9, 8, 7]), whole([0, 5, 5, 6]), tree, starts, 3).tolist() == [[0, 1, -1]]
    assert run(whole([4, 9, 6, 7]), whole([0, 5, 4, 6]), tree, starts, 3).tolist() == [[0, 2, 3]]
    same, far = whole([7] * 64), whole(range(-1, 63), torch.int32)  # as many places as a word has bits
    assert run(same, same, far, whole([0, 64], torch.int32), 64).tolist() == [[*range(64)]]
    none = whole([], torch.int64)
    assert run(none, none, none.int(), whole([0, 0], torch.int32), 2).tolist() == [[-1, -1]]
    assert run(none, none, none.int(), whole([0], torch.int32), 2).shape == (0, 2)


@pytest.mark.parametrize("run", [verify.walk, verify.walk_reference], ids=["launched", "defined"])
def test_walk(run):
    check_walk(verify, run)
    check_walk_by_example(verify, run)


# ---------------------------------------------------------------- wrong rules
def battery(module):
    """What the definitions must pass."""
    check_every_number(module)
    check_distribution(module, 4000)
    check_greedy_and_none(module, module.verify_reference)
    check_broken(module, module.verify_reference)
    check_walk(module, module.walk_reference)
    check_walk_by_example(module, module.walk_reference)


WRONG = [
    ("p and q swapped", "* q_x < p_x", "* p_x < q_x"),
    ("accepted if p is larger", "uniform(seeds, positions, ACCEPT) * q_x < p_x", "q_x <= p_x"),
    ("every draft kept", "* q_x < p_x", "* q_x < 2"),
    ("drawn from p again", "left = torch.where((judged & left.any(-1))[:, None], left, p)", "left = p"),
    ("what is left of q", "(shares[0] - shares[1])", "(shares[1] - shares[0])"),
    ("not the positive part", ".clamp(min=0)", ".abs()"),
    ("weights, not shares", "(shares[0] - shares[1])", "((p - q).double() / p.sum(-1, keepdim=True))"),
    ("too coarse", "LEFT = 2.0**52", "LEFT = 4.0"),
    ("one number for both", "uniform(seeds, positions, ACCEPT) * q_x", "uniform(seeds, positions) * q_x"),
    ("q without the cuts", "for x in (logits, chances))  # [R, V]",
     "for x, cuts in ((logits, cuts), (chances, (temperature, top_k * 0, top_p * 0 + 1, min_p * 0))))"),
    ("p without the cuts", "for x in (logits, chances))  # [R, V]",
     "for x, cuts in ((logits, (temperature, top_k * 0, top_p * 0 + 1, min_p * 0)), (chances, cuts)))"),
    ("no draft is token 0", "judged = (x[:, 0] == drafts) & ", "judged = "),
    ("chances that are none", " & chances.float().amax(-1).isfinite()", " | chances.isnan().any(-1)"),
    ("a draft that q has not", " & (q_x > 0)", ""),
    ("NaN passes", "torch.where(logits.float().amax(-1).isfinite(), token, -1)", "token"),
    ("the first child", "if anyway[c] or carried[c] == drawn[path[-1]]:", "if path[-1] == start + before[c]:"),
    ("the root's draw ignored", "carried[c] == drawn[path[-1]]", "carried[c] == drawn[path[-1]] or len(path) == 1"),
    ("the child's own draw", "carried[c] == drawn[path[-1]]", "carried[c] == drawn[c]"),
    ("a broken place goes on", " and drawn[path[-1]] >= 0", ""),
    ("parents of the whole batch", "reached.get(start + before[c])", "reached.get(before[c])"),
    ("no bonus", "path = max(reached.values(), key=len, default=[])",
     "path = max(reached.values(), key=len, default=[])[:most - 1]"),
    ("the last of equals", "max(reached.values()", "max(reversed(reached.values())"),
    ("the first path", "max(reached.values(), key=len, default=[])", "[*reached.values(), []][0]"),
    ("accepted means nothing", "anyway[c] or ", ""),
]  # fmt: skip


@pytest.mark.slow
def test_the_right_rule_passes(tmp_path):
    battery(load("verify", source_of("verify"), tmp_path))


@pytest.mark.skipif(INTERPRETED, reason="the rules are the same without an interpreter")
@pytest.mark.slow
@pytest.mark.parametrize("what, right, wrong", WRONG, ids=[w[0] for w in WRONG])
def test_the_wrong_rule_is_rejected(what, right, wrong, tmp_path):
    with pytest.raises(AssertionError):
        battery(load("verify", changed("verify", right, wrong), tmp_path))


# ---------------------------------------------------------------- wrong kernels
def check_worked(module, n=48):
    """The example of three tokens at n positions: about a third of the drafts are not kept."""
    (logits, *rest), chances = rows_of(n, logs(P)), rows_of(n, logs(Q))[0]
    agree(module, (logits, chances, sample_reference(chances, *rest, DRAFT), *rest))


def check_edges(module, n=8):
    """Cuts among equals that lie in several tiles of 16, better ones behind them; chances above all of the target's."""
    step, flat = [0.0] * 32 + [1.0] * 8, [0.0] * 40
    rising = [i / 40 for i in range(40)]
    for p, q in ((step, rising), (step, flat), (flat, step), (rising, [9.0 - x for x in rising])):
        logits, *rest = rows_of(n, p, top_k=20, top_p=0.9)
        logits, chances = logits.contiguous(), rows_of(n, q)[0].contiguous()
        agree(module, (logits, chances, sample_reference(chances, *rest, DRAFT), *rest))


def kernel_battery(module):
    module.BLOCK = 16
    check_worked(module)
    check_greedy_and_none(module, module.verify)
    check_broken(module, module.verify)
    check_walk_by_example(module, module.walk)
    check_walk(module, module.walk)
    for seed in range(4):
        agree(module, judged(24, seed, rounding=0.5 if seed % 2 else 1e-4))
    check_edges(module)


MUTATIONS = [
    ("p and q swapped", "(u * q < p)", "(u * p < q)"),
    ("a draft that q has not", "if (q_x > 0) & (u * q < p):", "if u * q < p:"),
    ("what is left of q", "tl.maximum(more, 0.0)", "tl.maximum(-more, 0.0)"),
    ("not the positive part", "tl.maximum(more, 0.0)", "tl.abs(more)"),
    ("one number for both", "positions_ptr, r, ACCEPT)", "positions_ptr, r, 0)"),
    ("the draw's number is the test's", "positions_ptr, r, 0)", "positions_ptr, r, ACCEPT)"),
    ("drawn from p again", "judged = (q_x > 0) & (rest > 0)", "judged = q_x < 0"),
    ("the target's cuts for q", "_cuts(q_ptr, q_best, cool, top_k, top_p,", "_cuts(row_ptr, best, cool, top_k, top_p,"),
    ("q after the target's best", "q_best, _, q_broken", "_, _, q_broken"),
    ("ties of q counted afresh", "q_left -= q_on_edge\n                token", "q_left -= 0\n                token"),
    ("ties of p counted afresh", "left -= on_edge\n                if judged", "left -= 0\n                if judged"),
    ("tiles not added up", "axis=0) + passed <= target", "axis=0) <= target"),
    ("a draft of another tile", "own = start + tl.arange", "own = tl.arange"),
    ("rows taken for contiguous", "chances_ptr + r * chances_stride", "chances_ptr + r * V"),
    ("NaN passes", "    if broken:", "    if V < 0:"),
    ("walk: the first of the row", "ids_ptr + start + c", "ids_ptr + start + parent"),
    ("walk: accepted means nothing", "follows | (tl.load(accepted_ptr", "follows & (tl.load(accepted_ptr"),
    ("walk: a broken place goes on", "follows = follows & (drawn >= 0) & child", "follows = follows & child"),
    ("walk: the last of equals", "end = tl.min(tl.where(reached, c, BLOCK), axis=0)",
     "end = tl.max(tl.where(reached, c, 0), axis=0)"),
    ("walk: one level too few", "range(1, most)", "range(1, most - 1)"),
    ("walk: 32 places", "tl.int64) << c.to(tl.int64)", "tl.int64) << (c % 32).to(tl.int64)"),
    ("walk: the first row", "starts_ptr + b)\n", "starts_ptr)\n"),
]  # fmt: skip


@in_the_interpreter
@pytest.mark.slow
def test_the_right_kernel_passes(tmp_path):
    kernel_battery(load("verify", source_of("verify"), tmp_path))


@in_the_interpreter
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("what, right, wrong", MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_the_wrong_kernel_is_rejected(what, right, wrong, tmp_path):
    with pytest.raises(AssertionError):
        kernel_battery(load("verify", changed("verify", right, wrong), tmp_path))
