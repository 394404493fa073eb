"""Prefill attention: many new tokens per sequence, each attending to everything before it."""

import torch

CHUNK = 256                                               # queries whose scores the definition holds at once


# ---------------------------------------------------------------- the definition
def _attend(q, k, v, position: int, window: int | None, sinks: int):
    """Queries q [n, H, D] at position, position + 1, ... over the keys k, v [m, G, D] at 0 .. m - 1; fp32."""
    n, H, D = q.shape
    m, G, _ = k.shape
    p = torch.arange(position, position + n, device=q.device)[:, None]                         # [n, 1]
    j = torch.arange(m, device=q.device)[None, :]                                              # [1, m]
    seen = j <= p                                                                              # [n, m]
    if window is not None:
        seen &= (j > p - window) | (j < sinks)
    q = q.view(n, G, H // G, D).permute(1, 2, 0, 3).reshape(G, H // G * n, D)                  # heads of a group: rows
    scores = (q @ k.permute(1, 2, 0) * D**-0.5).view(G, H // G, n, m)                          # [G, H/G, n, m]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    weights = weights.masked_fill(~seen, 0.0)                # a query that sees no key: 0, not 0/0
    out = weights.view(G, H // G * n, m) @ v.transpose(0, 1)                                   # [G, H/G * n, D]
    return out.view(G, H // G, n, D).permute(2, 0, 1, 3).reshape(n, H, D)


def prefill_attention_reference(
    q, k, v, starts_q, starts_k, max_queries: int, window: int | None = None, sinks: int = 0
):
    out = torch.zeros_like(q)                                                                  # [T, H, D]
    starts_q, starts_k = starts_q.tolist(), starts_k.tolist()
    for b in range(len(starts_q) - 1):
        first, last = starts_q[b], starts_q[b + 1]
        own_k, own_v = (x[starts_k[b] : starts_k[b + 1]].float() for x in (k, v))              # [m, G, D]
        offset = len(own_k) - (last - first)                 # position of the first query: they are the last
        for i in range(first, last, CHUNK):                  # bounds the score matrix, and skips its upper half
            end = min(i + CHUNK, last)
            m = max(0, offset + end - first)                 # keys the chunk's last query sees
            chunk = _attend(q[i:end].float(), own_k[:m], own_v[:m], offset + i - first, window, sinks)
            out[i:end] = chunk.to(q.dtype)
    return out


# ---------------------------------------------------------------- the launcher
def prefill_attention(
    q, k, v, starts_q, starts_k, max_queries: int, window: int | None = None, sinks: int = 0
):
    return prefill_attention_reference(q, k, v, starts_q, starts_k, max_queries, window, sinks)
