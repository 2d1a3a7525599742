"""`AMAGOEnv`: the one kind of environment that the rest of the library sees.

Whatever Gymnasium environment it wraps: observations are dicts of arrays, actions are in stored form (`amago.spaces`), and everything
has a leading batch dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.config import NamedArguments
from amago.data.trajectory import Timestep
from amago.envs import introspect
from amago.envs.autoreset import AutoReset, AutoResetter
from amago.spaces import ActionSpec, NonFiniteError, action_spec, all_finite, obs_spec, rl2_space

Array = NDArray[Any]
Step = tuple[Timestep, NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

_TRUE, _FALSE = (
    np.ones((1, 1), dtype=bool),
    np.zeros((1, 1), dtype=bool),
)  # shared, because a cheap environment steps in the time of a few allocations
_TRUE.flags.writeable = _FALSE.flags.writeable = False
_LARGEST = float(np.finfo(np.float32).max)  # rewards are stored in float32


class AMAGOEnv(NamedArguments, gym.Env[Any, Any]):
    """A Gymnasium environment, or one that is vectorised already, with observations and actions as the rest of the library uses them.

    A rollout of an ordinary environment ends with ``terminated`` or ``truncated``; then call `reset`. A vectorised environment begins
    the next rollout by itself: the `Timestep` is then what the policy sees next, with time index, reward and previous action zero
    where a rollout begins, while the returned reward, terminated and truncated are those of the step.

    `reset` and `step` refuse what does not fit the spaces, and NaN and infinity in observations, rewards and actions
    (`amago.spaces.NonFiniteError`). The error names the environment, its row in a batch, the observation's key and the step, counted
    from 1 in each rollout (0: the observation of its reset). In a pool of actors such an error is a fault of the environment: the
    rollout is dropped, the environment is replaced, and the run ends after ``max_env_restarts``.

    Args:
        env: the environment. With ``batched_envs > 1``, or if it is a `gymnasium.vector.VectorEnv`, it takes a batch of actions and
            returns batches. Its ``single_observation_space`` and ``single_action_space`` are used if it has them; otherwise its
            spaces must be those of one row.
        env_name: the name under which results are logged. None: ``env.env_name`` if the environment has it (a vectorised one may
            give a list, one name a row), else its Gymnasium id, else its class.
        batched_envs: B, the number of rows.

    Attributes:
        observation_space: a flat Dict of boxes (`amago.spaces.obs_spec`), of one row.
        raw_observation_space: the environment's own observation space, of one row.
        action_space: of one row.
        action_spec: the stored form of its actions.
        rl2_space: Box of a row's reward and previous action.
        batched_envs: B.
        vectorized: whether the environment takes batches and resets its rows by itself.
        last_action: (B, S) the actions of the latest step, as the environment took them.
        auto: of a vectorised environment, how rollouts ended and began in the latest step (`AutoReset`); else None.

    Raises:
        TypeError: ``env`` is no environment or is an `AMAGOEnv` already, or a space is not supported.
        ValueError: ``batched_envs`` is not positive or differs from ``env.num_envs``, or the action space is unbounded.
    """

    def __init__(self, env: Any, env_name: str | None = None, batched_envs: int = 1):
        _check_env(env, batched_envs)
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
        self.raw_observation_space: gym.Space[Any] = obs_space
        self._convert, self._real_keys = spec.convert, spec.real_keys
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)
        self.spec = getattr(env, "spec", None)
        self._reset_takes = introspect.reset_arguments(env)
        self._resetter = AutoResetter(env, self._convert, obs_space) if self.vectorized else None
        self.auto: AutoReset | None = None
        self._shape = (self.batched_envs, self.action_spec.stored_dim)
        self._rows = np.arange(self.batched_envs)
        self._one_index = self._shape == (1, 1) and self.action_spec.kind == "discrete"
        self._discrete_start = int(act_space.start) if self.action_spec.kind == "discrete" else 0
        self._plain = self.action_spec.kind in ("continuous", "multibinary")  # the stored and the vector form are equal
        self._time = np.zeros((self.batched_envs, 1), dtype=np.int64)
        self.last_action: Array = self.action_spec.zeros(self.batched_envs)

    @property
    def env_name(self) -> str:
        """The environment's name now, which may change at every reset. Override it, or let ``env.env_name`` change.

        Names of rows, where they differ, are sorted and joined with "+".

        Raises:
            TypeError: the name is no str, nor a list of one a row.
        """
        name, rows = self._name(), self._row_names()
        if rows is not None:
            return _joined(rows)
        if not isinstance(name, str):
            raise TypeError(f"env_name is {name!r}, but must be a str" + (" or a list of one a row" if self.vectorized else ""))
        return name

    @property
    def env_names(self) -> list[str]:
        """The name of each of the B rows now: those that the environment gives, unless `env_name` is overridden to differ."""
        name, rows = self.env_name, self._row_names()
        return rows if rows is not None and name == _joined(rows) else [name] * self.batched_envs

    def _name(self) -> Any:
        return self._given_name if self._given_name is not None else introspect.own_name(self.env)

    def _row_names(self) -> list[str] | None:
        """The names of the rows, if there is one for each."""
        name: Any = self._name()
        if isinstance(name, str) or not isinstance(name, Sequence) or len(name) != self.batched_envs:
            return None
        return [str(n) for n in name]

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    @property
    def horizon(self) -> int | None:
        """The most steps of a rollout, if known: ``env.horizon``, else the time limit in its Gymnasium spec."""
        return introspect.horizon(self.env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Timestep, dict[str, Any]]:
        """Begin a new rollout in every row.

        Args:
            seed, options: passed on if the environment's ``reset`` accepts them.

        Returns:
            the first `Timestep`, and the environment's info.

        Raises:
            TypeError, ValueError: what the environment returned does not fit its observation space.
            NonFiniteError: NaN or infinity in an observation.
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
        self._check_obs(obs)
        self.last_action = self.action_spec.zeros(b)
        zeros = np.zeros((b, self.action_spec.dim), dtype=np.float32)
        reward, terminal = np.zeros((b, 1), dtype=np.float32), np.zeros((b, 1), dtype=bool)
        return Timestep(obs, zeros, reward, self._time, terminal, b), info

    def step(self, action: Array) -> Step:  # type: ignore[override]  # arrays: rows side by side
        """Take one step in every row.

        Args:
            action: (B, S) in stored form (`amago.spaces`): an int64 index from 0, float32 in [-1, 1], or int8 bits; for an action
                with several parts, these side by side.

        Returns:
            the next `Timestep`, reward (B, 1) float32, terminated (B, 1), truncated (B, 1), and the environment's info.

        Raises:
            TypeError, ValueError: ``action`` has another type or shape or is out of bounds, or what the environment returned does
                not fit its spaces.
            NonFiniteError: NaN or infinity in the action, the reward or an observation.
        """
        self.check_action(action)
        self.last_action = action
        return self._step_one(action) if self._resetter is None else self._step_batch(action, self._resetter)

    def check_action(self, action: Array) -> None:
        """Raise, as `step` does, TypeError or ValueError for what is not a batch of actions in stored form."""
        try:
            shape = action.shape
        except AttributeError:
            raise TypeError(f"action is {action!r}, but must be an array in stored form, {self._expected()}") from None
        if shape != self._shape:
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
            self._check_five(out)
        raw, r, term, trunc, info = out
        self._time = self._time + 1
        if r.__class__ is not float:
            r = self._one_number(r)  # some environments return arrays of one number
        if not -_LARGEST <= r <= _LARGEST:
            raise self._at(int(self._time[0, 0]), NonFiniteError(f"the reward is {r}; rewards must be finite in float32"))
        reward = np.array([[r]], dtype=np.float32)
        terminated, truncated = _TRUE if term else _FALSE, _TRUE if trunc else _FALSE
        obs = {k: v[None] for k, v in self._converted(raw).items()}
        self._check_obs(obs)
        return Timestep(obs, vector, reward, self._time, terminated), reward, terminated, truncated, info

    def _step_batch(self, action: Array, resetter: AutoResetter) -> Step:
        b, spec = self.batched_envs, self.action_spec
        vector = np.zeros((b, spec.dim), dtype=np.float32)
        if spec.kind == "discrete":
            vector[self._rows, action[:, 0]] = 1.0
        else:
            vector[:] = action if self._plain else spec.to_vector(action)
        out = self.env.step(spec.to_env(action))
        self._check_five(out)
        raw, r, term, trunc, info = out
        reward = self._column("reward", r, np.float32)
        terminated, truncated = self._column("terminated", term, bool), self._column("truncated", trunc, bool)
        self._time = self._time + 1
        obs, auto = resetter.after_step(self._converted(raw), terminated, truncated, info)
        self.auto = auto
        skipped, opened = ~auto.real, auto.opened
        if skipped.any():
            reward[skipped], terminated[skipped], truncated[skipped] = 0.0, False, False
        if not all_finite(reward):
            self._check_rows(reward, "the reward", "rewards")
        if auto.last_obs is not None:  # defined only in rows whose rollout ended
            self._check_obs(auto.last_obs, (terminated | truncated)[:, 0] & auto.last_known)
        shown, terminal = reward, terminated
        if opened.any():
            shown, terminal = reward.copy(), terminated.copy()
            self._time[opened], shown[opened], vector[opened], terminal[opened] = 0, 0.0, 0.0, False
        self._check_obs(obs)
        return Timestep(obs, vector, shown, self._time, terminal, b), reward, terminated, truncated, info

    # ------------------------------------------------------------------ checks of what the environment returns

    def _at(self, step: int, err: Exception, row: int | None = None) -> Exception:
        """The same error, with the names of the environment and of the step before its message."""
        if self.batched_envs > 1 and row is not None:
            return type(err)(f"{self.env_names[row]} (row {row}), step {step}: {err}")
        return type(err)(f"{self.env_name}, step {step}: {err}")

    def _check_five(self, out: Any) -> None:
        if not isinstance(out, (tuple, list)) or len(out) != 5:
            raise self._at(int(self._time[0, 0]) + 1, TypeError(_OLD_STEP.format(_shape_of(out))))

    def _converted(self, raw: Any) -> dict[str, Array]:
        """The environment's observation as a flat dict of arrays."""
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

    def _check_obs(self, obs: dict[str, Array], rows: Array | None = None) -> None:
        """Raise NonFiniteError for observations {key: (B, ...)} that are not finite in some row of ``rows`` (B,); None: all."""
        for key in self._real_keys:
            if not all_finite(obs[key]):
                self._check_rows(obs[key], f"observation {key!r}", "observations", rows)

    def _check_rows(self, array: Array, what: str, kind: str, rows: Array | None = None) -> None:
        """Raise NonFiniteError naming the first row of ``rows`` (B,) in which ``array`` (B, ...) is not finite."""
        bad = ~np.isfinite(array)
        if rows is not None:
            bad[~rows] = False
        if not bad.any():
            return
        row, *at = (int(i) for i in np.argwhere(bad)[0])
        value, place = array[(row, *at)], f" at {at}" if array[0].size > 1 else ""
        text = f"{what} is {value}{place}; {kind} must be finite in float32"
        raise self._at(int(self._time[row, 0]), NonFiniteError(text), row)

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


def _check_env(env: Any, batched_envs: Any) -> None:
    if isinstance(env, (AMAGOEnv, AMAGOWrapper)):
        raise TypeError(f"env is {type(env).__name__}, which is an AMAGOEnv already; wrap the Gymnasium environment once")
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            raise TypeError(f"env is {env!r}, which has no {method}() method; AMAGOEnv wraps a gymnasium.Env")
    if isinstance(batched_envs, bool) or int(batched_envs) != batched_envs or batched_envs < 1:
        raise ValueError(f"batched_envs is {batched_envs!r}, but must be an integer of at least 1")


def _joined(names: list[str]) -> str:
    return "+".join(sorted(set(names)))


def _shape_of(out: Any) -> str:
    return f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__


def _misfit(err: Exception) -> ValueError:
    return ValueError(f"the observation does not have the structure of the observation space: {err!r}")


class AMAGOWrapper(NamedArguments, gym.Wrapper[Any, Any, Any, Any]):
    """Base of wrappers around an `AMAGOEnv`, or around another such wrapper.

    Attributes:
        amago_env: the `AMAGOEnv` inside all wrappers; `action_spec`, `rl2_space`, `batched_envs` and `env_name` are its own.

    Raises:
        TypeError: there is no `AMAGOEnv` inside.
    """

    def __init__(self, env: Any):
        self.amago_env = innermost(env, f"{type(self).__name__} needs an AMAGOEnv, but got")
        super().__init__(env)
        self.action_spec, self.rl2_space = self.amago_env.action_spec, self.amago_env.rl2_space
        self.batched_envs = self.amago_env.batched_envs

    @property
    def env_name(self) -> str:
        return self.amago_env.env_name


def innermost(env: Any, complaint: str) -> AMAGOEnv:
    """The `AMAGOEnv` inside any wrappers.

    Raises:
        TypeError: there is none; the message begins with ``complaint``, such as "EpsilonGreedy needs an AMAGOEnv, but got".
    """
    inner = env
    while not isinstance(inner, AMAGOEnv):
        if not isinstance(inner, gym.Wrapper):
            raise TypeError(f'{complaint} {type(env).__name__}: {env!r}. Wrap it: amago.envs.AMAGOEnv(env, env_name="...")')
        inner = inner.env
    return inner
