"""From logits to one token: temperature, top-k, top-p, and a draw that belongs to the request alone.

    p = softmax(logits / temperature), restricted to the k largest and to the smallest set that holds top_p
    token = the first one whose cumulative probability exceeds u(seed, position)

A draw is a function of (seed, output position): never of neighbours in a batch, of chunking, or of how often a
request was interrupted. So sampled text can be tested for equality, as greedy text can.

Conventions  the token that carries the sum across top_p is kept, so the set is never empty; temperature acts first,
             then top-k, then top-p, as in `transformers` and vLLM; everything is computed in fp32
Sources      nucleus sampling, Holtzman et al. 2020 (arXiv:1904.09751); inverse-transform sampling
Story        notebooks/02_prefill_and_decode.ipynb
"""

import hashlib

import torch

from minserve.request import SamplingParams


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) fixed by its two arguments, the same on every machine: 53 bits of a hash."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def probabilities(logits, params: SamplingParams):
    """The distribution a token is drawn from, fp32 [V]: exactly 0 for every token that was cut."""
    logits = logits.float()
    if params.greedy:
        one_hot = torch.zeros_like(logits)
        one_hot[logits.argmax()] = 1.0
        return one_hot
    logits = (logits - logits.max()) / params.temperature  # largest first at 0: nothing can overflow
    if 0 < params.top_k < len(logits):
        kept = logits.topk(params.top_k)  # exactly k, also where logits tie
        logits = torch.full_like(logits, -torch.inf).scatter(0, kept.indices, kept.values)
    p = logits.softmax(-1)
    if params.top_p < 1:
        ordered, order = p.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered  # what the more likely ones hold already
        p[order[before >= params.top_p]] = 0.0
        p /= p.sum()
    return p


def sample(logits, params: SamplingParams, seed: int, position: int) -> int:
    """Choose the token for one output position. logits: [V], any dtype.

    Raises ValueError when the logits hold a NaN: whatever made it, an answer drawn from it would be noise.
    """
    if params.greedy:
        token = int(logits.argmax())
        if torch.isnan(logits[token]):  # argmax returns a NaN's place if there is one
            raise ValueError(
                f"the logits for output position {position} hold NaN; the model's weights or cache are broken"
            )
        return token
    cumulative = probabilities(logits, params).double().cumsum(0)
    total = float(cumulative[-1])
    if total != total:
        raise ValueError(
            f"the logits for output position {position} hold NaN; the model's weights or cache are broken"
        )
    u = uniform(seed, position) * total
    return int(
        torch.searchsorted(
            cumulative, torch.tensor(u, dtype=torch.float64, device=cumulative.device), right=True
        )
    )
