"""Target networks: the slow copies of actor and critics, and the copies that a policy gradient passes through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amago import ops
from amago.agent.base import BaseAgent
from amago.compat.statistics import LossStatistics
from amago.nets.heads import DetachedCritics


class AgentWithTargets(LossStatistics, BaseAgent):
    """A base class of agents with ``actor`` and ``critics``, their targets, and ``maximized_critics``.

    A network that a subclass has not built is left out.
    """

    actor: Any  # the user's classes, which share no type that mypy could check beyond the two heads'
    critics: Any
    target_actor: Any
    target_critics: Any
    maximized_critics: Any
    tau: float
    online_coeff: float
    num_critics_td: int
    expectile: float | None = None

    @property
    def _takes_minimum(self) -> bool:
        """Whether values of several critics are their minimum; else they are their mean."""
        return self.online_coeff > 0 or self.expectile is not None

    def hard_sync_targets(self) -> None:
        """Set the target networks, and the critics that a policy gradient passes through, to the trained ones."""
        for target, online in (("target_actor", "actor"), ("target_critics", "critics"), ("maximized_critics", "critics")):
            if hasattr(self, target) and hasattr(self, online):
                self._full_copy(getattr(self, target), getattr(self, online))

    def soft_sync_targets(self) -> None:
        self._ema_copy(self.target_critics, self.critics)
        self._ema_copy(self.target_actor, self.actor)
        if not isinstance(self.maximized_critics, DetachedCritics):
            self._full_copy(self.maximized_critics, self.critics)

    @torch.no_grad()
    def _full_copy(self, target: nn.Module, online: nn.Module) -> None:
        """Set one network's parameters and buffers to those of another."""
        if isinstance(target, DetachedCritics):
            target.follow(online)
            return
        pairs = [
            *zip(target.parameters(), online.parameters(), strict=True),
            *zip(target.buffers(), online.buffers(), strict=True),
        ]
        for t, source in pairs:
            if t is not source:
                t.copy_(source)

    def _ema_copy(self, target: nn.Module, online: nn.Module, tau: float | None = None) -> None:
        """Move one network towards another by the share ``tau``; None: that of the agent."""
        ops.ema_update(target, online, self.tau if tau is None else tau)

    def _reduce_critic_ensemble(self, q: Tensor) -> Tensor:
        """Values (..., C, G, 1) of ``num_critics_td`` random critics: their minimum if there is a policy gradient or an
        expectile, else their mean, (..., 1, G, 1)."""
        drawn = torch.randint(q.shape[-3], (self.num_critics_td,), device=q.device)
        return self._reduce(q[..., drawn, :, :])

    def _reduce_both(self, q: Tensor, of_taken: Tensor) -> tuple[Tensor, Tensor]:
        """Values of a state and of an action taken there (..., C, G, 1) each -> (..., 1, G, 1).

        Where the minimum is taken, the critic with the lowest value of the state gives both: were each a minimum of its own, the action's
        would be lower on average over the policy's actions than the state's, and targets too high.
        """
        if not self._takes_minimum:
            return self._reduce(q), self._reduce(of_taken)
        lowest = q.argmin(dim=-3, keepdim=True)
        return q.gather(-3, lowest), of_taken.gather(-3, lowest)

    def _reduce(self, q: Tensor) -> Tensor:
        """(..., C, G, 1) -> (..., 1, G, 1)."""
        return q.amin(dim=-3, keepdim=True) if self._takes_minimum else q.mean(dim=-3, keepdim=True)
