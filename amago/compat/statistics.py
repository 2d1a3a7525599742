"""Metrics for agents that override ``forward``.

The fact that this serves: such agents of the original system compute their loss themselves, and fill ``update_info`` with what
``_td_stats``, ``_policy_stats``, ``_filter_stats`` and ``_popart_stats`` return.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from amago import ops


class LossStatistics:
    """The methods above. None of them affects training. Tensors may have a row for the last observation too, which no mask of
    transitions has: it does not count."""

    popart: Any

    @torch.no_grad()
    def _td_stats(self, mask: Tensor, *values: Tensor, **named: Tensor) -> dict[str, Tensor]:
        """Mean and standard deviation of tensors, named by their keyword, or by their position as "TD Statistic 1".

        Args:
            mask: (B, L, 1) or wider, True where a transition counts.
            values, named: (B, L, ...).
        """
        tensors = {f"TD Statistic {i}": x for i, x in enumerate(values, start=1)} | named
        out = {}
        for name, x in tensors.items():
            x, real = _matched(x, mask)
            out[f"{name} (mean)"], out[f"{name} (std)"] = ops.masked_mean(x.float(), real), ops.masked_std(x.float(), real)
        return out

    @torch.no_grad()
    def _policy_stats(self, mask: Tensor, dist: Distribution) -> dict[str, Tensor]:
        """The entropy of policies (B, L, G), where their class has one.

        Args:
            mask: (B, L, 1) or (B, L, G, 1), True where a transition counts.
        """
        try:
            entropy = dist.entropy()
        except NotImplementedError:
            return {}
        entropy = entropy.unsqueeze(-1) if entropy.ndim == 3 else entropy  # of independent parts: (B, L, G, A)
        return {"Policy Entropy": ops.masked_mean(*_matched(entropy, mask))}

    @torch.no_grad()
    def _filter_stats(self, mask: Tensor, logp: Tensor, filter: Tensor) -> dict[str, Tensor]:
        """Weights of stored actions, and the log-probabilities of the actions.

        Args:
            mask: (B, L, 1) or (B, L, G, 1), True where a transition counts.
            logp, filter: (B, L, G, 1).
        """
        return {
            "Filter Weight": ops.masked_mean(*_matched(filter.float(), mask)),
            "Pct. of Actions Approved by Filter": 100.0 * ops.masked_mean(*_matched((filter > 0).float(), mask)),
            "Log-Probability of Actions": ops.masked_mean(*_matched(logp, mask)),
        }

    @torch.no_grad()
    def _popart_stats(self) -> dict[str, Tensor]:
        """Mean and standard deviation of TD targets by the number of their discount."""
        out = {}
        for name in ("mu", "sigma"):
            for g, value in enumerate(getattr(self.popart, name).flatten()):
                out[f"PopArt {name} ({g})"] = value.clone()
        return out


def _matched(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` without the row of the last observation, if it has one that the mask (B, L, ...) lacks, and the mask as a bool of its shape:
    dimensions that the mask lacks come before its last."""
    mask = mask.bool()
    while mask.ndim < x.ndim:
        mask = mask.unsqueeze(-2)
    if x.shape[1] == mask.shape[1] + 1:
        x = x[:, :-1]
    return x, mask.expand_as(x)
