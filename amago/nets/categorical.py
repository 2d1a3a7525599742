"""Distributions over discrete actions."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import gin
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical, Distribution

from amago.config import NamedArguments
from amago.nets.distributions import ONE, ActionDistribution, PolicyOutput, Shape


class DiscreteOutput(ActionDistribution, Categorical):
    """Categorical distributions, whose probabilities are taken as they are.

    Args:
        probs: (..., A), clipped and renormalised; 0 where illegal.
        kind: the `Discrete` that made them, or another class with its ``action_from_buffer``.
        illegal: (..., A) bool, choices of probability 0; None: no mask.
    """

    has_rsample = False
    probs: Tensor  # instead of the lazy attribute of Categorical

    def __init__(self, probs: Tensor, kind: PolicyOutput, illegal: Tensor | None = None) -> None:
        super().__init__(probs.shape[:-1])
        self.probs, self.kind, self.illegal = probs, kind, illegal
        self._param, self._num_events = probs, probs.shape[-1]  # what methods of Categorical read

    def expand(self, batch_shape: Shape, _instance: Any = None) -> DiscreteOutput:
        shape = torch.Size((*batch_shape, self._num_events))
        illegal = None if self.illegal is None else self.illegal.expand(shape)
        return DiscreteOutput(self.probs.expand(shape), self.kind, illegal)

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        """Indices, ``sample_shape`` + (..., 1)."""
        flat = self.probs.detach().reshape(-1, self._num_events)
        num = torch.Size(sample_shape).numel()
        drawn = torch.multinomial(flat, num, replacement=num > 1)
        return drawn.T.reshape(*sample_shape, *self.batch_shape, 1)

    @property
    def mode(self) -> Tensor:
        """The likeliest choice, (...) indices."""
        return self.probs.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """(...) log-probabilities of indices (...), or (..., 1) as `sample` returns them; samples may come first.

        Raises:
            ValueError: ``action`` has another shape.
        """
        batch = self.batch_shape
        if action.ndim > len(batch) and action.shape != batch and action.shape[-1] == 1:
            action = action.squeeze(-1)
        if action.shape[action.ndim - len(batch) :] != batch:
            raise ValueError(f"actions must be indices of shape {tuple(batch)}, got {tuple(action.shape)}")
        probs = self.probs if action.shape == batch else self.probs.expand(*action.shape, -1)
        chosen = probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
        # Finite for illegal actions in the data too: a filter's weight of 0 times -inf would be NaN.
        return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()

    def sample_vector(self, grad: bool = False) -> Tensor:
        """One-hot actions, clipped as probabilities are, with the gradient of a Gumbel-softmax sample (straight-through, Jang
        et al. 2017, arXiv 1611.01144)."""
        return self.gumbel_softmax(grad, getattr(self.kind, "gumbel_temperature", 0.5))

    def gumbel_softmax(self, grad: bool, temperature: float) -> Tensor:
        """`sample_vector`, with the temperature of its gradient."""
        gumbel = -torch.empty_like(self.probs).exponential_().log()  # also without gradient, so that both draw the same
        scores = self.probs.clamp(min=torch.finfo(self.probs.dtype).tiny).log() + gumbel
        if self.illegal is not None:
            scores = scores.masked_fill(self.illegal, -math.inf)
        hard = self.clip_like_policy(F.one_hot(scores.argmax(dim=-1), self.probs.shape[-1]).to(self.probs.dtype))
        if not grad:
            return hard
        soft = (scores / temperature).softmax(dim=-1)
        return hard + (soft - soft.detach())

    def log_prob_of_vector(self, vector: Tensor) -> Tensor:
        return self.log_prob(vector.argmax(dim=-1).expand(self.probs.shape[:-1])).unsqueeze(-1)

    def clip_like_policy(self, vector: Tensor) -> Tensor:
        if self.illegal is None:
            return self.kind.action_from_buffer(vector)
        return self.kind.action_from_buffer(vector, self.illegal)  # type: ignore[call-arg]

    def entropy(self) -> Tensor:
        return torch.special.entr(self.probs).sum(dim=-1)

    def sample_action(self, sample: bool) -> Tensor:
        return self.sample() if sample else self.mode.unsqueeze(-1)

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Entropy": self.entropy().detach().mean()}


class _ToBounds(torch.autograd.Function):
    """Logits, unchanged. Their gradient is zero where descent would lower a logit that is ``low`` (bool), or raise one that is
    ``high``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, low: Tensor, high: Tensor) -> Tensor:
        ctx.save_for_backward(low, high)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        low, high = ctx.saved_tensors
        return grad.masked_fill((low & (grad > 0)) | (high & (grad < 0)), 0.0), None, None


@gin.configurable(module="amago.nets.policy_dists")
class Discrete(PolicyOutput):
    """Softmax over A choices, each probability clipped, then divided by the sum (which carries no gradient).

    Args:
        d_action: A.
        clip_prob_low, clip_prob_high: the clip. A low clip keeps every action possible, and bounds log-probabilities.
            ``clip_prob_low`` None: 0.001 up to 50 choices, 0.05 / A beyond, so that the probabilities of an untrained policy,
            about 1 / A, lie above it, and the unlikely choices have at most 5% together.
        gumbel_temperature: of the gradient of sampled actions.
        clip_gradient: a gradient that leads back towards the bounds passes a clipped probability; False: none does, as in the
            original, and a policy that every state has pushed there stays.
    """

    is_discrete = True
    actions_differentiable = True

    def __init__(
        self,
        d_action: int,
        clip_prob_low: float | None = None,
        clip_prob_high: float = 0.99,
        gumbel_temperature: float = 0.5,
        clip_gradient: bool = True,
    ) -> None:
        super().__init__(d_action)
        if clip_prob_low is None:
            clip_prob_low = min(0.001, 0.05 / d_action)
        if not gumbel_temperature > 0.0:
            raise ValueError(f"gumbel_temperature must be positive, got gumbel_temperature={gumbel_temperature}")
        if not 0.0 <= clip_prob_low < clip_prob_high <= 1.0:
            raise ValueError(
                "0 <= clip_prob_low < clip_prob_high <= 1 must hold, got "
                f"clip_prob_low={clip_prob_low}, clip_prob_high={clip_prob_high}"
            )
        self.clip_prob_low, self.clip_prob_high = clip_prob_low, clip_prob_high
        self.gumbel_temperature, self.clip_gradient = gumbel_temperature, clip_gradient

    @property
    def input_dimension(self) -> int:
        return self.d_action

    def action_from_buffer(self, action: Tensor, illegal: Tensor | None = None) -> Tensor:
        """Clip and renormalise probabilities or one-hot actions (..., A), so that critics read actions of the data as they
        read the policy's. Entries where ``illegal`` is True become exactly 0."""
        clipped = action.clamp(self.clip_prob_low, self.clip_prob_high)
        if self.clip_gradient and action.requires_grad:
            clipped = action + (clipped - action).detach()
        if illegal is not None:
            clipped = clipped.masked_fill(illegal, 0.0)
        return clipped / clipped.detach().sum(dim=-1, keepdim=True)

    def masked(self, vec: Tensor, legal: Tensor) -> Tensor:
        """Logits, -inf where illegal, which `make` recognises. Where no choice is legal, all count as legal."""
        legal = legal | ~legal.any(dim=-1, keepdim=True)
        return vec.masked_fill(~legal, -math.inf)

    def make(self, vec: Tensor) -> DiscreteOutput:
        illegal = vec == -math.inf
        probs = vec.softmax(dim=-1)
        if self.clip_gradient and vec.requires_grad:
            seen = probs.detach()
            probs = _ToBounds.apply(vec, seen < self.clip_prob_low, seen > self.clip_prob_high).softmax(dim=-1)
        return DiscreteOutput(self.action_from_buffer(probs, illegal), self, illegal)


@gin.configurable(module="amago.nets.policy_dists")
class DiscreteLikeContinuous(NamedArguments, Distribution):
    """One-hot actions of a categorical distribution, with a gradient: straight-through Gumbel-softmax.

    Critics that take the vector of an action then serve discrete actions as they serve continuous ones.

    Args:
        categorical: (..., A) a categorical distribution.
        gumbel_softmax_temperature: of the gradient of `rsample`. None: that of ``categorical``, where it comes from a `Discrete`
            (``Discrete.gumbel_temperature``), else 0.5.

    Attributes:
        probs, logits: (..., A), those of ``categorical``.
    """

    has_rsample = True
    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, categorical: Categorical, gumbel_softmax_temperature: float | None = None) -> None:
        if gumbel_softmax_temperature is not None and not gumbel_softmax_temperature > 0.0:
            raise ValueError(f"gumbel_softmax_temperature must be positive, got {gumbel_softmax_temperature}")
        self.categorical = categorical_output(categorical)
        super().__init__(self.categorical.batch_shape, torch.Size((self.categorical._num_events,)), validate_args=False)
        own = getattr(self.categorical.kind, "gumbel_temperature", 0.5)
        self.temperature = own if gumbel_softmax_temperature is None else gumbel_softmax_temperature

    @property
    def probs(self) -> Tensor:
        return self.categorical.probs

    @property
    def logits(self) -> Tensor:
        return self.categorical.logits

    @property
    def mean(self) -> Tensor:
        """The probabilities."""
        return self.probs

    @property
    def mode(self) -> Tensor:
        """The likeliest choice, one-hot."""
        return F.one_hot(self.categorical.mode, self.categorical._num_events).to(self.probs.dtype)

    def entropy(self) -> Tensor:
        """(...)."""
        return self.categorical.entropy()

    def log_prob(self, value: Tensor) -> Tensor:
        """(...) log-probabilities of one-hot actions or their softened form (..., A): that of the largest entry."""
        return self.categorical.log_prob(value.argmax(dim=-1))

    def _drawn(self, sample_shape: Shape, grad: bool) -> Tensor:
        shape = torch.Size((*sample_shape, *self.batch_shape))
        of = self.categorical if not len(sample_shape) else self.categorical.expand(shape)
        return of.gumbel_softmax(grad, self.temperature)

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        """One-hot actions, ``sample_shape`` + (..., A), clipped as probabilities are."""
        return self._drawn(sample_shape, grad=False)

    def rsample(self, sample_shape: Shape = ONE) -> Tensor:
        """Like `sample`, with gradient."""
        return self._drawn(sample_shape, grad=True)


class _AsGiven(PolicyOutput):
    """Leaves probabilities and actions as they are."""

    is_discrete = True
    actions_differentiable = True

    @property
    def input_dimension(self) -> int:
        return self.d_action


def categorical_output(dist: Categorical, kind: PolicyOutput | None = None) -> DiscreteOutput:
    """Any categorical distribution (..., A) as a `DiscreteOutput`.

    Args:
        kind: what made it, for its ``action_from_buffer``. None: actions of the data are not changed.
    """
    if isinstance(dist, DiscreteOutput):
        return dist
    return DiscreteOutput(dist.probs, kind or _AsGiven(dist.probs.shape[-1]))
