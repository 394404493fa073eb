"""Goodput: the highest rate of requests at which at least 90 % of those that arrive get every token in time.

    mixed      chunked against whole prompts, where a long prompt now and then stops everybody
    shared     the prefix index on and off, where prompts begin with one of a few that everybody sends
    classes    two priorities against one queue, at 1.25 times the rate that can be served: what the urgent gain, and
               what it costs the others

Promise  token n by arrival + T1 + n T2, strict and loose, in multiples of this machine's own times (goodput_work.py).
         Refused, aborted or unfinished is missed: averages over those who came through would hide the rest.
Search   goodput_search.py: three seeds, rates in steps of 20 %, the same requests for both sides
Bound    requests per second when all are there at once: for more, no promise can be kept for long. For whole prompts it
         is less where the stalls alone make a tenth late: predicted from times measured alone (goodput_work.stalls).
Lengths  A long prompt is one that matters here: of 1,024, 2,048 and 4,096 tokens the first that takes ten times as long
         as a token may under the strict SLO. On a machine that computes prompts in no time, nobody has to be protected.
Caveat   Runs are short. A queue that would only have grown later is not seen: longer runs find lower rates, and a loose
         promise may outlast a run at more than the bound.
Story    notebooks/13_serving_and_slos.ipynb
"""

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from minserve.bench.chunked import full_step
from minserve.bench.common import Options, chosen, label, load, random_prompt
from minserve.bench.goodput_search import ENOUGH, SEEDS, Comparison, Side
from minserve.bench.goodput_work import (
    EVERY,
    MULTIPLES,
    QUICK,
    REAL,
    STRICT,
    Promise,
    Sizes,
    Trace,
    classes,
    mixed,
    shared,
    stalls,
)
from minserve.bench.prefix import first_token
from minserve.bench.served import decode_steps
from minserve.bench.workload import PAGE
from minserve.engine import LLM
from minserve.lab.report import Report, Row
from minserve.metrics import goodput, percentile
from minserve.model import Model
from minserve.scheduler import Scheduler, WholePrompts

SECONDS, REQUESTS = 5.0, 24  # of a run, at least both
SEATS, DECODING, OVERLOAD = 32, 8, 1.25
BUDGET, TARGET = 1800.0, 1.5
LONG, STALL = (1024, 2048, 4096), 10  # tokens; and times what the strict SLO allows a token


def run(options: Options) -> Report:
    options = replace(options, seconds=options.seconds or (2.0 if options.quick else BUDGET))
    report, model = options.report(), load(chosen(options)[0], options.dtype)
    report.where += f", {label(options.model)} in {options.dtype_name}"
    size = (QUICK, EVERY, 0.2) if options.quick else (REAL, REQUESTS, SECONDS)
    bench = Bench(report, model, *size)
    chunks(bench, replace(options, seconds=0.7 * options.left, started=time.monotonic()))
    overload(bench)
    prefixes(bench, options)
    return report


@dataclass
class Bench:
    report: Report
    model: Model
    sizes: Sizes
    requests: int  # of a run, at least ...
    seconds: float  # ... and so long

    def side(self, name: str, trace: Trace, **options) -> Side:
        engine = LLM(self.model, page_size=PAGE, **options)
        return Side(name, trace, engine, self.requests, self.seconds)

    def first(self, tokens: int) -> list[float]:
        """Seconds to the first token of such a prompt, on an idle engine."""
        llm = LLM(self.model, page_size=PAGE, token_budget=4096, prefix_caching=False)
        prompt = random_prompt(self.model.config, tokens)
        return [first_token(llm, prompt) for _ in range(4)][1:]

    def alone(self, trace: str, kinds: dict[str, int]) -> dict[int, float]:
        """{tokens of a prompt: seconds to its first token}"""
        found = {}
        for kind, tokens in kinds.items():
            samples = self.first(tokens)
            self.report.add(
                Row(f"{trace}: first token alone, {kind}", "s", samples, note=f"{tokens:,} tokens")
            )
            found[tokens] = median(samples)
        return found

    def step(self, trace: str) -> float:
        samples = decode_steps(self.model, DECODING)
        self.report.add(Row(f"{trace}: decode step of {DECODING}", "s", samples))
        return median(samples)


# ---------------------------------------------------------------- chunked or whole
def chunks(bench: Bench, options: Options) -> None:
    model, step = bench.model, bench.step("mixed")
    sizes = bench.sizes if options.quick else replace(bench.sizes, long=long_for(bench, step))
    trace, alone = mixed(sizes), bench.alone("mixed", {"chat": sizes.chat[1], "long": sizes.long})
    promises = {slo: Promise.of(alone, step, its) for slo, its in MULTIPLES.items()}
    chunk = chunk_for(model, random_prompt(model.config, sizes.long), step * STRICT[1], options.quick)
    shape = dict(prefix_caching=False, max_running=SEATS)
    sides = [
        bench.side("chunked", trace, policy=Scheduler, chunk=chunk, token_budget=SEATS + 2 * chunk, **shape),
        bench.side("whole", trace, policy=WholePrompts, token_budget=SEATS + sizes.long, **shape),
    ]
    bounds = {
        (slo, "whole"): min(stalls(promise, alone, step, 1 / EVERY, 1 - ENOUGH), sides[1].capacity)
        for slo, promise in promises.items()
    }
    case = f"mixed, chunks of {chunk}"
    comparison = Comparison(case, sides, promises, bounds).search(options)
    comparison.add_rows(bench.report, {"strict": TARGET})
    latencies(bench, case, sides, median(comparison.rates("strict", "chunked")))


def long_for(bench: Bench, step: float) -> int:
    """The shortest prompt that keeps others waiting for long; the longest, if none does."""
    enough = STALL * STRICT[1] * step
    return next((n for n in LONG if median(bench.first(n)) >= enough), LONG[-1])


def chunk_for(model, prompt: list[int], seconds: float, quick: bool) -> int:
    """The largest chunk that, beside so many decoding requests, takes no longer than a token may."""
    sizes = (32, 16) if quick else (256, 128, 64, 32)
    return next((n for n in sizes if full_step(model, DECODING + n, prompt) <= seconds), sizes[-1])


def latencies(bench: Bench, case: str, sides: list[Side], rate: float) -> None:
    """Both sides at the rate that one of them bears: what chats wait for, in percentiles."""
    if not rate:
        return
    for side in sides:
        values = defaultdict(list)
        for seed in SEEDS:
            chats = [
                t for t in side.serve(side.arrivals(rate, seed)) if t.prompt_tokens <= bench.sizes.chat[1]
            ]
            for name, its in (
                ("TTFT", [t.ttft for t in chats]),
                ("ITL", [gap for t in chats for gap in t.itl]),
            ):
                for q in (50, 90, 99, 100):
                    values[f"{name} {'max' if q == 100 else f'p{q}'}"].append(percentile(its, q))
        for name, samples in values.items():
            bench.report.add(
                Row(f"{case}, chats at {rate:.3g} requests/s, {side.name}: {name}", "s", samples)
            )


# ---------------------------------------------------------------- the prefix index
def prefixes(bench: Bench, options: Options) -> None:
    sizes, trace = bench.sizes, shared(bench.sizes)
    alone = bench.alone("shared", {"whole prompt": sizes.system + sizes.question[1]})
    step = bench.step("shared")
    promises = {slo: Promise.of(alone, step, its) for slo, its in MULTIPLES.items()}
    sides = [
        bench.side(f"index {name}", trace, prefix_caching=on, max_running=SEATS)
        for name, on in (("on", True), ("off", False))
    ]
    comparison = Comparison(f"shared, {sizes.system} tokens", sides, promises).search(options)
    comparison.add_rows(bench.report, {})


# ---------------------------------------------------------------- priorities
def overload(bench: Bench) -> None:
    trace = classes(bench.sizes)
    alone, step = bench.alone("classes", {"chat": bench.sizes.chat[1]}), bench.step("classes")
    promises = {slo: Promise.of(alone, step, its) for slo, its in MULTIPLES.items()}
    side = bench.side("", trace, prefix_caching=False, max_running=DECODING, ageing=10**6)
    rate, kept, came, first = (
        OVERLOAD * side.capacity,
        defaultdict(list),
        defaultdict(list),
        defaultdict(list),
    )
    for seed in SEEDS:
        arrivals = side.arrivals(rate, seed)
        seconds = len(arrivals) / rate
        alike = [replace(a, priority=0) for a in arrivals]
        for policy, its in (("two priorities", arrivals), ("one queue", alike)):
            timelines = side.serve(its)
            for who, priority in (("urgent", 0), ("others", 1)):
                own = [t for t, a in zip(timelines, arrivals) if a.priority == priority]
                came[who].append(len(own) / seconds)
                first[f"{who}, TTFT p50: {policy}"].append(percentile([t.ttft for t in own], 50))
                for slo, promise in promises.items():
                    kept[f"{slo}, {who}: {policy}", who].append(goodput(own, promise, seconds))
    note = f"at {rate:.3g} requests/s, {OVERLOAD:g} times what can be served"
    for (case, who), samples in kept.items():
        bound = median(came[who])
        bench.report.add(
            Row(f"classes, {case}", "requests/s", samples, bound, note=f"{note}; bound: what arrives")
        )
    for case, samples in first.items():
        bench.report.add(Row(f"classes, {case}", "s", samples, note=note))


# ---------------------------------------------------------------- recorded numbers
def draw(report: Report, path: Path) -> None:
    from minserve.lab import figures, serving_figures  # matplotlib: only for who draws

    groups = serving_figures.recorded_goodput(report)
    bars = sum(len(sides) for _, sides in groups) + len(groups)
    ax = serving_figures.goodputs(figures.axes(6.6, 0.8 + 0.26 * bars), groups)
    figures.save(ax, path, serving_figures.goodput_finding(groups), report.where)


def draw_shares(report: Report, path: Path) -> None:
    """The search itself: the share in time against the rate, under the strict SLO on the mixed trace."""
    from minserve.lab import figures, serving_figures

    lines = serving_figures.recorded_shares(report, "mixed", "strict")
    ax = serving_figures.attained(figures.axes(6.4, 3.4), lines, ENOUGH)
    figures.save(ax, path, serving_figures.attained_finding(lines, ENOUGH), report.where)


def draw_percentiles(report: Report, path: Path) -> None:
    from minserve.lab import figures, serving_figures

    about, rows = serving_figures.recorded_percentiles(report, "mixed")
    ax = serving_figures.percentiles(figures.axes(6.6, 2.6), rows)
    figures.save(ax, path, serving_figures.percentiles_finding(rows, about), report.where)


def markdown(report: Report) -> str:
    """The README's table: medians of the seeds, and their span."""
    span = lambda row: f"{row.median:.1f} ({min(row.samples):.1f}–{max(row.samples):.1f})"
    cells: dict[str, list[str]] = {}
    for row in report.rows:
        if row.unit == "requests/s":
            case, side = row.case.rsplit(": ", 1)
            trace, *_, last = case.split(", ")
            name = f"{trace}, {last}: {side}" if trace == "classes" else f"{trace}: {side}"
            cells.setdefault(name, []).append(span(row))
    lines = [f"| requests/s in time | {' | '.join(MULTIPLES)} |", "| --- | ---: | ---: |"]
    return "\n".join(lines + [f"| {name} | {' | '.join(its)} |" for name, its in cells.items()])
