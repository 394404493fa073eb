"""A benchmark's result: rows of bound, measured and ratio, saved with everything needed to believe them.

A row's `ratio` is the share of its bound that was reached, 1.0 being physics: measured / bound for a rate,
bound / measured for seconds. A comparison is a row in unit "x" whose bound is 1, the tie.

    {name, command, where, versions, date, commit,
     rows: [{case, unit, samples, median, bound, ratio, target, pass, note}]}

Story    every figure with a number in it is drawn from such a file
"""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path

from minserve.lab.measure import where_am_i


@dataclass(frozen=True)
class Row:
    case: str
    unit: str  # "s", "s/...": less is better; else more
    samples: list[float]
    bound: float | None = None  # in `unit`; None where no bound is claimed
    target: float | None = None  # the least ratio hoped for
    note: str = ""

    def __post_init__(self):
        if not self.samples:
            raise ValueError(f"row {self.case!r}: no samples, so there is nothing to report")

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def ratio(self) -> float | None:
        if self.bound is None:
            return None
        return self.bound / self.median if lower_is_better(self.unit) else self.median / self.bound

    @property
    def passed(self) -> bool | None:
        return None if self.target is None or self.ratio is None else self.ratio >= self.target

    def cells(self) -> tuple[str, str, str, str]:
        """Bound, measured, ratio, target, as they are printed; empty where there is none."""
        bound = "" if self.bound is None else quantity(self.bound, self.unit)
        return (
            bound,
            quantity(self.median, self.unit),
            share(self.ratio, self.unit),
            share(self.target, self.unit),
        )

    def as_dict(self) -> dict:
        return {
            "case": self.case,
            "unit": self.unit,
            "samples": [float(f"{x:.6g}") for x in self.samples],
            "median": self.median,
            "bound": self.bound,
            "ratio": self.ratio,
            "target": self.target,
            "pass": self.passed,
            "note": self.note,
        }


def lower_is_better(unit: str) -> bool:
    return unit.split("/")[0] == "s"


HEAD = (
    "name",
    "command",
    "where",
    "versions",
    "date",
    "commit",
)  # a file may hold more: load() leaves it there


@dataclass
class Report:
    name: str
    command: str
    where: str = field(default_factory=where_am_i)
    versions: dict[str, str] = field(default_factory=lambda: versions())
    date: str = field(default_factory=lambda: date.today().isoformat())
    commit: str = field(default_factory=lambda: commit())
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def row(self, case: str) -> Row:
        return next(row for row in self.rows if row.case == case)

    def save(self, path: Path) -> None:
        """One row per line: the file diffs well and is still short."""
        head = {key: getattr(self, key) for key in HEAD}
        rows = ",\n  ".join(json.dumps(row.as_dict(), allow_nan=False) for row in self.rows)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n')

    @classmethod
    def load(cls, path: Path) -> "Report":
        data = json.loads(Path(path).read_text())
        keep = ("case", "unit", "samples", "bound", "target", "note")
        rows = [Row(**{key: row[key] for key in keep if key in row}) for row in data["rows"]]
        return cls(**{key: data[key] for key in HEAD}, rows=rows)

    def table(self) -> str:
        """Bound, measured, ratio (target): what a command prints."""
        wide = max([len(row.case) for row in self.rows] + [4])
        about = f"{self.name}   {self.where}   torch {self.versions.get('torch', '?')}   {self.date}"
        lines = [about, f"{'case':<{wide}}  {'bound':>12}  {'measured':>12}  {'ratio':>7}  (target)"]
        for row in self.rows:
            bound, measured, ratio, target = row.cells()
            target = (f"({target})" if target else "") + (" below" if row.passed is False else "")
            lines.append(f"{row.case:<{wide}}  {bound:>12}  {measured:>12}  {ratio:>7}  {target}".rstrip())
            lines += [f"    {row.note}"] if row.note else []
        return "\n".join(lines)


STEPS = {
    "s": [(1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")],
    "nats": [(1, "nats"), (1e-3, "mnats"), (1e-6, "µnats")],
    "B/s": [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1, "B/s")],
    "FLOP/s": [(1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1, "FLOP/s")],
}


def quantity(value: float, unit: str) -> str:
    """A number as people say it: 33.5 GB/s, 7.91 ms, 30.0 ns/token, 126 tok/s."""
    base, tail = ("s", unit[1:]) if lower_is_better(unit) else (unit, "")
    steps = STEPS.get(base, [(1, base)])
    scale, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    number = value / scale
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:,.{digits}f} {name}{tail}"


def share(ratio: float | None, unit: str) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}x" if unit == "x" else f"{ratio:.0%}"


def versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # triton on macOS and Windows
            continue
    return found


def commit() -> str:
    """The commit measured, "-dirty" when the tree holds more than that, "unknown" outside a repository."""
    ask = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(ask, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
