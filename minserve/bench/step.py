"""Where the time of one step goes: its parts, as the plain, the fused and the recorded road run them.

    weights      matmuls                                      bound: bytes of the weights / read bandwidth, or
                                                              their flops / matmul rate where that takes longer
    attention    queries against pages, gathering included    bound: the same of keys and values
    small ops    norms, turns, SiLU, KV writes, embedding
    dispatch     the model's time in which no operation runs: its Python, checks, views, memory. On a GPU: the
                 time in which it computes nothing, whoever it waits for
    Python       the engine: schedule, pack, commit, text
    sampling     from logits to tokens

Work     1, 8 and 32 sequences that decode at a context of 128, and one prompt of 512 tokens
On a CPU   native kernels are timed call by call, PyTorch's operations by its profiler, which costs each of them a
           microsecond. A step is first run as it is, then once more on the same batch with the clocks in: what the
           parts add up to is held against what the step took, and said. The profiler slows everything but the
           operations, so where it is needed dispatch is what they leave of the step, and they must leave something
On a GPU   kernels, by their names, from a profile of another step; what they leave of the step is dispatch
Story    notebooks/08_the_engine.ipynb
"""

import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median

import torch

from minserve.bench.clocks import all_native, kernels, operations, timed
from minserve.bench.common import Around, Options, clean_up, label, load, on_gpu, random_prompt
from minserve.engine import Engine
from minserve.lab.measure import clock
from minserve.lab.report import Report, Row, quantity
from minserve.lab.roofline import (
    Machine,
    attention_flops,
    decode_seconds,
    flops_per_token,
    kv_bytes,
    prefill_flops,
    prefill_seconds,
    weight_bytes,
)
from minserve.pages import pages_for
from minserve.request import SamplingParams

PARTS = ("weights", "attention", "small ops", "dispatch", "Python", "sampling")
KINDS = ("plain", "fused", "graph")
CONTEXT, PROMPT, TOLERANCE = 128, 512, 0.10


def run(options: Options) -> Report:
    report, measured = options.report(), []
    with Around(options) as around:
        model = load(options.model, options.dtype)
        context = min(CONTEXT, model.config.context // 2)
        for sequences in (1, 4) if options.quick else (1, 8, 32):
            measured.append(("decode", sequences, context, step_samples(options, model, sequences, context)))
        prompt = min(64 if options.quick else PROMPT, model.config.context // 2)
        measured.append(("prefill", 1, prompt, step_samples(options, model, 1, prompt, KINDS[:2])))
    report.where += f", {label(options.model)} in {options.dtype_name}"
    for what, sequences, tokens, kinds in measured:
        case = f"decode {sequences}, context {tokens}" if what == "decode" else f"prefill, {tokens} tokens"
        bounds = bounds_of(model.config, around.machine, what, sequences, tokens, options.dtype.itemsize)
        for kind, samples in kinds.items():
            add_rows(report, f"{case}, {kind}", samples, bounds, around.note if not report.rows else "")
    del model
    clean_up()
    return report


def bounds_of(config, machine: Machine, what: str, sequences: int, tokens: int, itemsize: int) -> dict:
    """The least seconds of the whole ("step"), and of the two parts that have a bound."""
    context, nbytes = tokens, weight_bytes(config, itemsize)
    if what == "decode":
        step, flops = decode_seconds(config, machine, sequences, context, itemsize), flops_per_token(config)
        seen, looked = (
            sequences * kv_bytes(config, context, itemsize),
            sequences * attention_flops(config, context),
        )
        return {
            "step": step,
            "weights": machine.seconds(nbytes, sequences * flops),
            "attention": machine.seconds(seen, looked),
        }
    attention = prefill_flops(config, tokens, rows=1)
    without = tokens * flops_per_token(config) - (tokens - 1) * 2 * config.vocab_size * config.hidden_size
    return {
        "step": prefill_seconds(config, machine, tokens, itemsize, rows=1),
        "weights": machine.seconds(nbytes, without),
        "attention": machine.seconds(kv_bytes(config, context, itemsize), attention - without),
    }


def add_rows(report: Report, case: str, samples: dict, bounds: dict, note: str) -> None:
    total = median(samples["step"])
    report.add(
        Row(case, "s", samples["step"], bounds["step"], note="; ".join(filter(None, [check(samples), note])))
    )
    for part in PARTS:
        share = f"{median(samples[part]) / total:.0%} of the step"
        report.add(Row(f"{case}: {part}", "s", samples[part], bounds.get(part), note=share))


def check(samples: dict[str, list[float]]) -> str:
    """Do the parts add up? They were measured in another pass than the step."""
    total = median(samples["step"])
    parts = sum(median(samples[part]) for part in PARTS)
    said = f"the parts are {parts / total:.0%} of the step"
    return (
        said
        if abs(parts / total - 1) <= TOLERANCE
        else f"{said}, so the split is not to be trusted: measure again"
    )


# ---------------------------------------------------------------- one kind of work, all roads in turn
def step_samples(options: Options, model, sequences: int, tokens: int, kinds=KINDS) -> dict[str, dict]:
    """{kind: {"step" or part: seconds of every round}}. A prompt, where `kinds` ends with "fused"."""
    decoding = "graph" in kinds
    sides = {kind: Watched(model, sequences, tokens, kind, decoding) for kind in kinds}
    samples = {kind: defaultdict(list) for kind in kinds}
    progress = options.progress(f"{sequences} x {tokens}")
    deadline = time.perf_counter() + options.at_most / 4
    rounds = 3 if options.quick else 15
    for done in range(-1, rounds):  # the first one warms up
        for kind, side in sides.items():
            for part, seconds in side.measure().items():
                samples[kind][part] += [seconds] * (done >= 0)
        progress(done + 1, rounds)
        if done >= 2 and time.perf_counter() > deadline:
            break
    for side in sides.values():
        side.engine.close()
    return samples


class Watched:
    """An engine, and the last batch that it computed."""

    def __init__(self, model, sequences: int, tokens: int, kind: str, decoding: bool):
        room = 40 if decoding else 1
        self.engine = Engine(
            model, num_pages=sequences * pages_for(tokens + 2 * room, 16), max_running=sequences, step=kind,
            token_budget=sequences * tokens, prefix_caching=False, overlap=False,
        )  # fmt: skip
        self.compute, self.batch, self.decoding = self.engine.compute, None, decoding
        self.engine.compute = self.remember
        self.ops = getattr(getattr(self.compute, "model", None), "ops", None)
        self.prompts = [random_prompt(model.config, max(1, tokens - room // 2))] * sequences
        self.new = SamplingParams(max_tokens=2 * room if decoding else 1, ignore_eos=True)
        if decoding:
            self.fill()

    def fill(self) -> None:
        for prompt in self.prompts:
            self.engine.add(prompt, self.new)
        if self.decoding:
            self.engine.step()

    def remember(self, batch):
        self.batch = batch
        return self.compute(batch)

    def step(self) -> None:
        if not (self.decoding and self.engine.outputs):
            self.fill()
        self.engine.step()

    def measure(self) -> dict[str, float]:
        """One step as it is; then its parts."""
        return self.on_gpu() if on_gpu() else self.on_cpu()

    def on_cpu(self) -> dict[str, float]:
        self.step()
        took = self.engine.log[-1].seconds
        heard, model = self.listen(took["model"])
        parts = dict.fromkeys(PARTS, 0.0) | heard
        parts["dispatch"] += max(0.0, model - sum(heard.values()))
        parts["Python"] = sum(took[phase] for phase in ("schedule", "pack", "commit", "text"))
        parts["sampling"] += took["sample"]
        return {"step": sum(took.values()), **parts}

    def listen(self, undisturbed: float) -> tuple[dict[str, float], float]:
        """The same batch once more: (seconds of the operations in each part, seconds of the model)."""
        seconds: dict[str, float] = defaultdict(float)
        again = partial(self.compute, self.batch)
        with torch.inference_mode(), timed(self.compute, seconds):
            if all_native(self.compute, self.batch):
                return seconds, clock(again)
            for part, its in operations(again).items():
                seconds[part] += its
        return seconds, undisturbed

    def on_gpu(self) -> dict[str, float]:
        took = clock(self.step)
        parts = dict.fromkeys(PARTS, 0.0) | kernels(self.step)
        parts["dispatch"] = max(0.0, took - sum(parts.values()))
        return {"step": took, **parts}


# ---------------------------------------------------------------- the figure
def groups_of(report: Report) -> list[tuple[str, float, list[tuple[str, float, dict[str, float]]]]]:
    """[(work, bound, [(kind, the step's seconds, {part: seconds}), ...]), ...]"""
    groups: dict[str, list] = {}
    for row in report.rows:
        if row.case.split(": ")[-1] not in PARTS:
            work, kind = row.case.rsplit(", ", 1)
            parts = {part: report.row(f"{row.case}: {part}").median for part in PARTS}
            groups.setdefault(work, []).append((kind, row.median, parts))
    return [(work, report.row(f"{work}, {kinds[0][0]}").bound, kinds) for work, kinds in groups.items()]


def draw(report: Report, path: Path) -> None:
    from minserve.lab import figures  # matplotlib: only for who draws

    groups = groups_of(report)
    work, _, kinds = groups[0]
    (_, slow, _), *_, (kind, fast, parts) = kinds
    bars = sum(len(kinds) for *_, kinds in groups) + len(groups)
    ax = figures.steps(figures.axes(7.2, 1.2 + 0.24 * bars), groups, PARTS)
    ends = f"{quantity(slow, 's')} plain, {quantity(fast, 's')} {kind}"
    title = f"A step of one sequence: {ends}, {parts['weights'] / fast:.0%} of it weights"
    figures.save(ax, path, title, report.where)
