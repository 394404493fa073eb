"""A run on one page: a row per request, from the queue to its last token, drawn from the step log.

    timeline(ax, log)                 x counts steps: what the scheduler decided
    timeline(ax, log, by="time")      x is seconds: what that cost
    panels({title: log, ...})         several runs, one below the other, on one scale

    dotted line   waiting                        hatched box   a piece of its prompt
    solid bar     decoding, step after step      x             gave its pages back (preempted)
    nothing       it runs, but got no token      |             ended

Over seconds, white lines cut the solid bars: one piece is one step, so one token; with a draft, maybe several.

Story    notebooks/07_continuous_batching.ipynb
"""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from minserve.lab.figures import LINES
from minserve.lab.layout import INK, plain
from minserve.step_log import StepRecord

DECODE, PREFILL = LINES[0][0], LINES[1][0]
GREY = "#8A8A8A"


class Span(NamedTuple):
    kind: str  # "waiting", "prefill" or "decode"
    first: int  # index into the log
    last: int  # inclusive
    num_tokens: int


def is_decode(row) -> bool:
    return row.decodes


def spans(log: Sequence[StepRecord], request: int) -> list[Span]:
    """What the request did, in order: waiting and decoding in one span each, every piece of a prompt in its own."""
    found: list[Span] = []
    for i, record in enumerate(log):
        kind, num_tokens = _kind(record, request)
        joins = found and found[-1].kind == kind != "prefill" and found[-1].last == i - 1
        if joins:
            found[-1] = found[-1]._replace(last=i, num_tokens=found[-1].num_tokens + num_tokens)
        elif kind:
            found.append(Span(kind, i, i, num_tokens))
    return found


def _kind(record: StepRecord, request: int) -> tuple[str, int]:
    for row in record.rows:
        if row.request == request:
            return "decode" if is_decode(row) else "prefill", row.num_tokens
    return "waiting" if request in record.waiting else "", 0


def requests_in(log: Sequence[StepRecord]) -> list[int]:
    """Every id that the log speaks of, in order."""
    ids = {row.request for record in log for row in record.rows}
    return sorted(ids.union(*(record.waiting for record in log)))


def timeline(ax, log: Sequence[StepRecord], by: str = "step", names: dict[int, str] | None = None):
    """Draw it. `names`: what to call a request instead of r and its id."""
    left, right, xlabel = _edges(log, by)
    requests = requests_in(log)
    for y, request in enumerate(requests):
        for span in spans(log, request):
            _draw(ax, span, y, left[span.first], right[span.last])
            if by == "time" and span.kind == "decode":
                inner = left[span.first + 1 : span.last + 1]
                ax.vlines(inner, y - 0.25, y + 0.25, color="white", linewidth=0.8, zorder=3)
        for record, begin, end in zip(log, left, right):
            if request in record.preempted:
                ax.plot(begin, y, marker="x", color=INK, markersize=7, markeredgewidth=2, zorder=4)
            if request in record.finished:
                ax.plot(end, y, marker="|", color=INK, markersize=9, markeredgewidth=2, zorder=4)
    ax.set_yticks(range(len(requests)), [(names or {}).get(r, f"r{r}") for r in requests])
    ax.set(ylim=(len(requests) - 0.4, -0.6), xlim=(left[0], right[-1] + (right[-1] - left[0]) * 0.02))
    ax.set_xlabel(xlabel, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#EEEEEE", zorder=0)
    ax.set_axisbelow(True)
    return plain(ax)


def panels(logs: dict[str, Sequence[StepRecord]], height: float, by: str = "step", width: float = 8.4):
    """One timeline per run, each under its title, the legend once. Returns the axes."""
    axs = plt.subplots(
        len(logs), 1, figsize=(width, height), sharex=True, layout="constrained", squeeze=False
    )[1][:, 0]
    for ax, (title, log) in zip(axs, logs.items()):
        timeline(ax, log, by=by)
        ax.set_title(title, loc="left", fontsize=10, color=INK)
    for ax in axs[:-1]:
        ax.set_xlabel("")
    axs[0].set_xlim(0, 1.02 * max(_edges(log, by)[1][-1] for log in logs.values()))
    legend(axs[0])
    return axs


def legend(ax) -> None:
    """What the boxes mean, above the axes on the right."""
    handles = [
        Patch(facecolor=PREFILL + "55", edgecolor=PREFILL, hatch="//", label="prefill"),
        Patch(facecolor=DECODE, edgecolor=DECODE, label="decode"),
        ax.plot([], [], color=GREY, linestyle=":", linewidth=1.4, label="waiting")[0],
    ]
    ax.legend(handles=handles, ncols=3, fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1.0))


def _edges(log, by: str):
    """Where each record begins and ends on the x axis, and the axis's name."""
    if by == "step":
        return list(range(len(log))), [i + 1 for i in range(len(log))], "steps of the engine"
    if by != "time":
        raise ValueError(f"by is {by!r}; a timeline counts by 'step' or by 'time'")
    zero = log[0].start
    begins = [record.start - zero for record in log]
    return begins, [begin + record.total for begin, record in zip(begins, log)], "seconds"


def _draw(ax, span: Span, y: int, left: float, right: float) -> None:
    if span.kind == "waiting":
        ax.plot([left, right], [y, y], color=GREY, linestyle=":", linewidth=1.4)
    elif span.kind == "decode":
        ax.barh(y, right - left, left=left, height=0.5, facecolor=DECODE, edgecolor=DECODE, linewidth=0.6)
    else:
        look = dict(facecolor=PREFILL + "55", edgecolor=PREFILL, linewidth=0.8, hatch="//")
        ax.barh(y, right - left, left=left, height=0.7, **look)
