"""Targets over whole sequences, `Agent.targets`: Retrace (arXiv 1606.02647) and tree backup (Precup et al. 2000); and the
probabilities of actions under policy and behaviour that they need."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from amago import ops
from amago.data.batch import Batch
from amago.data.extras import BEHAVIOUR_LOG_PROB, POINT_MASS
from amago.nets import ranks
from amago.nets.distributions import ActionDistribution, ProductOutput
from amago.nets.policy_dists import DiscreteOutput, MultibinaryOutput
from amago.nets.utils import Log
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


def actions_taken_next(targets: str, batch: Batch, action: Tensor) -> Taken:
    """The actions of the data that targets of this kind depend on, given the vectors (B, L, A) of the batch's actions.

    Raises:
        ValueError: the batch lacks the behaviour's log-probabilities.
    """

    def later(x: Tensor) -> Tensor:
        return torch.cat((x[:, 1:], x[:, -1:]), dim=1)

    if targets == "tree_backup":
        return Taken(later(action), None)
    if BEHAVIOUR_LOG_PROB not in batch.extras:
        raise ValueError(
            f"targets='retrace' needs the extra field {BEHAVIOUR_LOG_PROB!r}, but the extra fields are {sorted(batch.extras)}: "
            f"pass extra_fields=[{BEHAVIOUR_LOG_PROB!r}] to Experiment, or use targets='tree_backup'"
        )
    return Taken(later(action), later(batch.extras[BEHAVIOUR_LOG_PROB].float().unsqueeze(-1)))


def trace_targets(
    policy: ActionDistribution,
    taken: Taken,
    trace_lambda: float,
    rews: Tensor,
    dones: Tensor,
    value: Tensor,
    of_taken: Tensor,
    gammas: Tensor,
    real: Tensor,
    log: Log = None,
) -> Tensor:
    """`amago.ops.trace_return` (B, L, 1, G, 1) with traces lambda min(1, pi / mu) where the behaviour's probability mu is known,
    else lambda pi.

    Args:
        policy: pi (B, L, G), in the states after each transition.
        value, of_taken: (B, L, 1, G, 1), of those states, and of the actions ``taken`` there.
        others: as of that function; (B, L, 1, 1 or G, 1).
    """
    log_ratio = _log_prob_of_vector(policy, taken.action[:, :, None]).float()
    if taken.log_prob is not None:
        largest = None if _has_numbers(policy) else 0.0  # of probabilities; `POINT_MASS` is a density
        log_ratio = log_ratio - (taken.log_prob if largest is None else taken.log_prob.clamp(max=largest))[:, :, None]
    traces = (trace_lambda * log_ratio.clamp(max=0.0).exp())[:, :, None]
    if log is not None:
        log["Trace Coefficient (main gamma)"] = ranks.masked_mean(traces[:, :-1, :, -1], real[:, 1:, :, 0])
    return ops.trace_return(rews, dones, value, of_taken, traces, gammas, real)


# ---- probabilities of actions ---


def _parts(policy: ActionDistribution) -> list[tuple[ActionDistribution, slice, slice]]:
    """The distributions of the parts of an action, with their columns in its vector and in its stored form."""
    if isinstance(policy, ProductOutput):
        return [(factor, part.vector, part.stored) for factor, part in zip(policy.factors, policy.parts)]
    return [(policy, slice(None), slice(None))]


def _has_numbers(policy: ActionDistribution) -> bool:
    """True where actions have continuous parts, and therefore densities."""
    return not all(isinstance(part, DiscreteOutput | MultibinaryOutput) for part, _, _ in _parts(policy))


def _log_prob_of_vector(policy: ActionDistribution, vector: Tensor) -> Tensor:
    """`log_prob_of_stored` (..., 1) of vectors (..., A), broadcast against the policy."""
    each = []
    for part, at, _ in _parts(policy):
        if isinstance(part, MultibinaryOutput):
            each.append(part.log_prob(vector[..., at].expand_as(part.logits)).sum(dim=-1, keepdim=True))
        else:
            each.append(part.log_prob_of_vector(vector[..., at]))
    return torch.stack(each).sum(dim=0)


def log_prob_of_stored(policy: ActionDistribution, stored: Tensor) -> Tensor:
    """Natural log-probabilities (...,) of whole actions in their stored form (..., S); densities where they are continuous.

    They are sums over all numbers of an action, bits included, whereas `ActionDistribution.log_prob_of_vector` takes the mean
    over bits.
    """
    each = []
    for part, _, at in _parts(policy):
        discrete = isinstance(part, DiscreteOutput)
        action = stored[..., at]
        each.append(part.log_prob(action[..., 0].long()) if discrete else part.log_prob(action.float()).sum(dim=-1))
    return torch.stack(each).sum(dim=0)


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
    each = []
    for part, _, at in _parts(policy):
        action = stored[..., at]
        if not isinstance(part, DiscreteOutput | MultibinaryOutput):
            each.append(torch.zeros_like(action, dtype=torch.float32))
        elif sample:
            each.append(part.probs)
        elif isinstance(part, DiscreteOutput):
            each.append(torch.nn.functional.one_hot(action[..., 0].long(), part.probs.shape[-1]).to(part.probs.dtype))
        else:
            each.append(action.to(part.logits.dtype))
    probs = torch.cat(each, dim=-1)
    if sample:
        log_prob = log_prob_of_stored(policy, stored)
    else:
        log_prob = torch.full_like(probs[..., 0], POINT_MASS if _has_numbers(policy) else 0.0)
    return torch.cat((log_prob.unsqueeze(-1).to(probs.dtype), probs), dim=-1)
