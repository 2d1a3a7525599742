"""Choosing which of an agent's discounts acts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amago.agent import BaseAgent


def discounts(agent: BaseAgent) -> tuple[float, ...]:
    """The discounts that an agent has a policy for, in its order; () for an agent without an attribute ``gammas``."""
    gammas = getattr(agent, "gammas", None)
    return () if gammas is None else tuple(round(float(g), 6) for g in gammas)


def choose_discount(agent: BaseAgent, gamma: float) -> None:
    """Let the policy of one of the agent's discounts act from now on.

    Raises:
        ValueError: the agent has no such discount; the message lists those that it has.
    """
    known = discounts(agent)
    near = [i for i, g in enumerate(known) if abs(g - gamma) < 1e-6]
    if not near:
        raise ValueError(
            f"gamma={gamma} is none of the discounts of the {type(agent).__name__}: {', '.join(map(str, known)) or 'none'}"
        )
    agent.rollout_gamma_idx = near[-1]  # type: ignore[assignment]


@contextmanager
def acting_by(agent: BaseAgent, gamma: float | None) -> Iterator[None]:
    """Let the policy of another discount act within the block.

    Args:
        gamma: one of the agent's discounts; None changes nothing.

    Raises:
        ValueError: the agent has no such discount.
    """
    if gamma is None:
        yield
        return
    before: Any = getattr(agent, "rollout_gamma_idx", None)
    choose_discount(agent, gamma)
    try:
        yield
    finally:
        agent.rollout_gamma_idx = before
