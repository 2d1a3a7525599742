"""A mixture of three tasks with rewards of different scales."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import MetaFrozenLake, RoomKeyDoor, TMazePassive
from amago.envs.builtin import _common as common

Observation = NDArray[np.float32]

TASKS = ("recall", "lake", "room")
SCALES = (1.0, 30.0, 1000.0)
_BEST = (1.0, 3.0, 2.0)  # the highest return of each task before scaling
_WIDTH, _ACTIONS = 8, 5


class ToyMixture(gym.Env[Observation, np.int64]):
    """One of three small tasks per rollout, with rewards of different scales: a test of scale-invariant learning.

    "recall" is `TMazePassive` with a corridor of 2, "lake" is `MetaFrozenLake` of 2x2 cells with 3 attempts of 4 steps, and
    "room" is `RoomKeyDoor` of 2x2 cells with one trial of 6 steps, visible locations, and the key in the corner opposite the
    start. Their rewards are multiplied by 1, 30 and 1,000. A rollout ends with the task, or when it reaches the maximum return:
    1, 90 and 2,000.

    Actions, ``Discrete(5)``: the task's; actions that it lacks have the effect of its last.

    Observation, float32 ``(11,)``: the task (3, one-hot), then the task's observation, padded with 0.

    Metrics: the task's; ``Score``, the return divided by the task's maximum, at the end of the rollout.

    Args:
        task: "recall", "lake", "room", or "random" to draw one uniformly for each rollout.
    """

    metadata = {"render_modes": []}

    def __init__(self, task: str = "random") -> None:
        self.task = common.check_choice("task", task, (*TASKS, "random"))
        self._envs: tuple[gym.Env[Any, Any], ...] = (
            TMazePassive(corridor_length=2),
            MetaFrozenLake(size=2, k_episodes=3, max_episode_steps=4),
            RoomKeyDoor(
                dark=False, size=2, max_episode_steps=6, meta_rollout_horizon=6, start_location=(0, 0), key_location=(1, 1)
            ),
        )
        self.horizon = max(int(e.get_wrapper_attr("horizon")) for e in self._envs)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, shape=(len(TASKS) + _WIDTH,), dtype=np.float32)
        self.action_space = gym.spaces.Discrete(_ACTIONS)
        self._current = 0 if task == "random" else TASKS.index(task)
        self._return = 0.0

    @property
    def env_name(self) -> str:
        return TASKS[self._current]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        if self.task == "random":
            self._current = int(self.np_random.integers(len(TASKS)))
        self._return = 0.0
        own_seed = None if seed is None else int(self.np_random.integers(2**31))
        if own_seed is not None:
            for env in self._envs:  # the other tasks, too: later rollouts must follow from the seed
                env.reset(seed=own_seed)
        obs, info = self._envs[self._current].reset(seed=own_seed)
        return self._observe(obs), info

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        env, best = self._envs[self._current], _BEST[self._current]
        index = common.check_action(action, _ACTIONS)
        own = env.action_space
        assert isinstance(own, gym.spaces.Discrete)
        obs, reward, terminated, truncated, info = env.step(min(index, int(own.n) - 1))
        self._return += float(reward)
        terminated = terminated or self._return >= best
        if terminated:
            info |= common.metrics({"Score": self._return / best})
        return self._observe(obs), float(reward) * SCALES[self._current], terminated, truncated, info

    def _observe(self, obs: Observation) -> Observation:
        out = np.zeros(len(TASKS) + _WIDTH, dtype=np.float32)
        out[self._current] = 1.0
        out[len(TASKS) : len(TASKS) + len(obs)] = obs
        return out
