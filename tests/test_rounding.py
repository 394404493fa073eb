"""Notebook 09's experiments and figures: a model is put back as it was, and what is drawn is what was measured."""

import json

import matplotlib.pyplot as plt
import pytest
import torch
from wrong_versions import wrong_version

from minserve.calibration import quantize_model
from minserve.config import ModelConfig, RopeConfig
from minserve.engine import LLM
from minserve.lab import figures, quantization_figures, rounding
from minserve.lab.quality import logits_of, quality
from minserve.model import Model
from minserve.quantization import FEEDS, QuantLinear, Scheme, from_float
from minserve.smoothquant import W8A8Linear

plt.switch_backend("Agg")
CONFIG = ModelConfig(
    family="llama", vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=4, norm_eps=1e-5, rope=RopeConfig(100.0), context=64, tied=True, windows=(None, None),
)  # fmt: skip
TEXT = [7 * i % 61 for i in range(50)]
SCHEME = Scheme(4, 8)


@pytest.fixture
def model():
    model = Model.random(CONFIG, torch.float32, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.4 * noise if name.endswith("norm.weight") else 0.3 * noise)
    return model


# ---------------------------------------------------------------- one group, one word
def test_by_hand():
    assert rounding.scale_and_zero(-1.0, 2.0) == (pytest.approx(0.2), 5)
    assert rounding.scale_and_zero(3.0, 6.0) == (pytest.approx(0.4), 0)
    assert rounding.weight_of(0x76543210, 3, 8, 0.5) == -2.5
    assert rounding.weight_of(-0x12345678, 7, 0, 1.0) == 0xE


def test_a_sweep_counts_all_that_is_stored():
    bits, errors = rounding.sweep(
        torch.randn(6, 64), [Scheme(4), Scheme(4, 8), Scheme(4, 8, False), Scheme(8)]
    )
    assert bits == [4 + 16 / 64, 6, 7, 8 + 16 / 64]
    assert errors[0] > errors[1] > errors[3]


# ---------------------------------------------------------------- trials
def changes_and_returns(module, model):
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trials = module.Trials(model, TEXT)
    assert trials.quality()[0] == 0
    asked = []
    kl, perplexity = trials.quality(lambda name, weight: asked.append(name) or module.rounded(weight, SCHEME))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert {f"{name}.weight" for name in asked} == {name for name in before if "_proj" in name}
    for name in asked:
        linear = model.get_submodule(name)
        linear.weight.copy_(module.rounded(linear.weight, SCHEME))
    assert (kl, perplexity) == quality(model, trials.reference, TEXT) and kl > 1e-3


def test_weights_are_changed_and_put_back(model):
    changes_and_returns(rounding, model)


def test_they_are_put_back_after_an_error_too(model):
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        rounding.Trials(model, TEXT).quality(lambda name, weight: 0 * weight if "q_proj" in name else 1 // 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def hears(module, model):
    trials = module.Trials(model, TEXT)
    ids = (TEXT * 11)[:520]  # more than a window
    squares, largest = trials.listen(ids)
    assert set(squares) == set(largest) == set(trials.linears)
    name = "layers.1.mlp.down_proj"
    x = trials.inputs(name, ids)
    assert x.shape == (520, 40) and torch.equal(largest[name], x.abs().amax(0))
    assert torch.allclose(squares[name], x.square().sum(0), rtol=1e-5)
    assert not any(linear._forward_pre_hooks for linear in trials.linears.values())
    seen = module.hessians(model, 1, ids)
    assert set(seen) == set(FEEDS) and torch.allclose(seen[FEEDS[1]], x.T @ x, rtol=1e-3, atol=1e-2)


def test_what_linears_read(model):
    hears(rounding, model)


WRONG = [
    (changes_and_returns, "self._set(lambda name, weight: weight)", "pass"),
    (changes_and_returns, ".weight.detach().clone()", ".weight.detach()"),
    (changes_and_returns, "change(name, self.full[name])", "change(name, linear.weight * 1.01)"),
    (hears, "squares.get(name, 0) + x.square()", "x.square()"),
    (hears, "x.abs().amax(0), largest.get(name", "x.amax(0), largest.get(name"),
    (hears, "                hook.remove()", "                pass"),
    (hears, "model.layers[:number]", "model.layers[:0]"),
]


@pytest.mark.parametrize("test, old, new", WRONG, ids=[new.strip() for _, _, new in WRONG])
def test_wrong_trials_are_noticed(test, old, new, model):
    with pytest.raises(AssertionError):
        test(wrong_version(rounding, old, new), model)


# ---------------------------------------------------------------- the whole model
def test_integers_everywhere_and_what_smoothing_leaves(model):
    trials = rounding.Trials(model, TEXT)
    _, largest = trials.listen(TEXT)
    for peaks in None, largest:
        made = rounding.integers_everywhere(Model.random(CONFIG, torch.float32), peaks)
        assert sum(isinstance(module, W8A8Linear) for module in made.modules()) == 14
    rounding.integers_everywhere(model, largest)
    assert 0 < quality(model, trials.reference, TEXT)[0] < 0.05


def test_dense_is_the_same_model_without_packing(model):
    quantize_model(model, "rtn", SCHEME, progress=False)
    packed = logits_of(model, TEXT)[0]
    assert (
        rounding.read_bytes(model)
        == sum(x.numel() * x.element_size() for x in [*model.parameters(), *model.buffers()]) - 61 * 24 * 4
    )
    dense = rounding.dense(model)
    assert not any(isinstance(module, QuantLinear) for module in dense.modules())
    assert torch.allclose(logits_of(dense, TEXT)[0], packed, atol=1e-4)


def test_dense_keeps_a_bias_and_the_inputs_order():
    linear = torch.nn.Linear(16, 8).requires_grad_(False)
    its = from_float(linear, SCHEME)
    holder = torch.nn.Module()
    holder.dtype, holder.one = (
        torch.float32,
        QuantLinear(its.qweight, its.scales, None, torch.randperm(16), linear.bias, 16, SCHEME),
    )
    x = torch.randn(3, 16)
    expected = holder.one(x)
    assert torch.allclose(rounding.dense(holder).one(x), expected, atol=1e-5)


def test_what_was_recorded_is_read(tmp_path):
    assert "bench quality" in rounding.recorded(tmp_path / "x.json")[0]
    rows = [("INT8: 0.005 nats / KL", 1.0), ("full: perplexity", 9.0)]
    rows += [
        ("INT4: KL", 0.25),
        ("INT4: perplexity", 12.5),
        ("INT4: weights held", 3e6),
        ("INT4: greedy", 0.5),
    ]
    data = {"where": "here", "rows": [{"case": case, "median": median} for case, median in rows]}
    (tmp_path / "x.json").write_text(json.dumps(data))
    head, line = rounding.recorded(tmp_path / "x.json")
    assert "here" in head and line.split() == ["INT4", "0.2500", "12.50", "3", "50%"]


def test_what_a_step_reads(model):
    assert rounding.read_bytes(model) == CONFIG.num_params_read * 4


def test_steps_are_timed(model):
    decode, prompt = rounding.step_seconds(model, rows=3, prompt=5, new=4)
    assert 0 < decode < 60 and 0 < prompt < 60


def test_work_is_timed_in_turn_and_the_best_kept(monkeypatch):
    asked, taken = [], iter([5.0, 7.0, 4.0, 8.0, 1.0, 2.0, 3.0, 1.5])
    monkeypatch.setattr(rounding, "step_seconds", lambda *args, runs: asked.append(args) or [next(taken)] * 2)
    assert rounding.work_seconds({"a": "A", "b": "B"}, (3,), prompt=20) == {"a": [4, 1], "b": [7, 1.5]}
    assert asked == [("A", 3, 8, 8), ("B", 3, 8, 8)] * 2 + [("A", 1, 20, 2), ("B", 1, 20, 2)] * 2


def test_slow_steps_are_not_waited_for(model, monkeypatch):
    engines = []
    monkeypatch.setattr(
        rounding, "LLM", lambda *args, **more: engines.append(LLM(*args, **more)) or engines[-1]
    )
    rounding.step_seconds(model, rows=2, prompt=4, new=40, at_most=0)
    assert [len(llm.log) for llm in engines] == [3, 3]


# ---------------------------------------------------------------- figures
def shown(ax) -> dict:
    return {
        line.get_label(): [list(x) for x in line.get_data()]
        for line in ax.lines
        if not line.get_label().startswith("_")
    }


def title_fits(ax) -> None:
    ax.figure.canvas.draw()
    for text in [ax._left_title, *ax.texts]:
        assert text.get_window_extent().x1 <= ax.figure.bbox.x1, text.get_text()


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_lines_are_told_apart():
    ax = quantization_figures.lines(
        figures.axes(), {c: ([1, 2], [3, 4]) for c in "abcd"}, "x", "y", ylim=(0, 9)
    )
    kinds = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.lines}
    assert len(kinds) == 4 and ax.get_ylim() == (0, 9)
    with pytest.raises(ValueError, match="5 lines"):
        quantization_figures.lines(figures.axes(), {c: ([1], [1]) for c in "abcde"}, "x", "y")


def test_groups():
    curves = {"a": ([4.0, 4.5], [0.2, 0.1]), "b": ([4.0, 4.7], [0.19, 0.08])}
    quantization_figures.groups(ax := figures.axes(6.6, 3.2), curves, (None, 32))
    assert shown(ax) == {name: [*map(list, its)] for name, its in curves.items()}
    assert {"whole row", "32"} <= {text.get_text() for text in ax.texts}
    assert ax.get_title("left") == "Groups of 32: 2.0 times less error for 0.5 bits more"
    title_fits(ax)


def test_searches():
    curves = {"q, k, v": [1.0, 0.4, 2.0], "o": [1.0, 0.3, 0.2]}
    best = quantization_figures.searches(ax := figures.axes(6.6, 3.1), [0, 0.5, 1], curves, "q, k, v", "here")
    assert best == (0.4, 0.5) and "exponent 0.5 leaves 40%" in ax.get_title("left")
    title_fits(ax)


def test_moved():
    weight = torch.zeros(2, 48)
    nearest, clever = torch.full((2, 48), 1.0), torch.full((2, 48), 2.0)
    hessian = torch.diag(torch.ones(48))
    _, pair = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    far, close = quantization_figures.moved(*pair, weight, hessian, nearest, clever)
    assert (far, close) == (4, 0.25)
    assert set(shown(pair[0])) == {"RTN", "GPTQ"} and shown(pair[0])["GPTQ"][1] == [2.0] * 4
    assert pair[1].collections[0].get_offsets().tolist() == [[48, 192]] * 2
    for ax in pair:
        title_fits(ax)


def test_channels():
    sides = {"before": torch.tensor([127.0, 1.0, 1.0]), "after": torch.tensor([2.0, 1.0, 1.0])}
    quantization_figures.channels(ax := figures.axes(6.6, 3), sides, "here")
    assert shown(ax)["before"] == [[1, 2, 3], [127, 1, 1]]
    assert ax.get_title("left") == "The median channel gets 1 of 127 integers; smoothed, 64"
    title_fits(ax)


def test_speedups():
    seconds = {"bf16": [2.0, 4.0, 9.0], "INT8": [1.0, 4.0, 9.0], "INT4": [0.5, 4.0, 18.0]}
    gains = quantization_figures.speedups(ax := figures.axes(6.6, 3), (1, 64), seconds, "here")
    assert gains == [4, 1, 0.5] == shown(ax)["INT4"][1]
    assert ax.get_title("left") == "INT4: 4.0 times as fast alone, 1.0 with 64, 0.5 for a prompt"
    title_fits(ax)
