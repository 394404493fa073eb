"""What an engine did lately, as the page and routers see it. Only the event loop touches it, so nothing is locked."""

import math
import time
from collections import Counter, deque

from minserve.metrics import OK, Timeline, percentile
from minserve.step_log import StepRecord


class Live:
    """The last steps and answers, for the page and for routers."""

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

    def end(self, _, timeline: Timeline) -> None:
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
