"""HalfCheetah with a hidden target velocity that must be inferred from rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.builtin._common import Attempts
from amago.registry import require

Observation = NDArray[np.float32]


@gin.configurable(module="amago.envs.builtin")
class HalfCheetahVel(gym.Env[Observation, NDArray[np.float32]]):
    """HalfCheetah-v5 with a hidden target velocity, drawn for each rollout and the same in its k attempts.

    The benchmark of *Model-Agnostic Meta-Learning* (Finn et al. 2017, arXiv:1703.03400) on current MuJoCo.

    Reward: ``-|velocity - target| - ctrl_cost_weight * sum(action^2)``, where the velocity is the mean along x over the step,
    in m/s.

    The last step of an attempt returns the first observation of the next attempt. The rollout truncates (never terminates) with
    the last attempt, like HalfCheetah-v5 at its limit: all rewards are negative, so that termination would be worth more than
    any gait.

    Actions, ``Box(-1, 1, (6,))``: torques.

    Observation, float32 ``(19,)``: the 17 numbers of HalfCheetah-v5, steps of this attempt divided by ``episode_length``,
    finished attempts divided by ``k_episodes``.

    Metrics at the end of attempt i (from 0): ``Attempt {i} Velocity Error``, the mean of ``|velocity - target|`` over its
    steps, and ``Attempt {i} Return``.

    Args:
        target_range: (low, high) in m/s of the uniform distribution of targets.
        k_episodes: attempts per rollout.
        episode_length: steps per attempt, of 0.05 s each.
        ctrl_cost_weight: weight of the squared torques in the reward, at least 0.
        render_mode: a render mode of HalfCheetah-v5.

    Attributes:
        target: the target velocity of this rollout, in m/s.
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
        # a new seed each time, so that a rollout depends on this environment's generator alone
        obs, _ = self._env.reset(seed=int(self.np_random.integers(2**31)))
        return self._observe(obs)

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if not self._attempts.under_way:
            common.refuse_step("HalfCheetahVel")
        torques = common.check_continuous_action(action, 6)
        raw, _, _, _, cheetah_info = self._env.step(torques)
        error = abs(float(cheetah_info["x_velocity"]) - self.target)
        reward = -error - self.ctrl_cost_weight * float(torques @ torques)
        self._error += error
        if not self._attempts.step(reward):
            return self._observe(raw), reward, False, False, {}
        # made before `end`: values are bootstrapped from it, so it must not count the attempt as finished
        last = self._observe(raw)
        info = self._attempts.end({"Velocity Error": self._error / self.episode_length})
        over = not self._attempts.under_way
        return last if over else self._begin_attempt(), reward, False, over, info

    def _observe(self, raw: NDArray[np.float64]) -> Observation:
        return np.concatenate((raw, self._attempts.progress), dtype=np.float32)

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


def _check_range(value: Sequence[float]) -> tuple[float, float]:
    try:
        low, high = value
    except (TypeError, ValueError):
        raise TypeError(f"target_range must be (low, high), got {value!r}") from None
    low, high = common.check_real("target_range[0]", low), common.check_real("target_range[1]", high)
    if low > high:
        raise ValueError(f"target_range must be (low, high) with low <= high, got {value!r}")
    return low, high


class HalfCheetahV4_MetaVelocity(HalfCheetahVel):
    """`HalfCheetahVel` with targets, in m/s, from ``task_min_velocity`` to ``task_max_velocity``; ``options`` are its other arguments."""

    def __init__(self, task_min_velocity: float = 0.0, task_max_velocity: float = 3.0, **options: Any) -> None:
        super().__init__(**{"target_range": (task_min_velocity, task_max_velocity), **options})
