"""Notebook 14's figures of what was simulated, each from the rows of a report.

    accuracy(ax, rows)        simulated against measured, by load: how far each is off, and how far it may be
    stairs(ax, runs)          how soon the first token came, simulated and real
    heat(ax, cells)           goodput of disaggregated over chunked: links across, lengths down
    bills(ax, points)         replica-hours of a day against the share in time
    classes(ax, waits)        TTFT of the urgent and of the others, by what a class is worth
    fleet(ax, rounds)         a day: how many were wanted, how many served, how much was under way

Each `recorded_...` reads one of these from a report, each `..._finding` is its title.
Story    notebooks/14_the_fleet.ipynb
"""

import re
from collections.abc import Sequence

from matplotlib.patches import Rectangle

from minserve.lab.figures import BOUND, LINES, MEASURED
from minserve.lab.layout import INK, log_axis, plain
from minserve.lab.report import Report, quantity
from minserve.simulator.fleet import Round

PAYS, LOSES = (0.0, 0.45, 0.70), (0.90, 0.60, 0.0)  # as light as it is near to 1


# ---------------------------------------------------------------- simulated and measured
Errors = dict[tuple[str, str], tuple[float, float]]  # (load, measure): its error, and the most it should be


def accuracy(ax, errors: Errors) -> None:
    """A dot for each load and measure; the grey tick is what was hoped for."""
    names = list(dict.fromkeys(name for _, name in errors))
    loads = list(dict.fromkeys(load for load, _ in errors))
    for row, name in enumerate(names):
        for i, load in enumerate(loads):
            error, most = errors[load, name]
            color, _, marker = LINES[i]
            y = row + 0.22 * (i - (len(loads) - 1) / 2)
            ax.plot(
                error, y, color=color, marker=marker, linestyle="", label=f"load {load}" if not row else None
            )
            ax.plot([most], [y], color=BOUND, marker="|", markersize=12, linestyle="")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(0, None)
    ax.xaxis.set_major_formatter(lambda x, _: f"{100 * x:g}%")
    ax.set_xlabel("|simulated / measured - 1|, the worst of three policies   (grey: target)", fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    plain(ax)


def accuracy_finding(errors: Errors) -> str:
    kept = sum(error <= most for error, most in errors.values())
    return f"{kept} of {len(errors)} predictions are within their target"


def recorded_accuracy(report: Report) -> Errors:
    found = {}
    for row in report.rows:
        if told := re.search(r"load ([\d.]+) of .*: accuracy of (.*)", row.case):
            found[told[1], told[2]] = 1 - row.median, 1 - row.target
    return found


def stairs(ax, runs: dict[str, Sequence[float]]) -> None:
    """{name: seconds}: the share of requests that had their first token by then."""
    for (name, seconds), (color, style, _) in zip(runs.items(), LINES):
        shares = [(i + 1) / len(seconds) for i in range(len(seconds))]
        ax.step([0, *sorted(seconds)], [0, *shares], where="post", color=color, linestyle=style, label=name)
    ax.set(xlim=(0, None), ylim=(0, 1.02))
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    ax.set_xlabel("seconds until the first token", fontsize=9)
    ax.set_ylabel("of the requests", fontsize=9)
    ax.legend(frameon=False, fontsize=8, loc="lower right")
    plain(ax)


# ---------------------------------------------------------------- chunked or disaggregated
Cells = dict[tuple[int, int], dict[float, float]]  # (prompt, answer): {bytes/s: disaggregated / chunked}


def heat(ax, cells: Cells) -> None:
    """A box for each link and mix: blue where two kinds of replica serve more, orange where they serve less."""
    links = sorted({link for line in cells.values() for link in line})
    for row, line in enumerate(cells.values()):
        for column, link in enumerate(links):
            value = line[link]
            side, far = (PAYS if value >= 1 else LOSES), min(1.0, 2 * abs(value - 1))
            face = tuple(1 - far * (1 - part) for part in side)
            ink = "white" if sum(a * b for a, b in zip(face, (0.3, 0.59, 0.11))) < 0.55 else INK
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=face, edgecolor="white", linewidth=1.5))
            ax.text(column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=9, color=ink)
    ax.set(xlim=(0, len(links)), ylim=(len(cells), 0))
    ax.set_xticks([i + 0.5 for i in range(len(links))], [quantity(link, "B/s") for link in links])
    names = [f"{prompt:,} in, {output:,} out" for prompt, output in cells]
    ax.set_yticks([i + 0.5 for i in range(len(cells))], names)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("the link that carries keys and values   (goodput, times that of chunked)", fontsize=9)


def heat_finding(cells: Cells) -> str:
    every = [(value, mix, link) for mix, line in cells.items() for link, value in line.items()]
    best, (prompt, output), _ = max(every)
    won = sum(value > 1 for value, *_ in every)
    if not won:
        return f"Disaggregated serves less in all {len(every)} cases; at best {best:.2f} times as much"
    return f"Disaggregated wins in {won} of {len(every)} cases, at most {best:.2f}x: {prompt:,} in, {output:,} out"


def recorded_heat(report: Report, overlap: str = "") -> Cells:
    """overlap: ", perfect overlap" for the other assumption."""
    form = rf"prompts of (\d+), answers of (\d+){overlap}: disaggregated over ([\d.]+) GB/s / chunked"
    cells: Cells = {}
    for row in report.rows:
        if told := re.fullmatch(form, row.case):
            cells.setdefault((int(told[1]), int(told[2])), {})[float(told[3]) * 1e9] = row.median
    return cells


# ---------------------------------------------------------------- a day
Bills = dict[str, tuple[float, float]]  # settings: replica-hours, share in time


def bills(ax, points: Bills) -> None:
    """Up and left is better."""
    for name, (hours, share) in points.items():
        fixed = name.endswith("replicas")
        color, _, marker = LINES[0 if fixed else 1]
        ax.plot(hours, share, color=color, marker=marker, linestyle="")
        place = dict(xytext=(0, 7), ha="center") if fixed else dict(xytext=(-7, -3), ha="right")
        ax.annotate(name, (hours, share), **place, textcoords="offset points", fontsize=8, color=INK)
    hours = [hours for hours, _ in points.values()]
    ax.set_xlim(0, max(hours) * 1.25)
    ax.set_ylim(0, 1.1)
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    ax.set_xlabel("replica-hours of the day", fontsize=9)
    ax.set_ylabel("requests in time", fontsize=9)
    plain(ax)


def bills_finding(points: Bills) -> str:
    (h, s), (hours, share) = points["hasty"], points["steady"]
    return f"Steady instead of hasty: {share:.0%} in time instead of {s:.0%}, for {hours / h:.2f}x the hours"


def recorded_bills(report: Report) -> Bills:
    names = [told[1] for row in report.rows if (told := re.fullmatch(r"day, (.*): in time", row.case))]
    of = lambda name, what: report.row(f"day, {name}: {what}").median
    return {name: (of(name, "replica-hours"), of(name, "in time")) for name in names}


def fleet(ax, rounds: Sequence[Round]) -> None:
    """A line for what was wanted, an area for what served, and grey, on a scale of its own, what was under way."""
    hours = [r.time / 60 for r in rounds]
    ax.fill_between(
        hours, [r.running for r in rounds], step="post", color="#9ECBE8", label="serving", linewidth=0
    )
    ax.step(hours, [r.target for r in rounds], where="post", color=MEASURED, linewidth=1.2, label="wanted")
    ax.set_ylim(0, max(r.target for r in rounds) + 1)
    ax.set_xlim(0, hours[-1])
    ax.set_xlabel("minutes", fontsize=9)
    ax.set_ylabel("replicas", fontsize=9)
    twin = ax.twinx()
    twin.plot(hours, [r.ongoing for r in rounds], color=BOUND, linewidth=0.8)
    twin.set_ylim(0, None)
    twin.set_ylabel("requests under way", fontsize=9, color=BOUND)
    twin.spines[["top", "left"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    plain(ax)


# ---------------------------------------------------------------- an overload
Waits = dict[str, dict[str, float]]  # what a class is worth: {"urgent", "others"}: seconds


def classes(ax, waits: Waits) -> None:
    """Both classes' mean time to the first token."""
    for i, who in enumerate(("urgent", "others")):
        color, style, marker = LINES[i]
        ax.plot([w[who] for w in waits.values()], color=color, linestyle=style, marker=marker, label=who)
    every = [seconds for w in waits.values() for seconds in w.values()]
    log_axis(ax, "y", min(every) / 1.6, max(every) * 1.8, unit="s")
    ax.set_xticks(range(len(waits)), list(waits))
    ax.set_xlabel("what a class is worth, in steps of waiting", fontsize=9)
    ax.set_ylabel("time to first token, mean", fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    plain(ax)


def classes_finding(waits: Waits) -> str:
    first, last = list(waits.values())[0], list(waits.values())[-1]
    sooner, later = first["urgent"] / last["urgent"], last["others"] / first["others"]
    return f"The urgent wait {sooner:.0f} times less, the others {later:.1f} times as long"


def recorded_classes(report: Report) -> Waits:
    form = r"overload, (.*), (urgent|others): TTFT mean"
    waits: Waits = {}
    for row in report.rows:
        if told := re.fullmatch(form, row.case):
            waits.setdefault(told[1], {})[told[2]] = row.median
    return waits
