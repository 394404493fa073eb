"""Notebook 12's figures: learning and knowing by heart, a tree's mask, tokens per step by size, speedup by layer and k.

    losses(ax, steps, curves, where)          two loss curves
    mask(ax, words, parents, base)            the places of a tree, and which places each of them sees
    sizes(ax, ks, lines, measured, where)     tokens per step of trees and chains
    surface(ax, layers, ks, speedups, ...)    early exits: what the formula predicts, and what was measured

Story    notebooks/12_medusa_and_self_speculation.ipynb
"""

from matplotlib.patches import Rectangle

from minserve.batch import branches
from minserve.lab.figures import BOUND, LINES, titled
from minserve.lab.layout import INK, plain

SEEN, UNSEEN = "#9ECBE8", "#EEEEEE"
PAYS, LOSES = (0.0, 0.45, 0.70), (0.90, 0.60, 0.0)  # as light as it is near to 1


def losses(ax, steps, curves: dict[str, list[float]], where: str) -> tuple[float, float]:
    """curves: {label: losses}, one at each of `steps`. Returns where they end."""
    for (label, its), (color, style, marker) in zip(curves.items(), LINES):
        ax.plot(steps, its, color=color, linestyle=style, marker=marker, ms=4, label=label)
    ax.set_ylim(0, None)
    ax.set_xlabel("batches", fontsize=9)
    ax.set_ylabel("cross entropy", fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    plain(ax)
    known, new = (its[-1] for its in curves.values())
    titled(
        ax, f"After {steps[-1]} batches: {known:.1f} on what it learned from, {new:.1f} on what is new", where
    )
    return known, new


def mask(ax, words: list[str], parents: list[int], base: int) -> None:
    """A row for each place (the last token, then the nodes), a column for each slot; `base`: that of the last token."""
    depths, own = branches(parents)
    n = len(words)
    for t, (word, depth, seen) in enumerate(zip(words, depths, own)):
        for j in range(t + 1):
            sees = seen >> t - j & 1
            face = INK if j == t else SEEN if sees else UNSEEN
            ax.add_patch(Rectangle((j, t), 0.92, 0.9, facecolor=face, edgecolor=BOUND, linewidth=0.5))
            ink = "white" if j == t else INK
            ax.text(j + 0.46, t + 0.47, sees, ha="center", va="center", fontsize=8, color=ink)
        ax.text(-6, t + 0.47, "   " * depth + word, va="center", fontsize=8, color=INK, family="monospace")
        ax.text(-0.4, t + 0.47, base + depth, ha="right", va="center", fontsize=8, color=INK)
        ax.text(
            n + 0.4,
            t + 0.47,
            f"…{seen & 2**n - 1:0{n}b}",
            va="center",
            fontsize=8,
            color=INK,
            family="monospace",
        )
    head = dict(fontsize=8, color=BOUND)
    ax.text(-6, -0.25, "token", **head)
    ax.text(-0.4, -0.25, "position", ha="right", **head)
    ax.text(n + 0.4, -0.25, "bits, own place last", **head)
    for j in range(n):
        ax.text(j + 0.46, -0.25, f"slot {base}" if j == 0 else f"+{j}", ha="center", **head)
    ax.set(xlim=(-6, n + 4.5), ylim=(n, -0.9))
    ax.axis("off")


def sizes(ax, ks, lines: dict[str, list[float]], measured: dict[str, list[tuple]], where: str) -> None:
    """lines: {name: tokens per step of 1, 2, ... nodes}, as predicted; measured: {name: [(nodes, tokens)]}."""
    for (name, ys), (color, style, marker) in zip(lines.items(), LINES):
        ax.plot(ks[: len(ys)], ys, color=color, linestyle=style, label=f"{name}, predicted")
        ax.plot(*zip(*measured[name]), color=color, marker=marker, linestyle="", label=f"{name}, measured")
    ax.set(ylim=(1, None), xscale="log")
    ticks = [k for k in (1, 2, 4, 8, 16, 32) if k <= ks[-1]]
    ax.set_xticks(ticks, [*map(str, ticks)])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("nodes of the draft", fontsize=9)
    ax.set_ylabel("tokens per step", fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    plain(ax)
    tree, chain = (ys[-1] for ys in lines.values())
    titled(ax, f"A tree of {ks[-1]} makes {tree:.2f} tokens per step; a chain ends at {chain:.2f}", where)


def surface(ax, layers, ks, speedups: list[list[float]], measured: dict[tuple, float], where: str) -> float:
    """A box for each layer and k: blue where drafts pay, orange where they lose. Returns the best prediction.

    measured: {(layer, k): speedup}: below the prediction, in a frame.
    """
    for r, (layer, line) in enumerate(zip(layers, speedups)):
        for j, (k, value) in enumerate(zip(ks, line)):
            side, far = (PAYS if value >= 1 else LOSES), min(1.0, 1.6 * abs(value - 1))
            face = tuple(1 - far * (1 - part) for part in side)
            ink = "white" if sum(a * b for a, b in zip(face, (0.3, 0.59, 0.11))) < 0.55 else INK
            ax.add_patch(Rectangle((j, r), 1, 1, facecolor=face, edgecolor="white", linewidth=1.5))
            text = f"{value:.2f}"
            if (layer, k) in measured:
                text += f"\nmeasured {measured[layer, k]:.2f}"
                frame = dict(fill=False, edgecolor=ink, linewidth=1.2)
                ax.add_patch(Rectangle((j + 0.03, r + 0.06), 0.94, 0.88, **frame))
            ax.text(j + 0.5, r + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
    ax.set(xlim=(0, len(ks)), ylim=(len(layers), 0))
    ax.set_xticks([j + 0.5 for j in range(len(ks))], ks)
    ax.set_yticks([r + 0.5 for r in range(len(layers))], [f"{e} layers" for e in layers])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("drafts per step, k   (times as fast, by the formula; framed: measured, too)", fontsize=9)
    best, e, k = max((value, e, k) for e, line in zip(layers, speedups) for k, value in zip(ks, line))
    titled(
        ax, f"Best by the formula: {k} draft{'s' * (k > 1)} from {e} layers, {best:.2f} times as fast", where
    )
    return best
