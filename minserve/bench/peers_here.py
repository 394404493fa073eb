"""The sides of `bench peers` that run in this process: minserve's engine, and transformers in two ways.

    serve(work) -> Served    every request answered: when the first token was there, when the last, and which
    check(who, ...)          the same work? else PeerFailed

Story    bench/peers.py
"""

import math
import time
from dataclasses import dataclass

import torch

from minserve.bench.opponent import Stamps
from minserve.bench.workload import PAGE, Work, serve
from minserve.engine import LLM

Answers = list[list[int]]


class PeerFailed(RuntimeError):
    """A side that could not be measured; its text says who and why."""


@dataclass(frozen=True)
class Served:
    first: float  # seconds until the first token
    seconds: float  # until the last
    tokens: Answers | None  # None: this side does not say which


def check(who: str, served: Served, work: Work) -> None:
    lengths = work.lengths if served.tokens is None else [len(answer) for answer in served.tokens]
    if lengths != work.lengths:
        raise PeerFailed(
            f"{who} answered with {lengths} tokens where {work.lengths} were asked for: not the same work"
        )
    if not 0 < served.seconds < math.inf or served.first > served.seconds:
        raise PeerFailed(
            f"{who} says it took {served.seconds} s, the first token {served.first} s: no such time"
        )


def ours(llm: LLM, work: Work) -> Served:
    times: list[float] = []
    start = time.perf_counter()
    seconds, outputs = serve(llm, work, each=lambda *_: times or times.append(time.perf_counter()))
    return Served(times[0] - start, max(seconds, times[0] - start), [output.tokens for output in outputs])


def batch(other, work: Work) -> Served:
    """Left-padded, all rows to the longest answer; what a row made beyond its own length does not count."""
    width, stamps = max(map(len, work.prompts)), Stamps()
    ids = torch.tensor([[0] * (width - len(p)) + p for p in work.prompts], device=other.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts], device=other.device)
    start = time.perf_counter()
    with torch.inference_mode():
        out = other.generate(ids, attention_mask=mask, max_new_tokens=max(work.lengths), streamer=stamps)
    answers = out[:, width:].tolist()
    seconds, first = time.perf_counter() - start, stamps.times[1] - start  # the first stamp is the prompt's
    return Served(first, seconds, [a[:n] for a, n in zip(answers, work.lengths)])


def continuous(other, work: Work) -> Served:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    greedy = GenerationConfig(
        do_sample=False, pad_token_id=0, eos_token_id=-1, max_new_tokens=max(work.lengths)
    )
    tokens = sum(map(len, work.prompts)) + work.new_tokens
    limits = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=-(-tokens // PAGE) + len(work.prompts), max_batch_tokens=512
    )
    start, answers = time.perf_counter(), {}
    with other.continuous_batching_context_manager(
        greedy, block=True, timeout=30, continuous_batching_config=limits, warmup=False
    ) as manager:
        ids = [
            manager.add_request(p, max_new_tokens=n, eos_token_id=-1)
            for p, n in zip(work.prompts, work.lengths)
        ]
        while len(answers) < len(ids):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise PeerFailed(
                    "transformers' continuous batching stopped before it had answered everything"
                )
        seconds = time.perf_counter() - start
    return Served(0.0, seconds, [answers[i] for i in ids])
