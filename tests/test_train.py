"""Training: the shift is the right one, what is measured is what happens, and an interruption changes nothing.

The oracle   a part that knows the chances it will be compared with: no other shift gives it a lower loss
Measured     acceptance is read off a text; here drafts are run, token by token, and counted
"""

import json

import fetch_world
import pytest
import tokenizers
import torch
import transformers
from conftest import FAMILIES
from tokenizers import decoders, models, pre_tokenizers
from wrong_versions import wrong_version

import minserve.training
from minserve import self_text, study, train, training
from minserve.__main__ import main
from minserve.prefill_decode import attend_afresh, generate
from minserve.request import SamplingParams
from minserve.study import FEW, HELD_OUT, LAST, Conversation, Study, frequent, run
from minserve.text import Tokenizer
from minserve.trained import KINDS, build, load_part, weights_of
from minserve.training import Training, acceptance, medusa_ranks, shares, start
from minserve.weights import load

SIZES = {
    "medusa": dict(heads=3),
    "exit": dict(layers=[1, 2]),
    "draft": dict(hidden=48, layers=1, heads=3, kv_heads=1, intermediate=76),
}


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("smollm2"))


@pytest.fixture(scope="module")
def told(model):
    """Greedy answers: what a chain is right about is the text itself."""
    answers = []
    for i, prompt in enumerate([[3, 1, 4], [200], [9, 9, 8, 7], [77, 5], [123], [40, 41]]):
        tokens = prompt + list(generate(model, prompt, SamplingParams(max_tokens=30 + i)))
        answers.append(Conversation(i, 0.0, len(prompt), tokens))
    return answers


@pytest.fixture(scope="module")
def text(model, told):
    return Study(model, told, frequent(model, told, 150), (1, 2), None)


def part_of(kind, model, text):
    part = build(kind, model, text.vocabulary, SIZES[kind])
    if kind == "draft":
        start(part)
    return part


# ---------------------------------------------------------------- the text
@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A tiny model with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("chatty") / "model"
    fetch_world.tiny_model().save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*fetch_world.SPECIAL, *letters, "th", "the"]
    core = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [("t", "h"), ("th", "e")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(fetch_world.SPECIAL)
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=core, chat_template=fetch_world.CHATML)
    hf.save_pretrained(folder)
    return folder


def test_the_model_asks_and_answers(chatty, tmp_path, monkeypatch):
    monkeypatch.setattr(self_text, "QUESTION", 12)
    monkeypatch.setattr(self_text, "ANSWER", 20)
    model, tokenizer = load(chatty), Tokenizer.load(chatty)
    before, after = self_text.turns(model, tokenizer, 0)
    assert tokenizer.decode(before + after, skip_special=False) == tokenizer.hf.apply_chat_template(
        [{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=True
    )
    found = self_text.write(tmp_path / "text", model, tokenizer, range(6), seed=1, seats=3)
    assert [c.number for c in found] == list(range(6))
    for c in found:
        assert c.tokens[: len(before)] == before and c.tokens[c.begin - len(after) : c.begin] == after
        assert c.temperature == (0.7 if c.number % 2 else 0.0)
        answer = c.tokens[c.begin :]
        assert len(answer) == 20 or answer[-1] in model.config.eos_token_ids
        if c.number % 2 == 0:
            own = list(generate(model, c.tokens[: c.begin], SamplingParams(max_tokens=20)))
            assert own == [t for t in answer if t not in model.config.eos_token_ids]
    assert len({tuple(c.tokens) for c in found}) > 3


def test_a_text_goes_on_where_it_stopped(model, tmp_path, monkeypatch):
    monkeypatch.setattr(self_text, "ANSWER", 8)
    path = tmp_path / "text"
    whole = self_text.write(path, model, None, range(6), seed=1, seats=2)
    lines = path.read_text().splitlines(True)
    path.write_text("".join(lines[:3]) + lines[3][:20])  # killed while it wrote
    numbers = []
    real = self_text.converse

    def watched(engine, missing, seed):
        numbers.extend(missing)
        return real(engine, missing, seed)

    monkeypatch.setattr(self_text, "converse", watched)
    assert self_text.write(path, model, None, range(6), seed=1, seats=2) == whole
    assert len(numbers) == 3 and path.read_text().count("\n") == 6
    assert self_text.write(path, model, None, range(6), seed=1, seats=2) == whole and len(numbers) == 3


# ---------------------------------------------------------------- the study
@pytest.mark.parametrize("family", FAMILIES)
def test_run_is_the_models_forward_pass(family, checkpoints):
    model = load(checkpoints(family))
    for n in (1, 5, 40):  # 40: beyond the windows of the two families that have some
        tokens = torch.arange(n) * 7 % 251
        logits = model(tokens, torch.arange(n), attend_afresh(model.config))
        batch = torch.stack([tokens, tokens.flip(0)])
        with torch.no_grad():
            last, kept = run(model, model.embed_tokens(batch), (1, 3))
        torch.testing.assert_close(last[0] @ model.head.T, logits, rtol=1e-3, atol=1e-3)
        norm = torch.nn.functional.rms_norm(kept[3], (last.shape[-1],), model.norm.weight, model.norm.eps)
        torch.testing.assert_close(norm, last)
        assert set(kept) == {1, 3} and not torch.equal(kept[1], kept[3])


def test_a_study_knows_the_targets_chances(model, told, text):
    for c, conversation in enumerate(told):
        ids = torch.tensor(conversation.tokens)
        logits = model(ids, torch.arange(len(ids)), attend_afresh(model.config))
        chances = logits[:, text.vocabulary].softmax(-1)
        own = slice(text.starts[c], text.starts[c + 1])
        best, columns = chances.topk(FEW)
        assert torch.equal(columns, text.ids[own].long())
        torch.testing.assert_close(best / best.sum(-1, keepdim=True), text.chances[own], rtol=1e-3, atol=1e-4)
        places = torch.arange(len(ids))
        guessed = (places >= conversation.begin - 1) & (places < len(ids) - 1)
        assert torch.equal(text.guessed[own], guessed)


def test_frequent_tokens(model):
    told = [Conversation(0, 0.0, 2, [250, 250, 7, 7, 9]), Conversation(1, 0.0, 1, [250, 9, 9, 30])]
    assert frequent(model, told, 3).tolist() == [7, 9, 30]
    assert frequent(model, told, 5).tolist() == [0, 1, 7, 9, 30]
    assert len(frequent(model, told, 10_000)) == model.config.vocab_size


def test_a_study_goes_on_where_it_stopped(model, told, text, tmp_path, monkeypatch):
    read, real = [], Study.padded
    monkeypatch.setattr(study, "BATCH", 40)

    def padded(self, batch):
        if len(read) == 3:
            raise KeyboardInterrupt
        read.append(batch)
        return real(self, batch)

    monkeypatch.setattr(Study, "padded", padded)
    asked = (model, told, text.vocabulary, (1, 2), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Study(*asked)
    assert not list(tmp_path.glob("*.bin"))
    read[:] = [[]] * 4  # no more interruptions, and 3 batches are known
    again = Study(*asked)
    assert len(read) - 4 == len(told) - 3
    for key in (1, 2, LAST):
        torch.testing.assert_close(again.states[key], text.states[key], rtol=0.02, atol=0.02)
    assert torch.equal(again.ids, text.ids) and torch.equal(again.tokens, text.tokens)
    read[:] = [[]] * 4
    Study(*asked)  # all of it is there
    Study(model, told, text.vocabulary, (), tmp_path)  # and less of it, too
    assert len(read) == 4


# ---------------------------------------------------------------- guess, shift, compare
class Oracle:
    """A Medusa head or an exit that says, at every place, the chances of the place it is asked about."""

    def __init__(self, text, ahead):
        self.text, self.ahead, self.layers = text, ahead, (LAST,)
        self.parameters = lambda: iter([torch.zeros(())])

    def __call__(self, x):
        states = self.text.states[LAST].float()
        places = torch.cdist(x.float(), states).argmin(-1)  # who looks like this
        logits = torch.full((len(x), len(self.ahead), len(self.text.vocabulary)), -30.0)
        for h, ahead in enumerate(self.ahead):
            at = (places + ahead).clamp_max(len(states) - 1)
            logits[:, h].scatter_(1, self.text.ids[at].long(), self.text.chances[at].log().clamp_min(-30))
        return logits

    def __getitem__(self, layer):
        return lambda x: self(x)[:, 0]


def losses_of(module, text):
    """The losses of the oracle that looks where it should, and of those that look one place off."""
    places = text.guessed.nonzero().flatten()
    medusa = [module.medusa_loss(Oracle(text, [1 + by, 2 + by]), text, places).item() for by in (0, -1, 1)]
    exits = [module.exit_loss(Oracle(text, [by]), text, places).item() for by in (0, -1, 1)]
    return medusa, exits


def test_the_right_shift_has_the_least_loss(text):
    for right, *wrong in losses_of(training, text):
        assert right < min(wrong) - 0.5, (right, wrong)


def test_the_loss_is_the_cross_entropy(text):
    entropy(training, text)


def entropy(module, text):
    places = text.guessed.nonzero().flatten()[:9]
    logits = torch.randn(9, len(text.vocabulary), generator=torch.Generator().manual_seed(0))
    full = torch.zeros_like(logits).scatter_(1, text.ids[places].long(), text.chances[places])
    each = torch.nn.functional.cross_entropy(logits, full, reduction="none")
    assert torch.allclose(module.compare(logits, text, places), each.mean())
    assert torch.allclose(module.compare(logits, text, places, places % 2 == 0), each[places % 2 == 0].mean())


def test_a_draft_is_compared_at_its_own_places(model, text):
    part = part_of("draft", model, text)
    with torch.no_grad():
        logits, places = training.draft_logits(part, text, torch.tensor([4, 1]))
        each = [training.draft_logits(part, text, torch.tensor([c])) for c in (4, 1)]
    assert torch.equal(places, torch.cat([p for _, p in each]))  # padding is nobody's place
    torch.testing.assert_close(logits, torch.cat([x for x, _ in each]), rtol=1e-4, atol=1e-4)
    part.materialise(model)
    ids = torch.tensor(text.conversations[1].tokens)
    whole = part(ids, torch.arange(len(ids)), attend_afresh(part.config))
    torch.testing.assert_close(each[1][0], whole[text.conversations[1].begin - 1 : -1], rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- the loop
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind, model, text):
    now = Training(kind, part_of(kind, model, text), text, seed=0)
    before = acceptance(kind, now.part, text)
    losses = now.run(3600, steps=60, progress=False)
    assert losses[-1][2] < losses[0][2] - 0.2, losses  # chances are spread: no guess has a loss near 0
    after = acceptance(kind, now.part, text)
    first = lambda found: found[1][0] if kind == "exit" else found[0]
    assert first(after) > first(before), (before, after)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_is_the_same(kind, model, text, monkeypatch, tmp_path):
    monkeypatch.setitem(training.BATCH, kind, 5 if kind == "draft" else 50)  # several epochs
    whole = Training(kind, part_of(kind, model, text), text, seed=0)
    whole.run(3600, steps=12, progress=False)

    stopped = Training(kind, part_of(kind, model, text), text, seed=0)
    real = training.LOSSES[kind]

    def interrupted(part, text, batch):
        if stopped.step == 7:
            raise KeyboardInterrupt
        return real(part, text, batch)

    monkeypatch.setitem(training.LOSSES, kind, interrupted)
    with pytest.raises(KeyboardInterrupt):
        stopped.run(3600, steps=12, progress=False)
    train.save_checkpoint(stopped, tmp_path / "x.pt")
    monkeypatch.setitem(training.LOSSES, kind, real)
    resumed = Training(kind, part_of(kind, model, text), text, seed=0)
    resumed.load(torch.load(tmp_path / "x.pt", weights_only=True))
    resumed.run(3600, steps=12, progress=False)
    assert resumed.step == whole.step == 12
    for name, weight in weights_of(whole.part).items():
        assert torch.equal(weights_of(resumed.part)[name], weight), name
    assert [x[1:] for x in resumed.losses] == [x[1:] for x in whole.losses]


def test_seconds_are_kept(model, text):
    training = Training("medusa", part_of("medusa", model, text), text, seed=0)
    losses = training.run(0.5, progress=False)
    assert 0.5 <= training.seconds < 5 and losses[-1][0] <= training.seconds + 0.1
    assert training.run(0.5, progress=False) is losses  # over is over


# ---------------------------------------------------------------- what it is worth
def test_acceptance_is_what_happens_when_drafts_are_run(model, text):
    now = Training("draft", part_of("draft", model, text), text, seed=0)
    now.run(3600, steps=25, progress=False)
    draft = now.part.materialise(model)
    kept = []
    for conversation in text.conversations:
        tokens = conversation.tokens
        for p in range(conversation.begin, len(tokens)):
            chain = tokens[:p]
            for _ in range(min(training.LONGEST, len(tokens) - p)):
                ids = torch.tensor(chain)
                logits = draft(
                    ids, torch.arange(len(ids)), attend_afresh(draft.config), rows=torch.tensor([-1])
                )
                chain = [*chain, text.vocabulary[logits[0].argmax()].item()]
            right = [a == b for a, b in zip(chain[p:], tokens[p:])]
            kept.append([all(right[: i + 1]) if i < len(right) else None for i in range(training.LONGEST)])
    columns = [[x for x in column if x is not None] for column in zip(*kept)]
    expected = [sum(column) / len(column) for column in columns]
    assert 0.1 < expected[0] < 1
    assert acceptance("draft", draft, text) == pytest.approx(expected, abs=1e-3)


def test_the_ranks_of_medusa_heads(text):
    oracle = Oracle(text, [1, 2])
    oracle.heads = torch.zeros(2, 1, 1)
    right = medusa_ranks(oracle, text)  # greedy text: the likeliest token is the one that stands there
    inside = right[..., 0] >= 0
    known = torch.isin(text.tokens, text.vocabulary)
    places = text.guessed.nonzero().flatten()
    for h in range(2):
        at = places + 2 + h
        assert torch.equal(inside[:, h], at < text.ends[places])
        assert torch.equal(right[inside[:, h], h, 0].bool(), known[at[inside[:, h]]])
    assert (right[inside][:, 1:] == 0).all()


def test_shares():
    right = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, -1], [1, -1, -1]])
    assert shares(right) == [0.8, 0.5, 0.3333]


# ---------------------------------------------------------------- wrong versions, each caught by name
def shifts(module, text):
    for right, *wrong in losses_of(module, text):
        assert right < min(wrong) - 0.5


def ends(module, text):
    """No place behind an answer's end is compared."""
    places, seen = text.guessed.nonzero().flatten(), []
    module.compare = lambda logits, _, at, inside: seen.append(at[inside])
    module.medusa_loss(Oracle(text, [1, 2]), text, places)
    assert (
        text.guessed[seen[0]].all() and (text.ends[seen[0]] == seen[0] + 2).any()
    )  # the end is guessed, too


def counts(module, text):
    assert module.shares(torch.tensor([[1, 1], [0, 1], [1, -1]])) == [0.6667, 0.5]


def epochs(module, text):
    source = module.batches("draft", text, 0, 0)
    module.BATCH["draft"] = 2
    drawn = [next(source).tolist() for _ in range(6)]
    assert (
        sorted(sum(drawn[:3], [])) == sorted(sum(drawn[3:], [])) == list(range(6)) and drawn[:3] != drawn[3:]
    )
    later = module.batches("draft", text, 0, 4)
    assert [next(later).tolist() for _ in range(2)] == drawn[4:]


WRONG = {
    "head h is compared with the place of head h - 1": (shifts, "shifted = places + 1 + h", "shifted = places + h"),
    "and of head h + 1": (shifts, "shifted = places + 1 + h", "shifted = places + 2 + h"),
    "every likely token counts alike": (entropy, "logits.gather(-1, ids) * chances", "logits.gather(-1, ids) / 32"),
    "who is outside counts, too": (entropy, "each[inside.to(each.device)]", "each"),
    "an answer's end is guessed beyond": (ends, "inside = shifted + 1 <", "inside = shifted <"),
    "a chain goes on after a wrong draft": (counts, "(chains == 1).all(-1)", "(chains[:, -1] == 1)"),
    "the end of the text counts as wrong": (counts, "right[(right[:, :i] >= 0).all(-1), :i]", "right[:, :i]"),
    "every epoch in the same order": (epochs, "seed * 1_000_003 + epoch", "seed"),
    "a resumed run begins anew": (epochs, "divmod(step, each)", "divmod(step % 2, each)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_versions_are_caught(name, text):
    check, right, wrong = WRONG[name]
    check(wrong_version(minserve.training, "RANKS = 10", "RANKS = 10"), text)  # the right one passes
    with pytest.raises(AssertionError):
        check(wrong_version(minserve.training, right, wrong), text)


# ---------------------------------------------------------------- the command
@pytest.fixture
def command(checkpoints, tmp_path, capsys, monkeypatch):
    """command("medusa", "--steps", 9) -> (exit code, what was said, the file)."""
    monkeypatch.setattr(train, "MEASURED_ON", 4)
    monkeypatch.setattr(self_text, "ANSWER", 24)
    monkeypatch.setattr(self_text, "SEATS", 4)

    def go(kind, *argv, out="part.safetensors"):
        asked = [kind, "--model", checkpoints("smollm2"), "--work", tmp_path, "--out", tmp_path / out]
        asked += ["--conversations", 8, "--vocabulary", 150, *argv]
        code = main(["train", *map(str, asked)])
        said = capsys.readouterr()
        return code, said.out + said.err, tmp_path / out

    return go


@pytest.mark.parametrize("kind", KINDS)
def test_the_command(kind, command, model):
    code, said, path = command(kind, "--steps", 20)
    assert code == 0 and "on 4 conversations it has not seen" in said, said
    part = load_part(kind, model, path)
    about = part.about
    assert (
        about["command"]
        == f"python -m minserve train {kind} --steps 20 --conversations 8 --vocabulary 150 "
        + (about["command"].split("--vocabulary 150 ")[1])
    )
    assert about["steps"] == 20 and len(about["losses"]) == 20 and about["seed"] == 0
    assert set(about["held_out"]) == {"conversations", "greedy", "sampled"}
    assert (path.parent / f"{kind}.png").read_bytes()[:4] == b"\x89PNG"
    if kind == "medusa":
        assert len(about["accuracies"]) == 4 and len(about["accuracies"][0]) == training.RANKS
    if kind == "exit":
        assert about["best"] in part.layers


def test_stopped_and_started_again(command, model, monkeypatch):
    whole = load_part("medusa", model, command("medusa", "--steps", 12)[2])
    real, count = training.LOSSES["medusa"], []

    def interrupted(*args):
        count.append(1)
        if len(count) == 6:
            raise KeyboardInterrupt
        return real(*args)

    for checkpoint in command("medusa", "--steps", 12)[2].parent.glob("*.pt"):
        checkpoint.unlink()
    monkeypatch.setitem(training.LOSSES, "medusa", interrupted)
    code, said, path = command("medusa", "--steps", 12, out="again.safetensors")
    assert code == 130 and "goes on where it was" in said and not path.exists()
    code, said, path = command("medusa", "--steps", 12, out="again.safetensors")
    assert code == 0 and "goes on after 5 steps" in said and len(count) == 13
    assert torch.equal(load_part("medusa", model, path).heads, whole.heads)
    code, said, path = command("medusa", "--steps", 12, out="again.safetensors")
    assert code == 0 and "goes on after 12 steps" in said and len(count) == 13  # nothing is left to train


@pytest.mark.parametrize(
    "argv, complaint",
    [
        (["--minutes", "0"], "--minutes is 0.0: it has to be more than 0"),
        (["--steps", "0"], "--steps is 0: it has to be at least 1"),
        (["--vocabulary", "1"], "--vocabulary is 1: it has to be more than 1"),
        (["--conversations", "0"], "--conversations is 0: it has to be more than 0"),
        (["--conversations", "2000000"], "from 1,000,000 on they are kept for measuring"),
        (["--model", "/nowhere"], "no model '/nowhere'"),
    ],
)
def test_refused_before_any_work(argv, complaint, command, tmp_path):
    code, said, _ = command("medusa", *argv)
    assert code == 2 and complaint in said and not list(tmp_path.glob("text*"))


def test_a_full_disk_says_so(command, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train, "save_part", full)
    code, said, path = command("medusa", "--steps", 2)
    assert code == 2 and "the disk is full" in said and not path.exists()


def test_held_out_conversations_are_nobodys_lesson(command, tmp_path, monkeypatch):
    seen = {}
    real = Study.__init__

    def watched(self, model, conversations, *rest):
        seen[len(seen)] = {c.number for c in conversations}
        real(self, model, conversations, *rest)

    monkeypatch.setattr(Study, "__init__", watched)
    command("medusa", "--steps", 2)
    own, others = seen.values()
    assert own == set(range(8)) and others == set(range(HELD_OUT, HELD_OUT + 4))
    lines = next(tmp_path.glob("text*.jsonl")).read_text().splitlines()
    assert {json.loads(line)["number"] for line in lines} == own | others
