"""What a caller may ask for, checked at the door, and one request on its way. Plain Python: no tensor lives here.

`SamplingParams` is one frozen object per request. A wrong value raises ValueError when the object is made, with
the value and what is allowed, so that nothing unreasonable ever reaches a batch that other requests share.

Conventions, where tools differ
    temperature 0 (or below GREEDY_BELOW)   greedy: the largest logit, no draw
    top_k 0 or -1, or >= the vocabulary      no limit
    top_p 1.0                                no limit; 0 is refused (it would keep nothing)
    min_p 0.0                                no limit; else keeps tokens at least min_p times as likely as the first
    seed None                                a fresh seed for each request, so that two requests that share one object
                                             still differ; the same seed gives the same text
    n                                        completion i of a request draws with seed_of(seed, i)
    max_tokens None                          until the model stops or its context is full
    min_tokens                               until so many tokens are out, the stop ids cannot be drawn and a stop
                                             string does not end the text (one that begins earlier never will)
    presence, frequency penalty              count the answer so far; repetition_penalty counts the prompt as well
    stop                                     text that ends the answer and is not part of it; a str is one such text
    logprobs                                 of the model's own distribution, before anything here changes it
"""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum

GREEDY_BELOW = 1e-5  # one threshold for the whole package: below it a division by temperature overflows
MOST_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)  # a copy of what was given
    n: int = 1
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        for name, (fits, allowed) in RULES.items():
            if not fits(value := getattr(self, name)):
                raise ValueError(f"{name} is {value!r}; {allowed}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens:,}, more than max_tokens {self.max_tokens:,}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "logit_bias", {int(i): float(b) for i, b in self.logit_bias.items()})

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """What only the model's vocabulary can tell. Raises ValueError with the parameter's name."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if wrong := [i for i in ids if i >= vocab_size]:
            raise ValueError(
                f"{name} names token id {wrong[0]:,}, and the vocabulary ends at {vocab_size - 1:,}"
            )
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ValueError(f"logprobs is {params.logprobs}; the vocabulary has only {vocab_size} tokens")


def seed_of(seed: int, index: int) -> int:
    """The seed of a request's completion number `index`: 0 keeps the seed, the others scatter over 64 bits."""
    return seed if index == 0 else _mix(_mix(seed) + index)


def _mix(x: int) -> int:
    """A bijection of 64 bits in which every input bit turns about half of the output (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


# ---------------------------------------------------------------- what each parameter may be
def _is_int(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)  # True is an int in Python, and never a count


def _is_number(x) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and -1e308 < x < 1e308  # finite, no NaN


def _is_list(x) -> bool:
    return isinstance(x, list | tuple | set | frozenset)


def _is_bias(x) -> bool:
    """{token id: number}; JSON has only strings for keys, so "7" is 7 (and cannot stand beside it)."""
    if not hasattr(x, "items"):
        return False
    ids = [str(i) if _is_int(i) else i for i in x]
    numeric = all(isinstance(i, str) and i.isascii() and i.isdigit() for i in ids)
    return numeric and len({int(i) for i in ids}) == len(x) and all(_within(-100, b, 100) for b in x.values())


def _within(low, x, high) -> bool:
    return _is_number(x) and low <= x <= high


RULES = {
    "max_tokens": (lambda x: x is None or (_is_int(x) and x >= 1),
                   "ask for a whole number of at least 1, or None"),
    "temperature": (lambda x: _is_number(x) and x >= 0, "it must be a finite number >= 0 (0 is greedy)"),
    "top_k": (lambda x: _is_int(x) and x >= -1, "it must be a whole number >= 1, or 0 or -1 for no limit"),
    "top_p": (lambda x: _is_number(x) and 0 < x <= 1, "it must lie in (0, 1]; 1 is no limit"),
    "min_p": (lambda x: _within(0, x, 1), "it must lie in [0, 1]; 0 is no limit"),
    "seed": (lambda x: x is None or _is_int(x), "it must be a whole number, or None for a fresh one"),
    "stop_token_ids": (lambda x: _is_list(x) and all(_is_int(i) and i >= 0 for i in x),
                       "it must be a list of token ids >= 0"),
    "presence_penalty": (lambda x: _within(-2, x, 2), "it must lie in [-2, 2]; 0 is none"),
    "frequency_penalty": (lambda x: _within(-2, x, 2), "it must lie in [-2, 2]; 0 is none"),
    "repetition_penalty": (lambda x: _within(0.01, x, 100), "it must lie in [0.01, 100]; 1 is none"),
    "logit_bias": (_is_bias, "it must map token ids >= 0 to numbers in [-100, 100], each id once"),
    "n": (lambda x: _is_int(x) and x >= 1, "ask for a whole number of completions, at least 1"),
    "stop": (lambda x: _is_list(x) and all(isinstance(s, str) and s for s in x),
             "it must be a text or a list of texts, none of them empty (an empty one would stop at once)"),
    "min_tokens": (lambda x: _is_int(x) and x >= 0, "it must be a whole number >= 0"),
    "logprobs": (lambda x: x is None or (_is_int(x) and 0 <= x <= MOST_LOGPROBS),
                 f"ask for 0 to {MOST_LOGPROBS} alternatives, or None"),
}  # fmt: skip


# ---------------------------------------------------------------- one request
UNKNOWN = -1  # in `tokens`, last: a step that is still running makes this token


class Status(Enum):
    WAITING, RUNNING, FINISHED = "waiting", "running", "finished"


@dataclass(slots=True)
class Draft:
    """Tokens that somebody proposes to follow a request's last one: a chain, or a tree whose parents come first."""

    tokens: list[int]
    parents: list[int] | None = None  # of each, its index among them; -1 is the last token. None: a chain
    chances: object = None  # [n, V] fp32: the adjusted logits each was drawn from. None: they were not drawn

    def cut(self, n: int) -> "Draft | None":
        """The first n of them: parents come first, so what is left of a tree is a tree. None: nothing is left."""
        if n >= len(self.tokens):
            return self if self.tokens else None
        chances = None if self.chances is None else self.chances[:n]
        return Draft(self.tokens[:n], self.parents and self.parents[:n], chances) if n else None


@dataclass(
    eq=False, slots=True
)  # identity: two equal prompts are still two requests; slots: small, so many fit a cache
class Request:
    """One completion, from arrival to last token.

        WAITING --admit--> RUNNING --finish--> FINISHED
           ^------preempt-----'

    Its whole state is two numbers and two lists: `tokens` (prompt, then output), `computed` (how many of them have
    keys and values in the cache) and `pages` (where those live). What the model still owes it is
    `owed = len(tokens) - computed`: the prompt's length at first, 1 when decoding, more again after a preemption.
    The scheduler needs no other notion of phase.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0  # smaller is more urgent
    salt: bytes = b""  # requests of different salts share no cached prefix
    deadline: float | None = None  # time.monotonic() seconds
    leader: "Request | None" = None  # n > 1: whose prompt pages this completion shares
    # computed elsewhere (cluster/): the answer's first tokens, and keys and values that wait to be loaded
    made: InitVar[Sequence[int]] = ()
    kv: object = None  # .num_tokens, .check(cache), .load(cache, pages, computed)
    key: str | None = None  # under which others may ask for its keys and values
    constraint: object = None  # structured.Constraint: which tokens may come next

    tokens: list[int] = field(init=False)  # prompt, then output
    most: int = field(init=False)  # tokens it ends with at the latest
    computed: int = field(init=False, default=0)
    status: Status = field(init=False, default=Status.WAITING)
    finish_reason: str | None = field(init=False, default=None)
    rank: tuple[int, int] = field(init=False)  # who goes first; the scheduler sets it on arrival
    seat: int | None = field(
        init=False, default=None
    )  # its row in the persistent buffers, while it is running
    preemptions: int = field(init=False, default=0)
    cached_tokens: int = field(init=False, default=0)  # of the prompt, found in the prefix index
    # kept by speculation
    ahead: int = field(init=False, default=0)  # tokens that may be drafted for it ...
    granted: int = field(init=False, default=0)  # ... and for how many of them this step has room
    memo: object = field(init=False, default=None)  # what a drafter remembers of it
    draft: Draft | None = field(init=False, default=None)  # what this step verifies behind its last token
    # kept by the page pool
    pages: list[int] = field(init=False, default_factory=list)  # the page table, in token order
    returned: int = field(init=False, default=0)  # entries before this one left the window: stale, never read
    writable: int = field(init=False, default=0)  # positions it may write without asking the pool
    dirty: int = field(
        init=False, default=0
    )  # table entries from this one on have changed since the last step
    chain: list = field(init=False, default_factory=list)  # the prefix index's nodes of its full pages
    keys: list[tuple[bytes, bytes]] = field(
        init=False, default_factory=list
    )  # key and tokens of each full page

    def __post_init__(self, made):
        self.tokens, self.rank = [*self.prompt, *made], (0, self.id)
        self.most = len(self.prompt) + self.max_new_tokens
        if self.constraint:  # each of n completions goes its own way
            self.constraint = self.constraint.copy()
            for token in made:
                self.constraint.accept(token)

    @property
    def owed(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def outputs(self) -> list[int]:
        """Its answer so far: what is known of it."""
        made = self.tokens[len(self.prompt) :]
        return made if not made or made[-1] != UNKNOWN else made[:-1]

    @property
    def most_tokens(self) -> int:
        """Tokens that may ever be in the cache: the last one is returned, never computed."""
        return self.most - 1
