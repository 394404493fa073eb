"""Definition, kernel, launcher: one file per operation, and the rule that picks between them.

    CUDA tensor                                     the Triton kernel, compiled
    CPU tensor and TRITON_INTERPRET=1               the same kernel, interpreted: slow, exact, debuggable
    everything else (and everything without Triton) the definition, plain PyTorch

Every launcher checks its arguments first, so a mistake gives the same message on all three roads.
Kernel files write `from minserve.kernels import tl, triton`: where Triton is not installed (macOS, Windows)
those names are a stand-in under which a kernel can be defined and never launched.
"""

import os
from functools import cache

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:

    class _Absent:
        """Just enough of Triton for `@triton.jit` and `: tl.constexpr` to be read and ignored."""

        constexpr = object

        @staticmethod
        def jit(function):
            return function

    triton = tl = _Absent()
    HAS_TRITON = False

# Triton reads the variable when it is imported and so do we: setting it later changes nothing.
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "architecture",
    "check_alike",
    "check_match",
    "check_packed",
    "has_matrix_units",
    "on_triton",
    "processors",
    "tl",
    "triton",
]


def on_triton(tensor) -> bool:
    """Triton runs on CUDA tensors, and on CPU tensors when it is interpreted. Nothing else decides.

    One exception: the interpreter keeps bfloat16 as raw 16-bit integers, and a `tl.dot` of those is garbage.
    """
    if INTERPRETED:
        return tensor.dtype is not torch.bfloat16
    return HAS_TRITON and tensor.is_cuda


@cache
def architecture(device: torch.device) -> str:
    """What the kernel will be compiled for: "sm_90", "gfx942", or "interpreter"."""
    if INTERPRETED or device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors that can each hold a program; the interpreter plays a small GPU of 16."""
    if INTERPRETED or device.type != "cuda":
        return 16
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_matrix_units(dtype: torch.dtype, arch: str) -> bool:
    """Does `tl.dot` become matrix instructions there? If not, it is multiply-adds and wants small tiles.

    fp32 does not on NVIDIA: exactness is promised ("ieee"), and the tensor cores would round to tf32. Turing
    (sm_75) has tensor cores, but Triton has no path to them.
    """
    if arch.startswith("gfx"):
        return True
    return arch.startswith("sm_") and arch != "sm_75" and dtype.itemsize <= 2


def check_alike(who: str, **tensors) -> None:
    """All of one dtype and on one device, or a ValueError that says which is not."""
    (first, x), *others = tensors.items()
    for name, y in others:
        if y.dtype != x.dtype or y.device != x.device:
            raise ValueError(
                f"{who}: {first} is {x.dtype} on {x.device}, but {name} is {y.dtype} on {y.device}; "
                f"convert one with .to()"
            )


def check_packed(who: str, dims: int, **tensors) -> None:
    """The last `dims` dimensions lie in memory without gaps, so `offset = (a * B + b) * C + c` holds."""
    for name, x in tensors.items():
        expected = 1
        for size, stride in zip(reversed(x.shape[-dims:]), reversed(x.stride()[-dims:])):
            if size != 1 and stride != expected:
                raise ValueError(
                    f"{who}: {name} {list(x.shape)} has strides {list(x.stride())}; its last {dims} "
                    f"dimension(s) must be contiguous (stride {expected}, not {stride}); "
                    f"pass {name}.contiguous()"
                )
            expected *= size


def check_match(who: str, dtype, **expected) -> None:
    """Each (tensor, shape) has that shape and dtype, its last dimension without gaps, on the CPU; or is None."""
    for name, (x, shape) in expected.items():
        if x is not None and (
            x.shape != shape or x.dtype != dtype or not x.is_cpu or (x.stride() or (1,))[-1] != 1
        ):
            raise ValueError(
                f"{who}: {name} is {list(x.shape)} {x.dtype} on {x.device} with strides {list(x.stride())}; it must "
                f"be {list(shape)} {dtype} on cpu, the last stride 1, to go with the other arguments"
            )
