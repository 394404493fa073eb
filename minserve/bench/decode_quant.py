"""Decode, one sequence, with quantized weights: what fewer bytes are worth, against bfloat16 in the same run.

    bound  = 1 / (bytes of the weights as they are held, and of the KV cache so far / read bandwidth)
    work   as in `bench decode`: the engine with its fastest step, alternating

Weights are rounded to nearest: how they were rounded changes what they say (`bench quality`), not how fast they are
read. The head takes 8 bits per channel in both. A row for each says what the model holds, embedding included.
Story    notebooks/09_quantization.ipynb
"""

from functools import partial

from minserve.bench.common import (
    Around,
    Options,
    affordable,
    chosen,
    clean_up,
    fits,
    label,
    load,
    on_gpu,
    random_prompt,
)
from minserve.bench.decode import engine_rate
from minserve.bench.workload import PAGE
from minserve.calibration import held_bytes, quantize_model
from minserve.config import SHAPES
from minserve.engine import Engine
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row
from minserve.lab.roofline import decode_flops, kv_bytes
from minserve.model import Model
from minserve.pages import pages_for
from minserve.quantization import Scheme

PROMPT = 32  # tokens
SCHEMES = {"int8": Scheme(8), "int4": Scheme(4, 128)}
TARGETS = {"int8": 0.65, "int4": 0.45}  # of the bound, worth reaching: Llama-3.1-8B on a GPU
COPIES = 3  # a model, its twin while that is being rounded, and what the roundings have become


def run(options: Options) -> Report:
    report, kinds = options.report(), [options.quant] if options.quant else list(SCHEMES)
    report.name, measured = "decode-quant", []
    names = [name for name in chosen(options) if options.model or holds(name, options.dtype)]
    with Around(options) as around:
        for name, its in options.shares(names):
            measured.append((name, *samples_of(its, name, kinds)))
            clean_up()
    for i, (name, new, samples, held, read, flops) in enumerate(measured):
        for kind, rates in samples.items():
            who = f"{label(name)} {kind or options.dtype_name}"
            bound = 1 / around.machine.seconds(read[kind], flops)
            note = "" if i else options.note(around.note)
            judged = options.gpu_cases and label(name).removeprefix("tiny-") == "llama-3.1-8b"
            target = TARGETS.get(kind) if judged else None
            report.add(Row(f"{who}, {PROMPT} + {new} tokens", "tok/s", rates, bound, target, note))
            report.add(Row(f"{who}: weights held", "B", [held[kind]]))
            if kind:
                ratios = [a / b for a, b in zip(rates, samples[None])]
                report.add(Row(f"{who} / {options.dtype_name}", "x", ratios, read[None] / read[kind]))
    return report


def holds(name: str | None, dtype) -> bool:
    """Is there room for this model beside its quantized twins?"""
    return not on_gpu() or name not in SHAPES or fits(SHAPES[name], dtype, COPIES)


def samples_of(options: Options, name: str | None, kinds: list[str]):
    """(new tokens, {kind: tokens/s}, {kind: bytes held}, {kind: bytes that a step reads}, its flops)"""
    models = {kind: quantized(name, options.dtype, kind) for kind in kinds}
    models = {None: load(name, options.dtype), **models}
    config, most = models[None].config, 8 if options.quick else 128 if on_gpu() else 64
    pages = 2 * pages_for(PROMPT + most, PAGE)
    engines = {
        kind: Engine(model, num_pages=pages, max_running=1, prefix_caching=False)
        for kind, model in models.items()
    }
    prompt = random_prompt(config, PROMPT)
    for engine in engines.values():
        engine_rate(engine, prompt, 2)
    two = partial(rate, engines[None], prompt, 2)
    new = affordable(two, min(3, options.at_most / 12), 8, most)
    sides = {kind: partial(rate, engine, prompt, new) for kind, engine in engines.items()}
    progress = options.progress(label(name))
    samples = in_turn(sides, repeats=options.repeats, at_most=options.at_most, each=progress)
    cache = kv_bytes(config, PROMPT + new // 2, options.dtype.itemsize)
    held = {kind: held_bytes(model) for kind, model in models.items()}
    read = {kind: bytes_read(model) + cache for kind, model in models.items()}
    return new, samples, held, read, decode_flops(config, 1, PROMPT + new // 2)


def quantized(name: str | None, dtype, kind: str) -> Model:
    model = load(name, dtype)
    quantize_model(model, "rtn", SCHEMES[kind], progress=False)
    return model


def rate(engine: Engine, prompt: list[int], new: int) -> float:
    return engine_rate(engine, prompt, new)[0]


def bytes_read(model: Model) -> int:
    """What a decode step reads of it: everything, but of an embedding of its own only a row."""
    embedding = model.embed_tokens.weight
    return held_bytes(model) - (0 if model.config.tied else embedding.nbytes)
