"""The cache changes what is recomputed, never what comes out: chunks, rings, sinks, rollback; and its arithmetic."""

import pytest
import torch

from minserve.config import SHAPES
from minserve.kv_cache import KVCache, bytes_per_token, cache_bytes, users_that_fit
from minserve.prefill_decode import attend_afresh, decode_step, prefill
from minserve.weights import load


def shape(name):
    c = SHAPES[name]
    return c.num_layers, c.num_kv_heads, c.head_dim


# ---------------------------------------------------------------- the arithmetic
@pytest.mark.parametrize(
    "model, expected",
    [
        ("llama-2-7b", 524_288),
        ("llama-3.1-8b", 131_072),
        ("llama-2-70b", 327_680),
        ("smollm2-135m", 23_040),
        ("qwen3-0.6b", 114_688),
    ],
)
def test_bytes_per_token(model, expected):
    assert bytes_per_token(*shape(model)) == expected


def test_llama_2_70b_with_other_head_sharing():
    layers, _, head_dim = shape("llama-2-70b")
    assert bytes_per_token(layers, 64, head_dim) == 2_621_440  # MHA: every query head keeps its own
    assert bytes_per_token(layers, 1, head_dim) == 40_960  # MQA: one for all 64


def test_one_request_and_how_many_fit():
    assert cache_bytes(32, 8, 128, 4096) == 4096 * 131_072 == 536_870_912
    per_token, weights = bytes_per_token(*shape("llama-2-70b")), 68_976_648_192 * 2
    assert users_that_fit(160 * 10**9, weights, per_token, 4096) == 16  # (160e9 - 137.95e9) / 1.342e9 = 16.4
    assert users_that_fit(80 * 10**9, weights, per_token, 4096) == 0  # the weights alone do not fit


def test_the_tensors_weigh_what_the_formula_says():
    config = SHAPES["smollm2-135m"]
    cache = KVCache(config, 100, torch.bfloat16)
    assert cache.nbytes == cache_bytes(*shape("smollm2-135m"), 100) == 2_304_000


def test_layout_is_the_documented_one():
    cache = KVCache(SHAPES["smollm2-135m"], 10)
    k, (s, g, d) = cache.k[0], (7, 2, 33)
    k[s, g, d] = 5.0
    assert k.flatten()[(s * 3 + g) * 64 + d] == 5.0 and k.shape == (10, 3, 64)


# ---------------------------------------------------------------- equal to no cache
def tokens(n, seed=0):
    return torch.randint(251, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def afresh(model, ids):
    return model(torch.tensor(ids), torch.arange(len(ids)), attend_afresh(model.config))


CHUNKS = [[5], [3, 2], [1, 4], [1] * 40, [40], [7, 1, 1, 8, 1, 22], [8, 8, 8, 16], [9, 31], [17, 1, 1, 21]]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("family", ["llama-3", "qwen2-window", "qwen3", "mistral"])
def test_any_chunks_equal_one_shot(checkpoints, family, chunks):
    """Windows of 8 and 16 against chunks below, at and beyond them: each chunk's last logits are the one-shot row's."""
    model = load(checkpoints(family))
    ids = tokens(sum(chunks))
    expected, cache, end = afresh(model, ids), KVCache(model.config, 64), 0
    for n in chunks:
        logits = prefill(model, ids[end : end + n], cache)
        end += n
        torch.testing.assert_close(logits, expected[end - 1].float(), rtol=0, atol=1e-4)
    assert cache.length == len(ids)


def test_ring_keeps_exactly_the_window(checkpoints):
    """Window 8: after 8 tokens all 8 are there, after 9 only the first is gone (its slot holds the ninth)."""
    model = load(checkpoints("mistral"))
    cache = KVCache(model.config, 64)
    assert all(len(k) == 8 for k in cache.k)
    prefill(model, tokens(8), cache)
    before = cache.k[0].clone()
    assert (before.flatten(1).abs().sum(1) > 0).all()
    decode_step(model, 5, cache)
    changed = (cache.k[0] != before).flatten(1).any(1)
    assert changed.tolist() == [True] + [False] * 7


@pytest.mark.parametrize("n", [3, 4, 5, 9])
def test_what_a_windowed_query_sees(n):
    """Window 4 is four keys, the query's own included: values one-hot by position, so the output names who was seen."""
    config = tiny_config(window=4)
    cache = KVCache(config, 16)
    seen = last_query_sees(cache, n)
    assert seen == list(range(max(0, n - 4), n))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 12])
def test_sinks_are_never_forgotten(chunk):
    cache = KVCache(tiny_config(window=4), 16, sinks=2)
    assert len(cache.k[0]) == 6
    assert last_query_sees(cache, 12, chunk) == [0, 1, 8, 9, 10, 11]


def tiny_config(window):
    base = vars(SHAPES["smollm2-135m"])
    return SHAPES["smollm2-135m"].__class__(
        **{**base, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "windows": (window,)}
    )


def last_query_sees(cache, n, chunk=1):
    values = torch.eye(16)[:n].view(n, 1, 16)
    same = torch.ones(n, 1, 16)  # equal keys: attention is the mean over what is visible
    for start in range(0, n, chunk):
        part = slice(start, min(start + chunk, n))
        out = cache.attend(0, same[part], same[part], values[part])
        cache.advance(len(values[part]))
    weights = out[-1, 0]
    assert torch.allclose(weights[weights > 0], 1 / (weights > 0).sum()), (
        "not all visible keys weigh the same"
    )
    return weights.nonzero().flatten().tolist()


def test_unused_slots_are_never_read(checkpoints):
    model = load(checkpoints("llama-3"))
    clean, poisoned = KVCache(model.config, 64), KVCache(model.config, 64)
    for x in (*poisoned.k, *poisoned.v):
        x.fill_(float("nan"))
    for ids in (tokens(7), [3], [4]):
        assert torch.equal(prefill(model, ids, clean), prefill(model, ids, poisoned))


# ---------------------------------------------------------------- going back, and limits
def test_truncate_forgets_and_nothing_else(checkpoints):
    model = load(checkpoints("qwen3"))
    cache, ids = KVCache(model.config, 64), tokens(20)
    prefill(model, ids, cache)
    cache.truncate(11)
    again = prefill(model, [9, 8, 7], cache)
    torch.testing.assert_close(again, afresh(model, [*ids[:11], 9, 8, 7])[-1].float(), rtol=0, atol=1e-4)


def test_truncate_refuses_what_a_ring_has_overwritten(checkpoints):
    model = load(checkpoints("mistral"))
    cache = KVCache(model.config, 64)
    prefill(model, tokens(8), cache)
    cache.truncate(5)  # nothing overwritten yet
    prefill(model, tokens(6), cache)
    with pytest.raises(ValueError, match="cannot go back from 11 to 9 tokens: a layer keeps only the last 8"):
        cache.truncate(9)
    cache.truncate(0)
    logits = prefill(model, tokens(20, seed=3), cache)
    torch.testing.assert_close(logits, afresh(model, tokens(20, seed=3))[-1].float(), rtol=0, atol=1e-4)


def test_limits_are_named():
    config = tiny_config(window=None)
    with pytest.raises(ValueError, match=r"a cache of 9,000 tokens: this model's context allows 1 to 8,192"):
        KVCache(config, 9000)
    with pytest.raises(ValueError, match="sinks is -1"):
        KVCache(config, 16, sinks=-1)
    cache = KVCache(config, 4)
    x = torch.ones(5, 1, 16)
    with pytest.raises(ValueError, match=r"holds 0 of 4 tokens and 5 more do not fit \(1 too many\)"):
        cache.attend(0, x, x, x)
    with pytest.raises(ValueError, match="cannot truncate a cache of 0 tokens to 3"):
        cache.truncate(3)
