"""The routes that answer: a request's way from its body to what the client reads."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from minserve.async_engine import NotServing, Stream
from minserve.cluster.handover import elsewhere
from minserve.metrics import OK
from minserve.output import Output
from minserve.prefill_decode import prompt_logprobs
from minserve.protocol import (
    COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Refused,
    Sampling,
    TokenizeBody,
    plain,
    refused,
)
from minserve.request import SamplingParams
from minserve.scheduler import QueueFull
from minserve.server.live import Views
from minserve.server.replies import ChatReply, CompletionReply, Echo, Reply
from minserve.server.wire import EventStream, Limits, event, received, unless_gone
from minserve.structured import Constraint, GrammarFailed, Grammars, grammar_of
from minserve.text import Tokenizer

CONTEXT = "context_length_exceeded"
log = logging.getLogger("minserve.server")


class Front:
    """The routes, and what they share."""

    def __init__(
        self, views: Views, tokenizer: Tokenizer, limits: Limits, api_key: str | None, log_prompts: bool
    ):
        self.views, self.serving, self.engine, self.tokenizer = views, views.serving, views.engine, tokenizer
        self.name, self.limits, self.api_key, self.log_prompts = views.name, limits, api_key, log_prompts
        self.grammars = Grammars(tokenizer)
        self.room = min(self.engine.room, limits.max_model_len or self.engine.room)
        self.created = int(time.time())
        # One thread: encoding user text changes a tokenizer's state for the time it takes, so two would meet there.
        self.thread = ThreadPoolExecutor(1, "tokenizer")

    # ------------------------------------------------------------ answers
    async def chat(self, request: Request) -> Response:
        arrival = time.monotonic()
        body = await self.read(request, ChatBody)
        self.check_choices(body, 1)
        prompt = await self.off_loop(self.tokenizer.chat, plain(body.messages), field="messages")
        return await self.answer(request, ChatReply(body, self.name, self.tokenizer), [prompt], arrival)

    async def complete(self, request: Request) -> Response:
        arrival = time.monotonic()
        body = await self.read(request, CompletionBody)
        given, prompts = body.prompts(), []
        self.check_choices(body, len(given))
        for prompt in given:
            if isinstance(prompt, str):
                special = body.add_special_tokens is not False
                prompt = await self.off_loop(self.tokenizer.encode, prompt, special, field="prompt")
            prompts.append(prompt)
        reply = CompletionReply(body, self.name, self.tokenizer)
        if body.echo:
            reply.echoed = [await self.echo(body, *pair) for pair in zip(given, prompts)]
        return await self.answer(request, reply, prompts, arrival)

    async def echo(self, body: CompletionBody, given: str | list[int], prompt: list[int]) -> Echo:
        """The prompt as part of the answer; its logprobs come from one plain pass between two steps."""
        self.make(body, prompt)
        text = given if isinstance(given, str) else self.tokenizer.decode(prompt)
        if body.logprobs is None:
            return Echo(text, prompt)
        work = lambda: prompt_logprobs(self.engine.model, prompt, body.logprobs)
        return Echo(text, prompt, await self.serving.between(work))

    def make(self, body: Sampling, prompt: list[int]) -> list[Output]:
        """What the engine would make of it, not queued: for its checks. Raises Refused."""
        try:
            return self.engine.make(prompt, self.fitted(body, prompt))
        except ValueError as error:
            raise refused(error) from None

    async def answer(
        self, request: Request, reply: Reply, prompts: list[list[int]], arrival: float
    ) -> Response:
        body = reply.body
        self.note(reply, prompts)
        moved = await self.elsewhere(request, body, prompts)
        stream = await self.add(body, prompts, arrival, moved)
        headers = {"X-Request-Id": reply.head["id"]}
        if body.stream:
            return EventStream(self.events(reply, stream), stream, self.limits.stall_seconds, headers)
        async with stream:
            await unless_gone(request, stream.finish())
        for output in stream.outputs:
            check_ended(output, stream)
        whole = reply.whole(stream.outputs, stream.told)
        if "key" in moved:
            request = stream.outputs[0].request
            whole["kv_transfer_params"] = self.engine.connector.request_finished(request)
        return JSONResponse(whole, headers=headers)

    async def elsewhere(self, request: Request, body: Sampling, prompts: list[list[int]]) -> dict:
        """What another server computed of this, or shall continue: a server of one half (cluster/handover.py)."""
        given, connector = body.kv_transfer_params, self.engine.connector
        if connector is None or not given or len(prompts) > 1 or body.only_echo:
            return {}
        params, vocab_size = self.fitted(body, prompts[0]), self.engine.model.config.vocab_size
        try:
            return await unless_gone(request, elsewhere(connector, given, prompts[0], params, vocab_size))
        except ValueError as error:
            raise Refused(400, str(error), "kv_transfer_params") from None

    async def add(self, body: Sampling, prompts: list[list[int]], arrival: float, moved: dict) -> Stream:
        """All of a request's prompts in one stream, or none. Raises Refused."""
        params = [self.fitted(body, prompt) for prompt in prompts]
        stream = Stream(self.serving)
        if body.only_echo:
            for prompt in prompts:
                stream.close(self.make(body, prompt), arrival)
            return stream
        fields = dict(
            priority=body.priority or 0, salt=(body.cache_salt or "").encode(), timeout=body.timeout
        )
        if body.response_format or body.structured_outputs:
            field = "response_format" if body.response_format else "structured_outputs"
            fields["constraint"] = await self.off_loop(self.constraint, body, field=field)
        try:
            for prompt, its in zip(prompts, params):
                await self.serving.add(prompt, its, arrival=arrival, join=stream, **fields, **moved)
        except ValueError as error:
            self.serving.abort(stream)
            raise refused(error) from None
        except (QueueFull, NotServing) as error:
            self.serving.abort(stream)
            self.views.refused(arrival)
            status = 429 if isinstance(error, QueueFull) else 503
            raise Refused(status, str(error), Retry_After=str(self.views.live.patience)) from None
        return stream

    def constraint(self, body: Sampling) -> Constraint | None:
        """What form the answer must have. Raises ValueError."""
        grammar = grammar_of(body.response_format, body.structured_outputs)
        return self.grammars(grammar) if grammar else None

    async def events(self, reply: Reply, stream: Stream) -> AsyncIterator[bytes]:
        body = reply.body
        try:
            async for output, text, last in stream:
                fine = not last or output.finish_reason in OK
                chunks = reply.chunks(output, text, last and fine, stream.told[output.index])
                if body.continuous_usage:
                    chunks = [chunk | {"usage": reply.usage(stream.outputs, stream.told)} for chunk in chunks]
                if chunks:
                    yield b"".join(map(event, chunks))
                if not fine:
                    check_ended(output, stream)
            if body.include_usage:
                yield event(reply.last_usage(stream.outputs, stream.told))
            yield b"data: [DONE]\n\n"
        except Refused as error:
            yield event(error.body)
        except Exception as error:  # a fault of ours: the client must not take what it has for a whole answer
            log.exception("%s failed", reply.head["id"])
            yield event(internal(error).body)

    def note(self, reply: Reply, prompts: list[list[int]]) -> None:
        """One line of log for a request: sizes, and what it says only if the operator wants that."""
        sizes = "+".join(str(len(prompt)) for prompt in prompts[:8])
        log.info("%s: %s prompt tokens, n %d", reply.head["id"], sizes, reply.body.n or 1)
        if self.log_prompts:
            log.info("%s: %r", reply.head["id"], [self.tokenizer.decode(p, False) for p in prompts])

    # ------------------------------------------------------------ checks
    async def read(self, request: Request, kind: type):
        """The body, bounded in size and time, as `kind`. Raises Refused."""
        body = kind.read(await received(request, self.limits))
        if body.model is not None:
            self.check_model(body.model)
        return body

    def check_model(self, name: str) -> None:
        if name != self.name:
            raise Refused(404, f"the model {name!r} is not served here, but {self.name!r} is", "model",
                          "model_not_found")  # fmt: skip

    async def check_key(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else ""
        if self.api_key and not hmac.compare_digest(given.strip().encode("latin-1"), self.api_key.encode()):
            raise Refused(401, "this server wants an API key: send the header `Authorization: Bearer KEY`",
                          code="invalid_api_key", WWW_Authenticate="Bearer")  # fmt: skip

    def check_choices(self, body: Sampling, prompts: int) -> None:
        if (body.n or 1) * prompts > self.limits.choices:
            raise Refused(400, f"n {body.n or 1} for {prompts:,} prompts are {(body.n or 1) * prompts:,} answers, and "
                          f"one request may ask for {self.limits.choices:,}: send it in parts", "n")  # fmt: skip

    def fitted(self, body: Sampling, prompt: list[int]) -> SamplingParams:
        """Its parameters, and how many tokens it gets if it does not say. Raises Refused where that is too much."""
        params, room = body.params(), self.room - len(prompt)
        if room < 1:
            raise Refused(400, f"the prompt has {len(prompt):,} tokens, and prompt and answer together may have "
                          f"{self.room:,} here: shorten it by {1 - room:,} tokens or more",
                          body.field, CONTEXT)  # fmt: skip
        if params.max_tokens is None:
            default = room if isinstance(body, ChatBody) else min(COMPLETION_TOKENS, room)
            return body.params(max_tokens=default)
        if params.max_tokens > room:
            raise Refused(400, f"a prompt of {len(prompt):,} and max_tokens {params.max_tokens:,} make "
                          f"{len(prompt) + params.max_tokens:,} tokens, and prompt and answer together may have "
                          f"{self.room:,} here: ask for at most {room:,}", "max_tokens", CONTEXT)  # fmt: skip
        return params

    # ------------------------------------------------------------ text and ids
    async def off_loop(self, work: Callable, *args, field: str):
        """Tokenising takes a while for a long text. Raises Refused for what a tokenizer or a template does not take."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, work, *args)
        except Exception as error:  # a template's own complaints have types of its own
            raise Refused(400, f"{field}: {error}", field) from None

    async def tokenize(self, request: Request) -> dict:
        body = await self.read(request, TokenizeBody)
        if body.messages is not None:
            ids = await self.off_loop(self.tokenizer.chat, plain(body.messages), field="messages")
        elif body.prompt is not None:
            ids = await self.off_loop(
                self.tokenizer.encode, body.prompt, body.add_special_tokens, field="prompt"
            )
        else:
            raise Refused(400, "give a prompt, or messages", "prompt")
        strings = self.tokenizer.hf.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return dict(count=len(ids), max_model_len=self.room, tokens=ids, token_strs=strings)

    async def detokenize(self, request: Request) -> dict:
        body, vocabulary = await self.read(request, DetokenizeBody), self.engine.model.config.vocab_size
        if wrong := [i for i in body.tokens if not 0 <= i < vocabulary]:
            raise Refused(400, f"tokens: {wrong[0]} is no id; they end at {vocabulary - 1:,}", "tokens")
        return dict(prompt=await self.off_loop(self.tokenizer.decode, body.tokens, False, field="tokens"))

    # ------------------------------------------------------------ the model
    async def models(self) -> dict:
        return {"object": "list", "data": [self._card]}

    async def model(self, name: str) -> dict:
        self.check_model(name)
        return self._card

    @property
    def _card(self) -> dict:
        card = dict(id=self.name, object="model", created=self.created, owned_by="minserve")
        return card | {"max_model_len": self.room}


def check_ended(output: Output, stream: Stream) -> None:
    """Raises Refused for an answer that did not end by itself."""
    reason = output.finish_reason
    if reason == "timeout":
        raise Refused(504, "the timeout passed before the answer was complete", "timeout", "timeout")
    if isinstance(output.error, GrammarFailed):
        raise Refused(400, str(output.error), "response_format")
    if reason == "error" or output.error:
        raise Refused(500, f"this request could not be computed: {output.error}")
    if reason == "abort" and stream.lagged:
        raise Refused(503, "aborted: its events were not read as fast as they were made")
    if reason not in OK:
        raise Refused(503, "aborted: the server is shutting down")


def internal(error: Exception) -> Refused:
    """What a client may know of a fault of ours: the log has the rest."""
    return Refused(500, f"internal error: {type(error).__name__}")
