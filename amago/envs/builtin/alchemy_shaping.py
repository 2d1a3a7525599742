"""Potential-based reward shaping for symbolic Alchemy."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym

from amago.config import NamedArguments
from amago.envs.builtin import _common as common
from amago.envs.builtin.alchemy import SymbolicAlchemy

_POTENTIALS = (1.0, 3.0, 5.0, 15.0)
"""Approximate final values of stones whose present values are -3, -1, 1 and 15, without knowledge of the chemistry."""


@gin.configurable(module="amago.envs.builtin")
class AlchemyShaping(NamedArguments, gym.Wrapper[Any, Any, Any, Any]):
    """Adds ``discount * potential(after) - potential(before)`` to each reward (Ng, Harada and Russell 1999, ICML, pages 278 to
    287).

    The game rewards a dip only when the stone goes into the cauldron, several steps later; the shaped reward follows at once.
    The potential is the sum over the unused stones of 1, 3, 5 or 15 for a value of -3, -1, 1 or 15. It is 0 at the first
    observation of a trial and at the end of the rollout. So the return of every rollout *discounted by* ``discount`` is
    unchanged, and so is the optimal policy of an agent with that discount. Undiscounted returns change. The metrics of
    `SymbolicAlchemy` contain the game's rewards.

    Use it for training environments only, and hide rewards from the agent (``FFTstepEncoder.hide_rl2s``), because shaped
    rewards are absent in evaluation.

    Args:
        env: a `SymbolicAlchemy`, with or without wrappers.
        discount: the agent's main ``gamma``, in [0, 1].

    Raises:
        TypeError: ``env`` is not a `SymbolicAlchemy`, or ``discount`` is not a number.
        ValueError: ``discount`` is out of range.
    """

    def __init__(self, env: gym.Env[Any, Any], discount: float) -> None:
        if not isinstance(env.unwrapped, SymbolicAlchemy):
            raise TypeError(f"env must be a SymbolicAlchemy or wrap one, got {env!r}")
        self.discount = common.check_fraction("discount", discount)
        super().__init__(env)
        self.alchemy = env.unwrapped
        self.horizon = self.alchemy.horizon

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before = self._potential()
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(reward) + self.discount * self._potential() - before, terminated, truncated, info

    def _potential(self) -> float:
        if self.alchemy.steps_left in (0, self.alchemy.steps_per_trial):
            return 0.0
        return sum(_POTENTIALS[corner.bit_count()] for corner in self.alchemy.stones if corner is not None)
