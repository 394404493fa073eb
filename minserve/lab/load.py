"""`python -m minserve load URL`: load for an OpenAI-compatible server, and what became of every request of it.

    python -m minserve load http://127.0.0.1:8000 --rate 4 --seconds 30                 open loop: arrivals do not wait
    python -m minserve load URL --workload code --rate 2 --slo-ttft 0.5 --slo-tpot 0.05 goodput
    python -m minserve load URL --trace AzureLLMInferenceTrace_conv.csv --requests 200  a trace, replayed
    python -m minserve load URL --closed 8                                              closed loop: 8 users

The schedule is fixed before the run, by the seed: who comes when, with how many tokens in and out. Prompts are words
drawn at random, as many as make the tokens asked for; how many tokens a word has is asked of the server first. The
numbers of tokens reported are the server's own. A second run with the same seed asks the same prompts, which a prefix
cache may still hold: change --seed, or start the server anew.

Offered and achieved    offered: requests / length of the schedule; achieved: those that ended well / seconds until the
                        last one had. Far apart, the server is overloaded, and the tail is as long as the run
Lag                     how late requests were sent. Where that is not small, --sockets is reached, or this generator
                        has too little of a processor; it is in every latency all the same
Story                   notebooks/13_serving_and_slos.ipynb
"""

import argparse
import asyncio
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from tqdm import tqdm

from minserve import arrivals as schedules
from minserve.arrivals import Arrival
from minserve.lab import load_figures
from minserve.lab.client import Client, Unreachable
from minserve.lab.generator import Shot, closed_loop, open_loop
from minserve.lab.load_report import Run
from minserve.lab.measure import where_am_i
from minserve.metrics import SLO, Timeline

WORKLOADS = {
    "fixed": "128 tokens in, 32 out",
    "chat": "the conversations of Azure's 2023 trace: medians 1,020 in, 129 out, nearly Poisson",
    "code": "its code completions: medians 1,469 in, 13 out, in bursts",
    "shared-prefix": "8 groups, each with 512 tokens in common; 64 of its own, 32 out",
    "mixed": "nine in ten short (64 in, 64 out), one long (1,024 in, 16 out)",
}
LENGTHS = {  # (tokens in, tokens out); the second kind one time in ten
    "fixed": [(128, 32)],
    "shared-prefix": [(64, 32)],
    "mixed": [(64, 64), (1024, 16)],
}
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()


def add_arguments(parser) -> None:
    add = parser.add_argument
    add("url", metavar="URL", help="such as http://127.0.0.1:8000")
    add("--model", help="default: the first one that the server names")
    add("--api-key", help="sent as a bearer token")
    add("--endpoint", choices=["chat", "completions"], default="chat", help="default: chat")
    add(
        "--workload",
        choices=list(WORKLOADS),
        default="fixed",
        help="; ".join(f"{k}: {v}" for k, v in WORKLOADS.items()),
    )
    add(
        "--trace",
        type=Path,
        metavar="CSV",
        help="replay this instead: TIMESTAMP,ContextTokens,GeneratedTokens",
    )
    add("--scale", type=float, default=1.0, help="lengths times this, for a model with a short context")
    add("--longest", type=int, help="cut each length to at most so many tokens")
    add("--rate", type=float, help="requests per second; default: 1, or the workload's or the trace's own")
    add(
        "--burstiness",
        type=float,
        help="gamma's shape: 1 is Poisson, less comes in bursts; default: the workload's",
    )
    add("--requests", type=int, help="how many; default: as many as come in --seconds")
    add("--seconds", type=float, default=30.0, help="length of the schedule; default: 30")
    add("--priorities", metavar="P:SHARE,...", help="such as 0:0.2,1:0.8; smaller is more urgent")
    add("--closed", type=int, metavar="N", help="a closed loop instead: N users, each waits for his answer")
    add(
        "--sockets",
        type=int,
        default=1000,
        help="requests in flight at most; to wait for one counts (default: 1000)",
    )
    add("--timeout", type=float, default=600.0, help="seconds for a whole answer; default: 600")
    add("--slo-ttft", type=float, metavar="S", help="goodput: the first token within so many seconds ...")
    add(
        "--slo-tpot",
        type=float,
        metavar="S",
        help="... and each further one so many seconds after the one before",
    )
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="write the numbers and every request's times")
    add("--figure", type=Path, metavar="PNG", help="draw them")


def main(args) -> int:
    try:
        schedule, slo = plan(args), slo_of(args)
        run = asyncio.run(fire(args, schedule))
    except (Unreachable, ValueError, OSError) as error:
        hint = "\n  Start one with `python -m minserve serve`, or give the URL of one that runs."
        print(f"load: {error}{hint if isinstance(error, Unreachable) else ''}", file=sys.stderr)
        return 1
    print(run.text(slo))
    if args.json:
        run.save(args.json, command_of(args), slo)
    if args.figure:
        load_figures.draw(run.requests(), where_am_i(), args.figure)
    return 0 if any(shot.timeline.ok for shot in run.shots) else 1


# ---------------------------------------------------------------- the schedule
def plan(args) -> list[Arrival]:
    """Who comes when, with what: everything that chance decides, decided by the seed. Raises ValueError, OSError."""
    for name in ("requests", "closed", "sockets", "longest", "scale", "timeout"):
        least, value = (0, "more than 0") if name in ("scale", "timeout") else (0.5, "at least 1")
        if getattr(args, name) is not None and not getattr(args, name) > least:
            raise ValueError(f"--{name} is {getattr(args, name):g}; it must be {value}")
    if args.trace:
        found = schedules.azure_csv(args.trace, scale=args.scale)
        found = schedules.paced(found, args.rate) if args.rate else found
        found = [a for a in found if args.requests or a.time <= args.seconds]
    else:
        found = workload(args)
    found = [cut(arrival, args.longest) for arrival in found[: args.requests]]
    if args.priorities:
        found = schedules.with_priorities(found, shares_of(args.priorities), args.seed)
    return found


def workload(args) -> list[Arrival]:
    """One of WORKLOADS, at its rate for its time."""
    size = lambda tokens: max(1, round(tokens * args.scale))
    trace = {"chat": "conversation", "code": "code"}.get(args.workload)
    rate = args.rate or (schedules.AZURE_2023[trace].rate if trace else 1.0)
    seconds = args.requests / rate if args.requests else args.seconds
    if trace:
        options = dict(rate=rate, burstiness=args.burstiness, scale=args.scale)
        return schedules.azure_like(trace, seconds, args.seed, **options)
    kinds = [(size(prompt), size(output)) for prompt, output in LENGTHS[args.workload]]
    lengths = lambda rng: kinds[rng.random() < 0.1 and len(kinds) > 1]
    found = schedules.gamma(rate, args.burstiness or 1.0, seconds, lengths, args.seed)
    if args.workload == "shared-prefix":
        return schedules.shared_prefix_groups(found, 8, size(512), seed=args.seed)
    return found


def cut(arrival: Arrival, longest: int | None) -> Arrival:
    if longest is None:
        return arrival
    prompt, output, prefix = (
        min(n, longest) for n in (arrival.prompt_tokens, arrival.output_tokens, arrival.prefix_tokens)
    )
    return replace(arrival, prompt_tokens=prompt, output_tokens=output, prefix_tokens=prefix)


def shares_of(text: str) -> dict[int, float]:
    """ "0:0.2,1:0.8" as {0: 0.2, 1: 0.8}. Raises ValueError."""
    try:
        return {int(priority): float(share) for priority, share in (p.split(":") for p in text.split(","))}
    except ValueError:
        raise ValueError(f"--priorities {text}: give priority:share,..., such as 0:0.2,1:0.8") from None


def slo_of(args) -> SLO | None:
    if (args.slo_ttft is None) != (args.slo_tpot is None):
        raise ValueError("--slo-ttft and --slo-tpot are one promise: give both, in seconds, or neither")
    return None if args.slo_ttft is None else SLO(args.slo_ttft, args.slo_tpot)


# ---------------------------------------------------------------- the run
async def fire(args, schedule: list[Arrival]) -> Run:
    """Ask the server who it is and how it counts, build every prompt, then send them when they are due."""
    options = dict(model=args.model, key=args.api_key, endpoint=args.endpoint, timeout=args.timeout)
    async with Client(args.url, **options) as client:
        await client.find_model()
        prompts = Prompts(*await tokens_of_words(client), args.seed)
        bodies = {
            id(a): client.body(prompts.text(i, a), a.output_tokens, a.priority)
            for i, a in enumerate(schedule)
        }
        with tqdm(total=len(schedule), unit="request", desc="load", disable=None) as bar:
            seen = dict(sent=0, ended=0, failed=0)

            async def send(shot: Shot) -> None:
                seen["sent"] += 1
                await client.ask(bodies[id(shot.arrival)], shot)

            def hear(shot: Shot) -> None:
                seen["ended"] += 1
                seen["failed"] += not shot.timeline.ok
                in_flight = seen["sent"] - seen["ended"]
                bar.set_postfix_str(f"{in_flight} in flight, {seen['failed']} failed", refresh=False)
                bar.update(1)

            if args.closed:
                shots = await closed_loop(schedule, send, args.closed, hear)
            else:
                shots = await open_loop(schedule, send, args.sockets, hear)
    return Run(shots, client.model, None if args.closed else offered(schedule), bool(args.closed))


def offered(schedule: list[Arrival]) -> float | None:
    """Requests per second that the schedule asks for."""
    return len(schedule) / schedule[-1].time if schedule[-1].time > 0 else None


async def tokens_of_words(client: Client) -> tuple[float, float]:
    """(tokens that are in every prompt, tokens per word), by the server's own count. Raises Unreachable."""
    counts = []
    for words in (WORDS[:1], WORDS):
        shot = Shot(Arrival(0.0, len(words), 1), Timeline(asyncio.get_running_loop().time()))
        await client.ask(client.body(" ".join(words), 1), shot)
        if not shot.timeline.ok:
            raise Unreachable(f"{client.url}{client.path} cannot answer: {shot.why}")
        counts.append(shot.timeline.prompt_tokens)
    each = max(counts[1] - counts[0], 1) / (len(WORDS) - 1)
    return counts[0] - each, each


@dataclass
class Prompts:
    base: float  # tokens that every prompt has, such as a chat template's
    each: float  # tokens per word
    seed: int

    def text(self, index: int, arrival: Arrival) -> str:
        """Words for request `index`: first its group's, then its own, of about as many tokens as it should have."""
        shared = self._words(arrival.prefix_tokens - self.base, f"prefix {self.seed} {arrival.prefix}")
        rest = arrival.prompt_tokens - (arrival.prefix_tokens or self.base)
        return " ".join(shared + (self._words(rest, f"prompt {self.seed} {index}") or WORDS[:1]))

    def _words(self, tokens: float, seed: str) -> list[str]:
        return Random(seed).choices(WORDS, k=max(0, round(tokens / self.each)))


def command_of(args) -> str:
    """As it would be typed again, without addresses, keys and folders."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    usual, words = vars(parser.parse_args(["URL"])), ["python -m minserve load URL"]
    for name, default in usual.items():
        value = getattr(args, name)
        if value != default and name not in ("url", "api_key", "json", "figure"):
            value = Path(value).name if name in ("trace", "model") else value
            value = f"{value:g}" if isinstance(value, float) else value
            words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)
