"""What one step of the engine did, as plain data: figures, the viewer, traces and metrics are drawn from it.

Times are seconds on the monotonic clock. A record holds numbers only, so it stays right after its requests are gone.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One request's part of a step."""

    request: int  # id
    num_tokens: int  # computed in this step
    computed: int  # in the cache before it
    sampled: bool  # its debt was paid in full, so it got a token
    drafted: int = 0  # of num_tokens, those that were only proposed ...
    kept: int = 0  # ... and how many of these it got besides its token

    @property
    def decodes(self) -> bool:
        """One token and its draft, and a draw after each. (A prompt's last token, computed alone, is the same work.)"""
        return self.sampled and self.num_tokens == 1 + self.drafted


@dataclass(frozen=True)
class Snapshot:
    """Who owned what when the step ran."""

    tables: dict[int, list[int]]  # request id -> its page table; -1 where a page has left the window
    references: list[int]  # per page
    indexed: dict[int, str]  # page -> the first digits of its key in the prefix index
    cached: list[int]  # unreferenced pages, least recently used first


@dataclass
class StepRecord:
    step: int
    start: float
    seconds: dict[str, float]  # "schedule", "pack", "model", "sample", "commit", "text"
    rows: list[Row]
    waiting: list[int]  # ids of the first 64 in the queue, in the order they will be served
    running: int
    free: int  # pages
    cached: int
    in_use: int
    preempted: list[int] = field(default_factory=list)
    finished: dict[int, str] = field(default_factory=dict)  # request id -> reason
    snapshot: Snapshot | None = None
    behind: int = 0  # how many more wait behind those

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def chrome_trace(log: list[StepRecord], path: Path | str) -> None:
    """Write the log in the Trace Event format that chrome://tracing and https://ui.perfetto.dev read.

    One track for the engine's phases, one per request (prefill and decode spans), counters for pages and the queue.
    """
    zero = log[0].start if log else 0.0
    events = [event for record in log for event in _events(record, lambda seconds: (seconds - zero) * 1e6)]
    tracks = {(0, None): "engine", (1, None): "requests"}
    tracks |= {(1, row.request): f"request {row.request}" for record in log for row in record.rows}
    names = [
        dict(
            name="process_name" if tid is None else "thread_name",
            ph="M",
            pid=pid,
            tid=tid or 0,
            args={"name": name},
        )
        for (pid, tid), name in tracks.items()
    ]
    Path(path).write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))


def _events(record: StepRecord, us):
    """One step: process 0 is the engine, process 1 has a thread per request; us() turns seconds into trace time."""
    begin, start = record.start, us(record.start)
    for phase, seconds in record.seconds.items():
        span = dict(ph="X", ts=us(begin), dur=seconds * 1e6, pid=0, tid=0)
        yield dict(span, name=phase, args={"step": record.step})
        begin += seconds
    for row in record.rows:
        kind = "decode" if row.decodes else "prefill"
        args = dict(step=record.step, tokens=row.num_tokens, computed=row.computed)
        args |= dict(drafted=row.drafted, kept=row.kept) if row.drafted else {}
        yield dict(name=kind, ph="X", ts=start, dur=record.total * 1e6, pid=1, tid=row.request, args=args)
    for request, reason in record.finished.items():
        yield dict(name=reason, ph="i", s="t", ts=us(begin), pid=1, tid=request)
    for request in record.preempted:
        yield dict(name="preempted", ph="i", s="t", ts=start, pid=1, tid=request)
    pages = dict(free=record.free, cached=record.cached, in_use=record.in_use)
    yield dict(name="pages", ph="C", ts=start, pid=0, args=pages)
    yield dict(
        name="requests",
        ph="C",
        ts=start,
        pid=0,
        args=dict(waiting=len(record.waiting) + record.behind, running=record.running),
    )
