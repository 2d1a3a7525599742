"""Targets over whole sequences, `Agent.targets`: tree backup (Precup et al. 2000); and probabilities of whole actions."""

from __future__ import annotations

import torch
from torch import Tensor

from amago import ops
from amago.nets import ranks
from amago.nets.distributions import ActionDistribution, ProductOutput
from amago.nets.policy_dists import DiscreteOutput, MultibinaryOutput
from amago.nets.utils import Log
from amago.spaces import ActionSpec

TARGETS = ("n_step", "tree_backup")
"""The kinds of targets."""


def check_targets(targets: str, spec: ActionSpec) -> None:
    """Raise ValueError if the kind of targets does not fit the actions."""
    if targets == "tree_backup" and any(part.kind == "continuous" for part in spec.parts):
        raise ValueError(
            f"targets='tree_backup' needs actions with probabilities, but those of {spec.space} have densities: use targets='n_step'"
        )


def trace_targets(
    policy: ActionDistribution,
    taken: Tensor,
    trace_lambda: float,
    rews: Tensor,
    dones: Tensor,
    value: Tensor,
    of_taken: Tensor,
    gammas: Tensor,
    real: Tensor,
    log: Log = None,
) -> Tensor:
    """`amago.ops.trace_return` (B, L, 1, G, 1) with traces lambda pi.

    Args:
        policy: pi (B, L, G), in the states after each transition.
        taken: (B, L, A) vectors of the actions of the data there. The last is not used.
        value, of_taken: (B, L, 1, G, 1), of those states, and of the actions ``taken``.
        others: as of that function; (B, L, 1, 1 or G, 1).
    """
    traces = (trace_lambda * _log_prob_of_vector(policy, taken[:, :, None]).float().clamp(max=0.0).exp())[:, :, None]
    if log is not None:
        log["Trace Coefficient (main gamma)"] = ranks.masked_mean(traces[:, :-1, :, -1], real[:, 1:, :, 0])
    return ops.trace_return(rews, dones, value, of_taken, traces, gammas, real)


# ---- probabilities of actions ---


def _parts(policy: ActionDistribution) -> list[tuple[ActionDistribution, slice, slice]]:
    """The distributions of the parts of an action, with their columns in its vector and in its stored form."""
    if isinstance(policy, ProductOutput):
        return [(factor, part.vector, part.stored) for factor, part in zip(policy.factors, policy.parts)]
    return [(policy, slice(None), slice(None))]


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
