"""A run of the load generator in pictures, from the times of its requests.

    draw(requests, where, path)     all three below each other: what `load --figure` writes
    bars(ax, requests)              a row per request: due, sent, first text, last token
    flight(ax, requests)            how many were in flight, over the same seconds
    spread(ax, requests)            share of values up to x: TTFT, TPOT, every gap between tokens

    requests: the dicts that `load --json` records, times in seconds from the start of the run (lab/load_report.py)

Story    notebooks/13_serving_and_slos.ipynb
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.transforms import ScaledTranslation

from minserve.lab.figures import BOUND, LINES, save
from minserve.lab.layout import INK, log_axis, plain
from minserve.lab.report import quantity
from minserve.metrics import OK, percentile

WAIT, PREFILL, DECODE, FAILED = BOUND, LINES[1][0], LINES[0][0], INK


def draw(requests: Sequence[dict], where: str, path: Path | str) -> None:
    heights = [min(5.0, 1.2 + 0.06 * len(requests)), 1.3, 2.2]
    _, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(7.2, sum(heights) + 1.6), height_ratios=heights, layout="constrained"
    )
    bars(top, requests)
    top.tick_params(axis="x", labelbottom=False)  # they are below
    flight(middle, requests)
    middle.set_xlim(top.get_xlim())
    spread(bottom, requests)
    save(top, path, title(requests), where)


def title(requests: Sequence[dict]) -> str:
    """What the picture shows, from its numbers."""
    good = [r for r in requests if r["reason"] in OK]
    waits = [r["first"] - r["due"] for r in good if r["first"] is not None]
    said = f"{len(good):,} of {len(requests):,} requests answered"
    if not waits:
        return said
    half, last = (quantity(percentile(waits, q), "s") for q in (50, 99))
    return f"{said}: first text within {half} for half of them, {last} for 99%"


def bars(ax, requests: Sequence[dict]):
    """Dotted: due, and not sent yet. Thin: no text yet. Thick: from the first text to the last token. x: it failed."""
    wide = max(0.8, min(6.0, 240 / len(requests)))  # points
    line = dict(capstyle="butt", zorder=2)
    for y, r in enumerate(requests):
        first = r["first"] if r["first"] is not None else r["ended"]
        ax.hlines(y, r["due"], r["sent"], color=WAIT, linewidth=wide * 0.5, linestyle=(0, (1, 1)), **line)
        ax.hlines(y, r["sent"], first, color=PREFILL, linewidth=wide * 0.5, **line)
        if r["tokens"]:
            ax.hlines(y, first, max(first, r["tokens"][-1]), color=DECODE, linewidth=wide, **line)
        if r["reason"] not in OK:
            ax.plot(r["ended"], y, marker="x", color=FAILED, markersize=5, zorder=3)
    looks = [
        ("due, not sent yet", WAIT, ":", 1.5),
        ("no text yet", PREFILL, "-", 1.5),
        ("tokens come", DECODE, "-", 4),
    ]
    for label, color, style, width in looks:
        ax.plot([], [], color=color, linestyle=style, linewidth=width, label=label)
    ax.plot([], [], color=FAILED, marker="x", linestyle="", markersize=5, label="failed")
    legend_below(ax, points=20)
    end = max(r["ended"] for r in requests)
    ax.set(xlim=(-0.01 * end, end * 1.02), ylim=(len(requests) - 0.3, -0.7))
    ax.yaxis.set_major_locator(plt.MaxNLocator(6, integer=True))
    ax.set_ylabel("request", fontsize=9)
    ax.grid(axis="x", color="#EEEEEE", zorder=0)
    return plain(ax)


def flight(ax, requests: Sequence[dict]):
    """In flight: sent, and not yet ended."""
    steps = in_flight(requests)
    ax.step(*zip(*steps), where="post", color=DECODE, linewidth=1.4)
    ax.fill_between(*zip(*steps), step="post", color=DECODE, alpha=0.15)
    ax.set_ylim(0, max(count for _, count in steps) * 1.15)
    ax.yaxis.set_major_locator(plt.MaxNLocator(4, integer=True))
    ax.set_ylabel("in flight", fontsize=9)
    ax.set_xlabel("seconds", fontsize=9)
    ax.grid(axis="x", color="#EEEEEE", zorder=0)
    return plain(ax)


def spread(ax, requests: Sequence[dict]):
    """Each line rises from 0 to 1 over the values of one latency; where it crosses 0.99 is the p99."""
    good = [r for r in requests if r["reason"] in OK and r["tokens"]]
    first = [r for r in good if r["first"] is not None]
    many = [r for r in first if len(r["tokens"]) > 1]
    values = {
        "TTFT": [r["first"] - r["due"] for r in first],
        "TPOT": [max(0.0, r["tokens"][-1] - r["first"]) / (len(r["tokens"]) - 1) for r in many],
        "ITL": [b - a for r in good for a, b in pairwise(r["tokens"])],
    }
    shown = [x for its in values.values() for x in its if x > 0]
    if not shown:
        ax.text(0.5, 0.5, "nothing was answered", ha="center", transform=ax.transAxes, color=INK)
        return plain(ax)
    least = min(shown)
    for (name, its), (color, style, _) in zip(values.items(), LINES):
        if its:
            ordered = sorted(max(x, least) for x in its)
            ordered, shares = [ordered[0], *ordered], [i / len(ordered) for i in range(len(ordered) + 1)]
            p50, p99 = (quantity(percentile(its, q), "s") for q in (50, 99))
            label = f"{name}: p50 {p50}, p99 {p99}"
            ax.step(ordered, shares, where="post", color=color, linestyle=style, linewidth=1.6, label=label)
    ax.axhline(0.99, color=BOUND, linewidth=0.8, linestyle=":")
    log_axis(ax, "x", least / 1.3, max(shown) * 1.3, unit="s")
    ax.set(ylim=(0, 1.04))
    ax.set_ylabel("share of values", fontsize=9)
    ax.set_xlabel("up to   (log scale; gaps of 0 are drawn at the left edge)", fontsize=9)
    legend_below(ax, points=34)
    return plain(ax)


def legend_below(ax, points: float) -> None:
    """So far under the axes, where no line can pass through it."""
    below = ax.transAxes + ScaledTranslation(0, -points / 72, ax.figure.dpi_scale_trans)
    place = dict(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below)
    ax.legend(**place, ncols=4, fontsize=8, frameon=False)


def in_flight(requests: Sequence[dict]) -> list[tuple[float, int]]:
    """(time, requests in flight from then on), at every change."""
    steps = sorted([(r["sent"], 1) for r in requests] + [(r["ended"], -1) for r in requests])
    found, count = [(0.0, 0)], 0
    for time, step in steps:
        count += step
        found.append((time, count))
    return found
