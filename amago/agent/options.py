"""Options of actor-critic agents, with their defaults; the discounts trained side by side; the filters of behaviour cloning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import gin
import torch
from torch import Tensor, nn

from amago.fields import Check, declare, faults, number, one_of, optional, whole, within
from amago.nets.actor_critic import Actor, NCritics, NCriticsTwoHot


@gin.configurable(module="amago.agent")
class Multigammas:
    """Discounts trained beside the main one, for discrete and for other action spaces (arXiv 2310.09971, appendix A)."""

    def __init__(
        self,
        discrete: Sequence[float] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995),
        continuous: Sequence[float] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995),
    ) -> None:
        self.discrete, self.continuous = list(discrete), list(continuous)

    def __iter__(self) -> Iterator[list[float]]:
        return iter((self.discrete, self.continuous))


def gammas_for(kind: str, gamma: float, use_multigamma: bool) -> Tensor:
    """The discounts (G,) of an agent, in [0, 1]: first the discounts of `Multigammas` for the ``kind`` of action space, then
    ``gamma``; 1 is for tasks whose rollouts terminate."""
    discrete, continuous = Multigammas()
    others = (discrete if kind == "discrete" else continuous) if use_multigamma else []
    for g in [*others, gamma]:
        if not 0.0 <= g <= 1.0:
            raise ValueError(f"discounts must lie in [0, 1], got gamma={g}")
    return torch.tensor([*others, gamma], dtype=torch.float32)


@gin.configurable(module="amago.agent")
def binary_filter(adv: Tensor, threshold: float = 0.0) -> Tensor:
    """Imitate only actions whose advantage is above ``threshold``."""
    return (adv > threshold).to(adv.dtype)


@gin.configurable(module="amago.agent")
def exp_filter(
    adv: Tensor,
    beta: float = 1.0,
    clip_adv_low: float | None = None,
    clip_adv_high: float | None = None,
    clip_weights_low: float | None = 1e-7,
    clip_weights_high: float | None = 100.0,
) -> Tensor:
    """Imitate with weight exp(beta x advantage).

    Advantages are kept in [clip_adv_low, clip_adv_high], and weights in [clip_weights_low, clip_weights_high]; None: no bound.

    Without an upper bound one action outweighs a batch, and the weight overflows where beta x advantage exceeds 88.7. The
    default is from Kostrikov et al. 2021 (arXiv 2110.06169).
    """
    return clipped(torch.exp(beta * clipped(adv, clip_adv_low, clip_adv_high)), clip_weights_low, clip_weights_high)


@gin.configurable(module="amago.agent")
def leaky_relu_filter(
    adv: Tensor,
    beta: float = 2.0,
    tau: float = 1e-2,
    neg_slope: float = 0.05,
    target_f0: float = 1e-2,
    clip_weights_low: float | None = 1e-7,
    clip_weights_high: float | None = 10.0,
    add_binary: bool = True,
) -> Tensor:
    """Imitate with a weight that rises in proportion to the advantage.

    The weight is target_f0 + neg_slope tau / beta + leaky_relu((advantage - tau) / beta), kept in [clip_weights_low,
    clip_weights_high] (None: no bound), plus 1 where the advantage is positive (``add_binary``). At an advantage of 0 it is
    ``target_f0``. A negative weight makes the action less likely, without a lower bound for continuous policies.
    """
    if not beta > 0.0:
        raise ValueError(f"leaky_relu_filter divides advantages by beta, which must be positive, got beta={beta}")
    linear = torch.nn.functional.leaky_relu((adv - tau) / beta, negative_slope=neg_slope)
    weights = clipped(target_f0 + neg_slope * tau / beta + linear, clip_weights_low, clip_weights_high)
    return weights + (adv > 0.0).to(adv.dtype) if add_binary else weights


def clipped(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """``x``, kept in [low, high]; None: no bound."""
    return x if low is None and high is None else x.clamp(low, high)


def check_gamma_idx(name: str, gamma_idx: int, gammas: Tensor) -> None:
    """Raise ValueError, with the argument's name and the discounts, unless ``gamma_idx`` is the index of one of them."""
    if not -len(gammas) <= gamma_idx < len(gammas):
        raise ValueError(f"{name}={gamma_idx} is the index of none of the discounts {[round(g, 6) for g in gammas.tolist()]}")


_RATE = number(above=0, finite=True)


def option(default: object, check: Check | None = None, networks: bool = False) -> Any:
    """An option. With ``networks`` it determines the networks or the meaning of their outputs: a run cannot resume with another value."""
    return declare(default, check, networks=networks)


@dataclass(frozen=True, kw_only=True)
class ActorCriticOptions:
    """Options of an `amago.agent.ActorCriticAgent`, with the defaults of `amago.agent.Agent`.

    Every field is a keyword argument of the agents and can be bound in gin, as ``amago.agent.Agent.reward_multiplier = 100``.

    Attributes:
        num_critics: C, size of the ensemble.
        num_critics_td: number of critics drawn at random (with replacement) for a target. Their minimum is taken if
            ``online_coeff`` > 0, else their mean (Chen et al. 2021, arXiv 2101.05982).
        online_coeff: weight of the policy-gradient loss -min_C Q(s, a ~ pi).
        offline_coeff: weight of the filtered behaviour cloning loss -f(A) log pi(a | s).
        critic_loss_weight: weight of the critics' loss; the actor's is 1. `Experiment.critic_loss_weight` replaces it.
        gamma: main discount, the last of the agent's discounts.
        use_multigamma: train the discounts of `Multigammas` too.
        reward_multiplier: scales rewards in the losses, nowhere else.
        tau: share of the online networks that enters the target networks at each update.
        n_step: number of rewards in a TD target with ``targets="n_step"``.
        targets: "n_step", or a target over the whole rest of a sequence (`amago.ops.trace_return`), for choices and bits:
            "tree_backup" (Precup et al. 2000).
        trace_lambda: its lambda, in [0, 1]; 0 gives the target with one reward.
        entropy_target: the policy gradient and the targets of values also count the policy's entropy (soft actor-critic,
            Haarnoja et al. 2018, arXiv 1812.05905), with a weight for each discount (the temperature) that keeps the entropy
            near this target: for choices and bits a share of the largest possible entropy, in (0, 1); for numbers in nats for
            each number of an action, below log 2 = 0.693 (-1 is usual). None: no target.
        entropy_coeff: the temperature, in units of reward x ``reward_multiplier``. With ``entropy_target`` it is the start
            value (None: 0.1), without one it stays as it is (None: no entropy).
        entropy_lr: largest change of log(temperature) with each batch.
        burn_in: number of first transitions without a loss, which only build the state (Kapturowski et al. 2019, R2D2), in a
            sequence that begins in the middle of a rollout. In sequences from the beginning of a rollout all have a loss.
        bootstrap_context: number of observations, at most ``max_seq_len``, that the state after a sequence's last transition
            remembers for its value, where rollouts are longer than ``max_seq_len``. About half of ``max_seq_len`` is good.
            Otherwise that state remembers one observation more than any state with a loss. Costs another pass, without a
            gradient, over that number of timesteps. None: the state remembers the whole sequence, as in shorter sequences.
        popart: divide the errors of scalar critics, and the objective of the policy gradient, by the running standard deviation
            of the TD targets (`amago.nets.actor_critic.PopArtLayer`). The critics' outputs are not normalised.
        rescale_critics: keep the outputs of the critics' networks near 1 where returns are large or rewards small, by a power
            of two that their outputs are multiplied by. The first batch sets it, and the statistics before any data, to the
            size of returns if each reward were the mean one, or, where that is small, to the size of the largest reward. When
            the returns outgrow it, it grows, and the last layers are divided by as much, so that values stay the same to the
            bit. Requires ``popart`` and scalar critics.
        use_target_actor: take the action of a TD target from the target actor instead of the trained one.
        fake_filter: f = 1, plain behaviour cloning.
        fbc_filter_func: f, from advantages (B, L, G, 1) to weights; in `MultiTaskAgent` from (B, L + 1, G, 1), whose last row
            repeats the one before it. If not given, `exp_filter` in a run for which nothing was collected
            (`BaseAgent.learn_from_records`): a binary filter of small advantages, which are noise, collapses the policy.
        num_actions_for_value_in_critic_loss: number of actions sampled from the policy for the value in a TD target. Policies
            over one discrete choice need none in `Agent`: their expectation is exact.
        num_actions_for_value_in_actor_loss: the same for the value in the actor's loss.
        actor_type: a subclass of `amago.nets.actor_critic.BaseActorHead`.
        critic_type: a subclass of `amago.nets.actor_critic.BaseCriticHead`.
        pass_obs_keys_to_actor: keys of observations that the actor reads beside the state; None: none. The key of an
            `amago.spaces.ActionMask` is added to them.
        rollout_gamma_idx: index, among the agent's discounts, of the policy that acts in rollouts; -1 is the main discount.

    Raises:
        ValueError: a number is out of range, or options contradict each other. The message names them.
    """

    num_critics: int = option(4, whole(1), networks=True)
    num_critics_td: int = option(2, whole(1))
    online_coeff: float = option(1.0, number(0))
    offline_coeff: float = option(0.1, number(0))
    critic_loss_weight: float = option(10.0, number(0))
    gamma: float = option(0.999, networks=True)
    use_multigamma: bool = option(True, networks=True)
    reward_multiplier: float = option(10.0, _RATE)
    tau: float = option(0.003, within("(0, 1]", lambda x: 0.0 < x <= 1.0))
    n_step: int = option(1, whole(1))
    targets: str = option("n_step", one_of("n_step", "tree_backup"))
    trace_lambda: float = option(0.95, within("[0, 1]", lambda x: 0.0 <= x <= 1.0))
    entropy_target: float | None = option(None, optional(number(finite=True)))
    entropy_coeff: float | None = option(None, optional(_RATE))
    entropy_lr: float = option(0.01, _RATE)
    burn_in: int = option(0, whole(0))
    bootstrap_context: int | None = option(None, optional(whole(1)))
    popart: bool = option(True, networks=True)
    rescale_critics: bool = option(False, networks=True)
    use_target_actor: bool = True
    fake_filter: bool = False
    fbc_filter_func: Callable[[Tensor], Tensor] = binary_filter
    num_actions_for_value_in_critic_loss: int = option(1, whole(1))
    num_actions_for_value_in_actor_loss: int = option(1, whole(1))
    actor_type: type[nn.Module] = option(Actor, networks=True)  # noqa: RUF009
    critic_type: type[nn.Module] = option(NCritics, networks=True)  # noqa: RUF009
    pass_obs_keys_to_actor: Sequence[str] | None = option(None, networks=True)
    rollout_gamma_idx: int = -1

    def __post_init__(self) -> None:
        for name, fault in faults(self):
            raise ValueError(f"{name}={vars(self)[name]!r}: {fault}")
        traces, entropy = self.targets != "n_step", self.entropy_target is not None or self.entropy_coeff is not None
        for contradiction, why in (
            (traces and self.n_step != 1, f"targets={self.targets!r} counts all rewards: leave n_step={self.n_step} at 1"),
            (self.rescale_critics and not self.popart, "rescale_critics=True needs the statistics of popart=True, not popart=False"),
            (self.online_coeff == self.offline_coeff == 0, "online_coeff and offline_coeff are both 0: nothing would train the actor"),
            (entropy and self.online_coeff == 0, f"entropy_target={self.entropy_target}, entropy_coeff={self.entropy_coeff}: the entropy is part "
             "of what the policy gradient maximises, which online_coeff=0 switches off"),
        ):  # fmt: skip
            if contradiction:
                raise ValueError(why)


@dataclass(frozen=True, kw_only=True)
class MultiTaskOptions(ActorCriticOptions):
    """The defaults of `amago.agent.MultiTaskAgent`: behaviour cloning alone, three sampled actions, classified returns."""

    online_coeff: float = option(0.0, number(0))
    offline_coeff: float = option(1.0, number(0))
    num_actions_for_value_in_actor_loss: int = option(3, whole(1))
    critic_type: type[nn.Module] = NCriticsTwoHot


def changeable_options() -> list[str]:
    """The options that may have another value when a run resumes."""
    return [f.name for f in fields(ActorCriticOptions) if not f.metadata.get("networks")]
