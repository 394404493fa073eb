"""The tests of speculation can fail: each wrong version below, put in the engine's place, turns one of them red."""

import importlib
import inspect
import sys
import warnings

import pytest
import test_engine
import test_speculation_engine as tests
import test_speculative_sampling
from speculation_world import markov
from test_engine import model, tokenizer  # noqa: F401  fixtures
from test_speculation_engine import known  # noqa: F401  fixture
from wrong_versions import wrong_version

import minserve.pace
from minserve.request import SamplingParams


def whole(how, page_size=4):
    return lambda m, its, t: tests.check_batch(m, its, how, "plain", page_size)


def accepted(m, its, t):
    sampling = test_speculative_sampling
    sampling.test_the_worked_value_in_the_engine(5)


def drawn(m, its, t):
    """A few tokens that p cannot make and q can."""
    sampling = test_speculative_sampling
    target, params = markov(sampling.TARGET), dict(temperature=1.4, top_k=2)
    drafter = sampling.DRAFTERS["a draft model that draws"](target)
    e = tests.engine(target, drafter=drafter, adaptive=False)
    outputs = [
        e.add([i % 3], SamplingParams(max_tokens=30, ignore_eos=True, seed=i, **params))[0] for i in range(8)
    ]
    tests.run(e)
    answers = [(o.request.prompt[-1], o.tokens) for o in outputs]
    assert sampling.how_wrong(answers, sampling.TARGET, SamplingParams(**params)) < 1


CASES = {  # a name for each test to be rerun
    "ragged": whole("ragged"),
    "anything": whole("anything"),
    "too many": whole("too many"),
    "tree": whole("a tree"),
    "saves": lambda m, its, t: tests.test_a_draft_that_is_right_saves_its_steps(m, its),
    "logits": lambda m, its, t: tests.test_logits_at_every_place_are_those_of_the_plain_path(
        m, its, "a tree", "plain"
    ),
    "penalties": lambda m, its, t: tests.test_penalties_count_the_drafts_before_each_place(m, its, 2.0, 2.0),
    "early": lambda m, its, t: tests.test_an_end_that_is_drafted_too_early_is_refused(m, its, 0.0),
    "inside": lambda m, its, t: tests.test_an_end_inside_a_draft_is_the_end(m, its, 3),
    "most": lambda m, its, t: [tests.test_no_token_more_than_allowed(m, its, n) for n in (3, 8)],
    "stop": lambda m, its, t: tests.test_a_stop_string_inside_a_draft_never_shows(m, its, t, 5, 3),
    "min": lambda m, its, t: tests.test_a_stop_string_before_min_tokens_is_text_inside_a_draft_too(m, its, t),
    "index": lambda m, its, t: tests.test_pages_are_indexed_as_far_as_tokens_are_certain(m, its),
    "room": lambda m, its, t: [tests.test_nobody_gives_way_for_a_draft(n) for n in (5, 6, 9)],
    "prompt": lambda m, its, t: tests.test_a_prompt_does_not_give_way_for_a_draft(),
    "budget": lambda m, its, t: tests.test_a_budget_is_shared_with_drafts(m, its),
    "int4": lambda m, its, t: tests.test_quantized_caches(m, "int4", "plain"),
    "fails": lambda m, its, t: tests.test_a_drafter_that_fails_is_heard_of_once(m, its, 6),
    "elsewhere": lambda m, its, t: tests.test_a_drafter_that_fails_elsewhere_takes_nobody_along(
        m, its, "copy"
    ),
    "no token": lambda m, its, t: tests.test_a_token_that_there_is_not(m, its, 251),
    "step fails": lambda m, its, t: tests.test_a_step_that_fails_with_drafts_pending(m, its),
    "dear": lambda m, its, t: tests.test_drafts_that_do_not_pay_stop(m, its),
    "free": lambda m, its, t: tests.test_free_drafts_that_do_not_pay_are_cut(m, its),
    "between": lambda m, its, t: tests.test_preempted_between_propose_and_verify(m, its),
    "forks": lambda m, its, t: tests.test_completions_of_one_prompt_fork_and_draft(m, its),
    "drawn": drawn,
    "accepted": accepted,
}
WRONG = [  # module, right, wrong, who must notice
    # what was rejected
    ("scheduler", "                request.computed -= len(request.draft.tokens) - (len(made) - 1)\n", "", "ragged"),
    ("scheduler", "sure += len(made) - 1", "sure += len(request.draft.tokens)", "index"),
    ("scheduler", "                known += [UNKNOWN] * (len(made) - 1)\n", "                made = made[:1]\n",
     "saves"),
    ("scheduler", "                request.draft = None\n            if known", "            if known", "index"),
    ("scheduler", "end -= len(request.draft.tokens)", "pass", "saves"),
    ("scheduler", "if end >= request.most:", "if end >= request.most + 1:", "most"),
    ("scheduler", "new + sure <= self.pages.available", "self.pages.available > len(self.running)", "room"),
    ("scheduler", "(spare // S if prompts else 0)", "0", "prompt"),
    ("scheduler", "ahead, S = min(request.ahead, spare),", "ahead, S = request.ahead,", "budget"),
    ("scheduler", "request.seat, request.granted, request.draft = None, 0, None", "request.seat = None", "between"),
    # how many, and whose
    ("speculation", "request.most - len(request.tokens) - 1)", "request.most - len(request.tokens))", "most"),
    ("speculation", "if pages.shared > 1:", "if pages.shared > 99:", "int4"),
    ("speculation", "draft.cut(request.granted) if draft", "draft if draft", "too many"),
    ("speculation", "if request.draft and not 0 <=", "if False and not 0 <=", "no token"),
    ("speculation", "            self.on = False\n", "", "fails"),
    ("speculation", "        if self.on:\n            with", "        if True:\n            with", "elsewhere"),
    ("speculation", "if self.adaptive and self.on and not self.drafter.free:", "if False:", "dear"),
    ("speculation", "if self.adaptive and self.drafter.free and", "if False and", "free"),
    # the walk
    ("speculation", "said[path[-1]]] for path", "*([said[path[-1]]] if len(path) == 1 else [])] for path", "saves"),
    ("speculation", "said[path[-1]]] for path", "said[path[0]]] for path", "ragged"),
    ("speculation", "self.ids += [-1, *tokens]", "self.ids += [*tokens, -1]", "ragged"),
    ("speculation", "self.parents += [-1, *(p + 1 for p in parents)]",
     "self.parents += [-1, *range(len(tokens))]", "tree"),
    ("speculation", "            self.engine.cache.move(source, target)\n", "            pass\n", "logits"),
    ("speculation", "ends, [max(its[-1], 0) for its in made])", "ends, [0 for _ in made])", "ragged"),
    # who counts what
    ("speculation", "sampler.note(seats, new)", "sampler.note(seats[-1:], new[-1:])", "penalties"),
    ("speculation", "before.append([*before[start + 1 + parent], token])", "before.append([])", "penalties"),
    ("speculation", "before.append([*before[start + 1 + parent], token])",
     "before.append([*before[-1], token])", "tree"),
    ("speculation", "logits, batch.seats, batch.made, drawn, places.drafts)",
     "logits, batch.seats, batch.made[places.first], drawn, places.drafts)", "early"),
    ("speculation", "sampler.logprobs(logits, new, seats, ways)",
     "sampler.logprobs(logits, new, seats, [p - (p > 0) for p in ways])", "ragged"),
    ("sampler", "drafts and [drafts.before[i] for i in rows]", "None", "penalties"),
    ("sampler", "drafts.before[i] for i in rows", "drafts.before[i] for i in range(len(rows))", "ragged"),
    ("sampler", "            if judged:\n                tokens[where[judged]] = theirs\n", "", "accepted"),
    ("sampler", "            theirs = self._judge(x, rows, judged, seats, positions, drafts) if judged else None\n"
     "            tokens[where] = self._choose(x, seats[rows], positions[rows], asks[rows])  # x is used up\n",
     "            tokens[where] = self._choose(x, seats[rows], positions[rows], asks[rows])\n"
     "            theirs = self._judge(x, rows, judged, seats, positions, drafts) if judged else None\n", "drawn"),
    # places
    ("batch", "            positions[:singles] += to_device(shifts[:singles], self.device)\n", "", "logits"),
    ("batch", "made, trees = made + shifts,", "made, trees = made,", "tree"),
    ("batch", "seen.append([*seen[parent + 1], i])", "seen.append([*seen[i - 1], i])", "logits"),
    ("batch", "columns = [len(r.tokens) - 1 + i for r", "columns = [len(r.tokens) + i for r", "ragged"),
    ("batch", "= np.flatnonzero(computed + new >= known)", "= np.flatnonzero(computed + new == known)", "saves"),
    # the reader
    ("engine", "            request.draft = None\n            try", "            try", "step fails"),
    ("engine", "                    del request.tokens[len(request.prompt) + output.told :]\n", "", "stop"),
    ("engine", "for token in request.tokens[at:]:", "for token in request.tokens[at : at + 1]:", "stop"),
    ("output", "self.told > self.request.params.min_tokens", "len(self.tokens) > self.request.params.min_tokens",
     "min"),
]  # fmt: skip


def broken_engine(monkeypatch, module, right, wrong):
    """The engine's module, made anew around the faulty one."""
    faulty = wrong_version(importlib.import_module(f"minserve.{module}"), right, wrong)
    if module == "engine":
        return faulty
    monkeypatch.setitem(sys.modules, f"minserve.{module}", faulty)
    monkeypatch.setattr(sys.modules["minserve"], module, faulty, raising=False)
    made = type(pytest)("minserve.engine")
    exec(
        compile(inspect.getsource(importlib.import_module("minserve.engine")), "engine.py", "exec"),
        made.__dict__,
    )
    return made


@pytest.mark.parametrize(
    "module, right, wrong, case", WRONG, ids=[f"{w[0]}: {w[2].strip()[:40]}" for w in WRONG]
)
def test_wrong_speculation_is_noticed(monkeypatch, model, tokenizer, known, module, right, wrong, case):  # noqa: F811
    engine = broken_engine(monkeypatch, module, right, wrong)
    monkeypatch.setattr(test_engine, "Engine", engine.Engine)
    monkeypatch.setattr(test_speculative_sampling, "LLM", engine.LLM)
    if module == "scheduler":
        monkeypatch.setattr(tests, "Scheduler", sys.modules["minserve.scheduler"].Scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((Exception, pytest.fail.Exception)) as noticed:  # wrong answers, or trouble
            CASES[case](model, known, tokenizer)
    assert not isinstance(noticed.value, (SyntaxError, NameError, ImportError))


PACES = [
    ("(B + kept) / (cost + self.draft * deep)", "kept / (cost + self.draft * deep)"),
    ("(B + kept) / (cost + self.draft * deep)", "B + kept"),
    ("(B + kept) / (cost + self.draft * deep)", "(B + kept) / cost"),
    ("chance ** np.arange(1, most + 1)", "chance ** np.arange(most)"),
    ("self.seconds(B + np.arange(len(kept)))", "self.seconds(1 + np.arange(len(kept)))"),
    ("min(seconds, before + 0.2 * (seconds - before))", "max(seconds, before)"),
    ("0.9 * before[0] + kept, 0.9 * before[1] + tried", "before[0] + kept, before[1] + tried"),
    ("if self.turns % self.LOOK_AGAIN == 0:", "if False:"),
    ("if not most or B not in self.step:", "if not most:"),
    ("(kept + 2 * self.all[0] / self.all[1]) / (tried + 2)", "(kept + 1.4) / (tried + 2)"),
    ("0.99 * self.all[0] + kept, 0.99 * self.all[1] + tried", "kept, max(tried, 1)"),
]


@pytest.mark.parametrize("right, wrong", PACES, ids=[wrong for _, wrong in PACES])
def test_a_wrong_pace_is_noticed(monkeypatch, right, wrong):
    import test_speculation as units

    monkeypatch.setattr(units, "Pace", wrong_version(minserve.pace, right, wrong).Pace)
    with pytest.raises(AssertionError):
        for cost in units.COSTS:
            units.test_the_number_of_drafts_is_the_one_that_makes_most_tokens_per_second(cost)
        units.test_by_hand()
        units.test_a_hiccup_is_forgotten()
        units.test_recent_drafts_count_more()
        units.test_what_is_known_is_looked_at_again()
        units.test_the_step_without_drafts_is_measured_first()
        units.test_a_new_request_is_thought_to_be_like_the_others()


@pytest.mark.parametrize("case", CASES)
def test_right_speculation_passes(model, tokenizer, known, case):  # noqa: F811
    CASES[case](model, known, tokenizer)
