"""Spaces: observations as flat dicts of boxes, actions as one vector, and descriptions of both on disk (numpy only)."""

from amago.spaces.actions import (
    ActionMask,
    ActionPart,
    ActionSpec,
    NonFiniteError,
    action_spec,
    all_finite,
    check_mask,
    parts_of,
    rl2_space,
    stored_dtype_of,
)
from amago.spaces.descriptions import describe, from_description, stored_width
from amago.spaces.observations import ObsSpec, obs_spec

__all__ = [
    "ActionMask", "ActionPart", "ActionSpec", "NonFiniteError", "ObsSpec", "action_spec", "all_finite", "check_mask", "describe",
    "from_description", "obs_spec", "parts_of", "rl2_space", "stored_dtype_of", "stored_width",
]  # fmt: skip
