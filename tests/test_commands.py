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


@pytest.mark.parametrize("command, missing", [("serve", "uvicorn"), ("load", "httpx2")])
def test_a_missing_library_is_named_with_the_way_to_get_it(command, missing):
    """In a process of its own, where nothing of it is imported yet."""
    without = f"import sys; sys.modules[{missing!r}] = None; from minserve.__main__ import main; "
    done = subprocess.run(
        [sys.executable, "-c", f"{without}main([{command!r}, '--help'])"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert f"minserve {command} needs {missing}" in done.stderr and "minserve[server]" in done.stderr


def test_what_is_missing_for_another_reason_is_not_hidden(monkeypatch):
    monkeypatch.setattr(
        importlib, "import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name="own"))
    )
    with pytest.raises(ModuleNotFoundError):
        commands.imported("minserve.own", "own")
