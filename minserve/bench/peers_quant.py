"""Decode, one sequence, with 8 and 4 bits a weight: minserve and llama.cpp on the same machine and threads.

    python -m minserve bench peers-quant [--llama-cpp FOLDER --llama-model Q8_0.gguf,Q4_1.gguf]

    work   a prompt of 32, 128 new tokens; the first belongs to prefill; sides alternate. llama.cpp's begin behind an
           empty cache, not behind 32 tokens: this build (b1-0c1e570) crashes on a prompt with quantized weights
    int8   minserve: a scale per row, 8.03 bits a weight. llama.cpp Q8_0: a scale per 32 weights, 8.5 bits
    int4   minserve: symmetric, groups of 128, 4.13 bits, head in 8 bits. llama.cpp Q4_1: scale and minimum per 32
           weights, 5 bits, head in Q8_0
    Both multiply 16-bit (minserve) or 8-bit (llama.cpp) activations; what that costs in quality is not measured here.

Give llama.cpp's files in the order of the rows. Without them only minserve is measured.
Story    README.md, Fewer bytes
"""

from functools import partial

import torch

from minserve.bench.common import Options, chosen, label, random_prompt
from minserve.bench.decode_quant import SCHEMES, quantized, rate
from minserve.bench.peers_here import PeerFailed
from minserve.bench.peers_llamacpp import BENCH, LlamaCpp, missing, tool
from minserve.engine import Engine
from minserve.lab.measure import in_turn
from minserve.lab.report import Report, Row
from minserve.pages import pages_for

TYPES = {"int8": "Q8_0", "int4": "Q4_1"}
TARGETS = {"int8": 0.85, "int4": 1.0}  # times llama.cpp, for SmolLM2 on a CPU


class Quantized(LlamaCpp):
    """llama-bench on a quantized file."""

    def __init__(self, folder: str, file: str, kind: str, num_params: int):
        self.bench, self.model, self.threads = tool(folder, BENCH), file, torch.get_num_threads()
        found = self.single(new=8)
        if not str(found["model_type"]).endswith(" " + TYPES[kind]):
            raise PeerFailed(f"{file.split('/')[-1]} is {found['model_type']!r} where {TYPES[kind]} belongs")
        if found["model_n_params"] != num_params:
            raise PeerFailed(
                f"--llama-model has {found['model_n_params']:,} weights, the model {num_params:,}: not the same work"
            )
        self.versions = {"llama.cpp": f"b{found['build_number']}-{found['build_commit']}"}

    def rate(self, new: int) -> float:
        return (new - 1) / (self.single(new=new - 1)["samples_ns"][0] / 1e9)


def refusal(args) -> str | None:
    """What is wrong with the files, said before any work is done."""
    files = (args.llama_model or "").split(",") if args.llama_model else []
    if files and len(files) != len(TYPES):
        return f"--llama-model takes {len(TYPES)} files for peers-quant, {' and '.join(TYPES.values())}, by commas"
    return next(filter(None, (missing(args.llama_cpp, file) for file in files or [None])), None)


def run(options: Options) -> Report:
    report, name = options.report(), chosen(options)[0]
    tokens, new = 32, 16 if options.quick else 128
    files = dict(zip(TYPES, (options.llama_model or "").split(","))) if options.llama_cpp else {}
    try:
        for kind in SCHEMES:
            measure(report, options, name, kind, files.get(kind), tokens, new)
    except PeerFailed as error:
        raise SystemExit(f"bench: {error}") from None
    return report


def measure(
    report: Report, options: Options, name, kind: str, file: str | None, tokens: int, new: int
) -> None:
    model = quantized(name, options.dtype, kind)
    pages = 2 * pages_for(tokens + new, 16)
    engine = Engine(model, num_pages=pages, max_running=1, prefix_caching=False)
    prompt, case = random_prompt(model.config, tokens), f"{label(name)}, {tokens} + {new} tokens"
    sides = {f"minserve {kind}": partial(rate, engine, prompt, new)}
    if file:
        peer = Quantized(
            options.llama_cpp, file, kind, model.config.num_params_read
        )  # a tied head counts once
        report.versions |= peer.versions
        sides[f"llama.cpp {TYPES[kind]}"] = partial(peer.rate, new)
    progress = options.progress(kind)
    samples = in_turn(sides, repeats=options.repeats, at_most=options.at_most, each=progress)
    for who, rates in samples.items():
        report.add(Row(f"{case}: {who}", "tok/s", rates))
    if file:
        ours, theirs = samples
        ratios = [a / b for a, b in zip(samples[ours], samples[theirs])]
        small = options.quick or not label(name).startswith("SmolLM2")
        report.add(Row(f"{case}: {ours} / {theirs}", "x", ratios, 1.0, None if small else TARGETS[kind]))
