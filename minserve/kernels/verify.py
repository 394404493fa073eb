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
Doubt        A place is drawn from p, which is right for every draft made without u(TARGET), where a draft cannot come
             from its q (chances not finite, q(x) = 0), where nothing is left, and for greedy rows.

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

from minserve.kernels import check_packed
from minserve.kernels.sample import ACCEPT, GREEDY_BELOW, check_rows, drawn, uniform, weights_reference

LEFT = 2.0**52  # positive parts of p - q sum to 1 at most


# ---------------------------------------------------------------- the definitions
def verify_reference(logits, chances, drafts, temperature, top_k, top_p, min_p, seeds, positions):
    cuts = temperature, top_k, top_p, min_p
    p, q = (weights_reference(x, *cuts) for x in (logits, chances))  # [R, V]
    x = drafts.clamp(0, logits.shape[1] - 1)[:, None]  # [R, 1]
    shares = [w.double() / w.sum(-1, keepdim=True) for w in (p, q)]
    p_x, q_x = (share.gather(1, x)[:, 0] for share in shares)
    judged = (x[:, 0] == drafts) & (q_x > 0) & chances.float().amax(-1).isfinite()
    judged &= temperature >= GREEDY_BELOW
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
    return verify_reference(logits, chances, drafts, *cuts, *numbers)


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
    return walk_reference(tokens, ids, parents, starts, most, accepted)
