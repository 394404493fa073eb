"""Peak memory of a fresh process that loads a model and serves it from 2,048 tokens of pages, and what it is made of.

    limit      1.2 GB for the default model in bf16
    imports    Python, torch and minserve
    weights    the file is mapped: a page of it counts once it was read. q, k, v and gate, up are copied side by
               side, after which the system may drop those pages of the file, and does when it needs them
    packed     a CPU without matrix units holds the layers a second time, in blocks; elsewhere 0
    pages      keys and values
    steps      the activations of the recorded steps
    rest       tokenizer, buffers, pages of the file that were copied, and what matmuls keep

What is counted is resident memory at its highest (VmHWM where Linux tells; the resource module's number starts at
what the parent process had). Three processes, one sample each.
"""

import json
import subprocess
import sys
from pathlib import Path

from minserve.bench.common import Options, label
from minserve.lab.report import Report, Row

LIMIT = 1.2e9  # bytes
PAGES, PAGE = 128, 16
PARTS = ("imports", "weights", "packed", "pages", "steps", "rest")

SERVES = "import json, sys; from minserve.bench import memory; print(json.dumps(memory.serve(*sys.argv[1:])))"


def run(options: Options) -> Report:
    report, samples = options.report(), [measured(options) for _ in range(1 if options.quick else 3)]
    peaks = [its["peak"] for its in samples]
    case = f"{label(options.model)} {options.dtype_name}, {PAGES * PAGE:,} tokens of pages"
    report.add(Row(f"{case}: peak", "GB", [peak / 1e9 for peak in peaks], note=samples[0]["held"]))
    report.add(Row(f"{case}: 1.2 GB / peak", "x", [LIMIT / peak for peak in peaks], 1.0, 1.0))
    for part in PARTS:
        report.add(Row(f"{case}: {part}", "GB", [its[part] / 1e9 for its in samples]))
    return report


def measured(options: Options) -> dict:
    """What a process of its own found. Raises RuntimeError with its message when it fails."""
    command = [sys.executable, "-c", SERVES, options.dtype_name, options.model or ""]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"bench memory: the process that should be measured failed:\n{done.stderr[-1000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def peak() -> int:
    """Bytes of resident memory, the most so far."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def serve(dtype: str, model: str) -> dict:
    """Load, answer a short prompt, one of 512 tokens and a batch; return bytes: the peak and its parts."""
    from minserve import fetch, weights
    from minserve.engine import LLM
    from minserve.request import SamplingParams
    from minserve.text import Tokenizer

    parts = {"imports": peak()}
    folder = fetch.resolve(model or None)
    loaded = weights.load(folder, weights.DTYPES[dtype])
    llm = LLM(loaded, Tokenizer.load(folder), num_pages=PAGES, page_size=PAGE)
    few = SamplingParams(max_tokens=16, ignore_eos=True)
    long = list(range(1, 513))
    for prompts in ("The sky is", [long], [long[i : i + 40] for i in range(32)]):
        llm.generate(prompts, few, progress=False)
    fused = getattr(llm.compute, "model", None)
    parts |= {
        "weights": sum(weight.nbytes for weight in loaded.parameters()),
        "packed": fused.packed_bytes if fused else 0,
        "pages": llm.cache.nbytes,
        "steps": sum(bytes_of(step.replay.calls, loaded, llm.cache) for step in recorded(llm)),
    }
    twice = "twice: as they are, and in blocks" if parts["packed"] else "once"
    return parts | {"peak": peak(), "rest": peak() - sum(parts.values()), "held": f"weights held {twice}"}


def recorded(llm) -> list:
    steps = getattr(llm.compute, "steps", {}).values()
    return [step for step in steps if hasattr(step.replay, "calls")]


def bytes_of(calls: list, model, cache) -> int:
    """Activations that a recording keeps: what its calls point into and nobody else owns."""
    owned = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *cache.k, *cache.v)}
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage()
        for *_, tensors in calls
        for x in tensors
        if x is not None
    }
    return sum(storage.nbytes() for at, storage in storages.items() if at not in owned)
