"""Heads: from the state s of the sequence model to a policy for each discount, and to an ensemble of values.

Shapes: B sequences of L timesteps, K sampled actions, C critics, G discounts, A action width, D state width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import gin
import torch
from torch import Tensor, nn

from amago.nets.ensemble import EnsembleMLP, evaluate_state_action, evaluate_stored_and_chosen
from amago.nets.ff import MLP, Normalization
from amago.nets.policy_dists import DistributionType, PolicyOutput, TanhGaussian
from amago.nets.product import distribution_of
from amago.nets.twohot import Bins
from amago.nets.utils import activation_switch, at_least_float32, check_positive
from amago.ops import gamma_feature
from amago.spaces import ActionMask, parts_of


def _check_head(state_dim: int, action_kind: str, action_dim: int, gammas: Tensor) -> None:
    check_positive(state_dim=state_dim, action_dim=action_dim)
    parts_of(action_kind, action_dim)  # refuses what is unknown
    if gammas.ndim != 1 or not len(gammas):
        raise ValueError(f"gammas must be a vector of at least one discount, got shape {tuple(gammas.shape)}")


class BaseActorHead(nn.Module, ABC):
    """Base of all actors. A subclass writes `actor_network_forward`; an `amago.spaces.ActionMask` is applied to what that gives.

    Args:
        state_dim: D.
        action_kind: "discrete", "continuous", "multibinary", or that of several parts (`amago.spaces.ActionSpec.kind`).
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
        self.policy_dist = distribution_of(action_kind, action_dim, continuous_dist_type)
        self.mask_key = ActionMask()

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

        ``straight_from_obs`` holds observations that bypass the sequence model, by key (but not the `amago.spaces.ActionMask`).
        """

    def policy_parameters(
        self,
        state: Tensor,
        straight_from_obs: Mapping[str, Tensor] | None = None,
        log_dict: dict[str, Any] | None = None,
    ) -> Tensor:
        """`actor_network_forward`, and what the mask forbids made impossible; (..., D) -> (..., G, P)."""
        others = {k: v for k, v in (straight_from_obs or {}).items() if k != self.mask_key}
        vec = self.actor_network_forward(state, straight_from_obs=others, log_dict=log_dict)
        if self.mask_key is None:
            return vec
        if straight_from_obs is None or self.mask_key not in straight_from_obs:
            raise ValueError(f"ActionMask.key={self.mask_key!r}, but straight_from_obs has {sorted(straight_from_obs or ())}")
        legal = straight_from_obs[self.mask_key] != 0
        legal = legal.reshape(*state.shape[:-1], 1, self.action_dim).expand(*vec.shape[:-1], self.action_dim)
        return self.policy_dist.masked(vec, legal)

    def _refuse(self, straight_from_obs: Mapping[str, Tensor] | None) -> None:
        if straight_from_obs:
            raise ValueError(
                f"observations {sorted(straight_from_obs)} go straight to the actor, but {type(self).__name__} does not say what "
                "to do with them: override actor_network_forward in a subclass"
            )

    def forward(
        self,
        state: Tensor,
        log_dict: dict[str, Any] | None = None,
        straight_from_obs: Mapping[str, Tensor] | None = None,
    ) -> PolicyOutput:
        """(..., D) -> distributions with batch shape (..., G)."""
        vec = self.policy_parameters(state, straight_from_obs=straight_from_obs, log_dict=log_dict)
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
        self._refuse(straight_from_obs)
        return self.base(state).unflatten(-1, (self.num_gammas, -1))


class _Elementwise(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation_switch(activation)

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
        state_dim, action_kind, action_dim, gammas: see `BaseActorHead`.
        feature_dim: width between the blocks.
        residual_ff_dim: width within a block.
        residual_blocks: how many.
        activation, dropout_p: of the MLP and the blocks.
        normalization: N, "layer", "rmsnorm" or "none".
        continuous_dist_type: the distribution of continuous actions.
    """

    def __init__(
        self,
        state_dim: int,
        action_kind: str,
        action_dim: int,
        gammas: Tensor,
        feature_dim: int = 256,
        residual_ff_dim: int = 512,
        residual_blocks: int = 2,
        activation: str = "leaky_relu",
        normalization: str = "layer",
        dropout_p: float = 0.0,
        continuous_dist_type: type[DistributionType] = TanhGaussian,
    ) -> None:
        super().__init__(state_dim, action_kind, action_dim, gammas, continuous_dist_type)
        check_positive(feature_dim=feature_dim, residual_ff_dim=residual_ff_dim, residual_blocks=residual_blocks)
        self.inp = MLP(state_dim, feature_dim, 1, feature_dim, dropout_p=dropout_p, activation=activation)
        self.residual_blocks = nn.ModuleList(
            _residual_block(feature_dim, residual_ff_dim, normalization, activation, dropout_p) for _ in range(residual_blocks)
        )
        self.out = nn.Linear(feature_dim, self.d_output)

    def actor_network_forward(
        self,
        state: Tensor,
        straight_from_obs: Mapping[str, Tensor] | None = None,
        log_dict: dict[str, Any] | None = None,
    ) -> Tensor:
        self._refuse(straight_from_obs)
        x = self.inp(state)
        for block in self.residual_blocks:
            x = x + block(x)
        return self.out(x).unflatten(-1, (self.num_gammas, -1))


class BaseCriticHead(nn.Module, ABC):
    """Base of critic ensembles.

    Args:
        state_dim, action_dim: D, A.
        action_kind: "discrete", "continuous", "multibinary", or that of several parts (`amago.spaces.ActionSpec.kind`).
        gammas: (G,) discounts.
        num_critics: C.
    """

    gamma_features: Tensor

    def __init__(self, state_dim: int, action_dim: int, action_kind: str, gammas: Tensor, num_critics: int) -> None:
        super().__init__()
        _check_head(state_dim, action_kind, action_dim, gammas)
        check_positive(num_critics=num_critics)
        self.state_dim, self.action_dim, self.num_gammas, self.num_critics = state_dim, action_dim, len(gammas), num_critics
        self.register_buffer("gamma_features", gamma_feature(gammas.float()), persistent=False)

    @abstractmethod
    def forward(
        self, state: Tensor, action: Tensor, log_dict: dict[str, Any] | None = None, detach_params: bool = False
    ) -> Tensor:
        """Judge actions.

        Args:
            state: (B, L, D).
            action: (K, B, L, G, A) vectors, or (K, B, L, 1, A) for one that all discounts share.
            log_dict: to put metrics in, if given.
            detach_params: hold the critics' parameters out of the graph, so that a policy gradient reaches the action (and the
                state, unless the caller detaches that) and nothing else.

        Returns:
            (K, B, L, C, G, O), where O is 1 for a value, or the number of bins.
        """

    def judge(self, state: Tensor, stored: Tensor, chosen: Tensor, value: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Both things that an update asks: `forward` of the actions of the data, and the value of those that the policy chose.

        Args:
            state: (B, L, D).
            stored: (B, L, G or 1, A).
            chosen: (K, B, L, G, A). Of what is computed from them, the gradient reaches them alone.
            value: from outputs (..., O) to values (..., 1), for each discount apart.

        Returns:
            outputs (B, L, C, G, O), with gradient to parameters and state; values (K, B, L, C, G, 1).
        """
        net = self._plain_net()
        if net is not None:
            self._check_shapes(state, stored[None])
            self._check_shapes(state, chosen)
            out, values = evaluate_stored_and_chosen(net, state, self.gamma_features, stored[None], chosen, value)
            return at_least_float32(out[0]), at_least_float32(values)
        out = self(state, stored[None])[0]
        with torch.set_grad_enabled(chosen.requires_grad and torch.is_grad_enabled()):
            return out, value(self(state.detach(), chosen, detach_params=True))

    def of_drawn(self, state: Tensor, action: Tensor, drawn: Tensor) -> Tensor:
        """`forward` of the critics with the indices ``drawn`` (N,), (K, B, L, N, G, O)."""
        return self(state, action)[:, :, :, drawn]  # type: ignore[no-any-return]

    def _plain_net(self) -> EnsembleMLP | None:
        """The ensemble whose evaluation by `evaluate_state_action` is all that `forward` does; None where there is none."""
        return None

    def _forward_is_that_of(self, cls: type[BaseCriticHead]) -> bool:
        """Nobody has put something else in its place: then there are shorter ways than through it."""
        return type(self).forward is cls.forward and "forward" not in self.__dict__

    def _check_shapes(self, state: Tensor, action: Tensor) -> None:
        if state.ndim != 3 or state.shape[-1] != self.state_dim:
            raise ValueError(f"state must be (batch, length, {self.state_dim}), got shape {tuple(state.shape)}")
        expected = (*state.shape[:2], self.num_gammas, self.action_dim)
        if action.ndim != 5 or action.shape[1:] not in (expected, (*expected[:2], 1, self.action_dim)):
            raise ValueError(f"action must be (samples, {', '.join(map(str, expected))}), got shape {tuple(action.shape)}")

    def _log(self, log_dict: dict[str, Any] | None, values: Tensor) -> None:
        if log_dict is not None:
            detached = values.detach().float()
            log_dict["Q(s, a) (raw)"] = detached.mean()
            if self.num_critics > 1:
                log_dict["Q(s, a) std. over critics (raw)"] = detached.std(dim=3).mean()


@gin.configurable
class NCritics(BaseCriticHead):
    """An ensemble of C scalar critics.

    Discrete actions: a network of s gives G x A values, and an action vector (a distribution over actions, or a one-hot) weighs
    them. Otherwise it is a network of [s, h(gamma), a], with a clamped to +-0.999.

    Args:
        state_dim, action_dim, action_kind, gammas, num_critics: see `BaseCriticHead`.
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
        super().__init__(state_dim, action_dim, action_kind, gammas, num_critics)
        self.discrete = action_kind == "discrete"
        d_inp, d_output = (state_dim, len(gammas) * action_dim) if self.discrete else (state_dim + 1 + action_dim, 1)
        self.net = EnsembleMLP(num_critics, d_inp, d_hidden, n_layers, d_output, dropout_p, activation)

    def of_drawn(self, state: Tensor, action: Tensor, drawn: Tensor) -> Tensor:
        if not self._forward_is_that_of(NCritics):
            return super().of_drawn(state, action, drawn)
        with self.net.only(drawn):
            return self(state, action)  # type: ignore[no-any-return]

    def _plain_net(self) -> EnsembleMLP | None:
        return self.net if self._forward_is_that_of(NCritics) and not self.discrete else None

    def all_values(self, state: Tensor, detach_params: bool = False) -> Tensor:
        """Discrete actions: the value of each, (B, L, D) -> (B, L, C, G, A).

        Raises:
            ValueError: actions are not discrete.
        """
        if not self.discrete:
            raise ValueError("all_values: only the critics of discrete actions have a value for each action")
        B, L, D = state.shape
        out = self.net(state.reshape(B * L, D), detach_params)
        return out.view(len(out), B, L, self.num_gammas, self.action_dim).permute(1, 2, 0, 3, 4)

    def forward(
        self, state: Tensor, action: Tensor, log_dict: dict[str, Any] | None = None, detach_params: bool = False
    ) -> Tensor:
        """(B, L, D), (K, B, L, G, A) -> values (K, B, L, C, G, 1); see `BaseCriticHead.forward`."""
        self._check_shapes(state, action)
        if self.discrete:
            of_each = at_least_float32(self.all_values(state, detach_params))
            values = (of_each * action.unsqueeze(3)).sum(dim=-1, keepdim=True)
        else:
            values = at_least_float32(evaluate_state_action(self.net, state, self.gamma_features, action, detach_params))
        self._log(log_dict, values)
        return values


@gin.configurable
class NCriticsTwoHot(BaseCriticHead):
    """An ensemble of C critics that classify returns into bins instead of regressing them (Farebrother et al. 2024,
    arXiv 2403.03950; Hafner et al. 2023, arXiv 2301.04104).

    Each is a network of [s, h(gamma), a], whatever the action space, to the logits of O bins. A value is the expected bin.

    Args:
        state_dim, action_dim, action_kind, gammas, num_critics: see `BaseCriticHead`.
        d_hidden, n_layers, dropout_p, activation: of each network.
        min_return, max_return: of the lowest and the highest bin, in units of return (an agent's ``reward_multiplier`` included).
        output_bins: O.
        use_symlog: space the bins evenly in symlog(return); else in the return itself.
        labels: "two_hot" or "hl_gauss", see `amago.nets.twohot.Bins`.
        hl_gauss_sigma: standard deviation of the latter, in widths of a bin.
        init_value: what every critic says before training, of every action: a return strictly between ``min_return`` and
            ``max_return``. None: whatever a random last layer says, near the middle of the bins.
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
        min_return: float = -100_000.0,
        max_return: float = 100_000.0,
        output_bins: int = 128,
        use_symlog: bool = True,
        labels: str = "two_hot",
        hl_gauss_sigma: float = 0.75,
        init_value: float | None = None,
    ) -> None:
        super().__init__(state_dim, action_dim, action_kind, gammas, num_critics)
        self.bins = Bins(min_return, max_return, output_bins, use_symlog, labels, hl_gauss_sigma)
        self.net = EnsembleMLP(num_critics, state_dim + 1 + action_dim, d_hidden, n_layers, output_bins, dropout_p, activation)
        if init_value is not None:
            with torch.no_grad():
                self.net.output_layer.weight.zero_()
                self.net.output_layer.bias.copy_(self.bins.vaguest_logits(init_value).expand_as(self.net.output_layer.bias))

    def of_drawn(self, state: Tensor, action: Tensor, drawn: Tensor) -> Tensor:
        if not self._forward_is_that_of(NCriticsTwoHot):
            return super().of_drawn(state, action, drawn)
        with self.net.only(drawn):
            return self(state, action)  # type: ignore[no-any-return]

    def _plain_net(self) -> EnsembleMLP | None:
        return self.net if self._forward_is_that_of(NCriticsTwoHot) else None

    def forward(
        self, state: Tensor, action: Tensor, log_dict: dict[str, Any] | None = None, detach_params: bool = False
    ) -> Tensor:
        """(B, L, D), (K, B, L, G, A) -> logits (K, B, L, C, G, O); see `BaseCriticHead.forward`."""
        self._check_shapes(state, action)
        logits = at_least_float32(evaluate_state_action(self.net, state, self.gamma_features, action, detach_params))
        if log_dict is not None:
            self._log(log_dict, self.bins.value(logits.detach()))
        return logits
