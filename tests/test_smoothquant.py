"""W8A8: the integer linear equals its formula, and moving outliers into the weights is worth it."""

import pytest
import torch
from test_quantization import small_layer, through
from torch.nn.functional import linear
from wrong_versions import wrong_version

from minserve import smoothquant
from minserve.model import Linear
from minserve.quantization import FEEDS


def a_linear(n=7, k=24, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = Linear(k, n, bias=bias).requires_grad_(False)
    for weight in layer.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return layer


def inputs(tokens=50, k=24, loud=None, seed=1):
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed))
    if loud is not None:
        x[:, loud] *= 100
    return x


def check_tokens(module):
    x = inputs() * torch.logspace(-3, 3, 50)[:, None]
    x[5] = 0
    q, scales = module.quantize_tokens(x)
    assert q.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (50,)
    assert (q.abs().amax(1)[torch.arange(50) != 5] == 127).all() and not q[5].any()
    assert ((q * scales[:, None] - x).abs() <= scales[:, None] * 0.5001).all()
    assert module.quantize_tokens(torch.tensor([[1.0, float("nan")]]))[1].isnan().all()  # stays visible


def check_linear(module):
    for bias in (True, False):
        for dtype, within in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            layer = a_linear(bias=bias).to(dtype)
            made, x = module.W8A8Linear(layer), inputs().to(dtype).view(5, 10, 24)
            q, scales = module.quantize_tokens(x)
            expected = linear(
                q.float() * scales[..., None], made.dequantize(), layer.bias.float() if bias else None
            )
            torch.testing.assert_close(made(x).float(), expected, rtol=within, atol=within)
            off = (made.dequantize() - layer.weight).abs() / made.scales[:, None]
            assert off.max() < 0.501
            assert made.nbytes == 7 * 24 + 7 * 4 + (7 * dtype.itemsize if bias else 0)


def check_factors(module):
    """alpha = 1 evens out the activations, 0 the weights; between, both end as large as each other."""
    weight, largest = a_linear().weight, inputs(loud=3).abs().amax(0)
    w = weight.abs().amax(0)
    for alpha in (0.0, 0.5, 1.0):
        s = module.factors(weight, largest, alpha)
        exact = largest**alpha / w ** (1 - alpha)
        assert ((s / exact).log2().abs() <= 0.5001).all() and torch.equal(s.log2(), s.log2().round())
    assert (
        (largest / module.factors(weight, largest, 0.5))
        .log2()
        .sub((w * exact.sqrt()).log2())
        .isfinite()
        .all()
    )
    largest[4], weight[:, 6] = 0, 0
    s = module.factors(weight, largest, 0.5)
    assert s[4] == s[6] == 1 and s.isfinite().all()
    shared = module.factors(weight, torch.arange(1.0, 25.0), 1.0, heads=(2, 3, 4))
    loudest = torch.arange(1.0, 25.0).view(2, 3, 4).amax(1).flatten()
    assert torch.equal(shared, loudest.log2().round().exp2())


def check_smoothing(module):
    """One loud channel: the layer computes what it did, and its integers come a good deal nearer."""
    layer = small_layer(torch.float32)
    x = inputs(40, 12)
    layer.input_layernorm.weight[3] *= 100
    for name in FEEDS[2].names:
        layer.get_submodule(name).weight[:, 3] /= 100
    norm = lambda: x / x.square().mean(-1, keepdim=True).sqrt() * layer.input_layernorm.weight
    error = []
    before, exact = (
        through(layer, x),
        linear(norm(), layer.self_attn.q_proj.weight, layer.self_attn.q_proj.bias),
    )
    for smooth in (False, True):
        if smooth:
            module.smooth(layer, FEEDS[2], norm().abs().amax(0))
        error.append(float((module.W8A8Linear(layer.self_attn.q_proj)(norm()) - exact).norm()))
    assert error[1] < 0.2 * error[0]
    for feed in (FEEDS[0], FEEDS[1], FEEDS[3]):
        module.smooth(layer, feed, torch.logspace(-1, 1, feed.weight(layer).shape[1]))
    torch.testing.assert_close(through(layer, x), before, rtol=1e-4, atol=1e-4)


CHECKS = [check_tokens, check_linear, check_factors, check_smoothing]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_right(check):
    check(smoothquant)


WRONG = [
    ("one scale for all tokens", "x.float().abs().amax(-1) / 127", "x.float().abs().amax() / 127 + 0 * x[..., 0]"),
    ("the sign of the largest is lost", "x.float().abs().amax(-1)", "x.float().amax(-1)"),
    ("cut off, not rounded", ".round()\n    return q.clamp", ".trunc()\n    return q.clamp"),
    ("the bias forgotten", "self.scales, self.bias, x.dtype)", "self.scales, None, x.dtype)"),
    ("a token's scale twice as large", "q, scales, self.qweight", "q, scales * 2, self.qweight"),
    ("weights and activations swapped", "x**alpha / w ** (1 - alpha)", "w**alpha / x ** (1 - alpha)"),
    ("alpha on both", "w ** (1 - alpha)", "w**alpha"),
    ("a dead channel", "torch.where((x > 0) & (w > 0), s, 1.0)", "s"),
    ("the mean, not the largest", "weight.abs().amax(0))", "weight.abs().mean(0))"),
    ("heads mixed up", "m.float().view(G, R, D).amax(1)", "m.float().view(R, G, D).amax(0)"),
    ("moved the other way", "fold(layer, feed, factors(", "fold(layer, feed, 1 / factors("),
]  # fmt: skip


@pytest.mark.parametrize("what, right, wrong", WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_version_is_noticed(what, right, wrong):
    module = wrong_version(smoothquant, right, wrong)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        for check in CHECKS:
            check(module)
