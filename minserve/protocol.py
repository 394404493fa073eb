"""What clients of the OpenAI API say, and how they want to be answered. Pure: bodies in, dictionaries out.

    ChatBody, CompletionBody    a request, checked; unknown fields are ignored, null means "not given"
    .params(), .messages()      what the engine needs of it
    ChatReply, CompletionReply  an answer, whole or in chunks
    Refused                     an error as this API says it: status, message, type, param, code

Conventions, where servers differ
    max_completion_tokens    the newer name wins where both are given; completions without either get 16 tokens
    temperature              1 unless given, as the API has it (the engine's own default is 0); above 2 is refused
    stop                     up to 16 texts (4 elsewhere); not part of the answer, but their tokens count in `usage`
    content parts            only text; several are joined by a newline; null is an empty text
    role "developer"         is "system", its older name
    logprobs                 of the model's own distribution, before temperature; a token that is only a piece of a
                             character is spelt "bytes:\\xf0" where it names an entry, and its bytes say which it is
    text_offset              places in this choice's `text`, which with `echo` begins with the prompt
    finish_reason            "stop" or "length"; an answer that ended otherwise is an error, also in a stream
    usage                    a prompt counts once, however many answers it gets; the end token is not counted
Beyond the API, as vLLM has them: top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids priority
cache_salt add_special_tokens; and timeout, in seconds. `tools`, `suffix`, `best_of` are not known here, hence ignored.
Story    notebooks/13_serving_and_slos.ipynb
"""

import codecs
import re
import time
import uuid
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minserve.output import Output
from minserve.request import SamplingParams
from minserve.text import Tokenizer

MOST_STOPS = 16
COMPLETION_TOKENS = 16  # what a completion gets that does not say how much it wants


class Refused(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> dict:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": dict(message=str(self), type=kind, param=self.param, code=self.code)}


# ---------------------------------------------------------------- what they say
class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)  # strict: "3", true and 1.5 are no counts

    model: str | None = None

    @classmethod
    def read(cls, raw: bytes) -> "Body":
        """Raises Refused (400) with the field that is wrong."""
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            raise refused(error) from None


class StreamOptions(BaseModel):
    include_usage: bool | None = None  # one more chunk at the end, with `usage`
    continuous_usage_stats: bool | None = None  # `usage` in every chunk


class Sampling(Body):
    """What chats and completions have in common."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: Annotated[float, Field(le=2)] | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None  # ignored
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    timeout: Annotated[float, Field(gt=0, le=1e6)] | None = None
    cache_salt: str | None = None

    def params(self, **changes) -> SamplingParams:
        """Raises Refused (400), naming the parameter."""
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys() - {
            "logprobs",
            "max_tokens",
        }
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        given = dict(temperature=1.0, max_tokens=limit) | given | dict(logprobs=self.alternatives) | changes
        try:
            return SamplingParams(**given)
        except ValueError as error:
            raise refused(error) from None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class Part(BaseModel):
    type: str
    text: str | None = None


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None

    def plain(self, at: int) -> dict[str, str]:
        parts = (
            self.content if isinstance(self.content, list) else [Part(type="text", text=self.content or "")]
        )
        for part in parts:
            if part.type != "text" or part.text is None:
                raise Refused(
                    400,
                    f"messages[{at}].content has a part of type {part.type!r}; this model reads text only: "
                    f'{{"type": "text", "text": "..."}}',
                    f"messages[{at}].content",
                )
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(part.text for part in parts)}


def plain(messages: list[Message]) -> list[dict[str, str]]:
    """The messages as Tokenizer.chat takes them. Raises Refused (400) for what is not text."""
    return [message.plain(at) for at, message in enumerate(messages)]


class ChatBody(Sampling):
    field: ClassVar[str] = "messages"  # where its prompt stands

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise Refused(400, "top_logprobs needs logprobs: true", "top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionBody(Sampling):
    field: ClassVar[str] = "prompt"

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One or many, text or token ids. Raises Refused (400) for none."""
        given = self.prompt
        if not given:
            raise Refused(400, "the prompt is empty; there is no position to predict from", "prompt")
        return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


class TokenizeBody(Body):
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: list[int]


def refused(error: ValidationError | ValueError) -> Refused:
    """A bad value as this API reports it: the field's name is `param`."""
    if isinstance(error, ValidationError):
        errors = error.errors(include_input=False, include_url=False)
        where = errors[0]["loc"]
        same = dict.fromkeys(
            e["msg"] for e in errors if e["loc"][:1] == where[:1]
        )  # a union has one for each way
        name = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in where if _is_field(x)).lstrip(".")
        return Refused(400, f"{name or 'the body'}: {', or '.join(list(same)[:4])}", name or None)
    first = re.match(r"\w+", str(error))
    names = SamplingParams.__dataclass_fields__
    return Refused(400, str(error), first.group() if first and first.group() in names else None)


def _is_field(part: str | int) -> bool:
    """pydantic's places also name the branch of a union, such as `list[int]` or `str`."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float", "list"))


# ---------------------------------------------------------------- what they are told
class Reply:
    """An answer of several choices. A choice's index is its output's place in the stream."""

    kind: str
    prefix: str

    def __init__(self, body: Sampling, model: str, tokenizer: Tokenizer):
        self.body, self.tokenizer = body, tokenizer
        id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.head = dict(id=id, object=self.kind, created=int(time.time()), model=model)
        self.begun: dict[int, Pieces] = {}  # by choice

    def usage(self, outputs: list[Output], told: list[int]) -> dict:
        """told: tokens of each output. A prompt is the first of its n outputs, and counts once."""
        firsts = [output.request for output in outputs if output.request.leader is None]
        prompt, completion = sum(len(r.prompt) for r in firsts), sum(told)
        return dict(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details={"cached_tokens": sum(r.cached_tokens for r in firsts)},
        )

    def whole(self, outputs: list[Output], told: list[int]) -> dict:
        choices = [self._whole(output) | {"finish_reason": output.finish_reason} for output in outputs]
        return self.head | {"choices": choices, "usage": self.usage(outputs, told)}

    def chunks(self, output: Output, text: str, last: bool, told: int) -> list[dict]:
        """What is new of a choice: at its first news an opening, then text and logprobs, at its end a finish."""
        choices = []
        if (pieces := self.begun.get(output.index)) is None:
            pieces = self.begun[output.index] = self._pieces(output)
            choices += self._opening(output)
        if told > pieces.told or text:
            logprobs = output.logprobs[pieces.told : told]
            choices.append(self._piece(text, pieces.add(output.tokens[pieces.told : told], logprobs)))
            pieces.told = max(told, pieces.told)
        ends = [None] * len(choices)
        if last:
            choices, ends = [*choices, self._piece("", None, closing=True)], [*ends, output.finish_reason]
        return [
            self.head | {"choices": [{"index": output.index} | choice | {"finish_reason": end}]}
            for choice, end in zip(choices, ends)
        ]

    def last_usage(self, outputs: list[Output], told: list[int]) -> dict:
        return self.head | {"choices": [], "usage": self.usage(outputs, told)}

    def _pieces(self, output: Output) -> "Pieces":
        return self.pieces(self.tokenizer, output.request.params.logprobs)

    def _whole(self, output: Output) -> dict:
        raise NotImplementedError

    def _opening(self, output: Output) -> list[dict]:
        raise NotImplementedError

    def _piece(self, text: str, logprobs: dict | None, closing: bool = False) -> dict:
        raise NotImplementedError


class ChatReply(Reply):
    kind, prefix = "chat.completion", "chatcmpl"

    def __init__(self, *args):
        super().__init__(*args)
        self.pieces = ChatPieces
        if self.body.stream:
            self.head["object"] = "chat.completion.chunk"

    def _whole(self, output):
        logprobs = self._pieces(output).add(output.tokens, output.logprobs)
        message = {"role": "assistant", "content": output.text}
        return dict(index=output.index, message=message, logprobs=logprobs)

    def _opening(self, output):
        return [dict(delta={"role": "assistant", "content": ""}, logprobs=None)]

    def _piece(self, text, logprobs, closing=False):
        return dict(delta={} if closing else {"content": text}, logprobs=logprobs)


class CompletionReply(Reply):
    kind, prefix = "text_completion", "cmpl"

    def __init__(self, *args):
        super().__init__(*args)
        self.pieces = CompletionPieces
        self.echoed: list[Echo] = []  # of each prompt, where the client wants it back

    def _echo(self, output: Output) -> "Echo | None":
        return self.echoed[output.index // (self.body.n or 1)] if self.echoed else None

    def _pieces(self, output):
        pieces, echo = super()._pieces(output), self._echo(output)
        if echo and echo.logprobs is None:
            pieces.decoded = len(echo.text)
        return pieces

    def _whole(self, output):
        pieces, echo = self._pieces(output), self._echo(output)
        tokens, logprobs = output.tokens, output.logprobs
        if echo and echo.logprobs is not None:
            tokens, logprobs = [*echo.tokens, *tokens], [*echo.logprobs, *logprobs]
        text = (echo.text if echo else "") + output.text
        return dict(index=output.index, text=text, logprobs=pieces.add(tokens, logprobs))

    def _opening(self, output):
        if (echo := self._echo(output)) is None:
            return []
        pieces = self.begun[output.index]
        logprobs = None if echo.logprobs is None else pieces.add(echo.tokens, echo.logprobs)
        return [self._piece(echo.text, logprobs)]

    def _piece(self, text, logprobs, closing=False):
        return dict(text=text, logprobs=logprobs)


class Echo:
    """A prompt that is given back: its text, and with logprobs its tokens, the first of which has none."""

    def __init__(self, text: str, tokens: list[int], logprobs: list | None = None):
        self.text, self.tokens, self.logprobs = text, tokens, logprobs


# ---------------------------------------------------------------- logprobs
class Pieces:
    """The logprobs of one choice, as it grows."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int | None):
        self.tokenizer, self.alternatives = tokenizer, alternatives
        self.told = 0  # tokens the client knows
        self.decoded = 0  # characters before the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: list[int], logprobs: list) -> dict | None:
        """The next tokens. None if nobody asks."""
        return None if self.alternatives is None else self._entries(tokens, logprobs)


class ChatPieces(Pieces):
    def _entries(self, tokens, logprobs):
        entries = []
        for its in logprobs:
            top = [self._entry(*pair) for pair in its.top[: self.alternatives]]
            entries.append(self._entry(its.token, its.logprob) | {"top_logprobs": top})
        return {"content": entries}

    def _entry(self, token: int, logprob: float) -> dict:
        its = self.tokenizer.bytes_of(token)
        return dict(token=its.decode("utf-8", "replace"), logprob=logprob, bytes=list(its))


class CompletionPieces(Pieces):
    def _entries(self, tokens, logprobs):
        entries = dict(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, its in zip(tokens, logprobs):
            entries["tokens"].append(self._name(token))
            entries["token_logprobs"].append(None if its is None else its.logprob)
            top = None if its is None else {self._name(i): logprob for i, logprob in its.top}
            entries["top_logprobs"].append(top)
            entries["text_offset"].append(self.decoded)
            if token not in self.tokenizer.special_ids:  # those print nothing
                self.decoded += len(self._decoder.decode(self.tokenizer.bytes_of(token)))
        return entries

    def _name(self, token: int) -> str:
        its = self.tokenizer.bytes_of(token)
        try:
            return its.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in its)
