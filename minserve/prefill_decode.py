"""One request, from prompt to last token, plain enough to read aloud. Everything later must equal this.

    prefill   the whole prompt in one pass: T tokens share each weight that is read           bound by arithmetic
    decode    one token a pass: every weight is read again for a single token                 bound by bandwidth

`generate` pays for each token once, because a cache keeps the past. `generate_without_cache` recomputes the past at
every step: the same tokens from quadratically more work. Both are generators of token ids; the end-of-sequence token
is not among them, and a generator's return value says why it ended, "stop" or "length".

Refused at the call, before any work: an empty prompt, ids outside the vocabulary, a prompt that leaves no room for one
token, a prompt and `max_tokens` that together pass the model's context, and what only the engine can do: several
completions (`n`), stop strings, logprobs.

Story    notebooks/02_prefill_and_decode.ipynb, notebooks/03_kv_cache.ipynb
"""

import secrets
from collections.abc import Callable, Generator

import torch

from minserve.config import ModelConfig
from minserve.kernels.prefill_attention import prefill_attention
from minserve.kv_cache import KVCache
from minserve.model import Model
from minserve.request import SamplingParams, check_vocabulary
from minserve.sampler import TokenLogprobs, logprobs_of
from minserve.sampling import sample

SCORED = 256  # rows of a prompt whose logits exist at once: 50 MB for a vocabulary of 49,152
Tokens = Generator[int, None, str]  # yields token ids, returns "stop" or "length"


# ---------------------------------------------------------------- the two phases
def prefill(model: Model, tokens: list[int], cache: KVCache):
    """Run all `tokens` in one pass behind what the cache holds. Returns the last one's logits, fp32 [V]."""
    ids = torch.tensor(tokens, device=model.device)
    positions = torch.arange(cache.length, cache.length + len(tokens), device=model.device)
    last = torch.tensor([len(tokens) - 1], device=model.device)
    logits = model(ids, positions, cache.attend, rows=last)
    cache.advance(len(tokens))
    return logits[0].float()


def decode_step(model: Model, token: int, cache: KVCache):
    """Run one token behind what the cache holds. Returns the logits of what comes next, fp32 [V]."""
    return prefill(model, [token], cache)  # the same pass, one token long: only its cost is another


def attend_afresh(config: ModelConfig):
    """Causal attention among the tokens of this call alone: the whole past must be in it, because nothing is kept."""

    def attend(layer: int, q, k, v):
        starts = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
        return prefill_attention(q, k, v, starts, starts, len(q), config.windows[layer])

    return attend


# ---------------------------------------------------------------- one request
def generate(model: Model, prompt: list[int], params: SamplingParams, cache: KVCache | None = None) -> Tokens:
    """Prefill once, then decode. A cache that is passed in may already hold a past, which `prompt` continues."""
    _check_plain(params)
    past = cache.length if cache else 0
    most = tokens_to_make(model.config, prompt, params, past, cache.capacity if cache else None)
    if cache is None:
        cache = KVCache(model.config, len(prompt) + most, model.dtype, model.device)

    def next_logits(tokens: list[int]):
        return prefill(model, tokens[cache.length - past :], cache)  # the unseen: all of it, then one

    return _tokens(next_logits, model.config, prompt, params, most)


def generate_without_cache(model: Model, prompt: list[int], params: SamplingParams) -> Tokens:
    """The definition: every step runs the whole sequence again and keeps only the last row."""
    _check_plain(params)
    attend = attend_afresh(model.config)

    def next_logits(tokens: list[int]):
        ids = torch.tensor(tokens, device=model.device)
        positions = torch.arange(len(tokens), device=model.device)
        return model(ids, positions, attend, rows=positions[-1:])[0].float()

    return _tokens(next_logits, model.config, prompt, params, tokens_to_make(model.config, prompt, params))


def _tokens(
    next_logits: Callable, config: ModelConfig, prompt: list[int], params: SamplingParams, most: int
) -> Tokens:
    seed = secrets.randbits(63) if params.seed is None else params.seed
    stop = set(params.stop_token_ids) | (set() if params.ignore_eos else set(config.eos_token_ids))
    tokens = list(prompt)
    for position in range(most):
        token = sample(next_logits(tokens), params, seed, position, prompt, tokens[len(prompt) :], stop)
        if token in stop:
            return "stop"
        tokens.append(token)
        yield token
    return "length"


def prompt_logprobs(model: Model, prompt: list[int], alternatives: int) -> list[TokenLogprobs | None]:
    """What the model thought of each token of a prompt, from one pass over all of it. Of the first: nothing, None."""
    ids = torch.tensor(prompt, device=model.device)
    states = model.states(ids, torch.arange(len(prompt), device=model.device), attend_afresh(model.config))
    found: list[TokenLogprobs | None] = [None]
    for begin in range(0, len(prompt) - 1, SCORED):
        logits = model.scores(states[begin : begin + SCORED])
        found += [logprobs_of(its, t, alternatives) for its, t in zip(logits, prompt[begin + 1 :])]
    return found


# ---------------------------------------------------------------- the door
def _check_plain(params: SamplingParams) -> None:
    asked = {"n": params.n > 1, "stop": params.stop, "logprobs": params.logprobs is not None}
    if names := [name for name, given in asked.items() if given]:
        raise ValueError(
            f"generate yields token ids of one answer; {' and '.join(names)} need the engine (minserve/engine.py)"
        )


def tokens_to_make(
    config: ModelConfig, prompt: list[int], params: SamplingParams, past: int = 0, capacity: int | None = None
) -> int:
    """How many tokens this request may produce: `max_tokens`, or as many as the context has room for.

    Raises ValueError for an empty prompt, an id outside the vocabulary, or too many tokens for the context (or for the
    `capacity` of a cache that already holds `past` tokens), and for what `check_vocabulary` refuses.
    """
    check_vocabulary(params, config.vocab_size)
    if not prompt:
        raise ValueError(
            "the prompt is empty; there is no position to predict from. Give at least one token."
        )
    if wrong := [i for i in prompt if not 0 <= i < config.vocab_size]:
        raise ValueError(
            f"token id {wrong[0]} is not in the vocabulary (0 to {config.vocab_size - 1:,}); "
            f"{len(wrong):,} of {len(prompt):,} prompt ids are out of range"
        )
    room, who = config.context, "the model's context"
    if capacity is not None and capacity < room:
        room, who = capacity, "the cache"
    used, before = past + len(prompt), f"{past:,} tokens before and " if past else ""
    if used >= room:
        raise ValueError(
            f"{before}a prompt of {len(prompt):,} tokens leave no room for an answer: {who} holds {room:,}.\n"
            f"  Shorten it by {used - room + 1:,} tokens or more."
        )
    if params.max_tokens is None:
        return room - used
    if used + params.max_tokens > room:
        raise ValueError(
            f"{before}a prompt of {len(prompt):,} and max_tokens {params.max_tokens:,} make "
            f"{used + params.max_tokens:,} tokens, and {who} holds {room:,}.\n"
            f"  Ask for at most {room - used:,} tokens, or shorten the prompt by {used + params.max_tokens - room:,}."
        )
    return params.max_tokens
