"""What a server promises, as formulas over the times of one completion. Plain Python: no tensor, no clock of its own.

    arrival    queued    started        first = tokens[0]                       tokens[-1]   finished
       |---------|----------|--------------|-----------|-----------|---- ... --------|-----------|
       |  door   |  queue   |   prefill    |    ITL    |    ITL    |                 |  closing  |
       |------------- TTFT ----------------|------------- decode -------------------|
       |------------------------------- e2e ----------------------------------------|

Times are seconds on one monotonic clock (or simulated ones), of one process only. `arrival` is at the front end,
before tokenisation; for a load generator it is when the request was *due*, so waiting for a free socket counts.

The same words mean different things elsewhere
               here                      vllm bench serve   aiperf             inference-perf   guidellm
    TTFT       first text - arrival      first chunk        same               same             first chunk
    TPOT       (e2e - TTFT) / (n - 1)    same               calls it ITL       same             calls it ITL; its
                                                                                                TPOT is e2e / n
    ITL        every gap, per token      per chunk          calls that inter   same             mean gap
                                                            chunk latency
    goodput    each token in time        limits on TTFT,    limits on any      limits on TTFT   -
                                         TPOT and e2e       of its numbers     and TPOT

Undefined is None and left out, never 0: TPOT of one token, percentiles of nothing, rates over no time. Requests that
failed are in the error rate and among those that goodput asks of, never in a latency.
Sources  goodput: Zhong et al. 2024 (DistServe, arXiv:2401.09670); why each token has a deadline of its own, and an
         average is not enough: arXiv:2410.14257
Story    notebooks/13_serving_and_slos.ipynb
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from minserve.step_log import StepRecord

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
        """Time per output token: (e2e - TTFT) / (n - 1), the mean gap. Undefined for fewer than 2 tokens.

        Tokens before the first text, such as half a character, count in n and not in the time: rare, everybody's rule.
        """
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
    def inference_time(self) -> float | None:
        return _between(self.started, self._last)

    @property
    def _last(self) -> float | None:
        """The last token; or the first text, where all of it was held back until after that."""
        return max(self.tokens[-1], self.first or self.tokens[-1]) if self.tokens else None


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
        """It ended well, with a token, and token n (0, 1, ...) was known by arrival + ttft + n * per_token.

        A deadline for each token: tokens that come early are a buffer for a later gap, as they are for a reader, and
        no average can hide a stall.
        """
        begin = timeline.arrival + self.ttft
        return (
            timeline.ok
            and timeline.tokens != []
            and all(at <= begin + n * self.per_token for n, at in enumerate(timeline.tokens))
        )


def attainment(timelines: Sequence[Timeline], slo: SLO) -> float | None:
    """The share of *arrived* requests that met it: who was refused, failed or is not back yet missed it."""
    return sum(map(slo.met, timelines)) / len(timelines) if timelines else None


def goodput(timelines: Sequence[Timeline], slo: SLO, seconds: float) -> float | None:
    """Requests per second that met the SLO."""
    return _rate(sum(map(slo.met, timelines)), seconds)


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


# ---------------------------------------------------------------- many completions
LATENCIES = {  # name: (its formula, of one completion; ITL has many values each)
    "ttft": ("first text - arrival", lambda t: [t.ttft]),
    "tpot": ("(e2e - TTFT) / (n - 1), n > 1", lambda t: [t.tpot]),
    "itl": ("every gap between tokens", lambda t: t.itl),
    "e2e": ("last token - arrival", lambda t: [t.e2e]),
    "queue": ("first step - queued", lambda t: [t.queue_time]),
}


def summary(timelines: Sequence[Timeline], seconds: float, devices: int = 1, slo: SLO | None = None) -> dict:
    """What a run of `seconds` did, as plain data. Latencies and tokens are those of the requests that ended well.

    failed: {reason: requests}, "unfinished" being one of them. Latencies: {mean, p50, p90, p99, count}, seconds.
    """
    good = [t for t in timelines if t.ok]
    prompt, output = sum(t.prompt_tokens for t in good), sum(len(t.tokens) for t in good)
    result = {
        "requests": len(timelines),
        "ok": len(good),
        "failed": dict(Counter(t.reason or "unfinished" for t in timelines if not t.ok)),
        "seconds": seconds,
        "devices": devices,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_second": _rate(len(good), seconds),
        "output_tokens_per_second": _rate(output, seconds),
        "total_tokens_per_second": _rate(prompt + output, seconds),
        "output_tokens_per_second_per_device": _rate(output, seconds * devices),
        "prefix_hit_rate": _rate(sum(t.cached_tokens for t in good), prompt),
        "preemptions": sum(t.preemptions for t in timelines),
    }
    for name, (_, of) in LATENCIES.items():
        result[name] = _spread([x for t in good for x in of(t) if x is not None])
    if slo:
        result["slo"] = {"ttft": slo.ttft, "per_token": slo.per_token}
        result["attainment"], result["goodput"] = attainment(timelines, slo), goodput(timelines, slo, seconds)
    return result


def _spread(values: list[float]) -> dict:
    values = sorted(values)  # once: sorting what is sorted costs nothing
    percentiles = {f"p{q}": percentile(values, q) for q in (50, 90, 99)}
    return {"mean": sum(values) / len(values) if values else None, **percentiles, "count": len(values)}


def table(summary: dict) -> str:
    """A summary to read, each number beside its formula."""
    number = lambda x, digits=1: "-" if x is None else f"{x:,.{digits}f}"
    s = summary
    failed = ", ".join(f"{n:,} {reason}" for reason, n in s["failed"].items()) or "none"
    per_device = f"  ({number(s['output_tokens_per_second_per_device'])} per device)" * (s["devices"] > 1)
    hits = "" if s["prefix_hit_rate"] is None else f"{s['prefix_hit_rate']:.0%} of prompt tokens were cached"
    lines = [
        f"requests  {s['requests']:,} arrived, {s['ok']:,} ended well in {s['seconds']:,.1f} s; failed: {failed}",
        f"rates     {number(s['requests_per_second'], 2)} requests/s, {number(s['output_tokens_per_second'])} output "
        f"tokens/s{per_device}, {number(s['total_tokens_per_second'])} with the prompts'",
        f"cache     {hits or 'no prompt was read'}; {s['preemptions']:,} preemptions",
        f"{'ms':<8}" + "".join(f"{column:>11}" for column in ("mean", "p50", "p90", "p99")) + f"{'of':>9}",
    ]
    for name, (formula, _) in LATENCIES.items():
        cells = [s[name][column] for column in ("mean", "p50", "p90", "p99")]
        cells = "".join(f"{number(None if x is None else x * 1e3):>11}" for x in cells)
        lines.append(f"{name:<8}{cells}{s[name]['count']:>9,}   {formula}")
    if "slo" in s:
        share = "-" if s["attainment"] is None else f"{s['attainment']:.1%}"
        lines.append(
            f"goodput   {number(s['goodput'], 2)} requests/s: {share} of arrived had token n by "
            f"{s['slo']['ttft'] * 1e3:,.0f} ms + n * {s['slo']['per_token'] * 1e3:,.0f} ms"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------- Prometheus
def _steps(low: int, high: int, of: tuple[int, ...] = (1, 2, 5)) -> list[float]:
    """Bucket edges 1, 2, 5, 10, ... from 10^low to 10^high."""
    return [float(f"{m}e{power}") for power in range(low, high) for m in of] + [float(f"1e{high}")]


SECONDS, TOKENS = _steps(-4, 3), _steps(0, 6)
GAUGES = {
    "num_requests_running": "requests that hold pages and are computed",
    "num_requests_waiting": "requests in the queue",
    "kv_cache_usage_perc": "share of the KV cache's pages in use, 0 to 1",
}
COUNTERS = {
    "prompt_tokens": "prompt tokens of the requests that ended, each prompt once",
    "generation_tokens": "output tokens of the requests that ended",
    "prefix_cache_queries": "prompt tokens looked up in the prefix index",
    "prefix_cache_hits": "prompt tokens found there; recomputed ones are not looked up again",
    "num_preemptions": "times that a running request gave its pages back and waited again",
}
REASONS = (*OK, "abort", "timeout", "error", "refused")
HISTOGRAMS = {  # name: (help, bucket edges, values of one completion that ended well)
    "time_to_first_token_seconds": ("first text - arrival", SECONDS, lambda t: [t.ttft]),
    "inter_token_latency_seconds": ("every gap between two tokens", SECONDS, lambda t: t.itl),
    "request_time_per_output_token_seconds": ("(e2e - TTFT) / (n - 1)", SECONDS, lambda t: [t.tpot]),
    "e2e_request_latency_seconds": ("last token - arrival", SECONDS, lambda t: [t.e2e]),
    "request_queue_time_seconds": ("first step - queued", SECONDS, lambda t: [t.queue_time]),
    "request_prefill_time_seconds": ("first token - first step", SECONDS, lambda t: [t.prefill_time]),
    "request_decode_time_seconds": ("last token - first token", SECONDS, lambda t: [t.decode_time]),
    "request_inference_time_seconds": ("last token - first step", SECONDS, lambda t: [t.inference_time]),
    "request_prompt_tokens": ("prompt tokens of a request", TOKENS, lambda t: [t.prompt_tokens]),
    "request_generation_tokens": ("output tokens of a request", TOKENS, lambda t: [len(t.tokens)]),
}


class Exporter:
    """The numbers of one engine for Prometheus, under the names that vLLM's dashboards and autoscalers ask for.

    observe(timeline)   once per completion, at its end: so three chunks and a preemption are still one TTFT
    step(record)        once per engine step
    gauges(engine)      before each render: what is there now

    Counters only rise. A completion counts under its `finished_reason`; latencies are of those that ended well.
    """

    def __init__(self, model_name: str, prefix: str = "minserve:"):
        import prometheus_client as prometheus  # of the extra [server]: the formulas above need nothing

        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
            raise ValueError(
                f'the prefix {prefix!r} cannot begin a Prometheus name: use "minserve:" or "vllm:"'
            )
        prometheus.disable_created_metrics()  # a second series for each, and no dashboard reads it
        self._render, self.content_type = prometheus.generate_latest, prometheus.CONTENT_TYPE_LATEST
        self.registry = prometheus.CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}

        def make(kind, name: str, text: str, **options):
            metric = kind(prefix + name, text, list(labels), registry=self.registry, **options)
            return metric.labels(**labels)

        self._now = {name: make(prometheus.Gauge, name, text) for name, text in GAUGES.items()}
        self._counts = {name: make(prometheus.Counter, name, text) for name, text in COUNTERS.items()}
        self._spreads = {
            name: make(prometheus.Histogram, name, text, buckets=edges)
            for name, (text, edges, _) in HISTOGRAMS.items()
        }
        self._step = make(
            prometheus.Histogram, "iteration_tokens_total", "tokens of one step", buckets=TOKENS
        )
        ended = prometheus.Counter(
            prefix + "request_success", "completions that ended, by why", [*labels, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self._ended = {reason: ended.labels(**labels, finished_reason=reason) for reason in REASONS}

    def observe(self, timeline: Timeline) -> None:
        self._ended[timeline.reason].inc()
        if timeline.tokens:
            self._counts["prompt_tokens"].inc(timeline.prompt_tokens)
            self._counts["generation_tokens"].inc(len(timeline.tokens))
        if timeline.started is not None:
            self._counts["prefix_cache_queries"].inc(timeline.prompt_tokens)
            self._counts["prefix_cache_hits"].inc(timeline.cached_tokens)
        if timeline.ok:
            for name, (_, _, of) in HISTOGRAMS.items():
                for value in of(timeline):
                    if value is not None:
                        self._spreads[name].observe(value)

    def step(self, record: StepRecord) -> None:
        self._counts["num_preemptions"].inc(len(record.preempted))
        if record.rows:
            self._step.observe(record.num_tokens)

    def gauges(self, engine) -> None:
        scheduler, pages = engine.scheduler, engine.pages
        self._now["num_requests_running"].set(len(scheduler.running))
        self._now["num_requests_waiting"].set(len(scheduler.waiting))
        self._now["kv_cache_usage_perc"].set(pages.in_use / pages.num_pages)

    def render(self) -> bytes:
        return self._render(self.registry)
