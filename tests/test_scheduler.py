"""Many random days, on every step of which the invariants hold; then each rule of the scheduler worked by hand."""

from collections import Counter

import pytest
from paged_world import World, day

from minserve.pages import PagePool, pages_for
from minserve.request import Request, SamplingParams, Status
from minserve.scheduler import QueueFull, Scheduler, StaticBatching, WholePrompts

POLICIES = [Scheduler, WholePrompts, StaticBatching]
QUICK, ALL = range(12), range(12, 240)


# ---------------------------------------------------------------- random days
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in ALL)])
def test_random_days(seed, policy):
    day(seed, policy)


def test_the_days_are_not_quiet():
    """Everything the invariants are about does happen in them."""
    seen = Counter()
    for seed in range(60):
        world = day(seed)
        seen["preemptions"] += world.scheduler.preemptions
        seen["refusals"] += world.refused
        seen["evictions"] += world.pool.evictions
        seen["hits"] += world.scheduler.hit_tokens
        seen["copies"] += world.oracle.copied
        seen["windows"] += world.window is not None
        for r in world.requests:
            seen[r.finish_reason] += 1
            seen["preempted forks"] += r.preemptions > 0 and r.leader is not None
    few = {what: n for what, n in seen.items() if n < 10}
    assert not few and {"stop", "length", "abort", "timeout", "preempted forks"} <= set(seen), (
        f"too quiet: {seen}"
    )


@pytest.mark.parametrize("seed", range(40))
def test_bounded_wait(seed):
    """With one class, whoever is first among the unfinished runs, is never stopped, and computes a token in every step.

    So a request ends within as many steps as it and all before it have tokens.
    """
    world = day(seed, ageing=0)
    for r in world.requests:
        before = sum(other.most_tokens for other in world.requests if other.id <= r.id)
        assert world.ended[r.id] - world.arrived[r.id] <= before


# ---------------------------------------------------------------- the door
def test_a_request_that_can_never_fit_is_told_why():
    scheduler = Scheduler(PagePool(num_pages=64, page_size=16), token_budget=256, max_running=8)
    with pytest.raises(ValueError) as error:
        scheduler.add(Request(7, [0] * 1090, SamplingParams(), max_new_tokens=30))
    assert str(error.value) == (
        "request 7 can never run: 1,090 prompt + 30 new tokens need 70 pages of 16, "
        "and the whole pool has 64 (1,024 tokens).\n"
        "  Shorten it by 95 tokens, or build the engine with num_pages >= 70."
    )
    scheduler.add(Request(8, [0] * 995, SamplingParams(), max_new_tokens=30))  # shortened by 95 tokens
    assert scheduler.room == 4095


def test_who_cannot_fit_does_not_stop_those_behind():
    """160 tokens of room. 200 could wait for ever at the head of the queue: refused at the door, the next is served."""
    world = World(num_pages=10, page_size=16, token_budget=64)
    assert not world.add([1] * 200, new=1) and not world.add([1] * 150, new=50)
    (small,) = world.add([1] * 8, new=3)
    (largest,) = world.add([2] * 150, new=11)  # the 160 that fit: its last token is never computed
    world.run(200)
    assert world.close() and small.finish_reason == largest.finish_reason == "length"


def test_a_window_lets_long_prompts_through_a_small_pool():
    world = World(num_pages=5, page_size=4, window=8, token_budget=4, max_running=1)
    (r,) = world.add([1] * 70, new=20)
    world.run(200)
    assert world.close() and len(r.tokens) == 90
    assert not World(num_pages=4, page_size=4, window=8, token_budget=12, max_running=1).add([1] * 70, new=20)


def test_a_full_queue_refuses():
    scheduler = Scheduler(PagePool(8, 4), 8, 1, max_waiting=2)
    first, second = (Request(i, [1], SamplingParams(), 1) for i in (0, 1))
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.room == 0
    with pytest.raises(QueueFull) as error:
        scheduler.add(Request(2, [1], SamplingParams(), 1))
    assert str(error.value) == (
        "request 2 is refused: 2 requests wait already, and max_waiting is 2.\n"
        "  Send it again when some have finished, or build the engine with a larger max_waiting."
    )
    assert scheduler.waiting == [first, second]
    scheduler.schedule()
    assert scheduler.room == 1


@pytest.mark.parametrize(
    "limits",
    [
        dict(token_budget=7, max_running=8),
        dict(token_budget=8, max_running=0),
        dict(token_budget=8, max_running=8, chunk=0),
        dict(token_budget=8, max_running=8, ageing=-1),
    ],
)
def test_limits_that_exclude_each_other(limits):
    with pytest.raises(ValueError) as error:
        Scheduler(PagePool(8, 4), **limits)
    said = dict(chunk=None, ageing=100) | limits
    assert str(error.value) == (
        f"token_budget {said['token_budget']}, max_running {said['max_running']}, chunk {said['chunk']}, "
        f"ageing {said['ageing']}: each running request needs one token of the budget in every step.\n"
        f"  Use token_budget >= max_running >= 1, chunk >= 1, ageing >= 0."
    )


# ---------------------------------------------------------------- who goes first
def finish_order(world: World) -> list[int]:
    order = []
    while world.scheduler.has_work:
        order += [r.id for r in world.step()]
    return order


def test_first_come_first_served_within_a_class():
    world = World(num_pages=8, page_size=4, max_running=1)
    for length in (9, 1, 20, 3):
        world.add([1] * length, new=2)
    assert finish_order(world) == [0, 1, 2, 3]


def test_a_small_request_does_not_overtake_the_head_of_the_queue():
    world = World(num_pages=8, page_size=4, max_running=3)
    world.add([1] * 16, new=8)
    world.step()
    world.add([2] * 20, new=2)  # needs 5 pages, and 4 are left
    world.add([3] * 2, new=1)  # would fit
    world.step()
    assert len(world.scheduler.running) == 1
    assert finish_order(world) == [0, 2, 1] and world.close()  # admitted together, after 0; 2 has less to do


def test_ageing_by_hand():
    """ageing 10: a class is worth 10 steps. rank = arrival + 10 * priority, then id.

    id   arrives  priority   rank
    0    0        0          (0, 0)    runs
    1    0        1          (10, 1)
    2    5        0          (5, 2)
    3    10       0          (10, 3)   as good as 1, which came first
    4    11       0          (11, 4)
    5    11       -1         (1, 5)
    6    11       5          (61, 6)
    """
    world = World(num_pages=16, page_size=4, max_running=1, ageing=10)
    arrivals = {0: [0, 1], 5: [0], 10: [0], 11: [0, -1, 5]}
    world_order = []
    for step in range(12):
        for priority in arrivals.get(step, ()):
            world.add([1], new=30 if not world.requests else 1, priority=priority)
        world_order += world.step()
    assert [r.rank for r in world.scheduler.waiting] == [(1, 5), (5, 2), (10, 1), (10, 3), (11, 4), (61, 6)]
    assert finish_order(world) == [0, 5, 2, 1, 3, 4, 6]


def test_a_low_class_is_overtaken_for_so_many_steps_and_no_longer():
    """An urgent request arrives in every step, one at a time is served: the patient one goes when it has aged."""
    world = World(num_pages=16, page_size=4, max_running=1, ageing=7)
    world.add([1], new=1, priority=0)
    (patient,) = world.add([1], new=1, priority=3)
    for _ in range(60):
        world.add([1], new=1, priority=0)
        world.step()
    assert 7 * 3 <= world.ended[patient.id] <= 7 * 3 + 2
    world.run()


def test_nobody_who_runs_is_stopped_for_a_newcomer():
    world = World(num_pages=16, page_size=4, max_running=1)
    world.add([1], new=5, priority=9)
    world.step()
    world.add([1], new=1, priority=-9)
    assert finish_order(world) == [0, 1] and not world.scheduler.preemptions


# ---------------------------------------------------------------- one step
def test_two_prompts_in_chunks_share_the_budget():
    """Chunk 8, budget 16, two prompts of 40: 8 + 8. What is left is compared with the chunk, not with the prompt."""
    world = World(num_pages=32, page_size=4, token_budget=16, chunk=8)
    world.add([1] * 40)
    world.add([2] * 40)
    world.step()
    assert world.plan == [(0, 8), (1, 8)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_chunk_continues_where_the_last_one_ended(page_size):
    world = World(num_pages=96 // page_size, page_size=page_size, chunk=8, prefix_caching=False)
    (r,) = world.add([1] * 24, new=4)
    for computed in (8, 16, 24):
        assert len(r.outputs) == 0
        world.step()
        assert r.computed == computed and world.pool.in_use == pages_for(computed, page_size)
    assert len(r.outputs) == 1
    world.run()
    world.close()


def test_long_prompts_do_not_starve_a_decoding_request():
    """Budget 16; a prompt of 64 arrives every 2 steps, for 200 steps: the stream gets a token in each of them."""
    world = World(num_pages=200, page_size=4, token_budget=16, max_running=8)
    (stream,) = world.add([1], new=400)
    world.step()
    for step in range(200):
        if step % 2 == 0:
            world.add([2, step % 13] * 32, new=1)
        world.step()
        assert sum(n for _, n in world.plan) == 16 and len(stream.outputs) == step + 2
    assert sum(r.finish_reason == "length" for r in world.requests) >= 200 * 15 // 64 - 1


def test_decoding_requests_do_not_starve_a_prompt():
    """Four endless streams, budget 16: a prompt of 64 gets the other 12 in every step, and is through after 6."""
    world = World(num_pages=200, page_size=4, token_budget=16, max_running=5)
    streams = [world.add([i], new=150)[0] for i in range(4)]
    world.step()
    (r,) = world.add([5] * 64, new=1)
    steps = 0
    while r.finish_reason is None:
        world.step()
        steps += 1
        assert all(len(s.outputs) == steps + 1 for s in streams)
    assert steps == 6


def test_decoding_comes_before_prompts_even_of_better_rank():
    world = World(num_pages=64, page_size=4, token_budget=4, max_running=4)
    for i in range(3):
        world.add([i], new=20, priority=1)
    world.step()
    world.add([7] * 9, new=2, priority=0)
    for _ in range(9):
        assert world.plan and [n for _, n in world.plan][:3] == [1] * 3
        world.step()
    assert sorted(world.plan) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_stop_ids_and_min_tokens():
    """A stop id ends the answer and is no part of it; before min_tokens it does not end anything."""
    scheduler = Scheduler(PagePool(8, 4), 8, 2)
    params = SamplingParams(min_tokens=2)
    early, late = (Request(i, [1], params, 5, stop_ids=frozenset({9})) for i in (0, 1))
    for r in (early, late):
        scheduler.add(r)
    scripts = {0: [9, 3, 9], 1: [4, 4, 4, 4, 4]}
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.commit(plan, [[scripts[r.id][len(r.outputs)]] for r, _ in plan])
    assert (early.outputs, early.finish_reason) == ([9, 3], "stop")
    assert (late.outputs, late.finish_reason) == ([4] * 5, "length")


def test_commit_wants_one_token_per_planned_request():
    scheduler = Scheduler(PagePool(8, 4), 8, 2)
    scheduler.add(Request(0, [1], SamplingParams(), 5))
    with pytest.raises(ValueError, match="shorter"):
        scheduler.commit(scheduler.schedule(), [])


def test_a_step_that_was_never_run_is_planned_again():
    """An engine whose model raised has nothing to commit; the next plan is the same, on the same pages."""
    world = World(num_pages=16, page_size=4, token_budget=16, chunk=4)
    world.add([1] * 6, new=3, n=2)
    world.add([2] * 9, new=3)
    for _ in range(3):
        plan = [(r.id, n) for r, n in world.scheduler.schedule()]
        tables = [list(r.pages) for r in world.requests]
        world.step()
        assert world.plan[: len(plan)] == plan
        assert all(r.pages[: len(old)] == old for r, old in zip(world.requests, tables) if r.pages)
    world.run()
    world.close()


# ---------------------------------------------------------------- preemption
def test_the_worst_rank_gives_way_first():
    """Three of one page each, a fourth page free. Who came first is served; the lower class gives way first."""
    world = World(num_pages=4, page_size=4, prefix_caching=False, max_running=3)
    for priority in (1, 0, 0):
        world.add([priority] * 3, new=10, priority=priority)
    gave_way = []
    for _ in range(8):
        world.step()
        gave_way += world.scheduler.gave_way
    assert gave_way == [0, 2], "0 came first, but is of the lower class; then the younger of the others"
    assert world.requests[1].status is Status.RUNNING and world.requests[1].preemptions == 0
    world.run()
    world.close()


def test_who_gave_way_comes_back_in_its_place():
    world = World(num_pages=4, page_size=4, prefix_caching=False, max_running=3)
    a, b = (world.add([i] * 3, new=10)[0] for i in (0, 1))
    while not b.preemptions:
        world.step()
    (c,) = world.add([2], new=1)
    assert world.scheduler.waiting == [b, c]
    assert finish_order(world)[:2] == [a.id, c.id] and b.finish_reason == "length"


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [4, 5, 8])
def test_each_forward_after_a_preemption_keeps_its_token(length, caching):
    """Pages of 4, prompt 3. Stopped at 4, 5 or 8 tokens and resumed, it goes on to 9 as if nothing had been."""
    world = World(num_pages=4, page_size=4, prefix_caching=caching)
    (r,) = world.add([1, 2, 3], new=6)
    while len(r.tokens) < length:
        world.step()
    world.preempt(r)
    for total in range(length + 1, 10):
        world.step()
        assert len(r.tokens) == total
    assert world.close() and r.finish_reason == "length"


def test_what_was_answered_is_recomputed_like_a_prompt():
    """Prompt 3, stopped after 20 outputs, chunk 8: 23 tokens come back as 8 + 8 + 7, then one at a time."""
    world = World(num_pages=8, page_size=4, chunk=8, prefix_caching=False)
    (r,) = world.add([1, 2, 3], new=25)
    while len(r.outputs) < 20:
        world.step()
    world.preempt(r)
    chunks = []
    while world.scheduler.has_work:
        world.step()
        chunks += [n for _, n in world.plan]
    assert chunks == [8, 8, 7, 1, 1, 1, 1]
    assert world.close() and (r.finish_reason, len(r.outputs)) == ("length", 25)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "a, b", [((20, 12), (36, 5)), ((4, 29), (20, 20)), ((3, 36), (3, 36)), ((24, 8), (4, 36))]
)
def test_no_thrash(a, b, caching):
    """Ten pages of 4, and two who need nearly all of them: the second waits until all of it fits, not just a chunk."""
    world = World(num_pages=10, page_size=4, chunk=8, prefix_caching=caching)
    for i, (prompt, new) in enumerate((a, b)):
        world.add([i] * prompt, new=new)
    world.run(300)
    useful = sum(r.most_tokens for r in world.close().requests)
    assert world.scheduler.preemptions <= 2 and world.computed <= 3 * useful


def test_a_prompt_in_chunks_keeps_the_room_it_was_admitted_for():
    """8 pages: a prompt of 6 pages is a chunk in when another comes that would fit into what is still free."""
    world = World(num_pages=8, page_size=4, token_budget=8, chunk=4, prefix_caching=False)
    world.add([1] * 24, new=1)
    world.step()
    world.add([2] * 12, new=1)
    world.step()
    assert len(world.scheduler.running) == 1 and world.pool.available == 6
    world.run()
    assert world.close().scheduler.preemptions == 0


def test_many_equal_requests_in_half_the_room_they_need():
    """Each is cut down to recomputing, over and over: the cost stays within the bound that the docstring proves."""
    world = World(num_pages=24, page_size=4, token_budget=32, max_running=8, prefix_caching=False)
    for i in range(8):
        world.add([i] * 8, new=20)
    world.run()
    useful = sum(r.most_tokens for r in world.close().requests)
    assert 0 < world.scheduler.preemptions < 16 and world.computed < 2.5 * useful


# ---------------------------------------------------------------- n completions of one prompt
def test_children_share_their_leaders_prompt():
    world = World(num_pages=16, page_size=4, max_running=4, token_budget=16)
    leader, *children = world.add([1] * 10, new=6, n=3)
    world.step()
    assert world.plan == [(0, 10)], "the children wait for the prompt"
    world.step()
    assert world.plan == [(0, 1), (1, 1), (2, 1)]
    assert all(child.pages[:2] == leader.pages[:2] and child.cached_tokens == 9 for child in children)
    assert world.scheduler.hit_tokens == 18 and world.scheduler.asked_tokens == 30
    world.run()
    assert world.close().computed == 10 + 2 + 3 * 5


@pytest.mark.parametrize("window", [None, 3, 8])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("caching", [True, False])
def test_forks_at_every_boundary(prompt, caching, window):
    world = World(num_pages=16, page_size=4, window=window, prefix_caching=caching, chunk=3)
    world.add(list(range(prompt)), new=7, n=3)
    world.run()
    world.close()


def test_a_leader_that_gives_way_does_not_hold_up_its_children():
    """Preempted, aborted or gone before they came: they compute the prompt themselves."""
    for stop in ("preempt", "abort"):
        world = World(num_pages=16, page_size=4, token_budget=8, max_running=4, chunk=4)
        leader, one, two = world.add([1] * 10, new=4, n=3)
        world.step()
        getattr(world, stop)(leader)
        world.run(60)
        world.close()
        assert one.finish_reason == two.finish_reason == "length"


def test_a_child_that_gives_way_comes_back_by_itself():
    world = World(num_pages=16, page_size=4, max_running=4)
    leader, child = world.add([1] * 10, new=8, n=2)
    for _ in range(4):
        world.step()
    world.preempt(child)
    world.run()
    assert world.close() and child.cached_tokens == 9, "a hit of what it computed itself is no saving"


def test_aborting_all_completions_of_a_prompt():
    world = World(num_pages=16, page_size=4, max_running=4)
    family = world.add([1] * 10, new=40, n=3)
    for _ in range(3):
        world.step()
    for r in family:
        world.abort(r)
    assert not world.scheduler.has_work and world.pool.available == 16 and not world.scheduler.schedule()
    world.close()


# ---------------------------------------------------------------- ending early
PHASES = ["waiting", "in its prompt", "decoding", "gave way", "while the step runs", "finished"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("end", ["abort", "timeout"])
def test_ending_in_each_phase(phase, end):
    """Pages and seat are back at once, the others go on, and it ends once."""
    world = World(num_pages=16, page_size=4, token_budget=8, max_running=2, chunk=4)
    (other,) = world.add([1] * 6, new=12)
    (r,) = world.add([2] * 10, new=3)
    for _ in range({"waiting": 0, "in its prompt": 2, "finished": 8}.get(phase, 4)):
        world.step()
    if phase == "gave way":
        world.preempt(r)
    status = {"waiting": Status.WAITING, "gave way": Status.WAITING, "finished": Status.FINISHED}
    assert r.status is status.get(phase, Status.RUNNING)
    assert phase != "in its prompt" or 0 < r.computed < 10
    if phase == "while the step runs":
        end = "abort"
        world.step(aborts=[r])
    elif end == "abort":
        world.abort(r)
    else:
        r.deadline = world.clock
        late = [r for r in (r,) if r.status is not Status.FINISHED]
        assert not late or world.scheduler.finish(r, "timeout") is None
        world.check()
    assert r.finish_reason == ("length" if phase == "finished" else end)
    world.scheduler.finish(r, "error")
    assert r.finish_reason == ("length" if phase == "finished" else end), "twice is once"
    world.run()
    assert world.close() and other.finish_reason == "length"


def test_deadlines():
    """At its time, not before, wherever it is; who is finished is not late."""
    world = World(num_pages=16, page_size=4, max_running=2)
    done, running, waiting, patient = (
        world.add([i], new=new, deadline=deadline)[0]
        for i, (new, deadline) in enumerate([(1, 5), (40, 5), (4, 3), (2, None)])
    )
    reasons = []
    for _ in range(6):
        world.expire()
        reasons.append([r.finish_reason for r in (done, running, waiting, patient)])
        if world.clock == 2:
            world.preempt(waiting)
        world.step()
    assert reasons[2][2] is None and reasons[3][2] == "timeout"
    assert reasons[4][1] is None and reasons[5][:2] == ["length", "timeout"]
    assert patient.finish_reason == "length" and world.close()


def test_deadlines_of_the_finished_are_forgotten():
    """A server that runs for months with an hour's timeout must not keep an hour of finished requests."""
    world = World(num_pages=16, page_size=4, max_running=2)
    for _ in range(400):
        world.add([1], new=1, deadline=1e9)
        world.step()
    assert len(world.scheduler.deadlines) <= 2 + 64 + 1
    (r,) = world.add([1], new=9, deadline=world.clock + 1)
    world.step()
    world.expire()
    assert r.finish_reason == "timeout"


# ---------------------------------------------------------------- the baselines
def timeline(policy, prompts, news, **limits) -> list[list[tuple[int, int]]]:
    world = World(num_pages=200, page_size=4, scheduler_class=policy, **limits)
    for i, (prompt, new) in enumerate(zip(prompts, news)):
        world.add([i] * prompt, new=new)
    steps = []
    while world.scheduler.has_work:
        world.step()
        steps.append(world.plan)
    world.close()
    return steps


def test_static_batching():
    """Filled once, in whole prompts, whatever the budget; the next batch begins when the last of it has finished."""
    steps = timeline(StaticBatching, [9, 9, 30], [1, 3, 2], max_running=2, token_budget=16)
    assert steps == [[(0, 9), (1, 9)], [(1, 1)], [(1, 1)], [(2, 30)], [(2, 1)]]
    steps = timeline(StaticBatching, [8, 8, 8], [1, 1, 1], max_running=3, token_budget=16)
    assert steps == [[(0, 8), (1, 8), (2, 8)]], "also where two of them fill the budget exactly"


def test_whole_prompts():
    """A prompt waits until all of it fits into a step; one that is longer than the budget has its step alone."""
    steps = timeline(WholePrompts, [9, 9, 40, 3], [3, 2, 2, 1], max_running=4, token_budget=16)
    assert steps == [
        [(0, 9)],
        [(0, 1), (1, 9)],
        [(0, 1), (1, 1), (2, 40)],
        [(2, 1), (3, 3)],
    ]


def test_continuous_batching():
    """The same three requests as in the static batch: a seat is taken in the step after it is left."""
    steps = timeline(Scheduler, [9, 9, 30], [1, 3, 2], max_running=2, token_budget=16)
    assert steps == [[(0, 9), (1, 7)], [(1, 2), (2, 14)], [(1, 1), (2, 15)], [(1, 1), (2, 1)], [(2, 1)]]


# ---------------------------------------------------------------- what was saved
def test_hit_statistics_count_a_request_once():
    world = World(num_pages=16, page_size=4, max_running=1)
    world.add([1] * 10, new=1)
    world.run()
    (r,) = world.add([1] * 10, new=6)
    world.step()
    assert (world.scheduler.hit_tokens, world.scheduler.asked_tokens, r.cached_tokens) == (8, 20, 8)
    world.preempt(r)
    world.run()
    assert (world.scheduler.hit_tokens, world.scheduler.asked_tokens, r.cached_tokens) == (8, 20, 8)


def test_a_prompt_that_is_cached_as_a_whole_still_computes_a_token():
    world = World(num_pages=16, page_size=4)
    prompt = [1] * 8
    (first,) = world.add(prompt, new=1)
    world.run()
    (second,) = world.add(prompt, new=1)
    world.run()
    (third,) = world.add([*prompt, 5, 5, 5, 5], new=1)
    world.run()
    assert [r.cached_tokens for r in (first, second, third)] == [0, 4, 8]
    assert first.outputs == second.outputs and world.close()
