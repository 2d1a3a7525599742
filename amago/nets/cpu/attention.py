"""Attention for training in bf16 on a CPU."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_LONGEST = 256
"""Sequences up to this length are attended by plain products, which keep L^2 weights for the backward pass."""


def attend_in_bf16(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """``scaled_dot_product_attention`` of bf16 tensors (B, H, L, D), with the same arguments, for tensors that need gradients.

    PyTorch's CPU kernel with a backward pass is slower in bf16 than in float32: an update of 24 sequences of 128 timesteps takes
    0.53 s with it, 0.37 s with attention in float32, and 0.34 s with plain products in bf16 (``Agent`` with a Transformer of 3 layers, one core of
    an Intel Xeon with AMX, torch 2.13; see "Fast paths" in docs/notes/performance.md).
    """
    with torch.autocast("cpu", enabled=False):
        if q.shape[2] > _LONGEST or dropout_p > 0.0 or mask is not None:
            out = F.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), mask, dropout_p=dropout_p, is_causal=is_causal
            )
            return out.to(q.dtype)
        shape, length = q.shape, q.shape[2]
        q, k, v = (x.reshape(-1, length, shape[-1]) for x in (q, k, v))
        bias = torch.full((length, length), -math.inf, dtype=q.dtype).triu(1) if is_causal else q.new_zeros(())
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(dim=-1), v).view(shape)


def suits(q: Tensor) -> bool:
    """Whether `attend_in_bf16` is faster than PyTorch's kernel for these queries."""
    return q.requires_grad and q.dtype == torch.bfloat16 and q.is_cpu
