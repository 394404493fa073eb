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

import numpy as np
import torch

from minserve.kernels.pack import pack
from minserve.request import Request


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


class Packer:
    """The persistent buffers, and how a plan becomes a Batch."""

    def __init__(self, seats: int, context: int, page_size: int, device="cpu"):
        """`context`: the most tokens of one request, prompt and answer."""
        self.page_size, self.device = page_size, torch.device(device)
        self.tokens = torch.zeros(seats, context + 1, dtype=torch.int32, device=device)
        self.tables = torch.zeros(seats, -(-context // page_size), dtype=torch.int32, device=device)

    def pack(self, plan: list[tuple[Request, int]]) -> Batch:
        singles = [work for work in plan if work[1] == 1]
        plan = singles + [work for work in plan if work[1] != 1]
        fresh = self._write_tables(plan)
        B = len(plan)
        counts = [n for _, n in plan]
        host = np.zeros((4, B + 1), dtype=np.int32)
        host[0, :B] = [r.seat for r, _ in plan]
        host[1, :B] = [r.computed for r, _ in plan]
        np.cumsum(counts, out=host[2, 1:])
        host[3, :B] = host[1, :B] + np.diff(host[2])
        lengths = host[3, :B].tolist()
        sampled = [b for b, (r, _) in enumerate(plan) if lengths[b] == len(r.tokens)]
        seats, computed, starts, device_lengths = torch.from_numpy(host).to(self.device, non_blocking=True)
        rows = torch.from_numpy(np.array(sampled, dtype=np.int64)).to(self.device, non_blocking=True)
        width = -(-max(lengths) // self.page_size)
        ids, positions, slots = pack(
            seats[:B], starts, computed[:B], self.tokens, self.tables, self.page_size, int(host[2, B])
        )
        return Batch(
            plan=plan, fresh=fresh, ids=ids, positions=positions, slots=slots, starts=starts,
            lengths=device_lengths[:B], tables=self.tables[seats[:B], :width], num_singles=len(singles),
            counts=counts, host_lengths=lengths, sampled=sampled,
            last=starts[1:][rows].long() - 1, seats=seats[rows].long(),
        )  # fmt: skip

    def note(self, batch: Batch, tokens) -> None:
        """Write the drawn tokens [len(batch.sampled)] behind those they follow, without leaving the device."""
        self.tokens[batch.seats, batch.positions[batch.last] + 1] = tokens.int()

    def _write_tables(self, plan: list[tuple[Request, int]]) -> list[Request]:
        """Bring seats up to date: all of a request that is new here, else what its page table gained."""
        fresh, rows, columns, pages = [], [], [], []
        for request, _ in plan:
            dirty, end = request.dirty, len(request.pages)
            if dirty == end:
                continue
            if dirty == 0:
                fresh.append(request)
                tokens = torch.tensor(request.tokens, dtype=torch.int32)
                self.tokens[request.seat, : len(tokens)] = tokens.to(self.device)
            rows += [request.seat] * (end - dirty)
            columns += range(dirty, end)
            pages += request.pages[dirty:]
            request.dirty = end
        if pages:
            at = torch.tensor([rows, columns]).to(self.device)
            self.tables[at[0], at[1]] = torch.tensor(pages, dtype=torch.int32).to(self.device)
        return fresh
