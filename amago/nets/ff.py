"""Feed-forward networks: a multi-layer perceptron, a residual block, normalisation by name, and input normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gin
import torch
from torch import Tensor, nn

from amago.nets.utils import InputNorm, Linear, activation_switch, check_positive

__all__ = ["MLP", "FFBlock", "InputNorm", "Normalization", "SimNorm"]

LayerType = Callable[[int, int], Any]
"""A linear layer, made from the widths of its input and output."""


@gin.configurable
class SimNorm(nn.Module):
    """Softmax over groups of ``dim`` numbers of the last dimension (Hansen et al. 2024, arXiv 2310.16828)."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        check_positive(dim=dim)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.dim)).softmax(dim=-1).flatten(-2)


class _Direction(nn.Module):
    """Divide vectors by their length and multiply them by ``radius``; with ``detach`` the length carries no gradient."""

    def __init__(self, radius: float = 1.0, detach: bool = False) -> None:
        super().__init__()
        self.radius, self.detach = radius, detach

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-12)
        return x / (length.detach() if self.detach else length) * self.radius


_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "rmsnorm": lambda width: nn.RMSNorm(width, eps=1e-5),
    "unitball": lambda width: _Direction(),
    "unitball-detach": lambda width: _Direction(detach=True),
    "hypersphere": lambda width: _Direction(math.sqrt(width)),
    "simnorm": lambda width: SimNorm(),
    "none": lambda width: nn.Identity(),
}


class Normalization(nn.Module):
    """Normalise the last dimension.

    Args:
        method: "layer" (LayerNorm), "rmsnorm" (RMSNorm, eps 1e-5), "unitball" (x / ||x||),
            "unitball-detach" (the same; the length carries no gradient), "hypersphere" (x / ||x|| sqrt(d_model)), "simnorm"
            (`SimNorm`), and "none" or None, which change nothing.
        d_model: width of the last dimension.
    """

    def __init__(self, method: str | None, d_model: int) -> None:
        super().__init__()
        method = "none" if method is None else method
        if method not in _NORMS:
            raise ValueError(f"unknown normalization {method!r}: use one of {', '.join(map(repr, _NORMS))}")
        self.norm = _NORMS[method](d_model)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        if norm.__class__ is nn.LayerNorm:  # without the module's call: there are 14 norms in a step
            return torch.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        return norm(x)


class MLP(nn.Module):
    """(..., d_inp) -> (..., d_output) through ``n_layers`` hidden layers of ``d_hidden``; no activation at the end.

    Args:
        d_inp, d_hidden, n_layers, d_output: widths, and the number of hidden layers.
        activation: name, as of `amago.nets.utils.activation_switch`.
        normalization: of each hidden layer before its activation, a method of `Normalization`; None: none.
        dropout_p: probability of dropping a number of a hidden layer, in training mode.
        layer_type: the linear layers, called with the widths of input and output.
    """

    def __init__(
        self,
        d_inp: int,
        d_hidden: int,
        n_layers: int,
        d_output: int,
        activation: str = "leaky_relu",
        normalization: str | None = None,
        dropout_p: float = 0.0,
        layer_type: LayerType = Linear,
    ) -> None:
        super().__init__()
        check_positive(d_inp=d_inp, d_hidden=d_hidden, n_layers=n_layers, d_output=d_output)
        self.in_layer = layer_type(d_inp, d_hidden)
        self.layers = nn.ModuleList(layer_type(d_hidden, d_hidden) for _ in range(n_layers - 1))
        self.out_layer = layer_type(d_hidden, d_output)
        self.norms = None
        if normalization not in (None, "none"):
            self.norms = nn.ModuleList(Normalization(normalization, d_hidden) for _ in range(n_layers))
        self.dropout = nn.Dropout(dropout_p)
        self.activation = activation_switch(activation, inplace=normalization != "simnorm")  # whose gradient reads its output

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate((self.in_layer, *self.layers)):
            x = layer(x) if self.norms is None else self.norms[i](layer(x))
            x = self.activation(x)
            if self.training:  # in evaluation mode the module's call would do nothing
                x = self.dropout(x)
        return self.out_layer(x)


class FFBlock(nn.Module):
    """Residual block x + act(W2 act(W1 norm(x))), (..., d_model) -> (..., d_model).

    Args:
        d_model, d_ff: outer and inner width.
        dropout: probability of dropping a number after each activation, in training mode.
        activation: name, as of `amago.nets.utils.activation_switch`.
        norm: a method of `Normalization`; None: none.
        layer_type: as of `MLP`.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        dropout: float = 0.0,
        activation: str = "leaky_relu",
        norm: str | None = None,
        layer_type: LayerType = Linear,
    ) -> None:
        super().__init__()
        check_positive(d_model=d_model, d_ff=d_ff)
        self.norm = None if norm in (None, "none") else Normalization(norm, d_model)
        self.ff1 = layer_type(d_model, d_ff)
        self.ff2 = layer_type(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation_switch(activation, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.ff1(x if self.norm is None else self.norm(x)))
        if self.training:
            h = self.dropout(h)
        h = self.activation(self.ff2(h))
        return x + (self.dropout(h) if self.training else h)
