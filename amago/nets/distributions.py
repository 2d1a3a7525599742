"""The interface of distributions over actions, which `amago.nets.policy_dists` implements.

A `PolicyOutput`, one for each policy, maps network outputs to a distribution of PyTorch, one for each batch. Shapes: leading
dimensions (...) usually (B, L, G); A the width of an action.

An action has three forms: the *vector* that critics read (one-hot, numbers in [-1, 1] or bits; (..., A) float), the *sample*
that `log_prob` takes (an index for discrete actions, else the vector), and the *stored* form that goes to environments and to
disk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.types import _size as Shape  # what PyTorch's own signatures use

from amago.config import NamedArguments
from amago.nets import ranks
from amago.nets.utils import at_least_float32, autocast_dtype, check_positive

ONE: torch.Size = torch.Size()
"""The default of ``sample_shape``: one action of each distribution."""


class ActionDistribution(Distribution):
    """A batch of distributions over actions: a distribution of PyTorch, with the forms of actions that agents need.

    Its arguments are not validated, so that NaN gives NaN instead of an error: the update is then skipped.

    Args:
        batch_shape: (...), without the dimension of an action.
    """

    def __init__(self, batch_shape: torch.Size = ONE) -> None:
        Distribution.__init__(self, batch_shape, validate_args=False)  # not that of a second base class

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        """Actions without gradient: ``sample_shape`` + (..., 1) indices for discrete actions, else ``sample_shape`` + (..., A)."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def rsample(self, sample_shape: Shape = ONE) -> Tensor:
        """Like `sample`, with gradient.

        Raises:
            NotImplementedError: the distribution has no reparametrisation.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reparametrised sample: use sample() or probs")

    @property
    def mode(self) -> Tensor:
        """The greedy action: (...) indices for discrete actions, else (..., A)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement mode")

    def sample_vector(self, grad: bool = False) -> Tensor:
        """One action of each distribution in vector form (..., A); with ``grad``, gradients reach the policy.

        Raises:
            NotImplementedError: ``grad``, and the distribution has no reparametrisation.
        """
        return self.rsample() if grad else self.sample()

    def log_prob_of_vector(self, vector: Tensor) -> Tensor:
        """Log-density (..., 1) of whole actions in vector form (..., A), broadcast against the distributions; for independent
        bits the mean over them."""
        return self.log_prob(vector).sum(dim=-1, keepdim=True)  # type: ignore[no-any-return, no-untyped-call]

    def entropy(self) -> Tensor:
        """In the shape of `log_prob`.

        Raises:
            NotImplementedError: there is no closed form.
        """
        raise NotImplementedError(f"the entropy of {type(self).__name__} has no closed form")

    def sample_action(self, sample: bool) -> Tensor:
        """The action in its stored form (..., S), drawn or (``sample`` False) greedy, without gradient."""
        return (self.sample() if sample else self.mode.detach()).float()

    def clip_like_policy(self, vector: Tensor) -> Tensor:
        """Clip actions of the data in vector form (..., A), broadcast against the distributions, as `sample_vector` clips its
        own, with 0 at masked choices. Unchanged by default. Without a mask, the same as `PolicyOutput.action_from_buffer`."""
        return vector

    def metrics(self) -> dict[str, Tensor]:
        """Scalars for the log, by name."""
        return {}


class PolicyOutput(NamedArguments, nn.Module):
    """Maps network outputs to distributions over actions. It has no parameters.

    A subclass sets `is_discrete` and `actions_differentiable`, implements `input_dimension`, and either `forward`, which may return
    any distribution of PyTorch, or `make`, which is called outside of half precision and returns an `ActionDistribution`, whose
    metrics are logged.

    Args:
        d_action: A, the width of the action's vector form.
    """

    is_discrete: bool
    """Actions are indices, and the policy has a probability of each."""
    actions_differentiable: bool
    """Samples can carry a gradient."""

    def __init__(self, d_action: int) -> None:
        super().__init__()
        check_positive(d_action=d_action)
        self.d_action = d_action

    @property
    def input_dimension(self) -> int:
        """P, the number of parameters of one distribution."""
        raise NotImplementedError(f"{type(self).__name__} does not say its input_dimension")

    def action_from_buffer(self, action: Tensor) -> Tensor:
        """Change actions of the data in vector form (..., A) as samples of the policy are changed before critics read them.
        Unchanged by default."""
        return action

    def masked(self, vec: Tensor, legal: Tensor) -> Tensor:
        """Network outputs (..., P) under which illegal actions have probability 0.

        Args:
            vec: (..., P).
            legal: (..., A), True where a choice is legal, or a bit may be 1.

        Raises:
            ValueError: the distribution cannot be masked.
        """
        raise ValueError(f"{type(self).__name__} cannot be masked: it has no choices that could be illegal")

    def make(self, vec: Tensor) -> ActionDistribution:
        """(..., P) -> distributions with batch shape (...)."""
        raise NotImplementedError(f"{type(self).__name__} implements neither forward nor make")

    def forward(self, vec: Tensor, log_dict: dict[str, Any] | None = None, mask: Tensor | None = None) -> Distribution:
        """Distributions with batch shape (...), never in half precision.

        Args:
            vec: (..., P).
            log_dict: takes their metrics by name, if given.
            mask: bool, the first dimensions of ``vec``, followed by 1; metrics are those of distributions where it is True. None: of all.
        """
        if vec.shape[-1] != self.input_dimension:
            raise ValueError(f"{type(self).__name__} takes (..., {self.input_dimension}), got shape {tuple(vec.shape)}")
        if autocast_dtype(vec.device) is None:
            return self._made(vec, log_dict, mask)
        with torch.autocast(vec.device.type, enabled=False):
            return self._made(vec, log_dict, mask)

    def _made(self, vec: Tensor, log_dict: dict[str, Any] | None, mask: Tensor | None) -> ActionDistribution:
        vec = at_least_float32(vec)
        dist = self.make(vec)
        if log_dict is not None and mask is None:
            log_dict.update(dist.metrics())
        elif log_dict is not None and mask is not None:
            weight = ranks.weight(mask)
            if mask.any():
                found = self.make(vec.detach()[mask.squeeze(-1)]).metrics()
                log_dict.update(found if weight is None else {name: weight * value for name, value in found.items()})
        return dist
