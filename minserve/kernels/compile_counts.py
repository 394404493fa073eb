"""One kernel compiled for a GPU that is not here, and what can be counted in it.

    compile_for(arch, kernel, ...)       the compiled kernel: PTX and a cubin, or AMD's assembly
    count(compiled, arch)                registers, spills, shared memory, loads, matrix instructions, occupancy
    occupancy(arch, registers, ...)      warps a processor can hold / warps it has room for
    operations_per_weight(ptx, weights)  what a weight costs before it can be multiplied

Sources  Triton compiles ahead of time through ASTSource and GPUTarget; its wheel has ptxas and cuobjdump.
         NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and the sections on
         shared memory of 8.x and 9.0; register allocation as in CUDA's own cuda_occupancy.h.
Story    notebooks/04_flash_attention.ipynb
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from minserve.kernels import triton

ANY = ("splits", "tokens", "pages_stride", "halvings", "most")  # integers that need not be multiples of 16


class Processor(NamedTuple):
    """What one streaming multiprocessor has."""

    warps: int
    blocks: int
    shared: int  # bytes
    reserved: int  # of them, per block, for the system
    registers: int = 65_536


PROCESSORS = {
    "sm_75": Processor(32, 16, 64 << 10, 0),
    "sm_80": Processor(64, 32, 164 << 10, 1 << 10),
    "sm_90": Processor(64, 32, 228 << 10, 1 << 10),
}


def occupancy(arch: str, registers: int, shared: int, warps: int) -> float | None:
    """Warps resident on a processor / the most it can have, for programs of `warps` warps. None on AMD.

    Four things run out: room for warps, room for blocks, shared memory, and registers. These are handed out per
    warp in units of 256, from four files of 16,384, one for each quarter of the processor. More is not always
    better: a kernel that keeps bytes under way by asynchronous copies needs few warps to do so.
    """
    if arch not in PROCESSORS:
        return None
    has = PROCESSORS[arch]
    per_warp = _up(registers * 32, 256)
    held = has.registers // 4 // per_warp * 4  # warps
    unit = 256 if arch == "sm_75" else 128
    room = has.shared // max(1, _up(shared + has.reserved, unit))  # blocks
    blocks = min(has.warps // warps, has.blocks, held // warps, room)
    return round(blocks * warps / has.warps, 2)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


# ---------------------------------------------------------------- compiling
def compile_for(arch: str, kernel, types: dict, constants: dict, options: dict, unaligned: tuple = ()):
    """The compiled kernel. Pointers and integers are declared multiples of 16, as they are in real models."""
    launch = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    constants = {name: value for name, value in constants.items() if name not in launch}
    names = kernel.arg_names
    signature = {
        n: "constexpr" if n in constants else types.get(n, "fp32") for n in names
    }  # fp32: eps, scale
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n in types and n not in (*ANY, *unaligned)
    }
    source = triton.compiler.ASTSource(
        kernel, signature, {(names.index(n),): value for n, value in constants.items()}, attrs
    )
    return triton.compile(source, target=_target(arch), options=options | launch)


def _target(arch: str):
    from triton.backends.compiler import GPUTarget

    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


# ---------------------------------------------------------------- counting
def count(compiled, arch: str, weights: int | None = None) -> dict:
    """The numbers of one row, read out of the assembly and the binary.

    weights: how many a thread takes in one turn of its loop, in kernels that multiply a weight matrix.
    """
    copies, shared = [], compiled.metadata.shared
    if arch.startswith("gfx"):
        asm = compiled.asm["amdgcn"]
        number = lambda key: int(re.search(rf"\.{key}:\s*(\d+)", asm)[1])  # noqa: E731
        registers, spills = number("vgpr_count"), number("private_segment_fixed_size")
        loads = [32 * int(n or 1) for n in re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?\b", asm)]
        loads += [16 for _ in re.findall(r"(?:global|buffer)_load_(?:u|s)?(?:short|byte)", asm)]
    else:
        asm = compiled.asm["ptx"]
        registers, spills = _resources(compiled.asm["cubin"])
        vectors = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[a-z](\d+)\s", asm)
        loads = [int(n or 1) * int(bits) for n, bits in vectors]
        sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x\w+|\d+)", asm)
        copies = [8 * int(size, 0) for size in sizes]
    everything = loads + copies
    instructions = {"mma.sync": "mma.sync.aligned", "wgmma": "wgmma.mma_async", "mfma": "v_mfma_"}
    matrix = {name: asm.count(text) for name, text in instructions.items()}
    wide = sum(bits for bits in everything if bits >= 128) / max(1, sum(everything))
    return dict(
        registers=registers, spills=spills, shared=shared,
        occupancy=occupancy(arch, registers, shared, compiled.metadata.num_warps),
        widest=max(everything, default=0), wide=round(wide, 2), copies=len(copies), **matrix,
        operations=operations_per_weight(asm, weights) if weights and not arch.startswith("gfx") else None,
    )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    number = lambda key: int(re.search(rf"{key}:(\d+)", text)[1])  # noqa: E731
    return number("REG"), number("STACK") + number("LOCAL")


INTEGER = re.compile(
    r"(?:and|or|xor|not|shl|shr|shf|bfe|bfi|lop3|prmt|cvt|dp4a|"
    r"(?:add|sub|mul|mad|mul24|mad24|min|max|abs|neg)(?:\.\w+)*?\.[sub]\d+)\b"
)


def operations_per_weight(ptx: str, weights: int) -> float:
    """Integer, logic and conversion instructions per weight, in the loop that loads most.

    Addresses and the conversion of x are counted too, and ptxas may still merge a few: it is a count to compare
    kernels by. A bf16 weight needs one, its conversion to fp32; so the number says little yet. It will say
    something of packed weights: shifting, masking and converting each 4-bit weight by itself takes four, and
    tricks on two at a time half of one.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if re.match(r"\$\w+:", line)}
    jumps = [(i, re.search(r"\bbra\S*\s+(\$\w+)", line)) for i, line in enumerate(lines)]
    loops = [lines[labels[to[1]] : i] for i, to in jumps if to and labels.get(to[1], i) < i]
    if not loops:
        raise ValueError("no loop in this kernel: nothing is repeated, so there is no count per turn")
    body = max(loops, key=lambda lines: sum("ld.global" in line or "cp.async" in line for line in lines))
    operations = sum(bool(INTEGER.match(re.sub(r"^@!?%p\d+\s+", "", line))) for line in body)
    return round(operations / weights, 2)
