"""Names of the agents, for command lines and `amago.cli_utils.switch_agent`."""

from __future__ import annotations

from amago.agent.agent import Agent
from amago.agent.base import BaseAgent
from amago.agent.multitask import MultiTaskAgent
from amago.registry import Registry

AGENTS: Registry[type[BaseAgent]] = Registry("agent")
"""The agent of each name."""

register_agent = AGENTS.register
get_agent_cls = AGENTS.find
list_registered_agents = AGENTS.names

register_agent("agent")(Agent)
register_agent("multitask")(MultiTaskAgent)
