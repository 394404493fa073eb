"""The roofline: work is late either because bytes must arrive or because flops must happen; predict both.

    seconds >= max(bytes / read_bandwidth, flops / rate)          the two roofs
    ridge    = rate / read_bandwidth                              flops per byte at which they meet
    intensity = flops / bytes    below the ridge you wait for memory, above it for arithmetic

Bytes here are the least any implementation can move: each weight once per step, each key and value once.
Flops are 2 per weight and row (norms and biases, a thousandth of the weights, are counted as if they were
matrices) plus attention, 4 x heads x head_dim per query and key it sees.

    one decode step, b sequences of c tokens     bytes = weights + b x c x kv_bytes_per_token
                                                 flops = b x (2 x weights + attention(c))
    a prefill of n tokens                        bytes = weights + n x kv_bytes_per_token
                                                 flops = n x 2 x weights + attention(1 + ... + n)

Measured ceilings (`ceilings`) are what a benchmark is compared with; datasheets (`GPUS`) only predict.
Sources  Williams, Waterman, Patterson 2009, "Roofline"; datasheets named in GPUS.
Story    notebooks/00_the_machine.ipynb, notebooks/02_prefill_and_decode.ipynb
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minserve.config import ModelConfig
from minserve.kernels import stream
from minserve.kv_cache import bytes_per_token
from minserve.lab.measure import measure, measure_graph, where_am_i


@dataclass(frozen=True)
class Machine:
    name: str
    read_bandwidth: float  # bytes/s
    flops: float  # 16-bit matmul flops/s unless the name says otherwise
    memory: float | None = None  # bytes
    source: str = ""

    @property
    def ridge(self) -> float:
        """Flops per byte below which memory is the wait."""
        return self.flops / self.read_bandwidth

    def seconds(self, nbytes: float, flops: float) -> float:
        return max(nbytes / self.read_bandwidth, flops / self.flops)


# Dense 16-bit tensor rates with fp32 accumulation: "with sparsity" is twice as much and not for us.
GPUS = {
    machine.name: machine
    for machine in (
        Machine("T4", 320e9, 65e12, 16e9, "NVIDIA T4 datasheet (fp16; no bf16)"),
        Machine("L4", 300e9, 121e12, 24e9, "NVIDIA L4 datasheet (half of 242, sparse)"),
        Machine("RTX 4090", 1008e9, 165.2e12, 24e9, "NVIDIA Ada architecture whitepaper, appendix A"),
        Machine("A100-80GB", 2039e9, 312e12, 80e9, "NVIDIA A100 datasheet, SXM"),
        Machine("H100 SXM", 3350e9, 989.4e12, 80e9, "NVIDIA H100 datasheet (half of 1,979, sparse)"),
        Machine("H200", 4800e9, 989.4e12, 141e9, "NVIDIA H200 datasheet (half of 1,979, sparse)"),
        Machine("MI300X", 5300e9, 1307.4e12, 192e9, "AMD Instinct MI300X data sheet"),
    )
}


# ---------------------------------------------------------------- counting
def intensity(flops: float, nbytes: float) -> float:
    """Flops per byte moved: a property of the work, to hold against a machine's ridge."""
    return flops / nbytes


def weight_bytes(config: ModelConfig, itemsize: int = 2) -> int:
    """What every step reads however few tokens it computes."""
    return config.num_params_read * itemsize


def kv_bytes(config: ModelConfig, context: int, itemsize: int = 2) -> int:
    """Keys and values one query reads at `context`; layers with a window read no further back than it."""
    one_layer = bytes_per_token(1, config.num_kv_heads, config.head_dim, itemsize)
    return one_layer * _keys_seen(config, context)


def attention_flops(config: ModelConfig, context: int) -> int:
    """One query against `context` keys in all layers: scores and weighted sum, a multiply and an add each."""
    return 4 * config.num_heads * config.head_dim * _keys_seen(config, context)


def flops_per_token(config: ModelConfig) -> int:
    """Without attention: a multiply and an add per weight."""
    return 2 * config.num_params_read


def decode_bytes(config: ModelConfig, batch: int, context: int, itemsize: int = 2) -> int:
    return weight_bytes(config, itemsize) + batch * kv_bytes(config, context, itemsize)


def decode_flops(config: ModelConfig, batch: int, context: int) -> int:
    return batch * (flops_per_token(config) + attention_flops(config, context))


def prefill_bytes(config: ModelConfig, tokens: int, itemsize: int = 2) -> int:
    """Weights once, and the new keys and values once, to be written."""
    per_token = bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, itemsize)
    return weight_bytes(config, itemsize) + tokens * per_token


def prefill_flops(config: ModelConfig, tokens: int, rows: int | None = None) -> int:
    """rows: how many positions need logits (all when None; 1 is all that generation needs)."""
    skipped = 0 if rows is None else tokens - rows  # positions whose logits nobody asked for
    head = config.vocab_size * config.hidden_size
    keys = sum(_keys_seen_until(window, tokens) for window in config.windows)
    attention = 4 * config.num_heads * config.head_dim * keys
    return tokens * flops_per_token(config) - skipped * 2 * head + attention


def _keys_seen(config: ModelConfig, context: int) -> int:
    """Keys one query reads, summed over the layers."""
    return sum(context if window is None else min(context, window) for window in config.windows)


def _keys_seen_until(window: int | None, tokens: int) -> int:
    """Keys all queries of a causal prompt read in one layer: 1 + 2 + ... + n, each at most `window`."""
    full = tokens if window is None else min(window, tokens)
    return full * (full + 1) // 2 + (tokens - full) * full


# ---------------------------------------------------------------- predicting
def decode_seconds(
    config: ModelConfig, machine: Machine, batch: int = 1, context: int = 0, itemsize: int = 2
) -> float:
    """The least seconds of one decode step of `batch` sequences that see `context` tokens each."""
    nbytes = decode_bytes(config, batch, context, itemsize)
    return machine.seconds(nbytes, decode_flops(config, batch, context))


def prefill_seconds(
    config: ModelConfig, machine: Machine, tokens: int, itemsize: int = 2, rows: int | None = None
) -> float:
    return machine.seconds(prefill_bytes(config, tokens, itemsize), prefill_flops(config, tokens, rows))


def batch_at_ridge(config: ModelConfig, machine: Machine, context: int = 0, itemsize: int = 2) -> float:
    """The batch size from which decode waits for arithmetic; infinite when each sequence's KV cache alone
    keeps it on the bandwidth roof, which no batch size shares out."""
    arithmetic = decode_flops(config, 1, context) / machine.flops  # seconds per sequence
    cache = kv_bytes(config, context, itemsize) / machine.read_bandwidth
    if arithmetic <= cache:
        return math.inf
    return weight_bytes(config, itemsize) / machine.read_bandwidth / (arithmetic - cache)


# ---------------------------------------------------------------- measuring
@dataclass(frozen=True)
class Ceilings:
    """What this machine does when nothing but memory, or nothing but arithmetic, is asked of it."""

    where: str
    read: dict[str, list[float]]  # way of reading -> bytes/s
    matmul: dict[str, list[float]] = field(default_factory=dict)  # dtype -> flops/s

    @property
    def read_bandwidth(self) -> float:
        """The best sample of the best way: a bound is what cannot be beaten, not what is usual."""
        return max(max(samples) for samples in self.read.values())

    def machine(self, dtype: torch.dtype = torch.bfloat16) -> Machine:
        rate = max(self.matmul[name_of(dtype)])
        return Machine(self.where, self.read_bandwidth, rate, source="measured here")


def ceilings(dtypes=(torch.bfloat16, torch.float32), quick: bool = False) -> Ceilings:
    """Measure both roofs where we stand. quick: small buffers, few repeats, for tests; they prove nothing."""
    repeats = 3 if quick else 20
    read = read_samples(1 << 22 if quick else beyond_cache_bytes(), repeats)
    return Ceilings(where_am_i(), read, {name_of(d): matmul_samples(d, quick, repeats) for d in dtypes})


def read_samples(nbytes: int, repeats: int) -> dict[str, list[float]]:
    """Bytes/s of several ways to read a buffer once; copy counts what it reads and what it writes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(nbytes // 4, device=device)
    half = x[: len(x) // 2], x[len(x) // 2 : len(x) // 2 * 2]
    ways = {"copy": lambda: stream.copy(*half)}
    if device == "cuda":
        ways["total"] = lambda: stream.total(x)
    else:  # plain PyTorch reductions, which use every thread
        ways |= {"sum": lambda: x.sum(), "dot": lambda: torch.dot(x, x)}
    return {way: [x.numel() * 4 / s for s in seconds(run, repeats)] for way, run in ways.items()}


def matmul_samples(dtype: torch.dtype, quick: bool, repeats: int) -> list[float]:
    """Flops/s of square matmuls of the sizes that usually win; a slow CPU is stopped by the time limit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (256,) if quick else (4096, 8192) if device == "cuda" else (1024, 2048)
    samples = []
    for n in sizes:
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        samples += [2 * n**3 / s for s in seconds(lambda a=a, b=b: a @ b, repeats)]
    return samples


def seconds(run: Callable[[], object], repeats: int) -> list[float]:
    """One call's seconds: as it is on a CPU, from a replayed graph on a GPU, where a launch would blur it."""
    if torch.cuda.is_available():
        return measure_graph("", [run], repeats=repeats).seconds
    return measure("", run, warmup=2, repeats=repeats, at_most=2.5).seconds


def beyond_cache_bytes() -> int:
    """A buffer no cache can hold: 2x a CPU's last level, 8x a GPU's L2; at most a quarter of the memory."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return min(max(1 << 30, 8 * device.L2_cache_size), device.total_memory // 4)
    return min(max(256 << 20, 2 * last_level_cache_bytes()), memory_bytes() // 4)


def last_level_cache_bytes() -> int:
    """As Linux reports it; 64 MiB, more than most laptops have, where nobody tells."""
    sizes = [_size(p.read_text()) for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=64 << 20)


def memory_bytes() -> int:
    """What this machine has: assume 4 GiB where nobody tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 4 << 30


def _size(text: str) -> int:
    """'32K', '480M' -> bytes."""
    text = text.strip()
    return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
