"""Every kernel compiles for GPUs that are not here: no spills, shared memory that fits, wide loads.

The table in figures/data/compile_report.json is made afresh, and compared when the Triton at hand is the one
that made it; the gates hold for any version.
"""

import json

import pytest

from minserve.kernels import HAS_TRITON, INTERPRETED

if INTERPRETED or not HAS_TRITON:
    pytest.skip("compiling needs Triton, not interpreted", allow_module_level=True)

from minserve.kernels import compile_report as report
from minserve.kernels import decode_attention, paged_attention, paged_prefill, prefill_attention


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Compiled now, in an empty cache: a row cannot be a memory of an older kernel."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    yield report.report()
    patch.undo()


def test_gates(made):
    broken = {(r["kernel"], r["dtype"], r["arch"]): w for r in made["rows"] if (w := report.broken_gates(r))}
    assert not broken
    assert {(r["arch"], r["dtype"]) for r in made["rows"]} == {
        (arch, dtype) for arch in ("sm_80", "sm_90", "gfx942") for dtype in ("fp16", "bf16", "fp32")
    } | {("sm_75", "fp16")}


def test_committed_table(made):
    committed = json.loads(report.TABLE.read_text())
    if committed["triton"] != made["triton"]:
        pytest.skip(f"the table was made by triton {committed['triton']}, this is {made['triton']}")
    assert committed["rows"] == made["rows"], "run python -m minserve.kernels.compile_report --write"


# ---------------------------------------------------------------- the gates can fail
def row_of(arch, dtype, label, **changes):
    """One kernel, compiled with something changed for the worse."""
    unaligned = changes.pop("unaligned", ())
    _, kernel, types, constants, options = next(c for c in report.cases(arch, dtype) if c[0] == label)
    compiled = report.compile_for(arch, kernel, types, constants | changes, options, unaligned)
    return dict(kernel=label, arch=arch, dtype=dtype, **report.count(compiled, arch))


BAD = [
    ("sm_80", "fp16", "spilled", dict(BLOCK_N=128, num_warps=4)),
    ("sm_90", "fp16", "no wgmma", dict(BLOCK_M=16, num_warps=4)),
    ("sm_80", "fp16", "bytes of shared memory", dict(BLOCK_M=128, BLOCK_N=64, num_stages=6)),
    ("sm_90", "bf16", "128-bit", dict(unaligned=("k_stride", "v_stride"))),
    ("gfx942", "fp16", "128-bit", dict(unaligned=("k_ptr", "v_ptr", "k_stride", "v_stride"))),
]


@pytest.mark.parametrize("arch, dtype, complaint, changes", BAD, ids=[f"{b[0]} {b[2]}" for b in BAD])
def test_a_bad_choice_breaks_its_gate(arch, dtype, complaint, changes):
    wrong = report.broken_gates(row_of(arch, dtype, "prefill_attention 128", **changes))
    assert any(complaint in text for text in wrong), wrong


def test_a_table_without_matrix_instructions_is_refused():
    """fp32 has none on NVIDIA: the same row under the name of a 16-bit type must not pass."""
    for arch, needed in (("sm_80", "mma.sync"), ("sm_90", "wgmma")):
        row = row_of(arch, "fp32", "prefill_attention 64") | dict(dtype="fp16")
        assert any(f"no {needed}" in text for text in report.broken_gates(row))


@pytest.mark.parametrize("D", [24, 80, 96, 256])
@pytest.mark.parametrize("arch", report.SHARED_LIMIT)
def test_other_head_sizes_compile(arch, D):
    """Padded and large heads keep to the shared memory; spills are not promised for them."""
    for label, tiles in (
        ("prefill_attention 64", prefill_attention.tiles(D, report.DTYPES["fp16"], arch)),
        ("decode_attention 64", decode_attention.tiles(D, report.DTYPES["fp16"], arch, 4)),
    ):
        row = row_of(arch, "fp16", label, D=D, **tiles)
        assert row["shared"] <= report.SHARED_LIMIT[arch]


@pytest.mark.parametrize("arch", report.SHARED_LIMIT)
def test_the_largest_heads_compile_with_pages(arch, D=256):
    """The deeper pipeline keeps to the shared memory too."""
    for label, tiles in (
        ("paged_decode 64", paged_attention.tiles(D, report.DTYPES["fp16"], arch, 64)),
        ("paged_prefill 64", paged_prefill.tiles(D, report.DTYPES["fp16"], arch)),
    ):
        row = row_of(arch, "fp16", label, D=D, **tiles)
        assert row["shared"] <= report.SHARED_LIMIT[arch]


@pytest.mark.parametrize("S", [8, 32, 64])
@pytest.mark.parametrize("label", ["paged_decode 128", "paged_prefill 128"])
def test_other_page_sizes_pass_the_gates(label, S):
    assert not report.broken_gates(row_of("sm_90", "bf16", label, S=S))


def test_a_tile_of_pages_is_on_its_way_while_another_is_used():
    """The look into the table must not cost the pipeline its depth: as much shared memory as without pages."""
    paged, dense = (
        row_of("sm_90", "bf16", "paged_decode 128"),
        row_of("sm_90", "bf16", "decode_attention 128"),
    )
    assert paged["shared"] >= dense["shared"]
    as_dense = row_of("sm_90", "bf16", "paged_decode 128", num_stages=3)  # what the dense kernel asks for
    assert as_dense["shared"] < dense["shared"]


def test_bad_pages_break_the_gates():
    strides = ("k_stride_p", "v_stride_p")  # pages that begin anywhere: no 16 bytes can be loaded at once
    wrong = report.broken_gates(row_of("sm_90", "bf16", "paged_prefill 128", unaligned=strides))
    assert any("128-bit" in text for text in wrong), wrong
    few = row_of("sm_90", "bf16", "paged_decode 128")  # 4 rows, and called 64
    assert report.broken_gates(few | dict(kernel="paged_decode 128 drafts")) == ["no wgmma instruction"]
