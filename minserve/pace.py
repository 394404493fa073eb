"""How many tokens to draft: as many as pay, by what steps have cost on this machine and how often drafts were right.

    speedup = (1 + E[kept]) / (k c + v(k))

c is the price of a draft token and v(k) that of a step over k + 1 tokens, both in steps of one token. One request alone
leaves the arithmetic units idle while weights are read: v(k) is near 1, and drafts are nearly free. In a busy
batch every token costs its share, so k = 0 is best, and a drafter must not slow the others.

Sources  the expected number of tokens per step: Leviathan et al. 2023 (arXiv:2211.17192), sec. 3
Story    notebooks/11_speculative_decoding.ipynb
"""

import numpy as np

from minserve.request import Request


class Pace:
    """How many drafts pay, from what steps of so many tokens have cost, and how often each request's were right.

    With chance a of a request's next draft token, its i-th is kept with a^i. The likeliest of all requests come first,
    as many as make the most tokens per second: (rows + sum of chances) / (seconds of a step over all + drafting).
    A size of step that was never measured is thought to cost what the next smaller one does, so it is tried once. The
    first of all is the step without drafts.
    """

    LOOK_AGAIN = 64  # steps after which drafts are tried as if they cost nothing: things may have changed

    def __init__(self, expected: float = 0.7):
        """`expected`: the chance of a draft before anything is known. Of a tree: how its gains turn out here, 1."""
        self.all = 8 * expected, 8.0  # kept and tried, of all requests: what a new one is thought to be like
        self.step: dict[int, float] = {}  # tokens -> seconds
        self.draft = 0.0  # seconds for one more token of every draft, or for all of them
        self.right: dict[int, tuple[float, float]] = {}  # request id -> kept, tried: recent ones count more
        self.turns = 0

    def seconds(self, tokens):
        """What a step over so many tokens will cost, as far as is known. An array in, an array out."""
        sizes = sorted(self.step)
        return (
            np.interp(tokens, sizes, [self.step[size] for size in sizes]) if sizes else np.ones(len(tokens))
        )

    def chance(self, request: Request) -> float:
        kept, tried = self.right.get(request.id, (0.0, 0.0))
        return (kept + 2 * self.all[0] / self.all[1]) / (tried + 2)

    def choose(
        self, requests: list[Request], limits: list[int], gains=None, serial: bool = True
    ) -> list[int]:
        """How many tokens to draft for each of these decoding requests, at most limits[i].

        gains   of a tree: how often each token is kept on other texts. None: a chain
        serial  each token of a chain costs `draft`; else that is the price of the whole draft
        """
        self.turns += 1
        most, B = max(limits, default=0), len(requests)
        if not most or B not in self.step:  # what a step without drafts costs comes first
            return [0] * B
        chance = np.array([self.chance(r) for r in requests])[:, None]
        if gains is None:
            chances = chance ** np.arange(1, most + 1)  # [B, most]
        else:
            chances = np.minimum(chance * np.array(gains[:most]), 1.0)
        chances = np.where(np.arange(most) < np.array(limits)[:, None], chances, 0.0)
        order = np.argsort(-chances, axis=None, kind="stable")  # within a request the order of the draft
        order = order[chances.flat[order] > 0]
        kept = np.concatenate([[0.0], chances.flat[order].cumsum()])
        deep = np.concatenate([[0], np.maximum.accumulate(order % most + 1 if serial else order * 0 + 1)])
        cost = self.seconds(B + np.arange(len(kept)))
        if self.turns % self.LOOK_AGAIN == 0:
            cost = cost[:1]
        n = int(np.argmax((B + kept) / (cost + self.draft * deep)))
        return np.bincount(order[:n] // most, minlength=B).tolist()

    def learn(self, request: Request, tried: float, kept: int) -> None:
        """Of `tried` drafts, or of as many as a tree's gains let expect, `kept` were right."""
        before = self.right.get(request.id, (0.0, 0.0))
        self.right[request.id] = 0.9 * before[0] + kept, 0.9 * before[1] + tried
        self.all = 0.99 * self.all[0] + kept, 0.99 * self.all[1] + tried

    def timed(self, tokens: int, seconds: float) -> None:
        """A hiccup must not count for long: down at once, up slowly."""
        before = self.step.get(tokens, seconds)
        self.step[tokens] = min(seconds, before + 0.2 * (seconds - before))
