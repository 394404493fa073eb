"""Clocks inside a step: seconds of native kernels, PyTorch's operations, a GPU's kernels, by the part they are of.

    timed(compute, seconds)     inside, every native call, recorded or not, adds its time to its part
    operations(work)            the self times of PyTorch's operations, from its profiler
    kernels(work)               the same of a GPU's kernels

A name decides: what no table knows is a small op. Cost: two clock reads per native call.
"""

import contextlib
import os
import time
from collections import defaultdict
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # the profiler would write a line of its own at every start and end

NATIVE = {"linear": "weights", "attend": "attention", "best": "sampling"}  # the others are small
OPERATIONS = {  # PyTorch's on a CPU, without "aten::"; the others are small
    "weights": "linear matmul mm addmm bmm _linear_pointwise",
    "attention": "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_attention_math _softmax index_select repeat_interleave",
    "dispatch": "view as_strided transpose reshape t expand select slice flatten unsqueeze squeeze empty empty_like "
    "empty_strided resolve_conj narrow unbind split split_with_sizes chunk detach numpy_T permute alias",
}
KERNELS = {  # what a GPU kernel's name gives away: the first that fits; the others are small
    "weights": ("gemm", "gemv", "cutlass", "nvjet", "splitk", "cublas"),
    "attention": ("attention", "flash", "fmha", "decode", "prefill", "softmax"),
    "sampling": ("sample", "argmax", "draw"),
}


def all_native(compute, batch) -> bool:
    """Whether the step is native kernels and nothing else, so that no profiler is needed."""
    model = getattr(compute, "model", None)
    return bool(
        model and model.native and len(batch.ids) <= model.few and batch.num_singles == len(batch.counts)
    )


@contextlib.contextmanager
def timed(compute, seconds: dict[str, float]):
    """Inside, every call of a native kernel, recorded or not, adds its time to the part that it belongs to."""
    model = getattr(compute, "model", None)
    if not model or not model.native:
        yield
        return
    functions, recorded = model.ops._functions, [s.replay for s in getattr(compute, "steps", {}).values()]
    before, plays = dict(functions), [one.play for one in recorded]
    for (name, dtype), f in before.items():
        functions[name, dtype] = watched(f, NATIVE.get(name, "small ops"), seconds)
    with_clock = {id(f): functions[key] for key, f in before.items()}
    for one in recorded:
        one.play = partial(one_by_one, [(with_clock[id(f)], arguments) for f, arguments, _ in one.calls])
    try:
        yield
    finally:
        functions.update(before)
        for one, play in zip(recorded, plays):
            one.play = play


def one_by_one(calls) -> None:
    for function, arguments in calls:
        function(*arguments)


def watched(function, part: str, seconds: dict[str, float]):
    now = time.perf_counter

    def call(*arguments):
        start = now()
        function(*arguments)
        seconds[part] += now() - start

    return call


def part_of_operation(name: str) -> str:
    name = name.rsplit("::", 1)[-1]
    return next((part for part, names in OPERATIONS.items() if name in names.split()), "small ops")


def part_of_kernel(name: str) -> str:
    name = name.lower()
    return next((part for part, words in KERNELS.items() if any(w in name for w in words)), "small ops")


def operations(work) -> dict[str, float]:
    """Seconds per part."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    seconds: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        seconds[part_of_operation(event.key)] += event.self_cpu_time_total / 1e6
    return seconds


def kernels(work) -> dict[str, float]:
    """Seconds per part of everything that ran on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    seconds: dict[str, float] = defaultdict(float)
    for event in profiled.events():
        if event.device_type == DeviceType.CUDA:
            span = event.time_range
            seconds[part_of_kernel(event.name)] += (span.end - span.start) / 1e6
    return seconds
