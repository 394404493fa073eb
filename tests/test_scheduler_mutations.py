"""The tests can fail: each wrong version of pages.py and scheduler.py below is noticed, by random days or by hand."""

import inspect
import types

import paged_world
import pytest
import test_overlap
import test_pages
import test_scheduler
from paged_world import day

from minserve import pages, scheduler

DAYS = range(30)

# (what is wrong, module, the right text, the wrong one, who notices: days, or one test)
WRONG = [
    # ------------------------------------------------------------ pages: taking and giving back
    ("the last page is not rounded up", pages, "return -(-num_tokens // page_size)",
     "return num_tokens // page_size", "days"),
    ("a copy needs no page", pages, "max(0, new) + copy > self.available", "max(0, new) > self.available",
     "test_pages.test_a_copy_counts_as_a_page()"),
    ("a refused grow takes what there is", pages,
     "if max(0, new) + copy > self.available:\n            return False",
     "if max(0, new) + copy > self.available:\n            request.pages += [self._take() for _ in "
     "range(self.available)]\n            return False", "test_pages.test_grow_is_all_or_nothing()"),
    ("a copy for one who is gone", pages, "c for c in self.copies if c[1] != own", "c for c in self.copies",
     "test_pages.test_a_page_is_the_target_of_one_copy_only()"),
    ("nothing is copied on write", pages,
     "copy = first < len(request.pages) and self._is_shared(request.pages[first])", "copy = False", "days"),
    ("the copy is not carried out", pages, "self.copies.append((theirs, own))", "pass", "days"),
    ("the copied page is not given back", pages, "            self._drop(theirs)\n", "", "days"),
    ("the device does not learn of a copy", pages, "request.dirty = min(request.dirty, first)", "pass",
     "test_pages.test_whoever_writes_first_copies_also_if_it_is_the_leader()"),
    ("a released request keeps its dirty mark", pages, "request.writable, request.dirty = [], [], 0, 0, 0",
     "request.writable = [], [], 0, 0", "days"),
    ("pages in no table are lost", pages, "                self.free.append(page)\n            else",
     "                pass\n            else", "days"),
    ("a chain is released from its beginning", pages, "for page in reversed(self.held(request)):",
     "for page in self.held(request):",
     "test_pages.test_the_least_recently_used_page_goes_first_and_the_end_of_a_chain_before_its_beginning()"),
    # ------------------------------------------------------------ pages: forks
    ("a child skips the prompt's last token", pages, "computed = (len(child.tokens) - 1) // self.shared",
     "computed = len(child.tokens) // self.shared", "days"),
    ("a leader may still write what it shares", pages,
     "leader.writable = min(leader.writable, leader.computed)", "pass",
     "test_pages.test_whoever_writes_first_copies_also_if_it_is_the_leader()"),
    ("a fork of pages that left the window", pages, " or leader.returned > max(first, self.sink_pages)", "",
     "days"),
    ("a fork of what is not computed", pages, "if leader.computed < computed or", "if",
     "test_pages.test_no_fork_from_a_leader_that_has_not_computed_its_prompt_or_no_longer_holds_it()"),
    ("a fork counts no references", pages,
     "        for page in self.held(child):\n            self._pin(page)\n", "", "days"),
    # ------------------------------------------------------------ pages: the prefix index
    ("hits count as room too", pages, "need + promised > self.available - revived",
     "need + promised > self.available", "test_pages.test_pages_that_are_hit_are_not_room_as_well()"),
    ("hits that others hold cost room", pages, "self.references[hits[i].page] == 0 for i in live",
     "True for i in live", "test_pages.test_pages_that_others_use_cost_nothing()"),
    ("hits are not pinned", pages, "            self._pin(hits[i].page)\n", "            pass\n", "days"),
    ("a pinned page stays evictable", pages,
     "            del self.cached[page]\n        self.references[page] += 1",
     "            pass\n        self.references[page] += 1", "days"),
    ("a hit on the whole prompt", pages, "(len(request.tokens) - 1) // self.page_size",
     "len(request.tokens) // self.page_size", "days"),
    ("pages are shared before they are full", pages,
     "while (len(request.chain) + 1) * self.page_size <= computed:",
     "while len(request.chain) * self.page_size < computed:", "days"),
    ("the last full page is never shared", pages, "self.page_size <= computed:",
     "self.page_size < computed:", "test_pages.test_a_prompt_that_is_cached_as_a_whole()"),
    ("keys do not chain the past", pages, "self._hash(before + tokens)", "self._hash(tokens)",
     "test_pages.test_equal_tokens_behind_different_pasts_have_entries_of_their_own()"),
    ("all that, and the parent is not verified", pages, "node.parent is parent and node.tokens",
     "node.tokens", "collisions"),
    ("tokens are not verified", pages, "node.parent is parent and node.tokens == tokens",
     "node.parent is parent", "collisions"),
    ("a node is replaced, and its page not told", pages, "self._forget(self.index[key].page)", "pass",
     "collisions"),
    ("salts are ignored", pages, 'self._hash(self.salt + b"/" + request.salt)', 'self._hash(b"")',
     "test_pages.test_salts_share_nothing()"),
    ("an evicted page stays in the index", pages,
     "            self._forget(page)\n            self.evictions += 1",
     "            del self.cached[page]\n            self.free.append(page)\n            "
     "self.evictions += 1", "days"),
    ("the most recently used page is evicted", pages, "next(iter(self.cached))",
     "next(reversed(self.cached))",
     "test_pages.test_the_least_recently_used_page_goes_first_and_the_end_of_a_chain_before_its_beginning()"),
    # ------------------------------------------------------------ pages: the window
    ("the window is one page short", pages, "max(0, position - self.window + 1)",
     "max(0, position - self.window + 2)", "days"),
    ("pages of sinks leave", pages, "range(max(request.returned, self.sink_pages), first)",
     "range(request.returned, first)", "days"),
    ("nothing ever leaves the window", pages,
     "            self._drop(request.pages[i])\n        request.returned = max(request.returned, "
     "first)", "            pass", "test_pages.test_pages_go_back_when_no_later_token_sees_them()"),
    ("a window's most forgets the chunk", pages, "pages_for(self.window + chunk, self.page_size) + 1",
     "pages_for(self.window, self.page_size) + 1", "days"),
    ("a hit pins what the window does not see", pages, "live = [i for i in range(len(hits)) if",
     "live = [i for i in range(len(hits)) if True or", "days"),
    # ------------------------------------------------------------ scheduler: the door and the order
    ("a request of the whole pool is refused", scheduler, "if need > self.pages.num_pages:",
     "if need >= self.pages.num_pages:", "days"),
    ("a request that can never fit is queued", scheduler, "        self.check_fits(request)\n", "", "days"),
    ("the queue takes one too many", scheduler, "if len(self.waiting) >= self.max_waiting:",
     "if len(self.waiting) > self.max_waiting:", "days"),
    ("priority does not count", scheduler, "self.steps + self.ageing * request.priority", "self.steps",
     "days"),
    ("priority does not age", scheduler, "self.steps + self.ageing * request.priority", "request.priority",
     "days"),
    ("who gave way queues at the end", scheduler,
     "self.gave_way.append(request.id)\n        insort(self.waiting, request, key=_rank)",
     "self.gave_way.append(request.id)\n        self.waiting.append(request)", "days"),
    ("the shortest of the queue first", scheduler, "request = self.waiting[0]\n            if not",
     "request = min(self.waiting, key=lambda r: r.owed)\n            if not", "days"),
    ("running in the order of admission", scheduler, "insort(self.running, request, key=_rank)",
     "self.running.append(request)", "days"),
    # ------------------------------------------------------------ scheduler: the step
    ("decoding requests are not in the budget", scheduler,
     "spare, prompts = self.token_budget - decoding,",
     "spare, prompts = self.token_budget,", "days"),
    ("prompts are not in the budget", scheduler,
     "spare -= num_tokens if owed > 1 else ahead", "pass", "days"),
    ("the admitted are not in the budget", scheduler, "            spare -= num_tokens\n", "", "days"),
    ("the chunk does not bind", scheduler, "return min(owed, spare, self.chunk)", "return min(owed, spare)",
     "days"),
    ("a prompt goes in only if all of it fits the budget", scheduler, "return min(owed, spare, self.chunk)",
     "return self.chunk if owed > self.chunk <= spare else owed if owed <= min(spare, self.chunk) "
     "else 0", "days"),
    ("one seat too many", scheduler, "len(self.running) < self.max_running and spare",
     "len(self.running) <= self.max_running and spare", "days"),
    ("seats are not given back", scheduler, "        self.seats.append(request.seat)\n", "", "days"),
    ("the best gives way", scheduler, "victim = self.running[-1]", "victim = self.running[0]", "days"),
    ("who gave way forgets nothing", scheduler, "request.status, request.computed = Status.WAITING, 0",
     "request.status = Status.WAITING", "days"),
    ("admitted in the step in which pages ran out", scheduler, "if not self.gave_way:\n", "if True:\n",
     "days"),
    ("admitted for its first chunk only", scheduler, "return self.pages.admit(request, self.chunk, promised)",
     "most = self.pages.most\n        self.pages.most = lambda num_tokens, chunk: 0\n        "
     "try:\n            return self.pages.admit(request, self.chunk, 0)\n        "
     "finally:\n            self.pages.most = most",
     "test_scheduler.test_no_thrash((4, 29), (20, 20), False)"),
    ("nothing is promised", scheduler, "self.pages.admit(request, self.chunk, promised)",
     "self.pages.admit(request, self.chunk)",
     "test_scheduler.test_a_prompt_in_chunks_keeps_the_room_it_was_admitted_for()"),
    ("a failed admission keeps its pages", scheduler,
     "                self.pages.release(request)\n                request.computed = 0\n",
     "                pass\n", "days"),
    ("a child forks its leader's answer", scheduler,
     "len(request.tokens) == len(request.prompt) and self.pages.fork", "self.pages.fork", "days"),
    ("a child does not wait for its leader", scheduler, "return False  # a step or two",
     "pass  # a step or two", "test_scheduler.test_children_share_their_leaders_prompt()"),
    # ------------------------------------------------------------ scheduler: after the step
    ("computed advances by one", scheduler, "end = request.computed + num_tokens",
     "end = request.computed + 1", "days"),
    ("a token from the middle of a prompt", scheduler, "if known[end] != UNKNOWN:", "if False:", "days"),
    ("one token too many", scheduler, "if end >= request.most:",
     "if end > request.most:", "days"),
    ("min_tokens is ignored", scheduler,
     "token in request.stop_ids and end >= len(request.prompt) + request.params.min_tokens",
     "token in request.stop_ids", "test_scheduler.test_stop_ids_and_min_tokens()"),
    ("the stop id is part of the answer", scheduler, '                    reason = "stop"',
     '                    reason, known[end] = "stop", token', "days"),
    ("pages leave the window only when one is full", scheduler, "            if self.pages.window:",
     "            if False:",
     "test_pages.test_a_window_in_the_smallest_pool_it_fits_never_stops(5)"),
    ("pages are never indexed", scheduler, "self.pages.settle(request, min(sure, end))",
     "pass",
     "test_scheduler.test_a_prompt_that_is_cached_as_a_whole_still_computes_a_token()"),
    ("the aborted are counted as computed", scheduler,
     "            if request.status is not RUNNING:\n                ends.append(0)",
     "            if False:\n                ends.append(0)", "days"),
    # ------------------------------------------------------------ scheduler: a step in flight (test_overlap's days)
    ("no token is promised", scheduler, "                request.tokens.append(UNKNOWN)\n",
     "                pass\n", "ahead"),
    ("a token is promised in the middle of a prompt", scheduler, "if end == len(request.tokens):",
     "if end <= len(request.tokens):", "ahead"),
    ("advance forgets how far", scheduler, "request.computed = end = request.computed + num_tokens",
     "end = request.computed + num_tokens", "ahead"),
    ("ends of all rows are the last one's", scheduler, "            ends.append(end)\n",
     "            ends.append(end)\n            ends = [end] * len(ends)\n", "ahead"),
    ("what is unknown stays so", scheduler, "                known[end] = token\n", "                pass\n", "ahead"),
    ("the token is put last, where the next one is promised", scheduler, "                known[end] = token\n",
     "                known[-1] = token\n", "ahead"),
    ("the token is appended", scheduler, "                known[end] = token\n",
     "                known.append(token)\n", "ahead"),
    ("rows of those who had stopped are settled", scheduler, "if not end or status is FINISHED:", "if not end:",
     "ahead"),
    ("pages are given up as far as the next step will be", scheduler,
     "self.pages.settle(request, min(sure, end))", "self.pages.settle(request)", "ahead"),
    ("pages leave the window when the step has arrived", scheduler, "            if self.pages.window:",
     "            if False:", "ahead"),
    ("a page is indexed by a token that nobody knows", scheduler, " - (request.tokens[end - 1] == UNKNOWN))",
     ")", "ahead"),
    ("those who gave way while their step ran lose its token", scheduler, "if not end or status is FINISHED:",
     "if not end or status is not RUNNING:", "ahead"),
    ("pages of those who gave way are indexed", scheduler, "if status is RUNNING and sure %", "if sure %", "ahead"),
    ("one token too many while the last is being made", scheduler,
     " or len(request.tokens) >= request.most:", ":", "ahead"),
    ("the last token is made twice", scheduler, "len(request.tokens) >= request.most:",
     "len(request.tokens) > request.most:", "ahead"),
    ("the end comes one step early", scheduler, "if end >= request.most:",
     "if len(known) >= request.most:", "ahead"),
    ("promises stay when a request ends", scheduler,
     "            while request.tokens[-1] == UNKNOWN:\n                request.tokens.pop()",
     "            while False:\n                request.tokens.pop()", "ahead"),
    ("only one promise is taken back", scheduler, "while request.tokens[-1] == UNKNOWN:",
     "if request.tokens[-1] == UNKNOWN:", "ahead"),
    # ------------------------------------------------------------ scheduler: endings
    ("an aborted request stays in the queue", scheduler, "            self.waiting.remove(request)",
     "            pass", "days"),
    ("an aborted request keeps its pages", scheduler,
     "        self.pages.release(request)\n        self.seats", "        self.seats", "days"),
    ("the finished can be aborted", scheduler,
     "        if request.status is not Status.FINISHED:\n            request.status, ",
     "        if True:\n            request.status, ",
     "test_scheduler.test_ending_in_each_phase('finished', 'abort')"),
    ("a deadline is one step late", scheduler, "self.deadlines[0][0] <= now", "self.deadlines[0][0] < now",
     "days"),
    ("only one deadline per step", scheduler, "while self.deadlines and", "if self.deadlines and",
     "test_scheduler.test_deadlines()"),
    ("deadlines of the finished are kept", scheduler, "if len(self.deadlines) > 2 *", "if False and 2 *",
     "test_scheduler.test_deadlines_of_the_finished_are_forgotten()"),
    ("a hit of its own tokens is a saving", scheduler, "if not request.preemptions:", "if True:",
     "test_scheduler.test_hit_statistics_count_a_request_once()"),
    # ------------------------------------------------------------ scheduler: the baselines
    ("a whole prompt beside others over the budget", scheduler,
     "return owed if owed <= spare or alone else 0", "return owed", "days"),
    ("a long whole prompt never gets its step", scheduler, "return owed if owed <= spare or alone else 0",
     "return owed if owed <= spare else 0", "days"),
    ("a static batch is filled up", scheduler, "        if not self.running:\n            super()",
     "        if True:\n            super()", "days"),
    ("a static batch ends where the budget does", scheduler, "super()._admit_waiting(plan, sys.maxsize)",
     "super()._admit_waiting(plan, spare)", "test_scheduler.test_static_batching()"),
]  # fmt: skip


def changed(module, right: str, wrong: str) -> types.ModuleType:
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"{module.__name__} holds {source.count(right)} times: {right}"
    copy = types.ModuleType(module.__name__)
    exec(compile(source.replace(right, wrong), f"{module.__name__}, changed", "exec"), copy.__dict__)
    return copy


def put_in_place(copy, monkeypatch) -> None:
    """Wherever the tests take a class from, they find the changed one."""
    for place in (paged_world, test_pages, test_scheduler):
        for name in ("PagePool", "ReservingPool", "Scheduler", "WholePrompts", "StaticBatching", "QueueFull"):
            if (
                hasattr(copy, name)
                and hasattr(place, name)
                and getattr(copy, name).__module__ == copy.__name__
            ):
                monkeypatch.setattr(place, name, getattr(copy, name))


def notice(who: str, monkeypatch) -> None:
    """Run what should raise."""
    if "(" in who:
        eval(who, {"test_pages": test_pages, "test_scheduler": test_scheduler})
        return
    fixed = {}
    if who == "ahead":
        for seed in DAYS:
            test_overlap.day_ahead(seed)
        return
    if who == "collisions":
        monkeypatch.setattr(paged_world.PagePool, "_hash", staticmethod(lambda content: b"the same"))
        fixed = dict(prefix_caching=True)
    for seed in DAYS:
        for policy in (paged_world.Scheduler, paged_world.WholePrompts, paged_world.StaticBatching):
            day(seed, policy, **fixed)


@pytest.mark.slow
@pytest.mark.parametrize("module, right, wrong, who", [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_version_is_noticed(module, right, wrong, who, monkeypatch):
    put_in_place(changed(module, right, wrong), monkeypatch)
    with pytest.raises((AssertionError, LookupError, TypeError, ValueError, AttributeError, StopIteration)):
        notice(who, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("module", [pages, scheduler])
def test_the_right_version_is_not(module, monkeypatch):
    """The same machinery without a change: what the wrong versions fail at is not the machinery."""
    put_in_place(changed(module, "Story  ", "Story "), monkeypatch)
    for who in sorted({w[4] for w in WRONG}):
        with monkeypatch.context() as inner:
            notice(who, inner)
