"""Base classes of actors and critics, which `amago.nets.actor_critic` implements.

Shapes: B sequences of L timesteps, K sampled actions, C critics, G discounts, A action width, D state width, P parameters of a
policy, O outputs of a critic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

from amago.nets.ff import EnsembleMLP, evaluate_action, state_part
from amago.nets.policy_dists import Discrete, PolicyOutput, TanhGaussian, distribution_of
from amago.nets.utils import Log, at_least_float32, check_positive, has_argument
from amago.ops import gamma_feature
from amago.spaces import ActionMask

Straight: TypeAlias = Mapping[str, Tensor] | None
"""Observations that bypass the sequence model, by key."""


def _check_head(state_dim: int, action_dim: int, gammas: Tensor) -> None:
    check_positive(state_dim=state_dim, action_dim=action_dim)
    if gammas.ndim != 1 or not len(gammas):
        raise ValueError(f"gammas must be a vector of at least one discount, got shape {tuple(gammas.shape)}")


class BaseActorHead(nn.Module, ABC):
    """Base of all actors. A subclass implements `actor_network_forward`; an `amago.spaces.ActionMask` is applied to its result.

    All methods take the state, the log, and the observations that bypass the sequence model, in this order.

    Args:
        state_dim, action_dim, gammas: D, A, and the discounts (G,).
        discrete: an action is one choice among A; else it is A numbers.
        continuous_dist_type: the distribution of numbers, a subclass of `amago.nets.policy_dists.PolicyOutput`. None: there are
            none.
        discrete_dist_type: the distribution of choices.
        action_kind: of bits and of actions of several parts, `amago.spaces.ActionSpec.kind`; None: by ``discrete``.

    Attributes:
        policy_dist: makes policies of network outputs.
        actions_differentiable: samples of the policy can carry a gradient.
        d_output: G x P, the number of parameters of the policies of one timestep.
        mask_key: key of the observation that holds the mask of actions, from `amago.spaces.ActionMask`; None: no mask.
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        discrete: bool,
        gammas: Tensor,
        continuous_dist_type: Callable[[int], PolicyOutput] | None = TanhGaussian,
        discrete_dist_type: Callable[[int], PolicyOutput] = Discrete,
        action_kind: str | None = None,
    ) -> None:
        super().__init__()
        _check_head(state_dim, action_dim, gammas)
        kind = ("discrete" if discrete else "continuous") if action_kind is None else action_kind
        if bool(discrete) != (kind == "discrete"):
            raise ValueError(f"discrete={discrete} contradicts action_kind={action_kind!r}")
        self.state_dim, self.action_dim, self.num_gammas, self.discrete = state_dim, action_dim, len(gammas), bool(discrete)
        self.gammas = gammas
        self.policy_dist = distribution_of(kind, action_dim, continuous_dist_type, discrete_dist_type)
        self.actions_differentiable = self.policy_dist.actions_differentiable
        self.d_output = self.num_gammas * self.policy_dist.input_dimension
        self._dist_takes_mask = has_argument(self.policy_dist.forward, "mask")
        self.mask_key = ActionMask()

    @abstractmethod
    def actor_network_forward(self, state: Tensor, log_dict: Log = None, straight_from_obs: Straight = None) -> Tensor:
        """The parameters of the policies.

        Args:
            state: (..., D).
            log_dict: takes metrics.
            straight_from_obs: observations (..., *shape) that bypass the sequence model, by key, without the mask of actions.

        Returns:
            (..., G, P).
        """

    def policy_parameters(self, state: Tensor, log_dict: Log = None, straight_from_obs: Straight = None) -> Tensor:
        """`actor_network_forward` with the mask of actions applied, (..., D) -> (..., G, P).

        Raises:
            ValueError: ``straight_from_obs`` lacks the mask.
        """
        others = {k: v for k, v in (straight_from_obs or {}).items() if k != self.mask_key}
        vec = self.actor_network_forward(state, log_dict=log_dict, straight_from_obs=others)
        if self.mask_key is None:
            return vec
        if straight_from_obs is None or self.mask_key not in straight_from_obs:
            raise ValueError(f"ActionMask.key={self.mask_key!r}, but straight_from_obs has {sorted(straight_from_obs or ())}")
        legal = straight_from_obs[self.mask_key] != 0
        legal = legal.reshape(*state.shape[:-1], 1, self.action_dim).expand(*vec.shape[:-1], self.action_dim)
        return self.policy_dist.masked(vec, legal)

    def forward(
        self,
        state: Tensor,
        log_dict: Log = None,
        straight_from_obs: Straight = None,
        mask: Tensor | None = None,
        gamma_idx: int | None = None,
    ) -> Distribution:
        """(..., D) -> distributions with batch shape (..., G); with ``gamma_idx`` (..., 1), the policy of this discount alone. ``mask``
        (..., 1) is False at padding, which metrics leave out."""
        vec = self.policy_parameters(state, log_dict=log_dict, straight_from_obs=straight_from_obs)
        if gamma_idx is not None:
            vec = vec.narrow(-2, gamma_idx % self.num_gammas, 1)
        options = {"mask": mask} if self._dist_takes_mask and mask is not None else {}
        return self.policy_dist(vec, log_dict=log_dict, **options)  # type: ignore[no-any-return]


class BaseCriticHead(nn.Module):
    """Base of critic ensembles. A subclass implements `critic_network_forward`; `evaluate` and `evaluate_subset` call it
    through `forward`.

    Args:
        state_dim, action_dim, discrete, gammas: see `BaseActorHead`.
        num_critics: C.
    """

    fused: ClassVar[bool] = False
    """`evaluate` and `evaluate_subset` may bypass `forward`, because it returns the same as
    `amago.nets.ff.evaluate_action` on ``self.net``. It is False for a subclass with another `forward` or
    `critic_network_forward`, unless that declares it again."""

    gamma_features: Tensor

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        declared: Any = next(c for c in cls.__mro__ if "fused" in c.__dict__)
        if cls.forward is not declared.forward or cls.critic_network_forward is not declared.critic_network_forward:
            cls.fused = False

    def __init__(self, state_dim: int, action_dim: int, discrete: bool, gammas: Tensor, num_critics: int) -> None:
        super().__init__()
        _check_head(state_dim, action_dim, gammas)
        check_positive(num_critics=num_critics)
        self.state_dim, self.action_dim, self.num_gammas, self.num_critics = state_dim, action_dim, len(gammas), num_critics
        self.discrete, self.gammas = bool(discrete), gammas
        self.register_buffer("gamma_features", gamma_feature(gammas.float()), persistent=False)

    def __len__(self) -> int:
        return self.num_critics

    def critic_network_forward(self, state: Tensor, action: Tensor, log_dict: Log = None) -> Any:
        """Evaluate actions: override this. Arguments and result as of `forward`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement critic_network_forward")

    def forward(self, state: Tensor, action: Tensor, log_dict: Log = None) -> Any:
        """Evaluate actions.

        Args:
            state: (B, L, D).
            action: (K, B, L, G, A) vectors, or (K, B, L, 1, A) if all discounts share them.
            log_dict: takes metrics.

        Returns:
            values (K, B, L, C, G, 1), or categorical distributions over O bins with batch shape (K, B, L, C, G).
        """
        return self.critic_network_forward(state, action, log_dict=log_dict)

    def frozen(self, state: Tensor, action: Tensor, log_dict: Log = None) -> Any:
        """`forward` with the critics' parameters held out of the graph: gradients reach ``action`` and ``state`` only."""
        detached = {name: p.detach() for name, p in self.named_parameters()}
        return torch.func.functional_call(self, detached, (state, action), {"log_dict": log_dict})

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
            outputs (B, L, C, G, O), values or logits, for ``stored``, with gradients to parameters and state; values
            (K, B, L, C, G, 1) of ``chosen``, with gradients to ``chosen`` alone.
        """
        given = stored.expand(-1, -1, self.num_gammas, -1)  # a subclass's critics may count on all discounts
        out = outputs_of(self(state, given[None]))[0]
        with torch.set_grad_enabled(chosen.requires_grad and torch.is_grad_enabled()):
            return out, value(outputs_of(self.frozen(state.detach(), chosen)))

    def evaluate_subset(self, state: Tensor, action: Tensor, subset: Tensor) -> Tensor:
        """The outputs of the critics with the indices ``subset`` (N,), (K, B, L, N, G, O)."""
        return outputs_of(self(state, action))[:, :, :, subset]

    def _check_shapes(self, state: Tensor, action: Tensor) -> None:
        if state.ndim != 3 or state.shape[-1] != self.state_dim:
            raise ValueError(f"state must be (batch, length, {self.state_dim}), got shape {tuple(state.shape)}")
        expected = (*state.shape[:2], self.num_gammas, self.action_dim)
        if action.ndim != 5 or action.shape[1:] not in (expected, (*expected[:2], 1, self.action_dim)):
            raise ValueError(f"action must be (samples, {', '.join(map(str, expected))}), got shape {tuple(action.shape)}")

    def _log(self, log_dict: Log, values: Tensor) -> None:
        if log_dict is not None:
            detached = values.detach().float()
            log_dict["Q(s, a) (raw)"] = detached.mean()
            if self.num_critics > 1:
                log_dict["Q(s, a) std. over critics (raw)"] = detached.std(dim=3).mean()


def outputs_of(result: Tensor | Distribution) -> Tensor:
    """Results of critics as a tensor: values (..., 1), or the logits (..., O) of a categorical distribution."""
    return result.logits if isinstance(result, Categorical) else result  # type: ignore[return-value]


class EnsembleCritics(BaseCriticHead):
    """Critics whose networks are an `amago.nets.ff.EnsembleMLP`, ``self.net``.

    If `fused`, evaluations share work: the state's part of the first layer is computed once, and only the critics in use are.
    """

    net: EnsembleMLP
    reads_action: bool
    """The networks are functions of [s, h(gamma), a], else of s alone."""
    output_scale: Tensor | None
    """The factor of the networks' outputs, a power of two; None: 1."""

    def __init__(self, state_dim: int, action_dim: int, discrete: bool, gammas: Tensor, num_critics: int) -> None:
        super().__init__(state_dim, action_dim, discrete, gammas, num_critics)
        self.register_buffer("output_scale", None)

    def start_scaling(self) -> None:
        """Multiply the networks' outputs by `output_scale`, 1 at first, which is saved with the parameters."""
        self.register_buffer("output_scale", torch.ones((), device=self.net.output_layer.weight.device))

    @torch.no_grad()
    def grow_scale(self, factor: Tensor) -> None:
        """Multiply `output_scale` by a power of two, and divide the output layers by it: values stay as they are, to the
        bit."""
        assert self.output_scale is not None
        self.output_scale.mul_(factor)
        for param in self.net.output_layer.parameters():
            param.div_(factor)
            if param.grad is not None:  # of the parameters before
                param.grad.mul_(factor)

    def scaled(self, out: Tensor) -> Tensor:
        """The networks' outputs -> the critics' outputs."""
        return out if self.output_scale is None else out * self.output_scale

    def outputs(self, state: Tensor, action: Tensor, subset: Tensor | None = None) -> Tensor:
        """Values or logits, (K, B, L, C, G, O), of the critics with the indices ``subset``; arguments as for `forward`."""
        self._check_shapes(state, action)
        weights = self.net.weights(subset)
        out = evaluate_action(self.net, weights, state_part(weights, state), self.gamma_features, action)
        return self.scaled(at_least_float32(out))

    def evaluate(
        self, state: Tensor, stored: Tensor, chosen: Tensor, value: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        if not self.fused or not self.reads_action:
            return super().evaluate(state, stored, chosen, value)
        self._check_shapes(state, stored[None])
        self._check_shapes(state, chosen)
        weights, frozen = self.net.weights(), self.net.weights(detach=True)
        of_state = state_part(weights, state)  # serves both
        out = self.scaled(at_least_float32(evaluate_action(self.net, weights, of_state, self.gamma_features, stored[None]))[0])
        if chosen.requires_grad and torch.is_grad_enabled():
            q = evaluate_action(self.net, frozen, of_state.detach(), self.gamma_features, chosen)
            return out, at_least_float32(value(self.scaled(q)))
        with torch.no_grad():  # block by block, so that the outputs of all samples need not exist at once
            args = (self.net, frozen, of_state, self.gamma_features, chosen)
            return out, at_least_float32(evaluate_action(*args, value=lambda q: value(self.scaled(q))))

    def evaluate_subset(self, state: Tensor, action: Tensor, subset: Tensor) -> Tensor:
        return self.outputs(state, action, subset) if self.fused else super().evaluate_subset(state, action, subset)


class DetachedCritics(nn.Module):
    """Critics with their parameters held out of the graph, which a policy gradient passes through.

    Its state dict repeats the critics' state dict; loading ignores these entries, because this module has no parameters itself.
    """

    def __init__(self, critics: nn.Module) -> None:
        super().__init__()
        self.follow(critics)

    def follow(self, critics: nn.Module) -> None:
        """Evaluate these critics from now on."""
        self._critics = (critics,)  # in a tuple, so that their parameters are not registered a second time

    def forward(self, state: Tensor, action: Tensor, log_dict: Log = None) -> Any:
        """See `BaseCriticHead.frozen`."""
        return self._critics[0].frozen(state, action, log_dict=log_dict)  # type: ignore[operator]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_critics":  # while a copy is being made
                raise
            return getattr(self._critics[0], name)

    def __len__(self) -> int:
        return len(self._critics[0])  # type: ignore[arg-type]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._critics[0].state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def _load_from_state_dict(self, *args: object) -> None:
        """Load nothing: the critics load their own entries."""
