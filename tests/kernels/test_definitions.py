"""The definitions, against code that is not ours: torch's SDPA, transformers' Llama, masks by hand."""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import decode_case, prefill_case, randn

from minserve import kernels
from minserve.kernels import decode_attention as decode
from minserve.kernels import kv_write, rms_norm, rope, rope_and_write, silu_mul, stream
from minserve.kernels import prefill_attention as prefill


def test_rms_norm_is_torchs():
    x, r, w = randn(3, 100), randn(3, 100, seed=1), randn(100, seed=2)
    torch.testing.assert_close(rms_norm.rms_norm_reference(x, w, 1e-2), F.rms_norm(x, (100,), w, 1e-2))
    normed, total = rms_norm.add_rms_norm_reference(x, r, w, 1e-2)
    torch.testing.assert_close(normed, F.rms_norm(x + r, (100,), w, 1e-2))
    assert torch.equal(total, x + r)


def test_rope_is_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = randn(4, 6, 16), randn(4, 2, 16, seed=1)
    angle = torch.arange(7, 11, device=q.device)[:, None] / 10000 ** (torch.arange(8, device=q.device) / 8)
    both = torch.cat((angle, angle), -1)[None]
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], both.cos(), both.sin())
    for got, x in zip(rope.rope_reference(q, k, angle.cos(), angle.sin()), expected, strict=True):
        torch.testing.assert_close(got, x[0].transpose(0, 1))


def test_silu_mul_and_stream():
    a, b = randn(3, 50) * 5, randn(3, 50, seed=1)
    torch.testing.assert_close(silu_mul.silu_mul_reference(a, b), a / (1 + (-a).exp()) * b)
    x = randn(20_000)
    torch.testing.assert_close(stream.total_reference(x).sum(), x.sum(), rtol=1e-4, atol=1e-2)
    assert len(stream.total_reference(x)) == 3


def test_kv_write_one_token_at_a_time():
    k, v, (a, b) = randn(3, 2, 4), randn(3, 2, 4, seed=1), randn(2, 6, 2, 4, seed=2)
    expected_a, expected_b = a.clone(), b.clone()
    for t, slot in ((0, 4), (2, 1)):
        expected_a[slot], expected_b[slot] = k[t], v[t]
    kv_write.kv_write_reference(k, v, a, b, torch.tensor([4, -1, 1], device=k.device))
    assert torch.equal(a, expected_a) and torch.equal(b, expected_b)


@pytest.mark.parametrize("norms", [False, True])
def test_rope_and_write_is_transformers(norms):
    """Qwen3's attention up to its cache: its own norm module, its own rotation, one token at a time into slots."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    (H, G, D), slots = (6, 2, 16), [4, -1, 1]
    q, k, v = randn(3, H, D), randn(3, G, D, seed=1), randn(3, G, D, seed=2)
    angle = torch.arange(9, device=q.device)[:, None] / 10000 ** (
        torch.arange(D // 2, device=q.device) / (D // 2)
    )
    weights = [randn(D, seed=3), randn(D, seed=4)] if norms else [None, None]
    caches = [torch.zeros(6, G, D, device=q.device) for _ in range(2)]
    positions = torch.tensor([8, 0, 3], device=q.device)
    got = rope_and_write.rope_and_write_reference(
        torch.cat([x.flatten(1) for x in (q, k, v)], 1), torch.cat((angle.cos(), angle.sin()), -1),
        positions, torch.tensor(slots, device=q.device), *caches, *weights, 1e-2,
    )  # fmt: skip
    if norms:
        for x, weight in ((q, weights[0]), (k, weights[1])):
            norm = Qwen3RMSNorm(D, eps=1e-2).to(q.device)
            norm.weight.data = weight
            x.copy_(norm(x).detach())
    both = torch.cat((angle, angle), -1)[None, positions]
    q, k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], both.cos(), both.sin())
    torch.testing.assert_close(got, q[0].transpose(0, 1))
    for cache, x in zip(caches, (k[0].transpose(0, 1), v), strict=True):
        expected = torch.zeros_like(cache)
        expected[4], expected[1] = x[0], x[2]
        torch.testing.assert_close(cache, expected)


def seen_by(queries, keys, window=None, sinks=0):
    """Which keys each query sees, in plain Python."""
    first = keys - queries
    return [
        [j <= p and (window is None or p - j < window or j < sinks) for j in range(keys)]
        for p in range(first, first + queries)
    ]


def test_masks_by_hand():
    assert seen_by(2, 5) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]  # bottom right, not top left
    assert seen_by(1, 5, window=4) == [[0, 1, 1, 1, 1]]  # 4 keys, itself included
    assert seen_by(1, 6, window=2, sinks=1) == [[1, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize("H, G", [(6, 2), (6, 3), (4, 4), (4, 1)])
@pytest.mark.parametrize("window, sinks", [(None, 0), (4, 0), (4, 2), (5, 0), (300, 0)])
@pytest.mark.parametrize("chunk", [prefill.CHUNK, 2])
def test_prefill_attention_is_sdpa(H, G, window, sinks, chunk, monkeypatch):
    monkeypatch.setattr(prefill, "CHUNK", chunk)
    queries, keys = [2, 5, 0, 4], [5, 5, 3, 9]
    q, k, v, sq, sk, _ = case = prefill_case(queries, keys, H, G, 16)
    got = prefill.prefill_attention_reference(*case, window=window, sinks=sinks)
    for b, (n, m) in enumerate(zip(queries, keys)):
        mask = torch.tensor(seen_by(n, m, window, sinks), device=q.device, dtype=torch.bool).view(n, m)
        rows, columns = slice(sq[b], sq[b + 1]), slice(sk[b], sk[b + 1])
        expected = sdpa(q[rows], k[columns], v[columns], mask)
        torch.testing.assert_close(got[rows], expected, rtol=1e-5, atol=1e-5)


def sdpa(q, k, v, mask):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize("H, G", [(6, 2), (6, 3), (4, 4), (4, 1)])
def test_decode_attention_is_sdpa(H, G):
    lengths = [5, 1, 0, 40]
    q, k, v, n = decode_case(lengths, H, G, 16)
    got = decode.decode_attention_reference(q, k, v, n, 40)
    for b, length in enumerate(lengths):
        mask = torch.ones(1, length, dtype=torch.bool, device=q.device)
        expected = (
            sdpa(q[b : b + 1], k[b, :length], v[b, :length], mask)
            if length
            else torch.zeros_like(got[b : b + 1])
        )
        torch.testing.assert_close(got[b : b + 1], expected, rtol=1e-5, atol=1e-5)


def test_a_query_before_its_first_key_sees_nothing():
    case = prefill_case([5], [3], 6, 2, 16)
    out = prefill.prefill_attention_reference(*case)
    assert not out[:2].any() and out[2:].abs().min() > 0


def test_the_package_runs_without_triton(tmp_path):
    """A Python in which triton cannot be imported still has every operation."""
    import os
    import subprocess
    import sys
    from pathlib import Path

    (tmp_path / "triton.py").write_text("raise ImportError('not here')\n")
    names = (
        "decode_attention kv_write pack paged_attention paged_prefill prefill_attention rms_norm rope".split()
    )
    names += "rope_and_write silu_mul stream".split()
    code = f"""
import torch
from minserve import kernels
from minserve.kernels import {", ".join(names)}
x = torch.ones(2, 8)
assert not kernels.HAS_TRITON and not kernels.INTERPRETED and not kernels.on_triton(x)
assert torch.equal(rms_norm.rms_norm(x, x[0], 0.0), x) and silu_mul.silu_mul(x, x).shape == (2, 8)
assert stream.total(x).tolist() == [16.0]
print("definitions")
"""
    path = os.pathsep.join((str(tmp_path), str(Path(kernels.__file__).parents[2])))
    environment = dict(os.environ, PYTHONPATH=path, TRITON_INTERPRET="1")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "definitions\n", done.stderr
