"""Studies that two cores cannot show, with the simulator: each is a function that returns plain data.

    split(mix, links)         two chunked replicas against one for prompts and one for answers: goodput of both
    scaled(settings)          a day under an autoscaler: who got what was promised, and for how many replica-hours
    capacity(...)             the highest rate that an SLO bears, for each seed
    overloaded(ageing)        more comes than can be served: what priorities do to whom

The cost of a step is what `bench simulator` has learned from the engine on a real machine; or, for GPUs, it is assumed
(simulated_costs.py). So what is said of GPUs is how the answer *depends* on links and lengths, not what it is.

Goodput    requests/s of which at least ENOUGH met the SLO; runs are of some hundred requests, so a queue that would
           only have grown later is not seen
Transfers  keys and values of a prompt go over one link, one after the other (cluster/link.py); the first token is shown
           when it is made. Each side has as many devices as the other
Sources    disaggregation: Zhong et al. 2024 (DistServe, arXiv:2401.09670); Patel et al. 2024 (Splitwise, ISCA)
Story      notebooks/14_the_fleet.ipynb
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from minserve.arrivals import Arrival, Lengths, poisson, uniform, with_priorities
from minserve.cluster.autoscaler import Autoscaler, AutoscalingConfig
from minserve.cluster.link import Link
from minserve.lab.simulated_costs import PAGE, Assumed, promise
from minserve.metrics import SLO, Timeline, attainment, percentile
from minserve.pages import PagePool
from minserve.scheduler import Scheduler
from minserve.simulator.costs import Costs, Work
from minserve.simulator.engine import SimulatedEngine, simulate
from minserve.simulator.fleet import Round, simulate_fleet

ENOUGH = 0.9


def highest(bears: Callable[[float], bool], guess: float, within: float = 1.06) -> float:
    """The highest rate that it bears, to a factor of `within`; 0 if not even a 64th of the guess."""
    low, high, rate = 0.0, math.inf, guess
    while not low or high / low > within:
        if bears(rate):
            low = rate
        else:
            high = rate
        if high < guess / 64 or low > 64 * guess:
            break
        rate = 2 * low if high == math.inf else high / 2 if not low else math.sqrt(low * high)
    return low


# ---------------------------------------------------------------- chunked or disaggregated
STRICT = (5.0, 1.2)  # TTFT in prompts computed alone, tokens in decode steps of DECODING requests
MIXES = ((512, 512), (512, 256), (1024, 256), (2048, 256), (4096, 256))  # mean tokens of prompt and answer
LINKS = (1e9, 4e9, 16e9, 64e9)  # bytes/s
LATENCY = 1e-3  # seconds of a transfer, whatever its size
BUDGETS = (160, 256, 512)  # tokens of a chunked step: the best one counts
SEATS = 128


def around(prompt: int, output: int) -> Lengths:
    return uniform((prompt // 2, 3 * prompt // 2), (output // 2, 3 * output // 2))


def split(
    mix: tuple[int, int],
    links: Sequence[float] = LINKS,
    *,
    costs: Assumed | None = None,
    multiples: tuple[float, float] = STRICT,
    seconds: float = 15.0,
    requests: int = 50,
    seed: int = 0,
) -> dict:
    """{prompt, output, slo, chunked: {budget: goodput}, disaggregated: {bytes/s: goodput}}: two devices each.

    A run lasts at least so many seconds, and brings at least so many requests.
    """
    costs = costs or Assumed()
    slo = promise(costs, *mix, multiples)

    def goodput(serve: Callable[[list[Arrival]], list[Timeline]], guess: float) -> float:
        trace = lambda rate: poisson(rate, max(seconds, requests / rate), around(*mix), seed)
        return highest(lambda rate: attainment(serve(trace(rate)), slo) >= ENOUGH, guess)

    guess = 1 / (costs.token * mix[0] + costs.of(Work(64, 64 * sum(mix))) * mix[1] / 64)
    chunked, moved = {}, {}
    for budget in BUDGETS:
        chunked[budget] = goodput(partial(colocated, costs=costs, budget=budget), guess)
        guess = chunked[budget] or guess
    for bandwidth in sorted(links, reverse=True):
        moved[bandwidth] = goodput(partial(disaggregated, costs=costs, link=Link(bandwidth, LATENCY)), guess)
        guess = moved[bandwidth] or guess
    return {"prompt": mix[0], "output": mix[1], "slo": slo, "chunked": chunked, "disaggregated": moved}


def colocated(arrivals: Sequence[Arrival], costs: Assumed, budget: int, devices: int = 2) -> list[Timeline]:
    """So many replicas, each of which does both."""
    make = lambda start: SimulatedEngine(costs, scheduler(costs.num_pages, budget, SEATS))
    return simulate_fleet(arrivals, make, devices)[0]


def disaggregated(arrivals: Sequence[Arrival], costs: Assumed, link: Link) -> list[Timeline]:
    """One device computes prompts and first tokens, a link carries keys and values, another one goes on."""
    prompts = [replace(arrival, output_tokens=1) for arrival in arrivals]
    timelines = simulate(prompts, costs, partial(scheduler, costs.num_pages, 2048, SEATS))
    free, moved = 0.0, []
    for i in sorted(range(len(arrivals)), key=lambda i: timelines[i].finished):
        if arrivals[i].output_tokens > 1:
            seconds = link.predicted_seconds(arrivals[i].prompt_tokens * costs.position_bytes)
            free = max(free, timelines[i].finished) + seconds
            moved.append((replace(arrivals[i], time=free), timelines[i]))
    for _, timeline in moved:
        timeline.finished = timeline.reason = None  # it goes on
    make = lambda start: SimulatedEngine(costs, scheduler(costs.num_pages, 8 * SEATS, 2 * SEATS))
    simulate_fleet([arrival for arrival, _ in moved], make, begun=[timeline for _, timeline in moved])
    return timelines


def scheduler(num_pages: int, token_budget: int, seats: int, **limits) -> Scheduler:
    return Scheduler(PagePool(num_pages, PAGE, prefix_caching=False), token_budget, seats, **limits)


# ---------------------------------------------------------------- what a machine bears
CHAT = uniform((20, 200), (10, 60))
SMALL = partial(scheduler, 2048, 256, 16, max_waiting=1_000_000)  # the engine of `bench simulator`


def capacity(
    costs: Costs, slo: SLO, lengths: Lengths = CHAT, *, requests: int = 300, seeds: Sequence[int] = (0, 1, 2)
) -> list[float]:
    """The highest rate at which ENOUGH requests meet the SLO, for each seed. Plan with the lowest."""

    def bears(rate: float, seed: int) -> bool:
        return (
            attainment(simulate(poisson(rate, requests / rate, lengths, seed), costs, SMALL), slo) >= ENOUGH
        )

    return [highest(partial(bears, seed=seed), 1.0, within=1.03) for seed in seeds]


def full_rate(costs: Costs, lengths: Lengths = CHAT, requests: int = 300) -> float:
    """Requests per second when there are always more: between the first fifth that is done and the last one."""
    heap = [replace(arrival, time=0.0) for arrival in poisson(1.0, requests, lengths, 0)]
    ends = sorted(t.finished for t in simulate(heap, costs, SMALL))
    fifth = requests // 5
    return (requests - 2 * fifth) / (ends[-fifth] - ends[fifth])


# ---------------------------------------------------------------- more than can be served
URGENT = 0.2  # of the requests


def overloaded(
    costs: Costs, ageing: int | None, *, load: float = 1.3, seconds: float = 120.0, seed: int = 0
) -> dict[str, dict]:
    """{"urgent", "others"}: TTFT of both classes while `load` times what can be served comes for some time.

    ageing: how many steps of waiting a class is worth; None: all are of one class, and wait in one queue.
    """
    arrivals = poisson(load * full_rate(costs), seconds, CHAT, seed)
    classes = [a.priority for a in with_priorities(arrivals, {0: URGENT, 1: 1 - URGENT}, seed)]
    limits = {} if ageing is None else {"ageing": ageing}
    served = [replace(a, priority=0 if ageing is None else c) for a, c in zip(arrivals, classes)]
    timelines = simulate(served, costs, partial(SMALL, **limits))
    found = {}
    for name, of in (("urgent", 0), ("others", 1)):
        waits = [t.ttft for t, c in zip(timelines, classes) if c == of]
        found[name] = {"mean": sum(waits) / len(waits), **{f"p{q}": percentile(waits, q) for q in (50, 99)}}
    return found


# ---------------------------------------------------------------- a day
@dataclass(frozen=True)
class Day:
    """Load over a day, in what one replica can serve: low at midnight, high at noon, and bursts on top."""

    rate: float  # requests/s that one replica can serve
    seconds: float = 1800.0  # of a day, which may be a short one
    low: float = 0.1
    high: float = 2.5
    bursts: tuple[float, ...] = (0.25, 0.7)  # when they begin, as shares of the day
    lasts: float = 0.02  # likewise
    height: float = 1.5

    def __call__(self, time: float) -> float:
        share = time / self.seconds % 1
        load = self.low + (self.high - self.low) * ((1 - math.cos(2 * math.pi * share)) / 2) ** 2
        return self.rate * (
            load + self.height * any(0 <= share - begin < self.lasts for begin in self.bursts)
        )

    def arrivals(self, lengths: Lengths, seed: int = 0) -> list[Arrival]:
        """A Poisson process of this rate: candidates at the highest one, each kept with the share that is true then."""
        rng, time, found, peak = Random(seed), 0.0, [], self.rate * (self.high + self.height)
        while (time := time + rng.expovariate(peak)) < self.seconds:
            if rng.random() * peak < self(time):
                found.append(Arrival(time, *lengths(rng)))
        return found


USUAL = dict(max_replicas=6, target_ongoing_requests=6)
HASTY = AutoscalingConfig(**USUAL, look_back_period_s=0, upscale_delay_s=0, downscale_delay_s=0, hysteresis=0)
STEADY = AutoscalingConfig(**USUAL, look_back_period_s=10, upscale_delay_s=0, downscale_delay_s=60)


def scaled(
    costs: Costs,
    settings: AutoscalingConfig | int,
    *,
    slo: SLO,
    day: Day | None = None,
    cold_start: float = 10.0,
    interval: float = 2.0,
    seed: int = 0,
    progress: bool = False,
) -> dict:
    """{attainment, replica_hours, turns, rounds} of a day. settings: an autoscaler's, or a number that stays."""
    day = day or Day(full_rate(costs))
    if isinstance(settings, int):
        settings = AutoscalingConfig(min_replicas=settings, max_replicas=settings)
    timelines, rounds = simulate_fleet(
        day.arrivals(CHAT, seed), lambda start: SimulatedEngine(costs, SMALL(), start=start), settings.min_replicas,
        scaler=Autoscaler(settings), cold_start=cold_start, interval=interval, progress=progress,
    )  # fmt: skip
    held = sum(r.running + r.starting + r.leaving for r in rounds) * interval
    return {
        "attainment": attainment(timelines, slo),
        "replica_hours": held / 3600,
        "turns": turns(rounds),
        "rounds": rounds,
    }


def turns(rounds: Sequence[Round]) -> int:
    """Changes against the direction of the one before: what oscillates turns, what follows a day turns rarely."""
    changes = [r.target - r.running - r.starting for r in rounds if r.target != r.running + r.starting]
    return sum((a > 0) != (b > 0) for a, b in zip(changes, changes[1:]))
