"""The CPU's kernels of a quantized KV cache equal the definitions, bit for bit where they store, in poisoned memory.

A check takes the kernels it checks, so that test_native_kv_mutations.py can call it on wrong ones. What nobody should
read has a scale that is NaN, and the tables lead to a page of such, where nobody should look.
"""

import itertools

import pytest
import torch
from kernel_checks import moat, moat_int, wide
from test_native import (
    BF16,
    FP32,
    INF,
    NAN,
    close,
    dtypes,
    needs_native,
    paged_case,
    poison_unseen,
    randn,
    run,
    same,
    some_trees,
)

from minserve.kernels import kv_quantize, native
from minserve.kernels.kv_quantize import quantize_range, quantize_rows
from minserve.kernels.quantized_attention import int4_attention_reference, scaled_attention_reference

HEADS = [(6, 2, 16), (9, 3, 64), (4, 1, 80), (7, 1, 24), (4, 2, 128)]  # (H, G, D): groups of 3, 4, 4 + 3, 2
SEEN = [(None, 0), (1, 0), (5, 0), (5, 3), (40, 4), (40, 37), (500, 7)]  # window, sinks


@pytest.fixture(scope="module")
def ops():
    return native.Native()


def odd_rows(dtype, n, *shape, seed=0):
    """[n, *shape]: ordinary rows, then tiny ones (their scale is 2^-149, or 0), zeros, a constant, an outlier, ..."""
    x = randn(n, *shape, dtype=dtype, seed=seed)
    x[-10], x[-9], x[-8], x[-7], x[-6], x[-5] = 2.66e-43, 1e-44, 0.0, 100.0, 0.0, -0.0
    x[-6, ..., -1] = -1e4
    x[-4, ..., -1], x[-3, ..., 0], x[-2], x[-1, ..., -1] = NAN, INF, 1e-40, -3e38
    return x


def check_stored(ops, name, definition, case, caches):
    """Every byte of the caches and around them is what the definition leaves there; and again in a replay."""
    rooms = [[torch.full((len(x) + 4, *x.shape[1:]), 77, dtype=x.dtype) for x in caches] for _ in range(2)]
    inside = [[room[2:-2] for room in both] for both in rooms]
    with ops.recording() as calls:
        getattr(ops, name)(*case(*inside[0]))
    definition(*case(*inside[1]))
    for got, expected in zip(*rooms):
        same(got, expected)
        got.fill_(77)
    ((function, arguments, _),) = calls
    function(*arguments)
    for got, expected in zip(*rooms):
        same(got, expected)


# ---------------------------------------------------------------- writing
def check_write(ops, dtype=FP32, G=2, D=22, T=14):
    k, v = wide(odd_rows(dtype, T, G, D)), wide(odd_rows(dtype, T, G, D).flip(0, 1), extra=9)
    N = T + 5
    slots = torch.randperm(N, generator=torch.Generator().manual_seed(D))[:T]
    slots[[1, -2]] = -1
    slots = moat_int(slots)
    caches = *torch.empty(2, N, G, D, dtype=torch.int8), *torch.empty(2, N, G)
    check_stored(
        ops, "kv_write_scaled", kv_quantize.kv_write_scaled_reference, lambda *to: (k, v, *to, slots), caches
    )


def check_seal(ops, dtype=FP32, G=2, D=22, S=8, ids=torch.int64):
    """Odd channels and odd tokens; a page more than is sealed, and NaN between the pages."""
    values = odd_rows(dtype, 4 * S + 10, G, D)[10:]
    starts = torch.tensor([9, 2 * S + 11, 0, 4 * S + 13])
    fresh = torch.full((2, 6 * S + 16, G, D), NAN, dtype=dtype)
    for i, at in enumerate(starts.tolist()):
        if i != 2:
            fresh[0, at : at + S] = odd_rows(dtype, D, G, S, seed=i).permute(2, 1, 0)
            fresh[1, at : at + S] = values[i * S :][:S]
    pages = moat_int(torch.tensor([3, 0, -1, 1], dtype=ids))
    caches = (
        *torch.empty(2, 5, S, G, D // 2, dtype=torch.uint8),
        *(torch.empty(5, *shape, dtype=torch.float16) for shape in ((2, G, D), (S, G, 2))),
    )
    case = lambda *to: (*fresh, moat_int(starts), pages, *to)
    check_stored(ops, "seal", kv_quantize.seal_reference, case, caches)


def check_half_to_nearest(ops):
    """Every fp16 and what lies between two of them, as the minimum of a channel that is constant; and larger ones."""
    bits = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    between = (bits[:-1] + bits[1:]) / 2
    x = torch.cat((bits, between, between.nextafter(bits[1:]), between.nextafter(bits[:-1])))
    x = torch.cat((x, torch.tensor([65519.0, 65520.0, 1e6, INF, NAN])))
    x = torch.cat((x, -x)).view(1, 1, -1)
    k4, D, zero = torch.zeros(1, 1, 1, x.numel() // 2, dtype=torch.uint8), x.numel(), torch.tensor([0])
    k_affine, v_affine = (torch.zeros(shape, dtype=torch.float16) for shape in ((1, 2, 1, D), (1, 1, 1, 2)))
    ops.seal(x, x, zero, zero, k4, k4, k_affine, v_affine)
    same(k_affine[0, 1, 0], x.clamp(-65504, 65504).half().flatten())


def check_half_is_read(ops):
    """Every fp16 as the minimum of the only value that counts."""
    x = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    B, zeros = len(x), torch.zeros(1, 1, 2)
    k4 = torch.zeros(B, 1, 1, 1, dtype=torch.uint8)
    k_affine = torch.zeros(B, 2, 1, 2, dtype=torch.float16)
    v_affine = torch.stack((torch.zeros_like(x), x), -1).view(B, 1, 1, 2)
    tables = torch.stack((torch.arange(B), torch.zeros(B))).T.int().contiguous()
    lengths, home = torch.full((B,), 2, dtype=torch.int32), torch.zeros(B, dtype=torch.int64)
    far = zeros - 1e30  # the query's own position
    got = ops.attend_int4(torch.ones(B, 1, 2), k4, k4, k_affine, v_affine, far, zeros, home, tables, lengths)
    same(got, x.float().view(B, 1, 1).expand(B, 1, 2))


# ---------------------------------------------------------------- attention
def scaled_case(lengths, H, G, D, S, dtype, window=None, sinks=0, size=1.0):
    q, *caches, tables, lengths = paged_case(lengths, H, G, D, S, dtype, window, sinks, size)
    (k, k_scales), (v, v_scales) = map(quantize_rows, caches)  # where a cache holds NaN, a scale is NaN
    return q, k, v, moat(k_scales), moat(v_scales), tables, lengths


def int4_case(lengths, H, G, D, S, dtype, window=None, sinks=0, size=1.0):
    """Sealed pages, whole; the query's own one only among the fresh tokens, and there only as far as it goes."""
    q, k, v, tables, counts = paged_case(lengths, H, G, D, S, dtype, size=size)
    (k4, *k_affine), (v4, *v_affine) = quantize_range(k, 1), quantize_range(v, -1)
    k_affine, v_affine = torch.cat(k_affine, 1), torch.cat(v_affine, -1)
    fresh = torch.full((2, (len(lengths) + 2) * (S + 3), G, D), NAN, dtype=dtype)
    home = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(D)) * (S + 3) + 2
    for b, n in enumerate(lengths):
        own, at = max(n - 1, 0) // S * S, int(home[b])
        for i in range(-(-n // S)):
            page, j = int(tables[b, i]), torch.arange(i * S, i * S + S)
            seen = (j < own) & ((j >= n - (window or n)) | (j < sinks))
            v_affine[page, ~seen] = NAN
            if i * S == own:
                fresh[0, at : at + n - own] = k[page, : n - own]
                fresh[1, at : at + n - own] = v[page, : n - own]
            if not seen.any():
                k_affine[page], tables[b, i] = NAN, 0
    pack = kv_quantize.pack_halves
    cache = pack(k4), pack(v4), moat(k_affine), moat(v_affine), *fresh
    return q, *cache, moat_int(home), tables, counts


CASES = dict(
    attend_scaled=(scaled_case, scaled_attention_reference), attend_int4=(int4_case, int4_attention_reference)
)


def check_attend(ops, name, lengths, H=6, G=2, D=22, S=16, dtype=FP32, window=None, sinks=0, size=1.0):
    make, definition = CASES[name]
    *case, counts = make(lengths, H, G, D, S, dtype, window, sinks, size)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    expected = definition(*case, starts, counts, window, sinks)
    assert expected.isfinite().all()  # the definition reads no poison
    close(run(ops, name, *case, counts, window, sinks), expected)


def check_trees(ops, lengths, H=6, G=2, D=22, S=16, dtype=FP32):
    *cache, tables, lengths = scaled_case(lengths, H, G, D, S, dtype)
    starts, chain = torch.arange(len(lengths) + 1, dtype=torch.int32), torch.full((len(lengths),), -1)
    run_on = lambda trees: run(ops, "attend_scaled", *cache, tables, lengths, None, 0, trees)
    same(run_on(moat_int(chain)), ops.attend_scaled(*cache, tables, lengths))
    trees = some_trees(lengths, seed=S)
    poison_unseen(cache[3:], tables, lengths, trees)
    expected = scaled_attention_reference(*cache, tables, starts, lengths, trees=trees)
    assert expected.isfinite().all()
    close(run_on(trees), expected)


def check_nan_stays(ops):
    """One NaN in what only the second of three rows reads: that row shows it, and no other does."""
    for name, poisons in (
        ("attend_scaled", {0: lambda page, home: (1, 0, 5), 3: lambda page, home: (page, 3, 0),
                           4: lambda page, home: (page, 3, 0)}),
        ("attend_int4", {3: lambda page, home: (page, 1, 0, 7), 4: lambda page, home: (page, 3, 0, 1),
                         5: lambda page, home: (home, 0, 9), 6: lambda page, home: (home, 0, 9)}),
    ):  # fmt: skip
        for i, where in poisons.items():
            case = CASES[name][0]([20, 37, 9], 2, 1, 16, 16, FP32)
            right = getattr(ops, name)(*case)
            case[i][where(int(case[-2][1, 1]), int(case[-3][1]) if name == "attend_int4" else None)] = NAN
            got = getattr(ops, name)(*case)
            same(got[[0, 2]], right[[0, 2]])
            assert got[1].isnan().any(), (name, i)


def check_far(ops):
    """Slots and pages beyond 2**31 bytes. Room before the caches takes what a 32-bit offset would reach."""
    S, G, D = 16, 16, 128
    P = 2**32 // (S * G * D) + 3
    try:
        room = torch.empty(2 * P, S, G, D // 2, dtype=torch.uint8)  # 4.3 GB; only what is touched is real
        floats = torch.empty(2 * P, S, G, 2)
        halves = torch.empty(2 * P, 2, G, D, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no room for the test: {error}")
    k, v = randn(2, 3 * S, G, D)
    q, lengths, near = randn(1, G, D), torch.tensor([2 * S + 5], dtype=torch.int32), torch.tensor([0, 1])
    for bits, far in ((8, P // 2 + torch.tensor([-1, -3])), (4, P + torch.tensor([-1, -3]))):
        results = []
        for pages, n in ((far, int(far.max()) + 1), (near, 2)):
            tables = torch.cat((pages, pages[:1])).int()[None]
            if bits == 8:
                cache = room.view(torch.int8).view(-1, S, G, D)[-n:]
                scales = floats.view(-1, S, G)[-n:]
                slots = (pages[:, None] * S + torch.arange(S)).flatten()
                both = cache, cache, scales, scales
                ops.kv_write_scaled(k[: 2 * S], k[: 2 * S], *(x.flatten(0, 1) for x in both), slots)
                results.append(ops.attend_scaled(q, *both, tables, lengths))
            else:
                both = room[-n:], room[-n:], halves[-n:], floats.view(torch.float16).view(-1, S, G, 2)[-n:]
                ops.seal(k, k, near * S, pages, *both)
                results.append(ops.attend_int4(q, *both, k, v, torch.tensor([2 * S]), tables, lengths))
        same(*results)


# ---------------------------------------------------------------- the checks, on the kernels we ship
@needs_native
@dtypes
def test_write(ops, dtype):
    for _, G, D in HEADS:
        check_write(ops, dtype, G, D)


@needs_native
@dtypes
def test_seal(ops, dtype):
    for (_, G, D), S in itertools.product(HEADS, (1, 4, 8, 64)):
        check_seal(ops, dtype, G, D, S)
    check_seal(ops, dtype, ids=torch.int32)


@needs_native
def test_half(ops):
    check_half_to_nearest(ops)
    check_half_is_read(ops)


@needs_native
@dtypes
@pytest.mark.parametrize("H, G, D", HEADS)
@pytest.mark.parametrize("name", CASES)
def test_attend(ops, name, dtype, H, G, D):
    for S, (window, sinks) in itertools.product((4, 16, 64), SEEN):
        check_attend(ops, name, [1, 0, S - 1, S, S + 1, 130], H, G, D, S, dtype, window, sinks)
    check_attend(ops, name, [700, 3, 128, 129], H, G, D, 16, dtype, size=5.0)  # several tiles


@needs_native
@dtypes
@pytest.mark.parametrize("H, G, D", HEADS)
def test_trees(ops, dtype, H, G, D):
    for S in (4, 16, 64):
        check_trees(ops, [1, 0, 62, 63, 64, 65, 300, 20], H, G, D, S, dtype)


@needs_native
def test_by_hand(ops):
    """Equal scores, so every weight is 1/n, and values that say where they lie."""
    zeros, ones = torch.zeros(3, 1, 1, 2, dtype=torch.int8), torch.ones(3, 1, 1)
    v = torch.tensor([[4, -8], [7, 7], [2, 10]], dtype=torch.int8).view(3, 1, 1, 2)
    tables, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    q = torch.ones(1, 1, 2)
    assert ops.attend_scaled(q, zeros, v, ones, ones * 10, tables, lengths).tolist() == [[[30.0, 10.0]]]
    none, byte = torch.zeros(3, 2, 1, 2, dtype=torch.float16), torch.zeros(3, 1, 1, 1, dtype=torch.uint8)
    ranges = torch.tensor([2.0, -1.0]).half().expand(3, 1, 1, 2).contiguous()
    fresh = torch.tensor([[[-9.0, 7.0]]])  # and with it 2 * 5 - 1, 2 * 12 - 1: the mean of two tokens
    got = ops.attend_int4(
        q, byte, byte + 0xC5, none, ranges, 0 * fresh, fresh, torch.tensor([0]), tables, lengths
    )
    assert got.tolist() == [[[0.0, 15.0]]]


@needs_native
def test_what_is_not_finite_stays_visible(ops):
    check_nan_stays(ops)


@needs_native
def test_far_slots_and_pages(ops):
    check_far(ops)


@needs_native
@pytest.mark.parametrize("dtype, name", [*itertools.product((FP32, BF16), CASES)])
def test_neither_threads_nor_other_rows_change_a_result(ops, dtype, name):
    *case, tables, lengths = CASES[name][0]([700, 3, 128, 129], 9, 3, 64, 16, dtype)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(getattr(ops, name)(*case, tables, lengths))
        check_write(ops, dtype, 3, 64, T=300)
        check_seal(ops, dtype, 2, 128, S=64)
    finally:
        torch.set_num_threads(before)
    same(*results)
    q, *cache = case
    homes = cache[-1:] if name == "attend_int4" else []
    for b in range(len(lengths)):
        one = slice(b, b + 1)
        rest = *cache[: len(cache) - len(homes)], *(home[one] for home in homes)
        same(getattr(ops, name)(q[one], *rest, tables[one], lengths[one]), results[0][one])


@needs_native
def test_nothing_to_do(ops):
    none, i32 = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    tokens, tables = torch.zeros(0, 2, 4), torch.zeros((0, 2), dtype=torch.int32)
    cache, scales = torch.zeros(3, 2, 2, 4, dtype=torch.int8), torch.zeros(3, 2, 2)
    flat = [x.flatten(0, 1) for x in (cache, cache, scales, scales)]
    ops.kv_write_scaled(tokens, tokens, *flat, none)
    assert ops.attend_scaled(tokens, cache, cache, scales, scales, tables, i32).shape == (0, 2, 4)
    k4 = torch.zeros(3, 2, 2, 2, dtype=torch.uint8)
    sealed = k4, k4, *torch.zeros(2, 3, 2, 2, 4).half()[:1], torch.zeros(3, 2, 2, 2).half()
    ops.seal(tokens, tokens, none, none, *sealed)
    assert ops.attend_int4(tokens, *sealed, tokens, tokens, none, tables, i32).shape == (0, 2, 4)


@needs_native
def test_wrong_arguments_are_named(ops):
    q, k = torch.ones(2, 4, 8), torch.ones(2, 2, 8)
    k8, k4 = torch.zeros(3, 4, 2, 8, dtype=torch.int8), torch.zeros(3, 4, 2, 4, dtype=torch.uint8)
    scales, slots = torch.ones(3, 4, 2), torch.zeros(2, dtype=torch.int64)
    ranges = torch.zeros(3, 2, 2, 8).half(), torch.zeros(3, 4, 2, 2).half()
    tables, lengths, home = torch.zeros((2, 1), dtype=torch.int32), torch.zeros(2, dtype=torch.int32), slots
    flat, flat_scales = k8.flatten(0, 1), scales.flatten(0, 1)
    write = lambda k=k, v=k, cache=flat, scales=flat_scales, slots=slots: ops.kv_write_scaled(
        k, v, cache, cache, scales, scales, slots
    )
    scaled = lambda q=q, k8=k8, v8=k8, scales=scales, tables=tables, lengths=lengths, **seen: (
        ops.attend_scaled(q, k8, v8, scales, scales, tables, lengths, **seen)
    )
    seal = lambda k=k, starts=slots, pages=slots, k4=k4: ops.seal(k, k, starts, pages, k4, k4, *ranges)
    int4 = lambda q=q, home=home, tables=tables, **seen: ops.attend_int4(
        q, k4, k4, *ranges, k, k, home, tables, lengths, **seen
    )
    for wrong, call in [
        ("kv_write_scaled: slots", lambda: write(slots=slots.int())),
        ("kv_write_scaled: k .* and v", lambda: write(v=k[:1])),
        ("kv_write_scaled: caches .* scales", lambda: write(scales=flat_scales[1:])),
        ("kv_write_scaled: .*int8", lambda: write(cache=flat.to(torch.float8_e4m3fn))),
        ("kv_write_scaled: torch.float16", lambda: write(k.half(), k.half())),
        ("attend_scaled: .*int8", lambda: scaled(k8=k8.byte(), v8=k8.byte())),
        ("attend_scaled: .*int8", lambda: scaled(k8=k8.to(torch.float8_e4m3fn), v8=k8.to(torch.float8_e4m3fn))),
        ("attend_scaled: k_cache", lambda: scaled(q=q[..., :4].contiguous())),
        ("attend_scaled: caches", lambda: scaled(v8=k8[:, :2].contiguous())),
        ("attend_scaled: .*contiguous", lambda: scaled(scales=torch.ones(3, 4, 4)[..., ::2])),
        ("attend_scaled: q .*contiguous", lambda: scaled(q=q.transpose(0, 1).contiguous().transpose(0, 1))),
        ("attend_scaled: tables", lambda: scaled(tables=tables.long())),
        ("attend_scaled: lengths", lambda: scaled(lengths=lengths[:1])),
        ("attend_scaled: 3 query heads", lambda: scaled(q=q[:, :3].contiguous())),
        ("attend_scaled: .*window 0", lambda: scaled(window=0)),
        ("attend_scaled: .*sinks -1", lambda: scaled(window=5, sinks=-1)),
        ("seal: starts", lambda: seal(starts=slots.int())),
        ("seal: pages", lambda: seal(pages=slots[:1])),
        ("seal: k4", lambda: seal(k4=k4[..., :3].contiguous())),
        ("seal: pages of 3 slots", lambda: ops.seal(
            k, k, slots, slots, *[k4[:, :3].contiguous()] * 2, ranges[0], ranges[1][:, :3].contiguous())),
        ("attend_int4: fresh_k", lambda: int4(q=q.bfloat16())),
        ("attend_int4: home", lambda: int4(home=home[:1])),
        ("attend_int4: home", lambda: int4(home=home.int())),
        ("attend_int4: tables", lambda: int4(tables=tables[:1])),
        ("attend_int4: .*window 0", lambda: int4(window=0)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=wrong):
            call()
