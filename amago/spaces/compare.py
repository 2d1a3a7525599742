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


def space_differences(first: Spaces, second: Spaces, *, dtypes: bool = True) -> list[SpaceDifference]:
    """The differences between two pairs of spaces that an agent would notice.

    Observations are compared by key, shape and dtype, actions by the kinds and widths of their parts. Bounds are not compared.

    Args:
        first, second: (observation space, action space).
        dtypes: False: do not compare the dtypes of observations.

    Returns:
        The differences, sorted by name; none if the spaces agree.
    """
    a, b = _described(*first, dtypes), _described(*second, dtypes)
    names = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    return [SpaceDifference(name, a.get(name, "missing"), b.get(name, "missing")) for name in names]


def _described(obs_space: gym.spaces.Dict, action_space: gym.Space[Any], dtypes: bool) -> dict[str, str]:
    """{"observation KEY" or "actions": a text that is the same if the spaces agree}."""
    spec = action_spec(action_space)
    observations = {
        f"observation {key!r}": f"{space.dtype} {space.shape}" if dtypes else f"{space.shape}"
        for key, space in obs_space.spaces.items()
    }
    return observations | {"actions": f"{spec.kind} of width {spec.dim}"}
