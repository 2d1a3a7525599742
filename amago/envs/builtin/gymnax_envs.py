"""Environments of gymnax (Lange 2022, https://github.com/RobertTLange/gymnax) as vectorised Gymnasium environments."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import gin
import gymnasium as gym
import numpy as np

from amago.envs.builtin import _common as common
from amago.envs.builtin.jax_envs import JaxRows, RowReset, RowStep, action_space_of, as_declared, space_of
from amago.registry import require

if TYPE_CHECKING:
    from gymnax.environments.environment import Environment
    from jax import Array as JaxArray


@gin.configurable(module="amago.envs.builtin")
class GymnaxCompatibility(JaxRows):
    """``num_envs`` copies (rows) of a gymnax environment, for ``AMAGOEnv(..., batched_envs=num_envs)``.

    Observations: ``Discrete`` and uint8 as in gymnax, bool as uint8, everything else as float32 without bounds, because several
    environments leave the bounds that they declare (MemoryChain-bsuite returns -1 in [0, 2]) or return another dtype.
    Actions and rewards: as in the gymnax environment.

    Args:
        env: a gymnax environment, the first element of the result of ``gymnax.make``.
        num_envs: B, the number of rows.
        params: parameters of the environment; None means its defaults.
        device: "cpu", "gpu" or "tpu"; None leaves the choice to JAX. If PyTorch uses the same GPU, set
            ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` before importing JAX, which otherwise reserves three quarters of the memory.
        arrays: "numpy", or "jax": actors stay on JAX's device (`amago.envs.builtin.jax_envs.JaxRows`).
    """

    def __init__(
        self, env: object, num_envs: int, params: object = None, device: str | None = None, arrays: str = "numpy"
    ) -> None:
        require("jax", "gymnax")
        base = require("gymnax.environments.environment", "gymnax").Environment
        if not isinstance(env, base):
            what = " (gymnax.make returns a pair, environment and params)" if isinstance(env, tuple) else ""
            raise TypeError(f"env must be a gymnax environment, got {env!r}{what}")
        common.check_int("num_envs", num_envs, 1)
        self.env, self.params = env, env.default_params if params is None else params
        self.env_name = f"gymnax_{env.name}"
        limit = getattr(self.params, "max_steps_in_episode", None)
        self.horizon = None if limit is None else int(limit)
        try:
            obs_space, reset_row, step_row = _row_functions(env, self.params)
        except TypeError:  # parameters that contain arrays are not hashable
            obs_space, reset_row, step_row = _row_functions.__wrapped__(env, self.params)
        act_space = action_space_of(env.action_space(self.params))
        super().__init__(num_envs, obs_space, act_space, reset_row, step_row, "gymnax", device, arrays=arrays)


GymnaxCompatability = GymnaxCompatibility
"""An alternative spelling."""


@lru_cache(maxsize=8)
def _row_functions(env: Environment, params: object) -> tuple[gym.Space[Any], Callable[..., RowReset], Callable[..., RowStep]]:
    """The observation space of a row, and the functions that reset and step it."""
    jax = require("jax", "gymnax")
    returned = jax.eval_shape(lambda key: env.reset(key, params)[0], jax.random.key(0))
    declared, kind = env.observation_space(params), require("gymnax.environments.spaces", "gymnax").Discrete
    index = isinstance(declared, kind) and getattr(returned, "shape", None) == ()
    space = gym.spaces.Discrete(int(declared.n)) if index else space_of(f"gymnax_{env.name}", returned)

    def reset_row(_: object, key: JaxArray) -> RowReset:
        obs, state = env.reset(key, params)
        return state, as_declared(obs, space)

    def step_row(_: object, key: JaxArray, state: object, action: JaxArray) -> RowStep:
        obs, state, reward, terminated, truncated, info = env.step(key, state, action, params)
        last = as_declared(info["final_observation"], space)
        return state, as_declared(obs, space), reward.astype(np.float32), terminated, truncated, last, {}

    return space, reset_row, step_row
