"""Every kernel compiles for GPUs that are not here: no spills, shared memory that fits, wide loads.

Much of the table in figures/data/compile_report.json is made afresh, every kernel of it in every dtype, and compared
when the Triton at hand is the one that made it; the gates hold for any version, and for all of the table.
"""

import json

import pytest
from test_mutations import changed, load

from minserve.kernels import HAS_TRITON, INTERPRETED, tl, triton

if INTERPRETED or not HAS_TRITON:
    pytest.skip("compiling needs Triton, not interpreted", allow_module_level=True)

from minserve.kernels import compile_counts as counts
from minserve.kernels import compile_report as report
from minserve.kernels import decode_attention, paged_attention, paged_prefill, prefill_attention

pytestmark = pytest.mark.timeout(1800)  # the first one waits for hundreds of compilations


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Compiled now, in an empty cache: a row cannot be a memory of an older kernel."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    yield report.report(sample=True)
    patch.undo()


@pytest.fixture(scope="module")
def committed():
    return json.loads(report.TABLE.read_text())


def keys_of(rows):
    return {(row["arch"], row["dtype"], row["kernel"]): row for row in rows}


def test_gates(made, committed):
    for rows in (made["rows"], committed["rows"]):
        assert not {key: wrong for key, row in keys_of(rows).items() if (wrong := report.broken_gates(row))}


def test_committed_table(made, committed):
    if committed["triton"] != made["triton"]:
        pytest.skip(f"the table was made by triton {committed['triton']}, this is {made['triton']}")
    rows, again = keys_of(committed["rows"]), "run python -m minserve.kernels.compile_report --write"
    assert keys_of(made["rows"]).items() <= rows.items(), again
    every = {(*job, label) for job in JOBS for label in report.labels_of(*job)}
    assert every == {key for key in rows if "naive" not in key[2]}, again


JOBS = [(arch, dtype) for arch in report.ARCHS for dtype in report.DTYPES] + [("sm_75", "fp16")]


@pytest.mark.parametrize("dtype, share", [("bf16", 1.0), ("fp16", 0.5), ("fp32", 0.4)])
def test_the_sample_has_every_kernel_in_every_dtype(dtype, share):
    jobs = [job for job in JOBS if job[1] == dtype]
    every, some = ([x for job in jobs for x in report.labels_of(*job, sample)] for sample in (False, True))
    rare = {x for x in every if every.count(x) == 1}  # on one architecture only, and this may not be its turn
    assert set(every) - rare <= set(some) <= set(every) and len(some) <= share * len(every)


# ---------------------------------------------------------------- tuned and naive
ON_BOTH = [(arch, *pair) for arch in ("sm_80", "sm_90") for pair in report.NAIVE]


def pair_of(made, arch, label, what):
    rows = {r["kernel"]: r for r in made["rows"] if r["arch"] == arch and r["dtype"] == "bf16"}
    return rows[label], rows[f"{label}, naive: {what}"]


@pytest.mark.parametrize("arch, label, what", ON_BOTH, ids=lambda x: x)
def test_tuned_beats_naive(made, arch, label, what):
    tuned, naive = pair_of(made, arch, label, what)
    _, counted = report.NAIVE[label, what]
    counted = [name for name in counted if name != "wgmma" or arch == "sm_90"]
    assert counted and all(report.beats(tuned, naive, name) for name in counted), (tuned, naive)
    assert not any(report.beats(naive, tuned, name) or report.beats(tuned, tuned, name) for name in counted)


@pytest.mark.parametrize("label, what, complaint", [
    ("prefill_attention 128", "tiles of 16", "no wgmma"),
    ("prefill_attention 128", "all in 4 warps", "spilled"),
    ("prefill_attention 128", "keys anywhere", "128-bit"),
    ("paged_decode 128", "pages anywhere", "128-bit"),
    ("gemv 1", "one row, one number per load", "128-bit"),
    ("gemv 1", "one row, one number per load", "widest load is 16 bits"),
    ("int4 gemv 1", "one row, one word per load", "128-bit"),
])  # fmt: skip
def test_a_naive_row_would_break_the_gates(made, label, what, complaint):
    _, naive = pair_of(made, "sm_90", label, what)
    assert not report.broken_gates(naive)  # it is there to lose
    assert any(complaint in text for text in report.broken_gates(naive | dict(kernel=label)))


# ---------------------------------------------------------------- the counts
FULL = [  # arch, registers, shared, warps, what CUDA's occupancy calculator says
    ("sm_80", 32, 0, 8, 1.0),
    ("sm_80", 33, 0, 4, 0.75),  # 40 registers x 32 threads: 12 warps in each quarter
    ("sm_80", 33, 0, 2, 0.75),
    ("sm_80", 65, 0, 8, 0.38),  # 72: 7 warps in each quarter are 28, and 8 do not divide them
    ("sm_80", 255, 0, 4, 0.12),
    ("sm_80", 16, 0, 1, 0.5),  # 32 blocks
    ("sm_80", 32, 40 << 10, 4, 0.25),  # 41 KiB with the system's: 4 times
    ("sm_80", 32, 41 << 10, 4, 0.19),
    ("sm_90", 32, 113 << 10, 4, 0.12),  # 114 KiB: exactly twice
    ("sm_90", 32, (113 << 10) + 1, 4, 0.06),
    ("sm_90", 32, 228 << 10, 4, 0.0),
    ("sm_75", 32, 32 << 10, 4, 0.25),  # nothing reserved
    ("sm_90", 32, 45_666, 4, 0.25),  # with the system's 46,690 bytes, which take 46,720: not 5 times
    ("sm_75", 32, 0, 4, 1.0),  # room for 32 warps only
    ("gfx942", 64, 0, 4, None),
]
FRAGMENT = """
    ld.global.v4.b32 {%r1}, [%rd0];
    shl.b32 %r9, %r8, 2;
$L__BB0_1:
    ld.global.b32 %r1, [%rd1];
    add.s32 %r2, %r1, 4;
    @%p2 bfe.u32 %r3, %r2, 4, 4;
    cvt.rn.f32.s32 %f1, %r3;
    lop3.b32 %r4, %r3, 15, 0, 0x80;
    mul.f32 %f2, %f1, %f1;
    add.f32 %f3, %f2, %f1;
    fma.rn.f32 %f4, %f1, %f2, %f3;
    mov.b32 %r5, %r4;
    @%p1 bra $L__BB0_1;
$L__BB0_2:
    and.b32 %r7, %r6, 1;
    @%p3 bra $L__BB0_2;
    bra $L__BB0_3;
$L__BB0_3:
    ret;
"""


def check_counts(module):
    for arch, registers, shared, warps, expected in FULL:
        assert module.occupancy(arch, registers, shared, warps) == expected, (arch, registers, shared, warps)
    assert module.operations_per_weight(FRAGMENT, 2) == 2.0  # add, bfe, cvt, lop3 for two weights
    assert module.operations_per_weight(FRAGMENT, 8) == 0.5
    try:
        module.operations_per_weight("bra $L__BB0_1;\nand.b32 %r7, %r6, 1;\n$L__BB0_1:\nret;", 2)
        raise AssertionError("no loop, and nobody said so")
    except ValueError as error:
        assert "no loop" in str(error)


def test_counts_by_hand():
    check_counts(counts)


WRONG_COUNTS = [
    ("nothing reserved", "_up(shared + has.reserved, unit)", "_up(shared, unit)"),
    ("shared memory in any size", "_up(shared + has.reserved, unit)", "(shared + has.reserved)"),
    ("registers in any number", "_up(registers * 32, 256)", "registers * 32"),
    ("one register file", "has.registers // 4 // per_warp * 4", "has.registers // per_warp"),
    ("warps of half a block", "held // warps", "-(-held // warps)"),
    ("any number of blocks", "has.blocks, held", "held"),
    ("any number of warps", "min(has.warps // warps,", "min("),
    ("blocks for warps", "blocks * warps / has.warps", "blocks / has.blocks"),
    ("the whole kernel", "lines[labels[to[1]] : i]", "lines[:i]"),
    ("the last loop", "body = max(loops, key=", "body = max(loops[-1:], key="),
    ("loops forwards too", "if to and labels.get(to[1], i) < i", "if to"),
    ("arithmetic too", r"(?:\.\w+)*?\.[sub]\d+", r"(?:\.\w+)*?\.[subf]\d+"),
    ("no conversions", "prmt|cvt|", "prmt|"),
    ("only what is always done", r're.sub(r"^@!?%p\d+\s+", "", line)', "line"),
]


@pytest.mark.parametrize("what, right, wrong", WRONG_COUNTS, ids=[w[0] for w in WRONG_COUNTS])
def test_wrong_counts_are_noticed(what, right, wrong, tmp_path):
    module = load("compile_counts", changed("compile_counts", right, wrong), tmp_path)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check_counts(module)


@triton.jit
def _four_bits(x_ptr, weight_ptr, out_ptr, K: tl.constexpr):
    """Eight weights to a word, each unpacked by itself: shift, mask, convert."""
    i = tl.arange(0, 128)
    total = tl.zeros([128], tl.float32)
    for start in range(0, K, 128):
        word = tl.load(weight_ptr + start + i)
        x = tl.load(x_ptr + start + i)
        for j in tl.static_range(8):
            total += ((word >> (4 * j)) & 15).to(tl.float32) * x
    tl.store(out_ptr + i, total)


def test_unpacking_costs_more_than_bf16_does(made):
    types = dict(x_ptr="*fp32", weight_ptr="*i32", out_ptr="*fp32")
    compiled = report.compile_for("sm_90", _four_bits, types, dict(K=4096), dict(num_warps=4))
    row = report.count(compiled, "sm_90", weights=8)
    plain, _ = pair_of(made, "sm_90", "gemv 1", "one row, one number per load")
    assert 2 <= row["operations"] <= 4 and row["operations"] > plain["operations"]


# ---------------------------------------------------------------- the gates can fail
BAD = [
    ("sm_80", "fp16", "spilled", dict(BLOCK_N=128, num_warps=4)),
    ("sm_90", "fp16", "no wgmma", dict(BLOCK_M=16, num_warps=4)),
    ("sm_80", "fp16", "bytes of shared memory", dict(BLOCK_M=128, BLOCK_N=64, num_stages=6)),
    ("sm_90", "bf16", "128-bit", dict(unaligned=("k_stride", "v_stride"))),
    ("gfx942", "fp16", "128-bit", dict(unaligned=("k_ptr", "v_ptr", "k_stride", "v_stride"))),
]


@pytest.mark.parametrize("arch, dtype, complaint, changes", BAD, ids=[f"{b[0]} {b[2]}" for b in BAD])
def test_a_bad_choice_breaks_its_gate(arch, dtype, complaint, changes):
    wrong = report.broken_gates(report.row_of(arch, dtype, "prefill_attention 128", **changes))
    assert any(complaint in text for text in wrong), wrong


def test_a_table_without_matrix_instructions_is_refused():
    """fp32 has none on NVIDIA: the same row under the name of a 16-bit type must not pass."""
    for arch, needed in (("sm_80", "mma.sync"), ("sm_90", "wgmma")):
        for label in ("prefill_attention 64", "int4 dot 16"):
            row = report.row_of(arch, "fp32", label) | dict(dtype="fp16")
            assert any(f"no {needed}" in text for text in report.broken_gates(row))


@pytest.mark.parametrize("D", [24, 80, 96, 256])
@pytest.mark.parametrize("arch", report.SHARED_LIMIT)
def test_other_head_sizes_compile(arch, D):
    """Padded and large heads keep to the shared memory; spills are not promised for them."""
    for label, tiles in (
        ("prefill_attention 64", prefill_attention.tiles(D, report.DTYPES["fp16"], arch)),
        ("decode_attention 64", decode_attention.tiles(D, report.DTYPES["fp16"], arch, 4)),
    ):
        row = report.row_of(arch, "fp16", label, D=D, **tiles)
        assert row["shared"] <= report.SHARED_LIMIT[arch]


@pytest.mark.parametrize("arch", report.SHARED_LIMIT)
def test_the_largest_heads_compile_with_pages(arch, D=256):
    """The deeper pipeline keeps to the shared memory too."""
    for label, tiles in (
        ("paged_decode 64", paged_attention.tiles(D, report.DTYPES["fp16"], arch, 64)),
        ("paged_prefill 64", paged_prefill.tiles(D, report.DTYPES["fp16"], arch)),
    ):
        row = report.row_of(arch, "fp16", label, D=D, **tiles)
        assert row["shared"] <= report.SHARED_LIMIT[arch]


@pytest.mark.parametrize("S", [8, 32, 64])
@pytest.mark.parametrize("label", ["paged_decode 128", "paged_prefill 128"])
def test_other_page_sizes_pass_the_gates(label, S):
    assert not report.broken_gates(report.row_of("sm_90", "bf16", label, S=S))


def test_a_tile_of_pages_is_on_its_way_while_another_is_used():
    """The look into the table must not cost the pipeline its depth: as much shared memory as without pages."""
    paged, dense = (
        report.row_of("sm_90", "bf16", "paged_decode 128"),
        report.row_of("sm_90", "bf16", "decode_attention 128"),
    )
    assert paged["shared"] >= dense["shared"]
    as_dense = report.row_of(
        "sm_90", "bf16", "paged_decode 128", num_stages=3
    )  # what the dense kernel asks for
    assert as_dense["shared"] < dense["shared"]


def test_bad_pages_break_the_gates():
    strides = ("k_stride_p", "v_stride_p")  # pages that begin anywhere: no 16 bytes can be loaded at once
    wrong = report.broken_gates(report.row_of("sm_90", "bf16", "paged_prefill 128", unaligned=strides))
    assert any("128-bit" in text for text in wrong), wrong
    few = report.row_of("sm_90", "bf16", "paged_decode 128")  # 4 rows, and called 64
    assert report.broken_gates(few | dict(kernel="paged_decode 128 drafts")) == ["no wgmma instruction"]
