"""Decode attention alone: KV bytes per second against the bandwidth roof and against PyTorch's SDPA.

    bytes = every key and value once, queries and outputs once

On a GPU every side is replayed from a CUDA graph over buffers beyond L2; on a CPU the definition runs.
Story    notebooks/04_flash_attention.ipynb
"""

import torch
import torch.nn.functional as F

from minserve.bench.common import Around, Options, device, on_gpu
from minserve.bench.kernel import kernel_samples
from minserve.kernels.decode_attention import decode_attention
from minserve.lab.report import Report, Row
from minserve.lab.roofline import name_of

# sequences, context -> share of the bandwidth worth reaching
GPU_CASES = {(32, 4096): 0.85, (256, 1024): 0.85, (8, 4096): 0.72, (1, 32768): 0.70, (1, 131072): 0.82}
CPU_CASES = {(1, 1024): None, (4, 512): None}


def run(options: Options) -> Report:
    report, measured = options.report(), []
    heads = (32, 8, 128) if on_gpu() else (9, 3, 64)
    cases = {(2, 64): None} if options.quick else GPU_CASES if on_gpu() else CPU_CASES
    with Around(options) as around:
        for (batch, context), target in cases.items():
            measured.append((batch, context, target, *attention_samples(options, batch, context, *heads)))
    for batch, context, target, nbytes, samples, notes in measured:
        case = f"{heads[0]}/{heads[1]} heads of {heads[2]}, {name_of(options.dtype)}, {batch} x {context}"
        note = "; ".join(filter(None, [around.note, *notes]))
        for who, seconds in samples.items():
            ours = who == "minserve"
            rates = [nbytes / s for s in seconds]
            bound = around.machine.read_bandwidth
            report.add(
                Row(f"{case}: {who}", "B/s", rates, bound, target if ours else None, note if ours else "")
            )
        if "SDPA" in samples:
            times = [theirs / ours for ours, theirs in zip(samples["minserve"], samples["SDPA"])]
            report.add(Row(f"{case}: minserve / SDPA", "x", times, 1.0))
    return report


def attention_samples(options: Options, batch: int, context: int, heads: int, kv_heads: int, head_dim: int):
    """(bytes of one call, seconds per side, notes)"""
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device())

    def buffers():
        shapes = [(batch, heads, head_dim)] + [(batch, context, kv_heads, head_dim)] * 2
        return [torch.randn(shape, device=device()).to(options.dtype) for shape in shapes]

    def ours(q, k, v):
        return decode_attention(q, k, v, lengths, context)

    def sdpa(q, k, v):
        k, v = (x.transpose(1, 2) for x in (k, v))  # [B, G, S, D]
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    nbytes = batch * (2 * context * kv_heads + 2 * heads) * head_dim * options.dtype.itemsize
    return nbytes, *kernel_samples(options, {"minserve": ours, "SDPA": sdpa}, buffers, nbytes)
