"""The engine: each request gets its own answer or its own error, exactly once, whatever happens to the others."""

import itertools
import string
from dataclasses import replace

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models

from minserve.engine import LLM, Engine
from minserve.model import Model
from minserve.prefill_decode import generate
from minserve.request import SamplingParams, seed_of
from minserve.scheduler import QueueFull, StaticBatching, WholePrompts
from minserve.text import Tokenizer
from minserve.weights import load

PROMPTS = [[7, 3, 250, 11, 42, 42, 9], [5], list(range(40)), [7, 3, 250, 1], [99] * 17]
FREE = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("llama-3"))


@pytest.fixture(scope="module")
def tokenizer():
    """Token i is two letters, so that texts are unambiguous and stop strings can cross tokens."""
    words = ["".join(pair) for pair in itertools.product(string.ascii_letters, repeat=2)][:251]
    core = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    core.decoder = decoders.Fuse()
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=core), ())


def engine(model, tokenizer=None, **options):
    return Engine(
        model, tokenizer, **dict(num_pages=60, page_size=8, token_budget=32, max_running=8) | options
    )


def run(engine, limit=500):
    """Turn it until it is idle. Returns {output: its deltas}; an output that ended is never heard of again."""
    heard: dict = {}
    ended = set()
    for _ in range(limit):
        for output, text in engine.step():
            assert output not in ended, "heard of after its end"
            heard.setdefault(output, []).append(text)
            if output.finished:
                ended.add(output)
        engine.pages.check(engine.scheduler.running)
        if not engine.scheduler.has_work:
            assert (
                engine.pages.in_use == 0
                and not engine.outputs
                and len(engine.scheduler.seats) == engine.scheduler.max_running
            )
            return heard
    raise AssertionError("it never came to rest")


def alone(model, prompt, params=FREE, index=0):
    seed = None if params.seed is None else seed_of(params.seed, index)
    return list(generate(model, prompt, replace(params, n=1, stop=(), logprobs=None, seed=seed)))


# ---------------------------------------------------------------- answers
@pytest.mark.parametrize("policy", [StaticBatching, WholePrompts, Engine.__init__.__kwdefaults__["policy"]])
def test_each_prompt_gets_the_answer_it_gets_alone(model, policy):
    results = LLM(model, num_pages=60, page_size=8, policy=policy, token_budget=48, max_running=3).generate(
        PROMPTS, FREE
    )
    assert [outputs[0].tokens for outputs in results] == [alone(model, p) for p in PROMPTS]
    assert all(outputs[0].finish_reason == "length" for outputs in results)


MIXED = [
    dict(),
    dict(temperature=1.2, seed=1),
    dict(temperature=0.7, top_k=5, seed=2),
    dict(temperature=1.0, top_p=0.5, seed=3),
    dict(temperature=1.5, min_p=0.2, seed=4),
    dict(presence_penalty=1.5, frequency_penalty=0.5),
    dict(repetition_penalty=1.6),
    dict(logit_bias={7: 50.0, 9: 50.0}, temperature=1.0, seed=5),
    dict(min_tokens=4, stop_token_ids=tuple(range(0, 251, 2))),
]


def test_rows_of_one_batch_do_not_touch_each_other(model):
    """Greedy beside sampled, penalties beside none: each row draws what it draws alone, at every place in the batch."""
    wanted = [SamplingParams(max_tokens=10, ignore_eos=True, **m) for m in MIXED]
    for order in (wanted, wanted[::-1]):
        results = LLM(model, num_pages=60, page_size=8).generate([PROMPTS[0]] * len(order), order)
        for params, (output,) in zip(order, results):
            assert output.tokens == alone(model, PROMPTS[0], params), params


@pytest.mark.parametrize("prompt", PROMPTS[:3], ids=len)
def test_completions_of_one_prompt_differ_and_repeat(model, prompt):
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=7, n=4, ignore_eos=True)

    def texts():
        (outputs,) = LLM(model, num_pages=60, page_size=8).generate(prompt, params)
        return [tuple(output.tokens) for output in outputs]

    first = texts()
    assert len(set(first)) == 4 and first == texts()
    assert [list(t) for t in first] == [alone(model, prompt, params, i) for i in range(4)]


def test_penalties_remember_across_a_preemption(model):
    """A request that loses its seat keeps the history that its penalties count."""
    params = SamplingParams(max_tokens=16, ignore_eos=True, presence_penalty=2.0, frequency_penalty=1.0)
    e = engine(model, max_running=4)
    outputs = [e.add(p, params)[0] for p in PROMPTS[:3]]
    for _ in range(8):
        e.step()
    for request in list(e.scheduler.running):
        e.scheduler.preempt(request)
    run(e)
    assert all(o.request.preemptions == 1 for o in outputs)
    assert [o.tokens for o in outputs] == [alone(model, p, params) for p in PROMPTS[:3]]


def test_one_params_object_without_a_seed_draws_afresh_for_each(model):
    params = SamplingParams(max_tokens=8, temperature=1.5, ignore_eos=True)
    results = LLM(model, num_pages=60, page_size=8).generate([PROMPTS[0]] * 6, params)
    assert len({tuple(o.tokens) for (o,) in results}) > 1


def test_completions_share_the_prompts_pages(model):
    """Four answers to a prompt of 40 tokens: its 5 pages once, and what each adds of its own."""
    e = engine(model, prefix_caching=False)
    e.add(PROMPTS[2], replace(FREE, n=4))
    while len(e.scheduler.running) < 4:
        e.step()
    assert e.pages.in_use <= 5 + 4
    run(e)
    forked = [row for record in e.log for row in record.rows if row.computed == 39 and row.num_tokens == 1]
    assert len(forked) == 3  # each computed one token of the prompt, not forty


def test_logprobs_name_the_chosen_token_and_the_best(model):
    params = SamplingParams(max_tokens=6, temperature=2.0, seed=3, logprobs=2, ignore_eos=True)
    (output,) = LLM(model, num_pages=60, page_size=8).generate([PROMPTS[0], PROMPTS[1]], [params, FREE])[0]
    assert [entry.token for entry in output.logprobs] == output.tokens
    for entry in output.logprobs:
        listed = dict(entry.top)
        assert listed[entry.token] == entry.logprob <= 0 and len(listed) in (2, 3)


# ---------------------------------------------------------------- text
def test_streamed_text_is_the_text(model, tokenizer):
    e = engine(model, tokenizer)
    for prompt in PROMPTS:
        e.add(prompt, FREE)
    for output, deltas in run(e).items():
        assert "".join(deltas) == output.text == tokenizer.decode(output.tokens) != ""


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_a_stream_goes_on_after_a_preemption_without_a_seam(model, tokenizer, stop):
    """Four tokens are out when the request loses its pages; what was said is neither said again nor lost."""
    e = engine(model, tokenizer)
    outputs = [e.add(p, replace(FREE, stop=stop))[0] for p in PROMPTS]
    heard = {output: "" for output in outputs}
    for turn in range(60):
        for output, text in e.step():
            heard[output] += text
        if turn in (3, 6):
            for request in list(e.scheduler.running):
                e.scheduler.preempt(request)
    assert all(o.request.preemptions == 2 for o in outputs)
    for output, prompt in zip(outputs, PROMPTS):
        assert heard[output] == output.text == tokenizer.decode(alone(model, prompt))


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_stop_string_never_shows(model, tokenizer, cut, length):
    """Wherever it begins and ends within the tokens, the text ends just before it, streamed or whole."""
    full = tokenizer.decode(alone(model, PROMPTS[0]))
    stop = full[4 + cut : 4 + cut + length]
    e = engine(model, tokenizer)
    e.add(PROMPTS[0], replace(FREE, stop=[stop, "never seen"]))
    ((output, deltas),) = run(e).items()
    assert "".join(deltas) == output.text == full[: full.index(stop)]
    assert output.finish_reason == "stop"


def test_held_back_text_comes_out_at_the_end(model, tokenizer):
    """The last letters could begin a stop string, but nothing follows: they are text."""
    full = tokenizer.decode(alone(model, PROMPTS[0]))
    e = engine(model, tokenizer)
    e.add(PROMPTS[0], replace(FREE, stop=full[-3:] + "!"))
    ((output, deltas),) = run(e).items()
    assert "".join(deltas) == output.text == full and output.finish_reason == "length"


def test_a_stop_string_in_the_last_token_allowed_is_a_stop(model, tokenizer):
    full = tokenizer.decode(alone(model, PROMPTS[0]))
    last = max(i for i in range(0, len(full), 2) if full.index(full[i : i + 2]) == i)  # where a token is new
    assert last > 0
    e = engine(model, tokenizer)
    e.add(PROMPTS[0], replace(FREE, stop=full[last : last + 2], max_tokens=last // 2 + 1))
    ((output, _),) = run(e).items()
    assert output.finish_reason == "stop" and output.text == full[:last]


def test_min_tokens_come_before_any_stop_string(model, tokenizer):
    full = tokenizer.decode(alone(model, PROMPTS[0]))
    e = engine(model, tokenizer)
    e.add(PROMPTS[0], replace(FREE, stop=full[2], min_tokens=6))
    ((output, deltas),) = run(e).items()
    assert output.text[:12] == full[:12] and "".join(deltas) == output.text
    assert full[2] not in output.text[12:] and len(output.tokens) >= 6  # from then on it ends the text


def test_the_end_of_sequence_token_is_no_text(checkpoints, editable, tokenizer, model):
    """Two end tokens in the config: each stops, none shows; ignore_eos goes on; an explicit stop id still stops."""
    free = alone(model, PROMPTS[0])
    third = next(t for t in free[2:] if t not in free[:2])
    eos = load(editable("llama-3", eos_token_id=[249, third]))
    cases = [
        (SamplingParams(max_tokens=12), "stop"),
        (SamplingParams(max_tokens=12, ignore_eos=True), "length"),
        (SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[third]), "stop"),
        (SamplingParams(max_tokens=free.index(third) + 1), "stop"),  # as exactly the last token allowed
        (SamplingParams(max_tokens=1), "length"),
    ]
    e = engine(eos, tokenizer)
    outputs = [e.add(PROMPTS[0], params)[0] for params, _ in cases]
    run(e)
    assert [o.finish_reason for o in outputs] == [reason for _, reason in cases]
    assert outputs[0].tokens == outputs[2].tokens == outputs[3].tokens == free[: free.index(third)]
    assert outputs[1].tokens == free
    assert outputs[0].text == tokenizer.decode(outputs[0].tokens)


# ---------------------------------------------------------------- the door
@pytest.mark.parametrize(
    "prompt, params, said",
    [
        ([], FREE, "prompt is empty"),
        ("", FREE, "no tokenizer"),
        ([1, 251], FREE, "token id 251 is not in the vocabulary"),
        ([1], SamplingParams(max_tokens=4, logit_bias={"251": 5}), "logit_bias names token id 251"),
        ([1], SamplingParams(max_tokens=4, stop_token_ids=[400]), "stop_token_ids names token id 400"),
        ([1], SamplingParams(max_tokens=4, stop="x"), "stop strings need text"),
        ([1] * 200, SamplingParams(max_tokens=300), "can never run: 200 prompt [+] 300 new tokens need 63 pages of 8"),
        ([1] * 500, SamplingParams(max_tokens=20), "512"),
    ],
)  # fmt: skip
def test_bad_requests_fail_at_the_door_and_nobody_notices(model, prompt, params, said):
    e = engine(model)
    good = e.add(PROMPTS[0], FREE)[0]
    e.step()
    with pytest.raises(ValueError, match=said):
        e.add(prompt, params)
    run(e)
    assert good.tokens == alone(model, PROMPTS[0])


def test_generate_names_the_bad_prompt_before_it_begins(model):
    llm = LLM(model, num_pages=60, page_size=8)
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        llm.generate([PROMPTS[0], []], FREE)
    assert not llm.log
    with pytest.raises(ValueError, match="2 prompts and 3 params"):
        llm.generate(PROMPTS[:2], [FREE] * 3)


@pytest.mark.parametrize(
    "length, new, fits", [(511, 1, True), (512, 1, False), (512, None, False), (8, 505, False)]
)
def test_the_context_is_a_limit_on_prompt_and_answer(model, length, new, fits):
    e = engine(model, num_pages=100)
    params = SamplingParams(max_tokens=new)
    if not fits:
        with pytest.raises(ValueError, match="512"):
            e.add([1] * length, params)
        return
    (output,) = e.add([1] * length, params)
    run(e)
    assert len(output.tokens) == new


def test_without_max_tokens_the_pool_is_the_limit(model):
    e = engine(model, num_pages=5)
    (output,) = e.add(PROMPTS[0], SamplingParams(ignore_eos=True))
    run(e)
    assert output.finish_reason == "length" and len(output.tokens) == 5 * 8 - len(PROMPTS[0]) + 1


def test_a_full_queue_refuses_all_of_a_request_or_none(model):
    e = engine(model, max_waiting=4)
    e.add(PROMPTS[0], replace(FREE, n=3))
    with pytest.raises(QueueFull, match="4 requests wait already"):
        e.add(PROMPTS[1], replace(FREE, n=2))
    assert len(e.scheduler.waiting) == 3 and len(e.outputs) == 3
    with pytest.raises(ValueError, match="n is 5, and the queue takes 4"):
        e.add(PROMPTS[1], replace(FREE, n=5))
    run(e)


def test_generate_feeds_more_prompts_than_the_queue_takes(model):
    llm = LLM(model, num_pages=60, page_size=8, max_waiting=3, max_running=2)
    results = llm.generate(PROMPTS * 2, replace(FREE, n=3))
    assert [o.tokens for outputs in results for o in outputs] == [
        alone(model, p) for p in PROMPTS * 2 for _ in range(3)
    ]


# ---------------------------------------------------------------- when something goes wrong
class Faulty:
    """A model that cannot stand one token id."""

    def __init__(self, model: Model, poison: int, how: str):
        self.model, self.poison, self.how = model, poison, how
        self.config, self.device, self.dtype = model.config, model.device, model.dtype

    def __call__(self, ids, positions, attend, rows):
        bad = (ids == self.poison).any()
        if bad and self.how == "raise":
            raise RuntimeError("injected")
        logits = self.model(ids, positions, attend, rows=rows)
        if self.how == "nan":
            logits = logits.clone()
            logits[ids[rows] == self.poison] = torch.nan
        return logits


@pytest.mark.parametrize("how, said", [("raise", "injected"), ("nan", "logits hold NaN")])
@pytest.mark.parametrize("chunk", [4, 32])
def test_one_failing_request_fails_alone(model, how, said, chunk):
    prompts = [p for p in PROMPTS if 77 not in p]
    answers = [alone(model, p) for p in prompts]
    assert not any(77 in a for a in answers)
    e = engine(Faulty(model, 77, how), chunk=chunk)
    good = [e.add(p, replace(FREE, n=2))[0] for p in prompts]
    e.step()
    (bad,) = e.add([3, 3, 3, 3, 3, 77], FREE)
    run(e)
    assert bad.finish_reason == "error" and said in str(bad.error) and bad.tokens == []
    assert [o.tokens for o in good] == answers and all(o.error is None for o in good)


def test_trouble_with_one_text_is_that_texts_alone(model, tokenizer):
    e = engine(model, tokenizer)
    outputs = [e.add(p, FREE)[0] for p in PROMPTS]

    def broken(token):
        raise RuntimeError("no such character")

    e.step()
    outputs[1]._detokenizer.push = broken
    run(e)
    assert outputs[1].finish_reason == "error" and "no such character" in str(outputs[1].error)
    assert [o.tokens for o in outputs if o is not outputs[1]] == [
        alone(model, p) for p in PROMPTS if p != PROMPTS[1]
    ]


@pytest.mark.parametrize("after", range(7))
def test_abort_at_any_moment_gives_everything_back(model, after):
    """Waiting, half prefilled, sharing a leader's prompt, decoding, finished: all its parts end, the others go on."""
    e = engine(model, chunk=16)
    stays = e.add(PROMPTS[0], replace(FREE, max_tokens=20))
    group = e.add(PROMPTS[2], replace(FREE, n=3, max_tokens=3))
    for _ in range(after):
        e.step()
    news = e.abort(group)
    assert all(o.finished for o in group) and {o for o, _ in news} <= set(group)
    e.pages.check([stays[0].request])
    assert e.pages.in_use == len(stays[0].request.pages)  # nothing else holds a page now
    assert e.abort(group) == []  # twice is once
    run(e)
    assert stays[0].tokens == alone(model, PROMPTS[0], replace(FREE, max_tokens=20))


def test_close_in_the_middle_ends_all_and_frees_all(model):
    e = engine(model, num_pages=12, max_running=8)
    outputs = [e.add(p, FREE)[0] for p in PROMPTS]
    for _ in range(4):
        e.step()
    e.close()
    assert {o.finish_reason for o in outputs} <= {"abort", "length"} and not e.outputs
    e.pages.check([])
    assert e.pages.in_use == 0


def test_a_deadline_ends_a_request_wherever_it_is(model):
    e = engine(model, max_running=1, token_budget=8)
    running, waiting = e.add(PROMPTS[0], FREE, timeout=0.0)[0], e.add(PROMPTS[1], FREE, timeout=0.0)[0]
    patient = e.add(PROMPTS[1], FREE, timeout=600)[0]
    run(e)
    assert running.finish_reason == waiting.finish_reason == "timeout"
    assert patient.tokens == alone(model, PROMPTS[1])


def test_ctrl_c_leaves_nothing_behind(model):
    llm = LLM(model, num_pages=60, page_size=8)

    def interrupt(output, text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, FREE, each=interrupt)
    assert llm.pages.in_use == 0 and not llm.scheduler.has_work
    assert llm.generate(PROMPTS[0], FREE)[0][0].tokens == alone(model, PROMPTS[0])


# ---------------------------------------------------------------- the cache and the log
def test_a_prompt_that_is_wholly_cached_still_computes_a_token(model):
    """32 tokens, pages of 16: the second run reuses one page, computes the other, and registers it again."""
    llm = LLM(model, num_pages=20, page_size=16)
    prompt = [3 * i % 251 for i in range(32)]
    first, second = (llm.generate(prompt, FREE)[0][0] for _ in range(2))
    longer = llm.generate(prompt + [7] * 16, FREE)[0][0]
    assert first.tokens == second.tokens == alone(model, prompt)
    assert [o.request.cached_tokens for o in (first, second, longer)] == [0, 16, 32]


def test_salts_keep_tenants_apart(model):
    e = engine(model)
    prompt = PROMPTS[2]
    cached = []
    for salt in (b"a", b"b", b"a", b""):
        (output,) = e.add(prompt, FREE, salt=salt)
        run(e)
        cached.append(output.request.cached_tokens)
        assert output.tokens == alone(model, prompt)
    assert cached == [0, 0, 32, 0]


def test_the_log_accounts_for_every_token_and_page(model):
    e = engine(model, num_pages=14, chunk=6, snapshots=True)
    outputs = [e.add(p, FREE)[0] for p in PROMPTS]
    run(e)
    assert [record.step for record in e.log] == list(range(1, len(e.log) + 1))
    for record in e.log:
        assert record.free + record.cached + record.in_use == 14
        assert record.num_tokens == sum(row.num_tokens for row in record.rows) <= 32
        assert list(record.seconds) == ["schedule", "pack", "model", "sample", "commit", "text"]
        assert all(seconds >= 0 for seconds in record.seconds.values())
        assert {row.request for row in record.rows} <= set(record.snapshot.tables)
    made = {
        o.request.id: sum(row.sampled for r in e.log for row in r.rows if row.request == o.request.id)
        for o in outputs
    }
    assert all(count == 12 for count in made.values())
    assert {i: reason for r in e.log for i, reason in r.finished.items()} == {
        o.request.id: "length" for o in outputs
    }


def test_the_pool_is_what_was_asked_for_and_is_not_copied(model):
    e = engine(model, num_pages=60)
    c = model.config
    assert e.cache.nbytes == 2 * c.num_layers * 60 * 8 * c.num_kv_heads * c.head_dim * 4
    before = [x.data_ptr() for x in (*e.cache.k, *e.cache.v)]
    e.add(PROMPTS[2], replace(FREE, n=3))
    run(e)
    assert before == [x.data_ptr() for x in (*e.cache.k, *e.cache.v)]
