"""The replicas that a router knows: which are well, what each has under way, and how one leaves.

Health       a replica is ill after `fall` failures in a row, of checks or of connections, and well again after `rise`
             checks: one lost packet moves nobody, and one lucky answer brings nobody back
Outstanding  a replica's `ongoing` counts from before the connection until its answer is closed, whoever closes it
Sources      rise and fall: HAProxy's names
Story        notebooks/14_the_fleet.ipynb
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2

from minserve.cluster.policies import Replica

KEEP_ALIVE = 2.0  # seconds; servers close idle connections after 5, and no request should meet that moment


@dataclass
class Vital:
    """The last answers of one replica's health."""

    fall: int
    rise: int
    passed: int = 0  # in a row
    failed: int = 0

    def saw(self, well: bool, replica: Replica) -> None:
        self.passed, self.failed = (self.passed + 1, 0) if well else (0, self.failed + 1)
        if self.failed >= self.fall:
            replica.healthy = False
        elif self.passed >= self.rise:
            replica.healthy = True


class Pool:
    """`async with` it: the health checks run inside, and `client` is open."""

    def __init__(
        self,
        urls: Iterable[str] = (),
        *,
        interval: float = 1.0,
        timeout: float = 5.0,
        fall: int = 3,
        rise: int = 2,
        on_gone: Callable[[str], None] = lambda url: None,
    ):
        """interval, timeout: seconds between checks, and until one has failed. on_gone(url): ill, or removed."""
        self.interval, self.timeout, self.on_gone = interval, timeout, on_gone
        self.fall, self.rise = fall, rise
        self.replicas: dict[str, Replica] = {}
        self.served: dict[str, int] = {}  # url: requests sent there
        self._vitals: dict[str, Vital] = {}
        self._ended, self._watching = asyncio.Event(), None
        self.client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=timeout),  # an answer may take as long as it takes
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE
            ),
            trust_env=False,
        )
        for url in urls:
            self.add(url)

    async def __aenter__(self):
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_):
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self.client.aclose()

    # ------------------------------------------------------------ who is there
    @property
    def ongoing(self) -> int:
        """Requests that run or wait anywhere: what the autoscaler looks at."""
        return sum(replica.ongoing for replica in self.replicas.values())

    def add(self, url: str) -> Replica:
        url = url.rstrip("/")
        replica = self.replicas[url] = Replica(url)
        self._vitals[url] = Vital(self.fall, self.rise)
        self.served[url] = 0
        return replica

    def remove(self, url: str) -> None:
        """Nothing goes there any more; what is under way is not touched."""
        if self.replicas.pop(url, None):
            del self._vitals[url], self.served[url]
            self.on_gone(url)

    async def drain(self, url: str | None = None, seconds: float = 30.0) -> bool:
        """Send nothing new to that replica (or to any), and wait until all it has is answered. False: not in time."""
        leaving = [replica for replica in self.replicas.values() if url in (None, replica.url)]
        for replica in leaving:
            replica.draining = True
        try:
            async with asyncio.timeout(seconds):
                while any(replica.ongoing for replica in leaving):
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def _watch(self) -> None:
        while True:
            await asyncio.gather(*map(self._check, list(self.replicas.values())))
            await asyncio.sleep(self.interval)

    async def _check(self, replica: Replica) -> None:
        try:
            answer = await self.client.get(f"{replica.url}/health", timeout=self.timeout)
            self.saw(replica, answer.status_code == 200)
        except httpx2.TransportError:
            self.saw(replica, False)

    def saw(self, replica: Replica, well: bool) -> None:
        if self.replicas.get(replica.url) is replica:  # it may have been removed meanwhile
            was = replica.healthy
            self._vitals[replica.url].saw(well, replica)
            if was and not replica.healthy:
                self.on_gone(replica.url)  # whoever comes back there has an empty cache

    @contextmanager
    def outstanding(self, replica: Replica):
        replica.ongoing += 1
        self.served[replica.url] += 1
        try:
            yield
        finally:
            replica.ongoing -= 1
            self._ended.set()

    async def everybody(self, path: str) -> dict[str, httpx2.Response]:
        """{url: answer} of those that answer in time."""

        async def ask(url: str):
            try:
                return url, await self.client.get(url + path, timeout=self.timeout)
            except httpx2.TransportError:
                return url, None

        answers = await asyncio.gather(*map(ask, list(self.replicas)))
        return {url: answer for url, answer in answers if answer is not None and answer.status_code == 200}
