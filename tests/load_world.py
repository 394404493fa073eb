"""Worlds for the load generator: an event loop whose clock is simulated, and servers that say what they are told to.

simulated(coroutine)      run it with a clock that jumps to the next timer: seconds cost nothing and are exact
serving(answer)           an HTTP server in a thread on a free port; yields its URL
answer(body, say)         a coroutine: what it says becomes an event of the stream; Refuse instead of a stream
"""

import asyncio
import json
import threading
from contextlib import contextmanager

PATIENCE = 60  # seconds: the longest anything here waits


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Where nothing is ready, the clock jumps to the next timer."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


def simulated(coroutine):
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(coroutine)


class Refuse(Exception):
    def __init__(self, status: int, body: str):
        self.status, self.body = status, body


def chunk(text=None, made=None, finish=None, role=None, prompt=7, cached=0, **more) -> dict:
    """One event of a chat's stream; made: completion_tokens so far."""
    delta = {key: value for key, value in (("role", role), ("content", text)) if value is not None}
    event = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}
    return event if made is None else event | {"usage": usage(made, prompt, cached)}


def usage(made, prompt=7, cached=0) -> dict:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": made, "prompt_tokens_details": details}


@contextmanager
def serving(answer, models=("fake",)):
    loop, started = asyncio.new_event_loop(), threading.Event()
    box = {}

    async def run():
        box["stop"] = asyncio.Event()
        server = await asyncio.start_server(_Connection(answer, models), "127.0.0.1", 0)
        box["port"] = server.sockets[0].getsockname()[1]
        started.set()
        await box["stop"].wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert started.wait(PATIENCE)
    try:
        yield f"http://127.0.0.1:{box['port']}"
    finally:
        loop.call_soon_threadsafe(box["stop"].set)
        thread.join(PATIENCE)
        assert not thread.is_alive()


class _Connection:
    def __init__(self, answer, models):
        self.answer, self.models = answer, models

    async def __call__(self, reader, writer):
        try:
            await asyncio.wait_for(self._one(reader, writer), PATIENCE)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _one(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
        text = await reader.readexactly(int(headers.get("content-length", 0)))

        def reply(status, kind, body=""):
            top = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n{body}"
            writer.write(top.encode())

        if "/models" in head[0]:
            if isinstance(self.models, str):
                return reply(200, "text/html", self.models)
            return reply(
                200, "application/json", json.dumps({"data": [{"id": name} for name in self.models]})
            )
        begun = False

        async def say(event):
            nonlocal begun
            if not begun:
                reply(200, "text/event-stream")
            begun = True
            data = event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n"
            writer.write(data.encode())
            await writer.drain()

        try:
            await self.answer(json.loads(text) | {"_headers": headers, "_path": head[0].split()[1]}, say)
        except Refuse as refused:
            reply(refused.status, "application/json", refused.body)
        await writer.drain()
