"""`serve` builds an engine that only one thread ever computes with: two would have two OpenMP teams, and be slow."""

import argparse
import asyncio
import threading

from serving_world import tiny_folder

from minserve import serve
from minserve.request import SamplingParams


def test_one_thread_makes_the_engine_and_runs_it(tmp_path, monkeypatch):
    seen, load = [], serve.load
    monkeypatch.setattr(serve, "load", lambda *given: (seen.append(threading.get_ident()), load(*given))[1])
    serve.add_arguments(parser := argparse.ArgumentParser())
    serving, _, _ = serve.build(parser.parse_args(["--model", str(tiny_folder(tmp_path / "tiny"))]))
    step = serving.engine.step
    serving.engine.step = lambda: (seen.append(threading.get_ident()), step())[1]

    async def answer():
        async with serving:
            stream = await serving.add([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
            await stream.finish()

    asyncio.run(answer())
    assert len(seen) > 2 and set(seen) == {seen[0]} and seen[0] != threading.get_ident()
