"""The fields of a trajectory file, whatever its format, and the checks that they fit together.

The fields are those of `amago.data.trajectory.FIELDS`, declared extra fields, and the file's own index. Each array holds many
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

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField
from amago.data.trajectory import EXTRA, FIELDS, OBS, Field, StoredTraj, pad_value, rows_in
from amago.spaces import ActionSpec, action_spec, describe, from_description, stored_width
from amago.store.errors import BadFileError

Array = NDArray[Any]
DType = np.dtype[Any]

FORMAT = "amago.trajectories"
VERSION = 1

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

_OFFSETS = "n+1"
_INDEX = (Field("ep_offsets", _OFFSETS, "index", CODES["I64"], ()), Field("env_id", "1", "index", CODES["I32"], ()))
_KNOWN = {x.name: x for x in (*FIELDS, *_INDEX) if x.role != "obs"}
"""Every field of a file, beside observations and extra fields; a dtype of None is that of ``actions``."""
ONE_ROW = {x.name: x for x in (*FIELDS, *_INDEX) if x.rows == "1"}
"""The fields that have one row for each trajectory."""


class Part(NamedTuple):
    """One field of a file.

    Attributes:
        row, row_bytes: shape and size of one row.
        rows: how many it has (`amago.data.trajectory.ROWS`).
    """

    name: str
    dtype: DType
    row: tuple[int, ...]
    row_bytes: int
    rows: str

    def total_rows(self, n: Any, total: Any) -> Any:
        """Rows in a file of n trajectories with ``total`` transitions (integers or arrays of them)."""
        return _count(self.rows, n, total)


def _count(rows: str, n: Any, total: Any) -> Any:
    return n + 1 if rows == _OFFSETS else rows_in(rows, n, total)


class Slot(NamedTuple):
    """A field of which slices are read: ``steps * each + more`` rows of a slice of so many transitions.

    Attributes:
        group, key: "obs" or "extras" and the key in it; else "" and the field's name.
        rows: one of `amago.data.trajectory.ROWS`.
        part: position in `Schema.parts`; -1 where the files lack the field.
        before: position of the field that holds the row before a trajectory's first (then slices have that row, too); or -1.
        default: of all rows, where the files lack the field.
        pad: what padding in a batch holds (`amago.data.trajectory.pad_value`); 0 in extra fields, and in actions, which are
            padded when they are vectors.
    """

    group: str
    key: str
    rows: str
    part: int
    before: int
    dtype: DType
    row: tuple[int, ...]
    each: int
    more: int
    default: float
    pad: Any

    @classmethod
    def of(
        cls, x: Field, part: int, before: int, dtype: DType, row: tuple[int, ...], box: gym.spaces.Box | None = None
    ) -> Slot:
        group, start = {"obs": ("obs", len(OBS)), "extra": ("extras", len(EXTRA))}.get(x.role, ("", 0))
        each, more = int(x.rows != "1"), int(x.rows != "T" or before >= 0)
        bounds = () if box is None else (box.low, box.high)
        pad = 0 if x.role in ("extra", "action") else pad_value(dtype, *bounds)
        return cls(group, x.name[start:], x.rows, part, before, dtype, row, each, more, x.default or 0.0, pad)

    def take(self, steps: int) -> int:
        """Rows of a slice of so many transitions."""
        return steps * self.each + self.more


@dataclass(frozen=True)
class Schema:
    """What files of one kind of environment have in common; shared between all of them in memory.

    Attributes:
        parts: the fields, sorted by name.
        spaces: ``{"obs": ..., "action": ...}`` as JSON text (`amago.spaces.describe`), and ``"extras"`` if there are any.
    """

    parts: tuple[Part, ...]
    spaces: str

    @cached_property
    def at(self) -> dict[str, int]:
        """Position of each field in ``parts``."""
        return {p.name: i for i, p in enumerate(self.parts)}

    @cached_property
    def obs(self) -> tuple[str, ...]:
        """The keys of the observations."""
        return tuple(p.name[len(OBS) :] for p in self.parts if p.name.startswith(OBS))

    @cached_property
    def extras(self) -> tuple[ExtraField, ...]:
        """The declared extra fields that the files hold."""
        return tuple(ExtraField(name, **x) for name, x in json.loads(self.spaces).get("extras", {}).items())

    def slots(self, keys: Iterable[str] | None = None, extras: Iterable[ExtraField] | None = None) -> tuple[Slot, ...]:
        """The fields to read for a slice, in the order of their names in files.

        Args:
            keys: observations wanted; None means all.
            extras: extra fields wanted; those that the files lack get their default. None means all that the files hold.

        Raises:
            KeyError: an unknown observation.
            ValueError: an extra field was recorded with other rows, shape or dtype.
        """
        keys, extras = None if keys is None else tuple(keys), None if extras is None else tuple(extras)
        found = self._known_slots.get((keys, extras))
        if found is None:
            found = self._known_slots[keys, extras] = self._slots(keys, extras)
        return found

    @cached_property
    def all_slots(self) -> tuple[Slot, ...]:
        """`slots` of all observations and extra fields of the files."""
        return self._slots(None, None)

    @cached_property
    def _known_slots(self) -> dict[Any, tuple[Slot, ...]]:
        return {}

    def _slots(self, keys: tuple[str, ...] | None, extras: tuple[ExtraField, ...] | None) -> tuple[Slot, ...]:
        wanted = [x for x in FIELDS if x.rows == "T"]
        for key in self.obs if keys is None else keys:
            if OBS + key not in self.at:
                raise KeyError(f"no observation {key!r}; there are {list(self.obs)}")
            wanted.append(Field(OBS + key, "T+1", "obs"))
        wanted += [x.field for x in (self.extras if extras is None else extras)]
        return tuple(self._slot(x) for x in sorted(wanted, key=lambda x: x.name))

    def _slot(self, x: Field) -> Slot:
        i = self.at.get(x.name, -1)
        if i < 0:
            return Slot.of(x, -1, -1, np.dtype(x.dtype), x.shape or ())
        part = self.parts[i]
        if x.role == "extra" and (part.rows, part.row, part.dtype) != (x.rows, x.shape, x.dtype):
            raise ValueError(
                f"extra field {x.name[len(EXTRA) :]!r} was recorded with rows {part.rows!r}, shape {part.row} and dtype {part.dtype}, "
                f"but is declared with rows {x.rows!r}, shape {x.shape} and dtype {x.dtype}; declare it as recorded, or rename it"
            )
        box: Any = self.obs_space.spaces.get(x.name[len(OBS) :]) if x.role == "obs" else None
        return Slot.of(x, i, -1 if x.before is None else self.at[x.before], part.dtype, part.row, box)

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


def spaces_text(obs_space: gym.spaces.Dict, action_space: gym.Space[Any], extras: Iterable[ExtraField] = ()) -> str:
    """Both spaces, and the declarations of extra fields if there are any, as canonical JSON."""
    about: dict[str, Any] = {"obs": describe(obs_space), "action": describe(action_space)}
    declared = {x.name: {k: v for k, v in asdict(x).items() if k != "name"} for x in extras}
    if declared:
        about["extras"] = declared
    return json.dumps(about, separators=(",", ":"), sort_keys=True)


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
    names = list(dict.fromkeys(t.env_name for t in trajs))
    ids = {name: i for i, name in enumerate(names)}
    first = trajs[0]
    fields: dict[str, Array] = {OBS + k: np.concatenate([t.obs[k] for t in trajs]) for k in first.obs}
    fields |= {EXTRA + k: np.concatenate([t.extras[k] for t in trajs]) for k in first.extras}
    for x in FIELDS:
        values = [getattr(t, x.name) for t in trajs] if x.role != "obs" else []
        if x.rows == "T":
            fields[x.name] = np.concatenate(values)
        elif x.shape is not None:
            fields[x.name] = np.array(values, dtype=x.dtype)
        elif x.role != "obs":  # a row of the actions
            blank = np.zeros(first.actions.shape[1:], first.actions.dtype)
            fields[x.name] = np.stack([blank if v is None else v.reshape(blank.shape) for v in values])
    fields["ep_offsets"] = np.concatenate((np.zeros(1, np.int64), np.cumsum([len(t) for t in trajs], dtype=np.int64)))
    fields["env_id"] = np.array([ids[t.env_name] for t in trajs], dtype=np.int32)
    return {k: np.ascontiguousarray(fields[k]) for k in sorted(fields)}, names


def fit(shapes: Mapping[str, tuple[DType, tuple[int, ...]]], spaces: Any = None) -> tuple[tuple[Part, ...], int, int]:
    """Check that declared fields are ours and agree with each other.

    Args:
        spaces: the recorded spaces, as text; they hold the rows of extra fields.

    Returns:
        The parts (sorted by name), n and T.

    Raises:
        BadFileError: with the first thing that is wrong.
    """
    for name, known in _KNOWN.items():
        if name not in shapes and known.default is None:
            raise BadFileError(f"field {name!r} is missing")
    n, total = shapes["ep_offsets"][1][0] - 1 if shapes["ep_offsets"][1] else 0, (shapes["actions"][1] or (0,))[0]
    if not (1 <= n <= MAX_TRAJECTORIES and total >= n):
        raise BadFileError(f"{n} trajectories with {total} transitions")
    extras = _extras(spaces) if any(name.startswith(EXTRA) for name in shapes) else {}
    return tuple(_part(name, shapes, extras, n, total) for name in sorted(shapes)), n, total


def parts_of(described: Iterable[tuple[str, DType, tuple[int, ...]]], spaces: str) -> tuple[Part, ...]:
    """The parts of files that have these fields: name, dtype and shape of a row.

    Raises:
        BadFileError: as `fit`.
    """
    fields = {name: (dtype, row) for name, dtype, row in described}
    extras = _extras(spaces) if any(name.startswith(EXTRA) for name in fields) else {}
    shapes = {name: (dtype, (_count(_field(name, extras).rows, 1, 1), *row)) for name, (dtype, row) in fields.items()}
    return fit(shapes, spaces)[0]


def _field(name: str, extras: Mapping[str, Field]) -> Field:
    """What is known of a field of this name, before the file's own dtype and shape."""
    if name.startswith(OBS):
        if problem := key_problem(name[len(OBS) :]):
            raise BadFileError(f"observation key {name!r} {problem}")
        return Field(name, "T+1", "obs")
    known = extras.get(name) or _KNOWN.get(name)
    if known is None:
        raise BadFileError(f"unknown field {name!r}")
    return known


def _part(
    name: str, shapes: Mapping[str, tuple[DType, tuple[int, ...]]], extras: Mapping[str, Field], n: int, total: int
) -> Part:
    known, (dtype, shape), (action_dtype, actions) = _field(name, extras), shapes[name], shapes["actions"]
    count = _count(known.rows, n, total)
    if known.role == "obs":
        if shape[:1] != (count,):
            raise BadFileError(f"{name!r} has shape {shape}, but {n} trajectories have {count} observations")
    else:
        right = known.dtype or action_dtype, (count, *(actions[1:2] if known.shape is None else known.shape))
        if (dtype, shape) != right:
            raise BadFileError(f"{name!r} is {dtype} {shape}, not {right[0]} {right[1]}")
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    if row_bytes > MAX_ROW_BYTES:
        raise BadFileError(f"one row of {name!r} would take {row_bytes} bytes; at most {MAX_ROW_BYTES} are allowed")
    return Part(name, dtype, shape[1:], row_bytes, known.rows)


def _extras(spaces: Any) -> dict[str, Field]:
    """The extra fields that recorded spaces declare, by their names in files."""
    try:
        fields = [ExtraField(name, **x).field for name, x in json.loads(spaces)["extras"].items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise BadFileError(f"the declarations of extra fields cannot be read: {err!r:.200}") from err
    return {x.name: x for x in fields}


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
        have = {p.name[len(OBS) :]: (list(p.row), p.dtype) for p in parts if p.name.startswith(OBS)}
        want = {key: (list(sub["shape"]), np.dtype(sub["dtype"])) for key, sub in obs["spaces"].items()}
        if obs["kind"] != "Dict" or have != want:
            raise BadFileError(f"observations {have} do not have the recorded shapes and dtypes {want}")
        declared, found = {x.field.name for x in schema.extras}, {p.name for p in parts if p.name.startswith(EXTRA)}
        if declared != found:
            raise BadFileError(f"the extra fields are {sorted(found)}, but {sorted(declared)} are declared")
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
