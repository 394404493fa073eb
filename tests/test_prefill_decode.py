"""One request: with a cache and without give the same tokens, stops are right, and bad requests fail at the call."""

from dataclasses import replace

import pytest
import torch
from conftest import FAMILIES

from minserve import prefill_decode
from minserve.config import ModelConfig
from minserve.kv_cache import KVCache
from minserve.prefill_decode import generate, generate_without_cache, prefill, prompt_logprobs
from minserve.request import SamplingParams
from minserve.weights import load

PROMPT = [7, 3, 250, 11, 42, 42, 9]


def run(stream):
    """All tokens, and the reason it ended."""
    tokens = []
    while True:
        try:
            tokens.append(next(stream))
        except StopIteration as end:
            return tokens, end.value


@pytest.fixture
def model(checkpoints):
    return load(checkpoints("llama-3"))


@pytest.fixture
def with_eos(editable):
    """with_eos(ids): a model whose config names these end-of-sequence ids."""
    return lambda ids: load(editable("llama-3", eos_token_id=ids))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "params", [{}, dict(temperature=1.0, seed=5), dict(temperature=0.7, top_k=20, top_p=0.9, seed=1)]
)
def test_cache_changes_no_token(checkpoints, family, params):
    model, params = load(checkpoints(family)), SamplingParams(max_tokens=30, **params)
    assert run(generate(model, PROMPT, params)) == run(generate_without_cache(model, PROMPT, params))


def test_a_seed_fixes_the_text_and_no_seed_does_not(model):
    def text(seed):
        return run(generate(model, PROMPT, SamplingParams(max_tokens=20, temperature=1.5, seed=seed)))[0]

    assert text(1) == text(1) != text(2)
    shared = SamplingParams(max_tokens=20, temperature=1.5)  # one object, no seed: each request draws its own
    assert run(generate(model, PROMPT, shared)) != run(generate(model, PROMPT, shared))


def frequency(logits, outputs):
    for token in outputs:
        logits[token] -= 1.5


def presence(logits, outputs):
    for token in set(outputs):
        logits[token] -= 2.0


def repetition(logits, outputs):
    for token in {*PROMPT, *outputs}:
        logits[token] *= 3.0 if logits[token] < 0 else 1 / 3.0


@pytest.mark.parametrize(
    "penalty, by_hand",
    [
        (dict(frequency_penalty=1.5), frequency),
        (dict(presence_penalty=2.0), presence),
        (dict(repetition_penalty=3.0), repetition),
    ],
)
def test_the_history_counts(model, penalty, by_hand):
    bias, expected = {7: 30, 42: 30, 100: 30, 5: 30}, []  # a few tokens in the lead, so that they meet again
    for _ in range(12):
        logits = prefill(model, [*PROMPT, *expected], KVCache(model.config, 32)).clone()
        logits[list(bias)] += 30
        by_hand(logits, expected)
        expected.append(int(logits.argmax()))
    for path in generate, generate_without_cache:
        asked = SamplingParams(max_tokens=12, logit_bias=bias)
        assert run(path(model, PROMPT, asked))[0] != expected, "the penalty changes nothing here"
        assert run(path(model, PROMPT, replace(asked, **penalty)))[0] == expected


def test_stop_ids_wait_for_min_tokens(model):
    asked = SamplingParams(logit_bias={7: 100, 8: 50}, stop_token_ids=[7], min_tokens=3, max_tokens=6)
    assert run(generate(model, PROMPT, asked)) == ([8, 8, 8], "stop")


def test_eos_waits_for_min_tokens_too(with_eos):
    asked = SamplingParams(logit_bias={7: 100, 8: 50}, min_tokens=3, max_tokens=6)
    assert run(generate(with_eos([7]), PROMPT, asked)) == ([8, 8, 8], "stop")


@pytest.mark.parametrize("path", [generate, generate_without_cache])
def test_what_needs_the_engine_is_refused(model, path):
    for asked in dict(n=2), dict(stop="x"), dict(logprobs=0):
        with pytest.raises(ValueError, match=f"{next(iter(asked))} need the engine"):
            path(model, PROMPT, SamplingParams(**asked))
    with pytest.raises(ValueError, match="logit_bias names token id 251"):
        path(model, PROMPT, SamplingParams(logit_bias={251: 1}))


def test_every_eos_stops_and_none_is_shown(model, with_eos):
    free, _ = run(generate(model, PROMPT, SamplingParams(max_tokens=20)))
    third = free[2]
    expected = free[: free.index(third)], "stop"
    assert run(generate(with_eos([250, third]), PROMPT, SamplingParams(max_tokens=20))) == expected
    assert run(generate(model, PROMPT, SamplingParams(max_tokens=20, stop_token_ids=[third]))) == expected


def test_ignore_eos_goes_on_but_explicit_stops_do_not(with_eos, model):
    free, _ = run(generate(model, PROMPT, SamplingParams(max_tokens=20)))
    stubborn = with_eos([free[2]])
    ignoring = SamplingParams(max_tokens=5, ignore_eos=True)
    assert run(generate(stubborn, PROMPT, ignoring)) == (free[:5], "length")
    explicit = SamplingParams(max_tokens=5, ignore_eos=True, stop_token_ids=(free[2],))
    assert run(generate(stubborn, PROMPT, explicit)) == (free[: free.index(free[2])], "stop")


def test_eos_as_the_very_last_token_is_a_stop(model, with_eos):
    free, _ = run(generate(model, PROMPT, SamplingParams(max_tokens=20)))
    third = free.index(free[2]) + 1
    assert run(generate(with_eos(free[2]), PROMPT, SamplingParams(max_tokens=third)))[1] == "stop"


@pytest.mark.parametrize("n", [1, 2, 5])
def test_max_tokens_is_exact(model, n):
    tokens, reason = run(generate(model, PROMPT, SamplingParams(max_tokens=n)))
    assert len(tokens) == n and reason == "length"


def test_without_max_tokens_the_context_is_filled(model):
    prompt = [1] * 500
    tokens, reason = run(generate(model, prompt, SamplingParams()))
    assert (len(tokens), reason) == (12, "length")  # 500 + 12 = 512, the context


def test_a_conversation_continues_in_its_cache(model):
    cache = KVCache(model.config, 100)
    first, _ = run(generate(model, PROMPT, SamplingParams(max_tokens=5), cache))
    assert cache.length == len(PROMPT) + 4  # the fifth token is known and not yet computed
    more = [first[-1], 8, 8]
    again, _ = run(generate(model, more, SamplingParams(max_tokens=5), cache))
    assert again == run(generate(model, PROMPT + first + [8, 8], SamplingParams(max_tokens=5)))[0]


# ---------------------------------------------------------------- the door
@pytest.mark.parametrize("path", [generate, generate_without_cache])
@pytest.mark.parametrize(
    "prompt, max_tokens, message",
    [
        ([], 5, "the prompt is empty"),
        ([1, 251], 5, r"token id 251 is not in the vocabulary \(0 to 250\); 1 of 2 prompt ids"),
        ([-1], 5, "token id -1 is not in the vocabulary"),
        (
            [1] * 512,
            None,
            "a prompt of 512 tokens leave no room for an answer: the model's context holds 512",
        ),
        ([1] * 513, 1, r"Shorten it by 2 tokens or more"),
        (
            [1] * 500,
            13,
            r"a prompt of 500 and max_tokens 13 make 513 tokens, and the model's context holds 512",
        ),
    ],
)
def test_bad_requests_fail_at_the_call(model, path, prompt, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        path(model, prompt, SamplingParams(max_tokens=max_tokens))  # before the first next()


def test_the_last_fitting_request_runs(model):
    assert len(run(generate(model, [1] * 511, SamplingParams()))[0]) == 1
    assert len(run(generate(model, [1] * 500, SamplingParams(max_tokens=12)))[0]) == 12


def test_a_small_cache_is_named_instead_of_the_context(model):
    cache = KVCache(model.config, 10)
    with pytest.raises(
        ValueError, match="make 11 tokens, and the cache holds 10.\n  Ask for at most 3 tokens"
    ):
        generate(model, PROMPT, SamplingParams(max_tokens=4), cache)
    assert run(generate(model, PROMPT, SamplingParams(max_tokens=3), cache))[1] == "length"
    with pytest.raises(ValueError, match="9 tokens before and a prompt of 7 tokens leave no room"):
        generate(model, PROMPT, SamplingParams(), cache)


def test_runs_in_bf16_on_a_cpu(checkpoints):
    model = load(checkpoints("qwen3"), torch.bfloat16)
    assert isinstance(model.config, ModelConfig)
    assert len(run(generate(model, PROMPT, SamplingParams(max_tokens=8, temperature=1.0, seed=0)))[0]) == 8


@pytest.mark.parametrize("family", ["llama-3", "qwen2-window"])
@pytest.mark.parametrize("scored", [1, 3, 256])
def test_a_prompts_logprobs_are_those_of_its_prefixes(checkpoints, monkeypatch, family, scored):
    """Whatever number of rows is scored at once."""
    model = load(checkpoints(family))
    monkeypatch.setattr(prefill_decode, "SCORED", scored)
    first, *found = prompt_logprobs(model, PROMPT, 2)
    assert first is None and [its.token for its in found] == PROMPT[1:]
    for i, its in enumerate(found, 1):
        right = prefill(model, PROMPT[:i], KVCache(model.config, i)).log_softmax(-1)
        assert its.logprob == pytest.approx(float(right[PROMPT[i]]), abs=1e-4)
        assert [t for t, _ in its.top[:2]] == right.topk(2).indices.tolist()
    assert prompt_logprobs(model, PROMPT[:1], 2) == [None]
