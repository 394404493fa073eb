"""Look inside: a kernel's source in pieces, a module with one line changed, a call's peak memory.

    show(kernel, start, stop)     prints the source from one landmark to the next
    mutant(module, old, new)      the module, loaded again with one piece of its source replaced
    peak_bytes(run)               the most memory in use during run(), above what was in use before
    plain_seconds(run)            a stopwatch for plain PyTorch in a process where Triton is interpreted
    layer_inputs(model, ids)      the queries, keys and values that reach attention in each layer

`measure.clock` refuses to run under TRITON_INTERPRET=1, so that no interpreter time passes for a kernel time.
`plain_seconds` is for what no kernel is part of.

Story    notebooks/04_flash_attention.ipynb
"""

import importlib.util
import inspect
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil
import torch

from minserve.prefill_decode import attend_afresh


def show(kernel, start: str, stop: str | None = None) -> None:
    """Print its source from the line that contains `start` to the one before `stop`, or to the end."""
    lines = inspect.getsource(getattr(kernel, "fn", kernel)).splitlines()  # Triton keeps the function in .fn
    begin = next((i for i, line in enumerate(lines) if start in line), None)
    end = next((i for i, line in enumerate(lines) if stop and stop in line and i > (begin or 0)), len(lines))
    if begin is None or (stop and end == len(lines)):
        raise ValueError(
            f"show: no line with {start!r}, or none with {stop!r} after it, in {len(lines)} lines"
        )
    print("\n".join(lines[begin:end]).rstrip())


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with `old`, which must occur exactly once, replaced by `new`. The original stays."""
    source = inspect.getsource(module)
    if source.count(old) != 1:
        raise ValueError(
            f"mutant: {old!r} must occur once in {module.__name__}; it occurs {source.count(old)} times"
        )
    path = Path(tempfile.mkdtemp()) / "mutant.py"  # a file, because Triton reads a kernel's source again
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"mutant_of_{module.__name__}", path)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed


def peak_bytes(run: Callable[[], object]) -> int:
    """On a GPU PyTorch keeps this statistic; on a CPU a second thread watches the size of the process."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    process, done, sizes = psutil.Process(), threading.Event(), []
    size = lambda: sizes.append(process.memory_info().rss)  # noqa: E731

    def watch():
        while not done.wait(0.0005):
            size()

    watcher = threading.Thread(target=watch)
    size()
    watcher.start()
    while len(sizes) < 2:  # until it looks: on a busy machine a thread may start late
        time.sleep(0.0005)
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(sizes) - sizes[0]


def plain_seconds(run: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds after one call that does not count. For plain PyTorch only: no Triton kernel in it."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    taken = []
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        run()
        wait()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def layer_inputs(model, ids: list[int]) -> dict[int, tuple]:
    """{layer: (q [T, H, D], k [T, G, D], v [T, G, D])} in fp32, of one pass over these token ids."""
    seen, inner = {}, attend_afresh(model.config)

    def attend(layer, *qkv):
        seen[layer] = tuple(x.float() for x in qkv)
        return inner(layer, *qkv)

    device = model.device
    with torch.inference_mode():
        positions = torch.arange(len(ids), device=device)
        model(torch.tensor(ids, device=device), positions, attend, rows=positions[-1:])
    return seen
