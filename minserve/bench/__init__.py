"""The benchmarks: bound, measured, ratio, against transformers in the same run; JSON on request.

    python -m minserve bench decode [--json FILE] [--model NAME] [--dtype bfloat16] [--quick]
    python -m minserve bench all --json FOLDER
    python -m minserve bench table [--json FOLDER]         what `make gpu` recorded, once more; measures nothing

One module per benchmark, each `run(options) -> Report`. A bound is physics measured in the same process,
before and after (lab.roofline.ceilings); a ratio is the share of it that was reached. `--quick` proves that a
benchmark runs, and nothing else; `--tiny` does so with the cases of a GPU. `--seconds` is a budget.
"""

import sys
from pathlib import Path

from minserve.bench import (
    batching,
    chunked,
    cold_start,
    ctx_slope,
    decode,
    decode_attention,
    decode_quant,
    disaggregated,
    fleet_sim,
    gemv,
    goodput,
    gpu_table,
    inductor,
    knob,
    kv,
    linear,
    matmul,
    memory,
    offline,
    overhead,
    paged_attention,
    peers,
    peers_quant,
    prefill,
    prefill_attention,
    prefix,
    quality,
    roofline,
    simulator,
    spec,
    spec_cost,
    step,
)
from minserve.bench.common import Options, add_model_arguments
from minserve.kernels import INTERPRETED

BENCHES = {
    "roofline": roofline.run,
    "decode": lambda options: (decode_quant if options.quant else decode).run(options),
    "decode-quant": decode_quant.run,
    "prefill": prefill.run,
    "prefill-attention": prefill_attention.run,
    "decode-attention": decode_attention.run,
    "ctx-slope": ctx_slope.run,
    "cold-start": cold_start.run,
    "batching": batching.run,
    "offline": offline.run,
    "overhead": overhead.run,
    "prefix": prefix.run,
    "chunked": chunked.run,
    "goodput": goodput.run,
    "knob": knob.run,
    "disaggregated": disaggregated.run,
    "simulator": simulator.run,
    "fleet-sim": fleet_sim.run,
    "paged-attention": paged_attention.run,
    "gemv": gemv.run,
    "step": step.run,
    "linear": linear.run,
    "matmul": matmul.run,
    "memory": memory.run,
    "peers": peers.run,
    "peers-quant": peers_quant.run,
    "inductor": inductor.run,
    "kv": kv.run,
    "quality": quality.run,
    "spec": spec.run,
    "spec-cost": spec_cost.run,
}


def add_arguments(parser) -> None:
    parser.add_argument("name", choices=[*BENCHES, "all", "table"], help="what to measure")
    parser.add_argument(
        "--json", type=Path, help="write the report to this file (a folder for `all`, `table`)"
    )
    parser.add_argument(
        "--quant", choices=list(decode_quant.SCHEMES), help="`decode` only: quantized weights"
    )
    parser.add_argument(
        "--drafter", nargs="+", choices=spec.NAMES, help="`spec` only: who drafts (all there are)"
    )
    parser.add_argument("--k", type=int, help="`spec` only: tokens of a draft")
    parser.add_argument("--batch", nargs="+", type=int, help="`spec` only: requests at once (1 4 16)")
    only = "`peers` only, to measure it in the same run:"
    parser.add_argument("--vllm-python", help=f"{only} a Python that has vLLM")
    parser.add_argument("--llama-cpp", help=f"{only} the folder of llama.cpp's programs, or its llama-bench")
    parser.add_argument(
        "--llama-model", help="the model for llama.cpp, a GGUF file (`peers-quant`: two, by commas)"
    )
    add_model_arguments(parser)


def main(args) -> int:
    if args.name == "table":
        return gpu_table.show(args.json or gpu_table.RECORDED)
    names = list(BENCHES) if args.name == "all" else [args.name]
    if problem := refusal(args):
        print(f"bench: {problem}", file=sys.stderr)
        return 2
    for name in names:
        report = BENCHES[name](Options.of(args, name, f"bench {name}"))
        print(report.table() + "\n", flush=True)
        if args.json:
            report.save(args.json / f"{name}.json" if args.name == "all" else args.json)
    return 0


def refusal(args) -> str | None:
    """What makes measuring pointless or impossible, said before any work is done."""
    if INTERPRETED:
        return (
            "TRITON_INTERPRET=1 is set, and the interpreter's times are not kernel times; unset it to measure"
        )
    if args.json and args.name == "all" and args.json.is_file():
        return f"--json {args.json} is a file, and `all` writes one file per benchmark: give a folder"
    if args.json and args.name != "all" and args.json.is_dir():
        return f"--json {args.json} is a folder: give a file, such as {args.json / (args.name + '.json')}"
    its_own = {"peers": peers.refusal, "all": peers.refusal, "peers-quant": peers_quant.refusal}
    return its_own[args.name](args) if args.name in its_own else None
