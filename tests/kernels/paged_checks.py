"""What a right paged kernel does: a fragmented cache in which everything that is nobody's to read is poison.

Slots that no query sees hold NaN, table entries that nobody needs hold page ids that do not exist, pages are
shuffled, and K and V lie interleaved, so neither pages nor table rows are where a careless stride puts them.
"""

import itertools

import pytest
import torch
from kernel_checks import DEVICE, NAN, close, moat, moat_int, randn, starts, wide

NOWHERE = (1_000_000, -7)  # page ids in entries nobody needs


def seen_by_row(queries, length, window=None, sinks=0):
    """Positions at least one query of the row sees, in plain Python."""
    first = length - queries
    return [j for j in range(length if queries else 0) if window is None or j > first - window or j < sinks]


def paged_case(
    queries, lengths, H=6, G=2, D=32, S=16, dtype=torch.float32, seed=0, size=1.0, window=None, sinks=0, unused=None
):  # fmt: skip
    """(arguments of both launchers up to the lengths, each row's keys, each row's values)."""
    B, M = len(queries), max(-(-n // S) for n in lengths) + 1
    P = sum(-(-n // S) for n in lengths) + 3
    free = torch.randperm(P - 1, generator=torch.Generator().manual_seed(seed)) + 1  # page 0 is nobody's
    free = free.tolist()
    cache = torch.full((P, 2, S, G, D), NAN, dtype=dtype, device=DEVICE)
    filler = itertools.cycle(NOWHERE if unused is None else [unused])
    pages = torch.tensor([[next(filler) for _ in range(M + 3)] for _ in range(B)], dtype=torch.int32)
    past = [
        [randn(n, G, D, dtype=dtype, seed=100 * seed + 10 * i + b) for b, n in enumerate(lengths)]
        for i in (0, 1)
    ]
    for b, n in enumerate(lengths):
        own = {}
        for j in seen_by_row(queries[b], n, window, sinks):
            page = own[j // S] if j // S in own else own.setdefault(j // S, free.pop())
            pages[b, j // S] = page
            for i in (0, 1):
                cache[page, i, j % S] = past[i][b][j]
    q = wide(randn(sum(queries) + 2, H, D, dtype=dtype, seed=seed) * size)  # two places of padding
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return (q, cache[:, 0], cache[:, 1], pages.to(DEVICE)[:, :M], starts(queries), lengths), *past


def check_paged_decode(module, queries, lengths, splits=None, window=None, sinks=0, **shape):
    case, _, _ = paged_case(queries, lengths, window=window, sinks=sinks, **shape)
    expected = module.paged_attention_reference(*case, window, sinks)[: sum(queries)]
    if splits is None:
        got = module.paged_decode(*case, max(queries), max(lengths), window, sinks)
    else:
        got = module.attend_in_splits(*case, max(queries), splits, window, sinks)
    assert expected.isfinite().all()  # the definition reads no poison
    close(got[: sum(queries)], expected)


def some_trees(n, seed=0):
    """A word per query in which bits are set and not; one that hides everything, one that is the plain rule."""
    gen = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**63), 2**63 - 1, (n,), generator=gen)
    words[0], words[-1] = 0, -1
    return moat_int(words.to(DEVICE))


def attend_to_trees(q, keys, values, queries, lengths, trees):
    """Dense attention under a mask that is written down place by place, in fp64; one row's keys are [n, G, D]."""
    rows, t = [], 0
    for b, (m, n) in enumerate(zip(queries, lengths)):
        for p in range(n - m, n):
            word = int(trees[t])
            seen = torch.tensor([j <= p and (p - j >= 63 or word >> (p - j) & 1 == 1) for j in range(n)])
            k, v = (
                x[b].double().repeat_interleave(q.shape[1] // x[b].shape[1], 1) for x in (keys, values)
            )  # [n, H, D]
            scores = torch.einsum("hd,nhd->hn", q[t].double(), k) * q.shape[2] ** -0.5
            weights = scores.masked_fill(~seen.to(scores.device), -torch.inf).softmax(-1).nan_to_num(0.0)
            rows.append(torch.einsum("hn,nhd->hd", weights, v).to(q.dtype))
            t += 1
    return torch.stack(rows)


def check_trees(module, queries, lengths, splits, seed=0, **shape):
    """A chain has the bits of no tree at all; trees are dense attention under their mask."""
    case, keys, values = paged_case(queries, lengths, seed=seed, **shape)
    T, limits = sum(queries), (max(queries), splits)
    trees = some_trees(len(case[0]), seed)
    chain = module.attend_in_splits(*case, *limits, trees=torch.full_like(trees, -1))[:T]
    assert torch.equal(chain, module.attend_in_splits(*case, *limits)[:T])
    got = module.attend_in_splits(*case, *limits, trees=trees)[:T]
    close(got, attend_to_trees(case[0], keys, values, queries, lengths, trees))


def check_paged_prefill(module, queries, lengths, window=None, sinks=0, **shape):
    case, _, _ = paged_case(queries, lengths, window=window, sinks=sinks, **shape)
    expected = module.paged_attention_reference(*case, window, sinks)[: sum(queries)]
    got = module.paged_prefill(*case, max(queries), window, sinks)
    assert expected.isfinite().all()
    close(got[: sum(queries)], expected)


def check_far_pages(run, reference, S=16, G=16, D=64):
    """Pages beyond 2**31 elements. Room before the cache takes the reads of a kernel that counts in 32 bits."""
    P = 2**31 // (S * G * D) + 3
    cache = far_cache(2 * P, S, G, D)[P:]
    cache[-3:] = randn(3, S, G, D, dtype=torch.float16)
    pages = torch.tensor([[P - 1, P - 3]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([S + 5], dtype=torch.int32, device=DEVICE)
    case = randn(3, G, D, dtype=torch.float16), cache, cache, pages, starts([3]), lengths
    close(run(*case), reference(*case))


def far_cache(*shape):
    try:
        return torch.empty(shape, dtype=torch.float16, device=DEVICE)  # 8.6 GB; only what is touched is real
    except RuntimeError as error:
        pytest.skip(f"no room for the test: {error}")


# ---------------------------------------------------------------- pack
def pack_case(queries, computed, N=7, C=40, S=4, extra=3, far=False, seed=0):
    """Arguments of pack: seats shuffled, tables wider than they look, poison where nobody should read."""
    gen = torch.Generator().manual_seed(seed)
    M, high = C // S, 2**31 - 1 if far else 1000
    tokens = torch.randint(1, 50_000, (N, C + 5), generator=gen, dtype=torch.int32).to(DEVICE)[:, :C]
    pages = torch.randint(high - 900, high, (N, M + 2), generator=gen, dtype=torch.int32).to(DEVICE)[:, :M]
    seats = torch.randperm(N, generator=gen)[: len(queries)].int().to(DEVICE)
    computed = torch.tensor(computed, dtype=torch.int32, device=DEVICE)
    return (
        moat_int(seats),
        moat_int(starts(queries)),
        moat_int(computed),
        tokens,
        pages,
        S,
        sum(queries) + extra,
    )


def check_pack(module, queries, computed, **shape):
    case = pack_case(queries, computed, **shape)
    for got, expected in zip(module.pack(*case), module.pack_reference(*case), strict=True):
        assert torch.equal(got, expected)


# ---------------------------------------------------------------- kv_write
def check_kv_write_to_pages(module, S=4, G=2, D=24, dtype=torch.float32):
    """Slots of scattered pages, one token nowhere; every other slot keeps its NaN."""
    T, P = 5, 6
    k, v = (randn(T, G, D, dtype=dtype, seed=i) for i in (0, 1))
    caches = [moat(torch.full((P, S, G, D), NAN, dtype=dtype, device=DEVICE)) for _ in (0, 1)]
    where = [(4, 3), (1, 0), None, (1, 1), (0, 2)]  # (page, slot) of each token
    slots = torch.tensor([-1 if w is None else w[0] * S + w[1] for w in where], device=DEVICE)
    module.kv_write(k, v, *(cache.flatten(0, 1) for cache in caches), slots)
    for x, cache in zip((k, v), caches):
        expected = torch.full_like(cache, NAN)
        for t, w in enumerate(where):
            if w is not None:
                expected[w] = x[t]
        torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
