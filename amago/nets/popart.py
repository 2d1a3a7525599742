"""PopArt: the scale of critics' losses follows the returns (van Hasselt et al. 2016, arXiv 1602.07714)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import torch
from torch import Tensor

from amago import config
from amago.nets import ranks
from amago.nets.moments import RunningMoments
from amago.nets.utils import check_positive

LEAST_SIGMA = 0.01
"""Standard deviation of returns (times ``reward_multiplier``) below which errors are no longer divided by it."""


@gin.configurable(module="amago.nets.actor_critic")
class PopArtLayer(RunningMoments):
    """Running mean and second moment of value targets for each discount, and the affine map that compensates their changes.

    Raw critic outputs Q become w Q + b on the normalised scale, sigma (w Q + b) + mu on that of returns; an update of the
    statistics changes w and b so that the latter does not change.

    In the paper w and b are the critics' last layer, which also learns. Here nothing else changes them. Therefore sigma w is
    always sqrt(init_nu), and sigma b + mu is 0: a return is ten times the raw output, whatever the statistics. What they
    normalise is the critics' loss, ((return - target) / sigma)^2, and the objective of the policy gradient,
    (return - mu) / sigma; the outputs grow with the returns.

    Args:
        gammas: G, number of discounts, or the discounts (G,); all statistics are buffers (G, 1).
        beta: rate of the running statistics after many updates, see `amago.nets.moments.RunningMoments`.
        init_nu: second moment before any data, and the square of returns / raw outputs.
        enabled: if False, every method is the identity and `update_stats` does nothing.
        initial_samples: number of updates that the statistics before any data count as. With 1 their weight falls as 1 / t. With 0
            the first batch alone sets sigma: where its returns hardly differ, the critics' loss is then very large; docs/notes/learning.md
            compares both.
    """

    w: Tensor
    b: Tensor
    least_sigma: Tensor | None
    """Smallest standard deviation, where `scale_start` may change it; None: `LEAST_SIGMA`."""

    def __init__(
        self,
        gammas: int | Sequence[float] | Tensor,
        beta: float = 5e-4,
        init_nu: float = 100.0,
        enabled: bool = True,
        initial_samples: int = 1,
    ) -> None:
        gammas = gammas if isinstance(gammas, int) else len(gammas)
        check_positive(gammas=gammas)
        super().__init__((gammas, 1), (gammas, 1), beta, init_nu, initial_samples)
        self.enabled = enabled
        self.register_buffer("w", torch.ones(gammas, 1))
        self.register_buffer("b", torch.zeros(gammas, 1))
        self.register_buffer("least_sigma", None)

    def start_scaling(self) -> None:
        """Save `least_sigma` with the statistics, because `scale_start` will change it."""
        self.register_buffer("least_sigma", torch.full((), LEAST_SIGMA, device=self.w.device))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.least_sigma is not None:  # a state that was saved without
            state_dict.setdefault(f"{prefix}least_sigma", torch.full_like(self.least_sigma, LEAST_SIGMA))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def sigma(self) -> Tensor:
        """(G, 1); 1 where disabled."""
        if not self.enabled:
            return torch.ones_like(self.w)
        least = LEAST_SIGMA if self.least_sigma is None else self.least_sigma
        return self.variance.clamp(0.0, 1e8).sqrt().clamp(min=least)

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
        kept = torch.where(mask, val.to(self.nu.dtype), 0.0)
        sums, squares, count = ranks.total(kept.sum(dims), kept.square().sum(dims), mask.sum(dims))
        first, second = (x / count.clamp(min=1) for x in (sums, squares))
        use = (count > 0) & torch.isfinite(first) & torch.isfinite(second)
        old_mu, old_sigma = self.mu.clone(), self.sigma
        self._move(first, second, use, use)
        sigma = self.sigma
        # new tensors, because a graph may hold the old ones
        self.w = self.w * (old_sigma / sigma)
        self.b = ((old_sigma * self.b + old_mu - self.mu) / sigma).to(self.b.dtype)

    @property
    def updates(self) -> Tensor:
        """(), how often the statistics have moved; of the discount that has moved most often."""
        return self._t.amax() - self.initial_samples

    @torch.no_grad()
    def scale_start(self, factor: Tensor) -> None:
        """Let the moments before any data be those of returns ``factor`` times as large; raw outputs keep their meaning."""
        self.nu.mul_(factor.square())
        self.w = self.w / factor
        if self.least_sigma is not None:
            self.least_sigma.mul_(factor)

    def raw(self, size: Tensor) -> Tensor:
        """Sizes of returns on the scale of raw outputs, (G, 1)."""
        return size / (self.sigma * self.w)

    def normalize_values(self, target: Tensor) -> Tensor:
        """(..., G, 1) on the scale of returns -> (target - mu) / sigma."""
        return ((target - self.mu) / self.sigma).to(target.dtype) if self.enabled else target

    def forward(self, x: Tensor, normalized: bool = True) -> Tensor:
        """Raw critic outputs (..., G, 1), on the normalised scale or, if not ``normalized``, on the scale of returns."""
        if not self.enabled:
            return x
        x = self.w * x + self.b
        return x if normalized else self.sigma * x + self.mu.to(x.dtype)


config.also_known_as(PopArtLayer, "amago.nets.popart.PopArtLayer", "nets.popart.PopArtLayer", "popart.PopArtLayer")
