"""Probabilities of actions under a policy: those that it has chosen, all of them, and those of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from amago.nets.distributions import ActionDistribution
from amago.nets.policy_dists import DiscreteOutput, MultibinaryOutput
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


POINT_MASS = 1e9
"""The log-density of a continuous action that was not drawn: so large that its ratio to any other density is 0."""


def behaviour_of(policy: ActionDistribution, stored: Tensor, sample: bool) -> Tensor:
    """What `amago.data.extras.BEHAVIOUR_LOG_PROB` is computed from, (..., 1 + A).

    Args:
        policy: (...).
        stored: (..., S), its actions.
        sample: they were drawn; else they are its mode.

    Returns:
        the log-probability of ``stored``, then for each part of an action, in the order of its vector: the probability of each choice; of
        each bit being 1; zeros for numbers.
    """
    choices = _choices(policy, stored, sample)
    if sample:
        log_prob = log_prob_of_stored(policy, stored)
    else:
        log_prob = torch.full_like(choices[..., 0], POINT_MASS if _has_numbers(policy) else 0.0)
    return torch.cat((log_prob.unsqueeze(-1).to(choices.dtype), choices), dim=-1)


def _choices(policy: ActionDistribution, stored: Tensor, sample: bool) -> Tensor:
    if isinstance(policy, ProductOutput):
        parts = zip(policy.factors, policy.parts)
        return torch.cat([_choices(factor, stored[..., p.stored], sample) for factor, p in parts], dim=-1)
    if isinstance(policy, DiscreteOutput):
        probs = policy.probs
        return probs if sample else torch.nn.functional.one_hot(stored[..., 0].long(), probs.shape[-1]).to(probs.dtype)
    if isinstance(policy, MultibinaryOutput):
        return policy.probs if sample else stored.to(policy.logits.dtype)
    return torch.zeros_like(stored, dtype=torch.float32)


def _has_numbers(policy: ActionDistribution) -> bool:
    if isinstance(policy, ProductOutput):
        return any(_has_numbers(factor) for factor in policy.factors)
    return not isinstance(policy, (DiscreteOutput, MultibinaryOutput))


def log_prob_of_action(policy: ActionDistribution, vector: Tensor) -> Tensor:
    """Natural log-probabilities (..., 1) of whole actions in vector form (..., A), broadcast against the policy: sums over all numbers of an
    action, bits included, as in `log_prob_of_stored`."""
    if isinstance(policy, ProductOutput):
        parts = [log_prob_of_action(factor, vector[..., p.vector]) for factor, p in zip(policy.factors, policy.parts)]
        return torch.stack(parts).sum(dim=0)
    if isinstance(policy, MultibinaryOutput):
        return policy.log_prob(vector.expand_as(policy.logits)).sum(dim=-1, keepdim=True)
    return policy.log_prob_of_vector(vector)
