"""Online softmax in plain PyTorch: attention over keys that arrive a piece at a time.

    state = (m, l, acc)      running maximum [rows], running sum [rows], unnormalised output [rows, D]
    start                    nothing seen: (-inf, 0, 0)
    update                   one more piece of scores and values
    finish                   out = acc / l, and lse = m + log(l), the log of the sum of exp(score)
    merge                    two finished results over different keys: weights exp(lse)

After any sequence of updates and merges, in any order, out = softmax(all scores) @ all values. It is what
kernels/prefill_attention.py and kernels/decode_attention.py do with tiles on a chip, to try by hand.

Cost     nothing larger than one piece of scores is ever stored.
Sources  Milakov and Gimelshein 2018 (arXiv:1805.02867); FlashAttention-2, Dao 2023 (arXiv:2307.08691).
Story    notebooks/04_flash_attention.ipynb
"""

import torch


def start(rows: int, channels: int, device=None):
    m = torch.full((rows,), -torch.inf, device=device)
    return m, torch.zeros(rows, device=device), torch.zeros(rows, channels, device=device)


def update(m, l, acc, scores, values):  # noqa: E741  the name that papers use
    """The state (m, l, acc) after one more piece: scores [rows, n], values [n, D]."""
    new_m = torch.maximum(m, scores.amax(1))  # [rows]
    base = new_m.masked_fill(new_m == -torch.inf, 0.0)  # all hidden so far: no inf - inf
    shrink = torch.exp(m - base)  # what was summed under the old maximum, under the new one
    weights = torch.exp(scores - base[:, None])  # [rows, n]
    return new_m, l * shrink + weights.sum(1), acc * shrink[:, None] + weights @ values


def finish(m, l, acc):  # noqa: E741
    """(out [rows, D], lse [rows]). A row that saw no key: zeros, and -inf."""
    seen = torch.where(l > 0, l, 1.0)
    return acc / seen[:, None], m + seen.log()


def merge(out_a, lse_a, out_b, lse_b):
    """One (out, lse) of two, each finished over keys of its own. Either may have seen nothing (lse -inf)."""
    top = torch.maximum(lse_a, lse_b)  # [rows]
    base = top.masked_fill(top == -torch.inf, 0.0)
    a, b = torch.exp(lse_a - base), torch.exp(lse_b - base)  # [rows]
    total = a + b
    safe = torch.where(total > 0, total, 1.0)
    return (a[:, None] * out_a + b[:, None] * out_b) / safe[:, None], top + safe.log()
