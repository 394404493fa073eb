"""Notebook 12's experiments and figures: by hand where a hand can, on tiny models where it cannot."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from speculation_world import Scripted, markov, tree_of
from wrong_versions import wrong_version

from minserve.draft_model import EarlyExit
from minserve.engine import LLM
from minserve.lab import drafting, drafting_figures, figures
from minserve.lab.rounds import Run
from minserve.medusa import best_tree, gain
from minserve.request import SamplingParams
from minserve.trained import ExitHeads
from minserve.weights import load

plt.switch_backend("Agg")
ALONE = dict(adaptive=False, num_pages=16, max_running=1)


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("llama-3"), torch.float32)


# ---------------------------------------------------------------- text, guesses, trees
def lines_up(drafting, model):
    lines = drafting.lined_up(["a", "b", "c", "d"], heads=2).splitlines()
    assert lines[0].split() == "place token own head head 0 head 1".split()
    said = [line.split() for line in lines[1:]]
    assert said == ["0 a b c d".split(), "1 b c d -".split(), "2 c d - -".split(), "3 d - - -".split()]


def counts_what_is_right(drafting, model):
    ranks = torch.zeros(4, 2, 10).char()
    ranks[0, 0, 0] = ranks[1, 0, 2] = ranks[2, 0, 9] = ranks[0, 1, 1] = 1
    ranks[2:, 1] = -1  # behind the end
    assert drafting.right(ranks) == [pytest.approx([1 / 4, 2 / 4, 3 / 4]), pytest.approx([0, 1 / 2, 1 / 2])]
    assert drafting.chain_gains([[0.5, 0.3], [0.4, 0.1], [0.1, 0.1]]) == pytest.approx([0.5, 0.2, 0.02])
    assert drafting.widths([(0,), (1,), (0, 0), (2,), (0, 0, 0)]) == [3, 1, 1]
    assert drafting.lengths([0.5, 0.2]) == pytest.approx([1.5, 1.7])


def finds_all_trees(drafting, model):
    assert drafting.all_trees([2, 2], 1) == [[(0,)], [(1,)]]
    found = drafting.all_trees([2, 2], 3)
    assert len(found) == 6 and [(0,), (0, 0), (0, 1)] in found and [(0,), (0, 0), (1, 0)] not in found
    table = [[0.5, 0.2, 0.1], [0.6, 0.3]]
    worth = lambda tree: sum(gain(table, path) for path in tree)
    for nodes in 1, 2, 3, 4, 5:
        best = max(drafting.all_trees([3, 2], nodes), key=worth)
        assert worth(best) == pytest.approx(worth(best_tree(table, nodes)))


def says_what_pays(drafting, model):
    assert drafting.bits([-1, -1, 0]) == [-1, -1, -3, -3] and drafting.bits([-1, 0, -1])[3] == -7
    assert drafting.pays(1.5, 4, 0.05, 1.05) == pytest.approx(2.0)
    plain = Run([[0] * 11], [None] * 10, seconds=1.0, packing=0.1, steps=10, drafted=0, kept=0)
    run = Run([[0] * 11], [None] * 5, seconds=0.9, packing=0.3, steps=5, drafted=20, kept=5)
    assert drafting.cost(run, plain, 4) == pytest.approx(
        (0.125, 1.3)
    )  # 180 ms: 50 for drafts, 130 for the rest


def counts_bytes_once(drafting, model):
    exits = ExitHeads(model, torch.arange(0, 50, 5), (1, 2))
    E, rows = model.config.hidden_size, 10
    assert drafting.held_bytes(EarlyExit(1, head=exits[1])) == 4 * (E + E * E + rows * E) + 8 * rows
    shared = SimpleNamespace(heads=exits[1], head=exits[1])
    assert drafting.held_bytes(shared) == drafting.held_bytes(EarlyExit(1, head=exits[1]))
    assert drafting.held_bytes(EarlyExit(1)) == drafting.held_bytes(Scripted(None)) == 0


# ---------------------------------------------------------------- steps, looked at
def talks(drafting, model):
    text = drafting.talk(model, None, [3, 4], [5, 6], 3, question=7, answer=9)
    assert [its[:2] for its in text] == [(0, 0.0), (1, 0.7), (2, 0.0)]
    for _, temperature, begin, tokens in text:
        question = tokens[2 : begin - 2]
        assert tokens[:2] == [3, 4] and tokens[begin - 2 : begin] == [5, 6]
        assert len(question) == 7 and 5 not in question
        assert 1 <= len(tokens) - begin <= 9
        if not temperature:
            [[greedy]] = LLM(model, num_pages=16).generate(tokens[:begin], SamplingParams(9))
            assert greedy.tokens == tokens[begin:]
    assert len({tuple(its[3]) for its in text}) == 3
    again = drafting.talk(model, None, [3, 4], [text[0][3][4], 6], 1, question=7, answer=9)
    assert again[0][3][2 : again[0][2] - 2] == text[0][3][2:4]  # it ends where the user's turn does


def hears(drafting, model):
    llm = LLM(model, drafter=Scripted(lambda r, n: tree_of([7, 8], [9, 8], [7, 9]), 5, True), **ALONE)
    steps = drafting.listen(llm)
    prompt = [1, 2, 3, 4, 5]
    [[answer]] = llm.generate(prompt, SamplingParams(12, ignore_eos=True))
    (known, draft, logits), *more = steps
    assert (known, draft, len(logits)) == (prompt, None, 1)
    known, draft, logits = more[1]
    assert known == (prompt + answer.tokens)[: len(known)] and len(draft.tokens) == 5 == len(logits) - 1
    chains = drafting.behind_chains(model, known, draft)
    assert torch.allclose(logits, chains, atol=1e-4) and not torch.allclose(logits[1], logits[3], atol=1e-2)


def finds_keys_in_place(drafting, model):
    llm = LLM(model, drafter=EarlyExit(2, 3), **ALONE)
    compute = llm.compute
    assert drafting.in_place(llm, [1, 2, 3], (0, 1, 2)) == {0: True, 1: True, 2: False}
    assert llm.compute == compute


def counts_second_tokens(drafting, model):
    table = torch.full((8, 8), -9.0)
    table[1] = torch.tensor([0.0, 0, 2.0, 1.0, 0, 0, 0, 0])
    table[2, 4:6], table[3, 6] = torch.tensor([1.0, 0.0]), 3.0
    its = markov(table)
    shares = drafting.second_tokens(its, None, Scripted(lambda r, n: [6][:n], 1), [5, 1], 2, n=400)
    assert shares.sum() == pytest.approx(1) and len(shares) == 8
    assert shares.tolist() == pytest.approx(table[2].softmax(-1).tolist(), abs=0.12)


def finds_a_place_to_look_at(drafting, model):
    """Text 0 1 2 3 | 4 5 6 7, tokens 10 times that; head 0 names column 6 everywhere, which is token 60."""
    few = torch.tensor([[1, 6], [2, 6], [3, 6], [4, 6], [5, 6], [6, 5], [7, 6], [0, 6]], dtype=torch.int32)
    x = torch.tensor([0.1, 0.01, 0.02, 0.5, 0.05, 0.4, 0.45, 0.5])  # chances of the second of each
    study = SimpleNamespace(
        guessed=torch.tensor([0, 1, 1, 0, 1, 1, 1, 0]).bool(), ends=torch.tensor([4] * 4 + [8] * 4),
        starts=torch.tensor([0, 4, 8]), tokens=10 * torch.arange(8), vocabulary=10 * torch.arange(8),
        ids=few, chances=torch.stack((1 - x, x), 1), states={drafting.LAST: torch.zeros(8, 3)},
        to=lambda places, what: what[places],
    )  # fmt: skip
    heads = lambda x: torch.nn.functional.one_hot(torch.full((len(x), 2), 6), 8) * (1 - x[:, :1, None])
    heads.rows = torch.zeros(1)
    # places 1, 4, 5 have two successors, 2 has not; of the next .99, .95, .6, .98; of 60 behind it .02, .6, .45, .5
    assert drafting.undecided(heads, study) == ([40], 50, 60)
    study.states[drafting.LAST][4] = 1  # here it has no opinion
    assert drafting.undecided(heads, study) == ([40, 50], 60, 60)


TESTS = [
    finds_a_place_to_look_at,
    lines_up, counts_what_is_right, finds_all_trees, says_what_pays, counts_bytes_once, talks, hears,
    finds_keys_in_place, counts_second_tokens,
]  # fmt: skip


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__)
def test_right(test, model):
    test(drafting, model)


WRONG = [
    (finds_a_place_to_look_at, "places[places + 2 < study.ends[places]]", "places"),
    (finds_a_place_to_look_at, "chance(places + 1, named)", "chance(places, named)"),
    (finds_a_place_to_look_at, "sure.square() * x", "x"),
    (finds_a_place_to_look_at, "sure.square() * x * (1 - x)", "sure"),
    (finds_a_place_to_look_at, " * (best - second)", ""),
    (finds_a_place_to_look_at, "study.tokens[start : places", "study.tokens[: places"),
    (lines_up, "range(1, len(names) + 1)", "range(len(names))"),
    (lines_up, "p + ahead < len(words)", "p + ahead < len(words) - 1"),
    (counts_what_is_right, "head[head[:, 0] >= 0]", "head.clamp(min=0)"),
    (counts_what_is_right, "inside[:, :n].amax(1)", "inside[:, n - 1]"),
    (counts_what_is_right, "range(1, max(depths) + 1)", "range(1, max(depths))"),
    (counts_what_is_right, "initial=1.0))[1:]", "initial=1.0))[:-1]"),
    (finds_all_trees, "path[:-1] in tree", "True"),
    (says_what_pays, "1 + kept) /", "kept) /"),
    (says_what_pays, "- k * c", "- c"),
    (counts_bytes_once, ".values())\n", ".values()) * 2\n"),
    (counts_bytes_once, "*part.buffers()", ""),
    (talks, "out.request.tokens + after", "out.request.tokens + before"),
    (talks, "stop_token_ids=after[:1]", "stop_token_ids=before[:1]"),
    (talks, "0.7 * (i % 2)", "0.7"),
    (talks, "top_p=0.95, seed=i", "top_p=0.95, seed=1"),
    (hears, "[*paths[parent + 1], token]", "[*paths[-1], token]"),
    (hears, "list(request.tokens)", "request.tokens"),
    (finds_keys_in_place, "batch.slots[:-1]", "batch.slots"),
    (finds_keys_in_place, "early, results = keys(), compute(batch)", "results, early = compute(batch), keys()"),
    (counts_second_tokens, "if out.tokens[0] == first", ""),
    (counts_second_tokens, "out.tokens[1] for", "out.tokens[2] for"),
]  # fmt: skip


@pytest.mark.parametrize("test, old, new", WRONG, ids=[f"{t.__name__}: {new}" for t, _, new in WRONG])
def test_wrong_experiments_are_noticed(test, old, new, model):
    with pytest.raises(AssertionError):
        test(wrong_version(drafting, old, new), model)


# ---------------------------------------------------------------- figures
def draw(function, *args):
    ax = figures.axes(7, 3.2)
    result = function(ax, *args)
    ax.figure.canvas.draw()
    plt.close(ax.figure)
    return ax, result


def words_of(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_a_mask_shows_who_sees_whom():
    parents = [-1, -1, 0]
    ax, _ = draw(drafting_figures.mask, ["w", "a", "b", "c"], parents, 20)
    boxes = [(b.get_x(), b.get_y(), b.get_facecolor()) for b in ax.patches]
    assert len(boxes) == 10  # nobody sees what comes after it
    unseen = {
        (x, y) for x, y, face in boxes if face == plt.matplotlib.colors.to_rgba(drafting_figures.UNSEEN)
    }
    assert unseen == {(1, 2), (2, 3)}
    words = words_of(ax)
    assert words.count("0") == 2 and words.count("1") == 8
    assert [word for word in words if word in ("20", "21", "22", "23")] == ["20", "21", "21", "22"]
    assert [word for word in words if word.startswith("…")] == ["…1111", "…1111", "…1101", "…1101"]
    assert "slot 20" in words and "+3" in words and "      c" in words


def test_a_surface_says_where_it_pays():
    table, measured = [[1.2, 0.9], [0.7, 0.4]], {(3, 7): 0.95}
    ax, best = draw(drafting_figures.surface, (3, 6), (1, 7), table, measured, "here")
    assert best == 1.2 and "1 draft from 3 layers, 1.20" in ax.get_title(loc="left")
    words = words_of(ax)
    assert words[:4] == ["1.20", "0.90\nmeasured 0.95", "0.70", "0.40"] and words[-1] == "here"
    faces = [b.get_facecolor() for b in ax.patches if b.get_fill()]
    blue = [face[2] > face[0] for face in faces]
    assert blue == [True, False, False, False] and faces[3][2] < faces[1][2]  # further from 1, more colour
    assert sum(not b.get_fill() for b in ax.patches) == 1


def test_sizes_and_losses_say_what_they_found():
    lines = {"tree": [1.3, 1.5, 1.6], "chain": [1.3, 1.4]}
    dots = {"tree": [(3, 1.7)], "chain": [(2, 1.2)]}
    ax, _ = draw(drafting_figures.sizes, range(1, 4), lines, dots, "here")
    assert [list(line.get_xdata()) for line in ax.lines] == [[1, 2, 3], [3], [1, 2], [2]]
    assert ax.get_title(loc="left") == "A tree of 3 makes 1.60 tokens per step; a chain ends at 1.40"
    curves = {"trained on": [9.0, 4.0], "held out": [9.0, 6.0]}
    ax, ends = draw(drafting_figures.losses, range(0, 11, 10), curves, "here")
    assert ends == (4.0, 6.0) and "4.0 on what it learned from, 6.0 on what is new" in ax.get_title(
        loc="left"
    )


def test_titles_fit():
    table = [[1.23] * 3] * 4
    axes = [
        draw(drafting_figures.surface, (3, 6, 10, 15), (1, 3, 7), table, {}, "here")[0],
        draw(drafting_figures.losses, range(0, 101, 10), {"a": [1.0] * 11, "b": [2.0] * 11}, "here")[0],
    ]
    for ax in axes:
        box = ax.title if ax.get_title() else ax._left_title
        assert box.get_window_extent().x1 < ax.figure.bbox.width
