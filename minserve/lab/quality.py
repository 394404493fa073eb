"""How far is a model from another on a text: perplexity, and the KL divergence of what they predict.

    KL         mean over positions of sum_v p(v) log(p(v) / q(v)), in nats     p the reference's, q the model's
    perplexity exp of the mean of -log q(what really follows)

Windows of 512 tokens, each from nothing, so that no position sees more than that.
Story    notebooks/09_quantization.ipynb
"""

import math

import torch

from minserve.model import Model
from minserve.prefill_decode import attend_afresh

WINDOW = 512


def logits_of(model: Model, tokens: list[int]) -> list:
    """[window, V] each, in the model's dtype: keep these to compare several models with one."""
    starts = range(0, len(tokens), WINDOW)
    return [_logits(model, tokens[start : start + WINDOW]) for start in starts]


@torch.inference_mode()
def quality(model: Model, reference: Model | list, tokens: list[int]) -> tuple[float, float]:
    """(KL of the model from the reference, the model's perplexity); `reference` may be what logits_of gave."""
    divergence = surprise = 0.0
    predicted = 0
    for i, start in enumerate(range(0, len(tokens), WINDOW)):
        ids = tokens[start : start + WINDOW]
        its = _logits(reference, ids) if isinstance(reference, Model) else reference[i]
        mine = _logits(model, ids)
        divergence += divergence_of(its, mine) * len(ids)
        q = mine.float().log_softmax(-1)
        follows = torch.tensor(ids[1:], device=q.device)
        surprise -= float(q[:-1].gather(1, follows[:, None]).sum(dtype=torch.float64))
        predicted += len(follows)
    return divergence / len(tokens), math.exp(surprise / predicted)


def divergence_of(reference, logits) -> float:
    """Mean KL of the rows of logits [n, V] from the reference's."""
    p, q = (x.float().log_softmax(-1) for x in (reference, logits))
    return float((p.exp() * (p - q)).sum(-1).mean(dtype=torch.float64))


def _logits(model: Model, ids: list[int]):
    tokens = torch.tensor(ids, device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    return model(tokens, positions, attend_afresh(model.config))
