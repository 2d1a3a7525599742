"""Policies: maps from network outputs to distributions over actions (`amago.nets.distributions`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import gin
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributions import Bernoulli, Categorical, Distribution

from amago.nets.distributions import (
    NEVER,
    ONE,
    ActionDistribution,
    BetaOutput,
    ContinuousOutput,
    DiscreteOutput,
    MultibinaryOutput,
    PolicyOutput,
    ProductOutput,
    Shape,
    TanhGaussianOutput,
    categorical_output,
)  # fmt: skip
from amago.nets.utils import check_positive
from amago.spaces import ActionPart, parts_of

__all__ = [
    "GMM", "ActionDistribution", "Beta", "BetaOutput", "Discrete", "DiscreteLikeContinuous", "DiscreteOutput", "GMMOutput", "Multibinary",
    "MultibinaryOutput", "PolicyOutput", "TanhGaussian", "TanhGaussianOutput", "softplus_bounded_positive", "tanh_bounded_positive",
]  # fmt: skip


def tanh_bounded_positive(raw: Tensor, low: float, high: float) -> Tensor:
    """Numbers in [low, high] from network outputs: exp(log low + (log high - log low) (tanh raw + 1) / 2)."""
    log_low, log_high = math.log(low), math.log(high)
    return (log_low + 0.5 * (log_high - log_low) * (torch.tanh(raw) + 1.0)).exp()


def softplus_bounded_positive(raw: Tensor, low: float, high: float | None = None) -> Tensor:
    """Numbers of at least ``low`` from network outputs: softplus(raw) + low, and at most ``high``, if given."""
    found = F.softplus(raw) + low
    return found if high is None else found.clamp(max=high)


def _positive(name: str, low: float, high: float | None, activation: str) -> Callable[[Tensor], Tensor]:
    """The map of network outputs to numbers in [low, high], by ``activation``; ``name`` is of its bounds, for errors."""
    maps: dict[str, Callable[..., Tensor]] = {"tanh": tanh_bounded_positive, "softplus": softplus_bounded_positive}
    if activation not in maps:
        raise ValueError(f"std_activation={activation!r} is unknown: use tanh or softplus")
    if activation == "tanh" and high is None:
        raise ValueError(f"std_activation='tanh' needs an upper bound: set {name}_high")
    if not 0.0 < low < (math.inf if high is None else high):
        raise ValueError(f"0 < {name}_low < {name}_high must hold, got {name}_low={low}, {name}_high={high}")
    return functools.partial(maps[activation], low=low, high=high)


def _checked_clip(clip: tuple[float, float]) -> tuple[float, float]:
    if not -1.0 < clip[0] < clip[1] < 1.0:
        raise ValueError(f"clip_actions_on_log_prob must be within (-1, 1), got {clip}")
    return clip


@gin.configurable
class TanhGaussian(PolicyOutput):
    """Actions in [-1, 1]: of the input, the first half is the location, the second the raw scale r, with
    std = exp(a + (b - a) (tanh r + 1) / 2), a = log std_low, b = log std_high.

    Args:
        std_low, std_high: bounds of the standard deviation before tanh.
        std_activation: "tanh", as above, or "softplus": std = softplus(r) + std_low, at most std_high (None: no bound).
        clip_actions_on_log_prob: range to which actions are clamped before their density is computed.
    """

    def __init__(
        self,
        d_action: int,
        std_low: float = math.exp(-5.0),
        std_high: float | None = math.exp(2.0),
        std_activation: str = "tanh",
        clip_actions_on_log_prob: tuple[float, float] = (-0.99, 0.99),
    ) -> None:
        super().__init__(d_action)
        self.std = _positive("std", std_low, std_high, std_activation)
        self.clip = _checked_clip(clip_actions_on_log_prob)

    @property
    def input_dimension(self) -> int:
        return 2 * self.d_action

    def make(self, vec: Tensor) -> TanhGaussianOutput:
        loc, raw = vec.chunk(2, dim=-1)
        return TanhGaussianOutput(loc, self.std(raw), self.clip)


@gin.configurable
class Beta(PolicyOutput):
    """Actions in [-1, 1] (Chou et al. 2017, ICML): of the input, the first half is raw alpha, the second raw beta; both are
    softplus(raw) + low, and low is above 1, so that the density has one peak. The greedy action is the mean.

    Args:
        alpha_low, alpha_high: bounds of alpha; ``alpha_high`` None: no bound.
        beta_low, beta_high: the same for beta.
        std_activation: "softplus", as above, or "tanh": alpha = exp(log alpha_low + (log alpha_high - log alpha_low)(tanh(raw)
            + 1) / 2), and beta likewise, which needs upper bounds.
        clip_actions_on_log_prob: as of `TanhGaussian`.
    """

    def __init__(
        self,
        d_action: int,
        alpha_low: float = 1.0001,
        alpha_high: float | None = None,
        beta_low: float = 1.0001,
        beta_high: float | None = None,
        std_activation: str = "softplus",
        clip_actions_on_log_prob: tuple[float, float] = (-0.99, 0.99),
    ) -> None:
        super().__init__(d_action)
        self.alpha = _positive("alpha", alpha_low, alpha_high, std_activation)
        self.beta = _positive("beta", beta_low, beta_high, std_activation)
        self.clip = _checked_clip(clip_actions_on_log_prob)

    @property
    def input_dimension(self) -> int:
        return 2 * self.d_action

    def make(self, vec: Tensor) -> BetaOutput:
        alpha, beta = vec.chunk(2, dim=-1)
        return BetaOutput(self.alpha(alpha), self.beta(beta), self.clip)


class GMMOutput(ActionDistribution):
    """tanh of a mixture of M normal distributions with independent dimensions, ``loc`` and ``scale`` (..., M, A) before tanh,
    and normalised ``log_weights`` (..., M). No reparametrised sample."""

    def __init__(self, loc: Tensor, scale: Tensor, log_weights: Tensor) -> None:
        super().__init__(torch.Size((*log_weights.shape[:-1], 1)))
        self.loc, self.scale, self.log_weights = loc, scale, log_weights

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        with torch.no_grad():
            weights, loc, scale = (x.expand(*sample_shape, *x.shape) for x in (self.log_weights, self.loc, self.scale))
            mode = (weights - torch.empty_like(weights).exponential_().log()).argmax(dim=-1)
            index = mode[..., None, None].expand(*mode.shape, 1, self.loc.shape[-1])
            loc, scale = (x.gather(-2, index).squeeze(-2) for x in (loc, scale))
            return torch.tanh(loc + scale * torch.randn_like(loc))

    @property
    def mean(self) -> Tensor:
        """tanh of the mean before it, (..., A)."""
        return torch.tanh((self.log_weights.exp().unsqueeze(-1) * self.loc).sum(dim=-2))

    def log_prob(self, action: Tensor) -> Tensor:
        """(..., A) -> (..., 1): one number, because the dimensions of a mixture are not independent."""
        x = 0.5 * ((1.0 + action).clamp(min=1e-6).log() - (1.0 - action).clamp(min=1e-6).log())
        normal = -0.5 * ((x.unsqueeze(-2) - self.loc) / self.scale).square() - self.scale.log() - 0.5 * math.log(2.0 * math.pi)
        mixture = (normal.sum(dim=-1) + self.log_weights).logsumexp(dim=-1, keepdim=True)
        return mixture - (1.0 - action.square() + 1e-6).log().sum(dim=-1, keepdim=True)

    def metrics(self) -> dict[str, Tensor]:
        return {
            "Policy Std (before tanh)": self.scale.mean(dim=(-2, -1)),
            "Policy Modes Entropy": torch.special.entr(self.log_weights.exp()).sum(dim=-1),
        }


@gin.configurable
class GMM(PolicyOutput):
    """Actions in [-1, 1] from several modes: of the input, M x A means (mode by mode), as many raw standard deviations
    (softplus(raw) + ``std_low``), and M logits of the modes. The greedy action is the mean. Samples carry no gradient, so that
    it suits behaviour cloning only.

    Args:
        gmm_modes: M.
        std_low, std_high: bounds of the standard deviations before tanh; ``std_high`` None: no bound.
        std_activation: "softplus", as above, or "tanh", as for `TanhGaussian`, which needs ``std_high``.
    """

    actions_differentiable = False

    def __init__(
        self,
        d_action: int,
        gmm_modes: int = 5,
        std_low: float = 1e-4,
        std_high: float | None = None,
        std_activation: str = "softplus",
    ) -> None:
        super().__init__(d_action)
        check_positive(gmm_modes=gmm_modes)
        self.gmm_modes, self.std = gmm_modes, _positive("std", std_low, std_high, std_activation)

    @property
    def input_dimension(self) -> int:
        return self.gmm_modes * (2 * self.d_action + 1)

    def make(self, vec: Tensor) -> GMMOutput:
        wide = self.gmm_modes * self.d_action
        loc, raw, logits = vec.split((wide, wide, self.gmm_modes), dim=-1)
        shape = (self.gmm_modes, self.d_action)
        return GMMOutput(loc.unflatten(-1, shape), self.std(raw.unflatten(-1, shape)), logits.log_softmax(-1))


@gin.configurable
class Multibinary(PolicyOutput):
    """A independent bits, from their logits."""

    def masked(self, vec: Tensor, legal: Tensor) -> Tensor:
        """Logits, where a bit may not be 1 so low that its probability is 0 in float32, but finite."""
        return vec.masked_fill(~legal, NEVER)

    def make(self, vec: Tensor) -> MultibinaryOutput:
        return MultibinaryOutput(vec)


class _Categorical(DiscreteOutput):
    """A categorical distribution with the arguments of PyTorch's."""

    def __init__(self, probs: Tensor | None = None, logits: Tensor | None = None) -> None:
        probs = Categorical(probs, logits).probs
        super().__init__(probs, PolicyOutput(probs.shape[-1]))


class _ToBounds(torch.autograd.Function):
    """Logits, unchanged. Their gradient is zero where descent would lower a logit that is ``low`` (bool), or raise one that is
    ``high``."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, low: Tensor, high: Tensor) -> Tensor:
        ctx.save_for_backward(low, high)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        low, high = ctx.saved_tensors
        return grad.masked_fill((low & (grad > 0)) | (high & (grad < 0)), 0.0), None, None


@gin.configurable
class Discrete(PolicyOutput):
    """Softmax over A choices, each probability clipped, then divided by the sum (which carries no gradient).

    Args:
        clip_prob_low, clip_prob_high: the clip. A low clip keeps every action possible, and bounds log-probabilities.
            ``clip_prob_low`` None: 0.001 up to 50 choices, 0.05 / A beyond, so that the probabilities of an untrained policy,
            about 1 / A, lie above it, and the unlikely choices have at most 5% together. A logit of -inf is not clipped: its
            probability is 0.
        gumbel_temperature: of the gradient of sampled actions.
        clip_gradient: a gradient that leads back towards the bounds passes a clipped probability; False: none does, as in the
            original, and a policy that every state has pushed there stays.
    """

    is_discrete = True

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

    def action_from_buffer(self, action: Tensor, *illegal: Tensor) -> Tensor:
        """Clip and renormalise probabilities or one-hot actions (..., A), so that critics read actions of the data as they
        read the policy's. Entries where ``illegal`` (..., A), if given, is True become exactly 0."""
        clipped = action.clamp(self.clip_prob_low, self.clip_prob_high)
        if self.clip_gradient and action.requires_grad:
            clipped = action + (clipped - action).detach()
        for mask in illegal:
            clipped = clipped.masked_fill(mask, 0.0)
        return clipped / clipped.detach().sum(dim=-1, keepdim=True)

    def masked(self, vec: Tensor, legal: Tensor) -> Tensor:
        """Logits, -inf where illegal, which `make` recognises. Where no choice is legal, all count as legal."""
        legal = legal | ~legal.any(dim=-1, keepdim=True)
        return vec.masked_fill(~legal, -math.inf)

    def make(self, vec: Tensor) -> DiscreteOutput:
        # where an actor of one's own masks all choices, as of padding, all count as legal
        vec = vec.masked_fill((vec == -math.inf).all(dim=-1, keepdim=True), 0.0)
        illegal = vec == -math.inf
        probs = vec.softmax(dim=-1)
        if self.clip_gradient and vec.requires_grad:
            seen = probs.detach()
            probs = _ToBounds.apply(vec, seen < self.clip_prob_low, seen > self.clip_prob_high).softmax(dim=-1)
        return DiscreteOutput(self.action_from_buffer(probs, illegal), self, illegal)


@gin.configurable
class DiscreteLikeContinuous(Distribution):
    """One-hot actions of a ``categorical`` distribution (..., A), with a gradient: straight-through Gumbel-softmax.

    Args:
        gumbel_softmax_temperature: of the gradient of `rsample`. None: as in ``categorical``, where it comes from a `Discrete`
            (``Discrete.gumbel_temperature``), else 0.5.
    """

    has_rsample = True
    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, categorical: Categorical, gumbel_softmax_temperature: float | None = None) -> None:
        if gumbel_softmax_temperature is not None and not gumbel_softmax_temperature > 0.0:
            raise ValueError(f"gumbel_softmax_temperature must be positive, got {gumbel_softmax_temperature}")
        self.categorical = categorical_output(categorical)
        super().__init__(self.categorical.batch_shape, torch.Size((self.categorical._num_events,)), validate_args=False)
        self.probs = self.categorical.probs
        self.temperature = gumbel_softmax_temperature or self.categorical.kind.gumbel_temperature

    @property
    def logits(self) -> Tensor:
        return self.categorical.logits

    def entropy(self) -> Tensor:
        """(...)."""
        return self.categorical.entropy()

    def log_prob(self, value: Tensor) -> Tensor:
        """(...) log-probabilities of one-hot actions or their softened form (..., A): of the largest entry."""
        return self.categorical.log_prob(value.argmax(dim=-1))

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        """One-hot actions, ``sample_shape`` + (..., A), clipped as probabilities are."""
        return self.rsample(sample_shape).detach()

    def rsample(self, sample_shape: Shape = ONE) -> Tensor:
        """Like `sample`, with gradient."""
        shape = torch.Size((*sample_shape, *self.batch_shape))
        return self.categorical.expand(shape).gumbel_softmax(True, self.temperature)


def action_distribution(dist: Distribution, kind: PolicyOutput) -> ActionDistribution:
    """A policy's distribution, the result of ``kind``, with the interface that agents use; unchanged if it has it."""
    if isinstance(dist, ActionDistribution):
        return dist
    if isinstance(dist, DiscreteLikeContinuous):
        return dist.categorical
    if isinstance(dist, Categorical):
        return categorical_output(dist, kind)
    if isinstance(dist, Bernoulli):
        return MultibinaryOutput(dist.logits)
    return ContinuousOutput(dist, kind)


class Product(PolicyOutput):
    """Make a `ProductOutput` of the concatenated network outputs of the ``parts``, each of a distribution of ``types``."""

    def __init__(self, d_action: int, parts: tuple[ActionPart, ...], types: list[PolicyOutput]) -> None:
        super().__init__(d_action)
        self.parts, self._types = parts, nn.ModuleList(types)
        self.types = tuple(types)
        self.actions_differentiable = all(t.actions_differentiable for t in types)

    @property
    def input_dimension(self) -> int:
        return sum(t.input_dimension for t in self.types)

    def _split(self, vec: Tensor) -> tuple[Tensor, ...]:
        return vec.split([t.input_dimension for t in self.types], dim=-1)

    def action_from_buffer(self, action: Tensor, *illegal: Tensor) -> Tensor:
        return torch.cat([t.action_from_buffer(action[..., p.vector]) for t, p in zip(self.types, self.parts)], dim=-1)

    def masked(self, vec: Tensor, legal: Tensor) -> Tensor:
        """See `PolicyOutput.masked`; continuous parts are not masked."""
        each = zip(self.types, self.parts, self._split(vec))
        return torch.cat([x if p.kind == "continuous" else t.masked(x, legal[..., p.vector]) for t, p, x in each], dim=-1)

    def make(self, vec: Tensor) -> ProductOutput:
        factors = [action_distribution(t(part), t) for t, part in zip(self.types, self._split(vec))]
        return ProductOutput(factors, self.parts)


def distribution_of(
    action_kind: str,
    action_dim: int,
    continuous_dist_type: Callable[[int], PolicyOutput] | None,
    discrete_dist_type: Callable[[int], PolicyOutput] = Discrete,
) -> PolicyOutput:
    """The distribution of an action space, of `amago.spaces.ActionSpec` ``kind`` and ``dim``; a `Product` if the space has several
    parts. ``continuous_dist_type`` may be None where no part is continuous."""
    parts = parts_of(action_kind, action_dim)
    types = {"discrete": discrete_dist_type, "continuous": continuous_dist_type, "multibinary": Multibinary}
    made = []
    for part in parts:
        of_part = types[part.kind]
        if of_part is None:
            raise ValueError(f"{part.kind}_dist_type=None, but actions of kind {action_kind!r} have a {part.kind} part")
        made.append(of_part(part.dim))
    return made[0] if action_kind in types else Product(action_dim, parts, made)
