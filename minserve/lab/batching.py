"""What batching can gain, counted before anything runs: steps, seats and budgets, no model and no clock.

    static_steps(lengths, seats)            the queue is cut into batches; each lasts as long as its longest answer
    continuous_steps(lengths, seats)        a seat that falls free is taken in the next step
    ideal_ratio(lengths, seats)             seat-steps that static batching pays, per token that it makes
    shares(debts, budget, chunk)            one step's plan: who gets how many tokens
    needs(prompt, new, page_size, budget)   pages and steps of one request that is alone

A request of n tokens takes n steps: the one that computes its prompt also draws its first token. That holds where the
budget lets whole prompts in; then the counts here are what a run's step log has, exactly.

Story    notebooks/07_continuous_batching.ipynb, notebooks/08_the_engine.ipynb
"""

from heapq import heapify, heapreplace
from math import ceil


def static_steps(lengths: list[int], seats: int) -> int:
    return sum(max(lengths[i : i + seats]) for i in range(0, len(lengths), seats))


def continuous_steps(lengths: list[int], seats: int) -> int:
    """Steps until all have finished, first come first served."""
    free_at = [0] * seats  # when each seat falls free
    heapify(free_at)
    for length in lengths:
        heapreplace(free_at, free_at[0] + length)
    return max(free_at)


def ideal_ratio(lengths: list[int], seats: int) -> float:
    """How many times faster a scheduler could be that never leaves a seat empty, if each step costs the same."""
    return seats * static_steps(lengths, seats) / sum(lengths)


def shares(debts: list[int], budget: int, chunk: int) -> list[int]:
    """Tokens per request, best rank first: each debt of 1 is paid, larger ones share what is left, in order."""
    spare, plan = budget - debts.count(1), []
    for debt in debts:
        plan.append(1 if debt == 1 else min(debt, spare, chunk))
        spare -= plan[-1] if debt > 1 else 0
    return plan


def needs(prompt: int, new: int, page_size: int, budget: int) -> tuple[int, int]:
    """Pages at its fullest, and steps: the prompt in pieces, the last of which draws a token, then one step each.

    The last token is handed to the reader and never computed, so it needs no slot.
    """
    return ceil((prompt + new - 1) / page_size), ceil(prompt / budget) + new - 1
