"""Our forward pass equals transformers': every family, every position, and 64 greedy tokens."""

import json

import pytest
import torch
import transformers
from conftest import FAMILIES

from minserve.config import SHAPES, RopeConfig
from minserve.engine import LLM
from minserve.model import Model, rope_frequencies
from minserve.prefill_decode import attend_afresh, generate, generate_without_cache
from minserve.request import SamplingParams
from minserve.text import Tokenizer
from minserve.weights import load


def reference(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def all_logits(model, ids):
    return model(torch.tensor(ids), torch.arange(len(ids)), attend_afresh(model.config)).float()


def greedy(hf, ids, n):
    with torch.inference_mode():
        out = hf.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=n, eos_token_id=-1, pad_token_id=0
        )
    return out[0, len(ids) :].tolist()


def random_prompt(n, vocab=251, seed=0):
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_at_every_position(checkpoints, family):
    """300 tokens: beyond each window, and far enough for a wrong RoPE scaling to show (at position 0 all are right)."""
    ids = random_prompt(300)
    with torch.inference_mode():
        expected = reference(checkpoints(family))(torch.tensor([ids])).logits[0]
    got = all_logits(load(checkpoints(family)), ids)
    assert expected.std() > 0.5, "logits this flat would agree by accident"
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_64_greedy_tokens_equal_transformers(checkpoints, family):
    ids, model = random_prompt(23, seed=1), load(checkpoints(family))
    expected = greedy(reference(checkpoints(family)), ids, 64)
    assert len(set(expected)) > 5, "a model that repeats itself would hide a wrong position"
    for path in (generate, generate_without_cache):
        assert list(path(model, ids, SamplingParams(max_tokens=64))) == expected, path.__name__


CHATS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "List three prime numbers.",
    "Translate 'good morning' into Spanish.",
    "Explain gravity to a child.",
    "What is 17 + 25?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
    "What does a compiler do?",
    "Name the largest ocean.",
    "Write a Python function that reverses a string.",
    "What is photosynthesis?",
    "Tell me a short story about a fox.",
    "How many days are in a leap year?",
    "What is the difference between a list and a tuple?",
    "Suggest a name for a cat.",
    "Why do we have seasons?",
    "Summarise: the meeting moved from Monday to Tuesday because the room was taken.",
    "What is the boiling point of water in Celsius? 🌡️",
]


@pytest.fixture(scope="module")
def exact(smollm):
    return load(smollm, torch.float32)


def test_smollm2_equals_transformers_on_20_chats(smollm, exact):
    """One forward pass of transformers over prompt and answer checks both: all logits, and that each of our 64 tokens
    is its greedy choice given the ones before, which by induction makes the two greedy texts the same.

    The engine makes the answers in one batch, by its fastest path; the plain one, alone, makes two of them again."""
    tokenizer, hf = Tokenizer.load(smollm), reference(smollm)
    prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question in CHATS]
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    answers = [output.tokens for (output,) in LLM(exact, num_pages=200).generate(prompts, params)]
    for question, prompt, answer in zip(CHATS, prompts, answers):
        ids = prompt + answer
        with torch.inference_mode():
            expected = hf(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(all_logits(exact, ids), expected, rtol=0, atol=1e-3)
        assert answer == expected[len(prompt) - 1 : -1].argmax(-1).tolist() and len(answer) == 64, question
    for i in (0, 18):
        assert answers[i] == list(generate(exact, prompts[i], params))


def test_bf16_top_1_agreement(smollm, exact, record_property):
    """bf16 rounds: what is promised is that our rounding costs no more agreement with fp32 than transformers' does."""
    tokenizer = Tokenizer.load(smollm)
    hf, model = reference(smollm, torch.bfloat16), load(smollm, torch.bfloat16)
    ours, theirs, total = 0, 0, 0
    for question in CHATS[:8]:
        ids = tokenizer.chat([{"role": "user", "content": question}])
        best = all_logits(exact, ids).argmax(-1)
        ours += int((all_logits(model, ids).argmax(-1) == best).sum())
        with torch.inference_mode():
            theirs += int((hf(torch.tensor([ids])).logits[0].argmax(-1) == best).sum())
        total += len(ids)
    record_property(
        "bf16 top-1 agreement with fp32", f"minserve {ours / total:.1%}, transformers {theirs / total:.1%}"
    )
    print(f"\nbf16 top-1 agreement with fp32: minserve {ours / total:.1%}, transformers {theirs / total:.1%}")
    assert ours / total > 0.9 and ours >= theirs - 0.03 * total


# ---------------------------------------------------------------- RoPE, by number
def test_llama3_scaling_has_the_published_ratios():
    plain = rope_frequencies(RopeConfig(500_000.0), 64)
    ratio = rope_frequencies(RopeConfig(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192), 64) / plain
    expected = torch.tensor([1.0] * 15 + [0.605573, 0.303743, 0.103448] + [1 / 32] * 14)
    torch.testing.assert_close(ratio, expected, rtol=1e-5, atol=1e-6)


def test_llama3_scaling_in_small():
    plain = rope_frequencies(RopeConfig(10_000.0), 16)
    ratio = rope_frequencies(RopeConfig(10_000.0, "llama3", 8.0, 1.0, 4.0, 256), 16) / plain
    torch.testing.assert_close(ratio, torch.tensor([1, 1, 1, 0.209125] + [0.125] * 4), rtol=1e-5, atol=1e-6)


def test_frequencies_stay_fp32_when_the_weights_do_not(checkpoints):
    model = load(checkpoints("llama-3"), torch.bfloat16)
    assert model.frequencies.dtype == torch.float32
    cos, _ = model.rotations(torch.tensor([20_000]))
    exact = (20_000 * model.frequencies.double()).cos()
    torch.testing.assert_close(cos[0].double(), exact, rtol=0, atol=2e-3)


# ---------------------------------------------------------------- counts
@pytest.mark.parametrize("family", FAMILIES)
def test_num_params_counts_what_transformers_holds(checkpoints, family):
    model = load(checkpoints(family))
    assert model.config.num_params == sum(p.numel() for p in model.parameters())
    assert model.config.num_params == reference(checkpoints(family)).num_parameters()


def test_published_sizes():
    billions = {name: config.num_params / 1e9 for name, config in SHAPES.items()}
    assert {name: round(x, 3) for name, x in billions.items()} == {
        "smollm2-135m": 0.135,
        "qwen3-0.6b": 0.596,
        "llama-3.2-1b": 1.236,
        "llama-3.1-8b": 8.030,
        "llama-2-7b": 6.738,
        "llama-2-70b": 68.977,
    }


def test_the_shipped_shape_is_the_real_one(smollm):
    real = json.loads((smollm / "config.json").read_text())
    shape = SHAPES["smollm2-135m"]
    assert (shape.hidden_size, shape.num_layers, shape.vocab_size) == (
        real["hidden_size"],
        real["num_hidden_layers"],
        real["vocab_size"],
    )
    assert load(smollm).config.num_params == shape.num_params


def test_random_weights_run_and_depend_on_the_seed():
    config = SHAPES["smollm2-135m"].__class__(
        **{**vars(SHAPES["smollm2-135m"]), "num_layers": 2, "windows": ()}
    )
    a, b, c = (Model.random(config, seed=s) for s in (0, 0, 1))
    assert torch.equal(a.embed_tokens.weight, b.embed_tokens.weight)
    assert not torch.equal(a.embed_tokens.weight, c.embed_tokens.weight)
    assert torch.isfinite(all_logits(a, [1, 2, 3])).all()
