"""Linear layers of given spectral norm, and modules that keep their effective weights while they act."""

from __future__ import annotations

from typing import Any

import gin
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago.config import NamedArguments
from amago.nets.cpu.packed import linear, pack
from amago.nets.cpu.weight_cache import WeightCache
from amago.nets.utils import check_positive


@gin.configurable(module="amago.nets.transformer")
class SigmaReparam(NamedArguments, nn.Module):
    """A linear layer of given spectral norm: x (gamma / sigma(W) W)^T + b, where sigma(W) is the spectral norm of W.

    sigma = u W v. In training mode, each forward pass first improves u and v by one power iteration; evaluation mode does not.

    Args:
        d_in, d_out: widths.
        bias: add b.
        fast_init: find u and v of a new layer by 15 power iterations instead of a singular value decomposition, whose time grows with
            the cube of the width. sigma then starts a few percent below the norm, and training improves it.

    Raises:
        ValueError: a width below 1.
    """

    u: Tensor
    v: Tensor

    def __init__(self, d_in: int, d_out: int, bias: bool = True, fast_init: bool = False) -> None:
        super().__init__()
        check_positive(d_in=d_in, d_out=d_out)
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(d_out, d_in), std=0.02))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None
        self.gamma = nn.Parameter(torch.ones(1))
        weight = self.weight.detach()
        if fast_init:
            v = F.normalize(torch.randn(d_in), dim=0)
            for _ in range(15):
                u = F.normalize(weight @ v, dim=0)
                v = F.normalize(weight.t() @ u, dim=0)
        else:
            left, _, right = torch.linalg.svd(weight, full_matrices=False)
            u, v = left[:, 0].clone(), right[0].clone()
        self.register_buffer("u", u)
        self.register_buffer("v", v)

    def effective_weight(self) -> Tensor:
        """gamma / sigma(W) W, (d_out, d_in); in training mode after one power iteration."""
        with torch.autocast(self.weight.device.type, enabled=False):  # half precision is too coarse for sigma
            u, v = self.u, self.v
            if self.training:
                with torch.no_grad():
                    u = F.normalize(self.weight @ v, dim=0)
                    v = F.normalize(self.weight.t() @ u, dim=0)
                    self.u.copy_(u)
                    self.v.copy_(v)
            else:  # the graph of this call must not contain the buffers, to which a later one in training mode writes
                u, v = (u.clone(), v.clone()) if torch.is_grad_enabled() else (u, v)
            sigma = torch.dot(u, torch.mv(self.weight, v))
            return self.weight * (self.gamma / sigma)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        return F.linear(x, self.effective_weight(), self.bias)

    @property
    def weight_sources(self) -> tuple[Tensor, ...]:
        """The tensors that `effective_weight` depends on."""
        params, buffers = (
            self._parameters,
            self._buffers,
        )  # asked of every layer in every step: attributes take five times as long
        return (params["weight"], params["gamma"], buffers["u"], buffers["v"])  # type: ignore[return-value]


class PlainLinear(nn.Linear):
    """A linear layer with the interface of `SigmaReparam`."""

    def effective_weight(self) -> Tensor:
        return self.weight

    @property
    def weight_sources(self) -> tuple[Tensor, ...]:
        return (self.weight,)


class CachedLinears(nn.Module):
    """A module whose `SigmaReparam` (or plain) linear layers are applied with cached effective weights in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self._caches: dict[str, WeightCache] = {}

    def train(self, mode: bool = True) -> Any:
        for cache in self._caches.values():
            cache.clear()
        return super().train(mode)

    def _weight(self, name: str, layer: Any) -> Tensor:
        """The effective weight of ``layer``, whose attribute is ``name``, arranged."""
        if self.training:
            return self._arrange(name, layer.effective_weight())
        cache = self._caches.get(name)
        if cache is None:
            cache = self._caches[name] = WeightCache()
        return cache.get(layer.weight_sources, lambda: pack(self._arrange(name, layer.effective_weight())))

    def _arrange(self, name: str, weight: Tensor) -> Tensor:
        """An effective weight in the order of rows in which it is applied."""
        return weight

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """Apply the layer of that name, (..., d_in) -> (..., d_out)."""
        layer: Any = getattr(self, name)
        return linear(x, self._weight(name, layer), layer.bias)


def make_linear(sigma_reparam: bool, d_in: int, d_out: int, bias: bool = True) -> SigmaReparam | PlainLinear:
    """`SigmaReparam`, or a plain linear layer."""
    return SigmaReparam(d_in, d_out, bias) if sigma_reparam else PlainLinear(d_in, d_out, bias)
