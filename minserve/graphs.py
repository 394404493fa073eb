"""Steps that are recorded once and replayed: a decode step's hundreds of launches become one.

    CUDA graph      the GPU's driver records the launches; replay() submits them all at once
    call list       the same on a CPU: every call of a native kernel with its pointers, in order; replay() calls them
                    again. Nothing is compiled, nothing is clever: this is all that a CUDA graph is

What is recorded is fixed: shapes, addresses, order. So a graph belongs to a *bucket*, a number of rows, and has memory
of its own for what goes in and what comes out. A batch of 5 runs in the bucket of 8: it is copied into the first 5
rows, and the other 3 are padding that writes nowhere (slot -1), reads nothing (length 0) and is never looked at.

Only steps in which every row computes one token have a graph. Prompts run without: a large step is not short of time
between two launches.
Buckets      1, 2, 4, 8, then every 16. Padding wastes at most half of a step's rows, and from 16 on at most 15 of them
Drawing      is part of the graph: greedy on a CPU; on a GPU also temperature, top-k, top-p and min-p. Rows that ask for
             more (penalties, logprobs, ...) are drawn by the Sampler, from the logits the graph left
Memory       a graph keeps its activations; on a GPU all graphs share one pool
Sources      CUDA graphs: CUDA programming guide, "CUDA Graphs"; for decoding: gpt-fast (2023)
Story        notebooks/08_the_engine.ipynb
"""

from functools import partial
from itertools import product

import torch
from tqdm import tqdm

from minserve.batch import Batch, Packer, to_device
from minserve.fused import FusedModel
from minserve.kernels.sample import sample
from minserve.model import Model
from minserve.paged_attention import PagedCache, Rows
from minserve.sampler import DRAWN, Sampler

MOST_DRAFTED = 128  # rows of a recorded step, where drafts make more of them than there are seats


def buckets_up_to(rows: int) -> list[int]:
    """The sizes that serve 1 .. rows, the last one cut to `rows`."""
    sizes = [1, 2, 4, 8, *range(16, rows + 16, 16)]
    return [*(size for size in sizes if size < rows), rows] if rows else []


class Fused:
    """A step as it is, whatever it holds: the fused model, operation by operation."""

    def __init__(self, model: Model, cache: PagedCache, room: int):
        self.model, self.cache = FusedModel.of(model, room), cache

    def __call__(self, batch: Batch) -> tuple:
        """The logits of batch.last, what is drawn already (see Sampler.draw), and the states behind the logits."""
        targets, look = self.cache.targets(batch), self.cache.look_for(batch, self.model.native)
        states = self.model.states(batch.ids, batch.positions, targets, look, batch.last)
        logits = self.model.scores(states)
        return logits, (self.model.ops.best(logits), 0) if self.model.native else None, states


class Graphs(Fused):
    """The same; but a step of single tokens is replayed from its bucket's graph."""

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        packer: Packer,
        sampler: Sampler,
        progress: bool = False,
        drafts: int = 0,
        branches: bool = False,
        budget: int = MOST_DRAFTED,
    ):
        """`drafts`: the most tokens that a row may verify besides its own. `branches`: they may be trees. `budget`: the
        most tokens of a step, drafts included."""
        super().__init__(model, cache, packer.tokens.shape[1])
        seats, width = packer.tables.shape
        room, on_gpu = width * packer.page_size, model.device.type == "cuda"
        few = self.model.few if cache.on_native else 0
        most = max(seats, min(seats * (1 + drafts), MOST_DRAFTED, budget))
        rows = buckets_up_to(most if on_gpu else min(most, few))
        reaches = [r for r in (2048 * 4**i for i in range(10)) if r < room] if on_gpu else []
        graph = partial(CudaGraph, torch.cuda.graph_pool_handle()) if on_gpu else CallList
        self.sampler, self.steps = sampler, {}
        # the largest first: smaller ones reuse its memory
        work = list(product([*reaches, room], reversed(rows)))
        for reach, n in tqdm(work, unit="graph", desc="recording steps", disable=not progress):
            self.steps[n, reach] = Step(self.model, cache, n, width, reach, graph, branches)
        self.rows, self.reaches = rows, [*reaches, room]

    def __call__(self, batch: Batch) -> tuple:
        B = len(batch.counts)
        if batch.num_singles < B or B > max(self.rows, default=0):
            return super().__call__(batch)
        n = next(size for size in self.rows if size >= B)
        step = self.steps[n, next(r for r in self.reaches if r >= max(batch.host_lengths))]
        step.fill(batch, B, self.sampler)
        logits, tokens, states = step.replay()
        if len(batch.sampled) < B:  # a prompt of which one token was left, and it was not the last one
            return logits[batch.last], None, states[batch.last]
        # a copy of the tokens: the next replay writes into the same memory
        return logits[:B], (tokens[:B].clone(), step.draws), states[:B]


class Step:
    """One bucket: memory for what goes in, a recording, and where its results appear."""

    def __init__(self, model, cache: PagedCache, rows: int, width: int, reach: int, graph, branches=False):
        """Records at once, with nothing but padding. `reach`: the most tokens that a row may see."""
        zeros = partial(torch.zeros, device=model.turns.device)
        self.ids, self.positions = (zeros(rows, dtype=torch.int64) for _ in range(2))
        self.slots = zeros(rows, dtype=torch.int64) - 1
        self.lengths, self.tables = zeros(rows, dtype=torch.int32), zeros(rows, width, dtype=torch.int32)
        self.padding = cache.padding | ({"trees": -1} if branches else {})
        self.more = {name: zeros(rows, dtype=torch.int64) + value for name, value in self.padding.items()}
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=self.ids.device)
        self.numbers = zeros(rows, 3, dtype=torch.float64)  # temperature, top_p, min_p
        self.whole = zeros(rows, 3, dtype=torch.int64)  # top_k, seed, position
        self.model, self.cache, self.reach = model, cache, reach
        self.turns = model.turns  # recorded by address: kept, also when the model makes longer ones
        self.draws = 0 if model.native else DRAWN  # which wishes of the Sampler the graph fulfils
        self.replay = graph(self.run, model.ops)

    def run(self) -> tuple:
        """What is recorded. Nothing in it may depend on a value: only addresses are remembered."""
        states = self.model.states(self.ids, self.positions, self.cache.targets_of(self), self.look)
        logits = self.model.scores(states)
        if self.model.native:
            return logits, self.model.ops.best(logits), states
        temperature, top_p, min_p = self.numbers.T.contiguous()
        top_k, seeds, positions = self.whole.T.contiguous()
        return logits, sample(logits, temperature.float(), top_k, top_p, min_p, seeds, positions), states

    def look(self, layer: int, q):
        self.cache.store(layer, self, self.model.native)
        more = self.more.get("homes"), self.more.get("trees")
        rows = Rows(self.tables, self.starts, self.lengths, self.reach, *more)
        return self.cache.singles(layer, q, rows, self.model.native)

    def fill(self, batch: Batch, B: int, sampler: Sampler) -> None:
        """A batch of B rows takes the first B; the others must not remember who was there before."""
        more, padded = self.cache.more_of(batch), dict(ids=0, positions=0, slots=-1, lengths=0)
        if "trees" in self.more:
            more["trees"] = -1 if batch.trees is None else batch.trees
        for name, padding in (padded | self.padding).items():
            mine = self.more[name] if name in more else getattr(self, name)
            mine[:B] = more[name] if name in more else getattr(batch, name)
            mine[B:] = padding
        self.tables[:B, : batch.tables.shape[1]].copy_(batch.tables)
        if self.draws and len(batch.sampled) == B:
            numbers, whole = sampler.wishes(batch.owners, batch.made)
            self.numbers[:B].copy_(to_device(numbers, self.ids.device))
            self.whole[:B].copy_(to_device(whole, self.ids.device))


# ---------------------------------------------------------------- two recorders of one kind
class CallList:
    """The CPU's graph: native calls with ready arguments, in order."""

    def __init__(self, run, ops):
        with ops.recording() as self.calls:
            self.results = run()
        self.play = ops.replay(self.calls)

    def __call__(self) -> tuple:
        self.play()
        return self.results


class CudaGraph:
    def __init__(self, pool, run, ops):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and workspaces made before the recording
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.results = run()

    def __call__(self) -> tuple:
        self.graph.replay()
        return self.results
