"""Paged attention alone: KV bytes per second against the bandwidth roof, and against the same keys lying side by side.

    bytes = every key and value a row sees once, queries and outputs once, its page table once

Pages are shuffled. On a GPU both sides are kernels, replayed from a CUDA graph over buffers beyond L2; on a CPU ours
is the gathered path of paged_attention.py and the other side is PyTorch's SDPA over a padded contiguous cache.
A chunk row is a prefill of 2,048 tokens (256 on a CPU) behind a longer past: flops per second.
Story    notebooks/05_paged_attention.ipynb
"""

import random

import torch
import torch.nn.functional as F

from minserve.batch import Packer
from minserve.bench.common import Around, Options, device, on_gpu
from minserve.bench.kernel import kernel_samples
from minserve.bench.workload import PAGE
from minserve.kernels.decode_attention import decode_attention
from minserve.kernels.paged_attention import paged_decode
from minserve.kernels.paged_prefill import paged_prefill
from minserve.lab.report import Report, Row
from minserve.lab.roofline import name_of
from minserve.paged_attention import Gathered
from minserve.request import Request, SamplingParams

RAGGED = [random.Random(0).randint(256, 16384) for _ in range(64)]
GPU_CASES = {  # lengths -> share of the bandwidth worth reaching
    "32 x 4,096": ([4096] * 32, 0.85),
    "256 x 1,024": ([1024] * 256, 0.85),
    "8 x 4,096": ([4096] * 8, 0.72),
    "1 x 32,768": ([32768], 0.70),
    "1 x 131,072": ([131072], 0.82),
    "64 ragged, 256 to 16,384": (RAGGED, 0.75),
}
CPU_CASES = {
    "8 x 512": ([512] * 8, None),
    "32 x 256": ([256] * 32, None),
    "32 ragged, 16 to 512": ([random.Random(0).randint(16, 512) for _ in range(32)], None),
}


def run(options: Options) -> Report:
    report, measured = options.report(), []
    heads = (32, 8, 128) if on_gpu() else (9, 3, 64)
    cases = {"2 x 48": ([48, 48], None)} if options.quick else GPU_CASES if on_gpu() else CPU_CASES
    new, past = (16, 48) if options.quick else (2048, 32768) if on_gpu() else (256, 1024)
    with Around(options) as around:
        for name, (lengths, target) in cases.items():
            measured.append((name, target, *decode_samples(options, lengths, *heads)))
        chunk, chunk_notes = chunk_samples(options, new, past, *heads)
    shape = f"{heads[0]}/{heads[1]} heads of {heads[2]}, {name_of(options.dtype)}"
    for name, target, nbytes, samples, notes in measured:
        note = "; ".join(filter(None, [around.note, *notes]))
        for who, seconds in samples.items():
            ours = who == "paged"
            rates, bound = [nbytes / s for s in seconds], around.machine.read_bandwidth
            report.add(
                Row(
                    f"{shape}, {name}: {who}",
                    "B/s",
                    rates,
                    bound,
                    target if ours else None,
                    note if ours else "",
                )
            )
        pairs = zip(samples["paged"], samples["contiguous"])
        target = 0.95 if on_gpu() else None
        report.add(Row(f"{shape}, {name}: paged / contiguous", "x", [b / a for a, b in pairs], 1.0, target))
    flops = 4 * heads[0] * heads[2] * (new * past + new * (new + 1) // 2)
    rates, target = [flops / s for s in chunk["paged"]], 0.50 if on_gpu() else None
    case = f"{shape}, chunk of {new:,} after {past:,}: paged"
    report.add(Row(case, "FLOP/s", rates, around.machine.flops, target, "; ".join(chunk_notes)))
    return report


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
    gathered = None if on_gpu() else Gathered(batch, PAGE, None, 0)
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
            return gathered.attend(q, k.flatten(0, 1), v.flatten(0, 1))
        return paged_decode(q, k, v, batch.tables, batch.starts, batch.lengths, 1, longest)

    def contiguous(q, _, __, k, v):
        if on_gpu():
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
    gathered = None if on_gpu() else Gathered(batch, PAGE, None, 0)

    def buffers():
        shapes = [(new, heads, head_dim)] + [(pages, PAGE, kv_heads, head_dim)] * 2
        return [torch.randn(shape, device=device(), dtype=options.dtype) for shape in shapes]

    def paged(q, k, v):
        if gathered:
            return gathered.attend(q, k.flatten(0, 1), v.flatten(0, 1))
        return paged_prefill(q, k, v, batch.tables, batch.starts, batch.lengths, new)

    nbytes = 2 * (past + new) * kv_heads * head_dim * options.dtype.itemsize
    return kernel_samples(options, {"paged": paged}, buffers, nbytes)
