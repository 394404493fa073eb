"""A smaller KV cache: what a token weighs, how many requests fit, what predictions lose, what a server gains.

    memory    requests of one length that run at once in the same bytes, counted in the engine (nothing is computed);
              bound = what the arithmetic lets in. int4's open pages are counted as its own
    quality   KL from the cache at full precision and perplexity, on text, in fp32: then the cache's is the only
              rounding. Without a text (random weights) it is only shown that it runs
    decode    seconds of a step whose cache is full of random numbers, by context and requests;
              bound = bytes of weights and of this kind's cache / read bandwidth
    goodput   highest Poisson rate at which 90 % of those who arrive get their first token within T1, and every token
              by then + n T2, in memory for a few requests at 16 bits. T1 and T2 are multiples of what one request
              takes alone at 16 bits. One sample per seed; all kinds see the same arrivals. Time stands still while
              nobody is there

Pages of 16 tokens. int4: of 16, 32 or 64, those of which most requests fit (what a page's keys share is weighed
against the page that is open).
Story    notebooks/10_smaller_kv_cache.ipynb
"""

import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import median

import torch

from minserve import fetch
from minserve.bench.common import Around, Options, chosen, clean_up, label, load, on_gpu, random_prompt
from minserve.config import SHAPES
from minserve.engine import LLM
from minserve.kv_cache import bytes_per_token
from minserve.lab.kv_quality import divergence, logits_of, perplexity
from minserve.lab.measure import clock, in_turn
from minserve.lab.report import Report, Row
from minserve.lab.roofline import decode_flops, weight_bytes
from minserve.pages import pages_for
from minserve.request import SamplingParams

KINDS = (None, "int8", "fp8", "int4")
TTFT, ITL = 20, 6  # T1 and T2: times what a request takes alone
MET, SEEDS = 0.9, 3


def run(options: Options) -> Report:
    report = options.report()
    name = next(iter(chosen(options)), None)
    with Around(options) as around:
        model = load(name, options.dtype)
        case = f"{label(name)} {options.dtype_name}"
        memory(report, options, model, case)
        decode(report, options, model, case, around)
        goodput(report, options, model, case)
        del model
        clean_up()
        quality(report, options, name)
    last = report.rows[-1]
    report.rows[-1] = replace(last, note=options.note(last.note, around.note))
    return report


def named(kind: str | None, dtype: torch.dtype) -> str:
    return kind or {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


# ---------------------------------------------------------------- what fits
@dataclass(frozen=True)
class Room:
    """The same bytes for every kind, and what they hold of requests of `tokens` tokens."""

    kind: str | None
    page_size: int
    requests: int
    pages: int
    per_token: float

    @classmethod
    def of(cls, model, kind: str | None, tokens: int, nbytes: float) -> "Room":
        sizes = (16, 32, 64) if kind == "int4" else (16,)
        return max(
            (cls.in_pages(model, kind, tokens, nbytes, S) for S in sizes), key=lambda its: its.requests
        )

    @classmethod
    def in_pages(cls, model, kind: str | None, tokens: int, nbytes: float, S: int) -> "Room":
        c, itemsize = model.config, model.dtype.itemsize
        shape = c.num_layers, c.num_kv_heads, c.head_dim
        per_token = bytes_per_token(*shape, itemsize, kind, S)
        open_page = S * bytes_per_token(*shape, itemsize) if kind == "int4" else 0
        requests = int(nbytes // (pages_for(tokens, S) * S * per_token + open_page))
        pages = int((nbytes - requests * open_page) // (S * per_token))
        return cls(kind, S, requests, pages, per_token)

    def engine(self, model, seats: int, budget: int = 512, **limits) -> LLM:
        if self.kind == "int4":  # a seat costs an open page
            seats = min(seats, self.requests)
        return LLM(
            model, kv_cache_dtype=self.kind, page_size=self.page_size, num_pages=self.pages, max_running=seats,
            token_budget=budget, prefix_caching=False, overlap=False, log_length=100_000, **limits,
        )  # fmt: skip


def memory(report: Report, options: Options, model, case: str) -> None:
    tokens, few = (64, 4) if options.quick else (1024, 8)
    nbytes = few * tokens * Room.of(model, None, tokens, 1e12).per_token
    rooms = [Room.of(model, kind, tokens, nbytes) for kind in KINDS]
    for room in rooms:
        who = named(room.kind, model.dtype)
        note = f"{rooms[0].per_token / room.per_token:.2f} times less than {named(None, model.dtype)}"
        note += f", in pages of {room.page_size}" if room.kind else ""
        report.add(
            Row(f"{case}: bytes per token, {who}", "B", [room.per_token], note=note if room.kind else "")
        )
    for room in rooms:
        who, most = named(room.kind, model.dtype), at_once(room, model, tokens)
        where = f"requests of {tokens:,} at once in {nbytes / 1e6:,.1f} MB, {who}"
        note = f"{room.pages} pages of {room.page_size}"
        report.add(Row(f"{case}: {where}", "requests", [most], room.requests, 0.90, note))


def at_once(room: Room, model, tokens: int) -> float:
    """Requests that run while others wait, in the median over steps. The model is not asked: pages decide."""
    llm, new = room.engine(model, 4 * room.requests, 4096, step="plain"), 16
    llm.compute = partial(nothing, model)
    for _ in range(4 * room.requests):
        llm.add([1] * (tokens - new), SamplingParams(max_tokens=new, ignore_eos=True))
    while llm.outputs:
        llm.step()
    return median(len(record.rows) for record in llm.log if record.waiting)


def nothing(model, batch):
    """In the place of a model: the same token for all."""
    return torch.zeros(len(batch.last), model.config.vocab_size, device=model.device), None, None


# ---------------------------------------------------------------- decoding
def decode(report: Report, options: Options, model, case: str, around: Around) -> None:
    steps = 3 if options.quick else 20
    for sequences, context in decode_cases(options, model, steps):
        sides = {kind: Decoding(model, kind, sequences, context, steps + 4) for kind in KINDS}
        about = f"decode step, {sequences} x {context:,}"
        each = options.progress(about)
        samples = in_turn(
            {kind: side.step for kind, side in sides.items()},
            warmup=2,
            repeats=steps,
            at_most=options.at_most,
            each=each,
        )
        machine = around.before.machine(options.dtype)
        for kind, seconds in samples.items():
            room = sides[kind].room
            nbytes = weight_bytes(model.config, model.dtype.itemsize) + sequences * context * room.per_token
            bound = machine.seconds(nbytes, decode_flops(model.config, sequences, context))
            report.add(Row(f"{case}: {about}, {named(kind, model.dtype)}", "s", seconds, bound))
        del sides
        clean_up()


def decode_cases(options: Options, model, steps: int) -> list[tuple[int, int]]:
    """(requests, context) of each; on a GPU as many requests as leave room for the caches of all kinds."""
    if options.quick:
        return [(1, 32), (2, 64)]
    if not on_gpu():
        return [(1, 512), (1, 4096), (8, 4096)]
    long = min(8192, model.config.context - steps - 4)
    each = sum(Room.in_pages(model, kind, long, 1e15, 64).per_token for kind in KINDS) * long
    return [(1, 512), (1, long), (max(2, min(32, int(0.6 * torch.cuda.mem_get_info()[0] / each))), long)]


class Decoding:
    """Requests that decode behind `context` tokens which nobody computed: random numbers take as long to read."""

    def __init__(self, model, kind: str | None, sequences: int, context: int, steps: int):
        S = 64 if kind == "int4" else 16
        its = Room.in_pages(model, kind, context + steps, 1e15, S)
        self.room = replace(its, requests=sequences, pages=sequences * pages_for(context + steps, S))
        self.llm = self.room.engine(model, sequences, sequences * context, chunk=context)
        compute, self.llm.compute = self.llm.compute, partial(nothing, model)
        for _ in range(sequences):
            prompt = random_prompt(model.config, context)
            self.llm.add(prompt, SamplingParams(max_tokens=steps, ignore_eos=True))
        self.llm.step()
        cache, self.llm.compute = self.llm.cache, compute
        for pool in (*cache.pools, *zip(*getattr(cache, "open", ()))):
            shared = noise(pool[0])
            for layer in pool:
                layer.copy_(shared)

    def step(self) -> float:
        return clock(self.llm.step)


def noise(like):
    if like.dtype in (torch.int8, torch.uint8):
        return torch.randint_like(like, 0, 127)
    return torch.rand(like.shape, device=like.device).to(like.dtype)


# ---------------------------------------------------------------- goodput
@dataclass(frozen=True)
class Promise:
    first: float  # seconds to the first token
    each: float  # seconds per token from there on


def goodput(report: Report, options: Options, model, case: str) -> None:
    prompt, new, few, count = (
        (8, 6, 2, 4) if options.quick else (512, 128, 16, 64) if on_gpu() else (64, 64, 4, 20)
    )
    tokens = prompt + new
    work = [random_prompt(model.config, prompt)] * count, SamplingParams(max_tokens=new, ignore_eos=True)
    nbytes = few * tokens * Room.of(model, None, tokens, 1e15).per_token
    rooms = {kind: Room.of(model, kind, tokens, nbytes) for kind in KINDS}
    engines = {kind: room.engine(model, count) for kind, room in rooms.items()}
    first, each = alone(engines[None], work)
    promise = Promise(TTFT * first, ITL * each)
    most = few / (first + new * each)  # requests/s, if none slowed another
    rates = [most * 2 ** (k / 4) for k in range(-10, 6)]
    found = {kind: [] for kind in KINDS}
    for seed in range(SEEDS):
        for kind, llm in engines.items():
            arrive = partial(arrivals, seed, count)
            good = lambda rate, llm=llm, arrive=arrive: kept(llm, work, arrive(rate), promise)
            found[kind].append(highest(rates, good))
            options.progress("goodput")(seed + 1, SEEDS)
    about = f"{case}: goodput in {nbytes / 1e6:,.1f} MB, requests of {prompt} + {new}"
    slo = f"first token within {promise.first:.2f} s, then {promise.each * 1e3:.0f} ms each"
    for kind, its in found.items():
        room, who = rooms[kind], named(kind, model.dtype)
        note = f"{room.requests} fit, in pages of {room.page_size}; {slo}"
        report.add(Row(f"{about}, {who}", "requests/s", its, note=note))
    if min(found[None]) > 0:
        for kind in KINDS[1:]:
            ratios = [its / full for its, full in zip(found[kind], found[None])]
            fit = rooms[kind].requests / rooms[None].requests
            note = "bound: the ratio of those that fit; larger batches also take longer steps"
            case_of = f"{about}: {kind} / {named(None, model.dtype)}"
            report.add(Row(case_of, "x", ratios, fit, note=note))


def alone(llm: LLM, work) -> tuple[float, float]:
    """Seconds to the first token, and for each later one, of a request that has the engine to itself."""
    (prompt, *_), params = work
    for _ in range(2):  # the first one warms up
        llm.log.clear()
        llm.add(prompt, params)
        while llm.outputs:
            llm.step()
    times = [record.total for record in llm.log]
    return times[0], median(times[1:])


def arrivals(seed: int, count: int, rate: float) -> list[float]:
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(1.0) / rate for _ in range(count)))


def highest(rates: list[float], good) -> float:
    """The highest rate that is good, 0 if none is; good rates are taken to lie below bad ones."""
    low, high = -1, len(rates)  # good, bad
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(rates[middle]) else (low, middle)
    return rates[low] if low >= 0 else 0.0


def kept(llm: LLM, work, times: list[float], promise: Promise) -> bool:
    """Is the promise kept for enough of those who arrive at `times`? Given up as soon as it cannot be."""
    (prompts, params), now, waiting, first, late = work, 0.0, {}, {}, set()
    todo = list(zip(times, prompts))[::-1]
    while todo or llm.outputs:
        if not llm.outputs:
            now = max(now, todo[-1][0])
        while todo and todo[-1][0] <= now:
            came, prompt = todo.pop()
            waiting[llm.add(prompt, params)[0]] = came
        made: list = []
        now += clock(lambda made=made: made.extend(llm.step()))
        for output, _ in made:
            if (came := waiting.pop(output, None)) is not None:
                first[output], on_time = now, now - came <= promise.first
            else:
                on_time = now - first[output] <= (len(output.tokens) - 1) * promise.each
            late |= set() if on_time else {output}
        late |= {output for output, came in waiting.items() if now - came > promise.first}
        if len(times) - len(late) < MET * len(times):
            llm.close()
            return False
    return True


# ---------------------------------------------------------------- quality
def quality(report: Report, options: Options, name: str | None) -> None:
    """On text and with true weights, for what random weights predict tells nothing."""
    random_weights = name in SHAPES or options.tiny
    if on_gpu() and random_weights and not options.quick:
        if fetch.faults(fetch.default_folder()):
            return
        name, random_weights = None, False
    model = load(name, torch.float32)
    contexts = {32: 2, 64: 1} if options.quick else {512: 4, 2048: 1}  # windows of each
    need = max(context * many for context, many in contexts.items())
    text = random_prompt(model.config, need) if random_weights else evaluation(name, need)
    for context, windows in contexts.items():
        measured = {kind: ([], []) for kind in KINDS}
        for start in range(0, windows * context, context):
            ids = text[start : start + context]
            reference = logits_of(model, ids)
            for kind, (away, surprise) in measured.items():
                logits = logits_of(model, ids, kind) if kind else reference
                away.append(divergence(reference, logits))
                surprise.append(perplexity(logits, ids))
            options.progress(f"KL at {context:,}")(start // context + 1, windows)
        for kind, (away, surprise) in measured.items():
            case = f"{label(name)} in fp32, {context:,} tokens, cache in {kind or 'fp32'}"
            if kind:
                report.add(Row(f"{case}: KL from fp32", "nats", away))
            report.add(Row(f"{case}: perplexity", "ppl", surprise))


def evaluation(name: str | None, tokens: int) -> list[int]:
    from minserve.calibration import evaluation_text
    from minserve.text import Tokenizer

    return evaluation_text(Tokenizer.load(fetch.resolve(name)), tokens)


# ---------------------------------------------------------------- what is shown of it
def markdown(report: Report) -> str:
    """The README's table: caches down; bytes, requests at once, KL at each length, goodput, the longest step."""
    name = report.rows[0].case.split(":")[0]
    full = {"bfloat16": "bf16", "float16": "fp16"}.get(name.split()[-1], "fp32")
    columns = {
        "bytes per token": lambda row, kind: row.case == f"{name}: bytes per token, {kind}",
        "requests at once": lambda row, kind: "at once" in row.case and row.case.endswith(f", {kind}"),
        "KL, 512 tokens": lambda row, kind: (
            " 512 tokens" in row.case and row.case.endswith(f"in {kind}: KL from fp32")
        ),
        "KL, 2,048": lambda row, kind: (
            "2,048 tokens" in row.case and row.case.endswith(f"in {kind}: KL from fp32")
        ),
        "goodput, requests/s": lambda row, kind: row.unit == "requests/s" and row.case.endswith(f", {kind}"),
    }
    lines = [f"| cache | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for kind in (full, "int8", "fp8", "int4"):
        found = [
            next((row.median for row in report.rows if fits(row, kind)), None) for fits in columns.values()
        ]
        texts = [
            "" if x is None else f"{x:,.0f}" if x == int(x) else f"{x:.2f}" if x >= 0.1 else f"{x:.4f}"
            for x in found
        ]
        lines.append(f"| {kind} | {' | '.join(texts)} |")
    return "\n".join(lines)
