"""The wire, read as bytes: what a client that trusts nothing may rely on in every answer and in every stream."""

import itertools
import json

import pytest
from fault_world import CHAT, HELLO, Wire, at_rest, chat, get, post, request, streamed
from serving_world import serve_in_thread, tiny_engine, tiny_folder

from minserve.server.wire import event

COMPLETIONS = "/v1/completions"
FORMS = [(CHAT, HELLO), (COMPLETIONS, {"prompt": "hello there", "temperature": 0, "ignore_eos": True})]
BOTH = pytest.mark.parametrize("path, body", FORMS, ids=["chat", "completion"])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("wire") / "tiny")
    with serve_in_thread(tiny_engine(folder)) as server:
        server.eos = min(server.engine.tokenizer.eos_token_ids)
        yield server
        at_rest(server.serving)


def stream(server, path=CHAT, body=HELLO, **fields) -> list[str]:
    with Wire(server.url) as wire:
        return list(wire.post(path, body | fields | {"stream": True}).events())


def text_of(choice) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


# ---------------------------------------------------------------- streams
@BOTH
def test_every_byte_of_a_stream(server, path, body):
    """Events are one line of JSON and an empty line; [DONE] is the last, and nothing follows."""
    with Wire(server.url) as wire:
        wire.send(request("x", path, body | {"stream": True, "max_tokens": 8}, Connection="close"))
        status, headers = wire.head()
        raw = b"".join(wire._chunks())
        assert wire.file.read() == b""
    assert status == 200 and headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
    *events, done, rest = raw.split(b"\n\n")
    assert done == b"data: [DONE]" and rest == b""
    chunks = [json.loads(its.removeprefix(b"data: ").decode("utf-8", "strict")) for its in events]
    assert all(its.startswith(b"data: {") and b"\n" not in its for its in events)
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    heads = {(c["id"], c["object"], c["created"], c["model"]) for c in chunks}
    assert len(heads) == 1 and (its := heads.pop())[1:] == (kind, its[2], "tiny")
    assert its[0] == headers["x-request-id"] and its[0].startswith("chatcmpl-" if path == CHAT else "cmpl-")


def test_an_event_is_one_line_wherever_a_client_thinks_lines_end():
    """httpx's iter_lines, among others, splits as Python does: at a next-line or a line-separator character too."""
    body = {"text": "a\x85b\u2028c\u2029d\ne\r\x1cä\ud7ff"}
    text = event(body).decode()
    assert text.splitlines() == [text[:-2], ""] and json.loads(text.removeprefix("data: ")) == body
    assert "ä" in text  # others stay readable


@BOTH
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_usage(server, path, body, n, wanted):
    """Asked for: once, last, with no choice beside it. Else never. Choices are summed; the prompt counts once."""
    options = {} if wanted is None else {"stream_options": {"include_usage": wanted}}
    texts, _, chunks = streamed(iter(stream(server, path, body, n=n, max_tokens=5, **options)))
    with_usage = [i for i, chunk in enumerate(chunks) if chunk.get("usage")]
    assert with_usage == ([len(chunks) - 1] if wanted else [])
    whole = post(server.url, path, body | {"n": n, "max_tokens": 5}).json
    assert [text_of(choice) for choice in whole["choices"]] == [texts[i] for i in range(n)]
    once = post(server.url, path, body | {"n": 1, "max_tokens": 1}).json["usage"]["prompt_tokens"]
    assert whole["usage"]["completion_tokens"] == 5 * n and whole["usage"]["prompt_tokens"] == once
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 5 * n
    if wanted:
        assert chunks[-1]["choices"] == []
        counts = lambda usage: {name: usage[name] for name in usage if name.endswith("_tokens")}
        assert counts(chunks[-1]["usage"]) == counts(whole["usage"])


@BOTH
def test_usage_of_an_answer_that_ends_at_once(server, path, body):
    fields = dict(logit_bias={str(server.eos): 100}, ignore_eos=False, max_tokens=5)
    usage = {"stream_options": {"include_usage": True}}
    texts, ends, chunks = streamed(iter(stream(server, path, body, **fields, **usage)))
    assert texts == {0: ""} and ends == {0: "stop"}
    assert chunks[-1]["usage"]["completion_tokens"] == 0 and chunks[-1]["choices"] == []


@BOTH
def test_an_error_in_a_stream_is_its_last_event(server, path, body):
    events = stream(server, path, body, max_tokens=500, timeout=1e-6, stream_options={"include_usage": True})
    *before, last = map(json.loads, events)
    assert set(last) == {"error"} and set(last["error"]) == {"message", "type", "param", "code"}
    assert all(not c.get("usage") and not any(x["finish_reason"] for x in c["choices"]) for c in before)


# ---------------------------------------------------------------- how an answer ends
def pieces(server) -> list[bytes]:
    """The greedy answer, token by token."""
    answer = chat(server.url, max_tokens=40, logprobs=True).json
    return [bytes(entry["bytes"]) for entry in answer["choices"][0]["logprobs"]["content"]]


def stop_at(server) -> tuple[int, str]:
    """A token whose text occurs nowhere before it."""
    tokens = pieces(server)
    for at in range(2, len(tokens)):
        its, before = tokens[at], b"".join(tokens[:at])
        if its.isascii() and its not in (before + its)[:-1]:
            return at, its.decode()
    raise AssertionError("no such token")


def ways_to_end(server) -> dict:
    at, text = stop_at(server)
    end = {str(server.eos): 100}
    return {  # fields, finish reason, tokens
        "the limit": (dict(max_tokens=1), "length", 1),
        "an end token": (dict(max_tokens=9, min_tokens=2, logit_bias=end, ignore_eos=False), "stop", 2),
        "an end token that is the last allowed": (
            dict(max_tokens=3, min_tokens=2, logit_bias=end, ignore_eos=False), "stop", 2,
        ),
        "an end token that is ignored": (dict(max_tokens=3, logit_bias=end), "length", 3),
        "a stop string": (dict(max_tokens=40, stop=text), "stop", at + 1),
        "a stop string in the last token allowed": (dict(max_tokens=at + 1, stop=[text]), "stop", at + 1),
        "a stop string after the limit": (dict(max_tokens=at, stop=text), "length", at),
        "the context": (dict(messages=[{"role": "user", "content": "why " * 160}]), "length", None),
    }  # fmt: skip


WAYS = [
    "the limit", "an end token", "an end token that is the last allowed", "an end token that is ignored",
    "a stop string", "a stop string in the last token allowed", "a stop string after the limit", "the context",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_why_an_answer_ended(server, way):
    """The reason is in a choice's last chunk and in no other; streamed or whole, it is the same, and so is the text."""
    fields, reason, tokens = ways_to_end(server)[way]
    texts, ends, chunks = streamed(iter(stream(server, **fields)))
    assert ends == {0: reason}
    *before, last = [choice for chunk in chunks for choice in chunk["choices"]]
    assert last["finish_reason"] == reason and all(choice["finish_reason"] is None for choice in before)
    whole = chat(server.url, **fields).json
    assert whole["choices"][0]["finish_reason"] == reason and text_of(whole["choices"][0]) == texts[0]
    assert tokens in (None, whole["usage"]["completion_tokens"])
    if "stop" in fields and reason == "stop":
        assert texts[0] == b"".join(pieces(server)[: tokens - 1]).decode("utf-8", "replace")


# ---------------------------------------------------------------- choices
def test_each_choice_of_a_stream_has_one_beginning_and_one_end(server):
    """Three choices of different lengths: one role, one finish, and the text that the whole answer has."""
    for seed in itertools.count():
        fields = dict(
            n=3, seed=seed, temperature=1, max_tokens=12, ignore_eos=False, logit_bias={str(server.eos): 4}
        )
        whole = chat(server.url, **fields).json["choices"]
        if len({len(text_of(choice)) for choice in whole}) == 3:
            break
    texts, ends, chunks = streamed(iter(stream(server, **fields)))
    assert texts == {choice["index"]: text_of(choice) for choice in whole} and sorted(texts) == [0, 1, 2]
    assert ends == {choice["index"]: choice["finish_reason"] for choice in whole}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(3):
        its = [choice for choice in choices if choice["index"] == index]
        assert its[0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in choice["delta"] for choice in its) == 1
        assert its[-1]["delta"] == {}


def test_choices_of_several_prompts_are_counted_through(server):
    fields = dict(prompt=["hello", "blue sky"], n=2, max_tokens=4, temperature=0, ignore_eos=True)
    whole = post(server.url, COMPLETIONS, fields).json["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2, 3]
    alone = [
        text_of(post(server.url, COMPLETIONS, fields | {"prompt": prompt, "n": 1}).json["choices"][0])
        for prompt in fields["prompt"]
    ]
    assert [text_of(choice) for choice in whole] == [alone[0], alone[0], alone[1], alone[1]]
    texts, _, _ = streamed(iter(stream(server, COMPLETIONS, {}, **fields)))
    assert texts == {choice["index"]: text_of(choice) for choice in whole}


# ---------------------------------------------------------------- logprobs
def test_logprobs_of_a_chat(server):
    """Without top_logprobs: each token's own, and an empty list. With: the best as well, the best first."""
    fields = dict(max_tokens=6, logprobs=True)
    content = chat(server.url, **fields).json["choices"][0]["logprobs"]["content"]
    assert len(content) == 6 and all(entry["top_logprobs"] == [] for entry in content)
    top = chat(server.url, **fields, top_logprobs=3).json["choices"][0]["logprobs"]["content"]
    for entry in top:  # greedy: the chosen one is the best
        best = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(best) == 3 and best == sorted(best, reverse=True) and best[0] == entry["logprob"] <= 0
    _, _, chunks = streamed(iter(stream(server, **fields, top_logprobs=3)))
    told = [e for c in chunks for x in c["choices"] if x["logprobs"] for e in x["logprobs"]["content"]]
    assert [e["bytes"] for e in told] == [e["bytes"] for e in top]


def test_logprobs_of_a_token_that_is_not_among_the_best(server):
    fields = dict(prompt="hello", max_tokens=12, logprobs=1, temperature=2, ignore_eos=True)
    seen = 0
    for seed in range(8):
        logprobs = post(server.url, COMPLETIONS, fields | {"seed": seed}).json["choices"][0]["logprobs"]
        for token, its, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
            assert top[token] == its <= max(top.values()) and len(top) in (1, 2)
            seen += len(top) == 2
    assert seen, "a temperature of 2 never left the best token"


def test_logprobs_zero_of_a_completion_are_the_tokens_own(server):
    fields = dict(prompt="hello", max_tokens=4, logprobs=0, temperature=0)
    logprobs = post(server.url, COMPLETIONS, fields).json["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) > 0


def test_echo_scores_a_prompt_that_is_cached_as_one_that_is_not(server):
    """33 tokens over pages of 8, twice: the first has none, and the second time says the same."""
    prompt = [5 + i * 7 % 200 for i in range(33)]
    fields = dict(prompt=prompt, max_tokens=3, logprobs=1, echo=True, temperature=0, ignore_eos=True)
    first, second = (post(server.url, COMPLETIONS, fields).json["choices"][0]["logprobs"] for _ in range(2))
    assert len(first["tokens"]) == 36 and first["token_logprobs"][0] is None
    assert None not in first["token_logprobs"][1:]
    assert second["tokens"] == first["tokens"]
    assert second["token_logprobs"][1:] == pytest.approx(first["token_logprobs"][1:], abs=1e-4)


# ---------------------------------------------------------------- errors
ERRORS = [  # body, status, param
    ({"model": "nope"}, 404, "model"), ({"temperature": -1}, 400, "temperature"),
    ({"temperature": 3}, 400, "temperature"), ({"top_p": 1.5}, 400, "top_p"), ({"top_p": 0}, 400, "top_p"),
    ({"n": 0}, 400, "n"), ({"n": 1000}, 400, "n"), ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 100_000}, 400, "max_tokens"), ({"stop": ""}, 400, "stop"), ({"stop": [1]}, 400, "stop"),
    ({"stop": ["a"] * 100}, 400, "stop"), ({"logit_bias": {"1": 101}}, 400, "logit_bias"),
    ({"logit_bias": {"9999": 1}}, 400, "logit_bias"), ({"seed": 1.5}, 400, "seed"),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("wrong, status, param", ERRORS, ids=[str(e[0])[:30] for e in ERRORS])
def test_errors_have_a_status_and_name_the_field(server, path, body, streams, wrong, status, param):
    answer = post(server.url, path, body | wrong | {"stream": streams})
    assert answer.status == status and answer.headers["content-type"] == "application/json"
    assert answer.error["param"] == param, answer.error
    assert answer.error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_errors_of_the_wire(server):
    said = {
        "not JSON": (post(server.url, CHAT, b'{"messages": ['), 400),
        "a list": (post(server.url, CHAT, []), 400),
        "a form": (post(server.url, CHAT, HELLO, Content_Type="text/plain"), 415),
        "no such place": (post(server.url, "/v1/nope", HELLO), 404),
        "no such method": (get(server.url, CHAT), 405),
    }
    for name, (answer, status) in said.items():
        assert answer.status == status, (name, answer)
        assert answer.error["message"], name
    assert chat(server.url, max_tokens=2, no_such_field=[1], user="x", tools=None).status == 200
