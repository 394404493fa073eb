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
             /health is 200 while requests are taken, and 503 while draining or after the engine broke or hangs
             an API key, where there is one, guards everything under /v1 and the two tokenizer routes
Story        notebooks/13_serving_and_slos.ipynb
"""

from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from minserve.async_engine import AsyncEngine, NotServing
from minserve.protocol import Refused
from minserve.server.front import Front, internal
from minserve.server.live import Views
from minserve.server.wire import Limits
from minserve.text import Tokenizer

GUARDED = ("/v1", "/tokenize", "/detokenize")
TOLD = {  # exceptions as clients hear of them
    Refused: lambda _, e: JSONResponse(e.body, e.status, e.headers),
    NotServing: lambda _, e: JSONResponse(Refused(503, str(e)).body, 503, {"Retry-After": "1"}),
    HTTPException: lambda _, e: JSONResponse(Refused(e.status_code, e.detail).body, e.status_code, e.headers),
    ClientDisconnect: lambda _, e: Response(status_code=499),  # nobody is there to read it
    Exception: lambda _, e: JSONResponse(internal(e).body, 500),
}


def create_app(
    serving: AsyncEngine,
    tokenizer: Tokenizer,
    model_name: str,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    metrics_prefix: str = "minserve:",
    origins: tuple[str, ...] = ("*",),
    log_prompts: bool = False,
) -> FastAPI:
    """The application. It starts the engine's loop and ends it; app.state.front holds its parts."""
    views = Views(serving, model_name, metrics_prefix)
    front = Front(views, tokenizer, limits or Limits(), api_key, log_prompts)

    @asynccontextmanager
    async def lifespan(app):
        async with serving:
            yield
        front.thread.shutdown(wait=False)

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.state.front = front
    routes = {
        "POST /v1/chat/completions": front.chat,
        "POST /v1/completions": front.complete,
        "GET /v1/models": front.models,
        "GET /v1/models/{name:path}": front.model,
        "POST /tokenize": front.tokenize,
        "POST /detokenize": front.detokenize,
        "GET /health": views.health,
        "GET /version": views.version,
        "GET /metrics": views.metrics,
        "GET /stats": views.stats,
        "GET /load": views.load,
        "GET /": views.page,
    }
    for route, handler in routes.items():
        method, path = route.split()
        guards = [Depends(front.check_key)] if path.startswith(GUARDED) else []
        app.add_api_route(path, handler, methods=[method], response_model=None, dependencies=guards)
    for kind, told in TOLD.items():
        app.add_exception_handler(kind, told)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )
    return app
