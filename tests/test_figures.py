"""Figures show the numbers they are given, in a small opaque file, no text on a line or another text."""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from minserve.lab import figures, layout
from minserve.lab.roofline import GPUS, Machine

plt.switch_backend("Agg")
LAPTOP = Machine("laptop", 34e9, 418e9)
RUNGS = [("no cache", 6.3, 126.0), ("KV cache", 41.0, 126.0), ("everything", 1490.0, 2900.0)]
WORK = [
    ("decode, 1 sequence", 1, 28e9), ("GEMV bf16", 1, 31e9), ("attention decode, GQA 3", 3, 60e9),
    ("decode, batch 8", 8, 180e9), ("decode, batch 64", 64, None), ("prefill 512", 400, 310e9),
    ("matmul 2048", 680, 400e9),
]  # fmt: skip
LENGTHS = [32, 64, 128, 256]
LINES = [
    ("no cache", LENGTHS, [1e-5 * n**2 for n in LENGTHS]),
    ("KV cache", LENGTHS, [1e-3 * n for n in LENGTHS]),
]
BATCHES = [1, 2, 4, 8, 16, 32]


GPU_WORK = [(f"batch {b}", b, None) for b in (1, 2, 256, 300, 600)]
TOGETHER = [(name, [1, 2], [1.0, 2.0 + i / 1e3]) for i, name in enumerate("abcd")]
RATES = [30 * b**0.7 for b in BATCHES], [126 * b / (1 + b / 30) for b in BATCHES]
KV = [("MHA", 2_621_440), ("GQA", 327_680), ("MQA", 40_960)]
PEERS = [
    ("one sequence", [("minserve", 104.0), ("transformers 5.24.0, generate", 25.0), ("vLLM 0.32.0", 60.4)]),
    ("mixed 32", [("minserve", 350.0), ("transformers 5.24.0, continuous batching", 3.5), ("vLLM 0.32.0", 340.0)]),
    ("decode-heavy 8", [("minserve", 300.0), ("vLLM 0.32.0", 417.0), ("llama.cpp b11434-0c1e570", 299.0)]),
]  # fmt: skip
PARTS = ("weights", "attention", "small ops", "dispatch", "Python", "sampling")
SPLIT = [
    ("decode 1", 0.008, [("plain", 0.024, dict(zip(PARTS, [0.01, 0.002, 0.004, 0.005, 0.001, 0.001])))]),
    ("prefill", 0.1, [(way, 0.3, dict.fromkeys(PARTS, 0.05)) for way in ("plain", "fused", "graph")]),
]
FIGURES = {
    "ladder": lambda: figures.ladder(figures.axes(6.4, 2), RUNGS),
    "roofline": lambda: figures.roofline(figures.axes(6.4, 4), LAPTOP, WORK),
    "GPU roofline": lambda: figures.roofline(figures.axes(6.4, 4), GPUS["H100 SXM"], GPU_WORK),
    "curves": lambda: figures.curves(figures.axes(), LINES, "tokens generated"),
    "linear curves": lambda: figures.curves(figures.axes(), LINES, "tokens generated", log=False),
    "ends together": lambda: figures.curves(figures.axes(), TOGETHER, "n"),
    "batch curve": lambda: figures.batch_curve(figures.axes(), BATCHES, *RATES, crossover=12.3),
    "kv": lambda: figures.kv_bars(figures.axes(6.4, 2), KV),
    "peers": lambda: figures.peers(figures.axes(6.4, 4), PEERS),
    "steps": lambda: figures.steps(figures.axes(7.2, 3), SPLIT, PARTS),
    "users": lambda: figures.user_bars(figures.axes(6.4, 2), [("MHA", 0), ("GQA", 97)]),
}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def texts(ax):
    """Texts and their boxes, shrunk by a pixel: touching is not overlapping."""
    return [(text, box.padded(-1)) for text, box in layout.text_boxes(ax)]


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_lies_on_another(name):
    assert texts(ax := FIGURES[name]()), "a figure without a word"
    no_overlap(ax)


def no_overlap(ax):
    found = texts(ax)
    for i, (text, box) in enumerate(found):
        hit = [other for other, its in found[i + 1 :] if box.overlaps(its)]
        assert not hit, f"{text!r} overlaps {hit}"


@pytest.mark.parametrize(
    "machine, work", [(LAPTOP, WORK), (GPUS["T4"], [("a", 0.5, None), ("b", 9e3, 1e11)])]
)
def test_no_label_of_the_roofline_touches_the_roof_or_leaves_the_axes(machine, work):
    ax = figures.roofline(figures.axes(6.4, 4), machine, work)
    frame = ax.get_window_extent()
    roof = ax.lines[0].get_xydata()
    path = np.concatenate([np.geomspace(a, b, 400) for a, b in pairwise(roof)])  # straight on log axes
    pixels = ax.transData.transform(path)
    for text, box in texts(ax):
        assert frame.contains(*box.min) and frame.contains(*box.max), f"{text!r} leaves the axes"
        assert not any(box.contains(x, y) for x, y in pixels), f"{text!r} lies on the roof"


def test_the_overlap_check_can_fail():
    ax = figures.axes()
    ax.text(0.5, 0.5, "one"), ax.text(0.51, 0.5, "two")
    with pytest.raises(AssertionError, match="'one' overlaps"):
        no_overlap(ax)


@pytest.mark.parametrize("name", FIGURES)
def test_save_writes_a_small_opaque_png(tmp_path, name):
    ax, path = FIGURES[name](), tmp_path / "deep" / "figure.png"
    figures.save(ax, path, "The finding, in a sentence", "Intel Xeon, 2 threads")
    image = Image.open(path)
    assert image.format == "PNG" and image.convert("RGBA").getextrema()[3] == (255, 255)
    assert path.stat().st_size < 60_000 and 600 < image.width < 1600
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert ax.get_title(loc="left") == "The finding, in a sentence"
    assert any(text == "Intel Xeon, 2 threads" for text, _ in layout.text_boxes(ax))


def test_the_ladder_shows_each_rung_its_rate_and_its_share():
    ax = figures.ladder(figures.axes(), RUNGS)
    said = [text.get_text() for text in ax.texts]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["no cache", "KV cache", "everything"]
    assert {"6.3", "41", "1,490", "5%", "33%", "51%"} < set(said)
    low, high = ax.get_xlim()
    assert low < 6.3 and high > 2900 and ax.get_ylim()[0] > ax.get_ylim()[1], "first rung on top"


def test_the_roofline_places_points_where_they_were_measured():
    ax = figures.roofline(figures.axes(6.4, 4), LAPTOP, WORK)
    offsets = [tuple(dots.get_offsets()[0]) for dots in ax.collections]
    assert (3, 60e9) in offsets and (64, 418e9) in offsets, "a prediction sits on the roof"
    said = [text.get_text() for text in ax.texts]
    assert "decode, 1 sequence  82%" in said and "decode, batch 64" in said and "read 34.0 GB/s" in said


def test_lines_differ_without_colour():
    ax = figures.curves(figures.axes(), [(name, [1, 2], [1, i + 2]) for i, name in enumerate("abcd")], "n")
    assert len({(line.get_linestyle(), line.get_marker()) for line in ax.lines}) == 4
    ax = figures.kv_bars(figures.axes(), [("MHA", 4.0), ("GQA", 2.0), ("MQA", 1.0)])
    assert len({bar.get_hatch() for bar in ax.patches}) == 3
    assert [bar.get_width() for bar in ax.patches] == [4, 2, 1] and ax.get_xlim()[0] == 0


def test_peers_are_bars_as_multiples_of_the_first_with_their_rates():
    ax = figures.peers(figures.axes(6.4, 4), PEERS)
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == pytest.approx([1, 25 / 104, 60.4 / 104, 1, 0.01, 340 / 350, 1, 417 / 300, 299 / 300])
    said = [text.get_text() for text in ax.texts]
    assert {"one sequence", "mixed 32", "decode-heavy 8", "104 tok/s", "3.5 tok/s", "417 tok/s"} < set(said)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [name for _, rows in PEERS for name, _ in rows] and ax.get_xlim()[0] == 0
    looks = {name: (bar.get_hatch(), bar.get_edgecolor()) for name, bar in zip(names, ax.patches)}
    assert len(set(looks.values())) == len(looks) == 5, (
        "an engine looks the same in each group, and like no other"
    )
    centres = [bar.get_y() + bar.get_height() / 2 for bar in ax.patches]
    assert list(ax.get_yticks()) == pytest.approx(centres) and len(set(centres)) == 9
    frame = ax.get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 + 1 for _, box in texts(ax)), (
        "a label leaves the axes"
    )


@pytest.mark.parametrize(
    "low, high, base, ticks",
    [
        (1, 100, 10, [1, 2, 5, 10, 20, 50, 100]),
        (4, 3800, 10, [10, 30, 100, 300, 1000, 3000]),
        (1, 1e6, 10, [1, 10, 100, 1e3, 1e4, 1e5, 1e6]),
        (0.9, 70, 2, [1, 2, 4, 8, 16, 32, 64]),
        (1.7, 4.4, 10, [2, 3, 4]),  # one tick alone says nothing
        (1, 2**12, 2, [1, 4, 16, 64, 256, 1024, 4096]),
    ],
)
def test_ticks_are_round_and_few(low, high, base, ticks):
    assert layout.ticks_between(low, high, base) == pytest.approx(ticks)


def test_more_than_four_lines_are_refused():
    lines = [(str(i), [1, 2], [1, 2]) for i in range(5)]
    with pytest.raises(ValueError, match="5 lines, and 4 can be told apart"):
        figures.curves(figures.axes(), lines, "n")


def test_the_layout_picture_numbers_elements_as_memory_does():
    """Every cell of a [4, 2, 4] cache shows its row-major offset, once; the marked one is named in the caption."""
    ax = figures.cache_layout(figures.axes())
    texts = [text.get_text() for text in ax.texts]
    assert sorted(int(t) for t in texts if t.isdigit()) == list(range(32))
    assert any("k[2, 1, 3]" in t and "= 23 elements" in t for t in texts)


def test_a_step_is_stacked_from_its_parts_in_multiples_of_the_bound():
    ax = figures.steps(figures.axes(7.2, 3), SPLIT, PARTS)
    plain, others = ax.patches[:6], ax.patches[6:]
    assert [bar.get_width() for bar in plain] == pytest.approx([1.25, 0.25, 0.5, 0.625, 0.125, 0.125])
    assert [bar.get_x() for bar in plain] == pytest.approx([0, 1.25, 1.5, 2.0, 2.625, 2.75])
    assert len(others) == 18 and all(bar.get_width() == pytest.approx(0.5) for bar in others)
    assert (
        len({(bar.get_edgecolor(), bar.get_hatch()) for bar in plain})
        == len({b.get_hatch() for b in plain})
        == 6
    )
    said = [text.get_text() for text in ax.texts]
    assert "24.0 ms" in said and "300 ms" in said and any("bound 8.00 ms" in text for text in said)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(PARTS)
