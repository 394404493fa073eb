"""Time a callable honestly: warm up, wait for the device, repeat, keep every sample, say where it ran.

    measure("one step", step)              -> Timing: every sample, median, p10, p90, middle half
    in_turn({"ours": a, "theirs": b})      two sides alternately, order reversed each round, so that a machine
                                           that grows warm or busy is unfair to neither
    measure_graph("kernel", launches)      a kernel without its launch: replays of a CUDA graph over buffers
                                           that together exceed the L2 cache four times

Refuses  to time anything under TRITON_INTERPRET=1: the interpreter runs kernels line by line in Python, and
         its seconds say nothing about a GPU. Count bytes, flops and launches there instead.
Story    notebooks/00_the_machine.ipynb
"""

import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from minserve.kernels import INTERPRETED
from minserve.metrics import percentile


@dataclass(frozen=True)
class Timing:
    name: str
    seconds: list[float]  # every repeat, in order: the reader may want the tail
    where: str  # the CPU's or GPU's own name

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def p10(self) -> float:
        return percentile(self.seconds, 10)

    @property
    def p90(self) -> float:
        return percentile(self.seconds, 90)

    @property
    def middle_half(self) -> tuple[float, float]:
        return percentile(self.seconds, 25), percentile(self.seconds, 75)

    def __str__(self) -> str:
        low, high = self.middle_half
        ms = f"{self.median * 1e3:9.3f} ms   middle half {low * 1e3:.3f} to {high * 1e3:.3f} ms"
        return f"{self.name:<28} {ms}   n={len(self.seconds)}"


def where_am_i() -> str:
    """The machine in its own words: a number without it means nothing."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")  # Linux; elsewhere platform knows a shorter name
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def clock(run: Callable[[], object]) -> float:
    """Seconds of one call, device included."""
    if INTERPRETED:
        raise RuntimeError(
            "measure: TRITON_INTERPRET=1 is set, and the interpreter's times are not kernel times.\n"
            "  Unset it to measure, or count bytes, flops and launches instead."
        )
    wait = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
    wait()
    start = time.perf_counter()
    run()
    wait()  # a launch returns before the kernel does
    return time.perf_counter() - start


def measure(
    name: str, run: Callable[[], object], *, warmup: int = 3, repeats: int = 20, at_most: float = math.inf
) -> Timing:
    """Time `repeats` calls after `warmup` unmeasured ones; stop after `at_most` seconds, but not below 3."""
    if warmup < 0 or repeats < 1:
        raise ValueError(f"measure {name!r}: warmup={warmup} must be >= 0 and repeats={repeats} >= 1")
    for _ in range(warmup):  # compilation, autotuning, cold caches: not the subject
        clock(run)
    return Timing(name, collect({name: lambda: clock(run)}, repeats, at_most)[name], where_am_i())


def in_turn(
    sides: dict[str, Callable[[], float]],
    *,
    warmup: int = 1,
    repeats: int = 20,
    at_most: float = math.inf,
    each: Callable[[int, int], None] | None = None,
) -> dict[str, list[float]]:
    """What each side measured of itself, in alternating order: a b, b a, a b, ... so drift hits both.

    each(done, of) is called after every round, for a progress line.
    """
    start = time.perf_counter()
    for _ in range(warmup):
        for run in sides.values():
            run()
    return collect(sides, repeats, at_most - (time.perf_counter() - start), each)


def collect(sides, repeats: int, at_most: float, each=None) -> dict[str, list[float]]:
    samples = {name: [] for name in sides}
    order, deadline = list(sides), time.perf_counter() + at_most
    for done in range(repeats):
        if done >= 3 and time.perf_counter() > deadline:
            break
        for name in order:
            samples[name].append(sides[name]())
        order.reverse()
        if each:
            each(done + 1, repeats)
    return samples


# ---------------------------------------------------------------- a kernel without its launch
def copies_beyond_cache(nbytes: int, cache: int) -> int:
    """How many buffers of `nbytes` to rotate through so that each is evicted before its turn comes again."""
    return max(2, math.floor(4 * cache / nbytes) + 1)


def measure_graph(name: str, launches: list[Callable[[], object]], *, repeats: int = 20) -> Timing:
    """Seconds per launch, from replays of one CUDA graph of at least 20 launches.

    launches: one callable per set of buffers, each the same work on its own memory (copies_beyond_cache says
    how many sets are needed). A Triton launch from Python costs more than many a kernel; a replay omits it.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(f"measure_graph {name!r}: no CUDA device here; measure() works anywhere.")
    return Timing(name, in_turn({name: graph_clock(launches)}, repeats=repeats)[name], where_am_i())


def graph_clock(launches: list[Callable[[], object]]) -> Callable[[], float]:
    """Capture the launches, at least 20 in all; what is returned replays them: seconds per launch."""
    rounds = math.ceil(20 / len(launches))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and tune outside the capture
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    return lambda: clock(graph.replay) / (rounds * len(launches))


def _nothing() -> None:
    """The CPU has finished when it returns."""
