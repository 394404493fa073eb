"""What it costs to verify drafts: a step of k + 1 tokens for each request over a step of one, v(k) = T(k + 1) / T(1).

    bound       of a step: weights and the requests' keys and values read once, k + 1 times the flops
    v(4), v(7)  one request: how nearly free its drafts are, as T(1) / T(k + 1), of which 1 is all
    break-even  the batch from which K drafts no longer pay where each is right with chance RIGHT: v(K) has grown to
                1 + RIGHT + RIGHT^2 + ..., the tokens of a step. Predicted by the roofline: as long as memory is the
                wait more tokens cost nothing, and then they cost what they compute

The engine's own step is timed, whole, from its log: plan, pack, model, draw, walk, commit. Drafts are scripted: they
cost nothing, and hardly one of them is kept.
Work     Llama-3.1-8B with random weights on a GPU, SmolLM2 on a CPU
Story    notebooks/11_speculative_decoding.ipynb
"""

from collections import defaultdict
from itertools import pairwise
from math import exp, log
from statistics import median

from minserve.bench.common import Around, Options, chosen, clean_up, label, load, on_gpu
from minserve.bench.workload import PAGE, ragged
from minserve.config import ModelConfig
from minserve.engine import LLM
from minserve.lab.report import Report, Row
from minserve.lab.roofline import Machine, decode_bytes, decode_flops
from minserve.model import Model
from minserve.pages import pages_for
from minserve.request import Draft, SamplingParams
from minserve.speculation import MOST_CHAIN, Drafter

KS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 15)
TARGETS = {4: 1 / 1.05, 7: 1 / 1.10}  # of T(1) / T(k + 1), one request on a GPU
K, RIGHT, AGREES = 4, 0.7, 0.75  # the drafts of the break-even batch; how well it should be predicted


def run(options: Options) -> Report:
    name = next(iter(chosen(options)), None)
    with Around(options) as around:
        model = load(name, options.dtype)
        context = min(256 if on_gpu() else 64, model.config.context // 2)
        work = {B: KS if B == 1 else (0, K) for B in batches(options)}
        seconds = step_seconds(options, model, work, context)
        config, itemsize = model.config, model.dtype.itemsize
        del model
        clean_up()
    where = f"{label(name)} {options.dtype_name}, context {context}"
    note = options.note(around.note)
    return report_of(options, seconds, where, config, around.machine, note, context, itemsize)


def report_of(options: Options, seconds, where: str, config, machine, note: str, context: int, itemsize: int):
    """seconds: {(requests, k): one for each round}"""
    report = options.report()
    for (B, k), samples in seconds.items():
        bound = step_bound(config, machine, B, k, context, itemsize)
        case = f"{where}: {B} x {k + 1} tokens"
        report.add(Row(case, "s", samples, bound, note="" if report.rows else note))
    for k, target in TARGETS.items():
        shares = [one / its for one, its in zip(seconds[1, 0], seconds[1, k])]
        note = f"v({k}) = {1 / median(shares):.2f}"
        target = target if options.gpu_cases else None
        report.add(Row(f"{where}: T(1) / T({k + 1})", "share", shares, 1.0, target, note))
    predicted = break_even(lambda B: growth(config, machine, B, K, context, itemsize))
    add_break_even(report, where, seconds, predicted, AGREES if options.gpu_cases else None)
    return report


def batches(options: Options) -> tuple[int, ...]:
    if options.quick:
        return 1, 2, 4
    return (1, 8, 16, 32, 64, 128) if on_gpu() else (1, 4, 16, 32, 64)


# ---------------------------------------------------------------- steps of a scripted draft
class Scripted(Drafter):
    """`now` tokens for everybody, that the model would hardly say."""

    name, k, now = "scripted", MOST_CHAIN, 0

    def attach(self, engine) -> None:
        self.vocab = engine.model.config.vocab_size

    def propose(self, plan) -> list[Draft | None]:
        return [self.some(r, min(r.granted, self.now)) for r, _ in plan]

    def some(self, request, n: int) -> Draft | None:
        first = request.id + 7919 * len(request.tokens)
        return Draft([(first + 101 * i) % self.vocab for i in range(n)]) if n else None


class Steps:
    """An engine in which so many requests decode, and what its steps take with drafts of any length."""

    def __init__(self, model: Model, prompts: list[list[int]], steps: int):
        """`steps`: how many will be asked for before the next start()."""
        self.prompts, self.script = prompts, Scripted()
        self.new = SamplingParams(max_tokens=steps + 4 * (MOST_CHAIN + 1), ignore_eos=True)
        longest = max(map(len, prompts)) + self.new.max_tokens
        self.llm = LLM(
            model, page_size=PAGE, num_pages=len(prompts) * pages_for(longest, PAGE), max_running=len(prompts),
            token_budget=max(512, len(prompts) * (MOST_CHAIN + 1)), drafter=self.script, adaptive=False,
            prefix_caching=False,
        )  # fmt: skip

    def start(self, batch: int) -> None:
        """The first `batch` prompts are computed."""
        self.script.now = 0
        self.llm.close()
        outputs = [self.llm.add(prompt, self.new)[0] for prompt in self.prompts[:batch]]
        while not all(output.tokens for output in outputs):
            self.llm.step()

    def seconds(self, k: int) -> float:
        """Of one step that verifies k drafts for each. Raises RuntimeError if it did other work."""
        self.script.now = k
        self.llm.step()
        record = self.llm.log[-1]
        if {row.drafted for row in record.rows} != {k} or len(record.rows) != len(self.llm.scheduler.running):
            raise RuntimeError(f"a step of {record.rows} where drafts of {k} were asked for")
        return record.total


def step_seconds(options: Options, model: Model, work: dict[int, tuple[int, ...]], context: int):
    """{(requests, k): seconds, one for each round}"""
    low, high = max(1, context - 8), context  # of several lengths, as everywhere
    prompts = ragged(model.config.vocab_size, max(work), (low, high), lambda rng: 1).prompts
    each = 1 if options.quick else 3  # steps for one sample
    steps = Steps(model, prompts, each * max(map(len, work.values())) + 1)
    samples, rounds = defaultdict(list), 3 if options.quick else 5
    progress = options.progress("steps")
    for done in range(-1, rounds):  # the first one warms up
        for B, ks in work.items():
            steps.start(B)
            steps.seconds(0)
            for k in ks:
                samples[B, k] += [median(steps.seconds(k) for _ in range(each))] * (done >= 0)
        progress(done + 1, rounds)
        if done >= 2 and options.left <= 0:
            break
    steps.llm.close()
    return dict(samples)


# ---------------------------------------------------------------- what the roofline says
def step_bound(
    config: ModelConfig, machine: Machine, batch: int, k: float, context: int, itemsize: int
) -> float:
    flops = (1 + k) * decode_flops(config, batch, context)
    return machine.seconds(decode_bytes(config, batch, context, itemsize), flops)


def growth(config: ModelConfig, machine: Machine, batch: int, k: float, context: int, itemsize: int) -> float:
    """v(k) by the roofline."""
    many, one = (step_bound(config, machine, batch, n, context, itemsize) for n in (k, 0))
    return many / one


def tokens_of(k: int, right: float) -> float:
    """Tokens of a step with a draft of k, each right with this chance if those before it were."""
    return sum(right**i for i in range(k + 1))


def break_even(v, k: int = K, right: float = RIGHT, most: int = 4096) -> int:
    """The smallest batch in which v(batch) has grown to the tokens of a step; `most` if there is none."""
    return next((B for B in range(1, most) if v(B) >= tokens_of(k, right)), most)


def crossing(points: list[tuple[int, float]], level: float) -> float | None:
    """The batch at which v reaches the level, on a line through its neighbours over log(batch)."""
    for (B, v), (C, w) in pairwise(points):
        if v < level <= w:
            return exp(log(B) + (level - v) / (w - v) * log(C / B))
    return points[0][0] if points[0][1] >= level else None


def add_break_even(report: Report, where: str, seconds, predicted: float, target: float | None) -> None:
    sizes = sorted({B for B, _ in seconds})
    rounds = zip(*(zip(seconds[B, 0], seconds[B, K]) for B in sizes))
    level = tokens_of(K, RIGHT)
    found = [crossing([(B, many / one) for B, (one, many) in zip(sizes, its)], level) for its in rounds]
    note = f"v({K}) = {level:.2f}, the tokens of a step; the roofline predicts it at batch {predicted}"
    case = f"{where}: break-even batch of {K} drafts, {RIGHT:.0%} right"
    if None in found:
        vs = ", ".join(f"{B}: {median(seconds[B, K]) / median(seconds[B, 0]):.2f}" for B in sizes)
        report.add(Row(case, "requests", [sizes[-1]], note=f"not below this one; {note}; measured v: {vs}"))
        return
    report.add(Row(case, "requests", found, note=note))
    agreement = [1 - abs(its / predicted - 1) for its in found]
    report.add(Row(f"{case}: measured as predicted", "share", agreement, 1.0, target))
