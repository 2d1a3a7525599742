"""Environments in JAX as vectorised Gymnasium environments, with gymnax (Lange 2022, https://github.com/RobertTLange/gymnax)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import gin
import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.builtin._common import require

if TYPE_CHECKING:
    from gymnax.environments.environment import Environment
    from jax import Array as JaxArray

Array = NDArray[Any]
Info = dict[str, Any]

RowReset = tuple[Any, Any]
"""State and first observation of a row's new rollout."""
RowStep = tuple[Any, Any, Any, Any, Any, Any, dict[str, Any]]
"""State, observation, reward, terminated, truncated, final observation and metrics after a step of a row. At the end of a
rollout, the state and the observation are the first of the next rollout, and the final observation is the last of this one."""


class JaxVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
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
        tables: object = (),
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
        self._key: object = None
        self._state: object = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:  # type: ignore[override]
        """Begin a new rollout in every row. All randomness from here on depends on ``seed`` alone."""
        if seed is not None or self._key is None:
            start = np.random.SeedSequence(seed).generate_state(1)[0]
            self._key = self._jax.device_put(self._jax.random.key(start), self._device)
        self._key, self._state, obs = self._reset_all(self._tables, self._key)
        return self._numpy(obs), {}

    def step(self, actions: object) -> tuple[Any, Array, Array, Array, Info]:
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

    def _numpy(self, tree: object) -> Any:
        return self._jax.tree.map(np.asarray, self._jax.device_get(tree))


def use_after(jax: ModuleType, ended: JaxArray, new: object, old: object) -> Any:
    """The tree ``new`` where ``ended`` is true, else ``old``."""
    return jax.tree.map(lambda n, o: jax.numpy.where(ended, n, o), new, old)


def _strongly_typed(jax: ModuleType, tree: object) -> Any:
    """The tree without weakly typed leaves (of Python numbers), for which JAX would compile the step a second time."""

    def convert(leaf: JaxArray) -> Any:
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf if is_key else jax.lax.convert_element_type(leaf, leaf.dtype)

    return jax.tree.map(convert, tree)


@lru_cache(maxsize=8)
def _compiled(
    jax: ModuleType, reset_row: Callable[[Any, Any], RowReset], step_row: Callable[[Any, Any, Any, Any], RowStep], num_envs: int
) -> tuple[Any, Any]:
    """Both functions, vectorised over rows and compiled."""

    def reset_all(tables: object, key: JaxArray) -> Any:
        key, own = jax.random.split(key)
        return key, *_strongly_typed(jax, jax.vmap(reset_row, (None, 0))(tables, jax.random.split(own, num_envs)))

    def step_all(tables: object, key: JaxArray, state: object, action: JaxArray) -> Any:
        key, own = jax.random.split(key)
        keys = jax.random.split(own, num_envs)
        return key, *_strongly_typed(jax, jax.vmap(step_row, (None, 0, 0, 0))(tables, keys, state, action))

    return jax.jit(reset_all), jax.jit(step_all)


@gin.configurable(module="amago.envs.builtin")
class GymnaxCompatibility(JaxVectorEnv):
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
    """

    def __init__(self, env: object, num_envs: int, params: object = None, device: str | None = None) -> None:
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
def _row_functions(env: Environment, params: object) -> tuple[gym.Space[Any], Callable[..., RowReset], Callable[..., RowStep]]:
    """The observation space of a row, and the functions that reset and step it."""
    jax = require("jax", "gymnax")
    returned = jax.eval_shape(lambda key: env.reset(key, params)[0], jax.random.key(0))
    space = _observation_space(f"gymnax_{env.name}", env.observation_space(params), returned)

    def as_declared(obs: object) -> Any:
        def convert(leaf: JaxArray) -> Any:
            small = np.uint8 if leaf.dtype in (bool, np.uint8) else np.float32
            return leaf.astype(np.int32 if isinstance(space, gym.spaces.Discrete) else small)

        return jax.tree.map(convert, obs)

    def reset_row(_: object, key: JaxArray) -> RowReset:
        obs, state = env.reset(key, params)
        return state, as_declared(obs)

    def step_row(_: object, key: JaxArray, state: object, action: JaxArray) -> RowStep:
        obs, state, reward, terminated, truncated, info = env.step(key, state, action, params)
        last = as_declared(info["final_observation"])
        return state, as_declared(obs), reward.astype(np.float32), terminated, truncated, last, {}

    return space, reset_row, step_row


def _observation_space(name: str, declared: object, returned: object) -> gym.Space[Any]:
    """The space of the observations that the environment returns; ``returned`` is a tree of shapes and dtypes."""
    if isinstance(returned, dict):
        return gym.spaces.Dict({str(key): _observation_space(name, None, leaf) for key, leaf in returned.items()})
    if isinstance(returned, (tuple, list)):
        return gym.spaces.Tuple([_observation_space(name, None, leaf) for leaf in returned])
    if not isinstance(returned, require("jax", "gymnax").ShapeDtypeStruct):
        raise TypeError(f"observations of {name} must be arrays, or dicts or tuples of arrays, got {type(returned).__name__}")
    if isinstance(declared, require("gymnax.environments.spaces", "gymnax").Discrete) and returned.shape == ():
        return gym.spaces.Discrete(int(declared.n))
    if returned.dtype in (bool, np.uint8):
        return gym.spaces.Box(0, 1 if returned.dtype == bool else 255, shape=returned.shape, dtype=np.uint8)
    return gym.spaces.Box(-np.inf, np.inf, shape=returned.shape, dtype=np.float32)


def _action_space(name: str, declared: object) -> gym.Space[Any]:
    spaces = require("gymnax.environments.spaces", "gymnax")
    if isinstance(declared, spaces.Discrete):
        return gym.spaces.Discrete(int(declared.n))
    if isinstance(declared, spaces.Box):
        low, high = (np.broadcast_to(np.float32(side), declared.shape) for side in (declared.low, declared.high))
        return gym.spaces.Box(low, high, shape=tuple(declared.shape), dtype=np.float32)
    raise TypeError(f"the action space of {name} must be Discrete or Box, got {declared!r}")
