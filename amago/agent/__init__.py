"""Agents: everything that is trained, and the losses that train it."""

from amago.agent.actor_critic import ActorCriticAgent
from amago.agent.agent import Agent
from amago.agent.base import AgentLoss, AgentValues, BaseAgent
from amago.agent.multitask import MultiTaskAgent
from amago.agent.options import Multigammas, binary_filter, exp_filter, leaky_relu_filter

__all__ = [
    "ActorCriticAgent", "Agent", "AgentLoss", "AgentValues", "BaseAgent", "MultiTaskAgent", "Multigammas", "binary_filter",
    "exp_filter", "leaky_relu_filter",
]  # fmt: skip
