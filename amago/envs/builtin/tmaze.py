"""T-Maze: recall, at the end of a corridor, a cue seen at its beginning (Ni et al. 2023, arXiv:2307.03864)."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.config import NamedArguments
from amago.envs.builtin import _common as common
from amago.envs.metrics import AMAGO_ENV_LOG_PREFIX

Observation = NDArray[np.float32]

RIGHT, UP, LEFT, DOWN = range(4)


class _TMaze(NamedArguments, gym.Env[Observation, np.int64]):
    """The common maze: a corridor along x (y = 0) from ``x = oracle`` to the junction, whose two arms are at y = -1 and y =
    1."""

    metadata = {"render_modes": ["ansi"], "render_fps": 8}
    _oracle = 0
    _extra_steps = 1

    def __init__(self, corridor_length: int, penalty: float | None, render_mode: str | None) -> None:
        self.corridor_length = common.check_int("corridor_length", corridor_length, 1)
        self.episode_length = self.horizon = self.corridor_length + self._extra_steps
        self.penalty = -1.0 / self.episode_length if penalty is None else common.check_real("penalty", penalty)
        if self.penalty > 0.0:
            raise ValueError(f"penalty must be at most 0, because it is added to the reward, got {penalty!r}")
        self.render_mode = common.check_render_mode(render_mode, self.metadata["render_modes"])
        low = np.array([0.0, -1.0], dtype=np.float32)
        self.observation_space = gym.spaces.Box(low, np.ones_like(low), dtype=np.float32)
        self.action_space = gym.spaces.Discrete(4)
        self._x = self._y = 0
        self._goal = 1
        self._clock = self.episode_length

    @property
    def goal(self) -> int:
        """The arm of this episode's goal: 1 up, -1 down."""
        return self._goal

    @property
    def position(self) -> tuple[int, int]:
        """The agent's cell ``(x, y)``. The start is (0, 0), the junction ``(corridor_length, 0)``."""
        return self._x, self._y

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._goal = 1 if self.np_random.random() < 0.5 else -1
        self._x = self._y = self._clock = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._clock >= self.episode_length:
            common.refuse_step(type(self).__name__)
        action = common.check_action(action, 4)
        self._move(action)
        self._clock += 1
        if self._clock == self.episode_length:
            success = float(self._x == self.corridor_length and self._y == self._goal)
            return self._observe(), success, True, False, {f"{AMAGO_ENV_LOG_PREFIX} Success": success}
        reward = 0.0 if action == RIGHT or self._clock == 1 else self.penalty
        return self._observe(), reward, False, False, {}

    def _move(self, action: int) -> None:
        if action in (RIGHT, LEFT):
            if self._y == 0:
                step = 1 if action == RIGHT else -1
                self._x = min(max(self._x + step, self._oracle), self.corridor_length)
        elif self._x == self.corridor_length:
            self._y = min(max(self._y + (1 if action == UP else -1), -1), 1)

    def _observe(self) -> Observation:
        if self._x == self.corridor_length:
            return np.array((1.0, self._y), dtype=np.float32)
        return np.array((0.0, self._goal if self._sign_shows() else 0.0), dtype=np.float32)

    def _sign_shows(self) -> bool:
        raise NotImplementedError

    def render(self) -> Any:
        """With ``render_mode="ansi"``, the maze as text: A agent, G goal, S the cell that shows the goal, "." free cells."""
        if self.render_mode != "ansi":
            return None
        width = self.corridor_length - self._oracle + 1
        rows = [[" "] * width, ["."] * width, [" "] * width]
        rows[0][-1] = rows[2][-1] = "."
        rows[1][0] = "S"
        rows[1 - self._goal][-1] = "G"
        rows[1 - self._y][self._x - self._oracle] = "A"
        lines = ["".join(row).rstrip() for row in rows]
        return "\n".join([*lines, f"step {self._clock} of {self.episode_length}"])


@gin.configurable(module="amago.envs.builtin")
class TMazePassive(_TMaze):
    """A T-Maze that shows the goal in the first observation only: a test of memory without exploration.

    The goal is the upper or the lower arm, with equal probability. An episode always lasts ``corridor_length + 1`` steps, the
    minimum to walk to the junction and turn, and terminates (never truncates).

    Actions, ``Discrete(4)``: 0 right (forward), 1 up, 2 left, 3 down. Walls stop the agent; up and down have an effect at the
    junction and in its arms only.

    Observation, float32 ``(2,)``. At the junction and in its arms: 1 and the agent's y (-1, 0, 1). Elsewhere: 0 and the goal (1
    up, -1 down) if it is shown, else 0.

    Reward: 1 in the last step if the agent is then in the goal's arm. All other steps except the first give ``penalty`` unless
    the action is 0.

    Metrics at the end of an episode: ``Success``.

    Args:
        corridor_length: steps from the start to the junction, at least 1.
        penalty: at most 0; by default ``-1 / episode_length``.
        render_mode: None or "ansi".

    Attributes:
        episode_length, horizon: steps of an episode.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """

    def __init__(self, corridor_length: int = 10, penalty: float | None = None, render_mode: str | None = None) -> None:
        super().__init__(corridor_length, penalty, render_mode)

    def _sign_shows(self) -> bool:
        return self._clock == 0


@gin.configurable(module="amago.envs.builtin")
class TMazeActive(_TMaze):
    """A T-Maze that shows the goal only in the cell to the left of the start: a test of memory and exploration.

    An episode always lasts ``corridor_length + 3`` steps, the minimum to step back, walk to the junction and turn. Actions,
    observations, rewards and metrics are those of `TMazePassive`; a first step back is therefore not penalised.

    Args:
        corridor_length: steps from the start to the junction, at least 1.
        penalty: at most 0; by default ``-1 / episode_length``.
        render_mode: None or "ansi".

    Attributes:
        episode_length, horizon: steps of an episode.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """

    _oracle = -1
    _extra_steps = 3

    def __init__(self, corridor_length: int = 10, penalty: float | None = None, render_mode: str | None = None) -> None:
        super().__init__(corridor_length, penalty, render_mode)

    def _sign_shows(self) -> bool:
        return self._x == self._oracle


class _AltRewards:
    """Other rewards in the last step of a `_TMaze`, before which it stands in the order of bases.

    Args:
        corridor_length: steps from the start to the junction.
        goal_reward: in the arm of the goal.
        penalty: as of `TMazePassive`; 0 by default.
        distract_reward: in the other arm.
    """

    def __init__(
        self, corridor_length: int = 10, goal_reward: float = 1.0, penalty: float = 0.0, distract_reward: float = 0.0
    ) -> None:
        super().__init__(corridor_length, penalty)  # type: ignore[call-arg]
        self.goal_reward = common.check_real("goal_reward", goal_reward)
        self.distract_reward = common.check_real("distract_reward", distract_reward)

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)  # type: ignore[misc]
        if terminated:
            x, y = self.position  # type: ignore[attr-defined]
            reward = self.goal_reward * reward
            if (x, y) == (self.corridor_length, -self.goal):  # type: ignore[attr-defined]
                reward = self.distract_reward
        return obs, reward, terminated, truncated, info


class TMazeAltPassive(_AltRewards, TMazePassive):
    """`TMazePassive` with the arguments that scripts for the original system give: ``goal_reward`` and ``distract_reward`` in the last
    step, and no penalty by default.
    """


class TMazeAltActive(_AltRewards, TMazeActive):
    """`TMazeActive` with the arguments of `TMazeAltPassive`."""
