"""Files of the original system's buffer: ``.npz`` archives of one trajectory of T transitions, read where they lie.

    rl2s       (T + 1, 1 + A)  reward, then previous action
    time_idxs  (T + 1, 1)      from 0, or from later where a rollout was saved in pieces
    rews       (T, 1)
    dones      (T, 1)          terminated
    actions    (T, A)          one-hot, [-1, 1] or bits
    _OBS_KEY_<key> (T + 1, ...)

They do not say what the spaces are. Until those are given (`Spaces`), actions are read as vectors, and observations have no bounds.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from amago.data.trajectory import OBS, rl2
from amago.spaces import ActionSpec, action_spec
from amago.store import npz
from amago.store import schema as sc
from amago.store.errors import BadFileError
from amago.store.files import open_regular

if TYPE_CHECKING:
    from amago.store.index import Entry, Schemas
    from amago.store.view import SliceBuffers

logger = logging.getLogger(__name__)

NAME = re.compile(r"(?P<env>.*)_(?P<id>[0-9a-f]{8})_(?P<time>[0-9]+(\.[0-9]+)?)\.(npz|traj)", re.DOTALL)
"""``{env_name}_{8 hexadecimal digits}_{time.time()}.npz``."""
KEY = "_OBS_KEY_"
FIELDS = ("rl2s", "time_idxs", "rews", "dones", "actions")
_SHOWN = 200


class OriginalFileError(BadFileError):
    """A file of the original system that cannot be sampled. It stays where it is."""


def is_original(found: Mapping[str, npz.Member]) -> bool:
    """Whether the arrays of an archive are those of the original system."""
    return "metadata" not in found and all(name in found for name in FIELDS)


def of_name(name: str) -> tuple[str, str, int]:
    """The environment, an id, and the time in microseconds that a file's name says; "", "" and 0 if it says none."""
    match = NAME.fullmatch(name)
    return (match["env"], match["id"], int(float(match["time"]) * 1e6)) if match else ("", "", 0)


def check(fd: int, found: dict[str, npz.Member], trusted: bool) -> tuple[int, int]:
    """Check that the arrays of a file fit together.

    Args:
        trusted: the data was compared with its checksums before.

    Returns:
        T, and the time index of the first observation.

    Raises:
        OriginalFileError: with the first thing that is wrong.
    """
    shapes = {name: m.shape for name, m in found.items()}
    total = shapes["rews"][0] if shapes["rews"] else 0
    width = shapes["actions"][-1] if shapes["actions"] else 0
    want = {"rl2s": (total + 1, 1 + width), "rews": (total, 1), "dones": (total, 1), "actions": (total, width)}
    want["time_idxs"] = (total + 1, 1)
    observations = [name for name in found if name.startswith(KEY)]
    _require(total >= 1 and width >= 1 and observations, f"no transitions, actions or observations: {str(shapes)[:_SHOWN]}")
    for name, shape in want.items():
        _require(
            shapes[name] == shape, f"{name} has shape {shapes[name]}; {total} rewards and actions {width} wide ask for {shape}"
        )
    for name in observations:
        _require(shapes[name][:1] == (total + 1,), f"{name} has shape {shapes[name]}, but must have {total + 1} rows")
        _require(not (problem := sc.key_problem(name[len(KEY) :])), f"observation key {name!r:.100} {problem}")
    extra = sorted(found.keys() - {*FIELDS, *observations})
    _require(not extra, f"unknown arrays {str(extra)[:_SHOWN]}")
    _require(found["time_idxs"].dtype.kind in "iu", f"time_idxs are {found['time_idxs'].dtype}")
    start = int(rows(fd, found["time_idxs"], 0, 1)[0, 0])
    _require(start >= 0, f"time_idxs begin at {start}")
    if not trusted:
        try:
            for member in found.values():
                npz.check_data(fd, member)
        except BadFileError as err:
            raise OriginalFileError(str(err)) from err
        _check_values(fd, found, start)
    return total, start


def _check_values(fd: int, found: dict[str, npz.Member], start: int) -> None:
    """Compare ``time_idxs`` and ``rl2s`` with what batches make of the rest in their place."""
    rl2s, times, rews, actions = (npz.load_field(fd, found[name]) for name in ("rl2s", "time_idxs", "rews", "actions"))
    _require((times[:, 0] == start + np.arange(len(times))).all(), "time_idxs do not count steps")
    same = np.array_equal(rl2s[1:].astype(np.float32), rl2(rews, actions), equal_nan=True) and (start > 0 or not rl2s[0].any())
    if not same:
        _warn_of_rl2s()


@functools.cache
def _warn_of_rl2s() -> None:
    logger.warning(
        "a file of the original system has rl2s other than the rewards and actions of the step before: those are read in their "
        "place, here and in other files, zeros at time 0"
    )


def _require(right: Any, problem: str) -> None:
    if not right:
        raise OriginalFileError(problem)


def rows(fd: int, member: npz.Member, start: int, stop: int) -> sc.Array:
    """Rows [start, stop) of an array."""
    row_bytes = member.dtype.itemsize * int(np.prod(member.shape[1:]))
    at, end = member.skip + start * row_bytes, member.skip + stop * row_bytes
    raw = npz.unpack(fd, member.at, member.packed, member.compressed, end, at)
    return np.frombuffer(raw, member.dtype).reshape(stop - start, *member.shape[1:])


class Spaces:
    """The spaces of files that record none.

    Args:
        obs_space: flat, boxes only.
        schemas: of all files of the store.
    """

    def __init__(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any], schemas: Schemas):
        self.obs_space, self.spec, self._schemas = obs_space, action_spec(action_space), schemas
        self._text = sc.spaces_text(obs_space, action_space)

    @classmethod
    def unknown(cls, found: dict[str, npz.Member], schemas: Schemas) -> Spaces:
        """The widest spaces that the arrays of a file may be of: actions are vectors."""
        boxes: dict[str, gym.Space[Any]] = {
            name[len(KEY) :]: widest_box(m.dtype, m.shape[1:]) for name, m in sorted(found.items()) if name.startswith(KEY)
        }
        width = found["actions"].shape[1]
        return cls(gym.spaces.Dict(boxes), gym.spaces.Box(-1.0, 1.0, (width,), np.float32), schemas)

    def give(self, entry: Entry, root: Path | None = None) -> None:
        """Read a file as one of these spaces from now on.

        Args:
            root: of the store, to compare the actions in the file with the space; None: without this check.

        Raises:
            OriginalFileError: the file has other observations or actions.
        """
        (found,) = entry.places
        self.check_observations({n[len(KEY) :]: (m.dtype, m.shape[1:]) for n, m in found.items() if n.startswith(KEY)})
        self._check_width(found["actions"].shape[1])
        if root is not None and self.spec.kind != "continuous":
            fd, _ = open_regular(os.path.join(root, entry.partition, entry.name))
            try:
                self.check_actions(npz.load_field(fd, found["actions"]))
            finally:
                os.close(fd)
        stored, total = (self.spec.stored_dim,), entry.total
        shapes: dict[str, tuple[sc.DType, tuple[int, ...]]] = {
            OBS + key: (np.dtype(x.dtype), (total + 1, *(x.shape or ()))) for key, x in self.obs_space.spaces.items()
        }
        shapes |= {name: (x.dtype, (1,)) for name, x in sc.ONE_ROW.items() if x.dtype is not None}
        shapes["ep_offsets"] = entry.ep_offsets.dtype, (2,)
        shapes["rews"], shapes["dones"] = (np.dtype(np.float32), (total, 1)), (np.dtype(np.bool_), (total, 1))
        shapes["actions"], shapes["prev_action"] = (
            (self.spec.stored_dtype, (total, *stored)),
            (self.spec.stored_dtype, (1, *stored)),
        )
        entry.schema = self._schemas.get(sc.fit(shapes)[0], self._text)

    def check_observations(self, found: Mapping[str, tuple[sc.DType, tuple[int, ...]]]) -> None:
        """Raise OriginalFileError if observations have other keys or shapes, or dtypes that would lose something.

        Args:
            found: dtype and shape of a row, by key.
        """
        boxes = {key: (np.dtype(x.dtype), x.shape or ()) for key, x in self.obs_space.spaces.items()}
        _require(found.keys() == boxes.keys(), f"observations {sorted(found)}, not {sorted(boxes)}")
        for key, (dtype, shape) in found.items():
            wanted, right = boxes[key]
            same = shape == right or {shape, right} == {(), (1,)}
            exact = "f" in (dtype.kind, wanted.kind) or np.can_cast(dtype, wanted)
            if not (same and exact and np.can_cast(dtype, wanted, "same_kind")):
                raise OriginalFileError(f"observation {key!r:.100} is {dtype} {shape}, not {wanted} {right}")

    def _check_width(self, width: int) -> None:
        if width != self.spec.dim:
            raise OriginalFileError(f"actions are {width} wide, but those of {self.spec.space} are {self.spec.dim} wide")

    def check_actions(self, vectors: sc.Array) -> None:
        """Raise OriginalFileError if vectors (T, A) are no actions of the space, such as rows that are not one-hot."""
        self._check_width(vectors.shape[1])
        if self.spec.kind == "continuous":
            return
        if not np.array_equal(self.spec.to_vector(self.spec.from_vector(vectors)), vectors.astype(np.float32)):
            raise OriginalFileError(f"actions are not those of {self.spec.space}: rows such as {vectors[0].tolist()!r:.100}")


def read(fd: int, entry: Entry, start: int, buffers: SliceBuffers) -> None:
    """Fill buffers with the transitions from ``start`` on; the row in front is what came with the first observation."""
    (found,), spec, stop = entry.places, entry.schema.action_spec, start + buffers.steps
    before = rows(fd, found["rl2s"], start, start + 1)
    for slot, out in zip(buffers.slots, buffers.arrays):
        if slot.part < 0:
            out[...] = slot.default
        elif slot.group == "obs":
            out[...] = rows(fd, found[KEY + slot.key], start, stop + 1).reshape(out.shape)
        elif slot.key == "actions":
            out[...] = _stored(spec, np.concatenate((before[:, 1:], rows(fd, found["actions"], start, stop))))
        elif slot.key == "rews":
            out[0], out[1:] = before[0, :1], rows(fd, found["rews"], start, stop)
        else:
            out[...] = rows(fd, found[slot.key], start, stop)


def widest_box(dtype: sc.DType, shape: tuple[int, ...]) -> gym.spaces.Box:
    """The space of an observation of which nothing else is known."""
    if dtype.kind == "f":
        low, high = -np.inf, np.inf
    elif dtype.kind == "b":
        low, high = 0, 1
    else:  # descriptions of spaces have their bounds as float64
        low, high = max(np.iinfo(dtype).min, -(2**53)), min(np.iinfo(dtype).max, 2**53)
    return gym.spaces.Box(low, high, shape=shape, dtype=dtype.type)


def _stored(spec: ActionSpec, vectors: sc.Array) -> sc.Array:
    return spec.from_vector(vectors.astype(np.float32))
