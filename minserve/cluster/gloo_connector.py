"""Keys and values through torch.distributed's gloo: producer is rank 0, consumer rank 1, and a message two sends.

    send [1] int64    how many bytes follow; 0: only a sign of life; -1: goodbye
    send [n] uint8    the message

The producer sends before anybody asks, so the consumer has a thread that receives, and a shelf (inbox.py). A sign of
life every second, or quarter of a lease, tells an idle link from a dead one: without it for a lease, or when the
connection ends, the link is broken for good, both sides say so, and the consumer computes every prompt itself until
both are started again. close() waits for the thread, which hears the next sign of life: one that is still inside gloo
while Python ends can take the process down. Meeting point: a file that nobody has used before, or tcp://HOST:PORT,
which the producer opens.

On Windows gloo meets through the store without libuv, which is what is asked for there (elsewhere: USE_LIBUV=0).
Trust      gloo neither encrypts nor asks who is there: loopback, or a network of your own
Story      notebooks/14_the_fleet.ipynb
"""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import distributed

from minserve.cluster.connector import KVConnector
from minserve.cluster.inbox import Inbox
from minserve.cluster.transfer import Part

PRODUCER, CONSUMER = 0, 1
RANKS = {"kv_producer": PRODUCER, "kv_consumer": CONSUMER}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
GOODBYE = -1
MOST_BYTES = 1 << 36  # of one message: more is a garbled size
NOD_SECONDS = 1.0  # between two signs of life, at most: a consumer that closes waits for the next


class GlooConnector(KVConnector):
    def __init__(self, path: str, patience: float = 120.0, **options):
        """`path`: where both meet. `patience`: seconds to wait for the other there. Options: see KVConnector."""
        super().__init__(**options)
        if self.role not in RANKS:
            raise ValueError(f"gloo is for two engines: role is {self.role!r}, use {' or '.join(RANKS)}")
        self.path, self.rank, self.patience = str(path), RANKS[self.role], patience
        self.inbox = Inbox(self.lease)
        self._group, self._connected, self._closed = None, threading.Event(), threading.Event()
        self._one_at_a_time = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kv-gloo", daemon=True)

    def attach(self, engine) -> None:
        super().attach(engine)
        self._thread.start()  # the other engine may take its time to load

    # ------------------------------------------------------------ the thread: meets the other, then listens or nods
    def _run(self) -> None:
        try:
            self._group = self._meet()
            self._connected.set()
            if self.rank == CONSUMER:
                self._listen()
            else:
                while not self._closed.wait(min(self.lease / 4, NOD_SECONDS)):
                    self._send_bytes(b"")
        except Exception as error:
            self._broken(error)
        self._connected.set()

    def _meet(self):
        url, patience = urlsplit(self.path), timedelta(seconds=self.patience)
        host = url.hostname or "127.0.0.1"
        if url.scheme == "tcp":
            first, libuv = self.rank == PRODUCER, os.name != "nt"
            store = distributed.TCPStore(host, url.port, 2, first, patience, use_libuv=libuv)
        else:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            store = distributed.FileStore(self.path, 2)
        store.set(f"here {self.rank}", "")
        self._wait_for_the_other(store)  # from here on, a lease is long enough
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self.lease)
        here = host in LOOPBACK  # else: the interface that this machine's own name stands for
        options._devices = [gloo.create_device(hostname=host) if here else gloo.create_default_device()]
        return gloo(store, self.rank, 2, options)

    def _wait_for_the_other(self, store) -> None:
        """Asks again and again, for store.wait() could not be interrupted by close()."""
        late = time.monotonic() + self.patience
        while not store.check([f"here {1 - self.rank}"]):
            if self._closed.wait(0.02):
                raise ConnectionError("closed before the other was there")
            if time.monotonic() > late:
                raise TimeoutError(f"nobody came to {self.path} within {self.patience:g} s")

    def _listen(self) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        while not self._closed.is_set():
            self._group.recv([size], PRODUCER, 0).wait()
            n = int(size)
            if n == GOODBYE:
                raise ConnectionError("the other side has closed")
            if not 0 <= n <= MOST_BYTES:
                raise ConnectionError(f"a message of {n:,} bytes is none")
            if n:
                data = torch.empty(n, dtype=torch.uint8)
                self._group.recv([data], PRODUCER, 0).wait()
                self._receive(data.numpy().tobytes())

    def _receive(self, data: bytes) -> None:
        try:
            self.inbox.put(Part.from_bytes(data))
        except ValueError as error:  # whoever waits for it will find that it does not come
            self.say(str(error))

    def _broken(self, error: Exception) -> None:
        if not self._closed.is_set() and self.error is None:
            self.error = error
            self.say(f"no keys and values from or to the other engine any more: {str(error).splitlines()[0]}")
        self.inbox.fail(error)

    # ------------------------------------------------------------ messages
    def put(self, part: Part) -> None:
        self._connected.wait(self.patience)
        if self.error or self._group is None:
            raise ConnectionError(f"the link is broken ({self.error})")
        self._send_bytes(part.to_bytes())

    def _send_bytes(self, data: bytes, size: int | None = None) -> None:
        with self._one_at_a_time:
            try:
                self._group.send([torch.tensor([len(data) if size is None else size])], CONSUMER, 0).wait()
                if data:
                    self._group.send(
                        [torch.frombuffer(bytearray(data), dtype=torch.uint8)], CONSUMER, 0
                    ).wait()
            except Exception as error:
                self._broken(error)
                raise

    def take(self, key: str, number: int, timeout: float) -> Part | None:
        return self.inbox.take(key, number, timeout)

    def drop(self, key: str, received: bool = False) -> None:
        super().drop(key, received)
        self.inbox.drop(key)

    def close(self) -> None:
        super().close()
        self.inbox.fail(ConnectionError("closed"))
        first = not self._closed.is_set()
        self._closed.set()
        if first and self.rank == PRODUCER and self._group is not None and self.error is None:
            try:
                self._send_bytes(b"", GOODBYE)
            except Exception:  # it was not there any more
                pass
        if self._thread.is_alive():
            self._thread.join(5 * NOD_SECONDS)
        if not self._thread.is_alive():
            self._group = None  # its sockets close, and the other side hears it
