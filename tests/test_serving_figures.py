"""bench knob serves and counts as it says; serving's figures show what they are given. Wrong versions are found."""

from dataclasses import replace
from itertools import product

import matplotlib.pyplot as plt
import pytest
import torch
from wrong_versions import wrong_version

from minserve.__main__ import main
from minserve.arrivals import Arrival
from minserve.bench import knob
from minserve.bench.offline import roofline_seconds
from minserve.bench.spec_cost import step_bound
from minserve.config import SHAPES
from minserve.lab import figures, layout, serving_figures
from minserve.lab.report import Report, Row
from minserve.lab.roofline import Machine
from minserve.metrics import Timeline
from minserve.model import Model

plt.switch_backend("Agg")
TINY = replace(
    SHAPES["smollm2-135m"], vocab_size=251, hidden_size=96, intermediate_size=76, num_layers=3, num_heads=6,
    num_kv_heads=2, head_dim=16, context=512, windows=(),
)  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    plt.close("all")


# ---------------------------------------------------------------- the knob
def check_server(m):
    server = m.Server(Model.random(TINY), 3)
    work = [Arrival(0.0, m.PROMPT, m.ANSWER)] * 5
    rates = [server.closed(work) for _ in range(2)]
    server.open([Arrival(0.0, m.PROMPT, m.ANSWER), Arrival(0.02, m.PROMPT, m.ANSWER)])
    assert sum(row.sampled for record in server.log for row in record.rows) == server.tokens == 5 * m.ANSWER
    assert max(len(record.rows) for record in server.log) == 3, "so many at once"
    assert server.log[0].rows[0].num_tokens == m.PROMPT
    assert rates[1] <= server.tokens / sum(record.total for record in server.log)
    assert {name: len(its) for name, its in server.waits.items()} == {
        f"{load}: {what} {p}": 2 if load == "closed" else 1
        for load, what, p in product(("closed", "open"), ("TTFT", "TPOT"), ("p50", "p99"))
    }
    assert server.waits["closed: TTFT p50"][0] < server.waits["closed: TTFT p99"][0]
    report, machine = Report("knob", ""), Machine("faster than any of these", 1e12, 1e13)
    server.add_rows(report, rates, 12.3456, machine)
    row = report.row("batch 3, closed: output")
    least = roofline_seconds(TINY, machine, server.log, 4)
    assert row.samples == rates and row.bound == pytest.approx(server.tokens / least) and row.ratio < 1
    token = report.row("batch 3, closed: TPOT p50")
    assert token.bound == step_bound(TINY, machine, 3, 0, m.PROMPT + m.ANSWER // 2, 4)
    assert token.samples == server.waits["closed: TPOT p50"]
    assert report.row("batch 3, open: TTFT p99").note == "at 12.3 requests/s"
    assert [row.case for row in report.rows if row.bound] == [row.case, token.case]


def check_waits(m):
    server = m.Server.__new__(m.Server)
    server.waits = m.defaultdict(list)
    its = [Timeline(1.0, tokens=[2.0, 4.0, 6.0], first=2.0), Timeline(1.0, tokens=[4.0, 5.0, 6.0], first=4.0)]
    server.note("closed", its)
    assert server.waits == {
        "closed: TTFT p50": [2.0], "closed: TTFT p99": [pytest.approx(2.98)],
        "closed: TPOT p50": [1.5], "closed: TPOT p99": [pytest.approx(1.99)],
    }  # fmt: skip


KNOB = """| batch | tokens/s | TTFT | TPOT | TTFT, open | TPOT, open |
| ---: | ---: | ---: | ---: | ---: | ---: |
| 1 | 60 | 4,000 | 15 | 2,000 | 15 |
| 4 | 200 | 1,000 | 20 | 60 | 18 |
| 64 | 1,000 | 100 | 50 | 80 | 30 |"""
MEASURED = {
    1: (0.015, 60, 4.0, 2.0, 0.015),
    4: (0.020, 200, 1.0, 0.06, 0.018),
    64: (0.050, 1000, 0.1, 0.08, 0.030),
}


def recorded() -> Report:
    report = Report("knob", "")
    for batch, (token, rate, closed, waits, its) in MEASURED.items():
        rows = [
            Row("closed: output", "tok/s", [rate, rate, 9 * rate], 2.0 * rate),
            Row("closed: TTFT p50", "s", [closed]), Row("closed: TTFT p99", "s", [9.0]),
            Row("closed: TPOT p50", "s", [token], token / 2), Row("closed: TPOT p99", "s", [9.0]),
            Row("open: TTFT p50", "s", [waits], note="at 40 requests/s"), Row("open: TPOT p50", "s", [its]),
        ]  # fmt: skip
        for row in rows:
            report.add(replace(row, case=f"batch {batch}, {row.case}"))
    return report


def check_table(m):
    assert m.markdown(recorded()) == KNOB


# ---------------------------------------------------------------- the knob, drawn
def lines_of(ax) -> list[list[tuple[float, float]]]:
    return [list(zip(*map(list, line.get_data()))) for line in ax.lines]


def apart(ax) -> None:
    boxes = layout.text_boxes(ax)
    for i, (text, box) in enumerate(boxes):
        assert not [other for other, its in boxes[i + 1 :] if box.overlaps(its)], text


def check_knob(m):
    points, bound = m.recorded_knob(recorded())
    assert points == {batch: its[:2] for batch, its in MEASURED.items()}
    assert bound == {batch: (its[0] / 2, 2.0 * its[1]) for batch, its in MEASURED.items()}
    ax = m.knob(figures.axes(), points, bound)
    assert lines_of(ax) == [list(bound.values()), list(points.values())]
    assert {note.get_text(): note.xy for note in ax.texts} == {str(b): at for b, at in points.items()}
    assert ax.get_xlim()[0] < 0.0075 and ax.get_ylim()[1] > 2000
    apart(ax)
    assert lines_of(m.knob(figures.axes(), points)) == [list(points.values())]
    assert m.knob_finding(points) == "64 at once instead of 1: 16.7x the tokens, each 3.3x as slow"


def check_queue(m):
    lines = m.recorded_waits(recorded())
    assert lines == {
        "all there at once": {batch: its[2] for batch, its in MEASURED.items()},
        "at 40 requests/s": {batch: its[3] for batch, its in MEASURED.items()},
    }
    ax = m.waits(figures.axes(), lines)
    assert lines_of(ax) == [list(its.items()) for its in lines.values()]
    assert (
        m.waits_finding(lines) == "At 40 requests/s: 2.00 s to a first token with 1 at once, 60.0 ms with 4"
    )
    apart(ax)


# ---------------------------------------------------------------- goodput, drawn
GOODPUT = [
    ("mixed, chunks of 64, strict", [("chunked", [5.0, 6.0, 3.0]), ("whole", [2.0, 2.0, 1.0])]),
    ("shared, strict", [("index on", [50.0, 40.0, 60.0]), ("index off", [0.0, 0.0, 1.5])]),
]


def check_goodputs(m):
    report = Report("goodput", "")
    for case, sides in GOODPUT:
        for side, samples in sides:
            report.add(Row(f"{case}: {side}", "requests/s", samples))
        report.add(Row(f"{case}: {sides[0][0]} / {sides[1][0]}", "x", [1.0], 1.0))
    report.add(Row("classes, strict, urgent: one queue", "requests/s", [1.0]))
    assert m.recorded_goodput(report) == GOODPUT
    ax = m.goodputs(figures.axes(), GOODPUT)
    seen = [its for _, sides in GOODPUT for _, samples in sides if (its := [x for x in samples if x])]
    assert [[x for x, _ in line] for line in lines_of(ax)] == seen
    middles = [float(its.get_offsets()[0][0]) for its in ax.collections]
    assert middles == [5.0, 2.0, 50.0], "nothing where most seeds bear nothing"
    said = [note.get_text() for note in ax.texts]
    assert said == ["mixed, chunks of 64, strict", "5.0", "2.0", "shared, strict", "50.0", "none"]
    assert [its.get_text() for its in ax.get_yticklabels()] == ["chunked", "whole", "index on", "index off"]
    assert len({line.get_color() for line in ax.lines}) == 4
    apart(ax)
    assert (
        m.goodput_finding(GOODPUT) == "Mixed, chunks of 64, strict: chunked bears 2.5 times the rate of whole"
    )
    none = m.goodput_finding(GOODPUT[1:])
    assert none == "Shared, strict: index on bears 50.0 requests per second, index off none"


SHARES = {
    "chunked": {0: {2.0: 1.0, 4.0: 0.95, 8.0: 0.8}, 1: {4.0: 0.92, 8.0: 0.9, 16.0: 0.7}, 2: {2.0: 0.9, 4.0: 0.5}},
    "whole": {0: {1.0: 0.85}, 1: {1.0: 0.7}, 2: {1.0: 0.95, 2.0: 0.8}},
}  # fmt: skip


def check_shares(m):
    report = Report("goodput", "")
    for side, seeds in SHARES.items():
        for rate in sorted({rate for its in seeds.values() for rate in its}):
            its = {seed: shares[rate] for seed, shares in seeds.items() if rate in shares}
            note = "seeds " + " ".join(map(str, its))
            report.add(Row(f"mixed, chunks of 64, strict, {side}: in time at {rate:.3g} requests/s", "share",
                           list(its.values()), note=note))  # fmt: skip
    report.add(
        Row("mixed, chunks of 64, loose, whole: in time at 5 requests/s", "share", [1.0], note="seeds 0")
    )
    report.add(Row("shared, strict, index on: in time at 5 requests/s", "share", [1.0], note="seeds 0"))
    assert m.recorded_shares(report, "mixed", "strict") == SHARES
    ax = m.attained(figures.axes(), SHARES, 0.9)
    drawn = lines_of(ax)
    assert drawn[:6] == [sorted(its.items()) for seeds in SHARES.values() for its in seeds.values()]
    assert {point[1] for point in drawn[6]} == {0.9}
    assert len({line.get_color() for line in ax.lines[:6]}) == 2
    assert ax.get_ylim()[0] < 0.5 and ax.get_xlim()[0] < 1 < 16 < ax.get_xlim()[1]
    assert {note.get_text(): note.xy[1] for note in ax.texts} == {"chunked": 0.7, "whole": 0.8}
    assert (
        m.attained_finding(SHARES, 0.9)
        == "90% of requests are in time: chunked to 4 a second, whole at no rate"
    )


TAILS = {
    ("TTFT", "chunked"): {"p50": 0.05, "p90": 0.1, "max": 0.2}, ("TTFT", "whole"): {"p50": 0.04, "max": 0.5},
    ("ITL", "chunked"): {"p50": 0.02, "p99": 0.04, "max": 0.06}, ("ITL", "whole"): {"p50": 0.02, "max": 0.3},
}  # fmt: skip


def check_tails(m):
    report = Report("goodput", "")
    for side in ("chunked", "whole"):
        for latency in ("TTFT", "ITL"):
            for p, seconds in TAILS[latency, side].items():
                case = f"mixed, chunks of 64, chats at 5.16 requests/s, {side}: {latency} {p}"
                report.add(Row(case, "s", [seconds, seconds, 9.0]))
    report.add(Row("mixed: first token alone, chat", "s", [0.04]))
    report.add(Row("other, chats at 9 requests/s, chunked: ITL p50", "s", [0.04]))
    about, rows = m.recorded_percentiles(report, "mixed")
    assert (about, rows) == ("Chats at 5.16 requests/s", TAILS) and list(rows) == list(TAILS)
    ax = m.percentiles(figures.axes(), rows)
    dots = sorted(tuple(its.get_offsets()[0]) for its in ax.collections)
    assert dots == sorted((x, y) for y, its in enumerate(TAILS.values()) for x in its.values())
    assert [its.get_text() for its in ax.texts] == ["200 ms", "500 ms", "60.0 ms", "300 ms"]
    names = ["TTFT, chunked", "TTFT, whole", "ITL, chunked", "ITL, whole"]
    assert [its.get_text() for its in ax.get_yticklabels()] == names
    assert len({line.get_color() for line in ax.lines}) == 2
    said = "Chats at 5.16 requests/s: the longest ITL is 5.0 times as long whole as chunked"
    assert m.percentiles_finding(rows, about) == said


CHECKS = {
    knob: [check_waits, check_table, check_server],
    serving_figures: [check_knob, check_queue, check_goodputs, check_shares, check_tails],
}


@pytest.mark.parametrize("module, check", [(m, check) for m, its in CHECKS.items() for check in its])
def test_by_hand(module, check):
    check(module)


@pytest.mark.slow
def test_the_command_measures_and_draws(tmp_path):
    path = tmp_path / "r.json"
    words = ["--model", "tiny", "--dtype", "float32", "--quick", "--json", str(path)]
    assert main(["bench", "knob", *words]) == 0
    report = Report.load(path)
    assert report.where.endswith("tiny in float32") and all(len(row.samples) == 3 for row in report.rows)
    assert [line.split(" | ")[0] for line in knob.markdown(report).splitlines()[2:]] == ["| 1", "| 2", "| 4"]
    best = max(report.row(f"batch {batch}, closed: output").median for batch in (1, 2, 4))
    rate = float(report.row("batch 1, open: TTFT p50").note.split()[1])
    assert rate == pytest.approx(knob.LOAD * best / knob.ANSWER, rel=0.01)
    for draw in (knob.draw, knob.draw_waits):
        draw(report, tmp_path / "one.png")
        assert (tmp_path / "one.png").stat().st_size > 2000


# ---------------------------------------------------------------- wrong versions that must be found
WRONG = {
    knob: {
        "as many as come": ("max_running=batch", "max_running=64"),
        "the warm-up is measured": ("        self.engine.log.clear()\n", ""),
        "tokens of all runs": ("self.tokens = sum(", "self.tokens += sum("),
        "a rate of the last token's time": ("max(t.finished for t", "min(t.finished for t"),
        "a step of one request": ("machine, self.batch, 0,", "machine, 1, 0,"),
        "prompts do not count": ("PROMPT + ANSWER // 2, size", "ANSWER // 2, size"),
        "open bounds too": ('if name == "closed: TPOT p50" else', 'if "TPOT p50" in name else'),
        "one load for both": ('self.note("open", ', 'self.note("closed", '),
        "p99 is p50": ("percentile(values, 99)", "percentile(values, 50)"),
        "seconds for milliseconds": ("1e3 if row.unit == 's' else 1", "1"),
        "milliseconds of everything": ("1e3 if row.unit == 's' else 1", "1e3"),
    },
    serving_figures: {
        "the axes exchanged": ("(token.median, rate.median)", "(rate.median, token.median)"),
        "the bound is what was measured": ("(token.bound, rate.bound)", "(token.median, rate.median)"),
        "the batch is not written": ("            str(batch), at,", "            '-', at,"),
        "the bound is cut off": ("[*points.values(), *(bound or {}).values()]", "list(points.values())"),
        "few and many exchanged": ("{high / low:.1f}x", "{low / high:.1f}x"),
        "one load twice": ('rate: "open"', 'rate: "closed"'),
        "the title of the other load": ("list(lines.items())[-1]", "list(lines.items())[0]"),
        "the last is the least": ("min(its), min(its, key=its.get)", "min(its), max(its)"),
        "ratios among the rates": ('row.unit == "requests/s" and not', "not"),
        "classes among the searched": (' and not row.case.startswith("classes")', ""),
        "a mean": ("looks[name], median(samples)", "looks[name], sum(samples) / len(samples)"),
        "nothing is drawn at 0": ("            if middle:\n", "            if True:\n"),
        "sides look alike": ("LINES[i % 4] for i, name", "LINES[0] for i, name"),
        "nobody bears nothing": ("if not median(theirs):", "if False:"),
        "one line for all seeds": ("side.setdefault(int(seed), {})", "side.setdefault(0, {})"),
        "any SLO": (' and case.split(", ")[-2] == slo', ""),
        "any trace": ('case.startswith(f"{trace}, ") and case.split', "case.split"),
        "points in the order of the search": ("points = sorted(its.items())", "points = list(its.items())[::-1]"),
        "what is promised is not drawn": ("ax.axhline(enough,", "ax.axhline(1,"),
        "low shares are cut off": ("min(0.6, min(shares) - 0.03)", "0.6"),
        "the first that fails": ("if share >= enough)", "if share < enough)"),
        "the best seed": ('{median(last):.3g} a second"', '{max(last):.3g} a second"'),
        "latencies mixed": ('key=lambda its: its[0][0] == "ITL"', "key=lambda its: its[0][1]"),
        "rates of other rows": ('and percent in MARKS and case.startswith(f"{trace}, ")', "and percent in MARKS"),
        "p50 for the longest": ('its["max"] for (name', 'its["p50"] for (name'),
        "of the first latency": ("latency = list(rows)[-1][0]", "latency = list(rows)[0][0]"),
        "the shortest is written": ("last = max(its, key=its.get)", "last = min(its, key=its.get)"),
    },
}  # fmt: skip
CASES = [(module, what) for module, its in WRONG.items() for what in its]


@pytest.mark.parametrize("module, what", CASES, ids=[f"{m.__name__}: {what}" for m, what in CASES])
def test_a_wrong_version_is_found(module, what):
    wrong = wrong_version(module, *WRONG[module][what])
    with pytest.raises((Exception, pytest.fail.Exception)):  # an assertion, or whatever the fault leads to
        for check in CHECKS[module]:
            check(wrong)
