"""Notebook 12's experiments: text to learn from, what guesses are worth, drafters side by side on the same prompts.

    talk(model, tokenizer, ...)           short conversations that the model has with itself
    lined_up(words, heads)                a text beside itself, shifted: what each head must say at each place
    right(ranks)                          how often a Medusa head's first, three, ten candidates hold the token
    all_trees(ranks, nodes)               every tree of so many nodes, to look for the best one by hand
    bits(parents)                         of a tree's places: who sees whom
    listen(llm)                           steps of an engine as they pass: tokens, draft, logits
    behind_chains(model, tokens, draft)   the logits at a tree's places, from the chain to each of them
    in_place(llm, prompt, layers)         whose keys the draft has written already, when verification begins
    undecided(heads, study)               a place of a text where a rule of acceptance shows
    second_tokens(...)                    which tokens follow the likeliest first one, many times over
    cost(run, plain, k)                   what a draft and what verifying cost, from two runs
    pays(kept, k, c, v)                   the break-even formula
    held_bytes(drafter)                   what it keeps in memory

Story    notebooks/12_medusa_and_self_speculation.ipynb
"""

from itertools import accumulate, combinations, product
from operator import mul

import torch

from minserve.batch import branches
from minserve.engine import LLM
from minserve.lab.quality import logits_of
from minserve.lab.rounds import Run
from minserve.model import Model
from minserve.request import Draft, SamplingParams
from minserve.study import LAST, Study


# ---------------------------------------------------------------- text, lined up
def talk(
    model: Model, tokenizer, before, after, n: int, question: int = 48, answer: int = 128
) -> list[tuple]:
    """The model asks, then answers, every second time greedily: (number, temperature, where the answer begins, tokens).

    before, after: ids around a user's words. As self_text does it, with fewer tokens.
    """
    pages = 2 + (len(before + after) + question + answer) // 16
    llm = LLM(model, tokenizer, max_running=n, num_pages=n * pages, token_budget=2048)
    ask = [SamplingParams(question, 1.0, top_p=0.95, seed=i, stop_token_ids=after[:1]) for i in range(n)]
    prompts = [out.request.tokens + after for [out] in llm.generate([before] * n, ask, progress=False)]
    warm = [0.7 * (i % 2) for i in range(n)]
    params = [SamplingParams(answer, temperature, seed=i) for i, temperature in enumerate(warm)]
    answers = [out.tokens for [out] in llm.generate(prompts, params, progress=False)]
    return [(i, warm[i], len(p), p + its) for i, (p, its) in enumerate(zip(prompts, answers))]


def lined_up(words: list[str], heads: int) -> str:
    """A line per place: its token, then what the own head and each further one must say there; "-" behind the end."""
    names = ["own head", *(f"head {h}" for h in range(heads))]
    lines = ["place  token         " + "".join(f"{name:<15}" for name in names)]
    for p, word in enumerate(words):
        said = [words[p + ahead] if p + ahead < len(words) else "-" for ahead in range(1, len(names) + 1)]
        lines.append(f"{p:>5}  {word:<14}" + "".join(f"{its:<15}" for its in said))
    return "\n".join(line.rstrip() for line in lines)


# ---------------------------------------------------------------- what guesses are worth
def right(ranks, among=(1, 3, 10)) -> list[list[float]]:
    """ranks [n, m, RANKS] of training.medusa_ranks -> for each head, how often its first 1, 3, 10 hold the token."""
    found = []
    for head in ranks.unbind(1):
        inside = head[head[:, 0] >= 0].float()  # the text goes on so far
        found.append([inside[:, :n].amax(1).mean().item() for n in among])
    return found


def chain_gains(accuracies: list[list[float]]) -> list[float]:
    """How often each node of the chain of best candidates is kept: all heads up to it are right."""
    return list(accumulate((ranks[0] for ranks in accuracies), mul))


def lengths(gains: list[float]) -> list[float]:
    """Tokens per step with the first 1, 2, ... nodes of a draft: each adds its gain, and one token comes on top."""
    return list(accumulate(gains, initial=1.0))[1:]


def all_trees(ranks: list[int], nodes: int) -> list[list[tuple]]:
    """Every tree of so many nodes, each a path of ranks, where depth d has ranks[d] candidates; parents come first."""
    every = [path for depth in range(len(ranks)) for path in product(*map(range, ranks[: depth + 1]))]
    whole = lambda tree: all(len(path) == 1 or path[:-1] in tree for path in tree)
    return [list(tree) for tree in combinations(every, nodes) if whole(tree)]


def widths(paths: list[tuple]) -> list[int]:
    """Of a tree: nodes at depth 1, 2, ..."""
    depths = [len(path) for path in paths]
    return [depths.count(depth) for depth in range(1, max(depths) + 1)]


def pays(kept: float, k: int, c: float, v: float) -> float:
    """How many times as fast as without: 1 + kept tokens for k drafts and a step over k + 1, in steps of one token."""
    return (1 + kept) / (k * c + v)


# ---------------------------------------------------------------- steps, looked at
def bits(parents: list[int]) -> list[int]:
    """Of a tree's root and then its nodes: bit m says whether it sees the place m before its own."""
    return branches(parents)[1]


def listen(llm: LLM) -> list[tuple[list[int], Draft | None, torch.Tensor]]:
    """Of each step of a lone request from now on: its tokens before, its draft, the logits [1 + drafts, V]."""
    compute, steps = llm.compute, []

    def heard(batch):
        results, [(request, _)] = compute(batch), batch.plan
        steps.append((list(request.tokens), request.draft, results[0].float().clone()))
        return results

    llm.compute = heard
    return steps


def behind_chains(model: Model, tokens: list[int], draft: Draft) -> torch.Tensor:
    """[1 + drafts, V]: the plain model's logits behind the last token, and behind the chain to each node."""
    paths = [[]]
    for token, parent in zip(draft.tokens, draft.parents):
        paths.append([*paths[parent + 1], token])
    return torch.stack([logits_of(model, tokens + path)[-1][-1].float() for path in paths])


def in_place(llm: LLM, prompt: list[int], layers, step: int = 1) -> dict[int, bool]:
    """{layer: were the keys of the last token and all drafts but one in the cache before the step verified them?}"""
    compute, found = llm.compute, []

    def heard(batch):
        slots = batch.slots[:-1]  # the last draft was never an input
        keys = lambda: {layer: llm.cache.k[layer].flatten(0, 1)[slots].clone() for layer in layers}
        early, results = keys(), compute(batch)
        found.append({layer: torch.allclose(early[layer], its, atol=1e-3) for layer, its in keys().items()})
        return results

    llm.compute = heard
    llm.generate(prompt, SamplingParams(max_tokens=8 * (1 + step), ignore_eos=True), progress=False)
    llm.compute = compute
    return found[step]


@torch.inference_mode()
def undecided(heads, study: Study) -> tuple[list[int], int, int]:
    """A place of a text where the next token is all but certain, and what head 0 names behind it a matter of chance.

    Returns the tokens up to there, the next one, and the named one.
    """
    places = study.guessed.nonzero().flatten()
    places = places[places + 2 < study.ends[places]]
    says = heads(study.to(places, study.states[LAST]).to(heads.rows.dtype))[:, 0].float().softmax(-1)
    (best, second), (named, _) = (its.T.cpu() for its in says.topk(2))  # named: columns
    vocabulary = study.vocabulary.cpu()
    follows = torch.searchsorted(vocabulary, study.tokens[places + 1]).clamp_max(len(vocabulary) - 1)
    known = vocabulary[follows] == study.tokens[places + 1]
    chance = lambda at, column: (study.chances[at] * (study.ids[at] == column[:, None])).sum(-1)
    sure, x = chance(places, follows) * known, chance(places + 1, named)
    at = int((sure.square() * x * (1 - x) * (best - second)).argmax())  # a tie would turn with the rounding
    start = study.starts[study.starts <= places[at]][-1]
    text = study.tokens[start : places[at] + 2].tolist()
    return text[:-1], text[-1], int(vocabulary[named[at]])


def second_tokens(
    model: Model, tokenizer, drafter, prompt: list[int], first: int, n: int = 256
) -> torch.Tensor:
    """[V]: shares of what came second, of n answers at temperature 1, in those that begin with the token `first`."""
    llm = LLM(model, tokenizer, drafter=drafter, adaptive=False, num_pages=64 + 2 * n, max_running=64)
    params = SamplingParams(3, 1.0, n=n, seed=1, ignore_eos=True)
    [outputs] = llm.generate(prompt, params, progress=False)
    came = torch.tensor([out.tokens[1] for out in outputs if out.tokens[0] == first])
    return came.bincount(minlength=model.config.vocab_size) / len(came)


# ---------------------------------------------------------------- drafters side by side
def cost(run: Run, plain: Run, k: int) -> tuple[float, float]:
    """(c, v): of a run with k drafts in each step, what a draft and what verifying cost, in steps without drafts."""
    c = run.price(plain, k)
    return c, run.seconds / len(run.log) / (plain.seconds / len(plain.log)) - k * c


def held_bytes(drafter) -> int:
    """Weights and tables of a drafter's parts, each once; those of the target that it works on not among them."""
    parts = [getattr(drafter, name, None) for name in ("heads", "head", "model")]
    held = [tensor for part in parts if part is not None for tensor in [*part.parameters(), *part.buffers()]]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
