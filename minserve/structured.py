"""Answers that must have a form: of all tokens, only those that a grammar allows next can be drawn.

    grammar_of(response_format, structured_outputs)    what a request asks for, as one Grammar; None: nothing
    Grammars(tokenizer)(grammar)                       compiled, or found compiled: a Constraint
    Constraint    one completion's place in its grammar: mask(logits) before each draw, accept(token) after it

The model is not asked to obey: before each draw, every token after which no valid text could follow gets the logit
minus infinity. What is left keeps its order and its ratios, so temperature, top-k and top-p mean what they always do.
An end token is allowed only where the text could end; where it can only end, the answer ends without one.

What it does not promise    that an answer is finished: max_tokens may cut it ("length"), and then it is not valid.
                            That it is sensible: a mask forbids, and a model forced far from what it would have said
                            answers badly. So the prompt should ask for the form as well
Logprobs    stay the model's own: they tell how far the grammar was from what it wanted to say
Cost        a grammar is compiled once and kept by its text; a mask is V bits, made on the host for each row and step
Sources     OpenAI's `response_format`; vLLM's `structured_outputs`; masks over a tokenizer's trie: llguidance
            (guidance-ai, 2024), which does the work; the idea: Willard & Louf 2023 (arXiv:2307.09702)
Story       notebooks/13_serving_and_slos.ipynb
"""

import json
import threading
from typing import NamedTuple

import numpy as np
import torch

from minserve.text import Tokenizer

KINDS = ("json", "regex", "choice", "grammar")
WHITESPACE = (
    r"[ \n]{1,20}"  # between the parts of JSON: without a limit, a small model may never come out of it
)
KEPT = 64  # compiled grammars


class Grammar(NamedTuple):
    kind: str  # one of KINDS
    text: str  # a JSON schema, a regular expression, a JSON list of texts, or GBNF or Lark


def grammar_of(response_format: dict | None = None, structured_outputs: dict | None = None) -> Grammar | None:
    """What OpenAI's field and vLLM's ask for. Raises ValueError if that cannot be said, or is said twice."""
    found = [
        *_of_response_format(response_format or {}),
        *_of_structured_outputs(structured_outputs or {}),
    ]
    if len(found) > 1:
        raise ValueError(
            f"the answer can have one form, and {len(found)} are asked for: give either response_format, or one of "
            f"{', '.join(KINDS)} in structured_outputs"
        )
    return found[0] if found else None


def _of_response_format(asked: dict):
    kind = asked.get("type", "text") if isinstance(asked, dict) else asked
    if kind == "json_object":
        yield Grammar("json", '{"type": "object"}')
    elif kind == "json_schema":
        described = asked.get("json_schema")
        if not isinstance(described, dict) or "schema" not in described:
            raise ValueError(
                'response_format of type "json_schema" needs the schema: '
                '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
            )
        yield Grammar("json", _schema(described["schema"]))
    elif kind != "text":
        raise ValueError(
            f'response_format.type is {kind!r}; it can be "text", "json_object" or "json_schema"'
        )


def _of_structured_outputs(asked: dict):
    if not isinstance(asked, dict):
        raise ValueError(
            f"structured_outputs is {asked!r}; it must be an object with one of {', '.join(KINDS)}"
        )
    asked = {kind: value for kind, value in asked.items() if value not in (None, False)}
    if unknown := [kind for kind in asked if kind not in (*KINDS, "json_object")]:
        raise ValueError(
            f"structured_outputs.{unknown[0]} is not supported; what is: {', '.join(KINDS)}, json_object"
        )
    for kind, value in asked.items():
        if kind == "json_object":
            yield Grammar("json", '{"type": "object"}')
        elif kind == "json":
            yield Grammar("json", _schema(value))
        elif kind == "choice":
            if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
                raise ValueError(f"structured_outputs.choice is {value!r}; it must be a list of texts")
            yield Grammar("choice", json.dumps(value))
        elif isinstance(value, str):
            yield Grammar(kind, value)
        else:
            raise ValueError(f"structured_outputs.{kind} is {value!r}; it must be a text")


def _schema(schema) -> str:
    """One text for one schema, so that it is compiled once. Its keys keep their order: it is that of the answer."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError(f"the JSON schema is {schema!r}; it must be an object")
    return json.dumps(schema)


class GrammarFailed(ValueError):
    """A grammar that compiled and then cannot be followed: whoever asked for it has to ask for another."""


class Constraint:
    """Where one completion is in its grammar."""

    def __init__(self, matcher):
        self._matcher = matcher

    def mask(self, logits: torch.Tensor) -> None:
        """Minus infinity, in place, for every token that cannot be next, and behind the last token. logits: [V].

        Raises GrammarFailed if no token can, because the vocabulary lacks what the grammar wants.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little").view(bool)
        if self._matcher.is_error() or not allowed.any():
            raise GrammarFailed(
                f"the grammar allows no token of the vocabulary here ({self._matcher.stop_reason()}), so the answer "
                f"cannot go on: the vocabulary may lack a character that it demands, or it may be too complex"
            )
        logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)

    def accept(self, token: int) -> bool:
        """It goes on with this token. True: nothing can follow. Raises GrammarFailed where it is masked."""
        if not self._matcher.consume_token(token):
            why = _first_line(self._matcher.get_error()) or "it is masked"
            raise GrammarFailed(f"the grammar does not allow token {token:,} here: {why}")
        return self._matcher.is_stopped()

    def copy(self) -> "Constraint":
        return Constraint(self._matcher.deep_copy())


class Grammars:
    """Grammars of one tokenizer, compiled. May be called from any thread."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._words = None  # the vocabulary as a trie; made when first needed
        self._compiled: dict[Grammar, Constraint] = {}  # the one that was used last comes last
        self._lock = threading.Lock()

    def __call__(self, grammar: Grammar) -> Constraint:
        """What Engine.add takes; it makes copies. Raises ValueError, with what is wrong, if it cannot be compiled."""
        with self._lock:
            found = self._compiled.pop(grammar, None) or self._compile(grammar)
            self._compiled[grammar] = found
            if len(self._compiled) > KEPT:
                del self._compiled[next(iter(self._compiled))]
            return found

    def _compile(self, grammar: Grammar) -> Constraint:
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ValueError(
                "answers of a given form need a library that is not installed on this server: "
                "pip install 'minserve[structured]'"
            ) from None
        if self._words is None:
            eos = list(self.tokenizer.eos_token_ids) or None
            self._words = from_tokenizer(self.tokenizer.hf, eos_token=eos)
        if grammar.kind == "json":
            options = {"whitespace_pattern": WHITESPACE}
            text = llguidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
        else:
            text = llguidance.grammar_from(grammar.kind, grammar.text)  # raises ValueError
        quiet = llguidance.LLParserLimits(verbose_errors=False)  # its errors go to the caller
        matcher = llguidance.LLMatcher(self._words, text, log_level=0, limits=quiet)
        if matcher.is_error():
            raise ValueError(f"the {grammar.kind} cannot be compiled: {_first_line(matcher.get_error())}")
        begun = matcher.deep_copy()
        if not any(begun.compute_bitmask()) or begun.is_error():
            raise ValueError(f"no text satisfies the {grammar.kind}: it allows no first token")
        return Constraint(matcher)


def _first_line(text: str) -> str:
    return " ".join(text.split("<state>")[0].split())[:300]
