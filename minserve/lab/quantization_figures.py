"""Notebook 09's figures: named lines against anything, and two results of rounding side by side.

    groups(ax, curves, sizes)              error against bits per weight, a dot for each size of group
    searches(ax, exponents, curves)        the error that is left, against the exponent of AWQ's factors
    moved(left, right, weight, hessian..)  how far weights were moved, column by column, and outputs, one by one
    channels(ax, sides)                    what integers the channels get if the largest gets 127
    speedups(ax, batches, seconds)         each model's steps beside those of the first

Story    notebooks/09_quantization.ipynb
"""

import torch

from minserve.lab.figures import BOUND, LINES, MEASURED, titled
from minserve.lab.layout import plain
from minserve.quantization import output_error

SMOOTHED = 24  # columns in the mean that is drawn


def lines(ax, curves: dict[str, tuple], xlabel: str, ylabel: str, markers: bool = True, **more):
    """curves: {label: (xs, ys)}; `more` goes to ax.set."""
    if len(curves) > len(LINES):
        raise ValueError(
            f"{len(curves)} lines, and {len(LINES)} can be told apart in one figure: draw two figures"
        )
    for (label, (xs, ys)), (color, style, marker) in zip(curves.items(), LINES):
        ax.plot(xs, ys, color=color, linestyle=style, marker=marker if markers else "", ms=5, label=label)
    ax.set(**more)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    return plain(ax)


def groups(ax, curves: dict[str, tuple[list, list]], sizes) -> None:
    """curves: {label: (bits per weight, relative errors)}; `sizes`: the groups of the first, None for the row."""
    lines(ax, curves, "bits per weight, scales and zero points included", "relative error")
    first = next(iter(curves.values()))
    ax.set_ylim(0, 1.2 * max(first[1]))
    for size, x, y in zip(sizes, *first):
        ax.annotate(size or "whole row", (x, y), (5, 4), textcoords="offset points", fontsize=8)
    bits, errors = ((its[0], its[-1]) for its in first)
    title = f"Groups of {sizes[-1]}: {errors[0] / errors[1]:.1f} times less error for {bits[1] - bits[0]:.1f} bits more"
    titled(ax, title, "gate_proj of layer 10; numbers: columns of a group")


def searches(ax, exponents, curves: dict[str, list], of: str, where: str) -> tuple[float, float]:
    """curves: {label: errors as shares of RTN's}. Returns the best (error, exponent) of the curve called `of`."""
    named = {name: (exponents, curve) for name, curve in curves.items()}
    lines(ax, named, "exponent of the activations' size", "error / RTN's", ylim=(0, 2.5))
    ax.axhline(1, color=BOUND, linewidth=0.8)
    error, exponent = min(zip(curves[of], exponents))
    titled(ax, f"{of}: the exponent {exponent:.1f} leaves {error:.0%} of the error", where)
    return error, exponent


def moved(left, right, weight, hessian, nearest, clever) -> tuple[float, float]:
    """Two rounded weights [N, K]: each column's error on the left, each output's on the right.

    Returns how many times as far the clever one's weights are, and how many times as close its outputs.
    """
    columns = {}
    for name, its in ("RTN", nearest), ("GPTQ", clever):
        means = (its - weight).square().mean(0).sqrt().unfold(0, SMOOTHED, 8).mean(1).tolist()
        columns[name] = [SMOOTHED // 2 + 8 * i for i in range(len(means))], means
    lines(left, columns, "column, in the order of rounding", "error of the weights", markers=False)
    left.set_ylim(0, None)
    a, b = (output_error(its - weight, hessian).cpu() for its in (nearest, clever))
    right.scatter(a, b, s=8, color=MEASURED)
    ends = [torch.minimum(a, b).min(), torch.maximum(a, b).max()]
    right.plot(ends, ends, color=BOUND, linewidth=0.8)
    right.set(xscale="log", yscale="log")
    right.set_xlabel("error of an output, RTN", fontsize=9)
    right.set_ylabel("the same, GPTQ", fontsize=9)
    plain(right)
    squares = [float((its - weight).square().sum()) for its in (nearest, clever)]
    far, close = squares[1] / squares[0], float(a.sum() / b.sum())
    titled(left, f"Weights {far:.1f} times as far away ...", "q, k, v of layer 10; squared distances")
    titled(
        right,
        f"... outputs {close:.1f} times as close",
        f"{(b < a).float().mean():.0%} of {len(a)} are better",
    )
    return far, close


def channels(ax, sides: dict[str, torch.Tensor], where: str) -> None:
    """sides: {label: max|x| [K] of the channels}, before and after."""
    steps = {name: (x / x.max() * 127).sort(descending=True).values.tolist() for name, x in sides.items()}
    named = {name: (range(1, len(its) + 1), its) for name, its in steps.items()}
    more = dict(markers=False, xscale="log", yscale="log")
    lines(ax, named, "channel, the largest first", "the largest integer it gets", **more)
    before, after = (its[len(its) // 2] for its in steps.values())
    titled(ax, f"The median channel gets {before:.0f} of 127 integers; smoothed, {after:.0f}", where)


def speedups(ax, batches, seconds: dict[str, list], where: str) -> list[float]:
    """seconds: {model: one for each batch, then a prompt's}, bf16 first. Returns the last model's gains."""
    first, *_, last = seconds
    gains = {name: [a / b for a, b in zip(seconds[first], its)] for name, its in seconds.items()}
    places = range(len(seconds[first]))
    lines(
        ax,
        {name: (places, its) for name, its in gains.items()},
        "requests in a step",
        f"times as fast as {first}",
    )
    ax.set_xticks(places, [*map(str, batches), "a prompt"])
    ax.set_ylim(0, None)
    alone, *_, many, prompt = gains[last]
    title = (
        f"{last}: {alone:.1f} times as fast alone, {many:.1f} with {batches[-1]}, {prompt:.1f} for a prompt"
    )
    titled(ax, title, where)
    return gains[last]
