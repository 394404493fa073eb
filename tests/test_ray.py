"""Ray Serve runs the same server as replicas: the same client, the same answers; it scales, and survives a death.

One small Ray on this machine (loopback, no dashboard, 2 CPUs by its own count) lives as long as these tests.
"""

import importlib.util
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from wrong_versions import wrong_version

from minserve import ray_serve
from minserve.ray_serve import Autoscaling, Options, Replica, application, build
from minserve.request import SamplingParams

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: `make ray`, or pip install 'minserve[ray]'", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]  # of Ray, by pydantic
PATIENCE = 90  # seconds: the longest anything here waits
NAME = "minserve"


def until(true, what: str, patience: float = PATIENCE):
    """Ask again and again, up to a limit."""
    deadline = time.monotonic() + patience
    while not (found := true()):
        assert time.monotonic() < deadline, f"{what}: not within {patience} s"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from serving_world import tiny_folder

    return tiny_folder(tmp_path_factory.mktemp("ray") / "tiny")


@contextmanager
def small_ray():
    """Everything it starts is gone when this ends: processes, shared memory, files."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its name for: one machine, loopback only
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2",  # instead of 10: a test has no time
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2",
    }
    import ray
    from ray import serve

    files = tempfile.mkdtemp(prefix="r")  # short: sockets lie in it
    try:
        start(ray, files)
        yield serve
    finally:
        try:
            if ray.is_initialized():
                serve.shutdown()
        finally:
            ray.shutdown()
            shutil.rmtree(files, ignore_errors=True)


def start(ray, files: str, attempts: int = 3) -> None:
    """Ray gives up when a node needs more than 30 s, which happens on a busy machine: then once more."""
    for left in reversed(range(attempts)):
        try:
            ray.init(
                address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False,
                object_store_memory=80 << 20, _temp_dir=files, logging_level="error",
            )  # fmt: skip
            return
        except Exception as error:
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def fleet(folder):
    options = Options(
        model=str(folder), served_model_name="tiny", num_cpus=0.25, num_pages=96, max_running=4, token_budget=64,
        min_replicas=1, max_replicas=2, target_ongoing_requests=2, max_ongoing_requests=8, upscale_delay_s=0.5,
        downscale_delay_s=3600, look_back_period_s=11, drain_seconds=5,
    )  # fmt: skip
    with small_ray() as serve:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(options), name=NAME, route_prefix="/")
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", serve=serve)


@pytest.fixture
def client(fleet):
    import openai

    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="-", max_retries=0, timeout=PATIENCE) as client:
        yield client


def replicas(fleet) -> int:
    """How many are running."""
    deployment = fleet.serve.status().applications[NAME].deployments["Replica"]
    return sum(count for state, count in deployment.replica_states.items() if state == "RUNNING")


ASKED = dict(max_tokens=24, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def expected(folder):
    """What the engine says without any server."""
    from serving_world import tiny_engine

    engine = tiny_engine(folder)
    (output,) = engine.add("the sky is", SamplingParams(**ASKED))
    while engine.scheduler.has_work:
        engine.step()
    return output


# ---------------------------------------------------------------- without Ray
def test_options_are_rays_own_names_and_nothing_else():
    from ray.serve.config import AutoscalingConfig

    assert Autoscaling.model_fields.keys() <= AutoscalingConfig.model_fields.keys()
    with pytest.raises(ValidationError, match="replicas"):
        Options(replicas=3)


def test_the_configuration_file_is_one_that_ray_and_build_take():
    import yaml
    from ray.serve.schema import ServeDeploySchema

    path = Path(__file__).parents[1] / "minserve" / "assets" / "ray_serve.yaml"
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text())).applications
    module, _, name = application.import_path.partition(":")
    assert (module, name) == (build.__module__, build.__name__)
    options = Options.model_validate(application.args)
    deployment = build(options)._bound_deployment
    assert deployment.ray_actor_options == {"num_cpus": 2, "num_gpus": 1}
    assert deployment.max_ongoing_requests == options.max_ongoing_requests
    config = deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (1, 8, 32)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (10, 300)


def test_serve_run_hands_over_texts():
    """`serve run minserve.ray_serve:build num_cpus=0.25 ...`: Ray makes Options of them by the annotation of build."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as called

    deployment = called(build, {"num_cpus": "0.25", "max_replicas": "7"})._bound_deployment
    assert deployment.ray_actor_options["num_cpus"] == 0.25
    assert deployment._deployment_config.autoscaling_config.max_replicas == 7


def test_what_is_not_said_is_left_to_ray():
    from ray.serve.config import AutoscalingConfig

    config = build(Options())._bound_deployment._deployment_config.autoscaling_config
    assert config.upscale_delay_s == AutoscalingConfig().upscale_delay_s
    assert config.look_back_period_s == AutoscalingConfig().look_back_period_s


def test_a_broken_engine_is_a_sick_replica():
    replica = Replica()
    serving = SimpleNamespace(healthy=True, error=None)
    replica.app = SimpleNamespace(state=SimpleNamespace(front=SimpleNamespace(serving=serving)))
    replica.check_health()
    serving.healthy, serving.error = False, ValueError("injected")
    with pytest.raises(RuntimeError, match="injected"):
        replica.check_health()


def test_a_replica_has_the_engine_that_is_asked_for(folder, monkeypatch):
    front = application(Options(model=str(folder), num_pages=50, max_running=3, api_key="k")).state.front
    assert (front.name, front.api_key, len(front.engine.pages.free)) == (folder.name, "k", 50)
    assert front.engine.scheduler.max_running == 3 and front.engine.model.device.type == "cpu"
    asked = []

    def loading(folder, device):
        asked.append(device)
        raise InterruptedError

    monkeypatch.setattr(sys.modules[application.__module__], "load", loading)
    with pytest.raises(InterruptedError):
        application(Options(model=str(folder), num_gpus=0.5))
    assert asked == ["cuda"]


WRONG = [  # right, wrong, who must notice
    ("if not serving.healthy:", "if False:", "sick"),
    (", exclude_none=True", "", "left to ray"),
    ('"num_gpus": options.num_gpus', '"num_gpus": 0', "file"),
    ("options.max_ongoing_requests or 3", "3", "file"),
    ("max_replicas: int = 2", "most_replicas: int = 2", "names"),
    ('extra="forbid"', 'extra="ignore"', "names"),
    ('"cuda" if options.num_gpus else "cpu"', '"cpu"', "engine"),
    ("device=device), tokenizer, **chosen)", "device=device), tokenizer)", "engine"),
    ("options.served_model_name or Path(folder).name", 'options.served_model_name or "model"', "engine"),
    ("api_key=options.api_key", "api_key=None", "engine"),
]


@pytest.mark.parametrize("right, wrong, case", WRONG, ids=[w[1] for w in WRONG])
def test_a_wrong_version_is_noticed(right, wrong, case, folder, monkeypatch):
    made = wrong_version(ray_serve, right, wrong)
    for name in ("Autoscaling", "Options", "Replica", "application", "build"):
        monkeypatch.setitem(globals(), name, getattr(made, name))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    cases = {
        "sick": test_a_broken_engine_is_a_sick_replica,
        "left to ray": test_what_is_not_said_is_left_to_ray,
        "file": test_the_configuration_file_is_one_that_ray_and_build_take,
        "names": test_options_are_rays_own_names_and_nothing_else,
        "engine": lambda: test_a_replica_has_the_engine_that_is_asked_for(folder, monkeypatch),
    }
    with pytest.raises(BaseException) as noticed:
        cases[case]()
    assert not isinstance(noticed.value, (SyntaxError, NameError, KeyboardInterrupt))


# ---------------------------------------------------------------- one replica
def test_the_client_and_the_answers_are_the_same(client, expected):
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.completions.create(model="tiny", prompt="the sky is", **ASKED)
    assert whole.choices[0].text == expected.text
    assert whole.usage.completion_tokens == len(expected.tokens)


def test_text_streams_through_the_proxy(client, expected):
    chunks = client.completions.create(model="tiny", prompt="the sky is", stream=True, **ASKED)
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == expected.text and len(list(filter(None, texts))) > 5
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "why?"}], stream=True, max_tokens=8
    )
    assert list(chat)[-1].choices[0].finish_reason in ("stop", "length")


def test_errors_come_through_as_they_are(client):
    import openai

    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=-1)


def test_a_client_that_leaves_frees_its_place(fleet, client):
    import httpx2

    stream = client.completions.create(
        model="tiny", prompt="the", stream=True, max_tokens=900, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    load = lambda: httpx2.get(f"{fleet.url}/load", timeout=PATIENCE).json()
    until(lambda: load() == {"running": 0, "waiting": 0}, "the engine is idle again")


# ---------------------------------------------------------------- more of them
def test_load_makes_it_two_and_a_death_does_not_stop_the_service(fleet, client, expected):
    import ray

    assert replicas(fleet) == 1
    enough, said, trouble = threading.Event(), [], []

    def ask():
        while not enough.is_set():
            try:
                answer = client.completions.create(
                    model="tiny", prompt="the", max_tokens=300, extra_body={"ignore_eos": True}, temperature=0
                )
                said.append(answer.choices[0].text)
            except Exception as error:
                trouble.append(error)
                return

    crowd = [threading.Thread(target=ask, daemon=True) for _ in range(6)]
    for one in crowd:
        one.start()
    try:
        until(lambda: replicas(fleet) == 2, "a second replica")
    finally:
        enough.set()
        for one in crowd:
            one.join(PATIENCE)
    assert not trouble and len(set(said)) == 1, "whoever answers says the same"

    names = [its["name"] for its in ray.util.list_named_actors(all_namespaces=True)]
    victim, *others = [name for name in names if name.startswith(f"SERVE_REPLICA::{NAME}#")]
    assert len(others) == 1
    ray.kill(ray.get_actor(victim, namespace="serve"), no_restart=True)

    def served():
        try:
            return client.completions.create(model="tiny", prompt="the sky is", **ASKED).choices[0].text
        except Exception:  # it may have gone to the one that died
            return None

    assert until(served, "an answer after a death") == expected.text

    def replaced():
        names = {its["name"] for its in ray.util.list_named_actors(all_namespaces=True)}
        return replicas(fleet) == 2 and victim not in names

    until(replaced, "another replica in its place")
    assert all(served() == expected.text for _ in range(8))
