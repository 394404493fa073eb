"""The ladder: every rung built so far, on the same requests, on this machine, under the bound that none can beat.

    no cache             one request at a time; every token runs the whole sequence again
    KV cache             one at a time; every token runs once
    static batching      many at a time, as many as fit if each keeps room for the longest answer; all wait for the last
    continuous batching  the same room, but a seat that becomes free is taken in the next step
    paged KV             the same memory in pages: a request holds what it has filled
    prefix caching       pages that hold the same beginning are shared
    compiled step        the same, a step being recorded calls of compiled kernels; on a GPU a CUDA graph
    overlap              the next step is scheduled while this one computes
    INT8, INT4 weights   the compiled step over fewer bytes; what they say differs, and by how much stands in the label
    n-gram speculation   what followed the last time is proposed, and checked in one step. Two works of its own, real
                         prompts, 4 at a time: the label says how many times the same without it

First the rungs must say the same: equal tokens in fp32, where roundings do not change the answer. Only then
are they timed, alternately, in the dtype this machine is good at. Quantized weights are other weights: their rungs must
say what the first rung says with the same quantized weights.
Work     32 requests behind one system prompt, answers of many lengths; the first two rungs serve one of them.
         tok/s counts output tokens over the whole time, prompts included. A slow machine makes shorter answers.
         An engine is made before its time starts: recording its steps is part of `bench cold-start`.
Bound    one request: prompt and every token at the roofs. Many: all prompts at the roofs, then all requests decode
         together, as if memory had no end; from prefix caching on, what is shared is computed once. With drafts:
         as if all of them were kept.
Story    README.md, The ladder
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median

import torch

from minserve.bench.common import TINY, Around, Options, add_model_arguments, affordable, label, load, on_gpu
from minserve.bench.decode_quant import SCHEMES, bytes_read
from minserve.bench.spec_work import works as spoken_works
from minserve.bench.workload import PAGE, Work, pool_for, ragged, reserving, serve, uniform
from minserve.calibration import calibration_text, evaluation_text, quantize_model
from minserve.config import SHAPES, ModelConfig
from minserve.engine import LLM
from minserve.fetch import resolve
from minserve.kernels import INTERPRETED, native
from minserve.lab.measure import clock, in_turn
from minserve.lab.quality import logits_of, quality
from minserve.lab.report import Report, Row
from minserve.lab.roofline import Machine, decode_bytes, decode_flops, name_of, prefill_bytes, prefill_flops
from minserve.model import Model
from minserve.pages import PagePool
from minserve.prefill_decode import generate, generate_without_cache
from minserve.request import SamplingParams
from minserve.scheduler import Scheduler, StaticBatching
from minserve.speculation import NGram
from minserve.text import Tokenizer

REQUESTS, SYSTEM, ROOM = 32, 64, 8  # how many, how much they share, how many of the longest the memory holds
SPOKEN, AT_ONCE = 8, 4  # real prompts of each kind, and how many are served together


@dataclass(frozen=True)
class Rung:
    name: str
    serve: Callable[[Model, Work], tuple[float, list[list[int]]]]  # seconds, and the tokens of every answer
    single: bool = False  # one request at a time: measured on one of them
    shares: bool = False
    weights: str | None = None  # "int8", "int4"; None: as the model has them
    own: str | None = None  # a work of its own, "copy" or "free"; measured without its drafts as well


def alone(make):
    """Requests one after another, each by itself."""

    def run(model: Model, work: Work) -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        answers = [list(make(model, p, greedy(n))) for p, n in zip(work.prompts, work.lengths)]
        return time.perf_counter() - start, answers

    return run


def together(policy=Scheduler, paged: bool = True, prefix: bool = True, seats: int = REQUESTS, **how):
    """All requests at once, or `seats`, in memory for ROOM of the longest."""
    how = dict(step="plain", overlap=False) | how

    def run(model: Model, work: Work) -> tuple[float, list[list[int]]]:
        llm = LLM(
            model, page_size=PAGE, num_pages=pool_for(ROOM, work.longest), max_running=seats, policy=policy,
            pool=PagePool if paged else reserving(work.longest), prefix_caching=prefix, **how,
        )  # fmt: skip
        seconds, outputs = serve(llm, work)
        return seconds, [output.tokens for output in outputs]

    return run


few = partial(together, prefix=False, seats=AT_ONCE, step="graph")
WITHOUT = Rung("the same without drafts", few())
RUNGS = [
    Rung("no cache", alone(generate_without_cache), single=True),
    Rung("KV cache", alone(generate), single=True),
    Rung("static batching", together(StaticBatching, paged=False, prefix=False)),
    Rung("continuous batching", together(paged=False, prefix=False)),
    Rung("paged KV", together(prefix=False)),
    Rung("prefix caching", together(), shares=True),
    Rung("CUDA graph" if on_gpu() else "compiled step", together(step="graph"), shares=True),
    Rung("overlap" if on_gpu() else "overlap (for a GPU)", together(step="graph", overlap=True), shares=True),
    Rung("INT8 weights", together(step="graph"), shares=True, weights="int8"),
    Rung("INT4 weights", together(step="graph"), shares=True, weights="int4"),
    Rung("n-gram speculation, copy-heavy", few(drafter="ngram"), own="copy"),
    Rung("n-gram speculation, free text", few(drafter="ngram"), own="free"),
]
CALIBRATION, EVALUATION = (
    8192,
    1024,
)  # tokens: less than `minserve quantize` and `bench quality` take, for seconds count


def add_arguments(parser) -> None:
    parser.add_argument(
        "--json", type=Path, default=Path("figures/data/ladder.json"), help="where the numbers go"
    )
    parser.add_argument(
        "--figure", type=Path, default=Path("figures/ladder.png"), help="where the figure goes"
    )
    add_model_arguments(parser)


def main(args) -> int:
    if INTERPRETED:
        print(
            "ladder: TRITON_INTERPRET=1 is set, and the interpreter's times are not kernel times",
            file=sys.stderr,
        )
        return 2
    report = run(Options.of(args, "ladder", "ladder"), fixed_dtype=args.dtype is not None)
    report.save(args.json)
    draw(report, args.figure)
    print(report.table())
    print(f"numbers: {args.json}   figure: {args.figure}")
    return 0


def run(options: Options, fixed_dtype: bool = True) -> Report:
    """Compare, choose the dtype unless it is fixed, measure, report."""
    say("loading the model in fp32, and checking that every rung says the same")
    exact = load(options.model, torch.float32)
    small = make_work(exact.config, 6).first(4, 6)
    compare(exact, small)
    for rung in filter(lambda rung: rung.weights, RUNGS):
        compare(rounded(options, torch.float32, rung.weights), small.first(2, 3), [RUNGS[1], rung])
    for kind, its in spoken_works(options.model, exact, 5, 6).items():
        compare(exact, its, [WITHOUT, *(rung for rung in RUNGS if rung.own == kind)])
    model = exact if options.dtype == torch.float32 else load(options.model, options.dtype)
    if not fixed_dtype and not on_gpu():
        model = quicker(model, exact, small.prompts[0])
    del exact
    options = replace(options, dtype=model.dtype)
    models, labels = quantized(options, model)
    two = lambda: list(generate(model, small.prompts[0], greedy(2)))
    longest = affordable(two, 4, 8, 8 if options.quick else 40)
    work = make_work(model.config, longest)
    one = Work(work.prompts[:1], [longest])
    answers = (
        f"{REQUESTS} requests of {min(map(len, work.prompts))}-{max(map(len, work.prompts))} prompt tokens"
    )
    say(f"measuring {len(RUNGS)} rungs in {options.dtype_name}: {answers}, {work.new_tokens:,} new ones")
    own = spoken_works(options.model, model, SPOKEN, longest)
    works = {rung: own[rung.own] if rung.own else one if rung.single else work for rung in RUNGS}
    sides = {rung: partial(rate, rung, models[rung.weights], works[rung]) for rung in RUNGS}
    sides |= {rung.own: partial(rate, WITHOUT, model, works[rung]) for rung in RUNGS if rung.own}
    with Around(options) as around:
        each = options.progress("rungs")
        samples = in_turn(sides, warmup=0, repeats=options.repeats, at_most=options.at_most, each=each)
    report = options.report()
    report.where += f", {label(options.model)} in {options.dtype_name}"
    for rung in RUNGS:
        size = bytes_read(models[rung.weights])
        bound = bound_of(rung, model.config, around.machine, works[rung], model.dtype.itemsize, size)
        note = options.note(remark(rung), around.note if rung is RUNGS[-1] else "")
        more = gain(samples[rung], samples[rung.own]) if rung.own else labels.get(rung.weights, "")
        report.add(Row(rung.name + more, "tok/s", samples[rung], bound, note=note))
    return report


def gain(rates: list[float], without: list[float]) -> str:
    return f", {median(a / b for a, b in zip(rates, without)):.2f}x"


def quantized(options: Options, model: Model) -> tuple[dict[str | None, Model], dict[str, str]]:
    """{kind: model} with the one given as None; and what each kind adds to its rung's name: its KL from that one."""
    models, labels = {None: model}, {}
    kinds = {rung.weights: None for rung in RUNGS if rung.weights}
    tokenizer = None if options.model in SHAPES | TINY else Tokenizer.load(resolve(options.model))
    if tokenizer and kinds:
        text = evaluation_text(tokenizer, 256 if options.quick else EVALUATION)
        reference = logits_of(model, text)
    for kind in kinds:
        say(f"rounding the weights to {kind}")
        models[kind] = rounded(options, model.dtype, kind, tokenizer)
        if tokenizer:
            labels[kind] = f", KL {quality(models[kind], reference, text)[0]:.2g}"
    return models, labels


def rounded(options: Options, dtype, kind: str, tokenizer: Tokenizer | None = None) -> Model:
    """The model again, its weights rounded to nearest; with a tokenizer, and to 4 bits, by GPTQ."""
    model, method, text = load(options.model, dtype), "rtn", ()
    if tokenizer and kind == "int4" and not options.quick:
        method, text = "gptq", calibration_text(tokenizer, CALIBRATION)
    quantize_model(model, method, SCHEMES[kind], text, progress=sys.stderr.isatty())
    return model


def remark(rung: Rung) -> str:
    """What this machine cannot show of it."""
    if rung.name == "overlap (for a GPU)":
        return "nothing to gain on a CPU: the cores that schedule are those that compute"
    if rung.own:
        return f"{SPOKEN} prompts of its own, {AT_ONCE} at a time; x: times the same without drafts"
    if rung.name == "compiled step" and (why_not := native.usable()):
        return f"not compiled here: {why_not.splitlines()[0]}"
    return ""


def make_work(config: ModelConfig, longest: int) -> Work:
    return ragged(config.vocab_size, REQUESTS, (8, 32), uniform(4, longest), shared=SYSTEM)


def bound_of(
    rung: Rung, config: ModelConfig, machine: Machine, work: Work, itemsize: int, size: int
) -> float:
    """Output tokens per second that no implementation of this rung can exceed. `size`: bytes of its weights."""
    saved = config.num_params_read * itemsize - size
    prompts = [len(p) for p in work.prompts]
    if rung.shares:
        prompts = [SYSTEM, *(n - SYSTEM for n in prompts)]
    flops = sum(prefill_flops(config, n, rows=1) for n in prompts)
    seconds = machine.seconds(prefill_bytes(config, sum(prompts), itemsize) - saved, flops)
    context, each = sum(prompts) // len(prompts), 1 + NGram().k if rung.own else 1
    for step in range(1, max(work.lengths), each):  # the first token of each comes with its prompt
        alive = [min(each, n - step) for n in work.lengths if n > step]  # tokens of each
        nbytes = decode_bytes(config, len(alive), context + step, itemsize) - saved
        seconds += machine.seconds(nbytes, decode_flops(config, sum(alive), context + step))
    return work.new_tokens / seconds


def greedy(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, ignore_eos=True)


def compare(model: Model, work: Work, rungs: list[Rung] | None = None) -> None:
    """Raises RuntimeError at the first token on which a rung differs from the first of them."""
    first, *others = rungs or [rung for rung in RUNGS if not rung.weights and not rung.own]
    _, expected = first.serve(model, work)
    for rung in others:
        for i, (got, should) in enumerate(zip(rung.serve(model, work)[1], expected)):
            pairs = zip_longest(got, should)  # a rung may also stop early
            for at, (its, right) in enumerate(pairs, 1):
                if its != right:
                    raise RuntimeError(
                        f"the ladder compares equal work, and {rung.name!r} is not: in fp32 token {at} of request {i} "
                        f"is {its} where {first.name!r} says {right}.\n"
                        f"  No speed is reported for a wrong answer; run the tests."
                    )


def quicker(model: Model, exact: Model, prompt: list[int]) -> Model:
    """16 bits, unless this CPU has no instructions for them and takes 1.5 times as long as in fp32."""
    sides = {m: lambda m=m: clock(lambda: list(generate(m, prompt, greedy(4)))) for m in (model, exact)}
    times = in_turn(sides, warmup=0, repeats=3)
    half, full = (min(times[m]) for m in (model, exact))
    if half < 1.5 * full:
        return model
    say(f"{name_of(model.dtype)} takes {half / full:.1f} times as long as float32 here: going on in float32")
    return exact


def rate(rung: Rung, model: Model, work: Work) -> float:
    return work.new_tokens / rung.serve(model, work)[0]


def draw(report: Report, path: Path) -> None:
    from minserve.lab import figures  # matplotlib: only the ladder draws, the other benchmarks run without it

    rungs = [(row.case, row.median, row.bound) for row in report.rows]
    ax = figures.ladder(figures.axes(6.4, 0.6 + 0.5 * len(rungs)), rungs)
    (first, slow, _), *_ = rungs
    climbed = [its for its in rungs if "speculation" not in its[0]]  # the others serve another work
    most = max(rate for _, rate, _ in climbed)
    last, fast, _ = next(
        rung for rung in climbed if rung[1] > 0.97 * most
    )  # a later one must gain more than that
    figures.save(
        ax, path, f"From {first} to {last}: {fast / slow:.1f} times the tokens per second", report.where
    )


def say(what: str) -> None:
    print(f"ladder: {what}", file=sys.stderr, flush=True)
