"""The tests of grammars can fail: each wrong version below, put in its module's place, turns one of them red."""

import pytest
import test_structured as tests
from test_structured import grammars, model, tokenizer  # noqa: F401  fixtures
from wrong_versions import wrong_version

from minserve import engine, request, sampler, speculation, structured

ROAD = tests.test_the_same_answers_on_every_road_and_the_neighbours_do_not_notice
CASES = {  # who must notice
    "valid": lambda m, t, g, _: tests.test_every_answer_is_valid_whatever_the_seed(
        m, t, g, tests.PERSON_JSON
    ),
    "choice": lambda m, t, g, _: tests.test_every_answer_is_valid_whatever_the_seed(
        m, t, g, tests.GRAMMARS[3]
    ),
    "cut": lambda m, t, g, _: tests.test_max_tokens_cuts_and_an_end_on_the_last_token_is_an_end(m, t, g),
    "eos": lambda m, t, g, _: tests.test_an_end_token_is_drawn_only_where_the_text_may_end(m, t, g),
    "several": lambda m, t, g, _: tests.test_any_of_several_end_tokens_ends(m, t),
    "blanks": lambda m, t, g, _: tests.test_a_model_that_loves_blanks_comes_out_of_them(m, t, g),
    "logprobs": lambda m, t, g, _: tests.test_logprobs_are_the_models_own(m, t, g),
    "n": lambda m, t, g, _: tests.test_completions_of_one_prompt_have_a_grammar_each(m, t, g),
    "made": lambda m, t, g, _: tests.test_tokens_that_somebody_else_made_count(m, t, g),
    "min": lambda m, t, g, _: tests.test_a_grammar_and_min_tokens_exclude_each_other(m, t, g),
    "again": lambda m, t, g, _: tests.test_what_a_recorded_step_drew_is_drawn_again(g, sampler.DRAWN, 1.0),
    "graph": lambda m, t, g, _: ROAD(m, t, g, dict(step="graph")),
    "overlap": lambda m, t, g, _: ROAD(m, t, g, dict(step="plain", overlap=True)),
    "drafts": lambda m, t, g, _: ROAD(m, t, g, dict(step="plain", drafter="ngram", adaptive=False)),
    "tight": lambda m, t, g, _: ROAD(m, t, g, dict(num_pages=24)),
    "flight": lambda m, t, g, _: tests.test_steps_without_a_grammar_still_overlap(m, t, g),
    "nowhere": lambda m, t, g, _: tests.test_a_grammar_that_leads_nowhere_ends_its_own_request_only(m, t, g),
    "padded": lambda m, t, g, _: tests.test_logits_behind_the_vocabulary_are_nobodys(t),
    "refused": lambda m, t, g, _: [
        tests.test_a_grammar_that_cannot_be_compiled_is_refused_at_the_door(g, bad) for bad in tests.BAD
    ],
    "begin": lambda m, t, g, _: tests.test_a_grammar_that_nothing_can_begin_is_refused_at_the_door(g),
    "asked": lambda m, t, g, _: [tests.test_both_fields_ask_for_one_grammar(*asked) for asked in tests.ASKED],
    "bad": lambda m, t, g, _: [tests.test_what_cannot_be_said_is_refused(*bad) for bad in tests.REFUSED],
    "kept": lambda m, t, g, patch: tests.test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(
        t, patch
    ),
    "library": lambda m, t, g, patch: tests.test_without_the_library_the_caller_hears_how_to_get_it(t, patch),
}
WRONG = [  # module, right, wrong, who must notice
    (structured, 'bitorder="little"', 'bitorder="big"', "valid"),
    (structured, "logits.masked_fill_(", "logits.masked_fill(", "valid"),
    (structured, "count=len(logits)", "count=len(logits) - 1", "padded"),
    (structured, "eos_token=eos)", "eos_token=eos[0])", "several"),
    (structured, "if self._matcher.is_error() or not allowed.any():", "if False:", "nowhere"),
    (structured, "return self._matcher.is_stopped()", "return False", "cut"),
    (structured, "return self._matcher.is_stopped()", "return self._matcher.is_accepting()", "goes on"),
    (structured, "if not self._matcher.consume_token(token):", "if False:", "made"),
    (structured, "return Constraint(self._matcher.deep_copy())", "return Constraint(self._matcher)", "n"),
    (structured, "self._compiled.pop(grammar, None)", "self._compiled.get(grammar)", "kept"),
    (structured, "        self._compiled[grammar] = found\n", "        pass\n", "kept"),
    (structured, "if len(self._compiled) > KEPT:", "if False:", "kept"),
    (structured, "{1,20}", "+", "blanks"),
    (structured, "overrides=options", "overrides={}", "blanks"),
    (structured, "return json.dumps(schema)", "return json.dumps(schema, sort_keys=True)", "asked"),
    (structured, "json.dumps(value))", "str(value))", "asked"),
    (structured, "if matcher.is_error():", "if False:", "refused"),
    (structured, "if not any(begun.compute_bitmask()) or begun.is_error():", "if False:", "begin"),
    (structured, "except ImportError:", "except KeyError:", "library"),
    (structured, "if len(found) > 1:", "if len(found) > 2:", "bad"),
    (structured, 'elif kind != "text":', "elif False:", "bad"),
    (structured, "value not in (None, False)", "True", "asked"),
    (request, "self.constraint = self.constraint.copy()", "pass", "n"),
    (request, "                self.constraint.accept(token)", "                pass", "made"),
    (sampler, "GRAMMAR: constraint is not None,", "", "valid"),
    (sampler, "LOGPROBS | known)", "LOGPROBS | GRAMMAR | known)", "graph"),
    (sampler, "asks & ~np.uint8(LOGPROBS | known)", "asks & ~np.uint8(LOGPROBS | known | known << 2)", "again"),
    (sampler, "self.constraints[seats[row]].mask(x[row])", "self.constraints[row].mask(x[row])", "valid"),
    (sampler, "self.constraints[seats[row]].mask(x[row])", "self.constraints[seats[row]].mask(x[0])", "valid"),
    (sampler, "        x = logits.index_select(0, where).float()", "        x = logits", "logprobs"),
    (speculation, "        if request.constraint:", "        if False:", "drafts"),
    (engine, "if self.overlap and not any(r.constraint for r, _ in plan):", "if self.overlap:", "overlap"),
    (engine, "if self.overlap and not any(r.constraint for r, _ in plan):", "if False:", "flight"),
    (engine, "self._land(landing, []) + self._land(flight, marks)", "self._land(flight, marks)", "flight"),
    (engine, 'heard[output] = heard.get(output, "") + delta', "heard[output] = delta", "flight"),
    (engine, "return list(heard.items())", "return news", "flight"),
    (engine, 'if fields.get("constraint") and params.min_tokens:', "if False:", "min"),
    (engine, "request.constraint is not None and request.constraint.accept(token)", "False", "valid"),
    (engine, "if stopped or complete:", "if stopped:", "cut"),
    (engine, 'request.finish_reason = "stop"  # also', "pass  # also", "cut"),
    (engine, "r.stop_ids, r.constraint)", "r.stop_ids)", "valid"),
    (engine, "except Exception:  # whatever", "except KeyError:  # whatever", "nowhere"),
]  # fmt: skip


def put_in_place(monkeypatch, module, made):
    """Wherever the tests or the engine look its things up."""
    for place in (tests, engine, structured):
        for name, its in vars(module).items():
            if getattr(its, "__module__", None) == module.__name__ and getattr(place, name, None) is its:
                monkeypatch.setattr(place, name, getattr(made, name))


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{w[0].__name__[9:]}: {w[2].strip()[:40]}" for w in WRONG])
def test_a_wrong_version_is_noticed(monkeypatch, model, tokenizer, wrong):  # noqa: F811
    module, right, instead, case = wrong
    made = wrong_version(module, right, instead)
    monkeypatch.setattr(tests, "structured", made if module is structured else structured)
    put_in_place(monkeypatch, module, made)
    with pytest.raises(BaseException) as noticed:
        CASES[case](model, tokenizer, tests.Grammars(tokenizer), monkeypatch)
    assert not isinstance(noticed.value, (SyntaxError, NameError, KeyboardInterrupt))


@pytest.mark.parametrize("case", CASES)
def test_the_right_one_passes(monkeypatch, model, tokenizer, grammars, case):  # noqa: F811
    CASES[case](model, tokenizer, grammars, monkeypatch)
