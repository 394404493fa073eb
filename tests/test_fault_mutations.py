"""The tests of a server's faults can fail: each wrong server below, put in its place, turns one of them red."""

import functools
import importlib
import time
from functools import partial

import fault_world
import pytest
import serving_world
import test_server_faults as faults
import test_server_fuzz as fuzz
import test_server_wire as wire
from serving_world import serve_in_thread, tiny_folder
from wrong_versions import plant, wrong_version

from minserve import server
from minserve.server import front

KINDS = AssertionError, ConnectionError, TimeoutError, KeyError, ValueError, pytest.fail.Exception


def wired(test, *args):
    """One of the tests of the wire, with a server of its own."""

    def check(folder):
        with serve_in_thread(folder) as served:
            served.eos = min(served.engine.tokenizer.eos_token_ids)
            test(served, *args)

    return check


CHECKS = {
    "body": faults.check_leaves_before_its_body,
    "door": faults.check_leaves_at_the_door,
    "queue": faults.check_leaves_the_queue,
    "whole": partial(faults.check_leaves_the_queue, stream=False),
    "prefill": faults.check_leaves_in_its_prefill,
    "stream": faults.check_leaves_while_it_streams,
    "n": partial(faults.check_leaves_while_it_streams, n=3),
    "done": faults.check_leaves_before_done,
    "slow": faults.check_slow_reader,
    "stalled": faults.check_stalled_reader,
    "sender": faults.check_slow_sender,
    "head": faults.check_slow_head,
    "outlives": faults.check_outlives_its_head,
    "burst": partial(faults.check_burst, number=40),
    "full": faults.check_full_queue,
    "one": faults.check_one_request_fails,
    "sampler": partial(faults.check_one_request_fails, break_it=faults.faulty_sampler),
    "breaks": faults.check_engine_breaks,
    "close": partial(faults.check_engine_breaks, close_fails=True),
    "hangs": faults.check_engine_hangs,
    "told": faults.check_answer_cannot_be_told,
    "bytes": wired(wire.test_every_byte_of_a_stream, *wire.FORMS[0]),
    "usage": wired(wire.test_usage, *wire.FORMS[0], 2, True),
    "error": wired(wire.test_an_error_in_a_stream_is_its_last_event, *wire.FORMS[1]),
    "ends": wired(wire.test_why_an_answer_ended, "a stop string"),
    "choices": wired(wire.test_each_choice_of_a_stream_has_one_beginning_and_one_end),
    "prompts": wired(wire.test_choices_of_several_prompts_are_counted_through),
    "top": wired(wire.test_logprobs_of_a_chat),
    "rank": wired(wire.test_logprobs_of_a_token_that_is_not_among_the_best),
    "echo": wired(wire.test_echo_scores_a_prompt_that_is_cached_as_one_that_is_not),
    "refusals": wired(
        wire.test_errors_have_a_status_and_name_the_field, *wire.FORMS[0], True, *wire.ERRORS[1]
    ),
    "elsewhere": wired(wire.test_errors_of_the_wire),
    "fuzz": partial(fuzz.check_fuzz, numbers=range(210)),
    "raw": fuzz.check_raw,
    "forms": fuzz.check_forms,
    "upgrade": fuzz.test_an_upgrade_that_is_offered_and_not_taken_leaves_the_body_alone,
}
WRONG = [  # module, right, wrong, who must notice
    ("server.wire", "self.stream_response(patient), left(receive))", "self.stream_response(patient))", "stream"),
    ("server.wire", "self.stream_response(patient), left(receive))", "self.stream_response(patient))", "queue"),
    ("server.wire", "first_of(work, left(request.receive))", "first_of(work, asyncio.sleep(99))", "whole"),
    ("server.wire", "        for task in tasks:\n            task.cancel()\n", "", "n"),
    ("server.wire", "async with asyncio.timeout(self.patience):", "if True:", "stalled"),
    ("server.wire", "            await cut(receive)\n", "", "stalled"),
    ("server.wire", "async with asyncio.timeout(limits.body_seconds):", "if True:", "sender"),
    ("server.wire", 'if kind != "application/json":', "if False:", "fuzz"),
    ("server.wire", "if len(raw) > limits.body_bytes:", "if False:", "fuzz"),
    ("server.wire", "ensure_ascii=False, allow_nan=False", "ensure_ascii=True, indent=1", "burst"),
    ("cluster.front", 'http=Protocol, ws="none"', "http=Protocol", "upgrade"),
    ("cluster.front", "call_later(self.head_seconds, transport.abort)", "call_later(1e6, transport.abort)", "head"),
    ("cluster.front", "elif self.late.cancelled():", "elif False:", "head"),
    ("cluster.front", "elif self.late.cancelled():", "elif [self.late.cancel()]:", "head"),
    ("cluster.front", "            self.late.cancel()\n        elif", "            pass\n        elif", "outlives"),
    ("server.front", "429 if isinstance(error, QueueFull) else 503", "503", "full"),
    ("server.front", ", Retry_After=str(self.views.live.patience)", "", "full"),
    ("server.front", "(QueueFull, NotServing) as error", "NotServing as error", "full"),
    ("server.front", 'if reason == "error" or output.error:', "if False:", "one"),
    ("server.front", "        for output in stream.outputs:\n            check_ended(output, stream)\n", "",
     "sampler"),
    ("server.front", "                if not fine:\n                    check_ended(output, stream)\n", "",
     "breaks"),
    ("server.front", "except Exception as error:  # a fault of ours", "except KeyError as error:  # a fault", "told"),
    ("server.front", 'yield b"data: [DONE]\\n\\n"', "pass", "burst"),
    ("server.front", 'if reason == "abort" and stream.lagged:', "if False:", "slow"),
    ("server.front", 'given.strip().encode("latin-1")', "given.strip()", "fuzz"),
    ("server.live", "200 if self.serving.healthy and not self.serving.draining else 503", "200", "breaks"),
    ("server.live", "healthy=serving.healthy", "healthy=True", "breaks"),
    ("server.front", "if isinstance(output.error, GrammarFailed):", "if False:", "forms"),
    ("server.replies", "if output.request.leader is None]", "]", "usage"),
    ("server.replies", '"choices": [], "usage"', '"usage"', "usage"),
    ("server.replies", "ends = [None] * len(choices)", "ends = [output.finish_reason] * len(choices)", "ends"),
    ("server.replies", '[{"index": output.index} | choice', '[{"index": 0} | choice', "choices"),
    ("server.replies", "delta={} if closing else {", 'delta={"role": "assistant"} if closing else {', "choices"),
    ("server.replies", "its.top[: self.alternatives]", "its.top", "top"),
    ("server.replies", "logprob for i, logprob in its.top}", "logprob for i, logprob in its.top[:1]}", "rank"),
    ("server.replies", "[*echo.tokens, *tokens], [*echo.logprobs, *logprobs]", "tokens, logprobs", "echo"),
    ("server.replies", 'self.head["object"] = "chat.completion.chunk"', "pass", "bytes"),
    ("server.front", "last and fine", "last", "error"),
    ("async_engine", "output.index += len(self.told)", "pass", "prompts"),
    ("protocol", "param=self.param", "param=None", "refusals"),
    ("protocol", "except ValidationError as error:", "except KeyError as error:", "fuzz"),
    ("async_engine", "self.engine.abort(stream.outputs)", "self.engine.abort(stream.outputs[:1])", "n"),
    ("async_engine", "self.engine.abort(stream.outputs)", "[]", "prefill"),
    ("async_engine", "self._do(lambda: self._tell(self.engine.abort(stream.outputs)))",
     "self._do(lambda: self.engine.abort(stream.outputs))", "stream"),
    ("async_engine", "if stream.unread > self.backlog and not stream.lagged:", "if False:", "slow"),
    ("async_engine", "                stream.lagged = True\n", "", "slow"),
    ("async_engine", "        self._fresh.pop(output.request.id, None)\n", "", "queue"),
    ("async_engine", "            self.error = error\n", "            pass\n", "breaks"),
    ("async_engine", "output.error = output.error or self.error", "pass", "breaks"),
    ("async_engine", "            self._closed = True\n            await self._clear()\n            self._end_all()\n",
     "            self._closed = True\n", "breaks"),
    ("async_engine", 'stream.put(output, "", True)', "pass", "close"),
    ("async_engine", "        if not self.healthy:\n", "        if False:\n", "breaks"),
    ("async_engine", "timeout=self.step_seconds)", "timeout=None)", "hangs"),
    ("async_engine", "except Exception as refused:", "except ValueError as refused:", "full"),
    ("async_engine", "        self._between.append((operation, done))\n        self._wake.set()\n",
     "        self._between.append((operation, done))\n", "burst"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("wrong") / "tiny", context=8192)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, right, wrong, check", WRONG, ids=[f"{w[3]}: {w[1].strip()[:40]}" for w in WRONG]
)
def test_a_wrong_server_is_noticed(monkeypatch, folder, rightly, module, right, wrong, check):
    seconds = rightly(check)
    made = wrong_version(importlib.import_module(f"minserve.{module}"), right, wrong)
    places = [server, front, serving_world, importlib.import_module("minserve.server.live"), fuzz]
    for name, value in vars(made).items():
        for place in places:
            if (
                not name.startswith("__")
                and getattr(value, "__module__", "") == made.__name__
                or name == "HTTP"
            ):
                if hasattr(place, name):
                    monkeypatch.setattr(place, name, value)
    monkeypatch.setattr(fault_world, "SECONDS", seconds)
    monkeypatch.setattr(serving_world, "PATIENCE", max(8, seconds))
    with pytest.raises(KINDS):
        CHECKS[check](folder)


@pytest.fixture(scope="module")
def rightly(folder):
    """rightly("burst"): how long to wait in that check: as long as the right server needs for all of it, and more."""

    @functools.cache
    def seconds(check):
        start = time.monotonic()
        CHECKS[check](folder)
        return 0.5 + 1.5 * (time.monotonic() - start)

    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_the_right_server_passes(rightly, check):
    """As the tests above need it: what fails there does so neither always nor for want of time."""
    rightly(check)


# ---------------------------------------------------------------- a process
WRONG_ENDS = [  # of the command itself; what must notice, and what is changed: file, right, wrong
    (faults.check_drains, ("cluster/front.py", "            self.draining = asyncio.create_task(self._drain())",
     "            self.should_exit = True")),
    (partial(faults.check_deadline, 15, drain="0.2", tokens=1500),
     ("serve.py", "serving.drain(args.drain_seconds)", "serving.drain(1e9)")),
    (partial(faults.check_deadline, 15, 15, drain="600", tokens=1500),
     ("cluster/front.py", "            self.hurrying = asyncio.create_task(self.hurry())", "            pass")),
    (faults.check_drains, ("serve.py", "    return 0 if server.started else 1", "    return 1")),
    (faults.check_hung_process, ("serve.py", "        os._exit(1)\n", "        return 1\n"), faults.HANGS),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG_ENDS, ids=[wrong[1][1].strip()[:40] for wrong in WRONG_ENDS])
def test_a_wrong_end_is_noticed(monkeypatch, package_copy, folder, wrong):
    check, *changes = wrong
    for change in changes:
        plant(package_copy, *change)
    monkeypatch.setattr(fault_world, "SECONDS", 12)
    with pytest.raises((*KINDS, faults.Expired)):
        check(folder)
