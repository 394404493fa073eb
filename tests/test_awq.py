"""AWQ: never worse than rounding, on its own objective; its factors leave what a layer computes as it was."""

import pytest
import torch
from test_gptq import case
from test_quantization import small_layer, through
from wrong_versions import wrong_version

from minserve import awq
from minserve.quantization import FEEDS, Scheme, heads_of, output_error, quantize, restore

SCHEMES = [Scheme(4, 8), Scheme(4, 16, False), Scheme(4, None), Scheme(8, 16)]
# by the letter: for scaling, all schemes; for clipping, also weights with one large one in each group


def errors(weight, hessian, scheme, result):
    return output_error(weight - restore(*result, scheme), hessian)


def with_outliers(seed):
    weight, hessian = case(8, 32, seed=seed)
    weight[:, ::8] *= 4
    return weight, hessian


def salient(seed):
    """A few channels a hundred times larger than others, their weights small: what AWQ is for."""
    weight, hessian = case(8, 32, seed=seed)
    weight[:, [3, 17]] /= 10
    size = torch.ones(32)
    size[[3, 17]] = 100
    return weight, hessian * size * size[:, None]


def check_clipping(module):
    gains = []
    for scheme in SCHEMES:
        for seed in range(4):
            for weight, hessian in (case(8, 32, seed=seed), with_outliers(seed), case(8, 27, seed=seed)):
                plain = errors(weight, hessian, scheme, quantize(weight, scheme))
                mine = errors(weight, hessian, scheme, module.clipped(weight, hessian, scheme))
                assert (mine <= plain).all(), (scheme, seed)  # every row
                gains.append(float(mine.sum() / plain.sum()))
    assert sum(gains) / len(gains) < 0.85


def check_clipping_is_its_own(module):
    """A diagonal Hessian ties no groups together: each one's best clip can be found by trying all of them alone."""
    scheme, weight = Scheme(4, 8), with_outliers(0)[0]
    hessian = torch.diag(torch.rand(32, generator=torch.Generator().manual_seed(0)) + 0.1)
    tried = [restore(*quantize(weight, scheme, shrink=clip), scheme) for clip in awq.CLIPS]
    by_group = [((weight - t).square() * hessian.diagonal()).view(8, 4, 8).sum(-1) for t in tried]
    best = torch.stack(by_group).amin(0).sum(1)
    got = errors(weight, hessian, scheme, module.clipped(weight, hessian, scheme))
    torch.testing.assert_close(got, best, rtol=1e-4, atol=1e-6)


def check_factors(module):
    """Not worse than without, for any kind of input; much better where a few channels carry everything."""
    for scheme in SCHEMES:
        for seed in range(3):
            for weight, hessian in (case(8, 32, seed=seed), salient(seed)):
                factors = module.search_factors(weight, hessian, scheme)
                scaled = quantize(weight * factors, scheme, weight.dtype)
                mine = module.clipped(weight * factors, module.rescaled(hessian, factors), scheme)
                without = errors(weight, hessian, scheme, module.clipped(weight, hessian, scheme)).sum()
                error = output_error(weight - restore(*mine, scheme) / factors, hessian).sum()
                assert error <= without * 1.0001, (scheme, seed)
                assert len(scaled[1]) == 8
            assert error < 0.7 * without, (scheme, seed)  # of the salient


def check_shared_factors(module):
    """Inputs made by the same row of v_proj have one factor, and the search knows."""
    weight, hessian = case(8, 24, seed=2)
    factors = module.search_factors(weight, hessian, Scheme(4, 8), heads=(2, 3, 4))
    assert factors.shape == (8,) and factors.std() > 0
    size = hessian.diagonal().view(2, 3, 4).mean(1).flatten()
    assert torch.equal(factors.argsort(), size.argsort())
    dead = torch.zeros(24, 24)
    assert torch.equal(module.search_factors(weight, dead, Scheme(4, 8)), torch.ones(24))
    hessian[5] = hessian[:, 5] = 0
    factors = module.search_factors(weight, hessian, Scheme(4, 8))
    assert torch.isfinite(factors).all() and factors[5] == 1 and factors.std() > 0


def check_siblings(module):
    """Two linears that read the same and want different factors: neither ends worse than rounded to nearest."""
    scheme = Scheme(4, None)
    for seed in range(12):
        (loud, hessian), (quiet, _) = salient(seed), case(2, 32, seed=seed + 50)
        quiet[:, [3, 17]] *= 8  # these two decide on its scale
        weight, sizes = torch.cat([loud * 30, quiet]), [8, 2]
        factors = module.search_factors(weight, hessian, scheme, sizes=sizes)
        after = module.rescaled(hessian, factors)
        mine = errors(weight * factors, after, scheme, module.clipped(weight * factors, after, scheme))
        plain = errors(weight, hessian, scheme, quantize(weight, scheme))
        assert all(a.sum() <= b.sum() * 1.0001 for a, b in zip(mine.split(sizes), plain.split(sizes)))


def check_norms(module):
    """Where a bf16 norm is divided, the factor is what the rounded quotient makes it; a channel of 0 is left alone."""
    weight, hessian = salient(1)
    norm = (torch.rand(32, generator=torch.Generator().manual_seed(0)) + 0.5).bfloat16()
    norm[4] = 0
    factors = module.search_factors(weight, hessian, Scheme(4, 8), before=norm)
    assert factors.std() > 0 and factors[4] == 1
    divided = (norm.float() / factors).bfloat16()
    torch.testing.assert_close(divided.float() * factors, norm.float(), rtol=1e-6, atol=0)


def check_layer(module):
    """All feeds scaled: the layer computes what it did, and each linear's error is not above plain rounding's."""
    layer = small_layer(torch.float32)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 12, generator=generator)
    before, scheme, changed = through(layer, x), Scheme(4, 8), []
    for feed in FEEDS:
        k = feed.weight(layer).shape[1]
        inputs = torch.randn(100, k, generator=generator) * torch.logspace(-1.5, 1, k)
        hessian, weight = inputs.T @ inputs, feed.weight(layer).clone()
        after = module.scale(layer, feed, hessian, scheme, torch.float32)
        scaled = feed.weight(layer)
        changed.append(not torch.equal(scaled, weight))
        torch.testing.assert_close(
            output_error(scaled, after), output_error(weight, hessian), rtol=1e-3, atol=1e-3
        )
        plain = errors(weight, hessian, scheme, quantize(weight, scheme)).sum()
        assert errors(scaled, after, scheme, module.clipped(scaled, after, scheme)).sum() < plain
        assert heads_of(layer, feed)[1] == (3 if feed.names == ("self_attn.o_proj",) else 1)
    assert sum(changed) >= 2
    torch.testing.assert_close(through(layer, x), before, rtol=1e-4, atol=1e-4)


CHECKS = [
    check_clipping, check_clipping_is_its_own, check_factors, check_shared_factors, check_siblings, check_norms,
    check_layer,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_right(check):
    check(awq)


WRONG = [
    ("scaled, never scaled back", "hessian / each / each[:, None]", "hessian"),
    ("only one side of the Hessian", "hessian / each / each[:, None]", "hessian / each"),
    ("plain rounding is not among what is tried", "range(EXPONENTS + 1)", "range(4, EXPONENTS + 1)"),
    ("the worst is kept", "errors.sum() < best_error", "(best is None or errors.sum() > best_error)"),
    ("the last is kept", "errors.sum() < best_error", "True"),
    ("loud channels are turned down", "size ** (i / EXPONENTS)", "size ** (-i / EXPONENTS)"),
    ("every head its own factor", "view(G, R, D).mean(1).flatten()", "view(R, G, D).mean(0).flatten()"),
    ("a norm's rounding is not seen", "if before is not None and before.ndim == 1:", "if False:"),
    ("a channel that is 0 divided", "torch.where(divided != 0, before.float() / divided.float(), 1.0)",
     "before.float() / divided.float()"),
    ("nothing is folded", "    fold(layer, feed, factors)\n", ""),
    ("the Hessian stays as it was", "return rescaled(hessian, to_inputs(factors, heads))", "return hessian"),
    ("clipped whatever it costs", "shrink[cut >= plain] = 1.0", "pass"),
    ("clipped where it does harm", "shrink[cut >= plain] = 1.0", "shrink[cut < plain] = 1.0"),
    ("never clipped", "return quantize(weight, scheme, dtype, shrink)", "return quantize(weight, scheme, dtype)"),
    ("the hardest clip that was tried", "better = error < least[:, q]", "better = error < float('inf')"),
    ("every group judged by the first one's inputs",
     "hessian[i : i + columns, i : i + columns])\n            better",
     "hessian[: lost[:, i : i + columns].shape[1], : lost[:, i : i + columns].shape[1]])\n            better"),
    ("one linear pays for another", " and (errors <= plain).all()", ""),
    ("a dead channel's logarithm", "size[size > 0].log()", "size.log()"),
]  # fmt: skip


@pytest.mark.parametrize("what, right, wrong", WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_version_is_noticed(what, right, wrong):
    module = wrong_version(awq, right, wrong)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        for check in CHECKS:
            check(module)
