"""gymnax environments, vectorised and compiled by JAX (Lange 2022, https://github.com/RobertTLange/gymnax).

Needs ``pip install 'amago[gymnax]'``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import gin
import gymnasium as gym
import numpy as np

from amago.envs.builtin import _common as common
from amago.envs.builtin._extras import require
from amago.envs.builtin._jax_vector import JaxVectorEnv, RowReset, RowStep


@gin.configurable(module="amago.envs.builtin")
class GymnaxCompatibility(JaxVectorEnv):
    """``num_envs`` copies (rows) of a gymnax environment, for ``AMAGOEnv(..., batched_envs=num_envs)``.

    A row begins its next rollout in the step that ends the last; ``info["final_obs"]`` holds the final observation.

    Observations: ``Discrete`` and uint8 as in gymnax, bool as uint8, everything else as float32 without bounds, because several
    environments leave the bounds that they declare (MemoryChain-bsuite returns -1 in [0, 2]) or return another dtype.
    Actions and rewards: those of the gymnax environment.

    Args:
        env: a gymnax environment, the first element of what ``gymnax.make`` returns.
        num_envs: B, the number of rows.
        params: parameters of the environment; None means its defaults.
        device: "cpu", "gpu" or "tpu"; None leaves the choice to JAX. If PyTorch uses the same GPU, set
            ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` before importing JAX, which otherwise reserves three quarters of the memory.

    Attributes:
        env_name: "gymnax_" and the environment's name.
        horizon: maximum steps per rollout, None if there is no limit.

    Raises:
        ImportError: JAX or gymnax is missing.
        TypeError, ValueError: an argument has the wrong type or is out of range, or a space is not supported.
    """

    def __init__(self, env: Any, num_envs: int, params: Any = None, device: str | None = None) -> None:
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
        act_space = _action_space(self.env_name, env.action_space(self.params))
        super().__init__(num_envs, obs_space, act_space, reset_row, step_row, "gymnax", device)


GymnaxCompatability = GymnaxCompatibility
"""An alternative spelling."""


@lru_cache(maxsize=8)
def _row_functions(env: Any, params: Any) -> tuple[gym.Space[Any], Callable[..., RowReset], Callable[..., RowStep]]:
    """The observation space of a row, and the functions that reset and step it."""
    jax = require("jax", "gymnax")
    returned = jax.eval_shape(lambda key: env.reset(key, params)[0], jax.random.key(0))
    space = _observation_space(f"gymnax_{env.name}", env.observation_space(params), returned)

    def as_declared(obs: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(_leaf_dtype(leaf.dtype, space)), obs)

    def reset_row(_: Any, key: Any) -> RowReset:
        obs, state = env.reset(key, params)
        return state, as_declared(obs)

    def step_row(_: Any, key: Any, state: Any, action: Any) -> RowStep:
        obs, state, reward, terminated, truncated, info = env.step(key, state, action, params)
        last = as_declared(info["final_observation"])
        return state, as_declared(obs), reward.astype(np.float32), terminated, truncated, last, {}

    return space, reset_row, step_row


def _leaf_dtype(dtype: Any, space: gym.Space[Any]) -> Any:
    """The dtype to which a leaf of an observation is converted."""
    if isinstance(space, gym.spaces.Discrete):
        return np.int32
    return np.uint8 if np.dtype(dtype) in (np.dtype(bool), np.dtype(np.uint8)) else np.float32


def _observation_space(name: str, declared: Any, returned: Any) -> gym.Space[Any]:
    """The space of the observations that the environment returns; ``returned`` is a tree of shapes and dtypes."""
    if isinstance(returned, dict):
        return gym.spaces.Dict({str(key): _observation_space(name, None, leaf) for key, leaf in returned.items()})
    if isinstance(returned, (tuple, list)):
        return gym.spaces.Tuple([_observation_space(name, None, leaf) for leaf in returned])
    if not hasattr(returned, "dtype"):
        raise TypeError(f"observations of {name} must be arrays, or dicts or tuples of arrays, got {type(returned).__name__}")
    if hasattr(declared, "n") and returned.shape == ():
        return gym.spaces.Discrete(int(declared.n))
    if np.dtype(returned.dtype) == np.dtype(np.uint8):
        return gym.spaces.Box(0, 255, shape=returned.shape, dtype=np.uint8)
    if np.dtype(returned.dtype) == np.dtype(bool):
        return gym.spaces.Box(0, 1, shape=returned.shape, dtype=np.uint8)
    return gym.spaces.Box(-np.inf, np.inf, shape=returned.shape, dtype=np.float32)


def _action_space(name: str, declared: Any) -> gym.Space[Any]:
    if hasattr(declared, "n"):
        return gym.spaces.Discrete(int(declared.n))
    if hasattr(declared, "low"):
        low, high = (
            np.broadcast_to(np.asarray(side, dtype=np.float32), declared.shape) for side in (declared.low, declared.high)
        )
        return gym.spaces.Box(low, high, shape=tuple(declared.shape), dtype=np.float32)
    raise TypeError(f"the action space of {name} must be Discrete or Box, got {declared!r}")


__all__ = ["GymnaxCompatability", "GymnaxCompatibility"]
