"""Policies over actions of several parts: independent distributions, one for each part."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from amago.nets.distributions import ONE, ActionDistribution, PolicyOutput, Shape
from amago.nets.policy_dists import Discrete, Multibinary
from amago.nets.torch_distributions import action_distribution
from amago.spaces import ActionPart, parts_of, stored_dtype_of


def distribution_of(
    action_kind: str,
    action_dim: int,
    continuous_dist_type: Callable[[int], PolicyOutput] | None,
    discrete_dist_type: Callable[[int], PolicyOutput] = Discrete,
) -> PolicyOutput:
    """The distribution of an action space; a `Product` if the space has several parts.

    Args:
        action_kind, action_dim: ``kind`` and ``dim`` of its `amago.spaces.ActionSpec`.
        continuous_dist_type: of each continuous part; None where there is none.
        discrete_dist_type: of each discrete part.

    Raises:
        ValueError: the kind is unknown, or a part has no distribution.
    """
    parts = parts_of(action_kind, action_dim)
    types = {"discrete": discrete_dist_type, "continuous": continuous_dist_type, "multibinary": Multibinary}
    made = []
    for part in parts:
        of_part = types[part.kind]
        if of_part is None:
            raise ValueError(f"{part.kind}_dist_type=None, but actions of kind {action_kind!r} have a {part.kind} part")
        made.append(of_part(part.dim))
    return made[0] if action_kind in types else Product(action_dim, parts, made)


class ProductOutput(ActionDistribution):
    """Independent distributions, one for each part. Samples are vectors; `log_prob` and `entropy` have one number for each
    part.

    Attributes:
        factors: a distribution for each part.
        parts: the place of each in an action.
    """

    def __init__(self, factors: list[ActionDistribution], parts: tuple[ActionPart, ...]) -> None:
        super().__init__(factors[0].batch_shape[:-1] if parts[0].kind != "discrete" else factors[0].batch_shape)
        self.factors, self.parts = factors, parts

    def _of_vector(self, vector: Tensor) -> list[tuple[ActionDistribution, Tensor]]:
        return [(factor, vector[..., part.vector]) for factor, part in zip(self.factors, self.parts)]

    def sample(self, sample_shape: Shape = ONE) -> Tensor:
        drawn = zip(self.parts, (factor.sample(sample_shape) for factor in self.factors))
        return self._vector([x.squeeze(-1) if part.kind == "discrete" else x for part, x in drawn])

    @property
    def mode(self) -> Tensor:
        return self._vector([factor.mode for factor in self.factors])

    def _vector(self, samples: list[Tensor]) -> Tensor:
        """Indices (...), numbers and bits (..., A_i) of the parts as one vector (..., A)."""
        vectors = []
        for sample, part in zip(samples, self.parts):
            if part.kind == "discrete":
                sample = torch.nn.functional.one_hot(sample, part.dim)
            vectors.append(sample.to(torch.get_default_dtype()))
        return torch.cat(vectors, dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """(..., A) vectors -> (..., parts), `log_prob_of_vector` of each part (for bits the mean)."""
        return torch.cat([factor.log_prob_of_vector(vector) for factor, vector in self._of_vector(action)], dim=-1)

    def sample_vector(self, grad: bool = False) -> Tensor:
        return torch.cat([factor.sample_vector(grad) for factor in self.factors], dim=-1)

    def log_prob_of_vector(self, vector: Tensor) -> Tensor:
        return self.log_prob(vector).sum(dim=-1, keepdim=True)

    def clip_like_policy(self, vector: Tensor) -> Tensor:
        clipped = [factor.clip_like_policy(part) for factor, part in self._of_vector(vector)]
        lead = torch.broadcast_shapes(*(c.shape[:-1] for c in clipped))
        return torch.cat([c.expand(*lead, c.shape[-1]) for c in clipped], dim=-1)

    def entropy(self) -> Tensor:
        """(..., parts)."""
        entropies = []
        for factor, part in zip(self.factors, self.parts):
            entropy = factor.entropy()
            entropies.append(entropy.unsqueeze(-1) if part.kind == "discrete" else entropy.sum(dim=-1, keepdim=True))
        return torch.cat(entropies, dim=-1)

    def sample_action(self, sample: bool) -> Tensor:
        dtype = torch.from_numpy(np.zeros(0, stored_dtype_of(part.kind for part in self.parts))).dtype
        return torch.cat([factor.sample_action(sample).to(dtype) for factor in self.factors], dim=-1)

    def metrics(self) -> dict[str, Tensor]:
        """The metrics of the parts by name: the sum of entropies, the mean of others."""
        found: dict[str, list[Tensor]] = {}
        for factor in self.factors:
            for name, value in factor.metrics().items():
                found.setdefault(name, []).append(value)
        return {name: torch.stack(v).sum() if "Entropy" in name else torch.stack(v).mean() for name, v in found.items()}


class Product(PolicyOutput):
    """Makes a `ProductOutput` of the concatenated network outputs of the parts.

    Args:
        d_action: A, of all parts together.
        parts: the place of each part in an action.
        types: the distribution of each part.
    """

    is_discrete = False

    def __init__(self, d_action: int, parts: tuple[ActionPart, ...], types: list[PolicyOutput]) -> None:
        super().__init__(d_action)
        self.parts, self._types = parts, nn.ModuleList(types)
        self.actions_differentiable = all(t.actions_differentiable for t in types)

    @property
    def types(self) -> list[PolicyOutput]:
        """The distribution of each part."""
        return list(self._types)  # type: ignore[arg-type]

    @property
    def input_dimension(self) -> int:
        return sum(t.input_dimension for t in self.types)

    def _split(self, vec: Tensor) -> tuple[Tensor, ...]:
        return vec.split([t.input_dimension for t in self.types], dim=-1)

    def action_from_buffer(self, action: Tensor) -> Tensor:
        return torch.cat([t.action_from_buffer(action[..., p.vector]) for t, p in zip(self.types, self.parts)], dim=-1)

    def masked(self, vec: Tensor, legal: Tensor) -> Tensor:
        """See `PolicyOutput.masked`; continuous parts are not masked."""
        return torch.cat(
            [
                part_vec if p.kind == "continuous" else t.masked(part_vec, legal[..., p.vector])
                for t, p, part_vec in zip(self.types, self.parts, self._split(vec))
            ],
            dim=-1,
        )

    def make(self, vec: Tensor) -> ProductOutput:
        factors = [action_distribution(t(part), t) for t, part in zip(self.types, self._split(vec))]
        return ProductOutput(factors, self.parts)
