"""A pool of pages, drawn: every page with its slots, its owners, its references.

    rows(pool, requests)         what there is to draw, as plain data: one Page per page
    draw(ax, pool, requests)     a box per page: the tokens in its slots, below it who refers to it
    lines(pool, requests)        the same as text, one line per request and one for the rest
    against_page_size(...)       what small pages cost, and what large ones

A page of several owners carries all their letters and is striped in their colours; a cached page is grey and hatched;
a free one is empty. Letters say everything, so no colour has to be told from another.

Story    notebooks/05_paged_attention.ipynb, notebooks/06_prefix_caching.ipynb
"""

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from matplotlib.patches import Rectangle

from minserve.lab.figures import BOUND, LINES, MEASURED
from minserve.lab.layout import INK, log_axis, plain
from minserve.pages import PagePool, pages_for
from minserve.request import Request

FACES = [
    "#9ECBE8",
    "#F2B98C",
    "#93D6BD",
    "#E6BDD3",
    "#F3E58F",
    "#C9C2E8",
]  # light, so that letters stay readable
CACHED, LINE = "#DDDDDD", "#8A8A8A"


@dataclass(frozen=True)
class Page:
    state: str  # "free", "cached", "in use"
    owners: str  # letters, in the order of the requests
    tokens: list[int]  # what is known to lie in its slots, from the first on
    indexed: bool


def letter(request: Request) -> str:
    return chr(ord("A") + request.id % 26)


def rows(pool: PagePool, requests: Iterable[Request]) -> list[Page]:
    """One Page per page of the pool. `requests`: all that hold pages."""
    S, owners, tokens = pool.page_size, [""] * pool.num_pages, [[] for _ in range(pool.num_pages)]
    for request in requests:
        own = set(pool.held(request))
        for i, page in enumerate(request.pages[: pages_for(request.computed, S)]):
            here = request.tokens[i * S : min((i + 1) * S, request.computed)]
            tokens[page] = max(tokens[page], here, key=len) if page in own else tokens[page]
        for page in own:
            owners[page] += letter(request)
    for page in pool.cached:
        tokens[page] = list(array("q", pool.nodes[page].tokens))
    free = set(pool.free)
    state = lambda page: "free" if page in free else "cached" if page in pool.cached else "in use"  # noqa: E731
    return [
        Page(state(page), owners[page], tokens[page], pool.nodes[page] is not None)
        for page in range(pool.num_pages)
    ]


def lines(pool: PagePool, requests: Iterable[Request]) -> str:
    """`A: 10 tokens in pages [0, 1, 4]` per request, then what is cached (next to go first) and what is free."""
    said = [f"{letter(r)}: {r.computed:>3} tokens in pages {pool.held(r)}" for r in requests]
    return "\n".join([*said, f"cached {list(pool.cached)}, free {sorted(pool.free)}"])


def draw(
    ax, pool: PagePool, requests: Iterable[Request], word: Callable[[int], str] = str, per_row: int = 10
):
    """Boxes from left to right, page 0 first. `word` makes a token short enough for its slot."""
    S, pages = pool.page_size, rows(pool, requests)
    for number, page in enumerate(pages):
        left, top = number % per_row * (S + 0.8), -(number // per_row) * 2.6
        _box(ax, left, top, S, page)
        for slot in range(S):
            ax.add_patch(Rectangle((left + slot, top), 1, 1, fill=False, edgecolor=LINE, linewidth=0.6))
            if slot < len(page.tokens):
                text = word(page.tokens[slot])
                ax.text(left + slot + 0.5, top + 0.48, text, ha="center", va="center", fontsize=8, color=INK)
        ax.add_patch(Rectangle((left, top), S, 1, fill=False, edgecolor=INK, linewidth=1.2))
        ax.text(left + S / 2, top + 1.15, f"page {number}", ha="center", va="bottom", fontsize=7, color=LINE)
        below = " ".join(page.owners) or ("" if page.state == "free" else page.state)
        mark = " #" if page.indexed else ""
        ax.text(left + S / 2, top - 0.15, below + mark, ha="center", va="top", fontsize=8, color=INK)
    columns, bands = min(per_row, len(pages)), -(-len(pages) // per_row)
    ax.set(xlim=(-0.2, columns * (S + 0.8) - 0.6), ylim=(-2.6 * (bands - 1) - 0.9, 1.7))
    ax.set_aspect("auto")
    ax.axis("off")
    return ax


def against_page_size(left, right, sizes, waste, mean_length: float, seconds) -> None:
    """Two costs of a page's size: the empty share (dashed: half a page per request), and the pool's time."""
    left.plot(sizes, [100 * share for share in waste], "o", color=MEASURED, markersize=4)
    left.plot(sizes, [100 * size / (2 * mean_length + size) for size in sizes], "--", color=BOUND)
    right.plot(sizes, [1e6 * s for s in seconds], "s-", color=LINES[1][0], markersize=4)
    left.set(ylabel="empty, % of the memory")
    log_axis(right, "y", min(seconds) * 7e5, max(seconds) * 1.5e6)
    right.set(ylabel="µs per 1,000 tokens")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ticks = [size for size in sizes if math.log2(size) % 2 == 0]
        ax.set_xticks(ticks, [f"{size:,}" for size in ticks])
        ax.set_xlabel("tokens per page", fontsize=9)
        plain(ax)


def _box(ax, left: float, top: float, width: float, page: Page) -> None:
    """The page's background: a stripe per owner, grey and hatched if cached, nothing if free."""
    if page.state == "cached":
        ax.add_patch(
            Rectangle((left, top), width, 1, facecolor=CACHED, edgecolor="white", hatch="//", linewidth=0)
        )
    for i, owner in enumerate(page.owners):
        height = 1 / len(page.owners)
        face = FACES[(ord(owner) - ord("A")) % len(FACES)]
        ax.add_patch(
            Rectangle((left, top + 1 - (i + 1) * height), width, height, facecolor=face, linewidth=0)
        )
