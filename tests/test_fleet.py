"""Processes and how many of them: started, watched, replaced, retired; first with stand-ins that start fast."""

import argparse
import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import fleet_world
import httpx2
import pytest
from fleet_world import in_loop, until
from wrong_versions import wrong_version

from minserve.cluster import fleet, replicas
from minserve.cluster.autoscaler import Autoscaler, AutoscalingConfig
from minserve.cluster.policies import POLICIES
from minserve.cluster.replicas import LocalReplicas, ReplicaFailed
from minserve.cluster.router import Router

needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")

# A server that starts fast and ends with us: argv[1] is a folder; a file PORT in it makes that one ill.
STAND_IN = """
import http.server, os, signal, sys, threading, time
folder, *how = sys.argv[1:]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/crash":
            os._exit(3)
        self.send_response(503 if os.path.exists(f"{folder}/{self.server.server_port}") else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
if "deaf" in how:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Timer(5, os._exit, [7]).start()
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
if "chatty" in how: print("x" * 300_000, flush=True)
if "broken" in how: sys.exit("no such model")
if "slow" in how: time.sleep(60)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"minserve: serving stand-in at http://127.0.0.1:{server.server_port}", flush=True)
if "chatty" in how: print("y" * 300_000, flush=True)
server.serve_forever()
"""


def stand_ins(folder, *how: str, module=replicas, **options) -> LocalReplicas:
    return module.LocalReplicas([str(folder), *how], command=[sys.executable, "-c", STAND_IN], **options)


def gone(pid: int) -> bool:
    """Ended, also if nobody has asked how."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return sys.platform.startswith("linux")  # no such entry


# ---------------------------------------------------------------- processes
@in_loop
async def test_it_returns_when_the_server_answers_and_says_how_long_that_took(tmp_path, module=replicas):
    before = time.monotonic()
    async with stand_ins(tmp_path, "chatty", module=module) as local:  # more than a pipe holds, in one line
        one, two = await asyncio.gather(local.start(), local.start())
        assert one.url != two.url and 0 < one.cold_start <= time.monotonic() - before
        async with httpx2.AsyncClient(trust_env=False) as client:
            assert (await client.get(one.url)).status_code == 200
        assert local.alive == [one, two]
    assert one.process.returncode is not None and two.process.returncode is not None and local.alive == []


@in_loop
async def test_a_server_that_cannot_start_says_why(tmp_path, module=replicas):
    async with stand_ins(tmp_path, "broken", module=module) as local:
        with pytest.raises(module.ReplicaFailed, match="ended with 1(?s:.*)no such model"):
            await local.start()
        assert local.alive == []
    async with stand_ins(tmp_path, "slow", module=module, patience=0.3) as local:
        with pytest.raises(module.ReplicaFailed, match=r"did not answer within 0\.3 s"):
            await local.start()
        assert local.alive == []


@needs_signals
@in_loop
async def test_stopping_asks_first_and_insists_then(tmp_path, module=replicas):
    crashed = []
    async with stand_ins(tmp_path, module=module, on_crash=crashed.append) as local:
        replica = await local.start()
        await local.stop(replica, 10)
        assert replica.process.returncode == -signal.SIGTERM
    async with stand_ins(tmp_path, "deaf", module=module, on_crash=crashed.append) as local:
        replica = await local.start()
        await local.stop(replica, 0.2)
        assert replica.process.returncode == -signal.SIGKILL
    assert crashed == []  # they were asked to


@in_loop
async def test_nobody_is_left_however_the_block_is_left(tmp_path, module=replicas):
    with pytest.raises(RuntimeError, match="trouble"):
        async with stand_ins(tmp_path, module=module) as local:
            replica, starting = await local.start(), asyncio.create_task(local.start())
            await until(lambda: len(local.alive) == 2, "the second is on its way")
            raise RuntimeError("trouble")
    await asyncio.gather(starting, return_exceptions=True)
    assert gone(replica.process.pid) and local.alive == []


@in_loop
async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path, module=replicas):
    async with stand_ins(tmp_path, "slow", module=module) as local:
        starting = asyncio.create_task(local.start())
        await until(lambda: local.alive, "it is on its way")
        [replica] = local.alive
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert gone(replica.process.pid) and local.alive == []


@in_loop
async def test_a_crash_is_told_once(tmp_path, module=replicas):
    crashed = []
    async with stand_ins(tmp_path, module=module, on_crash=crashed.append) as local:
        replica = await local.start()
        async with httpx2.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx2.TransportError):
                await client.get(f"{replica.url}/crash")
        await until(lambda: crashed, "told")
        assert crashed == [replica] and replica.process.returncode == 3 and local.alive == []


def test_a_child_ends_when_its_parent_is_gone():
    code = (
        "import runpy, time\nfrom minserve.cluster import replicas\n"
        "runpy.run_module = lambda *_, **__: (print('runs', flush=True), time.sleep(60))\nreplicas.main(['x'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout.readline().strip() == b"runs" and child.poll() is None
            child.stdin.close()
            assert child.wait(30) == 1
        finally:
            child.kill()


# ---------------------------------------------------------------- the loop, round by round
@asynccontextmanager
async def fleet_of(tmp_path, low, high, *how, module=fleet, **options):
    """A fleet of stand-ins; tests turn it by .round(). .busy(n, ...) sets what each replica has under way."""
    quick = dict(look_back_period_s=0, upscale_delay_s=0, downscale_delay_s=0, target_ongoing_requests=2)
    router = Router(POLICIES["least_outstanding"](), interval=0.02, fall=2)
    async with router.pool, stand_ins(tmp_path, *how) as local:
        said = []
        one = module.Fleet(
            router, local, Autoscaler(AutoscalingConfig(low, high, **quick | options)), say=said.append
        )
        await one.start()

        def busy(*ongoing):
            for replica, n in zip(one.running, ongoing, strict=True):
                router.pool.replicas[replica.url].ongoing = n
            router.pool._ended.set()

        yield SimpleNamespace(fleet=one, router=router, local=local, said=said, busy=busy)
        for task in [*one.starting, *one.leaving]:
            task.cancel()


@in_loop
async def test_it_grows_and_shrinks_with_what_is_under_way(tmp_path, module=fleet):
    async with fleet_of(tmp_path, 1, 3, module=module) as world:
        one, pool = world.fleet, world.router.pool
        assert len(one.running) == len(pool.replicas) == 1
        world.busy(5)
        one.round()
        assert one.target == 3 and len(one.starting) == 2
        one.round()
        assert len(one.starting) == 2  # asked for already
        await until(lambda: len(one.running) == 3, "all answer")
        assert len(pool.replicas) == 3 and len(world.local.alive) == 3
        first, second, third = one.running
        world.busy(1, 2, 0)
        one.round()
        assert one.running == [first, second] and one.target == 2  # the idle one goes
        await until(lambda: third.process.returncode is not None, "gone")
        world.busy(1, 0)
        one.round()
        await until(lambda: second.process.returncode is not None, "gone")
        await until(lambda: len(pool.replicas) == 1, "no longer known")
        assert [(r.running, r.starting, r.target) for r in one.history] == [
            (1, 0, 3),
            (1, 2, 3),
            (3, 0, 2),
            (2, 0, 1),
        ]
        assert (
            sum("-> " in line for line in world.said) == 3
            and sum("answers after" in line for line in world.said) == 3
        )


@in_loop
async def test_who_leaves_finishes_what_it_has(tmp_path, module=fleet):
    async with fleet_of(tmp_path, 1, 2, module=module, target_ongoing_requests=10, hysteresis=0) as world:
        one, pool = world.fleet, world.router.pool
        world.busy(15)
        one.round()
        await until(lambda: len(one.running) == 2, "both answer")
        world.busy(3, 2)
        leaver = one.running[1]
        one.round()
        assert pool.replicas[leaver.url].draining and leaver.process.returncode is None
        for _ in range(5):
            one.round()
            await asyncio.sleep(0)
        assert not any("leaves" in line for line in world.said) and one.target == 1 and len(one.leaving) == 1
        pool.replicas[leaver.url].ongoing = 0
        pool._ended.set()
        await until(lambda: leaver.process.returncode is not None and not one.leaving, "stopped")


@in_loop
async def test_who_is_no_longer_wanted_need_not_finish_starting(tmp_path, module=fleet):
    async with fleet_of(tmp_path, 1, 3, module=module) as world:
        one = world.fleet
        world.local.command += ["slow"]
        world.busy(6)
        one.round()
        await until(lambda: len(world.local.alive) == 3, "two on their way")
        world.busy(1)
        one.round()
        await until(lambda: len(world.local.alive) == 1, "ended")
        assert len(one.running) == 1 and one.starting == [] and one.target == 1


@in_loop
async def test_a_crashed_one_is_replaced_at_once_and_later_with_pauses(tmp_path, module=fleet):
    async with fleet_of(tmp_path, 2, 2, module=module) as world:
        one = world.fleet
        for times in range(1, 4):
            victim = one.running[0]
            victim.process.kill()
            await until(lambda: victim not in one.running, "noticed")  # noqa: B023
            assert victim.url not in world.router.pool.replicas
            pause = one._not_before - one.now
            one.round()
            assert one.target == 2 and one.history[-1].starting == 1
            assert (len(one.starting) == 1) == (times == 1) and pause <= 2**times - 2
            one._not_before = 0.0  # as if the pause were over
            one.round()
            await until(lambda: len(one.running) == 2, "replaced")
        one._failed -= 100  # a quiet minute later
        one._failure("again")
        assert one._not_before <= one.now


@in_loop
async def test_an_ill_one_with_nothing_to_do_is_replaced(tmp_path, module=fleet):
    async with fleet_of(tmp_path, 1, 1, module=module) as world:
        one, pool = world.fleet, world.router.pool
        ill = one.running[0]
        world.busy(1)
        (tmp_path / ill.url.rsplit(":", 1)[1]).touch()
        await until(lambda: not pool.replicas[ill.url].healthy, "found ill")
        one.round()
        assert one.running == [ill]  # it may still finish that one
        world.busy(0)
        one.round()
        await until(lambda: one.running and one.running != [ill], "replaced")
        await until(lambda: ill.process.returncode is not None, "stopped")


@in_loop
async def test_the_first_that_fails_ends_it_and_a_later_one_does_not(tmp_path, module=fleet):
    with pytest.raises(ReplicaFailed, match="no such model"):
        async with fleet_of(tmp_path, 1, 2, "broken", module=module):
            pass
    async with fleet_of(tmp_path, 1, 2, module=module) as world:
        one = world.fleet
        world.local.command += ["broken"]
        world.busy(4)
        one.round()
        await until(lambda: not one.starting, "failed")
        assert len(one.running) == 1 and one.target == 2 and "no such model" in world.said[-1]
        world.local.command.pop()
        one.round()
        await until(lambda: len(one.running) == 2, "the next try")


@in_loop
async def test_cancelled_it_stops_turning(tmp_path):
    async with fleet_of(tmp_path, 1, 2) as world:
        world.fleet.interval = 0.01
        turning = asyncio.create_task(world.fleet.run())
        await until(lambda: len(world.fleet.history) > 3, "it turns")
        turning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turning


# ---------------------------------------------------------------- the command
def arguments(*argv):
    parser = argparse.ArgumentParser()
    fleet.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_command_line_is_ray_serves_config():
    args = arguments(
        "--min", "2", "--max", "5", "--upscale-delay-s", "3", "--", "--model", "x", "--num-pages", "9"
    )
    assert fleet.config_of(args) == AutoscalingConfig(2, 5, upscale_delay_s=3.0)
    assert args.serve == ["--model", "x", "--num-pages", "9"]
    assert fleet.config_of(arguments("--replicas", "3")) == AutoscalingConfig(3, 3)
    assert fleet.config_of(arguments()) == AutoscalingConfig(1, 1)


def test_numbers_that_exclude_each_other_end_it(capsys):
    for argv, why in (
        ("--replicas 2 --max 3", "leave out"),
        ("--min 0", "use 1"),
        ("--min 3 --max 2", "max_replicas 2"),
    ):
        assert fleet.main(arguments(*argv.split())) == 2
        assert why in capsys.readouterr().err


# ---------------------------------------------------------------- wrong versions
WRONG = [
    ("it returns before the server answers", replicas, "                await answers\n", "                pass\n",
     "it_returns_when_the_server_answers_and_says_how_long_that_took"),
    ("no patience", replicas, "asyncio.timeout(self.patience)", "asyncio.timeout(None)",
     "a_server_that_cannot_start_says_why"),
    ("its last words are lost", replicas, "                replica.said.append(line)\n", "",
     "a_server_that_cannot_start_says_why"),
    ("too slow, but it lives on", replicas, "            await self.stop(replica, 0)\n            if", "            if",
     "a_start_that_is_cancelled_leaves_no_process"),
    ("it is killed without being asked", replicas, "process.terminate()", "process.kill()",
     "stopping_asks_first_and_insists_then"),
    ("nobody insists", replicas, "                process.kill()\n", "                pass\n",
     "stopping_asks_first_and_insists_then"),
    ("to be stopped is a crash", replicas, "elif not replica.stopping:", "else:",
     "stopping_asks_first_and_insists_then"),
    ("a crash is not told", replicas, "            self.on_crash(replica)\n", "            pass\n",
     "a_crash_is_told_once"),
    ("the block leaves them", replicas,
     "await asyncio.gather(*(self.stop(replica, 0) for replica in list(self.alive)))",
     "pass", "nobody_is_left_however_the_block_is_left"),
    ("those that start are not counted", fleet, "starting = self.target - running  #", "starting = 0  #",
     "it_grows_and_shrinks_with_what_is_under_way"),
    ("the busiest goes", fleet, "min(self.running, key", "max(self.running, key",
     "it_grows_and_shrinks_with_what_is_under_way"),
    ("who answers is not routed to", fleet, "            self.router.pool.add(replica.url)\n", "",
     "it_grows_and_shrinks_with_what_is_under_way"),
    ("who leaves stays known", fleet, "CLOSING_SECONDS)\n        self.router.pool.remove(replica.url)\n",
     "CLOSING_SECONDS)\n", "it_grows_and_shrinks_with_what_is_under_way"),
    ("who leaves is stopped at once", fleet, "await self.router.pool.drain(replica.url, self.drain_seconds)", "True",
     "who_leaves_finishes_what_it_has"),
    ("who leaves gets new requests", fleet, "        self.router.pool.replicas[replica.url].draining = True\n", "",
     "who_leaves_finishes_what_it_has"),
    ("starts are never called off", fleet, "self.starting.pop().cancel()", "self.starting.pop()",
     "who_is_no_longer_wanted_need_not_finish_starting"),
    ("a crash is not replaced", fleet, "        self._replace_the_ill()\n        self._match()\n",
     "        self._replace_the_ill()\n        self.target = len(self.running)\n",
     "a_crashed_one_is_replaced_at_once_and_later_with_pauses"),
    ("no pauses", fleet, "if missing > 0 and self.now >= self._not_before:", "if missing > 0:",
     "a_crashed_one_is_replaced_at_once_and_later_with_pauses"),
    ("a crashed one is still routed to", fleet, "        self.router.pool.remove(replica.url)\n        if replica in",
     "        if replica in", "a_crashed_one_is_replaced_at_once_and_later_with_pauses"),
    ("the ill stay", fleet, "        self._replace_the_ill()\n", "", "an_ill_one_with_nothing_to_do_is_replaced"),
    ("the ill go though they work", fleet, "if not seen.healthy and not seen.ongoing:", "if not seen.healthy:",
     "an_ill_one_with_nothing_to_do_is_replaced"),
    ("the first that fails is tried for ever", fleet,
     "                raise  # the very first", "                return  #",
     "the_first_that_fails_ends_it_and_a_later_one_does_not"),
]  # fmt: skip


@pytest.mark.parametrize("what, original, right, wrong, who", WRONG, ids=[w[0] for w in WRONG])
def test_wrong_fleets_are_noticed(what, original, right, wrong, who, tmp_path, monkeypatch):
    module = wrong_version(original, right, wrong)
    monkeypatch.setattr(fleet_world, "PATIENCE", 4.0)
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", True)  # of tasks that a failing test left
    with pytest.raises(
        (AssertionError, TimeoutError, ValueError, KeyError, RuntimeError, pytest.fail.Exception)
    ):
        globals()[f"test_{who}"](tmp_path, module=module)
    gc.collect()
