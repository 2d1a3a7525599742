"""The differences between the spaces of two environments, policies or recordings."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym

from amago.spaces.actions import action_spec

Spaces = tuple[gym.spaces.Dict, gym.Space[Any]]
"""An observation space, flat, and an action space."""


class SpaceDifference(NamedTuple):
    """An observation, or the actions, that two pairs of spaces do not share.

    Attributes:
        name: "observation 'KEY'" or "actions".
        first, second: what each pair of spaces has, in words; "missing" if it has no such observation.
    """

    name: str
    first: str
    second: str


def space_differences(first: Spaces, second: Spaces, *, dtypes: bool = True, bounds: bool = False) -> list[SpaceDifference]:
    """What differs between two pairs of observation and action space.

    Observations are compared by key and shape, actions by the kinds and widths of their parts.

    Args:
        first, second: (observation space, action space).
        dtypes: also compare the dtypes of observations.
        bounds: compare everything, including the bounds of boxes and the first values of discrete spaces.

    Returns:
        The differences, sorted by name; none if the spaces agree.
    """
    a, b = (_described(*spaces, dtypes, bounds) for spaces in (first, second))
    names = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    return [SpaceDifference(name, str(a.get(name, "missing")), str(b.get(name, "missing"))) for name in names]


def _described(obs_space: gym.spaces.Dict, action_space: gym.Space[Any], dtypes: bool, bounds: bool) -> dict[str, Any]:
    """{observation or "actions": a description that agrees where the spaces do, or with ``bounds`` the space itself}."""
    named = {f"observation {key!r}": space for key, space in obs_space.spaces.items()}
    if bounds:
        return named | {"actions": action_space}
    spec = action_spec(action_space)
    observations = {name: f"{s.dtype} {s.shape}" if dtypes else f"{s.shape}" for name, s in named.items()}
    return observations | {"actions": f"{spec.kind} of width {spec.dim}"}
