"""Observations as an environment returned them, or converted already, to the flat arrays of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.spaces.actions import ActionSpec, NonFiniteError, all_finite
from amago.spaces.observations import leaf_spaces, obs_spec

Array = NDArray[Any]


class ObsReader:
    """A reader of observations of an environment's own space, and observations already converted to the flat space.

    The two are distinguished for each key by its shape. (For a MultiBinary, and a MultiDiscrete of nothing but
    single values, the shapes are equal; floats are then taken to be converted.)

    Args:
        flat: the converted observations, a flat Dict of boxes.
        raw: the environment's observation space, with `obs_spec(raw).space` equal to ``flat``; None: ``flat`` itself.
        rows: B, if observations come in batches; None: observations of one environment.

    Raises:
        ValueError: ``raw`` does not convert to ``flat``.
    """

    def __init__(self, flat: gym.spaces.Dict, raw: gym.Space[Any] | None, rows: int | None):
        self.flat, self.raw, self.rows = flat, flat if raw is None else raw, rows
        if not converts_to(self.raw, flat):
            raise ValueError(f"an environment with observations {raw} does not have the observations {flat}")
        self._batch: tuple[int, ...] = () if rows is None else (rows,)
        of_raw, of_flat = (obs_spec(space, batched=rows is not None).leaves for space in (self.raw, flat))
        self._leaves = {k: (sub, of_raw[k].convert, of_flat[k].convert) for k, sub in leaf_spaces(self.raw).items()}
        self._one = None if rows is None else ObsReader(flat, raw, None)

    def __call__(self, obs: Any) -> dict[str, Array]:
        """Convert an observation or a batch of them.

        Args:
            obs: an observation of one of the two spaces; with ``rows``, one whose arrays have B rows, as a Gymnasium vector
                environment returns it, or a list of B observations. Where there is only one key, the array alone will do.

        Returns:
            {key: (B, ...)}, with the shapes and dtypes of ``flat``; B is 1 without ``rows``.

        Raises:
            ValueError: a key is missing or unknown, or an array has the wrong shape or dtype, or a value that its space lacks.
            NonFiniteError: an array holds NaN or infinity.
        """
        if self._one is not None and self._is_list_of_rows(obs):
            if len(obs) != self.rows:
                raise ValueError(f"obs is a list of {len(obs)} observations, but there are {self.rows} environments")
            each = [self._one(row) for row in obs]
            return {key: np.concatenate([row[key] for row in each]) for key in self._leaves}
        values = self._values(obs)
        arrays = {key: self._read(key, values[key]) for key in self._leaves}  # the order in which networks read them
        return arrays if self._batch else {key: array[None] for key, array in arrays.items()}

    def _is_list_of_rows(self, obs: object) -> bool:
        if not isinstance(obs, list) and not (isinstance(obs, np.ndarray) and obs.dtype == object):
            return False
        return isinstance(self.raw, gym.spaces.Tuple) or any(isinstance(row, Mapping) for row in obs)

    def _values(self, obs: object) -> Mapping[str, Any]:
        """The value of each key of an observation, in either form."""
        if isinstance(obs, Mapping) and obs.keys() == self._leaves.keys():
            return obs
        of_tuple = isinstance(self.raw, gym.spaces.Tuple)
        if len(self._leaves) == 1 and not isinstance(obs, Mapping) and not (of_tuple and isinstance(obs, tuple | list)):
            return dict.fromkeys(self._leaves, obs)
        if of_tuple or (isinstance(self.raw, gym.spaces.Dict) and isinstance(obs, Mapping)):
            return dict(_walk(self.raw, obs, "obs", ""))
        found = f"keys {sorted(map(str, obs))}" if isinstance(obs, Mapping) else f"type {type(obs).__name__}"
        raise ValueError(f"obs has {found}, the policy was trained with keys {sorted(self._leaves)}")

    def _read(self, name: str, value: object) -> Array:
        space, from_raw, from_flat = self._leaves[name]
        try:
            array = np.asarray(value)
        except ValueError as err:
            raise ValueError(f"obs[{name!r}] is no array: {err}") from None
        box = self.flat[name]
        raw, flat = (*self._batch, *(space.shape or ())), (*self._batch, *(box.shape or ()))
        if array.shape not in (raw, flat):
            either = f"{raw}" if raw == flat else f"{raw}, as the environment returns it, or {flat}, converted"
            raise ValueError(f"obs[{name!r}] has shape {array.shape}, it must be {either}")
        same_values = isinstance(space, gym.spaces.Box)
        is_raw = array.shape == raw and (raw != flat or same_values or array.dtype.kind != "f")
        out = (from_raw if is_raw else from_flat)(array)
        if out.dtype.kind == "f" and not all_finite(out):
            raise NonFiniteError(f"obs[{name!r}] holds {out[~np.isfinite(out)][0]}; observations must be finite in float32")
        return out


def converts_to(raw: gym.Space[Any], flat: gym.spaces.Dict) -> bool:
    """True if observations of a space have the keys, shapes and dtypes of ``flat`` once converted."""
    found = obs_spec(raw).space.spaces
    return found.keys() == flat.spaces.keys() and all(
        (a.shape, a.dtype) == (flat[key].shape, flat[key].dtype) for key, a in found.items()
    )


def spaces_of(source: Any) -> tuple[gym.spaces.Dict, gym.Space[Any]]:
    """The flat observation space and the action space of an environment.

    Args:
        source: an environment, vectorised or not; a function that makes one, which is closed; or (observation space, action
            space).

    Raises:
        TypeError: none of these, or a space that is not supported.
    """
    if isinstance(source, (tuple, list)) and len(source) == 2 and all(isinstance(s, gym.Space) for s in source):
        return obs_spec(source[0]).space, source[1]
    env = source() if callable(source) and not hasattr(source, "observation_space") else source
    try:
        spaces: list[Any] = [
            getattr(env, f"single_{name}", None) or getattr(env, name, None) for name in ("observation_space", "action_space")
        ]
        if isinstance(spec := getattr(env, "action_spec", None), ActionSpec):
            spaces[1] = spec.space  # the `action_space` of an AMAGOEnv is the policy's
    finally:
        if env is not source and callable(getattr(env, "close", None)):
            env.close()
    if not all(isinstance(s, gym.Space) for s in spaces):
        raise TypeError(f"{source!r} must be an environment, a function that makes one, or (observation space, action space)")
    return obs_spec(spaces[0]).space, spaces[1]


def _walk(space: gym.Space[Any], value: Any, at: str, name: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of each leaf of an observation of a nested space."""
    if not isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        yield name or "observation", value
        return
    of_dict = isinstance(space, gym.spaces.Dict)
    keys: list[Any] = list(space.spaces if isinstance(space, gym.spaces.Dict) else range(len(space.spaces)))
    if of_dict and isinstance(value, Mapping):
        fits, found = value.keys() == set(keys), f"keys {sorted(map(str, value))}"
    elif not of_dict and isinstance(value, tuple | list):
        fits, found = len(value) == len(keys), f"{len(value)} values"
    else:
        fits, found = False, f"type {type(value).__name__}"
    if not fits:
        wanted = f"keys {sorted(map(str, keys))}" if of_dict else f"a tuple of {len(keys)}"
        raise ValueError(f"{at} has {found}, the policy was trained with {wanted}")
    for key in keys:
        yield from _walk(space[key], value[key], f"{at}[{key!r}]", f"{name}/{key}" if name else str(key))
