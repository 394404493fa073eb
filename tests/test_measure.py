"""A measurement keeps its samples, takes turns, refuses the interpreter; its report survives the disk."""

import json
import statistics

import pytest
import torch

from minserve.lab import measure as lab
from minserve.lab.measure import (
    Timing,
    clock,
    copies_beyond_cache,
    in_turn,
    measure,
    measure_graph,
    percentile,
)
from minserve.lab.report import Report, Row, quantity, versions


def test_measure_keeps_every_sample_and_leaves_out_the_warm_up():
    calls = []
    timing = measure("append", lambda: calls.append(1), warmup=2, repeats=5)
    assert len(calls) == 7 and len(timing.seconds) == 5 and all(s > 0 for s in timing.seconds)
    assert str(timing).startswith("append ") and str(timing).endswith("n=5") and "middle half" in str(timing)
    assert timing.where == lab.where_am_i() and (torch.cuda.is_available() or "thread" in timing.where)


def test_a_longer_job_takes_longer():
    x = torch.randn(400, 400)
    short, long = (measure("", lambda n=n: [x @ x for _ in range(n)], repeats=5).median for n in (1, 20))
    assert long > 2 * short


def test_at_most_stops_early_but_keeps_three():
    assert len(measure("", lambda: None, repeats=50, at_most=0).seconds) == 3


def test_percentiles():
    timing = Timing("", [float(i) for i in (10, 3, 1, 2, 0, 5, 4, 7, 6, 9, 8)], "here")
    assert (timing.p10, timing.median, timing.p90, timing.best) == (1, 5, 9, 0)
    assert timing.middle_half == (2.5, 7.5)
    assert percentile([3.0], 90) == 3 and percentile([0.0, 1.0], 25) == 0.25
    assert "n=1" in str(Timing("once", [0.5], "here"))


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="warmup=-1 must be >= 0 and repeats=0 >= 1"):
        measure("x", lambda: None, warmup=-1, repeats=0)


def test_the_interpreter_is_never_timed(monkeypatch):
    monkeypatch.setattr(lab, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match="interpreter's times are not kernel times"):
        clock(lambda: None)
    with pytest.raises(RuntimeError, match="Unset it"):
        measure("x", lambda: None)


def test_in_turn_alternates_and_reverses():
    order = []
    sides = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    samples = in_turn(sides, warmup=1, repeats=3)
    assert "".join(order) == "ab" + "abbaab"
    assert samples == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}


def test_buffers_rotate_through_more_than_four_caches():
    for nbytes in (1, 1000, 10**6, 10**9):
        count = copies_beyond_cache(nbytes, cache=50 * 2**20)
        assert count >= 2 and count * nbytes > 4 * 50 * 2**20
    assert copies_beyond_cache(100, cache=100) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_graph_needs_a_gpu():
    with pytest.raises(RuntimeError, match="no CUDA device here"):
        measure_graph("x", [lambda: None])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_runs_each_launch():
    xs = [torch.zeros(1, device="cuda") for _ in range(3)]
    timing = measure_graph("add", [lambda x=x: x.add_(1) for x in xs], repeats=4)
    assert len(timing.seconds) == 4 and all(x.item() >= 4 * 7 for x in xs)


# ---------------------------------------------------------------- the report
def report() -> Report:
    made = Report("decode", "python -m minserve bench decode")
    made.add(Row("a step", "s", [0.010, 0.030, 0.020], bound=0.008, target=0.5, note="moved 12 %"))
    made.add(Row("a rate", "tok/s", [50.0, 40.0], bound=100.0, target=0.4))
    made.add(Row("over the other", "x", [2.0, 3.0], bound=1.0, target=3.5))
    made.add(Row("unbounded", "B/s", [3e9]))
    return made


def test_ratio_is_the_share_of_the_bound_whichever_way_is_up():
    step, rate, times, free = report().rows
    assert step.ratio == pytest.approx(0.4) and step.passed is False
    assert rate.ratio == pytest.approx(0.45) and rate.passed is True
    assert times.ratio == 2.5 and times.passed is False
    assert free.ratio is None and free.passed is None


def test_a_report_survives_the_disk(tmp_path):
    made = report()
    made.save(tmp_path / "deep" / "decode.json")
    data = json.loads((tmp_path / "deep" / "decode.json").read_text())
    assert list(data) == ["name", "command", "where", "versions", "date", "commit", "rows"]
    for row in data["rows"]:
        assert list(row) == ["case", "unit", "samples", "median", "bound", "ratio", "target", "pass", "note"]
        assert row["median"] == pytest.approx(statistics.median(row["samples"]))
    assert Report.load(tmp_path / "deep" / "decode.json") == made


def test_the_table_says_bound_measured_ratio_target():
    lines = report().table().splitlines()
    assert lines[1].split() == ["case", "bound", "measured", "ratio", "(target)"]
    assert lines[2].split() == ["a", "step", "8.00", "ms", "20.0", "ms", "40%", "(50%)", "below"]
    assert lines[3].strip() == "moved 12 %"
    assert lines[4].split() == ["a", "rate", "100", "tok/s", "45.0", "tok/s", "45%", "(40%)"]
    assert lines[5].split() == ["over", "the", "other", "1.00", "x", "2.50", "x", "2.50x", "(3.50x)", "below"]
    assert lines[6].split() == ["unbounded", "3.00", "GB/s"]


def test_a_row_without_samples_is_refused():
    with pytest.raises(ValueError, match="row 'empty': no samples"):
        Row("empty", "s", [])


@pytest.mark.parametrize(
    "value, unit, says",
    [
        (0.00791, "s", "7.91 ms"),
        (1.5e-6, "s", "1.50 µs"),
        (2.0, "s", "2.00 s"),
        (3e-8, "s/token", "30.0 ns/token"),
        (33.5e9, "B/s", "33.5 GB/s"),
        (4.3e12, "B/s", "4.30 TB/s"),
        (418e9, "FLOP/s", "418 GFLOP/s"),
        (1240.4, "tok/s", "1,240 tok/s"),
        (9.996, "tok/s", "10.0 tok/s"),
        (0.0, "s", "0.00 ns"),
        (5.0, "B/s", "5.00 B/s"),
    ],
)
def test_quantities_read_as_people_say_them(value, unit, says):
    assert quantity(value, unit) == says


def test_versions_name_what_matters():
    assert {"python", "torch", "transformers"} <= versions().keys()
