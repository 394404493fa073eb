"""Speculation in the engine: whatever is drafted, every answer is the one without, to the last logprob.

The drafts are scripted (tests/speculation_world.py): right, wrong, right up to somewhere, trees, none, too many. What
is right comes from the definitions, one request alone, token by token.
"""

import itertools
import random
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import quantized_oracle
import torch
from speculation_world import Known, Scripted, tree_of, truth
from test_engine import MIXED, PROMPTS, engine, model, run, tokenizer  # noqa: F401  fixtures
from test_overlap import LIMITS, assert_alike, live_through, orders

from minserve.engine import LLM, Engine
from minserve.pages import PagePool
from minserve.request import Draft, Request, SamplingParams
from minserve.scheduler import Scheduler
from minserve.speculation import NGram
from minserve.weights import load

KINDS = ["plain", "fused", "graph"]
FREE = SamplingParams(max_tokens=12, ignore_eos=True)
MORE = [
    dict(logprobs=3, temperature=1.1, seed=6, top_p=0.9),
    dict(logprobs=0),
    dict(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.3, temperature=0.9, seed=8),
    dict(logit_bias={7: -100.0, 9: 3.0}, presence_penalty=-1.0),
    dict(min_tokens=5, stop_token_ids=tuple(range(1, 251, 2)), temperature=1.0, seed=9),
]
EVERY = [SamplingParams(max_tokens=10, ignore_eos=True, **m) for m in MIXED + MORE]


@pytest.fixture(scope="module")
def known(model):  # noqa: F811
    return Known(model)


def speculative(model, says, k=4, branches=False, **options):  # noqa: F811
    return engine(model, drafter=Scripted(says, k, branches), adaptive=False, **options)


def ended(request, tokens) -> tuple[list[int], str]:
    """What an answer that would go on like this ends with, and how: by hand, stop strings aside."""
    most = request.max_new_tokens
    for i, token in enumerate(tokens[:most]):
        if token in request.stop_ids and i >= request.params.min_tokens:
            return tokens[:i], "stop"
    return tokens[:most], "length"


def assert_answers(e, known, outputs):
    for output in outputs:
        tokens, logits = known.of(output.request)
        assert output.error is None
        assert (output.tokens, output.finish_reason) == ended(output.request, tokens)
        wanted = output.request.params.logprobs
        assert len(output.logprobs) == (0 if wanted is None else len(output.tokens))
        for entry, row, token in zip(output.logprobs, logits, output.tokens):
            its = row.log_softmax(-1)
            assert entry.token == token and entry.logprob == pytest.approx(float(its[token]), abs=1e-4)
            best = [(int(i), pytest.approx(float(its[i]), abs=1e-4)) for i in its.topk(wanted).indices]
            assert list(entry.top)[:wanted] == best


def drafted(e) -> tuple[int, int]:
    rows = [row for record in e.log for row in record.rows]
    return sum(row.drafted for row in rows), sum(row.kept for row in rows)


def assert_counted(e, outputs):
    """The log accounts for every token: of each answer, those drawn and those kept."""
    made = Counter()
    for row in (row for record in e.log for row in record.rows):
        made[row.request] += row.sampled + row.kept
        assert 0 <= row.kept <= row.drafted < row.num_tokens or not row.drafted
    for output in outputs:
        if output.finish_reason == "length" and not output.request.params.stop:
            assert made[output.request.id] == len(output.tokens)


# ---------------------------------------------------------------- what may be drafted
def ragged(known):
    """Right for as long as (its id + its length) says, then wrong: every row another length."""

    def says(request, n):
        right = (request.id + len(request.tokens)) % (n + 1)
        return known.right(request, right) + known.wrong(request, n)[right:]

    return says


def hydra(known):
    """A tree: the right path among wrong ones, at another place for each request and length."""

    def says(request, n):
        right, wrong = known.right(request, 3), known.wrong(request, 3)
        paths = [wrong[:2], [*right[:1], *wrong[1:2]], right, [wrong[0], *right[1:]]]
        turn = (request.id + len(request.tokens)) % 4
        return tree_of(*paths[turn:], *paths[:turn])

    return says


def chaos(known, rng):
    """Anything, changing from step to step."""

    def says(request, n):
        right = known.right(request, n)
        return rng.choice(
            [
                lambda: None,
                lambda: [],
                lambda: right,
                lambda: right + [0] * 9,
                lambda: known.wrong(request, n),
                lambda: [rng.randrange(251) for _ in range(rng.randint(1, n))],
                lambda: right[: rng.randint(0, n)] + [3],
                lambda: [right[0]] * n if right else [],
            ]
        )()

    return says


HOW = {
    "right": lambda known: known.right,
    "wrong": lambda known: known.wrong,
    "ragged": ragged,
    "too many": lambda known: lambda request, n: known.right(request, n) + [1, 2, 3, 4, 5],
    "nothing": lambda known: lambda request, n: None,
    "empty": lambda known: lambda request, n: [],
    "some": lambda known: lambda request, n: known.right(request, n) if request.id % 2 else Draft([]),
    "anything": lambda known: chaos(known, random.Random(3)),
    "a tree": hydra,
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("page_size", [4, 16])
def test_every_parameter_acts_as_without(model, known, how, page_size):  # noqa: F811
    """One batch of requests that all ask for something else; each gets what it gets alone."""
    check_batch(model, known, how, "plain", page_size)


@pytest.mark.parametrize("how", ["ragged", "a tree"])
@pytest.mark.parametrize("kind", ["fused", "graph"])
def test_on_every_road(model, known, how, kind):  # noqa: F811
    check_batch(model, known, how, kind, 4)


def check_batch(model, known, how, kind, page_size, prompt=PROMPTS[0]):  # noqa: F811
    tree = how == "a tree"
    k = 11 if tree else 4
    e = speculative(model, HOW[how](known), k, tree, step=kind, page_size=page_size, num_pages=200,
                    token_budget=300, max_running=16)  # fmt: skip
    outputs = [e.add(prompt, params)[0] for params in EVERY]
    run(e)
    assert_answers(e, known, outputs)
    assert_counted(e, outputs)
    tried, kept = drafted(e)
    assert (tried > 40) == (how not in ("nothing", "empty"))
    assert (kept == tried) == (how in ("right", "too many", "some", "nothing", "empty"))
    assert kept > 30 or how in ("wrong", "nothing", "empty")
    whole = {row.kept for record in e.log for row in record.rows if row.drafted == 8}
    assert not tree or whole == {3}, "the right path is always in it"
    assert e.speculation.on


def test_a_draft_that_is_right_saves_its_steps(model, known):  # noqa: F811
    """k accepted and the token on top of them: 1 + 4 at a time. 16 tokens: 1, then 3 times 5."""
    e = speculative(model, known.right)
    (output,) = e.add(PROMPTS[0], replace(FREE, max_tokens=16))
    made = []
    while e.outputs:
        e.step()
        made.append(len(output.tokens))
    assert made == [1, 6, 11, 16] and drafted(e) == (12, 12)
    assert e.speculation.drafted == e.speculation.kept == [3, 3, 3, 3]
    assert_answers(e, known, [output])


@pytest.mark.parametrize("k", [1, 2, 4, 15])
def test_any_number_of_drafts(model, known, k):  # noqa: F811
    e = speculative(model, ragged(known), k, page_size=4)
    outputs = [e.add(p, replace(FREE, max_tokens=30, temperature=0.8, seed=2))[0] for p in PROMPTS]
    run(e)
    assert_answers(e, known, outputs)
    assert max(row.drafted for record in e.log for row in record.rows) == k


# ---------------------------------------------------------------- logits
def judged_logits(e):
    """Makes the engine remember the logits of every token it keeps: request id -> rows."""
    rows, logprobs = {}, e.sampler.logprobs

    def remember(logits, tokens, seats, places):
        of = {r.seat: r.id for r in e.scheduler.running}
        for row, seat in zip(logits[places], seats.tolist()):
            rows.setdefault(of[seat], []).append(row.float().clone())
        return logprobs(logits, tokens, seats, places)

    e.sampler.logprobs = remember
    return rows


@pytest.mark.parametrize("how", ["right", "ragged", "a tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_at_every_place_are_those_of_the_plain_path(model, known, how, kind):  # noqa: F811
    """Token by token from one road's drafts and another's plain steps: fp32 sums in another order, no more."""
    tree = how == "a tree"
    e = speculative(model, HOW[how](known), 11 if tree else 4, tree, step=kind, page_size=4)
    rows = judged_logits(e)
    outputs = [e.add(p, replace(FREE, temperature=0.7, seed=1))[0] for p in PROMPTS]
    run(e)
    for output in outputs:
        mine, (_, theirs) = torch.stack(rows[output.request.id]), known.of(output.request)
        torch.testing.assert_close(mine, theirs[: len(mine)], rtol=1e-4, atol=1e-4)
        assert len(mine) == 12
    assert drafted(e)[1] > 10


# ---------------------------------------------------------------- the cases that others got wrong
def test_a_token_that_is_forbidden_is_never_made_however_often_it_is_drafted(model, known):  # noqa: F811
    """A bias of -100 acts at every place of a draft, not only at its end."""
    params = SamplingParams(max_tokens=12, logit_bias={7: -100.0}, ignore_eos=True)
    others = SamplingParams(max_tokens=12, logit_bias={7: 100.0}, ignore_eos=True)
    e = speculative(model, lambda request, n: [7] * n)
    never, always = e.add(PROMPTS[0], params)[0], e.add(PROMPTS[0], others)[0]
    run(e)
    assert 7 not in never.tokens and always.tokens == [7] * 12
    assert_answers(e, known, [never, always])


@pytest.mark.parametrize("presence, frequency", [(2.0, 0.0), (0.0, 2.0), (2.0, 2.0)])
def test_penalties_count_the_drafts_before_each_place(model, known, presence, frequency):  # noqa: F811
    """Drafts [7, 7, 7]: the second place sees 7 counted once, the third twice."""
    its = dict(presence_penalty=presence, frequency_penalty=frequency, logit_bias={7: 9.0, 8: 7.5, 9: 6.0})
    params = [SamplingParams(max_tokens=14, ignore_eos=True, **its)]
    params.append(replace(params[0], temperature=1.0, seed=3))
    e = speculative(model, lambda request, n: [7] * n)
    outputs = [e.add(PROMPTS[0], p)[0] for p in params]
    run(e)
    assert_answers(e, known, outputs)
    assert drafted(e)[1] > 0 and len(set(outputs[0].tokens)) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_that_is_drafted_too_early_is_refused(model, known, temperature):  # noqa: F811
    """min_tokens 4, and the draft ends at 2: the ban is that of each place's own position."""
    params = SamplingParams(
        max_tokens=12, min_tokens=4, stop_token_ids=(5,), logit_bias={5: 60.0}, ignore_eos=True,
        temperature=temperature, seed=1,
    )  # fmt: skip
    e = speculative(model, lambda request, n: [*known.right(request, 1), 5, *known.right(request, n)][:n])
    (early,) = e.add(PROMPTS[0], params)
    right = speculative(model, known.right, 8)
    (other,) = right.add(PROMPTS[0], params)
    run(e), run(right)
    for output in (early, other):
        assert len(output.tokens) == 4 and output.finish_reason == "stop" and 5 not in output.tokens
    assert_answers(e, known, [early])
    assert_answers(right, known, [other])


@pytest.mark.parametrize("at", range(1, 9))
def test_an_end_inside_a_draft_is_the_end(model, known, at):  # noqa: F811
    """The draft knows what would follow, and nobody sees it: not as tokens, not as logprobs, not as pages."""
    e = speculative(model, known.right, 8)
    free = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2)
    made = truth(model, PROMPTS[0], free, 0, set(), 20)[0]
    end = made[at]
    (output,) = e.add(PROMPTS[0], replace(free, stop_token_ids=(end,)))
    run(e)
    first = made.index(end)
    assert output.tokens == made[:first] and output.finish_reason == "stop"
    assert [entry.token for entry in output.logprobs] == output.tokens


@pytest.mark.parametrize("most", range(1, 12))
def test_no_token_more_than_allowed(model, known, most):  # noqa: F811
    e = speculative(model, lambda request, n: known.right(request, n) + [1] * 9, 8)
    outputs = e.add(PROMPTS[0], replace(FREE, max_tokens=most, logprobs=0))
    run(e)
    assert len(outputs[0].tokens) == len(outputs[0].logprobs) == most
    assert_answers(e, known, outputs)
    assert max(row.computed + row.num_tokens for r in e.log for row in r.rows) <= len(PROMPTS[0]) + most - 1


def test_what_ends_first_says_why(model, known):  # noqa: F811
    """A stop and the last token allowed in the same draft."""
    made = truth(model, PROMPTS[0], FREE, 0, set(), 12)[0]
    for at in (3, 4, 5):
        e = speculative(model, known.right, 8)
        (output,) = e.add(PROMPTS[0], replace(FREE, max_tokens=5, stop_token_ids=(made[at],)))
        run(e)
        assert output.finish_reason == ("stop" if made.index(made[at]) < 5 else "length")
        assert output.tokens == made[: min(5, made.index(made[at]))]


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("cut", [0, 1, 5, 8])
def test_a_stop_string_inside_a_draft_never_shows(model, known, tokenizer, cut, length):  # noqa: F811
    full = tokenizer.decode(truth(model, PROMPTS[0], FREE, 0, set(), 12)[0])
    stop = full[4 + cut : 4 + cut + length]
    e = speculative(model, known.right, 8, tokenizer=tokenizer)
    (output,) = e.add(PROMPTS[0], replace(FREE, stop=[stop, "never seen"], logprobs=1))
    plain = engine(model, tokenizer)
    (other,) = plain.add(PROMPTS[0], replace(FREE, stop=[stop, "never seen"], logprobs=1))
    deltas = run(e)[output]
    run(plain)
    assert "".join(deltas) == output.text == full[: full.index(stop)] == other.text
    assert (output.finish_reason, output.tokens) == (
        other.finish_reason,
        other.tokens,
    ) and other.finish_reason == "stop"
    assert [x.token for x in output.logprobs] == [x.token for x in other.logprobs] == output.tokens


def test_a_stop_string_before_min_tokens_is_text_inside_a_draft_too(model, known, tokenizer):  # noqa: F811
    made = truth(model, PROMPTS[0], FREE, 0, set(), 12)[0]
    params = replace(FREE, stop=[tokenizer.decode(made[2:3])], min_tokens=6)
    texts = []
    for e in (speculative(model, known.right, 8, tokenizer=tokenizer), engine(model, tokenizer)):
        (output,) = e.add(PROMPTS[0], params)
        run(e)
        texts.append((output.text, output.tokens, output.finish_reason))
    assert texts[0] == texts[1] and len(texts[0][1]) >= 6


def test_completions_of_one_prompt_fork_and_draft(model, known):  # noqa: F811
    params = SamplingParams(max_tokens=9, temperature=1.2, seed=7, n=4, ignore_eos=True, logprobs=1)
    for prompt, page_size in itertools.product(PROMPTS[:3], (4, 16)):
        e = speculative(model, ragged(known), page_size=page_size)
        outputs = e.add(prompt, params)
        run(e)
        assert_answers(e, known, outputs)
        assert len({tuple(o.tokens) for o in outputs}) == 4 and drafted(e)[1] > 5


# ---------------------------------------------------------------- pages
def test_a_page_with_rejected_tokens_is_never_found_by_others(model, known):  # noqa: F811
    """Whoever continues the same text finds the pages of what was kept, and gets the answer it gets alone."""
    e = speculative(model, ragged(known), page_size=4)
    (first,) = e.add(PROMPTS[0], replace(FREE, max_tokens=20))
    run(e)
    text = PROMPTS[0] + first.tokens
    wrong = PROMPTS[0] + known.of(first.request)[0][:2] + [(known.of(first.request)[0][2] + 1) % 251] * 9
    outputs = [e.add(prompt, FREE)[0] for prompt in (text, text[:17], wrong)]
    run(e)
    assert outputs[0].request.cached_tokens >= len(text) // 4 * 4 - 4
    assert outputs[2].request.cached_tokens <= 8
    assert_answers(e, known, outputs)


def test_pages_are_indexed_as_far_as_tokens_are_certain(model, known):  # noqa: F811
    """After every step: each indexed page of a request holds keys of tokens it has."""
    e = speculative(model, ragged(known), 7, page_size=4)
    outputs = [e.add(p, replace(FREE, max_tokens=24))[0] for p in PROMPTS]
    while e.outputs:
        e.step()
        for r in e.scheduler.running:
            assert r.draft is None and r.computed < len(r.tokens)
            assert len(r.chain) == r.computed // 4
            for i, node in enumerate(r.chain):
                assert list(memoryview(node.tokens).cast("q")) == r.tokens[4 * i : 4 * i + 4]
    assert_answers(e, known, outputs)


@pytest.mark.parametrize("spare", range(4, 22))
def test_nobody_gives_way_for_a_draft(spare):
    """Four requests at the end of a page each, 15 drafts for all, and few pages left: each gets its own token's."""
    pool = PagePool(16 + spare, 4)
    scheduler = Scheduler(pool, token_budget=80, max_running=4)
    requests = [Request(i, [i] * 16, SamplingParams(), 40) for i in range(4)]
    for its in requests:
        scheduler.add(its)
    plan = scheduler.schedule()
    scheduler.commit(plan, [[1]] * 4)
    for its in requests:
        its.ahead = 15
    plan = scheduler.schedule()
    assert [r.id for r, _ in plan] == [0, 1, 2, 3] and not scheduler.gave_way
    assert all(n == 1 + r.granted and r.granted in (0, 15) for r, n in plan)
    assert sum(r.granted > 0 for r in requests) == min(4, max(0, spare - 4) // 4), "room that nobody uses"
    pool.check(requests)


def test_a_prompt_does_not_give_way_for_a_draft():
    """One decodes, another has most of its prompt to come: pages for its next chunk are not for drafts."""
    pool = PagePool(13, 4)
    scheduler = Scheduler(pool, token_budget=24, max_running=2)
    first, second = Request(0, [1] * 8, SamplingParams(), 30), Request(1, [2] * 36, SamplingParams(), 4)
    scheduler.add(first), scheduler.add(second)
    plan = scheduler.schedule()
    assert [n for _, n in plan] == [8, 16]
    scheduler.commit(plan, [[1], [1]])
    first.ahead = 11
    plan = scheduler.schedule()
    assert [(r.id, n) for r, n in plan] == [(0, 1), (1, 20)] and not scheduler.gave_way


def test_a_budget_is_shared_with_drafts(model, known):  # noqa: F811
    """Each decoding request has its token for sure, drafts take what is left, in order of rank."""
    e = speculative(model, known.right, 15, token_budget=12, page_size=16)
    outputs = [e.add(p, FREE)[0] for p in PROMPTS[:4]]
    run(e)
    assert max(record.num_tokens for record in e.log) == 12 and drafted(e)[1] > 20
    assert_answers(e, known, outputs)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_give_way_come_back_right(model, known, seed):  # noqa: F811
    """A pool too small for all, pages refused at random, and drafts of every kind."""
    rng = random.Random(seed)
    e = speculative(model, chaos(known, rng), 6, page_size=4, num_pages=26, max_running=6)
    grow = e.pages.grow
    e.pages.grow = lambda request, n: rng.random() > 0.05 and grow(request, n)
    outputs = [e.add(p, replace(FREE, temperature=0.9, seed=i))[0] for i, p in enumerate(PROMPTS * 2)]
    run(e)
    assert e.scheduler.preemptions > 0 and e.scheduler.hit_tokens > 0
    assert_answers(e, known, outputs)


def test_preempted_between_propose_and_verify(model, known):  # noqa: F811
    """Who leaves while its draft is being made takes nothing along; the others' answers stay theirs."""
    e = speculative(model, known.right, page_size=4)
    outputs = [e.add(p, FREE)[0] for p in PROMPTS]
    launch, left = e._launch, []

    def leaving(plan, record, marks):
        for request, _ in plan:
            if request.draft and request.id in (1, 3) and request.id not in left:
                e.scheduler.preempt(request)
                left.append(request.id)
                assert request.draft is None and request.granted == 0 and request.pages == []
        return launch([(r, n) for r, n in plan if r.seat is not None], record, marks)

    e._launch = leaving
    run(e)
    assert sorted(left) == [1, 3] and [o.request.preemptions for o in outputs] == [0, 1, 0, 1, 0]
    assert_answers(e, known, outputs)


@pytest.mark.parametrize("gone", range(1, 5))
def test_who_leaves_while_drafts_are_pending_leaves_nothing(model, known, gone):  # noqa: F811
    """Aborted, or late, at any moment: its pages are back, and others go on."""
    e = speculative(model, ragged(known), 6, page_size=4)
    outputs = [e.add(p, replace(FREE, max_tokens=20))[0] for p in PROMPTS]
    for _ in range(gone):
        e.step()
    alive = [o for o in outputs if not o.finished]
    e.abort(alive[:2])
    alive[2].request.deadline = 0.0
    e.scheduler.deadlines.append((0.0, alive[2].request.id, alive[2].request))
    e.scheduler.deadlines.sort(key=lambda d: d[0])
    run(e)
    assert [o.finish_reason for o in alive[:3]] == ["abort", "abort", "timeout"]
    for o in alive[:3]:
        assert o.tokens == known.of(o.request)[0][: len(o.tokens)] and not o.request.pages
    assert_answers(e, known, [o for o in outputs if o not in alive[:3]])


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
def test_a_day_with_drafts_gives_what_a_day_without_gives(model, known, tokenizer, seed):  # noqa: F811
    """Requests of every kind come and go, some are aborted, pages run short; and anything at all is drafted."""
    day, limits = orders(random.Random(seed), tokenizer), LIMITS[seed % 3]
    expected, _ = live_through(engine(model, tokenizer, overlap=False, **limits), day, seed)
    drafter = Scripted(chaos(known, random.Random(seed)), 5)
    e = engine(model, tokenizer, drafter=drafter, adaptive=False, step=KINDS[seed % 3], **limits)
    got, _ = live_through(e, day, seed)
    assert_alike(got, expected)
    assert e.speculation.on and drafted(e)[1] > 5


# ---------------------------------------------------------------- other models, other caches
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_sliding_window(checkpoints, kind, sinks):
    """A window of 8 tokens, and drafts of up to 7: what leaves it is only what is certain."""
    its = load(checkpoints("mistral"))
    prompts = [p for p in PROMPTS if len(p) > 5]
    params = replace(FREE, max_tokens=20)
    plain = engine(its, step=kind, page_size=4, sinks=sinks)
    expected = [plain.add(p, params)[0] for p in prompts]
    run(plain)
    answers = {tuple(o.request.prompt): o.tokens for o in expected}

    def says(request, n):
        made = answers[tuple(request.prompt)][len(request.outputs) :]
        right = (request.id + len(request.tokens)) % (n + 1)
        return made[:right] + [(token + 1) % 251 for token in made[right:n]]

    e = speculative(its, says, 7, step=kind, page_size=4, sinks=sinks)
    outputs = [e.add(p, params)[0] for p in prompts]
    run(e)
    assert [o.tokens for o in outputs] == [o.tokens for o in expected]
    assert drafted(e)[1] > 20
    if not sinks:
        assert_answers(e, Known(its), outputs)


@pytest.mark.parametrize("step", ["plain", "graph"])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_quantized_caches(model, kind, step):  # noqa: F811
    """Against the definition of each cache. With int4 no draft fills a page: it could not be taken back."""
    page = 8
    params = SamplingParams(max_tokens=20, seed=0, ignore_eos=True)
    answers = {
        tuple(p): quantized_oracle.alone(model, p, params, kind, page) for p in PROMPTS[:4] if len(p) < 30
    }

    def says(request, n):
        made = answers[tuple(request.prompt)][len(request.outputs) :]
        right = (request.id + len(request.tokens)) % (n + 1)
        return made[:right] + [(token + 1) % 251 for token in made[right:n]]

    e = speculative(model, says, 6, step=step, page_size=page, kv_cache_dtype=kind, prefix_caching=False)
    outputs = [e.add(list(p), params)[0] for p in answers]
    run(e)
    assert [o.tokens for o in outputs] == list(answers.values())
    tried, kept = drafted(e)
    assert kept > 10
    for row in (row for record in e.log for row in record.rows if row.drafted and kind == "int4"):
        assert row.computed % page + row.num_tokens < page


@pytest.mark.parametrize("kind", [None, "int8", "fp8", "int4"])
def test_recorded_steps_are_no_larger_than_the_budget(model, known, kind):  # noqa: F811
    """8 requests with 4 drafts each would be 40 rows, and there is room for 20."""
    e = speculative(model, known.right, step="graph", token_budget=20, max_running=8, kv_cache_dtype=kind)
    assert max(e.compute.rows, default=0) <= 20
    outputs = [e.add([i], replace(FREE, max_tokens=4))[0] for i in range(8)]
    run(e)
    assert {o.finish_reason for o in outputs} == {"length"} and drafted(e)[0] > 0


def test_a_tree_over_rounded_keys(model):  # noqa: F811
    """int8 and fp8 can be moved: the path that was kept is brought together, scales and all."""
    params = SamplingParams(max_tokens=16, seed=0, ignore_eos=True)
    for kind in ("int8", "fp8"):
        answer = quantized_oracle.alone(model, PROMPTS[0], params, kind, 4)

        def says(request, n, answer=answer):
            right = answer[len(request.outputs) :][:3]
            wrong = [(token + 1) % 251 for token in right]
            return tree_of(wrong, right, [*right[:1], *wrong[1:]]) if right else None

        e = speculative(model, says, 8, True, page_size=4, kv_cache_dtype=kind)
        (output,) = e.add(PROMPTS[0], params)
        run(e)
        assert output.tokens == answer and len(e.log) < 12


# ---------------------------------------------------------------- when something goes wrong
def raising(known, after):
    count = itertools.count()

    def says(request, n):
        if next(count) == after:
            raise RuntimeError("out of ideas")
        return known.right(request, n)

    return says


@pytest.mark.parametrize("after", [0, 1, 6])
def test_a_drafter_that_fails_is_heard_of_once(model, known, after):  # noqa: F811
    e = speculative(model, raising(known, after))
    outputs = [e.add(p, params)[0] for p, params in itertools.product(PROMPTS[:2], EVERY[:4])]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run(e)
    (warning,) = heard
    assert "'scripted' failed (RuntimeError: out of ideas)" in str(warning.message)
    assert not e.speculation.on
    assert_answers(e, known, outputs)


class Late(Scripted):
    """It fails where it is told what became of its drafts, or where pages are copied."""

    def __init__(self, says, where):
        super().__init__(says)
        self.wants_hidden, self.left, self.where = True, 3, where

    def fail(self, where):
        self.left -= where == self.where
        if self.left < 0:
            raise RuntimeError(f"no {where}")

    def observe(self, requests, hidden):
        assert len(requests) == len(hidden)
        self.fail("observe")

    def copy(self, pairs):
        self.fail("copy")


@pytest.mark.parametrize("where", ["observe", "copy"])
def test_a_drafter_that_fails_elsewhere_takes_nobody_along(model, known, where):  # noqa: F811
    e = engine(model, drafter=Late(known.right, where), adaptive=False)
    outputs = [e.add(p, params)[0] for p, params in zip(PROMPTS[:4], EVERY[-4:])]
    with pytest.warns(UserWarning, match=f"no {where}.*goes on without speculation") as heard:
        run(e)
    assert len(heard) == 1 and not e.speculation.on
    assert_answers(e, known, outputs)


@pytest.mark.parametrize("token", [-1, 251, 10**6])
def test_a_token_that_there_is_not(model, known, token):  # noqa: F811
    e = speculative(model, lambda request, n: [*known.right(request, n - 1), token])
    (output,) = e.add(PROMPTS[0], FREE)
    with pytest.warns(UserWarning, match="the vocabulary has 251 tokens"):
        run(e)
    assert_answers(e, known, [output])


def test_a_drafter_that_answers_for_too_few(model, known):  # noqa: F811
    e = speculative(model, known.right)
    e.speculation.drafter.propose = lambda plan: []
    (output,) = e.add(PROMPTS[0], FREE)
    with pytest.warns(UserWarning, match="goes on without"):
        run(e)
    assert_answers(e, known, [output])


def test_a_step_that_fails_with_drafts_pending(model, known):  # noqa: F811
    """Its requests are run one by one, without their drafts; drafts come again with the next step."""
    e = speculative(model, ragged(known), page_size=4)
    outputs = [e.add(p, params)[0] for p, params in zip(PROMPTS * 3, EVERY)]
    compute, fails = e.compute, []

    def failing(batch):
        if len(e.log) in (2, 4) and len(batch.plan) > 1 and e.log[-1].step not in fails:
            fails.append(e.log[-1].step)
            raise RuntimeError("injected")
        return compute(batch)

    e.compute = failing
    run(e)
    assert len(fails) == 2 and e.speculation.on
    assert_answers(e, known, outputs)
    assert_counted(e, outputs)


def test_one_that_cannot_be_computed_fails_alone(model, known):  # noqa: F811
    e = speculative(model, ragged(known), page_size=4)
    outputs = [e.add(p, FREE)[0] for p in PROMPTS]
    compute = e.compute

    def failing(batch):
        if any(r.id == 1 and len(r.outputs) >= 4 for r, _ in batch.plan):
            raise RuntimeError("injected")
        return compute(batch)

    e.compute = failing
    run(e)
    assert outputs[1].finish_reason == "error" and "injected" in str(outputs[1].error)
    assert outputs[1].tokens == known.of(outputs[1].request)[0][: len(outputs[1].tokens)]
    assert_answers(e, known, [o for o in outputs if o is not outputs[1]])


def test_logits_that_are_no_numbers_fail_their_request_alone(model, known):  # noqa: F811
    """Where the walk comes by; behind a rejected draft nobody minds."""
    for how, ends in (("right", "error"), ("wrong", "length")):
        e = speculative(model, HOW[how](known))
        outputs = [e.add(p, FREE)[0] for p in PROMPTS[:3]]
        compute = e.compute

        def broken(batch, compute=compute):
            logits, *more = compute(batch)
            logits = logits.clone()
            for b, i in enumerate(batch.sampled):
                place = batch.host_lengths[i] - len(batch.owners[i].tokens)
                if batch.owners[i].id == 1 and place == 2:  # behind its second draft
                    logits[b] = float("nan")
            return logits, None, *more[1:]

        e.compute = broken
        run(e)
        assert [o.finish_reason for o in outputs] == ["length", ends, "length"]
        assert_answers(e, known, outputs[::2] if ends == "error" else outputs)


# ---------------------------------------------------------------- the door
def test_what_excludes_each_other(model):  # noqa: F811
    with pytest.raises(ValueError, match="use one of the two"):
        Engine(model, drafter=NGram(), overlap=True)
    assert Engine(model, num_pages=9, drafter=NGram()).overlap is False
    with pytest.raises(ValueError, match="no drafter is called 'oracle'.*'ngram'"):
        Engine(model, num_pages=9, drafter="oracle")


@pytest.mark.parametrize("k, branches", [(16, False), (63, True), (0, False)])
def test_more_drafts_than_a_step_verifies(model, k, branches):  # noqa: F811
    with pytest.raises(ValueError, match=f"k is {k}"):
        speculative(model, lambda request, n: None, k, branches)


def test_a_drafter_by_name(model):  # noqa: F811
    its = LLM(model, num_pages=40, drafter="ngram")
    prompt = [4, 5, 6, 7] * 5
    (output,) = its.generate(prompt, replace(FREE, max_tokens=40))[0]
    assert its.speculation.drafter.name == "ngram" and drafted(its)[0] > 0
    assert output.tokens == truth(model, prompt, FREE, 0, set(), 40)[0]


# ---------------------------------------------------------------- adaptive
def test_drafts_that_do_not_pay_stop(model, known):  # noqa: F811
    """A pace that has seen dear steps gives no room, and a later one of cheap steps does."""
    e = engine(model, drafter=Scripted(known.right, 4))
    e.speculation.pace.timed = lambda tokens, seconds: None
    e.speculation.pace.step = {n: 1.0 * n for n in range(1, 40)}
    outputs = [e.add(PROMPTS[0], replace(FREE, max_tokens=9))[0]]
    run(e)
    assert drafted(e) == (0, 0) and len(e.log) == 9
    e.speculation.pace.step = {n: 1.0 for n in range(1, 40)}
    outputs.append(e.add(PROMPTS[0], replace(FREE, max_tokens=9))[0])
    run(e)
    assert drafted(e)[1] > 4
    assert_answers(e, known, outputs)


def test_free_drafts_that_do_not_pay_are_cut(model, known):  # noqa: F811
    """What costs nothing is proposed first, and verified only where that pays."""
    drafter = Scripted(known.right, 4)
    drafter.free = True
    e = engine(model, drafter=drafter)
    e.speculation.pace.timed = lambda tokens, seconds: None
    e.speculation.pace.step = {n: 1.0 * n for n in range(1, 40)}
    outputs = [e.add(PROMPTS[0], replace(FREE, max_tokens=9))[0]]
    run(e)
    assert drafted(e) == (0, 0) and len(e.log) == 9
    e.speculation.pace.step = {1: 1.0, 2: 1.0, 3: 1.0, 4: 5.0}
    outputs.append(e.add(PROMPTS[0], replace(FREE, max_tokens=9))[0])
    run(e)
    assert max(row.drafted for record in e.log for row in record.rows) == 2
    assert_answers(e, known, outputs)


def test_what_is_learned_of_the_gone_is_forgotten(model):  # noqa: F811
    e = speculative(model, lambda request, n: [0] * n)
    for i in range(150):
        e.add([i], replace(FREE, max_tokens=3))
    run(e)
    assert len(e.speculation.pace.right) <= 4 * 8 + 64 + 8
