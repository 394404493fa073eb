"""The link between two machines, slowed down to what you choose: so many bytes a second, so long until the first.

    predicted = messages * latency + bytes / bandwidth          seconds, one message after the other

A link on one machine is memory, and as fast. To see what a network would do, the sender waits as long as that network
would take, in a thread of its own: the engine computes on while a message is under way, which is the whole point of
sending layer by layer.

Sender       one thread, first in, first out. What it cannot keep up with waits in host memory, up to `most` bytes
Story        notebooks/14_the_fleet.ipynb
"""

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The default is as fast as this machine: nobody waits."""

    bandwidth: float = math.inf  # bytes/s
    latency: float = 0.0  # seconds for each message, whatever its size

    def __post_init__(self):
        if not (self.bandwidth > 0 and 0 <= self.latency < math.inf):
            raise ValueError(
                f"a link of {self.bandwidth:,} bytes/s and {self.latency:,} s: nothing would ever arrive.\n"
                f"  Use a bandwidth > 0 (math.inf is no limit) and a latency >= 0."
            )

    def predicted_seconds(self, num_bytes: int, messages: int = 1) -> float:
        return messages * self.latency + num_bytes / self.bandwidth


class Sender:
    """Sends messages in order, each as late as the link would bring it. send() itself never waits."""

    def __init__(self, put: Callable[[object], None], link: Link, most: int = 1 << 30):
        """`put` carries one message, and is called in the sender's thread. `most`: bytes that may wait."""
        self.put, self.link, self.most = put, link, most
        self.sent_bytes = self.sent = self.waiting_bytes = 0
        self.error: Exception | None = None  # the last one
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._thread.start()

    def send(self, message, num_bytes: int) -> bool:
        """False: too much waits already, and this was not taken."""
        with self._lock:
            if self.waiting_bytes + num_bytes > self.most or self._closed.is_set():
                return False
            self.waiting_bytes += num_bytes
        self._queue.put((message, num_bytes, time.monotonic()))
        return True

    def _run(self) -> None:
        free = 0.0  # when the link has delivered what it was given
        while True:
            message, num_bytes, given = self._queue.get()
            if message is None:
                return
            free = max(free, given) + self.link.predicted_seconds(num_bytes)
            self._closed.wait(max(0.0, free - time.monotonic()))
            try:
                if not self._closed.is_set():
                    self.put(message)
                    self.sent, self.sent_bytes = self.sent + 1, self.sent_bytes + num_bytes
            except Exception as error:  # the next message may have better luck: this thread has to live
                self.error = error
            with self._lock:
                self.waiting_bytes -= num_bytes

    def close(self, timeout: float = 5.0) -> None:
        """What has not left yet never will."""
        self._closed.set()
        self._queue.put((None, 0, 0.0))
        self._thread.join(timeout)
