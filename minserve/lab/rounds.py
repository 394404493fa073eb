"""Speculation in rounds: what one makes, what to expect of it, what a run with a drafter took.

    made(draft, drawn)           the tokens of one round: drafts that were right, and the token drawn behind them
    leftover(p, q)               what a token is drawn from, once a draft from q was refused
    expected_tokens(a, k)        tokens per round, if each draft token is right with chance a
    machine_here(dtype)          this machine's two ceilings
    run(llm, prompts, params)    what an engine did, without its prompts: tokens, seconds, drafts and those kept
    race(model, prompts, ...)    the same with each of several drafters, in turn, the fastest of each

made, leftover and expected_tokens answer the exercises.

Sources  Leviathan et al. 2023 (arXiv:2211.17192), whose equation 1 is expected_tokens
Story    notebooks/11_speculative_decoding.ipynb
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minserve.engine import LLM
from minserve.kernels.verify import walk
from minserve.lab import roofline
from minserve.lab.measure import where_am_i
from minserve.lab.roofline import Machine
from minserve.model import Model
from minserve.pages import pages_for
from minserve.request import SamplingParams
from minserve.speculation import Drafter
from minserve.step_log import StepRecord


# ---------------------------------------------------------------- by hand
def made(draft: list[int], drawn: list[int]) -> list[int]:
    """drawn [len(draft) + 1]: the token that the model draws behind each place, the last known token's first."""
    ids, parents = torch.tensor([-1, *draft]), torch.arange(-1, len(draft), dtype=torch.int32)
    starts = torch.tensor([0, len(drawn)], dtype=torch.int32)
    path = walk(torch.tensor(drawn), ids, parents, starts, len(drawn))[0]
    places = path[path >= 0].tolist()
    return [*(draft[place - 1] for place in places[1:]), drawn[places[-1]]]


def leftover(p: Sequence[float], q: Sequence[float]) -> list[float]:
    """max(0, p - q), made a distribution again. Of equal ones nothing is left, and nothing is ever refused: p."""
    above = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    return [x / sum(above) for x in above] if any(above) else list(p)


def expected_tokens(a: float, k: int) -> float:
    """1 + a + a^2 + ... + a^k: draft i is kept if it and all before it are right, and one token comes on top."""
    return (1 - a ** (k + 1)) / (1 - a) if a < 1 else k + 1.0


def machine_here(dtype: torch.dtype) -> Machine:
    """roofline.ceilings, shorter: half of its buffer, a few repeats."""
    ways = roofline.read_samples(roofline.beyond_cache_bytes() // 2, 8).values()
    flops = max(roofline.matmul_samples(dtype, False, 3))
    return Machine(where_am_i(), max(map(max, ways)), flops, source="measured here")


# ---------------------------------------------------------------- runs
class Run(NamedTuple):
    tokens: list[list[int]]  # of each request
    log: list[StepRecord]  # the steps without prompts
    seconds: float
    packing: float  # of these, from schedule to batch: a drafter's time is in here
    steps: int  # of each request: a step of a batch of 4 counts 4 times
    drafted: int
    kept: int

    @property
    def per_step(self) -> float:
        """Tokens of one request in one step."""
        return 1 + self.kept / self.steps

    @property
    def rate(self) -> float:
        """Tokens per second, without the first of each request."""
        return sum(len(its) - 1 for its in self.tokens) / self.seconds

    def price(self, plain: "Run", k: int) -> float:
        """c: what each of k drafted tokens took, in steps of the run without a drafter."""
        longer = self.packing / len(self.log) - plain.packing / len(plain.log)
        return longer / k / (plain.seconds / len(plain.log))

    def beside(self, plain: "Run") -> str:
        return (
            f"{self.kept} of {self.drafted} drafted tokens kept, {self.per_step:.2f} tokens a step, "
            f"{self.rate / plain.rate:.2f} times as fast"
        )


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> Run:
    llm.log.clear()
    tokens = [output.tokens for [output] in llm.generate(prompts, params, progress=False)]
    log = [its for its in llm.log if its.rows and all(row.num_tokens == 1 + row.drafted for row in its.rows)]
    rows = [row for its in log for row in its.rows]
    return Run(
        tokens, log, sum(its.total for its in log), sum(its.seconds["pack"] for its in log), len(rows),
        sum(row.drafted for row in rows), sum(row.kept for row in rows),
    )  # fmt: skip


def race(
    model: Model,
    prompts: list[list[int]],
    new: int,
    drafters: dict[str, Drafter | None],
    adaptive: bool = True,
    seats: int | None = None,
    rounds: int = 2,
) -> dict[str, Run]:
    """`new` greedy tokens of each prompt, all at once or `seats` at a time; an engine for each drafter.

    In turn, and of each the fastest: other programs only ever add. The first round warms up, and an adaptive engine
    learns in it what steps cost.
    """
    seats, room = seats or len(prompts), max(map(len, prompts)) + new + 15
    sizes = dict(num_pages=seats * pages_for(room, 16), token_budget=seats * room, max_running=seats)
    llms = {
        name: LLM(model, **sizes, prefix_caching=False, overlap=False, drafter=drafter, adaptive=adaptive)
        for name, drafter in drafters.items()
    }
    asked, runs = SamplingParams(max_tokens=new, ignore_eos=True), {name: [] for name in drafters}
    for _ in range(rounds):
        for name, llm in llms.items():
            runs[name].append(run(llm, prompts, asked))
    return {name: min(its, key=lambda one: one.seconds) for name, its in runs.items()}
