"""HalfCheetah, asked to run at a speed that it must find out from its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.builtin._attempts import Attempts
from amago.envs.builtin._extras import require

Observation = NDArray[np.float32]


@gin.configurable(module="amago.envs.builtin")
class HalfCheetahVel(gym.Env[Observation, NDArray[np.float32]]):
    """HalfCheetah-v5 with a hidden target velocity: the same in k attempts, a new one in every rollout.

    After the benchmark of *Model-Agnostic Meta-Learning* (arXiv:1703.03400), on current MuJoCo. The reward is
    ``-|velocity - target| - ctrl_cost_weight * sum(action^2)``; the velocity is that of the body along x, in m/s, over the step.
    The step that ends an attempt returns the first observation of the next. The rollout is truncated (never terminated) at the end
    of the last attempt, as HalfCheetah-v5 is at its limit: where all rewards are negative, an end that counted would be worth more
    than any gait, and the time until then all that values tell.

    Actions, ``Box(-1, 1, (6,))``: torques. Observation, float32 ``(19,)``: the 17 of HalfCheetah-v5, steps of this attempt divided by
    ``episode_length``, attempts before this one divided by ``k_episodes``.

    Logged when attempt i (from 0) ends: ``Attempt {i} Velocity Error``, the mean of ``|velocity - target|`` over its steps, and
    ``Attempt {i} Return``.

    Args:
        target_range: (low, high) in m/s; targets are uniform in it.
        k_episodes: attempts in a rollout.
        episode_length: steps of each (0.05 s a step).
        ctrl_cost_weight: cost of torques, at least 0.
        render_mode: of HalfCheetah-v5.

    Attributes:
        horizon: the length of a rollout, ``k_episodes * episode_length``.
        target: the velocity wanted in this rollout.

    Raises:
        ImportError: MuJoCo is not installed (``pip install 'amago[mujoco]'``).
        TypeError, ValueError: an argument or an action is out of range; the message quotes it.
    """

    def __init__(
        self,
        target_range: Sequence[float] = (0.0, 3.0),
        k_episodes: int = 1,
        episode_length: int = 200,
        ctrl_cost_weight: float = 0.05,
        render_mode: str | None = None,
    ) -> None:
        self.target_range = _check_range(target_range)
        self.k_episodes = common.check_int("k_episodes", k_episodes, 1)
        self.episode_length = common.check_int("episode_length", episode_length, 1)
        self.ctrl_cost_weight = common.check_real("ctrl_cost_weight", ctrl_cost_weight)
        if self.ctrl_cost_weight < 0.0:
            raise ValueError(f"ctrl_cost_weight must be at least 0, got {ctrl_cost_weight!r}")
        require("mujoco", "mujoco")
        cheetah = require("gymnasium.envs.mujoco.half_cheetah_v5", "mujoco")
        self.render_mode = render_mode
        self._env: gym.Env[Any, Any] = cheetah.HalfCheetahEnv(render_mode=render_mode)
        self.metadata = self._env.metadata
        self.horizon = self.k_episodes * self.episode_length
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shape=(19,), dtype=np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, shape=(6,), dtype=np.float32)
        self.target = self.target_range[0]
        self._attempts = Attempts(self.k_episodes, self.episode_length)
        self._error = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.target = float(self.np_random.uniform(*self.target_range))
        self._attempts.begin_rollout()
        return self._begin_attempt(), {}

    def _begin_attempt(self) -> Observation:
        self._attempts.begin()
        self._error = 0.0
        # seeded each time, so that a rollout depends on the generator of this environment alone
        obs, _ = self._env.reset(seed=int(self.np_random.integers(2**31)))
        return self._observe(obs)

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if not self._attempts.under_way:
            common.refuse_step("HalfCheetahVel")
        torques = _check_action(action)
        raw, _, _, _, told = self._env.step(torques)
        error = abs(float(told["x_velocity"]) - self.target)
        reward = -error - self.ctrl_cost_weight * float(torques @ torques)
        self._error += error
        if not self._attempts.step(reward):
            return self._observe(raw), reward, False, False, {}
        last = self._observe(raw)  # before the attempt counts as over: values look beyond it from what they know
        info = self._attempts.end({"Velocity Error": self._error / self.episode_length})
        over = not self._attempts.under_way
        return last if over else self._begin_attempt(), reward, False, over, info

    def _observe(self, raw: NDArray[np.float64]) -> Observation:
        obs = np.empty(19, dtype=np.float32)
        obs[:17] = raw
        obs[17:] = self._attempts.progress
        return obs

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


def _check_range(value: Any) -> tuple[float, float]:
    try:
        low, high = value
    except (TypeError, ValueError):
        raise TypeError(f"target_range must be (low, high), got {value!r}") from None
    low, high = common.check_real("target_range[0]", low), common.check_real("target_range[1]", high)
    if low > high:
        raise ValueError(f"target_range must be (low, high) with low <= high, got {value!r}")
    return low, high


def _check_action(action: Any) -> NDArray[np.float64]:
    torques = np.asarray(action, dtype=np.float64)
    if torques.shape != (6,):
        raise ValueError(f"action must be six numbers in [-1, 1], got shape {torques.shape}")
    if not np.abs(torques).max() <= 1.0:  # NaN too
        raise ValueError(f"action must be six numbers in [-1, 1], got {action!r}")
    return torques
