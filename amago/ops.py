"""Pure tensor functions.

Shape letters in the whole project: B sequences, L transitions, K sampled actions, C critics, G discounts, A action width.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, float)


def symlog(x: T) -> T:
    """sign(x) log(1 + |x|) of a tensor or a number (Hafner et al. 2023, arXiv 2301.04104)."""
    if isinstance(x, Tensor):
        return torch.sign(x) * torch.log1p(torch.abs(x))
    return math.copysign(math.log1p(abs(x)), x)


def symexp(x: T) -> T:
    """The inverse of `symlog`."""
    if isinstance(x, Tensor):
        return torch.sign(x) * torch.expm1(torch.abs(x))
    return math.copysign(math.expm1(abs(x)), x)


def gamma_feature(gammas: Tensor) -> Tensor:
    """h(gamma) = symlog(1 / clamp(1 - gamma, 1e-6, 1)), the horizon of a discount, an input of critics."""
    return symlog(1.0 / (1.0 - gammas).clamp(1e-6, 1.0))


def n_step_return(rews: Tensor, dones: Tensor, next_values: Tensor, gammas: Tensor, mask: Tensor, n: int = 1) -> Tensor:
    """n-step TD targets.

    y_t = r_t + gamma r_{t+1} + ... + gamma^m V_{t+m}. m is n, or less where the rollout terminates, without a bootstrap value,
    or where the real data end, with the value of the last real observation.

    Args:
        rews, dones: (B, L, ...), reward and termination of step t.
        next_values: (B, L, ...), value of the state *after* step t.
        gammas: broadcast against the trailing dimensions, (G, 1) in the agents.
        mask: (B, L, ...) bool or 0/1, True where step t is real (padding only on the right).
        n: number of rewards, at least 1.

    Returns:
        (B, L, ...) targets, undefined where ``mask`` is False.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got n={n}")
    discount = gammas * (1.0 - dones.to(rews.dtype))
    target = rews + discount * next_values
    next_is_real = mask[:, 1:].to(torch.bool)
    for _ in range(n - 1):
        ahead = torch.where(next_is_real, target[:, 1:], next_values[:, :-1])
        ahead = torch.cat((ahead, next_values[:, -1:]), dim=1)
        target = rews + discount * ahead
    return target


def trace_return(
    rews: Tensor,
    dones: Tensor,
    next_values: Tensor,
    next_taken: Tensor,
    next_traces: Tensor,
    gammas: Tensor,
    mask: Tensor,
) -> Tensor:
    """TD targets over whole sequences.

    y_t = r_t + gamma (V_{t+1} + c_{t+1} (y_{t+1} - Q_{t+1})). Where the rollout terminates, V and c are 0; where the real data
    end, c is. With c of lambda pi it is tree backup (Precup et al. 2000).

    Args:
        rews, dones: (B, L, ...), reward and termination of step t.
        next_values: (B, L, ...), V: value of the state *after* step t.
        next_taken: (B, L, ...), Q: value of the action that the data take there.
        next_traces: (B, L, ...), c: in [0, 1].
        gammas: broadcast against the trailing dimensions, (G, 1) in the agents.
        mask: (B, L, ...) bool or 0/1, True where step t is real (padding only on the right).

    Returns:
        (B, L, ...) targets, 0 where ``mask`` is False.
    """
    real = mask.to(torch.bool)
    goes_on = torch.cat((real[:, 1:], torch.zeros_like(real[:, :1])), dim=1)
    zero = torch.zeros((), dtype=rews.dtype, device=rews.device)
    discount = gammas * (1.0 - dones.to(rews.dtype))
    traces = torch.where(goes_on, next_traces, zero)
    target = rews + discount * (next_values - torch.where(goes_on, traces * next_taken, zero))
    target, factor = torch.where(real, target, zero), torch.where(real, discount * traces, zero)
    # y_t = target_t + factor_t y_{t+1}: each round doubles the number of steps that target and factor span (Hillis & Steele 1986)
    span, length = 1, target.shape[1]
    while span < length:
        ahead = target[:, :-span] + factor[:, :-span] * target[:, span:]
        target = torch.cat((ahead, target[:, -span:]), dim=1)
        if 2 * span < length:
            factor = torch.cat((factor[:, :-span] * factor[:, span:], factor[:, -span:]), dim=1)
        span *= 2
    return target


@torch.no_grad()
def lerp_(targets: list[Tensor], sources: list[Tensor], weight: float | Tensor) -> None:
    """target <- target + weight (source - target), in place. A ``weight`` () on a device is not read by the host."""
    if not isinstance(weight, Tensor):
        torch._foreach_lerp_(targets, sources, weight)
        return
    change = torch._foreach_sub(sources, targets)
    torch._foreach_mul_(change, weight)
    torch._foreach_add_(targets, change)


@torch.no_grad()
def ema_update(target: torch.nn.Module, source: torch.nn.Module, tau: float | Tensor) -> None:
    """target <- (1 - tau) target + tau source, for parameters; buffers are copied."""
    lerp_(list(target.parameters()), list(source.parameters()), tau)
    for t, s in zip(target.buffers(), source.buffers(), strict=True):
        t.copy_(s)


def global_norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of all tensors together."""
    if not tensors:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
