"""bench kv counts, compares and gives up as it says; lab/kv_quality.py against a request alone, rounded by hand."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from quantized_oracle import attend_rounded as oracle

from minserve.bench import kv
from minserve.config import SHAPES
from minserve.lab import kv_quality
from minserve.lab.kv_quality import exact, levels, per_channel, per_token
from minserve.model import Model
from minserve.prefill_decode import attend_afresh
from minserve.request import SamplingParams

TINY = replace(
    SHAPES["smollm2-135m"], vocab_size=251, hidden_size=96, intermediate_size=76, num_layers=3, num_heads=6,
    num_kv_heads=2, head_dim=16, context=512, windows=(),
)  # fmt: skip
IDS = torch.randint(251, (40,), generator=torch.Generator().manual_seed(3)).tolist()
NEW = SamplingParams(max_tokens=5, ignore_eos=True)


def lively() -> Model:
    """Of the same weights each time, large enough for keys to matter."""
    torch.manual_seed(0)
    model = Model.random(TINY)
    for weight in model.parameters():
        weight.mul_(5 if weight.ndim > 1 else 1)
    return model


MODEL = lively()


# ---------------------------------------------------------------- memory
def test_rooms_by_hand():
    """3 layers of 2 heads of 16 in fp32: 768 bytes a token; int8 240, int4 144 in pages of 16, 132 of 32, 126 of 64."""
    rooms = {kind: kv.Room.of(MODEL, kind, 128, 10 * 128 * 768) for kind in kv.KINDS}
    assert [rooms[kind].per_token for kind in (None, "int8", "fp8")] == [768, 240, 240]
    assert [rooms[kind].requests for kind in (None, "int8", "fp8")] == [10, 32, 32]
    assert rooms["int8"].pages == 10 * 128 * 768 // (16 * 240)
    fit = {
        S: int(10 * 128 * 768 // (128 * (6 * (8 + 64 / S + 8 + 4)) + S * 768)) for S in (16, 32, 64)
    }  # sealed, open
    assert (rooms["int4"].page_size, rooms["int4"].requests) == max(fit.items(), key=lambda its: its[1])
    assert kv.Room.of(MODEL, "int4", 65_536, 1e10).page_size == 64, "long requests gain by larger pages"


@pytest.mark.parametrize("kind", kv.KINDS)
def test_a_room_holds_no_more_than_its_bytes_and_nearly_all_of_them(kind):
    nbytes = 9 * 64 * 768
    room = kv.Room.of(MODEL, kind, 64, nbytes)
    cache = room.engine(MODEL, 64).cache
    page = cache.page_size * room.per_token
    assert nbytes - page < cache.nbytes <= nbytes


@pytest.mark.parametrize("kind", kv.KINDS)
def test_as_many_run_at_once_as_the_arithmetic_lets_in(kind):
    room = kv.Room.of(MODEL, kind, 64, 6 * 64 * 768)
    assert kv.at_once(room, MODEL, 64) == room.requests


# ---------------------------------------------------------------- decoding
@pytest.mark.parametrize("kind", kv.KINDS)
def test_a_step_decodes_behind_a_full_cache(kind):
    side, looked = kv.Decoding(MODEL, kind, 2, 70, 6), []
    compute = side.llm.compute
    side.llm.compute = lambda batch: (looked.append(batch), compute(batch))[1]
    assert side.step() > 0 and side.step() > 0
    assert [batch.host_lengths for batch in looked] == [[71, 71], [72, 72]]
    pools = [x for pool in side.llm.cache.pools for x in pool]
    assert all(
        int((x.view(torch.uint8) != 0).sum()) > 0.3 * x.nbytes / max(1, x.element_size()) for x in pools
    )
    for pair in getattr(side.llm.cache, "open", ()):
        assert all((x != 0).float().mean() > 0.9 for x in pair)
    with torch.inference_mode():
        logits = compute(looked[-1])[0]
    assert logits.isfinite().all() and logits.std() > 0


# ---------------------------------------------------------------- goodput
def clockwork(monkeypatch):
    """Every step takes a tenth of a second."""
    monkeypatch.setattr(kv, "clock", lambda run: (run(), 0.1)[1])


def engine(seats: int):
    return kv.Room.of(MODEL, None, 16, 1e6).engine(MODEL, seats, step="plain")


def kept(monkeypatch, times, seats=8, first=10.0, each=10.0):
    clockwork(monkeypatch)
    llm = engine(seats)
    its = kv.kept(llm, ([[1, 2, 3]] * len(times), NEW), times, kv.Promise(first, each))
    assert not llm.outputs and llm.pages.in_use == 0, "the next run must find an empty engine"
    return its


def test_a_promise_is_kept_or_not(monkeypatch):
    ask = partial(kept, monkeypatch)
    assert ask([1.0, 1.0], first=0.15, each=0.101)
    assert not ask([1.0, 1.0], first=0.05)  # the first step takes 0.1 s
    assert not ask([1.0, 1.0], each=0.09)
    apart = [1.0, 1.61]  # 5 tokens take 0.5 s
    assert ask(apart, seats=1, first=0.25)
    assert not ask([1.0, 1.2], seats=1, first=0.25), "the second waits 0.3 s for the seat"
    assert ask([5.0, 900.0], first=0.15), "time stands still while nobody is there"


def test_one_in_ten_may_be_late(monkeypatch):
    """Twenty, one seat: who comes right behind another is late, and nobody else."""
    apart = [float(i) for i in range(1, 19)]
    assert kept(monkeypatch, [*apart, 20.0, 20.01], seats=1, first=0.25)
    two_late = [*apart[:16], 18.0, 18.01, 20.0, 20.01]
    assert kept(monkeypatch, two_late, seats=1, first=0.25)
    three_late = [*apart[:14], 16.0, 16.01, 18.0, 18.01, 20.0, 20.01]
    assert not kept(monkeypatch, three_late, seats=1, first=0.25)


def test_a_lost_run_is_given_up(monkeypatch):
    clockwork(monkeypatch)
    llm = engine(1)
    assert not kv.kept(llm, ([[1]] * 50, NEW), [0.01] * 50, kv.Promise(0.25, 1.0))
    assert len(llm.log) < 20, "nobody needs 250 steps to see that"


def test_the_highest_rate():
    rates = [1.0, 2.0, 4.0, 8.0, 16.0]
    for most, expected in ((0.5, 0.0), (1.0, 1.0), (5.0, 4.0), (8.0, 8.0), (99.0, 16.0)):
        asked: list = []
        good = lambda rate, most=most, asked=asked: (asked.append(rate), rate <= most)[1]
        assert kv.highest(rates, good) == expected
        assert len(asked) <= 3


def test_arrivals():
    slow, fast = kv.arrivals(1, 500, 2.0), kv.arrivals(1, 500, 4.0)
    assert slow == sorted(slow) and [2 * t for t in fast] == pytest.approx(slow)
    assert slow[-1] == pytest.approx(250, rel=0.15)
    assert slow != kv.arrivals(2, 500, 2.0)


# ---------------------------------------------------------------- quality
def run(attend):
    ids = torch.tensor(IDS)
    with torch.inference_mode():
        return MODEL(ids, torch.arange(len(IDS)), attend)


def test_the_engines_cache_is_asked():
    torch.testing.assert_close(
        kv_quality.logits_of(MODEL, IDS), run(attend_afresh(TINY)), rtol=1e-4, atol=1e-4
    )
    for kind in kv.KINDS[1:]:
        expected = run(oracle(TINY, kind, 8))
        torch.testing.assert_close(kv_quality.logits_of(MODEL, IDS, kind, 8), expected, rtol=1e-3, atol=1e-3)


def test_formats_that_nobody_serves():
    rounded = lambda *how, **more: kv_quality.logits_rounded(MODEL, IDS, 8, *how, **more)
    close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)
    close(rounded(exact, exact), run(attend_afresh(TINY)))
    close(rounded(exact, exact, recent=False), run(attend_afresh(TINY)))
    close(rounded(per_channel, per_token), run(oracle(TINY, "int4", 8)))

    def everything(layer, q, k, v):  # 40 tokens are five full pages
        pages = k.unflatten(0, (-1, 8))
        return attend_afresh(TINY)(layer, q, levels(pages, -1).flatten(0, 1), levels(v, -1))

    close(rounded(per_token, per_token, recent=False), run(everything))


def test_divergence_and_perplexity_by_hand():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    first = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert kv_quality.divergence(p, q) == pytest.approx(first / 2, rel=1e-5)
    assert kv_quality.divergence(p, q, last=1) == pytest.approx(0, abs=1e-6)
    assert kv_quality.divergence(p + 3, p) == pytest.approx(0, abs=1e-6)
    long = torch.randn(600, 7)
    assert kv_quality.divergence(long[:, :], long.flip(0)) == pytest.approx(
        float((long.softmax(1) * (long.log_softmax(1) - long.flip(0).log_softmax(1))).sum() / 600), rel=1e-4
    )
    assert kv_quality.perplexity(q, [0, 1]) == pytest.approx(1 / 0.75, rel=1e-5)
    assert kv_quality.perplexity(torch.zeros(600, 7), [3] * 600) == pytest.approx(7, rel=1e-5)


# ---------------------------------------------------------------- wrong versions that must be found
WRONG = {
    "bench": {
        "the open page is free": ('if kind == "int4" else 0', 'if kind == "none" else 0'),
        "seats beyond those that fit": ("seats = min(seats, self.requests)", "seats = 2 * self.requests"),
        "only pages of 16": ("(16, 32, 64) if", "(16,) if"),
        "tokens, not pages, are counted": ("pages_for(tokens, S) * S * per_token", "per_token"),
        "the model's own bytes for every kind": ("itemsize, kind, S)", "itemsize, None, S)"),
        "the cache stays empty": ("layer.copy_(shared)", "pass"),
        "open pages stay empty": ('*zip(*getattr(cache, "open", ()))', ""),
        "nothing is computed": ("self.llm.compute = self.llm.cache, compute", "_ = self.llm.cache, compute"),
        "any first token is in time": ("now - came <= promise.first", "True"),
        "any later token is in time": ("(len(output.tokens) - 1) * promise.each", "99"),
        "a token's deadline is one token late": ("(len(output.tokens) - 1)", "len(output.tokens)"),
        "the wait of those still waiting is not seen": ("if now - came > promise.first}", "if False}"),
        "nobody may be late": ("< MET * len(times)", "< len(times)"),
        "two in ten may be late": ("< MET * len(times)", "< (2 * MET - 1) * len(times)"),
        "a lost engine is left full": ("            llm.close()\n", ""),
        "time goes on while nobody is there": ("now = max(now, todo[-1][0])", "now = todo[-1][0] + 1"),
        "the first bad rate": ("rates[low] if", "rates[min(high, len(rates) - 1)] if"),
        "every rate is tried": ("(low + high) // 2", "low + 1"),
        "evenly spaced": ("rng.expovariate(1.0) / rate", "1 / rate"),
        "the same for every seed": ("random.Random(seed)", "random.Random(0)"),
    },
    "quality": {
        "the reference's cache for every kind": ("cache_for(kind,", "cache_for(None,"),
        "the mean over one too many": ("total, count = 0.0, last or len(reference)", "total, count = 0.0, 1"),
        "the other way round": ("(p.exp() * (p - q))", "(q.exp() * (q - p))"),
        "last is ignored": ("x[-last if last else 0 :]", "x[0:]"),
        "tokens are their own successors": ("torch.tensor(ids[1:],", "torch.tensor(ids[:-1],"),
        "channels where tokens are": ("return levels(pages, -1)", "return levels(pages, 1)"),
        "the window of any query": ("own = j // page == p // page if", "own = (j // page <= p // page) if"),
        "no window": ("if recent else", "if False else"),
        "values are not rounded": ("(v, values)", "(v, exact)"),
        "the future is seen": ("(j <= p) & own", "own"),
    },
}
TESTS = {
    "bench": [  # what costs nothing is asked first
        lambda patch: test_rooms_by_hand(), lambda patch: test_the_highest_rate(), lambda patch: test_arrivals(),
        *(lambda patch, f=f, k=k: f(k) for f in (
            test_a_room_holds_no_more_than_its_bytes_and_nearly_all_of_them,
            test_as_many_run_at_once_as_the_arithmetic_lets_in, test_a_step_decodes_behind_a_full_cache,
        ) for k in (None, "int4")),
        test_a_promise_is_kept_or_not, test_a_lost_run_is_given_up, test_one_in_ten_may_be_late,
    ],
    "quality": [
        lambda patch: test_the_engines_cache_is_asked(), lambda patch: test_formats_that_nobody_serves(),
        lambda patch: test_divergence_and_perplexity_by_hand(),
    ],
}  # fmt: skip
MODULES = {"bench": kv, "quality": kv_quality}


@pytest.mark.slow
@pytest.mark.parametrize("where, wrong", [(where, wrong) for where in WRONG for wrong in WRONG[where]])
def test_a_wrong_version_is_found(where, wrong, monkeypatch):
    module = MODULES[where]
    source = open(module.__file__, encoding="utf-8").read()
    old, new = WRONG[where][wrong]
    assert old in source, "the test's wrong version follows the line it breaks"
    kept_back = dict(vars(module))
    try:
        exec(compile(source.replace(old, new), module.__file__, "exec"), vars(module))
        for name in ("per_token", "per_channel", "exact"):
            if where == "quality":
                monkeypatch.setitem(globals(), name, getattr(module, name))
        with pytest.raises((AssertionError, RuntimeError)):
            for test in TESTS[where]:
                test(monkeypatch)
    finally:
        monkeypatch.undo()
        vars(module).clear()
        vars(module).update(kept_back)
