"""`minserve quantize`: what it writes is what others load, number for number; it is there whole or not at all."""

import json
import resource
import shutil
import subprocess
import sys
import types
from pathlib import Path

import fetch_world
import pytest
import tokenizers
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from minserve import quantize
from minserve.__main__ import main
from minserve.calibration import quantize_model
from minserve.prefill_decode import attend_afresh, generate
from minserve.quantization import QuantLinear, Scheme
from minserve.sampling import SamplingParams
from minserve.text import Tokenizer
from minserve.weights import load

TEXT = "The quick brown fox jumps over the lazy dog, and then the dog sleeps. " * 40


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder as hubs have them: 96 inputs everywhere, a tied head, a tokenizer, and files that must not be copied."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    model = fetch_world.tiny_model()
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*fetch_world.SPECIAL, *letters, "th", "the"]
    core = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [("t", "h"), ("th", "e")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, chat_template=fetch_world.CHATML)
    tokenizer.save_pretrained(folder)
    (folder / "minserve.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(
            {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")}
        )
    )
    (folder / "training.bin").write_bytes(b"no")
    return folder


@pytest.fixture
def run(tiny, tmp_path, capsys):
    """run("--bits", 4, ...) -> (exit code, what was said, the folder it was to make)."""

    def go(*argv, model=tiny, out=None):
        out = out or tmp_path / "out"
        base = ["quantize", out, "--model", model]
        if "--method" not in argv:
            base += ["--method", "rtn"]
        try:
            code = main([str(x) for x in (*base, *argv)])
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        return code, said.out + said.err, out

    return go


# ---------------------------------------------------------------- the library reads the same numbers
def in_file(name):
    return name if name == "lm_head" else f"model.{name}"


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """Layer -> its weight, by the compressed-tensors library alone."""
    config = QuantizationConfig.model_validate(
        json.loads((folder / "config.json").read_text())["quantization_config"]
    )
    targets = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    layers: dict[str, dict] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, part = name.rpartition(".")
        layers.setdefault(layer, {})[part] = tensor
    made = {}
    for name, parts in layers.items():
        if "weight_scale" in parts:
            assert name not in config.ignore
            scheme = targets.get(name) or targets["Linear"]
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            made[name] = compressor.decompress(parts, scheme)["weight"]
    return made


def agree(folder: Path, model=None) -> int:
    """Ours (in memory, or as loaded) and the library's weights are equal, bit for bit; how many there were."""
    theirs, model = decompressed(folder), model or load(folder)
    ours = {in_file(name): m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert set(ours) == set(theirs)
    for name, layer in ours.items():
        assert torch.equal(layer.dequantize().to(theirs[name].dtype), theirs[name]), name
    return len(ours)


VARIANTS = {
    "int4": ["--bits", 4],
    "int4, head 16": ["--bits", 4, "--head", 16],
    "int4, zeros": ["--bits", 4, "--asymmetric"],
    "int4, zeros, head 16": ["--bits", 4, "--asymmetric", "--head", 16],
    "int4, row": ["--bits", 4, "--group", "row"],
    "int4, row, head 16": ["--bits", 4, "--group", "row", "--head", 16],
    "int4, groups of 8": ["--bits", 4, "--group", 8],
    "int8": ["--bits", 8],
    "int8, head 16": ["--bits", 8, "--head", 16],
    "int8, groups": ["--bits", 8, "--group", 32],
    "int8, groups, head 16": ["--bits", 8, "--group", 32, "--head", 16],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_library_reads_the_same_weights(run, variant):
    code, said, out = run(*VARIANTS[variant])
    assert code == 0, said
    assert agree(out) == 14 + ("head 16" not in variant)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_methods_too(run, tmp_path, method):
    (tmp_path / "text").write_text(TEXT)
    code, said, out = run("--bits", 4, "--method", method, "--text", tmp_path / "text", "--tokens", 1024)
    assert code == 0 and f"{method} int4 g32" in said and "1,024 calibration tokens" in said, said
    assert agree(out) == 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, 32, False), Scheme(8), Scheme(8, 32)], ids=str)
def test_what_is_loaded_is_what_was_in_memory(tiny, tmp_path, scheme, dtype):
    model = load(tiny, dtype)
    quantize_model(model, "rtn", scheme, progress=False)
    quantize.write(model, tiny, tmp_path / "out")
    again = load(tmp_path / "out")
    if dtype != torch.float32:  # config.json says what the checkpoint was; the command never changes it
        again = load(tmp_path / "out", dtype)
    assert again.config.tied is False
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# ---------------------------------------------------------------- transformers
def their_logits(folder, tokens, **more):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
        ids = model.generate(
            torch.tensor([tokens]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return model, logits, ids[0, len(tokens) :].tolist()


ROUTES = [
    ("int4, head 16", False),
    ("int4, row, head 16", False),
    ("int8, groups, head 16", False),
    ("int8", True),
    ("int4, zeros, head 16", True),
]


@pytest.mark.parametrize("variant, dequantized", ROUTES)
def test_transformers_computes_the_same(run, variant, dequantized):
    """Where it would round inputs, or cannot read zero points in integers (compressed-tensors 0.20), dequantized."""
    _, _, out = run(*VARIANTS[variant])
    more = dict(quantization_config=CompressedTensorsConfig(dequantize=True)) if dequantized else {}
    tokens = list(range(5, 40))
    theirs, logits, ids = their_logits(out, tokens, **more)
    ours = load(out)
    for name, layer in ours.named_modules():
        if isinstance(layer, QuantLinear):
            assert torch.equal(theirs.get_submodule(in_file(name)).weight, layer.dequantize()), name
    positions = torch.arange(len(tokens))
    got = ours(torch.tensor(tokens), positions, attend_afresh(ours.config))
    torch.testing.assert_close(got, logits, atol=1e-4, rtol=1e-4)
    assert generate_all(ours, tokens, 16) == ids


def generate_all(model, tokens, n):
    return list(generate(model, tokens, SamplingParams(n, ignore_eos=True)))


def test_inputs_are_rounded_by_others_where_the_form_says_so(run, tmp_path):
    """8 bits without groups, the head's too: transformers' logits are not ours, and the command says so."""
    for bits in (8, 4):
        _, said, out = run("--bits", bits, out=tmp_path / str(bits))
        assert "vLLM round the inputs to 8 bits" in said
        groups = json.loads((out / "config.json").read_text())["quantization_config"][
            "config_groups"
        ].values()
        rounded = [group for group in groups if group["input_activations"]]
        assert len(rounded) == (1 if bits == 4 else 2) and rounded[0]["input_activations"]["dynamic"]
        tokens = list(range(5, 40))
        ours, (_, theirs, _) = load(out), their_logits(out, tokens)
        got = ours(torch.tensor(tokens), torch.arange(len(tokens)), attend_afresh(ours.config))
        assert 1e-3 < (got - theirs).abs().max() < 0.1 * theirs.abs().max()
    _, said, _ = run("--bits", 4, "--head", 16)
    assert "round the inputs" not in said


# ---------------------------------------------------------------- the folder
def test_the_folder_is_the_models_own_with_other_weights(run, tiny):
    _, said, out = run("--bits", 4)
    assert {p.name for p in out.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tiny, out))
    assert before["tie_word_embeddings"] and not after.pop("tie_word_embeddings")
    assert after.pop("quantization_config") and after.items() <= before.items()
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tiny / file).read_bytes() == (out / file).read_bytes()
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers asks for it
    assert {oct(path.stat().st_mode)[-3:] for path in out.iterdir()} == {"644"} and f"{out.stat().st_mode:o}"[
        -3:
    ] == "755"
    assert "groups of 32: the largest of 128, 64, 32 that divides 96" in said
    assert "rtn int4 g32: 1 MB to 0 MB in" in said and f"python -m minserve chat --model {out}" in said


def test_a_head_left_alone_stays_tied(run):
    _, _, out = run("--bits", 4, "--head", 16)
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] and config["quantization_config"]["ignore"] == ["lm_head"]
    model = load(out)
    assert model.config.tied and not hasattr(model, "lm_head")


# ---------------------------------------------------------------- whole, or not there
def left(out: Path) -> list[str]:
    return sorted(p.name for p in out.parent.iterdir())


@pytest.mark.parametrize("stage", ["save_file", "json.dumps", "os.rename"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=str)
def test_whatever_stops_it_leaves_nothing(run, tmp_path, monkeypatch, stage, error):
    def fail(*args, **kwargs):
        assert not list(tmp_path.glob(".out*/config.json")) or stage == "os.rename", (
            "config.json is written last"
        )
        raise error

    where, _, name = stage.rpartition(".")
    monkeypatch.setattr(getattr(quantize, where) if where else quantize, name, fail)
    code, said, out = run("--bits", 4)
    monkeypatch.undo()
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 2), said
    assert "is left of" in said and str(out) in said
    assert left(out) == []


def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # the weights take more


def test_a_full_disk_for_real(tiny, tmp_path):
    command = [sys.executable, "-m", "minserve", "quantize", tmp_path / "out", "--model", tiny]
    ran = subprocess.run(
        [*command, "--method", "rtn", "--bits", "4"], preexec_fn=limited, capture_output=True, text=True
    )
    assert ran.returncode == 2 and "the disk is full" in ran.stderr, ran.stderr
    assert left(tmp_path / "out") == []


def test_a_disk_that_is_full_before_it_begins(run, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    code, said, out = run("--bits", 4)
    assert code == 2 and "the disk is full" in said and "0.00 GB free" in said and left(out) == []


# ---------------------------------------------------------------- refused
REFUSED = [
    (["--bits", 4, "--group", 128], "96 inputs, and 96 = 0 x 128 + 96"),
    (["--bits", 8, "--group", 64], "96 = 1 x 64 + 32: minserve can run a shorter last group, but transformers"),
    (["--bits", 4, "--group", 12], "a group of 12 columns is not supported"),
    (["--bits", 4, "--act-order"], "Leave --act-order out"),
    (["--bits", 8, "--asymmetric"], "Leave --asymmetric out"),
    (["--bits", 3], "invalid choice: 3 (choose from 8, 4)"),
    (["--bits", 4, "--method", "hqq"], "invalid choice: 'hqq'"),
    (["--bits", 4, "--group", "all"], "argument --group: invalid"),
    (["--method", "rtn"], "the following arguments are required: --bits"),
]  # fmt: skip


@pytest.mark.parametrize("argv, message", REFUSED, ids=[message for _, message in REFUSED])
def test_refused(run, argv, message):
    code, said, out = run(*argv)
    assert code == 2 and message in said, said
    assert left(out) == []


def test_a_text_too_short_is_refused_with_the_arithmetic(run, tmp_path):
    (tmp_path / "text").write_text(TEXT[:700])
    argv = ["--bits", 4, "--method", "awq", "--text", tmp_path / "text", "--tokens", 2048]
    code, said, out = run(*argv, out=tmp_path / "in" / "out")
    assert code == 2 and "640 tokens, 5 sequences of 128; 2,048 tokens are 16 sequences" in said, said
    code, said, _ = run(*argv[:-4], "--text", tmp_path / "none", out=tmp_path / "in" / "out")
    assert code == 2 and "No such file" in said and left(out) == []


def test_what_is_there_or_is_quantized_already_is_refused(run, tmp_path):
    code, said, out = run("--bits", 4)
    before = {path: path.read_bytes() for path in out.iterdir()}
    code, said, _ = run("--bits", 4)
    assert code == 2 and f"{out} exists already" in said
    code, said, other = run("--bits", 4, model=out, out=tmp_path / "twice")
    assert code == 2 and f"{out} is quantized already" in said and not other.exists()
    code, said, other = run("--bits", 4, model=tmp_path / "none", out=tmp_path / "twice")
    assert code == 2 and "no such folder" in said
    assert before == {path: path.read_bytes() for path in out.iterdir()}


def test_no_group_that_divides_is_said(tiny):
    with pytest.raises(ValueError, match="none of 128, 64, 32 divides the inputs of all layers, 96, 200"):
        quantize.group_for([96, 200], 4, 0)
    assert quantize.group_for([576, 1536], 4, 0) == 64 and quantize.group_for([576, 1536], 8, 0) is None
    with pytest.raises(
        ValueError, match=r"(?s)576 = 4 x 128 \+ 64.*\n  Take a group that divides 576, as 64 does"
    ):
        quantize.group_for([576, 1536], 4, 128)


def test_act_order_and_ragged_groups_are_refused_by_the_writer_too(tiny, tmp_path):
    model = load(tiny)
    quantize_model(model, "rtn", Scheme(4, 64), progress=False)  # 96 = 64 + 32
    with pytest.raises(ValueError, match=r"96 = 1 x 64 \+ 32"):
        quantize.write(model, tiny, tmp_path / "out")
    model = load(tiny)
    quantize_model(model, "rtn", Scheme(4, 32), progress=False)
    model.layers[1].mlp.up_proj.order = torch.arange(96)
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj is in act-order"):
        quantize.write(model, tiny, tmp_path / "out")
    assert left(tmp_path / "out") == []


# ---------------------------------------------------------------- wrong writers
WRONG = [
    ("zeros along the inputs", "layer.zeros.T.contiguous()", "layer.zeros.contiguous()"),
    ("zeros one too high", "zeros = layer.zeros.T.contiguous()", "zeros = layer.zeros.T.contiguous() + 1 & 15"),
    ("8 bits signed in their words", "^ 128).view(torch.int32)", ").view(torch.int32)"),
    ("the shape as it is packed", "[layer.out_features, k]", "list(qweight.shape)"),
    ("one group too large", 'if scheme.group else "channel", scheme.group', 'if True else "", 2 * (scheme.group or 48)'
     ),
    ("always symmetric", '"symmetric": scheme.symmetric', '"symmetric": True'),
    ("the head not named", '{"targets": [name]}', '{"targets": ["Linear"]}'),
    ("the layers named as here", 'name if name.startswith("lm_head") else f"model.{name}"', "name"),
]  # fmt: skip


@pytest.mark.parametrize("old, new", [pair for _, *pair in WRONG], ids=[name for name, *_ in WRONG])
def test_wrong_writers_are_noticed(tiny, tmp_path, old, new):
    source = Path(quantize.__file__).read_text()
    assert old in source, f"no such line: {old}"
    module = types.ModuleType("wrong")
    exec(compile(source.replace(old, new), "wrong", "exec"), module.__dict__)
    with pytest.raises(Exception):  # noqa: B017  whatever the library says to it
        for i, scheme in enumerate((Scheme(4, 32), Scheme(4, 32, False), Scheme(8, 32), Scheme(4))):
            model = load(tiny)
            quantize_model(model, "rtn", scheme, progress=False)
            module.write(model, tiny, tmp_path / str(i))
            agree(tmp_path / str(i), model)
            assert set(load_file(tmp_path / str(i) / "model.safetensors")) > {"model.norm.weight"}


# ---------------------------------------------------------------- the real model
def test_smollm2(smollm, tmp_path, run):
    """4 bits on disk: a third of the bytes of the layers, the library's numbers, transformers' tokens."""
    code, said, out = run("--bits", 4, "--head", 16, model=smollm)
    assert code == 0 and "groups of 64" in said and agree(out) == 210
    size = [(folder / "model.safetensors").stat().st_size for folder in (smollm, out)]
    assert size[1] < 0.45 * size[0]
    tokens = Tokenizer.load(out).chat([{"role": "user", "content": "What is the capital of France?"}])
    _, logits, ids = their_logits(out, tokens)
    ours = load(out, torch.float32)
    got = ours(torch.tensor(tokens), torch.arange(len(tokens)), attend_afresh(ours.config))
    torch.testing.assert_close(got, logits, atol=2e-3, rtol=1e-3)
    assert generate_all(ours, tokens, 16) == ids
