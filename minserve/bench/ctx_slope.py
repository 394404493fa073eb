"""What a token of context costs each later token: ITL = a + b x context, and b against the bandwidth roof.

    b >= KV bytes per token / read bandwidth      a >= weight bytes / read bandwidth

The cache is filled with random numbers instead of a prompt: attention reads them at the same speed. On a GPU
the step is replayed from a CUDA graph: launches cost the same at every context and would hide the slope.
Story    notebooks/03_kv_cache.ipynb
"""

import warnings

import torch

from minserve.bench.common import Around, Options, chosen, clean_up, label, load, on_gpu
from minserve.bench.opponent import twin
from minserve.bench.static_step import StaticStep
from minserve.kv_cache import KVCache
from minserve.lab.measure import clock, in_turn
from minserve.lab.report import Report, Row
from minserve.lab.roofline import kv_bytes, weight_bytes
from minserve.model import Model
from minserve.prefill_decode import decode_step

TARGET = 0.85  # of the slope's bound, on a GPU


def run(options: Options) -> Report:
    report = options.report()
    name = next(iter(chosen(options)), None)
    with Around(options) as around:
        config, times = step_times(options, name)
        clean_up()
    itemsize, bandwidth = options.dtype.itemsize, around.machine.read_bandwidth
    base, slope = weight_bytes(config, itemsize) / bandwidth, kv_bytes(config, 1, itemsize) / bandwidth
    case = f"{label(name)} {options.dtype_name}"
    for who, by_context in times.items():
        for context, seconds in by_context.items():
            report.add(Row(f"{case}, context {context:,}: {who}", "s", seconds, base + context * slope))
    for who, by_context in times.items():
        fits = [line(list(by_context), step) for step in zip(*by_context.values())]  # one line per repeat
        target = TARGET if who == "minserve" and options.gpu_cases else None
        note = options.note(around.note) if who == "minserve" else ""
        report.add(Row(f"{case}, a, at no context: {who}", "s", [a for a, _ in fits], base))
        slopes = [b for _, b in fits]
        report.add(Row(f"{case}, b, per token of context: {who}", "s/token", slopes, slope, target, note))
    return report


def step_times(options: Options, name: str | None):
    """(config, {side: {context: seconds of one decode step}})"""
    model = load(name, options.dtype)
    if any(window is not None for window in model.config.windows):
        raise SystemExit(
            f"bench: {label(name)} has sliding windows; its cost per token of context is no line"
        )
    longest = 128 if options.quick else longest_context(model)
    halvings = 4 if options.tiny else 8 if on_gpu() else 4
    contexts = [longest // 2**i for i in range(halvings)]
    contexts.insert(1, contexts.pop())  # the two ends fix the line; what lies between shows that it is one
    cache = KVCache(model.config, longest + 1, model.dtype, model.device)
    for x in (*cache.k, *cache.v):
        x.normal_()
    cache.advance(longest)
    times = {"minserve": {}, "transformers": {}}
    other = twin(model)
    for context, its in options.shares(contexts, least=2):
        sides = {
            "minserve": own_step(model, cache, context, options.gpu_cases),
            "transformers": their_step(other, their_cache(other, cache, context)),
        }
        each, at_most = options.progress(f"context {context:,}"), options.at_most / len(contexts)
        if options.seconds is not None:
            at_most = its.at_most
        samples = in_turn(sides, warmup=2, repeats=options.repeats, at_most=at_most, each=each)
        for who, seconds in samples.items():
            times[who][context] = seconds
    return model.config, {who: dict(sorted(by_context.items())) for who, by_context in times.items()}


def longest_context(model: Model) -> int:
    """What the model allows, at most 4,096 on a CPU, 131,072 on a GPU, and what memory holds: two caches."""
    most = min(model.config.context - 1, 131_072 if on_gpu() else 4096)
    if not on_gpu():
        return most
    free, _ = torch.cuda.mem_get_info()
    return min(most, int(0.35 * free / kv_bytes(model.config, 1, model.dtype.itemsize)))


def own_step(model, cache: KVCache, context: int, static: bool = False):
    """A function that runs one step behind `context` tokens of the cache and returns its seconds."""
    if static:
        step = StaticStep(model, cache, context + 1)
        if on_gpu():
            step.capture()

        def once() -> float:
            step.start(1, context)
            return clock(lambda: step.run(1))

        return once

    def once() -> float:
        cache.length = context
        return clock(lambda: decode_step(model, 1, cache))

    return once


def their_cache(other, cache: KVCache, context: int):
    """transformers' own kind of cache, holding the first `context` tokens of ours."""
    from transformers import DynamicCache

    past = DynamicCache(config=other.config)
    for layer, (k, v) in enumerate(zip(cache.k, cache.v)):
        past.update(*(x[:context].transpose(0, 1)[None].clone() for x in (k, v)), layer)
    return past


def their_step(other, past):
    """The same for transformers; the step's token is cropped off again."""
    token = torch.ones(1, 1, dtype=torch.int64, device=other.device)

    @torch.inference_mode()
    def step():
        other(token, past_key_values=past, use_cache=True)

    def once() -> float:
        with warnings.catch_warnings():  # the argument's new name is unknown to the oldest version we run
            warnings.simplefilter("ignore", FutureWarning)
            seconds = clock(step)
        past.crop(-1)
        return seconds

    return once


def line(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """Least squares: (a, b) of y = a + b x."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys))
    slope = above / sum((x - mean_x) ** 2 for x in xs)
    return mean_y - slope * mean_x, slope
