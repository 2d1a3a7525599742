"""How a critic's output stands for a return.

A *value representation* answers what the narrative of an agent asks of its critics, and nothing else. What passes
between its methods is a *value* (..., G, 1): the number of which means over samples and critics are taken, and whose differences
are advantages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from amago import ops
from amago.nets.popart import PopArtLayer


class ValueRepresentation(ABC):
    """See this module; one for a pair of critics and PopArt statistics.

    Args:
        critics: makes outputs (..., C, G, O).
        popart: running statistics of the targets.
    """

    def __init__(self, critics: Any, popart: PopArtLayer):
        self.popart = popart

    @abstractmethod
    def value(self, out: Tensor) -> Tensor:
        """Critics' outputs (..., G, O) -> values (..., G, 1), in float32."""

    @abstractmethod
    def returns(self, value: Tensor) -> Tensor:
        """Values -> units of return."""

    @abstractmethod
    def objective(self, value: Tensor) -> Tensor:
        """Values -> what the policy gradient raises: normalised returns, whose scale does not depend on the rewards."""

    @abstractmethod
    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        """Outputs (B, L, C, G, O) against returns (B, L, 1, G, 1); (B, L, C, G, 1)."""

    def observe(self, target: Tensor, mask: Tensor) -> None:
        """Update the statistics with targets (B, L, 1, G, 1) where ``mask`` is True."""
        self.popart.update_stats(target, mask)

    def metrics(self, target: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """What a log should say about targets (B, L, 1, G, 1), beyond what it says of any agent's; ``mask`` is (B, L, 1)."""
        return {}


class PopArtValues(ValueRepresentation):
    """Scalar critics whose returns are normalised per discount by PopArt (van Hasselt et al. 2016, arXiv 1602.07714).

    Values are the critics' outputs as they are: of nearly constant scale, which keeps advantages comparable over training.

    Raises:
        ValueError: the critics classify.
    """

    def __init__(self, critics: Any, popart: PopArtLayer):
        super().__init__(critics, popart)
        if hasattr(critics, "bins"):
            raise ValueError(f"critic_type={type(critics).__name__} gives distributions over bins: use it with MultiTaskAgent")

    def value(self, out: Tensor) -> Tensor:
        return out.float()

    def returns(self, value: Tensor) -> Tensor:
        return self.popart(value, normalized=False)

    def objective(self, value: Tensor) -> Tensor:
        return self.popart(value, normalized=True)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return (self.popart(out.float(), normalized=True) - self.popart.normalize_values(target)).square()


class TwoHotValues(ValueRepresentation):
    """Critics that classify returns into bins (`amago.nets.twohot.Bins`); values are returns.

    Their loss does not depend on the scale of the returns. PopArt's statistics only normalise the policy gradient's objective.

    Raises:
        ValueError: the critics do not classify.
    """

    def __init__(self, critics: Any, popart: PopArtLayer):
        super().__init__(critics, popart)
        if not hasattr(critics, "bins"):
            raise ValueError(f"critic_type={type(critics).__name__} has no bins to classify returns into: use NCriticsTwoHot")
        self.bins = critics.bins

    def value(self, out: Tensor) -> Tensor:
        value: Tensor = self.bins.value(out)
        return value

    def returns(self, value: Tensor) -> Tensor:
        return value

    def objective(self, value: Tensor) -> Tensor:
        return self.popart.normalize_values(value)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.bins.cross_entropy(out, target)
        return loss

    @torch.no_grad()
    def metrics(self, target: Tensor, mask: Tensor) -> dict[str, Tensor]:
        beyond = self.bins.beyond(target[:, :, :, -1]).float()
        return {"Pct. of TD Targets beyond the Bins (main gamma)": 100.0 * ops.masked_mean(beyond, mask[..., None])}
