"""What a caller may ask for, checked at the door. Plain Python: no tensor lives here.

`SamplingParams` is one frozen object per request. A wrong value raises ValueError when the object is made, with
the value and what is allowed, so that nothing unreasonable ever reaches a batch that other requests share.

Conventions, where tools differ
    temperature 0 (or below GREEDY_BELOW)   greedy: the largest logit, no draw
    top_k 0 or -1, or >= the vocabulary      no limit
    top_p 1.0                                no limit; 0 is refused (it would keep nothing)
    seed None                                a fresh seed for each request, so that two requests that share one object
                                             still differ; the same seed gives the same text
    max_tokens None                          until the model stops or its context is full
"""

import math
from dataclasses import dataclass

GREEDY_BELOW = 1e-5  # one threshold for the whole package: below it a division by temperature overflows


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        if self.max_tokens is not None and not (_is_int(self.max_tokens) and self.max_tokens >= 1):
            raise ValueError(
                f"max_tokens is {self.max_tokens!r}; ask for a whole number of at least 1, or None"
            )
        if not _is_number(self.temperature) or not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(
                f"temperature is {self.temperature!r}; it must be a finite number >= 0 (0 is greedy)"
            )
        if not _is_int(self.top_k) or self.top_k < -1:
            raise ValueError(
                f"top_k is {self.top_k!r}; it must be a whole number >= 1, or 0 or -1 for no limit"
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r}; it must lie in (0, 1]; 1 is no limit")
        if self.seed is not None and not _is_int(self.seed):
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number, or None for a fresh one")
        if isinstance(self.stop_token_ids, int) or not all(
            _is_int(i) and i >= 0 for i in self.stop_token_ids
        ):
            raise ValueError(
                f"stop_token_ids is {self.stop_token_ids!r}; it must be a list of token ids >= 0"
            )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _is_int(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)  # True is an int in Python, and never a count


def _is_number(x) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
