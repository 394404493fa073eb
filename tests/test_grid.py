"""Every pair of features gives the tokens of the plain path: one request alone, no cache, no batch.

With quantized weights that is the plain path of the same quantized weights, each multiplied by its definition; with a
quantized cache it is tests/quantized_oracle.py.

Each switch also has to show that it acted: a grid in which nothing is preempted proves nothing about preemption.
Drafts are not drawn here: with them, too, tokens are those of the plain path, sampled ones included.
"""

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
import torch
from quantized_oracle import attend_rounded, told

from minserve.calibration import quantize_model
from minserve.draft_model import DraftModel, EarlyExit
from minserve.engine import LLM
from minserve.kernels import native
from minserve.medusa import Medusa
from minserve.prefill_decode import attend_afresh
from minserve.quantization import QuantLinear, Scheme
from minserve.quantized_cache import KINDS
from minserve.request import SamplingParams, Status, seed_of
from minserve.speculation import NGram
from minserve.trained import MedusaHeads
from minserve.weights import load

SWITCHES = ["prefix", "chunks", "preemption", "priorities", "fork", "window", "small pages", "sampling"]
SWITCHES += [
    "fused",
    "graph",
    "overlap",
]  # how a step is computed (a graph is fused, too), and when the next one is
CACHES = {f"{kind} cache": kind for kind in KINDS}
WEIGHTS = {"int8 weights": Scheme(8), "int4 weights": Scheme(4, 32, symmetric=False)}
DRAFTERS = {
    "ngram": lambda model: NGram(4, longest=2, shortest=1),
    "draft model": lambda model: DraftModel(nearly(model)),
    "early exit": lambda model: EarlyExit(model.config.num_layers - 1),
    "medusa": lambda model: Medusa(heads(model), tree=[(0,), (1,), (0, 0), (0, 1), (1, 0)]),
}
SWITCHES += [*CACHES, *WEIGHTS, *DRAFTERS]
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


def nearly(model):
    """The same model, a little off: often right, and not always."""
    if "nearly" not in model.__dict__:
        apart = {id(model.__dict__[name]): None for name in ("_fused", "answers") if name in model.__dict__}
        other, generator = deepcopy(model, apart), torch.Generator().manual_seed(0)
        other.__dict__.pop("_fused", None), other.__dict__.pop("answers", None)
        for weight in other.parameters():
            if weight.ndim == 1:
                weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=generator))
        model.__dict__["nearly"] = other
    return model.__dict__["nearly"]


def heads(model):
    """Untrained: each says of the newest token what the model said before it. Repetitions are guessed, nothing else."""
    return MedusaHeads(model, torch.arange(model.config.vocab_size), 2)


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
        step="graph" if "graph" in on else "fused" if "fused" in on else "plain",
        overlap="overlap" in on,
        drafter=DRAFTERS[name](model) if (name := next(iter(on & set(DRAFTERS)), None)) else None,
        adaptive=False,
        kv_cache_dtype=chosen(on, CACHES),
        **limits,
    )
    watch(llm, on)
    made = []
    for i, (prompt, its) in enumerate(zip(prompts, params)):
        made.append(llm.add(prompt, its, priority=(i * 5) % 3 if "priorities" in on else 0))
        for _ in range(
            0 if i < 2 else 1 if i < 5 else 3
        ):  # a crowd first, then some who find a prefix computed
            step(llm)
    while llm.outputs:
        step(llm)
    return llm, made


def step(llm):
    landing = llm.flight
    llm.step()
    llm.seen["launched ahead"] += landing is not None and bool(llm.log[-1].rows)
    llm.pages.check(llm.scheduler.running)


def watch(llm, on: frozenset[str]) -> None:
    """Count what its steps are computed by; and with "preemption", a pool that every now and then has no page."""
    llm.seen, compute, grow = Counter(), llm.compute, llm.pages.grow
    for step in getattr(compute, "steps", {}).values():
        step.replay = counting(llm.seen, "replays", step.replay)
    llm.compute = counting(llm.seen, type(compute).__name__, compute)

    def tight(request, num_tokens):
        """Also where the small pool alone would force nobody out."""
        llm.seen["grow"] += request.status is Status.RUNNING and len(llm.scheduler.running) > 1
        if llm.seen["grow"] % 3 == 1:
            llm.seen["grow"] += 1
            return False
        return grow(request, num_tokens)

    if "preemption" in on:
        llm.pages.grow = tight


def counting(counts, name, function):
    def call(*args):
        counts[name] += 1
        return function(*args)

    return call


def chosen(on: frozenset[str], among: dict):
    return next((among[name] for name in among if name in on), None)


def assert_alone(model, on, prompt, params, output):
    """Each token is what the plain path makes of the prompt and the tokens before it: by induction, its answer."""
    one, kind = replace(params, n=1, seed=seed_of(params.seed, output.index)), chosen(on, CACHES)
    page = 4 if "small pages" in on else 16
    known = model.__dict__.setdefault("answers", {})  # the same questions come in many cases
    key = str((prompt, one, kind, page if kind == "int4" else None))
    if key not in known:
        attend = attend_rounded(model.config, kind, page) if kind else attend_afresh(model.config)
        assert output.tokens == told(model, prompt, output.tokens, one, attend)
        known[key] = output.tokens
    assert output.tokens == known[key] and len(output.tokens) == one.max_tokens


def assert_acted(on: frozenset[str], llm):
    rows = [row for record in llm.log for row in record.rows]
    if "prefix" in on:
        assert llm.scheduler.hit_tokens > 0
    if "chunks" in on:
        assert max(row.num_tokens for row in rows) == 7
    if "preemption" in on:
        assert llm.scheduler.preemptions > 0
    assert getattr(llm.cache, "kind", None) == chosen(on, CACHES)
    quantized = [module.scheme for module in llm.model.modules() if isinstance(module, QuantLinear)]
    assert set(quantized) == {chosen(on, WEIGHTS)} - {None}
    if "fork" in on and "preemption" not in on:  # a preempted leader has nothing to share
        assert llm.scheduler.hit_tokens > 0
    if "priorities" in on:
        firsts = list(dict.fromkeys(row.request for row in rows))
        assert firsts != sorted(firsts)  # somebody was served before somebody who came earlier
    if "graph" in on:
        assert llm.seen["Graphs"] == sum(bool(record.rows) for record in llm.log)
        assert llm.seen["replays"] > 0 or native.usable() is not None or "fp8 cache" in on
    elif "fused" in on:
        assert llm.seen["Fused"] == sum(bool(record.rows) for record in llm.log)
    else:
        assert llm.seen["method"] == sum(bool(record.rows) for record in llm.log)
    assert (llm.seen["launched ahead"] > 4) == ("overlap" in on)
    drafted, kept = sum(row.drafted for row in rows), sum(row.kept for row in rows)
    assert bool(on & set(DRAFTERS)) == (drafted > 0)
    if drafted:
        assert llm.speculation.on and drafted > kept
        assert kept > 0 or "sampling" in on or "preemption" in on or "draft model" not in on


def check(model, on: frozenset[str], **size):
    prompts, params = requests(on, model.config.vocab_size, **size)
    with torch.inference_mode():
        llm, made = serve(model, on, prompts, params)
        for prompt, its, outputs in zip(prompts, params, made):
            for output in outputs:
                assert output.error is None and output.finish_reason == "length"
                assert_alone(model, on, prompt, its, output)
    llm.pages.check([])
    assert llm.pages.in_use == 0
    assert_acted(on, llm)


@pytest.fixture(scope="module")
def models(checkpoints):
    """models(on): one per family and weights."""

    @cache
    def get(window: bool, weights: Scheme | None):
        return rounded(load(checkpoints("mistral" if window else "llama-3")), weights)

    return lambda on: get("window" in on, chosen(on, WEIGHTS))


def rounded(model, weights: Scheme | None):
    if weights:
        quantize_model(model, "rtn", weights, head=weights, progress=False)
    return model


@pytest.fixture(scope="module")
def real(smollm):
    return cache(lambda weights: rounded(load(smollm, torch.float32), weights))


ONE_OF = [set(CACHES), set(WEIGHTS), {*DRAFTERS, "overlap"}]  # these exclude each other
# Roundings amplify: one of thousands that falls the other way moves int4's logits, and a draw may see it
ALL = frozenset(SWITCHES) - {"fp8 cache", "int4 cache", "int8 weights", *DRAFTERS}
GREEDY = ALL - {"sampling", "int8 cache"} | {"int4 cache"}
CASES = [frozenset(c) for size in (0, 1, 2) for c in combinations(SWITCHES, size)] + [ALL, GREEDY]
CASES += [all_of - {"overlap"} | {name} for name in DRAFTERS for all_of in (ALL, GREEDY, ALL - {"window"})]
CASES = [on for on in CASES if not any(len(on & kinds) > 1 for kinds in ONE_OF)]
LATER = {"fused", "overlap", *CACHES, *WEIGHTS, *DRAFTERS}  # in pairs, left out of `make quick`


QUICK = [on for on in CASES if len(on) == 1 or not on & LATER]
MORE = [pytest.param(on, marks=pytest.mark.slow) for on in CASES if on not in QUICK]


@pytest.mark.parametrize("on", QUICK + MORE, ids=lambda on: " + ".join(sorted(on)) or "nothing")
def test_tokens_equal_the_plain_path(models, on):
    check(models(on), on)


@pytest.mark.parametrize(
    "on",
    [
        {"prefix", "chunks", "fused"},
        {"fork", "sampling", "overlap"},
        {"preemption", "priorities", "graph"},
        {"int8 cache", "int8 weights", "prefix", "graph"},
        ALL - {"window", "int4 weights", *CACHES},
        ALL - {"window", *CACHES},
        {"early exit", "prefix", "chunks", "graph"},
        {"medusa", "fork", "int8 cache", "graph"},
        {"ngram", "sampling", "preemption"},
    ],
    ids=lambda on: " + ".join(sorted(on)),
)
def test_the_real_model(real, on):
    on = frozenset(on)
    check(real(chosen(on, WEIGHTS)), on, count=5, new=5)


def test_drafts_do_not_go_with_steps_ahead(models):
    for name in DRAFTERS:
        model = models(frozenset())
        with pytest.raises(ValueError, match="use one of the two"):
            LLM(model, num_pages=9, drafter=DRAFTERS[name](model), overlap=True)
