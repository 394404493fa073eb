"""The engine's tests can fail: each wrong version below, put in the engine's place, turns one of them red."""

import importlib
import inspect
import sys
from unittest import mock

import pytest
import test_engine
import test_overlap
from test_engine import model, tokenizer  # noqa: F401  fixtures

from minserve.request import Request

PROMPTS = test_engine.PROMPTS


def plainly(case):
    """Run it on the plain path, whatever the fastest one is."""
    with mock.patch.dict(test_engine.Engine.__init__.__kwdefaults__, step="plain"):
        case()


def all_of(m):
    return {"llama-3": m}


CASES = {  # a name for each test to be rerun
    "alone": lambda m, t: test_engine.test_each_prompt_gets_the_answer_it_gets_alone(
        m, test_engine.WholePrompts
    ),
    "mixed": lambda m, t: test_engine.test_rows_of_one_batch_do_not_touch_each_other(m),
    "n": lambda m, t: [
        test_engine.test_completions_of_one_prompt_differ_and_repeat(m, p) for p in PROMPTS[:3]
    ],
    "preempted": lambda m, t: test_engine.test_penalties_remember_across_a_preemption(m),
    "logprobs": lambda m, t: test_engine.test_logprobs_name_the_chosen_token_and_the_best(m),
    "stream": lambda m, t: test_engine.test_streamed_text_is_the_text(m, t),
    "stop": lambda m, t: test_engine.test_a_stop_string_never_shows(m, t, 1, 3),
    "last": lambda m, t: test_engine.test_a_stop_string_in_the_last_token_allowed_is_a_stop(m, t),
    "held": lambda m, t: test_engine.test_held_back_text_comes_out_at_the_end(m, t),
    "min": lambda m, t: test_engine.test_min_tokens_come_before_any_stop_string(m, t),
    "raise": lambda m, t: test_engine.test_one_failing_request_fails_alone(m, "raise", "injected", 4),
    "nan": lambda m, t: test_engine.test_one_failing_request_fails_alone(m, "nan", "logits hold NaN", 4),
    "text": lambda m, t: test_engine.test_trouble_with_one_text_is_that_texts_alone(m, t),
    "abort": lambda m, t: [
        test_engine.test_abort_at_any_moment_gives_everything_back(m, i) for i in range(7)
    ],
    "close": lambda m, t: test_engine.test_close_in_the_middle_ends_all_and_frees_all(m),
    "deadline": lambda m, t: test_engine.test_a_deadline_ends_a_request_wherever_it_is(m),
    "queue": lambda m, t: test_engine.test_a_full_queue_refuses_all_of_a_request_or_none(m),
    "ctrl-c": lambda m, t: test_engine.test_ctrl_c_leaves_nothing_behind(m),
    "log": lambda m, t: test_engine.test_the_log_accounts_for_every_token_and_page(m),
    "plain": lambda m, t: plainly(lambda: CASES["alone"](m, t)),
    "mixed plain": lambda m, t: plainly(lambda: CASES["mixed"](m, t)),
    "salt": lambda m, t: test_engine.test_salts_keep_tenants_apart(m),
    # with a step in flight
    "order": lambda m, t: test_overlap.test_a_step_lands_after_the_next_one_is_on_its_way(all_of(m), "plain"),
    "at once": lambda m, t: test_overlap.test_without_overlap_a_step_lands_at_once(all_of(m)),
    "record": lambda m, t: test_overlap.test_the_last_token_allowed_is_nobodys_input(all_of(m)),
    "to host": lambda m, t: test_overlap.test_tokens_are_waited_for_by_an_event_of_their_own(),
    "close in flight": lambda m, t: test_overlap.test_close_with_a_step_in_flight(all_of(m), "plain", 3),
    "fails in flight": lambda m, t: test_overlap.test_one_failing_request_fails_alone(
        all_of(m), None, t, "plain", "raise", "injected", 4
    ),
    "stops": lambda m, t: test_overlap.test_a_request_that_stops_while_the_next_step_fails(m),
    "ends": lambda m, t: test_overlap.test_who_ends_in_a_step_that_fails_hears_of_it_once(m, t, 4),
    "none drawn": lambda m, t: test_overlap.test_a_token_that_is_none_is_never_looked_up(m),
    "text in flight": lambda m, t: test_overlap.test_streamed_text_is_the_text_in_flight(m, t),
    "day": lambda m, t: [test_overlap.check_day(all_of(m), t, seed) for seed in (0, 2)],
}
WRONG = [  # module, right, wrong, who must notice
    ("engine", "self.cache.copy(self.pages.copies)", "pass", "n"),
    ("engine", "self.pages.copies.clear()", "self.pages.copies", "n"),
    ("engine", "self.packer.note(batch, sampled.tokens)", "pass", "alone"),
    ("engine", "batch.seats, batch.made, drawn)", "batch.seats, batch.made * 0, drawn)", "mixed"),
    ("engine", "r.prompt, r.outputs, r.stop_ids", "r.prompt, [], r.stop_ids", "preempted"),
    ("engine", "seed_of(seed, index)", "seed", "n"),
    ("engine", "rows=batch.last), None, None", "rows=batch.last - 1), None, None", "plain"),
    ("engine", "if its[-1] < 0 and", "if its[-1] < -1 and", "nan"),
    # a step in flight
    ("engine", "landing, self.flight = self.flight, None", "landing = self.flight", "fails in flight"),
    ("engine", "            flight = self._launch(plan, record, marks)\n",
     "            news = self._land(landing, [])\n"
     "            landing, flight = None, self._launch(plan, record, marks)\n", "order"),
    ("engine", "self._land(landing, marks)", "self._land(flight, marks)", "order"),
    ("engine", "self._land(landing, []) + self._land(flight, marks)", "self._land(landing, marks)", "at once"),
    ("engine", "if plan or self.flight:", "if plan:", "order"),
    ("engine", "if plan or late or self.flight else None", "if plan or late else None", "record"),
    ("engine", "self._land(landing, []) + self._one_by_one(plan, record)",
     "self._one_by_one(plan, record)", "fails in flight"),
    ("engine", "self._land(landing, []) + self._one_by_one(plan, record)",
     "self._one_by_one(plan, record) + self._land(landing, [])", "fails in flight"),
    ("engine", "return list(heard.items())", "return [*heard.items()] * 2", "ends"),
    ("engine", 'heard.get(output, "") + delta', "delta", "ends"),
    ("engine", "                continue  # it ended with the step before", "                pass  # it ended",
     "stops"),
    ("engine", "if its[-1] < 0 and plan[b][0].status is not Status.FINISHED:", "if its[-1] < 0:",
     "none drawn"),
    ("engine", "self._tell(output, ends[b], its)", "self._tell(output, -1, its)", "text in flight"),
    ("engine", "in request.tokens[at:]:", "in request.tokens[at:] or [request.tokens[at]]:", "day"),
    ("engine", "if token == UNKNOWN:", "if False:", "text in flight"),
    ("engine", "self.scheduler.advance(batch.plan), made", "self.scheduler.advance(batch.plan)[::-1], made",
     "alone"),
    ("engine", "            tokens[b] = its\n", "            tokens[-1 - b] = its\n", "alone"),
    ("engine", "        self.flight = None\n        return self.abort", "        return self.abort", "close in flight"),
    ("batch", "self.arrived.synchronize()", "pass", "to host"),
    ("batch", "tokens.int().clamp(min=0)", "tokens.int()", "none drawn"),
    # drawn before the sampler
    ("sampler", "asks & ~np.uint8(LOGPROBS | known)", "asks & ~np.uint8(LOGPROBS | DRAWN)", "mixed"),
    ("sampler", "tokens, known = drawn or (None, 0)", "tokens, known = drawn or (None, DRAWN)", "mixed plain"),
    ("engine", "self._fail(request, its_own)", "self._fail(request, its_own); return news", "raise"),
    ("engine", "except Exception:  # whatever", "except KeyError:  # whatever", "raise"),
    ("engine", "delta += self._end(request)[1]", "self._end(request)", "held"),
    ("engine", "self.scheduler.finish(request, \"stop\")\n", "pass\n", "stop"),
    ("engine", 'request.finish_reason = "stop"  # also', "pass  # also", "last"),
    ("engine", "            if not output.finished:", "            if not output.finished and not output.index:",
     "abort"),
    ("engine", "self.abort(outputs[:i])", "pass", "queue"),
    ("engine", "late = self.scheduler.expire(time.monotonic())", "late = []", "deadline"),
    ("engine", "prompt, params or SamplingParams(), priority=priority, deadline=deadline, salt=salt",
     "prompt, params or SamplingParams(), priority=priority, deadline=deadline", "salt"),
    ("engine", "            except BaseException:  # Ctrl-C", "            except ValueError:  # Ctrl-C", "ctrl-c"),
    ("engine", "itertools.repeat(None)", "itertools.repeat(None, 0)", "stream"),
    ("output", "self._stops.flush()", '""', "held"),
    ("output", "if self.told > self.request.params.min_tokens", "if True", "min"),
    ("output", "delta, stopped = self._stops.push(delta)", "_, stopped = self._stops.push(delta)", "stop"),
    ("output", "self.logprobs.append(logprobs)", "self.logprobs = [logprobs]", "logprobs"),
    ("batch", "+ 1] = known", "] = known", "alone"),
    ("batch", "request.dirty = end", "request.dirty = end + 1", "alone"),
    ("batch", "computed + new >= known", "computed + new >= 0", "raise"),
]  # fmt: skip


@pytest.mark.parametrize("module, right, wrong, case", WRONG, ids=[f"{w[0]}: {w[2][:40]}" for w in WRONG])
def test_a_wrong_engine_is_noticed(monkeypatch, model, tokenizer, module, right, wrong, case):  # noqa: F811
    source = inspect.getsource(importlib.import_module(f"minserve.{module}"))
    assert source.count(right) == 1, f"{module}.py holds {source.count(right)} places like: {right}"
    broken = type(pytest)(f"minserve.{module}")
    exec(compile(source.replace(right, wrong), f"{module}.py", "exec"), broken.__dict__)
    engine = broken
    if module != "engine":  # an engine that uses the broken part
        monkeypatch.setitem(sys.modules, f"minserve.{module}", broken)
        engine = type(pytest)("minserve.engine")
        right_engine = inspect.getsource(importlib.import_module("minserve.engine"))
        exec(compile(right_engine, "engine.py", "exec"), engine.__dict__)
    monkeypatch.setattr(test_engine, "Engine", engine.Engine)
    for tests in (test_engine, test_overlap):
        monkeypatch.setattr(tests, "LLM", engine.LLM)
    run = CASES[case]
    with pytest.raises(Exception) as noticed:  # a wrong answer, or whatever trouble it gets into
        run(model, tokenizer)
    assert not isinstance(noticed.value, (SyntaxError, NameError))


def test_a_token_that_shows_before_it_is_known_is_noticed(monkeypatch, model, tokenizer):  # noqa: F811
    monkeypatch.setattr(Request, "outputs", property(lambda r: r.tokens[len(r.prompt) :]))
    with pytest.raises(AssertionError):
        CASES["text in flight"](model, tokenizer)


@pytest.mark.parametrize("case", CASES)
def test_the_right_engine_passes(model, tokenizer, case):  # noqa: F811
    CASES[case](model, tokenizer)
