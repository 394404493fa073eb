"""A shelf for messages that arrive before anybody asks for them, and the plainest transport: no transport at all.

A message is known by its key and number. So the same one twice is one, and what comes late, when its key is done with
or given up, finds it dropped. What nobody fetches is deleted a lease after the last news of its key.

Story      notebooks/14_the_fleet.ipynb
"""

import threading
import time

from minserve.cluster.connector import KVConnector
from minserve.cluster.transfer import Part


class Inbox:
    def __init__(self, lease: float, clock=time.monotonic):
        self.lease, self.clock = lease, clock
        self.error: Exception | None = None
        self._boxes: dict[str, dict[int, Part]] = {}
        self._news: dict[str, float] = {}  # when each key was last heard of
        self._dropped: dict[str, float] = {}  # since when nobody wants it
        self._changed = threading.Condition()  # its lock may be taken twice

    def put(self, part: Part) -> None:
        with self._changed:
            self._expire()
            if part.failed:
                return self.drop(part.key)
            if part.key not in self._dropped:
                self._boxes.setdefault(part.key, {})[part.number] = part
                self._news[part.key] = self.clock()
            self._changed.notify_all()

    def take(self, key: str, number: int, timeout: float) -> Part | None:
        """None: it did not come within `timeout` seconds, or nobody wants it any more, or nothing comes any more."""
        with self._changed:
            ready = lambda: self.error or key in self._dropped or number in self._boxes.get(key, {})
            self._changed.wait_for(ready, timeout)
            self._expire()
            return self._boxes.get(key, {}).pop(number, None)

    def drop(self, key: str) -> None:
        with self._changed:
            self._boxes.pop(key, None)
            self._news.pop(key, None)
            self._dropped[key] = self.clock()
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Nothing more will come: nobody need wait."""
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _expire(self) -> None:
        old = self.clock() - self.lease
        for key in [key for key, at in self._news.items() if at < old]:
            del self._boxes[key], self._news[key]
        for key in [key for key, at in self._dropped.items() if at < old]:
            del self._dropped[key]

    def __len__(self) -> int:
        """Messages that nobody has taken."""
        with self._changed:
            self._expire()
            return sum(map(len, self._boxes.values()))


class InProcess(KVConnector):
    """Both engines in one process: for notebooks and tests."""

    def __init__(self, inbox: Inbox, **options):
        super().__init__(**options)
        self.inbox = inbox

    @classmethod
    def pair(cls, **options) -> tuple["InProcess", "InProcess"]:
        """(the producer's, the consumer's). Options: see KVConnector."""
        inbox = Inbox(options.get("lease", 30.0))
        return cls(inbox, role="kv_producer", **options), cls(inbox, role="kv_consumer", **options)

    def put(self, part: Part) -> None:
        self.inbox.put(Part.from_bytes(part.to_bytes()))  # as it would come out of a wire

    def take(self, key: str, number: int, timeout: float) -> Part | None:
        return self.inbox.take(key, number, timeout)

    def drop(self, key: str, received: bool = False) -> None:
        super().drop(key, received)
        self.inbox.drop(key)
