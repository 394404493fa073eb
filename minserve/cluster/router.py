"""One address for many servers: each request goes to the replica that the policy chooses, bytes pass as they come.

    client --> router --> replica, one of N                    router = Router(POLICIES["prefix_aware"](), urls)
                            /health, every second              app = create_app(router)         for uvicorn

It speaks what the servers speak and changes nothing; only /health, /metrics, /stats and /load are its own: of all.

Another replica   takes over only where the client has not got a byte yet, after: no connection, 429, 503, or a replica
                  lost before its first byte; the last of these once per request: it may be what kills them. A stream
                  that breaks later ends with an error event. So no token is ever made twice for a client.
Backpressure      nothing is stored: a client that reads slowly is felt by the replica, and one that leaves closes the
                  connection behind it, so its pages come back there

Cost     one connection more, and the event loop's time for each piece of a stream; a prompt is hashed once
Story    notebooks/14_the_fleet.ipynb
"""

import asyncio
import json
from collections.abc import Iterable, Sequence
from contextlib import asynccontextmanager

import httpx2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from minserve.cluster import merged
from minserve.cluster.policies import Policy, Replica
from minserve.cluster.pool import Pool
from minserve.protocol import Refused

TRY_ANOTHER = {429, 503}  # full, or leaving: said before any work was done
HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade", "expect",
       "transfer-encoding", "host", "content-length"}  # fmt: skip


class Router:
    def __init__(
        self,
        policy: Policy,
        urls: Iterable[str] = (),
        *,
        max_body: int = 16 * 2**20,
        body_seconds: float = 60.0,
        stall_seconds: float = 90.0,
        **pool,
    ):
        """max_body: bytes. Seconds: for a body to arrive; for a reader to take the next piece (more than servers grant,
        so that theirs is the word). `pool`: what Pool takes, of health checks."""
        self.policy, self.max_body = policy, max_body
        self.body_seconds, self.stall_seconds = body_seconds, stall_seconds
        self.pool = Pool(urls, on_gone=policy.forget, **pool)
        self.draining, self.retries = False, 0

    async def drain(self, seconds: float = 30.0) -> bool:
        """Refuse what is new and wait until all is answered. False: not in time."""
        self.draining = True
        return await self.pool.drain(seconds=seconds)

    # ------------------------------------------------------------ one request
    async def forward(self, scope, receive, send) -> None:
        """The ASGI application for every path that is not the router's own."""
        request = Request(scope, receive)
        try:
            body = await self._body(request)
        except ClientDisconnect:
            return
        except Refused as refused:
            return await _answer(refused)(scope, receive, send)
        relay = asyncio.create_task(self._relay(request, body, self._patient(send)))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((relay, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = relay.done()
            for task in (relay, gone):
                task.cancel()  # if the client is gone, this closes the connection to the replica
            await asyncio.gather(relay, gone, return_exceptions=True)
        if finished and not isinstance(relay.exception(), TimeoutError):  # who took nothing is simply dropped
            relay.result()

    def _patient(self, send):
        async def patient(message) -> None:
            async with asyncio.timeout(self.stall_seconds):
                await send(message)

        return patient

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self.body_seconds):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self.max_body:
                        why = f"the body is longer than {self.max_body:,} bytes: send less"
                        raise Refused(413, why, Connection="close")
        except TimeoutError:
            raise Refused(
                408, f"the body did not arrive within {self.body_seconds:g} s", Connection="close"
            ) from None
        return bytes(body)

    async def _relay(self, request: Request, body: bytes, send) -> None:
        prompt = prompt_of(body) if request.method == "POST" else ""
        tried, lost, answer = set(), 0, None
        while lost < 2 and not self.draining:
            others = [replica for replica in self.pool.replicas.values() if replica.url not in tried]
            replica = self.policy.choose(others, prompt)
            if replica is None:
                break
            self.retries += bool(tried)
            tried.add(replica.url)
            with self.pool.outstanding(replica):
                try:
                    async with self._open(replica, request, body) as upstream:
                        if upstream.headers.get("content-type", "").startswith("text/event-stream"):
                            return await _stream(upstream, replica, send)
                        content = b"".join([piece async for piece in upstream.aiter_raw()])
                        answer = Response(content, upstream.status_code, _kept(upstream.headers, replica))
                        if upstream.status_code not in TRY_ANOTHER:
                            break
                except httpx2.InvalidURL as error:
                    answer = _answer(Refused(400, f"this address cannot be passed on: {error}"))
                    break
                except (httpx2.ConnectError, httpx2.ConnectTimeout):
                    self.pool.saw(replica, False)
                except httpx2.TransportError as error:
                    self.pool.saw(replica, False)
                    lost += 1
                    answer = _answer(
                        Refused(502, f"{replica.url} broke off before its answer began: {error!r}")
                    )
        await (answer or _answer(self._nobody()))(request.scope, request.receive, send)

    @asynccontextmanager
    async def _open(self, replica: Replica, request: Request, body: bytes):
        url = httpx2.URL(replica.url).copy_with(raw_path=_target(request))
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1") not in HOP]
        upstream = await self.pool.client.send(
            httpx2.Request(request.method, url, headers=headers, content=body), stream=True
        )
        try:
            yield upstream
        finally:
            await upstream.aclose()

    def _nobody(self) -> Refused:
        ill = sum(not replica.healthy for replica in self.pool.replicas.values())
        why = "the router is shutting down" if self.draining else "no replica is available"
        message = f"{why}: {len(self.pool.replicas)} known, {ill} of them ill. Try again in a moment."
        return Refused(503, message, code="no_replica", Retry_After="1")

    # ------------------------------------------------------------ what is the router's own
    async def health(self, request: Request) -> Response:
        well = not self.draining and any(replica.available for replica in self.pool.replicas.values())
        return Response(status_code=200) if well else _answer(self._nobody())

    async def load(self, request: Request) -> Response:
        loads = [answer.json() for answer in (await self.pool.everybody("/load")).values()]
        return JSONResponse(
            {name: sum(load.get(name, 0) for load in loads) for name in ("running", "waiting")}
        )

    async def stats(self, request: Request) -> Response:
        told = {url: answer.json() for url, answer in (await self.pool.everybody("/stats")).items()}
        own = dict(draining=self.draining, retries=self.retries)
        return JSONResponse(merged.stats(list(self.pool.replicas.values()), told) | own)

    async def metrics(self, request: Request) -> Response:
        texts = {url: answer.text for url, answer in (await self.pool.everybody("/metrics")).items()}
        own = merged.own_metrics(list(self.pool.replicas.values()), self.pool.served, self.retries)
        return PlainTextResponse(merged.metrics(texts) + own, media_type="text/plain; version=0.0.4")


def create_app(router: Router) -> Starlette:
    """The application; it runs the router's health checks while it runs."""

    @asynccontextmanager
    async def lifespan(app):
        async with router.pool:
            yield

    own = [Route(f"/{name}", getattr(router, name)) for name in ("health", "load", "stats", "metrics")]
    routes = [*own, Mount("", app=router.forward)]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _told})


async def _told(request: Request, error: HTTPException) -> Response:
    return _answer(Refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def _stream(upstream: httpx2.Response, replica: Replica, send) -> None:
    """Pass the pieces on. Raises httpx2.TransportError only while the client has nothing."""
    pieces = upstream.aiter_raw()
    piece = await anext(pieces, b"")
    headers = [
        (k.encode("latin-1"), v.encode("latin-1")) for k, v in _kept(upstream.headers, replica).items()
    ]
    await send(dict(type="http.response.start", status=upstream.status_code, headers=headers))
    try:
        while piece:
            await send(dict(type="http.response.body", body=piece, more_body=True))
            piece = await anext(pieces, b"")
    except httpx2.TransportError as error:
        broke = Refused(502, f"{replica.url} broke off in the middle of its answer: {error!r}")
        event = f"\n\ndata: {json.dumps(broke.body)}\n\n"  # the blank line ends whatever was half sent
        await send(dict(type="http.response.body", body=event.encode(), more_body=True))
    await send(dict(type="http.response.body", body=b"", more_body=False))


async def _gone(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _answer(refused: Refused) -> Response:
    return JSONResponse(refused.body, refused.status, refused.headers)


def _kept(headers: httpx2.Headers, replica: Replica) -> dict[str, str]:
    return {k: v for k, v in headers.items() if k not in HOP} | {"x-replica": replica.url}


def _target(request: Request) -> bytes:
    query = request.scope["query_string"]
    return request.scope.get("raw_path", request.url.path.encode()) + (b"?" + query if query else b"")


def prompt_of(body: bytes) -> str | Sequence[int]:
    """What a prefix-aware policy compares: the prompt, or all that the messages say. Empty where it makes no sense."""
    try:
        asked = json.loads(body)
        if "messages" in asked:
            return "".join(f"{m['role']}\n{_text(m['content'])}\n" for m in asked["messages"])
        prompt = asked.get("prompt", "")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]  # several prompts stay together: the first decides
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        return prompt if isinstance(prompt, str) or ids else ""
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""  # the server will say what is wrong with it


def _text(content) -> str:
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content or ())
