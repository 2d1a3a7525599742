"""Helpers of the built-in environments: checks of arguments and actions."""

from __future__ import annotations

import difflib
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray


def check_int(name: str, value: Any, low: int) -> int:
    """``value`` as an int.

    Raises:
        TypeError: it is not an integer; a bool is not.
        ValueError: it is less than ``low``.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value!r}")
    return int(value)


def check_bool(name: str, value: Any) -> bool:
    """``value`` as a bool; raises TypeError for every other type, because most of their values count as True."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_real(name: str, value: Any) -> float:
    """``value`` as a float.

    Raises:
        TypeError: it is not a number; a bool is not.
        ValueError: it is infinite or NaN.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not np.isfinite(float(value)):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)


def check_fraction(name: str, value: Any, below_one: bool = False) -> float:
    """``value`` as a float in [0, 1], or in [0, 1) with ``below_one``.

    Raises:
        TypeError: it is not a number.
        ValueError: it is out of range.
    """
    number = check_real(name, value)
    if not 0.0 <= number <= 1.0 or (below_one and number == 1.0):
        raise ValueError(f"{name} must be in {'[0, 1)' if below_one else '[0, 1]'}, got {value!r}")
    return number


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """``value`` if it is one of ``choices``; raises ValueError otherwise."""
    known = tuple(choices)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return value  # type: ignore[no-any-return]


def check_names(name: str, values: Any, resolve: Callable[[str], str] = str) -> tuple[str, ...]:
    """``values`` as a tuple, each element passed through ``resolve``.

    Raises:
        TypeError: ``values`` is a single string.
        ValueError: it is empty, or names one thing twice.
    """
    if isinstance(values, str):
        raise TypeError(f"{name} must be a list of names, got {values!r}")
    names = tuple(map(resolve, values))
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{name} must contain at least one name, and none twice, got {values!r}")
    return names


def similar(word: str, known: Sequence[str], otherwise: Sequence[str] | None = None) -> str:
    """Up to three elements of ``known`` that are spelled like ``word``, for messages; if none is, ``otherwise`` or all of
    them."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return ", ".join(near or (known if otherwise is None else otherwise))


def check_render_mode(value: Any, modes: list[str]) -> str | None:
    """``value`` if it is None or one of ``modes``; raises ValueError otherwise."""
    if value is not None and value not in modes:
        raise ValueError(f"render_mode must be None or one of {modes}, got {value!r}")
    return value  # type: ignore[no-any-return]


def refuse_step(env: str) -> NoReturn:
    """Raise `gymnasium.error.ResetNeeded`, for a `step` before the first `reset` or after the end of a rollout."""
    raise ResetNeeded(f"{env}.step() was called with no rollout under way: call reset() first")


def check_action(action: Any, n: int) -> int:
    """``action`` as an int in 0..n-1.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is out of range.
    """
    try:
        index = operator.index(action)
    except TypeError:
        raise TypeError(f"action must be an integer in 0..{n - 1}, got {action!r}") from None
    if not 0 <= index < n:
        raise ValueError(f"action must be in 0..{n - 1}, got {action!r}")
    return index


def check_continuous_action(action: Any, n: int) -> NDArray[np.float64]:
    """``action`` as a float64 array of shape (n,); raises ValueError for another shape, and for values outside [-1, 1]."""
    array = np.asarray(action, dtype=np.float64)
    if array.shape != (n,):
        raise ValueError(f"action must be {n} numbers in [-1, 1], got shape {array.shape}")
    if not np.abs(array).max() <= 1.0:  # also true for NaN
        raise ValueError(f"action must be {n} numbers in [-1, 1], got {action!r}")
    return array
