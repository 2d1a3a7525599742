"""Spaces as JSON, as trajectory files and saved policies record them."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_MAX_BOX_BYTES = 1 << 28
"""The largest size of one observation or action. A description from a file may declare any size."""


def describe(space: gym.Space[Any]) -> dict[str, Any]:
    """A space as JSON types: a Discrete, MultiDiscrete, Box or MultiBinary, or a Dict or Tuple of these, nested or not.

    `from_description` is the inverse.

    Raises:
        TypeError: any other kind of space, or a key of a Dict that is neither a str nor an int.
    """
    if isinstance(space, gym.spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gym.spaces.MultiBinary):
        return {"kind": "MultiBinary", "shape": list(space.shape)}
    if isinstance(space, gym.spaces.Box):
        return {"kind": "Box", "shape": list(space.shape), "dtype": np.dtype(space.dtype).name} | {
            side: _describe_bound(getattr(space, side)) for side in ("low", "high")
        }
    if isinstance(space, gym.spaces.MultiDiscrete):
        flat = {"nvec": space.nvec.reshape(-1).tolist(), "start": np.asarray(space.start).reshape(-1).tolist()}
        return {"kind": "MultiDiscrete", "shape": list(space.shape), "dtype": np.dtype(space.dtype).name} | flat
    if isinstance(space, gym.spaces.Dict):
        if all(isinstance(k, str) for k in space.spaces):
            return {"kind": "Dict", "spaces": {str(k): describe(v) for k, v in space.spaces.items()}}
        keys = [
            str(k) if isinstance(k, str) else operator.index(k) for k in space.spaces
        ]  # the names of JSON's objects are texts
        return {"kind": "Dict", "keys": keys, "spaces": [describe(v) for v in space.spaces.values()]}
    if isinstance(space, gym.spaces.Tuple):
        return {"kind": "Tuple", "spaces": [describe(v) for v in space.spaces]}
    raise TypeError(f"{space} has no description")


def _describe_bound(bound: Array) -> Any:
    flat = bound.reshape(-1).astype(np.float64)
    values = [str(x) if not np.isfinite(x) else float(x) for x in (flat[:1] if flat.size and (flat == flat[0]).all() else flat)]
    return values[0] if len(values) == 1 else values


def from_description(description: dict[str, Any]) -> gym.Space[Any]:
    """The space of a description; the inverse of `describe`.

    Raises:
        ValueError: not a description of a space, or of one that is too big.
    """
    try:
        kind = description["kind"]
        if kind == "Discrete":
            return gym.spaces.Discrete(int(description["n"]), start=int(description["start"]))
        if kind == "MultiBinary":
            bits = [int(s) for s in description["shape"]]
            if prod(bits) > _MAX_BOX_BYTES:
                raise ValueError(f"{bits} bits are more than the {_MAX_BOX_BYTES} that a space may have")
            return gym.spaces.MultiBinary(bits if len(bits) > 1 else bits[0])
        if kind == "Box":
            shape, dtype = tuple(int(s) for s in description["shape"]), np.dtype(description["dtype"])
            if prod(shape) * dtype.itemsize > _MAX_BOX_BYTES:
                raise ValueError(
                    f"a box of shape {shape} and {dtype} takes more than the {_MAX_BOX_BYTES} bytes that one may have"
                )
            low, high = (_read_bound(description[side], shape, dtype) for side in ("low", "high"))
            return gym.spaces.Box(low, high, shape=shape, dtype=dtype.type)
        if kind == "MultiDiscrete":
            shape = tuple(int(s) for s in description["shape"])
            if not prod(shape) == len(description["nvec"]) == len(description["start"]):
                raise ValueError(f"a MultiDiscrete of shape {shape} needs {prod(shape)} numbers in nvec and in start")
            nvec, start = (np.array([int(n) for n in description[k]], np.int64).reshape(shape) for k in ("nvec", "start"))
            return gym.spaces.MultiDiscrete(nvec, dtype=np.dtype(description["dtype"]).type, start=start)
        if kind == "Tuple":
            return gym.spaces.Tuple([from_description(v) for v in description["spaces"]])
        if kind == "Dict":
            spaces = description["spaces"]
            named = zip(description["keys"], spaces, strict=True) if "keys" in description else spaces.items()
            return gym.spaces.Dict({k: from_description(v) for k, v in named})
    except (KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"not the description of a space: {description!r}") from err
    raise ValueError(f"unknown kind of space {kind!r}")


def _read_bound(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    numbers = np.asarray([float(v) for v in value] if isinstance(value, list) else float(value), dtype=np.float64)
    return np.broadcast_to(numbers.reshape(shape) if numbers.ndim else numbers, shape).astype(dtype)
