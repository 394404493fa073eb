"""The other way to a compiled step on a CPU: torch.compile. What it costs before the first token, and what it gives.

    torch.compile   the whole step as one function of tensors, traced and compiled by Inductor for one number of rows
    graph           kernels/native.cpp, compiled once for all, its calls recorded for one number of rows (graphs.py)

Both run the same decode step over the same static cache: ROWS sequences of CONTEXT tokens. Inductor may fuse whatever
it likes; matmuls and attention stay PyTorch's. First use is the time from the first call to its result, in a process
that has compiled nothing yet, without its cache of earlier runs.
Story    LOG.md; notebooks/08_the_engine.ipynb
"""

import time
from functools import partial

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from minserve.batch import Packer
from minserve.bench.common import Options, chosen, label, load, on_gpu
from minserve.fused import FusedModel
from minserve.graphs import Graphs
from minserve.kernels import native
from minserve.lab.measure import clock, in_turn
from minserve.lab.report import Report, Row
from minserve.paged_attention import PagedCache
from minserve.sampler import Sampler

CONTEXT, PAGE = 128, 16


def run(options: Options) -> Report:
    """Raises SystemExit where there is no C++ compiler for either side, or a GPU."""
    if why_not := "the model would be on the GPU" if on_gpu() else native.usable():
        raise SystemExit(f"bench: inductor compares two compiled steps of a CPU; {why_not}")
    torch.compiler.config.force_disable_caches = True  # or an earlier run has paid for the first use
    report, model = options.report(), load(chosen(options)[0], options.dtype)
    for rows in (1,) if options.quick else (1, 8, 32):
        case = f"{label(options.model)} {options.dtype_name}, {rows} x {CONTEXT} tokens"
        mine = Replayed(model, rows)
        eager = Traced(model, rows)
        compiled, start = Traced(model, rows), time.perf_counter()
        torch._dynamo.reset()
        compiled.step = torch.compile(compiled.step, dynamic=False, fullgraph=True)
        compiled()
        first = time.perf_counter() - start
        sides = {"eager": eager, "torch.compile": compiled, "graph": mine}
        agree(case, sides)
        timed = {who: partial(clock, side) for who, side in sides.items()}
        samples = in_turn(timed, warmup=3, repeats=options.repeats, at_most=10)
        for who, seconds in samples.items():
            report.add(Row(f"{case}: {who}", "ms", [1e3 * s for s in seconds]))
        report.add(Row(f"{case}: torch.compile, first use", "s", [first]))
        report.add(Row(f"{case}: graph, recording", "s", [mine.first]))
        ratios = [a / b for a, b in zip(samples["torch.compile"], samples["graph"])]
        report.add(Row(f"{case}: torch.compile / graph", "x", ratios, 1.0))
    return report


def agree(case: str, sides: dict) -> None:
    """Raises RuntimeError where the sides' logits are not of one model: a fast wrong step is no comparison.

    In 16 bits a single odd token may come out differently each time: what counts is where most rows point.
    """
    first, *others = (side().float() for side in sides.values())
    for other in others:
        alike = float(torch.cosine_similarity(other, first).median())
        if not alike > 0.9:
            raise RuntimeError(f"{case}: the logits point {alike:.2f} in one direction: not the same step")


def some_ids(model, rows: int):
    return (torch.arange(rows) * 977 + 1000) % model.config.vocab_size


class Replayed:
    """A step of our own engine's graph, its rows filled with what the other sides have."""

    def __init__(self, model, rows: int):
        pages = rows * CONTEXT // PAGE
        cache = PagedCache(model.config, pages, PAGE, model.dtype)
        start = time.perf_counter()
        graphs = Graphs(model, cache, Packer(rows, CONTEXT, PAGE), Sampler(rows, model.config.vocab_size))
        self.first = time.perf_counter() - start
        self.step = graphs.steps[rows, graphs.reaches[-1]]
        self.step.ids[:] = some_ids(model, rows)
        self.step.positions[:] = CONTEXT - 1
        self.step.tables[:] = torch.arange(pages, dtype=torch.int32).view(rows, -1)
        self.step.slots[:] = (torch.arange(rows) + 1) * CONTEXT - 1
        self.step.lengths[:] = CONTEXT

    def __call__(self):
        return self.step.replay()[0]


class Traced:
    """The same step as one function of tensors without side doors: what torch.compile can take whole."""

    def __init__(self, model, rows: int):
        self.model, self.config, self.rows = FusedModel.of(model, CONTEXT), model.config, rows
        shape = rows, CONTEXT, model.config.num_kv_heads, model.config.head_dim
        self.cache = [torch.zeros(2, *shape, dtype=model.dtype) for _ in model.layers]
        self.ids = some_ids(model, rows)
        self.turns = self.model.turns[CONTEXT - 1]

    @torch.inference_mode()
    def __call__(self):
        return self.step(self.ids)

    def step(self, ids):
        model, config, eps = self.model.model, self.config, self.config.norm_eps
        G, D, R = config.num_kv_heads, config.head_dim, config.num_heads // config.num_kv_heads
        residual = model.embed_tokens.weight[ids]
        x = norm(residual, model.layers[0].input_layernorm.weight, eps)
        for i, (qkv, o, gate_up, down, _) in enumerate(self.model.layers):
            heads = linear(x, qkv.weight, qkv.bias).view(self.rows, -1, D)
            q, k, v = heads.split([G * R, G, G], 1)
            self.cache[i][0][:, -1] = self.turn(k)
            self.cache[i][1][:, -1] = v
            keys, values = (kept.transpose(1, 2) for kept in self.cache[i])  # [rows, G, CONTEXT, D]
            seen = scaled_dot_product_attention(self.turn(q).view(self.rows, G, R, D), keys, values)
            residual = residual + linear(seen.reshape(self.rows, -1), o.weight, o.bias)
            x = norm(residual, model.layers[i].post_attention_layernorm.weight, eps)
            gate, up = linear(x, gate_up.weight, gate_up.bias).chunk(2, -1)
            x = (silu(gate.float()) * up.float()).to(x.dtype)
            residual = residual + linear(x, down.weight, down.bias)
            after = model.norm if i + 1 == config.num_layers else model.layers[i + 1].input_layernorm
            x = norm(residual, after.weight, eps)
        return linear(x, model.head)

    def turn(self, x):
        (cos, sin), (a, b) = self.turns.chunk(2, -1), x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def norm(x, weight, eps: float):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
