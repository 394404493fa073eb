"""What a step costs, learned from the engine's own step log.

    seconds = coefficients . features(rows of the step), every coefficient >= 0

The features are what a step's kernels are given: rows of one token and how far they look back; chunks, their tokens,
the pairs of a query and a key in them, the positions they read. A step of single tokens is recorded for 1, 2, 4, 8, ...
rows (graphs.py), so its cost has stairs; a step with a chunk has slopes, one for each range of tokens. Non-negative,
because no work makes a step shorter, and a fit that may say so extrapolates into nonsense.

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


# ---------------------------------------------------------------- features
STAIRS = (1, 2, 4, 8, 16, 32, 64)  # rows of recorded steps
FEATURES = (
    "step of single tokens", *(f"over {rows} rows" for rows in STAIRS), "row", "position seen by a single token",
    "step with a chunk", "token, the first 32", "token, the next 96", "token, later ones", "chunk",
    "pair in a chunk", "position read by a chunk",
)  # fmt: skip
BETWEEN = "between two steps"
NO_SINGLES = (0,) * (len(STAIRS) + 2)


def features(w: Work) -> tuple[float, ...]:
    """One number for each of FEATURES, or for the first of them: what is left out is 0."""
    if not w.chunks:
        return (1, *[w.singles > rows for rows in STAIRS], w.singles, w.seen)
    T = w.singles + w.tokens
    slopes = min(T, 32), min(max(T - 32, 0), 96), max(T - 128, 0)
    return (*NO_SINGLES, w.seen, 1, *slopes, w.chunks, w.pairs, w.read)


# ---------------------------------------------------------------- the costs
@dataclass(frozen=True)
class StepCosts:
    """Seconds of each of FEATURES, and between two steps."""

    coefficients: tuple[float, ...]
    between: float = 0.0

    @classmethod
    def fit(cls, log: Sequence[StepRecord]) -> "StepCosts":
        """Learn from these steps. Raises ValueError if there are too few to say anything."""
        log = [record for record in log if record.rows]
        if len(log) < 2 * len(FEATURES):
            raise ValueError(
                f"{len(log)} steps cannot tell {len(FEATURES)} costs apart: run at least {2 * len(FEATURES)} steps"
            )
        seconds = np.array([record.total for record in log])
        table = np.zeros((len(log), len(FEATURES)))  # [steps, features]
        for line, record in zip(table, log):
            its = features(work_of(record.rows))
            line[: len(its)] = its
        expected, weights = seconds, np.ones(len(log))
        for _ in range(6):
            found = nonnegative_least_squares(
                table * (weights / expected)[:, None], seconds * weights / expected
            )
            expected = table @ found
            errors = np.abs(seconds / expected - 1)
            weights = np.minimum(1, 2 * max(np.median(errors), 1e-9) / np.maximum(errors, 1e-9)) ** 0.5
        found *= seconds.sum() / expected.sum()
        gaps = [b.start - a.start - a.total for a, b in pairwise(log) if went_on(a)]
        return cls(tuple(found.tolist()), max(0.0, median(gaps)) if gaps else 0.0)

    def times(self, pace: float) -> "StepCosts":
        """The same on a machine that takes so many times as long."""
        return StepCosts(tuple(pace * cost for cost in self.coefficients), pace * self.between)

    def pace(self, log: Iterable[StepRecord]) -> float:
        """How many times as long as it should a step of this log took: the median, so one hiccup does not count."""
        return median(record.total / self.seconds(record.rows) for record in log if record.rows)

    def of(self, work: Work) -> float:
        return sum(map(mul, self.coefficients, features(work)))

    def seconds(self, rows: Iterable[Row]) -> float:
        """Of a step with these rows of a step log."""
        return self.of(work_of(rows))

    def errors(self, log: Iterable[StepRecord]) -> list[float]:
        """expected / measured - 1 of each step. Of steps that were not fitted, it says how good the fit is."""
        return [self.seconds(record.rows) / record.total - 1 for record in log if record.rows]

    def table(self) -> str:
        """The coefficients that are not zero."""
        named = [*zip(FEATURES, self.coefficients), (BETWEEN, self.between)]
        return "\n".join(f"{name:<32}{cost * 1e6:>12,.3f} µs" for name, cost in named if cost)


def went_on(record: StepRecord) -> bool:
    """Was there work left after this step, so that the next one followed at once?"""
    return record.running + len(record.waiting) + record.behind > len(record.finished)


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
