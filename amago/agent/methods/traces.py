"""Targets over whole sequences, `Agent.targets`: Retrace (arXiv 1606.02647) and tree backup (Precup et al. 2000); and the
probabilities of actions under policy and behaviour that they need."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from amago.data.batch import Batch
from amago.data.extras import BEHAVIOUR_LOG_PROB, POINT_MASS
from amago.nets.distributions import ActionDistribution, ProductOutput
from amago.nets.policy_dists import DiscreteOutput, MultibinaryOutput
from amago.spaces import ActionSpec

TARGETS = ("n_step", "retrace", "tree_backup")
"""The kinds of targets."""


class Taken(NamedTuple):
    """The actions of the data in the state *after* each transition. The last row repeats the previous one, and is not used.

    Attributes:
        action: (B, L, A) vectors.
        log_prob: (B, L, 1) of the behaviour; None where nothing depends on it.
    """

    action: Tensor
    log_prob: Tensor | None


def check_targets(targets: str, spec: ActionSpec) -> None:
    """Raise ValueError if the kind of targets does not fit the actions."""
    if targets == "tree_backup" and any(part.kind == "continuous" for part in spec.parts):
        raise ValueError(
            f"targets='tree_backup' needs actions with probabilities, but those of {spec.space} have densities: use targets='retrace'"
        )


def taken_next(targets: str, batch: Batch, action: Tensor) -> Taken:
    """The actions of the data that targets of this kind depend on, given the vectors (B, L, A) of the batch's actions.

    Raises:
        ValueError: the batch lacks the behaviour's log-probabilities.
    """
    if targets == "tree_backup":
        return Taken(_later(action), None)
    if BEHAVIOUR_LOG_PROB not in batch.extras:
        raise ValueError(
            f"targets='retrace' needs the extra field {BEHAVIOUR_LOG_PROB!r}, but the extra fields are {sorted(batch.extras)}: "
            f"pass extra_fields=[{BEHAVIOUR_LOG_PROB!r}] to Experiment, or use targets='tree_backup'"
        )
    return Taken(_later(action), _later(batch.extras[BEHAVIOUR_LOG_PROB].float().unsqueeze(-1)))


def _later(x: Tensor) -> Tensor:
    return torch.cat((x[:, 1:], x[:, -1:]), dim=1)


def trace_coefficients(policy: ActionDistribution, taken: Taken, trace_lambda: float) -> Tensor:
    """c (B, L, G, 1): lambda min(1, pi / mu) where the behaviour's probability mu is known, else lambda pi.

    Args:
        policy: pi (B, L, G), in the states after each transition.
    """
    log_ratio = log_prob_of_action(policy, taken.action[:, :, None]).float()
    if taken.log_prob is not None:
        largest = None if has_numbers(policy) else 0.0  # of probabilities; `POINT_MASS` is a density
        log_ratio = log_ratio - (taken.log_prob if largest is None else taken.log_prob.clamp(max=largest))[:, :, None]
    return trace_lambda * log_ratio.clamp(max=0.0).exp()


# ---- probabilities of actions ---


def log_prob_of_stored(policy: ActionDistribution, stored: Tensor) -> Tensor:
    """Natural log-probabilities (...,) of whole actions in their stored form (..., S); densities where they are continuous.

    They are sums over all numbers of an action, bits included, whereas `ActionDistribution.log_prob_of_vector` takes the mean
    over bits.
    """
    if isinstance(policy, ProductOutput):
        parts = [log_prob_of_stored(factor, stored[..., p.stored]) for factor, p in zip(policy.factors, policy.parts)]
        return torch.stack(parts).sum(dim=0)
    if isinstance(policy, DiscreteOutput):
        return policy.log_prob(stored[..., 0].long())
    return policy.log_prob(stored.float()).sum(dim=-1)


def behaviour_of(policy: ActionDistribution, stored: Tensor, sample: bool) -> Tensor:
    """The probabilities from which `amago.data.extras.BEHAVIOUR_LOG_PROB` is computed, (..., 1 + A).

    Args:
        policy: (...).
        stored: (..., S), its actions.
        sample: they were drawn; else they are its mode.

    Returns:
        the log-probability of ``stored``, then for each part of an action, in the order of its vector: the probability of each
        choice; of each bit being 1; zeros for numbers.
    """
    choices = _choices(policy, stored, sample)
    if sample:
        log_prob = log_prob_of_stored(policy, stored)
    else:
        log_prob = torch.full_like(choices[..., 0], POINT_MASS if has_numbers(policy) else 0.0)
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


def has_numbers(policy: ActionDistribution) -> bool:
    """True where actions have continuous parts, and therefore densities."""
    if isinstance(policy, ProductOutput):
        return any(has_numbers(factor) for factor in policy.factors)
    return not isinstance(policy, (DiscreteOutput, MultibinaryOutput))


def log_prob_of_action(policy: ActionDistribution, vector: Tensor) -> Tensor:
    """Natural log-probabilities (..., 1) of whole actions in vector form (..., A), broadcast against the policy: sums over all
    numbers of an action, bits included, as in `log_prob_of_stored`."""
    if isinstance(policy, ProductOutput):
        parts = [log_prob_of_action(factor, vector[..., p.vector]) for factor, p in zip(policy.factors, policy.parts)]
        return torch.stack(parts).sum(dim=0)
    if isinstance(policy, MultibinaryOutput):
        return policy.log_prob(vector.expand_as(policy.logits)).sum(dim=-1, keepdim=True)
    return policy.log_prob_of_vector(vector)
