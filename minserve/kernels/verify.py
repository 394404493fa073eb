"""Judge drafts: which of them the target's own distribution keeps, and the token that follows the last of them.

    verify   one token per place: the draft, where it is kept, else a token that is not the draft
    walk     from a row's first place to the child that carries the token drawn there, while there is one

At a place the target's weights W and the draft's weights Q (kernels/sample.py, both after the row's own cuts) are the
distributions p = W / sum W and q = Q / sum Q. A draft x that was drawn from q

    is kept, if      u(ACCEPT) * q(x) < p(x)
    else the token   is drawn from left(v) = floor(max(0, p(v) - q(v)) * 2^52), with u(TARGET)

Why exact    A token v comes as a draft with probability q(v) min(1, p(v) / q(v)) = min(p(v), q(v)), and in place of one
             that was not kept with probability (1 - sum min(p, q)) * max(0, p(v) - q(v)) / sum max(0, p - q). As
             sum max(0, p - q) = 1 - sum min(p, q), the two add up to p(v).
One-hot q    Any other draft (looked up, or one candidate of several) is not compared at all: the token is drawn from p,
             as if nobody had drafted. With probability p(x) it equals the draft, which was right then; else it is
             distributed as p without x. `drafts` is -1 there, and at the place behind the last draft.
Not twice    A token drawn from what is left is never the draft: u < 1, so that x was refused means q(x) >= p(x), in
             floats too, and x has nothing left. So `walk` need only compare tokens, whoever made the draft.
In integers  W and Q are integers below 2^53, so are their sums; what is left sums to 2^52 at most. So every order of
             summation finds the same total and the same owner of a ticket.
Doubt        A place is drawn from p, which is right for every draft made without u(TARGET), where the draft cannot come
             from its q (chances not finite, q(x) = 0) and where nothing is left. A greedy row's p and q are one-hot.

Shapes
    logits               [R, V]         the target's, one row per place; rows may be strided; V <= 2^19
    chances              [R, V]         what each draft was drawn from; rows of -1 may hold anything
    drafts               [R] int64      the token to judge, which the NEXT place of its request carries; -1: none
    temperature, top_k, top_p, min_p, seeds, positions      as in kernels/sample.py, for both distributions
    verify returns       [R] int64      -1 where the largest logit is not finite

    tokens               [T] int64      what was drawn at each place, or -1: there the path ends
    ids                  [T] int64      the token that each place carries; of a row's first place: not read
    parents              [T] int32      the place before, counted from the row's first; before its own
    starts               [B+1] int32    row b owns places starts[b] : starts[b + 1]; on a GPU at most 64
    accepted             [T] bool       or None: places that continue their parent's whatever was drawn there
    most                 int            places of the longest path: a tree's depth + 1
    walk returns         [B, most] int64    places in order, the first is starts[b]; -1 behind the path's end. Of
                                        several paths the longest, of equals the one whose last place comes first

Cost     verify reads a row of each as often as sample reads one, and both once more. walk is one program per row:
         places are bits of a word, and a level of the tree is a shift and a sum.
Sources  Leviathan et al. 2023 (arXiv:2211.17192); Chen et al. 2023 (arXiv:2302.01318).
Story    notebooks/11_speculative_decoding.ipynb
"""

import torch

from minserve.kernels import check_packed, on_triton, tl, triton
from minserve.kernels.sample import (
    ACCEPT,
    COOLEST,
    HOTTEST,
    _best_of,
    _cuts,
    _kept,
    _sum_kept,
    _uniform,
    check_rows,
    drawn,
    uniform,
    weights_reference,
)

LEFT = 2.0**52  # positive parts of p - q sum to 1 at most
MOST_PLACES = 64  # of a row: bits of a word
BLOCK = 4096


# ---------------------------------------------------------------- the definitions
def verify_reference(logits, chances, drafts, temperature, top_k, top_p, min_p, seeds, positions):
    cuts = temperature, top_k, top_p, min_p
    p, q = (weights_reference(x, *cuts) for x in (logits, chances))  # [R, V]
    x = drafts.clamp(0, logits.shape[1] - 1)[:, None]  # [R, 1]
    shares = [w.double() / w.sum(-1, keepdim=True) for w in (p, q)]
    p_x, q_x = (share.gather(1, x)[:, 0] for share in shares)
    judged = (x[:, 0] == drafts) & (q_x > 0) & chances.float().amax(-1).isfinite()
    kept = judged & (uniform(seeds, positions, ACCEPT) * q_x < p_x)
    left = ((shares[0] - shares[1]).clamp(min=0) * LEFT).long()  # [R, V]
    left = torch.where((judged & left.any(-1))[:, None], left, p)
    token = torch.where(kept, drafts, drawn(left, uniform(seeds, positions)))
    return torch.where(logits.float().amax(-1).isfinite(), token, -1)


def walk_reference(tokens, ids, parents, starts, most: int, accepted=None):
    paths, at = [], starts.tolist()
    drawn, carried, before = tokens.tolist(), ids.tolist(), parents.tolist()
    anyway = [False] * len(drawn) if accepted is None else accepted.tolist()
    for start, end in zip(at, at[1:]):
        reached = {start: [start]} if start < end else {}  # place -> the path to it
        for c in range(start + 1, end):
            path = reached.get(start + before[c])
            if path and len(path) < most and drawn[path[-1]] >= 0:
                if anyway[c] or carried[c] == drawn[path[-1]]:
                    reached[c] = [*path, c]
        path = max(reached.values(), key=len, default=[])
        paths.append(path + [-1] * (most - len(path)))
    return torch.tensor(paths, dtype=torch.int64, device=tokens.device).view(-1, most)


# ---------------------------------------------------------------- the kernels
# fmt: off
@triton.jit
def _remainder(weight, total, chance, chances):
    """The positive part of p - q, of one tile: what a token has left that is drawn in place of a draft."""
    more = weight.to(tl.float64) / total.to(tl.float64) - chance.to(tl.float64) / chances.to(tl.float64)
    return (tl.maximum(more, 0.0) * 4503599627370496.0).to(tl.int64)                           # [BLOCK], 2^52


@triton.jit
def _verify_kernel(
    logits_ptr, chances_ptr, drafts_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    out_ptr, logits_stride, chances_stride, coolest, hottest,
    ACCEPT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):
    # Who am I?  One program = one place: a row of logits, one of chances, one draft.
    r = tl.program_id(0).to(tl.int64)
    row_ptr, q_ptr = logits_ptr + r * logits_stride, chances_ptr + r * chances_stride
    temperature, draft = tl.load(temperature_ptr + r), tl.load(drafts_ptr + r)
    best, first, broken = _best_of(row_ptr, V, BLOCK)
    if broken:
        tl.store(out_ptr + r, -1)
    elif temperature < coolest:
        tl.store(out_ptr + r, first.to(tl.int64))
    else:
        # What do both keep?  Without a draft, or with chances that are none, there is no q.
        cool = tl.minimum(temperature, hottest)
        top_k, top_p = tl.load(top_k_ptr + r), tl.load(top_p_ptr + r)
        least = tl.ceil(tl.load(min_p_ptr + r) * 17179869184.0).to(tl.int64)
        edge, ties = _cuts(row_ptr, best, cool, top_k, top_p, V, BLOCK)
        total = _sum_kept(row_ptr, best, cool, edge, ties, least, V, BLOCK)
        q_best, q_edge, q_ties, q_total = best, edge, ties, total
        judged = draft >= 0
        if judged:
            q_best, _, q_broken = _best_of(q_ptr, V, BLOCK)
            judged = q_broken == 0
            if judged:
                q_edge, q_ties = _cuts(q_ptr, q_best, cool, top_k, top_p, V, BLOCK)
                q_total = _sum_kept(q_ptr, q_best, cool, q_edge, q_ties, least, V, BLOCK)

        # Is the draft kept, and how much is left of p without q?
        p_x, q_x, rest = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        if judged:
            left, q_left = ties, q_ties
            for start in range(0, V, BLOCK):
                weight, on_edge = _kept(row_ptr, start, best, cool, edge, left, least, V, BLOCK)
                chance, q_on_edge = _kept(q_ptr, start, q_best, cool, q_edge, q_left, least, V, BLOCK)
                own = start + tl.arange(0, BLOCK) == draft                                     # [BLOCK]
                p_x += tl.sum(tl.where(own, weight, 0), axis=0)
                q_x += tl.sum(tl.where(own, chance, 0), axis=0)
                rest += tl.sum(_remainder(weight, total, chance, q_total), axis=0)
                left -= on_edge
                q_left -= q_on_edge
        u = _uniform(seeds_ptr, positions_ptr, r, ACCEPT)
        p, q = p_x.to(tl.float64) / total.to(tl.float64), q_x.to(tl.float64) / q_total.to(tl.float64)
        if (q_x > 0) & (u * q < p):
            tl.store(out_ptr + r, draft)
        else:
            # Who wins instead?  As in sample, with tickets for what is left, or for p where there was nothing to judge.
            judged = (q_x > 0) & (rest > 0)
            tickets = tl.where(judged, rest, total)
            u = _uniform(seeds_ptr, positions_ptr, r, 0)
            target = tl.minimum((u * tickets.to(tl.float64)).to(tl.int64), tickets - 1)
            passed, token = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
            left, q_left = ties, q_ties
            for start in range(0, V, BLOCK):
                weight, on_edge = _kept(row_ptr, start, best, cool, edge, left, least, V, BLOCK)
                left -= on_edge
                if judged:
                    chance, q_on_edge = _kept(q_ptr, start, q_best, cool, q_edge, q_left, least, V, BLOCK)
                    weight = _remainder(weight, total, chance, q_total)
                    q_left -= q_on_edge
                token += tl.sum((tl.cumsum(weight, axis=0) + passed <= target).to(tl.int64), axis=0)
                passed += tl.sum(weight, axis=0)
            tl.store(out_ptr + r, token)


@triton.jit
def _walk_kernel(
    tokens_ptr, ids_ptr, parents_ptr, starts_ptr, accepted_ptr, path_ptr, most, BLOCK: tl.constexpr,
):
    # Who am I?  One program = one row; its places are bits of a word, and lanes.
    b = tl.program_id(0)
    start = tl.load(starts_ptr + b)
    places = tl.load(starts_ptr + b + 1) - start
    c = tl.arange(0, BLOCK)                                                                    # [BLOCK]
    child = (c > 0) & (c < places)                                                             # [BLOCK]
    parent = tl.load(parents_ptr + start + c, mask=child, other=0)                             # [BLOCK]
    drawn = tl.load(tokens_ptr + start + parent, mask=child, other=-1)                         # [BLOCK]
    follows = tl.load(ids_ptr + start + c, mask=child, other=-1) == drawn                      # [BLOCK]
    if accepted_ptr is not None:
        follows = follows | (tl.load(accepted_ptr + start + c, mask=child, other=0) != 0)
    follows = follows & (drawn >= 0) & child                                                   # [BLOCK]

    # How far does it go?  Down the tree, level by level; the last place that is reached first ends the path.
    level = (places > 0).to(tl.int64)
    depth, end = level.to(tl.int32), 0
    for step in range(1, most):
        reached = follows & ((level >> parent.to(tl.int64) & 1) == 1)                          # [BLOCK]
        level = tl.sum(tl.where(reached, tl.full([], 1, tl.int64) << c.to(tl.int64), 0), axis=0)
        if level != 0:
            depth = step + 1
            end = tl.min(tl.where(reached, c, BLOCK), axis=0)
    for step in range(0, most):
        at = most - 1 - step
        on = at < depth
        tl.store(path_ptr + b.to(tl.int64) * most + at, tl.where(on, start + end, -1).to(tl.int64))
        before = tl.load(parents_ptr + start + end, mask=on & (at > 0), other=0)
        end = tl.where(on, before, end)
# fmt: on


# ---------------------------------------------------------------- the launchers
def verify(logits, chances, drafts, temperature, top_k, top_p, min_p, seeds, positions):
    """One token per place. Shapes: see the module docstring."""
    cuts, numbers = (temperature, top_k, top_p, min_p), (seeds, positions)
    check_rows("verify", logits, *cuts, *numbers, drafts=drafts)
    check_packed("verify", 1, chances=chances)
    if chances.shape != logits.shape or chances.device != logits.device:
        raise ValueError(
            f"verify: chances {list(chances.shape)} on {chances.device} must have a row for each of the logits, "
            f"{list(logits.shape)} on {logits.device}; a draft without chances is -1 in drafts"
        )
    if not on_triton(logits):
        return verify_reference(logits, chances, drafts, *cuts, *numbers)
    (R, V), out = logits.shape, torch.empty_like(drafts)
    if R:
        block = min(BLOCK, triton.next_power_of_2(V))
        _verify_kernel[(R,)](
            logits, chances, drafts, *cuts, *numbers, out, logits.stride(0), chances.stride(0),
            COOLEST, HOTTEST, ACCEPT=ACCEPT, V=V, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out


def walk(tokens, ids, parents, starts, most: int, accepted=None):
    """The path of each row through the places of its tree. Shapes: see the module docstring."""
    T = tokens.shape
    named = dict(tokens=tokens, ids=ids, parents=parents, starts=starts, accepted=accepted)
    types = torch.int64, torch.int64, torch.int32, torch.int32, torch.bool
    for (name, x), dtype, shape in zip(named.items(), types, (T, T, T, starts.shape, T)):
        if x is not None and (
            x.ndim != 1
            or x.shape != shape
            or x.dtype != dtype
            or x.device != tokens.device
            or not x.is_contiguous()
        ):
            raise ValueError(
                f"walk: {name} is {list(x.shape)} {x.dtype} on {x.device}; it must be {list(shape)} {dtype} on "
                f"{tokens.device}, contiguous, to go with {len(tokens)} places"
            )
    if most < 1 or not len(starts):
        raise ValueError(
            f"walk: {most} places per path and {len(starts)} starts; there must be 1 at least of each"
        )
    if not on_triton(tokens):
        return walk_reference(tokens, ids, parents, starts, most, accepted)
    B = len(starts) - 1
    path = torch.empty((B, most), dtype=torch.int64, device=tokens.device)
    if B:
        _walk_kernel[(B,)](tokens, ids, parents, starts, accepted, path, most, BLOCK=MOST_PLACES, num_warps=1)
    return path
