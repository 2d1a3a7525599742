"""Action masks: the observation that says which actions are legal."""

from __future__ import annotations

from math import prod

import gin
import gymnasium as gym

from amago.spaces.actions import ActionSpec


@gin.configurable(module="amago")
def ActionMask(key: str | None = None) -> str | None:
    """The name of the observation that says which actions are legal. Bind it: ``ActionMask.key = "action_mask"``.

    The observation has A numbers in any shape, one for each number of the action's vector form: nonzero where a choice is
    legal, or where a bit may be 1. Numbers of continuous parts are not read. If no choice of a discrete part is legal (after
    the end of an episode, for example), all count as legal.

    Policies give illegal choices a probability of exactly 0, and exploration does not take them.

    Args:
        key: default: None, all actions are always legal.
    """
    return key


def check_mask(key: str, obs_space: gym.spaces.Dict, spec: ActionSpec) -> None:
    """Refuse an `ActionMask` that does not fit the spaces.

    Raises:
        ValueError: there is no such observation, it does not have A numbers, or all actions are continuous.
    """
    if key not in obs_space.spaces:
        raise ValueError(f"ActionMask.key={key!r} is none of the observations {sorted(obs_space.spaces)}")
    shape = obs_space[key].shape or ()
    if prod(shape) != spec.dim:
        raise ValueError(
            f"ActionMask.key={key!r}: the observation has shape {shape}, but must have {spec.dim} numbers for actions {spec.space}"
        )
    if all(p.kind == "continuous" for p in spec.parts):
        raise ValueError(f"ActionMask.key={key!r}: no part of {spec.space} can be masked; let the environment clip its actions")


def action_mask_key(obs_space: gym.spaces.Dict, spec: ActionSpec) -> str | None:
    """The bound `ActionMask.key`, checked against the spaces; None if none is bound.

    Raises:
        ValueError: as `check_mask`.
    """
    key = ActionMask()
    if key is not None:
        check_mask(key, obs_space, spec)
    return key
