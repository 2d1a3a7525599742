"""A point robot that must infer the position of a hidden goal from rewards."""

from __future__ import annotations

import math
from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.config import NamedArguments
from amago.envs.builtin import _common as common
from amago.envs.builtin import _drawing as drawing
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

Observation = NDArray[np.float32]

GOAL_REGIONS = ("semicircle", "circle", "square")
REWARDS = ("dense", "final")
_PIXELS, _EXTENT = 240, 1.4  # of an image, and of the plane from its middle to its edges


@gin.configurable(module="amago.envs.builtin")
class PointRobot(NamedArguments, gym.Env[Observation, NDArray[np.float32]]):
    """A point robot with a hidden goal, drawn for each rollout and the same in its k attempts.

    After the point robots of *Efficient Off-Policy Meta-Reinforcement Learning via Probabilistic Context Variables* (Rakelly et
    al. 2019, arXiv:1903.08254). An attempt begins at (0, 0) and lasts ``episode_length`` steps, each of which moves the robot
    by ``step_size`` times the action. Its last step returns the first observation of the next attempt. The rollout terminates
    (never truncates) with the last attempt.

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
        render_mode: None, "ansi" (text) or "rgb_array" (uint8 (240, 240, 3)); x points right, y up.

    Attributes:
        horizon: steps per rollout, ``k_episodes * episode_length``; with final rewards ``k_episodes - 1`` more.
        goal: (x, y) of this rollout's goal.

    Raises:
        TypeError, ValueError: an argument or an action has the wrong type or is out of range.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 10}

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
        self._path: list[tuple[float, float]] = []  # of this attempt, for pictures

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
        self._path = []

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._attempt >= self.k_episodes:
            common.refuse_step("PointRobot")
        dx, dy = _check_action(action)
        if self._reset_due:
            self._begin_attempt()
            return self._observe(), 0.0, False, False, {}
        self._x += self.step_size * dx
        self._y += self.step_size * dy
        if self.render_mode is not None:
            self._path.append((self._x, self._y))
        self._steps += 1
        distance = math.hypot(self._x - self.goal[0], self._y - self.goal[1])
        over = self._steps == self.episode_length
        reward = -distance if over or not self.final_only else 0.0
        self._return += reward
        if not over:
            return self._observe(), reward, False, False, {}
        prefix = f"{AMAGO_ENV_LOG_PREFIX} Attempt {self._attempt}"
        info = {f"{prefix} Final Distance": distance, f"{prefix} Return": self._return}
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
        """The robot, the goal and their distance as a line of text, or as an image with the path of this attempt, according to
        ``render_mode``."""
        return drawing.render(self.render_mode, self._text, self._draw)

    def _text(self) -> str:
        distance = math.hypot(self._x - self.goal[0], self._y - self.goal[1])
        return (
            f"attempt {min(self._attempt + 1, self.k_episodes)} of {self.k_episodes}, step {self._steps} of {self.episode_length}: "
            f"at ({self._x:+.2f}, {self._y:+.2f}), goal ({self.goal[0]:+.2f}, {self.goal[1]:+.2f}), distance {distance:.2f}"
        )

    def _draw(self) -> NDArray[np.uint8]:
        frame = drawing.blank(_PIXELS, _PIXELS, drawing.WHITE)
        for x, y in _outline(self.goal_region):
            drawing.blob(frame, _pixel(x, y), 1.0, drawing.GREY)
        drawing.blob(frame, _pixel(0.0, 0.0), 4.0, drawing.DARK, power=1.0)
        drawing.blob(frame, _pixel(*self.goal), 10.0, drawing.GREEN)
        for x, y in self._path:
            drawing.blob(frame, _pixel(x, y), 2.0, drawing.GOLD)
        drawing.blob(frame, _pixel(self._x, self._y), 7.0, drawing.RED)
        drawing.progress(frame, 0, 4, min(self._attempt + 1, self.k_episodes) / self.k_episodes, drawing.DARK)
        return frame


def _pixel(x: float, y: float) -> tuple[float, float]:
    """The pixel (column, row) of a point; points outside of the picture are moved to its edge."""
    scale, middle = _PIXELS / 2 / _EXTENT, (_PIXELS - 1) / 2
    return min(max(middle + scale * x, 0.0), _PIXELS - 1.0), min(max(middle - scale * y, 0.0), _PIXELS - 1.0)


def _outline(region: str) -> list[tuple[float, float]]:
    """Points of the region that goals are drawn from, or of its edge."""
    if region == "square":
        side = np.linspace(-1.0, 1.0, 21).tolist()
        return [(x, y) for x in side for y in (-1.0, 1.0)] + [(x, y) for x in (-1.0, 1.0) for y in side]
    end = math.pi if region == "semicircle" else 2.0 * math.pi
    return [(math.cos(angle), math.sin(angle)) for angle in np.linspace(0.0, end, 61).tolist()]


def _check_action(action: Any) -> tuple[float, float]:
    try:
        dx, dy = (float(a) for a in action)
    except (TypeError, ValueError):
        raise TypeError(f"action must be two numbers in [-1, 1], got {action!r}") from None
    if not (-1.0 <= dx <= 1.0 and -1.0 <= dy <= 1.0):  # also true for NaN
        raise ValueError(f"action must be two numbers in [-1, 1], got {action!r}")
    return dx, dy
