"""Our own GEMV against F.linear (cuBLAS on a GPU): a layer's four linears for 1 to 4 tokens.

    bound = bytes of the weight / read bandwidth; x and the result, a hundredth of them or so, are left out

On a GPU both sides are replayed from CUDA graphs over weights that together exceed L2; on a CPU our side is the
definition in fp32, which proves that the benchmark runs and nothing else.
Story    notebooks/08_the_engine.ipynb
"""

import torch
import torch.nn.functional as F

from minserve.bench.common import Around, Options, device, on_gpu
from minserve.bench.kernel import kernel_samples
from minserve.config import SHAPES, ModelConfig
from minserve.kernels.gemv import MOST_ROWS_OF_X, gemv
from minserve.lab.report import Report, Row
from minserve.lab.roofline import name_of

GPU_MODELS, CPU_MODELS = ["llama-3.1-8b", "llama-3.2-1b"], ["smollm2-135m"]


def run(options: Options) -> Report:
    report, measured = options.report(), []
    models = GPU_MODELS if on_gpu() else CPU_MODELS
    linears = [
        (f"{name} {what}", *shape) for name in models for what, shape in layer_of(SHAPES[name]).items()
    ]
    if options.quick:
        linears = [("small", 96, 64)]
    work = [(M, *linear) for M in range(1, MOST_ROWS_OF_X + 1) for linear in linears]
    with Around(options) as around:
        for (M, what, N, K), its in options.shares(work):
            case = f"{what} {N:,} x {K:,}, {name_of(options.dtype)}, M = {M}"
            measured.append((case, N * K * options.dtype.itemsize, *samples_of(its, M, N, K)))
    for i, (case, nbytes, samples, notes) in enumerate(measured):
        moved = options.note(around.note) if i == 0 else ""
        for who, seconds in samples.items():
            note = "; ".join(filter(None, [moved, *notes])) if who == "minserve" else ""
            rates = [nbytes / s for s in seconds]
            report.add(Row(f"{case}: {who}", "B/s", rates, around.machine.read_bandwidth, note=note))
        faster = [theirs / ours for ours, theirs in zip(samples["minserve"], samples["F.linear"])]
        report.add(Row(f"{case}: minserve / F.linear", "x", faster, 1.0))
    return report


def layer_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's linears, as the fused step has them."""
    E, I, D = config.hidden_size, config.intermediate_size, config.head_dim
    H, G = config.num_heads, config.num_kv_heads
    return {"qkv": ((H + 2 * G) * D, E), "o": (E, H * D), "gate and up": (2 * I, E), "down": (E, I)}


def samples_of(options: Options, M: int, N: int, K: int):
    """(seconds per side, notes)"""

    def buffers():
        return [torch.randn(shape, device=device()).to(options.dtype) for shape in ((M, K), (N, K))]

    return kernel_samples(
        options, {"minserve": gemv, "F.linear": F.linear}, buffers, N * K * options.dtype.itemsize
    )
