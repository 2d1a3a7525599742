"""Distributions over actions.

A `DistributionType` (one for a policy, made from the action's width) turns network outputs into a `PolicyOutput` (one for a
batch). Shapes: leading dimensions (...) usually (B, L, G); A the width of an action.

Three forms of an action: the *vector* that critics read (one-hot, [-1, 1], bits; (..., A) float), the *sample* that `log_prob`
takes (an index (...) for `Discrete`, else the vector), and the *stored* one that rollouts hand to environments.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import gin
import torch
import torch.nn.functional as F
from torch import Tensor

from amago.nets.utils import at_least_float32, check_positive


class PolicyOutput(ABC):
    """A batch of distributions over actions."""

    @abstractmethod
    def sample(self) -> Tensor:
        """One action of each distribution, without gradient: (...) indices for discrete actions, else (..., A)."""

    def rsample(self) -> Tensor:
        """Like `sample`, with gradient.

        Raises:
            NotImplementedError: the distribution has no reparametrisation.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reparametrised sample: use sample() or probs")

    @property
    @abstractmethod
    def mode(self) -> Tensor:
        """The greedy action, in the form of `sample`."""

    @abstractmethod
    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density of actions in the form of `sample`: (...) for discrete ones, else (..., A), one number a dimension."""

    def entropy(self) -> Tensor:
        """In the shape of `log_prob`.

        Raises:
            NotImplementedError: there is no closed form.
        """
        raise NotImplementedError(f"the entropy of {type(self).__name__} has no closed form")

    @abstractmethod
    def sample_action(self, sample: bool) -> Tensor:
        """The action in its stored form (..., S), drawn or (``sample`` False) greedy, without gradient."""

    def metrics(self) -> dict[str, Tensor]:
        """Scalars worth logging."""
        return {}


class DistributionType(ABC):
    """Makes a `PolicyOutput` of network outputs.

    Args:
        d_action: A, the width of the action's vector form.
    """

    is_discrete: bool
    """Actions are indices, and the policy has a probability of each."""
    actions_differentiable: bool
    """`PolicyOutput.rsample` exists."""

    def __init__(self, d_action: int) -> None:
        check_positive(d_action=d_action)
        self.d_action = d_action

    @property
    @abstractmethod
    def input_dimension(self) -> int:
        """P, how many numbers describe one distribution."""

    @abstractmethod
    def make(self, vec: Tensor) -> PolicyOutput:
        """(..., P) -> distributions with batch shape (...)."""

    def __call__(self, vec: Tensor, log_dict: dict[str, Any] | None = None) -> PolicyOutput:
        """(..., P) -> distributions with batch shape (...), never in half precision; their metrics go into ``log_dict`` if given."""
        if vec.shape[-1] != self.input_dimension:
            raise ValueError(f"{type(self).__name__} takes (..., {self.input_dimension}), got shape {tuple(vec.shape)}")
        with torch.autocast(vec.device.type, enabled=False):
            dist = self.make(at_least_float32(vec))
            if log_dict is not None:
                log_dict.update(dist.metrics())
        return dist


class DiscreteOutput(PolicyOutput):
    """Categorical distributions.

    Attributes:
        probs: (..., A), clipped and renormalised.
    """

    def __init__(self, probs: Tensor) -> None:
        self.probs = probs

    def sample(self) -> Tensor:
        flat = self.probs.detach().reshape(-1, self.probs.shape[-1])
        return torch.multinomial(flat, 1).reshape(self.probs.shape[:-1])

    @property
    def mode(self) -> Tensor:
        return self.probs.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        if action.shape != self.probs.shape[:-1]:
            raise ValueError(f"actions must be indices of shape {tuple(self.probs.shape[:-1])}, got {tuple(action.shape)}")
        return self.probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1).log()

    def entropy(self) -> Tensor:
        return torch.special.entr(self.probs).sum(dim=-1)

    def sample_action(self, sample: bool) -> Tensor:
        return (self.sample() if sample else self.mode).unsqueeze(-1)

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Entropy": self.entropy().detach().mean()}


@gin.configurable
class Discrete(DistributionType):
    """Softmax over A choices, each probability clipped, then divided by the sum (which carries no gradient).

    Args:
        d_action: A.
        clip_prob_low, clip_prob_high: the clip. A low clip keeps every action possible, and bounds log-probabilities.
    """

    is_discrete = True
    actions_differentiable = False

    def __init__(self, d_action: int, clip_prob_low: float = 0.001, clip_prob_high: float = 0.99) -> None:
        super().__init__(d_action)
        if not 0.0 <= clip_prob_low < clip_prob_high <= 1.0:
            raise ValueError(
                "0 <= clip_prob_low < clip_prob_high <= 1 must hold, got "
                f"clip_prob_low={clip_prob_low}, clip_prob_high={clip_prob_high}"
            )
        self.clip_prob_low, self.clip_prob_high = clip_prob_low, clip_prob_high

    @property
    def input_dimension(self) -> int:
        return self.d_action

    def clip_like_policy(self, probs: Tensor) -> Tensor:
        """Clip and renormalise (..., A) as the policy's probabilities are; also for stored one-hot actions, so that a critic
        reads both alike."""
        clipped = probs.clamp(self.clip_prob_low, self.clip_prob_high)
        return clipped / clipped.detach().sum(dim=-1, keepdim=True)

    def make(self, vec: Tensor) -> DiscreteOutput:
        return DiscreteOutput(self.clip_like_policy(vec.softmax(dim=-1)))


class TanhGaussianOutput(PolicyOutput):
    """tanh of independent normal variables.

    Attributes:
        loc, scale: (..., A), of the normal distribution before tanh.
        clip: actions are clamped to it before their density is taken (it is infinite at +-1).
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
        """tanh(loc), (..., A): the median, which serves as the mean."""
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
        clip_actions_on_log_prob: actions are clamped to it before their density is taken.
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
        low, high = clip_actions_on_log_prob
        if not -1.0 < low < high < 1.0:
            raise ValueError(f"clip_actions_on_log_prob must be within (-1, 1), got {clip_actions_on_log_prob}")
        self.log_std_low, self.log_std_high = math.log(std_low), math.log(std_high)
        self.clip = (low, high)

    @property
    def input_dimension(self) -> int:
        return 2 * self.d_action

    def make(self, vec: Tensor) -> TanhGaussianOutput:
        loc, raw = vec.chunk(2, dim=-1)
        log_std = self.log_std_low + 0.5 * (self.log_std_high - self.log_std_low) * (torch.tanh(raw) + 1.0)
        return TanhGaussianOutput(loc, log_std.exp(), self.clip)


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
        return torch.bernoulli(probs.detach()) + probs - probs.detach()

    @property
    def mode(self) -> Tensor:
        return (self.logits.detach() > 0).to(self.logits.dtype)

    def log_prob(self, action: Tensor) -> Tensor:
        return -F.binary_cross_entropy_with_logits(self.logits, action.to(self.logits.dtype), reduction="none")

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

    def make(self, vec: Tensor) -> MultibinaryOutput:
        return MultibinaryOutput(vec)
