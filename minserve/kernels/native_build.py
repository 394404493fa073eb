"""Compiles the CPU's kernels once, with the user's own compiler, and loads them.

    library()                the kernels as a loaded library, or Unavailable and why
    build(source, folder)    any C++ as a library: out of the folder, or compiled into it

Cache     ~/.cache/minserve/native/<hash of source, flags, CPU and $CXX>.so, renamed into place when it is whole:
          processes may build at once. MINSERVE_NATIVE=0 in the environment: never.
Flags     the fastest set that the compiler knows. OpenMP is torch's: one pool, not two that fight.
Story     notebooks/08_the_engine.ipynb
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tqdm import tqdm

SOURCES = [Path(__file__).with_name(f"native{part}.cpp") for part in ("", "_quant", "_digits", "_kv")]
PARTS = 3  # which the C++ tells apart: each has all of the source, and compiles a share of what is exported
FLAGS = ["-std=c++17", "-O3", "-shared", "-fPIC"]  # no -ffast-math: NaN and inf are meant
TRIED = [  # from what is fast to what every compiler knows
    [*arch, *openmp] for openmp in (["-fopenmp"], []) for arch in (["-march=native"], ["-mcpu=native"], [])
]


class Unavailable(RuntimeError):
    """No compiled kernels here; the message says why and what would help."""


def cache_folder() -> Path:
    return Path.home() / ".cache" / "minserve" / "native"


def source() -> str:
    """The C++, all of it: what one file defines, the next may use."""
    return "".join(path.read_text(encoding="utf-8") for path in SOURCES)


@functools.cache
def library() -> ctypes.CDLL:
    if os.environ.get("MINSERVE_NATIVE") == "0":
        raise Unavailable("the CPU's C++ kernels are switched off: MINSERVE_NATIVE=0 is set")
    return build(source(), cache_folder(), PARTS)


def build(source: str, folder: Path, parts: int = 1) -> ctypes.CDLL:
    """The source as a loaded library: out of the folder, or compiled into it, `parts` compilers at once."""
    path = folder / f"{_key(source)}.so"
    with contextlib.suppress(OSError):  # not there, or made by another system that shares this home
        return ctypes.CDLL(str(path))
    compiler = _compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=folder)
    except OSError:  # a cache that cannot be written: for this process only
        handle, unfinished = tempfile.mkstemp(suffix=".so")
        path = Path(unfinished)
    os.close(handle)
    try:
        _compile(compiler, source, unfinished, parts)
        os.replace(unfinished, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the compiled CPU kernels cannot be used: {error}") from error
    finally:
        if path.parent != folder or Path(unfinished) != path:
            Path(unfinished).unlink(missing_ok=True)


def _key(source: str) -> str:
    cpu = platform.machine() + platform.processor()
    with contextlib.suppress(OSError):  # Linux names what -march=native will find
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    made_of = [source, str(FLAGS), str(TRIED), cpu, os.environ.get("CXX", "")]
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()


def _compiler() -> list[str]:
    names = [*filter(None, [os.environ.get("CXX")]), "c++", "g++", "clang++"]
    for command in map(shlex.split, names):
        if shutil.which(command[0]):
            return command
    raise Unavailable(
        f"no C++ compiler for the CPU's kernels: none of {', '.join(names)} is on PATH; install one (apt install "
        f"g++, dnf install gcc-c++, xcode-select --install) or name one in CXX"
    )


def _compile(compiler: list[str], source: str, out: str, parts: int) -> None:
    run = partial(subprocess.run, capture_output=True, text=True)
    for flags in TRIED:
        command = [*compiler, *FLAGS, *flags]
        with ticking("compiling the CPU's kernels (once)"), tempfile.TemporaryDirectory() as folder:
            objects = [f"{folder}/{part}.o" for part in range(parts)]
            orders = [
                [*command, f"-DPART={i}", "-c", "-x", "c++", "-", "-o", made]
                for i, made in enumerate(objects)
            ]
            if parts == 1:
                orders = [[*command, "-x", "c++", "-", "-o", out]]
            with ThreadPoolExecutor(parts) as pool:
                results = [*pool.map(partial(run, input=source), orders)]
            if parts > 1 and not any(result.returncode for result in results):
                results = [run([*command, *objects, "-o", out])]
        result = max(results, key=lambda result: abs(result.returncode))
        if result.returncode == 0:
            return
    said = result.stderr.strip().splitlines()
    said = [line for line in said if "error" in line] or said  # rather than the notes that follow them
    last = "\n".join(said[-5:])
    raise Unavailable(f"{shlex.join(compiler)} cannot compile the CPU's kernels; its last words:\n{last}")


@contextlib.contextmanager
def ticking(what: str):
    """On a terminal, seconds that go up until the work inside is done; elsewhere one line."""
    done = threading.Event()
    with tqdm(desc=what, bar_format="{desc}: {elapsed}", disable=not sys.stderr.isatty()) as clock:
        if clock.disable:
            print(f"{what} ...", file=sys.stderr, flush=True)

        def tick():
            while not done.wait(0.2):
                clock.refresh()

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
