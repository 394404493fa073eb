"""What clients of the OpenAI API say, and what that means for the engine. Pure: how they are told is server/replies.py.

    ChatBody, CompletionBody    a request, checked; unknown fields are ignored, null means "not given"
    .params(), .prompts()       what the engine needs of it
    plain(messages)             what a chat template takes
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
cache_salt add_special_tokens structured_outputs; and timeout, in seconds.
Known, and refused where they would change the answer: tools (but for tool_choice "none"), suffix, best_of.
Story    notebooks/13_serving_and_slos.ipynb
"""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minserve.request import MOST_LOGPROBS, SamplingParams

MOST_STOPS = 16
DIFFERENT = {"max_tokens", "logprobs"}  # fields that mean one thing here and another in SamplingParams
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
            body = cls.model_validate_json(raw)
        except ValidationError as error:
            raise refused(error) from None
        body.check()
        return body

    def check(self) -> None:
        """Raises Refused (400) for what is well said and cannot be had here."""


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
    response_format: dict | None = None  # structured.py, this and the next
    structured_outputs: dict | None = None
    kv_transfer_params: dict | None = None  # cluster/handover.py

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def params(self, **changes) -> SamplingParams:
        """Raises Refused (400), naming the parameter."""
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys() - DIFFERENT
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        limit = 1 if self.only_echo else self.limit
        given = dict(temperature=1.0, max_tokens=limit) | given | dict(logprobs=self.alternatives) | changes
        try:
            return SamplingParams(**given)
        except ValueError as error:
            raise refused(error) from None

    @property
    def only_echo(self) -> bool:
        """max_tokens 0 and echo: nothing is to be made, the prompt is the answer."""
        return False

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
        parts = self.content
        if not isinstance(parts, list):
            parts = [Part(type="text", text=self.content or "")]
        for part in parts:
            if part.type != "text" or part.text is None:
                where = f"messages[{at}].content"
                raise Refused(400, f"{where} has a part of type {part.type!r}; this model reads text only: "
                              f'{{"type": "text", "text": "..."}}', where)  # fmt: skip
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(part.text for part in parts)}


def plain(messages: list[Message]) -> list[dict[str, str]]:
    """The messages as Tokenizer.chat takes them. Raises Refused (400) for what is not text."""
    return [message.plain(at) for at, message in enumerate(messages)]


class ChatBody(Sampling):
    field: ClassVar[str] = "messages"  # where its prompt stands

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list | None = None
    tool_choice: str | dict | None = None

    def check(self) -> None:
        if self.tools and self.tool_choice != "none":
            raise Refused(400, f"answers here are text, and no call of a tool: ask without the {len(self.tools)} in "
                          'tools, with tool_choice "none", or for a form with response_format', "tools")  # fmt: skip

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
    suffix: str | None = None
    best_of: int | None = None

    def check(self) -> None:
        if self.suffix:
            raise Refused(400, "what is made here continues the prompt and does not lead to a suffix: leave it out",
                          "suffix")  # fmt: skip
        if self.best_of not in (None, self.n or 1):
            raise Refused(400, f"best_of {self.best_of} for n {self.n or 1}: answers are not ranked here; ask for "
                          f"n {self.best_of} with logprobs and choose", "best_of")  # fmt: skip

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def only_echo(self) -> bool:
        return bool(self.echo) and self.limit == 0

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
        )  # a union: one for each way
        name = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in where if _is_field(x)).lstrip(".")
        return Refused(400, f"{name or 'the body'}: {', or '.join(list(same)[:4])}", name or None)
    first = re.match(r"\w+", str(error))
    names = SamplingParams.__dataclass_fields__
    return Refused(400, str(error), first.group() if first and first.group() in names else None)


def _is_field(part: str | int) -> bool:
    """pydantic's places also name the branch of a union, such as `list[int]` or `str`."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float", "list"))
