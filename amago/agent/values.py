"""How the outputs of critics represent returns: as scalars (`PopArtValues`) or as distributions over bins (`TwoHotValues`).

A *value* (..., G, 1) is the quantity that is averaged over samples and critics, and whose differences are advantages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from amago.nets import ranks
from amago.nets.popart import PopArtLayer


class AgentValues(dict[str, Tensor]):
    """Estimates for the actions of a batch and each discount, by name; (B, L, G, 1) where nothing else is said. Values at padded steps
    are undefined.

    "q_sa" is Q(s, a) of the stored action, in the environment's units of return, mean over critics; "v_s" is Q(s, a ~ pi), likewise;
    "q_sa_std" and "v_s_std" are standard deviations over critics. "advantage" is the filter's argument, (q_sa - v_s) x
    ``reward_multiplier``, in `Agent` with PopArt a tenth of that. "filter_weights" are those of the stored action in behaviour cloning.
    "state_mask" (B, L, 1) is True where a transition is real.

    Attributes:
        q, v, advantage, filter_weight, ensemble_spread: "q_sa", "v_s", "advantage", "filter_weights" and "q_sa_std".
    """

    @property
    def q(self) -> Tensor:
        return self["q_sa"]

    @property
    def v(self) -> Tensor:
        return self["v_s"]

    @property
    def advantage(self) -> Tensor:
        return self["advantage"]

    @property
    def filter_weight(self) -> Tensor:
        return self["filter_weights"]

    @property
    def ensemble_spread(self) -> Tensor:
        return self["q_sa_std"]


class ValueRepresentation(ABC):
    """Converts between critics' outputs, values and returns; one for each pair of critics and PopArt statistics.

    Args:
        critics: their outputs are (..., C, G, O).
        popart: running statistics of the targets.
    """

    def __init__(self, critics: Any, popart: PopArtLayer):
        self.popart = popart

    scalar: ClassVar[bool]
    """Critics output values, not distributions."""

    @abstractmethod
    def value(self, out: Tensor) -> Tensor:
        """Critics' outputs (..., G, O) -> values (..., G, 1), in float32."""

    @abstractmethod
    def returns(self, value: Tensor) -> Tensor:
        """Values -> units of return."""

    @abstractmethod
    def objective(self, value: Tensor) -> Tensor:
        """Values -> the objective of the policy gradient: normalised returns, whose scale does not depend on the rewards."""

    @abstractmethod
    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        """The loss (B, L, C, G, 1) of outputs (B, L, C, G, O) for target returns (B, L, 1, G, 1)."""

    @torch.no_grad()
    def td_error(self, out: Tensor, target: Tensor) -> Tensor:
        """abs(value - target), (B, L, 1), of outputs (B, L, C, G, O) for target returns (B, L, 1, G, 1), normalised per discount by the statistics
        of the targets and averaged over critics and discounts."""
        returns = self.returns(self.value(out))
        difference = self.popart.normalize_values(returns) - self.popart.normalize_values(target)
        return difference.abs().mean(dim=(2, 3))

    def change_of_scale(self, size: Tensor, scale: Tensor) -> Tensor:
        """By which factor the scale of critics' outputs should change for returns of a size."""
        raise NotImplementedError(f"the outputs of {type(self).__name__} have no scale")

    def observe(self, target: Tensor, mask: Tensor) -> None:
        """Update the statistics with targets (B, L, 1, G, 1) where ``mask`` is True."""
        self.popart.update_stats(target, mask)

    def metrics(self, target: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Metrics of targets (B, L, 1, G, 1) that only this representation has; ``mask`` is (B, L, 1)."""
        return {}


class PopArtValues(ValueRepresentation):
    """Scalar critics, whose loss and policy gradient are normalised per discount by PopArt's statistics of the targets.

    A value is the critic's raw output: always a tenth of the return (`amago.nets.popart.PopArtLayer`; the return itself with
    ``popart=False``). Values and advantages therefore grow with the rewards and with ``reward_multiplier``.

    Raises:
        ValueError: the critics output bins.
    """

    scalar = True

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

    @torch.no_grad()
    def change_of_scale(self, size: Tensor, scale: Tensor) -> Tensor:
        """By which power of two the ``scale`` of critics' outputs should change, so that the networks' own outputs are between 1 and 2 for
        returns of this size, () or (G, 1). Returns of 0 have no scale, and change none."""
        ratio = self.popart.raw(size.to(scale.dtype)).amax() / scale
        return torch.where(ratio > 0.0, torch.exp2(ratio.log2().floor().clamp(-32.0, 32.0)), 1.0)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return (self.popart(out.float(), normalized=True) - self.popart.normalize_values(target)).square()


class TwoHotValues(ValueRepresentation):
    """Critics that classify returns into bins (`amago.nets.twohot.Bins`); values are returns.

    Their loss does not depend on the scale of the returns. PopArt's statistics only normalise the policy gradient's objective.

    Raises:
        ValueError: the critics do not output bins.
    """

    scalar = False

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
        return {"Pct. of TD Targets beyond the Bins (main gamma)": 100.0 * ranks.masked_mean(beyond, mask[..., None])}
