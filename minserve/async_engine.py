"""The engine for many callers at once: an asyncio front, one loop behind it, each answer a stream.

    async with AsyncEngine(engine) as serving:
        stream = await serving.add("Why is the sky blue?", SamplingParams(max_tokens=64))
        async for output, text, last in stream:            # text as it becomes certain
            print(text, end="")

One task turns the engine: it lets in what arrived, takes out what was aborted, then runs one step in a worker thread
while the event loop goes on. So requests and schedules never meet in the middle of a step, and no lock is needed.

Contracts    every output ends exactly once, and its stream ends after it; leaving a stream early aborts it
             add() raises what Engine.add raises: a bad request never reaches the loop
             close() ends all streams ("abort") and gives every page back; an engine that breaks does the same,
             and every reader gets the error
Story        notebooks/08_the_engine.ipynb
"""

import asyncio
import time
from collections.abc import Callable

from minserve.engine import Engine, Output
from minserve.request import SamplingParams


class Stream:
    """What the caller of add() holds: `outputs`, complete when the iteration ends.

    Iterate for (output, new text, last): `last` is True once for each output. (`output.finished` may be true earlier,
    while its last text still waits to be read.)
    """

    def __init__(self, serving: "AsyncEngine", outputs: list[Output]):
        self.serving, self.outputs = serving, outputs
        self._news: asyncio.Queue = asyncio.Queue()
        self._open = len(outputs)  # outputs whose end has not been read yet

    def __aiter__(self):
        return self

    async def __anext__(self) -> tuple[Output, str, bool]:
        if not self._open:
            raise StopAsyncIteration
        try:
            output, text, last = await self._news.get()
        except asyncio.CancelledError:  # whoever was reading is gone
            self.serving.abort(self)
            raise
        self._open -= last
        return output, text, last

    async def finish(self) -> list[Output]:
        """Read it to its end."""
        async for _ in self:
            pass
        return self.outputs

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.serving.abort(self)


class AsyncEngine:
    def __init__(self, engine: Engine):
        self.engine = engine
        self.error: BaseException | None = None  # why the loop broke, if it did
        self._streams: dict[int, Stream] = {}  # by request id
        self._between: list[Callable[[], None]] = []  # to be done before the next step
        self._wake, self._closed, self._loop = asyncio.Event(), False, None

    async def __aenter__(self):
        self._loop = asyncio.create_task(self._turn())
        return self

    async def __aexit__(self, *_):
        await self.close()

    async def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        salt: bytes = b"",
    ) -> Stream:
        """Queue a prompt. Raises ValueError, QueueFull (both as Engine.add), RuntimeError once closed."""
        if self._closed or self._loop is None:
            raise RuntimeError(
                "the engine is not running: it was closed, has failed, or `async with` was not entered"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        outputs = self.engine.make(
            prompt, params or SamplingParams(), priority=priority, deadline=deadline, salt=salt
        )
        stream, queued = Stream(self, outputs), asyncio.get_running_loop().create_future()

        def let_in():
            if queued.cancelled():
                return
            try:
                self.engine.queue(outputs)
            except Exception as refused:
                queued.set_exception(refused)
                return
            self._streams.update((output.request.id, stream) for output in outputs)
            queued.set_result(None)

        self._do(let_in)
        try:
            await queued
        except asyncio.CancelledError:  # the caller left before it could hold the stream
            self.abort(stream)
            raise
        return stream

    def abort(self, stream: Stream) -> None:
        """End a stream's outputs before the next step. Calling it late or twice does nothing."""
        self._do(lambda: self._tell(self.engine.abort(stream.outputs)))

    async def close(self) -> None:
        """End everything. Returns when every page is back."""
        self._closed = True
        self._wake.set()
        if self._loop is not None:
            await self._loop

    def _do(self, operation: Callable[[], None]) -> None:
        self._between.append(operation)
        self._wake.set()

    async def _turn(self) -> None:
        try:
            while not self._closed:
                self._clear()
                if self.engine.scheduler.has_work:
                    self._tell(await asyncio.to_thread(self.engine.step))
                else:
                    await self._wake.wait()
                self._wake.clear()
        except Exception as error:  # the engine itself is broken: say so to everybody rather than fall silent
            self.error = error
        finally:
            self._closed = True
            self._clear()
            self._end_all()

    def _end_all(self) -> None:
        for output in self.engine.outputs.values():
            output.error = output.error or self.error
        try:
            self._tell(self.engine.close())
        finally:  # even if closing fails: nobody waits for ever
            for stream in set(self._streams.values()):
                for output in stream.outputs:
                    stream._news.put_nowait((output, "", True))

    def _clear(self) -> None:
        while self._between:
            self._between.pop(0)()

    def _tell(self, news: list[tuple[Output, str]]) -> None:
        for output, text in news:
            request = output.request.id
            stream = self._streams.pop(request) if output.finished else self._streams[request]
            stream._news.put_nowait((output, text, output.finished))
