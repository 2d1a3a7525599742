"""The agent for many tasks at once: classified returns and filtered behaviour cloning."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym

from amago.agent.actor_critic import ActorCriticAgent
from amago.agent.options import MultiTaskOptions, with_options
from amago.agent.values import TwoHotValues
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder


@gin.configurable(module="amago.agent")
class MultiTaskAgent(ActorCriticAgent):
    """An agent whose losses do not depend on the scale of returns, for tasks whose rewards differ by orders of magnitude
    (Grigsby et al. 2024, arXiv 2411.11188).

    Critics classify returns instead of regressing them, and the policy imitates the actions of the data whose value exceeds
    that of its own; the policy gradient is off. Discrete actions reach the critics as one-hot samples, as continuous ones do.

    Args:
        obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type: see `BaseAgent`.
        options: fields of `amago.agent.options.MultiTaskOptions`. Four defaults differ from those of `Agent`: ``online_coeff``
            0 (if it is positive, discrete actions get their gradient by straight-through Gumbel-softmax), ``offline_coeff`` 1,
            ``num_actions_for_value_in_actor_loss`` 3, and ``critic_type`` `amago.nets.actor_critic.NCriticsTwoHot`, whose
            arguments set the range of returns (times ``reward_multiplier``) that the bins cover.

    Raises:
        TypeError, ValueError: see `Agent`.
    """

    values_type, exact_expectation, filters_last_observation = TwoHotValues, False, True

    @with_options(MultiTaskOptions)
    def __init__(
        self,
        obs_space: gym.spaces.Dict,
        rl2_space: gym.spaces.Box,
        action_space: gym.Space[Any],
        max_seq_len: int,
        tstep_encoder_type: type[TstepEncoder],
        traj_encoder_type: type[TrajEncoder],
        **options: Any,
    ):
        chosen = MultiTaskOptions(**options)
        super().__init__(obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type, chosen)
