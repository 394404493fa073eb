"""Pages worked by hand: who owns which one, what is shared, what the prefix index knows, what is given back when."""

import os
import random
import subprocess
import sys
from functools import partialmethod

import pytest
from paged_oracle import alone
from paged_world import World, day

from minserve.pages import PagePool, ReservingPool, pages_for
from minserve.request import Request, SamplingParams

FULL = 512  # a chunk without limit


def request(prompt, new=100, **fields) -> Request:
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    return Request(fields.pop("id", 0), tokens, SamplingParams(), new, **fields)


def compute(pool: PagePool, r: Request, num_tokens: int) -> bool:
    """What a step does: pages, then keys and values, then the books."""
    if not pool.grow(r, num_tokens):
        return False
    r.computed += num_tokens
    pool.settle(r)
    return True


def serve(pool: PagePool, prompt, **fields) -> Request:
    """A prompt from admission to its last token."""
    r = request(prompt, **fields)
    assert pool.admit(r, FULL) and compute(pool, r, r.owed)
    return r


def finished(pool: PagePool, prompt, **fields) -> Request:
    r = serve(pool, prompt, **fields)
    pool.release(r)
    return r


def hit(pool: PagePool, prompt, **fields) -> int:
    """How many tokens of the prompt the index would spare."""
    return len(pool.match(request(prompt, **fields))) * pool.page_size


# ---------------------------------------------------------------- grow, release
@pytest.mark.parametrize("tokens, pages", [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for_rounds_up(tokens, pages):
    assert pages_for(tokens, 16) == pages


def test_grow_takes_a_page_only_when_the_last_one_is_full():
    pool, r = PagePool(4, 4), request(6)
    owned = []
    for num_tokens in (3, 1, 1, 3, 1):
        assert compute(pool, r, num_tokens)
        owned.append(len(r.pages))
    assert owned == [1, 1, 2, 2, 3] and pool.available == 1 and pool.in_use == 3
    pool.check([r])


def test_grow_is_all_or_nothing():
    pool, r, other = PagePool(3, 4), request(9), request(4)
    assert compute(pool, other, 4) and compute(pool, r, 4)
    before = (list(pool.free), list(r.pages), list(pool.references))
    assert not pool.grow(r, 9)  # 13 tokens: 3 more pages, and there is 1
    assert (pool.free, r.pages, pool.references) == before
    assert compute(pool, r, 4) and not pool.available
    pool.check([r, other])


def test_release_gives_everything_back_and_can_be_repeated():
    pool, r = PagePool(3, 4, prefix_caching=False), request(9)
    assert compute(pool, r, 9) and not pool.free
    pool.release(r)
    pool.release(r)
    assert sorted(pool.free) == [0, 1, 2] and not r.pages
    pool.check([])


@pytest.mark.parametrize("pages, size", [(0, 4), (-1, 4), (4, 0), (4, 3), (4, -4)])
def test_a_pool_that_cannot_be(pages, size):
    with pytest.raises(
        ValueError, match=f"^{pages} pages of {size} tokens: a pool needs at least 1 page, of 1, 2, 4"
    ):
        PagePool(pages, size)


# ---------------------------------------------------------------- forks
@pytest.mark.parametrize("prompt, shared", [(6, 1), (8, 1), (9, 2), (4, 0), (1, 0)])
def test_a_fork_shares_the_prompt_and_copies_the_page_it_writes_into(prompt, shared):
    """A child computes the prompt's last token itself: the page of that token is its own, others stay shared."""
    pool = PagePool(8, 4)
    leader = serve(pool, prompt)
    child = request(prompt, leader=leader)
    assert pool.fork(child, leader) and child.computed == prompt - 1
    pool.check([leader, child])
    assert compute(pool, child, 1)
    assert child.pages[:shared] == leader.pages[:shared] and not set(child.pages[shared:]) & set(
        leader.pages[shared:]
    )
    assert [pool.references[p] for p in child.pages] == [2] * shared + [1]
    partly = (prompt - 1) % 4 > 0  # else the child's last token begins a page, and there is nothing to copy
    assert pool.copies == ([(leader.pages[shared], child.pages[shared])] if partly else [])
    pool.check([leader, child])


def test_whoever_writes_first_copies_also_if_it_is_the_leader():
    """`writable` must not survive the fork: the leader had room in its last page, which is no longer its own."""
    pool = PagePool(8, 4)
    leader = serve(pool, 6)
    leader.dirty = len(leader.pages)  # the device knows them
    assert leader.writable == 8
    child = request(6, leader=leader)
    assert pool.fork(child, leader) and leader.writable == leader.computed == 6
    shared = leader.pages[1]
    leader.tokens.append(1)
    assert compute(pool, leader, 1)
    assert pool.copies == [(shared, leader.pages[1])] and child.pages[1] == shared != leader.pages[1]
    assert leader.dirty == 1, "the device's table must learn of the copy"
    assert compute(pool, child, 1) and child.pages[1] == shared, "the last reader has nobody to copy for"
    pool.check([leader, child])


def test_a_page_is_the_target_of_one_copy_only():
    """Who copied may be preempted before the step runs; the page it gave back is the next one's to copy into."""
    pool = PagePool(8, 4)
    leaders = [serve(pool, range(start, start + 6)) for start in (0, 100)]
    first, second = (request(leader.prompt, leader=leader) for leader in leaders)
    assert pool.fork(first, leaders[0]) and pool.grow(first, 1)
    page = first.pages[1]
    pool.release(first)
    assert pool.fork(second, leaders[1]) and pool.grow(second, 1) and second.pages[1] == page
    assert pool.copies == [(leaders[1].pages[1], page)]


def test_a_copy_counts_as_a_page():
    pool = PagePool(2, 4)
    leader = serve(pool, 6)
    child = request(6, leader=leader)
    assert pool.fork(child, leader)
    before = (list(child.pages), list(pool.references))
    assert not pool.grow(child, 1), "no page is left to copy into"
    assert (child.pages, pool.references) == before and not pool.copies


def test_pages_of_three_children_go_when_the_last_of_them_does():
    pool = PagePool(8, 4, prefix_caching=False)
    family = [serve(pool, 9)]
    for _ in range(2):
        child = request(9, leader=family[0])
        assert pool.fork(child, family[0]) and compute(pool, child, 1)
        family.append(child)
    assert pool.in_use == 2 + 3  # two pages for all, a third for each
    for left, member in zip((4, 3, 0), family):
        pool.release(member)
        assert pool.in_use == left
    pool.check([])


def test_no_fork_from_a_leader_that_has_not_computed_its_prompt_or_no_longer_holds_it():
    pool = PagePool(8, 4)
    leader, child = request(10), request(10)
    assert pool.admit(leader, FULL) and compute(pool, leader, 8)
    assert not pool.fork(child, leader) and not child.pages and pool.references[leader.pages[0]] == 1

    pool = PagePool(8, 4, window=4)
    leader, child = request(10), request(10)
    assert pool.admit(leader, FULL) and compute(pool, leader, 10)
    assert pool.fork(child, leader) and child.returned == 1 and len(pool.held(child)) == 2
    pool.check([leader, child])
    assert compute(
        pool, leader, 4
    )  # now its pages 0 and 1 have left its window, and a child would see page 1
    assert not pool.fork(request(10), leader)
    pool.check([leader, child])


# ---------------------------------------------------------------- the prefix index
@pytest.mark.parametrize("length, spared", [(3, 0), (4, 0), (5, 4), (31, 28), (32, 28), (33, 32), (36, 32)])
def test_a_hit_covers_full_pages_and_never_the_last_token(length, spared):
    pool = PagePool(32, 4)
    finished(pool, 40)
    assert hit(pool, length) == spared


def test_a_prompt_that_is_cached_as_a_whole():
    """Two pages of 16: the second run computes one of them again, and must leave the chain whole for a third."""
    pool, prompt = PagePool(8, 16), list(range(100, 132))
    assert serve(pool, prompt).computed == 32
    second = request(prompt)
    assert pool.admit(second, FULL) and (second.computed, second.owed) == (16, 16)
    assert compute(pool, second, 16)
    third = request([*prompt, *range(16)])
    assert pool.admit(third, FULL) and third.computed == 32, "the second run broke the chain"
    assert pool.references[third.pages[0]] == 3


def test_only_full_pages_are_shared():
    """A page that is not full will still be written: had the one that holds 5 a key, two answers would meet in it."""
    pool = PagePool(8, 2)
    first = serve(pool, [1, 2, 3])
    first.tokens += [4, 5]
    assert compute(pool, first, 2)
    second, third = (serve(pool, [1, 2, 3, 4, 5], id=i) for i in (2, 3))
    assert first.pages[:2] == second.pages[:2] == third.pages[:2]
    assert len({first.pages[2], second.pages[2], third.pages[2]}) == 3
    second.tokens += [6, 7, 8]
    third.tokens += [9, 10, 11]
    assert compute(pool, second, 3) and compute(pool, third, 3)
    pool.check([first, second, third])
    assert hit(pool, [1, 2, 3, 4, 5, 6, 7]) == 6 and hit(pool, [1, 2, 3, 4, 5, 9, 10]) == 6
    assert hit(pool, [1, 2, 3, 4, 5, 7, 7]) == 4


def test_only_computed_pages_are_shared():
    pool, r = PagePool(8, 4), request(12)
    assert pool.admit(r, FULL) and pool.grow(r, 12)
    assert hit(pool, 12) == 0, "allocated, and not one key is written yet"
    assert compute(pool, r, 8) and hit(pool, 13) == 8


def test_one_page_stands_for_both_who_computed_it():
    pool = PagePool(8, 4)
    one, two = request(8, id=1), request(8, id=2)
    assert pool.admit(one, FULL) and pool.admit(two, FULL)  # neither can hit the other yet
    assert compute(pool, one, 8) and compute(pool, two, 8)
    assert len(pool.index) == 2 and one.chain == two.chain
    pool.release(two)
    assert len(pool.free) == 6 and not pool.cached, "its pages were doubles: nothing to keep"
    pool.check([one])


def test_prefix_caching_off():
    pool = PagePool(8, 4, prefix_caching=False)
    finished(pool, 12)
    assert hit(pool, 12) == 0 and len(pool.free) == 8 and not pool.index


def test_salts_share_nothing():
    pool = PagePool(16, 4)
    finished(pool, 12, salt=b"one")
    assert hit(pool, 12, salt=b"one") == 8 and hit(pool, 12, salt=b"two") == hit(pool, 12) == 0
    finished(pool, 12, salt=b"two")
    assert len(pool.index) == 6
    other = PagePool(16, 4, salt=b"another model")
    assert other._key(request(4), 0) != pool._key(request(4), 0)


def test_equal_tokens_at_another_place_are_another_page():
    pool = PagePool(16, 4)
    finished(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert hit(pool, [5, 6, 7, 8, 9]) == 0 and hit(pool, [0, 0, 0, 0, 5, 6, 7, 8, 9]) == 0


def test_equal_tokens_behind_different_pasts_have_entries_of_their_own():
    pool = PagePool(16, 4)
    finished(pool, [1, 1, 1, 1, 5, 6, 7, 8])
    finished(pool, [2, 2, 2, 2, 5, 6, 7, 8])
    assert hit(pool, [1, 1, 1, 1, 5, 6, 7, 8, 9]) == hit(pool, [2, 2, 2, 2, 5, 6, 7, 8, 9]) == 8


def keys_in_a_process(seed: str, change: str = "") -> str:
    code = (
        "from minserve.pages import PagePool; from minserve.request import Request, SamplingParams\n"
        f"{change}\n"
        "r = Request(0, list(range(32)), SamplingParams(), 1, salt=b'x'); pool = PagePool(2, 16)\n"
        "print(*(pool._key(r, i)[0].hex() for i in range(2)))"
    )
    environment = os.environ | {"PYTHONHASHSEED": seed}
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)


def test_keys_are_equal_in_every_process():
    assert keys_in_a_process("1") == keys_in_a_process("2")
    python_hash = (
        "PagePool._hash = staticmethod(lambda content: hash(content).to_bytes(8, 'big', signed=True))"
    )
    assert keys_in_a_process("1", python_hash) != keys_in_a_process("2", python_hash), (
        "then this test says nothing"
    )


# ---------------------------------------------------------------- eviction
def test_the_least_recently_used_page_goes_first_and_the_end_of_a_chain_before_its_beginning():
    pool = PagePool(6, 4)
    one = finished(pool, range(12))
    chain = [pool.match(request(range(13)))[i].page for i in range(3)]
    finished(pool, range(50, 58))
    assert list(pool.cached)[:3] == chain[::-1] and one.pages == []
    two = serve(pool, range(4, 5))  # takes the last free page
    assert pool.evictions == 0 and compute(pool, two, 4)
    assert pool.evictions == 1 and hit(pool, range(13)) == 8, "the end of the older chain"
    finished(pool, range(9))  # a hit makes the rest of it the most recent
    r = request(range(80, 88))
    assert pool.admit(r, FULL) and compute(pool, r, 8)
    assert hit(pool, range(9)) == 8 and hit(pool, range(50, 59)) == 0
    pool.check([two, r])


def test_free_pages_are_taken_before_cached_ones():
    pool = PagePool(4, 4)
    finished(pool, 8)
    serve(pool, [9, 9, 9, 9, 9])
    assert pool.evictions == 0 and hit(pool, 9) == 8


def test_an_evicted_page_is_never_hit_again():
    """Four pages: P1 fills them, P2 overwrites them all. P1 must be computed again, not read out of P2's pages."""
    pool = PagePool(4, 4)
    first, second = range(16), range(50, 66)
    finished(pool, first)
    finished(pool, second)
    assert hit(pool, first) == 0 and hit(pool, second) == 12 and pool.evictions == 4
    assert finished(pool, first).computed == 16
    assert len(pool.index) == len(pool.cached) == 4
    pool.check([])

    world = World(num_pages=4, page_size=4)  # and the same, with somebody who reads the pages
    for prompt in ([1] * 12, [2] * 12, [1] * 12):
        world.add(prompt, new=4)
        world.run()
    assert world.close().pool.evictions > 0


def test_pages_of_the_finished_are_evicted_when_needed():
    pool = PagePool(4, 4)
    for i in range(10):
        finished(pool, range(10 * i, 10 * i + 8))
        pool.check([])
        assert len(pool.free) + len(pool.cached) == 4
    assert pool.evictions == 16  # 20 pages were filled, and 4 are still there


def test_a_chain_whose_beginning_is_gone_is_registered_anew():
    """Page 1 outlives page 0: nobody can reach it, and a new chain takes its place in the index."""
    pool = PagePool(4, 4)
    finished(pool, 8)
    begin, end = pool.match(request(9))
    pool._forget(begin.page)  # as an eviction would
    assert hit(pool, 9) == 0
    r = serve(pool, 9, id=2)
    assert hit(pool, 9) == 8 and pool.match(request(9))[1] is not end and end.page in pool.free
    pool.check([r])


# ---------------------------------------------------------------- what a hit costs
def test_pages_that_are_hit_are_not_room_as_well():
    """Three of six pages are cached and hit, the others in use: 16 tokens need one more page, and there is none."""
    pool = PagePool(6, 4)
    finished(pool, 12)
    other = serve(pool, range(50, 62))
    r = request(range(16))
    assert pool.available == 3 and hit(pool, range(16)) == 12
    assert not pool.admit(r, FULL) and not r.pages and r.computed == 0
    pool.check([other])
    pool.release(other)
    assert pool.admit(r, FULL) and compute(pool, r, 4)
    pool.check([r])


def test_pages_that_others_use_cost_nothing():
    """Three pages are hit that somebody else holds; one is free. It is enough: subtracting the three would refuse."""
    pool = PagePool(4, 4)
    other = serve(pool, 12)
    r = request(range(16))
    assert pool.available == 1 and pool.admit(r, FULL) and compute(pool, r, 4)
    assert pool.available == 0 and [pool.references[p] for p in r.pages] == [2, 2, 2, 1]
    pool.check([other, r])


def test_pages_that_are_hit_are_pinned_before_new_ones_are_taken():
    """Were the hit only noted, the page it needs next would be taken from the hit itself: they are the oldest."""
    pool = PagePool(4, 4)
    finished(pool, 8)
    finished(pool, range(50, 58))
    r = request([*range(8), *range(90, 98)])
    assert pool.admit(r, FULL) and list(pool.cached) and compute(pool, r, 8)
    assert len(set(r.pages)) == 4 and hit(pool, 9) == 8
    pool.check([r])


def test_room_that_is_promised_to_others_is_not_room():
    pool, r = PagePool(4, 4), request(8)
    assert not pool.admit(r, FULL, promised=3) and pool.admit(r, FULL, promised=2)


# ---------------------------------------------------------------- forced collisions
@pytest.fixture
def one_key(monkeypatch):
    """Every page has the same key."""
    monkeypatch.setattr(PagePool, "_hash", staticmethod(lambda content: b"the same"))


def test_equal_keys_are_no_hit(one_key):
    pool = PagePool(8, 4)
    finished(pool, [1, 2, 3, 4])
    assert hit(pool, [1, 2, 3, 4, 5]) == 4 and hit(pool, [1, 2, 3, 5, 5]) == 0
    assert hit(pool, [1, 2, 3, 4, 5], salt=b"x") == 4, (
        "salts only change keys; with equal keys they cannot help"
    )
    finished(pool, [5, 6, 7, 8])
    assert hit(pool, [1, 2, 3, 4, 5]) == 0 and hit(pool, [5, 6, 7, 8, 9]) == 4 and len(pool.index) == 1
    pool.check([])


def test_an_equal_page_behind_another_past_is_no_hit(one_key):
    pool = PagePool(8, 4)
    r = serve(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert [node is not None for node in pool.nodes].count(True) == 1, "one key, one node"
    assert hit(pool, [5, 6, 7, 8, 9]) == 0, "these tokens were computed behind others"
    pool.check([r])


@pytest.mark.parametrize("seed", range(12))
def test_random_days_in_which_all_keys_collide(one_key, seed):
    day(seed, prefix_caching=True)


# ---------------------------------------------------------------- sliding window
def test_pages_go_back_when_no_later_token_sees_them():
    """Window 6, pages of 4: the query at p sees p - 5 .. p, so page 0 goes when the next one is 9, not before."""
    pool, r = PagePool(8, 4, window=6, prefix_caching=False), request(20)
    held = []
    for _ in range(14):
        assert compute(pool, r, 1)
        held.append(len(pool.held(r)))
    assert held == [1] * 4 + [2] * 10, "never three: the third is taken for token 8, after which page 0 goes"
    assert r.returned == 2 and r.pages[2:] == pool.held(r)
    pool.check([r])
    pool.release(r)
    assert sorted(pool.free) == list(range(8))


@pytest.mark.parametrize("computed, returned", [(8, 0), (9, 1), (12, 1), (13, 2), (16, 2), (17, 3)])
def test_the_first_page_that_is_still_seen(computed, returned):
    pool, r = PagePool(8, 4, window=6), request(20)
    assert compute(pool, r, computed)
    assert r.returned == returned == (computed - 6 + 1) // 4
    pool.check([r])


def test_pages_of_sinks_stay():
    pool, r = PagePool(8, 4, window=4, sinks=5), request(24)
    for _ in range(6):
        assert compute(pool, r, 4)
    assert pool.held(r)[:2] == r.pages[:2] and r.returned == 5 and len(pool.held(r)) == 2 + 1
    pool.check([r])
    pool.release(r)
    assert pool.available == 8


def test_a_hit_pins_only_what_the_window_sees():
    pool = PagePool(8, 4, window=4)
    finished(pool, 16)
    r = request(range(17))
    assert pool.admit(r, 4) and r.computed == 16
    assert len(pool.held(r)) == 1 == pool.in_use and r.returned == 3
    assert compute(pool, r, 1)
    pool.check([r])


@pytest.mark.parametrize("seed", range(150))
def test_the_most_that_a_window_holds(seed):
    """most() is never too small: a request that fits alone must never be without a page."""
    rng = random.Random(seed)
    window, chunk, sinks = rng.randint(1, 12), rng.randint(1, 12), rng.randint(0, 6)
    pool, r = PagePool(64, rng.choice([1, 2, 4, 8]), window=window, sinks=sinks), request(60)
    most, peak = pool.most(60, chunk), 0
    while r.computed < 60:
        n = min(rng.randint(1, chunk), r.owed)
        assert pool.grow(r, n)
        peak = max(peak, pool.in_use)
        r.computed += n
        pool.settle(r)
    assert peak <= most <= pages_for(60, pool.page_size)


@pytest.mark.parametrize("first", range(1, 9))
def test_a_window_in_the_smallest_pool_it_fits_never_stops(first):
    """Pages must leave when the window does, not when the next page is full: with odd chunks it would need one more."""
    world = World(
        num_pages=2, page_size=8, window=3, prefix_caching=False, token_budget=4, max_running=2, chunk=3
    )
    world.add([1] * first, new=2)
    world.add([1] * 30, new=20)
    world.run(100)
    world.close()


# ---------------------------------------------------------------- the baseline
def test_a_reserving_pool_holds_the_longest_answer_from_the_first_step():
    pool, r = ReservingPool(8, 4, prefix_caching=False), request(5, new=12)  # 16 tokens at most
    assert pool.admit(r, FULL) and compute(pool, r, 5) and len(r.pages) == 4
    for _ in range(11):
        r.tokens.append(0)
        assert compute(pool, r, 1)
    assert len(r.pages) == 4 and r.computed == 16
    second, third = request(5, new=12), request(1, new=1)
    assert pool.admit(second, FULL) and compute(pool, second, 5)
    assert not pool.admit(third, FULL)
    pool.check([r, second])


def test_a_reserving_pool_of_one_length_for_all():
    pool, r = ReservingPool(9, 4, longest=16), request(5, new=3)
    assert pool.admit(r, FULL) and compute(pool, r, 5) and len(r.pages) == 4
    second, third = request(2, new=30, id=1), request(1, new=1, id=2)
    assert pool.admit(second, FULL) and compute(pool, second, 2) and not pool.admit(third, FULL)
    assert compute(pool, second, 15) and len(second.pages) == 5, (
        "a longer answer than expected gets what it needs"
    )
    pool.check([r, second])
    with pytest.raises(ValueError) as error:
        ReservingPool(4, 4, longest=17)
    assert str(error.value) == (
        "longest is 17 tokens, 5 pages of 4, and the whole pool has 4: no request could ever run.\n"
        "  Use a shorter one, or num_pages >= 5."
    )


@pytest.mark.parametrize("seed", range(6))
def test_days_with_a_reserving_pool_of_one_length_for_all(seed):
    class Pool(ReservingPool):
        __init__ = partialmethod(ReservingPool.__init__, longest=24)

    day(seed, pool_class=Pool, window=None, sinks=0, num_pages=12, page_size=4)


@pytest.mark.parametrize("seed", range(15))
def test_a_reserving_pool_never_takes_anything_back(seed):
    world = day(seed, pool_class=ReservingPool, window=None, sinks=0)
    assert world.scheduler.preemptions == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_reserving_pool_with_a_window(seed):
    """It refuses what it could never reserve, instead of letting it wait for ever."""
    day(seed, pool_class=ReservingPool, window=4, num_pages=6, page_size=4)


def test_the_stand_in_remembers_through_pages_only():
    """Of the test's own instrument: one page of the past exchanged, and the answer is another."""
    world = World()
    (r,) = world.add(list(range(10)), new=6)
    world.step()
    page = r.pages[0]
    for layer in world.oracle.slots:
        layer[page][0] = ("changed",)
    with pytest.raises(AssertionError, match="not its"):
        world.run()
        world.close()
    assert alone(r, None, 0)[1] == "length"
