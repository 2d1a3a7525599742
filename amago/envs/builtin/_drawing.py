"""Pictures of the built-in environments, as arrays of pixels: uint8 (height, width, 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Cell = tuple[int, int]
Color = tuple[int, int, int]
Frame = NDArray[np.uint8]

RENDER_CELL = 24
"""Side length of a drawn cell, in pixels."""

WHITE: Color = (245, 248, 250)
GRID: Color = (205, 213, 220)
ICE: Color = (214, 234, 248)
WATER: Color = (40, 70, 110)
GOLD: Color = (214, 158, 46)
GREEN: Color = (64, 145, 90)
RED: Color = (200, 60, 60)
GREY: Color = (140, 150, 160)
DARK: Color = (60, 66, 74)


def render(mode: str | None, text: Callable[[], str], image: Callable[[], Frame]) -> Any:
    """The result of ``text`` for the render mode "ansi", of ``image`` for "rgb_array", and None for None."""
    return None if mode is None else {"ansi": text, "rgb_array": image}[mode]()


def blank(height: int, width: int, color: Color) -> Frame:
    """An image of one colour; sides in pixels."""
    frame = np.empty((height, width, 3), dtype=np.uint8)
    frame[:] = color
    return frame


def blank_grid(width: int, color: Color, height: int | None = None) -> Frame:
    """An image of width x height empty cells with lines between them; without ``height`` it is square."""
    frame = blank((width if height is None else height) * RENDER_CELL, width * RENDER_CELL, color)
    frame[::RENDER_CELL] = GRID
    frame[:, ::RENDER_CELL] = GRID
    return frame


def paint(frame: Frame, cell: Cell, color: Color, inset: int = 1, round_: bool = False) -> None:
    """Draw a square, or a disc if ``round_``, into the cell (x, y), ``inset`` pixels from its edges; y points down."""
    left, top = cell[0] * RENDER_CELL, cell[1] * RENDER_CELL
    patch = frame[top + inset : top + RENDER_CELL - inset + 1, left + inset : left + RENDER_CELL - inset + 1]
    if not round_:
        patch[:] = color
        return
    rows, cols = np.ogrid[: patch.shape[0], : patch.shape[1]]
    radius = (patch.shape[0] - 1) / 2
    patch[(rows - radius) ** 2 + (cols - radius) ** 2 <= radius**2] = color


def blob(frame: Frame, at: tuple[float, float], radius: float, color: Color, power: float = 2.0) -> None:
    """Draw |x|^power + |y|^power <= radius^power around the pixel (x, y): a disc, or between a diamond (1) and a square (large powers).

    What lies outside of the image is left out.
    """
    rows, cols = np.ogrid[: frame.shape[0], : frame.shape[1]]
    frame[np.abs(rows - at[1]) ** power + np.abs(cols - at[0]) ** power <= radius**power] = color


def progress(frame: Frame, top: int, height: int, share: float, color: Color) -> None:
    """Draw a bar over the whole width, filled from the left to ``share`` in [0, 1]."""
    frame[top : top + height] = GRID
    frame[top : top + height, : round(share * frame.shape[1])] = color
