"""A layer's four linears over quantized weights, from 1 row to 512, by every road: where each one pays.

    F.linear    the same weights unquantized, in the dtype of the activations: what the others are compared with
    minserve    a GPU: int4_matmul, int8_matmul, which choose by the number of rows among
    gemv, dot, dense    kernels/packed_matmul.py's three roads; their crossings are what its constants should say
    native      a CPU: kernels/native_quant.cpp and native_digits.cpp on packed weights; up to 128 rows replayed in C++,
                as in the engine's recorded steps: the other sides are called from Python
    unpacked    a CPU: unpacked as a whole, then F.linear
    torch       a CPU: PyTorch's own kernels, _weight_int8pack_mm and _weight_int4pack_mm_for_cpu
    bound       bytes of the packed weights, scales included, / read bandwidth, or 2 flops per weight and row / rate

Every side goes through copies of the layer that no cache can hold: through a replayed CUDA graph on a GPU, one after
the other on a CPU. A ratio is the geometric mean over the four shapes.
Story    notebooks/09_quantization.ipynb
"""

from functools import partial
from statistics import geometric_mean

import torch
from torch.nn.functional import linear

from minserve.bench.common import Around, Options, device, on_gpu
from minserve.bench.gemv import layer_of
from minserve.bench.kernel import kernel_samples
from minserve.config import SHAPES
from minserve.kernels import native, packed_matmul
from minserve.kernels.int4_matmul import int4_matmul
from minserve.kernels.int8_matmul import int8_matmul
from minserve.lab.measure import clock, copies_beyond_cache, in_turn
from minserve.lab.report import Report, Row
from minserve.lab.roofline import last_level_cache_bytes, name_of
from minserve.quantization import Scheme, pack, quantize
from minserve.quantized_linear import TILED

ROWS = (1, 16, 64, 4, 256, 2, 8, 32, 128, 512)  # the most telling first, for the time may end
SCHEMES = {"int4 g128": Scheme(4, 128), "int8": Scheme(8), "int4 g64": Scheme(4, 64)}
TARGETS = {
    ("int4 g128", 1): 2.3, ("int4 g128", 16): 1.9, ("int4 g128", 64): 1.1, ("int8", 1): 1.65, ("int8", 16): 1.5,
}  # fmt: skip


def run(options: Options) -> Report:
    report, measured = options.report(), []
    shapes = list(layer_of(SHAPES["llama-3.1-8b" if on_gpu() else "smollm2-135m"]).values())
    shapes = [(96, 64), (64, 256)] if options.quick else shapes
    cases = [(M, name) for M in ((1, 4) if options.quick else ROWS) for name in SCHEMES]
    with Around(options) as around, torch.inference_mode():
        for (M, name), its in options.shares(cases):
            share = [
                samples_of(own, M, SCHEMES[name], *shape) for shape, own in its.shares(shapes, len(shapes))
            ]
            measured.append((M, name, share))
    report.where += f", {'Llama-3.1-8B' if on_gpu() else 'SmolLM2-135M'}'s shapes in {name_of(options.dtype)}"
    weights = sum(N * K for N, K in shapes)
    for M, name, share in measured:
        nbytes = sum(nbytes for _, nbytes, _ in share)
        bound = around.machine.seconds(nbytes, 2 * weights * M)
        case = f"{name}, {M} row{'s' if M > 1 else ''}"
        sides = [samples for samples, _, _ in share]
        for who in (who for who in sides[0] if all(who in its for its in sides)):
            seconds = [sum(run) for run in zip(*(its[who] for its in sides))]
            report.add(
                Row(
                    f"{case}: {who}",
                    "s",
                    seconds,
                    bound,
                    note="; ".join(share[0][2]) if who == "F.linear" else "",
                )
            )
        ours = "minserve" if on_gpu() else "native"
        if ours in sides[0]:
            faster = [
                geometric_mean(r)
                for r in zip(*([a / b for a, b in zip(s["F.linear"], s[ours])] for s in sides))
            ]
            least = TARGETS.get((name, M), 0.95) if on_gpu() else None
            report.add(Row(f"{case}: {ours} / F.linear", "x", faster, 1.0, least))
    last = report.rows[-1]
    report.rows[-1] = Row(
        last.case, last.unit, last.samples, last.bound, last.target, options.note(last.note, around.note)
    )
    return report


def samples_of(options: Options, M: int, scheme: Scheme, N: int, K: int):
    """({side: seconds of one linear}, bytes of its packed weights, notes)"""

    def buffers():
        weight = (torch.randn(N, K, device=device()) * K**-0.5).to(options.dtype)
        integers, scales, _ = quantize(weight.float(), scheme)
        qweight = pack(integers) if scheme.bits == 4 else integers
        held = (qweight, scales.to(options.dtype), None, scheme.group)
        return (
            torch.randn(M, K, device=device()).to(options.dtype),
            weight,
            held,
            laid_out(scheme, integers, held[1]),
        )

    first = buffers()
    qweight, scales = first[2][:2]
    packed = qweight.nbytes + scales.nbytes
    sides = {
        "F.linear": lambda x, weight, held, other: linear(x, weight),
        **sides_of(M, scheme, K, options.dtype),
    }
    if on_gpu():
        return (*swap(kernel_samples(options, sides, buffers, packed), packed),)
    copies = 2 if options.quick else min(64, copies_beyond_cache(packed, last_level_cache_bytes()) // 4 + 2)
    sets = [first] + [buffers() for _ in range(copies - 1)]
    runs = {who: partial(through, run, sets) for who, run in sides.items()}
    if "native" in runs and M <= TILED:  # the engine records a step of so few rows
        runs["native"] = recorded(sides["native"], sets)
    return in_turn(runs, repeats=options.repeats, at_most=options.at_most / 120), packed, []


def swap(measured, packed: int):
    samples, notes = measured
    return samples, packed, notes


def through(run, sets: list) -> float:
    """Seconds of one call, over sets that take turns."""
    return clock(lambda: [run(*own) for own in sets]) / len(sets)


def recorded(run, sets: list):
    """The same, its calls replayed in C++: a recorded step does not pay for being called from Python."""
    ops = native.Native()
    with ops.recording() as calls:
        for x, weight, held, other in sets:
            run(x, weight, held, other, ops)
    replay = ops.replay(calls)
    return lambda: clock(replay) / len(sets)


def sides_of(M: int, scheme: Scheme, K: int, dtype) -> dict:
    """{side: a function of (x, weight, packed weights, PyTorch's layout of them)}, those that this machine has."""
    bits = scheme.bits
    if on_gpu():
        ours, roads = int4_matmul if bits == 4 else int8_matmul, {"dot": packed_matmul.by_dot}
        if M <= 4:
            roads["gemv"] = packed_matmul.by_gemv
        if M >= 16:
            roads["dense"] = packed_matmul.by_dense
        sides = {who: partial(by_road, road, bits) for who, road in roads.items()}
        return {"minserve": lambda x, weight, held, other: ours(x, *held)} | sides
    sides = {}
    if not native.usable():
        ops = native.Native()
        name = f"linear_int{bits}"
        sides["native"] = lambda x, weight, held, other, ops=ops: getattr(ops, name)(x, *held)
        unpack = ops.dequantize_int4 if bits == 4 else ops.dequantize_int8
        sides["unpacked"] = lambda x, weight, held, other: linear(x, unpack(*held, K, dtype))
    if dtype == torch.bfloat16 and other_fits(scheme, K):
        theirs = torch.ops.aten._weight_int4pack_mm_for_cpu if bits == 4 else torch._weight_int8pack_mm
        sides["torch"] = lambda x, weight, held, other: theirs(x, *other)
    return sides


def by_road(road, bits: int, x, weight, held, other):
    qweight, scales, zeros, group = held
    return road(bits, x, qweight if bits == 4 else qweight.view(torch.int32), scales, zeros, group, None)


def other_fits(scheme: Scheme, K: int) -> bool:
    return scheme.bits == 8 or K % scheme.group == 0  # PyTorch's groups are all whole


def laid_out(scheme: Scheme, integers, scales):
    """What PyTorch's kernels for a CPU take after x."""
    if on_gpu() or not other_fits(scheme, integers.shape[1]):
        return None
    if scheme.bits == 8:
        return integers, scales[:, 0].contiguous()
    pairs = (
        torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous()
    )  # [Q, N, (scale, shift)]
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.int(), 1), scheme.group, pairs
