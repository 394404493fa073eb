"""Each step, how many tokens of which request the model computes. Plain Python: no tensor, no clock.

There is no prefill mode and no decode mode. Every request owes the model `owed` tokens, and a step pays debts under
three limits: a token budget (how long a step may take), free pages (how much cache there is), and seats. A long
prompt paid in several steps is chunked prefill; a request that joins while others decode is continuous batching;
resuming after a preemption and continuing behind a cached prefix are larger and smaller debts, nothing more.

One order     rank = arrival step + ageing * priority, then id. The best rank is served first and the worst gives way:
              urgent before not, first come first served within a class, and a class is worth `ageing` steps of waiting.
One promise   every decoding request gets its token in every step (the budget is at least max_running), prompts share
              what is left. So a long prompt cannot stop the others, nor can they stop it.
Making room   when pages run out, the running request of the worst rank returns everything and waits again. It will
              recompute its tokens, from the cached prefix if that is still there: preemption by recompute.

Invariants, held after every call and checked by tests/test_scheduler.py
    planned tokens <= token_budget; running requests <= max_running
    add() lets at most max_waiting wait; those that gave way come on top of them, at most max_running
    a planned request owns pages, none of them shared, for every token it is about to compute
    a waiting or finished request owns no page and no seat; who was preempted is not admitted in the same step
    the best-ranked request is never preempted, so it finishes, and then the next one is the best
Starvation    a request waits only for those of better rank, and for room from those that ran before it came. Nobody
              who arrives more than ageing * (its priority - theirs) steps later is among the first: the bound for
              overtaking, in steps.
Sources  iteration-level scheduling, Yu et al. 2022 (Orca, OSDI); chunked prefill, Agrawal et al. 2023 (SARATHI,
         arXiv:2308.16369); one debt for both phases: the vLLM v1 scheduler
Story    notebooks/07_continuous_batching.ipynb
"""

import sys
from bisect import insort
from heapq import heapify, heappop, heappush

from minserve.pages import PagePool, pages_for
from minserve.request import UNKNOWN, Request, Status

Plan = list[tuple[Request, int]]  # who, and how many tokens
RUNNING, FINISHED = Status.RUNNING, Status.FINISHED  # looked up for every request in every step


class QueueFull(RuntimeError):
    """There are already max_waiting requests in the queue: come back later."""


class Scheduler:
    """Continuous batching with chunked prefill."""

    def __init__(
        self,
        pages: PagePool,
        token_budget: int = 512,
        max_running: int = 64,
        *,
        chunk: int | None = None,
        max_waiting: int = 4096,
        ageing: int = 100,
    ):
        """`chunk`: the most tokens of one prompt in one step. Raises ValueError for limits that exclude each other."""
        if max_running < 1 or token_budget < max_running or (chunk is not None and chunk < 1) or ageing < 0:
            raise ValueError(
                f"token_budget {token_budget:,}, max_running {max_running:,}, chunk {chunk}, ageing {ageing}: each "
                f"running request needs one token of the budget in every step.\n"
                f"  Use token_budget >= max_running >= 1, chunk >= 1, ageing >= 0."
            )
        self.pages, self.token_budget, self.max_running = pages, token_budget, max_running
        self.chunk = min(chunk or token_budget, token_budget)
        self.max_waiting, self.ageing = max_waiting, ageing
        self.waiting: list[Request] = []  # both sorted, best rank first
        self.running: list[Request] = []
        self.seats = list(reversed(range(max_running)))
        self.deadlines: list[tuple[float, int, Request]] = []  # a heap
        self.gave_way: list[int] = []  # ids of those the last schedule() preempted
        self.brought: list[
            tuple[Request, int]
        ] = []  # whose `kv` it let in, behind how many tokens that were cached
        self.steps = self.preemptions = self.hit_tokens = self.asked_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def room(self) -> int:
        """How many more requests the queue takes."""
        return self.max_waiting - len(self.waiting)

    # ------------------------------------------------------------ the door
    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never fit, QueueFull if too many wait already."""
        self.check_fits(request)
        if len(self.waiting) >= self.max_waiting:
            raise QueueFull(
                f"request {request.id} is refused: {len(self.waiting):,} requests wait already, and max_waiting is "
                f"{self.max_waiting:,}.\n"
                f"  Send it again when some have finished, or build the engine with a larger max_waiting."
            )
        request.rank = (self.steps + self.ageing * request.priority, request.id)
        insort(self.waiting, request, key=_rank)
        if request.deadline is not None:
            heappush(self.deadlines, (request.deadline, request.id, request))
            if len(self.deadlines) > 2 * (len(self.waiting) + len(self.running)) + 64:
                # most of them are of requests that have finished
                self.deadlines = [d for d in self.deadlines if d[2].status is not Status.FINISHED]
                heapify(self.deadlines)

    def check_fits(self, request: Request) -> None:
        """Raises ValueError for a request that the whole pool could not hold."""
        need, S = self.pages.most(request.most_tokens, self.chunk), self.pages.page_size
        over = request.most_tokens - self.pages.num_pages * S
        if need > self.pages.num_pages:
            raise ValueError(
                f"request {request.id} can never run: {len(request.prompt):,} prompt + {request.max_new_tokens:,} new "
                f"tokens need {need:,} pages of {S}, and the whole pool has {self.pages.num_pages:,} "
                f"({self.pages.num_pages * S:,} tokens).\n  Shorten it by {over:,} tokens, or build the engine with "
                f"num_pages >= {need:,}."
            )

    # ------------------------------------------------------------ one step
    def schedule(self) -> Plan:
        """Decide the next step. Every planned request has its pages when this returns."""
        self.steps += 1
        plan: Plan = []
        self.gave_way, self.brought = [], []
        decoding = [len(r.tokens) - r.computed for r in self.running].count(1)
        spare, prompts = self.token_budget - decoding, decoding < len(self.running)

        for request in list(self.running):  # best rank first: whoever is preempted is not planned yet
            if request.status is not RUNNING or len(request.tokens) >= request.most:
                continue  # it gave way, or its last token is being made
            owed = len(request.tokens) - request.computed
            num_tokens = 1 if owed == 1 else self.share(owed, spare)
            ahead = self._granted(request, spare, prompts) if request.ahead and owed == 1 else 0
            request.granted = ahead
            if request.computed + num_tokens > request.writable and not self._make_room(request, num_tokens):
                continue  # it was itself the one to give way
            if num_tokens:
                plan.append((request, num_tokens + ahead))
                spare -= num_tokens if owed > 1 else ahead

        if not self.gave_way:
            self._admit_waiting(plan, spare)
        return plan

    def share(self, owed: int, spare: int) -> int:
        """How much of a prompt goes into this step, with `spare` tokens left."""
        return min(owed, spare, self.chunk)

    def _granted(self, request: Request, spare: int, prompts: bool) -> int:
        """Drafts there is room for beside its token: all it may have or none, and nobody gives way for them."""
        ahead, S = min(request.ahead, spare), self.pages.page_size
        if request.computed + 1 + ahead <= request.writable:
            return ahead
        new = pages_for(request.computed + 1 + ahead, S) - len(request.pages)
        sure = len(self.running) + (spare // S if prompts else 0)  # what tokens may need that are no drafts
        return ahead if new + sure <= self.pages.available and self.pages.grow(request, 1 + ahead) else 0

    def _admit_waiting(self, plan: Plan, spare: int) -> None:
        """The queue, in order. Its head waits rather than being overtaken, so nobody starves."""
        while self.waiting and len(self.running) < self.max_running and spare:
            request = self.waiting[0]
            if not self._take_in(request):
                break
            hits = request.computed
            if request.kv is not None:
                self._bring(request)
            num_tokens = self.share(request.owed, spare)
            if not num_tokens or not self.pages.grow(request, num_tokens):
                self.pages.release(request)
                request.computed = 0
                break
            self.waiting.pop(0)
            insort(self.running, request, key=_rank)
            request.status, request.seat = Status.RUNNING, self.seats.pop()
            if not request.preemptions:  # a hit of its own recomputed tokens is no saving
                request.cached_tokens = hits
                self.hit_tokens += hits
                self.asked_tokens += len(request.tokens)
            if request.kv is not None and request.computed - hits:
                self.brought.append((request, hits))
            plan.append((request, num_tokens))
            spare -= num_tokens

    def _bring(self, request: Request) -> None:
        """Pages for what was computed elsewhere, which then counts as computed. The engine loads it before the step."""
        num_tokens = min(request.kv.num_tokens, len(request.tokens) - 1) - request.computed
        if num_tokens > 0 and self.pages.grow(request, num_tokens):
            request.computed += num_tokens

    def _take_in(self, request: Request) -> bool:
        """Its first pages: its leader's if it has one, else what the prefix index knows."""
        leader = request.leader
        if leader is not None and leader.status is Status.RUNNING:
            if leader.computed < len(leader.prompt):
                return False  # a step or two, and the prompt is there to be shared
            if len(request.tokens) == len(request.prompt) and self.pages.fork(request, leader):
                return True
        promised = sum(self.pages.promised(r, self.chunk) for r in self.running)
        return self.pages.admit(request, self.chunk, promised)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        while not self.pages.grow(request, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Take everything back. It keeps its rank, and recomputes its tokens when its turn comes again."""
        self._leave(request)
        request.status, request.computed = Status.WAITING, 0
        request.preemptions += 1
        self.preemptions += 1
        self.gave_way.append(request.id)
        insort(self.waiting, request, key=_rank)

    # ------------------------------------------------------------ after the step
    def commit(self, plan: Plan, tokens: list[list[int]]) -> list[Request]:
        """Settle a step: debts down, tokens out, pages of the finished back. Returns those that finished.

        tokens: of each planned request the drafts that were accepted, and then the one that was drawn; where a debt is
        not fully paid, they mean nothing and are ignored.
        """
        return self.settle(plan, self.advance(plan), tokens)

    def advance(self, plan: Plan) -> list[int]:
        """The step is on its way: count its tokens as computed, and promise UNKNOWN to those whose debt it pays.

        The next step can be scheduled now. Returns how far each request is surely computed then, drafts aside: what
        settle() asks for.
        """
        ends = []
        for request, num_tokens in plan:
            if request.status is not RUNNING:
                ends.append(0)  # it was aborted since it was planned
                continue
            request.computed = end = request.computed + num_tokens
            if request.draft:
                end -= len(request.draft.tokens)
            ends.append(end)
            if self.pages.window:  # not left to settle(): by then a small pool would have run short
                self.pages.settle(request, end - (request.tokens[end - 1] == UNKNOWN))
            if end == len(request.tokens):
                request.tokens.append(UNKNOWN)
        return ends

    def settle(self, plan: Plan, ends: list[int], tokens: list[list[int]]) -> list[Request]:
        """The step has arrived: its tokens are known, and who ends with them gives everything back."""
        finished, S = [], self.pages.page_size
        for (request, num_tokens), end, made in zip(plan, ends, tokens, strict=True):
            known, status = request.tokens, request.status
            if not end or status is FINISHED:
                continue  # it was aborted, or had stopped, while the step ran
            sure, reason = end, None
            if request.draft:  # what lies behind the accepted tokens is not in the cache for good
                sure += len(made) - 1
                request.computed -= len(request.draft.tokens) - (len(made) - 1)
                known += [UNKNOWN] * (len(made) - 1)
                request.draft = None
            if known[end] != UNKNOWN:
                made = ()  # mid-prompt: this chunk's logits predict a token that is known
            for token in made:
                if token in request.stop_ids and end >= len(request.prompt) + request.params.min_tokens:
                    reason = "stop"
                    break
                known[end] = token
                end += 1
                if end >= request.most:
                    reason = "length"
                    break
            if status is RUNNING and sure % S < num_tokens:  # a page is full
                self.pages.settle(request, min(sure, end))
            if reason:
                self.finish(request, reason)
                finished.append(request)
        return finished

    def finish(self, request: Request, reason: str) -> None:
        """End a request now, wherever it is: "stop", "length", "abort", "timeout" or "error". Twice is once."""
        if request.status is Status.RUNNING:
            self._leave(request)
        elif request.status is Status.WAITING and request in self.waiting:
            self.waiting.remove(request)
        if request.status is not Status.FINISHED:
            request.status, request.finish_reason = Status.FINISHED, reason
            while request.tokens[-1] == UNKNOWN:
                request.tokens.pop()  # nobody waits for them any more

    def expire(self, now: float) -> list[Request]:
        """End all whose deadline has passed; returns them."""
        late = []
        while self.deadlines and self.deadlines[0][0] <= now:
            request = heappop(self.deadlines)[2]
            if request.status is not Status.FINISHED:
                self.finish(request, "timeout")
                late.append(request)
        return late

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.release(request)
        self.seats.append(request.seat)
        request.seat, request.granted, request.draft = None, 0, None


class WholePrompts(Scheduler):
    """The baseline without chunks (iteration-level batching as in Orca): a prompt is computed in one step or not yet.

    A prompt longer than the token budget gets a step without other prompts; that step exceeds the budget.
    """

    def __init__(self, *args, **limits):
        super().__init__(*args, **limits)
        self.chunk = (
            self.pages.num_pages * self.pages.page_size
        )  # no limit: nothing larger can be in the pool

    def share(self, owed: int, spare: int) -> int:
        alone = spare >= self.token_budget - len(self.running)  # no other prompt is in this step
        return owed if owed <= spare or alone else 0


class StaticBatching(WholePrompts):
    """The baseline of a batch that is filled once and runs until its last request has finished."""

    def share(self, owed: int, spare: int) -> int:
        return owed

    def _admit_waiting(self, plan: Plan, spare: int) -> None:
        if not self.running:
            super()._admit_waiting(plan, sys.maxsize)  # no budget binds it: seats and pages do


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
