"""Load: who waits for whom, when a token counts, what a run reports, and what happens where no server is."""

import argparse
import asyncio
import json
import statistics
import sys

import load_world
import pytest
from load_world import Refuse, chunk, serving, simulated, usage
from wrong_versions import wrong_version

from minserve import metrics
from minserve.arrivals import Arrival
from minserve.lab import client, generator, load, load_figures, load_report
from minserve.lab.report import Report

EACH_TENTH = [Arrival(i / 10, 8, 1) for i in range(8)]  # eight requests, one each 0.1 s


def one_slot(service=0.5):
    """A server that serves one after the other, `service` seconds each."""
    slot = asyncio.Lock()

    async def send(shot):
        async with slot:
            await asyncio.sleep(service)
        now = asyncio.get_running_loop().time()
        shot.timeline.told(now, 1, "x")
        shot.timeline.ended(now, "stop")

    return send


def e2e(shots):
    return [shot.timeline.e2e for shot in shots]


# ---------------------------------------------------------------- coordinated omission
def test_the_arithmetic_of_one_slot():
    """The k-th is answered at 0.5 (k + 1) and was due at 0.1 k: 0.5 + 0.4 k, on average 1.90, at most 3.30."""
    waits = generator.latencies([a.time for a in EACH_TENTH], 0.5)
    assert waits == pytest.approx([0.5 + 0.4 * k for k in range(8)])
    assert statistics.mean(waits) == pytest.approx(1.9) and max(waits) == pytest.approx(3.3)


def test_more_slots_and_idle_ones():
    assert generator.latencies([0.0, 0.0, 0.0], 1.0, slots=2) == [1.0, 1.0, 2.0]
    assert generator.latencies([0.0, 5.0], 1.0) == [1.0, 1.0]
    assert generator.latencies([], 1.0) == []


def test_an_open_loop_measures_from_the_schedule():
    async def run():
        return await generator.open_loop(EACH_TENTH, one_slot())

    shots = simulated(run())
    assert e2e(shots) == pytest.approx(generator.latencies([a.time for a in EACH_TENTH], 0.5))
    assert statistics.mean(e2e(shots)) == pytest.approx(1.9) and max(e2e(shots)) == pytest.approx(3.3)
    assert [shot.sent for shot in shots] == pytest.approx([shot.timeline.arrival for shot in shots])


def test_waiting_for_a_socket_counts_and_is_what_a_late_timer_hides():
    async def run():
        return await generator.open_loop(EACH_TENTH, one_slot(), sockets=1)

    shots = simulated(run())
    assert statistics.mean(e2e(shots)) == pytest.approx(1.9) and max(e2e(shots)) == pytest.approx(3.3)
    assert [shot.service for shot in shots] == pytest.approx([0.5] * 8)
    assert [shot.sent for shot in shots] == pytest.approx([0.5 * k for k in range(8)])


@pytest.mark.parametrize("users, latency", [(1, 0.5), (2, 1.0)])
def test_a_closed_loop_sees_none_of_it(users, latency):
    """Its users wait with the server: 0.5 s each, of a server that is asked for five times what it can do."""

    async def run():
        return await generator.closed_loop(EACH_TENTH, one_slot(), users)

    shots = simulated(run())
    assert e2e(shots)[users - 1 :] == pytest.approx([latency] * (9 - users))
    assert [shot.arrival for shot in shots] == EACH_TENTH
    assert max(shot.timeline.finished for shot in shots) == pytest.approx(4.0)


def test_a_request_starts_when_due_whatever_became_of_the_others():
    """The first never ends before the others do; one fails; nobody is late. They are heard as they end."""
    heard = []

    async def send(shot):
        await asyncio.sleep(10.0 if shot.arrival.time == 0 else 0.25)
        shot.timeline.ended(asyncio.get_running_loop().time(), "refused")

    async def run():
        return await generator.open_loop(EACH_TENTH[::-1], send, hear=heard.append)

    shots = simulated(run())
    assert [shot.sent for shot in shots] == pytest.approx([a.time for a in EACH_TENTH])
    assert heard == [*shots[1:], shots[0]]


def test_the_same_over_a_real_socket_ten_times_faster():
    """Sleeps are never shorter than asked for, so the latencies of one slot are bounds from below."""
    slot = asyncio.Lock()

    async def answer(body, say):
        async with slot:
            await asyncio.sleep(0.05)
            await say(chunk("x", made=1, finish="stop"))

    schedule = [Arrival(a.time / 10, 8, 1) for a in EACH_TENTH]

    async def run(url):
        async with client.Client(url, model="fake") as asking:
            send = lambda shot: asking.ask(asking.body("hi", 1), shot)
            return [await generator.open_loop(schedule, send, sockets) for sockets in (100, 1)]

    with serving(answer) as url:
        wide, narrow = asyncio.run(run(url))
    bounds = generator.latencies([a.time for a in schedule], 0.05)
    for shots in (wide, narrow):
        assert all(shot.timeline.ok for shot in shots), [shot.why for shot in shots]
        assert all(got >= want - 0.002 for got, want in zip(sorted(e2e(shots)), sorted(bounds)))
        assert statistics.mean(e2e(shots)) >= 0.188
    hidden = sum(shot.timeline.e2e - shot.service for shot in narrow)
    assert hidden >= sum(bounds) - 8 * 0.052, "a timer that starts with the socket hides most of it"


# ---------------------------------------------------------------- what counts as a token
def read(*events):
    """The timeline of a stream of (time, chunk), and what was wrong with it."""
    timeline = metrics.Timeline(0.0)
    answer = client.Answer(timeline)
    for now, event in events:
        answer.take(now, event)
    why = answer.end(events[-1][0])
    return timeline, why


@pytest.mark.parametrize("counted", ["in each chunk", "at the end", "with the reason"])
def test_role_chunks_and_chunks_of_three_tokens(counted):
    """Role at 0.1, one token at 1.0, three at 2.0, the end at 2.1; max_tokens, 100, has nothing to do with it."""
    each = counted == "in each chunk"
    last = {"usage": usage(4)} if counted == "with the reason" else {}
    events = [
        (0.1, chunk("", role="assistant", made=0 if each else None)),
        (1.0, chunk("a", made=1 if each else None)),
        (2.0, chunk("b c d", made=4 if each else None)),
        (2.1, chunk(finish="length", **last)),
        (2.1, {"choices": [], "usage": usage(4, prompt=9, cached=5)}),
    ]
    timeline, why = read(*events)
    assert (why, timeline.ttft, len(timeline.tokens), timeline.reason) == ("", 1.0, 4, "length")
    assert timeline.tpot == pytest.approx(1 / 3) and timeline.e2e == 2.0 and timeline.finished == 2.1
    assert (timeline.prompt_tokens, timeline.cached_tokens) == (9, 5)
    assert timeline.tokens == ([1.0, 2.0, 2.0, 2.0] if each else [1.0, 1.0, 2.0, 2.0])


def test_a_token_without_text_and_text_without_a_token():
    """Half a character at 1.0, the other at 2.0; at 3.0 the end lets go of text that was held back."""
    events = [(1.0, chunk("", made=1)), (2.0, chunk("ä", made=2)), (3.0, chunk("!", made=2, finish="stop"))]
    timeline, _ = read(*events)
    assert (timeline.ttft, timeline.tokens) == (2.0, [1.0, 2.0])
    timeline, _ = read(
        (1.0, chunk("a", made=1)), (2.0, chunk("b", made=1)), (3.0, chunk("c", made=2, finish="stop"))
    )
    assert timeline.tokens == [1.0, 3.0]


def test_completions_speak_of_text():
    event = lambda text, finish=None: {"choices": [{"text": text, "finish_reason": finish}]}
    timeline, why = read(
        (1.0, event("a")), (2.0, event("b", "stop")), (2.5, {"choices": [], "usage": usage(2)})
    )
    assert (why, timeline.ttft, timeline.tokens) == ("", 1.0, [1.0, 2.0])


@pytest.mark.parametrize("times, tokens, when", [
    ([1.0], 1, [1.0]), ([1.0], 3, [1.0] * 3), ([1.0, 2.0, 3.0], 2, [1.0, 3.0]), ([1.0, 2.0], 0, []),
    ([1.0, 2.0, 3.0], 5, [1.0, 1.0, 2.0, 3.0, 3.0]), ([1.0, 2.0], -1, []),
])  # fmt: skip
def test_tokens_that_nobody_counted_are_spread(times, tokens, when):
    assert sorted(client.spread(times, tokens)) == when


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_line_ends_at_a_newline_and_nowhere_else(size):
    """Whatever pieces the network makes of them; an answer's text may hold each of these."""
    text, whole = "a\x85\u2028\u2029\x1cä\r\n\nb".encode(), []

    async def main():
        async def pieces():
            for i in range(0, len(text), size):
                yield text[i : i + size]

        whole.extend([line async for line in client.lines(pieces())])

    simulated(main())
    assert whole == ["a\x85\u2028\u2029\x1cä\r", "", "b"]


def test_a_stream_that_breaks_off_is_a_failure():
    timeline, why = read((1.0, chunk("a", made=1)))
    assert timeline.reason == "error" and "before a finish_reason" in why
    timeline, why = read((1.0, chunk("a", finish="stop")))
    assert timeline.reason == "error" and "include_usage" in why
    timeline, why = read((1.0, chunk(made=0, finish="stop")))
    assert timeline.ok and not why and timeline.tpot is timeline.ttft is None
    timeline, why = read((1.0, chunk("a", made=1, finish="tool_calls")))
    assert timeline.reason == "stop" and not why
    timeline, why = read((1.0, chunk("a", made=1, finish="timeout")))
    assert timeline.reason == "timeout" and not timeline.ok


# ---------------------------------------------------------------- what a server may do
async def fine(body, say):
    """As many tokens as were asked for, three at most in a chunk; a prompt has 5 tokens and 2 per word."""
    content = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    most = body.get("max_completion_tokens") or body["max_tokens"]
    prompt = 5 + 2 * len(content.split())
    await say(chunk("", role="assistant", made=0, prompt=prompt))
    for made in [*range(1, most, 3), most]:
        await say(chunk("x", made=made, prompt=prompt, finish="length" if made == most else None))
    await say("data: [DONE]\n\n")


def misbehaving(how):
    async def answer(body, say):
        if isinstance(how, Refuse):
            raise how
        await say(chunk("a", made=1))
        if how == "never ends":
            await asyncio.sleep(load_world.PATIENCE)
        await say(how)

    return answer


SHAPE = json.dumps({"error": {"message": "queue is full", "type": "x", "param": None, "code": None}})


@pytest.mark.parametrize("how, reason, why", [
    (Refuse(429, SHAPE), "refused", "429: queue is full"), (Refuse(503, SHAPE), "refused", "503: queue is full"),
    (Refuse(400, SHAPE), "error", "400: queue is full"), (Refuse(500, "<html>"), "error", "500: <html>"),
    (": a comment\n\n", "error", "before a finish_reason"), ("data: {\n\n", "error", "OpenAI's shape"),
    ("data: 5\n\n", "error", "OpenAI's shape"), ('data: {"choices": [5]}\n\n', "error", "OpenAI's shape"),
    ('data: {"error": {"message": "lost it"}}\n\n', "error", "lost it"),
    ('data: {"error": "lost it"}\n\n', "error", "lost it"), ("never ends", "timeout", "within 0.3 s"),
])  # fmt: skip
def test_whatever_a_server_does_ends_the_request_and_not_the_run(how, reason, why):
    async def run(url):
        async with client.Client(url, model="fake", timeout=0.3 if how == "never ends" else 60.0) as asking:
            send = lambda shot: asking.ask(asking.body("hi", 4), shot)
            return await generator.open_loop([Arrival(0.0, 1, 4)], send)

    with serving(misbehaving(how)) as url:
        (shot,) = asyncio.run(run(url))
    assert shot.timeline.reason == reason and why in shot.why, shot
    assert shot.timeline.finished is not None and shot.timeline.finished >= shot.sent


def arguments(url, *words):
    parser = argparse.ArgumentParser()
    load.add_arguments(parser)
    return parser.parse_args([url, *map(str, words)])


def test_a_run(tmp_path, capsys):
    """Prompts have the tokens asked for, by the server's own count; all else is in the table, the JSON, the figure."""
    picture, numbers = tmp_path / "run.png", tmp_path / "run.json"
    words = "--rate 200 --requests 12 --seed 5 --slo-ttft 60 --slo-tpot 60 --api-key k".split()
    with serving(fine) as url:
        args = arguments(url + "/v1/", *words, "--json", numbers, "--figure", picture)
        assert load.main(args) == 0
    said = capsys.readouterr().out
    for part in ("model     fake", "12 arrived, 12 ended well", "200.00 requests/s offered", "100.0% of arrived",
                 "last token - sent", "in flight"):  # fmt: skip
        assert part in said, said
    assert "queue" not in said and "failed    " not in said
    written = json.loads(numbers.read_text())
    assert written["command"] == (
        "python -m minserve load URL --rate 200 --requests 12 --slo-ttft 60 --slo-tpot 60 --seed 5"
    )
    assert len(written["requests"]) == 12 and written["versions"]["httpx2"]
    for request in written["requests"]:
        assert abs(request["prompt_tokens"] - 128) <= 2 and len(request["tokens"]) == 32
        times = [request["due"], request["sent"], request["first"], *request["tokens"], request["ended"]]
        assert times == sorted(times) and request["reason"] == "length"
    report = Report.load(numbers)
    assert {row.case for row in report.rows} == {
        "ttft", "tpot", "itl", "e2e", "service", "achieved", "goodput", "output tokens",
    }  # fmt: skip
    assert report.row("achieved").bound == pytest.approx(200) and report.row("ttft").unit == "s"
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_the_key_the_model_and_the_endpoint_are_sent(capsys):
    seen = []

    async def answer(body, say):
        seen.append(body)
        await fine(body, say)

    with serving(answer, models=("one", "two")) as url:
        words = ["--requests", 3, "--rate", 100, "--priorities", "4:1", "--model", "two", "--scale", 0.1]
        assert load.main(arguments(url, *words, "--api-key", "k", "--endpoint", "completions")) == 0
    for body in seen:
        assert body["model"] == "two" and body["_headers"]["authorization"] == "Bearer k"
        assert body["_path"] == "/v1/completions" and "messages" not in body
        assert body["ignore_eos"] and body["stream_options"]["continuous_usage_stats"]
    assert [body.get("priority") for body in seen] == [None, None, 4, 4, 4]
    assert [body["max_tokens"] for body in seen] == [1, 1, 3, 3, 3]


def test_shared_prefixes_are_shared(monkeypatch):
    seen = []

    async def answer(body, say):
        seen.append(body["messages"][0]["content"].split())
        await fine(body, say)

    with serving(answer) as url:
        words = ["--requests", 24, "--rate", 400, "--workload", "shared-prefix"]
        assert load.main(arguments(url, *words)) == 0
    prompts = seen[2:]  # the first two ask how many tokens a word has
    shared = round((512 - 5) / 2)
    groups = {tuple(prompt[:shared]) for prompt in prompts}
    assert 2 <= len(groups) <= 8 and len({tuple(prompt) for prompt in prompts}) == 24
    assert all(len(prompt) == shared + 32 for prompt in prompts)


def test_a_closed_loop_says_that_it_offers_nothing(capsys):
    with serving(fine) as url:
        assert load.main(arguments(url, "--requests", 6, "--closed", 2)) == 0
    said = capsys.readouterr().out
    assert "never overloaded" in said and "offered" not in said


def test_a_schedule_without_a_length(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,100,10\n")
    with serving(fine) as url:
        assert load.main(arguments(url, "--trace", trace, "--json", tmp_path / "run.json")) == 0
    assert "open      - requests/s offered" in capsys.readouterr().out
    assert Report.load(tmp_path / "run.json").row("achieved").bound is None


def test_failures_are_told_and_a_run_without_an_answer_fails(capsys):
    count = 0

    async def answer(body, say):
        nonlocal count
        count += 1
        if count > 3:  # two ask how many tokens a word has, one is answered
            raise Refuse(429, SHAPE)
        await fine(body, say)

    with serving(answer) as url:
        assert load.main(arguments(url, "--requests", 4, "--rate", 50)) == 0
        said = capsys.readouterr().out
        assert "3 refused" in said and "3 x 429: queue is full" in said
        assert load.main(arguments(url, "--requests", 4, "--rate", 50)) == 1
        assert "429: queue is full" in capsys.readouterr().err


def test_no_server_no_model_no_api(capsys, tmp_path):
    with serving(fine) as url:
        pass
    cases = [
        (url, [], "no OpenAI-compatible server at"),
        ("nonsense", [], "no OpenAI-compatible server at nonsense"),
    ]
    for where, words, complaint in cases:
        assert load.main(arguments(where, *words)) == 1
        said = capsys.readouterr().err
        assert said.startswith("load: ") and complaint in said and "python -m minserve serve" in said
    with serving(fine) as url:
        assert load.main(arguments(url, "--model", "gpt")) == 1
        assert "serves fake, not gpt" in capsys.readouterr().err
    for models in ("<html>hello", ()):
        with serving(fine, models=models) as url:
            assert load.main(arguments(url)) == 1
            assert capsys.readouterr().err.startswith("load: ")


@pytest.mark.parametrize("words, complaint", [
    (["--slo-ttft", 1], "give both"), (["--priorities", "high"], "such as 0:0.2,1:0.8"), (["--rate", -1], "rate -1"),
    (["--requests", 0], "--requests is 0; it must be at least 1"), (["--sockets", 0], "--sockets is 0"),
    (["--closed", -1], "--closed is -1"), (["--scale", "nan"], "--scale is nan; it must be more than 0"),
    (["--trace", "nowhere.csv"], "nowhere.csv"), (["--requests", 1, "--rate", 0.001, "--burstiness", -1], "burstiness"),
])  # fmt: skip
def test_a_plan_that_makes_no_sense_is_refused_before_anybody_is_asked(words, complaint, capsys):
    assert load.main(arguments("http://127.0.0.1:9", *words)) == 1
    assert complaint in capsys.readouterr().err


def test_plans(tmp_path):
    plan = lambda *words: load.plan(arguments("URL", *words))
    assert plan("--workload", "chat", "--seed", 3) == plan("--workload", "chat", "--seed", 3)
    assert len(plan("--seconds", 10, "--rate", 7)) == 70 and len(plan("--rate", 7, "--requests", 9)) == 9
    assert {(a.prompt_tokens, a.output_tokens) for a in plan("--workload", "mixed", "--requests", 200)} == {
        (64, 64), (1024, 16),
    }  # fmt: skip
    assert max(a.prompt_tokens for a in plan("--workload", "code", "--longest", 100, "--requests", 50)) == 100
    rows = [f"2023-11-16 18:00:{second:02}.0,100,10" for second in range(0, 50, 10)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    replay = plan("--trace", trace, "--scale", 0.5, "--priorities", "1:1")
    assert [(a.time, a.prompt_tokens, a.priority) for a in replay] == [(t, 50, 1) for t in (0, 10, 20, 30)]
    assert len(plan("--trace", trace, "--requests", 5)) == 5
    assert [a.time for a in plan("--trace", trace, "--rate", 5)] == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


# ---------------------------------------------------------------- what is reported and drawn
def shot_at(due, sent, *tokens, reason="stop", zero=0.0):
    timeline = metrics.Timeline(zero + due)
    for at in tokens:
        timeline.told(zero + at, 1, "x")
    timeline.ended(zero + (tokens[-1] if tokens else sent + 0.5), reason)
    return generator.Shot(Arrival(due, 8, 2), timeline, zero + sent)


def test_a_report_is_relative_to_the_start_of_the_run():
    shots = [shot_at(1.0, 1.5, 2.0, 3.0, zero=50.0), shot_at(2.0, 2.0, reason="refused", zero=50.0)]
    run = load_report.Run(shots, "m", offered=1.0)
    assert (run.zero, run.seconds, run.peak) == (50.0, 3.0, 2)
    first, second = run.requests()
    assert (first["due"], first["sent"], first["first"], first["tokens"], first["ended"]) == (
        1,
        1.5,
        2,
        [2, 3],
        3,
    )
    assert (second["first"], second["tokens"], second["reason"]) == (None, [], "refused")
    report = run.report("load", metrics.SLO(1.0, 1.0))
    assert report.row("ttft").samples == [1.0] and report.row("service").samples == [1.5]
    assert (report.row("achieved").median, report.row("achieved").bound) == (pytest.approx(1 / 3), 1.0)
    assert "99% were sent within 495.0 ms" in run.text()
    closed = load_report.Run(shots[:1], "m", offered=None, closed=True)
    assert closed.zero == 51.0


def test_priorities_are_told_apart():
    shots = [shot_at(0, 0, 1, 2), shot_at(0, 0, 3, 4), shot_at(1, 1, reason="refused")]
    assert "priority" not in load_report.Run(shots, "m", 1.0).text()
    shots[1].timeline.priority = shots[2].timeline.priority = 5
    lines = load_report.Run(shots, "m", 1.0).text(metrics.SLO(1.0, 1.0)).split("\n")
    assert [line for line in lines if line.startswith("priority")] == [
        "priority  0: 1 requests; TTFT p50 1,000.0 ms, p99 1,000.0 ms; 100.0% of arrived met the SLO",
        "priority  5: 2 requests; TTFT p50 3,000.0 ms, p99 3,000.0 ms; 0.0% of arrived met the SLO",
    ]


def test_failures_that_differ_in_numbers_only_are_one():
    shots = [shot_at(0, 0, reason="error") for _ in range(5)]
    for shot, why in zip(shots, ["1,185 tokens is 3.5 too many", "7 tokens is 2 too many", "no", "no", "no"]):
        shot.why = why
    text = load_report.Run(shots, "m", 1.0).text().split("\n")
    assert text[-2:] == ["failed    3 x no", "failed    2 x such as 1,185 tokens is 3.5 too many"]


def test_samples_are_thinned_evenly():
    many = load_report.thinned([float(i) for i in range(10_000)])
    assert len(many) == load_report.MOST_SAMPLES and (many[0], many[-1]) == (0.0, 9999.0)
    assert statistics.median(many) == pytest.approx(4999.5, rel=0.01)
    assert load_report.thinned([1.0, 2.0]) == [1.0, 2.0] and load_report.thinned([1.0]) == [1.0]


def test_in_flight():
    run = load_report.Run([shot_at(0, 0, 4), shot_at(1, 1, 2), shot_at(2, 2, 3)], "m", 1.0)
    assert load_figures.in_flight(run.requests()) == [
        (0.0, 0),
        (0, 1),
        (1, 2),
        (2, 1),
        (2, 2),
        (3, 1),
        (4, 0),
    ]


@pytest.mark.parametrize("shots, title", [
    ([shot_at(0, 0, 1, 2), shot_at(1, 1, 3, 4)], "2 of 2 requests answered: first text within 1.50 s for half of them, "
     "1.99 s for 99%"),
    ([shot_at(0, 0, reason="refused")], "0 of 1 requests answered"),
    ([shot_at(0, 1, 2), shot_at(0, 1, reason="timeout")], "1 of 2 requests answered: first text within 2.00 s"),
])  # fmt: skip
def test_figures(shots, title, tmp_path):
    from PIL import Image

    requests = load_report.Run(shots, "m", 1.0).requests()
    assert load_figures.title(requests).startswith(title)
    load_figures.draw(requests, "here", tmp_path / "x.png")
    picture = Image.open(tmp_path / "x.png").convert("RGBA")
    assert picture.getpixel((1, 1)) == (255, 255, 255, 255) and picture.size[0] > 600


# ---------------------------------------------------------------- the tests can fail
WRONG = [  # (module, what is wrong, the right text, the wrong one)
    (generator, "the timer starts with the socket", "            shot.sent = loop.time()\n",
     "            shot.sent = shot.timeline.arrival = loop.time()\n"),
    (generator, "the next one waits for the last", "tasks.create_task(one(shot))", "await one(shot)"),
    (generator, "all at once", "await asyncio.sleep(max(0.0, shot.timeline.arrival - loop.time()))", "pass"),
    (generator, "gaps, not due times", "max(0.0, shot.timeline.arrival - loop.time())", "0.1"),
    (generator, "the clock of another world", "zero = loop.time()", "zero = 0.1"),
    (generator, "no limit of sockets", "asyncio.Semaphore(sockets)", "asyncio.Semaphore(1000)"),
    (generator, "in the order given", "for arrival in sorted(arrivals, key=lambda arrival: arrival.time)",
     "for arrival in arrivals"),
    (generator, "one user", "for _ in range(users)", "for _ in range(1)"),
    (generator, "service from when it was due", "self.timeline.tokens[-1] - self.sent", "self.timeline.e2e"),
    (generator, "nobody is heard", "            await send(shot)\n        hear(shot)\n",
     "            await send(shot)\n"),
    (generator, "idle slots are not idle", "max(due, heapq.heappop(free))", "heapq.heappop(free)"),
    (generator, "no queue", "max(due, heapq.heappop(free))", "due"),
    (client, "a role is a token", "        if text:\n            timeline.told(now, 0, text)", "        if True:\n"
     "            timeline.told(now, 0, text or 'x')"),
    (client, "a chunk is a token", 'new = (usage.get("completion_tokens") or 0) - len(timeline.tokens)', "new = 1"),
    (client, "usage is of this chunk alone", " - len(timeline.tokens)", ""),
    (client, "tokens without usage come at its time", "spread(self.uncounted or [now], new)", "[now] * new"),
    (client, "old text keeps its tokens back", "            self.uncounted = []\n", ""),
    (client, "completions have no text", 'choice.get("text") or ', ""),
    (client, "cached tokens are lost", 'details.get("cached_tokens") or 0', "0"),
    (client, "the last chunk has no reason", 'get("finish_reason") or self.reason', 'get("finish_reason")'),
    (client, "a broken stream is fine", "        if self.reason is None:\n", "        if False:\n"),
    (client, "no tokens are fine", "elif not self.counts:", "elif False:"),
    (client, "an unknown reason is none", 'else "stop"  #', "else self.reason  #"),
    (client, "every piece is a line", "(held + piece)", "piece"),
    (client, "the last line needs an end", "    if held:\n", "    if False:\n"),
    (client, "lines end where Python ends them", 'line.decode(errors="replace")\n    if',
     '(line.decode(errors="replace").splitlines() or [""])[0]\n    if'),
    (client, "all at the last time", "times[round(i * last / (tokens - 1))]", "times[-1]"),
]  # fmt: skip
QUICK = [
    "test_the_arithmetic_of_one_slot", "test_more_slots_and_idle_ones",
    "test_an_open_loop_measures_from_the_schedule", "test_a_closed_loop_sees_none_of_it",
    "test_waiting_for_a_socket_counts_and_is_what_a_late_timer_hides",
    "test_a_request_starts_when_due_whatever_became_of_the_others", "test_role_chunks_and_chunks_of_three_tokens",
    "test_a_token_without_text_and_text_without_a_token", "test_completions_speak_of_text",
    "test_tokens_that_nobody_counted_are_spread", "test_a_line_ends_at_a_newline_and_nowhere_else",
    "test_a_stream_that_breaks_off_is_a_failure",
]  # fmt: skip


@pytest.mark.parametrize("module, what, right, wrong", WRONG, ids=[what for _, what, _, _ in WRONG])
def test_a_wrong_version_is_noticed(module, what, right, wrong, monkeypatch):
    assert noticed(module, right, wrong, monkeypatch), f"no test notices: {what}"


def test_the_right_version_is_not(monkeypatch):
    assert not noticed(generator, "zero = loop.time()", "zero = loop.time()", monkeypatch)
    assert not noticed(client, "elif not self", "elif not self", monkeypatch)


def noticed(module, right, wrong, monkeypatch) -> bool:
    here = sys.modules[__name__]
    monkeypatch.setattr(here, module.__name__.rsplit(".", 1)[1], wrong_version(module, right, wrong))
    for name in QUICK:
        check = getattr(here, name)
        marks = [mark for mark in getattr(check, "pytestmark", []) if mark.name == "parametrize"]
        for values in marks[0].args[1] if marks else [()]:
            try:
                check(*(values if isinstance(values, tuple) else (values,)))
            except (AssertionError, ArithmeticError, TypeError, ValueError, IndexError, BaseExceptionGroup):
                return True
    return False
