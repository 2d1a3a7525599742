"""Feed-forward networks: a multi-layer perceptron, a residual block, normalisation by name, input normalisation, and ensembles of perceptrons,
the networks of critics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago.config import fast_paths
from amago.nets import blocked
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


# ---- ensembles -------------------------------------------------------------------------------------------------------------


class EnsembleLinear(nn.Module):
    """The parameters of C linear layers: weight (C, d_in, d_out), bias (1, 1, C, d_out)."""

    def __init__(self, ensemble: int, d_in: int, d_out: int) -> None:
        super().__init__()
        check_positive(ensemble=ensemble, d_in=d_in, d_out=d_out)
        bound = 1.0 / math.sqrt(d_in)
        self.weight = nn.Parameter(torch.empty(ensemble, d_in, d_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(1, 1, ensemble, d_out).uniform_(-bound, bound))


class EnsembleNorm(nn.Module):
    """The parameters of C LayerNorms: gain and bias (C, 1, width)."""

    no_weight_decay = ("weight",)

    def __init__(self, ensemble: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ensemble, 1, width))
        self.bias = nn.Parameter(torch.zeros(ensemble, 1, width))


class Weights(NamedTuple):
    """The parameters of some networks of an `EnsembleMLP`, with the networks as the first dimension.

    Attributes:
        linear: weight (C, d_in, d_out) and bias (C, 1, d_out) of each layer.
        norms: gain and bias (C, 1, width) of the norm of each hidden layer; empty if there are none.
    """

    linear: list[tuple[Tensor, Tensor]]
    norms: list[tuple[Tensor, Tensor]]


class EnsembleMLP(nn.Module):
    """C multi-layer perceptrons, evaluated together. The ensemble is the first dimension of all intermediate results.

    Args:
        ensemble: C.
        d_inp, d_hidden, n_layers, d_output, dropout_p, activation: of each network.
        normalization: of each hidden layer before its activation, "layer" (`EnsembleNorm`) or "none".

    Attributes:
        fast: use `amago.nets.blocked` where it applies.
    """

    def __init__(
        self,
        ensemble: int,
        d_inp: int,
        d_hidden: int,
        n_layers: int,
        d_output: int,
        dropout_p: float = 0.0,
        activation: str = "leaky_relu",
        normalization: str = "none",
    ) -> None:
        super().__init__()
        check_positive(n_layers=n_layers)
        self.inp_layer = EnsembleLinear(ensemble, d_inp, d_hidden)
        self.core_layers = nn.ModuleList(EnsembleLinear(ensemble, d_hidden, d_hidden) for _ in range(n_layers - 1))
        self.output_layer = EnsembleLinear(ensemble, d_hidden, d_output)
        if normalization not in ("layer", "none"):
            raise ValueError(f"unknown normalization {normalization!r} of critics: use 'layer' or 'none'")
        self.norms = None
        if normalization == "layer":
            self.norms = nn.ModuleList(EnsembleNorm(ensemble, d_hidden) for _ in range(n_layers))
        self.dropout = nn.Dropout(dropout_p)
        self.activation = activation_switch(activation, inplace=True)
        self.fast, self.slope = fast_paths(), blocked.slope_of(activation)

    def weights(self, subset: Tensor | None = None, detach: bool = False) -> Weights:
        """The parameters of the networks with the indices ``subset`` (N,), None: all; out of the graph if ``detach``."""

        def part(x: Tensor) -> Tensor:
            x = x if subset is None else x[subset]
            return x.detach() if detach else x

        linear = (self.inp_layer, *self.core_layers, self.output_layer)
        return Weights(
            [(part(layer.weight), part(layer.bias.view(-1, 1, layer.bias.shape[-1]))) for layer in linear],
            [(part(n.weight), part(n.bias)) for n in self.norms or ()],  # type: ignore[arg-type]
        )

    def features(self, weights: Weights, h: Tensor) -> Tensor:
        """The features before the last layer, (C, N, d_hidden), from the first layer's output (C, ..., d_hidden) before its
        activation (which overwrites it)."""
        for n, (weight, bias) in enumerate(weights.linear[:-1]):
            if n:
                h = _linear(h.flatten(1, -2), weight, bias)
            if weights.norms:
                h = _layer_norms(h.flatten(1, -2), *weights.norms[n])
            h = self.dropout(self.activation(h))
        return h.flatten(1, -2)

    def forward(self, inp: Tensor, subset: Tensor | None = None) -> Tensor:
        """(B, L, d_inp) -> (B, L, C, d_output); ``subset`` as of `weights`."""
        weights = self.weights(subset)
        h = self.features(weights, first_layer(weights, inp.flatten(0, 1), slice(None), bias=True))
        return _linear(h, *weights.linear[-1]).transpose(0, 1).unflatten(0, inp.shape[:2])


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """C linear layers, (C, N, d_in) -> (C, N, d_out). A compiler adds the bias within the activation; baddbmm would copy it first."""
    if torch.compiler.is_compiling():
        return torch.bmm(x, weight).add_(bias)
    return torch.baddbmm(bias, x, weight)


def _layer_norms(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """C norms of (C, N, width), one at a time: all at once would leave gain and bias to a second pass, and take twice as long."""
    each = zip(x.unbind(), gain.squeeze(1).unbind(), bias.squeeze(1).unbind())
    return torch.stack([F.layer_norm(rows, rows.shape[-1:], g, b, 1e-5) for rows, g, b in each])


def first_layer(weights: Weights, x: Tensor, inputs: slice, bias: bool = False) -> Tensor:
    """The contribution of some inputs to the first layer's output, (N, width of ``inputs``) -> (C, N, d_hidden)."""
    weight, b = weights.linear[0]
    shared = x.expand(len(weight), -1, -1)
    return _linear(shared, weight[:, inputs], b) if bias else torch.bmm(shared, weight[:, inputs])


def state_part(weights: Weights, state: Tensor) -> Tensor:
    """The contribution of states (B, L, D) to the first layer's output, bias included, (C, B, L, H)."""
    part = first_layer(weights, state.flatten(0, 1), slice(0, state.shape[-1]), bias=True)
    return part.unflatten(1, state.shape[:2])


def evaluate_action(
    net: EnsembleMLP,
    weights: Weights,
    of_state: Tensor,
    gamma_features: Tensor,
    action: Tensor,
    value: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """C networks of [s, h(gamma), a] for every discount and sampled action. The input is never concatenated: the first layer is
    linear, so each part contributes to its output separately, and the state's contribution serves all discounts and samples.

    Args:
        net: with D + 1 + A inputs and O outputs.
        weights: from `EnsembleMLP.weights`.
        of_state: (C, B, L, H), from `state_part`.
        gamma_features: (G,), h of each discount.
        action: (K, B, L, G, A), or (K, B, L, 1, A) if all discounts share it. Clamped to +-0.999; the gradient passes the
            clamp, since bits and one-hot vectors always lie at a bound.
        value: maps outputs (..., O) to values (..., 1). If given, values are returned, without gradient.

    Returns:
        (K, B, L, C, G, O), or (K, B, L, C, G, 1) with ``value``.
    """
    (K, B, L, shared, A), G = action.shape, len(gamma_features)
    clamped = action.clamp(-0.999, 0.999)
    action = (action + (clamped - action).detach() if action.requires_grad else clamped).to(of_state.dtype)
    features = gamma_features.to(action.dtype).unsqueeze(-1)  # (G, 1)
    w_extra: Tensor | None = None
    if shared == G:  # one product for the narrow [h(gamma), a], which saves a pass over the (C, K B L G, H) tensor
        w_extra = weights.linear[0][0][:, -1 - A :]
        base = of_state.flatten(1, 2)  # (C, B L, H)
        extra = torch.cat((features.expand(K, B, L, G, 1), action), dim=-1).flatten(1, 2)  # (K, B L, G, 1 + A)
    else:
        of_action = first_layer(weights, action.reshape(-1, A), slice(-A, None))
        base = (of_action.unflatten(1, (K, B, L)) + of_state.unsqueeze(1)).flatten(1, 3)  # (C, K B L, H)
        extra = first_layer(weights, features, slice(-1 - A, -A))  # (C, G, H)
    drops = net.training and net.dropout.p > 0.0
    if net.fast and net.slope is not None and not drops and base.is_cpu and not torch.compiler.is_compiling():
        params = [p for pair in (*weights.linear[1:], *weights.norms) for p in pair]
        out = blocked.evaluate(net.slope, base, extra, w_extra, params, value, bool(weights.norms))
    else:
        if w_extra is None:
            h = (base.unsqueeze(2) + extra.unsqueeze(1)).unsqueeze(1)
        else:
            h = (extra.flatten(0, 2) @ w_extra).unflatten(1, extra.shape[:3]) + base[:, None, :, None]
        out = _linear(net.features(weights, h), *weights.linear[-1])
        out = out if value is None else value(out)
    return out.view(len(out), K, B, L, G, -1).permute(1, 2, 3, 0, 4, 5)
