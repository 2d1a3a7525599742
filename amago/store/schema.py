"""The fields that a trajectory file holds, whatever its format, and how they must fit together.

Many trajectories lie one after the other in each array. With n trajectories of T_1..T_n transitions and T their sum:

    ep_offsets (n + 1,)     int64    first transition of each; its first observation is ep_offsets[i] + i
    obs/<key>  (T + n, ...)          T_i + 1 observations of each
    actions    (T, S)                stored form (`amago.spaces.ActionSpec`)
    rews       (T, 1)       float32
    dones      (T, 1)       bool
    start_time (n,)         int64
    prev_reward (n,)        float32
    prev_action (n, S)               dtype of ``actions``
    env_id     (n,)         int32    into the list of environment names in the header
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.trajectory import StoredTraj
from amago.spaces import ActionSpec, action_spec, describe, from_description, stored_width
from amago.store.errors import BadFileError

Array = NDArray[Any]
DType = np.dtype[Any]

FORMAT = "amago.trajectories"
VERSION = 1
OBS = "obs/"

MAX_FILE_BYTES = 1 << 32
"""No file of ours reaches this size; a bigger one is not read at all."""
MAX_TRAJECTORIES = 1 << 20
"""Trajectories in one file, at most."""

MAX_ROW_BYTES = 1 << 28
"""Bytes of one row of one field, at most."""

CODES: dict[str, DType] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}
"""The dtypes that can be stored, by their name in safetensors."""
CODE_OF = {dtype: code for code, dtype in CODES.items()}

_FIXED: dict[str, tuple[DType | None, int]] = {  # dtype (None: the action space says), number of dimensions
    "ep_offsets": (CODES["I64"], 1),
    "actions": (None, 2),
    "rews": (CODES["F32"], 2),
    "dones": (CODES["BOOL"], 2),
    "start_time": (CODES["I64"], 1),
    "prev_reward": (CODES["F32"], 1),
    "prev_action": (None, 2),
    "env_id": (CODES["I32"], 1),
}


class Part(NamedTuple):
    """One field: its name, its dtype, the shape of one row and that row's size in bytes."""

    name: str
    dtype: DType
    row: tuple[int, ...]
    row_bytes: int


@dataclass(frozen=True)
class Schema:
    """What files of one kind of environment have in common; shared between all of them in memory.

    Attributes:
        parts: the fields, sorted by name.
        spaces: ``{"obs": ..., "action": ...}`` as JSON text (`amago.spaces.describe`).
    """

    parts: tuple[Part, ...]
    spaces: str

    @cached_property
    def at(self) -> dict[str, int]:
        """Position of each field in ``parts``."""
        return {p.name: i for i, p in enumerate(self.parts)}

    @cached_property
    def obs(self) -> tuple[tuple[str, int], ...]:
        """(key, position in ``parts``) of each observation field."""
        return tuple((p.name[len(OBS) :], i) for i, p in enumerate(self.parts) if p.name.startswith(OBS))

    @cached_property
    def transitions(self) -> tuple[int, ...]:
        """Position in ``parts`` of dones, rews, actions, prev_reward and prev_action."""
        return tuple(self.at[name] for name in ("dones", "rews", "actions", "prev_reward", "prev_action"))

    @cached_property
    def action_spec(self) -> ActionSpec:
        """How the recorded action space is stored."""
        return action_spec(from_description(json.loads(self.spaces)["action"]))

    @cached_property
    def obs_space(self) -> gym.spaces.Dict:
        """The recorded observation space."""
        space = from_description(json.loads(self.spaces)["obs"])
        if not isinstance(space, gym.spaces.Dict):
            raise BadFileError(f"the recorded observation space is {space}, not a Dict")
        return space


def spaces_text(obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> str:
    """Both spaces as canonical JSON."""
    return json.dumps({"obs": describe(obs_space), "action": describe(action_space)}, separators=(",", ":"), sort_keys=True)


def key_problem(key: str) -> str | None:
    """Why an observation key cannot be stored, or None."""
    if not key or "\0" in key or "\\" in key or len(key) > 1000:
        return "is empty, longer than 1000 characters, or has a NUL or a backslash"
    if key.startswith("/") or any(part in ("..", ".") for part in key.split("/")):
        return "looks like a path outside of the file ('/', '.' or '..')"
    try:
        key.encode("utf-8")
    except UnicodeEncodeError:
        return "is not valid Unicode"
    return None


def pack(trajs: Sequence[StoredTraj]) -> tuple[dict[str, Array], list[str]]:
    """The fields of n >= 1 trajectories of one schema, and the list of environment names that ``env_id`` refers to."""
    first = trajs[0]
    names = list(dict.fromkeys(t.env_name for t in trajs))
    ids = {name: i for i, name in enumerate(names)}
    width, dtype = first.actions.shape[1], first.actions.dtype
    blank = np.zeros(width, dtype)
    lengths = np.array([len(t) for t in trajs], dtype=np.int64)
    fields: dict[str, Array] = {OBS + k: np.concatenate([t.obs[k] for t in trajs]) for k in first.obs}
    fields["ep_offsets"] = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    fields["actions"] = np.concatenate([t.actions for t in trajs])
    fields["rews"] = np.concatenate([t.rews for t in trajs])
    fields["dones"] = np.concatenate([t.dones for t in trajs])
    fields["start_time"] = np.array([t.start_time for t in trajs], dtype=np.int64)
    fields["prev_reward"] = np.array([t.prev_reward for t in trajs], dtype=np.float32)
    fields["prev_action"] = np.stack([blank if t.prev_action is None else t.prev_action.reshape(width) for t in trajs])
    fields["env_id"] = np.array([ids[t.env_name] for t in trajs], dtype=np.int32)
    return {k: np.ascontiguousarray(fields[k]) for k in sorted(fields)}, names


def fit(shapes: Mapping[str, tuple[DType, tuple[int, ...]]]) -> tuple[tuple[Part, ...], int, int]:
    """Check that declared fields are ours and agree with each other.

    Returns:
        The parts (sorted by name), n and T.

    Raises:
        BadFileError: with the first thing that is wrong.
    """
    for name in _FIXED:
        if name not in shapes:
            raise BadFileError(f"field {name!r} is missing")
    n, total = shapes["ep_offsets"][1][0] - 1 if shapes["ep_offsets"][1] else 0, (shapes["actions"][1] or (0,))[0]
    if not (1 <= n <= MAX_TRAJECTORIES and total >= n):
        raise BadFileError(f"{n} trajectories with {total} transitions")
    action_dtype, action_shape = shapes["actions"]
    width = action_shape[1:]
    wanted = {"ep_offsets": (n + 1,), "actions": (total, *width), "rews": (total, 1), "dones": (total, 1)}
    wanted |= {"start_time": (n,), "prev_reward": (n,), "prev_action": (n, *width), "env_id": (n,)}
    for name, (dtype, shape) in shapes.items():
        if name.startswith(OBS):
            if problem := key_problem(name[len(OBS) :]):
                raise BadFileError(f"observation key {name!r} {problem}")
            if not shape or shape[0] != total + n:
                raise BadFileError(f"{name!r} has shape {shape}, but {n} trajectories have {total + n} observations")
        elif name not in _FIXED:
            raise BadFileError(f"unknown field {name!r}")
        elif dtype != (_FIXED[name][0] or action_dtype) or shape != wanted[name] or len(shape) != _FIXED[name][1]:
            raise BadFileError(f"{name!r} is {dtype} {shape}, not {_FIXED[name][0] or action_dtype} {wanted[name]}")
    parts = []
    for name in sorted(shapes):
        dtype, shape = shapes[name]
        row_bytes = dtype.itemsize
        for size in shape[1:]:
            row_bytes *= size
        if row_bytes > MAX_ROW_BYTES:
            raise BadFileError(f"one row of {name!r} would take {row_bytes} bytes; at most {MAX_ROW_BYTES} are allowed")
        parts.append(Part(name, dtype, shape[1:], row_bytes))
    return tuple(parts), n, total


def check_index(ep_offsets: Array, start_time: Array, env_id: Array, total: int, env_names: Any) -> tuple[str, ...]:
    """Check the values that say where things are; returns the environment names.

    Raises:
        BadFileError: offsets that do not increase or do not end at ``total``, negative times, unknown environments.
    """
    if ep_offsets[0] != 0 or ep_offsets[-1] != total or (np.diff(ep_offsets) < 1).any():
        raise BadFileError(f"ep_offsets do not rise from 0 to {total} in steps of at least 1")
    if (start_time < 0).any():
        raise BadFileError("start_time is negative")
    if not isinstance(env_names, list) or not all(isinstance(x, str) for x in env_names):
        raise BadFileError("environment names are not a list of strings")
    if (env_id < 0).any() or (env_id >= len(env_names)).any():
        raise BadFileError(f"env_id points outside of the {len(env_names)} environment names")
    return tuple(env_names)


def check_spaces(text: Any, parts: tuple[Part, ...]) -> str:
    """Check that recorded spaces agree with the fields; returns the text.

    Raises:
        BadFileError: they do not, or they are no spaces.
    """
    schema = Schema(parts, text)
    actions = parts[schema.at["actions"]]
    try:
        described = json.loads(text)
        obs, action = described["obs"], described["action"]
        have = {key: (list(parts[i].row), parts[i].dtype) for key, i in schema.obs}
        want = {key: (list(sub["shape"]), np.dtype(sub["dtype"])) for key, sub in obs["spaces"].items()}
        if obs["kind"] != "Dict" or have != want:
            raise BadFileError(f"observations {have} do not have the recorded shapes and dtypes {want}")
        if stored_width(action) != math.prod(actions.row):  # before anything of a declared shape is allocated
            raise BadFileError(f"actions have rows {actions.row}, but the action space is {str(action)[:200]}")
        spec = schema.action_spec
        if actions.row != (spec.stored_dim,) or actions.dtype != spec.stored_dtype:
            raise BadFileError(f"actions are {actions.dtype} {actions.row}, but the action space is {spec.space}")
        _ = schema.obs_space
    except BadFileError:
        raise
    except Exception as err:  # gymnasium raises many types on nonsense
        raise BadFileError(f"the recorded spaces cannot be read: {err!r:.200}") from err
    return str(text)
