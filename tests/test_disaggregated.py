"""Two servers that look like one: the same answers, also where either half is late, deaf or dead."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from disaggregated_world import disaggregated, proxy_in_thread
from fault_world import CHAT, SECONDS, Gate, Wire, at_rest, get, post, streamed, until
from serving_world import serve_in_thread, serve_process, tiny_engine, tiny_folder

from minserve.cluster.file_connector import FileConnector
from minserve.cluster.handover import first_half, is_divisible, made_there, second_half
from minserve.cluster.inbox import InProcess
from minserve.cluster.link import Link
from minserve.request import SamplingParams

TEXT = "/v1/completions"
SKY = "the sky is blue because the air scatters"
IDS = [(7 * i * i + 3) % 250 + 5 for i in range(200)]
GREEDY = {"prompt": SKY, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 1, "seed": 7, "frequency_penalty": 0.5, "presence_penalty": 0.5,
                    "repetition_penalty": 1.2}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("disaggregated") / "tiny")


@pytest.fixture(scope="module")
def one(folder):
    with serve_in_thread(tiny_engine(folder)) as server:
        yield server


@pytest.fixture(scope="module", params=["whole, in process", "layer, through files"])
def two(request, folder, tmp_path_factory):
    mode, how = request.param.split(", ")
    ends = None
    if how == "through files":
        where, roles = tmp_path_factory.mktemp("kv"), ("kv_producer", "kv_consumer")
        ends = [FileConnector(where, mode=mode, lease=SECONDS, role=role) for role in roles]
    with disaggregated(folder, ends or InProcess.pair(mode=mode, lease=SECONDS)) as its:
        yield its


def told(answer) -> dict:
    """What an answer says, without its own id and time."""
    assert answer.status == 200, answer
    kept = {name: value for name, value in answer.json.items() if name not in ("id", "created")}
    kept["usage"] = {name: kept["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return rounded(kept)


def rounded(said):
    """Logprobs of a token that is computed alone differ in their last digit from those of a chunk."""
    if isinstance(said, dict):
        return {name: rounded(value) for name, value in said.items()}
    if isinstance(said, list):
        return [rounded(value) for value in said]
    return round(said, 4) if isinstance(said, float) else said


def both(its, one, path, body, divided=True):
    """The same answer from two as from one, whole and as a stream."""
    before = its.proxy.divided
    alone = told(post(one.url, path, body))
    assert told(post(its.url, path, body)) == alone
    with Wire(its.url) as wire:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        texts, ends, chunks = streamed(wire.post(path, body | options).events())
    said = [choice.get("text", choice.get("message", {}).get("content")) for choice in alone["choices"]]
    assert [texts[i] for i in range(len(said))] == said
    assert [ends[i] for i in range(len(said))] == [choice["finish_reason"] for choice in alone["choices"]]
    usage = chunks[-1]["usage"]
    assert {name: usage[name] for name in alone["usage"]} == alone["usage"]
    assert its.proxy.divided - before == 2 * divided
    return alone


# ---------------------------------------------------------------- the same answers
@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 17, 64, 65, 200])
@pytest.mark.parametrize("asked", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_prompts_of_every_length(two, one, asked, n):
    both(two, one, TEXT, asked | {"prompt": IDS[:n], "cache_salt": f"{n}{asked['temperature']}"})


def test_the_prompt_is_computed_there_and_not_here(two):
    post(two.url, TEXT, GREEDY | {"prompt": IDS[:150], "cache_salt": "new"})
    rows = [row for record in two.decode.engine.log for row in record.rows if row.computed >= 150]
    assert rows[-1].num_tokens == 1
    last = rows[-1].request
    mine = [row for record in two.decode.engine.log for row in record.rows if row.request == last]
    assert min(row.computed for row in mine) == 150 and all(row.num_tokens == 1 for row in mine)
    assert two.prefill.engine.log[-1].rows[-1].request != last or len(two.prefill.engine.log)


def test_chats(two, one):
    said = both(two, one, CHAT, SAMPLED | {"messages": [{"role": "user", "content": SKY}], "prompt": None})
    assert said["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"logprobs": 3},
        {"logprobs": 0, "max_tokens": 1},
        {"ignore_eos": False, "logit_bias": {"2": 100}},  # the end token, first of all
        {"ignore_eos": False, "logit_bias": {"2": 100}, "min_tokens": 4},
        {"ignore_eos": False, "logit_bias": {"2": 100}, "min_tokens": 1},
        {"max_completion_tokens": 5},
        {"n": 1, "user": "somebody", "stream_options": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("asked", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_first_tokens_neither_lost_nor_doubled(two, one, asked, more):
    both(two, one, TEXT, asked | more)


@pytest.mark.parametrize("where", [(0, 1), (0, 3), (1, 3), (4, 6)])
def test_stop_strings_that_the_first_token_begins_or_completes(two, one, where):
    text = told(post(one.url, TEXT, GREEDY))["choices"][0]["text"]
    said = both(two, one, TEXT, GREEDY | {"stop": text[slice(*where)]})
    assert said["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("form", [{"choice": ["blue", "black"]}, {"regex": "[ab]{3,9}c"}], ids=str)
def test_answers_of_a_form(two, one, form):
    pytest.importorskip("llguidance")
    for asked in (GREEDY, SAMPLED):
        said = both(two, one, TEXT, asked | {"structured_outputs": form, "ignore_eos": False})
        assert said["choices"][0]["text"][0] in "ab"


def test_one_server_that_is_no_half_ignores_what_halves_say(one):
    for given in (
        {"do_remote_decode": True, "transfer_id": "a"},
        {"do_remote_prefill": True, "transfer_id": "a"},
    ):
        answer = post(one.url, TEXT, GREEDY | {"kv_transfer_params": given})
        assert told(answer) == told(post(one.url, TEXT, GREEDY)) and "kv_transfer_params" not in answer.json


def test_the_logprobs_of_a_chat(two, one):
    asked = {"messages": [{"role": "user", "content": SKY}], "logprobs": True, "top_logprobs": 2}
    said = both(two, one, CHAT, asked | {"max_tokens": 5, "temperature": 0, "ignore_eos": True})
    assert len(said["choices"][0]["logprobs"]["content"]) == 5


@pytest.mark.parametrize(
    "more", [{"n": 2, "seed": 3}, {"prompt": [SKY, "hello"]}, {"prompt": [IDS[:9]]}, {"echo": True}], ids=str
)
def test_what_is_not_divided(two, one, more):
    both(two, one, TEXT, SAMPLED | more, divided=False)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"null",
        {"prompt": ""},
        {"prompt": SKY, "max_tokens": -1},
        {"prompt": SKY, "temperature": 7},
        {"prompt": SKY, "model": "another"},
        {"prompt": [9999], "max_tokens": 2},
        {"prompt": SKY, "n": 0},
    ],
    ids=str,
)
def test_errors_are_those_of_one_server(two, one, body):
    ours, theirs = post(two.url, TEXT, body), post(one.url, TEXT, body)
    assert (ours.status, ours.json) == (theirs.status, theirs.json)


def test_hits_are_not_invented(two):
    prompt = IDS[50:91]
    for expected in (0, 40):  # the second time the decode server knows its pages
        answer = post(two.url, TEXT, GREEDY | {"prompt": prompt, "cache_salt": "hits"}).json
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected


def test_many_clients_at_once(two, one):
    bodies = [SAMPLED | {"prompt": IDS[i : i + 20 + 9 * i], "seed": i} for i in range(8)]
    answers: dict[int, dict] = {}

    def client(i):
        answers[i] = told(post(two.url, TEXT, bodies[i]))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SECONDS)
    assert answers == {i: told(post(one.url, TEXT, bodies[i])) for i in range(8)}


def test_other_paths_are_the_decode_server_s(two):
    assert get(two.url, "/v1/models").json == get(two.decode.url, "/v1/models").json
    assert get(two.url, "/health").status == 200
    said = post(two.url, "/tokenize", {"prompt": SKY}).json
    assert said == post(two.decode.url, "/tokenize", {"prompt": SKY}).json


def test_a_client_cannot_name_somebody_else_s_keys(two, one):
    theirs = {"do_remote_prefill": True, "transfer_id": "somebody", "token_ids": [7], "num_tokens": 3}
    for body in (GREEDY, GREEDY | {"n": 2}):
        asked = body | {"kv_transfer_params": theirs}
        assert told(post(two.url, TEXT, asked)) == told(post(one.url, TEXT, body))


@pytest.mark.parametrize(
    "given",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "transfer_id": "../../etc/passwd"},
        {"do_remote_prefill": True, "transfer_id": "a", "token_ids": [99999]},
        {"do_remote_prefill": True, "transfer_id": "a", "token_ids": "7"},
        {"do_remote_prefill": True, "transfer_id": "a", "token_ids": [True]},
    ],
    ids=str,
)
def test_nonsense_is_refused_by_the_servers(two, given):
    answer = post(two.decode.url, TEXT, GREEDY | {"kv_transfer_params": given})
    assert answer.status == 400 and answer.error["param"] == "kv_transfer_params"


# ---------------------------------------------------------------- pure: what is divided, and how
def test_what_the_halves_are_asked():
    asked = {"prompt": "a", "max_completion_tokens": 9, "min_tokens": 5, "stream": True, "seed": 1}
    first = first_half(asked, "key")
    assert first == {"prompt": "a", "min_tokens": 1, "seed": 1, "max_tokens": 1,
                     "kv_transfer_params": {"do_remote_decode": True, "transfer_id": "key"}}  # fmt: skip
    said = {"do_remote_prefill": True, "transfer_id": "key", "token_ids": [3], "num_tokens": 1}
    assert second_half(asked, {"kv_transfer_params": said}) == asked | {"kv_transfer_params": said}
    for nothing in (None, {}, [], {"kv_transfer_params": None}, {"kv_transfer_params": "x"}):
        assert second_half(asked, nothing) is asked
    assert (
        is_divisible({"messages": []}) and is_divisible({"prompt": [1, 2]}) and is_divisible({"prompt": "a"})
    )
    for whole in (
        {"prompt": ["a"]},
        {"prompt": [[1]]},
        {"prompt": "a", "n": 2},
        {"prompt": ""},
        {},
        [],
        None,
        7,
    ):
        assert not is_divisible(whole)


def test_which_tokens_are_continued():
    params = SamplingParams(max_tokens=2)
    assert made_there([5], params, 10) == [5]
    assert made_there([5], SamplingParams(), 10) == [5]
    assert made_there([5], SamplingParams(max_tokens=1), 10) == []
    assert made_there([5, 6], params, 10) == []
    assert made_there([5], SamplingParams(max_tokens=2, logprobs=0), 10) == []


# ---------------------------------------------------------------- late, deaf, gone
def test_a_prefill_server_that_is_full_or_gone(folder, one):
    with disaggregated(folder) as its:
        its.prefill.serving.draining = True
        assert told(post(its.url, TEXT, GREEDY)) == told(post(one.url, TEXT, GREEDY))
        its.prefill.serving.draining = False
        its.proxy.prefill = "http://127.0.0.1:9"  # nobody is there
        assert told(post(its.url, TEXT, GREEDY)) == told(post(one.url, TEXT, GREEDY))
        told_of = get(its.url, "/stats").json
        assert (told_of["divided"], told_of["undivided"], told_of["requests"]["finished"]) == (0, 2, 2)


def test_a_prefill_server_that_hangs(folder, one):
    with disaggregated(folder, InProcess.pair(mode="layer", lease=0.5)) as its:
        its.proxy.patience = 0.2
        with Gate(its.prefill.engine):
            assert told(post(its.url, TEXT, GREEDY)) == told(post(one.url, TEXT, GREEDY))
        at_rest(its.prefill.serving)  # it was told that nobody waits


@pytest.mark.parametrize("lost", ["all", "the last", "the second, for another"])
def test_messages_that_never_come(folder, one, lost):
    with disaggregated(folder, InProcess.pair(mode="layer", lease=0.3)) as its:
        put = its.producer.put
        wanted = {"all": lambda part: False, "the last": lambda part: part.layer == 0}

        def other(part):
            return put(part if part.layer == 0 else type(part)(**vars(part) | {"prompt": "another"}))

        its.producer.put = (
            other if lost not in wanted else lambda part: put(part) if wanted[lost](part) else None
        )
        assert told(post(its.url, TEXT, SAMPLED)) == told(post(one.url, TEXT, SAMPLED))
        assert its.proxy.divided == 1


def test_messages_that_come_twice_and_again_when_all_is_over(folder, one):
    with disaggregated(folder, InProcess.pair(mode="layer", lease=SECONDS)) as its:
        kept, put = [], its.producer.put

        def twice(part):
            kept.append(part)
            put(part), put(part)

        its.producer.put = twice
        assert told(post(its.url, TEXT, SAMPLED)) == told(post(one.url, TEXT, SAMPLED))
        for part in kept:
            put(part)
        assert len(its.consumer.inbox) == 0


def test_a_hand_over_that_is_asked_for_twice(folder, one):
    with disaggregated(folder, prefix_caching=False) as its:
        first = first_half(SAMPLED, "key")
        said = post(its.prefill.url, TEXT, first).json["kv_transfer_params"]
        body = SAMPLED | {"kv_transfer_params": said}
        alone = told(post(one.url, TEXT, SAMPLED))
        assert told(post(its.decode.url, TEXT, body)) == alone
        assert told(post(its.decode.url, TEXT, body)) == alone  # computed here, at once


def test_preempted_after_the_transfer(folder, one):
    """Two answers that outgrow the pool: one gives way, and computes again what once was brought."""
    bodies = [SAMPLED | {"prompt": IDS[i : i + 36], "max_tokens": 40, "seed": i} for i in range(3)]
    with disaggregated(folder, num_pages=16, prefix_caching=False) as its:
        answers = {}
        with Gate(its.decode.engine) as gate:
            threads = [
                threading.Thread(target=lambda i=i: answers.update({i: told(post(its.url, TEXT, bodies[i]))}))
                for i in range(3)
            ]
            for thread in threads:
                thread.start()
            serving = its.decode.serving
            until(lambda: len(serving.engine.outputs) + len(serving._between) == 3, "all three to be there")
            assert gate.steps == 0
        for thread in threads:
            thread.join(SECONDS)
        assert its.decode.engine.scheduler.preemptions > 0
        assert answers == {i: told(post(one.url, TEXT, bodies[i])) for i in range(3)}


LONG = GREEDY | {"prompt": IDS, "max_tokens": 100, "stream": True}


def test_a_client_that_leaves_while_its_prompt_is_computed(folder):
    with disaggregated(folder) as its, Gate(its.prefill.engine) as gate:
        wire = Wire(its.url).post(TEXT, LONG)
        gate.let(1)
        gate.passed(1)
        gate.reached()
        wire.close(reset=True)
        until(lambda: its.prefill.serving._between, "the prefill server to notice")
        gate.let(100)
        at_rest(its.prefill.serving)
        assert not its.decode.engine.log and its.proxy.pool.ongoing == 0


def test_a_client_that_leaves_during_the_transfer(folder):
    slow = InProcess.pair(mode="layer", lease=SECONDS, link=Link(latency=0.5))
    with disaggregated(folder, slow) as its:
        wire = Wire(its.url).post(TEXT, LONG)
        until(lambda: its.proxy.divided, "the hand-over")
        until(lambda: its.proxy.pool.ongoing, "the decode server to be asked")
        wire.close(reset=True)
        until(lambda: its.proxy.pool.ongoing == 0 and its.consumer.inbox._dropped, "it to be given up")
        assert len(its.consumer.inbox) == 0 and not its.decode.engine.log


def test_a_client_that_leaves_after_the_transfer(folder):
    with disaggregated(folder) as its, Gate(its.decode.engine) as gate:
        wire = Wire(its.url).post(TEXT, LONG)
        gate.reached()
        wire.close(reset=True)
        until(lambda: its.decode.serving._between, "the decode server to notice")
        gate.let(1)
        at_rest(its.decode.serving)


# ---------------------------------------------------------------- real processes
SIZES = "--num-pages 96 --page-size 8 --token-budget 64 --max-running 4".split()


@pytest.mark.slow
def test_the_command(folder, one):
    options = "--kv-connector gloo --kv-mode layer".split()
    command = [sys.executable, "-m", "minserve", "disaggregate", "--port", "0", *options, "--",
               "--model", str(folder), "--served-model-name", "tiny", *SIZES]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    line = []
    reader = threading.Thread(target=lambda: line.append(process.stdout.readline()), daemon=True)
    reader.start()
    try:
        reader.join(120)
        assert line and line[0].startswith("minserve: disaggregated at http://127.0.0.1:"), line
        url = line[0].split(" at ")[1].strip()
        for body in (GREEDY, SAMPLED, SAMPLED | {"prompt": IDS}):
            assert told(post(url, TEXT, body)) == told(post(one.url, TEXT, body))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(SECONDS)
        process.stdout.close()


@contextmanager
def processes(folder, where, connector, *options):
    """Both servers as processes, with a link that takes seconds; the proxy here."""
    usual = ["--kv-connector", connector, "--kv-path", str(where / "meet"), "--kv-lease", "2",
             "--served-model-name", "tiny", *SIZES, *options]  # fmt: skip
    servers, threads = {}, []
    with ExitStack() as stack:

        def start(role):
            servers[role] = stack.enter_context(serve_process(folder, "--kv-role", role, *usual))

        for role in ("kv_producer", "kv_consumer"):
            threads.append(threading.Thread(target=start, args=(role,)))
            threads[-1].start()
        for thread in threads:
            thread.join(120)
        prefill, decode = servers["kv_producer"], servers["kv_consumer"]
        front = stack.enter_context(proxy_in_thread(prefill.url, decode.url))
        yield SimpleNamespace(url=front.url, proxy=front.proxy, prefill=prefill, decode=decode)


def all_pages_back(url: str) -> None:
    until(lambda: get(url, "/stats").json["pages"]["in_use"] == 0, "the pages to come back")


def in_flight(its, body) -> tuple[threading.Thread, list]:
    """Ask, and return as soon as keys and values are under way."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(post(its.url, TEXT, body)))
    thread.start()
    until(lambda: its.proxy.divided and its.proxy.pool.ongoing, "the hand-over")
    return thread, answers


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["file", "gloo"])
def test_the_prefill_server_is_killed_while_keys_and_values_travel(folder, one, tmp_path, connector):
    options = "--kv-mode layer --kv-latency 1.5".split()
    with processes(folder, tmp_path, connector, *options) as its:
        body = SAMPLED | {"prompt": IDS}
        thread, answers = in_flight(its, body)
        os.kill(its.prefill.process.pid, signal.SIGKILL)
        thread.join(3 * SECONDS)
        assert told(answers[0]) == told(post(one.url, TEXT, body))  # computed by who is left
        start = time.monotonic()
        assert told(post(its.url, TEXT, SAMPLED)) == told(post(one.url, TEXT, SAMPLED))
        assert time.monotonic() - start < SECONDS
        all_pages_back(its.decode.url)


@pytest.mark.slow
def test_the_decode_server_is_killed_while_keys_and_values_travel(folder, one, tmp_path):
    options = "--kv-mode layer --kv-latency 1.5".split()
    with processes(folder, tmp_path, "gloo", *options) as its:
        thread, answers = in_flight(its, SAMPLED | {"prompt": IDS})
        os.kill(its.decode.process.pid, signal.SIGKILL)
        thread.join(3 * SECONDS)
        assert answers[0].status in (502, 503) and answers[0].error["type"] == "server_error"
        all_pages_back(its.prefill.url)
        asked = first_half(SAMPLED | {"prompt": IDS}, "later")  # it still computes what it is asked
        assert post(its.prefill.url, TEXT, asked).status == 200
        assert told(post(its.prefill.url, TEXT, SAMPLED)) == told(post(one.url, TEXT, SAMPLED))
        all_pages_back(its.prefill.url)
