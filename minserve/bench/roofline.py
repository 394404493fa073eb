"""The ceilings themselves: how fast this machine reads and multiplies, and how steady it is about it.

    bound  = the best sample; ratio = how near the usual one comes, so 100 % is a machine that holds still

Below them what F.linear reaches between the two roofs: 1 row is decoding (bandwidth), many rows are prefill.
Story    notebooks/00_the_machine.ipynb
"""

import torch
import torch.nn.functional as F

from minserve.bench.common import Options, device, on_gpu
from minserve.lab.measure import measure
from minserve.lab.report import Report, Row
from minserve.lab.roofline import ceilings, name_of


def run(options: Options) -> Report:
    report = options.report()
    dtypes = tuple(dict.fromkeys([options.dtype, torch.float32]))
    found = ceilings(dtypes, options.quick)
    for way, samples in found.read.items():
        report.add(Row(f"memory, {way}", "B/s", samples, found.read_bandwidth))
    for name, samples in found.matmul.items():
        report.add(Row(f"matmul {name}", "FLOP/s", samples, max(samples)))
    machine = found.machine(options.dtype)
    for rows in (1, 16, 256):
        report.add(linear_row(options, rows, machine))
    return report


def linear_row(options: Options, rows: int, machine) -> Row:
    """F.linear over weights that no cache holds, one matrix after the other as in a model's layers."""
    n = 256 if options.quick else 8192 if on_gpu() else 2048
    total = 2**24 if options.quick else 2**31 if on_gpu() else 2**30
    count = max(2, total // (n * n * options.dtype.itemsize))
    weights = [torch.randn(n, n, device=device()).to(options.dtype) for _ in range(count)]
    x = torch.randn(rows, n, device=device()).to(options.dtype)

    def layers():
        for weight in weights:
            F.linear(x, weight)

    timing = measure("linear", layers, warmup=1, repeats=options.repeats, at_most=3)
    bound = count * machine.seconds(n * n * options.dtype.itemsize, 2 * rows * n * n)
    case = f"F.linear {name_of(options.dtype)}, {rows} x {n} x {n}, {count} matrices"
    return Row(case, "s", timing.seconds, bound)
