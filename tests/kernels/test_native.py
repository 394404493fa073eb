"""The CPU's C++ kernels equal the definitions, in poisoned memory; and building them fails only with a reason.

A check takes the kernels it checks, so that test_native_mutations.py can call it on wrong ones. Memory nobody
should read holds NaN, and page ids nobody should follow lead to a page of NaN.
"""

import itertools
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from kernel_checks import moat, moat_int, wide

from minserve.kernels import native, native_build
from minserve.kernels.paged_attention import paged_attention_reference
from minserve.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from minserve.kernels.rope_and_write import rope_and_write_reference
from minserve.kernels.silu_mul import silu_mul_reference

WHY_NOT = native.usable()
needs_native = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
NAN, INF, GUARD = float("nan"), float("inf"), 77.0
FP32, BF16 = torch.float32, torch.bfloat16
# fp32 differs by the order of sums; bf16 by one rounding, 2^-8, where the sum lay between two numbers
TOLERANCE = {FP32: dict(rtol=2e-5, atol=2e-5), BF16: dict(rtol=1e-2, atol=1e-2)}
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
HEADS = [(3, 3, 16), (9, 3, 64), (4, 1, 80), (6, 1, 24), (4, 2, 128)]  # (H, G, D): groups of 1, 3, 4, 6, 2


@pytest.fixture(scope="module")
def ops():
    return native.Native()


def randn(*shape, dtype=FP32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, expected):
    torch.testing.assert_close(
        got, expected, equal_nan=True, **TOLERANCE.get(got.dtype, dict(rtol=0, atol=0))
    )


def same(got, expected):
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=0, atol=0)


def run(ops, name, *args):
    """The operation's result, written between guards; and once more, as a replay would do it."""
    rooms = []

    def empty(*shape, dtype):
        shape = torch.Size(shape[0] if isinstance(shape[0], tuple) else shape)
        rooms.append(torch.full((shape.numel() + 512,), int(GUARD), dtype=dtype))
        return rooms[-1][256 : 256 + shape.numel()].view(shape)

    with ops.recording() as calls, mock.patch.object(torch, "empty", empty):
        result = getattr(ops, name)(*args)
    ((function, arguments, _),) = calls
    (room,) = rooms
    before = room.clone()
    room[256:-256] = int(GUARD)
    function(*arguments)
    same(room, before)
    assert (room[:256] == GUARD).all() and (room[-256:] == GUARD).all(), f"{name} wrote outside"
    return result


# ---------------------------------------------------------------- rows
def check_embed(ops, dtype=FP32, V=50, E=37):
    table = randn(V + 2, E, dtype=dtype)[1:-1]  # numbers before and behind it
    ids = moat_int(torch.tensor([3, V - 1, 0, 3, V, -1]))
    got = run(ops, "embed", table, ids)
    same(got[:4], table[ids[:4]])
    assert got[4:].isnan().all()  # such a token does not exist


def check_norms(ops, dtype=FP32, T=3, E=103, size=1.0):
    x, residual = (wide(randn(T, E, dtype=dtype, seed=i) * size) for i in (0, 1))
    weight = moat(randn(E, dtype=dtype, seed=2) + 1)
    eps = 1e-2  # large enough that a forgotten or misplaced eps shows
    close(run(ops, "rms_norm", x, weight, eps), rms_norm_reference(x, weight, eps))
    got, expected = (
        run(ops, "add_rms_norm", x, residual, weight, eps),
        add_rms_norm_reference(x, residual, weight, eps),
    )
    close(got[0], expected[0])
    same(got[1], expected[1])  # one addition and one rounding


def check_silu_mul(ops, dtype=FP32, T=3, I=51):
    x = wide(randn(T, 2 * I, dtype=dtype) * 8)
    close(run(ops, "silu_mul", x), silu_mul_reference(x[:, :I], x[:, I:]))


def check_exp(ops):
    """silu far out, where exp overflows, underflows or hardly matters, against float64."""
    gate = torch.linspace(-100.0, 100.0, 100_001)
    gate = torch.cat((gate, torch.tensor([-1e4, -88.5, 88.5, 1e4, 3e38, -3e38, 0.0, INF])))
    got = ops.silu_mul(torch.stack((gate, torch.ones_like(gate))).view(1, -1))[0]
    exact = gate.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-30)
    assert ops.silu_mul(torch.tensor([[NAN, 1.0, 1.0, NAN]])).isnan().all()


def check_best(ops, dtype=FP32, V=1001):
    x = randn(9, V, dtype=dtype)
    x[0, [5, V - 1]] = 100.0  # the first of two
    x[1, V - 1] = 100.0
    x[2, V - 1] = NAN
    x[3, 0] = NAN
    x[4, V // 2] = INF
    x[5] = -INF
    x[6] = -INF
    x[6, V - 2] = -3.0
    x[7] = 0.25
    expected = x.float().argmax(-1)
    expected[2:6] = -1
    same(run(ops, "best", wide(x)), expected)


def check_rounding(ops):
    """Every bfloat16 near 1 plus half of its last bit and a little more or less: nearest, and ties to even."""
    x = (torch.arange(0x3F80, 0x4100, dtype=torch.int32)).to(torch.int16).view(BF16)
    half = torch.tensor([0.5, 0.498, 0.502, 1.0]).mul(2.0**-7).to(BF16)
    a, b = (y.flatten()[None].contiguous() for y in torch.broadcast_tensors(x[:, None], half[None, :]))
    same(ops.add_rms_norm(b, a, torch.ones(a.shape[1], dtype=BF16), 1e-5)[1], a + b)


def check_nan_stays(ops):
    """A NaN whose bits are all ones: rounded like a number it would become -0."""
    turns = torch.full((1, 32), -1, dtype=torch.int32).bitwise_and(0x7FFFFFFF).view(FP32)
    caches = torch.zeros(2, 1, 1, 32, dtype=BF16)
    zero = torch.zeros(1, dtype=torch.int64)
    q = ops.rope_and_write(torch.ones(1, 96, dtype=BF16), turns, zero, zero, *caches)
    assert q.isnan().all() and caches[0].isnan().all()


# ---------------------------------------------------------------- linear
def check_linear(ops, dtype=FP32, T=3, N=33, K=37):
    x, weight = moat(randn(T, K, dtype=dtype)), moat(randn(N, K, dtype=dtype, seed=1) / K**0.5)
    bias = moat(randn(N, dtype=dtype, seed=2))
    exact = x.float() @ weight.float().T
    close(run(ops, "linear", x, weight), exact.to(dtype))
    close(run(ops, "linear", x, weight, bias), (exact + bias.float()).to(dtype))


def check_rows_alone(ops, dtype=FP32):
    """A row's result has the same bits whatever else is in the batch."""
    for K in (100, 96):
        x, weight = randn(40, K, dtype=dtype), randn(50, K, dtype=dtype, seed=1)
        alone = torch.cat([ops.linear(x[t : t + 1], weight) for t in range(len(x))])
        for T in range(1, len(x) + 1):
            same(ops.linear(x[:T], weight), alone[:T])


# ---------------------------------------------------------------- rope and the cache
def check_rope_and_write(ops, dtype=FP32, H=6, G=2, D=24, norms=True):
    T, C, S = 5, 40, 12
    qkv = wide(randn(T, (H + 2 * G) * D, dtype=dtype))
    turns = moat(randn(C, D, seed=1))
    positions, slots = (
        moat_int(torch.tensor([3, 0, C - 1, 7, 7])),
        moat_int(torch.tensor([2, -1, 0, S - 1, 5])),
    )
    weights = [moat(randn(D, dtype=dtype, seed=i)) for i in (2, 3)] if norms else [None, None]
    caches = [
        torch.full((S + 4, 2, G, D), NAN, dtype=dtype) for _ in (0, 1)
    ]  # K and V interleaved, and a moat
    views = [(cache[2:-2, 0], cache[2:-2, 1]) for cache in caches]
    case = qkv, turns, positions, slots
    expected = rope_and_write_reference(*case, *views[1], *weights, 1e-2)
    close(run(ops, "rope_and_write", *case, *views[0], *weights, 1e-2), expected)
    close(caches[0], caches[1])
    same(views[0][1], views[1][1])


# ---------------------------------------------------------------- attention
def paged_case(lengths, H, G, D, S, dtype, window=None, sinks=0, size=1.0):
    B, M, free = len(lengths), max(lengths) // S + 2, sum(n // S + 1 for n in lengths) + 3
    order = iter((torch.randperm(free, generator=torch.Generator().manual_seed(S)) + 1).tolist())
    cache = torch.full((free + 1, 2, S, G, D), NAN, dtype=dtype)  # page 0 is nobody's and stays NaN
    tables = torch.zeros((B, M + 3), dtype=torch.int32)
    past = randn(2, max(lengths, default=0), B, G, D, dtype=dtype, seed=S)
    for b, n in enumerate(lengths):
        for j in range(n):
            if window is None or j >= n - window or j < sinks:
                if not tables[b, j // S]:
                    tables[b, j // S] = next(order)
                cache[tables[b, j // S], :, j % S] = past[:, j, b]
    q = moat(randn(B, H, D, dtype=dtype) * size)
    return q, cache[:, 0], cache[:, 1], tables[:, :M], moat_int(torch.tensor(lengths, dtype=torch.int32))


def check_attend(ops, lengths, H=6, G=2, D=32, S=16, dtype=FP32, window=None, sinks=0, size=1.0):
    q, k, v, tables, lengths = case = paged_case(lengths, H, G, D, S, dtype, window, sinks, size)
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    expected = paged_attention_reference(q, k, v, tables, starts, lengths, window, sinks)
    assert expected.isfinite().all()  # the definition reads no poison
    got = run(ops, "attend", *case, window, sinks)
    if size > 100:  # scores of hundreds: their last bit is worth this much of a weight
        torch.testing.assert_close(got.float(), expected.float(), rtol=1e-2, atol=1e-3)
    else:
        close(got, expected)


def some_trees(lengths, seed=0):
    """A word of a tree per row, in which bits are set and not; the last bit, which means nothing, too."""
    words = torch.randint(-(2**63), 2**63 - 1, (len(lengths),), generator=torch.Generator().manual_seed(seed))
    words[-1] = 0  # not even itself
    return moat_int(words)


def poison_unseen(cache, tables, lengths, trees):
    """Positions that a row's tree hides hold NaN: in all of the cache's parts, [P, S, ...] each."""
    S = cache[0].shape[1]
    for b, n in enumerate(lengths.tolist()):
        for back in range(min(63, n)):
            if not int(trees[b]) >> back & 1:
                page, slot = divmod(n - 1 - back, S)
                for part in cache:
                    part[tables[b, page], slot] = NAN


def check_trees(ops, lengths, H=6, G=2, D=32, S=16, dtype=FP32):
    q, k, v, tables, lengths = case = paged_case(lengths, H, G, D, S, dtype)
    same(run(ops, "attend", *case, None, 0, moat_int(torch.full((len(q),), -1))), ops.attend(*case))
    trees, starts = some_trees(lengths, seed=S), torch.arange(len(q) + 1, dtype=torch.int32)
    poison_unseen((k, v), tables, lengths, trees)
    expected = paged_attention_reference(q, k, v, tables, starts, lengths, trees=trees)
    assert expected.isfinite().all()
    close(run(ops, "attend", *case, None, 0, trees), expected)


def check_not_finite(ops):
    q, k, v, tables, lengths = paged_case([20, 300], 2, 1, 16, 16, FP32)
    v[tables[0, 0].item(), 3] = NAN
    k[tables[1, :10].long()], q[1] = -INF, q[1].abs() + 1  # 160 positions with weight exp(-inf) = 0
    got = ops.attend(q, k, v, tables, lengths)
    assert got[0].isnan().all()
    tables[1, :9] = tables[1, 10:19].clone()  # as if they were not there
    close(got[1], ops.attend(q, k, v, tables, torch.tensor([20, 140], dtype=torch.int32))[1])
    q[1] = NAN
    assert ops.attend(q, k, v, tables, lengths)[1].isnan().all()


def check_far(ops):
    """Slots and pages beyond 2**31 elements. Room before the cache takes what a 32-bit offset would reach."""
    S, G, D = 16, 16, 64
    P = 2**31 // (S * G * D) + 3
    try:
        cache = torch.empty(2 * P, S, G, D, dtype=BF16)[P:]  # 8.6 GB; only what is touched is real
    except RuntimeError as error:
        pytest.skip(f"no room for the test: {error}")
    tables, lengths = (
        torch.tensor([[P - 1, P - 3]], dtype=torch.int32),
        torch.tensor([S + 5], dtype=torch.int32),
    )
    slots = torch.tensor([(P - 1) * S + i for i in range(S)] + [(P - 3) * S + i for i in range(S)])
    cache[-3:] = 0
    near = torch.zeros(2, 2 * S, G, D, dtype=BF16)
    qkv, turns, positions = (
        randn(2 * S, 3 * G * D, dtype=BF16),
        randn(1, D),
        torch.zeros(2 * S, dtype=torch.int64),
    )
    q = ops.rope_and_write(qkv, turns, positions, slots, *[cache.flatten(0, 1)] * 2)
    same(q, ops.rope_and_write(qkv, turns, positions, torch.arange(2 * S), *near))
    same(cache.flatten(0, 1)[slots], near[1])  # keys, then values, into the same slots
    pages = torch.tensor([[0, 1]], dtype=torch.int32)
    both = [near[1].view(2, S, G, D)] * 2
    same(ops.attend(q[:1], cache, cache, tables, lengths), ops.attend(q[:1], *both, pages, lengths))


# ---------------------------------------------------------------- the checks, on the kernels we ship
@needs_native
@dtypes
def test_rows(ops, dtype):
    check_embed(ops, dtype)
    for T, E in itertools.product((1, 3), (1, 16, 37, 100, 576)):
        check_norms(ops, dtype, T, E)
        check_silu_mul(ops, dtype, T, E)
    check_norms(ops, dtype, size=1e-3)
    check_norms(ops, dtype, size=0.0)
    check_norms(ops, dtype, T=300, E=100)  # enough for several threads
    check_silu_mul(ops, dtype, T=300)
    for V in (9, 15, 16, 17, 1001, 40_000):
        check_best(ops, dtype, V)


@needs_native
def test_numbers(ops):
    check_exp(ops)
    check_rounding(ops)
    check_nan_stays(ops)


@needs_native
@dtypes
def test_linear(ops, dtype):
    for T, N, K in itertools.product(range(1, 17), (1, 33), (1, 37, 64)):
        check_linear(ops, dtype, T, N, K)
    for T, N, K in [
        (1, 577, 576),
        (5, 960, 576),
        (16, 100, 1536),
        (2, 15, 3),
        (0, 5, 7),
        (20, 9, 16),
        (33, 70, 64),
    ]:
        check_linear(ops, dtype, T, N, K)
    check_rows_alone(ops, dtype)


@needs_native
@dtypes
def test_linear_keeps_what_is_not_finite(ops, dtype):
    for K in (40, 64):
        x = torch.ones(3, K, dtype=dtype)
        x[0, K - 1], x[1, 3] = NAN, INF
        got = ops.linear(x, torch.ones(37, K, dtype=dtype))
        assert got[0].isnan().all() and (got[1] == INF).all() and (got[2] == K).all()


@needs_native
@dtypes
@pytest.mark.parametrize("norms", [False, True])
def test_rope_and_write(ops, dtype, norms):
    for H, G, D in HEADS:
        check_rope_and_write(ops, dtype, H, G, D, norms)


@needs_native
@dtypes
@pytest.mark.parametrize("H, G, D", HEADS)
def test_attend(ops, dtype, H, G, D):
    seen = [(None, 0), (1, 0), (5, 0), (5, 3), (40, 4), (500, 7)]
    for S, (window, sinks) in itertools.product((1, 4, 16, 64), seen):
        check_attend(ops, [1, 0, 21, 130], H, G, D, S, dtype, window, sinks)
    for size in (5.0, 200.0):  # several tiles; one weight nearly 1
        check_attend(ops, [700, 3, 128, 129], H, G, D, 16, dtype, size=size)


@needs_native
@dtypes
@pytest.mark.parametrize("H, G, D", HEADS)
def test_trees(ops, dtype, H, G, D):
    for S in (1, 16, 64):
        check_trees(ops, [1, 0, 62, 63, 64, 65, 300, 20], H, G, D, S, dtype)


@needs_native
def test_a_recorded_tree_is_read_again(ops):
    """The words of the next step lie where those of the last one lay."""
    case, trees = paged_case([70, 9], 6, 2, 32, 16, FP32), torch.full((2,), -1)
    with ops.recording() as calls:
        out = ops.attend(*case, trees=trees)
    trees.copy_(some_trees([70, 9], seed=5))
    ops.replay(calls)()
    same(out, ops.attend(*case, trees=trees))
    assert not torch.equal(out, ops.attend(*case))


@needs_native
def test_attend_by_hand(ops):
    """Keys all equal, so every weight is 1/n, and values that say where they lie."""
    k, v = torch.zeros(4, 2, 1, 2), torch.full((4, 2, 1, 2), NAN)
    v[3, 0], v[3, 1], v[1, 0] = 10.0, 20.0, 60.0
    case = (
        torch.ones(1, 2, 2),
        k,
        v,
        torch.tensor([[3, 1]], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
    )
    assert ops.attend(*case).flatten().tolist() == [30.0] * 4
    assert ops.attend(*case, window=1).flatten().tolist() == [60.0] * 4
    assert ops.attend(*case, window=1, sinks=1).flatten().tolist() == [35.0] * 4


@needs_native
def test_attend_keeps_what_is_not_finite(ops):
    check_not_finite(ops)


@needs_native
def test_far_slots_and_pages(ops):
    check_far(ops)


@needs_native
def test_nothing_to_do(ops):
    none = torch.zeros(0, dtype=torch.int64)
    cache = torch.zeros(3, 2, 1, 4)
    assert ops.embed(torch.zeros(5, 3), none).shape == (0, 3)
    assert ops.best(torch.zeros(0, 7)).shape == (0,)
    assert ops.rms_norm(torch.zeros(0, 7), torch.ones(7), 1e-5).shape == (0, 7)
    tables = torch.zeros((0, 2), dtype=torch.int32)
    assert ops.attend(torch.zeros(0, 2, 4), cache, cache, tables, none.int()).shape == (0, 2, 4)
    args = torch.zeros(0, 16), torch.zeros(1, 4), none, none, *[cache.flatten(0, 1)] * 2
    assert ops.rope_and_write(*args).shape == (0, 2, 4)


# ---------------------------------------------------------------- recordings, threads, arguments
@needs_native
@dtypes
def test_a_recording_does_the_same_work_on_what_its_inputs_hold_now(ops, dtype):
    def step():
        normed, total = ops.add_rms_norm(x, x, weight[0], 1e-5)
        made = ops.silu_mul(ops.linear(normed, weight))
        return ops.best(made), ops.rms_norm(made, weight[0, :20], 1e-5), total

    x, weight = randn(3, 40, dtype=dtype), randn(40, 40, dtype=dtype, seed=1)
    with ops.recording() as calls:
        results = step()
    assert len(calls) == 5
    for seed in (5, 6):
        x.copy_(randn(3, 40, dtype=dtype, seed=seed))
        rubbish = [
            torch.full((3, 40), NAN, dtype=dtype) for _ in range(50)
        ]  # memory nobody keeps is used again
        for function, arguments, _ in calls:
            function(*arguments)
        for got, expected in zip(results, step(), strict=True):
            same(got, expected)
        del rubbish
    assert len(calls) == 5  # the recording ended with its block


@needs_native
def test_recordings_keep_their_tensors_and_belong_to_their_instance(ops):
    with ops.recording() as calls:
        pointer = ops.rms_norm(torch.ones(1, 4096), torch.ones(4096), 0.0).data_ptr()
        native.Native().rms_norm(torch.ones(1, 8), torch.ones(8), 0.0)
        with pytest.raises(ValueError):
            ops.rms_norm(torch.ones(1, 8), torch.ones(9), 0.0)
    ((_, arguments, tensors),) = calls
    assert [x.data_ptr() for x in tensors] == list(arguments[:3]) and tensors[2].data_ptr() == pointer


POOL = """
import os, sys, torch
from minserve.kernels import native
ops = native.Native()
x, weight = torch.randn(16, 600), torch.randn(3000, 600)
torch.set_num_threads(1)
one = ops.linear(x, weight)
alone = len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
if sys.argv[1] == "torch":
    torch.randn(1 << 22).exp().sum()
assert torch.equal(ops.linear(x, weight), one)
print(alone, len(os.listdir("/proc/self/task")))
"""


@needs_native
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counting threads needs Linux's /proc")
def test_threads_are_torchs_own_and_as_many_as_torch_may_have():
    counts = []
    for what in ("torch", "native"):
        alone, all_of_them = map(int, python(POOL, what).stdout.split())
        counts.append(all_of_them - alone)
    assert counts == [2, 2]  # two more with torch's work before ours, and without it


def python(code, *arguments, **environment):
    environment = os.environ | environment
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    return result


@needs_native
def test_wrong_arguments_are_named(ops):
    x, w, i = torch.ones(2, 8), torch.ones(8, 8), torch.zeros(2, dtype=torch.int64)
    cache, tables = torch.zeros(3, 4, 2, 8), torch.zeros((2, 1), dtype=torch.int32)
    q, lengths = torch.zeros(2, 4, 8), torch.zeros(2, dtype=torch.int32)
    flat = cache.flatten(0, 1)
    for wrong, call in [
        ("embed: ids", lambda: ops.embed(w, i.int())),
        ("embed: table", lambda: ops.embed(w.T[:, :3], i)),
        ("float16", lambda: ops.embed(w.half(), i)),
        ("meta", lambda: ops.silu_mul(x.to("meta"))),
        ("rms_norm: x .* weight", lambda: ops.rms_norm(x, w[0, :7], 0.0)),
        ("add_rms_norm: x is .* residual is", lambda: ops.add_rms_norm(x, x.bfloat16(), w[0], 0.0)),
        ("silu_mul: x", lambda: ops.silu_mul(x[:, :7])),
        ("silu_mul: x", lambda: ops.silu_mul(x.view(2, 2, 4))),
        ("linear: weight", lambda: ops.linear(x, w[:, :7].contiguous())),
        ("linear: weight", lambda: ops.linear(x, w.bfloat16())),
        ("linear: weight", lambda: ops.linear(x, torch.ones(8, 16)[:, :8])),
        ("linear: bias", lambda: ops.linear(x, w, w[0, :7])),
        ("linear: x", lambda: ops.linear(torch.ones(2, 16)[:, :8], w)),
        ("rope_and_write: slots", lambda: ops.rope_and_write(torch.ones(2, 64), w, i, i[:1], flat, flat)),
        ("rope_and_write: rows", lambda: ops.rope_and_write(torch.ones(2, 32), w, i, i, flat, flat)),
        ("attend: v_cache", lambda: ops.attend(q, cache, cache[:, :2], tables, lengths)),
        ("attend: tables", lambda: ops.attend(q, cache, cache, tables.long(), lengths)),
        ("attend: lengths", lambda: ops.attend(q, cache, cache, tables, lengths[:1])),
        ("attend: 3 query heads", lambda: ops.attend(q[:, :3].contiguous(), cache, cache, tables, lengths)),
        ("attend: .*pages of 3 slots", lambda: ops.attend(q, *[torch.zeros(3, 3, 2, 8)] * 2, tables, lengths)),
        ("attend: .*window 0", lambda: ops.attend(q, cache, cache, tables, lengths, window=0)),
        ("attend: trees is .*int32", lambda: ops.attend(q, cache, cache, tables, lengths, trees=lengths)),
        ("attend: trees with a window of 5",
         lambda: ops.attend(q, cache, cache, tables, lengths, window=5, trees=lengths.long())),
        ("attend: .*520 channels", lambda: ops.attend(*[torch.zeros(2, 1, 520), *[torch.zeros(1, 1, 1, 520)] * 2],
                                                      tables, lengths)),
        ("best: logits", lambda: ops.best(w.T[:, :3])),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=wrong):
            call()


# ---------------------------------------------------------------- building
TINY = 'extern "C" { int seven = 7; }'


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """A home without a cache, and caches of this process emptied before and after."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("MINSERVE_NATIVE", raising=False)
    native.usable.cache_clear(), native_build.library.cache_clear()
    yield monkeypatch
    native.usable.cache_clear(), native_build.library.cache_clear()


@needs_native
def test_built_once_then_loaded_without_a_compiler(tools, tmp_path, capfd):
    folder = tmp_path / "a" / "b"
    native_build.build(TINY, folder)
    assert "compiling" in capfd.readouterr().err
    (library,) = folder.iterdir()  # no unfinished files
    tools.setenv("PATH", "")
    native_build.build(TINY, folder)
    assert not capfd.readouterr().err
    with pytest.raises(
        native_build.Unavailable, match="no C\\+\\+ compiler"
    ):  # another source is another library
        native_build.build(TINY + "\n", folder)
    assert [*folder.iterdir()] == [library]


@needs_native
def test_a_library_that_cannot_be_loaded_is_made_again(tools, tmp_path):
    (tmp_path / f"{native_build._key(TINY)}.so").write_bytes(b"half a library")
    assert native_build.build(TINY, tmp_path).seven is not None


@needs_native
def test_a_cache_that_cannot_be_written(tools, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert native_build.build(TINY, tmp_path / "file").seven is not None


def test_without_a_compiler_there_is_a_reason(tools):
    tools.setenv("PATH", "")
    assert "no C++ compiler" in native.usable() and "g++" in native.usable()
    with pytest.raises(native_build.Unavailable, match="CXX"):
        native.Native()


def test_switched_off(tools):
    tools.setenv("MINSERVE_NATIVE", "0")
    assert "MINSERVE_NATIVE=0" in native.usable()


@needs_native
def test_what_the_compiler_said_is_in_the_message(tools, tmp_path):
    with pytest.raises(native_build.Unavailable, match="expected|unknown type"):
        native_build.build("int seven = ;", tmp_path)
    assert not [*tmp_path.iterdir()]


@needs_native
def test_cxx_names_the_compiler(tools, tmp_path):
    tools.setenv("CXX", f"{tmp_path / 'absent'} -flag")
    native_build.build(TINY, tmp_path)  # not there: the next one is tried
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\necho error: I am a fake >&2\nexit 1\n")
    fake.chmod(0o755)
    tools.setenv("CXX", f"{fake} -flag")
    with pytest.raises(native_build.Unavailable, match="fake -flag cannot compile(.|\n)*I am a fake"):
        native_build.build(TINY, tmp_path)


@needs_native
def test_a_compiler_that_knows_fewer_flags(tools, tmp_path):
    poor = tmp_path / "poor"
    poor.write_text('#!/bin/sh\ncase "$*" in *-march*|*-mcpu*|*openmp*) exit 1;; esac\nexec c++ "$@"\n')
    poor.chmod(0o755)
    tools.setenv("CXX", str(poor))
    assert native_build.build(TINY, tmp_path / "cache").seven is not None


BUILD = """
import sys, pathlib
from minserve.kernels import native_build
native_build.build('extern "C" { int seven = 7; }', pathlib.Path(sys.argv[1]))
"""
SLOW_COMPILER = """#!/bin/sh
for last; do :; done
touch "$last.started"
for i in $(seq 6000); do [ $(ls "${last%/*}" | grep -c started) = 2 ] && exec c++ "$@"; sleep 0.1; done
echo error: the other one never started; exit 1
"""


@needs_native
def test_two_processes_build_at_once(tools, tmp_path):
    """Each compiler waits for the other to have started on a file of its own."""
    slow, folder = tmp_path / "slow", tmp_path / "cache"
    slow.write_text(SLOW_COMPILER)
    slow.chmod(0o755)
    tools.setenv("CXX", str(slow))
    command = [sys.executable, "-c", BUILD, str(folder)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=900)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len([path for path in folder.iterdir() if path.suffix == ".so"]) == 1
