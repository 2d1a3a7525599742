"""gymnax: many environments in one compiled call (Lange 2022, https://github.com/RobertTLange/gymnax).

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
from amago.envs.builtin._jax_vector import Advanced, JaxVectorEnv, Opened


@gin.configurable(module="amago.envs.builtin")
class GymnaxCompatibility(JaxVectorEnv):
    """``num_envs`` copies of a gymnax environment, for ``AMAGOEnv(..., batched_envs=num_envs)``.

    A row that ends opens its next rollout in the same step; the observation that it led to is in ``info["final_obs"]``.
    Observations are float32 without bounds, whatever gymnax declares: several environments leave their bounds
    (MemoryChain-bsuite shows -1 in [0, 2]), and some return another type than they say. Whole-number ``Discrete``
    observations stay, and so do uint8; bool becomes uint8.

    Args:
        env: from ``gymnax.make``.
        num_envs: B, the rows.
        params: of the environment; None takes its defaults.
        device: where jax computes: "cpu", "gpu", "tpu"; None takes its own choice. On a GPU that PyTorch uses too, set
            ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` before jax is imported, or it takes three quarters of the memory.

    Attributes:
        env_name: "gymnax_" and the environment's name.
        horizon: its time limit.

    Raises:
        ImportError: jax or gymnax is missing.
        TypeError, ValueError: an argument is wrong, or a space is not supported; the message quotes it.
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
            rows = _rows(env, self.params)
        except TypeError:  # parameters that hold arrays cannot be looked up
            rows = _rows.__wrapped__(env, self.params)
        act_space = _acted(self.env_name, env.action_space(self.params))
        super().__init__(num_envs, rows[0], act_space, *rows[1:], "gymnax", device)


GymnaxCompatability = GymnaxCompatibility
"""The spelling of old."""


@lru_cache(maxsize=8)
def _rows(env: Any, params: Any) -> tuple[gym.Space[Any], Callable[..., Opened], Callable[..., Advanced]]:
    """The observation space of one row, what opens it and what advances it."""
    jax = require("jax", "gymnax")
    shown = jax.eval_shape(lambda key: env.reset(key, params)[0], jax.random.key(0))
    space = _observed(f"gymnax_{env.name}", env.observation_space(params), shown)

    def as_declared(obs: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(_kept(leaf.dtype, space)), obs)

    def open_row(_: Any, key: Any) -> Opened:
        obs, state = env.reset(key, params)
        return state, as_declared(obs)

    def advance_row(_: Any, key: Any, state: Any, action: Any) -> Advanced:
        obs, state, reward, terminated, truncated, info = env.step(key, state, action, params)
        last = as_declared(info["final_observation"])
        return state, as_declared(obs), reward.astype(np.float32), terminated, truncated, last, {}

    return space, open_row, advance_row


def _kept(dtype: Any, space: gym.Space[Any]) -> Any:
    """The type in which a leaf of that type is handed on."""
    if isinstance(space, gym.spaces.Discrete):
        return np.int32
    return np.uint8 if np.dtype(dtype) in (np.dtype(bool), np.dtype(np.uint8)) else np.float32


def _observed(name: str, declared: Any, shown: Any) -> gym.Space[Any]:
    """The space of what the environment really returns: ``shown`` is a tree of shapes and types."""
    if isinstance(shown, dict):
        return gym.spaces.Dict({str(key): _observed(name, None, leaf) for key, leaf in shown.items()})
    if isinstance(shown, (tuple, list)):
        return gym.spaces.Tuple([_observed(name, None, leaf) for leaf in shown])
    if not hasattr(shown, "dtype"):
        raise TypeError(f"{name} shows {type(shown).__name__}, but observations must be arrays, or dicts or tuples of them")
    if hasattr(declared, "n") and shown.shape == ():
        return gym.spaces.Discrete(int(declared.n))
    if np.dtype(shown.dtype) == np.dtype(np.uint8):
        return gym.spaces.Box(0, 255, shape=shown.shape, dtype=np.uint8)
    if np.dtype(shown.dtype) == np.dtype(bool):
        return gym.spaces.Box(0, 1, shape=shown.shape, dtype=np.uint8)
    return gym.spaces.Box(-np.inf, np.inf, shape=shown.shape, dtype=np.float32)


def _acted(name: str, declared: Any) -> gym.Space[Any]:
    if hasattr(declared, "n"):
        return gym.spaces.Discrete(int(declared.n))
    if hasattr(declared, "low"):
        low, high = (
            np.broadcast_to(np.asarray(side, dtype=np.float32), declared.shape) for side in (declared.low, declared.high)
        )
        return gym.spaces.Box(low, high, shape=tuple(declared.shape), dtype=np.float32)
    raise TypeError(f"{name} takes actions of {declared!r}, but they must be Discrete or Box")


__all__ = ["GymnaxCompatability", "GymnaxCompatibility"]
