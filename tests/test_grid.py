"""Every pair of features gives the tokens of the plain path: one request alone, one cache, no batch.

Each switch also has to show that it acted: a grid in which nothing is preempted proves nothing about preemption.
"""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from minserve.engine import LLM
from minserve.prefill_decode import generate
from minserve.request import SamplingParams, seed_of
from minserve.weights import load

SWITCHES = ["prefix", "chunks", "preemption", "priorities", "fork", "window", "small pages", "sampling"]
SYSTEM = [17, 3, 99, 4, 4, 250, 8, 61, 5, 90, 33, 2, 71, 18, 18, 6, 7, 44, 120, 9, 11, 12, 13]  # 23 tokens


def requests(on: frozenset[str], vocab: int, count: int = 8, new: int = 10):
    """Prompts of many lengths behind one system prompt, and what each asks for."""
    generator = torch.Generator().manual_seed(len(on))
    prompts = [
        SYSTEM + torch.randint(vocab, (3 + 5 * i % 17,), generator=generator).tolist() for i in range(count)
    ]
    draw = dict(temperature=0.8, top_k=40) if "sampling" in on else {}
    n = [3 if "fork" in on and i % 3 == 0 else 1 for i in range(count)]
    params = [
        SamplingParams(max_tokens=new + i % 4, seed=100 + i, n=n[i], ignore_eos=True, **draw)
        for i in range(count)
    ]
    return prompts, params


def serve(model, on: frozenset[str], prompts, params):
    """All of them through one engine with these switches on, arriving one by one; and the engine, to be asked."""
    page_size = 4 if "small pages" in on else 16
    limits = dict(token_budget=24, chunk=7) if "chunks" in on else dict(token_budget=512)
    longest = max(len(p) + q.max_tokens for p, q in zip(prompts, params))
    seen = longest
    if "window" in on and "chunks" in on:  # pages behind the window go back: less is needed at once
        seen = min(longest, max(model.config.windows) + 7 + page_size)
    llm = LLM(
        model,
        num_pages=-(-seen // page_size) + 2 if "preemption" in on else 400,
        page_size=page_size,
        max_running=8,
        prefix_caching="prefix" in on,
        ageing=2,
        **limits,
    )
    made = []
    for i, (prompt, its) in enumerate(zip(prompts, params)):
        made.append(llm.add(prompt, its, priority=(i * 5) % 3 if "priorities" in on else 0))
        for _ in range(
            0 if i < 2 else 1 if i < 5 else 3
        ):  # a crowd first, then some who find a prefix computed
            step(llm, on)
    while llm.outputs:
        step(llm, on)
    return llm, made


def step(llm, on: frozenset[str]):
    llm.step()
    running = llm.scheduler.running
    if "preemption" in on and llm.scheduler.steps % 7 == 0 and len(running) > 1:
        llm.scheduler.preempt(running[-1])  # also where the small pool alone would not force it
    llm.pages.check(llm.scheduler.running)


def alone(model, prompt, params, index):
    one = replace(params, n=1, seed=seed_of(params.seed, index))
    return list(generate(model, prompt, one))


def assert_acted(on: frozenset[str], llm):
    rows = [row for record in llm.log for row in record.rows]
    if "prefix" in on:
        assert llm.scheduler.hit_tokens > 0
    if "chunks" in on:
        assert max(row.num_tokens for row in rows) == 7
    if "preemption" in on:
        assert llm.scheduler.preemptions > 0
    if "fork" in on and "preemption" not in on:  # a preempted leader has nothing to share
        assert llm.scheduler.hit_tokens > 0
    if "priorities" in on:
        firsts = list(dict.fromkeys(row.request for row in rows))
        assert firsts != sorted(firsts)  # somebody was served before somebody who came earlier


def check(model, on: frozenset[str], **size):
    prompts, params = requests(on, model.config.vocab_size, **size)
    with torch.inference_mode():
        llm, made = serve(model, on, prompts, params)
        for prompt, its, outputs in zip(prompts, params, made):
            for output in outputs:
                assert output.error is None and output.finish_reason == "length"
                assert output.tokens == alone(model, prompt, its, output.index)
    llm.pages.check([])
    assert llm.pages.in_use == 0
    assert_acted(on, llm)


@pytest.fixture(scope="module")
def models(checkpoints):
    return {window: load(checkpoints("mistral" if window else "llama-3")) for window in (False, True)}


CASES = [frozenset(c) for size in (0, 1, 2) for c in combinations(SWITCHES, size)] + [frozenset(SWITCHES)]


@pytest.mark.parametrize("on", CASES, ids=lambda on: " + ".join(sorted(on)) or "nothing")
def test_tokens_equal_the_plain_path(models, on):
    check(models["window" in on], on)


@pytest.mark.parametrize(
    "on",
    [{"prefix", "chunks"}, {"fork", "sampling"}, {"preemption", "priorities"}, set(SWITCHES) - {"window"}],
    ids=str,
)
def test_the_real_model(smollm, on):
    check(load(smollm, torch.float32), frozenset(on), count=6, new=6)
