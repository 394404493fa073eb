"""A model's weights in fewer bits, layer by layer, in place, with one layer's inputs in memory.

    residuals of all calibration tokens                          [tokens, E]
    for each layer:
        run it, and sum x x^T of what its linears read           four Hessians: o, down, qkv, gate and up
        round its linears                                        rtn, gptq, awq; w8a8, smoothquant
        run it again, rounded: its output is the next layer's input, so later layers see the errors of earlier ones

Every linear of the layers is quantized. The head, which is not calibrated, gets `head`'s scheme by rounding to
nearest, 8 bits per channel unless told otherwise; one that was tied to the embedding is untied, and the embedding
stays as it was.

Memory   beside the model, tokens * E * itemsize bytes, and of one layer the Hessians (4 K^2 bytes each) and about
         three copies of a weight in fp32
Cost     two forward passes over the calibration and 2 K^2 flops a token and Hessian, then what the method costs
Refused  unknown methods, a model that is quantized already, fewer tokens than a linear has inputs, too long ones
Story    notebooks/09_quantization.ipynb
"""

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from minserve import awq, smoothquant
from minserve.gptq import check_hessian, gptq
from minserve.kernels.prefill_attention import prefill_attention
from minserve.kernels.rms_norm import add_rms_norm, rms_norm
from minserve.model import Model
from minserve.quantization import FEEDS, Feed, QuantLinear, Scheme, output_error, quantize
from minserve.smoothquant import W8A8Linear

METHODS = ("rtn", "gptq", "awq", "w8a8", "smoothquant")
HEAD = Scheme(8)  # how the head is rounded, unless told otherwise
UNCALIBRATED = ("rtn", "w8a8")
FOLDING = ("awq", "smoothquant")  # they scale weights, which 16 bits would round
LINEARS = [name for feed in FEEDS for name in feed.names]
TOKENS = 8192  # four times as many made nothing better
WINDOW = 512  # tokens of a calibration sequence
CALIBRATED = 2 / 3  # of the built-in text; what is evaluated comes from behind EVALUATED
EVALUATED = 3 / 4


@dataclass(frozen=True)
class Loss:
    """What rounding one linear cost: the squared error of its outputs, as a share of their squares."""

    name: str
    rtn: float  # rounded to nearest
    error: float  # by the method


@dataclass
class Quantized:
    """What was done to a model."""

    method: str
    scheme: Scheme
    tokens: int
    bytes_before: int
    bytes_after: int = 0
    seconds: float = 0.0
    layers: list[float] = field(default_factory=list)  # seconds of each
    losses: list[Loss] = field(default_factory=list)

    def __str__(self):
        text = (
            f"{self.method} {self.scheme}: {self.bytes_before / 1e6:,.0f} MB to {self.bytes_after / 1e6:,.0f} MB in "
            f"{self.seconds:,.1f} s"
        )
        if self.losses:
            ratios = sorted(loss.error / max(loss.rtn, 1e-30) for loss in self.losses)
            text += (
                f", {self.tokens:,} calibration tokens\n  error on them, of what rounding to nearest makes: median "
                f"{ratios[len(ratios) // 2]:.0%}, worst {ratios[-1]:.0%} of {len(ratios)} linears"
            )
        return text


# ---------------------------------------------------------------- the whole model
@torch.no_grad()
def quantize_model(
    model: Model, method: str, scheme: Scheme, batches=(), head: Scheme | None = HEAD, *,
    act_order: bool = False, damping: float = 0.01, alpha: float = 0.5, progress: bool = True,
) -> Quantized:  # fmt: skip
    """Quantize in place. `batches`: token lists (see calibration_text), which only "rtn" and "w8a8" do without.

    Raises ValueError. Where it names a layer, those before it are quantized already: load the model anew.
    """
    check(model, method, scheme, batches, act_order)
    start, calibrated = time.perf_counter(), method not in UNCALIBRATED
    done = Quantized(method, scheme, sum(map(len, batches)) if calibrated else 0, held_bytes(model))
    walk = Walk(model, batches) if calibrated else None
    rounding = dict(act_order=act_order, damping=damping)
    for i, layer in enumerate(tqdm(model.layers, f"{method} {scheme}", unit="layer", disable=not progress)):
        began, seen = time.perf_counter(), walk.observe(layer) if walk else {}
        made: dict[str, nn.Module] = {}
        if method in FOLDING:
            set_weights(layer, {name: layer.get_submodule(name).weight.float() for name in LINEARS})
        for feed in FEEDS:
            try:
                if method in ("w8a8", "smoothquant"):
                    made |= integer_linears(layer, feed, seen.get(feed), alpha)
                else:
                    made |= rounded(layer, feed, seen.get(feed), method, scheme, done.losses, i, **rounding)
            except ValueError as error:
                raise ValueError(f"layer {i}, {' and '.join(feed.names)}: {error}") from None
        if walk:
            set_weights(layer, {name: linear.dequantize().to(model.dtype) for name, linear in made.items()})
            walk.advance(layer)
        for name, linear in made.items():
            layer.set_submodule(name, linear)
        done.layers.append(time.perf_counter() - began)
    if head:
        quantize_head(model, head)
    done.bytes_after, done.seconds = held_bytes(model), time.perf_counter() - start
    return done


def set_weights(layer, weights: dict[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        layer.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)


def rounded(layer, feed: Feed, seen, method, scheme, losses: list, number: int, act_order, damping) -> dict:
    """{name: QuantLinear} of one feed; what it cost is added to `losses`."""
    hessian = seen and seen.hessian
    dtype = layer.input_layernorm.weight.dtype  # of the model: a layer's linears may be in fp32 for the time
    result = quantize(feed.weight(layer), scheme, dtype)
    if seen:
        check_hessian(hessian, feed.weight(layer).shape[1])
        baseline = lost(layer, feed, linears(layer, feed, scheme, *result), hessian)
    if method == "awq":
        hessian = awq.scale(layer, feed, hessian, scheme, dtype)
        result = awq.clipped(feed.weight(layer), hessian, scheme, dtype)
    if method == "gptq":
        result = gptq(feed.weight(layer), hessian, scheme, damping, act_order=act_order)
    made = linears(layer, feed, scheme, *result)
    if seen:
        errors = lost(layer, feed, made, hessian)
        losses += [Loss(f"layers.{number}.{name}", baseline[name], errors[name]) for name in made]
    return made


def linears(layer, feed: Feed, scheme: Scheme, integers, scales, zeros, order=None) -> dict[str, QuantLinear]:
    """The stacked result of a feed as one QuantLinear for each of its linears."""
    biases = [layer.get_submodule(name).bias for name in feed.names]
    sizes = [layer.get_submodule(name).out_features for name in feed.names]
    parts = [[None] * len(sizes) if x is None else x.split(sizes) for x in (integers, scales, zeros)]
    return {
        name: QuantLinear.of(*(x.clone() if x is not None else None for x in part), scheme, bias, order)
        for name, bias, *part in zip(feed.names, biases, *parts)
    }


def lost(layer, feed: Feed, made: dict, hessian) -> dict[str, float]:
    """Squared error of each linear's outputs, as a share of their squares."""
    shares = {}
    for name, linear in made.items():
        weight = layer.get_submodule(name).weight.float()
        error, size = (output_error(w, hessian).sum() for w in (weight - linear.dequantize(), weight))
        shares[name] = float(error / size.clamp_min(1e-30))
    return shares


def integer_linears(layer, feed: Feed, seen, alpha: float) -> dict[str, W8A8Linear]:
    if seen:
        smoothquant.smooth(layer, feed, seen.largest, alpha)
    return {name: W8A8Linear(layer.get_submodule(name)) for name in feed.names}


def quantize_head(model: Model, scheme: Scheme) -> None:
    """The head's own weight, rounded to nearest; the embedding it may have shared stays as it was."""
    model.lm_head = QuantLinear.of(*quantize(model.head.detach(), scheme), scheme)
    model.config = replace(model.config, tied=False)


def held_bytes(model: Model) -> int:
    return sum(x.numel() * x.element_size() for x in [*model.parameters(), *model.buffers()])


def check(model: Model, method: str, scheme: Scheme, batches, act_order: bool) -> None:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    if act_order and method != "gptq":
        raise ValueError(f"act-order is the order in which gptq rounds columns; {method} has none")
    if method in ("w8a8", "smoothquant") and scheme != Scheme(8):
        raise ValueError(f"{method} multiplies int8 per channel, symmetric: pass Scheme(8), not {scheme}")
    if any(isinstance(module, QuantLinear | W8A8Linear) for module in model.modules()):
        raise ValueError(
            "this model is quantized already, and rounding twice only loses more: start from the full one"
        )
    if method in UNCALIBRATED:
        return
    tokens, widest = sum(map(len, batches)), max(model.config.hidden_size, model.config.intermediate_size)
    if tokens < widest:
        raise ValueError(
            f"{tokens:,} calibration tokens cannot tell {widest:,} inputs of a linear apart: give at least "
            f"{widest:,}, better {TOKENS:,} (calibration_text), or use method 'rtn', which needs none"
        )
    if (longest := max(map(len, batches))) > model.config.context:
        raise ValueError(
            f"a calibration sequence of {longest:,} tokens does not fit the context of {model.config.context:,}: cut "
            f"it into pieces of {WINDOW}"
        )


# ---------------------------------------------------------------- what the linears read
class Seen(NamedTuple):
    hessian: torch.Tensor  # fp32 [K, K], sum of x x^T
    largest: torch.Tensor  # fp32 [K], max|x|


class Walk:
    """The calibration's tokens on their way through the model: before layer 0 at first, then behind each."""

    def __init__(self, model: Model, batches):
        self.config = model.config
        self.residuals = [model.embed_tokens(torch.tensor(ids, device=model.device)) for ids in batches]
        self.turns = model.rotations(torch.arange(max(map(len, batches)), device=model.device))

    def observe(self, layer) -> dict[Feed, Seen]:
        """Run a layer for what its linears read."""
        seen, handles = {}, []
        for feed in FEEDS:
            first = layer.get_submodule(feed.names[0])
            zeros = first.weight.new_zeros(first.in_features, dtype=torch.float32)
            seen[feed] = Seen(torch.diag(zeros), zeros)
            handles.append(first.register_forward_pre_hook(partial(self._add, seen[feed])))
        for residual in self.residuals:
            self._through(layer, residual)
        for handle in handles:
            handle.remove()
        return seen

    @staticmethod
    def _add(seen: Seen, module, inputs) -> None:
        x = inputs[0].float()
        seen.hessian.addmm_(x.T, x)
        torch.maximum(seen.largest, x.abs().amax(0), out=seen.largest)

    def advance(self, layer) -> None:
        self.residuals = [self._through(layer, residual) for residual in self.residuals]

    def _through(self, layer, residual):
        eps, turns = self.config.norm_eps, [x[: len(residual)] for x in self.turns]
        x = rms_norm(residual, layer.input_layernorm.weight, eps)
        x = layer.self_attn(x, *turns, self._attend)
        x, residual = add_rms_norm(x, residual, layer.post_attention_layernorm.weight, eps)
        return residual + layer.mlp(x)

    def _attend(self, layer: int, q, k, v):
        starts = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
        return prefill_attention(q, k, v, starts, starts, len(q), self.config.windows[layer])


# ---------------------------------------------------------------- text
def calibration_text(tokenizer, tokens: int = TOKENS, window: int = WINDOW, text: str | None = None):
    """Token lists of `window`, taken evenly from the first part of what every Python has: its own manual."""
    if text is None:
        text = manual()
        text = text[: int(len(text) * CALIBRATED)]
    ids = tokenizer.encode(text)
    has, wants = len(ids) // window, max(1, tokens // window)
    if has < wants:
        raise ValueError(
            f"the calibration text has {len(ids):,} tokens, {has:,} sequences of {window}; {tokens:,} tokens are "
            f"{wants:,} sequences.\n  Give a longer text, or ask for at most {has * window:,} tokens."
        )
    starts = [i * has // wants * window for i in range(wants)]
    return [ids[start : start + window] for start in starts]


def evaluation_text(tokenizer, tokens: int) -> list[int]:
    """The end of the same text, which no calibration has seen; from the last `tokens` on."""
    text = manual()
    ids = tokenizer.encode(text[int(len(text) * EVALUATED) :])
    if len(ids) < tokens:
        raise ValueError(f"the evaluation text has {len(ids):,} tokens: ask for no more than those")
    return ids[-tokens:]


def manual() -> str:
    """Half a megabyte of English; it differs between versions of Python, so compare within one only."""
    from pydoc_data.topics import topics  # as large as it is, only for who calibrates

    return "\n\n".join(topics[name] for name in sorted(topics))
