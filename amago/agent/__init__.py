"""Agents: the trained networks and their losses."""

from amago.agent.actor_critic import ActorCriticAgent
from amago.agent.agent import Agent, MultiTaskAgent, get_agent_cls, list_registered_agents, register_agent
from amago.agent.base import BaseAgent, get_action_dim_and_type
from amago.agent.checking import check_traj_encoder, check_tstep_encoder
from amago.agent.options import ActorCriticOptions, Multigammas, MultiTaskOptions, binary_filter, exp_filter, leaky_relu_filter
from amago.agent.values import AgentValues
from amago.compat.names import attributes

__all__ = [
    "ActorCriticAgent", "ActorCriticOptions", "Agent", "AgentValues", "BaseAgent", "MultiTaskAgent", "MultiTaskOptions", "Multigammas", "binary_filter",
    "check_traj_encoder", "check_tstep_encoder", "exp_filter", "get_action_dim_and_type", "get_agent_cls", "leaky_relu_filter",
    "list_registered_agents", "register_agent",
]  # fmt: skip

__getattr__ = attributes(__name__)
