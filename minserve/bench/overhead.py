"""What a step costs besides the model: schedule, pack and commit, with a stub in the model's place.

    bound  = 250 µs + 1 µs per sequence: what a step may spend on deciding, whatever the model
    work   = N sequences that decode, pages of 16 filling up as they go; the engine's own step log is what is read

Rows: deciding (schedule + pack + commit) for 1 to 256 sequences, and its parts at 256; sampling (greedy) beside it.
On a GPU, with a real model's shape: the share of the time in which the device computes, from a profile of its
kernels; what is missing from 1 is how long it waits for Python. Gaps below 5 µs are not waiting: a full queue has them
between any two kernels.
Story    notebooks/08_the_engine.ipynb
"""

from dataclasses import replace

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from minserve.bench.common import Options, chosen, clean_up, device, label, load, on_gpu
from minserve.config import ModelConfig, RopeConfig
from minserve.engine import Engine
from minserve.lab.report import Report, Row
from minserve.request import SamplingParams

DECIDING = ("schedule", "pack", "commit")
WAYS = {  # to run a step: the engine's switches, and the share of the time in which the device should compute
    "plain": (dict(step="plain", overlap=False), None),
    "graph": (dict(step="graph", overlap=False), 0.90),
    "graph, the next step scheduled ahead": (dict(step="graph", overlap=True), 0.98),
}


class Stub:
    """Answers at once, always with the same logits: what is left is the engine."""

    def __init__(self, vocab: int = 64):
        self.config = ModelConfig(
            family="llama", vocab_size=vocab, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
            num_kv_heads=1, head_dim=8, norm_eps=1e-5, rope=RopeConfig(10_000.0), context=4096, tied=True,
        )  # fmt: skip
        self.device, self.dtype = torch.device(device()), torch.float32
        self.logits = torch.rand(512, vocab, device=self.device)

    def __call__(self, ids, positions, attend, rows):
        return self.logits[: len(rows)]


def run(options: Options) -> Report:
    report = options.report()
    steps = 20 if options.quick else 200
    for sequences in (1, 8, 64, 256):
        log = decode_log(sequences, steps)
        deciding = [sum(record.seconds[part] for part in DECIDING) for record in log]
        bound = 250e-6 + 1e-6 * sequences
        target = 1.0 if sequences == 256 else None
        report.add(Row(f"{sequences} sequences: schedule + pack + commit", "s", deciding, bound, target))
    for part in (*DECIDING, "sample"):
        report.add(Row(f"256 sequences: {part}", "s", [record.seconds[part] for record in log]))
    if options.gpu_cases:
        computing(report, options)
    return report


def decode_log(sequences: int, steps: int):
    """The records of `steps` steps in which all sequences decode."""
    engine = Engine(
        Stub(),
        num_pages=sequences * 32,
        token_budget=max(512, sequences),
        max_running=sequences,
        log_length=steps,
    )
    params = SamplingParams(max_tokens=steps + 60, ignore_eos=True)
    for i in range(sequences):
        engine.add([i % 60 + 1] * (16 + i % 16), params)  # page ends are spread over the steps
    while engine.scheduler.waiting or any(r.owed > 1 for r in engine.scheduler.running):
        engine.step()
    for _ in range(steps):
        engine.step()
    log = list(engine.log)
    engine.close()
    return log


# ---------------------------------------------------------------- is the device ever waiting?
def computing(report: Report, options: Options) -> None:
    name = chosen(options)[0]
    model, sequences = load(name, options.dtype), 4 if options.quick else 64
    model.config = replace(model.config, context=512)  # graphs are made for no more than the work needs
    case = f"{label(name)} {options.dtype_name}, {sequences} decoding, device busy"
    for (how, (switches, target)), its in options.shares(WAYS.items()):
        shares = busy_shares(its, model, sequences, switches)
        report.add(Row(f"{case}: {how}", "share", shares, 1.0, target, options.note()))
    del model
    clean_up()


def busy_shares(options: Options, model, sequences: int, switches: dict, steps: int = 20) -> list[float]:
    """One share per window of `steps` steps."""
    engine = Engine(model, num_pages=sequences * 16, max_running=sequences, token_budget=2048, **switches)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for i in range(sequences):
        engine.add([i % 60 + 1] * 16, params)
    for _ in range(8):  # prompts, then steps that compile and capture
        engine.step()

    def window():
        for _ in range(steps):
            engine.step()

    shares = [busy(device_spans(window))]
    while len(shares) < 3 or len(shares) < 5 and options.left > 2:
        shares.append(busy(device_spans(window)))
    engine.close()
    return shares


def device_spans(work) -> list[tuple[float, float]]:
    """(start, end) in µs of everything that ran on the device; on a CPU, of PyTorch's operations."""
    kind = DeviceType.CUDA if on_gpu() else DeviceType.CPU
    with profile(activities=[ProfilerActivity.CUDA if on_gpu() else ProfilerActivity.CPU]) as profiled:
        work()
        if on_gpu():
            torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end) for e in profiled.events() if e.device_type == kind]
    if not spans:
        raise RuntimeError("the profiler saw nothing run on the device: is CUPTI there?")
    return spans


def busy(spans: list[tuple[float, float]], gap: float = 5.0) -> float:
    """Share of the time from the first start to the last end that is covered; gaps up to `gap` count as covered."""
    spans = sorted(spans)
    begin, end = spans[0]
    idle = 0.0
    for start, stop in spans:
        idle += start - end if start - end > gap else 0.0
        end = max(end, stop)
    return 1 - idle / (end - begin)
