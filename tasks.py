#!/usr/bin/env python3
"""Everything one does with this repository: python tasks.py NAME, or make NAME. Standard library only.

Each task is a function below, and each works as the first command on a fresh machine: it makes .venv and
installs requirements.txt into it, unless a stamp says that this Python has already installed just these.
(Only `gpu` and `clean` do not: the first runs with the Python it is given, the second needs nothing.)
This file alone stays readable to old Pythons, so that they can be told which one is needed.
"""

import ast
import hashlib
import io
import os
import shutil
import subprocess
import sys
import time
import tokenize
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "installed"
TIMES = ROOT / "build" / "times"  # of tests: one JUnit file a step
OLDEST = (3, 11)
BUDGETS = {
    "core": 2950,
    "quantization": 1000,
    "speculation": 1000,
    "kernels": 3200,
}  # lines of code, floors 0 to 7
PARTS_OF = {  # what has a budget of its own
    "quantization": "quantization gptq awq smoothquant calibration quantized_files quantized_cache quantized_linear",
    "speculation": "speculation pace draft_model medusa drafters trained",
    "kernels": "kernels",
}
PART = {unit: part for part, units in PARTS_OF.items() for unit in units.split()}
NOT_CORE = set(
    "lab bench cluster __main__ chat doctor quantize server metrics simulator async_engine train".split()
    + "arrivals protocol structured serve ray_serve".split()  # serving has no budget: much of it is its door
)
NOT_CORE |= {"study", "training", "self_text"}  # how trained parts come about
NOT_CORE |= {"fetch", "sources"}  # how a model comes to this machine: nothing about serving it
TWO = ["-n", str(min(2, os.cpu_count() or 1)), "--dist", "loadfile"]  # files side by side, each on one thread
TWO += ["--no-loadscope-reorder"]  # as they come: a file of few long tests would be left for the end
TWO += ["--max-worker-restart=0"]  # else a test that takes its process down is begun again and again
ALONE = {"OMP_NUM_THREADS": "1"}
WIDGET = "application/vnd.jupyter.widget-view+json"
BENCHES = "decode decode-quant prefill step overhead paged-attention batching prefix chunked kv".split()
GPU_BENCHES = BENCHES + [
    "prefill-attention",
    "ctx-slope",
    "offline",
    "matmul",
]  # make bench; make gpu has its own list
CPU_BENCHES = BENCHES + [
    "roofline",
    "cold-start",
    "linear",
    "matmul",
    "memory",
    "peers",
    "inductor",
    "quality",
    "knob",
    "goodput",
    "disaggregated",
    "simulator",
    "fleet-sim",
]  # what a machine without a GPU has something to say about


# ---------------------------------------------------------------- tasks
def run_():
    """set up, then: one streamed chat answer, the ladder measured on this machine, figures/ladder.png"""
    setup()
    prompt = "In two sentences, why is the sky blue?"
    module("fetch")
    module("chat", "--prompt", prompt, "--stats")
    module("ladder")
    print(f"\nThe ladder is drawn in {ROOT / 'figures' / 'ladder.png'}")
    print("Next: `make lab` opens the notebooks; `python -m minserve chat` (in .venv) keeps talking.")


def test():
    """set up, then every check: lint, floors, definitions, kernels interpreted and compiled, notebooks"""
    setup()
    shape = ["tests/test_floors.py", "tests/test_notebooks.py"]
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").glob("test_*.py"))
    parts = {  # by the name's first letter, so that one sees on a slow machine how far it is
        f"definitions, {first} to {last}": [
            file
            for file in files
            if first <= Path(file).name[5] <= last and Path(file).as_posix() not in shape
        ]
        for first, last in ("ae", "fr", "sz")
    }
    notebooks = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    # the C++ kernels and the definitions are the same there: the step after it has them
    interpreted = pytest("tests/kernels", "--ignore-glob=*/test_native*.py", *TWO, *times("interpreted"))
    interpreted += ["--ignore=tests/kernels/test_definitions.py"]
    compiled = pytest("tests/kernels", *TWO, *times("compiled"))
    steps = [
        ("lint", [py("-m", "ruff", "check", "."), py("-m", "ruff", "format", "--check", ".")], {}),
        ("floors and shape", [pytest(*shape)], {}),
        ("model", [py("-m", "minserve", "fetch")], {}),
        *((name, [pytest(*its, *TWO, *times(name))], ALONE) for name, its in parts.items()),
    ]
    if has_triton():
        steps += [
            ("kernels, interpreted", [interpreted], {"TRITON_INTERPRET": "1"} | ALONE),
            ("kernels, compiled", [compiled], ALONE),
        ]
    else:
        print(f"No triton for {sys.platform}: kernels are neither interpreted nor compiled here.")
        steps.append(("kernels' definitions", [compiled], ALONE))
    # lax: every cell must run, and those marked NBVAL_CHECK_OUTPUT must print what is recorded
    steps.append(("notebooks", [pytest("--nbval-lax", *notebooks, *times("notebooks"))], {}))
    steps.append(("size", [py("tasks.py", "lines")], {}))
    shutil.rmtree(str(TIMES), ignore_errors=True)
    results = [step(i, len(steps), *what) for i, what in enumerate(steps, 1)]
    print_slowest()
    finish(results)


def quick():
    """the inner loop, under 90 seconds: lint, floors, what is not marked slow, kernels on small shapes"""
    setup()
    fast = ["-m", "not slow", "-q", "-x"]
    steps = [
        ("lint", [py("-m", "ruff", "check", "."), py("-m", "ruff", "format", "--check", ".")], {}),
        ("definitions", [pytest("tests", "--ignore=tests/kernels", *fast)], {}),
    ]
    if has_triton():
        steps.append(("kernels, interpreted", [pytest("tests/kernels", *fast)], {"TRITON_INTERPRET": "1"}))
    finish([step(i, len(steps), *what) for i, what in enumerate(steps, 1)])


def lab():
    """JupyterLab on the notebooks"""
    setup()
    module("fetch")
    check(py("-m", "jupyterlab", "notebooks"))


def serve(*args):
    """the OpenAI-compatible server and its page at http://127.0.0.1:8000; ARGS="--port 9000 ..." """
    setup()
    module("fetch")
    module("serve", *args)


def ray():
    """the same server as replicas of Ray Serve, started and tested on this machine; installs Ray into .venv first"""
    setup()
    check(py("-m", "pip", "--disable-pip-version-check", "install", "-q", "-e", ".[ray]"))
    check(pytest("tests/test_ray.py", "-q", "--durations=3"))


def bench():
    """every benchmark this machine can run, JSON under figures/data/"""
    setup()
    module("fetch")
    finish(benchmarks(str(PYTHON), GPU_BENCHES if has_cuda(str(PYTHON)) else CPU_BENCHES))


def gpu(*args):
    """kernels' tests and benchmarks on a CUDA machine, one table; PYTHON=..., installs nothing, no network"""
    python = sys.executable
    if "cpu" in args:  # a dry run: ARGS="--device cpu --tiny"
        setup()
        python = str(PYTHON)
    elif not has_cuda(python):
        stop(
            f"{python} has no torch that sees a CUDA device.\n"
            "  Give another one: make gpu PYTHON=/path/to/python\n"
            "  It needs torch 2.11 to 2.13 with triton, transformers, safetensors, numpy, tqdm, matplotlib, pytest.\n"
            '  Without such a machine, the same flow in miniature: make gpu ARGS="--device cpu --tiny"'
        )
    # the package is not installed into a Python that is not ours
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    sys.exit(subprocess.call([python, "-m", "minserve.bench.gpu"] + list(args), cwd=str(ROOT), env=env))


def notebooks():
    """execute every notebook in place, in a clean kernel, and strip what would differ on another machine"""
    setup()
    module("fetch")
    check(py("tasks.py", "execute"))


def figures():
    """draw figures/*.png again from the recorded numbers in figures/data/: measures nothing"""
    setup()
    check(py("-m", "minserve.bench.redraw"))


def clean():
    """remove .venv and caches; the fetched model in ~/.cache/minserve stays"""
    for path in [VENV, ROOT / ".pytest_cache", ROOT / ".ruff_cache", ROOT / ".hypothesis", ROOT / "build"]:
        shutil.rmtree(str(path), ignore_errors=True)
    for path in [
        *ROOT.glob("*.egg-info"),
        *ROOT.glob("minserve/**/__pycache__"),
        *ROOT.glob("tests/**/__pycache__"),
    ]:
        shutil.rmtree(str(path), ignore_errors=True)


def help_():
    """this list"""
    print("make NAME, or python tasks.py NAME\n")
    for name, task in TASKS.items():
        print(f"  {name:<10} {task.__doc__}")


# ---------------------------------------------------------------- parts of tasks, run inside .venv
def lines():
    """The package on floors 0 to 7 in lines of code, part by part, against their budgets."""
    totals = dict.fromkeys(BUDGETS, 0)
    for path in sorted((ROOT / "minserve").rglob("*.py")):
        unit = path.relative_to(ROOT / "minserve").with_suffix("").parts[0]
        if unit not in NOT_CORE and not path.name.startswith("compile_"):
            count = code_lines(path.read_text(encoding="utf-8"))
            totals[PART.get(unit, "core")] += count
            print(f"  {count:5}  {path.relative_to(ROOT).as_posix()}")
    for part, budget in BUDGETS.items():
        print(f"  {totals[part]:5}  of {budget} lines of code: {part}")
    over = [f"{part} by {totals[part] - budget}" for part, budget in BUDGETS.items() if totals[part] > budget]
    if over:
        stop(f"Over budget: {', '.join(over)} lines. Simplify before adding.")


def code_lines(text):
    """Lines that are neither blank nor comment nor docstring: no budget is met by explaining less."""
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, False) is not None:
            found.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(found)


def execute():
    """Run notebooks top to bottom in fresh kernels; keep outputs, drop timestamps and widget state."""
    import nbformat
    from nbclient import NotebookClient

    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        print(f"{path.name:<40}", end="", flush=True)
        start = time.time()
        book = nbformat.read(str(path), as_version=4)
        NotebookClient(
            book, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
        ).execute()
        book.metadata = {
            "kernelspec": book.metadata.get("kernelspec", {}),
            "language_info": {"name": "python"},
        }
        for number, cell in enumerate(book.cells):
            cell.id, cell.metadata = f"cell-{number:02}", {}
            if cell.cell_type == "code":  # a widget without its kernel shows as nothing
                cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {})]
        nbformat.write(book, str(path))
        print(f"{time.time() - start:6.1f} s")


# ---------------------------------------------------------------- set-up
def setup():
    """Make .venv and install the requirements, once."""
    if sys.version_info < OLDEST:
        stop(
            f"minserve needs Python 3.11 or newer; this is {sys.version.split()[0]} ({sys.executable}).\n"
            "  Run it with another one: make PYTHON=python3.12 NAME, or python3.12 tasks.py NAME."
        )
    wanted = fingerprint()
    if STAMP.is_file() and STAMP.read_text() == wanted and works(PYTHON):
        return
    start = time.time()
    if not works(PYTHON):
        make_venv()
    print("Installing requirements.txt into .venv (the first time this downloads torch) ...", flush=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install"]
    for command in (pip + ["-r", "requirements.txt"], pip + ["-q", "--no-deps", "-e", "."]):
        if subprocess.call(command, cwd=str(ROOT), stdin=subprocess.DEVNULL):
            stop(
                f"Installing failed; tried: {' '.join(command)}\n"
                "  No network: set PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER, a folder with the wheels.\n"
                "  A proxy: set HTTPS_PROXY. A mirror: set PIP_INDEX_URL.\n"
                "  Disk full: torch needs 1 GB (CPU) to 6 GB (CUDA), and as much in TMPDIR on the way.\n"
                "  A damaged .venv: make clean, then again."
            )
    STAMP.write_text(wanted)
    print(f"Set up in {time.time() - start:.0f} s.", flush=True)


def fingerprint():
    text = "".join(
        (ROOT / name).read_text(encoding="utf-8") for name in ("requirements.txt", "pyproject.toml")
    )
    return hashlib.sha256(f"{text} {sys.version} {ROOT}".encode()).hexdigest()


def works(python):
    return (
        python.is_file()
        and subprocess.call([str(python), "-c", "import pip"], stderr=subprocess.DEVNULL) == 0
    )


def make_venv():
    print(f"Making .venv with {sys.executable} ...", flush=True)
    shutil.rmtree(str(VENV), ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "venv", str(VENV)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode or not works(PYTHON):
        shutil.rmtree(str(VENV), ignore_errors=True)
        said = done.stdout.decode(errors="replace").strip()[-400:]
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        stop(
            f"{sys.executable} cannot make a virtual environment:\n    {said}\n"
            f"  Debian and Ubuntu keep that in a package of its own: sudo apt-get install {package}\n"
            "  Or use another Python: make PYTHON=/path/to/python NAME."
        )


# ---------------------------------------------------------------- running things
def py(*args):
    return [str(PYTHON)] + list(args)


def pytest(*args):
    """nbval starts slowly, and only the notebooks need it."""
    return py("-m", "pytest", *([] if "--nbval-lax" in args else ["-p", "no:nbval"]), *args)


def module(*args):
    check(py("-m", "minserve", *args))


def check(command):
    code = subprocess.call(command, cwd=str(ROOT))
    if code:
        stop(f"{' '.join(command)} ended with {code}.", code)


def has_triton():
    return subprocess.call(py("-c", "import triton"), stderr=subprocess.DEVNULL) == 0


def has_cuda(python):
    look = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.call([python, "-c", look], stderr=subprocess.DEVNULL) == 0


def benchmarks(python, names):
    """One step per benchmark; one that fails does not stop the next."""
    (ROOT / "figures" / "data").mkdir(parents=True, exist_ok=True)
    device = "gpu" if has_cuda(python) else "cpu"
    results = []
    for i, name in enumerate(names, 1):
        into = f"figures/data/{name.replace('-', '_')}_{device}.json"
        command = [python, "-m", "minserve", "bench", name, "--json", into]
        results.append(step(i, len(names), "bench " + name, [command], {"PYTHONPATH": str(ROOT)}))
    return results


def step(number, of, name, commands, variables):
    """Run one step, its output visible, and say how long it took: (name, seconds, exit code)."""
    print(f"\n=== {number}/{of}  {name}", flush=True)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env.update(variables)
    if not name.startswith("bench"):
        env.setdefault(
            "OMP_WAIT_POLICY", "PASSIVE"
        )  # beside other jobs, threads that spin while waiting stall torch
    start, code = time.time(), 0
    for command in commands:
        code = subprocess.call(command, cwd=str(ROOT), env=env, stdin=subprocess.DEVNULL) or code
    return name, time.time() - start, code


def times(name):
    """Have pytest write to TIMES how long each test of this step took."""
    return ["-o", "junit_family=xunit1", f"--junit-xml={TIMES / name}.xml"]


def print_slowest(number=12):
    """Where the time of a `make test` went: its slowest files, and the slowest test of each."""
    files = {}
    for report in sorted(TIMES.glob("*.xml")):
        for case in ElementTree.parse(str(report)).iter("testcase"):
            tests = files.setdefault((report.stem, case.get("file")), [])
            tests.append((float(case.get("time")), case.get("name")))
    print(f"\n=== the slowest {number} of {len(files)} files, in seconds of one process")
    for (name, file), tests in sorted(files.items(), key=lambda item: -sum(t for t, _ in item[1]))[:number]:
        longest, test = max(tests)
        print(f"  {sum(t for t, _ in tests):7.1f}  {file} ({name}); {longest:.1f} of them {test[:70]}")


def finish(results):
    print("\n=== summary")
    for name, seconds, code in results:
        print(f"  {'FAILED' if code else 'ok':<6} {name:<24} {seconds:7.1f} s")
    failed = [name for name, _, code in results if code]
    failures = f"{len(failed)} of {len(results)} steps failed: {', '.join(failed)}"
    print("  " + (failures if failed else "all passed"))
    sys.exit(1 if failed else 0)


def stop(message, code=1):
    print("\n" + message, file=sys.stderr, flush=True)
    sys.exit(code)


TASKS = {
    "run": run_,
    "test": test,
    "lab": lab,
    "serve": serve,
    "ray": ray,
    "quick": quick,
    "gpu": gpu,
    "bench": bench,
    "notebooks": notebooks,
    "figures": figures,
    "clean": clean,
    "help": help_,
}
PARTS = {"lines": lines, "execute": execute}


def main(args):
    if args[:1] not in (["gpu"], ["serve"]) and len(args) != 1 or args[0] not in {**TASKS, **PARTS}:
        help_()
        sys.exit(0 if not args or args[0] in ("-h", "--help") else f"\nNo task {' '.join(args)!r}.")
    try:
        {**TASKS, **PARTS}[args[0]](*args[1:])
    except KeyboardInterrupt:
        stop("Stopped.", 130)


if __name__ == "__main__":
    main(sys.argv[1:])
