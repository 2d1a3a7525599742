"""The agent for many tasks at once: classified returns and filtered behaviour cloning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import gymnasium as gym
from torch import Tensor, nn

from amago.agent.actor_critic import ActorCriticAgent
from amago.agent.options import binary_filter
from amago.agent.values import TwoHotValues
from amago.nets.actor_critic import Actor, NCriticsTwoHot
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder


@gin.configurable(module="amago.agent")
class MultiTaskAgent(ActorCriticAgent):
    """`Agent` without anything that depends on the scale of returns, for tasks whose rewards differ by orders of magnitude
    (Grigsby et al. 2024, arXiv 2411.11188).

    Critics classify returns instead of regressing them, and the policy imitates the actions of the data that are better than its
    own; the policy gradient is off. Discrete actions reach the critics as one-hots, like continuous ones. Arguments are those of
    `Agent`; these defaults differ:

    Args:
        online_coeff: 0. The loss may be switched on; discrete actions then get their gradient by straight-through Gumbel-softmax.
        offline_coeff: 1.
        num_actions_for_value_in_actor_loss: 3; discrete policies are sampled too.
        critic_type: `NCriticsTwoHot`, whose arguments say which returns (times ``reward_multiplier``) the bins cover.

    Raises:
        ValueError: see `Agent`.
    """

    values_type, exact_expectation = TwoHotValues, False

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
        online_coeff: float = 0.0,
        offline_coeff: float = 1.0,
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
        num_actions_for_value_in_actor_loss: int = 3,
        actor_type: type[nn.Module] = Actor,
        critic_type: type[nn.Module] = NCriticsTwoHot,
        pass_obs_keys_to_actor: Sequence[str] = (),
        rollout_gamma_idx: int = -1,
    ):
        super().__init__(**{k: v for k, v in locals().items() if k not in ("self", "__class__")})
