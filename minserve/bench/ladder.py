"""The ladder: every rung built so far, measured on this machine, under the bound that none can beat.

    no cache  ->  KV cache  ->  (each later technique joins the list RUNGS)

First the rungs must say the same: equal tokens in fp32, where roundings do not change the answer. Only then
are they timed, alternately, in the dtype this machine is good at; the first token belongs to prefill and is
not counted. A slow or busy machine makes fewer new tokens, so that the whole takes two minutes at most.
Bound    1 / (bytes of the weights and of the KV cache so far / measured read bandwidth), one sequence
Story    README.md, The ladder
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch

from minserve.bench.common import (
    Around,
    Options,
    add_model_arguments,
    affordable,
    label,
    load,
    on_gpu,
    random_prompt,
)
from minserve.kernels import INTERPRETED
from minserve.lab.measure import clock, in_turn
from minserve.lab.report import Report, Row
from minserve.lab.roofline import decode_seconds, name_of
from minserve.model import Model
from minserve.prefill_decode import generate, generate_without_cache
from minserve.request import SamplingParams

Rung = Callable[[Model, list[int], SamplingParams], Iterator[int]]
RUNGS: list[tuple[str, Rung]] = [("no cache", generate_without_cache), ("KV cache", generate)]


def add_arguments(parser) -> None:
    parser.add_argument(
        "--json", type=Path, default=Path("figures/data/ladder.json"), help="where the numbers go"
    )
    parser.add_argument(
        "--figure", type=Path, default=Path("figures/ladder.png"), help="where the figure goes"
    )
    add_model_arguments(parser)


def main(args) -> int:
    if INTERPRETED:
        print(
            "ladder: TRITON_INTERPRET=1 is set, and the interpreter's times are not kernel times",
            file=sys.stderr,
        )
        return 2
    report = run(Options.of(args, "ladder", "ladder"), fixed_dtype=args.dtype is not None)
    report.save(args.json)
    draw(report, args.figure)
    print(report.table())
    print(f"numbers: {args.json}   figure: {args.figure}")
    return 0


def run(options: Options, fixed_dtype: bool = True) -> Report:
    """Compare, choose the dtype unless it is fixed, measure, report."""
    say("loading the model in fp32, and checking that every rung says the same")
    exact = load(options.model, torch.float32)
    prompt = random_prompt(exact.config, 16 if options.quick else 128)
    compare(exact, prompt, greedy(affordable(slowest(exact, prompt), 4, 4, 4 if options.quick else 8)))
    model = exact if options.dtype == torch.float32 else load(options.model, options.dtype)
    if not fixed_dtype and not on_gpu():
        model = quicker(model, exact, prompt)
    del exact
    options = replace(options, dtype=model.dtype)
    new = affordable(slowest(model, prompt), 5, 4, 4 if options.quick else 32)
    work = f"{len(prompt)} tokens of prompt, {new} new ones"
    say(f"measuring {len(RUNGS)} rungs in {options.dtype_name}: {work}")
    sides = {name: lambda rung=rung: rate(rung, model, prompt, greedy(new)) for name, rung in RUNGS}
    with Around(options) as around:
        each = options.progress("rungs")
        samples = in_turn(sides, repeats=options.repeats, at_most=options.at_most, each=each)
    context = len(prompt) + new // 2
    bound = 1 / decode_seconds(model.config, around.machine, 1, context, model.dtype.itemsize)
    report = options.report()
    report.where += f", {label(options.model)} in {options.dtype_name}"
    for name, rates in samples.items():
        report.add(Row(name, "tok/s", rates, bound, note=around.note if name == RUNGS[-1][0] else ""))
    return report


def greedy(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, ignore_eos=True)


def slowest(model: Model, prompt: list[int]) -> Callable[[], list[int]]:
    """Two tokens from the first rung: what tells how many this machine can afford."""
    return lambda: list(RUNGS[0][1](model, prompt, greedy(2)))


def compare(model: Model, prompt: list[int], params: SamplingParams) -> None:
    """Raises RuntimeError at the first token on which a rung differs from the first rung."""
    (first, rung), *others = RUNGS
    expected = list(rung(model, prompt, params))
    for name, other in others:
        got = list(other(model, prompt, params))
        if got != expected:
            pairs = zip_longest(got, expected)  # a rung may also stop early
            at, (its, should) = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
            raise RuntimeError(
                f"the ladder compares equal work, and {name!r} is not: in fp32 its token {at} is {its} where "
                f"{first!r} says {should}.\n  No speed is reported for a wrong answer; run the tests."
            )


def quicker(model: Model, exact: Model, prompt: list[int]) -> Model:
    """16 bits, unless this CPU has no instructions for them and takes 1.5 times as long as in fp32."""
    sides = {m: lambda m=m: clock(lambda: list(generate(m, prompt, greedy(4)))) for m in (model, exact)}
    times = in_turn(sides, warmup=0, repeats=3)
    half, full = (min(times[m]) for m in (model, exact))
    if half < 1.5 * full:
        return model
    say(f"{name_of(model.dtype)} takes {half / full:.1f} times as long as float32 here: going on in float32")
    return exact


def rate(rung: Rung, model: Model, prompt: list[int], params: SamplingParams) -> float:
    times = [time.perf_counter() for _ in rung(model, prompt, params)]
    return (len(times) - 1) / (times[-1] - times[0])


def draw(report: Report, path: Path) -> None:
    from minserve.lab import figures  # matplotlib: only the ladder draws, the other benchmarks run without it

    rungs = [(row.case, row.median, row.bound) for row in report.rows]
    ax = figures.ladder(figures.axes(6.4, 0.6 + 0.5 * len(rungs)), rungs)
    (first, slow, _), *_, (last, fast, _) = rungs
    figures.save(
        ax, path, f"From {first} to {last}: {fast / slow:.1f} times the tokens per second", report.where
    )


def say(what: str) -> None:
    print(f"ladder: {what}", file=sys.stderr, flush=True)
