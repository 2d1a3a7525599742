"""A trained agent away from its run: load it, let it act, export it."""

from amago.policy.load import (
    Policy,
    acting_by,
    build_agent,
    choose_discount,
    discounts,
    find_run,
    load_agent_weights,
    load_policy,
    write_policy_spec,
)

__all__ = [
    "Policy", "acting_by", "build_agent", "choose_discount", "discounts", "find_run", "load_agent_weights", "load_policy",
    "write_policy_spec",
]  # fmt: skip
