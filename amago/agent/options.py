"""Options of actor-critic agents, with their defaults; the discounts trained side by side; the filters of behaviour cloning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gin
import torch
from torch import Tensor, nn

from amago import ops
from amago.agent.entropy import check_entropy_options
from amago.agent.traces import TARGETS
from amago.config import NamedArguments
from amago.nets.actor_critic import Actor, NCritics, NCriticsTwoHot


@gin.configurable(module="amago.agent")
class Multigammas(NamedArguments):
    """Discounts trained beside the main one, for discrete and for other action spaces (arXiv 2310.09971, appendix A).

    Attributes:
        discrete, continuous: as given.
    """

    def __init__(
        self,
        discrete: Sequence[float] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995),
        continuous: Sequence[float] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995),
    ) -> None:
        self.discrete, self.continuous = list(discrete), list(continuous)

    def __iter__(self) -> Iterator[list[float]]:
        return iter((self.discrete, self.continuous))


def gammas_for(kind: str, gamma: float, use_multigamma: bool) -> Tensor:
    """The discounts (G,) of an agent, the main one last.

    Args:
        kind: of the action space, see `amago.spaces.ActionSpec`.
        gamma: the main discount.
        use_multigamma: add those of `Multigammas`.

    Raises:
        ValueError: a discount outside [0, 1).
    """
    discrete, continuous = Multigammas()
    others = (discrete if kind == "discrete" else continuous) if use_multigamma else []
    for g in [*others, gamma]:
        if not 0.0 <= g < 1.0:
            raise ValueError(f"discounts must lie in [0, 1), got gamma={g}")
    return torch.tensor([*others, gamma], dtype=torch.float32)


@gin.configurable(module="amago.agent")
def binary_filter(adv: Tensor, threshold: float = 0.0) -> Tensor:
    """Imitate only actions whose advantage is above ``threshold``."""
    return ops.binary_filter(adv, threshold)


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
    default is that of Kostrikov et al. 2021 (arXiv 2110.06169).
    """
    return ops.exp_filter(clipped(adv, clip_adv_low, clip_adv_high), beta, clip_weights_low, clip_weights_high)


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
    clip_weights_high], plus 1 where the advantage is positive. At an advantage of 0 it is ``target_f0``.

    Args:
        adv: advantages.
        beta: advantages are *divided* by it.
        tau: advantage at which the slope changes.
        neg_slope: slope below ``tau``, relative to that above.
        target_f0: weight at an advantage of 0.
        clip_weights_low, clip_weights_high: bounds of the weight before 1 is added; None: no bound. A negative weight makes the action
            less likely, without a lower bound for continuous policies.
        add_binary: add 1 where the advantage is positive.

    Raises:
        ValueError: ``beta`` is not positive.
    """
    if not beta > 0.0:
        raise ValueError(f"leaky_relu_filter divides advantages by beta, which must be positive, got beta={beta}")
    linear = torch.nn.functional.leaky_relu((adv - tau) / beta, negative_slope=neg_slope)
    weights = clipped(target_f0 + neg_slope * tau / beta + linear, clip_weights_low, clip_weights_high)
    return weights + ops.binary_filter(adv) if add_binary else weights


def clipped(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """``x``, kept in [low, high]; None: no bound."""
    return x if low is None and high is None else x.clamp(low, high)


def check_gamma_idx(name: str, gamma_idx: int, gammas: Tensor) -> None:
    """Raise ValueError, with the argument's name and the discounts, unless ``gamma_idx`` is the index of one of them."""
    if not -len(gammas) <= gamma_idx < len(gammas):
        raise ValueError(f"{name}={gamma_idx} is the index of none of the discounts {[round(g, 6) for g in gammas.tolist()]}")


@dataclass(frozen=True, kw_only=True)
class ActorCriticOptions:
    """Options of an `amago.agent.ActorCriticAgent`; the defaults are those of `amago.agent.Agent`.

    Every field is a keyword argument of the agents and can be bound in gin, as ``amago.agent.Agent.reward_multiplier = 100``.

    Attributes:
        num_critics: C, size of the ensemble.
        num_critics_td: number of critics drawn at random (with replacement) for a target. Their minimum is taken if
            ``online_coeff`` > 0 or with ``expectile``, else their mean (Chen et al. 2021, arXiv 2101.05982).
        critics_td_per_step: draw them for each timestep and discount, instead of once for a batch; all critics are then evaluated.
        online_coeff: weight of the policy-gradient loss -min_C Q(s, a ~ pi).
        offline_coeff: weight of the filtered behaviour cloning loss -f(A) log pi(a | s).
        critic_loss_weight: weight of the critics' loss; that of the actor is 1. `Experiment.critic_loss_weight` replaces it.
        gamma: main discount, the last of the agent's discounts.
        use_multigamma: train the discounts of `Multigammas` too.
        reward_multiplier: scales rewards in the losses, nowhere else.
        tau: share of the online networks that enters the target networks at each update.
        n_step: number of rewards in a TD target with ``targets="n_step"``.
        targets: "n_step", or a target over the whole rest of a sequence (`amago.ops.trace_return`): "retrace" (Munos et al. 2016, arXiv
            1606.02647), for which the experiment must declare ``extra_fields=["behaviour_log_prob"]``; "tree_backup" (Precup et al. 2000),
            for choices and bits; "peng", the uncorrected Q(lambda) of Peng & Williams 1996 (Kozuno et al. 2021, arXiv 2103.00107).
        trace_lambda: lambda of these, in [0, 1]; 0 gives the target with one reward.
        advantage_learning: alpha in [0, 1): targets of every kind gain alpha (Q(s, a) - V(s)) of the target critics (advantage learning, Baird
            1999; Bellemare et al. 2016, arXiv 1512.04860; here V(s) is the mean over actions of the policy, as in targets). Learned
            differences between actions, and with them advantages, are then 1 / (1 - alpha) times as large, while V(s) stays what it is. For
            tasks where one action changes the return by less than the critics' error, such as balance at a high frame rate: 0.9, with
            ``n_step=1``.
        entropy_target: the policy gradient and the targets of values also count the policy's entropy (soft actor-critic, Haarnoja et al. 2018,
            arXiv 1812.05905), with a weight for each discount (the temperature) that keeps the entropy near this target: for choices and
            bits a share of the largest possible entropy, in (0, 1); for numbers in nats for each number of an action, below log 2 = 0.693
            (-1 is usual). None: no target.
        entropy_coeff: the temperature, in units of reward x ``reward_multiplier``. With ``entropy_target`` that of the start (None: 0.1),
            without one it stays as it is (None: no entropy).
        entropy_lr: by how much log(temperature) moves at most with each batch.
        expectile: implicit Q-learning (Kostrikov et al. 2021, arXiv 2110.06169), for data that others have recorded: a network of the state
            alone (`amago.nets.actor_critic.StateValues`) learns this expectile, in (0, 1), of the target critics' values of the actions in
            the data, instead of the mean over actions of the policy. It replaces that mean in TD targets, and in the advantages that
            ``fbc_filter_func`` gets (`exp_filter` in the paper). 0.7 to 0.99; higher combines more of different rollouts, and trusts luck
            more. With ``online_coeff=0`` alone. None: values of the policy's actions.
        burn_in: the first so many transitions of a sequence that begins in the middle of a rollout have no loss, and only build the
            state (Kapturowski et al. 2019, R2D2). Sequences from the beginning of a rollout keep theirs.
        bootstrap_context: where rollouts are longer than ``max_seq_len``, the value of the state after a sequence's last transition is that
            of a state which remembers the last so many observations alone, at most ``max_seq_len``. No other state is at such a place: one
            observation more than any that is trained. Its value then follows from nothing but the network's smoothness, and all
            targets rest on it. About half of ``max_seq_len``. Costs another pass, without a gradient, over so many timesteps. None: the state
            remembers the whole sequence. Sequences shorter than ``max_seq_len`` are not concerned.
        popart: divide the errors of scalar critics, and the objective of the policy gradient, by the running standard deviation
            of the TD targets (`amago.nets.popart.PopArtLayer`). The critics' outputs are not normalised.
        rescale_critics: keep the outputs of the critics' networks near 1 where returns are large or rewards small, by a power of two that
            their outputs are multiplied by. The first batch sets it, and the statistics before any data, to the size of returns if each
            reward were the mean one, or, where that is small, to that of the largest reward: training is then the same as with rewards of another
            size. When the returns outgrow it, it grows, and the last layers are divided by as much, so that values stay the same to the bit (as in
            PopArt, whose paper also shifts them). Without, Adam takes thousands of updates to carry outputs from 0 to returns in the
            hundreds, and loses the differences between actions on the way; returns of a hundredth are less than the noise of the outputs.
            Requires ``popart`` and scalar critics.
        use_target_actor: take the action of a TD target from the target actor instead of the trained one.
        fake_filter: f = 1, plain behaviour cloning.
        fbc_filter_func: f, from advantages (B, L, G, 1) to weights; in `MultiTaskAgent` from (B, L + 1, G, 1), whose last row repeats the one
            before it.
        num_actions_for_value_in_critic_loss: number of actions sampled from the policy for the value in a TD target. Policies
            over one discrete choice need none in `Agent`: their expectation is exact.
        num_actions_for_value_in_actor_loss: the same for the value in the actor's loss.
        actor_type: a subclass of `amago.nets.actor_critic.BaseActorHead`.
        critic_type: a subclass of `amago.nets.actor_critic.BaseCriticHead`.
        pass_obs_keys_to_actor: keys of observations that the actor reads beside the state; None: none. The key of an
            `amago.spaces.ActionMask` is added to them.
        rollout_gamma_idx: index, among the agent's discounts, of the policy that acts in rollouts; -1 is the main discount.

    Raises:
        ValueError: a number is out of range, or both losses are switched off. The message names the option.
    """

    num_critics: int = 4
    num_critics_td: int = 2
    critics_td_per_step: bool = False
    online_coeff: float = 1.0
    offline_coeff: float = 0.1
    critic_loss_weight: float = 10.0
    gamma: float = 0.999
    use_multigamma: bool = True
    reward_multiplier: float = 10.0
    tau: float = 0.003
    n_step: int = 1
    targets: str = "n_step"
    trace_lambda: float = 0.95
    advantage_learning: float = 0.0
    entropy_target: float | None = None
    entropy_coeff: float | None = None
    entropy_lr: float = 0.01
    expectile: float | None = None
    burn_in: int = 0
    bootstrap_context: int | None = None
    popart: bool = True
    rescale_critics: bool = False
    use_target_actor: bool = True
    fake_filter: bool = False
    fbc_filter_func: Callable[[Tensor], Tensor] = binary_filter
    num_actions_for_value_in_critic_loss: int = 1
    num_actions_for_value_in_actor_loss: int = 1
    actor_type: type[nn.Module] = Actor
    critic_type: type[nn.Module] = NCritics
    pass_obs_keys_to_actor: Sequence[str] | None = None
    rollout_gamma_idx: int = -1

    def __post_init__(self) -> None:
        for name in (
            "num_critics", "num_critics_td", "n_step", "num_actions_for_value_in_critic_loss", "num_actions_for_value_in_actor_loss",
        ):  # fmt: skip
            value = getattr(self, name)
            if value < 1 or int(value) != value:
                raise ValueError(f"{name} must be a whole number of at least 1, got {name}={value}")
        if self.targets not in TARGETS:
            raise ValueError(f"targets must be one of {', '.join(map(repr, TARGETS))}, got targets={self.targets!r}")
        if self.targets != "n_step" and self.n_step != 1:
            raise ValueError(
                f"n_step={self.n_step} contradicts targets={self.targets!r}, which counts all rewards: leave n_step at 1"
            )
        if not 0.0 <= self.trace_lambda <= 1.0:
            raise ValueError(f"trace_lambda must lie in [0, 1], got trace_lambda={self.trace_lambda}")
        if not 0.0 <= self.advantage_learning < 1.0:
            raise ValueError(f"advantage_learning must lie in [0, 1), got advantage_learning={self.advantage_learning}")
        if self.burn_in < 0 or int(self.burn_in) != self.burn_in:
            raise ValueError(f"burn_in must be a whole number of at least 0, got burn_in={self.burn_in}")
        context = self.bootstrap_context
        if context is not None and (context < 1 or int(context) != context):
            raise ValueError(
                f"bootstrap_context must be a whole number of at least 1, or None, got bootstrap_context={context}"
            )
        if self.rescale_critics and not self.popart:
            raise ValueError("rescale_critics=True needs the statistics that popart=True keeps, got popart=False")
        if not 0.0 < self.tau <= 1.0:
            raise ValueError(f"tau must lie in (0, 1], got tau={self.tau}")
        if not self.reward_multiplier > 0.0:
            raise ValueError(f"reward_multiplier must be positive, got reward_multiplier={self.reward_multiplier}")
        for name in ("online_coeff", "offline_coeff", "critic_loss_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {name}={getattr(self, name)}")
        if self.online_coeff == self.offline_coeff == 0:
            raise ValueError("online_coeff and offline_coeff are both 0: nothing would train the actor")
        if self.expectile is not None:
            self._check_expectile()
        check_entropy_options(self.entropy_target, self.entropy_coeff, self.entropy_lr, self.online_coeff)

    def _check_expectile(self) -> None:
        given = f"expectile={self.expectile}"
        if not 0.0 < self.expectile < 1.0:  # type: ignore[operator]
            raise ValueError(f"expectile must lie in (0, 1), got {given}")
        if self.online_coeff > 0:
            raise ValueError(
                f"{given} learns values from the actions of the data alone, which contradicts the policy gradient of "
                f"online_coeff={self.online_coeff}: set online_coeff=0 and offline_coeff=1"
            )
        if self.fake_filter:
            raise ValueError(
                f"{given} weighs actions by their advantage, but fake_filter=True imitates them all: leave it at False"
            )
        if self.advantage_learning > 0.0:
            raise ValueError(
                f"{given} contradicts advantage_learning={self.advantage_learning}, which needs values of the policy's actions: leave it at 0"
            )
        if self.targets != "n_step":
            raise ValueError(
                f"{given} contradicts targets={self.targets!r}, which needs values of the policy's actions: leave targets at 'n_step'"
            )


@dataclass(frozen=True, kw_only=True)
class MultiTaskOptions(ActorCriticOptions):
    """The defaults of `amago.agent.MultiTaskAgent`: behaviour cloning alone, three sampled actions, classified returns."""

    online_coeff: float = 0.0
    offline_coeff: float = 1.0
    num_actions_for_value_in_actor_loss: int = 3
    critic_type: type[nn.Module] = NCriticsTwoHot


def with_options(options_type: type[ActorCriticOptions]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of an ``__init__(self, ..., **options)``: its signature then shows the fields of ``options_type``.

    gin, help texts and `inspect.signature` read names and defaults from there.
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(init).parameters.values() if p.kind is not p.VAR_KEYWORD]
        fields = inspect.signature(options_type).parameters.values()
        marked: Any = init
        marked.__signature__ = inspect.Signature([*own, *fields], return_annotation=None)
        return init

    return decorate
