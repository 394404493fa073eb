"""A pytest plugin for `make gpu`: a part of the tests, up to a deadline, and a file that says what became of each.

    pytest -p deadline --part 2/4 --deadline 120 --outcomes FILE tests/kernels

Parts run side by side, for a kernel's test mostly waits for its compiler. The compile reports of other GPUs, which
share one long preparation, are the first part alone. After the deadline nothing new begins: what is left counts as
"not run", by name, and never as passed.
"""

import json
import time
import zlib
from pathlib import Path

import pytest

NOT_RUN = "not run: the deadline had passed"
TOGETHER = "test_compile.py"


def pytest_addoption(parser):
    group = parser.getgroup("deadline")
    group.addoption("--part", default="1/1", help="I/N: the I-th of N parts, counted from 1")
    group.addoption("--deadline", type=float, default=1e9, help="seconds from now")
    group.addoption("--outcomes", type=Path, help="JSON: {test: [outcome, seconds, why]}")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Deadline(config), "the deadline")


def part_of(test: str, parts: int) -> int:
    if parts == 1 or TOGETHER in test:
        return 1
    return 2 + zlib.crc32(test.encode()) % (parts - 1)


class Deadline:
    def __init__(self, config):
        self.over = time.monotonic() + config.getoption("--deadline")
        self.part, self.parts = map(int, config.getoption("--part").split("/"))
        self.file, self.outcomes, self.written = config.getoption("--outcomes"), {}, 0.0

    def pytest_collection_modifyitems(self, config, items):
        mine = [item for item in items if part_of(item.nodeid, self.parts) == self.part]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = sorted(mine, key=lambda item: TOGETHER in item.nodeid)
        self.outcomes = {item.nodeid: ("not run", 0.0, NOT_RUN) for item in items}
        self.write()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if time.monotonic() > self.over:
            pytest.skip(NOT_RUN)

    def pytest_runtest_logreport(self, report):
        """A test counts as passed when its call has returned, not when its setup has."""
        outcome, seconds, why = self.outcomes[report.nodeid]
        if report.skipped:
            why = (
                report.longrepr[2].removeprefix("Skipped: ")
                if isinstance(report.longrepr, tuple)
                else "skipped"
            )
            outcome = "not run" if why == NOT_RUN else "skipped"
        elif report.failed or report.when == "call":
            outcome, why = report.outcome, ""
        self.outcomes[report.nodeid] = (outcome, seconds + report.duration, why)
        if report.when == "teardown" and time.monotonic() > self.written + 1:
            self.write()

    def pytest_sessionfinish(self):
        self.write()

    def write(self):
        """Every second or so: who is ended from outside has said what it did."""
        self.written = time.monotonic()
        if self.file:
            self.file.write_text(json.dumps(self.outcomes, indent=0) + "\n")
