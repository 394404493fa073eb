"""What the tests of speculation share: a drafter that says what a test wants, and answers made without any engine.

Scripted    says(request, n) decides, and may be as wrong as it likes
truth       one request alone, token by token from the definitions, on beyond every end; and the logits it drew from
markov      a Model whose logits behind token t are table[t], whatever came before: distributions are known exactly
"""

import math

import torch

from minserve.config import ModelConfig, RopeConfig
from minserve.kv_cache import KVCache
from minserve.model import Model
from minserve.prefill_decode import prefill
from minserve.request import Draft
from minserve.sampling import sample
from minserve.speculation import Drafter


class Scripted(Drafter):
    """says(request, n) -> tokens, a Draft, or None; n is what there is room for, and it need not care."""

    name = "scripted"

    def __init__(self, says, k: int = 4, branches: bool = False):
        self.says, self.k, self.branches = says, k, branches

    def propose(self, plan):
        return [self._draft(r) if r.granted else None for r, _ in plan]

    def _draft(self, request):
        said = self.says(request, request.granted)
        return Draft(said) if isinstance(said, list) else said


@torch.inference_mode()
def truth(model, prompt, params, seed, stop_ids, count: int):
    """The first `count` tokens, ends ignored, and the logits [count, V] behind each place."""
    cache = KVCache(model.config, len(prompt) + count, model.dtype, model.device)
    tokens, rows = list(prompt), []
    for position in range(count):
        rows.append(prefill(model, tokens[cache.length :], cache))
        made = tokens[len(prompt) :]
        tokens.append(sample(rows[-1], params, seed, position, prompt, made, stop_ids))
    return tokens[len(prompt) :], torch.stack(rows)


class Known:
    """truth() of requests as they come, remembered: right(request, n) are the next n tokens it will make."""

    def __init__(self, model):
        self.model, self.answers, self.seen = model, {}, {}

    def of(self, request):
        if request not in self.seen:
            key = str((request.prompt, request.params, request.seed, sorted(request.stop_ids)))
            if key not in self.answers:
                ends = {*request.stop_ids, *request.params.stop_token_ids}
                its = request.prompt, request.params, request.seed, ends, request.max_new_tokens + 8
                self.answers[key] = truth(self.model, *its)
            self.seen[request] = self.answers[key]
        return self.seen[request]

    def right(self, request, n: int) -> list[int]:
        at = len(request.tokens) - len(request.prompt)
        return self.of(request)[0][at : at + n]

    def wrong(self, request, n: int) -> list[int]:
        vocab = self.model.config.vocab_size
        return [(token + 1) % vocab for token in self.right(request, n)]


def tree_of(*paths: list[int]) -> Draft:
    """A tree with these paths in it, nodes in the order in which they come."""
    tokens, parents, found = [], [], {(): -1}
    for path in paths:
        for i in range(len(path)):
            if (head := tuple(path[: i + 1])) not in found:
                found[head] = len(tokens)
                tokens.append(path[i])
                parents.append(found[head[:-1]])
    return Draft(tokens, parents)


def markov(table, context: int = 512) -> Model:
    """table [V, V]: logits behind each token. Its layers add nothing to what the embedding says."""
    table = torch.as_tensor(table, dtype=torch.float32)
    V, E = len(table), 16
    config = ModelConfig(
        "llama", V, E, E, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, norm_eps=1e-12,
        rope=RopeConfig(1e4), context=context, tied=False, dtype="float32",
    )  # fmt: skip
    model = Model.random(config)
    for layer in model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.embed_tokens.weight.copy_(torch.eye(V, E))
    model.lm_head.weight.zero_()[:, :V] = table.T / math.sqrt(
        E
    )  # the norm multiplies a one-hot row by sqrt(E)
    return model
