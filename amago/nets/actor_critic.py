"""Heads: from the state s of the sequence model to a policy for each discount, and to an ensemble of values.

Shapes: B sequences of L timesteps, K sampled actions, C critics, G discounts, A action width, D state width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import gin
import torch
from torch import Tensor, nn

from amago.nets.ff import MLP
from amago.nets.policy_dists import Discrete, DistributionType, Multibinary, PolicyOutput, TanhGaussian
from amago.nets.utils import activation_switch, at_least_float32, check_dropout, check_positive
from amago.ops import gamma_feature

ACTION_KINDS = ("discrete", "continuous", "multibinary")


def _check_head(state_dim: int, action_kind: str, action_dim: int, gammas: Tensor) -> None:
    check_positive(state_dim=state_dim, action_dim=action_dim)
    if action_kind not in ACTION_KINDS:
        raise ValueError(f"action_kind={action_kind!r} is unknown: use one of {', '.join(ACTION_KINDS)}")
    if gammas.ndim != 1 or not len(gammas):
        raise ValueError(f"gammas must be a vector of at least one discount, got shape {tuple(gammas.shape)}")


class BaseActorHead(nn.Module, ABC):
    """Base of all actors. A subclass writes `actor_network_forward`.

    Args:
        state_dim: D.
        action_kind: "discrete", "continuous" or "multibinary".
        action_dim: A.
        gammas: (G,) discounts.
        continuous_dist_type: the distribution of continuous actions.
    """

    def __init__(
        self,
        state_dim: int,
        action_kind: str,
        action_dim: int,
        gammas: Tensor,
        continuous_dist_type: type[DistributionType] = TanhGaussian,
    ) -> None:
        super().__init__()
        _check_head(state_dim, action_kind, action_dim, gammas)
        self.state_dim, self.action_dim, self.num_gammas = state_dim, action_dim, len(gammas)
        kinds: dict[str, type[DistributionType]] = {
            "discrete": Discrete,
            "continuous": continuous_dist_type,
            "multibinary": Multibinary,
        }
        self.policy_dist = kinds[action_kind](action_dim)

    @property
    def d_output(self) -> int:
        """G x P, how many numbers describe the policies of one timestep."""
        return self.num_gammas * self.policy_dist.input_dimension

    @abstractmethod
    def actor_network_forward(
        self,
        state: Tensor,
        straight_from_obs: Mapping[str, Tensor] | None = None,
        log_dict: dict[str, Any] | None = None,
    ) -> Tensor:
        """(..., D) -> (..., G, P).

        ``straight_from_obs`` holds observations that bypass the sequence model, by key: an action mask, say.
        """

    def forward(
        self,
        state: Tensor,
        log_dict: dict[str, Any] | None = None,
        straight_from_obs: Mapping[str, Tensor] | None = None,
    ) -> PolicyOutput:
        """(..., D) -> distributions with batch shape (..., G)."""
        vec = self.actor_network_forward(state, straight_from_obs=straight_from_obs, log_dict=log_dict)
        return self.policy_dist(vec, log_dict=log_dict)


@gin.configurable
class Actor(BaseActorHead):
    """An MLP to the parameters of every discount's policy.

    Args:
        state_dim, action_kind, action_dim, gammas: see `BaseActorHead`.
        n_layers, d_hidden, activation, dropout_p: of the MLP.
        continuous_dist_type: the distribution of continuous actions.
    """

    def __init__(
        self,
        state_dim: int,
        action_kind: str,
        action_dim: int,
        gammas: Tensor,
        n_layers: int = 2,
        d_hidden: int = 256,
        activation: str = "leaky_relu",
        dropout_p: float = 0.0,
        continuous_dist_type: type[DistributionType] = TanhGaussian,
    ) -> None:
        super().__init__(state_dim, action_kind, action_dim, gammas, continuous_dist_type)
        self.base = MLP(state_dim, d_hidden, n_layers, self.d_output, dropout_p=dropout_p, activation=activation)

    def actor_network_forward(
        self,
        state: Tensor,
        straight_from_obs: Mapping[str, Tensor] | None = None,
        log_dict: dict[str, Any] | None = None,
    ) -> Tensor:
        if straight_from_obs:
            raise ValueError(
                f"observations {sorted(straight_from_obs)} go straight to the actor, but {type(self).__name__} does not say what "
                "to do with them: override actor_network_forward in a subclass"
            )
        return self.base(state).unflatten(-1, (self.num_gammas, -1))


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


def evaluate_state_action(
    net: EnsembleMLP, state: Tensor, gamma_features: Tensor, action: Tensor, detach_params: bool = False
) -> Tensor:
    """C networks of [s, h(gamma), a] on every discount and sampled action, without putting their input together.

    Args:
        net: with D + 1 + A inputs and O outputs.
        state: (B, L, D).
        gamma_features: (G,), h of each discount.
        action: (K, B, L, G, A), or (K, B, L, 1, A) for one that all discounts share; clamped here to +-0.999.
        detach_params: hold the networks' parameters out of the graph; gradients still reach ``state`` and ``action``.

    Returns:
        (K, B, L, C, G, O).
    """
    K, B, L, shared, A = action.shape
    D, C, G = state.shape[-1], net.ensemble, len(gamma_features)
    features = gamma_features.to(state.dtype).unsqueeze(-1)
    action = action.to(state.dtype).clamp(-0.999, 0.999)
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


@gin.configurable
class NCritics(nn.Module):
    """An ensemble of C scalar critics.

    Discrete actions: a network of s gives G x A values, and an action vector (a distribution over actions, or a one-hot) weighs
    them. Otherwise it is a network of [s, h(gamma), a], with a clamped to +-0.999.

    Args:
        state_dim, action_dim: D, A.
        action_kind: "discrete", "continuous" or "multibinary".
        gammas: (G,) discounts.
        num_critics: C.
        d_hidden, n_layers, dropout_p, activation: of each network.
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        action_kind: str,
        gammas: Tensor,
        num_critics: int = 4,
        d_hidden: int = 256,
        n_layers: int = 2,
        dropout_p: float = 0.0,
        activation: str = "leaky_relu",
    ) -> None:
        super().__init__()
        _check_head(state_dim, action_kind, action_dim, gammas)
        check_positive(num_critics=num_critics)
        self.state_dim, self.action_dim, self.num_gammas, self.num_critics = state_dim, action_dim, len(gammas), num_critics
        self.gamma_features: Tensor
        self.discrete = action_kind == "discrete"
        self.register_buffer("gamma_features", gamma_feature(gammas.float()), persistent=False)
        d_inp, d_output = (state_dim, len(gammas) * action_dim) if self.discrete else (state_dim + 1 + action_dim, 1)
        self.net = EnsembleMLP(num_critics, d_inp, d_hidden, n_layers, d_output, dropout_p, activation)

    def all_values(self, state: Tensor, detach_params: bool = False) -> Tensor:
        """Discrete actions: the value of each, (B, L, D) -> (B, L, C, G, A).

        Raises:
            ValueError: actions are not discrete.
        """
        if not self.discrete:
            raise ValueError("all_values: only the critics of discrete actions have a value for each action")
        B, L, D = state.shape
        out = self.net(state.reshape(B * L, D), detach_params)
        return out.view(self.num_critics, B, L, self.num_gammas, self.action_dim).permute(1, 2, 0, 3, 4)

    def forward(
        self, state: Tensor, action: Tensor, log_dict: dict[str, Any] | None = None, detach_params: bool = False
    ) -> Tensor:
        """Values.

        Args:
            state: (B, L, D).
            action: (K, B, L, G, A) vectors, or (K, B, L, 1, A) for one that all discounts share.
            log_dict: to put metrics in, if given.
            detach_params: hold the critics' parameters out of the graph, so that a policy gradient reaches the action (and the
                state, unless the caller detaches that) and nothing else.

        Returns:
            (K, B, L, C, G, 1).
        """
        self._check_shapes(state, action)
        if self.discrete:
            of_each = at_least_float32(self.all_values(state, detach_params))
            values = (of_each * action.unsqueeze(3)).sum(dim=-1, keepdim=True)
        else:
            values = at_least_float32(evaluate_state_action(self.net, state, self.gamma_features, action, detach_params))
        if log_dict is not None:
            detached = values.detach().float()
            log_dict["Q(s, a) (raw)"] = detached.mean()
            if self.num_critics > 1:
                log_dict["Q(s, a) std. over critics (raw)"] = detached.std(dim=3).mean()
        return values

    def _check_shapes(self, state: Tensor, action: Tensor) -> None:
        if state.ndim != 3 or state.shape[-1] != self.state_dim:
            raise ValueError(f"state must be (batch, length, {self.state_dim}), got shape {tuple(state.shape)}")
        expected = (*state.shape[:2], self.num_gammas, self.action_dim)
        if action.ndim != 5 or action.shape[1:] not in (expected, (*expected[:2], 1, self.action_dim)):
            raise ValueError(f"action must be (samples, {', '.join(map(str, expected))}), got shape {tuple(action.shape)}")
