"""The same server as replicas of a Ray Serve application: Ray starts, routes, scales and replaces them.

    serve run minserve.ray_serve:build model=FOLDER max_replicas=4        on this machine, at http://127.0.0.1:8000
    serve deploy minserve/assets/ray_serve.yaml                           on a cluster that `ray start` made
    build(Options(...))                                                   from Python, for serve.run()

Each replica is one process with one engine, and answers by the very application that `python -m minserve serve` runs,
so clients see no difference, streams included. What cluster/ builds from small parts, Ray brings ready made:

    routing        power of two choices: of two random replicas, the one with fewer requests under way
    autoscaling    on queue depth: as many replicas as give each target_ongoing_requests, and delays against oscillation
    replacement    a replica that dies, or whose check_health raises, is replaced, and gets no more requests meanwhile
    placement      on several machines, by num_cpus and num_gpus; new versions one replica after the other

What is different    Beyond max_ongoing_requests of each replica, requests wait in Ray's proxy, in order of arrival: the
                     engine's priorities, and its 429, count only for those that are inside.
                     /metrics and /stats are those of whichever replica is asked.
                     Routing does not know of prefixes. Ray's PrefixCacheAffinityRouter is part of Ray Serve LLM
                     (`ray[llm]`): it reads the prompt of a call between deployments, and here there is only HTTP.
Memory               Each replica holds its own weights and pages: num_cpus says where it fits, and limits nothing.
Sources              Ray Serve's guides "Autoscaling", "FastAPI and HTTP", "Request routing"; two choices:
                     Mitzenmacher 2001 (IEEE TPDS 12:10)
Story                notebooks/14_the_fleet.ipynb
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from minserve.async_engine import AsyncEngine
from minserve.engine import Engine
from minserve.fetch import resolve
from minserve.server import create_app
from minserve.text import Tokenizer
from minserve.weights import load


class Autoscaling(BaseModel):
    """Ray's own names, and where nothing is said (None) Ray's own defaults: see its AutoscalingConfig."""

    min_replicas: int = 1
    max_replicas: int = 2
    initial_replicas: int | None = None
    target_ongoing_requests: float = Field(16, gt=0)  # under way in one replica, waiting ones included
    upscale_delay_s: float | None = None
    downscale_delay_s: float | None = None
    look_back_period_s: float | None = None


class Options(Autoscaling):
    """What `serve run minserve.ray_serve:build name=value ...` takes, and `args` of a configuration file."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = (
        None  # a folder or a hub id, for each replica's machine to find; None: SmolLM2-135M-Instruct
    )
    served_model_name: str | None = None
    api_key: str | None = None
    # the engine
    num_pages: int | None = None
    kv_cache_dtype: str | None = None
    token_budget: int = 512
    max_running: int = 64
    drafter: str | None = None
    # a replica
    num_cpus: float = Field(1, ge=0)  # a share of a machine's: 0.5 puts four replicas on two cores
    num_gpus: float = Field(0, ge=0)  # with any, it computes there
    max_ongoing_requests: int | None = (
        None  # None: max_running and half as many again, so that no seat is ever empty
    )
    drain_seconds: float = 30.0  # for answers under way when it is to stop


def application(options: Options) -> FastAPI:
    """What one replica runs: the model, an engine, and the server's routes."""
    folder = resolve(options.model)
    tokenizer = Tokenizer.load(folder)
    chosen = options.model_dump(
        include={"num_pages", "kv_cache_dtype", "token_budget", "max_running", "drafter"}
    )
    device, thread = "cuda" if options.num_gpus else "cpu", ThreadPoolExecutor(1, "engine")
    engine = thread.submit(lambda: Engine(load(folder, device=device), tokenizer, **chosen)).result()
    serving = AsyncEngine(engine, thread=thread)
    name = options.served_model_name or Path(folder).name
    return create_app(serving, tokenizer, name, api_key=options.api_key)


class Replica:
    """One engine behind Ray's proxy. Ray wraps it: `app` is the application above."""

    app: FastAPI

    def check_health(self) -> None:
        """Ray asks now and then, and replaces a replica that raises."""
        serving = self.app.state.front.serving
        if not serving.healthy:
            raise RuntimeError(f"the engine is broken: {serving.error!r}")


def build(options: Options):
    """A Ray Serve application. It is not started: `serve run` does that, or serve.run()."""
    from ray import serve  # here, so that the package can be read and tested without it

    def asgi():  # called in each replica
        return application(options)

    wrapped = serve.ingress(asgi)(Replica)
    deployment = serve.deployment(
        name="Replica",
        autoscaling_config=options.model_dump(include=set(Autoscaling.model_fields), exclude_none=True),
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=options.max_ongoing_requests or 3 * options.max_running // 2,
        graceful_shutdown_timeout_s=options.drain_seconds,
        health_check_period_s=5,
    )
    return deployment(wrapped).bind()
