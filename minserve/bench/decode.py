"""Decode, one sequence: tokens per second against the bandwidth roof and against transformers' generate.

    bound  = 1 / (bytes of all weights and of the KV cache so far / read bandwidth)
    work   = a prompt of 32 tokens, then 64 on a CPU or 128 on a GPU (fewer on a busy machine), no EOS;
             the first belongs to prefill

Rows: minserve; on a GPU the same step replayed from a CUDA graph; transformers; and ours over theirs, sample
by sample from alternating runs.
Story    notebooks/02_prefill_and_decode.ipynb
"""

import time

from minserve.bench.common import (
    Around,
    Options,
    affordable,
    chosen,
    clean_up,
    label,
    load,
    on_gpu,
    random_prompt,
)
from minserve.bench.opponent import generate_rate, twin
from minserve.bench.static_step import StaticStep
from minserve.kv_cache import KVCache
from minserve.lab.measure import clock, in_turn
from minserve.lab.report import Report, Row
from minserve.lab.roofline import decode_seconds
from minserve.prefill_decode import generate, prefill
from minserve.request import SamplingParams

# Shares of the bound, and times transformers, worth reaching. The GPU's are for the replayed graph.
TARGETS = {"llama-3.1-8b": 0.80, "llama-3.2-1b": 0.65, "qwen3-0.6b": 0.50, "SmolLM2-135M-Instruct": 0.70}
TIMES_TRANSFORMERS = 3.5


def run(options: Options) -> Report:
    report, measured = options.report(), []
    with Around(options) as around:
        for name in chosen(options):
            measured.append((label(name), *decode_samples(options, name)))
            clean_up()
    for name, config, (tokens, new), samples, note in measured:
        bound = 1 / decode_seconds(config, around.machine, 1, tokens + new // 2, options.dtype.itemsize)
        add_rows(
            report,
            f"{name} {options.dtype_name}, {tokens} + {new} tokens",
            bound,
            samples,
            TARGETS.get(name),
            note,
            around.note,
        )
    return report


def decode_samples(options: Options, name: str | None):
    """(config, (prompt, new) tokens, tokens/s per side, note on the tokens)"""
    model = load(name, options.dtype)
    tokens, most = 32, 8 if options.quick else 128 if on_gpu() else 64
    prompt, other, said = random_prompt(model.config, tokens), twin(model), {}
    own_rate(model, prompt, 2)  # compiles what there is to compile
    new = affordable(lambda: own_rate(model, prompt, 2), 3, 8, most)

    def side(who, rate, *args):
        def once():
            value, said[who] = rate(*args, prompt, new)
            return value

        return once

    sides = {"minserve": side("minserve", own_rate, model)}
    if on_gpu() and not any(model.config.windows):
        step = StaticStep(model, KVCache(model.config, tokens + new, model.dtype, model.device), tokens + new)
        step.capture()
        sides["minserve, CUDA graph"] = side("minserve, CUDA graph", graph_rate, step)
    sides["transformers"] = side("transformers", generate_rate, other)
    samples = in_turn(
        sides, repeats=options.repeats, at_most=options.at_most, each=options.progress(label(name))
    )
    return model.config, (tokens, new), samples, agreement(said)


def own_rate(model, prompt: list[int], new: int) -> tuple[float, list[int]]:
    params, times, made = SamplingParams(max_tokens=new, ignore_eos=True), [], []
    for token in generate(model, prompt, params):  # a token is an int, so the device has finished
        times.append(time.perf_counter())
        made.append(token)
    return (new - 1) / (times[-1] - times[0]), made


def graph_rate(step: StaticStep, prompt: list[int], new: int) -> tuple[float, list[int]]:
    step.cache.truncate(0)
    first = int(prefill(step.model, prompt, step.cache).argmax())
    step.start(first, len(prompt))
    seconds = clock(lambda: step.run(new - 1))
    return (new - 1) / seconds, [first, *step.tokens(len(prompt) + 1, new - 1)]


def agreement(said: dict[str, list[int]]) -> dict[str, str]:
    """Where each side's tokens leave transformers'. In 16 bits two near-equal logits may change places."""
    reference = said["transformers"]
    notes = {}
    for who, tokens in said.items():
        same = next((i for i, (a, b) in enumerate(zip(tokens, reference)) if a != b), len(reference))
        if same < len(reference):
            notes[who] = f"its tokens are transformers' up to the {same + 1}th of {len(reference)}"
    return notes


def add_rows(report: Report, case: str, bound: float, samples, target, notes: dict, moved: str) -> None:
    graph = "minserve, CUDA graph"
    best = graph if graph in samples else "minserve"
    for who, rates in samples.items():
        note = "; ".join(filter(None, [notes.get(who), moved if who == best else ""]))
        report.add(Row(f"{case}: {who}", "tok/s", rates, bound, target if who == best else None, note))
    ratios = [a / b for a, b in zip(samples[best], samples["transformers"])]
    wanted = TIMES_TRANSFORMERS if case.startswith("SmolLM2") and not on_gpu() else None
    report.add(Row(f"{case}: {best} / transformers", "x", ratios, 1.0, wanted))
