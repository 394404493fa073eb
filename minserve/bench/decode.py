"""Decode, one sequence: tokens per second against the bandwidth roof and against transformers' generate.

    bound  = 1 / (bytes of all weights and of the KV cache so far / read bandwidth)
    work   = a prompt of 32 tokens, then 64 on a CPU or 128 on a GPU (fewer on a busy machine), no EOS;
             the first belongs to prefill

Rows: minserve's plain loop; its engine, with the fastest step there is (on a GPU, and on a CPU with a compiler, one
that is replayed); transformers; and the engine over transformers, sample by sample from alternating runs.
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
from minserve.bench.workload import PAGE
from minserve.engine import Engine
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row
from minserve.lab.roofline import decode_seconds
from minserve.pages import pages_for
from minserve.prefill_decode import generate
from minserve.request import SamplingParams

ENGINE = "minserve, engine"
# Shares of the bound, and times transformers, worth reaching: the engine's.
TARGETS = {"llama-3.1-8b": 0.80, "llama-3.2-1b": 0.65, "qwen3-0.6b": 0.50, "SmolLM2-135M-Instruct": 0.70}
TIMES_TRANSFORMERS = 3.5


def run(options: Options) -> Report:
    report, measured = options.report(), []
    with Around(options) as around:
        for name, its in options.shares(chosen(options)):
            measured.append((label(name), *decode_samples(its, name)))
            clean_up()
    for name, config, (tokens, new), samples, note in measured:
        bound = 1 / decode_seconds(config, around.machine, 1, tokens + new // 2, options.dtype.itemsize)
        add_rows(
            report,
            f"{name} {options.dtype_name}, {tokens} + {new} tokens",
            bound,
            samples,
            TARGETS.get(name.removeprefix("tiny-")),
            note,
            options.note(around.note),
        )
    return report


def decode_samples(options: Options, name: str | None):
    """(config, (prompt, new) tokens, tokens/s per side, note on the tokens)"""
    model = load(name, options.dtype)
    tokens, most = 32, 8 if options.quick else 128 if on_gpu() else 64
    engine = Engine(model, num_pages=2 * pages_for(tokens + most, PAGE), max_running=1, prefix_caching=False)
    prompt, other, said = (
        random_prompt(model.config, tokens),
        twin(model),
        {},
    )  # now the weights lie as they will
    own_rate(model, prompt, 2)  # compiles what there is to compile
    new = affordable(lambda: own_rate(model, prompt, 2), min(3, options.at_most / 12), 8, most)

    def side(who, rate, *args):
        def once():
            value, said[who] = rate(*args, prompt, new)
            return value

        return once

    sides = {"minserve": side("minserve", own_rate, model)}
    sides[ENGINE] = side(ENGINE, engine_rate, engine)
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


def engine_rate(engine: Engine, prompt: list[int], new: int) -> tuple[float, list[int]]:
    (output,) = engine.add(prompt, SamplingParams(max_tokens=new, ignore_eos=True))
    times, made = [], []
    while not output.finished:
        engine.step()  # a token that is in `tokens` has been read from the device
        if len(output.tokens) > len(made):
            times.append(time.perf_counter())
            made = list(output.tokens)
    if len(made) != new:
        raise RuntimeError(f"the engine made {len(made)} tokens where {new} were asked for") from output.error
    return (new - 1) / (times[-1] - times[0]), made


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
    for who, rates in samples.items():
        note = "; ".join(filter(None, [notes.get(who), moved if who == ENGINE else ""]))
        report.add(Row(f"{case}: {who}", "tok/s", rates, bound, target if who == ENGINE else None, note))
    ratios = [a / b for a, b in zip(samples[ENGINE], samples["transformers"])]
    wanted = TIMES_TRANSFORMERS if case.startswith("SmolLM2") and not on_gpu() else None
    report.add(Row(f"{case}: {ENGINE} / transformers", "x", ratios, 1.0, wanted))
