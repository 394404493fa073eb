"""uvicorn's server, but for its beginning, which is announced, and its end, which waits for answers under way."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import uvicorn


class AnnouncedServer(uvicorn.Server):
    """It prints `minserve: WHAT at URL` once it answers. The first signal drains it, a second one does not wait."""

    def __init__(self, config: uvicorn.Config, what: str, drain: Callable[[], Awaitable]):
        super().__init__(config)
        self.what, self._drain, self.draining = what, drain, None

    async def startup(self, sockets=None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            port = self.servers[0].sockets[0].getsockname()[1]
            print(f"minserve: {self.what} at http://{host}:{port}", flush=True)

    def handle_exit(self, sig, frame) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(self.leave)

    def leave(self) -> None:
        if self.draining:
            self.should_exit = self.force_exit = True
        else:
            self.draining = asyncio.create_task(self.drain())

    async def drain(self) -> None:
        await self._drain()
        self.should_exit = True
