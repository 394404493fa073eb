"""lab/online_softmax: pieces in any number and order equal one softmax, and each wrong version is caught."""

import inspect

import pytest
import torch

from minserve.lab import online_softmax


def attention(scores, values):
    return scores.softmax(1) @ values, scores.logsumexp(1)


def problem(seed, rows=5, keys=37, channels=4):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, keys, generator=generator) * 20  # spread out: the maximum moves often
    return scores, torch.randn(keys, channels, generator=generator), generator


def in_pieces(module, scores, values, generator):
    """Some pieces through one state, some through another, then merged."""
    cut = int(torch.randint(1, scores.shape[1], (1,), generator=generator))
    parts = []
    for keys in (slice(0, cut), slice(cut, None)):
        state = module.start(len(scores), values.shape[1])
        for piece in torch.arange(scores.shape[1])[keys].split(5):
            state = module.update(*state, scores[:, piece], values[piece])
        parts += module.finish(*state)
    return module.merge(*parts)


def equal(module) -> bool:
    same = []
    for seed in range(20):
        scores, values, generator = problem(seed)
        for got, expected in zip(in_pieces(module, scores, values, generator), attention(scores, values)):
            same.append(torch.allclose(got, expected, rtol=1e-4, atol=1e-5))
    return all(same)


def test_pieces_equal_the_whole():
    assert equal(online_softmax)


def test_hidden_keys_leave_the_state_alone():
    hidden, values = torch.full((2, 3), -torch.inf), torch.ones(3, 4)
    state = online_softmax.start(2, 4)
    for before, after in zip(state, online_softmax.update(*state, hidden, values)):
        assert torch.equal(before, after)
    out, lse = online_softmax.finish(*state)
    assert torch.equal(out, torch.zeros(2, 4)) and bool((lse == -torch.inf).all())
    scores, values, _ = problem(0, rows=2)
    part = online_softmax.finish(*online_softmax.update(*state, scores, values))
    for got, expected in zip(online_softmax.merge(*part, out, lse), part):
        assert torch.allclose(got, expected)
    assert not any(x.isnan().any() for x in online_softmax.merge(out, lse, out, lse))


MUTATIONS = [
    ("l * shrink + weights", "l + weights"),
    ("acc * shrink[:, None] + ", "acc + "),
    ("torch.maximum(m, scores.amax(1))", "scores.amax(1)"),
    ("torch.maximum(m, scores.amax(1))", "m.clamp(min=-10)"),
    ("return new_m,", "return m,"),
    ("m + seen.log()", "m + seen"),
    ("(a[:, None] * out_a + b[:, None] * out_b) / safe[:, None]", "(out_a + out_b) / 2"),
    ("top + safe.log()", "top"),
    ("torch.exp(lse_a - base), torch.exp(lse_b - base)", "lse_a.exp(), lse_b.exp()"),
]


@pytest.mark.parametrize("old, new", MUTATIONS)
def test_a_wrong_version_is_caught(old, new):
    source = inspect.getsource(online_softmax)
    assert old in source
    wrong = type(online_softmax)("wrong")
    exec(source.replace(old, new), wrong.__dict__)
    assert not equal(wrong)
