"""AWQ: channels with large activations matter more, so scale them up before rounding, and down in what makes them.

    W' = round(W s) / s       a channel scaled by s loses 1/s of its rounding error, as long as its group's scale
                              stays what it was: s is a matter of measure, found by trying
    s  = rms(x)^a             a = 0 (all ones: plain rounding), 1/10, 2/10, ... as long as it helps

The division by s costs nothing: it is folded into whatever makes the channel. A norm's weight, before q, k, v and
before gate, up; the rows of v_proj before o_proj (shared by the query heads of a group); the rows of up_proj before
down_proj. A norm's weight is rounded to its dtype, and s is what it then really is.

The ends of each group are clipped, by as much as pays: its largest weights are rounded worse and the others better.
A row that does not gain by it is not clipped, and an s that makes one of its linears worse than rounded to nearest is
not taken: so none is, on the calibration. Every s is judged with its own clipping: in small models that does more than
s, and the best s without it can be worse than none with it.

Objective    tr((W - W') H (W - W')^T), as in GPTQ: H = sum of x x^T is all that is kept of the calibration
Cost         at most (EXPONENTS + 1) * (2 N K^2 + len(CLIPS) * 2 N K group) flops, usually half
Sources      Lin et al. 2023 (arXiv:2306.00978) sec. 3.2; there the input's mean |x| stands for the rms
Story        notebooks/09_quantization.ipynb
"""

import torch

from minserve.quantization import Feed, Scheme, fold, heads_of, output_error, quantize, restore, to_inputs

EXPONENTS = 10  # steps from 0 to 1
PATIENCE = 2  # steps without a gain that end the search
CLIPS = tuple(1 - i / 16 for i in range(8))  # shares of a group's largest weight; 1: no clipping


def scale(layer, feed: Feed, hessian, scheme: Scheme, dtype):
    """Fold the best factors into a layer, in place. Returns the Hessian of the inputs that its linears have now.

    `dtype` is what scales will be stored in; the linears' weights should be fp32 while they are scaled.
    """
    heads, before = heads_of(layer, feed), layer.get_submodule(feed.before).weight
    sizes = [len(layer.get_submodule(name).weight) for name in feed.names]
    factors = search_factors(feed.weight(layer), hessian, scheme, dtype, heads, before, sizes)
    fold(layer, feed, factors)
    return rescaled(hessian, to_inputs(factors, heads))


def search_factors(weight, hessian, scheme: Scheme, dtype=None, heads=None, before=None, sizes=None):
    """fp32 [K / R] for the inputs of weight [N, K]; `heads` (G, R, D): which inputs must share a factor.

    `before`: the weight that will be divided. Where it is a norm's, only factors that it can be divided by are tried.
    `sizes`: rows of each of several linears, of which none may end worse than rounded to nearest.
    """
    heads = heads or (1, 1, weight.shape[1])
    G, R, D = heads
    size = hessian.diagonal().view(G, R, D).mean(1).flatten().sqrt()  # of an activation, [K / R]
    size = torch.where(size > 0, size / size[size > 0].log().mean().exp(), 1.0).clamp(1e-4, 1e4)
    sizes = sizes or [len(weight)]
    plain = parts_of(weight, hessian, quantize(weight, scheme, dtype), scheme, sizes)
    best, best_error, behind = None, float("inf"), 0
    for i in range(EXPONENTS + 1):
        factors = size ** (i / EXPONENTS)
        if before is not None and before.ndim == 1:
            divided = (before / factors).to(before.dtype)
            factors = torch.where(divided != 0, before.float() / divided.float(), 1.0)
        each = to_inputs(factors, heads)
        scaled, its_hessian = weight.float() * each, rescaled(hessian, each)
        result = clipped(scaled, its_hessian, scheme, dtype or weight.dtype)
        errors = parts_of(scaled, its_hessian, result, scheme, sizes)
        if errors.sum() < best_error and (errors <= plain).all():
            best, best_error, behind = factors, errors.sum(), 0
        elif (behind := behind + 1) == PATIENCE:
            break
    return best


def parts_of(weight, hessian, result, scheme: Scheme, sizes: list[int]):
    """The error of every linear of a stack."""
    errors = output_error(weight - restore(*result, scheme), hessian)
    return torch.stack([part.sum() for part in errors.split(sizes)])


def rescaled(hessian, each):
    """The Hessian of inputs divided by `each`."""
    return hessian / each / each[:, None]


def clipped(weight, hessian, scheme: Scheme, dtype=None):
    """quantize(weight), each group clipped where that makes its row's error less."""
    n, k = weight.shape
    columns = scheme.columns(k)
    shrink = torch.ones(n, -(-k // columns), device=weight.device)
    least = torch.full_like(shrink, float("inf"))
    for clip in CLIPS:
        lost = weight - restore(*quantize(weight, scheme, dtype, clip), scheme)
        for q, i in enumerate(range(0, k, columns)):  # as if the other groups were exact
            error = output_error(lost[:, i : i + columns], hessian[i : i + columns, i : i + columns])
            better = error < least[:, q]
            shrink[better, q], least[better, q] = clip, error[better]
    plain, cut = (
        output_error(weight - restore(*quantize(weight, scheme, dtype, x), scheme), hessian)
        for x in (1.0, shrink)
    )
    shrink[cut >= plain] = 1.0
    return quantize(weight, scheme, dtype, shrink)
