"""The one kind of environment that the rest of the library sees: dicts of boxes in, stored actions out, always a batch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.trajectory import Timestep
from amago.envs.autoreset import AutoReset, AutoResetter
from amago.spaces import ActionSpec, NonFiniteError, action_spec, all_finite, obs_spec, rl2_space

Array = NDArray[Any]
Step = tuple[Timestep, NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

_TRUE, _FALSE = np.ones((1, 1), dtype=bool), np.zeros((1, 1), dtype=bool)  # made once: a cheap environment steps in 7 us
_TRUE.flags.writeable = _FALSE.flags.writeable = False
_LARGEST = float(np.finfo(np.float32).max)  # rewards and observations are kept in float32


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

    What does not fit the spaces is refused by `reset` and `step`, and so are NaN and infinity in observations, rewards and
    actions (`amago.spaces.NonFiniteError`): the error names the environment, its row in a batch, the observation's key and
    the step, counted from 1 in each rollout (0: the observation of its reset). A pool takes such an error for a fault of
    the environment: the rollout is dropped, the environment replaced, and the run ends after ``max_env_restarts``.

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
        self._convert, self._real_keys = spec.convert, spec.real_keys
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        self.spec = getattr(env, "spec", None)
        self._reset_takes = _reset_arguments(env)
        self._resetter = AutoResetter(env, self._convert, obs_space) if self.vectorized else None
        self.auto: AutoReset | None = None
        self._shape = (self.batched_envs, self.action_spec.stored_dim)
        self._rows = np.arange(self.batched_envs)
        self._one_index = self._shape == (1, 1) and self.action_spec.kind == "discrete"
        self._discrete_start = int(act_space.start) if self.action_spec.kind == "discrete" else 0
        self._plain = self.action_spec.kind in ("continuous", "multibinary")  # stored and vector form are the same numbers
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
        b = self.batched_envs
        self._time = np.zeros((b, 1), dtype=np.int64)
        out = self.env.reset(**given)
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise self._at(0, TypeError(_OLD_RESET.format(_shape_of(out))))
        raw, info = out
        obs = self._converted(raw)
        if self._resetter is None:
            obs = {k: v[None] for k, v in obs.items()}
        else:
            self._resetter.begin()
            self.auto = None
        self._check_finite(obs, self._time)
        self.last_action = self.action_spec.zeros(b)
        zeros = np.zeros((b, self.action_spec.dim), dtype=np.float32)
        reward, terminal = np.zeros((b, 1), dtype=np.float32), np.zeros((b, 1), dtype=bool)
        return Timestep(obs, zeros, reward, self._time, terminal, b), info

    def step(self, action: Array) -> Step:  # type: ignore[override]  # arrays: rows side by side
        """Take one step in every row.

        Args:
            action: (B, S), the *stored* form (`amago.spaces`): int64 index from 0 (B, 1), float32 in [-1, 1] or int8 bits; or
                several of these side by side.

        Returns:
            the next `Timestep`, reward (B, 1) float32, terminated (B, 1), truncated (B, 1), and the environment's info.

        Raises:
            TypeError, ValueError: ``action`` is no array of that shape, or its values are out of bounds; or what the
                environment returned does not fit its spaces.
            NonFiniteError: NaN or infinity in the action, the reward or an observation.
        """
        self.check_action(action)
        self.last_action = action
        return self._step_one(action) if self._resetter is None else self._step_batch(action, self._resetter)

    def check_action(self, action: Array) -> None:
        """Refuse, as `step` does, what is no batch of stored actions."""
        try:
            right = action.shape == self._shape
        except AttributeError:
            raise TypeError(f"action is {action!r}, but must be an array in stored form, {self._expected()}") from None
        if not right:
            raise ValueError(f"action has shape {action.shape}, but must have the stored form, {self._expected()}")
        if self._one_index and action.dtype.kind == "i" and 0 <= action.item() < self.action_spec.dim:
            return  # the common case: an index for one environment
        try:
            self.action_spec.check(action)
        except ValueError:
            for row, stored in enumerate(action):
                try:
                    self.action_spec.check(stored)
                except ValueError as err:
                    raise self._at(int(self._time[row, 0]) + 1, err, row) from None

    def _expected(self) -> str:
        spec = self.action_spec
        return f"(B, S) = {self._shape} of {spec.stored_dtype}; ActionSpec.from_env turns an action of {spec.space} into it"

    def _step_one(self, action: Array) -> Step:
        vector = np.zeros((1, self.action_spec.dim), dtype=np.float32)
        if self.action_spec.kind == "discrete":
            index = int(action[0, 0])
            vector[0, index] = 1.0
            out = self.env.step(index + self._discrete_start)
        else:
            vector[0] = action[0] if self._plain else self.action_spec.to_vector(action[0])
            out = self.env.step(self.action_spec.to_env(action[0]))
        if out.__class__ is not tuple or len(out) != 5:
            self._five(out)
        raw, r, term, trunc, info = out
        self._time = self._time + 1
        if r.__class__ is not float:
            r = self._one_number(r)  # some environments return arrays of one number
        if not -_LARGEST <= r <= _LARGEST:
            raise self._at(int(self._time[0, 0]), NonFiniteError(f"the reward is {r}; rewards must be finite in float32"))
        reward = np.array([[r]], dtype=np.float32)
        terminated, truncated = _TRUE if term else _FALSE, _TRUE if trunc else _FALSE
        obs = {k: v[None] for k, v in self._converted(raw).items()}
        self._check_finite(obs, self._time)
        return Timestep(obs, vector, reward, self._time, terminated), reward, terminated, truncated, info

    def _step_batch(self, action: Array, resetter: AutoResetter) -> Step:
        b, spec = self.batched_envs, self.action_spec
        vector = np.zeros((b, spec.dim), dtype=np.float32)
        if spec.kind == "discrete":
            vector[self._rows, action[:, 0]] = 1.0
        else:
            vector[:] = action if self._plain else spec.to_vector(action)
        raw, r, term, trunc, info = self._five(self.env.step(spec.to_env(action)))
        reward = self._column("reward", r, np.float32)
        terminated, truncated = self._column("terminated", term, bool), self._column("truncated", trunc, bool)
        self._time = self._time + 1
        obs, auto = resetter.after_step(self._converted(raw), terminated, truncated, info)
        self.auto = auto
        skipped, opened = ~auto.real, auto.opened
        if skipped.any():
            reward[skipped], terminated[skipped], truncated[skipped] = 0.0, False, False
        if not all_finite(reward):
            self._check_finite({"": reward}, self._time)
        if auto.last_obs is not None:  # what other rows have there means nothing
            self._check_finite(auto.last_obs, self._time, (terminated | truncated)[:, 0] & auto.last_known)
        shown, terminal = reward, terminated
        if opened.any():
            shown, terminal = reward.copy(), terminated.copy()
            self._time[opened], shown[opened], vector[opened], terminal[opened] = 0, 0.0, 0.0, False
        self._check_finite(obs, self._time)
        return Timestep(obs, vector, shown, self._time, terminal, b), reward, terminated, truncated, info

    # ------------------------------------------------------------------ what is refused

    def _at(self, step: int, err: Exception, row: int | None = None) -> Exception:
        """The same error, with the environment and its step in front."""
        if self.batched_envs > 1 and row is not None:
            return type(err)(f"{self.env_names[row]} (row {row}), step {step}: {err}")
        return type(err)(f"{self.env_name}, step {step}: {err}")

    def _five(self, out: Any) -> Any:
        if not isinstance(out, (tuple, list)) or len(out) != 5:
            raise self._at(int(self._time[0, 0]) + 1, TypeError(_OLD_STEP.format(_shape_of(out))))
        return out

    def _converted(self, raw: Any) -> dict[str, Array]:
        try:
            obs = self._convert(raw)
        except (ValueError, TypeError, KeyError, IndexError) as err:
            raise self._at(int(self._time[0, 0]), err if isinstance(err, ValueError) else _misfit(err)) from err
        if self._resetter is not None:
            for key, value in obs.items():
                if len(value) != self.batched_envs:
                    text = f"observation {key!r} has {len(value)} rows, but batched_envs is {self.batched_envs}"
                    raise self._at(int(self._time[0, 0]), ValueError(text))
        return obs

    def _one_number(self, r: Any) -> float:
        try:
            return float(np.asarray(r).reshape(()))
        except (TypeError, ValueError):
            raise self._at(int(self._time[0, 0]), TypeError(f"the reward is {r!r}, but must be one number")) from None

    def _column(self, name: str, value: Any, dtype: Any) -> Array:
        try:
            return np.array(value, dtype=dtype).reshape(self.batched_envs, 1)
        except (TypeError, ValueError):
            text = f"{name} is {value!r}, but must hold one value for each of {self.batched_envs} rows"
            raise self._at(int(self._time[0, 0]) + 1, ValueError(text)) from None

    def _check_finite(self, arrays: dict[str, Array], times: Array, rows: Array | None = None) -> None:
        """Refuse (B, ...) arrays, observations by key or the reward under "", that are not finite in some row (of ``rows``)."""
        for key in self._real_keys if "" not in arrays else ("",):
            a = arrays[key]
            if all_finite(a):
                continue
            bad = ~np.isfinite(a)
            if rows is not None:
                bad[~rows] = False
                if not bad.any():
                    continue
            row, *at = (int(i) for i in np.argwhere(bad)[0])
            value, place = a[(row, *at)], f" at {at}" if a[0].size > 1 else ""
            what = f"observation {key!r} is {value}{place}; observations" if key else f"the reward is {value}; rewards"
            raise self._at(int(times[row, 0]), NonFiniteError(f"{what} must be finite in float32"), row)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def __repr__(self) -> str:
        return f"AMAGOEnv({self.env!r}, batched_envs={self.batched_envs})"


_OLD_RESET = "reset() returned {}, but must return (observation, info): does the environment follow Gymnasium's interface?"
_OLD_STEP = (
    "step() returned {}, but must return (observation, reward, terminated, truncated, info): does the environment follow "
    "Gymnasium's interface?"
)


def _shape_of(out: Any) -> str:
    return f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__


def _misfit(err: Exception) -> ValueError:
    return ValueError(f"the observation does not have the structure of the observation space: {err!r}")


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
