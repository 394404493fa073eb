"""Prefill attention: many new tokens per sequence, each attending to everything before it.

    out[i, h] = softmax(q[i, h] . K[:, g]^T / sqrt(D)) . V[:, g]
                over the keys j that query i sees, with g = h // (H / G)

Query i stands at position p = (keys - queries) + i of its own sequence: the queries are its LAST tokens, so
the causal triangle is aligned to the bottom right. 2 queries over 5 keys see [1 1 1 1 0] and [1 1 1 1 1].
It sees key j when j <= p, and, with a window w, when also j > p - w (w keys, itself included) or j < sinks.

Shapes
    q         [T, H, D]        queries of all sequences, one after another; H query heads, H % G == 0
    k, v      [N, G, D]        their keys and values. In all three, tokens may be strided, [heads, D] not
    starts_q  [B+1] int32      sequence b owns queries starts_q[b] : starts_q[b + 1]
    starts_k  [B+1] int32      and keys starts_k[b] : starts_k[b + 1]
    max_queries                at least the longest sequence's number of queries; it sizes the grid
    returns   [T, H, D]        a query that sees no key (fewer keys than queries) gets zeros

How      Scores are never stored. A tile of queries keeps three things, a running maximum, a running sum and
         an unnormalised output, while tiles of keys stream past (online softmax). Most key tiles are seen by
         every query of the tile and need no mask: one loop for those, then one for the tiles on the diagonal.
         The H/G query heads that share a key head are rows of the same tile: row r is token r // (H/G). Each
         key tile read serves them all, and a chunk of few tokens still fills the tile.
         D is padded with zeros to a power of two, at least 16: head 80 costs as much as head 128.
Cost     4 * H * D flops per visible (query, key) pair: 2 * T^2 * H * D for one causal prompt. Bytes: q and
         out once; each tile of queries reads all keys before it, mostly from L2. Compute-bound from some
         hundred tokens on.
Sources  FlashAttention-2, Dao 2023 (arXiv:2307.08691); online softmax, Milakov and Gimelshein 2018
         (arXiv:1805.02867); attention sinks, Xiao et al. 2023 (arXiv:2309.17453).
Story    notebooks/04_flash_attention.ipynb
"""

import torch

from minserve.kernels import architecture, check_alike, check_packed, has_matrix_units, on_triton, tl, triton

CHUNK = 256  # queries whose scores the definition holds at once
LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E), and GPUs have only exp2


# ---------------------------------------------------------------- the definition
def prefill_attention_reference(
    q, k, v, starts_q, starts_k, max_queries: int, window: int | None = None, sinks: int = 0
):
    out = torch.zeros_like(q)  # [T, H, D]
    starts_q, starts_k = starts_q.tolist(), starts_k.tolist()
    for b in range(len(starts_q) - 1):
        first, last = starts_q[b], starts_q[b + 1]
        own_k, own_v = (x[starts_k[b] : starts_k[b + 1]].float() for x in (k, v))  # [m, G, D]
        offset = len(own_k) - (last - first)  # position of the first query
        for i in range(first, last, CHUNK):  # bounds the score matrix, and skips its upper half
            end = min(i + CHUNK, last)
            m = max(0, offset + end - first)  # keys the chunk's last query sees
            chunk = _attend(q[i:end].float(), own_k[:m], own_v[:m], offset + i - first, window, sinks)
            out[i:end] = chunk.to(q.dtype)  # [n, H, D]
    return out


def _attend(q, k, v, position: int, window: int | None, sinks: int):
    """Queries [n, H, D] at position, position + 1, ... over the keys [m, G, D] at 0 .. m - 1, in fp32."""
    (n, H, D), (m, G, _) = q.shape, k.shape
    R = H // G  # query heads per key head
    p = torch.arange(position, position + n, device=q.device)[:, None]  # [n, 1]
    j = torch.arange(m, device=q.device)[None, :]  # [1, m]
    seen = j <= p  # [n, m]
    if window is not None:
        seen &= (j > p - window) | (j < sinks)
    rows = q.view(n, G, R, D).permute(1, 2, 0, 3).reshape(G, R * n, D)  # [G, R n, D]
    scores = (rows @ k.permute(1, 2, 0) * D**-0.5).view(G, R, n, m)  # [G, R, n, m]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)  # [G, R, n, m]
    weights = weights.masked_fill(~seen, 0.0)  # a query that sees no key: 0, not 0/0
    out = weights.view(G, R * n, m) @ v.transpose(0, 1)  # [G, R n, D]
    return out.view(G, R, n, D).permute(2, 0, 1, 3).reshape(n, H, D)


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _prefill_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_q_ptr, starts_k_ptr,
    q_stride, k_stride, v_stride, scale,              # elements from one token to the next; log2(e) / sqrt(D)
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,              # WINDOW: keys a query sees, or None for all
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # Who am I?  One program = BLOCK_M rows (token x head of the group) of one key head of one sequence.
    # The last tile of a prompt sees most keys, so it goes first: no long straggler at the end.
    R: tl.constexpr = H // G
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    q_start, k_start = tl.load(starts_q_ptr + b), tl.load(starts_k_ptr + b)
    num_queries, num_keys = tl.load(starts_q_ptr + b + 1) - q_start, tl.load(starts_k_ptr + b + 1) - k_start
    if first_row >= num_queries * R:
        return                                              # a shorter sequence than the longest

    row = first_row + tl.arange(0, BLOCK_M)                                                    # [M]
    d = tl.arange(0, BLOCK_D)                                                                  # [D]
    token, head = row // R, g * R + row % R                                                    # [M]
    live = (token < num_queries)[:, None] & (d < D)[None, :]                                   # [M, D]
    where = (q_start + token).to(tl.int64)                                                     # [M]
    q = tl.load(q_ptr + (where * q_stride + head * D)[:, None] + d[None, :], mask=live, other=0.0)    # [M, D]
    k_ptr += k_start.to(tl.int64) * k_stride + g * D        # my sequence's key 0, my group's head
    v_ptr += k_start.to(tl.int64) * v_stride + g * D

    # What do I carry?  The online softmax: running maximum, running sum, unnormalised output.
    running_max = tl.full([BLOCK_M], -float("inf"), tl.float32)                                # [M]
    running_sum = tl.zeros([BLOCK_M], tl.float32)                                              # [M]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)                                             # [M, D]

    # What do I read?  Keys 0 .. stop - 1, a tile at a time; [free, diagonal) is what all my rows see in full.
    offset = num_keys - num_queries
    position = offset + token                                                                  # [M]
    first = offset + first_row // R                         # position of my first row
    last = offset + tl.minimum((first_row + BLOCK_M - 1) // R, num_queries - 1)              # and of my last
    stop = tl.maximum(last + 1, 0)
    free = 0
    if WINDOW is not None:
        # Keys below `begin` are out of every row's window, except the sinks; below `free`, out of some row's.
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        free = tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
        running_max, running_sum, acc = _attend_tiles(
            running_max, running_sum, acc, q, k_ptr, v_ptr, k_stride, v_stride, scale, position, num_keys,
            0, tl.minimum(SINKS, begin), True, D, WINDOW, SINKS, BLOCK_N, BLOCK_D,
        )
        running_max, running_sum, acc = _attend_tiles(
            running_max, running_sum, acc, q, k_ptr, v_ptr, k_stride, v_stride, scale, position, num_keys,
            begin, tl.minimum(free, stop), True, D, WINDOW, SINKS, BLOCK_N, BLOCK_D,
        )
    diagonal = tl.maximum(tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N, free)
    running_max, running_sum, acc = _attend_tiles(
        running_max, running_sum, acc, q, k_ptr, v_ptr, k_stride, v_stride, scale, position, num_keys,
        free, diagonal, False, D, WINDOW, SINKS, BLOCK_N, BLOCK_D,
    )
    running_max, running_sum, acc = _attend_tiles(
        running_max, running_sum, acc, q, k_ptr, v_ptr, k_stride, v_stride, scale, position, num_keys,
        diagonal, stop, True, D, WINDOW, SINKS, BLOCK_N, BLOCK_D,
    )

    out = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]    # [M, D]; rows that saw nothing: 0 / 1
    out_offset = ((where * H + head) * D)[:, None] + d[None, :]                                # [M, D]
    tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _attend_tiles(
    running_max, running_sum, acc, q, k_ptr, v_ptr, k_stride, v_stride, scale, position, num_keys,
    begin, end, MASKED: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Stream the key tiles that start at begin, begin + BLOCK_N, ... < end past my rows."""
    d = tl.arange(0, BLOCK_D)                                                                  # [D]
    n = tl.arange(0, BLOCK_N)                                                                  # [N]
    for start in range(begin, end, BLOCK_N):
        base = tl.cast(start, tl.int64)                     # int64: base * stride passes 2**31 in a big cache
        live = (d < D)[None, :]                 # [1, D]; all true, and no mask at all, when D is a power of 2
        if MASKED:
            live = live & (start + n < num_keys)[:, None]   # [N, D]; keys past the end are not mine to read
        k_tile = k_ptr + base * k_stride + n[:, None] * k_stride + d[None, :]                  # [N, D]
        k = tl.load(k_tile, mask=live, other=0.0)                                              # [N, D]
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale                         # [M, N]
        if MASKED:
            j = start + n[None, :]                                                             # [1, N]
            seen = j <= position[:, None]                                                      # [M, N]
            if WINDOW is not None:
                seen = seen & ((j > position[:, None] - WINDOW) | (j < SINKS))
            score = tl.where(seen, score, -float("inf"))

        new_max = tl.maximum(running_max, tl.max(score, axis=1))                               # [M]
        if MASKED:
            base_max = tl.where(new_max == -float("inf"), 0.0, new_max)    # nothing seen yet: no inf - inf
        else:
            base_max = new_max                                                                 # [M]
        shrink = tl.exp2(running_max - base_max)            # rescales what was summed under the old maximum
        weight = tl.exp2(score - base_max[:, None])                                            # [M, N]
        running_sum = running_sum * shrink + tl.sum(weight, axis=1)                            # [M]
        running_max = new_max
        v_tile = v_ptr + base * v_stride + n[:, None] * v_stride + d[None, :]                  # [N, D]
        v = tl.load(v_tile, mask=live, other=0.0)                                              # [N, D]
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")     # [M, D]
    return running_max, running_sum, acc
# fmt: on


# ---------------------------------------------------------------- the launcher
def prefill_attention(
    q, k, v, starts_q, starts_k, max_queries: int, window: int | None = None, sinks: int = 0
):
    """Causal attention of ragged sequences over their own keys. Shapes: see the module docstring."""
    _check(q, k, v, starts_q, starts_k, max_queries, window, sinks)
    if not on_triton(q):
        return prefill_attention_reference(q, k, v, starts_q, starts_k, max_queries, window, sinks)
    (T, H, D), G = q.shape, k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    B = starts_q.numel() - 1
    block = tiles(D, q.dtype, architecture(q.device))
    if T and B and max_queries:
        grid = (B * G, triton.cdiv(max_queries * (H // G), block["BLOCK_M"]))
        _prefill_attention_kernel[grid](
            q, k, v, out, starts_q, starts_k,
            q.stride(0), k.stride(0), v.stride(0), LOG2_E * D**-0.5,
            H=H, G=G, D=D, WINDOW=window, SINKS=sinks, **block,
        )  # fmt: skip
    return out


def tiles(D: int, dtype, arch: str) -> dict:
    """Tile sizes, warps and pipeline stages for one head size, dtype and architecture ("sm_90", ...).

    The accumulator, BLOCK_M x D in fp32, lives in registers; that is what limits the rest.
    Hopper     128 rows are two warp groups of 64, the shape wgmma wants; 3 stages: two on their way, one used
    others     mma.sync holds its operands in registers too, so head 128 leaves room for half as many keys
    AMD        64 KiB of shared memory hold one tile of keys and values, not three
    no units   multiply-adds keep whole rows of operands in registers: a fraction of the tile, or it spills
    """
    block_d = max(16, triton.next_power_of_2(D))
    if not has_matrix_units(dtype, arch):
        size = 32 if block_d <= 64 else 16
        block = dict(BLOCK_M=size, BLOCK_N=size, num_warps=8, num_stages=1)
    elif arch.startswith("gfx"):
        block = dict(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=1)
    else:
        block = dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3)
        if block_d > 64 and arch != "sm_90":
            block["BLOCK_N"] = 32
    if block_d > 128:  # twice the accumulator: half the rows and keys
        block["BLOCK_M"] = max(16, block["BLOCK_M"] // 2)
        block["BLOCK_N"] = max(16, block["BLOCK_N"] // 2)
    return dict(block, BLOCK_D=block_d)


def _check(q, k, v, starts_q, starts_k, max_queries, window, sinks):
    who = "prefill_attention"
    (_, H, D), (N, G, _) = q.shape, k.shape
    check_alike(who, q=q, k=k, v=v)
    check_packed(who, 2, q=q, k=k, v=v)
    if H % G:
        raise ValueError(
            f"{who}: {H} query heads cannot share {G} key/value heads evenly ({H} = {H // G} x {G} + {H % G})"
        )
    if k.shape != v.shape or k.shape[2] != D:
        raise ValueError(
            f"{who}: k {list(k.shape)} and v {list(v.shape)} must be equal, with the {D} channels of q"
        )
    if starts_q.shape != starts_k.shape or starts_q.ndim != 1 or starts_q.numel() == 0:
        raise ValueError(
            f"{who}: starts_q {list(starts_q.shape)} and starts_k {list(starts_k.shape)} must both be "
            f"[sequences + 1]: where each sequence starts, and where the last one ends"
        )
    for name, x in (("starts_q", starts_q), ("starts_k", starts_k)):
        if x.dtype != torch.int32 or x.device != q.device or not x.is_contiguous():
            raise ValueError(
                f"{who}: {name} is {x.dtype} on {x.device}; it must be contiguous torch.int32 on {q.device}"
            )
    if window is not None and window < 1:
        raise ValueError(
            f"{who}: a window of {window} keys leaves a query without even itself; use window >= 1 or None"
        )
    if sinks < 0 or (sinks and window is None):
        raise ValueError(
            f"{who}: {sinks} sinks with window {window}; sinks >= 0 are the keys kept beside a window"
        )
    if not q.is_cuda:  # reading a tensor would make the CPU wait for the GPU
        _check_starts(starts_q, q.shape[0], "starts_q", max_queries)
        _check_starts(starts_k, N, "starts_k", N)


def _check_starts(starts, total, name, most):
    values = starts.tolist()
    lengths = [b - a for a, b in zip(values, values[1:])]
    if values[0] < 0 or values[-1] > total or min(lengths, default=0) < 0:
        raise ValueError(
            f"prefill_attention: {name} {values} must rise from 0 to at most {total}, the tokens there are"
        )
    if max(lengths, default=0) > most:
        raise ValueError(
            f"prefill_attention: a sequence has {max(lengths)} queries, more than max_queries = {most}; "
            f"the grid would stop short of it: pass max_queries >= {max(lengths)}"
        )
