"""Decode, one sequence, with quantized weights: what fewer bytes are worth, against bfloat16 in the same run.

    bound  = 1 / (bytes of the weights as they are held, and of the KV cache so far / read bandwidth)
    work   as in `bench decode`: the engine with its fastest step, alternating

Weights are rounded to nearest: how they were rounded changes what they say (`bench quality`), not how fast they are
read. The head takes 8 bits per channel in both. A row for each says what the model holds, embedding included.
Story    notebooks/09_quantization.ipynb
"""

from functools import partial

from minserve.bench.common import Around, Options, affordable, chosen, clean_up, label, load, random_prompt
from minserve.bench.decode import engine_rate
from minserve.bench.workload import PAGE
from minserve.calibration import held_bytes, quantize_model
from minserve.engine import Engine
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row
from minserve.lab.roofline import decode_flops, kv_bytes
from minserve.model import Model
from minserve.pages import pages_for
from minserve.quantization import Scheme

SCHEMES = {"int8": Scheme(8), "int4": Scheme(4, 128)}


def run(options: Options) -> Report:
    report, kinds = options.report(), [options.quant] if options.quant else list(SCHEMES)
    report.name = "decode-quant"
    for name, its in options.shares(chosen(options)):
        measure(report, its, name, kinds)
        clean_up()
    return report


def measure(report: Report, options: Options, name: str | None, kinds: list[str]) -> None:
    models = {None: load(name, options.dtype)} | {
        kind: quantized(name, options.dtype, kind) for kind in kinds
    }
    config, tokens, most = models[None].config, 32, 8 if options.quick else 64
    pages = 2 * pages_for(tokens + most, PAGE)
    engines = {
        kind: Engine(model, num_pages=pages, max_running=1, prefix_caching=False)
        for kind, model in models.items()
    }
    prompt = random_prompt(config, tokens)
    for engine in engines.values():
        engine_rate(engine, prompt, 2)
    two = lambda: engine_rate(engines[None], prompt, 2)  # noqa: E731
    new = affordable(two, min(3, options.at_most / 12), 8, most)
    with Around(options) as around:
        sides = {kind: partial(rate, engine, prompt, new) for kind, engine in engines.items()}
        progress = options.progress(label(name))
        samples = in_turn(sides, repeats=options.repeats, at_most=options.at_most, each=progress)
    cache = kv_bytes(config, tokens + new // 2, options.dtype.itemsize)
    flops = decode_flops(config, 1, tokens + new // 2)
    for kind, rates in samples.items():
        who = f"{label(name)} {kind or options.dtype_name}"
        bound = 1 / around.machine.seconds(bytes_read(models[kind]) + cache, flops)
        report.add(
            Row(f"{who}, {tokens} + {new} tokens", "tok/s", rates, bound, note=options.note(around.note))
        )
        report.add(Row(f"{who}: weights held", "B", [held_bytes(models[kind])]))
        if kind:
            ratios = [a / b for a, b in zip(rates, samples[None])]
            fewer = bytes_read(models[None]) / bytes_read(models[kind])
            report.add(Row(f"{who} / {options.dtype_name}", "x", ratios, fewer))


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
