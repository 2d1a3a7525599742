"""Adapter from environments written in JAX to a vectorised Gymnasium environment: NumPy arrays, one compiled call per step."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from amago.config import NamedArguments
from amago.envs.builtin import _common as common
from amago.envs.builtin._extras import require

Array = NDArray[Any]
Info = dict[str, Any]

RowReset = tuple[Any, Any]
"""State and first observation of a row's new rollout."""
RowStep = tuple[Any, Any, Any, Any, Any, Any, dict[str, Any]]
"""State, observation, reward, terminated, truncated, final observation and metrics after a step of a row. At the end of a
rollout, the state and the observation are the first of the next rollout, and the final observation is the last of this one."""


class JaxVectorEnv(NamedArguments, gym.vector.VectorEnv[Any, Any, Any]):
    """B copies (rows) of a JAX environment. A row resets in the step that ends its rollout (`AutoresetMode.SAME_STEP`).

    After the end of a rollout ``info["final_obs"]`` holds the last observations and ``info["final_info"]`` the metrics; the
    entries of rows that have not ended are undefined (``info["_final_obs"]`` is the mask).

    Args:
        num_envs: B.
        observation_space, action_space: the spaces of one row.
        reset_row: function ``(tables, key) -> RowReset`` that JAX can trace.
        step_row: function ``(tables, key, state, action) -> RowStep`` that JAX can trace. Environments that share both
            functions and ``num_envs`` share one compilation.
        extra: the extra of this library that installs JAX, for error messages.
        device: "cpu", "gpu" or "tpu"; None leaves the choice to JAX.
        tables: arrays that are passed to both functions.

    Raises:
        ValueError: JAX has no such device.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "render_modes": []}

    def __init__(
        self,
        num_envs: int,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        reset_row: Callable[[Any, Any], RowReset],
        step_row: Callable[[Any, Any, Any, Any], RowStep],
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
            raise ValueError(f"device={device!r} is not available in jax: {err}") from err

        self._tables = jax.tree.map(jax.numpy.asarray, tables)
        self._reset_all, self._step_all = _compiled(jax, reset_row, step_row, self.num_envs)
        self._key: Any = None
        self._state: Any = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:  # type: ignore[override]
        """Begin a new rollout in every row. All randomness from here on depends on ``seed`` alone."""
        if seed is not None or self._key is None:
            start = np.random.SeedSequence(seed).generate_state(1)[0]
            self._key = self._jax.device_put(self._jax.random.key(start), self._device)
        self._key, self._state, obs = self._reset_all(self._tables, self._key)
        return self._numpy(obs), {}

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, Info]:
        if self._state is None:
            common.refuse_step(type(self).__name__)
        actions = np.asarray(actions)
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions must have shape {self.action_space.shape}, one row per environment, got {actions.shape}")
        out = self._step_all(self._tables, self._key, self._state, actions)
        self._key, self._state, obs, reward, terminated, truncated, last_obs, logged = out
        obs, reward, terminated, truncated = self._numpy((obs, reward, terminated, truncated))
        info: Info = {}
        if (terminated | truncated).any():  # copying them from the device every step would be wasted
            info["final_obs"], info["final_info"] = self._numpy((last_obs, logged))
            info["_final_obs"] = info["_final_info"] = terminated | truncated
        return obs, reward, terminated, truncated, info

    def _numpy(self, tree: Any) -> Any:
        return self._jax.tree.map(np.asarray, self._jax.device_get(tree))


def use_after(jax: Any, ended: Any, new: Any, old: Any) -> Any:
    """The tree ``new`` where ``ended`` is true, else ``old``."""
    return jax.tree.map(lambda n, o: jax.numpy.where(ended, n, o), new, old)


def _strongly_typed(jax: Any, tree: Any) -> Any:
    """The tree without weakly typed leaves (those made from Python numbers), for which JAX would compile the step a second
    time."""

    def convert(leaf: Any) -> Any:
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf if is_key else jax.lax.convert_element_type(leaf, leaf.dtype)

    return jax.tree.map(convert, tree)


@lru_cache(maxsize=8)
def _compiled(
    jax: Any, reset_row: Callable[[Any, Any], RowReset], step_row: Callable[[Any, Any, Any, Any], RowStep], num_envs: int
) -> tuple[Any, Any]:
    """Both functions, vectorised over rows and compiled."""

    def reset_all(tables: Any, key: Any) -> Any:
        key, own = jax.random.split(key)
        return key, *_strongly_typed(jax, jax.vmap(reset_row, (None, 0))(tables, jax.random.split(own, num_envs)))

    def step_all(tables: Any, key: Any, state: Any, action: Any) -> Any:
        key, own = jax.random.split(key)
        keys = jax.random.split(own, num_envs)
        return key, *_strongly_typed(jax, jax.vmap(step_row, (None, 0, 0, 0))(tables, keys, state, action))

    return jax.jit(reset_all), jax.jit(step_all)
