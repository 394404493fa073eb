"""Bytes in and events out: a body that is bounded in size and time, and streams that end when their reader does.

received(request)        the body, or Refused
unless_gone(request, f)  what f returns, unless the client leaves first: then f is cancelled
EventStream              server-sent events; a client that leaves or stalls aborts what makes them
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from minserve.async_engine import Stream
from minserve.protocol import Refused

SSE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
log = logging.getLogger("minserve.server")


@dataclass(frozen=True)
class Limits:
    """What one client may ask for, so that the others are served too."""

    max_model_len: int | None = None  # tokens of prompt and answer; None: what the engine has room for
    choices: int = 128  # of one request: n times its prompts
    body_bytes: int = 4 << 20
    body_seconds: float = 30.0  # for the whole body to arrive
    stall_seconds: float = 60.0  # for a reader to take the next event


class EventStream(StreamingResponse):
    """Events as they come, until the client leaves or takes nothing for `patience` seconds: either aborts."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], stream: Stream, patience: float, headers: dict):
        super().__init__(events, headers=SSE | headers)
        self.stream, self.patience = stream, patience

    async def __call__(self, scope, receive, send) -> None:
        async def patient(message):
            async with asyncio.timeout(self.patience):
                await send(message)

        async with self.stream:  # left in whatever way, it is aborted
            writing, _ = await first_of(self.stream_response(patient), left(receive))
        await self.body_iterator.aclose()
        if not writing.cancelled() and (error := writing.exception()):
            if not isinstance(error, TimeoutError):
                raise error
            log.info(
                "%s: cut off, for nothing was read for %s s", self.headers["X-Request-Id"], self.patience
            )
            await cut(receive)


async def cut(receive) -> None:
    """Drop a connection with what was not read of it. ASGI has no word for that: what answers there must be asked."""
    if transport := getattr(getattr(receive, "__self__", None), "transport", None):
        transport.abort()
        await asyncio.sleep(0)


async def first_of(*work) -> list[asyncio.Task]:
    """Wait until one of them is done, and cancel the others. Returns the tasks."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


async def left(receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine):
    """What it returns; or, as soon as nobody waits for that any more, ClientDisconnect, and it is cancelled."""
    answer, _ = await first_of(work, left(request.receive))
    if answer.cancelled():
        raise ClientDisconnect
    return answer.result()


async def received(request: Request, limits: Limits) -> bytes:
    """The body. Raises Refused for one that is no JSON, too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"the body's Content-Type is {kind or 'missing'}: send application/json")
    raw = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                raw += piece
                if len(raw) > limits.body_bytes:
                    raise Refused(
                        413,
                        f"the body is larger than {limits.body_bytes:,} bytes: send less",
                        Connection="close",
                    )
    except TimeoutError:
        raise Refused(
            408, f"the body did not arrive within {limits.body_seconds} s", Connection="close"
        ) from None
    return bytes(raw)


def event(body: dict) -> bytes:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text.translate(LINE_ENDS)}\n\n".encode()


# JSON may hold these as they are and a stream of events too, but many a client's splitlines() breaks the event at them
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
