"""Potential-based shaping of rewards (numpy only)."""

from __future__ import annotations

from dataclasses import replace

import gin
import numpy as np

from amago.data.relabel import Relabeler
from amago.data.trajectory import FrozenTraj, split_rl2


@gin.configurable(module="amago.relabeling")
class LastRewardShaping(Relabeler):
    """Adds ``gamma Phi(s') - Phi(s)`` to each reward, with the potential Phi = ``coeff`` times the reward that was observed last.

    Potential-based shaping leaves the best policy as it is (Ng, Harada and Russell 1999), if the agent observes rewards, as it does by
    default: values become V - Phi. Where rewards of a step change slowly and by the task rather than by the action, as the distance from a
    hidden speed does, Phi takes most of what tasks differ in away from the values, so that what actions differ in is no longer small
    beside it. Only the rewards to learn from change: what the policy observes (``rl2s``), the stored trajectories and evaluations keep the
    environment's.

    Args:
        gamma: the discount of the agent; with several discounts the best policies of the others change. At least 0, below 1.
        coeff: of the last reward in the potential, at least 0; None: 1 / (1 - gamma), the value of rewards that stay as they are.
            The reward to learn from is then the change of the reward, divided by 1 - gamma.
    """

    def __init__(self, gamma: float = 0.99, coeff: float | None = None):
        if not 0 <= gamma < 1:
            raise ValueError(f"gamma must be the agent's discount, at least 0 and below 1, got {gamma!r}")
        if coeff is not None and not 0 <= coeff < np.inf:
            raise ValueError(f"coeff must be at least 0, or None for 1 / (1 - gamma), got {coeff!r}")
        self.gamma, self.coeff = gamma, 1 / (1 - gamma) if coeff is None else coeff

    def relabel(self, traj: FrozenTraj) -> FrozenTraj:
        potential = self.coeff * split_rl2(traj.rl2s)[0]
        after = np.where(traj.dones, 0.0, potential[1:])  # nothing follows a termination
        return replace(traj, rews=(traj.rews + self.gamma * after - potential[:-1]).astype(np.float32))
