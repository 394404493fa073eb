"""Loading: the manifest is believed tensor by tensor, both config spellings are read, and what is wrong is named."""

import json

import pytest
import torch
from conftest import FAMILIES
from safetensors.torch import load_file, save_file

from minserve.config import ModelConfig
from minserve.weights import load, load_config

TINY = dict(
    model_type="llama",
    vocab_size=32,
    hidden_size=24,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=6,
    max_position_embeddings=64,
)


# ---------------------------------------------------------------- config.json, v4 and v5
def test_v4_and_v5_spellings_mean_the_same(editable):
    new = load_config(editable("llama-3"))
    rope = dict(new.rope.__dict__)
    assert rope["kind"] == "llama3" and rope["factor"] == 8.0 and rope["original_context"] == 256
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    for key in ("rope_type", "type"):
        v4 = TINY | {
            "rope_theta": 10_000.0,
            "rope_scaling": scaling | {key: "llama3"},
            "torch_dtype": "float32",
        }
        config = ModelConfig.from_hf(v4)
        assert config.rope == new.rope and config.dtype == "float32"
    assert ModelConfig.from_hf(TINY | {"dtype": "bfloat16"}).dtype == "bfloat16"


def test_eos_is_the_union_of_both_files():
    config = ModelConfig.from_hf(TINY | {"eos_token_id": 3}, {"eos_token_id": [2, 9]})
    assert config.eos_token_ids == (2, 9, 3)
    assert ModelConfig.from_hf(TINY, {"eos_token_id": 0}).eos_token_ids == (0,)  # 0 is an id, not an absence
    assert ModelConfig.from_hf(TINY).eos_token_ids == ()


def test_head_dim_is_read_where_it_is_declared():
    assert ModelConfig.from_hf(TINY).head_dim == 4
    assert ModelConfig.from_hf(TINY | {"head_dim": 8}).head_dim == 8
    with pytest.raises(ValueError, match="hidden_size 25 is not a multiple of 6 heads"):
        ModelConfig.from_hf(TINY | {"hidden_size": 25})


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(model_type="mistral", sliding_window=4), (4, 4, 4)),
        (dict(model_type="mistral", sliding_window=None), (None,) * 3),
        (dict(model_type="qwen2", sliding_window=4, use_sliding_window=False), (None,) * 3),
        (
            dict(model_type="qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=2),
            (None, None, 4),
        ),
        (dict(model_type="llama", sliding_window=4), (None,) * 3),
    ],
)
def test_windows_per_layer(changes, expected):
    assert ModelConfig.from_hf(TINY | dict(num_hidden_layers=3) | changes).windows == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(model_type="gpt2"),
            "model_type is 'gpt2', which minserve does not run.\n  It runs: Llama 2/3.x",
        ),
        (dict(model_type=None), "model_type is None"),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "RoPE scaling 'yarn' is not supported"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor is not 1"),
        (dict(num_attention_heads=6, num_key_value_heads=4), "6 query heads cannot share 4 key/value heads"),
        (dict(head_dim=5), "head_dim is 5; RoPE turns channels in pairs"),
        (dict(num_hidden_layers=0), "num_layers is 0"),
    ],
)
def test_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(TINY | changes)


def test_missing_keys_are_named():
    with pytest.raises(ValueError, match="config.json has no 'vocab_size'"):
        ModelConfig.from_hf({k: v for k, v in TINY.items() if k != "vocab_size"})


# ---------------------------------------------------------------- safetensors
def shard(folder, assignment, extra=None):
    """Split model.safetensors: assignment(name) -> shard number; `extra` {shard: {name: tensor}} is added unlisted."""
    single = folder / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    parts, weight_map = {}, {}
    for name, tensor in tensors.items():
        file = f"model-{assignment(name):05}-of-00003.safetensors"
        parts.setdefault(file, {})[name] = tensor
        weight_map[name] = file
    for number, more in (extra or {}).items():
        parts[f"model-{number:05}-of-00003.safetensors"] |= more
    for file, part in parts.items():
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def by_layer(name):
    return 2 if "layers.1" in name else 3 if "layers.2" in name else 1


def same_weights(a, b):
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def test_shards_equal_a_single_file(editable, checkpoints):
    folder = editable("llama-3")
    shard(folder, by_layer)
    stray = {"model.norm.weight": torch.zeros(96)}  # not in the index
    save_file(stray, folder / "consolidated.safetensors")
    assert same_weights(load(folder), load(checkpoints("llama-3")))


@pytest.mark.parametrize("stale_in", [1, 3])
def test_the_index_decides_which_copy_counts(editable, checkpoints, stale_in):
    folder = editable("llama-3")
    stale = {"model.layers.1.mlp.up_proj.weight": torch.zeros(76, 96)}
    shard(folder, by_layer, extra={stale_in: stale})
    assert same_weights(load(folder), load(checkpoints("llama-3")))


def test_missing_shard_is_named(editable):
    folder = editable("llama-3")
    shard(folder, by_layer)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match="names 3 shards and model-00002-of-00003.safetensors is not there"
    ):
        load(folder)


def test_index_that_points_at_the_wrong_shard(editable):
    folder = editable("llama-3")
    shard(folder, by_layer)
    index = folder / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace('"model.norm.weight": "model-00001', '"model.norm.weight": "model-00003')
    )
    with pytest.raises(
        ValueError, match="says model-00003-of-00003.safetensors holds model.norm.weight, and it does not"
    ):
        load(folder)


def edit_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def test_tied_head_in_three_ways(editable, checkpoints):
    tied = load(checkpoints("smollm2"))
    assert tied.head.data_ptr() == tied.embed_tokens.weight.data_ptr()
    twice = edit_tensors(editable("smollm2"), lambda t: t.update({"lm_head.weight": torch.zeros(251, 96)}))
    assert same_weights(load(twice), tied)  # the spare copy is ignored, as the config says


def test_untied_without_a_head_is_refused(editable):
    folder = edit_tensors(editable("llama-3"), lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="1 of 30 tensors missing: lm_head.weight"):
        load(folder)


def test_missing_and_extra_tensors_are_both_named(editable):
    def change(tensors):
        tensors.pop("model.layers.2.mlp.up_proj.weight")
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(2)

    with pytest.raises(ValueError) as error:
        load(edit_tensors(editable("smollm2"), change))
    assert "1 of 29 tensors missing: layers.2.mlp.up_proj.weight" in str(error.value)
    assert "1 of 29 tensors not part of this architecture: layers.0.mlp.extra.weight" in str(error.value)


def test_shape_mismatch_shows_both_shapes(editable):
    folder = editable("qwen2", intermediate_size=80)
    with pytest.raises(
        ValueError, match=r"gate_proj.weight is \[76, 96\] and config.json asks for \[80, 96\]"
    ):
        load(folder)


def test_integer_weights_are_refused(editable):
    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(
            torch.int8
        )

    with pytest.raises(ValueError, match="up_proj.weight is I8; config.json lets it be BF16, F16, F32 only"):
        load(edit_tensors(editable("qwen2"), change))


@pytest.mark.parametrize("keep", [4, 100, 20_000])
def test_truncated_file_says_so(editable, keep):
    folder = editable("qwen2")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"is not a whole safetensors file \({keep:,} bytes\)"):
        load(folder)


def test_pickles_are_never_opened(editable):
    folder = editable("qwen2")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(FileNotFoundError, match="It holds pytorch_model.bin: pickle files can run code"):
        load(folder)


def test_no_such_folder_and_broken_json(tmp_path, editable):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load(tmp_path)
    folder = editable("qwen2")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        load(folder)


def test_old_rotary_buffers_are_ignored(editable, checkpoints):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = edit_tensors(editable("llama-2"), lambda t: t.update({name: torch.zeros(8)}))
    assert same_weights(load(folder), load(checkpoints("llama-2")))


@pytest.mark.parametrize("family", FAMILIES)
def test_dtype_is_kept_or_converted(checkpoints, family):
    assert load(checkpoints(family)).dtype == torch.float32
    assert {p.dtype for p in load(checkpoints(family), torch.bfloat16).parameters()} == {torch.bfloat16}
