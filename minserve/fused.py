"""The same forward pass in fewer, larger pieces: the fast road beside model.py, which stays the one to read first.

    x, residual = rms_norm(embed[tokens])
    for each layer:
        qkv  = W_qkv x                            one matmul where there were three
        q    = rope_and_write(qkv)                norm, turn, store keys and values: one pass
        x    = W_o attend(q)
        x, residual = add_rms_norm(x, residual)
        x    = W_down silu_mul(W_gate_up x)       one matmul where there were two
        x, residual = add_rms_norm(x, residual)
    logits = W_head x                             only for rows that sample

    CUDA                       Triton kernels, and cuBLAS for the matmuls
    a CPU with a compiler      kernels/native.cpp, and a matmul chosen by the number of rows (Linear, below)
    elsewhere                  the definitions: nothing gained, nothing lost

Weights  q, k, v and gate, up are laid side by side *in place*: the plain model's parameters become views of the fused
         tensors, so both models live on one copy. In bfloat16, on a CPU without a matrix unit, all matmuls' weights are
         held a second time, in the blocks that oneDNN wants; `packed_bytes` says how much that is.
Exact    In fp32 the tokens are the plain path's. In 16 bits the roundings fall differently: against the same weights
         computed in fp32, the worst logit is at most 1.5 times as far off as the plain path's, and the root mean
         square at most 1.05 times, whichever matmul runs (tests/test_fused.py).
Story    notebooks/08_the_engine.ipynb
"""

import time

import torch
from torch import nn
from torch.nn.functional import linear

from minserve.kernels import native
from minserve.kernels.rms_norm import add_rms_norm, rms_norm
from minserve.kernels.rope_and_write import rope_and_write
from minserve.kernels.silu_mul import silu_mul
from minserve.model import Model
from minserve.quantization import QuantLinear
from minserve.quantized_linear import QuantizedLinear, alike, joined

FEW = (1, 2, 4, 8, 16)  # rows at which the two matmuls of a CPU are compared
TILED = 128  # with a matrix unit: up to so many rows native.linear keeps up with F.linear (`bench linear`)


class Kernels:
    """The operations of a step, each its launcher: Triton where that runs, the definition where not."""

    rms_norm, add_rms_norm = staticmethod(rms_norm), staticmethod(add_rms_norm)
    rope_and_write, linear = staticmethod(rope_and_write), staticmethod(linear)

    @staticmethod
    def embed(table, ids):
        return table[ids]

    @staticmethod
    def silu_mul(gate_up):
        return silu_mul(*gate_up.chunk(2, dim=-1))


class FusedModel:
    """Call it with a batch's ids, positions, and a cache's `targets` and `look`; get logits [rows, V]."""

    def __init__(self, model: Model, room: int):
        """`room`: positions that a request may have; their angles are tabulated."""
        self.model, self.config, self.room = model, model.config, room
        why_not = native.usable() if model.device.type == "cpu" else "the model is on a GPU"
        usable = not why_not and model.dtype in (torch.float32, torch.bfloat16)
        self.native = native.Native() if usable else None
        self.ops = self.native or Kernels()
        self.turns = self._turns(room)
        self.layers = [self._fuse(layer) for layer in model.layers]
        self.head = Linear(self.ops, model.head) if self.config.tied else self._linear([model.lm_head])
        self.places = places(model)
        if self.native and model.dtype == torch.bfloat16 and not self.ops.matrix_units:
            self._pack()

    @classmethod
    def of(cls, model: Model, room: int) -> "FusedModel":
        """The model's own one: engines that share a model share its fused and its packed weights."""
        known = model.__dict__.get("_fused")
        if known is None or known.places != places(model):  # .to() and .data = ... move the weights away
            model.__dict__["_fused"] = known = cls(model, room)
        if known.room < room:
            known.room, known.turns = room, known._turns(room)
        return known

    def _turns(self, room: int):
        """Cosines, then sines, of every position's angles: [room, D] fp32."""
        return torch.cat(self.model.rotations(torch.arange(room, device=self.model.device)), -1)

    def _fuse(self, layer):
        attention, mlp = layer.self_attn, layer.mlp
        norms = [attention.q_norm.weight, attention.k_norm.weight] if self.config.qk_norm else [None, None]
        linears = (
            [attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj], [mlp.down_proj],
        )  # fmt: skip
        return *map(self._linear, linears), norms

    def _linear(self, parts):
        if all(isinstance(part, nn.Linear) for part in parts):
            return Linear(self.ops, *side_by_side(parts))
        if all(isinstance(part, QuantLinear) for part in parts) and alike(parts):
            return QuantizedLinear(self.native, joined(parts))
        return Apart(parts if len(parts) == 1 else [self._linear([part]) for part in parts])

    @property
    def linears(self) -> list:
        return [one for layer in self.layers for one in layer[:4]] + [self.head]

    @property
    def dense(self) -> list["Linear"]:
        return [one for one in self.linears if isinstance(one, Linear)]

    @property
    def few(self) -> int:
        """Steps of up to so many tokens are native calls and nothing else: they can be recorded."""
        return min(one.few for one in self.linears)

    @property
    def packed_bytes(self) -> int:
        """What is held a second time."""
        return sum(one.packed.nbytes for one in self.linears if one.packed is not None)

    @torch.inference_mode()
    def __call__(self, ids, positions, targets, look, rows=None):
        """rows [R]: the places that get logits, all if None. Returns [R, V]."""
        return self.scores(self.states(ids, positions, targets, look, rows))

    @torch.inference_mode()
    def states(self, ids, positions, targets, look, rows=None):
        """All but the head: what the last norm leaves of each row, [R, E]."""
        slots, caches = targets
        ops, eps, model = self.ops, self.config.norm_eps, self.model
        residual = ops.embed(model.embed_tokens.weight, ids)  # [T, E]
        x = ops.rms_norm(residual, model.layers[0].input_layernorm.weight, eps)
        for i, (qkv, o, gate_up, down, norms) in enumerate(self.layers):
            q = ops.rope_and_write(qkv(x), self.turns, positions, slots, *caches(i), *norms, eps)
            x, last = look(i, q).view(len(q), -1), i + 1 == len(self.layers)
            if last and rows is not None:
                x, residual = x[rows], residual[rows]  # nobody asks what the others would become
            x, residual = ops.add_rms_norm(
                o(x), residual, model.layers[i].post_attention_layernorm.weight, eps
            )
            x = down(ops.silu_mul(gate_up(x)))
            norm = model.norm if last else model.layers[i + 1].input_layernorm
            x, residual = ops.add_rms_norm(x, residual, norm.weight, eps)
        return x

    @torch.inference_mode()
    def scores(self, x):
        """The head: logits [R, V] of states [R, E]."""
        return self.head(x)

    # ---------------------------------------------------------------- two matmuls, and where they cross
    def _pack(self) -> None:
        """Give every matmul its second layout, and measure up to how many rows the first is the faster one."""
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return
        for one in self.dense:
            one.packed = torch.ops.mkldnn._reorder_linear_weight(one.weight)
        few = self.crossover()
        for one in self.dense:
            one.few = few

    def crossover(self) -> int:
        """Up to how many rows native.linear beats oneDNN on this machine; 0 if it does not at one.

        In turn, and no further than where it first loses: the two round differently, so a neighbour's work during this
        measurement would make answers of this process differ from another's.
        """
        some, best = self.dense[:32], 0
        for rows in FEW:
            inputs = [torch.ones(rows, one.weight.shape[1], dtype=one.weight.dtype) for one in some]
            kinds = Linear.by_native, Linear.by_onednn
            rounds = [[clock(kind, some, inputs) for kind in kinds] for _ in range(4)]
            ours, theirs = map(min, zip(*rounds))
            if ours >= theirs:
                break
            best = rows
        return best


def clock(kind, linears, inputs) -> float:
    start = time.perf_counter()
    for one, x in zip(linears, inputs):
        kind(one, x)
    return time.perf_counter() - start


class Linear:
    """x W^T + b, by the matmul that is fastest for the number of rows."""

    def __init__(self, ops, weight, bias=None):
        self.ops, self.weight, self.bias = ops, weight, bias  # [N, K], [N]
        self.packed, self.few = None, 0
        if isinstance(ops, native.Native):
            self.few = TILED if ops.matrix_units and weight.dtype == torch.bfloat16 else FEW[-1]

    def __call__(self, x):
        if len(x) <= self.few:
            return self.by_native(x)
        return linear(x, self.weight, self.bias) if self.packed is None else self.by_onednn(x)

    def by_native(self, x):
        """Every weight read once from its natural layout, for all rows."""
        return self.ops.linear(x, self.weight, self.bias)

    def by_onednn(self, x):
        """Weights laid in blocks beforehand: faster for many rows, and a second copy."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class Apart:
    """Linears of one input that cannot become one: they are quantized differently, or multiply integers (W8A8)."""

    few, packed = 0, None

    def __init__(self, linears: list):
        self.linears = linears

    def __call__(self, x):
        return torch.cat([one(x) for one in self.linears], dim=-1)


def places(model: Model) -> list[int]:
    """Where its weights are."""
    return [weight.data_ptr() for weight in (*model.parameters(), *model.buffers())]


def side_by_side(parts):
    """One weight [sum of N, K] and bias for several linears of one input, which become views of it. No copy stays."""
    if len(parts) == 1:
        return parts[0].weight.data, parts[0].bias
    fused = []
    for name in ("weight", "bias"):
        pieces = [getattr(part, name) for part in parts]
        if pieces[0] is None:
            fused.append(None)
            continue
        fused.append(torch.cat([piece.data for piece in pieces]))
        for piece, view in zip(pieces, fused[-1].split([len(piece) for piece in pieces])):
            piece.data = view
    return fused
