"""Drafters that compute: a small model guesses k tokens, one step after the other, and the target verifies them.

    DraftModel   another, smaller model, with a paged cache of its own
    EarlyExit    the target's own first layers, their weights and their cache: nothing to load, nothing to catch up

        last token --> step --> d1 --> step --> d2 --> step --> ... dk         tokens stay on the device
                        ^ what it has not seen yet comes first (DraftModel)    one copy to the host, at the end

The draft's cache has the target's page ids and slots: the keys of position p lie at page * S + offset in both. So
forks, copies, prefix hits and preemption are the pool's business, and the pool knows nothing of it. But the draft may
lag behind: it computes nothing for a request that may not draft, and the last token of a draft is never its input. Two
numbers say what it has:

    done [seats]   tokens of a running request that have keys and values here. What the target takes back is taken
                   back here as well: done <= computed, before every draft
    filled [P]     slots of a page, from its first one on, that hold keys and values of tokens that are certain. It
                   falls where a plan is about to write; a request that finds a page in the prefix index asks it

Cost     k steps of the small model, before each step of the target. They are recorded (graphs.py) and replayed
Exact    whatever it computes: a stale page or a wrong weight costs acceptance, never a token. What had left the
         target's window before the draft saw it is such a loss
Sources  Leviathan et al. 2022 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318); drafts from the first layers:
         Zhang et al. 2023 (arXiv:2309.08168), LayerSkip, Elhoushi et al. 2024 (arXiv:2404.16710)
Story    notebooks/11_speculative_decoding.ipynb, and for EarlyExit notebooks/12_medusa_and_self_speculation.ipynb
"""

from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import torch

from minserve.batch import Batch, to_device
from minserve.fused import FusedModel, Linear
from minserve.graphs import CallList, CudaGraph, Step, buckets_up_to
from minserve.kernels import on_triton
from minserve.kernels.sample import DRAFT, sample, uniform
from minserve.model import Model
from minserve.paged_attention import PagedCache
from minserve.pages import pages_for
from minserve.quantized_cache import spans
from minserve.request import Draft, Request
from minserve.sampler import DRAWN, _best, draw
from minserve.speculation import Drafter

SHORT = 3  # so many tokens besides the last one are caught up with in its own step, as rows of one token


# ---------------------------------------------------------------- steps of a small model
class Table:
    """Some requests' pages, for all steps of their drafts: any of their tokens as a Batch."""

    def __init__(self, requests: list[Request], page_size: int, device: torch.device):
        self.requests, self.page_size, self.device = requests, page_size, device
        self.pages = np.zeros((len(requests), max(len(r.pages) for r in requests)), np.int32)
        for row, request in zip(self.pages, requests):
            row[: len(request.pages)] = request.pages
        self.tables = to_device(self.pages, device)  # [B, M]

    def batch(self, rows, starts, counts, last, ids=None) -> Batch:
        """counts[i] tokens of request rows[i] from starts[i] on. ids: of all, where the host does not know them."""
        S, own, positions = self.page_size, np.repeat(rows, counts), spans(starts, counts)
        if ids is None:
            known = [self.requests[r].tokens[s : s + c] for r, s, c in zip(rows, starts, counts)]
            ids = to_device(np.fromiter((token for its in known for token in its), np.int64), self.device)
        slots = self.pages[own, positions // S].astype(np.int64) * S + positions % S
        places = to_device(np.stack([positions, slots]), self.device)
        ends = starts + counts
        sizes = to_device(np.stack([np.cumsum(counts), ends]).astype(np.int32), self.device)
        owners, singles = [self.requests[r] for r in rows], bool((counts == 1).all())
        return Batch(
            plan=list(zip(owners, counts.tolist())), fresh=[], paid=[], owners=owners,
            ids=ids, positions=places[0], slots=places[1],
            starts=torch.cat((torch.zeros_like(sizes[0, :1]), sizes[0])), lengths=sizes[1],
            tables=self.tables[to_device(rows, self.device)],
            num_singles=singles * len(rows), counts=counts.tolist(), host_lengths=ends.tolist(),
            sampled=[], last=last, seats=last, made=[],
        )  # fmt: skip


class Steps:
    """A small model on a cache: logits and the best tokens of a batch, replayed where every row is one token."""

    def __init__(self, model: FusedModel, cache: PagedCache, seats: int, width: int):
        self.model, self.cache, self.steps = model, cache, {}
        room, on_gpu = width * cache.page_size, model.turns.is_cuda
        rows = seats if on_gpu else min(seats, model.few if cache.on_native else 0)
        self.rows = buckets_up_to(rows)
        self.reaches = [*([r for r in (2048, 8192, 32768) if r < room] if on_gpu else ()), room]
        graph = partial(CudaGraph, torch.cuda.graph_pool_handle()) if on_gpu else CallList
        for reach, n in product(reversed(self.reaches), reversed(self.rows)):
            self.steps[n, reach] = Step(model, cache, n, width, reach, graph)

    def __call__(self, batch: Batch) -> tuple:
        """For the places batch.last: logits [R, V] fp32 or the model's dtype, and the largest of each [R], or -1."""
        B, model = len(batch.counts), self.model
        if batch.num_singles < B or B > max(self.rows, default=0):
            targets, look = self.cache.targets(batch), self.cache.look_for(batch, model.native)
            logits = model(batch.ids, batch.positions, targets, look, batch.last)
            return logits, model.ops.best(logits) if model.native else _best(logits)
        n = next(size for size in self.rows if size >= B)
        step = self.steps[n, next(r for r in self.reaches if r >= max(batch.host_lengths))]
        step.fill(batch, B, None)
        logits, best = step.replay()[:2]
        return logits[batch.last], best[batch.last]  # copies: the next replay writes into the same memory


class StepByStep(Drafter):
    """What DraftModel and EarlyExit share: k steps, the tokens of each the input of the next."""

    vocabulary = None  # [R] int64, the token that each row of its logits stands for; None: all, in order

    def __init__(self, k: int, sampled: bool):
        self.k, self.sampled = k, sampled

    def start(self, engine, model: FusedModel, cache: PagedCache) -> None:
        seats, width = engine.packer.tables.shape
        self.sampler, self.device, self.cache = engine.sampler, engine.packer.device, cache
        self.vocab, self.steps = engine.model.config.vocab_size, Steps(model, cache, seats, width)
        if self.vocabulary is not None:
            self.vocabulary = torch.as_tensor(self.vocabulary, device=self.device)

    def propose(self, plan) -> list[Draft | None]:
        self.follow(plan)
        able = sorted((r for r, _ in plan if r.granted), key=lambda r: -r.granted)
        drafts = dict(zip(able, self._drafts(able))) if able else {}
        return [drafts.get(r) for r, _ in plan]

    def follow(self, plan) -> None:
        """Before any draft: what the plan changes for keys and values that are here."""

    def behind(self, requests: list[Request], table: Table):
        """The first token of each that has to be computed here: [B], the last one at the latest."""
        return np.array([len(r.tokens) - 1 for r in requests])

    @torch.inference_mode()
    def _drafts(self, requests: list[Request]) -> list[Draft]:
        """A draft for each; they come with the longest first, so those that are complete leave at the end."""
        B, table = len(requests), Table(requests, self.cache.page_size, self.device)
        known = np.array([len(r.tokens) for r in requests])
        first = self.behind(requests, table)
        rows, starts = np.repeat(np.arange(B), known - first), spans(first, known - first)
        last, ids, made, chances = np.cumsum(known - first) - 1, None, [], []
        for i in range(requests[0].granted):
            logits, best = self.steps(
                table.batch(rows, starts, np.ones_like(rows), to_device(last, self.device), ids)
            )
            ids = best.clamp(min=0)  # a draft that is NaN is a bad draft, and no more than that
            ids = ids if self.vocabulary is None else self.vocabulary[ids]
            if self.sampled:
                ids, its = self._drawn(requests[: len(ids)], logits, ids, made)
                chances.append(its)
            made.append(ids)
            rows = last = np.arange(sum(r.granted > i + 1 for r in requests))
            starts, ids = known[rows] + i, ids[: len(rows)]
        tokens = iter(torch.cat(made).tolist())
        columns = [[next(tokens) for _ in step] for step in made]  # [k][<= B]
        return [self._draft(b, r, columns, chances) for b, r in enumerate(requests)]

    def _draft(self, b: int, request: Request, columns, chances) -> Draft:
        drawn = chances and not request.params.greedy
        its = torch.stack([step[b] for step in chances[: request.granted]]) if drawn else None
        return Draft([step[b] for step in columns[: request.granted]], None, its)

    def _drawn(self, requests: list[Request], logits, tokens, made: list):
        """The next tokens [B], where a request draws drawn as it does, and the logits [B, V] after all adjustments."""
        sampler, send = self.sampler, partial(to_device, device=self.device)
        seats = np.array([r.seat for r in requests])
        places = np.array([len(r.tokens) - len(r.prompt) + len(made) for r in requests])
        if self.vocabulary is not None:
            whole = logits.new_full((len(logits), self.vocab), -torch.inf)
            logits = whole.index_copy_(1, self.vocabulary, logits)
        before = None
        if any(r.params.penalises for r in requests):
            before = [[int(step[b]) for step in made] for b in range(len(requests))]
        x = sampler.adjusted(logits, seats, places, before)
        numbers, (top_k, seeds) = send(sampler.numbers[seats, :3]), send(sampler.whole[seats].T.copy())
        temperature, (top_p, min_p) = numbers[:, 0].float(), numbers[:, 1:].T.contiguous()
        if on_triton(x):
            drawn = sample(x, temperature, top_k, top_p, min_p, seeds, send(places), DRAFT)
        else:
            u = send(uniform(sampler.whole[seats, 1], places, DRAFT))
            drawn = draw(x.clone(), temperature, top_k, top_p, min_p, u)
        return torch.where(send(sampler.asks[seats] & DRAWN > 0), drawn.clamp(min=0), tokens), x


# ---------------------------------------------------------------- another model
class DraftModel(StepByStep):
    """Any smaller model of the same tokenizer, in step with the target through whatever happens to its requests."""

    name = "draft"

    def __init__(self, model: Model, k: int = 4, sampled: bool = False, vocabulary=None):
        """vocabulary [R]: the token that each row of its head stands for, if it is not all of them in order.

        sampled: draw the drafts as the request draws, and not the best ones: accepted more often where temperatures are
        high, at the price of other tokens (of the same distribution) than without a draft.
        """
        super().__init__(k, sampled)
        self.model, self.vocabulary = model, vocabulary

    def attach(self, engine) -> None:
        """Raises ValueError for a model that does not speak the target's tokens, or lies on another device."""
        model, config, pool = self.model, self.model.config, engine.pages
        check_speaks(model, self.vocabulary, engine.model)
        if pool.window:  # what left the target's window is somebody else's by now
            windows = tuple(min(window or pool.window, pool.window) for window in config.windows)
            config = replace(config, windows=windows)
        shape = pool.num_pages, pool.page_size, model.dtype, model.device, engine.cache.sinks
        self.own, self.pool, self.budget = PagedCache(config, *shape), pool, engine.scheduler.token_budget
        self.filled = np.zeros(pool.num_pages, np.int64)
        seats = len(engine.packer.tokens)
        self.owner, self.done, self.certain = [None] * seats, [0] * seats, [0] * seats
        self.start(engine, FusedModel.of(model, engine.packer.tokens.shape[1]), self.own)

    def copy(self, pairs) -> None:
        self.own.copy(pairs)
        for source, target in pairs:
            self.filled[target] = self.filled[source]

    def follow(self, plan) -> None:
        S = self.pool.page_size
        for r, n in plan:
            if self.owner[r.seat] != (r.id, r.preemptions):
                self.owner[r.seat] = r.id, r.preemptions
                self.done[r.seat] = self.certain[r.seat] = min(self._found(r), r.computed)
            self.done[r.seat] = done = min(self.done[r.seat], r.computed)
            if done > self.certain[r.seat]:  # drafts that were accepted
                self._fill(r, self.certain[r.seat], done)
            first, end = r.computed // S, pages_for(r.computed + n, S)
            self.filled[r.pages[first]] = min(self.filled[r.pages[first]], r.computed % S)
            for page in r.pages[first + 1 : end]:
                self.filled[page] = 0

    def _found(self, request: Request) -> int:
        """Tokens of its pages whose keys and values are here already, without a gap; who left the window needs none."""
        found, S = 0, self.pool.page_size
        for i, page in enumerate(request.pages):
            found += S if self.pool.sink_pages <= i < request.returned else int(self.filled[page])
            if found < (i + 1) * S:
                break
        return found

    def _fill(self, request: Request, start: int, end: int) -> None:
        """Tokens start .. end - 1 are here, and certain."""
        S = self.pool.page_size
        for i in range(start // S, pages_for(end, S)):
            self.filled[request.pages[i]] = min(S, end - i * S)
        self.certain[request.seat] = end

    def behind(self, requests, table):
        """Catch up with all but the last few tokens of each, at most a step's budget at a time."""
        S = self.pool.page_size
        first = np.array([max(self.done[r.seat], r.returned * S) for r in requests])
        known = np.array([len(r.tokens) for r in requests])
        for r, start in zip(requests, first.tolist()):
            self._fill(r, start, len(r.tokens))
            self.done[r.seat] = len(r.tokens) + r.granted - 1
        rest = np.where(known - 1 - first > SHORT, known - 1 - first, 0)
        while rest.any():
            counts = np.clip(self.budget - (np.cumsum(rest) - rest), 0, rest)
            rows = np.flatnonzero(counts)
            place = to_device(np.zeros(1, np.int64), self.device)  # some place: nobody looks at its logits
            self.steps(table.batch(rows, first[rows], counts[rows], place))
            first, rest = first + counts, rest - counts
        return first


def check_speaks(draft: Model, vocabulary, target: Model) -> None:
    reads, V = len(draft.embed_tokens.weight), target.config.vocab_size
    head = draft.embed_tokens if draft.config.tied else draft.lm_head
    rows = len(head.weight) if hasattr(head, "weight") else head.out_features  # a quantized one
    if reads != V:
        raise ValueError(
            f"the draft model's vocabulary has {reads:,} tokens and the target's {V:,}: their ids do not mean the same "
            f"text.\n  Use a draft model with the target's tokenizer; `python -m minserve train draft` makes one"
        )
    named = V if vocabulary is None else len(vocabulary)
    if named != rows:
        raise ValueError(
            f"the draft model's head scores {rows:,} tokens and its vocabulary names {named:,}: give DraftModel the "
            f"`vocabulary` of its {rows:,} rows"
        )
    low, high = (0, 0) if vocabulary is None else map(int, torch.as_tensor(vocabulary).aminmax())
    if not 0 <= low <= high < V:
        raise ValueError(
            f"the draft's vocabulary names ids {low:,} to {high:,}, and the target has 0 to {V - 1:,}: use a draft "
            f"model with the target's tokenizer"
        )
    if draft.device != target.device:
        raise ValueError(
            f"the draft model is on {draft.device}, the target on {target.device}: move one with .to()"
        )


# ---------------------------------------------------------------- the same model, cut short
class EarlyExit(StepByStep):
    """The target's first layers and a head: what they write is what verification writes again, in the same slots."""

    name = "exit"

    def __init__(self, layer: int, k: int = 4, head=None, sampled: bool = False):
        """`layer`: how many layers run. `head`: a trained.ExitHead, or None for the target's own norm and head."""
        super().__init__(k, sampled)
        self.layer, self.head = layer, head

    def attach(self, engine) -> None:
        """Raises ValueError for a layer that the model does not have."""
        model, L = engine.model, engine.model.config.num_layers
        if not 1 <= self.layer <= L:
            raise ValueError(f"exit: layer is {self.layer}; the model has {L}: leave after 1 to {L} of them")
        whole = FusedModel.of(model, engine.packer.tokens.shape[1])
        short = copy(whole)
        short.layers = whole.layers[: self.layer]
        if self.head is not None:
            self.vocabulary, norm = self.head.vocabulary, SimpleNamespace(weight=self.head.norm)
            short.model = SimpleNamespace(embed_tokens=model.embed_tokens, layers=model.layers, norm=norm)
            short.head = Linear(whole.ops, self.head.matrix())
        self.start(engine, short, engine.cache)
