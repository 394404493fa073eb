"""How two servers and a proxy hand a request over: what `kv_transfer_params` says in a request, and in an answer.

    proxy -> prefill server   the request, max_tokens 1,  {"do_remote_decode": true, "transfer_id": ID}
    prefill server -> proxy   its answer,                 {"do_remote_prefill": true, "transfer_id": ID,
                                                           "token_ids": [its first token], "num_tokens": of the prompt}
    proxy -> decode server    the request,                the same

Whatever is missing or late, the decode server computes itself: the same tokens, only later. The names are vLLM's.

Story      notebooks/14_the_fleet.ipynb
"""

import asyncio

from minserve.cluster.connector import KVConnector
from minserve.cluster.transfer import checked_key
from minserve.request import SamplingParams


async def elsewhere(
    connector: KVConnector, given: dict, prompt: list[int], params: SamplingParams, vocab_size: int
) -> dict:
    """What AsyncEngine.add is told besides: the key under which to hand out, or what another server has made.

    Waits for keys and values. Cancelled, it wants them no longer. Raises ValueError for what makes no sense.
    """
    if params.n > 1:
        return {}
    if given.get("do_remote_decode") and connector.role != "kv_consumer":
        return {"key": checked_key(given.get("transfer_id"))}
    if not given.get("do_remote_prefill") or connector.role == "kv_producer":
        return {}
    made = made_there(given.get("token_ids", []), params, vocab_size)
    arrival = connector.start_load_kv(given.get("transfer_id"), prompt)
    try:
        here = await asyncio.get_running_loop().run_in_executor(connector.waiting, arrival.wait)
    except asyncio.CancelledError:
        connector.drop(arrival.key)
        raise
    return {"made": made, "kv": arrival if here else None}


def made_there(tokens, params: SamplingParams, vocab_size: int) -> list[int]:
    """The tokens that can be continued. None of them where one more is not wanted, or where something of them is
    missing: they are drawn again, and are the same."""
    if not isinstance(tokens, list) or not all(type(i) is int and 0 <= i < vocab_size for i in tokens):
        raise ValueError(f"token_ids must be a list of token ids, each of them below {vocab_size:,}")
    whole = params.logprobs is not None or len(tokens) >= (params.max_tokens or len(tokens) + 1)
    return [] if whole else tokens


# ---------------------------------------------------------------- what the proxy says
def is_divisible(asked) -> bool:
    """Can a prefill server begin it? One prompt, one answer; whatever else, the decode server sees to it."""
    if not isinstance(asked, dict) or (asked.get("n") or 1) != 1 or asked.get("echo"):
        return False
    if not all(_is_count(asked.get(name, 1)) for name in ("max_tokens", "max_completion_tokens")):
        return False
    prompt = asked.get("prompt")
    return "messages" in asked or (bool(prompt) and (isinstance(prompt, str) or type(prompt[0]) is int))


def first_half(asked: dict, key: str) -> dict:
    """What the prefill server is asked: the same, but for one token, and not as a stream."""
    dropped = ("stream", "stream_options", "max_completion_tokens")
    kept = {name: value for name, value in asked.items() if name not in dropped}
    if asked.get("min_tokens") and _is_count(asked["min_tokens"]):
        kept["min_tokens"] = 1  # one is all there is, and it must not be an end
    return kept | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": key}}


def _is_count(x) -> bool:
    return x is None or (type(x) is int and x > 0)


def second_half(asked: dict, answer) -> dict:
    """What the decode server is asked, with what the prefill server said: all of it, if that was nothing."""
    said = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return {**asked, "kv_transfer_params": said} if isinstance(said, dict) else asked
