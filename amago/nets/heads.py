"""Base classes of actors and critics, which `amago.nets.actor_critic` implements.

Shapes: B sequences of L timesteps, K sampled actions, C critics, G discounts, A action width, D state width, P parameters of a
policy, O outputs of a critic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from amago.config import NamedArguments
from amago.nets.ensemble import EnsembleMLP, evaluate_action, state_part
from amago.nets.policy_dists import DistributionType, PolicyOutput, TanhGaussian
from amago.nets.product import distribution_of
from amago.nets.utils import at_least_float32, check_positive
from amago.ops import gamma_feature
from amago.spaces import ActionMask, parts_of


def _check_head(state_dim: int, action_kind: str, action_dim: int, gammas: Tensor) -> None:
    check_positive(state_dim=state_dim, action_dim=action_dim)
    parts_of(action_kind, action_dim)  # raises for an unknown kind
    if gammas.ndim != 1 or not len(gammas):
        raise ValueError(f"gammas must be a vector of at least one discount, got shape {tuple(gammas.shape)}")


class BaseActorHead(NamedArguments, nn.Module, ABC):
    """Base of all actors. A subclass implements `actor_network_forward`; an `amago.spaces.ActionMask` is applied to its result.

    All methods take the state, the observations that bypass the sequence model, and the log, in this order.

    Args:
        state_dim: D.
        action_kind: "discrete", "continuous", "multibinary", or that of several parts (`amago.spaces.ActionSpec.kind`).
        action_dim: A.
        gammas: (G,) discounts.
        continuous_dist_type: the distribution of continuous actions.

    Attributes:
        policy_dist: makes policies of network outputs.
        mask_key: key of the observation that holds the mask of actions, from `amago.spaces.ActionMask`; None: no mask.
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
        """G x P, the number of parameters of the policies of one timestep."""
        return self.num_gammas * self.policy_dist.input_dimension

    @abstractmethod
    def actor_network_forward(
        self,
        state: Tensor,
        straight_from_obs: Mapping[str, Tensor] | None = None,
        log_dict: dict[str, Any] | None = None,
    ) -> Tensor:
        """The parameters of the policies.

        Args:
            state: (..., D).
            straight_from_obs: observations (..., *shape) that bypass the sequence model, by key, without the mask of actions.
            log_dict: to put metrics in, if given.

        Returns:
            (..., G, P).
        """

    def policy_parameters(
        self,
        state: Tensor,
        straight_from_obs: Mapping[str, Tensor] | None = None,
        log_dict: dict[str, Any] | None = None,
    ) -> Tensor:
        """`actor_network_forward` with the mask of actions applied, (..., D) -> (..., G, P).

        Raises:
            ValueError: ``straight_from_obs`` lacks the mask.
        """
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
        straight_from_obs: Mapping[str, Tensor] | None = None,
        log_dict: dict[str, Any] | None = None,
        mask: Tensor | None = None,
    ) -> PolicyOutput:
        """(..., D) -> distributions with batch shape (..., G). ``mask`` (..., 1) is False at padding, which metrics leave out."""
        vec = self.policy_parameters(state, straight_from_obs=straight_from_obs, log_dict=log_dict)
        return self.policy_dist(vec, log_dict=log_dict, mask=mask)


class BaseCriticHead(NamedArguments, nn.Module, ABC):
    """Base of critic ensembles. A subclass implements `forward`; `evaluate` and `evaluate_subset` call it.

    Args:
        state_dim, action_dim: D, A.
        action_kind: "discrete", "continuous", "multibinary", or that of several parts (`amago.spaces.ActionSpec.kind`).
        gammas: (G,) discounts.
        num_critics: C.
    """

    fused: ClassVar[bool] = False
    """`evaluate` and `evaluate_subset` may bypass `forward`, whose result is that of
    `amago.nets.ensemble.evaluate_state_action` on ``self.net``. It is False for a subclass with another `forward`, unless that
    declares it again."""

    gamma_features: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared = next(c for c in cls.__mro__ if "fused" in c.__dict__)
        if cls.forward is not declared.forward:  # type: ignore[attr-defined]
            cls.fused = False

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
        """Evaluate actions.

        Args:
            state: (B, L, D).
            action: (K, B, L, G, A) vectors, or (K, B, L, 1, A) if all discounts share them.
            log_dict: to put metrics in, if given.
            detach_params: hold the critics' parameters out of the graph: gradients reach ``action`` and ``state`` only.

        Returns:
            (K, B, L, C, G, O), where O is 1 for a value, or the number of bins.
        """

    def evaluate(
        self, state: Tensor, stored: Tensor, chosen: Tensor, value: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Critic outputs for actions of the data, and values of actions of the policy.

        Args:
            state: (B, L, D).
            stored: (B, L, G or 1, A), actions of the data.
            chosen: (K, B, L, G, A), actions of the policy.
            value: maps outputs (..., O) to values (..., 1), each row by itself.

        Returns:
            outputs (B, L, C, G, O) for ``stored``, with gradients to parameters and state; values (K, B, L, C, G, 1) of
            ``chosen``, with gradients to ``chosen`` alone.
        """
        out = self(state, stored[None])[0]
        with torch.set_grad_enabled(chosen.requires_grad and torch.is_grad_enabled()):
            return out, value(self(state.detach(), chosen, detach_params=True))

    def evaluate_subset(self, state: Tensor, action: Tensor, subset: Tensor) -> Tensor:
        """`forward` of the critics with the indices ``subset`` (N,), (K, B, L, N, G, O)."""
        return self(state, action)[:, :, :, subset]  # type: ignore[no-any-return]

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


class EnsembleCritics(BaseCriticHead):
    """Critics whose networks are an `amago.nets.ensemble.EnsembleMLP`, ``self.net``.

    If `fused`, evaluations share work: the state's part of the first layer is computed once, and only the critics in use are.
    """

    net: EnsembleMLP
    reads_action: bool
    """The networks are functions of [s, h(gamma), a], else of s alone."""

    def evaluate(
        self, state: Tensor, stored: Tensor, chosen: Tensor, value: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        if not self.fused or not self.reads_action:
            return super().evaluate(state, stored, chosen, value)
        self._check_shapes(state, stored[None])
        self._check_shapes(state, chosen)
        of_state = state_part(self.net, state)  # serves both
        out = at_least_float32(evaluate_action(self.net, of_state, self.gamma_features, stored[None]))[0]
        if chosen.requires_grad and torch.is_grad_enabled():
            q = evaluate_action(self.net, of_state.detach(), self.gamma_features, chosen, detach_params=True)
            return out, at_least_float32(value(q))
        with torch.no_grad():  # block by block, so that the outputs of all samples need not exist at once
            values = evaluate_action(self.net, of_state, self.gamma_features, chosen, detach_params=True, value=value)
        return out, at_least_float32(values)

    def evaluate_subset(self, state: Tensor, action: Tensor, subset: Tensor) -> Tensor:
        if not self.fused:
            return super().evaluate_subset(state, action, subset)
        with self.net.only(subset):
            return self(state, action)  # type: ignore[no-any-return]
