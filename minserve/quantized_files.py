"""Quantized layers as files hold them: four ways to pack the same integers, told apart by config.json.

    compressed-tensors   what minserve writes (quantize.py); transformers and vLLM read it
        pack-quantized   weight_packed [N, K*b/32] int32, packed along K; weight_scale [N, Q]
                         weight_zero_point [N*b/32, Q] int32, packed along N; weight_shape [2]
        int-quantized    weight [N, K] int8; weight_scale [N, Q]; weight_zero_point [N, Q] int8
    gptq                 qweight [K*b/32, N] int32, packed along K; scales [Q, N]; g_idx [K]: an input channel's group
                         qzeros [Q, N*b/32], packed along N, one too low in "gptq" and as they are in "gptq_v2"
    awq (gemm)           qweight [K, N/8] and qzeros [Q, N/8], packed along N; scales [Q, N]
                         a word's nibbles hold, from the lowest, its columns 0 2 4 6 1 3 5 7

Packed values are unsigned with the lowest bits first, in 4 or 8 bits (b). Symmetric zeros are the middle and are left
out where the format allows it. A name that is none of these is refused, and so is every setting that would change the
numbers. One is left to the reader's hardware: `int-quantized` asks for inputs rounded to 8 bits as well, which is the
only form in which vLLM takes 8-bit weights without packing; minserve multiplies the inputs as they come.

Shapes   N outputs, K inputs, Q = ceil(K / group)
Cost     one read, one repack; nothing for 4 bits of compressed-tensors, whose layout is QuantLinear's own
Sources  https://github.com/vllm-project/compressed-tensors; GPTQModel's and AutoAWQ's packing code
Story    notebooks/09_quantization.ipynb
"""

import re
import warnings
from typing import NamedTuple

import torch
from torch import nn

from minserve.quantization import QuantLinear, Scheme, unpack

READS = "compressed-tensors (pack-quantized, int-quantized), GPTQ and AWQ (gemm), of 4 or 8 bits"
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where columns 0 .. 7 lie in a word
FLOATS, INT32, INTS = ("BF16", "F16", "F32"), ("I32",), ("I32", "I64")


class Layout(NamedTuple):
    kind: str  # pack-quantized, int-quantized, gptq, gptq_v2, awq
    scheme: Scheme

    def parts(self, name: str, linear: nn.Linear, found: set[str]) -> dict[str, tuple]:
        """Tensor -> (shape, dtypes): what a file holds of the layer; of what it need not hold, only what is `found`."""
        n, k = linear.out_features, linear.in_features
        groups = -(-k // self.scheme.columns(k))
        words = lambda count: -(-count * self.scheme.bits // 32)
        if self.kind == "pack-quantized":
            asked = {"weight_packed": ((n, words(k)), INT32), "weight_scale": ((n, groups), FLOATS)}
            zeros = ((words(n), groups), INT32)
        elif self.kind == "int-quantized":
            asked = {"weight": ((n, k), ("I8",)), "weight_scale": ((n, groups), FLOATS)}
            zeros = ((n, groups), ("I8",))
        else:
            qweight = (k, words(n)) if self.kind == "awq" else (words(k), n)
            asked = {"qweight": (qweight, INT32), "scales": ((groups, n), FLOATS)}
            asked |= {"qzeros": ((groups, words(n)), INT32)}
        if "weight_scale" in asked and not self.scheme.symmetric:
            asked["weight_zero_point"] = zeros
        optional = {"weight_shape": ((2,), INTS), "weight_g_idx": ((k,), INTS), "g_idx": ((k,), INTS)}
        asked |= {part: what for part, what in optional.items() if f"{name}.{part}" in found}
        return {f"{name}.{part}": what for part, what in asked.items()}


# ---------------------------------------------------------------- what config.json says
def layouts(config: dict, linears: list[str], found: set[str]) -> dict[str, Layout]:
    """Layer -> how it is stored, for those of `linears` that are quantized; `found` are the file's tensors."""
    quantized = config.get("quantization_config") or config.get("compression_config")
    if not quantized:
        return {}
    method = quantized.get("quant_method")
    if method == "compressed-tensors":
        layout_of = _compressed_tensors(quantized)
        return {name: layout for name in linears if (layout := layout_of(name))}
    if method in ("gptq", "awq"):
        layout = (_gptq if method == "gptq" else _awq)(quantized)
        return {name: layout for name in linears if f"{name}.qweight" in found}
    refuse(method or "an unnamed method")


def refuse(what: str):
    raise ValueError(
        f"this checkpoint's weights are quantized by {what}, which minserve does not read.\n"
        f"  It reads {READS}; or use the unquantized checkpoint it was made from."
    )


def _scheme(who: str, bits, group, symmetric: bool) -> Scheme:
    try:
        return Scheme(bits, None if group in (None, -1) else group, symmetric)
    except ValueError as error:
        refuse(f"{who} in {bits} bits, groups of {group} ({error})")


def _gptq(quantized: dict) -> Layout:
    kind = quantized.get("checkpoint_format", "gptq")
    if quantized.get("is_marlin_format") or kind not in ("gptq", "gptq_v2"):
        refuse(f"gptq in the format {'marlin' if quantized.get('is_marlin_format') else kind}")
    if quantized.get("dynamic"):
        refuse("gptq with `dynamic` settings, other ones for each layer,")
    if quantized.get("pack_dtype", "int32") != "int32":
        refuse(f"gptq packed in {quantized['pack_dtype']}")
    return Layout(
        kind, _scheme("gptq", quantized.get("bits"), quantized.get("group_size"), quantized.get("sym", True))
    )


def _awq(quantized: dict) -> Layout:
    version = str(quantized.get("version", "gemm")).lower()
    if version != "gemm" or quantized.get("bits") != 4:
        refuse(f"awq, version {version}, in {quantized.get('bits')} bits")
    return Layout("awq", _scheme("awq", 4, quantized.get("group_size"), False))


def _compressed_tensors(quantized: dict):
    """The function layer -> Layout or None; an exact name decides before a pattern, a pattern before the class."""
    for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        if quantized.get(key):
            refuse(f"compressed-tensors with a {key}")
    groups = [
        (target, _group(group, quantized.get("format")))
        for group in quantized["config_groups"].values()
        for target in group["targets"]
    ]

    def layout_of(name: str) -> Layout | None:
        name = name if name == "lm_head" else f"model.{name}"
        if any(_match(name, pattern) for pattern in quantized.get("ignore") or ()):
            return None
        ranked = [(rank, layout) for target, layout in groups if (rank := _match(name, target))]
        return min(ranked, key=lambda pair: pair[0], default=(0, None))[1]

    return layout_of


def _match(name: str, target: str) -> int:
    if target.startswith("re:"):
        return 2 if re.match(target[3:], name) else 0
    return 1 if target == name else 3 if target == "Linear" else 0


def _group(group: dict, file_format: str | None) -> Layout:
    kind, weights = group.get("format") or file_format, group["weights"]
    who = f"compressed-tensors {kind}"
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if kind not in ("pack-quantized", "int-quantized"):
        refuse(who)
    if weights.get("type", "int") != "int" or (kind == "int-quantized" and bits != 8):
        refuse(f"{who} of {bits}-bit {weights.get('type', 'int')}s")
    if strategy not in (None, "group", "channel"):
        refuse(f"{who} with one scale per {strategy}")
    inputs = group.get("input_activations")
    if group.get("output_activations") or (inputs and not inputs.get("dynamic")):
        refuse(f"{who} with fixed scales of activations")
    scheme = _scheme(who, bits, weights.get("group_size"), weights.get("symmetric", True))
    return Layout(kind, scheme)


# ---------------------------------------------------------------- tensors of a file -> QuantLinear
def read(name: str, layout: Layout, parts: dict, linear: nn.Linear, dtype) -> QuantLinear:
    """The layer that `parts` (checked against Layout.parts) hold; `linear` gives its size and its bias."""
    scheme, (n, k) = layout.scheme, (linear.out_features, linear.in_features)
    if (shape := parts.get("weight_shape")) is not None and shape.tolist() != [n, k]:
        raise ValueError(f"{name}: weight_shape is {shape.tolist()} and config.json asks for {[n, k]}")
    stored = {"pack-quantized": _from_packed, "int-quantized": _from_plain, "awq": _from_awq}
    integers, scales, zeros = stored.get(layout.kind, _from_gptq)(name, layout, parts, n, k)
    zeros = None if zeros is None or (zeros == scheme.middle).all() else zeros.contiguous()
    scheme = Scheme(scheme.bits, scheme.group, zeros is None)
    exact = scales.to(dtype)  # a kernel takes scales of the activations' dtype, or fp32
    scales = (exact if torch.equal(exact.float(), scales.float()) else scales.float()).contiguous()
    order = _order(name, parts.get("g_idx", parts.get("weight_g_idx")), scheme, k)
    if layout.kind == "pack-quantized" and scheme.bits == 4 and k % 8 == 0 and order is None:
        return QuantLinear(parts["weight_packed"], scales, zeros, None, linear.bias, k, scheme)
    integers = integers if order is None else integers[:, order]
    return QuantLinear.of(integers.contiguous(), scales, zeros, scheme, linear.bias, order)


def _fields(words, bits: int, count: int):
    """int32 [R, C] -> [R, count] as QuantLinear has them: uint8 of 4 bits, or int8, 128 lower than they are packed."""
    words = words.clone(
        memory_format=torch.contiguous_format
    )  # of one word, a transpose counts as contiguous
    return unpack(words, count) if bits == 4 else (words.view(torch.uint8) ^ 128).view(torch.int8)[:, :count]


def _from_packed(_name, layout: Layout, parts, n: int, k: int):
    bits, zeros = layout.scheme.bits, parts.get("weight_zero_point")
    zeros = None if zeros is None else _fields(zeros.T, bits, n).T
    return _fields(parts["weight_packed"], bits, k), parts["weight_scale"], zeros


def _from_plain(_name, _layout, parts, _n, _k):
    return parts["weight"], parts["weight_scale"], parts.get("weight_zero_point")


def _from_awq(_name, _layout, parts, n: int, _k):
    integers, zeros = (
        unpack(parts[name], -(-n // 8) * 8).view(-1, n // 8, 8)[..., AWQ_PLACES].flatten(1).T
        for name in ("qweight", "qzeros")
    )
    return integers, parts["scales"].T, zeros


def _from_gptq(name, layout: Layout, parts, n: int, k: int):
    scheme = layout.scheme
    zeros, middle = _fields(parts["qzeros"], scheme.bits, n).T, scheme.middle
    lower = layout.kind == "gptq"  # v1 stores zero - 1
    if scheme.symmetric and (zeros == (middle if lower else middle - 1)).all():
        other = "gptq_v2" if lower else "gptq"
        warnings.warn(
            f"{name}: config.json says {layout.kind} and symmetric, and every stored zero point is the middle of "
            f"{other}; read as {other}, for the other reading moves every weight by one step",
            stacklevel=2,
        )
        lower = not lower
    if lower:
        zeros = zeros + 1 if scheme.bits == 8 else zeros + 1 & 15  # 255, or 15, stands for 0
    return _fields(parts["qweight"].T, scheme.bits, k), parts["scales"].T, zeros


def _order(name: str, groups, scheme: Scheme, k: int):
    """The order that makes a layer's groups neighbours, or None if they are already."""
    wanted = torch.arange(k) // scheme.columns(k)
    if groups is None or torch.equal(groups := groups.cpu().long(), wanted):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], wanted):
        sizes = sorted(set(groups.unique(return_counts=True)[1].tolist()))
        raise ValueError(
            f"{name}: g_idx makes groups of {', '.join(map(str, sizes))} channels; {k} channels in {scheme} need "
            f"{scheme.columns(k)} in each, so there is no order in which they are neighbours"
        )
    return order
