"""What a run of the load generator says: a table to read, rows to compare, and every request's times to draw.

    Run(shots, model, offered).text(slo)     the percentile table, offered and achieved rate, lag
    run.save(path, command, slo)             {name, command, where, versions, date, commit, rows, requests}
    run.requests()                           one dict per request, times in seconds from the start of the run

Story    notebooks/13_serving_and_slos.ipynb
"""

import json
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from minserve.lab.generator import Shot
from minserve.lab.load_figures import in_flight
from minserve.lab.report import Report, Row
from minserve.metrics import LATENCIES, SLO, attainment, percentile, summary, table

MOST_SAMPLES = 500  # of one latency in a report


@dataclass
class Run:
    shots: list[Shot]
    model: str
    offered: float | None  # requests per second of the schedule; None where it has no length
    closed: bool = False

    @property
    def zero(self) -> float:
        """When the run began, on the event loop's clock."""
        first = self.shots[0]
        return first.timeline.arrival - (0.0 if self.closed else first.arrival.time)

    @property
    def seconds(self) -> float:
        """From the start until the last request had ended."""
        return max(shot.timeline.finished for shot in self.shots) - self.zero

    def summary(self, slo: SLO | None = None) -> dict:
        return summary([shot.timeline for shot in self.shots], self.seconds, slo=slo)

    @property
    def services(self) -> list[float]:
        return [shot.service for shot in self.shots if shot.timeline.ok]

    def text(self, slo: SLO | None = None) -> str:
        numbers = self.summary(slo)
        cells = [percentile(self.services, q) for q in (50, 90, 99)]
        mean = sum(self.services) / len(self.services) if self.services else None
        cells = "".join(f"{'-' if x is None else f'{x * 1e3:,.1f}':>11}" for x in (mean, *cells))
        lines = [f"model     {self.model}", *table(numbers).split("\n")]
        lines = [line for line in lines if not line.startswith("queue")]  # only the server knows
        service = (
            f"{'service':<8}{cells}{len(self.services):>9,}   last token - sent: leaves the wait before out"
        )
        lines.insert(1 + max(i for i, line in enumerate(lines) if line.startswith("e2e")), service)
        return "\n".join([*lines, *self._classes(slo), self._pace(numbers), *self._troubles()])

    def _classes(self, slo: SLO | None) -> list[str]:
        """A line for each priority, where there are several."""
        priorities = sorted({shot.timeline.priority for shot in self.shots})
        lines = []
        for priority in priorities if len(priorities) > 1 else ():
            its = [shot.timeline for shot in self.shots if shot.timeline.priority == priority]
            waits = [t.ttft for t in its if t.ok and t.ttft is not None]
            said = [
                f"{q} {percentile(waits, n) * 1e3:,.1f} ms" for q, n in (("p50", 50), ("p99", 99)) if waits
            ]
            share = [f"{attainment(its, slo):.1%} of arrived met the SLO"] if slo else []
            ttft = [f"TTFT {', '.join(said)}"] if said else []
            lines.append("; ".join([f"priority  {priority}: {len(its):,} requests", *ttft, *share]))
        return lines

    def _pace(self, numbers: dict) -> str:
        achieved = numbers["requests_per_second"] or 0.0
        if self.closed:
            return f"closed    {achieved:.2f} requests/s: as many as the server answered, so it was never overloaded"
        lag = percentile([shot.sent - shot.timeline.arrival for shot in self.shots], 99)
        offered = "-" if self.offered is None else f"{self.offered:.2f}"
        return (
            f"open      {offered} requests/s offered, {achieved:.2f} achieved; at most {self.peak:,} in flight; "
            f"99% were sent within {lag * 1e3:,.1f} ms of their time"
        )

    @property
    def peak(self) -> int:
        """The most requests in flight at once."""
        return max(count for _, count in in_flight(self.requests()))

    def _troubles(self) -> list[str]:
        """The three most frequent failures; those that differ in their numbers only are one."""
        kinds: dict[str, list[str]] = {}
        for shot in self.shots:
            if shot.why:
                kinds.setdefault(re.sub(r"\d[\d,.]*", "#", shot.why), []).append(shot.why)
        worst = sorted(kinds.values(), key=len, reverse=True)[:3]
        kind = lambda its: "such as " * (len(set(its)) > 1) + its[0].splitlines()[0]
        return [f"failed    {len(its):,} x {kind(its)}" for its in worst]

    def requests(self) -> list[dict]:
        """Each request as it was, in the order it was due, to a tenth of a millisecond."""
        at = lambda time: None if time is None else round(time - self.zero, 4)
        return [
            {
                "due": at(shot.timeline.arrival),
                "sent": at(shot.sent),
                "first": at(shot.timeline.first),
                "tokens": [at(time) for time in shot.timeline.tokens],
                "ended": at(shot.timeline.finished),
                "reason": shot.timeline.reason,
                "prompt_tokens": shot.timeline.prompt_tokens,
                "cached_tokens": shot.timeline.cached_tokens,
                "priority": shot.timeline.priority,
            }
            for shot in self.shots
        ]

    def report(self, command: str, slo: SLO | None = None) -> Report:
        """Rows for comparing runs: a latency each, of at most MOST_SAMPLES samples; rates against the offered one."""
        report, numbers = Report("load", command), self.summary(slo)
        report.versions["httpx2"] = metadata.version("httpx2")
        good = [shot.timeline for shot in self.shots if shot.timeline.ok]
        latencies = {name: (text, [x for t in good for x in of(t)]) for name, (text, of) in LATENCIES.items()}
        latencies["service"] = "last token - sent", self.services
        for name, (text, values) in latencies.items():
            if values := sorted(x for x in values if x is not None):
                report.add(Row(name, "s", thinned(values), note=f"{text}; {len(values):,} of them"))
        rates = [
            ("achieved", numbers["requests_per_second"], "requests/s"),
            ("goodput", numbers.get("goodput"), "requests/s"),
            ("output tokens", numbers["output_tokens_per_second"], "tok/s"),
        ]
        for case, value, unit in rates:
            if value is not None:
                bound = self.offered if unit == "requests/s" else None
                report.add(
                    Row(case, unit, [value], bound, note="the bound is what was offered" if bound else "")
                )
        return report

    def save(self, path: Path, command: str, slo: SLO | None = None) -> None:
        """A report as any other, with one more list in it."""
        path = Path(path)
        self.report(command, slo).save(path)
        requests = ",\n  ".join(json.dumps(request, allow_nan=False) for request in self.requests())
        path.write_text(path.read_text().removesuffix("\n}\n") + f',\n "requests": [\n  {requests}\n ]\n}}\n')


def thinned(ordered: list[float]) -> list[float]:
    """At most MOST_SAMPLES of them, evenly through their order, the first and the last among them."""
    last, most = len(ordered) - 1, min(len(ordered), MOST_SAMPLES)
    return [ordered[round(i * last / (most - 1))] for i in range(most)] if most > 1 else ordered
