"""Exercises that neither spoil nor block: skip one and the notebook goes on with the package's own.

    attempt still returns `...`      one line says so; the package's own function comes back
    attempt is right                 one line says so; the attempt itself comes back
    attempt is wrong                 AssertionError: the call, both answers, and the misconception at hand

Story    every notebook from 00 on: one function to write, checked before the recap
"""

import math
from collections.abc import Callable
from copy import deepcopy
from numbers import Number

import torch


def check(
    attempt: Callable, solution: Callable, cases: dict[str, tuple], *, rtol=1e-4, atol=1e-5
) -> Callable:
    """Return the function to go on with: yours once it is right, minserve's while it returns `...`.

    cases: hint -> arguments. The hint of the first case you miss is what you are told, so each case isolates
    one misunderstanding. Counts must match exactly, fractions and tensors within the tolerance. A solution
    that returns nothing works in place: then what it did to its arguments is compared.
    """
    name = solution.__name__
    for hint, args in cases.items():
        call = f"{name}({', '.join(map(shown, args))})"
        expected, expected_args = _call(solution, args)
        try:
            got, got_args = _call(attempt, args)
        except Exception as error:
            if "ellipsis" in str(error):  # a blank of the stub is still open and met arithmetic
                return _skip(solution)
            raise AssertionError(f"{call} raised {type(error).__name__}: {error}. Hint: {hint}") from error
        if _is_blank(got):
            return _skip(solution)
        if expected is None:
            got, expected, call = got_args, expected_args, f"after {call} the arguments"
        wrong = difference(got, expected, rtol, atol)
        if wrong is not None:
            said = f"{shown(expected)}, yours says {shown(got)}{wrong}"
            raise AssertionError(
                f"{call} {'is' if expected_args is not expected else 'are'} {said}. Hint: {hint}"
            )
    print(f"{name}: right, in all {len(cases)} cases")
    return attempt


def _call(function: Callable, args: tuple):
    own = deepcopy(args)  # neither side sees what the other did to its arguments
    return function(*own), own


def _skip(solution: Callable) -> Callable:
    print(f"{solution.__name__}: not attempted; going on with minserve's own")
    return solution


def _is_blank(got) -> bool:
    return got is ... or (isinstance(got, tuple | list) and any(_is_blank(part) for part in got))


def difference(got, expected, rtol: float = 1e-4, atol: float = 1e-5) -> str | None:
    """None when they agree; otherwise what else to say ('' when the two answers speak for themselves)."""
    if isinstance(got, torch.Tensor) and isinstance(expected, Number) and got.numel() == 1:
        got = got.item()
    known = torch.Tensor, bool, Number, tuple | list, dict
    kinds = next((kind for kind in known if isinstance(expected, kind)), object)
    if not isinstance(got, kinds) or (isinstance(got, bool) and kinds is Number):
        return f" (that is {_kind(got)}, and {_kind(expected)} is asked for)"
    if kinds is torch.Tensor:
        return _tensor_difference(got, expected, rtol, atol)
    if kinds is dict:
        if got.keys() != expected.keys():
            return ""
        got, expected = list(got.values()), [expected[key] for key in got]
    if kinds in (tuple | list, dict):
        if len(got) != len(expected):
            return f" ({len(got)} values, and {len(expected)} are asked for)"
        parts = (difference(g, e, rtol, atol) for g, e in zip(got, expected))
        return next((part for part in parts if part is not None), None)
    if kinds is Number and not isinstance(expected, int):
        both_nan = got != got and expected != expected
        return None if both_nan or math.isclose(got, expected, rel_tol=rtol, abs_tol=atol) else ""
    return None if got == expected else ""


def _tensor_difference(got, expected, rtol: float, atol: float) -> str | None:
    if got.shape != expected.shape:
        return f" (shape {list(got.shape)}, and {list(expected.shape)} is asked for)"
    a, b = got.detach().double().cpu(), expected.detach().double().cpu()
    if torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
        return None
    apart = (a - b).abs().nan_to_num(math.inf)
    at = [int(i) for i in torch.unravel_index(apart.argmax(), apart.shape)]
    return f" (furthest apart at {at}: {b[tuple(at)]:.6g} against your {a[tuple(at)]:.6g})"


def _kind(value) -> str:
    if value is None:
        return "None, as from a function without `return`"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def shown(value) -> str:
    """Short enough for one line of an error: 4,096 and tensor[2, 3], never a page of digits."""
    if isinstance(value, torch.Tensor):
        small = f" {shown(value.tolist())}" if value.numel() <= 6 else ""
        return f"tensor{list(value.shape)}{small}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple | list) and len(value) <= 6:
        inner = ", ".join(map(shown, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
