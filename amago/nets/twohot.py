"""Returns as distributions over bins: labels for classifying critics, and the values of their outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amago.config import fast_paths
from amago.ops import symexp, symlog

LABELS = ("two_hot", "hl_gauss")


def two_hot(x: Tensor, centers: Tensor) -> Tensor:
    """Split the weight between the two bins next to a number, so that their mean is the number (Bellemare et al. 2017, arXiv
    1707.06887).

    Args:
        x: (..., 1); numbers beyond the bins count as the first or last centre.
        centers: (O,), evenly spaced.

    Returns:
        (..., O), summing to 1.
    """
    width = (centers[-1] - centers[0]) / (len(centers) - 1)
    position = ((x - centers[0]) / width).clamp(0, len(centers) - 1)
    low = position.floor().clamp(max=len(centers) - 2)
    labels = torch.zeros(*x.shape[:-1], len(centers), dtype=x.dtype, device=x.device)
    labels.scatter_(-1, low.long(), 1.0 - (position - low))
    return labels.scatter_(-1, low.long() + 1, position - low)


def hl_gauss(x: Tensor, centers: Tensor, sigma: float = 0.75) -> Tensor:
    """The mass of a normal distribution around a number within each bin, normalised (Farebrother et al. 2024, arXiv 2403.03950).

    Args:
        x: (..., 1).
        centers: (O,), evenly spaced; a bin reaches half-way to the next.
        sigma: standard deviation, in widths of a bin.

    Returns:
        (..., O), summing to 1; zeros, which give no gradient, where a number lies so far beyond the bins that no mass reaches
        them.
    """
    width = (centers[-1] - centers[0]) / (len(centers) - 1)
    edges = torch.cat((centers - 0.5 * width, centers[-1:] + 0.5 * width))
    mass = (0.5 * torch.erf((edges - x) / (sigma * width * math.sqrt(2.0)))).diff(dim=-1)
    return mass / mass.sum(dim=-1, keepdim=True).clamp(min=1e-6)


_BLOCK = 2**18
"""Logits processed together: 1 MB, which stays in the cache between the passes of a softmax."""


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices of the first dimension, of about `_BLOCK` numbers each."""
    step = max(1, _BLOCK * len(x) // max(1, x.numel()))
    return (slice(i, i + step) for i in range(0, len(x), step))


class _CrossEntropy(torch.autograd.Function):
    """-sum_o label_o log softmax(logits)_o, (..., O) -> (..., 1).

    Only logits and labels are kept for backward, which recomputes the softmax.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        out = logits.new_empty((*logits.shape[:-1], 1))
        for rows in _blocks(logits):
            out[rows] = -(labels[rows] * logits[rows].log_softmax(dim=-1)).sum(dim=-1, keepdim=True)
        ctx.save_for_backward(logits, labels)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            return (logits.softmax(dim=-1) * labels.sum(dim=-1, keepdim=True) - labels) * grad, None
        out = torch.empty_like(logits)
        for rows in _blocks(logits):
            label = labels[rows]
            wrong = logits[rows].softmax(dim=-1).mul_(label.sum(dim=-1, keepdim=True)).sub_(label)
            torch.mul(wrong, grad[rows], out=out[rows])
        return out, None


class Bins(nn.Module):
    """O bins between two returns.

    Args:
        min_return, max_return: centres of the first and the last bin.
        output_bins: O, at least 2.
        use_symlog: space them evenly in symlog(return), so that their width grows with the return; else in the return.
        labels: "two_hot" (`two_hot`) or "hl_gauss" (`hl_gauss`).
        hl_gauss_sigma: standard deviation of the latter, in widths of a bin.

    Attributes:
        fast: on CPUs, process logits in blocks that stay in the cache.
    """

    centers: Tensor

    def __init__(
        self, min_return: float, max_return: float, output_bins: int, use_symlog: bool, labels: str, hl_gauss_sigma: float
    ) -> None:
        super().__init__()
        if output_bins < 2:
            raise ValueError(f"output_bins must be at least 2, got output_bins={output_bins}")
        if not -math.inf < min_return < max_return < math.inf:
            raise ValueError(f"min_return < max_return must hold, got min_return={min_return}, max_return={max_return}")
        if labels not in LABELS:
            raise ValueError(f"labels={labels!r} is unknown: use one of {', '.join(LABELS)}")
        if not 0.0 < hl_gauss_sigma < math.inf:
            raise ValueError(f"hl_gauss_sigma must be positive, got hl_gauss_sigma={hl_gauss_sigma}")
        self.min_return, self.max_return, self.use_symlog = float(min_return), float(max_return), use_symlog
        self.fast = fast_paths()
        self.labels_type, self.hl_gauss_sigma = labels, hl_gauss_sigma
        low, high = self._spread(torch.tensor([self.min_return, self.max_return])).tolist()
        self.register_buffer("centers", torch.linspace(low, high, output_bins), persistent=False)

    def _spread(self, returns: Tensor) -> Tensor:
        return symlog(returns) if self.use_symlog else returns

    def value(self, logits: Tensor) -> Tensor:
        """The return at the expected bin, (..., O) -> (..., 1)."""
        with torch.autocast(logits.device.type, enabled=False):  # autocast would round the product to half precision
            if self._in_blocks(logits) and not (logits.requires_grad and torch.is_grad_enabled()):
                expected = torch.cat([logits[rows].float().softmax(dim=-1) @ self.centers for rows in _blocks(logits)])
            else:
                expected = logits.float().softmax(dim=-1) @ self.centers
        expected = expected.unsqueeze(-1)
        return symexp(expected) if self.use_symlog else expected

    def labels(self, returns: Tensor) -> Tensor:
        """The target distributions of returns, (..., 1) -> (..., O)."""
        x = self._spread(returns.float())
        return two_hot(x, self.centers) if self.labels_type == "two_hot" else hl_gauss(x, self.centers, self.hl_gauss_sigma)

    def cross_entropy(self, logits: Tensor, returns: Tensor) -> Tensor:
        """The cross-entropy (..., 1) of logits (..., O) against the labels of returns (..., 1), which broadcast."""
        labels = self.labels(returns)
        *lead, bins = torch.broadcast_shapes(logits.shape, labels.shape)
        if not lead or not self._in_blocks(logits):
            return -(labels * logits.float().log_softmax(dim=-1)).sum(dim=-1, keepdim=True)
        loss: Tensor = _CrossEntropy.apply(logits.float().expand(*lead, bins), labels.expand(*lead, bins))
        return loss

    def _in_blocks(self, logits: Tensor) -> bool:
        return self.fast and logits.is_cpu and logits.ndim > 1 and logits.numel() > 0

    def beyond(self, returns: Tensor) -> Tensor:
        """True where a return lies outside of the bins, so that no output represents it."""
        return (returns < self.min_return) | (returns > self.max_return)

    def max_entropy_logits(self, init_value: float) -> Tensor:
        """Logits (O,) of the distribution of maximum entropy whose value is ``init_value``.

        Raises:
            ValueError: ``init_value`` does not lie strictly between ``min_return`` and ``max_return``.
        """
        if not self.min_return < init_value < self.max_return:
            raise ValueError(
                f"init_value must lie strictly between min_return={self.min_return} and max_return={self.max_return}, "
                f"got init_value={init_value}"
            )
        goal = self._spread(torch.tensor(init_value, dtype=torch.float64))
        centers = self.centers.double()
        x = (centers - centers.mean()) / (centers[-1] - centers[0])
        # The maximum-entropy distribution of a given mean is exponential in the bin. The mean grows with its rate: bisect.
        low, high = torch.tensor([-50.0, 50.0], dtype=torch.float64) * len(x)
        for _ in range(100):
            rate = 0.5 * (low + high)
            mean = ((rate * x).softmax(0) * centers).sum()
            low, high = (rate, high) if mean < goal else (low, rate)
        return (rate * x).log_softmax(0).float()
