"""What requests weigh and how many fit: worked out by hand, and drawn with no text on another."""

from itertools import pairwise

import matplotlib.pyplot as plt
import pytest
from PIL import Image

from minserve.config import SHAPES
from minserve.lab import kv_figures, layout
from minserve.lab.kv_figures import GQA, MISTRAL, MODELS, request_bytes, users

plt.switch_backend("Agg")


def test_bytes_by_hand():
    """Llama-3.1-8B: 32 layers, 8 heads of 128 channels."""
    assert request_bytes(GQA, 1000) == 1000 * 131_072
    assert request_bytes(GQA, 1000, "int8") == request_bytes(GQA, 1000, "fp8") == 1000 * 32 * 8 * 2 * 132
    assert request_bytes(GQA, 1000, "int4") == 1000 * 32 * 8 * 140 + 64 * 131_072  # sealed, and the open page
    assert request_bytes(SHAPES["llama-2-7b"], 1000) == 4 * request_bytes(GQA, 1000)
    assert request_bytes(MODELS["the same as MQA, 1 (hypothetical)"], 1000) == request_bytes(GQA, 1000) / 8


def test_a_window_stops_growing_behind_its_sinks():
    assert MISTRAL.num_params == 7_241_732_096  # as published
    assert request_bytes(MISTRAL, 4_000) == 4_000 * 131_072
    for context in (4_100, 4_101, 32_768):
        assert request_bytes(MISTRAL, context) == 4_100 * 131_072
    assert request_bytes(MISTRAL, 32_768, sinks=0) == 4_096 * 131_072


def test_users_by_hand():
    """(80 - 16.06) GB of 0.537 GB each."""
    assert users(GQA, 80e9, 4096) == int((80e9 - 2 * 8_030_261_248) // (4096 * 131_072)) == 119
    assert users(GQA, 16e9, 4096) == 0


def test_a_line_ends_where_nobody_fits_or_the_model_does():
    contexts, fit = kv_figures.curve(GQA, 24e9, None)
    assert contexts[0] == 512 and contexts[-1] < GQA.context and fit[-1] >= 1
    assert users(GQA, 24e9, 2 * contexts[-1]) == 0
    assert all(a >= b for a, b in pairwise(fit))
    assert kv_figures.curve(SHAPES["llama-2-7b"], 80e9, None)[0][-1] == 4096
    assert kv_figures.curve(SHAPES["llama-2-70b"], 80e9, None) == ([], [])


def test_the_table_has_no_number_beyond_a_models_context():
    lines = kv_figures.table(8192, 80e9).splitlines()
    assert len(lines) == 1 + len(MODELS) and all(len(line) == len(lines[0]) for line in lines)
    assert lines[1].split()[-3:] == ["-"] * 3 and f"{users(GQA, 80e9, 8192, 'int8'):,}" in lines[2].split()


def test_the_figure_shows_what_was_computed():
    axes = kv_figures.users_figure(kv_figures.users_axes())
    for row, memory in zip(axes, (80e9, 24e9)):
        for ax, kind in zip(row, kv_figures.KINDS.values()):
            shown = {line.get_label(): [list(xs) for xs in line.get_data()] for line in ax.lines}
            assert shown == {name: list(kv_figures.curve(c, memory, kind)) for name, c in MODELS.items()}
            (low, high), every = ax.get_ylim(), [y for _, ys in shown.values() for y in ys]
            assert low < min(every) and max(every) < high
            boxes = [(text, box.padded(-1)) for text, box in layout.text_boxes(ax)]
            for i, (text, box) in enumerate(boxes):
                hit = [other for other, its in boxes[i + 1 :] if box.overlaps(its)]
                assert not hit, f"{text!r} overlaps {hit}"
    looks = [(line.get_color(), line.get_marker()) for line in axes[0][0].lines]
    assert len({color for color, _ in looks}) == len({marker for _, marker in looks}) == len(MODELS)
    plt.close("all")


def test_the_title_is_computed():
    assert kv_figures.finding() == (
        f"4,096 tokens each on 80 GB: {users(SHAPES['llama-2-7b'], 80e9, 4096)} users with MHA, "
        f"{users(GQA, 80e9, 4096)} with GQA, {users(GQA, 80e9, 4096, 'int4')} with GQA in int4"
    )


def test_it_is_drawn_small(tmp_path):
    kv_figures.draw(tmp_path / "users.png")
    assert (tmp_path / "users.png").stat().st_size < 100_000
    assert Image.open(tmp_path / "users.png").mode == "P"


# ---------------------------------------------------------------- wrong versions that must be found
WRONG = {
    "sinks forgotten": ("min(context, w + sinks)", "min(context, w)"),
    "a window that is never full": ("min(context, w + sinks)", "context"),
    "the open page forgotten": ('if kind == "int4" else 0', 'if kind == "none" else 0'),
    "one layer's open page": ("config.num_layers * PAGE *", "PAGE *"),
    "query heads counted": ("1, config.num_kv_heads,", "1, config.num_heads,"),
    "weights of one byte": ("2 * config.num_params", "config.num_params"),
    "longer than the model allows": ("if 2**i <= config.context", ""),
    "points where nobody fits": ("in points if fit", "in points"),
    "every column the same kind": ("curve(config, memory, its)", "curve(config, memory, None)"),
    "every row the same GPU": ("curve(config, memory, its)", "curve(config, 80e9, its)"),
    "numbers beyond a model's context": ("if context <= config.context:", "if True:"),
}
TESTS = [
    test_bytes_by_hand, test_a_window_stops_growing_behind_its_sinks, test_users_by_hand,
    test_a_line_ends_where_nobody_fits_or_the_model_does, test_the_table_has_no_number_beyond_a_models_context,
    test_the_figure_shows_what_was_computed, test_the_title_is_computed,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_version_is_found(wrong, monkeypatch):
    source = open(kv_figures.__file__, encoding="utf-8").read()
    old, new = WRONG[wrong]
    assert old in source, "the test's wrong version follows the line it breaks"
    broken = {"__name__": "broken"}
    exec(compile(source.replace(old, new), "broken", "exec"), broken)
    for name in ("request_bytes", "users", "curve", "table", "users_figure"):
        monkeypatch.setattr(kv_figures, name, broken[name])
        if name in globals():
            monkeypatch.setitem(globals(), name, broken[name])
    with pytest.raises(AssertionError):
        for test in TESTS:
            test()
    plt.close("all")
