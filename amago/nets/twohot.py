"""Returns as distributions over bins: labels for classifying critics, and the values of their outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from amago.config import fast_paths
from amago.ops import symexp, symlog

LABELS = ("twohot", "hlgauss")


def two_hot(x: Tensor, values: Tensor) -> Tensor:
    """Split the weight between the two bins next to a number, so that their mean is the number (Bellemare et al. 2017,
    arXiv 1707.06887): numbers (..., 1), and increasing values (O,) of the bins, to labels (..., O).

    Numbers beyond the bins count as the first or last value. Labels of NaN contain NaN.
    """
    values = values.to(x.dtype)
    x = x.clamp(values[0], values[-1])
    low = (torch.searchsorted(values, x.contiguous(), right=True) - 1).clamp(0, len(values) - 2)
    share = (x - values[low]) / (values[low + 1] - values[low])
    labels = torch.zeros(*x.shape[:-1], len(values), dtype=x.dtype, device=x.device)
    labels.scatter_(-1, low, 1.0 - share)
    return labels.scatter_(-1, low + 1, share)


def hl_gauss(x: Tensor, centers: Tensor, sigma: float = 0.75) -> Tensor:
    """The mass of a normal distribution around a number (..., 1) within each bin, normalised, (..., O) (Farebrother et al. 2024,
    arXiv 2403.03950).

    ``centers`` (O,) are evenly spaced; a bin reaches half-way to the next. ``sigma`` is in widths of a bin. Labels are zeros, which
    give no gradient, where a number lies so far beyond the bins that no mass reaches them (`Bins` clamps it first).
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
    def forward(ctx: FunctionCtx, logits: Tensor, labels: Tensor) -> Tensor:
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
        label_type: "twohot" (`two_hot`) or "hlgauss" (`hl_gauss`).
        sigma: standard deviation of the latter, in widths of a bin.
        clamp_labels: "hlgauss" labels of returns beyond the bins equal the labels of the first or last centre; else they are
            zeros far beyond.

    Attributes:
        centers: (O,), in symlog(return) with ``use_symlog``.
        fast: on CPUs, process logits in blocks that stay in the cache.
    """

    centers: Tensor

    def __init__(
        self,
        min_return: float,
        max_return: float,
        output_bins: int,
        use_symlog: bool,
        label_type: str,
        sigma: float,
        clamp_labels: bool = True,
    ) -> None:
        super().__init__()
        if output_bins < 2:
            raise ValueError(f"output_bins must be at least 2, got output_bins={output_bins}")
        if not -math.inf < min_return < max_return < math.inf:
            raise ValueError(f"min_return < max_return must hold, got min_return={min_return}, max_return={max_return}")
        if label_type not in LABELS:
            raise ValueError(f"label_type={label_type!r} is unknown: use one of {', '.join(LABELS)}")
        if not 0.0 < sigma < math.inf:
            raise ValueError(f"sigma must be positive, got sigma={sigma}")
        self.min_return, self.max_return, self.use_symlog = float(min_return), float(max_return), use_symlog
        self.fast = fast_paths()
        self.label_type, self.sigma, self.clamp_labels = label_type, sigma, clamp_labels
        low, high = self.spread(torch.tensor([self.min_return, self.max_return])).tolist()
        self.register_buffer("centers", torch.linspace(low, high, output_bins), persistent=False)

    def spread(self, returns: Tensor) -> Tensor:
        """Returns on the scale of the centres."""
        return symlog(returns) if self.use_symlog else returns

    def unspread(self, x: Tensor) -> Tensor:
        """The inverse of `spread`."""
        return symexp(x) if self.use_symlog else x

    def value(self, logits: Tensor) -> Tensor:
        """The value of distributions, the return at their mean bin: (..., O) -> (..., 1)."""
        with torch.autocast(logits.device.type, enabled=False):  # autocast would round the product to half precision
            if self._in_blocks(logits) and not (logits.requires_grad and torch.is_grad_enabled()):
                value = torch.cat([self._decode(logits[rows].float().softmax(dim=-1)) for rows in _blocks(logits)])
            else:
                value = self._decode(logits.float().softmax(dim=-1))
        return value.unsqueeze(-1)

    def _decode(self, probs: Tensor) -> Tensor:
        """(..., O) -> (...)."""
        return self.unspread(probs @ self.centers.to(probs.dtype))

    def labels(self, returns: Tensor) -> Tensor:
        """The target distributions of returns, (..., 1) -> (..., O)."""
        returns = returns.float()
        if self.label_type == "twohot":
            return two_hot(self.spread(returns), self.centers)
        clamped = returns.clamp(self.min_return, self.max_return) if self.clamp_labels else returns
        return hl_gauss(self.spread(clamped), self.centers, self.sigma)

    def cross_entropy(self, logits: Tensor, returns: Tensor) -> Tensor:
        """The cross-entropy (..., 1) of logits (..., O) against the labels of returns (..., 1), which broadcast."""
        labels = self.labels(returns)
        *lead, bins = torch.broadcast_shapes(logits.shape, labels.shape)
        if not lead or not self._in_blocks(logits):
            return -(labels * logits.float().log_softmax(dim=-1)).sum(dim=-1, keepdim=True)
        loss: Tensor = _CrossEntropy.apply(logits.float().expand(*lead, bins), labels.expand(*lead, bins))
        return loss

    def _in_blocks(self, logits: Tensor) -> bool:
        return self.fast and logits.is_cpu and logits.ndim > 1 and logits.numel() > 0 and not torch.compiler.is_compiling()

    def beyond(self, returns: Tensor) -> Tensor:
        """True where a return lies outside of the bins, so that no output represents it."""
        return (returns < self.min_return) | (returns > self.max_return)

    def initial_logits(self, init_value: float) -> Tensor:
        """Logits (O,), linear in the bin, of a distribution whose value is ``init_value``.

        Raises:
            ValueError: it does not lie strictly between ``min_return`` and ``max_return``.
        """
        if not self.min_return < init_value < self.max_return:
            raise ValueError(
                f"init_value must lie strictly between min_return={self.min_return} and max_return={self.max_return}, "
                f"got init_value={init_value}"
            )
        x = torch.linspace(-0.5, 0.5, len(self.centers), dtype=torch.float64)
        low, high = torch.tensor([-50.0, 50.0], dtype=torch.float64) * len(x)
        for _ in range(100):  # the value grows with the tilt: bisect
            tilt = 0.5 * (low + high)
            low, high = (tilt, high) if self._decode((tilt * x).softmax(0)) < init_value else (low, tilt)
        return (tilt * x).log_softmax(0).float()
