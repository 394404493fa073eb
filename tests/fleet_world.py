"""A router to test with, and servers that behave as told: raw sockets, so that they can also break off anywhere."""

import asyncio
import functools
import json
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import httpx2
import uvicorn

from minserve.cluster import router as router_module
from minserve.cluster.policies import POLICIES

PATIENCE = 120  # seconds: the longest anything here waits


def in_loop(test):
    """Run a coroutine as a test, with an end."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        return asyncio.run(asyncio.wait_for(test(*args, **kwargs), PATIENCE))

    return run


async def until(condition, what: str, patience: float | None = None):
    async with asyncio.timeout(patience or PATIENCE / 2):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


def event(text: str) -> bytes:
    return f"data: {json.dumps(dict(choices=[dict(index=0, delta=dict(content=text))]))}\n\n".encode()


class Upstream:
    """A server on a free port. `behaviour(upstream, asked, writer)` writes what it likes; .go lets it continue."""

    def __init__(self, behaviour):
        self.behaviour, self.asked, self.well = behaviour, [], True
        self.go, self.closed, self.broken = asyncio.Event(), asyncio.Event(), 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        self.kill()
        await asyncio.sleep(0)

    def kill(self):
        """Refuse connections and drop those there are, as a process does that is killed."""
        self.server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader, writer):
        self._writers.add(writer)
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1"):
                first, *lines = head.strip().split("\r\n")
                headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                if path in self.own:
                    await self.own[path](self, writer)
                    continue
                asked = SimpleNamespace(method=method, path=path, headers=headers, body=body)
                self.asked.append(asked)
                answering = asyncio.create_task(self.behaviour(self, asked, writer))
                left = asyncio.create_task(reader.read(1))
                await asyncio.wait((answering, left), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done() or isinstance(
                    answering.exception(), ConnectionError
                ):  # who asked has gone
                    answering.cancel()
                    self.closed.set()
                    return
                left.cancel()
                await answering
                await asyncio.gather(left, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _health(self, writer):
        await reply(writer, 200 if self.well else 503, b"")

    async def _load(self, writer):
        await reply(writer, 200, b'{"running": 2, "waiting": 1}')

    async def _stats(self, writer):
        told = dict(model="tiny", running=2, waiting=1, max_running=4, steps=7, tokens_per_second=1.5,
                    pages=dict(total=10, free=8, cached=1, in_use=1), requests=dict(finished=5, failed=1))  # fmt: skip
        await reply(writer, 200, json.dumps(told).encode())

    async def _metrics(self, writer):
        text = (
            "# HELP minserve:num_requests_running Requests in the batch.\n"
            "# TYPE minserve:num_requests_running gauge\n"
            'minserve:num_requests_running{model_name="tiny"} 2.0\n'
            "# HELP minserve:up Up.\n# TYPE minserve:up gauge\nminserve:up 1.0\n"
        )
        await reply(writer, 200, text.encode())

    own = {"/health": _health, "/load": _load, "/stats": _stats, "/metrics": _metrics}


# ---------------------------------------------------------------- behaviours
async def reply(writer, status: int, content: bytes, **headers):
    lines = [f"HTTP/1.1 {status} Whatever", f"content-length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + content)
    await writer.drain()


async def fine(upstream, asked, writer):
    told = dict(path=asked.path, method=asked.method, said=asked.body.decode(), port=upstream.port)
    await reply(
        writer, 200, json.dumps(told).encode(), content_type="application/json", x_request_id="cmpl-1"
    )


def refuses(status: int):
    async def behave(upstream, asked, writer):
        error = json.dumps(dict(error=dict(message="full", type="x", param=None, code=str(status)))).encode()
        await reply(writer, status, error, content_type="application/json", retry_after="3")

    return behave


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def streams(*texts: str, breaks: bool = False):
    """Two events, then it waits for .go, then the rest; `breaks`: no end, the connection is dropped."""

    async def behave(upstream, asked, writer):
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for i, text in enumerate(texts):
            if i == 2:
                await upstream.go.wait()
            writer.write(chunk(event(text)))
            await writer.drain()
        if breaks:
            writer.transport.abort()
        else:
            writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))

    return behave


async def dies_at_once(upstream, asked, writer):
    writer.transport.abort()


async def dies_after_its_headers(upstream, asked, writer):
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await writer.drain()
    writer.transport.abort()


async def dies_in_the_middle_of_a_whole_answer(upstream, asked, writer):
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.transport.abort()


async def hangs(upstream, asked, writer):
    await upstream.go.wait()
    await fine(upstream, asked, writer)


async def pours(upstream, asked, writer):
    """More than any buffer on the way holds."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(chunk(event("x" * 100_000)))
        await writer.drain()


# ---------------------------------------------------------------- the router
@asynccontextmanager
async def routed(*behaviours, policy="round_robin", module=router_module, interval=60.0, **options):
    """A router in front of one upstream for each behaviour. Yields .url .router .pool .upstreams .client; afterwards
    nothing may be outstanding."""
    async with AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(Upstream(behaviour)) for behaviour in behaviours]
        urls = [upstream.url for upstream in upstreams]
        world = await stack.enter_async_context(routed_to(urls, policy, module, interval=interval, **options))
        world.upstreams = upstreams
        yield world


@asynccontextmanager
async def routed_to(urls, policy, module=router_module, **options):
    """A router in front of servers that are there. Yields .url .router .pool .client"""
    router = module.Router(POLICIES[policy](), urls, **options)
    config = uvicorn.Config(
        module.create_app(router), host="127.0.0.1", port=0, http="h11", ws="none", log_level="critical",
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or running.done(), "the router started")
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        async with httpx2.AsyncClient(timeout=PATIENCE, trust_env=False, base_url=url) as client:
            yield SimpleNamespace(url=url, router=router, pool=router.pool, client=client)
        await until(lambda: not router.pool.ongoing, "nothing is outstanding")
        assert all(replica.ongoing == 0 for replica in router.pool.replicas.values())
    finally:
        server.should_exit = True
        await asyncio.gather(running, return_exceptions=True)
