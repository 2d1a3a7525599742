"""What every distribution over actions offers; `amago.nets.policy_dists` has the ready ones.

A `DistributionType` (one for a policy, made from the action's width) turns network outputs into a `PolicyOutput` (one for a
batch). Shapes: leading dimensions (...) usually (B, L, G); A the width of an action.

Three forms of an action: the *vector* that critics read (one-hot, [-1, 1], bits; (..., A) float), the *sample* that `log_prob`
takes (an index (...) for `Discrete`, else the vector), and the *stored* one that rollouts hand to environments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from amago.nets.utils import at_least_float32, autocast_dtype, check_positive


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

    def sample_vector(self, grad: bool = False) -> Tensor:
        """One action of each distribution as critics read it, (..., A); with ``grad`` its gradient reaches the policy.

        Raises:
            NotImplementedError: a gradient was asked for, and the distribution has no reparametrisation.
        """
        return self.rsample() if grad else self.sample()

    def log_prob_of_vector(self, vector: Tensor) -> Tensor:
        """Log-density (..., 1) of whole actions in vector form (..., A), broadcast against the distributions; for independent
        bits the mean over them."""
        return self.log_prob(vector).sum(dim=-1, keepdim=True)

    def entropy(self) -> Tensor:
        """In the shape of `log_prob`.

        Raises:
            NotImplementedError: there is no closed form.
        """
        raise NotImplementedError(f"the entropy of {type(self).__name__} has no closed form")

    @abstractmethod
    def sample_action(self, sample: bool) -> Tensor:
        """The action in its stored form (..., S), drawn or (``sample`` False) greedy, without gradient."""

    def clip_like_policy(self, vector: Tensor) -> Tensor:
        """Stored actions as vectors (..., A), broadcast against the distributions, in the form of `sample_vector`, with no weight on
        what is masked; here unchanged. Without a mask it is `DistributionType.clip_like_policy`."""
        return vector

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
    """`PolicyOutput.sample_vector` can carry a gradient."""

    def __init__(self, d_action: int) -> None:
        check_positive(d_action=d_action)
        self.d_action = d_action

    @property
    @abstractmethod
    def input_dimension(self) -> int:
        """P, how many numbers describe one distribution."""

    def clip_like_policy(self, vector: Tensor) -> Tensor:
        """Stored actions as vectors (..., A), brought into the form of `PolicyOutput.sample_vector`; here unchanged."""
        return vector

    def masked(self, vec: Tensor, legal: Tensor) -> Tensor:
        """Network outputs (..., P) with which nothing illegal has any probability; ``legal`` (..., A) is True where a choice is
        legal, or a bit may be 1.

        Raises:
            ValueError: this distribution has nothing that could be masked.
        """
        raise ValueError(f"{type(self).__name__} cannot be masked: it has no choices that could be illegal")

    @abstractmethod
    def make(self, vec: Tensor) -> PolicyOutput:
        """(..., P) -> distributions with batch shape (...)."""

    def __call__(self, vec: Tensor, log_dict: dict[str, Any] | None = None) -> PolicyOutput:
        """(..., P) -> distributions with batch shape (...), never in half precision; their metrics go into ``log_dict`` if given."""
        if vec.shape[-1] != self.input_dimension:
            raise ValueError(f"{type(self).__name__} takes (..., {self.input_dimension}), got shape {tuple(vec.shape)}")
        if autocast_dtype(vec.device) is None:
            return self._made(vec, log_dict)
        with torch.autocast(vec.device.type, enabled=False):
            return self._made(vec, log_dict)

    def _made(self, vec: Tensor, log_dict: dict[str, Any] | None) -> PolicyOutput:
        dist = self.make(at_least_float32(vec))
        if log_dict is not None:
            log_dict.update(dist.metrics())
        return dist
