"""Speculative decoding: what each drafter gains, where answers copy and where they do not, and what was predicted.

    speed      decode tokens per second with a drafter over those without: same prompts and lengths, in turn. Only steps
               count in which all seats decode, so prompts and the end of a run play no part
    formula    speedup = (1 + E[kept]) / (k c + v(k)), where a step of k + 1 tokens for each request takes v(k) times a
               plain one (measured here, on scripted drafts), and a drafted token c times. Where drafts have many
               lengths, k c and v(k) are means over the steps as they were: v of each step's tokens, filled up to
               the size that is recorded
    equal      in fp32 each answer is compared, token by token, before anything is timed. In the timed dtype a batch of
               another size rounds otherwise: the share of equal answers is reported

Drafters run with k fixed, which the formula is about, and adaptive, as they are served. Answers that copy: only n-grams
have a claim there; other drafters are shown with one request at a time.
Story    notebooks/11_speculative_decoding.ipynb, notebooks/12_medusa_and_self_speculation.ipynb
"""

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import mean, median

import numpy as np
import torch

from minserve.bench.common import Around, Options, clean_up, label, load
from minserve.bench.spec_cost import KS, Steps, step_bound
from minserve.bench.spec_work import works
from minserve.bench.workload import PAGE, Work, serve
from minserve.drafters import NAMES, drafter_for
from minserve.engine import LLM
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row
from minserve.model import Model
from minserve.pages import pages_for
from minserve.speculation import Drafter
from minserve.step_log import StepRecord

PROMPTS, MOST, ROUNDS = 20, 48, 3  # of each kind; tokens of an answer
COUNTS = {1: 5, 4: 8, 16: 24}  # requests of a round, by seats
EXACT = 3, 24  # prompts of each kind, and tokens of an answer, that are compared in fp32
FAST, HARMLESS, TRAINED, AGREES = 1.8, 0.97, 1.2, 0.9


def run(options: Options) -> Report:
    report, name = options.report(), options.model
    with Around(options) as around:
        model = load(name, options.dtype)
        names, missing = drafters(options, model)
        equal_in_fp32(report, options, model, names)
        quick = options.quick
        its = works(name, model, 6 if quick else PROMPTS, 8 if quick else MOST)
        timed = []
        for (kind, work), B in product(its.items(), options.batches or ((1, 2) if quick else tuple(COUNTS))):
            timed.append(Timed(options, model, kind, work, B, names))
            clean_up()
    for case in timed:
        case.add_rows(report, around.machine, model)
    report.where += f", {label(name)} in {options.dtype_name}"
    first = report.rows[0]
    report.rows[0] = replace(first, note=options.note(first.note, around.note, *missing))
    return report


def drafters(options: Options, model: Model) -> tuple[list[str], list[str]]:
    """Those that there are for this model, and why not the others. Raises SystemExit where one was asked for."""
    able, missing = [], []
    for name in options.drafters or NAMES:
        try:
            drafter_for(name, model, options.k)
        except (OSError, ValueError) as error:
            if options.drafters:
                raise SystemExit(f"bench: {error}") from None
            missing.append(f"no {name}: {str(error).splitlines()[0].split('/')[-1]}")
        else:
            able.append(name)
    return able, missing


def equal_in_fp32(report: Report, options: Options, model: Model, names: list[str]) -> None:
    """Raises RuntimeError at the first answer that a drafter changes."""
    exact = model if model.dtype == torch.float32 else load(options.model, torch.float32)
    for kind, work in works(options.model, exact, *EXACT).items():
        right = answers(seated(exact, work, len(work.prompts)), work)
        for name in names:
            drafter = drafter_for(name, exact, options.k)
            said = answers(seated(exact, work, len(work.prompts), drafter), work)
            differ(name, kind, right, said)
            report.add(Row(f"{kind}, {name}: answers equal in fp32", "share", [1.0], 1.0, 1.0))


def differ(name: str, kind: str, right: list[list[int]], said: list[list[int]]) -> None:
    for i, (own, its) in enumerate(zip(right, said, strict=True)):
        for at, (token, other) in enumerate(zip(own, its, strict=True), 1):
            if token != other:
                raise RuntimeError(
                    f"in fp32 {name} changes token {at} of answer {i} ({kind}): {other} where the model says {token}.\n"
                    f"  No speed is reported for a wrong answer; run the tests."
                )


def seated(
    model: Model, work: Work, seats: int, drafter: Drafter | None = None, adaptive=False, **options
) -> LLM:
    pages = (seats + 1) * pages_for(work.longest + 16, PAGE) + 64
    return LLM(model, page_size=PAGE, num_pages=pages, max_running=seats, drafter=drafter, adaptive=adaptive,
               log_length=100_000, overlap=False, **options)  # fmt: skip


def answers(llm: LLM, work: Work) -> list[list[int]]:
    return [output.tokens for output in serve(llm, work)[1]]


# ---------------------------------------------------------------- one way to serve, timed
@dataclass(frozen=True)
class Side:
    drafter: str
    adaptive: bool
    k: int

    def __str__(self) -> str:
        return f"{self.drafter}, adaptive" if self.adaptive else f"{self.drafter}, k = {self.k}"


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
        serve(self.llm, work.first(seats, 12))  # warm

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


# ---------------------------------------------------------------- one kind of work, so many at once
class Timed:
    def __init__(self, options: Options, model: Model, kind: str, work: Work, seats: int, names: list[str]):
        self.case, self.kind, self.seats = f"{kind}, batch {seats}", kind, seats
        self.itemsize, self.context = model.dtype.itemsize, int(mean(map(len, work.prompts)) + MOST // 2)
        count = 2 * seats if options.quick else COUNTS.get(seats, max(5, 2 * seats))
        serving = partial(Server, model, work, seats, count)
        self.plain, self.sides = serving(), {}
        if kind == "copy" and seats > 1:
            names = names[:1]
        for name, adaptive in product(names, (False, True)):
            drafter = drafter_for(name, model, options.k)
            self.sides[Side(name, adaptive, drafter.k)] = serving(drafter, adaptive)
        self.steps = Steps(model, [work.prompts[i % len(work.prompts)] for i in range(seats)], len(KS))
        self.seconds: dict[int, list[float]] = defaultdict(list)
        turns = {"": self.plain.round, "steps": self.time_steps} | {
            str(side): server.round for side, server in self.sides.items()
        }
        progress = options.progress(self.case)
        self.rates = in_turn(turns, warmup=0, repeats=ROUNDS, at_most=options.at_most, each=progress)

    def time_steps(self) -> None:
        for again in (False, True):
            self.steps.start(self.seats)
            for k in KS:
                seconds = self.steps.seconds(k)
                if again:
                    self.seconds[k].append(seconds)

    def add_rows(self, report: Report, machine, model: Model) -> None:
        case, B, config = self.case, self.seats, model.config
        at = partial(step_bound, config, machine, B, context=self.context, itemsize=self.itemsize)
        for k, samples in self.seconds.items():
            note = f"v({k}) = {median(samples) / median(self.seconds[0]):.2f}"
            report.add(
                Row(f"{case}: step of {B} x {k + 1}", "s", samples, at(0) if not k else at(k), note=note)
            )
        report.add(Row(f"{case}: without", "tok/s", self.rates[""], B / at(0)))
        for side, server in self.sides.items():
            self.add_side(report, side, server, at)

    def add_side(self, report: Report, side: Side, server: Server, at) -> None:
        case, rates = f"{self.case}: {side}", self.rates[str(side)]
        drafted = [row.drafted for record in server.records for row in record.rows]
        made, k = tokens_of(server.records) / len(drafted), mean(drafted)
        report.add(Row(case, "tok/s", rates, self.seats * made / at(k), note=self.agreement(server)))
        table = {self.seats * (1 + j): median(its) for j, its in self.seconds.items()}
        sizes = getattr(server.llm.compute, "rows", [])
        drafting, cost = server.spent / table[self.seats], cost_of(server.records, table, sizes)
        formula = speedup(made - 1, drafting, cost)
        ratios = [a / b for a, b in zip(rates, self.rates[""])]
        agrees = 1 - abs(formula / (server.rate / self.plain.rate) - 1)
        note = f"predicted {formula:.2f}x: (1 + {made - 1:.2f}) / ({drafting:.3f} + {cost:.2f})"
        target = self.target(side, median(ratios), agrees)
        report.add(Row(f"{case} / without", "x", ratios, 1.0, target, note))
        share = f"{k:.1f} drafted, c = {drafting / k if k else 0:.3f}"
        report.add(Row(f"{case}: tokens of a step", "tokens", server.per_step, note=share))
        report.add(Row(f"{case}: as predicted", "share", [agrees], 1.0, AGREES))
        if not side.adaptive and k and not server.llm.speculation.drafter.branches:
            shares = by_position(server.records)
            note = "position by position: " + ", ".join(f"{share:.2f}" for share in shares)
            report.add(Row(f"{case}: kept by position", "share", shares, note=note))

    def target(self, side: Side, measured: float, agrees: float) -> float | None:
        """Adaptive only. What was trained may lose, where the formula says so."""
        if not side.adaptive:
            return None
        if side.drafter == "ngram" and self.seats == 1 and self.kind == "copy":
            return FAST
        if side.drafter != "ngram" and self.seats == 1 and self.kind == "free":
            return TRAINED if measured >= TRAINED or agrees < AGREES else None
        return HARMLESS

    def agreement(self, server: Server) -> str:
        same = [server.said[key] == right for key, right in self.plain.said.items() if key in server.said]
        return f"{mean(same):.0%} of the answers are those without a draft"
