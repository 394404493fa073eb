"""What `bench goodput` serves and promises: traces of several kinds, and SLOs in multiples of the machine's times.

    mixed      chats, and every 12th request brings a long prompt
    shared     chats behind one of a few system prompts, which have been seen before
    classes    chats of two priorities

An SLO says: token n is there by arrival + T1 + n T2. T1 is a multiple of the time to first token of such a prompt
*alone* on the idle engine (so a long prompt may take its time, and each kind counts); T2 is a multiple of the time of a
decode step of 8 requests. Both are measured in the run that is judged by them: another machine has other promises.

    STRICT, LOOSE              the multiples
    Promise                    an SLO for each kind of prompt; for metrics.attainment it is one SLO
    stalls(...)                how much load whole prompts bear, from how many each of them makes late
Story    notebooks/13_serving_and_slos.ipynb
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random

from minserve.arrivals import Arrival, poisson, shared_prefix_groups, uniform, with_priorities
from minserve.metrics import SLO, Timeline

STRICT, LOOSE = (5.0, 3.0), (10.0, 10.0)  # (times the time to first token alone, times a decode step)
MULTIPLES = {"strict": STRICT, "loose": LOOSE}
EVERY = 12
SHARES = {0: 0.25, 1: 0.75}  # of the two priorities
GROUPS = 4
Trace = Callable[[float, int, int], list[Arrival]]  # rate, requests, seed


@dataclass(frozen=True)
class Sizes:
    """Tokens. Of a span, the ends are drawn too."""

    chat: tuple[int, int] = (32, 96)
    answer: tuple[int, int] = (24, 40)
    long: int = 1024
    note: int = 8  # the answer to a long prompt
    system: int = 256
    question: tuple[int, int] = (16, 48)
    reply: tuple[int, int] = (8, 16)


REAL = Sizes()
QUICK = Sizes((4, 8), (3, 5), 96, 2, 64, (4, 8), (2, 4))


# ---------------------------------------------------------------- who comes
def chats_with(sizes: Sizes, first: int):
    """Lengths for arrivals: request `first` is long, and then every 12th."""
    chat, at = uniform(sizes.chat, sizes.answer), count()

    def lengths(rng: Random) -> tuple[int, int]:
        drawn = chat(rng)  # drawn in any case, so that chats do not depend on where the long ones are
        return (sizes.long, sizes.note) if next(at) % EVERY == first else drawn

    return lengths


def mixed(sizes: Sizes) -> Trace:
    return lambda rate, n, seed: poisson(
        rate, n / rate, chats_with(sizes, Random(seed).randrange(EVERY)), seed
    )


def shared(sizes: Sizes) -> Trace:
    def trace(rate: float, n: int, seed: int) -> list[Arrival]:
        own = poisson(rate, n / rate, uniform(sizes.question, sizes.reply), seed)
        return shared_prefix_groups(own, GROUPS, sizes.system, seed=seed)

    return trace


def classes(sizes: Sizes) -> Trace:
    def trace(rate: float, n: int, seed: int) -> list[Arrival]:
        return with_priorities(poisson(rate, n / rate, uniform(sizes.chat, sizes.answer), seed), SHARES, seed)

    return trace


# ---------------------------------------------------------------- what they were promised
@dataclass(frozen=True)
class Promise:
    """An SLO for prompts of at most so many tokens, shortest first."""

    kinds: tuple[tuple[int, SLO], ...]

    @classmethod
    def of(cls, alone: dict[int, float], step: float, multiples: tuple[float, float]) -> "Promise":
        """alone: {tokens of the longest prompt of a kind: seconds to its first token on an idle engine}."""
        first, token = multiples
        return cls(tuple((n, SLO(first * its, token * step)) for n, its in sorted(alone.items())))

    def slo(self, timeline: Timeline) -> SLO:
        return next(slo for most, slo in self.kinds if timeline.prompt_tokens <= most)

    def met(self, timeline: Timeline) -> bool:
        return self.slo(timeline).met(timeline)

    def deadline(self, timeline: Timeline, n: int) -> float:
        """Of token n."""
        slo = self.slo(timeline)
        return timeline.arrival + slo.ttft + n * slo.per_token

    def __str__(self) -> str:
        firsts = ", ".join(f"{slo.ttft * 1e3:,.0f} ms (prompts to {n:,})" for n, slo in self.kinds)
        return f"first token by {firsts}; then {self.kinds[0][1].per_token * 1e3:,.0f} ms a token"


def stalls(
    promise: Promise, alone: dict[int, float], step: float, share: float, missed: float = 0.1
) -> float:
    """Requests/s at which whole prompts make `missed` of all late, queues aside: predicted from times measured alone.

    A long prompt stops everybody for W beyond what T1 allows. Who arrives in that time is late; so is who runs with
    fewer tokens than make up for it, each gaining T2 - step: together W (1 + step / (T2 - step)) of arrivals.
    """
    (short, chat), (long, _) = promise.kinds[0], promise.kinds[-1]
    over = max(0.0, alone[long] + alone[short] - chat.ttft)
    window = over * (1 + step / (chat.per_token - step))
    return missed / (share * window) if window else float("inf")
