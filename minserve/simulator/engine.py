"""One engine under simulated time: the same Scheduler and the same PagePool, seconds from a model of the step's cost.

    engine       plan = schedule()      compute(batch): seconds pass       commit(plan, tokens)
    simulator    plan = schedule()      now += costs.of(work(plan))        commit(plan, made-up tokens)

Who is admitted, chunked, preempted or finished is decided by the very objects that decide it in the engine. Tokens are
made up, since no cost depends on which they are: a prompt consists of its request's number, a shared prefix of its
group's.

    SimulatedEngine      add(arrival, now), run(until)
    simulate             arrivals -> a Timeline each

Runs of equal steps    While all decode and nobody can join or end, k steps are one call: the scheduler is told that
                       each request drafts k - 1 tokens, and all of them turn out right. The times are those of k
                       single steps, to the last bit; `stepwise=True` takes the long way.
Not modelled           drafts, stop strings, overlap; time to tokenise and to write to a socket; jitter
Invariants             every arrival ends once; when nobody is under way, every page is back
Cost                   Python time for each row of a planned step, whatever its tokens
Sources  discrete-event simulation of LLM inference: Agrawal et al. 2024 (Vidur, arXiv:2405.05465)
Story    notebooks/14_the_fleet.ipynb
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from tqdm import tqdm

from minserve.arrivals import Arrival
from minserve.metrics import Timeline
from minserve.request import Draft, Request, SamplingParams
from minserve.scheduler import Plan, QueueFull, Scheduler
from minserve.simulator.costs import Costs, Work, work

MADE_UP = 0  # every token of every answer
PARAMS = SamplingParams(ignore_eos=True)  # how many tokens a request makes is known, and said elsewhere


class Moved(NamedTuple):
    """Keys and values that come from elsewhere, as the scheduler sees them."""

    num_tokens: int


class Flight(NamedTuple):
    """A step that runs, or several equal ones."""

    plan: Plan
    start: float
    ends: list[float]  # one for each step


def prompt_of(arrival: Arrival, number: int) -> list[int]:
    """Tokens that are equal to another request's exactly where they share a prefix."""
    shared = arrival.prefix_tokens if arrival.prefix is not None else 0
    return [-2 - (arrival.prefix or 0)] * shared + [number + 1] * (arrival.prompt_tokens - shared)


class SimulatedEngine:
    def __init__(self, costs: Costs, scheduler: Scheduler, *, start: float = 0.0, stepwise: bool = False):
        self.costs, self.scheduler, self.stepwise = costs, scheduler, stepwise
        self.now = start  # when it is ready for a step
        self.idle_since = start  # since when it could have begun one
        self.flight: Flight | None = None
        self.steps = 0
        self._timelines: dict[int, Timeline] = {}  # by request id, until they end
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
        prompt, moved = prompt_of(arrival, self._ids), {}
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
            seconds = self.costs.of(work((n, request.computed) for request, n in plan))
            ends = [start + seconds + self.costs.after(start - self.idle_since)]
        self.steps += len(ends)
        self.flight = Flight(plan, start, ends)
        self.now = ends[-1] + self.costs.between
        self.idle_since = self.now

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
            ends.append(start + self.costs.of(Work(rows, seen)))
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
            timeline.cached_tokens += request.cached_tokens
            timeline.preemptions += request.preemptions


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
