"""Many requests as work that can be repeated: prompts, how many tokens each makes, and the engine that serves them.

Lengths are fixed before the run and no end token counts, so every policy does the same work and equal tokens can be
asked for.
"""

import random
import time
from dataclasses import dataclass
from functools import partial

from minserve.engine import LLM, Output
from minserve.model import Model
from minserve.pages import ReservingPool, pages_for
from minserve.request import SamplingParams

PAGE = 16


@dataclass(frozen=True)
class Work:
    prompts: list[list[int]]
    lengths: list[int]  # new tokens of each

    @property
    def new_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens that a server must expect of any of these requests: the longest prompt and the longest answer."""
        return max(map(len, self.prompts)) + max(self.lengths)

    def first(self, count: int, longest: int) -> "Work":
        """A smaller work to check answers with."""
        return Work(self.prompts[:count], [min(n, longest) for n in self.lengths[:count]])


def ragged(vocab: int, count: int, prompt: tuple[int, int], lengths, shared: int = 0, seed: int = 0) -> Work:
    """`count` prompts of random ids, `shared` of them the same in all; lengths: a function of the generator."""
    rng = random.Random(seed)
    ids = lambda n: [rng.randrange(vocab) for _ in range(n)]
    system = ids(shared)
    prompts = [system + ids(rng.randint(*prompt)) for _ in range(count)]
    return Work(prompts, [lengths(rng) for _ in range(count)])


def uniform(low: int, high: int):
    return lambda rng: rng.randint(low, high)


def bimodal(low: int, high: int):
    """Nine in ten answers are short."""
    return lambda rng: high if rng.random() < 0.1 else low


def reserving(longest: int):
    """A pool that keeps room for `longest` tokens for every request it admits."""
    return partial(ReservingPool, longest=longest)


def pool_for(requests: int, longest: int) -> int:
    """Pages in which that many requests of the longest kind fit."""
    return requests * pages_for(longest, PAGE)


def serve(llm: LLM, work: Work, each=None) -> tuple[float, list[Output]]:
    """Answer it all: seconds, and the outputs in order. Raises RuntimeError unless all have their full length.

    each(output, text) hears every token, as in LLM.generate.
    """
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in work.lengths]
    start = time.perf_counter()
    outputs = [out[0] for out in llm.generate(work.prompts, params, progress=False, each=each)]
    seconds = time.perf_counter() - start
    made = [len(output.tokens) for output in outputs]
    if made != work.lengths:
        raise RuntimeError(f"answers of {made} tokens where {work.lengths} were asked for: not the same work")
    return seconds, outputs


def rate(model: Model, work: Work, **options) -> float:
    """Output tokens per second of a fresh engine with these options."""
    return work.new_tokens / serve(LLM(model, page_size=PAGE, **options), work)[0]


def waste(llm: LLM) -> float:
    """Share of the slots in use that hold no token, over the run: from the step log."""
    held = sum(record.in_use for record in llm.log) * PAGE
    filled = sum(row.computed + row.num_tokens for record in llm.log for row in record.rows)
    return 1 - filled / held
