"""What int4_matmul and int8_matmul share: the definition, the checks."""

import torch
import torch.nn.functional as F

from minserve.kernels import check_packed

STORED = {4: (torch.int32, torch.uint8), 8: (torch.int8, torch.int8)}  # bits -> dtypes of qweight and zeros


# ---------------------------------------------------------------- the definition
def grouped(numbers, scales, zeros, group: int | None):
    """(numbers - zero) * scale in fp32, a scale and a zero for every `group` columns of a row: [N, K]."""
    K = numbers.shape[1]
    scales, zeros = (
        None if x is None else x.float().repeat_interleave(min(group or K, K), 1)[:, :K]
        for x in (scales, zeros)
    )
    return (numbers.float() - (0 if zeros is None else zeros)) * scales


def multiplied(x, weight, bias):
    """x . weight + bias in fp32, rounded once: [M, N]."""
    return F.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


# ---------------------------------------------------------------- bad input
def check(who: str, bits: int, x, qweight, scales, zeros, group, bias) -> None:
    kind, kind_of_zeros = STORED[bits]
    if x.ndim != 2 or qweight.ndim != 2:
        raise ValueError(
            f"{who}: x {list(x.shape)} and qweight {list(qweight.shape)} must be [rows, in] and [out, packed in]"
        )
    (_, K), (N, held) = x.shape, qweight.shape
    if held != -(-K * bits // (8 * kind.itemsize)):
        raise ValueError(
            f"{who}: qweight {list(qweight.shape)} holds {held * 8 * kind.itemsize // bits} columns at {bits} bits, "
            f"and x {list(x.shape)} has {K}"
        )
    if group is not None and (group < 1 or bits == 4 and group % 8 and group < K):
        raise ValueError(
            f"{who}: groups of {group} columns; a group is 1 column or more, and at 4 bits a multiple of 8, for the 8 "
            f"columns of a word share a scale; None takes the whole row. Quantize with a group such as 32, 64 or 128"
        )
    Q = -(-K // min(group or K, K)) if K else 0
    for name, its, dtypes, shape in [
        ("qweight", qweight, [kind], (N, held)),
        ("scales", scales, [*dict.fromkeys((x.dtype, torch.float32))], (N, Q)),
        ("zeros", zeros, [kind_of_zeros], (N, Q)),
        ("bias", bias, [x.dtype], (N,)),
    ]:
        if its is not None and (its.dtype not in dtypes or its.shape != shape or its.device != x.device):
            raise ValueError(
                f"{who}: {name} is {list(its.shape)} {its.dtype} on {its.device}; x {list(x.shape)} {x.dtype}, {N} "
                f"outputs and groups of {group or K} columns need {list(shape)} {' or '.join(map(str, dtypes))} "
                f"on {x.device}"
            )
        if its is not None and name != "qweight":
            check_packed(who, its.ndim, **{name: its})
    check_packed(who, 1, x=x, qweight=qweight)
