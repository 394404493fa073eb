"""What tests of a server's faults stand on: a client that speaks bytes, steps that wait to be let through, and rest.

Wire(url)          one HTTP/1.1 connection; whole answers, or server-sent events one at a time
Gate(engine)       no step runs until let() says so: a request can be caught in any phase
at_rest(serving)   waits until nobody is served, then checks that nothing at all is left of anybody
"""

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

SECONDS = 120  # after which a test gives up waiting: many, for a machine that is slow and busy
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello there"}], "temperature": 0, "ignore_eos": True}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        """The error of an answer that must be one, in OpenAI's shape."""
        said = self.json
        assert set(said) == {"error"}, said
        assert set(said["error"]) == {"message", "type", "param", "code"}, said
        assert isinstance(said["error"]["message"], str) and said["error"]["message"], said
        return said["error"]


class Wire:
    """One connection by hand. `room`: bytes that the kernel keeps for this reader, so that a slow one is soon full."""

    def __init__(self, url: str, room: int | None = None):
        self.where = urlsplit(url)
        self.socket = socket.socket()
        if room:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        self.socket.settimeout(SECONDS)
        self.socket.connect((self.where.hostname, self.where.port))
        self.file = self.socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def send(self, data: bytes) -> "Wire":
        self.socket.sendall(data)
        return self

    def post(self, path: str, body, **headers: str) -> "Wire":
        """body: bytes as they are, or something to be sent as JSON. A header "a_b" is sent as a-b."""
        return self.send(request(self.where.netloc, path, body, **headers))

    def head(self) -> tuple[int, dict[str, str]]:
        line = self._line()
        assert line.startswith(b"HTTP/1.1 "), line
        headers = {name.lower(): value for name, value in http.client.parse_headers(self.file).items()}
        status = int(line.split()[1])
        return self.head() if status == 100 else (status, headers)  # 100: go on, the answer comes later

    def _line(self) -> bytes:
        if line := self.file.readline():
            return line
        raise ConnectionError("the server closed the connection before its answer was complete")

    def answer(self) -> Answer:
        status, headers = self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(self._chunks())
        else:
            body = self.file.read(int(headers.get("content-length", 0)))
        return Answer(status, headers, body)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self._line(), 16):
            yield self.file.read(size)
            assert self.file.readline() == b"\r\n"
        assert self.file.readline() == b"\r\n"

    def events(self) -> Iterator[str]:
        """The data of each server-sent event, "[DONE]" too; the answer's head is read first."""
        status, headers = self.head()
        assert status == 200, (
            status,
            b"".join(self._chunks()) if "chunked" in str(headers) else self.file.read(),
        )
        assert headers["content-type"].startswith("text/event-stream"), headers
        rest = b""
        for chunk in self._chunks():
            *whole, rest = (rest + chunk).split(b"\n\n")
            for event in whole:
                assert event.startswith(b"data: ") and b"\n" not in event, event
                yield event[6:].decode()
        assert not rest, rest

    def close(self, reset: bool = False) -> None:
        """Leave; with `reset` like a process that was killed, without a goodbye."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.file.close()
        self.socket.close()


def request(host: str, path: str, body, method: str = "POST", **headers: str) -> bytes:
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Host": host, "Content-Type": "application/json", "Content-Length": str(len(body))}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def post(url: str, path: str, body, **headers: str) -> Answer:
    with Wire(url) as wire:
        return wire.post(path, body, **headers).answer()


def get(url: str, path: str, **headers: str) -> Answer:
    with Wire(url) as wire:
        return wire.send(request(wire.where.netloc, path, b"", "GET", **headers)).answer()


def chat(url: str, **fields) -> Answer:
    return post(url, CHAT, HELLO | fields)


def streamed(events: Iterator[str]) -> tuple[dict[int, str], dict[int, str], list[dict]]:
    """A whole stream: each choice's text and finish reason, and all its chunks. It must end with [DONE], once."""
    *data, done = list(events)
    assert done == "[DONE]" and "[DONE]" not in data, data[-3:]
    chunks = [json.loads(d) for d in data]
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            assert choice["index"] not in ends, f"choice {choice['index']} goes on after its end"
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    assert ends.keys() == texts.keys(), "a choice has no end"
    return texts, ends, chunks


def until(condition, what: str) -> None:
    """Wait for something that another thread does."""
    late = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < late, f"waited {SECONDS} s in vain: {what}"
        time.sleep(0.002)


class Gate:
    """Every step of an engine waits here. let(n) lets n more through; leaving the block lets all."""

    def __init__(self, engine):
        self.engine, self.steps = engine, 0  # steps: that have run since
        self._permits, self._waits = threading.Semaphore(0), threading.Event()

    def __enter__(self):
        step = self.engine.step

        def gated():
            self._waits.set()
            # longer than until() waits: a step that fails here ends every request, and all would seem at rest
            assert self._permits.acquire(timeout=2 * SECONDS), "nobody let the step through"
            self._waits.clear()
            news = step()
            self.steps += 1
            return news

        self.engine.step = gated
        return self

    def __exit__(self, *_):
        del self.engine.step
        self._permits.release(100_000)

    def let(self, steps: int = 1) -> None:
        self._permits.release(steps)

    def reached(self) -> None:
        """Wait until a step stands at the gate: something is to be computed."""
        assert self._waits.wait(SECONDS), "no step was begun"

    def passed(self, steps: int) -> None:
        until(lambda: self.steps >= steps, f"{steps} steps to run")


def at_rest(serving) -> None:
    """Nothing is left of anybody: no request, no stream, no page, no seat."""
    engine, scheduler = serving.engine, serving.engine.scheduler
    held = lambda: (engine.outputs, scheduler.waiting, scheduler.running, serving._streams, serving._fresh)
    until(lambda: not any(held()), "everything to end")
    engine.pages.check([])
    assert engine.pages.in_use == 0 and not engine.pages.copies
    assert sorted(scheduler.seats) == list(range(scheduler.max_running))
