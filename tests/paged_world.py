"""A day at the engine without a model: scheduler, pool, and a stand-in (paged_oracle.py).

World     add, fork, abort, expire, step; after each of them every invariant of pages.py and scheduler.py is asserted
day()     one random day in a World: arrivals, aborts, deadlines, priorities, tiny pools, prefixes, forks, windows

Why preemptions are bounded   Call `promised` the pages that running requests still need for the tokens they already
have. Whoever is admitted fits beside what is promised, so room can run short only through a page that was not: one
that an answer grows into, or the one a forked child takes for itself. Those number at most G, the sum over requests of
pages_for(most_tokens) - pages_for(prompt), plus one per child: a request that is admitted again is promised its answer
so far. While a grow fails, promises exceed what is available, and each victim that frees a page makes that gap smaller.
So at most G preemptions free something (the others held only pages that somebody else holds too), and a request's
tokens are computed at most 1 + preemptions times.
"""

import random
from collections import Counter

from paged_oracle import VOCABULARY, PagedOracle, alone

from minserve.pages import PagePool, pages_for
from minserve.request import Request, SamplingParams, Status
from minserve.scheduler import Scheduler, StaticBatching, WholePrompts


def watched(pool_class):
    """The pool, with every refusal checked to have changed nothing, and what each release freed noted."""

    def state(pool, request):
        return (
            list(pool.free), list(pool.cached), list(pool.references), list(pool.nodes), dict(pool.index),
            list(pool.copies), list(request.pages), list(request.chain), request.computed, request.returned,
            request.dirty, request.writable,
        )  # fmt: skip

    def careful(name):
        def method(self, request, *args):
            before = state(self, request)
            done = getattr(super(Watched, self), name)(request, *args)
            assert done or state(self, request) == before, f"{name} refused, but changed something"
            return done

        return method

    class Watched(pool_class):
        freed = None

        def release(self, request):
            before = self.available
            super().release(request)
            self.freed = self.available - before

    for name in ("grow", "admit", "fork"):
        setattr(Watched, name, careful(name))
    return Watched


class World:
    def __init__(
        self, num_pages=16, page_size=4, *, window=None, sinks=0, prefix_caching=True, token_budget=16,
        max_running=4, scheduler_class=None, pool_class=None, **limits,
    ):  # fmt: skip
        scheduler_class, pool_class = scheduler_class or Scheduler, pool_class or PagePool  # as they are now
        self.pool = watched(pool_class)(
            num_pages, page_size, window=window, sinks=sinks, prefix_caching=prefix_caching
        )
        self.scheduler = scheduler_class(self.pool, token_budget, max_running, **limits)
        self.oracle = PagedOracle(self.pool, sinks)
        self.window, self.sinks, self.clock = window, sinks, 0
        self.policy = next(c.__name__ for c in type(self.scheduler).__mro__ if c.__name__ in POLICIES)
        self.requests: list[Request] = []  # all that were taken
        self.live: dict[int, Request] = {}
        self.arrived: dict[int, int] = {}  # id -> step
        self.ended: dict[int, int] = {}
        self.plan: list = []  # of the last step: (id, num_tokens)
        self.growth = self.barren = self.computed = self.refused = 0
        self._wrap_preempt()

    def _wrap_preempt(self) -> None:
        """Note, for each victim, whether anything became free."""
        scheduler, preempt = self.scheduler, self.scheduler.preempt

        def noted(victim):
            worst = max(scheduler.running, key=self.rank)
            assert victim is worst, f"request {victim.id} gave way, but {worst.id} is of a worse rank"
            preempt(victim)
            self.barren += not self.pool.freed

        scheduler.preempt = noted

    def rank(self, request: Request) -> tuple[int, int]:
        """By the book: arrival + ageing * priority, then id."""
        return (self.arrived[request.id] + self.scheduler.ageing * request.priority, request.id)

    # ------------------------------------------------------------ what may happen
    def add(self, prompt, new=4, *, n=1, seed=0, stop_ids=(), min_tokens=0, **fields) -> list[Request]:
        """n completions of one prompt, all of them or none; [] if they were refused."""
        params = SamplingParams(min_tokens=min_tokens)
        made: list[Request] = []
        for i in range(n):
            leader = made[0] if made else None
            request = Request(
                len(self.requests) + self.refused + i, list(prompt), params, new, seed + 1000 * i,
                frozenset(stop_ids), leader=leader, **fields,
            )  # fmt: skip
            try:
                self.scheduler.add(request)
            except (ValueError, RuntimeError) as error:
                self._check_refusal(request, error)
                for other in made:
                    self.scheduler.finish(other, "abort")
                self.refused += n
                self.check()
                return []
            made.append(request)
            self.live[request.id], self.arrived[request.id] = request, self.scheduler.steps
        S = self.pool.page_size
        for request in made:
            self.requests.append(request)
            grows = pages_for(request.most_tokens, S) - pages_for(len(prompt), S)
            self.growth += grows + (request.leader is not None)
        self.check()
        return made

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request, "abort")
        self.check()

    def preempt(self, request: Request) -> None:
        """Between steps, for no reason."""
        self.scheduler.preempt(request)
        self.growth += 1
        self.check()

    def expire(self) -> None:
        late = {r.id for r in self.scheduler.expire(self.clock)}
        due = {r.id for r in self.live.values() if r.deadline is not None and r.deadline <= self.clock}
        assert late == due, f"expired {late}, but the deadlines of {due} have passed"
        assert all(self.live[i].finish_reason == "timeout" for i in late)
        self.check()

    def step(self, aborts=()) -> list[Request]:
        """One turn of the wheel. `aborts`: requests that are aborted while the model computes."""
        self.clock += 1
        before = Before(self)
        plan = self.scheduler.schedule()
        self.plan = [(r.id, n) for r, n in plan]
        before.check(self, plan)
        self.check(step_runs=True)
        answers = self.oracle(plan)
        self.computed += sum(n for _, n in plan)
        for request in aborts:
            self.abort(request)
        expected = [self._expected(r, n, token) for (r, n), token in zip(plan, answers)]
        finished = self.scheduler.commit(plan, [[token] for token in answers])
        for (request, _), (computed, tokens, reason) in zip(plan, expected):
            assert request.tokens == tokens and request.finish_reason == reason, f"request {request.id}"
            assert request.computed == computed, f"request {request.id}: {request.computed}, not {computed}"
        ended = [r for (r, _), (_, _, reason) in zip(plan, expected) if reason in ("stop", "length")]
        assert finished == ended, "the wrong ones are said to have finished"
        self.check()
        return finished

    def run(self, limit=10_000) -> int:
        """Step until nobody is left; returns how many steps that took."""
        for steps in range(limit):
            if not self.scheduler.has_work:
                return steps
            self.step()
        raise AssertionError(f"still {len(self.live)} requests after {limit} steps")

    def _expected(self, request, n, token):
        if request.status is Status.FINISHED:
            return request.computed, list(request.tokens), request.finish_reason
        made, computed = len(request.tokens) - len(request.prompt), request.computed + n
        if computed < len(request.tokens):
            return computed, list(request.tokens), None
        if token in request.stop_ids and made >= request.params.min_tokens:
            return computed, list(request.tokens), "stop"
        return computed, [*request.tokens, token], "length" if made + 1 == request.max_new_tokens else None

    # ------------------------------------------------------------ what must hold
    def _check_refusal(self, request, error) -> None:
        s, S = self.scheduler, self.pool.page_size
        if isinstance(error, ValueError):
            assert pages_for(request.most_tokens, S) > self.pool.num_pages, f"refused, but fits: {error}"
        else:
            assert len(s.waiting) >= s.max_waiting, f"refused, but there is room: {error}"

    def check(self, step_runs=False) -> None:
        """Everything that holds after every call. `step_runs`: between schedule() and commit()."""
        s, pool = self.scheduler, self.pool
        for request in [r for r in self.live.values() if r.status is Status.FINISHED]:
            assert not request.pages and request.seat is None, (
                f"request {request.id} is finished, but owns something"
            )
            del self.live[request.id]
            self.ended[request.id] = s.steps
        assert {r.id for r in [*s.waiting, *s.running]} == set(self.live), "a request is lost, or still there"
        assert len(s.waiting) + len(s.running) == len(self.live), "a request is there twice"
        for queue, status in ((s.waiting, Status.WAITING), (s.running, Status.RUNNING)):
            assert all(r.status is status for r in queue), "a request in the wrong queue"
            ranks = [self.rank(r) for r in queue]
            assert ranks == sorted(ranks), "not in the order of ranks"
        assert all(not r.pages and r.seat is None and not r.computed for r in s.waiting), (
            "a waiting one owns something"
        )
        assert len(s.running) <= s.max_running, "too many running"
        assert sum(not r.preemptions for r in s.waiting) <= s.max_waiting, "the queue is too long"
        seats = [*s.seats, *(r.seat for r in s.running)]
        assert sorted(seats) == list(range(s.max_running)), "a seat is lost, or taken twice"
        pool.check(s.running)
        tables = Counter(page for r in s.running for page in pool.held(r))
        assert all(tables[p] == pool.references[p] for p in range(pool.num_pages)), (
            "references and tables differ"
        )
        assert len(pool.free) + len(pool.cached) + len(tables) == pool.num_pages, "pages are lost"
        assert not {*pool.free, *pool.cached} & set(tables), "a page is free and in use"
        assert step_runs or not pool.copies, "a copy was never carried out"
        if not step_runs:
            self.oracle.check_index()
            for r in s.running:
                assert r.computed <= len(r.tokens) and self.window is None or r.returned <= len(r.pages)

    def close(self) -> "World":
        """At the end: everything is answered as if alone, nothing is kept, and no more was done than is bounded."""
        s, pool = self.scheduler, self.pool
        assert not self.live and not s.has_work
        assert pool.available == pool.num_pages and not any(pool.references), "pages are still in use"
        assert not pool.copies and len(s.seats) == s.max_running
        for r in self.requests:
            tokens, reason = alone(r, self.window, self.sinks)
            if r.finish_reason in ("abort", "timeout"):
                assert r.tokens == tokens[: len(r.tokens)], f"request {r.id}: not its own answer"
            else:
                assert (r.tokens, r.finish_reason) == (tokens, reason), f"request {r.id}: not its own answer"
        total = sum(r.preemptions for r in self.requests)
        assert s.preemptions == total
        assert total <= self.growth + self.barren, (
            f"{total} preemptions, and only {self.growth} were ever needed"
        )
        assert self.computed <= sum((1 + r.preemptions) * r.most_tokens for r in self.requests), (
            "computed too much"
        )
        return self


class Before:
    """What was true before a step, to judge its plan by."""

    def __init__(self, world: World):
        s = world.scheduler
        self.running, self.waiting = list(s.running), list(s.waiting)
        self.owed = {r.id: r.owed for r in [*s.running, *s.waiting]}
        self.computed = {r.id: r.computed for r in s.running}

    def check(self, world: World, plan) -> None:
        s, pool, S = world.scheduler, world.pool, world.pool.page_size
        planned = {r.id: n for r, n in plan}
        assert len(planned) == len(plan), "planned twice"
        assert plan or not s.has_work, "stuck with work to do"
        gave_way, admitted = set(s.gave_way), [r for r in s.running if r not in self.running]
        assert {r.id for r in self.running if r.status is Status.WAITING} == gave_way
        assert not (gave_way and admitted), "admitted somebody although pages ran out in this very step"
        if self.running:
            best = min(self.running, key=world.rank)
            assert best.id in planned, "the best of those running made no progress"
        for r in self.running:
            if r.id not in gave_way:
                assert r.computed == self.computed[r.id]
                assert self.owed[r.id] > 1 or planned.get(r.id) == 1, (
                    f"request {r.id} decodes, but got no token"
                )
        for r, n in plan:
            assert r.status is Status.RUNNING and 0 < n <= r.owed, (
                f"request {r.id} owes {r.owed}, planned {n}"
            )
            assert len(r.pages) * S >= r.computed + n, f"request {r.id} has no room for its tokens"
            for i in range(r.computed // S, pages_for(r.computed + n, S)):
                page = r.pages[i]
                assert pool.references[page] == 1 and pool.nodes[page] is None, (
                    f"writes into page {page}, shared"
                )
        for r in admitted:
            assert 0 <= r.computed < len(r.tokens) and r.id in planned
            for other in s.waiting:
                assert world.rank(r) < world.rank(other), f"request {r.id} overtook {other.id}"
        if not self.running and self.waiting:
            assert self.waiting[0] in admitted, "nobody runs, and the first of the queue was not admitted"
        self._check_budget(world, plan)

    def _check_budget(self, world: World, plan) -> None:
        s = world.scheduler
        total = sum(n for _, n in plan)
        prompts = [(r, n) for r, n in plan if n > 1]
        if world.policy == "StaticBatching":
            assert all(n == r.owed for r, n in plan), "a prompt in pieces"
            assert not self.running or not prompts, "somebody joined a batch that had begun"
            return
        if world.policy == "WholePrompts":
            assert all(n == r.owed for r, n in plan), "a prompt in pieces"
            assert total <= s.token_budget or len(prompts) == 1, (
                "over the budget, and not for one prompt alone"
            )
            return
        assert total <= s.token_budget, f"{total} tokens planned, budget {s.token_budget}"
        assert all(n <= s.chunk for _, n in plan)
        if total < s.token_budget and not s.gave_way:
            planned = {r.id: n for r, n in plan}
            for r in s.running:
                enough = min(r.owed, s.chunk)
                assert planned.get(r.id) == enough, f"budget left, but request {r.id} got too little"
            if s.waiting and len(s.running) < s.max_running:
                self._check_head_is_held_up(world, s.waiting[0])

    def _check_head_is_held_up(self, world: World, head: Request) -> None:
        """There are seats and tokens for it: then it waits for pages, or for its leader's prompt."""
        s, pool = world.scheduler, world.pool
        if head.leader in s.running and head.leader.computed < len(head.leader.prompt):
            return
        reserves = any(c.__name__ == "ReservingPool" for c in type(pool).__mro__)
        most_tokens = max(head.most_tokens, getattr(pool, "longest", None) or 0)
        need = pool.most(most_tokens if reserves else len(head.tokens), s.chunk)
        promised = sum(max(0, pool.most(len(r.tokens), s.chunk) - len(pool.held(r))) for r in s.running)
        assert need + promised > pool.available, f"nothing stops request {head.id}, but it waits"


POLICIES = {c.__name__: c for c in (Scheduler, WholePrompts, StaticBatching)}


# ---------------------------------------------------------------- a random day
def random_limits(rng: random.Random) -> dict:
    page_size = rng.choice([1, 2, 4, 16])
    windowed = rng.random() < 0.35
    running = rng.randint(1, 6)
    return dict(
        page_size=page_size,
        num_pages=max(2, rng.randint(14, 80) // page_size),
        window=rng.randint(1, 12) if windowed else None,
        sinks=rng.randint(0, 3) if windowed else 0,
        prefix_caching=rng.random() < 0.75,
        max_running=running,
        token_budget=running + rng.randint(0, 24),
        chunk=rng.choice([None, None, 1, 3, 8]),
        max_waiting=rng.choice([3, 6, 1000]),
        ageing=rng.choice([0, 2, 10, 100]),
    )


def random_request(rng: random.Random, world: World, texts: list[list[int]]) -> dict:
    room = world.pool.num_pages * world.pool.page_size
    if world.window is not None:
        room = 60
    new = rng.randint(1, max(1, min(24, room // 2)))
    length = rng.randint(1, max(1, min(48, room - new + 2)))  # a few can never fit
    text = rng.choice(texts)[: rng.choice([0, length, length, rng.randint(0, length)])]
    stops = rng.random() < 0.3
    return dict(
        prompt=text + [rng.randrange(VOCABULARY) for _ in range(length - len(text))],
        new=new,
        n=rng.choice([1, 1, 1, 2, 3]),
        seed=rng.randrange(100),
        stop_ids=rng.sample(range(VOCABULARY), 2) if stops else (),
        min_tokens=rng.randint(0, new) if stops else 0,
        priority=rng.choice([0, 0, 0, 1, -1, 5]),
        salt=rng.choice([b"", b"", b"", b"other"]),
        deadline=world.clock + rng.randint(1, 60) if rng.random() < 0.1 else None,
    )


def day(seed: int, scheduler_class=None, pool_class=None, **fixed) -> World:
    """One random day, every invariant asserted at every step. Returns its World, closed."""
    rng = random.Random(seed)
    world = World(**random_limits(rng) | dict(scheduler_class=scheduler_class, pool_class=pool_class) | fixed)
    texts = [[rng.randrange(VOCABULARY) for _ in range(60)] for _ in range(2)]
    arrivals, unkind = rng.randint(2, 12), rng.random() < 0.5
    for _ in range(20_000):
        while arrivals and rng.random() < 0.4:
            arrivals -= 1
            world.add(**random_request(rng, world, texts))
        world.expire()
        victims = [r for r in world.live.values() if unkind and rng.random() < 0.02]
        during = [r for r in victims if rng.random() < 0.5]
        for request in victims:
            if request not in during:
                world.abort(request)
        world.step(during)
        if not arrivals and not world.live:
            return world.close()
    raise AssertionError("the day does not end")
