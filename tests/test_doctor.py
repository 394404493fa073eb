"""The doctor says one line per thing, works where nothing else does, and knows a remedy for each failure."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minserve import doctor, fetch
from minserve.config import SHAPES
from minserve.fused import FusedModel
from minserve.kernels import native
from minserve.model import Model

ROOT = Path(__file__).parents[1]


def examine(*options, code="", arguments=(), **variables):
    """The doctor in a Python of its own: (exit code, {subject: (mark, text, remedy)})."""
    code += "\nimport sys; from minserve.__main__ import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
    command = [sys.executable, *options, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": "", **variables})
    assert not done.stderr, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"\[(OK|--|FAIL)\]\s+(\S+)\s+(.+)", line):
            found[match[2]] = [match[1], match[3], None]
        elif match := re.match(r"\s+-> (.+)", line):
            list(found.values())[-1][2] = match[1]
    return done.returncode, found


@pytest.mark.slow
def test_this_machine_is_well(smollm):
    code, found = examine(arguments=["--cache", smollm.parent])
    assert code == 0 and {mark for mark, _, _ in found.values()} <= {"OK", "--"}
    for subject in (
        "Python",
        "system",
        "CPU",
        "memory",
        "torch",
        "triton",
        "GPU",
        "step",
        "weights",
        "model",
        "cache",
        "disk",
    ):
        assert subject in found
    assert {*doctor.NEEDED, *doctor.USEFUL} <= set(found)
    assert str(smollm) in found["model"][1] and "cores usable" in found["CPU"][1]


def test_with_nothing_installed_at_all(tmp_path):
    """-S: a Python without site-packages, the bare machine somebody writes the bug report from."""
    code, found = examine("-S", arguments=["--cache", tmp_path])
    assert code == 1
    for subject in ("torch", *doctor.NEEDED):
        assert found[subject][0] == "FAIL" and found[subject][2] == doctor.INSTALL, subject
    for subject in ("triton", "GPU", "step", "weights", *doctor.USEFUL):
        assert found[subject][0] == "--" and found[subject][2] is None, subject


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "transformers", "numpy"])
def test_one_package_missing(name, tmp_path):
    code, found = examine(code=f"import sys; sys.modules[{name!r}] = None", arguments=["--cache", tmp_path])
    assert code == 1 and found[name][0] == "FAIL" and found[name][2] == doctor.INSTALL


def broken(tmp_path, name: str, code: str) -> dict:
    """A package that is installed and fails when it is imported."""
    (tmp_path / "broken" / name).mkdir(parents=True)
    (tmp_path / "broken" / name / "__init__.py").write_text(code)
    return {"PYTHONPATH": str(tmp_path / "broken")}


def test_a_torch_that_cannot_be_imported(tmp_path):
    path = broken(tmp_path, "torch", "raise OSError('libcudart.so.13: cannot open shared object file')")
    code, found = examine(arguments=["--cache", tmp_path], **path)
    assert code == 1 and found["torch"][0] == "FAIL" and "libcudart.so.13" in found["torch"][1]
    assert found["GPU"] == ["--", "unknown without torch", None]


@pytest.mark.slow
def test_a_triton_that_takes_the_process_down(tmp_path):
    path = broken(tmp_path, "triton", "import os; os.abort()")
    code, found = examine(arguments=["--cache", tmp_path], **path)
    assert code == 1 and found["triton"][:2] == ["FAIL", "installed, but cannot be used: exit code -6"]
    assert found["torch"][0] == "OK" and found["step"][0] == "--" and found["weights"][0] == "OK"


def test_no_model_and_a_half_model(tmp_path):
    missing = doctor.model(tmp_path)
    assert missing.mark == "FAIL" and missing.remedy == "python -m minserve fetch"
    assert missing.text.endswith("not fetched yet, or not completely")
    (tmp_path / fetch.DEFAULT_MODEL).mkdir()
    record = '{"files": {"model.safetensors": {"bytes": 269060552, "sha256": ""}}}'
    (tmp_path / fetch.DEFAULT_MODEL / "minserve.json").write_text(record)
    (tmp_path / fetch.DEFAULT_MODEL / "model.safetensors").write_bytes(b"half")
    assert doctor.model(tmp_path).text.endswith("model.safetensors: 4 bytes, fetched with 269060552")


def test_the_road_of_a_step(monkeypatch):
    monkeypatch.setattr(doctor, "on_gpu", lambda: False)
    monkeypatch.setattr(doctor, "native_kernels", lambda: "no C++ compiler")
    assert doctor.step() == ("--", "step", "operation by operation, in PyTorch: no C++ compiler", "")
    assert "held once: 0.27 GB" in doctor.held().text
    monkeypatch.setattr(doctor, "on_gpu", lambda: True)
    for kernels in ("no C++ compiler", *doctor.COMPILED):
        monkeypatch.setattr(doctor, "native_kernels", lambda kernels=kernels: kernels)
        assert doctor.step().mark == "OK" and "CUDA graphs" in doctor.step().text
        assert "held once" in doctor.held().text


def test_kernels_that_are_switched_off_and_a_process_that_dies(monkeypatch):
    ask = doctor.native_kernels.__wrapped__
    monkeypatch.setenv("MINSERVE_NATIVE", "0")
    assert ask() == "the CPU's C++ kernels are switched off: MINSERVE_NATIVE=0 is set"
    monkeypatch.setattr(doctor, "ASKS_NATIVE", "import os; os._exit(3)")
    assert ask() == "asking for compiled kernels ended with exit code 3"


@pytest.mark.skipif(bool(native.usable()), reason=f"no native kernels: {native.usable()}")
@pytest.mark.parametrize("units", [True, False])
def test_weights_are_held_as_often_as_the_model_holds_them(units, monkeypatch):
    made = native.Native.__init__

    def forced(self, *args):
        made(self, *args)
        self.matrix_units = units

    assert doctor.native_kernels() == doctor.COMPILED[not native.Native().matrix_units]
    monkeypatch.setattr(native.Native, "__init__", forced)
    monkeypatch.setattr(doctor, "on_gpu", lambda: False)
    monkeypatch.setattr(doctor, "native_kernels", lambda: doctor.COMPILED[not units])
    tiny = replace(
        SHAPES["smollm2-135m"], vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=1, windows=()
    )
    fused = FusedModel(Model.random(tiny, torch.bfloat16), 8)
    assert ("twice" in doctor.held().text) == (fused.packed_bytes > 0)
    assert ("by matrix units" in doctor.step().text) == units


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    finding = doctor.writable(tmp_path / "file" / "cache")
    assert finding.mark == "FAIL" and "Not a directory" in finding.text and "--cache DIR" in finding.remedy


def test_a_check_that_crashes_is_a_finding():
    def careless():
        raise KeyError("MemTotal")

    finding = doctor.run(careless)
    assert (
        finding[:3] == ("FAIL", "careless", "the check itself broke: KeyError: 'MemTotal'") and finding.remedy
    )
