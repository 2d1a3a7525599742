"""Shared by the built-in environments: checks of arguments and actions, optional packages, attempts of a rollout, drawing."""

from __future__ import annotations

import difflib
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from amago.envs.statistics import AMAGO_ENV_LOG_PREFIX

# Checks return the value in its own type. They raise TypeError for another type (a bool is no number) and ValueError for a value
# out of range; the message has the argument's name, what it must be, and the value.


def check_int(name: str, value: object, low: int) -> int:
    """``value`` as an int of at least ``low``."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value!r}")
    return int(value)


def check_bool(name: str, value: object) -> bool:
    """``value`` as a bool: most values of other types would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_real(name: str, value: object) -> float:
    """``value`` as a finite float."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not np.isfinite(float(value)):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)


def check_fraction(name: str, value: object, below_one: bool = False) -> float:
    """``value`` as a float in [0, 1], or in [0, 1) with ``below_one``."""
    number = check_real(name, value)
    if not 0.0 <= number <= 1.0 or (below_one and number == 1.0):
        raise ValueError(f"{name} must be in {'[0, 1)' if below_one else '[0, 1]'}, got {value!r}")
    return number


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """``value`` if it is one of ``choices``."""
    known = tuple(choices)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return value  # type: ignore[no-any-return]


def check_names(name: str, values: str | Iterable[str], resolve: Callable[[str], str] = str) -> tuple[str, ...]:
    """``values`` as a tuple, each passed through ``resolve``: at least one, none twice, and not a single string."""
    if isinstance(values, str):
        raise TypeError(f"{name} must be a list of names, got {values!r}")
    names = tuple(map(resolve, values))
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{name} must contain at least one name, and none twice, got {values!r}")
    return names


def check_resolution(value: object, low: int = 1) -> tuple[int, int]:
    """``value`` as (height, width), each at least ``low``."""
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or len(value) != 2:
        raise TypeError(f"resolution must be (height, width), got {value!r}")
    return check_int("resolution", value[0], low), check_int("resolution", value[1], low)


def check_render_mode(value: object, modes: list[str]) -> str | None:
    """``value`` if it is None or one of ``modes``."""
    if value is not None and value not in modes:
        raise ValueError(f"render_mode must be None or one of {modes}, got {value!r}")
    return value  # type: ignore[no-any-return]


def check_action(action: object, n: int) -> int:
    """``action`` as an int in 0..n-1."""
    try:
        index = operator.index(action)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"action must be an integer in 0..{n - 1}, got {action!r}") from None
    if not 0 <= index < n:
        raise ValueError(f"action must be in 0..{n - 1}, got {action!r}")
    return index


def check_continuous_action(action: object, n: int) -> NDArray[np.float64]:
    """``action`` as float64 (n,) in [-1, 1]."""
    array = np.asarray(action, dtype=np.float64)
    if array.shape != (n,):
        raise ValueError(f"action must be {n} numbers in [-1, 1], got shape {array.shape}")
    if not np.abs(array).max() <= 1.0:  # also true for NaN
        raise ValueError(f"action must be {n} numbers in [-1, 1], got {action!r}")
    return array


def similar(word: str, known: Sequence[str], otherwise: Sequence[str] | None = None) -> str:
    """Up to three elements of ``known`` that are spelled like ``word``, as text; if none is, ``otherwise`` or all."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return ", ".join(near or (known if otherwise is None else otherwise))


def refuse_step(env: str) -> NoReturn:
    """Raise `gymnasium.error.ResetNeeded`, for a `step` before the first `reset` or after the end of a rollout."""
    raise ResetNeeded(f"{env}.step() was called with no rollout under way: call reset() first")


def metrics(values: Mapping[str, float]) -> dict[str, float]:
    """``values`` under the names that `AMAGOEnv` logs from ``info``."""
    return {f"{AMAGO_ENV_LOG_PREFIX} {name}": value for name, value in values.items()}


class Attempts:
    """Counts the attempts of a rollout, and the steps and rewards of the current attempt.

    Call `begin_rollout` once a rollout; for each attempt call `begin`, `step` after every step, and `end`.

    Args:
        k: attempts per rollout.
        length: maximum number of steps per attempt.
        mean: a metric of attempts, and the name under which its mean is logged at the end of the rollout.

    Attributes:
        over: number of finished attempts; ``k`` while no rollout is under way, including before the first.
        steps: number of steps taken in the current attempt.
    """

    def __init__(self, k: int, length: int, mean: tuple[str, str] | None = None) -> None:
        self.k, self.length, self._mean = k, length, mean
        self.over, self.steps = k, 0
        self._return = self._sum = 0.0

    @property
    def under_way(self) -> bool:
        return self.over < self.k

    @property
    def progress(self) -> tuple[float, float]:
        """``steps / length`` and ``over / k``, which environments append to their observations."""
        return self.steps / self.length, self.over / self.k

    def begin_rollout(self) -> None:
        self.over, self._sum = 0, 0.0

    def begin(self) -> None:
        self.steps, self._return = 0, 0.0

    def step(self, reward: float) -> bool:
        """Count a step; returns True if the attempt has reached its maximum length."""
        self.steps += 1
        self._return += reward
        return self.steps == self.length

    def end(self, values: dict[str, float]) -> dict[str, float]:
        """Count the attempt as finished; returns the metrics ``values`` and its return, named by its index (from 0)."""
        logged = {f"Attempt {self.over} {name}": value for name, value in {**values, "Return": self._return}.items()}
        self.over += 1
        if self._mean is not None:
            self._sum += values[self._mean[0]]
            if not self.under_way:
                logged[self._mean[1]] = self._sum / self.k
        return metrics(logged)


Colour = tuple[int, int, int]
CELL = 24
"""Side length of a drawn cell, in pixels."""
_LINES: Colour = (205, 213, 220)
_RED, _GREEN, _GOLD, _WHITE = (200, 60, 60), (64, 145, 90), (214, 158, 46), (245, 248, 250)
COLOURS: dict[str, Colour] = {
    ".": _WHITE, " ": (60, 66, 74), "#": (140, 150, 160), "O": (40, 70, 110), "A": _RED, "a": (225, 115, 45), "G": _GREEN, "D": _GREEN, "1": _GREEN,
    **dict.fromkeys("KS+23456789", _GOLD),
}  # fmt: skip
"""Colours of the characters that environments draw themselves with: the agent is red, the next goal is green."""


def render(mode: str | None, rows: Callable[[], Sequence[str]], colours: Mapping[str, Colour] = COLOURS) -> Any:
    """A picture with a cell for each character of ``rows``, uint8 ``(24 * rows, 24 * columns, 3)``; None if ``mode`` is None."""
    if mode is None:
        return None
    frame = np.array([[colours[character] for character in row] for row in rows()], dtype=np.uint8)
    frame = frame.repeat(CELL, axis=0).repeat(CELL, axis=1)
    frame[::CELL] = frame[:, ::CELL] = _LINES
    return frame
