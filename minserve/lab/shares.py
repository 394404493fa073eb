"""How much of its bound each thing reached, drawn from reports: whatever has a bound has a share of it.

    shares(ax, cases)      bars from zero to 100 % of the bound, one per side; a tick where the target is
    reached(ax, rows)      every target of a run: how far each measurement is from it
    sides_of(report)       case -> {side: row}, for rows named "case: side"
    slope(ax, report)      seconds of a step against context: the measured lines over their bound

Story    figures/gpu_*.png are drawn from figures/data/*_gpu.json by `make figures`
"""

from minserve.lab.figures import BOUND, HATCHES, LINES, MEASURED, curves
from minserve.lab.layout import INK, plain
from minserve.lab.report import Report, Row, share


def sides_of(report: Report) -> dict[str, dict[str, Row]]:
    """Ratios of two sides (unit "x") have the tie for a bound, not a machine's limit: they are not among them."""
    found = {}
    for row in report.rows:
        if row.bound is not None and row.unit != "x" and ": " in row.case:
            case, side = row.case.rsplit(": ", 1)
            found.setdefault(case, {})[side] = row
    return found


def common_start(names: list[str]) -> str:
    """What all cases say first, up to a comma: it is said once, below the title."""
    words = [name.split(", ") for name in names]
    same = 0
    while all(len(w) > same + 1 for w in words) and len({w[same] for w in words}) == 1:
        same += 1
    return ", ".join(words[0][:same])


def short_names(rows: list[tuple[str, Row]]) -> list[str]:
    """Step and case, without what all cases of the step begin with."""
    cases = {step: [row.case for name, row in rows if name == step] for step, _ in rows}
    starts = {step: common_start(its) if len(its) > 1 else "" for step, its in cases.items()}
    return [f"{step}: {without(row.case, starts[step])}" for step, row in rows]


def without(case: str, start: str) -> str:
    return case.removeprefix(start).removeprefix(", ")


def shares(ax, cases: dict[str, dict[str, Row]]):
    """Groups of bars, one group per case; sides keep their colour and hatch through all groups."""
    names = list(dict.fromkeys(side for sides in cases.values() for side in sides))
    looks = {name: (LINES[i % 4][0], HATCHES[i % 4]) for i, name in enumerate(names)}
    start, y, ticks = common_start(list(cases)), 0.0, []
    longest = max(row.ratio for sides in cases.values() for row in sides.values())
    for case, sides in cases.items():
        top = y
        for side, row in sides.items():
            color, hatch = looks[side]
            ax.barh(
                y, row.ratio, height=0.8, facecolor=color + "55", edgecolor=color, hatch=hatch, label=side
            )
            end = row.ratio
            if row.target:
                ax.plot([row.target] * 2, [y - 0.46, y + 0.46], color=INK, linewidth=2)
                if end <= row.target < end + 0.09 * max(1, longest):  # the number would stand on the tick
                    end = row.target
            text = share(row.ratio, row.unit)
            ax.text(end + 0.01 * max(1, longest), y, text, va="center", fontsize=8, color=INK)
            y += 1
        ticks.append(((top + y - 1) / 2, without(case, start)))
        y += 0.7
    ax.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    ax.set_ylim(y - 0.7, -0.8)
    ax.set_xlim(0, max(1.02, longest * 1.12))
    ax.axvline(1, color=BOUND, linewidth=0.8, linestyle=":", zorder=0)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_xlabel("share of the bound   (black tick: target)", fontsize=9)
    ax.tick_params(axis="y", length=0)
    if len(names) > 1:
        handles = dict(zip(*reversed(ax.get_legend_handles_labels())))
        ax.legend(
            handles.values(), handles, loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=8, frameon=False
        )
    return plain(ax)


def reached(ax, rows: list[tuple[str, Row]]):
    """One line per target: a dot at ratio / target, filled where it was reached; the two numbers beside it."""
    for y, (_, row) in enumerate(rows):
        x = max(0.0, row.ratio / row.target)
        ax.plot([1, x], [y, y], color=BOUND, linewidth=1, zorder=1)
        ax.scatter(x, y, s=36, facecolor=MEASURED if row.passed else "white", edgecolor=MEASURED, zorder=3)
        numbers = f"{share(row.ratio, row.unit)} of {share(row.target, row.unit)}"
        ax.text(1.02, y, numbers, transform=ax.get_yaxis_transform(), va="center", fontsize=8, color=INK)
    ax.axvline(1, color=INK, linewidth=1)
    ax.set_yticks(range(len(rows)), short_names(rows), fontsize=8)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(0, max(1.25, *(1.05 * row.ratio / row.target for _, row in rows)))
    ax.set_xlabel("reached / target   (filled: reached)", fontsize=9)
    ax.tick_params(axis="y", length=0)
    return plain(ax)


def slope(ax, report: Report):
    """Rows "..., context 1,024: side" of bench ctx-slope."""
    lines, bound = {}, {}
    for case, sides in sides_of(report).items():
        if ", context " in case:
            context = int(case.rsplit(", context ", 1)[1].replace(",", ""))
            for side, row in sides.items():
                lines.setdefault(side, {})[context] = row.median
                bound[context] = row.bound
    lines["bound"] = bound
    drawn = [(side, list(points), list(points.values())) for side, points in lines.items()]
    return curves(ax, drawn, "tokens of context", log=False)
