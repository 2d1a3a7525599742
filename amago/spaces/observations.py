"""Observation spaces as the rest of the library sees them: flat dicts of boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class ObsSpec:
    """A flat dict of boxes, and how to turn an environment's observation into it. Build with `obs_spec`.

    Attributes:
        space: the flat dict.
        convert: an observation of the environment -> {key: array}. Shapes, dtypes and keys are checked.
        real_keys: those that can hold NaN or infinity; `convert` lets them pass.
    """

    space: gym.spaces.Dict
    convert: Callable[[Any], dict[str, Array]]
    real_keys: tuple[str, ...] = ()
    """Environment observation -> {key: array}; raises ValueError naming the key on a wrong shape or a missing or extra key."""


def obs_spec(space: gym.Space[Any], batched: bool = False) -> ObsSpec:
    """Flatten any supported observation space.

    A space that is no dict becomes ``{"observation": ...}``; nested dicts get keys joined with "/", tuples their index;
    Discrete and MultiDiscrete leaves become one-hot float32, MultiBinary leaves float32.

    Args:
        space: the space of one environment (never with a batch dimension).
        batched: observations to convert have one leading batch dimension.

    Raises:
        TypeError: a Text, Graph, Sequence or unknown leaf, with its key and what to do.
    """
    leaves: dict[str, tuple[gym.spaces.Box, Callable[[Any], Array], tuple[Any, ...]]] = {}
    real: set[str] = set()

    def visit(key: str, sub: gym.Space[Any], path: tuple[Any, ...]) -> None:
        if isinstance(sub, gym.spaces.Dict):
            for k, v in sub.spaces.items():
                visit(f"{key}/{k}" if key else str(k), v, (*path, k))
        elif isinstance(sub, gym.spaces.Tuple):
            for i, v in enumerate(sub.spaces):
                visit(f"{key}/{i}" if key else str(i), v, (*path, i))
        else:
            name = key or "observation"
            box, convert = _leaf(name, sub, batched)
            leaves[name] = (box, convert, path)
            if isinstance(sub, gym.spaces.Box) and np.dtype(sub.dtype).kind == "f":
                real.add(name)

    visit("", space, ())
    plain = list(leaves) == ["observation"] and leaves["observation"][2] == ()
    flat = gym.spaces.Dict({k: leaves[k][0] for k in sorted(leaves)})
    top = set(space.spaces) if isinstance(space, gym.spaces.Dict) else None

    if plain:
        only = leaves["observation"][1]

        def convert_plain(obs: Any) -> dict[str, Array]:
            return {"observation": only(obs)}

        return ObsSpec(flat, convert_plain, tuple(real))

    items = [(k, leaves[k][1], leaves[k][2]) for k in sorted(leaves)]

    def convert_nested(obs: Any) -> dict[str, Array]:
        if top is not None and (not isinstance(obs, dict) or obs.keys() != top):
            raise ValueError(_key_error(obs, top))
        out = {}
        for key, leaf, path in items:
            value = obs
            for step in path:
                value = value[step]
            out[key] = leaf(value)
        return out

    return ObsSpec(flat, convert_nested, tuple(sorted(real)))


def _key_error(obs: Any, expected: set[str]) -> str:
    if not isinstance(obs, dict):
        return (
            f"the observation space is a Dict with keys {sorted(expected)}, but the environment returned {type(obs).__name__}"
        )
    missing, extra = sorted(expected - obs.keys()), sorted(obs.keys() - expected)
    parts = ([f"missing {missing}"] if missing else []) + ([f"not in the space: {extra}"] if extra else [])
    return f"observation keys differ from the observation space: {'; '.join(parts)}"


def _leaf(name: str, space: gym.Space[Any], batched: bool) -> tuple[gym.spaces.Box, Callable[[Any], Array]]:
    ndim = 1 if batched else 0

    def check(a: Array, shape: tuple[int, ...]) -> None:
        if a.shape[ndim:] != shape or a.ndim != ndim + len(shape):
            raise ValueError(f"observation {name!r} has shape {a.shape[ndim:]}, but its space says {shape}")

    def check_whole(a: Array) -> None:
        if a.dtype.kind not in "iub":
            raise ValueError(f"observation {name!r} has dtype {a.dtype}, but {space} holds whole numbers")

    if isinstance(space, gym.spaces.Box):
        shape, dtype = space.shape or (1,), np.dtype(space.dtype)
        original = space.shape
        if dtype == np.float64:  # networks read float32: halve what is stored and sent
            dtype = np.dtype(np.float32)
        whole = dtype.kind in "iu"

        def convert_box(obs: Any) -> Array:
            a = np.asarray(obs)
            check(a, original)
            if a.dtype != dtype:
                if a.dtype.kind == "O" or not np.can_cast(a.dtype, dtype, "same_kind"):
                    raise ValueError(f"observation {name!r} has dtype {a.dtype}, but its space says {space.dtype}")
                given, a = a, a.astype(dtype)
                if whole and not np.can_cast(given.dtype, dtype) and (given != a).any():
                    raise ValueError(f"observation {name!r} holds {given[given != a][0]}, which {space.dtype} cannot")
            return a.reshape(*a.shape[:ndim], *shape)

        with np.errstate(over="ignore"):  # float64 bounds beyond float32 become infinite
            low, high = space.low.astype(dtype).reshape(shape), space.high.astype(dtype).reshape(shape)
        box_type: Any = dtype.type
        return gym.spaces.Box(low, high, shape=shape, dtype=box_type), convert_box

    if isinstance(space, gym.spaces.Discrete):
        n, first = int(space.n), int(space.start)

        def convert_discrete(obs: Any) -> Array:
            index = np.asarray(obs)
            check(index, ())
            check_whole(index)
            index = index.astype(np.int64) - first
            if (index < 0).any() or (index >= n).any():
                raise ValueError(f"observation {name!r} is {obs}, outside {space}")
            return _one_hot(index, n)

        return gym.spaces.Box(0.0, 1.0, shape=(n,), dtype=np.float32), convert_discrete

    if isinstance(space, gym.spaces.MultiDiscrete):
        nvec, start = space.nvec.reshape(-1).astype(np.int64), np.asarray(space.start).reshape(-1)
        offsets, total, shape = np.concatenate(([0], np.cumsum(nvec)[:-1])), int(nvec.sum()), space.shape

        def convert_multi(obs: Any) -> Array:
            index = np.asarray(obs)
            check(index, shape)
            check_whole(index)
            index = index.reshape(*index.shape[:ndim], -1).astype(np.int64) - start
            if (index < 0).any() or (index >= nvec).any():
                raise ValueError(f"observation {name!r} is {obs}, outside {space}")
            out = np.zeros((*index.shape[:ndim], total), dtype=np.float32)
            np.put_along_axis(out, index + offsets, 1.0, axis=-1)
            return out

        return gym.spaces.Box(0.0, 1.0, shape=(total,), dtype=np.float32), convert_multi

    if isinstance(space, gym.spaces.MultiBinary):
        shape = space.shape

        def convert_bits(obs: Any) -> Array:
            a = np.asarray(obs)
            check(a, shape)
            check_whole(a)
            if ((a != 0) & (a != 1)).any():
                raise ValueError(f"observation {name!r} is {obs}, outside {space}")
            return a.astype(np.float32)

        return gym.spaces.Box(0.0, 1.0, shape=shape, dtype=np.float32), convert_bits

    raise TypeError(
        f"observation {name!r} has space {type(space).__name__}, which has no fixed-size array form. Wrap the environment with "
        "gymnasium.wrappers.FilterObservation to drop the key, or TransformObservation to turn it into a Box (tokens, say)."
    )


def _one_hot(index: Array, n: int) -> NDArray[np.float32]:
    out = np.zeros((*index.shape, n), dtype=np.float32)
    np.put_along_axis(out, index[..., None], 1.0, axis=-1)
    return out
