"""Paged attention: each row's past lies scattered over pages, and a table says where.

    out[i, h] = softmax(q[i, h] . K[:, g]^T / sqrt(D)) . V[:, g]
                over the positions j that query i sees, with g = h // (H / G)

Position j of row b lives in page pages[b, j // S], slot j % S. A row's queries are its LAST positions, already
in the cache: query i of n stands at p = lengths[b] - n + i and sees j <= p; with a window w only j > p - w (w
positions, itself included) and j < sinks. Whatever no query of the row sees is never read: behind a window
the table may be stale, past the length it may hold anything.

With `trees` a query sees every j <= p - 63, and of the 63 last positions, its own the first of them, those whose bit
is set: bit p - j of trees[t]. So the nodes of a tree of drafts lie one after another in the cache, and each sees its
ancestors but no siblings. -1 is the plain rule. Hidden positions are read here and weigh 0: they must hold numbers.

Shapes
    q         [T, H, D]        the queries of all rows, one after another; tokens may be strided
    k_cache   [P, S, G, D]     P pages of S slots (a power of two), G key/value heads, H % G == 0. Pages and
    v_cache   [P, S, G, D]     slots may be strided, [G, D] contiguous: one layer of a bigger cache will do
    pages     [B, M] int32     page ids in order of position; rows may be strided
    starts_q  [B+1] int32      row b owns queries starts_q[b] : starts_q[b + 1], none is allowed
    lengths   [B] int32        positions row b sees, its own queries included; 0 gives zeros
    max_queries                at least the most queries of a row: here up to 16, one step of decode or the
                               drafts it verifies; `paged_prefill` takes any number
    max_length                 at least the longest length: it decides the splits without asking the GPU
    trees     [T] int64        or None; not beside a window
    returns   [T, H, D]        queries past starts_q[B] are padding: what they get is undefined

How      As in decode_attention: one program serves the whole group, and each row is cut into splits that a second
         kernel merges. All query tokens of a row go into the same tile (row r is token r // (H/G)), so verifying
         a few drafts reads the cache once. A tile of keys takes one look into the table per page: the
         lanes of one page ask for the same four bytes, which is one transaction.
Cost     4 * H * D flops per visible (query, position) pair over 2 * G * D * itemsize bytes per visible position,
         plus 4 bytes per page: a table costs 4 / (2 * S * G * D * itemsize) of the cache, 0.006 % at 16 x 8 x 128.
Trap     page * S * G * D passes 2**31 before memory ends: page ids are int64 before they meet a stride.
Sources  PagedAttention, Kwon et al. 2023 (arXiv:2309.06180) section 4; Flash-Decoding, Dao et al. 2023.
Story    notebooks/05_paged_attention.ipynb
"""

import torch

from minserve.kernels import (
    architecture,
    has_matrix_units,
    on_triton,
    processors,
    tl,
    triton,
)
from minserve.kernels.decode_attention import LOG2_E, MERGE_TILE, _merge_kernel, splits_for
from minserve.kernels.decode_attention import tiles as decode_tiles
from minserve.kernels.paged_check import check_paged, check_trees
from minserve.kernels.prefill_attention import prefill_attention_reference

MOST_QUERIES = 16  # of a row in one step of decode
MOST_ROWS = 64  # queries x heads of the group in one tile; more of them are several programs
NEAR = 63  # positions about which a tree has a bit


# ---------------------------------------------------------------- the definition
def paged_attention_reference(
    q, k_cache, v_cache, pages, starts_q, lengths, window: int | None = None, sinks: int = 0, trees=None
):
    """Copy what each row sees out of its pages, in order of position, and attend to that."""
    if trees is not None:
        return _tree_reference(q, k_cache, v_cache, pages, starts_q, lengths, trees)
    S = k_cache.shape[1]
    queries = starts_q[1:] - starts_q[:-1]  # [B]
    lengths = lengths * (queries > 0)  # a row without queries sees nothing
    k, v = ([q.new_zeros(0, *k_cache.shape[2:])] for _ in range(2))  # per row [length, G, D]
    for b, n in enumerate(lengths.tolist()):
        j = torch.arange(n, device=q.device)
        if window is not None:  # what the row's first query sees, and later ones
            j = j[(j > n - queries[b] - window) | (j < sinks)]
        page = pages[b, j // S].long()
        for own, cache in ((k, k_cache), (v, v_cache)):
            own.append(cache.new_zeros(n, *cache.shape[2:]))
            own[-1][j] = cache[page, j % S]
    starts_k = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()  # [B + 1]
    most = max(queries.tolist(), default=0)
    return prefill_attention_reference(
        q, torch.cat(k), torch.cat(v), starts_q, starts_k, most, window, sinks
    )  # fmt: skip


def _tree_reference(q, k_cache, v_cache, pages, starts_q, lengths, trees):
    """Every query by itself: what it sees, copied as if that were all there is."""
    out, S, at = torch.zeros_like(q), k_cache.shape[1], starts_q.tolist()
    for b, n in enumerate(lengths.tolist()):
        for t in range(at[b], at[b + 1]):
            j = torch.arange(n - at[b + 1] + t + 1, device=q.device)
            back = j.flip(0)  # how far before the query
            j = j[(back >= NEAR) | (trees[t] >> back.clamp(max=NEAR) & 1 == 1)]
            k, v = (cache[pages[b, j // S].long(), j % S] for cache in (k_cache, v_cache))
            one, seen = (torch.tensor([0, m], dtype=torch.int32, device=q.device) for m in (1, len(j)))
            out[t] = prefill_attention_reference(q[t : t + 1], k, v, one, seen, 1)[0]
    return out


# ---------------------------------------------------------------- the kernels
# fmt: off
@triton.jit
def on_branch(tree, position, j):
    """[R, N]: does the tree of each row's query let it see the positions j?"""
    back = position[:, None] - j[None, :]                                                      # [R, N]
    low, high = tree.to(tl.int32)[:, None], (tree >> 32).to(tl.int32)[:, None]     # shifts of 64 bits would spill
    bit = tl.where(back < 32, low, high) >> (back & 31) & 1                                    # [R, N]
    return (back >= 63) | ((back >= 0) & (bit == 1))


@triton.jit
def attend_page_tile(
    running_max, running_sum, acc, q, k_ptr, v_ptr, table_ptr,
    k_stride_p, k_stride_s, v_stride_p, v_stride_s, scale,
    start, position, oldest, newest,                        # oldest .. newest and the sinks are mine to read
    MASKED: tl.constexpr, S: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, tree=None,                  # [R] words, if there are trees
):
    """One step of the online softmax: positions start .. start + BLOCK_N - 1 stream past the rows of q."""
    j = start + tl.arange(0, BLOCK_N)                                                          # [N]
    d = tl.arange(0, BLOCK_D)                                                                  # [D]
    live = (d < D)[None, :]                     # [1, D]; all true, and no mask at all, when D is a power of 2
    if MASKED:
        mine = j <= newest                                                                     # [N]
        if WINDOW is not None:
            mine = mine & ((j >= oldest) | (j < SINKS))
        live = live & mine[:, None]                                                            # [N, D]
        page = tl.load(table_ptr + j // S, mask=mine, other=0)                                 # [N]
    else:
        page = tl.load(table_ptr + j // S)                                                     # [N]
    page = page.to(tl.int64)                                # int64: page * stride passes 2**31 in a big cache
    k_tile = k_ptr + (page * k_stride_p + j % S * k_stride_s)[:, None] + d[None, :]            # [N, D]
    k = tl.load(k_tile, mask=live, other=0.0)                                                  # [N, D]
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale                             # [R, N]
    if MASKED:
        seen = (j[None, :] <= position[:, None]) & mine[None, :]                               # [R, N]
        if WINDOW is not None:
            seen = seen & ((j[None, :] > position[:, None] - WINDOW) | (j < SINKS)[None, :])
        if tree is not None:
            seen = seen & on_branch(tree, position, j)
        score = tl.where(seen, score, -float("inf"))

    new_max = tl.maximum(running_max, tl.max(score, axis=1))                                   # [R]
    if MASKED:
        base_max = tl.where(new_max == -float("inf"), 0.0, new_max)    # nothing seen yet: no inf - inf
    else:
        base_max = new_max                                                                     # [R]
    shrink = tl.exp2(running_max - base_max)                # rescales what was summed under the old maximum
    weight = tl.exp2(score - base_max[:, None])                                                # [R, N]
    running_sum = running_sum * shrink + tl.sum(weight, axis=1)                                # [R]
    v_tile = v_ptr + (page * v_stride_p + j % S * v_stride_s)[:, None] + d[None, :]            # [N, D]
    v = tl.load(v_tile, mask=live, other=0.0)                                                  # [N, D]
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")         # [R, D]
    return new_max, running_sum, acc


@triton.jit
def _paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, pages_ptr, starts_q_ptr, lengths_ptr, trees_ptr,            # trees_ptr may be None
    out_ptr, lse_ptr,                                  # [splits, T, H, D], [splits, T, H] or None: 1 split
    q_stride, k_stride_p, k_stride_s, v_stride_p, v_stride_s, pages_stride,
    tokens, splits, scale,                                  # T; log2(e) / sqrt(D)
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,              # WINDOW: positions a query sees, or None for all
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # Who am I?  One program = one split of BLOCK_R rows (query x head of one group) of one row of the step.
    R: tl.constexpr = H // G
    b, g, split = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    q_start, length = tl.load(starts_q_ptr + b), tl.load(lengths_ptr + b)
    num_queries = tl.load(starts_q_ptr + b + 1) - q_start
    first_row = tl.program_id(2) * BLOCK_R
    if first_row >= num_queries * R:
        return                                              # fewer queries than the most; padding has none
    row = first_row + tl.arange(0, BLOCK_R)                                                    # [R]
    d = tl.arange(0, BLOCK_D)                                                                  # [D]
    token, head = row // R, g * R + row % R                                                    # [R]
    own = (token < num_queries)[:, None] & (d < D)[None, :]                                    # [R, D]
    where = (q_start + token).to(tl.int64)                                                     # [R]
    q = tl.load(q_ptr + (where * q_stride + head * D)[:, None] + d[None, :], mask=own, other=0.0)     # [R, D]
    first = length - num_queries                            # position of the first query
    position, tree = first + token, None                                                       # [R]
    if trees_ptr is not None:
        tree = tl.load(trees_ptr + where, mask=token < num_queries, other=0)                   # [R]
    table_ptr = pages_ptr + b.to(tl.int64) * pages_stride
    k_ptr += g * D                                          # my group's head, in every slot
    v_ptr += g * D

    # What do I carry?  The online softmax: running maximum, running sum, unnormalised output.
    running_max = tl.full([BLOCK_R], -float("inf"), tl.float32)                                # [R]
    running_sum = tl.zeros([BLOCK_R], tl.float32)                                              # [R]
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)                                             # [R, D]

    # What do I read?  My share of the row's own tiles: those with sinks, then those from the window on.
    begin, oldest, sink_tiles = 0, 0, 0
    if WINDOW is not None:
        oldest = tl.maximum(first - WINDOW + 1, 0)
        begin = oldest // BLOCK_N * BLOCK_N
        sink_tiles = tl.cdiv(tl.minimum(SINKS, begin), BLOCK_N)
    tiles = sink_tiles + tl.cdiv(length - begin, BLOCK_N)
    share = tl.cdiv(tiles, splits)
    for i in range(split * share, tl.minimum((split + 1) * share, tiles)):
        start = i * BLOCK_N
        if WINDOW is not None:
            start = tl.where(i < sink_tiles, start, begin + (i - sink_tiles) * BLOCK_N)
        running_max, running_sum, acc = attend_page_tile(
            running_max, running_sum, acc, q, k_ptr, v_ptr, table_ptr,
            k_stride_p, k_stride_s, v_stride_p, v_stride_s, scale, start, position, oldest, length - 1,
            True, S, D, WINDOW, SINKS, BLOCK_N, BLOCK_D, tree,
        )

    out = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]    # [R, D]; rows that saw nothing: 0 / 1
    place = (tl.cast(split, tl.int64) * tokens + where) * H + head                             # [R]
    tl.store(out_ptr + place[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=own)
    if lse_ptr is not None:
        # Base 2, like everything here. A split that saw nothing has max -inf: its weight in the merge is 0.
        lse = running_max + tl.log2(tl.where(running_sum > 0, running_sum, 1.0))               # [R]
        tl.store(lse_ptr + place, lse, mask=token < num_queries)
# fmt: on


# ---------------------------------------------------------------- the launcher
def paged_decode(
    q, k_cache, v_cache, pages, starts_q, lengths, max_queries: int, max_length: int,
    window: int | None = None, sinks: int = 0, trees=None,
):  # fmt: skip
    """Attend up to 16 new tokens per row over its pages. Shapes: see the module docstring."""
    if max_queries > MOST_QUERIES:
        raise ValueError(
            f"paged_decode: up to {max_queries} queries per row, and one step of decode has at most "
            f"{MOST_QUERIES}; use paged_prefill"
        )
    check_paged(
        "paged_decode", q, k_cache, v_cache, pages, starts_q, lengths, max_queries, max_length, window, sinks
    )
    check_trees("paged_decode", q, trees, window)
    if not on_triton(q):
        return paged_attention_reference(q, k_cache, v_cache, pages, starts_q, lengths, window, sinks, trees)
    H, D = q.shape[1:]
    B, G, R = len(lengths), k_cache.shape[2], H // k_cache.shape[2]
    block = tiles(D, q.dtype, architecture(q.device), max_queries * R)
    programs = B * G * triton.cdiv(max_queries * R, block["BLOCK_R"])
    visible = max_length if window is None else min(max_length, window + max_queries - 1 + sinks)
    splits = splits_for(programs, triton.cdiv(visible, block["BLOCK_N"]), processors(q.device))
    case = q, k_cache, v_cache, pages, starts_q, lengths
    return attend_in_splits(*case, max_queries, splits, window, sinks, trees)


def attend_in_splits(
    q, k_cache, v_cache, pages, starts_q, lengths, max_queries: int, splits: int,
    window: int | None = None, sinks: int = 0, trees=None,
):  # fmt: skip
    """The launch itself, for a given number of splits: it changes the time, never the answer."""
    (T, H, D), B, (_, S, G, _) = q.shape, len(lengths), k_cache.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if T == 0 or B == 0 or max_queries == 0:
        return out
    block = tiles(D, q.dtype, architecture(q.device), max_queries * (H // G))
    partial, lse = out, None
    if splits > 1:
        partial = torch.empty((splits, T, H, D), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, T, H), dtype=torch.float32, device=q.device)
    _paged_decode_kernel[(B * G, splits, triton.cdiv(max_queries * (H // G), block["BLOCK_R"]))](
        q, k_cache, v_cache, pages, starts_q, lengths, trees, partial, lse,
        q.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2], pages.stride(0),
        T, splits, LOG2_E * D**-0.5, H=H, G=G, D=D, S=S, WINDOW=window, SINKS=sinks, **block,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(T * H,)](
            partial, lse, out, T * H, splits, D=D, TILE=MERGE_TILE, BLOCK_D=block["BLOCK_D"]
        )  # fmt: skip
    return out


def tiles(D: int, dtype, arch: str, rows: int) -> dict:
    """decode_attention's choice, for `rows` = queries x heads of the group, 64 of them at most per program."""
    most = MOST_ROWS if has_matrix_units(dtype, arch) else 16  # multiply-adds spill with more
    block = with_lookup(decode_tiles(D, dtype, arch, min(rows, most)))
    if block["BLOCK_R"] > 16 and arch == "sm_80":  # mma.sync keeps its operands in registers:
        block |= dict(BLOCK_R=MOST_ROWS, num_warps=8)  # 32 rows spill with 4 warps and with 8, 64 with 4
    return block


def with_lookup(block: dict) -> dict:
    """A dense kernel's tiles, in a deeper pipeline: first a tile's page ids travel, then the tile itself.

    Triton shares the stages out between the two, so as many tiles are on their way as in the dense kernel.
    """
    return dict(block, num_stages=2 * block["num_stages"] - 1)
