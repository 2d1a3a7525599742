"""Several networks in one batched product: what critics are made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from amago.nets.utils import activation_switch, check_dropout, check_positive


class EnsembleLinear(nn.Module):
    """C linear layers in one batched product; weight (C, d_in, d_out), bias (1, 1, C, d_out)."""

    def __init__(self, ensemble: int, d_in: int, d_out: int) -> None:
        super().__init__()
        check_positive(ensemble=ensemble, d_in=d_in, d_out=d_out)
        bound = 1.0 / math.sqrt(d_in)
        self.weight = nn.Parameter(torch.empty(ensemble, d_in, d_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(1, 1, ensemble, d_out).uniform_(-bound, bound))

    def parts(self, detach: bool) -> tuple[Tensor, Tensor]:
        """Weight (C, d_in, d_out) and bias (C, 1, d_out), out of the graph if ``detach``."""
        weight, bias = self.weight, self.bias.view(-1, 1, self.bias.shape[-1])
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
        self.ensemble = ensemble
        self.inp_layer = EnsembleLinear(ensemble, d_inp, d_hidden)
        self.core_layers = nn.ModuleList(EnsembleLinear(ensemble, d_hidden, d_hidden) for _ in range(n_layers - 1))
        self.output_layer = EnsembleLinear(ensemble, d_hidden, d_output)
        self.dropout = nn.Dropout(dropout_p)
        self.activation = activation_switch(activation)

    def first(self, x: Tensor, rows: slice, bias: bool = False, detach_params: bool = False) -> Tensor:
        """The part of the first layer's output that comes from some of its inputs: (N, len(rows)) -> (C, N, d_hidden)."""
        weight, b = self.inp_layer.parts(detach_params)
        shared = x.expand(self.ensemble, -1, -1)
        return torch.baddbmm(b, shared, weight[:, rows]) if bias else torch.bmm(shared, weight[:, rows])

    def rest(self, h: Tensor, detach_params: bool = False) -> Tensor:
        """From the first layer's output (C, N, d_hidden), before its activation, to (C, N, d_output)."""
        h = self.dropout(self.activation(h))
        for layer in self.core_layers:
            h = self.dropout(self.activation(layer(h, detach_params)))
        return self.output_layer(h, detach_params)

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
    K, B, L, shared, A = action.shape
    D, C, G = state.shape[-1], net.ensemble, len(gamma_features)
    features = gamma_features.to(state.dtype).unsqueeze(-1)
    action = _clamp_straight_through(action).to(state.dtype)
    of_state = net.first(state.reshape(B * L, D), slice(0, D), bias=True, detach_params=detach_params)[:, None, :, None]
    if shared == G:  # [h(gamma), a] is narrow: one product instead of one more pass over the largest tensor of an update
        narrow = torch.cat((features.expand(K, B, L, G, 1), action), dim=-1).reshape(-1, 1 + A)
        h = net.first(narrow, slice(D, None), detach_params=detach_params).view(C, K, B * L, G, -1) + of_state
    else:
        of_action = net.first(action.reshape(-1, A), slice(D + 1, None), detach_params=detach_params)
        of_gamma = net.first(features, slice(D, D + 1), detach_params=detach_params)
        h = of_action.view(C, K, B * L, 1, -1) + of_state + of_gamma[:, None, None]
    out = net.rest(h.reshape(C, K * B * L * G, -1), detach_params)
    return out.view(C, K, B, L, G, -1).permute(1, 2, 3, 0, 4, 5)
