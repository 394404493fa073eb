"""The same Scheduler and the same PagePool under simulated time: what a day of traffic does, in seconds.

    engine       plan = schedule()      compute(batch): seconds pass       commit(plan, tokens)
    simulator    plan = schedule()      now += costs.of(work(plan))        commit(plan, made-up tokens)

Who is admitted, chunked, preempted or finished is decided by the very objects that decide it in the engine; only the
seconds come from a model of the step's cost, which is fitted to the engine's own step log. Tokens are made up, since no
cost depends on which they are: a prompt consists of its request's number, a shared prefix of its group's.

    StepCosts            seconds of a step = coefficients . features(its rows), all coefficients >= 0
    SimulatedEngine      add(arrival, now), run(until): one engine and its clock
    simulate             arrivals -> a Timeline each
    simulate_fleet       the same behind a router's policy, with an autoscaler whose replicas start cold

Runs of equal steps    While all decode and nobody can join or end, k steps are one call: the scheduler is told that each
                       request drafts k - 1 tokens, and all of them turn out right. The times are those of k single
                       steps, to the last bit; `stepwise=True` takes the long way.
Not modelled           drafts, stop strings, overlap, time to tokenise and to write to a socket. Steps do not jitter
Cost                   a few µs for each row of a planned step; fitting is one small least-squares problem
Sources  discrete-event simulation of LLM inference: Agrawal et al. 2024 (Vidur, arXiv:2405.05465); non-negative least
         squares: Lawson and Hanson 1974, "Solving Least Squares Problems", ch. 23
Story    notebooks/14_the_fleet.ipynb
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from operator import mul
from typing import NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from minserve.arrivals import Arrival
from minserve.cluster.autoscaler import Autoscaler
from minserve.cluster.policies import LeastOutstanding, Policy, Replica
from minserve.metrics import Timeline
from minserve.request import Draft, Request, SamplingParams
from minserve.scheduler import Plan, QueueFull, Scheduler
from minserve.step_log import Row, StepRecord

MADE_UP = 0  # every token of every answer


# ---------------------------------------------------------------- what a step costs
class Work(NamedTuple):
    """All that a step's seconds may depend on."""

    singles: int  # rows of one token
    seen: int  # positions that these look at
    chunks: int  # rows of several tokens
    tokens: int  # in these
    pairs: int  # of a query and a key in these
    read: int  # positions that these look at


def work(rows: Iterable[tuple[int, int]]) -> Work:
    """rows: (tokens, how many were computed before) of each request in the step."""
    singles = seen = chunks = tokens = pairs = read = 0
    for n, computed in rows:
        if n == 1:
            singles += 1
            seen += computed + 1
        else:
            chunks += 1
            tokens += n
            pairs += n * computed + n * (n + 1) // 2
            read += computed + n
    return Work(singles, seen, chunks, tokens, pairs, read)


STAIRS = (1, 2, 4, 8, 16, 32, 64, 128)  # a recorded decode step has the next larger of these for its rows
FEATURES = (
    "a step of single tokens", *(f"more than {rows} rows" for rows in STAIRS), "a row of it",
    "a position seen by a single token",
    "a step with a chunk", "a token of 32", "a token of the next 96", "a token from there on", "a chunk",
    "a pair in a chunk", "a position read by a chunk",
)  # fmt: skip


def features(w: Work) -> tuple[float, ...]:
    """One number for each of FEATURES. Kernels are chosen by the number of rows: hence stairs, and slopes by range."""
    if not w.chunks:
        return (1, *(w.singles > rows for rows in STAIRS), w.singles, w.seen)
    T = w.singles + w.tokens
    slopes = min(T, 32), min(max(T - 32, 0), 96), max(T - 128, 0)
    return (0,) * (len(STAIRS) + 2) + (w.seen, 1, *slopes, w.chunks, w.pairs, w.read)


class Costs(Protocol):
    """Whatever says how long a step takes. StepCosts learns it; others may assume it."""

    between: float  # seconds from the end of a step to the start of the next

    def of(self, work: Work) -> float: ...


@dataclass(frozen=True)
class StepCosts:
    """Seconds of each of FEATURES, and between two steps."""

    coefficients: tuple[float, ...]
    between: float = 0.0

    @classmethod
    def fit(cls, log: Sequence[StepRecord]) -> "StepCosts":
        """Non-negative least squares of relative errors; what other processes delayed counts less, and in the end all
        is scaled so that the log's steps take as long in sum as they did.

        Raises ValueError for a log that is too short to say anything.
        """
        log = [record for record in log if record.rows]
        if len(log) < 2 * len(FEATURES):
            raise ValueError(
                f"{len(log)} steps cannot tell {len(FEATURES)} costs apart: run for at least {2 * len(FEATURES)} steps"
            )
        seconds = np.array([record.total for record in log])
        table = np.zeros((len(log), len(FEATURES)))  # [steps, features]
        for line, record in zip(table, log):
            its = features(work_of(record.rows))
            line[: len(its)] = its
        relative, weights = table / seconds[:, None], np.ones(len(log))
        for _ in range(5):  # Huber's weights: errors beyond twice the median count linearly
            found = nonnegative_least_squares(relative * weights[:, None], weights)
            errors = np.abs(relative @ found - 1)
            weights = np.minimum(1, 2 * np.median(errors) / np.maximum(errors, 1e-12)) ** 0.5
        found *= seconds.sum() / (table @ found).sum()
        gaps = [
            after.start - before.start - before.total for before, after in pairwise(log) if went_on(before)
        ]
        return cls(tuple(found.tolist()), max(0.0, float(np.median(gaps))) if gaps else 0.0)

    def of(self, work: Work) -> float:
        return sum(map(mul, self.coefficients, features(work)))

    def seconds(self, rows: Iterable[Row]) -> float:
        """Of a step with these rows, as a step log has them."""
        return self.of(work_of(rows))

    def errors(self, log: Iterable[StepRecord]) -> list[float]:
        """predicted / measured - 1, of each step: for steps that were not fitted, how good the fit is."""
        return [self.seconds(record.rows) / record.total - 1 for record in log if record.rows]

    def table(self) -> str:
        """The coefficients that are not zero, to read."""
        lines = [
            f"{name:<36}{cost * 1e6:>12,.3f} µs" for name, cost in zip(FEATURES, self.coefficients) if cost
        ]
        return "\n".join([*lines, f"{'between two steps':<36}{self.between * 1e6:>12,.3f} µs"])


def work_of(rows: Iterable[Row]) -> Work:
    return work((row.num_tokens, row.computed) for row in rows)


def went_on(record: StepRecord) -> bool:
    """Was there work left after this step, so that the next one followed at once?"""
    return record.running + len(record.waiting) + record.behind > len(record.finished)


def nonnegative_least_squares(A, y):
    """The x >= 0 that minimises |A x - y|. A [m, n], y [m]."""
    scale = np.maximum(np.linalg.norm(A, axis=0), 1e-300)  # [n]; columns of one length
    A, x = A / scale, np.zeros(A.shape[1])
    free = np.zeros(len(x), dtype=bool)  # those that are not held at 0
    for _ in range(3 * len(x)):
        slope = np.where(free, -inf, A.T @ (y - A @ x))
        if slope.max() <= 1e-9 * np.linalg.norm(y):
            break
        free[slope.argmax()] = True
        while True:
            best = np.zeros(len(x))
            best[free] = np.linalg.lstsq(A[:, free], y, rcond=None)[0]
            below = free & (best <= 0)
            if not below.any():
                break
            part = np.min(x[below] / np.maximum(x[below] - best[below], 1e-300))
            x = x + part * (best - x)  # as far as all stay >= 0
            free &= x > 1e-15
        x = best
    return x / scale


# ---------------------------------------------------------------- one engine
class Moved(NamedTuple):
    """Keys and values that come from elsewhere, as the scheduler sees them."""

    num_tokens: int


class Flight(NamedTuple):
    """A step that runs, or several equal ones."""

    plan: Plan
    start: float
    ends: list[float]  # one for each step


class SimulatedEngine:
    def __init__(self, costs: Costs, scheduler: Scheduler, *, start: float = 0.0, stepwise: bool = False):
        self.costs, self.scheduler, self.stepwise = costs, scheduler, stepwise
        self.now = start  # when it is ready for a step
        self.flight: Flight | None = None
        self.steps = 0
        self._timelines: dict[int, Timeline] = {}  # by request id, until they end
        self._groups: dict = {}  # number of each shared prefix
        self._ids = 0

    @property
    def ongoing(self) -> int:
        """Requests that wait or run."""
        return len(self._timelines)

    def add(self, arrival: Arrival, now: float, begun: Timeline | None = None) -> Timeline:
        """Queue a request. `begun`: its timeline, if its prompt and first token were computed elsewhere.

        Raises ValueError for one that can never fit.
        """
        timeline = begun or Timeline(
            arrival.time, prompt_tokens=arrival.prompt_tokens, priority=arrival.priority
        )
        timeline.queued = self.flight.ends[-1] if self.flight else now
        prompt, moved = self.prompt(arrival), {}
        if begun:
            moved = dict(made=(MADE_UP,), kv=Moved(len(prompt)))
        request = Request(
            self._ids, prompt, PARAMS, arrival.output_tokens, priority=arrival.priority, **moved
        )
        self._ids += 1
        try:
            self.scheduler.add(request)
        except QueueFull:
            timeline.ended(now, "refused")
            return timeline
        self._timelines[request.id] = timeline
        self.now = max(self.now, now)
        return timeline

    def prompt(self, arrival: Arrival) -> list[int]:
        """Tokens that are equal to another request's exactly where they share a prefix."""
        shared = arrival.prefix_tokens if arrival.prefix is not None else 0
        group = self._groups.setdefault(arrival.prefix, -2 - len(self._groups))  # -1 is no token
        return [group] * shared + [1 + self._ids] * (arrival.prompt_tokens - shared)

    def run(self, until: float = inf) -> None:
        """All that happens before `until`: steps that end by then are settled, those that begin before it are begun."""
        while True:
            if self.flight:
                if self.flight.ends[-1] > until:
                    return
                self._land()
            if self.now >= until or not self._timelines:
                return
            self._launch(until)

    def _launch(self, until: float) -> None:
        scheduler, start = self.scheduler, self.now
        ends = [] if self.stepwise else self._equal_steps(until)
        if ahead := max(0, len(ends) - 1):
            draft = Draft([MADE_UP] * ahead)
            for request in scheduler.running:
                request.ahead = ahead
            plan = scheduler.schedule()
            scheduler.steps += ahead
            for request, _ in plan:
                request.ahead, request.draft = 0, draft
        else:
            plan = scheduler.schedule()
            if not plan:
                raise RuntimeError(
                    f"{self.ongoing} requests are under way, and the scheduler planned nothing"
                )
            ends = [start + self.costs.of(work((n, request.computed) for request, n in plan))]
        self.steps += len(ends)
        self.flight = Flight(plan, start, ends)
        self.now = ends[-1] + self.costs.between

    def _equal_steps(self, until: float) -> list[float]:
        """Ends of the decode steps that certainly come next, as long as nobody joins, ends, or lacks a page."""
        scheduler, pages = self.scheduler, self.scheduler.pages
        running, rows = scheduler.running, len(scheduler.running)
        if not rows or (scheduler.waiting and rows < scheduler.max_running):
            return []
        most = min(scheduler.token_budget // rows, min(r.most - len(r.tokens) for r in running))
        if most < 2 or any(len(r.tokens) - r.computed != 1 for r in running):
            return []
        if rows * (most // pages.page_size + 2) > pages.available:  # a new page for each, and one to spare
            return []
        seen, start, ends = sum(len(r.tokens) for r in running), self.now, []
        while len(ends) < most and start < until:
            ends.append(start + self.costs.of(Work(rows, seen, 0, 0, 0, 0)))
            start, seen = ends[-1] + self.costs.between, seen + rows
        return ends

    def _land(self) -> None:
        (plan, start, ends), self.flight = self.flight, None
        for request, num_tokens in plan:
            timeline = self._timelines[request.id]
            if timeline.started is None:
                timeline.started = start
            if request.computed + num_tokens >= len(request.tokens):
                timeline.tokens += ends
                if timeline.first is None:
                    timeline.first = ends[0]
        for request in self.scheduler.commit(plan, [[MADE_UP] * len(ends)] * len(plan)):
            timeline = self._timelines.pop(request.id)
            timeline.ended(ends[-1], request.finish_reason)
            timeline.cached_tokens, timeline.preemptions = request.cached_tokens, request.preemptions


PARAMS = SamplingParams(ignore_eos=True)  # how many tokens it makes is known, and said elsewhere


def simulate(
    arrivals: Sequence[Arrival],
    costs: Costs,
    make_scheduler: Callable[[], Scheduler],
    *,
    stepwise: bool = False,
    progress: bool = False,
) -> list[Timeline]:
    """What one engine does with these arrivals: a timeline for each, in their order."""
    engine = SimulatedEngine(costs, make_scheduler(), stepwise=stepwise)
    timelines = []
    for arrival in tqdm(in_order(arrivals), unit="request", disable=not progress):
        engine.run(arrival.time)
        timelines.append(engine.add(arrival, arrival.time))
    engine.run()
    return timelines


def in_order(arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
    for i, (a, b) in enumerate(pairwise(arrivals), 1):
        if b.time < a.time:
            raise ValueError(
                f"arrival {i} comes at {b.time:g} s, after one at {a.time:g} s: sort them by time"
            )
    return arrivals


# ---------------------------------------------------------------- a fleet
class Round(NamedTuple):
    """What one round of the autoscaler saw and decided."""

    time: float
    ongoing: int
    running: int
    starting: int
    leaving: int
    target: int


@dataclass
class Member:
    """A replica of the fleet, and what the router knows of it."""

    engine: SimulatedEngine
    ready: float
    known: Replica


@dataclass
class Fleet:
    make_engine: Callable[[float], SimulatedEngine]  # of the time when it starts
    policy: Policy = field(default_factory=LeastOutstanding)
    cold_start: float = 0.0  # seconds
    members: list[Member] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    started: int = 0  # replicas so far

    def start(self, now: float, ready: float) -> None:
        self.members.append(Member(self.make_engine(ready), ready, Replica(str(self.started))))
        self.started += 1

    def look(self, now: float) -> None:
        """Bring everybody to this time, and let go who leaves and has nothing left to do."""
        for member in self.members:
            member.engine.run(now)
            member.known.ongoing, member.known.healthy = member.engine.ongoing, member.ready <= now
        for member in [m for m in self.members if m.known.draining and not m.engine.ongoing]:
            self.members.remove(member)
            self.policy.forget(member.known.url)

    def add(self, arrival: Arrival, begun: Timeline | None = None) -> Timeline:
        self.look(arrival.time)
        known = [member.known for member in self.members]
        chosen = self.policy.choose(known, self.members[0].engine.prompt(arrival) if self.members else ())
        if chosen is None:
            refused = begun or Timeline(arrival.time, priority=arrival.priority)
            refused.ended(arrival.time, "refused")
            return refused
        return self.members[known.index(chosen)].engine.add(arrival, arrival.time, begun)

    def scale(self, now: float, scaler: Autoscaler) -> None:
        """One round: who is one too many takes nothing new, those that are not ready yet first, then the least busy."""
        self.look(now)
        staying = [member for member in self.members if not member.known.draining]
        running = sum(member.ready <= now for member in staying)
        ongoing = sum(member.engine.ongoing for member in self.members)
        target = scaler.decide(now, ongoing, running, len(staying) - running)
        leaving = len(self.members) - len(staying)
        self.rounds.append(Round(now, ongoing, running, len(staying) - running, leaving, target))
        for _ in range(target - len(staying)):
            self.start(now, now + self.cold_start)
        staying.sort(key=lambda m: (-m.ready if m.ready > now else 0.0, m.engine.ongoing))
        for member in staying[: max(0, len(staying) - target)]:
            member.known.draining = True


def simulate_fleet(
    arrivals: Sequence[Arrival],
    make_engine: Callable[[float], SimulatedEngine],
    replicas: int = 1,
    *,
    policy: Policy | None = None,
    scaler: Autoscaler | None = None,
    cold_start: float = 0.0,
    interval: float = 1.0,
    begun: Sequence[Timeline] | None = None,
    progress: bool = False,
) -> tuple[list[Timeline], list[Round]]:
    """Arrivals behind a router: a timeline each, and the autoscaler's rounds, one every `interval` seconds.

    begun: a timeline for each arrival, if prompts were computed elsewhere.
    """
    fleet = Fleet(make_engine, policy or LeastOutstanding(), cold_start)
    for _ in range(replicas):
        fleet.start(0.0, 0.0)
    timelines, turn = [], 0
    for i, arrival in enumerate(tqdm(in_order(arrivals), unit="request", disable=not progress)):
        while scaler and turn * interval <= arrival.time:
            fleet.scale(turn * interval, scaler)
            turn += 1
        timelines.append(fleet.add(arrival, begun[i] if begun else None))
    fleet.look(inf)
    return timelines, fleet.rounds
