"""Running mean and second moment, as `amago.nets.ff.InputNorm` and `amago.nets.popart.PopArtLayer` keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amago.config import NamedArguments


class RunningMoments(NamedArguments, nn.Module):
    """Mean ``mu`` and second moment ``nu``, which move with rate beta / (1 - (1 - beta)^t) at the t-th update.

    Early in training they are therefore the averages over all updates so far. They are kept in float64: in float32, nu - mu^2 has no
    correct digit where the standard deviation is below 1/3,000 of the mean. On devices without float64 (Apple's MPS) they are in float32.

    Args:
        shape: of both.
        count_shape: of t, broadcast against ``shape``.
        beta: rate for large t.
        init_nu: ``nu`` before any data; ``mu`` is 0.
        initial_samples: number of updates that these initial moments count as.

    Raises:
        ValueError: ``beta`` is outside (0, 1), ``init_nu`` not positive, or ``initial_samples`` negative.
    """

    mu: Tensor
    nu: Tensor
    _t: Tensor

    def __init__(
        self, shape: tuple[int, ...], count_shape: tuple[int, ...], beta: float, init_nu: float, initial_samples: int
    ) -> None:
        super().__init__()
        if not 0.0 < beta < 1.0:
            raise ValueError(f"beta must be in (0, 1), got beta={beta}")
        if not init_nu > 0.0:
            raise ValueError(f"init_nu must be positive, got init_nu={init_nu}")
        if initial_samples < 0:
            raise ValueError(f"initial_samples must not be negative, got initial_samples={initial_samples}")
        self.beta, self.initial_samples = beta, initial_samples
        self.register_buffer("mu", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("nu", torch.full(shape, float(init_nu), dtype=torch.float64))
        self.register_buffer("_t", torch.full(count_shape, float(initial_samples)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        try:
            return super()._apply(fn, recurse)
        except TypeError:  # PyTorch's error where a device has no float64
            self.mu, self.nu = self.mu.float(), self.nu.float()
            return super()._apply(fn, recurse)

    @property
    def variance(self) -> Tensor:
        """nu - mu^2, in the dtype of the parameters of a model (that of t); rounding may leave it just below 0."""
        return (self.nu - self.mu.square()).to(self._t.dtype)

    @torch.no_grad()
    def _move(self, first: Tensor, second: Tensor, use: Tensor, counts: Tensor) -> None:
        """Move ``mu`` towards ``first`` and ``nu`` towards ``second`` where ``use`` is True; add to t where ``counts`` is True."""
        t = self._t + 1
        rate = self.beta / (1 - (1 - self.beta) ** t)
        rate = torch.where(t == 1, 1.0, rate).to(self.nu.dtype)  # rounding would leave 0.02% of what was there before any data
        self._t.copy_(torch.where(counts, t, self._t))
        self.mu.copy_(torch.where(use, (1 - rate) * self.mu + rate * first, self.mu))
        self.nu.copy_(torch.where(use, (1 - rate) * self.nu + rate * second, self.nu))
