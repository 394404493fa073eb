"""GPTQ equals Optimal Brain Surgeon written out, gains what it promises, and reduces to rounding where it must."""

import math
import warnings

import pytest
import torch
from wrong_versions import wrong_version

from minserve import gptq as gptq_module
from minserve.gptq import gptq
from minserve.quantization import Scheme, grid, output_error, quantize, restore

SCHEMES = [Scheme(4, 8), Scheme(4, 16, False), Scheme(4, None), Scheme(8, 16), Scheme(8, None, False)]


def case(n=6, k=24, tokens=200, seed=0, dtype=torch.float32):
    """A weight and the Hessian of correlated inputs of very different size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    mix = torch.randn(k, k, generator=generator) / math.sqrt(k) + torch.eye(k)
    x = (
        torch.randn(tokens, k, generator=generator)
        @ mix
        * torch.logspace(-0.5, 0.5, k)[torch.randperm(k, generator=generator)]
    )
    return weight, x.T @ x


def error_of(weight, hessian, integers, scales, zeros, order, scheme):
    rounded = restore(integers, scales, zeros, scheme)
    if order is not None:
        rounded = torch.empty_like(rounded).index_copy_(1, order, rounded)
    return float(output_error(weight.float() - rounded, hessian).sum())


def brain_surgeon(weight, hessian, scheme, damping, order=None):
    """O(K^4) and fp64: for each column, the inverse Hessian of all columns that are still free."""
    k = weight.shape[1]
    damped = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(k)
    left, integers = weight.double().clone(), torch.zeros(weight.shape, dtype=torch.long)
    free = list(range(k)) if order is None else order.tolist()
    scales, zeros = [], []
    for turn in range(k):
        c, rest = free[turn], free[turn:]
        if turn % scheme.columns(k) == 0:
            group = free[turn : turn + scheme.columns(k)]
            scale, zero = grid(left[:, group].float(), scheme, weight.dtype)
            scales.append(scale)
            zeros.append(zero)
        inverse = torch.linalg.inv(damped[rest][:, rest])
        middle = scheme.middle if zero is None else zero[:, 0].double()
        low = 0 if scheme.bits == 4 else -128
        levels = (left[:, c] / scale[:, 0].double()).round() + middle
        integers[:, turn] = levels.clamp(low, low + 2**scheme.bits - 1)
        lost = left[:, c] - (integers[:, turn] - middle) * scale[:, 0].double()
        left[:, rest] -= torch.outer(lost, inverse[0] / inverse[0, 0])
    return integers, torch.cat(scales, 1)


# ---------------------------------------------------------------- the checks
def check_brain_surgeon(module):
    for scheme in SCHEMES:
        for seed, block in ((0, 4), (1, 8), (2, 5), (3, 128)):
            for act_order in (False, True):
                weight, hessian = case(k=24 if seed % 2 else 21, seed=seed)
                integers, scales, _, order = module.gptq(
                    weight, hessian, scheme, damping=0.05, block=block, act_order=act_order
                )
                theirs, its_scales = brain_surgeon(weight, hessian, scheme, 0.05, order)
                same = (integers.long() == theirs).all(1)
                # a group's least weight is 7.5 steps below 0: where fp32 and fp64 disagree, all of its row does
                assert same.sum() >= len(same) - 1, (scheme, block, act_order, same)
                torch.testing.assert_close(scales[same], its_scales[same], rtol=1e-3, atol=0)


def check_rounding(module):
    """Nothing to make up for: columns that have nothing to do with each other."""
    for scheme in SCHEMES:
        for hessian in (torch.eye(24), torch.diag(torch.rand(24) + 0.1), torch.zeros(24, 24)):
            for dtype in (torch.float32, torch.bfloat16):
                weight, _ = case(dtype=dtype)
                expected = quantize(weight, scheme)
                for got, its in zip(module.gptq(weight, hessian, scheme, block=8), expected):
                    assert (got is None and its is None) or torch.equal(got, its), (scheme, dtype)


def check_gain(module):
    for scheme in SCHEMES:
        for act_order in (False, True):
            weight, hessian = case(16, 64, seed=5)
            nearest = error_of(weight, hessian, *quantize(weight, scheme), None, scheme)
            mine = error_of(
                weight, hessian, *module.gptq(weight, hessian, scheme, act_order=act_order), scheme
            )
            assert mine < 0.7 * nearest, (scheme, act_order, mine / nearest)


def check_dead_columns(module):
    """A channel that never was anything else than 0: its weights are rounded, and nobody else's notice."""
    weight, hessian = case()
    dead = [0, 7, 23]
    hessian[dead] = 0
    hessian[:, dead] = 0
    scheme = Scheme(4, None)
    weight[:, dead] = weight[:, dead].clamp(-1, 1)  # they do not decide on the scale
    integers, scales, _, _ = module.gptq(weight, hessian, scheme)
    assert torch.equal(integers[:, dead], scheme.round(weight[:, dead], scales))
    alive = [c for c in range(24) if c not in dead]
    damping = 0.01 * len(alive) / 24  # the same amount, as a share of another mean
    others = module.gptq(
        weight[:, alive], hessian[alive][:, alive], scheme, damping * 24 / len(alive) * len(alive) / 24
    )
    assert (integers[:, alive] == others[0]).float().mean() > 0.97


def check_act_order(module):
    """The same as the plain way on columns that were sorted beforehand."""
    for scheme in SCHEMES:
        weight, hessian = case(seed=7)
        integers, scales, zeros, order = module.gptq(weight, hessian, scheme, act_order=True)
        assert sorted(order.tolist()) == list(range(24))
        assert hessian.diagonal()[order].diff().max() <= 0
        sorted_first = module.gptq(weight[:, order], hessian[order][:, order], scheme)
        assert torch.equal(integers, sorted_first[0]) and torch.equal(scales, sorted_first[1])
        assert sorted_first[3] is None


CHECKS = [check_brain_surgeon, check_rounding, check_gain, check_dead_columns, check_act_order]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_right(check):
    check(gptq_module)


WRONG = [
    ("errors go nowhere", "left[c + 1 : stop] -= factor", "left[c + 1 : stop] -= 0 * factor"),
    ("errors are doubled", "left[c + 1 : stop] -= factor", "left[c + 1 : stop] += factor"),
    ("errors end with the block", "left[stop:] -= factor[start:stop, stop:].T @ errors", "pass"),
    ("the wrong sign behind the block", "left[stop:] -= ", "left[stop:] += "),
    ("the block's update from its first rows", "errors[c - start] = error", "errors[0] = error"),
    ("not divided by U_cc", " / factor[c, c]", ""),
    ("divided by its square", " / factor[c, c]", " / factor[c, c] ** 2"),
    ("Cholesky of H, not of its inverse", "torch.linalg.solve_triangular(lower, eye, upper=False).flip(0, 1)",
     "lower.flip(0, 1)"),
    ("not turned around", "cholesky_ex(damped.flip(0, 1))", "cholesky_ex(damped)"),
    ("turned back as a transpose", "upper=False).flip(0, 1)", "upper=False).T"),
    ("scales of the weights as they were", "grid(left[first:end].T, scheme, weight.dtype)",
     "grid(weight[:, first:end], scheme, weight.dtype)"),
    ("no damping", "damped.diagonal().add_(mean * damping * more if mean > 0 else 1.0)",
     "damped.diagonal().add_(0.0 if mean > 0 else 1.0)"),
    ("damping of every column by itself", "damped.diagonal().add_(mean * damping * more if mean > 0 else 1.0)",
     "damped.diagonal().mul_(1 + damping).add_(0.0 if mean > 0 else 1.0)"),
    ("the least important first", "argsort(descending=True, stable=True)", "argsort(stable=True)"),
    ("the Hessian keeps its order", "weight, hessian = weight[:, order], hessian[order][:, order]",
     "weight = weight[:, order]"),
    ("only the Hessian's rows are sorted", "hessian[order][:, order]", "hessian[order]"),
    ("the error is what is rounded to", "error = (left[c] - scheme.restore(", "error = (0 * left[c] + scheme.restore("),
    ("zeros forgotten", "scheme.restore(integers[c], scale, zero)", "scheme.restore(integers[c], scale)"),
]  # fmt: skip


@pytest.mark.parametrize("what, right, wrong", WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_version_is_noticed(what, right, wrong):
    module = wrong_version(gptq_module, right, wrong)
    with pytest.raises((AssertionError, RuntimeError, ValueError)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for check in CHECKS:
            check(module)


# ---------------------------------------------------------------- what a calibration can bring
def test_more_damping_is_tried_and_said():
    weight, hessian = case()
    values, vectors = torch.linalg.eigh(hessian)
    values[0] = -0.05 * hessian.diagonal().mean()
    bent = vectors @ torch.diag(values) @ vectors.T
    with pytest.warns(UserWarning, match="damping 0.01"):
        integers, *_ = gptq(weight, bent, Scheme(4, 8))
    assert torch.equal(integers, gptq(weight, bent, Scheme(4, 8), damping=0.1)[0])


def test_no_damping_is_enough():
    weight, hessian = case()
    hessian[0, 1] = hessian[1, 0] = 1e9
    with pytest.raises(ValueError, match="more tokens than the 24 inputs"), pytest.warns(UserWarning):
        gptq(weight, hessian, Scheme(4, 8))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_hessian_that_is_not_finite(bad):
    weight, hessian = case()
    hessian[3] = bad
    hessian[:, 3] = bad
    with pytest.raises(ValueError, match="in 24 of 24 rows"):
        gptq(weight, hessian, Scheme(4, 8))


def test_a_hessian_of_another_layer():
    with pytest.raises(ValueError, match=r"24 inputs needs a Hessian \[24, 24\], not \[3, 3\]"):
        gptq(case()[0], torch.eye(3), Scheme(4, 8))
