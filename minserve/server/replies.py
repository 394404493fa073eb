"""Answers as clients read them: outputs in, dictionaries out, whole or as the chunks of a stream.

    ChatReply, CompletionReply    .whole(outputs, told), .chunks(output, text, last, told), .usage(outputs, told)
    Pieces                        the logprobs of one choice, as it grows

A choice's first chunk is its opening (its role, or the prompt it echoes), its last says only why it ended, and each
step between them is one chunk. Conventions: protocol.py.
"""

import codecs
import time
import uuid

from minserve.output import Output
from minserve.protocol import Sampling
from minserve.text import Tokenizer


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

    def up_to(self, told: int, output: Output) -> dict | None:
        """Those tokens of an output that are news. None if nobody asks."""
        begin, self.told = self.told, max(told, self.told)
        if self.alternatives is None:
            return None  # before a long answer is copied for nothing
        return self._entries(output.tokens[begin:told], output.logprobs[begin:told])


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


# ---------------------------------------------------------------- answers
class Echo:
    """A prompt that is given back: its text, and with logprobs its tokens, the first of which has none."""

    def __init__(self, text: str, tokens: list[int], logprobs: list | None = None):
        self.text, self.tokens, self.logprobs = text, tokens, logprobs


class Reply:
    """An answer of several choices. A choice's index is its output's place in the stream.

    What differs between the two interfaces: _whole(output) and _piece(text, logprobs) as they write a choice, whole or
    in part, and _opening(output), what comes before its first token.
    """

    kind: str
    prefix: str
    pieces: type[Pieces]

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
            choices.append(self._piece(text, pieces.up_to(told, output)))
        ends = [None] * len(choices)
        if last:
            choices, ends = [*choices, self._piece("", None, closing=True)], [*ends, output.finish_reason]
        return [
            self.head | {"choices": [{"index": output.index} | choice | {"finish_reason": end}]}
            for choice, end in zip(choices, ends)
        ]

    def last_usage(self, outputs: list[Output], told: list[int]) -> dict:
        return self.head | {"choices": [], "usage": self.usage(outputs, told)}

    def _pieces(self, output: Output) -> Pieces:
        return self.pieces(self.tokenizer, output.request.params.logprobs)


class ChatReply(Reply):
    kind, prefix, pieces = "chat.completion", "chatcmpl", ChatPieces

    def __init__(self, *args):
        super().__init__(*args)
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
    kind, prefix, pieces = "text_completion", "cmpl", CompletionPieces

    def __init__(self, *args):
        super().__init__(*args)
        self.echoed: list[Echo] = []  # of each prompt, where the client wants it back

    def _echo(self, output: Output) -> Echo | None:
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
