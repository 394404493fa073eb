"""Trained parts: what a file holds comes back, whose it is is known, and what is not whole or not ours is refused."""

import copy
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from wrong_versions import wrong_version

import minserve.trained
from minserve import self_text, train
from minserve.calibration import quantize_model
from minserve.engine import Engine
from minserve.prefill_decode import attend_afresh
from minserve.quantization import Scheme
from minserve.study import HELD_OUT, Study, run
from minserve.text import Tokenizer
from minserve.trained import ASSETS, KINDS, build, fingerprint, head_rows, load_part, save_part, weights_of
from minserve.weights import load

SIZES = {
    "medusa": dict(heads=3),
    "exit": dict(layers=[1, 2]),
    "draft": dict(hidden=48, layers=2, heads=3, kv_heads=1, intermediate=76),
}


STATES = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("smollm2"))


def made(kind, model, module=minserve.trained, seed=0):
    """A part with random weights over every third token."""
    part = module.build(kind, model, torch.arange(0, model.config.vocab_size, 3), SIZES[kind])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.weights_of(part).values():
            weight.normal_(std=0.3, generator=generator)
    return part


@pytest.fixture
def file(model, tmp_path):
    """file(kind) -> a file of such a part."""

    def write(kind):
        path = tmp_path / f"{kind}.safetensors"
        save_part(kind, made(kind, model), model, path, sizes=SIZES[kind], seed=5)
        return path

    return write


# ---------------------------------------------------------------- there and back
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded(kind, model, file):
    part, back = made(kind, model), load_part(kind, model, file(kind))
    for name, tensor in weights_of(part).items():
        assert torch.equal(weights_of(back)[name], tensor.bfloat16().to(model.dtype)), name
    assert torch.equal(back.vocabulary, part.vocabulary) and back.vocabulary.dtype == torch.int64
    assert back.about["seed"] == 5 and back.about["sizes"] == SIZES[kind]
    assert not any(p.requires_grad for p in back.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_holds_no_table_of_the_vocabulary(kind, model, file):
    rows = len(range(0, model.config.vocab_size, 3))
    shapes = {name: list(tensor.shape) for name, tensor in load_file(file(kind)).items()}
    assert shapes.pop("vocabulary") == [rows]
    assert not any(rows in shape or model.config.vocab_size in shape for shape in shapes.values()), shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_takes_the_models_dtype(kind, dtype, file, checkpoints):
    model = load(checkpoints("smollm2"), dtype=dtype)
    part = load_part(kind, model, file(kind))
    assert {p.dtype for p in part.parameters()} == {dtype}


# ---------------------------------------------------------------- what they compute
def logits_of(model, tokens, upto=None):
    """The residual stream after `upto` layers (None: the last hidden state), and the logits of a plain forward pass."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        last, kept = run(model, model.embed_tokens(ids[None]), {upto} if upto else ())
    logits = model(ids, torch.arange(len(ids)), attend_afresh(model.config))
    return (kept[upto] if upto else last)[0], logits


def test_untrained_heads_say_what_the_targets_own_head_says(model):
    vocabulary, tokens = torch.arange(0, 251, 3), [3, 1, 4, 1, 5]
    x, logits = logits_of(model, tokens)
    guesses = build("medusa", model, vocabulary, dict(heads=2))(x)
    assert guesses.shape == (5, 2, 84)
    for h in range(2):
        torch.testing.assert_close(guesses[:, h], logits[:, vocabulary], rtol=1e-4, atol=1e-4)
    whole = model.config.num_layers
    x, logits = logits_of(model, tokens, upto=whole)
    scores = build("exit", model, vocabulary, dict(layers=[whole]))[whole].scores(x)
    torch.testing.assert_close(scores, logits[:, vocabulary], rtol=1e-4, atol=1e-4)


def own_matrices(module, model, path):
    """Each Medusa head has its own."""
    part = made("medusa", model, module)
    for h, W in enumerate(part.heads):
        expected = (STATES + torch.nn.functional.silu(STATES @ W.T)) @ head_rows(model, part.vocabulary).T
        assert torch.allclose(part(STATES)[:, h], expected, rtol=1e-4, atol=1e-3)


def scored_exits(module, model, path):
    """An exit norms, turns and scores; its folded matrix does the last two at once."""
    head = made("exit", model, module)[2]
    normed = torch.nn.functional.rms_norm(STATES, (96,), head.norm, model.config.norm_eps)
    expected = normed @ head.adapter.T @ head_rows(model, head.vocabulary).T
    assert torch.allclose(head.scores(STATES), expected, rtol=1e-4, atol=1e-3)
    assert torch.allclose(normed @ head.matrix().T, expected, rtol=1e-4, atol=1e-3)


def test_an_exit_nobody_trained(model, file):
    with pytest.raises(ValueError, match="no exit was trained after layer 3; there is one after 1, 2"):
        load_part("exit", model, file("exit"))[3]


def drafts(module, model, path):
    """A draft sees and scores through the target's tables."""
    module.save_part("draft", made("draft", model, module), model, path, sizes=SIZES["draft"])
    draft = module.load_part("draft", model, path)
    assert torch.allclose(draft.embed_tokens.weight, model.embed_tokens.weight @ draft.into)
    assert torch.allclose(draft.lm_head.weight, head_rows(model, draft.vocabulary) @ draft.out_of)
    ids = torch.tensor([3, 1, 4, 1, 5])
    logits = draft(ids, torch.arange(5), attend_afresh(draft.config))
    with torch.no_grad():
        last, _ = run(draft, draft.embed_tokens(ids[None]))
    assert torch.allclose(logits, last[0] @ draft.lm_head.weight.T, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- whose they are
def fingerprints(module, model, path):
    """One checkpoint has one, in any dtype; another embedding has another."""
    half, other = (copy.deepcopy(model) for _ in range(2))
    assert module.fingerprint(half.bfloat16()) == module.fingerprint(model)
    other.embed_tokens.weight.data[0, 0] += 1
    assert module.fingerprint(other) != module.fingerprint(model)


def test_the_fingerprint_is_the_checkpoints(model, checkpoints):
    half = load(checkpoints("smollm2"), dtype=torch.bfloat16)
    quantize_model(half, "rtn", Scheme(8), progress=False)
    assert fingerprint(half) == fingerprint(model)
    others = {fingerprint(load(checkpoints(family))) for family in ("llama-2", "qwen3")}
    assert len(others) == 2 and fingerprint(model) not in others


def test_heads_fit_a_quantized_model(checkpoints, file):
    model = load(checkpoints("smollm2"), dtype=torch.bfloat16)
    quantize_model(
        model, "rtn", Scheme(8), progress=False
    )  # its head, too: the rows are made of integers then
    part = load_part("medusa", model, file("medusa"))
    torch.testing.assert_close(part.rows, model.lm_head.dequantize()[part.vocabulary].bfloat16())


def stretched(path, **changes):
    """The file with other metadata."""
    with safe_open(path, "pt") as held:
        about = json.loads(held.metadata()["minserve"])
    save_file(load_file(path), path, {"minserve": json.dumps(about | changes)})


def other_weights(model, path):
    stretched(path, fingerprint="0" * 16)


def other_sizes(model, path):
    stretched(path, fingerprint="0" * 16, target="2 layers of 8 channels, 9 tokens")


def more_heads(model, path):
    stretched(path, sizes=dict(heads=4))


def cut_short(model, path):
    path.write_bytes(path.read_bytes()[:-100])


def not_a_part(model, path):
    save_file(load_file(path), path)


REFUSED = {
    other_weights: "was trained for another model: 3 layers of 96 channels, 251 tokens; this one has 3 layers of 96 "
    "channels, 251 tokens, and other weights in them",
    other_sizes: "was trained for another model: 2 layers of 8 channels, 9 tokens; this one has 3 layers of 96",
    more_heads: r"heads is \[3, 96, 96\], its metadata say \[4, 96, 96\]",
    cut_short: "is not a whole safetensors file",
    not_a_part: "holds no trained part, and what was asked for is medusa",
    lambda model, path: path.unlink(): "is not there: `python -m minserve train medusa --out",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda f: f.__name__.strip("<>"))
def test_refused(spoil, model, file):
    path = file("medusa")
    spoil(model, path)
    with pytest.raises((ValueError, FileNotFoundError), match=REFUSED[spoil]):
        load_part("medusa", model, path)


def test_refused_by_kind(model, file):
    with pytest.raises(ValueError, match="holds exit, and what was asked for is draft"):
        load_part("draft", model, shutil.copy(file("exit"), file("draft")))
    with pytest.raises(ValueError, match="no trained part is called 'eagle': use medusa, exit, draft"):
        load_part("eagle", model)


def test_a_draft_for_another_vocabulary(model, file, checkpoints):
    larger = replace(load(checkpoints("smollm2")).config, vocab_size=260)
    other = type(model).random(larger)
    with pytest.raises(ValueError, match="251 tokens; this one has 3 layers of 96 channels, 260 tokens"):
        load_part("draft", other, file("draft"))


def test_an_interrupted_save_leaves_the_old_file(model, file, monkeypatch):
    path = file("medusa")
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_part("medusa", made("medusa", model, seed=1), model, path, sizes=SIZES["medusa"])
    assert path.read_bytes() == before


# ---------------------------------------------------------------- wrong versions, each caught
def strangers(module, model, path):
    """Parts of another model, and of another kind, are refused."""
    for fields in ({}, dict(fingerprint="0" * 16), dict(kind="exit")):
        module.save_part("medusa", made("medusa", model, module), model, path, sizes=SIZES["medusa"])
        stretched(path, **fields)
        with pytest.raises(ValueError) if fields else nullcontext():
            module.load_part("medusa", model, path)


RIGHT = [own_matrices, scored_exits, drafts, fingerprints, strangers]
WRONG = {
    "a head forgets what it was given": (own_matrices, "x[:, None] + silu(turned)", "silu(turned)"),
    "a head without a gate": (own_matrices, "silu(turned)", "turned"),
    "heads are mixed up": (own_matrices, ".view(-1, m, E)", ".view(-1, E, m).transpose(1, 2)"),
    "an exit without a norm": (scored_exits, "linear(linear(y, self.adapter)", "linear(linear(x, self.adapter)"),
    "the adapter is folded the other way": (scored_exits, "@ self.adapter.detach()", "@ self.adapter.T.detach()"),
    "tables that nobody builds": (drafts, 'if kind == "draft":', 'if kind == "draught":'),
    "the way in is the way out": (drafts, "tables(self.rows, self.out_of)", "tables(self.rows, self.into)"),
    "any embedding will do": (fingerprints, "+ some.view(torch.uint8).numpy().tobytes()", ""),
    "the dtype decides": (fingerprints, ".detach().bfloat16().cpu().contiguous()\n    return", ".detach()\n    return"),
    "anybody's heads": (strangers, 'if about["fingerprint"] != fingerprint(model)', "if False"),
    "any kind": (strangers, 'if about.get("kind") != kind', "if False"),
}  # fmt: skip


@pytest.mark.parametrize("check", RIGHT, ids=lambda f: f.__name__)
def test_right(check, model, tmp_path):
    check(minserve.trained, model, tmp_path / "part")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_versions_are_caught(name, model, tmp_path):
    check, right, wrong = WRONG[name]
    module = wrong_version(minserve.trained, right, wrong)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(module, model, tmp_path / "part")


# ---------------------------------------------------------------- what ships
def test_what_ships_is_small_and_says_where_it_comes_from():
    files = sorted(ASSETS.glob("*.safetensors"))
    assert [f.stem for f in files] == sorted(KINDS)
    assert sum(f.stat().st_size for f in ASSETS.iterdir()) <= 12e6
    for file in files:
        with safe_open(file, "pt") as held:
            about = json.loads(held.metadata()["minserve"])
        assert about["command"].startswith(f"python -m minserve train {file.stem} ")
        assert {"seed", "losses", "held_out", "minutes", "steps", "torch", "device"} <= set(about)
        assert about["losses"][-1][2] < about["losses"][0][2]


@pytest.fixture(scope="module")
def talk(smollm):
    """The real model, and conversations that no part was trained on."""
    model, tokenizer = load(smollm), Tokenizer.load(smollm)
    engine = Engine(model, tokenizer, max_running=8)
    return model, sorted(self_text.converse(engine, list(range(HELD_OUT, HELD_OUT + 8)), seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_ships_is_worth_what_it_says(kind, talk):
    model, told = talk
    part = load_part(kind, model)
    study = Study(model, told, part.vocabulary, part.layers if kind == "exit" else (), None)
    now, then = train.measure(kind, part, study), part.about["held_out"]
    pairs = {"": (now["greedy"], then["greedy"])}
    if kind == "exit":
        pairs = {e: (now["greedy"][e], then["greedy"][str(e)]) for e in part.layers}
    for where, (mine, recorded) in pairs.items():  # 4 answers against half of all: a sample
        assert abs(mine[0] - recorded[0]) < 0.12, (where, mine, recorded)
        assert mine[0] > 0.15
