"""The rows of the compile report for kernels that multiply quantized weights, and what is asked of them.

    cases(arch, dtype)      Llama-3.1-8B's down projection, 4,096 x 14,336: 4 bits in groups of 128 with zeros,
                            8 bits with a scale per row; in bf16 by all numbers of rows, else by the fewest
    least_wide(row)         the share of loaded bytes that must come 128 bits at a time
Story    notebooks/09_quantization.ipynb
"""

import torch

from minserve.kernels import packed_matmul as packed
from minserve.kernels import w8a8_matmul as w8a8

N, K, GROUP = 4096, 14336, 128
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def cases(arch: str, dtype: str) -> list[tuple]:
    """(label, kernel, {argument: type}, {constexpr: value}, options): as their launchers call them."""
    x, its, rows, every = f"*{dtype}", DTYPES[dtype], [], dtype == "bf16"
    integers = dict.fromkeys("x_stride words_stride w_stride N magic tokens splits numel".split(), "i32")
    for bits, group, zeros in ((4, GROUP, "*u8"), (8, None, None)):
        types = integers | dict(x_ptr=x, words_ptr="*i32", scales_ptr=x, zeros_ptr=zeros, out_ptr=x)
        weight = dict(BITS=bits, K=K, GROUP=packed.group_of(group, K))
        plain = weight | ({} if zeros else dict(zeros_ptr=None))
        for M in (1, packed.GEMV_ROWS) if every else (1,):
            block = packed.gemv_tiles(bits, N, K, group, its, arch, 132)
            rows.append(
                (f"int{bits} gemv {M}", packed._gemv_kernel, types, plain | dict(bias_ptr=None, M=M) | block)
            )
        for M in (16, 64) if every else (16,):
            block = packed.dot_tiles(bits, M, its, arch)
            to = types | dict(out_ptr="*fp32")
            rows.append((f"int{bits} dot {M}", packed._dot_kernel, to, plain | dict(bias_ptr=None) | block))
        rows.append(
            (f"int{bits} dequantize", packed._dequantize_kernel, types, plain | dict(BLOCK=packed.BLOCK))
        )
    sums = integers | dict(parts_ptr="*fp32", out_ptr=x)
    rows.append(("add_splits", packed._add_splits_kernel, sums, dict(BLOCK=packed.BLOCK_SUM)))
    if arch != "sm_75":
        pointers = dict(x_ptr="*i8", x_scales_ptr="*fp32", w_ptr="*i8", w_scales_ptr="*fp32", out_ptr=x)
        for M in (16, 512) if every else (16,):
            block = dict(bias_ptr=None, K=K) | w8a8.tiles(M, arch)
            rows.append((f"w8a8 {M}", w8a8._w8a8_kernel, integers | pointers, block))
    return [
        (
            label,
            kernel,
            {name: kind for name, kind in types.items() if name in kernel.arg_names},
            constants,
            {},
        )
        for label, kernel, types, constants in rows
    ]


def weights_of(label: str, constants: dict) -> int | None:
    """How many weights a thread takes in one turn of its loop, where it works on them one by one."""
    if "gemv" not in label:
        return None
    return (
        constants["ROWS"]
        * constants.get("WORDS", 1)
        * (32 // constants["BITS"] if "BITS" in constants else constants["VEC"])
    )


def least_wide(row: dict) -> float:
    """Scales are single numbers; where no asynchronous copies load the words, they weigh more among the loads."""
    kernel = row["kernel"]
    if kernel.startswith("int") and "dot" in kernel:
        return 0.8 if row["copies"] else 0.45
    return 0.8 if "gemv" in kernel else 0.0


NAIVE = {  # as compile_report.NAIVE
    ("int4 gemv 1", "one row, one word per load"): (dict(ROWS=1, WORDS=1), ("wide", "operations")),
    ("int4 dot 16", "one stage"): (dict(num_stages=1), ("copies",)),
}  # fmt: skip
