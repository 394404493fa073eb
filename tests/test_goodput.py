"""bench goodput serves, promises and searches as it says: on an imagined machine whose clock only its steps move."""

from collections import Counter
from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest
import torch
from wrong_versions import wrong_version

from minserve.__main__ import main
from minserve.arrivals import Arrival, fixed, poisson
from minserve.bench import goodput, goodput_search, goodput_work, served
from minserve.bench.common import Options
from minserve.bench.overhead import Stub
from minserve.config import SHAPES
from minserve.engine import LLM
from minserve.lab.report import Report, Row
from minserve.metrics import SLO, Timeline

TINY = replace(
    SHAPES["smollm2-135m"], vocab_size=251, hidden_size=96, intermediate_size=76, num_layers=3, num_heads=6,
    num_kv_heads=2, head_dim=16, context=512, windows=(),
)  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Clock:
    """Time that passes only in steps and sleeps."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Machine(Stub):
    """A step takes seconds(tokens, rows that draw)."""

    def __init__(self, clock: Clock, seconds=lambda tokens, rows: 1.0):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def __call__(self, ids, positions, attend, rows):
        self.clock.now += self.seconds(len(ids), len(rows))
        return super().__call__(ids, positions, attend, rows)


def imagined(clock: Clock, seconds=lambda tokens, rows: 1.0, **options) -> LLM:
    return LLM(Machine(clock, seconds), page_size=16, num_pages=options.pop("num_pages", 512), **options)


def driven(m, arrivals, give_up=None, **options) -> tuple[LLM, list[Timeline]]:
    clock = Clock()
    engine = imagined(clock, **options)
    also = dict(give_up=give_up) if give_up else {}
    prompts = m.prompts_of(arrivals, 64)
    return engine, m.drive(engine, arrivals, prompts, clock=clock, sleep=clock.sleep, **also)


# ---------------------------------------------------------------- an open loop
def check_drive(m):
    came = [Arrival(0.0, 5, 2), Arrival(0.5, 5, 1, priority=1), Arrival(9.25, 5, 3)]
    engine, (first, second, third) = driven(m, came, max_running=1)
    assert (first.arrival, first.queued, first.started) == (100.0, 100.0, 100.0)
    assert first.tokens == [101.0, 102.0] and first.ttft == 1.0 and first.reason == "length"
    assert second.arrival == 100.5, "due in the middle of a step"
    assert second.queued == 101.0 and second.started == 102.0 and second.tokens == [103.0]
    assert second.priority == 1 and second.prompt_tokens == 5 and second.finished == 103.0
    assert third.arrival == third.started == 109.25 and third.tokens == [110.25, 111.25, 112.25]
    assert not engine.outputs


def check_order(m):
    """Two seats: both are served at once. A smaller number goes first, whoever came first."""
    came = [Arrival(0.0, 5, 3), Arrival(0.0, 5, 3), Arrival(0.1, 5, 1, priority=1), Arrival(0.2, 5, 1)]
    _, its = driven(m, came, max_running=2)
    assert its[0].tokens == its[1].tokens == [101.0, 102.0, 103.0]
    assert its[3].tokens == its[2].tokens == [104.0]
    _, its = driven(m, came, max_running=1)
    assert its[3].tokens < its[2].tokens


def check_refused(m):
    came = [Arrival(0.0, 5, 2), Arrival(0.0, 5, 2), Arrival(0.0, 5, 2), Arrival(3.5, 5, 2)]
    _, its = driven(m, came, max_running=1, max_waiting=1)
    assert [t.reason for t in its] == ["length", "refused", "refused", "length"]
    assert its[1].queued is None and its[1].finished == 100.0 and not its[1].tokens


def check_give_up(m):
    came = [Arrival(0.0, 5, 9), Arrival(0.0, 5, 2), Arrival(50.0, 5, 2)]
    asked = []

    def give_up(timelines, now):
        asked.append(now)
        return now >= 103

    engine, its = driven(m, came, give_up, max_running=2)
    assert asked == [101.0, 102.0, 103.0]
    assert [t.reason for t in its] == ["abort", "length", None]
    assert its[0].finished == 103.0 and len(its[0].tokens) == 3 and not engine.outputs


def check_end(m):
    """A prefix that was seen is cached, and who lost its pages comes to its end all the same."""
    came = [Arrival(0.0, 40, 2, prefix=1, prefix_tokens=32), Arrival(5.0, 40, 2, prefix=1, prefix_tokens=32)]
    _, its = driven(m, came)
    assert [t.cached_tokens for t in its] == [0, 32]
    _, its = driven(m, [Arrival(0.0, 16, 40)] * 2, num_pages=6, max_running=2)
    assert sum(t.preemptions for t in its) >= 1 and all(len(t.tokens) == 40 for t in its)


def check_prompts(m):
    came = [Arrival(0.0, 20, 1, prefix=p, prefix_tokens=16) for p in (0, 1, 0)] + [Arrival(0.0, 20, 1)] * 2
    a, b = m.prompts_of(came, 64, 1), m.prompts_of(came, 64, 2)
    assert a == m.prompts_of(came, 64, 1) and all(len(p) == 20 and 0 <= min(p) <= max(p) < 64 for p in a)
    assert a[0][:16] == a[2][:16] == b[0][:16] != a[1][:16], "a group's prefix, in every run"
    tails = [tuple(p[16:]) for p in a + b]
    assert len(set(tails)) == len(tails) and a[3] != a[4]


def told(arrival: float, tokens: list[float], reason: str | None = "length") -> Timeline:
    return Timeline(arrival, tokens=tokens, reason=reason, finished=reason and max(tokens, default=arrival),
                    prompt_tokens=8)  # fmt: skip


def check_doomed(m):
    promise = goodput_work.Promise(((10, SLO(2.0, 0.5)),))
    fine, late = told(0, [1.0, 2.5, 3.0]), told(0, [1.0, 2.6, 2.7])
    failed, coming = told(0, [1.0], "abort"), told(9.0, [], None)
    waits, runs = told(1.0, [], None), told(1.0, [2.0, 2.1], None)  # due at 3.0; its third token at 4.0
    every = [fine, late, failed, coming, waits, runs]
    assert [m.doomed(every, promise, now) for now in (3.0, 3.1, 4.0, 4.1, 8.9, 11.0, 11.1)] == [
        2, 3, 3, 4, 4, 4, 5,
    ]  # fmt: skip


def check_broken(m):
    """A request that cannot be computed is not slow: nothing is measured."""

    class Broken(Stub):
        def __call__(self, ids, positions, attend, rows):
            raise ValueError("a bug")

    engine, came = LLM(Broken(), page_size=16), [Arrival(0.0, 5, 2)]
    with pytest.raises(RuntimeError, match="request 0 failed, so there is nothing to measure"):
        m.drive(engine, came, m.prompts_of(came, 64))
    with pytest.raises(RuntimeError, match="nothing to measure"):
        m.decode_steps(Broken(), 2)


def check_steps(m):
    seen = []

    class Seen(Stub):
        def __call__(self, ids, positions, attend, rows):
            seen.append(len(ids))
            return super().__call__(ids, positions, attend, rows)

    assert len(m.decode_steps(Seen(), 3, context=20, steps=5)) == 5
    assert seen[0] == 60 and seen[1:] == [3] * 7, "prompts, then two that warm up, then those"


# ---------------------------------------------------------------- who comes, and what is promised
def check_traces(m):
    sizes = m.Sizes(chat=(4, 8), answer=(3, 5), long=96, note=2, system=64, question=(4, 8), reply=(2, 4))
    slow, fast = m.mixed(sizes)(1.0, 48, 5), m.mixed(sizes)(3.0, 48, 5)
    assert [a.time for a in slow] == pytest.approx([3 * a.time for a in fast])
    assert [a.prompt_tokens for a in slow] == [a.prompt_tokens for a in fast] and len(slow) == 48
    where = [i for i, a in enumerate(slow) if a.prompt_tokens == 96]
    assert (
        len(where) == 4
        and len({i % 12 for i in where}) == 1
        and {slow[i].output_tokens for i in where} == {2}
    )
    firsts = {
        next(i for i, a in enumerate(m.mixed(sizes)(1.0, 48, s)) if a.prompt_tokens == 96) for s in range(9)
    }
    assert len(firsts) > 3, "at another place in every seed"
    chats = [a for a in slow if a.prompt_tokens != 96]
    assert {a.prompt_tokens for a in chats} <= set(range(4, 9)) and {a.output_tokens for a in chats} == {
        3,
        4,
        5,
    }
    drawn = [[lengths(rng) for _ in range(12)] for lengths, rng in
             ((m.chats_with(sizes, first), Random(1)) for first in (0, 5))]  # fmt: skip
    assert drawn[0][1:5] == drawn[1][1:5] and drawn[0][0] == drawn[1][5] == (96, 2), "chats stay as they are"
    alike = m.shared(sizes)(2.0, 100, 1)
    assert {a.prefix for a in alike} == {0, 1, 2, 3} and {a.prefix_tokens for a in alike} == {64}
    assert max(a.prompt_tokens for a in alike) == 72 and max(a.output_tokens for a in alike) == 4
    two = Counter(a.priority for a in m.classes(sizes)(2.0, 1000, 1))
    assert set(two) == {0, 1} and 200 < two[0] < 300
    one, other = m.classes(sizes)(2.0, 9, 1), m.classes(sizes)(2.0, 9, 2)
    assert [a.time for a in one] != [a.time for a in other]


def check_promise(m):
    promise = m.Promise.of({100: 0.5, 10: 0.1}, 0.02, (3.0, 2.0))
    assert promise.kinds == ((10, SLO(0.1 * 3.0, 0.04)), (100, SLO(1.5, 0.04)))
    short, long = told(1.0, [1.31]), told(1.0, [1.31])
    long.prompt_tokens = 11
    assert not promise.met(short) and promise.met(long)
    assert promise.deadline(short, 0) == pytest.approx(1.3) and promise.deadline(long, 5) == pytest.approx(
        2.7
    )
    short.prompt_tokens = 10
    assert promise.slo(short).ttft == pytest.approx(0.3)
    said = "first token by 300 ms (prompts to 10), 1,500 ms (prompts to 100); then 40 ms a token"
    assert str(promise) == said


def check_stalls(m):
    alone = {10: 0.1, 100: 1.0}
    promise = m.Promise.of(alone, 0.02, (3.0, 3.0))
    # the stall beyond T1: 1.0 + 0.1 - 0.3 = 0.8; running ones gain 0.04 a token, so 20 tokens, 0.4 s of them
    assert m.stalls(promise, alone, 0.02, 0.1) == pytest.approx(0.1 / (0.1 * 1.2))
    assert m.stalls(promise, alone, 0.02, 0.05, 0.2) == pytest.approx(0.2 / (0.05 * 1.2))
    assert m.stalls(m.Promise.of(alone, 0.02, (11.0, 3.0)), alone, 0.02, 0.1) == inf


# ---------------------------------------------------------------- the search
def check_highest(m):
    for true in range(-6, 20):
        for guess in (-9, 0, true, true + 1, 15):
            asked = []
            passes = lambda k, true=true, asked=asked: asked.append(k) or k <= true
            assert m.highest(passes, guess, -30) == (true, true + 1)
            assert len(asked) <= 2 + 2 * (abs(true - guess) + 1).bit_length() and len(asked) == len(
                set(asked)
            )
            for known in (true, true - 3):
                asked.clear()
                assert m.highest(passes, guess, -30, known) == (true, true + 1) and min(asked) > known
    for guess in (5, 0):
        calls = iter(range(9))
        assert m.highest(lambda k, calls=calls: next(calls) < 0, guess, 0) == (None, 0)
    assert m.highest(lambda k: k <= 2, 5, 2) == (2, 3)
    assert m.highest(lambda k: k <= 9, 5, 0, more=iter([True, False]).__next__) == (6, None)
    assert m.highest(lambda k: k <= 2, 5, 0, more=lambda: False) == (None, 5), "one is asked in any case"
    assert (m.Found(3, 4).exact, m.Found(3, 5).exact, m.Found(None, 2).exact, m.Found(2, None).exact) == (
        True, False, False, False,
    )  # fmt: skip
    assert m.Found(3, 4).rate == m.Found(3, 4).at_most == pytest.approx(m.STEP**3)
    assert m.Found(None, 2).rate == 0 and m.Found(None, 2).at_most == pytest.approx(m.STEP**2)
    assert m.STEP ** m.power(7.3) <= 7.3 < m.STEP ** (m.power(7.3) + 1)
    assert m.STEP ** m.power(0.02) <= 0.02 < m.STEP ** (m.power(0.02) + 1)


def waits(arrivals, service: float) -> list[float]:
    """Lindley: how long each waits for a server that takes one after another."""
    found, free = [], 0.0
    for a in arrivals:
        found.append(max(0.0, free - a.time))
        free = max(free, a.time) + service
    return found


def alone_in_line(rate: float, n: int, seed: int) -> list[Arrival]:
    return poisson(rate, n / rate, fixed(4, 2), seed)


def line(m, requests: int) -> object:
    clock = Clock()
    engine = imagined(clock, max_running=1)  # a step is a second, an answer two tokens: M/D/1, service 2 s
    return m.Side("line", alone_in_line, engine, requests, 1e-9, clock=clock, sleep=clock.sleep)


def check_the_queue(m):
    side = line(m, 60)
    assert side.capacity == pytest.approx(0.5)
    for T1, rate in ((1.0, 0.05), (2.5, 0.2), (4.0, 0.4)):
        promise = goodput_work.Promise(((4, SLO(T1 + 1e-9, 1.0)),))
        right = [wait + 1 <= T1 + 1e-9 for wait in waits(alone_in_line(rate, 60, 3), 2.0)]
        kept, right = side.kept(promise, rate, 3), sum(right) / 60
        assert kept == pytest.approx(right) if right >= 1 - m.LOST else right <= kept < 1 - m.LOST
        assert not side.engine.outputs
    hopeless = goodput_work.Promise(((4, SLO(0.5, 1.0)),))
    before = side.engine.scheduler.steps
    assert 0.6 < side.kept(hopeless, 0.4, 0) < 1 - m.LOST, "stopped when so many are late"
    assert side.engine.scheduler.steps - before < 60, "and the rest is not served"
    assert len(side.arrivals(2.0, 0)) == 60
    side.seconds = 50.0
    assert len(side.arrivals(2.0, 0)) == 100, "at least so many, and at least so long"


def check_capacity(m):
    """The better of two, so that one slow moment does not make a bound that is exceeded."""
    rates, asked = iter([5.0, 3.0, 8.0]), []

    class Moody(m.Side):
        def at_once(self, requests):
            asked.append(requests)
            return next(rates)

    assert Moody("moody", alone_in_line, None, 10, 4.0).capacity == 8.0 and asked == [10, 20, 20]


def check_a_known_answer(m):
    """No waiting at all for 90 %: in M/D/1 a request finds the server idle with chance 1 - rho, so rho is 0.1."""
    promise = goodput_work.Promise(((4, SLO(1.0 + 1e-9, 1.0)),))
    share = lambda k: sum(w < 1e-9 for w in waits(alone_in_line(m.STEP**k, 4000, 1), 2.0)) / 4000
    good, bad = m.highest(lambda k: share(k) >= m.ENOUGH, m.power(0.25), m.power(0.001))
    assert m.STEP**good <= 0.05 * 1.1 and m.STEP**bad >= 0.05 / 1.1 and bad == good + 1
    side = line(m, 40)
    comparison = m.Comparison("one line", [side], {"strict": promise}).search(forever())
    for seed, found in comparison.found["strict", "line"].items():
        kept = lambda k, s=seed: sum(w < 1e-9 for w in waits(alone_in_line(m.STEP**k, 40, s), 2.0)) / 40
        assert found.exact and kept(found.good) >= m.ENOUGH > kept(found.bad)


def forever() -> Options:
    return Options("goodput", "command", None, torch.float32, False)


class Scripted:
    """Bears `limits[slo]` requests per second, more by half in seed 2."""

    def __init__(self, name: str, capacity: float, **limits):
        self.name, self.capacity, self.limits, self.asked = name, capacity, limits, []

    def kept(self, promise, rate, seed):
        self.asked.append((promise, seed, rate))
        return 0.95 if rate <= self.limits[promise] * (1.5 if seed == 2 else 1) else 0.8


def check_comparison(m):
    fast, slow = (
        Scripted("fast", 16.0, strict=10.0, loose=20.0),
        Scripted("slow", 32.0, strict=4.0, loose=0.1),
    )
    slow.limits["loose"] = 4.0
    its = m.Comparison(
        "case", [fast, slow], {"strict": "strict", "loose": "loose"}, {("strict", "slow"): 9.0}
    )
    its.search(forever())
    on_grid = lambda rate: m.STEP ** m.power(rate)
    assert its.rates("strict", "fast") == pytest.approx([on_grid(10), on_grid(10), on_grid(15)])
    assert its.rates("loose", "slow") == pytest.approx([on_grid(4), on_grid(4), on_grid(6)])
    first = lambda side, slo, seed: next(r for p, s, r in side.asked if (p, s) == (slo, seed))
    assert first(fast, "strict", 0) == pytest.approx(on_grid(8)), "half of what it can serve"
    assert first(slow, "strict", 0) == pytest.approx(on_grid(4.5)), "half of what it can bear at best"
    assert first(fast, "strict", 1) == pytest.approx(on_grid(10)), "where the last seed ended"
    strict = {s: STEP_UP * on_grid(10 if s < 2 else 15) for s in range(3)}
    assert all(r >= strict[s] * 0.999 for p, s, r in fast.asked if p == "loose"), "what is strict is loose"
    report = Report("goodput", "")
    its.add_rows(report, {"strict": 1.5})
    row = report.row("case, strict: fast")
    assert row.samples == its.rates("strict", "fast") and row.bound == 16.0 and row.target is None
    assert row.note == f"strict; {sum(p == 'strict' for p, *_ in fast.asked)} runs"
    assert report.row("case, strict: slow").bound == 9.0 and report.row("case, loose: slow").bound == 32.0
    ratio = report.row("case, strict: fast / slow")
    assert ratio.samples == pytest.approx([on_grid(10) / on_grid(4)] * 2 + [on_grid(15) / on_grid(6)])
    assert (ratio.target, ratio.bound, report.row("case, loose: fast / slow").target) == (1.5, 1.0, None)
    k = m.power(10)
    at = report.row(f"case, strict, fast: in time at {m.STEP**k:.3g} requests/s")
    assert at.samples[:2] == [0.95, 0.95] and at.note.startswith("seeds 0 1")
    at = report.row(f"case, strict, fast: in time at {m.STEP ** (k + 1):.3g} requests/s")
    assert at.samples[:2] == [0.8, 0.8] and at.unit == "share"


STEP_UP = goodput_search.STEP


def check_no_time(m):
    sides = [Scripted("fast", 40.0, strict=10.0), Scripted("none", 40.0, strict=0.0)]
    its = m.Comparison("case", sides, {"strict": "strict"})
    its.search(replace(forever(), seconds=1e-9))
    assert all(len(side.asked) == 3 for side in sides), "one run for each seed in any case"
    report = Report("goodput", "")
    its.add_rows(report, {})
    row = report.row("case, strict: none")
    assert row.samples == [0.0] * 3 and row.note == "strict; 3 runs; 3 of 3 searches did not get to the end"
    asked = m.STEP ** m.power(20)
    rate = report.row("case, strict: fast").median
    assert report.row("case, strict: fast / none").samples == pytest.approx([rate / asked] * 3)
    none = m.Comparison("case", [sides[1], sides[1]], {"strict": "strict"}).search(forever())
    assert none.found["strict", "none"][0] == m.Found(None, m.power(40.0 / 16))


# ---------------------------------------------------------------- what is compared
SMOL = lambda tokens, rows: 0.0145 + 0.0005 * rows + 0.0003 * (tokens - rows)


def bench_of(m, monkeypatch, seconds=SMOL, n: int = 24):
    """bench goodput on an imagined machine."""
    clock = Clock()
    bench = m.Bench(Report("goodput", ""), Stub(), goodput_work.REAL, n, 1e-9)

    def side(self, name, trace, **options):
        engine = imagined(clock, seconds, num_pages=1024, **options)
        return goodput_search.Side(
            name, trace, engine, self.requests, self.seconds, clock=clock, sleep=clock.sleep
        )

    monkeypatch.setattr(m.Bench, "side", side)
    monkeypatch.setattr(
        m.Bench, "alone", lambda self, trace, kinds: {n: seconds(n, 1) for n in kinds.values()}
    )
    monkeypatch.setattr(m.Bench, "first", lambda self, tokens: [seconds(tokens, 1)])
    monkeypatch.setattr(m.Bench, "step", lambda self, trace: seconds(8, 8))
    monkeypatch.setattr(m, "full_step", lambda model, budget, prompt: seconds(budget, 8))
    for module in (m, goodput_search):
        monkeypatch.setattr(module, "SEEDS", (0,))
    return bench


def check_chunk(m, monkeypatch):
    times = {264: 0.3, 136: 0.2, 72: 0.1, 40: 0.05}
    monkeypatch.setattr(m, "full_step", lambda model, budget, prompt: times[budget])
    assert [m.chunk_for(None, [], seconds, False) for seconds in (0.4, 0.3, 0.2, 0.15, 0.1, 0.01)] == [
        256, 256, 128, 64, 64, 32,
    ]  # fmt: skip


def check_long(m, monkeypatch):
    bench = bench_of(m, monkeypatch, lambda tokens, rows: tokens / 1000)
    assert [m.long_for(bench, step) for step in (0.01, 0.03, 0.04, 0.06, 0.08, 1.0)] == [
        1024, 1024, 2048, 2048, 4096, 4096,
    ]  # fmt: skip


def check_chunks(m, monkeypatch):
    bench = bench_of(m, monkeypatch)
    m.chunks(bench, forever())
    report = bench.report
    ratio = next(row for row in report.rows if row.case.endswith("strict: chunked / whole"))
    assert ratio.case == "mixed, chunks of 64, strict: chunked / whole" and ratio.target == 1.5
    assert ratio.median > 1.5, "long prompts stop everybody"
    strict, loose = (report.row(f"mixed, chunks of 64, {slo}: whole") for slo in ("strict", "loose"))
    step, chat, long = SMOL(8, 8), SMOL(96, 1), SMOL(2048, 1)
    over = long + chat - 5 * chat
    assert strict.bound == pytest.approx(0.1 / (1 / 12 * over * (1 + step / (2 * step))))
    assert loose.bound > strict.bound and 0.3 < strict.ratio < 1.2, (
        "as predicted, and below: there are queues too"
    )
    rate = report.row("mixed, chunks of 64, strict: chunked").median
    name = f"mixed, chunks of 64, chats at {rate:.3g} requests/s"
    tail = lambda side, what: report.row(f"{name}, {side}: {what}").median
    assert tail("whole", "ITL max") > long > 3 * tail("chunked", "ITL max")
    assert tail("whole", "TTFT max") > 2 * tail("chunked", "TTFT max")
    assert len(report.row(f"{name}, whole: TTFT p50").samples) == 1
    assert tail("whole", "ITL p50") < tail("whole", "ITL p90") < tail("whole", "ITL max")
    assert tail("whole", "TTFT p50") < tail("whole", "TTFT max")


def check_prefixes(m, monkeypatch):
    bench = bench_of(m, monkeypatch)
    m.prefixes(bench, forever())
    case = "shared, 256 tokens, strict"
    on, off = (bench.report.row(f"{case}: index {name}") for name in ("on", "off"))
    assert on.median > 2 * off.median and on.bound > 2 * off.bound
    assert bench.report.row(f"{case}: index on / index off").median > 2


def check_overload(m, monkeypatch):
    bench = bench_of(m, monkeypatch, n=60)
    m.overload(bench)
    row = lambda who, policy, slo="strict": bench.report.row(f"classes, {slo}, {who}: {policy}")
    urgent, before = row("urgent", "two priorities"), row("urgent", "one queue")
    others = row("others", "two priorities")
    assert 0.15 < urgent.bound / (urgent.bound + others.bound) < 0.45
    assert urgent.ratio > 2 * before.ratio and row("urgent", "two priorities", "loose").ratio > 0.9
    others, more = row("others", "two priorities", "loose"), row("others", "one queue", "loose")
    assert others.median < more.median, "and the others pay"
    first = lambda who, policy: bench.report.row(f"classes, {who}, TTFT p50: {policy}").median
    assert first("urgent", "two priorities") < 0.5 * first("urgent", "one queue")
    assert first("others", "two priorities") > first("others", "one queue")
    assert "1.25 times what can be served" in urgent.note
    at = float(urgent.note.split()[1])
    assert urgent.bound + others.bound == pytest.approx(at, rel=0.1)


PLAIN = {
    served: [check_drive, check_order, check_refused, check_give_up, check_end, check_prompts, check_doomed,
             check_steps, check_broken],
    goodput_work: [check_traces, check_promise, check_stalls],
    goodput_search: [check_highest, check_comparison, check_no_time, check_the_queue, check_capacity,
        check_a_known_answer],
}  # fmt: skip


@pytest.mark.parametrize("module, check", [(m, check) for m, its in PLAIN.items() for check in its])
def test_by_hand(module, check):
    check(module)


# ---------------------------------------------------------------- the command
TABLE = """| requests/s in time | strict | loose |
| --- | ---: | ---: |
| mixed: chunked | 5.2 (3.0–6.2) | 12.0 (12.0–12.0) |
| mixed: whole | 2.1 (0.0–2.1) | 8.0 (8.0–8.0) |
| classes, urgent: one queue | 1.0 (1.0–1.0) | 4.0 (4.0–4.0) |"""


def check_table(m, monkeypatch):
    report = Report("goodput", "")
    given = {
        "mixed, chunks of 64, strict: chunked": [3.0, 6.2, 5.2], "mixed, chunks of 64, strict: whole": [2.1, 0.0, 2.1],
        "mixed, chunks of 64, loose: chunked": [12.0] * 3, "mixed, chunks of 64, loose: whole": [8.0] * 3,
        "classes, strict, urgent: one queue": [1.0] * 3, "classes, loose, urgent: one queue": [4.0] * 3,
    }  # fmt: skip
    for case, samples in given.items():
        report.add(Row(case, "requests/s", samples))
    report.add(Row("mixed, chunks of 64, strict: chunked / whole", "x", [2.0]))
    assert m.markdown(report) == TABLE


@pytest.mark.parametrize(
    "check", [check_chunk, check_long, check_chunks, check_prefixes, check_overload, check_table]
)
def test_on_an_imagined_machine(check, monkeypatch):
    check(goodput, monkeypatch)


@pytest.mark.slow
def test_the_command_reports_and_draws(tmp_path):
    path = tmp_path / "r.json"
    words = ["--model", "tiny", "--dtype", "float32", "--quick", "--json", str(path)]
    assert main(["bench", "goodput", *words]) == 0
    report = Report.load(path)
    assert report.where.endswith("tiny in float32")
    for slo in ("strict", "loose"):
        for sides in (("chunked", "whole"), ("index on", "index off")):
            ours, theirs = (
                next(row for row in report.rows if row.case.endswith(f"{slo}: {side}")) for side in sides
            )
            assert len(ours.samples) == len(theirs.samples) == 3 and ours.bound > 0
            assert "runs" in ours.note and "ms a token" in ours.note
        for who, policy in product(("urgent", "others"), ("two priorities", "one queue")):
            assert report.row(f"classes, {slo}, {who}: {policy}").ratio < 1.001
    target = [row.case for row in report.rows if row.target]
    assert len(target) == 1 and target[0].endswith("strict: chunked / whole")
    shares = [row for row in report.rows if ": in time at " in row.case]
    assert shares and all(0 <= x <= 1 for row in shares for x in row.samples)
    assert len(goodput.markdown(report).splitlines()) == 2 + 4 + 4
    goodput.draw_shares(report, tmp_path / "shares.png")
    assert (tmp_path / "shares.png").stat().st_size > 2000


# ---------------------------------------------------------------- wrong versions that must be found
WRONG = {
    served: {
        "who waits for the step came after it": (
            "Timeline(begin + a.time,",
            "Timeline(begin + math.ceil(a.time),",
        ),
        "the next one is sent when the last is answered": (
            "while coming and coming[0][2].arrival <= clock():",
            "while coming and not engine.outputs:",
        ),
        "one a step": (
            "while coming and coming[0][2].arrival <= clock():",
            "if coming and coming[0][2].arrival <= clock():",
        ),
        "nobody waits until he is due": ("coming[0][2].arrival <= clock()", "True"),
        "who is refused never ended": ('timeline.ended(clock(), "refused")', "pass"),
        "no priority": ("priority=arrival.priority)\n            except", "priority=0)\n            except"),
        "priority is not written down": (
            "prompt_tokens=a.prompt_tokens, priority=a.priority)",
            "prompt_tokens=a.prompt_tokens)",
        ),
        "started when it was done": ("started = before", "started = now"),
        "started again and again": ("and its[row.request].started is None", ""),
        "all tokens again": ("new = len(output.tokens) - len(timeline.tokens)", "new = len(output.tokens)"),
        "no token has text": ('"?" * (new * (output.told == 0))', '""'),
        "hits are forgotten": ("output.request.cached_tokens,", "0,"),
        "preemptions are forgotten": ("output.request.preemptions,", "0,"),
        "never ends early": ("if give_up(timelines, now):", "if False:"),
        "the aborted still run": ("for output, _ in engine.close():", "for output, _ in ():"),
        "a failure is a miss": ("if output.error is not None:", "if False:"),
        "one prefix for all": ('f"group {a.prefix}"', '"group"'),
        "a prefix for each run": ('f"group {a.prefix}"', 'f"group {a.prefix} {run}"'),
        "the same questions again": ('f"run {run} {i}"', 'f"run {i}"'),
        "everybody asks the same": ('f"run {run} {i}"', 'f"run {run}"'),
        "the prefix comes on top": ("a.prompt_tokens - a.prefix_tokens", "a.prompt_tokens"),
        "who waits is never late": ("now > slo.deadline(t, len(t.tokens))", "False"),
        "who has ended is in time": ("else not slo.met(t)", "else False"),
        "late for the token it has": ("slo.deadline(t, len(t.tokens))", "slo.deadline(t, len(t.tokens) - 1)"),
        "the warm-up counts": ("list(engine.log)[-steps:]", "list(engine.log)[1:]"),
    },
    goodput_work: {
        "chats depend on the long ones": (
            "if next(at) % EVERY == first else drawn",
            "if next(at) % EVERY == first else chat(rng)",
        ),
        "long ones at random": ("next(at) % EVERY == first", "rng.random() < 1 / EVERY"),
        "always at the first place": ("Random(seed).randrange(EVERY)", "0"),
        "no prefix": ("GROUPS, sizes.system, seed=seed", "1, sizes.system, seed=seed"),
        "the same times in every seed": ("seed), SHARES", "0), SHARES"),
        "one SLO for all kinds": (
            "SLO(first * its, token * step)",
            "SLO(first * min(alone.values()), token * step)",
        ),
        "kinds out of order": ("sorted(alone.items())", "alone.items()"),
        "a kind ends before its longest": (
            "if timeline.prompt_tokens <= most)",
            "if timeline.prompt_tokens < most)",
        ),
        "multiples exchanged": ("first, token = multiples", "token, first = multiples"),
        "deadlines from nothing": ("return timeline.arrival + slo.ttft + n", "return slo.ttft + n"),
        "one deadline for all tokens": ("n * slo.per_token", "slo.per_token"),
        "stalls that T1 allows": ("alone[long] + alone[short] - chat.ttft", "alone[long]"),
        "nobody runs": ("over * (1 + step / (chat.per_token - step))", "over"),
        "every request is long": ("missed / (share * window)", "missed / window"),
        "no stall, no load": ('else float("inf")', "else 0.0"),
    },
    goodput_search: {
        "one step at a time": ("        step *= 2\n", ""),
        "no halves": ("k = (good + bad) // 2", "k = good + 1"),
        "a bound that is known is asked for": ("max(guess, known + 1)", "guess"),
        "the guess is forgotten": (
            "k = guess if known is None else max(guess, known + 1)",
            "k = 0 if known is None else known + 1",
        ),
        "it ends with gaps": ("bad - good == 1)", "bad - good <= 2)"),
        "no end below": ("(good is None and bad <= low) or ", ""),
        "time plays no part": ("not more() or ", ""),
        "rates that did not pass": ("0.0 if self.good is None else STEP**self.good", "STEP**self.bad"),
        "rounded up": ("math.floor(math.log(rate)", "math.ceil(math.log(rate)"),
        "short runs": ("max(self.requests, math.ceil(rate * self.seconds))", "self.requests"),
        "the first for the better one": ("max(self.at_once(many) for _ in range(2))", "self.at_once(many)"),
        "they come one by one": ("replace(a, time=0.0)", "a"),
        "the last one's time is not counted": ("/ (max(t.finished", "/ (min(t.finished"),
        "hopeless runs go on": ("return lost > LOST * len(timelines)", "return False"),
        "stopped at the first": ("return lost > LOST * len(timelines)", "return lost > 0"),
        "of those who were served": (
            "1 - lost / len(timelines)",
            "1 - lost / sum(bool(t.tokens) for t in timelines)",
        ),
        "who was stopped is in time": ("1 - lost / len(timelines) if stopped else attainment", "attainment"),
        "always from the same guess": ("guess = before[-1] if before else", "guess ="),
        "a capacity is borne": ("side.capacity) / 2)", "side.capacity))"),
        "bounds play no part": ("self.bounds.get(key, side.capacity) / 2", "side.capacity / 2"),
        "the loose from the beginning": ("strictest.good if strictest else None", "None"),
        "fewer are enough": ("return share >= ENOUGH", "return share >= 0.5"),
        "the last seed's share alone": (
            "self.shares[key][k][seed] = share",
            "self.shares[key][k] = {seed: share}",
        ),
        "upside down": ("ours[seed].rate / theirs[seed].at_most", "theirs[seed].rate / ours[seed].at_most"),
        "all are judged": ("targets.get(slo)", 'targets.get("strict")'),
        "what it served, for a bound": ("self.bounds.get((slo, side.name), side.capacity)", "side.capacity"),
        "every search came to its end": ("not found.exact for", "False for"),
        "no more time than for one": ("least=len(tasks)", "least=1"),
    },
    goodput: {
        "the smallest chunk": ("for n in sizes if", "for n in reversed(sizes) if"),
        "chunks as if nobody decoded": (
            "full_step(model, DECODING + n, prompt)",
            "full_step(model, n, prompt)",
        ),
        "nobody keeps others waiting": ("median(bench.first(n)) >= enough", "True"),
        "nobody is urgent": ('("two priorities", arrivals)', '("two priorities", alike)'),
        "no overload": ("OVERLOAD * side.capacity", "0.5 * side.capacity"),
        "those who age overtake": ("ageing=10**6", "ageing=0"),
        "everybody is everybody": ("if a.priority == priority]", "]"),
        "classes without their SLO": ('kept[f"{slo}, {who}', 'kept[f"strict, {who}'),
        "means for medians": ("{row.median:.1f} (", "{sum(row.samples) / len(row.samples):.1f} ("),
        "ratios in the table": ('if row.unit == "requests/s":', 'if row.unit != "s":'),
    },
}
CASES = [(module, what) for module, its in WRONG.items() for what in its]


@pytest.mark.parametrize("module, what", CASES, ids=[f"{m.__name__}: {what}" for m, what in CASES])
def test_a_wrong_version_is_found(module, what, monkeypatch):
    wrong = wrong_version(module, *WRONG[module][what])
    with pytest.raises((Exception, pytest.fail.Exception)):  # an assertion, or whatever the fault leads to
        for check in PLAIN.get(module, ()):
            check(wrong)
        for check in (check_chunk, check_long, check_table, check_overload) if module is goodput else ():
            check(wrong, monkeypatch)
