"""Speculation does not change what is drawn: chi-square against exact probabilities, for every drafter.

A model of 3 tokens whose distribution depends on the last token alone says exactly how often each three tokens in a row
come. Answers are counted in such threes, and in pairs, and each rule that is known to be wrong is caught by the
same count.

By hand    p = [.3, .5, .2] and drafts from q = [.6, .3, .1]: the token is distributed as p, to the last of 600 tickets
"""

import itertools
import math
from collections import Counter

import pytest
import torch
from speculation_world import Scripted, markov, tree_of
from test_engine import MIXED, PROMPTS, model, run  # noqa: F401  fixtures
from test_engine import engine as engine_of
from wrong_versions import wrong_version

import minserve.kernels.verify
import minserve.sampler
from minserve.draft_model import DraftModel, EarlyExit
from minserve.engine import LLM
from minserve.medusa import Medusa
from minserve.model import Model
from minserve.request import SamplingParams
from minserve.sampler import Sampler
from minserve.sampling import probabilities
from minserve.speculation import NGram
from minserve.trained import ExitHead, MedusaHeads

P, Q = [0.3, 0.5, 0.2], [0.6, 0.3, 0.1]
TARGET = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.3, 0.2, 0.5]]).log()
DRAFT = torch.tensor([[0.2, 0.3, 0.5], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).log()
CUTS = {
    "temperature": dict(temperature=0.7),
    "top-k": dict(temperature=1.4, top_k=2),
    "top-p": dict(temperature=1.2, top_p=0.8),
}
V = 3


# ---------------------------------------------------------------- counting
def limit(df: int) -> float:
    """What 99.99 % of right samplers stay under (Wilson and Hilferty's approximation)."""
    return df * (1 - 2 / (9 * df) + 3.719 * math.sqrt(2 / (9 * df))) ** 3


def chi_square(counts: Counter, chances: dict) -> float:
    """Of counts[given, what]: the statistic in units of its limit. chances[given, what] sums to 1 for each `given`.

    Infinite where something came that cannot come; rare ones are counted together.
    """
    if any(n and not chances[cell] for cell, n in counts.items()):
        return math.inf
    statistic = df = 0
    for given in {cell[0] for cell in counts}:
        n = sum(m for cell, m in counts.items() if cell[0] == given)
        cells = [(counts[c], n * p) for c, p in chances.items() if c[0] == given and p]
        rare = [c for c in cells if c[1] < 2]
        cells = [c for c in cells if c[1] >= 2] + [tuple(map(sum, zip(*rare)))] * bool(rare)
        statistic += sum((seen - expected) ** 2 / expected for seen, expected in cells)
        df += len(cells) - 1
    return statistic / limit(df) if df else 0.0


def how_wrong(answers, table, params) -> float:
    """Below 1: answers [(last token of the prompt, tokens)] could be drawn so. By pairs and by threes."""
    p = torch.stack([probabilities(row, params) for row in table]).double().tolist()
    pairs, threes = Counter(), Counter()
    for before, tokens in answers:
        text = [before, *tokens]
        pairs.update(zip(text, text[1:]))
        threes.update((text[i], tuple(text[i + 1 : i + 4])) for i in range(0, len(text) - 3, 3))
    one = {(a, b): p[a][b] for a, b in itertools.product(range(V), repeat=2)}
    three = {
        (a, (b, c, d)): p[a][b] * p[b][c] * p[c][d] for a, b, c, d in itertools.product(range(V), repeat=4)
    }
    return max(chi_square(pairs, one), chi_square(threes, three))


def answers_of(target, drafter, params: dict, *, tokens: int, batch: int, new: int = 30, **options):
    """At least so many tokens of one engine, `batch` requests at a time; and the engine."""
    llm = LLM(target, num_pages=200, max_running=batch, drafter=drafter, adaptive=False, **options)
    count = -(-tokens // new)
    wanted = [SamplingParams(max_tokens=new, seed=i, ignore_eos=True, **params) for i in range(count)]
    prompts = [[i % V, (i + i // V) % V] for i in range(count)]
    made = llm.generate(prompts, wanted, progress=False)
    return [(prompt[-1], output.tokens) for prompt, (output,) in zip(prompts, made)], llm


def kept(llm) -> tuple[int, int]:
    rows = [row for record in llm.log for row in record.rows]
    return sum(row.drafted for row in rows), sum(row.kept for row in rows)


# ---------------------------------------------------------------- every drafter
def exits(target, sampled):
    head = ExitHead(target, torch.arange(V))
    noise = torch.randn(head.adapter.shape, generator=torch.Generator().manual_seed(1))
    head.adapter.data += 0.15 * noise
    return EarlyExit(1, 3, head, sampled)


def heads(target, tree):
    its = MedusaHeads(target, torch.arange(V), 2)
    its.heads.data.normal_(generator=torch.Generator().manual_seed(2))
    return Medusa(its, tree=tree, top=2)


DRAFTERS = {
    "n-grams": lambda target: NGram(3, 2, 1),
    "a draft model": lambda target: DraftModel(markov(DRAFT), 3),
    "a draft model that draws": lambda target: DraftModel(markov(DRAFT), 3, sampled=True),
    "an early exit": lambda target: exits(target, False),
    "an early exit that draws": lambda target: exits(target, True),
    "a chain of heads": lambda target: heads(target, [(0,), (0, 0)]),
    "a tree of heads": lambda target: heads(target, [(0,), (1,), (0, 0), (0, 1), (1, 0)]),
}
CASES = [(1, "top-p"), (5, "top-k"), *(pytest.param(5, cut, marks=pytest.mark.slow) for cut in CUTS)]


@pytest.mark.parametrize("batch, cut", CASES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_what_is_drawn_is_distributed_as_without(name, batch, cut):
    target = markov(TARGET)
    answers, llm = answers_of(
        target, DRAFTERS[name](target), CUTS[cut], tokens=600 if batch == 1 else 1500, batch=batch
    )
    tried, right = kept(llm)
    assert llm.speculation.on and 20 < right < tried
    assert how_wrong(answers, TARGET, SamplingParams(**CUTS[cut])) < 1


def test_other_distributions_are_told_apart():
    """The count can fail: warmer, or as if the last token did not matter."""
    target, params = markov(TARGET), CUTS["temperature"]
    answers, _ = answers_of(target, None, params, tokens=1500, batch=20)
    assert how_wrong(answers, TARGET, SamplingParams(**params)) < 1
    assert how_wrong(answers, TARGET, SamplingParams(temperature=1.0)) > 1
    assert how_wrong(answers, TARGET, SamplingParams(temperature=0.7, top_p=0.9)) == math.inf
    assert how_wrong(answers, TARGET.exp().mean(0).log().expand(V, V), SamplingParams(**params)) > 1


def exact(params, first, count, stops=()):
    """The chance of each answer of so many tokens, from the definitions: history and all."""
    found = {}
    for answer in itertools.product(range(V), repeat=count):
        chance, text = 1.0, [first]
        for position, token in enumerate(answer):
            p = probabilities(TARGET[text[-1]], params, position, [first], list(answer[:position]), stops)
            chance *= float(p[token])
            text.append(token)
        found[0, answer] = chance
    return found


@pytest.mark.parametrize("how", ["a draft model that draws", "an early exit that draws", "a tree of heads"])
def test_drafts_see_penalties_and_bias_as_the_target_does(how):
    """Four tokens at once, whose distribution depends on the whole answer."""
    its = dict(temperature=0.9, presence_penalty=0.9, frequency_penalty=0.6, repetition_penalty=1.3)
    its |= dict(logit_bias={2: 0.7, 0: -0.4}, min_p=0.05)
    target = markov(TARGET)
    llm = LLM(target, num_pages=200, max_running=25, drafter=DRAFTERS[how](target), adaptive=False)
    wanted = [SamplingParams(max_tokens=4, seed=i, ignore_eos=True, **its) for i in range(400)]
    made = llm.generate([[1]] * 400, wanted, progress=False)
    counts = Counter((0, tuple(output.tokens)) for (output,) in made)
    chances = exact(wanted[0], 1, 4)
    assert sum(chances.values()) == pytest.approx(1) and kept(llm)[1] > 60
    assert chi_square(counts, chances) < 1
    assert chi_square(counts, exact(SamplingParams(temperature=0.9, logit_bias={2: 0.7, 0: -0.4}), 1, 4)) > 1


# ---------------------------------------------------------------- the same tokens, where they must be
@pytest.mark.parametrize("name", [n for n in DRAFTERS if "draws" not in n])
@pytest.mark.parametrize("step", ["graph", pytest.param("plain", marks=pytest.mark.slow)])
def test_drafts_that_are_not_drawn_leave_the_tokens(name, step):
    target = markov(TARGET)
    for params in (dict(temperature=1.0, top_p=0.9), dict(), dict(temperature=1.1, presence_penalty=0.5)):
        with_it, llm = answers_of(target, DRAFTERS[name](target), params, tokens=90, batch=3, step=step)
        without, _ = answers_of(target, None, params, tokens=90, batch=3, step=step)
        assert with_it == without and kept(llm)[0] > 10


@pytest.mark.parametrize("name", ["a draft model that draws", "an early exit that draws"])
def test_greedy_requests_keep_their_tokens_beside_drafts_that_are_drawn(name):
    target = markov(TARGET)
    llm = LLM(target, num_pages=200, drafter=DRAFTERS[name](target), adaptive=False)
    plain = LLM(target, num_pages=200)
    wanted = [SamplingParams(max_tokens=20, seed=i, ignore_eos=True, temperature=i % 2) for i in range(6)]
    mine, theirs = (its.generate([[i % 3] for i in range(6)], wanted, progress=False) for its in (llm, plain))
    assert [o.tokens for (o,) in mine[::2]] == [o.tokens for (o,) in theirs[::2]]
    assert [o.tokens for (o,) in mine[1::2]] != [o.tokens for (o,) in theirs[1::2]]  # other draws, as drawn


def test_drawn_drafts_are_the_same_in_any_batch(model):  # noqa: F811
    """Accepting and drawing depend on the request's own numbers: alone or among others, the same tokens."""
    other = Model.random(model.config, seed=3)
    wanted = [SamplingParams(max_tokens=10, ignore_eos=True, seed=4, **m | dict(temperature=1.0)) for m in MIXED[:6]
              if "seed" not in m]  # fmt: skip
    together = engine_of(model, drafter=DraftModel(other, 3, sampled=True), adaptive=False, num_pages=120)
    crowd = [together.add(PROMPTS[0], params)[0] for params in wanted]
    run(together)
    for output, params in zip(crowd, wanted):
        alone = engine_of(model, drafter=DraftModel(other, 3, sampled=True), adaptive=False)
        (single,) = alone.add(PROMPTS[0], params)
        run(alone)
        assert single.tokens == output.tokens


# ---------------------------------------------------------------- by hand
def test_the_worked_value_ticket_by_ticket(monkeypatch):
    """10 tickets to accept with, 30 to draw with: each draft's tokens are counted exactly."""
    module = minserve.kernels.verify
    rows = list(itertools.product(range(V), range(10), range(60)))
    drafts, accept, draw = (torch.tensor(column) for column in zip(*rows))

    def tickets(seeds, positions, stream=0):
        return (accept + 0.5) / 10 if stream == module.ACCEPT else (draw.double() + 0.5) / 60

    monkeypatch.setattr(module, "uniform", tickets)
    n = len(rows)
    p, q = (torch.tensor(x).log().expand(n, V) for x in (P, Q))
    full = lambda value, dtype: torch.full((n,), value, dtype=dtype)
    cuts = full(1.0, torch.float32), full(0, torch.int64), full(1.0, torch.float64), full(0.0, torch.float64)
    zeros = full(0, torch.int64)
    tokens = module.verify_reference(p, q, drafts, *cuts, zeros, zeros)
    counts = torch.zeros(V, V, dtype=torch.int64)
    counts.index_put_((drafts, tokens), torch.ones_like(tokens), accumulate=True)
    assert counts.tolist() == [[300, 200, 100], [0, 600, 0], [0, 0, 600]]  # 0 is kept with .3 / .6
    marginal = (torch.tensor(Q, dtype=torch.float64)[:, None] * counts / 600).sum(0)
    torch.testing.assert_close(marginal, torch.tensor(P, dtype=torch.float64))
    ordinary = module.verify_reference(p, q, full(-1, torch.int64), *cuts, zeros, zeros)
    assert torch.bincount(ordinary).tolist() == [540, 900, 360]


WORKED = torch.tensor(P).log().expand(V, V), torch.tensor(Q).log().expand(V, V)
PLAIN = dict(temperature=1.0)


def worked(drafter, tokens=600, batch=20):
    return answers_of(markov(WORKED[0]), drafter, PLAIN, tokens=tokens, batch=batch)


def drawing(k=3):
    return DraftModel(markov(WORKED[1]), k, sampled=True)


@pytest.mark.parametrize("batch", [1, 5])
def test_the_worked_value_in_the_engine(batch):
    answers, llm = worked(drawing(), batch=batch)
    assert how_wrong(answers, WORKED[0], SamplingParams(**PLAIN)) < 1
    rows = [row for record in llm.log for row in record.rows if row.drafted]
    first = sum(row.kept > 0 for row in rows) / len(rows)
    assert first == pytest.approx(sum(map(min, P, Q)), abs=0.08)  # 0.7 are accepted


# ---------------------------------------------------------------- rules that are known to be wrong
class Likeliest(DraftModel):
    """Proposes the likeliest token, and says it was drawn."""

    def _drawn(self, requests, logits, tokens, made):
        return tokens, super()._drawn(requests, logits, tokens, made)[1]


def shares(answers):
    seen = Counter(token for _, tokens in answers for token in tokens)
    return [seen[token] / seen.total() for token in range(V)]


def rejected(answers) -> bool:
    return how_wrong(answers, WORKED[0], SamplingParams(**PLAIN)) > 1


def test_the_likeliest_judged_as_if_it_were_drawn_is_noticed():
    answers, _ = worked(Likeliest(markov(WORKED[1]), 1, sampled=True))
    assert rejected(answers)
    # after each draft at most one token more, drawn from p: [.5, .3333, .1667] is diluted by it
    assert shares(answers)[0] > 0.36


def test_the_wrong_shares_by_hand():
    """Drafts always 0, kept with .3 / .6; else 1 or 2 as .2 to .1: [.5, .3333, .1667]."""
    module = minserve.kernels.verify
    n = 20_000
    p, q = (torch.tensor(x).log().expand(n, V) for x in (P, Q))
    full = lambda value, dtype: torch.full((n,), value, dtype=dtype)
    cuts = full(1.0, torch.float32), full(0, torch.int64), full(1.0, torch.float64), full(0.0, torch.float64)
    tokens = module.verify(p, q, full(0, torch.int64), *cuts, full(5, torch.int64), torch.arange(n))
    counts = Counter((0, token) for token in tokens.tolist())
    share = lambda p: {(0, i): x for i, x in enumerate(p)}
    assert chi_square(counts, share([1 / 2, 1 / 3, 1 / 6])) < 1 < chi_square(counts, share(P))


def test_a_fresh_draw_where_the_draft_differs_is_noticed(monkeypatch):
    """Draw, compare, and where it differs draw again: the draft's token comes too often."""
    right = Sampler.draw

    def again(self, logits, seats, positions, drawn=None, drafts=None):
        tokens = right(self, logits, seats, positions, drawn, drafts)
        if drafts:
            fresh = right(self, logits, seats, positions + 10_000)
            children = {i: b[-1] for i, b in enumerate(drafts.before[1:]) if b}  # of a chain
            for place, token in children.items():
                if int(tokens[place]) != token:
                    tokens[place] = fresh[place]
        return tokens

    monkeypatch.setattr(Sampler, "draw", again)
    answers, llm = worked(DraftModel(markov(WORKED[1]), 3))
    assert kept(llm)[1] > 60 and rejected(answers)


def test_missing_bonus_tokens_are_noticed():
    """The token behind a draft that was kept whole, drawn and lost."""
    table = torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1]]).log()
    answers, llm = answers_of(markov(table), DraftModel(markov(table), 2), PLAIN, tokens=600, batch=20)
    assert how_wrong(answers, table, SamplingParams(**PLAIN)) < 1
    made, lost = [0] * len(answers), [set() for _ in answers]
    for row in (row for record in llm.log for row in record.rows if row.sampled):
        made[row.request] += row.kept + 1
        if row.drafted and row.kept == row.drafted:
            lost[row.request].add(made[row.request] - 1)
    assert made == [len(tokens) for _, tokens in answers]
    told = [
        (first, [t for i, t in enumerate(its) if i not in gone]) for (first, its), gone in zip(answers, lost)
    ]
    assert how_wrong(told, table, SamplingParams(**PLAIN)) > 1


WRONG = {
    "what is left is |p - q|": (".clamp(min=0) * LEFT", ".abs() * LEFT"),
    "what is left is q - p": ("(shares[0] - shares[1])", "(shares[1] - shares[0])"),
    "what is left is not normalised": (
        "token = torch.where(kept, drafts, drawn(left, uniform(seeds, positions)))",
        "low = (uniform(seeds, positions) * LEFT).long()[:, None]\n"
        "    low = torch.where(left.sum(-1, keepdim=True) < 2**53, low, low * 64)\n"
        "    token = torch.searchsorted(left.cumsum(-1), low, right=True)[:, 0].clamp(max=left.shape[1] - 1)\n"
        "    token = torch.where(kept, drafts, torch.where(judged, token, drawn(p, uniform(seeds, positions))))",
    ),
    "rejected, then drawn from p": ("torch.where((judged & left.any(-1))[:, None], left, p)", "p"),
    "rejected, then drawn from q": (
        "torch.where((judged & left.any(-1))[:, None], left, p)",
        "torch.where(judged[:, None], q, p)",
    ),
    "accepted with p(x)": ("* q_x < p_x)", "< p_x)"),
    "accepted with q(x)": ("* q_x < p_x)", "* p_x < q_x)"),
    "always accepted": ("* q_x < p_x)", "* q_x < q_x)"),
    "the same number accepts and draws": ("uniform(seeds, positions, ACCEPT)", "uniform(seeds, positions)"),
}


HARD = [torch.tensor(x).log().expand(V, V) for x in ([0.1, 0.7, 0.2], [0.8, 0.1, 0.1])]  # few are accepted


def hard():
    return answers_of(
        markov(HARD[0]), DraftModel(markov(HARD[1]), 3, sampled=True), PLAIN, tokens=900, batch=20
    )[0]


def test_the_right_rule_where_few_are_accepted():
    assert how_wrong(hard(), HARD[0], SamplingParams(**PLAIN)) < 1


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_noticed(monkeypatch, name):
    right, wrong = WRONG[name]
    monkeypatch.setattr(
        minserve.sampler, "verify", wrong_version(minserve.kernels.verify, right, wrong).verify_reference
    )
    assert rejected(worked(drawing())[0]) or how_wrong(hard(), HARD[0], SamplingParams(**PLAIN)) > 1


def test_q_without_the_cuts_of_p_is_noticed(monkeypatch):
    """Drafts are drawn after top-k, and judged as if they were not."""
    right = "p, q = (weights_reference(x, *cuts) for x in (logits, chances))"
    wrong = (
        "p, q = weights_reference(logits, *cuts), weights_reference(chances, cuts[0], cuts[1] * 0, *cuts[2:])"
    )
    module = wrong_version(minserve.kernels.verify, right, wrong)
    monkeypatch.setattr(minserve.sampler, "verify", module.verify_reference)
    params = dict(temperature=1.0, top_k=2)
    answers, _ = answers_of(
        markov(TARGET), DraftModel(markov(DRAFT), 3, sampled=True), params, tokens=600, batch=20
    )
    assert how_wrong(answers, TARGET, SamplingParams(**params)) > 1


def test_a_tree_whose_siblings_are_all_tried_is_right_and_a_first_come_rule_is_not(monkeypatch):
    """Candidates in turn against fresh draws: each gets a chance of its own, so together they get too much."""
    right = Sampler.draw
    script = lambda request, n: tree_of([0], [1])
    answers, _ = answers_of(markov(WORKED[0]), Scripted(script, 2, True), PLAIN, tokens=600, batch=20)
    assert not rejected(answers)

    def each(self, logits, seats, positions, drawn=None, drafts=None):
        tokens = right(self, logits, seats, positions, drawn, drafts)
        for place, b in enumerate(drafts.before if drafts else ()):
            if b == [0]:  # the first candidate was refused: the second is asked with another draw
                fresh = right(self, logits, seats, positions + 10_000)
                root = place - 1
                tokens[root] = tokens[root] if int(tokens[root]) == 0 else fresh[root]
        return tokens

    monkeypatch.setattr(Sampler, "draw", each)
    answers, _ = answers_of(markov(WORKED[0]), Scripted(script, 2, True), PLAIN, tokens=600, batch=20)
    assert rejected(answers)
