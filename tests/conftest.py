"""Checkpoints for the tests: one tiny random model per family, made by transformers itself, and the real SmolLM2."""

import json
import os
import shutil
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # tests that want a hub start their own, in a process of its own

import pytest
import torch
import transformers

from minserve import fetch

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))

# Awkward on purpose: 6 query / 2 KV heads (wrong head maps coincide at 4/2), head 16, odd vocabulary, 3 layers.
SHAPE = dict(
    vocab_size=251,
    hidden_size=96,
    intermediate_size=76,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
LLAMA3 = dict(
    rope_theta=10_000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=256,
)
FAMILIES = {
    "llama-2": ("Llama", dict(num_key_value_heads=6, tie_word_embeddings=False)),
    "llama-3": ("Llama", dict(tie_word_embeddings=False, rope_parameters=LLAMA3)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "smollm2": ("Llama", dict(tie_word_embeddings=True)),
    "linear-rope": ("Llama", dict(rope_parameters=dict(rope_theta=1e4, rope_type="linear", factor=4.0))),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(hidden_size=80, head_dim=16, tie_word_embeddings=False)),
    "mistral": ("Mistral", dict(sliding_window=8, head_dim=16)),
}


def make_checkpoint(family: str, folder: Path) -> Path:
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SHAPE | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with (
        torch.no_grad()
    ):  # norms and biases start as 1 and 0, values under which a loader may forget them unnoticed
        for weight_name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn(weight.shape) * 0.2)
            assert weight.std() > 0, weight_name
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """checkpoints("qwen3") -> a folder with that tiny checkpoint, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return get


@pytest.fixture
def editable(checkpoints, tmp_path):
    """editable("llama-3", key=value): a copy of the checkpoint, its config.json changed; None removes a key."""

    def copy(family: str, **changes) -> Path:
        folder = tmp_path / family
        folder.mkdir()
        for file in checkpoints(family).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not None or key not in changes}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copy


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The real model's folder. Absent, the test fails rather than skips: `make test` fetches it first."""
    folder = fetch.default_folder()
    if not (folder / "config.json").is_file():
        pytest.fail("SmolLM2-135M-Instruct is not on this machine: run `python -m minserve fetch` first")
    return folder


@pytest.fixture
def package_copy(tmp_path, monkeypatch) -> Path:
    """The package once more, to be changed (wrong_versions.plant), where `python -m minserve` looks first."""
    copy = tmp_path / "minserve"
    shutil.copytree(Path(fetch.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    return copy


def pytest_collection_modifyitems(items):
    """Whatever runs the real model is left out of `make quick`."""
    for item in items:
        if "smollm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
