"""Every figure is a function of recorded numbers: axes and data in, axes out. None of them measures.

    ladder(ax, rungs)                each optimisation: measured, bound, and the gap between them
    roofline(ax, machine, points)    work placed under the two roofs of a machine
    curves(ax, lines, ...)           time against length: the shapes of two algorithms
    batch_curve(ax, ...)             tokens/s against batch size, measured and predicted
    kv_bars(ax, rows)                KV bytes per token of MHA, GQA, MQA
    user_bars(ax, rows)              requests that fit on a GPU
    peers(ax, groups)                several engines at several kinds of work
    steps(ax, groups, parts)         what one step's time is made of, in multiples of its bound
    cache_layout(ax)                 where one number of a KV cache lies
    titled(ax, title, where)         title = the finding, below it the machine
    save(ax, path, title, where)     the one place that writes

Lines differ in style and marker as well as colour, so that they survive a photocopier and every pair of eyes.
Labels are placed by looking: text that would lie on a line, a point or another text moves until it does not.

Sources  colours: Okabe and Ito 2008, "Color Universal Design"
Story    each notebook's figure is figures/NN_name.png, drawn from the JSON beside it
"""

import io
from functools import partial
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle
from matplotlib.transforms import ScaledTranslation
from PIL import Image

from minserve.lab.layout import INK, label_below, label_ends, log_axis, plain, tick_label
from minserve.lab.report import quantity

MEASURED, BOUND = "#0072B2", "#8A8A8A"
LINES = [("#0072B2", "-", "o"), ("#D55E00", "--", "s"), ("#009E73", "-.", "^"), ("#CC79A7", ":", "D")]
HATCHES = ["", "//", "..", "xx"]
PEERS = [(color, hatch) for (color, *_), hatch in zip(LINES, HATCHES, strict=True)] + [("#E69F00", "\\\\")]
STACKED = [*PEERS, ("#56B4E9", "++")]


def axes(width: float = 6.4, height: float = 3.2):
    """Fresh axes of a size that a notebook and the README both show without scaling."""
    return plt.subplots(figsize=(width, height))[1]


# ---------------------------------------------------------------- the figures
def ladder(ax, rungs: list[tuple[str, float, float]]):
    """One row per optimisation: what was measured, the bound it cannot beat, and the gap between them.

    rungs: (label, measured tokens/s, bound tokens/s) in the order the notebooks build them.
    Dots, not bars: on a log axis a bar's length means nothing.
    """
    margin = partial(
        ax.text, va="center", ha="right", transform=ax.get_yaxis_transform()
    )  # x in axes, y in rows
    for row, (_, measured, bound) in enumerate(rungs):
        ax.plot([measured, bound], [row, row], color=BOUND, linewidth=1, zorder=1)
        ax.scatter(measured, row, color=MEASURED, s=45, zorder=2)
        ax.scatter(bound, row, color=BOUND, marker="|", s=160, linewidths=2, zorder=2)
        margin(1.12, row, f"{measured:,.{0 if measured >= 10 else 1}f}", fontsize=9, color=INK)
        margin(1.28, row, f"{measured / bound:.0%}", fontsize=9, color=INK)
    margin(1.12, -0.75, "tok/s", fontsize=8, color=BOUND)
    margin(1.28, -0.75, "of bound", fontsize=8, color=BOUND)
    ax.set_yticks(range(len(rungs)), [label for label, _, _ in rungs])
    ax.set_ylim(len(rungs) - 0.5, -0.5)  # the first notebook on top: read down, get faster
    values = [value for _, *both in rungs for value in both]
    log_axis(ax, "x", min(values) / 1.5, max(values) * 1.3)
    ax.set_xlabel("output tokens per second, log scale   (dot: measured; tick: roofline bound)", fontsize=9)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#EEEEEE", zorder=0)
    return ax


def roofline(ax, machine, points: list[tuple[str, float, float | None]]):
    """The two roofs of `machine` (a lab.roofline.Machine) and the work under them.

    points: (label, flops per byte, measured flops/s); None instead of a measurement puts a hollow point on
    the roof, as a prediction. Each label ends in the share of the roof that was reached.
    """

    def roof(x):
        return min(x * machine.read_bandwidth, machine.flops)

    placed = [(label, x, roof(x) if y is None else y, y is None) for label, x, y in points]
    left = min([machine.ridge, *(x for _, x, _, _ in placed)]) / 8
    right = max([machine.ridge, *(x for _, x, _, _ in placed)]) * 30
    bottom = min([roof(left), *(y for _, _, y, _ in placed)]) / 4
    log_axis(ax, "x", left, right)
    log_axis(ax, "y", bottom, machine.flops * 4, unit="FLOP/s")
    corners = [left, machine.ridge, right]
    ax.plot(corners, [roof(x) for x in corners], color=INK, linewidth=1.5)
    ax.plot([machine.ridge] * 2, [bottom, machine.flops], color=BOUND, linewidth=0.8, linestyle=":")
    for _, x, y, predicted in placed:
        ax.plot([x, x], [y, roof(x)], color=BOUND, linewidth=0.8, zorder=1)
        face = "white" if predicted else MEASURED
        ax.scatter(x, y, s=36, facecolor=face, edgecolor=MEASURED, zorder=3)
    flat = f"matmul {quantity(machine.flops, 'FLOP/s')}, ridge at {machine.ridge:.3g} flops per byte"
    note = partial(ax.annotate, textcoords="offset points", fontsize=8, color=INK)
    note(flat, (right, machine.flops), (-2, 4), ha="right", va="bottom")
    part = left * (machine.ridge / left) ** 0.7  # up the slope, where there is room to its left
    note(
        f"read {quantity(machine.read_bandwidth, 'B/s')}",
        (part, roof(part)),
        (-8, 6),
        ha="right",
        va="bottom",
    )
    names = [
        (label + ("" if predicted else f"  {y / roof(x):.0%}"), x, y) for label, x, y, predicted in placed
    ]
    label_below(ax, names)
    ax.set_xlabel(
        "flops per byte   (filled: measured, % of the roof above it; hollow: predicted)", fontsize=9
    )
    return plain(ax)


def curves(ax, lines: list[tuple[str, list[float], list[float]]], xlabel: str, unit: str = "s", log=True):
    """One line per algorithm, named at its right end. On log axes the slope is the exponent: 2 is quadratic.

    lines: (label, lengths, seconds or another `unit`), at most four.
    """
    if len(lines) > len(LINES):
        raise ValueError(
            f"{len(lines)} lines, and {len(LINES)} can be told apart in one figure: draw two figures"
        )
    for (color, style, marker), (_, xs, ys) in zip(LINES, lines, strict=False):
        ax.plot(xs, ys, color=color, linestyle=style, marker=marker, markersize=4, linewidth=1.6)
    xs, ys = ([value for line in lines for value in line[i]] for i in (1, 2))
    if log:
        log_axis(ax, "x", min(xs) / 1.15, max(xs) * 1.15)
        log_axis(ax, "y", min(ys) / 1.5, max(ys) * 1.5, unit=unit)
    else:
        ax.set(xlim=(0, max(xs) * 1.03), ylim=(0, max(ys) * 1.08))
        ax.xaxis.set_major_formatter(lambda value, _: tick_label(value))
        ax.yaxis.set_major_formatter(lambda value, _: tick_label(value, unit))
    label_ends(ax, [(label, ys[-1], LINES[i][0]) for i, (label, _, ys) in enumerate(lines)])
    ax.set_xlabel(xlabel, fontsize=9)
    return plain(ax)


def batch_curve(
    ax, batches: list[int], measured: list[float], predicted: list[float], crossover: float | None = None
):
    """Tokens per second of whole batches; where the batch leaves the bandwidth roof stands a dotted line."""
    lines = [("roofline", batches, predicted), ("measured", batches, measured)]
    for (_, xs, ys), (color, style, marker) in zip(
        lines, [(BOUND, "--", ""), (MEASURED, "-", "o")], strict=True
    ):
        ax.plot(xs, ys, color=color, linestyle=style, marker=marker, markersize=4, linewidth=1.6)
    log_axis(ax, "x", min(batches) / 1.15, max(batches) * 1.15, base=2)
    log_axis(ax, "y", min(*measured, *predicted) / 1.5, max(*measured, *predicted) * 2)
    label_ends(ax, [("roofline", predicted[-1], BOUND), ("measured", measured[-1], MEASURED)])
    if crossover and min(batches) < crossover < max(batches):
        ax.axvline(crossover, color=BOUND, linewidth=0.8, linestyle=":")
        text = f"batch {crossover:.0f}: bandwidth | arithmetic"
        ax.text(crossover, 0.97, text, transform=ax.get_xaxis_transform(), fontsize=8, ha="center", va="top",
                bbox=dict(facecolor="white", edgecolor="none", pad=1))  # fmt: skip
    ax.set_xlabel("sequences in the batch", fontsize=9)
    ax.set_ylabel("tokens per second", fontsize=9)
    return plain(ax)


def kv_bars(ax, rows: list[tuple[str, float]]):
    """KV bytes per token, per way of sharing heads. rows: (label, bytes)."""
    return bars(ax, [(label, value, f"{value:,.0f} B") for label, value in rows], "KV cache, bytes per token")


def user_bars(ax, rows: list[tuple[str, int]]):
    """Requests that fit in what the weights leave free. rows: (label, requests)."""
    return bars(ax, [(label, value, f"{value:,}") for label, value in rows], "requests that fit at once")


def bars(ax, rows: list[tuple[str, float, str]], xlabel: str):
    """Horizontal bars from zero, the amount written at each end; hatched, so that colour is not needed."""
    longest = max(value for _, value, _ in rows) or 1
    for row, (_, value, text) in enumerate(rows):
        color, hatch = LINES[row % 4][0], HATCHES[row % 4]
        ax.barh(row, value, height=0.6, facecolor=color + "55", edgecolor=color, hatch=hatch, linewidth=1)
        ax.text(value + longest * 0.015, row, text, va="center", fontsize=9, color=INK)
    ax.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, longest * 1.22)  # room for the number behind the longest bar
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.xaxis.set_major_locator(plt.MaxNLocator(5, integer=True))
    ax.set_xlabel(xlabel, fontsize=9)
    ax.tick_params(axis="y", length=0)
    return plain(ax)


def peers(ax, groups: list[tuple[str, list[tuple[str, float]]]]):
    """One group of bars per kind of work: each engine's rate as a multiple of the first one's, the rate at its end.

    groups: (kind of work, [(engine, tokens per second), ...]), the same engine first in each. The scale starts at 0.
    """
    engines = list(dict.fromkeys(name for _, rows in groups for name, _ in rows))
    looks = {name: PEERS[i % len(PEERS)] for i, name in enumerate(engines)}
    longest = max(rate / rows[0][1] for _, rows in groups for _, rate in rows)
    places, row = {}, 0.0
    for kind, rows in groups:
        ax.text(longest * 0.01, row, kind, va="center", fontsize=9, fontweight="bold", color=INK)
        for name, rate in rows:
            row += 1
            color, hatch = looks[name]
            share = rate / rows[0][1]
            ax.barh(
                row, share, height=0.75, facecolor=color + "66", edgecolor=color, hatch=hatch, linewidth=1
            )
            text = f"{rate:,.{0 if rate >= 10 else 1}f} tok/s"
            end = ax.text(share + longest * 0.015, row, text, va="center", fontsize=8, color=INK)
            end.set_bbox(dict(facecolor="white", edgecolor="none", pad=0.5))  # the line at 1 passes behind it
            places[row] = name
        row += 1.5
    ax.axvline(1, color=BOUND, linewidth=0.8, linestyle=":", zorder=0)
    ax.set_yticks(list(places), list(places.values()))
    ax.set(xlim=(0, longest * 1.22), ylim=(row - 0.7, -0.7))
    ax.set_xlabel(
        f"times {engines[0]}'s rate at the same work   (behind each bar: tokens per second)", fontsize=9
    )
    ax.tick_params(axis="y", length=0)
    return plain(ax)


def steps(ax, groups, parts: tuple[str, ...]):
    """One bar per way to run a step, stacked from its parts; 1 is the group's bound, the seconds are at the end.

    groups: (kind of work, bound in seconds, [(way, seconds, {part: seconds}), ...]); at most six parts.
    """
    looks = dict(zip(parts, STACKED, strict=True))
    longest = max(
        max(seconds, sum(its.values())) / bound for _, bound, ways in groups for _, seconds, its in ways
    )
    places, row = {}, 0.0
    for kind, bound, ways in groups:
        text = f"{kind}   (bound {quantity(bound, 's')})"
        ax.text(longest * 0.01, row, text, va="center", fontsize=9, fontweight="bold", color=INK)
        for way, seconds, its in ways:
            row, left = row + 1, 0.0
            for part, (color, hatch) in looks.items():
                wide = its[part] / bound
                ax.barh(row, wide, left=left, height=0.75, facecolor=color + "88", edgecolor=color, hatch=hatch,
                        linewidth=0.8, label=part if not places else None)  # fmt: skip
                left += wide
            ax.text(left + longest * 0.015, row, quantity(seconds, "s"), va="center", fontsize=8, color=INK)
            ax.plot([1, 1], [row - 0.5, row + 0.5], color=INK, linewidth=1.4)
            places[row] = way
        row += 1.5
    ax.set_yticks(list(places), list(places.values()))
    ax.set(xlim=(0, longest * 1.14), ylim=(row - 0.7, -0.7))
    ax.set_xlabel("times the bound, which is the line at 1   (behind each bar: the whole step)", fontsize=9)
    ax.tick_params(axis="y", length=0)
    below = ScaledTranslation(
        0, -32 / 72, ax.figure.dpi_scale_trans
    )  # points: the label has its height in any figure
    ax.legend(ncols=len(parts), loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=ax.transAxes + below,
              fontsize=8, frameon=False, handlelength=1.4, columnspacing=1.2)  # fmt: skip
    return plain(ax)


def cache_layout(ax, slots=4, heads=2, channels=4, used=3, marked=(2, 1, 3)):
    """One layer's keys as they lie in memory: a row per slot, in each cell its offset, one worked out."""
    s, g, d = marked
    for slot, head, channel in product(range(slots), range(heads), range(channels)):
        x, color = head * (channels + 0.35) + channel, LINES[head % 4][0]
        offset, is_marked = (slot * heads + head) * channels + channel, (slot, head, channel) == marked
        look = dict(facecolor=color + "33") if slot < used else dict(facecolor="white", linestyle=":")
        edge = (
            dict(edgecolor=INK, linewidth=2.2, zorder=3)
            if is_marked
            else dict(edgecolor=color, linewidth=0.8)
        )
        ax.add_patch(Rectangle((x, slot), 1, 0.8, **look, **edge))
        weight = "bold" if is_marked else "normal"
        ax.text(
            x + 0.5, slot + 0.4, offset, ha="center", va="center", fontsize=9, color=INK, fontweight=weight
        )
    width = heads * (channels + 0.35)
    for slot in range(slots):
        state = f"token {slot}" if slot < used else "free: never read"
        ax.text(-0.25, slot + 0.4, f"slot {slot}", ha="right", va="center", fontsize=9, color=INK)
        ax.text(
            width, slot + 0.4, state, ha="left", va="center", fontsize=9, color=INK if slot < used else BOUND
        )
    for head in range(heads):
        place = head * (channels + 0.35) + channels / 2, -0.25
        ax.text(
            *place, f"head {head}: {channels} channels", ha="center", fontsize=9, color=LINES[head % 4][0]
        )
    sum_ = f"k[{s}, {g}, {d}] lies (s x G + g) x D + d = ({s} x {heads} + {g}) x {channels} + {d}"
    total = f" = {(s * heads + g) * channels + d} elements after the start"
    ax.text(0, slots + 0.35, sum_ + total, fontsize=9, color=INK, va="center")
    ax.set(xlim=(-1.3, width + 2.4), ylim=(slots + 0.7, -0.7))
    ax.axis("off")
    return ax


def save(ax, path: str | Path, title: str, where: str) -> None:
    """Write it, opaque and small."""
    titled(ax, title, where)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    ax.figure.savefig(drawn, bbox_inches="tight", dpi=150, facecolor="white", transparent=False)
    plt.close(ax.figure)
    Image.open(drawn).convert("RGB").quantize(64).save(path, format="PNG", optimize=True)


def titled(ax, title: str, where: str):
    """The title states what the figure shows; the line under it, which machine said so."""
    ax.set_title(title, loc="left", fontsize=11, pad=24, color=INK)
    ax.annotate(
        where, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", fontsize=8, color=BOUND
    )
    return ax
