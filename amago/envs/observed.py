"""What an `AMAGOEnv` observes: its environment's observations as a flat dict, and keys that a subclass adds or removes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from numpy.typing import NDArray

from amago.spaces import ObsSpec, changed_spec, obs_spec

Array = NDArray[Any]


class Observations:
    """The flat observation space, which may be changed, and the conversion to it.

    Keys that are assigned to the space (``space["bag"] = Box(...)``) are observed from then on: the environment's observation
    must be a dict that has them. Keys that are deleted are left out.

    Args:
        raw_space: the environment's own space, of one row.
        batched: whether observations have a batch dimension.

    Attributes:
        convert: maps an observation to {key: (B, ...)}.
        real_keys: the keys that can hold NaN or infinity.
        changed: whether keys were added or removed.

    Raises:
        TypeError: a leaf of the space is not supported.
    """

    def __init__(self, raw_space: gym.Space[Any], batched: bool):
        self._batched, self.changed = batched, False
        spec = obs_spec(raw_space, batched, lead=not batched)
        self._space = spec.space
        self._own_keys = {path[0] if path else key for key, (path, _, _) in spec.leaves.items()}
        self._take(spec)

    def _take(self, spec: ObsSpec) -> None:
        self._spec, self._known = spec, dict(spec.space.spaces)
        self.convert, self.real_keys = spec.convert, spec.real_keys

    def space(self) -> gym.spaces.Dict:
        """The space as it is now, its leaves boxes.

        Raises:
            TypeError: a space that was added is not supported.
        """
        if self._space.spaces != self._known:
            wanted = dict(self._space.spaces)
            self._take(changed_spec(self._spec, wanted, self._batched, not self._batched, self._own_keys))
            self._space.spaces.clear()  # in place: a subclass may go on adding keys to the object that it was given
            self._space.spaces.update(self._known)
            self.changed = True
        return self._space

    def replace(self, space: gym.Space[Any]) -> None:
        """Use another space; one that is no Dict becomes ``{"observation": space}``."""
        self._space = gym.spaces.Dict(dict(space.spaces) if isinstance(space, gym.spaces.Dict) else {"observation": space})
