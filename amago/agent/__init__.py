"""Agents: everything that is trained, and the losses that train it."""

from amago.agent.agent import Agent
from amago.agent.base import AgentLoss, BaseAgent
from amago.agent.options import Multigammas, binary_filter, exp_filter

__all__ = ["Agent", "AgentLoss", "BaseAgent", "Multigammas", "binary_filter", "exp_filter"]
