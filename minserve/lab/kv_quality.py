"""What a smaller KV cache does to what a model predicts: the same tokens, a cache of another kind.

    logits_of        the engine's own cache, filled and read by one pass over the tokens: each query sees what it
                     would see in a server. Compare with lab.quality's measures
    attend_rounded   a cache that does not exist: any rounding of keys and of values, with or without a recent window,
                     to find out which part of a format does the harm

Run it with a model in fp32: then the only rounding is the cache's. In bf16 everything else is rounded, too, and two
runs differ by about as much as int8 changes.
Story    notebooks/10_smaller_kv_cache.ipynb
"""

import math
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from minserve.batch import Packer
from minserve.config import ModelConfig
from minserve.kernels.kv_quantize import quantize_range
from minserve.model import Model
from minserve.pages import pages_for
from minserve.quantized_cache import cache_for
from minserve.request import Request, SamplingParams


@torch.inference_mode()
def logits_of(model: Model, ids: list[int], kind: str | None = None, page_size: int | None = None):
    """[T, V] of all positions, behind a cache of that kind; None is the model's own numbers."""
    S, tokens = page_size or (64 if kind == "int4" else 16), len(ids)
    pages = pages_for(tokens, S)
    shape = pages, S, model.dtype, model.device, 0
    cache = cache_for(kind, model.config, *shape, seats=1, tokens=tokens)
    request = Request(0, ids, SamplingParams(), 1)
    request.seat, request.pages = 0, list(range(pages))
    batch = Packer(1, tokens + 1, S, model.device).pack([(request, tokens)])
    return model(batch.ids, batch.positions, cache.attend_for(batch))


def divergence(reference, logits, last: int | None = None) -> float:
    """KL(reference || logits) in nats, the mean over positions; `last`: over that many at the end."""
    pairs = zip(
        *(x[-last if last else 0 :].split(256) for x in (reference, logits))
    )  # whole, it fills memory
    total, count = 0.0, last or len(reference)
    for its, other in pairs:
        p, q = (x.float().log_softmax(-1) for x in (its, other))
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    return total / count


def perplexity(logits, ids: list[int]) -> float:
    surprise, follows = 0.0, torch.tensor(ids[1:], device=logits.device)
    for its, right in zip(logits[:-1].split(256), follows.split(256)):
        surprise -= float(its.float().log_softmax(-1).gather(1, right[:, None]).sum(dtype=torch.float64))
    return math.exp(surprise / len(follows))


# ---------------------------------------------------------------- formats that nobody serves
def levels(x, dim: int):
    """x with 16 levels between its least and its largest number along dim, and back."""
    n, scale, minimum = quantize_range(x, dim)
    return (minimum.float() + n * scale.float()).to(x.dtype)


def per_token(pages):
    """Rounds [pages, S, G, D] token by token, head by head."""
    return levels(pages, -1)


def per_channel(pages):
    """Rounds [pages, S, G, D] channel by channel, over the tokens of a page."""
    return levels(pages, 1)


def exact(pages):
    return pages


def attend_rounded(config: ModelConfig, page: int, keys: Callable, values: Callable, recent: bool = True):
    """The `attend` of a whole text: full pages are seen as keys() and values() make them, from [pages, S, G, D].

    `recent`: a query's own page is seen as it is, as in the engine's int4. Else even a token's own key is rounded,
    in every full page.
    """

    def attend(layer: int, q, k, v):
        T, (H, G) = len(q), (q.shape[1], k.shape[1])
        full = T // page * page
        p, j = torch.arange(T, device=q.device)[:, None], torch.arange(T, device=q.device)
        own = j // page == p // page if recent else (j >= full).expand(T, T)  # [T, T], seen as it is
        k, v = (
            torch.cat((rounded(x[:full].unflatten(0, (-1, page))).flatten(0, 1), x[full:], x)).transpose(0, 1)
            for x, rounded in ((k, keys), (v, values))
        )  # [G, 2 T, D]: rounded, then as they are
        seen = torch.cat(((j <= p) & ~own, (j <= p) & own), 1)
        k, v = (x.repeat_interleave(H // G, 0) for x in (k, v))
        return scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=seen).transpose(0, 1)

    return attend


@torch.inference_mode()
def logits_rounded(model: Model, ids: list[int], *how, **more):
    """[T, V] with attend_rounded(config, *how, **more)."""
    tokens = torch.tensor(ids, device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    return model(tokens, positions, attend_rounded(model.config, *how, **more))
