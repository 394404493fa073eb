"""A model quantized layer by layer: what is measured, what each layer sees, what is kept, what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from wrong_versions import wrong_version

from minserve import awq, calibration, weights
from minserve.calibration import calibration_text, evaluation_text, manual
from minserve.config import ModelConfig, RopeConfig
from minserve.gptq import gptq
from minserve.lab.quality import logits_of, quality
from minserve.model import Model
from minserve.prefill_decode import attend_afresh
from minserve.quantization import FEEDS, QuantLinear, Scheme
from minserve.text import Tokenizer

CONFIG = ModelConfig(
    family="llama", vocab_size=61, hidden_size=24, intermediate_size=20, num_layers=3, num_heads=6, num_kv_heads=2,
    head_dim=4, norm_eps=1e-5, rope=RopeConfig(100.0), context=64, tied=True, qkv_bias=True, mlp_bias=True,
    windows=(None, 8, None),
)  # fmt: skip
INT4 = Scheme(4, 8)


def tiny(dtype=torch.float32, **changes) -> Model:
    model = Model.random(replace(CONFIG, **changes), dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    for (
        name,
        weight,
    ) in model.named_parameters():  # so that layers matter, norms have a shape, biases are there
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.4 * noise if name.endswith("norm.weight") else 0.3 * noise)
    return model


def batches(seed=0, lengths=(40, 33, 64)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(61, (n,), generator=generator).tolist() for n in lengths]


def logits(model, ids):
    positions = torch.arange(len(ids))
    return model(torch.tensor(ids), positions, attend_afresh(model.config))


def inputs_of(model, layer: int) -> dict:
    """What the linears of a layer read when the whole model runs, one below the other: {feed: [tokens, K]}"""
    seen, handles = {feed: [] for feed in FEEDS}, []
    for feed in FEEDS:
        first = model.layers[layer].get_submodule(feed.names[0])
        handles.append(
            first.register_forward_pre_hook(lambda m, x, feed=feed: seen[feed].append(x[0].clone()))
        )
    for ids in batches():
        logits(model, ids)
    for handle in handles:
        handle.remove()
    return {feed: torch.cat(its) for feed, its in seen.items()}


def plain(model: Model) -> Model:
    """The same model with dequantized weights in ordinary linears."""
    copy = tiny(model.dtype, tied=model.config.tied)
    for name, module in model.named_modules():
        mine = copy.get_submodule(name)
        if isinstance(module, QuantLinear):
            mine.weight = nn.Parameter(module.dequantize().to(model.dtype), requires_grad=False)
            mine.bias = module.bias
        elif getattr(module, "weight", None) is not None:
            mine.weight = module.weight
    return copy


# ---------------------------------------------------------------- the checks
def check_whole_model(module):
    full = {name: m for name, m in tiny().named_modules() if name.endswith(("q_proj", "v_proj", "up_proj"))}
    for method in ("rtn", "gptq", "awq"):
        for scheme, act_order in ((INT4, False), (Scheme(4, 16, False), True), (Scheme(8, None), False)):
            model = tiny()
            embedding, held = model.embed_tokens.weight.clone(), module.held_bytes(model)
            report = module.quantize_model(
                model, method, scheme, batches(), act_order=act_order and method == "gptq", progress=False
            )
            layers = [m for name, m in model.named_modules() if name.endswith("_proj")]
            assert len(layers) == 21 and all(m.scheme == scheme for m in layers)
            assert all((m.order is not None) == (method == "gptq" and act_order) for m in layers)
            assert model.lm_head.scheme == Scheme(8) and not model.config.tied
            assert torch.equal(model.embed_tokens.weight, embedding)
            assert report.bytes_before == held and report.bytes_after == module.held_bytes(model)
            assert report.seconds > 0 and len(report.losses) == (0 if method == "rtn" else 21)
            assert report.tokens == (0 if method == "rtn" else 137)
            if method != "awq":  # which folds factors into some of them
                assert all(model.get_submodule(n).bias is not None for n in full)
                assert all(torch.equal(model.get_submodule(n).bias, m.bias) for n, m in full.items())
            for loss in report.losses:
                assert 0 < loss.rtn < 0.2
                assert loss.error < loss.rtn if method == "gptq" else loss.error <= loss.rtn * 1.0001, (
                    method,
                    loss,
                )
            torch.testing.assert_close(
                logits(model, batches()[0]), logits(plain(model), batches()[0]), rtol=1e-3, atol=1e-3
            )


def check_what_a_layer_sees(module):
    """Hessians are sums of x x^T over the inputs of the real model; later layers see earlier ones rounded."""
    got, model = [], tiny()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module, "gptq", lambda w, h, *args, **kw: got.append(h.clone()) or gptq(w, h, *args, **kw)
        )
        module.quantize_model(model, "gptq", INT4, batches(), head=None, progress=False)
    rounded = plain(model)
    for number in range(3):
        half = tiny()  # layers before this one rounded, this one and later ones not
        for i in range(number):
            half.layers[i] = rounded.layers[i]
        for _, x in inputs_of(half, number).items():
            torch.testing.assert_close(got.pop(0), x.T @ x, rtol=1e-3, atol=1e-3)


def check_awq_inputs(module):
    """AWQ clips for the inputs as they are after folding."""
    got, model = [], tiny()
    recorded = SimpleNamespace(
        scale=awq.scale, clipped=lambda w, h, *args: got.append(h) or awq.clipped(w, h, *args)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "awq", recorded)
        module.quantize_model(model, "awq", Scheme(4, None), batches(), head=None, progress=False)
    folded = tiny()
    for name in ("input_layernorm", "post_attention_layernorm"):
        norm = model.layers[0].get_submodule(name)
        assert not torch.equal(norm.weight, folded.layers[0].get_submodule(name).weight)
        setattr(folded.layers[0], name, norm)
    x = inputs_of(folded, 0)[FEEDS[2]]
    torch.testing.assert_close(got[2], x.T @ x, rtol=1e-3, atol=1e-3)


def check_largest(module):
    model = tiny()
    walk = module.Walk(model, batches())
    seen = walk.observe(model.layers[0])
    for feed, x in inputs_of(model, 0).items():
        torch.testing.assert_close(seen[feed].largest, x.abs().amax(0))


def check_folding(module):
    """awq.scale on all layers, nothing rounded: the model's logits stay."""
    for dtype, within in ((torch.float32, 2e-4), (torch.bfloat16, 0.2)):
        model = tiny(dtype)
        before, walk = logits(model, batches()[0]), module.Walk(model, batches())
        for layer in model.layers:
            seen = walk.observe(layer)
            weight = layer.mlp.down_proj.weight.clone()
            module.set_weights(layer, {n: layer.get_submodule(n).weight.float() for n in module.LINEARS})
            for feed in FEEDS:
                awq.scale(layer, feed, seen[feed].hessian, INT4, dtype)
            module.set_weights(layer, {n: layer.get_submodule(n).weight.to(dtype) for n in module.LINEARS})
            walk.advance(layer)
        assert not torch.equal(weight, layer.mlp.down_proj.weight)
        torch.testing.assert_close(logits(model, batches()[0]), before, rtol=within, atol=within)


def check_integers(module):
    """w8a8 and smoothquant: near the full model, and closer with smoothing where one channel is loud."""
    divergence = {}
    for method in ("w8a8", "smoothquant"):
        model = tiny()
        for layer in model.layers:
            layer.input_layernorm.weight[3] *= 60
            layer.post_attention_layernorm.weight[5] *= 60
            for feed, channel in ((FEEDS[2], 3), (FEEDS[3], 5)):
                for name in feed.names:
                    layer.get_submodule(name).weight[:, channel] /= 60
        reference = [x.clone() for x in logits_of(model, batches()[2])]
        report = module.quantize_model(model, method, Scheme(8), batches(), head=None, progress=False)
        assert not report.losses and model.config.tied
        divergence[method] = quality(model, reference, batches()[2])[0]
    assert divergence["smoothquant"] < 0.2 * divergence["w8a8"], divergence


def check_text(module):
    class Letters:
        def encode(self, text):
            return [ord(c) for c in text]

    windows = module.calibration_text(Letters(), 4096, 64)
    assert len(windows) == 64 and {len(w) for w in windows} == {64}
    text, at = manual(), []
    for window in windows:
        at.append(text.find("".join(map(chr, window))))
    assert at[0] == 0 and all(a >= 0 for a in at) and at[-1] > len(text) // 2
    last = module.evaluation_text(Letters(), 50_000)
    assert "".join(map(chr, last)) == text[-50_000:]
    assert max(at) + 64 < len(text) - len(text) // 4
    own = module.calibration_text(Letters(), 8, 4, text="abcdefghij")
    assert own == [[97, 98, 99, 100], [101, 102, 103, 104]]


CHECKS = [
    check_whole_model, check_what_a_layer_sees, check_awq_inputs, check_largest, check_folding, check_integers,
    check_text,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_right(check):
    check(calibration)


WRONG = [
    ("later layers see the full model",
     "            set_weights(layer, {name: linear.dequantize().to(model.dtype) for name, linear in made.items()})\n",
     "", check_what_a_layer_sees),
    ("every layer sees the embeddings", "            walk.advance(layer)\n", "", check_what_a_layer_sees),
    ("the last sequence only", "seen.hessian.addmm_(x.T, x)", "seen.hessian.copy_(x.T @ x)", check_what_a_layer_sees),
    ("only the diagonal", "seen.hessian.addmm_(x.T, x)", "seen.hessian.add_(torch.diag((x * x).sum(0)))",
     check_what_a_layer_sees),
    ("windows forgotten", "self.config.windows[layer]", "None", check_what_a_layer_sees),
    ("the second residual lost", "return residual + layer.mlp(x)", "return layer.mlp(x)", check_what_a_layer_sees),
    ("sums for maxima", "x.abs().amax(0), out", "x.abs().sum(0), out", check_largest),
    ("the embedding is rounded, too", "model.lm_head = QuantLinear",
     "model.embed_tokens.weight.copy_(QuantLinear.of(*quantize(model.head, scheme), scheme).dequantize())\n"
     "    model.lm_head = QuantLinear", check_whole_model),
    ("still tied", "model.config = replace(model.config, tied=False)", "pass", check_whole_model),
    ("biases forgotten", "[layer.get_submodule(name).bias for name in feed.names]", "[None] * 9", check_whole_model),
    ("the order forgotten", "scheme, bias, order)", "scheme, bias, None)", check_whole_model),
    ("siblings swapped", "zip(feed.names, biases, *parts)", "zip(feed.names[::-1], biases, *parts)",
     check_whole_model),
    ("AWQ only scales", "result = awq.clipped(feed.weight(layer), hessian, scheme, dtype)", "pass", check_whole_model),
    ("AWQ clips for the old inputs", "hessian = awq.scale(layer, feed, hessian, scheme, dtype)",
     "awq.scale(layer, feed, hessian, scheme, dtype)", check_awq_inputs),
    ("no smoothing", "    if seen:\n        smoothquant.smooth", "    if False:\n        smoothquant.smooth",
     check_integers),
    ("evaluated on what calibrates", "return ids[-tokens:]", "return ids[:tokens]", check_text),
    ("the beginning of the text only", "i * has // wants * window", "i * window", check_text),
]  # fmt: skip


@pytest.mark.parametrize("what, right, wrong, check", WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_version_is_noticed(what, right, wrong, check):
    module = wrong_version(calibration, right, wrong)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check(module)


# ---------------------------------------------------------------- refused
def refuse(words, model=None, method="gptq", scheme=INT4, text=None, **more):
    with pytest.raises(ValueError, match=words):
        calibration.quantize_model(model or tiny(), method, scheme, text or batches(), progress=False, **more)


def test_refused_with_the_way_out():
    refuse("'gguf'.*rtn, gptq, awq", method="gguf")
    refuse("awq has none", method="awq", act_order=True)
    refuse("pass Scheme.8., not int4 g8", method="smoothquant")
    refuse("10 calibration tokens cannot tell 24 inputs", text=[[1] * 10])
    refuse("65 tokens does not fit the context of 64", text=[[1] * 65])
    model = tiny()
    calibration.quantize_model(model, "rtn", INT4, progress=False)
    refuse("quantized already", model)
    refuse("quantized already", model, "rtn")
    calibration.quantize_model(model := tiny(), "w8a8", Scheme(8), progress=False)
    refuse("quantized already", model)


def test_an_overflow_names_the_layer():
    model = tiny()
    model.layers[1].post_attention_layernorm.weight[0] = float("inf")
    for method in ("gptq", "awq"):
        with pytest.raises(ValueError, match="(?s)layer 1, mlp.*not finite.*bfloat16") as caught:
            calibration.quantize_model(
                model if method == "gptq" else bent(), method, INT4, batches(), progress=False
            )
        assert "\n" in str(caught.value)


def bent():
    model = tiny()
    model.layers[1].post_attention_layernorm.weight[0] = float("inf")
    return model


def test_too_short_a_text_is_refused_with_the_arithmetic():
    class Words:
        def encode(self, text):
            return text.split()

    with pytest.raises(
        ValueError, match="(?s)100 tokens, 3 sequences of 32; 128 tokens are 4 .*at most 96 tokens"
    ):
        calibration_text(Words(), 128, 32, text="word " * 100)
    with pytest.raises(ValueError, match="ask for no more"):
        evaluation_text(Words(), 10**9)


# ---------------------------------------------------------------- how far from the full model
def test_quality_by_hand():
    model, other, ids = tiny(), tiny(), batches(lengths=(30,))[0]
    other.layers[1].mlp.up_proj.weight.mul_(1.5)
    p, q = (logits(m, ids).double().log_softmax(-1) for m in (model, other))
    kl, perplexity = quality(other, model, ids)
    assert kl == pytest.approx(float((p.exp() * (p - q)).sum() / 30), rel=1e-4) and kl > 1e-3
    mean = sum(-q[i, ids[i + 1]] for i in range(29)) / 29
    assert perplexity == pytest.approx(float(mean.exp()), rel=1e-5)
    assert quality(other, logits_of(model, ids), ids) == (kl, perplexity)
    assert quality(model, model, ids)[0] == 0


# ---------------------------------------------------------------- the real model
@pytest.fixture(scope="module")
def two_layers(smollm):
    """The first two layers of the real model, as a function: quantizing is in place."""

    def get():
        model = weights.load(smollm)
        model.layers = model.layers[:2]
        model.config = replace(model.config, num_layers=2, windows=(None, None))
        return model

    return get, calibration_text(Tokenizer.load(smollm), 2048)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_real_layers_lose_less_than_by_rounding(method, two_layers):
    get, text = two_layers
    report = calibration.quantize_model(get(), method, Scheme(4, 128), text, head=None, progress=False)
    assert len(report.losses) == 14
    for loss in report.losses:
        assert loss.error < loss.rtn, loss
    assert "median" in str(report) and "14 linears" in str(report)


def test_real_layers_still_compute(two_layers):
    """A ragged last group (576 = 4 x 128 + 64), a head of its own: the layers multiply what they dequantize to."""
    get, text = two_layers
    model = get()
    calibration.quantize_model(model, "rtn", Scheme(4, 128), progress=False)
    proj, x = model.layers[0].self_attn.q_proj, torch.randn(3, 576).bfloat16()
    assert proj.scales.shape == (576, 5)
    expected = linear(x.float(), proj.dequantize())
    torch.testing.assert_close(proj(x).float(), expected, rtol=0.02, atol=0.02)
    assert logits(model, text[0][:16]).isfinite().all()
