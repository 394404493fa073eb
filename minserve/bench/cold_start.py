"""Cold start: from pressing Enter to the first token of the first answer, in a fresh process, eager mode.

    measured = wall time of `python -m minserve chat --prompt Hi --max-tokens 1`, model already fetched
    bound    = the time of a Python that only imports torch and the tokenizer class, measured in turn
    target   = 3 seconds

Story    TTFT in notebooks/02_prefill_and_decode.ipynb starts where this ends
"""

import subprocess
import sys
from statistics import median

from minserve.bench.common import Options
from minserve.fetch import resolve
from minserve.lab.measure import clock, in_turn
from minserve.lab.report import Report, Row

SECONDS = 3.0  # worth reaching on two cores


def run(options: Options) -> Report:
    report, folder = options.report(), resolve(options.model)
    chat = [
        sys.executable,
        "-m",
        "minserve",
        "chat",
        "--model",
        str(folder),
        "--prompt",
        "Hi",
        "--max-tokens",
        "1",
    ]
    imports = [sys.executable, "-c", "import torch; from transformers import PreTrainedTokenizerFast"]
    sides = {"chat": lambda: clock(lambda: start(chat)), "imports": lambda: clock(lambda: start(imports))}
    if options.quick:
        seconds = in_turn(sides, warmup=0, repeats=1)
    else:
        start(chat)  # the first run warms the page cache and compiles .pyc files
        seconds = in_turn(sides, repeats=10)
    bound = median(seconds["imports"])
    report.add(Row("cold start to the first token", "s", seconds["chat"], bound, bound / SECONDS))
    report.add(Row("of it, importing torch and transformers", "s", seconds["imports"]))
    return report


def start(command: list[str]) -> None:
    """Raises RuntimeError with the command's own message when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])} failed:\n{done.stderr[-1000:]}")
