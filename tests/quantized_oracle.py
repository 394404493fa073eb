"""A request alone with rounded keys and values, and no cache: the whole sequence again for every token.

Where an answer is there to be checked, one pass over prompt and answer says what comes at each of its places (told).

Written from the formats, not from the package's code: what int8, fp8 and int4 make of a number, and which positions
a query sees rounded.
"""

import math

import torch

from minserve.request import SamplingParams
from minserve.sampling import sample

LARGEST = {"int8": 127.0, "fp8": 448.0}


def rounded_rows(x, kind: str):
    """Each row [.., D] in its own scale, and back."""
    scale = x.abs().amax(-1, keepdim=True) / LARGEST[kind]
    q = torch.where(scale > 0, x / scale, 0.0)
    q = q.round() if kind == "int8" else q.to(torch.float8_e4m3fn).float()
    return q * scale


def rounded_to_levels(x, dim: int):
    """16 levels between the least and the largest along dim, ends in fp16, and back."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step, low = ((high - low) / 15).half().float(), low.half().float()
    n = torch.where(step > 0, (x - low) / step, 0.0).clamp(0, 15).round()
    return low + n * step


def attend_rounded(config, kind: str, page: int, sinks: int = 0):
    """The `attend` of a whole sequence, every query seeing what the engine's cache of that kind would show it."""

    def attend(layer: int, q, k, v):
        T, H, G = len(q), q.shape[1], k.shape[1]
        if kind == "int4":
            full = T // page * page
            pages = k[:full].unflatten(0, (-1, page))  # [pages, page, G, D]
            old_k = torch.cat((rounded_to_levels(pages, 1).flatten(0, 1), k[full:]))
            old_v = torch.cat((rounded_to_levels(v[:full], -1), v[full:]))
        else:
            old_k, old_v = rounded_rows(k, kind), rounded_rows(v, kind)
        p, j, window = torch.arange(T)[:, None], torch.arange(T), config.windows[layer]
        near = (j // page == p // page) if kind == "int4" else torch.zeros(T, T, dtype=bool)  # seen unrounded
        seen = j <= p
        if window is not None:
            seen &= (j > p - window) | (j < sinks)
        k, old_k, v, old_v = (x.repeat_interleave(H // G, 1).transpose(0, 1) for x in (k, old_k, v, old_v))
        q = q.transpose(0, 1)  # [H, T, D]
        scores = torch.where(near, q @ k.mT, q @ old_k.mT) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)  # [H, T, T]
        return ((weights * near) @ v + (weights * ~near) @ old_v).transpose(0, 1)

    return attend


@torch.inference_mode()
def told(model, prompt: list[int], answer: list[int], params: SamplingParams, attend) -> list[int]:
    """The token that comes behind the prompt and each beginning of the answer: the answer itself, if it is right."""
    ids, rows = torch.tensor(prompt + answer[:-1]), torch.arange(len(answer)) + len(prompt) - 1
    logits = model(ids, torch.arange(len(ids)), attend, rows=rows).float()
    made = enumerate(logits)
    return [sample(row, params, params.seed, i, prompt, answer[:i], set()) for i, row in made]


def alone(
    model, prompt: list[int], params: SamplingParams, kind: str, page: int, sinks: int = 0
) -> list[int]:
    attend, answer = attend_rounded(model.config, kind, page, sinks), []
    for _ in range(params.max_tokens):
        answer.append(told(model, prompt, [*answer, 0], params, attend)[-1])
    return answer
