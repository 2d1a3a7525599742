"""How far targets over whole sequences trust what the data did next: trace coefficients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from amago.agent.log_prob import log_prob_of_action
from amago.data.batch import Batch
from amago.data.extras import BEHAVIOUR_LOG_PROB
from amago.nets.distributions import ActionDistribution
from amago.spaces import ActionSpec

TARGETS = ("n_step", "retrace", "tree_backup", "peng")
"""The kinds of targets."""


class Taken(NamedTuple):
    """What the data did in the state *after* each transition. The last row repeats the one before it, and is not used.

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
            f"targets='tree_backup' needs actions with probabilities, but those of {spec.space} have densities: use targets='retrace' "
            "or 'peng'"
        )


def taken_next(targets: str, batch: Batch, action: Tensor) -> Taken | None:
    """The actions of the data that targets of this kind depend on; None if they depend on none.

    Args:
        action: (B, L, A) vectors of the batch's actions.

    Raises:
        ValueError: the batch lacks the behaviour's log-probabilities.
    """
    if targets in ("n_step", "peng"):
        return None
    if targets == "tree_backup":
        return Taken(_later(action), None)
    if BEHAVIOUR_LOG_PROB not in batch.extras:
        raise ValueError(missing_log_prob(batch.extras))
    return Taken(_later(action), _later(batch.extras[BEHAVIOUR_LOG_PROB].float().unsqueeze(-1)))


def missing_log_prob(found: object) -> str:
    """The message where the behaviour's log-probabilities are not declared; ``found`` are the names of the extra fields."""
    return (
        f"targets='retrace' needs the extra field {BEHAVIOUR_LOG_PROB!r}, but the extra fields are {sorted(found)}: "  # type: ignore[call-overload]
        f"pass extra_fields=[{BEHAVIOUR_LOG_PROB!r}] to Experiment, or use targets='tree_backup' or 'peng'"
    )


def _later(x: Tensor) -> Tensor:
    return torch.cat((x[:, 1:], x[:, -1:]), dim=1)


def trace_coefficients(policy: ActionDistribution, taken: Taken, trace_lambda: float) -> Tensor:
    """c (B, L, G, 1): lambda min(1, pi / mu) where the behaviour's probability mu is known, else lambda pi.

    Args:
        policy: pi (B, L, G), in the states after each transition.
    """
    log_ratio = log_prob_of_action(policy, taken.action[:, :, None]).float()
    if taken.log_prob is not None:
        log_ratio = log_ratio - taken.log_prob[:, :, None]
    return trace_lambda * log_ratio.clamp(max=0.0).exp()
