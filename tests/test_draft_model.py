"""A draft only saves steps: with it every token is what it was, and a draft that knows the target is never rejected.

Same weights   a draft with the target's own weights guesses right always. Whatever makes its cache differ from the
               target's (a token it never saw, a page that was somebody else's, a rejected draft) shows as a rejection
Contents       between steps, the draft's keys and values are those that its model computes from the tokens alone
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from math import prod

import pytest
import torch
from speculation_world import markov
from test_engine import MIXED, PROMPTS, alone, engine, run
from wrong_versions import wrong_version

import minserve.draft_model
from minserve.model import Model
from minserve.request import SamplingParams
from minserve.trained import ExitHead
from minserve.weights import load

REAL = minserve.draft_model
FREE = SamplingParams(max_tokens=21, ignore_eos=True)
LONG = [9, 8, 7] * 9


@pytest.fixture(scope="module")
def model(checkpoints):
    return load(checkpoints("llama-3"))


@pytest.fixture(scope="module")
def other(model):
    return Model.random(replace(model.config, num_layers=2, windows=(None,) * 2), seed=3)


@pytest.fixture(scope="module")
def noisy(model):
    """The target but for a little noise: it is right about half of the time."""
    made = Model.random(model.config)
    generator = torch.Generator().manual_seed(1)
    for mine, right in zip(made.parameters(), model.parameters()):
        mine.data = right.data + 0.008 * torch.randn(right.shape, generator=generator)
    return made


class Watched:
    """An engine with a drafter: its answers, and what its log says of the drafts."""

    def __init__(self, model, drafter, ks=None, check=None, **options):
        self.engine = engine(model, drafter=drafter, adaptive=False, **options)
        spec = self.engine.speculation
        if ks:
            limit = spec.limit
            spec.limit = lambda request: min(limit(request), ks[self.engine.scheduler.steps % len(ks)])
        if check:
            step = self.engine.step
            self.engine.step = lambda: [step(), check(self.engine, drafter)][0]

    def answer(self, prompts=PROMPTS, params=FREE):
        """Tokens of each prompt's first answer."""
        outputs = [self.engine.add(prompt, params) for prompt in prompts]
        run(self.engine)
        assert self.engine.speculation.on, "the drafter failed"
        assert all(out.error is None for its in outputs for out in its)
        return [[out.tokens for out in its] for its in outputs]

    @property
    def rows(self):
        return [row for record in self.engine.log for row in record.rows if row.drafted]

    def never_rejected(self):
        assert self.rows and [row.kept for row in self.rows] == [row.drafted for row in self.rows]


def plainly(model, prompts=PROMPTS, params=FREE):
    return [[alone(model, prompt, params, i) for i in range(params.n)] for prompt in prompts]


def in_the_cache(engine, drafter):
    """What lies in the draft's pages, against its model run over the tokens alone."""
    S = engine.pages.page_size
    for r in engine.scheduler.running:
        if drafter.owner[r.seat] != (r.id, r.preemptions):
            continue
        done = min(drafter.done[r.seat], r.computed)
        kept: dict = {}

        def attend(layer, q, k, v, kept=kept):
            kept[layer] = k, v
            T, (H, D), G = len(q), q.shape[1:], k.shape[1]
            wide = (x.transpose(0, 1).repeat_interleave(H // G, 0) for x in (k, v))
            made = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), *wide, is_causal=True)
            return made.transpose(0, 1).reshape(T, H, D)

        drafter.model.states(torch.tensor(r.tokens), torch.arange(len(r.tokens)), attend)
        slots = torch.tensor([r.pages[p // S] * S + p % S for p in range(r.computed)])
        sure = [
            min((i + 1) * S, i * S + int(drafter.filled[page]), r.computed) for i, page in enumerate(r.pages)
        ]
        places = {*range(done)} | {p for i, end in enumerate(sure) for p in range(i * S, end)}
        where = torch.tensor(sorted(places), dtype=torch.int64)
        for layer, (k, v) in kept.items():
            for mine, right in zip(drafter.own.slots_of(layer), (k, v)):
                torch.testing.assert_close(mine[slots[where]], right[where], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- same weights
@pytest.mark.parametrize("k, step", [(1, "graph"), (2, "plain"), (4, "fused"), (4, "graph"), (15, "graph")])
def test_its_own_weights_are_never_wrong(model, k, step, module=REAL):
    watched = Watched(model, module.DraftModel(model, k), check=in_the_cache, step=step)
    assert watched.answer() == plainly(model)
    watched.never_rejected()
    whole = [row for row in watched.rows if row.drafted == k]  # not cut short by the end of the answer
    assert len(whole) >= len(PROMPTS) * ((FREE.max_tokens - 1) // (k + 1)) and all(
        row.num_tokens == k + 1 for row in whole
    )


def test_it_catches_up_after_steps_without_drafts(model, module=REAL):
    watched = Watched(model, module.DraftModel(model, 3), (3, 0, 0, 3), in_the_cache)
    assert watched.answer() == plainly(model)
    watched.never_rejected()
    assert any(not row.drafted and row.sampled for record in watched.engine.log for row in record.rows)


def test_every_request_its_own_k(model, module=REAL):
    watched = Watched(model, module.DraftModel(model, 5), check=in_the_cache)
    spec, limit = watched.engine.speculation, watched.engine.speculation.limit
    spec.limit = lambda request: min(limit(request), request.id)
    assert watched.answer() == plainly(model)
    watched.never_rejected()
    assert {(row.request, row.drafted) for row in watched.rows} >= {(i, i) for i in range(1, 5)}


@pytest.mark.parametrize("budget", [9, 16])
def test_chunks_of_a_prompt(model, budget, module=REAL):
    watched = Watched(model, module.DraftModel(model, 2), check=in_the_cache, token_budget=budget, chunk=7)
    assert watched.answer() == plainly(model)
    watched.never_rejected()


def test_after_a_preemption(model, module=REAL):
    watched = Watched(model, module.DraftModel(model, 4), check=in_the_cache, num_pages=14)
    assert watched.answer() == plainly(model)
    watched.never_rejected()
    assert watched.engine.scheduler.preemptions


def test_a_known_prefix_is_not_computed_again(model, module=REAL):
    drafter = module.DraftModel(model, 4)
    watched = Watched(model, drafter, check=in_the_cache)
    watched.answer([LONG], replace(FREE, max_tokens=6))  # a single draft
    computed, steps = [], drafter.steps
    drafter.steps = lambda batch: [computed.append(sum(batch.counts)), steps(batch)][1]
    assert watched.answer([LONG]) == plainly(model, [LONG])
    watched.never_rejected()
    assert watched.engine.scheduler.hit_tokens == 24 and sum(computed) < len(LONG) - 24 + FREE.max_tokens + 8


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_page_that_was_somebody_elses(model, prefix_caching, module=REAL):
    """It held a draft's keys; then a request without drafts filled it; then one with drafts finds it in the index.

    Between the two, the seat is somebody's who has drafted as far.
    """
    ks = [4]
    watched = Watched(
        model, module.DraftModel(model, 4), ks, in_the_cache, num_pages=9, prefix_caching=prefix_caching
    )
    for prompt, k in ((LONG, 4), ([5] * 30, 4), ([6] * 40, 0), (LONG, 4), ([6] * 40, 4), (LONG, 4)):
        ks[0] = k
        assert watched.answer([prompt]) == plainly(model, [prompt])
    watched.never_rejected()
    assert not prefix_caching or watched.engine.scheduler.hit_tokens


@pytest.mark.parametrize("prompt", [PROMPTS[0], LONG, [1] * 16], ids=len)
def test_forks_share_its_pages(model, prompt, module=REAL):
    params = replace(FREE, n=4, temperature=1.3, seed=5, max_tokens=12)
    watched = Watched(model, module.DraftModel(model, 3, sampled=True), check=in_the_cache)
    for answers in (watched.answer([prompt], params)[0], watched.answer([prompt], replace(FREE, n=4))[0]):
        assert len(answers) == 4
    watched.never_rejected()
    assert len({*map(tuple, answers)}) == 1  # greedy ones agree


def test_a_late_fork_takes_what_its_leader_has(model, module=REAL):
    """It waits for a seat while its leader drafts; then the page that both write into is copied."""
    watched = Watched(model, module.DraftModel(model, 3), check=in_the_cache, max_running=2)
    short = watched.engine.add([5], replace(FREE, max_tokens=9))
    assert watched.answer(PROMPTS[:1], replace(FREE, n=2)) == plainly(model, PROMPTS[:1], replace(FREE, n=2))
    assert short[0].finished
    watched.never_rejected()


# ---------------------------------------------------------------- other weights
@pytest.mark.parametrize("k", [1, 4])
def test_with_other_weights_tokens_stay(model, other, k, module=REAL):
    watched = Watched(model, module.DraftModel(other, k), check=in_the_cache)
    assert watched.answer() == plainly(model)
    assert any(row.kept < row.drafted for row in watched.rows)


def test_half_right(model, noisy, module=REAL):
    """Some drafts are kept and some rejected, in the middle of pages and at their ends."""
    watched = Watched(model, module.DraftModel(noisy, 5), (5, 5, 0, 2), in_the_cache, num_pages=20)
    assert watched.answer() == plainly(model)
    kept = [row.kept for row in watched.rows]
    assert sum(kept) > len(kept) / 2 and any(row.kept < row.drafted for row in watched.rows)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_targets_cache_may_be_quantized(model, kind, module=REAL):
    """The draft's own is not: so it is right nearly always, as it cannot know what rounding will do."""
    options = dict(kv_cache_dtype=kind, page_size=16)
    without = Watched(model, module.DraftModel(model, 4), (0,), **options)
    watched = Watched(model, module.DraftModel(model, 4), (4, 4, 0), in_the_cache, **options)
    assert watched.answer() == without.answer()
    assert not without.rows and sum(row.kept for row in watched.rows) > len(watched.rows)


@pytest.mark.parametrize("family", ["mistral", "qwen2-window"])
def test_behind_a_window(checkpoints, family, module=REAL):
    its = load(checkpoints(family))
    watched = Watched(its, module.DraftModel(its, 4), num_pages=30)
    assert watched.answer() == plainly(its)
    assert sum(row.kept for row in watched.rows) > 0.7 * sum(row.drafted for row in watched.rows)
    assert watched.engine.speculation.drafter.own.config.windows == its.config.windows


# ---------------------------------------------------------------- a smaller vocabulary
def rows_of(model, ids):
    """The same model, whose head scores these ids only, in this order."""
    made = Model.random(model.config)
    for mine, right in zip(made.parameters(), model.parameters()):
        mine.data = right.data.clone()
    made.lm_head.weight.data = made.lm_head.weight.data[ids]
    return made


@pytest.mark.parametrize("sampled", [False, True])
def test_rows_stand_for_other_ids(model, sampled, module=REAL):
    ids = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(0))
    watched = Watched(model, module.DraftModel(rows_of(model, ids), 3, sampled, vocabulary=ids))
    assert watched.answer() == plainly(model)
    watched.never_rejected()
    if sampled:
        watched.answer(params=replace(FREE, temperature=1.0, seed=1))
        watched.never_rejected()


@pytest.mark.parametrize("sampled", [False, True])
def test_only_its_ids_are_drafted(model, sampled, module=REAL):
    drafter = module.DraftModel(
        rows_of(model, range(0, 251, 2)), 3, sampled, vocabulary=torch.arange(0, 251, 2)
    )
    watched = Watched(model, drafter, check=in_the_cache)
    propose, seen = drafter.propose, []
    drafter.propose = lambda plan: [made := propose(plan), seen.extend(made)][0]
    assert watched.answer() == plainly(model)
    watched.answer(params=replace(FREE, temperature=1.5, seed=2))
    drafts = [draft for draft in seen if draft]
    assert all(token % 2 == 0 for draft in drafts for token in draft.tokens)
    chances = [draft.chances for draft in drafts if draft.chances is not None]
    assert bool(chances) == sampled and all((c[:, 1::2] == -torch.inf).all() for c in chances)


# ---------------------------------------------------------------- drawn drafts
DRAWN = [
    dict(
        temperature=1.0,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        logit_bias={7: 20, 9: 19, 11: 20},
        seed=6,
    ),
    dict(temperature=1.0, repetition_penalty=1.8, top_k=3, seed=7),
    dict(temperature=1.0, min_tokens=13, stop_token_ids=tuple(range(0, 251, 2)), seed=8),
]


def test_drawn_from_the_targets_own_chances_none_is_rejected(model, module=REAL):
    """p = q at every place, with every parameter: bias, penalties that count the drafts before, cuts, min_tokens."""
    for step in ("plain", "graph"):
        watched = Watched(model, module.DraftModel(model, 4, sampled=True), step=step)
        wanted = [replace(FREE, **m) for m in (*MIXED, *DRAWN)]
        outputs = [watched.engine.add(PROMPTS[0], params) for params in wanted]
        run(watched.engine)
        assert all(out.error is None for (out,) in outputs) and watched.engine.speculation.on
        drawn = {out.request.id for (out,), params in zip(outputs, wanted) if not params.greedy}
        plain = {out.request.id for (out,), params in zip(outputs[:1], wanted)}
        mine = [row for row in watched.rows if row.request in drawn | plain]
        assert len({row.request for row in mine}) == len(drawn) + 1
        assert [row.kept for row in mine] == [row.drafted for row in mine]
        for (out,), params in zip(outputs, wanted):
            assert not params.greedy or out.tokens == alone(model, PROMPTS[0], params)


def test_argmax_drafts_leave_drawn_tokens_alone(model, other, module=REAL):
    wanted = [replace(FREE, max_tokens=12, **m) for m in MIXED]
    for draft in (model, other):
        watched = Watched(model, module.DraftModel(draft, 3))
        outputs = [watched.engine.add(PROMPTS[0], params) for params in wanted]
        run(watched.engine)
        assert [out.tokens for (out,) in outputs] == [alone(model, PROMPTS[0], params) for params in wanted]


def test_drawn_drafts_leave_the_distribution(module=REAL):
    """Four tokens of 256 possible answers, against their exact chances: chi-square over many seeds."""
    tables = 1.5 * torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(4))
    target, draft = map(markov, tables)
    p = tables[0].softmax(-1).tolist()
    options = dict(max_running=64, num_pages=100, token_budget=256)
    watched = Watched(target, module.DraftModel(draft, 2, sampled=True), **options)
    n = 2048
    answers = watched.answer([[1, 2]], replace(FREE, temperature=1.0, max_tokens=4, n=n, seed=11))[0]
    share = sum(row.kept for row in watched.rows) / sum(row.drafted for row in watched.rows)
    assert 0.3 < share < 0.8  # neither way of making a token is rare
    found = Counter(map(tuple, answers))
    steps = {said: pairwise((2, *said)) for said in product(range(4), repeat=4)}
    due = {said: n * prod(p[a][b] for a, b in its) for said, its in steps.items()}
    likely = {said: expected for said, expected in due.items() if expected >= 5}
    terms = [(found[said], expected) for said, expected in likely.items()]
    terms.append((n - sum(found[said] for said in likely), n - sum(likely.values())))
    freedom = len(terms) - 1
    chi2 = sum((seen - expected) ** 2 / expected for seen, expected in terms)
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5, (chi2, freedom)


def last_logits(model, tokens):
    def attend(layer, q, k, v):
        T, (H, D), G = len(q), q.shape[1:], k.shape[1]
        wide = (x.transpose(0, 1).repeat_interleave(H // G, 0) for x in (k, v))
        made = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), *wide, is_causal=True)
        return made.transpose(0, 1).reshape(T, H, D)

    return model(torch.tensor(tokens), torch.arange(len(tokens)), attend, torch.tensor([len(tokens) - 1]))[0]


# ---------------------------------------------------------------- a draft that is broken, or does not fit
@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_of_nan_is_only_a_bad_draft(model, sampled, module=REAL):
    broken = Model.random(model.config)
    broken.norm.weight.data.fill_(float("nan"))
    watched = Watched(model, module.DraftModel(broken, 3, sampled))
    assert watched.answer() == plainly(model)
    drawn = replace(FREE, temperature=1.0, seed=3)
    assert sampled or watched.answer(params=drawn) == plainly(model, params=drawn)
    assert not sampled or all(len(its[0]) == FREE.max_tokens for its in watched.answer(params=drawn))


def refused(model, drafter, *words):
    with pytest.raises(ValueError) as error:
        engine(model, drafter=drafter())
    assert all(word in str(error.value) for word in words), error.value


def test_what_does_not_fit_is_refused(model, module=REAL):
    small = Model.random(replace(model.config, vocab_size=100))
    refused(model, lambda: module.DraftModel(small), "100 tokens", "251", "tokenizer")
    refused(model, lambda: module.DraftModel(rows_of(model, range(9))), "scores 9", "names 251")
    refused(model, lambda: module.DraftModel(model, vocabulary=range(9)), "names 9", "scores 251")
    refused(
        model, lambda: module.DraftModel(rows_of(model, range(2)), vocabulary=[0, 251]), "0 to 251", "250"
    )
    for k in (0, 16):
        refused(model, lambda k=k: module.DraftModel(model, k), f"k is {k}", "1 to 15")
        refused(model, lambda k=k: module.EarlyExit(1, k), f"k is {k}", "1 to 15")
    for layer in (0, 4):
        refused(model, lambda layer=layer: module.EarlyExit(layer), f"layer is {layer}", "the model has 3")


# ---------------------------------------------------------------- the target's own layers
@pytest.mark.parametrize(
    "kind, step",
    [
        (None, "plain"),
        (None, "graph"),
        ("int8", "fused"),
        ("int8", "graph"),
        ("fp8", "graph"),
        ("int4", "plain"),
        ("int4", "graph"),
    ],
)
def test_an_exit_at_the_end_is_never_wrong(model, kind, step, module=REAL):
    options = dict(kv_cache_dtype=kind, step=step, page_size=8 if kind != "int4" else 16)
    watched = Watched(model, module.EarlyExit(3, 4), **options)
    bare = engine(model, **options)
    plain = [bare.add(prompt, FREE) for prompt in PROMPTS]
    run(bare)
    assert watched.answer() == [[out.tokens for out in its] for its in plain]
    watched.never_rejected()
    assert max(row.drafted for row in watched.rows) == 4


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "mistral"])
def test_an_early_exit_leaves_tokens_alone(checkpoints, family, module=REAL):
    its = load(checkpoints(family))
    for layer, options in ((1, {}), (2, dict(num_pages=14)), (3, dict(step="plain"))):
        watched = Watched(its, module.EarlyExit(layer, 3), (3, 1, 0, 3), **options)
        assert watched.answer() == plainly(its)
        kept = [row.kept for row in watched.rows]
        assert kept == [row.drafted for row in watched.rows] if layer == 3 else min(kept) == 0


@pytest.mark.parametrize("sampled", [False, True])
def test_a_trained_head_scores_a_smaller_vocabulary(model, sampled, module=REAL):
    whole = ExitHead(model, torch.arange(251)).requires_grad_(False)
    turn = torch.linalg.qr(torch.randn(96, 96, generator=torch.Generator().manual_seed(0)))[0]
    whole.adapter.data, whole.rows = turn, model.head @ turn.T  # together they are what they were
    watched = Watched(model, module.EarlyExit(3, 3, head=whole, sampled=sampled))
    assert watched.answer() == plainly(model)
    watched.answer(params=replace(FREE, temperature=0.8 if sampled else 0.0, seed=4))
    watched.never_rejected()
    half = ExitHead(model, torch.arange(1, 251, 2)).requires_grad_(False)
    watched = Watched(model, module.EarlyExit(3, 3, head=half, sampled=sampled))
    assert watched.answer() == plainly(model)
    assert any(row.kept for row in watched.rows) and any(not row.kept for row in watched.rows)


def test_an_exit_leaves_the_model_as_it_was(model, module=REAL):
    head = ExitHead(model, torch.arange(251)).requires_grad_(False)
    head.norm.data = head.norm * 2
    Watched(model, module.EarlyExit(1, 3, head=head))
    assert Watched(model, module.EarlyExit(3, 3)).answer() == plainly(model)


# ---------------------------------------------------------------- these tests can fail
CASES = {
    "same": lambda m, o, module: test_its_own_weights_are_never_wrong(m, 4, "graph", module),
    "plain": lambda m, o, module: test_its_own_weights_are_never_wrong(m, 2, "plain", module),
    "3003": lambda m, o, module: test_it_catches_up_after_steps_without_drafts(m, module),
    "ragged": lambda m, o, module: test_every_request_its_own_k(m, module),
    "chunks": lambda m, o, module: test_chunks_of_a_prompt(m, 16, module),
    "preempted": lambda m, o, module: test_after_a_preemption(m, module),
    "prefix": lambda m, o, module: test_a_known_prefix_is_not_computed_again(m, module),
    "reused": lambda m, o, module: test_a_page_that_was_somebody_elses(m, True, module),
    "forks": lambda m, o, module: test_forks_share_its_pages(m, PROMPTS[0], module),
    "late fork": lambda m, o, module: test_a_late_fork_takes_what_its_leader_has(m, module),
    "half": lambda m, o, module: test_half_right(m, o, module),
    "ids": lambda m, o, module: test_rows_stand_for_other_ids(m, True, module),
    "subset": lambda m, o, module: test_only_its_ids_are_drafted(m, True, module),
    "drawn": lambda m, o, module: test_drawn_from_the_targets_own_chances_none_is_rejected(m, module),
    "chi": lambda m, o, module: test_drawn_drafts_leave_the_distribution(module),
    "nan": lambda m, o, module: test_a_draft_of_nan_is_only_a_bad_draft(m, True, module),
    "refused": lambda m, o, module: test_what_does_not_fit_is_refused(m, module),
    "exit": lambda m, o, module: test_an_exit_at_the_end_is_never_wrong(m, None, "graph", module),
    "exit int8": lambda m, o, module: test_an_exit_at_the_end_is_never_wrong(m, "int8", "graph", module),
    "head": lambda m, o, module: test_a_trained_head_scores_a_smaller_vocabulary(m, True, module),
    "as it was": lambda m, o, module: test_an_exit_leaves_the_model_as_it_was(m, module),
}
WRONG = [  # right, wrong, who must notice
    # the last token that was accepted never becomes the draft's input; or all is thrown away, not what was rejected
    ("done = min(self.done[r.seat], r.computed)", "done = self.done[r.seat] + 1", "same"),
    ("done = min(self.done[r.seat], r.computed)", "done = self.done[r.seat]", "half"),
    (
        "            self.done[r.seat] = len(r.tokens) + r.granted - 1\n",
        "            self.done[r.seat] = 0\n",
        "prefix",
    ),
    (
        "            self.done[r.seat] = len(r.tokens) + r.granted - 1\n",
        "            self.done[r.seat] = len(r.tokens) + r.granted\n",
        "same",
    ),
    # pages
    ("        self.own.copy(pairs)\n", "", "late fork"),
    ("                self.filled[page] = 0\n", "                pass\n", "reused"),
    ("self.filled[r.pages[first]] = min(self.filled[r.pages[first]], r.computed % S)", "pass", "reused"),
    ("(r.id, r.preemptions):", "self.owner[r.seat]:", "reused"),
    ("min(self._found(r), r.computed)", "r.computed", "reused"),
    ("min(self._found(r), r.computed)", "0", "prefix"),
    ("            self._fill(r, start, len(r.tokens))\n", "            pass\n", "prefix"),
    ("min(S, end - i * S)", "S", "half"),
    # steps
    (
        "starts, ids = known[rows] + i, ids[: len(rows)]",
        "starts, ids = known[rows] + i - 1, ids[: len(rows)]",
        "same",
    ),
    ("key=lambda r: -r.granted", "key=lambda r: r.granted", "ragged"),
    (
        "own, positions = self.page_size, np.repeat(rows, counts)",
        "own, positions = self.page_size, 0 * np.repeat(rows, counts)",
        "same",
    ),
    # what is drafted
    ("ids if self.vocabulary is None else self.vocabulary[ids]", "ids", "ids"),
    ("best.clamp(min=0)", "best", "nan"),
    ("drawn.clamp(min=0), tokens), x", "drawn, tokens), x", "nan"),
    ("places, DRAFT))", "places))", "chi"),
    ("+ len(made) for r", "for r", "chi"),
    ("+ len(made) for r", "for r", "drawn"),
    ("before = None\n", "before = None\n        return tokens, logits.float()\n", "chi"),
    ("sampler.adjusted(logits, seats, places, before)", "sampler.adjusted(logits, seats, places)", "drawn"),
    ("drawn = chances and not request.params.greedy", "drawn = False", "chi"),
    # the target's own layers
    ("whole.layers[: self.layer]", "whole.layers[: self.layer - 1]", "exit"),
    ("short = copy(whole)", "short = whole", "as it was"),
    ("self.head.matrix()", "self.head.rows", "head"),
]


@pytest.mark.slow
@pytest.mark.parametrize("right, wrong, case", WRONG, ids=[f"{w[2]}: {w[1].strip()[:40]}" for w in WRONG])
def test_a_wrong_version_is_noticed(model, noisy, right, wrong, case):
    with pytest.raises(Exception) as noticed:  # a wrong answer, or whatever trouble it gets into
        CASES[case](model, noisy, wrong_version(REAL, right, wrong))
    assert not isinstance(noticed.value, (SyntaxError, NameError))
