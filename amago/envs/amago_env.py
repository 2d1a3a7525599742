"""The one kind of environment that the rest of the library sees: dicts of boxes in, stored actions out, always a batch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.autoreset import AutoReset, AutoResetter
from amago.hindsight import Timestep
from amago.spaces import ActionSpec, action_spec, obs_spec, rl2_space

Array = NDArray[Any]
Step = tuple[Timestep, NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

_TRUE, _FALSE = np.ones((1, 1), dtype=bool), np.zeros((1, 1), dtype=bool)  # made once: a cheap environment steps in 7 us
_TRUE.flags.writeable = _FALSE.flags.writeable = False


class AMAGOEnv(gym.Env[Any, Any]):
    """Wraps a Gymnasium environment (five values a step), or one that is vectorised already.

    Args:
        env: the environment. With ``batched_envs > 1``, or a `gymnasium.vector.VectorEnv`, it takes a batch of actions and
            returns batches; its ``single_observation_space`` and ``single_action_space`` count where it has them, else
            its spaces must describe one environment.
        env_name: the name that results are logged under. None takes ``env.env_name``, where the environment has one
            (a batch may give a list, one a row), else its Gymnasium id, else its class.
        batched_envs: B, the leading dimension of everything below.

    Attributes:
        observation_space: a flat Dict of boxes (`amago.spaces.obs_spec`), without the batch dimension.
        action_space: the action space of one environment; `action_spec` tells its stored form, `rl2_space` that of [r, a].
        batched_envs: B.
        vectorized: a batch that resets itself; see `auto`.
        last_action: (B, S) the actions of the latest step, as the environment took them.
        auto: for vectorised environments, how rollouts ended and began in the latest step (`AutoReset`); else None.

    A rollout of an ordinary environment (B = 1) ends with ``terminated`` or ``truncated``; then call `reset`. A vectorised
    one opens the next rollout by itself: the `Timestep` is then what the policy sees next, with time index, reward and
    previous action zero where a rollout opens, while the returned reward, terminated and truncated are those of the step.

    Raises:
        TypeError: ``env`` is no environment or is wrapped already, or a space is not supported.
        ValueError: ``batched_envs`` is wrong or differs from ``env.num_envs``, or the action space is unbounded.
    """

    def __init__(self, env: Any, env_name: str | None = None, batched_envs: int = 1):
        if isinstance(env, (AMAGOEnv, AMAGOWrapper)):
            raise TypeError(f"env is {type(env).__name__}, which is an AMAGOEnv already; wrap the Gymnasium environment once")
        for method in ("reset", "step"):
            if not callable(getattr(env, method, None)):
                raise TypeError(f"env is {env!r}, which has no {method}() method; AMAGOEnv wraps a gymnasium.Env")
        if isinstance(batched_envs, bool) or int(batched_envs) != batched_envs or batched_envs < 1:
            raise ValueError(f"batched_envs is {batched_envs!r}, but must be an integer of at least 1")
        self.env, self.batched_envs, self._given_name = env, int(batched_envs), env_name
        self.vectorized = self.batched_envs > 1 or isinstance(env, gym.vector.VectorEnv)
        num_envs = getattr(env, "num_envs", None)
        if self.vectorized and num_envs is not None and num_envs != self.batched_envs:
            raise ValueError(f"batched_envs is {self.batched_envs}, but the vectorised environment has num_envs={num_envs}")
        obs_space, act_space = env.observation_space, env.action_space
        if self.vectorized:
            obs_space = getattr(env, "single_observation_space", obs_space)
            act_space = getattr(env, "single_action_space", act_space)
        self.action_spec: ActionSpec = action_spec(act_space)
        self.action_space = act_space
        self.rl2_space = rl2_space(self.action_spec)
        spec = obs_spec(obs_space, batched=self.vectorized)
        self.observation_space: gym.spaces.Dict = spec.space
        self._convert = spec.convert
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        self.spec = getattr(env, "spec", None)
        self._reset_takes = _reset_arguments(env)
        self._resetter = AutoResetter(env, self._convert, obs_space) if self.vectorized else None
        self.auto: AutoReset | None = None
        self._shape = (self.batched_envs, self.action_spec.stored_dim)
        self._rows = np.arange(self.batched_envs)
        self._discrete_start = int(act_space.start) if self.action_spec.kind == "discrete" else 0
        self._time = np.zeros((self.batched_envs, 1), dtype=np.int64)
        self.last_action: Array = self.action_spec.zeros(self.batched_envs)

    @property
    def env_name(self) -> str:
        """The name of the environment now. May change at every reset; override it, or let ``env.env_name`` change."""
        names = self.env_names
        return names[0] if len(set(names)) == 1 else "+".join(sorted(set(names)))

    @property
    def env_names(self) -> list[str]:
        """The name of each of the B environments now."""
        if type(self).env_name is not AMAGOEnv.env_name:  # a subclass overrides the property
            return [self.env_name] * self.batched_envs
        name: Any = self._given_name if self._given_name is not None else _own_name(self.env)
        if isinstance(name, str):
            return [name] * self.batched_envs
        if isinstance(name, Sequence) and len(name) == self.batched_envs:
            return [str(n) for n in name]
        raise TypeError(f"env_name is {name!r}, but must be a str" + (" or a list of one a row" if self.vectorized else ""))

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    @property
    def horizon(self) -> int | None:
        """The longest a rollout can be, where the environment says so (``env.horizon``, or the time limit of its spec)."""
        found = _attribute(self.env, "horizon")
        if found is None and self.spec is not None:
            found = getattr(self.spec, "max_episode_steps", None)
        return None if found is None or callable(found) else int(found)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Timestep, dict[str, Any]]:
        """Open a new rollout in every row.

        ``seed`` and ``options`` reach environments whose ``reset`` takes them.
        """
        given = {k: v for k, v in (("seed", seed), ("options", options)) if v is not None and k in self._reset_takes}
        raw, info = self.env.reset(**given)
        obs = self._convert(raw)
        if self._resetter is None:
            obs = {k: v[None] for k, v in obs.items()}
        else:
            self._resetter.begin()
            self.auto = None
        b = self.batched_envs
        self._time = np.zeros((b, 1), dtype=np.int64)
        self.last_action = self.action_spec.zeros(b)
        zeros = np.zeros((b, self.action_spec.dim), dtype=np.float32)
        reward, terminal = np.zeros((b, 1), dtype=np.float32), np.zeros((b, 1), dtype=bool)
        return Timestep(obs, zeros, reward, self._time, terminal, b), info

    def step(self, action: Array) -> Step:  # type: ignore[override]  # arrays: rows side by side
        """Take one step in every row.

        Args:
            action: (B, S), the *stored* form (`amago.spaces`): int64 index from 0 (B, 1), float32 in [-1, 1] or int8 bits.

        Returns:
            the next `Timestep`, reward (B, 1) float32, terminated (B, 1), truncated (B, 1), and the environment's info.

        Raises:
            TypeError, ValueError: ``action`` is no array of that shape.
        """
        try:
            right = action.shape == self._shape
        except AttributeError:
            raise TypeError(f"action is {action!r}, but must be an array in stored form, {self._expected()}") from None
        if not right:
            raise ValueError(f"action has shape {action.shape}, but must have the stored form, {self._expected()}")
        self.last_action = action
        return self._step_one(action) if self._resetter is None else self._step_batch(action, self._resetter)

    def _expected(self) -> str:
        spec = self.action_spec
        return f"(B, S) = {self._shape} of {spec.stored_dtype}; ActionSpec.from_env turns an action of {spec.space} into it"

    def _step_one(self, action: Array) -> Step:
        vector = np.zeros((1, self.action_spec.dim), dtype=np.float32)
        if self.action_spec.kind == "discrete":
            index = int(action[0, 0])
            vector[0, index] = 1.0
            raw, r, term, trunc, info = self.env.step(index + self._discrete_start)
        else:
            vector[0] = action[0]
            raw, r, term, trunc, info = self.env.step(self.action_spec.to_env(action[0]))
        self._time = self._time + 1
        if r.__class__ is not float:
            r = float(np.asarray(r).reshape(()))  # some environments return arrays of one number
        reward = np.array([[r]], dtype=np.float32)
        terminated, truncated = _TRUE if term else _FALSE, _TRUE if trunc else _FALSE
        obs = {k: v[None] for k, v in self._convert(raw).items()}
        return Timestep(obs, vector, reward, self._time, terminated), reward, terminated, truncated, info

    def _step_batch(self, action: Array, resetter: AutoResetter) -> Step:
        b, spec = self.batched_envs, self.action_spec
        vector = np.zeros((b, spec.dim), dtype=np.float32)
        if spec.kind == "discrete":
            vector[self._rows, action[:, 0]] = 1.0
        else:
            vector[:] = action
        raw, r, term, trunc, info = self.env.step(spec.to_env(action))
        reward = np.array(r, dtype=np.float32).reshape(b, 1)
        terminated, truncated = np.array(term, dtype=bool).reshape(b, 1), np.array(trunc, dtype=bool).reshape(b, 1)
        obs, auto = resetter.after_step(self._convert(raw), terminated, truncated, info)
        self.auto = auto
        skipped, opened = ~auto.real, auto.opened
        if skipped.any():
            reward[skipped], terminated[skipped], truncated[skipped] = 0.0, False, False
        self._time = self._time + 1
        shown, terminal = reward, terminated
        if opened.any():
            shown, terminal = reward.copy(), terminated.copy()
            self._time[opened], shown[opened], vector[opened], terminal[opened] = 0, 0.0, 0.0, False
        return Timestep(obs, vector, shown, self._time, terminal, b), reward, terminated, truncated, info

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def __repr__(self) -> str:
        return f"AMAGOEnv({self.env!r}, batched_envs={self.batched_envs})"


class AMAGOWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper around an `AMAGOEnv` (or around another such wrapper) that hands on what an `AMAGOEnv` has."""

    def __init__(self, env: Any):
        self.amago_env = innermost(env, type(self).__name__)
        super().__init__(env)
        self.action_spec, self.rl2_space = self.amago_env.action_spec, self.amago_env.rl2_space
        self.batched_envs = self.amago_env.batched_envs

    @property
    def env_name(self) -> str:
        return self.amago_env.env_name


def innermost(env: Any, wanted_by: str) -> AMAGOEnv:
    """The `AMAGOEnv` inside any wrappers.

    Raises:
        TypeError: there is none.
    """
    inner = env
    while not isinstance(inner, AMAGOEnv):
        if not isinstance(inner, gym.Wrapper):
            raise TypeError(
                f"{wanted_by} needs an AMAGOEnv, but got {type(env).__name__}: {env!r}. "
                'Wrap it: amago.envs.AMAGOEnv(env, env_name="...")'
            )
        inner = inner.env
    return inner


def _attribute(env: Any, name: str) -> Any:
    """An attribute of the environment or of the nearest one it wraps."""
    while env is not None:
        value = getattr(env, name, None)
        if value is not None:
            return value
        env = env.env if isinstance(env, (gym.Wrapper, gym.vector.VectorWrapper)) else None
    return None


def _own_name(env: Any) -> Any:
    name = _attribute(env, "env_name")
    if name is not None:
        return name
    spec = getattr(env, "spec", None)
    return spec.id if spec is not None else type(getattr(env, "unwrapped", env)).__name__


def _reset_arguments(env: Any) -> frozenset[str]:
    """Those of seed and options that ``env.reset`` takes: many environments for meta-learning take neither."""
    try:
        parameters = inspect.signature(env.reset).parameters
    except (TypeError, ValueError):
        return frozenset({"seed", "options"})
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return frozenset({"seed", "options"})
    return frozenset({"seed", "options"} & parameters.keys())
