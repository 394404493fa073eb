"""Compile every kernel for GPUs that are not here, and count what the compiler made of it.

    python -m minserve.kernels.compile_report            prints the table
    python -m minserve.kernels.compile_report --write    and writes figures/data/compile_report.json

One row per kernel, head size, dtype and architecture:

    registers   per thread; 255 is the most NVIDIA has, 512 AMD
    spills      bytes per thread that did not fit in registers and went to memory
    shared      bytes of on-chip memory per program; the limit is per architecture
    widest      bits of the widest global load
    wide        share of the loaded bytes that come in 128-bit loads (each instruction counted once)
    mma         matrix instructions: mma.sync (NVIDIA), wgmma (Hopper's, four warps at a time), mfma (AMD)

Sources  Triton compiles ahead of time through ASTSource and GPUTarget; its wheel has ptxas and cuobjdump.
Story    notebooks/04_flash_attention.ipynb
"""

import argparse
import json
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from minserve.kernels import decode_attention as decode
from minserve.kernels import (
    kv_write,
    pack,
    paged_attention,
    paged_prefill,
    prefill_attention,
    rms_norm,
    rope,
    sample,
    silu_mul,
    stream,
    triton,
)

TABLE = Path(__file__).parents[2] / "figures" / "data" / "compile_report.json"
SHARED_LIMIT = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
HEADS = dict(H=32, G=8)  # Llama-3.1-8B: a group of 4
PAGE = 16  # slots per page
ANY = ("splits", "tokens", "pages_stride", "halvings")  # integers that need not be multiples of 16


def cases(arch: str, dtype: str) -> list[tuple]:
    """(label, kernel, {argument: type}, {constexpr: value}, options): as their launchers call them."""
    x = f"*{dtype}"
    rows = [
        ("rms_norm", rms_norm._rms_norm_kernel,
         _types(f"x {x} weight {x} out {x}", "x_stride residual_stride"),
         dict(residual_ptr=None, total_ptr=None, E=4096, BLOCK_E=4096), dict(num_warps=8)),
        ("add_rms_norm", rms_norm._rms_norm_kernel,
         _types(f"x {x} residual {x} weight {x} out {x} total {x}", "x_stride residual_stride"),
         dict(E=4096, BLOCK_E=4096), dict(num_warps=8)),
        ("silu_mul", silu_mul._silu_mul_kernel, _types(f"gate {x} up {x} out {x}", "gate_stride up_stride"),
         dict(C=14336, BLOCK_C=silu_mul.BLOCK_C), {}),
        ("kv_write", kv_write._kv_write_kernel,
         _types(f"k {x} v {x} k_cache {x} v_cache {x} slots *i64",
                "k_stride v_stride k_cache_stride v_cache_stride"),
         dict(ROW=1024, BLOCK=1024), dict(num_warps=2)),
        ("copy", stream._copy_kernel, _types(f"src {x} dst {x}", "numel"),
         dict(TILE=stream.TILE), dict(num_warps=8)),
        ("total", stream._total_kernel, _types(f"x {x} sums *fp32", "numel"),
         dict(TILE=stream.TILE), dict(num_warps=8)),
        ("pack", pack._pack_kernel,
         _types("seats *i32 starts *i32 computed *i32 tokens *i32 pages *i32 ids *i64 positions *i64 slots *i64",
                "rows halvings total tokens_stride pages_stride"),
         dict(S=PAGE, BLOCK=pack.BLOCK), {}),
        ("sample", sample._sample_kernel,
         _types(f"logits {x} temperature *fp32 top_k *i64 top_p *fp64 min_p *fp64 seeds *i64 positions *i64 out *i64",
                "logits_stride"),
         dict(V=49_152, BLOCK=sample.BLOCK), dict(num_warps=8)),
    ]  # fmt: skip
    for D in (64, 128):
        rows += _head_cases(arch, dtype, x, D) + _paged_cases(arch, dtype, x, D)
    return rows


def _head_cases(arch, dtype, x, D):
    rotate = dict(HEADS, HALF=D // 2, BLOCK_H=32, BLOCK_G=8, BLOCK_HALF=D // 2)
    pointers = f"q {x} k {x} v {x} out {x} starts_q *i32 starts_k *i32"
    strides = "q_stride k_stride v_stride"
    block = prefill_attention.tiles(D, DTYPES[dtype], arch)
    split = decode.tiles(D, DTYPES[dtype], arch, HEADS["H"] // HEADS["G"])
    for_decode = _types(
        f"q {x} k {x} v {x} lengths *i32 out *fp32 lse *fp32",
        "q_stride k_stride_b k_stride_s v_stride_b v_stride_s splits",
    )
    return [
        (f"rope {D}", rope._rope_kernel,
         _types(f"q {x} k {x} cos *fp32 sin *fp32 q_out {x} k_out {x}", "q_stride k_stride"),
         rotate, dict(num_warps=min(8, 32 * D // 2 // 512))),
        (f"prefill_attention {D}", prefill_attention._prefill_attention_kernel, _types(pointers, strides),
         dict(HEADS, D=D, WINDOW=None, SINKS=0, **block), {}),
        (f"prefill_attention {D} window", prefill_attention._prefill_attention_kernel,
         _types(pointers, strides),
         dict(HEADS, D=D, WINDOW=4096, SINKS=4, **block), {}),
        (f"decode_attention {D}", decode._decode_attention_kernel, for_decode,
         dict(HEADS, D=D, **split), {}),
        (f"decode merge {D}", decode._merge_kernel, _types(f"partial *fp32 lse *fp32 out {x}", "rows splits"),
         dict(D=D, TILE=decode.MERGE_TILE, BLOCK_D=D), {}),
    ]  # fmt: skip


def _paged_cases(arch, dtype, x, D):
    pointers = f"q {x} k {x} v {x} pages *i32 starts_q *i32 lengths *i32 out"
    strides = "q_stride k_stride_p k_stride_s v_stride_p v_stride_s pages_stride"
    chunk, chunk_types = paged_prefill._paged_prefill_kernel, _types(f"{pointers} {x}", strides)
    step, step_types = (
        paged_attention._paged_decode_kernel,
        _types(f"{pointers} *fp32 lse *fp32", f"{strides} tokens splits"),
    )
    block = paged_prefill.tiles(D, DTYPES[dtype], arch)
    one, many = (
        paged_attention.tiles(D, DTYPES[dtype], arch, queries * HEADS["H"] // HEADS["G"])
        for queries in (1, paged_attention.MOST_QUERIES)
    )
    plain = dict(HEADS, D=D, S=PAGE, WINDOW=None, SINKS=0)
    window = plain | dict(WINDOW=4096, SINKS=4)
    rows = [
        (f"paged_decode {D}", step, step_types, plain | one, {}),
        (f"paged_prefill {D}", chunk, chunk_types, plain | block, {}),
    ]
    if many != one:  # 16 queries are 64 rows; without matrix units they take four programs instead
        rows += [(f"paged_decode {D} drafts", step, step_types, plain | many, {})]
    if D == 128:
        rows += [
            (f"paged_decode {D} window", step, step_types, window | one, {}),
            (f"paged_prefill {D} window", chunk, chunk_types, window | block, {}),
        ]
    return rows


def _types(pointers: str, integers: str) -> dict:
    words = pointers.split()
    return {f"{name}_ptr": kind for name, kind in zip(words[::2], words[1::2])} | {
        n: "i32" for n in integers.split()
    }


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
    return triton.compile(source, target=_target(arch), options=launch | options)


def _target(arch: str):
    from triton.backends.compiler import GPUTarget

    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def count(compiled, arch: str) -> dict:
    """The numbers of one row, read out of the assembly and the binary."""
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
        loads += [
            8 * int(size, 0)
            for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x\w+|\d+)", asm)
        ]
    instructions = {"mma.sync": "mma.sync.aligned", "wgmma": "wgmma.mma_async", "mfma": "v_mfma_"}
    matrix = {name: asm.count(text) for name, text in instructions.items()}
    wide = sum(bits for bits in loads if bits >= 128) / max(1, sum(loads))
    return dict(
        registers=registers, spills=spills, shared=compiled.metadata.shared, widest=max(loads, default=0),
        wide=round(wide, 2), **matrix,
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


def rows_for(job: tuple[str, str]) -> list[dict]:
    arch, dtype = job
    rows = []
    for label, kernel, types, constants, options in cases(arch, dtype):
        compiled = compile_for(arch, kernel, types, constants, options)
        rows.append(dict(kernel=label, dtype=dtype, arch=arch, **count(compiled, arch)))
    return rows


def report(processes: int = 2) -> dict:
    """Every row, compiled afresh in `processes` processes (about a minute and a half with 2)."""
    jobs = [(arch, dtype) for arch in ("sm_90", "sm_80", "gfx942") for dtype in DTYPES] + [("sm_75", "fp16")]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        rows = [row for rows in pool.map(rows_for, jobs) for row in rows]
    return dict(triton=triton.__version__, rows=rows)


def broken_gates(row: dict) -> list[str]:
    """What is wrong with one row, in words. An empty list lets it pass."""
    kernel, arch, wrong = row["kernel"], row["arch"], []
    if row["spills"]:
        wrong.append(f"{row['spills']} spilled")
    if row["shared"] > SHARED_LIMIT[arch]:
        wrong.append(f"{row['shared']:,} bytes of shared memory, {arch} has {SHARED_LIMIT[arch]:,}")
    if row["widest"] < 128 and kernel != "pack":  # pack gathers single numbers
        wrong.append(f"widest load is {row['widest']} bits, not 128")
    attention = kernel.startswith(("prefill_attention", "decode_attention", "paged_"))
    # Without asynchronous copies a look into the table, 4 bytes, stands beside every two loads of 16 bytes.
    least = 0.7 if kernel.startswith("paged_decode 64") and arch == "gfx942" else 0.8
    if attention and row["wide"] < least:
        wrong.append(f"only {row['wide']:.0%} of the bytes come in 128-bit loads")
    if attention and row["dtype"] != "fp32" and arch != "sm_75":
        # wgmma wants 64 rows; a step of decode has as many only when it verifies drafts
        hopper = "wgmma" if "prefill" in kernel or "drafts" in kernel else "mma.sync"
        needed = {"sm_80": "mma.sync", "sm_90": hopper, "gfx942": "mfma"}[arch]
        if not row[needed]:
            wrong.append(f"no {needed} instruction")
    return wrong


def table(report: dict) -> str:
    columns = list(report["rows"][0])
    lines = [
        [f"{row[c]:,}" if isinstance(row[c], int) else str(row[c]) for c in columns] for row in report["rows"]
    ]
    widths = [max(map(len, column)) for column in zip(columns, *lines)]
    align = [str.ljust] * 3 + [str.rjust] * (len(columns) - 3)
    text = ["  ".join(a(c, w) for a, c, w in zip(align, line, widths)) for line in [columns, *lines]]
    return "\n".join([f"triton {report['triton']}", *text])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="compile every kernel without a GPU and count registers and loads"
    )
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(TABLE.parents[2])}")
    args = parser.parse_args()
    made = report()
    print(table(made))
    broken = [(row, wrong) for row in made["rows"] if (wrong := broken_gates(row))]
    for row, wrong in broken:
        print(f"[FAIL] {row['kernel']} {row['dtype']} {row['arch']}: {'; '.join(wrong)}")
    if args.write:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join("  " + json.dumps(row) for row in made["rows"])
        TABLE.write_text(f'{{"triton": "{made["triton"]}", "rows": [\n{lines}\n]}}\n')
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    main()
