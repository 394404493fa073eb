"""The split of a step: clocks that disturb nothing, parts that add up, rows and a figure made of them."""

import time
from collections import defaultdict
from dataclasses import replace
from statistics import median

import pytest
import torch

from minserve.__main__ import main
from minserve.bench import clocks, common, linear, memory, step
from minserve.config import SHAPES
from minserve.fetch import FetchError
from minserve.kernels import native
from minserve.lab.report import Report, Row
from minserve.lab.roofline import Machine
from minserve.model import Model

TINY = replace(
    SHAPES["smollm2-135m"], vocab_size=251, hidden_size=96, intermediate_size=76, num_layers=3, num_heads=6,
    num_kv_heads=2, head_dim=16, context=512, windows=(),
)  # fmt: skip
needs_native = pytest.mark.skipif(bool(native.usable()), reason=f"no native kernels: {native.usable()}")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model.random(TINY)


def watched(model, kind, sequences=2):
    side = step.Watched(model, sequences, 64, kind, decoding=True)
    side.step()
    return side


def typical(side) -> dict[str, float]:
    """The parts of three steps: on a busy machine any one of them may have been interrupted."""
    samples = defaultdict(list)
    for _ in range(3):
        for part, seconds in side.on_cpu().items():
            samples[part].append(seconds)
    return {part: median(its) for part, its in samples.items()}


# ---------------------------------------------------------------- the clocks
@needs_native
@pytest.mark.parametrize("kind", ["fused", "graph"])
def test_every_native_call_of_a_step_is_heard_and_nothing_is_changed(model, kind, monkeypatch):
    side, heard = watched(model, kind), []
    monkeypatch.setattr(clocks, "watched", lambda f, part, seconds: lambda *a: (heard.append(part), f(*a)))
    ops = side.ops
    functions = dict(ops._functions)
    recorded = [one.replay.play for one in getattr(side.compute, "steps", {}).values()]
    with torch.inference_mode():
        alone = side.compute(side.batch)[0].clone()
        with clocks.timed(side.compute, {}):
            assert torch.equal(side.compute(side.batch)[0], alone)
    assert ops._functions == functions
    for one, play in zip(getattr(side.compute, "steps", {}).values(), recorded):
        assert one.replay.play is play
    layers = TINY.num_layers
    assert heard.count("weights") == 4 * layers + 1 and heard.count("attention") == layers
    assert heard.count("sampling") == 1 and heard.count("small ops") == 2 + 4 * layers


@needs_native
def test_a_slow_kernel_is_found_in_its_part(model, monkeypatch):
    side, functions = watched(model, "fused"), None
    functions = side.ops._functions
    slow = functions["silu_mul", torch.float32]

    def dawdle(*arguments):
        time.sleep(0.02)
        slow(*arguments)

    functions["silu_mul", torch.float32] = dawdle
    parts = typical(side)
    assert parts["small ops"] > 0.06 and parts["step"] > 0.06
    assert max(parts[part] for part in step.PARTS if part != "small ops") < 0.05


def test_a_slow_engine_is_python_and_a_slow_model_is_dispatch(model):
    side = watched(model, "plain")
    schedule, compute = side.engine.scheduler.schedule, side.compute
    side.engine.scheduler.schedule = lambda: (time.sleep(0.05), schedule())[1]
    side.compute = lambda batch: (time.sleep(0.1), compute(batch))[1]
    parts = typical(side)
    assert parts["Python"] >= 0.05 and parts["dispatch"] > 0.05 and parts["step"] > 0.15
    assert max(parts[part] for part in step.PARTS if part not in ("Python", "dispatch")) < 0.05


def test_a_split_adds_up_to_the_step(model):
    for kind in step.KINDS:
        side, shares = watched(model, kind), []
        for _ in range(10):  # on a busy machine most of them may be interrupted
            parts = side.on_cpu()
            assert set(parts) == {"step", *step.PARTS} and all(value >= 0 for value in parts.values())
            shares.append(sum(parts[part] for part in step.PARTS) / parts["step"])
        assert min(shares) < 4


def test_names_decide():
    assert [clocks.part_of_operation(f"aten::{name}") for name in ("mm", "addmm", "linear")] == [
        "weights"
    ] * 3
    assert clocks.part_of_operation("mkldnn::_linear_pointwise") == "weights"
    attention = ("_scaled_dot_product_flash_attention_for_cpu", "index_select")
    assert {clocks.part_of_operation(f"aten::{name}") for name in attention} == {"attention"}
    assert {clocks.part_of_operation(f"aten::{name}") for name in ("mul", "silu", "index")} == {"small ops"}
    assert {clocks.part_of_operation(f"aten::{name}") for name in ("view", "t", "empty_strided")} == {
        "dispatch"
    }
    gpu = {
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "weights", "_gemv_kernel": "weights",
        "_paged_decode_kernel": "attention", "_paged_prefill_kernel": "attention", "_sample_kernel": "sampling",
        "_rms_norm_kernel": "small ops", "_rope_and_write_kernel": "small ops", "_silu_mul_kernel": "small ops",
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::launch>": "small ops",
    }  # fmt: skip
    assert {name: clocks.part_of_kernel(name) for name in gpu} == gpu


def test_on_a_gpu_what_its_kernels_leave_is_dispatch(model, monkeypatch):
    side = watched(model, "plain")
    monkeypatch.setattr(step, "clock", lambda run: (run(), 0.010)[1])
    monkeypatch.setattr(step, "kernels", lambda run: (run(), {"weights": 0.006, "attention": 0.001})[1])
    parts = side.on_gpu()
    assert parts["step"] == 0.010 and parts["dispatch"] == pytest.approx(0.003) and parts["weights"] == 0.006


# ---------------------------------------------------------------- rows
def samples(**changes):
    return {"step": [1.0, 1.2, 1.1]} | {part: [0.2, 0.1833, 0.1833] for part in step.PARTS} | changes


@pytest.mark.parametrize("part", step.PARTS)
def test_parts_that_do_not_add_up_are_said(part):
    assert step.check(samples()) == "the parts are 100% of the step"
    for wrong in (0.0, 0.4):
        assert "not to be trusted" in step.check(samples(**{part: [wrong]}))


def test_bounds_are_the_roofs():
    machine = Machine("here", 1e9, 1e12)
    one, many = (step.bounds_of(TINY, machine, "decode", b, 100, 2) for b in (1, 32))
    assert one["weights"] == 2 * TINY.num_params_read / 1e9 == many["weights"]
    assert many["attention"] == pytest.approx(32 * one["attention"])
    assert one["step"] == pytest.approx(one["weights"] + one["attention"])  # both wait for bytes
    prompt = step.bounds_of(TINY, Machine("slow", 1e15, 1e9), "prefill", 1, 200, 2)
    assert prompt["step"] == pytest.approx(prompt["weights"] + prompt["attention"])  # both wait for flops


@pytest.mark.slow
def test_the_command_its_rows_and_its_figure(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    path = tmp_path / "step.json"
    assert main(["bench", "step", "--model", "tiny", "--quick", "--json", str(path)]) == 0
    report = Report.load(path)
    groups = step.groups_of(report)
    assert [work for work, *_ in groups] == [
        "decode 1, context 128",
        "decode 4, context 128",
        "prefill, 64 tokens",
    ]
    assert [[kind for kind, *_ in kinds] for *_, kinds in groups] == [[*step.KINDS]] * 2 + [
        ["plain", "fused"]
    ]
    for work, bound, kinds in groups:
        for kind, seconds, parts in kinds:
            row = report.row(f"{work}, {kind}")
            assert bound == row.bound and seconds == row.median and tuple(parts) == step.PARTS
            assert "the parts are" in row.note and row.unit == "s" and len(row.samples) >= 3
            assert report.row(f"{work}, {kind}: weights").bound > 0
            assert report.row(f"{work}, {kind}: dispatch").bound is None
    step.draw(report, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"


# ---------------------------------------------------------------- linears
def crossing(**sides):
    report = Report("linear", "")
    for who, seconds in sides.items():
        for rows, its in zip((1, 8, 64), seconds):
            report.add(Row(linear.case_of(rows, who), "s", [its], 0.5))
    return report


def test_where_the_native_kernel_keeps_up():
    report = crossing(**{"F.linear": [3, 3, 3], "oneDNN": [2.0, 1.0, 1.0], "native": [1.0, 1.04, 4]})
    assert linear.level(report) == {"F.linear": 8, "oneDNN": 8}
    assert (
        linear.in_words(report)
        == "The native kernel keeps up with F.linear up to 8 rows, oneDNN up to 8 rows"
    )
    assert linear.level(crossing(**{"F.linear": [1, 3, 3], "native": [2, 1, 1]})) == {"F.linear": 0}
    assert linear.level(crossing(**{"F.linear": [1, 3, 3], "native": [1]})) == {"F.linear": 1}
    assert linear.in_words(crossing(**{"F.linear": [1, 3, 3]})) == "Linears: time against rows"


def test_all_matmuls_agree(tmp_path):
    model = Model.random(TINY, torch.bfloat16)
    layers = linear.FusedModel.of(model, 1).linears[:-1]
    sides = linear.sides_of(layers)
    for i, one in enumerate(layers):
        x = torch.randn(4, one.weight.shape[1]).bfloat16()
        with torch.inference_mode():
            right = x.float() @ one.weight.float().T
            for who, side in sides.items():
                assert torch.allclose(side(i, x).float(), right, rtol=0.02, atol=0.02), who


def test_the_linears_figure(tmp_path):
    linear.draw(crossing(**{"F.linear": [3, 3, 3], "native": [1, 1, 4]}), tmp_path / "linear.png")
    assert (tmp_path / "linear.png").read_bytes()[:4] == b"\x89PNG"


# ---------------------------------------------------------------- memory
WITHOUT_UNITS = """
from minserve.kernels import native
made = native.Native.__init__
def without(self, *args):
    made(self, *args)
    self.matrix_units = False
native.Native.__init__ = without
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", WITHOUT_UNITS], ids=["this machine", "no matrix units"])
def test_smollm2_and_2048_tokens_of_pages_fit_in_the_limit(smollm, before, monkeypatch):
    if before and native.usable():
        pytest.skip(native.usable())
    code = f"{before}\nimport json\nfrom minserve.bench import memory\nprint(json.dumps(memory.serve('bfloat16', '')))"
    run = memory.subprocess.run
    monkeypatch.setattr(memory.subprocess, "run", lambda command, **how: run([command[0], "-c", code], **how))
    ballast = torch.ones(300_000_000)  # what the parent holds is not counted
    its = memory.measured(common.Options("memory", "", None, torch.bfloat16, True))
    assert 5e7 < its["imports"] < ballast.nbytes
    assert 0.6e9 < its["peak"] <= memory.LIMIT
    assert sum(its[part] for part in memory.PARTS) == pytest.approx(its["peak"], rel=1e-3)
    assert its["weights"] == 2 * SHAPES["smollm2-135m"].num_params and its["rest"] > 0
    blocks = before and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (its["packed"] > 0.9 * its["weights"]) if blocks else "once" in its["held"] or its["packed"]


def test_a_process_that_dies_says_why(tmp_path, monkeypatch):
    folder = str(tmp_path / "no such")
    with pytest.raises(FetchError, match="no such folder"):
        memory.serve("bfloat16", folder)
    monkeypatch.setattr(memory, "SERVES", "import sys; sys.exit('it died of ' + sys.argv[2])")
    with pytest.raises(RuntimeError, match="it died of .*no such"):
        memory.measured(common.Options("memory", "", folder, torch.bfloat16, True))
