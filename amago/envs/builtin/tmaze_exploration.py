"""Exploration for long T-Mazes, in which a single random action in the corridor makes an episode fail."""

from __future__ import annotations

from typing import Any

import gin
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.exploration import EpsilonGreedy


@gin.configurable(module="amago.envs.builtin")
class TMazeExploration(EpsilonGreedy):
    """`EpsilonGreedy` with a much smaller epsilon in the corridor of a T-Maze.

    In the first step of an episode and in its last three, epsilon is that of `EpsilonGreedy` (configured by
    ``EpsilonGreedy.eps_start`` and so on). In all other steps it is ``0.5 / horizon``, an expected half random action per
    episode.

    Args:
        amago_env: the environment to wrap.
        horizon: steps per episode, ``TMazePassive.episode_length``. Bind ``TMazeExploration.horizon`` with gin: an `Experiment`
            does not pass it.

    Raises:
        RuntimeError: ``horizon`` was neither given nor bound.
        TypeError, ValueError: ``horizon`` is not a positive integer.
    """

    def __init__(self, amago_env: Any, horizon: int = gin.REQUIRED) -> None:
        super().__init__(amago_env)
        self.horizon = common.check_int("horizon", horizon, 1)

    def current_eps(self, local_step: NDArray[np.int64], horizon: int | None = None) -> NDArray[np.float64]:
        """Epsilon (B,) of actors whose next action has the index ``local_step`` (B,) in its episode."""
        usual = super().current_eps(local_step)
        corridor = (local_step > 0) & (local_step < self.horizon - 3)
        return np.where(corridor, 0.5 / self.horizon, usual)
