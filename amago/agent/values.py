"""Conversions between critics' outputs and returns: scalars (`PopArtValues`) or distributions over bins (`TwoHotValues`).

A *value* (..., G, 1) is the quantity that is averaged over samples and critics, and whose differences are advantages.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from amago.data.batch import Batch
from amago.nets import ranks
from amago.nets.actor_critic import PopArtLayer
from amago.nets.heads import EnsembleCritics


class AgentValues(dict[str, Tensor]):
    """Estimates for the actions of a batch and each discount, by name; (B, L, G, 1) unless stated otherwise. Values at padded
    steps are undefined.

    "q_sa" is Q(s, a) of the stored action, in the environment's units of return, mean over critics; "v_s" is Q(s, a ~ pi),
    likewise; "q_sa_std" and "v_s_std" are standard deviations over critics. "advantage" is the filter's argument, (q_sa - v_s)
    x ``reward_multiplier``, in `Agent` with PopArt a tenth of that. "filter_weights" are the weights of the stored action in
    behaviour cloning. "state_mask" (B, L, 1) is True where a transition is real.
    """


class PopArtValues:
    """Scalar critics, whose loss and policy gradient are normalised per discount by PopArt's statistics of the targets.

    A value is the critic's raw output: always a tenth of the return (`amago.nets.actor_critic.PopArtLayer`; the return itself with
    ``popart=False``). Values and advantages therefore grow with the rewards and with ``reward_multiplier``.
    """

    scalar: ClassVar[bool] = True
    """Critics output values, not distributions."""

    def __init__(self, critics: object, popart: PopArtLayer):
        self.popart = popart
        if hasattr(critics, "bins") == self.scalar:
            fault, agent = (
                ("gives distributions over bins", "MultiTaskAgent") if self.scalar else ("has no bins", "NCriticsTwoHot")
            )
            raise ValueError(f"critic_type={type(critics).__name__} {fault} to classify returns into: use {agent}")

    def value(self, out: Tensor) -> Tensor:
        """Critics' outputs (..., G, O) -> values (..., G, 1), in float32."""
        return out.float()

    def returns(self, value: Tensor) -> Tensor:
        """Values -> units of return."""
        return self.popart(value, normalized=False)

    def objective(self, value: Tensor) -> Tensor:
        """Values -> the objective of the policy gradient: normalised returns, whose scale does not depend on the rewards."""
        return self.popart(value, normalized=True)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        """The loss (B, L, C, G, 1) of outputs (B, L, C, G, O) for target returns (B, L, 1, G, 1)."""
        return (self.popart(out.float(), normalized=True) - self.popart.normalize_values(target)).square()

    @torch.no_grad()
    def td_error(self, out: Tensor, target: Tensor) -> Tensor:
        """abs(value - target), (B, L, 1), of outputs (B, L, C, G, O) for target returns (B, L, 1, G, 1), normalised per
        discount by the statistics of the targets and averaged over critics and discounts."""
        returns = self.returns(self.value(out))
        difference = self.popart.normalize_values(returns) - self.popart.normalize_values(target)
        return difference.abs().mean(dim=(2, 3))


class TwoHotValues(PopArtValues):
    """Critics that classify returns into bins (`amago.nets.twohot.Bins`); values are returns.

    Their loss does not depend on the scale of the returns. PopArt's statistics only normalise the policy gradient's objective.
    """

    scalar = False

    def __init__(self, critics: Any, popart: PopArtLayer):
        super().__init__(critics, popart)
        self.bins = critics.bins

    def value(self, out: Tensor) -> Tensor:
        return self.bins.value(out)  # type: ignore[no-any-return]

    def returns(self, value: Tensor) -> Tensor:
        return value

    def objective(self, value: Tensor) -> Tensor:
        return self.popart.normalize_values(value)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return self.bins.cross_entropy(out, target)  # type: ignore[no-any-return]


# ---- the scale of critics' outputs (``rescale_critics``) ---


def _change_of_scale(popart: PopArtLayer, size: Tensor, scale: Tensor) -> Tensor:
    """The power of two by which the ``scale`` of critics' outputs should change, so that the networks' own outputs are between 1 and
    2 for returns of this size, () or (G, 1). Returns of 0 have no scale, and change none."""
    ratio = popart.raw(size.to(scale.dtype)).amax() / scale
    return torch.where(ratio > 0.0, torch.exp2(ratio.log2().floor().clamp(-32.0, 32.0)), 1.0)


@torch.no_grad()
def choose_scale(popart: PopArtLayer, networks: tuple[EnsembleCritics, ...], gamma: Tensor, batch: Batch, rews: Tensor) -> None:
    """Set the scale of critics' outputs, and of the statistics before any data, if this is the first batch (van Hasselt et al.
    2016, arXiv 1602.07714, choose it for each target).

    Networks should output 1 to 2 for the returns that would result if each reward were the mean reward or, where these are below
    1, for the largest reward. A batch without rewards leaves the scale.

    Args:
        networks: critics and their targets.
        gamma: the largest discount.
        rews: (B, L, 1), multiplied by ``reward_multiplier``.
    """
    real, scale = batch.transition_mask, networks[0].output_scale
    assert scale is not None
    steps = ranks.masked_max(batch.time_idxs[:, 1:].to(rews.dtype), real).clamp(min=1.0)
    size = ranks.masked_mean(rews, real).abs() * torch.minimum(1.0 / (1.0 - gamma), steps)
    growth = _change_of_scale(popart, size, scale)
    shrinkage = _change_of_scale(popart, torch.maximum(size, ranks.masked_max(rews.abs(), real)), scale)
    factor = torch.where(growth > 1.0, growth, shrinkage.clamp(max=1.0))
    factor = torch.where(popart.updates == 0, factor, torch.ones_like(factor))
    popart.scale_start(factor)
    for critics in networks:
        critics.output_scale.mul_(factor)  # type: ignore[union-attr]


@torch.no_grad()
def grow_scale(popart: PopArtLayer, networks: tuple[EnsembleCritics, ...]) -> Tensor:
    """Let the scale of critics' outputs follow the targets when these outgrow it; values stay the same. Returns the factor, ()."""
    scale = networks[0].output_scale
    assert scale is not None
    factor = _change_of_scale(popart, popart.nu.sqrt(), scale).clamp(min=1.0)
    for critics in networks:
        critics.grow_scale(factor)
    return factor


@torch.no_grad()
def update_metrics(
    batch: Batch,
    gammas: Tensor,
    values: PopArtValues,
    out: Tensor | None,
    target: Tensor | None,
    advantage: Tensor | None,
    weight: Tensor | None,
) -> dict[str, Tensor]:
    """Metrics of a batch, over the batches of all ranks.

    Args:
        out, target: critics' outputs (B, L, C, G, O) for the actions of the data, and TD targets (B, L, 1, G, 1).
        advantage, weight: of these actions, (B, L, G, 1). None: not computed.

    Returns:
        rewards, before ``reward_multiplier``; Q and targets in units of return for each discount; others for the main one.
    """
    mask = batch.transition_mask  # (B, L, 1)
    found = {
        "Reward in Batch (mean)": ranks.masked_mean(batch.rews, mask),
        "Reward in Batch (max)": ranks.masked_max(batch.rews, mask),
        "Reward in Batch (min)": ranks.masked_min(batch.rews, mask),
        "Pct. of Terminations in Batch": 100.0 * ranks.masked_mean(batch.dones.float(), mask),
    }
    if out is not None and target is not None:
        q, real = values.returns(values.value(out)), mask[..., None]
        for g, gamma in enumerate(gammas.tolist()):
            label = f"gamma={round(gamma, 4):g}"
            found[f"Q(s, a) ({label})"] = ranks.masked_mean(q[:, :, :, g], real)
            found[f"TD Target ({label})"] = ranks.masked_mean(target[:, :, :, g], real)
        last, y = q[:, :, :, -1], target[:, :, :, -1]
        if q.shape[2] > 1:
            found["Q(s, a) Ensemble Stdev. (main gamma)"] = ranks.masked_mean(last.std(dim=2, keepdim=True), real)
        found["Mean |TD Error| (main gamma)"] = ranks.masked_mean((last - y).abs(), real)
        found["Min TD Target (main gamma)"] = ranks.masked_min(y, real)
        found["Max TD Target (main gamma)"] = ranks.masked_max(y, real)
        if isinstance(values, TwoHotValues):
            beyond = values.bins.beyond(y).float()
            found["Pct. of TD Targets beyond the Bins (main gamma)"] = 100.0 * ranks.masked_mean(beyond, real)
    if advantage is not None and weight is not None:
        advantage, weight = advantage[:, :, -1], weight[:, :, -1]
        found["Advantage (main gamma)"] = ranks.masked_mean(advantage, mask)
        found["Advantage Stdev. (main gamma)"] = ranks.masked_std(advantage, mask)
        found["Filter Weight (main gamma)"] = ranks.masked_mean(weight, mask)
        found["Pct. of Actions Approved by Filter (main gamma)"] = 100.0 * ranks.masked_mean((weight > 0).float(), mask)
    return found
