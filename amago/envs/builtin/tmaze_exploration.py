"""Exploration for long T-Mazes, where a random step in the corridor would spoil nearly every episode."""

from __future__ import annotations

from typing import Any

import gin
import numpy as np
from numpy.typing import NDArray

from amago.envs.builtin import _common as common
from amago.envs.exploration import EpsilonGreedy


@gin.configurable(module="amago.envs.builtin")
class TMazeExploration(EpsilonGreedy):
    """`EpsilonGreedy` where a T-Maze has something to explore, and next to nothing in the corridor.

    In the first step of an episode and in its last three, the chance of a random action is that of `EpsilonGreedy` (and
    so are its options, ``EpsilonGreedy.eps_start`` and the like). In every step between it is ``0.5 / horizon``: half a random
    action an episode, however long the corridor.

    Args:
        amago_env: the environment to wrap.
        horizon: steps of an episode, ``TMazePassive.episode_length``. An `Experiment` gives it no value: bind
            ``TMazeExploration.horizon`` with gin.

    Raises:
        RuntimeError: ``horizon`` was neither given nor bound.
        TypeError, ValueError: ``horizon`` is not a positive integer.
    """

    def __init__(self, amago_env: Any, horizon: int = gin.REQUIRED) -> None:
        super().__init__(amago_env)
        self.horizon = common.check_int("horizon", horizon, 1)

    def current_eps(self, local_step: NDArray[np.int64], horizon: int | None = None) -> NDArray[np.float64]:
        """(B,) chances for actors whose next action has index ``local_step`` (B,) in their episode."""
        usual = super().current_eps(local_step, horizon)
        corridor = (local_step > 0) & (local_step < self.horizon - 3)
        return np.where(corridor, 0.5 / self.horizon, usual)
