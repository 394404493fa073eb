"""`python -m minserve serve`: one model behind the OpenAI API.

It listens on the loopback interface unless told otherwise, and prints one line on standard output once it answers:

    minserve: serving SmolLM2-135M-Instruct at http://127.0.0.1:8000

SIGTERM or Ctrl-C: nobody new is let in (503), answers under way may finish for --drain-seconds, what is left then is
aborted, and the command ends with 0. A second signal does not wait. A step that does not come back within
--step-seconds is taken for hung: everybody is told, /health is 503 from then on, and the end is 1.
"""

import argparse
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from minserve.async_engine import BACKLOG, STEP_SECONDS, AsyncEngine, Stuck
from minserve.cluster.front import Server, settings
from minserve.cluster.transports import add_connector_arguments, connector_of
from minserve.drafters import NAMES
from minserve.engine import Engine
from minserve.fetch import FetchError, resolve
from minserve.quantized_cache import KINDS
from minserve.server import Limits, create_app
from minserve.text import Tokenizer
from minserve.weights import DTYPES, load

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a model folder or a hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--served-model-name", help="its name for clients; default: the folder's")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 is a free one")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("MINSERVE_API_KEY"),
        help="what clients have to send; default: $MINSERVE_API_KEY, which no process list shows, else nothing",
    )
    parser.add_argument(
        "--allowed-origins", nargs="*", default=["*"], help="web pages that may ask; default: any"
    )
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, help="for answers under way at the end; 30"
    )
    parser.add_argument("--log-prompts", action="store_true", help="write what people ask to the log")
    parser.add_argument(
        "--metrics-prefix", default="minserve:", help='of /metrics; "vllm:" for its dashboards'
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-model-len", type=int, help="tokens of prompt and answer; default: the model's context"
    )
    limits.add_argument("--max-body-bytes", type=int, default=Limits.body_bytes, help="of one request")
    limits.add_argument(
        "--max-choices", type=int, default=Limits.choices, help="n times prompts of one request"
    )
    limits.add_argument("--backlog", type=int, default=BACKLOG, help="events a reader may lag behind")
    limits.add_argument(
        "--step-seconds", type=float, default=STEP_SECONDS, help="then a step counts as hung; 300, inf: never"
    )
    add_engine_arguments(parser.add_argument_group("engine"))
    add_connector_arguments(parser.add_argument_group("half of a server, see `minserve disaggregate`"))


def add_engine_arguments(parser) -> None:
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's own")
    parser.add_argument("--num-pages", type=int, help="of the KV cache; default: by memory")
    parser.add_argument("--page-size", type=int, help="tokens of a page; default: 16")
    parser.add_argument("--kv-cache-dtype", choices=list(KINDS), help="default: the model's own")
    parser.add_argument("--token-budget", type=int, default=512, help="tokens of one step; default: 512")
    parser.add_argument("--max-running", type=int, default=64, help="requests of one step; default: 64")
    parser.add_argument("--max-waiting", type=int, default=4096, help="the queue, then 429; default: 4096")
    parser.add_argument("--ageing", type=int, default=100, help="steps of waiting that a priority is worth")
    parser.add_argument("--drafter", choices=NAMES, help="speculative decoding: who proposes tokens")
    parser.add_argument(
        "--no-prefix-caching", action="store_true", help="compute every prompt from its first token"
    )


def main(args) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        connector = connector_of(args)
        serving, tokenizer, name = build(args, connector=connector)
        shown = args.served_model_name or name
        app = create_app(serving, tokenizer, shown, limits=limits_of(args),
                         api_key=args.api_key, metrics_prefix=args.metrics_prefix, log_prompts=args.log_prompts,
                         origins=tuple(args.allowed_origins))  # fmt: skip
    except (ValueError, FetchError, FileNotFoundError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    if warning := exposed(args.host, args.api_key):
        print(f"serve: {warning}", file=sys.stderr)
    server = Server(
        settings(app, args.host, args.port),
        announce=lambda url: print(f"minserve: serving {shown} at {url}", flush=True),
        drain=lambda: serving.drain(args.drain_seconds),
        hurry=serving.close,
    )
    server.run()
    if isinstance(serving.error, Stuck):  # its thread would be waited for
        print(f"serve: ends without its engine: {serving.error}", file=sys.stderr, flush=True)
        os._exit(1)
    if connector:
        connector.close()
    return 0 if server.started else 1


def build(args, **options) -> tuple[AsyncEngine, Tokenizer, str]:
    """The engine that the arguments describe, its tokenizer, and the model's name. `options` go to Engine."""
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    folder = resolve(args.model)
    tokenizer = Tokenizer.load(folder)
    names = "num_pages page_size kv_cache_dtype token_budget max_running max_waiting ageing drafter".split()
    chosen = {name: getattr(args, name) for name in names}
    thread = ThreadPoolExecutor(1, "engine")

    def made() -> Engine:
        model = load(folder, DTYPES[args.dtype] if args.dtype else None, device)
        return Engine(model, tokenizer, prefix_caching=not args.no_prefix_caching, **chosen, **options)

    limits = dict(backlog=args.backlog, step_seconds=args.step_seconds)
    serving = AsyncEngine(thread.submit(made).result(), **limits, thread=thread)
    return serving, tokenizer, Path(folder).name


def exposed(host: str, api_key: str | None) -> str | None:
    """What the operator should know who lets other machines in."""
    if host in LOOPBACK or api_key:
        return None
    return f"{host} lets other machines in, and there is no --api-key: whoever reaches the port can use this model"


def limits_of(args) -> Limits:
    return Limits(args.max_model_len, args.max_choices, args.max_body_bytes)
