"""Where ticks and labels go in a figure: by looking at what is drawn already, never by luck.

Story    lab/figures.py draws, lab/layout.py places
"""

import math

from matplotlib.transforms import Bbox

from minserve.lab.report import quantity

INK = "#222222"


def log_axis(ax, which: str, low: float, high: float, unit: str = "", base: int = 10) -> None:
    """A logarithmic axis from low to high, with ticks that are read as numbers: 1, 2, 5, 10 or 1, 2, 4, 8."""
    axis = {"x": ax.xaxis, "y": ax.yaxis}[which]
    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    (ax.set_xlim if which == "x" else ax.set_ylim)(low, high)
    ticks = ticks_between(low, high, base)
    axis.set_ticks(ticks, [tick_label(tick, unit) for tick in ticks])
    axis.set_ticks([], minor=True)


def ticks_between(low: float, high: float, base: int = 10) -> list[float]:
    """At most eight round numbers within [low, high], in the finest of a few spacings; finer only for want of two."""
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    powers = [(k, float(base) ** k) for k in range(first, last + 1)]
    for steps in [(1, 2, 5), (1, 3), (1,)] if base == 10 else [(1,)]:
        ticks = [step * power for _, power in powers for step in steps if low <= step * power <= high]
        if len(ticks) <= 8:
            break
    if len(ticks) < 2 and base == 10:
        ticks = [step * power for _, power in powers for step in range(1, 10) if low <= step * power <= high]
    stride = math.ceil(len(ticks) / 8)
    return ticks[::stride]


def tick_label(value: float, unit: str = "") -> str:
    if not unit or not value:
        return f"{value:,.10g}"
    number, name = quantity(value, unit).split(" ", 1)
    return f"{float(number.replace(',', '')):,g} {name}"


# ---------------------------------------------------------------- labels
def label_below(ax, names: list[tuple[str, float, float]]) -> None:
    """Write each (text, x, y) to the lower right of its point, further down while the place is taken.

    Under a roofline that side is free of the roof: it rises to the right.
    """
    ax.figure.canvas.draw()
    taken = [_around(ax, x, y, 5) for _, x, y in names]
    for text, x, y in sorted(names, key=lambda name: -name[2]):
        note = ax.annotate(text, (x, y), (8, -3), textcoords="offset points", fontsize=8, color=INK, va="top")
        note.set_bbox(dict(facecolor="white", edgecolor="none", pad=0.5))  # the dotted ridge passes behind it
        while _hits(note, taken) and note.xyann[1] > -150:
            note.xyann = (8, note.xyann[1] - 3)
        if note.xyann[1] < -9:
            thin = dict(arrowstyle="-", linewidth=0.5, color="#8A8A8A")
            ax.annotate("", (x, y), note.xyann, textcoords="offset points", arrowprops=thin, zorder=0)
        taken.append(_box(note))


def label_ends(ax, ends: list[tuple[str, float, str]]) -> None:
    """Write each (text, y, color) right of the axes at height y, neighbours pushed apart."""
    ax.figure.canvas.draw()
    height = ax.transData.transform
    scale = 72 / ax.figure.dpi  # pixels to points
    previous = -math.inf
    for text, y, color in sorted(ends, key=lambda end: end[1]):
        _, at = height((ax.get_xlim()[1], y)) * scale
        shift = max(0.0, previous + 12 - at)  # 12 points: one line of this size
        place = dict(xycoords=("axes fraction", "data"), textcoords="offset points")
        ax.annotate(
            text, (1, y), (6, shift), **place, fontsize=9, color=color, va="center", annotation_clip=False
        )
        previous = at + shift


def plain(ax):
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    return ax


def text_boxes(ax) -> list[tuple[str, Bbox]]:
    """Every text inside or beside the axes with the pixels it covers: what a test looks for overlaps in."""
    ax.figure.canvas.draw()
    return [(note.get_text(), _box(note)) for note in ax.texts if note.get_text()]


def _hits(note, taken: list[Bbox]) -> bool:
    box = _box(note)
    return any(box.overlaps(other) for other in taken)


def _box(note) -> Bbox:
    return note.get_window_extent()


def _around(ax, x: float, y: float, points: float) -> Bbox:
    """The square of half-width `points` around a data point, in pixels."""
    px, py = ax.transData.transform((x, y))
    half = points * ax.figure.dpi / 72
    return Bbox([[px - half, py - half], [px + half, py + half]])
