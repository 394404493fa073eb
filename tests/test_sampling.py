"""Sampling: the right distribution, exact cuts, finite at every temperature, and noise that belongs to the request."""

import math

import pytest
import torch

from minserve.request import SamplingParams
from minserve.sampling import probabilities, sample, uniform

QUARTERS = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()  # exact in binary


def draw(logits, n, seed=0, **params):
    params = SamplingParams(**{"temperature": 1.0} | params)
    return [sample(logits, params, seed, i) for i in range(n)]


def chi_square(draws, p):
    """The statistic, and what 99.99 % of correct samplers stay under (Wilson and Hilferty's approximation)."""
    n, k = len(draws), len(p)
    counts = torch.bincount(torch.tensor(draws), minlength=k).double()
    expected = torch.tensor(p, dtype=torch.float64) * n
    df = k - 1
    limit = df * (1 - 2 / (9 * df) + 3.719 * math.sqrt(2 / (9 * df))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), limit


def test_draws_follow_the_distribution():
    statistic, limit = chi_square(draw(QUARTERS, 20_000), [0.5, 0.25, 0.125, 0.125])
    assert statistic < limit


def test_that_test_can_fail():
    """Draws from a slightly wrong temperature are rejected."""
    statistic, limit = chi_square(draw(QUARTERS, 20_000, temperature=1.1), [0.5, 0.25, 0.125, 0.125])
    assert statistic > limit


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


def test_uniform_is_fixed_for_ever_and_uniform():
    assert uniform(0, 0) == uniform(0, 0) and 0 <= uniform(0, 0) < 1
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
