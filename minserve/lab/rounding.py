"""Rounding experiments on a whole model: change the layers' weights, see what is lost on a text, put them back.

    trials = Trials(model, text)
    trials.quality(change)         (KL, perplexity) with every weight W replaced by change(name, W)
    trials.listen(examples)        what the linears read: sums of x^2, and max|x|, of every channel
    trials.inputs(name, examples)  the inputs themselves, of one linear
    hessians(model, 10, examples)  H = sum of x x^T of what layer 10's linears read, as calibration.py sums it
    rounded(weight, scheme)        [N, K] rounded to nearest, as numbers again
    sweep(weight, schemes)         bits per weight and relative error of each
    integers_everywhere(model)     W8A8 in place, with or without SmoothQuant's migration
    dense(model)                   packed weights as plain ones again, in place
    recorded(path)                 what `bench quality` wrote, a line for each model
    read_bytes(model)              what a decode step reads of the weights
    step_seconds(model, rows)      one decode step of the engine, and the step that reads the prompts
    work_seconds(models, batches)  decode steps of several batches, and a prompt of 512 tokens, models in turn

scale_and_zero and weight_of answer the exercises for one group and one word; they ask quantization.py.

Story    notebooks/09_quantization.ipynb
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

from minserve import smoothquant
from minserve.calibration import LINEARS, WINDOW, Walk, held_bytes
from minserve.engine import LLM
from minserve.lab.quality import logits_of, quality
from minserve.model import Linear, Model
from minserve.quantization import FEEDS, QuantLinear, Scheme, grid, quantize, restore
from minserve.request import SamplingParams


# ---------------------------------------------------------------- one group, one word
def scale_and_zero(low: float, high: float) -> tuple[float, int]:
    """Of 4 bits for a group whose least and largest weight these are."""
    scales, zeros = grid(torch.tensor([[low, high]]), Scheme(4, symmetric=False))
    return scales.item(), zeros.item()


def weight_of(word: int, j: int, zero: int, scale: float) -> float:
    """Weight j of the eight in an int32."""
    held = torch.tensor([[word]], dtype=torch.int32), torch.tensor([[scale]])
    scheme = Scheme(4, symmetric=False)
    return QuantLinear(*held, torch.tensor([[zero]]).byte(), None, None, 8, scheme).dequantize()[0, j].item()


def rounded(weight, scheme: Scheme):
    """fp32 [N, K]: what is left of it; scales in bf16, as a model would store them."""
    return restore(*quantize(weight, scheme, torch.bfloat16), scheme)


def to_nearest(scheme: Scheme) -> Callable:
    """The change that rounds every weight, for Trials.quality."""
    return lambda name, weight: rounded(weight, scheme)


def sweep(weight, schemes) -> tuple[list[float], list[float]]:
    """(bits per weight, all that is stored; the error's share of the weight's norm), one each for every scheme."""
    held = [QuantLinear.of(*quantize(weight, its, torch.bfloat16), its).nbytes for its in schemes]
    errors = [float((rounded(weight, its) - weight).norm() / weight.norm()) for its in schemes]
    return [nbytes * 8 / weight.numel() for nbytes in held], errors


# ---------------------------------------------------------------- a model, changed and put back
class Trials:
    def __init__(self, model: Model, text: list[int]):
        self.model, self.text, self.reference = model, text, logits_of(model, text)
        self.linears = {
            f"layers.{i}.{name}": layer.get_submodule(name)
            for i, layer in enumerate(model.layers)
            for name in LINEARS
        }
        self.full = {name: linear.weight.detach().clone() for name, linear in self.linears.items()}

    def quality(self, change: Callable | None = None) -> tuple[float, float]:
        """(KL in nats, perplexity); afterwards the model is what it was."""
        try:
            if change:
                self._set(change)
            return quality(self.model, self.reference, self.text)
        finally:
            self._set(lambda name, weight: weight)

    @torch.no_grad()
    def _set(self, change: Callable) -> None:
        for name, linear in self.linears.items():
            linear.weight.copy_(change(name, self.full[name]))

    def listen(self, ids: list[int]) -> tuple[dict, dict]:
        """({linear: sum of x^2 [K]}, {linear: max|x| [K]}) over these tokens, in windows."""
        squares, largest = {}, {}

        def hear(name, x):
            squares[name] = squares.get(name, 0) + x.square().sum(0)
            largest[name] = torch.maximum(x.abs().amax(0), largest.get(name, x.new_zeros(())))

        self._hear(self.linears, ids, hear)
        return squares, largest

    def inputs(self, name: str, ids: list[int]):
        """fp32 [tokens, K]"""
        heard = []
        self._hear([name], ids, lambda name, x: heard.append(x))
        return torch.cat(heard)

    def _hear(self, names, ids: list[int], hear: Callable) -> None:
        """Call hear(name, x) with what each of these linears reads, a window at a time."""
        hooks = [
            self.linears[name].register_forward_pre_hook(
                lambda _, read, name=name: hear(name, read[0].float())
            )
            for name in names
        ]
        try:
            logits_of(self.model, ids)
        finally:
            for hook in hooks:
                hook.remove()


@torch.no_grad()
def hessians(model: Model, number: int, ids: list[int]) -> dict:
    """{feed: [K, K]} of one layer, behind the full ones before it."""
    walk = Walk(model, [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)])
    for layer in model.layers[:number]:
        walk.advance(layer)
    return {feed: seen.hessian for feed, seen in walk.observe(model.layers[number]).items()}


@torch.no_grad()
def integers_everywhere(model: Model, largest: dict | None = None) -> Model:
    """Every linear of the layers W8A8, in place; smoothed before, if it is known how large activations are."""
    for i, layer in enumerate(model.layers):
        for feed in FEEDS if largest else ():
            smoothquant.smooth(layer, feed, largest[f"layers.{i}.{feed.names[0]}"])
        for name in LINEARS:
            layer.set_submodule(name, smoothquant.W8A8Linear(layer.get_submodule(name)))
    return model


@torch.no_grad()
def dense(model: Model) -> Model:
    """Every QuantLinear as a Linear that holds the dequantized weight, in the model's dtype, in place."""
    for name, one in list(model.named_modules()):
        if isinstance(one, QuantLinear):
            with torch.device("meta"):
                made = Linear(one.in_features, one.out_features, bias=one.bias is not None)
            made.weight = nn.Parameter(one.dequantize().to(model.dtype), requires_grad=False)
            made.bias = one.bias
            model.set_submodule(name, made)
    return model


def recorded(path: Path) -> list[str]:
    """What `bench quality` wrote there, a line for each model."""
    if not path.exists():
        return [f"nothing recorded yet: python -m minserve bench quality --json figures/data/{path.name}"]
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["case"]: row["median"] for row in report["rows"]}
    lines = [f"{'recorded: ' + report['where']:<40}    KL  perplexity    MB  equal greedy tokens"]
    for name in (case.removesuffix(": greedy") for case in rows if case.endswith(": greedy")):
        kinds = "KL", "perplexity", "weights held", "greedy"
        kl, perplexity, held, equal = (rows[f"{name}: {kind}"] for kind in kinds)
        lines.append(f"{name:<40}{kl:6.4f}{perplexity:12.2f}{held / 1e6:6.0f}{equal:21.0%}")
    return lines


# ---------------------------------------------------------------- its steps
def read_bytes(model: Model) -> int:
    """All but the embedding's table, of which a row is read; unless it is the head, too."""
    return held_bytes(model) - (0 if model.config.tied else model.embed_tokens.weight.nbytes)


def work_seconds(models: dict[str, Model], batches, prompt: int = 512, rounds: int = 2) -> dict[str, list]:
    """{model: seconds of a decode step of each batch, then of a prompt}: in turn, the best of all rounds.

    The first round warms up.
    """
    best = {name: [] for name in models}
    for rows, length, new, which in [*((rows, 8, 8, 0) for rows in batches), (1, prompt, 2, 1)]:
        taken = [
            {name: step_seconds(models[name], rows, length, new, runs=1)[which] for name in models}
            for _ in range(rounds)
        ]
        for name in models:
            best[name].append(min(its[name] for its in taken))
    return best


def step_seconds(
    model: Model, rows: int, prompt: int = 8, new: int = 16, at_most: float = 3.0, runs: int = 2
):
    """(median seconds of a decode step of `rows` requests, seconds of the step with their prompts).

    The last run counts, those before it warm up; each ends after `at_most` seconds, but not before two decode steps.
    """
    asked = SamplingParams(max_tokens=new, ignore_eos=True)
    for _ in range(runs):
        llm = LLM(model, num_pages=rows * (prompt + new) // 16 + 2 * rows, max_running=rows,
                  token_budget=rows * prompt, prefix_caching=False)  # fmt: skip
        for i in range(rows):
            llm.add([(i + j) % model.config.vocab_size for j in range(prompt)], asked)
        start = time.perf_counter()
        while llm.outputs and (len(llm.log) < 3 or time.perf_counter() - start < at_most):
            llm.step()
    first, *steps = (record.total for record in llm.log)
    return median(steps), first
