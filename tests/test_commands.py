"""The commands' front: each explains itself, and says how to get what is missing."""

import importlib
import subprocess
import sys

import pytest

from minserve import __main__ as commands


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as left:
        commands.main([name, "--help"])
    assert left.value.code == 0 and f"minserve {name}" in capsys.readouterr().out


WITHOUT = """
import sys
from minserve.__main__ import main

sys.modules["uvicorn"] = None
try:
    main(["serve", "--help"])
except SystemExit as end:
    print(end.code, file=sys.stderr)
del sys.modules["uvicorn"]
sys.modules["httpx2"] = None
main(["load", "--help"])
"""


def test_a_missing_library_is_named_with_the_way_to_get_it():
    """In a process of its own, where nothing of it is imported yet."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    for said, names in zip(
        done.stderr.splitlines(), ("serve needs uvicorn", "load needs httpx2"), strict=True
    ):
        assert f"minserve {names}" in said and "minserve[server]" in said


def test_what_is_missing_for_another_reason_is_not_hidden(monkeypatch):
    monkeypatch.setattr(
        importlib, "import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name="own"))
    )
    with pytest.raises(ModuleNotFoundError):
        commands.imported("minserve.own", "own")
