"""Distributions over actions. Their common interface is in `amago.nets.distributions`."""

from __future__ import annotations

import math
from typing import Any

import gin
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli

from amago.nets.categorical import Discrete, DiscreteLikeContinuous, DiscreteOutput
from amago.nets.distributions import ONE, ActionDistribution, PolicyOutput, Shape
from amago.nets.utils import check_positive

__all__ = [
    "GMM", "ActionDistribution", "Beta", "BetaOutput", "Discrete", "DiscreteLikeContinuous", "DiscreteOutput", "GMMOutput", "Multibinary",
    "MultibinaryOutput", "PolicyOutput", "TanhGaussian", "TanhGaussianOutput",
]  # fmt: skip

_NEVER = -1000.0
"""The logit of a bit whose probability is 0 in float32 and float64; its log-probability is finite."""


def _positive(raw: Tensor, low: float, high: float | None, activation: str) -> Tensor:
    """Numbers in [low, high] from network outputs.

    "tanh": exp(log low + (log high - log low) (tanh raw + 1) / 2). "softplus": softplus(raw) + low, and at most high.
    """
    if activation == "tanh":
        assert high is not None
        log_low, log_high = math.log(low), math.log(high)
        return (log_low + 0.5 * (log_high - log_low) * (torch.tanh(raw) + 1.0)).exp()
    found = F.softplus(raw) + low
    return found if high is None else found.clamp(max=high)


def _check_positive_range(name: str, low: float, high: float | None, activation: str) -> None:
    if activation not in ("tanh", "softplus"):
        raise ValueError(f"std_activation={activation!r} is unknown: use tanh or softplus")
    if activation == "tanh" and high is None:
        raise ValueError(f"std_activation='tanh' needs an upper bound: set {name}_high")
    if high is None and not low > 0.0:
        raise ValueError(f"{name}_low must be positive, got {name}_low={low}")
    if high is not None and not 0.0 < low < high:
        raise ValueError(f"0 < {name}_low < {name}_high must hold, got {name}_low={low}, {name}_high={high}")


def _repeated(x: Tensor, sample_shape: Shape) -> Tensor:
    """``x`` with ``sample_shape`` before its own."""
    return x.expand(*sample_shape, *x.shape) if len(sample_shape) else x


def _checked_clip(clip_actions_on_log_prob: tuple[float, float]) -> tuple[float, float]:
    low, high = clip_actions_on_log_prob
    if not -1.0 < low < high < 1.0:
        raise ValueError(f"clip_actions_on_log_prob must be within (-1, 1), got {clip_actions_on_log_prob}")
    return low, high


class TanhGaussianOutput(ActionDistribution):
    """tanh of independent normal variables.

    Attributes:
        loc, scale: (..., A), of the normal distribution before tanh.
        clip: range to which actions are clamped before their density is computed, which is infinite at +-1.
    """

    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, clip: tuple[float, float]) -> None:
        super().__init__(loc.shape)
        self.loc, self.scale, self.clip = loc, scale, clip

    def rsample(self, sample_shape: Shape = ONE) -> Tensor:
        loc = _repeated(self.loc, sample_shape)
        return torch.tanh(loc + self.scale * torch.randn_like(loc))

    def rsample_with_log_prob(self) -> tuple[Tensor, Tensor]:
        """Like `rsample`, with the log-density of each number of the action, (..., A) both.

        It is computed from what tanh is applied to. That of `log_prob` is another for actions beyond ``clip``: a policy whose actions are
        all at +-1 would seem to have a very large entropy.
        """
        before = self.loc + self.scale * torch.randn_like(self.loc)
        return torch.tanh(before), self._log_prob_before_tanh(before)

    @property
    def mean(self) -> Tensor:
        """tanh(loc), (..., A): the median, used in place of the mean."""
        return torch.tanh(self.loc)

    @property
    def mode(self) -> Tensor:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        return self._log_prob_before_tanh(torch.atanh(action.clamp(*self.clip)))

    def _log_prob_before_tanh(self, x: Tensor) -> Tensor:
        """The log-density of tanh(x)."""
        normal = -0.5 * ((x - self.loc) / self.scale).square() - self.scale.log() - 0.5 * math.log(2.0 * math.pi)
        return normal - 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Std (before tanh)": self.scale.detach().mean()}


@gin.configurable
class TanhGaussian(PolicyOutput):
    """Actions in [-1, 1]: of the input, the first half is the location, the second the raw scale r, with
    std = exp(a + (b - a) (tanh r + 1) / 2), a = log std_low, b = log std_high.

    Args:
        d_action: A.
        std_low, std_high: bounds of the standard deviation before tanh.
        std_activation: "tanh", as above, or "softplus": std = softplus(r) + std_low, at most std_high (None: no bound).
        clip_actions_on_log_prob: range to which actions are clamped before their density is computed.
    """

    is_discrete = False
    actions_differentiable = True

    def __init__(
        self,
        d_action: int,
        std_low: float = math.exp(-5.0),
        std_high: float | None = math.exp(2.0),
        std_activation: str = "tanh",
        clip_actions_on_log_prob: tuple[float, float] = (-0.99, 0.99),
    ) -> None:
        super().__init__(d_action)
        _check_positive_range("std", std_low, std_high, std_activation)
        self.std_low, self.std_high, self.std_activation = std_low, std_high, std_activation
        self.clip = _checked_clip(clip_actions_on_log_prob)

    @property
    def input_dimension(self) -> int:
        return 2 * self.d_action

    def make(self, vec: Tensor) -> TanhGaussianOutput:
        loc, raw = vec.chunk(2, dim=-1)
        return TanhGaussianOutput(loc, _positive(raw, self.std_low, self.std_high, self.std_activation), self.clip)


class BetaOutput(ActionDistribution):
    """Independent beta variables, stretched from [0, 1] to [-1, 1].

    Attributes:
        alpha, beta: (..., A), above 1.
        clip: range to which actions are clamped before their density is computed, which may be 0 at the bounds.
    """

    has_rsample = True

    def __init__(self, alpha: Tensor, beta: Tensor, clip: tuple[float, float]) -> None:
        super().__init__(alpha.shape)
        self.alpha, self.beta, self.clip = alpha, beta, clip
        self._unit = torch.distributions.Beta(alpha, beta, validate_args=False)

    def rsample(self, sample_shape: Shape = ONE) -> Tensor:
        return 2.0 * self._unit.rsample(sample_shape) - 1.0

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

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Entropy": self.entropy().detach().sum(dim=-1).mean()}


@gin.configurable
class Beta(PolicyOutput):
    """Actions in [-1, 1] (Chou et al. 2017, ICML): of the input, the first half is raw alpha, the second raw beta; both are
    softplus(raw) + low, and low is above 1, so that the density has one peak. The greedy action is the mean.

    Args:
        d_action: A.
        alpha_low, alpha_high: bounds of alpha; ``alpha_high`` None: no bound.
        beta_low, beta_high: the same for beta.
        std_activation: "softplus", as above, or "tanh": alpha = exp(log alpha_low + (log alpha_high - log alpha_low)(tanh(raw) + 1) / 2),
            and beta likewise, which needs upper bounds.
        clip_actions_on_log_prob: range to which actions are clamped before their density is computed.
    """

    is_discrete = False
    actions_differentiable = True

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
        _check_positive_range("alpha", alpha_low, alpha_high, std_activation)
        _check_positive_range("beta", beta_low, beta_high, std_activation)
        self.alpha_low, self.alpha_high, self.beta_low, self.beta_high = alpha_low, alpha_high, beta_low, beta_high
        self.std_activation, self.clip = std_activation, _checked_clip(clip_actions_on_log_prob)

    @property
    def input_dimension(self) -> int:
        return 2 * self.d_action

    def make(self, vec: Tensor) -> BetaOutput:
        raw_alpha, raw_beta = vec.chunk(2, dim=-1)
        alpha = _positive(raw_alpha, self.alpha_low, self.alpha_high, self.std_activation)
        return BetaOutput(alpha, _positive(raw_beta, self.beta_low, self.beta_high, self.std_activation), self.clip)


class GMMOutput(ActionDistribution):
    """tanh of a mixture of normal distributions with independent dimensions. No reparametrised sample.

    Attributes:
        loc, scale: (..., M, A), of each mode before tanh.
        log_weights: (..., M), normalised.
    """

    def __init__(self, loc: Tensor, scale: Tensor, log_weights: Tensor) -> None:
        super().__init__(torch.Size((*log_weights.shape[:-1], 1)))
        self.loc, self.scale, self.log_weights = loc, scale, log_weights

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        with torch.no_grad():
            weights, loc, scale = (_repeated(x, sample_shape) for x in (self.log_weights, self.loc, self.scale))
            mode = (weights - torch.empty_like(weights).exponential_().log()).argmax(dim=-1)
            index = mode[..., None, None].expand(*mode.shape, 1, self.loc.shape[-1])
            loc, scale = (x.gather(-2, index).squeeze(-2) for x in (loc, scale))
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

    def metrics(self) -> dict[str, Tensor]:
        return {
            "Policy Std (before tanh)": self.scale.detach().mean(),
            "Policy Modes Entropy": torch.special.entr(self.log_weights.detach().exp()).sum(dim=-1).mean(),
        }


@gin.configurable
class GMM(PolicyOutput):
    """Actions in [-1, 1] from several modes: of the input, M x A means (mode by mode), as many raw standard deviations
    (softplus(raw) + ``std_low``), and M logits of the modes. The greedy action is the mean. Samples carry no gradient, so that
    it suits behaviour cloning only.

    Args:
        d_action: A.
        gmm_modes: M.
        std_low, std_high: bounds of the standard deviations before tanh; ``std_high`` None: no bound.
        std_activation: "softplus", as above, or "tanh", as for `TanhGaussian`, which needs ``std_high``.
    """

    is_discrete = False
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
        _check_positive_range("std", std_low, std_high, std_activation)
        self.gmm_modes, self.std_low, self.std_high, self.std_activation = gmm_modes, std_low, std_high, std_activation

    @property
    def input_dimension(self) -> int:
        return self.gmm_modes * (2 * self.d_action + 1)

    def make(self, vec: Tensor) -> GMMOutput:
        wide = self.gmm_modes * self.d_action
        loc, raw, logits = vec.split((wide, wide, self.gmm_modes), dim=-1)
        shape = (self.gmm_modes, self.d_action)
        scale = _positive(raw.unflatten(-1, shape), self.std_low, self.std_high, self.std_activation)
        return GMMOutput(loc.unflatten(-1, shape), scale, logits.log_softmax(-1))


class MultibinaryOutput(ActionDistribution, Bernoulli):
    """Independent bits.

    Attributes:
        logits: (..., A), of each bit being 1.
    """

    logits: Tensor  # instead of the lazy attribute of Bernoulli

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits.shape)
        self.logits = self._param = logits

    def expand(self, batch_shape: Shape, _instance: Any = None) -> MultibinaryOutput:
        return MultibinaryOutput(self.logits.expand(batch_shape))

    @property
    def probs(self) -> Tensor:  # type: ignore[override]
        """(..., A), of each bit being 1."""
        return self.logits.sigmoid()

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        return torch.bernoulli(_repeated(self.probs.detach(), sample_shape))

    def rsample(self, sample_shape: Shape = ONE) -> Tensor:
        """Sampled bits whose gradient is that of the probabilities (straight-through, Bengio et al. 2013, arXiv 1308.3432)."""
        probs = _repeated(self.probs, sample_shape)
        drawn = torch.bernoulli(probs.detach().nan_to_num(0.0))  # which refuses NaN, on a GPU by ending the process
        return drawn + probs - probs.detach()

    def sample_vector(self, grad: bool = False) -> Tensor:
        """See `PolicyOutput.sample_vector`. NaN in the logits gives NaN: the update is then skipped."""
        return self.rsample() if grad else self.rsample().detach()

    @property
    def mode(self) -> Tensor:
        return (self.logits.detach() > 0).to(self.logits.dtype)

    def log_prob(self, action: Tensor) -> Tensor:
        logits, action = torch.broadcast_tensors(self.logits, action.to(self.logits.dtype))
        return -F.binary_cross_entropy_with_logits(logits, action, reduction="none")

    def log_prob_of_vector(self, vector: Tensor) -> Tensor:
        return self.log_prob(vector.expand_as(self.logits)).mean(dim=-1, keepdim=True)

    def entropy(self) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.logits, self.probs, reduction="none")

    @property
    def open_bits(self) -> Tensor:
        """(..., A) bool, False where a mask of actions keeps a bit at 0."""
        return self.logits.detach() > _NEVER

    def sample_action(self, sample: bool) -> Tensor:
        return (self.sample() if sample else self.mode).to(torch.int8)

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Entropy": self.entropy().detach().sum(dim=-1).mean()}


@gin.configurable
class Multibinary(PolicyOutput):
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
