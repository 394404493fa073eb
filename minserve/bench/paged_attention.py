"""Paged attention alone: KV bytes per second against the bandwidth roof, and against the same keys lying side by side.

    bytes = every key and value a row sees once, queries and outputs once, its page table once

Pages are shuffled. On a GPU both sides are kernels, replayed from a CUDA graph over buffers beyond L2; on a CPU ours
is the gathered path of paged_attention.py and the other side is PyTorch's SDPA over a padded contiguous cache.
A chunk row is a prefill of 2,048 tokens (256 on a CPU) behind a longer past: flops per second.
Quantized keys and values: how many times faster than over 16 bits (a CPU's C++ kernels; fp8 only on a GPU).
Story    notebooks/05_paged_attention.ipynb
"""

import random
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from minserve.batch import Packer
from minserve.bench.common import Around, Options, attention_heads, device, on_gpu
from minserve.bench.kernel import kernel_samples
from minserve.bench.workload import PAGE
from minserve.kernels.decode_attention import decode_attention
from minserve.kernels.native import Native, usable
from minserve.kernels.paged_attention import paged_decode
from minserve.kernels.paged_prefill import paged_prefill
from minserve.kernels.quantized_attention import int4_decode, scaled_decode
from minserve.lab.report import Report, Row, quantity
from minserve.lab.roofline import name_of
from minserve.paged_attention import Gathered, reader
from minserve.request import Request, SamplingParams

RAGGED = [random.Random(0).randint(256, 16384) for _ in range(64)]
SHORT, MICROSECONDS = [1024], 10  # too little work for a share of the bandwidth: what counts is the time
GPU_CASES = [  # lengths, share of the bandwidth worth reaching
    ([4096] * 32, 0.85),
    (RAGGED, 0.75),
    ([131072], 0.82),
    (SHORT, None),
    ([1024] * 256, 0.85),
    ([4096] * 8, 0.72),
    ([32768], 0.70),
]
QUANTIZED = {"fp8": 0.58, "int8": 0.62, "int4": None}  # of the time over 16 bits, worth reaching on a GPU
TELLING = 4  # cases before these two, for the time may end
QUANTIZED_KV, CHUNK = "quantized keys and values", "a chunk"
CPU_CASES = [
    ([512] * 8, None),
    ([256] * 32, None),
    ([random.Random(0).randint(16, 512) for _ in range(32)], None),
]


def run(options: Options) -> Report:
    report, measured = options.report(), []
    heads = attention_heads(options)
    new, past = (16, 48) if options.quick else (2048, 32768) if on_gpu() else (256, 1024)
    plan, chunk, quantized = cases(options), {}, {}
    plan[TELLING:TELLING] = [QUANTIZED_KV, CHUNK]
    with Around(options) as around:
        for case, its in options.shares(plan):
            if case == QUANTIZED_KV:
                quantized = quantized_samples(its, *heads)
            elif case == CHUNK:
                chunk, chunk_notes = chunk_samples(its, new, past, *heads)
            else:
                measured.append((case, *decode_samples(its, case.lengths, *heads)))
    shape = f"{heads[0]}/{heads[1]} heads of {heads[2]}, {name_of(options.dtype)}"
    for i, (case, nbytes, samples, notes) in enumerate(measured):
        moved = options.note(around.note) if i == 0 else ""
        note = "; ".join(filter(None, [moved, *notes]))
        bandwidth = around.machine.read_bandwidth
        add_rows(report, options, f"{shape}, {case}", case, nbytes, bandwidth, samples, note)
    flops = 4 * heads[0] * heads[2] * (new * past + new * (new + 1) // 2)
    case, target = f"{shape}, chunk of {new:,} after {past:,}: paged", 0.50 if options.gpu_cases else None
    if rates := [flops / s for s in chunk.get("paged", ())]:
        report.add(Row(case, "FLOP/s", rates, around.machine.flops, target, "; ".join(chunk_notes)))
    for kind, (case, ratios, bound) in quantized.items():
        wanted = QUANTIZED[kind] if options.gpu_cases else None
        target = 1 / wanted / bound if wanted else None
        report.add(Row(f"{shape}, {case}: {kind} / 16 bits", "x", ratios, bound, target))
    return report


@dataclass(frozen=True)
class Case:
    lengths: list[int]
    target: float | None = None
    seconds: float | None = None  # worth reaching

    def __str__(self) -> str:
        least, most, count = min(self.lengths), max(self.lengths), len(self.lengths)
        return f"{count} x {most:,}" if least == most else f"{count} ragged, {least:,} to {most:,}"


def cases(options: Options) -> list[Case]:
    if not options.gpu_cases:
        return [Case([48, 48])] if options.quick else [Case(*case) for case in CPU_CASES]
    found = [Case(*case, MICROSECONDS * 1e-6 if case[0] is SHORT else None) for case in GPU_CASES]
    if not options.tiny:
        return found
    small = [[max(1, n // 256) for n in c.lengths[: max(1, len(c.lengths) // 8)]] for c in found]
    return [replace(c, lengths=lengths) for c, lengths in zip(found, small)]


def add_rows(
    report: Report,
    options: Options,
    name: str,
    case: Case,
    nbytes: int,
    bandwidth: float,
    samples: dict,
    note: str,
) -> None:
    bound, target = nbytes / bandwidth, case.target
    if case.seconds:
        target, wanted = bound / case.seconds, f"wanted: {case} in {quantity(case.seconds, 's')}"
        note = "; ".join(filter(None, [note, wanted]))
    for who, seconds in samples.items():
        about = (target, note) if who == "paged" else (None, "")
        if case.seconds:
            report.add(Row(f"{name}: {who}", "s", seconds, bound, *about))
        else:
            report.add(Row(f"{name}: {who}", "B/s", [nbytes / s for s in seconds], bandwidth, *about))
    ratios = [b / a for a, b in zip(samples["paged"], samples["contiguous"])]
    target = 0.95 if options.gpu_cases else None
    report.add(Row(f"{name}: paged / contiguous", "x", ratios, 1.0, target))


def step_of(rows: list[tuple[int, int]]):
    """A batch of (computed, new) rows whose pages are shuffled, and how many pages there are."""
    need = [-(-(computed + new) // PAGE) for computed, new in rows]
    order = torch.randperm(sum(need), generator=torch.Generator().manual_seed(0)).tolist()
    packer = Packer(len(rows), max(computed + new for computed, new in rows), PAGE, device())
    plan = []
    for i, ((computed, new), pages) in enumerate(zip(rows, need)):
        request = Request(i, [0] * (computed + new), SamplingParams(), 1)
        request.computed, request.seat, request.pages = computed, i, [order.pop() for _ in range(pages)]
        plan.append((request, new))
    return packer.pack(plan), sum(need)


def decode_samples(options: Options, lengths: list[int], heads: int, kv_heads: int, head_dim: int):
    """(bytes of one call, seconds per side, notes)"""
    batch, pages = step_of([(n - 1, 1) for n in lengths])
    B, longest = len(lengths), max(lengths)
    gathered = None if options.gpu_cases else Gathered(batch, PAGE, None, 0)
    seen = (torch.arange(longest, device=device()) < batch.lengths[:, None])[:, None, None]  # [B, 1, 1, S]
    seen = None if bool(seen.all()) else seen

    def buffers():
        shapes = (
            [(B, heads, head_dim)]
            + [(pages, PAGE, kv_heads, head_dim)] * 2
            + [(B, longest, kv_heads, head_dim)] * 2
        )
        return [torch.randn(shape, device=device(), dtype=options.dtype) for shape in shapes]

    def paged(q, k, v, *_):
        if gathered:
            return gathered.attend(q, reader(k.flatten(0, 1)), reader(v.flatten(0, 1)), torch.empty_like(q))
        return paged_decode(q, k, v, batch.tables, batch.starts, batch.lengths, 1, longest)

    def contiguous(q, _, __, k, v):
        if options.gpu_cases:
            return decode_attention(q, k, v, batch.lengths, longest)
        rows = q.view(
            B, kv_heads, heads // kv_heads, head_dim
        )  # a group's heads as queries: keys are read once
        return F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen)

    tokens = sum(lengths)
    nbytes = (2 * tokens * kv_heads + 2 * B * heads) * head_dim * options.dtype.itemsize + 4 * pages
    return nbytes, *kernel_samples(options, {"paged": paged, "contiguous": contiguous}, buffers, nbytes)


def chunk_samples(options: Options, new: int, past: int, heads: int, kv_heads: int, head_dim: int):
    """(seconds, notes) of one chunk behind a long past."""
    batch, pages = step_of([(past, new)])
    gathered = None if options.gpu_cases else Gathered(batch, PAGE, None, 0)

    def buffers():
        shapes = [(new, heads, head_dim)] + [(pages, PAGE, kv_heads, head_dim)] * 2
        return [torch.randn(shape, device=device(), dtype=options.dtype) for shape in shapes]

    def paged(q, k, v):
        if gathered:
            return gathered.attend(q, reader(k.flatten(0, 1)), reader(v.flatten(0, 1)), torch.empty_like(q))
        return paged_prefill(q, k, v, batch.tables, batch.starts, batch.lengths, new)

    nbytes = 2 * (past + new) * kv_heads * head_dim * options.dtype.itemsize
    return kernel_samples(options, {"paged": paged}, buffers, nbytes)


def quantized_samples(options: Options, heads: int, kv_heads: int, head_dim: int) -> dict:
    """{kind: (case, how many times faster than the same keys at 16 bits, how many times fewer bytes)}"""
    native = None if options.gpu_cases or usable() else Native()
    if native is None and not options.gpu_cases:
        return {}
    lengths = [8192] * 32 if on_gpu() else [48] * 2 if options.quick or options.tiny else [2048] * 8
    (batch, pages), B, longest = step_of([(n - 1, 1) for n in lengths]), len(lengths), max(lengths)
    plan, home = (
        (batch.tables, batch.starts, batch.lengths, 1, longest),
        PAGE * torch.arange(B, device=device()),
    )
    here, (G, D) = dict(device=device()), (kv_heads, head_dim)
    kinds = [kind for kind in QUANTIZED if kind != "fp8" or options.gpu_cases]

    def buffers():
        q, k, v = (
            torch.randn(n, **here).to(options.dtype) for n in [(B, heads, D)] + [(pages, PAGE, G, D)] * 2
        )
        small = [torch.randint(-40, 40, k.shape, dtype=torch.int8, **here) for _ in "kv"]
        scales = [torch.rand(k.shape[:3], **here) / 64 for _ in "kv"]
        packed = [torch.randint(256, (pages, PAGE, G, D // 2), dtype=torch.uint8, **here) for _ in "kv"]
        affine = [torch.rand(shape, **here).half() for shape in ((pages, 2, G, D), (pages, PAGE, G, 2))]
        fresh = [x[:B].flatten(0, 1) for x in (k, v)]
        return q, (k, v), (*small, *scales), (*packed, *affine, *fresh, home)

    def plain(q, cache, *_):
        return native.attend(q, *cache, *plan[::2][:2]) if native else paged_decode(q, *cache, *plan)

    def scaled(dtype):
        def run(q, _, cache, __):
            k, v, *scales = (x.view(dtype) if x.dtype is torch.int8 else x for x in cache)
            return (
                native.attend_scaled(q, *cache, *plan[::2][:2])
                if native
                else scaled_decode(q, k, v, *scales, *plan)
            )

        return run

    def int4(q, _, __, cache):
        return native.attend_int4(q, *cache, *plan[::2][:2]) if native else int4_decode(q, *cache, *plan)

    sides = {"fp8": scaled(torch.float8_e4m3fn), "int8": scaled(torch.int8), "int4": int4}
    row, size = 2 * G * sum(lengths), options.dtype.itemsize  # numbers of one channel, bytes
    nbytes = {"16": row * D * size, "fp8": row * (D + 4), "int8": row * (D + 4)}
    sealed = row * (D // 2 + 2 * D / PAGE + 2) * (1 - PAGE / longest)
    nbytes["int4"] = sealed + 2 * G * PAGE * B * D * size
    sides = {"16": plain} | {kind: sides[kind] for kind in kinds}
    samples, _ = kernel_samples(options, sides, buffers, nbytes["16"])
    case = str(Case(lengths))
    ratios = {
        kind: [a / b for a, b in zip(samples["16"], samples[kind])] for kind in kinds if kind in samples
    }
    return {kind: (case, ratios[kind], nbytes["16"] / nbytes[kind]) for kind in ratios}
