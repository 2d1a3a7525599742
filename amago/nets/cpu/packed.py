"""Products with weights that stay as they are for a while, as those of a policy do between two updates.

A library of matrix products rearranges both factors into blocks before it multiplies. With few rows, as a step of some actors has, that
takes as long as the product: 16 rows by a 1024 x 256 weight take 224 us with `torch.nn.functional.linear` and 116 us with a weight that
oneDNN has arranged beforehand, 8 rows 167 and 76 (one core of an AMD EPYC 9004; rearranging takes 170 us, once).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago.nets.utils import WeightCache, autocast_dtype

_WORTH_IT = 1 << 15  # numbers in a weight; below, calling oneDNN costs more than it saves


def pack(weight: Tensor) -> Tensor:
    """``weight`` (d_out, d_in) in the form that `linear` takes fastest, for use without gradient: the weight itself, or a packed copy.

    Packed is what lies on the CPU in float32, where oneDNN is there, unless autocast or an export would have it otherwise.
    """
    if (
        weight.numel() < _WORTH_IT
        or not weight.is_cpu
        or weight.dtype != torch.float32
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or autocast_dtype(weight.device) is not None
    ):
        return weight
    onednn = _onednn()
    return weight if onednn is None else onednn[0](weight.detach())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` with what `pack` gave."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    return _onednn()[1](x, weight, bias, "none", [], "")  # type: ignore[index, no-any-return]


@functools.cache
def _onednn() -> tuple[Any, Any] | None:
    """Functions to pack and to multiply, if this PyTorch has them. They are what its compiler uses for frozen weights, and no part of
    its public interface: they are tried once, and done without where they fail."""
    try:
        ops = torch.ops.mkldnn
        arrange, multiply = ops._reorder_linear_weight.default, ops._linear_pointwise.default
        with torch.no_grad():
            x, weight, bias = torch.linspace(-1, 1, 24).view(2, 12), torch.linspace(-1, 2, 60).view(5, 12), torch.ones(5)
            packed = arrange(weight)
            same = torch.allclose(multiply(x, packed, bias, "none", [], ""), F.linear(x, weight, bias), rtol=1e-4, atol=1e-5)
            return (arrange, multiply) if packed.is_mkldnn and same else None
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return None


class Linear(nn.Linear):
    """`torch.nn.Linear`, faster for a policy that acts: its weight is packed once per version in evaluation mode without gradient."""

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        super().__init__(d_in, d_out, bias)
        self._packed = WeightCache()

    def train(self, mode: bool = True) -> Linear:
        self._packed.clear()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        weight = self.weight
        if self.training or torch.is_grad_enabled():
            return F.linear(x, weight, self.bias)
        return linear(x, self._packed.get((weight,), lambda: pack(weight)), self.bias)
