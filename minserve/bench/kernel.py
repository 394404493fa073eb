"""Time kernels side by side: through replayed graphs over rotating buffers on a GPU, as calls on a CPU."""

from collections.abc import Callable

import torch

from minserve.bench.common import Options, on_gpu
from minserve.lab.measure import clock, copies_beyond_cache, graph_clock, in_turn


def kernel_samples(options: Options, sides: dict[str, Callable], buffers: Callable, nbytes: int):
    """(seconds per call of each side, notes on sides that cannot run here).

    buffers() makes one set of arguments, of `nbytes` in all; each side is called with a set.
    """
    first = buffers()
    sides, notes = runnable(sides, first)
    if not on_gpu():
        calls = {who: lambda run=run: clock(lambda: run(*first)) for who, run in sides.items()}
        return in_turn(calls, repeats=options.repeats, at_most=options.at_most / 4), notes
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [first] + [buffers() for _ in range(copies_beyond_cache(nbytes, cache) - 1)]
    replays = {
        who: graph_clock([lambda run=run, own=own: run(*own) for own in sets]) for who, run in sides.items()
    }
    return in_turn(replays, warmup=3, repeats=options.repeats, at_most=options.at_most), notes


def runnable(sides: dict[str, Callable], arguments) -> tuple[dict[str, Callable], list[str]]:
    """The sides that run here. An opponent that this build lacks is named, not dropped in silence."""
    able, notes = {}, []
    for who, run in sides.items():
        try:
            run(*arguments)
        except RuntimeError as error:
            if who in ("minserve", "paged"):
                raise
            notes.append(f"{who} does not run here: {str(error).splitlines()[0]}")
        else:
            able[who] = run
    return able, notes
