"""The parts of speculation, one by one: what n-grams propose, how many drafts pay, who is kept."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from speculation_world import tree_of

from minserve.batch import branches
from minserve.pace import Pace
from minserve.request import Draft, Request, SamplingParams
from minserve.speculation import NGram, Places, Speculation, depths


def request(tokens, id=0, new=100) -> Request:
    return Request(id, list(tokens), SamplingParams(), new, 0, frozenset())


def sequel(tokens, n, **options):
    draft = NGram(**options).sequel(request(tokens), n)
    return draft and draft.tokens


# ---------------------------------------------------------------- n-grams
@pytest.mark.parametrize(
    "tokens, n, expected",
    [
        ([1, 2, 3], 4, None),  # nothing comes twice
        ([5, 5, 5, 5], 2, [5, 5]),
        ([5, 5], 3, None),  # the only pair is the last one: it is not its own past
        ([1, 2, 9, 1, 2], 1, [9]),
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, [9]),  # of equally long matches the latest
        ([0, 1, 2, 8, 1, 2, 9, 0, 1, 2], 1, [8]),  # a longer match before a later one
        ([1, 2, 3, 1, 2], 7, [3, 1, 2, 3, 1, 2, 3]),  # on and on, as the period goes
        ([7], 3, None),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 2, [5, 6]),
    ],
)
def test_what_followed_the_last_time(tokens, n, expected):
    assert sequel(tokens, n, k=8, longest=4, shortest=2) == expected


def by_hand(tokens, n, longest, shortest):
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if length < len(tokens) and tokens[end - length : end] == tokens[-length:]:
                period = tokens[end:]
                return [period[i % len(period)] for i in range(n)]
    return None


@pytest.mark.parametrize("longest, shortest", [(4, 2), (3, 1), (1, 1), (2, 2)])
def test_a_growing_text_is_looked_up_like_a_whole_one(longest, shortest):
    """The index grows with the text, by any number of tokens at a time, and finds what a search through all finds."""
    rng, found = random.Random(longest * 10 + shortest), 0
    for _ in range(40):
        its, drafter = request([rng.randrange(3)]), NGram(15, longest, shortest)
        while len(its.tokens) < 40:
            n = rng.randint(1, 15)
            draft = drafter.sequel(its, n)
            assert (draft and draft.tokens) == by_hand(its.tokens, n, longest, shortest)
            found += draft is not None
            its.tokens += [rng.randrange(3) for _ in range(rng.randint(1, 5))]
    assert found > 100


def test_a_token_costs_the_same_however_long_the_text_is():
    """Each token is entered once, under `longest` keys at most."""
    its, drafter = request([1]), NGram(4, 4, 2)
    drafter.sequel(its, 4)
    sizes = []
    for i in range(300):
        its.tokens.append(i % 50)
        before = its.memo[1]
        drafter.sequel(its, 4)
        assert its.memo[1] == before + 1
        sizes.append(len(its.memo[0]))
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= 3 and sizes[-1] == sizes[-100]


def test_only_who_may_draft_is_looked_up():
    asked, other = request([5, 5, 5]), request([6, 6, 6])
    asked.granted = 2
    assert NGram(4, 2, 1).propose([(other, 1), (asked, 3)]) == [None, Draft([5, 5])]


@pytest.mark.parametrize("options", [dict(k=0), dict(k=16), dict(longest=2, shortest=3), dict(shortest=0)])
def test_n_grams_that_cannot_be(options):
    with pytest.raises(ValueError, match="k in 1 .. 15"):
        NGram(**options)


# ---------------------------------------------------------------- drafts and trees
def test_a_draft_that_is_cut_is_still_a_draft():
    chances = torch.arange(3)[:, None]
    its = Draft([4, 5, 6], [-1, 0, 0], chances)
    assert its.cut(3) is its and its.cut(9) is its and its.cut(0) is None and Draft([]).cut(3) is None
    cut = its.cut(2)
    assert (cut.tokens, cut.parents, cut.chances.tolist()) == ([4, 5], [-1, 0], [[0], [1]])
    assert Draft([4, 5], None).cut(1) == Draft([4], None)


def random_parents(rng, n):
    return [rng.randrange(-1, i) for i in range(n)]


def test_each_node_of_a_tree_sees_its_ancestors_and_all_of_the_past():
    rng = random.Random(0)
    for n in [1, 2, 3, 8, 62] * 5:
        parents = random_parents(rng, n)
        deep, bits = branches(parents)
        assert len(bits) == n + 1 and bits[0] == -1 and deep[0] == 0
        assert deep[1:] == depths(parents)
        for i in range(1, n + 1):
            ancestors, at = {0}, i
            while at:
                ancestors.add(at)
                at = parents[at - 1] + 1
            assert deep[i] == len(ancestors) - 1
            seen = {i - m for m in range(63) if bits[i] >> m & 1}
            assert seen == {place for place in range(i - 62, i + 1) if place < 0 or place in ancestors}
            assert -(2**63) <= bits[i] < 2**63


def test_a_chain_needs_no_bits():
    assert branches([-1, 0, 1, 2]) == ([0, 1, 2, 3, 4], [-1] * 5)


# ---------------------------------------------------------------- places
def batch_of(*drafts):
    requests = [request([1, 2], i) for i in range(len(drafts))]
    for its, draft in zip(requests, drafts):
        its.draft = draft
    return SimpleNamespace(plan=[(r, 1) for r in requests], paid=list(range(len(requests))))


def test_each_place_knows_the_drafts_before_it():
    q = torch.arange(2.0)[:, None]
    places = Places(batch_of(None, Draft([7, 8, 9], [-1, -1, 1]), Draft([5, 6], None, q)))
    assert places.starts == [0, 1, 5, 8] and places.ids == [-1, -1, 7, 8, 9, -1, 5, 6]
    assert places.parents == [-1, -1, 0, 0, 2, -1, 0, 1] and places.first == [0, 1, 1, 1, 1, 5, 5, 5]
    assert [r.id for r in places.owner] == [0, 1, 1, 1, 1, 2, 2, 2]
    assert places.drafts.before == [[], [], [7], [8], [8, 9], [], [5], [5, 6]]
    judged = {place: (token, row.tolist()) for place, (token, row) in places.drafts.chances.items()}
    assert judged == {5: (5, [0.0]), 6: (6, [1.0])}  # a draft is judged where its parent's logits are
    assert Places(batch_of(None, None)).drafts is None


def followed(draft, drawn):
    return Places(batch_of(draft)).walk(torch.tensor(drawn), None)[0]


def test_the_walk_goes_on_while_the_draft_holds_what_was_drawn():
    chain = Draft([7, 8, 9])
    assert followed(chain, [7, 8, 9, 4]) == [0, 1, 2, 3]
    assert followed(chain, [7, 8, 1, 4]) == [0, 1, 2]
    assert followed(chain, [7, 1, 9, 4]) == [0, 1]  # what would be right behind a wrong one is not
    assert followed(chain, [1, 8, 9, 4]) == [0]
    tree = tree_of([7, 8], [7, 9, 5], [6])  # places 1: 7, 2: 8, 3: 9, 4: 5, 5: 6
    assert followed(tree, [7, 9, 0, 5, 1, 0]) == [0, 1, 3, 4]
    assert followed(tree, [6, 9, 0, 5, 1, 0]) == [0, 5]
    assert followed(tree, [7, -1, 0, 5, 1, 0]) == [0, 1]  # no token: nobody goes on from there


# ---------------------------------------------------------------- how many
def brute_force(pace, requests, limits):
    """The best number of drafts in all, by trying every way to give each request some."""
    best = -1.0, None
    for ks in itertools.product(*(range(n + 1) for n in limits)):
        kept = sum(pace.chance(r) ** i for r, k in zip(requests, ks) for i in range(1, k + 1))
        seconds = float(pace.seconds(np.array([len(ks) + sum(ks)]))[0]) + pace.draft * max(ks)
        rate = (len(ks) + kept) / seconds
        if rate > best[0] * (1 + 1e-9):
            best = rate, ks
    return best


def rate_of(pace, requests, ks):
    kept = sum(pace.chance(r) ** i for r, k in zip(requests, ks) for i in range(1, k + 1))
    seconds = float(pace.seconds(np.array([len(ks) + sum(ks)]))[0]) + pace.draft * max(ks)
    return (len(ks) + kept) / seconds


def known(pace, request, kept, tried):
    pace.right[request.id] = kept, tried


COSTS = {
    "flat": lambda n: 1.0,
    "bandwidth, then work": lambda n: max(1.0, 0.12 * n),
    "all work": lambda n: 1.0 * n,
    "a little for each": lambda n: 1.0 + 0.1 * n,
    "stairs": lambda n: 1.0 + (n > 4) + (n > 8),
}


@pytest.mark.parametrize("cost", COSTS)
def test_the_number_of_drafts_is_the_one_that_makes_most_tokens_per_second(cost):
    rng = random.Random(1)
    for _ in range(30):
        pace, B = Pace(), rng.randint(1, 3)
        pace.draft = rng.choice([0.0, 0.02, 0.3]) if B == 1 else 0.0
        pace.step = {n: COSTS[cost](n) for n in range(1, 20)}
        requests = [request([1], i) for i in range(B)]
        for its in requests:
            known(pace, its, tried := rng.randint(0, 30), tried) if rng.random() < 0.2 else known(
                pace, its, rng.uniform(0, 20), 20
            )
        limits = [rng.randint(0, 5) for _ in range(B)]
        chosen = pace.choose(requests, limits)
        assert all(0 <= k <= n for k, n in zip(chosen, limits))
        best, ks = brute_force(pace, requests, limits)
        assert rate_of(pace, requests, chosen) == pytest.approx(best), (chosen, ks)


def test_by_hand():
    """a = 1/2, a step of n tokens costs 1 + n / 10: (1 + 1/2 + 1/4) / 1.3 = 1.35 is more than 1.25 and 1.34."""
    pace, its = Pace(expected=0.5), request([1])
    pace.step = {n: 1 + n / 10 for n in range(1, 9)}
    assert pace.choose([its], [6]) == [2]
    pace.draft = 0.2  # 1.5 / 1.4 = 1.07 and 1.75 / 1.7 = 1.03: at 1 / 1.1 = 0.91, one is best
    assert pace.choose([its], [6]) == [1]


def test_a_busy_batch_drafts_nothing():
    pace = Pace()
    pace.step = {n: 1.0 * n for n in range(1, 200)}
    assert pace.choose([request([1], i) for i in range(16)], [8] * 16) == [0] * 16


def test_the_likeliest_draft_most():
    pace, (sure, unsure) = Pace(), (request([1], 0), request([1], 1))
    known(pace, sure, 19, 20), known(pace, unsure, 1, 20)
    pace.step = {n: 1 + n / 10 for n in range(1, 20)}
    many, few = pace.choose([sure, unsure], [8, 8])
    assert many > 4 > few


def test_a_hiccup_is_forgotten():
    pace = Pace()
    pace.timed(5, 0.01), pace.timed(5, 1.0)
    assert 0.01 < pace.step[5] < 0.25  # up slowly
    pace.timed(5, 0.01)
    assert pace.step[5] == 0.01  # down at once


def test_the_step_without_drafts_is_measured_first():
    pace = Pace()
    pace.timed(20, 0.01)  # four requests with their drafts
    assert pace.choose([request([1], i) for i in range(4)], [4] * 4) == [0] * 4


def test_a_size_that_nobody_measured_is_tried_once():
    """It is thought to cost what the next smaller one does; afterwards it is known what it costs."""
    pace, its, tried = Pace(), request([1]), []
    pace.timed(1, 1.0)
    for _ in range(12):
        k = pace.choose([its], [6])[0]
        tried.append(k)
        pace.timed(1 + k, 1.0 * (1 + k))  # drafts do not pay here
    assert tried[0] == 6 and tried.count(6) == 1
    assert set(tried[-6:]) == {0}


def test_what_is_known_is_looked_at_again():
    pace, its = Pace(), request([1])
    pace.step = {n: 1.0 * n for n in range(1, 20)}
    tried = [pace.choose([its], [4])[0] for _ in range(2 * Pace.LOOK_AGAIN)]
    assert [i + 1 for i, k in enumerate(tried) if k] == [Pace.LOOK_AGAIN, 2 * Pace.LOOK_AGAIN]


def test_recent_drafts_count_more():
    pace, its = Pace(), request([1])
    assert pace.chance(its) == pytest.approx(0.7)
    for _ in range(30):
        pace.learn(its, 4, 4)
    assert pace.chance(its) > 0.95
    for _ in range(30):
        pace.learn(its, 1, 0)
    assert pace.chance(its) < 0.25


def test_a_new_request_is_thought_to_be_like_the_others():
    pace = Pace()
    for i in range(5):
        for _ in range(10):
            pace.learn(request([1], i), 1, 0)
    assert pace.chance(request([1], 9)) < 0.2
    pace.learn(request([1], 9), 8, 8)
    assert pace.chance(request([1], 9)) > 0.8  # its own drafts say more
    assert pace.chance(request([1], 10)) < 0.4  # and one alone does not speak for all


def test_a_tree_is_cut_where_its_gains_no_longer_pay():
    """Each node by the share of steps that keep it elsewhere, scaled by how this request does."""
    pace, its = Pace(expected=1.0), request([1])
    pace.step = {n: 1 + n / 10 for n in range(1, 9)}
    gains = [0.5, 0.3, 0.25, 0.02, 0.01]
    rates = [(1 + sum(gains[:k])) / (1 + (k + 1) / 10) for k in range(6)]
    assert pace.choose([its], [5], gains) == [int(np.argmax(rates))] == [3]


# ---------------------------------------------------------------- limits
def limit(tokens, computed, *, most=100, k=8, page_size=16, whole=False):
    its = request(tokens, new=most - len(tokens))
    its.computed = computed
    pages = SimpleNamespace(page_size=page_size, shared=page_size if whole else 1)
    spec = SimpleNamespace(drafter=SimpleNamespace(k=k), engine=SimpleNamespace(pages=pages))
    return Speculation.limit(spec, its)


def test_no_more_than_can_be_kept():
    """The token drawn at the draft's end comes on top: with 3 to go, 2 drafts."""
    text = range(10)
    assert limit(text, 9) == 8 and limit(text, 9, most=13) == 2
    assert limit(text, 9, most=11) == limit(text, 9, most=10) == 0


def test_no_draft_fills_a_page_that_cannot_be_opened_again():
    """A page of 16: of a request with c computed, c + 1 + drafts stay below its end."""
    for c in range(40):
        n = limit(range(c + 1), c, k=15, whole=True)
        assert n == max(0, 14 - c % 16) and (n == 0 or c % 16 + 1 + n < 16)
    assert limit(range(4), 3, page_size=4, whole=True) == 0
