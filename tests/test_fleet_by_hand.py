"""The small models of notebook 14: right by hand where a hand suffices, and in the order that theory says."""

import asyncio
from itertools import product

import matplotlib.pyplot as plt
import pytest
from serving_world import serve_in_thread, tiny_folder

from minserve.arrivals import Arrival, fixed, poisson, shared_prefix_groups
from minserve.cluster.link import Link
from minserve.cluster.policies import PowerOfTwo, Replica, RoundRobin
from minserve.lab import disaggregation, figures, routed, simulator_figures
from minserve.lab.balance import CHOICES, fullest, pick
from minserve.lab.scaling import desired


@pytest.mark.parametrize(
    "known, ongoing, size, right",
    [
        ([0, 640, 320], [1, 1, 1], 960, 1),  # who knows most
        ([128, 0], [2, 1], 960, 1),  # 128 of 960 are too few
        ([960, 0], [9, 2], 960, 1),  # out of balance
        ([960, 0], [9, 5], 960, 0),  # 4 is not more than 4
        ([960, 0], [20, 15], 960, 0),  # 20 is not more than 22.5
        ([640, 640], [2, 1], 960, 1),  # equal knowledge
        ([0, 0], [1, 1], 960, 0),  # equal in all
    ],
)
def test_pick(known, ongoing, size, right):
    assert pick(known, ongoing, size) == right


def test_desired():
    asked = [(9, 4, 1, 8), (100, 4, 1, 8), (0, 4, 2, 8), (0, 4, 0, 8), (8, 4, 1, 8)]
    assert [desired(*args) for args in asked] == [3, 8, 2, 0, 2]


def test_three_requests_on_three_replicas():
    """All alone: 2/9 of the cases at random, 2/3 with two choices."""
    cases = list(product(range(3), repeat=3))
    assert sum(len(set(case)) == 3 for case in cases) / len(cases) == 2 / 9
    alone, rounds = 0, 2000
    for seed in range(rounds):
        policy, replicas = PowerOfTwo(seed), [Replica(str(i)) for i in range(3)]
        for _ in range(3):
            policy.choose(replicas).ongoing += 1
        alone += all(replica.ongoing == 1 for replica in replicas)
    assert abs(alone / rounds - 2 / 3) < 0.05


def test_the_minimum_needs_fresh_news():
    fresh = {name: fullest(make) for name, make in CHOICES.items()}
    late = {name: fullest(make, routers=10, news=50) for name, make in CHOICES.items()}
    assert fresh["least"] < fresh["two choices"] < fresh["random"]
    assert late["two choices"] < late["random"] < late["least"]
    assert late["least"] > 1.05 * fullest(CHOICES["least"], news=50)  # a single router knows its own turns
    assert late["random"] == pytest.approx(fresh["random"], rel=0.1)  # it never listened


def test_fullest_is_as_full_as_it_must_be():
    """One replica holds all of them: the mean of the maximum is the mean itself, within chance."""
    assert fullest(CHOICES["least"], replicas=1, each=20.0) == pytest.approx(20, rel=0.25)


# ---------------------------------------------------------------- what the link adds
ROW = dict(prefill=0.5, bytes=10_000_000)


def test_a_transfer_is_predicted():
    link = Link(1e7, 0.01)
    assert disaggregation.predicted(ROW, link, "whole") == pytest.approx(1.01)
    assert disaggregation.predicted(ROW, link, "layer", 20) == pytest.approx(1.2 - 0.5)
    assert disaggregation.predicted(ROW, Link(1e9), "layer", 20) == 0  # all of it is hidden


def test_the_knob_draws_what_was_measured_on_what_was_predicted():
    rows = [
        dict(ROW, mode=mode, bandwidth=speed, latency=0.0, messages=n, transfer=0.1 * n)
        for speed in (5e6, 2e7)
        for mode, n in (("whole", 1), ("layer", 4))
    ]
    ax = disaggregation.knob(figures.axes(), rows, 1e7)
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines["layer, measured"].get_xdata()) == [5, 20]
    assert list(lines["layer, measured"].get_ydata()) == [0.4, 0.4]
    for mode, hidden in (("whole", 0), ("layer", 0.5)):
        line = lines[f"{mode}, predicted"]
        for speed, seconds in zip(line.get_xdata(), line.get_ydata()):
            assert seconds == pytest.approx(max(0, 10 / speed - hidden))
    plt.close(ax.figure)


def test_stairs_rise_to_all():
    ax = figures.axes()
    simulator_figures.stairs(ax, {"real": [3.0, 1.0], "simulated": [2.0]})
    assert list(ax.lines[0].get_xdata()) == [0, 1, 3]
    assert list(ax.lines[0].get_ydata()) == [0, 0.5, 1]
    plt.close(ax.figure)


# ---------------------------------------------------------------- servers that run already
@pytest.mark.slow
def test_a_schedule_through_a_router(tmp_path):
    folder = tiny_folder(tmp_path / "tiny")
    schedule = shared_prefix_groups(poisson(20, 0.4, fixed(8, 4), seed=0), 2, 16)
    with serve_in_thread(folder) as one, serve_in_thread(folder) as two:
        timelines = asyncio.run(routed.routed([one.url, two.url], RoundRobin(), schedule, seed=0))
        steps = [len(server.engine.log) for server in (one, two)]
        both = asyncio.run(routed.beside(one.url, two.url, Arrival(0.01, 32, 2), 6, seed=1))
        more = [len(server.engine.log) - n for server, n in zip((one, two), steps)]
    assert len(timelines) == 8 and all(len(t.tokens) == 4 and t.ok for t in timelines)
    assert min(steps) > 4  # each server had its part
    assert [len(t.tokens) for t in both] == [6, 2] and min(more) > 0
