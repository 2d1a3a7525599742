"""Choices shared by agents: the discounts trained side by side, the filters of behaviour cloning, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import gin
import torch
from torch import Tensor

from amago import ops


@gin.configurable(module="amago.agent")
def Multigammas(
    discrete: Sequence[float] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995),
    continuous: Sequence[float] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995),
) -> tuple[list[float], list[float]]:
    """Discounts trained beside the main one, for discrete and for other action spaces (arXiv 2310.09971, appendix A)."""
    return list(discrete), list(continuous)


def gammas_for(kind: str, gamma: float, use_multigamma: bool) -> Tensor:
    """(G,) discounts, the main one last.

    Raises:
        ValueError: a discount outside [0, 1).
    """
    discrete, continuous = Multigammas()
    others = (discrete if kind == "discrete" else continuous) if use_multigamma else []
    for g in [*others, gamma]:
        if not 0.0 <= g < 1.0:
            raise ValueError(f"discounts must lie in [0, 1), got gamma={g}")
    return torch.tensor([*others, gamma], dtype=torch.float32)


@gin.configurable(module="amago.agent")
def binary_filter(adv: Tensor, threshold: float = 0.0) -> Tensor:
    """Imitate only actions whose advantage is above ``threshold``."""
    return ops.binary_filter(adv, threshold)


@gin.configurable(module="amago.agent")
def exp_filter(
    adv: Tensor, beta: float = 1.0, clip_weights_low: float | None = None, clip_weights_high: float | None = None
) -> Tensor:
    """Imitate with weight exp(beta x advantage), kept in [clip_weights_low, clip_weights_high] where those are given."""
    return ops.exp_filter(adv, beta, clip_weights_low, clip_weights_high)


@gin.configurable(module="amago.agent")
def leaky_relu_filter(
    adv: Tensor,
    beta: float = 1.0,
    neg_slope: float = 0.05,
    clip_weights_low: float | None = None,
    clip_weights_high: float | None = None,
) -> Tensor:
    """Imitate with weight beta x advantage where that is positive, and neg_slope times it, a slight push away from the action,
    where it is negative; kept in [clip_weights_low, clip_weights_high] where those are given.

    Nothing bounds how unlikely a pushed-away action of a continuous policy becomes: ``clip_weights_low=0`` only ever imitates.
    """
    weights = torch.nn.functional.leaky_relu(beta * adv, negative_slope=neg_slope)
    if clip_weights_low is not None or clip_weights_high is not None:
        weights = weights.clamp(clip_weights_low, clip_weights_high)
    return weights


def check_options(**options: float) -> None:
    """Raise ValueError, naming the argument, for the first that is out of range, or if nothing would train the actor."""
    for name, value in options.items():
        if name == "tau":
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must lie in (0, 1], got {name}={value}")
        elif name == "reward_multiplier":
            if not value > 0.0:
                raise ValueError(f"{name} must be positive, got {name}={value}")
        elif name.endswith("_coeff"):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {name}={value}")
        elif value < 1 or int(value) != value:
            raise ValueError(f"{name} must be a whole number of at least 1, got {name}={value}")
    if options["online_coeff"] == 0 and options["offline_coeff"] == 0:
        raise ValueError("online_coeff and offline_coeff are both 0: nothing would train the actor")


def check_gamma_idx(name: str, gamma_idx: int, gammas: Tensor) -> None:
    """Raise ValueError, naming the argument and the discounts, for an index that none of them has."""
    if not -len(gammas) <= gamma_idx < len(gammas):
        raise ValueError(f"{name}={gamma_idx} is the index of none of the discounts {[round(g, 6) for g in gammas.tolist()]}")
