"""How many replicas: known trouble by hand, invariants on random days, bursts replayed, and wrong versions noticed."""

import random

import pytest
from wrong_versions import wrong_version

from minserve.cluster import autoscaler
from minserve.cluster.autoscaler import AutoscalingConfig
from minserve.lab.scaling import NAIVE, STEADY, Bursts, replay

PROMPT = dict(look_back_period_s=0, upscale_delay_s=0, downscale_delay_s=0)  # reacts in every round


def follow(series, module=autoscaler, replicas=1, cold_start=0, **options):
    """Targets round by round, one second apart; what is asked for runs `cold_start` rounds later."""
    scaler = module.Autoscaler(
        module.AutoscalingConfig(**dict(max_replicas=20, target_ongoing_requests=10) | options)
    )
    ready, targets = [0.0] * replicas, []
    for now, ongoing in enumerate(series):
        running = sum(when <= now for when in ready)
        targets.append(scaler.decide(float(now), ongoing, running, len(ready) - running))
        ready = (ready + [now + cold_start] * 99)[: targets[-1]]
    return targets


def changes(targets):
    return [now for now, (a, b) in enumerate(zip(targets, targets[1:]), 1) if a != b]


# ---------------------------------------------------------------- the formula
def test_as_many_as_the_load_asks_for(module=autoscaler):
    for ongoing, target in ((1, 1), (10, 1), (11, 2), (20, 2), (21, 3), (195, 20), (10_000, 20)):
        assert follow([ongoing], module, **PROMPT) == [target], ongoing
    assert follow([35], module, min_replicas=5, **PROMPT) == [5]
    assert follow([0], module, replicas=9, **PROMPT) == [1]


def test_the_mean_of_the_look_back_decides(module=autoscaler):
    options = PROMPT | dict(look_back_period_s=2)
    assert follow([0, 60, 30, 0, 0, 0], module, hysteresis=0, **options) == [1, 3, 3, 3, 1, 1]


def test_factors_go_part_of_the_way_and_still_arrive(module=autoscaler):
    assert follow([90] * 4, module, upscaling_factor=0.5, **PROMPT) == [5, 7, 8, 9]
    assert follow([10] * 6, module, replicas=9, downscaling_factor=0.5, hysteresis=0, **PROMPT) == [
        5,
        3,
        2,
        1,
        1,
        1,
    ]
    assert follow([10] * 5, module, replicas=4, downscaling_factor=0.1, hysteresis=0, **PROMPT) == [
        3,
        2,
        1,
        1,
        1,
    ]
    assert follow([30], module, upscaling_factor=2, **PROMPT) == [5]


# ---------------------------------------------------------------- delays
def test_more_only_if_it_was_wanted_all_the_time(module=autoscaler):
    options = PROMPT | dict(upscale_delay_s=5)
    assert follow([50] * 8, module, **options) == [1] * 5 + [5] * 3
    assert follow([50] * 5 + [5] + [50] * 5, module, **options) == [1] * 11  # one quiet round: anew
    assert follow([50] * 5 + [10] * 3, module, **options) == [1] * 8


def test_fewer_only_if_it_was_wanted_all_the_time(module=autoscaler):
    options = PROMPT | dict(downscale_delay_s=5)
    assert follow([10] * 8, module, replicas=4, hysteresis=0, **options) == [4] * 5 + [1] * 3
    assert follow(([10] * 5 + [40]) * 3, module, replicas=4, **options) == [4] * 18


def test_after_a_change_the_next_has_to_wait_as_well(module=autoscaler):
    targets = follow(range(10, 400, 10), module, max_replicas=99, **PROMPT | dict(upscale_delay_s=6))
    assert (
        all(b - a >= 6 for a, b in zip(changes(targets), changes(targets)[1:])) and len(changes(targets)) >= 4
    )


# ---------------------------------------------------------------- what has gone wrong elsewhere
NOISE = [50, 70, 60, 75, 65, 80, 70]


def test_noise_does_not_flip_the_target(module=autoscaler):
    """Bare, seven rounds of noise change the target five times; one cooldown allows one change."""
    assert len(changes(follow(NOISE, module, replicas=6, hysteresis=0, **PROMPT))) == 6
    delays = dict(look_back_period_s=5, upscale_delay_s=3, downscale_delay_s=20)
    assert len(changes(follow(NOISE, module, replicas=6, **delays))) <= 1
    targets = follow(NOISE * 20, module, replicas=6, **delays)
    assert len(changes(targets)) <= 2 and set(targets[30:]) <= {7, 8}


@pytest.mark.parametrize("at", [20, 60, 190])
def test_a_constant_load_at_the_threshold_settles(at, module=autoscaler):
    """+-1 around what a number of replicas can hold: at most one step up, then nothing for a hundred rounds."""
    rng = random.Random(at)
    for series in ([at + (-1) ** i for i in range(100)], [at + rng.choice((-1, 0, 1)) for i in range(100)]):
        assert len(changes(follow(series, module, replicas=at // 10, **PROMPT))) <= 1
    if at == 20:  # +-1 of one or two is more than any hysteresis: there the look-back helps
        series = [2 + (-1) ** i for i in range(100)]
        assert len(changes(follow(series, module, target_ongoing_requests=2))) <= 1


def test_the_load_that_adds_is_higher_than_the_load_that_takes_away(module=autoscaler):
    for n in range(1, 12):
        up = next(load for load in range(0, 400) if follow([load], module, replicas=n, **PROMPT) > [n])
        down = max(load for load in range(0, 400) if follow([load], module, replicas=n + 1, **PROMPT) <= [n])
        assert down <= 0.9 * n * 10 < n * 10 < up


def test_those_that_start_are_counted(module=autoscaler):
    """A queue that stands still during a cold start is answered once."""
    assert follow([50] * 30, module, cold_start=20, **PROMPT) == [5] * 30
    assert follow([50] * 30, module, cold_start=20, **PROMPT | dict(upscale_delay_s=3)) == [1] * 3 + [5] * 27
    scaler = module.Autoscaler(module.AutoscalingConfig(max_replicas=9, **PROMPT))
    assert scaler.decide(0.0, ongoing=6, running=1, starting=2) == 3


def test_never_to_zero_while_anything_runs_or_waits(module=autoscaler):
    options = PROMPT | dict(min_replicas=0)
    assert follow([1] * 50, module, **options) == [1] * 50
    assert follow([0], module, **options) == [0]
    assert follow([5, 0, 0, 0, 0], module, **options | dict(look_back_period_s=3)) == [1, 1, 1, 1, 0]
    assert follow([1] * 9, module, replicas=3, downscaling_factor=2, **options) == [1] * 9
    assert follow([0] * 9, module, **options | dict(downscale_delay_s=5)) == [1] * 5 + [0] * 4
    assert follow([0, 0, 1], module, replicas=0, min_replicas=0, upscale_delay_s=60) == [0, 0, 1]  # at once


def test_what_waits_drives_up_though_every_seat_is_taken(module=autoscaler):
    """One seat, 40 in the queue: ongoing is 41, where a gauge of those that run says 1."""
    assert follow([41], module, target_ongoing_requests=2, **PROMPT) == [20]
    assert follow([1], module, target_ongoing_requests=2, **PROMPT) == [1]  # what a blind gauge would do


def test_limits_hold_at_once_whatever_the_load(module=autoscaler):
    slow = dict(upscale_delay_s=1e9, downscale_delay_s=1e9)
    assert follow([0, 0], module, replicas=1, min_replicas=3, **slow) == [3, 3]
    assert follow([900, 900], module, replicas=9, max_replicas=4, **slow) == [4, 4]


def test_random_days(module=autoscaler):
    """Within limits always, in both directions only after its delay, and the same rounds give the same decisions."""
    for day in range(60):
        rng = random.Random(day)
        low = rng.choice([0, 1, 2])
        options = dict(
            min_replicas=low,
            max_replicas=low + rng.choice([1, 4, 12]),
            look_back_period_s=rng.choice([0, 3, 10]),
            upscale_delay_s=rng.choice([0, 2, 7]),
            downscale_delay_s=rng.choice([0, 4, 15]),
            upscaling_factor=rng.choice([0.3, 1, 2]),
            downscaling_factor=rng.choice([0.3, 1, 2]),
            hysteresis=rng.choice([0, 0.1, 0.5]),
        )
        series = [max(0, round(rng.gauss(40 * (i // 20 % 3), 15))) for i in range(150)]
        targets = follow(series, module, replicas=max(1, low), cold_start=rng.choice([0, 5]), **options)
        assert targets == follow(series, module, replicas=max(1, low), **options)
        assert all(options["min_replicas"] <= target <= options["max_replicas"] for target in targets)
        assert all(target or not ongoing for target, ongoing in zip(targets, series))
        for a, b in zip(changes(targets), changes(targets)[1:]):
            if targets[b - 1] == 0:
                continue  # from nothing it starts at once
            assert b - a >= options["upscale_delay_s" if targets[b] > targets[b - 1] else "downscale_delay_s"]


def test_what_cannot_be_is_refused():
    for wrong in (
        dict(min_replicas=3, max_replicas=2),
        dict(max_replicas=0, min_replicas=0),
        dict(target_ongoing_requests=0),
        dict(upscaling_factor=-1),
        dict(downscaling_factor=float("nan")),
        dict(look_back_period_s=-1),
        dict(hysteresis=1),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            AutoscalingConfig(**wrong)


def test_ray_serves_names_and_defaults():
    """The fields that Ray Serve has are called as there, and default to the same."""
    ray = pytest.importorskip("ray.serve.config", reason="Ray Serve is an extra")
    theirs = ray.AutoscalingConfig()
    for name in ("min_replicas", "max_replicas", "target_ongoing_requests", "look_back_period_s", "upscale_delay_s",
                 "downscale_delay_s"):  # fmt: skip
        assert getattr(theirs, name) == getattr(AutoscalingConfig(), name), name
    assert (theirs.get_upscaling_factor(), theirs.get_downscaling_factor()) == (1, 1)


# ---------------------------------------------------------------- bursts, replayed
def test_bursts_make_it_oscillate_and_delays_cure_it():
    naive, steady = replay(Bursts(), NAIVE), replay(Bursts(), STEADY)
    assert naive.turns > 60 and steady.turns <= 8 and steady.changes <= 12
    mean = lambda waited: sum(waited) / len(waited)
    assert steady.under < naive.under and mean(steady.waited) < 0.5 * mean(naive.waited)
    assert steady.over > naive.over  # what it costs


def test_counting_only_those_that_run_asks_again_and_again():
    module = wrong_version(
        autoscaler, "replicas = self.config, running + starting", "replicas = self.config, running"
    )
    blind = module.Autoscaler(module.AutoscalingConfig(max_replicas=50, **PROMPT, upscaling_factor=2))
    targets = [blind.decide(float(now), 6, 1, starting) for now, starting in enumerate((0, 4, 8))]
    assert min(targets) > 3  # three would do
    counts = replay(lambda time: 2.0, AutoscalingConfig(max_replicas=50, **PROMPT), seconds=60)
    assert max(r.target for r in counts.rounds) < 50


def test_the_model_of_a_fleet_by_hand():
    """No autoscaling, one replica of one seat: two requests/s of 1 s each; the queue grows by one a second."""
    one = replay(lambda time: 2.0, AutoscalingConfig(), 200, service=1.0, seats=1)
    assert len(one.waited) == pytest.approx(200, abs=2)
    assert one.rounds[-1].ongoing == pytest.approx(200, abs=60)
    assert one.changes == one.over == 0 and set(one.needs) == {1}
    idle = replay(lambda time: 0.0, AutoscalingConfig(min_replicas=3, max_replicas=3), 10)
    assert idle.waited == [] and [r.running for r in idle.rounds] == [3] * 10 and idle.over == 0
    roomy = replay(
        lambda time: 0.5, AutoscalingConfig(min_replicas=1, max_replicas=9), 2000, service=2.0, seats=9
    )
    assert max(roomy.waited) == 0 and sum(r.ongoing for r in roomy.rounds) / 2000 == pytest.approx(
        1.0, rel=0.1
    )


def test_in_the_model_a_replica_serves_after_its_cold_start_and_leaves_when_it_is_done():
    def decide(now, ongoing, running, starting):
        return 3 if 10 <= now < 40 else 1

    run = replay(lambda time: 4.0, AutoscalingConfig(max_replicas=3), 60, decide=decide, cold_start=20.0)
    running = {round(r.time): (r.running, r.starting) for r in run.rounds}
    assert (running[11], running[29], running[31], running[41]) == ((1, 2), (1, 2), (3, 0), (1, 0))
    assert run.changes == 2 and run.turns == 1


WRONG = [
    ("the moment decides", "sum(n for _, n in self._seen) / len(self._seen)", "ongoing",
     "the_mean_of_the_look_back_decides"),
    ("the look-back never ends", "while self._seen[0][0] < now - self.config.look_back_period_s:", "while False:",
     "the_mean_of_the_look_back_decides"),
    ("those that start are not counted", "self.config, running + starting", "self.config, running",
     "those_that_start_are_counted"),
    ("no delay", "now - self._since < delay - EPSILON", "False", "more_only_if_it_was_wanted_all_the_time"),
    ("one delay for both", "config.upscale_delay_s if wish > 0 else config.downscale_delay_s",
     "config.upscale_delay_s", "fewer_only_if_it_was_wanted_all_the_time"),
    ("a break does not count", "if wish != self._wish:", "if wish and wish != self._wish:",
     "more_only_if_it_was_wanted_all_the_time"),
    ("the next change comes at once", "        self._wish = 0  # the next", "        # the next",
     "after_a_change_the_next_has_to_wait_as_well"),
    ("no hysteresis", "desired / (1 - config.hysteresis)", "desired", "a_constant_load_at_the_threshold_settles"),
    ("hysteresis downwards", "desired / (1 - config.hysteresis)", "desired * (1 - config.hysteresis)",
     "the_load_that_adds_is_higher_than_the_load_that_takes_away"),
    ("to zero with one running", "1 if self.mean else 0", "0", "never_to_zero_while_anything_runs_or_waits"),
    ("never to zero", "1 if self.mean else 0", "1", "never_to_zero_while_anything_runs_or_waits"),
    ("from zero only after the delay", "delay = 0.0  #", "pass  #",
     "never_to_zero_while_anything_runs_or_waits"),
    ("no upper limit", "min(max(wanted, least), config.max_replicas)", "max(wanted, least)",
     "as_many_as_the_load_asks_for"),
    ("no lower limit", "max(config.min_replicas, 1 if self", "max(0, 1 if self", "as_many_as_the_load_asks_for"),
    ("rounded down", "wanted = ceil(replicas + config.upscaling_factor", "wanted = int(replicas + "
     "config.upscaling_factor", "as_many_as_the_load_asks_for"),
    ("rounded up twice", "* (desired - replicas) - EPSILON)", "* (desired - replicas) + EPSILON)",
     "factors_go_part_of_the_way_and_still_arrive"),
    ("the upper factor is not used", "config.upscaling_factor * (desired", "1.0 * (desired",
     "factors_go_part_of_the_way_and_still_arrive"),
    ("the lower factor is not used", "config.downscaling_factor * (roomy", "1.0 * (roomy",
     "factors_go_part_of_the_way_and_still_arrive"),
    ("a small factor stands still", "                wanted -= 1", "                pass",
     "factors_go_part_of_the_way_and_still_arrive"),
    ("below the minimum it waits", "if replicas < config.min_replicas:", "if False:",
     "limits_hold_at_once_whatever_the_load"),
    ("above the maximum it waits", "if replicas > config.max_replicas:", "if False:",
     "limits_hold_at_once_whatever_the_load"),
]  # fmt: skip


@pytest.mark.parametrize("what, right, wrong, who", WRONG, ids=[w[0] for w in WRONG])
def test_wrong_autoscalers_are_noticed(what, right, wrong, who):
    module, test = wrong_version(autoscaler, right, wrong), globals()[f"test_{who}"]
    with pytest.raises((AssertionError, StopIteration, ValueError)):
        for at in (20, 60, 190) if "at" in test.__code__.co_varnames[:1] else [None]:
            test(at, module=module) if at else test(module=module)
