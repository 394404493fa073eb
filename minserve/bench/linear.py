"""The linears of all layers at 1 to 512 rows, by each matmul there is: what `fused.Linear` bases its choice on.

    F.linear    PyTorch's, on weights as they lie
    oneDNN      the same library on weights laid in blocks beforehand: they are held a second time for it
    native      kernels/native.cpp, on weights as they lie
    bound       bytes of these weights / read bandwidth, or rows x 2 flops per weight / matmul rate

Each side goes through the whole model, so that no weight is still in a cache when it is needed again. A side that
has become three times slower than the best one is not asked for more rows. On a GPU there is F.linear only, and
`bench gemv` beside it.
Story    notebooks/08_the_engine.ipynb
"""

import math
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear

from minserve.bench.common import Around, Options, clean_up, label, load
from minserve.fused import FusedModel, Linear
from minserve.lab.measure import clock, in_turn
from minserve.lab.report import Report, Row

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
HOPELESS = 3.0  # times the best


def run(options: Options) -> Report:
    report = options.report()
    with Around(options) as around, torch.inference_mode():
        model = load(options.model, options.dtype)
        layers = FusedModel.of(model, 1).linears[:-1]  # the head computes only rows that sample
        measured = samples_of(options, layers)
        weights = sum(one.weight.numel() for one in layers)
    report.where += f", {label(options.model)} in {options.dtype_name}"
    for rows, sides in measured.items():
        bound = around.machine.seconds(weights * options.dtype.itemsize, 2 * weights * rows)
        for who, seconds in sides.items():
            report.add(Row(case_of(rows, who), "s", seconds, bound))
    chosen = f"{in_words(report)}; here `fused.Linear` takes it up to {layers[0].few}"
    last = report.rows[-1]
    report.rows[-1] = Row(last.case, "s", last.samples, last.bound, note=options.note(chosen, around.note))
    del model, layers
    clean_up()
    return report


def case_of(rows: int, who: str) -> str:
    return f"{rows} row{'s' if rows > 1 else ''}: {who}"


def samples_of(options: Options, layers: list[Linear]) -> dict[int, dict[str, list[float]]]:
    """{rows: {side: seconds of all layers}}"""
    sides, measured = sides_of(layers), {}
    many = (1, 4, 16) if options.quick else ROWS
    for done, rows in enumerate(many, 1):
        inputs = [torch.randn(rows, one.weight.shape[1]).to(one.weight) for one in layers]

        runs = {who: partial(through, side, inputs) for who, side in sides.items()}
        share = options.at_most / len(many)
        measured[rows] = in_turn(runs, repeats=options.repeats, at_most=share)
        best = {who: min(seconds) for who, seconds in measured[rows].items()}
        sides = {who: run for who, run in sides.items() if best[who] < HOPELESS * min(best.values())}
        options.progress("rows")(done, len(many))
    return measured


def through(side, inputs: list) -> float:
    """Seconds of all layers."""
    return clock(lambda: [side(i, x) for i, x in enumerate(inputs)])


def sides_of(layers: list[Linear]) -> dict:
    """{side: a function of (the linear's number, x)}, those that this machine has."""
    first = layers[0]
    sides = {"F.linear": lambda i, x: linear(x, layers[i].weight, layers[i].bias)}
    if first.weight.is_cpu and first.weight.dtype == torch.bfloat16:
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            packed = [one.packed for one in layers]
            if packed[0] is None:
                packed = [torch.ops.mkldnn._reorder_linear_weight(one.weight) for one in layers]
            pointwise = torch.ops.mkldnn._linear_pointwise
            sides["oneDNN"] = lambda i, x: pointwise(x, packed[i], layers[i].bias, "none", [], "")
    if first.few:
        sides["native"] = lambda i, x: layers[i].by_native(x)
    return sides


def table_of(report: Report) -> dict[str, dict[int, float]]:
    """{side: {rows: median seconds}}"""
    table: dict[str, dict[int, float]] = {}
    for row in report.rows:
        rows, who = row.case.split(": ")
        table.setdefault(who, {})[int(rows.split()[0])] = row.median
    return table


def level(report: Report) -> dict[str, int]:
    """{other side: the most rows up to which native takes at most 5 % longer; 0 if it never keeps up}"""
    table = table_of(report)
    native, most = table.pop("native", {}), {}
    for who, its in table.items():
        most[who] = 0
        for rows in sorted(its):
            if native.get(rows, math.inf) > 1.05 * its[rows]:
                break
            most[who] = rows
    return most


def in_words(report: Report) -> str:
    """Where native keeps up, as a title."""
    ends = [f"{who} up to {rows} row{'s' if rows > 1 else ''}" for who, rows in level(report).items() if rows]
    return f"The native kernel keeps up with {', '.join(ends)}" if ends else "Linears: time against rows"


def draw(report: Report, path: Path) -> None:
    from minserve.lab import figures  # matplotlib: only for who draws

    lines = [(who, list(its), list(its.values())) for who, its in table_of(report).items()]
    bound = {int(row.case.split()[0]): row.bound for row in report.rows}
    lines.append(("bound", list(bound), list(bound.values())))
    ax = figures.curves(figures.axes(), lines, "rows that go through all layers at once")
    figures.save(ax, path, in_words(report), report.where)
