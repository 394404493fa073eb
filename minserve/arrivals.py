"""Who comes when, and with how much work: schedules that are fixed before a run. Plain Python: no tensor, no clock.

    Arrival(time, prompt_tokens, output_tokens, ...)      one request; time in seconds from the start of the run

    poisson(rate, seconds, lengths, seed)                 independent users: gaps are exponential, their CV is 1
    gamma(rate, burstiness, seconds, lengths, seed)       gaps of CV = burstiness^-1/2: below 1 they come in bursts
    azure_like("code" | "conversation", seconds)          that, from the published statistics of a production trace
    azure_csv(path)                                       the trace itself, for who has the file
    shared_prefix_groups, with_priorities, paced          what else there is to say about a list of arrivals

    lengths(rng) -> (prompt tokens, output tokens)        fixed, uniform, lognormal, or any function of random.Random

A schedule of n requests at `rate` ends at exactly n / rate: gaps are drawn, then stretched together. Times and lengths
are drawn from streams of their own, so with one seed another rate brings the same requests, only faster or slower.

Sources  gamma gaps stretched to the exact rate: `vllm bench serve --burstiness`; the trace: Azure LLM inference trace
         2023, CC-BY, Patel et al. 2024 (Splitwise, ISCA)
Story    notebooks/13_serving_and_slos.ipynb
"""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from random import Random

Lengths = Callable[[Random], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Arrival:
    time: float  # seconds from the start of the run
    prompt_tokens: int  # a shared prefix included
    output_tokens: int
    priority: int = 0  # smaller is more urgent
    prefix: int | None = None  # the group whose first prefix_tokens are the same
    prefix_tokens: int = 0


# ---------------------------------------------------------------- when they come
def poisson(rate: float, seconds: float, lengths: Lengths, seed: int = 0) -> list[Arrival]:
    """rate * seconds requests whose gaps are exponential: nobody knows of anybody else."""
    return gamma(rate, 1.0, seconds, lengths, seed)


def gamma(rate: float, burstiness: float, seconds: float, lengths: Lengths, seed: int = 0) -> list[Arrival]:
    """rate * seconds requests, gaps of shape `burstiness`: 1 is Poisson, less comes in bursts, more is steadier."""
    if not (rate > 0 and burstiness > 0 and seconds > 0):
        raise ValueError(
            f"rate {rate:g}, burstiness {burstiness:g}, seconds {seconds:g}: each must be more than 0"
        )
    n = round(rate * seconds)
    if n < 1:
        raise ValueError(
            f"{rate:g} requests/s over {seconds:g} s is not one request.\n"
            f"  Ask for at least {1 / rate:,.1f} s, or for more requests per second."
        )
    when, what = Random(f"times {seed}"), Random(f"lengths {seed}")
    times = list(accumulate(when.gammavariate(burstiness, 1.0) for _ in range(n)))
    if times[-1] == 0:
        raise ValueError(
            f"burstiness {burstiness:g}: all {n:,} gaps are 0 to the last digit; the least that works is about 0.005"
        )
    stretch = n / rate / times[-1]
    return [Arrival(time * stretch, *lengths(what)) for time in times]


def paced(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests in the same rhythm, faster or slower: their mean rate is `rate`."""
    if not (rate > 0 and arrivals and arrivals[-1].time > 0):
        raise ValueError(f"{len(arrivals):,} arrivals at {rate:g} requests/s: there is no time to stretch")
    stretch = len(arrivals) / rate / arrivals[-1].time
    return [replace(arrival, time=arrival.time * stretch) for arrival in arrivals]


# ---------------------------------------------------------------- what they bring
def fixed(prompt: int, output: int) -> Lengths:
    return lambda rng: (prompt, output)


def uniform(prompt: tuple[int, int], output: tuple[int, int]) -> Lengths:
    return lambda rng: (rng.randint(*prompt), rng.randint(*output))


def lognormal(
    prompt: tuple[float, float], output: tuple[float, float], longest: int | None = None
) -> Lengths:
    """Long tails, given as (median, mean): sigma = sqrt(2 ln(mean / median)). Each is between 1 and `longest`."""
    for median, mean in (prompt, output):
        if not 0 < median <= mean:
            raise ValueError(f"median {median:g}, mean {mean:g}: a lognormal needs 0 < median <= mean")

    def draw(rng: Random, median: float, mean: float) -> int:
        tokens = round(median * math.exp(rng.gauss(0, math.sqrt(2 * math.log(mean / median)))))
        return max(1, tokens if longest is None else min(tokens, longest))

    return lambda rng: (draw(rng, *prompt), draw(rng, *output))


# ---------------------------------------------------------------- a production trace
@dataclass(frozen=True)
class Published:
    """What is known of a trace without the file: requests/s, CV of the gaps, (median, mean) tokens."""

    rate: float
    cv: float
    prompt: tuple[float, float]
    output: tuple[float, float]


AZURE_2023 = {
    "code": Published(2.57, 13.2, (1469, 2048), (13, 28)),
    "conversation": Published(5.53, 1.09, (1020, 1155), (129, 211)),
}


def azure_like(
    kind: str,
    seconds: float,
    seed: int = 0,
    *,
    rate: float | None = None,
    burstiness: float | None = None,
    scale: float = 1.0,
    longest: int | None = None,
) -> list[Arrival]:
    """Requests with the rate, burstiness, medians and means of Azure's 2023 trace; tails are a lognormal's.

    rate, burstiness: instead of the trace's. scale: lengths times this, for a short context; `longest` caps each.
    """
    if kind not in AZURE_2023:
        raise ValueError(f"there is no trace {kind!r}: use one of {', '.join(AZURE_2023)}")
    known = AZURE_2023[kind]
    prompt, output = (tuple(x * scale for x in both) for both in (known.prompt, known.output))
    lengths = lognormal(prompt, output, longest)
    return gamma(rate or known.rate, burstiness or known.cv**-2, seconds, lengths, seed)


COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def azure_csv(path: Path | str, *, scale: float = 1.0) -> list[Arrival]:
    """The trace's own file: TIMESTAMP,ContextTokens,GeneratedTokens. The first request comes at 0.

    scale: lengths times this; nobody brings or asks for less than one token. Raises ValueError with the line's number.
    """
    rows = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(file)
        if missing := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
            raise ValueError(
                f"{path}: no column {', '.join(missing)} in its first line; it has {table.fieldnames}.\n"
                f"  Use a file of the Azure LLM inference traces: {','.join(COLUMNS)}."
            )
        for row in table:
            try:
                when, *tokens = (row[name] for name in COLUMNS)
                rows.append((datetime.fromisoformat(when.strip()), *map(int, tokens)))
            except (TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"{path}, line {table.line_num}: {error}") from None
    if not rows:
        raise ValueError(f"{path}: no requests in it")
    rows.sort(key=lambda row: row[0])
    zero = rows[0][0]
    scaled = lambda tokens: max(1, round(tokens * scale))
    return [Arrival((when - zero).total_seconds(), scaled(p), scaled(o)) for when, p, o in rows]


# ---------------------------------------------------------------- what else there is to say of them
def shared_prefix_groups(
    arrivals: Sequence[Arrival], groups: int, prefix_tokens: int, skew: float = 0.0, seed: int = 0
) -> list[Arrival]:
    """Each belongs to one of `groups`, whose prefix goes before its own prompt: system prompts, documents, agents.

    skew: group i is asked for in proportion to (i + 1)^-skew; 0: all equally often, 1: as words in a text (Zipf).
    """
    if groups < 1 or prefix_tokens < 1:
        raise ValueError(f"{groups} groups of {prefix_tokens} tokens: each must be at least 1")
    rng = Random(f"groups {seed}")
    chosen = rng.choices(range(groups), [(i + 1) ** -skew for i in range(groups)], k=len(arrivals))
    return [
        replace(a, prompt_tokens=a.prompt_tokens + prefix_tokens, prefix=group, prefix_tokens=prefix_tokens)
        for a, group in zip(arrivals, chosen)
    ]


def with_priorities(arrivals: Sequence[Arrival], shares: dict[int, float], seed: int = 0) -> list[Arrival]:
    """shares: {priority: how often}, such as {0: 0.2, 1: 0.8}; smaller numbers are more urgent."""
    if not shares or min(shares.values()) < 0 or sum(shares.values()) <= 0:
        raise ValueError(f"shares {shares}: give at least one priority, none less than 0, not all of them 0")
    rng = Random(f"priorities {seed}")
    chosen = rng.choices(list(shares), list(shares.values()), k=len(arrivals))
    return [replace(a, priority=priority) for a, priority in zip(arrivals, chosen)]
