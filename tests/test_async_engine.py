"""Many callers, one loop: streams that end exactly once, whoever leaves early, and everything given back."""

import asyncio
from dataclasses import replace

import pytest

from minserve.async_engine import AsyncEngine
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


def serve(engine, scenario):
    """Run scenario(serving) inside a running AsyncEngine; whatever it did, nothing may be left afterwards."""

    async def main():
        async with AsyncEngine(engine) as serving:
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
