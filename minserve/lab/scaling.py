"""An autoscaler replayed on bursts, in the smallest model of a fleet that can oscillate: a queue, seats, a cold start.

    load = Bursts(calm=2, burst=12, every=60, lasts=10)     requests/s as a function of time
    run  = replay(load, AutoscalingConfig(...), seconds=600)
    run.changes, run.over, run.under                        how often it changed its mind, and what that cost

The model: requests come at random with that rate, wait in one queue, and hold one of `seats` of a replica for `service`
seconds, however many do so beside them. A replica serves `cold_start` seconds after it was asked for; one that is no
longer wanted takes nothing new and goes when its last request has ended. The autoscaler is asked every `interval`.

    need    what the rate asks for now: rate * service / target_ongoing_requests, rounded up (Little's law)
    over    replica-seconds above the need, paid for without use
    under   seconds in which fewer served than needed
    waited  seconds in the queue, of each request

Cost     O(seconds / tick) + O(requests)
Sources  over- and under-provisioned: the elasticity metrics of Herbst et al. 2013 (ICAC), here in seconds
Story    notebooks/14_the_fleet.ipynb
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from random import Random

from minserve.cluster.autoscaler import Autoscaler, AutoscalingConfig, Round

Load = Callable[[float], float]  # time in seconds to requests/s

NAIVE = AutoscalingConfig(
    max_replicas=8, look_back_period_s=0, upscale_delay_s=0, downscale_delay_s=0, hysteresis=0
)
STEADY = AutoscalingConfig(max_replicas=8, look_back_period_s=30, upscale_delay_s=5, downscale_delay_s=120)


@dataclass(frozen=True)
class Bursts:
    """`calm` requests/s, and every `every` seconds, for `lasts` seconds, `burst`."""

    calm: float = 1.0
    burst: float = 6.0
    every: float = 60.0
    lasts: float = 10.0

    def __call__(self, time: float) -> float:
        return self.burst if time % self.every >= self.every - self.lasts else self.calm


@dataclass
class Replay:
    interval: float
    rounds: list[Round] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)  # at each round
    waited: list[float] = field(default_factory=list)

    @property
    def changes(self) -> int:
        return sum(r.target != r.running + r.starting for r in self.rounds)

    @property
    def turns(self) -> int:
        """Changes against the direction of the one before: what oscillates turns, what follows a ramp does not."""
        signs = [r.target > r.running + r.starting for r in self.rounds if r.target != r.running + r.starting]
        return sum(a != b for a, b in zip(signs, signs[1:]))

    @property
    def over(self) -> float:
        return self.interval * sum(
            max(0, r.running + r.starting - need) for r, need in zip(self.rounds, self.needs)
        )

    @property
    def under(self) -> float:
        return self.interval * sum(r.running < need for r, need in zip(self.rounds, self.needs))


@dataclass
class _Replica:
    ready: float  # when its cold start is over
    busy: list[float] = field(default_factory=list)  # when each of its requests ends
    leaving: bool = False


def replay(
    load: Load,
    config: AutoscalingConfig,
    seconds: float = 600,
    *,
    service: float = 2.0,
    seats: int = 4,
    cold_start: float = 20.0,
    interval: float = 1.0,
    tick: float = 0.1,
    seed: int = 0,
    decide: Callable[..., int] | None = None,
) -> Replay:
    """Run the model. `decide` stands in for Autoscaler(config).decide."""
    rng, scaler = Random(seed), Autoscaler(config)
    decide = decide or scaler.decide
    run, queue = Replay(interval), deque()
    fleet = [_Replica(0.0) for _ in range(max(1, config.min_replicas))]
    coming = rng.expovariate(
        1
    )  # arrivals are one per unit of the rate's integral: a Poisson process in that time
    for step in range(round(seconds / tick)):
        now = step * tick
        coming -= load(now) * tick
        while coming <= 0:
            queue.append(now)
            coming += rng.expovariate(1)
        _serve(fleet, queue, run, now, service, seats)
        if step % round(interval / tick) == 0:
            _decide(fleet, queue, run, now, decide, cold_start, load(now), service, config)
    return run


def _serve(fleet, queue, run, now, service, seats) -> None:
    for replica in fleet:
        replica.busy = [end for end in replica.busy if end > now]
    fleet[:] = [replica for replica in fleet if replica.busy or not replica.leaving]
    while queue:
        free = [r for r in fleet if r.ready <= now and not r.leaving and len(r.busy) < seats]
        if not free:
            return
        min(free, key=lambda r: len(r.busy)).busy.append(now + service)
        run.waited.append(now - queue.popleft())


def _decide(fleet, queue, run, now, decide, cold_start, rate, service, config) -> None:
    staying = [r for r in fleet if not r.leaving]
    running = sum(r.ready <= now for r in staying)
    ongoing = len(queue) + sum(len(r.busy) for r in fleet)
    target = decide(now, ongoing, running, len(staying) - running)
    need = ceil(rate * service / config.target_ongoing_requests)
    run.needs.append(min(max(need, config.min_replicas), config.max_replicas))
    run.rounds.append(Round(now, ongoing, running, len(staying) - running, target))
    fleet += [_Replica(now + cold_start) for _ in range(target - len(staying))]
    # who leaves: those not ready yet, the newest first; then the least busy
    staying.sort(key=lambda r: (-r.ready if r.ready > now else 0.0, len(r.busy)))
    for replica in staying[: max(0, len(staying) - target)]:
        replica.leaving = True


def desired(ongoing: int, target: float, low: int, high: int) -> int:
    """The rule alone, without time: so many replicas that each has `target` requests under way."""
    config = AutoscalingConfig(low, high, target, 0, 0, 0, hysteresis=0)
    return Autoscaler(config).decide(0.0, ongoing, max(low, 1))
