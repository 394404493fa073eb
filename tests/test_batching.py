"""lab/batching counts what the scheduler then does: both are asked the same random questions."""

import random

import pytest

from minserve.lab import batching, look
from minserve.pages import PagePool
from minserve.request import Request, SamplingParams
from minserve.scheduler import Scheduler, StaticBatching


def steps_of(policy, lengths, seats) -> int:
    scheduler = policy(PagePool(1024, 16), token_budget=512, max_running=seats)
    for i, length in enumerate(lengths):
        scheduler.add(Request(i, [1, 2], SamplingParams(), length))
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.commit(plan, [[7]] * len(plan))
    return scheduler.steps


def check_steps(module):
    dice = random.Random(0)
    for _ in range(60):
        seats, lengths = dice.randint(1, 6), [dice.randint(1, 20) for _ in range(dice.randint(1, 20))]
        assert module.static_steps(lengths, seats) == steps_of(StaticBatching, lengths, seats)
        assert module.continuous_steps(lengths, seats) == steps_of(Scheduler, lengths, seats)
        ratio = module.ideal_ratio(lengths, seats)
        assert ratio >= module.static_steps(lengths, seats) / module.continuous_steps(lengths, seats)
    assert module.ideal_ratio([2, 8, 4, 6], 2) == pytest.approx(28 / 20)


def check_shares(module):
    dice = random.Random(1)
    for _ in range(200):
        debts = [dice.choice([1, 1, dice.randint(2, 60)]) for _ in range(dice.randint(1, 6))]
        budget, chunk = dice.randint(len(debts), 80), dice.choice([4, 16, 1000])
        scheduler = Scheduler(PagePool(1024, 16), budget, max_running=len(debts), chunk=min(chunk, budget))
        requests = [Request(i, list(range(debt)), SamplingParams(), 9) for i, debt in enumerate(debts)]
        for request in requests:
            scheduler.add(request)
        for request in requests:  # all are running, with nothing computed yet
            assert scheduler.pages.admit(request, budget)
            scheduler.waiting.remove(request)
            scheduler.running.append(request)
            request.status, request.seat = type(request.status).RUNNING, scheduler.seats.pop()
        planned = {request.id: tokens for request, tokens in scheduler.schedule()}
        assert module.shares(debts, budget, chunk) == [planned.get(i, 0) for i in range(len(debts))]


def check_needs(module):
    dice = random.Random(2)
    for _ in range(100):
        prompt, new, budget = (dice.randint(1, 40) for _ in range(3))
        scheduler = Scheduler(PagePool(64, 4), token_budget=budget, max_running=1)
        request = Request(0, [1] * prompt, SamplingParams(), new)
        scheduler.add(request)
        most = 0
        while scheduler.has_work:
            plan = scheduler.schedule()
            most = max(most, len(request.pages))
            scheduler.commit(plan, [[7]])
        assert module.needs(prompt, new, 4, budget) == (most, scheduler.steps)


def test_needs_are_those_of_a_lone_request():
    check_needs(batching)


def test_steps_are_those_of_the_scheduler():
    check_steps(batching)


def test_shares_are_those_of_the_scheduler():
    check_shares(batching)


WRONG = [
    (check_steps, "max(lengths[i", "min(lengths[i"),
    (check_steps, "free_at[0] + length", "free_at[-1] + length"),
    (check_steps, "/ sum(lengths)", "/ (len(lengths) * max(lengths))"),
    (check_shares, "budget - debts.count(1)", "budget"),
    (check_shares, "min(debt, spare, chunk)", "min(debt, spare)"),
    (check_shares, "1 if debt == 1 else ", ""),
    (check_needs, "(prompt + new - 1) / page_size", "(prompt + new) / page_size"),
    (check_needs, "ceil(prompt / budget) + new - 1", "ceil(prompt / budget) + new"),
]


@pytest.mark.parametrize("check, old, new", WRONG)
def test_a_wrong_version_fails_its_check(check, old, new):
    with pytest.raises(AssertionError):
        check(look.mutant(batching, old, new))
