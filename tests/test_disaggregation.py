"""Where a hand-over's time goes: never less than the link allows, and hidden only where a prompt can hide it."""

import matplotlib
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from minserve.cluster.link import Link
from minserve.engine import LLM
from minserve.lab.disaggregation import Halves, HandOver, finding, knob, measure_transfer
from minserve.request import SamplingParams
from minserve.weights import load

PROMPT = [(7 * i * i + 3) % 251 for i in range(40)]
SIZES = dict(num_pages=20, page_size=8, token_budget=16)
ASK = SamplingParams(max_tokens=4, ignore_eos=True)
BYTES = 5 * 8 * 3 * 2 * 2 * 16 * 4  # 5 pages of 8 tokens, 3 layers, 2 heads, keys and values of 16 floats


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("llama-3"))


@pytest.mark.parametrize("mode, messages", [("whole", 1), ("layer", 9)])
def test_a_hand_over_takes_no_less_than_its_link(model, mode, messages):
    link = Link(bandwidth=4 * BYTES, latency=0.02)
    with Halves(model, mode, link, **SIZES) as halves:
        its = halves.hand_over(PROMPT, ASK)
    (alone,) = LLM(model, max_running=1, **SIZES).generate(PROMPT, ASK)[0]
    assert its.tokens == alone.tokens and (its.num_bytes, its.messages) == (BYTES, messages)
    assert its.bound(mode, link) <= its.transfer and its.decode > 0
    assert its.ttft >= link.predicted_seconds(BYTES, messages) == pytest.approx(0.25 + 0.02 * messages)


def test_the_bounds():
    its = HandOver(prefill=1.0, transfer=0, decode=0, num_bytes=1000, messages=10, tokens=[])
    slow, fast = Link(500.0, 0.1), Link(2000.0, 0.01)
    assert its.bound("whole", slow) == 3.0 and its.bound("layer", slow) == 2.0
    assert its.bound("whole", fast) == pytest.approx(0.6) and its.bound("layer", fast) == 0.0


def test_rows_and_their_figure(model):
    rows = measure_transfer(model, PROMPT, [Link(4 * BYTES), Link(20 * BYTES)], repeats=1, **SIZES)
    assert [row["mode"] for row in rows] == ["whole", "layer"] * 2
    for row in rows:
        assert row["ttft"] == pytest.approx(row["prefill"] + row["transfer"])
        assert row["transfer"] >= row["bound"] and row["bytes"] == BYTES
    axes = knob(plt.figure().add_subplot(), rows, bandwidth=1e6)
    drawn = {line.get_label(): [*line.get_ydata()] for line in axes.get_lines()}
    for mode in ("whole", "layer"):
        assert drawn[f"{mode}, measured"] == [row["transfer"] for row in rows if row["mode"] == mode]
        assert drawn[f"{mode}, predicted"] == sorted(drawn[f"{mode}, predicted"], reverse=True)
    # from 1.5 times slower than the slowest link to 1.5 times faster than the fastest
    whole = drawn["whole, predicted"]
    assert (whole[0], whole[-1]) == pytest.approx((1.5 / 4, 1 / 1.5 / 20))
    plt.close("all")


def test_the_title_follows_the_rows():
    rows = [
        dict(mode=mode, bandwidth=speed, transfer=seconds)
        for mode, speed, seconds in [("whole", 1e6, 4.0), ("layer", 1e6, 1.0), ("whole", 1e9, 0.1)]
    ]
    assert finding(rows) == "at 1.00 MB/s, layers hide 75% of the transfer behind the prompt"
