"""A request that another engine began: its prompt's keys and values are brought, its first tokens are given.

Whatever comes from elsewhere, the answer is the one a single engine gives; and each wrong version below is noticed.
"""

from dataclasses import replace
from unittest import mock

import pytest
import test_engine
from test_engine import model, run, tokenizer  # noqa: F401  fixtures
from wrong_versions import wrong_version

from minserve import engine as engines
from minserve import scheduler as schedulers
from minserve.pages import pages_for
from minserve.request import SamplingParams

LENGTHS = [1, 2, 7, 8, 9, 16, 17, 40]  # pages hold 8 tokens, steps 32
DRAWN = SamplingParams(
    max_tokens=10, temperature=0.9, top_p=0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.7
)


def prompt_of(length):
    return [(7 * i * i + length) % 250 for i in range(length)]


class Taken:
    """A connector that keeps what it takes, and is itself what is brought: keys and values of whole pages."""

    def attach(self, engine):
        self.cache, self.saved, self.layers = engine.cache, {}, []
        engine.cache.watch = lambda layer, batch: self.layers.append(layer)

    def wait_for_save(self, batch):
        for request, num_tokens in batch.plan:
            if request.key and request.computed + num_tokens == len(request.prompt):
                self.saved[request.key] = Brought(self.cache, request.pages, len(request.prompt))


class Brought:
    def __init__(self, cache, pages, num_tokens):
        self.num_tokens, self.broken = num_tokens, False
        self.layers = [cache.read_pages(layer, pages) for layer in range(cache.config.num_layers)]

    def check(self, cache):
        if cache.page_size != 8:
            raise ValueError(f"these pages hold 8 tokens, the cache's {cache.page_size}")

    def load(self, cache, pages, computed):
        if self.broken:
            raise OSError("the file is gone")
        first, last = computed // 8, pages_for(self.num_tokens, 8)
        for layer, contents in enumerate(self.layers):
            cache.write_pages(layer, pages[first:last], [x[first:] for x in contents])


def prefilled(model, prompt, params):  # noqa: F811
    """The first token, and what the prompt's pages hold: computed by an engine of its own."""
    one = test_engine.engine(model, connector=Taken())
    output = one.add(prompt, replace(params, max_tokens=1, ignore_eos=True), key="its")[0]
    run(one)
    return output.tokens, one.connector.saved["its"]


def answers(model, prompt, params):  # noqa: F811
    """(brought tokens, begun elsewhere, computed here alone)"""
    made, kv = prefilled(model, prompt, params)
    there, here = test_engine.engine(model, num_pages=20), test_engine.engine(model)
    continued = there.add(prompt, params, made=made, kv=kv)[0]
    run(there)
    alone = here.add(prompt, params)[0]
    run(here)
    return there, continued, alone


@pytest.mark.parametrize("params", [test_engine.FREE, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("length", LENGTHS)
def test_an_answer_begun_elsewhere_goes_on_as_if_it_had_been_begun_here(model, length, params):  # noqa: F811
    there, continued, alone = answers(model, prompt_of(length), params)
    assert continued.tokens == alone.tokens
    first = there.log[0].rows[0]
    assert (first.num_tokens, first.computed) == (1, length), "the prompt was computed again"
    assert continued.request.cached_tokens == 0 and there.scheduler.hit_tokens == 0


def test_what_is_cached_already_is_not_loaded_and_counts_as_cached(model):  # noqa: F811
    prompt = prompt_of(40)
    made, kv = prefilled(model, prompt, test_engine.FREE)
    e = test_engine.engine(model)
    before = e.add(prompt[:20], test_engine.FREE)[0]
    run(e)
    loaded, load = [], kv.load
    kv.load = lambda cache, pages, computed: (loaded.append(computed), load(cache, pages, computed))
    its = e.add(prompt, test_engine.FREE, made=made, kv=kv)[0]
    run(e)
    alone = test_engine.engine(model)
    right = alone.add(prompt, test_engine.FREE)[0]
    run(alone)
    assert before.finished and loaded == [16] and its.request.cached_tokens == 16
    assert its.tokens == right.tokens


def test_brought_pages_are_shared_with_later_prompts(model):  # noqa: F811
    prompt = prompt_of(40)
    made, kv = prefilled(model, prompt, test_engine.FREE)
    e = test_engine.engine(model)
    e.add(prompt, test_engine.FREE, made=made, kv=kv)
    run(e)
    again = e.add(prompt, test_engine.FREE)[0]
    run(e)
    assert again.request.cached_tokens == 32


def test_after_a_preemption_it_computes_what_was_brought(model):  # noqa: F811
    prompt = prompt_of(12)
    made, kv = prefilled(model, prompt, DRAWN)
    e, alone = test_engine.engine(model, prefix_caching=False), test_engine.engine(model)
    its, right = e.add(prompt, DRAWN, made=made, kv=kv)[0], alone.add(prompt, DRAWN)[0]
    run(alone)
    e.step(), e.step()
    e.scheduler.preempt(its.request)
    run(e)
    assert its.tokens == right.tokens and its.request.preemptions == 1 and its.request.kv is None


def test_who_cannot_be_loaded_fails_alone(model):  # noqa: F811
    prompt = prompt_of(17)
    made, kv = prefilled(model, prompt, test_engine.FREE)
    kv.broken = True
    e, alone = test_engine.engine(model), test_engine.engine(model)
    other, its = (
        e.add(prompt_of(9), test_engine.FREE)[0],
        e.add(prompt, test_engine.FREE, made=made, kv=kv)[0],
    )
    right = alone.add(prompt_of(9), test_engine.FREE)[0]
    run(alone)
    run(e)
    assert its.finish_reason == "error" and isinstance(its.error, OSError)
    assert other.tokens == right.tokens and other.finish_reason == "length"


def test_the_given_tokens_are_text_already(model, tokenizer):  # noqa: F811
    prompt = prompt_of(9)
    made, kv = prefilled(model, prompt, test_engine.FREE)
    e = test_engine.engine(model, tokenizer)
    its = e.add(prompt, test_engine.FREE, made=made, kv=kv)[0]
    assert its.text == tokenizer.decode(made)
    run(e)
    assert its.text == tokenizer.decode(its.tokens) and len(its.tokens) == 12


def test_what_does_not_fit_is_refused_at_the_door(model):  # noqa: F811
    made, kv = prefilled(model, prompt_of(9), test_engine.FREE)
    e = test_engine.engine(model, page_size=16)
    for params, brought, said in (
        (replace(test_engine.FREE, n=2), dict(made=made), "only one answer"),
        (replace(test_engine.FREE, max_tokens=1), dict(made=made), "not complete"),
        (test_engine.FREE, dict(made=made, kv=kv), "these pages hold 8 tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            e.add(prompt_of(9), params, **brought)
    assert not e.outputs and not e.scheduler.has_work


@pytest.mark.parametrize("step", ["plain", "fused", "graph"])
def test_each_layer_of_a_prompt_is_announced_once_it_is_written(model, step):  # noqa: F811
    e = test_engine.engine(model, connector=Taken(), step=step)
    e.add(prompt_of(40), replace(test_engine.FREE, max_tokens=1))
    run(e)
    assert e.connector.layers == [0, 1, 2] * 2, "two chunks of three layers"


# ---------------------------------------------------------------- wrong versions
WRONG = [
    ("scheduler", "- request.computed\n        if num_tokens > 0", "+ 0\n        if num_tokens > 0", "cached"),
    ("scheduler", "len(request.tokens) - 1) - request.computed", "len(request.tokens)) - request.computed", "shorter"),
    ("scheduler", "            request.computed += num_tokens\n", "            pass\n", "continued"),
    ("scheduler", "request.cached_tokens = hits", "request.cached_tokens = request.computed", "continued"),
    ("scheduler", "self.hit_tokens += hits", "self.hit_tokens += request.computed", "continued"),
    ("scheduler", "append((request, hits))", "append((request, 0))", "cached"),
    ("scheduler", "self.gave_way, self.brought = [], []", "self.gave_way = []", "continued"),
    ("engine", "kv, request.kv = request.kv, None", "kv = request.kv", "preempted"),
    ("engine", "late += self._load()", "self._load()", "fails"),
    ("engine", "                failed.append(request)\n", "", "fails"),
    ("engine", "            outputs[0].push(token)\n", "            pass\n", "text"),
    ("engine", "            kv.check(self.cache)\n", "            pass\n", "door"),
    ("engine", "or len(made) >= most", "", "door"),
    ("engine", "self.connector.wait_for_save(batch)", "pass", "continued"),
]  # fmt: skip


def shorter(m):
    """All of a prompt is brought and no token: its last one must be computed again, or nothing can be drawn."""
    _, kv = prefilled(m, prompt_of(9), test_engine.FREE)
    e, alone = test_engine.engine(m), test_engine.engine(m)
    its, right = e.add(prompt_of(9), test_engine.FREE, kv=kv)[0], alone.add(prompt_of(9), test_engine.FREE)[0]
    run(e), run(alone)
    assert its.tokens == right.tokens


CASES = {
    "continued": lambda m, t: [
        test_an_answer_begun_elsewhere_goes_on_as_if_it_had_been_begun_here(m, n, DRAWN) for n in (9, 40)
    ],
    "cached": lambda m, t: test_what_is_cached_already_is_not_loaded_and_counts_as_cached(m),
    "shorter": lambda m, t: shorter(m),
    "preempted": lambda m, t: test_after_a_preemption_it_computes_what_was_brought(m),
    "fails": lambda m, t: test_who_cannot_be_loaded_fails_alone(m),
    "text": test_the_given_tokens_are_text_already,
    "door": lambda m, t: test_what_does_not_fit_is_refused_at_the_door(m),
}


@pytest.mark.parametrize("case", CASES)
def test_the_right_version_passes(model, tokenizer, case):  # noqa: F811
    CASES[case](model, tokenizer)


@pytest.mark.parametrize(
    "module, right, wrong, case", WRONG, ids=[f"{w[0]}: {w[2].strip()[:40]}" for w in WRONG]
)
def test_a_wrong_version_is_noticed(model, tokenizer, module, right, wrong, case):  # noqa: F811
    broken = wrong_version({"engine": engines, "scheduler": schedulers}[module], right, wrong)
    if module == "engine":
        patch = mock.patch.object(test_engine, "Engine", broken.Engine)
    else:
        patch = mock.patch.dict(engines.Engine.__init__.__kwdefaults__, policy=broken.Scheduler)
    with patch, pytest.raises((Exception, pytest.fail.Exception)) as noticed:
        CASES[case](model, tokenizer)
    assert not isinstance(noticed.value, (SyntaxError, NameError))
