"""What clients, readers and the engine itself may do to a server, and that it survives. See also test_server_fuzz.py.

Checks are functions of a model's folder, so that wrong servers can be shown to fail them (WRONG, at the end). Where a
client has to be caught in one phase, the engine's steps wait at a Gate: no test depends on how fast anything is.
"""

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import fault_world
import pytest
import serving_world
from fault_world import CHAT, HELLO, Gate, Wire, at_rest, chat, get, post, request, streamed, until
from serving_world import serve_in_thread, serve_process, tiny_engine, tiny_folder
from wrong_versions import plant

from minserve.server import Limits, replies

LONG = HELLO | {"max_tokens": 500, "stream": True}
Expired = subprocess.TimeoutExpired  # of a process that does not end
ON = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("faults") / "tiny", context=8192)


@contextmanager
def serving(folder, limits=None, running=None, **options):
    engine = tiny_engine(folder, **options)
    with serve_in_thread(engine, running=running, limits=limits or Limits()) as server:
        for listening in server.server.servers[
            0
        ].sockets:  # what it accepts inherits this: no kernel hides a slow reader
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield server


def well(server) -> str:
    """It still serves; what it says to HELLO."""
    answer = chat(server.url, max_tokens=6)
    assert answer.status == 200, answer
    at_rest(server.serving)
    return answer.json["choices"][0]["message"]["content"]


def asked(server, fields=None, number=1, **more) -> list[Wire]:
    """Clients whose requests stand at the engine's door."""
    return [Wire(server.url).post(CHAT, (fields or LONG) | more) for _ in range(number)]


def noticed(server) -> None:
    until(lambda: server.serving._between, "the server to notice")


# ---------------------------------------------------------------- a client leaves
def check_leaves_before_its_body(folder):
    with serving(folder) as server:
        for reset in (False, True):
            whole = request(server.url, CHAT, LONG)
            for part in (whole[:20], whole[: -len(json.dumps(LONG))], whole[:-1]):
                Wire(server.url).send(part).close(reset)
        well(server)
        assert server.serving.engine.scheduler.steps < 50  # HELLO's and no others


def check_leaves_at_the_door(folder, stream=True):
    """Its request waits for a step to end before it can be queued."""
    with serving(folder) as server, Gate(server.engine) as gate:
        (first,) = asked(server)
        gate.reached()
        (late,) = asked(server, stream=stream)
        noticed(server)
        late.close()
        gate.let(1)
        gate.passed(1)
        gate.reached()  # its first step: nobody looked whether it was still there
        noticed(server)
        gate.let(1)
        until(lambda: len(server.engine.outputs) == 1, "it to leave")
        first.close()
        gate.let(10_000)
        at_rest(server.serving)


def check_leaves_the_queue(folder, stream=True):
    with serving(folder) as server, Gate(server.engine) as gate:
        engine, waiting = server.engine, server.engine.scheduler.waiting
        first = asked(server)
        gate.reached()
        others = asked(server, number=4, stream=stream)  # four seats: one of these has to wait
        until(lambda: len(server.serving._between) == 4, "them to be at the door")
        gate.let(2)
        gate.passed(2)
        gate.reached()
        assert len(engine.scheduler.running) == 4 and len(waiting) == 1
        (queued,) = waiting
        mine = others[[o.request for o in engine.outputs.values()].index(queued) - 1]
        mine.close()
        noticed(server)
        gate.let(1)
        gate.passed(3)
        until(lambda: not waiting, "it to leave the queue")
        assert queued.finish_reason == "abort" and len(engine.outputs) == 4
        for wire in first + others:
            wire.close()
        gate.let(10_000)
        at_rest(server.serving)


def check_leaves_in_its_prefill(folder, stream=True):
    with serving(folder) as server, Gate(server.engine) as gate:
        (wire,) = asked(server, stream=stream, messages=[{"role": "user", "content": "why " * 40}])
        gate.reached()
        gate.let(1)
        gate.passed(1)
        gate.reached()
        (its,) = server.engine.scheduler.running
        assert 0 < its.computed < len(its.prompt) and its.pages
        wire.close()
        noticed(server)
        gate.let(1)
        at_rest(server.serving)
        assert gate.steps == 2  # the one that was under way


def check_leaves_while_it_streams(folder, n=1, reset=False):
    """AB-01 with n = 3: none of the completions goes on."""
    with serving(folder) as server, Gate(server.engine) as gate:
        (wire,) = asked(server, n=n)
        gate.reached()
        gate.let(4)
        events = wire.events()
        while json.loads(next(events))["choices"][0]["index"] != n - 1:
            pass
        gate.passed(4)
        gate.reached()
        assert len(server.engine.scheduler.running) == n
        wire.close(reset)
        noticed(server)
        gate.let(1)
        at_rest(server.serving)
        assert gate.steps == 5


def check_leaves_before_done(folder):
    """The answer is complete, the client knows all of it, and [DONE] finds nobody."""
    with serving(folder) as server, pytest.MonkeyPatch.context() as patch:
        gone, told = threading.Event(), replies.Reply.last_usage

        def last_usage(*args):
            assert gone.wait(fault_world.SECONDS)
            return told(*args)

        patch.setattr(replies.Reply, "last_usage", last_usage)
        (wire,) = asked(server, max_tokens=3, stream_options={"include_usage": True})
        events = wire.events()
        while not json.loads(next(events))["choices"][0]["finish_reason"]:
            pass
        wire.close(reset=True)
        gone.set()
        at_rest(server.serving)
        well(server)


@pytest.mark.parametrize(
    "check", [check_leaves_at_the_door, check_leaves_the_queue, check_leaves_in_its_prefill]
)
@ON
def test_a_client_that_leaves_before_its_first_token(folder, check, stream):
    check(folder, stream)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_client_that_leaves_while_it_streams(folder, n, reset):
    check_leaves_while_it_streams(folder, n, reset)


@pytest.mark.parametrize("check", [check_leaves_before_its_body, check_leaves_before_done])
def test_a_client_that_leaves_at_the_edges(folder, check):
    check(folder)


# ---------------------------------------------------------------- a client does not read
BULKY = LONG | {
    "max_tokens": 900,
    "logprobs": True,
    "top_logprobs": 20,
}  # kilobytes per token: no buffer takes all


def check_slow_reader(folder):
    """It is ended when it lags too far behind; its neighbour gets every letter."""
    with serving(folder, running=dict(backlog=16), num_pages=300) as server:
        alone = well(server)
        slow = Wire(server.url, room=4096).post(CHAT, BULKY)
        until(lambda: server.engine.outputs, "the slow reader to begin")
        (output,) = server.engine.outputs.values()
        assert well_beside(server) == alone
        until(lambda: output.finished, "the slow reader to be ended")
        assert output.finish_reason == "abort" and len(output.tokens) < 900
        at_rest(server.serving)
        *_, last = slow.events()  # whoever reads on learns why
        assert "not read" in json.loads(last)["error"]["message"]
        slow.close()


def well_beside(server) -> str:
    return chat(server.url, max_tokens=6).json["choices"][0]["message"]["content"]


def check_stalled_reader(folder):
    """Also where the backlog is large: who takes nothing for long enough loses the connection."""
    with serving(folder, limits=Limits(stall_seconds=0.5), num_pages=300) as server:
        slow = Wire(server.url, room=4096).post(CHAT, BULKY)
        until(lambda: server.engine.outputs, "the slow reader to begin")
        at_rest(server.serving)
        until(lambda: not server.server.server_state.connections, "its connection to be closed")
        slow.close()
        well(server)


def check_slow_sender(folder):
    with serving(folder, limits=Limits(body_seconds=0.3)) as server, Wire(server.url) as wire:
        wire.send(request(server.url, CHAT, LONG)[:-5])
        assert wire.answer().status == 408
        well(server)


def check_slow_head(folder):
    """Who begins no request, or does not end its head, is closed: at once, late, or after an answer. Others are not."""
    whole = request("here", CHAT, HELLO | {"max_tokens": 3})
    with serving(folder) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving_world.HTTP["http"], "head_seconds", 1.0)
        body = Wire(server.url).send(whole[:-5])
        again = Wire(server.url).send(whole)
        assert again.answer().status == 200
        again.send(whole[:20])
        begun, silent = Wire(server.url).send(whole[:30]), Wire(server.url)
        assert [wire.file.read() for wire in (silent, begun, again)] == [b""] * 3
        assert body.send(whole[-5:]).answer().status == 200
        for wire in (silent, begun, again, body):
            wire.close()
        with Wire(server.url) as trickle, pytest.raises(OSError):  # a byte now and then does not put it off
            for at in range(len(whole)):
                trickle.send(whole[at : at + 1])
                time.sleep(0.03)
        well(server)


def check_outlives_its_head(folder):
    """The limit is on a head: an answer may take longer."""
    with serving(folder) as server, Gate(server.engine) as gate, pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving_world.HTTP["http"], "head_seconds", 0.5)
        (wire,) = asked(server, max_tokens=6)
        gate.reached()
        time.sleep(1.2)
        gate.let(10_000)
        assert streamed(wire.events())[1] == {0: "length"}
        wire.close()


@pytest.mark.parametrize(
    "check",
    [check_slow_reader, check_stalled_reader, check_slow_sender, check_slow_head, check_outlives_its_head],
)
def test_who_does_not_keep_up(folder, check):
    check(folder)


# ---------------------------------------------------------------- many at once
def check_burst(folder, number=200):
    """All are served to their end, each with the text it gets alone; then the pool is full again."""
    prompts = [f"number {i}" for i in range(8)]
    bodies = [
        LONG | {"max_tokens": 6, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts
    ]
    with serving(folder, max_waiting=number, max_running=16) as server:
        alone = [
            post(server.url, CHAT, b | {"stream": False}).json["choices"][0]["message"]["content"]
            for b in bodies
        ]
        assert len(set(alone)) > 4
        answers = asyncio.run(all_at_once(server.url, [bodies[i % 8] for i in range(number)]))
        for i, events in enumerate(answers):
            texts, ends, _ = streamed(iter(events))
            assert texts == {0: alone[i % 8]} and ends == {0: "length"}, i
        at_rest(server.serving)


async def all_at_once(url: str, bodies: list[dict]) -> list[list[str]]:
    """The events of many streams that are open at the same time."""
    where, opened = urlsplit(url), asyncio.Barrier(len(bodies))

    async def one(body):
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        await opened.wait()
        writer.write(request(where.netloc, CHAT, body, Connection="close"))
        head, _, raw = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200"), head
        return [line[6:].decode() for line in raw.split(b"\n") if line.startswith(b"data: ")]

    async with asyncio.timeout(fault_world.SECONDS):
        return await asyncio.gather(*map(one, bodies))


def check_full_queue(folder):
    """Who does not fit is told when to come again; who was let in is served."""
    with serving(folder, max_waiting=3) as server, Gate(server.engine) as gate:
        first = asked(server, max_tokens=6)
        gate.reached()
        others = asked(server, number=9, max_tokens=6)
        until(lambda: len(server.serving._between) == 9, "them to be at the door")
        gate.let(10_000)
        served, refused = 0, 0
        for wire in first + others:
            status, headers = wire.head()
            served += status == 200
            if status != 200:
                assert status == 429 and int(headers["retry-after"]) >= 1, (status, headers)
                error = json.loads(wire.file.read(int(headers["content-length"])))["error"]
                assert error["type"] == "rate_limit_error" and "3 requests wait" in error["message"]
                refused += 1
            else:
                assert b"data: [DONE]" in b"".join(wire._chunks())
            wire.close()
        assert (served, refused) == (4, 6)
        at_rest(server.serving)


def check_mixed_day(folder, seed, number=120):
    """Clients of every kind come, stay or leave as they like, in a pool too small for all. Nothing of them is left."""
    with serving(folder, num_pages=150, max_running=8, max_waiting=60) as server:
        alone = well(server)
        asyncio.run(day(server.url, random.Random(seed), number))
        at_rest(server.serving)
        assert well(server) == alone


async def day(url: str, rng: random.Random, number: int) -> None:
    where, words = urlsplit(url), [("why " * rng.randrange(1, 40)) for _ in range(9)]

    async def one(body, arrival, patience):
        await asyncio.sleep(arrival)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        raw = request(where.netloc, CHAT, body, Connection="close")
        writer.write(raw if patience is None or patience > 0.02 else raw[:-9])
        try:
            answer = await asyncio.wait_for(reader.read(), patience or fault_world.SECONDS)
        except TimeoutError:
            assert patience is not None, "it waits for ever"
            return writer.transport.abort()
        writer.close()
        status = answer[9:12]
        assert status in (b"200", b"429") or (status == b"504" and "timeout" in body), answer
        whole = answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") or b'"error":{' in answer
        assert whole or not body["stream"] or status != b"200", answer[-200:]

    async with asyncio.TaskGroup() as group:
        for _ in range(number):
            body = HELLO | dict(
                messages=[{"role": "user", "content": rng.choice(words)}], max_tokens=rng.choice([1, 3, 20, 100]),
                n=rng.choice([1, 1, 2, 3]), stream=rng.random() < 0.7, priority=rng.randrange(-2, 3),
                temperature=rng.choice([0, 2]), logprobs=rng.random() < 0.3,
            ) | rng.choice([{}, {}, {"stop": ["a", "e"]}, {"timeout": rng.choice([1e-4, 0.05, 0.2])}])  # fmt: skip
            group.create_task(one(body, 2 * rng.random(), rng.choice([None, None, 0.01, 0.1, 0.5])))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_mixed_day(folder, seed):
    check_mixed_day(folder, seed)


@pytest.mark.parametrize("check", [check_burst, check_full_queue])
def test_many_at_once(folder, check):
    check(folder)


# ---------------------------------------------------------------- the engine fails
POISON = 300  # a token that a faulty part cannot stand


def faulty_model(engine):
    compute = engine.compute

    def faulty(batch):
        if (batch.ids == POISON).any():
            raise RuntimeError("injected")
        return compute(batch)

    engine.compute = faulty


def faulty_sampler(engine):
    class Sampler:
        right = engine.sampler

        def __getattr__(self, name):
            return getattr(self.right, name)

        def __call__(self, logits, seats, *rest):
            poisoned = [r.seat for r in engine.scheduler.running if POISON in r.prompt]
            if set(poisoned) & set(seats.tolist()):
                raise RuntimeError("injected")
            return self.right(logits, seats, *rest)

    engine.sampler = Sampler()


def check_one_request_fails(folder, break_it=faulty_model):
    """It gets the error, streamed or whole; those that run beside it do not notice."""
    with serving(folder) as server, Gate(server.engine) as gate:
        break_it(server.engine)
        first = asked(server, max_tokens=6)
        gate.reached()
        bad = {"prompt": [5, POISON, 6], "max_tokens": 6, "temperature": 0}
        bad = [Wire(server.url).post("/v1/completions", bad | {"stream": stream}) for stream in (True, False)]
        others = asked(server, max_tokens=6)
        until(lambda: len(server.serving._between) == 3, "them to be at the door")
        gate.let(10_000)
        (event,) = bad[0].events()
        answer = bad[1].answer()
        assert answer.status == 500
        for error in (json.loads(event)["error"], answer.error):
            assert error["type"] == "server_error" and "injected" in error["message"]
        texts = [streamed(wire.events())[0] for wire in first + others]
        for wire in first + bad + others:
            wire.close()
        assert texts == [{0: well(server)}] * 2
        assert get(server.url, "/health").status == 200


def check_engine_breaks(folder, close_fails=False):
    """Nobody's request is at fault: everybody is told, the queue as well, and later ones at once. Never silent."""
    with serving(folder) as server, Gate(server.engine) as gate:
        streams = asked(server)
        gate.reached()
        streams += asked(server, number=5)  # one of them will be waiting
        whole = asked(server, stream=False)
        until(lambda: len(server.serving._between) == 6, "them to be at the door")
        gate.let(2)
        gate.passed(2)
        gate.reached()
        (late,) = asked(server)
        noticed(server)

        def broken(*_):
            raise RuntimeError("lost count")

        right = server.engine.close
        server.engine.scheduler.schedule = broken
        if close_fails:
            server.engine.close = broken
        gate.let(1)
        for wire in [*streams, late]:
            *_, last = wire.events()
            assert "lost count" in json.loads(last)["error"]["message"]
        answer = whole[0].answer()
        assert answer.status == 500 and "lost count" in answer.error["message"]
        for answer in (chat(server.url), chat(server.url, stream=True)):
            assert answer.status == 503 and "lost count" in answer.error["message"]
        assert get(server.url, "/health").status == 503
        assert get(server.url, "/stats").json["healthy"] is False
        assert get(server.url, "/metrics").status == 200
        for wire in streams + whole + [late]:
            wire.close()
        if close_fails:
            right()
        at_rest(server.serving)


def check_engine_hangs(folder):
    """A step that does not come back raises nothing: after its time everybody is told all the same."""
    with serving(folder, running=dict(step_seconds=0.3)) as server:
        well(server)
        hung, end = threading.Event(), threading.Event()
        right = server.engine.compute

        def hangs(*args):
            hung.set()
            assert end.wait(2 * fault_world.SECONDS)
            return right(*args)

        server.engine.compute = hangs
        try:
            streams = asked(server)
            assert hung.wait(fault_world.SECONDS)
            streams += asked(server, number=2)
            for wire in streams:
                *_, last = wire.events()
                assert "hangs" in json.loads(last)["error"]["message"]
                wire.close()
            answer = chat(server.url)
            assert answer.status == 503 and "hangs" in answer.error["message"]
            assert get(server.url, "/health").status == 503
        finally:
            end.set()


def check_answer_cannot_be_told(folder):
    """Trouble after the engine, while an answer is put into words: an error too, and nobody else's."""
    with serving(folder) as server, pytest.MonkeyPatch.context() as patch:

        def broken(*_):
            raise RuntimeError("no words")

        patch.setattr(replies.ChatPieces, "_entries", broken)
        alone = well(server)
        (wire,) = asked(server, max_tokens=6, logprobs=True)
        *_, last = wire.events()
        assert json.loads(last)["error"]["type"] == "server_error"
        answer = chat(server.url, max_tokens=6, logprobs=True)
        assert answer.status == 500 and answer.error["type"] == "server_error"
        wire.close()
        assert well(server) == alone


@pytest.mark.parametrize("break_it", [faulty_model, faulty_sampler])
def test_one_failing_request_fails_alone(folder, break_it):
    check_one_request_fails(folder, break_it)


@pytest.mark.parametrize("close_fails", [False, True])
def test_an_engine_that_breaks_tells_everybody(folder, close_fails):
    check_engine_breaks(folder, close_fails)


def test_an_engine_that_hangs_tells_everybody(folder):
    check_engine_hangs(folder)


def test_an_answer_that_cannot_be_told(folder):
    check_answer_cannot_be_told(folder)


# ---------------------------------------------------------------- the end of a process
MINE = "--served-model-name mine --max-running 2".split()


def check_drains(folder):
    """SIGTERM: who is being served is served to the end, nobody new is let in, and the command ends with 0."""
    with serve_process(folder, "--drain-seconds", "600", "--num-pages", "1000", *MINE) as server:
        wire = Wire(server.url).post(CHAT, LONG | {"max_tokens": 3000, "model": "mine"})
        events = wire.events()
        begun = [next(events) for _ in range(3)]
        server.process.send_signal(signal.SIGTERM)
        until(lambda: get(server.url, "/health").status == 503, "the server to drain")
        answer = chat(server.url, max_tokens=1)
        assert answer.status == 503 and "shutting down" in answer.error["message"]
        assert "retry-after" in answer.headers
        _, ends, chunks = streamed(iter(begun + list(events)))
        assert ends == {0: "length"} and len(chunks) > 1000
        wire.close()
        assert server.process.wait(fault_world.SECONDS) == 0, "".join(server.errors)
        assert "Traceback" not in "".join(server.errors)


def check_deadline(folder, *signals, drain="0.2", tokens=7000):
    """Past the deadline, or told twice: what is left is aborted, and the command ends with 0 all the same."""
    with serve_process(folder, "--drain-seconds", drain, "--num-pages", "1000") as server:
        wire = Wire(server.url).post(CHAT, LONG | {"max_tokens": tokens, "n": 2})
        stalled = Wire(server.url, room=4096).post(
            CHAT, BULKY | {"max_tokens": min(5000, tokens)}
        )  # and one that reads nothing
        events = wire.events()
        for _ in range(3):
            next(events)
        for i, each in enumerate(signals):
            server.process.send_signal(each)
            if i + 1 < len(signals):
                until(lambda: get(server.url, "/health").status == 503, "the server to drain")
        *_, last = events
        assert "shutting down" in json.loads(last)["error"]["message"]
        wire.close()
        assert server.process.wait(fault_world.SECONDS) == 0, "".join(server.errors)
        stalled.close()


HANGS = (
    "engine.py",
    "= self.compute(batch)",
    "= self.compute(batch) if len(self.log) < 5 else time.sleep(1e6)",
)


def check_hung_process(folder):
    """HANGS is planted: everybody is told, and SIGTERM ends even a command whose engine never comes back, with 1."""
    with serve_process(folder, "--step-seconds", "2") as server:
        with Wire(server.url).post(CHAT, LONG) as wire:
            *begun, last = wire.events()
            assert len(begun) > 3 and "hangs" in json.loads(last)["error"]["message"]
        assert get(server.url, "/health").status == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(fault_world.SECONDS) == 1, "".join(server.errors)
        assert "hangs" in "".join(server.errors)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to be caught")
def test_a_process_whose_engine_hangs_ends(folder, package_copy):
    plant(package_copy, *HANGS)
    check_hung_process(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to be caught")
def test_sigterm_lets_answers_end(folder):
    check_drains(folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to be caught")
@pytest.mark.parametrize(
    "signals, drain",
    [
        ((signal.SIGTERM,), "0.2"),
        ((signal.SIGTERM, signal.SIGTERM), "600"),
        ((signal.SIGINT, signal.SIGINT), "600"),
    ],
    ids=["deadline", "twice", "Ctrl-C twice"],
)
def test_the_deadline_of_a_drain(folder, signals, drain):
    check_deadline(folder, *signals, drain=drain)
