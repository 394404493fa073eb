"""The commands' front: each explains itself, and says how to get what is missing."""

import importlib
import sys

import pytest

from minserve import __main__ as commands


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as left:
        commands.main([name, "--help"])
    assert left.value.code == 0 and f"minserve {name}" in capsys.readouterr().out


@pytest.mark.parametrize("missing, extra", [("uvicorn", "server"), ("httpx2", "server")])
def test_a_missing_library_is_named_with_the_way_to_get_it(monkeypatch, missing, extra):
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    for module in [
        m for m in sys.modules if m.startswith(("minserve.serve", "minserve.lab.client", "minserve.lab.load"))
    ]:
        monkeypatch.delitem(sys.modules, module)
    command = {"uvicorn": "serve", "httpx2": "load"}[missing]
    with pytest.raises(SystemExit, match=rf"minserve {command} needs {missing}.*minserve\[{extra}\]"):
        commands.main([command, "--help"])


def test_what_is_missing_for_another_reason_is_not_hidden(monkeypatch):
    monkeypatch.setattr(
        importlib, "import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name="own"))
    )
    with pytest.raises(ModuleNotFoundError):
        commands.imported("minserve.own", "own")
