"""What a step costs, learned from the engine's own step log.

    seconds = coefficients . features(rows of the step), every coefficient >= 0

The features are what a step's kernels are given: rows of one token and how far they look back; chunks, their tokens,
the pairs of a query and a key in them, the positions they read. A step of single tokens is recorded for 1, 2, 4, 8, ...
rows (graphs.py), so its cost has stairs; a step with a chunk has slopes, one for each range of tokens. Non-negative,
because no work makes a step shorter, and a fit that may say so extrapolates into nonsense.

The first step after a pause takes longer, the more the longer the pause: caches hold something else by then, and some
machines have taken pages of memory away. So a pause has slopes as well; that a log begins with a step says nothing of
the pause before it, and such a step is left out.

The log is not quiet: other processes delay a step now and then. So the squares are of relative errors, and large ones
count linearly (Huber). In the end all is scaled so that the log's steps take in sum as long as they did: what the
delays cost on average is in every step.

Cost     one least-squares problem of some twenty columns, about five times
Sources  non-negative least squares: Lawson and Hanson 1974, "Solving Least Squares Problems", ch. 23
Story    notebooks/14_the_fleet.ipynb
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import mul
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np

from minserve.step_log import Row, StepRecord


class Work(NamedTuple):
    """All that a step's seconds may depend on."""

    singles: int  # rows of one token
    seen: int  # positions that these look at
    chunks: int = 0  # rows of several tokens
    tokens: int = 0  # in these
    pairs: int = 0  # of a query and a key in these
    read: int = 0  # positions that these look at


def work(rows: Iterable[tuple[int, int]]) -> Work:
    """rows: (tokens, how many were computed before) of each request in the step."""
    singles = seen = chunks = tokens = pairs = read = 0
    for n, computed in rows:
        if n == 1:
            singles += 1
            seen += computed + 1
        else:
            chunks += 1
            tokens += n
            pairs += n * computed + n * (n + 1) // 2
            read += computed + n
    return Work(singles, seen, chunks, tokens, pairs, read)


def work_of(rows: Iterable[Row]) -> Work:
    return work((row.num_tokens, row.computed) for row in rows)


class Costs(Protocol):
    """Whatever says how long a step takes. StepCosts has learned it; others assume it."""

    between: float  # seconds from the end of a step to the start of the next

    def of(self, work: Work) -> float: ...

    # what the first step after so many seconds without work takes longer
    def after(self, pause: float) -> float: ...


# ---------------------------------------------------------------- features
STAIRS = (1, 2, 4, 8, 16, 32, 64)  # rows of recorded steps
FEATURES = (
    "step of single tokens", *(f"over {rows} rows" for rows in STAIRS), "row", "position seen by a single token",
    "step with a chunk", "token, the first 32", "token, the next 96", "token, later ones", "chunk",
    "pair in a chunk", "position read by a chunk",
)  # fmt: skip
PAUSES = "second of a pause before it, the first", "second of a pause before it, the next three"
BETWEEN = "between two steps"
NO_SINGLES = (0,) * (len(STAIRS) + 2)


def features(w: Work) -> tuple[float, ...]:
    """One number for each of FEATURES, or for the first of them: what is left out is 0."""
    if not w.chunks:
        return (1, *[w.singles > rows for rows in STAIRS], w.singles, w.seen)
    T = w.singles + w.tokens
    ranges = min(T, 32), min(max(T - 32, 0), 96), max(T - 128, 0)
    return (*NO_SINGLES, w.seen, 1, *ranges, w.chunks, w.pairs, w.read)


def slopes(pause: float) -> tuple[float, float]:
    """One number for each of PAUSES."""
    return min(pause, 1.0), min(max(pause - 1.0, 0.0), 3.0)


# ---------------------------------------------------------------- the costs
@dataclass(frozen=True)
class StepCosts:
    """Seconds of each of FEATURES, between two steps, and of each of PAUSES."""

    coefficients: tuple[float, ...]
    between: float = 0.0
    pauses: tuple[float, ...] = (0.0, 0.0)

    @classmethod
    def fit(cls, *logs: Sequence[StepRecord]) -> "StepCosts":
        """Learn from the steps of these logs. Raises ValueError if there are too few to say anything."""
        logs = [[record for record in log if record.rows] for log in logs]
        steps = [step for log in logs for step in with_pauses(log)[1:]]
        its, wanted = len(FEATURES), len(FEATURES) + len(PAUSES)
        if len(steps) < 2 * wanted:
            raise ValueError(
                f"{len(steps)} steps cannot tell {wanted} costs apart: run at least {2 * wanted} steps"
            )
        seconds = np.array([record.total for record, _ in steps])
        table = np.zeros((len(steps), wanted))  # [steps, costs]
        for line, (record, pause) in zip(table, steps):
            known = features(work_of(record.rows))
            line[: len(known)], line[its:] = known, slopes(pause)
        expected, weights = seconds, np.ones(len(steps))
        for _ in range(6):
            found = nonnegative_least_squares(
                table * (weights / expected)[:, None], seconds * weights / expected
            )
            expected = table @ found
            errors = np.abs(seconds / expected - 1)
            weights = np.minimum(1, 2 * max(np.median(errors), 1e-9) / np.maximum(errors, 1e-9)) ** 0.5
        found *= seconds.sum() / expected.sum()
        gaps = [b.start - a.start - a.total for log in logs for a, b in pairwise(log) if went_on(a)]
        between = max(0.0, median(gaps)) if gaps else 0.0
        return cls(tuple(found[:its].tolist()), between, tuple(found[its:].tolist()))

    def times(self, pace: float) -> "StepCosts":
        """The same on a machine that takes so many times as long."""
        longer = lambda costs: tuple(pace * cost for cost in costs)
        return StepCosts(longer(self.coefficients), pace * self.between, longer(self.pauses))

    def pace(self, *logs: Sequence[StepRecord]) -> float:
        """How many times as long as it should a step of these took: the median, so one hiccup does not count."""
        return median(record.total / expected for log in logs for record, expected in self.expected(log))

    def of(self, work: Work) -> float:
        return sum(map(mul, self.coefficients, features(work)))

    def after(self, pause: float) -> float:
        """What the first step after so many seconds without work takes longer."""
        return sum(map(mul, self.pauses, slopes(pause)))

    def seconds(self, rows: Iterable[Row]) -> float:
        """Of a step with these rows of a step log."""
        return self.of(work_of(rows))

    def expected(self, log: Sequence[StepRecord]) -> list[tuple[StepRecord, float]]:
        """Each step of a log, and the seconds it should have taken."""
        return [(record, self.seconds(record.rows) + self.after(pause)) for record, pause in with_pauses(log)]

    def errors(self, log: Sequence[StepRecord]) -> list[float]:
        """expected / measured - 1 of each step. Of steps that were not fitted, it says how good the fit is."""
        return [expected / record.total - 1 for record, expected in self.expected(log)]

    def table(self) -> str:
        """The coefficients that are not zero."""
        return "\n".join(f"{name:<44}{cost * 1e6:>12,.3f} µs" for name, cost in self.named() if cost)

    def named(self) -> list[tuple[str, float]]:
        """The name and the seconds of every cost."""
        return [*zip(FEATURES, self.coefficients), *zip(PAUSES, self.pauses), (BETWEEN, self.between)]


def went_on(record: StepRecord) -> bool:
    """Was there work left after this step, so that the next one followed at once?"""
    return record.running + len(record.waiting) + record.behind > len(record.finished)


def with_pauses(log: Sequence[StepRecord]) -> list[tuple[StepRecord, float]]:
    """Each step, and how many seconds without work came before it: 0 for the first, of which nothing is known."""
    log = [record for record in log if record.rows]
    pauses = [0.0 if went_on(a) else b.start - a.start - a.total for a, b in pairwise(log)]
    return [*zip(log, [0.0, *pauses])]


def nonnegative_least_squares(A, y):
    """The x >= 0 that minimises |A x - y|. A [m, n], y [m]."""
    scale = np.maximum(np.linalg.norm(A, axis=0), 1e-300)  # [n]
    A, x = A / scale, np.zeros(A.shape[1])
    free = np.zeros(len(x), dtype=bool)  # those that are not held at 0
    for _ in range(3 * len(x)):
        slope = np.where(free, -inf, A.T @ (y - A @ x))
        if slope.max() <= 1e-10 * np.linalg.norm(y):
            break
        free[slope.argmax()] = True
        while True:
            best = np.zeros(len(x))
            best[free] = np.linalg.lstsq(A[:, free], y, rcond=None)[0]
            below = free & (best <= 0)
            if not below.any():
                break
            part = np.min(x[below] / np.maximum(x[below] - best[below], 1e-300))
            x = x + part * (best - x)  # as far as all stay >= 0
            free &= x > 1e-15
        x = best
    return x / scale
