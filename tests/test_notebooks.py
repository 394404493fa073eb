"""Notebooks keep the shape a reader relies on. That they run is nbval's job (pytest --nbval-lax notebooks).

Each rule looks at one notebook and yields complaints; each has a planted fault below that it must catch.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
MAX_KB, MAX_PNG_KB, MAX_CELLS, MAX_LINES, MAX_MEDIAN_LINES = 400, 60, 60, 30, 6
MACHINE_PATHS = re.compile(r"(?<![\w.~])/(?:root|home|Users|tmp|work|private|mnt)/|[A-Z]:\\\\?Users")
RULES = []


class Notebook:
    def __init__(self, path: Path):
        self.path, self.raw = path, path.read_text(encoding="utf-8")
        self.cells = json.loads(self.raw)["cells"]
        for cell in self.cells:
            cell["text"] = "".join(cell["source"])
        self.code = [c for c in self.cells if c["cell_type"] == "code"]
        self.prose = [c["text"] for c in self.cells if c["cell_type"] == "markdown"]
        self.story = "\n".join(self.prose)


def rule(function):
    RULES.append(function)
    return function


def complaints(path: Path) -> dict[str, list[str]]:
    """What is wrong with the notebook at this path, by the rule that says so."""
    notebook = Notebook(path)
    said = {rule.__name__: list(rule(notebook)) for rule in RULES}
    return {name: lines for name, lines in said.items() if lines}


@rule
def small(n):
    kb = len(n.raw.encode()) / 1024
    if kb > MAX_KB:
        yield f"{kb:.0f} KB, at most {MAX_KB}: figures belong in figures/"
    if len(n.cells) > MAX_CELLS:
        yield f"{len(n.cells)} cells, at most {MAX_CELLS}"


@rule
def short_cells(n):
    lines = [len(c["text"].splitlines()) for c in n.code]
    if max(lines) > MAX_LINES:
        yield f"a code cell of {max(lines)} lines, at most {MAX_LINES}"
    if statistics.median(lines) > MAX_MEDIAN_LINES:
        yield f"code cells have {statistics.median(lines)} lines in the median, at most {MAX_MEDIAN_LINES}"


@rule
def a_sentence_between_code_cells(n):
    for i, (earlier, later) in enumerate(pairwise(n.cells)):
        if earlier["cell_type"] == later["cell_type"] == "code":
            yield f"cells {i} and {i + 1} are both code: say what the reader should look at"


@rule
def opens_with_a_promise(n):
    first = n.cells[0]["text"] if n.cells[0]["cell_type"] == "markdown" else ""
    if not first.startswith(f"# {n.path.stem[:2]} · "):
        yield f"begins with {first[:30]!r}, not with '# {n.path.stem[:2]} · '"
    for needed in ("**You will**", "runs in"):
        if needed not in first:
            yield f"the opening lacks {needed!r}"


@rule
def predicts(n):
    if not re.search(r"^## Predict", n.story, re.M):
        yield "no section '## Predict, then measure'"


@rule
def says_when_it_loses(n):
    if not re.search(r"^#+ .*\b(loses?|cost)\b", n.story, re.M | re.I):
        yield "no section on what it costs or when it loses"


@rule
def has_an_exercise(n):
    if not re.search(r"^## Exercise", n.story, re.M):
        yield "no section '## Exercise'"
    if not any(re.search(r"\bcheck\(", c["text"]) for c in n.code):
        yield "no exercise that checks itself: check(attempt, solution, cases)"


@rule
def ends_with_a_recap(n):
    last = n.cells[-1]["text"] if n.cells[-1]["cell_type"] == "markdown" else ""
    if not re.search(r"^## Recap", last, re.M):
        yield "the last cell is not '## Recap, and what you may be asked'"
    if "Interview" not in last or "<details>" not in last or "Answers" not in last:
        yield "the recap lacks interview questions with folded answers"


@rule
def ran_top_to_bottom(n):
    counts = [c["execution_count"] for c in n.code]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts {counts}: not run top to bottom in a fresh kernel (make notebooks)"


@rule
def no_errors(n):
    for cell in n.code:
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield f"a cell ends in {output['ename']}: {output['evalue'][:60]}"


@rule
def pictures_are_small(n):
    if "data:image" in n.story or any(c.get("attachments") for c in n.cells):
        yield "a pasted image: save it to figures/ and link it"
    for cell in n.code:
        for output in cell["outputs"]:
            kb = len(output.get("data", {}).get("image/png", "")) * 3 / 4 / 1000  # base64
            if kb > MAX_PNG_KB:
                yield f"a figure of {kb:.0f} KB, at most {MAX_PNG_KB}: lower its dpi"


@rule
def no_machine_paths(n):
    if found := MACHINE_PATHS.search(n.raw):
        yield f"a path of one machine: {n.raw[max(0, found.start() - 20) : found.end() + 20]!r}"


@rule
def nothing_installs(n):
    for cell in n.code:
        if re.search(r"^\s*[!%].*\b(pip|conda|apt)\b", cell["text"], re.M):
            yield "a cell installs something: that is `make run`'s work"


@rule
def no_widget_state(n):
    if "widgets" in json.loads(n.raw).get("metadata", {}):
        yield "saved widget state: an old slider is not a result"


@rule
def links_lead_somewhere(n):
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", n.story)
    targets += re.findall(r"<img[^>]+src=[\"'](?!https?:)([^\"']+)", n.story)
    for target in targets:
        if not (n.path.parent / target).exists():
            yield f"broken link: {target}"
    if re.search(r"!\[[^]]*\]\(https?:|<img[^>]+src=[\"']https?:", n.story):
        yield "a hot-linked image: it will be gone one day"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_shape(path):
    assert complaints(path) == {}


def test_the_first_five_are_here():
    first = {
        "00_the_machine",
        "01_one_forward_pass",
        "02_prefill_and_decode",
        "03_kv_cache",
        "04_flash_attention",
    }
    assert first <= {path.stem for path in NOTEBOOKS}


# ---------------------------------------------------------------- every rule can fail
OPENING = "# 03 · A sample\n\n**You will** see.\n\n| runs in | a second |\n|---|---|\n"
RECAP = """## Recap, and what you may be asked

*Interview.* (1) Why?

<details><summary>Answers</summary>

(1) So.
</details>"""


def markdown(text):
    return {"cell_type": "markdown", "id": "m", "metadata": {}, "source": text.splitlines(keepends=True)}


def code(text, count, outputs=()):
    source = text.splitlines(keepends=True)
    cell = {"cell_type": "code", "id": "c", "metadata": {}, "execution_count": count, "source": source}
    return cell | {"outputs": list(outputs)}


def printed(text):
    return {"output_type": "stream", "name": "stdout", "text": [text]}


def sample():
    """The smallest notebook nobody can complain about."""
    cells = [
        markdown(OPENING),
        code("import torch", 1),
        markdown("## Predict, then measure\n\nHow long? See [the readme](../README.md)."),
        code("print(1)", 2, [printed("1\n")]),
        markdown("## When it loses\n\nNever.\n\n## Exercise 1 · Try"),
        code("f = check(f, g, {'hint': (1,)})", 3),
        markdown(RECAP),
    ]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def plant(tmp_path, change) -> Path:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "README.md").touch()
    book = sample()
    change(book, book["cells"])
    path = tmp_path / "notebooks" / "03_sample.ipynb"
    path.write_text(json.dumps(book, ensure_ascii=False), encoding="utf-8")
    return path


def say(i, text):
    """A fault: cell i reads `text` instead."""
    return lambda book, cells: cells[i].update(source=text.splitlines(keepends=True))


def show(output):
    """A fault: the measuring cell has this output too."""
    return lambda book, cells: cells[3]["outputs"].append(output)


PNG = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "iVBORw0KGgo=" * 8000}}
ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}
FAULTS = {
    "400 KB of output": (show(printed("x" * 410_000)), "small"),
    "61 cells": (lambda book, cells: cells.extend(cells[-1:] * 54), "small"),
    "a cell of 31 lines": (say(3, "x = 1\n" * 31), "short_cells"),
    "long cells in the median": (
        lambda book, cells: [c.update(source=["x = 1\n"] * 7) for c in cells[1:4:2]],
        "short_cells",
    ),
    "two code cells in a row": (lambda book, cells: cells.pop(4), "a_sentence_between_code_cells"),
    "no title": (say(0, OPENING.replace("# 03 · ", "# ")), "opens_with_a_promise"),
    "another notebook's number": (say(0, OPENING.replace("03", "04")), "opens_with_a_promise"),
    "no promise": (say(0, OPENING.replace("**You will**", "We")), "opens_with_a_promise"),
    "no minutes": (say(0, OPENING.replace("runs in", "takes")), "opens_with_a_promise"),
    "code before the opening": (lambda book, cells: cells.insert(0, cells.pop(1)), "opens_with_a_promise"),
    "no prediction": (say(2, "## Measure"), "predicts"),
    "it never loses": (say(4, "## Exercise 1 · Try"), "says_when_it_loses"),
    "no exercise": (say(4, "## When it loses"), "has_an_exercise"),
    "an exercise without a check": (say(5, "f = g"), "has_an_exercise"),
    "no recap": (lambda book, cells: cells.pop(), "ends_with_a_recap"),
    "something after the recap": (lambda book, cells: cells.append(markdown("Bye.")), "ends_with_a_recap"),
    "no interview": (say(6, RECAP.replace("*Interview.*", "")), "ends_with_a_recap"),
    "no folded answers": (say(6, RECAP.replace("<details>", "")), "ends_with_a_recap"),
    "run out of order": (lambda book, cells: cells[3].update(execution_count=7), "ran_top_to_bottom"),
    "never run": (lambda book, cells: cells[3].update(execution_count=None), "ran_top_to_bottom"),
    "an error in an output": (show(ERROR), "no_errors"),
    "a figure of 72 KB in an output": (show(PNG), "pictures_are_small"),
    "a pasted image": (say(2, "## Predict\n\n![x](data:image/png;base64,iVBO)"), "pictures_are_small"),
    "an attachment": (lambda book, cells: cells[2].update(attachments={"a.png": {}}), "pictures_are_small"),
    "a home folder in an output": (show(printed("/home/ann/minserve/model.py")), "no_machine_paths"),
    "a root folder in a cell": (say(3, "open('/root/.cache/x')"), "no_machine_paths"),
    "a kernel's temporary file": (show(printed("File /tmp/ipykernel_12/3.py:1")), "no_machine_paths"),
    "a Windows home": (show(printed("C:\\Users\\ann\\x")), "no_machine_paths"),
    "an install": (say(3, "%pip install torch"), "nothing_installs"),
    "widget state": (lambda book, cells: book["metadata"].update(widgets={"x": {}}), "no_widget_state"),
    "a broken link": (say(2, "## Predict\n\n[x](../nowhere.md)"), "links_lead_somewhere"),
    "a figure that is not there": (say(2, "## Predict\n\n![x](../figures/03.png)"), "links_lead_somewhere"),
    "a hot-linked image": (say(2, "## Predict\n\n![x](https://example.org/x.png)"), "links_lead_somewhere"),
}


def test_the_sample_is_without_fault(tmp_path):
    assert complaints(plant(tmp_path, lambda book, cells: None)) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path):
    change, by = FAULTS[fault]
    assert by in complaints(plant(tmp_path, change))


def test_every_rule_has_a_fault_it_must_catch():
    assert {by for _, by in FAULTS.values()} == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    "cell, code",
    [("import os", "F401"), ("x = undefined", "F821"), ("x = 1" + " " * 5 + "# " + "y" * 120, "E501")],
)
def test_ruff_reads_notebooks(cell, code, tmp_path):
    path = plant(tmp_path, say(3, cell))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--no-cache", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and f"{path.name}:cell" in done.stdout and code in done.stdout, done.stdout


def test_ruff_formats_notebooks(tmp_path):
    path = plant(tmp_path, say(3, "x = {'a':1}"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "ruff", "format", "--check", "--no-cache", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and path.name in done.stdout, done.stdout
