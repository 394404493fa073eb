"""Decode attention: one new token per sequence, over everything its cache holds."""

import torch


# ---------------------------------------------------------------- the definition
def decode_attention_reference(q, k_cache, v_cache, lengths, max_length: int):
    B, H, D = q.shape
    G = k_cache.shape[2]
    out = torch.zeros_like(q)                                                                  # [B, H, D]
    for b, n in enumerate(lengths.tolist()):
        if n == 0:
            continue                                         # nothing to see: zeros, not 0/0
        k, v = k_cache[b, :n].float(), v_cache[b, :n].float()                                  # [n, G, D]
        rows = q[b].float().view(G, H // G, D)                                                 # heads of a group
        weights = (rows @ k.permute(1, 2, 0) * D**-0.5).softmax(-1)                            # [G, H/G, n]
        out[b] = (weights @ v.transpose(0, 1)).view(H, D).to(q.dtype)
    return out


# ---------------------------------------------------------------- the launcher
def decode_attention(q, k_cache, v_cache, lengths, max_length: int):
    return decode_attention_reference(q, k_cache, v_cache, lengths, max_length)
