"""Cold start: from pressing Enter to the first token of the first answer, in a fresh process, eager mode.

    measured = wall time of `python -m minserve chat --prompt Hi --max-tokens 1`, model already fetched
    bound    = the time to read the weights once at this machine's read bandwidth

Nearly all of it is Python importing torch and transformers, which is why the bound is far away.
Story    TTFT in notebooks/02_prefill_and_decode.ipynb starts where this ends
"""

import subprocess
import sys

from minserve.bench.common import Around, Options
from minserve.config import ModelConfig
from minserve.fetch import resolve
from minserve.lab.measure import clock
from minserve.lab.report import Report, Row
from minserve.weights import load_config

SECONDS = 3.0  # worth reaching on two cores


def run(options: Options) -> Report:
    report, folder = options.report(), resolve(options.model)
    config: ModelConfig = load_config(folder)
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
    imports = [sys.executable, "-c", "import torch; from transformers import AutoTokenizer"]
    repeats = 1 if options.quick else 5
    with Around(options) as around:
        start(chat)  # the first run warms the page cache and compiles .pyc files
        chats, alone = (
            [clock(lambda c=command: start(c)) for _ in range(repeats)] for command in (chat, imports)
        )
    bound = config.num_params * options.dtype.itemsize / around.machine.read_bandwidth
    report.add(Row("cold start to the first token", "s", chats, bound, bound / SECONDS, around.note))
    report.add(Row("of it, importing torch and transformers", "s", alone))
    return report


def start(command: list[str]) -> None:
    """Raises RuntimeError with the command's own message when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])} failed:\n{done.stderr[-1000:]}")
