"""Formulas on timelines made by hand, whose right values a pencil can check; and what Prometheus reads."""

import random
import statistics
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families
from wrong_versions import wrong_version

from minserve import metrics
from minserve.step_log import Row, StepRecord

SLOW, FAST = metrics.SLO(ttft=1.0, per_token=0.5), metrics.SLO(ttft=0.9, per_token=0.5)


def line(*tokens, arrival=0.0, reason="stop", text="x", **fields):
    """A completion whose tokens came at these times, with text from the first on."""
    t = metrics.Timeline(arrival, **fields)
    for at in tokens:
        t.told(at, 1, text)
    t.ended((tokens[-1] if tokens else arrival) + 0.125, reason)
    return t


# ---------------------------------------------------------------- one completion
def test_a_role_is_not_a_token_and_a_chunk_may_hold_several():
    """Role at 0.1; text of one token at 1.0, of three at 2.0; the end at 2.1."""
    t = metrics.Timeline(0.0)
    t.told(0.1, 0, "")
    t.told(1.0, 1, "a")
    t.told(2.0, 3, "bcd")
    t.ended(2.1, "stop")
    assert (t.ttft, len(t.tokens), t.e2e) == (1.0, 4, 2.0)
    assert t.tpot == pytest.approx(1 / 3) == statistics.mean(t.itl)
    assert t.itl == [1.0, 0.0, 0.0]


def test_the_first_token_is_the_first_with_text():
    t = metrics.Timeline(0.0)
    t.told(1.0, 1, "")  # half a character
    t.told(1.5, 1, "ä")
    t.told(2.5, 1, "b")
    t.ended(2.5, "length")
    assert (t.ttft, t.e2e, t.itl, t.tpot) == (1.5, 2.5, [0.5, 1.0], 0.5)


def test_text_that_comes_behind_its_last_token():
    t = metrics.Timeline(0.0)
    t.told(1.0, 2, "")
    t.told(1.5, 0, "ab")  # held back, as the beginning of a stop string that never came
    t.ended(1.5, "length")
    assert (t.ttft, t.e2e, t.tpot, t.itl, t.decode_time) == (1.5, 1.5, 0.0, [0.0], 0.0)


def test_times_count_from_arrival_and_phases_from_each_other():
    t = line(14.0, 15.0, 18.0, arrival=10.0, queued=11.0, started=13.0)
    assert (t.ttft, t.e2e, t.tpot) == (4.0, 8.0, 2.0)
    assert (t.queue_time, t.prefill_time, t.decode_time, t.inference_time) == (2.0, 1.0, 4.0, 5.0)


@pytest.mark.parametrize("tokens, tpot, itl", [((), None, []), ((1.0,), None, []), ((1.0, 3.0), 2.0, [2.0])])
def test_tpot_needs_two_tokens(tokens, tpot, itl):
    t = line(*tokens)
    assert (t.tpot, t.itl) == (tpot, itl)
    assert (t.ttft, t.e2e, t.decode_time) == ((1.0, tokens[-1], tokens[-1] - 1.0) if tokens else (None,) * 3)


def test_a_preemption_is_in_the_gap():
    t = line(1.0, 1.1, 5.0, 5.1, preemptions=1)
    assert max(t.itl) == pytest.approx(3.9) and t.tpot == pytest.approx(4.1 / 3)


def test_what_ended_well():
    assert [line(1.0, reason=reason).ok for reason in metrics.REASONS] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert not metrics.Timeline(0.0).ok


# ---------------------------------------------------------------- many
def test_percentiles_of_one_to_ten():
    ten = list(range(10, 0, -1))
    assert [metrics.percentile(ten, q) for q in (0, 50, 90, 100)] == [1, 5.5, 9.1, 10]
    assert metrics.percentile(ten, 99) == pytest.approx(9.91)


def test_percentiles_at_the_edge():
    assert metrics.percentile([], 50) is None
    assert [metrics.percentile([7.0], q) for q in (0, 50, 99, 100)] == [7.0] * 4
    assert metrics.percentile([3, 1], 25) == 1.5
    assert metrics.percentile((x for x in (1, 2, 3)), 50) == 2
    for q in (-1, 101):
        with pytest.raises(ValueError, match="0..100"):
            metrics.percentile([1], q)


def test_percentiles_agree_with_the_standard_library():
    values = [random.Random(0).gauss(0, 1) for _ in range(101)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [metrics.percentile(values, q) for q in range(1, 100)] == pytest.approx(cuts)


def test_every_token_has_a_deadline():
    assert SLOW.met(line(1.0, 1.5, 2.0))  # each exactly in time
    assert not SLOW.met(line(1.01, 1.2, 1.3))  # the first too late
    assert not SLOW.met(line(0.5, 1.51, 1.6))  # the second too late
    assert SLOW.met(line(0.1, 0.2, 1.9, 2.4))  # a gap of 1.7, paid by tokens that came early
    assert SLOW.met(line(11.0, 11.5, arrival=10.0))


def test_no_average_hides_a_stall():
    """TPOT 0.45 would pass at 0.5; the third token is 0.7 s too late all the same."""
    stalled = line(1.0, 1.1, 2.7, 2.75, 2.8)
    assert stalled.tpot == pytest.approx(0.45) and stalled.ttft == 1.0 and not SLOW.met(stalled)


def test_who_failed_did_not_meet_it_however_early_its_tokens():
    assert not any(SLOW.met(line(0.1, reason=reason)) for reason in metrics.REASONS[2:])
    assert not SLOW.met(metrics.Timeline(0.0)) and not SLOW.met(line())


def test_goodput_is_of_those_that_arrived():
    """Three answered in time, one answered late, one refused, one not back yet: 3 of 6."""
    run = [*(line(1.0) for _ in range(3)), line(2.0), line(reason="refused"), metrics.Timeline(0.0)]
    assert metrics.attainment(run, SLOW) == 0.5 and metrics.goodput(run, SLOW, 10.0) == 0.3
    assert metrics.goodput(run, SLOW, 0.0) is None and metrics.attainment([], SLOW) is None
    assert metrics.goodput(run, FAST, 10.0) == 0


def test_a_failure_is_in_no_latency():
    """One refused among four, which has no TTFT: not 0."""
    run = [line(1.0), line(2.0, 3.0), line(3.0, 4.0, 5.0), line(reason="refused")]
    s = metrics.summary(run, 10.0, slo=SLOW)
    assert (s["requests"], s["ok"], s["failed"]) == (4, 3, {"refused": 1})
    assert (s["ttft"]["mean"], s["ttft"]["p50"], s["ttft"]["count"]) == (2.0, 2.0, 3)
    assert (s["tpot"]["mean"], s["tpot"]["count"], s["itl"]["count"]) == (1.0, 2, 3)
    assert s["attainment"] == 0.25 and s["goodput"] == 0.1


def test_an_aborted_request_is_in_no_latency_and_no_rate():
    s = metrics.summary([line(1.0, 2.0, prompt_tokens=6), line(9.0, reason="abort", prompt_tokens=6)], 2.0)
    assert (s["ttft"]["p99"], s["e2e"]["p99"], s["output_tokens"], s["prompt_tokens"]) == (1.0, 2.0, 2, 6)
    assert (s["requests_per_second"], s["output_tokens_per_second"], s["total_tokens_per_second"]) == (
        0.5,
        1,
        4,
    )


def test_rates_per_device_and_hits():
    run = [line(1.0, 2.0, prompt_tokens=30, cached_tokens=16), line(1.0, prompt_tokens=10, preemptions=2)]
    s = metrics.summary(run, 2.0, devices=3)
    assert (s["output_tokens_per_second"], s["output_tokens_per_second_per_device"]) == (1.5, 0.5)
    assert (s["prefix_hit_rate"], s["preemptions"]) == (0.4, 2)


def test_nothing_is_not_zero():
    s = metrics.summary([], 0.0, slo=SLOW)
    undefined = (
        "requests_per_second",
        "output_tokens_per_second",
        "prefix_hit_rate",
        "attainment",
        "goodput",
    )
    assert [s[key] for key in undefined] == [None] * 5
    assert s["ttft"] == {"mean": None, "p50": None, "p90": None, "p99": None, "count": 0}
    assert "-" in metrics.table(s) and "0.0%" not in metrics.table(s)


def test_the_table_says_each_formula():
    text = metrics.table(metrics.summary([line(1.0, 1.5), line(reason="timeout")], 4.0, devices=2, slo=SLOW))
    for part in ("2 arrived, 1 ended well", "1 timeout", "1,000.0", "(e2e - TTFT) / (n - 1)", "per device",
                 "50.0% of arrived had token n by 1,000 ms + n * 500 ms"):  # fmt: skip
        assert part in text, part


# ---------------------------------------------------------------- Prometheus
CURRENT = {  # vLLM's names without the prefix, as they are scraped
    "gauge": {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"},
    "counter": {"prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "num_preemptions",
                "request_success"},
    "histogram": {"time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
                  "request_time_per_output_token_seconds", "request_queue_time_seconds",
                  "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
                  "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total"},
}  # fmt: skip


def scraped(exporter):
    """{sample's name without the prefix, with finished_reason in brackets: value}, no buckets; {family: type}."""
    values, kinds = {}, {}
    for family in text_string_to_metric_families(exporter.render().decode()):
        kinds[family.name.removeprefix(exporter.prefix)] = family.type
        for sample in family.samples:
            reason = sample.labels.get("finished_reason")
            name = sample.name.removeprefix(exporter.prefix) + (f"[{reason}]" if reason else "")
            if "le" not in sample.labels:
                values[name] = sample.value
            assert sample.labels["model_name"] == "m" and sample.labels["engine"] == "0"
    return values, kinds


def exporter(prefix="minserve:"):
    made = metrics.Exporter("m", prefix)
    made.prefix = prefix
    return made


def record(rows=(), preempted=()):
    return StepRecord(0, 0.0, {}, list(rows), [], 1, 0, 0, 0, list(preempted))


@pytest.mark.parametrize("prefix", ["minserve:", "vllm:"])
def test_names_are_the_current_ones(prefix):
    made = exporter(prefix)
    assert prefix.encode() in made.render() and made.content_type.startswith("text/plain")
    found = scraped(made)[1]
    for kind, names in CURRENT.items():
        assert {name for name, its in found.items() if its == kind} == names
    text = made.render().decode()
    assert "gpu_cache_usage_perc" not in text and ":time_per_output_token_seconds" not in text
    assert f'{prefix}request_success_total{{engine="0",finished_reason="abort",model_name="m"}} 0.0' in text


def test_two_exporters_and_a_bad_prefix():
    exporter(), exporter()  # each has a registry of its own
    with pytest.raises(ValueError, match="cannot begin"):
        exporter("my server:")


def test_one_observation_per_request_whatever_it_went_through():
    """A prompt of three chunks, preempted once and recomputed; a copy of it that was aborted; one never served."""
    made = exporter()
    chunks = [(0, 10), (10, 10), (20, 10), (0, 31), (31, 1)]
    for i, (computed, num_tokens) in enumerate(chunks):
        made.step(record([Row(7, num_tokens, computed, i > 1)], preempted=[7] if i == 3 else []))
    made.step(record())  # nothing to do: not a step of 0 tokens
    made.observe(
        line(2.0, 4.0, 4.5, queued=0.5, started=1.0, prompt_tokens=30, cached_tokens=16, preemptions=1)
    )
    made.observe(line(3.0, queued=0.5, started=1.0, prompt_tokens=30, reason="abort"))
    made.observe(line(reason="refused", prompt_tokens=30))
    values, _ = scraped(made)
    counts = {name: v for name, v in values.items() if name.endswith("_count") and v}
    assert counts == {
        "time_to_first_token_seconds_count": 1, "request_time_per_output_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1, "request_queue_time_seconds_count": 1,
        "request_prefill_time_seconds_count": 1, "request_decode_time_seconds_count": 1,
        "request_inference_time_seconds_count": 1, "request_prompt_tokens_count": 1,
        "request_generation_tokens_count": 1, "inter_token_latency_seconds_count": 2, "iteration_tokens_total_count": 5,
    }  # fmt: skip
    sums = {name: v for name, v in values.items() if name.endswith("_sum") and v}
    assert sums == {
        "time_to_first_token_seconds_sum": 2.0, "request_time_per_output_token_seconds_sum": 1.25,
        "e2e_request_latency_seconds_sum": 4.5, "request_queue_time_seconds_sum": 0.5,
        "request_prefill_time_seconds_sum": 1.0, "request_decode_time_seconds_sum": 2.5,
        "request_inference_time_seconds_sum": 3.5, "request_prompt_tokens_sum": 30,
        "request_generation_tokens_sum": 3, "inter_token_latency_seconds_sum": 2.5, "iteration_tokens_total_sum": 62,
    }  # fmt: skip
    totals = {name: v for name, v in values.items() if name.split("[")[0].endswith("_total") and v}
    assert totals == {
        "prompt_tokens_total": 60, "generation_tokens_total": 4, "prefix_cache_queries_total": 60,
        "prefix_cache_hits_total": 16, "num_preemptions_total": 1, "request_success_total[stop]": 1,
        "request_success_total[abort]": 1, "request_success_total[refused]": 1,
    }  # fmt: skip


class FakeEngine:
    """What gauges() looks at."""

    def __init__(self, running, waiting, in_use, num_pages):
        self.scheduler = type("", (), dict(running=[0] * running, waiting=[0] * waiting))()
        self.pages = type("", (), dict(in_use=in_use, num_pages=num_pages))()


def test_gauges_say_what_is_there_now():
    made, names = exporter(), ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    for engine, want in [(FakeEngine(3, 5, 6, 8), [3, 5, 0.75]), (FakeEngine(0, 0, 0, 8), [0, 0, 0])]:
        made.gauges(engine)
        values, _ = scraped(made)
        assert [values[name] for name in names] == want


# ---------------------------------------------------------------- the tests can fail
WRONG = [  # (what is wrong, the right text, the wrong one)
    ("TTFT of a token without text", "if text and self.first is None:", "if self.first is None:"),
    ("TTFT of the last text", "if text and self.first is None:", "if text:"),
    ("e2e includes the closing message", "_between(self.arrival, self._last)", "_between(self.arrival, self.finished)"),
    ("e2e ends before TTFT", "max(self.tokens[-1], self.first or self.tokens[-1]) if", "self.tokens[-1] if"),
    ("TPOT over n", "/ (len(self.tokens) - 1)", "/ len(self.tokens)"),
    ("TPOT with the first token's time", "(self._last - self.first) /", "(self._last - self.arrival) /"),
    ("TPOT of one token", "if len(self.tokens) < 2 or self.first is None:\n            return None",
     "if len(self.tokens) < 2:\n            return 0.0"),
    ("ITL per chunk", "pairwise(self.tokens)]", "pairwise(sorted(set(self.tokens)))]"),
    ("queue time from arrival", "_between(self.queued, self.started)", "_between(self.arrival, self.started)"),
    ("an abort is fine", 'OK = ("stop", "length")', 'OK = ("stop", "length", "abort")'),
    ("a length is not", 'OK = ("stop", "length")', 'OK = ("stop",)'),
    ("nearest rank", "return ordered[low] + (ordered[high] - ordered[low]) * (place - low)",
     "return ordered[round(place)]"),
    ("p50 of none is 0", "    if not ordered:\n        return None", "    if not ordered:\n        return 0.0"),
    ("ranks from one to n", "q / 100 * (len(ordered) - 1)", "min(q / 100 * len(ordered), len(ordered) - 1)"),
    ("deadlines from the first token", "begin = timeline.arrival + self.ttft",
     "begin = timeline.first or timeline.arrival + self.ttft"),
    ("only the first token counts", "in enumerate(timeline.tokens))", "in enumerate(timeline.tokens[:1]))"),
    ("limits on averages", "all(at <= begin + n * self.per_token for n, at in enumerate(timeline.tokens))",
     "timeline.ttft <= self.ttft and (timeline.tpot or 0) <= self.per_token"),
    ("token n has n + 1 gaps", "begin + n * self.per_token", "begin + (n + 1) * self.per_token"),
    ("failures may meet it", "timeline.ok\n            and timeline.tokens", "timeline.tokens"),
    ("no token is in time", "and timeline.tokens != []", ""),
    ("of those that ended well", "/ len(timelines) if timelines", "/ sum(t.ok for t in timelines) if timelines"),
    ("infinite rates", "count / seconds if seconds > 0 else None", 'count / seconds if seconds > 0 else float("inf")'),
    ("latencies of failures", "t in good for x in of(t) if x is not", "t in timelines for x in of(t) if x is not"),
    ("TTFT 0 of failures", "[x for t in good for x in of(t) if x is not None]",
     "[x or 0.0 for t in timelines for x in of(t)]"),
    ("tokens of failures", "sum(len(t.tokens) for t in good)", "sum(len(t.tokens) for t in timelines)"),
    ("devices forgotten", "_rate(output, seconds * devices)", "_rate(output, seconds)"),
    ("the old name of the cache gauge", "prefix + name, text, list(labels)",
     'prefix + name.replace("kv", "gpu"), text, list(labels)'),
    ("the old name of ITL", '"inter_token_latency_seconds"', '"time_per_output_token_seconds"'),
    ("percent, not a share", "pages.in_use / pages.num_pages", "100 * pages.in_use / pages.num_pages"),
    ("free pages", "pages.in_use / pages.num_pages", "1 - pages.in_use / pages.num_pages"),
    ("histograms of failures", "if timeline.ok:\n            for name", "if True:\n            for name"),
    ("an idle step counts", "        if record.rows:\n", "        if True:\n"),
    ("prompts that were never read", "if timeline.tokens:\n", "if True:\n"),
    ("preempted, once more", "inc(len(record.preempted))", "inc(len(record.preempted) + len(record.rows))"),
    ("created series", "prometheus.disable_created_metrics()", "prometheus.enable_created_metrics()"),
    ("any prefix", "if not re.fullmatch(", "if not re.match("),
]  # fmt: skip


@pytest.mark.parametrize("what, right, wrong", WRONG, ids=[what for what, _, _ in WRONG])
def test_a_wrong_version_is_noticed(what, right, wrong, monkeypatch):
    assert noticed(right, wrong, monkeypatch), f"no test notices: {what}"


def test_the_right_version_is_not(monkeypatch):
    assert noticed("OK = (", "OK = (", monkeypatch) == []


def noticed(right, wrong, monkeypatch) -> list[str]:
    """The tests above that fail when metrics.py has this in place of that."""
    here, found = sys.modules[__name__], []
    monkeypatch.setattr(here, "metrics", wrong_version(metrics, right, wrong))
    monkeypatch.setattr(here, "SLOW", here.metrics.SLO(1.0, 0.5))
    monkeypatch.setattr(here, "FAST", here.metrics.SLO(0.9, 0.5))
    for name, check in list(vars(here).items()):
        if name.startswith("test_") and "_version_is_" not in name:
            for arguments in _arguments(check):
                try:
                    check(*arguments)
                except (
                    AssertionError,
                    pytest.fail.Exception,
                    ArithmeticError,
                    TypeError,
                    ValueError,
                    KeyError,
                ):
                    found.append(name)
    return found


def _arguments(check):
    """The parameter sets of a test."""
    marks = [mark for mark in getattr(check, "pytestmark", []) if mark.name == "parametrize"]
    if not marks:
        return [()]
    names, values = marks[0].args
    return [value if "," in names else (value,) for value in values]
