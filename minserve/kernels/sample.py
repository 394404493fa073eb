"""Draw one token per row: temperature, top-k, top-p, min-p, and random numbers made on the spot.

    d      = max(logits) - logits                        how far behind the best, in fp32
    weight = floor(exp(-d / temperature) * 2^34)         an integer
    kept   = the first tokens in order of (d, id): at most k, as few as reach top_p of those k's weight,
             and each at least min_p times the best one's weight
    token  = the first id at which the kept weights, summed in order of id, exceed floor(u * their sum)

Why integers: a sum of floats depends on its order, and here everybody sums in another one (a sort, a histogram, tiles
on a GPU). Sums of integers below 2^53 are exact, so all roads draw the same token for the same weights. A token less
likely than 2^-34 of the best one is never drawn.

Shapes
    logits               [B, V]         rows may be strided; V <= 2^19
    temperature          [B] fp32       below GREEDY_BELOW: the largest logit (of equal ones the lowest id), no draw
    top_k                [B] int64      0, -1 or >= V: no limit
    top_p, min_p         [B] fp64       1 and 0: no limit
    seeds, positions     [B] int64      u = philox(key seed, counter position and stream): a function of these alone
    stream               int            TARGET: the tokens of an answer; DRAFT, ACCEPT: what kernels/verify.py adds
    returns              [B] int64      -1 where the largest logit is not finite (NaN anywhere in the row, all -inf)

Cost     the kernel reads a row twice for a greedy token, 4 times for a plain draw, and 31 times more for each of top-k
         and top-p: a search for the cutting d, bit by bit (the bits of a float >= 0 are in the order of the floats).
         A sort would read less but move everything; the row stays in L2.
Sources  Philox-4x32-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; nucleus sampling, Holtzman
         et al. 2020 (arXiv:1904.09751); min-p, Nguyen et al. 2024 (arXiv:2407.01082).
Story    notebooks/07_continuous_batching.ipynb
"""

import torch

from minserve.kernels import check_packed, on_triton, tl, triton
from minserve.request import GREEDY_BELOW

ONE = 2.0**34  # the best token's weight
MOST_TOKENS = 2**19  # ONE * MOST_TOKENS = 2^53: the largest sum that fp64 holds exactly
COOLEST, HOTTEST = GREEDY_BELOW, 3e38  # a larger temperature is infinite in fp32, and -inf / inf is NaN
BLOCK = 4096
TARGET, DRAFT, ACCEPT = 0, 1, 2  # streams of random numbers: as independent of each other as two seeds


# ---------------------------------------------------------------- random numbers
def philox(counter, key):
    """Philox-4x32-10: four words of 32 bits from a counter of four and a key of two. Ints, int64 arrays or tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = (
            c0 * 0xD2511F53,
            c2 * 0xCD9E8D57,
        )  # 64 bits; an int64 wraps, the masks take what is right
        c0, c1, c2, c3 = (b >> 32 ^ c1 ^ k0) & MASK, b & MASK, (a >> 32 ^ c3 ^ k1) & MASK, a & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


MASK = 0xFFFFFFFF


def uniform(seeds, positions, stream: int = TARGET):
    """u in [0, 1) with 53 bits, of a seed and a position: Python ints give a float, int64 arrays or tensors fp64."""
    counter = positions & MASK, positions >> 32 & MASK, stream, 0
    a, b, _, _ = philox(counter, (seeds & MASK, seeds >> 32 & MASK))
    bits = (a >> 5 << 26) + (b >> 6)
    return (bits.double() if torch.is_tensor(bits) else bits) * 2.0**-53


# ---------------------------------------------------------------- the definition
def weights_reference(logits, temperature, top_k, top_p, min_p):
    """The integer weight of every token, int64 [B, V]: 0 for those that cannot be drawn."""
    logits = logits.float()
    V = logits.shape[-1]
    d = logits.amax(-1, keepdim=True) - logits  # [B, V]
    cool = temperature.clamp(COOLEST, HOTTEST)[:, None]
    weight = ((-d / cool).exp() * ONE).long()  # [B, V]
    greedy = (temperature < GREEDY_BELOW)[:, None]
    best = torch.zeros_like(weight).scatter(1, logits.argmax(-1, keepdim=True), int(ONE))
    weight = torch.where(greedy, best, weight)
    if not ((top_k > 0) & (top_k < V) | (top_p < 1) | (min_p > 0)).any():
        return weight  # the sort below would be for nothing

    order = d.argsort(dim=-1, stable=True)  # most likely first, of equals the lowest id
    ordered = weight.gather(1, order)  # [B, V]
    limit = torch.where((top_k > 0) & (top_k < V), top_k, V)[:, None]
    ordered[torch.arange(V, device=logits.device) >= limit] = 0
    before = ordered.cumsum(-1) - ordered  # what the more likely ones hold already
    ordered[before.double() >= top_p[:, None] * ordered.sum(-1, keepdim=True).double()] = 0
    ordered[ordered.double() < min_p[:, None] * ONE] = 0
    return torch.zeros_like(weight).scatter(1, order, ordered)


def sample_reference(logits, temperature, top_k, top_p, min_p, seeds, positions, stream: int = TARGET):
    weights = weights_reference(logits, temperature, top_k, top_p, min_p)  # [B, V]
    token = drawn(weights, uniform(seeds, positions, stream))
    return torch.where(logits.float().amax(-1).isfinite(), token, -1)


def drawn(weights, u):
    """The token whose share of the weights u falls into, int64 [B]."""
    cumulative = weights.cumsum(-1)  # [B, V]
    target = target_of(cumulative[:, -1], u)
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def target_of(total, u):
    """Which of `total` tickets wins, int64 [B] in [0, total): u * total is the same product in fp64 everywhere."""
    return torch.minimum((u * total.double()).long(), total - 1)


# ---------------------------------------------------------------- the kernel
# fmt: off
@triton.jit
def _weigh(row_ptr, start, best, cool, V: tl.constexpr, BLOCK: tl.constexpr):
    """One tile: how far behind the best, as bits in the same order, and the weight. Past the row: last, 0."""
    i = start + tl.arange(0, BLOCK)                                                            # [BLOCK]
    x = tl.load(row_ptr + i, mask=i < V, other=-float("inf")).to(tl.float32)                   # [BLOCK]
    d = best - x                                                                               # [BLOCK]
    weight = (tl.exp(-d / cool) * 17179869184.0).to(tl.int64)                                  # [BLOCK], 2^34
    return d.to(tl.int32, bitcast=True), weight


@triton.jit
def _below(row_ptr, bits, best, cool, COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens that come before all with these `bits`: their number, or their weight."""
    amount = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, V, BLOCK):
        d, weight = _weigh(row_ptr, start, best, cool, V, BLOCK)
        amount += tl.where(d < bits, 1 if COUNT else weight, 0)
    return tl.sum(amount, axis=0)


@triton.jit
def _edge(row_ptr, need, best, cool, COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """The largest bits before which there is less than `need`: those of the last token kept. From the top bit down."""
    bits = 0
    for step in range(31):
        trial = bits | (1 << (30 - step))
        if _below(row_ptr, trial, best, cool, COUNT, V, BLOCK) < need:
            bits = trial
    return bits


@triton.jit
def _kept(row_ptr, start, best, cool, edge, ties, least, V: tl.constexpr, BLOCK: tl.constexpr):
    """One tile's weights after the cuts. Of the tokens on the edge only the first `ties` are kept; how many it had."""
    d, weight = _weigh(row_ptr, start, best, cool, V, BLOCK)
    on_edge = (d == edge).to(tl.int64)                                                         # [BLOCK]
    kept = (d < edge) | ((on_edge == 1) & (tl.cumsum(on_edge, axis=0) <= ties))                # [BLOCK]
    return tl.where(kept & (weight >= least), weight, 0), tl.sum(on_edge, axis=0)


@triton.jit
def _sum_kept(row_ptr, best, cool, edge, ties, least, V: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.full([], 0, tl.int64)
    left = ties
    for start in range(0, V, BLOCK):
        weight, on_edge = _kept(row_ptr, start, best, cool, edge, left, least, V, BLOCK)
        total += tl.sum(weight, axis=0)
        left -= on_edge
    return total


@triton.jit
def _best_of(row_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    """The best logit, who has it first, and whether the row is worthless: a NaN anywhere, or no finite best."""
    best, broken, first = -float("inf"), 0, V
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)                                                        # [BLOCK]
        x = tl.load(row_ptr + i, mask=i < V, other=-float("inf")).to(tl.float32)               # [BLOCK]
        broken += tl.sum((x != x).to(tl.int32), axis=0)
        highest = tl.max(x, axis=0)
        if highest > best:
            first = tl.min(tl.where(x == highest, i, V), axis=0)
            best = highest
    return best, first, (broken > 0) | (best == -float("inf")) | (best == float("inf"))


@triton.jit
def _cuts(row_ptr, best, cool, top_k, top_p, V: tl.constexpr, BLOCK: tl.constexpr):
    """What is kept: all that come before the edge, and the first few on it."""
    edge, ties = 0x7FFFFFFF, tl.full([], V, tl.int64)
    if (top_k > 0) & (top_k < V):
        edge = _edge(row_ptr, top_k, best, cool, True, V, BLOCK)
        ties = top_k - _below(row_ptr, edge, best, cool, True, V, BLOCK)
    if top_p < 1:
        total = _sum_kept(row_ptr, best, cool, edge, ties, 0, V, BLOCK)
        need = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        edge = _edge(row_ptr, need, best, cool, False, V, BLOCK)
        need -= _below(row_ptr, edge, best, cool, False, V, BLOCK)
        each = (tl.exp(-edge.to(tl.float32, bitcast=True) / cool) * 17179869184.0).to(tl.int64)
        ties = (need + each - 1) // each
    return edge, ties


@triton.jit
def _uniform(seeds_ptr, positions_ptr, b, STREAM: tl.constexpr):
    position = tl.load(positions_ptr + b)
    low, high, _, _ = tl.philox(
        tl.load(seeds_ptr + b).to(tl.uint64, bitcast=True),
        position.to(tl.uint32), (position >> 32).to(tl.uint32),
        tl.full([], STREAM, tl.uint32), tl.full([], 0, tl.uint32),
    )
    return ((low >> 5).to(tl.float64) * 67108864.0 + (high >> 6).to(tl.float64)) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _sample_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, out_ptr,
    logits_stride, coolest, hottest,
    STREAM: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):
    # Who am I?  One program = one row.
    b = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + b * logits_stride
    temperature = tl.load(temperature_ptr + b)
    best, first, broken = _best_of(row_ptr, V, BLOCK)
    if broken:
        tl.store(out_ptr + b, -1)
    elif temperature < coolest:
        tl.store(out_ptr + b, first.to(tl.int64))
    else:
        # Who wins?  Sum what is kept; draw a ticket; walk to its owner.
        cool = tl.minimum(temperature, hottest)
        edge, ties = _cuts(row_ptr, best, cool, tl.load(top_k_ptr + b), tl.load(top_p_ptr + b), V, BLOCK)
        least = tl.ceil(tl.load(min_p_ptr + b) * 17179869184.0).to(tl.int64)
        total = _sum_kept(row_ptr, best, cool, edge, ties, least, V, BLOCK)
        u = _uniform(seeds_ptr, positions_ptr, b, STREAM)
        target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
        passed, token = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        left = ties
        for start in range(0, V, BLOCK):
            weight, on_edge = _kept(row_ptr, start, best, cool, edge, left, least, V, BLOCK)
            token += tl.sum((tl.cumsum(weight, axis=0) + passed <= target).to(tl.int64), axis=0)
            passed += tl.sum(weight, axis=0)
            left -= on_edge
        tl.store(out_ptr + b, token)
# fmt: on


# ---------------------------------------------------------------- the launcher
def sample(logits, temperature, top_k, top_p, min_p, seeds, positions, stream: int = TARGET):
    """One token per row. Shapes: see the module docstring."""
    check_rows("sample", logits, temperature, top_k, top_p, min_p, seeds, positions)
    if not on_triton(logits):
        return sample_reference(logits, temperature, top_k, top_p, min_p, seeds, positions, stream)
    B, V = logits.shape
    out = torch.empty(B, dtype=torch.int64, device=logits.device)
    if B:
        block = min(BLOCK, triton.next_power_of_2(V))
        _sample_kernel[(B,)](
            logits, temperature, top_k, top_p, min_p, seeds, positions, out,
            logits.stride(0), COOLEST, HOTTEST, STREAM=stream, V=V, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out


def check_rows(who, logits, temperature, top_k, top_p, min_p, seeds, positions, **more) -> None:
    """`more`: other int64 arguments, one number per row."""
    check_packed(who, 1, logits=logits)
    if logits.ndim != 2 or not 0 < logits.shape[1] <= MOST_TOKENS:
        raise ValueError(
            f"{who}: logits {list(logits.shape)} must be [rows, vocabulary], with 1 to {MOST_TOKENS:,} tokens"
        )
    B, whole = len(logits), dict(top_k=top_k, seeds=seeds, positions=positions, **more)
    for dtype, named in (
        (torch.float32, dict(temperature=temperature)),
        (torch.float64, dict(top_p=top_p, min_p=min_p)),
        (torch.int64, whole),
    ):
        for name, x in named.items():
            if x.shape != (B,) or x.dtype != dtype or x.device != logits.device or not x.is_contiguous():
                raise ValueError(
                    f"{who}: {name} is {list(x.shape)} {x.dtype} on {x.device}; "
                    f"it must be [{B}] {dtype} on {logits.device}, contiguous"
                )
