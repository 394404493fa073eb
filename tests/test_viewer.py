"""The viewer, the timeline and the trace say what the log says: every token, page and request, each once.

Checks are functions of a module, so that wrong versions of it can be shown to fail them (WRONG, below).
"""

import json
import sys
from collections import Counter
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
import torch

from minserve import step_log
from minserve.config import SHAPES
from minserve.engine import LLM
from minserve.lab import look, timeline, viewer
from minserve.model import Model
from minserve.request import SamplingParams
from minserve.step_log import Row, Snapshot, StepRecord

plt.switch_backend("Agg")
SECONDS = dict(schedule=1e-4, pack=2e-4, model=5e-3, sample=3e-4, commit=1e-4)
BY_HAND = StepRecord(
    step=7,
    start=100.0,
    seconds=SECONDS,
    rows=[Row(1, 1, 9, True), Row(4, 6, 4, False)],
    waiting=[5, 6],
    running=3,
    free=1,
    cached=1,
    in_use=6,
    preempted=[5],
    finished={1: "stop"},
    snapshot=Snapshot(
        tables={1: [0, 2, 3], 4: [0, 1, 7], 8: [-1, 4]},
        references=[2, 1, 1, 1, 1, 0, 0, 1],
        indexed={0: "abcdef", 2: "123456", 6: "778899"},
        cached=[6],
    ),
)


@pytest.fixture(scope="module")
def log():
    """A crowded day: forks, shared prefixes, chunks, preemptions, all on a tiny model."""
    torch.manual_seed(0)
    sizes = dict(num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8)
    model = Model.random(replace(SHAPES["smollm2-135m"], **sizes, vocab_size=50, context=256, windows=()))
    llm = LLM(model, num_pages=24, page_size=4, token_budget=16, max_running=6, snapshots=True)
    prompts = [[*range(8), *[i + 10] * (3 + 2 * i)] for i in range(9)]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, n=2 if i == 1 else 1) for i in range(9)]
    llm.generate(prompts, params)
    records = list(llm.log)
    assert any(r.preempted for r in records) and any(r.num_tokens == 16 for r in records)
    return records


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def said(figure) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts if text.get_text()]


# ---------------------------------------------------------------- one step
def check_step(module, log, tmp_path):
    figure = module.draw_step([BY_HAND], 0)
    queue, batch, pool, tables = figure.axes
    assert figure.get_suptitle() == "Step 7: 7 tokens   (1 decode, 1 prefill, r5 gave way, r1 ended)"
    assert [text.get_text() for text in queue.texts] == ["r5", "r6"]
    assert [text.get_text() for text in batch.texts] == ["decode, position 9", "prefill 6, no draw yet"]
    bars = [(bar.get_x(), bar.get_width()) for bar in batch.patches]
    assert bars == [(0, 9), (9, 1), (0, 4), (4, 6)]
    assert [text.get_text() for text in batch.get_yticklabels()] == ["r1", "r4"]
    pages = ["0 x2\nabcd", "1", "2\n1234", "3", "4", "5", "6\n7788", "7"]
    assert [text.get_text() for text in pool.texts] == pages
    assert [text.get_text() for text in tables.texts] == "r1 0 2 3 r4 0 1 7 r8 · 4".split()
    assert "6 in use, 1 cached, 1 free" in pool.get_title(loc="left")
    assert module.owners_of(BY_HAND.snapshot) == [[1, 4], [4], [1], [1], [8], [], [], [4]]
    outlines = [patch for patch in pool.patches if patch.get_linestyle() == ":"]
    assert len(outlines) == BY_HAND.free, "free pages are dotted"
    assert sum(bool(patch.get_hatch()) for patch in pool.patches) == BY_HAND.cached
    for record in (log[0], next(r for r in log if r.preempted), log[-1]):
        tables = Counter(page for table in record.snapshot.tables.values() for page in table)
        texts = [text.get_text() for text in module.draw_step(log, log.index(record)).axes[2].texts]
        for page, text in enumerate(texts):
            assert (f"{page} x{tables[page]}" in text) == (tables[page] > 1)


def test_a_step_shows_what_the_record_says(log, tmp_path):
    check_step(viewer, log, tmp_path)


def test_no_text_lies_on_another_and_the_file_is_small(log, tmp_path):
    for i in (0, 9, len(log) - 1):
        figure = viewer.draw_step(log, i)
        figure.canvas.draw()
        boxes = [
            (t, t.get_window_extent().padded(-1)) for ax in figure.axes for t in ax.texts if t.get_text()
        ]
        for k, (one, box) in enumerate(boxes):
            hit = [other.get_text() for other, its in boxes[k + 1 :] if box.overlaps(its)]
            assert not hit, f"record {i}: {one.get_text()!r} overlaps {hit}"
        figure.savefig(tmp_path / "x.png", dpi=90, bbox_inches="tight", facecolor="white")
        assert (tmp_path / "x.png").stat().st_size < 60_000


def test_a_crowd_is_cut_short_and_says_so():
    many = replace(
        BY_HAND,
        rows=[Row(i, 1, i + 1, True) for i in range(30)],
        waiting=list(range(50, 90)),
        snapshot=Snapshot({i: list(range(40)) for i in range(30)}, [30] * 200, {}, []),
    )
    figure = viewer.draw_step([many], -1)
    assert {"and 26 more", "+ 21"} < set(said(figure))
    assert "and 14 more" in figure.axes[1].get_title(loc="left")
    assert len(figure.axes[2].patches) >= 200 and not any("x30" in text for text in said(figure))


def test_without_snapshots_it_says_how_to_get_them():
    with pytest.raises(ValueError, match=r"(?s)step 7.*snapshots=True") as refused:
        viewer.draw_step([replace(BY_HAND, snapshot=None)], 0)
    assert "record 0" in str(refused.value)


def test_the_slider_needs_neither_widgets_nor_a_front_end(monkeypatch, capsys):
    viewer.slider([BY_HAND])
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    viewer.slider([BY_HAND])
    assert "draw_step(log, i)" in capsys.readouterr().out


def check_decodes(module, log, tmp_path):
    """A verified draft is decoding, however many tokens that computes; a piece of a prompt is not."""
    row = module.Row
    assert row(1, 1, 9, True).decodes and row(1, 4, 9, True, drafted=3, kept=1).decodes
    assert not any(row(1, *its).decodes for its in [(1, 4, False), (4, 9, True), (4, 9, False)])


def check_draft(module, log, tmp_path):
    rows = [Row(1, 4, 9, True, drafted=3, kept=2), Row(4, 6, 4, True)]
    figure = module.draw_step([replace(BY_HAND, rows=rows)], 0)
    assert "(1 decode, 1 prefill," in figure.get_suptitle()
    assert [text.get_text() for text in figure.axes[1].texts] == [
        "decode, position 9, 2 of 3 drafts kept",
        "prefill 6, draws",
    ]


def test_a_verified_draft_is_decoding(log, tmp_path):
    check_decodes(step_log, log, tmp_path)
    check_draft(viewer, log, tmp_path)


# ---------------------------------------------------------------- the whole run
def check_timeline(module, log, tmp_path):
    tokens, waited = Counter(), Counter(r for record in log for r in record.waiting)
    for record in log:
        tokens.update({row.request: row.num_tokens for row in record.rows})
    assert module.requests_in(log) == sorted(tokens | waited)
    for request in tokens:
        spans = module.spans(log, request)
        assert all(a.last < b.first for a, b in zip(spans, spans[1:]))
        assert all(
            a.kind != b.kind or a.last + 1 < b.first for a, b in zip(spans, spans[1:]) if b.kind != "prefill"
        )
        assert sum(span.num_tokens for span in spans) == tokens[request]
        assert sum(s.last - s.first + 1 for s in spans if s.kind == "waiting") == waited[request]
        pieces = [span.num_tokens for span in spans if span.kind == "prefill"]
        assert pieces == [
            row.num_tokens
            for record in log
            for row in record.rows
            if row.request == request and not (row.num_tokens == 1 and row.sampled)
        ]
    rows = [Row(3, 1, 4, False)], [Row(3, 1, 5, True)], [], [Row(3, 1, 6, True)], [Row(3, 1, 7, True)]
    gap = [replace(BY_HAND, step=i, rows=its, waiting=[]) for i, its in enumerate(rows)]
    assert [tuple(span) for span in module.spans(gap, 3)] == [
        ("prefill", 0, 0, 1),
        ("decode", 1, 1, 1),
        ("decode", 3, 4, 2),
    ]
    ax = module.timeline(plt.subplots()[1], log, names={0: "first"})
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["first", "r1"]
    markers = Counter(line.get_marker() for line in ax.lines)
    assert markers["x"] == sum(len(r.preempted) for r in log) and markers["|"] == len(tokens)
    ax = module.timeline(plt.subplots()[1], log, by="time")
    total = log[-1].start + log[-1].total - log[0].start
    assert max(bar.get_x() + bar.get_width() for bar in ax.patches) == pytest.approx(total)
    assert min(bar.get_x() for bar in ax.patches) == 0
    with pytest.raises(ValueError, match="'step' or by 'time'"):
        module.timeline(plt.subplots()[1], log, by="token")


def test_the_timeline_accounts_for_every_token_and_every_wait(log, tmp_path):
    check_timeline(timeline, log, tmp_path)


def test_the_legend_names_what_is_drawn(log):
    ax = timeline.timeline(plt.subplots()[1], log)
    timeline.legend(ax)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["prefill", "decode", "waiting"]


def test_panels_share_one_scale_that_holds_the_longest_run(log):
    axs = timeline.panels({"short": log[:5], "whole": log}, 4)
    assert [ax.get_title(loc="left") for ax in axs] == ["short", "whole"]
    assert axs[0].get_xlim() == axs[1].get_xlim() and axs[0].get_xlim()[1] > len(log)
    assert not axs[0].get_xlabel() and axs[1].get_xlabel() and axs[0].get_legend() and not axs[1].get_legend()


def test_over_seconds_every_token_can_be_counted(log):
    ax = timeline.timeline(plt.subplots()[1], log, by="time")
    cuts = sum(len(lines.get_segments()) for lines in ax.collections)
    spans = [s for r in timeline.requests_in(log) for s in timeline.spans(log, r) if s.kind == "decode"]
    assert cuts == sum(span.num_tokens - 1 for span in spans)


# ---------------------------------------------------------------- the trace
def check_trace(module, log, tmp_path):
    module.chrome_trace(log, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    end = (log[-1].start + log[-1].total - log[0].start) * 1e6
    assert all(0 <= e["ts"] <= e["ts"] + e.get("dur", 0) <= end * (1 + 1e-9) + 1 for e in events)
    phases = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    for record in log:
        parts = [e for e in phases if e["args"]["step"] == record.step]
        assert [e["name"] for e in parts] == list(record.seconds)
        assert sum(e["dur"] for e in parts) == pytest.approx(record.total * 1e6)
        assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"], abs=1) for a, b in zip(parts, parts[1:]))
        rows = {(e["tid"], e["args"]["tokens"]) for e in spans if e["args"]["step"] == record.step}
        assert rows == {(row.request, row.num_tokens) for row in record.rows}
    assert len(spans) == sum(len(record.rows) for record in log)
    assert not any("drafted" in e["args"] for e in spans)
    row, path = module.Row(1, 4, 9, True, drafted=3, kept=2), tmp_path / "draft.json"
    module.chrome_trace([replace(BY_HAND, rows=[row])], path)
    (span,) = (e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X" and e["pid"] == 1)
    assert span["name"] == "decode" and (span["args"]["drafted"], span["args"]["kept"]) == (3, 2)
    assert {e["tid"] for e in spans} == {row.request for record in log for row in record.rows}
    for track in {e["tid"] for e in spans}:  # a viewer nests what overlaps: nothing may
        own = sorted((e["ts"], e["dur"]) for e in spans if e["tid"] == track)
        assert all(a + dur <= b + 1 for (a, dur), (b, _) in zip(own, own[1:]))
    ends = Counter(e["name"] for e in events if e["ph"] == "i")
    assert ends.pop("preempted", 0) == sum(len(record.preempted) for record in log)
    assert ends == Counter(reason for record in log for reason in record.finished.values())
    counters = [e for e in events if e["ph"] == "C"]
    assert len(counters) == 2 * len(log) and all(
        sum(e["args"].values()) == 24 for e in counters if e["name"] == "pages"
    )


def test_the_trace_is_json_within_the_run_and_adds_up(log, tmp_path):
    check_trace(step_log, log, tmp_path)


def test_an_empty_log_is_an_empty_trace(tmp_path):
    step_log.chrome_trace([], tmp_path / "trace.json")
    assert all(e["ph"] == "M" for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


# ---------------------------------------------------------------- the checks can fail
WRONG = [
    (check_step, viewer, "if references > 1", "if references > 2"),
    (check_step, viewer, "snapshot.indexed[page][:4]", "snapshot.indexed[page][:3]"),
    (check_step, viewer, "if page >= 0 and request not in owners[page]", "if request not in owners[page]"),
    (check_step, viewer, "left=row.computed, height", "left=0, height"),
    (check_step, viewer, "if page in snapshot.cached else {}", "if page not in snapshot.cached else {}"),
    (check_step, viewer, "alive = page >= 0 and", "alive = page >= -1 and"),
    (check_step, viewer, '"draws" if row.sampled', '"draws" if not row.sampled'),
    (check_timeline, timeline, "found[-1].kind == kind != ", "found[-1].kind == kind or kind == "),
    (check_timeline, timeline, "and found[-1].last == i - 1", ""),
    (check_decodes, step_log, "self.sampled and self", "self"),
    (check_decodes, step_log, "== 1 + self.drafted", "== 1"),
    (check_decodes, step_log, "== 1 + self.drafted", ">= 1"),
    (check_draft, viewer, "{row.kept} of {row.drafted}", "{row.drafted} of {row.kept}"),
    (check_draft, viewer, "if row.drafted else", "if False else"),
    (check_timeline, timeline, "return row.decodes", "return row.num_tokens == 1"),
    (check_trace, step_log, "if row.drafted else {}", "if True else {}"),
    (check_trace, step_log, "drafted=row.drafted", "drafted=row.kept"),
    (check_trace, step_log, '"decode" if row.decodes', '"decode" if row.num_tokens == 1'),
    (check_timeline, timeline, "last=i, num_tokens", "last=i - 1, num_tokens"),
    (check_timeline, timeline, "if request in record.preempted:", "if request in record.waiting:"),
    (check_timeline, timeline, "begin + record.total", "begin"),
    (check_trace, step_log, "        begin += seconds\n", ""),
    (check_trace, step_log, "tid=row.request", "tid=record.step"),
    (check_trace, step_log, "dur=seconds * 1e6", "dur=seconds * 1e3"),
    (check_trace, step_log, "tokens=row.num_tokens", "tokens=row.computed"),
    (check_trace, step_log, "(seconds - zero) * 1e6", "seconds * 1e6"),
]


@pytest.mark.parametrize("check, module, old, new", WRONG, ids=[f"{w[2][:30]} > {w[3][:30]}" for w in WRONG])
def test_a_wrong_version_fails_its_check(check, module, old, new, log, tmp_path):
    wrong = look.mutant(module, old, new)
    with pytest.raises(Exception):  # noqa: B017  (an assertion, or it breaks)
        check(wrong, log, tmp_path)
