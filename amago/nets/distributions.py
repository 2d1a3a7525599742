"""Distributions over actions: PyTorch's, with the forms of actions that agents need, and the base of the maps that make them.

A `PolicyOutput`, one for each policy, maps network outputs to a distribution, one for each batch. Shapes: leading dimensions
(...) usually (B, L, G); A the width of an action.

An action has three forms: the *vector* that critics read (one-hot, numbers in [-1, 1] or bits; (..., A) float), the *sample*
that `log_prob` takes (an index for discrete actions, else the vector), and the *stored* form of environments and files.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, TransformedDistribution
from torch.types import _size as Shape  # the type in PyTorch's own signatures

from amago.nets import ranks
from amago.nets.utils import Log, at_least_float32, autocast_dtype, check_positive
from amago.spaces import ActionPart, stored_dtype_of

ONE: torch.Size = torch.Size()
"""The default of ``sample_shape``: one action of each distribution."""
NEVER = -1000.0
"""The logit of a bit whose probability is 0 in float32 and float64; its log-probability is finite."""


class ActionDistribution(Distribution):
    """A batch of distributions over actions.

    Its arguments are not validated, so that NaN gives NaN instead of an error: the update is then skipped. ``batch_shape`` (...)
    is without the dimension of an action.
    """

    _validate_args = False

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        """Actions without gradient: indices ``sample_shape`` + (..., 1) for discrete actions, else ``sample_shape`` +
        (..., A)."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def rsample(self, sample_shape: Shape = ONE) -> Tensor:
        """Like `sample`, with gradient. NotImplementedError: there is no reparametrisation."""
        raise NotImplementedError(f"{type(self).__name__} has no reparametrised sample: use sample() or probs")

    @property
    def mode(self) -> Tensor:
        """The greedy action: (...) indices for discrete actions, else (..., A); the mean by default."""
        return self.mean

    def sample_vector(self, grad: bool = False) -> Tensor:
        """One action of each distribution in vector form (..., A); with ``grad`` by `rsample`."""
        return self.rsample() if grad else self.sample()

    def log_prob_of_vector(self, vector: Tensor) -> Tensor:
        """Log-density (..., 1) of whole actions in vector form (..., A), broadcast against the distributions; for independent
        bits the mean over them."""
        return self.log_prob(vector).sum(dim=-1, keepdim=True)  # type: ignore[no-any-return, no-untyped-call]

    def entropy(self) -> Tensor:
        """The entropy, in the shape of `log_prob`. NotImplementedError: there is no closed form."""
        raise NotImplementedError(f"the entropy of {type(self).__name__} has no closed form")

    def sample_action(self, sample: bool) -> Tensor:
        """The action in its stored form (..., S), drawn or (``sample`` False) greedy, without gradient."""
        return (self.sample() if sample else self.mode.detach()).float()

    def clip_like_policy(self, vector: Tensor) -> Tensor:
        """Clip actions of the data in vector form (..., A), broadcast against the distributions, as `sample_vector` clips
        samples, with 0 at masked choices. Unchanged by default."""
        return vector

    def metrics(self) -> dict[str, Tensor]:
        """Numbers for the log, by name, one for each distribution (...)."""
        return {}


class PolicyOutput(nn.Module):
    """A map from network outputs to distributions over actions, without parameters.

    A subclass implements `input_dimension`, and either `forward`, which may return any distribution of PyTorch, or `make`, which is
    called outside of half precision and returns an `ActionDistribution`, whose metrics are logged.

    Args:
        d_action: A, the width of the action's vector form.
    """

    is_discrete: bool = False
    """Actions are indices, and the policy has a probability of each."""
    actions_differentiable: bool = True
    """Samples can carry a gradient."""
    gumbel_temperature: float = 0.5
    """Of the gradient of sampled choices."""

    def __init__(self, d_action: int) -> None:
        super().__init__()
        check_positive(d_action=d_action)
        self.d_action = d_action

    @property
    def input_dimension(self) -> int:
        """P, the number of parameters of one distribution: A by default."""
        return self.d_action

    def action_from_buffer(self, action: Tensor, *illegal: Tensor) -> Tensor:
        """Change actions of the data in vector form (..., A) as samples of the policy are changed before critics read them.
        Unchanged by default."""
        return action

    def masked(self, vec: Tensor, legal: Tensor) -> Tensor:
        """Network outputs (..., P) under which illegal actions have probability 0; ``legal`` (..., A) is True where a choice is
        legal, or a bit may be 1. ValueError: the distribution cannot be masked."""
        raise ValueError(f"{type(self).__name__} cannot be masked: it has no choices that could be illegal")

    def make(self, vec: Tensor) -> ActionDistribution:
        """(..., P) -> distributions with batch shape (...)."""
        raise NotImplementedError(f"{type(self).__name__} implements neither forward nor make")

    def forward(self, vec: Tensor, log_dict: Log = None, mask: Tensor | None = None) -> Distribution:
        """Distributions with batch shape (...), never in half precision.

        Args:
            vec: (..., P).
            log_dict: takes their metrics.
            mask: bool, the first dimensions of ``vec``, followed by 1; metrics cover the distributions where it is True.
        """
        if vec.shape[-1] != self.input_dimension:
            raise ValueError(f"{type(self).__name__} takes (..., {self.input_dimension}), got shape {tuple(vec.shape)}")
        if autocast_dtype(vec.device) is not None:
            with torch.autocast(vec.device.type, enabled=False):
                return self.forward(vec, log_dict, mask)
        vec = at_least_float32(vec)
        dist = self.make(vec)
        if log_dict is not None:
            for name, value in dist.metrics().items():
                log_dict[name] = value.detach().mean() if mask is None else ranks.masked_mean(value, mask)
        return dist


def _draw_by_sums(probs: Tensor, num: int) -> Tensor:
    """Indices (n, num) of choices with probabilities (n, A), for CPUs: 512 rows of 2 choices take .6 of the time of `torch.multinomial`, of
    100 choices .08. The sums are in float64, where they are exact, so that a choice of probability 0 is never drawn."""
    sums = probs.double().cumsum(dim=-1)
    if not torch.compiler.is_compiling() and sums[:, -1].isnan().any():
        raise ValueError("the policy's probabilities are NaN")
    numbers = torch.rand((len(sums), num), dtype=sums.dtype, device=probs.device)
    return torch.searchsorted(sums, numbers * sums[:, -1:], right=True)


def _draw_by_scores(probs: Tensor, num: int) -> Tensor:
    """`_draw_by_sums` for GPUs, also where only deterministic algorithms are allowed: the largest of probabilities over exponential numbers.
    NaN gives an index out of range, since the host does not wait for the device here."""
    scores = probs / probs.new_empty((num, *probs.shape)).exponential_()
    best, drawn = scores.max(dim=-1)
    return torch.where(best.isnan(), probs.shape[-1], drawn).T


class DiscreteOutput(ActionDistribution, Categorical):
    """Categorical distributions, whose probabilities are not normalised again.

    Args:
        probs: (..., A), clipped and renormalised; 0 where illegal.
        kind: the `PolicyOutput` that made them; its ``action_from_buffer`` clips one-hot actions like probabilities.
        illegal: (..., A) bool, choices of probability 0; None: no mask.
    """

    has_rsample = False
    probs: Tensor  # instead of the lazy attribute of Categorical

    def __init__(self, probs: Tensor, kind: PolicyOutput, illegal: Tensor | None = None) -> None:
        Distribution.__init__(self, probs.shape[:-1])  # not the method of Categorical, which divides by the sum
        self.probs, self.kind, self.illegal = probs, kind, illegal
        self._param, self._num_events = probs, probs.shape[-1]  # attributes that methods of Categorical read

    def expand(self, batch_shape: Shape, _instance: object = None) -> DiscreteOutput:
        shape = torch.Size((*batch_shape, self._num_events))
        illegal = None if self.illegal is None else self.illegal.expand(shape)
        return DiscreteOutput(self.probs.expand(shape), self.kind, illegal)

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        """Indices, ``sample_shape`` + (..., 1)."""
        probs, num = self.probs.detach().reshape(-1, self._num_events), torch.Size(sample_shape).numel()
        drawn = (_draw_by_sums if probs.is_cpu else _draw_by_scores)(probs, num)
        return drawn.T.reshape(*sample_shape, *self.batch_shape, 1)

    @property
    def mode(self) -> Tensor:
        """The likeliest choice, (...) indices."""
        return self.probs.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """(...) log-probabilities of indices (...), or (..., 1) as `sample` returns them; samples may come first."""
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
        return self.gumbel_softmax(grad, self.kind.gumbel_temperature)

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
        illegal = () if self.illegal is None else (self.illegal,)
        return self.kind.action_from_buffer(vector, *illegal)

    def entropy(self) -> Tensor:
        return torch.special.entr(self.probs).sum(dim=-1)

    def sample_action(self, sample: bool) -> Tensor:
        return self.sample() if sample else self.mode.unsqueeze(-1)

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Entropy": self.entropy()}


class MultibinaryOutput(Bernoulli, ActionDistribution):
    """Independent bits, by the ``logits`` (..., A) of each being 1."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits=logits, validate_args=False)

    def expand(self, batch_shape: Shape, _instance: object = None) -> MultibinaryOutput:
        return MultibinaryOutput(self.logits.expand(batch_shape))

    def rsample(self, sample_shape: Shape = ONE) -> Tensor:
        """Sampled bits with the gradient of the probabilities (straight-through, Bengio et al. 2013, arXiv 1308.3432). NaN in
        the logits gives NaN: the update is then skipped."""
        probs = self.probs.expand(*sample_shape, *self.logits.shape)
        drawn = torch.bernoulli(probs.detach().nan_to_num(0.0))  # which refuses NaN, on a GPU by ending the process
        return drawn + probs - probs.detach()

    def sample_vector(self, grad: bool = False) -> Tensor:
        return self.rsample() if grad else self.rsample().detach()

    @property
    def mode(self) -> Tensor:
        return (self.logits.detach() > 0).to(self.logits.dtype)

    def log_prob(self, action: Tensor) -> Tensor:
        return super().log_prob(action.to(self.logits.dtype))

    def log_prob_of_vector(self, vector: Tensor) -> Tensor:
        return self.log_prob(vector.expand_as(self.logits)).mean(dim=-1, keepdim=True)

    def sample_action(self, sample: bool) -> Tensor:
        return (self.sample() if sample else self.mode).to(torch.int8)

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Entropy": self.entropy().sum(dim=-1)}


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
        loc = self.loc.expand(*sample_shape, *self.loc.shape)
        return torch.tanh(loc + self.scale * torch.randn_like(loc))

    def rsample_with_log_prob(self) -> tuple[Tensor, Tensor]:
        """Like `rsample`, with the log-density of each number of the action, (..., A) both, computed from the argument of tanh:
        by the clipped `log_prob`, a policy whose actions are all at +-1 would seem to have a very large entropy."""
        before = self.loc + self.scale * torch.randn_like(self.loc)
        return torch.tanh(before), self._log_prob_before_tanh(before)

    @property
    def mean(self) -> Tensor:
        """tanh(loc), (..., A): the median, used in place of the mean."""
        return torch.tanh(self.loc)

    def log_prob(self, action: Tensor) -> Tensor:
        return self._log_prob_before_tanh(torch.atanh(action.clamp(*self.clip)))

    def _log_prob_before_tanh(self, x: Tensor) -> Tensor:
        """The log-density of tanh(x)."""
        normal = -0.5 * ((x - self.loc) / self.scale).square() - self.scale.log() - 0.5 * math.log(2.0 * math.pi)
        return normal - 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Std (before tanh)": self.scale.mean(dim=-1)}


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

    def log_prob(self, action: Tensor) -> Tensor:
        return self._unit.log_prob(0.5 * (action.clamp(*self.clip) + 1.0)) - math.log(2.0)

    def entropy(self) -> Tensor:
        return self._unit.entropy() + math.log(2.0)

    def metrics(self) -> dict[str, Tensor]:
        return {"Policy Entropy": self.entropy().sum(dim=-1)}


class ContinuousOutput(ActionDistribution):
    """A distribution of PyTorch over numbers.

    Args:
        dist: its samples are (..., A): of batch shape (..., A), or of batch shape (...) and one dimension of an event.
        kind: the object that made it. Its ``action_from_buffer`` changes every action before its density is computed.
    """

    def __init__(self, dist: Distribution, kind: PolicyOutput) -> None:
        super().__init__(dist.batch_shape)
        self.dist, self.kind = dist, kind
        self.has_rsample = dist.has_rsample

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        return self.dist.sample(sample_shape)  # type: ignore[no-any-return]

    def rsample(self, sample_shape: Shape = ONE) -> Tensor:
        return self.dist.rsample(sample_shape)  # type: ignore[no-any-return]

    @property
    def mean(self) -> Tensor:
        """(..., A); of a transformed distribution the transform of the mean before it."""
        dist: Distribution = self.dist
        transforms: list[torch.distributions.Transform] = []
        while isinstance(dist, TransformedDistribution):
            transforms = [*dist.transforms, *transforms]
            dist = dist.base_dist
        value: Tensor = dist.mean
        for transform in transforms:
            value = transform(value)
        return value

    def log_prob(self, action: Tensor) -> Tensor:
        """(..., A), or (..., 1) where the dimensions of an action are one event."""
        log_prob: Tensor = self.dist.log_prob(self.kind.action_from_buffer(action))  # type: ignore[no-untyped-call]
        return log_prob.unsqueeze(-1) if self.dist.event_shape else log_prob

    def clip_like_policy(self, vector: Tensor) -> Tensor:
        return self.kind.action_from_buffer(vector)

    def entropy(self) -> Tensor:
        entropy: Tensor = self.dist.entropy()  # type: ignore[no-untyped-call]
        return entropy.unsqueeze(-1) if self.dist.event_shape else entropy


def categorical_output(dist: Categorical, kind: PolicyOutput | None = None) -> DiscreteOutput:
    """Any categorical distribution (..., A) as a `DiscreteOutput`. ``kind`` made it; None: actions of the data are not
    changed."""
    if isinstance(dist, DiscreteOutput):
        return dist
    return DiscreteOutput(dist.probs, PolicyOutput(dist.probs.shape[-1]) if kind is None else kind)


class ProductOutput(ActionDistribution):
    """Independent distributions ``factors``, one for each of the ``parts`` of an action. Samples are vectors; `log_prob` and
    `entropy` have one number for each part."""

    def __init__(self, factors: list[ActionDistribution], parts: tuple[ActionPart, ...]) -> None:
        super().__init__(factors[0].batch_shape[:-1] if parts[0].kind != "discrete" else factors[0].batch_shape)
        self.factors, self.parts = factors, parts

    def _of_vector(self, vector: Tensor) -> list[tuple[ActionDistribution, Tensor]]:
        return [(factor, vector[..., part.vector]) for factor, part in zip(self.factors, self.parts)]

    def _vector(self, samples: list[Tensor]) -> Tensor:
        """Indices (...), numbers and bits (..., A_i) of the parts as one vector (..., A)."""
        each = [F.one_hot(x, p.dim) if p.kind == "discrete" else x for x, p in zip(samples, self.parts)]
        return torch.cat([x.to(torch.get_default_dtype()) for x in each], dim=-1)

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        drawn = zip(self.parts, (factor.sample(sample_shape) for factor in self.factors))
        return self._vector([x.squeeze(-1) if part.kind == "discrete" else x for part, x in drawn])

    @property
    def mode(self) -> Tensor:
        return self._vector([factor.mode for factor in self.factors])

    def log_prob(self, action: Tensor) -> Tensor:
        """(..., A) vectors -> (..., parts), `log_prob_of_vector` of each part (for bits the mean)."""
        return torch.cat([factor.log_prob_of_vector(vector) for factor, vector in self._of_vector(action)], dim=-1)

    def sample_vector(self, grad: bool = False) -> Tensor:
        return torch.cat([factor.sample_vector(grad) for factor in self.factors], dim=-1)

    def clip_like_policy(self, vector: Tensor) -> Tensor:
        clipped = [factor.clip_like_policy(part) for factor, part in self._of_vector(vector)]
        lead = torch.broadcast_shapes(*(c.shape[:-1] for c in clipped))
        return torch.cat([c.expand(*lead, c.shape[-1]) for c in clipped], dim=-1)

    def entropy(self) -> Tensor:
        """(..., parts)."""
        each = [(factor.entropy(), part.kind == "discrete") for factor, part in zip(self.factors, self.parts)]
        return torch.cat([x.unsqueeze(-1) if single else x.sum(dim=-1, keepdim=True) for x, single in each], dim=-1)

    def sample_action(self, sample: bool) -> Tensor:
        dtype = torch.from_numpy(np.zeros(0, stored_dtype_of(part.kind for part in self.parts))).dtype
        return torch.cat([factor.sample_action(sample).to(dtype) for factor in self.factors], dim=-1)

    def metrics(self) -> dict[str, Tensor]:
        """The metrics of the parts by name: the sum of entropies, the mean of others."""
        each = [factor.metrics() for factor in self.factors]
        found = {name: torch.stack([m[name] for m in each if name in m]) for name in dict.fromkeys(n for m in each for n in m)}
        return {name: values.sum(dim=0) if "Entropy" in name else values.mean(dim=0) for name, values in found.items()}
