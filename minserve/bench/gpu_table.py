"""What `make gpu` recorded, as one table: case, bound, measured, ratio, target, pass. From the JSON alone.

    gpu_run.json         the run: {name, command, date, commit, dry, budget, steps: [{name, seconds, failed, written}]}
    NAME_gpu.json        one report per step, as lab.report writes them

A step that failed is a row of its own, whatever an earlier run may have left in its file.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from minserve.bench.common import LEFT_OUT
from minserve.lab.report import Report, Row

RECORDED = Path("figures/data")
HEAD = ("case", "bound", "measured", "ratio", "target", "pass")
PASS = {True: "yes", False: "no", None: "–"}
TELLING = (LEFT_OUT, "not run, ", "failed: ", "wanted: ")
DRY = "DRY RUN on a CPU with tiny sizes: it proves that everything runs; its numbers mean nothing."


@dataclass(frozen=True)
class Step:
    name: str
    seconds: float
    failed: str = ""  # how it ended, if not well
    written: bool = True  # its file is of this run, not of an earlier one

    def report(self, folder: Path) -> Report | None:
        return Report.load(folder / file_of(self.name)) if self.written else None


@dataclass(frozen=True)
class Run:
    command: str
    date: str
    commit: str
    dry: bool
    budget: float  # seconds
    steps: list[Step]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"name": "gpu_run", **asdict(self)}, indent=1)
        (folder / "gpu_run.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Run":
        data = json.loads((folder / "gpu_run.json").read_text(encoding="utf-8"))
        del data["name"]
        return cls(**data | {"steps": [Step(**step) for step in data["steps"]]})


def file_of(name: str) -> str:
    return f"{name.replace('-', '_')}_gpu.json"


def lines_of(folder: Path) -> tuple[Run, list[tuple[str, list[tuple[str, ...]], list[str]]]]:
    """(the run, [(step's title, its rows of six cells, remarks)])"""
    run, found = Run.load(folder), []
    for step in run.steps:
        report = step.report(folder)
        cells = [(row.case, *row.cells(), PASS[row.passed]) for row in report.rows] if report else []
        if step.failed:
            cells.append((f"{step.name}: {step.failed}", "", "", "", "", "FAILED"))
        found.append((f"{step.name}, {step.seconds:.0f} s", cells, remarks(report) if report else []))
    return run, found


def remarks(report: Report) -> list[str]:
    """What a reader of the table has to know: what was not measured, and what did not hold still."""
    notes = [note for row in report.rows for note in row.note.split("; ")]
    telling = [
        note for note in notes if note.startswith(TELLING) or "moved: " in note or "does not run" in note
    ]
    return list(dict.fromkeys(telling))


def totals(folder: Path, run: Run) -> str:
    judged = [row.passed for _, row in targeted(folder)]
    failed = [step.name for step in run.steps if step.failed]
    text = f"{sum(judged)} of {len(judged)} targets reached, {len(run.steps)} steps"
    text += f", FAILED: {', '.join(failed)}" if failed else ", all ran to their end"
    return f"{text}; {run.seconds:.0f} s of {run.budget:.0f} s"


def where(folder: Path, run: Run) -> str:
    found = next((r for step in run.steps if (r := step.report(folder)) and step.name != "kernels"), None)
    about = f"{found.where}, torch {found.versions.get('torch', '?')}, " if found else ""
    return f"{about}{run.date}, commit {run.commit}"


def text(folder: Path) -> str:
    run, steps = lines_of(folder)
    wide = max(len(row[0]) for _, rows, _ in steps for row in rows)

    def line(case, bound, measured, ratio, target, passed):
        return f"  {case:<{wide}}  {bound:>13}  {measured:>13}  {ratio:>7}  {target:>7}  {passed}".rstrip()

    out = [where(folder, run), *([DRY] if run.dry else []), line(*HEAD)]
    for title, rows, notes in steps:
        out += [title, *(line(*row) for row in rows), *(f"    {note}" for note in notes)]
    return "\n".join([*out, totals(folder, run), *([DRY] if run.dry else [])])


def markdown(folder: Path) -> str:
    run, steps = lines_of(folder)
    out = ["# What `make gpu` measured", "", f"{where(folder, run)}. Drawn from `figures/data/*_gpu.json`."]
    out += ["", f"**{DRY}**"] if run.dry else []
    for title, rows, notes in steps:
        out += ["", f"## {title}", "", f"| {' | '.join(HEAD)} |", "|---|" + "--:|" * 4 + "---|"]
        out += [f"| {' | '.join(row)} |" for row in rows]
        out += ["", *(f"* {note}" for note in notes)] if notes else []
    return "\n".join([*out, "", totals(folder, run) + "."]) + "\n"


def show(folder: Path) -> int:
    """Print the table: 1 if a step failed, 2 if there is nothing to print."""
    if not (folder / "gpu_run.json").is_file():
        print(
            f"bench table: no gpu_run.json in {folder}: `make gpu` writes it, on a machine with a CUDA device"
        )
        return 2
    print(text(folder))
    return 1 if any(step.failed for step in Run.load(folder).steps) else 0


def targeted(folder: Path) -> list[tuple[str, Row]]:
    """(step, row) of every row that has something to reach."""
    pairs = [(step.name, step.report(folder)) for step in Run.load(folder).steps]
    return [(name, row) for name, report in pairs if report for row in report.rows if row.passed is not None]
