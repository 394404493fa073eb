"""Compile every kernel for GPUs that are not here, and hold the counts against gates.

    python -m minserve.kernels.compile_report            prints the table
    python -m minserve.kernels.compile_report --write    and writes figures/data/compile_report.json

One row per kernel, head size, dtype and architecture:

    registers   per thread; 255 is the most NVIDIA has, 512 AMD
    spills      bytes per thread that did not fit in registers and went to memory
    shared      bytes of on-chip memory per program; the limit is per architecture
    occupancy   warps a processor holds / warps it has room for, as registers and shared memory permit
    widest      bits of the widest global load
    wide        share of the loaded bytes that come in 128-bit loads (each instruction counted once)
    copies      loads that go to shared memory by themselves while the kernel computes (cp.async)
    mma         matrix instructions: mma.sync (NVIDIA), wgmma (Hopper's, four warps at a time), mfma (AMD)
    operations  integer, logic and conversion instructions per weight, in kernels that multiply a weight matrix

Rows named "..., naive: ..." are the same kernel as one would first write it, in bf16 for sm_80 and sm_90: what
they lose on is in NAIVE, and a test holds the tuned row to being better on just these counts. Occupancy is among
them where it is what hides latency; a kernel with `copies` under way needs few warps, and may have fewer.
Story    notebooks/04_flash_attention.ipynb
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from zlib import crc32

import torch

from minserve.kernels import compile_matmul as matmul
from minserve.kernels import decode_attention as decode
from minserve.kernels import (
    gemv,
    kv_quantize,
    kv_write,
    pack,
    paged_attention,
    paged_prefill,
    prefill_attention,
    quantized_attention,
    quantized_prefill,
    rms_norm,
    rope,
    rope_and_write,
    sample,
    silu_mul,
    stream,
    triton,
    verify,
)
from minserve.kernels.compile_counts import compile_for, count

TABLE = Path(__file__).parents[2] / "figures" / "data" / "compile_report.json"
SHARED_LIMIT = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ARCHS = ("sm_90", "sm_80", "gfx942")  # in every dtype; sm_75 in fp16 only
HEADS = dict(H=32, G=8)  # Llama-3.1-8B: a group of 4
PAGE = 16  # slots per page


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
         dict(STREAM=0, V=49_152, BLOCK=sample.BLOCK), dict(num_warps=8)),
        ("verify", verify._verify_kernel,
         _types(f"logits {x} chances *fp32 drafts *i64 temperature *fp32 top_k *i64 top_p *fp64 min_p *fp64 "
                "seeds *i64 positions *i64 out *i64", "logits_stride chances_stride"),
         dict(ACCEPT=verify.ACCEPT, V=49_152, BLOCK=verify.BLOCK), dict(num_warps=8)),
        ("walk", verify._walk_kernel,
         _types("tokens *i64 ids *i64 parents *i32 starts *i32 accepted *i1 path *i64", "most"),
         dict(BLOCK=verify.MOST_PLACES), dict(num_warps=1)),
    ]  # fmt: skip
    rows += [  # Llama-3.1-8B's fused projection, on an H100
        (f"gemv {M}", gemv._gemv_kernel,
         _types(f"x {x} weight {x} out {x}", "x_stride weight_stride N"),
         dict(bias_ptr=None, M=M, K=4096, **gemv.tiles(6144, 4096, DTYPES[dtype], arch, 132)), {})
        for M in (1, gemv.MOST_ROWS_OF_X)
    ]  # fmt: skip
    for D in (64, 128):
        for more in (_head_cases, _paged_cases, _quantized_cases):
            rows += more(arch, dtype, x, D)
    rows += matmul.cases(arch, dtype)
    return rows


def _head_cases(arch, dtype, x, D):
    rotate = dict(HEADS, HALF=D // 2, BLOCK_H=32, BLOCK_G=8, BLOCK_HALF=D // 2)
    pointers = f"q {x} k {x} v {x} out {x} starts_q *i32 starts_k *i32"
    strides = "q_stride k_stride v_stride"
    block = prefill_attention.tiles(D, DTYPES[dtype], arch)
    split = decode.tiles(D, DTYPES[dtype], arch, HEADS["H"] // HEADS["G"])
    fused = _types(
        f"qkv {x} turns *fp32 positions *i64 slots *i64 q_norm {x} k_norm {x} q_out {x} k_cache {x} v_cache {x}",
        "qkv_stride k_cache_stride v_cache_stride",
    )
    group = dict(HEADS, HALF=D // 2, BLOCK_R=8, BLOCK_HALF=D // 2)
    warps = dict(num_warps=8 * D // 512)
    for_decode = _types(
        f"q {x} k {x} v {x} lengths *i32 out *fp32 lse *fp32",
        "q_stride k_stride_b k_stride_s v_stride_b v_stride_s splits",
    )
    return [
        (f"rope {D}", rope._rope_kernel,
         _types(f"q {x} k {x} cos *fp32 sin *fp32 q_out {x} k_out {x}", "q_stride k_stride"),
         rotate, dict(num_warps=min(8, 32 * D // 2 // 512))),
        (f"rope_and_write {D}", rope_and_write._rope_and_write_kernel, fused,
         group | dict(q_norm_ptr=None, k_norm_ptr=None), warps),
        (f"rope_and_write {D} norms", rope_and_write._rope_and_write_kernel, fused, group, warps),
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
    plain, chains = dict(HEADS, D=D, S=PAGE, WINDOW=None, SINKS=0), dict(trees_ptr=None)
    window = plain | dict(WINDOW=4096, SINKS=4)
    rows = [
        (f"paged_decode {D}", step, step_types, plain | chains | one, {}),
        (f"paged_decode {D} tree", step, step_types | dict(trees_ptr="*i64"), plain | one, {}),
        (f"paged_prefill {D}", chunk, chunk_types, plain | block, {}),
    ]
    if many != one:  # 16 queries are 64 rows; without matrix units they take four programs instead
        rows += [(f"paged_decode {D} drafts", step, step_types, plain | chains | many, {})]
    if D == 128:
        rows += [
            (f"paged_decode {D} window", step, step_types, window | chains | one, {}),
            (f"paged_prefill {D} window", chunk, chunk_types, window | block, {}),
        ]
    return rows


def _quantized_cases(arch, dtype, x, D):
    """Over int8, 4-bit and, where the type exists, fp8 pages; and what fills them. In bf16 all of them."""
    rows, every = [], dtype == "bf16"
    kinds = {"int8": "*i8", "int4": "*u8"} | ({"fp8": "*fp8e4nv"} if every and arch != "sm_80" else {})
    for kind, stored in kinds.items() if every or D == 128 else ():
        page, factor = (PAGE, "*fp16") if kind == "int4" else (None, "*fp32")
        fresh, none = f"fresh_k {x} fresh_v {x}", dict(fresh_k_ptr=None, fresh_v_ptr=None, home_ptr=None)
        pointers = f"q {x} k {stored} v {stored} k_scales {factor} v_scales {factor} {fresh} home *i64"
        pointers += " pages *i32 starts_q *i32 lengths *i32 out"
        plain = dict(HEADS, D=D, S=PAGE, WINDOW=None, SINKS=0) | ({} if page else none)
        step = _types(f"{pointers} *fp32 lse *fp32", "q_stride pages_stride tokens splits")
        one = quantized_attention.tiles(D, DTYPES[dtype], arch, HEADS["H"] // HEADS["G"], page)
        kernel = quantized_attention._quantized_decode_kernel
        rows += [(f"paged_decode {D} {kind}", kernel, step, plain | dict(trees_ptr=None) | one, {})]
        if not page:
            tree = step | dict(trees_ptr="*i64")
            rows += [(f"paged_decode {D} tree {kind}", kernel, tree, plain | one, {})]
        if D == 64:
            continue
        chunk = _types(f"{pointers} {x}", "q_stride pages_stride")
        block = quantized_prefill.tiles(D, DTYPES[dtype], arch, page)
        if every:
            kernel = quantized_prefill._quantized_prefill_kernel
            rows += [(f"paged_prefill {D} {kind}", kernel, chunk, plain | block, {})]
        if page:
            full = _types(f"{fresh} starts *i64 pages *i64 k4 *u8 v4 *u8 k_affine *fp16 v_affine *fp16", "")
            shape = dict(S=PAGE, G=8, HALF=D // 2, BLOCK_HALF=D // 2)
            rows += [("seal", kv_quantize._seal_kernel, full, shape, {})]
        else:
            slots = f"k_cache {stored} v_cache {stored} k_scales *fp32 v_scales *fp32 slots *i64"
            write = _types(f"k {x} v {x} {slots}", "k_stride v_stride")
            shape = dict(G=8, D=D, LARGEST=127.0, **kv_quantize.tiles(8, D))
            rows += [(f"kv_write {kind}", kv_quantize._kv_write_scaled_kernel, write, shape, {})]
    return rows


NAIVE = {  # (kernel, what is naive) -> (what differs, the counts on which the tuned one is better)
    ("rms_norm", "one warp"): (dict(num_warps=1), ("occupancy", "registers")),
    ("prefill_attention 128", "tiles of 16"): (
        dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1), ("copies", "wgmma"),
    ),
    ("prefill_attention 128", "one stage"): (dict(num_stages=1), ("copies",)),
    ("prefill_attention 128", "all in 4 warps"): (dict(BLOCK_N=128, num_warps=4), ("spills",)),
    ("prefill_attention 128", "keys anywhere"): (dict(unaligned=("k_stride", "v_stride")), ("wide", "copies")),
    ("decode_attention 128", "one stage"): (dict(num_stages=1), ("copies",)),
    ("paged_decode 128", "one stage"): (dict(num_stages=1), ("copies",)),
    ("paged_decode 128", "pages anywhere"): (
        dict(unaligned=("k_stride_p", "v_stride_p")), ("wide", "copies"),
    ),
    ("gemv 1", "one row, one number per load"): (dict(ROWS=1, VEC=1), ("widest", "wide", "operations")),
    **matmul.NAIVE,
}  # fmt: skip
WORD_BY_WORD = (
    "pack",
    "walk",
    "int4 dequantize",
    "int8 dequantize",
)  # single numbers; what these write is the traffic
LESS_IS_BETTER = ("registers", "spills", "operations")


def beats(tuned: dict, naive: dict, counted: str) -> bool:
    if counted in LESS_IS_BETTER:
        return tuned[counted] < naive[counted]
    return tuned[counted] > naive[counted]


def _types(pointers: str, integers: str) -> dict:
    words = pointers.split()
    return {f"{name}_ptr": kind for name, kind in zip(words[::2], words[1::2])} | {
        n: "i32" for n in integers.split()
    }


def labels_of(arch: str, dtype: str, sample: bool = False) -> list[str]:
    """All rows; or bf16's, and of fp16 and fp32 a third on each architecture, so that each row has its turn on one."""
    labels, every = [label for label, *_ in cases(arch, dtype)], dtype == "bf16" or arch not in ARCHS
    turn = 0 if every else ARCHS.index(arch) + (dtype == "fp32")
    return [x for x in labels if not sample or every or crc32(x.encode()) % len(ARCHS) == turn % len(ARCHS)]


def rows_for(job: tuple[str, str, bool]) -> list[dict]:
    arch, dtype, _ = job
    rows = [row_of(arch, dtype, label) for label in labels_of(*job)]
    if dtype == "bf16" and arch in ("sm_80", "sm_90"):
        rows += [naive_row(arch, label, what) for label, what in NAIVE]
    return rows


def row_of(arch: str, dtype: str, label: str, unaligned: tuple = (), **changes) -> dict:
    """One row of the table, with something changed if asked for."""
    _, kernel, types, constants, options = next(c for c in cases(arch, dtype) if c[0] == label)
    constants = constants | changes
    compiled = compile_for(arch, kernel, types, constants, options, unaligned)
    return dict(
        kernel=label, dtype=dtype, arch=arch, **count(compiled, arch, matmul.weights_of(label, constants))
    )


def naive_row(arch: str, label: str, what: str) -> dict:
    changes, _ = NAIVE[label, what]
    return row_of(arch, "bf16", label, **changes) | dict(kernel=f"{label}, naive: {what}")


def report(processes: int = 2, sample: bool = False) -> dict:
    """Every row, or those of labels_of's sample, compiled afresh in `processes` processes."""
    jobs = [(arch, dtype, sample) for arch in ARCHS for dtype in DTYPES] + [("sm_75", "fp16", sample)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        rows = [row for rows in pool.map(rows_for, jobs) for row in rows]
    return dict(triton=triton.__version__, rows=rows)


def broken_gates(row: dict) -> list[str]:
    """What is wrong with one row, in words. An empty list lets it pass."""
    kernel, arch, wrong = row["kernel"], row["arch"], []
    if "naive" in kernel:
        return []
    if row["spills"]:
        wrong.append(f"{row['spills']} spilled")
    if row["shared"] > SHARED_LIMIT[arch]:
        wrong.append(f"{row['shared']:,} bytes of shared memory, {arch} has {SHARED_LIMIT[arch]:,}")
    # pack gathers single numbers; what quantises, or reads 4 bits of 64 channels, takes 64 bits at a time on AMD
    halves = kernel.startswith(("kv_write ", "seal", "paged_decode 64 int4")) and arch == "gfx942"
    if row["widest"] < (64 if halves else 128) and kernel not in WORD_BY_WORD:
        wrong.append(f"widest load is {row['widest']} bits, not 128")
    attention = kernel.startswith(("prefill_attention", "decode_attention", "paged_"))
    streams = attention or kernel.startswith("gemv")
    # Without asynchronous copies a look into the table, 4 bytes, stands beside every two loads of 16 bytes.
    least = 0.7 if kernel.startswith("paged_decode 64") and arch == "gfx942" else 0.8
    if kernel.endswith("int4"):
        least = 0.6 if arch == "sm_75" else 0.7
    if kernel.endswith(
        ("int8", "fp8")
    ):  # scales beside every key; values go to mma.sync's registers 8 at a time
        least = 0.1 if arch == "gfx942" else 0.35  # there keys do, too
    if " tree" in kernel:  # each row's word, loaded once
        least = min(least, 0.65)
    least = 0.0 if halves else least
    if streams and row["wide"] < least:
        wrong.append(f"only {row['wide']:.0%} of the bytes come in 128-bit loads")
    if row["wide"] < matmul.least_wide(row):
        wrong.append(f"only {row['wide']:.0%} of the bytes come in 128-bit loads")
    quantized = " dot " in kernel or kernel.startswith("w8a8")
    if (attention or quantized) and row["dtype"] != "fp32" and arch != "sm_75":
        # wgmma wants 64 rows; a step of decode has as many only when it verifies drafts
        hopper = "wgmma" if quantized or "prefill" in kernel or "drafts" in kernel else "mma.sync"
        needed = {"sm_80": "mma.sync", "sm_90": hopper, "gfx942": "mfma"}[arch]
        if not row[needed]:
            wrong.append(f"no {needed} instruction")
    return wrong


def table(report: dict) -> str:
    columns = list(report["rows"][0])
    lines = [
        ["" if row[c] is None else f"{row[c]:,}" if isinstance(row[c], int) else str(row[c]) for c in columns]
        for row in report["rows"]
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
