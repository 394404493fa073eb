"""`python -m minserve disaggregate`: one server computes prompts, another continues them, and clients see one.

    python -m minserve disaggregate
    python -m minserve disaggregate --kv-mode layer --kv-bandwidth 1e9 -- --model FOLDER --max-running 8

What stands after `--` is for both servers, each a process of its own: `minserve serve --kv-role ...`. One line says
where to ask:

    minserve: disaggregated at http://127.0.0.1:8000

    client --> proxy --> prefill server        the request for one token; its keys and values set out at once
                 |            |  file or gloo
                 '-----> decode server         the whole request, and where those are to be had (handover.py)

Why       a long prompt in a step is a long step, and everybody in it waits. Where no step holds both, tokens keep their
          pace (ITL), and prompts need not share theirs (TTFT). It moves work, it saves none: throughput is no better
When not  where a prompt's bytes travel longer than its tokens take to compute
Alone     several answers or prompts, and whatever the prefill server does not answer with 200: the decode server does
          all of it. So without a prefill server this is a server, without the decode server it is none (503)
Sources   DistServe, Zhong et al. 2024 (arXiv:2401.09670); Splitwise, Patel et al. 2023 (arXiv:2311.18677)
Story     notebooks/14_the_fleet.ipynb
"""

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
from pathlib import Path

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from minserve.cluster.front import Server, settings
from minserve.cluster.handover import first_half, is_divisible, second_half
from minserve.cluster.policies import RoundRobin
from minserve.cluster.replicas import LocalReplica, LocalReplicas, ReplicaFailed
from minserve.cluster.router import HOP, Router, create_app
from minserve.cluster.transports import add_connector_arguments

PATHS = ("/v1/chat/completions", "/v1/completions")


class Disaggregated(Router):
    """A router to one server, the decode server, that asks the prefill server first."""

    def __init__(self, prefill: str, decode: str, *, patience: float = 60.0, **options):
        """`patience`: seconds that the first token may take. `options`: see Router."""
        super().__init__(RoundRobin(), [decode], **options)
        self.prefill, self.patience = prefill.rstrip("/"), patience
        self.divided = self.undivided = 0  # requests

    async def _relay(self, request: Request, body: bytes, send) -> None:
        if request.method == "POST" and request.url.path in PATHS:
            body = await self._begun(request, body)
        await super()._relay(request, body, send)

    async def _begun(self, request: Request, body: bytes) -> bytes:
        """The body, and what the prefill server says that it has done of it."""
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return body  # the decode server will say what is wrong
        if isinstance(asked, dict):
            asked.pop("kv_transfer_params", None)  # that is for us to say
        said = await self._ask(request, asked) if is_divisible(asked) else None
        both = second_half(asked, said)
        self.divided, self.undivided = self.divided + (both is not asked), self.undivided + (both is asked)
        return json.dumps(both).encode()

    async def _ask(self, request: Request, asked: dict):
        """The prefill server's answer; None, whatever goes wrong there. If the client leaves, so do we."""
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1") not in HOP]
        content = json.dumps(first_half(asked, secrets.token_hex(16))).encode()
        try:
            async with asyncio.timeout(self.patience):
                answer = await self.pool.client.post(
                    self.prefill + request.url.path, content=content, headers=headers
                )
            return answer.json() if answer.status_code == 200 else None
        except (httpx2.TransportError, TimeoutError, ValueError):
            return None

    async def stats(self, request: Request) -> Response:
        """The decode server's, and how many requests were divided: none any more, if the prefill server has trouble."""
        told = json.loads((await super().stats(request)).body)
        return JSONResponse(told | dict(divided=self.divided, undivided=self.undivided))


# ---------------------------------------------------------------- the command
def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 is a free one")
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, help="for answers under way at the end; 30"
    )
    add_connector_arguments(parser, roles=False)
    parser.add_argument("serve", nargs="*", help="after --: what both servers get")


def main(args) -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="minserve-kv-") as folder:
            return asyncio.run(serve(args, folder))
    except ReplicaFailed as error:
        print(f"disaggregate: {error}", file=sys.stderr)
        return 2


async def serve(args, folder: str) -> int:
    """`folder`: an empty one, where both servers meet."""
    async with half(args, "kv_producer", folder) as first, half(args, "kv_consumer", folder) as second:
        started = await asyncio.gather(first.start(), second.start(), return_exceptions=True)
        for error in started:
            if isinstance(error, BaseException):
                raise error
        proxy = Disaggregated(*(replica.url for replica in started))
        announce = lambda url: print(f"minserve: disaggregated at {url}", flush=True)
        server = Server(
            settings(create_app(proxy), args.host, args.port),
            announce,
            lambda: proxy.drain(args.drain_seconds),
        )
        await server.serve()
        await asyncio.gather(first.stop(started[0]), second.stop(started[1]))
    return 0 if server.started else 1


def half(args, role: str, folder: str) -> LocalReplicas:
    """The process of one role."""
    names = "kv_connector kv_mode kv_bandwidth kv_latency kv_lease".split()
    options = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    where = ["--kv-role", role, "--kv-path", str(Path(folder) / "meet")]

    def crashed(replica: LocalReplica) -> None:
        what = (
            "prompts are computed by the other one" if role == "kv_producer" else "there are no answers now"
        )
        print(f"minserve: {replica.url} ({role}) has ended, {what}", file=sys.stderr, flush=True)

    return LocalReplicas([*where, *options, *args.serve], on_crash=crashed)
