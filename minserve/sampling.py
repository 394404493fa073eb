"""From logits to one token: what the request's history changes, the cuts, and a draw that belongs to the request alone.

    logits  + logit_bias                                                   for the tokens it names
            / or * repetition_penalty                                      for tokens of prompt and answer, once each
            - presence_penalty - frequency_penalty * times                 for tokens of the answer
            = -inf                                                         for stop ids, until min_tokens are out
    p       = softmax(logits / temperature), restricted by top_k, then top_p, then min_p
    token   = the first one whose cumulative probability exceeds u(seed, position)

A draw is a function of (seed, output position): never of neighbours in a batch, of chunking, or of how often a
request was interrupted. So sampled text can be tested for equality, as greedy text can. `minserve/sampler.py` does the
same for a batch, and must agree with this file in every token.

Conventions  tokens are in order of (logit, lowest id first), so cuts are exact also where logits tie; the token that
             carries the sum across top_p is kept, so the set is never empty; the order of steps is that of vLLM;
             everything is computed in fp32, weights are rounded to integers so that sums are exact (kernels/sample.py)
Story        notebooks/02_prefill_and_decode.ipynb
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from minserve.kernels.sample import HOTTEST, uniform, weights_reference
from minserve.request import SamplingParams

__all__ = ["adjusted", "probabilities", "sample", "uniform"]


def adjusted(
    logits,
    params: SamplingParams,
    position: int = 0,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
    stop_ids: Iterable[int] = (),
):
    """The logits after bias, penalties and min_tokens, fp32 [V]. The caller's stay as they are."""
    x = logits.to(torch.float32, copy=True)
    number = lambda value: torch.tensor(value, dtype=torch.float32, device=x.device)
    if params.logit_bias:
        x[list(params.logit_bias)] += number(list(params.logit_bias.values()))
    if seen := list(set(prompt) | set(outputs)):
        penalty = number(params.repetition_penalty)
        x[seen] = torch.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
    if times := Counter(outputs):
        made = list(times)
        x[made] -= number(params.presence_penalty)
        x[made] -= number(params.frequency_penalty) * number(list(times.values()))
    if position < params.min_tokens:
        x[list({*stop_ids, *params.stop_token_ids})] = -torch.inf
    return x


def probabilities(logits, params: SamplingParams, *history):
    """The distribution a token is drawn from, fp32 [V]: exactly 0 for every token that was cut.

    `history` is what `adjusted` takes: position, prompt, outputs, stop_ids.
    """
    weights = weights_reference(adjusted(logits, params, *history)[None], *_cuts(params, logits.device))[0]
    return (weights.double() / weights.sum()).float()


def sample(
    logits,
    params: SamplingParams,
    seed: int,
    position: int,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
    stop_ids: Iterable[int] = (),
) -> int:
    """Choose the token for one output position. logits: [V], any dtype.

    Raises ValueError when no logit is a largest one (one is NaN, or all are -inf): whatever made them, an answer drawn
    from them would be noise.
    """
    x = adjusted(logits, params, position, prompt, outputs, stop_ids)
    if not x.max().isfinite():  # the maximum of anything and NaN is NaN
        raise ValueError(
            f"the logits for output position {position} hold NaN, or have no finite maximum; "
            f"the model's weights or cache are broken"
        )
    reached = weights_reference(x[None], *_cuts(params, x.device))[0].cumsum(0)
    total = int(reached[-1])
    target = min(int(uniform(seed, position) * total), total - 1)
    return int(torch.searchsorted(reached, target, right=True))


def _cuts(params: SamplingParams, device):
    """temperature, top_k, top_p, min_p of one row, as `kernels.sample` takes them."""
    temperature = 0.0 if params.greedy else min(params.temperature, HOTTEST)
    return (
        torch.tensor([temperature], dtype=torch.float32, device=device),
        torch.tensor([min(params.top_k, 2**62)], device=device),
        torch.tensor([params.top_p], dtype=torch.float64, device=device),
        torch.tensor([params.min_p], dtype=torch.float64, device=device),
    )
