"""An HTTP server that says when it answers, and that ends by finishing what it has.

A request's head must come within 30 seconds: a connection that says nothing, or a byte now and then, is closed.
SIGTERM or Ctrl-C: `drain()` is awaited, then the port is closed. A second signal does not wait: `hurry()` ends what is
still under way, or without it everything just ends.
Story    notebooks/13_serving_and_slos.ipynb, notebooks/14_the_fleet.ipynb
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

CLOSING_SECONDS = 5  # for connections to take their last bytes
Ending = Callable[[], Awaitable[object]]


class Protocol(H11Protocol):
    """uvicorn's, with a time limit where it has none. Of its two parsers the one that reads the body of a request
    that offers an upgrade, as `curl --http2` and Java's client do."""

    head_seconds = 30.0  # from the connection, or from the first byte of its next request
    late = None  # a timer: runs while a head is awaited

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.late = self.loop.call_later(self.head_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # the head is whole
            self.late.cancel()
        elif self.late.cancelled():  # the first bytes of the next one
            self.late = self.loop.call_later(self.head_seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.late.cancel()
        super().connection_lost(exc)


HTTP = dict(http=Protocol, ws="none")  # no websockets: uvicorn would take a POST for one


def settings(app, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False,
        timeout_graceful_shutdown=CLOSING_SECONDS, **HTTP,
    )  # fmt: skip


class Server(uvicorn.Server):
    """uvicorn's server, but for its beginning, which is announced, and its end, which waits for answers under way."""

    def __init__(
        self,
        config: uvicorn.Config,
        announce: Callable[[str], None],
        drain: Ending,
        hurry: Ending | None = None,
    ):
        """announce(url): it answers there."""
        super().__init__(config)
        self.announce, self.drain, self.hurry = announce, drain, hurry
        self.loop = self.draining = self.hurrying = None

    async def startup(self, sockets=None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            self.announce(f"http://{host}:{self.servers[0].sockets[0].getsockname()[1]}")

    def handle_exit(self, sig, frame) -> None:
        if self.loop is None:  # not even started
            self.should_exit = True
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(self.leave)

    def leave(self) -> None:
        if self.draining is None:
            self.draining = asyncio.create_task(self._drain())
        elif self.hurry:
            self.hurrying = asyncio.create_task(self.hurry())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self.drain()
        self.should_exit = True
