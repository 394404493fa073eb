"""Time travel: what one step of a real run looked like, drawn from the step log.

    draw_step(log, i)        the queue, the batch, the page pool and the page tables of record i: a figure
    slider(log)              the same figure under a slider, in a running notebook

Both are functions of `engine.log` alone, made with Engine(..., snapshots=True): the requests may be long gone. A
request has one colour and one name, r and its id, wherever it appears, so nothing is said by colour only.

    pool     one cell per page, coloured by who has it in a table (in stripes, where several do)
             x3      three tables hold it             hatched   cached: in no table, but findable
             2f81    how its key in the prefix index begins       dotted    free

Story    notebooks/08_the_engine.ipynb
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from minserve.lab.layout import INK, plain
from minserve.lab.timeline import is_decode
from minserve.step_log import StepRecord

PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C3E", "#6A51A3"]
GREY = "#8A8A8A"
MOST_ROWS, MOST_WAITING, MOST_ENTRIES, MOST_LABELLED = (
    16,
    14,
    22,
    96,
)  # beyond these a panel says "and n more"


def color_of(request: int) -> str:
    return PALETTE[request % len(PALETTE)]


def draw_step(log: Sequence[StepRecord], i: int):
    """The figure of record i, as things stood when that step ran. Raises ValueError for a log without snapshots."""
    record = log[i]
    if record.snapshot is None:
        raise ValueError(
            f"record {i} (step {record.step}) has no snapshot, so nobody knows who owned which page.\n"
            f"  Build the engine with snapshots=True, and run it again."
        )
    lines = max(6, min(MOST_ROWS, max(len(record.rows), len(record.snapshot.tables))))
    figure = plt.figure(figsize=(10, 2.2 + 0.42 * lines))
    grid = figure.add_gridspec(
        3, 2, height_ratios=[1, lines, lines], width_ratios=[1, 1.15], hspace=0.32, wspace=0.1
    )
    queue(figure.add_subplot(grid[0, :]), record)
    batch(figure.add_subplot(grid[1:, 0]), record)
    pool(figure.add_subplot(grid[1, 1]), record)
    tables(figure.add_subplot(grid[2, 1]), record)
    figure.suptitle(headline(record), x=0.125, y=0.97, ha="left", fontsize=11, color=INK)
    return figure


def headline(record: StepRecord) -> str:
    """The step in one sentence."""
    decodes = sum(map(is_decode, record.rows))
    chunks = len(record.rows) - decodes
    said = [f"{decodes} decode", f"{chunks} prefill"]
    said += [f"{_names(record.preempted)} gave way"] if record.preempted else []
    said += [f"{_names(record.finished)} ended"] if record.finished else []
    return f"Step {record.step}: {record.num_tokens} tokens   ({', '.join(said)})"


def slider(log: Sequence[StepRecord]) -> None:
    """draw_step under a slider. Draw one step in a cell above first: a saved notebook shows that one, and no slider."""
    try:
        from ipywidgets import IntSlider, interact
    except ImportError:
        print("without ipywidgets there is no slider; draw_step(log, i) draws any step")
        return

    def show(i):
        draw_step(log, i)
        plt.show()

    interact(show, i=IntSlider(min=0, max=len(log) - 1, continuous_update=False, description="record"))


# ---------------------------------------------------------------- the panels
def queue(ax, record: StepRecord) -> None:
    """Who waits, in the order they will be served."""
    _panel(ax, f"waiting: {len(record.waiting)}", (0, MOST_WAITING + 2), (1, 0))
    for place, request in enumerate(record.waiting[:MOST_WAITING]):
        cell(ax, place, 0, [request], f"r{request}", width=0.9)
    if (more := len(record.waiting) - MOST_WAITING) > 0:
        ax.text(MOST_WAITING + 0.1, 0.45, f"and {more} more", va="center", fontsize=8, color=INK)


def batch(ax, record: StepRecord) -> None:
    """One bar per request: pale is what the cache holds already, solid is what this step computes."""
    rows = record.rows[:MOST_ROWS]
    longest = max((row.computed + row.num_tokens for row in rows), default=1)
    for y, row in enumerate(rows):
        color = color_of(row.request)
        ax.barh(y, row.computed, height=0.62, facecolor=color + "33", edgecolor=color, linewidth=0.6)
        width = max(row.num_tokens, longest / 80)  # one token must be seen beside a thousand
        ax.barh(y, width, left=row.computed, height=0.62, facecolor=color, edgecolor=color, linewidth=0.6)
        ax.text(row.computed + width + longest * 0.02, y, describe(row), va="center", fontsize=8, color=INK)
    title = f"batch: {len(record.rows)} of {record.running} running"
    if (more := len(record.rows) - MOST_ROWS) > 0:
        title += f" (and {more} more)"
    ax.set_title(title, loc="left", fontsize=9, color=INK)
    ax.set_yticks(range(len(rows)), [f"r{row.request}" for row in rows])
    ax.set(xlim=(0, longest * 1.75), ylim=(max(len(rows), 6) - 0.4, -0.6))
    ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= longest])
    ax.set_xlabel("position   (pale: in the cache; solid: computed in this step)", fontsize=8)
    ax.tick_params(axis="y", length=0)
    plain(ax)


def describe(row) -> str:
    if is_decode(row):
        kept = f", {row.kept} of {row.drafted} drafts kept" if row.drafted else ""
        return f"decode, position {row.computed}{kept}"
    end = "draws" if row.sampled else "no draw yet"
    return f"prefill {row.num_tokens}, {end}"


def pool(ax, record: StepRecord) -> None:
    """Every page once, coloured by the tables that hold it."""
    snapshot = record.snapshot
    owners = owners_of(snapshot)
    P = len(snapshot.references)
    columns = next((c for c in (8, 12, 16, 24, 32) if c * 6 >= P), 48)
    used = f"{record.in_use} in use, {record.cached} cached, {record.free} free"
    height = -(-P // columns)
    _panel(ax, f"pool: {P} pages: {used}", (0, columns), (height, -0.05))
    for page in range(P):
        text = _page_text(page, snapshot) if P <= MOST_LABELLED else ""
        look = dict(hatch="///") if page in snapshot.cached else {}
        if not owners[page] and page not in snapshot.cached:
            look = dict(linestyle=":")
        cell(
            ax,
            page % columns,
            page // columns,
            owners[page],
            text,
            7.5 if P <= 40 else 6.5,
            width=0.92,
            **look,
        )


def owners_of(snapshot) -> list[list[int]]:
    """Per page, the requests that hold it. (An entry that left a sliding window is nobody's any more.)"""
    owners: list[list[int]] = [[] for _ in snapshot.references]
    for request, table in snapshot.tables.items():
        for page in table:
            if page >= 0 and request not in owners[page] and snapshot.references[page]:
                owners[page].append(request)
    return owners


def tables(ax, record: StepRecord) -> None:
    """Each running request's pages in token order: what attention reads them by."""
    snapshot = record.snapshot
    shown = list(snapshot.tables.items())[:MOST_ROWS]
    lines = max(len(shown), 6)
    _panel(ax, "page tables, in token order", (-1.6, MOST_ENTRIES), (lines, -0.05))
    for y, (request, table) in enumerate(shown):
        ax.text(-0.3, y + 0.45, f"r{request}", va="center", ha="right", fontsize=8, color=INK)
        fits = len(table) <= MOST_ENTRIES
        for x, page in enumerate(table if fits else table[: MOST_ENTRIES - 3]):
            alive = page >= 0 and snapshot.references[page]
            cell(ax, x, y, [request] if alive else [], page if alive else "·", 6.5, width=0.92)
        if not fits:
            more = f"+ {len(table) - MOST_ENTRIES + 3}"
            ax.text(MOST_ENTRIES - 2.9, y + 0.45, more, va="center", fontsize=8, color=INK)


# ---------------------------------------------------------------- pieces
def cell(ax, x, y, owners: list[int], text, size=8, width=1.0, hatch=None, linestyle="-") -> None:
    """One box; where several own it, a stripe for each."""
    for k, request in enumerate(owners):
        left, each = x + k * width / len(owners), width / len(owners)
        ax.add_patch(Rectangle((left, y), each, 0.88, facecolor=color_of(request) + "55", edgecolor="none"))
    edge = color_of(owners[0]) if len(owners) == 1 else INK if owners else GREY
    ax.add_patch(
        Rectangle((x, y), width, 0.88, facecolor="none", edgecolor=edge, linewidth=0.8, linestyle=linestyle)
    )
    if hatch:
        ax.add_patch(
            Rectangle((x, y), width, 0.88, facecolor="none", edgecolor="#D0D0D0", hatch=hatch, linewidth=0)
        )
    ax.text(x + width / 2, y + 0.44, text, ha="center", va="center", fontsize=size, color=INK, linespacing=1)


def _page_text(page: int, snapshot) -> str:
    references = snapshot.references[page]
    first = f"{page}" + (f" x{references}" if references > 1 else "")
    return first + (f"\n{snapshot.indexed[page][:4]}" if page in snapshot.indexed else "")


def _panel(ax, title: str, xlim, ylim) -> None:
    ax.set(xlim=xlim, ylim=ylim)
    ax.set_title(title, loc="left", fontsize=9, color=INK)
    ax.axis("off")


def _names(requests) -> str:
    return ", ".join(f"r{request}" for request in requests)
