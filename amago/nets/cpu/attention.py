"""Attention for training in bf16 on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_in_float32(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``scaled_dot_product_attention`` of bf16 tensors, computed in float32 and returned in bf16.

    PyTorch's CPU kernel with a backward pass is slower in bf16 than in float32: an update of 24 sequences of 128 timesteps takes 0.53 s
    with it and 0.37 s with this function (``Agent`` with a Transformer of 3 layers, one core of an Intel Xeon with AMX, torch 2.13; see
    "Fast paths" in docs/notes/performance.md).
    """
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), *args, **kwargs).to(q.dtype)


def suits(q: Tensor) -> bool:
    """Whether `attend_in_float32` is the faster of the two for these queries."""
    return q.requires_grad and q.dtype == torch.bfloat16 and q.is_cpu
