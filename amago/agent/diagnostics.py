"""Metrics of a training batch, over the batches of all ranks (`amago.nets.ranks`). None of them affects training."""

from __future__ import annotations

import torch
from torch import Tensor

from amago.nets import ranks


def gamma_label(gamma: float) -> str:
    """0.999 -> "gamma=0.999"."""
    return f"gamma={round(float(gamma), 4):g}"


@torch.no_grad()
def critic_metrics(q: Tensor, target: Tensor, gammas: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Q and TD targets in units of return for each discount; the ensemble's spread and the TD error for the main one.

    Args:
        q: (B, L, C, G, 1) estimates; target: (B, L, 1, G, 1); mask: (B, L, 1).
    """
    real = mask[..., None]  # (B, L, 1, 1)
    out = {}
    for g, gamma in enumerate(gammas.tolist()):
        label, qg, yg = gamma_label(gamma), q[:, :, :, g], target[:, :, :, g]
        out[f"Q(s, a) ({label})"] = ranks.masked_mean(qg, real)
        out[f"TD Target ({label})"] = ranks.masked_mean(yg, real)
    last, y = q[:, :, :, -1], target[:, :, :, -1]
    if q.shape[2] > 1:
        out["Q(s, a) Ensemble Stdev. (main gamma)"] = ranks.masked_mean(last.std(dim=2, keepdim=True), real)
    out["Mean |TD Error| (main gamma)"] = ranks.masked_mean((last - y).abs(), real)
    out["Min TD Target (main gamma)"] = ranks.masked_min(y, real)
    out["Max TD Target (main gamma)"] = ranks.masked_max(y, real)
    return out


@torch.no_grad()
def advantage_metrics(adv: Tensor, weight: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Advantages and filter weights (B, L, G, 1) of the main discount."""
    adv, weight = adv[:, :, -1], weight[:, :, -1]
    return {
        "Advantage (main gamma)": ranks.masked_mean(adv, mask),
        "Advantage Stdev. (main gamma)": ranks.masked_std(adv, mask),
        "Filter Weight (main gamma)": ranks.masked_mean(weight, mask),
        "Pct. of Actions Approved by Filter (main gamma)": 100.0 * ranks.masked_mean((weight > 0).float(), mask),
    }


@torch.no_grad()
def batch_metrics(rews: Tensor, dones: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Rewards, before ``reward_multiplier``, and terminations (B, L, 1) of the sequences."""
    return {
        "Reward in Batch (mean)": ranks.masked_mean(rews, mask),
        "Reward in Batch (max)": ranks.masked_max(rews, mask),
        "Reward in Batch (min)": ranks.masked_min(rews, mask),
        "Pct. of Terminations in Batch": 100.0 * ranks.masked_mean(dones.float(), mask),
    }
