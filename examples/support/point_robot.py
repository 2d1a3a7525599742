"""A point robot that must infer the position of a hidden goal from rewards."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common

Observation = NDArray[np.float32]

GOAL_REGIONS = ("semicircle", "circle", "square")
REWARDS = ("dense", "final")
_CELLS, _EXTENT = 15, 1.4  # cells of a drawing along each axis, and the plane from its middle to its edges


class PointRobot(gym.Env[Observation, NDArray[np.float32]]):
    """A point robot with a hidden goal, drawn for each rollout and the same in its k attempts.

    After the point robots of *Efficient Off-Policy Meta-Reinforcement Learning via Probabilistic Context Variables* (Rakelly et
    al. 2019, arXiv:1903.08254). An attempt begins at (0, 0); each step moves the robot by ``step_size`` times the action. The
    last step of an attempt returns the first observation of the next attempt. The rollout terminates (never truncates) with the
    last attempt.

    Reward: minus the distance to the goal after the step. With ``rewards="final"``, only the last step of an attempt is
    rewarded, and it returns the robot's final position; a further step, whose action is ignored, returns the robot to the
    start. Final rewards make memory necessary: an agent that sees the last reward alone can follow dense rewards to the goal.

    Actions, ``Box(-1, 1, (2,))``: along x and along y.

    Observation, float32 ``(4,)``: x, y, steps of this attempt divided by ``episode_length``, finished attempts divided by
    ``k_episodes``. The last observation of the rollout has the robot's final position.

    Metrics at the end of attempt i (from 0): ``Attempt {i} Final Distance`` (to the goal) and ``Attempt {i} Return``.

    Args:
        k_episodes: attempts per rollout.
        episode_length: steps per attempt.
        goal_region: the support of the uniform distribution of goals: "semicircle" (distance 1 from the start, y >= 0),
            "circle" (distance 1), or "square" (both coordinates in [-1, 1]).
        step_size: maximum distance per step along each axis, greater than 0.
        rewards: "dense" (in every step) or "final" (in the last step of an attempt).
        render_mode: None or "rgb_array" (uint8, 24 pixels per cell); x points right, y up.

    Attributes:
        goal: (x, y) of this rollout's goal.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        k_episodes: int = 3,
        episode_length: int = 20,
        goal_region: str = "semicircle",
        step_size: float = 0.1,
        rewards: str = "dense",
        render_mode: str | None = None,
    ) -> None:
        self.k_episodes = common.check_int("k_episodes", k_episodes, 1)
        self.episode_length = common.check_int("episode_length", episode_length, 1)
        self.goal_region = common.check_choice("goal_region", goal_region, GOAL_REGIONS)
        self.step_size = common.check_real("step_size", step_size)
        if self.step_size <= 0.0:
            raise ValueError(f"step_size must be positive, got {step_size!r}")
        self.final_only = common.check_choice("rewards", rewards, REWARDS) == "final"
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])
        self.horizon = self.k_episodes * self.episode_length + (self.k_episodes - 1) * self.final_only

        reach = self.step_size * self.episode_length * (1.0 + 1e-6)  # a margin for rounding errors
        high = np.array([reach, reach, 1.0, 1.0], dtype=np.float32)
        self.observation_space = gym.spaces.Box(high * np.array([-1, -1, 0, 0], dtype=np.float32), high, dtype=np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, shape=(2,), dtype=np.float32)

        self.goal = (0.0, 0.0)
        self._x = self._y = self._return = 0.0
        self._steps, self._attempt, self._reset_due = 0, self.k_episodes, False  # no rollout is under way

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        if self.goal_region == "square":
            x, y = self.np_random.uniform(-1.0, 1.0, size=2)
        else:
            angle = self.np_random.uniform(0.0, math.pi if self.goal_region == "semicircle" else 2.0 * math.pi)
            x, y = math.cos(angle), math.sin(angle)
        self.goal = (float(x), float(y))
        self._attempt = 0
        self._begin_attempt()
        return self._observe(), {}

    def _begin_attempt(self) -> None:
        self._x = self._y = self._return = 0.0
        self._steps, self._reset_due = 0, False

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._attempt >= self.k_episodes:
            common.refuse_step("PointRobot")
        dx, dy = common.check_continuous_action(action, 2).tolist()
        if self._reset_due:
            self._begin_attempt()
            return self._observe(), 0.0, False, False, {}
        self._x += self.step_size * dx
        self._y += self.step_size * dy
        self._steps += 1
        distance = math.hypot(self._x - self.goal[0], self._y - self.goal[1])
        over = self._steps == self.episode_length
        reward = -distance if over or not self.final_only else 0.0
        self._return += reward
        if not over:
            return self._observe(), reward, False, False, {}
        attempt = f"Attempt {self._attempt}"
        info = common.metrics({f"{attempt} Final Distance": distance, f"{attempt} Return": self._return})
        self._attempt += 1
        terminated = self._attempt == self.k_episodes
        if self.final_only:
            self._reset_due = not terminated
        elif not terminated:
            self._begin_attempt()
        return self._observe(), reward, terminated, False, info

    def _observe(self) -> Observation:
        over = self._attempt / self.k_episodes
        return np.array((self._x, self._y, self._steps / self.episode_length, over), dtype=np.float32)

    def render(self) -> Any:
        """The plane: A robot, G goal, S start, each moved to the edge if it lies beyond."""
        return common.render(self.render_mode, self._rows)

    def _rows(self) -> list[str]:
        rows = [["."] * _CELLS for _ in range(_CELLS)]
        for mark, (x, y) in (("S", (0.0, 0.0)), ("G", self.goal), ("A", (self._x, self._y))):
            row, column = (round((_CELLS - 1) * min(max(0.5 + c / (2 * _EXTENT), 0.0), 1.0)) for c in (-y, x))
            rows[row][column] = mark
        return ["".join(row) for row in rows]
