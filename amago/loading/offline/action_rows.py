"""Recorded actions, as arrays or as an array for each part, in the form of an action space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_EXACT = 2.0**53  # float64 holds all whole numbers below this one


def action_rows(space: gym.Space[Any], actions: Array | Mapping[str, Array]) -> Any:
    """N recorded actions in the form of the space: an array, or a dict or tuple of arrays of N rows.

    Args:
        space: the environment's action space.
        actions: (N, ...); of a Tuple or Dict either {name: (N, ...)} with an array for each part, where parts of parts are
            named "arm/grip" and those of a tuple "0", "1", .., or (N, W): the numbers of the parts side by side, in the order
            of the space.

    Raises:
        ValueError: names or widths that do not fit, or numbers that are not whole where the space has choices or bits.
    """
    if not isinstance(space, gym.spaces.Tuple | gym.spaces.Dict):
        if isinstance(actions, Mapping):
            raise ValueError(f"actions has parts {sorted(actions)}, but {space} has none")
        return _whole("actions", np.asarray(actions), space)
    leaves = dict(_leaves(space))
    parts = _by_name(leaves, actions) if isinstance(actions, Mapping) else _by_column(leaves, np.asarray(actions), space)
    for name, values in parts.items():
        label, leaf = f"actions[{name!r}]", leaves[name]
        rows = len(values) if values.ndim else 0
        if values.size != rows * prod(leaf.shape or ()):
            raise ValueError(f"{label} has shape {values.shape}, but {leaf} needs (N, *{leaf.shape})")
        parts[name] = _whole(label, values.reshape(rows, *(leaf.shape or ())), leaf)
    return _nested(space, "", parts)


def slice_rows(rows: Any, start: int, stop: int) -> Any:
    """Rows [start, stop) of the result of `action_rows`."""
    if isinstance(rows, dict):
        return {name: slice_rows(part, start, stop) for name, part in rows.items()}
    if isinstance(rows, tuple):
        return tuple(slice_rows(part, start, stop) for part in rows)
    return rows[start:stop]


def _items(space: gym.spaces.Tuple | gym.spaces.Dict) -> Iterator[tuple[Any, gym.Space[Any]]]:
    return iter(space.spaces.items()) if isinstance(space, gym.spaces.Dict) else enumerate(space.spaces)


def _leaves(space: gym.Space[Any], name: str = "") -> Iterator[tuple[str, gym.Space[Any]]]:
    if isinstance(space, gym.spaces.Tuple | gym.spaces.Dict):
        for key, sub in _items(space):
            yield from _leaves(sub, f"{name}/{key}" if name else str(key))
    else:
        yield name, space


def _by_name(leaves: dict[str, gym.Space[Any]], actions: Mapping[str, Array]) -> dict[str, Array]:
    if actions.keys() != leaves.keys():
        raise ValueError(f"actions has parts {sorted(actions)}, but the space has {sorted(leaves)}")
    return {name: np.asarray(actions[name]) for name in leaves}


def _by_column(leaves: dict[str, gym.Space[Any]], actions: Array, space: gym.Space[Any]) -> dict[str, Array]:
    widths = {name: prod(leaf.shape or ()) for name, leaf in leaves.items()}
    if actions.ndim != 2 or actions.shape[1] != sum(widths.values()):
        needs = ", ".join(f"{width} of {name}" for name, width in widths.items())
        raise ValueError(
            f"actions has shape {actions.shape}, but {space} needs {sum(widths.values())} numbers in each row: {needs}"
        )
    ends = np.cumsum(list(widths.values())).tolist()
    return {name: actions[:, end - widths[name] : end] for name, end in zip(widths, ends, strict=True)}


def _whole(label: str, values: Array, space: gym.Space[Any]) -> Array:
    """Indices and bits with an integer dtype; values of boxes unchanged."""
    if not isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
        return values
    if values.dtype.kind not in "iubf":
        raise ValueError(f"{label} has dtype {values.dtype}, but {space} takes whole numbers")
    if isinstance(space, gym.spaces.MultiBinary):
        right, words = (values == 0) | (values == 1), "bits 0 or 1"
    else:
        right, words = (values == np.floor(values)) & (np.abs(values) < _EXACT), "whole numbers"
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        raise ValueError(f"{label} is {values[at]} in row {at[0]}, but {space} takes {words}")
    return values.astype(np.int64) if values.dtype.kind == "f" else values


def _nested(space: gym.Space[Any], name: str, parts: dict[str, Array]) -> Any:
    if not isinstance(space, gym.spaces.Tuple | gym.spaces.Dict):
        return parts[name]
    values = {key: _nested(sub, f"{name}/{key}" if name else str(key), parts) for key, sub in _items(space)}
    return values if isinstance(space, gym.spaces.Dict) else tuple(values.values())
