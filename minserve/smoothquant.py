"""SmoothQuant: 8 bits for weights and activations, once the activations' outliers have moved into the weights.

    y = (q_x . q_w^T) * scale_x * scale_w        q_x [M, K], q_w [N, K] int8, sums exact in int32
    scale_x = max|x| / 127 of each token, when it comes; scale_w = max|w| / 127.5 of each row, once

One channel a hundred times larger than the others leaves these a hundredth of the integers. Channels cannot have a
scale of their own (it would stand inside the sum), but they can be made smaller where they come from, and the weights'
columns larger in turn:

    x_j / s_j    w_j * s_j        s_j = max|x_j|^a / max|w_j|^(1 - a)       a = 0.5 shares the difficulty

Folded as in AWQ, into norms and the rows of v_proj and up_proj; in powers of two, which no dtype has to round.

Cost     2 M N K integer operations, at twice the rate of 16 bits where the matrix units have int8; K bytes a row
Sources  Xiao et al. 2022 (arXiv:2211.10438)
Story    notebooks/09_quantization.ipynb
"""

import torch
from torch import nn

from minserve.kernels.w8a8_matmul import w8a8_matmul
from minserve.quantization import Feed, Scheme, fold, heads_of, quantize


def smooth(layer, feed: Feed, largest, alpha: float = 0.5) -> None:
    """Move outliers from activations to weights, in place; `largest` [K] is max|x_j| over the calibration."""
    fold(layer, feed, factors(feed.weight(layer), largest, alpha, heads_of(layer, feed)))


def factors(weight, largest, alpha: float, heads=None):
    """s [K / R] for weight [N, K] and its inputs' largest values [K]; powers of two, 1 where a channel is dead."""
    G, R, D = heads or (1, 1, weight.shape[1])
    x, w = (m.float().view(G, R, D).amax(1).flatten() for m in (largest, weight.abs().amax(0)))
    s = (x**alpha / w ** (1 - alpha)).log2().round().exp2()
    return torch.where((x > 0) & (w > 0), s, 1.0)


def quantize_tokens(x):
    """x [.., K] -> (int8 [.., K], scales fp32 [..]), a scale for each row; a row of zeros stays zeros."""
    scales = x.float().abs().amax(-1) / 127
    q = (x.float() / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round()
    return q.clamp(-127, 127).to(torch.int8), scales


class W8A8Linear(nn.Module):
    """A linear layer that multiplies integers: weights once, activations as they come."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        qweight, scales, _ = quantize(linear.weight.detach(), Scheme(8), torch.float32)
        self.register_buffer("qweight", qweight)  # [N, K] int8
        self.register_buffer("scales", scales[:, 0])  # [N]
        self.bias = linear.bias

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in [*self.buffers(), *self.parameters()])

    def dequantize(self):
        """fp32 [N, K]"""
        return self.qweight.float() * self.scales[:, None]

    def forward(self, x):
        q, scales = quantize_tokens(x.reshape(-1, self.in_features))
        out = w8a8_matmul(q, scales, self.qweight, self.scales, self.bias, x.dtype)
        return out.view(*x.shape[:-1], self.out_features)
