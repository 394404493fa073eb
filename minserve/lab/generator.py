"""Load in two ways: open, where requests come when the schedule says so, and closed, where users wait for answers.

    open_loop(arrivals, send)           a request starts when it is due, whatever became of the others
    closed_loop(arrivals, send, users)  each of so many users sends the next request when the last one is answered
    latencies(times, service, slots)    what open_loop must measure, computed: first come, first served

    send(shot)   a coroutine that makes one request and writes what happened into shot.timeline; it raises nothing

The difference is who waits. Let a server with one slot need 0.5 s, and let a request come each 0.1 s: the eighth waits
for seven others and is answered 3.3 s after it was due. A closed loop asks when the server is ready and so measures
0.5 s for each of them; an open loop with a timer that starts when a socket is free says the same. That is *coordinated
omission*: the load generator waits together with the server and leaves its waiting out.

    due --- no socket free ---> sent --- server ---> first token --- ... ---> last token
     |                            |------------------ service ------------------|
     |---------------------------------- e2e -----------------------------------|

Clock    the event loop's own (monotonic), so that a loop with a simulated clock runs the same code
Sources  Gil Tene, "How NOT to Measure Latency" (2013), who gave it the name; open and closed systems: Schroeder,
         Wierman and Harchol-Balter 2006 (NSDI)
Story    notebooks/13_serving_and_slos.ipynb
"""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from minserve.arrivals import Arrival
from minserve.metrics import Timeline


@dataclass(eq=False, slots=True)
class Shot:
    """One request of a run: what was to be asked, and what became of it."""

    arrival: Arrival
    timeline: Timeline  # from when it was due
    sent: float | None = None  # when it had a socket
    why: str = ""  # what went wrong, in words

    @property
    def service(self) -> float | None:
        """Last token - sent: the latency that leaves the wait before out."""
        return self.timeline.tokens[-1] - self.sent if self.timeline.tokens else None


Send = Callable[[Shot], Awaitable[None]]
Hear = Callable[[Shot], None]


async def open_loop(
    arrivals: Sequence[Arrival], send: Send, sockets: int = 1000, hear: Hear = lambda shot: None
) -> list[Shot]:
    """Send each at its time, at most `sockets` at once; waiting for one counts. hear(shot): that one has ended."""
    loop, free = asyncio.get_running_loop(), asyncio.Semaphore(sockets)
    zero = loop.time()
    shots = [
        Shot(arrival, Timeline(zero + arrival.time, priority=arrival.priority))
        for arrival in sorted(arrivals, key=lambda arrival: arrival.time)
    ]

    async def one(shot: Shot) -> None:
        async with free:
            shot.sent = loop.time()
            await send(shot)
        hear(shot)

    async with asyncio.TaskGroup() as tasks:
        for shot in shots:
            await asyncio.sleep(max(0.0, shot.timeline.arrival - loop.time()))
            tasks.create_task(one(shot))
    return shots


async def closed_loop(
    arrivals: Sequence[Arrival], send: Send, users: int, hear: Hear = lambda shot: None
) -> list[Shot]:
    """The same requests in the same order, but nobody comes by himself: the server sets the pace."""
    loop, waiting, shots = asyncio.get_running_loop(), iter(arrivals), []

    async def user() -> None:
        for arrival in waiting:
            now = loop.time()
            shots.append(shot := Shot(arrival, Timeline(now, priority=arrival.priority), now))
            await send(shot)
            hear(shot)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(users):
            tasks.create_task(user())
    return shots


def latencies(times: Sequence[float], service: float, slots: int = 1) -> list[float]:
    """Of requests that come at these times to `slots` servers, `service` seconds each: from due to answered."""
    free, result = [float("-inf")] * slots, []
    for due in sorted(times):
        end = max(due, heapq.heappop(free)) + service
        heapq.heappush(free, end)
        result.append(end - due)
    return result
