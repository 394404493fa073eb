"""Rounding, packing and the layer equal what is written out number by number; wrong versions of them do not."""

import math

import pytest
import torch
from torch.nn.functional import linear
from wrong_versions import wrong_version

from minserve import quantization
from minserve.config import ModelConfig, RopeConfig
from minserve.model import Layer, Linear
from minserve.quantization import QuantLinear, Scheme, from_float, pack, quantize, unpack

SCHEMES = [
    Scheme(bits, group, symmetric)
    for bits in (4, 8)
    for group in (8, 64, None)
    for symmetric in (True, False)
]
SHAPES = [(3, 20), (2, 8), (1, 7), (5, 129)]


def weights(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator) * 3
    w[-1, : shape[1] // 2] = w[-1, : shape[1] // 2].abs()  # a group without negative weights
    return w.to(dtype)


def written_out(row: list[float], scheme: Scheme, as_stored) -> tuple[list, list, list]:
    """One row by hand: (unsigned levels, scales, zero levels); `as_stored` rounds a scale to its dtype."""
    levels, middle = 2**scheme.bits - 1, 2 ** (scheme.bits - 1)
    numbers, scales, zeros = [], [], []
    columns = min(scheme.group or len(row), len(row))
    for start in range(0, len(row), columns):
        group = row[start : start + columns]
        low, high = min([*group, 0.0]), max([*group, 0.0])
        span = 2 * max(-low, high) if scheme.symmetric else high - low
        scale = as_stored(span / levels) or 1.0
        zero = middle if scheme.symmetric else min(levels, max(0, round(-low / scale)))
        scales.append(scale)
        zeros.append(zero)
        numbers += [min(levels, max(0, round(w / scale) + zero)) for w in group]
    return numbers, scales, zeros


def check_rounding(module):
    for scheme in (module.Scheme(s.bits, s.group, s.symmetric) for s in SCHEMES):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for shape in SHAPES:
                w = weights(shape, dtype)
                integers, scales, zeros = module.quantize(w, scheme)
                assert scales.dtype == dtype and integers.dtype == scheme.dtype
                assert (zeros is None) == scheme.symmetric
                middle = 2 ** (scheme.bits - 1)
                offset = 0 if scheme.bits == 4 else middle
                for n in range(shape[0]):
                    as_stored = lambda x, dtype=dtype: torch.tensor(x).to(dtype).item()
                    numbers, its_scales, its_zeros = written_out(w[n].tolist(), scheme, as_stored)
                    assert scales[n].tolist() == pytest.approx(its_scales, rel=1e-6)
                    step = scales[n].float().repeat_interleave(scheme.columns(shape[1]))[: shape[1]]
                    tie = (
                        (w[n].float() / step) % 1 - 0.5
                    ).abs() < 1e-3  # fp32 and fp64 may see it differently
                    same = integers[n].long() + offset == torch.tensor(numbers)
                    assert (same | tie).all()
                    if zeros is not None:
                        assert (zeros[n].long() + offset - torch.tensor(its_zeros)).abs().max() <= 1
                    lost = (module.restore(integers, scales, zeros, scheme)[n] - w[n].float()).abs() / step
                    # half a step; at the ends, what the stored scale and the zero were rounded by comes on top
                    ends = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[
                        dtype
                    ] * 2**scheme.bits
                    assert lost.max() <= 0.501 + ends + (0 if scheme.symmetric else 0.5), (scheme, dtype)


def check_packing(module):
    nibbles = torch.tensor(
        [[2, 10, 11, 6, 15, 0, 7, 8, 1]], dtype=torch.uint8
    )  # -6, 2, 3, -2, 7, -8, -1, 0, -7
    words = module.pack(nibbles)
    by_hand = [
        sum(int(n) << 4 * j for j, n in enumerate(nibbles[0, :8])),
        1 | sum(8 << 4 * j for j in range(1, 8)),
    ]
    assert [w & 0xFFFFFFFF for w in words[0].tolist()] == by_hand
    for k in (1, 7, 8, 9, 576):
        nibbles = (torch.arange(3 * k).view(3, k) * 7 % 16).to(torch.uint8)
        words = module.pack(nibbles)
        assert words.dtype == torch.int32 and words.shape == (3, math.ceil(k / 8))
        assert torch.equal(module.unpack(words, k), nibbles)
        assert torch.equal(module.unpack(words.repeat(1, 2)[:, : words.shape[1]], k), nibbles)  # strided rows


def check_layer(module):
    x = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(1))
    for bits, group, symmetric in ((4, 8, True), (4, None, False), (8, 8, False), (8, None, True)):
        scheme, w = module.Scheme(bits, group, symmetric), weights((6, 20))
        order = torch.randperm(20, generator=torch.Generator().manual_seed(2))
        bias = torch.arange(6.0)
        parts = module.quantize(w[:, order], scheme)
        layer = module.QuantLinear.of(*parts, scheme, bias, order)
        expected = torch.empty(6, 20)
        expected[:, order] = module.restore(*parts, scheme)
        assert torch.equal(layer.dequantize(), expected)
        torch.testing.assert_close(layer(x), linear(x, expected, bias))
        torch.testing.assert_close(layer(x[0, 0]), linear(x[0, 0], expected, bias))
        groups = len(parts[1][0])
        held = (
            6 * (math.ceil(20 / 8) * 4 if bits == 4 else 20)
            + 6 * groups * (4 + (not symmetric))
            + 20 * 8
            + 6 * 4
        )
        assert layer.nbytes == held


def check_folding(module, dtype=torch.float64):
    """A layer with grouped heads computes the same before and after, whatever is scaled."""
    layer = small_layer(dtype)
    x = torch.randn(4, 12, dtype=dtype, generator=torch.Generator().manual_seed(3))
    before = through(layer, x)
    for i, feed in enumerate(module.FEEDS):
        heads = module.heads_of(layer, feed)
        factors = torch.rand(heads[0] * heads[2], generator=torch.Generator().manual_seed(i)) * 3 + 0.2
        weight = layer.get_submodule(feed.names[0]).weight.clone()
        module.fold(layer, feed, factors)
        assert not torch.equal(weight, layer.get_submodule(feed.names[0]).weight)
        torch.testing.assert_close(through(layer, x), before, rtol=1e-4, atol=1e-5)


def small_layer(dtype):
    config = ModelConfig(
        vocab_size=16, hidden_size=12, intermediate_size=10, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=2,
        family="llama", tied=True, rope=RopeConfig(10_000.0), norm_eps=1e-5, context=64, qkv_bias=True, mlp_bias=True,
    )  # fmt: skip
    layer, generator = Layer(config, 0), torch.Generator().manual_seed(4)
    for weight in layer.parameters():
        weight.requires_grad_(False).copy_(torch.randn(weight.shape, generator=generator))
    return layer.to(dtype)


def through(layer, x):
    """Attention that sees only itself is v, repeated over the heads: enough to tell where a channel goes."""
    attention, mlp = layer.self_attn, layer.mlp
    norm = lambda x, m: x / x.square().mean(-1, keepdim=True).sqrt() * m.weight
    call = lambda m, x: linear(x, m.weight, m.bias)
    y = norm(x, layer.input_layernorm)
    q, k, v = (call(m, y) for m in (attention.q_proj, attention.k_proj, attention.v_proj))
    seen = v.view(len(x), 2, 1, 2).expand(-1, 2, 3, 2).flatten(1) * (q.sum() + k.sum()).cos()
    x = x + call(attention.o_proj, seen)
    y = norm(x, layer.post_attention_layernorm)
    return x + call(mlp.down_proj, call(mlp.gate_proj, y).sigmoid() * call(mlp.up_proj, y))


CHECKS = [check_rounding, check_packing, check_layer, check_folding]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_right(check):
    check(quantization)


WRONG = [
    ("cut off, not rounded", ".round_().add_(zeros)", ".trunc_().add_(zeros)", check_rounding),
    ("two's complement nibbles", "LOWEST = {4: 0, 8: -128}", "LOWEST = {4: -8, 8: -128}", check_rounding),
    ("a middle of 7", "MIDDLE = {4: 8, 8: 0}", "MIDDLE = {4: 7, 8: 0}", check_rounding),
    ("clipped to half the range", "low + 2**self.bits - 1", "low + 2 ** (self.bits - 1)", check_rounding),
    ("negative weights do not count", "2 * torch.maximum(high, -low)", "2 * high.clamp_min(0.1)", check_rounding),
    ("the zero point moves the wrong way", "(lowest - low / scales.float())", "(lowest + low / scales.float())",
     check_rounding),
    ("integers from a scale nobody stores", ".clamp_min(torch.finfo(dtype).tiny).to(dtype)",
     ".clamp_min(torch.finfo(dtype).tiny).mul(1.02).to(dtype)", check_rounding),
    ("the last, short group is lost", "(0, -k % columns)", "(0, -(k % columns))", check_rounding),
    ("the neighbour's scale", "x.repeat_interleave(columns, 1)[:, :k]",
     "x.roll(1, 1).repeat_interleave(columns, 1)[:, :k]", check_rounding),
    ("scales repeat instead of standing for a group", "x.repeat_interleave(columns, 1)[:, :k]",
     "x.repeat(1, columns)[:, :k]", check_rounding),
    ("high nibble first", "low | high << 4", "high | low << 4", check_packing),
    ("unpacked the other way round", "(data & 15, data >> 4)", "(data >> 4, data & 15)", check_packing),
    ("padding is not zero's nibble", "value=MIDDLE[4]", "value=0", check_packing),
    ("the order turned around", "index_copy_(1, self.order, weight)",
     "copy_(weight[:, self.order])", check_layer),
    ("activations are not reordered", "(x if self.order is None else x[..., self.order])", "(x)", check_layer),
    ("the bias forgotten", "self.group, self.bias)", "self.group, None)", check_layer),
    ("the zeros forgotten", "self.scales, self.zeros, self.group", "self.scales, None, self.group", check_layer),
    ("folded on one side only", "x.copy_(x.float() / ", "x.copy_(x.float() / 1.0 / 1.0 if True else ", check_folding),
    ("the bias of what comes before stays", 'getattr(before, "bias", None)', "None", check_folding),
    ("query heads take another head's factor", "view(G, 1, D).expand(G, R, D)",
     "view(1, G, D).expand(R, G, D)", check_folding),
    ("both sides multiplied", "x.float() / factors", "x.float() * factors", check_folding),
]  # fmt: skip


@pytest.mark.parametrize("what, right, wrong, check", WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_version_is_noticed(what, right, wrong, check):
    module = wrong_version(quantization, right, wrong)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check(module)


# ---------------------------------------------------------------- by hand
def test_every_four_bit_number_comes_back():
    w = torch.arange(-8.0, 8.0)[None] * 0.5
    integers = Scheme(4).round(w, torch.tensor([[0.5]]))
    assert torch.equal(Scheme(4).restore(unpack(pack(integers), 16), torch.tensor([[0.5]])), w)


def test_groups_that_do_not_divide_the_row():
    w = torch.cat([torch.full((1, 8), 1.0), torch.full((1, 8), 10.0), torch.full((1, 4), 100.0)], 1)
    _, scales, _ = quantize(w, Scheme(4, 8))
    assert scales[0].tolist() == pytest.approx([1 / 7.5, 10 / 7.5, 100 / 7.5])
    assert quantize(w[:, :8], Scheme(4, 128))[1].shape == (1, 1)  # a group longer than the row is the row


def test_a_row_of_zeros_stays_zeros():
    for scheme in SCHEMES:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            layer = QuantLinear.of(*quantize(torch.zeros(2, 20, dtype=dtype), scheme), scheme)
            assert not layer.dequantize().any() and torch.isfinite(layer.scales).all()


def test_from_float_takes_weight_and_bias():
    layer = Linear(20, 3)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    made = from_float(layer, Scheme(8, 8))
    assert not hasattr(made, "weight") and not any(p.requires_grad for p in made.parameters())
    assert (made.in_features, made.out_features, made.bits, made.group) == (20, 3, 8, 8)
    torch.testing.assert_close(made(torch.eye(20)), layer(torch.eye(20)).detach(), rtol=0, atol=0.02)


# ---------------------------------------------------------------- refused
@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Scheme(3), "3 bits"),
        (lambda: Scheme(4, 20), "20 columns"),
        (lambda: Scheme(4, 0), "multiple of 8"),
        (lambda: Scheme(4, -1), "None for the whole row"),
        (lambda: pack(torch.tensor([[16]], dtype=torch.uint8)), "0 to 15"),
        (lambda: quantize(torch.tensor([[1.0, math.nan]]), Scheme(8)), "1 of 2 weights"),
        (lambda: quantize(torch.tensor([[1.0, math.inf]]), Scheme(8)), "not finite"),
        (
            lambda: QuantLinear(
                torch.zeros(2, 8, dtype=torch.int8), torch.ones(2, 2), None, None, None, 8, Scheme(8)
            ),
            r"scales is \[2, 2\]",
        ),
        (
            lambda: QuantLinear(
                torch.zeros(2, 8, dtype=torch.int8),
                torch.ones(2, 1),
                None,
                torch.arange(7),
                None,
                8,
                Scheme(8),
            ),
            r"needs \[8\]",
        ),
    ],
)
def test_refused_with_the_way_out(make, words):
    with pytest.raises(ValueError, match=words):
        make()
