"""The studies with the simulator: transfers by hand, rates that are the highest, and days that are what they say."""

import inspect
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
from test_simulator import KNOWN, Second
from wrong_versions import wrong_version

from minserve.arrivals import Arrival, fixed
from minserve.bench import fleet_sim, simulator
from minserve.cluster.link import Link
from minserve.config import SHAPES
from minserve.lab import simulated, simulated_costs, simulator_figures
from minserve.lab.report import Report, Row
from minserve.lab.roofline import Machine
from minserve.metrics import SLO
from minserve.simulator.costs import StepCosts, Work
from minserve.simulator.fleet import Round


class Bytes(Second):
    """A second for each step, 10 bytes of keys and values for each token."""

    position_bytes, num_pages, token, weights = 10, 1000, 0.1, 0.1


QUICK = StepCosts(KNOWN, 1e-5)


# ---------------------------------------------------------------- the highest rate
def test_the_highest_rate_that_is_borne():
    for true in (0.03, 0.7, 1.0, 5.0, 60.0):
        found = simulated.highest(lambda rate: rate <= true, 1.0)  # noqa: B023
        assert found <= true < 1.06 * found
    assert simulated.highest(lambda rate: rate <= 2, 1.0, within=1.001) == pytest.approx(2, rel=1e-3)
    assert simulated.highest(lambda rate: False, 1.0) == 0


# ---------------------------------------------------------------- costs
def test_an_assumed_step_by_hand():
    """A device of 1 GB/s and 1 TFLOP/s, half of each reached; nothing is hidden, then all of the shorter one."""
    tiny = SHAPES["llama-3.2-1b"]
    one = simulated_costs.Assumed(tiny, Machine("", 1e9, 1e12, 8e9), 0.5, 0.5, hidden=0.0, launch=2.0)
    weights = 2 * tiny.num_params_read / 0.5e9
    position = 2 * tiny.num_layers * tiny.num_kv_heads * tiny.head_dim * 2
    assert one.position_bytes == position
    matmuls = 2 * tiny.num_params_read / 0.5e12
    pairs = 4 * tiny.num_layers * tiny.num_heads * tiny.head_dim / 0.5e12
    nbytes, flops = weights + 70 * position / 0.5e9, 8 * matmuls + 60 * pairs
    work = Work(3, 30, chunks=1, tokens=5, pairs=30, read=40)
    assert one.of(work) == pytest.approx(2 + nbytes + flops)
    assert nbytes > flops and replace(one, hidden=1.0).of(work) == pytest.approx(2 + nbytes)
    chunk = Work(0, 0, chunks=1, tokens=4000)
    assert (
        replace(one, hidden=1.0).of(chunk) == pytest.approx(2 + 4000 * matmuls) and 4000 * matmuls > weights
    )
    assert one.num_pages == int((0.9 * 8e9 - 2 * tiny.num_params) / position / 16)


def test_costs_are_written_and_read_again():
    report = Report("simulator", "")
    report.add(
        Row(
            f"SmolLM2 bfloat16: {simulated_costs.FITTED}",
            "share",
            [0.9],
            1.0,
            note=simulated_costs.written(QUICK),
        )
    )
    found = simulated_costs.recorded_costs(report)
    assert found.coefficients == pytest.approx(QUICK.coefficients, rel=1e-5)
    assert found.between == pytest.approx(QUICK.between)
    with pytest.raises(ValueError, match="'other' holds no costs"):
        simulated_costs.recorded_costs(Report("other", ""))


# ---------------------------------------------------------------- two kinds of replica
def test_transfers_take_turns_on_the_link():
    """4 tokens are 40 bytes: 4.5 s at 10 bytes/s and half a second each. Both prompts are done at 1."""
    arrivals = [Arrival(0, 4, 3), Arrival(0, 4, 2), Arrival(0.0, 4, 1)]
    a, b, c = simulated.disaggregated(arrivals, Bytes(), Link(10, 0.5))
    assert a.tokens == [1, 6.5, 7.5] and b.tokens == [1, 11] and c.tokens == [1]
    assert [t.ttft for t in (a, b, c)] == [1, 1, 1] and all(t.reason == "length" for t in (a, b, c))
    assert (a.finished, b.finished, c.finished) == (7.5, 11, 1) and a.started == 0


def test_two_that_do_both():
    arrivals = [Arrival(0, 4, 3), Arrival(0.25, 4, 3)]
    assert [t.tokens for t in simulated.colocated(arrivals, Bytes(), 160)] == [[1, 2, 3], [1.25, 2.25, 3.25]]
    (a, b) = simulated.colocated(arrivals, Bytes(), 160, devices=1)
    assert b.tokens == [2, 3, 4]


def test_a_promise_is_in_multiples_of_what_is_undisturbed():
    slo = simulated_costs.promise(Second(between=0.5), 100, 10, (3.0, 2.0))
    assert slo == SLO(3.0, 3.0)


@pytest.mark.slow
def test_a_slow_link_serves_less_and_a_fast_one_wins_where_prompts_are_long():
    long, short = (simulated.split(mix, (1e9, 64e9), seconds=4.0) for mix in ((2048, 256), (512, 512)))
    assert long["prompt"] == 2048 and set(long["chunked"]) == set(simulated.BUDGETS)
    assert long["disaggregated"][1e9] < 0.8 * max(long["chunked"].values()) < long["disaggregated"][64e9]
    assert short["disaggregated"][64e9] < max(short["chunked"].values())


# ---------------------------------------------------------------- one machine
def test_what_a_machine_bears_is_less_than_all_it_can_do():
    most, slo = simulated.full_rate(QUICK), simulated_costs.promise(QUICK, 110, 35, (6.0, 3.0))
    rates = simulated.capacity(QUICK, slo, requests=120, seeds=(0, 1))
    assert all(0.3 * most < rate < 1.1 * most for rate in rates)
    strict = simulated_costs.promise(QUICK, 110, 35, (2.0, 1.2))
    assert max(simulated.capacity(QUICK, strict, requests=120, seeds=(0,))) < rates[0]


def test_all_it_can_do_by_hand():
    """16 seats and a second a step: 16 tokens a second, and 4 of them are an answer."""
    assert simulated.full_rate(Second(), fixed(1, 4), 160) == pytest.approx(4, rel=0.1)


def test_priorities_under_overload():
    queue, mild, strict = (
        simulated.overloaded(QUICK, ageing, seconds=40.0) for ageing in (None, 100, 10_000)
    )
    assert queue["urgent"]["mean"] == pytest.approx(queue["others"]["mean"], rel=0.3)
    assert strict["urgent"]["p99"] < mild["urgent"]["p99"] < queue["urgent"]["p99"]
    assert strict["others"]["mean"] > mild["others"]["mean"] > queue["others"]["mean"]
    assert strict["urgent"]["mean"] < 0.2 * queue["urgent"]["mean"]


# ---------------------------------------------------------------- a day
def test_a_day_is_what_it_says():
    day = simulated.Day(10.0, seconds=1000.0)
    assert day(0) == day(1000) == pytest.approx(1) and day(500) == pytest.approx(25)
    assert day(249) == pytest.approx(day(751)) and day(275) < 9.1  # before a burst, and after it
    assert day(251) == pytest.approx(15 + day(749), rel=1e-2)
    arrivals = day.arrivals(fixed(3, 4), seed=1)
    expected = sum(map(day, range(1000)))
    assert abs(len(arrivals) - expected) < 4 * expected**0.5
    burst = sum(250 <= a.time < 270 for a in arrivals)
    assert abs(burst - 20 * day(260)) < 4 * (20 * day(260)) ** 0.5
    assert arrivals == sorted(arrivals, key=lambda a: a.time) == day.arrivals(fixed(3, 4), seed=1)
    assert arrivals != day.arrivals(fixed(3, 4), seed=2)


def test_a_fixed_fleet_costs_what_it_costs():
    day = simulated.Day(2.0, seconds=100.0)
    found = simulated.scaled(QUICK, 3, slo=SLO(1e3, 1e3), day=day)
    assert found["attainment"] == 1 and found["turns"] == 0
    assert found["replica_hours"] == 3 * 2.0 * len(found["rounds"]) / 3600
    assert found["rounds"][-1].time > 90


def test_the_hasty_one_oscillates_and_the_steady_one_does_not():
    day = simulated.Day(simulated.full_rate(QUICK), seconds=240.0)
    slo = simulated_costs.promise(QUICK, 110, 35, (10.0, 3.0))
    hasty, steady = (
        simulated.scaled(QUICK, settings, slo=slo, day=day)
        for settings in (simulated.HASTY, simulated.STEADY)
    )
    assert hasty["turns"] > 3 * steady["turns"] and steady["attainment"] > hasty["attainment"]
    assert max(r.target for r in steady["rounds"]) > 1


def test_turns():
    of = lambda *targets: simulated.turns([Round(0, 0, 2, 0, 0, target) for target in targets])
    assert of(2, 2, 2) == of(3, 2, 3) == of(1, 1, 2) == 0
    assert of(3, 1, 3) == 2 and of(3, 2, 2, 1) == 1


# ---------------------------------------------------------------- the figures
def report() -> Report:
    found = Report("fleet-sim", "")
    for prompt, output, ratios in ((512, 512, (0.2, 0.7)), (2048, 256, (0.9, 1.4))):
        case = f"prompts of {prompt}, answers of {output}"
        for gb, ratio in zip((1, 64), ratios):
            found.add(Row(f"{case}: disaggregated over {gb} GB/s / chunked", "x", [ratio] * 3, 1.0))
            ideal = f"{case}, perfect overlap: disaggregated over {gb} GB/s / chunked"
            found.add(Row(ideal, "x", [ratio / 2] * 3, 1.0))
    for name, hours, share in (("3 replicas", 1.5, 1.0), ("hasty", 1.0, 0.5), ("steady", 1.25, 0.99)):
        found.add(Row(f"day, {name}: in time", "share", [share], 1.0))
        found.add(Row(f"day, {name}: replica-hours", "h", [hours]))
    for name, urgent, others in (("one queue", 12.0, 12.0), ("1,000 steps", 0.3, 15.0)):
        found.add(Row(f"overload, {name}, urgent: TTFT mean", "s", [urgent]))
        found.add(Row(f"overload, {name}, others: TTFT mean", "s", [others]))
        found.add(Row(f"overload, {name}, others: TTFT p99", "s", [99.0]))
    for load, off in (("0.3", 0.01), ("0.85", 0.05)):
        for what, most in (("throughput", 0.03), ("P99 TTFT", 0.15)):
            case = f"SmolLM2 bfloat16, load {load} of 2.21 requests/s: accuracy of {what}"
            found.add(Row(case, "share", [1 - off], 1.0, 1 - most))
    return found


def texts(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


def test_figures_show_what_was_recorded():
    figures, recorded = simulator_figures, report()
    ax = plt.subplots()[1]
    cells = figures.recorded_heat(recorded)
    assert cells == {(512, 512): {1e9: 0.2, 64e9: 0.7}, (2048, 256): {1e9: 0.9, 64e9: 1.4}}
    assert figures.recorded_heat(recorded, ", perfect overlap")[2048, 256] == {1e9: 0.45, 64e9: 0.7}
    figures.heat(ax, cells)
    assert texts(ax) == ["0.20", "0.70", "0.90", "1.40"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1.00 GB/s", "64.0 GB/s"]
    blue = [patch for patch in ax.patches if patch.get_facecolor()[2] > patch.get_facecolor()[0]]
    assert [(patch.get_x(), patch.get_y()) for patch in blue] == [(1, 1)]
    assert (
        figures.heat_finding(cells) == "Disaggregated wins in 1 of 4 cases, at most 1.40x: 2,048 in, 256 out"
    )
    lost = {mix: {link: x / 2 for link, x in line.items()} for mix, line in cells.items()}
    assert figures.heat_finding(lost).startswith("Disaggregated serves less in all 4 cases; at best 0.70")

    points = figures.recorded_bills(recorded)
    assert points == {"3 replicas": (1.5, 1.0), "hasty": (1.0, 0.5), "steady": (1.25, 0.99)}
    figures.bills(plt.subplots()[1], points)
    assert figures.bills_finding(points) == (
        "Steady instead of hasty: 99% in time instead of 50%, for 1.25x the hours"
    )

    waits = figures.recorded_classes(recorded)
    assert waits == {"one queue": {"urgent": 12, "others": 12}, "1,000 steps": {"urgent": 0.3, "others": 15}}
    figures.classes(plt.subplots()[1], waits)
    assert figures.classes_finding(waits) == "The urgent wait 40 times less, the others 1.2 times as long"

    errors = figures.recorded_accuracy(recorded)
    assert errors["0.85", "throughput"] == pytest.approx((0.05, 0.03)) and len(errors) == 4
    figures.accuracy(plt.subplots()[1], errors)
    assert figures.accuracy_finding(errors) == "3 of 4 predictions are within their target"

    ax = plt.subplots()[1]
    figures.fleet(ax, [Round(60.0 * i, 3 * i, 1 + i, 0, 0, 2 + i) for i in range(4)])
    assert ax.lines[0].get_ydata().tolist() == [2, 3, 4, 5] and ax.get_xlim()[1] == 3
    plt.close("all")


def test_pictures_are_drawn_from_a_report(tmp_path):
    draws = (simulator.draw, fleet_sim.draw, fleet_sim.draw_day, fleet_sim.draw_classes)
    for draw in draws:
        draw(report(), tmp_path / f"{draw.__module__}.{draw.__name__}.png")
    assert len([path for path in tmp_path.iterdir() if path.stat().st_size > 5000]) == len(draws)
    plt.close("all")


def test_rows_and_figures_use_the_same_names():
    """A run of the benchmark with studies that are stubs: what it writes is what the figures read."""
    found = Report("fleet-sim", "")
    mix = {"prompt": 1024, "output": 256, "chunked": {160: 2.0, 256: 4.0}, "disaggregated": {64e9: 6.0}}
    fleet_sim._add_split(found, (1024, 256), [mix, mix], [64e9], "", "")
    assert simulator_figures.recorded_heat(found) == {(1024, 256): {64e9: 1.5}}
    fleet_sim.overload(found, QUICK, quick=True)
    waits = simulator_figures.recorded_classes(found)
    assert list(waits) == list(fleet_sim.AGEING) and all(len(w) == 2 for w in waits.values())
    fleet_sim.days(found, QUICK, SLO(1.0, 1.0), quick=True)
    assert list(simulator_figures.recorded_bills(found)) == list(fleet_sim.SETTINGS)


# ---------------------------------------------------------------- these tests can fail
WRONG = [
    ("        if bears(rate):", "        if not bears(rate):", "highest_rate"),
    ("if high < guess / 64 or low > 64 * guess:", "if high < guess / 4:", "highest_rate"),
    ("nbytes + flops - self.hidden * min(nbytes, flops)", "nbytes + flops - self.hidden * flops", "by_hand"),
    ("self.position * (w.seen + w.read)", "self.position * w.seen", "an_assumed_step"),
    ("self.token * (w.singles + w.tokens)", "self.token * w.tokens", "an_assumed_step"),
    ("self.pair * (w.seen + w.pairs)", "self.pair * w.pairs", "an_assumed_step"),
    ("free = 0.9 * self.machine.memory", "free = self.machine.memory", "an_assumed_step"),
    ("float(cost) / 1e6 for", "float(cost) for", "costs_are_written"),
    ("replace(arrival, output_tokens=1)", "arrival", "take_turns"),
    ("free = max(free, timelines[i].finished) + seconds", "free = timelines[i].finished + seconds", "take_turns"),
    ("arrivals[i].prompt_tokens * costs.position_bytes", "costs.position_bytes", "take_turns"),
    ("costs.of(work([(prompt, 0)]))", "costs.of(work([(prompt, 0)])) + costs.between", "a_promise"),
    ("* DECODING)) + costs.between", "* DECODING))", "a_promise"),
    ("(ends[-fifth] - ends[fifth])", "ends[-1]", "all_it_can_do"),
    ("priority=0 if ageing is None else c", "priority=0", "priorities_under"),
    ('{"ageing": ageing}', "{}", "priorities_under"),
    ("if c == of]", "if True]", "priorities_under"),
    ("rng.random() * peak < self(time)", "True", "a_day_is"),
    ("any(0 <= share - begin < self.lasts", "any(0 <= share - begin < 2 * self.lasts", "a_day_is"),
    ("(1 - math.cos(2 * math.pi * share))", "(1 + math.cos(2 * math.pi * share))", "a_day_is"),
    ("r.running + r.starting + r.leaving for r in rounds) * interval", "r.running for r in rounds)", "fixed_fleet"),
    ("(a > 0) != (b > 0)", "True", "turns"),
    ("if r.target != r.running + r.starting]", "]", "turns"),
]  # fmt: skip


@pytest.mark.parametrize("right, wrong, case", WRONG, ids=[f"{w[2]}: {w[0][:40]}" for w in WRONG])
def test_a_wrong_study_is_noticed(monkeypatch, right, wrong, case):
    its = simulated if right in inspect.getsource(simulated) else simulated_costs
    monkeypatch.setitem(globals(), its.__name__.split(".")[-1], wrong_version(its, right, wrong))
    tests = [test for name, test in globals().items() if name.startswith("test_") and case in name]
    assert tests
    with pytest.raises((Exception, pytest.fail.Exception)) as noticed:
        for test in tests:
            test()
    assert not isinstance(noticed.value, (SyntaxError, NameError))
