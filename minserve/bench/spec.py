"""Speculative decoding: what each drafter gains, where answers copy and where they do not, and what was predicted.

    speed      decode tokens per second with a drafter over those without: same prompts and lengths, in turn. Only steps
               count in which all seats decode, so prompts and the end of a run play no part
    formula    (1 + E[kept]) / (k c + v(k)), held against the measured speedup (spec_served.py); v(k) is measured in
               the same rounds, on scripted drafts
    equal      in fp32 each answer is compared, token by token, before anything is timed. In the timed dtype a batch of
               another size rounds otherwise: the share of equal answers is reported

Drafters run with k fixed, which the formula is about, and adaptive, as they are served. Where answers copy only n-grams
have a claim: other drafters are shown adaptive, with one request at a time.
Story    notebooks/11_speculative_decoding.ipynb, notebooks/12_medusa_and_self_speculation.ipynb
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median

import torch

from minserve.bench.common import TINY, Around, Options, clean_up, label, load
from minserve.bench.spec_cost import KS, Steps, step_bound
from minserve.bench.spec_served import Server, answers, by_position, cost_of, seated, speedup, tokens_of
from minserve.bench.spec_work import works
from minserve.bench.workload import Work
from minserve.drafters import NAMES, drafter_for
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row
from minserve.model import Model

PROMPTS, MOST, ROUNDS = 20, 36, 3  # of each kind; tokens of an answer
COUNTS = {1: 5, 4: 8, 16: 24}  # requests of a round, by seats
EXACT = 3, 24  # prompts of each kind, and tokens of an answer, that are compared in fp32
FAST, HARMLESS, TRAINED, AGREES = 1.8, 0.97, 1.2, 0.9


def run(options: Options) -> Report:
    report, name = options.report(), options.model or (next(iter(TINY)) if options.tiny else None)
    with Around(options) as around:
        model = load(name, options.dtype)
        names, missing = drafters(options, model)
        equal_in_fp32(report, options, name, model, names)
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


def equal_in_fp32(
    report: Report, options: Options, model_name: str | None, model: Model, names: list[str]
) -> None:
    """Raises RuntimeError at the first answer that a drafter changes."""
    exact = model if model.dtype == torch.float32 else load(model_name, torch.float32)
    for kind, work in works(model_name, exact, *EXACT).items():
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


# ---------------------------------------------------------------- one kind of work, so many at once
@dataclass(frozen=True)
class Side:
    drafter: str
    adaptive: bool
    k: int

    def __str__(self) -> str:
        return f"{self.drafter}, adaptive" if self.adaptive else f"{self.drafter}, k = {self.k}"


def sides_of(kind: str, seats: int, names: list[str]) -> list[tuple[str, bool]]:
    """(drafter, adaptive?) Where answers copy, all but the first are served as they would be, to one request."""
    every = product(names, (False, True))
    return [its for its in every if kind == "free" or its[0] == names[0] or (seats == 1 and its[1])]


def target_of(side: Side, kind: str, seats: int, measured: float, agrees: float) -> float | None:
    """Adaptive only. What was trained may lose, where the formula says so."""
    if not side.adaptive:
        return None
    if side.drafter == "ngram" and (kind, seats) == ("copy", 1):
        return FAST
    if side.drafter != "ngram" and (kind, seats) == ("free", 1):
        return TRAINED if measured >= TRAINED or agrees < AGREES else None
    return HARMLESS


class Timed:
    """Every side, and steps of every length, in turn: each round has its own requests, the same for all sides."""

    def __init__(self, options: Options, model: Model, kind: str, work: Work, seats: int, names: list[str]):
        self.case, self.kind, self.seats = f"{kind}, batch {seats}", kind, seats
        self.itemsize = model.dtype.itemsize
        self.context = int(mean(len(p) + n / 2 for p, n in zip(work.prompts, work.lengths)))
        count = 2 * seats if options.quick else COUNTS.get(seats, max(5, 2 * seats))
        serving = partial(Server, model, work, seats, count)
        self.plain, self.sides = serving(), {}
        for name, adaptive in sides_of(kind, seats, names):
            drafter = drafter_for(name, model, options.k)
            self.sides[Side(name, adaptive, drafter.k)] = serving(drafter, adaptive)
        self.steps = Steps(model, [work.prompts[i % len(work.prompts)] for i in range(seats)], len(KS))
        for _ in range(2):  # the first time warms up
            self.seconds: dict[int, list[float]] = defaultdict(list)
            self.time_steps()
        turns = {"": self.plain.round, "steps": self.time_steps} | {
            str(side): server.round for side, server in self.sides.items()
        }
        progress = options.progress(self.case)
        self.rates = in_turn(turns, warmup=0, repeats=ROUNDS, at_most=options.at_most, each=progress)

    def time_steps(self) -> None:
        for _ in range(max(1, 4 // self.seats)):
            self.steps.start(self.seats)
            for k in KS:
                self.seconds[k].append(self.steps.seconds(k))

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
        found = server.rate / self.plain.rate  # of all rounds together: they have other requests
        agrees = 1 - abs(formula / found - 1)
        note = f"predicted {formula:.2f}x: (1 + {made - 1:.2f}) / ({drafting:.3f} + {cost:.2f})"
        target = target_of(side, self.kind, self.seats, median(ratios), agrees)
        report.add(Row(f"{case} / without", "x", ratios, 1.0, target, note))
        share = f"{k:.1f} drafted, c = {drafting / k if k else 0:.3f}"
        report.add(Row(f"{case}: tokens of a step", "tokens", server.per_step, note=share))
        both = f"{formula:.2f}x predicted, {found:.2f}x measured over all rounds"
        report.add(Row(f"{case}: as predicted", "share", [agrees], 1.0, AGREES, both))
        if not side.adaptive and k and not server.llm.speculation.drafter.branches:
            shares = by_position(server.records)
            note = "position by position: " + ", ".join(f"{share:.2f}" for share in shares)
            report.add(Row(f"{case}: kept by position", "share", shares, note=note))

    def agreement(self, server: Server) -> str:
        same = [server.said[key] == right for key, right in self.plain.said.items() if key in server.said]
        return f"{mean(same):.0%} of the answers are those without a draft"


def draw(report: Report, path: Path) -> None:
    """Where drafts pay on this machine, from the steps that were timed between the free answers."""
    from minserve.lab import figures, spec_figures  # matplotlib: only for who draws

    v, _ = spec_figures.recorded(report, "free")
    ax = spec_figures.surface(figures.axes(6.4, 3.8), v)
    figures.save(ax, path, spec_figures.surface_finding(v), report.where)


def draw_positions(report: Report, path: Path) -> None:
    """How far drafts of a fixed length are kept, for one request and free text."""
    from minserve.lab import figures, spec_figures

    lines = spec_figures.recorded_positions(report, "free, batch 1")
    ax = spec_figures.positions(figures.axes(6.6, 3.4), lines)
    figures.save(ax, path, spec_figures.positions_finding(lines), report.where)


def markdown(report: Report) -> str:
    """The README's table: drafters down, works across; times the speed without, as many drafts as pay, and always k."""
    ratios = {row.case: row.median for row in report.rows if row.case.endswith(" / without")}
    works = list(dict.fromkeys(case.split(":")[0] for case in ratios))
    lines = [f"| drafter | {' | '.join(works)} |", f"| --- |{' ---: |' * len(works)}"]
    for name in dict.fromkeys(case.split(": ")[1].split(",")[0] for case in ratios):
        cells = []
        for work in works:
            its = {case: x for case, x in ratios.items() if case.startswith(f"{work}: {name}, ")}
            adaptive = next((f"{x:.2f}" for case, x in its.items() if ", adaptive" in case), "")
            fixed = next((f" ({x:.2f})" for case, x in its.items() if ", k = " in case), "")
            cells.append(adaptive + fixed)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
