"""Environments written in jax as one vectorised Gymnasium environment: numpy in, numpy out, all rows in one compiled call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.builtin._extras import require

Array = NDArray[Any]
Info = dict[str, Any]

Opened = tuple[Any, Any]
"""State and observation of a row whose rollout opens."""
Advanced = tuple[Any, Any, Any, Any, Any, Any, dict[str, Any]]
"""State, observation, reward, terminated, truncated, the observation that the step led to, and numbers to be logged. Where the
rollout ended, the first two are those of the next."""


class JaxVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """B rows of one environment that resets itself in the step that ends a rollout (`AutoresetMode.SAME_STEP`).

    ``info["final_obs"]`` holds the last observations where rows ended, ``info["final_info"]`` what those rows log.

    Args:
        num_envs: B.
        observation_space, action_space: of one row.
        open_row: tables, key -> `Opened`, traceable by jax.
        advance_row: tables, key, state, action -> `Advanced`, likewise. Both are compiled once for all environments that are given
            the same two functions, and as many rows.
        extra: what brings jax, for the message where it is missing.
        device: where jax computes: "cpu", "gpu", "tpu"; None takes its own choice.
        tables: arrays that differ between environments.

    Raises:
        ValueError: jax knows no such device.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "render_modes": []}

    def __init__(
        self,
        num_envs: int,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        open_row: Callable[[Any, Any], Opened],
        advance_row: Callable[[Any, Any, Any, Any], Advanced],
        extra: str,
        device: str | None = None,
        tables: Any = (),
    ) -> None:
        self.num_envs = common.check_int("num_envs", num_envs, 1)
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)
        self._jax = jax = require("jax", extra)
        try:
            self._device = None if device is None else jax.devices(device)[0]
        except RuntimeError as err:
            raise ValueError(f"device is {device!r}, but jax says: {err}") from err

        self._tables = jax.tree.map(jax.numpy.asarray, tables)
        self._open_all, self._advance_all = _compiled(jax, open_row, advance_row, self.num_envs)
        self._key: Any = None
        self._state: Any = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:  # type: ignore[override]
        """Open a new rollout in every row; ``seed`` decides all that follows."""
        if seed is not None or self._key is None:
            start = np.random.SeedSequence(seed).generate_state(1)[0]
            self._key = self._jax.device_put(self._jax.random.key(start), self._device)
        self._key, self._state, obs = self._open_all(self._tables, self._key)
        return self._numpy(obs), {}

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, Info]:
        if self._state is None:
            common.refuse_step(type(self).__name__)
        actions = np.asarray(actions)
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions have shape {actions.shape}, but must have {self.action_space.shape}, a row each")
        out = self._advance_all(self._tables, self._key, self._state, actions)
        self._key, self._state, obs, reward, terminated, truncated, last_obs, logged = out
        obs, reward, terminated, truncated = self._numpy((obs, reward, terminated, truncated))
        info: Info = {}
        if (terminated | truncated).any():  # fetched only where they are needed
            info["final_obs"], info["final_info"] = self._numpy((last_obs, logged))
            info["_final_obs"] = info["_final_info"] = terminated | truncated
        return obs, reward, terminated, truncated, info

    def _numpy(self, tree: Any) -> Any:
        return self._jax.tree.map(np.asarray, self._jax.device_get(tree))


def use_after(jax: Any, ended: Any, new: Any, old: Any) -> Any:
    """The tree ``new`` where the rollout ended, else ``old``."""
    return jax.tree.map(lambda n, o: jax.numpy.where(ended, n, o), new, old)


def _settled(jax: Any, tree: Any) -> Any:
    """Every leaf with a type of its own: Python's numbers have weak ones, for which a step would be compiled once more."""

    def settle(leaf: Any) -> Any:
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf if is_key else jax.lax.convert_element_type(leaf, leaf.dtype)

    return jax.tree.map(settle, tree)


@lru_cache(maxsize=8)
def _compiled(
    jax: Any, open_row: Callable[[Any, Any], Opened], advance_row: Callable[[Any, Any, Any, Any], Advanced], num_envs: int
) -> tuple[Any, Any]:
    """Both functions for all rows at once."""

    def open_all(tables: Any, key: Any) -> Any:
        key, own = jax.random.split(key)
        return key, *_settled(jax, jax.vmap(open_row, (None, 0))(tables, jax.random.split(own, num_envs)))

    def advance_all(tables: Any, key: Any, state: Any, action: Any) -> Any:
        key, own = jax.random.split(key)
        keys = jax.random.split(own, num_envs)
        return key, *_settled(jax, jax.vmap(advance_row, (None, 0, 0, 0))(tables, keys, state, action))

    return jax.jit(open_all), jax.jit(advance_all)
