"""The server: the OpenAI API over one engine, so that the clients people have work unchanged.

    POST /v1/chat/completions, /v1/completions      an answer, or with "stream": true its events as they are made
    GET  /v1/models, /health, /version, /metrics    what is served, whether it is, and numbers for Prometheus
    POST /tokenize, /detokenize                     text to ids and back
    GET  /, /stats, /load                           a page, what it shows, and the two numbers a router asks for

A request's way: read (bounded) -> checked (protocol.py) -> tokenised (in a thread) -> AsyncEngine.add -> a Stream ->
one answer, or one event for each step and choice. A client that leaves is noticed by its connection's next message,
in whatever phase, and its pages are back before the next step.

Contracts    errors have the API's shape and status; one inside a stream is its last event
             no answer is silent: each ends with "stop", "length" or an error
             a reader that stalls costs one backlog of events, and after `stall_seconds` its connection
             /health is 200 while requests are taken, and 503 while draining or after the engine broke
             an API key, where there is one, guards everything under /v1 and the two tokenizer routes
Story        notebooks/13_serving_and_slos.ipynb
"""

import asyncio
import hmac
import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from minserve.async_engine import AsyncEngine, NotServing, Stream
from minserve.metrics import OK, Exporter, Timeline, percentile
from minserve.output import Output
from minserve.prefill_decode import prompt_logprobs
from minserve.protocol import (
    COMPLETION_TOKENS,
    ChatBody,
    ChatReply,
    CompletionBody,
    CompletionReply,
    DetokenizeBody,
    Echo,
    Refused,
    Reply,
    Sampling,
    TokenizeBody,
    plain,
    refused,
)
from minserve.request import SamplingParams
from minserve.scheduler import QueueFull
from minserve.step_log import StepRecord
from minserve.text import Tokenizer

PAGE = Path(__file__).parent / "assets" / "page.html"
CONTEXT = "context_length_exceeded"
SSE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
log = logging.getLogger("minserve.server")


@dataclass(frozen=True)
class Limits:
    """What one client may ask for, so that the others are served too."""

    max_model_len: int | None = None  # tokens of prompt and answer; None: what the engine has room for
    choices: int = 128  # of one request: n times its prompts
    body_bytes: int = 4 << 20
    body_seconds: float = 30.0  # for the whole body to arrive
    stall_seconds: float = 60.0  # for a reader to take the next event


def create_app(
    serving: AsyncEngine,
    tokenizer: Tokenizer,
    model_name: str,
    *,
    limits: Limits = Limits(),
    api_key: str | None = None,
    metrics_prefix: str = "minserve:",
    origins: tuple[str, ...] = ("*",),
    log_prompts: bool = False,
) -> FastAPI:
    """The application. It starts the engine's loop and ends it; app.state.front holds its parts."""
    front = Front(serving, tokenizer, model_name, limits, api_key, metrics_prefix, log_prompts)

    @asynccontextmanager
    async def lifespan(app):
        async with serving:
            yield
        front.thread.shutdown(wait=False)

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.state.front = front
    guarded = [Depends(front.check_key)]
    for method, path, route in (
        ("POST", "/v1/chat/completions", front.chat),
        ("POST", "/v1/completions", front.complete),
        ("GET", "/v1/models", front.models),
        ("GET", "/v1/models/{name:path}", front.model),
        ("POST", "/tokenize", front.tokenize),
        ("POST", "/detokenize", front.detokenize),
    ):
        app.add_api_route(path, route, methods=[method], response_model=None, dependencies=guarded)
    for path, route in {
        "/": front.page,
        "/health": front.health,
        "/version": front.version,
        "/metrics": front.metrics,
        "/stats": front.stats,
        "/load": front.load,
    }.items():
        app.add_api_route(path, route, methods=["GET"], response_model=None)
    for error, told in (
        (Refused, lambda _, e: JSONResponse(e.body, e.status, e.headers)),
        (ClientDisconnect, lambda _, e: Response(status_code=499)),  # nobody is there to read it
        (
            HTTPException,
            lambda _, e: JSONResponse(Refused(e.status_code, e.detail).body, e.status_code, e.headers),
        ),
        (Exception, lambda _, e: JSONResponse(Refused(500, f"internal error: {type(e).__name__}").body, 500)),
    ):
        app.add_exception_handler(error, told)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )
    return app


class Front:
    """The routes, and what they share."""

    def __init__(self, serving, tokenizer, model_name, limits, api_key, metrics_prefix, log_prompts):
        self.serving, self.engine, self.tokenizer = serving, serving.engine, tokenizer
        self.name, self.limits, self.api_key, self.log_prompts = model_name, limits, api_key, log_prompts
        self.room = min(self.engine.room, limits.max_model_len or self.engine.room)
        self.created = int(time.time())
        self.exporter, self.live = Exporter(model_name, metrics_prefix), Live()
        serving.on_step += [self.exporter.step, self.live.step]
        serving.on_end += [lambda _, timeline: self.exporter.observe(timeline), self.live.end]
        # One thread: encoding user text changes a tokenizer's state for the time it takes, so two would meet there.
        self.thread = ThreadPoolExecutor(1, "tokenizer")

    # ------------------------------------------------------------ answers
    async def chat(self, request: Request) -> Response:
        arrival = time.monotonic()
        body = await self.read(request, ChatBody)
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
        self.engine.make(prompt, self.fitted(body, prompt))
        text = given if isinstance(given, str) else self.tokenizer.decode(prompt)
        if body.logprobs is None:
            return Echo(text, prompt)
        model = self.engine.model
        work = lambda: prompt_logprobs(model, prompt, body.logprobs)
        return Echo(text, prompt, await self.serving.between(work))

    async def answer(self, request: Request, reply: Reply, prompts: list[list[int]], arrival: float):
        body = reply.body
        self.check_choices(body, len(prompts))
        params = [self.fitted(body, prompt) for prompt in prompts]
        self.note(reply, prompts)
        stream = await self.add(body, prompts, params, arrival)
        headers = {"X-Request-Id": reply.head["id"]}
        if body.stream:
            return EventStream(self.events(reply, stream), stream, self.limits.stall_seconds, headers)
        async with stream:
            await unless_gone(request, stream.finish())
        for output in stream.outputs:
            check_ended(output, stream)
        return JSONResponse(reply.whole(stream.outputs, stream.told), headers=headers)

    async def add(self, body: Sampling, prompts, params, arrival: float) -> Stream:
        """All of a request's prompts in one stream, or none."""
        fields = dict(
            priority=body.priority or 0, salt=(body.cache_salt or "").encode(), timeout=body.timeout
        )
        stream = None
        try:
            for prompt, its in zip(prompts, params):
                stream = await self.serving.add(prompt, its, arrival=arrival, join=stream, **fields)
            return stream
        except BaseException as error:
            if stream:
                self.serving.abort(stream)
            if isinstance(error, ValueError):
                raise refused(error) from None
            if isinstance(error, QueueFull | NotServing):
                (timeline := Timeline(arrival)).ended(time.monotonic(), "refused")
                self.exporter.observe(timeline)
                full, seconds = isinstance(error, QueueFull), str(self.live.patience)
                raise Refused(429 if full else 503, str(error), Retry_After=seconds) from None
            raise

    async def events(self, reply: Reply, stream: Stream) -> AsyncIterator[bytes]:
        body = reply.body
        try:
            async for output, text, last in stream:
                fine = not last or output.finish_reason in OK
                chunks = reply.chunks(output, text, last and fine, stream.told[output.index])
                if body.continuous_usage:
                    chunks = [chunk | {"usage": reply.usage(stream.outputs, stream.told)} for chunk in chunks]
                yield b"".join(map(event, chunks))
                if not fine:
                    check_ended(output, stream)
            if body.include_usage:
                yield event(reply.last_usage(stream.outputs, stream.told))
            yield b"data: [DONE]\n\n"
        except Refused as error:
            yield event(error.body)

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

    def check_key(self, request: Request) -> None:
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

    # ------------------------------------------------------------ the rest
    async def models(self) -> dict:
        return {"object": "list", "data": [self._card]}

    async def model(self, name: str) -> dict:
        self.check_model(name)
        return self._card

    @property
    def _card(self) -> dict:
        card = dict(id=self.name, object="model", created=self.created, owned_by="minserve")
        return card | {"max_model_len": self.room}

    async def health(self) -> Response:
        return Response(status_code=200 if self.serving.healthy and not self.serving.draining else 503)

    async def version(self) -> dict:
        return {"version": version("minserve")}

    async def metrics(self) -> Response:
        self.exporter.gauges(self.engine)
        return Response(self.exporter.render(), headers={"Content-Type": self.exporter.content_type})

    async def load(self) -> dict:
        return dict(running=len(self.engine.scheduler.running), waiting=len(self.engine.scheduler.waiting))

    async def stats(self) -> dict:
        pages = self.engine.pages
        counts = dict(
            total=pages.num_pages, free=len(pages.free), cached=len(pages.cached), in_use=pages.in_use
        )
        state = dict(
            healthy=self.serving.healthy,
            draining=self.serving.draining,
            error=repr(self.serving.error) if self.serving.error else None,
            max_running=self.engine.scheduler.max_running,
        )
        return {"model": self.name} | await self.load() | state | {"pages": counts} | self.live.report()

    async def page(self) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))


class Live:
    """The last steps and answers, for the page and for routers."""

    def __init__(self):
        self.recent: deque[dict] = deque(maxlen=120)
        self.made: deque[tuple[float, int]] = deque(maxlen=4096)  # when, how many tokens
        self.e2e, self.ttft, self.itl = deque(maxlen=128), deque(maxlen=128), deque(maxlen=2048)
        self.steps, self.ended = 0, Counter()

    def step(self, record: StepRecord) -> None:
        self.steps += 1
        waiting = len(record.waiting) + record.behind
        self.recent.append(
            dict(t=record.start, running=record.running, waiting=waiting, in_use=record.in_use,
                 tokens=record.num_tokens, seconds=record.total)
        )  # fmt: skip
        self.made.append((time.monotonic(), sum(row.sampled + row.kept for row in record.rows)))

    def end(self, _, timeline: Timeline) -> None:
        self.ended[timeline.reason] += 1
        if timeline.ok and timeline.ttft is not None:
            self.ttft.append(timeline.ttft)
            self.e2e.append(timeline.e2e)
            self.itl.extend(timeline.itl)

    @property
    def patience(self) -> int:
        """Seconds after which to come again: what an answer takes these days."""
        return min(60, math.ceil(percentile(self.e2e, 50) or 1))

    def report(self, window: float = 5.0) -> dict:
        since = time.monotonic() - window
        return dict(
            steps=self.steps,
            tokens_per_second=sum(n for at, n in self.made if at > since) / window,
            ttft=_spread(self.ttft),
            itl=_spread(self.itl),
            recent=list(self.recent),
            requests=dict(
                finished=sum(self.ended[reason] for reason in OK),
                failed=sum(n for reason, n in self.ended.items() if reason not in OK),
            ),
        )


def _spread(seconds) -> dict[str, float | None]:
    """Percentiles in milliseconds."""
    found = {f"p{q}": percentile(seconds, q) for q in (50, 90, 99)}
    return {name: None if value is None else value * 1e3 for name, value in found.items()}


# ---------------------------------------------------------------- the wire
class EventStream(StreamingResponse):
    """Events as they come, until the client leaves or takes nothing for `patience` seconds: either aborts."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], stream: Stream, patience: float, headers: dict):
        super().__init__(events, headers=SSE | headers)
        self.stream, self.patience = stream, patience

    async def __call__(self, scope, receive, send) -> None:
        async def patient(message):
            async with asyncio.timeout(self.patience):
                await send(message)

        writing = asyncio.create_task(self.stream_response(patient))
        async with self.stream:  # left in whatever way, it is aborted
            await first_of(writing, left(receive))


async def first_of(*work) -> list[asyncio.Task]:
    """Wait until one of them is done, and cancel the others. Returns the tasks."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


async def left(receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine):
    """What it returns; or, as soon as nobody waits for that any more, ClientDisconnect, and it is cancelled."""
    answer, _ = await first_of(work, left(request.receive))
    if answer.cancelled():
        raise ClientDisconnect
    return answer.result()


async def received(request: Request, limits: Limits) -> bytes:
    """The body. Raises Refused for one that is no JSON, too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"the body's Content-Type is {kind or 'missing'}: send application/json")
    raw = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                raw += piece
                if len(raw) > limits.body_bytes:
                    raise Refused(
                        413,
                        f"the body is larger than {limits.body_bytes:,} bytes: send less",
                        Connection="close",
                    )
    except TimeoutError:
        raise Refused(
            408, f"the body did not arrive within {limits.body_seconds} s", Connection="close"
        ) from None
    return bytes(raw)


def event(body: dict) -> bytes:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def check_ended(output: Output, stream: Stream) -> None:
    """Raises Refused for an answer that did not end by itself."""
    reason = output.finish_reason
    if reason == "timeout":
        raise Refused(
            504, "the request's timeout passed before the answer was complete", "timeout", "timeout"
        )
    if reason == "error":
        raise Refused(500, f"this request could not be computed: {output.error}")
    if reason == "abort" and stream.lagged:
        raise Refused(503, "aborted: its events were not read as fast as they were made")
    if reason not in OK:
        raise Refused(503, "aborted: the server is shutting down")
