"""Log-probabilities of whole actions, and entropy as a part of the objective of agents.

Entropy, with a temperature for each discount (``Agent.entropy_target``): Haarnoja et al. 2018 (arXiv 1812.05905); for choices
Christodoulou 2019 (arXiv 1910.07207).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from amago.nets import ranks
from amago.nets.distributions import NEVER, ActionDistribution, ProductOutput
from amago.nets.policy_dists import DiscreteOutput, MultibinaryOutput, TanhGaussianOutput
from amago.spaces import ActionSpec


def log_prob_of(policy: ActionDistribution, vector: Tensor) -> Tensor:
    """Natural log-probabilities (..., 1) of whole actions in vector form (..., A), broadcast against the policy; densities where they are
    continuous.

    They are sums over all numbers of an action, bits included, whereas `ActionDistribution.log_prob_of_vector` takes the mean
    over bits.
    """
    if isinstance(policy, ProductOutput):
        each = [log_prob_of(factor, vector[..., part.vector]) for factor, part in zip(policy.factors, policy.parts)]
        return torch.stack(each).sum(dim=0)
    if isinstance(policy, MultibinaryOutput):
        return policy.log_prob(vector).sum(dim=-1, keepdim=True)
    return policy.log_prob_of_vector(vector)


# ---- entropy --------------------------------------------------------------------------------------------------------------------

START = 0.1
"""The temperature at the start where ``entropy_target`` is set and ``entropy_coeff`` is not."""
_LIMIT = math.log(1e8)


class Temperature(nn.Module):
    """The weights alpha of the entropy, one for each discount, in units of return.

    A policy maximises E[sum_t gamma^t (m r_t + alpha H(pi(. | s_t)))], m the agent's ``reward_multiplier``. In the
    environment's own units of reward the weight is alpha / m. With a target each alpha follows the entropy of its policy: one
    step of gradient descent on log(alpha) (H / H_0 - target) for each batch, H the mean entropy over the batch and H_0 its
    unit: the largest possible entropy of choices and bits (of the legal ones), or one nat for each number of an action.

    Args:
        num_gammas: G.
        start: alpha before any batch.
        target: None: alpha stays as it is.
        rate: step size; log(alpha) changes by at most this with each batch.

    Attributes:
        log: (G, 1), log(alpha), saved with the weights of an agent.
    """

    log: Tensor

    def __init__(self, num_gammas: int, start: float, target: float | None, rate: float) -> None:
        super().__init__()
        self.target, self.rate = target, rate
        self.register_buffer("log", torch.full((num_gammas, 1), math.log(start)))

    @property
    def value(self) -> Tensor:
        """alpha, (G, 1)."""
        return self.log.exp()

    @torch.no_grad()
    def observe(self, policy: ActionDistribution, entropy: Tensor, mask: Tensor) -> None:
        """Move the temperatures after a batch, in training mode; the batches of all ranks count as one.

        Args:
            policy: (B, L, G).
            entropy: (B, L, G, 1), of ``policy``, exact or estimated.
            mask: (B, L, 1) bool, False where a step does not count.
        """
        if self.target is None or not self.training:
            return
        mask = mask[:, :, None].expand_as(entropy)
        scale = entropy_scale(policy).expand_as(entropy)
        sums = ranks.total(*(torch.where(mask, x, 0.0).sum(dim=(0, 1)) for x in (entropy, scale)))
        missing = (self.target - sums[0] / sums[1]).clamp(-1.0, 1.0)  # NaN where no choice was to be made
        moved = (self.log + self.rate * missing).clamp(-_LIMIT, _LIMIT).to(self.log.dtype)
        self.log.copy_(torch.where(missing.isfinite(), moved, self.log))

    def metrics(self, entropy: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The temperature and the entropy (B, L, G, 1) of the main discount."""
        return {
            "Temperature (main gamma)": self.value[-1, 0].clone(),
            "Temperature (mean over gammas)": self.value.mean(),
            "Entropy (main gamma)": ranks.masked_mean(entropy[:, :, -1], mask),
        }


def sample_with_entropy(policy: ActionDistribution, grad: bool) -> tuple[Tensor, Tensor]:
    """One action of each distribution as a vector (..., A), and the distribution's entropy in nats, (..., 1).

    The entropy is exact where it has a closed form. Elsewhere it is minus the log-density of that action, whose mean it is.
    """
    if isinstance(policy, ProductOutput):
        pairs = [sample_with_entropy(factor, grad) for factor in policy.factors]
        return torch.cat([vector for vector, _ in pairs], dim=-1), torch.stack([entropy for _, entropy in pairs]).sum(dim=0)
    if isinstance(policy, TanhGaussianOutput):
        vector, log_prob = policy.rsample_with_log_prob()
        if not grad:
            vector, log_prob = vector.detach(), log_prob.detach()
        return vector, -log_prob.sum(dim=-1, keepdim=True)
    vector = policy.sample_vector(grad)
    entropy = exact_entropy(policy)
    return vector, -policy.log_prob_of_vector(vector) if entropy is None else entropy


def exact_entropy(policy: ActionDistribution) -> Tensor | None:
    """The entropy (..., 1) of whole actions in nats; None where there is no closed form."""
    try:
        entropy = policy.entropy()
    except NotImplementedError:
        return None
    return entropy.unsqueeze(-1) if isinstance(policy, DiscreteOutput) else entropy.sum(dim=-1, keepdim=True)


def entropy_scale(policy: ActionDistribution) -> Tensor:
    """The unit of a target of the entropy, broadcast against (..., 1): the largest entropy of legal choices and bits, or the
    number of an action's dimensions."""
    if isinstance(policy, ProductOutput):
        return torch.stack(torch.broadcast_tensors(*(entropy_scale(factor) for factor in policy.factors))).sum(dim=0)
    if isinstance(policy, DiscreteOutput):
        legal = torch.ones_like(policy.probs) if policy.illegal is None else (~policy.illegal).to(policy.probs.dtype)
        return legal.sum(dim=-1, keepdim=True).log()
    if isinstance(policy, MultibinaryOutput):
        return math.log(2.0) * (policy.logits.detach() > NEVER).sum(dim=-1, keepdim=True)  # of a mask of actions
    vector = policy.mode
    return vector.new_full((1,), float(vector.shape[-1]))


def temperature_for(
    spec: ActionSpec, num_gammas: int, target: float | None, coeff: float | None, rate: float
) -> Temperature | None:
    """The temperatures of an agent; None if its options set no entropy.

    Raises:
        ValueError: the actions cannot have an entropy of ``target``.
    """
    if target is None and coeff is None:
        return None
    kinds = {part.kind == "continuous" for part in spec.parts}
    fault = ""
    if target is not None and len(kinds) == 2:
        fault = "are choices and numbers, whose entropies have no common unit: use entropy_coeff, a fixed weight, with entropy_target=None"
    elif target is not None and kinds == {True} and not target < math.log(2.0):
        fault = "are numbers in [-1, 1], with an entropy of at most log 2 = 0.693 nats each: -1 is usual"
    elif target is not None and kinds == {False} and not 0.0 < target < 1.0:
        fault = "are choices, for which it is a share of their largest entropy, between 0 and 1"
    if fault:
        raise ValueError(f"entropy_target={target}: the actions {spec.space} {fault}")
    return Temperature(num_gammas, START if coeff is None else coeff, target, rate)
