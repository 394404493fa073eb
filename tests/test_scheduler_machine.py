"""The same invariants, but hypothesis chooses what happens: if one of them fails, it finds a shortest way there."""

import re

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from paged_world import World

from minserve.pages import PagePool
from minserve.scheduler import Scheduler

SETTINGS = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    database=None,
    derandomize=True,  # the same examples on every machine
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    report_multiple_bugs=False,
)
PROMPTS = st.tuples(st.integers(0, 1), st.integers(1, 20)).map(lambda p: [p[0]] * p[1])


class Day(RuleBasedStateMachine):
    """Each rule ends with every invariant asserted (World.check); at the end, each answer is compared."""

    scheduler_class, pool_class = Scheduler, PagePool

    @initialize(
        pages=st.integers(2, 12), page_size=st.sampled_from([1, 2, 4]), window=st.none() | st.integers(1, 8),
        caching=st.booleans(), running=st.integers(1, 4), spare=st.integers(0, 8), chunk=st.none() | st.integers(1, 4),
    )  # fmt: skip
    def open(self, pages, page_size, window, caching, running, spare, chunk):
        self.world = World(
            pages, page_size, window=window, prefix_caching=caching, max_running=running,
            token_budget=running + spare, chunk=chunk, ageing=3, max_waiting=6,
            scheduler_class=self.scheduler_class, pool_class=self.pool_class,
        )  # fmt: skip

    @rule(
        prompt=PROMPTS, new=st.integers(1, 12), priority=st.integers(0, 1), wait=st.none() | st.integers(1, 9)
    )
    def add(self, prompt, new, priority, wait):
        deadline = None if wait is None else self.world.clock + wait
        self.world.add(prompt, new, priority=priority, deadline=deadline, seed=len(self.world.requests))

    @rule(prompt=PROMPTS, new=st.integers(1, 12), n=st.integers(2, 3))
    def fork(self, prompt, new, n):
        self.world.add(prompt, new, n=n)

    @rule()
    def step(self):
        self.world.step()

    @rule()
    def several_steps(self):
        for _ in range(5):
            self.world.step()

    @precondition(lambda self: self.world.live)
    @rule(which=st.integers(0, 99), in_step=st.booleans())
    def abort(self, which, in_step):
        request = list(self.world.live.values())[which % len(self.world.live)]
        if in_step:
            self.world.step([request])
        else:
            self.world.abort(request)

    @rule()
    def expire(self):
        self.world.expire()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.run()
            self.world.close()


@pytest.mark.parametrize("collide", [False, True], ids=["sha256", "all keys equal"])
def test_nothing_that_may_happen_breaks_an_invariant(collide, monkeypatch):
    if collide:
        monkeypatch.setattr(PagePool, "_hash", staticmethod(lambda content: b"the same"))
    run_state_machine_as_test(Day, settings=SETTINGS)


# ---------------------------------------------------------------- the machine finds what is wrong, and says it shortly
class KeepsComputed(Scheduler):
    """A preempted request forgets its pages, but not that it had computed them."""

    def preempt(self, request):
        computed = request.computed
        super().preempt(request)
        request.computed = computed


class ForgetsToCopy(PagePool):
    """A page that others read is written as if it were one's own."""

    def _is_shared(self, page):
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts, most",
    [
        (dict(scheduler_class=KeepsComputed), 3),  # open a small pool, and a request or two that outgrow it
        (dict(pool_class=ForgetsToCopy), 3),  # open, and fork
    ],
    ids=["keeps computed", "forgets to copy"],
)
def test_a_planted_bug_is_found_and_shrunk_to_a_few_rules(parts, most):
    machine = type("Day", (Day,), parts)
    phases = (Phase.generate, Phase.shrink)
    with pytest.raises(AssertionError) as error:
        run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=200, phases=phases))
    trace = "\n".join(error.value.__notes__)
    rules = re.findall(r"^state\.(?!teardown)(\w+)\(", trace, flags=re.MULTILINE)
    assert rules[0] == "open" and len(rules) <= most, f"not a short story:\n{trace}"
