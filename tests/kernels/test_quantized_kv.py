"""Quantized keys and values: rounding by hand, kernels against definitions, and a page that is sealed or not."""

import math
from itertools import cycle, product

import kernel_checks as checks
import numpy as np
import pytest
import quantized_checks as quantized
import torch
from kernel_checks import DEVICE, DTYPES, NAN, needs_kernel, randn, starts
from quantized_checks import KINDS, quantized_case
from test_definitions import sdpa
from test_mutations import load, source_of

from minserve.kernels import INTERPRETED, architecture, kv_quantize, quantized_attention, quantized_prefill

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
slow = pytest.mark.slow
unwritten = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is merged from parts nobody wrote
HEADS = [(6, 2, 64, 8), (4, 1, 16, 16), (4, 4, 128, 32), (6, 3, 80, 64)]  # (H, G, D, S)
# an interpreter has every dtype and every head, a GPU every pair
HEADS_BY_DTYPE = list(product(HEADS, DTYPES) if DEVICE == "cuda" else zip(HEADS, cycle(DTYPES)))
if DEVICE == "cuda" and architecture(torch.device("cuda", 0)) in ("sm_75", "sm_80", "sm_86", "sm_87"):
    del KINDS["fp8"]  # refused there, as the last test says
eight = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int4"])
two = pytest.mark.parametrize(
    "kind", ["int8", "int4"]
)  # fp8 is int8 but for the conversion, which is the same everywhere
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "fp8" else kind for kind in KINDS]
)


# ---------------------------------------------------------------- the definitions, by hand
def rows_in_eight_bits(module):
    x = quantized.rows_of_all_kinds(6, 2, 24).flatten(0, 1)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()
    for dtype, most in ((torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)):
        q, scale = module.quantize_rows(x.to(DEVICE), dtype)
        back = module.dequantize_rows(q, scale)
        for i, row in enumerate(x.tolist()):
            if any(map(math.isnan, row)):
                assert scale[i].isnan() and back[i].isnan().all()
                continue
            size = float(np.float32(max(map(abs, row))) / np.float32(most))
            assert scale[i] == size
            for j, value in enumerate(row):
                exact = 0.0 if size == 0 else float(np.float32(value) / np.float32(size))
                if dtype is torch.int8:
                    expected = round(exact)  # Python rounds ties to even
                else:
                    finite = [i for i in range(256) if i % 128 != 127]  # of two at one distance the even code
                    expected = codes[min(finite, key=lambda i: (abs(codes[i] - exact), i % 2))]
                assert float(q[i, j]) == expected
                assert float(back[i, j]) == pytest.approx(expected * size, rel=1e-6)


def rows_in_four_bits(module, S=4, G=2, D=8):
    k, v = (randn(3 * S, G, D, seed=i) for i in (0, 1))
    k[S : 2 * S, 0, 1], v[S, 0], v[S + 1, 1] = 100.0, 0.0, 1e5  # fp16 ends at 65504
    sealed = quantized.empty_pages(5, S, G, D)
    pages = torch.tensor([3, -1, 2], device=DEVICE)
    module.seal_reference(k, v, torch.tensor([S, 0, 1], device=DEVICE), pages, *sealed)
    for page, begin in ((3, S), (2, 1)):
        slots = page * S + torch.arange(S, device=DEVICE)
        keys, values = module.read_keys(*sealed[::2], slots), module.read_values(*sealed[1::2], slots)
        for s in range(S):
            for g in range(G):
                for d in range(D):
                    channel, row = k[begin : begin + S, g, d].tolist(), v[begin + s, g].tolist()
                    assert float(keys[s, g, d]) == pytest.approx(
                        level(channel, channel[s]), rel=1e-6, abs=1e-6
                    )
                    assert float(values[s, g, d]) == pytest.approx(level(row, row[d]), rel=1e-6, abs=1e-6)
    k4, v4, k_affine, v_affine = sealed
    assert k_affine[4].isnan().all() and v_affine[0].isnan().all() and (k4[1] == 255).all()
    least, largest = (int(x) for x in (k[1 : 1 + S, 0, 0].argmin(), k[1 : 1 + S, 0, D // 2].argmax()))
    assert k4[2, least, 0, 0] & 15 == 0 and k4[2, largest, 0, 0] >> 4 == 15  # channels 0 and D/2 share a byte


def level(among, x):
    """What 4 bits make of x: 16 levels from the least to the largest, as fp16 holds the ends."""
    low, high = (np.float32(f(among)) for f in (min, max))
    top = np.float32(65504)
    scale, minimum = (
        np.float32(np.float16(min(y, top))) for y in (np.float32((high - low) / np.float32(15)), low)
    )
    n = 0 if scale == 0 else round(min(15.0, max(0.0, float((np.float32(x) - minimum) / scale))))
    return float(minimum + np.float32(n) * scale)


def attention_is_sdpa(module, kind, window, sinks, S=4):
    """Numbers read out one by one, and PyTorch's attention for one query at a time."""
    queries, lengths, D = [2, 6, 0, 4, 1, 9], [5, 6, 3, 21, 4, 9], 16
    q, cache, fresh, plan = quantized_case(kind, queries, lengths, D=D, S=S, window=window, sinks=sinks)
    got = quantized.definition(module, kind)(q, *cache, *fresh, *plan, window, sinks)
    pages, at, _ = (x.tolist() for x in plan)
    for b, (n, m) in enumerate(zip(queries, lengths)):
        first = m - n
        for p in range(first, m):
            seen = [j for j in range(p + 1) if window is None or j > p - window or j < sinks]
            k, v = (
                torch.stack(x)
                for x in zip(*(number(kind, cache, fresh, pages[b], b, first, p, j, S) for j in seen))
            )
            mask = torch.ones(1, len(seen), dtype=torch.bool, device=DEVICE)
            row = at[b] + p - first
            expected = sdpa(q[row : row + 1], k, v, mask)
            torch.testing.assert_close(got[row : row + 1], expected, rtol=1e-5, atol=1e-5)


def number(kind, cache, fresh, table, b, first, p, j, S):
    """(key, value) [G, D] at position j, for the query at position p."""
    if kind == "int4" and j // S == p // S:
        place = int(fresh[2][b]) + j - first // S * S
        return fresh[0][place].float(), fresh[1][place].float()
    page, s = table[j // S], j % S
    if kind != "int4":
        k, v, k_scales, v_scales = (x[page, s].float() for x in cache)
        return k * k_scales[:, None], v * v_scales[:, None]
    k4, v4, k_affine, v_affine = (x[page] for x in cache)
    k, v = (torch.cat((x[s] % 16, x[s] // 16), -1).float() for x in (k4, v4))
    return k * k_affine[0].float() + k_affine[1].float(), v * v_affine[s, :, :1].float() + v_affine[
        s, :, 1:
    ].float()


def test_eight_bits_by_hand():
    rows_in_eight_bits(kv_quantize)


def test_four_bits_by_hand():
    rows_in_four_bits(kv_quantize)


@kinds
@pytest.mark.parametrize("window, sinks", [(None, 0), (4, 0), (5, 2), (1, 1), (300, 7)])
def test_the_definition_is_sdpa(kind, window, sinks):
    attention_is_sdpa(quantized_attention, kind, window, sinks)


@pytest.mark.parametrize(
    "dtype, value, most", [(torch.int8, 100.0, 127), (torch.float8_e4m3fn, 500.0, 448)], ids=str
)
def test_rows_at_the_edge_of_the_range(dtype, value, most):
    rows = torch.tensor(
        [[0.0] * 4, [value] * 4, [0, 0, 0, 1e4], [-0.0] * 4, [-value, value, 0, 0]], device=DEVICE
    )
    q, scale = kv_quantize.quantize_rows(rows, dtype)
    assert q.float().abs().max() == most and scale.isfinite().all() and scale.dtype is torch.float32
    torch.testing.assert_close(kv_quantize.dequantize_rows(q, scale), rows, rtol=1e-6, atol=0)
    tiny = torch.full((1, 4), 1.5e-45, device=DEVICE)  # its scale underflows
    assert kv_quantize.dequantize_rows(*kv_quantize.quantize_rows(tiny, dtype)).isfinite().all()


def test_an_error_is_at_most_half_a_step():
    x = randn(40, 2, 64)
    q, scale = kv_quantize.quantize_rows(x)
    assert ((kv_quantize.dequantize_rows(q, scale) - x).abs() <= scale[..., None] / 2 * (1 + 1e-5)).all()
    sealed, zero = quantized.empty_pages(1, 32, 2, 64), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    kv_quantize.seal_reference(x, x, zero, zero, *sealed)
    slots = torch.arange(32, device=DEVICE)
    keys, values = kv_quantize.read_keys(*sealed[::2], slots), kv_quantize.read_values(*sealed[1::2], slots)
    for back, steps in ((keys, sealed[2][0, 0].float()), (values, sealed[3][0, ..., :1].float())):
        assert (
            (back - x[:32]).abs() <= steps / 2 + 0.01
        ).all()  # the ends of the range move as fp16 rounds them


def test_the_reader_of_eight_bits():
    k = randn(3, 2, 8)
    cache, scales = torch.zeros(9, 2, 8, dtype=torch.int8, device=DEVICE), torch.zeros(9, 2, device=DEVICE)
    slots = torch.tensor([7, -1, 2], device=DEVICE)
    kv_quantize.kv_write_scaled(k, k, cache, cache.clone(), scales, scales.clone(), slots)
    back = kv_quantize.read_scaled(cache, scales, torch.tensor([[2, 7]], device=DEVICE))
    torch.testing.assert_close(back[0], k[[2, 0]], rtol=0, atol=0.02)
    assert not cache[[0, 1, 3, 4, 5, 6, 8]].any()


WRONG = [
    ("kv_quantize", "amax(-1) / LARGEST[dtype]", "amax() / LARGEST[dtype]", rows_in_eight_bits),
    ("kv_quantize", "q.round() if", "q.trunc() if", rows_in_eight_bits),
    ("kv_quantize", "(scale > 0) & scale.isfinite()", "scale.isfinite()", rows_in_eight_bits),
    ("kv_quantize", "q.float() * scale[..., None]", "q.float() * scale.flip(0)[..., None]", rows_in_eight_bits),
    ("kv_quantize", "/ 15, low)", "/ 16, low)", rows_in_four_bits),
    ("kv_quantize", "n.clamp(0, 15).round()", "n.clamp(0, 15)", rows_in_four_bits),
    ("kv_quantize", "x - minimum.float()", "x", rows_in_four_bits),
    ("kv_quantize", "low | high << 4", "high | low << 4", rows_in_four_bits),
    ("kv_quantize", "quantize_range(fresh_k[tokens], 1)", "quantize_range(fresh_k[tokens - 1], 1)", rows_in_four_bits),
    ("kv_quantize", "starts[live][:, None]", "starts[: len(page)][:, None]", rows_in_four_bits),
    ("kv_quantize", ".clamp(-HALF_MAX, HALF_MAX)", "", rows_in_four_bits),
    ("quantized_attention", "v_scales))", "k_scales))", "int8"),
    ("quantized_attention", "s[near])", "s[near].roll(1, -1))", "int8"),
    ("quantized_attention", "pages[b, old // S]", "pages[0, old // S]", "int4"),
    ("quantized_attention", "j[seen & (j >= begin)]", "j[seen & (j >= p)]", "int4"),
    ("quantized_attention", "max(first, 0) // S * S", "0", "int4"),
    ("quantized_attention", "range(own, n if", "range(own, own + S if", "int4"),
    ("quantized_attention", "(j > p - window)", "(j > p - window + 1)", "int4"),
]  # fmt: skip


@pytest.mark.parametrize("name, right, wrong, check", WRONG, ids=[f"{w[0]}: {w[2]}" for w in WRONG])
def test_a_wrong_definition_is_rejected(name, right, wrong, check, tmp_path):
    source = source_of(name)
    assert source.count(right) == 1, f"{right!r} occurs {source.count(right)} times in {name}.py"
    module = load(name, source.replace(right, wrong), tmp_path)
    with pytest.raises((AssertionError, IndexError)):  # IndexError: a page that does not exist
        attention_is_sdpa(module, check, 5, 2) if isinstance(check, str) else check(module)


# ---------------------------------------------------------------- writing
@needs_kernel
@dtypes
@eight
@pytest.mark.parametrize("G, D", [(2, 24), (3, 80), (1, 16), (8, 128)])
def test_kv_write_scaled(G, D, kind, dtype):
    quantized.check_write(kv_quantize, kind, G=G, D=D, dtype=dtype)


@needs_kernel
@dtypes
@pytest.mark.parametrize("S, G, D", [(8, 2, 64), (16, 1, 16), (32, 3, 80), (64, 2, 128), (1, 2, 24)])
def test_seal(S, G, D, dtype):
    quantized.check_seal(kv_quantize, S, G, D, dtype, seed=S)
    quantized.check_seal(kv_quantize, S, G, D, dtype)


def test_nothing_to_write():
    cache, scales = torch.zeros(4, 2, 8, dtype=torch.int8, device=DEVICE), torch.zeros(4, 2, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    kv_quantize.kv_write_scaled(randn(0, 2, 8), randn(0, 2, 8), cache, cache, scales, scales, none)
    kv_quantize.seal(randn(5, 2, 8), randn(5, 2, 8), none, none, *quantized.empty_pages(1, 4, 2, 8))
    assert not cache.any()


# ---------------------------------------------------------------- decode
def dtype_for(S: int):
    """All of them in turn."""
    return DTYPES[S.bit_length() % len(DTYPES)]


def one_each(kind, queries):
    return [min(n, 1) for n in queries] if kind == "int4" else queries


@needs_kernel
@unwritten
@kinds
@pytest.mark.parametrize("heads, dtype", HEADS_BY_DTYPE, ids=str)
def test_decode_heads(heads, dtype, kind):
    (H, G, D, S), queries = heads, one_each(kind, [1, 0, 1, 3])
    quantized.check_decode(
        quantized_attention, kind, queries, [5, 9, 70, 33], H=H, G=G, D=D, S=S, dtype=dtype
    )


@needs_kernel
@unwritten
@two
@pytest.mark.parametrize("S, splits", [(8, None), (32, 3), (64, 1), pytest.param(16, 5, marks=slow)])
def test_decode_at_page_boundaries(S, splits, kind):
    lengths, its = [1, 2 * S - 1, 2 * S, 2 * S + 1, 0], dict(D=24, S=S, splits=splits, seed=S)
    quantized.check_decode(quantized_attention, kind, [1] * 5, lengths, dtype=dtype_for(S), **its)


@needs_kernel
@unwritten
@eight
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_of_several_queries(splits, kind):
    quantized.check_decode(quantized_attention, kind, [16, 1], [16, 70], splits=splits)
    quantized.check_decode(
        quantized_attention, kind, [7, 4], [40, 64], splits=splits, S=8, dtype=torch.float16
    )


@needs_kernel
@unwritten
@eight
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_of_trees(splits, kind):
    """Tiles that every tree sees in full are read without a mask: these rows have some of them, and none."""
    quantized.check_trees(quantized_attention, [1, 5, 3], [63, 300, 7], splits, kind, S=8)


WINDOWS = [(1, 0), (17, 33), pytest.param(16, 0, marks=slow), pytest.param(70, 1, marks=slow)]


@needs_kernel
@unwritten
@two
@pytest.mark.parametrize("window, sinks", WINDOWS)
def test_decode_window(window, sinks, kind):
    masks = dict(window=window, sinks=sinks)
    quantized.check_decode(quantized_attention, kind, [1, 1, 1], [140, window, window + 1], splits=3, **masks)
    quantized.check_decode(
        quantized_attention, kind, [1, 1], [120, 40], S=8, splits=1, dtype=torch.float16, **masks
    )


@needs_kernel
@unwritten
@two
def test_large_scores_and_more_splits_than_one_tile_of_them(kind):
    quantized.check_decode(quantized_attention, kind, [1, 1], [400, 340], splits=20, size=20.0, D=16)
    quantized.check_prefill(quantized_prefill, kind, [40], [70], size=20.0)


@needs_kernel
@unwritten
@kinds
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_that_pad_a_graph_read_nothing_and_get_zeros(splits, kind):
    """One query each, of which nothing is known, no length, and tables full of pages that do not exist."""
    q, cache, fresh, plan = quantized_case(kind, [1, 1, 1, 1], [33, 0, 9, 0], S=8)
    q[1], q[3] = NAN, NAN
    limits = 1, 33, None, 0
    got = quantized_attention.attend_in_splits(q, cache, fresh or (None,) * 3, plan, *limits, splits)
    assert torch.equal(got[1:4:2], torch.zeros_like(got[1:4:2]))
    q[1], q[3] = 0, 0
    checks.close(got[:4], quantized.definition(quantized_attention, kind)(q, *cache, *fresh, *plan)[:4])


@needs_kernel
def test_slots_beyond_two_to_the_31():
    quantized.check_far_slots(quantized_attention)


# ---------------------------------------------------------------- chunks
@needs_kernel
@kinds
@pytest.mark.parametrize("heads, dtype", HEADS_BY_DTYPE, ids=str)
def test_prefill_heads(heads, dtype, kind):
    (H, G, D, S), queries, lengths = heads, [5, 0, 33, 1], [5, 3, 70, 40]
    quantized.check_prefill(quantized_prefill, kind, queries, lengths, H=H, G=G, D=D, S=S, dtype=dtype)


@needs_kernel
@two
@pytest.mark.parametrize("S", [8, 32, 64, pytest.param(16, marks=slow)])
def test_prefill_at_page_boundaries(S, kind):
    queries, lengths = [1, 1, S // 2, min(S, 20), 1], [1, 2 * S - 1, 2 * S, 2 * S + 1, 0]
    quantized.check_prefill(quantized_prefill, kind, queries, lengths, D=24, S=S, dtype=dtype_for(S), seed=S)


@needs_kernel
@two
@pytest.mark.parametrize("window, sinks", WINDOWS)
def test_prefill_window(window, sinks, kind):
    masks = dict(window=window, sinks=sinks)
    quantized.check_prefill(quantized_prefill, kind, [40], [140], **masks)
    quantized.check_prefill(
        quantized_prefill, kind, [3, 1, 20], [3, window + 1, 50], S=8, dtype=torch.float16, **masks
    )


@needs_kernel
@kinds
def test_more_queries_than_positions_and_none_at_all(kind):
    quantized.check_prefill(quantized_prefill, kind, [5, 2], [3, 0])
    q, cache, fresh, plan = quantized_case(kind, [0, 0], [3, 5])
    run = quantized_prefill.int4_prefill if kind == "int4" else quantized_prefill.scaled_prefill
    assert run(q, *cache, *fresh, *plan, 0).shape == q.shape


# ---------------------------------------------------------------- what a query sees does not depend on the chunks
@pytest.mark.parametrize("kernel", [pytest.param(True, marks=needs_kernel), False])
@pytest.mark.parametrize("masks", [dict(), dict(window=11, sinks=3)], ids=str)
@pytest.mark.parametrize(
    "S, cuts",
    [(8, (29,)), (8, (8, 8, 13)), (8, (1, 6, 9, 1, 12))]
    + [pytest.param(S, cuts, marks=slow) for S, cuts in ((4, (8, 8, 13)), (16, (1, 6, 9, 1, 12)))],
    ids=str,
)
def test_chunks_equal_one_shot(S, cuts, masks, kernel):
    """A prompt cut anyhow, pages sealed as they fill, and then one token at a time: the same numbers."""
    n, G, D = 29, 2, 16
    k, v, q = randn(n, G, D), randn(n, G, D, seed=1), randn(n, 6, D, seed=2)
    home = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    table = torch.tensor([[6, 1, 9, 3, 2, 8, 5, 4]], dtype=torch.int32, device=DEVICE)
    sealed, done, got = quantized.empty_pages(10, S, G, D), 0, []
    for cut in cuts:
        first, end = done // S * S, done + cut
        fresh = k[first:end].contiguous(), v[first:end].contiguous()
        full = torch.arange(done // S, end // S, device=DEVICE)  # pages that end in this chunk
        kv_quantize.seal(*fresh, full * S - first, table[0, full], *sealed)
        plan = table, starts([cut]), starts([end])[1:]
        if not kernel:
            out = quantized_attention.int4_attention_reference(
                q[done:end], *sealed, *fresh, home, *plan, **masks
            )
        elif cut == 1:
            out = quantized_attention.int4_decode(q[done:end], *sealed, *fresh, home, *plan, 1, end, **masks)
        else:
            out = quantized_prefill.int4_prefill(q[done:end], *sealed, *fresh, home, *plan, cut, **masks)
        got.append(out)
        done = end
    plan = table, starts([n]), starts([n])[1:]
    whole = quantized_attention.int4_attention_reference(q, *sealed, k, v, home, *plan, **masks)
    checks.close(torch.cat(got), whole)


@needs_kernel
@kinds
def test_rows_permuted_give_answers_permuted(kind):
    queries, lengths, order = [3, 1, 5, 2], [40, 70, 5, 33], [2, 0, 3, 1]
    q, cache, fresh, (pages, at, length) = quantized_case(kind, queries, lengths)
    places = [p for b in order for p in range(int(at[b]), int(at[b + 1]))]
    run = quantized_prefill.int4_prefill if kind == "int4" else quantized_prefill.scaled_prefill
    before = run(q, *cache, *fresh, pages, at, length, 5)
    if fresh:
        fresh = *fresh[:2], fresh[2][order]
    moved = pages[order], starts([queries[b] for b in order]), length[order]
    assert torch.equal(run(q[places], *cache, *fresh, *moved, 5), before[places])


@pytest.mark.skipif(not INTERPRETED, reason="the order of programs can only be chosen in the interpreter")
def test_no_program_depends_on_another(monkeypatch):
    """The interpreter runs programs one after another and hides races: run them backwards, same bits."""
    from triton.runtime.interpreter import interpreter_builder

    eight, four = quantized_case("int8", [3, 8], [40, 20]), quantized_case("int4", [3, 8], [40, 20])

    def everything():
        k, pages = randn(40, 2, 32), quantized.empty_pages(4, 8, 2, 32, fill=7)
        at = torch.tensor([0, 8, 30])
        kv_quantize.seal(k, k, at, torch.tensor([3, 0, 1]), *pages)
        return [
            quantized_prefill.scaled_prefill(eight[0], *eight[1], *eight[3], 8)[:11], *pages,
            quantized_prefill.int4_prefill(four[0], *four[1], *four[2], *four[3], 8)[:11],
        ]  # fmt: skip

    forwards, place, seen = everything(), interpreter_builder.set_grid_idx, []

    def backwards(*index):
        seen.append(index)
        place(*(size - 1 - i for i, size in zip(index, interpreter_builder.grid_dim)))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)
    for a, b in zip(forwards, everything(), strict=True):
        assert torch.equal(a, b)
    assert len(set(seen)) > 3


# ---------------------------------------------------------------- refusals
def test_refusals_say_what_to_change(monkeypatch):
    q, cache, _, plan = quantized_case("int8", [3, 1], [30, 9], D=8)
    q4, sealed, fresh, _ = quantized_case("int4", [3, 1], [30, 9], D=8)
    k, slots = randn(3, 2, 8), torch.tensor([0, 1, 2], device=DEVICE)
    flat = [x.flatten(0, 1) for x in cache]
    write, seal = kv_quantize.kv_write_scaled, kv_quantize.seal
    step, chunk = quantized_attention.scaled_decode, quantized_prefill.int4_prefill
    fresh_k, fresh_v, home = fresh
    k4, v4, ka, va = sealed
    at, page = torch.tensor([0], device=DEVICE), torch.tensor([1], device=DEVICE)
    cases = [
        (lambda: write(k, k, flat[0].half(), flat[1].half(), *flat[2:], slots), "float16; 8 bits are torch.int8"),
        (lambda: write(k, k, *flat[:2], flat[2].half(), flat[3], slots), r"the\s+scales torch.float32"),
        (lambda: write(k, k[:, :1], *flat, slots), "cannot go into caches"),
        (lambda: write(k, k, *flat, slots.int()), "3 tokens need .* torch.int64"),
        (lambda: step(q, *cache, *plan, 17, 30), "at most 16; use scaled_prefill"),
        (lambda: step(q[:, :5], *cache, *plan, 3, 30), "5 query heads cannot share 2"),
        (lambda: step(q, cache[0][..., ::2], *cache[1:], *plan, 3, 30), "must be contiguous"),
        (lambda: quantized_attention.int4_decode(q4, *sealed, *fresh, *plan, 3, 30), "3 queries.*use int4_prefill"),
        (lambda: chunk(q4, k4[..., :3], v4, ka, va, *fresh, *plan, 3), r"k4 is .* must be \[6, 16, 2, 4\]"),
        (lambda: chunk(q4, k4, v4, ka.float(), va, *fresh, *plan, 3), "k_affine is .* torch.float16"),
        (lambda: chunk(q4.half(), *sealed, *fresh, *plan, 3), "must agree on channels, type and device"),
        (lambda: chunk(q4, *sealed, fresh_k, fresh_v, home.int(), *plan, 3), r"home is .*\[2\] torch.int64"),
        (lambda: seal(fresh_k[..., :7].contiguous(), fresh_v, at, page, *sealed), "fresh_v is"),
        (lambda: seal(fresh_k, fresh_v, at, page.float(), *sealed), "pages is .*torch.int32 or torch.int64"),
        (lambda: seal(randn(9, 2, 7), randn(9, 2, 7), at, page, *quantized.empty_pages(2, 4, 2, 7)), "must be even"),
        (lambda: seal(randn(9, 2, 8), randn(9, 2, 8), at, page, *quantized.empty_pages(2, 3, 2, 8)), "power of two"),
    ]  # fmt: skip
    if DEVICE == "cpu":  # on a GPU these would cost a wait on every call
        cases += [
            (
                lambda: seal(fresh_k, fresh_v, at + 10**6, page, *sealed),
                "entry 0 puts tokens 1000000 to 1000015",
            ),
            (lambda: seal(fresh_k, fresh_v, at, page + 10, *sealed), "into page 11; .* 6 pages"),
            (lambda: step(q, *cache, *plan, 2, 30), "3 queries, more than max_queries = 2"),
        ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_fp8_is_refused_where_there_is_none(monkeypatch):
    from minserve.kernels import quantized_check

    q, cache, _, plan = quantized_case("fp8", [1], [9], D=16)
    monkeypatch.setattr(quantized_check, "architecture", lambda device: "sm_80")
    with pytest.raises(ValueError, match="sm_80 has no fp8 .*use int8"):
        quantized_attention.scaled_decode(q, *cache, *plan, 1, 9)
    monkeypatch.setattr(quantized_check, "architecture", lambda device: "sm_90")
    assert quantized_attention.scaled_decode(q, *cache, *plan, 1, 9).isfinite().any()
