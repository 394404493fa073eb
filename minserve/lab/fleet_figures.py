"""Notebook 14's figures of a fleet: how many replicas over time, what waited for them, what a policy is worth.

    replicas(ax, rounds, needs)     steps: those that run, those asked for; shaded where fewer ran than were needed
    queue(ax, rounds, target)       requests under way, and how many the running replicas are meant for
    oscillation(rounds, ...)        both below each other, for two settings beside each other
    policies(ax, rows, bound)       bars: the share of prompt tokens that a cache held, and the median TTFT in words

    rounds: what an autoscaler saw and decided, lived (lab/fleet.py) or replayed (lab/scaling.py)

Story    notebooks/14_the_fleet.ipynb
"""

from collections.abc import Sequence
from functools import partial

import matplotlib.pyplot as plt

from minserve.cluster.autoscaler import Round
from minserve.lab.figures import BOUND, HATCHES, LINES, MEASURED, titled
from minserve.lab.layout import INK, plain
from minserve.lab.report import Report, quantity
from minserve.lab.scaling import Replay

ASKED, SHORT = LINES[1][0], "#F6D9C8"
CACHED, TTFT = 1.02, 1.14  # where the columns beside the bars begin, in widths of the axes


def replicas(ax, rounds: Sequence[Round], needs: Sequence[int] = ()):
    """Between the two lines replicas start."""
    times = [r.time for r in rounds]
    running, asked = [r.running for r in rounds], [r.running + r.starting for r in rounds]
    if needs:
        most = [max(need, n) for need, n in zip(needs, running)]
        ax.fill_between(times, running, most, step="post", color=SHORT, linewidth=0, label="missing")
        ax.step(times, needs, where="post", color=BOUND, linewidth=1, linestyle=":", label="needed")
    ax.step(times, asked, where="post", color=ASKED, linewidth=1.2, linestyle="--", label="asked for")
    ax.step(times, running, where="post", color=MEASURED, linewidth=1.8, label="running")
    ax.set(ylim=(0, max([*asked, *needs]) + 0.6), xlim=(times[0], times[-1]))
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.set_ylabel("replicas", fontsize=9)
    ax.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 0.98))
    plain(ax)
    return ax


def queue(ax, rounds: Sequence[Round], target_ongoing_requests: float):
    """What is above the dashed line is more than the running replicas are meant for."""
    times = [r.time for r in rounds]
    meant = [target_ongoing_requests * r.running for r in rounds]
    ax.fill_between(times, [r.ongoing for r in rounds], step="post", color=MEASURED, alpha=0.25, linewidth=0)
    ax.step(times, [r.ongoing for r in rounds], where="post", color=MEASURED, linewidth=1, label="under way")
    ax.step(times, meant, where="post", color=INK, linewidth=1, linestyle="--", label="meant for what runs")
    ax.set(ylim=(0, None), xlim=(times[0], times[-1]))
    ax.set_xlabel("seconds", fontsize=9)
    ax.set_ylabel("requests", fontsize=9)
    ax.legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 0.98))
    plain(ax)
    return ax


def fleet_finding(rounds: Sequence[Round]) -> str:
    """What the two figures show, of a fleet that was lived."""
    first, most, last = rounds[0].running, max(r.running for r in rounds), rounds[-1].running
    changes = sum(r.target != r.running + r.starting for r in rounds)
    queued = max(r.ongoing for r in rounds)
    return f"{first} → {most} → {last} replicas in {changes} decisions, for up to {queued} requests at once"


def lived(rounds: Sequence[Round], target_ongoing_requests: float):
    """A fleet of processes: its replicas above, its requests below. Returns the upper axes."""
    figure, axes = plt.subplots(2, 1, figsize=(6.6, 4.0), sharex=True, layout="constrained")
    replicas(axes[0], rounds)
    queue(axes[1], rounds, target_ongoing_requests)
    parts = [part for ax in axes for part in zip(*ax.get_legend_handles_labels())]
    for ax in axes:
        ax.get_legend().remove()
    figure.legend(*zip(*parts), frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    return axes[0]


def oscillation(runs: dict[str, Replay], target_ongoing_requests: float, where: str):
    """A column for each {label: replay}, replicas above and requests below. Returns the figure."""
    figure, axes = plt.subplots(
        2,
        len(runs),
        figsize=(4.2 * len(runs), 4.2),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for (label, run), (above, below) in zip(runs.items(), axes.T):
        replicas(above, run.rounds, run.needs)
        queue(below, run.rounds, target_ongoing_requests)
        above.set_xlabel(f"{label}: {run.changes} changes, {run.turns} turns", fontsize=9)
        for ax in (above, below):
            ax.get_legend().remove()
    parts = [part for ax in axes[:, -1] for part in zip(*ax.get_legend_handles_labels())]
    figure.legend(*zip(*parts), frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    worst, best = (run.turns for run in list(runs.values())[:: len(runs) - 1 or 1][:2])
    titled(axes[0, 0], f"The same bursts: it turns {worst} times, or {best}", where)
    return figure


def policies(ax, rows: dict[str, tuple[float, float]], bound: float, where: str = ""):
    """rows: {policy: (share of prompt tokens cached, median TTFT in seconds)}; the tick: each prefix computed once."""
    beside = partial(ax.text, transform=ax.get_yaxis_transform())  # x in axes, y in rows
    for y, ((share, ttft), hatch) in enumerate(zip(rows.values(), HATCHES)):
        face = MEASURED if y == len(rows) - 1 else "#9ECBE8"
        ax.barh(y, share, height=0.6, color=face, hatch=hatch, edgecolor="white")
        beside(CACHED, y, f"{share:.0%}", va="center", fontsize=9, color=INK)
        beside(TTFT, y, quantity(ttft, "s"), va="center", fontsize=9, color=INK)
    ax.axvline(bound, color=BOUND, linewidth=1.2, linestyle="--")
    beside(CACHED, -0.75, "cached", fontsize=8, color=BOUND)
    beside(TTFT, -0.75, "TTFT p50", fontsize=8, color=BOUND)
    ax.set_yticks(range(len(rows)), [policy.replace("_", " ") for policy in rows])
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 1.15 * bound))
    ax.set_xlabel(
        "share of prompt tokens that a cache held   (dashed: each prefix computed once)", fontsize=9
    )
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    titled(ax, policies_finding(rows), where)
    return ax


def policies_finding(rows: dict[str, tuple[float, float]]) -> str:
    blind, best = rows["round_robin"], rows["prefix_aware"]
    return f"By prefix {best[0]:.0%} of prompt tokens are in a cache, by turns {blind[0]:.0%}"


def recorded_policies(report: Report) -> tuple[dict[str, tuple[float, float]], float]:
    """(rows, bound) for policies(), from a report of `lab.fleet routing`."""
    names = [row.case.removesuffix(": cached") for row in report.rows if row.case.endswith(": cached")]
    rows = {
        name: (report.row(f"{name}: cached").median, report.row(f"{name}: TTFT p50").median) for name in names
    }
    return rows, report.row(f"{names[0]}: cached").bound
