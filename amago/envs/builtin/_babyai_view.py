"""Observations of BabyAI levels as arrays: the grid as one-hot cells, the mission as word indices."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

VIEW = 7
"""Side length of the agent's square field of view, in cells."""

WORDS = (
    "", "a", "after", "and", "ball", "behind", "blue", "box", "door", "front", "go", "green", "grey", "in", "key", "left", "next",
    "object", "of", "on", "open", "pick", "purple", "put", "red", "right", "the", "then", "to", "up", "yellow", "you", "your",
)  # fmt: skip
"""The vocabulary of missions; the empty word is padding."""
_INDEX = {word: i for i, word in enumerate(WORDS)}

TYPES = ("unseen", "empty", "wall", "door", "key", "ball", "box", "agent")
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
STATES = ("open", "closed", "locked")
CHANNELS = (*TYPES, *COLORS, *STATES)
"""The channels of a cell: its type, the colour of its object, and the state of a door, each one-hot."""

_UNSEEN, _EMPTY, _WALL, _AGENT, _FIRST_THING = range(5)
_THINGS: list[tuple[str, str, str | None]] = [("door", color, state) for color in COLORS for state in STATES]
_THINGS += [(kind, color, None) for kind in ("key", "ball", "box") for color in COLORS]
_CODE = {thing: _FIRST_THING + i for i, thing in enumerate(_THINGS)}


def _bits_of_codes() -> NDArray[np.uint8]:
    rows = [("unseen",), ("empty",), ("wall", "grey"), ("agent",), *_THINGS]
    return np.array([[channel in row for channel in CHANNELS] for row in rows], dtype=np.uint8)


_BITS = _bits_of_codes()

# For each direction, the offsets (dx, dy) from the agent of the cells of its view, in the order of MiniGrid's image[x, y].
_FORWARD = ((1, 0), (0, 1), (-1, 0), (0, -1))
_PLACES = [
    [
        (fx * (VIEW - 1 - j) - fy * (i - VIEW // 2), fy * (VIEW - 1 - j) + fx * (i - VIEW // 2))
        for i in range(VIEW)
        for j in range(VIEW)
    ]
    for fx, fy in _FORWARD
]
_OWN_PLACE = (VIEW // 2) * VIEW + VIEW - 1


def tokens(mission: str, length: int) -> NDArray[np.uint8]:
    """A mission as indices into `WORDS`, uint8 (length,), padded with 0. Commas are ignored.

    Raises:
        ValueError: a word is unknown, or the mission has more than ``length`` words.
    """
    words = mission.replace(",", " ").split()
    if len(words) > length:
        raise ValueError(f"mission_length must be at least {len(words)}, the number of words in {mission!r}; got {length}")
    out = np.zeros(length, dtype=np.uint8)
    try:
        out[: len(words)] = [_INDEX[word] for word in words]
    except KeyError as err:
        raise ValueError(f"the mission {mission!r} contains the unknown word {err.args[0]!r}") from None
    return out


def _code(thing: Any) -> int:
    kind = thing.type
    if kind == "wall":
        return _WALL
    if kind == "door":
        return _CODE[kind, thing.color, "open" if thing.is_open else "locked" if thing.is_locked else "closed"]
    return _CODE[kind, thing.color, None]


@functools.cache
def _spread(seen: int, clear: int) -> tuple[int, int]:
    """Propagate visibility along a row of the view and into the next row, by MiniGrid's rule. Rows are bit masks.

    Args:
        seen: cells of this row that are visible from the previous row.
        clear: transparent cells of this row.

    Returns:
        the visible cells of this row and those of the next.
    """
    ahead = 0
    for i in range(VIEW - 1):
        if seen & clear & (1 << i):
            seen |= 2 << i
            ahead |= 3 << i
    for i in range(VIEW - 1, 0, -1):
        if seen & clear & (1 << i):
            seen |= 1 << (i - 1)
            ahead |= 3 << (i - 1)
    return seen, ahead


def partial_grid(level: Any) -> NDArray[np.uint8]:
    """The agent's field of view, uint8 (7, 7, 17) indexed [x, y, channel of `CHANNELS`]; the same cells as MiniGrid's
    `gen_obs`.

    The agent stands at [3, 6] and faces [3, 0]; its own cell shows the object that it carries.
    """
    grid, width, height = level.grid.grid, level.grid.width, level.grid.height
    x, y = int(level.agent_pos[0]), int(level.agent_pos[1])
    codes, clear = [], [0] * VIEW
    thing: Any
    for place, (dx, dy) in enumerate(_PLACES[level.agent_dir]):
        cx, cy = x + dx, y + dy
        thing = grid[cy * width + cx] if 0 <= cx < width and 0 <= cy < height else _OUTSIDE
        if thing is None:
            codes.append(_EMPTY)
            clear[place % VIEW] |= 1 << place // VIEW
        elif thing is _OUTSIDE:
            codes.append(_WALL)
        else:
            codes.append(_code(thing))
            if thing.see_behind():
                clear[place % VIEW] |= 1 << place // VIEW
    codes[_OWN_PLACE] = _EMPTY if level.carrying is None else _code(level.carrying)
    seen = 1 << VIEW // 2
    for j in range(VIEW - 1, -1, -1):
        row, seen = _spread(seen, clear[j])
        for i in range(VIEW):
            if not row >> i & 1:
                codes[i * VIEW + j] = _UNSEEN
    return _BITS[codes].reshape(VIEW, VIEW, len(CHANNELS))


_OUTSIDE = object()


def full_grid(level: Any, size: int) -> NDArray[np.uint8]:
    """The whole grid, uint8 (size, size, 17) indexed [x, y, channel]; cells outside it are "unseen".

    The agent's cell has the channels of the agent and of the object that it carries.
    """
    width, height = level.grid.width, level.grid.height
    codes = np.full((size, size), _UNSEEN)
    cells = [_EMPTY if thing is None else _code(thing) for thing in level.grid.grid]
    codes[:width, :height] = np.array(cells).reshape(height, width).T
    out = _BITS[codes]
    x, y = int(level.agent_pos[0]), int(level.agent_pos[1])
    out[x, y] = _BITS[_AGENT]
    if level.carrying is not None:
        out[x, y] |= _BITS[_code(level.carrying)]
    return out


def partial_image(level: Any, tile: int) -> NDArray[np.uint8]:
    """The agent's field of view drawn by MiniGrid, uint8 (7 * tile, 7 * tile, 3)."""
    return level.get_frame(tile_size=tile, agent_pov=True)  # type: ignore[no-any-return]


def full_image(level: Any, size: int, tile: int) -> NDArray[np.uint8]:
    """The whole grid drawn by MiniGrid, uint8 (size * tile, size * tile, 3), padded with black below and to the right."""
    out = np.zeros((size * tile, size * tile, 3), dtype=np.uint8)
    frame = level.get_frame(highlight=False, tile_size=tile)
    out[: frame.shape[0], : frame.shape[1]] = frame
    return out
