"""What a right kernel does, as functions: the tests call them on ours, test_mutations.py on wrong ones.

Each check takes the module that holds the kernel, builds inputs whose unused memory is NaN, and asserts that
the kernel equals the module's own definition. test_definitions.py compares those with other people's code.
"""

import itertools

import pytest
import torch

from minserve.kernels import INTERPRETED, on_triton

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_kernel = pytest.mark.skipif(  # else the definition would be compared with itself
    not on_triton(torch.empty(0, device=DEVICE)), reason="no kernel here: needs TRITON_INTERPRET=1 or a GPU"
)
# fp32 differs by the order of sums. 16 bits: weights are rounded before the second dot, outputs at the store;
# rounding is 2^-11 in fp16 and 2^-8 in bf16, relative.
TOLERANCE = {torch.float32: dict(rtol=2e-5, atol=2e-5), torch.float16: dict(rtol=2e-3, atol=2e-3)}
if DEVICE == "cuda":  # the interpreter has no bfloat16 arithmetic
    TOLERANCE[torch.bfloat16] = dict(rtol=1.6e-2, atol=1.6e-2)
DTYPES = list(TOLERANCE)
NAN = float("nan")


def close(got, expected):
    torch.testing.assert_close(got, expected, **TOLERANCE[got.dtype])


def randn(*shape, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen).to(dtype).to(DEVICE)


def moat(x, before=2, after=3):
    """x with rows of NaN before and after it in memory: a read beyond either end shows."""
    room = torch.full((before + len(x) + after, *x.shape[1:]), NAN, dtype=x.dtype, device=x.device)
    inside = room[before : before + len(x)]
    inside.copy_(x)
    return inside


def wide(x, extra=5):
    """x as a view whose rows lie further apart than they are long, with NaN in between."""
    row = x.shape[1:].numel()
    room = torch.full((len(x), row + extra), NAN, dtype=x.dtype, device=x.device)
    room[:, :row] = x.flatten(1)
    return room.as_strided(x.shape, (row + extra, *x.stride()[1:]))


def moat_int(x):
    room = torch.full((len(x) + 5,), -99, dtype=x.dtype, device=x.device)
    room[2 : 2 + len(x)] = x
    return room[2 : 2 + len(x)]


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


# ---------------------------------------------------------------- rows
def check_rms_norm(module, T=3, E=100, dtype=torch.float32, seed=0, size=1.0):
    x, residual = (wide(randn(T, E, dtype=dtype, seed=seed + i) * size) for i in (0, 1))
    weight = moat(randn(E, dtype=dtype, seed=seed + 2) + 1)
    eps = 1e-2  # large enough that a forgotten or misplaced eps shows
    close(module.rms_norm(x, weight, eps), module.rms_norm_reference(x, weight, eps))
    got, expected = (
        f(x, residual, weight, eps) for f in (module.add_rms_norm, module.add_rms_norm_reference)
    )
    close(got[0], expected[0])
    assert torch.equal(got[1], expected[1])  # one addition and one rounding: exactly equal


def check_rope(module, T=3, H=6, G=2, D=24, dtype=torch.float32, seed=0):
    q, k = wide(randn(T, H, D, dtype=dtype, seed=seed)), wide(randn(T, G, D, dtype=dtype, seed=seed + 1))
    before = q.clone(), k.clone()
    angle = torch.arange(1, T + 1, device=DEVICE)[:, None] * torch.linspace(2.0, 0.1, D // 2, device=DEVICE)
    cos, sin = moat(angle.cos()), moat(angle.sin())
    for got, expected in zip(module.rope(q, k, cos, sin), module.rope_reference(q, k, cos, sin), strict=True):
        close(got, expected)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


def check_silu_mul(module, T=3, C=100, dtype=torch.float32, seed=0):
    both = wide(randn(T, 2 * C, dtype=dtype, seed=seed) * 4)
    gate, up = both[:, :C], both[:, C:]
    close(module.silu_mul(gate, up), module.silu_mul_reference(gate, up))


def check_kv_write(module, slots=(5, -1, 0, 7), S=8, G=2, D=24, dtype=torch.float32, seed=0):
    T = len(slots)
    k, v = (wide(randn(T, G, D, dtype=dtype, seed=seed + i)) for i in (0, 1))
    caches = [[moat(randn(S, G, D, dtype=dtype, seed=9 + i)) for i in (0, 1)] for _ in range(2)]
    slots = torch.tensor(slots, device=DEVICE)
    module.kv_write(k, v, *caches[0], slots)
    module.kv_write_reference(k, v, *caches[1], slots)
    for got, expected in zip(*caches):
        assert torch.equal(got, expected)
        room = got.as_strided((S + 5, G, D), got.stride(), got.storage_offset() - 2 * G * D)
        assert room[:2].isnan().all() and room[-3:].isnan().all()  # the memory around the cache is untouched


def check_rope_and_write(
    module, slots=(5, -1, 0, 7), H=6, G=2, D=24, norms=True, dtype=torch.float32, seed=0, size=1.0
):
    """Slots in between, the token without one, and all around the caches keep their NaN; the values are exact."""
    T, S, C = len(slots), 8, 40
    qkv = wide(randn(T, (H + 2 * G) * D, dtype=dtype, seed=seed) * size)
    angle = torch.arange(C, device=DEVICE)[:, None] * torch.linspace(2.0, 0.1, D // 2, device=DEVICE)
    turns = moat(torch.cat((angle.cos(), angle.sin()), -1))
    positions = moat_int((C - 1 - 7 * torch.arange(T, device=DEVICE)) % C)
    slots = moat_int(torch.tensor(slots, dtype=torch.int64, device=DEVICE))
    weights = [moat(randn(D, dtype=dtype, seed=seed + i) + 1) if norms else None for i in (1, 2)]
    eps, before = 1e-2, qkv.clone()  # large enough that a forgotten or misplaced eps shows
    results = []
    for run in (module.rope_and_write, module.rope_and_write_reference):
        pool = torch.full((2 + S + 3, 2, G, D), NAN, dtype=dtype, device=DEVICE)
        caches = pool[2 : 2 + S].unbind(1)  # slots lie twice as far apart as they are long
        results.append((run(qkv, turns, positions, slots, *caches, *weights, eps), pool))
    (got, cache), (expected, expected_cache) = results
    close(got, expected)
    assert got.is_contiguous() and torch.equal(qkv, before)
    torch.testing.assert_close(cache, expected_cache, **TOLERANCE[dtype], equal_nan=True)
    torch.testing.assert_close(cache[:, 1], expected_cache[:, 1], rtol=0, atol=0, equal_nan=True)


def check_stream(module, numel=10_000, dtype=torch.float32, seed=0):
    src, dst = moat(randn(numel, dtype=dtype, seed=seed)), moat(randn(numel, dtype=dtype, seed=1))
    module.copy(src, dst)
    assert torch.equal(src, dst)
    room = dst.as_strided((numel + 5,), (1,), 0)
    assert room[:2].isnan().all() and room[-3:].isnan().all()
    torch.testing.assert_close(module.total(src), module.total_reference(src), rtol=1e-4, atol=1e-3)


def check_gemv(module, M=3, N=10, K=300, bias=True, dtype=torch.float32, seed=0):
    x, weight = wide(randn(M, K, dtype=dtype, seed=seed)), wide(moat(randn(N, K, dtype=dtype, seed=seed + 1)))
    bias = moat(randn(N, dtype=dtype, seed=seed + 2) * 10) if bias else None
    got, expected = module.gemv(x, weight, bias), module.gemv_reference(x, weight, bias)
    tolerance = dict(TOLERANCE[dtype], atol=TOLERANCE[dtype]["atol"] * K**0.5)  # sums of K products of 1
    torch.testing.assert_close(got, expected, **tolerance)


# ---------------------------------------------------------------- attention
def prefill_case(queries, keys, H, G, D, dtype=torch.float32, seed=0, size=1.0):
    """Ragged sequences; NaN around all keys. Returns prefill_attention's arguments but the window."""
    q = wide(randn(sum(queries), H, D, dtype=dtype, seed=seed) * size)
    k = moat(randn(sum(keys), G, D, dtype=dtype, seed=seed + 1), after=80)
    v = moat(randn(sum(keys), G, D, dtype=dtype, seed=seed + 2), after=80)
    return q, k, v, starts(queries), starts(keys), max(queries)


def check_prefill(module, queries, keys, H=6, G=2, D=32, dtype=torch.float32, seed=0, size=1.0, **masks):
    case = prefill_case(queries, keys, H, G, D, dtype, seed, size)
    close(module.prefill_attention(*case, **masks), module.prefill_attention_reference(*case, **masks))


def decode_case(lengths, H, G, D, dtype=torch.float32, seed=0, size=1.0, spare=7):
    """Every slot past a sequence's length holds NaN, and so does the memory between two sequences."""
    B, S = len(lengths), max(lengths) + spare
    q = randn(B, H, D, dtype=dtype, seed=seed) * size
    k_cache, v_cache = (moat(randn(B, S, G, D, dtype=dtype, seed=seed + i)) for i in (1, 2))
    for b, n in enumerate(lengths):
        k_cache[b, n:] = NAN
        v_cache[b, n:] = NAN
    return q, k_cache, v_cache, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def check_decode(module, lengths, H=6, G=2, D=32, dtype=torch.float32, seed=0, size=1.0, splits=None):
    case = decode_case(lengths, H, G, D, dtype, seed, size)
    expected = module.decode_attention_reference(*case, max(lengths))
    got = (
        module.decode_attention(*case, max(lengths))
        if splits is None
        else module.attend_in_splits(*case, splits)
    )
    close(got, expected)
