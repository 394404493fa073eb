"""What Prometheus is told of a real engine, and what a client measures of a real server: they count the same things."""

import argparse
import asyncio
import json
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_world import PATIENCE, serve_in_thread, tiny_engine, tiny_folder

from minserve.async_engine import AsyncEngine
from minserve.lab import load
from minserve.metrics import Exporter
from minserve.request import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def scrape(exporter) -> dict[str, float]:
    return parsed(exporter.render().decode())


def parsed(text: str) -> dict[str, float]:
    """{name, or name[reason]: value}, without buckets."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                reason = sample.labels.get("finished_reason")
                found[sample.name.removeprefix("minserve:") + (f"[{reason}]" if reason else "")] = (
                    sample.value
                )
    return found


def test_one_engine_many_fates(folder):
    """Two answers that do not fit together, prompts of three chunks each, one of them preempted; then a copy of the
    first, whose prompt is cached, aborted after its first text. Counters never fall on the way."""
    engine = tiny_engine(folder, num_pages=12, page_size=8, token_budget=12, max_running=4)
    exporter, scrapes, timelines = Exporter("tiny"), [], []

    def on_step(record):
        exporter.step(record)
        exporter.gauges(engine)
        scrapes.append(scrape(exporter))

    def on_end(output, timeline):
        exporter.observe(timeline)
        timelines.append(timeline)

    async def run():
        async with AsyncEngine(engine, on_step=on_step, on_end=on_end) as serving:
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            prompts = [[3 + i + 7 * k for k in range(30)] for i in range(2)]
            streams = [await serving.add(prompt, params) for prompt in prompts]
            answers = [(await stream.finish())[0] for stream in streams]
            copy = await serving.add(prompts[0], params)
            async with copy:
                await anext(copy)
            await copy.finish()
            return answers

    answers = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert [len(answer.tokens) for answer in answers] == [40, 40]
    preemptions = sum(timeline.preemptions for timeline in timelines)
    assert preemptions >= 1, "the pool was to be too small for both"
    exporter.gauges(engine)
    last = scrape(exporter)
    assert last["num_preemptions_total"] == preemptions
    for name in (
        "time_to_first_token_seconds",
        "request_prefill_time_seconds",
        "e2e_request_latency_seconds",
    ):
        assert last[f"{name}_count"] == 2, "one for each answer, not one for each chunk, start or copy"
    assert last["inter_token_latency_seconds_count"] == 2 * 39
    assert last["request_success_total[length]"] == 2 and last["request_success_total[abort]"] == 1
    assert last["prompt_tokens_total"] == last["prefix_cache_queries_total"] == 3 * 30
    assert last["prefix_cache_hits_total"] == 24, "the copy's three full pages; what is recomputed is no hit"
    assert last["generation_tokens_total"] == sum(len(timeline.tokens) for timeline in timelines) > 80
    computed = sum(record.num_tokens for record in engine.log)
    assert last["iteration_tokens_total_sum"] == computed > 2 * 69, "recomputing is work"
    assert [last[f"num_requests_{what}"] for what in ("running", "waiting")] == [0, 0]
    assert last["kv_cache_usage_perc"] == 0 and max(its["kv_cache_usage_perc"] for its in scrapes) > 0.9
    assert max(its["num_requests_running"] for its in scrapes) == 2
    for before, after in zip(scrapes, [*scrapes[1:], last]):
        assert all(
            after[name] >= before[name] for name in before if not name.startswith(("num_requests", "kv_"))
        )


def test_the_times_of_an_answer_are_in_order(folder):
    engine, timelines = tiny_engine(folder), []

    async def run():
        async with AsyncEngine(engine, on_end=lambda output, timeline: timelines.append(timeline)) as serving:
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            streams = [await serving.add("the sky is blue", params) for _ in range(6)]  # there are four seats
            return [(await stream.finish())[0] for stream in streams]

    outputs = asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert len(timelines) == 6 and all(timeline.ok for timeline in timelines)
    for t, output in zip(timelines, outputs):
        times = [t.arrival, t.queued, t.started, *t.tokens, t.finished]
        assert times == sorted(times) and len(t.tokens) == 6 == len(output.tokens)
        assert t.prompt_tokens == len(output.request.prompt) and t.first in t.tokens
        assert t.queue_time + t.prefill_time + t.decode_time == pytest.approx(t.e2e - (t.queued - t.arrival))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_client_and_server_count_the_same(folder, endpoint, tmp_path, capsys):
    """First too many at once for a queue of two, so some are refused; then the same two by two, now from the cache."""
    parser = argparse.ArgumentParser()
    load.add_arguments(parser)
    words = "--rate 500 --requests 24 --workload shared-prefix --scale 0.125 --timeout 60".split()
    with serve_in_thread(tiny_engine(folder, max_waiting=2)) as server:

        def run(*more):
            numbers = tmp_path / "run.json"
            args = [server.url, *words, *more, "--endpoint", endpoint, "--json", str(numbers)]
            assert load.main(parser.parse_args(args)) == 0
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE) as answer:
                return json.loads(numbers.read_text())["requests"], parsed(answer.read().decode())

        crowd, told = run()
        pairs, after = run("--closed", "2")
    good = [request for request in crowd if request["reason"] == "length"]
    assert 0 < len(good) <= 24 and {r["reason"] for r in crowd} <= {"length", "refused"}
    asked = 2  # how many tokens does a word have? One token for each answer
    assert told["request_success_total[length]"] == len(good) + asked
    assert told["generation_tokens_total"] == sum(len(r["tokens"]) for r in good) + asked
    assert {len(r["tokens"]) for r in good} == {4} and all(40 < r["prompt_tokens"] < 110 for r in good)
    for request in good:
        times = [request["due"], request["sent"], *request["tokens"], request["ended"]]
        assert times == sorted(times)
        assert request["tokens"][0] <= request["first"] <= request["ended"], "a token may have no text yet"
    assert {r["reason"] for r in pairs} == {"length"}, "two users never meet a full queue"
    assert after["request_success_total[length]"] == len(good) + 24 + 2 * asked
    cached = sum(r["cached_tokens"] for r in pairs)
    assert 0 < cached <= after["prefix_cache_hits_total"] - told["prefix_cache_hits_total"]
    assert after["prefix_cache_hits_total"] < after["prefix_cache_queries_total"]
