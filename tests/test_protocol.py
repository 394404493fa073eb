"""Bodies and answers of the OpenAI API, value by value: what is taken for what, what is refused, and how it reads."""

import json
from types import SimpleNamespace

import pytest
from wrong_versions import wrong_version

from minserve import protocol
from minserve.protocol import ChatBody, CompletionBody, DetokenizeBody, Refused, TokenizeBody, plain
from minserve.sampler import TokenLogprobs
from minserve.server import replies
from minserve.server.replies import Echo

HI = {"messages": [{"role": "user", "content": "Hi"}]}


def chat(**fields) -> ChatBody:
    return protocol.ChatBody.read(json.dumps(HI | fields).encode())


def completion(prompt="Hi", **fields) -> CompletionBody:
    return protocol.CompletionBody.read(json.dumps({"prompt": prompt} | fields).encode())


# ---------------------------------------------------------------- what is said
def test_fields_become_parameters():
    asked = dict(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, n=2, stop=["a", "b"], min_tokens=1,
        presence_penalty=0.1, frequency_penalty=-0.2, repetition_penalty=1.1, ignore_eos=True, stop_token_ids=[4, 5],
    )  # fmt: skip
    for body in (chat(**asked, max_tokens=9), completion(**asked, max_tokens=9)):
        params = body.params()
        assert params.max_tokens == 9 and params.logprobs is None
        for name, value in asked.items():
            assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name


def test_what_is_not_given_or_null_is_the_apis_own_default():
    fields = set(protocol.Sampling.model_fields) - {"model"}
    for body in (chat(), chat(**dict.fromkeys(fields)), completion(**dict.fromkeys(fields))):
        params = body.params()
        assert (params.temperature, params.top_p, params.n, params.max_tokens) == (1.0, 1.0, 1, None)
        assert (params.stop, params.seed, params.ignore_eos) == ((), None, False)


def test_unknown_fields_are_ignored():
    assert chat(tools=[], user="me", best_of=3, whatever={"a": [1]}).params() == chat().params()


def test_the_newer_name_of_max_tokens_wins():
    assert chat(max_completion_tokens=3).params().max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=5).params().max_tokens == 3
    assert chat(max_completion_tokens=None, max_tokens=5).params().max_tokens == 5


def test_a_stop_text_is_not_taken_apart():
    assert completion(stop="ab").params().stop == ("ab",)
    assert len(completion(stop=["x"] * 16).params().stop) == 16


def test_logit_bias_has_strings_for_keys():
    assert chat(logit_bias={"7": 5, "8": -1.5}).params().logit_bias == {7: 5.0, 8: -1.5}


def test_logprobs_mean_another_thing_in_each_interface():
    assert chat(logprobs=True).params().logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params().logprobs == 4
    assert chat(logprobs=False).params().logprobs is None and chat(top_logprobs=0).params().logprobs is None
    assert completion(logprobs=0).params().logprobs == 0 and completion().params().logprobs is None


BAD = [
    *(("max_tokens", value) for value in (0, -1, 1.5, True, "3", [1])),
    ("max_completion_tokens", -1),
    *(("temperature", value) for value in (-1, 3, "hot", True, float("nan"), float("inf"))),
    *(("top_p", value) for value in (0, 1.5, -0.1)),
    *(("n", value) for value in (0, -1, 1.5, True)),
    *(("stop", value) for value in ("", [""], ["a", ""], ["a"] * 17, 5, [5], {"a": 1})),
    *(("logit_bias", value) for value in ({"abc": 1}, {"3": "x"}, {"-1": 5}, {"3": 101}, [1])),
    *(("top_k", value) for value in (-2, 1.5)),
    ("min_p", 2),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("seed", 1.5),
    ("min_tokens", -1),
    ("ignore_eos", 1),
    ("stop_token_ids", [-1]),
    ("stream", "yes"),
    ("priority", "high"),
    *(("timeout", value) for value in (0, -1, "soon")),
    ("cache_salt", 5),
]


@pytest.mark.parametrize("field, value", BAD, ids=lambda x: str(x)[:20])
def test_bad_values_are_refused_by_name(field, value):
    for ask in (chat, completion):
        with pytest.raises(Refused) as refused:
            ask(**{field: value}).params()
        error = refused.value.body["error"]
        assert refused.value.status == 400 and error["type"] == "invalid_request_error"
        named = {"max_completion_tokens": "max_tokens"}.get(field, field)
        assert (error["param"] or "").partition(".")[0].partition("[")[0] in (field, named), error
        assert len(error["message"]) < 300


def test_what_cannot_be_had_is_refused():
    tool = [{"type": "function", "function": {"name": "add"}}]
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"tool_choice": tool[0]}):
        with pytest.raises(protocol.Refused, match="1 in tools") as refused:
            chat(tools=tool, **choice)
        assert refused.value.status == 400 and refused.value.param == "tools"
    for fine in (dict(tools=[]), dict(tools=None, tool_choice="auto"), dict(tools=tool, tool_choice="none")):
        chat(**fine)
    with pytest.raises(protocol.Refused, match="suffix") as refused:
        completion(suffix="the end")
    assert refused.value.status == 400 and refused.value.param == "suffix"
    for fields in (dict(best_of=2), dict(best_of=3, n=2), dict(best_of=0)):
        with pytest.raises(protocol.Refused, match="not ranked") as refused:
            completion(**fields)
        assert refused.value.status == 400 and refused.value.param == "best_of"
    for fine in (
        dict(suffix=""),
        dict(suffix=None),
        dict(best_of=1),
        dict(best_of=3, n=3),
        dict(best_of=None),
    ):
        completion(**fine)


def test_bad_logprobs():
    for value in (33, 10**6, -1, True):
        with pytest.raises(Refused, match="top_logprobs"):
            chat(logprobs=True, top_logprobs=value).params()
    with pytest.raises(Refused, match="needs logprobs"):
        chat(top_logprobs=2).params()
    for value in (21, -1, True, "1"):
        with pytest.raises(Refused, match="logprobs"):
            completion(logprobs=value).params()


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": "\\ud800"}', b"\xff", b"[" * 10_000]
)
def test_bodies_that_are_no_bodies(raw):
    with pytest.raises(Refused) as refused:
        CompletionBody.read(raw)
    assert refused.value.status == 400 and refused.value.body["error"]["message"]


def test_min_tokens_above_max_tokens():
    with pytest.raises(Refused, match="more than max_tokens") as refused:
        chat(min_tokens=5, max_tokens=4).params()
    assert refused.value.param == "min_tokens"


# ---------------------------------------------------------------- prompts and messages
@pytest.mark.parametrize("prompt, means", [
    ("Hi", ["Hi"]), (["Hi"], ["Hi"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]),
])  # fmt: skip
def test_prompts(prompt, means):
    assert completion(prompt).prompts() == means


@pytest.mark.parametrize("prompt", [None, 5, {}, [1, "a"], [[1], "a"], [True], [1.5], [["a"]], [], ""])
def test_prompts_that_are_none(prompt):
    with pytest.raises(Refused) as refused:
        completion(prompt).prompts()
    assert refused.value.param.startswith("prompt")


def messages(content, role="user"):
    return plain(
        ChatBody.read(json.dumps({"messages": [{"role": role, "content": content}]}).encode()).messages
    )


def test_content_parts_are_their_text():
    text = lambda t: {"type": "text", "text": t}
    assert messages("Hi") == messages([text("Hi")]) == [{"role": "user", "content": "Hi"}]
    assert messages([text("a"), text("b")]) == [{"role": "user", "content": "a\nb"}]
    assert messages(None) == messages([]) == messages("") == [{"role": "user", "content": ""}]
    assert messages("x", "developer")[0]["role"] == "system"


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": "data:"}}, {"type": "input_audio"}, {"type": "text"},
    {"type": "text", "text": None},
])  # fmt: skip
def test_other_parts_are_refused(part):
    with pytest.raises(Refused) as refused:
        messages([{"type": "text", "text": "what is this?"}, part])
    assert refused.value.status == 400 and refused.value.param == "messages[0].content"


@pytest.mark.parametrize("role", ["", "user<|im_end|>", "root", None, 5])
def test_a_role_is_one_of_those_there_are(role):
    with pytest.raises(Refused) as refused:
        messages("Hi", role)
    assert refused.value.param == "messages[0].role"


def test_the_tokenizers_bodies():
    assert TokenizeBody.read(b'{"prompt": "a"}').add_special_tokens is True
    assert DetokenizeBody.read(b'{"tokens": [1, 2]}').tokens == [1, 2]
    with pytest.raises(Refused, match="tokens"):
        DetokenizeBody.read(b'{"tokens": [1, "2"]}')


# ---------------------------------------------------------------- what is told
PIECES = {0: b"<end>", 1: b"de", 2: b"f", 3: b"\xf0\x9f", 4: b"\x98\x80", 5: b"ab", 6: b"c"}
TOKENIZER = SimpleNamespace(bytes_of=PIECES.get, special_ids={0})


def lp(token: int, logprob: float, *others: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, (*others, (token, logprob)))


def output(
    index=0, prompt=(5, 6), tokens=(1, 2), text="def", reason="length", logprobs=(), asked=None, leader=None
):
    request = SimpleNamespace(
        prompt=list(prompt), leader=leader, cached_tokens=1, params=SimpleNamespace(logprobs=asked)
    )
    return SimpleNamespace(
        index=index,
        request=request,
        tokens=list(tokens),
        text=text,
        finish_reason=reason,
        logprobs=list(logprobs),
    )


def reply(body, **fields):
    kind = replies.ChatReply if isinstance(body, protocol.ChatBody) else replies.CompletionReply
    return kind(body, "tiny", TOKENIZER)


def told(outputs):
    return [len(o.tokens) for o in outputs]


def stream(it, steps):
    """steps: (output, text, last, told). Returns the choices of every chunk."""
    chunks = [chunk for step in steps for chunk in it.chunks(*step)]
    heads = {json.dumps({k: v for k, v in c.items() if k != "choices"}) for c in chunks}
    assert len(heads) <= 1, "the same id, object, model and time everywhere"
    assert all(len(c["choices"]) == 1 for c in chunks)
    return [c["choices"][0] for c in chunks]


def test_a_whole_chat():
    outputs = [output(), output(1, tokens=[1], text="de", reason="stop", leader=object())]
    said = reply(chat(n=2)).whole(outputs, told(outputs))
    assert (
        said["object"] == "chat.completion" and said["id"].startswith("chatcmpl-") and said["model"] == "tiny"
    )
    assert said["choices"] == [
        dict(index=0, message=dict(role="assistant", content="def"), logprobs=None, finish_reason="length"),
        dict(index=1, message=dict(role="assistant", content="de"), logprobs=None, finish_reason="stop"),
    ]
    assert said["usage"] == dict(
        prompt_tokens=2, completion_tokens=3, total_tokens=5, prompt_tokens_details={"cached_tokens": 1}
    )


def test_usage_of_several_prompts_counts_each_once():
    outputs = [
        output(),
        output(1, leader=object()),
        output(2, prompt=[5]),
        output(3, prompt=[5], leader=object()),
    ]
    usage = reply(completion(["abc", "ab"], n=2)).usage(outputs, told(outputs))
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 8, 11)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_streamed_chat_has_one_role_its_text_and_one_end_per_choice():
    a, b, it = output(), output(1, reason="stop"), reply(chat(stream=True, n=2))
    choices = stream(it, [(a, "de", False, 1), (b, "", False, 1), (b, "def", True, 2), (a, "f", True, 2)])
    for index, texts, reason in ((0, ["de", "f"], "length"), (1, ["", "def"], "stop")):
        own = [c for c in choices if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["delta"]["content"] for c in own[1:-1]] == texts
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == reason
        assert all(c["finish_reason"] is None for c in own[:-1])
    assert it.head["object"] == "chat.completion.chunk"


def test_an_answer_without_a_token_still_opens_and_ends():
    choices = stream(reply(chat(stream=True)), [(output(tokens=[], text="", reason="stop"), "", True, 0)])
    assert [c["delta"] for c in choices] == [{"role": "assistant", "content": ""}, {}]
    assert [c["finish_reason"] for c in choices] == [None, "stop"]


def test_a_streamed_completion():
    choices = stream(reply(completion(stream=True)), [(output(), "de", False, 1), (output(), "f", True, 2)])
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("de", None), ("f", None), ("", "length")]


def test_the_usage_chunk_has_no_choices():
    it = reply(chat(stream=True))
    last = it.last_usage([output()], [2])
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2 and last["id"] == it.head["id"]


# ---------------------------------------------------------------- logprobs
DRAWN = [lp(1, -2.0, (2, -0.5)), lp(2, -0.1)]


def test_chat_logprobs_list_the_chosen_token_and_the_best():
    whole = reply(chat(logprobs=True, top_logprobs=1)).whole([output(logprobs=DRAWN, asked=1)], [2])
    first, second = whole["choices"][0]["logprobs"]["content"]
    best = dict(token="f", logprob=-0.5, bytes=[102])
    assert first == dict(token="de", logprob=-2.0, bytes=[100, 101], top_logprobs=[best])
    assert second["top_logprobs"] == [dict(token="f", logprob=-0.1, bytes=[102])]


def test_chat_logprobs_without_alternatives_are_empty_lists():
    whole = reply(chat(logprobs=True)).whole([output(logprobs=[lp(1, -2.0), lp(2, -0.1)], asked=0)], [2])
    assert [e["top_logprobs"] for e in whole["choices"][0]["logprobs"]["content"]] == [[], []]


def test_streamed_logprobs_are_the_whole_ones_in_pieces():
    for body in (chat(logprobs=True, top_logprobs=1, stream=True), completion(logprobs=1, stream=True)):
        out = output(logprobs=DRAWN, asked=1)
        choices = stream(reply(body), [(out, "de", False, 1), (out, "f", True, 2)])
        parts = [c["logprobs"] for c in choices if c["logprobs"]]
        whole = reply(body).whole([out], [2])["choices"][0]["logprobs"]
        assert {key: parts[0][key] + parts[1][key] for key in whole} == whole


def test_held_back_text_does_not_lose_its_logprobs():
    choices = stream(
        reply(chat(logprobs=True, stream=True)),
        [(out := output(logprobs=DRAWN, asked=0), "", False, 1), (out, "def", True, 2)],
    )
    assert [len(c["logprobs"]["content"]) for c in choices if c["logprobs"]] == [1, 1]


def test_completion_logprobs():
    whole = reply(completion(logprobs=1)).whole([output(logprobs=DRAWN, asked=1)], [2])
    assert whole["choices"][0]["logprobs"] == dict(
        tokens=["de", "f"], token_logprobs=[-2.0, -0.1], top_logprobs=[{"f": -0.5, "de": -2.0}, {"f": -0.1}],
        text_offset=[0, 2],
    )  # fmt: skip


def test_pieces_of_a_character_keep_their_bytes():
    out = output(
        tokens=[3, 4, 0, 2], text="\U0001f600f", logprobs=[lp(i, -1.0) for i in (3, 4, 0, 2)], asked=0
    )
    legacy = reply(completion(logprobs=0)).whole([out], [4])["choices"][0]["logprobs"]
    assert legacy["tokens"] == [r"bytes:\xf0\x9f", r"bytes:\x98\x80", "<end>", "f"]
    assert legacy["text_offset"] == [0, 0, 1, 1], "one character when complete; an end token prints nothing"
    entries = reply(chat(logprobs=True)).whole([out], [4])["choices"][0]["logprobs"]["content"]
    assert bytes(entries[0]["bytes"] + entries[1]["bytes"]).decode() == "\U0001f600"


# ---------------------------------------------------------------- echo
def test_echo_puts_the_prompt_first():
    it = reply(completion("abc", echo=True))
    it.echoed = [Echo("abc", [5, 6])]
    assert it.whole([output()], [2])["choices"][0]["text"] == "abcdef"


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_with_logprobs_begins_with_null_and_offsets_go_on(streamed):
    it = reply(completion("abc", echo=True, logprobs=1, stream=streamed))
    it.echoed = [Echo("abc", [5, 6], [None, lp(6, -3.0)])]
    out = output(logprobs=DRAWN, asked=1)
    if streamed:
        choices = stream(it, [(out, "de", False, 1), (out, "f", True, 2)])
        assert "".join(c["text"] for c in choices) == "abcdef"
        found = {}
        for part in (c["logprobs"] for c in choices if c["logprobs"]):
            found = {key: found.get(key, []) + part[key] for key in part}
    else:
        found = it.whole([out], [2])["choices"][0]["logprobs"]
    assert found["tokens"] == ["ab", "c", "de", "f"] and found["text_offset"] == [0, 2, 3, 5]
    assert found["token_logprobs"] == [None, -3.0, -2.0, -0.1] and found["top_logprobs"][0] is None


def test_without_prompt_logprobs_offsets_still_count_the_echo():
    it = reply(completion("abc", echo=True, logprobs=1))
    it.echoed = [Echo("abc", [5, 6])]
    assert it.whole([output(logprobs=DRAWN, asked=1)], [2])["choices"][0]["logprobs"]["text_offset"] == [3, 5]


def test_each_choice_echoes_its_own_prompt():
    it = reply(completion(["abc", "c"], n=2, echo=True))
    it.echoed = [Echo("abc", [5, 6]), Echo("c", [6])]
    outputs = [output(i) for i in range(4)]
    assert [c["text"] for c in it.whole(outputs, [2] * 4)["choices"]] == ["abcdef", "abcdef", "cdef", "cdef"]
    opened = stream(it, [(outputs[2], "de", False, 1)])
    assert [c["text"] for c in opened] == ["c", "de"]


# ---------------------------------------------------------------- errors
def test_an_error_has_the_apis_shape():
    error = Refused(429, "come again", "n", "full", Retry_After="3")
    assert error.body == {
        "error": dict(message="come again", type="rate_limit_error", param="n", code="full")
    }
    assert error.headers == {"Retry-After": "3"}
    kinds = {status: Refused(status, "").body["error"]["type"] for status in (400, 401, 404, 413, 500, 503)}
    assert kinds == {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
                     413: "invalid_request_error", 500: "server_error", 503: "server_error"}  # fmt: skip


# ---------------------------------------------------------------- these tests can fail
WRONG = [
    (protocol, "        body.check()\n", "", test_what_cannot_be_had_is_refused),
    (protocol, ' and self.tool_choice != "none"', "", test_what_cannot_be_had_is_refused),
    (protocol, "if self.suffix:", "if self.suffix is not None:", test_what_cannot_be_had_is_refused),
    (protocol, "not in (None, self.n or 1)", "not in (None, 1)", test_what_cannot_be_had_is_refused),
    (protocol, "not in (None, self.n or 1)", "!= (self.n or 1)", test_what_cannot_be_had_is_refused),
    (protocol, "self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens",
     "self.max_tokens", test_the_newer_name_of_max_tokens_wins),
    (protocol, "self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens",
     "self.max_tokens or self.max_completion_tokens", test_the_newer_name_of_max_tokens_wins),
    (protocol, "dict(temperature=1.0,", "dict(temperature=0.0,",
     test_what_is_not_given_or_null_is_the_apis_own_default),
    (protocol, 'extra="ignore"', 'extra="forbid"', test_unknown_fields_are_ignored),
    (protocol, "self.top_logprobs or 0 if self.logprobs else None", "self.top_logprobs if self.logprobs else None",
     test_logprobs_mean_another_thing_in_each_interface),
    (replies, "if output.request.leader is None", "", test_usage_of_several_prompts_counts_each_once),
    (replies, "its.top[: self.alternatives]", "its.top", test_chat_logprobs_list_the_chosen_token_and_the_best),
    (replies, "self._entry(its.token, its.logprob)", "self._entry(*its.top[0])",
     test_chat_logprobs_list_the_chosen_token_and_the_best),
    (replies, "output.tokens[begin:told]", "output.tokens[:told]", test_streamed_logprobs_are_the_whole_ones_in_pieces),
    (replies, "if told > pieces.told or text:", "if text:", test_held_back_text_does_not_lose_its_logprobs),
    (replies, "output.logprobs[begin:told]", "output.logprobs[begin:]",
     test_streamed_logprobs_are_the_whole_ones_in_pieces),
    (replies, "output.index // (self.body.n or 1)", "output.index % len(self.echoed)",
     test_each_choice_echoes_its_own_prompt),
    (replies, "if token not in self.tokenizer.special_ids:", "if True:", test_pieces_of_a_character_keep_their_bytes),
    (replies, "pieces.decoded = len(echo.text)", "pass", test_without_prompt_logprobs_offsets_still_count_the_echo),
    (replies, 'if self.body.stream:', 'if False:',
     test_a_streamed_chat_has_one_role_its_text_and_one_end_per_choice),
    (replies, "[*ends, output.finish_reason]", "[output.finish_reason] * (len(ends) + 1)",
     test_a_streamed_chat_has_one_role_its_text_and_one_end_per_choice),
    (replies, '{"index": output.index} |', '{"index": 0} |',
     test_a_streamed_chat_has_one_role_its_text_and_one_end_per_choice),
    (replies, "choices += self._opening(output)", "pass", test_an_answer_without_a_token_still_opens_and_ends),
]  # fmt: skip


@pytest.mark.parametrize("module, right, wrong, test", WRONG, ids=lambda x: getattr(x, "__name__", None))
def test_wrong_versions_are_noticed(module, right, wrong, test, monkeypatch):
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setitem(globals(), name, wrong_version(module, right, wrong))
    with pytest.raises((Exception, pytest.fail.Exception)):  # whichever way it fails
        test()
