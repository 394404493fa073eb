"""Prefill: prompt tokens per second against the matmul roof and against transformers' forward.

    bound  = tokens / max(bytes / read bandwidth, flops / matmul rate), logits for the last position only
    target = 0.80 of the matmul rate as commonly counted, 2 flops per weight and token with every token's
             logits and no attention; as a share of the bound above, which counts what is needed, that is less

Both sides start from an empty cache, fill it, and make one row of logits.
Story    notebooks/02_prefill_and_decode.ipynb
"""

import torch

from minserve.bench.common import Around, Options, chosen, clean_up, label, load, on_gpu, random_prompt
from minserve.bench.opponent import twin
from minserve.kv_cache import KVCache
from minserve.lab.measure import clock, in_turn
from minserve.lab.report import Report, Row
from minserve.lab.roofline import flops_per_token, prefill_flops, prefill_seconds
from minserve.prefill_decode import prefill

OF_MATMUL_RATE = 0.80


def run(options: Options) -> Report:
    report, measured = options.report(), []
    tokens = 64 if options.quick else 2048 if on_gpu() else 512
    with Around(options) as around:
        for name in chosen(options):
            measured.append((name, *prefill_samples(options, name, tokens)))
            clean_up()
    for name, config, tokens, samples in measured:
        bound = tokens / prefill_seconds(config, around.machine, tokens, options.dtype.itemsize, rows=1)
        counted = prefill_flops(config, tokens, rows=1) / (tokens * flops_per_token(config))
        case = f"{label(name)} {options.dtype_name}, {tokens} tokens"
        ours, theirs = ([tokens / s for s in samples[who]] for who in ("minserve", "transformers"))
        report.add(
            Row(f"{case}: minserve", "tok/s", ours, bound, round(OF_MATMUL_RATE * counted, 2), around.note)
        )
        report.add(Row(f"{case}: transformers", "tok/s", theirs, bound))
        report.add(Row(f"{case}: minserve / transformers", "x", [a / b for a, b in zip(ours, theirs)], 1.0))
    return report


def prefill_samples(options: Options, name: str | None, tokens: int):
    """(config, tokens, seconds per side)"""
    model = load(name, options.dtype)
    tokens = min(tokens, model.config.context)
    prompt, other = random_prompt(model.config, tokens), twin(model)
    cache = KVCache(model.config, tokens, model.dtype, model.device)
    ids = torch.tensor([prompt], device=model.device)

    def ours():
        cache.truncate(0)
        prefill(model, prompt, cache)

    def theirs():
        with torch.inference_mode():
            other(ids, use_cache=True, logits_to_keep=1)

    sides = {"minserve": lambda: clock(ours), "transformers": lambda: clock(theirs)}
    each = options.progress(label(name))
    return model.config, tokens, in_turn(sides, repeats=options.repeats, at_most=options.at_most, each=each)
