"""Notebook 11's arithmetic and its runs: by hand, by simulation, and against what the engine's log says."""

import random

import pytest
import torch
from wrong_versions import wrong_version

from minserve.config import ModelConfig, RopeConfig
from minserve.draft_model import DraftModel
from minserve.engine import LLM
from minserve.lab import rounds
from minserve.model import Model
from minserve.request import SamplingParams
from minserve.speculation import NGram

CONFIG = ModelConfig(
    family="llama", vocab_size=61, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=4, norm_eps=1e-5, rope=RopeConfig(100.0), context=128, tied=True, windows=(None, None),
)  # fmt: skip
PROMPTS = [[7, 8, 9] * 4, [1, 2, 3, 4]]


@pytest.fixture(scope="module")
def model():
    return Model.random(CONFIG, torch.float32, seed=1)


# ---------------------------------------------------------------- by hand
def by_hand(module):
    assert module.made([], [4]) == [4]
    assert module.made([5, 6], [7, 6, 9]) == [7]
    assert module.made([5, 6, 7], [5, 1, 7, 8]) == [5, 1]
    assert module.made([5, 6], [5, 6, 9]) == [5, 6, 9]
    assert module.leftover([0.3, 0.5, 0.2], [0.6, 0.3, 0.1]) == pytest.approx([0, 2 / 3, 1 / 3])
    assert module.leftover([0.3, 0.7], [0.3, 0.7]) == [0.3, 0.7]
    assert [module.expected_tokens(a, 4) for a in (0.0, 0.5, 1.0)] == [1.0, 1.9375, 5.0]


def test_by_hand():
    by_hand(rounds)


@pytest.mark.parametrize("a, k", [(0.3, 2), (0.9, 8)])
def test_expected_tokens_is_what_rounds_make(a, k):
    rng, n = random.Random(0), 20_000
    made = [rounds.made([1] * k, [1 if rng.random() < a else 0 for _ in range(k + 1)]) for _ in range(n)]
    assert sum(map(len, made)) / n == pytest.approx(rounds.expected_tokens(a, k), rel=0.02)


def test_a_machine_has_two_ceilings(monkeypatch):
    monkeypatch.setattr(rounds.roofline, "read_samples", lambda *_: {"copy": [1.0, 5.0], "sum": [3.0]})
    monkeypatch.setattr(rounds.roofline, "matmul_samples", lambda *_: [7.0, 9.0])
    machine = rounds.machine_here(torch.float32)
    assert (machine.read_bandwidth, machine.flops) == (5.0, 9.0)


# ---------------------------------------------------------------- runs
def counts(module, model):
    twin = module.race(model, PROMPTS, 11, {"itself": DraftModel(model, k=4)}, False, rounds=1)["itself"]
    assert (twin.drafted, twin.kept, twin.steps, len(twin.log)) == (16, 16, 4, 2)  # 1 token, then 5 and 5
    assert twin.per_step == 5 and twin.rate == pytest.approx(20 / twin.seconds)
    assert twin.seconds == sum(record.total for record in twin.log) > twin.packing > 0
    assert not any(row.computed == 0 for record in twin.log for row in record.rows)

    runs = module.race(model, PROMPTS, 11, {"without": None, "n-gram": NGram(8)}, False, seats=1)
    plain, ngram = runs["without"], runs["n-gram"]
    assert plain.tokens == ngram.tokens == twin.tokens
    assert (plain.drafted, plain.steps, plain.per_step) == (0, 20, 1)
    assert max(len(record.rows) for record in plain.log) == 1
    assert ngram.steps + ngram.kept == 20 and ngram.drafted >= ngram.kept
    assert ngram.beside(plain).startswith(f"{ngram.kept} of {ngram.drafted} drafted tokens kept, ")
    assert f"{ngram.rate / plain.rate:.2f} times" in ngram.beside(plain)


def test_a_run_counts_what_the_engine_did(model):
    counts(rounds, model)


def fastest(module, model, monkeypatch):
    slow = iter([3.0, 1.0, 2.0])
    real = module.run

    def run(llm, prompts, params):
        return real(llm, prompts, params)._replace(seconds=next(slow))

    with monkeypatch.context() as patch:
        patch.setattr(module, "run", run)
        assert module.race(model, PROMPTS, 3, {"without": None}, rounds=3)["without"].seconds == 1.0


def test_of_several_rounds_the_fastest_counts(model, monkeypatch):
    fastest(rounds, model, monkeypatch)


def price(module):
    run = module.Run([[1]], [None] * 4, 0.0, 0.0, 4, 0, 0)
    plain, drafting = run._replace(seconds=0.4, packing=0.04), run._replace(log=[None] * 2, packing=0.42)
    assert drafting.price(plain, 4) == pytest.approx((0.21 - 0.01) / 4 / 0.1)


def test_the_price_of_a_drafted_token():
    price(rounds)


def again(module, model):
    llm, asked = LLM(model, num_pages=16), SamplingParams(max_tokens=4, ignore_eos=True)
    assert [module.run(llm, PROMPTS, asked).steps for _ in range(2)] == [6, 6]


def test_a_second_run_counts_from_nothing(model):
    again(rounds, model)


# ---------------------------------------------------------------- wrong versions
WRONG = {
    "drafts are kept behind a refusal": (
        "path[path >= 0].tolist()",
        "[0] + [i + 1 for i in range(len(draft)) if draft[i] == drawn[i]]",
    ),
    "nothing on top": ("drawn[places[-1]]]", "*drawn[places[-1] : 0]]"),
    "not normalised": ("x / sum(above)", "x"),
    "without the token on top": ("a ** (k + 1)", "a**k"),
    "the prompts' steps count": (" and all(row.num_tokens == 1 + row.drafted for row in its.rows)", ""),
    "the token from the prompt's step counts": ("len(its) - 1 for", "len(its) for"),
    "accepted per draft, not per step": ("1 + self.kept / self.steps", "1 + self.kept / len(self.log)"),
    "all at once, whatever the seats": ("max_running=seats", "max_running=len(prompts)"),
    "the slowest counts": ("min(its, key=", "max(its, key="),
    "a plain step's packing counts as drafting": (" - plain.packing / len(plain.log)", ""),
    "the log of the run before": ("llm.log.clear()", "pass"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_versions_are_rejected(name, model, monkeypatch):
    module = wrong_version(rounds, *WRONG[name])
    with pytest.raises(AssertionError):
        by_hand(module)
        counts(module, model)
        fastest(module, model, monkeypatch)
        price(module)
        again(module, model)
