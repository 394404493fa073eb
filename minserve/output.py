"""One completion as its reader sees it: text that only grows, never shows a stop string, and says how it ended.

    push(token)    a new token: the text it makes certain, and whether that completed a stop string
    end()          no more tokens: what was held back is text after all

Invariant    the texts returned, joined, are `text`
Story        notebooks/08_the_engine.ipynb
"""

from minserve.request import Request, Status
from minserve.text import Detokenizer, StopStrings, Tokenizer


class Output:
    """One completion: its tokens, its text so far (a stop string never shows), and in the end why it ended."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None):
        self.request, self.index = request, index
        self.text, self.logprobs, self.error, self.told = "", [], None, 0  # told: tokens that became text
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._stops = StopStrings(request.params.stop)

    @property
    def tokens(self) -> list[int]:
        return self.request.outputs

    @property
    def finish_reason(self) -> str | None:
        return self.request.finish_reason

    @property
    def finished(self) -> bool:
        return self.request.status is Status.FINISHED

    def push(self, token: int, logprobs=None) -> tuple[str, bool]:
        """A new token: the text it makes certain, and whether that completed a stop string."""
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self._detokenizer is None:
            return "", False
        self.told += 1
        return self._say(self._detokenizer.push(token))

    def end(self) -> tuple[str, bool]:
        """No more tokens: what was held back is text after all, unless it completes a stop string."""
        if self._detokenizer is None:
            return "", False
        delta, stopped = self._say(self._detokenizer.flush())
        if not stopped:
            rest = self._stops.flush()
            self.text, delta = self.text + rest, delta + rest
        return delta, stopped

    def _say(self, delta: str) -> tuple[str, bool]:
        stopped = False
        if self.told > self.request.params.min_tokens:  # before that, a stop string is only text
            delta, stopped = self._stops.push(delta)
        self.text += delta
        return delta, stopped
