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
from torch.distributions import Categorical, Distribution

from amago.config import NamedArguments
from amago.nets.ensemble import EnsembleMLP, evaluate_action, state_part
from amago.nets.policy_dists import Discrete, PolicyOutput, TanhGaussian
from amago.nets.product import distribution_of
from amago.nets.twohot import ReturnDistribution
from amago.nets.utils import at_least_float32, check_positive, has_argument
from amago.ops import gamma_feature
from amago.spaces import ActionMask


def _check_head(state_dim: int, action_dim: int, discrete: bool, gammas: Tensor) -> None:
    for name, value in (("action_dim", action_dim), ("discrete", discrete)):
        if isinstance(value, str):
            raise TypeError(
                f"{name}={value!r}: heads take state_dim, action_dim, discrete (True or False) and gammas, in this order; "
                "the kind of other actions is the keyword action_kind of actors"
            )
    check_positive(state_dim=state_dim, action_dim=action_dim)
    if gammas.ndim != 1 or not len(gammas):
        raise ValueError(f"gammas must be a vector of at least one discount, got shape {tuple(gammas.shape)}")


class BaseActorHead(NamedArguments, nn.Module, ABC):
    """Base of all actors. A subclass implements `actor_network_forward`; an `amago.spaces.ActionMask` is applied to its result.

    All methods take the state, the log, and the observations that bypass the sequence model, in this order.

    Args:
        state_dim: D.
        action_dim: A.
        discrete: whether an action is one choice among A; else it is A numbers.
        gammas: (G,) discounts.
        continuous_dist_type: the distribution of numbers, a subclass of `amago.nets.policy_dists.PolicyOutput`. None: there are none.
        discrete_dist_type: the distribution of choices.
        action_kind: of bits and of actions of several parts, `amago.spaces.ActionSpec.kind`; None: as ``discrete`` says.

    Attributes:
        policy_dist: makes policies of network outputs.
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
        _check_head(state_dim, action_dim, discrete, gammas)
        kind = ("discrete" if discrete else "continuous") if action_kind is None else action_kind
        if bool(discrete) != (kind == "discrete"):
            raise ValueError(f"discrete={discrete} contradicts action_kind={action_kind!r}")
        self.state_dim, self.action_dim, self.num_gammas, self.discrete = state_dim, action_dim, len(gammas), bool(discrete)
        self.policy_dist = distribution_of(kind, action_dim, continuous_dist_type, discrete_dist_type)
        self._dist_takes_mask = has_argument(self.policy_dist.forward, "mask")
        self.mask_key = ActionMask()

    @property
    def actions_differentiable(self) -> bool:
        """Whether samples of the policy can carry a gradient."""
        return self.policy_dist.actions_differentiable

    @property
    def d_output(self) -> int:
        """G x P, the number of parameters of the policies of one timestep."""
        return self.num_gammas * self.policy_dist.input_dimension

    @abstractmethod
    def actor_network_forward(
        self,
        state: Tensor,
        log_dict: dict[str, Any] | None = None,
        straight_from_obs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The parameters of the policies.

        Args:
            state: (..., D).
            log_dict: to put metrics in, if given.
            straight_from_obs: observations (..., *shape) that bypass the sequence model, by key, without the mask of actions.

        Returns:
            (..., G, P).
        """

    def policy_parameters(
        self,
        state: Tensor,
        log_dict: dict[str, Any] | None = None,
        straight_from_obs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
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
        log_dict: dict[str, Any] | None = None,
        straight_from_obs: Mapping[str, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Distribution:
        """(..., D) -> distributions with batch shape (..., G). ``mask`` (..., 1) is False at padding, which metrics leave out."""
        vec = self.policy_parameters(state, log_dict=log_dict, straight_from_obs=straight_from_obs)
        options = {"mask": mask} if self._dist_takes_mask and mask is not None else {}
        return self.policy_dist(vec, log_dict=log_dict, **options)  # type: ignore[no-any-return]


class BaseCriticHead(NamedArguments, nn.Module):
    """Base of critic ensembles. A subclass implements `critic_network_forward`; `evaluate` and `evaluate_subset` call it through
    `forward`.

    Args:
        state_dim, action_dim: D, A.
        discrete: whether an action is one choice among A.
        gammas: (G,) discounts.
        num_critics: C.
    """

    fused: ClassVar[bool] = False
    """`evaluate` and `evaluate_subset` may bypass `forward`, whose result is that of
    `amago.nets.ensemble.evaluate_state_action` on ``self.net``. It is False for a subclass with another `forward` or
    `critic_network_forward`, unless that declares it again."""
    _forward_detaches: ClassVar[bool] = True
    _network_detaches: ClassVar[bool] = False

    gamma_features: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared: Any = next(c for c in cls.__mro__ if "fused" in c.__dict__)
        if cls.forward is not declared.forward or cls.critic_network_forward is not declared.critic_network_forward:
            cls.fused = False
        cls._forward_detaches = has_argument(cls.forward, "detach_params")
        cls._network_detaches = has_argument(cls.critic_network_forward, "detach_params")

    def __init__(self, state_dim: int, action_dim: int, discrete: bool, gammas: Tensor, num_critics: int) -> None:
        super().__init__()
        _check_head(state_dim, action_dim, discrete, gammas)
        check_positive(num_critics=num_critics)
        self.state_dim, self.action_dim, self.num_gammas, self.num_critics = state_dim, action_dim, len(gammas), num_critics
        self.discrete = bool(discrete)
        self.register_buffer("gamma_features", gamma_feature(gammas.float()), persistent=False)

    def __len__(self) -> int:
        return self.num_critics

    def critic_network_forward(self, state: Tensor, action: Tensor, log_dict: dict[str, Any] | None = None) -> Any:
        """Evaluate actions: override this. Arguments and result are those of `forward`.

        A keyword ``detach_params`` may be added, which then holds the critics' parameters out of the graph. Without it, `forward`
        does so for any network, in more time.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement critic_network_forward")

    def forward(
        self, state: Tensor, action: Tensor, log_dict: dict[str, Any] | None = None, detach_params: bool = False
    ) -> Any:
        """Evaluate actions.

        Args:
            state: (B, L, D).
            action: (K, B, L, G, A) vectors, or (K, B, L, 1, A) if all discounts share them.
            log_dict: to put metrics in, if given.
            detach_params: hold the critics' parameters out of the graph: gradients reach ``action`` and ``state`` only.

        Returns:
            values (K, B, L, C, G, 1), or categorical distributions over O bins with batch shape (K, B, L, C, G).
        """
        if not detach_params:
            return self.critic_network_forward(state, action, log_dict=log_dict)
        if self._network_detaches:
            return self.critic_network_forward(state, action, log_dict=log_dict, detach_params=True)  # type: ignore[call-arg]
        return self._without_parameters(state, action, log_dict)

    def frozen(self, state: Tensor, action: Tensor, log_dict: dict[str, Any] | None = None) -> Any:
        """`forward` with the critics' parameters held out of the graph, whether or not a subclass knows of ``detach_params``."""
        if self._forward_detaches:
            return self(state, action, log_dict=log_dict, detach_params=True)
        return self._without_parameters(state, action, log_dict)

    def _without_parameters(self, state: Tensor, action: Tensor, log_dict: dict[str, Any] | None) -> Any:
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
            outputs (B, L, C, G, O), values or logits, for ``stored``, with gradients to parameters and state; values (K, B, L, C, G, 1) of
            ``chosen``, with gradients to ``chosen`` alone.
        """
        out = outputs_of(self(state, stored[None]))[0]
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

    def _log(self, log_dict: dict[str, Any] | None, values: Tensor) -> None:
        if log_dict is not None:
            detached = values.detach().float()
            log_dict["Q(s, a) (raw)"] = detached.mean()
            if self.num_critics > 1:
                log_dict["Q(s, a) std. over critics (raw)"] = detached.std(dim=3).mean()


def outputs_of(result: Tensor | Distribution) -> Tensor:
    """What critics returned, as a tensor: values (..., 1), or the logits (..., O) of a categorical distribution."""
    if isinstance(result, ReturnDistribution):
        return result.raw_logits
    if isinstance(result, Categorical):
        return result.logits
    if not isinstance(result, Tensor):
        raise TypeError(f"critics must return a tensor or a torch.distributions.Categorical, got {type(result).__name__}")
    return result


class EnsembleCritics(BaseCriticHead):
    """Critics whose networks are an `amago.nets.ensemble.EnsembleMLP`, ``self.net``.

    If `fused`, evaluations share work: the state's part of the first layer is computed once, and only the critics in use are.
    """

    net: EnsembleMLP
    reads_action: bool
    """The networks are functions of [s, h(gamma), a], else of s alone."""
    output_scale: Tensor | None
    """What the networks' outputs are multiplied by, a power of two; None: nothing."""

    def __init__(self, state_dim: int, action_dim: int, discrete: bool, gammas: Tensor, num_critics: int) -> None:
        super().__init__(state_dim, action_dim, discrete, gammas, num_critics)
        self.register_buffer("output_scale", None)

    def start_scaling(self) -> None:
        """Multiply the networks' outputs by `output_scale`, 1 at first, which is saved with the parameters."""
        self.register_buffer("output_scale", torch.ones((), device=self.net.output_layer.weight.device))

    @torch.no_grad()
    def grow_scale(self, factor: Tensor) -> None:
        """Multiply `output_scale` by a power of two, and divide the output layers by it: values stay as they are, to the bit."""
        assert self.output_scale is not None
        self.output_scale.mul_(factor)
        for param in (self.net.output_layer.weight, self.net.output_layer.bias):
            param.div_(factor)

    def scaled(self, out: Tensor) -> Tensor:
        """The networks' outputs -> those of the critics."""
        return out if self.output_scale is None else out * self.output_scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.output_scale is not None:  # a state that was saved without
            state_dict.setdefault(f"{prefix}output_scale", torch.ones_like(self.output_scale))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def outputs(self, state: Tensor, action: Tensor, detach_params: bool = False) -> Tensor:
        """Values or logits, (K, B, L, C, G, O); arguments as for `forward`."""
        raise NotImplementedError

    def evaluate(
        self, state: Tensor, stored: Tensor, chosen: Tensor, value: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        if not self.fused or not self.reads_action:
            return super().evaluate(state, stored, chosen, value)
        self._check_shapes(state, stored[None])
        self._check_shapes(state, chosen)
        of_state = state_part(self.net, state)  # serves both
        out = self.scaled(at_least_float32(evaluate_action(self.net, of_state, self.gamma_features, stored[None]))[0])
        if chosen.requires_grad and torch.is_grad_enabled():
            q = evaluate_action(self.net, of_state.detach(), self.gamma_features, chosen, detach_params=True)
            return out, at_least_float32(value(self.scaled(q)))
        with torch.no_grad():  # block by block, so that the outputs of all samples need not exist at once
            values = evaluate_action(
                self.net, of_state, self.gamma_features, chosen, detach_params=True, value=lambda q: value(self.scaled(q))
            )
        return out, at_least_float32(values)

    def evaluate_subset(self, state: Tensor, action: Tensor, subset: Tensor) -> Tensor:
        if not self.fused:
            return super().evaluate_subset(state, action, subset)
        with self.net.only(subset):
            return self.outputs(state, action)


class DetachedCritics(nn.Module):
    """Critics with their parameters held out of the graph, which a policy gradient passes through.

    Its state dict repeats that of the critics; loading ignores these entries, as nothing here is a parameter of its own.

    Args:
        critics: are not copied.
    """

    def __init__(self, critics: nn.Module) -> None:
        super().__init__()
        self.follow(critics)

    def follow(self, critics: nn.Module) -> None:
        """Evaluate these critics from now on."""
        self._critics = (critics,)  # in a tuple, so that their parameters are not registered a second time

    def forward(self, state: Tensor, action: Tensor, log_dict: dict[str, Any] | None = None) -> Any:
        """See `BaseCriticHead.forward`."""
        critics: Any = self._critics[0]
        return critics.frozen(state, action, log_dict=log_dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_critics":  # while a copy is being made
                raise
            return getattr(self._critics[0], name)

    def __len__(self) -> int:
        critics: Any = self._critics[0]
        return len(critics)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._critics[0].state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Nothing is loaded: the critics load their own entries."""
