"""Rewards for symbolic Alchemy that come with the dip which earned them, and leave the best policy what it was."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym

from amago.envs.builtin import _common as common
from amago.envs.builtin.alchemy import SymbolicAlchemy

_HOPES = (1.0, 3.0, 5.0, 15.0)
"""Roughly what a stone worth -3, -1, 1 or 15 brings in the end, to a player who knows little."""


@gin.configurable(module="amago.envs.builtin")
class AlchemyShaping(gym.Wrapper[Any, Any, Any, Any]):
    """Adds ``discount * potential(after) - potential(before)`` to each reward (Ng, Harada and Russell 1999, ICML, pages 278 to 287).

    In the game a dip is rewarded when the stone goes into the cauldron, steps later and mixed with what came between. Here it is
    at once: a stone in front of the player counts 1, 3, 5 or 15 for a worth of -3, -1, 1 or 15, and the potential is their sum.
    It is 0 at the first observation of a trial and after the end, because nobody has earned it. So every rollout has the return
    that it had, *discounted by* ``discount``, and a policy that is best for an agent with that discount stays best.
    Undiscounted returns differ. The metrics of `SymbolicAlchemy` are those of the game.

    Wrap the environment of training alone, and keep rewards from the agent (``FFTstepEncoder.hide_rl2s``), which will not see
    these when it is evaluated.

    Args:
        env: a `SymbolicAlchemy`, or wrappers around one.
        discount: the agent's main ``gamma``, in [0, 1].

    Raises:
        TypeError: ``env`` is something else, or ``discount`` no number.
        ValueError: ``discount`` is out of range.
    """

    def __init__(self, env: gym.Env[Any, Any], discount: float) -> None:
        if not isinstance(env.unwrapped, SymbolicAlchemy):
            raise TypeError(f"env must be a SymbolicAlchemy or wrap one, got {env!r}")
        self.discount = common.check_real("discount", discount)
        if not 0.0 <= self.discount <= 1.0:
            raise ValueError(f"discount must lie in [0, 1], got {discount}")
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
        return sum(_HOPES[corner.bit_count()] for corner in self.alchemy.stones if corner is not None)
