"""Server processes on this machine: started on a free port, watched, and gone when whoever started them is gone.

    async with LocalReplicas(["--model", folder]) as local:
        replica = await local.start()            # returns when it answers: .url, .cold_start in seconds
        await local.stop(replica)                # SIGTERM: it finishes what it has; then, if need be, killed

A cold start is all that happens before a process can answer: Python, libraries, weights, memory's first touch. It is
why scaling up has a price, and why what runs is not stopped lightly.

Nobody is left behind: leaving the block ends all of them, however it is left, and if this process is killed itself,
each child sees its standard input end and ends, too. That is the one thing `python -m minserve.cluster.replicas`
does besides what `python -m minserve` does. It needs neither signals nor groups, so it works on every system.

Story    notebooks/14_the_fleet.ipynb
"""

import asyncio
import os
import runpy
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LINE = "minserve: serving "  # NAME at URL: what a server says once it answers
BESIDE_OTHERS = {
    "OMP_WAIT_POLICY": "PASSIVE"
}  # threads that spin while they wait take the other replicas' cores


class ReplicaFailed(RuntimeError):
    """A process that ended, or was too slow, before it answered."""


@dataclass(eq=False)
class LocalReplica:
    process: asyncio.subprocess.Process
    started: float  # time.monotonic()
    url: str = ""
    cold_start: float | None = None  # seconds, once it answers
    stopping: bool = False
    said: deque[str] = field(default_factory=lambda: deque(maxlen=30))  # its last lines
    reading: asyncio.Task | None = None


class LocalReplicas:
    def __init__(
        self,
        arguments: Sequence[str] = (),
        *,
        patience: float = 300.0,
        on_crash: Callable[[LocalReplica], None] = lambda replica: None,
        command: Sequence[str] = (sys.executable, "-m", "minserve.cluster.replicas", "serve", "--port", "0"),
    ):
        """`arguments`: what `minserve serve` gets. patience: seconds a cold start may take. on_crash(replica): it
        had answered, and ended without being asked to."""
        self.command, self.patience, self.on_crash = [*command, *arguments], patience, on_crash
        self.alive: list[LocalReplica] = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await asyncio.gather(*(self.stop(replica, 0) for replica in list(self.alive)))

    async def start(self) -> LocalReplica:
        """One more, once it answers. Raises ReplicaFailed with its last words."""
        replica = LocalReplica(
            await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,  # nobody writes: it ends when we do
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=BESIDE_OTHERS | os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # a Ctrl-C in the terminal is for us: we drain, then stop them
            ),
            time.monotonic(),
        )
        self.alive.append(replica)
        answers = asyncio.get_running_loop().create_future()
        replica.reading = asyncio.create_task(self._read(replica, answers))
        try:
            async with asyncio.timeout(self.patience):
                await answers
        except BaseException as error:
            await self.stop(replica, 0)
            if isinstance(error, TimeoutError):
                raise ReplicaFailed(
                    self._why(replica, f"did not answer within {self.patience:g} s")
                ) from None
            raise
        return replica

    async def stop(self, replica: LocalReplica, seconds: float = 30.0) -> None:
        """Ask it to end, wait that long, then end it. Returns when it has ended."""
        replica.stopping, process = True, replica.process
        try:
            if process.returncode is None and seconds:
                process.terminate()
                async with asyncio.timeout(seconds):
                    await process.wait()
        except (TimeoutError, ProcessLookupError):
            pass
        finally:  # also if nobody waits for it any more
            if process.returncode is None:
                process.kill()
        await process.wait()
        await asyncio.gather(replica.reading, return_exceptions=True)

    async def _read(self, replica: LocalReplica, answers: asyncio.Future) -> None:
        """Its lines, to the end: a pipe that nobody reads fills up, and whoever writes to it stands still."""
        try:
            async for line in _lines(replica.process.stdout):
                replica.said.append(line)
                if line.startswith(LINE) and not answers.done():
                    replica.url = line.rsplit(" at ", 1)[1]
                    replica.cold_start = time.monotonic() - replica.started
                    answers.set_result(None)
            await replica.process.wait()
        finally:
            self.alive.remove(replica)
        if not answers.done():
            answers.set_exception(
                ReplicaFailed(self._why(replica, f"ended with {replica.process.returncode}"))
            )
        elif not replica.stopping:
            self.on_crash(replica)

    def _why(self, replica: LocalReplica, what: str) -> str:
        return f"{' '.join(self.command)} {what}. Its last lines:\n  " + "\n  ".join(replica.said)


async def _lines(stream: asyncio.StreamReader):
    """Lines of any length: the middle of one that is very long is left out."""
    while True:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.LimitOverrunError as error:
            await stream.readexactly(error.consumed)
            continue
        except asyncio.IncompleteReadError as error:
            if error.partial:
                yield error.partial.decode(errors="replace").rstrip()
            return
        yield line.decode(errors="replace").rstrip()


def main(argv: list[str]) -> None:
    """`python -m minserve ARGV`, as long as standard input is open."""

    def watch():
        while os.read(0, 4096):
            pass
        os._exit(1)  # whoever would get the answers is gone

    threading.Thread(target=watch, daemon=True).start()
    sys.argv = ["minserve", *argv]
    runpy.run_module("minserve", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
