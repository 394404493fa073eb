"""Many callers, one loop: streams that end exactly once, whoever leaves early, and everything given back."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from wrong_versions import wrong_version

from minserve import async_engine
from minserve.async_engine import NotServing
from minserve.engine import Engine
from minserve.prefill_decode import generate
from minserve.request import SamplingParams
from minserve.scheduler import QueueFull
from minserve.weights import load

PROMPTS = [[7, 3, 250, 11], [5], list(range(30)), [99] * 17]
FREE = SamplingParams(max_tokens=10, ignore_eos=True)
LONG = replace(FREE, max_tokens=300)


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("llama-3"))


@pytest.fixture
def engine(model):
    return Engine(model, num_pages=60, page_size=8, token_budget=32, max_running=4, max_waiting=8)


def serve(engine, scenario, **options):
    """Run scenario(serving) inside a running AsyncEngine; whatever it did, nothing may be left afterwards."""

    async def main():
        async with async_engine.AsyncEngine(engine, **options) as serving:
            result = await asyncio.wait_for(scenario(serving), 60)
        assert not serving._streams and not serving._between
        return result

    result = asyncio.run(main())
    engine.pages.check([])
    assert engine.pages.in_use == 0 and not engine.outputs and not engine.scheduler.has_work
    return result


def test_callers_get_their_own_answers(model, engine):
    async def scenario(serving):
        async def caller(prompt):
            stream = await serving.add(prompt, FREE)
            return (await stream.finish())[0].tokens

        return await asyncio.gather(*map(caller, PROMPTS * 2))

    assert serve(engine, scenario) == [list(generate(model, p, FREE)) for p in PROMPTS * 2]


def test_a_stream_says_each_end_once(engine):
    async def scenario(serving):
        stream = await serving.add(PROMPTS[0], replace(FREE, n=3, temperature=1.0, seed=1))
        ends = [output.index async for output, _, last in stream if last]
        assert [item async for item in stream] == []  # over is over
        return ends

    assert sorted(serve(engine, scenario)) == [0, 1, 2]


def test_who_leaves_early_frees_the_pages(engine):
    async def scenario(serving):
        async with await serving.add(PROMPTS[2], replace(LONG, n=2)) as stream:
            async for _ in stream:
                break
        after = await (await serving.add(PROMPTS[0], FREE)).finish()  # one step later at most
        assert [o.finish_reason for o in stream.outputs] == ["abort", "abort"]
        return after[0].finish_reason

    assert serve(engine, scenario) == "length"


def test_a_cancelled_reader_aborts_its_request(engine):
    async def scenario(serving):
        stream = await serving.add(PROMPTS[0], LONG)
        reader = asyncio.create_task(stream.finish())
        await asyncio.sleep(0.02)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await (await serving.add(PROMPTS[1], FREE)).finish()
        return stream.outputs[0].finish_reason

    assert serve(engine, scenario) == "abort"


def test_a_caller_cancelled_while_it_adds_leaves_nothing(engine):
    async def scenario(serving):
        tasks = [asyncio.create_task(serving.add(PROMPTS[0], LONG)) for _ in range(4)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await (await serving.add(PROMPTS[1], FREE)).finish()
        return len(serving.engine.outputs)

    assert serve(engine, scenario) == 0


def test_bad_requests_and_a_full_queue_are_refused_to_their_caller(engine):
    async def scenario(serving):
        with pytest.raises(ValueError, match="prompt is empty"):
            await serving.add([], FREE)
        results = await asyncio.gather(
            *(serving.add(PROMPTS[0], FREE) for _ in range(20)), return_exceptions=True
        )
        refused = [r for r in results if isinstance(r, QueueFull)]
        assert refused and len(refused) < 20
        for stream in results:
            if stream not in refused:
                assert (await stream.finish())[0].finish_reason == "length"

    serve(engine, scenario)


def test_closing_ends_every_stream(engine):
    async def scenario(serving):
        streams = [await serving.add(p, LONG) for p in PROMPTS]
        await serving.close()
        outputs = [(await s.finish())[0] for s in streams]
        with pytest.raises(RuntimeError, match="not running"):
            await serving.add(PROMPTS[0], FREE)
        return {o.finish_reason for o in outputs}

    assert serve(engine, scenario) == {"abort"}


def test_a_deadline_ends_the_stream(engine):
    async def scenario(serving):
        stream = await serving.add(PROMPTS[0], LONG, timeout=0.0)
        return (await stream.finish())[0].finish_reason

    assert serve(engine, scenario) == "timeout"


def test_an_engine_that_breaks_tells_everybody(engine):
    """Not one request's fault: the scheduler itself fails. Every reader gets the error, later callers too."""

    async def scenario(serving):
        streams = [await serving.add(p, LONG) for p in PROMPTS]

        def broken():
            raise RuntimeError("lost count")

        engine.scheduler.schedule = broken
        outputs = [(await s.finish())[0] for s in streams]
        with pytest.raises(RuntimeError, match="not running"):
            await serving.add(PROMPTS[0], FREE)
        assert "lost count" in str(serving.error)
        return {str(o.error) for o in outputs}

    assert serve(engine, scenario) == {"lost count"}


def test_the_loop_stays_free_while_a_step_runs(engine, model):
    """A step takes as long as it takes; callers still get their turn in between."""

    async def scenario(serving):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        clock = asyncio.create_task(tick())
        await (await serving.add(PROMPTS[2], FREE)).finish()
        clock.cancel()
        return ticks

    assert serve(engine, scenario) > 20


# ---------------------------------------------------------------- when it was
def test_timelines_say_when_each_token_was_known(engine):
    ended = []

    async def scenario(serving):
        arrival = time.monotonic()
        stream = await serving.add(PROMPTS[0], replace(FREE, n=2), arrival=arrival, priority=3)
        told = {0: [], 1: []}
        async for output, _, _ in stream:
            told[output.index].append(stream.told[output.index])
        assert told == {0: list(range(1, 11)), 1: list(range(1, 11))}, "a token for each step"
        return arrival, stream.timelines

    arrival, timelines = serve(
        engine, scenario, on_end=lambda output, line: ended.append((output.index, line))
    )
    assert sorted(i for i, _ in ended) == [0, 1] and all(line is timelines[i] for i, line in ended)
    for line in timelines:
        order = [line.arrival, line.queued, line.started, *line.tokens, line.finished]
        assert order == sorted(order) and line.arrival == arrival and len(line.tokens) == 10
        assert (line.reason, line.priority, line.prompt_tokens) == ("length", 3, 4)
    assert [line.cached_tokens for line in timelines][0] == 0 and timelines[0].first is None, (
        "no text, no TTFT"
    )


def test_a_request_that_waits_starts_later_than_it_is_queued(engine):
    """Five for four seats: the last one's queue time is the others' answers."""

    async def scenario(serving):
        streams = await asyncio.gather(*(serving.add([i], FREE) for i in range(5)))
        for stream in streams:
            await stream.finish()
        return [stream.timelines[0] for stream in streams]

    lines = serve(engine, scenario)
    last = max(lines, key=lambda line: line.started)
    assert last.started >= min(line.finished for line in lines) > last.queued


def test_preemptions_and_cached_tokens_are_told_at_the_end(model):
    """Room for less than two whole answers: the second gives way, and finds its prompt in the cache."""
    engine = Engine(model, num_pages=8, page_size=8, token_budget=32, max_running=2, max_waiting=8)

    async def scenario(serving):
        answers = replace(FREE, max_tokens=30)
        streams = await asyncio.gather(*(serving.add(list(range(i, i + 20)), answers) for i in (0, 50)))
        for stream in streams:
            await stream.finish()
        for _ in range(2):
            await (again := await serving.add(list(range(20)), FREE)).finish()
        return [s.timelines[0] for s in streams], again.timelines[0]

    lines, again = serve(engine, scenario)
    assert [line.preemptions for line in lines] == [0, 1]
    assert [line.cached_tokens for line in lines] == [0, 0], "its own tokens, found again, are no saving"
    assert again.cached_tokens == 16, "full pages but the last token's"


def test_every_step_is_told_once(engine):
    records, step, idle = [], engine.step, [False, True, False, True]

    async def scenario(serving):
        engine.step = lambda: [] if idle and idle.pop(0) else step()  # one that did nothing leaves no record
        await (await serving.add(PROMPTS[2], FREE)).finish()

    serve(engine, scenario, on_step=records.append)
    assert [r.step for r in records] == [r.step for r in engine.log] and len(records) >= 10


# ---------------------------------------------------------------- limits, pauses, ends
def test_who_does_not_read_is_aborted(engine):
    """Its answer is longer than the backlog. The others go on, and it still learns how its answer ended."""

    async def scenario(serving):
        idle, other = (
            await serving.add(PROMPTS[0], LONG),
            await serving.add(PROMPTS[1], replace(FREE, max_tokens=60)),
        )
        await other.finish()
        events = [(output, last) async for output, _, last in idle]
        assert idle.lagged and not other.lagged and other.outputs[0].finish_reason == "length"
        assert 16 < len(events) <= 20 and events[-1][1] and not any(last for _, last in events[:-1])
        assert idle.timelines[0].reason == "abort"
        return idle.outputs[0].finish_reason

    assert serve(engine, scenario, backlog=16) == "abort"


def test_prompts_that_join_a_stream_go_on_in_its_order(engine):
    async def scenario(serving):
        stream = await serving.add(PROMPTS[0], replace(FREE, n=2))
        assert await serving.add(PROMPTS[1], FREE, join=stream) is stream
        ends = sorted([output.index async for output, _, last in stream if last])
        assert ends == [0, 1, 2] == [output.index for output in stream.outputs]
        return [(o.request.prompt, line.prompt_tokens) for o, line in zip(stream.outputs, stream.timelines)]

    assert serve(engine, scenario) == [(p, len(p)) for p in (PROMPTS[0], PROMPTS[0], PROMPTS[1])]


def test_tokens_made_elsewhere_are_news_as_well(model, engine):
    made = list(generate(model, PROMPTS[0], FREE))[:3]

    async def scenario(serving):
        stream = await serving.add(PROMPTS[0], FREE, made=made)
        await stream.finish()
        return stream.outputs[0].tokens, len(stream.timelines[0].tokens)

    assert serve(engine, scenario) == (list(generate(model, PROMPTS[0], FREE)), 10)


def test_between_never_meets_a_step(engine):
    """What it is given runs in a worker thread while no step does, and its result or its error comes back."""
    stepping, met, step = threading.Event(), [], engine.step

    def watched():
        stepping.set()
        try:
            return step()
        finally:
            stepping.clear()

    engine.step = watched

    async def scenario(serving):
        stream = await serving.add(PROMPTS[0], LONG)
        for _ in range(20):
            met.append(await serving.between(stepping.is_set))
        assert await serving.between(threading.current_thread) is not threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await serving.between(lambda: 1 / 0)
        serving.abort(stream)
        await stream.finish()

    serve(engine, scenario)
    assert len(met) == 20 and not any(met)


def test_what_hangs_between_steps_is_told_even_if_nobody_waits_for_a_step(engine):
    end = threading.Event()

    async def scenario(serving):
        try:
            with pytest.raises(async_engine.Stuck, match="0.2 s"):
                await serving.between(lambda: end.wait(60))
            await asyncio.sleep(0.05)
            with pytest.raises(NotServing, match="hangs"):
                await serving.add(PROMPTS[0], FREE)
        finally:
            end.set()
        return serving.healthy

    assert serve(engine, scenario, step_seconds=0.2) is False


def test_a_step_must_be_given_time(engine):
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="every step would hang"):
            async_engine.AsyncEngine(engine, step_seconds=seconds)


def test_a_step_may_be_given_any_time(engine):
    async def scenario(serving):
        return (await (await serving.add(PROMPTS[0], FREE)).finish())[0].finish_reason

    assert serve(engine, scenario, step_seconds=float("inf")) == "length"


def test_between_after_the_end_is_refused(engine):
    async def scenario(serving):
        closing = asyncio.create_task(serving.close())
        with pytest.raises(NotServing):
            await serving.between(lambda: None)
        await closing
        with pytest.raises(NotServing):
            await serving.between(lambda: None)

    serve(engine, scenario)


def test_draining_finishes_what_there_is_and_takes_nothing_new(engine):
    async def scenario(serving):
        assert serving.healthy
        streams = [await serving.add(p, FREE) for p in PROMPTS]
        draining = asyncio.create_task(serving.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(NotServing, match="shutting down"):
            await serving.add(PROMPTS[0], FREE)
        reasons = {(await stream.finish())[0].finish_reason for stream in streams}
        assert await draining is True and not serving.healthy
        return reasons

    assert serve(engine, scenario) == {"length"}


def test_a_drain_ends_at_its_deadline(engine):
    async def scenario(serving):
        stream = await serving.add(PROMPTS[0], LONG)
        assert await serving.drain(0.0) is False
        return (await stream.finish())[0].finish_reason

    assert serve(engine, scenario) == "abort"


def test_a_drain_of_nothing_is_over_at_once(engine):
    async def scenario(serving):
        assert await serving.drain(60) is True
        with pytest.raises(NotServing, match="was closed"):
            await serving.add(PROMPTS[0], FREE)

    serve(engine, scenario)


def test_before_it_is_entered_nothing_is_served(engine):
    async def main():
        serving = async_engine.AsyncEngine(engine)
        assert not serving.healthy
        with pytest.raises(RuntimeError, match="was not entered"):
            await serving.add(PROMPTS[0], FREE)

    asyncio.run(main())


# ---------------------------------------------------------------- these tests can fail
WRONG = [
    ("timeline.started = begin", "timeline.started = timeline.queued",
     test_a_request_that_waits_starts_later_than_it_is_queued),
    ("num_known(output) - len(timeline.tokens)", "1", test_tokens_made_elsewhere_are_news_as_well),
    ("if stream.unread > self.backlog and not stream.lagged:", "if False:", test_who_does_not_read_is_aborted),
    ("                stream.lagged = True\n", "", test_who_does_not_read_is_aborted),
    ("output.index += len(self.told)", "pass", test_prompts_that_join_a_stream_go_on_in_its_order),
    ("result = await self._in_thread(operation)", "result = operation()", test_between_never_meets_a_step),
    ("if not step_seconds > 0:", "if step_seconds <= 0:", test_a_step_must_be_given_time),
    ("if not step_seconds > 0:", "if not step_seconds >= 0:", test_a_step_must_be_given_time),
    ("timeout=self.step_seconds)", "timeout=min(self.step_seconds, 1e-9))", test_a_step_may_be_given_any_time),
    ("        if isinstance(error, Stuck):\n            raise error\n", "",
     test_what_hangs_between_steps_is_told_even_if_nobody_waits_for_a_step),
    ("self.draining = True", "pass", test_draining_finishes_what_there_is_and_takes_nothing_new),
    ("await asyncio.wait_for(self._empty.wait(), seconds)", "pass",
     test_draining_finishes_what_there_is_and_takes_nothing_new),
    ("await asyncio.wait_for(self._empty.wait(), seconds)", "await asyncio.wait_for(self._empty.wait(), 5)",
     test_a_drain_ends_at_its_deadline),
    ("        self._empty.clear()\n", "", test_draining_finishes_what_there_is_and_takes_nothing_new),
    ("if log and log[-1] is not before else None", "if log else None", test_every_step_is_told_once),
    ("for listen in self.on_end:", "for listen in ():", test_timelines_say_when_each_token_was_known),
    ("timeline.preemptions = output.request.preemptions", "pass",
     test_preemptions_and_cached_tokens_are_told_at_the_end),
    ("                self._ended(output, timeline, now)\n", "", test_timelines_say_when_each_token_was_known),
]  # fmt: skip


@pytest.mark.parametrize("right, wrong, test", WRONG, ids=[f"{w[0].strip()[:30]}" for w in WRONG])
def test_wrong_versions_are_noticed(right, wrong, test, model, engine, monkeypatch):
    made = wrong_version(async_engine, right, wrong)
    made.NotServing, made.Stuck = NotServing, async_engine.Stuck  # one class, whoever raises it
    monkeypatch.setattr(async_engine, "AsyncEngine", made.AsyncEngine)
    given = {"model": model, "engine": engine}
    wants = test.__code__.co_varnames[: test.__code__.co_argcount]
    with pytest.raises((AssertionError, pytest.fail.Exception, TimeoutError)):
        test(**{name: given[name] for name in wants})
