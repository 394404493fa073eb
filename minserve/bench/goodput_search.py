"""The search for a goodput: the highest rate at which enough of the requests that arrive get every token in time.

    highest(passes, guess, low)     where a yes becomes a no: steps of 1, 2, 4, ... from a guess, then halves
    Side                            an engine, and what comes to it at any rate
    Comparison                      the search for every seed, SLO and side, coarser where seconds run out; then rows

Rates are powers of 1.2. One seed's requests are the same at every rate and for every side, only faster: sides differ
by what they do, not by luck. A loose SLO's search begins where the strict one's ended, and a seed's where the last
one's did. A run that has lost 30 % for certain is stopped: its share is then the most it could have been.
Story    notebooks/13_serving_and_slos.ipynb
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from minserve.arrivals import Arrival
from minserve.bench.common import Options
from minserve.bench.goodput_work import Promise, Trace
from minserve.bench.served import doomed, drive, prompts_of
from minserve.engine import Engine
from minserve.lab.report import Report, Row
from minserve.metrics import Timeline, attainment

ENOUGH, LOST, STEP = 0.90, 0.30, 1.2
SEEDS = (0, 1, 2)


def highest(
    passes: Callable[[int], bool],
    guess: int,
    low: int,
    known: int | None = None,
    more: Callable[[], bool] = lambda: True,
) -> tuple[int | None, int | None]:
    """(highest k that passes, lowest that does not), neighbours, where all up to some k pass. `known`: one that does.

    None for what was not found: nothing passes down to `low`, or more() said that time is over.
    """
    good, bad, step = known, None, 1
    k = guess if known is None else max(guess, known + 1)
    while True:
        if passes(k):
            good = k
        else:
            bad = k
        if not more() or (good is None and bad <= low) or (None not in (good, bad) and bad - good == 1):
            return good, bad
        if good is None:
            k = max(low, bad - step)
        elif bad is None:
            k = good + step
        else:
            k = (good + bad) // 2
        step *= 2


@dataclass(frozen=True)
class Found:
    good: int | None
    bad: int | None

    @property
    def rate(self) -> float:
        return 0.0 if self.good is None else STEP**self.good

    @property
    def at_most(self) -> float:
        """What to divide by: the rate, or where none passed the lowest that was tried."""
        return self.rate or STEP**self.bad

    @property
    def exact(self) -> bool:
        return None not in (self.good, self.bad) and self.bad - self.good == 1


def power(rate: float) -> int:
    return math.floor(math.log(rate) / math.log(STEP))


# ---------------------------------------------------------------- one side, served
class Side:
    """An engine and what comes to it."""

    def __init__(self, name: str, trace: Trace, engine: Engine, requests: int, seconds: float, **timing):
        """A run has at least so many requests and seconds; `timing`: clock and sleep, where time is imagined."""
        self.name, self.trace, self.engine, self.runs = name, trace, engine, 0
        self.requests, self.seconds, self.timing = requests, seconds, timing
        many = len(self.arrivals(self.at_once(requests), SEEDS[0]))  # that has warmed up
        self.capacity = max(self.at_once(many) for _ in range(2))  # a bound: a slow moment must not lower it

    def at_once(self, requests: int) -> float:
        """Requests per second, when so many are all there."""
        its = self.serve([replace(a, time=0.0) for a in self.trace(1.0, requests, SEEDS[0])])
        return requests / (max(t.finished for t in its) - its[0].arrival)

    def arrivals(self, rate: float, seed: int) -> list[Arrival]:
        return self.trace(rate, max(self.requests, math.ceil(rate * self.seconds)), seed)

    def serve(self, arrivals: list[Arrival], **options) -> list[Timeline]:
        self.runs += 1
        prompts = prompts_of(arrivals, self.engine.model.config.vocab_size, self.runs)
        return drive(self.engine, arrivals, prompts, **self.timing, **options)

    def kept(self, promise: Promise, rate: float, seed: int) -> float:
        """Share of arrived requests in time; of a run that was stopped, the most it could have been."""
        lost = 0

        def hopeless(timelines, now):
            nonlocal lost
            lost = doomed(timelines, promise, now)
            return lost > LOST * len(timelines)

        timelines = self.serve(self.arrivals(rate, seed), give_up=hopeless)
        stopped = any(t.finished is None for t in timelines)
        return 1 - lost / len(timelines) if stopped else attainment(timelines, promise)


# ---------------------------------------------------------------- every seed, SLO and side
class Comparison:
    """Two sides, some SLOs. The first SLO is the strictest: what meets it meets the others."""

    def __init__(
        self, case: str, sides: list[Side], promises: dict[str, Promise], bounds: dict | None = None
    ):
        """bounds: {(slo, side): the rate it can bear at best}, where more is known than what the side can serve."""
        self.case, self.sides, self.promises, self.bounds = case, sides, promises, bounds or {}
        self.found: dict[tuple[str, str], dict[int, Found]] = defaultdict(dict)  # (slo, side): by seed
        self.shares: dict[tuple[str, str], dict[int, dict[int, float]]] = defaultdict(
            lambda: defaultdict(dict)
        )

    def search(self, options: Options) -> "Comparison":
        tasks = {
            f"{self.case}, seed {seed}, {slo}, {side.name}": (seed, slo, side)
            for seed, slo, side in product(SEEDS, self.promises, self.sides)
        }
        progress = options.progress(self.case)
        for done, (name, its) in enumerate(options.shares(tasks, least=len(tasks))):
            self.one(its, *tasks[name])
            progress(done + 1, len(tasks))
        return self

    def one(self, options: Options, seed: int, slo: str, side: Side) -> None:
        key, low = (slo, side.name), power(side.capacity / 16)
        before = [its.good for its in self.found[key].values() if its.good is not None]
        guess = before[-1] if before else power(self.bounds.get(key, side.capacity) / 2)
        strictest = self.found[next(iter(self.promises)), side.name].get(seed)

        def passes(k: int) -> bool:
            share = side.kept(self.promises[slo], STEP**k, seed)
            self.shares[key][k][seed] = share
            return share >= ENOUGH

        known = strictest.good if strictest else None
        ends = highest(passes, max(guess, low), low, known, lambda: options.left > 0)
        self.found[key][seed] = Found(*ends)

    def rates(self, slo: str, side: str) -> list[float]:
        return [its.rate for its in self.found[slo, side].values()]

    def add_rows(self, report: Report, targets: dict[str, float]) -> None:
        """targets: {slo: the least ratio of the first side to the second}"""
        for slo, promise in self.promises.items():
            for side in self.sides:
                its, shares = self.found[slo, side.name].values(), self.shares[slo, side.name]
                rough = sum(not found.exact for found in its)
                note = f"{promise}; {sum(map(len, shares.values()))} runs"
                note += f"; {rough} of {len(its)} searches did not get to the end" if rough else ""
                bound = self.bounds.get((slo, side.name), side.capacity)
                case, rates = f"{self.case}, {slo}: {side.name}", self.rates(slo, side.name)
                report.add(Row(case, "requests/s", rates, bound, note=note))
            ours, theirs = (self.found[slo, side.name] for side in self.sides)
            ratios = [ours[seed].rate / theirs[seed].at_most for seed in theirs if seed in ours]
            names = " / ".join(side.name for side in self.sides)
            report.add(Row(f"{self.case}, {slo}: {names}", "x", ratios, 1.0, targets.get(slo)))
            for side in self.sides:
                for k, its in sorted(self.shares[slo, side.name].items()):
                    case = f"{self.case}, {slo}, {side.name}: in time at {STEP**k:.3g} requests/s"
                    note = "seeds " + " ".join(map(str, its))
                    report.add(Row(case, "share", list(its.values()), note=note))
