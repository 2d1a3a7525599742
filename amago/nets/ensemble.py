"""Several networks in one batched product: what critics are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

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
        self.drawn: Tensor | None = None

    def parts(self, detach: bool) -> tuple[Tensor, Tensor]:
        """Weight (C, d_in, d_out) and bias (C, 1, d_out), of those that are ``drawn``; out of the graph if ``detach``."""
        weight: Tensor = self.weight
        bias = self.bias.view(-1, 1, self.bias.shape[-1])
        if self.drawn is not None:
            weight, bias = weight[self.drawn], bias[self.drawn]
        return (weight.detach(), bias.detach()) if detach else (weight, bias)

    def forward(self, x: Tensor, detach_params: bool = False) -> Tensor:
        """(C, N, d_in) -> (C, N, d_out)."""
        weight, bias = self.parts(detach_params)
        return torch.baddbmm(bias, x, weight)


class EnsembleMLP(nn.Module):
    """C multi-layer perceptrons in one batched product. The ensemble is the first dimension inside.

    The first layer is linear, so an input that is made of parts is never put together: `first` takes one part and the rows of
    the weight that belong to it, and the caller adds.
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
    ) -> None:
        super().__init__()
        check_positive(n_layers=n_layers)
        check_dropout(dropout_p=dropout_p)
        self.inp_layer = EnsembleLinear(ensemble, d_inp, d_hidden)
        self.core_layers = nn.ModuleList(EnsembleLinear(ensemble, d_hidden, d_hidden) for _ in range(n_layers - 1))
        self.output_layer = EnsembleLinear(ensemble, d_hidden, d_output)
        self.dropout = nn.Dropout(dropout_p)
        self.activation, self._slope = activation_switch(activation), blocked.slope_of(activation)

    @contextmanager
    def only(self, drawn: Tensor) -> Iterator[None]:
        """Within, the ensemble is that of the networks with these indices."""
        layers = (self.inp_layer, *self.core_layers, self.output_layer)
        for layer in layers:
            layer.drawn = drawn
        try:
            yield
        finally:
            for layer in layers:
                layer.drawn = None

    def first(self, x: Tensor, rows: slice, bias: bool = False, detach_params: bool = False) -> Tensor:
        """The part of the first layer's output that comes from some of its inputs: (N, len(rows)) -> (C, N, d_hidden)."""
        weight, b = self.inp_layer.parts(detach_params)
        shared = x.expand(len(weight), -1, -1)
        return torch.baddbmm(b, shared, weight[:, rows]) if bias else torch.bmm(shared, weight[:, rows])

    def rest(self, h: Tensor, detach_params: bool = False) -> Tensor:
        """From the first layer's output (C, N, d_hidden), before its activation, to (C, N, d_output)."""
        h = self.dropout(self.activation(h))
        for layer in self.core_layers:
            h = self.dropout(self.activation(layer(h, detach_params)))
        return self.output_layer(h, detach_params)

    def after_first(
        self,
        base: Tensor,
        extra: Tensor,
        w_extra: Tensor | None,
        detach_params: bool = False,
        value: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """From the two parts of the first layer's output to the last: arguments and result are those of `blocked.judge`. With
        ``value``, what that makes of (..., d_output), one number each: (C, K, N, G, 1), without gradient."""
        params = [p for layer in (*self.core_layers, self.output_layer) for p in layer.parts(detach_params)]
        drops = self.training and self.dropout.p > 0.0
        if blocked.ENABLED and self._slope is not None and not drops and base.is_cpu and not torch.compiler.is_compiling():
            if value is not None:
                return blocked.judge_values(self._slope, base, extra, w_extra, params, value)
            return blocked.judge(self._slope, base, extra, w_extra, params)
        if w_extra is None:
            h = (base.unsqueeze(2) + extra.unsqueeze(1)).unsqueeze(1)
        else:
            h = (extra.flatten(0, 2) @ w_extra).unflatten(1, extra.shape[:3]) + base[:, None, :, None]
        out = self.rest(h.flatten(1, 3), detach_params).unflatten(1, h.shape[1:4])
        return out if value is None else value(out)

    def forward(self, x: Tensor, detach_params: bool = False) -> Tensor:
        """(N, d_inp) -> (C, N, d_output)."""
        return self.rest(self.first(x, slice(None), bias=True, detach_params=detach_params), detach_params)


def _clamp_straight_through(action: Tensor, limit: float = 0.999) -> Tensor:
    clamped = action.clamp(-limit, limit)
    return action + (clamped - action).detach() if action.requires_grad else clamped


def evaluate_state_action(
    net: EnsembleMLP, state: Tensor, gamma_features: Tensor, action: Tensor, detach_params: bool = False
) -> Tensor:
    """C networks of [s, h(gamma), a] on every discount and sampled action, without putting their input together.

    Args:
        net: with D + 1 + A inputs and O outputs.
        state: (B, L, D).
        gamma_features: (G,), h of each discount.
        action: (K, B, L, G, A), or (K, B, L, 1, A) for one that all discounts share; clamped here to +-0.999 (its gradient is
            not: a bit or a one-hot is always at a bound, and would get none).
        detach_params: hold the networks' parameters out of the graph; gradients still reach ``state`` and ``action``.

    Returns:
        (K, B, L, C, G, O).
    """
    return _with_action(net, _of_state(net, state, detach_params), gamma_features, action, detach_params)


def evaluate_stored_and_chosen(
    net: EnsembleMLP,
    state: Tensor,
    gamma_features: Tensor,
    stored: Tensor,
    chosen: Tensor,
    value: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """`evaluate_state_action` of stored actions, with all gradients, and the value of others, with one to the actions alone. The
    state's part of the first layer serves both.

    Args:
        net, state, gamma_features: see `evaluate_state_action`.
        stored: (1, B, L, G or 1, A); chosen: (K, B, L, G, A).
        value: from outputs (..., O) to values (..., 1).

    Returns:
        (1, B, L, C, G, O) and (K, B, L, C, G, 1).
    """
    base = _of_state(net, state, False)
    out = _with_action(net, base, gamma_features, stored, False)
    if chosen.requires_grad and torch.is_grad_enabled():
        return out, value(_with_action(net, base.detach(), gamma_features, chosen, True))
    with torch.no_grad():
        return out, _with_action(net, base, gamma_features, chosen, True, value)


def _of_state(net: EnsembleMLP, state: Tensor, detach_params: bool) -> Tensor:
    """The state's part of the first layer's output, (C, B, L, H)."""
    base = net.first(state.flatten(0, 1), slice(0, state.shape[-1]), bias=True, detach_params=detach_params)
    return base.unflatten(1, state.shape[:2])


def _with_action(
    net: EnsembleMLP,
    base: Tensor,
    gamma_features: Tensor,
    action: Tensor,
    detach_params: bool,
    value: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """What `evaluate_state_action` gives, or its ``value``, from the state's part of the first layer (C, B, L, H)."""
    (K, B, L, shared, A), G = action.shape, len(gamma_features)
    weight = net.inp_layer.parts(detach_params)[0]
    D = weight.shape[1] - 1 - A
    action = _clamp_straight_through(action).to(base.dtype)
    features = gamma_features.to(action.dtype).unsqueeze(-1)
    w_extra: Tensor | None = None
    if shared == G:  # [h(gamma), a] is narrow: one product instead of one more pass over the largest tensor of an update
        base, w_extra = base.flatten(1, 2), weight[:, D:]
        extra = torch.cat((features.expand(K, B, L, G, 1), action), dim=-1).flatten(1, 2)
    else:
        of_action = net.first(action.reshape(-1, A), slice(D + 1, None), detach_params=detach_params)
        base = (of_action.unflatten(1, (K, B, L)) + base.unsqueeze(1)).flatten(1, 3)
        extra = net.first(features, slice(D, D + 1), detach_params=detach_params)
    out = net.after_first(base, extra, w_extra, detach_params, value)
    return out.view(len(out), K, B, L, G, -1).permute(1, 2, 3, 0, 4, 5)
