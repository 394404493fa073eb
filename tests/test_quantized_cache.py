"""The engine with a quantized cache gives the tokens of one request alone whose keys and values are rounded."""

import pytest
import torch
from quantized_oracle import attend_rounded, told
from wrong_versions import wrong_version

import minserve.engine
import minserve.quantized_cache
from minserve.engine import LLM, Engine
from minserve.kernels import native
from minserve.kv_cache import bytes_per_token
from minserve.prefill_decode import generate
from minserve.quantized_cache import KINDS, cache_for
from minserve.request import SamplingParams
from minserve.text import Tokenizer
from minserve.weights import load

# Sure of every next token: over 30 layers one rounding that falls the other way can be seen in the logits
TEXT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,"
PROMPTS = [[7, 3, 250, 11, 42, 42, 9], [5], list(range(40)), [7, 3, 250, 1], [99] * 17, list(range(8))]


def serve(model, kind, step="graph", page=8, **limits):
    limits = dict(num_pages=60, page_size=page, token_budget=24, chunk=11, max_running=4) | limits
    return LLM(model, kv_cache_dtype=kind, step=step, **limits)


def params(i: int, new: int = 14) -> SamplingParams:
    """Greedy, and sampled: a wrong logit changes the second more easily."""
    warm = dict(temperature=0.9, top_k=50) if i % 2 else {}
    return SamplingParams(max_tokens=new, seed=i, ignore_eos=True, **warm)


def assert_alone(model, prompt, its, output, kind, page, sinks=0):
    """Each token is what the definition makes of those before it: by induction, the answer of a request alone."""
    attend = attend_rounded(model.config, kind, page, sinks)
    assert output.tokens == told(model, prompt, output.tokens, its, attend)
    assert len(output.tokens) == its.max_tokens


def check(model, kind: str, step: str = "graph", sinks: int = 0):
    asked = [params(i) for i in range(len(PROMPTS))]
    with torch.inference_mode():
        llm = serve(model, kind, step, sinks=sinks)
        for prompt, its, (output,) in zip(PROMPTS, asked, llm.generate(PROMPTS, asked)):
            assert output.error is None
            assert_alone(model, prompt, its, output, kind, 8, sinks)
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


def test_rounding_changes_something(checkpoints):
    """Else the tests above would also pass without any."""
    model = load(checkpoints("llama-3"))
    its = [SamplingParams(max_tokens=60, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    made = [[o.tokens for (o,) in serve(model, k).generate(PROMPTS[:4], its)] for k in (None, *KINDS)]
    assert made[0] not in made[1:]
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


def check_failure(model, kind: str) -> None:
    """A step dies between two layers, when the first have moved their tokens on: everybody's answer is as without."""
    its = [params(i, 10) for i in range(4)]
    prompts = [PROMPTS[2], list(range(30, 65)), [9] * 21, PROMPTS[0]]
    with torch.inference_mode():
        llm = serve(model, kind, token_budget=48, chunk=13)
        readers, died = llm.cache.chunks if kind == "int4" else llm.cache.readers, []

        def dying(layer, *rest):
            if layer == 1 and llm.scheduler.steps not in died and len(died) < 12:
                died.append(llm.scheduler.steps)
                raise RuntimeError("between two layers")
            return readers(layer, *rest)

        setattr(llm.cache, "chunks" if kind == "int4" else "readers", dying)
        made = llm.generate(prompts, its)
        assert len(died) > 2
        for prompt, p, (output,) in zip(prompts, its, made):
            assert output.error is None
            assert_alone(model, prompt, p, output, kind, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_halfway_loses_nothing(checkpoints, kind):
    check_failure(load(checkpoints("llama-3")), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_numbers_stay_visible(checkpoints, kind):
    """A NaN in the weights ends each request with an error: no rounding turns it into a number."""
    model = load(checkpoints("llama-3"))
    model.layers[0].self_attn.v_proj.weight[3, 3] = torch.nan
    (output,) = serve(model, kind).generate([PROMPTS[2]], SamplingParams(max_tokens=12))[0]
    assert output.finish_reason == "error" and "NaN" in str(output.error)


# ---------------------------------------------------------------- these checks can fail
def sound(checkpoints, kind):
    check(load(checkpoints("llama-3")), kind)


def plainly(checkpoints, kind):
    check(load(checkpoints("llama-3")), kind, "plain")


def windowed(checkpoints, kind):
    check(load(checkpoints("mistral")), kind, sinks=3)


def without(checkpoints, kind):
    """As on a machine without a compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "usable", lambda: "switched off by a test")
        sound(checkpoints, kind)


def failing(checkpoints, kind):
    check_failure(load(checkpoints("llama-3")), kind)


WRONG = [  # what is wrong, the right text, the wrong one, kind, who notices
    ("nothing is written", "        write(*new", "        0 and write(*new", "int8", sound),
    ("each token one slot late", "*scales, step.slots)", "*scales, step.slots + 1)", "int8", sound),
    ("values' scales for keys", "scales = self.k_scales[layer].flatten(0, 1), self.v",
     "scales = self.v_scales[layer].flatten(0, 1), self.v", "int8", sound),
    ("one layer's scales for all", "scales = self.k_scales[layer], self.v_scales[layer]",
     "scales = self.k_scales[0], self.v_scales[0]", "fp8", sound),
    ("fp8 is int8", '"fp8": torch.float8_e4m3fn', '"fp8": torch.int8', "fp8", sound),
    ("int8 is fp8", '"int8": torch.int8', '"int8": torch.float8_e4m3fn', "int8", without),
    ("the first tokens of `fresh` for all", "return self.order[: len(batch.slots)]",
     "return self.order[: len(batch.slots)] * 0", "int8", sound),
    ("a page is sealed one token early", "if n % S == 0 else -1 for r",
     "if n % S == S - 1 else -1 for r", "int4", sound),
    ("single tokens never seal", "if n % S == 0 else -1 for r", "if False else -1 for r", "int4", sound),
    ("sealed into the page before", "r.pages[(n - 1) // S] if", "r.pages[(n - 1) // S - 1] if", "int4", sound),
    ("everybody's open page is seat 0's", "np.array([r.seat * S for r in owners]", "np.array([0 * S for r in owners]",
     "int4", sound),
    ("open pages turn round early", "homes + (lengths - 1) % S", "homes + (lengths - 1) % (S // 2)", "int4", sound),
    ("chunks never seal", "self._seal(self.fresh", "0 and self._seal(self.fresh", "int4", sound),
    ("the beginning is not carried in", "x[chunks.begun] = y[chunks.kept]", "pass", "int4", sound),
    ("the rest is not carried out", "y[chunks.places] = x[chunks.left]", "pass", "int4", sound),
    ("carried out of the first page", "spans(homes + full * S, left)", "spans(homes, left)", "int4", sound),
    ("a chunk's pages are those of its beginning", "requests[i].pages[past[i] // S : lengths[i] // S]",
     "requests[i].pages[: full[i]]", "int4", sound),
    ("a chunk does not begin at its page", "begun, full, left = past % S,",
     "begun, full, left = past * 0,", "int4", sound),
    ("all chunks in one place", "homes = n + np.cumsum(begun + counts) - (begun + counts)",
     "homes = n + 0 * counts", "int4", sound),
    ("the whole past is unrounded", "first = (length - n) // S * S", "first = 0 * S", "int4", plainly),
    ("its own page is seen rounded, too", "j // S < p // S)", "j // S <= p // S)", "int4", plainly),
    ("unrounded for later queries, too", "(j // S == p // S) & (j <= p)", "(j <= p)", "int4", plainly),
    ("a query sees what comes", "(j // S == p // S) & (j <= p)", "(j // S == p // S)", "int4", plainly),
    ("the window is forgotten", "            seen &= (j > p - window) | (j < sinks)\n", "            pass\n", "int4",
     windowed),
    ("sinks are forgotten", "(old > length - n - window) | (old < sinks)", "(old > length - n - window)", "int4",
     windowed),
    ("heads tiled", "q.view(n, G, H // G, D).transpose(0, 1)", "q.view(n, H // G, G, D).permute(2, 0, 1, 3)", "int4",
     plainly),
    ("the beginning is believed after a failure", "request.computed -= begun\n",
     "return num_tokens\n", "int4", failing),
]  # fmt: skip


@pytest.mark.parametrize("right, wrong, kind, notices", [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
@pytest.mark.slow
def test_wrong_caches_are_noticed(checkpoints, monkeypatch, right, wrong, kind, notices):
    module = wrong_version(minserve.quantized_cache, right, wrong)
    monkeypatch.setattr(minserve.engine, "cache_for", module.cache_for)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        notices(checkpoints, kind)


@pytest.mark.slow
def test_the_real_model(smollm):
    model, prompt = load(smollm, torch.float32), Tokenizer.load(smollm).encode(TEXT)
    assert len(prompt) > 32  # pages are sealed
    its = SamplingParams(max_tokens=12, ignore_eos=True, seed=0)
    for kind in KINDS:
        with torch.inference_mode():
            llm = LLM(model, kv_cache_dtype=kind, page_size=16, num_pages=40)
            assert_alone(model, prompt, its, llm.generate(prompt, its)[0][0], kind, 16)
