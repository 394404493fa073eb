"""How full is the fullest replica, if routers hear late of what other routers have done?

    fullest(make, routers, news)     mean of the most requests under way on one of `replicas`, `each` being the mean

The model: each request comes to a router drawn at random, which chooses by what it heard last, every `news` requests;
requests stay for an exponential time. With fresh news the minimum is as even as can be. With old ones, all routers see
the same least busy replica and run to it together; two random choices spread them and still avoid the full ones.

    pick(known, ongoing, size)       the choice of PrefixAware as a function of plain numbers: an exercise's solution

Cost     O(requests * replicas)
Sources  Mitzenmacher 2000, "How Useful Is Old Information?" (IEEE TPDS 11:1)
Story    notebooks/14_the_fleet.ipynb
"""

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random

from minserve.cluster.policies import LeastOutstanding, Policy, PowerOfTwo, PrefixAware, Replica


class Blind(Policy):
    """Any replica: what the others are compared with."""

    def __init__(self, seed: int | None = None):
        super().__init__()
        self._random = Random(seed)

    def pick(self, available, prompt):
        return self._random.choice(available)


CHOICES: dict[str, Callable[[int], Policy]] = {
    "random": Blind,
    "least": lambda seed: LeastOutstanding(),
    "two choices": PowerOfTwo,
}


def fullest(
    make: Callable[[int], Policy],
    routers: int = 1,
    news: int = 1,
    *,
    replicas: int = 50,
    each: float = 4.0,
    requests: int = 4000,
    seed: int = 0,
) -> float:
    """make(seed) -> a router's policy. The first quarter of the requests fills the fleet and is not counted."""
    rng, policies = Random(seed), [make(i) for i in range(routers)]
    seen, load = [Replica(str(i)) for i in range(replicas)], Counter()
    ends, most = [], []
    for now in range(requests):
        while ends and ends[0][0] <= now:
            load[heappop(ends)[1]] -= 1
        if now % news == 0:
            for replica in seen:
                replica.ongoing = load[replica.url]
        url = rng.choice(policies).choose(seen).url
        load[url] += 1
        heappush(ends, (now + rng.expovariate(1 / (each * replicas)), url))
        most.append(max(load.values()))
    counted = most[requests // 4 :]
    return sum(counted) / len(counted)


def pick(known: Sequence[int], ongoing: Sequence[int], size: int) -> int:
    """The index of the replica. known: bytes of the prompt that each remembers; size: the prompt's bytes."""
    policy, prompt = PrefixAware(balance_abs_threshold=4), "x" * size
    replicas = [Replica(str(i), n) for i, n in enumerate(ongoing)]
    for replica, its in zip(replicas, known):
        policy.choose([replica], prompt[:its])  # nobody else is there, so it gets that much
    return int(policy.choose(replicas, prompt).url)
