"""Answers of a given form: valid whatever the seed, on every road of a step, and nobody beside them notices."""

import itertools
import json
import re
import sys

import jsonschema
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, trainers

from minserve import structured
from minserve.engine import Engine
from minserve.request import SamplingParams
from minserve.sampler import DRAWN, Sampler
from minserve.structured import Grammar, Grammars, grammar_of
from minserve.text import Tokenizer
from minserve.weights import load

pytest.importorskip(
    "llguidance", reason="answers of a given form need it: pip install 'minserve[structured]'"
)

PROMPT = [7, 3, 200, 11, 42, 42, 9]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON_JSON = Grammar("json", json.dumps(PERSON))
DATE = Grammar("regex", r"\d{4}-\d{2}-\d{2}")
SUM = Grammar("grammar", 'root ::= term ("+" term){1,3}\nterm ::= [0-9]{1,2}')


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("llama-3"))


@pytest.fixture(scope="module")
def tokenizer():
    """251 tokens: printable ASCII, pieces of JSON, and an end."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [json.dumps({w: n, "name": w, "tags": ["red", w]}) for n, w in enumerate(("one", "green", "age"))]
    alphabet = [pre_tokenizers.ByteLevel().pre_tokenize_str(chr(c))[-1][0][-1] for c in (10, *range(32, 127))]
    trainer = trainers.BpeTrainer(
        vocab_size=250, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([f"<{i}>" for i in range(251 - core.get_vocab_size())])
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    assert len(hf) == 251
    return Tokenizer(hf, (hf.eos_token_id,))


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer)


def engine(model, tokenizer, **options):
    options = dict(num_pages=120, page_size=8, token_budget=32, max_running=8) | options
    return options.pop("kind", Engine)(model, tokenizer, **options)


def turn(engine, heard):
    news = engine.step()
    assert len({output for output, _ in news}) == len(news), "one step, one piece of news"
    for output, delta in news:
        heard[output] = heard.get(output, "") + delta
    engine.pages.check(engine.scheduler.running)


def run(engine, heard=None, limit=1500):
    heard = heard or {}
    for _ in range(limit):
        turn(engine, heard)
        if not engine.scheduler.has_work:
            assert engine.pages.in_use == 0 and not engine.outputs
            assert all(output.finished and output.text.endswith(text) for output, text in heard.items())
            return
    raise AssertionError("it never came to rest")


def asks(seed, **changes):
    """Seed 0 is greedy: such rows may be drawn before the sampler sees them."""
    return SamplingParams(**dict(max_tokens=160, temperature=float(seed > 0), seed=seed) | changes)


def answers(engine, grammars, grammar, seeds, **changes):
    constraint = grammars(grammar)
    outputs = [engine.add(PROMPT, asks(seed, **changes), constraint=constraint)[0] for seed in seeds]
    run(engine)
    return outputs


def valid(output, grammar) -> bool:
    """By other means than the grammar's own."""
    kind, text = grammar
    if kind == "json":
        answer, schema = json.loads(output.text), json.loads(text)
        jsonschema.validate(answer, schema)
        return list(answer) == list(schema["properties"])
    if kind == "choice":
        return output.text in json.loads(text)
    pattern = text if kind == "regex" else r"\d{1,2}(\+\d{1,2}){1,3}"
    return re.fullmatch(pattern, output.text) is not None


# ---------------------------------------------------------------- what is asked for
ASKED = [
    ({}, {}, None),
    ({"type": "text"}, None, None),
    ({"type": "json_object"}, None, Grammar("json", '{"type": "object"}')),
    ({"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}, {}, PERSON_JSON),
    (None, {"json": PERSON}, PERSON_JSON),
    (None, {"json": json.dumps(PERSON), "regex": None}, PERSON_JSON),
    ({"type": "text"}, {"json_object": True}, Grammar("json", '{"type": "object"}')),
    (None, {"regex": "a+"}, Grammar("regex", "a+")),
    (None, {"choice": ["yes", "no"]}, Grammar("choice", '["yes", "no"]')),
    (None, {"grammar": "root ::= [0-9]"}, Grammar("grammar", "root ::= [0-9]")),
]  # fmt: skip


@pytest.mark.parametrize("response_format, structured_outputs, grammar", ASKED)
def test_both_fields_ask_for_one_grammar(response_format, structured_outputs, grammar):
    assert grammar_of(response_format, structured_outputs) == grammar


REFUSED = [
    ({"type": "xml"}, None, 'response_format.type is \'xml\'; it can be "text"'),
    ("json", None, "response_format.type is 'json'"),
    ({"type": "json_schema"}, None, "needs the schema"),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, None, "needs the schema"),
    ({"type": "json_schema", "json_schema": {"schema": [1]}}, None, r"the JSON schema is \[1\]; it must be an object"),
    (None, {"json": "{"}, "the JSON schema is not JSON"),
    (None, {"regex": "a", "choice": ["b"]}, "one form, and 2 are asked for"),
    ({"type": "json_object"}, {"regex": "a"}, "one form, and 2 are asked for"),
    (None, {"structural_tag": {}}, "structured_outputs.structural_tag is not supported"),
    (None, {"choice": []}, "must be a list of texts"),
    (None, {"choice": [1]}, "must be a list of texts"),
    (None, {"regex": 5}, "must be a text"),
    (None, ["regex"], "it must be an object"),
]  # fmt: skip


@pytest.mark.parametrize("response_format, structured_outputs, why", REFUSED)
def test_what_cannot_be_said_is_refused(response_format, structured_outputs, why):
    with pytest.raises(ValueError, match=why):
        grammar_of(response_format, structured_outputs)


BAD = [
    Grammar("json", '{"type": "objekt"}'),
    Grammar("json", '{"type": "integer", "minimum": 5, "maximum": 3}'),
    Grammar("json", '{"$ref": "http://127.0.0.1:1/schema"}'),
    Grammar("json", '{"type": "string", "pattern": "("}'),
    Grammar("json", '{"type": "array", "uniqueItems": true}'),
    Grammar("regex", "("),
    Grammar("regex", "(?=a)b"),
    Grammar("grammar", "root ::= nobody"),
    Grammar("grammar", "garbage"),
    Grammar("grammar", ""),
]


@pytest.mark.parametrize("grammar", BAD)
def test_a_grammar_that_cannot_be_compiled_is_refused_at_the_door(grammars, grammar):
    with pytest.raises(ValueError) as refused:
        grammars(grammar)
    assert len(str(refused.value)) < 500 and "<state>" not in str(refused.value)
    assert grammar not in grammars._compiled
    assert "no text satisfies" not in str(refused.value), "what is wrong with it is known"


def test_a_grammar_that_nothing_can_begin_is_refused_at_the_door(grammars):
    with pytest.raises(ValueError, match="no text satisfies the regex"):
        grammars(Grammar("regex", "é+"))


def test_without_the_library_the_caller_hears_how_to_get_it(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'minserve\[structured\]'"):
        Grammars(tokenizer)(DATE)


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(tokenizer, monkeypatch):
    monkeypatch.setattr(structured, "KEPT", 2)
    grammars, compiled = Grammars(tokenizer), []
    monkeypatch.setattr(
        grammars,
        "_compile",
        lambda grammar: compiled.append(grammar.text) or Grammars._compile(grammars, grammar),
    )
    for text in "abaca":
        grammars(Grammar("regex", text))
    assert compiled == ["a", "b", "c"]
    grammars(Grammar("regex", "b"))
    assert compiled == ["a", "b", "c", "b"]


# ---------------------------------------------------------------- the answers
GRAMMARS = [PERSON_JSON, DATE, SUM, Grammar("choice", '["yes", "no", "yes, but", "a\\"b"]')]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: g.kind)
def test_every_answer_is_valid_whatever_the_seed(model, tokenizer, grammars, grammar):
    outputs = answers(engine(model, tokenizer), grammars, grammar, range(12))
    assert all(valid(output, grammar) and output.finish_reason == "stop" for output in outputs)
    assert len({output.text for output in outputs}) > 2, "they are drawn"


def test_an_answer_may_go_on_where_it_could_end(model, tokenizer, grammars):
    y, comma = tokenizer.hf.encode("y,", add_special_tokens=False)
    likes = {comma: 100, y: 50}
    (output,) = answers(engine(model, tokenizer), grammars, GRAMMARS[3], [0], logit_bias=likes)
    assert output.text == "yes, but"


def test_without_a_grammar_none_of_these_answers_is_valid(model, tokenizer):
    """What the test above would be worth without a mask."""
    e = engine(model, tokenizer)
    outputs = [e.add(PROMPT, asks(seed))[0] for seed in range(12)]
    run(e)
    for output, grammar in itertools.product(outputs, GRAMMARS):
        with pytest.raises((AssertionError, ValueError, jsonschema.ValidationError)):
            assert valid(output, grammar)


def test_max_tokens_cuts_and_an_end_on_the_last_token_is_an_end(model, tokenizer, grammars):
    date = tokenizer.hf.encode("2024-01-31", add_special_tokens=False)
    assert len(date) == 10, "one token for each character"
    (cut,) = answers(engine(model, tokenizer), grammars, DATE, [1], max_tokens=9)
    (whole,) = answers(engine(model, tokenizer), grammars, DATE, [1], max_tokens=10)
    assert cut.finish_reason == "length" and whole.finish_reason == "stop" and whole.text.startswith(cut.text)
    assert valid(whole, DATE) and len(whole.tokens) == 10, "and no step was spent on an end token"


def test_an_end_token_is_drawn_only_where_the_text_may_end(model, tokenizer, grammars):
    """Every token but the end's is unlikely; so each answer ends as soon as it may."""
    eos = tokenizer.eos_token_ids[0]
    (output,) = answers(
        engine(model, tokenizer), grammars, Grammar("regex", "a{3,}"), [0], logit_bias={eos: 100}
    )
    assert output.text == "aaa" and output.finish_reason == "stop" and eos not in output.tokens
    (output,) = answers(
        engine(model, tokenizer),
        grammars,
        Grammar("regex", "a{3,}"),
        [0],
        logit_bias={eos: 100},
        ignore_eos=True,
    )
    assert output.text == "aaa" and output.finish_reason == "stop", "what the grammar ends is not ignored"


def test_any_of_several_end_tokens_ends(model, tokenizer):
    """SmolLM2, Llama 3 and others have more than one."""
    for eos, other in ((0, 250), (250, 0)):
        e = engine(model, several := Tokenizer(tokenizer.hf, (0, 250)))
        params = dict(logit_bias={eos: 100, other: -100})
        (output,) = answers(e, Grammars(several), Grammar("regex", "a{3,}"), [0], **params)
        assert output.text == "aaa" and output.finish_reason == "stop"


def test_a_model_that_loves_blanks_comes_out_of_them(model, tokenizer, grammars):
    (blank,) = tokenizer.hf.encode(" ", add_special_tokens=False)
    grammar = Grammar(
        "json", '{"properties": {"n": {"type": "boolean"}}, "type": "object", "required": ["n"]}'
    )
    (output,) = answers(engine(model, tokenizer), grammars, grammar, [0], logit_bias={blank: 100})
    assert output.text.startswith("{" + 20 * " " + '"')


def test_logits_behind_the_vocabulary_are_nobodys(tokenizer):
    """Checkpoints pad their vocabulary: the model has more logits than the tokenizer has tokens."""
    logits = torch.zeros(300)
    Grammars(tokenizer)(Grammar("regex", "[^z]+")).mask(logits)
    texts = {token: tokenizer.decode([token]) for token in range(251)}
    special = re.compile(r"<\w+>")  # the end, and what only fills the vocabulary up
    allowed = {
        token for token, text in texts.items() if "z" not in text and not special.fullmatch(text or "<end>")
    }
    assert set(logits.isfinite().nonzero()[:, 0].tolist()) == allowed


@pytest.mark.parametrize("known", [0, DRAWN])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_recorded_step_drew_is_drawn_again(grammars, known, temperature):
    """On a GPU such a step knows temperatures, but no grammar."""
    sampler, logits = Sampler(2, 251), torch.randn(2, 251, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=temperature)
    for seat, constraint in enumerate((grammars(Grammar("regex", "a")), None)):
        sampler.put(seat, params, 0, [1], [], [], constraint)
    drawn = torch.tensor([5, 6])
    tokens = sampler.draw(logits, [0, 1], [0, 0], (drawn, known))
    assert tokens[0] == 65 and (tokens[1] == 6 or not known and temperature)


def test_logprobs_are_the_models_own(model, tokenizer, grammars):
    params = asks(3, logprobs=2)
    e = engine(model, tokenizer)
    bound, free = e.add(PROMPT, params, constraint=grammars(DATE))[0], e.add(PROMPT, params)[0]
    run(e)
    assert bound.logprobs[0].top[:2] == free.logprobs[0].top[:2]
    assert len(bound.logprobs) == len(bound.tokens) == 10
    assert all(its.token == token and its.logprob > -9999 for its, token in zip(bound.logprobs, bound.tokens))


def test_completions_of_one_prompt_have_a_grammar_each(model, tokenizer, grammars):
    e = engine(model, tokenizer)
    outputs = e.add(PROMPT, asks(1, n=4), constraint=grammars(PERSON_JSON))
    run(e)
    assert all(valid(output, PERSON_JSON) for output in outputs) and len({o.text for o in outputs}) == 4


def test_tokens_that_somebody_else_made_count(model, tokenizer, grammars):
    (whole,) = answers(engine(model, tokenizer), grammars, PERSON_JSON, [5])
    for n in (1, 4, len(whole.tokens) - 1):
        e = engine(model, tokenizer)
        params = asks(5)
        (rest,) = e.add(PROMPT, params, constraint=grammars(PERSON_JSON), made=whole.tokens[:n])
        run(e)
        assert rest.tokens == whole.tokens and rest.finish_reason == "stop"
    with pytest.raises(ValueError, match="does not allow token 5"):
        e.add(PROMPT, params, constraint=grammars(PERSON_JSON), made=[5])


def test_a_grammar_and_min_tokens_exclude_each_other(model, tokenizer, grammars):
    with pytest.raises(ValueError, match="min_tokens"):
        engine(model, tokenizer).add(PROMPT, SamplingParams(min_tokens=2), constraint=grammars(DATE))


# ---------------------------------------------------------------- beside others
OTHERS = [
    dict(),
    dict(temperature=1.2, seed=1),
    dict(temperature=0.7, top_k=5, seed=2, logprobs=1),
    dict(presence_penalty=1.5, frequency_penalty=0.5),
    dict(temperature=1.0, top_p=0.8, seed=4, repetition_penalty=1.3),
]


def neighbours(e, grammars, grammar=None, count=3):
    """What the others say, beside `count` requests with a grammar; and what those say."""
    bound = []
    for seed in range(count if grammar else 0):
        params = asks(seed)
        bound += e.add(
            PROMPT, params, constraint=grammars(grammar), priority=1
        )  # they are the ones to give way
    params = (SamplingParams(max_tokens=30, ignore_eos=True, **its) for its in OTHERS)
    others = [e.add([*PROMPT, i], its)[0] for i, its in enumerate(params)]
    run(e)
    thought = [round(its.logprob, 3) for o in others for its in o.logprobs]  # sums of another order differ
    return [(o.tokens, o.text, o.finish_reason) for o in others] + thought, bound


ROADS = [
    dict(step="plain"),
    dict(step="fused"),
    dict(step="graph"),
    dict(step="plain", overlap=True),
    dict(step="graph", overlap=True),
    dict(step="plain", drafter="ngram", adaptive=False),
    dict(step="graph", drafter="ngram", adaptive=False),
    dict(num_pages=24),
    dict(num_pages=24, overlap=True),
    dict(num_pages=22, drafter="ngram", adaptive=False),
]


@pytest.mark.parametrize("options", ROADS, ids=lambda o: "-".join(map(str, o.values())))
def test_the_same_answers_on_every_road_and_the_neighbours_do_not_notice(model, tokenizer, grammars, options):
    plain = engine(model, tokenizer)
    expected = [o.tokens for o in answers(plain, grammars, PERSON_JSON, range(3))]
    alone, _ = neighbours(engine(model, tokenizer, **options), grammars)
    e = engine(model, tokenizer, **options)
    beside, bound = neighbours(e, grammars, PERSON_JSON)
    assert beside == alone
    assert all(valid(output, PERSON_JSON) for output in bound)
    assert [output.tokens for output in bound] == expected
    if "num_pages" in options:
        assert any(output.request.preemptions for output in bound), "it was meant to be tight"
    if "drafter" in options:
        assert sum(e.speculation.drafted), "the others were to be drafted for"


def test_steps_without_a_grammar_still_overlap(model, tokenizer, grammars):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    alone = engine(model, tokenizer)
    (expected,) = alone.add(PROMPT, params)
    run(alone)
    e, heard = engine(model, tokenizer, overlap=True), {}
    (free,) = e.add(PROMPT, params)
    turn(e, heard)
    assert e.flight
    (bound,) = e.add(PROMPT, asks(1), constraint=grammars(DATE))
    while not bound.finished:
        turn(e, heard)
        assert e.flight is None
    assert not free.finished
    turn(e, heard)
    assert e.flight
    run(e, heard)
    assert free.tokens == expected.tokens and heard[free] == expected.text and heard[bound] == bound.text


def test_a_grammar_that_leads_nowhere_ends_its_own_request_only(model, tokenizer, grammars):
    """The vocabulary has no letter é, nor its bytes."""
    for options in (dict(), dict(overlap=True)):
        e = engine(model, tokenizer, **options)
        expected, _ = neighbours(engine(model, tokenizer), grammars)
        stuck = e.add(PROMPT, asks(1), constraint=grammars(Grammar("regex", "aé")))[0]
        beside, _ = neighbours(e, grammars)
        assert beside == expected
        assert stuck.finish_reason == "error" and "no token of the vocabulary here" in str(stuck.error)
        assert stuck.text == "a"


def test_the_real_model_fills_in_a_form(smollm):
    tokenizer = Tokenizer.load(smollm)
    e, grammars, outputs = Engine(load(smollm), tokenizer), Grammars(tokenizer), []
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "population": {"type": "integer"},
            "capital": {"type": "boolean"},
        },
        "required": ["city", "population", "capital"],
        "additionalProperties": False,
    }
    prompt = tokenizer.chat(
        [{"role": "user", "content": "Describe Paris as JSON: city, population, capital."}]
    )
    for seed in range(3):
        params = SamplingParams(max_tokens=120, temperature=1.0 if seed else 0.0, seed=seed)
        outputs += e.add(prompt, params, constraint=grammars(Grammar("json", json.dumps(schema))))
    run(e)
    for output in outputs:
        jsonschema.validate(json.loads(output.text), schema)
        assert output.finish_reason == "stop"
