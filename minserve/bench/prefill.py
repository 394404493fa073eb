"""Prefill: prompt tokens per second against the matmul roof and against transformers' forward.

    bound  = tokens / max(bytes / read bandwidth, flops / matmul rate), logits for the last position only
    target = 0.80 of the matmul rate as commonly counted, 2 flops per weight and token with every token's
             logits and no attention; as a share of the bound above, which counts what is needed, that is less

Every side starts from an empty cache, fills it, and makes one row of logits: minserve's plain loop, its engine with the
fastest step there is (which also draws the first token), and transformers.
Story    notebooks/02_prefill_and_decode.ipynb
"""

from functools import partial

import torch

from minserve.bench.common import Around, Options, chosen, clean_up, label, load, on_gpu, random_prompt
from minserve.bench.decode import ENGINE
from minserve.bench.opponent import twin
from minserve.bench.workload import PAGE
from minserve.engine import Engine
from minserve.kv_cache import KVCache
from minserve.lab.measure import clock, in_turn
from minserve.lab.report import Report, Row
from minserve.lab.roofline import flops_per_token, prefill_flops, prefill_seconds
from minserve.pages import pages_for
from minserve.prefill_decode import prefill
from minserve.request import SamplingParams

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
        rates = {who: [tokens / s for s in its] for who, its in samples.items()}
        for who, its in rates.items():
            target = round(OF_MATMUL_RATE * counted, 2) if who == ENGINE else None
            note = options.note(around.note) if who == ENGINE else ""
            report.add(Row(f"{case}: {who}", "tok/s", its, bound, target, note))
        ratios = [a / b for a, b in zip(rates[ENGINE], rates["transformers"])]
        report.add(Row(f"{case}: {ENGINE} / transformers", "x", ratios, 1.0))
    return report


def prefill_samples(options: Options, name: str | None, tokens: int):
    """(config, tokens, seconds per side)"""
    model = load(name, options.dtype)
    tokens = min(tokens, model.config.context)
    prompt, other = random_prompt(model.config, tokens), twin(model)
    cache = KVCache(model.config, tokens, model.dtype, model.device)
    engine = Engine(
        model, num_pages=pages_for(tokens, PAGE) + 1, max_running=1, token_budget=tokens, prefix_caching=False
    )
    ids = torch.tensor([prompt], device=model.device)

    def ours():
        cache.truncate(0)
        prefill(model, prompt, cache)

    def engines():
        (output,) = engine.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        while not output.finished:
            engine.step()
        if output.error:
            raise output.error

    def theirs():
        with torch.inference_mode():
            other(ids, use_cache=True, logits_to_keep=1)

    sides = {"minserve": ours, ENGINE: engines, "transformers": theirs}
    sides = {who: partial(clock, side) for who, side in sides.items()}
    each = options.progress(label(name))
    return model.config, tokens, in_turn(sides, repeats=options.repeats, at_most=options.at_most, each=each)
