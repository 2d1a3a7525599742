"""The default agent: scalar critics with PopArt, a policy gradient, and some filtered behaviour cloning."""

from __future__ import annotations

from typing import Any

import gin
import gymnasium as gym

from amago.agent.actor_critic import ActorCriticAgent
from amago.agent.options import ActorCriticOptions, with_options
from amago.agent.values import PopArtValues
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder


@gin.configurable(module="amago.agent")
class Agent(ActorCriticAgent):
    """Actor and critic ensemble on a shared sequence model, trained for several discounts at once.

    Critics output a scalar for each discount. Discrete actions: they output the value of every action, and the policy's
    probabilities weigh these, so that the expectation over actions is exact.

    Args:
        obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type: see `BaseAgent`.
        options: fields of `amago.agent.options.ActorCriticOptions`, where names, defaults and meanings are.

    Raises:
        TypeError: an unknown option.
        ValueError: an option is out of range, both losses are switched off, or a policy gradient is asked of a distribution
            without reparametrised samples.
    """

    values_type, exact_expectation = PopArtValues, True

    @with_options(ActorCriticOptions)
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
        chosen = ActorCriticOptions(**options)
        super().__init__(obs_space, rl2_space, action_space, max_seq_len, tstep_encoder_type, traj_encoder_type, chosen)
