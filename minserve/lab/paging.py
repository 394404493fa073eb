"""Pages on paper: the arithmetic of pages, attention walked page by page, and a scheduler's day without a model.

    slot_of, waste      where a token lives; what the last page of each request leaves empty
    walk                attention over one request's pages, in plain PyTorch, one table entry at a time
    fill, decode_batch  a pool, or one step, with requests of given lengths in it
    serve               requests through an engine, each answer of a given length
    day                 the same through the real scheduler and a real pool without a model: hundreds in a second
    arrive, hit_rate    one prompt, or many, through a pool that remembers prefixes; first_token: TTFT of an engine
    chain_keys          the keys of the prefix index, by hand; shared_pages: how much of a prompt another one has
    lengths             token counts with a long tail, like those of real traffic

Sources  PagedAttention, Kwon et al. 2023 (arXiv:2309.06180); chat lengths of the Azure LLM inference trace, 2023
Story    notebooks/05_paged_attention.ipynb, notebooks/06_prefix_caching.ipynb
"""

import math
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from minserve.batch import Batch, Packer
from minserve.engine import Engine
from minserve.lab import online_softmax
from minserve.pages import PagePool, pages_for
from minserve.request import Request, SamplingParams
from minserve.scheduler import Scheduler


# ---------------------------------------------------------------- arithmetic
def slot_of(table: Sequence[int], position: int, page_size: int) -> int:
    """The slot, counted through the whole pool, of a request's token at `position`."""
    return table[position // page_size] * page_size + position % page_size


def waste(lengths: Sequence[int], page_size: int) -> float:
    """The share of the slots in use that hold no token, when each request has the fewest pages it can."""
    held = sum(pages_for(n, page_size) for n in lengths) * page_size
    return 1 - sum(lengths) / held


def lengths(rng: np.random.Generator, n: int, median: float, mean: float, low: int, high: int) -> list[int]:
    """n log-normal token counts of this median and mean, cut off at both ends (which moves the mean a little)."""
    sigma = math.sqrt(2 * math.log(mean / median))
    return np.clip(rng.lognormal(math.log(median), sigma, n).round(), low, high).astype(int).tolist()


def chats(n: int, seed: int = 0, most: int = 1024) -> tuple[list[int], list[int]]:
    """Prompt and answer lengths with the medians and means of the published chat trace."""
    rng = np.random.default_rng(seed)
    return lengths(rng, n, 1020, 1155, 16, 3000), lengths(rng, n, 129, 211, 1, most)


# ---------------------------------------------------------------- attention
def walk(q, k_cache, v_cache, table: Sequence[int], length: int):
    """softmax(q . K^T / sqrt(D)) . V for q [R, D], one head; k_cache and v_cache [P, S, D]; the first `length` tokens.

    One page at a time, in the order of the table; nothing larger than a page of scores is ever stored.
    """
    S, D = k_cache.shape[1:]
    state = online_softmax.start(len(q), D, q.device)
    for i in range(pages_for(length, S)):
        page, here = table[i], min(S, length - i * S)  # the last page may be partly full
        scores = q @ k_cache[page, :here].T / D**0.5  # [R, here]
        state = online_softmax.update(*state, scores, v_cache[page, :here])
    return online_softmax.finish(*state)[0]


# ---------------------------------------------------------------- a day of the scheduler
@dataclass(frozen=True)
class Day:
    steps: int
    running: float  # requests at once, on average over the steps in which others were waiting
    most: int
    waste: float  # share of the slots in use that held nothing, over the same steps
    preemptions: int

    def __str__(self) -> str:
        many = f"{self.running:.1f} at once, {self.waste:.1%} empty, {self.steps:,} steps"
        return f"{many}, {self.preemptions} preemptions"


def fill(pool: PagePool, sizes: Sequence[int], first: int = 0, most: int | None = None) -> list[Request]:
    """Requests that have computed so many tokens, ids from `first`: as many of them as the pool takes.

    Each may grow to `most` tokens, or not at all.
    """
    inside = []
    for i, n in enumerate(sizes, first):
        request = Request(i, list(range(n)), SamplingParams(), max_new_tokens=(most or n) - n + 1)
        if not (pool.admit(request, n) and pool.grow(request, n)):
            break
        request.computed = n
        inside.append(request)
    return inside


def decode_batch(lengths: Sequence[int], pages: int = 512, page_size: int = 16, device="cpu") -> Batch:
    """A step in which rows of these lengths make one token each, their pages in random order."""
    pool, packer = (
        PagePool(pages, page_size, prefix_caching=False),
        Packer(len(lengths), 1024, page_size, device),
    )
    random.Random(0).shuffle(pool.free)  # as after a day of use
    rows = fill(pool, lengths)
    for seat, request in enumerate(rows):
        request.seat, request.computed = seat, request.computed - 1
    return packer.pack([(request, 1) for request in rows])


def serve(engine: Engine, prompts: Sequence[int], answers: Sequence[int], limit: int) -> float:
    """Seconds for prompts of these lengths, random tokens, each asking for `limit`; its reader leaves at `answers`."""
    ids, asked = random.Random(1), SamplingParams(max_tokens=limit, ignore_eos=True)
    for n in prompts:
        engine.add(ids.choices(range(engine.model.config.vocab_size), k=n), asked)
    begin = time.perf_counter()
    while engine.scheduler.has_work:
        engine.abort([out for out, _ in engine.step() if len(out.tokens) == answers[out.request.id]])
    return time.perf_counter() - begin


def day(
    pool: PagePool, prompts: Sequence[int], answers: Sequence[int], limit: int, budget=4096, seats=256
) -> Day:
    """Serve prompts of these lengths, all there at once. Answers end where `answers` says; asked for is `limit`."""
    scheduler, end = Scheduler(pool, budget, seats), 1
    for i, n in enumerate(prompts):
        scheduler.add(Request(i, [0] * n, SamplingParams(), limit, stop_ids=frozenset({end})))
    running, empty, steps, most = [], [], 0, 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        most = max(most, len(scheduler.running))
        if scheduler.waiting:
            stored = sum(r.computed for r in scheduler.running) + sum(n for _, n in plan)
            running.append(len(scheduler.running))
            empty.append(1 - stored / (pool.in_use * pool.page_size))
        made = [[end if len(r.outputs) + 1 >= answers[r.id] else 0] for r, _ in plan]
        scheduler.commit(plan, made)
        steps += 1
    mean = lambda xs: statistics.fmean(xs) if xs else 0.0  # noqa: E731
    return Day(steps, mean(running), most, mean(empty), scheduler.preemptions)


# ---------------------------------------------------------------- prefixes
def arrive(pool: PagePool, number: int, tokens: Sequence[int], salt: bytes = b"") -> Request:
    """Request `number` finds what the index knows of it, and computes the rest at once. `cached_tokens`: what it found.

    Raises ValueError when the pool has no room for it.
    """
    request = Request(number, list(tokens), SamplingParams(), 1, salt=salt)
    if not (pool.admit(request, len(tokens)) and pool.grow(request, request.owed)):
        raise ValueError(f"{len(tokens):,} tokens do not fit: {pool.available:,} pages of {pool.page_size}")
    request.cached_tokens, request.computed = request.computed, len(tokens)
    pool.settle(request)
    return request


def hit_rate(pool: PagePool, prompts: Sequence[Sequence[int]]) -> float:
    """Found tokens over asked tokens, for prompts that come and go one after another."""
    found = 0
    for i, prompt in enumerate(prompts):
        request = arrive(pool, i, prompt)
        found += request.cached_tokens
        pool.release(request)
    return found / sum(map(len, prompts))


def first_token(engine: Engine, prompt: str | list[int], salt: bytes = b"") -> tuple[float, int]:
    """Seconds until an idle engine's first token, and how many of the prompt's tokens were found in its cache."""
    begin = time.perf_counter()
    (output,) = engine.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True), salt=salt)
    while not output.finished:
        engine.step()
    return time.perf_counter() - begin, output.request.cached_tokens


def chain_keys(tokens: Sequence[int], page_size: int, salt: bytes = b"/") -> list[bytes]:
    """One key per full page: each is SHA-256 of the key before it and the page's tokens, 8 bytes each."""
    keys, before = [], sha256(salt).digest()
    for i in range(len(tokens) // page_size):
        page = array("q", tokens[i * page_size : (i + 1) * page_size]).tobytes()
        before = sha256(before + page).digest()
        keys.append(before)
    return keys


def shared_pages(prompt: Sequence[int], earlier: Sequence[int], page_size: int) -> int:
    """Pages that `prompt` need not compute when `earlier` has been: full ones, from the start, never its last token."""
    same = 0
    while same < min(len(prompt) - 1, len(earlier)) and prompt[same] == earlier[same]:
        same += 1
    return same // page_size
