"""Medusa: heads that know the future are never wrong, and heads that do not cost no token.

The oracle   heads that look a state up among all states of the answers that will come, and name what follows there, at
             a rank that changes from place to place: only a tree with the right node at the right place keeps it
Logits       at every node of a tree they are those of its path alone, behind the request's tokens
"""

import importlib
import sys
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import test_engine
import torch
from test_draft_model import FREE, Watched, last_logits, refused
from test_engine import MIXED, alone, run
from test_engine import PROMPTS as SOME
from wrong_versions import wrong_version

import minserve.engine
import minserve.medusa
from minserve.request import Request
from minserve.speculation import Places
from minserve.trained import MedusaHeads
from minserve.weights import load

REAL = minserve.medusa
HEADS = 3
PROMPTS = [*SOME[:4], list(range(60, 77))]  # no token twice in a row: equal pasts have equal states
WIDE = [
    path for depth in (1, 2, 3) for path in product(range(2), repeat=depth)
]  # 14 nodes: all there are of 2 ranks
BENT = [(0,), (1,), (1, 0), (2,), (1, 0, 2), (0, 0), (0, 1), (2, 2)]


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("llama-3"))


class Oracle:
    """What MedusaHeads are, but for knowing the answers to these prompts."""

    about: dict = {}

    def __init__(self, model, prompts=PROMPTS, params=FREE, rank=lambda place, head: 0, vocabulary=None):
        V = model.config.vocab_size
        self.heads, self.rows = [None] * HEADS, torch.zeros(V, model.config.hidden_size)
        self.vocabulary = torch.arange(V) if vocabulary is None else vocabulary
        self.column = torch.argsort(self.vocabulary)
        states, follows = [], []
        for prompt in prompts:
            tokens = (*prompt, *alone_once(model, tuple(prompt), params))
            states.append(all_states(model, tokens))
            for p in range(len(tokens)):
                its = [tokens[p + 2 + h] if p + 2 + h < len(tokens) else 0 for h in range(HEADS)]
                follows.append([(token, rank(p, h)) for h, token in enumerate(its)])
        self.states, self.follows = torch.cat(states), follows

    def __call__(self, x):
        """The right token at its rank; above it, others."""
        logits = torch.zeros(len(x), HEADS, len(self.vocabulary))
        for b, place in enumerate(torch.cdist(x, self.states).argmin(-1).tolist()):
            for h, (token, rank) in enumerate(self.follows[place]):
                others = [t for t in range(10) if t != token]
                order = [*others[:rank], token, *others[rank:]]
                logits[b, h, self.column[order]] = torch.arange(len(order), 0, -1).float()
        return logits


@cache
def alone_once(model, prompt: tuple[int, ...], params, index=0):
    return alone(model, list(prompt), params, index)


def plainly(model, prompts=SOME, params=FREE):
    return [[alone_once(model, tuple(prompt), params, i) for i in range(params.n)] for prompt in prompts]


@cache
def logits_once(model, tokens: tuple[int, ...]):
    return last_logits(model, list(tokens))


@cache
def all_states(model, tokens: tuple[int, ...]):
    def attend(layer, q, k, v):
        (T, H, D), G = q.shape, k.shape[1]
        wide = (x.transpose(0, 1).repeat_interleave(H // G, 0) for x in (k, v))
        made = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), *wide, is_causal=True)
        return made.transpose(0, 1).reshape(T, H, D)

    return model.states(torch.tensor(tokens), torch.arange(len(tokens)), attend)


def turning(place, head):
    return (place * 3 // 2 + head) % 2


def logits_are_those_of_each_path(watched, model):
    """From now on, compare the logits of every place that a step verifies."""
    compute, seen = watched.engine.compute, []

    def spy(batch):
        logits, drawn, states = compute(batch)
        places = Places(batch)
        for p, (request, up) in enumerate(zip(places.owner, places.parents)):
            path = [places.ids[p]] if up >= 0 else []
            while up > 0:
                path.insert(0, places.ids[places.first[p] + up])
                up = places.parents[places.first[p] + up]
            right = logits_once(model, (*request.tokens, *path))
            torch.testing.assert_close(logits[p].float(), right, atol=2e-4, rtol=2e-4)
            seen.append(len(path))
        return logits, drawn, states

    watched.engine.compute = spy
    return seen


# ---------------------------------------------------------------- heads that know
@pytest.mark.parametrize("step", ["plain", "graph"])
@pytest.mark.parametrize(
    "rank, tree", [(lambda p, h: 0, [(0,), (0, 0), (0, 0, 0)]), (turning, WIDE)], ids=["chain", "tree"]
)
def test_heads_that_know_are_never_wrong(model, rank, tree, step, module=REAL):
    oracle = Oracle(model, rank=rank)
    watched = Watched(model, module.Medusa(oracle, tree=tree), step=step, num_pages=100, token_budget=256)
    seen = logits_are_those_of_each_path(watched, model)
    assert watched.answer(PROMPTS) == plainly(model, PROMPTS)
    whole = [row for row in watched.rows if row.drafted == len(tree)]
    assert len(whole) >= len(PROMPTS) and {row.kept for row in whole} == {3} and max(seen) == 3


@pytest.mark.parametrize("kind", [None, "int8", "fp8", "int4"])
def test_any_tree_leaves_tokens_alone(model, kind, module=REAL):
    options = dict(kv_cache_dtype=kind, page_size=16 if kind == "int4" else 8)
    plain = Watched(model, module.Medusa(Oracle(model, PROMPTS[:1]), tree=BENT), (0,), **options)
    watched = Watched(model, module.Medusa(Oracle(model, rank=turning), tree=BENT), (8, 3, 1, 0), **options)
    seen = logits_are_those_of_each_path(watched, model) if kind is None else []
    assert watched.answer(PROMPTS) == plain.answer(PROMPTS)
    assert kind or max(seen) > 1
    assert watched.engine.speculation.drafter.branches == (kind != "int4")
    assert max(row.drafted for row in watched.rows) == (3 if kind == "int4" else 8)


@pytest.mark.parametrize("family", ["mistral", "qwen2-window"])
def test_behind_a_window_trees_are_chains(checkpoints, family, module=REAL):
    its = load(checkpoints(family))
    drafter = module.Medusa(SimpleNamespace(**vars(Oracle(its, [[1]])), __call__=None, about={}), tree=BENT)
    drafter.heads = lambda x: torch.randn(len(x), HEADS, 251)
    drafter.heads.rows, drafter.heads.vocabulary = torch.zeros(251, 96), torch.arange(251)
    watched = Watched(its, drafter)
    assert drafter.paths == [(0,), (0, 0), (0, 0, 0)] and drafter.k == 3 and not drafter.branches
    assert watched.answer() == plainly(its)


def test_after_a_preemption_and_with_chunks(model, module=REAL):
    for options in (dict(num_pages=14), dict(token_budget=16, chunk=7)):
        watched = Watched(model, module.Medusa(Oracle(model), tree=[(0,), (0, 0), (0, 0, 0)]), **options)
        assert watched.answer(PROMPTS) == plainly(model, PROMPTS)
        watched.never_rejected()
        assert watched.engine.scheduler.preemptions or "chunk" in options


def test_nothing_is_drafted_from_the_state_of_somebody_else(model, module=REAL):
    drafter = module.Medusa(Oracle(model, PROMPTS[:1]), tree=[(0,), (0, 0)])
    Watched(model, drafter)
    request = Request(3, [1, 2], FREE, 9)
    request.seat, request.granted = 2, 2
    ask = lambda: [draft and len(draft.tokens) for draft in drafter.propose([(request, 3)])]
    assert ask() == [None]
    drafter.observe([request], torch.ones(1, 96))
    assert ask() == [2]
    request.preemptions = 1
    assert ask() == [None]
    drafter.observe([request], torch.ones(1, 96))
    request.granted = 0
    assert ask() == [None]


def test_forks(model, module=REAL):
    params = replace(FREE, n=3)
    for prompt in (PROMPTS[0], [1] * 16):
        watched = Watched(
            model, module.Medusa(Oracle(model, [prompt], rank=turning), tree=WIDE[:6]), num_pages=100
        )
        assert watched.answer([prompt], params) == plainly(model, [prompt], params)
        assert any(row.kept == 2 for row in watched.rows)
        drawn = replace(params, temperature=1.0, seed=3)
        assert watched.answer([prompt], drawn) == plainly(model, [prompt], drawn)


def test_sampled_beside_greedy(model, module=REAL):
    wanted = [replace(FREE, max_tokens=12, **m) for m in MIXED]
    watched = Watched(model, module.Medusa(Oracle(model, rank=turning), tree=BENT), num_pages=100)
    outputs = [watched.engine.add(PROMPTS[0], params) for params in wanted]
    run(watched.engine)
    assert [out.tokens for (out,) in outputs] == [alone(model, PROMPTS[0], params) for params in wanted]


def test_columns_stand_for_other_ids(model, module=REAL):
    ids = torch.randperm(251, generator=torch.Generator().manual_seed(0))
    watched = Watched(model, module.Medusa(Oracle(model, vocabulary=ids), tree=[(0,), (0, 0), (0, 0, 0)]))
    assert watched.answer(PROMPTS) == plainly(model, PROMPTS)
    watched.never_rejected()


def test_untrained_heads(model, module=REAL):
    """The module that is trained, as it is before: it repeats the target's own best guess of the place before."""
    heads = MedusaHeads(model, torch.arange(1, 251, 2), HEADS).eval().requires_grad_(False)
    heads.about = {"accuracies": [[0.5, 0.2, 0.1], [0.3, 0.1, 0.05], [0.2, 0.1, 0.0]]}
    drafter = module.Medusa(heads, 9)
    assert len(drafter.paths) == drafter.k == 9 and drafter.gains == sorted(drafter.gains, reverse=True)
    watched = Watched(model, drafter, (9, 4))
    assert watched.answer(PROMPTS) == plainly(model, PROMPTS)
    assert {row.drafted for row in watched.rows} >= {9, 4}
    heads.heads.data.normal_()
    for rows in (1, 2, 4, 5):
        x = torch.randn(rows, 96)
        torch.testing.assert_close(drafter.scores(x), heads(x), atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- which nodes
def test_the_best_tree_is_the_best_of_all(module=REAL):
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.4, 0.35, 0.2]]
    all_ = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    worth = {path: module.gain(accuracies, path) for path in all_}
    assert worth[(0, 1, 2)] == pytest.approx(0.6 * 0.3 * 0.2)
    for n in (1, 2, 3, 4, 5, 6):
        trees = [t for t in combinations(WIDE, n) if all(len(p) == 1 or p[:-1] in t for p in t)]
        best = max(sum(worth[p] for p in t) for t in trees)
        found = module.best_tree([ranks[:2] for ranks in accuracies], n)
        assert sum(worth[p] for p in found) == pytest.approx(best)
    found = module.best_tree(accuracies, 39)
    assert sorted(found) == sorted(all_) and found[:12] == module.best_tree(accuracies, 12)
    assert all(len(path) == 1 or path[:-1] in found[:i] for i, path in enumerate(found))
    assert [worth[path] for path in found] == sorted(worth.values(), reverse=True)
    assert module.best_tree(accuracies, 99) == found and module.best_tree([[1.0], [1.0]], 9) == [(0,), (0, 0)]


def test_a_draft_begins_with_the_best_chain(model, module=REAL):
    drafter = module.Medusa(Oracle(model, [[1]]), tree=BENT)
    Watched(model, drafter)
    assert drafter.shape(8) == (
        [(0,), (0, 0), (1,), (1, 0), (2,), (1, 0, 2), (0, 1), (2, 2)], [-1, 0, -1, 2, -1, 3, 0, 4]
    )  # fmt: skip
    assert drafter.shape(2) == ([(0,), (1,)], [-1, -1]) and drafter.shape(1) == ([(0,)], None)
    for n in range(1, 9):
        assert sorted(drafter.shape(n)[0]) == sorted(BENT[:n])


# ---------------------------------------------------------------- typical acceptance
def test_typical_is_the_papers_rule(model, module=REAL):
    drafter = module.Medusa(Oracle(model, [[1]]), tree=[(0,)], typical=(0.3, 0.5))
    p = torch.tensor([[0.97, 0.02, 0.01, 0.0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.3, 0.15, 0.05]])
    entropy = torch.tensor([0.1542, 1.3863, 1.1422])  # in nats
    bound = (0.5 * (-entropy).exp()).clamp(max=0.3)  # 0.3, 0.125, 0.1596
    for temperature in (1.0, 3.0):
        logits = p.log() * temperature
        for token in range(4):
            found = drafter.accepts(logits, torch.full((3,), temperature), torch.full((3,), token))
            assert found.tolist() == (p[:, token] > bound).tolist()
    assert drafter.accepts(p.log(), torch.ones(3), torch.tensor([0, 0, 2])).tolist() == [True, True, False]


def test_typical_keeps_more_but_only_where_a_request_samples(model, module=REAL):
    def medusa(typical):
        return module.Medusa(Oracle(model, rank=turning), tree=WIDE[:6], typical=typical)

    drawn = replace(FREE, temperature=1.5, seed=8)
    never = Watched(
        model, medusa((1.0, 1e9)), num_pages=100, token_budget=128
    )  # p > 1: nothing is likely enough
    assert never.answer(PROMPTS, drawn) == plainly(model, PROMPTS, drawn)
    always = Watched(model, medusa((1e-30, 1.0)), num_pages=100, token_budget=128)
    assert always.answer(PROMPTS, drawn) != plainly(model, PROMPTS, drawn)
    assert all(row.kept == 2 for row in always.rows if row.drafted == 6)
    assert always.answer(PROMPTS) == plainly(model, PROMPTS)  # greedy


# ---------------------------------------------------------------- what does not fit
def test_what_does_not_fit_is_refused(model, module=REAL):
    heads = Oracle(model, [[1]])
    made = lambda tree, **more: lambda: module.Medusa(heads, tree=tree, **more)
    refused(model, made([(0,), (0, 0), (0, 0, 0), (0,) * 4]), "(0, 0, 0, 0) lies 4 deep", "3 heads")
    refused(model, made([(0,), ()]), "0 deep")
    refused(model, made([(0,), (0, 2)], top=2), "candidate 2", "gives 2, 0 to 1")
    refused(model, made([(251,)], top=300), "candidate 251", "gives 251")
    refused(model, made([(-1,)]), "candidate -1")
    refused(model, made([(i,) for i in range(63)], top=99), "63 nodes", "1 to 62")
    refused(model, made([]), "0 nodes")
    refused(model, made([(0, 1), (0,)]), "(0, 1)", "before its parent (0,)")
    refused(model, made([(0,), (0,)]), "twice")
    for typical in ((0, 0.3), (2, 0.3), (0.1, 0)):
        refused(model, made([(0,)], typical=typical), "epsilon")
    heads.rows = torch.zeros(251, 64)
    refused(model, made([(0,)]), "64 channels", "96")


# ---------------------------------------------------------------- these tests can fail
CASES = {  # the tests above, which the right version passes
    "chain": lambda m, x: test_heads_that_know_are_never_wrong(
        m, lambda p, h: 0, WIDE[:1] + [(0, 0), (0, 0, 0)], "plain", x
    ),
    "tree": lambda m, x: test_heads_that_know_are_never_wrong(m, turning, WIDE, "graph", x),
    "bent": lambda m, x: test_any_tree_leaves_tokens_alone(m, None, x),
    "int4": lambda m, x: test_any_tree_leaves_tokens_alone(m, "int4", x),
    "again": lambda m, x: test_after_a_preemption_and_with_chunks(m, x),
    "somebody": lambda m, x: test_nothing_is_drafted_from_the_state_of_somebody_else(m, x),
    "forks": lambda m, x: test_forks(m, x),
    "ids": lambda m, x: test_columns_stand_for_other_ids(m, x),
    "untrained": lambda m, x: test_untrained_heads(m, x),
    "best": lambda m, x: test_the_best_tree_is_the_best_of_all(x),
    "order": lambda m, x: test_a_draft_begins_with_the_best_chain(m, x),
    "rule": lambda m, x: test_typical_is_the_papers_rule(m, x),
    "typical": lambda m, x: test_typical_keeps_more_but_only_where_a_request_samples(m, x),
    "refused": lambda m, x: test_what_does_not_fit_is_refused(m, x),
}
WRONG = [  # module, right, wrong, who must notice
    ("medusa", "for r in requests]] = hidden", "for r in requests]] = hidden.flip(0)", "chain"),
    ("medusa", "[len(path) - 1][path[-1]]", "[0][path[-1]]", "tree"),
    ("medusa", "[len(path) - 1][path[-1]]", "[len(path) - 1][path[0]]", "tree"),
    ("medusa", "self.heads.vocabulary[ranked]", "ranked", "ids"),
    ("medusa", "parents = [paths.index(path[:-1])", "parents = [paths.index(path[:1])", "tree"),
    ("medusa", "key=any", "key=len", "order"),
    ("medusa", "key=any", "key=lambda path: -len(path)", "bent"),
    ("medusa", "self.paths[:n]", "self.paths[-n:]", "order"),
    ("medusa", "if not engine.cache.branches:", "if False:", "int4"),
    ("medusa", "[(0,) * d for d in range(1, depth + 1)]", "[(0,) * d for d in range(1, depth)]", "int4"),
    ("medusa", "self.owner[r.seat] == (r.id, r.preemptions)", "True", "somebody"),
    ("medusa", "ahead = (x[:, None] + silu(turned))", "ahead = (x[:, None] + turned)", "untrained"),
    ("medusa", "r.granted and self.owner", "self.owner", "somebody"),
    ("medusa", "self.owner[r.seat] = r.id, r.preemptions", "pass", "chain"),
    ("medusa", "heappop(open_)[1]", "open_.pop()[1]", "best"),
    ("medusa", "for depth, rank in enumerate(path)", "for depth, rank in enumerate(path[-1:])", "best"),
    ("medusa", "path[:-1] + (path[-1] + 1,)", "path[:-1] + (path[-1] + 2,)", "best"),
    ("medusa", ".clamp(max=epsilon)", ".clamp(min=epsilon)", "rule"),
    ("medusa", "(-entropy).exp()", "entropy.exp()", "rule"),
    ("medusa", "logits / temperature[:, None]", "logits", "rule"),
    ("medusa", ".nan_to_num(0.0)", "", "rule"),
    ("medusa", "1 <= len(path) <= heads", "1 <= len(path)", "refused"),
    ("medusa", "<= max(path) < most", "<= max(path)", "refused"),
    # what packs and judges a tree
    ("batch", "seen.append([*seen[parent + 1], i])", "seen.append([*range(i + 1)])", "tree"),
    ("batch", "depths.append(depths[parent + 1] + 1)", "depths.append(i)", "tree"),
    ("speculation", "at = [first + place - path[0], first + i]", "at = [first + i, first + i]", "tree"),
    ("speculation", "states[[path[-1] for path in paths]]", "states[[path[0] for path in paths]]", "tree"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, right, wrong, case", WRONG, ids=[f"{w[3]}: {w[2][:40]}" for w in WRONG])
def test_a_wrong_version_is_noticed(monkeypatch, model, name, right, wrong, case):
    broken = wrong_version(importlib.import_module(f"minserve.{name}"), right, wrong)
    if name != "medusa":  # an engine that uses the broken part
        monkeypatch.setitem(sys.modules, f"minserve.{name}", broken)
        monkeypatch.setattr(
            test_engine,
            "Engine",
            wrong_version(minserve.engine, "overlap: bool | None", "overlap: bool | None").Engine,
        )
    with pytest.raises(
        (Exception, pytest.fail.Exception)
    ) as noticed:  # a wrong answer, or whatever trouble it gets into
        CASES[case](model, broken if name == "medusa" else REAL)
    assert not isinstance(noticed.value, (SyntaxError, NameError))
