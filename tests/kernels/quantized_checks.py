"""What right kernels over quantized pages do: fragmented pages in which whatever is nobody's to read is poison.

A slot that no query reads has a scale that is NaN, and so has a page; tokens between the rows' fresh ones are NaN.
"""

import pytest
import torch
from kernel_checks import DEVICE, NAN, close, moat_int, randn, starts, wide
from paged_checks import NOWHERE, seen_by_row, some_trees

from minserve.kernels.kv_quantize import kv_write_scaled_reference, seal_reference

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}


def rows_of_all_kinds(T, G, D, dtype=torch.float32, seed=0):
    """Random rows, and among them: constant, all zeros, one outlier, -0.0, ties, one NaN."""
    x = randn(T, G, D, dtype=dtype, seed=seed)
    x[0], x[1, 0] = 100.0, 0.0
    x[2, 0], x[2, -1, 0], x[3, 0, -1] = -0.0, 1e4, 1e4
    x[4, -1, 1] = NAN
    for g, ties in ((0, [127, 0.5, 1.5, -2.5]), (-1, [448, 1.0625, 1.1875, -1.0625])):
        x[5, g, :4] = torch.tensor(ties, dtype=dtype)
    return x


# ---------------------------------------------------------------- what is written
def check_write(module, kind="int8", T=6, G=2, D=24, dtype=torch.float32, seed=0):
    """Integers and scales equal the definition's; slots of nobody, and the token without one, change nothing."""
    k, v = (wide(rows_of_all_kinds(T, G, D, dtype, seed + i)) for i in (0, 1))
    slots = moat_int(torch.tensor([8, 3, 5, -1, 0, 7, *range(9, 3 + T)], device=DEVICE)[:T])
    results = []
    for write in (module.kv_write_scaled, module.kv_write_scaled_reference):
        stored = [torch.full((T + 8, G, D), 77, dtype=torch.uint8, device=DEVICE) for _ in (0, 1)]
        scales = [torch.full((T + 8, G), 3.0, device=DEVICE) for _ in (0, 1)]
        write(
            k, v, *(x.view(KINDS[kind])[2:] for x in stored), *(x[2:] for x in scales), slots
        )  # room before slot 0
        results.append([x.view(KINDS[kind]).float() for x in stored] + scales)
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def check_seal(module, S=8, G=2, D=24, dtype=torch.float32, seed=0):
    """Pages out of the midst of fresh tokens; one entry that is skipped."""
    k, v = (rows_of_all_kinds(4 * S + 9, G, D, dtype, seed + i).roll(1, 0) for i in (0, 1))
    k[3 : 3 + S, 0, 1], v[3], v[2 * S + 5, 0] = 100.0, 100.0, 0.0
    at, pages = torch.tensor([3, 1, 2 * S + 5], device=DEVICE), torch.tensor([4, -1, 1], device=DEVICE)
    results = []
    for seal in (module.seal, module.seal_reference):
        sealed = empty_pages(8, S, G, D, fill=77)  # room before page 0
        seal(k, v, moat_int(at), moat_int(pages.int() if seed else pages), *(x[2:] for x in sealed))
        results.append(sealed)
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def empty_pages(P, S, G, D, fill=NAN):
    """(k4, v4, k_affine, v_affine)"""
    n = 255 if fill != fill else fill
    k4, v4 = (torch.full((P, S, G, D // 2), n, dtype=torch.uint8, device=DEVICE) for _ in (0, 1))
    shapes = (P, 2, G, D), (P, S, G, 2)
    return k4, v4, *(torch.full(shape, fill, dtype=torch.float16, device=DEVICE) for shape in shapes)


# ---------------------------------------------------------------- what is attended to
def quantized_case(
    kind, queries, lengths, H=6, G=2, D=32, S=16, dtype=torch.float32, seed=0, size=1.0, window=None, sinks=0,
    unused=None,
):  # fmt: skip
    """(q, cache, fresh, plan) as the launchers take them; fresh is () with 8 bits."""
    B, M = len(queries), max(-(-n // S) for n in lengths) + 1
    P = sum(-(-n // S) for n in lengths) + 3
    order = torch.randperm(P - 1, generator=torch.Generator().manual_seed(seed)) + 1  # page 0 is nobody's
    free, nobody = order.tolist(), (list(NOWHERE) if unused is None else [unused]) * (M + 3)
    pages = torch.tensor([nobody[: M + 3]] * B, dtype=torch.int32)
    past = [
        [randn(n, G, D, dtype=dtype, seed=100 * seed + 10 * i + b) for b, n in enumerate(lengths)]
        for i in (0, 1)
    ]
    seen = [seen_by_row(q, n, window, sinks) for q, n in zip(queries, lengths)]
    for b, own in enumerate(seen):
        for i in sorted({j // S for j in own}):
            pages[b, i] = free.pop()
    if kind == "int4":
        cache, fresh = _four_bits(past, queries, lengths, seen, pages, P, S, window, sinks)
    else:
        cache, fresh = _eight_bits(KINDS[kind], past, seen, pages, P, S), ()
    q = wide(randn(sum(queries) + 2, H, D, dtype=dtype, seed=seed) * size)  # two places of padding
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return q, cache, fresh, (pages.to(DEVICE)[:, :M], starts(queries), lengths)


def _eight_bits(stored, past, seen, pages, P, S):
    G, D = past[0][0].shape[1:]
    k, v = (torch.full((P * S, G, D), 126, dtype=torch.uint8, device=DEVICE).view(stored) for _ in (0, 1))
    scales = [torch.full((P * S, G), NAN, device=DEVICE) for _ in (0, 1)]
    for b, own in enumerate(seen):
        slots = torch.tensor(
            [int(pages[b, j // S]) * S + j % S for j in own], dtype=torch.int64, device=DEVICE
        )
        kv_write_scaled_reference(past[0][b][own], past[1][b][own], k, v, *scales, slots)
    return tuple(x.view(P, S, *x.shape[1:]) for x in (k, v, *scales))


def _four_bits(past, queries, lengths, seen, pages, P, S, window, sinks):
    """Sealed: full pages that a query behind them sees. Fresh: what queries see of their own page."""
    G, D = past[0][0].shape[1:]
    sealed, fresh, home = empty_pages(P, S, G, D), [[], []], []
    gap = torch.full((5, G, D), NAN, dtype=past[0][0].dtype, device=DEVICE)
    for b, n in enumerate(lengths):
        first = max(n - queries[b], 0)
        own = first // S * S
        old, new = set(), set()
        for p in range(first, n if queries[b] else 0):
            visible = [j for j in seen[b] if j <= p and (window is None or j > p - window or j < sinks)]
            old |= {j for j in visible if j // S < p // S}
            new |= {j for j in visible if j // S == p // S}
        for i in sorted({j // S for j in old}):
            page = empty_pages(1, S, G, D)
            whole = [x[b][i * S : (i + 1) * S].contiguous() for x in past]
            zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
            seal_reference(*whole, zero, zero, *page)
            page[3][0, [j for j in range(S) if i * S + j not in old]] = NAN
            for to, x in zip(sealed, page):
                to[pages[b, i]] = x[0]
        home.append(sum(len(x) for x in fresh[0]) + 5)
        for kept, x in zip(fresh, past):
            part = torch.full((max(n - own, 0), G, D), NAN, dtype=gap.dtype, device=DEVICE)
            for j in new:
                part[j - own] = x[b][j]
            kept += [gap, part]
    fresh = [torch.cat([*x, gap]) for x in fresh]
    return sealed, (*fresh, torch.tensor(home, dtype=torch.int64, device=DEVICE))


def definition(module, kind):
    return module.int4_attention_reference if kind == "int4" else module.scaled_attention_reference


def check_decode(module, kind, queries, lengths, splits=None, window=None, sinks=0, **shape):
    q, cache, fresh, plan = quantized_case(kind, queries, lengths, window=window, sinks=sinks, **shape)
    expected = definition(module, kind)(q, *cache, *fresh, *plan, window, sinks)[: sum(queries)]
    limits = max(queries), max(lengths), window, sinks
    if splits is None:
        run = module.int4_decode if kind == "int4" else module.scaled_decode
        got = run(q, *cache, *fresh, *plan, *limits)
    else:
        got = module.attend_in_splits(q, cache, fresh or (None, None, None), plan, *limits, splits)
    assert expected.isfinite().all()  # the definition reads no poison
    close(got[: sum(queries)], expected)


def check_trees(module, queries, lengths, splits, kind="int8", **shape):
    """A chain has the bits of no tree; trees are what the definition says, which attends as over 16-bit pages."""
    q, cache, _, plan = quantized_case(kind, queries, lengths, **shape)
    limits, T, trees = (max(queries), max(lengths), None, 0, splits), sum(queries), some_trees(len(q))
    run = lambda trees: module.attend_in_splits(q, cache, (None,) * 3, plan, *limits, trees)[:T]
    chain = run(torch.full_like(trees, -1))
    close(chain, run(None))
    close(run(trees), module.scaled_attention_reference(q, *cache, *plan, trees=trees)[:T])
    assert not torch.equal(chain, run(trees))


def check_prefill(module, kind, queries, lengths, window=None, sinks=0, **shape):
    q, cache, fresh, plan = quantized_case(kind, queries, lengths, window=window, sinks=sinks, **shape)
    expected = definition(module, kind)(q, *cache, *fresh, *plan, window, sinks)[: sum(queries)]
    run = module.int4_prefill if kind == "int4" else module.scaled_prefill
    got = run(q, *cache, *fresh, *plan, max(queries), window, sinks)
    assert expected.isfinite().all()
    close(got[: sum(queries)], expected)


def check_far_slots(module, S=16, G=16, D=64):
    """Slots beyond 2**31 bytes. Room before the cache takes the reads of a kernel that counts in 32 bits."""
    P = 2**31 // (S * G * D) + 3
    cache = _far(2 * P, S, G, D)[P:]
    cache[-3:] = (randn(3, S, G, D) * 40).to(torch.int8)
    scales = torch.full((P, S, G), NAN, device=DEVICE)
    scales[-3:] = randn(3, S, G).abs()
    pages = torch.tensor([[P - 1, P - 3]], dtype=torch.int32, device=DEVICE)
    plan = pages, starts([1]), torch.tensor([S + 5], dtype=torch.int32, device=DEVICE)
    case = randn(1, G, D), cache, cache, scales, scales, *plan
    close(module.scaled_decode(*case, 1, S + 5), module.scaled_attention_reference(*case))


def _far(*shape):
    try:
        return torch.empty(shape, dtype=torch.int8, device=DEVICE)  # 4.3 GB; only what is touched is real
    except RuntimeError as error:
        pytest.skip(f"no room for the test: {error}")
