"""A step that is scheduled while the one before it runs: the same answers, one step later, and nothing of it shows.

Ahead       a day of paged_world, in which every step lands after the next one is on its way
the engine  the same random day with and without `overlap`, on every kind of step: tokens, texts, endings, logprobs
"""

import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import paged_world
import pytest
import torch
from test_engine import FREE, PROMPTS, alone, engine, model, run, tokenizer  # noqa: F401  fixtures

from minserve.engine import LLM
from minserve.request import UNKNOWN, SamplingParams, Status
from minserve.weights import load

KINDS = ["plain", "fused", "graph"]
QUICK, MORE = range(12), range(12, 60)


# ---------------------------------------------------------------- the scheduler, one step ahead
class Ahead(paged_world.World):
    """A World whose steps land one turn late."""

    flight = None
    zombies = stopped_in_flight = gave_way_in_flight = 0

    def step(self, aborts=()):
        self.clock += 1
        plan = self.scheduler.schedule()
        self.plan = [(r.id, n) for r, n in plan]
        self._check_plan(plan)
        self.check(step_runs=True)
        fresh = [r for r, _ in plan if not r.dirty]
        assert all(UNKNOWN not in r.tokens for r in fresh), "a token that nobody knows goes to the device"
        answers = self.oracle(plan)
        self.computed += sum(n for _, n in plan)
        before = [(r.computed, len(r.tokens)) for r, _ in plan]
        ends = self.scheduler.advance(plan)
        for (r, n), end, (computed, known) in zip(plan, ends, before):
            assert r.computed == end == computed + n and len(r.tokens) == known + (end == known)
        landing, self.flight = self.flight, (plan, ends, answers) if plan else None
        for request in aborts:
            self.abort(request)
        finished = self._land(landing) if landing else []
        self.check()
        promised = {r.id for (r, _), end in zip(plan, ends) if r.tokens[end:] == [UNKNOWN]}
        for r in self.requests:
            assert (UNKNOWN in r.tokens) == (r.id in promised), (
                f"request {r.id} waits for a token without end"
            )
        return finished

    def _land(self, flight):
        plan, ends, answers = flight
        expected = []
        for (r, _), end, token in zip(plan, ends, answers):
            known, reason = list(r.tokens), None
            self.zombies += r.status is Status.FINISHED
            if r.status is not Status.FINISHED and known[end] == UNKNOWN:
                self.gave_way_in_flight += r.status is Status.WAITING
                if token in r.stop_ids and end - len(r.prompt) >= r.params.min_tokens:
                    self.stopped_in_flight += len(known) > end + 1
                    known, reason = known[:end], "stop"
                else:
                    known[end] = token
                    reason = "length" if end + 1 == len(r.prompt) + r.max_new_tokens else None
            expected.append((known, reason or r.finish_reason))
        finished = self.scheduler.settle(plan, ends, [[token] for token in answers])
        for (r, _), (known, reason) in zip(plan, expected):
            assert r.tokens == known and r.finish_reason == reason, f"request {r.id}"
        assert all(r.status is Status.FINISHED for r in finished)
        return finished

    def _check_plan(self, plan) -> None:
        s, pool, S = self.scheduler, self.pool, self.pool.page_size
        assert sum(n for _, n in plan) <= s.token_budget and len({r.id for r, _ in plan}) == len(plan)
        assert plan or self.flight or not s.has_work, "stuck with work to do"
        for r, n in plan:
            assert r.status is Status.RUNNING and 0 < n <= r.owed
            assert r.computed + n <= r.most_tokens, f"request {r.id} computes its last token"
            for i in range(r.computed // S, -(-(r.computed + n) // S)):
                assert pool.references[r.pages[i]] == 1 and pool.nodes[r.pages[i]] is None, "not its own page"


def day_ahead(seed: int) -> Ahead:
    with mock.patch.object(paged_world, "World", Ahead):
        return paged_world.day(seed)


@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE), 109]
)
def test_days_one_step_ahead(seed):
    """In 109 a small pool would run short for ever, were a window's pages returned when the step has arrived."""
    day_ahead(seed)


@pytest.mark.slow
def test_those_days_are_not_quiet():
    seen = Counter()
    for seed in range(60):
        world = day_ahead(seed)
        for what in ("zombies", "stopped_in_flight", "gave_way_in_flight"):
            seen[what] += getattr(world, what)
    assert min(seen.values()) >= 5, f"too quiet: {seen}"


# ---------------------------------------------------------------- the engine: a random day, twice
@pytest.fixture(scope="module")
def models(checkpoints):
    return {family: load(checkpoints(family)) for family in ("llama-3", "mistral")}


def orders(rng: random.Random, tokenizer) -> list:  # noqa: F811
    """(the step at which it comes, prompt, parameters, how it comes, when it is aborted) for each request."""
    system = [rng.randrange(251) for _ in range(20)]
    made = []
    for i in range(9):
        prompt = system[: rng.choice([0, 0, 17, 20])] + [
            rng.randrange(251) for _ in range(rng.choice([1, 3, 9, 30]))
        ]
        new = rng.randint(1, 14)
        draws = rng.choice([{}, {}, dict(temperature=1.3), dict(temperature=0.9, top_k=9, top_p=0.8)])
        wants = rng.choice(
            [
                {},
                {},
                dict(presence_penalty=1.0, repetition_penalty=1.2),
                dict(logprobs=2),
                dict(logit_bias={5: 3.0}),
            ]
        )
        stops = rng.choice(
            [
                {},
                dict(stop_token_ids=rng.sample(range(251), 40)),
                dict(stop=[tokenizer.decode([t])[rng.randrange(2) :] for t in rng.sample(range(251), 4)]),
            ]
        )
        params = SamplingParams(
            max_tokens=new,
            seed=i,
            ignore_eos=True,
            n=rng.choice([1, 1, 3]),
            min_tokens=rng.choice([0, 0, rng.randint(0, new)]),
            **draws,
            **wants,
            **stops,
        )
        comes = dict(priority=rng.choice([0, 0, 1, -1]), timeout=rng.choice([None] * 6 + [4.5]))
        made.append((rng.randrange(16), prompt, params, comes, rng.choice([None] * 5 + [rng.randrange(20)])))
    return made


def live_through(e, orders, rng_seed: int) -> tuple[list, Counter]:
    """The outputs of a day at this engine. Its clock ticks once a step."""
    rng, outputs, events = random.Random(rng_seed), [[] for _ in orders], Counter()
    grow, land, now, texts = e.pages.grow, e._land, itertools.count(), {}

    def tight(request, num_tokens):
        """A pool that is short of pages now and then."""
        if request.status is Status.RUNNING and len(e.scheduler.running) > 1 and rng.random() < 0.06:
            return False
        return grow(request, num_tokens)

    def landing(flight, marks):
        """Some are aborted after a step was sent off and before the one before it has landed."""
        for i, (_, _, _, _, gone) in enumerate(orders):
            if gone == e.scheduler.steps and gone % 2:
                e.abort(outputs[i])
        return land(flight, marks)

    e.pages.grow, e._land = tight, landing
    ticks = SimpleNamespace(monotonic=lambda: 1.0 * e.scheduler.steps)
    with mock.patch.dict(type(e).step.__globals__, time=ticks):
        while any(not made for made in outputs) or e.outputs or e.flight:
            for i, (when, prompt, params, comes, gone) in enumerate(orders):
                if not outputs[i] and when <= next(now) / len(orders):
                    outputs[i] = e.add(prompt, params, **comes)
                if outputs[i] and gone is not None and gone == e.scheduler.steps and not gone % 2:
                    e.abort(outputs[i])
            for output, text in e.step():
                assert texts.get(output) is not None or output not in texts, "heard of after its end"
                texts[output] = texts.get(output, "") + text
                if output.finished:
                    assert texts[output] == output.text
                    texts[output] = None
            for output in itertools.chain(*outputs):
                assert UNKNOWN not in output.tokens
            e.pages.check(e.scheduler.running)
            events["ahead"] += e.flight is not None and bool(e.scheduler.running)
    assert e.pages.in_use == 0 and not e.scheduler.has_work
    assert len(e.scheduler.seats) == e.scheduler.max_running
    events["preemptions"] = e.scheduler.preemptions
    return list(itertools.chain(*outputs)), events


def account(e, outputs) -> int:
    """Every token that was made is in the log; and so are those that came after an end, which are counted."""
    drawn = Counter(row.request for record in e.log for row in record.rows if row.sampled)
    ended = Counter(i for record in e.log for i in record.finished)
    beyond = 0
    for o in outputs:
        more = drawn[o.request.id] - len(o.tokens)
        if o.finish_reason == "length":
            assert more == 0, "one token too many was computed"
        beyond += more
        assert 0 <= more <= 2 + o.request.preemptions and ended[o.request.id] <= 1
    return beyond


def assert_alike(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        if {"abort", "timeout"} & {a.finish_reason, b.finish_reason}:  # one has come further than the other
            n = min(len(a.tokens), len(b.tokens))
            assert a.tokens[:n] == b.tokens[:n]
            continue
        assert a.error is None and (a.tokens, a.finish_reason, a.text) == (b.tokens, b.finish_reason, b.text)
        assert [x.token for x in a.logprobs] == [x.token for x in b.logprobs]
        for x, y in zip(a.logprobs, b.logprobs):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-3) and len(x.top) == len(y.top)


LIMITS = [
    dict(num_pages=60, page_size=4, token_budget=16, max_running=5, chunk=7),
    dict(num_pages=24, page_size=8, token_budget=64, max_running=8),
    dict(num_pages=40, page_size=4, token_budget=9, max_running=3, prefix_caching=False),
]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
@pytest.mark.parametrize("family", ["llama-3", "mistral"])
def test_a_day_with_overlap_gives_what_a_day_without_gives(models, tokenizer, family, seed):  # noqa: F811
    check_day(models, tokenizer, seed, family)


def check_day(models, tokenizer, seed, family="llama-3"):  # noqa: F811
    rng = random.Random(seed)
    day, limits = orders(rng, tokenizer), LIMITS[seed % 3]
    sinks = dict(sinks=2) if family == "mistral" and seed % 2 else {}
    one = lambda kind, overlap: engine(
        models[family], tokenizer, step=kind, overlap=overlap, **limits, **sinks
    )
    settled = one("plain", False)
    expected, _ = live_through(settled, day, seed)
    assert account(settled, [o for o in expected if o.finish_reason == "length"]) == 0
    for kind in KINDS:
        e = one(kind, True)
        got, events = live_through(e, day, seed)
        assert events["ahead"] > 10
        assert_alike(got, expected)
        account(e, got)


@pytest.mark.slow
def test_those_days_are_lived_in(models, tokenizer):  # noqa: F811
    """What they are about does happen: all kinds of endings, requests that give way, tokens behind an end."""
    seen = Counter()
    for seed in range(6):
        e = engine(models["llama-3"], tokenizer, step="plain", overlap=True, **LIMITS[seed % 3])
        outputs, events = live_through(e, orders(random.Random(seed), tokenizer), seed)
        seen.update(o.finish_reason for o in outputs)
        seen["preemptions"] += events["preemptions"]
        seen["beyond"] += account(e, outputs)
        seen["hits"] += e.scheduler.hit_tokens
    assert (
        min(seen[what] for what in ("stop", "length", "abort", "timeout", "preemptions", "beyond", "hits"))
        > 2
    )


# ---------------------------------------------------------------- order
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_lands_after_the_next_one_is_on_its_way(models, kind):
    e, order = engine(models["llama-3"], step=kind, overlap=True), []
    launch, land = e._launch, e._land

    def launching(plan, record, marks):
        flight = launch(plan, record, marks)
        if flight:
            order.append(("launch", record.step))
            flights[id(flight)] = record.step
        return flight

    def landing(flight, marks):
        if flight:
            order.append(("land", flights[id(flight)]))
        return land(flight, marks)

    flights, e._launch, e._land = {}, launching, landing
    (output,) = e.add(PROMPTS[0], FREE)
    made = []
    while e.outputs and len(made) < 40:
        e.step()
        made.append(len(output.tokens))
    assert made == list(range(13))  # nothing in the first turn; then one in each
    launches = [("launch", k) for k in range(1, 13)]
    lands = [("land", k) for k in range(1, 13)]
    assert order == [launches[0], *itertools.chain(*zip(launches[1:], lands)), lands[-1]]
    assert e.flight is None and output.tokens == alone(e.model, PROMPTS[0])


def test_without_overlap_a_step_lands_at_once(models):
    e = engine(models["llama-3"], overlap=False)
    (output,) = e.add(PROMPTS[0], FREE)
    for k in range(1, 13):
        e.step()
        assert e.flight is None and len(output.tokens) == k


def test_the_last_token_allowed_is_nobodys_input(models):
    """That a request ends by length is known before its token is: no step computes behind it."""
    e = engine(models["llama-3"], overlap=True)
    (output,) = e.add([7, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    for _ in range(5):
        e.step()
    assert [record.num_tokens for record in e.log] == [2, 1, 1, 0] and output.finish_reason == "length"


def test_tokens_are_waited_for_by_an_event_of_their_own():
    """ToHost on a GPU: copied to pinned memory without waiting, an event behind the copy, waited for when read."""
    batch, order = sys.modules["minserve.batch"], []

    class Event:
        def record(self):
            order.append("record")

        def synchronize(self):
            order.append("synchronize")
            pinned[:] = [4, 5]  # now they are there

    class Pinned(list):
        def copy_(self, tokens, non_blocking=False):
            order.append("copy" if non_blocking else "copy and wait")

        def tolist(self):
            order.append("read")
            return list(self)

    pinned = Pinned([0, 0])
    made = lambda shape, dtype, pin_memory: order.append("pinned" if pin_memory else "pageable") or pinned
    fake = SimpleNamespace(empty=made, cuda=SimpleNamespace(Event=Event))
    with mock.patch.object(batch, "torch", fake):
        tokens = batch.ToHost(SimpleNamespace(is_cuda=True, shape=(2,), dtype=torch.int64))
        assert order == ["pinned", "copy", "record"]
        assert tokens.tolist() == [4, 5] and order[3:] == ["synchronize", "read"]


# ---------------------------------------------------------------- trouble in flight
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how, said", [("raise", "injected"), ("nan", "logits hold NaN")])
@pytest.mark.parametrize("chunk", [4, 32])
def test_one_failing_request_fails_alone(models, checkpoints, tokenizer, kind, how, said, chunk):  # noqa: F811
    its = models["llama-3"]
    answers = [alone(its, p) for p in PROMPTS]
    assert not any(77 in a for a in answers)
    if how == "nan":
        its = load(checkpoints("llama-3"))
        its.embed_tokens.weight[77] = torch.nan
    e = engine(its, tokenizer, chunk=chunk, step=kind, overlap=True)
    compute = e.compute

    def fails(batch):
        if how == "raise" and (batch.ids == 77).any():
            raise RuntimeError("injected")
        return compute(batch)

    e.compute = fails
    good = [e.add(p, FREE)[0] for p in PROMPTS]
    e.step()
    (bad,) = e.add([3, 3, 3, 3, 3, 77], FREE)
    run(e)
    assert bad.finish_reason == "error" and said in str(bad.error) and bad.tokens == []
    assert [o.tokens for o in good] == answers and all(o.error is None for o in good)
    assert [o.text for o in good] == [tokenizer.decode(a) for a in answers]


def test_a_request_that_stops_while_the_next_step_fails(model):  # noqa: F811
    """Its last step lands after a launch that failed: it is not run again with the others."""
    answer = alone(model, PROMPTS[0])
    third = answer[2]
    assert third not in answer[:2]
    e = engine(model, step="plain", overlap=True)
    compute, failed = e.compute, []

    def fails(batch):
        if (batch.ids == 77).any():
            failed.append([r.id for r, _ in batch.plan])
            raise RuntimeError("injected")
        return compute(batch)

    e.compute = fails
    stops, goes_on = e.add(PROMPTS[0], replace(FREE, stop_token_ids=[third]))[0], e.add(PROMPTS[3], FREE)[0]
    for _ in range(3):
        e.step()
    (bad,) = e.add([3, 77], FREE)
    e.step()
    assert failed == [[0, 1, 2], [2]]  # all three were in that step
    run(e)
    assert stops.finish_reason == "stop" and stops.tokens == answer[:2] and stops.error is None
    assert bad.finish_reason == "error" and goes_on.tokens == alone(model, PROMPTS[3])


@pytest.mark.parametrize("new", [1, 3, 4, 5, 6])
def test_who_ends_in_a_step_that_fails_hears_of_it_once(model, tokenizer, new):  # noqa: F811
    """Such a turn lands two steps. A reader that ends with the second must not be told so after the first."""
    e = engine(model, tokenizer, step="plain", overlap=True)
    compute = e.compute

    def fails(batch):
        if (batch.ids == 77).any():
            raise RuntimeError("injected")
        return compute(batch)

    e.compute, heard = fails, Counter()
    outputs = [e.add(PROMPTS[0], replace(FREE, max_tokens=n))[0] for n in (new, 9)]
    for turn in range(20):
        if turn == 3:
            outputs += e.add([3, 77], FREE)
        news = e.step()
        assert len({output for output, _ in news}) == len(news), "heard of twice in a turn"
        for output, text in news:
            heard[output] = (heard[output] or "") + text
    answer = alone(model, PROMPTS[0])
    assert [o.finish_reason for o in outputs] == ["length", "length", "error"]
    assert [heard[o] for o in outputs] == [tokenizer.decode(answer[:new]), tokenizer.decode(answer[:9]), ""]


def test_a_token_that_is_none_is_never_looked_up(model):  # noqa: F811
    """Where a row's logits are NaN the next step has been sent off with -1 for its token: no step may fail of that."""
    e = engine(model, step="plain", overlap=True)
    bad, good = (e.add(p, FREE)[0] for p in (PROMPTS[0], PROMPTS[3]))
    compute = e.compute

    def spoils(batch):
        assert (batch.ids >= 0).all()
        logits, drawn, states = compute(batch)
        logits = logits.clone()
        if e.scheduler.steps > 2:
            logits[[r.id for r, _ in batch.plan].index(0)] = torch.nan
        return logits, drawn, states

    e.compute, e._one_by_one = spoils, None
    while e.outputs and e.scheduler.steps < 40:
        e.step()
        if bad.finished:
            e.compute = compute
    assert bad.finish_reason == "error" and bad.tokens == alone(model, PROMPTS[0])[:2]
    assert good.tokens == alone(model, PROMPTS[3])


def test_streamed_text_is_the_text_in_flight(model, tokenizer):  # noqa: F811
    e = engine(model, tokenizer, overlap=True)
    outputs = [e.add(p, replace(FREE, min_tokens=i, stop="zz"))[0] for i, p in enumerate(PROMPTS)]
    heard = dict.fromkeys(outputs, "")
    while e.outputs and e.scheduler.steps < 60:
        for output, text in e.step():
            heard[output] += text
        assert all(UNKNOWN not in o.tokens for o in outputs)
        assert all(tokenizer.decode(o.tokens).startswith(heard[o]) for o in outputs)
    assert [heard[o] for o in outputs] == [tokenizer.decode(alone(model, p)) for p in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_is_none_ends_its_request_where_it_is_drawn(models, checkpoints, kind):
    """NaN in the middle of an answer: the step that was sent off with that token harms nobody."""
    free = alone(models["llama-3"], PROMPTS[0])
    third = next(t for t in free[2:] if t not in free[:2] and t not in PROMPTS[0])
    its = load(checkpoints("llama-3"))
    its.embed_tokens.weight[third] = torch.nan
    others = [p for p in PROMPTS[1:] if third not in alone(models["llama-3"], p) + p]
    e = engine(its, step=kind, overlap=True)
    bad, *good = [e.add(p, FREE)[0] for p in [PROMPTS[0], *others]]
    run(e)
    assert bad.finish_reason == "error" and bad.tokens == free[: free.index(third) + 1] and others
    assert [o.tokens for o in good] == [alone(its, p) for p in others]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", range(5))
def test_close_with_a_step_in_flight(models, kind, after):
    e = engine(models["llama-3"], step=kind, overlap=True)
    outputs = [e.add(p, FREE)[0] for p in PROMPTS]
    for _ in range(after):
        e.step()
    assert (e.flight is not None) == (after > 0)
    e.close()
    assert {o.finish_reason for o in outputs} == {"abort"} and not e.outputs and e.flight is None
    assert e.pages.in_use == 0 and all(UNKNOWN not in o.tokens for o in outputs)
    again = e.add(PROMPTS[0], FREE)[0]
    run(e)
    assert again.tokens == alone(e.model, PROMPTS[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", range(1, 6))
def test_a_seat_given_to_another_in_flight(models, kind, after):
    """Aborted while its step runs; whoever takes its seat and its pages gets its own answer."""
    e = engine(models["llama-3"], step=kind, overlap=True, max_running=1, num_pages=7)
    first = e.add(PROMPTS[2], FREE)[0]
    for _ in range(after):
        e.step()
    second = e.add(PROMPTS[0], FREE)[0]
    e.abort([first])
    run(e)
    assert second.tokens == alone(e.model, PROMPTS[0])
    assert first.tokens == alone(e.model, PROMPTS[2])[: len(first.tokens)]


def test_generate_and_its_progress(models):
    llm = LLM(models["llama-3"], num_pages=60, page_size=8, overlap=True, max_waiting=3, max_running=2)
    heard = Counter()
    results = llm.generate(PROMPTS, FREE, each=lambda output, text: heard.update([output]))
    assert [o.tokens for (o,) in results] == [alone(llm.model, p) for p in PROMPTS]
    assert set(heard.values()) == {12}


def test_the_clock_of_a_record(models):
    """Each turn's phases are there, in order, and fill the turn, with or without something in flight."""
    for overlap in (False, True):
        e = engine(models["llama-3"], overlap=overlap)
        e.add(PROMPTS[0], FREE)
        begin = time.perf_counter()
        run(e)
        spent = time.perf_counter() - begin
        for record in e.log:
            assert list(record.seconds) == ["schedule", "pack", "model", "sample", "commit", "text"]
            assert min(record.seconds.values()) >= 0
        assert 0.3 * spent < sum(record.total for record in e.log) <= spent
