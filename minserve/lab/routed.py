"""Servers that run already, and what happens to requests in front of them: small studies for a notebook.

    routed(urls, policy, schedule, seed)    a schedule through a router with this policy: a Timeline for each arrival
    beside(near, far, late, tokens, seed)   somebody reads from `near` while a long prompt comes to `far`: both

Prompts are common words, of one token each to SmolLM2; another seed brings other words, so nothing of them is cached.

Story    notebooks/14_the_fleet.ipynb
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from minserve.arrivals import Arrival
from minserve.cluster.policies import Policy
from minserve.cluster.router import Router
from minserve.lab.client import Client
from minserve.lab.fleet import listening
from minserve.lab.generator import open_loop
from minserve.lab.load import Prompts
from minserve.metrics import Timeline


async def routed(
    urls: Sequence[str], policy: Policy, schedule: Sequence[Arrival], seed: int
) -> list[Timeline]:
    """Raises Unreachable where nobody serves."""
    async with listening(Router(policy, urls)) as url:
        return await _sent([(arrival, url) for arrival in schedule], seed)


async def beside(near: str, far: str, late: Arrival, tokens: int, seed: int) -> tuple[Timeline, Timeline]:
    """(the reader, of so many tokens; the late one)"""
    reader, other = await _sent([(Arrival(0.0, 16, tokens), near), (late, far)], seed)
    return reader, other


async def _sent(schedule: Sequence[tuple[Arrival, str]], seed: int) -> list[Timeline]:
    """Each to its own address, in an open loop."""
    words, asks = Prompts(0.0, 1.0, seed), {}  # a completion's prompt: no template, a token a word
    async with AsyncExitStack() as stack:
        clients = {}
        for url in {url for _, url in schedule}:
            clients[url] = await stack.enter_async_context(Client(url, endpoint="completions"))
            await clients[url].find_model()
        for i, (arrival, url) in enumerate(schedule):
            client = clients[url]
            asks[id(arrival)] = client, client.body(words.text(i, arrival), arrival.output_tokens)

        async def send(shot) -> None:
            client, body = asks[id(shot.arrival)]
            await client.ask(body, shot)

        shots = await open_loop([arrival for arrival, _ in schedule], send)
    return [shot.timeline for shot in shots]
