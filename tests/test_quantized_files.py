"""Checkpoints packed by hand, in loops, from each format's description, are read as the numbers they stand for.

The packing here shares no line with minserve's. Each wrong reader at the end must fail the same check.
"""

import itertools
import json
import random
import types
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from minserve import quantized_files
from minserve.model import Model
from minserve.quantization import QuantLinear
from minserve.quantized_files import READS
from minserve.weights import load, load_config

LLAMA = dict(
    model_type="llama", vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word, from its lowest nibble


# ---------------------------------------------------------------- packing, from the formats' descriptions
def word(values, bits):
    """Unsigned values, the first in the lowest bits, as the signed 32-bit integer that has those bits."""
    bits = sum(value << bits * i for i, value in enumerate(values))
    return bits - 2**32 if bits >= 2**31 else bits


def words(values, bits):
    per = 32 // bits
    return [word(values[i : i + per], bits) for i in range(0, len(values), per)]


def ints(rows, dtype=torch.int32):
    return torch.tensor(rows, dtype=dtype)


def transposed(rows):
    return [list(column) for column in zip(*rows)]


class Packed:
    """One weight: unsigned integers q [N][K], zeros z [N][Q], scales s [N][Q], groups[k]; what they stand for."""

    def __init__(self, n, k, bits, group, symmetric, scattered=False, seed=0, dtype=torch.float32):
        draw = random.Random(f"{n} {k} {bits} {group} {symmetric} {seed}")
        self.n, self.k, self.bits, self.group = n, k, bits, group or k
        self.symmetric, top = symmetric, 2**bits
        self.groups = [i // self.group for i in range(k)]
        if scattered:
            draw.shuffle(self.groups)
        count = max(self.groups) + 1
        self.q = [[draw.randrange(top) for _ in range(k)] for _ in range(n)]
        self.z = [[top // 2 if symmetric else (i + 3 * g) % top for g in range(count)] for i in range(n)]
        self.s = [[draw.uniform(0.01, 0.1) for _ in range(count)] for _ in range(n)]
        self.scales = torch.tensor(self.s).to(dtype)

    def weight(self):
        scales = self.scales.float().tolist()
        return torch.tensor(
            [
                [(self.q[n][k] - self.z[n][g]) * scales[n][g] for k, g in enumerate(self.groups)]
                for n in range(self.n)
            ]
        )

    def pack_quantized(self):
        made = {"weight_packed": ints([words(row, self.bits) for row in self.q]), "weight_scale": self.scales}
        made["weight_shape"] = torch.tensor([self.n, self.k])
        if not self.symmetric:
            made["weight_zero_point"] = ints(transposed([words(c, self.bits) for c in transposed(self.z)]))
        if self.groups != sorted(self.groups):
            made["weight_g_idx"] = ints(self.groups)
        return made

    def int_quantized(self):
        made = {"weight": ints([[q - 128 for q in row] for row in self.q], torch.int8)}
        made["weight_scale"] = self.scales
        if not self.symmetric:
            made["weight_zero_point"] = ints([[z - 128 for z in row] for row in self.z], torch.int8)
        return made

    def gptq(self, less=1):
        """less: what is subtracted from the zero points as they are stored, 1 in version 1."""
        zeros = [[(z - less) % 2**self.bits for z in column] for column in transposed(self.z)]
        return {
            "qweight": ints(transposed([words(row, self.bits) for row in self.q])),
            "qzeros": ints([words(row, self.bits) for row in zeros]),
            "scales": self.scales.T.contiguous(),
            "g_idx": ints(self.groups),
        }

    def gptq_v2(self):
        return self.gptq(less=0)

    def awq(self):
        def row(values):
            eights = [values[i : i + 8] for i in range(0, len(values), 8)]
            return [word([eight[c] for c in AWQ_COLUMNS], 4) for eight in eights]

        return {
            "qweight": ints([row(column) for column in transposed(self.q)]),
            "qzeros": ints([row(column) for column in transposed(self.z)]),
            "scales": self.scales.T.contiguous(),
        }


def config_for(kind, bits, group, symmetric):
    if kind in ("gptq", "gptq_v2"):
        common = dict(bits=bits, group_size=group or -1, sym=symmetric, desc_act=True)
        return dict(quant_method="gptq", checkpoint_format=kind, **common)
    if kind == "awq":
        return dict(quant_method="awq", version="gemm", bits=4, group_size=group or -1, zero_point=True)
    weights = dict(num_bits=bits, type="int", symmetric=symmetric, strategy="group" if group else "channel")
    weights |= dict(group_size=group, dynamic=False)
    return dict(
        quant_method="compressed-tensors", format=kind, ignore=["lm_head"],
        config_groups={"group_0": dict(targets=["Linear"], weights=weights, input_activations=None)},
    )  # fmt: skip


CASES = [
    ("pack-quantized", 4, 16, True, False), ("pack-quantized", 4, 16, False, False),
    ("pack-quantized", 4, None, True, False), ("pack-quantized", 4, 32, False, False),
    ("pack-quantized", 4, 16, True, True), ("pack-quantized", 8, 16, True, False),
    ("pack-quantized", 8, None, False, False), ("int-quantized", 8, None, True, False),
    ("int-quantized", 8, None, False, False), ("int-quantized", 8, 16, True, False),
    ("gptq", 4, 16, True, False), ("gptq", 4, 16, False, False), ("gptq", 4, 16, False, True),
    ("gptq", 4, 32, True, True), ("gptq", 4, None, True, False), ("gptq", 8, 16, True, True),
    ("gptq", 8, 16, False, False), ("gptq_v2", 4, 16, True, False), ("gptq_v2", 4, 16, False, True),
    ("gptq_v2", 8, None, False, False), ("awq", 4, 16, False, False), ("awq", 4, None, False, False),
    ("awq", 4, 32, False, False),
]  # fmt: skip  # groups of 32 are ragged where K is 48


def linear_of(n, k, bias=None):
    linear = nn.Linear(k, n, bias=bias is not None)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def read(files, kind, packed: Packed, config=None, dtype=torch.float32, parts=None):
    """One layer through `files`, a module like quantized_files."""
    parts = parts or getattr(packed, kind.replace("-", "_"))()
    config = config or config_for(kind, packed.bits, packed.group, packed.symmetric)
    found = {f"layers.0.x.{part}" for part in parts}
    linear = linear_of(packed.n, packed.k)
    layout = files.layouts({"quantization_config": config}, ["layers.0.x"], found)["layers.0.x"]
    asked = layout.parts("layers.0.x", linear, found)
    assert set(asked) == found, "the manifest is not what the file holds"
    for name, (shape, _) in asked.items():
        assert tuple(parts[name.removeprefix("layers.0.x.")].shape) == shape, name
    return files.read("layers.0.x", layout, parts, linear, dtype)


def check(files):
    """Every format, in every variant, gives exactly the numbers it was packed from."""
    for (kind, bits, group, symmetric, scattered), k in itertools.product(CASES, (48, 64)):
        if not (scattered and k % group):
            packed = Packed(24, k, bits, group, symmetric, scattered)
            layer = read(files, kind, packed)
            case = f"{kind} {bits} bits, group {group}, symmetric {symmetric}, g_idx {scattered}, K {k}"
            assert torch.equal(layer.dequantize(), packed.weight()), case
            assert (layer.order is not None) == scattered, case
            assert (layer.zeros is None) == symmetric == layer.scheme.symmetric, case
    for kind, lie in (("gptq", "gptq_v2"), ("gptq_v2", "gptq")):
        packed = Packed(16, 32, 4, 16, True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            layer = read(files, kind, packed, config_for(lie, 4, 16, True))
        assert torch.equal(layer.dequantize(), packed.weight()) and len(said) == 1
    packed = Packed(8, 32, 4, 16, False, dtype=torch.float16)
    layer = read(files, "awq", packed, dtype=torch.bfloat16)
    assert layer.scales.dtype == torch.float32 and torch.equal(layer.dequantize(), packed.weight())


def test_every_format_is_what_it_was_packed_from():
    check(quantized_files)


# ---------------------------------------------------------------- the cases by hand
@pytest.mark.parametrize("kind, stored", [("gptq", 7), ("gptq_v2", 8)])
def test_a_symmetric_8_is_zero_in_both_versions(kind, stored):
    parts = {"qweight": ints([[word([8] * 8, 4)] * 8]), "qzeros": ints([[word([stored] * 8, 4)]])}
    parts["scales"] = torch.full((1, 8), 0.5)
    layer = read(quantized_files, kind, Packed(8, 8, 4, None, True), parts=parts)
    assert (layer.dequantize() == 0).all()


def test_mislabelled_zero_points_are_said_and_only_where_they_are_certain():
    packed = Packed(16, 32, 4, 16, True)
    with pytest.warns(
        UserWarning, match="says gptq and symmetric, and every stored zero point is the middle of"
    ):
        read(quantized_files, "gptq_v2", packed, config_for("gptq", 4, 16, True))
    packed.z[0][0] = 7  # not symmetric at all, so the label is believed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = read(quantized_files, "gptq_v2", packed, config_for("gptq", 4, 16, True))
    assert torch.equal(layer.zeros.float() - 1, torch.tensor(packed.z).float())


def test_g_idx_by_hand():
    packed = Packed(8, 16, 4, 8, False)
    packed.groups = [0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0]
    packed.scales = torch.tensor([[1.0, 10.0]] * 8)
    packed.q = [[packed.z[n][g] + 1 for g in packed.groups] for n in range(8)]
    layer = read(quantized_files, "gptq", packed)
    assert layer(torch.eye(16))[:, 0].tolist() == [10.0 if g else 1.0 for g in packed.groups]
    assert layer.order.tolist() == [k for k, g in enumerate(packed.groups) if not g] + [
        k for k, g in enumerate(packed.groups) if g
    ]


def test_groups_of_the_wrong_size_have_no_order():
    packed = Packed(8, 32, 4, 16, True)
    packed.groups[0] = 1
    with pytest.raises(
        ValueError, match="g_idx makes groups of 15, 17 channels; 32 channels in int4 g16 need 16"
    ):
        read(quantized_files, "gptq", packed)


def test_scales_that_the_activations_cannot_hold_stay_fp32():
    packed = Packed(8, 32, 4, 16, False, dtype=torch.float16)
    assert read(quantized_files, "awq", packed, dtype=torch.bfloat16).scales.dtype == torch.float32
    packed.scales = packed.scales.bfloat16().half()
    layer = read(quantized_files, "awq", packed, dtype=torch.bfloat16)
    assert layer.scales.dtype == torch.bfloat16 and torch.equal(layer.dequantize(), packed.weight())


# ---------------------------------------------------------------- whole folders
def folder_of(path: Path, kind, bits=4, group=16, symmetric=True, *, scattered=False, dense=(), change=None):
    """(folder, the same model with the same weights in fp32)."""
    path.mkdir()
    config = LLAMA | {"quantization_config": config_for(kind, bits, group, symmetric), "dtype": "float32"}
    if change:
        change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))
    plain = Model.random(load_config(path))
    state = {}
    for name, module in plain.named_modules():
        full = name if name == "lm_head" else f"model.{name}"
        if isinstance(module, nn.Linear) and name not in ("lm_head", *dense):
            packed = Packed(module.out_features, module.in_features, bits, group, symmetric, scattered, name)
            module.weight.copy_(packed.weight())
            parts = getattr(packed, kind.replace("-", "_"))()
            state |= {f"{full}.{part}": tensor for part, tensor in parts.items()}
        elif hasattr(module, "weight"):
            state[f"{full}.weight"] = module.weight.clone()
    save_file(state, path / "model.safetensors")
    return path, plain


def logits(model):
    def attend(layer, q, k, v):
        return nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
        ).transpose(0, 1)

    return model(torch.arange(9), torch.arange(9), attend)


@pytest.mark.parametrize(
    "kind, bits, scattered",
    [("pack-quantized", 4, False), ("int-quantized", 8, False), ("gptq", 4, True), ("awq", 4, False)],
)
def test_a_folder_is_the_model_it_was_made_from(tmp_path, kind, bits, scattered):
    folder, plain = folder_of(tmp_path / "m", kind, bits, None if bits == 8 else 16, scattered=scattered,
                              symmetric=kind != "awq")  # fmt: skip
    model = load(folder)
    assert isinstance(model.lm_head, nn.Linear) and isinstance(model.layers[0].mlp.up_proj, QuantLinear)
    assert not any(x.is_meta for x in [*model.parameters(), *model.buffers()])
    torch.testing.assert_close(logits(model), logits(plain), atol=1e-4, rtol=1e-4)


def test_layers_that_the_file_leaves_dense(tmp_path):
    dense = ("layers.0.self_attn.o_proj", "layers.0.mlp.down_proj")
    folder, plain = folder_of(tmp_path / "a", "gptq", dense=dense)
    model = load(folder)
    assert type(model.layers[0].self_attn.o_proj) is type(plain.layers[0].self_attn.o_proj)
    torch.testing.assert_close(logits(model), logits(plain), atol=1e-4, rtol=1e-4)

    def ignore(quantized):
        quantized["ignore"] += ["model.layers.0.self_attn.o_proj", "re:.*down_proj"]

    folder, plain = folder_of(tmp_path / "b", "pack-quantized", dense=dense, change=ignore)
    torch.testing.assert_close(logits(load(folder)), logits(plain), atol=1e-4, rtol=1e-4)


def test_a_layer_that_should_be_quantized_and_is_not_is_missed(tmp_path):
    folder, _ = folder_of(tmp_path / "m", "pack-quantized", dense=("layers.0.mlp.down_proj",))
    with pytest.raises(ValueError) as error:
        load(folder)
    assert "2 of 25 tensors missing: layers.0.mlp.down_proj.weight_packed" in str(error.value)
    assert "not part of this architecture: layers.0.mlp.down_proj.weight" in str(error.value)


def test_shapes_and_types_are_checked(tmp_path):
    from safetensors.torch import load_file

    folder, _ = folder_of(tmp_path / "m", "pack-quantized")
    whole = load_file(folder / "model.safetensors")
    for part, wrong, message in (
        ("weight_scale", torch.ones(32, 3), r"weight_scale is \[32, 3\] and config.json asks for \[32, 2\]"),
        ("weight_packed", torch.ones(32, 4), "weight_packed is F32; config.json lets it be I32 only"),
        (
            "weight_shape",
            torch.tensor([32, 31]),
            r"weight_shape is \[32, 31\] and config.json asks for \[32, 32\]",
        ),
    ):
        save_file(whole | {f"model.layers.0.self_attn.q_proj.{part}": wrong}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load(folder)


def test_a_name_goes_before_a_pattern_and_a_pattern_before_the_class():
    groups = config_for("pack-quantized", 4, 16, True)["config_groups"]
    weights = groups["group_0"]["weights"]
    config = dict(quant_method="compressed-tensors", format="mixed-precision", config_groups={
        "a": dict(targets=["Linear"], format="pack-quantized", weights=weights),
        "b": dict(targets=["re:.*mlp.*"], format="pack-quantized", weights=weights | dict(group_size=32)),
        "c": dict(targets=["model.layers.1.mlp.up_proj", "lm_head"], format="int-quantized",
                  weights=weights | dict(num_bits=8, strategy="channel", group_size=None)),
    })  # fmt: skip
    names = ["lm_head", "layers.1.mlp.up_proj", "layers.0.mlp.up_proj", "layers.0.self_attn.q_proj"]
    got = quantized_files.layouts({"quantization_config": config}, names, set())
    assert [str(got[name].scheme) for name in names] == ["int8 per channel"] * 2 + ["int4 g32", "int4 g16"]
    assert [got[name].kind for name in names] == ["int-quantized"] * 2 + ["pack-quantized"] * 2


# ---------------------------------------------------------------- refused by name
def changed(kind, bits=4, /, **changes):
    config = config_for(kind, bits, 16, True)
    for key, value in changes.items():
        where = config
        if key.startswith("weights_"):
            where, key = config["config_groups"]["group_0"]["weights"], key.removeprefix("weights_")
        elif key.endswith("_activations"):
            where = config["config_groups"]["group_0"]
        where[key] = value
    return config


REFUSED = [
    (dict(quant_method="bitsandbytes", load_in_4bit=True), "bitsandbytes"),
    (dict(quant_method="fp8"), "fp8"),
    (dict(quant_method="gguf"), "gguf"),
    (dict(quant_method="modelopt"), "modelopt"),
    (dict(bits=4), "an unnamed method"),
    (changed("gptq", bits=3), "gptq in 3 bits, groups of 16"),
    (changed("gptq", checkpoint_format="marlin"), "gptq in the format marlin"),
    (changed("gptq", is_marlin_format=True), "gptq in the format marlin"),
    (changed("gptq", dynamic={"-:.*down.*": {}}), "gptq with `dynamic` settings"),
    (changed("gptq", pack_dtype="int64"), "gptq packed in int64"),
    (changed("gptq", group_size=12), "groups of 12"),
    (changed("awq", version="gemv"), "awq, version gemv"),
    (changed("awq", version="marlin"), "awq, version marlin"),
    (changed("awq", bits=8), "in 8 bits"),
    (changed("pack-quantized", format="nvfp4-pack-quantized"), "compressed-tensors nvfp4-pack-quantized"),
    (changed("pack-quantized", format="marlin-24"), "compressed-tensors marlin-24"),
    (changed("pack-quantized", format="float-quantized"), "compressed-tensors float-quantized"),
    (changed("pack-quantized", weights_num_bits=3), "in 3 bits"),
    (changed("pack-quantized", weights_type="float"), "of 4-bit floats"),
    (changed("pack-quantized", weights_strategy="tensor"), "with one scale per tensor"),
    (changed("int-quantized", 4), "int-quantized of 4-bit ints"),
    (
        changed("int-quantized", 8, input_activations=dict(num_bits=8, dynamic=False)),
        "fixed scales of activations",
    ),
    (changed("int-quantized", 8, output_activations=dict(num_bits=8)), "fixed scales of activations"),
    (changed("pack-quantized", sparsity_config=dict(format="sparse-24-bitmask")), "a sparsity_config"),
    (changed("pack-quantized", transform_config=dict(config_groups={})), "a transform_config"),
    (changed("pack-quantized", kv_cache_scheme=dict(num_bits=8)), "a kv_cache_scheme"),
]


@pytest.mark.parametrize("config, message", REFUSED, ids=[message for _, message in REFUSED])
def test_refused_by_name(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": config}))
    save_file({"model.layers.0.mlp.up_proj.qweight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        load(tmp_path, torch.float32)
    said = str(error.value)
    assert message in said and str(tmp_path) in said and READS in said


# ---------------------------------------------------------------- wrong readers
WRONG = [
    ("the places of awq inverted", "AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]", "AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]"),
    ("awq in order", "AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]", "AWQ_PLACES = list(range(8))"),
    ("v1 zeros as they are", 'lower = layout.kind == "gptq"', "lower = False"),
    ("v2 zeros moved", 'lower = layout.kind == "gptq"', "lower = True"),
    ("16 for 0", "zeros + 1 & 15", "zeros + 1"),
    ("a label always believed", "scheme.symmetric and (zeros ==", "False and (zeros =="),
    ("zeros transposed in words", "_fields(zeros.T, bits, n).T", "_fields(zeros, bits, zeros.shape[1])[:n]"),
    ("8 bits signed as they are", "^ 128).view(torch.int8)", ").view(torch.int8)"),
    ("g_idx forgotten", "order = _order(name,", "order = None and _order(name,"),
    ("columns not sorted", "integers if order is None else integers[:, order]", "integers"),
    ("activations not sorted", "scheme, linear.bias, order)", "scheme, linear.bias)"),
    ("sorted twice", "integers[:, order]", "integers[:, order][:, order]"),
    ("zeros dropped", "zeros = None if zeros is None or", "zeros = None if True or"
     ),
    ("scales not transposed", 'scheme.bits, k), parts["scales"].T', 'scheme.bits, k), parts["scales"].reshape(n, -1)'),
    ("scales always rounded", "if torch.equal(exact.float(), scales.float()) else", "if True else"),
]  # fmt: skip


def wrong(old, new):
    source = Path(quantized_files.__file__).read_text()
    assert old in source, f"no such line: {old}"
    module = types.ModuleType("wrong")
    exec(compile(source.replace(old, new), "wrong", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("old, new", [pair for _, *pair in WRONG], ids=[name for name, *_ in WRONG])
def test_wrong_readers_are_noticed(old, new):
    with warnings.catch_warnings(), pytest.raises((AssertionError, RuntimeError, ValueError)):
        warnings.simplefilter("ignore")
        check(wrong(old, new))
