"""Batching: the same requests under three policies, in the same memory.

    static        a batch is filled, runs until its longest answer ends, and only then the next one starts
    continuous    a seat that becomes free is taken in the next step
    paged         continuous, and a request holds the pages it has filled, not the room it may one day need

Bound    for static -> continuous, the ratio of the decode steps both need at least, from the lengths alone; for
         reserved -> paged, the ratio of the requests that fit at once.
Work     answers of uniform and of bimodal length (90 % short), greedy, no end token; prompts of 16 tokens
Story    notebooks/07_continuous_batching.ipynb, notebooks/05_paged_attention.ipynb
"""

import math
import random
import sys

try:
    import resource
except ImportError:
    resource = None

from minserve.bench.common import Options, chosen, clean_up, label, load, on_gpu
from minserve.bench.overhead import Stub
from minserve.bench.workload import (
    PAGE,
    Work,
    bimodal,
    pool_for,
    ragged,
    reserving,
    serve,
    uniform,
    waste,
)
from minserve.engine import LLM
from minserve.lab.batching import continuous_steps, static_steps
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row
from minserve.pages import PagePool, pages_for
from minserve.scheduler import Scheduler, StaticBatching


def run(options: Options) -> Report:
    report = options.report()
    model = load(chosen(options)[0], options.dtype)
    name = f"{label(options.model)} {options.dtype_name}"
    short, long = (2, 8) if options.quick else (16, 512) if on_gpu() else (6, 64)
    seats, count = (32, 256) if on_gpu() else (8, 24)
    for kind, lengths in (("uniform", uniform(short // 2, long)), ("bimodal", bimodal(short * 2, long))):
        work = ragged(model.config.vocab_size, count, (16, 16), lengths, seed=1)
        policies(
            report, options, model, f"{name}, {count} answers, {kind} {min(work.lengths)}-{long}", work, seats
        )
    memory(report, options, model, f"{name}, {count} answers, uniform", short, long, seats, count)
    clean_up()
    fragmentation(report, options)
    if resource:  # not on Windows
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        note = "weights, pools of all sides one after another, PyTorch itself"
        report.add(Row(f"{name}: peak memory of this process", "GB", [peak / 1e9], note=note))
    return report


def policies(report: Report, options: Options, model, case: str, work, seats: int) -> None:
    """Static against continuous, pages for all in both."""
    pages = pool_for(seats, work.longest)

    def side(policy):
        return lambda: work.new_tokens / serve(engine(model, policy, PagePool, pages, seats), work)[0]

    sides = {"static": side(StaticBatching), "continuous": side(Scheduler)}
    samples = in_turn(
        sides, warmup=0, repeats=options.repeats, at_most=options.at_most, each=options.progress(case)
    )
    for who, rates in samples.items():
        report.add(Row(f"{case}: {who}", "tok/s", rates))
    ideal = static_steps(work.lengths, seats) / continuous_steps(work.lengths, seats)
    ratios = [b / a for a, b in zip(*samples.values())]
    note = f"ideal {ideal:.2f}x, from the lengths: what continuous batching can gain here"
    report.add(Row(f"{case}: continuous / static", "x", ratios, ideal, 0.90, note))


def memory(
    report: Report, options: Options, model, case: str, short: int, long: int, seats: int, count: int
) -> None:
    """Reservation against pages: memory for half of the seats, if each kept room for the longest answer."""
    work = ragged(model.config.vocab_size, count, (16, 16), uniform(short // 2, long), seed=2)
    pages, seen = pool_for(seats // 2, work.longest), {}

    def side(who, pool):
        def once():
            llm = engine(model, Scheduler, pool, pages, seats)
            seconds, _ = serve(llm, work)
            seen[who] = at_once(llm), waste(llm), llm.scheduler.preemptions
            return work.new_tokens / seconds

        return once

    sides = {"reserved": side("reserved", reserving(work.longest)), "paged": side("paged", PagePool)}
    samples = in_turn(
        sides, warmup=0, repeats=options.repeats, at_most=options.at_most, each=options.progress(case)
    )
    for who, rates in samples.items():
        together, wasted, preempted = seen[who]
        note = f"{together:.1f} at once, {wasted:.0%} of the slots in use empty, {preempted} preempted"
        report.add(Row(f"{case}, {pages} pages: {who}", "tok/s", rates, note=note))
    fit = min(seats, pages / mean_pages(work)) / (pages // pages_for(work.longest, PAGE))
    most = seen["reserved"][0] * fit
    note = "while others wait; bound: the reserved ones times what pages let in, at the pages held on average"
    report.add(
        Row(f"{case}, {pages} pages: paged, at once", "requests", [seen["paged"][0]], most, 0.90, note)
    )
    ratios = [b / a for a, b in zip(*samples.values())]
    report.add(Row(f"{case}, {pages} pages: paged / reserved", "x", ratios, fit, 0.90))


def fragmentation(report: Report, options: Options) -> None:
    """Slots in use that hold a token, at the lengths of real conversations: with a stub, for they take long."""
    rng, count = random.Random(3), 20 if options.quick else 60
    prompts = lognormal(rng, 1020, 1155, count)  # Azure LLM inference trace 2023, "conversation"
    work = Work([[1] * n for n in prompts], lognormal(rng, 129, 211, count))
    for who, pool, target in (("reserved", reserving(4095), None), ("paged", PagePool, 0.96)):
        llm = LLM(
            Stub(),
            page_size=PAGE,
            num_pages=pool_for(8, 4095),
            pool=pool,
            prefix_caching=False,
            log_length=1_000_000,
        )
        serve(llm, work)
        note = f"{at_once(llm):.1f} requests at once while others wait, in memory for 8 of 4,095 tokens"
        case = f"conversation lengths, stub model: slots in use that hold a token, {who}"
        report.add(Row(case, "share", [1 - waste(llm)], 1.0, target, note))


def at_once(llm: LLM) -> float:
    """Requests in a step, on average over the steps in which others waited."""
    full = [len(record.rows) for record in llm.log if record.waiting] or [
        len(record.rows) for record in llm.log
    ]
    return sum(full) / len(full)


def lognormal(rng: random.Random, median: float, mean: float, count: int) -> list[int]:
    """Lengths with this median and mean, at most 2,000."""
    sigma = math.sqrt(2 * math.log(mean / median))
    return [min(2000, max(1, round(rng.lognormvariate(math.log(median), sigma)))) for _ in range(count)]


def mean_pages(work: Work) -> float:
    """Pages a request holds, averaged over the steps of its life and over the requests."""
    lives = [[pages_for(len(p) + t, PAGE) for t in range(n)] for p, n in zip(work.prompts, work.lengths)]
    return sum(map(sum, lives)) / sum(map(len, lives))


def engine(model, policy, pool, pages: int, seats: int) -> LLM:
    return LLM(
        model, page_size=PAGE, num_pages=pages, policy=policy, pool=pool, max_running=seats, prefix_caching=False,
        token_budget=max(512, seats), log_length=100_000,
    )  # fmt: skip
