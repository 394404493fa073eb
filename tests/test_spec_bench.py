"""bench spec, spec-cost count, compare and predict as they say: by hand, on tiny models. Wrong versions are found."""

import json
import time
from collections import Counter
from dataclasses import replace
from itertools import count
from statistics import median

import pytest
import torch
from wrong_versions import wrong_version

from minserve.__main__ import main
from minserve.bench import common, spec, spec_cost, spec_served, spec_work
from minserve.bench.workload import Work
from minserve.config import SHAPES
from minserve.lab.report import Report
from minserve.lab.roofline import Machine
from minserve.model import Model
from minserve.prefill_decode import generate
from minserve.request import Draft, SamplingParams
from minserve.speculation import Drafter
from minserve.step_log import Row, StepRecord

TINY = replace(
    SHAPES["smollm2-135m"], vocab_size=251, hidden_size=96, intermediate_size=76, num_layers=3, num_heads=6,
    num_kv_heads=2, head_dim=16, context=512, windows=(),
)  # fmt: skip
MODEL = Model.random(TINY)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def record(*rows, step=0, seconds=1.0) -> StepRecord:
    """rows: (tokens, drafted, kept)"""
    its = [Row(i, n, 10, True, drafted, kept) for i, (n, drafted, kept) in enumerate(rows)]
    return StepRecord(step, 0.0, {"model": seconds}, its, [], len(rows), 0, 0, 0)


# ---------------------------------------------------------------- the formula
def check_formula(m):
    assert m.speedup(1.5, 0.2, 1.05) == pytest.approx(2.5 / 1.25)
    steps = [record((1, 0, 0)), record((3, 2, 1))]
    table = {1: 10.0, 2: 12.0, 4: 20.0}
    assert m.cost_of(steps, table, [1, 2, 4]) == pytest.approx((1 + 2) / 2), "3 tokens fill a step of 4"
    assert m.cost_of(steps, table, []) == pytest.approx((1 + 1.6) / 2), (
        "nothing recorded: 3 lies between 2 and 4"
    )
    two = [record((2, 1, 0), (2, 1, 1))]
    assert m.cost_of(two, {2: 10.0, 4: 15.0}, [2, 4]) == pytest.approx(1.5), "of a plain step of two requests"


def check_counting(m):
    steps = [record((4, 3, 2), (1, 0, 0)), record((4, 3, 0), (3, 2, 2))]
    assert m.tokens_of(steps) == 3 + 1 + 1 + 3
    assert m.by_position(steps) == [pytest.approx(2 / 3), pytest.approx(2 / 3), 0.0]
    prompt = record((1, 0, 0), (30, 0, 0))
    chunk = StepRecord(1, 0.0, {}, [Row(0, 1, 10, True), Row(1, 1, 0, False)], [], 2, 0, 0, 0)
    assert m.full_steps([prompt, *steps, chunk, record((1, 0, 0))], 2) == steps
    with pytest.raises(RuntimeError, match="in no step did 3 requests"):
        m.full_steps(steps, 3)


class Slow(Drafter):
    """Says what the model will say, if `right`, after 90 looks at the clock."""

    name, k = "slow", 2

    def __init__(self, right: bool):
        self.right = right

    def propose(self, plan):
        for _ in range(90):
            time.perf_counter()
        return [Draft(self.sequel(r)[: r.granted]) if r.granted else None for r, _ in plan]

    def sequel(self, request) -> list[int]:
        if not self.right:
            return [(request.tokens[-1] + 100) % 251] * 2
        return list(generate(MODEL, request.tokens, SamplingParams(max_tokens=2, ignore_eos=True)))


WORK = Work([[3 + i, 5, 7 * i + 1, 9] for i in range(5)], [4, 7, 7, 7, 7])


def check_server(m):
    """On a clock that moves by a second with every look at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", count(1.0).__next__)
        serve_and_count(m)


def serve_and_count(m):
    server = m.Server(MODEL, WORK, 1, 2, Slow(True))
    assert server.round() > 0 and server.round() > 0
    assert [server.next().prompts for _ in range(2)] == [
        [WORK.prompts[4], WORK.prompts[0]],
        WORK.prompts[1:3],
    ]
    said = [server.said[1, 0], server.said[1, 1], server.said[2, 0], server.said[2, 1]]
    greedy = [
        list(generate(MODEL, p, SamplingParams(max_tokens=n, ignore_eos=True)))
        for p, n in zip(*vars(WORK).values())
    ]
    assert said == greedy[:4]
    # the first token is the prompt's; then 3 and 6 in steps of at most 3: one, and two
    assert server.per_step == [3.0, 3.0] and len(server.records) == 1 + 2 + 2 + 2
    assert server.spent == 91
    total = sum(its.total for its in server.records)
    assert server.rate == pytest.approx(m.tokens_of(server.records) / total)
    assert m.Server(MODEL, WORK, 1, 2, Slow(False)).round() > 0
    two = m.Server(MODEL, WORK, 2, 5)
    two.round()
    assert {len(its.rows) for its in two.records} == {2} and two.per_step == [1.0]
    assert two.llm.speculation is None


# ---------------------------------------------------------------- what verifying costs
MACHINE = Machine("imagined", 10e9, 1e12)


def check_cost(m):
    seen = []
    steps = m.Steps(MODEL, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], 20)
    compute = steps.llm.compute
    steps.llm.compute = lambda batch: (seen.append(len(batch.ids)), compute(batch))[1]
    for batch in (1, 3, 2):
        steps.start(batch)
        for k in (0, 4, 15, 1):
            seen.clear()
            assert steps.seconds(k) > 0 and seen == [batch * (k + 1)]
    rows = [row for its in steps.llm.log for row in its.rows if row.drafted]
    assert sum(row.kept for row in rows) < 0.1 * sum(row.drafted for row in rows), "hardly one is kept"
    steps.llm.close()
    with pytest.raises(RuntimeError, match="drafts of 4"):
        steps.seconds(4)


def check_roofline(m):
    at = lambda machine, B, k: m.step_bound(TINY, machine, B, k, 100, 2)
    slow, fast = replace(MACHINE, flops=1e6), replace(MACHINE, flops=1e18)
    assert at(fast, 2, 15) == at(fast, 2, 0) and at(fast, 2, 0) > at(fast, 1, 0), (
        "waits for memory: drafts are free"
    )
    assert at(slow, 2, 3) == pytest.approx(4 * at(slow, 2, 0)) == pytest.approx(8 * at(slow, 1, 0))
    assert m.growth(TINY, slow, 2, 3, 100, 2) == pytest.approx(4) and m.growth(TINY, fast, 2, 3, 100, 2) == 1
    assert m.tokens_of(4, 0.7) == pytest.approx(1 + 0.7 + 0.49 + 0.343 + 0.2401)
    assert m.break_even(lambda B: max(1, B / 10), 4, 0.7) == 28, "the first with v >= 2.7731"
    assert m.break_even(lambda B: 1.0, most=50) == 50
    points = [(1, 1.0), (4, 2.0), (16, 4.0)]
    assert m.crossing(points, 1.5) == pytest.approx(2) and m.crossing(points, 3) == pytest.approx(8)
    assert m.crossing(points, 5) is None and m.crossing(points, 0.5) == 1


def check_cost_report(m):
    options = common.Options("spec-cost", "command", "tiny", torch.float32, True)
    given = {(B, k): [1.0 + B * k / 8] * 3 for B in (1, 2, 4) for k in (0, 4)}  # v = 2.77 at 3.55
    given |= {(1, 7): [1.25, 1.0, 1.25]}
    report = m.report_of(options, given, "here", TINY, MACHINE, "", 100, 2)
    by = {row.case.removeprefix("here: "): row for row in report.rows}
    assert by["4 x 5 tokens"].samples == [3.0] * 3 and by["4 x 5 tokens"].bound == m.step_bound(
        TINY, MACHINE, 4, 4, 100, 2
    )
    assert by["T(1) / T(5)"].median == pytest.approx(1 / 1.5) and by["T(1) / T(5)"].note == "v(4) = 1.50"
    assert by["T(1) / T(8)"].samples == [0.8, 1.0, 0.8] and by["T(1) / T(8)"].target is None
    name = "break-even batch of 4 drafts, 70% right"
    assert by[name].median == pytest.approx(2 * 2 ** ((2.7731 - 2) / 1), rel=1e-6)
    predicted = m.break_even(lambda B: m.growth(TINY, MACHINE, B, 4, 100, 2))
    agrees = by[f"{name}: measured as predicted"]
    assert agrees.median == pytest.approx(1 - abs(by[name].median / predicted - 1)) and agrees.target is None
    judged = m.report_of(replace(options, tiny=True), given, "here", TINY, MACHINE, "", 100, 2)
    targets = {row.case: row.target for row in judged.rows if row.target and "T(1)" in row.case}
    assert targets == {
        "here: T(1) / T(5)": pytest.approx(1 / 1.05),
        "here: T(1) / T(8)": pytest.approx(1 / 1.1),
    }
    assert judged.row(f"here: {name}: measured as predicted").target == 0.75
    flat = m.report_of(options, {key: [1.0] for key in given}, "here", TINY, MACHINE, "", 100, 2)
    assert "not below this one" in flat.row(f"here: {name}").note and flat.row(f"here: {name}").median == 4


# ---------------------------------------------------------------- prompts
def check_prompts(m):
    prompts, texts = m.copy_prompts(20), m.passages()
    assert prompts == m.copy_prompts(20) and prompts[:5] == m.copy_prompts(5), "the same in every run"
    assert len(set(prompts)) == 20 and len(texts) >= 20
    assert all(m.PASSAGE[0] <= len(text) <= m.PASSAGE[1] and text[-1] == "." for text in texts)
    for i in range(0, 20, 5):
        repeat, correct, goes_on, table, data = prompts[i : i + 5]
        assert repeat.endswith(texts[i]) and goes_on.endswith(texts[i + 2])
        wrong = correct.split("\n\n", 1)[1]
        assert wrong != texts[i + 1] and Counter(wrong) == Counter(texts[i + 1])
        assert 6 <= sum(a != b for a, b in zip(wrong, texts[i + 1])) <= 2 * m.SLIPS
        rows = [line.split(" | ") for line in table.split("\n\n")[1].splitlines()[2:]]
        its = json.loads(data.split("\n\n")[1])
        assert {code.strip("| "): phrase.strip("| ") for code, phrase in rows} == its and len(its) == 8
    assert len(set(m.QUESTIONS)) == len(m.QUESTIONS) >= 20


def check_works(m):
    its = m.works("tiny", MODEL, 4, 8)
    assert list(its) == ["copy", "free"] and its["copy"].lengths == its["free"].lengths == [8] * 4
    assert its["copy"].prompts != its["free"].prompts
    assert [m.spoken(name) for name in ("tiny", "tiny-llama-3.1-8b", None, "/a/folder")] == [
        False,
        False,
        True,
        True,
    ]


# ---------------------------------------------------------------- what is judged, and how
def check_targets(m):
    fixed, ngram, medusa = m.Side("ngram", False, 8), m.Side("ngram", True, 8), m.Side("medusa", True, 8)
    target = lambda *its: m.target_of(*its)
    assert target(fixed, "copy", 1, 9, 0) is None
    assert target(ngram, "copy", 1, 1.0, 1.0) == 1.8
    assert {
        target(ngram, kind, B, 1, 1) for kind, B in [("copy", 4), ("copy", 16), ("free", 1), ("free", 16)]
    } == {0.97}
    assert target(medusa, "free", 1, 1.3, 0.5) == 1.2, "reached"
    assert target(medusa, "free", 1, 0.9, 0.95) is None, "a loss, as predicted"
    assert target(medusa, "free", 1, 0.9, 0.85) == 1.2, "a loss that nobody predicted"
    assert target(medusa, "free", 16, 0.9, 0.95) == target(medusa, "copy", 1, 0.9, 0.95) == 0.97
    assert (str(fixed), str(ngram)) == ("ngram, k = 8", "ngram, adaptive")
    names = ["ngram", "exit"]
    every = [(name, adaptive) for name in names for adaptive in (False, True)]
    assert m.sides_of("free", 16, names) == m.sides_of("free", 1, names) == every
    assert (
        m.sides_of("copy", 1, names) == [*every[:2], ("exit", True)]
        and m.sides_of("copy", 4, names) == every[:2]
    )


def check_equality(m):
    m.differ("x", "free", [[1, 2], [3, 4]], [[1, 2], [3, 4]])
    with pytest.raises(
        RuntimeError, match=r"x changes token 2 of answer 1 \(free\): 5 where the model says 4"
    ):
        m.differ("x", "free", [[1, 2], [3, 4]], [[1, 2], [3, 5]])


def check_rows(m):
    """A case with made-up times: every row follows from them."""
    slow = replace(MACHINE, flops=1e9)  # so slow that drafts are what a bound is made of
    case = m.Timed.__new__(m.Timed)
    case.case, case.kind, case.seats, case.context, case.itemsize = "free, batch 2", "free", 2, 50, 2
    case.seconds = {0: [1.0, 1.0, 9.0], 3: [1.5] * 3}  # v(3) = 1.5
    case.plain, server = (spec_served.Server.__new__(spec_served.Server) for _ in range(2))
    case.plain.records, case.plain.said = (
        [record((1, 0, 0), (1, 0, 0), seconds=1.0)],
        {(1, 0): [1, 2], (1, 1): [3]},
    )
    server.records = [
        record((4, 3, 3), (4, 3, 0), step=5, seconds=1.6),
        record((4, 3, 1), (4, 3, 2), step=6, seconds=2.0),
    ]
    server.said, server.per_step, server.drafting = (
        {(1, 0): [1, 2], (1, 1): [4]},
        [2.5, 2.5, 2.5],
        {5: 0.1, 6: 0.3},
    )
    speculation = type("S", (), {"drafter": Drafter()})
    server.llm = type("L", (), {"compute": type("C", (), {"rows": [2, 8]}), "speculation": speculation})
    case.sides = {m.Side("exit", False, 3): server, m.Side("exit", True, 3): server}
    case.rates = {"": [2.0, 2.0, 2.0], "exit, k = 3": [2.7, 3.0, 3.0], "exit, adaptive": [2.7, 3.0, 3.0]}
    case.add_rows(report := Report("spec", "", "", {}, "", ""), slow, MODEL)
    by = {row.case.removeprefix("free, batch 2: "): row for row in report.rows}
    assert by["step of 2 x 4"].median == 1.5 and by["step of 2 x 4"].note == "v(3) = 1.50"
    assert by["step of 2 x 4"].bound == spec_cost.step_bound(TINY, slow, 2, 3, 50, 2)
    assert by["without"].bound == pytest.approx(2 / spec_cost.step_bound(TINY, slow, 2, 0, 50, 2))
    side = by["exit, k = 3"]
    assert side.bound == pytest.approx(5 / spec_cost.step_bound(TINY, slow, 2, 3, 50, 2))
    assert side.note == "50% of the answers are those without a draft"
    ratio = by["exit, k = 3 / without"]
    assert ratio.samples == [1.35, 1.5, 1.5] and ratio.bound == 1 and ratio.target is None
    assert ratio.note == "predicted 1.47x: (1 + 1.50) / (0.200 + 1.50)"
    assert by["exit, k = 3: tokens of a step"].note == "3.0 drafted, c = 0.067"
    agrees = by["exit, k = 3: as predicted"]
    assert agrees.note == "1.47x predicted, 1.39x measured over all rounds"
    assert agrees.target == 0.9 and agrees.median == pytest.approx(
        1 - abs((2.5 / 1.7) / ((10 / 3.6) / 2) - 1)
    )
    assert by["exit, k = 3: kept by position"].samples == [0.75, 0.5, 0.25]
    assert by["exit, adaptive / without"].target == 0.97 and "exit, adaptive: kept by position" not in by


CHECKS = {
    spec_served: [check_formula, check_counting, check_server],
    spec_cost: [check_cost, check_roofline, check_cost_report],
    spec_work: [check_prompts, check_works],
    spec: [check_targets, check_equality, check_rows],
}


@pytest.mark.parametrize("module, check", [(m, check) for m, its in CHECKS.items() for check in its])
def test_by_hand(module, check):
    check(module)


# ---------------------------------------------------------------- the commands
@pytest.mark.slow
def test_the_command_compares_and_reports(tmp_path):
    path = tmp_path / "r.json"
    words = [
        "--model",
        "tiny",
        "--dtype",
        "float32",
        "--quick",
        "--drafter",
        "ngram",
        "--k",
        "3",
        "--batch",
        "1",
        "3",
    ]
    assert main(["bench", "spec", *words, "--json", str(path)]) == 0
    report = Report.load(path)
    assert report.command.endswith(
        "spec --model tiny --dtype float32 --quick --drafter ngram --k 3 --batch 1 3"
    )
    cases = [row.case for row in report.rows]
    assert cases[:2] == [f"{kind}, ngram: answers equal in fp32" for kind in ("copy", "free")]
    for kind in ("copy", "free"):
        for B in (1, 3):
            where = f"{kind}, batch {B}"
            steps = [row for row in report.rows if row.case.startswith(f"{where}: step of {B} x ")]
            assert len(steps) == len(spec_cost.KS)
            without, its = report.row(f"{where}: without"), report.row(f"{where}: ngram, k = 3")
            ratio = report.row(f"{where}: ngram, k = 3 / without")
            assert ratio.samples == pytest.approx(
                [a / b for a, b in zip(its.samples, without.samples)], rel=1e-4
            )
            assert its.note.startswith("100% of the answers")
            made = median(report.row(f"{where}: ngram, k = 3: tokens of a step").samples)
            assert 1 <= made <= 4
            assert report.row(f"{where}: ngram, adaptive / without").target == (
                1.8 if where == "copy, batch 1" else 0.97
            )
    spec.draw(report, tmp_path / "pays.png")
    assert (tmp_path / "pays.png").stat().st_size > 2000


def test_a_drafter_that_is_not_there_is_named():
    options = common.Options("spec", "command", "tiny", torch.float32, True)
    able, missing = spec.drafters(options, MODEL)
    assert able[0] == "ngram" and len(able) + len(missing) == len(spec.NAMES) and all(map(str, missing))
    with pytest.raises(SystemExit, match="bench: .*medusa"):
        spec.drafters(replace(options, drafters=("ngram", "medusa")), MODEL)
    with pytest.raises(SystemExit, match="k is 99"):
        spec.drafters(replace(options, drafters=("ngram",), k=99), MODEL)


def test_a_drafter_that_changes_an_answer_is_not_timed(monkeypatch):
    right = spec.answers
    monkeypatch.setattr(spec, "answers", lambda llm, work: [
        [*its[:-1], (its[-1] + bool(llm.speculation)) % 251] for its in right(llm, work)
    ])  # fmt: skip
    options = common.Options("spec", "command", "tiny", torch.float32, True)
    with pytest.raises(RuntimeError, match="ngram changes token 24 of answer 0"):
        spec.equal_in_fp32(Report("spec", "", "", {}, "", ""), options, "tiny", MODEL, ["ngram"])


# ---------------------------------------------------------------- wrong versions that must be found
WRONG = {
    spec_served: {
        "no token on top": ("return (1 + kept) /", "return kept /"),
        "drafting is free": ("/ (drafting + cost)", "/ cost"),
        "steps are not filled up": ("s >= record.num_tokens), record", "s > 999), record"),
        "seconds, not v": (".mean() / table[known[0]])", ".mean())"),
        "v of a step of one token": ("/ table[known[0]]", "/ table.get(1, 1.0)"),
        "what was not drafted was rejected": ("sum(row.drafted > i for row in rows) for i", "len(rows) for i"),
        "one place too far": ("sum(row.kept > i", "sum(row.kept >= i"),
        "prompts count": ("r.sampled and r.num_tokens == 1 + r.drafted", "r.sampled"),
        "chunks count": ("r.sampled and r.num_tokens", "r.num_tokens"),
        "the end of a run counts": ("if len(record.rows) == seats and", "if"),
        "nothing is a measurement": ("    if not found:\n", "    if False:\n"),
        "drafted tokens are tokens": ("sum(1 + row.kept for", "sum(1 + row.drafted for"),
        "only drafts are tokens": ("sum(1 + row.kept for", "sum(row.kept for"),
        "the same requests in every round": ("        self.turn += 1\n", ""),
        "rounds that overlap": ("self.turn * self.count", "self.turn"),
        "all lengths the first one's": ("self.work.lengths[i] for i", "self.work.lengths[0] for i"),
        "drafting is not clocked": ("+= time.perf_counter() - start", "+= 0"),
        "the last round's rate": ("sum(record.total for record in self.records)", "self.records[-1].total"),
        "tokens of the whole batch": ("/ (self.seats * len(found))", "/ len(found)"),
        "an engine of any size": ("max_running=seats, drafter", "max_running=64, drafter"),
        "nobody drafts": ("max_running=seats, drafter=drafter", "max_running=seats, drafter=None"),
    },
    spec_cost: {
        "one draft too few": ("min(r.granted, self.now)", "min(r.granted, max(0, self.now - 1))"),
        "what was asked is not checked": ("if {row.drafted for row in record.rows} != {k} or", "if False and"),
        "everybody starts": ("in self.prompts[:batch]]", "in self.prompts]"),
        "last round's drafts": ("        self.script.now = k\n", ""),
        "requests pile up": ("        self.llm.close()\n        outputs", "        outputs"),
        "drafts are read again": ("machine.seconds(decode_bytes", "machine.seconds((1 + k) * decode_bytes"),
        "drafts compute nothing": ("flops = (1 + k) * decode_flops", "flops = decode_flops"),
        "v upside down, by the roofline": ("return many / one", "return one / many"),
        "many against nothing": ("for n in (k, 0))", "for n in (k, k))"),
        "no token on top": ("for i in range(k + 1))", "for i in range(1, k + 1))"),
        "the last batch that gains": ("if v(B) >= tokens_of(k, right)", "if v(B + 1) >= tokens_of(k, right)"),
        "a line over the batch": ("exp(log(B) + (level - v) / (w - v) * log(C / B))", "B + (level - v) / (w - v) * C"),
        "the smallest where none is": ("return points[0][0] if points[0][1] >= level else None", "return points[0][0]"),
        "seconds turned over": ("[one / its for one, its in", "[its / one for one, its in"),
        "v upside down": ("{1 / median(shares):.2f}", "{median(shares):.2f}"),
        "a CPU is judged": ("target if options.gpu_cases else None", "target"),
        "nobody is judged": ("target if options.gpu_cases else None", "None"),
        "v of plain steps": ("(B, many / one) for", "(B, one / one) for"),
        "off by half agrees": ("1 - abs(its / predicted - 1)", "1 - abs(its / predicted - 1) / 2"),
    },
    spec_work: {
        "one passage for all": ("texts[i % len(texts)]", "texts[0]"),
        "letters lost": ("= letters[i + 1], letters[i]", "= letters[i], letters[i]"),
        "no slips": ("{slips(text, rng)}", "{text}"),
        "other slips each time": ("random.Random(0)", "random.Random()"),
        "one kind": ("][i % 5]", "][0]"),
        "one table": ("5 * (i // 5)", "0 * (i // 5)"),
        "passages of any length": ("if PASSAGE[0] <= len(p) <= PASSAGE[1] and", "if"),
        "both works the same": ("seed=i) for i, kind", "seed=0) for i, kind"),
        "random weights speak": ("name not in SHAPES and", ""),
    },
    spec: {
        "the fixed side is judged": ("    if not side.adaptive:\n", "    if False:\n"),
        "copying need not be fast": ("return FAST", "return HARMLESS"),
        "copying in a batch must be": ('(kind, seats) == ("copy", 1)', 'kind == "copy"'),
        "a loss is always forgiven": ("measured >= TRAINED or agrees < AGREES else", "measured >= TRAINED else"),
        "a loss is never forgiven": ("TRAINED if measured >= TRAINED or agrees < AGREES else None", "TRAINED"),
        "everybody copies": ('kind == "free" or its[0]', "True or its[0]"),
        "fixed ones copy": ("(seats == 1 and its[1])", "seats == 1"),
        "only the first token is compared": ("if token != other:", "if token != other and at == 1:"),
        "v of the slowest": ("{median(samples) / median(self.seconds[0])", "{median(samples) / max(self.seconds[0])"),
        "bounds without drafts": ("self.seats * made / at(k)", "self.seats * made / at(0)"),
        "bounds of one request": ("self.seats * made / at(k)", "made / at(k)"),
        "the drafts' share of a step of one": ("spent / table[self.seats]", "spent / max(table.values())"),
        "agreement with the last round": ("server.rate / self.plain.rate  #", "ratios[-1]  #"),
        "twice as wrong agrees": ("agrees = 1 - abs(", "agrees = 1 - 0.5 * abs("),
        "the token on top was drafted": ("speedup(made - 1, drafting, cost)", "speedup(made, drafting, cost)"),
        "ratios upside down": ("[a / b for a, b in zip(rates", "[b / a for a, b in zip(rates"),
        "all answers are equal": ("server.said[key] == right for", "True for"),
    },
}  # fmt: skip


@pytest.mark.parametrize("module, wrong", [(m, wrong) for m, its in WRONG.items() for wrong in its])
def test_a_wrong_version_is_found(module, wrong):
    broken = wrong_version(module, *WRONG[module][wrong])
    with pytest.raises(
        (
            AssertionError,
            KeyError,
            RuntimeError,
            StopIteration,
            IndexError,
            ZeroDivisionError,
            pytest.fail.Exception,
        )
    ):
        for check in CHECKS[module]:
            check(broken)
