"""An HTTP server that says when it answers, and that ends by finishing what it has.

SIGTERM or Ctrl-C: `drain()` is awaited, then the port is closed. A second signal does not wait.
Story    notebooks/14_the_fleet.ipynb
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import uvicorn


class Server(uvicorn.Server):
    """uvicorn's server, but for its beginning, which is announced, and its end, which waits for answers under way."""

    def __init__(
        self, config: uvicorn.Config, announce: Callable[[str], None], drain: Callable[[], Awaitable[object]]
    ):
        super().__init__(config)
        self.announce, self.drain, self.draining = announce, drain, None

    async def startup(self, sockets=None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            self.announce(f"http://{host}:{self.servers[0].sockets[0].getsockname()[1]}")

    def handle_exit(self, sig, frame) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(self.leave)

    def leave(self) -> None:
        if self.draining:
            self.should_exit = self.force_exit = True
        else:
            self.draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self.drain()
        self.should_exit = True
