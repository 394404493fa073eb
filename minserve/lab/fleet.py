"""A fleet of real processes, measured: what a router's policy is worth, and one that grows and shrinks.

    python -m minserve.lab.fleet routing [--json FILE] [--replicas 2]     each policy, on prompts with shared prefixes
    python -m minserve.lab.fleet scaling [--json FILE]                    1 -> 3 -> 1 under a burst of users

routing    The same schedule for each policy, on servers started anew: groups of prompts whose first tokens are the
           same, and pages for about half of the groups on each server. Measured: the share of prompt tokens that some
           cache held, and the time to first token. The bound of the share: each prefix computed once, and kept.
scaling    Users who ask again as soon as they are answered: few, then many, then few. Recorded: every round of the
           autoscaler, every cold start, every request.

On one machine all replicas share its processors: more of them answer no faster. What is measured here is what a router
and an autoscaler decide; what that is worth where each replica has a machine of its own is a matter for the simulator.

Story    notebooks/14_the_fleet.ipynb
"""

import argparse
import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from minserve.arrivals import Arrival, fixed, poisson, shared_prefix_groups
from minserve.cluster.autoscaler import Autoscaler, AutoscalingConfig, Round
from minserve.cluster.fleet import Fleet
from minserve.cluster.front import Server, settings
from minserve.cluster.policies import POLICIES
from minserve.cluster.replicas import LocalReplicas
from minserve.cluster.router import Router, create_app
from minserve.lab import load
from minserve.lab.client import Client
from minserve.lab.generator import Shot
from minserve.lab.load_report import Run
from minserve.lab.report import Report, Row
from minserve.metrics import Timeline, percentile

PAGE = 16
QUICK = AutoscalingConfig(  # for a study that lasts minutes
    min_replicas=1, max_replicas=3, look_back_period_s=5, upscale_delay_s=2, downscale_delay_s=15
)
DAY = ((15.0, 1), (45.0, 8), (45.0, 1))  # (seconds, users)


@asynccontextmanager
async def listening(router: Router):
    """The router on a free port. Yields its address."""
    found = asyncio.get_running_loop().create_future()
    server = Server(settings(create_app(router), "127.0.0.1", 0), found.set_result, router.drain)
    running = asyncio.create_task(server.serve())
    try:
        yield await asyncio.wait_for(found, 60)
    finally:
        server.should_exit = True
        await running


# ---------------------------------------------------------------- what a policy is worth
def prefixed(
    rate: float, seconds: float, groups: int = 8, prefix_tokens: int = 256, seed: int = 0
) -> list[Arrival]:
    """32 tokens of their own behind a group's, 16 out."""
    return shared_prefix_groups(poisson(rate, seconds, fixed(32, 16), seed), groups, prefix_tokens, seed=seed)


def most_cached(schedule: Sequence[Arrival], page: int = PAGE) -> float:
    """The share of prompt tokens that need not be computed if each prefix is computed once, and kept."""
    again = len(schedule) - len({arrival.prefix for arrival in schedule})
    shared = schedule[0].prefix_tokens // page * page
    return again * shared / sum(arrival.prompt_tokens for arrival in schedule)


async def routed(
    policy: str, schedules: dict[int, list[Arrival]], replicas: int, arguments: Sequence[str]
) -> list[Run]:
    """One run for each {seed: schedule}, all of them on the same fresh servers."""
    router = Router(POLICIES[policy]())
    async with LocalReplicas(arguments) as local, listening(router) as url:
        for replica in await asyncio.gather(*(local.start() for _ in range(replicas))):
            router.pool.add(replica.url)
        options = dict(model=None, api_key=None, endpoint="chat", timeout=600.0, closed=None, sockets=1000)
        return [await load.fire(Namespace(url=url, seed=seed, **options), s) for seed, s in schedules.items()]


def routing(
    report: Report,
    schedules: dict[int, list[Arrival]],
    replicas: int,
    arguments: Sequence[str],
    policies: Sequence[str] = tuple(POLICIES),
) -> None:
    """Rows for each policy, a sample for each schedule."""
    bound = sum(most_cached(schedule) for schedule in schedules.values()) / len(schedules)
    for policy in policies:
        summaries = [run.summary() for run in asyncio.run(routed(policy, schedules, replicas, arguments))]
        if failed := [s["failed"] for s in summaries if s["failed"]]:
            raise RuntimeError(f"{policy}: requests failed, so its rows would not be comparable: {failed}")
        report.add(
            Row(f"{policy}: cached", "of prompt tokens", [s["prefix_hit_rate"] for s in summaries], bound)
        )
        for q in ("p50", "p90"):
            report.add(Row(f"{policy}: TTFT {q}", "s", [s["ttft"][q] for s in summaries]))
        print(
            "\n".join(f"{row.case}  {row.median:.3g} {row.unit}" for row in report.rows[-3:]), file=sys.stderr
        )


# ---------------------------------------------------------------- 1 -> 3 -> 1
async def scaling(
    arguments: Sequence[str],
    config: AutoscalingConfig = QUICK,
    day: Sequence[tuple[float, int]] = DAY,
    tokens: tuple[int, int] = (32, 64),
    say=lambda line: print(line, file=sys.stderr),
) -> tuple[list[Round], list[float], list[Timeline]]:
    """Live that day. Returns every round, every cold start in seconds, and every request; times from the beginning."""
    router, requests = Router(POLICIES["least_outstanding"]()), []
    async with LocalReplicas(arguments) as local:
        fleet = Fleet(router, local, Autoscaler(config), say=say)
        await fleet.start()
        async with listening(router) as url, Client(url) as client:
            await client.find_model()
            prompts = load.Prompts(*await load.tokens_of_words(client), seed=0)
            turning = asyncio.create_task(fleet.run())
            clock = asyncio.get_running_loop().time
            zero = clock() - fleet.now

            async def user(name: int, until: float) -> None:
                while clock() < until:
                    arrival = Arrival(0.0, *tokens)
                    shot = Shot(arrival, Timeline(clock()))
                    await client.ask(
                        client.body(prompts.text(1000 * name + len(requests), arrival), tokens[1]), shot
                    )
                    requests.append(shot.timeline)
                    if not shot.timeline.ok:
                        fleet.say(f"a request failed: {shot.why}")

            for seconds, users in day:
                ends = clock() + seconds
                await asyncio.gather(asyncio.sleep(seconds), *(user(name, ends) for name in range(users)))
            turning.cancel()
            await asyncio.gather(turning, return_exceptions=True)
    return fleet.history, fleet.cold_starts, [since(zero, t) for t in requests]


def since(zero: float, t: Timeline) -> Timeline:
    shifted = lambda at: None if at is None else at - zero
    return replace(
        t,
        arrival=t.arrival - zero,
        tokens=[at - zero for at in t.tokens],
        first=shifted(t.first),
        finished=shifted(t.finished),
    )


def record(
    report: Report, rounds: Sequence[Round], cold: Sequence[float], requests: Sequence[Timeline]
) -> None:
    report.add(Row("cold start", "s", list(cold)))
    changes = sum(r.target != r.running + r.starting for r in rounds)
    report.add(Row("changes of the target", "changes", [changes]))
    report.add(Row("requests", "requests", [len(requests)], note=f"{sum(not t.ok for t in requests)} failed"))
    report.add(Row("TTFT p50", "s", [percentile([t.ttft for t in requests if t.ok], 50)]))


def save(report: Report, path: Path, **lists: Sequence[Sequence]) -> None:
    """A report as any other, with more lists in it."""
    report.save(path)
    more = "".join(f',\n "{name}": {json.dumps(rows, allow_nan=False)}' for name, rows in lists.items())
    path.write_text(path.read_text().removesuffix("\n}\n") + more + "\n}\n")


def recorded_rounds(path: Path) -> list[Round]:
    return [Round(*row) for row in json.loads(Path(path).read_text())["rounds"]]


# ---------------------------------------------------------------- the command
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="minserve.lab.fleet", description=__doc__.split("\n")[0])
    parser.add_argument("study", choices=["routing", "scaling"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="record it there")
    parser.add_argument("--model", help="a model folder or a hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--replicas", type=int, default=2, help="routing: so many servers; default: 2")
    parser.add_argument(
        "--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="routing: default: all"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="routing: requests/s; default: 1")
    parser.add_argument("--seconds", type=float, default=45.0, help="routing: of each run; default: 45")
    parser.add_argument("--seeds", type=int, default=2, help="routing: runs of each policy; default: 2")
    args = parser.parse_args(argv)
    report = Report(f"fleet-{args.study}", " ".join(["python -m minserve.lab.fleet", *_shown(argv)]))
    server = ["--max-running", "4", "--num-pages", "144", *(["--model", args.model] if args.model else [])]
    if args.study == "routing":
        schedules = {seed: prefixed(args.rate, args.seconds, seed=seed) for seed in range(args.seeds)}
        routing(report, schedules, args.replicas, server, args.policies)
        lists = {}
    else:
        rounds, cold, requests = asyncio.run(scaling(server))
        record(report, rounds, cold, requests)
        numbers = lambda row: [round(x, 3) for x in row]
        lists = dict(
            rounds=[numbers((r.time, r.ongoing, r.running, r.starting, r.target)) for r in rounds],
            requests=[numbers((t.arrival, t.first, t.finished)) for t in requests if t.ok],
        )
    print(report.table())
    if args.json:
        save(report, args.json, **lists)
    return 0


def _shown(argv: Sequence[str]) -> list[str]:
    """Without where it lies: that is nobody's business."""
    words = list(argv)
    if "--json" in words:
        del words[words.index("--json") : words.index("--json") + 2]
    if "--model" in words:
        words[words.index("--model") + 1] = Path(words[words.index("--model") + 1]).name
    return words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
