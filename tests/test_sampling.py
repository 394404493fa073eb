"""Sampling: the right distribution, exact cuts, finite at every temperature, and noise that belongs to the request."""

import math
import secrets

import pytest
import torch
import transformers

from minserve.kernels import sample as kernel
from minserve.request import SamplingParams, check_vocabulary, seed_of
from minserve.sampling import adjusted, probabilities, sample, uniform

QUARTERS = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()  # exact in binary


def draw(logits, n, seed=0, **params):
    params = SamplingParams(**{"temperature": 1.0} | params)
    return [sample(logits, params, seed, i) for i in range(n)]


def draw_many(logits, n, seed=0, **params):
    """The same in one call: n rows of the batched definition."""
    p = SamplingParams(**{"temperature": 1.0} | params)
    cuts = [(p.temperature, torch.float32), (p.top_k, torch.int64), (p.top_p, torch.float64)]
    rows = [
        torch.full((n,), x, dtype=dtype)
        for x, dtype in [*cuts, (p.min_p, torch.float64), (seed, torch.int64)]
    ]
    return kernel.sample_reference(logits.expand(n, -1), *rows, torch.arange(n)).tolist()


def test_many_are_the_same_draws():
    for name, (params, _) in BY_HAND.items():
        logits = torch.tensor(EIGHT).log()
        assert draw(logits, 40, seed=5, **params) == draw_many(logits, 40, seed=5, **params), name


def chi_square(draws, p):
    """The statistic, and what 99.99 % of correct samplers stay under (Wilson and Hilferty's approximation)."""
    n, k = len(draws), len(p)
    counts = torch.bincount(torch.tensor(draws), minlength=k).double()
    expected = torch.tensor(p, dtype=torch.float64) * n
    df = k - 1
    limit = df * (1 - 2 / (9 * df) + 3.719 * math.sqrt(2 / (9 * df))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), limit


def test_draws_follow_the_distribution():
    statistic, limit = chi_square(draw_many(QUARTERS, 20_000), [0.5, 0.25, 0.125, 0.125])
    assert statistic < limit


def test_that_test_can_fail():
    """Draws from a slightly wrong temperature are rejected."""
    statistic, limit = chi_square(draw_many(QUARTERS, 20_000, temperature=1.1), [0.5, 0.25, 0.125, 0.125])
    assert statistic > limit


EIGHT = [8, 7, 5, 4, 3, 2, 2, 1]  # of 32, and what each rule makes of them, worked out by hand
BY_HAND = {
    "temperature 1/2 squares": (dict(temperature=0.5), [64, 49, 25, 16, 9, 4, 4, 1]),
    "temperature 2 takes roots": (dict(temperature=2.0), [n**0.5 for n in EIGHT]),
    "top-k": (dict(top_k=3), [8, 7, 5]),
    "top-k, the first of two that tie": (dict(top_k=6), [8, 7, 5, 4, 3, 2]),
    "top-p 0.7 is 22.4 of 32": (dict(top_p=0.7), [8, 7, 5, 4]),
    "top-p 0.85 is 27.2: of two that tie, the first": (dict(top_p=0.85), [8, 7, 5, 4, 3, 2]),
    "min-p 0.3 is 2.4": (dict(min_p=0.3), [8, 7, 5, 4, 3]),
    "top-p of what top-k left": (dict(top_k=4, top_p=0.8), [8, 7, 5]),
    "min-p of the best, however far top-p cut": (dict(top_p=0.7, min_p=0.6), [8, 7, 5]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_draws_follow_the_rules(name):
    params, weights = BY_HAND[name]
    drawn = draw_many(torch.tensor(EIGHT).log(), 40_000, seed=11, **params)
    assert max(drawn) < len(weights), "a token that was cut"
    statistic, limit = chi_square(drawn, [w / sum(weights) for w in weights])
    assert statistic < limit


@pytest.mark.parametrize(
    "wrong", [dict(temperature=0.6), dict(temperature=1.8), dict(top_k=4), dict(min_p=0.2)]
)
def test_those_tests_can_fail(wrong):
    """Each right expectation rejects the draws of a neighbouring rule."""
    right = {"temperature": 0.5 if wrong.get("temperature", 2) < 1 else 2.0, "top_k": 3, "min_p": 0.3}
    name = next(iter(wrong))
    weights = next(w for p, w in BY_HAND.values() if p == {name: right[name]})
    drawn = draw_many(torch.tensor(EIGHT).log(), 40_000, seed=11, **wrong)
    if max(drawn) < len(weights):
        statistic, limit = chi_square(drawn, [w / sum(weights) for w in weights])
        assert statistic > limit


@pytest.mark.parametrize("seed", range(8))
def test_cuts_equal_those_of_transformers(seed):
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(seed)) * 3
    prompt, outputs = [7, 7, 250, 3], [5, 7, 5]
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3)
    ids, theirs = torch.tensor([prompt + outputs]), logits.clone()
    for step in (
        transformers.RepetitionPenaltyLogitsProcessor(1.3),
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(40),
        transformers.TopPLogitsWarper(0.9),
        transformers.MinPLogitsWarper(0.02),
    ):
        theirs = step(ids, theirs)
    ours = probabilities(logits[0], params, len(outputs), prompt, outputs)
    torch.testing.assert_close(ours, theirs[0].softmax(-1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "top_p, kept", [(1e-9, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.999, 4), (1.0, 4)]
)
def test_top_p_keeps_the_token_that_crosses(top_p, kept):
    p = probabilities(QUARTERS, SamplingParams(temperature=1.0, top_p=top_p))
    assert int((p > 0).sum()) == kept
    torch.testing.assert_close(p.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("top_k, kept", [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (0, 4), (-1, 4), (10**9, 4)])
def test_top_k_counts_exactly(top_k, kept):
    p = probabilities(QUARTERS, SamplingParams(temperature=1.0, top_k=top_k))
    assert int((p > 0).sum()) == kept  # also for k = 3, where the third and fourth tie


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 5e-324, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tiny_temperatures_are_finite_and_greedy(temperature, dtype):
    logits = torch.tensor([11.0625, 2.95, -2.4], dtype=dtype)
    params = SamplingParams(temperature=temperature)
    assert torch.isfinite(probabilities(logits, params)).all()
    assert {sample(logits, params, 0, i) for i in range(50)} == {0}


def test_a_draw_depends_on_seed_and_position_alone():
    assert draw(QUARTERS, 50, seed=3) == draw(QUARTERS, 50, seed=3)
    assert draw(QUARTERS, 50, seed=3) != draw(QUARTERS, 50, seed=4)
    assert sample(QUARTERS, SamplingParams(temperature=1.0), 3, 40) == draw(QUARTERS, 50, seed=3)[40]


ONES, PI = [0xFFFFFFFF] * 6, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
KNOWN = [  # counter and key, and the words of the published test vectors
    ([0] * 6, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (ONES, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (PI, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize("given, words", KNOWN)
def test_philox_equals_its_published_vectors(given, words):
    assert list(kernel.philox(given[:4], given[4:])) == words
    as_tensors = [torch.tensor([x]) for x in given]
    assert [int(x) for x in kernel.philox(as_tensors[:4], as_tensors[4:])] == words


def test_a_uniform_number_is_53_bits_of_philox():
    assert uniform(0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63)], [0, 5, 2**32, 2**31, 2**40 + 3]
    together = kernel.uniform(torch.tensor(seeds), torch.tensor(positions))
    assert together.tolist() == [uniform(s, p) for s, p in zip(seeds, positions)]
    assert len({uniform(s, p) for s in seeds for p in positions}) == 25, (
        "a bit of seed or position has no effect"
    )
    assert uniform(7, 0) == uniform(7 + 2**64, 0), "a seed counts modulo 2^64"


def test_uniform_is_uniform():
    draws = [int(uniform(7, i) * 16) for i in range(16_000)]
    statistic, limit = chi_square(draws, [1 / 16] * 16)
    assert statistic < limit


def test_cut_tokens_are_never_drawn():
    logits = torch.tensor([1.0, -torch.inf, 1.0, -torch.inf])
    assert set(draw(logits, 500)) == {0, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_reported(temperature):
    with pytest.raises(ValueError, match="output position 5 hold NaN"):
        sample(torch.tensor([1.0, float("nan")]), SamplingParams(temperature=temperature), 0, 5)


# ---------------------------------------------------------------- history
def two(params, **history):
    """What becomes of token 7, at first 2.0, and of token 8, at first -2.0."""
    logits = torch.zeros(16)
    logits[7], logits[8] = 2.0, -2.0
    x = adjusted(logits, SamplingParams(**params), **history)
    assert logits[7] == 2.0, "the caller's logits were changed"
    return x[7:9].tolist()


def test_presence_and_frequency_count_the_answer_only():
    penalties = dict(presence_penalty=1.5, frequency_penalty=0.5)
    assert two(penalties, prompt=[7, 7, 7]) == [2.0, -2.0]
    assert two(penalties, prompt=[7, 7, 7], outputs=[7, 7]) == [-0.5, -2.0]
    assert two(penalties, outputs=[8]) == [2.0, -4.0]


def test_repetition_counts_prompt_and_answer_once():
    for prompt, outputs in ([7, 8, 7, 7], []), ([], [8, 7, 7]), ([7], [8]), ([7, 8], [7, 8]):
        assert two(dict(repetition_penalty=1.25), prompt=prompt, outputs=outputs) == [
            pytest.approx(1.6),
            -2.5,
        ]


def test_bias_comes_before_penalties_and_min_tokens_after_all():
    params = dict(logit_bias={"7": -4.0, 8: 4}, repetition_penalty=2.0, presence_penalty=1.0)
    assert two(params, prompt=[7, 8]) == [-4.0, 1.0]
    assert two(params, outputs=[7, 8]) == [-5.0, 0.0]
    banned = params | dict(min_tokens=3, stop_token_ids=[8], logit_bias={8: 100})
    assert two(banned, position=2, stop_ids=[7]) == [-math.inf, -math.inf]
    assert two(banned, position=3, stop_ids=[7]) == [2.0, 98.0]


def test_penalties_are_felt_by_greedy_too():
    params = SamplingParams(frequency_penalty=2.0)
    logits, outputs = torch.tensor([3.0, 2.5, 0.0]), []
    for position in range(6):
        outputs.append(sample(logits, params, 0, position, [0, 0, 0], outputs))
    assert outputs == [0, 1, 0, 1, 2, 0]  # 3, 1, -1 against 2.5, 0.5, -1.5 against 0, -2


# ---------------------------------------------------------------- seeds
def test_completions_of_one_request_draw_apart_and_alike_on_every_machine():
    assert [seed_of(7, i) for i in range(3)] == [7, 0x27E8AC81E7BC3B89, 0xDFD64551E2E186EB]
    answers = [draw(torch.zeros(4), 20, seed=seed_of(7, i)) for i in range(4)]
    assert len(set(map(tuple, answers))) == 4
    assert answers == [draw(torch.zeros(4), 20, seed=seed_of(7, i)) for i in range(4)]
    seeds = [seed_of(s, i) for s in range(30) for i in range(30)]
    assert len(set(seeds)) == 900, "neighbouring requests share completions"
    first = [int(uniform(s, 0) * 4) for s in seeds]
    statistic, limit = chi_square(first, [0.25] * 4)
    assert statistic < limit


def test_one_seed_means_one_answer_and_fresh_seeds_differ():
    assert len({tuple(draw(torch.zeros(4), 20, seed=7)) for _ in range(5)}) == 1
    assert len({tuple(draw(torch.zeros(4), 20, seed=secrets.randbits(63))) for _ in range(20)}) > 1


# ---------------------------------------------------------------- the door
@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, True, "3"])
def test_max_tokens_is_checked(max_tokens):
    with pytest.raises(ValueError, match="max_tokens is .*; ask for a whole number of at least 1"):
        SamplingParams(max_tokens=max_tokens)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -float("inf"), -0.1, "hot", None, True])
def test_temperature_is_checked(temperature):
    with pytest.raises(ValueError, match="temperature is .*; it must be a finite number >= 0"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize(
    "bad",
    [
        dict(top_k=-2),
        dict(top_k=1.5),
        dict(top_p=0),
        dict(top_p=1.1),
        dict(top_p=float("nan")),
        dict(seed=0.5),
    ],
)
def test_the_rest_is_checked_too(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} is "):
        SamplingParams(**bad)


@pytest.mark.parametrize("stop", [5, ["</s>"], [-1], [True]])
def test_stop_ids_are_checked(stop):
    with pytest.raises(ValueError, match="stop_token_ids is"):
        SamplingParams(stop_token_ids=stop)


@pytest.mark.parametrize(
    "name, values",
    [
        ("min_p", [-0.1, 1.1, True, "0", float("nan")]),
        ("presence_penalty", [2.1, -2.1, None, float("nan")]),
        ("frequency_penalty", [2.1, -2.1, "1", float("inf")]),
        ("repetition_penalty", [0, -1.0, 1e9, float("nan")]),
        (
            "logit_bias",
            [{-1: 5}, {"abc": 1}, {"3": "x"}, {"-1": 5}, {3: float("nan")}, {3: 101}, {3: 1, "3": 2}, [3]],
        ),
        ("logit_bias", [{1.5: 1}, {True: 1}, {"²": 1}]),
        ("n", [0, -1, 1.0, True]),
        ("stop", ["", [""], ["", "X"], [3], 3, None]),
        ("min_tokens", [-1, 1.5, True]),
        ("logprobs", [-1, 21, 33, 1_000_000, True, 1.0]),
        ("temperature", [10**400]),
        ("stop_token_ids", [None, "12"]),
    ],
)
def test_every_value_is_checked(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} is "):
            SamplingParams(**{name: value})


def test_what_is_given_is_copied_and_read_as_meant():
    bias = {"3": 1, 4: 2.5}
    params = SamplingParams(logit_bias=bias, stop="ab", stop_token_ids=[1, 2])
    bias["5"] = 1
    assert params.logit_bias == {3: 1.0, 4: 2.5}
    assert params.stop == ("ab",) and params.stop_token_ids == (1, 2)
    assert hash(params) == hash(SamplingParams(logit_bias={}, stop=["ab"], stop_token_ids=(1, 2)))
    with pytest.raises(ValueError, match="min_tokens is 5, more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_the_vocabulary_is_checked_too():
    check_vocabulary(SamplingParams(logit_bias={31: 5}, stop_token_ids=[31], logprobs=20, top_k=10**9), 32)
    for bad in dict(logit_bias={"32": 5}), dict(stop_token_ids=[3, 32]):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} names token id 32, and .* ends at 31"):
            check_vocabulary(SamplingParams(**bad), 32)
    with pytest.raises(ValueError, match="logprobs is 5; the vocabulary has only 4"):
        check_vocabulary(SamplingParams(logprobs=5), 4)
