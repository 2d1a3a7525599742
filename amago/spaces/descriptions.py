"""Spaces as JSON, as trajectory files and saved policies record them; and the differences between two pairs of spaces."""

from __future__ import annotations

import operator
from math import prod
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.spaces.actions import action_spec

Array = NDArray[Any]

_MAX_BYTES = 1 << 28
"""The largest size of one observation or action. A description from a file may declare any size."""


_FIELDS = {
    "Discrete": ("n", "start"), "MultiBinary": ("shape",), "Box": ("shape", "dtype", "low", "high"),
    "MultiDiscrete": ("shape", "dtype", "nvec", "start"),
}  # fmt: skip
"""The attributes that make a space of each kind."""


def describe(space: gym.Space[Any]) -> dict[str, Any]:
    """A space as JSON types: a Discrete, MultiDiscrete, Box or MultiBinary, or a Dict or Tuple of these, nested or not.

    `from_description` is the inverse.

    Raises:
        TypeError: any other kind of space, or a key of a Dict that is neither a str nor an int.
    """
    for kind, fields in _FIELDS.items():
        if isinstance(space, getattr(gym.spaces, kind)):
            return {"kind": kind} | {name: _plain(name, getattr(space, name)) for name in fields}
    if isinstance(space, gym.spaces.Dict):
        keys, spaces = list(space.spaces), [describe(v) for v in space.spaces.values()]
        if all(isinstance(k, str) for k in keys):
            return {"kind": "Dict", "spaces": dict(zip(keys, spaces))}
        keys = [str(k) if isinstance(k, str) else operator.index(k) for k in keys]  # the names of JSON's objects are texts
        return {"kind": "Dict", "keys": keys, "spaces": spaces}
    if isinstance(space, gym.spaces.Tuple):
        return {"kind": "Tuple", "spaces": [describe(v) for v in space.spaces]}
    raise TypeError(f"{space} has no description")


def _plain(name: str, value: Any) -> Any:
    """An attribute of a space; one number stands for bounds that are all equal, and a text for one that is infinite."""
    if name == "shape":
        return list(value)
    if name == "dtype":
        return np.dtype(value).name
    if name in ("low", "high"):
        bounds = value.reshape(-1).astype(np.float64)
        bounds = bounds[:1] if bounds.size and (bounds == bounds[0]).all() else bounds
        numbers = [float(x) if np.isfinite(x) else str(x) for x in bounds]
        return numbers[0] if len(numbers) == 1 else numbers
    array = np.asarray(value)
    return array.reshape(-1).tolist() if array.ndim else array.item()


def from_description(description: dict[str, Any]) -> gym.Space[Any]:
    """The space of a description; the inverse of `describe`.

    Raises:
        ValueError: not a description of a space, or of one that is too big.
    """
    try:
        kind = description["kind"]
        if kind == "Discrete":
            return gym.spaces.Discrete(int(description["n"]), start=int(description["start"]))
        if kind == "Tuple":
            return gym.spaces.Tuple([from_description(v) for v in description["spaces"]])
        if kind == "Dict":
            spaces = description["spaces"]
            named = zip(description["keys"], spaces, strict=True) if "keys" in description else spaces.items()
            return gym.spaces.Dict({k: from_description(v) for k, v in named})
        shape, dtype = tuple(map(int, description["shape"])), np.dtype(description.get("dtype", "int8"))
        if prod(shape) * dtype.itemsize > _MAX_BYTES:
            raise ValueError(f"a {kind} of shape {shape} and {dtype} takes more than the {_MAX_BYTES} bytes that one may have")
        if kind == "MultiBinary":
            return gym.spaces.MultiBinary(shape if len(shape) > 1 else shape[0])
        if kind == "Box":
            low, high = (_read_bound(description[side], shape, dtype) for side in ("low", "high"))
            return gym.spaces.Box(low, high, shape=shape, dtype=dtype.type)
        if kind == "MultiDiscrete":
            nvec, start = (np.array([int(n) for n in description[k]], np.int64).reshape(shape) for k in ("nvec", "start"))
            return gym.spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)
    except (KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"not the description of a space: {description!r}") from err
    raise ValueError(f"unknown kind of space {kind!r}")


def _read_bound(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    numbers = np.asarray([float(v) for v in value] if isinstance(value, list) else float(value), dtype=np.float64)
    return np.broadcast_to(numbers.reshape(shape) if numbers.ndim else numbers, shape).astype(dtype)


# ---- differences ---

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
    lows, highs = (np.stack(ends).astype(np.float64) for ends in ((a.low, b.low), (a.high, b.high)))
    widths = highs - lows
    declared = ((np.abs(lows) < _UNBOUNDED) & (np.abs(highs) < _UNBOUNDED) & (widths > 0)).all(axis=0)
    narrow, wide = widths.min(axis=0), widths.max(axis=0)
    shared = highs.min(axis=0) - lows.max(axis=0)
    with np.errstate(invalid="ignore"):  # of bounds that declare nothing
        other = (wide > _OTHER_UNITS * narrow) | (shared < _SHARED * narrow)
    return declared & other


def _in_words(obs_space: gym.spaces.Dict, action_space: gym.Space[Any], dtypes: bool) -> dict[str, str]:
    """{"observation KEY" or "actions": a text that is the same if the spaces agree}."""
    spec, spaces = action_spec(action_space), obs_space.spaces.items()
    observations = {f"observation {k!r}": f"{x.dtype} {x.shape}" if dtypes else f"{x.shape}" for k, x in spaces}
    return observations | {"actions": f"{spec.kind} of width {spec.dim}"}


def _range(box: gym.spaces.Box, chosen: NDArray[np.bool_]) -> str:
    """The range of the chosen numbers of a box; of all, if none is chosen."""
    if not box.low.size:
        return ""
    if not chosen.any() or chosen.all():
        return f" from {box.low.min():g} to {box.high.max():g}"
    return f" with {chosen.sum()} numbers from {box.low[chosen].min():g} to {box.high[chosen].max():g}"
