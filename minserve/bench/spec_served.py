"""A drafter at work, timed step by step; and the formula that says beforehand what it gains.

    speedup = (1 + E[kept]) / (k c + v(k))     v(k): seconds of a step of k + 1 tokens for each request over those of a
                                               plain step; c: seconds of a drafted token over the same

Where drafts have many lengths, k c and v(k) are means over the steps as they were: v of each step's tokens, filled up
to the size that is recorded.
Story    notebooks/11_speculative_decoding.ipynb
"""

import time
from collections import defaultdict
from functools import partial
from statistics import mean

import numpy as np

from minserve.bench.workload import PAGE, Work, serve
from minserve.engine import LLM
from minserve.model import Model
from minserve.pages import pages_for
from minserve.speculation import Drafter
from minserve.step_log import StepRecord


def seated(model: Model, work: Work, seats: int, drafter: Drafter | None = None, adaptive=False) -> LLM:
    pages = (seats + 1) * pages_for(work.longest + 16, PAGE) + 64
    return LLM(model, page_size=PAGE, num_pages=pages, max_running=seats, drafter=drafter, adaptive=adaptive,
               log_length=100_000)  # fmt: skip


def answers(llm: LLM, work: Work) -> list[list[int]]:
    return [output.tokens for output in serve(llm, work)[1]]


class Server:
    """An engine with so many seats. Each round serves the next requests of the work; its full steps are kept."""

    def __init__(self, model: Model, work: Work, seats: int, count: int, drafter=None, adaptive=False):
        self.work, self.seats, self.count, self.turn = work, seats, count, 0
        self.drafting: dict[int, float] = defaultdict(float)  # step -> seconds
        for method in ("propose", "observe") if drafter else ():
            setattr(drafter, method, partial(self.clocked, getattr(drafter, method)))
        self.llm = seated(model, work, seats, drafter, adaptive)
        self.records: list[StepRecord] = []
        self.per_step: list[float] = []  # tokens of a request, of each round
        self.said: dict[tuple[int, int], list[int]] = {}  # by round and place
        serve(self.llm, work.first(seats, 6))  # warm

    def clocked(self, method, *its):
        start = time.perf_counter()
        try:
            return method(*its)
        finally:
            self.drafting[self.llm.scheduler.steps] += time.perf_counter() - start

    def next(self) -> Work:
        n, first = len(self.work.prompts), self.turn * self.count
        which = [i % n for i in range(first, first + self.count)]
        self.turn += 1
        return Work([self.work.prompts[i] for i in which], [self.work.lengths[i] for i in which])

    def round(self) -> float:
        """Tokens per second, while everybody decodes."""
        self.llm.log.clear()
        _, outputs = serve(self.llm, self.next())
        self.said |= {(self.turn, i): output.tokens for i, output in enumerate(outputs)}
        found = full_steps(self.llm.log, self.seats)
        self.records += found
        self.per_step.append(tokens_of(found) / (self.seats * len(found)))
        return tokens_of(found) / sum(record.total for record in found)

    @property
    def rate(self) -> float:
        """Of all rounds together."""
        return tokens_of(self.records) / sum(record.total for record in self.records)

    @property
    def spent(self) -> float:
        """Seconds of drafting in a step."""
        return mean(self.drafting[record.step] for record in self.records)


def full_steps(log, seats: int) -> list[StepRecord]:
    """Those in which so many requests decode and nothing else happens."""
    found = [
        record for record in log
        if len(record.rows) == seats and all(r.sampled and r.num_tokens == 1 + r.drafted for r in record.rows)
    ]  # fmt: skip
    if not found:
        raise RuntimeError(f"in no step did {seats} requests decode together: nothing to measure")
    return found


def tokens_of(records) -> int:
    return sum(1 + row.kept for record in records for row in record.rows)


# ---------------------------------------------------------------- the formula
def speedup(kept: float, drafting: float, cost: float) -> float:
    """(1 + E[kept]) / (k c + v(k)): tokens of a step over its time, both as multiples of a plain step's."""
    return (1 + kept) / (drafting + cost)


def cost_of(records, table: dict[int, float], sizes: list[int]) -> float:
    """The mean of v over these steps. table: {tokens: seconds}, a plain step first; sizes: those recorded."""
    filled = [next((s for s in sizes if s >= record.num_tokens), record.num_tokens) for record in records]
    known = sorted(table)
    return float(np.interp(filled, known, [table[n] for n in known]).mean() / table[known[0]])


def by_position(records) -> list[float]:
    """Of the drafts that reached so far, the share that was kept at least so far: chains only."""
    rows = [row for record in records for row in record.rows]
    deepest = max(row.drafted for row in rows)
    tried = [sum(row.drafted > i for row in rows) for i in range(deepest)]
    return [sum(row.kept > i for row in rows) / n for i, n in enumerate(tried)]
