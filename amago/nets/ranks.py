"""Sums over ranks: the processes that train one agent together, each on its own batch.

Within `joint_batch` the batches of all ranks count as one batch: running statistics, and the means of losses and metrics, are
the same as in one process with all batches. Outside of it, and in one process, nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

_ranks = 1  # that share a batch; 1 outside of `joint_batch`


@contextmanager
def joint_batch(ranks: int) -> Iterator[None]:
    """Treat the batches of this number of ranks as one batch within the block. All ranks must make the same calls in it, in
    order."""
    global _ranks
    before, _ranks = _ranks, ranks
    try:
        yield
    finally:
        _ranks = before


def total(*parts: Tensor) -> tuple[Tensor, ...]:
    """The sums over all ranks of tensors on one device, computed in float64 and in one message; without gradient."""
    if _ranks == 1:
        return parts
    flat = torch.cat([part.detach().reshape(-1).double() for part in parts])
    dist.all_reduce(flat)
    pieces = flat.split([part.numel() for part in parts])
    return tuple(piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts))


def shared_if_not_finite(loss: Tensor) -> Tensor:
    """The loss; over several ranks, with gradients of NaN where it is not finite, so that no rank makes an update with it."""
    return loss if _ranks == 1 else loss * (1.0 + 0.0 * loss.detach())


def divisors(counts: Sequence[Tensor], least: Sequence[float]) -> list[Tensor]:
    """The numbers by which each rank divides its own sums, so that the means of the ranks' quotients are the sums of all over the
    counts of all; in one message.

    Data-parallel training takes the mean of the ranks' losses and gradients. The mean of the ranks' own means would give the
    steps of a rank whose sequences are short more weight.

    Args:
        counts: of this rank.
        least: smallest counts of all ranks together.
    """
    if _ranks == 1:
        return [count.clamp(min=smallest) for count, smallest in zip(counts, least)]
    added = total(*(count.double() for count in counts))
    return [count.clamp(min=smallest) / _ranks for count, smallest in zip(added, least)]


@torch.no_grad()
def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``x`` where ``mask`` (broadcast against it) is True, over the batches of all ranks; 0 where nothing is. Without gradient.

    Non-finite values outside the mask do not affect the result.
    """
    mask = mask.expand_as(x)
    kept = torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
    if _ranks == 1:
        return kept.sum() / mask.sum().clamp(min=1)
    added, count = total(kept.sum(dtype=torch.float64), mask.sum())
    return (added / count.clamp(min=1)).to(x.dtype)


@torch.no_grad()
def masked_std(x: Tensor, mask: Tensor) -> Tensor:
    """Population standard deviation of ``x`` where ``mask`` is True, over the batches of all ranks; without gradient."""
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask).sqrt()


@torch.no_grad()
def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """The largest number of all ranks where ``mask`` is True; -inf where nothing is."""
    largest = torch.where(mask, x, -torch.inf).amax()
    if _ranks > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


@torch.no_grad()
def masked_min(x: Tensor, mask: Tensor) -> Tensor:
    """The smallest number of all ranks where ``mask`` is True; inf where nothing is."""
    return -masked_max(-x, mask)
