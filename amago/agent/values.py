"""How a critic's output stands for a return.

A *value representation* answers what the narrative of an agent asks of its critics, and nothing else:
``estimate`` (in units of return), ``objective`` (what the policy gradient raises), ``advantage_units`` (where advantages are
taken), ``observe`` (targets seen) and ``loss``.
"""

from __future__ import annotations

from torch import Tensor

from amago.nets.popart import PopArtLayer


class PopArtValues:
    """Scalar critics whose returns are normalised per discount by PopArt (van Hasselt et al. 2016, arXiv 1602.07714)."""

    def __init__(self, popart: PopArtLayer):
        self.popart = popart

    def estimate(self, q: Tensor) -> Tensor:
        """Raw outputs (..., G, 1) -> returns."""
        return self.popart(q.float(), normalized=False)

    def objective(self, q: Tensor) -> Tensor:
        """Raw outputs -> normalised returns, whose scale does not depend on the rewards."""
        return self.popart(q.float(), normalized=True)

    def advantage_units(self, q: Tensor) -> Tensor:
        """Raw outputs, as they are: of nearly constant scale."""
        return q.float()

    def observe(self, target: Tensor, mask: Tensor) -> None:
        """Update the statistics with targets (B, L, 1, G, 1) where ``mask`` is True."""
        self.popart.update_stats(target, mask)

    def loss(self, q: Tensor, target: Tensor) -> Tensor:
        """(B, L, C, G, 1) squared error between normalised values."""
        return (self.popart(q.float(), normalized=True) - self.popart.normalize_values(target)).square()
