"""Any distribution of PyTorch as one that agents can train and act with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, TransformedDistribution

from amago.nets.categorical import DiscreteLikeContinuous, categorical_output
from amago.nets.distributions import ONE, ActionDistribution, PolicyOutput, Shape
from amago.nets.policy_dists import MultibinaryOutput


class ContinuousOutput(ActionDistribution):
    """A distribution of PyTorch over numbers.

    Args:
        dist: its samples are (..., A): batch shape (..., A), as `torch.distributions.Normal` has it, or batch shape (...) and one dimension
            of an event, as `torch.distributions.Independent` has it.
        kind: what made it. Its ``action_from_buffer`` changes every action whose density is asked for.
    """

    def __init__(self, dist: Distribution, kind: PolicyOutput) -> None:
        super().__init__(dist.batch_shape)
        self.dist, self.kind = dist, kind
        self.has_rsample = dist.has_rsample

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        return self.dist.sample(sample_shape)  # type: ignore[no-any-return]

    def rsample(self, sample_shape: Shape = ONE) -> Tensor:
        if not self.has_rsample:
            raise NotImplementedError(f"{type(self.dist).__name__} has no reparametrised sample")
        return self.dist.rsample(sample_shape)  # type: ignore[no-any-return]

    @property
    def mean(self) -> Tensor:
        """(..., A); of a transformed distribution the transform of the mean before it."""
        dist = self.dist
        while isinstance(dist, TransformedDistribution):
            dist = dist.base_dist
        value: Tensor = dist.mean
        for transform in _transforms(self.dist):
            value = transform(value)
        return value

    @property
    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        """(..., A), or (..., 1) where the dimensions of an action are one event."""
        log_prob: Tensor = self.dist.log_prob(self.kind.action_from_buffer(action))  # type: ignore[no-untyped-call]
        return log_prob.unsqueeze(-1) if self.dist.event_shape else log_prob

    def clip_like_policy(self, vector: Tensor) -> Tensor:
        return self.kind.action_from_buffer(vector)

    def entropy(self) -> Tensor:
        entropy: Tensor = self.dist.entropy()  # type: ignore[no-untyped-call]
        return entropy.unsqueeze(-1) if self.dist.event_shape else entropy


def _transforms(dist: Distribution) -> list[torch.distributions.Transform]:
    """The transforms of a distribution, in the order in which they are applied."""
    if not isinstance(dist, TransformedDistribution):
        return []
    return [*_transforms(dist.base_dist), *dist.transforms]


def action_distribution(dist: Distribution, kind: PolicyOutput) -> ActionDistribution:
    """A policy's distribution with the interface that agents use; unchanged if it has it.

    Args:
        dist: what ``kind`` returned.
        kind: for its ``action_from_buffer``.

    Raises:
        TypeError: it is not a distribution of PyTorch.
    """
    if isinstance(dist, ActionDistribution):
        return dist
    if isinstance(dist, DiscreteLikeContinuous):
        return dist.categorical
    if isinstance(dist, Categorical):
        return categorical_output(dist, kind)
    if isinstance(dist, Bernoulli):
        return MultibinaryOutput(dist.logits)
    if isinstance(dist, Distribution):
        return ContinuousOutput(dist, kind)
    raise TypeError(f"{type(kind).__name__} must return a torch.distributions.Distribution, got {type(dist).__name__}")
