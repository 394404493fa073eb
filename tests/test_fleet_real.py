"""The whole of it with real engines: prefixes kept together, 1 -> 3 -> 1 processes, and nobody left behind."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import httpx2
import psutil
import pytest
from fleet_world import routed_to, until
from serving_world import serve_in_thread, tiny_engine, tiny_folder

PATIENCE = 300  # seconds: the longest that anything here waits for one thing
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


# ---------------------------------------------------------------- prefixes
def cached_share(urls: list[str], policy: str, groups: int = 7, rounds: int = 5) -> float:
    """Share of the prompts' tokens that were in a cache. Every group has its own system message of about 100 tokens."""

    async def main():
        cached = total = 0
        async with routed_to(urls, policy) as world:
            for turn in range(rounds):
                for group in range(groups):
                    messages = [dict(role="system", content=f"group {group}: " + f"the sky is {group} blue, " * 12),
                                dict(role="user", content=f"turn {turn}")]  # fmt: skip
                    body = dict(model="tiny", messages=messages, max_tokens=1, cache_salt=policy)
                    answer = (await world.client.post("/v1/chat/completions", json=body)).json()
                    cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    total += answer["usage"]["prompt_tokens"]
        return cached / total

    return asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_prefix_aware_finds_more_in_the_caches_than_round_robin(folder):
    """7 groups on 3 replicas, 5 turns: by turns each group is new to 3 replicas, by prefix to one."""
    with ExitStack() as stack:
        urls = [
            stack.enter_context(serve_in_thread(tiny_engine(folder, num_pages=400))).url for _ in range(3)
        ]
        by_turns, by_prefix = cached_share(urls, "round_robin"), cached_share(urls, "prefix_aware")
    assert 0.3 < by_turns < 0.45 and 0.65 < by_prefix < 0.85, (by_turns, by_prefix)


def test_a_client_that_leaves_gives_its_pages_back_through_the_router(folder):
    async def main(server):
        async with routed_to([server.url], "least_outstanding") as world:
            body = chat(900, model="tiny")
            async with world.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                await anext(answer.aiter_raw())
                assert server.engine.pages.in_use > 0 and world.pool.ongoing == 1
            await until(lambda: server.engine.pages.in_use == 0, "every page is back")

    with serve_in_thread(tiny_engine(folder, num_pages=200)) as server:
        asyncio.run(asyncio.wait_for(main(server), PATIENCE))


# ---------------------------------------------------------------- processes
@contextmanager
def fleet_process(folder, *arguments: str):
    """The real command. Yields .url .process .said .replicas() (their processes); whatever happens, none is left."""
    command = [sys.executable, "-m", "minserve", "fleet", "--port", "0", *arguments, "--", "--model", str(folder),
               "--num-pages", "400", "--max-running", "4", "--token-budget", "64"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said, found, seen = [], threading.Event(), {}

    def read():
        for line in process.stdout:
            said.append(line.strip())
            if "routing to" in line:
                found.set()
        found.set()

    reading = threading.Thread(target=read, daemon=True)
    reading.start()

    def replicas():
        try:
            children = psutil.Process(process.pid).children()
        except psutil.NoSuchProcess:
            return []
        seen.update((child.pid, child) for child in children)
        return children

    try:
        assert found.wait(PATIENCE) and said and "routing to" in said[-1], said
        replicas()
        yield SimpleNamespace(
            url=said[-1].rsplit(" at ", 1)[1], process=process, said=said, replicas=replicas
        )
    finally:
        replicas()
        process.kill()
        process.wait(PATIENCE)
        _, left = psutil.wait_procs(seen.values(), timeout=20)
        for child in left:
            child.kill()
        reading.join(PATIENCE)
        process.stdout.close()
    assert left == []


def chat(max_tokens: int, **more) -> dict:
    return dict(
        messages=[dict(role="user", content="Hi")],
        max_tokens=max_tokens,
        ignore_eos=True,
        stream=True,
        **more,
    )


async def answer_to(client, body: dict) -> list[dict]:
    """The events of one streamed answer."""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, (await answer.aread(), answer.status_code)
        return [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {")]


def whole(events: list[dict]) -> bool:
    return all("error" not in e for e in events) and events[-1]["choices"][0]["finish_reason"] == "length"


@needs_signals
@pytest.mark.slow
def test_one_three_one_under_load_and_a_clean_end(folder):
    """No request fails while replicas come and go; a crashed one is replaced; SIGTERM lets what runs finish."""

    async def scenario(world):
        model = (await world.client.get("/v1/models")).json()["data"][0]["id"]
        body, answered, enough = chat(200, model=model), [], asyncio.Event()

        async def client():
            while not enough.is_set():
                answered.append(await answer_to(world.client, body))

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await until(
            lambda: sum("answers after" in line for line in world.said) == 3, "three answer", PATIENCE
        )
        served = len(answered)
        await until(lambda: len(answered) > served + 16, "and all are used", PATIENCE)
        enough.set()
        await asyncio.gather(*clients)
        assert all(map(whole, answered))
        replicas = (await world.client.get("/stats")).json()["replicas"]
        assert len(replicas) == 3 and all(r["stats"]["requests"]["finished"] for r in replicas)
        await until(lambda: len(world.replicas()) == 1, "one is left", PATIENCE)

        long = asyncio.create_task(answer_to(world.client, chat(900, model=model)))
        await until_async(world, lambda stats: stats["ongoing"] == 1 and stats["running"] == 1)
        world.replicas()[0].kill()
        events = await long
        assert "broke off" in events[-1]["error"]["message"] and "choices" in events[0]
        await until(lambda: sum("answers after" in line for line in world.said) == 4, "replaced", PATIENCE)
        assert whole(await answer_to(world.client, body))

        long = asyncio.create_task(answer_to(world.client, chat(900, model=model)))
        await until_async(world, lambda stats: stats["running"] == 1)
        world.process.send_signal(signal.SIGTERM)
        assert whole(await long)

    async def main(world):
        async with httpx2.AsyncClient(timeout=PATIENCE, trust_env=False, base_url=world.url) as world.client:
            await asyncio.wait_for(scenario(world), 3 * PATIENCE)

    quick = "--min 1 --max 3 --look-back-period-s 1 --upscale-delay-s 0.5 --downscale-delay-s 2"
    with fleet_process(folder, *quick.split()) as world:
        asyncio.run(main(world))
        assert world.process.wait(PATIENCE) == 0
        targets = [int(line.rsplit("-> ", 1)[1]) for line in world.said if re.search(r"-> \d+$", line)]
        assert max(targets) == 3 and targets[-1] == 1


async def until_async(world, condition):
    async with asyncio.timeout(PATIENCE):
        while not condition((await world.client.get("/stats")).json()):
            await asyncio.sleep(0.01)


@pytest.mark.slow
def test_killed_it_leaves_nobody_behind(folder, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with fleet_process(folder, "--replicas", "1") as world:
        [child] = world.replicas()
        assert child.environ()["OMP_WAIT_POLICY"] == "PASSIVE", "replicas share their cores"
        world.process.kill()
        gone, left = psutil.wait_procs([child], timeout=PATIENCE)
        assert gone == [child] and left == []
