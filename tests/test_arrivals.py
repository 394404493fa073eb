"""Schedules: the rate is exact, the rhythm as asked for, the seed decides all of it, and a trace is read right."""

import statistics
import sys
from itertools import pairwise

import pytest
from wrong_versions import wrong_version

from minserve import arrivals

SMALL = arrivals.fixed(8, 4)


def gaps(schedule):
    return [b.time - a.time for a, b in pairwise(schedule)]


def variation(schedule):
    its = gaps(schedule)
    return statistics.pstdev(its) / statistics.mean(its)


# ---------------------------------------------------------------- when they come
@pytest.mark.parametrize("burstiness", [0.05, 1.0, 20.0])
def test_the_rate_is_exact(burstiness):
    schedule = arrivals.gamma(4.0, burstiness, 100.0, SMALL, seed=3)
    assert len(schedule) == 400 and schedule[-1].time == pytest.approx(100.0)
    assert all(gap >= 0 for gap in gaps(schedule)) and schedule[0].time > 0


@pytest.mark.parametrize("burstiness, cv", [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_the_gaps(burstiness, cv):
    """The CV of gamma gaps is shape^-1/2, whatever the rate."""
    for rate in (0.5, 50.0):
        found = variation(arrivals.gamma(rate, burstiness, 4000 / rate, SMALL, seed=1))
        assert found == pytest.approx(cv, rel=0.08)


def test_poisson_counts_have_the_variance_of_their_mean():
    """Requests in each second of 2,000, 5 per second: mean 5, variance 5; and shape 1 is what it is."""
    schedule = arrivals.poisson(5.0, 2000.0, SMALL, seed=2)
    counts = [0] * 2001
    for arrival in schedule:
        counts[int(arrival.time)] += 1
    assert statistics.mean(counts[:2000]) == pytest.approx(5.0, rel=0.01)
    assert statistics.variance(counts[:2000]) == pytest.approx(5.0, rel=0.1)
    assert schedule == arrivals.gamma(5.0, 1.0, 2000.0, SMALL, seed=2)


def test_the_seed_decides_everything():
    lengths = arrivals.uniform((1, 100), (1, 100))
    one, same, other = (arrivals.poisson(2.0, 50.0, lengths, seed) for seed in (1, 1, 2))
    assert one == same and one != other


def test_another_rate_brings_the_same_requests_faster():
    lengths = arrivals.uniform((1, 100), (1, 100))
    slow, fast = arrivals.poisson(1.0, 60.0, lengths, 7), arrivals.poisson(3.0, 20.0, lengths, 7)
    brought = lambda schedule: [(a.prompt_tokens, a.output_tokens) for a in schedule]
    assert brought(slow) == brought(fast)
    assert [a.time for a in fast] == pytest.approx([a.time / 3 for a in slow])
    bursts = arrivals.gamma(1.0, 0.2, 60.0, lengths, 7)
    assert brought(bursts) == brought(slow) and [a.time for a in bursts] != [a.time for a in slow]


@pytest.mark.parametrize("rate, burstiness, seconds, complaint", [
    (0.0, 1.0, 10.0, "rate 0"), (1.0, 0.0, 10.0, "burstiness 0"), (1.0, 1.0, -1.0, "seconds -1"),
    (0.01, 1.0, 10.0, "not one request"), (1.0, 1e-9, 10.0, "gaps are 0"), (float("nan"), 1.0, 10.0, "rate nan"),
])  # fmt: skip
def test_what_is_no_schedule_is_refused(rate, burstiness, seconds, complaint):
    with pytest.raises(ValueError, match=complaint):
        arrivals.gamma(rate, burstiness, seconds, SMALL)


def test_paced():
    schedule = [arrivals.Arrival(time, 8, 4, priority=1) for time in (0.0, 1.0, 4.0)]
    faster = arrivals.paced(schedule, 3.0)
    assert [a.time for a in faster] == [0.0, 0.25, 1.0] and all(a.priority == 1 for a in faster)
    for nothing in ([], schedule[:1]):
        with pytest.raises(ValueError, match="no time to stretch"):
            arrivals.paced(nothing, 1.0)


# ---------------------------------------------------------------- what they bring
def test_uniform_reaches_both_ends():
    brought = {arrivals.uniform((3, 5), (1, 2))(rng) for rng in [arrivals.Random(0)] for _ in range(200)}
    assert brought == {(p, o) for p in (3, 4, 5) for o in (1, 2)}


def test_lognormal_has_the_median_and_the_mean():
    rng, draw = arrivals.Random(0), arrivals.lognormal((1000, 1500), (100, 100))
    drawn = [draw(rng) for _ in range(20_000)]
    prompts = [p for p, _ in drawn]
    assert statistics.median(prompts) == pytest.approx(1000, rel=0.03)
    assert statistics.mean(prompts) == pytest.approx(1500, rel=0.03)
    assert {o for _, o in drawn} == {100}  # mean = median: no spread at all


def test_lengths_stay_between_one_and_the_longest():
    rng, draw = arrivals.Random(0), arrivals.lognormal((2, 20), (2, 20), longest=50)
    drawn = [n for _ in range(5000) for n in draw(rng)]
    assert (min(drawn), max(drawn)) == (1, 50)
    for median, mean in [(0, 5), (5, 4)]:
        with pytest.raises(ValueError, match="0 < median <= mean"):
            arrivals.lognormal((median, mean), (1, 1))


# ---------------------------------------------------------------- the production trace
def test_azure_like_scaled():
    big, small = (
        arrivals.azure_like("code", 600.0),
        arrivals.azure_like("code", 600.0, scale=0.1, longest=300),
    )
    assert [a.time for a in big] == [a.time for a in small]
    assert [a.prompt_tokens for a in small] == [
        pytest.approx(min(300, a.prompt_tokens / 10), abs=0.6) for a in big
    ]
    assert max(a.prompt_tokens for a in small) == 300
    fast = arrivals.azure_like("code", 60.0, rate=10.0, burstiness=1.0)
    assert len(fast) == 600 and variation(fast) == pytest.approx(1.0, rel=0.15)
    with pytest.raises(ValueError, match="use one of code, conversation"):
        arrivals.azure_like("chat", 60.0)


ROWS = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""


def written(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_csv(tmp_path):
    schedule = arrivals.azure_csv(written(tmp_path, ROWS))
    assert [a.time for a in schedule] == pytest.approx([0.0, 0.052, 60.0], abs=1e-6)
    assert [(a.prompt_tokens, a.output_tokens) for a in schedule] == [(4808, 10), (3180, 8), (110, 27)]


def test_azure_csv_of_2024_out_of_order_with_a_byte_order_mark(tmp_path):
    """Its times have a zone; a request may have made nothing. Columns are found by name, other ones ignored."""
    rows = ["\ufeffGeneratedTokens,TIMESTAMP,ContextTokens,NumImages", "0,2024-05-10 00:00:01.500000+00:00,7,1",
            "3,2024-05-10 00:00:00.500000+00:00,40,0", ""]  # fmt: skip
    schedule = arrivals.azure_csv(written(tmp_path, "\r\n".join(rows)), scale=0.1)
    assert [(a.time, a.prompt_tokens, a.output_tokens) for a in schedule] == [(0.0, 4, 1), (1.0, 1, 1)]


@pytest.mark.parametrize("rows, complaint", [
    ("", "no column TIMESTAMP, ContextTokens, GeneratedTokens"),
    ("TIMESTAMP,Tokens\n1,2\n", "no column ContextTokens, GeneratedTokens"),
    (ROWS.split("\n")[0], "no requests in it"),
    (ROWS + "yesterday,1,2\n", "line 5: .*yesterday"),
    (ROWS + "2023-11-16 18:18:04.0,many,2\n", "line 5: .*many"),
    (ROWS + "2023-11-16 18:18:04.0,5\n", "line 5: "),
])  # fmt: skip
def test_a_csv_that_is_no_trace_is_refused_with_its_line(tmp_path, rows, complaint):
    with pytest.raises(ValueError, match=complaint):
        arrivals.azure_csv(written(tmp_path, rows))


# ---------------------------------------------------------------- what else
def test_shared_prefix_groups():
    plain = arrivals.poisson(10.0, 100.0, arrivals.uniform((1, 9), (1, 9)))
    grouped = arrivals.shared_prefix_groups(plain, 4, 32)
    assert [a.time for a in grouped] == [a.time for a in plain]
    assert [a.prompt_tokens for a in grouped] == [a.prompt_tokens + 32 for a in plain]
    assert {a.prefix_tokens for a in grouped} == {32}
    counts = [sum(a.prefix == group for a in grouped) for group in range(4)]
    assert sum(counts) == 1000 and all(count == pytest.approx(250, rel=0.2) for count in counts)
    skewed = arrivals.shared_prefix_groups(plain, 4, 32, skew=1.0)
    counts = [sum(a.prefix == group for a in skewed) for group in range(4)]
    assert counts == [pytest.approx(1000 * 12 / 25 / rank, rel=0.2) for rank in (1, 2, 3, 4)]
    with pytest.raises(ValueError, match="at least 1"):
        arrivals.shared_prefix_groups(plain, 0, 32)


def test_with_priorities():
    plain = arrivals.poisson(10.0, 200.0, SMALL)
    mixed = arrivals.with_priorities(plain, {0: 0.2, 5: 0.8}, seed=1)
    urgent = sum(a.priority == 0 for a in mixed)
    assert urgent == pytest.approx(400, rel=0.15) and {a.priority for a in mixed} == {0, 5}
    assert mixed == arrivals.with_priorities(plain, {0: 0.2, 5: 0.8}, seed=1)
    for shares in ({}, {0: -1.0, 1: 2.0}, {0: 0.0}):
        with pytest.raises(ValueError, match="shares"):
            arrivals.with_priorities(plain, shares)


@pytest.mark.parametrize("kind, hours, rate, cv, prompt, output", [
    ("code", 6, 2.57, 13.2, (1469, 2048), (13, 28)), ("conversation", 1, 5.53, 1.09, (1020, 1155), (129, 211)),
])  # fmt: skip
def test_azure_like_has_the_published_statistics(kind, hours, rate, cv, prompt, output):
    """The gaps' CV of one hour of `code` scatters: nearly all of it is in a few of its gaps."""
    runs = [arrivals.azure_like(kind, 3436.0, seed) for seed in range(hours)]
    assert all(len(run) / run[-1].time == pytest.approx(rate, rel=0.001) for run in runs)
    assert statistics.median(map(variation, runs)) == pytest.approx(cv, rel=0.2)
    for of, (median, mean) in [(lambda a: a.prompt_tokens, prompt), (lambda a: a.output_tokens, output)]:
        values = [of(a) for run in runs for a in run]
        assert statistics.median(values) == pytest.approx(median, rel=0.03)
        assert statistics.mean(values) == pytest.approx(mean, rel=0.03)


# ---------------------------------------------------------------- the tests can fail
WRONG = [  # (what is wrong, the right text, the wrong one)
    ("not stretched to the rate", "stretch = n / rate / times[-1]", "stretch = 1 / rate"),
    ("steady", "when.gammavariate(burstiness, 1.0)", "1.0"),
    ("always Poisson", "when.gammavariate(burstiness, 1.0)", "when.expovariate(1.0)"),
    ("burstiness upside down", "when.gammavariate(burstiness, 1.0)", "when.gammavariate(1 / burstiness, 1.0)"),
    ("burstiness is the CV", "when.gammavariate(burstiness, 1.0)", "when.gammavariate(burstiness**2, 1.0)"),
    ("no seed", 'Random(f"times {seed}")', "Random()"),
    ("one stream for times and lengths", 'Random(f"times {seed}"), Random(f"lengths {seed}")', "(Random(seed),) * 2"),
    ("paced from the wrong end", "arrival.time * stretch) for arrival", "arrival.time / stretch) for arrival"),
    ("the mean is not the mean", "math.sqrt(2 * math.log(mean / median))", "math.log(mean / median)"),
    ("the median is the mean", "round(median * math.exp", "round(mean * math.exp"),
    ("no token at all", "return max(1, tokens if", "return max(0, tokens if"),
    ("longest ignored", "else min(tokens, longest)", "else tokens"),
    ("code is as calm as talk", "burstiness or known.cv**-2", "burstiness or 1.0"),
    ("CV is the shape", "known.cv**-2", "1 / known.cv"),
    ("scale ignored", "tuple(x * scale for x in both)", "both"),
    ("the first line is not 0", "zero = rows[0][0]", "zero = datetime(2023, 1, 1, tzinfo=rows[0][0].tzinfo)"),
    ("whole seconds", "(when - zero).total_seconds()", "(when - zero).seconds"),
    ("in the file's order", "    rows.sort(key=lambda row: row[0])\n", ""),
    ("columns by their place", "(row[name] for name in COLUMNS)", "list(row.values())[:3]"),
    ("a prefix replaces the prompt", "prompt_tokens=a.prompt_tokens + prefix_tokens", "prompt_tokens=prefix_tokens"),
    ("one group is all", "rng.choices(range(groups), [", "rng.choices([0] * groups, ["),
    ("skew ignored", "(i + 1) ** -skew", "1"),
    ("priorities without their shares", "list(shares), list(shares.values()), k", "list(shares), k"),
]  # fmt: skip


@pytest.mark.parametrize("what, right, wrong", WRONG, ids=[what for what, _, _ in WRONG])
def test_a_wrong_version_is_noticed(what, right, wrong, monkeypatch, tmp_path):
    assert noticed(right, wrong, monkeypatch, tmp_path), f"no test notices: {what}"


def test_the_right_version_is_not(monkeypatch, tmp_path):
    assert not noticed("zero = rows[0][0]", "zero = rows[0][0]", monkeypatch, tmp_path)


def noticed(right, wrong, monkeypatch, tmp_path) -> bool:
    """Does one of the tests above fail when arrivals.py has this in place of that?"""
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "arrivals", wrong_version(arrivals, right, wrong))
    for name, check in list(vars(here).items()):
        if name.startswith("test_") and "_version_is_" not in name:
            for arguments in _arguments(check):
                needs = "tmp_path" in check.__code__.co_varnames[: check.__code__.co_argcount]
                try:
                    check(*([tmp_path] if needs else []), *arguments)
                except (
                    AssertionError,
                    pytest.fail.Exception,
                    ArithmeticError,
                    TypeError,
                    ValueError,
                    KeyError,
                ):
                    return True
    return False


def _arguments(check):
    """The parameter sets of a test."""
    marks = [mark for mark in getattr(check, "pytestmark", []) if mark.name == "parametrize"]
    if not marks:
        return [()]
    names, values = marks[0].args
    return [value if "," in names else (value,) for value in values]
