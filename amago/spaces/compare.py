"""The differences between the spaces of two environments, policies or recordings."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.spaces.actions import action_spec

_UNBOUNDED = 1e6
_OTHER_UNITS, _SHARED = 50.0, 0.75

Spaces = tuple[gym.spaces.Dict, gym.Space[Any]]
"""An observation space, flat, and an action space."""


class SpaceDifference(NamedTuple):
    """An observation, or the actions, that two pairs of spaces do not share.

    Attributes:
        name: "observation 'KEY'" or "actions".
        first, second: the space in each pair, in words; "missing" if it has no such observation.
    """

    name: str
    first: str
    second: str


def space_differences(first: Spaces, second: Spaces, *, dtypes: bool = True, ranges: bool = False) -> list[SpaceDifference]:
    """The differences between two pairs of spaces that an agent would notice.

    Observations are compared by key, shape and dtype, actions by the kinds and widths of their parts.

    Args:
        first, second: (observation space, action space).
        dtypes: False: do not compare the dtypes of observations.
        ranges: also compare the bounds of observations, by `same_range`.

    Returns:
        The differences, sorted by name; none if the spaces agree.
    """
    a, b = _in_words(*first, dtypes), _in_words(*second, dtypes)
    differing = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    for key, x in first[0].spaces.items() if ranges else ():
        y, name = second[0].spaces.get(key), f"observation {key!r}"
        if isinstance(x, gym.spaces.Box) and isinstance(y, gym.spaces.Box) and x.shape == y.shape:
            numbers = _other_units(x, y)
            differing |= {name} if numbers.any() else set()
            a[name], b[name] = a[name] + _range(x, numbers), b[name] + _range(y, numbers)
    return [SpaceDifference(name, a.get(name, "missing"), b.get(name, "missing")) for name in sorted(differing)]


def same_range(a: gym.spaces.Box, b: gym.spaces.Box) -> bool:
    """True unless the bounds of two boxes of real numbers show that data of one cannot be data of the other.

    Declared bounds may be wider than the data, so unequal bounds alone prove nothing. They are taken to be of other units or
    another offset where, for some number of the box, both declare an interval and

    - one interval is more than 50 times as wide as the other (0 to 1 and 0 to 255; radians and degrees), or
    - they share less than three quarters of the narrower one (0 to 1 and -0.5 to 0.5).

    Bounds that are infinite or beyond a million declare nothing, nor does an interval of one point. Integers are not compared:
    their values are counts or labels, often declared by the range of their type.

    Args:
        a, b: of the same shape.
    """
    return not _other_units(a, b).any()


def _other_units(a: gym.spaces.Box, b: gym.spaces.Box) -> NDArray[np.bool_]:
    """Mask of the numbers of two boxes whose ranges differ by the rule of `same_range`."""
    if np.dtype(a.dtype).kind != "f" or np.dtype(b.dtype).kind != "f":
        return np.zeros(a.shape, bool)
    lows, highs = (np.stack([getattr(x, side).astype(np.float64) for x in (a, b)]) for side in ("low", "high"))
    widths = highs - lows
    declared = ((np.abs(lows) < _UNBOUNDED) & (np.abs(highs) < _UNBOUNDED) & (widths > 0)).all(axis=0)
    narrow, wide = widths.min(axis=0), widths.max(axis=0)
    shared = highs.min(axis=0) - lows.max(axis=0)
    with np.errstate(invalid="ignore"):  # of bounds that declare nothing
        other = (wide > _OTHER_UNITS * narrow) | (shared < _SHARED * narrow)
    return declared & other


def _in_words(obs_space: gym.spaces.Dict, action_space: gym.Space[Any], dtypes: bool) -> dict[str, str]:
    """{"observation KEY" or "actions": a text that is the same if the spaces agree}."""
    spec = action_spec(action_space)
    observations = {
        f"observation {key!r}": f"{space.dtype} {space.shape}" if dtypes else f"{space.shape}"
        for key, space in obs_space.spaces.items()
    }
    return observations | {"actions": f"{spec.kind} of width {spec.dim}"}


def _range(box: gym.spaces.Box, chosen: NDArray[np.bool_]) -> str:
    """The range of the chosen numbers of a box; of all, if none is chosen."""
    if not box.low.size:
        return ""
    if not chosen.any() or chosen.all():
        return f" from {box.low.min():g} to {box.high.max():g}"
    return f" with {chosen.sum()} numbers from {box.low[chosen].min():g} to {box.high[chosen].max():g}"
