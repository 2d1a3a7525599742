"""Ensembles of multi-layer perceptrons: the networks of critics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amago.config import fast_paths
from amago.nets.cpu import blocked
from amago.nets.utils import activation_switch, check_dropout, check_positive


class EnsembleLinear(nn.Module):
    """C linear layers in one batched product; weight (C, d_in, d_out), bias (1, 1, C, d_out)."""

    def __init__(self, ensemble: int, d_in: int, d_out: int) -> None:
        super().__init__()
        check_positive(ensemble=ensemble, d_in=d_in, d_out=d_out)
        bound = 1.0 / math.sqrt(d_in)
        self.weight = nn.Parameter(torch.empty(ensemble, d_in, d_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(1, 1, ensemble, d_out).uniform_(-bound, bound))
        self.subset: Tensor | None = None

    def parts(self, detach: bool) -> tuple[Tensor, Tensor]:
        """Weight (C, d_in, d_out) and bias (C, 1, d_out), of the ``subset`` where one is set; out of the graph if
        ``detach``."""
        weight: Tensor = self.weight
        bias = self.bias.view(-1, 1, self.bias.shape[-1])
        if self.subset is not None:
            weight, bias = weight[self.subset], bias[self.subset]
        return (weight.detach(), bias.detach()) if detach else (weight, bias)

    def forward(self, x: Tensor, detach_params: bool = False) -> Tensor:
        """(C, N, d_in) -> (C, N, d_out)."""
        weight, bias = self.parts(detach_params)
        return torch.baddbmm(bias, x, weight)


class EnsembleNorm(nn.Module):
    """C LayerNorms; gain and bias (C, 1, width)."""

    no_weight_decay = ("weight",)

    def __init__(self, ensemble: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ensemble, 1, width))
        self.bias = nn.Parameter(torch.zeros(ensemble, 1, width))
        self.subset: Tensor | None = None

    def parts(self, detach: bool) -> tuple[Tensor, Tensor]:
        """Gain and bias, of the ``subset`` where one is set; out of the graph if ``detach``."""
        gain: Tensor = self.weight
        bias: Tensor = self.bias
        if self.subset is not None:
            gain, bias = gain[self.subset], bias[self.subset]
        return (gain.detach(), bias.detach()) if detach else (gain, bias)

    def forward(self, x: Tensor, detach_params: bool = False) -> Tensor:
        """(C, N, width) -> (C, N, width)."""
        # one network at a time: the norm of all at once leaves gain and bias to a second pass over x, and takes twice as long
        each = zip(x.unbind(), *(part.squeeze(1).unbind() for part in self.parts(detach_params)))
        return torch.stack([F.layer_norm(rows, rows.shape[-1:], gain, bias, 1e-5) for rows, gain, bias in each])


class EnsembleMLP(nn.Module):
    """C multi-layer perceptrons, evaluated together. The ensemble is the first dimension of all intermediate results.

    Args:
        ensemble: C.
        d_inp, d_hidden, n_layers, d_output, dropout_p, activation: of each network.
        normalization: of each hidden layer before its activation, "layer" (`EnsembleNorm`) or "none".

    Attributes:
        fast: use `amago.nets.cpu.blocked` where it applies.
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
        check_dropout(dropout_p=dropout_p)
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

    @contextmanager
    def only(self, subset: Tensor) -> Iterator[None]:
        """Within the block the ensemble consists of the networks with the indices ``subset`` (N,)."""
        layers = (self.inp_layer, *self.core_layers, self.output_layer, *(self.norms or ()))
        for layer in layers:
            layer.subset = subset
        try:
            yield
        finally:
            for layer in layers:
                layer.subset = None

    def first(self, x: Tensor, inputs: slice, bias: bool = False, detach_params: bool = False) -> Tensor:
        """The contribution of some inputs to the first layer's output, (N, width of ``inputs``) -> (C, N, d_hidden)."""
        weight, b = self.inp_layer.parts(detach_params)
        shared = x.expand(len(weight), -1, -1)
        return torch.baddbmm(b, shared, weight[:, inputs]) if bias else torch.bmm(shared, weight[:, inputs])

    def rest(self, h: Tensor, detach_params: bool = False) -> Tensor:
        """From the first layer's output (C, ..., d_hidden), before its activation (which overwrites it), to (C, ...,
        d_output)."""
        lead = h.shape[1:-1]
        h = self._hidden_layers(h if self.norms is None else h.flatten(1, -2), detach_params)
        return self.output_layer(h, detach_params).unflatten(1, lead)  # type: ignore[no-any-return]

    def _hidden_layers(self, h: Tensor, detach_params: bool = False) -> Tensor:
        """From the first layer's output (C, ..., d_hidden), before its activation, to the features before the last layer, (C, N,
        d_hidden)."""
        for n, layer in enumerate((None, *self.core_layers)):
            if layer is not None:
                h = layer(h.flatten(1, -2), detach_params)
            if self.norms is not None:
                h = self.norms[n](h, detach_params)
            h = self.dropout(self.activation(h))
        return h.flatten(1, -2)

    def evaluate(self, x: Tensor, detach_params: bool = False) -> Tensor:
        """(N, d_inp) -> (C, N, d_output)."""
        return self.rest(self.first(x, slice(None), bias=True, detach_params=detach_params), detach_params)

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L, d_inp) -> outputs (B, L, C, d_output), and the features before the last layer, (B, L, C, d_hidden)."""
        B, L = inp.shape[:2]
        h = self._hidden_layers(self.first(inp.flatten(0, 1), slice(None), bias=True))
        out, phi = (x.transpose(0, 1).unflatten(0, (B, L)) for x in (self.output_layer(h), h))
        return out, phi

    def blocks_apply(self, x: Tensor) -> bool:
        """Whether `amago.nets.cpu.blocked` can do the work of `rest` for tensors like ``x``."""
        drops = self.training and self.dropout.p > 0.0
        return self.fast and self.slope is not None and not drops and x.is_cpu and not torch.compiler.is_compiling()


def _clamp_straight_through(action: Tensor, limit: float = 0.999) -> Tensor:
    clamped = action.clamp(-limit, limit)
    return action + (clamped - action).detach() if action.requires_grad else clamped


def evaluate_state_action(
    net: EnsembleMLP, state: Tensor, gamma_features: Tensor, action: Tensor, detach_params: bool = False
) -> Tensor:
    """C networks of [s, h(gamma), a] for every discount and sampled action. The input is never concatenated: the first layer is
    linear, so each part contributes to its output separately, and the state's contribution serves all discounts and samples.

    Args:
        net: with D + 1 + A inputs and O outputs.
        state: (B, L, D).
        gamma_features: (G,), h of each discount.
        action: (K, B, L, G, A), or (K, B, L, 1, A) if all discounts share it. Clamped to +-0.999; the gradient passes the
            clamp, since bits and one-hot vectors always lie at a bound.
        detach_params: hold the networks' parameters out of the graph; gradients still reach ``state`` and ``action``.

    Returns:
        (K, B, L, C, G, O).
    """
    return evaluate_action(net, state_part(net, state, detach_params), gamma_features, action, detach_params)


def state_part(net: EnsembleMLP, state: Tensor, detach_params: bool = False) -> Tensor:
    """The contribution of states (B, L, D) to the first layer's output, bias included, (C, B, L, H)."""
    part = net.first(state.flatten(0, 1), slice(0, state.shape[-1]), bias=True, detach_params=detach_params)
    return part.unflatten(1, state.shape[:2])


def evaluate_action(
    net: EnsembleMLP,
    of_state: Tensor,
    gamma_features: Tensor,
    action: Tensor,
    detach_params: bool = False,
    value: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`evaluate_state_action`, given the contribution of the state.

    Args:
        net, gamma_features, action, detach_params: see `evaluate_state_action`.
        of_state: (C, B, L, H), from `state_part`.
        value: maps outputs (..., O) to values (..., 1). If given, values are returned, without gradient.

    Returns:
        (K, B, L, C, G, O), or (K, B, L, C, G, 1) with ``value``.
    """
    (K, B, L, shared, A), G = action.shape, len(gamma_features)
    action = _clamp_straight_through(action).to(of_state.dtype)
    features = gamma_features.to(action.dtype).unsqueeze(-1)  # (G, 1)
    w_extra: Tensor | None = None
    if shared == G:  # one product for the narrow [h(gamma), a], which saves a pass over the (C, K B L G, H) tensor
        w_extra = net.inp_layer.parts(detach_params)[0][:, -1 - A :]
        base = of_state.flatten(1, 2)  # (C, B L, H)
        extra = torch.cat((features.expand(K, B, L, G, 1), action), dim=-1).flatten(1, 2)  # (K, B L, G, 1 + A)
    else:
        of_action = net.first(action.reshape(-1, A), slice(-A, None), detach_params=detach_params)
        base = (of_action.unflatten(1, (K, B, L)) + of_state.unsqueeze(1)).flatten(1, 3)  # (C, K B L, H)
        extra = net.first(features, slice(-1 - A, -A), detach_params=detach_params)  # (C, G, H)
    if net.blocks_apply(base):
        params = [p for layer in (*net.core_layers, net.output_layer) for p in layer.parts(detach_params)]
        norms: list[EnsembleNorm] = [] if net.norms is None else list(net.norms)  # type: ignore[arg-type]
        params += [p for norm in norms for p in norm.parts(detach_params)]
        out = blocked.evaluate(net.slope or 0.0, base, extra, w_extra, params, value, net.norms is not None)
    else:
        out = net.rest(first_layer(base, extra, w_extra), detach_params)
        out = out if value is None else value(out)
    return out.view(len(out), K, B, L, G, -1).permute(1, 2, 3, 0, 4, 5)


def first_layer(base: Tensor, extra: Tensor, w_extra: Tensor | None) -> Tensor:
    """The first layer's output (C, K, N, G, H), or (C, 1, N, G, H) without ``w_extra``; arguments as for `blocked.evaluate`."""
    if w_extra is None:
        return (base.unsqueeze(2) + extra.unsqueeze(1)).unsqueeze(1)
    return (extra.flatten(0, 2) @ w_extra).unflatten(1, extra.shape[:3]) + base[:, None, :, None]
