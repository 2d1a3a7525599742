"""The default agent: scalar critics with PopArt, a policy gradient, and some filtered behaviour cloning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import gymnasium as gym
from torch import Tensor, nn

from amago.agent.actor_critic import ActorCriticAgent
from amago.agent.options import binary_filter
from amago.agent.values import PopArtValues
from amago.nets.actor_critic import Actor, NCritics
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder


@gin.configurable(module="amago.agent")
class Agent(ActorCriticAgent):
    """Actor and critic ensemble on a shared sequence model, trained for several discounts at once.

    Args:
        obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type: see `BaseAgent`.
        num_critics: C, size of the ensemble.
        num_critics_td: critics drawn at random (with replacement) for a target; their min is taken if ``online_coeff`` > 0,
            else their mean (Chen et al. 2021, arXiv 2101.05982).
        online_coeff: weight of the policy-gradient loss -min_C Q(s, a ~ pi).
        offline_coeff: weight of the filtered behaviour cloning loss -f(A) log pi(a | s).
        gamma: main discount; the last of the agent's discounts.
        use_multigamma: train those of `Multigammas` too.
        reward_multiplier: scales rewards in losses, nowhere else.
        tau: rate of the target networks.
        n_step: rewards in a TD target.
        popart: normalise returns.
        use_target_actor: take the action of a target from a slow copy of the actor.
        fake_filter: f = 1, plain behaviour cloning.
        fbc_filter_func: f, from advantages (B, L, G, 1) to weights.
        num_actions_for_value_in_critic_loss, num_actions_for_value_in_actor_loss: samples of the policy that stand for its
            expectation; policies over one discrete choice need none, theirs is exact.
        actor_type, critic_type: classes of `amago.nets.actor_critic`.
        pass_obs_keys_to_actor: observations handed to the actor beside the state. An `amago.spaces.ActionMask` is, without being named.
        rollout_gamma_idx: index of the discount by which the agent acts, in `Multigammas` followed by the main one (-1).

    Raises:
        ValueError: an argument out of range, both losses switched off, or a policy gradient asked of a distribution that has none.
    """

    values_type, exact_expectation = PopArtValues, True

    def __init__(
        self,
        obs_space: gym.spaces.Dict,
        rl2_space: gym.spaces.Box,
        action_space: gym.Space[Any],
        max_seq_len: int,
        tstep_encoder_type: type[TstepEncoder],
        traj_encoder_type: type[TrajEncoder],
        num_critics: int = 4,
        num_critics_td: int = 2,
        online_coeff: float = 1.0,
        offline_coeff: float = 0.1,
        gamma: float = 0.999,
        use_multigamma: bool = True,
        reward_multiplier: float = 10.0,
        tau: float = 0.003,
        n_step: int = 1,
        popart: bool = True,
        use_target_actor: bool = True,
        fake_filter: bool = False,
        fbc_filter_func: Callable[[Tensor], Tensor] = binary_filter,
        num_actions_for_value_in_critic_loss: int = 1,
        num_actions_for_value_in_actor_loss: int = 1,
        actor_type: type[nn.Module] = Actor,
        critic_type: type[nn.Module] = NCritics,
        pass_obs_keys_to_actor: Sequence[str] = (),
        rollout_gamma_idx: int = -1,
    ):
        super().__init__(**{k: v for k, v in locals().items() if k not in ("self", "__class__")})
