"""Both attention kernels equal their definitions: every head layout, every boundary, no stray read."""

import kernel_checks as checks
import pytest
import torch
from kernel_checks import DEVICE, DTYPES, decode_case, needs_kernel, prefill_case, randn, starts

from minserve.kernels import INTERPRETED, rms_norm, rope, silu_mul
from minserve.kernels import decode_attention as decode
from minserve.kernels import prefill_attention as prefill

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HEADS = [(6, 2, 64), (4, 4, 128), (4, 1, 96), (9, 3, 80), (9, 3, 24)]  # (H, G, D)


@needs_kernel
@dtypes
@pytest.mark.parametrize("H, G, D", HEADS)
def test_prefill_heads(H, G, D, dtype):
    checks.check_prefill(prefill, [5, 0, 33], [5, 3, 70], H, G, D, dtype)


@needs_kernel
@dtypes
@pytest.mark.parametrize("seed, queries, keys", [
    (0, [1], [1]), (1, [31, 1, 32], [31, 32, 33]), (2, [2], [5]), (3, [33, 64], [64, 65]),
    (4, [5, 2], [3, 0]),
    (5, [1, 1], [63, 129]), (6, [150], [150]), (7, [0, 3], [4, 3]),
])  # fmt: skip
def test_prefill_lengths(seed, queries, keys, dtype):
    checks.check_prefill(prefill, queries, keys, dtype=dtype, seed=seed)


@needs_kernel
@dtypes
@pytest.mark.parametrize(
    "window, sinks", [(1, 0), (4, 0), (4, 2), (32, 0), (33, 3), (70, 0), (71, 1), (7, 40)]
)
def test_prefill_window(window, sinks, dtype):
    checks.check_prefill(prefill, [40], [140], window=window, sinks=sinks, dtype=dtype)
    checks.check_prefill(prefill, [3, 4, 5, 40], [3, 4, 9, 70], window=window, sinks=sinks, dtype=dtype)


@needs_kernel
def test_prefill_of_large_scores_does_not_overflow():
    checks.check_prefill(prefill, [40], [70], size=40.0)


@needs_kernel
@dtypes
@pytest.mark.parametrize("H, G, D", HEADS)
def test_decode_heads(H, G, D, dtype):
    checks.check_decode(decode, [5, 0, 70], H, G, D, dtype)


@needs_kernel
@dtypes
@pytest.mark.parametrize("splits", [None, 1, 2, 7, 20])
@pytest.mark.parametrize("lengths", [[1], [31, 32, 33], [63, 64, 65, 0], [640, 3]], ids=str)
def test_decode_lengths_and_splits(lengths, splits, dtype):
    checks.check_decode(decode, lengths, dtype=dtype, splits=splits, seed=len(lengths))


@needs_kernel
def test_decode_of_large_scores_does_not_overflow():
    for splits in (1, 3):
        checks.check_decode(decode, [100, 40], size=40.0, splits=splits)


@needs_kernel
def test_decode_reads_a_layer_of_a_bigger_cache():
    q, k, v, lengths = decode_case([5, 9], 6, 2, 32)
    both = torch.stack((k, v), dim=2).nan_to_num(0.0)  # [B, S, 2, G, D]: strided slots
    got = decode.decode_attention(q, both[:, :, 0], both[:, :, 1], lengths, 9)
    checks.close(got, decode.decode_attention_reference(q, k, v, lengths, 9))


@needs_kernel
def test_offsets_beyond_two_to_the_31():
    """The last tokens of a cache of 2**31 elements and more; untouched memory costs nothing."""
    N, G, D = 2**21 + 5, 16, 64
    try:
        k = torch.empty(N, G, D, dtype=torch.float16, device=DEVICE)  # 4.3 GB, of which one page is touched
    except RuntimeError as error:
        pytest.skip(f"no room for the test: {error}")
    k[-5:] = randn(5, G, D, dtype=torch.float16)
    q, sq = randn(3, G, D, dtype=torch.float16), starts([3])
    sk = torch.tensor([N - 5, N], dtype=torch.int32, device=DEVICE)
    got = prefill.prefill_attention(q, k, k, sq, sk, 3)
    checks.close(got, prefill.prefill_attention_reference(q, k, k, sq, sk, 3))


@pytest.mark.skipif(not INTERPRETED, reason="the order of programs can only be chosen in the interpreter")
def test_no_program_depends_on_another(monkeypatch):
    """The interpreter runs programs one after another and hides races: run them backwards, same bits."""
    from triton.runtime.interpreter import interpreter_builder

    p, d = prefill_case([40, 7], [70, 7], 6, 2, 32), decode_case([100, 40], 6, 2, 32)
    x, q, k, angle = randn(3, 64), randn(3, 6, 8), randn(3, 2, 8), randn(3, 4)

    def everything():
        return [
            prefill.prefill_attention(*p), decode.attend_in_splits(*d, 3), rms_norm.rms_norm(x, x[0], 1e-5),
            *rms_norm.add_rms_norm(x, x, x[0], 1e-5), *rope.rope(q, k, angle, angle), silu_mul.silu_mul(x, x),
        ]  # fmt: skip

    forwards, place, seen = everything(), interpreter_builder.set_grid_idx, []

    def backwards(*index):
        seen.append(index)
        place(*(size - 1 - i for i, size in zip(index, interpreter_builder.grid_dim)))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)
    for a, b in zip(forwards, everything(), strict=True):
        assert torch.equal(a, b)
    assert len(set(seen)) > 3


# ---------------------------------------------------------------- the split rule
@pytest.mark.parametrize("programs, tiles, processors, splits", [
    (8, 512, 132, 15),       # one Llama-3.1-8B sequence of 32k on an H200: 120 of 132 processors busy
    (256, 64, 132, 1),       # 32 sequences: the GPU is full without splitting
    (106, 64, 132, 1),       # 80 % full counts as full
    (1, 4, 132, 1),          # four tiles are not worth a merge
    (1, 5, 132, 5), (1, 1000, 132, 109), (0, 0, 132, 1),
])  # fmt: skip
def test_split_rule(programs, tiles, processors, splits):
    assert decode.splits_for(programs, tiles, processors) == splits


# ---------------------------------------------------------------- bad input, on every road
def test_refusals_say_what_to_change():
    q, k, v, sq, sk, most = prefill_case([2, 3], [4, 3], 6, 2, 8)
    run = prefill.prefill_attention
    cache, lengths = randn(2, 9, 2, 8), torch.tensor([9, 4], dtype=torch.int32, device=DEVICE)
    one, step = randn(2, 6, 8), decode.decode_attention
    cases = [
        (lambda: run(randn(5, 5, 8), k, v, sq, sk, most), r"5 query heads cannot share 2 .*5 = 2 x 2 \+ 1"),
        (lambda: run(q, k.half(), v, sq, sk, most), "k is torch.float16"),
        (lambda: run(q, k, randn(6, 2, 8), sq, sk, most), "must be equal"),
        (
            lambda: run(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, sq, sk, most),
            r"q.contiguous\(\)",
        ),
        (lambda: run(q, k, v, sq, sk[:2], most), r"starts_q \[3\] and starts_k \[2\]"),
        (lambda: run(q, k, v, sq.long(), sk, most), "starts_q is torch.int64"),
        (lambda: run(q, k, v, sq, sk, most, window=0), "window of 0"),
        (lambda: run(q, k, v, sq, sk, most, sinks=2), "2 sinks with window None"),
        (lambda: step(randn(2, 5, 8), cache, cache, lengths, 9), "5 query heads"),
        (lambda: step(one, cache, cache, lengths, 10), "max_length 10 is more than the 9 slots"),
        (lambda: step(one, cache, cache, lengths.long(), 9), "torch.int64"),
        (lambda: step(randn(3, 6, 8), cache, cache, lengths, 9), "with the 3 sequences"),
    ]
    if DEVICE == "cpu":  # on a GPU these would cost a wait on every call
        cases += [
            (
                lambda: run(q, k, v, starts([2, 4]), sk, 4),
                r"starts_q \[0, 2, 6\] must rise from 0 to at most 5",
            ),
            (lambda: run(q, k, v, sq, sk, 2), "3 queries, more than max_queries = 2"),
            (
                lambda: step(one, cache, cache, lengths, 5),
                "from 4 to 9 do not lie between 0 and max_length 5",
            ),
        ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
