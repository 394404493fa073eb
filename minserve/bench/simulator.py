"""The simulator against the engine it stands for: the same requests, arriving at the same times, really and simulated.

    fitted     on traces of one mix, at several loads, chunked and with whole prompts: their step logs, all together
    predicted  traces of another mix, burstier and with other seeds, at 0.3, 0.6 and 0.85 of the capacity measured for
               it; then the engine serves the same traces, in real time
    policies   chunked, whole prompts, and chunked with the urgent first: are they ranked as the machine ranks them?

Bound    1 for an accuracy, 1 - |simulated / measured - 1|: exact. A row shows its worst policy, the note all of them.
         1,000 for the speed, in seconds of simulated time per second
Drift    a machine that others use is not equally fast all the time, and no model of the past knows it. So a probe, some
         requests of the learned mix, is served just before and just after each predicted trace: how much longer than
         expected its steps take is how much longer those of the trace are taken to be. What is predicted is never
         used; a note says how far its steps were off nevertheless
Story    notebooks/14_the_fleet.ipynb
"""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import mean, median

from minserve.arrivals import Arrival, azure_like, lognormal, paced, poisson, with_priorities
from minserve.bench.common import Options, chosen, label, load
from minserve.bench.workload import PAGE
from minserve.engine import LLM
from minserve.lab.report import Report, Row
from minserve.lab.simulated_costs import FITTED, written
from minserve.metrics import Timeline, percentile
from minserve.pages import PagePool
from minserve.request import SamplingParams
from minserve.scheduler import Scheduler, WholePrompts
from minserve.simulator.costs import StepCosts
from minserve.simulator.engine import simulate
from minserve.step_log import StepRecord

LOADS = (0.3, 0.6, 0.85)  # of capacity
SEATS, BUDGET, PAGES = 16, 256, 2048
REQUESTS = 80  # of each trace: with fewer, at a low load, two prompts that meet or miss each other decide its averages
LONGEST = 512  # tokens of a prompt, and of an answer
POLICIES = {"chunked": Scheduler, "whole prompts": WholePrompts, "urgent first": Scheduler}
WITHIN = {"throughput": 0.03, "TPOT": 0.04, "mean TTFT": 0.08, "P99 TTFT": 0.15}
ALIKE = 0.05  # policies that measure closer than this are a tie, which no order can break


def run(options: Options) -> Report:
    report = options.report()
    model = load(chosen(options)[0], options.dtype)
    case = f"{label(options.model)} {options.dtype_name}"
    few, longest = options.quick, min(LONGEST, model.config.context // 2)
    taught, asked = (partial(mix, longest=longest) for mix in (learned, predicted))
    engines = {who: engine(model, policy) for who, policy in list(POLICIES.items())[:2]}
    engines["urgent first"] = engines["chunked"]
    for llm in engines.values():
        serve(llm, heap(taught, 8 if few else 2 * SEATS))  # first calls allocate, and are nobody's cost
    rates = [saturated(engines["chunked"], heap(mix, 8 if few else 50, seed=1)) for mix in (taught, asked)]

    logs, runs, probes = [], [], itertools.count(300)

    def probe() -> list[StepRecord]:
        serve(engines["chunked"], heap(taught, 6 if few else 16, seed=next(probes)))
        logs.append(list(engines["chunked"].log))
        return logs[-1]

    for i, share in enumerate(LOADS):
        learn, ask = (share * rate for rate in rates)
        seconds = (4 if few else REQUESTS) / min(learn, ask)  # of a predicted trace
        for who in ("chunked", "whole prompts"):
            serve(engines[who], taught(learn, seconds / 2, seed=100 + i))
            logs.append(list(engines[who].log))
        trace, before = asked(ask, seconds, seed=200 + i), probe()
        for who, llm in engines.items():
            timelines = serve(llm, trace, urgent_first=who == "urgent first")
            log, after = list(llm.log), probe()
            runs.append(Run(share, who, trace, timelines, log, [before, after]))
            before = after
    serve(engines["whole prompts"], heap(taught, 6 if few else 30, seed=400))
    logs.append(list(engines["whole prompts"].log))
    costs = StepCosts.fit(*logs)
    for one in runs:
        one.predict(costs, costs.pace(*logs))
    tell(report, case, runs, costs, rates[1])
    rate = LOADS[-1] * rates[1]
    speed(report, case, costs, asked(rate, 50 / rate if few else 1200, seed=400))
    return report


# ---------------------------------------------------------------- the traces
def learned(rate: float, seconds: float, seed: int = 0, longest: int = LONGEST) -> list[Arrival]:
    return poisson(rate, seconds, lognormal((90, 140), (25, 35), longest), seed)


def predicted(rate: float, seconds: float, seed: int = 0, longest: int = LONGEST) -> list[Arrival]:
    arrivals = azure_like("conversation", seconds, seed, rate=rate, scale=0.15, longest=longest)
    return with_priorities(arrivals, {0: 0.3, 1: 0.7}, seed)


def heap(mix: Callable, count: int, seed: int = 0) -> list[Arrival]:
    """So many requests, all of them at once."""
    return paced(mix(1.0, count, seed), 1e6)


# ---------------------------------------------------------------- the engine, in real time
def engine(model, policy: type[Scheduler]) -> LLM:
    limits = dict(num_pages=PAGES, token_budget=BUDGET, max_running=SEATS, max_waiting=100_000)
    return LLM(model, page_size=PAGE, policy=policy, prefix_caching=False, log_length=1_000_000, **limits)


def serve(llm: LLM, arrivals: Sequence[Arrival], urgent_first: bool = False) -> list[Timeline]:
    """Open loop: each request is added when it is due, however the others are. Its steps are llm.log afterwards."""
    vocab, ids = llm.model.config.vocab_size, random.Random(0)
    prompts = [[ids.randrange(vocab) for _ in range(a.prompt_tokens)] for a in arrivals]
    timelines = [
        Timeline(a.time, prompt_tokens=a.prompt_tokens, priority=a.priority if urgent_first else 0)
        for a in arrivals
    ]
    heard: dict[int, Timeline] = {}  # by request id
    llm.log.clear()
    zero, due = time.monotonic(), 0
    now = lambda: time.monotonic() - zero
    while due < len(arrivals) or llm.scheduler.has_work:
        while due < len(arrivals) and arrivals[due].time <= now():
            params = SamplingParams(max_tokens=arrivals[due].output_tokens, ignore_eos=True)
            (output,) = llm.add(prompts[due], params, priority=timelines[due].priority)
            heard[output.request.id] = timelines[due]
            due += 1
        if not llm.scheduler.has_work:
            time.sleep(max(0.0, arrivals[due].time - now()))
            continue
        news, told = llm.step(), now()
        for output, _ in news:
            heard[output.request.id].told(told, 1, "a token")  # random tokens make no text to wait for
            if output.finished:
                heard[output.request.id].ended(told, output.finish_reason)
    return timelines


def saturated(llm: LLM, requests: Sequence[Arrival]) -> float:
    """Requests per second when they are all there."""
    return len(requests) / duration(serve(llm, requests))


def duration(timelines: Sequence[Timeline]) -> float:
    return max(t.finished for t in timelines)


# ---------------------------------------------------------------- the two, side by side
@dataclass
class Run:
    share: float  # of capacity
    who: str
    arrivals: list[Arrival]
    measured: list[Timeline]
    log: list[StepRecord]
    probes: list[list[StepRecord]]  # just before and just after

    def predict(self, costs: StepCosts, usual: float) -> None:
        """`usual`: the pace of all that was fitted."""
        urgent_first = self.who == "urgent first"
        arrivals = self.arrivals if urgent_first else with_priorities(self.arrivals, {0: 1.0})
        self.costs = costs.times(costs.pace(*self.probes) / usual)
        self.simulated = simulate(arrivals, self.costs, partial(scheduler, POLICIES[self.who]))
        self.drift = self.costs.pace(self.log) / usual - 1

    def error(self, of: Callable) -> float:
        """simulated / measured - 1"""
        return of(self.simulated) / of(self.measured) - 1


def scheduler(policy: type[Scheduler]) -> Scheduler:
    pool = PagePool(PAGES, PAGE, prefix_caching=False)
    return policy(pool, BUDGET, SEATS, max_waiting=100_000)


def throughput(timelines: Sequence[Timeline]) -> float:
    return sum(len(t.tokens) for t in timelines) / duration(timelines)


def ttft(timelines: Sequence[Timeline]) -> list[float]:
    return [t.ttft for t in timelines]


MEASURES = {
    "throughput": throughput,
    "TPOT": lambda timelines: mean(t.tpot for t in timelines if t.tpot is not None),
    "mean TTFT": lambda timelines: mean(ttft(timelines)),
    "P99 TTFT": lambda timelines: percentile(ttft(timelines), 99),
}


def tell(report: Report, case: str, runs: list["Run"], costs: StepCosts, capacity: float) -> None:
    for share in LOADS:
        those = [run for run in runs if run.share == share]
        at = f"{case}, load {share:g} of {capacity:.2f} requests/s"
        drift = ", ".join(f"{run.drift:+.1%}" for run in those)
        for name, of in MEASURES.items():
            errors = {run.who: run.error(of) for run in those}
            worst = max(map(abs, errors.values()))
            note = "; ".join(f"{who} {error:+.1%}" for who, error in errors.items())
            note += f"; {len(those[0].arrivals)} requests; measured steps against expected ones: {drift}"
            row = Row(f"{at}: accuracy of {name}", "share", [1 - worst], 1.0, 1 - WITHIN[name], note)
            report.add(row)
        rank(report, at, those)
    errors = [abs(e) for run in runs for e in run.costs.errors(run.log)]
    case = f"{case}: {FITTED}"
    report.add(Row(case, "share", [1 - median(errors)], 1.0, note=written(costs)))


def rank(report: Report, at: str, runs: list["Run"]) -> None:
    """Pairs of policies that differ as measured: the share that the simulator puts in the same order."""
    of = {
        "P99 gap between tokens": lambda ts: percentile([gap for t in ts for gap in t.itl], 99),
        "mean TTFT": MEASURES["mean TTFT"],
    }
    right, orders = [], []
    for name, its in of.items():
        measured, simulated = (
            {run.who: its(getattr(run, kind)) for run in runs} for kind in ("measured", "simulated")
        )
        for a, b in combinations(measured, 2):
            if abs(measured[a] / measured[b] - 1) > ALIKE:
                right.append((measured[a] < measured[b]) == (simulated[a] < simulated[b]))
        both = [sorted(side, key=side.get) for side in (measured, simulated)]
        orders.append(
            f"{name}: measured {', '.join(f'{who} {measured[who] * 1e3:.0f} ms' for who in both[0])}; simulated "
            f"{', '.join(f'{who} {simulated[who] * 1e3:.0f} ms' for who in both[1])}"
        )
    note = f"{len(right)} pairs further apart than {ALIKE:.0%}; " + "; ".join(orders)
    share = sum(right) / len(right) if right else 1.0
    report.add(Row(f"{at}: policies in the same order", "share", [share], 1.0, 1.0, note))


def speed(report: Report, case: str, costs: StepCosts, arrivals: Sequence[Arrival]) -> None:
    """A longer day at the highest load, because a trace is over before a clock notices."""
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        timelines = simulate(arrivals, costs, partial(scheduler, Scheduler))
        samples.append(duration(timelines) / (time.perf_counter() - start))
    at = f"load {LOADS[-1]:g}, {len(arrivals):,} requests"
    report.add(Row(f"{case}: simulated time / time it takes, {at}", "x", samples, 1000.0, 1.0))


def draw(report: Report, path: Path) -> None:
    from minserve.lab import figures, simulator_figures  # matplotlib: only for who draws

    errors, ax = simulator_figures.recorded_accuracy(report), figures.axes()
    simulator_figures.accuracy(ax, errors)
    figures.save(ax, path, simulator_figures.accuracy_finding(errors), f"{report.where}, {report.date}")
