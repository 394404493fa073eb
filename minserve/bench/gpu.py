"""`make gpu`: the kernels' tests and everything a GPU has to say, in under nine minutes, and one table at the end.

    python -m minserve.bench.gpu                             a machine with a CUDA device; JSON into figures/data/
    python -m minserve.bench.gpu --device cpu --tiny         the same flow anywhere, small: JSON into a temporary folder

Each step is a process, so that one that dies takes nothing along. It is told its share of the time that is left, and
makes fewer repeats, then fewer cases, to keep to it; it is ended when it would take the others' time. What was left
out is named in the table, and a step that failed is a row of it; then the exit code is 1.

Needs torch with triton, transformers, safetensors, numpy, tqdm, matplotlib and pytest; no network, and no .venv.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from minserve.bench import gpu_table, redraw
from minserve.bench.gpu_table import Run, Step, file_of
from minserve.lab.report import Report, Row, commit

ROOT = Path(__file__).parents[2]
BUDGET = 510.0  # seconds; nine minutes are 540
SHARES = {  # of the budget, in seconds; what one step leaves, the later ones share
    "kernels": 115, "paged-attention": 55, "prefill-attention": 35, "decode": 50, "decode-quant": 50, "matmul": 40,
    "spec-cost": 35, "ctx-slope": 35, "offline": 40, "overhead": 25, "gemv": 15,
}  # fmt: skip
START = 8  # seconds in which a process has imported torch and found its device
LAST = 15  # for the table and the figures
OVER = "when the time was over"
DEFINITIONS = "tests/kernels/test_definitions.py"  # what a dry run has time for


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    dry, folder = args.device == "cpu", args.into
    if dry:
        print(gpu_table.DRY)
        folder = folder or Path(tempfile.mkdtemp(prefix="minserve-gpu-"))
    folder = Path(folder or ROOT / gpu_table.RECORDED).resolve()
    run = Run(command(args), date.today().isoformat(), commit(), dry, args.seconds, [])
    start, names = time.monotonic(), args.only or list(SHARES)
    for i, name in enumerate(names):
        left = args.seconds - LAST - (time.monotonic() - start)
        share = left * SHARES[name] / sum(SHARES[later] for later in names[i:])
        print(f"\n=== {i + 1}/{len(names)}  {name}: {share:.0f} s of the {left:.0f} s left", flush=True)
        began, file = time.monotonic(), folder / file_of(name)
        before = file.stat().st_mtime_ns if file.is_file() else 0
        failed = (
            kernels(folder, share, left, dry) if name == "kernels" else bench(name, folder, share, left, dry)
        )
        written = file.is_file() and file.stat().st_mtime_ns > before
        failed = failed or ("" if written else "wrote no report")
        run.steps.append(Step(name, round(time.monotonic() - began, 1), failed, written))
        run.save(folder)  # after every step: a run that is cut short has its table too
    print("\n=== table\n")
    code = gpu_table.show(folder)
    redraw.gpu(folder, folder if dry else ROOT / "figures")
    print(f"\nJSON in {folder}; again: python -m minserve bench table --json {folder}")
    return code


def parsed(argv):
    parser = argparse.ArgumentParser(prog="make gpu", description=main.__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a dry run with --device cpu")
    parser.add_argument("--into", type=Path, help="folder of the JSON files")
    parser.add_argument("--seconds", type=float, default=BUDGET)
    parser.add_argument("--only", nargs="+", choices=list(SHARES), metavar="STEP", help=", ".join(SHARES))
    args = parser.parse_args(argv)
    if (args.device == "cpu") != args.tiny:
        parser.error("--device cpu and --tiny go together: a GPU's sizes would take a CPU hours")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"{sys.executable} has no torch that sees a CUDA device; a dry run: --device cpu --tiny")
    return args


def command(args) -> str:
    words = ["make gpu", 'ARGS="--device cpu --tiny"' if args.tiny else ""]
    return " ".join(filter(None, words))


# ---------------------------------------------------------------- a benchmark
def bench(name: str, folder: Path, share: float, left: float, dry: bool) -> str:
    """How it failed; "" when it did not."""
    into = folder / file_of(name)
    words = [
        "-m",
        "minserve",
        "bench",
        name,
        "--json",
        str(into),
        "--seconds",
        f"{max(1, share - START):.0f}",
    ]
    return ended([started(words + (["--tiny"] if dry else []), dry)], min(left, 2 * share + START))


def started(words: list[str], dry: bool, out=None) -> subprocess.Popen:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    own = [
        str(ROOT),
        str(ROOT / "tests" / "kernels"),
    ]  # the package is not installed into a Python that is not ours
    env["PYTHONPATH"] = os.pathsep.join([*own, *filter(None, [env.get("PYTHONPATH")])])
    if dry:
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, *words]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def ended(processes: list[subprocess.Popen], seconds: float) -> str:
    """Wait for all; whoever is not done in time is ended. How the first of them failed, or ""."""
    deadline, failures = time.monotonic() + seconds, []
    try:
        for process in processes:
            try:
                if code := process.wait(max(0.0, deadline - time.monotonic())):
                    failures.append(f"ended with {code}")
            except subprocess.TimeoutExpired:
                failures.append(f"ended after {seconds:.0f} s, {OVER}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return next(iter(failures), "")


# ---------------------------------------------------------------- the kernels' tests
def kernels(folder: Path, share: float, left: float, dry: bool) -> str:
    """All of them, in parts side by side: a report with a row per file. How it failed, or ""."""
    parts = 1 if dry else max(2, min(8, (os.cpu_count() or 2) // 2))
    with tempfile.TemporaryDirectory() as room:
        files = [Path(room) / f"part{i}.json" for i in range(1, parts + 1)]
        logs = [file.with_suffix(".txt").open("w+") for file in files]
        running = [
            started(
                ["-m", "pytest", "-p", "deadline", "--part", f"{i}/{parts}", "--outcomes", str(file),
                 "--deadline", f"{max(5, share - START):.0f}", "-q", "--no-header", "-p", "no:cacheprovider",
                 DEFINITIONS if dry else "tests/kernels"], dry, log,
            )
            for i, (file, log) in enumerate(zip(files, logs), 1)
        ]  # fmt: skip
        failed = ended(running, min(left, share + START))
        outcomes = {}
        for process, file, log in zip(running, files, logs):
            log.seek(0)
            print("".join(log.readlines()[-40:] if process.returncode else log.readlines()[-1:]), end="")
            log.close()
            outcomes |= json.loads(file.read_text()) if file.is_file() else {}
    if not outcomes:
        return failed or "no test was found"
    report = kernel_report(outcomes)
    report.save(folder / file_of("kernels"))
    print(report.table())
    if wrong := [test for test, (outcome, *_) in outcomes.items() if outcome == "failed"]:
        return f"{len(wrong)} tests failed"
    return (
        "" if OVER in failed else failed
    )  # who was ended has left its tests behind as not run, which the table says


def kernel_report(outcomes: dict) -> Report:
    """Rows of passed tests, bound by those that can run here. What was skipped or not run is in a note."""
    report, nothing = Report("kernels", "python -m pytest tests/kernels"), []
    for file in dict.fromkeys(test.split("::")[0] for test in outcomes):
        its = {test: what for test, what in outcomes.items() if test.startswith(file + "::")}
        by = {
            kind: [t for t, what in its.items() if what[0] == kind]
            for kind in ("passed", "failed", "skipped")
        }
        late = [test.split("::", 1)[1] for test, what in its.items() if what[0] == "not run"]
        able = len(by["passed"]) + len(by["failed"]) + len(late)
        slow = max(its, key=lambda test: its[test][1])
        notes = [f"not run, for the time was over: {', '.join(late)}"] if late else []
        notes += (
            [f"failed: {', '.join(test.split('::', 1)[1] for test in by['failed'])}"] if by["failed"] else []
        )
        notes += [f"{len(by['skipped'])} skipped: {its[by['skipped'][0]][2]}"] if by["skipped"] else []
        notes += [f"slowest: {slow.split('::', 1)[1]}, {its[slow][1]:.1f} s"]
        if able:
            note = "; ".join(notes)
            report.add(Row(f"{Path(file).name} passed", "tests", [float(len(by["passed"]))], able, 1.0, note))
        else:
            nothing.append(f"{Path(file).name}: nothing to run here, {'; '.join(notes[:-1])}")
    if nothing:
        report.rows[-1] = replace(report.rows[-1], note="; ".join([report.rows[-1].note, *nothing]))
    return report


if __name__ == "__main__":
    sys.exit(main())
