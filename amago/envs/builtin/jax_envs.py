"""Environments in JAX as vectorised Gymnasium environments: gymnax, XLand-MiniGrid, NAVIX, Craftax, Brax and MuJoCo Playground."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.registry import require

if TYPE_CHECKING:
    from jax import Array as JaxArray

Array = NDArray[Any]
Info = dict[str, Any]

RowReset = tuple[Any, Any]
"""State and first observation of a row's new rollout."""
RowStep = tuple[Any, Any, Any, Any, Any, Any, dict[str, Any]]
"""State, observation, reward, terminated, truncated, final observation and metrics after a step of a row. At the end of a
rollout, the state and the observation are the first of the next rollout, and the final observation is the last of this one."""


class JaxRows(gym.vector.VectorEnv[Any, Any, Any]):
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
        arrays: "numpy", or "jax": `reset` and `step` take and return arrays on JAX's device, where a pool of actors then stays.
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
        arrays: str = "numpy",
    ) -> None:
        self.metadata = {**type(self).metadata, "arrays": common.check_choice("arrays", arrays, ("numpy", "jax"))}
        self.num_envs = common.check_int("num_envs", num_envs, 1)
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)
        self._jax = jax = require("jax", extra)
        try:
            self.device = jax.devices(device)[0]
            self._device = None if device is None else self.device
        except RuntimeError as err:
            raise ValueError(f"device={device!r} is not available in jax: {err}") from err

        self.reset_row, self.step_row = reset_row, step_row
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
        on_device = self.metadata["arrays"] == "jax"
        actions = self._jax.numpy.asarray(actions) if on_device else np.asarray(actions)
        if actions.shape != self.action_space.shape:
            raise ValueError(f"actions must have shape {self.action_space.shape}, one row per environment, got {actions.shape}")
        out = self._step_all(self._tables, self._key, self._state, actions)
        self._key, self._state, obs, reward, terminated, truncated, last_obs, logged = out
        if on_device:  # where asking whether a rollout has ended would wait
            ended = terminated | truncated
            both = {"final_obs": last_obs, "_final_obs": ended, "final_info": logged, "_final_info": ended}
            return obs, reward, terminated, truncated, both
        obs, reward, terminated, truncated = self._numpy((obs, reward, terminated, truncated))
        info: Info = {}
        if (terminated | truncated).any():  # copying them from the device every step would be wasted
            info["final_obs"], info["final_info"] = self._numpy((last_obs, logged))
            info["_final_obs"] = info["_final_info"] = terminated | truncated
        return obs, reward, terminated, truncated, info

    def _numpy(self, tree: object) -> Any:
        on_device = self.metadata["arrays"] == "jax"
        return tree if on_device else self._jax.tree.map(np.asarray, self._jax.device_get(tree))


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


Reset = Callable[[Any], tuple[Any, Any]]
"""From a key to observation and state."""
StepOfRow = Callable[[Any, Any, Any], tuple[Any, Any, Any, Any, Any]]
"""From key, state and action to observation, state, reward, terminated, truncated, without a reset at the end."""


class JaxVectorEnv(JaxRows):
    """``num_envs`` copies (rows) of an environment of gymnax, XLand-MiniGrid, NAVIX, Craftax, Brax or MuJoCo Playground, for
    ``AMAGOEnv(..., batched_envs=num_envs)``.

    bool and uint8 observations are uint8, all others float32 without bounds. Environments that reset themselves are given in the form
    without (``auto_reset=False`` in Craftax and Brax), because the last observation of a rollout is lost otherwise.

    Args:
        env: what the package's ``make`` returns, without parameters.
        num_envs: B.
        params: parameters of the environment, where the package has them; None: its defaults.
        time_limit: steps after which a rollout is truncated; None: only by the environment itself.
        device, arrays: as of `JaxRows`.

    Raises:
        TypeError: ``env`` is of another package.
        ValueError: it resets itself.
    """

    keeps_indices = False
    """Whether an observation in a Discrete space stays an index."""

    def __init__(
        self,
        env: Any,
        num_envs: int,
        params: object = None,
        time_limit: int | None = None,
        device: str | None = None,
        arrays: str = "jax",
    ) -> None:
        self.env, suite = env, suite_of(env)
        params = env.default_params if params is None and suite in ("gymnax", "craftax", "xminigrid") else params
        params = params() if callable(params) else params  # a method in XLand-MiniGrid
        self.env_name, self.horizon = f"{suite}_{getattr(env, 'name', type(env).__name__)}", time_limit
        given = env, params, suite, time_limit, self.keeps_indices
        try:
            made = _row_functions(*given)
        except TypeError:  # parameters that contain arrays are not hashable
            made = _row_functions.__wrapped__(*given)
        super().__init__(num_envs, *made, "jax", device, (), arrays)


@lru_cache(maxsize=8)
def _row_functions(
    env: Any, params: Any, suite: str, time_limit: int | None, keeps_indices: bool
) -> tuple[gym.Space[Any], gym.Space[Any], Callable[..., RowReset], Callable[..., RowStep]]:
    """The observation and action space of a row, and the functions that reset and step it."""
    reset, step, action_space = _functions(env, params, suite)
    jax = require("jax", "jax")
    returned = jax.eval_shape(reset, jax.random.key(0))[0]
    declared: Any = env.observation_space(params) if keeps_indices else None
    index = type(declared).__name__ == "Discrete" and getattr(returned, "shape", None) == ()
    space = gym.spaces.Discrete(int(declared.n)) if index else space_of(suite, returned)

    def reset_row(_: object, key: JaxArray) -> RowReset:
        obs, state = reset(key)
        return (state, jax.numpy.int32(0)), as_declared(obs, space)

    def step_row(_: object, key: JaxArray, state: Any, action: JaxArray) -> RowStep:
        step_key, reset_key = jax.random.split(key)
        obs, inner, reward, terminated, truncated = step(step_key, state[0], action)
        count = state[1] + 1
        if time_limit is not None:
            truncated = (truncated | (count >= time_limit)) & ~terminated
        new, first = reset_row(None, reset_key)
        last = as_declared(obs, space)
        state, obs = use_after(jax, terminated | truncated, (new, first), ((inner, count), last))
        return state, obs, jax.numpy.asarray(reward, np.float32), terminated, truncated, last, {}

    return space, action_space, reset_row, step_row


SUITES = ("gymnax", "xminigrid", "navix", "craftax", "brax", "mujoco_playground")


def suite_of(env: object) -> str:
    """The package in `SUITES` that an environment is of; TypeError for another, ValueError for one that resets itself."""
    found = [name for c in type(env).__mro__ for name in SUITES if c.__module__.partition(".")[0] == name]
    if not found:
        hint = " (without the params beside it)" if isinstance(env, tuple) else ""
        raise TypeError(f"env is {env!r}, but must be an environment of {', '.join(SUITES)}{hint}")
    wrapped, names = env, []
    while wrapped is not None:
        names.append(type(wrapped).__name__)
        wrapped = vars(wrapped).get("env")
    if "AutoResetWrapper" in names:
        raise ValueError(
            f"env resets itself ({' in '.join(names[::-1])}), and loses last observations: make it with auto_reset=False"
        )
    return found[0]


def _functions(env: Any, params: Any, suite: str) -> tuple[Reset, StepOfRow, gym.Space[Any]]:
    """The functions that reset and step a row, and the action space."""
    if suite in ("gymnax", "craftax"):

        def step(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
            obs, state, reward, over, _ = env.step_env(key, state, action, params)
            return obs, state, reward, over, env.is_truncated(state, params) if suite == "gymnax" else over & False

        return (lambda key: env.reset(key, params)), step, action_space_of(env.action_space(params))
    if suite in ("xminigrid", "navix"):
        reset = (lambda key: env.reset(params, key)) if suite == "xminigrid" else env.reset

        def step(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
            if suite == "navix":  # whose `step` resets in the step after the last
                new = env._step(state, action)
                terminated, truncated = new.step_type == 2, new.step_type == 1
            else:
                new = env.step(params, state, action)
                terminated = new.last() & (new.discount == 0)
                truncated = new.last() & ~terminated
            return new.observation, new, new.reward, terminated, truncated

        n = int(env.action_space.maximum) + 1 if suite == "navix" else int(env.num_actions(params))
        return (lambda key: ((new := reset(key)).observation, new)), step, gym.spaces.Discrete(n)

    def step_physics(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        new = env.step(state, action)
        done, cut = new.done.astype(bool), new.info.get("truncation", new.done * 0).astype(bool)
        return new.obs, new, new.reward, done & ~cut, done & cut

    return (
        (lambda key: ((new := env.reset(key)).obs, new)),
        step_physics,
        gym.spaces.Box(-1.0, 1.0, (env.action_size,), np.float32),
    )


def space_of(name: str, returned: object) -> gym.Space[Any]:
    """The space of the observations that an environment returns; ``returned`` is a tree of shapes and dtypes."""
    if isinstance(returned, dict):
        return gym.spaces.Dict({str(key): space_of(name, leaf) for key, leaf in returned.items()})
    if isinstance(returned, (tuple, list)):
        return gym.spaces.Tuple([space_of(name, leaf) for leaf in returned])
    if not isinstance(returned, require("jax", "jax").ShapeDtypeStruct):
        raise TypeError(f"observations of {name} must be arrays, or dicts or tuples of arrays, got {type(returned).__name__}")
    if returned.dtype in (bool, np.uint8):
        return gym.spaces.Box(0, 1 if returned.dtype == bool else 255, shape=returned.shape, dtype=np.uint8)
    return gym.spaces.Box(-np.inf, np.inf, shape=returned.shape, dtype=np.float32)


def as_declared(obs: object, space: gym.Space[Any]) -> Any:
    """An observation in the dtypes of its space (`space_of`, or a Discrete)."""

    def convert(leaf: JaxArray) -> Any:
        small = np.uint8 if leaf.dtype in (bool, np.uint8) else np.float32
        return leaf.astype(np.int32 if isinstance(space, gym.spaces.Discrete) else small)

    return require("jax", "jax").tree.map(convert, obs)


def action_space_of(declared: Any) -> gym.Space[Any]:
    """Gymnasium's form of an action space of gymnax or Craftax; TypeError unless it is a Discrete or a Box."""
    kind = type(declared).__name__
    if kind == "Discrete":
        return gym.spaces.Discrete(int(declared.n))
    if kind == "Box":
        low, high = (np.broadcast_to(np.float32(side), declared.shape) for side in (declared.low, declared.high))
        return gym.spaces.Box(low, high, shape=tuple(declared.shape), dtype=np.float32)
    raise TypeError(f"the action space must be Discrete or Box, got {declared!r}")
