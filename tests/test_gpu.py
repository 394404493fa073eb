"""`make gpu` without a GPU: its table comes from JSON alone, its budget holds, and nothing is left out in silence."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minserve.__main__ import main
from minserve.bench import (
    BENCHES,
    common,
    decode_quant,
    gpu,
    gpu_table,
    matmul,
    offline,
    overhead,
    paged_attention,
    redraw,
)
from minserve.bench.gpu_table import Run, Step
from minserve.config import SHAPES
from minserve.lab.report import Report, Row
from minserve.lab.roofline import Machine, decode_seconds, prefill_seconds
from minserve.step_log import Row as LogRow
from minserve.step_log import StepRecord

TESTS = Path(__file__).parent
GB = 1e9


def report(name: str, *rows: Row) -> Report:
    return Report(name, f"bench {name}", "an imagined GPU", {"torch": "2"}, "2026-01-01", "abc", list(rows))


@pytest.fixture
def recorded(tmp_path):
    """Three steps: one with targets, one with a note and no target, one that failed beside an older file of its own."""
    rows = (
        Row("8 x 4: paged", "B/s", [30 * GB], 40 * GB, 0.7),
        Row("8 x 4: contiguous", "B/s", [20 * GB], 40 * GB),
    )
    more = Row("8 x 4: paged / contiguous", "x", [1.5], 1.0, 1.6), Row("1 x 4: paged", "s", [8e-6], 1e-6, 0.1)
    report("paged-attention", *rows, *more).save(tmp_path / "paged_attention_gpu.json")
    note = f"{common.LEFT_OUT}32 x 4,096, 1 x 32,768"
    report("gemv", Row("small, M = 1: minserve", "s", [2e-6], 1e-6, note=note)).save(
        tmp_path / "gemv_gpu.json"
    )
    report("decode", Row("old: minserve", "tok/s", [99.0], 100.0, 0.5)).save(tmp_path / "decode_gpu.json")
    steps = [Step("paged-attention", 31.4), Step("gemv", 12.0), Step("decode", 3.0, "ended with 1", False)]
    Run("make gpu", "2026-01-01", "abc", False, 510, steps).save(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- the table
def test_the_table_is_made_of_the_json_alone(recorded, capsys):
    assert main(["bench", "table", "--json", str(recorded)]) == 1, "a failed step"
    printed = capsys.readouterr().out
    assert "an imagined GPU" in printed and "case" in printed.splitlines()[1]
    lines = [line.strip() for line in printed.splitlines()]
    for case, end in [
        ("8 x 4: paged ", "40.0 GB/s      30.0 GB/s      75%      70%  yes"),
        ("8 x 4: contiguous ", "40.0 GB/s      20.0 GB/s      50%           –"),
        ("8 x 4: paged / contiguous ", "1.00 x         1.50 x    1.50x    1.60x  no"),
        ("1 x 4: paged ", "1.00 µs        8.00 µs      12%      10%  yes"),
        ("small, M = 1: minserve ", "1.00 µs        2.00 µs      50%           –"),
        ("decode: ended with 1 ", "FAILED"),
    ]:
        assert sum(line.startswith(case) and line.endswith(end) for line in lines) == 1, (case, printed)
    assert "old" not in printed, "what an earlier run left is not this run's"
    assert f"{common.LEFT_OUT}32 x 4,096, 1 x 32,768" in printed
    assert "2 of 3 targets reached, 3 steps, FAILED: decode; 46 s of 510 s" in printed


def test_a_run_that_went_well_ends_with_zero(recorded, capsys):
    run = Run.load(recorded)
    replace(run, steps=run.steps[:2]).save(recorded)
    assert gpu_table.show(recorded) == 0
    assert "all ran to their end" in capsys.readouterr().out
    assert gpu_table.show(recorded / "nowhere") == 2 and "make gpu" in capsys.readouterr().out


def test_a_dry_run_says_so_first_and_last(recorded, capsys):
    replace(Run.load(recorded), dry=True).save(recorded)
    gpu_table.show(recorded)
    lines = capsys.readouterr().out.splitlines()
    assert "mean nothing" in lines[1] and "mean nothing" in lines[-1]
    assert "mean nothing" in gpu_table.markdown(recorded)


def test_every_step_that_wrote_a_report_is_drawn(recorded):
    drawn = redraw.gpu(recorded, recorded / "figures")
    assert {path.name for path in drawn} == {"gpu.md", "gpu.png", "gpu_paged_attention.png", "gpu_gemv.png"}
    assert all(path.stat().st_size > 500 for path in drawn)
    assert "| 8 x 4: paged | 40.0 GB/s | 30.0 GB/s | 75% | 70% | yes |" in drawn[0].read_text()
    assert redraw.gpu(recorded / "nowhere", recorded) == []


# ---------------------------------------------------------------- the budget
def options(**changes) -> common.Options:
    return common.Options("name", "command", None, torch.float32, True, **changes)


def test_time_is_shared_and_what_finds_none_is_named():
    shared = options(seconds=8.0)
    shares = [its.seconds for _, its in shared.shares("abcd")]
    assert shares == pytest.approx([2, 8 / 3, 4, 8], rel=0.05) and shared.note("x") == "x"  # nobody used any
    late = options(seconds=0.05)
    began = []
    for case, _ in late.shares(["first", "second", "third"]):
        began.append(case)
        time.sleep(0.06)
    assert began == ["first"] and late.note("moved") == f"moved; {common.LEFT_OUT}second, third"
    assert [case for case, _ in options(seconds=0.0).shares("abc", least=2)] == ["a", "b"]
    assert [its.seconds for _, its in options().shares("ab")] == [None, None], "no budget, no limit"
    assert options(seconds=1e-6).at_most == 0.5 and options(seconds=1e6).at_most == options().at_most


def test_a_step_that_takes_the_others_time_is_ended():
    def sleeper(seconds, code):
        words = [sys.executable, "-c", f"import sys, time; time.sleep({seconds}); sys.exit({code})"]
        return subprocess.Popen(words)

    start = time.monotonic()
    late = sleeper(60, 0)
    assert gpu.ended([sleeper(0, 0), late], 1.0) == "ended after 1 s, when the time was over"
    assert time.monotonic() - start < 20 and late.poll() is not None
    assert gpu.ended([sleeper(0, 0), sleeper(0, 3)], 30.0) == "ended with 3"
    assert gpu.ended([sleeper(0, 0)], 30.0) == ""


def test_nine_minutes_are_enough_for_the_plan():
    assert sum(gpu.SHARES.values()) + gpu.LAST <= gpu.BUDGET < 9 * 60
    assert set(gpu.SHARES) - {"kernels"} <= set(BENCHES)
    cases = {str(case) for case in paged_attention.cases(options(tiny=True))}
    assert len(cases) == len(paged_attention.GPU_CASES), "two cases of one name"


def test_quantized_weights_and_keys_have_targets_on_a_gpu():
    def run(bench, **changes):
        report = bench.run(options(tiny=True, **changes))
        return report, {row.case: row for row in report.rows}

    _, rows = run(decode_quant, seconds=2.0)
    judged = {case: row.target for case, row in rows.items() if row.target}
    assert judged == {
        f"tiny-llama-3.1-8b int{b}, 32 + 8 tokens": least for b, least in ((8, 0.65), (4, 0.45))
    }
    most = rows["tiny-llama-3.1-8b int4 / float32"].bound
    assert 4 < most < 6, "half of the bytes 8 times fewer, the head's 4 times, the embedding not read"
    report, rows = run(paged_attention, seconds=2.0)
    for kind, most in (("fp8", 0.58), ("int8", 0.62)):
        (row,) = (row for case, row in rows.items() if f": {kind} / 16 bits" in case)
        assert row.target * row.bound == pytest.approx(1 / most), "of the time over 16 bits"
    assert not any(common.LEFT_OUT in row.note for row in report.rows)
    report, rows = run(paged_attention, seconds=0.0)
    assert f"{paged_attention.QUANTIZED_KV}, {paged_attention.CHUNK}" in report.rows[0].note
    assert not any("16 bits" in case or "chunk" in case for case in rows)
    assert {M for _, M in matmul.TARGETS} == set(matmul.ROWS[:3]), "what has a target is measured first"


def test_a_gpus_cases_need_a_gpu_or_tiny(capsys):
    for words in (["--device", "cpu"], ["--tiny"], *([] if torch.cuda.is_available() else [[]])):
        with pytest.raises(SystemExit):
            gpu.main(words)
    assert "--tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_the_flow_in_miniature(tmp_path, monkeypatch, capfd):
    """One benchmark that works, one that does not exist: processes, JSON, table, figures, exit code."""
    monkeypatch.setattr(gpu, "SHARES", {"prefill-attention": 30, "no-such-benchmark": 30})
    assert gpu.main(["--device", "cpu", "--tiny", "--into", str(tmp_path)]) == 1
    out = capfd.readouterr().out
    table = out[out.index("=== table") :]
    assert "64 tokens: paged / minserve" in table and "DRY RUN" in table
    assert "no-such-benchmark: ended with 2" in table and "FAILED: no-such-benchmark" in table
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "gpu_run.json", "prefill_attention_gpu.json", "gpu.md", "gpu.png", "gpu_prefill_attention.png",
    }  # fmt: skip
    assert "--tiny --seconds" in Report.load(tmp_path / "prefill_attention_gpu.json").command


# ---------------------------------------------------------------- the kernels' tests
OUTCOMES = {
    "tests/kernels/test_a.py::test_x[1]": ["passed", 1.5, ""],
    "tests/kernels/test_a.py::test_y": ["failed", 0.1, ""],
    "tests/kernels/test_a.py::test_z": ["not run", 0.0, "not run: the deadline had passed"],
    "tests/kernels/test_a.py::test_s": ["skipped", 0.0, "no room"],
    "tests/kernels/test_b.py::test_m": ["skipped", 0.0, "interpreter only"],
}


def test_a_kernel_test_that_did_not_run_has_not_passed():
    (row,) = gpu.kernel_report(OUTCOMES).rows
    assert (row.case, row.median, row.bound, row.passed) == ("test_a.py passed", 1, 3, False)
    for part in (
        "not run, for the time was over: test_z",
        "failed: test_y",
        "1 skipped: no room",
        "slowest: test_x[1], 1.5 s",
        "test_b.py: nothing to run here, 1 skipped: interpreter only",
    ):
        assert part in row.note
    assert "not run, for the time was over: test_z" in gpu_table.remarks(gpu.kernel_report(OUTCOMES))


@pytest.mark.slow
@pytest.mark.skipif(not (TESTS / "kernels").is_dir(), reason="a copy without the kernels' tests")
def test_the_parts_are_all_tests_and_the_deadline_stops_them(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import os, pytest, time\n"
        "@pytest.mark.parametrize('i', range(8))\n"
        "def test_it(i):\n"
        "    time.sleep(0.2 * (i == 0))\n"
        "    if i == 0 and 'DIE' in os.environ: os._exit(1)\n"
        "    assert i != 3\n"
    )

    def outcomes(part, deadline, *die):
        file = tmp_path / f"{part.replace('/', 'of')}.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "deadline",
            "--part",
            part,
            "--deadline",
            str(deadline),
        ]
        command += ["--outcomes", str(file), "-p", "no:cacheprovider", "-q", str(tmp_path / "test_some.py")]
        where = {"PYTHONPATH": str(TESTS / "kernels"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | dict.fromkeys(
            die, ""
        )
        subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, timeout=60)
        return {test.split("::")[1]: what for test, (what, *_) in json.loads(file.read_text()).items()}

    parts = [outcomes(f"{i}/3", 60) for i in (1, 2, 3)]
    everything = {test: what for part in parts for test, what in part.items()}
    assert sum(map(len, parts)) == len(everything) == 8 and parts[1] and parts[2]
    assert everything["test_it[3]"] == "failed" and list(everything.values()).count("passed") == 7
    ended = outcomes("1/1", 60, "DIE")
    assert ended["test_it[0]"] == "not run" and len(ended) == 8, (
        "it had begun, and nothing more is known of it"
    )
    late = outcomes("1/1", 0.1)
    assert late.pop("test_it[0]") == "passed" and len(late) == 7
    assert set(late.values()) == {"not run"}, "what came after the deadline"


# ---------------------------------------------------------------- what the steps measure
def test_the_workload_is_nano_vllms():
    work = offline.nano_vllm(256, 100, 1024, 10_000)
    assert work.new_tokens == 133_966, "the number of output tokens that its README prints"
    assert len(work.prompts) == 256 and min(map(len, work.prompts)) >= 100 and work.longest <= 2048
    assert work.prompts[0][0] in range(10_001)


def record(*rows: LogRow) -> StepRecord:
    return StepRecord(0, 0.0, {}, list(rows), [], 0, 0, 0, 0)


@pytest.mark.parametrize(
    "machine", [Machine("slow memory", 1e9, 1e18), Machine("slow arithmetic", 1e18, 1e9)]
)
def test_a_schedules_roofline_is_that_of_its_steps(machine):
    config = SHAPES["qwen3-0.6b"]
    decoding = record(*[LogRow(i, 1, 99, True) for i in range(4)])
    prompt = record(LogRow(0, 101, 0, True))
    once = offline.roofline_seconds(config, machine, [decoding], 2)
    assert once == pytest.approx(decode_seconds(config, machine, 4, 100), rel=1e-3)
    whole = offline.roofline_seconds(config, machine, [prompt], 2)
    assert whole == pytest.approx(prefill_seconds(config, machine, 101, rows=1), rel=1e-3)
    both = offline.roofline_seconds(config, machine, [decoding, prompt], 2)
    assert both == pytest.approx(once + whole)
    silent = offline.roofline_seconds(config, machine, [record(LogRow(0, 101, 0, False))], 2)
    assert silent < whole if machine.flops == 1e9 else silent == whole, "no logits where nothing is drawn"
    drafted = offline.roofline_seconds(config, machine, [record(LogRow(0, 4, 99, True, drafted=3))], 2)
    alike = record(*[LogRow(0, 1, 99, True)] * (4 if machine.flops == 1e9 else 1))
    verified = offline.roofline_seconds(config, machine, [alike], 2)
    assert drafted == pytest.approx(verified, rel=1e-2), "logits for every place, keys and values once"


def test_waiting_is_what_no_span_covers():
    spans = [
        (10.0, 20.0),
        (22.0, 30.0),
        (50.0, 60.0),
        (15.0, 18.0),
    ]  # a gap of 2 is the device's own, one of 20 is not
    assert overhead.busy(spans) == pytest.approx(1 - 20 / 50)
    assert overhead.busy(spans, gap=1.0) == pytest.approx(1 - 22 / 50)
    assert overhead.busy([(0.0, 100.0), (20.0, 30.0), (200.0, 201.0)]) == pytest.approx(1 - 100 / 201)
