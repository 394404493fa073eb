"""One step's plan as tensors: what a scheduler decided, flat, the way a model reads it.

    plan    [(request, num_tokens), ...]
    Batch   rows that compute one token first, then the chunks; one row per request, one place per token
            A draft's tokens are rows of one token, too: each has its request's page table and a length of its own, so
            it sees its predecessors, and what computes a single token also verifies many

        row          0     1     2          3
        places     | a17 | b4  | c0 c1 c2 | d8 d9 |        ids, positions, slots   [T]
        starts     0     1     2          5       7        [B + 1]
        num_singles = 2: attention runs one kernel on rows 0 .. 1 and another on rows 2 .. 3

The buffers persist. Every running request has a seat, a row of `tokens [N, C]` and `tables [N, M]` on the device: its
tokens are copied there once, when it is admitted; later each step adds the few page ids that are new, and note()
adds the tokens that were drawn, on the device. So packing a step costs Python time per *row*, never per token.

Story    notebooks/07_continuous_batching.ipynb
"""

from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter

import numpy as np
import torch

from minserve.kernels.pack import launch
from minserve.request import Request
from minserve.step_log import Row

_id, _seat, _computed, _tokens = map(attrgetter, ("id", "seat", "computed", "tokens"))
_pages, _dirty, _draft = map(attrgetter, ("pages", "dirty", "draft"))


@dataclass(frozen=True)
class Batch:
    plan: list[tuple[Request, int]]  # in the order of the rows
    fresh: list[Request]  # those that took their seat in this step
    paid: list[int]  # of the plan, those whose debt this step pays in full: only they get a token
    owners: list[Request]  # [B], of each row
    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64; -1 is nowhere
    starts: torch.Tensor  # [B + 1] int32
    lengths: torch.Tensor  # [B] int32, the step's own tokens included
    tables: torch.Tensor  # [B, M] int32, wide enough for the longest
    num_singles: int  # rows, and places, of one token
    counts: list[int]  # tokens per row, on the host
    host_lengths: list[int]
    sampled: list[int]  # rows that get logits: of each debt paid the last token, and with a draft all of them
    last: torch.Tensor  # [len(sampled)] int64, the place of each one's last token
    seats: torch.Tensor  # [len(sampled)] int64
    made: np.ndarray  # [len(sampled)] int32, how many tokens its request has made before the one drawn there
    trees: torch.Tensor | None = None  # [B] int64, what drafts that branch see (kernels/paged_attention.py)

    def rows(self, kept: list[int] | None = None) -> list[Row]:
        """This step's part of the log, before anything of it counts as computed. kept: of each one's draft."""
        (requests, counts), paid = zip(*self.plan), [False] * len(self.plan)
        for b in self.paid:
            paid[b] = True
        columns = map(_id, requests), counts, map(_computed, requests), paid
        if len(self.owners) == len(requests):
            return list(map(Row, *columns))
        drafted = [len(draft.tokens) if draft else 0 for draft in map(_draft, requests)]
        return list(map(Row, *columns, drafted, kept or repeat(0)))


class Packer:
    """The persistent buffers, and how a plan becomes a Batch."""

    def __init__(self, seats: int, context: int, page_size: int, device="cpu"):
        """`context`: the most tokens of one request, prompt and answer."""
        self.page_size, self.device = page_size, torch.device(device)
        self.tokens = torch.zeros(seats, context + 1, dtype=torch.int32, device=device)
        self.tables = torch.zeros(seats, -(-context // page_size), dtype=torch.int32, device=device)
        self.prompts = np.zeros(seats, np.int32)  # tokens of each one's prompt

    def pack(self, plan: list[tuple[Request, int]]) -> Batch:
        counts = [n for _, n in plan]
        if counts.count(1) < len(plan):
            plan = sorted(plan, key=_is_chunk)  # single tokens and drafts first; otherwise as planned
            counts = [n for _, n in plan]
        requests = [r for r, _ in plan]
        fresh = self._write_tables(requests)
        # attrgetter and fromiter: the loops over rows run in C
        computed = np.fromiter(map(_computed, requests), np.int32, len(plan))
        known = np.fromiter(map(len, map(_tokens, requests)), np.int32, len(plan))
        new = np.fromiter(counts, np.int32, len(plan))
        paid = owned = np.flatnonzero(computed + new >= known)  # drafts come on top
        if counts.count(1) < len(plan) and any(map(_draft, requests)):
            self._write_drafts(requests)
            requests, computed, new, owned = _spread(plan, computed, paid)
        return self._batch(plan, fresh, paid, requests, computed, new, owned)

    def _batch(self, plan, fresh, paid, owners, computed, new, owned) -> Batch:
        """Rows of these owners: `new` tokens from `computed` on [B], logits for the rows `owned`."""
        B, counts = len(owners), new.tolist()
        host = np.zeros(
            (4, B + 1), dtype=np.int32
        )  # seats, computed, starts, lengths: one copy to the device
        host[0, :B] = np.fromiter(map(_seat, owners), np.int32, B)
        host[1, :B] = computed
        np.cumsum(new, out=host[2, 1:])
        host[3, :B] = computed + new
        lengths = host[3, :B].tolist()
        last, sampled_seats = (  # [R] each
            to_device(x[owned].astype(np.int64), self.device) for x in (host[2, 1:] - 1, host[0])
        )
        seats, computed, starts, device_lengths = to_device(host, self.device)
        width = -(-max(lengths) // self.page_size)
        ids, positions, slots = launch(
            seats[:B], starts, computed[:B], self.tokens, self.tables, self.page_size, int(host[2, B])
        )
        made = host[3, :B] - self.prompts[host[0, :B]]
        trees, singles = None, counts.count(1)
        if B > len(plan) and any(r.draft and r.draft.parents for r, _ in plan):
            shifts, trees = _branched(owners, singles)
            positions[:singles] += to_device(shifts[:singles], self.device)
            made, trees = made + shifts, to_device(trees, self.device)
        return Batch(
            plan=plan, fresh=fresh, paid=paid.tolist(), owners=owners,
            ids=ids, positions=positions, slots=slots, starts=starts,
            lengths=device_lengths[:B], tables=self.tables[:, :width].index_select(0, seats[:B]),
            num_singles=singles, counts=counts, host_lengths=lengths, sampled=owned.tolist(),
            last=last, seats=sampled_seats, made=made[owned], trees=trees,
        )  # fmt: skip

    def _write_drafts(self, requests: list[Request]) -> None:
        """Behind each last token, as if they were its own: node i of a tree has the place i + 1 behind it."""
        drafted = [r for r in requests if r.draft]
        tokens = [[r.tokens[-1], *r.draft.tokens] for r in drafted]
        rows = [r.seat for r, its in zip(drafted, tokens) for _ in its]
        columns = [len(r.tokens) - 1 + i for r, its in zip(drafted, tokens) for i in range(len(its))]
        self.write(rows, columns, sum(tokens, []))

    def write(self, seats: list[int], columns: list[int], tokens: list[int]) -> None:
        """Tokens at places that the host names."""
        if self.device.type == "cpu":
            self.tokens.numpy()[seats, columns] = tokens  # the same memory, without the dispatch of a tensor
        elif seats:
            at = to_device(torch.tensor([seats, columns, tokens]), self.device)
            self.tokens[at[0], at[1]] = at[2].int()

    def note(self, batch: Batch, tokens) -> None:
        """Write the drawn tokens [len(batch.sampled)] behind those they follow, without leaving the device."""
        known = tokens.int().clamp(min=0)  # -1 is no token: its request fails, maybe one step later
        self.tokens[batch.seats, batch.positions[batch.last] + 1] = known

    def _write_tables(self, requests: list[Request]) -> list[Request]:
        """Bring seats up to date: all of a request that is new here, else what its page table gained."""
        fresh, rows, columns, pages = [], [], [], []
        dirty_from, ends = map(_dirty, requests), map(len, map(_pages, requests))
        for request, dirty, end in zip(requests, dirty_from, ends):
            if dirty == end:
                continue
            if dirty == 0:
                fresh.append(request)
                self.prompts[request.seat] = len(request.prompt)
                tokens = torch.tensor(request.tokens, dtype=torch.int32)
                self.tokens[request.seat, : len(tokens)] = to_device(tokens, self.device)
            rows += [request.seat] * (end - dirty)
            columns += range(dirty, end)
            pages += request.pages[dirty:]
            request.dirty = end
        if pages and self.device.type == "cpu":
            self.tables.numpy()[rows, columns] = pages  # the same memory, without the dispatch of a tensor
        elif pages:
            at = to_device(torch.tensor([rows, columns, pages]), self.device)
            self.tables[at[0], at[1]] = at[2].int()
        return fresh


def to_device(host, device: torch.device):
    """A small array or tensor, on its way to the device: from pinned memory, so that nobody has to wait for it."""
    host = torch.as_tensor(host)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class ToHost:
    """Tokens on their way to the host: copied behind the work that makes them, waited for only when they are read."""

    def __init__(self, tokens: torch.Tensor):
        self.tokens, self.arrived = tokens, None
        if tokens.is_cuda:
            self.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self.tokens.copy_(tokens, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def tolist(self) -> list[int]:
        if self.arrived:
            self.arrived.synchronize()  # this copy's event: what was launched after it may still be running
        return self.tokens.tolist()


def branches(parents: list[int]) -> tuple[list[int], list[int]]:
    """Of a tree's root and then its nodes: how deep each lies, and which of the places before its own it sees.

    Bit m stands for the place m before a node's own (0: itself); the root sees all of its past, and so do they.
    """
    depths, seen = [0], [[0]]
    for i, parent in enumerate(parents, 1):
        depths.append(depths[parent + 1] + 1)
        seen.append([*seen[parent + 1], i])
    bits = []
    for i, places in enumerate(seen):
        unseen = {*range(i)} - {*places}
        bits.append(-1 - sum(1 << i - place for place in unseen))  # all bits, but for those
    return depths, bits


def _branched(owners: list[Request], singles: int):
    """How far each row's place in the text lies behind what its slot says, and its tree's bits: [B] int64 each."""
    shifts, trees, b = np.zeros(len(owners), np.int64), np.full(len(owners), -1), 0
    while b < singles:
        draft, n = owners[b].draft, 1
        if draft and draft.parents:
            depths, bits = branches(draft.parents)
            n = len(bits)
            shifts[b : b + n], trees[b : b + n] = depths - np.arange(n), bits
        b += n
    return shifts, trees


def _spread(plan, computed, paid):
    """Every token of a draft as a row of its own: owners, computed, tokens of the rows, and those that get logits."""
    owners, before, each, owned, paid = [], [], [], [], {*paid.tolist()}
    for b, ((request, n), start) in enumerate(zip(plan, computed.tolist())):
        many = n if request.draft else 1
        if b in paid:
            owned += range(len(owners), len(owners) + many)
        owners += [request] * many
        before += range(start, start + many)
        each += [1] * many if request.draft else [n]
    return owners, np.array(before, np.int32), np.array(each, np.int32), np.array(owned)


def _is_chunk(work: tuple[Request, int]) -> bool:
    return work[1] != 1 and not work[0].draft
