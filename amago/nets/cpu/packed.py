"""Linear layers with prepacked oneDNN weights, for inference.

A matrix library rearranges both factors before it multiplies. With few rows, as in a step of a few actors, that takes as long
as the product itself; a policy's weights stay the same between two updates, so they are packed once. docs/notes/performance.md
has figures. Without AVX-512 the packed product is slower than the plain one, and nothing is packed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago.config import fast_paths
from amago.nets.cpu.weight_cache import WeightCache
from amago.nets.utils import autocast_dtype

_MIN_NUMEL = (1 << 16) + 1
"""Smaller weights are not packed: the call of oneDNN costs more than it saves (256 x 256 with 16 rows: 62 us against 34)."""


def pack(weight: Tensor) -> Tensor:
    """A packed copy of ``weight`` (d_out, d_in) for `linear`, or the weight itself where packing does not apply.

    Large float32 weights on a CPU are packed if this PyTorch has oneDNN; not under autocast, while gradients are on, or while a
    model is compiled or traced.
    """
    if (
        weight.numel() < _MIN_NUMEL
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
    """`torch.nn.functional.linear` for a weight from `pack`."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    return _onednn()[1](x, weight, bias, "none", [], "")  # type: ignore[index, no-any-return]


@functools.cache
def _onednn() -> tuple[Any, Any] | None:
    """The functions that pack and multiply, or None without AVX-512, or if this PyTorch lacks them or they fail on a small example.

    PyTorch's compiler uses them for frozen weights; they are not part of its public interface.
    """
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return None
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
    """`torch.nn.Linear` whose weight is packed in evaluation mode without gradients.

    Attributes:
        fast: pack the weight.
    """

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        super().__init__(d_in, d_out, bias)
        self.fast, self._packed = fast_paths(), WeightCache()

    def train(self, mode: bool = True) -> Linear:
        self._packed.clear()
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        weight = self.weight
        if not self.fast or self.training or torch.is_grad_enabled():
            return F.linear(x, weight, self.bias)
        return linear(x, self._packed.get((weight,), lambda: pack(weight)), self.bias)
