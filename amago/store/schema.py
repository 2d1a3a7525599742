"""The fields of a trajectory file, whatever its format, and the checks that they fit together.

The fields are `amago.data.trajectory.FIELDS`, declared extra fields, and the file's own index. Each array holds many
trajectories, one after the other. With n trajectories of T_1..T_n transitions and T their sum:

    ep_offsets (n + 1,)     int64    first transition of each; its first observation is ep_offsets[i] + i
    obs/<key>  (T + n, ...)          T_i + 1 observations of each
    actions    (T, S)                stored form (`amago.spaces.ActionSpec`)
    rews       (T, 1)       float32
    dones      (T, 1)       bool
    start_time (n,)         int64
    prev_reward (n,)        float32
    prev_action (n, S)               dtype of ``actions``
    env_id     (n,)         int32    into the list of environment names in the header
    extra/<name> (T + n, ...), (T, ...) or (n, ...)  by the field's rows ("T+1", "T" or "1"), which the recorded spaces hold
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField, trajectory_fields
from amago.data.trajectory import FIELDS, OBS, Field, pad_value, rows_in
from amago.spaces import ActionSpec, action_spec, describe, from_description, key_problem
from amago.store.files import BadFileError

Array = NDArray[Any]
DType = np.dtype[Any]

FORMAT = "amago.trajectories"
VERSION = 1

_NAMES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "U32": "<u4", "I32": "<i4", "F32": "<f4",
    "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
CODES: dict[str, DType] = {code: np.dtype(name) for code, name in _NAMES.items()}
"""The dtypes that can be stored, by their name in safetensors."""
CODE_OF = {dtype: code for code, dtype in CODES.items()}

INDEX = ("ep_offsets", "start_time", "env_id")
"""The fields that locate trajectories in a file."""
_OFFSETS = "n+1"
_OWN = (Field("ep_offsets", _OFFSETS, "index", CODES["I64"], ()), Field("env_id", "1", "index", CODES["I32"], ()))


class Slot(NamedTuple):
    """A field of which slices are read.

    Attributes:
        group, key: "obs" or "extras" and the key in it; else "" and the field's name.
        part: position in `Schema.names`; -1 where the files lack the field, whose rows then are its default.
        before: position of the field that holds the row before a trajectory's first (then slices have that row, too); or -1.
        row_bytes: size of one row.
        pad: value of padding in a batch (`amago.data.trajectory.pad_value`); 0 in extra fields, and in actions, which are
            padded when they are vectors.
    """

    group: str
    key: str
    field: Field
    part: int
    before: int
    row_bytes: int
    pad: object

    def take(self, steps: int) -> int:
        """Rows of a slice of so many transitions."""
        rows = self.field.rows
        return 1 if rows == "1" else steps + (rows == "T+1" or self.before >= 0)


@dataclass(frozen=True)
class Schema:
    """The fields and spaces that files of one kind of environment have in common; all of them share it in memory.

    Attributes:
        names: of the fields, sorted.
        spaces: ``{"obs": ..., "action": ...}`` as JSON text (`amago.spaces.describe`), and ``"extras"`` if there are any.
        obs_space, action_spec, extras: the observations, actions and declared extra fields that the text describes.
        fields: by name, with dtype and shape of a row.
    """

    names: tuple[str, ...]
    spaces: str
    obs_space: gym.spaces.Dict = field(compare=False)
    action_spec: ActionSpec = field(compare=False)
    extras: tuple[ExtraField, ...] = field(compare=False)
    fields: dict[str, Field] = field(compare=False)
    _slots: dict[object, tuple[Slot, ...]] = field(default_factory=dict, compare=False, repr=False)

    def fit(self, shapes: Mapping[str, Any]) -> tuple[int, int]:
        """The trajectories n and transitions T of a file with fields of these shapes and dtypes.

        Raises:
            BadFileError: a field has another dtype or number of rows than the spaces and the other fields ask for.
        """
        n, total = ((shapes[name].shape or (0,))[0] for name in ("ep_offsets", "actions"))
        n -= 1
        if not 1 <= n <= total:
            raise BadFileError(f"{n} trajectories with {total} transitions")
        for name, x in self.fields.items():
            right = (n + 1 if x.rows == _OFFSETS else rows_in(x.rows, n, total), *x.shape)
            have = shapes[name]
            if (have.dtype, have.shape) != (x.dtype, right):
                raise BadFileError(f"{name!r} is {have.dtype} {have.shape}, but the recorded spaces ask for {x.dtype} {right}")
        return n, total

    def slots(self, keys: Iterable[str] | None = None, extras: Iterable[ExtraField] | None = None) -> tuple[Slot, ...]:
        """The fields to read for a slice, in the order of their names in files.

        Args:
            keys: observations wanted; None means all.
            extras: extra fields wanted; those that the files lack get their default. None means all that the files hold.

        Raises:
            KeyError: an unknown observation.
            ValueError: an extra field was recorded with other rows, shape or dtype.
        """
        asked = None if keys is None else tuple(keys), None if extras is None else tuple(extras)
        if asked not in self._slots:
            wanted = [self.fields[x.name] for x in FIELDS if x.rows == "T"]
            for key in self.obs_space if asked[0] is None else asked[0]:
                if OBS + key not in self.fields:
                    raise KeyError(f"no observation {key!r}; there are {list(self.obs_space)}")
                wanted.append(self.fields[OBS + key])
            wanted += [x.field for x in (self.extras if asked[1] is None else asked[1])]
            self._slots[asked] = tuple(self._slot(x) for x in sorted(wanted, key=lambda x: x.name))
        return self._slots[asked]

    def _slot(self, x: Field) -> Slot:
        there = self.fields.get(x.name, x)
        if (there.rows, there.shape, there.dtype) != (x.rows, x.shape, x.dtype):
            raise ValueError(
                f"extra field {x.key!r} was recorded with rows {there.rows!r}, shape {there.shape} and dtype {there.dtype}, "
                f"but is declared with rows {x.rows!r}, shape {x.shape} and dtype {x.dtype}; declare it as recorded, or rename it"
            )
        part, before = (self.names.index(name) if name in self.fields else -1 for name in (x.name, x.before or ""))
        box = self.obs_space.spaces.get(x.key) if x.role == "obs" else None
        bounds = (box.low, box.high) if isinstance(box, gym.spaces.Box) else ()
        pad = 0 if x.role in ("extra", "action") else pad_value(x.dtype, *bounds)
        group = {"obs": "obs", "extra": "extras"}.get(x.role, "")
        return Slot(group, x.key, x, part, before, x.dtype.itemsize * math.prod(x.shape), pad)


def schema_of(spaces: object, names: Iterable[str] | None = None) -> Schema:
    """The schema of files with these recorded spaces; one object for all that are equal.

    Args:
        names: fields that the files have; default: all.

    Raises:
        BadFileError: no spaces, or a field is missing or unknown.
    """
    if not isinstance(spaces, str):
        raise BadFileError("the recorded spaces cannot be read: they are no text")
    return _schema(spaces, frozenset(_schema(spaces, None).names if names is None else names))


@functools.cache
def _schema(spaces: str, names: frozenset[str] | None) -> Schema:
    try:
        described = json.loads(spaces)
        obs_space, spec = from_description(described["obs"]), action_spec(from_description(described["action"]))
        if not isinstance(obs_space, gym.spaces.Dict):
            raise ValueError(f"observations are {obs_space}, not a Dict")
        declared = described.get("extras", {}).items()
        sources = {"behaviour": "policy"}  # of earlier versions
        extras = tuple(ExtraField(name, **x | {"source": sources.get(x["source"], x["source"])}) for name, x in declared)
        fields = sorted((*trajectory_fields(obs_space, spec, extras), *_OWN), key=lambda x: x.name)
    except Exception as err:  # gymnasium raises many types on nonsense
        raise BadFileError(f"the recorded spaces cannot be read: {err!r:.200}") from err
    for key in obs_space:
        if problem := key_problem(key):
            raise BadFileError(f"observation key {key!r} {problem}")
    there = {x.name: x for x in fields if names is None or x.name in names}
    if unknown := (names or frozenset()) - there.keys():
        raise BadFileError(f"unknown field {min(unknown)!r}")
    if missing := [x.name for x in fields if x.name not in there and x.default is None]:
        raise BadFileError(f"field {missing[0]!r} is missing")
    return Schema(tuple(there), spaces, obs_space, spec, extras, there)


def spaces_text(obs_space: gym.spaces.Dict, action_space: gym.Space[Any], extras: Iterable[ExtraField] = ()) -> str:
    """Both spaces, and the declarations of extra fields if there are any, as canonical JSON."""
    about: dict[str, Any] = {"obs": describe(obs_space), "action": describe(action_space)}
    declared = {x.name: {k: v for k, v in asdict(x).items() if k != "name"} for x in extras}
    if declared:
        about["extras"] = declared
    return json.dumps(about, separators=(",", ":"), sort_keys=True)


def check_index(ep_offsets: Array, start_time: Array, env_id: Array, total: int, env_names: object) -> tuple[str, ...]:
    """Check the values that locate trajectories in the file; returns the environment names.

    Raises:
        BadFileError: offsets that do not increase or do not end at ``total``, negative times, unknown environments.
    """
    if ep_offsets[0] != 0 or ep_offsets[-1] != total or (ep_offsets[1:] <= ep_offsets[:-1]).any():
        raise BadFileError(f"ep_offsets do not rise from 0 to {total} in steps of at least 1")
    if (start_time < 0).any():
        raise BadFileError("start_time is negative")
    if not isinstance(env_names, list) or not all(isinstance(x, str) for x in env_names):
        raise BadFileError("environment names are not a list of strings")
    if (env_id < 0).any() or (env_id >= len(env_names)).any():
        raise BadFileError(f"env_id points outside of the {len(env_names)} environment names")
    return tuple(map(sys.intern, env_names))
