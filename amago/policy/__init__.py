"""A trained agent away from its run: load it, let it act, export it."""

from amago.policy.acting import Policy, acting_by, choose_discount, discounts
from amago.policy.load import find_run, load_agent_weights, load_policy
from amago.policy.spec import build_agent, describe_agent, write_policy_spec

__all__ = [
    "Policy", "acting_by", "build_agent", "choose_discount", "describe_agent", "discounts", "find_run", "load_agent_weights",
    "load_policy", "write_policy_spec",
]  # fmt: skip
