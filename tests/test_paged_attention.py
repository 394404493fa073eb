"""The paged cache: a step's rows see what they own and nothing else, on a CPU's gathered path as in the definition.

Every slot that no row may read holds NaN, every table entry that no row may follow names such a slot's page.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SHAPE

import minserve.batch
import minserve.paged_attention
from minserve.batch import Packer
from minserve.config import ModelConfig, RopeConfig
from minserve.kernels.paged_attention import paged_attention_reference
from minserve.request import Request, SamplingParams

H, G, D, V = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], 16, 251
NAN = float("nan")


def config(windows):
    return ModelConfig(
        family="mistral", vocab_size=V, hidden_size=96, intermediate_size=76, num_layers=len(windows), num_heads=H,
        num_kv_heads=G, head_dim=D, norm_eps=1e-5, rope=RopeConfig(1e4), context=512, tied=False, windows=windows,
    )  # fmt: skip


def plan_of(rows, page_size, pages, window, sinks):
    """Requests with `computed` tokens in the cache, `n` to compute, on shuffled pages; stale ones behind a window."""
    gen, plan = torch.Generator().manual_seed(len(rows)), []
    order = (torch.randperm(pages - 1, generator=gen) + 1).tolist()  # page 0 is nobody's
    for i, (computed, n) in enumerate(rows):
        tokens = torch.randint(
            V, (computed + n + i % 2,), generator=gen
        ).tolist()  # some owe more than the step pays
        request = Request(i, tokens, SamplingParams(), 1)
        request.computed, request.seat = computed, i
        request.pages = [order.pop() for _ in range(-(-(computed + n) // page_size))]
        if window is not None:
            first = max(0, computed - window + 1) // page_size
            request.pages = [
                p if j >= first or j < -(-sinks // page_size) else 0 for j, p in enumerate(request.pages)
            ]
        plan.append((request, n))
    return plan


def written(plan, page_size, window, sinks, gen, shape):
    """The past of every request, NaN wherever no row has written or may look."""
    k, v = (torch.full(shape, NAN) for _ in range(2))
    for request, _ in plan:
        for j in range(request.computed):
            if window is None or j > request.computed - window or j < sinks:
                page = request.pages[j // page_size], j % page_size
                k[page], v[page] = torch.randn(2, G, D, generator=gen)
    return k, v


STEPS = {
    "one token": [(9, 1)],
    "first token": [(0, 1)],
    "decode": [(3, 1), (16, 1), (7, 1), (40, 1), (15, 1)],
    "prompts": [(0, 5), (0, 33), (0, 2)],
    "mixed": [(20, 1), (0, 16), (8, 9), (33, 1), (31, 2), (5, 12)],
}


def check(
    steps=STEPS,
    page_sizes=(1, 4, 16),
    windows=((None, 0), (6, 0), (6, 3), (1, 0)),
    module=minserve.paged_attention,
):
    for rows in steps.values():
        for page_size in page_sizes:
            for window, sinks in windows:
                check_step(rows, page_size, window, sinks, module)


def check_step(rows, page_size, window, sinks, module):
    gen, pages = torch.Generator().manual_seed(0), 2 + sum(-(-(c + n) // page_size) for c, n in rows)
    plan = plan_of(rows, page_size, pages, window, sinks)
    batch = Packer(len(rows), 64, page_size).pack(plan)
    cache = module.PagedCache(config((window,)), pages, page_size, sinks=sinks)
    cache.k[0], cache.v[0] = written(plan, page_size, window, sinks, gen, cache.k[0].shape)
    T = len(batch.ids)
    q, k, v = (torch.randn(T, heads, D, generator=gen) for heads in (H, G, G))
    got = cache.attend_for(batch)(0, q, k, v)
    seen_sinks = sinks if window else 0
    expected = paged_attention_reference(
        q, cache.k[0], cache.v[0], batch.tables, batch.starts, batch.lengths, window, seen_sinks
    )
    assert not expected.isnan().any()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    called = []

    class Native:
        @staticmethod
        def attend(q, k_cache, v_cache, tables, lengths, window, sinks, trees):
            """Native.attend's signature, the definition's arithmetic."""
            called.append(len(q))
            starts = torch.arange(len(q) + 1, dtype=torch.int32)
            its = tables, starts, lengths, window, sinks, trees
            return paged_attention_reference(q, k_cache, v_cache, *its)

    got = cache.look_for(batch, Native)(0, q)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert called == [batch.num_singles] * (batch.num_singles > 0)
    flat = cache.k[0].flatten(0, 1)
    assert torch.equal(flat[batch.slots], k) and torch.equal(cache.v[0].flatten(0, 1)[batch.slots], v)


@pytest.mark.parametrize("window, sinks", [(None, 0), (6, 0), (6, 3), (1, 0)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_a_step_equals_the_definition(rows, page_size, window, sinks):
    check_step(rows, page_size, window, sinks, minserve.paged_attention)


def test_layers_of_different_windows_share_a_step():
    check_layers(minserve.paged_attention)


def check_layers(module):
    plan = plan_of([(20, 1), (3, 9)], 4, 30, None, 0)
    batch = Packer(2, 64, 4).pack(plan)
    gen = torch.Generator().manual_seed(0)
    cache = module.PagedCache(config((None, 6)), 30, 4)
    attend, outs = cache.attend_for(batch), []
    for layer, window in enumerate((None, 6)):
        cache.k[layer], cache.v[layer] = written(plan, 4, None, 0, gen, cache.k[0].shape)
        q, k, v = (torch.randn(10, heads, D, generator=gen) for heads in (H, G, G))
        outs.append(attend(layer, q, k, v))
        args = q, cache.k[layer], cache.v[layer], batch.tables, batch.starts, batch.lengths, window
        torch.testing.assert_close(outs[-1], paged_attention_reference(*args), rtol=1e-5, atol=1e-5)


def test_copies_read_before_they_write():
    """A chain 1 -> 2, 2 -> 3 moves old contents, whatever the order of the pairs."""
    for pairs in ([(1, 2), (2, 3)], [(2, 3), (1, 2)]):
        cache = minserve.paged_attention.PagedCache(config((None,)), 4, 2)
        for page in range(4):
            cache.k[0][page] = page
        cache.copy(pairs)
        assert cache.k[0][:, 0, 0, 0].tolist() == [0, 1, 1, 2]


# ---------------------------------------------------------------- batches
def test_a_batch_is_the_plan_flattened_single_tokens_first(packer_class=Packer):
    plan = plan_of([(4, 3), (9, 1), (0, 2), (17, 1)], 4, 30, None, 0)
    for request, _ in plan:  # some of it is answer
        request.prompt = request.tokens[: 1 + request.id % 3]
    packer = packer_class(4, 64, 4)
    batch = packer.pack(plan)
    assert [r.id for r, _ in batch.plan] == [1, 3, 0, 2] and batch.num_singles == 2
    flat = [(r, p) for r, n in batch.plan for p in range(r.computed, r.computed + n)]
    assert batch.ids.tolist() == [r.tokens[p] for r, p in flat]
    assert batch.positions.tolist() == [p for _, p in flat]
    assert batch.slots.tolist() == [r.pages[p // 4] * 4 + p % 4 for r, p in flat]
    assert batch.starts.tolist() == [0, 1, 2, 5, 7] and batch.lengths.tolist() == [10, 18, 7, 2]
    assert batch.sampled == [2, 3] and batch.last.tolist() == [
        4,
        6,
    ]  # requests 1 and 3 owe one more than is paid
    assert batch.paid == batch.sampled and batch.owners == [r for r, _ in batch.plan] and batch.trees is None
    assert batch.made.tolist() == [len(batch.owners[b].outputs) for b in batch.paid] == [6, 0]
    assert batch.rows() == [
        (1, 1, 9, False, 0, 0),
        (3, 1, 17, False, 0, 0),
        (0, 3, 4, True, 0, 0),
        (2, 2, 0, True, 0, 0),
    ]
    for row, (request, _) in enumerate(batch.plan):
        assert batch.tables[row, : len(request.pages)].tolist() == request.pages


def test_a_seat_follows_its_request_from_step_to_step():
    """Drawn tokens, new pages, a page replaced by copy-on-write, and a new occupant of the same seat."""
    (plan,) = [plan_of([(0, 8)], 4, 30, None, 0)]
    request, packer = plan[0][0], Packer(1, 64, 4)
    batch = packer.pack(plan)
    assert batch.fresh == [request]
    packer.note(batch, torch.tensor([123]))
    request.computed, request.pages = 8, [*request.pages, 21]
    request.tokens.append(123)
    batch = packer.pack([(request, 1)])
    assert batch.fresh == [] and batch.ids.tolist() == [123] and batch.slots.tolist() == [21 * 4]
    request.pages[1], request.dirty = 25, 1
    assert packer.pack([(request, 1)]).tables[0].tolist() == request.pages
    other = Request(9, [5, 6, 7], SamplingParams(), 1)
    other.seat, other.pages = 0, [2]
    batch = packer.pack([(other, 3)])
    assert batch.fresh == [other] and batch.ids.tolist() == [5, 6, 7] and batch.slots.tolist() == [8, 9, 10]


def test_pages_cost_no_memory_until_they_are_written():
    """In a process of its own: what was freed before would hide what is taken now."""
    code = """
import torch
from test_paged_attention import config
from minserve.paged_attention import PagedCache
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024
before = resident()
cache = PagedCache(config((None, None)), 40_000, 16)
taken = resident() - before
cache.k[0].fill_(1.0)
print(cache.nbytes, taken, resident() - before - taken, cache.k[0].nbytes)
"""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("what a process has resident is read from /proc")
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    run = subprocess.run([sys.executable, "-c", code], env=here, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    nbytes, taken, written, one = map(int, run.stdout.split())
    assert nbytes > 100e6 and taken < 0.05 * nbytes and written > 0.9 * one


# ---------------------------------------------------------------- these checks can fail
WRONG = [
    ("j[:, None] <= np.minimum(p,", "j[:, None] <= np.minimum(p + 1,"),  # one future token is seen
    ("lengths[:, None] - 1)[:, :, None]", "lengths[:, None])[:, :, None]"),
    ("(j[:, None] > p[:, :, None] - window)", "(j[:, None] >= p[:, :, None] - window)"),  # window one too wide
    ("np.maximum(first - window + 1, 0)", "np.maximum(first - window + 2, 0)"),  # one too narrow
    ("j[:, :extra] = np.arange(extra)", "j[:, :extra] = 0"),
    ("seen[..., :extra] &= ", "seen[..., :extra] |= "),  # a sink that lies in the window counts twice
    ("own % page_size", "own % max(1, page_size // 2)"),
    ("np.where(seen.any(1), j, lengths[:, None] - 1)", "j.clip(max=batch.tables.shape[1] * page_size - 1)"),
    ("np.minimum(query, counts[:, None] - 1)", "query"),
    ("made.view(C, G, n, R, D).transpose(1, 2)", "made.view(C, G, R, n, D).permute(0, 3, 1, 2, 4)"),
    ("rows = rows.view(C, n, G, R, D)", "rows = rows.view(C, n, R, G, D).transpose(2, 3)"),  # heads tiled
    # whole prompts, and one chunk behind its past, without a mask
    ("split = window is None and", "split = window != 0 and"),
    ("(len(rows) == 1 or not first.any())", "True"),
    ("None if split or seen.all()", "None if True or seen.all()"),
    ("x[:, :, past:].repeat_interleave(R, 1)", "x[:, :, past:].repeat(1, R, 1, 1)"),
    ("is_causal=True", "is_causal=False"),
    ("    return made.transpose(1, 2)\n", "    return made.transpose(1, 2).flip(1)\n"),
    ("int(first[0]) if split", "0 if split"),
    ("    if past:\n", "    if past > 1000:\n"),
    ("reshape(C, H, n) - lse)", "reshape(C, H, n) * 0)"),
    ("before.reshape(C, G, n, R, D).transpose(2, 3)", "before.reshape(C, G, R, n, D)"),
    ("self.real = (\n            None if (counts == counts[0]).all()", "self.real = (\n            None if True"),
    # single tokens by a kernel of their own, chunks beside them
    ("batch.num_singles if on_kernels or native else 0", "0"),
    ("Rows(tables[:n], starts[: n + 1], lengths[:n]", "Rows(tables[-n:], starts[: n + 1], lengths[-n:]"),
    ("out[:n] = self.singles(", "self.singles("),
    ("if n < B and not on_kernels:", "if n < B - 1 and not on_kernels:"),
    ("rows = rows[rows >= first]", "rows = rows[rows > first]"),
    ("gathered[self.config.windows[layer]]", "gathered[self.config.windows[-1 - layer]]"),
    ("source, target = torch.tensor(pairs", "target, source = torch.tensor(pairs"),
    ("*caches(layer), slots)", "*caches(layer), slots + 1)"),
    ("return window, self.sinks if window else 0", "return window, 0"),
    ("window = self.config.windows[layer]\n        return", "window = None\n        return"),
]  # fmt: skip


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("return work[1] != 1", "return work[1] == 1"),
        ("num_singles=singles", "num_singles=len(counts)"),
        ("for x in (host[2, 1:] - 1, host[0])", "for x in (host[2, 1:], host[0])"),
        ("lengths=device_lengths[:B]", "lengths=computed[:B]"),
        ("index_select(0, seats[:B])", "index_select(0, seats[:B].flip(0))"),
        ("made=made[owned]", "made=made[: len(owned)]"),
        ("host[3, :B] - self.prompts[host[0, :B]]", "host[3, :B] - self.prompts[:B]"),
        ("self.prompts[request.seat] = len(request.prompt)", "pass"),
        ("            paid[b] = True\n", "            paid[-1 - b] = True\n"),
        ("counts, map(_computed, requests), paid\n", "counts, counts, paid\n"),
    ],
)
def test_a_wrong_packer_is_noticed(right, wrong):
    source = inspect.getsource(minserve.batch)
    assert source.count(right) == 1, f"{source.count(right)} places hold {right}"
    module = type(minserve)("wrong")
    exec(compile(source.replace(right, wrong), "wrong.py", "exec"), module.__dict__)
    with pytest.raises(AssertionError):
        test_a_batch_is_the_plan_flattened_single_tokens_first(module.Packer)


@pytest.mark.parametrize("right, wrong", WRONG, ids=[w[:40] for _, w in WRONG])
def test_a_wrong_cache_is_noticed(right, wrong):
    source = inspect.getsource(minserve.paged_attention)
    assert source.count(right) == 1, f"{source.count(right)} places hold {right}"
    module = type(minserve)("wrong")
    exec(compile(source.replace(right, wrong), "wrong.py", "exec"), module.__dict__)
    with pytest.raises((AssertionError, IndexError, KeyError, RuntimeError)):
        check(module=module)
        check_layers(module)
        cache = module.PagedCache(config((None,)), 4, 2)
        cache.k[0][1] = 1.0
        cache.copy([(1, 2)])
        assert float(cache.k[0][2].min()) == 1.0
