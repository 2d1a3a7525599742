"""PopArt: the scale of critics' losses follows the returns (van Hasselt et al. 2016, arXiv 1602.07714)."""

from __future__ import annotations

import gin
import torch
from torch import Tensor, nn

from amago.nets.utils import check_positive


@gin.configurable
class PopArtLayer(nn.Module):
    """Running mean and second moment of value targets for each discount, and the affine map that compensates their changes.

    Raw critic outputs Q become w Q + b on the normalised scale, sigma (w Q + b) + mu on that of returns; an update of the
    statistics changes w and b so that the latter does not change.

    In the paper w and b are the critics' last layer, which also learns. Here nothing else changes them. Therefore sigma w is
    always sqrt(init_nu), and sigma b + mu is 0: a return is ten times the raw output, whatever the statistics. What they
    normalise is the critics' loss, ((return - target) / sigma)^2, and the objective of the policy gradient,
    (return - mu) / sigma; the outputs grow with the returns.

    Args:
        gammas: G, number of discounts; all statistics are buffers (G, 1).
        beta: rate of the running statistics, divided by 1 - (1 - beta)^t.
        init_nu: second moment before any data, and the square of returns / raw outputs.
        enabled: if False, every method is the identity and `update_stats` does nothing.
    """

    mu: Tensor
    nu: Tensor
    w: Tensor
    b: Tensor
    _t: Tensor

    def __init__(self, gammas: int, beta: float = 5e-4, init_nu: float = 100.0, enabled: bool = True) -> None:
        super().__init__()
        check_positive(gammas=gammas)
        if not 0.0 < beta < 1.0:
            raise ValueError(f"beta must be in (0, 1), got beta={beta}")
        if not init_nu > 0.0:
            raise ValueError(f"init_nu must be positive, got init_nu={init_nu}")
        self.beta, self.enabled = beta, enabled
        self.register_buffer("mu", torch.zeros(gammas, 1))
        self.register_buffer("nu", torch.full((gammas, 1), float(init_nu)))
        self.register_buffer("w", torch.ones(gammas, 1))
        self.register_buffer("b", torch.zeros(gammas, 1))
        self.register_buffer("_t", torch.ones(gammas, 1))

    @property
    def sigma(self) -> Tensor:
        """(G, 1); 1 where disabled."""
        if not self.enabled:
            return torch.ones_like(self.mu)
        return torch.sqrt((self.nu - self.mu.square()).clamp(1e-4, 1e8)).clamp(1e-4, 1e6)

    @torch.no_grad()
    def update_stats(self, val: Tensor, mask: Tensor) -> None:
        """Move the statistics towards new targets.

        Args:
            val: (B, L, 1, G, 1), on the scale of returns.
            mask: broadcastable to ``val``, nonzero where a target is real. A discount without real targets, or with one that is
                not finite, keeps its statistics.
        """
        if not self.enabled:
            return
        mask = (mask != 0).expand_as(val)
        dims = tuple(range(val.ndim - 2))
        kept, count = torch.where(mask, val.float(), 0.0), mask.sum(dims)
        first, second = (k.sum(dims) / count.clamp(min=1) for k in (kept, kept.square()))
        use = (count > 0) & torch.isfinite(first) & torch.isfinite(second)
        t = self._t + 1
        rate = self.beta / (1 - (1 - self.beta) ** t)
        old_mu, old_sigma = self.mu.clone(), self.sigma
        self._t.copy_(torch.where(use, t, self._t))
        self.mu.copy_(torch.where(use, (1 - rate) * self.mu + rate * first, self.mu))
        self.nu.copy_(torch.where(use, (1 - rate) * self.nu + rate * second, self.nu))
        sigma = self.sigma
        self.w.mul_(old_sigma / sigma)
        self.b.copy_((old_sigma * self.b + old_mu - self.mu) / sigma)

    def normalize_values(self, target: Tensor) -> Tensor:
        """(..., G, 1) on the scale of returns -> (target - mu) / sigma."""
        return (target - self.mu) / self.sigma if self.enabled else target

    def forward(self, x: Tensor, normalized: bool = True) -> Tensor:
        """Raw critic outputs (..., G, 1), on the normalised scale or, if not ``normalized``, on the scale of returns."""
        if not self.enabled:
            return x
        x = self.w * x + self.b
        return x if normalized else self.sigma * x + self.mu
