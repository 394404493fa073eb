"""An exercise neither spoils nor blocks: every road through check(), and the words at its end."""

import pytest
import torch

from minserve.lab.exercise import check, difference, shown


def cache_bytes(layers, kv_heads, head_dim, tokens, itemsize):
    return 2 * layers * kv_heads * head_dim * tokens * itemsize


CASES = {
    "both keys and values are kept": (1, 1, 1, 1, 1),
    "every layer keeps its own": (2, 1, 1, 1, 1),
    "itemsize is bytes per number, not bits": (1, 1, 1, 1, 2),
}


def softmax(x):
    return x.softmax(-1)


def append(history, item):
    history.append(item)


def test_unsolved_goes_on_with_our_own(capsys):
    assert check(lambda *a: ..., cache_bytes, CASES) is cache_bytes
    assert capsys.readouterr().out == "cache_bytes: not attempted; going on with minserve's own\n"


@pytest.mark.parametrize(
    "stub",
    [
        lambda x: (...,),
        lambda x: ... * 2,
        lambda x: x @ ...,
        lambda x: torch.exp(...),
        lambda x: [x, ...],
    ],
)
def test_a_stub_with_blanks_in_its_middle_is_unsolved_too(stub):
    assert check(stub, softmax, {"rows sum to one": (torch.randn(2, 2),)}) is softmax


def test_right_comes_back_itself(capsys):
    def mine(layers, kv_heads, head_dim, tokens, itemsize):
        return tokens * itemsize * layers * kv_heads * head_dim * 2

    assert check(mine, cache_bytes, CASES) is mine
    assert capsys.readouterr().out == "cache_bytes: right, in all 3 cases\n"


@pytest.mark.parametrize(
    "wrong, says",
    [
        (
            lambda n, g, d, t, i: n * g * d * t * i,
            "cache_bytes(1, 1, 1, 1, 1) is 2, yours says 1. Hint: both",
        ),
        (
            lambda n, g, d, t, i: 2 * g * d * t * i,
            "cache_bytes(2, 1, 1, 1, 1) is 4, yours says 2. Hint: every layer",
        ),
        (
            lambda n, g, d, t, i: 2 * n * g * d * t * i**2,
            "is 4, yours says 8. Hint: itemsize is bytes per number",
        ),
        (lambda n, g, d, t, i: None, "yours says None (that is None, as from a function without `return`"),
        (lambda n, g, d, t, i: "2", "yours says '2' (that is a str, and an int is asked for). Hint: both"),
        (
            lambda n, g, d, t, i: 1 / 0,
            "cache_bytes(1, 1, 1, 1, 1) raised ZeroDivisionError: division by zero. Hint",
        ),
        (lambda n: 2, "raised TypeError: "),
        (lambda n, g, d, t, i: 2 * n * g * d * t * i + 1e-7, "is 2, yours says 2. Hint"),  # a count is exact
    ],
)
def test_each_misconception_is_named(wrong, says):
    with pytest.raises(AssertionError) as error:
        check(wrong, cache_bytes, CASES)
    assert says in str(error.value)


def test_the_hint_is_that_of_the_first_case_missed():
    with pytest.raises(AssertionError, match="Hint: every layer keeps its own$"):
        check(lambda n, g, d, t, i: 2 * min(n, 1) * g * d * t * min(i, 1), cache_bytes, CASES)


ROWS = {"rows sum to one, not columns": (torch.tensor([[1.0, 2.0], [3.0, 5.0]]),)}


def test_tensors_within_tolerance():
    def mine(x):
        return x.softmax(-1) + 1e-7

    assert check(mine, softmax, ROWS) is mine
    with pytest.raises(AssertionError, match="Hint: rows sum"):
        check(mine, softmax, ROWS, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda x: x.softmax(0), r"furthest apart at \[1, 0\]: 0.119203 against your 0.880797"),
        (lambda x: x.softmax(-1)[0], r"shape \[2\], and \[2, 2\] is asked for"),
        (lambda x: x.softmax(-1).tolist(), "that is a list, and a Tensor is asked for"),
        (lambda x: x.softmax(-1) * float("nan"), "furthest apart at"),
    ],
)
def test_wrong_tensors(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check(wrong, softmax, ROWS)


def test_in_place_solutions_are_judged_by_their_arguments():
    def mine(history, item):
        history.insert(len(history), item)

    cases = {"it goes to the end": ([1, 2], 3)}
    assert check(mine, append, cases) is mine
    with pytest.raises(AssertionError, match=r"are \(\[1, 2, 3\], 3\), yours says \(\[3, 1, 2\], 3\).*end"):
        check(lambda history, item: history.insert(0, item), append, cases)
    assert cases == {"it goes to the end": ([1, 2], 3)}, "the cases themselves stay as they were"


def test_a_broken_solution_is_not_blamed_on_the_reader():
    with pytest.raises(ZeroDivisionError):
        check(lambda x: x, lambda x: 1 / 0, {"hint": (1,)})


@pytest.mark.parametrize(
    "got, expected, same",
    [
        (4.0, 4, True),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (True, 1, False),
        (1, True, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (torch.tensor(2.0), 2, True),
        ((1, 2), [1, 2], True),
        ((1, 2), (1, 3), False),
        ((1,), (1, 2), False),
        ("a", "a", True),
        ("a", "b", False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"b": 1}, {"a": 1}, False),
        (None, None, True),
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16), True),
        (torch.ones(2) * 2, torch.ones(2), False),
    ],
)
def test_difference(got, expected, same):
    assert (difference(got, expected) is None) == same


def test_shown_is_one_short_line():
    assert shown(131_072) == "131,072"
    assert shown(torch.zeros(2, 30)) == "tensor[2, 30]"
    assert shown(torch.full((2,), 1 / 3)) == "tensor[2] [0.333333, 0.333333]"
    assert shown({"a": 1}) == "{'a': 1}"
    assert len(shown("x" * 500)) == 60
