"""Serving, drawn: what the batch size buys, which rate a promise bears, and what the tail of a latency looks like.

    knob(ax, points, bound)         tokens per second against the time of a token; the batch size at each point
    waits(ax, lines)                time to first token against the batch size: all at once, and at one rate
    goodputs(ax, groups)            the highest rate at which enough is in time, of each seed
    attained(ax, lines, enough)     the share in time against the rate: what the search looked at
    percentiles(ax, rows)           p50, p90, p99 and the longest of a latency, on one line for each side

Each has a `..._finding` for its title, computed from the same numbers; `recorded_...` reads these from a report
of `bench knob` or `bench goodput`.
Story    notebooks/13_serving_and_slos.ipynb
"""

from statistics import median

from minserve.lab.figures import BOUND, LINES, MEASURED, curves
from minserve.lab.layout import INK, label_ends, log_axis, plain
from minserve.lab.report import Report, quantity

Points = dict[int, tuple[float, float]]  # by batch size: seconds of a token, tokens per second
MARKS = {"p50": "o", "p90": "s", "p99": "^", "max": "D"}


# ---------------------------------------------------------------- the knob
def knob(ax, points: Points, bound: Points | None = None):
    """Up is more work, right is slower for each reader; the grey line is the roofline's."""
    if bound:
        ax.plot(*zip(*bound.values()), color=BOUND, linestyle="--", linewidth=1.2)
    ax.plot(*zip(*points.values()), color=MEASURED, marker="o", markersize=5, linewidth=1.6)
    every = [*points.values(), *(bound or {}).values()]
    times, rates = zip(*every)
    log_axis(ax, "x", min(times) / 1.3, max(times) * 1.5, unit="s")
    log_axis(ax, "y", min(rates) / 1.5, max(rates) * 1.6)
    for batch, at in points.items():
        note = ax.annotate(
            str(batch), at, (6, -3), textcoords="offset points", fontsize=8, va="top", color=INK
        )
        note.set_bbox(dict(facecolor="white", edgecolor="none", pad=0.5))
    said = "requests at once; grey: roofline" if bound else "requests at once"
    ax.set_xlabel(f"time per output token, p50   (at each point: {said})", fontsize=9)
    ax.set_ylabel("output tokens per second", fontsize=9)
    ax.grid(color="#EEEEEE", zorder=0)
    return plain(ax)


def knob_finding(points: Points) -> str:
    (few, (fast, low)), (many, (slow, high)) = min(points.items()), max(points.items())
    return f"{many} at once instead of {few}: {high / low:.1f}x the tokens, each {slow / fast:.1f}x as slow"


def recorded_knob(report: Report) -> tuple[Points, Points]:
    """(measured, roofline)"""
    measured: Points = {}
    bound: Points = {}
    for batch in _batches(report):
        rate = report.row(f"batch {batch}, closed: output")
        token = report.row(f"batch {batch}, closed: TPOT p50")
        measured[batch], bound[batch] = (token.median, rate.median), (token.bound, rate.bound)
    return measured, bound


def waits(ax, lines: dict[str, dict[int, float]]):
    """{load: {batch: seconds to the first token}}"""
    drawn = [(name, list(its), list(its.values())) for name, its in lines.items()]
    curves(ax, drawn, "requests at once", unit="s")
    log_axis(ax, "x", min(drawn[0][1]) / 1.15, max(drawn[0][1]) * 1.15, base=2)
    ax.set_ylabel("time to first token, p50", fontsize=9)
    return ax


def waits_finding(lines: dict[str, dict[int, float]]) -> str:
    """Of the last load: the smallest batch against the best one."""
    name, its = list(lines.items())[-1]
    few, least = min(its), min(its, key=its.get)
    at = name[:1].upper() + name[1:]
    slow, fast = quantity(its[few], "s"), quantity(its[least], "s")
    return f"{at}: {slow} to a first token with {few} at once, {fast} with {least}"


def recorded_waits(report: Report) -> dict[str, dict[int, float]]:
    rate = report.row(f"batch {_batches(report)[0]}, open: TTFT p50").note
    names = {"all there at once": "closed", rate: "open"}
    return {
        name: {batch: report.row(f"batch {batch}, {load}: TTFT p50").median for batch in _batches(report)}
        for name, load in names.items()
    }


def _batches(report: Report) -> list[int]:
    names = dict.fromkeys(row.case.split(", ")[0] for row in report.rows)
    return sorted(int(name.removeprefix("batch ")) for name in names)


# ---------------------------------------------------------------- goodput
Groups = list[tuple[str, list[tuple[str, list[float]]]]]  # (trace and SLO, [(side, rate of each seed)])


def goodputs(ax, groups: Groups):
    """A dot at the median, a tick for each seed, so that nobody takes luck for a gain. (Bars mean nothing on logs.)"""
    sides = list(dict.fromkeys(name for _, its in groups for name, _ in its))
    looks = {name: LINES[i % 4] for i, name in enumerate(sides)}
    every = [x for _, its in groups for _, samples in its for x in samples if x]
    log_axis(ax, "x", min(every) / 1.4, max(every) * 1.8)
    places, row = {}, 0
    for about, its in groups:
        ax.text(0.01, row, about, va="center", fontsize=9, fontweight="bold", color=INK,
                transform=ax.get_yaxis_transform())  # fmt: skip
        for name, samples in its:
            row += 1
            (color, _, marker), middle, seen = looks[name], median(samples), [x for x in samples if x]
            ax.plot(seen, [row] * len(seen), color=color, marker="|", markersize=11, linewidth=1.2)
            if middle:
                ax.scatter(middle, row, marker=marker, s=44, color=color, zorder=3)
            text = f"{middle:.1f}" if middle else "none"
            ax.annotate(text, (max(seen, default=min(every)), row), (9, 0), textcoords="offset points", fontsize=8,
                        va="center", color=INK)  # fmt: skip
            places[row] = name
        row += 1
    ax.set_yticks(list(places), list(places.values()))
    ax.set_ylim(row - 0.4, -0.7)
    ax.set_xlabel(
        "requests per second with 90 % in time, log scale   (dot: median; ticks: seeds)", fontsize=9
    )
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#EEEEEE", zorder=0)
    return plain(ax)


def goodput_finding(groups: Groups) -> str:
    about, ((one, ours), (other, theirs)) = groups[0]
    about = about[:1].upper() + about[1:]
    if not median(theirs):
        return f"{about}: {one} bears {median(ours):.1f} requests per second, {other} none"
    return f"{about}: {one} bears {median(ours) / median(theirs):.1f} times the rate of {other}"


def recorded_goodput(report: Report) -> Groups:
    """Of the traces that were searched; classes have one rate, and are in the table."""
    groups: dict[str, list] = {}
    for row in report.rows:
        if row.unit == "requests/s" and not row.case.startswith("classes"):
            case, side = row.case.rsplit(": ", 1)
            groups.setdefault(case, []).append((side, row.samples))
    return list(groups.items())


# ---------------------------------------------------------------- the share in time
Lines = dict[str, dict[int, dict[float, float]]]  # by side and seed: {rate: share in time}


def attained(ax, lines: Lines, enough: float):
    """A line for each seed. A run that had lost 30 % was stopped: its share is at most the one drawn."""
    for (color, style, marker), seeds in zip(LINES, lines.values(), strict=False):
        for its in seeds.values():
            points = sorted(its.items())
            ax.plot(*zip(*points), color=color, linestyle=style, marker=marker, markersize=4, linewidth=1)
    every = [point for seeds in lines.values() for its in seeds.values() for point in its.items()]
    rates, shares = zip(*every)
    log_axis(ax, "x", min(rates) / 1.15, max(rates) * 1.15)
    ax.set_ylim(min(0.6, min(shares) - 0.03), 1.03)
    ax.axhline(enough, color=BOUND, linewidth=0.8, linestyle=":")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_xlabel("requests per second   (one line per seed; dotted: what is promised)", fontsize=9)
    ax.set_ylabel("of arrived requests, in time", fontsize=9)
    ends = [
        (name, median(its[max(its)] for its in seeds.values()), color)
        for (name, seeds), (color, *_) in zip(lines.items(), LINES)
    ]
    label_ends(ax, ends)
    return plain(ax)


def attained_finding(lines: Lines, enough: float) -> str:
    told = []
    for name, seeds in lines.items():
        last = [max((r for r, share in its.items() if share >= enough), default=0) for its in seeds.values()]
        told.append(f"{name} to {median(last):.3g} a second" if median(last) else f"{name} at no rate")
    return f"{enough:.0%} of requests are in time: {', '.join(told)}"


def recorded_shares(report: Report, trace: str, slo: str) -> Lines:
    lines: Lines = {}
    for row in report.rows:
        case, _, rate = row.case.partition(": in time at ")
        if rate and case.startswith(f"{trace}, ") and case.split(", ")[-2] == slo:
            side = lines.setdefault(case.split(", ")[-1], {})
            for seed, share in zip(row.note.removeprefix("seeds ").split(), row.samples, strict=True):
                side.setdefault(int(seed), {})[float(rate.split()[0])] = share
    return lines


# ---------------------------------------------------------------- tails
def percentiles(ax, rows: dict[tuple[str, str], dict[str, float]]):
    """{(latency, side): {"p50": seconds, "p90": ..., "p99": ...}}: what half, a tenth, a hundredth and one wait for."""
    sides = list(dict.fromkeys(side for _, side in rows))
    looks = {side: LINES[i % 4][0] for i, side in enumerate(sides)}
    for y, ((_, side), its) in enumerate(rows.items()):
        color = looks[side]
        ax.plot([min(its.values()), max(its.values())], [y, y], color=color, linewidth=1.4, zorder=1)
        for name, seconds in its.items():
            ax.scatter(seconds, y, marker=MARKS[name], s=34, color=color, zorder=2)
        last = max(its, key=its.get)
        ax.annotate(quantity(its[last], "s"), (its[last], y), (7, 0), textcoords="offset points", fontsize=8,
                    va="center", color=INK)  # fmt: skip
    values = [x for its in rows.values() for x in its.values()]
    log_axis(ax, "x", min(values) / 1.3, max(values) * 2, unit="s")
    ax.set_yticks(range(len(rows)), [f"{latency}, {side}" for latency, side in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlabel("log scale   (circle: p50; square: p90; triangle: p99; diamond: the longest)", fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#EEEEEE", zorder=0)
    return plain(ax)


def percentiles_finding(rows: dict[tuple[str, str], dict[str, float]], about: str) -> str:
    """Of the last latency: how far apart its sides' tails are."""
    latency = list(rows)[-1][0]
    tails = {side: its["max"] for (name, side), its in rows.items() if name == latency}
    low, high = min(tails, key=tails.get), max(tails, key=tails.get)
    return f"{about}: the longest {latency} is {tails[high] / tails[low]:.1f} times as long {high} as {low}"


def recorded_percentiles(report: Report, trace: str) -> tuple[str, dict[tuple[str, str], dict[str, float]]]:
    """(which requests, at what rate; medians of the seeds by latency and side)"""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    about = ""
    for row in report.rows:
        case, _, what = row.case.rpartition(": ")
        latency, _, percent = what.partition(" ")
        if row.unit == "s" and percent in MARKS and case.startswith(f"{trace}, "):
            *_, about, side = case.split(", ")
            rows.setdefault((latency, side), {})[percent] = row.median
    return about[:1].upper() + about[1:], dict(sorted(rows.items(), key=lambda its: its[0][0] == "ITL"))
