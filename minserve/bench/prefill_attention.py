"""Prefill attention alone: flops per second against the matmul roof and against PyTorch's SDPA.

    flops = 4 x heads x head_dim x (1 + 2 + ... + S): scores and weighted sum, nothing above the diagonal

On a GPU every side is replayed from a CUDA graph over buffers beyond L2, and SDPA is forced to
FlashAttention-2 and to cuDNN in turn; a fourth side is our kernel that reads the same keys through shuffled pages.
On a CPU the definition runs, and SDPA is what transformers calls.
Story    notebooks/04_flash_attention.ipynb
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from minserve.bench.common import Around, Options, attention_heads, device, on_gpu
from minserve.bench.kernel import kernel_samples
from minserve.bench.workload import PAGE
from minserve.kernels.paged_prefill import paged_prefill
from minserve.kernels.prefill_attention import prefill_attention
from minserve.lab.report import Report, Row
from minserve.lab.roofline import name_of

TARGET, LONG = 0.55, 8192  # of the matmul rate, from this length on
TIMES = {"SDPA FlashAttention-2": 1.25, "SDPA cuDNN": 0.75}
OF_DENSE = 0.85  # of our own kernel's rate, when the keys lie in pages


def run(options: Options) -> Report:
    report, measured = options.report(), []
    heads = attention_heads(options)
    lengths = (64,) if options.quick else (8192, 16384, 2048) if on_gpu() else (256, 512)
    with Around(options) as around:
        for length, its in options.shares(lengths):
            measured.append((length, *attention_samples(its, length, *heads)))
    for i, (length, samples, notes) in enumerate(measured):
        flops = 4 * heads[0] * heads[2] * length * (length + 1) // 2
        case = f"{heads[0]}/{heads[1]} heads of {heads[2]}, {name_of(options.dtype)}, {length} tokens"
        moved = options.note(around.note) if i == 0 else ""
        note = "; ".join(filter(None, [moved, *notes]))
        kernel = options.tiny or on_gpu() and length >= LONG
        add_rows(report, case, flops, around.machine.flops, samples, note, kernel)
    return report


def add_rows(
    report: Report, case: str, flops: int, roof: float, samples: dict, note: str, kernel: bool
) -> None:
    """kernel: these are the times of a kernel at work that fills a GPU, so there is something to reach."""
    for who, seconds in samples.items():
        ours = who == "minserve"
        rates, target = [flops / s for s in seconds], TARGET if ours and kernel else None
        report.add(Row(f"{case}: {who}", "FLOP/s", rates, roof, target, note if ours else ""))
    for who in samples:
        if who.startswith("SDPA"):
            times = [theirs / ours for ours, theirs in zip(samples["minserve"], samples[who])]
            report.add(Row(f"{case}: minserve / {who}", "x", times, 1.0, TIMES.get(who) if kernel else None))
    if "paged" in samples:
        times = [dense / paged for paged, dense in zip(samples["paged"], samples["minserve"])]
        report.add(Row(f"{case}: paged / minserve", "x", times, 1.0, OF_DENSE if kernel else None))


def attention_samples(options: Options, length: int, heads: int, kv_heads: int, head_dim: int):
    """(seconds per side, notes). The same keys and values serve as pages: a page is PAGE tokens in a row."""
    starts = torch.tensor([0, length], dtype=torch.int32, device=device())
    pages = (
        torch.randperm(length // PAGE, generator=torch.Generator().manual_seed(0)).int()[None].to(device())
    )

    def buffers():
        shapes = [(length, heads, head_dim)] + [(length, kv_heads, head_dim)] * 2
        return [torch.randn(shape, device=device()).to(options.dtype) for shape in shapes]

    def ours(q, k, v):
        return prefill_attention(q, k, v, starts, starts, length)

    def paged(q, k, v):
        k, v = (x.view(-1, PAGE, kv_heads, head_dim) for x in (k, v))
        return paged_prefill(q, k, v, pages, starts, starts[1:], length)

    nbytes = length * (heads + 2 * kv_heads) * head_dim * options.dtype.itemsize
    sides = {"minserve": ours, **({"paged": paged} if options.gpu_cases else {}), **sdpa_sides()}
    return kernel_samples(options, sides, buffers, nbytes)


def sdpa_sides() -> dict:
    """SDPA as this device offers it. It wants [1, H, S, D]; transposed views cost it nothing."""

    def sdpa(q, k, v, backend=None):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    if not on_gpu():
        return {"SDPA": sdpa}
    return {
        "SDPA FlashAttention-2": lambda *x: sdpa(*x, backend=SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": lambda *x: sdpa(*x, backend=SDPBackend.CUDNN_ATTENTION),
    }
