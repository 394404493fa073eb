"""`python -m minserve fleet`: several servers behind one router, more of them when the queue grows.

    python -m minserve fleet --replicas 2 --policy prefix_aware
    python -m minserve fleet --min 1 --max 3 -- --model FOLDER --max-running 8

What stands after `--` is for each `minserve serve`. One line says where to ask, then one for every decision:

    minserve: routing to 1 replicas at URL
    minserve: SECONDS s | 9 ongoing | 1 running, 0 starting -> 3
    minserve: SECONDS s | URL answers after SECONDS s

One loop, every second: look (how many requests are under way, how many replicas run and start), decide (the
autoscaler), and make it so. Whoever crashes, or is ill and has nothing to do, is missing in the next round and is
started anew, at once the first time, then after longer and longer pauses. Whoever has to go is the one with least to
do: it gets nothing new, finishes what it has, and only then is its process stopped.

Story    notebooks/14_the_fleet.ipynb
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import fields

from minserve.cluster.autoscaler import Autoscaler, AutoscalingConfig, Round
from minserve.cluster.front import CLOSING_SECONDS, Server, settings
from minserve.cluster.policies import POLICIES
from minserve.cluster.replicas import LocalReplica, LocalReplicas, ReplicaFailed
from minserve.cluster.router import Router, create_app

LONGEST_PAUSE = 60.0  # seconds, before another try


class Fleet:
    """The loop. `async with local` (the processes) around it."""

    def __init__(
        self,
        router: Router,
        local: LocalReplicas,
        scaler: Autoscaler,
        *,
        interval: float = 1.0,
        drain_seconds: float = 30.0,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.router, self.local, self.scaler = router, local, scaler
        self.interval, self.drain_seconds, self._say = interval, drain_seconds, say
        self.running: list[LocalReplica] = []
        self.starting: list[asyncio.Task] = []
        self.leaving: set[asyncio.Task] = set()
        self.target = scaler.config.min_replicas
        self.history: list[Round] = []
        self.cold_starts: list[float] = []  # seconds
        self._began = time.monotonic()
        self._failures, self._failed, self._not_before = 0, 0.0, 0.0
        local.on_crash = self._crashed

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def say(self, line: str) -> None:
        self._say(f"minserve: {self.now:6.1f} s | {line}")

    async def start(self) -> None:
        """The first replicas. Raises ReplicaFailed if one of them cannot be started."""
        self._match()
        await asyncio.gather(*self.starting)
        self._began = time.monotonic()

    async def run(self) -> None:
        """Look, decide, make it so; until cancelled. Then nothing is started or stopped any more."""
        try:
            while True:
                self.round()
                await asyncio.sleep(self.interval)
        finally:
            tasks = [*self.starting, *self.leaving]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def round(self) -> None:
        self._replace_the_ill()
        self._match()
        ongoing, running = self.router.pool.ongoing, len(self.running)
        starting = self.target - running  # asked for, also those that wait for another try
        target = self.scaler.decide(self.now, ongoing, running, starting)
        self.history.append(Round(self.now, ongoing, running, starting, target))
        if target != self.target:
            self.say(f"{ongoing} ongoing | {running} running, {starting} starting -> {target}")
            self.target = target
            self._match()

    def _match(self) -> None:
        """As many as the target says, but for those whose next try has to wait."""
        missing = self.target - len(self.running) - len(self.starting)
        if missing > 0 and self.now >= self._not_before:
            self.starting += [asyncio.create_task(self._bring()) for _ in range(missing)]
        for _ in range(-missing):
            if self.starting:  # first those that do not answer yet, the youngest first
                self.starting.pop().cancel()
            else:  # then those with least to do
                pool = self.router.pool.replicas
                self._retire(min(self.running, key=lambda replica: pool[replica.url].ongoing))

    # ------------------------------------------------------------ one comes, one goes
    async def _bring(self) -> None:
        try:
            replica = await self.local.start()
        except ReplicaFailed as error:
            if not self.history:
                raise  # the very first: nothing to serve with
            self._failure(str(error))
        else:
            self.running.append(replica)
            self.cold_starts.append(replica.cold_start)
            self.router.pool.add(replica.url)
            self.say(f"{replica.url} answers after {replica.cold_start:.1f} s")
        finally:
            if (task := asyncio.current_task()) in self.starting:
                self.starting.remove(task)

    def _retire(self, replica: LocalReplica) -> None:
        self.running.remove(replica)
        self.router.pool.replicas[replica.url].draining = True
        task = asyncio.create_task(self._stop(replica))
        self.leaving.add(task)
        task.add_done_callback(self.leaving.discard)

    async def _stop(self, replica: LocalReplica) -> None:
        done = await self.router.pool.drain(replica.url, self.drain_seconds)
        self.say(f"{replica.url} leaves{'' if done else ' with requests under way'}")
        await self.local.stop(replica, CLOSING_SECONDS)
        self.router.pool.remove(replica.url)

    # ------------------------------------------------------------ trouble
    def _crashed(self, replica: LocalReplica) -> None:
        self.router.pool.remove(replica.url)
        if replica in self.running:
            self.running.remove(replica)
            self._failure(
                f"{replica.url} ended with {replica.process.returncode}: {' '.join(list(replica.said)[-1:])}"
            )

    def _replace_the_ill(self) -> None:
        for replica in list(self.running):
            seen = self.router.pool.replicas[replica.url]
            if not seen.healthy and not seen.ongoing:
                self._retire(replica)
                self._failure(f"{replica.url} is ill")

    def _failure(self, what: str) -> None:
        """When the next try may come: at once, then 2, 6, 14, ... seconds later; a quiet minute forgives all."""
        self._failures = 1 if self.now - self._failed > LONGEST_PAUSE else self._failures + 1
        self._failed = self.now
        self._not_before = self.now + min(LONGEST_PAUSE, 2.0**self._failures - 2)
        self.say(what)


# ---------------------------------------------------------------- the command
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 is a free one")
    parser.add_argument(
        "--policy", choices=list(POLICIES), default="least_outstanding", help="who gets a request"
    )
    parser.add_argument("--replicas", type=int, help="always so many; short for --min N --max N")
    parser.add_argument("--min", dest="min_replicas", type=int, help="replicas, at least; default: 1")
    parser.add_argument("--max", dest="max_replicas", type=int, help="replicas, at most; default: --min")
    for field in fields(AutoscalingConfig):
        if not field.name.endswith("replicas"):
            name = f"--{field.name.replace('_', '-')}"
            parser.add_argument(name, type=float, default=field.default, help=f"default: {field.default:g}")
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, help="for answers under way at the end; 30"
    )
    parser.add_argument("serve", nargs="*", help="after --: what each `minserve serve` gets")


def config_of(args) -> AutoscalingConfig:
    """Raises ValueError for numbers that exclude each other."""
    if args.replicas is not None and (args.min_replicas, args.max_replicas) != (None, None):
        raise ValueError("--replicas says how many there always are: leave out --min and --max")
    low = (
        args.replicas if args.replicas is not None else 1 if args.min_replicas is None else args.min_replicas
    )
    high = low if args.max_replicas is None else args.max_replicas
    if low < 1:
        raise ValueError(
            f"at least {low} replicas: without one, nobody would wait anywhere that this router sees; use 1"
        )
    others = {
        f.name: getattr(args, f.name) for f in fields(AutoscalingConfig) if not f.name.endswith("replicas")
    }
    return AutoscalingConfig(low, high, **others)


def main(args) -> int:
    try:
        config = config_of(args)
    except ValueError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 2
    try:
        return asyncio.run(serve(args, config))
    except ReplicaFailed as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 2


async def serve(args, config: AutoscalingConfig) -> int:
    router = Router(POLICIES[args.policy]())
    async with LocalReplicas(args.serve) as local:
        fleet = Fleet(router, local, Autoscaler(config), drain_seconds=args.drain_seconds, say=_say)
        listener = settings(create_app(router), args.host, args.port)
        announce = lambda url: _say(f"minserve: routing to {len(fleet.running)} replicas at {url}")
        server = Server(listener, announce, lambda: router.drain(args.drain_seconds))
        listening = listener.bind_socket()  # who has no port needs no replicas
        await fleet.start()
        turning = asyncio.create_task(fleet.run())
        try:
            await server.serve([listening])
        finally:
            turning.cancel()
            await asyncio.gather(turning, return_exceptions=True)
    return 0 if server.started else 1


def _say(line: str) -> None:
    print(line, flush=True)
