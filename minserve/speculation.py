"""Speculative decoding: somebody cheap proposes the next tokens, and one step of the model checks them all.

A step that reads every weight for one token can, for nearly the same time, compute a few more. So a drafter proposes
k tokens, the model computes its logits behind each of them, and those proposals that the model itself would have
made are kept: up to k + 1 tokens for one reading of the weights. A wrong proposal costs time, never a wrong token.

    allow      how many tokens may be drafted for each request: as many as pay, by what steps have cost here
    propose    who has room for them in this step gets a draft: a chain, or a tree of alternatives
    judge      a token is drawn behind every place; from the last known token on, follow the draft while it
               holds the token drawn. What was followed is kept, and the token drawn at its end comes on top

Why nothing changes    A draft that is not itself drawn (n-grams, the likeliest token of a small model, a tree) plays no
                       part in any draw: at each place the request draws its token with the random number that
                       belongs to that position, as it would have done without. The draft only decides how many
                       of these draws one step can make. So tokens are the same, greedy or not, in any batch.
                       Drafts that are drawn from q are judged by kernels/verify.py: then the distribution is the same.
When it pays           minserve/pace.py

Sources  Leviathan et al. 2023 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318); prompt lookup: Saxena 2023;
         trees: Miao et al. 2024 (SpecInfer, arXiv:2305.09781)
Story    notebooks/11_speculative_decoding.ipynb, notebooks/12_medusa_and_self_speculation.ipynb
"""

import time
import warnings
from collections.abc import Sequence
from contextlib import contextmanager

import numpy as np
import torch

from minserve.batch import Batch, to_device
from minserve.kernels.verify import walk
from minserve.pace import Pace
from minserve.request import Draft, Request
from minserve.sampler import Drafts

MOST_CHAIN, MOST_TREE = (
    15,
    62,
)  # tokens: what a row of paged attention takes, and what the bits of a tree can say


class Drafter:
    """Proposes tokens; it never decides about one. What it says may be wrong, late or nothing at all."""

    name = "drafter"
    k = 4  # the most tokens it proposes for one request in one step
    branches = False  # are they a tree?
    serial = False  # does each of them take another step of a model?
    free = False  # do they cost next to nothing? Then it is decided which of them pay once they are there
    expected = 0.7  # how often the next one is right, before anything is known
    wants_hidden = False  # does observe() want the model's states?
    typical = None  # (epsilon, delta): see medusa.py
    gains: list[float] | None = None  # of a tree: how often each of its tokens is kept, on other texts

    def attach(self, engine) -> None:
        """Once, when the engine is made. Raises ValueError if the two do not fit."""

    def propose(self, plan: list[tuple[Request, int]]) -> Sequence[Draft | None]:
        """For each request of a step, at most request.granted tokens to follow its last one."""
        raise NotImplementedError

    def observe(self, requests: list[Request], hidden) -> None:
        """After a step: the states [n, E] from which the newest tokens of these requests were drawn."""

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Pages that get a copy of their own (from, to) before the step runs."""


class NGram(Drafter):
    """What followed the last time: the longest recent run of tokens that occurred before, and then its sequel.

    Looked up among all of a request's tokens, prompt and answer; of equally long matches the latest wins. A match may
    reach into the proposal itself, so that one period of a repetition is enough to go on with it. The index grows
    by `longest` entries per token, so a proposal costs the same however long the text is.
    """

    name, free = "ngram", True

    def __init__(self, k: int = 8, longest: int = 4, shortest: int = 2):
        if not 1 <= k <= MOST_CHAIN or not 1 <= shortest <= longest:
            raise ValueError(
                f"k is {k}, n-grams of {shortest} to {longest} tokens: use k in 1 .. {MOST_CHAIN}, which is what a "
                f"step verifies, and 1 <= shortest <= longest"
            )
        self.k, self.lengths = k, range(longest, shortest - 1, -1)

    def propose(self, plan):
        return [self.sequel(r, r.granted) if r.granted else None for r, _ in plan]

    def sequel(self, request: Request, n: int) -> Draft | None:
        tokens, (ends, known) = request.tokens, request.memo or ({}, 1)
        for end in range(known, len(tokens)):  # n-grams that end here have a sequel: tokens[end]
            for length in self.lengths:
                if length <= end:
                    ends[tuple(tokens[end - length : end])] = end
        request.memo = ends, len(tokens)
        last = (ends.get(tuple(tokens[-length:])) for length in self.lengths if length < len(tokens))
        if (start := next(filter(None, last), None)) is None:
            return None
        text = tokens[start:]
        while len(text) < n:
            text += text[: n - len(text)]
        return Draft(text[:n])


# ---------------------------------------------------------------- the engine's side
class Speculation:
    """What the engine does differently with a drafter."""

    def __init__(self, drafter: Drafter, engine, adaptive: bool = True):
        self.drafter, self.engine, self.adaptive = drafter, engine, adaptive
        self.on, self._packing = True, 0.0
        self.drafted, self.kept = ([0] * drafter.k for _ in range(2))  # by position in the draft
        drafter.attach(engine)
        self.pace = Pace(1.0 if drafter.gains else drafter.expected)
        most = MOST_TREE if drafter.branches else MOST_CHAIN
        if not 1 <= drafter.k <= most:
            raise ValueError(
                f"the drafter {drafter.name!r}: k is {drafter.k}, and a step verifies "
                f"{'trees' if drafter.branches else 'chains'} of 1 to {most} drafted tokens"
            )

    def allow(self, running: list[Request]) -> None:
        """Say for each running request how many tokens may be drafted for it in the next step."""
        decoding = [r for r in running if len(r.tokens) - r.computed == 1]
        limits = [self.limit(r) if self.on else 0 for r in decoding]
        if self.adaptive and self.on and not self.drafter.free:
            limits = self.pace.choose(decoding, limits, self.drafter.gains, self.drafter.serial)
        for request, limit in zip(decoding, limits):
            request.ahead = limit
        if len(self.pace.right) > 4 * len(running) + 64:
            self.pace.right = {r.id: self.pace.right[r.id] for r in running if r.id in self.pace.right}

    def limit(self, request: Request) -> int:
        """The most that could be kept, with the token that comes on top; and what its cache can take back."""
        if request.constraint:  # what its grammar allows behind a draft is known only once that is accepted
            return 0
        limit, pages = min(self.drafter.k, request.most - len(request.tokens) - 1), self.engine.pages
        if pages.shared > 1:  # a full page is sealed, and cannot be opened again: no draft may fill it
            limit = min(limit, pages.page_size - 2 - request.computed % pages.page_size)
        return max(0, limit)

    def propose(self, plan):
        """The plan with drafts."""
        start, copies = time.perf_counter(), self.engine.pages.copies
        self.engine.cache.copy(copies)  # a drafter may write behind them: they cannot wait for the step
        if self.on:
            with self._doubted():
                self.drafter.copy(copies)
                self._ask(plan)
        if not self.on:
            for request, _ in plan:
                request.draft = None
        self._packing = time.perf_counter()
        if deepest := max((len(r.draft.tokens) for r, _ in plan if r.draft), default=0):
            spent = (self._packing - start) / (deepest if self.drafter.serial else 1)
            self.pace.draft = 0.9 * self.pace.draft + 0.1 * spent if self.pace.draft else spent
        return [(r, n - r.granted + (len(r.draft.tokens) if r.draft else 0)) for r, n in plan]

    @contextmanager
    def _doubted(self):
        """For calls of the drafter. One that fails is not asked again: everything goes on without it."""
        try:
            yield
        except Exception as error:
            self.on = False
            warnings.warn(
                f"the drafter {self.drafter.name!r} failed ({type(error).__name__}: {error}); "
                f"the engine goes on without speculation",
                stacklevel=4,
            )

    def _ask(self, plan) -> None:
        vocab = self.engine.model.config.vocab_size
        for (request, _), draft in zip(plan, self.drafter.propose(plan), strict=True):
            request.draft = draft.cut(request.granted) if draft else None
            if request.draft and not 0 <= min(request.draft.tokens) <= max(request.draft.tokens) < vocab:
                raise ValueError(
                    f"it proposed {request.draft.tokens}, and the vocabulary has {vocab:,} tokens"
                )
        if self.adaptive and self.drafter.free and any(r.draft for r, _ in plan):
            decoding = [r for r, n in plan if n == 1 + r.granted]
            drafted = [len(r.draft.tokens) if r.draft else 0 for r in decoding]
            for request, n in zip(decoding, self.pace.choose(decoding, drafted, self.drafter.gains, False)):
                request.draft = request.draft and request.draft.cut(n)

    def judge(self, batch: Batch, logits, drawn, states) -> tuple[list[list[int]], list | None, list[int]]:
        """Of each request of batch.paid: new tokens, their logprobs if asked for. Of all of batch.plan: drafts kept."""
        sampler, places = self.engine.sampler, Places(batch)
        if not batch.paid:
            return [], None, [0] * len(batch.plan)
        if places.drafts and places.drafts.chances:
            drawn = None  # a recorded step drew from p alone
        tokens = sampler.draw(logits, batch.seats, batch.made, drawn, places.drafts)
        paths = [[start] for start in places.starts[:-1]]
        if places.drafts:
            accepted = self._typical(batch, logits, places) if self.drafter.typical else None
            paths = places.walk(tokens, accepted)
        said = tokens.tolist()
        made = [[*(places.ids[p] for p in path[1:]), said[path[-1]]] for path in paths]
        self._clean_up(batch, places, paths, made)
        ways = sum(paths, [])
        seats = batch.seats[ways]
        new = to_device(torch.tensor(sum(made, [])), tokens.device)
        sampler.note(seats, new)
        logprobs = sampler.logprobs(logits, new, seats, ways)
        if logprobs:
            ends = np.cumsum([len(path) for path in paths])
            logprobs = [logprobs[end - len(path) : end] for end, path in zip(ends, paths)]
        if self.drafter.wants_hidden and self.on:
            with self._doubted():
                self.drafter.observe(places.requests, states[[path[-1] for path in paths]])
        kept = dict(zip(batch.paid, (len(path) - 1 for path in paths)))
        self._learn(batch, kept)
        return made, logprobs, [kept.get(b, 0) for b in range(len(batch.plan))]

    def _typical(self, batch, logits, places) -> torch.Tensor:
        """[T] bool: drafts of requests that sample which are good enough, although another token was drawn."""
        accepted = torch.zeros(len(places.ids), dtype=torch.bool, device=logits.device)
        nodes = [p for p, up in enumerate(places.parents) if up >= 0 and not places.owner[p].params.greedy]
        if nodes:
            above = [places.first[p] + places.parents[p] for p in nodes]
            seats, before = batch.seats[above], [places.drafts.before[p] for p in above]
            x = self.engine.sampler.adjusted(logits[above], seats, batch.made[above], before)
            temperature = [places.owner[p].params.temperature for p in nodes]
            ids = [places.ids[p] for p in nodes]
            with self._doubted():
                its = (torch.tensor(a, device=x.device) for a in (temperature, ids))
                accepted[nodes] = self.drafter.accepts(x, *its)
        return accepted

    def _clean_up(self, batch, places, paths, made) -> None:
        """Bring a tree's path together in the cache, and every last token to where the next step looks for it."""
        packer, S, source, target = self.engine.packer, self.engine.pages.page_size, [], []
        for request, path in zip(places.requests, paths):
            first = len(request.tokens) - 1
            for i, place in enumerate(path):
                at = [first + place - path[0], first + i]
                if at[0] != at[1]:
                    a, b = (request.pages[p // S] * S + p % S for p in at)
                    source.append(a), target.append(b)
        if source:
            self.engine.cache.move(source, target)
        ends = [len(r.tokens) - 1 + len(its) for r, its in zip(places.requests, made)]
        packer.write([r.seat for r in places.requests], ends, [max(its[-1], 0) for its in made])

    def _learn(self, batch, kept: dict[int, int]) -> None:
        if batch.num_singles == len(batch.counts):  # prompts cost what they cost
            self.pace.timed(len(batch.counts), time.perf_counter() - self._packing)
        for b, n in kept.items():
            request = batch.plan[b][0]
            if request.draft is None:
                continue
            drafted = len(request.draft.tokens)
            depth = drafted if request.draft.parents is None else max(depths(request.draft.parents))
            for i in range(depth):
                self.drafted[i] += 1
                self.kept[i] += i < n
            gains = self.drafter.gains
            tried = sum(gains[:drafted]) if gains else n + (n < drafted)
            self.pace.learn(request, tried, n)


class Places:
    """The rows of a batch that get logits, request by request: a last token, then the tokens of its draft."""

    def __init__(self, batch: Batch):
        self.requests = [batch.plan[b][0] for b in batch.paid]
        self.starts, self.ids, self.parents, self.owner, self.first = [0], [], [], [], []
        before, chances = [], {}
        for request in self.requests:
            draft, start = request.draft, len(self.ids)
            tokens = draft.tokens if draft else []
            parents = (draft.parents if draft else None) or range(-1, len(tokens) - 1)
            self.ids += [-1, *tokens]
            self.parents += [-1, *(p + 1 for p in parents)]
            before.append([])
            for i, (token, parent) in enumerate(zip(tokens, parents)):
                before.append([*before[start + 1 + parent], token])
                if draft.chances is not None:
                    chances[start + 1 + parent] = token, draft.chances[i]
            self.owner += [request] * (1 + len(tokens))
            self.first += [start] * (1 + len(tokens))
            self.starts.append(len(self.ids))
        self.drafts = Drafts(before, chances) if len(self.ids) > len(self.requests) else None

    def walk(self, tokens, accepted) -> list[list[int]]:
        """Of each request, the places from its last token on for which the draft held the token drawn."""
        send = lambda x, dtype: to_device(torch.tensor(x, dtype=dtype), tokens.device)
        ids, parents = send(self.ids, torch.int64), send(self.parents, torch.int32)
        most = max(end - start for start, end in zip(self.starts, self.starts[1:]))
        paths = walk(tokens, ids, parents, send(self.starts, torch.int32), most, accepted).tolist()
        return [[p for p in path if p >= 0] for path in paths]


def depths(parents: list[int]) -> list[int]:
    """How far each node of a tree lies below the last token: 1 for its children."""
    found: list[int] = []
    for parent in parents:
        found.append(1 + (found[parent] if parent >= 0 else 0))
    return found
