"""A weight in fewer bits: integers, one scale for each group of columns, and the linear layer that holds them.

    w ~ (q - zero) * scale        q in 0..15 (4 bits) or -128..127 (8 bits), rounded to nearest

A group is `group` neighbouring columns of one row; None makes the whole row one group ("per channel"). The last group
may be shorter. Symmetric: zero is the middle, 8 or 0, and is not stored; scale = max|w| / 7.5 or / 127.5, so that the
largest weight, too, is at most half a step from its integer. Asymmetric: the groups' least and largest weight, and 0,
are hit.

Shapes   N outputs, K inputs, Q = ceil(K / group)
    4 bits   qweight [N, ceil(K/8)] int32, eight nibbles a word, the lowest first: column 8 * i + j is bits 4j .. 4j+3
             of word i, unsigned; nibbles past K are 8. zeros [N, Q] uint8 or None
    8 bits   qweight [N, K] int8. zeros [N, Q] int8 or None
    scales   [N, Q] in the weight's dtype: integers are computed from the scale as it is stored
    order    [K] int64 or None: column j of qweight is input channel order[j]   (act-order, see gptq.py)

Cost     4 bits: K/2 + Q * itemsize bytes a row, 8 bits: K + Q * itemsize; a decode step reads nothing else
Sources  Gholami et al. 2021, a survey (arXiv:2103.13630); the layout of compressed-tensors' `pack-quantized`
Story    notebooks/09_quantization.ipynb
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from minserve.kernels.int4_matmul import int4_matmul
from minserve.kernels.int8_matmul import int8_matmul

LOWEST = {4: 0, 8: -128}  # of the stored integers
MIDDLE = {4: 8, 8: 0}  # what stands for zero when the scheme is symmetric


@dataclass(frozen=True)
class Scheme:
    bits: int
    group: int | None = None  # columns that share a scale; None: the whole row
    symmetric: bool = True

    def __post_init__(self):
        if self.bits not in LOWEST:
            raise ValueError(f"{self.bits} bits are not supported: minserve stores weights in 4 or 8")
        if self.group is not None and (self.group < 8 or self.group % 8):
            raise ValueError(
                f"a group of {self.group} columns is not supported: eight 4-bit columns share a word, so a group "
                "must be a multiple of 8 (usual: 32, 64, 128), or None for the whole row"
            )

    def __str__(self):
        return f"int{self.bits} " + ("per channel" if self.group is None else f"g{self.group}")

    def columns(self, k: int) -> int:
        """Columns of a group, in a row of k."""
        return min(self.group or k, k)

    @property
    def middle(self) -> int:
        return MIDDLE[self.bits]

    @property
    def dtype(self):
        return torch.uint8 if self.bits == 4 else torch.int8

    def round(self, weight, scales, zeros=None):
        """The nearest integers; `scales` and `zeros` shaped to be broadcast with `weight`."""
        zeros = self.middle if zeros is None else zeros.float()
        low = LOWEST[self.bits]
        q = (weight.float() / scales.float()).round_().add_(zeros)
        return q.clamp_(low, low + 2**self.bits - 1).to(self.dtype)

    def restore(self, integers, scales, zeros=None):
        """fp32 weights of the integers; shaped to be broadcast, as in `round`."""
        zeros = self.middle if zeros is None else zeros.float()
        return (integers.float() - zeros) * scales.float()


# ---------------------------------------------------------------- rounding to nearest
def quantize(weight, scheme: Scheme, dtype=None, shrink=1.0):
    """(integers [N, K] uint8 or int8, scales [N, Q], zeros [N, Q] or None), each weight rounded to the nearest."""
    scales, zeros = grid(weight, scheme, dtype, shrink)
    return scheme.round(weight, *spread(scales, zeros, scheme, weight.shape[1])), scales, zeros


def grid(weight, scheme: Scheme, dtype=None, shrink=1.0):
    """(scales [N, Q] in `dtype`, zeros or None): where the integers lie; `shrink` [N, Q] < 1 clips a group's ends."""
    dtype = dtype or weight.dtype
    if not torch.isfinite(weight).all():
        bad = int((~torch.isfinite(weight)).sum())
        raise ValueError(f"{bad:,} of {weight.numel():,} weights are not finite: there is no scale for them")
    n, k = weight.shape
    columns = scheme.columns(k)
    padded = nn.functional.pad(weight.float(), (0, -k % columns))
    low, high = (x.clamp_(*at0) * shrink for x, at0 in zip(_ends(padded, n, columns), ((None, 0), (0, None))))
    span = high - low if not scheme.symmetric else 2 * torch.maximum(high, -low)
    # a row of zeros still needs a scale to be divided by
    scales = (span / (2**scheme.bits - 1)).clamp_min(torch.finfo(dtype).tiny).to(dtype)
    if scheme.symmetric:
        return scales, None
    lowest = LOWEST[scheme.bits]
    zeros = (lowest - low / scales.float()).round().clamp_(lowest, lowest + 2**scheme.bits - 1)
    return scales, zeros.to(scheme.dtype)


def _ends(padded, n: int, columns: int):
    """Least and largest weight of every group, [N, Q] each."""
    return padded.view(n, -1, columns).aminmax(dim=-1)


def spread(scales, zeros, scheme: Scheme, k: int):
    """The same, one for every column: [N, K] each."""
    columns = scheme.columns(k)
    return tuple(None if x is None else x.repeat_interleave(columns, 1)[:, :k] for x in (scales, zeros))


def restore(integers, scales, zeros, scheme: Scheme):
    """fp32 [N, K], columns as they are stored."""
    return scheme.restore(integers, *spread(scales, zeros, scheme, integers.shape[1]))


# ---------------------------------------------------------------- nibbles in words
def pack(nibbles):
    """uint8 [N, K] -> int32 [N, ceil(K/8)]"""
    if nibbles.numel() and nibbles.max() > 15:
        raise ValueError(f"a nibble is 0 to 15, and the largest here is {int(nibbles.max())}")
    n, k = nibbles.shape
    padded = nn.functional.pad(nibbles, (0, -k % 8), value=MIDDLE[4]).view(n, -1, 4, 2)
    low, high = padded.unbind(-1)
    return (low | high << 4).contiguous().view(torch.int32).view(n, -1)  # the first byte is the lowest


def unpack(words, k: int):
    """int32 [N, ceil(k/8)] -> uint8 [N, k]"""
    data = words.contiguous().view(torch.uint8)
    return torch.stack((data & 15, data >> 4), -1).flatten(1)[:, :k]


# ---------------------------------------------------------------- the layer
class QuantLinear(nn.Module):
    """nn.Linear over a quantized weight: y = dequantize() . x + bias, without ever holding the dequantized."""

    def __init__(self, qweight, scales, zeros, order, bias, in_features: int, scheme: Scheme):
        super().__init__()
        tensors = {"qweight": qweight, "scales": scales, "zeros": zeros, "order": order}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.in_features, self.out_features = in_features, len(qweight)
        self.scheme, self.bits, self.group = scheme, scheme.bits, scheme.group
        shape = [self.out_features, -(-in_features // 8) if self.bits == 4 else in_features]
        groups = [self.out_features, -(-in_features // scheme.columns(in_features))]
        for name, asked in (
            ("qweight", shape),
            ("scales", groups),
            ("zeros", groups),
            ("order", [in_features]),
        ):
            if tensors[name] is not None and list(tensors[name].shape) != asked:
                raise ValueError(
                    f"QuantLinear: {name} is {list(tensors[name].shape)}; {scheme} with {self.out_features} outputs "
                    f"and {in_features} inputs needs {asked}"
                )

    @classmethod
    def of(cls, integers, scales, zeros, scheme: Scheme, bias=None, order=None) -> "QuantLinear":
        """From integers that are not packed yet."""
        qweight = pack(integers) if scheme.bits == 4 else integers
        return cls(qweight, scales, zeros, order, bias, integers.shape[1], scheme)

    @property
    def nbytes(self) -> int:
        held = [*self.buffers(), *self.parameters()]
        return sum(x.numel() * x.element_size() for x in held)

    def dequantize(self):
        """fp32 [N, K], its columns in the input's own order."""
        integers = unpack(self.qweight, self.in_features) if self.bits == 4 else self.qweight
        weight = restore(integers, self.scales, self.zeros, self.scheme)
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def forward(self, x):
        shape = x.shape
        x = (x if self.order is None else x[..., self.order]).reshape(-1, self.in_features)
        matmul = int4_matmul if self.bits == 4 else int8_matmul
        out = matmul(x, self.qweight, self.scales, self.zeros, self.group, self.bias)
        return out.view(*shape[:-1], self.out_features)

    def extra_repr(self):
        return f"{self.in_features}, {self.out_features}, {self.scheme}, bias={self.bias is not None}"


def from_float(linear: nn.Linear, scheme: Scheme) -> QuantLinear:
    """A linear layer, its weight rounded to nearest."""
    return QuantLinear.of(*quantize(linear.weight.detach(), scheme), scheme, linear.bias)


# ---------------------------------------------------------------- what the clever methods share
def output_error(difference, hessian):
    """Squared error of every output, summed over the tokens of `hessian` = sum of x x^T: d H d^T.  [N]"""
    return (difference @ hessian * difference).sum(1)


class Feed(NamedTuple):
    """Linears of a layer that read the same input, and what makes it: a channel is scaled there, and unscaled here."""

    names: tuple[str, ...]
    before: str

    def weight(self, layer):
        """Their weights, one below the other: [N, K]"""
        return torch.cat([layer.get_submodule(name).weight.detach() for name in self.names])


# first those that are made by a linear: its rows are scaled before they are rounded
FEEDS = (
    Feed(("self_attn.o_proj",), "self_attn.v_proj"),
    Feed(("mlp.down_proj",), "mlp.up_proj"),
    Feed(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    Feed(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
)


def heads_of(layer, feed: Feed) -> tuple[int, int, int]:
    """(G, R, D): input g * R * D + r * D + d is made by row g * D + d of `before`. Only o_proj has R > 1."""
    inputs, before = layer.get_submodule(feed.names[0]).in_features, layer.get_submodule(feed.before)
    repeat, head = inputs // len(before.weight), layer.self_attn.head_dim
    return (inputs // (repeat * head), repeat, head) if repeat > 1 else (1, 1, inputs)


def to_inputs(factors, heads: tuple[int, int, int]):
    """[G * D], one for each row of what comes before -> [G * R * D], one for each input."""
    G, R, D = heads
    return factors.view(G, 1, D).expand(G, R, D).flatten()


def fold(layer, feed: Feed, factors) -> None:
    """Multiply the columns of the feed's linears by `factors` [K / R], and divide what comes before by them.

    What the layer computes stays.
    """
    columns = to_inputs(factors, heads_of(layer, feed))
    for name in feed.names:
        weight = layer.get_submodule(name).weight
        weight.copy_(weight.float() * columns)
    before = layer.get_submodule(feed.before)
    for x in (before.weight, getattr(before, "bias", None)):
        if x is not None:
            x.copy_(x.float() / factors.view(-1, *[1] * (x.ndim - 1)))
