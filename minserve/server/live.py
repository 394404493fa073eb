"""What operators, routers and the page see of a server: its health, its numbers, and what it did lately.

Counts are kept by the event loop alone, from what AsyncEngine tells it, so nothing is locked.
"""

import math
import time
from collections import Counter, deque
from importlib.metadata import version
from pathlib import Path

from fastapi.responses import HTMLResponse, Response

from minserve.async_engine import AsyncEngine
from minserve.metrics import OK, Exporter, Timeline, percentile
from minserve.step_log import StepRecord

PAGE = Path(__file__).parents[1] / "assets" / "page.html"


class Views:
    """The routes that only look, open to whoever reaches the port: they say nothing of what anybody asked."""

    def __init__(self, serving: AsyncEngine, model_name: str, metrics_prefix: str):
        self.serving, self.engine, self.name = serving, serving.engine, model_name
        self.exporter, self.live = Exporter(model_name, metrics_prefix), Live()
        serving.on_step += [self.exporter.step, self.live.step]
        serving.on_end.append(lambda _, timeline: self.ended(timeline))

    def ended(self, timeline: Timeline) -> None:
        self.exporter.observe(timeline)
        self.live.end(timeline)

    def refused(self, arrival: float) -> None:
        """A request that was not let in."""
        (timeline := Timeline(arrival)).ended(time.monotonic(), "refused")
        self.ended(timeline)

    async def health(self) -> Response:
        return Response(status_code=200 if self.serving.healthy and not self.serving.draining else 503)

    async def version(self) -> dict:
        return {"version": version("minserve")}

    async def metrics(self) -> Response:
        self.exporter.gauges(self.engine)
        return Response(self.exporter.render(), headers={"Content-Type": self.exporter.content_type})

    async def load(self) -> dict:
        return dict(running=len(self.engine.scheduler.running), waiting=len(self.engine.scheduler.waiting))

    async def stats(self) -> dict:
        pages, serving = self.engine.pages, self.serving
        counts = dict(
            total=pages.num_pages, free=len(pages.free), cached=len(pages.cached), in_use=pages.in_use
        )
        state = dict(
            healthy=serving.healthy,
            draining=serving.draining,
            error=repr(serving.error) if serving.error else None,
            max_running=self.engine.scheduler.max_running,
        )
        return {"model": self.name} | await self.load() | state | {"pages": counts} | self.live.report()

    async def page(self) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))


class Live:
    """The last steps and answers."""

    def __init__(self):
        self.recent: deque[dict] = deque(maxlen=120)
        self.made: deque[tuple[float, int]] = deque(maxlen=4096)  # when, how many tokens
        self.e2e, self.ttft, self.itl = deque(maxlen=128), deque(maxlen=128), deque(maxlen=2048)
        self.steps, self.ended = 0, Counter()

    def step(self, record: StepRecord) -> None:
        self.steps += 1
        waiting = len(record.waiting) + record.behind
        self.recent.append(
            dict(t=record.start, running=record.running, waiting=waiting, in_use=record.in_use,
                 tokens=record.num_tokens, seconds=record.total)
        )  # fmt: skip
        self.made.append((time.monotonic(), sum(row.sampled + row.kept for row in record.rows)))

    def end(self, timeline: Timeline) -> None:
        self.ended[timeline.reason] += 1
        if timeline.ok and timeline.ttft is not None:
            self.ttft.append(timeline.ttft)
            self.e2e.append(timeline.e2e)
            self.itl.extend(timeline.itl)

    @property
    def patience(self) -> int:
        """Seconds after which to come again: what an answer takes these days."""
        return min(60, math.ceil(percentile(self.e2e, 50) or 1))

    def report(self, window: float = 5.0) -> dict:
        since = time.monotonic() - window
        return dict(
            steps=self.steps,
            tokens_per_second=sum(n for at, n in self.made if at > since) / window,
            ttft=_spread(self.ttft),
            itl=_spread(self.itl),
            recent=list(self.recent),
            requests=dict(
                finished=sum(self.ended[reason] for reason in OK),
                failed=sum(n for reason, n in self.ended.items() if reason not in OK),
            ),
        )


def _spread(seconds) -> dict[str, float | None]:
    """Percentiles in milliseconds."""
    found = {f"p{q}": percentile(seconds, q) for q in (50, 90, 99)}
    return {name: None if value is None else value * 1e3 for name, value in found.items()}
