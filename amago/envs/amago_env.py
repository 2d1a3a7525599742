"""`AMAGOEnv`: the one kind of environment that the rest of the library uses.

Whatever Gymnasium environment it wraps: observations are dicts of arrays, actions are in stored form (`amago.spaces`), and
everything has a leading batch dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import DTypeLike, NDArray

from amago.compat.names import attributes
from amago.envs import inner_env
from amago.envs.inner_env import (
    ActionForm,
    AutoReset,
    AutoResetter,
    Observations,
    PolicyActions,
    assignable,
    forwarded,
    policy_dtype,
    policy_space,
)
from amago.hindsight import Timestep
from amago.spaces import ActionSpec, NonFiniteError, action_spec, all_finite, rl2_space

Array = NDArray[Any]
Step = tuple[Timestep, NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

# shared: a cheap environment steps in the time of few allocations
_TRUE, _FALSE = np.ones(1, dtype=bool), np.zeros(1, dtype=bool)
_TRUE.flags.writeable = _FALSE.flags.writeable = False
_FIVE = "step() returned {}, but must return (observation, reward, terminated, truncated, info)"
_LARGEST = float(np.finfo(np.float32).max)  # rewards are stored in float32


class AMAGOEnv(gym.Wrapper[Any, Any, Any, Any]):
    """A Gymnasium environment, or one that is vectorised already, with observations and actions as the rest of the library uses
    them.

    A rollout of an ordinary environment ends with ``terminated`` or ``truncated``; then call `reset`. A vectorised environment
    begins the next rollout by itself: the `Timestep` is then what the policy sees next, with time index, reward and previous
    action zero where a rollout begins, while the returned reward, terminated and truncated belong to the step.

    A subclass may override `inner_reset`, `inner_step`, `make_action_rep`, `env_name`, `reset` and `step`. After
    ``super().__init__`` it may add keys to ``self.observation_space`` that its `inner_reset` and `inner_step` put into the
    observations.

    What does not fit the spaces, NaN and infinity are refused. The error names the environment, its row in a batch, the
    observation's key and the step, counted from 1 in each rollout (0: its reset). In a pool of actors it is a fault of the
    environment, which is replaced, and the run ends after ``max_env_restarts``.

    Args:
        env: the environment. With ``batched_envs > 1``, or if it is a `gymnasium.vector.VectorEnv`, it takes and returns batches.
            Its ``single_observation_space`` and ``single_action_space`` are used if it has them; otherwise its spaces are of one
            row.
        env_name: the name under which results are logged. None: ``env.env_name`` if the environment has it (a vectorised one
            may give a list, one name a row), else its Gymnasium id, else its class. "/" becomes "_".
        batched_envs: B, the number of rows.

    Attributes:
        env: a wrapper around the environment whose ``step`` takes the policy's actions; `unwrapped` is the environment itself.
        observation_space: a flat Dict of boxes (`amago.spaces.obs_spec`), of one row.
        raw_observation_space: the environment's own observation space, of one row.
        action_space: of the policy's actions, of one row: Discrete from 0, MultiBinary, or Box in [-1, 1]; of several parts, the
            environment's own. ``action_spec.space`` is the environment's in any case.
        action_spec: the stored form of its actions.
        action_size, action_dtype: A, the width of an action's vector; uint8 for an index (int64 of more than 256 actions), else
            float32.
        discrete, multibinary: whether the action space is Discrete, or MultiBinary.
        rl2_space: Box of a row's reward and previous action.
        vectorized: whether the environment takes batches and resets its rows by itself.
        stored_action: (B, S), the actions of the latest step, as they are recorded.
        step_count: (B,) int64, steps taken in each row's rollout; zero where it has ended.
        auto: of a vectorised environment, how rollouts ended and began in the latest step (`AutoReset`); else None.

    Raises:
        TypeError: ``env`` is no environment or is an `AMAGOEnv` already, or a space is not supported.
        ValueError: ``batched_envs`` is not positive or differs from ``env.num_envs``, or the action space is unbounded.
    """

    env: Any  # PolicyActions
    __getattr__ = forwarded

    def __init__(self, env: Any, env_name: object = None, batched_envs: int = 1):
        _check_env(env, batched_envs)
        if isinstance(env, PolicyActions):  # the `env` of another AMAGOEnv
            env = env.env
        self.batched_envs, self._env_name = int(batched_envs), env_name
        self.vectorized = self.batched_envs > 1 or isinstance(env, gym.vector.VectorEnv)
        obs_space, act_space = env.observation_space, env.action_space
        if self.vectorized:
            obs_space, act_space = inner_env.spaces_of_rows(env, self.batched_envs)
        self.action_spec: ActionSpec = action_spec(act_space)
        super().__init__(PolicyActions(env, self.action_spec, self.vectorized))
        spec = self.action_spec
        self.action_space, self.action_dtype, self.action_size = policy_space(spec), policy_dtype(spec), spec.dim
        self.discrete, self.multibinary, self.rl2_space = spec.kind == "discrete", spec.kind == "multibinary", rl2_space(spec)
        self._form = ActionForm(spec, self.batched_envs, self.vectorized)
        self.raw_observation_space: gym.Space[Any] = obs_space
        self._observations = Observations(obs_space, self.vectorized)
        self._resetter = AutoResetter(self, self._observations, obs_space) if self.vectorized else None
        self.auto: AutoReset | None = None
        self.step_count = np.zeros(self.batched_envs, dtype=np.int64)
        self.stored_action: Array = self.action_spec.zeros(self.batched_envs)
        # what the policy will see of an action: a subclass's own form of it is checked
        own = type(self).make_action_rep is AMAGOEnv.make_action_rep
        self._action_rep = self._form.vectors if own else self._checked_rep

    @property
    def observation_space(self) -> gym.spaces.Dict:
        return self._observations.space()

    @observation_space.setter
    def observation_space(self, space: gym.Space[Any]) -> None:
        self._observations.replace(space)

    @assignable
    def env_name(self) -> str:
        """The environment's name now, which may change at any time. Override it, or let ``env.env_name`` change.

        A rollout is logged under the name at its end. In a vectorised environment the next rollout has begun by then, so the
        name at the rollout's start is used. Names of rows, where they differ, are sorted and joined with "+".

        Raises:
            TypeError: the name is no str, nor a list of one a row.
        """
        name = self._own_name()
        return name if isinstance(name, str) else _joined(name)

    @property
    def env_names(self) -> list[str]:
        """The name of each of the B rows now: as the environment gives them, unless `env_name` is overridden to differ."""
        name = self.env_name
        with suppress(TypeError):  # of the environment's own name, where `env_name` is overridden
            rows = self._own_name() if self.batched_envs > 1 else name
            if not isinstance(rows, str) and _joined(rows) == name:
                return rows
        return [name] * self.batched_envs

    def _own_name(self) -> str | list[str]:
        """The environment's own name, or one for each row."""
        name = self._env_name if self._env_name is not None else inner_env.own_name(self.env.env)
        if isinstance(name, str):
            return name.replace("/", "_")
        if not isinstance(name, Sequence) or len(name) != self.batched_envs:
            raise TypeError(f"env_name is {name!r}, but must be a str" + (" or a list of one a row" if self.vectorized else ""))
        return [str(n).replace("/", "_") for n in name]

    @property
    def spec(self) -> Any:  # type: ignore[override]  # Gymnasium's own wrappers override it so
        return self.env.spec

    @assignable
    def horizon(self) -> int | None:
        """The most steps of a rollout, if known: ``env.horizon``, else the time limit in its Gymnasium spec."""
        return inner_env.horizon(self.env.env)

    @assignable
    def last_action(self) -> Array:
        """(B, S) the actions of the latest step, as the environment took them."""
        return np.asarray(self.stored_action).reshape(self._form.shape)

    def inner_reset(self, *args: object, **kwargs: object) -> tuple[Any, dict[str, Any]]:
        """The environment's own reset, which takes what `reset` was given; returns its observation (with a batch dimension only if it
        is vectorised), and its info.
        """
        return self.env.reset(*args, **kwargs)

    def inner_step(self, action: Array) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """The environment's own step, which takes the policy's action, (S,) in stored form, or (B, S) if it is vectorised; returns
        its observation, reward, terminated, truncated and info.
        """
        return self.env.step(action)

    def make_action_rep(self, action: Any) -> Array:
        """The vector of an action, as the policy observes it and as it is recorded.

        Args:
            action: (B, S) in stored form; with one environment also (S,).

        Returns:
            (B, A): one-hot uint8 of an index, else float32. An override must return the vector of an action of the space
            (`amago.spaces.ActionSpec.to_vector`), because the action is recorded.
        """
        return self._form.vectors(action)

    def _checked_rep(self, action: Array) -> Array:
        """The vector of an action in a subclass's form, checked, because it is recorded."""
        rep = self.make_action_rep(np.asarray(action).reshape(self._form.shape))
        self.stored_action, vectors = self._form.recordable(rep, self.env_name)
        return vectors

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Timestep, dict[str, Any]]:
        """Begin a new rollout in every row.

        Args:
            seed, options: passed on if the environment's ``reset`` accepts them.

        Returns:
            the first `Timestep`, and the environment's info.
        """
        b = self.batched_envs
        self.step_count = np.zeros(b, dtype=np.int64)
        self._observations.space()  # takes in the keys that a subclass has added since
        out = self.inner_reset(seed=seed, options=options)
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise self._at(0, inner_env.not_gymnasium(out, "reset() returned {}, but must return (observation, info)"))
        raw, info = out
        obs = self._converted(raw)
        if self._resetter is not None:
            self._resetter.begin()
            self.auto = None
        self._check_obs(obs)
        self.stored_action = self.action_spec.zeros(b)
        zeros = np.zeros((b, self.action_size), dtype=self._form.vector_dtype)
        return Timestep(obs, zeros, np.zeros(b, np.float32), self.step_count, np.zeros(b, dtype=bool), b), info

    def step(self, action: object) -> Step:  # type: ignore[override]  # arrays: rows side by side
        """Take one step in every row.

        Args:
            action: (B, S) in stored form (`amago.spaces`): an index from 0, numbers in [-1, 1], or bits; for an action with
                several parts, these side by side. With one environment also (S,), and a single index may be an int.

        Returns:
            the next `Timestep`, reward (B,) float32, terminated (B,), truncated (B,), and the environment's info.

        Raises:
            TypeError, ValueError: the action, or a result of the environment, does not fit its spaces.
            NonFiniteError: NaN or infinity in the action, the reward or an observation.
        """
        self.stored_action = action = self.check_action(action)
        out = self.inner_step(action)
        if not isinstance(out, (tuple, list)) or len(out) != 5:
            raise self._at(int(self.step_count[0]) + 1, inner_env.not_gymnasium(out, _FIVE))
        if self._resetter is not None:
            return self._after_batch(action, out, self._resetter)
        raw, r, term, trunc, info = out
        count = self.step_count = self.step_count + 1  # not in place: earlier timesteps hold the array
        if r.__class__ is not float:  # some environments return arrays of one number
            try:
                r = float(np.asarray(r).reshape(()))
            except (TypeError, ValueError):
                raise self._at(int(count[0]), TypeError(f"the reward is {r!r}, but must be one number")) from None
        if not -_LARGEST <= r <= _LARGEST:
            raise self._at(int(count[0]), NonFiniteError(f"the reward is {r}; rewards must be finite in float32"))
        reward = np.array([r], dtype=np.float32)
        terminated, truncated = _TRUE if term else _FALSE, _TRUE if trunc else _FALSE
        obs = self._converted(raw)
        self._check_obs(obs)
        if term or trunc:
            self.step_count = np.zeros(1, dtype=np.int64)
        return Timestep(obs, self._action_rep(action), reward, count, terminated), reward, terminated, truncated, info

    def _after_batch(self, action: Array, out: tuple[Any, ...], resetter: AutoResetter) -> Step:
        b = self.batched_envs
        raw, r, term, trunc, info = out
        reward = self._column("reward", r, np.float32)
        terminated, truncated = self._column("terminated", term, bool), self._column("truncated", trunc, bool)
        self.step_count = self.step_count + 1
        obs, auto = resetter.after_step(self._converted(raw), terminated, truncated, info)
        self.auto = auto
        skipped, opened = ~auto.real, auto.opened
        if skipped.any():
            reward[skipped], terminated[skipped], truncated[skipped] = 0.0, False, False
        if not all_finite(reward):
            self._check_rows(reward, "the reward", "rewards")
        if auto.last_obs is not None:  # defined only in rows whose rollout ended
            self._check_obs(auto.last_obs, (terminated | truncated) & auto.last_known)
        vector, arrived, terminal = self._action_rep(action), reward, terminated
        if opened.any():
            arrived, terminal = reward.copy(), terminated.copy()
            self.step_count[opened], arrived[opened], vector[opened], terminal[opened] = 0, 0.0, 0, False
        self._check_obs(obs)  # now that new rollouts are at step 0
        return Timestep(obs, vector, arrived, self.step_count, terminal, b), reward, terminated, truncated, info

    def check_action(self, action: Any) -> Array:
        """An action in the form that `inner_step` takes; raises as `step` if it is none."""
        if self._form.one_index:
            try:  # the common case: an index for one environment
                if action.dtype.kind in "iu" and action.ndim == 1 and 0 <= action.item() < self.action_size:
                    return action  # type: ignore[no-any-return]
            except (AttributeError, ValueError):
                pass
            if isinstance(action, (int, np.integer)) and not isinstance(action, bool):
                action = np.array([action])
        action = self._form.shaped(action)
        try:
            self.action_spec.check(action)
        except ValueError:
            for row, stored in enumerate(action.reshape(self._form.shape)):
                try:
                    self.action_spec.check(stored)
                except ValueError as err:
                    raise self._at(int(self.step_count[row]) + 1, err, row) from None
        return action

    def _at(self, step: int, err: Exception, row: int | None = None) -> Exception:
        """The same error, with the names of the environment and of the step before its message."""
        if self.batched_envs > 1 and row is not None:
            return type(err)(f"{self.env_names[row]} (row {row}), step {step}: {err}")
        return type(err)(f"{self.env_name}, step {step}: {err}")

    def _converted(self, raw: object) -> dict[str, Array]:
        """The environment's observation as a flat dict of arrays."""
        try:
            obs = self._observations.convert(raw)
        except (ValueError, TypeError, KeyError, IndexError) as err:
            text = f"the observation does not have the structure of the observation space: {err!r}"
            raise self._at(int(self.step_count[0]), err if isinstance(err, ValueError) else ValueError(text)) from err
        if self._resetter is not None:
            for key, value in obs.items():
                if len(value) != self.batched_envs:
                    text = f"observation {key!r} has {len(value)} rows, but batched_envs is {self.batched_envs}"
                    raise self._at(int(self.step_count[0]), ValueError(text))
        return obs

    def _column(self, name: str, value: object, dtype: DTypeLike) -> Array:
        try:
            return np.array(value, dtype=dtype).reshape(self.batched_envs)
        except (TypeError, ValueError):
            text = f"{name} is {value!r}, but must hold one value for each of {self.batched_envs} rows"
            raise self._at(int(self.step_count[0]) + 1, ValueError(text)) from None

    def _check_obs(self, obs: dict[str, Array], rows: Array | None = None) -> None:
        """Raise NonFiniteError for observations {key: (B, ...)} that are not finite in some row of ``rows`` (B,); None: all."""
        for key in self._observations.real_keys:
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
        raise self._at(int(self.step_count[row]), NonFiniteError(text), row)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env!r}, batched_envs={self.batched_envs})"

    __str__ = __repr__


def _joined(names: list[str]) -> str:
    return "+".join(sorted(set(names)))


def _check_env(env: object, batched_envs: int) -> None:
    if any(isinstance(layer, AMAGOEnv) for layer in inner_env.layers(env)):
        raise TypeError(f"env is {type(env).__name__}, which is an AMAGOEnv already; wrap the Gymnasium environment once")
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            raise TypeError(f"env is {env!r}, which has no {method}() method; AMAGOEnv wraps a gymnasium.Env")
    if isinstance(batched_envs, bool) or int(batched_envs) != batched_envs or batched_envs < 1:
        raise ValueError(f"batched_envs is {batched_envs!r}, but must be an integer of at least 1")


class AMAGOWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """Base of wrappers around an `AMAGOEnv`, or around another such wrapper, whose other attributes it has too.

    Attributes:
        amago_env: the `AMAGOEnv` inside all wrappers.

    Raises:
        TypeError: there is no `AMAGOEnv` inside.
    """

    rl2_space: gym.Space[Any]
    __getattr__ = forwarded

    def __init__(self, env: Any):
        self.amago_env = innermost(env, f"{type(self).__name__} needs an AMAGOEnv, but got")
        super().__init__(env)
        self.action_spec, self.rl2_space = self.amago_env.action_spec, self.amago_env.rl2_space
        self.batched_envs = self.amago_env.batched_envs

    @assignable
    def env_name(self) -> str:
        return self.amago_env.env_name


def innermost(env: object, complaint: str) -> AMAGOEnv:
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


__all__ = ["AMAGOEnv", "AMAGOWrapper"]
__all__ += ["AMAGO_ENV_LOG_PREFIX", "EnvCreator", "ReturnHistory", "SequenceWrapper", "SpecialMetricHistory"]  # noqa: F822

__getattr__ = attributes(__name__)
