"""Requests that nobody should send: the answer is 2xx or 4xx in the API's shape, whatever they are; the next is right.

Bodies are made from the schema of the API itself: one that is fine, and a few hostile things done to it. Number i is
the same on every run (`body_of(i)`). Below HTTP there is raw garbage, and HTTP that is not quite HTTP.
"""

import json
import random
import socket
from contextlib import contextmanager

import pytest
from fault_world import CHAT, HELLO, Answer, Wire, at_rest, request, streamed
from serving_world import serve_in_thread, tiny_engine, tiny_folder

from minserve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from minserve.server import Limits

KEY = "k-ä"
AUTHORIZATION = f"Bearer {KEY}".encode().decode("latin-1")
FINE = {
    CHAT: (ChatBody, HELLO | {"max_tokens": 2}),
    "/v1/completions": (CompletionBody, {"prompt": "hello", "temperature": 0, "max_tokens": 2}),
    "/tokenize": (TokenizeBody, {"prompt": "hello"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5, 6]}),
}
SURROGATE, DEEP = "\ud800", json.loads("[" * 900 + "]" * 900)
HOSTILE = [
    None, True, False, 0, -1, 1, 3, 1.5, -0.0, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -1e308,
    float("nan"), float("inf"), -float("inf"), 5e-324, "", " ", "7", "NaN", "null", "\0", SURROGATE, "a" * 5000,
    "\u202e\u0000\uffff", "<|im_end|>", "<|im_start|>system\n", "{{ 7 * 7 }}", "{% raw %}", "../etc/passwd", [], [[]],
    [None], [True], [""], ["a", 1], ["x"] * 500, ["\n"], [SURROGATE], [0] * 5000, [-1], [2**70], [1.5], [[1], ["a"]],
    [[1]] * 300, ["a"] * 300, {"a": 1}, {"": {}}, {"0": 101}, {"-1": 5}, {"5": None}, {"07": 1, "7": 2}, {"9" * 50: 1},
    {str(i): 1 for i in range(3000)}, {"type": "text"}, {"type": "json_schema", "json_schema": {"schema": DEEP}}, DEEP,
]  # fmt: skip
MESSAGES = [
    [], [{}], [None], ["hi"], [{"role": "user"}], [{"content": "hi"}], [{"role": "king", "content": "hi"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": None}], [{"role": "user", "content": [{}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}] * 200}], [{"role": "user", "content": SURROGATE}],
    [{"role": "system", "content": "<|im_end|>" * 50}] * 3, [{"role": "assistant", "content": "x"}] * 300,
    [{"role": "tool", "content": "x", "tool_call_id": DEEP}], [{"role": "user", "content": "why " * 5000}],
]  # fmt: skip
KINDS = [
    "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/xml",
    "application/json; charset=utf-16", "application/json;;;=", "APPLICATION/JSON", "application/jsonx", "a" * 3000,
    "application/json\x80",
]  # fmt: skip
HEADERS = [
    {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}, {"Authorization": "Basic " + "A" * 999},
    {"Authorization": "\xff\xfe"}, {"Authorization": "Bearer " + "é" * 50}, {"Content_Encoding": "gzip"},
    {"Accept": "text/html;q=\x80"}, {"Origin": "null"}, {"Cookie": "a" * 9000}, {"X_Request_Id": "\xe9" * 30},
    {"Content_Type": ""}, {"Expect": "100-continue"}, {"Upgrade": "websocket", "Connection": "Upgrade"},
    {"Range": "bytes=0-1"}, {"If_Match": "*"}, {"Accept_Encoding": "br, *;q=9"},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("fuzz") / "tiny")


@contextmanager
def serving(folder):
    limits = Limits(body_bytes=200_000, body_seconds=5)
    with serve_in_thread(tiny_engine(folder), limits=limits, api_key=KEY) as server:
        yield server


# ---------------------------------------------------------------- requests from the schema
def body_of(number: int) -> tuple[str, bytes, dict[str, str]]:
    """Path, body and headers of request `number`."""
    rng = random.Random(number)
    path = rng.choice([CHAT, CHAT, "/v1/completions", "/v1/completions", "/tokenize", "/detokenize"])
    kind, fine = FINE[path]
    body, fields = dict(fine), list(kind.model_json_schema()["properties"])
    for _ in range(rng.choice([0, 1, 1, 3])):
        body[rng.choice(fields)] = rng.choice(HOSTILE)
    if path == CHAT and rng.random() < 0.25:
        body["messages"] = rng.choice(MESSAGES)
    if rng.random() < 0.1:
        body.pop(rng.choice(list(body)))
    if rng.random() < 0.2:
        body["stream"] = True
    raw = json.dumps(body).encode()
    if rng.random() < 0.25:
        raw = spoilt(raw, rng)
    headers = rng.choice(HEADERS) if rng.random() < 0.15 else {}
    if rng.random() < 0.1:
        headers = headers | {"Content_Type": rng.choice(KINDS)}
    return path, raw, {"Authorization": AUTHORIZATION} | headers


def spoilt(raw: bytes, rng: random.Random) -> bytes:
    """A body that is broken as bytes, or as JSON."""
    at = rng.randrange(len(raw))
    return rng.choice([
        raw[:at], raw[at:], raw + raw, b"", b" ", b"[]", b"7", b'"a"', b"\xff\xfe" + raw, b"\xef\xbb\xbf" + raw,
        raw[:at] + b"\xff" + raw[at:], raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :],
        raw[:at] + b"\x00" + raw[at:], raw[:at] + b'\\ud800"' + raw[at:], raw.replace(b": ", b":: ", 1), b"[" * 100_000,
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000, raw.decode().encode("utf-16"), raw[:-1] + b', "n": 1e999}',
        raw[:-1] + b', "max_tokens": ' + b"9" * 10_000 + b"}", raw[:-1] + b', "stream": "yes", "stream": true}',
        b"x" * 199_999, b"x" * 300_000, raw[:-1] + b', "unknown": ' + b"[" * 500 + b"]" * 500 + b"}", b"//\n" + raw,
        b"null",
    ])  # fmt: skip


def check_answer(answer: Answer, raw: bytes) -> None:
    late = answer.status == 504 and b"timeout" in raw  # it asked for no more time than that
    assert 200 <= answer.status < 300 or 400 <= answer.status < 500 or late, answer
    if answer.status >= 400:
        assert answer.error["type"] and answer.headers["content-type"] == "application/json"
    elif answer.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:].decode() for line in answer.body.split(b"\n") if line]
        if "error" in json.loads(events[-1].replace("[DONE]", "{}")):
            assert b"timeout" in raw, events
        else:
            streamed(iter(events))
    else:
        json.loads(answer.body, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def check_fuzz(folder, numbers=range(500)):
    with serving(folder) as server:
        before = told(server)
        statuses = set()
        for number in numbers:
            path, raw, headers = body_of(number)
            try:
                with Wire(server.url) as wire:
                    answer = wire.post(path, raw, **headers).answer()
                check_answer(answer, raw)
            except Exception as error:
                raise AssertionError(
                    f"request {number}, {path} {raw[:300]!r} {headers}: {error!r}"
                ) from error
            statuses.add(answer.status)
            if number % 50 == 0:
                assert told(server) == before, number
        at_rest(server.serving)
        assert told(server) == before
        assert statuses >= {200, 400, 401, 404, 413, 415}, statuses  # every way out was taken


def told(server) -> list:
    """The tokens that a good request gets."""
    with Wire(server.url) as wire:
        answer = wire.post(
            CHAT, HELLO | {"max_tokens": 6, "logprobs": True}, Authorization=AUTHORIZATION
        ).answer()
    assert answer.status == 200, answer
    return [token["bytes"] for token in answer.json["choices"][0]["logprobs"]["content"]]


def test_whatever_is_sent_the_answer_is_one_and_the_next_is_right(folder):
    check_fuzz(folder)


# ---------------------------------------------------------------- below HTTP
def raws(host: str) -> dict[str, bytes]:
    whole = request(host, CHAT, HELLO | {"max_tokens": 2})
    body = whole.partition(b"\r\n\r\n")[2]
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n".encode()
    rng = random.Random(0)
    return {
        "nothing": b"",
        "noise": rng.randbytes(4096),
        "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30),
        "HTTP/0.9": b"GET /\r\n",
        "HTTP/9.9": b"GET / HTTP/9.9\r\n\r\n",
        "no version": b"GET /health\r\n\r\n",
        "a method of its own": b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
        "bare line feeds": b"GET /health HTTP/1.1\nHost: x\n\n",
        "a NUL in the path": b"GET /he\0alth HTTP/1.1\r\nHost: x\r\n\r\n",
        "a long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        "a strange path": b"GET /v1/models/%ff%00%2e%2e/..//etc HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        "a huge header": b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 300_000 + b"\r\n\r\n",
        "many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
        "a header without a colon": b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
        "no length": head + b"\r\n" + body,
        "a negative length": head + b"Content-Length: -5\r\n\r\n" + body,
        "a length that is no number": head + b"Content-Length: 1e3\r\n\r\n" + body,
        "two lengths": head + b"Content-Length: 5\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
        "length and chunks": head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + body,
        "half a body": whole[:-9],
        "more than a body": whole + b"and more",
        "a length beyond all": head + b"Content-Length: 999999999999999999999\r\n\r\n" + body,
        "a chunk of no size": head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
        "a strange encoding": head + b"Transfer-Encoding: gzip\r\n\r\n" + body,
        "half a chunk": head + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{",
        "a chunk of all sizes": head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + body,
        "a body for GET": b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc",
        "a websocket": b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                       b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    }  # fmt: skip


def check_raw(folder):
    """The server answers or hangs up, and goes on; it waits for no more than the client's last word."""
    with serving(folder) as server:
        before = told(server)
        for name, raw in raws(server.url.removeprefix("http://")).items():
            with Wire(server.url) as wire:
                try:
                    wire.send(raw)
                    wire.socket.shutdown(socket.SHUT_WR)
                    said = wire.file.read()
                except TimeoutError:
                    raise AssertionError(f"{name}: it still waits") from None
                except OSError:  # it had hung up already
                    said = b""
            assert not said or said.startswith(b"HTTP/1.") and said[9:10] in b"124", (name, said[:200])
            assert told(server) == before, name
        at_rest(server.serving)


def test_raw_garbage(folder):
    check_raw(folder)


def test_two_requests_in_one_breath_are_answered_in_order(folder):
    with serving(folder) as server, Wire(server.url) as wire:
        header = {"Authorization": AUTHORIZATION}
        host = server.url.removeprefix("http://")
        wire.send(
            request(host, "/tokenize", {"prompt": "a"}, **header)
            + request(host, CHAT, HELLO | {"max_tokens": 2}, **header)
        )
        assert wire.answer().json["count"] >= 1
        assert wire.answer().json["choices"][0]["finish_reason"] == "length"


def test_a_body_in_chunks_is_a_body(folder):
    with serving(folder) as server, Wire(server.url) as wire:
        header = {"Authorization": AUTHORIZATION, "Transfer_Encoding": "chunked"}
        whole = request("x", CHAT, HELLO | {"max_tokens": 2}, **header)
        head, _, body = whole.partition(b"\r\n\r\n")
        head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length"))
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:8], body[8:]))
        assert wire.send(head + b"\r\n\r\n" + chunks + b"0\r\n\r\n").answer().status == 200


def test_an_upgrade_that_is_offered_and_not_taken_leaves_the_body_alone(folder):
    """What `curl --http2` and Java's client send first."""
    header = {
        "Authorization": AUTHORIZATION,
        "Connection": "Upgrade, HTTP2-Settings",
        "HTTP2_Settings": "AAMAAABk",
    }
    with serving(folder) as server:
        for upgrade in ("h2c", "websocket"):
            with Wire(server.url) as wire:
                answer = wire.post("/tokenize", {"prompt": "a"}, Upgrade=upgrade, **header).answer()
                assert answer.status == 200 and answer.json["count"] >= 1


# ---------------------------------------------------------------- hostile grammars
FORMS = [
    {"regex": "(a+)+$"}, {"regex": "((((a{1,100}){1,100}){1,100}){1,100})"}, {"regex": "["}, {"regex": ""},
    {"regex": "(?=a)b"}, {"regex": r"[^\s\S]"}, {"regex": ".*" * 200}, {"regex": "a{500000}"}, {"regex": 5},
    {"choice": []}, {"choice": [""]}, {"choice": [5]}, {"choice": [str(i) for i in range(3000)]},
    {"json": {"$ref": "#"}}, {"json": {"$ref": "file:///etc/passwd"}}, {"json": {"enum": []}}, {"json": "{"},
    {"json": {"type": "array", "minItems": 10**9}}, {"json": {"minimum": 5, "maximum": 3, "type": "integer"}},
    {"json": {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}},
    {"json": {"properties": {str(i): {} for i in range(200)}}}, {"grammar": "start: start"}, {"grammar": "%%%"},
    {"grammar": "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "x"\nstart: a0'}, {"nope": 1},
    {"json": {}, "regex": "a"},
]  # fmt: skip


def check_forms(folder):
    """No form that an answer shall have hurts anybody: not one that says nothing, and not one that is too much."""
    pytest.importorskip("llguidance", reason='no grammars here: pip install "minserve[structured]"')
    asked = HELLO | {"max_tokens": 3, "ignore_eos": False}
    with serving(folder) as server:
        before = told(server)
        for form in FORMS:
            for stream in (False, True):
                with Wire(server.url) as wire:
                    body = asked | {"structured_outputs": form, "stream": stream}
                    answer = wire.post(CHAT, body, Authorization=AUTHORIZATION).answer()
                assert answer.status in (200, 400), (form, answer)
                assert b"server_error" not in answer.body, (form, answer)  # nor in a stream
        assert told(server) == before
        at_rest(server.serving)


def test_hostile_grammars(folder):
    check_forms(folder)
