"""What the built-in environments share: argument checks, the refusal of a misplaced step, and drawing cells."""

from __future__ import annotations

import numbers
import operator
from typing import Any, NoReturn

import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

Cell = tuple[int, int]
Color = tuple[int, int, int]

RENDER_CELL = 24
"""Pixels along one side of a drawn cell."""

WHITE: Color = (245, 248, 250)
GRID: Color = (205, 213, 220)
ICE: Color = (214, 234, 248)
WATER: Color = (40, 70, 110)
GOLD: Color = (214, 158, 46)
GREEN: Color = (64, 145, 90)
RED: Color = (200, 60, 60)
GREY: Color = (140, 150, 160)


def check_int(name: str, value: Any, low: int) -> int:
    """``value`` as an int if it is a whole number (never a bool) of at least ``low``.

    Raises:
        TypeError, ValueError: quoting the name and the value.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value!r}")
    return int(value)


def check_bool(name: str, value: Any) -> bool:
    """``value`` as a bool; raises TypeError for anything else, which would be taken for True by accident."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_real(name: str, value: Any) -> float:
    """``value`` as a finite float.

    Raises:
        TypeError, ValueError: quoting the name and the value.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not np.isfinite(float(value)):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)


def check_render_mode(value: Any, modes: list[str]) -> str | None:
    """``value`` if it is None or one of ``modes``; raises ValueError otherwise."""
    if value is not None and value not in modes:
        raise ValueError(f"render_mode must be None or one of {modes}, got {value!r}")
    return value  # type: ignore[no-any-return]


def refuse_step(env: str) -> NoReturn:
    """Raise `gymnasium.error.ResetNeeded`: `step` came before `reset`, or after the end of a rollout."""
    raise ResetNeeded(f"{env}.step() was called with no rollout under way: call reset() first")


def check_action(action: Any, n: int) -> int:
    """``action`` as an index below ``n``.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is out of range (a negative number too, which Python would take for an index).
    """
    try:
        index = operator.index(action)
    except TypeError:
        raise TypeError(f"action must be an integer in 0..{n - 1}, got {action!r}") from None
    if not 0 <= index < n:
        raise ValueError(f"action must be in 0..{n - 1}, got {action!r}")
    return index


def blank_grid(size: int, color: Color) -> NDArray[np.uint8]:
    """A (size * cell, size * cell, 3) picture of empty cells with lines between them."""
    side = size * RENDER_CELL
    frame = np.empty((side, side, 3), dtype=np.uint8)
    frame[:] = color
    frame[::RENDER_CELL] = GRID
    frame[:, ::RENDER_CELL] = GRID
    return frame


def paint(frame: NDArray[np.uint8], cell: Cell, color: Color, inset: int = 1, round_: bool = False) -> None:
    """Fill the cell (x, y), x to the right and y downwards, ``inset`` pixels away from its edges; as a disc if ``round_``."""
    left, top = cell[0] * RENDER_CELL, cell[1] * RENDER_CELL
    patch = frame[top + inset : top + RENDER_CELL - inset + 1, left + inset : left + RENDER_CELL - inset + 1]
    if not round_:
        patch[:] = color
        return
    rows, cols = np.ogrid[: patch.shape[0], : patch.shape[1]]
    radius = (patch.shape[0] - 1) / 2
    patch[(rows - radius) ** 2 + (cols - radius) ** 2 <= radius**2] = color
