"""What a step costs besides the model: schedule, pack and commit, with a stub in the model's place.

    bound  = 250 µs + 1 µs per sequence: what a step may spend on deciding, whatever the model
    work   = N sequences that decode, pages of 16 filling up as they go; the engine's own step log is what is read

Rows: deciding (schedule + pack + commit) for 1 to 256 sequences, and its parts at 256; sampling (greedy) beside it.
Story    notebooks/08_the_engine.ipynb
"""

import torch

from minserve.bench.common import Options, device
from minserve.config import ModelConfig, RopeConfig
from minserve.engine import Engine
from minserve.lab.report import Report, Row
from minserve.request import SamplingParams

DECIDING = ("schedule", "pack", "commit")


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
