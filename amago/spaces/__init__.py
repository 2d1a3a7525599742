"""Spaces: observations as flat dicts of boxes, actions as one vector, and descriptions of both on disk (numpy only)."""

from amago.spaces.actions import (
    ActionMask,
    ActionPart,
    ActionSpec,
    NonFiniteError,
    action_mask_key,
    action_spec,
    all_finite,
    check_mask,
    parts_of,
    rl2_space,
    stored_dtype_of,
)
from amago.spaces.descriptions import SpaceDifference, describe, from_description, same_range, space_differences
from amago.spaces.observations import ObsReader, ObsSpec, changed_spec, converts_to, key_problem, obs_spec, spaces_of

__all__ = [
    "ActionMask", "ActionPart", "ActionSpec", "NonFiniteError", "ObsReader", "ObsSpec", "SpaceDifference", "action_mask_key", "action_spec",
    "all_finite", "changed_spec", "check_mask", "converts_to", "describe", "from_description", "key_problem", "obs_spec", "parts_of", "rl2_space", "same_range", "space_differences", "spaces_of",
    "stored_dtype_of",
]  # fmt: skip
