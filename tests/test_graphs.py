"""A replayed step is the fused step: the same numbers, whatever was in the graph's memory before.

Batches      rows of every number, on pages that move, run through the graphs and through the fused road on a copy of
             the cache; slots that nobody owns hold NaN, and so does the memory before and behind the cache
Definitions  the road of a GPU, walked on a CPU: a recorder in the place of a CUDA graph records with padding and
             replays with real rows, so that whatever Python saw while recording is seen to be stale
"""

import copy
import inspect
import random
from types import SimpleNamespace

import pytest
import torch
from test_engine import MIXED, PROMPTS, alone, engine
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import minserve.graphs
import minserve.paged_attention
from minserve.batch import Packer
from minserve.fused import FusedModel
from minserve.graphs import buckets_up_to
from minserve.kernels import native
from minserve.paged_attention import PagedCache
from minserve.request import Request, SamplingParams
from minserve.sampler import DRAWN, Sampler
from minserve.weights import load

BF16 = torch.bfloat16
NAN = float("nan")
PAGE, CONTEXT = 4, 40
GREEDY = SamplingParams()
needs_native = pytest.mark.skipif(native.usable() is not None, reason=str(native.usable()))


@pytest.mark.parametrize(
    "rows, buckets",
    [
        (0, []),
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 9]),
        (16, [1, 2, 4, 8, 16]),
        (17, [1, 2, 4, 8, 16, 17]),
        (64, [1, 2, 4, 8, 16, 32, 48, 64]),
        (70, [1, 2, 4, 8, 16, 32, 48, 64, 70]),
    ],
)
def test_buckets(rows, buckets):
    assert buckets_up_to(rows) == buckets
    for size in range(1, rows + 1):
        bucket = next(b for b in buckets if b >= size)
        assert bucket < 2 * size or bucket - size <= 15


# ---------------------------------------------------------------- a cache, and batches that live in it
class World:
    """Requests at random places of a guarded cache, in seats they change; a step of them runs on two roads."""

    def __init__(self, model, module=minserve.graphs, seats=20, sinks=0, seed=0, context=CONTEXT, page=PAGE):
        self.model, self.module, self.rng = model, module, random.Random(seed)
        self.sampler, self.packer = Sampler(seats, model.config.vocab_size), Packer(seats, context, page)
        self.page, self.pages = page, 1 + 2 * seats * -(-context // page)  # page 0 is nobody's
        self.guards, self.cache = [], PagedCache(model.config, self.pages, page, model.dtype, sinks=sinks)
        for pool in (self.cache.k, self.cache.v):
            for layer, x in enumerate(pool):
                room = torch.full((len(x) + 2, *x.shape[1:]), NAN, dtype=x.dtype)
                pool[layer] = room[1:-1]
                self.guards.append(room)
        self.ids, self.free = iter(range(10**6)), list(range(1, self.pages))
        self.rng.shuffle(self.free)

    def graphs(self, **options):
        return self.module.Graphs(self.model, self.cache, self.packer, self.sampler, **options)

    def request(self, seat: int, computed: int, more: int = 1, params=GREEDY) -> Request:
        """`computed` tokens of its past are random numbers in the cache, and it owes `more`."""
        tokens = [self.rng.randrange(self.model.config.vocab_size) for _ in range(computed + more)]
        r = Request(next(self.ids), tokens[: max(1, computed // 2)], params, CONTEXT, seed=seat)
        r.tokens, r.computed, r.seat = tokens, computed, seat
        r.pages = [self.free.pop() for _ in range(-(-(computed + more) // self.page))]
        generator = torch.Generator().manual_seed(r.id)
        for x in (*self.cache.k, *self.cache.v):
            past = torch.randn(computed, *x.shape[2:], generator=generator)
            for p in range(computed):
                x[r.pages[p // self.page], p % self.page] = past[p].to(x.dtype)
        return r

    def leave(self, request) -> None:
        for page in request.pages:
            self.free.append(page)
            for x in (*self.cache.k, *self.cache.v):
                x[page] = NAN
        self.rng.shuffle(self.free)

    def move(self, request) -> None:
        """To other pages, as after a copy on write or a preemption."""
        old, new = request.pages, [self.free.pop() for _ in request.pages]
        self.cache.copy(list(zip(old, new)))
        request.pages, request.dirty = new, 0
        self.leave(SimpleNamespace(pages=old))

    def batch(self, plan):
        batch = self.packer.pack(plan)
        for r in batch.fresh:
            self.sampler.put(r.seat, r.params, r.seed, r.prompt, r.outputs, r.stop_ids)
        return batch

    def advance(self, plan) -> None:
        for request, n in plan:
            request.computed += n
            if request.computed == len(request.tokens):
                request.tokens.append(self.rng.randrange(self.model.config.vocab_size))
                request.dirty = 0  # its seat's tokens are written again
            while len(request.pages) * self.page < len(request.tokens):
                request.pages.append(self.free.pop())

    def twice(self, graphs, plan):
        """The step by `graphs`, and by the fused road on a copy of the cache: (theirs, ours), each with states."""
        batch, theirs = self.batch(plan), copy.copy(self.cache)
        theirs.k, theirs.v = ([x.clone() for x in pool] for pool in (self.cache.k, self.cache.v))
        expected = self.module.Fused(self.model, theirs, self.packer.tokens.shape[1])(batch)
        made = graphs(batch)
        return batch, expected, made, theirs

    def check_cache(self, theirs, **tolerance) -> None:
        for mine, its in zip((*self.cache.k, *self.cache.v), (*theirs.k, *theirs.v)):
            torch.testing.assert_close(mine, its, equal_nan=True, **tolerance or dict(rtol=0, atol=0))
        for room in self.guards:
            assert room[0].isnan().all() and room[-1].isnan().all(), "written outside of the cache"

    def same(self, graphs, plan):
        """One step on both roads, bit for bit."""
        batch, (logits, drawn, states), (mine, own, its), theirs = self.twice(graphs, plan)
        assert (
            torch.equal(its, states)
            and torch.equal(mine, logits)
            and mine.isfinite().all()
            and len(mine) == len(batch.sampled)
        )
        if own is not None:
            assert torch.equal(own[0], drawn[0]) and own[1] == drawn[1]
            assert own[0].tolist() == logits.float().argmax(-1).tolist()
        self.check_cache(theirs)
        return batch, mine, own


def counted(graphs):
    """How often each bucket was replayed."""
    counts = dict.fromkeys(graphs.steps, 0)

    def counting(key, replay):
        def call():
            counts[key] += 1
            return replay()

        return call

    for key, step in graphs.steps.items():
        step.replay = counting(key, step.replay)
    return counts


# ---------------------------------------------------------------- every size
def check_sizes(
    get, module=minserve.graphs, family="llama-3", sizes=range(1, 18), dtype=torch.float32, sinks=0
):
    world = World(get(family, dtype), module, seats=max(sizes), sinks=sinks)
    graphs = world.graphs()
    counts, few = counted(graphs), max(graphs.rows, default=0)
    requests = [world.request(i, world.rng.randrange(0, 30)) for i in range(max(sizes))]
    order = [*sizes, *reversed(sizes)]  # after a larger batch, rows that pad were somebody's
    for B in order:
        plan = [(r, 1) for r in world.rng.sample(requests, B)]
        before = sum(counts.values())
        world.same(graphs, plan)
        assert sum(counts.values()) - before == (B <= few), "not the road for this many rows"
        if B <= few:
            bucket = next(n for n in graphs.rows if n >= B)
            step = graphs.steps[bucket, graphs.reaches[-1]]
            padding = step.slots[B:].tolist(), step.lengths[B:].tolist(), step.ids[B:].tolist()
            assert padding == ([-1] * (bucket - B), [0] * (bucket - B), [0] * (bucket - B))
        world.advance([])
    used = {n for (n, _), count in counts.items() if count}
    assert used == {next(n for n in graphs.rows if n >= B) for B in sizes if B <= few}


@needs_native
@pytest.mark.parametrize(
    "family, sinks",
    [("llama-3", 0), ("llama-biases", 0), ("qwen3", 0), ("mistral", 0), ("mistral", 3), ("qwen2-window", 0)],
)
def test_every_size_gives_what_the_fused_road_gives(get, family, sinks):
    check_sizes(get, family=family, sinks=sinks)


@needs_native
def test_every_size_in_bf16(get):
    """With matrix units all of these have a graph; without, those up to the crossover."""
    check_sizes(get, sizes=[1, 3, 8, 15, 16, 17, 31, 32, 33, 40], dtype=BF16)


# ---------------------------------------------------------------- steps after steps
def check_days(get, module=minserve.graphs, family="llama-3", turns=40, seed=0):
    """Rows come, go, move, take each other's seats; prompts join; debts are paid in part."""
    world = World(get(family), module, seats=9, seed=seed)
    graphs, rng = world.graphs(), world.rng
    counts, here, kept = counted(graphs), {}, []
    partly = 0
    for _ in range(turns):
        for seat in range(9):
            if seat not in here and rng.random() < 0.4:
                here[seat] = world.request(seat, rng.randrange(12), rng.choice([1, 1, 1, 2, 6]))
        plan = []
        for request in here.values():
            owed = len(request.tokens) - request.computed
            if rng.random() < 0.8:
                plan.append((request, rng.choice([1, owed])))
        if not plan:
            continue
        rng.shuffle(plan)
        batch, logits, drawn = world.same(graphs, plan)
        partly += len(batch.sampled) < len(plan) == batch.num_singles
        if drawn:
            kept.append((drawn[0], drawn[0].tolist(), drawn[0].clone()))
        for tokens, values, _ in kept:
            assert tokens.tolist() == values, "the next replay has written over an earlier step's tokens"
        world.advance(plan)
        for seat, request in list(here.items()):
            if len(request.tokens) > CONTEXT - 8 or rng.random() < 0.1:
                world.leave(here.pop(seat))
            elif rng.random() < 0.2:
                world.move(request)
    assert partly and sum(counts.values()) > turns / 5, "too quiet"


@needs_native
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["llama-3", "mistral"])
def test_days(get, family, seed):
    check_days(get, family=family, seed=seed)


@needs_native
def test_a_prompt_of_which_one_token_is_left_has_no_token_yet(get):
    """A step of single tokens of which some do not pay their debt: a graph computes it, nothing is drawn for those."""
    world = World(get("llama-3"))
    plan = [(world.request(0, 5, 3), 1), (world.request(1, 9, 1), 1)]
    batch, logits, drawn = world.same(world.graphs(), plan)
    assert batch.sampled == [1] and len(logits) == 1 and drawn is None


@needs_native
def test_what_is_not_finite_is_one_rows_trouble(get):
    model = get("llama-3")
    model.embed_tokens.weight[77] = NAN
    world = World(model)
    graphs = world.graphs()
    requests = [world.request(i, 3 + i) for i in range(3)]
    requests[1].tokens[-1] = 77
    _, (logits, (drawn, _), _), (mine, (own, _), _), _ = world.twice(graphs, [(r, 1) for r in requests])
    assert own.tolist() == drawn.tolist() and own[1] == -1 and (own[[0, 2]] >= 0).all()
    assert torch.equal(mine[[0, 2]], logits[[0, 2]]) and mine[1].isnan().all()
    for i in (0, 2):  # and nothing of it stays in the graph
        again = world.request(10 + i, 4)
        _, _, own = world.same(graphs, [(again, 1)])
        assert own[0][0] >= 0


# ---------------------------------------------------------------- what a recording is
@needs_native
def test_every_bucket_records_the_same_calls(get):
    for family in ("llama-3", "qwen3"):
        model = get(family)
        graphs = World(model).graphs()
        functions = [[call[0] for call in step.replay.calls] for step in graphs.steps.values()]
        assert len(functions) == len(graphs.rows) > 3 and all(calls == functions[0] for calls in functions)
        assert len(functions[0]) == 2 + 9 * model.config.num_layers + 2
        names = {id(function): name for (name, _), function in model._fused.ops._functions.items()}
        layer = "linear rope_and_write attend linear add_rms_norm linear silu_mul linear add_rms_norm".split()
        expected = ["embed", "rms_norm", *layer * model.config.num_layers, "linear", "best"]
        assert [names[id(function)] for function in functions[0]] == expected


def check_recording(get, module=minserve.graphs):
    """Recording runs the step once, with padding only: the cache stays as it was."""
    world = World(get("llama-3"), module)
    steps = world.graphs().steps.values()
    assert all(room.isnan().all() for room in world.guards)
    assert all((step.slots == -1).all() and not step.lengths.any() for step in steps)


@needs_native
def test_recording_leaves_the_cache_alone(get):
    check_recording(get)


@needs_native
def test_a_graph_keeps_what_it_needs(get):
    """The model learns longer angles, and everything else that Python may forget is forgotten."""
    model = get("llama-3")
    world = World(model)
    graphs = world.graphs()
    FusedModel.of(model, 4 * CONTEXT)
    rubbish = [torch.full((CONTEXT + 1, 16), NAN) for _ in range(200)]
    world.same(graphs, [(world.request(i, 4 * i), 1) for i in range(3)])
    del rubbish


# ---------------------------------------------------------------- the sampler beside it
@needs_native
def test_rows_that_ask_for_more_are_drawn_from_the_graphs_logits(get):
    model = get("llama-3")
    wanted = [SamplingParams(max_tokens=10, ignore_eos=True, **m) for m in MIXED]
    wanted.append(SamplingParams(max_tokens=10, ignore_eos=True, logprobs=3))
    heard = {}
    for step in ("plain", "graph"):
        e = engine(model, max_running=16, step=step)
        replays = counted(e.compute) if step == "graph" else {}
        outputs = [e.add(PROMPTS[0], params)[0] for params in wanted]
        while e.outputs:
            e.step()
        heard[step] = outputs
    assert sum(replays.values()) >= 9
    for params, plain, graph in zip(wanted, *heard.values(), strict=True):
        assert graph.tokens == plain.tokens, params
        if params.logprobs is None:
            assert graph.tokens == alone(model, PROMPTS[0], params)
        for a, b in zip(plain.logprobs, graph.logprobs, strict=True):
            assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [i for i, _ in a.top] == [i for i, _ in b.top]


# ---------------------------------------------------------------- the road of a GPU, without one
class Recorded(TorchDispatchMode):
    """A CUDA graph's stand-in: operations are recorded with their tensors; a replay does them again, in place.

    Reading a value while recording is an error, as on a GPU. The launchers of kernels are one operation each.
    """

    active = None

    def __init__(self, pool, run, ops):
        super().__init__()
        assert pool == "the pool"
        self.calls = []
        for name in ("rms_norm", "add_rms_norm", "rope_and_write", "silu_mul"):
            setattr(ops, name, Recorded.whole(getattr(ops, name)))
        Recorded.active = self
        try:
            with self:
                self.results = run()
        finally:
            Recorded.active = None

    @staticmethod
    def whole(launcher):
        def call(*args):
            if Recorded.active is None:
                return launcher(*args)
            with _disable_current_modes():
                out = launcher(*args)
            Recorded.active.calls.append((launcher, args, {}, out))
            return out

        return call

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        assert not any(bad in name for bad in ("_local_scalar_dense", "nonzero", "is_nonzero")), (
            f"{name} while recording"
        )
        out = function(*args, **kwargs or {})
        self.calls.append((function, args, kwargs or {}, out))
        return out

    def __call__(self):
        with torch.inference_mode():
            for function, args, kwargs, old in self.calls:
                new = function(*args, **kwargs)
                pairs = zip(old, new) if isinstance(old, tuple | list) else [(old, new)]
                for there, made in pairs:
                    if there.data_ptr() != made.data_ptr():
                        there.copy_(made)
        return self.results


class OnGpu:
    """The model, as if it were on a GPU, for Graphs and nobody else."""

    def __init__(self, model, room):
        self.real, self.device = model, SimpleNamespace(type="cuda")
        self._fused = FusedModel(model, room)

    def __getattr__(self, name):
        return getattr(self.real, name)


LONG, BIG = 2300, 16  # positions and page size: beyond the first reach


def check_gpu(get, monkeypatch, module=minserve.graphs, family="llama-3"):
    """Greedy and sampled rows, short ones and long ones, replayed from recordings of padding."""
    monkeypatch.setattr(native, "usable", lambda: "as on a GPU")
    paged = minserve.paged_attention
    monkeypatch.setattr(paged, "paged_decode", Recorded.whole(paged.paged_decode))
    monkeypatch.setattr(module, "sample", Recorded.whole(module.sample))
    monkeypatch.setattr(module, "CudaGraph", Recorded)
    monkeypatch.setattr(module, "to_device", lambda host, device: torch.as_tensor(host))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    world = World(get(family), module, seats=5, context=LONG, page=BIG)
    world.model = OnGpu(world.model, LONG + 1)
    graphs = world.graphs()
    assert graphs.rows == [1, 2, 4, 5] and graphs.reaches == [2048, -(-LONG // BIG) * BIG]
    assert {step.reach for step in graphs.steps.values()} == set(graphs.reaches)
    counts = counted(graphs)
    warm = SamplingParams(temperature=1.5, top_k=30)
    cool = SamplingParams(temperature=0.7, top_p=0.8, min_p=0.02)
    fresh = iter([GREEDY, warm, cool, GREEDY, warm] * 9)
    here = [world.request(seat, 3 + 5 * seat, params=next(fresh)) for seat in range(5)]
    for turn in range(9):
        B = (5, 1, 2, 3, 4, 3, 5, 1, 2)[turn]
        if turn == 5:
            world.leave(here[0])
            here[0] = world.request(0, 2100, params=warm)
        rows = here[:B]
        batch, (logits, drawn, states), (mine, own, its), theirs = world.twice(graphs, [(r, 1) for r in rows])
        torch.testing.assert_close(mine, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(its, states, rtol=1e-4, atol=1e-4)
        world.check_cache(theirs, rtol=1e-4, atol=1e-4)
        assert drawn is None and own[1] == DRAWN
        made = [len(r.tokens) - len(r.prompt) for r in rows]
        expected = world.sampler(logits, batch.seats, made).tokens
        assert own[0].tolist() == expected.tolist()
        kept = own[0].clone()
        assert world.sampler(mine, batch.seats, made, own).tokens.tolist() == expected.tolist()
        key = next(n for n in graphs.rows if n >= B), graphs.reaches[turn >= 5]
        assert counts[key] >= 1 and sum(counts.values()) == turn + 1
        assert (graphs.steps[key].slots[B:] == -1).all() and own[0].tolist() == kept.tolist()
        world.advance([(r, 1) for r in rows])
    one = world.request(4, 5, 3)
    batch = world.batch([(one, 1)])
    logits, drawn, states = graphs(batch)
    assert drawn is None and len(logits) == len(states) == 0  # nobody's debt is paid


@pytest.mark.parametrize("family", ["llama-3", "qwen3", "mistral"])
def test_recordings_of_padding_serve_real_rows(get, monkeypatch, family):
    check_gpu(get, monkeypatch, family=family)


def test_a_cuda_graph_is_warmed_up_beside_then_recorded(monkeypatch):
    """Two runs on a stream of its own, joined; then the recording, in the pool that all of them share."""
    order = []

    class Block:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            order.append(f"enter {self.name}")

        def __exit__(self, *_):
            order.append(f"leave {self.name}")

    class Stream:
        def __init__(self, name="side"):
            self.name = name

        def wait_stream(self, other):
            order.append(f"{self.name} waits for {other.name}")

    cuda = SimpleNamespace(
        Stream=Stream,
        current_stream=lambda: Stream("main"),
        stream=lambda s: Block(s.name),
        graph=lambda graph, pool: Block(f"recording in {pool}"),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: order.append("replay")),
    )
    monkeypatch.setattr(minserve.graphs, "torch", SimpleNamespace(cuda=cuda))
    graph = minserve.graphs.CudaGraph("pool", lambda: order.append("run") or len(order), None)
    assert order == [
        "side waits for main", "enter side", "run", "run", "leave side", "main waits for side",
        "enter recording in pool", "run", "leave recording in pool",
    ]  # fmt: skip
    assert graph() == 8 and order[-1] == "replay"


# ---------------------------------------------------------------- these checks can fail
@pytest.fixture
def get(checkpoints):
    """get("llama-3"): a model of its own."""
    return lambda family, dtype=torch.float32: load(checkpoints(family), dtype)


def sizes(get, module, monkeypatch):
    check_sizes(get, module)
    check_sizes(get, module, family="mistral", sinks=3)


def days(get, module, monkeypatch):
    for seed in range(2):
        check_days(get, module, seed=seed)


def recording(get, module, monkeypatch):
    check_recording(get, module)


def gpu(get, module, monkeypatch):
    check_gpu(get, monkeypatch, module)


WRONG = [  # what is wrong, the right text, the wrong one, who notices
    ("padding writes into slot 0", "slots=-1", "slots=0", sizes),
    ("padding reads what it read last", ", lengths=0)", ")", sizes),
    ("padding keeps its tokens", "dict(ids=0, ", "dict(", sizes),
    ("padding is not reset", "            mine[B:] = padding\n", "            pass\n", sizes),
    ("all rows are padding", "mine[B:] = padding", "mine[B - 1 :] = padding", sizes),
    ("tables are forgotten", "self.tables[:B, : batch.tables.shape[1]].copy_(batch.tables)", "pass", sizes),
    ("only wide tables", "self.tables[:B, : batch.tables.shape[1]].copy_(batch.tables)",
     "self.tables[:B, :4].copy_(batch.tables[:, :4])", sizes),
    ("the bucket below", "next(size for size in self.rows if size >= B)",
     "max(size for size in self.rows if size <= B)", sizes),
    ("the largest bucket", "next(size for size in self.rows if size >= B)", "self.rows[-1]", sizes),
    ("too many rows for the last bucket", " or B > max(self.rows, default=0):", ":", sizes),
    ("the last bucket is not used", "B > max(self.rows", "B >= max(self.rows", sizes),
    ("prompts are replayed", "batch.num_singles < B", "False", days),
    ("tokens where the next replay writes", "tokens[:B].clone()", "tokens[:B]", days),
    ("tokens for who owes more", "if len(batch.sampled) < B:", "if False:", days),
    ("logits for who owes more", "return logits[batch.last], None", "return logits[:B], None", days),
    ("logits of the padding too", "return logits[:B], (", "return logits, (", sizes),
    ("states of the padding too", "step.draws), states[:B]", "step.draws), states", sizes),
    ("states of who owes more", "None, states[batch.last]", "None, states[:B]", days),
    ("padded lengths at recording are real", "self.lengths, self.tables = zeros(rows, dtype=torch.int32),",
     "self.lengths, self.tables = zeros(rows, dtype=torch.int32) + 1,", recording),
    ("recorded where slot 0 is written", "zeros(rows, dtype=torch.int64) - 1", "zeros(rows, dtype=torch.int64)",
     recording),
    ("the lengths of the tables", "Rows(self.tables, self.starts, self.lengths,",
     "Rows(self.tables, self.starts, self.lengths * 0 + self.tables.shape[1],", sizes),
    ("always the first layer", "self.cache.singles(layer, q", "self.cache.singles(0, q", sizes),
    ("the first call is left out", "ops.replay(self.calls)", "ops.replay(self.calls[1:])", sizes),
    ("nothing is replayed", "        self.play()\n", "        pass\n", sizes),
    ("reach is ignored", "next(r for r in self.reaches if r >= max(batch.host_lengths))", "self.reaches[0]", gpu),
    ("the longest reach for all", "next(r for r in self.reaches if r >= max(batch.host_lengths))",
     "self.reaches[-1]", gpu),
    ("all steps of one reach", "self.model, self.cache, self.reach = model, cache, reach",
     "self.model, self.cache, self.reach = model, cache, 2048", gpu),
    ("wishes stay on the host", "self.numbers[:B].copy_(", "self.numbers[:B].add_(0 * ", gpu),
    ("seeds of who sat there before", "self.whole[:B].copy_(", "self.whole[:B].add_(0 * ", gpu),
    ("whoever draws is said to be greedy", "self.draws = 0 if model.native else DRAWN", "self.draws = 0", gpu),
    ("nobody's wishes are sent", "if self.draws and len(batch.sampled) == B:", "if False:", gpu),
    ("a value is read while recording", "temperature, top_p, min_p = self.numbers.T",
     "float(self.numbers.sum()); temperature, top_p, min_p = self.numbers.T", gpu),
    ("min_p for top_p", "temperature, top_p, min_p = self", "temperature, min_p, top_p = self", gpu),
]  # fmt: skip


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("right, wrong, notices", [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_graphs_are_noticed(get, monkeypatch, right, wrong, notices):
    source = inspect.getsource(minserve.graphs)
    assert source.count(right) == 1, f"{source.count(right)} places hold {right}"
    module = type(minserve)("wrong")
    exec(compile(source.replace(right, wrong), "wrong.py", "exec"), module.__dict__)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError, StopIteration, TypeError)):
        notices(get, module, monkeypatch)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("notices", [sizes, days, recording, gpu], ids=lambda f: f.__name__)
def test_the_right_graphs_are_not(get, monkeypatch, notices):
    """The same machinery without a change."""
    module = type(minserve)("right")
    exec(compile(inspect.getsource(minserve.graphs), "right.py", "exec"), module.__dict__)
    notices(get, module, monkeypatch)
