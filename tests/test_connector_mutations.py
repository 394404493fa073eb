"""The tests can fail: each wrong version below of what carries keys and values, or hands requests over, is noticed."""

import inspect
import types

import pytest
import test_connector
import test_disaggregated
from test_connector import Two
from wrong_versions import wrong_version

from minserve.cluster import connector, file_connector, gloo_connector, handover, inbox, link, transfer
from minserve.cluster.inbox import InProcess
from minserve.weights import load

TOKENS = "test_the_tokens_are_those_of_one_engine(two, '{}', None)"
WHOLE, LAYER = TOKENS.format("whole"), TOKENS.format("layer")

# (what is wrong, module, the right text, the wrong one, which test there notices)
WRONG = [
    # ------------------------------------------------------------ what leaves
    ("a page that is not full stays behind", connector, "request.pages[first : pages_for(end, S)]",
     "request.pages[first : end // S]", WHOLE),
    ("pages that were cached stay behind", connector, "first = sending.tokens // S",
     "first = request.computed // S", "test_prefixes_that_either_side_knows(two, 'layer')"),
    ("a page begun in the last chunk is not sent again", connector, "first = sending.tokens // S",
     "first = pages_for(sending.tokens, S)", "test_a_chunk_that_ends_inside_a_page_sends_the_page_again(two)"),
    ("a layer leaves twice", connector, "if layer not in sending.layers]", "]",
     "test_one_message_or_one_for_each_layer_of_each_chunk(two)"),
    ("what no layer told of stays behind", connector, "range(self.shape.layers), ends=True",
     "[], ends=True", LAYER),
    ("every chunk is sent as if it were the whole", connector,
     'if self.mode == "layer" or end == len(request.prompt):', "if True:",
     "test_one_message_or_one_for_each_layer_of_each_chunk(two)"),
    ("a step that failed has sent what the next one has not", connector,
     "sending.step, sending.layers = batch, set()", "sending.step = batch", LAYER),
    ("a key may belong to two", connector, "if sending.request is not request:", "if False:",
     "test_a_key_belongs_to_whoever_came_first(two)"),
    ("a link that is far behind tells nobody", connector,
     "part.nbytes):\n            sending.lost = True", "part.nbytes):\n            pass",
     "test_a_link_that_falls_behind_refuses_rather_than_fill_the_memory(two, capfd)"),
    ("a link that is broken tells nobody", connector, "sending.lost = True  # the", "pass  # the",
     "test_a_broken_link_is_not_sent_to(model, tmp_path, capfd)"),
    ("an int4 cache is taken", connector, '== "int4"', '== "int5"',
     "test_caches_and_models_that_cannot_be_handed_over(model, checkpoints)"),
    # ------------------------------------------------------------ requests that end
    ("a token that ended the answer goes along", connector, 'again = request.finish_reason == "stop" or ',
     "again = ", "test_the_first_token_is_drawn_again_where_it_ended_the_answer_or_needs_its_logprobs(two)"),
    ("a token without its logprobs goes along", connector, " or request.params.logprobs is not None", "",
     "test_the_first_token_is_drawn_again_where_it_ended_the_answer_or_needs_its_logprobs(two)"),
    ("who was aborted is said to be complete", connector, "if not sending.complete:", "if False:",
     "test_a_request_that_is_aborted_there_lets_nobody_wait(two, 'layer')"),
    ("who was aborted is remembered for ever", connector, "self._forget()\n\n", "pass\n\n",
     "test_the_next_step_forgets_who_was_aborted(two)"),
    ("who is complete is forgotten at once", connector, "sending.complete and sending.completed > old", "False",
     "test_many_at_once_with_others_among_them(two)"),
    ("who is complete is remembered for ever", connector, "sending.completed > old", "True",
     "test_whoever_is_not_asked_for_is_forgotten_after_the_lease(two)"),
    # ------------------------------------------------------------ what arrives
    ("it is complete with the first chunk", transfer, "if part.end == part.num_tokens:", "if True:", LAYER),
    ("pages that were cached shift the others", transfer, "x[skip : skip + len(targets)]",
     "x[: len(targets)]", "test_prefixes_that_either_side_knows(two, 'whole')"),
    ("an older copy of a page wins", transfer, "in self.parts:  # in order", "in reversed(self.parts):  # in order",
     "test_a_chunk_that_ends_inside_a_page_sends_the_page_again(two)"),
    ("another prompt's are taken", transfer,
     "if (part.prompt, part.num_tokens) != (self._prompt, self.num_tokens):", "if False:",
     "test_keys_and_values_of_another_prompt_are_refused(two, capfd)"),
    ("another engine's are taken", transfer, "self.connector.shape.check(part.shape)", "pass",
     "test_pages_of_another_engine_are_refused_by_name(model, checkpoints, 'dtype', capfd)"),
    ("half of them are taken", transfer, "if len(pages) < need:", "if False:",
     "test_half_of_it_is_not_taken(two)"),
    ("a key may be a path", transfer, "KEY.fullmatch(key)", "KEY.match(key)", "test_what_is_no_key('a/b')"),
    ("a truncated message is an error of another kind", transfer, "except (SafetensorError, KeyError",
     "except (KeyError", "test_what_is_no_message(40)"),
    # ------------------------------------------------------------ the shelf, the folder, the link
    ("what comes late is kept", inbox, "if part.key not in self._dropped:", "if True:",
     "test_messages_twice_late_or_never()"),
    ("what nobody fetches is kept", inbox, "at in self._news.items() if at < old", "at in self._news.items() if False",
     "test_messages_twice_late_or_never()"),
    ("a lease does not begin anew", inbox, "self._news[part.key] = self.clock()",
     "self._news.setdefault(part.key, self.clock())", "test_messages_twice_late_or_never()"),
    ("keys are remembered for ever", inbox, "at in self._dropped.items() if at < old",
     "at in self._dropped.items() if False", "test_messages_twice_late_or_never()"),
    ("who waits does not hear that the link is broken", inbox, "self.error or key in", "key in",
     "test_a_link_that_breaks_wakes_whoever_waits()"),
    ("who waits does not hear that nobody wants it", inbox, "self.error or key in self._dropped or", "self.error or",
     "test_a_link_that_breaks_wakes_whoever_waits()"),
    ("files that nobody fetches stay", file_connector, "if key in self._dropped or at < time.time() - self.lease:",
     "if False:", "test_files_nobody_fetches_are_deleted_after_the_lease(model, tmp_path)"),
    ("files of a key that is given up stay", file_connector, "        self._delete(key)\n\n", "        pass\n\n",
     "test_a_file_that_is_not_whole_is_not_seen_and_a_broken_one_is_no_use(model, tmp_path, capfd)"),
    ("latency costs nothing", link, "messages * self.latency + ", "", "test_the_link_s_arithmetic()"),
    ("messages do not wait", link, "self._closed.wait(max(0.0, free - time.monotonic()))", "pass",
     "test_messages_come_in_order_and_never_sooner_than_the_link_allows(link.Link(latency=0.02))"),
    ("messages wait side by side", link, "free = max(free, given) +", "free = given +",
     "test_messages_come_in_order_and_never_sooner_than_the_link_allows(link.Link(latency=0.02))"),
    ("nothing is too much", link, "if self.waiting_bytes + num_bytes > self.most or ", "if ",
     "test_a_link_that_falls_behind_refuses_rather_than_fill_the_memory(two, capfd)"),
    ("a failure ends the thread", link, "                self.error = error", "                raise",
     "test_one_message_that_fails_does_not_stop_the_next(two)"),
    # ------------------------------------------------------------ gloo
    ("who closes does not wait for its thread", gloo_connector, "self._thread.join(5 * NOD_SECONDS)", "pass",
     "test_who_closes_leaves_no_thread_and_the_other_hears_it(model, tmp_path, 1, 1.0)"),
    ("an idle link is silent for long", gloo_connector, "min(self.lease / 4, NOD_SECONDS)", "self.lease / 4",
     "test_who_closes_leaves_no_thread_and_the_other_hears_it(model, tmp_path, 1, 40.0)"),
    ("sockets stay open", gloo_connector, "self._group = None  # its", "pass  # its",
     "test_who_closes_leaves_no_thread_and_the_other_hears_it(model, tmp_path, 1, 40.0)"),
    ("who waits for the other cannot be closed", gloo_connector, "if self._closed.wait(0.02):",
     "if time.sleep(0.02):", "test_who_waits_for_the_other_can_be_closed(model, tmp_path)"),
    ("nobody to meet, and it waits for ever", gloo_connector, "if time.monotonic() > late:",
     "if self._closed.is_set():", "test_nobody_to_meet(model, tmp_path, capfd)"),
    # ------------------------------------------------------------ the hand-over
    ("the last token wanted goes along", handover, " or len(tokens) >= (params.max_tokens or len(tokens) + 1)", "",
     "test_which_tokens_are_continued()"),
    ("tokens go along without their logprobs", handover, "params.logprobs is not None or ", "",
     "test_which_tokens_are_continued()"),
    ("the first half may end before it may", handover, 'kept["min_tokens"] = 1', 'kept.pop("min_tokens")',
     "test_what_the_halves_are_asked()"),
    ("the first half is asked for all", handover, '{"max_tokens": 1, ', "{", "test_what_the_halves_are_asked()"),
    ("several answers are divided", handover, '(asked.get("n") or 1) != 1 or ', "", "test_what_the_halves_are_asked()"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("llama-3"))


def put_in_place(monkeypatch, module, right, wrong):
    """The module's classes and functions, as far as they changed, become those of the wrong version."""
    made = wrong_version(module, right, wrong)
    for name, its in vars(made).items():
        real = getattr(module, name, None)
        if getattr(its, "__module__", None) != module.__name__ or real is None:
            continue
        if isinstance(its, type):
            for member, value in vars(its).items():
                if changed(value, vars(real).get(member)):
                    monkeypatch.setattr(real, member, value)
        elif changed(its, real):
            for place in (module, test_connector, test_disaggregated):
                if hasattr(place, name):
                    monkeypatch.setattr(place, name, its)


def changed(a, b) -> bool:
    a, b = (getattr(f, "__func__", f) for f in (a, b))  # of a class method
    functions = isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType)
    return functions and does(a.__code__) != does(b.__code__)


def does(code) -> tuple:
    """What it does, wherever it stands."""
    inside = [does(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, inside


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("what", [wrong[0] for wrong in WRONG])
def test_a_wrong_version_is_noticed(what, model, checkpoints, tmp_path, capfd, monkeypatch):
    _, module, right, wrong, noticed = next(w for w in WRONG if w[0] == what)
    made = []

    def two(mode="whole", lease=1.0, link=None, **options):
        made.append(Two(model, InProcess.pair(mode=mode, lease=lease, link=link), **options))
        return made[-1]

    where = test_connector if hasattr(test_connector, noticed.split("(")[0]) else test_disaggregated
    known = dict(two=two, model=model, checkpoints=checkpoints, tmp_path=tmp_path, capfd=capfd, link=link)
    put_in_place(monkeypatch, module, right, wrong)
    monkeypatch.setattr(test_connector, "PATIENCE", 4)  # what never comes is not waited for
    try:
        with pytest.raises((Exception, pytest.fail.Exception)):  # however it fails
            eval(noticed, vars(where) | known)
    finally:
        monkeypatch.undo()
        for its in made:
            its.close()
        while test_connector.Gloo.made:  # a test that fails closes nothing
            test_connector.Gloo.made.pop().close()


def test_every_test_named_here_exists():
    for _, module, right, _, noticed in WRONG:
        name = noticed.split("(")[0]
        assert hasattr(test_connector, name) or hasattr(test_disaggregated, name)
        assert inspect.getsource(module).count(right) == 1, right
