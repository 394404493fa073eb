"""A module with one deliberate fault: its source, one place of it replaced."""

import inspect
import sys
import types
from pathlib import Path


def wrong_version(module, right: str, wrong: str):
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"{right!r} occurs {source.count(right)} times in {module.__name__}"
    made = types.ModuleType(module.__name__)
    made.__file__ = module.__file__
    code = compile(source.replace(right, wrong), module.__file__, "exec")
    kept = sys.modules[module.__name__]
    sys.modules[module.__name__] = made  # dataclasses look themselves up
    try:
        exec(code, made.__dict__)
    finally:
        sys.modules[module.__name__] = kept
    return made


def plant(package: Path, file: str, right: str, wrong: str) -> None:
    """The same in a copy of the package, for a process of its own."""
    source = (package / file).read_text()
    assert source.count(right) == 1, f"{right!r} occurs {source.count(right)} times in {file}"
    (package / file).write_text(source.replace(right, wrong))
