"""Log-probabilities of the actions that a policy has chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from amago.nets.distributions import ActionDistribution
from amago.nets.policy_dists import DiscreteOutput
from amago.nets.product import ProductOutput


def log_prob_of_stored(policy: ActionDistribution, stored: Tensor) -> Tensor:
    """Natural log-probabilities (...,) of whole actions in their stored form (..., S); densities where they are continuous.

    They are sums over all numbers of an action, bits included, whereas `ActionDistribution.log_prob_of_vector` takes the mean over
    bits.
    """
    if isinstance(policy, ProductOutput):
        parts = [log_prob_of_stored(factor, stored[..., p.stored]) for factor, p in zip(policy.factors, policy.parts)]
        return torch.stack(parts).sum(dim=0)
    if isinstance(policy, DiscreteOutput):
        return policy.log_prob(stored[..., 0].long())
    return policy.log_prob(stored.float()).sum(dim=-1)
