"""Speculation, drawn: its rounds along the text, where drafts fail, what verifying costs, and where it no longer pays.

    waterfall(ax, log, request)       a row per round: drafts kept, drafts rejected, and the token that comes on top
    positions(ax, lines)              the share of drafts that is kept at least so far
    cost(ax, measured, predicted)     v(k), measured and by the roofline
    surface(ax, v)                    speedup of the best k over batch and chance; on the white line it pays no more

    v         {requests: {k: T(k + 1) / T(1)}}, measured (bench spec, bench spec-cost)
    chance    a of the next draft being right, if those before it were; kept are a + a^2 + ... + a^k
    speedup   (1 + E[kept]) / (k c + v(k)); c: seconds of a drafted token over those of a plain step

Each has a `..._finding` for its title, computed from the same numbers.
Story    notebooks/11_speculative_decoding.ipynb
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from matplotlib.colors import BoundaryNorm
from matplotlib.patches import Rectangle

from minserve.lab.figures import BOUND, LINES
from minserve.lab.layout import INK, label_ends, log_axis, plain
from minserve.lab.report import Report
from minserve.step_log import StepRecord

KEPT, TOP, REJECTED = "#0072B2", "#E69F00", "#FFFFFF"
V = dict[int, dict[int, float]]


# ---------------------------------------------------------------- rounds along the text
class Round(NamedTuple):
    start: int  # place in the answer of the first token that the round decides: 0 is the answer's first
    drafted: int
    kept: int


def rounds(log: Iterable[StepRecord], request: int, prompt: int) -> list[Round]:
    """The steps that made this request's tokens; `prompt`: its tokens before the answer. The first comes with it."""
    its = [row for record in log for row in record.rows if row.request == request and row.sampled]
    return [Round(row.computed + row.num_tokens - row.drafted - prompt, row.drafted, row.kept) for row in its]


def waterfall(ax, its: list[Round], words: list[str] | None = None):
    """Each round's cells begin where the last one's ended. Rejected ones hang below: their places were taken by others.

    words: the answer's tokens, written below them.
    """
    for row, (start, drafted, kept) in enumerate(its):
        cells = [(start + i, KEPT, "") for i in range(kept)] + [(start + kept, TOP, "//")]
        for x, color, hatch in cells:
            ax.add_patch(
                Rectangle((x, row), 1, 0.55, facecolor=color, edgecolor=INK, hatch=hatch, linewidth=0.6)
            )
        for i in range(kept, drafted):
            where = (start + i, row + 0.6)
            ax.add_patch(Rectangle(where, 1, 0.28, facecolor=REJECTED, edgecolor=BOUND, linewidth=0.8))
    first = its[0].start if its else 0
    end = max((start + max(drafted, kept + 1) for start, drafted, kept in its), default=1)
    ax.set(xlim=(first - 0.3, end + 0.3), ylim=(len(its) + 0.2, -0.3))
    ax.set_ylabel("round", fontsize=9)
    ax.set_yticks([row + 0.4 for row in range(len(its))], [str(row + 1) for row in range(len(its))])
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("token of the answer", fontsize=9)
    if words:
        shown = range(first, min(end, len(words)))
        ax.set_xticks([x + 0.5 for x in shown], [words[x] for x in shown], rotation=90, family="monospace")
    looks = [("kept", KEPT, "", INK), ("on top", TOP, "//", INK), ("rejected", REJECTED, "", BOUND)]
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=face, edgecolor=edge, hatch=hatch, label=name)
        for name, face, hatch, edge in looks
    ]
    ax.legend(handles=handles, loc="upper right", fontsize=8, frameon=False)
    plain(ax)
    if words:
        ax.tick_params(axis="x", labelsize=6, length=0)
    return ax


def waterfall_finding(its: list[Round]) -> str:
    kept, drafted = sum(r.kept for r in its), sum(r.drafted for r in its)
    return f"{kept + len(its)} tokens in {len(its)} rounds: {kept} drafts kept, {drafted - kept} rejected"


# ---------------------------------------------------------------- position by position
def positions(ax, lines: dict[str, list[float]]):
    """{drafter: share of its drafts kept at least to place 1, 2, ...}, at most four."""
    if len(lines) > len(LINES):
        raise ValueError(f"{len(lines)} lines, and {len(LINES)} can be told apart: draw two figures")
    for (color, style, marker), shares in zip(LINES, lines.values(), strict=False):
        ax.plot(range(1, len(shares) + 1), shares, color=color, linestyle=style, marker=marker, markersize=4)
    most = max(map(len, lines.values()))
    ax.set(xlim=(0.7, most + 0.3), ylim=(0, 1.02))
    ax.set_xticks(range(1, most + 1))
    ax.set_xlabel("place in the draft", fontsize=9)
    ax.set_ylabel("kept at least so far", fontsize=9)
    ax.grid(axis="y", color="#EEEEEE")
    label_ends(ax, [(name, its[-1], color) for (name, its), (color, *_) in zip(lines.items(), LINES)])
    return plain(ax)


def positions_finding(lines: dict[str, list[float]]) -> str:
    best, shares = max(lines.items(), key=lambda line: sum(line[1]))
    where = f"{shares[0]:.0%} at the first place, {shares[-1]:.0%} as far as place {len(shares)}"
    return f"Most is kept of {best}: {where}"


# ---------------------------------------------------------------- what verifying costs
def cost(ax, measured: V, predicted: V | None = None):
    """One line per batch; the roofline's of the same batch dashed and grey."""
    if len(measured) > len(LINES):
        raise ValueError(f"{len(measured)} batches, and {len(LINES)} can be told apart: draw two figures")
    for its in (predicted or {}).values():
        ax.plot(list(its), list(its.values()), color=BOUND, linestyle="--", linewidth=1.2)
    for (color, style, marker), its in zip(LINES, measured.values(), strict=False):
        ax.plot(list(its), list(its.values()), color=color, linestyle=style, marker=marker, markersize=4)
    every = [v for table in (measured, predicted or {}) for its in table.values() for v in its.values()]
    most = max(max(its) for its in measured.values())
    ax.set(xlim=(0, most * 1.03), ylim=(0, max(every) * 1.06))
    ax.set_xlabel("k, drafted tokens of each request   (grey: the roofline)", fontsize=9)
    ax.set_ylabel("v(k): times a step of one token", fontsize=9)
    ax.axhline(1, color=BOUND, linewidth=0.6, zorder=0)
    names = [
        (f"batch {B}", list(its.values())[-1], color)
        for (B, its), (color, *_) in zip(measured.items(), LINES)
    ]
    label_ends(ax, names)
    return plain(ax)


def cost_finding(measured: V) -> str:
    (few, first), (many, last) = min(measured.items()), max(measured.items())
    k = max(first.keys() & last.keys())
    said = f"A step of {k + 1} tokens each costs {first[k]:.1f} times one of 1 at batch {few}"
    return said if few == many else f"{said}, {last[k]:.1f} times at batch {many}"


# ---------------------------------------------------------------- where it pays
def speedup(chance: float, k: int, v: float, c: float = 0.0) -> float:
    return sum(chance**i for i in range(k + 1)) / (k * c + v)


def best(chance: float, vs: dict[int, float], c: float = 0.0) -> tuple[int, float]:
    """(k, speedup) of the k >= 1 that gains most."""
    return max(((k, speedup(chance, k, v, c)) for k, v in vs.items() if k), key=lambda its: its[1])


def least_chance(vs: dict[int, float], c: float = 0.0) -> float:
    """From which chance on drafts pay, if k is chosen well; 1 if they never do."""
    grid = np.linspace(0, 1, 401)
    return float(next((a for a in grid if best(a, vs, c)[1] >= 1), 1.0))


def at_batch(v: V, batch: float) -> dict[int, float]:
    """v(k) between the batches that were measured: on a line over log(batch)."""
    sizes = sorted(v)
    ks = sorted(set.intersection(*(set(its) for its in v.values())))
    return {k: float(np.interp(np.log(batch), np.log(sizes), [v[B][k] for B in sizes])) for k in ks}


def surface(ax, v: V, c: float = 0.0):
    """Colours: the best k's speedup. The number on each point: that k. White: the line at 1, below which it loses."""
    sizes = sorted(v)
    batches = np.geomspace(sizes[0], sizes[-1], 41)
    chances = np.linspace(0, 1, 41)
    gains = np.array([[best(a, at_batch(v, B), c)[1] for B in batches] for a in chances])
    levels = [0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16]
    high = next((i for i, level in enumerate(levels) if level >= gains.max()), len(levels) - 1)
    low = max(i for i, level in enumerate(levels) if level <= gains.min() or i == 0)
    levels = levels[low : high + 1]
    look = dict(cmap="cividis", norm=BoundaryNorm(levels, 256, extend="both"), extend="both")
    drawn = ax.contourf(batches, chances, gains, levels=levels, **look)
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.02)
    bar.set_label("times the tokens per second without", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    ax.contour(batches, chances, gains, levels=[1], colors=["white"], linewidths=2.2)
    for B in sizes:
        for a in (0.1, 0.3, 0.5, 0.7, 0.9):
            k, gain = best(a, v[B], c)
            text = str(k) if gain >= 1 else "–"
            align = "left" if B == sizes[0] else "right" if B == sizes[-1] else "center"
            note = ax.text(B, a, f" {text} ", ha=align, va="center", fontsize=8, color=INK)
            note.set_bbox(dict(facecolor="white", edgecolor="none", alpha=0.75, pad=0.6))
    log_axis(ax, "x", sizes[0], sizes[-1], base=2)
    ax.set_ylim(0, 1)
    ax.set_xlabel(
        "requests at once   (numbers: the best k; –: none pays; white line: no gain, no loss)", fontsize=8
    )
    ax.set_ylabel("chance of the next draft", fontsize=9)
    return plain(ax)


def surface_finding(v: V, c: float = 0.0) -> str:
    few, many = min(v), max(v)
    low, high = (least_chance(v[B], c) for B in (few, many))
    said = f"Drafts pay from {low:.0%} right on at batch {few}"
    return said if few == many else f"{said}, from {high:.0%} on at batch {many}"


# ---------------------------------------------------------------- recorded numbers
def recorded(report: Report, kind: str = "") -> tuple[V, V]:
    """v of a report of `bench spec` (kind: "copy" or "free") or `bench spec-cost`: (measured, by the roofline)."""
    measured: V = {}
    predicted: V = {}
    for row in report.rows:
        case, _, size = row.case.rpartition(": ")
        parts = size.removeprefix("step of ").removesuffix(" tokens").split(" x ")
        if row.unit == "s" and len(parts) == 2 and case.startswith(kind):
            B, k = int(parts[0]), int(parts[1]) - 1
            measured.setdefault(B, {})[k] = row.median
            predicted.setdefault(B, {})[k] = row.bound
    return tuple(
        {B: {k: t / its[0] for k, t in its.items()} for B, its in table.items()}
        for table in (measured, predicted)
    )


def recorded_positions(report: Report, case: str) -> dict[str, list[float]]:
    """{drafter: shares} of a report of `bench spec`. case: such as "free, batch 1"."""
    end = ": kept by position"
    rows = [row for row in report.rows if row.case.startswith(f"{case}: ") and row.case.endswith(end)]
    return {row.case[len(case) + 2 : -len(end)]: row.samples for row in rows}
