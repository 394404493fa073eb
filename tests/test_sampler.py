"""A batch draws for each row what the row alone draws: any parameters, any neighbours, any seat, any moment."""

import importlib.util
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve import sampler as ours
from minserve.request import SamplingParams
from minserve.sampler import Sampler, TokenLogprobs, logprobs_of
from minserve.sampling import sample

V = 53


class Row:
    """One request, drawn for by the definition."""

    def __init__(self, params, seed, prompt=(), outputs=(), stop_ids=(2, 5)):
        self.params, self.seed, self.stop_ids = params, seed, stop_ids
        self.prompt, self.outputs = list(prompt), list(outputs)

    def sit(self, sampler, seat):
        sampler.put(seat, self.params, self.seed, self.prompt, self.outputs, self.stop_ids)

    def draw(self, logits):
        position = len(self.outputs)
        self.outputs.append(
            sample(logits, self.params, self.seed, position, self.prompt, self.outputs, self.stop_ids)
        )
        return self.outputs[-1]


def step(sampler, logits, seats, rows):
    """One batch, compared with every row alone."""
    positions = [len(row.outputs) for row in rows]
    got = sampler(logits, torch.tensor(seats), positions)
    assert not got.bad.any()
    assert got.tokens.tolist() == [row.draw(x) for row, x in zip(rows, logits)]
    return got


# ---------------------------------------------------------------- random rows
IDS = st.integers(0, V - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1e-6, 0.02, 0.7, 1.0, 5.0, 1e300]),
    top_k=st.sampled_from([0, -1, 1, 2, 7, V - 1, V, V + 1, 10**30]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.5, 0.75, 0.95, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    logit_bias=st.one_of(
        st.just({}), st.dictionaries(IDS, st.sampled_from([-100, -1.5, 3, 100]), max_size=4)
    ),
    min_tokens=st.sampled_from([0, 0, 1, 3]),
    stop_token_ids=st.lists(IDS, max_size=3),
)
ROWS = st.builds(
    Row, PARAMS, st.integers(-(2**70), 2**70), st.lists(IDS, max_size=6), st.lists(IDS, max_size=4)
)
ROUNDING = st.sampled_from([0.01, 0.5, 1.0, 4.0])  # coarse logits tie


def logits_of(rows, seed, rounding, dtype=torch.float32):
    x = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3
    return ((x / rounding).round() * rounding).to(dtype)


def check_mixed_batches(module, rows, seed, rounding, dtype=torch.float32, group=None):
    """Three steps with other neighbours and other seats, an interruption between them, and NaN nobody asked for."""
    rng, sampler = random.Random(seed), module.Sampler(len(rows) + 2, V)
    if group:
        module.GROUP = group
    seats = rng.sample(range(len(rows) + 2), len(rows))
    for row, seat in zip(rows, seats):
        Row(SamplingParams(frequency_penalty=2, logit_bias={1: 9, 2: 9}, min_tokens=9), 0, [3], [4]).sit(
            sampler, seat
        )  # an earlier guest, of whom nothing may stay
        row.sit(sampler, seat)
    for now in range(3):
        who = rng.sample(range(len(rows)), rng.randint(1, len(rows)))
        step(
            sampler,
            logits_of(len(who), seed + now, rounding, dtype),
            [seats[i] for i in who],
            [rows[i] for i in who],
        )
        again = rng.randrange(len(rows))
        rows[again].sit(sampler, seats[again])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(ROWS, min_size=1, max_size=7),
    st.integers(0, 2**30),
    ROUNDING,
    st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_batch_equals_its_rows(rows, seed, rounding, dtype):
    check_mixed_batches(ours, rows, seed, rounding, dtype)


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_groups_of_any_size_give_the_same(rows, monkeypatch):
    monkeypatch.setattr(ours, "GROUP", ours.GROUP)
    params = [SamplingParams(temperature=t, top_p=0.8, seed=1) for t in (0.5, 1.0, 2.0)]
    check_mixed_batches(ours, [Row(params[i % 3], i) for i in range(9)], 5, 0.5, group=rows * V)


def test_top_k_of_any_size_beside_greedy():
    """Rows that store 0, -1 or too many as top_k share a batch with those that mean it."""
    sampler = Sampler(7, V)
    params = [
        SamplingParams(),
        *(SamplingParams(temperature=1.0, top_k=k) for k in (5, V, V + 1, -1, 0, 9_999_999)),
    ]
    rows = [Row(p, i) for i, p in enumerate(params)]
    for seat, row in enumerate(rows):
        row.sit(sampler, seat)
    for now in range(20):
        step(sampler, logits_of(7, now, 0.01), list(range(7)), rows)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**30), st.sampled_from([0.1, 2.0, 6.0]))
def test_a_real_vocabulary_too(seed, spread):
    """The radix select against the sort, at a size where sums of floats would part."""
    n = 49_152
    logits = torch.randn(5, n, generator=torch.Generator().manual_seed(seed)) * spread
    sampler, cuts = Sampler(5, n), [dict(), dict(top_p=0.95), dict(top_k=50), dict(top_k=3000, top_p=0.5)]
    rows = [
        Row(SamplingParams(temperature=0.8, **cut), seed + i)
        for i, cut in enumerate([*cuts, dict(min_p=0.1)])
    ]
    for seat, row in enumerate(rows):
        row.sit(sampler, seat)
    step(sampler, logits, [0, 1, 2, 3, 4], rows)


# ---------------------------------------------------------------- the road does not matter
def test_positions_and_seats_come_in_any_form():
    sampler = Sampler(4, V)
    for seat in range(4):
        sampler.put(seat, SamplingParams(temperature=1.0), seat, [], [], [])
    logits = logits_of(3, 0, 0.01)
    first = sampler(logits, torch.tensor([3, 0, 2]), [5, 6, 7]).tokens.tolist()
    for seats, positions in (
        ([3, 0, 2], np.array([5, 6, 7])),
        (np.array([3, 0, 2]), torch.tensor([5, 6, 7])),
        (torch.tensor([3, 0, 2], dtype=torch.int32), (5, 6, 7)),
    ):
        assert sampler(logits, seats, positions).tokens.tolist() == first
    assert sampler(logits[:0], [], []).tokens.tolist() == []


def test_draws_depend_on_seed_and_position_only():
    """The same row in every seat, with every neighbour, alone: one token."""
    sampler, row = Sampler(8, V), logits_of(1, 3, 0.01)
    params, drawn = SamplingParams(temperature=1.5, top_p=0.9), set()
    for seat in range(8):
        for other in range(8):
            sampler.put(other, SamplingParams(temperature=0.3 * other), other, [], [], [])
        sampler.put(seat, params, 77, [], [], [])
        logits = torch.cat([logits_of(seat, seat, 0.01), row])
        drawn.add(
            sampler(logits, [*(s for s in range(8) if s != seat)][:seat] + [seat], [4] * (seat + 1))
            .tokens[-1]
            .item()
        )
    assert drawn == {sample(row[0], params, 77, 4)}


# ---------------------------------------------------------------- broken rows
NAN, INF = float("nan"), float("inf")


def check_broken_rows(module):
    every = [
        dict(),
        dict(temperature=1.0),
        dict(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1),
        dict(frequency_penalty=1.0),
        dict(logprobs=2),
    ]
    for broken in (NAN, INF, -INF):
        sampler, rows = module.Sampler(10, V), [Row(SamplingParams(**e), i) for i, e in enumerate(every * 2)]
        for seat, row in enumerate(rows):
            row.sit(sampler, seat)
        logits = logits_of(10, 1, 0.01)
        logits[::2, slice(None) if broken == -INF else 7] = broken  # every kind of row, with sound neighbours
        got = sampler(logits, range(10), [0] * 10)
        assert got.bad.tolist() == [True, False] * 5
        assert got.tokens[::2].tolist() == [-1] * 5
        assert got.tokens[1::2].tolist() == [row.draw(x) for row, x in zip(rows[1::2], logits[1::2])]
        assert [i for i, its in enumerate(got.logprobs) if its] == [9]
        for row, x in zip(rows[::2], logits[::2]):
            with pytest.raises(ValueError, match="hold NaN"):
                row.draw(x)
        logits = logits_of(10, 2, 0.01)
        logits[:, 0] = logits.amax(-1) + 0.5  # a bad draw counts for nothing, not even for token 0
        step(sampler, logits, range(10), rows)
        only = sampler(torch.full((1, V), NAN), [1], [1])
        assert only.tokens.tolist() == [-1] and only.bad.tolist() == [True]


def test_a_broken_row_is_reported_and_touches_nobody():
    check_broken_rows(ours)


# ---------------------------------------------------------------- exact edges
def check_edges(module):
    """Equal weights: every sum, every cut, every ticket lies exactly on a boundary."""
    rows = [dict(), *(dict(top_k=k) for k in (1, V - 2, V - 1)), *(dict(top_p=p) for p in (0.25, 0.5, 0.75))]
    rows = [
        Row(SamplingParams(temperature=1.0, **r), i) for i, r in enumerate([*rows, dict(top_k=8, top_p=0.5)])
    ]
    sampler = module.Sampler(len(rows), V)
    for seat, row in enumerate(rows):
        row.sit(sampler, seat)
    for now in range(60):
        logits = torch.zeros(len(rows), V)
        logits[4:, now % 20 : now % 20 + V - 16] = -torch.inf  # 16 are left
        step(sampler, logits, range(len(rows)), rows)
    x = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf, 0.0, 0.0, -torch.inf])
    for u, winner in (0.0, 1), (0.25, 2), (0.4999, 2), (0.5, 4), (0.75, 5), (1 - 2**-53, 5):
        cuts = (torch.tensor([n]) for n in (1.0, 0, 1.0, 0.0))
        assert module.draw(x[None].clone(), *cuts, torch.tensor([u], dtype=torch.float64)).tolist() == [
            winner
        ]


def test_exact_edges():
    check_edges(ours)


# ---------------------------------------------------------------- stop ids and logprobs
def check_stop_ids(module):
    sampler, logits = module.Sampler(2, V), torch.zeros(2, V)
    logits[:, 5], logits[:, 9] = 50.0, 49.0
    sampler.put(0, SamplingParams(min_tokens=3), 0, [], [], [5])
    sampler.put(1, SamplingParams(min_tokens=3, temperature=0.1, stop_token_ids=[9]), 0, [], [], [5])
    made = [sampler(logits, [0, 1], [i, i]).tokens.tolist() for i in range(4)]
    assert [a for a, _ in made] == [9, 9, 9, 5] and made[3][1] == 5
    assert all(b not in (5, 9) for _, b in made[:3])


def test_stop_ids_cannot_be_drawn_before_min_tokens():
    check_stop_ids(ours)


def check_logprobs(module):
    sampler = module.Sampler(5, V)
    logits = logits_of(5, 4, 0.01)
    asked = [None, 0, 3, 20, 2]
    heat = dict(temperature=5.0, presence_penalty=2.0, logit_bias={8: -100})  # the model's own opinion stays
    for seat, n in enumerate(asked):
        sampler.put(seat, SamplingParams(logprobs=n, **(heat if seat else {})), seat, [], [1, 2], [])
    got = sampler(logits, range(5), [2] * 5)
    assert got.logprobs[0] is None
    for row in range(1, 5):
        found, truth = got.logprobs[row], logits[row].double().log_softmax(-1)
        assert found.token == got.tokens[row] and found.logprob == pytest.approx(
            float(truth[found.token]), abs=1e-5
        )
        ids, values = zip(*found.top)
        likeliest = truth.argsort(descending=True, stable=True)[: asked[row]].tolist()
        late = [] if found.token in likeliest else [found.token]  # always listed, once, at its place or last
        assert list(ids) == likeliest + late
        assert values == pytest.approx([float(truth[i]) for i in ids], abs=1e-5)
    quiet = module.Sampler(1, V)
    quiet.put(0, SamplingParams(temperature=1.0), 0, [], [], [])
    assert quiet(logits[:1], [0], [0]).logprobs is None


def test_logprobs_are_the_models_own():
    check_logprobs(ours)


def test_logprobs_sum_to_one_and_are_numbers_that_json_knows():
    found = logprobs_of(torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0]).log(), 3, 5)
    assert sum(np.exp(value) for _, value in found.top) == pytest.approx(1.0)
    assert [i for i, _ in found.top] == [0, 1, 2, 3, 4], "of equal ones the lowest id comes first"
    assert found.top[-1] == (4, -9999.0)
    assert logprobs_of(torch.zeros(4), 2, 0) == TokenLogprobs(
        2, pytest.approx(-np.log(4)), ((2, pytest.approx(-np.log(4))),)
    )


# ---------------------------------------------------------------- cost
def calls(sampler, rows):
    """How many Python functions run for a step of so many rows."""
    logits, count = logits_of(rows, 0, 0.01), 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sampler(logits, range(rows), [3] * rows)
    sys.setprofile(profile)
    sampler(logits, range(rows), [3] * rows)
    sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "params",
    [
        dict(),
        dict(temperature=0.8, top_p=0.95),
        dict(temperature=0.8, top_k=9, min_p=0.1, frequency_penalty=0.1, logit_bias={3: 1}, min_tokens=9),
    ],
)
def test_python_does_not_loop_over_rows(params):
    sampler = Sampler(256, V)
    for seat in range(256):
        sampler.put(seat, SamplingParams(**params), seat, [1, 2], [], [5])
    assert calls(sampler, 256) == calls(sampler, 4)
    if not params:
        assert calls(sampler, 256) < 80


# ---------------------------------------------------------------- these tests can fail
BUGS = [
    ("presence for the prompt too", "made = times > 0", "made = (times > 0) | self.prompted[where]"),
    ("repetition for the answer only", "seen = made | self.prompted[where]", "seen = made"),
    ("repetition multiplies what is positive", "x / repetition, x * repetition", "x * repetition, x / repetition"),
    ("frequency as presence", "frequency * times, x)", "frequency * made, x)"),
    ("the last guest's prompt stays", "self.prompted[seat] = False", "pass"),
    ("the answer before an interruption is forgotten", "torch.bincount(ids(outputs)", "torch.bincount(ids([])"),
    ("counts do not move on", "(made >= 0).int()", "(made >= 0).int() * 0"),
    ("a broken row counts", "(made >= 0).int()", "(made >= -1).int()"),
    ("the row in the batch for its seat", "where = self._send(seats[penalised]), made",
     "where = self._send(penalised), made"),
    ("bias after penalties", "self._adjust(x, seats[rows], asks[rows], drafts",
     "[self._adjust(x, seats[rows], asks[rows] & m) for m in (np.uint8(~BIAS & 31), np.uint8(BIAS))] and (drafts"),
    ("bias twice", "x[where, ids] + values", "x[where, ids] + 2 * values"),
    ("stop ids allowed one token early", "positions < self.min_tokens", "positions + 1 < self.min_tokens"),
    ("the last guest's bias stays", "BIAS: params.logit_bias,", "BIAS: True,"),
    ("temperature forgotten", "(d / -temperature.clamp(COOLEST, HOTTEST)[:, None])", "(-d)"),
    ("top_k counts the vocabulary's end as no limit too early", "(top_k < V)", "(top_k < V - 1)"),
    ("top-k keeps all that tie", "limit[:, 0] - (key < edge).sum(-1))", "limit[:, 0])"),
    ("top-p drops the token that crosses", "before >= need[row]", "before + amount > need[row]"),
    ("top-p keeps all that tie", "before >= need[row]", "before > 4 * need[row]"),
    ("top-p of what top-k cut", "total = weight.sum(-1, dtype=torch.float64)\n",
     "total = (d / -temperature[:, None]).exp().sum(-1).double() * ONE\n"),
    ("too few candidates", "/ (2 * V)).clamp", "* 0.9 / 1).clamp"),
    ("min-p of the sum", "(min_p * ONE).ceil()", "(min_p * weight.sum(-1)).ceil()"),
    ("another's random number", "uniform(self.whole[seats, 1], positions)",
     "uniform(self.whole[seats, 1], positions)[::-1]"),
    ("position forgotten", "uniform(self.whole[seats, 1], positions)", "uniform(self.whole[seats, 1], positions * 0)"),
    ("one seed for all", "uniform(self.whole[seats, 1], positions)", "uniform(self.whole[seats, 1] * 0, positions)"),
    ("a token of no weight wins", "target[:, None], right=True)", "target[:, None], right=False)"),
    ("NaN passes", "[:, 0].isfinite(), tokens, -1)", "[:, 0] > -1e30, tokens, tokens)"),
    ("NaN passes where it is drawn", "best[:, 0].isfinite(), token, -1)", "best[:, 0] > -1e30, token, 3)"),
    ("logprobs after the sampler's changes", "logits.float().log_softmax", "(logits.float() / 2).log_softmax"),
    ("the chosen token twice", "any(i == token for i, _ in top)", "False"),
    ("the chosen token missing", "any(i == token for i, _ in top)", "True"),
]  # fmt: skip


def battery(module):
    """Fixed cases of the checks above, enough of them that every wrong line below matters."""
    rng = random.Random(1)
    for seed in range(60):
        rows = []
        for i in range(6):
            pick = rng.choice
            params = SamplingParams(
                temperature=pick([0.0, 0.5, 1.0, 3.0]), top_k=pick([0, 3, 7, V - 1]), top_p=pick([1.0, 0.5, 0.9]),
                min_p=pick([0.0, 0.0, 0.2]), presence_penalty=pick([0.0, 1.5]), frequency_penalty=pick([0.0, 0.7]),
                repetition_penalty=pick([1.0, 1.3]), logit_bias=pick([{}, {3: 5.0, 2: -3.0}]),
                min_tokens=pick([0, 3]),
            )  # fmt: skip
            ids = [rng.randrange(12) for _ in range(40)]
            rows.append(Row(params, 100 * seed + i, ids[:12], ids[12 : 12 + 5 * i]))
        check_mixed_batches(module, rows, seed, rng.choice([0.01, 1.0, 3.0]))
    check_broken_rows(module)
    check_edges(module)
    check_stop_ids(module)
    check_logprobs(module)


def load(source, folder):
    path = folder / "sampler_wrong.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCE = Path(ours.__file__).read_text()


def test_the_right_sampler_passes(tmp_path):
    battery(load(SOURCE, tmp_path))


@pytest.mark.parametrize("what, right, wrong", BUGS, ids=[bug[0] for bug in BUGS])
def test_a_wrong_sampler_is_rejected(what, right, wrong, tmp_path):
    assert SOURCE.count(right) == 1, f"{right!r} occurs {SOURCE.count(right)} times"
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError)):
        battery(load(SOURCE.replace(right, wrong), tmp_path))
