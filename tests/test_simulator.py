"""The simulator: timelines one can work out by hand, the real engine's plans step by step, and nothing ever lost."""

import random
from functools import partial

import numpy as np
import pytest
from wrong_versions import wrong_version

from minserve.arrivals import Arrival, azure_like, poisson, shared_prefix_groups, uniform, with_priorities
from minserve.cluster.autoscaler import Autoscaler, AutoscalingConfig
from minserve.cluster.policies import POLICIES, LeastOutstanding, RoundRobin
from minserve.engine import Engine
from minserve.metrics import Timeline
from minserve.pages import PagePool, ReservingPool
from minserve.request import SamplingParams
from minserve.scheduler import Scheduler, StaticBatching, WholePrompts
from minserve.simulator import costs, engine, fleet
from minserve.simulator.costs import Work
from minserve.step_log import Row, StepRecord
from minserve.weights import load


class Second:
    """Every step takes a second, whatever it holds."""

    def __init__(self, between: float = 0.0):
        self.between = between

    def of(self, work) -> float:
        return 1.0

    def after(self, pause) -> float:
        return 0.0


class Tokens:
    """A second for each token, and a thousandth for each position seen: no two steps take equally long."""

    between = 0.01

    def of(self, w) -> float:
        return w.singles + w.tokens + (w.seen + w.pairs) / 1000

    def after(self, pause) -> float:
        return pause / 8


def scheduler(policy=Scheduler, pool=PagePool, num_pages=64, page_size=4, budget=8, seats=4, **limits):
    caching = limits.pop("prefix_caching", True)
    return policy(pool(num_pages, page_size, prefix_caching=caching), budget, seats, **limits)


def tokens(arrivals, its_costs=None, **options) -> list[list[float]]:
    timelines = engine.simulate(arrivals, its_costs or Second(), partial(scheduler, **options))
    return [t.tokens for t in timelines]


# ---------------------------------------------------------------- by hand
def test_one_request():
    (t,) = engine.simulate([Arrival(2.0, 3, 4)], Second(), scheduler)
    assert (t.arrival, t.queued, t.started, t.first, t.finished) == (2, 2, 2, 3, 6)
    assert t.tokens == [3, 4, 5, 6] and t.reason == "length"
    assert (t.prompt_tokens, t.cached_tokens, t.preemptions) == (3, 0, 0)
    assert (t.ttft, t.tpot, t.queue_time) == (1, 1, 0)


def test_who_comes_during_a_step_waits_for_its_end():
    a, b = engine.simulate([Arrival(0, 3, 5), Arrival(1.5, 3, 2)], Second(), scheduler)
    assert a.tokens == [1, 2, 3, 4, 5] and b.tokens == [3, 4]
    assert (b.arrival, b.queued, b.started) == (1.5, 2, 2)


def test_who_comes_at_the_very_end_of_a_step_is_in_the_next_one():
    assert tokens([Arrival(0, 3, 4), Arrival(2, 3, 1)]) == [[1, 2, 3, 4], [3]]


def test_what_passes_between_steps():
    """Steps begin at 0, 1.25, 2.5, ...; who comes in the gap before 2.5 is in time for it."""
    a, b = tokens([Arrival(0, 3, 4), Arrival(2.3, 3, 1)], Second(between=0.25))
    assert a == [1, 2.25, 3.5, 4.75] and b == [3.5]


def test_a_long_prompt_beside_a_decoding_request():
    """A budget of 4: three tokens a step are left for the prompt of 8, so it needs three steps and then draws."""
    a, b = tokens([Arrival(0, 2, 7), Arrival(0.5, 8, 2)], budget=4)
    assert a == [1, 2, 3, 4, 5, 6, 7] and b == [4, 5]


def test_a_long_prompt_is_begun_with_its_first_chunk():
    (t,) = engine.simulate([Arrival(0, 8, 1)], Second(), partial(scheduler, budget=4))
    assert (t.started, t.first, t.prefill_time) == (0, 2, 2)


def test_a_whole_prompt_takes_one_step():
    assert tokens([Arrival(0, 2, 4), Arrival(0.5, 8, 2)], budget=4, policy=WholePrompts) == [
        [1, 2, 3, 4],
        [2, 3],
    ]


def test_one_seat_is_a_queue():
    timelines = engine.simulate([Arrival(0, 2, 3), Arrival(0, 2, 2)], Second(), partial(scheduler, seats=1))
    assert [t.tokens for t in timelines] == [[1, 2, 3], [4, 5]] and timelines[1].queue_time == 3


def test_the_urgent_first():
    arrivals = [Arrival(0, 2, 2, priority=1), Arrival(0.1, 2, 2, priority=1), Arrival(0.2, 2, 2, priority=0)]
    assert tokens(arrivals, seats=1) == [[1, 2], [5, 6], [3, 4]]
    assert engine.simulate(arrivals, Second(), scheduler)[1].priority == 1


def test_a_full_queue_refuses():
    arrivals = [Arrival(0, 2, 3), Arrival(0.5, 2, 2), Arrival(0.6, 2, 2), Arrival(1.5, 2, 1)]
    timelines = engine.simulate(arrivals, Second(), partial(scheduler, seats=1, max_waiting=1))
    assert [t.reason for t in timelines] == ["length", "length", "refused", "refused"]
    assert timelines[2].finished == 0.6 and not timelines[2].tokens


def test_a_shared_prefix_is_computed_once():
    """Pages of 4: of a prefix of 9 tokens, 8 are found again. The own tokens of two requests are never the same."""
    arrivals = [
        Arrival(0, 12, 1, prefix=5, prefix_tokens=9),
        Arrival(9, 12, 1, prefix=5, prefix_tokens=9),
        Arrival(18, 12, 1, prefix=6, prefix_tokens=9),
        Arrival(27, 12, 1),
        Arrival(36, 12, 1),
    ]
    timelines = engine.simulate(arrivals, Second(), scheduler)
    assert [t.cached_tokens for t in timelines] == [0, 8, 0, 0, 0]
    assert timelines[1].ttft == 1 and timelines[0].ttft == 2  # 12 tokens are two steps of 8


def test_who_gives_way_begins_anew():
    """6 pages of 4 hold two requests of at most 11 tokens only while both are short; the later one gives way."""
    timelines = engine.simulate(
        [Arrival(0, 8, 9), Arrival(0, 8, 9)], Second(), partial(scheduler, num_pages=6, budget=16)
    )
    assert [t.preemptions for t in timelines] == [0, 1]
    assert timelines[0].tokens == [*range(1, 10)] and len(timelines[1].tokens) == 9
    assert max(timelines[1].itl) > 1


def test_a_prompt_that_was_computed_elsewhere():
    """It brings its first token, so the first step here makes the second; its prompt is not computed again."""
    begun = Timeline(0.0, prompt_tokens=6, tokens=[1.0], first=1.0, started=0.25)
    one = engine.SimulatedEngine(Tokens(), scheduler())
    assert one.add(Arrival(3.0, 6, 3), 3.0, begun) is begun
    one.run()
    second = 3 + 1.007 + 3 / 8  # after a pause of 3 s
    assert begun.tokens == [1.0, second, second + 0.01 + 1.008] and begun.first == 1.0
    assert begun.started == 0.25 and begun.arrival == 0.0 and begun.reason == "length"


def test_what_can_never_fit_is_an_error():
    with pytest.raises(ValueError, match="can never run"):
        engine.simulate([Arrival(0, 300, 1)], Second(), scheduler)


def test_arrivals_out_of_order():
    with pytest.raises(ValueError, match="arrival 1 comes at 0 s, after one at 1 s"):
        engine.simulate([Arrival(1, 2, 1), Arrival(0, 2, 1)], Second(), scheduler)


def test_a_progress_bar_on_request(capsys):
    engine.simulate([Arrival(0, 2, 1)], Second(), scheduler)
    assert "request" not in capsys.readouterr().err
    engine.simulate([Arrival(0, 2, 1)], Second(), scheduler, progress=True)
    assert "request" in capsys.readouterr().err


# ---------------------------------------------------------------- random days
WORLDS = [
    dict(),
    dict(num_pages=9, seats=3),
    dict(budget=64, seats=4, num_pages=40),
    dict(budget=64, seats=2, page_size=16, num_pages=8),
    dict(policy=WholePrompts, budget=16, num_pages=20),
    dict(policy=StaticBatching, budget=64),
    dict(pool=ReservingPool, budget=64, num_pages=12),
    dict(prefix_caching=False, num_pages=12, budget=32),
    dict(ageing=3, budget=40, seats=3, num_pages=24),
    dict(max_waiting=2, budget=40),
]


def day(seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    arrivals = poisson(rng.choice((0.02, 0.1, 0.5)), 40 / 0.1, uniform((1, 12), (1, 12)), seed)[:30]
    arrivals = shared_prefix_groups(arrivals, 2, 8, seed=seed) if seed % 2 else arrivals
    return with_priorities(arrivals, {0: 1, 1: 1, 2: 1}, seed)


@pytest.mark.parametrize("world", range(len(WORLDS)))
def test_equal_steps_at_once_are_equal_steps_one_by_one(world):
    for seed in range(12):
        made = []
        for stepwise in (False, True):
            one = engine.SimulatedEngine(Tokens(), scheduler(**WORLDS[world]), stepwise=stepwise)
            timelines = []
            for arrival in day(seed):
                one.run(arrival.time)
                timelines.append(one.add(arrival, arrival.time))
            while one.ongoing:
                one.run(one.now + 1)  # looking at it in the middle changes nothing
            made.append((timelines, one.steps, one.scheduler.steps, one.scheduler.preemptions))
            one.scheduler.pages.check([])
            assert not one.flight and one.scheduler.pages.in_use == 0 and not one.scheduler.has_work
        assert made[0] == made[1]


def test_equal_steps_are_taken_at_once():
    """33 tokens: a prompt, then 32 decode steps, which are one call."""
    calls, its = [], scheduler(budget=64)
    schedule = its.schedule
    its.schedule = lambda: calls.append(1) or schedule()
    one = engine.SimulatedEngine(Second(), its)
    one.add(Arrival(0, 4, 33), 0.0)
    one.run()
    assert len(calls) == 2 and one.steps == 33 == its.steps


@pytest.mark.parametrize("world", range(len(WORLDS)))
def test_every_arrival_ends_once_and_in_full(world):
    for seed in range(6):
        arrivals = day(seed)
        timelines = engine.simulate(arrivals, Tokens(), partial(scheduler, **WORLDS[world]))
        assert len(timelines) == len(arrivals)
        for a, t in zip(arrivals, timelines):
            assert t.reason in ("length", "refused") and t.arrival == a.time and t.finished >= a.time
            if t.ok:
                assert len(t.tokens) == a.output_tokens and t.tokens == sorted(t.tokens)
                assert (
                    t.arrival <= t.queued <= t.started < t.first == t.tokens[0] <= t.finished == t.tokens[-1]
                )
            else:
                assert not t.tokens and "max_waiting" in WORLDS[world]


def test_seeds():
    run = lambda seed: engine.simulate(
        azure_like("code", 60, seed, rate=0.5, scale=0.005), Tokens(), scheduler
    )
    assert run(3) == run(3) and run(3) != run(4)


# ---------------------------------------------------------------- the engine itself
class Recorded(Scheduler):
    """Keeps what it planned."""

    def __init__(self, *args, **limits):
        super().__init__(*args, **limits)
        self.plans = []

    def schedule(self):
        plan = super().schedule()
        if plan:
            self.plans.append([(request.id, num_tokens) for request, num_tokens in plan])
        return plan


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("llama-3"))


@pytest.mark.parametrize("seed", range(4))
def test_plans_and_times_are_those_of_the_engine_under_the_same_clock(model, seed):
    """The real engine, computing real tokens, with a clock that the costs turn."""
    limits = dict(num_pages=9 if seed < 2 else 40, page_size=4, token_budget=10, max_running=4)
    its, arrivals, rng = Tokens(), day(seed)[:16], random.Random(seed)
    real = Engine(model, policy=Recorded, step="plain", **limits)
    texts = {a.prefix: [rng.randrange(251) for _ in range(a.prefix_tokens)] for a in arrivals}
    timelines = [Timeline(a.time, prompt_tokens=a.prompt_tokens, priority=a.priority) for a in arrivals]
    heard, now, ready, due = {}, 0.0, 0.0, 0
    while due < len(arrivals) or real.scheduler.has_work:
        if not real.scheduler.has_work:
            now = max(now, arrivals[due].time)
        while due < len(arrivals) and arrivals[due].time <= now:
            a = arrivals[due]
            prompt = texts[a.prefix] + [rng.randrange(251) for _ in range(a.prompt_tokens - a.prefix_tokens)]
            params = SamplingParams(max_tokens=a.output_tokens, ignore_eos=True)
            (output,) = real.add(prompt, params, priority=a.priority)
            heard[output.request.id] = timelines[due]
            due += 1
        news, rows = real.step(), real.log[-1].rows
        ended = now + its.of(costs.work_of(rows)) + its.after(now - ready)
        for output, _ in news:
            timeline = heard[output.request.id]
            timeline.tokens.append(ended)
            if output.finished:
                request = output.request
                timeline.ended(ended, output.finish_reason)
                timeline.cached_tokens, timeline.preemptions = request.cached_tokens, request.preemptions
        now = ready = ended + its.between

    make = lambda: Recorded(PagePool(limits["num_pages"], 4), 10, 4)
    simulated = engine.SimulatedEngine(its, make(), stepwise=True)
    again = []
    for a in arrivals:
        simulated.run(a.time)
        again.append(simulated.add(a, a.time))
    simulated.run()
    assert simulated.scheduler.plans == real.scheduler.plans
    assert [len(t.tokens) for t in timelines] == [a.output_tokens for a in arrivals]
    same = lambda t: (t.arrival, t.tokens, t.finished, t.reason, t.cached_tokens, t.preemptions, t.priority)
    assert [*map(same, again)] == [*map(same, timelines)]
    assert engine.simulate(arrivals, its, make) == again
    if seed == 0:
        assert sum(t.preemptions for t in again)


# ---------------------------------------------------------------- what a step costs
def test_what_a_step_holds():
    """Two single tokens behind 7 and 0; a chunk of 3 behind 4: its queries see 5, 6 and 7 positions."""
    assert costs.work([(1, 7), (1, 0), (3, 4)]) == Work(2, 9, chunks=1, tokens=3, pairs=18, read=7)
    assert costs.work([]) == Work(0, 0)


def coefficients(**named: float) -> tuple[float, ...]:
    names = {name.replace(" ", "_").replace(",", ""): i for i, name in enumerate(costs.FEATURES)}
    found = [0.0] * len(names)
    for name, value in named.items():
        found[names[name]] = value
    return tuple(found)


KNOWN = coefficients(
    step_of_single_tokens=10e-3, over_2_rows=2e-3, over_4_rows=3e-3, row=0.1e-3, position_seen_by_a_single_token=1e-6,
    step_with_a_chunk=20e-3, token_the_first_32=1e-3, token_the_next_96=0.5e-3, token_later_ones=0.2e-3,
    chunk=2e-3, pair_in_a_chunk=2e-7,
)  # fmt: skip


def test_seconds_by_hand():
    known = costs.StepCosts(KNOWN)
    assert known.of(Work(1, 100)) == pytest.approx(10e-3 + 0.1e-3 + 1e-4)
    assert known.of(Work(2, 0)) == pytest.approx(10e-3 + 0.2e-3)
    assert known.of(Work(3, 0)) == pytest.approx(10e-3 + 2e-3 + 0.3e-3)
    assert known.of(Work(5, 0)) == pytest.approx(10e-3 + 5e-3 + 0.5e-3)
    assert known.of(Work(0, 0, 1, 20)) == pytest.approx(20e-3 + 20e-3 + 2e-3)
    assert known.of(Work(4, 50, 2, 196, 1000)) == pytest.approx(
        20e-3 + 32e-3 + 48e-3 + 72 * 0.2e-3 + 4e-3 + 5e-5 + 2e-4
    )
    rows = [Row(0, 1, 7, True), Row(1, 1, 0, True), Row(2, 3, 4, False)]
    assert known.seconds(rows) == pytest.approx(known.of(Work(2, 9, 1, 3, 18, 7)))


PAUSES = (0.1, 0.04)


def log(count: int, seed: int, noise=lambda rng: 1.0, gap: float = 1e-4) -> list[StepRecord]:
    """Steps that cost what KNOWN and PAUSES say, times some noise; every tenth is the last one before a pause."""
    rng, known, made, start, pause = random.Random(seed), costs.StepCosts(KNOWN, 0.0, PAUSES), [], 0.0, 0.0
    for step in range(count):
        rows = [Row(i, 1, rng.randrange(500), True) for i in range(rng.randrange(1, 9))]
        if rng.random() < 0.5:
            rows += [
                Row(99 + i, rng.randrange(2, 200), rng.randrange(300), True) for i in range(rng.randint(1, 2))
            ]
        seconds = (known.seconds(rows) + known.after(pause)) * noise(rng)
        last = {row.request: "length" for row in rows} if step % 10 == 9 else {}
        made.append(StepRecord(step, start, {"model": seconds}, rows, [], len(rows), 0, 0, 0, finished=last))
        pause = rng.choice([0.2, 0.7, 2.0, 3.0, 9.0]) if last else 0.0
        start += seconds + (pause or gap)
    return made


def test_a_fit_finds_the_costs_again():
    found = costs.StepCosts.fit(log(400, 0), log(50, 5))
    assert found.between == pytest.approx(1e-4) and found.pauses == pytest.approx(PAUSES)
    assert max(map(abs, found.errors(log(200, 1)))) < 1e-6


def test_a_pause():
    """0.1 s for its first second, 0.04 s for each of the next three; what a log begins with says nothing of it."""
    known, steps = costs.StepCosts(KNOWN, 0.0, PAUSES), log(40, 0)
    assert [known.after(pause) for pause in (0.0, 0.5, 1.0, 2.5, 100.0)] == pytest.approx(
        [0, 0.05, 0.1, 0.16, 0.22]
    )
    pauses = [pause for _, pause in costs.with_pauses(steps)]
    assert len(pauses) == 40 and [i for i, pause in enumerate(pauses) if pause] == [10, 20, 30]
    steps[0].seconds["model"] *= 50
    assert costs.StepCosts.fit(log(400, 0), steps).pauses == pytest.approx(PAUSES)


def test_who_comes_after_a_pause_waits_longer():
    """2 s idle before the first step, 7 s before the second request's: 0.2 + 0.7 s more, each for one step."""

    class Sleepy(Second):
        def after(self, pause):
            return pause / 10

    one, two = engine.simulate([Arrival(2.0, 3, 2), Arrival(11.2, 3, 2)], Sleepy(), scheduler)
    assert one.tokens == pytest.approx([3.2, 4.2]) and two.tokens == pytest.approx([12.9, 13.9])


def test_a_fit_is_not_led_astray_by_steps_that_others_delayed():
    """One step in 20 takes three times as long: 10 % more time in all, which is the mean; no single cost is bent."""
    delayed = log(1000, 0, lambda rng: 3.0 if rng.random() < 0.05 else rng.uniform(0.97, 1.03))
    found = costs.StepCosts.fit(delayed)
    errors = np.array(found.errors(log(200, 1)))
    assert abs(errors.mean() - 0.10) < 0.03 and errors.std() < 0.02
    total = sum(expected for _, expected in found.expected(delayed)[1:])
    assert total == pytest.approx(sum(record.total for record in delayed[1:]))


def test_no_cost_is_negative_and_none_is_invented():
    found = costs.StepCosts.fit(log(400, 2, lambda rng: rng.uniform(0.8, 1.25)))
    assert min(found.coefficients) >= 0 and found.between >= 0
    assert found.of(Work(1, 10)) < found.of(Work(8, 80)) <= found.of(Work(60, 600))


def test_a_machine_that_is_slower_today():
    known = costs.StepCosts(KNOWN, 1e-4, PAUSES)
    slow = log(50, 3, lambda rng: rng.uniform(1.2, 1.4))
    slow[7].seconds["model"] = 60.0  # a hiccup
    pace = known.pace(slow)
    assert 1.25 < pace < 1.35 and known.times(pace).pace(slow) == pytest.approx(1)
    assert known.times(2.0).of(Work(1, 5)) == pytest.approx(2 * known.of(Work(1, 5)))
    assert known.times(2.0).between == 2e-4 and known.times(2.0).pauses == (0.2, 0.08)


def test_a_log_too_short_to_learn_from():
    with pytest.raises(ValueError, match="2 steps cannot tell 19 costs apart: run at least 38 steps"):
        costs.StepCosts.fit(log(3, 0))


def test_the_table_names_what_costs():
    text = costs.StepCosts(KNOWN, 1e-5, (0.0, 0.03)).table()
    assert "step with a chunk" in text and "20,000.000 µs" in text and "between two steps" in text
    assert "position read by a chunk" not in text and "before it, the first" not in text
    assert "before it, the next three" in text and "30,000.000 µs" in text


def test_nonnegative_least_squares():
    """Against all subsets of columns: the best one whose solution is not negative."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        A = rng.random((12, 5))
        y = A @ rng.normal(size=5)
        best = np.linalg.norm(y)
        for chosen in range(1, 32):
            columns = [j for j in range(5) if chosen >> j & 1]
            x = np.linalg.lstsq(A[:, columns], y, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, np.linalg.norm(A[:, columns] @ x - y))
        found = costs.nonnegative_least_squares(A, y)
        assert (found >= 0).all() and np.linalg.norm(A @ found - y) == pytest.approx(best)
    assert costs.nonnegative_least_squares(np.array([[1.0, 0.0]] * 3), np.ones(3)).tolist() == [
        pytest.approx(1),
        0,
    ]


# ---------------------------------------------------------------- a fleet
def replicas(its_costs=None, **options):
    return lambda start: engine.SimulatedEngine(its_costs or Second(), scheduler(**options), start=start)


def test_a_fleet_of_one_is_an_engine():
    for seed in range(4):
        timelines, rounds = fleet.simulate_fleet(day(seed), replicas(Tokens()))
        assert timelines == engine.simulate(day(seed), Tokens(), scheduler) and rounds == []


def test_two_share_the_work():
    """One seat each: the third waits for who is free first, and the router sees at 2.5 who that is."""
    arrivals = [Arrival(0, 2, 5), Arrival(0.5, 2, 2), Arrival(2.5, 2, 1)]
    timelines, _ = fleet.simulate_fleet(arrivals, replicas(seats=1), 2, policy=LeastOutstanding())
    assert [t.tokens for t in timelines] == [[1, 2, 3, 4, 5], [1.5, 2.5], [3.5]]
    timelines, _ = fleet.simulate_fleet(arrivals, replicas(seats=1), 2, policy=RoundRobin())
    assert timelines[2].tokens == [6]


def test_a_router_that_knows_prefixes_finds_them_again():
    arrivals = shared_prefix_groups(poisson(0.05, 2000, uniform((1, 8), (1, 4)), 0), 8, 64, seed=0)
    hits = {}
    for name in ("round_robin", "prefix_aware"):
        make = replicas(Second(), num_pages=100, budget=32)
        timelines, _ = fleet.simulate_fleet(arrivals, make, 4, policy=POLICIES[name]())
        hits[name] = sum(t.cached_tokens for t in timelines)
    assert hits["prefix_aware"] > 1.2 * hits["round_robin"]


def test_a_cold_start_and_a_way_out():
    """A crowd asks for a second replica at 1; it serves from 11 on. Later one idles, and leaves."""
    config = AutoscalingConfig(
        max_replicas=2,
        target_ongoing_requests=2,
        look_back_period_s=0,
        upscale_delay_s=0,
        downscale_delay_s=5,
    )
    arrivals = [Arrival(0.5 + i / 100, 2, 5) for i in range(4)] + [Arrival(10.5, 2, 1), Arrival(11.5, 2, 1)]
    arrivals += [Arrival(26.5, 2, 20), Arrival(40, 2, 1)]
    timelines, rounds = fleet.simulate_fleet(
        arrivals, replicas(seats=1), scaler=Autoscaler(config), cold_start=10.0, interval=1.0
    )
    at = {r.time: r for r in rounds}
    assert (at[0].running, at[0].starting, at[0].target) == (1, 0, 1)
    assert (at[1].ongoing, at[1].target) == (4, 2) and (at[2].running, at[2].starting) == (1, 1)
    assert (at[10].running, at[10].starting) == (1, 1) and (at[11].running, at[11].starting) == (2, 0)
    assert [round(t.ttft, 2) for t in timelines[4:6]] == [11.0, 1.0]  # before and after it was ready
    downs = [r.time for r in rounds if r.target < r.running]
    assert downs == [26.0] and (at[26].running, at[27].running, at[27].leaving) == (2, 1, 0)
    assert all(t.ok for t in timelines) and timelines[7].ttft == 7.5  # behind the one that ends at 46.5


def scaler(**settings) -> Autoscaler:
    usual = dict(
        max_replicas=2, target_ongoing_requests=2, look_back_period_s=0, upscale_delay_s=0, hysteresis=0
    )
    return Autoscaler(AutoscalingConfig(**usual | settings))


def test_who_leaves_finishes_what_it_has():
    """One replica holds the first and the third, the other the second: when the first ends, one of two has to go."""
    arrivals = [Arrival(0.5, 2, 10), Arrival(0.6, 2, 12), Arrival(0.7, 2, 14), Arrival(20, 2, 1)]
    timelines, rounds = fleet.simulate_fleet(arrivals, replicas(), 2, scaler=scaler(downscale_delay_s=1))
    assert [len(t.tokens) for t in timelines] == [10, 12, 14, 1] and all(t.ok for t in timelines)
    assert [(r.running, r.leaving) for r in rounds if 10 <= r.time] == [
        *[(2, 0)] * 3, *[(1, 1)] * 3, *[(1, 0)] * 5,
    ]  # fmt: skip


def test_a_replica_that_starts_counts_as_one():
    """The crowd is served before the second one is there. It is called off, but only after the delay."""
    arrivals = [*(Arrival(0.5 + i / 100, 2, 1) for i in range(4)), Arrival(12, 2, 1)]
    its = scaler(downscale_delay_s=5)
    _, rounds = fleet.simulate_fleet(arrivals, replicas(seats=1), scaler=its, cold_start=30.0)
    assert [r.starting for r in rounds] == [0, 0, *[1] * 7, *[0] * 4]


def test_where_nobody_serves_all_are_refused():
    timelines, _ = fleet.simulate_fleet([Arrival(0, 2, 1), Arrival(1, 2, 1)], replicas(), 0)
    assert [(t.reason, t.finished) for t in timelines] == [("refused", 0), ("refused", 1)]


# ---------------------------------------------------------------- these tests can fail
WRONG = [
    (engine, "[number + 1] *", "[1] *", "a_shared_prefix_is_computed_once"),
    (engine, "-2 - (arrival.prefix or 0)", "-2", "a_shared_prefix_is_computed_once"),
    (engine, "self.flight.ends[-1] if self.flight else now", "now", "who_comes_during_a_step"),
    (engine, "self.now = max(self.now, now)", "self.now = now", "who_comes_during_a_step"),
    (engine, "self.now = max(self.now, now)", "pass", "one_request"),
    (engine, "priority=arrival.priority, **moved", "**moved", "the_urgent_first"),
    (engine, "arrival.time, prompt_tokens=arrival.prompt_tokens, priority=arrival.priority",
     "arrival.time, prompt_tokens=arrival.prompt_tokens", "the_urgent_first"),
    (engine, 'timeline.ended(now, "refused")', "pass", "a_full_queue_refuses"),
    (engine, "dict(made=(MADE_UP,), kv=Moved(len(prompt)))", "dict(made=(MADE_UP,))", "computed_elsewhere"),
    (engine, "dict(made=(MADE_UP,), kv=Moved(len(prompt)))", "dict(kv=Moved(len(prompt)))", "computed_elsewhere"),
    (engine, "if timeline.started is None:", "if True:", "a_long_prompt_is_begun"),
    (engine, "if timeline.first is None:", "if True:", "one_request"),
    (engine, "if self.flight.ends[-1] > until:", "if self.flight.ends[-1] >= until:", "two_share"),
    (engine, "if self.now >= until or", "if self.now > until or", "in_the_next_one"),
    (engine, "self.now = ends[-1] + self.costs.between", "self.now = ends[-1]", "between_steps"),
    (engine, "start, seen = ends[-1] + self.costs.between,", "start, seen = ends[-1],", "equal_steps"),
    (engine, "seen + rows\n", "seen\n", "equal_steps"),
    (engine, "seen, start, ends = sum(len(r.tokens) for r in running)",
     "seen, start, ends = sum(r.computed for r in running)", "equal_steps"),
    (engine, "scheduler.steps += ahead", "pass", "equal_steps"),
    (engine, "request.ahead, request.draft = 0, draft", "request.draft = draft", "equal_steps"),
    (engine, "while len(ends) < most and start < until:", "while len(ends) < most:", "equal_steps"),
    (engine, "(scheduler.waiting and rows < scheduler.max_running)", "False", "equal_steps"),
    (engine, "if rows * (most // pages.page_size + 2) > pages.available:", "if False:", "equal_steps"),
    (engine, "most < 2 or any(len(r.tokens) - r.computed != 1 for r in running)", "most < 2", "equal_steps"),
    (engine, "min(r.most - len(r.tokens) for r in running)", "10**9", "equal_steps"),
    (engine, "if request.computed + num_tokens >= len(request.tokens):", "if True:", "a_long_prompt_beside"),
    (engine, "timeline.tokens += ends", "timeline.tokens += ends[-1:]", "equal_steps"),
    (engine, "timeline.cached_tokens += request.cached_tokens", "pass", "a_shared_prefix_is_computed_once"),
    (engine, "timeline.preemptions += request.preemptions", "pass", "who_gives_way"),
    (engine, "if b.time < a.time:", "if False:", "out_of_order"),
    (engine, "disable=not progress", "disable=True", "a_progress_bar"),
    (engine, "[] if self.stepwise else self._equal_steps(until)", "[]", "taken_at_once"),
    (costs, "if n == 1:", "if False:", "what_a_step_holds"),
    (costs, "seen += computed + 1", "seen += computed", "what_a_step_holds"),
    (costs, "n * computed + n * (n + 1) // 2", "n * computed + n * n", "what_a_step_holds"),
    (costs, "read += computed + n", "read += n", "what_a_step_holds"),
    (costs, "w.singles > rows for rows", "w.singles >= rows for rows", "seconds_by_hand"),
    (costs, "min(max(T - 32, 0), 96)", "max(T - 32, 0)", "seconds_by_hand"),
    (costs, "T = w.singles + w.tokens", "T = w.tokens", "seconds_by_hand"),
    (costs, "2 * max(np.median(errors), 1e-9)", "1e9", "others_delayed"),
    (costs, "found *= seconds.sum() / expected.sum()", "pass", "others_delayed"),
    (engine, " + self.costs.after(start - self.idle_since)", "", "after_a_pause"),
    (engine, "        self.idle_since = self.now\n", "", "after_a_pause"),
    (costs, "min(max(pause - 1.0, 0.0), 3.0)", "max(pause - 1.0, 0.0)", "a_pause"),
    (costs, "0.0 if went_on(a) else b.start - a.start - a.total", "b.start - a.start - a.total", "a_pause"),
    (costs, "in with_pauses(log)[1:]]", "in with_pauses(log)]", "a_pause"),
    (costs, "pace * self.between, longer(self.pauses)", "pace * self.between, self.pauses", "slower_today"),
    (costs, "for log in logs for a, b in pairwise(log) if went_on(a)",
     "for log in logs for a, b in pairwise(log)][-1:] + [9.0 for a in logs[0]",
     "finds_the_costs_again"),
    (costs, "return record.running + len(record.waiting) + record.behind > len(record.finished)", "return False",
     "finds_the_costs_again"),
    (costs, "below = free & (best <= 0)", "below = free & False", "nonnegative_least"),
    (costs, "if slope.max() <= 1e-10", "if slope.max() <= 1e10", "nonnegative_least"),
    (costs, "median(record.total / expected", "median(expected", "slower_today"),
    (costs, "pace * self.between,", "self.between,", "slower_today"),
    (costs, "if len(steps) < 2 * wanted:", "if False:", "too_short"),
    (fleet, "healthy = member.engine.ongoing, member.ready <= now", "healthy = 0, member.ready <= now",
     "two_share"),
    (fleet, "healthy = member.engine.ongoing, member.ready <= now", "healthy = member.engine.ongoing, True",
     "a_cold_start"),
    (fleet, "            member.engine.run(now)\n", "", "two_share"),
    (fleet, "self.start(now + self.cold_start)", "self.start(now)", "a_cold_start"),
    (fleet, "member.known.draining = True", "pass", "a_cold_start"),
    (fleet, "m.known.draining and not m.engine.ongoing", "m.known.draining", "who_leaves"),
    (fleet, "running, len(staying) - running)\n        leaving", "running, 0)\n        leaving",
     "a_replica_that_starts"),
    (fleet, 'refused.ended(arrival.time, "refused")', "pass", "nobody_serves"),
    (fleet, "prompt_of(arrival, self.arrived)", "()", "a_router_that_knows"),
    (fleet, "fleet.look(inf)", "pass", "a_fleet_of_one"),
]  # fmt: skip


@pytest.mark.parametrize("module, right, wrong, case", WRONG, ids=[f"{w[3]}: {w[1][:40]}" for w in WRONG])
def test_a_wrong_simulator_is_noticed(monkeypatch, module, right, wrong, case):
    broken = wrong_version(module, right, wrong)
    monkeypatch.setitem(globals(), module.__name__.split(".")[-1], broken)
    tests = [test for name, test in globals().items() if name.startswith("test_") and case in name]
    assert tests
    capsys = type("Capture", (), {"readouterr": lambda self: self, "err": ""})()
    with pytest.raises((Exception, pytest.fail.Exception)) as noticed:
        for test in tests:
            names = test.__code__.co_varnames[: test.__code__.co_argcount]
            for i in range(len(WORLDS)) if "world" in names else [None]:
                given = {"world": i, "capsys": capsys}
                test(**{name: given[name] for name in names})
    assert not isinstance(noticed.value, (SyntaxError, NameError, TypeError))
