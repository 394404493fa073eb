"""Which replica gets the next request? Four answers, each a choice among what a router knows. No clock, no network.

    round_robin         the one whose turn was longest ago: fair by count, blind to how long requests are
    least_outstanding   the one with the fewest requests under way: right for one router; many would all run to it
    power_of_two        the better of two drawn at random: almost as even, and many routers do not run together
    prefix_aware        the one that has seen most of this prompt, unless the load is out of balance

    policy.choose(replicas, prompt) -> the replica, or None where none is available

One rule for ties: among equals, whose turn was longest ago. So no replica is the favourite, and one that is new
gets its first request at once but no crowd.

Prefix-aware: each replica's past prompts are remembered as chained hashes of blocks of 64 bytes (about a page of 16
tokens, in English as well as in token ids), as the page pool itself does it, but approximately: the router hears of
no eviction, so it keeps only the `memory` blocks it used last.
    out of balance   most - fewest > balance_abs_threshold and most > balance_rel_threshold * fewest, counted in
                     requests under way: then least_outstanding
    match            known bytes / bytes of the prompt > cache_threshold: the replica that knows most
    else             the fewest requests under way; among equals, who remembers least

Cost     choosing is O(replicas); prefix_aware hashes the prompt once and looks up O(blocks) for each replica
Sources  Mitzenmacher 2001, "The Power of Two Choices in Randomized Load Balancing"; cache-aware routing as in SGLang
         (Zheng et al. 2024, arXiv:2312.07104) and vLLM's router, whose names of thresholds these are
Story    notebooks/14_the_fleet.ipynb
"""

import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BLOCK = 64  # bytes


@dataclass(eq=False)  # identity: a replica that comes back under the same address is another one
class Replica:
    """One server process, as its router sees it."""

    url: str
    ongoing: int = 0  # requests sent to it that have not ended: it runs them or has them in its queue
    healthy: bool = True
    draining: bool = False  # finishes what it has, gets nothing new

    @property
    def available(self) -> bool:
        return self.healthy and not self.draining


class Policy:
    """Base of all: only those that are available, and the fair rule for ties."""

    def __init__(self):
        self._turn: dict[str, int] = {}  # url: when it was last chosen
        self._turns = 0

    def choose(self, replicas: Sequence[Replica], prompt: str | Sequence[int] = ()) -> Replica | None:
        """Pick one and count its turn. `prompt`: text or token ids; only prefix_aware looks at it."""
        available = [replica for replica in replicas if replica.available]
        if not available:
            return None
        chosen = self.pick(available, prompt)
        self._turns += 1
        self._turn[chosen.url] = self._turns
        return chosen

    def pick(self, available: list[Replica], prompt: str | Sequence[int]) -> Replica:
        raise NotImplementedError

    def least(self, replicas: list[Replica], cost: Callable[[Replica], object]) -> Replica:
        """The cheapest; among equals, whose turn was longest ago."""
        return min(replicas, key=lambda replica: (cost(replica), self._turn.get(replica.url, 0)))

    def forget(self, url: str) -> None:
        """That replica is gone: what comes back at this address knows nothing."""
        self._turn.pop(url, None)


class RoundRobin(Policy):
    def pick(self, available, prompt):
        return self.least(available, lambda replica: 0)


class LeastOutstanding(Policy):
    def pick(self, available, prompt):
        return self.least(available, lambda replica: replica.ongoing)


class PowerOfTwo(Policy):
    def __init__(self, seed: int | None = None):
        super().__init__()
        self._random = random.Random(seed)

    def pick(self, available, prompt):
        two = self._random.sample(available, min(2, len(available)))
        return self.least(two, lambda replica: replica.ongoing)


class PrefixAware(Policy):
    def __init__(
        self,
        *,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 16,  # a quarter of a server's 64 seats; where servers have 256, 64 is usual
        balance_rel_threshold: float = 1.5,
        memory: int = 65_536,  # blocks for each replica: 4 MiB of prompts
    ):
        super().__init__()
        if (
            not 0 <= cache_threshold <= 1
            or balance_abs_threshold < 0
            or balance_rel_threshold < 1
            or memory < 1
        ):
            raise ValueError(
                f"cache_threshold {cache_threshold}, balance_abs_threshold {balance_abs_threshold}, "
                f"balance_rel_threshold {balance_rel_threshold}, memory {memory}: these cannot be.\n"
                f"  Use 0 <= cache_threshold <= 1, balance_abs_threshold >= 0, balance_rel_threshold >= 1, memory >= 1."
            )
        self.cache_threshold = cache_threshold
        self.balance_abs_threshold, self.balance_rel_threshold = balance_abs_threshold, balance_rel_threshold
        self._memory = memory
        self._known: dict[str, Prefixes] = {}

    def pick(self, available, prompt):
        content = as_bytes(prompt)
        blocks = chain(content)
        known = {replica.url: self._prefixes(replica.url) for replica in available}
        matched = {url: prefixes.match(blocks) * BLOCK for url, prefixes in known.items()}
        most = max(matched.values())
        if self.out_of_balance(available):
            chosen = self.least(available, lambda replica: replica.ongoing)
        elif most > self.cache_threshold * len(content):
            best = [replica for replica in available if matched[replica.url] == most]
            chosen = self.least(best, lambda replica: replica.ongoing)
        else:
            chosen = self.least(available, lambda replica: (replica.ongoing, len(known[replica.url].blocks)))
        known[chosen.url].remember(blocks)
        return chosen

    def out_of_balance(self, available: list[Replica]) -> bool:
        fewest, most = (f(replica.ongoing for replica in available) for f in (min, max))
        return most - fewest > self.balance_abs_threshold and most > self.balance_rel_threshold * fewest

    def forget(self, url: str) -> None:
        super().forget(url)
        self._known.pop(url, None)

    def _prefixes(self, url: str) -> "Prefixes":
        return self._known.setdefault(url, Prefixes(self._memory))


@dataclass
class Prefixes:
    """What one replica has seen: at most `memory` blocks, the least recently used forgotten first."""

    memory: int
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # oldest use first

    def match(self, blocks: list[bytes]) -> int:
        """How many of them are known, from the beginning on."""
        return next((n for n, block in enumerate(blocks) if block not in self.blocks), len(blocks))

    def remember(self, blocks: list[bytes]) -> None:
        for block in reversed(blocks):  # the end of a chain is older than its beginning, which is worth more
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.memory:
            self.blocks.popitem(last=False)


def as_bytes(prompt: str | Sequence[int]) -> bytes:
    """Text or token ids; 4 bytes an id, so that equal prefixes stay equal prefixes."""
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    return b"".join(token.to_bytes(4, "little", signed=True) for token in prompt)


def chain(content: bytes) -> list[bytes]:
    """A hash for each full block, of it and of all before it. The same in every process."""
    hashes, before = [], b""
    for end in range(BLOCK, len(content) + 1, BLOCK):
        before = hashlib.blake2b(before + content[end - BLOCK : end], digest_size=16).digest()
        hashes.append(before)
    return hashes


POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "least_outstanding": LeastOutstanding,
    "power_of_two": PowerOfTwo,
    "prefix_aware": PrefixAware,
}
