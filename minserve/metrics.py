"""What a server promises, as formulas over the times of one completion. Plain Python: no tensor, no clock of its own.

    arrival    queued    started        first = tokens[0]                       tokens[-1]   finished
       |---------|----------|--------------|-----------|-----------|---- ... --------|-----------|
       |  door   |  queue   |   prefill    |    ITL    |    ITL    |                 |  closing  |
       |------------- TTFT ----------------|------------- decode -------------------|
       |------------------------------- e2e ----------------------------------------|

Times are seconds on one monotonic clock (or simulated ones), of one process only. `arrival` is at the front end,
before tokenisation; for a load generator it is when the request was *due*, so waiting for a free socket counts.

The same words mean different things elsewhere
                here                      vLLM             aiperf            inference-perf   guidellm
    TTFT        first - arrival,          same, but at     same              same             same
                first non-empty text      the first chunk
    TPOT        (e2e - TTFT) / (n - 1)    same             inter token       same             inter token latency;
                                                           latency                            its TPOT is e2e / n
    ITL         every gap, per token      per chunk        inter chunk       same             -
                                                           latency
    goodput     of arrived requests,      of completed     of completed      of completed     -
                every token in time       ones, averages   ones, averages    ones, averages

Undefined is None and left out, never 0: TPOT of one token, percentiles of nothing, rates over no time. Requests that
failed are in the error rate and in goodput's denominator, never in a latency.
Sources  goodput: Zhong et al. 2024 (DistServe, arXiv:2401.09670); why each token has a deadline of its own, and an
         average is not enough: arXiv:2410.14257
Story    notebooks/13_serving_and_slos.ipynb
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

OK = ("stop", "length")


@dataclass(slots=True)
class Timeline:
    """One completion's times. `told` and `ended` are called as it happens; everything else is arithmetic."""

    arrival: float
    queued: float | None = None  # in the engine's queue
    started: float | None = None  # start of the first step that computed any of it
    tokens: list[float] = field(default_factory=list)  # when each output token became known
    first: float | None = None  # the first token with text
    finished: float | None = None
    reason: str | None = None  # "stop", "length"; "abort", "timeout", "error"; "refused": never served
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix index
    preemptions: int = 0
    priority: int = 0

    def told(self, now: float, num_tokens: int, text: str) -> None:
        """So many tokens became known, and so much text: none while half a character or a stop string is held back."""
        self.tokens.extend([now] * num_tokens)
        if text and self.first is None:
            self.first = now

    def ended(self, now: float, reason: str) -> None:
        self.finished, self.reason = now, reason

    @property
    def ok(self) -> bool:
        return self.reason in OK

    @property
    def ttft(self) -> float | None:
        """Time to first token: first - arrival. An answer without text has none."""
        return _between(self.arrival, self.first)

    @property
    def e2e(self) -> float | None:
        """End-to-end latency: last token - arrival. The closing message is not a token, and does not count."""
        return _between(self.arrival, self._last)

    @property
    def tpot(self) -> float | None:
        """Time per output token: (e2e - TTFT) / (n - 1), the mean gap. Undefined for fewer than 2 tokens."""
        if len(self.tokens) < 2 or self.first is None:
            return None
        return (self._last - self.first) / (len(self.tokens) - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: all n - 1 gaps, preemptions included; 0 between tokens that came together."""
        return [after - before for before, after in pairwise(self.tokens)]

    @property
    def queue_time(self) -> float | None:
        return _between(self.queued, self.started)

    @property
    def prefill_time(self) -> float | None:
        return _between(self.started, self.tokens[0] if self.tokens else None)

    @property
    def decode_time(self) -> float | None:
        return self.tokens[-1] - self.tokens[0] if self.tokens else None

    @property
    def _last(self) -> float | None:
        return self.tokens[-1] if self.tokens else None


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def percentile(values: Iterable[float], q: float) -> float | None:
    """The value below which q % lie, linear between neighbours: of 1..10, p50 is 5.5 and p99 is 9.91. None of none."""
    if not 0 <= q <= 100:
        raise ValueError(f"percentile {q}: it must lie in 0..100")
    ordered = sorted(values)
    if not ordered:
        return None
    place = q / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class SLO:
    """A service level objective: when each token has to be there. Seconds."""

    ttft: float
    per_token: float

    def met(self, timeline: Timeline) -> bool:
        """It ended well, and token n (0, 1, ...) was known by arrival + ttft + n * per_token.

        A deadline for each token: tokens that come early are a buffer for a later gap, as they are for a reader, and
        no average can hide a stall.
        """
        begin = timeline.arrival + self.ttft
        return timeline.ok and all(at <= begin + n * self.per_token for n, at in enumerate(timeline.tokens))


def attainment(timelines: Sequence[Timeline], slo: SLO) -> float | None:
    """The share of *arrived* requests that met it: who was refused, failed or is not back yet missed it."""
    return sum(map(slo.met, timelines)) / len(timelines) if timelines else None


def goodput(timelines: Sequence[Timeline], slo: SLO, seconds: float) -> float | None:
    """Requests per second that met the SLO."""
    return _rate(sum(map(slo.met, timelines)), seconds)


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
