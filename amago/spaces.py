"""Spaces as the rest of the code sees them: flat dicts of boxes in, one action vector out (`amago.action_spaces`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.action_spaces import (
    ActionMask,
    ActionPart,
    ActionSpec,
    NonFiniteError,
    action_spec,
    all_finite,
    check_mask,
    parts_of,
    rl2_space,
    stored_dtype_of,
)

__all__ = [
    "ActionMask", "ActionPart", "ActionSpec", "NonFiniteError", "ObsSpec", "action_spec", "all_finite", "check_mask", "describe",
    "from_description", "obs_spec", "parts_of", "rl2_space", "stored_dtype_of", "stored_width",
]  # fmt: skip

Array = NDArray[Any]

_MAX_BOX_BYTES = 1 << 28
"""Of one observation or action; a description that was read from a file may declare anything."""


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


def describe(space: gym.Space[Any]) -> dict[str, Any]:
    """A JSON-able description of a Discrete, MultiDiscrete, Box or MultiBinary space, or of a Dict or Tuple of such;
    `from_description` is the inverse."""
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
        return {"kind": "Dict", "spaces": {k: describe(v) for k, v in space.spaces.items()}}
    if isinstance(space, gym.spaces.Tuple):
        return {"kind": "Tuple", "spaces": [describe(v) for v in space.spaces]}
    raise TypeError(f"{space} has no description")


def _describe_bound(bound: Array) -> Any:
    flat = bound.reshape(-1).astype(np.float64)
    values = [str(x) if not np.isfinite(x) else float(x) for x in (flat[:1] if flat.size and (flat == flat[0]).all() else flat)]
    return values[0] if len(values) == 1 else values


def from_description(description: dict[str, Any]) -> gym.Space[Any]:
    """The space that `describe` described.

    Raises:
        ValueError: not such a description.
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
            return gym.spaces.Dict({k: from_description(v) for k, v in description["spaces"].items()})
    except (KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"not the description of a space: {description!r}") from err
    raise ValueError(f"unknown kind of space {kind!r}")


def stored_width(description: dict[str, Any]) -> int:
    """S of the action space that a description is of, without building anything of a size that it declares."""
    if description.get("kind") in ("Dict", "Tuple"):
        inner = description["spaces"]
        return sum(stored_width(d) for d in (inner.values() if isinstance(inner, dict) else inner))
    return prod(description.get("shape", []))


def _read_bound(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    numbers = np.asarray([float(v) for v in value] if isinstance(value, list) else float(value), dtype=np.float64)
    return np.broadcast_to(numbers.reshape(shape) if numbers.ndim else numbers, shape).astype(dtype)
