"""Observation spaces as the rest of the library sees them: flat dicts of boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


Leaf = tuple[gym.spaces.Box, Callable[[Any], Array]]
"""The box of a leaf of an observation space, and how to convert its observations."""


@dataclass(frozen=True)
class ObsSpec:
    """A flat dict of boxes, and the conversion of an environment's observations to it. Create it with `obs_spec`.

    Attributes:
        space: the flat dict.
        convert: environment observation -> {key: array}; raises ValueError, with the key, on a missing or extra key, a wrong
            shape or dtype, or a value that the space does not have.
        real_keys: the keys that can hold NaN or infinity, which ``convert`` accepts.
        leaves: {key: (the keys and indices that lead to it in the environment's observation, its box, its conversion)}.
    """

    space: gym.spaces.Dict
    convert: Callable[[Any], dict[str, Array]]
    real_keys: tuple[str, ...] = ()
    leaves: dict[str, tuple[tuple[Any, ...], gym.spaces.Box, Callable[[Any], Array]]] = field(default_factory=dict)


def obs_spec(space: gym.Space[Any], batched: bool = False, lead: bool = False) -> ObsSpec:
    """Flatten any supported observation space.

    A space that is not a Dict or Tuple becomes ``{"observation": ...}``. Keys of nested dicts are joined with "/", those of
    tuples are their indices. Discrete and MultiDiscrete leaves become one-hot float32, MultiBinary leaves float32, float64
    boxes float32.

    Args:
        space: the space of one environment (without a batch dimension).
        batched: whether observations to convert have one leading batch dimension.
        lead: give converted observations, which are not batched, a leading dimension of 1.

    Raises:
        TypeError: a Text, Graph, Sequence or unknown leaf; the message has its key and what to do.
    """
    paths = dict(sorted(_leaves(space), key=lambda leaf: leaf[0]))
    leaves = {name: _leaf(name, sub, 1 if batched else 0, lead) for name, (_, sub) in paths.items()}
    flat = gym.spaces.Dict({name: box for name, (box, _) in leaves.items()})
    real = tuple(
        name for name, (_, sub) in paths.items() if isinstance(sub, gym.spaces.Box) and np.dtype(sub.dtype).kind == "f"
    )
    whole = {name: (paths[name][0], box, convert) for name, (box, convert) in leaves.items()}
    if not isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        only = leaves["observation"][1]

        def convert_plain(obs: Any) -> dict[str, Array]:
            return {"observation": only(obs)}

        return ObsSpec(flat, convert_plain, real, whole)

    items = [(name, convert, paths[name][0]) for name, (_, convert) in leaves.items()]
    keys = set(space.spaces) if isinstance(space, gym.spaces.Dict) else None

    def convert_nested(obs: Any) -> dict[str, Array]:
        if keys is not None and (not isinstance(obs, dict) or obs.keys() != keys):
            raise ValueError(_key_error(obs, keys))
        out = {}
        for name, convert, path in items:
            value = obs
            for step in path:
                value = value[step]
            out[name] = convert(value)
        return out

    return ObsSpec(flat, convert_nested, real, whole)


def changed_spec(
    spec: ObsSpec,
    wanted: dict[str, gym.Space[Any]],
    batched: bool = False,
    lead: bool = False,
    ignored: Iterable[Any] = (),
) -> ObsSpec:
    """The conversion to a flat dict from which keys were removed, or to which keys were added.

    Args:
        spec: of the environment's own observations, or what this function returned for them before.
        wanted: the spaces by key. Those that are boxes of ``spec`` itself are converted as before; the observation must be a
            dict that has the others, where "observation" stands for an observation that is no dict.
        batched, lead: as in `obs_spec`.
        ignored: keys that observations may have beside these.

    Raises:
        TypeError: as `obs_spec`.
    """
    kept = {k: leaf for k, leaf in spec.leaves.items() if wanted.get(k) is leaf[1]}
    new = obs_spec(gym.spaces.Dict({k: sub for k, sub in wanted.items() if k not in kept}), batched, lead)
    leaves = dict(sorted({**{k: (path or (k,), box, f) for k, (path, box, f) in kept.items()}, **new.leaves}.items()))
    needed = {path[0] for path, _, _ in leaves.values()}
    allowed = needed | set(ignored)

    def convert(obs: Any) -> dict[str, Array]:
        given = obs if isinstance(obs, dict) else dict(enumerate(obs)) if isinstance(obs, tuple) else {"observation": obs}
        if not needed <= given.keys() <= allowed:
            raise ValueError(_key_error(given, needed | (allowed & given.keys())))
        out = {}
        for name, (path, _, leaf) in leaves.items():
            value = given
            for step in path:
                value = value[step]
            out[name] = leaf(value)
        return out

    real = (*(k for k in spec.real_keys if k in kept), *new.real_keys)
    flat = gym.spaces.Dict({name: box for name, (_, box, _) in leaves.items()})
    return ObsSpec(flat, convert, real, leaves)


def leaf_spaces(space: gym.Space[Any]) -> dict[str, gym.Space[Any]]:
    """The spaces in ``space`` that are neither Dict nor Tuple, by their keys in the flat dict, sorted."""
    return {name: sub for name, (_, sub) in sorted(_leaves(space), key=lambda leaf: leaf[0])}


def _leaves(
    space: gym.Space[Any], name: str = "", path: tuple[Any, ...] = ()
) -> Iterator[tuple[str, tuple[tuple[Any, ...], gym.Space[Any]]]]:
    """(name, (path, space)) of each leaf; the path is the keys and indices that lead to it."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        for key, sub in space.spaces.items() if isinstance(space, gym.spaces.Dict) else enumerate(space.spaces):
            yield from _leaves(sub, f"{name}/{key}" if name else str(key), (*path, key))
    else:
        yield name or "observation", (path, space)


def _key_error(obs: Any, expected: set[str]) -> str:
    if not isinstance(obs, dict):
        return (
            f"the observation space is a Dict with keys {sorted(expected)}, but the environment returned {type(obs).__name__}"
        )
    missing, extra = sorted(expected - obs.keys(), key=str), sorted(obs.keys() - expected, key=str)
    parts = ([f"missing {missing}"] if missing else []) + ([f"not in the space: {extra}"] if extra else [])
    return f"observation keys differ from the observation space: {'; '.join(parts)}"


def _leaf(name: str, space: gym.Space[Any], ndim: int, lead: bool) -> Leaf:
    """The leaf of a space that is not nested.

    Args:
        name: for error messages.
        ndim: batch dimensions of the observations to convert.
        lead: add a dimension of 1 before those of the observation.
    """
    if isinstance(space, gym.spaces.Box):
        return _box_leaf(name, space, ndim, lead)
    for kind, make in _ONE_HOT.items():
        if isinstance(space, kind):
            leaf: Leaf = make(name, space, ndim)
            return (leaf[0], partial(_with_lead, leaf[1])) if lead else leaf
    raise TypeError(
        f"observation {name!r} has space {type(space).__name__}, which has no fixed-size array form. Wrap the environment with "
        "gymnasium.wrappers.FilterObservation to drop the key, or TransformObservation to turn it into a Box (tokens, say)."
    )


def _with_lead(convert: Callable[[Any], Array], obs: Any) -> Array:
    return convert(obs)[None]


def _box_leaf(name: str, space: gym.spaces.Box, ndim: int, lead: bool) -> Leaf:
    shape, dtype = space.shape or (1,), np.dtype(space.dtype)
    if dtype == np.float64:  # networks read float32, and files and messages are half as long
        dtype = np.dtype(np.float32)
    original, whole, to_shape = space.shape, dtype.kind in "iu", (1, *shape) if lead else shape

    def convert(obs: Any) -> Array:
        a = np.asarray(obs)
        if ndim or a.shape != original:
            _check_shape(name, a, original, ndim)
        if a.dtype != dtype:
            if a.dtype.kind == "O" or not np.can_cast(a.dtype, dtype, "same_kind"):
                raise ValueError(f"observation {name!r} has dtype {a.dtype}, but its space says {space.dtype}")
            given, a = a, a.astype(dtype)
            if whole and not np.can_cast(given.dtype, dtype) and (given != a).any():
                raise ValueError(f"observation {name!r} holds {given[given != a][0]}, which {space.dtype} cannot")
        return a.reshape(len(a), *shape) if ndim else a.reshape(to_shape)

    with np.errstate(over="ignore"):  # float64 bounds beyond float32 become infinite
        low, high = space.low.astype(dtype).reshape(shape), space.high.astype(dtype).reshape(shape)
    box_type: Any = dtype.type
    return gym.spaces.Box(low, high, shape=shape, dtype=box_type), convert


def _discrete_leaf(name: str, space: gym.spaces.Discrete, ndim: int) -> Leaf:
    n, first = int(space.n), int(space.start)

    def convert(obs: Any) -> Array:
        index = np.asarray(obs)
        _check_shape(name, index, (), ndim)
        _check_whole(name, index, space)
        index = index.astype(np.int64) - first
        if (index < 0).any() or (index >= n).any():
            raise ValueError(f"observation {name!r} is {obs}, outside {space}")
        out = np.zeros((*index.shape, n), dtype=np.float32)
        np.put_along_axis(out, index[..., None], 1.0, axis=-1)
        return out

    return _unit_box((n,)), convert


def _multi_discrete_leaf(name: str, space: gym.spaces.MultiDiscrete, ndim: int) -> Leaf:
    nvec, start = space.nvec.reshape(-1).astype(np.int64), np.asarray(space.start).reshape(-1)
    offsets, width = np.concatenate(([0], np.cumsum(nvec)[:-1])), int(nvec.sum())

    def convert(obs: Any) -> Array:
        index = np.asarray(obs)
        _check_shape(name, index, space.shape, ndim)
        _check_whole(name, index, space)
        index = index.reshape(*index.shape[:ndim], -1).astype(np.int64) - start
        if (index < 0).any() or (index >= nvec).any():
            raise ValueError(f"observation {name!r} is {obs}, outside {space}")
        out = np.zeros((*index.shape[:ndim], width), dtype=np.float32)
        np.put_along_axis(out, index + offsets, 1.0, axis=-1)
        return out

    return _unit_box((width,)), convert


def _multi_binary_leaf(name: str, space: gym.spaces.MultiBinary, ndim: int) -> Leaf:
    def convert(obs: Any) -> Array:
        a = np.asarray(obs)
        _check_shape(name, a, space.shape, ndim)
        _check_whole(name, a, space)
        if ((a != 0) & (a != 1)).any():
            raise ValueError(f"observation {name!r} is {obs}, outside {space}")
        return a.astype(np.float32)

    return _unit_box(space.shape), convert


_ONE_HOT: dict[Any, Callable[[str, Any, int], Leaf]] = {
    gym.spaces.Discrete: _discrete_leaf,
    gym.spaces.MultiDiscrete: _multi_discrete_leaf,
    gym.spaces.MultiBinary: _multi_binary_leaf,
}


def _unit_box(shape: tuple[int, ...]) -> gym.spaces.Box:
    return gym.spaces.Box(0.0, 1.0, shape=shape, dtype=np.float32)


def _check_shape(name: str, a: Array, shape: tuple[int, ...], ndim: int) -> None:
    if a.shape[ndim:] != shape or a.ndim != ndim + len(shape):
        raise ValueError(f"observation {name!r} has shape {a.shape[ndim:]}, but its space says {shape}")


def _check_whole(name: str, a: Array, space: gym.Space[Any]) -> None:
    if a.dtype.kind not in "iub":
        raise ValueError(f"observation {name!r} has dtype {a.dtype}, but {space} holds whole numbers")
