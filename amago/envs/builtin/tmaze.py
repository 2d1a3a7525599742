"""T-Maze: recall, at the end of a corridor, a cue seen at its beginning (Ni et al. 2023, arXiv:2307.03864); exploration for it."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.exploration import EpsilonGreedy

Observation = NDArray[np.float32]

RIGHT, UP, LEFT, DOWN = range(4)
_DRAWN = 30  # columns of a picture: one of 10,000 cells would be of no use


class _TMaze(gym.Env[Observation, np.int64]):
    """A corridor along x (y = 0) from ``x = oracle`` to the junction, whose two arms are at y = -1 and y = 1."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}
    goal_reward, distract_reward = 1.0, 0.0  # in the last step, in the goal's arm and in the other
    _oracle = 0
    _extra_steps = 1

    def __init__(self, corridor_length: int = 10, penalty: float | None = None, render_mode: str | None = None) -> None:
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
        self.goal = 1  # the arm of this episode's goal: 1 up, -1 down
        self._clock = self.episode_length

    @property
    def position(self) -> tuple[int, int]:
        """The agent's cell ``(x, y)``. The start is (0, 0), the junction ``(corridor_length, 0)``."""
        return self._x, self._y

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.goal = 1 if self.np_random.random() < 0.5 else -1
        self._x = self._y = self._clock = 0
        return self._observe(), {}

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._clock >= self.episode_length:
            common.refuse_step(type(self).__name__)
        action = common.check_action(action, 4)
        self._move(action)
        self._clock += 1
        if self._clock == self.episode_length:
            arm = self._y if self._x == self.corridor_length else 0
            paid = {self.goal: self.goal_reward, -self.goal: self.distract_reward}.get(arm, 0.0)
            return self._observe(), paid, True, False, common.metrics({"Success": float(arm == self.goal)})
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
        return np.array((0.0, self.goal if self._sign_shows() else 0.0), dtype=np.float32)

    def _sign_shows(self) -> bool:
        return self._clock == 0

    def render(self) -> Any:
        """A agent, G goal, S the cell that shows the goal, "." free cells; at most the 30 columns around the agent."""
        return common.render(self.render_mode, self._rows)

    def _rows(self) -> list[str]:
        width, place = self.corridor_length - self._oracle + 1, self._x - self._oracle
        rows = [[" "] * width, ["."] * width, [" "] * width]
        rows[0][-1] = rows[2][-1] = "."
        rows[1][0] = "S"
        rows[1 - self.goal][-1] = "G"
        rows[1 - self._y][place] = "A"
        left = max(0, min(place - _DRAWN // 2, width - _DRAWN))
        return ["".join(row[left : left + _DRAWN]) for row in rows]


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
        render_mode: None or "rgb_array" (uint8, 24 pixels per cell); x points right, y up.
    """


@gin.configurable(module="amago.envs.builtin")
class TMazeActive(_TMaze):
    """A T-Maze that shows the goal only in the cell to the left of the start: a test of memory and exploration.

    An episode always lasts ``corridor_length + 3`` steps, the minimum to step back, walk to the junction and turn. Arguments,
    actions, observations, rewards and metrics are as in `TMazePassive`; a first step back is therefore not penalised.
    """

    _oracle = -1
    _extra_steps = 3

    def _sign_shows(self) -> bool:
        return self._x == self._oracle


class _OriginalArguments(_TMaze):
    """The original's arguments: other rewards in the last step, and no penalty by default."""

    def __init__(
        self, corridor_length: int = 10, goal_reward: float = 1.0, penalty: float = 0.0, distract_reward: float = 0.0
    ) -> None:
        super().__init__(corridor_length, penalty)
        self.goal_reward = common.check_real("goal_reward", goal_reward)
        self.distract_reward = common.check_real("distract_reward", distract_reward)


class TMazeAltPassive(_OriginalArguments, TMazePassive):
    """`TMazePassive` with the original's arguments."""


class TMazeAltActive(_OriginalArguments, TMazeActive):
    """`TMazeActive` with the original's arguments."""


@gin.configurable(module="amago.envs.builtin")
class TMazeExploration(EpsilonGreedy):
    """`EpsilonGreedy` with a much smaller epsilon in the corridor of a T-Maze.

    In the first step of an episode and in its last three, epsilon is as in `EpsilonGreedy` (configured by
    ``EpsilonGreedy.eps_start`` and so on). In all other steps it is ``0.5 / horizon``, an expected half random action per
    episode. ``first=0, last=1`` leaves the usual epsilon to the turn alone: then exploring does not keep an agent from the junction.

    Args:
        amago_env: the environment to wrap.
        horizon: steps per episode, ``TMazePassive.episode_length``. Bind ``TMazeExploration.horizon`` with gin: an `Experiment`
            does not pass it.
        rollouts_anneal: epsilon falls over so many episodes of an actor, however long they are; None: over
            ``EpsilonGreedy.steps_anneal``.
        first, last: steps at the beginning and at the end of an episode with the usual epsilon.

    Raises:
        RuntimeError: ``horizon`` was neither given nor bound.
    """

    def __init__(
        self,
        amago_env: gym.Env[Any, Any],
        horizon: int = gin.REQUIRED,
        rollouts_anneal: int | None = None,
        first: int = 1,
        last: int = 3,
    ) -> None:
        super().__init__(amago_env)
        self._first, self._last = common.check_int("first", first, 0), common.check_int("last", last, 0)
        self.horizon = common.check_int("horizon", horizon, 1)
        if rollouts_anneal is not None:
            self.steps_anneal = self.horizon * common.check_int("rollouts_anneal", rollouts_anneal, 1)

    def current_eps(self, local_step: NDArray[np.int64]) -> NDArray[np.float64]:
        """Epsilon (B,) of actors whose next action has the index ``local_step`` (B,) in its episode."""
        usual = super().current_eps(local_step)
        corridor = (local_step >= self._first) & (local_step < self.horizon - self._last)
        return corridor * (0.5 / self.horizon) + ~corridor * usual
