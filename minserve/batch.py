"""One step's plan as tensors: what a scheduler decided, flat, the way a model reads it.

    plan    [(request, num_tokens), ...]
    Batch   rows that compute one token first, then the chunks; one row per request, one place per token

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
from operator import attrgetter

import numpy as np
import torch

from minserve.kernels.pack import launch
from minserve.request import Request
from minserve.step_log import Row

_seat, _computed, _tokens, _pages, _dirty = map(attrgetter, ("seat", "computed", "tokens", "pages", "dirty"))


@dataclass(frozen=True)
class Batch:
    plan: list[tuple[Request, int]]  # in the order of the rows
    fresh: list[Request]  # those that took their seat in this step
    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64; -1 is nowhere
    starts: torch.Tensor  # [B + 1] int32
    lengths: torch.Tensor  # [B] int32, the step's own tokens included
    tables: torch.Tensor  # [B, M] int32, wide enough for the longest
    num_singles: int  # rows, and places, of one token
    counts: list[int]  # tokens per row, on the host
    host_lengths: list[int]
    sampled: list[int]  # rows whose debt this step pays in full: only they get a token
    last: torch.Tensor  # [len(sampled)] int64, the place of each one's last token
    seats: torch.Tensor  # [len(sampled)] int64

    def rows(self) -> list[Row]:
        """This step's part of the log."""
        ids, computed = [r.id for r, _ in self.plan], [n - c for n, c in zip(self.host_lengths, self.counts)]
        paid = [False] * len(ids)
        for b in self.sampled:
            paid[b] = True
        return list(map(Row, ids, self.counts, computed, paid))


class Packer:
    """The persistent buffers, and how a plan becomes a Batch."""

    def __init__(self, seats: int, context: int, page_size: int, device="cpu"):
        """`context`: the most tokens of one request, prompt and answer."""
        self.page_size, self.device = page_size, torch.device(device)
        self.tokens = torch.zeros(seats, context + 1, dtype=torch.int32, device=device)
        self.tables = torch.zeros(seats, -(-context // page_size), dtype=torch.int32, device=device)

    def pack(self, plan: list[tuple[Request, int]]) -> Batch:
        counts, B = [n for _, n in plan], len(plan)
        if counts.count(1) < B:
            plan = sorted(plan, key=_is_chunk)  # single tokens first; otherwise as planned
            counts = [n for _, n in plan]
        requests = [r for r, _ in plan]
        fresh = self._write_tables(requests)
        # attrgetter and fromiter: the loops over rows run in C
        host = np.zeros(
            (4, B + 1), dtype=np.int32
        )  # seats, computed, starts, lengths: one copy to the device
        host[0, :B] = np.fromiter(map(_seat, requests), np.int32, B)
        host[1, :B] = np.fromiter(map(_computed, requests), np.int32, B)
        new = np.fromiter(counts, np.int32, B)
        np.cumsum(new, out=host[2, 1:])
        host[3, :B] = host[1, :B] + new
        lengths, known = host[3, :B].tolist(), np.fromiter(map(len, map(_tokens, requests)), np.int32, B)
        sampled = np.flatnonzero(host[3, :B] == known)
        last, sampled_seats = (  # [R] each
            to_device(x[sampled].astype(np.int64), self.device) for x in (host[2, 1:] - 1, host[0])
        )
        seats, computed, starts, device_lengths = to_device(host, self.device)
        width = -(-max(lengths) // self.page_size)
        ids, positions, slots = launch(
            seats[:B], starts, computed[:B], self.tokens, self.tables, self.page_size, int(host[2, B])
        )
        return Batch(
            plan=plan, fresh=fresh, ids=ids, positions=positions, slots=slots, starts=starts,
            lengths=device_lengths[:B], tables=self.tables[:, :width].index_select(0, seats[:B]),
            num_singles=counts.count(1), counts=counts, host_lengths=lengths, sampled=sampled.tolist(),
            last=last, seats=sampled_seats,
        )  # fmt: skip

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


def _is_chunk(work: tuple[Request, int]) -> bool:
    return work[1] != 1
