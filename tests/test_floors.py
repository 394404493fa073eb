"""The package is a building: a module imports only from floors below its own, wherever the import stands.

The rules are functions of a folder, so each can also be shown a copy of the package with a planted fault.
"""

import ast
import shutil
from pathlib import Path

import pytest

FLOORS = [
    {"config", "request", "step_log"},  # 0  nouns: plain Python, no torch
    {
        "pages",
        "kernels",
        "metrics",
        "arrivals",
    },  # 1  page ids, times: no torch | the only place that imports triton
    {"batch", "kv_cache", "paged_attention", "quantization", "sampling", "text", "pace"},  # 2
    {  # 3  computes | draws | decides | brings weights: strangers
        *("model", "sampler", "scheduler", "sources"),
        *("gptq", "awq", "smoothquant", "quantized_files", "quantized_cache", "quantized_linear"),
    },
    {  # 4  one request, plainly; loading
        *("output", "prefill_decode", "fused", "speculation", "trained", "weights", "fetch", "calibration"),
    },
    {"graphs", "study"},  # 5  a step, recorded | a text, thought through
    {"draft_model", "medusa", "drafters", "training"},  # 6  who proposes, and computes for it | how it learns
    {"engine"},  # 7  the loop
    {"async_engine", "protocol", "structured"},  # 8  many callers | what they say, and must be told
    {"cluster"},  # 9  many processes
    {"server"},  # 10
    {"simulator", "ray_serve"},  # 11  a fleet without machines | with many
    {  # 12  measures and commands
        *("lab", "bench", "__main__", "chat", "doctor", "quantize", "train", "self_text", "serve"),
    },
]
FLOOR = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}
NO_TORCH = {"config", "request", "step_log", "pages", "scheduler", "metrics", "arrivals", "simulator"}
COMMANDS = {  # on a floor, who may call whom
    "drafters": {"draft_model", "medusa"},
    "__main__": {"bench", "chat", "doctor", "lab", "quantize", "serve", "train"},
    "bench": {"lab"},
    "chat": {"lab"},
    "doctor": {"lab"},
    "quantize": {"lab"},
    "train": {"lab", "self_text"},
}
PACKAGE = Path(__file__).parents[1] / "minserve"


def imports(path: Path, package: Path):
    """Every module a file imports, written out: relative, lazy, `from minserve import x` as minserve.x."""
    own = ("minserve", *path.relative_to(package).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*own[: -node.level], *filter(None, [node.module])]) if node.level else node.module
            )
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value


def broken_rules(package: Path) -> list[str]:
    """What the package at this path does that a floor plan forbids."""
    found = []
    for path in sorted(package.rglob("*.py")):
        unit = path.relative_to(package).with_suffix("").parts[0]
        if unit == "__init__":
            found += [
                f"__init__ imports {name}: a package that imports itself" for name in imports(path, package)
            ]
            continue
        if unit not in FLOOR:
            found.append(f"{unit} has no floor: add it to FLOORS, and to the README's map")
            continue
        for name in imports(path, package):
            found += complaints(unit, name)
    return found


def complaints(unit: str, name: str):
    parts = name.split(".")
    if parts[0] == "minserve" and len(parts) > 1 and not parts[1].startswith("__version"):
        target = parts[1]
        if target not in FLOOR:
            yield f"{unit} imports {target}, which has no floor"
        elif target != unit and FLOOR[target] >= FLOOR[unit] and target not in COMMANDS.get(unit, ()):
            yield f"{unit} (floor {FLOOR[unit]}) imports {target} (floor {FLOOR[target]})"
    if parts[0] == "triton" and unit != "kernels":
        yield f"{unit} imports triton; only kernels/ may"
    if parts[0] == "torch" and unit in NO_TORCH:
        yield f"{unit} imports torch; it is plain Python"


def test_imports_point_down():
    assert broken_rules(PACKAGE) == []


FAULTS = {
    "upwards": (
        "kv_cache.py",
        "from minserve.model import Model",
        "kv_cache (floor 2) imports model (floor 3)",
    ),
    "upwards, plain": ("config.py", "import minserve.text", "config (floor 0) imports text (floor 2)"),
    "upwards, lazily": (
        "model.py",
        "def f():\n    from minserve.weights import load",
        "model (floor 3) imports weights (floor 4)",
    ),
    "upwards, from the package": (
        "model.py",
        "from minserve import weights",
        "model (floor 3) imports weights (floor 4)",
    ),
    "upwards, relative": ("text.py", "from .model import Model", "text (floor 2) imports model (floor 3)"),
    "upwards, relative, bare": ("text.py", "from . import model", "text (floor 2) imports model (floor 3)"),
    "upwards, two levels": (
        "kernels/rope.py",
        "from ..kv_cache import KVCache",
        "kernels (floor 1) imports kv_cache (floor 2)",
    ),
    "upwards, by name": (
        "sampling.py",
        "import importlib\nimportlib.import_module('minserve.fetch')",
        "sampling (floor 2) imports fetch (floor 4)",
    ),
    "for typing only": (
        "request.py",
        "if TYPE_CHECKING:\n    from minserve.engine import Engine",
        "request (floor 0) imports engine (floor 7)",
    ),
    "sideways": ("kv_cache.py", "import minserve.sampling", "kv_cache (floor 2) imports sampling (floor 2)"),
    "a command from below": (
        "fetch.py",
        "from minserve.lab import measure",
        "fetch (floor 4) imports lab (floor 12)",
    ),
    "the lab from a command": (
        "lab/measure.py",
        "from minserve import bench",
        "lab (floor 12) imports bench (floor 12)",
    ),
    "triton outside kernels": (
        "model.py",
        "import triton.language as tl",
        "model imports triton; only kernels/ may",
    ),
    "triton outside kernels, lazily": (
        "doctor.py",
        "def f():\n    from triton import jit",
        "doctor imports triton; only kernels/ may",
    ),
    "torch in the config": ("config.py", "import torch", "config imports torch; it is plain Python"),
    "torch in a request": (
        "request.py",
        "from torch import Tensor",
        "request imports torch; it is plain Python",
    ),
    "torch in pages": ("pages.py", "import torch.nn", "pages imports torch; it is plain Python"),
    "torch in the scheduler": (
        "scheduler.py",
        "def f():\n    import torch",
        "scheduler imports torch; it is plain Python",
    ),
    "a module without a floor": (
        "utils.py",
        "",
        "utils has no floor: add it to FLOORS, and to the README's map",
    ),
    "an import of what is not there": (
        "text.py",
        "import minserve.helpers",
        "text imports helpers, which has no floor",
    ),
    "a package that re-exports": (
        "__init__.py",
        "from minserve.model import Model",
        "__init__ imports minserve.model.Model: a package that imports itself",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path):
    file, code, complaint = FAULTS[fault]
    copy = tmp_path / "minserve"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    path = copy / file
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(f"{before}\n{code}\n", encoding="utf-8")
    assert set(broken_rules(copy)) - set(broken_rules(PACKAGE)) == {complaint}


def test_no_module_but_kernels_needs_triton_at_run_time():
    """The rule above reads sources; this runs them: with triton unfindable, every module still imports."""
    import subprocess
    import sys

    modules = [
        ".".join(("minserve", *p.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for p in sorted(PACKAGE.rglob("*.py"))
        if p.name not in ("__main__.py", "compile_report.py")
    ]
    code = "import sys; sys.modules['triton'] = None\n" + "\n".join(f"import {name}" for name in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr[-2000:]
