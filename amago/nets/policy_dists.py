"""Distributions over actions. Their common interface is in `amago.nets.distributions`."""

from __future__ import annotations

import math
from typing import Any

import gin
import torch
import torch.nn.functional as F
from torch import Tensor

from amago.nets.distributions import DistributionType, PolicyOutput
from amago.nets.utils import check_positive

__all__ = [
    "GMM", "Beta", "BetaOutput", "Discrete", "DiscreteOutput", "DistributionType", "GMMOutput", "Multibinary",
    "MultibinaryOutput", "PolicyOutput", "TanhGaussian", "TanhGaussianOutput",
]  # fmt: skip


_NEVER = -1000.0
"""The logit of a bit whose probability is 0 in float32 and float64; its log-probability is finite."""


class DiscreteOutput(PolicyOutput):
    """Categorical distributions.

    Attributes:
        probs: (..., A), clipped and renormalised; 0 where illegal.
        kind: the `Discrete` that made them.
        illegal: (..., A) bool, choices of probability 0; None: no mask.
    """

    def __init__(self, probs: Tensor, kind: Discrete, illegal: Tensor | None = None) -> None:
        self.probs, self.kind, self.illegal = probs, kind, illegal

    def sample(self) -> Tensor:
        flat = self.probs.detach().reshape(-1, self.probs.shape[-1])
        return torch.multinomial(flat, 1).reshape(self.probs.shape[:-1])

    @property
    def mode(self) -> Tensor:
        return self.probs.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        if action.shape != self.probs.shape[:-1]:
            raise ValueError(f"actions must be indices of shape {tuple(self.probs.shape[:-1])}, got {tuple(action.shape)}")
        chosen = self.probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
        # Finite for illegal actions in the data too: a filter's weight of 0 times -inf would be NaN.
        return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()

    def sample_vector(self, grad: bool = False) -> Tensor:
        """One-hot actions, clipped as probabilities are, with the gradient of a Gumbel-softmax sample (straight-through, Jang
        et al. 2017, arXiv 1611.01144)."""
        gumbel = -torch.empty_like(self.probs).exponential_().log()  # also without gradient, so that both draw the same
        scores = self.probs.clamp(min=torch.finfo(self.probs.dtype).tiny).log() + gumbel
        if self.illegal is not None:
            scores = scores.masked_fill(self.illegal, -math.inf)
        hard = self.clip_like_policy(F.one_hot(scores.argmax(dim=-1), self.probs.shape[-1]).to(self.probs.dtype))
        if not grad:
            return hard
        soft = (scores / self.kind.gumbel_temperature).softmax(dim=-1)
        return hard + (soft - soft.detach())

    def log_prob_of_vector(self, vector: Tensor) -> Tensor:
        return self.log_prob(vector.argmax(dim=-1).expand(self.probs.shape[:-1])).unsqueeze(-1)

    def clip_like_policy(self, vector: Tensor) -> Tensor:
        return self.kind.clip_like_policy(vector, self.illegal)

    def entropy(self) -> Tensor:
        return torch.special.entr(self.probs).sum(dim=-1)

    def sample_action(self, sample: bool) -> Tensor:
        return (self.sample() if sample else self.mode).unsqueeze(-1)

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


@gin.configurable
class Discrete(DistributionType):
    """Softmax over A choices, each probability clipped, then divided by the sum (which carries no gradient).

    Args:
        d_action: A.
        clip_prob_low, clip_prob_high: the clip. A low clip keeps every action possible, and bounds log-probabilities.
            ``clip_prob_low`` None: 0.001 up to 50 choices, 0.05 / A beyond, so that the probabilities of an untrained policy,
            about 1 / A, lie above it, and the unlikely choices have at most 5% together.
        gumbel_temperature: of the gradient of sampled actions.
        clip_gradient: False: no gradient passes a clipped probability. True: one passes that leads back towards the bounds.
    """

    is_discrete = True
    actions_differentiable = True

    def __init__(
        self,
        d_action: int,
        clip_prob_low: float | None = None,
        clip_prob_high: float = 0.99,
        gumbel_temperature: float = 0.5,
        clip_gradient: bool = False,
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

    def clip_like_policy(self, vector: Tensor, illegal: Tensor | None = None) -> Tensor:
        """Clip and renormalise probabilities or one-hot actions (..., A), so that critics read actions of the data as they
        read the policy's. Entries where ``illegal`` is True become exactly 0."""
        clipped = vector.clamp(self.clip_prob_low, self.clip_prob_high)
        if self.clip_gradient and vector.requires_grad:
            clipped = vector + (clipped - vector).detach()
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
        return DiscreteOutput(self.clip_like_policy(probs, illegal), self, illegal)


def _checked_clip(clip_actions_on_log_prob: tuple[float, float]) -> tuple[float, float]:
    low, high = clip_actions_on_log_prob
    if not -1.0 < low < high < 1.0:
        raise ValueError(f"clip_actions_on_log_prob must be within (-1, 1), got {clip_actions_on_log_prob}")
    return low, high


class TanhGaussianOutput(PolicyOutput):
    """tanh of independent normal variables.

    Attributes:
        loc, scale: (..., A), of the normal distribution before tanh.
        clip: range to which actions are clamped before their density is computed, which is infinite at +-1.
    """

    def __init__(self, loc: Tensor, scale: Tensor, clip: tuple[float, float]) -> None:
        self.loc, self.scale, self.clip = loc, scale, clip

    def sample(self) -> Tensor:
        with torch.no_grad():
            return self.rsample()

    def rsample(self) -> Tensor:
        return torch.tanh(self.loc + self.scale * torch.randn_like(self.loc))

    @property
    def mean(self) -> Tensor:
        """tanh(loc), (..., A): the median, used in place of the mean."""
        return torch.tanh(self.loc)

    @property
    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        x = torch.atanh(action.clamp(*self.clip))
        normal = -0.5 * ((x - self.loc) / self.scale).square() - self.scale.log() - 0.5 * math.log(2.0 * math.pi)
        return normal - 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))

    def sample_action(self, sample: bool) -> Tensor:
        return (self.sample() if sample else self.mode.detach()).float()

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Std (before tanh)": self.scale.detach().mean()}


@gin.configurable
class TanhGaussian(DistributionType):
    """Actions in [-1, 1]: of the input, the first half is the location, the second the raw scale r, with
    std = exp(a + (b - a) (tanh r + 1) / 2), a = log std_low, b = log std_high.

    Args:
        d_action: A.
        std_low, std_high: bounds of the standard deviation before tanh.
        clip_actions_on_log_prob: range to which actions are clamped before their density is computed.
    """

    is_discrete = False
    actions_differentiable = True

    def __init__(
        self,
        d_action: int,
        std_low: float = math.exp(-5.0),
        std_high: float = math.exp(2.0),
        clip_actions_on_log_prob: tuple[float, float] = (-0.99, 0.99),
    ) -> None:
        super().__init__(d_action)
        if not 0.0 < std_low < std_high:
            raise ValueError(f"0 < std_low < std_high must hold, got std_low={std_low}, std_high={std_high}")
        self.log_std_low, self.log_std_high = math.log(std_low), math.log(std_high)
        self.clip = _checked_clip(clip_actions_on_log_prob)

    @property
    def input_dimension(self) -> int:
        return 2 * self.d_action

    def make(self, vec: Tensor) -> TanhGaussianOutput:
        loc, raw = vec.chunk(2, dim=-1)
        log_std = self.log_std_low + 0.5 * (self.log_std_high - self.log_std_low) * (torch.tanh(raw) + 1.0)
        return TanhGaussianOutput(loc, log_std.exp(), self.clip)


class BetaOutput(PolicyOutput):
    """Independent beta variables, stretched from [0, 1] to [-1, 1].

    Attributes:
        alpha, beta: (..., A), above 1.
        clip: range to which actions are clamped before their density is computed, which may be 0 at the bounds.
    """

    def __init__(self, alpha: Tensor, beta: Tensor, clip: tuple[float, float]) -> None:
        self.alpha, self.beta, self.clip = alpha, beta, clip
        self._unit = torch.distributions.Beta(alpha, beta, validate_args=False)

    def sample(self) -> Tensor:
        with torch.no_grad():
            return self.rsample()

    def rsample(self) -> Tensor:
        return 2.0 * self._unit.rsample() - 1.0

    @property
    def mean(self) -> Tensor:
        """(..., A)."""
        return 2.0 * self._unit.mean - 1.0

    @property
    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        return self._unit.log_prob(0.5 * (action.clamp(*self.clip) + 1.0)) - math.log(2.0)

    def entropy(self) -> Tensor:
        return self._unit.entropy() + math.log(2.0)

    def sample_action(self, sample: bool) -> Tensor:
        return (self.sample() if sample else self.mode.detach()).float()

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Entropy": self.entropy().detach().sum(dim=-1).mean()}


@gin.configurable
class Beta(DistributionType):
    """Actions in [-1, 1] (Chou et al. 2017, ICML): of the input, the first half is raw alpha, the second raw beta; both are
    softplus(raw) + ``offset``, so that the density has one peak. The greedy action is the mean.

    Args:
        d_action: A.
        offset: added to alpha and beta.
        clip_actions_on_log_prob: range to which actions are clamped before their density is computed.
    """

    is_discrete = False
    actions_differentiable = True

    def __init__(
        self, d_action: int, offset: float = 1.0001, clip_actions_on_log_prob: tuple[float, float] = (-0.99, 0.99)
    ) -> None:
        super().__init__(d_action)
        if not offset > 0.0:
            raise ValueError(f"offset must be positive, got offset={offset}")
        self.offset, self.clip = offset, _checked_clip(clip_actions_on_log_prob)

    @property
    def input_dimension(self) -> int:
        return 2 * self.d_action

    def make(self, vec: Tensor) -> BetaOutput:
        alpha, beta = (F.softplus(vec) + self.offset).chunk(2, dim=-1)
        return BetaOutput(alpha, beta, self.clip)


class GMMOutput(PolicyOutput):
    """tanh of a mixture of normal distributions with independent dimensions. No reparametrised sample.

    Attributes:
        loc, scale: (..., M, A), of each mode before tanh.
        log_weights: (..., M), normalised.
    """

    def __init__(self, loc: Tensor, scale: Tensor, log_weights: Tensor) -> None:
        self.loc, self.scale, self.log_weights = loc, scale, log_weights

    def sample(self) -> Tensor:
        with torch.no_grad():
            mode = (self.log_weights - torch.empty_like(self.log_weights).exponential_().log()).argmax(dim=-1)
            index = mode[..., None, None].expand(*mode.shape, 1, self.loc.shape[-1])
            loc, scale = (x.gather(-2, index).squeeze(-2) for x in (self.loc, self.scale))
            return torch.tanh(loc + scale * torch.randn_like(loc))

    @property
    def mean(self) -> Tensor:
        """tanh of the mean before it, (..., A)."""
        return torch.tanh((self.log_weights.exp().unsqueeze(-1) * self.loc).sum(dim=-2))

    @property
    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        """(..., A) -> (..., 1): one number, because the dimensions of a mixture are not independent."""
        x = 0.5 * ((1.0 + action).clamp(min=1e-6).log() - (1.0 - action).clamp(min=1e-6).log())
        normal = -0.5 * ((x.unsqueeze(-2) - self.loc) / self.scale).square() - self.scale.log() - 0.5 * math.log(2.0 * math.pi)
        mixture = (normal.sum(dim=-1) + self.log_weights).logsumexp(dim=-1, keepdim=True)
        return mixture - (1.0 - action.square() + 1e-6).log().sum(dim=-1, keepdim=True)

    def sample_action(self, sample: bool) -> Tensor:
        return (self.sample() if sample else self.mode.detach()).float()

    def metrics(self) -> dict[str, Tensor]:
        return {
            "Policy Std (before tanh)": self.scale.detach().mean(),
            "Policy Modes Entropy": torch.special.entr(self.log_weights.detach().exp()).sum(dim=-1).mean(),
        }


@gin.configurable
class GMM(DistributionType):
    """Actions in [-1, 1] from several modes: of the input, M x A means (mode by mode), as many raw standard deviations
    (softplus(raw) + ``min_std``), and M logits of the modes. The greedy action is the mean. Samples carry no gradient, so that
    it suits behaviour cloning only.

    Args:
        d_action: A.
        gmm_modes: M.
        min_std: added to each standard deviation before tanh.
    """

    is_discrete = False
    actions_differentiable = False

    def __init__(self, d_action: int, gmm_modes: int = 5, min_std: float = 1e-4) -> None:
        super().__init__(d_action)
        check_positive(gmm_modes=gmm_modes)
        if not min_std > 0.0:
            raise ValueError(f"min_std must be positive, got min_std={min_std}")
        self.gmm_modes, self.min_std = gmm_modes, min_std

    @property
    def input_dimension(self) -> int:
        return self.gmm_modes * (2 * self.d_action + 1)

    def make(self, vec: Tensor) -> GMMOutput:
        wide = self.gmm_modes * self.d_action
        loc, raw, logits = vec.split((wide, wide, self.gmm_modes), dim=-1)
        shape = (self.gmm_modes, self.d_action)
        return GMMOutput(loc.unflatten(-1, shape), F.softplus(raw.unflatten(-1, shape)) + self.min_std, logits.log_softmax(-1))


class MultibinaryOutput(PolicyOutput):
    """Independent bits.

    Attributes:
        logits: (..., A), of each bit being 1.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @property
    def probs(self) -> Tensor:
        """(..., A), of each bit being 1."""
        return self.logits.sigmoid()

    def sample(self) -> Tensor:
        return torch.bernoulli(self.probs.detach())

    def rsample(self) -> Tensor:
        """Sampled bits whose gradient is that of the probabilities (straight-through, Bengio et al. 2013, arXiv 1308.3432)."""
        probs = self.probs
        drawn = torch.bernoulli(probs.detach().nan_to_num(0.0))  # which refuses NaN, on a GPU by ending the process
        return drawn + probs - probs.detach()

    def sample_vector(self, grad: bool = False) -> Tensor:
        """See `PolicyOutput.sample_vector`. NaN in the logits gives NaN: the update is then skipped."""
        return self.rsample() if grad else self.rsample().detach()

    @property
    def mode(self) -> Tensor:
        return (self.logits.detach() > 0).to(self.logits.dtype)

    def log_prob(self, action: Tensor) -> Tensor:
        return -F.binary_cross_entropy_with_logits(self.logits, action.to(self.logits.dtype), reduction="none")

    def log_prob_of_vector(self, vector: Tensor) -> Tensor:
        return self.log_prob(vector.expand_as(self.logits)).mean(dim=-1, keepdim=True)

    def entropy(self) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.logits, self.probs, reduction="none")

    def sample_action(self, sample: bool) -> Tensor:
        return (self.sample() if sample else self.mode).to(torch.int8)

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Entropy": self.entropy().detach().sum(dim=-1).mean()}


@gin.configurable
class Multibinary(DistributionType):
    """A independent bits, from their logits."""

    is_discrete = False
    actions_differentiable = True

    def __init__(self, d_action: int) -> None:
        super().__init__(d_action)

    @property
    def input_dimension(self) -> int:
        return self.d_action

    def masked(self, vec: Tensor, legal: Tensor) -> Tensor:
        """Logits, where a bit may not be 1 so low that its probability is 0 in float32, but finite."""
        return vec.masked_fill(~legal, _NEVER)

    def make(self, vec: Tensor) -> MultibinaryOutput:
        return MultibinaryOutput(vec)
