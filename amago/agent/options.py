"""Choices shared by agents: the discounts trained side by side, and the filters of behaviour cloning."""

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
