"""Actors and critics: networks from the state of the sequence model to a policy and an ensemble of values for each discount.

Shapes: see `amago.nets.heads`, which has their base classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gin
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from amago.config import NamedArguments
from amago.nets.ensemble import EnsembleMLP, evaluate_state_action
from amago.nets.ff import MLP, Normalization
from amago.nets.heads import BaseActorHead, BaseCriticHead, EnsembleCritics, outputs_of
from amago.nets.policy_dists import Discrete, PolicyOutput, TanhGaussian
from amago.nets.popart import PopArtLayer
from amago.nets.twohot import Bins, ReturnDistribution
from amago.nets.utils import activation_switch, at_least_float32, check_positive
from amago.ops import gamma_feature

__all__ = [
    "Actor", "BaseActorHead", "BaseCriticHead", "NCritics", "NCriticsTwoHot", "PopArtLayer", "ResidualActor", "StateValues",
    "gammas_as_input_seq",
]  # fmt: skip


def gammas_as_input_seq(gammas: Tensor, batch_size: int, length: int) -> Tensor:
    """The discounts (G,) as an input of critics, h(gamma) (`amago.ops.gamma_feature`): (G * batch_size, length, 1), discount by
    discount."""
    return gamma_feature(gammas.float()).repeat_interleave(batch_size)[:, None, None].expand(-1, length, 1)


LARGEST_RETURN = 100_000.0
"""The value of the last bin of `NCriticsTwoHot` by default."""


@gin.configurable
class Actor(BaseActorHead):
    """An MLP whose outputs are the parameters of every discount's policy.

    Args:
        state_dim, action_dim, discrete, gammas: see `BaseActorHead`.
        n_layers, d_hidden, activation, dropout_p: of the MLP.
        continuous_dist_type, discrete_dist_type, action_kind: see `BaseActorHead`.
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        discrete: bool,
        gammas: Tensor,
        n_layers: int = 2,
        d_hidden: int = 256,
        activation: str = "leaky_relu",
        dropout_p: float = 0.0,
        continuous_dist_type: type[PolicyOutput] | None = TanhGaussian,
        discrete_dist_type: type[PolicyOutput] = Discrete,
        action_kind: str | None = None,
    ) -> None:
        super().__init__(
            state_dim, action_dim, discrete, gammas, continuous_dist_type, discrete_dist_type, action_kind
        )  # fmt: skip
        self.base = MLP(state_dim, d_hidden, n_layers, self.d_output, activation=activation, dropout_p=dropout_p)

    def actor_network_forward(
        self,
        state: Tensor,
        log_dict: dict[str, Any] | None = None,
        straight_from_obs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """See `BaseActorHead.actor_network_forward`. ``straight_from_obs`` is ignored: a subclass may use it."""
        return self.base(state).unflatten(-1, (self.num_gammas, -1))


class _Elementwise(nn.Module):
    """An activation that overwrites its input."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation_switch(activation, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x)


def _residual_block(feature_dim: int, d_ff: int, normalization: str, activation: str, dropout_p: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(feature_dim, d_ff),
        Normalization(normalization, d_ff),
        _Elementwise(activation),
        nn.Linear(d_ff, feature_dim),
        Normalization(normalization, feature_dim),
        nn.Dropout(dropout_p),
    )


@gin.configurable
class ResidualActor(BaseActorHead):
    """A deeper actor: an MLP to ``feature_dim``, blocks x + N(W2 act(N(W1 x))), and a linear layer to the policies' parameters.

    Args:
        state_dim, action_dim, discrete, gammas: see `BaseActorHead`.
        feature_dim: width between the blocks.
        residual_ff_dim: width within a block.
        residual_blocks: number of blocks.
        activation, dropout_p: of the MLP and the blocks.
        normalization: N, "layer", "rmsnorm" or "none".
        continuous_dist_type, discrete_dist_type, action_kind: see `BaseActorHead`.
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        discrete: bool,
        gammas: Tensor,
        feature_dim: int = 256,
        residual_ff_dim: int = 512,
        residual_blocks: int = 2,
        activation: str = "leaky_relu",
        normalization: str = "layer",
        dropout_p: float = 0.0,
        continuous_dist_type: type[PolicyOutput] | None = TanhGaussian,
        discrete_dist_type: type[PolicyOutput] = Discrete,
        action_kind: str | None = None,
    ) -> None:
        super().__init__(
            state_dim, action_dim, discrete, gammas, continuous_dist_type, discrete_dist_type, action_kind
        )  # fmt: skip
        check_positive(feature_dim=feature_dim, residual_ff_dim=residual_ff_dim, residual_blocks=residual_blocks)
        self.inp = MLP(state_dim, feature_dim, 1, feature_dim, activation=activation, dropout_p=dropout_p)
        self.residual_blocks = nn.ModuleList(
            _residual_block(feature_dim, residual_ff_dim, normalization, activation, dropout_p) for _ in range(residual_blocks)
        )
        self.out = nn.Linear(feature_dim, self.d_output)

    def actor_network_forward(
        self,
        state: Tensor,
        log_dict: dict[str, Any] | None = None,
        straight_from_obs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """See `BaseActorHead.actor_network_forward`. ``straight_from_obs`` is ignored: a subclass may use it."""
        x = self.inp(state)
        for block in self.residual_blocks:
            x = x + block(x)
        return self.out(x).unflatten(-1, (self.num_gammas, -1))


@gin.configurable
class NCritics(EnsembleCritics):
    """An ensemble of C scalar critics.

    Discrete actions: networks of s output G x A values, and the action vector, a distribution over actions or a one-hot, weighs
    them. Other actions: networks of [s, h(gamma), a], with a clamped to +-0.999.

    Args:
        state_dim, action_dim, discrete, gammas, num_critics: see `BaseCriticHead`.
        d_hidden, n_layers, dropout_p, activation: of each network.
        normalization: of its hidden layers before their activation, "layer" or "none" (Ball et al. 2023, arXiv 2302.02948:
            "layer" keeps values of actions that the data lack from growing).
    """

    fused = True

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        discrete: bool,
        gammas: Tensor,
        num_critics: int = 4,
        d_hidden: int = 256,
        n_layers: int = 2,
        dropout_p: float = 0.0,
        activation: str = "leaky_relu",
        normalization: str = "none",
    ) -> None:
        super().__init__(state_dim, action_dim, discrete, gammas, num_critics)
        self.reads_action = not self.discrete
        d_inp, d_output = (state_dim, len(gammas) * action_dim) if self.discrete else (state_dim + 1 + action_dim, 1)
        self.net = EnsembleMLP(num_critics, d_inp, d_hidden, n_layers, d_output, dropout_p, activation, normalization)

    def all_values(self, state: Tensor, detach_params: bool = False) -> Tensor:
        """Discrete actions: the value of each, (B, L, D) -> (B, L, C, G, A).

        Raises:
            ValueError: the actions are not discrete.
        """
        if not self.discrete:
            raise ValueError("all_values: only the critics of discrete actions have a value for each action")
        B, L, D = state.shape
        out = self.net.evaluate(state.reshape(B * L, D), detach_params)
        return self.scaled(out.view(len(out), B, L, self.num_gammas, self.action_dim).permute(1, 2, 0, 3, 4))

    def outputs(self, state: Tensor, action: Tensor, detach_params: bool = False) -> Tensor:
        self._check_shapes(state, action)
        if self.discrete:
            of_each = at_least_float32(self.all_values(state, detach_params))
            return (of_each * action.unsqueeze(3)).sum(dim=-1, keepdim=True)
        return self.scaled(at_least_float32(evaluate_state_action(self.net, state, self.gamma_features, action, detach_params)))

    def critic_network_forward(
        self, state: Tensor, action: Tensor, log_dict: dict[str, Any] | None = None, detach_params: bool = False
    ) -> Tensor:
        """(B, L, D), (K, B, L, G, A) -> values (K, B, L, C, G, 1); see `BaseCriticHead.forward`."""
        values = self.outputs(state, action, detach_params)
        self._log(log_dict, values)
        return values


@gin.configurable
class NCriticsTwoHot(EnsembleCritics):
    """An ensemble of C critics that classify returns into bins instead of regressing them (Farebrother et al. 2024,
    arXiv 2403.03950; Hafner et al. 2023, arXiv 2301.04104).

    For every action space, each is a network from [s, h(gamma), a] to the logits of O bins. A value is the return at
    the expected bin, or the expected return (``decoding``).

    Args:
        state_dim, action_dim, discrete, gammas, num_critics: see `BaseCriticHead`.
        d_hidden, n_layers, dropout_p, activation: of each network.
        min_return, max_return: of the lowest and the highest bin, in units of return (an agent's ``reward_multiplier`` included).
            None: -100,000 and 100,000.
        output_bins: O.
        use_symlog: space the bins evenly in symlog(return); else in the return itself.
        label_type: "twohot" or "hlgauss", see `amago.nets.twohot.Bins`.
        sigma: standard deviation of the latter, in widths of a bin.
        init_value: value of every action before training, for every critic: a return strictly between ``min_return`` and
            ``max_return``. None: 0 or near it with ``use_symlog`` and "mean_return"; else the outputs of a random last layer,
            whose values are near the middle of the bins.
        decoding: "mean_bin" (arXiv 2411.11188) or "mean_return", see `amago.nets.twohot.Bins`.
        clamp_labels: clamp targets of "hlgauss" labels to the bins.
        normalization: see `NCritics`.
    """

    fused = True

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        discrete: bool,
        gammas: Tensor,
        num_critics: int = 4,
        d_hidden: int = 256,
        n_layers: int = 2,
        dropout_p: float = 0.0,
        activation: str = "leaky_relu",
        min_return: float | None = None,
        max_return: float | None = None,
        output_bins: int = 128,
        use_symlog: bool = True,
        label_type: str = "twohot",
        sigma: float = 0.75,
        init_value: float | None = None,
        decoding: str = "mean_bin",
        clamp_labels: bool = True,
        normalization: str = "none",
    ) -> None:
        super().__init__(state_dim, action_dim, discrete, gammas, num_critics)
        self.reads_action = True
        low, high = (
            (-LARGEST_RETURN if min_return is None else min_return),
            (LARGEST_RETURN if max_return is None else max_return),
        )
        self.bins = Bins(low, high, output_bins, use_symlog, label_type, sigma, decoding, clamp_labels)
        self.net = EnsembleMLP(
            num_critics, state_dim + 1 + action_dim, d_hidden, n_layers, output_bins, dropout_p, activation, normalization
        )
        # A random layer would value actions at +-100, because the largest bins, at 100,000, are as likely as any other.
        if init_value is not None or (use_symlog and decoding == "mean_return"):
            with torch.no_grad():
                self.net.output_layer.weight.zero_()
                self.net.output_layer.bias.copy_(self.bins.initial_logits(init_value).expand_as(self.net.output_layer.bias))

    @property
    def num_bins(self) -> int:
        """O."""
        return len(self.bins.centers)

    @property
    def bin_vals(self) -> Tensor:
        """(O,), the centres of the bins; in symlog(return) with ``use_symlog``."""
        return self.bins.centers

    def bin_dist_to_raw_vals(self, bin_dist: Categorical) -> Tensor:
        """The returns (..., 1) that distributions over bins (..., O) are worth."""
        return self.bins.value(outputs_of(bin_dist))

    def raw_vals_to_labels(self, raw_td_target: Tensor) -> Tensor:
        """The distributions over bins (..., O) that represent returns (..., 1)."""
        return self.bins.labels(raw_td_target)

    def outputs(self, state: Tensor, action: Tensor, detach_params: bool = False) -> Tensor:
        self._check_shapes(state, action)
        return at_least_float32(evaluate_state_action(self.net, state, self.gamma_features, action, detach_params))

    def critic_network_forward(
        self, state: Tensor, action: Tensor, log_dict: dict[str, Any] | None = None, detach_params: bool = False
    ) -> Categorical:
        """(B, L, D), (K, B, L, G, A) -> distributions over bins (K, B, L, C, G); see `BaseCriticHead.forward`."""
        logits = self.outputs(state, action, detach_params)
        if log_dict is not None:
            self._log(log_dict, self.bins.value(logits.detach()))
        return ReturnDistribution(logits)


@gin.configurable
class StateValues(NamedArguments, nn.Module):
    """An MLP from a state to a scalar value for each discount, without an action (`Agent.expectile`).

    Args:
        state_dim: D.
        gammas: (G,) discounts.
        d_hidden, n_layers, dropout_p, activation: of the MLP.
        normalization: of its hidden layers before their activation, a method of `amago.nets.ff.Normalization`; "none": none.
    """

    def __init__(
        self,
        state_dim: int,
        gammas: Tensor,
        d_hidden: int = 256,
        n_layers: int = 2,
        dropout_p: float = 0.0,
        activation: str = "leaky_relu",
        normalization: str = "none",
    ) -> None:
        super().__init__()
        self.net = MLP(state_dim, d_hidden, n_layers, len(gammas), activation, normalization, dropout_p)

    def forward(self, state: Tensor) -> Tensor:
        """(..., D) -> (..., G, 1)."""
        return at_least_float32(self.net(state)).unsqueeze(-1)

    @torch.no_grad()
    def divide(self, factor: Tensor) -> None:
        """Divide the network's outputs by a power of two, where what they are multiplied by has grown by as much."""
        for param in self.net.out_layer.parameters():
            param.div_(factor)
