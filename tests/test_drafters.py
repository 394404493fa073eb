"""Drafters by name: a part that fits the model, or what to do to get one."""

import pytest
import torch
from test_draft_model import FREE, Watched, plainly
from test_engine import engine

from minserve.drafters import drafter_for
from minserve.trained import build, save_part
from minserve.weights import load

SIZES = {
    "medusa": dict(heads=3),
    "exit": dict(layers=[1, 2]),
    "draft": dict(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=48),
}
ABOUT = {"accuracies": [[0.6, 0.2], [0.4, 0.2], [0.3, 0.1]]}


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("llama-3"))


@pytest.fixture(scope="module")
def parts(model, tmp_path_factory):
    """A file of each kind, untrained."""
    folder = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    for kind, sizes in SIZES.items():
        part = build(kind, model, torch.arange(0, 251, 2), sizes)
        for weight in part.parameters():
            if weight.ndim > 1 and kind == "draft":
                torch.nn.init.normal_(weight, std=0.1)
        save_part(kind, part, model, folder / f"{kind}.safetensors", sizes=sizes, **ABOUT)
    return folder


@pytest.mark.parametrize("name", ["ngram", *SIZES])
def test_each_name_is_a_drafter_that_costs_no_token(model, parts, name):
    for k in (None, 2):
        drafter = drafter_for(name, model, k, path=parts / f"{name}.safetensors")
        assert drafter.name == name and k in (None, drafter.k)
        watched = Watched(model, drafter)
        assert watched.answer() == plainly(model)
        assert name == "ngram" or watched.rows


def test_an_exit_after_another_layer(model, parts):
    assert drafter_for("exit", model, path=parts / "exit.safetensors", layer=2).layer == 2
    with pytest.raises(ValueError, match="no exit was trained after layer 3; there is one after 1, 2"):
        drafter_for("exit", model, path=parts / "exit.safetensors", layer=3)


def test_what_there_is_not_is_refused(model, parts, tmp_path):
    with pytest.raises(ValueError, match="'oracle': use 'ngram', 'medusa', 'exit', 'draft'"):
        engine(model, drafter="oracle")
    for name in SIZES:
        with pytest.raises(FileNotFoundError, match=f"minserve train {name}"):
            drafter_for(name, model, path=tmp_path / "nothing.safetensors")
        with pytest.raises((ValueError, FileNotFoundError), match=f"minserve train {name}"):
            engine(model, drafter=name)  # what ships was trained for another model


@pytest.mark.parametrize("name", SIZES)
def test_those_that_ship_save_steps(smollm, name):
    """On the model they were trained for: the same tokens, in fewer steps."""
    its = load(smollm, dtype=torch.float32)
    tokens = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    watched = Watched(its, drafter_for(name, its), num_pages=100)
    params = FREE.__class__(max_tokens=32, ignore_eos=True)
    assert watched.answer([tokens], params) == plainly(its, [tokens], params)
    assert sum(row.kept for row in watched.rows) >= 4
