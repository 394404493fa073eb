"""GPTQ: round a weight's columns one after the other, and let the later ones make up for the error of each.

    what is lost     tr((W - W') H (W - W')^T)        H = sum over calibration tokens of x x^T
    for every column c:
        e      = (w_c - round(w_c)) / U_cc            U upper triangular, U^T U = H^-1
        w_j   -= e U_cj     for j > c                 the best that the columns still free can do

The optimal update (of Optimal Brain Surgeon) needs the inverse of H over the columns still free, a new one after each
column; row c of U is just what it needs of it, and U is computed once. Updates inside a block of columns are made at
once, what follows the block gets its sum in one matmul. A group's scales are taken from its weights as they are when
its turn comes. Rows are independent: all of them are rounded together.

Damping      a share of H's mean diagonal is added to it; where that is not enough, ten times as much, and it is said
Dead columns their input was 0 in all of the calibration: rounded to nearest, since nothing is known about them
Act-order    columns in the order of falling H_cc: those that matter are rounded while many are left to make up for
             them. Groups are neighbours in that order, which is stored

Cost     O(K^3 + N K^2) flops, 2 N K + 2 K^2 floats
Sources  Frantar et al. 2022 (arXiv:2210.17323) algorithm 1; Hassibi and Stork 1992 for the update it starts from
Story    notebooks/09_quantization.ipynb
"""

import warnings

import torch

from minserve.quantization import Scheme, grid

DAMPINGS = 4  # tries, each with ten times the damping of the one before


def gptq(weight, hessian, scheme: Scheme, damping: float = 0.01, block: int = 128, act_order: bool = False):
    """weight [N, K], hessian [K, K] -> (integers [N, K], scales [N, Q], zeros [N, Q] or None, order [K] or None)"""
    check_hessian(hessian, weight.shape[1])
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else None
    if act_order:
        weight, hessian = weight[:, order], hessian[order][:, order]
    n, k = weight.shape
    factor = inverse_factor(hessian, damping)  # U
    left = weight.float().T.contiguous()  # [K, N]: a column of the weight is a row here
    integers = torch.empty(k, n, dtype=scheme.dtype, device=weight.device)
    grids = []
    for first in range(0, k, scheme.columns(k)):
        end = min(first + scheme.columns(k), k)
        grids.append(grid(left[first:end].T, scheme, weight.dtype))
        scale, zero = (None if x is None else x[:, 0] for x in grids[-1])
        for start in range(first, end, block):
            stop = min(start + block, end)
            errors = left.new_empty(stop - start, n)
            for c in range(start, stop):
                integers[c] = scheme.round(left[c], scale, zero)
                error = (left[c] - scheme.restore(integers[c], scale, zero)) / factor[c, c]
                left[c + 1 : stop] -= factor[c, c + 1 : stop, None] * error
                errors[c - start] = error
            left[stop:] -= factor[start:stop, stop:].T @ errors
    scales, zeros = (None if x[0] is None else torch.cat(x, 1) for x in zip(*grids))
    return integers.T.contiguous(), scales, zeros, order


def inverse_factor(hessian, damping: float):
    """U, upper triangular, with U^T U = (H + damping)^-1, from one Cholesky factorisation.

    Turned around, H = R R^T with an upper R instead of the usual lower one, and U is the inverse of that R.
    """
    k, mean = len(hessian), hessian.diagonal().mean()
    for more in (10**i for i in range(DAMPINGS)):
        damped = hessian.float().clone()
        damped.diagonal().add_(mean * damping * more if mean > 0 else 1.0)
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            eye = torch.eye(k, device=hessian.device)
            return torch.linalg.solve_triangular(lower, eye, upper=False).flip(0, 1)
        warnings.warn(
            f"the Hessian is not positive definite with damping {damping * more:g}: trying ten times as much",
            stacklevel=2,
        )
    raise ValueError(
        f"the Hessian [{k}, {k}] is not positive definite, not even with {damping * more:g} of its mean diagonal "
        f"({mean:.3g}) added.\n  Calibrate with more tokens than the {k:,} inputs, or with more damping."
    )


def check_hessian(hessian, k: int) -> None:
    if hessian.shape != (k, k):
        raise ValueError(f"a weight with {k} inputs needs a Hessian [{k}, {k}], not {list(hessian.shape)}")
    if not torch.isfinite(hessian).all():
        bad = int((~torch.isfinite(hessian).all(1)).sum())
        raise ValueError(
            f"the Hessian has numbers that are not finite in {bad:,} of {k:,} rows: an activation overflowed during "
            "calibration.\n  Load the model in bfloat16 or float32 (float16 ends at 65,504), or use another text."
        )
