"""Speculation's figures show what they are given: cells are counted, lines compared, titles worked out by hand."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from wrong_versions import wrong_version

from minserve.lab import figures, layout, spec_figures
from minserve.lab.report import Report, Row
from minserve.step_log import Row as Line
from minserve.step_log import StepRecord

plt.switch_backend("Agg")
WORDS = "The cat sat on the mat . The cat sat on the".split()
V = {
    1: {0: 1.0, 1: 1.0, 4: 1.1, 8: 1.2},
    4: {0: 1.0, 1: 1.2, 4: 2.0, 8: 3.0},
    16: {0: 1.0, 1: 1.8, 4: 4.2, 8: 8.0},
}


def log() -> list[StepRecord]:
    """Request 7: a prompt of 100 tokens in two chunks, then rounds of 0, 3, 3 and 4 drafts. Request 8 is in the way."""
    rows = [
        [Line(7, 64, 0, False)],
        [Line(7, 36, 64, True), Line(8, 1, 50, True)],
        [Line(7, 1, 100, True), Line(8, 5, 51, True, 4, 4)],
        [Line(7, 4, 101, True, 3, 3)],
        [Line(7, 4, 105, True, 3, 0)],
        [Line(7, 5, 106, True, 4, 2)],
    ]
    return [StepRecord(i, 0.0, {}, its, [], 1, 0, 0, 0) for i, its in enumerate(rows)]


# ---------------------------------------------------------------- rounds
def check_rounds(m):
    its = m.rounds(log(), 7, 100)
    assert [tuple(r) for r in its] == [(0, 0, 0), (1, 0, 0), (2, 3, 3), (6, 3, 0), (7, 4, 2)]
    assert m.waterfall_finding(its) == "10 tokens in 5 rounds: 5 drafts kept, 5 rejected"


def check_waterfall(m):
    its = m.rounds(log(), 7, 100)
    ax = m.waterfall(figures.axes(8, 3), its, WORDS)
    cells = {"kept": [], "top": [], "rejected": []}
    names = {spec_figures.KEPT.lower(): "kept", spec_figures.TOP.lower(): "top", "#ffffff": "rejected"}
    for cell in ax.patches:
        cells[names[to_hex(cell.get_facecolor())]].append((cell.get_x(), int(cell.get_y())))
    assert cells["top"] == [(0, 0), (1, 1), (5, 2), (6, 3), (9, 4)]
    assert cells["kept"] == [(2, 2), (3, 2), (4, 2), (7, 4), (8, 4)]
    assert cells["rejected"] == [(6, 3), (7, 3), (8, 3), (9, 4), (10, 4)]
    answer = sorted(x for x, _ in cells["kept"] + cells["top"])
    assert answer == list(range(10)), "each token of the answer is drawn once"
    assert [text.get_text() for text in ax.get_xticklabels()] == WORDS[:11]
    assert [text.get_text() for text in ax.get_yticklabels()] == list("12345")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["kept", "on top", "rejected"]
    high, low = ax.get_ylim()
    left, right = ax.get_xlim()
    for cell in ax.patches:
        assert left < cell.get_x() and cell.get_x() + 1 < right
        assert low < cell.get_y() and cell.get_y() + cell.get_height() < high


# ---------------------------------------------------------------- lines
LINES = {"ngram, k = 8": [0.75, 0.5, 0.5], "draft, k = 4": [0.6, 0.3]}


def check_lines(m):
    ax = m.positions(figures.axes(), LINES)
    assert [list(line.get_ydata()) for line in ax.lines] == list(LINES.values())
    assert [list(line.get_xdata()) for line in ax.lines] == [[1, 2, 3], [1, 2]]
    places = {note.get_text(): note.xy[1] for note in ax.texts}
    assert places == {name: shares[-1] for name, shares in LINES.items()}, "named where they end"
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in ax.lines}) == 2
    assert (
        m.positions_finding(LINES)
        == "Most is kept of ngram, k = 8: 75% at the first place, 50% as far as place 3"
    )
    with pytest.raises(ValueError, match="5 lines"):
        m.positions(figures.axes(), {str(i): [0.5] for i in range(5)})


def check_cost(m):
    flat = {B: dict.fromkeys(its, 1.0) for B, its in V.items()}
    ax = m.cost(figures.axes(), V, flat)
    drawn = [dict(zip(*map(list, line.get_data()))) for line in ax.lines]
    assert drawn[:3] == list(flat.values()) and drawn[3:6] == list(V.values())
    assert {line.get_color() for line in ax.lines[:3]} == {figures.BOUND}
    assert [note.get_text() for note in ax.texts] == ["batch 1", "batch 4", "batch 16"]
    assert ax.get_ylim()[0] == 0 and ax.get_ylim()[1] > 8
    assert (
        m.cost_finding(V)
        == "A step of 9 tokens each costs 1.2 times one of 1 at batch 1, 8.0 times at batch 16"
    )
    assert m.cost_finding({1: V[1]}) == "A step of 9 tokens each costs 1.2 times one of 1 at batch 1"


# ---------------------------------------------------------------- where it pays
def check_break_even(m):
    assert m.speedup(0.5, 2, 1.4, 0.05) == pytest.approx(1.75 / 1.5)
    assert m.best(1.0, V[4]) == (8, pytest.approx(3.0)), "all right: the longest"
    assert m.best(0.5, V[4]) == (1, pytest.approx(1.25)), "1.5 / 1.2, 1.94 / 2.0, 2.00 / 3.0"
    assert m.best(0.0, V[4], c=0.3) == (1, pytest.approx(1 / 1.5)), "k = 0 is no draft"
    assert m.least_chance(V[4]) == pytest.approx(0.2, abs=0.003)
    assert m.least_chance(V[16], c=0.1) == pytest.approx(0.9, abs=0.003), "1 + a = 1.8 + 0.1"
    assert m.least_chance({1: 3.0}) == 1.0, "never"
    assert m.at_batch(V, 2)[4] == pytest.approx(1.55) and m.at_batch(V, 16) == pytest.approx(V[16])
    assert m.surface_finding(V) == "Drafts pay from 0% right on at batch 1, from 80% on at batch 16"


def check_surface(m):
    ax = m.surface(figures.axes(6, 3.6), V)
    numbers = {(note.get_position()): note.get_text().strip() for note in ax.texts}
    for B in V:
        for a in (0.1, 0.3, 0.5, 0.7, 0.9):
            k, gain = spec_figures.best(a, V[B])
            assert numbers.pop((B, a)) == (str(k) if gain >= 1 else "–")
    assert not numbers
    paths = [
        path
        for its in ax.collections
        if list(its.get_edgecolor().ravel()[:3]) == [1, 1, 1]
        for path in its.get_paths()
    ]
    line = {round(float(x), 3): float(y) for path in paths for x, y in path.vertices}
    assert line[4] == pytest.approx(0.2, abs=0.02) and line[16] == pytest.approx(0.8, abs=0.02)
    assert len(ax.figure.axes) == 2, "with a scale of its colours"
    boxes = [(text, box) for text, box in layout.text_boxes(ax)]
    for i, (_, box) in enumerate(boxes):
        assert not any(box.overlaps(other) for _, other in boxes[i + 1 :])


# ---------------------------------------------------------------- recorded numbers
def check_recorded(m):
    rows = [
        Row("free, batch 1: step of 1 x 1", "s", [2.0, 1.0, 3.0], 1.0),
        Row("free, batch 1: step of 1 x 5", "s", [3.0], 1.5),
        Row("free, batch 4: step of 4 x 1", "s", [4.0], 2.0), Row("free, batch 4: step of 4 x 9", "s", [6.0], 8.0),
        Row("copy, batch 1: step of 1 x 1", "s", [9.0], 1.0), Row("free, batch 1: without", "tok/s", [5.0], 9.0),
        Row("free, batch 1: ngram, k = 8: kept by position", "share", [0.5, 0.25]),
        Row("free, batch 4: ngram, k = 8: kept by position", "share", [0.1]),
    ]  # fmt: skip
    report = Report("spec", "", "here", {}, "", "", rows)
    assert m.recorded(report, "free") == (
        {1: {0: 1, 4: 1.5}, 4: {0: 1, 8: 1.5}},
        {1: {0: 1, 4: 1.5}, 4: {0: 1, 8: 4}},
    )
    assert m.recorded_positions(report, "free, batch 1") == {"ngram, k = 8": [0.5, 0.25]}
    rows = [Row(f"SmolLM2 bf16, context 128: 2 x {n} tokens", "s", [float(n)], 1.0) for n in (1, 5)]
    rows.append(Row("SmolLM2 bf16, context 128: T(1) / T(5)", "share", [0.2], 1.0))
    measured, predicted = m.recorded(Report("spec-cost", "", "here", {}, "", "", rows))
    assert (measured, predicted) == ({2: {0: 1, 4: 5}}, {2: {0: 1, 4: 1}})


CHECKS = [
    check_rounds, check_waterfall, check_lines, check_cost, check_break_even, check_surface, check_recorded,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
def test_it_shows_what_it_is_given(check):
    check(spec_figures)
    plt.close("all")


def test_figures_are_small(tmp_path):
    its = spec_figures.rounds(log(), 7, 100)
    for i, ax in enumerate(
        [
            spec_figures.waterfall(figures.axes(8, 3), its, WORDS), spec_figures.positions(figures.axes(), LINES),
            spec_figures.cost(figures.axes(), V), spec_figures.surface(figures.axes(6, 3.6), V),
        ]
    ):  # fmt: skip
        figures.save(ax, tmp_path / f"{i}.png", "title", "where")
        assert (tmp_path / f"{i}.png").stat().st_size < 60_000


WRONG = {
    "a draft's place is its step's": ("row.computed + row.num_tokens - row.drafted - prompt", "row.computed - prompt"),
    "everybody's rounds": ("if row.request == request and row.sampled", "if row.sampled"),
    "chunks of the prompt are rounds": ("row.request == request and row.sampled", "row.request == request"),
    "kept ones counted as rejected": ("{drafted - kept} rejected", "{drafted} rejected"),
    "the token on top forgotten": (' + [(start + kept, TOP, "//")]', ""),
    "a token on top behind the whole draft": ("(start + kept, TOP", "(start + drafted, TOP"),
    "all drafts hang as rejected": ("for i in range(kept, drafted):", "for i in range(drafted):"),
    "every round in one row": ("Rectangle((x, row), 1, 0.55", "Rectangle((x, 0), 1, 0.55"),
    "no room for the last": ("default=1)", "default=1) - 3"),
    "words one place off": ("[words[x] for x in shown]", "[words[x - 1] for x in shown]"),
    "places from 0": ("range(1, len(shares) + 1), shares", "range(len(shares)), shares"),
    "the worst is called the best": ("max(lines.items(), key", "min(lines.items(), key"),
    "the roofline is the measurement": ("for its in (predicted or {}).values():", "for its in measured.values():"),
    "k of some batch": ("max(first.keys() & last.keys())", "min(first.keys() & last.keys())"),
    "no token on top": ("for i in range(k + 1)) /", "for i in range(1, k + 1)) /"),
    "drafting is free": ("/ (k * c + v)", "/ v"),
    "drafting costs the same for any k": ("/ (k * c + v)", "/ (c + v)"),
    "no draft is a draft": ("for k, v in vs.items() if k)", "for k, v in vs.items())"),
    "the worst k": ("return max(((k, speedup", "return min(((k, speedup"),
    "pays where it loses": (">= 1), 1.0))", ">= 0.9), 1.0))"),
    "between batches on a line over the batch": ("np.log(batch), np.log(sizes)", "batch, sizes"),
    "the line at 2": ("levels=[1], colors", "levels=[2], colors"),
    "losing k's shown": ("if gain >= 1 else", "if True else"),
    "the same column everywhere": ("best(a, v[B], c)", "best(a, v[sizes[0]], c)"),
    "seconds, not v": ("t / its[0] for", "t for"),
    "the other work's steps": (" and case.startswith(kind)", ""),
    "k is the number of tokens": ("int(parts[1]) - 1", "int(parts[1])"),
    "bounds are measurements": ("[k] = row.bound", "[k] = row.median"),
    "any batch's places": ('row.case.startswith(f"{case}: ")', "row.case"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_version_is_found(wrong):
    broken = wrong_version(spec_figures, *WRONG[wrong])
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for check in CHECKS:
            check(broken)
    plt.close("all")
