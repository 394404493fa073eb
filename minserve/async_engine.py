"""The engine for many callers at once: an asyncio front, one loop behind it, each answer a stream.

    async with AsyncEngine(engine) as serving:
        stream = await serving.add("Why is the sky blue?", SamplingParams(max_tokens=64))
        async for output, text, last in stream:            # text as it becomes certain
            print(text, end="")

One task turns the engine: it lets in what arrived, takes out what was aborted, then runs one step in a worker thread
while the event loop goes on. So requests and schedules never meet in the middle of a step, and no lock is needed.

Contracts    every output ends exactly once, and its stream ends after it; leaving a stream early aborts it
             add() raises what Engine.add raises: a bad request never reaches the loop
             a reader costs at most `backlog` unread events: whoever lags further behind is aborted
             each output has a Timeline (metrics.py), complete when on_end(output, timeline) is called
             drain() lets nobody in, and ends when the last answer has, or at the deadline
             close() ends all streams ("abort") and gives every page back; an engine that breaks does the same,
             and every reader gets the error; so does one whose step has not come back after `step_seconds`
Story        notebooks/08_the_engine.ipynb, notebooks/13_serving_and_slos.ipynb
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from minserve.engine import Engine, Output
from minserve.metrics import Timeline
from minserve.request import UNKNOWN, SamplingParams, Status
from minserve.step_log import StepRecord

BACKLOG = 2048  # events, one for each step and output: a minute of a reader's absence at 34 steps a second
STEP_SECONDS = 300.0  # far more than a step takes, also on a slow CPU; so long nobody hears that one hangs


class NotServing(RuntimeError):
    """Nobody is let in: the engine drains, was closed, or has failed."""


class Stuck(RuntimeError):
    """Something was begun on the worker thread and has not come back: this process can compute no more."""


class Stream:
    """What the caller of add() holds: `outputs`, complete when the iteration ends, and their `timelines`.

    Iterate for (output, new text, last): `last` is True once for each output. (`output.finished` may be true earlier,
    while its last text still waits to be read.) `told[output.index]` tokens were known when that text was.
    """

    def __init__(self, serving: "AsyncEngine"):
        self.serving, self.outputs, self.timelines = serving, [], []
        self.told: list[int] = []
        self.lagged = False  # it was aborted because nobody read it
        self._news: asyncio.Queue = asyncio.Queue()
        self._open = 0  # outputs whose end has not been read yet

    def join(self, outputs: list[Output], timelines: list[Timeline]) -> None:
        for output in outputs:
            output.index += len(self.told)
        self.outputs += outputs
        self.timelines += timelines
        self.told += [0] * len(outputs)
        self._open += len(outputs)

    def close(self, outputs: list[Output], arrival: float) -> None:
        """Outputs that want no token: they have ended, "length", without the engine."""
        self.join(outputs, [Timeline(arrival) for _ in outputs])
        for output in outputs:
            output.request.status, output.request.finish_reason = Status.FINISHED, "length"
            self.put(output, "", True)

    def put(self, output: Output, text: str, last: bool) -> None:
        self._news.put_nowait((output, text, last, num_known(output)))

    @property
    def unread(self) -> int:
        return self._news.qsize()

    def __aiter__(self):
        return self

    async def __anext__(self) -> tuple[Output, str, bool]:
        if not self._open:
            raise StopAsyncIteration
        try:
            output, text, last, self.told[output.index] = await self._news.get()
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
    def __init__(
        self,
        engine: Engine,
        *,
        backlog: int = BACKLOG,
        step_seconds: float = STEP_SECONDS,
        on_step: Callable[[StepRecord], None] | None = None,
        on_end: Callable[[Output, Timeline], None] | None = None,
        thread: ThreadPoolExecutor | None = None,
    ):
        """on_step hears of each step, on_end of each output that ended; both on the event loop, both may be many.

        step_seconds    after which a step counts as hung: a kernel that waits for ever raises nothing, and without a
                        limit everybody would wait with it while the server looked well
        thread          the only one in which anything of this engine was ever computed, its loading included. OpenMP
                        keeps threads for each thread that computes, and once there are more of them than cores they
                        sleep at every barrier instead of spinning: on a CPU, steps are then much slower
        """
        if not step_seconds > 0:
            raise ValueError(f"step_seconds {step_seconds}: every step would hang; inf is no limit")
        self.engine, self.backlog, self.step_seconds = engine, backlog, step_seconds
        self.on_step, self.on_end = [on_step] if on_step else [], [on_end] if on_end else []
        self.error: BaseException | None = None  # why the loop broke, if it did
        self.draining = False
        self._streams: dict[int, Stream] = {}  # by request id
        self._fresh: dict[int, Timeline] = {}  # of those that no step has computed yet
        self._between: list[tuple[Callable, asyncio.Future | None]] = []  # to be done before the next step
        self._wake, self._closed, self._loop = asyncio.Event(), False, None
        self._thread = thread or ThreadPoolExecutor(1, "engine")
        self._empty = asyncio.Event()  # no output is open
        self._empty.set()

    async def __aenter__(self):
        self._loop = asyncio.create_task(self._turn())
        return self

    async def __aexit__(self, *_):
        await self.close()

    @property
    def healthy(self) -> bool:
        return self._loop is not None and not self._closed and self.error is None

    # ------------------------------------------------------------ the door
    async def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        arrival: float | None = None,
        join: Stream | None = None,
        **fields,
    ) -> Stream:
        """Queue a prompt. Raises ValueError, QueueFull (both as Engine.add), NotServing.

        arrival   when it came (time.monotonic() seconds), if that was earlier: TTFT and `timeout` count from there
        join      a stream that shall carry these outputs too, behind its own
        fields    priority, salt, made, kv, key, constraint: as Engine.add
        """
        self._check_serving()
        arrival = time.monotonic() if arrival is None else arrival
        deadline = None if timeout is None else arrival + timeout
        outputs = self.engine.make(prompt, params or SamplingParams(), deadline=deadline, **fields)
        timelines = [
            Timeline(arrival, prompt_tokens=len(o.request.prompt), priority=o.request.priority)
            for o in outputs
        ]
        stream = join or Stream(self)
        queued = asyncio.get_running_loop().create_future()

        def let_in():
            if queued.cancelled():
                return
            try:
                self.engine.queue(outputs)
            except Exception as refused:
                queued.set_exception(refused)
                return
            stream.join(outputs, timelines)
            self._note_arrivals(stream, outputs, timelines)
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

    async def between(self, operation: Callable):
        """What operation() returns, called in a worker thread while no step runs: for what must not meet one."""
        self._check_serving()
        done = asyncio.get_running_loop().create_future()
        self._do(operation, done)
        return await done

    async def drain(self, seconds: float) -> bool:
        """Let nobody in and wait for the answers under way, so long at most; then close. Have all of them ended?"""
        self.draining = True
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            pass
        complete = self._empty.is_set()
        await self.close()
        return complete

    async def close(self) -> None:
        """End everything. Returns when every page is back."""
        self._closed = True
        self._wake.set()
        if self._loop is not None:
            await self._loop

    def _check_serving(self) -> None:
        if self.draining and not self._closed:
            raise NotServing("the engine is shutting down: it finishes what it has, and takes nothing new")
        if not self.healthy:
            why = "`async with` was not entered" if self._loop is None else "it was closed"
            why = f"it has failed: {self.error!r}" if self.error else why
            raise NotServing(f"the engine is not running: {why}")

    # ------------------------------------------------------------ the loop
    async def _in_thread(self, work: Callable):
        """What it returns, run in the worker thread. Raises Stuck."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        await asyncio.wait([running], timeout=self.step_seconds)
        if not running.done():
            raise Stuck(f"a step has not come back for {self.step_seconds:g} s: it hangs")
        return running.result()

    def _do(self, operation: Callable, done: asyncio.Future | None = None) -> None:
        self._between.append((operation, done))
        self._wake.set()

    async def _turn(self) -> None:
        try:
            while not self._closed:
                await self._clear()
                if self.engine.scheduler.has_work:
                    self._note(*await self._in_thread(self._step))
                else:
                    await self._wake.wait()
                self._wake.clear()
        except Exception as error:  # the engine itself is broken: say so to everybody rather than fall silent
            self.error = error
        finally:
            self._thread.shutdown(wait=False)
            self._closed = True
            await self._clear()
            self._end_all()

    def _step(self):
        """One step, in the worker thread, and what it was: its begin, its record if it left one, its news, its end."""
        log, begin = self.engine.log, time.monotonic()
        before = log[-1] if log else None
        news = self.engine.step()
        record = log[-1] if log and log[-1] is not before else None
        return begin, record, news, time.monotonic()

    async def _clear(self) -> None:
        while self._between:
            operation, done = self._between.pop(0)
            if done is None:
                operation()
            elif not done.cancelled():
                await self._carry_out(operation, done)

    async def _carry_out(self, operation: Callable, done: asyncio.Future) -> None:
        result = error = None
        try:
            if self._closed:
                raise NotServing("the engine was closed before this was done")
            result = await self._in_thread(operation)
        except Exception as its_own:
            error = its_own
        if not done.cancelled():
            done.set_exception(error) if error else done.set_result(result)
        if isinstance(error, Stuck):
            raise error

    def _end_all(self) -> None:
        for output in self.engine.outputs.values():
            output.error = output.error or self.error
        try:
            self._tell(self.engine.close())
        finally:  # even if closing fails: nobody waits for ever
            for stream in set(self._streams.values()):
                for output in stream.outputs:
                    if self._streams.pop(output.request.id, None):
                        stream.put(output, "", True)
            self._fresh.clear()
            self._empty.set()

    # ------------------------------------------------------------ who hears what, and when it was
    def _note_arrivals(self, stream: Stream, outputs: list[Output], timelines: list[Timeline]) -> None:
        now = time.monotonic()
        self._empty.clear()
        for output, timeline in zip(outputs, timelines):
            timeline.queued = now
            self._streams[output.request.id], self._fresh[output.request.id] = stream, timeline
            if output.told:  # tokens that were made elsewhere are news here
                timeline.told(now, output.told, output.text)
                stream.put(output, output.text, False)

    def _note(self, begin: float, record: StepRecord | None, news: list, end: float) -> None:
        """A step has ended: into the timelines, to the readers, to who listens."""
        if record and self._fresh:
            for row in record.rows:
                if timeline := self._fresh.pop(row.request, None):
                    timeline.started = begin
        self._tell(news, end)
        for listen in self.on_step if record else ():
            listen(record)

    def _tell(self, news: list[tuple[Output, str]], now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        for output, text in news:
            stream = self._streams.get(output.request.id)
            if stream is None:
                continue  # its end was told while this news was on its way
            timeline = stream.timelines[output.index]
            timeline.told(now, num_known(output) - len(timeline.tokens), text)
            if output.finished:
                del self._streams[output.request.id]
                self._ended(output, timeline, now)
            stream.put(output, text, output.finished)
            if stream.unread > self.backlog and not stream.lagged:
                stream.lagged = True
                self.abort(stream)
        if not self._streams:
            self._empty.set()

    def _ended(self, output: Output, timeline: Timeline, now: float) -> None:
        self._fresh.pop(output.request.id, None)
        timeline.cached_tokens = output.request.cached_tokens
        timeline.preemptions = output.request.preemptions
        timeline.ended(now, "error" if output.error else output.finish_reason)
        for listen in self.on_end:
            listen(output, timeline)


def num_known(output: Output) -> int:
    """How many tokens its answer has: what len(output.tokens) says, without a copy of them."""
    request = output.request
    return len(request.tokens) - len(request.prompt) - (request.tokens[-1] == UNKNOWN)
