"""The studies of a fleet and their figures: schedules and bounds by hand, steps and bars counted, texts apart."""

import asyncio

import matplotlib.pyplot as plt
import pytest
from fleet_world import POLICIES
from serving_world import tiny_folder
from wrong_versions import wrong_version

from minserve.arrivals import Arrival
from minserve.bench import redraw
from minserve.cluster.autoscaler import AutoscalingConfig, Round
from minserve.lab import fleet, fleet_figures
from minserve.lab.layout import text_boxes
from minserve.lab.report import Report, Row
from minserve.lab.scaling import NAIVE, STEADY, Bursts, replay
from minserve.metrics import Timeline

plt.switch_backend("Agg")
ROUNDS = [Round(0.0, 1, 1, 0, 1), Round(1.0, 8, 1, 0, 3), Round(2.0, 9, 1, 2, 3), Round(3.0, 5, 3, 0, 3),
          Round(4.0, 1, 3, 0, 1), Round(5.0, 1, 1, 0, 1)]  # fmt: skip


def lines_of(ax) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}


# ---------------------------------------------------------------- figures
def check_steps(m):
    _, (above, below) = plt.subplots(2)
    m.replicas(above, ROUNDS, needs=[1, 2, 2, 2, 1, 1])
    m.queue(below, ROUNDS, target_ongoing_requests=2)
    assert lines_of(above) == {
        "needed": [1, 2, 2, 2, 1, 1],
        "asked for": [1, 1, 3, 3, 3, 1],
        "running": [1, 1, 1, 3, 3, 1],
    }
    assert {line.get_drawstyle() for ax in (above, below) for line in ax.get_lines()} == {"steps-post"}
    assert lines_of(below) == {"under way": [1, 8, 9, 5, 1, 1], "meant for what runs": [2, 2, 2, 6, 6, 2]}
    [missing] = [c for c in above.collections if c.get_label() == "missing"]
    inside = missing.get_paths()[0].contains_points(
        [(0.5, 1.2), (1.5, 1.2), (2.9, 1.8), (2.9, 2.2), (3.1, 1.8)]
    )
    assert list(inside) == [False, True, True, False, False]  # from the need on until the third answered
    upper, lower = m.lived(ROUNDS, 2.0).figure.axes
    assert lines_of(upper) == {name: y for name, y in lines_of(above).items() if name != "needed"}
    assert lines_of(lower) == lines_of(below) and not upper.get_legend()
    assert m.fleet_finding(ROUNDS) == "1 → 3 → 1 replicas in 2 decisions, for up to 9 requests at once"
    plt.close("all")


def check_oscillation(m):
    runs = {"naive": replay(Bursts(), NAIVE), "steady": replay(Bursts(), STEADY)}
    figure = m.oscillation(runs, 2.0, "a replay")
    axes = figure.axes
    assert [ax.get_xlabel() for ax in axes[:2]] == [
        f"{name}: {r.changes} changes, {r.turns} turns" for name, r in runs.items()
    ]
    naive, steady = runs.values()
    assert axes[0].get_title("left") == f"The same bursts: it turns {naive.turns} times, or {steady.turns}"
    assert lines_of(axes[1])["running"] == [r.running for r in steady.rounds]
    assert lines_of(axes[2])["under way"] == [r.ongoing for r in naive.rounds]
    plt.close("all")


def routing_report():
    report = Report("fleet-routing", "x", "here", {}, "2000-01-01", "c")
    for policy, share in zip(POLICIES, (0.4, 0.5, 0.45, 0.7)):
        report.add(Row(f"{policy}: cached", "of prompt tokens", [share, share + 0.02, share - 0.1], 0.75))
        report.add(Row(f"{policy}: TTFT p50", "s", [share / 10]))
    return report


def check_policies(m):
    report = routing_report()
    rows, bound = m.recorded_policies(report)
    assert rows["prefix_aware"] == (0.7, pytest.approx(0.07)) and bound == 0.75
    _, ax = plt.subplots(figsize=(6.4, 2.6))
    m.policies(ax, rows, bound, "here")
    assert [bar.get_width() for bar in ax.patches] == [0.4, 0.5, 0.45, 0.7]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        name.replace("_", " ") for name in POLICIES
    ]
    assert ax.get_title("left") == "By prefix 70% of prompt tokens are in a cache, by turns 40%"
    assert len({bar.get_hatch() for bar in ax.patches}) == 4
    boxes = text_boxes(ax)
    assert {"70%", "70.0 ms", "40%", "40.0 ms"} <= {text for text, _ in boxes}
    for i, (text, box) in enumerate(boxes):
        assert not [other for other, its in boxes[i + 1 :] if box.overlaps(its)], text
    plt.close("all")


@pytest.mark.parametrize("check", [check_steps, check_oscillation, check_policies])
def test_figures_show_what_they_are_given(check):
    check(fleet_figures)


WRONG = [
    ("the queue stands above", "    queue(axes[1], rounds, target", "    queue(axes[0], rounds, target", check_steps),
    ("running is drawn as asked for", "[r.running + r.starting for r in rounds]", "[r.running for r in rounds]",
     check_steps),
    ("lines instead of steps", 'ax.step(times, running, where="post",', "ax.plot(times, running,", check_steps),
    ("steps before their time", 'ax.step(times, running, where="post",', 'ax.step(times, running, where="pre",',
     check_steps),
    ("meant for those asked for", "target_ongoing_requests * r.running", "target_ongoing_requests * r.target",
     check_steps),
    ("missing before its time", 'most, step="post"', 'most, step="pre"', check_steps),
    ("missing is what is too much", "[max(need, n) for", "[min(need, n) for", check_steps),
    ("every round is a decision", "r.target != r.running + r.starting", "True", check_steps),
    ("the columns are swapped", "replicas(above, run.rounds, run.needs)", "replicas(below, run.rounds, run.needs)",
     check_oscillation),
    ("the first and the worst are swapped", "worst, best =", "best, worst =", check_oscillation),
    ("the best instead of the median", ': cached").median', ': cached").samples[1]', check_policies),
    ("the bars upside down",
     "enumerate(zip(rows.values(), HATCHES))", "enumerate(zip([*rows.values()][::-1], HATCHES))",
     check_policies),
    ("the columns on each other", "1.02, 1.14", "1.02, 1.03", check_policies),
]  # fmt: skip


@pytest.mark.parametrize("what, right, wrong, check", WRONG, ids=[w[0] for w in WRONG])
def test_wrong_figures_are_noticed(what, right, wrong, check):
    module = wrong_version(fleet_figures, right, wrong)
    with pytest.raises((AssertionError, ValueError, AttributeError)):
        check(module)


# ---------------------------------------------------------------- studies
def test_the_bound_of_what_can_be_cached():
    """Three prompts of group 0, two of group 1: three come again, each with 2 full pages of 16 in common."""
    schedule = [
        Arrival(float(i), 50, 8, prefix=group, prefix_tokens=40) for i, group in enumerate((0, 1, 0, 0, 1))
    ]
    assert fleet.most_cached(schedule) == 3 * 32 / 250
    made = fleet.prefixed(rate=2, seconds=30, groups=4, prefix_tokens=64, seed=1)
    assert (
        len(made) == 60
        and {a.prefix for a in made} == {0, 1, 2, 3}
        and {a.prompt_tokens for a in made} == {96}
    )


def test_times_count_from_the_beginning():
    t = Timeline(105.0, first=106.0, tokens=[106.0, 107.0], finished=107.5, reason="length")
    early = fleet.since(100.0, t)
    assert (early.arrival, early.first, early.tokens, early.finished, early.ttft) == (
        5.0,
        6.0,
        [6.0, 7.0],
        7.5,
        1.0,
    )
    assert t.arrival == 105.0 and fleet.since(1.0, Timeline(2.0)).first is None


def test_what_was_recorded_is_read_again(tmp_path):
    report = Report("fleet-scaling", "x", "here", {}, "2000-01-01", "c")
    requests = [
        Timeline(0.0, tokens=[1.0], first=1.0, finished=1.0, reason="length"),
        Timeline(1.0, reason="error"),
    ]
    fleet.record(report, ROUNDS, [6.5, 7.5], requests)
    rows = [[r.time, r.ongoing, r.running, r.starting, r.target] for r in ROUNDS]
    fleet.save(report, tmp_path / "x.json", rounds=rows)
    assert fleet.recorded_rounds(tmp_path / "x.json") == ROUNDS
    again = Report.load(tmp_path / "x.json")
    assert again.row("changes of the target").median == 2 and again.row("cold start").median == 7.0
    assert again.row("requests").note == "1 failed"
    redraw.fleet(tmp_path / "x.json", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 2000


def test_recorded_policies_are_drawn(tmp_path, monkeypatch):
    saved, save = [], redraw.figures.save
    monkeypatch.setattr(redraw.figures, "save", lambda *its: saved.append(its) or save(*its))
    redraw.routing(routing_report(), tmp_path / "x.png")
    ((ax, path, title, where),) = saved
    assert path.stat().st_size > 2000 and where == "here, 2000-01-01"
    assert title == "By prefix 70% of prompt tokens are in a cache, by turns 40%"
    assert [bar.get_width() for bar in ax.patches] == [0.4, 0.5, 0.45, 0.7]
    assert [line.get_xdata()[0] for line in ax.lines] == [0.75], "the bound"


def test_a_recorded_command_does_not_say_where_things_lie():
    assert fleet._shown(["routing", "--json", "/a/b.json", "--model", "/c/d", "--rate", "2"]) == [
        "routing", "--model", "d", "--rate", "2",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_studies_run_with_real_processes(tmp_path):
    arguments = ["--model", str(tiny_folder(tmp_path / "tiny")), "--num-pages", "144", "--max-running", "4"]
    report = Report("fleet-routing", "x", "here", {}, "2000-01-01", "c")
    schedules = {0: fleet.prefixed(rate=20, seconds=1, groups=3, prefix_tokens=128)}
    fleet.routing(report, schedules, 2, arguments, ["prefix_aware"])
    assert report.row("prefix_aware: cached").ratio > 0.6

    quick = AutoscalingConfig(
        1, 2, look_back_period_s=0.5, upscale_delay_s=0, downscale_delay_s=1, hysteresis=0
    )
    day = ((1.0, 1), (3.0, 6), (3.0, 0))
    said = []
    rounds, cold, requests = asyncio.run(
        fleet.scaling(arguments, quick, day, tokens=(32, 128), say=said.append)
    )
    assert requests and all(t.ok for t in requests), said
    assert all(0 < t.arrival <= t.first <= t.finished for t in requests), requests
    assert max(r.target for r in rounds) == 2 and rounds[0].target == 1 and min(cold) > 0
