"""The engine with a quantized cache gives the tokens of one request alone whose keys and values are rounded."""

import pytest
import torch
from quantized_oracle import alone

from minserve.engine import LLM, Engine
from minserve.kernels import native
from minserve.kv_cache import bytes_per_token
from minserve.prefill_decode import generate
from minserve.quantized_cache import KINDS, cache_for
from minserve.request import SamplingParams
from minserve.text import Tokenizer
from minserve.weights import load

# Sure of every next token: over 30 layers one rounding more or less moves logits by some tenths
TEXT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,"
PROMPTS = [[7, 3, 250, 11, 42, 42, 9], [5], list(range(40)), [7, 3, 250, 1], [99] * 17, list(range(8))]


def serve(model, kind, step="graph", page=8, **limits):
    limits = dict(num_pages=60, page_size=page, token_budget=24, chunk=11, max_running=4) | limits
    return LLM(model, kv_cache_dtype=kind, step=step, **limits)


def params(i: int, new: int = 14) -> SamplingParams:
    """Greedy, and sampled: a wrong logit changes the second more easily."""
    warm = dict(temperature=0.9, top_k=50) if i % 2 else {}
    return SamplingParams(max_tokens=new, seed=i, ignore_eos=True, **warm)


def check(model, kind: str, step: str = "graph", sinks: int = 0):
    asked = [params(i) for i in range(len(PROMPTS))]
    with torch.inference_mode():
        llm = serve(model, kind, step, sinks=sinks)
        for prompt, its, (output,) in zip(PROMPTS, asked, llm.generate(PROMPTS, asked)):
            assert output.error is None
            assert output.tokens == alone(model, prompt, its, kind, 8, sinks)
    return llm


@pytest.mark.parametrize("step", ["plain", "fused", "graph"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama-3", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_tokens_are_those_of_a_request_alone(checkpoints, family, kind, step):
    llm = check(load(checkpoints(family)), kind, step)
    on_a_cpu = native.usable() is None and kind != "fp8"
    if step == "graph":
        assert bool(llm.compute.steps) == on_a_cpu


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_with_a_sliding_window(checkpoints, kind, sinks):
    check(load(checkpoints("mistral")), kind, sinks=sinks)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_compiler(checkpoints, kind, monkeypatch):
    monkeypatch.setattr(native, "usable", lambda: "switched off by a test")
    check(load(checkpoints("llama-3")), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_changes_something(checkpoints, kind):
    """Else the tests above would also pass without any."""
    model = load(checkpoints("llama-3"))
    its = [SamplingParams(max_tokens=60, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    made = [[o.tokens for (o,) in serve(model, k).generate(PROMPTS[:4], its)] for k in (None, kind)]
    assert made[0] != made[1]
    assert made[0] == [list(generate(model, prompt, p)) for prompt, p in zip(PROMPTS, its)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_weighs_what_the_arithmetic_says(checkpoints, kind):
    config = load(checkpoints("llama-3")).config
    G, D, layers, S = config.num_kv_heads, config.head_dim, config.num_layers, 32
    sizes = dict(seats=3, tokens=16)
    cache = cache_for(kind, config, 50, S, torch.float32, "cpu", 0, **sizes)
    shape = layers, G, D
    open_pages = 3 * S * bytes_per_token(*shape, 4) if kind == "int4" else 0
    assert cache.nbytes == 50 * S * bytes_per_token(*shape, 4, kind, S) + open_pages
    assert cache_for(None, config, 50, S, torch.float32, "cpu", 0, **sizes).nbytes == 1600 * bytes_per_token(
        *shape, 4
    )


def test_the_arithmetic_by_hand():
    """Llama-3.1-8B: 32 layers, 8 heads of 128."""
    shape = 32, 8, 128
    assert bytes_per_token(*shape) == 131_072
    assert bytes_per_token(*shape, kind="int8") == bytes_per_token(*shape, kind="fp8") == 32 * 8 * 2 * 132
    assert bytes_per_token(*shape, kind="int4", page_size=64) == 32 * 8 * (64 + 8 + 64 + 4)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_memory_holds_more(checkpoints, kind):
    """In a pool of the same bytes more requests run at once, and none is preempted."""
    model = load(checkpoints("llama-3"))
    S, memory = 16, 48 * 16 * bytes_per_token(3, 2, 16, 4)
    running = {}
    for which in (None, kind):
        pages = int(memory // (S * bytes_per_token(3, 2, 16, 4, which, S)))
        llm = serve(model, which, page=S, num_pages=pages, max_running=64, token_budget=512, chunk=512)
        for i in range(64):
            llm.add([i] * 60, params(i, 20))
        most = 0
        while llm.outputs:
            llm.step()
            most = max(most, len(llm.scheduler.running))
        running[which] = most
    assert running[kind] > 1.4 * running[None]


def test_a_kind_there_is_not(checkpoints):
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int2'; use None .*'int8', 'fp8', 'int4'"):
        Engine(load(checkpoints("llama-3")), kv_cache_dtype="int2")


def test_heads_of_an_odd_number_of_channels(checkpoints):
    config = load(checkpoints("llama-3")).config
    object.__setattr__(config, "head_dim", 15)
    with pytest.raises(ValueError, match="15 channels cannot be packed two to a byte"):
        cache_for("int4", config, 4, 4, torch.float32, "cpu", 0, seats=1, tokens=4)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_numbers_stay_visible(checkpoints, kind):
    """A NaN in the weights ends each request with an error: no rounding turns it into a number."""
    model = load(checkpoints("llama-3"))
    model.layers[0].self_attn.v_proj.weight[3, 3] = torch.nan
    (output,) = serve(model, kind).generate([PROMPTS[2]], SamplingParams(max_tokens=12))[0]
    assert output.finish_reason == "error" and "NaN" in str(output.error)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_real_model(smollm, kind):
    model = load(smollm, torch.float32)
    prompt = Tokenizer.load(smollm).encode(TEXT)
    assert len(prompt) > 32  # pages are sealed
    its = SamplingParams(max_tokens=12, ignore_eos=True, seed=0)
    with torch.inference_mode():
        llm = LLM(model, kv_cache_dtype=kind, page_size=16, num_pages=40)
        assert llm.generate(prompt, its)[0][0].tokens == alone(model, prompt, its, kind, 16)
