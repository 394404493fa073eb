"""Who gets the next request: by hand, on traces of random days, and with wrong policies that must be noticed."""

import random
from collections import Counter
from fractions import Fraction

import pytest
from wrong_versions import wrong_version

from minserve.cluster import policies
from minserve.cluster.policies import BLOCK, POLICIES, PrefixAware, Prefixes, Replica, as_bytes, chain


def fleet(*ongoing: int, module=policies) -> list[Replica]:
    return [module.Replica(f"http://127.0.0.1:{8000 + i}", n) for i, n in enumerate(ongoing)]


def make(name: str, module=policies, **options):
    policy = module.POLICIES[name]
    return policy(seed=7) if name == "power_of_two" else policy(**options)


def text(seed: int, blocks: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=blocks * BLOCK))


# ---------------------------------------------------------------- what holds for all
@pytest.mark.parametrize("name", POLICIES)
def test_whoever_is_ill_or_leaves_is_never_chosen(name, module=policies):
    policy, replicas, rng = make(name, module), fleet(0, 0, 0, 0, module=module), random.Random(1)
    for _ in range(300):
        for replica in replicas:
            replica.healthy, replica.draining = rng.random() < 0.6, rng.random() < 0.3
            replica.ongoing = rng.randrange(100)
        chosen = policy.choose(replicas, text(rng.randrange(5), 3))
        able = [replica for replica in replicas if replica.healthy and not replica.draining]
        assert chosen in able if able else chosen is None
    assert policy.choose([], "nobody") is None


@pytest.mark.parametrize("name", POLICIES)
def test_among_equals_everybody_has_their_turn(name, module=policies):
    policy, replicas = make(name, module), fleet(3, 3, 3)
    chosen = Counter(policy.choose(replicas, str(i)).url for i in range(300))
    spread = max(chosen.values()) - min(chosen.values())
    assert len(chosen) == 3 and spread <= (40 if name == "power_of_two" else 1), chosen


@pytest.mark.parametrize("name", POLICIES)
def test_a_new_replica_gets_its_share_and_no_crowd(name, module=policies):
    policy, replicas = make(name, module), fleet(1, 1, 1)
    for i in range(30):
        policy.choose(replicas[:2], str(i))
    chosen = [policy.choose(replicas, str(i)) for i in range(30)].count(replicas[2])
    assert 5 <= chosen <= 15


# ---------------------------------------------------------------- one by one
def test_round_robin_goes_round_whatever_they_do(module=policies):
    policy, (a, b, c) = make("round_robin", module), fleet(0, 50, 9)
    assert [policy.choose([a, b, c]) for _ in range(6)] == [a, b, c, a, b, c]
    b.healthy = False
    assert [policy.choose([a, b, c]) for _ in range(3)] == [a, c, a]
    b.healthy = True
    assert [policy.choose([a, b, c]) for _ in range(3)] == [b, c, a]


def test_least_outstanding_takes_the_fewest(module=policies):
    policy, (a, b, c) = make("least_outstanding", module), fleet(2, 1, 3)
    assert policy.choose([a, b, c]) is b
    b.draining = True
    assert policy.choose([a, b, c]) is a


def test_power_of_two_is_far_more_even_than_one_choice(module=policies):
    policy, replicas = make("power_of_two", module), fleet(1, 2, 3)
    chosen = Counter(policy.choose(replicas).ongoing for _ in range(3000))
    # of three pairs, two hold the best, and the middle one is the better of the third
    assert chosen[3] == 0 and abs(chosen[1] / 3000 - 2 / 3) < 0.04
    assert [make("power_of_two", module).choose(replicas).url for _ in range(2)] == [
        make("power_of_two", module).choose(replicas).url for _ in range(2)
    ]  # seeded

    replicas, rng = fleet(*[0] * 50), random.Random(3)
    for _ in range(5000):
        policy.choose(replicas).ongoing += 1
    drawn = Counter(rng.randrange(50) for _ in range(5000))
    two, one = max(r.ongoing for r in replicas) - 100, max(drawn.values()) - 100
    assert two <= 5 < one


def longest_queue(policy, seconds=2000, servers=8):
    """Unequal requests, each server one at a time: the longest queue there was."""
    rng, replicas, longest = random.Random(5), fleet(*[0] * servers), 0
    left = {replica.url: [] for replica in replicas}
    for _ in range(seconds):
        for _ in range(rng.randrange(0, 2 * servers // 4)):
            chosen = policy.choose(replicas, "x")
            left[chosen.url].append(rng.choice([1, 1, 1, 8]))
        for replica in replicas:
            queue = left[replica.url]
            if queue:
                queue[0] -= 1
                if queue[0] == 0:
                    queue.pop(0)
            replica.ongoing = len(queue)
            longest = max(longest, len(queue))
    return longest


def test_who_looks_at_queues_keeps_them_short(module=policies):
    longest = {
        name: longest_queue(make(name, module))
        for name in ("round_robin", "power_of_two", "least_outstanding")
    }
    assert longest["least_outstanding"] <= longest["power_of_two"] < longest["round_robin"], longest


# ---------------------------------------------------------------- prefixes
def test_a_known_prefix_goes_where_it_is_known(module=policies):
    policy, (a, b, c) = module.PrefixAware(), fleet(0, 0, 0)
    system = text(0, 4)
    first = policy.choose([a, b, c], system + text(1, 1))
    for user in range(2, 12):
        first.ongoing = 3  # busier than the others, but not out of balance
        assert policy.choose([a, b, c], system + text(user, 1)) is first
    assert policy.choose([a, b, c], text(99, 5)) is not first


def test_the_share_that_must_match(module=policies):
    """Of ten blocks, three known are not more than 0.3; four are."""
    for known, follows in ((3, False), (4, True)):
        policy, (a, b) = module.PrefixAware(), fleet(0, 0)
        system = text(0, known)
        a_or_b = policy.choose([a, b], system)
        a_or_b.ongoing = 1
        assert (policy.choose([a, b], system + text(1, 10 - known)) is a_or_b) is follows, known


def test_only_prefixes_count_not_blocks_in_another_place(module=policies):
    policy, (a, b) = module.PrefixAware(), fleet(0, 0)
    one, two = text(0, 1), text(1, 1)
    first = policy.choose([a, b], one + two)
    first.ongoing = 1
    assert policy.choose([a, b], two + one) is not first


def test_out_of_balance_the_queue_decides(module=policies):
    policy, (a, b) = module.PrefixAware(balance_abs_threshold=8, balance_rel_threshold=1.5), fleet(0, 0)
    prompt = text(0, 6)
    first = policy.choose([a, b], prompt)
    other = b if first is a else a
    first.ongoing = 8
    assert policy.choose([a, b], prompt) is first  # 8 more are not more than 8
    first.ongoing = 9
    assert policy.choose([a, b], prompt) is other
    policy = module.PrefixAware(balance_abs_threshold=8, balance_rel_threshold=1.5)
    first.ongoing, other.ongoing = 0, 1
    assert policy.choose([first, other], prompt) is first
    first.ongoing, other.ongoing = 29, 20  # 9 more, but not 1.5 times as many
    assert policy.choose([first, other], prompt) is first
    first.ongoing = 31
    assert policy.choose([first, other], prompt) is other


def test_what_is_new_goes_where_least_is_under_way(module=policies):
    policy, (a, b) = module.PrefixAware(), fleet(0, 1)
    policy.choose([a], text(0, 50))
    assert policy.choose([a, b], text(1, 4)) is a  # it remembers more, but has less to do


def test_text_and_token_ids_are_both_prompts(module=policies):
    for make_prompt in (
        lambda s, n: text(s, n),
        lambda s, n: [random.Random(s + i).randrange(50_000) for i in range(n * 16)],
    ):
        policy, replicas = module.PrefixAware(), fleet(0, 0, 0)
        prompts = [make_prompt(seed, 4) for seed in (0, 1000, 2000)]
        homes = [policy.choose(replicas, prompt) for prompt in prompts]
        assert len({home.url for home in homes}) == 3  # who remembers least gets what is new
        assert [policy.choose(replicas, prompt) for prompt in prompts] == homes
    assert policy.choose(replicas, "\ud800 lone surrogate") and policy.choose(replicas, [-1, 5])


def test_memory_is_bounded_and_the_oldest_goes_first(module=policies):
    seen = module.Prefixes(memory=6)
    a, b, c = (chain(text(seed, 3).encode()) for seed in range(3))
    seen.remember(a)
    seen.remember(b)
    seen.remember(a)  # used again
    seen.remember(c[:2])
    assert (seen.match(a), seen.match(b), seen.match(c)) == (3, 1, 2)  # b lost its end, not its beginning
    assert len(seen.blocks) == 6

    policy, replicas = module.PrefixAware(memory=50), fleet(0, 0)
    for seed in range(100):
        policy.choose(replicas, text(seed, 3))
    assert all(len(prefixes.blocks) <= 50 for prefixes in policy._known.values())


def test_a_replica_that_went_is_forgotten(module=policies):
    policy, (a, b) = module.PrefixAware(), fleet(0, 0)
    prompt = text(0, 4)
    first = policy.choose([a, b], prompt)
    first.ongoing = 1
    policy.forget(first.url)
    assert policy.choose([a, b], prompt) is not first


def test_hashes_are_of_full_blocks_and_the_same_everywhere():
    assert chain(b"x" * (BLOCK - 1)) == [] and len(chain(b"x" * (2 * BLOCK + 1))) == 2
    assert chain(b"x" * BLOCK)[0].hex() == "4df2d6bee2af56f6f849f72cb42670f3"
    assert as_bytes([1, 2]) == b"\1\0\0\0\2\0\0\0" and as_bytes("é") == b"\xc3\xa9"


def test_what_cannot_be_is_refused():
    for wrong in (
        dict(cache_threshold=1.1),
        dict(balance_rel_threshold=0.5),
        dict(memory=0),
        dict(balance_abs_threshold=-1),
    ):
        with pytest.raises(ValueError, match="Use 0 <= cache_threshold"):
            PrefixAware(**wrong)


# ---------------------------------------------------------------- group hits, and wrong versions
def hits(policy, groups=12, requests=600, memory=4) -> Fraction:
    """Share of prompts whose group the chosen replica has in its cache of `memory` groups (the server's own LRU)."""
    rng, replicas = random.Random(2), fleet(0, 0, 0, 0)
    caches = {replica.url: Prefixes(memory) for replica in replicas}
    hit, under_way = 0, []
    for i in range(requests):
        group = rng.randrange(groups)
        chosen = policy.choose(replicas, text(group, 5) + text(1000 + i, 1))
        name = [b"%d" % group]
        hit += caches[chosen.url].match(name)
        caches[chosen.url].remember(name)
        chosen.ongoing += 1
        under_way.append(chosen)
        if len(under_way) > 8:
            under_way.pop(0).ongoing -= 1
    return Fraction(hit, requests)


def test_prefix_aware_hits_where_round_robin_misses(module=policies):
    """12 groups and room for 4 on each of 4: by prefix all of them fit, by turns each replica sees all 12."""
    by_prefix, by_turns = hits(make("prefix_aware", module)), hits(make("round_robin", module))
    assert by_prefix > 0.9 and by_turns < 0.5, (by_prefix, by_turns)


WRONG = [
    ("the ill are chosen", "return self.healthy and not self.draining", "return not self.draining",
     "whoever_is_ill_or_leaves_is_never_chosen"),
    ("those that leave are chosen", "return self.healthy and not self.draining", "return self.healthy",
     "whoever_is_ill_or_leaves_is_never_chosen"),
    ("the first among equals", "(cost(replica), self._turn.get(replica.url, 0))", "cost(replica)",
     "among_equals_everybody_has_their_turn"),
    ("the last to be chosen again", "self._turn[chosen.url] = self._turns", "self._turn[chosen.url] = -self._turns",
     "among_equals_everybody_has_their_turn"),
    ("turns are counted where it was chosen", "self._turns += 1\n", "self._turns = self._turn.get(chosen.url, 0) + 1\n",
     "a_new_replica_gets_its_share_and_no_crowd"),
    ("one choice", "min(2, len(available))", "1", "power_of_two_is_far_more_even_than_one_choice"),
    ("the worse of two", "return self.least(two, lambda replica: replica.ongoing)",
     "return self.least(two, lambda replica: -replica.ongoing)",
     "power_of_two_is_far_more_even_than_one_choice"),
    ("the most outstanding", "(available, lambda replica: replica.ongoing)\n\n\nclass PowerOfTwo",
     "(available, lambda replica: -replica.ongoing)\n\n\nclass PowerOfTwo",
     "least_outstanding_takes_the_fewest"),
    ("any match is enough", "most > self.cache_threshold * len(content)", "most > 0", "the_share_that_must_match"),
    ("as much as the threshold is enough", "most > self.cache_threshold * len(content)",
     "most >= self.cache_threshold * len(content) - BLOCK", "the_share_that_must_match"),
    ("no guard", "if self.out_of_balance(available):", "if False:", "out_of_balance_the_queue_decides"),
    ("the absolute guard alone", " and most > self.balance_rel_threshold * fewest", "",
     "out_of_balance_the_queue_decides"),
    ("the relative guard alone", "most - fewest > self.balance_abs_threshold and ", "",
     "a_known_prefix_goes_where_it_is_known"),
    ("blocks are not chained", "before + content[end - BLOCK : end]", "content[end - BLOCK : end]",
     "only_prefixes_count_not_blocks_in_another_place"),
    ("nothing is remembered", "        known[chosen.url].remember(blocks)\n", "",
     "a_known_prefix_goes_where_it_is_known"),
    ("everybody remembers", "        known[chosen.url].remember(blocks)\n",
     "        for prefixes in known.values():\n            prefixes.remember(blocks)\n",
     "prefix_aware_hits_where_round_robin_misses"),
    ("memory without end", "while len(self.blocks) > self.memory:", "while False:",
     "memory_is_bounded_and_the_oldest_goes_first"),
    ("the newest is forgotten", "popitem(last=False)", "popitem()", "memory_is_bounded_and_the_oldest_goes_first"),
    ("use does not count as use", "            self.blocks.move_to_end(block)\n", "",
     "memory_is_bounded_and_the_oldest_goes_first"),
    ("a chain loses its beginning first", "for block in reversed(blocks):", "for block in blocks:",
     "memory_is_bounded_and_the_oldest_goes_first"),
    ("what is new goes to who remembers most", "len(known[replica.url].blocks))", "-len(known[replica.url].blocks))",
     "text_and_token_ids_are_both_prompts"),
    ("what went is remembered", "        self._known.pop(url, None)\n", "", "a_replica_that_went_is_forgotten"),
    ("new prompts ignore the queue", "(replica.ongoing, len(known[replica.url].blocks))",
     "len(known[replica.url].blocks)", "what_is_new_goes_where_least_is_under_way"),
]  # fmt: skip


@pytest.mark.parametrize("what, right, wrong, who", WRONG, ids=[w[0] for w in WRONG])
def test_wrong_policies_are_noticed(what, right, wrong, who):
    module = wrong_version(policies, right, wrong)
    test = globals()[f"test_{who}"]
    named = "name" in test.__code__.co_varnames[: test.__code__.co_argcount]
    with pytest.raises((AssertionError, KeyError)):
        for name in POLICIES if named else [None]:
            test(name, module=module) if named else test(module=module)
