"""A fleet of simulated engines behind a router's policy, under the autoscaler: the same objects as with real processes.

    timelines, rounds = simulate_fleet(arrivals, make_engine, replicas, policy=..., scaler=..., cold_start=...)

A request goes, when it arrives, to the replica that the policy chooses by what it knows then. The autoscaler is asked
every `interval` seconds; a replica serves `cold_start` seconds after it was asked for, and one that is not wanted any
more takes nothing new and goes when its last request has ended. Where nobody can take a request, it is refused.

Story    notebooks/14_the_fleet.ipynb
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from tqdm import tqdm

from minserve.arrivals import Arrival
from minserve.cluster.autoscaler import Autoscaler
from minserve.cluster.policies import LeastOutstanding, Policy, Replica
from minserve.metrics import Timeline
from minserve.simulator.engine import SimulatedEngine, in_order, prompt_of


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
    arrived: int = 0  # requests

    def start(self, ready: float) -> None:
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
        self.arrived += 1
        chosen = self.policy.choose(known, prompt_of(arrival, self.arrived))
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
            self.start(now + self.cold_start)
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
        fleet.start(0.0)
    timelines, turn = [], 0
    for i, arrival in enumerate(tqdm(in_order(arrivals), unit="request", disable=not progress)):
        while scaler and turn * interval <= arrival.time:
            fleet.scale(turn * interval, scaler)
            turn += 1
        timelines.append(fleet.add(arrival, begun[i] if begun else None))
    fleet.look(inf)
    return timelines, fleet.rounds
