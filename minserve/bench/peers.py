"""The same work in minserve, transformers, vLLM and llama.cpp: same machine, threads, dtype; in alternating order.

    python -m minserve bench peers [--vllm-python PYTHON] [--llama-cpp FOLDER --llama-model FILE.gguf]

    one sequence        a prompt of 32, 128 new      decoded tokens/s; the first token belongs to prefill
    prefill 512         a prompt of 512, 1 new       prompt tokens/s until that token is there
    mixed 32            prompts 16-256, 16-128 new   output tokens/s of the whole
    decode-heavy 8, 32  prompts of 32, 128 new       output tokens/s of the whole

    transformers              `generate`: one padded batch, every row as long as the longest answer
    transformers, continuous  its own paged batching with per-request lengths: where lengths differ
    vLLM                      in the interpreter it is installed in: bench/peers_vllm.py
    llama.cpp                 its own benchmarks: bench/peers_llamacpp.py; where lengths are equal

Fair     Every side serves in its default configuration, loaded and warmed up before the clock starts. Prompts are
         random ids, new ones every round, so nobody's prefix cache helps; greedy, no end token. Every answer must
         have its full length; tokens that differ from ours (in 16 bits, near-equal logits may change places) are
         counted in the row's note. A side whose turn takes long sits out every second round.
Story    README.md, Against others
"""

import math
import random
import shutil
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from minserve.bench.common import Options, chosen, label, load, on_gpu
from minserve.bench.opponent import twin
from minserve.bench.peers_here import Answers, PeerFailed, Served, batch, check, continuous, ours
from minserve.bench.peers_llamacpp import REMARK, LlamaCpp, missing
from minserve.bench.peers_vllm import Vllm
from minserve.bench.workload import Work, ragged, uniform
from minserve.config import ModelConfig
from minserve.engine import LLM
from minserve.lab.report import Report, Row

OURS, STATIC, CONTINUOUS = "minserve", "transformers", "transformers, continuous"
ROUNDS, SECONDS, SLOW = 5, 490, 8  # at most; all rounds together; a turn so long sits out every second round
NAMES = {  # in the table and in the figure: {} is its version
    OURS: "minserve",
    STATIC: "transformers {}, generate",
    CONTINUOUS: "transformers {}, continuous batching",
    "vLLM": "vLLM {}",
    "llama.cpp": "llama.cpp {}",
}


@dataclass(frozen=True)
class Case:
    name: str
    counts: str
    requests: int
    prompt: tuple[int, int]
    new: tuple[int, int]
    targets: dict[str, float] = field(default_factory=dict)  # times that side, for SmolLM2 on a CPU

    def work(self, config: ModelConfig, i: int) -> Work:
        """Of round i, -1 for the warm-up. Never the same prompts, or a prefix cache would know them."""
        seed = random.Random(self.name).randrange(1, 10**9) + i  # two cases of one length have other ids, too
        return ragged(config.vocab_size, self.requests, self.prompt, uniform(*self.new), seed=seed)

    def takes(self, who: str) -> bool:
        """llama.cpp's benchmarks know equal lengths only; continuous batching is for unequal ones."""
        unequal = self.prompt[0] != self.prompt[1]
        return {CONTINUOUS: unequal, LlamaCpp.name: not unequal}.get(who, True)

    def rate(self, work: Work, served: Served) -> float:
        if self.counts == "decode":
            return (work.new_tokens - 1) / (served.seconds - served.first)
        if self.counts == "prompt":
            return len(work.prompts[0]) / served.first
        return work.new_tokens / served.seconds


def cases(quick: bool) -> list[Case]:
    """Those of the docstring; for a quick look, each of an eighth of the size."""
    short, long, new, one, few, many = (
        n // 8 if quick else n for n in (32, 512, 128, 16, 16 if quick else 8, 32)
    )
    even, versus = ((short, short), (new, new)), {Vllm.name: 1.0}
    return [
        Case("one sequence", "decode", 1, *even, {Vllm.name: 1.4, STATIC: 3.5}),
        Case(f"prefill {long}", "prompt", 1, (long, long), (1, 1), {LlamaCpp.name: 1.2}),
        Case(f"mixed {many}", "output", many, (one, long // 2), (one, new), versus | {STATIC: 2.7}),
        Case(f"decode-heavy {few}", "output", few, *even, versus),
        Case(f"decode-heavy {many}", "output", many, *even, versus),
    ]


@dataclass
class Tally:
    """What one side did in one case."""

    rates: dict[int, float] = field(default_factory=dict)  # by round
    answers: dict[int, Answers | None] = field(default_factory=dict)
    turn: float = 0.0  # seconds of its longest

    def note(self, mine: "Tally") -> str:
        pairs = [(a, b) for i, its in self.answers.items() for a, b in zip(its or [], mine.answers[i])]
        same = f"{sum(a == b for a, b in pairs)} of {len(pairs)} answers are ours, token for token"
        notes = [] if self is mine else [same if pairs else REMARK]
        notes += ["sat out every second round"] if len(self.rates) < len(mine.rates) else []
        return "; ".join(notes)


# ---------------------------------------------------------------- the benchmark
def refusal(args) -> str | None:
    """What is wrong with what was given of the others, said before any work is done."""
    if args.vllm_python and not shutil.which(args.vllm_python):
        return (
            f"--vllm-python {args.vllm_python}: no such program; give the Python of an environment with vLLM"
        )
    return missing(args.llama_cpp, args.llama_model)


def run(options: Options) -> Report:
    report, todo = options.report(), cases(options.quick)
    model = load(chosen(options)[0], options.dtype)
    with ExitStack() as stack:
        try:
            sides = here(model)
            for peer in others(options, model.config, todo, stack):
                sides[peer.name] = peer.serve
                report.versions |= peer.versions
            tallies = play(todo, sides, model.config, options)
        except PeerFailed as error:
            raise SystemExit(f"bench: {error}") from None
    claims = not on_gpu() and label(options.model).startswith("SmolLM2")
    for case in todo:
        name = f"{label(options.model)} {options.dtype_name}, {case.name}"
        add_rows(report, name, tallies[case.name], case.targets if claims else {})
    print(markdown(report) + "\n")
    return report


def here(model) -> dict:
    llm, other = LLM(model), twin(model)
    return {
        OURS: lambda work: ours(llm, work),
        STATIC: lambda work: batch(other, work),
        CONTINUOUS: lambda work: continuous(other, work),
    }


def others(options: Options, config: ModelConfig, todo: list[Case], stack: ExitStack):
    if options.vllm_python:
        vllm = Vllm(options, room=max(case.prompt[1] + case.new[1] for case in todo) + 1)
        stack.callback(vllm.close)
        yield vllm
    if options.llama_cpp:
        yield LlamaCpp(options, config.num_params)


def play(todo: list[Case], sides: dict, config: ModelConfig, options: Options) -> dict[str, dict[str, Tally]]:
    """Every side in every case, round after round: {case: {side: Tally}}."""
    rounds, slow = (3, math.inf) if options.quick else (ROUNDS, SLOW)
    for case in todo:  # compilation, cold caches: not the subject
        small = case.work(config, -1).first(case.requests, 4)
        for who in sides.keys() - {LlamaCpp.name}:  # a new process every time, it warms itself up
            if case.takes(who):
                check(who, sides[who](small), small)
    tallies = {case.name: defaultdict(Tally) for case in todo}
    took, each, most = [], options.progress("round"), min(SECONDS, options.left)
    for i in range(rounds):
        if (
            i >= 3 and sum(took) + took[i - 2] > most
        ):  # like the one before the last: the same sides take part
            break
        began = time.monotonic()
        for case in todo:
            turns(i, case, sides, case.work(config, i), tallies[case.name], slow)
        took.append(time.monotonic() - began)
        each(i + 1, rounds)
    return tallies


def turns(i: int, case: Case, sides: dict, work: Work, tallies: dict[str, Tally], slow: float) -> None:
    """Round i of one case: the same work for each, in the other order than last time."""
    order = [who for who in sides if case.takes(who)][:: 1 if i % 2 == 0 else -1]
    for who in order:
        tally = tallies[who]
        if i % 2 and tally.turn > slow and who != OURS:
            continue
        start = time.monotonic()
        served = sides[who](work)
        check(who, served, work)
        tally.turn = max(tally.turn, time.monotonic() - start)
        tally.rates[i], tally.answers[i] = case.rate(work, served), served.tokens


def add_rows(report: Report, case: str, tallies: dict[str, Tally], targets: dict[str, float]) -> None:
    mine = tallies[OURS]
    for who, tally in tallies.items():
        report.add(Row(f"{case}: {who}", "tok/s", list(tally.rates.values()), note=tally.note(mine)))
    for who, tally in tallies.items():
        if who != OURS:
            ratios = [mine.rates[i] / rate for i, rate in tally.rates.items()]
            report.add(Row(f"{case}: {OURS} / {who}", "x", ratios, 1.0, targets.get(who)))


# ---------------------------------------------------------------- what is shown of it
def rates(report: Report) -> dict[str, dict[str, float]]:
    """{case: {side: tok/s}}, both in the order of the report."""
    found: dict[str, dict[str, float]] = {}
    for row in report.rows:
        if row.unit == "tok/s":
            case, who = row.case.split(", ", 1)[1].rsplit(": ", 1)
            found.setdefault(case, {})[who] = row.median
    return found


def full_name(who: str, report: Report) -> str:
    package = who.split(",")[0]
    return NAMES.get(who, who).format(report.versions.get(package.lower(), "?"))


def markdown(report: Report) -> str:
    """Engines down, cases across, tokens per second: the README's table."""
    table = rates(report)
    found = {who for case in table.values() for who in case}
    engines = [who for who in NAMES if who in found] + sorted(found - NAMES.keys())
    rows = [["tok/s", *table], ["---", *["---:"] * len(table)]]
    for who in engines:
        rows.append(
            [full_name(who, report), *(f"{case[who]:,.0f}" if who in case else "" for case in table.values())]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(report: Report, path: Path) -> None:
    from minserve.lab import figures  # matplotlib: only drawing needs it

    table = rates(report)
    ahead = sum(case[OURS] >= max(case.values()) for case in table.values())
    groups = [
        (case, [(full_name(who, report), rate) for who, rate in its.items()]) for case, its in table.items()
    ]
    ax = figures.peers(figures.axes(6.4, 0.6 + 0.24 * sum(len(bars) + 1.5 for _, bars in groups)), groups)
    model = report.rows[0].case.split(", ")[0]
    title = f"{OURS} is the fastest in {ahead} of {len(table)} kinds of work"
    figures.save(ax, path, title, f"{model} on {report.where}")
