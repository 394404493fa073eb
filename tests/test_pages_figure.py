"""lab/pages_figure: what is drawn is what the pool says, and no label leaves its page."""

import matplotlib.pyplot as plt
import pytest

from minserve.lab import figures, pages_figure, paging
from minserve.pages import PagePool


@pytest.fixture
def world():
    """A and B share page 0, C's full page is cached, its partial one is free again."""
    pool = PagePool(8, 4)
    a, b = paging.arrive(pool, 0, range(10)), paging.arrive(pool, 1, [0, 1, 2, 3, 90, 91])
    pool.release(paging.arrive(pool, 2, [50, 51, 52, 53, 54]))
    return pool, [a, b]


def test_rows_are_the_pool(world):
    rows = pages_figure.rows(*world)
    assert [(page.state, page.owners, page.tokens, page.indexed) for page in rows[:6]] == [
        ("in use", "AB", [0, 1, 2, 3], True),
        ("in use", "A", [4, 5, 6, 7], True),
        ("in use", "A", [8, 9], False),
        ("in use", "B", [90, 91], False),
        ("cached", "", [50, 51, 52, 53], True),
        ("free", "", [], False),
    ]


def test_a_slot_that_is_not_computed_yet_is_drawn_empty(world):
    pool, (a, b) = world
    b.computed = 5  # of 6
    assert pages_figure.rows(pool, [a, b])[3].tokens == [90]


def test_lines_say_the_same(world):
    assert pages_figure.lines(*world).splitlines() == [
        "A:  10 tokens in pages [0, 1, 2]",
        "B:   6 tokens in pages [0, 3]",
        "cached [4], free [5, 6, 7]",
    ]


def test_draw_writes_every_token_and_owner_in_its_page(world):
    ax = pages_figure.draw(figures.axes(8.2, 1.1), *world)
    ax.figure.canvas.draw()
    said = [text.get_text() for text in ax.texts]
    assert [f"page {i}" for i in range(8)] == [t for t in said if t.startswith("page")]
    assert {"A B #", "A #", "A", "B", "cached #"} <= set(said) and {"90", "53"} <= set(said)
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    plt.close(ax.figure)


def test_a_second_row_of_pages_starts_below_the_first(world):
    ax = pages_figure.draw(figures.axes(5, 2), *world, per_row=4)
    top = {text.get_text(): text.get_position() for text in ax.texts if text.get_text().startswith("page")}
    assert top["page 4"][0] == top["page 0"][0] and top["page 4"][1] < top["page 3"][1]
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    plt.close(ax.figure)


def test_against_page_size_draws_both_costs():
    figure, (left, right) = plt.subplots(1, 2)
    pages_figure.against_page_size(left, right, [1, 4, 16], [0.0, 0.1, 0.3], 20.0, [3e-4, 1e-4, 5e-5])
    assert list(left.lines[0].get_ydata()) == [0.0, 10.0, 30.0]
    assert list(left.lines[1].get_ydata())[2] == pytest.approx(100 * 16 / 56)
    assert list(right.lines[0].get_ydata()) == pytest.approx([300, 100, 50])
    plt.close(figure)
