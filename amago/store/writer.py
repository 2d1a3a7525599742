"""The writer of trajectory files: validates finished trajectories and commits them to a directory of the store."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import gymnasium as gym

from amago.data.extras import ExtraField, check_extra_fields, trajectory_fields
from amago.data.trajectory import EXTRA, OBS, StoredTraj, StoredTrajs, rows_in
from amago.spaces import action_spec, key_problem
from amago.store import formats, schema
from amago.store.files import StoreFullError, commit, is_full

logger = logging.getLogger(__name__)

KINDS = ("segments", "npz", "npz-compressed")
MAX_PENDING_BYTES = 64 << 20
RETRY_SECONDS = 5.0
"""Time after a full disk during which `TrajectoryWriter.write` queues trajectories without trying to write."""


class TrajectoryWriter:
    """Write trajectories of one process into one directory, ``{buffer}/fifo`` as a rule.

    Every visible file is complete and durable: it is written under a temporary name, fsynced and then renamed, never over
    another file. When the disk is full, trajectories are queued in memory, up to ``max_pending_bytes``, and written in order
    as soon as there is space. Nothing is dropped without an error.

    Args:
        directory: created if it does not exist.
        writer: an id of letters, digits, "_" and "-", unique to this process and run.
        action_space: of the environment; the actions written are in stored form (`amago.spaces.ActionSpec`).
        obs_space: flat, boxes only, as `amago.spaces.obs_spec` gives it.
        save_as: "segments" (many trajectories a file; the default and the fastest), "npz" or "npz-compressed" (one a file).
        segment_bytes: size at which a segment is closed.
        max_pending_bytes: largest queue in memory (default: 64 MB, at least one segment).
        extra_fields: the declared extra fields; every trajectory must have these extras and no others.

    Attributes:
        committed: trajectories on disk so far.
        pending, pending_bytes: trajectories that wait for `flush`, for a segment to fill, or for space on the disk.
        refused: how often the disk had no space.
        disk_is_full: whether the last try to write found no space; trajectories wait in memory.

    Raises:
        ValueError: an argument is wrong; the message names it, and the values allowed.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        writer: str,
        action_space: gym.Space,
        obs_space: gym.spaces.Dict,
        save_as: str = "segments",
        segment_bytes: int = 8 << 20,
        max_pending_bytes: int | None = None,
        extra_fields: Iterable[ExtraField] = (),
    ) -> None:
        if save_as not in KINDS:
            why = "; pickles run code when they are read, so none are written" if save_as == "traj" else ""
            raise ValueError(f"save_as={save_as!r}, but must be one of {', '.join(map(repr, KINDS))}{why}")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}", writer):
            raise ValueError(f"writer is {writer!r}, but must be 1 to 80 letters, digits, '_' or '-'")
        pending = MAX_PENDING_BYTES if max_pending_bytes is None else max_pending_bytes
        for name, size in (("segment_bytes", segment_bytes), ("max_pending_bytes", pending)):
            if size < 1:
                raise ValueError(f"{name} is {size}, but must be at least 1")
        self._limit = segment_bytes if save_as == "segments" else 1  # bytes at which a file is closed
        self.max_pending_bytes = max(pending, self._limit)
        self.directory, self.writer, self.save_as, self.segment_bytes = Path(directory), writer, save_as, segment_bytes
        self.extra_fields = check_extra_fields(extra_fields)
        spec = action_spec(action_space)
        _check_observations(obs_space)
        fields = trajectory_fields(obs_space, spec, self.extra_fields)
        self._fields = [x for x in fields if x.name not in ("start_time", "prev_reward")]
        self._spaces = schema.spaces_text(obs_space, action_space, self.extra_fields)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._next = max(formats.files_of(self.directory, writer).values(), default=-1) + 1
        self._queue: deque[tuple[StoredTrajs, int]] = deque()
        self._retry_at = 0.0  # after a failure for lack of space: when write() tries again
        self._closed = False
        self.committed = self.pending = self.pending_bytes = self.refused = 0

    @property
    def disk_is_full(self) -> bool:
        return self._retry_at > 0.0

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, traj: StoredTraj | StoredTrajs) -> None:
        """Add one trajectory, whose arrays are copied, so the caller may use them again; or several, whose arrays are kept.

        Raises:
            ValueError: a field's length, shape, dtype or key differs from the spaces and extra fields, or the writer is closed.
            StoreFullError: the disk is full and so is the queue; this trajectory was not taken.
            OSError: writing failed for another reason; the trajectories are still pending.
        """
        if self._closed:
            raise ValueError(f"the writer {self.writer!r} is closed")
        trajs = StoredTrajs.of(traj) if isinstance(traj, StoredTraj) else traj
        if len(trajs) > 1 and self.save_as != "segments":
            for one in trajs.each():
                self.write(one)
            return
        size = self._check(trajs)
        if self._queue and self.pending_bytes + size > self.max_pending_bytes:
            self.flush()
            if self._queue:
                raise self._full(size)
        self._queue.append((trajs, size))
        self.pending += len(trajs)
        self.pending_bytes += size
        if self.pending_bytes >= self._limit and time.monotonic() >= self._retry_at:
            self.flush()

    def flush(self) -> int:
        """Commit pending trajectories; returns how many this call committed.

        A full disk is logged and raises no error: the rest stays pending, and the next call tries again.

        Raises:
            OSError: writing failed for a reason other than space; the trajectories are still pending.
        """
        before = self.committed
        while self._queue:
            trajs, number, size = self._batch()
            about = self._spaces, self.writer, self._next
            try:
                if self.save_as == "segments":
                    buffers = formats.encode_segment(trajs, *about)
                else:
                    buffers = [formats.encode_npz(trajs[0], *about, self.save_as == "npz-compressed")]
                commit(self.directory, buffers, self._names(number, trajs[0].env_names[0]))
            except OSError as err:
                if not is_full(err):
                    raise
                self._retry_at = time.monotonic() + RETRY_SECONDS
                self.refused += 1
                logger.warning(
                    "%s: no space for %d bytes; %d trajectories (%d of at most %d bytes) wait in memory until there is",
                    self.directory, size, self.pending, self.pending_bytes, self.max_pending_bytes,
                )  # fmt: skip
                break
            for _ in trajs:
                self._queue.popleft()
            self.pending -= number
            self.pending_bytes -= size
            self._retry_at = 0.0
            self.committed += number
        return self.committed - before

    def close(self) -> None:
        """Flush and refuse further trajectories; calling it again does nothing.

        Raises:
            StoreFullError: the disk is full and trajectories would be lost; the writer stays open.
        """
        if self._closed:
            return
        self.flush()
        if self._queue:
            full = self._full(0)
            logger.error("%d trajectories are not saved: %s", self.pending, full)  # whatever becomes of the exception
            raise full
        self._closed = True

    def _batch(self) -> tuple[list[StoredTrajs], int, int]:
        """What the next file takes from the queue, the number of its trajectories, and their bytes."""
        batch: list[StoredTrajs] = []
        size = number = 0
        for trajs, more in self._queue:
            if size >= self._limit:
                break
            batch.append(trajs)
            number += len(trajs)
            size += more
        return batch, number, size

    def _names(self, n: int, env_name: str) -> Iterator[str]:
        while True:
            sequence, self._next = self._next, self._next + 1
            yield formats.file_name(self.save_as, self.writer, sequence, n, env_name)

    def _full(self, size: int) -> StoreFullError:
        free, needed = shutil.disk_usage(self.directory).free, self.pending_bytes + size
        text = f"no space is left in {self.directory}: {needed} bytes are needed for {self.pending} trajectories that wait"
        text += f" in memory (at most {self.max_pending_bytes} bytes may)" + (f" and one of {size} bytes" if size else "")
        text += f"; {free} bytes are free" + (", so it may be a quota that is used up" if free >= needed else "")
        return StoreFullError(text)

    def _check(self, trajs: StoredTrajs) -> int:
        """Raise ValueError unless the trajectories have the declared fields; returns their size in bytes."""
        n, total, arrays = len(trajs), int(trajs.lengths.sum()), trajs.arrays | {"prev_action": trajs.prev_actions}
        if (trajs.lengths < 1).any():
            raise ValueError("rews has 0 rows; a trajectory needs at least one transition")
        if (trajs.start_times < 0).any():
            raise ValueError(f"start_time is {trajs.start_times.min()}, but must be at least 0")
        if arrays.keys() != {x.name for x in self._fields}:
            for name, prefix, role in (("obs", OBS, "obs"), ("extras", EXTRA, "extra")):
                found = sorted(k.removeprefix(prefix) for k in arrays if k.startswith(prefix))
                wanted = sorted(x.key for x in self._fields if x.role == role)
                if found != wanted:
                    raise ValueError(f"{name} has keys {found}, but must have {wanted}")
        size = 64 * n
        for x in self._fields:
            a, shape = arrays[x.name], (rows_in(x.rows, n, total), *x.shape)
            if a.shape != shape or a.dtype != x.dtype:
                name = {"obs": f"obs[{x.key!r}]", "extra": f"extras[{x.key!r}]"}.get(x.role, x.name)
                raise ValueError(f"{name} has shape {a.shape} and dtype {a.dtype}, but must have {shape} and {x.dtype}")
            size += a.nbytes
        return size


def _check_observations(obs_space: gym.spaces.Dict) -> None:
    """Raise ValueError unless files can hold the observations, naming the key and its fault."""
    for key, sub in obs_space.spaces.items():
        if not isinstance(sub, gym.spaces.Box):
            raise ValueError(f"obs_space[{key!r}] is {sub}, but must be a Box: pass amago.spaces.obs_spec(space).space")
        if problem := key_problem(key):
            raise ValueError(f"observation key {key!r} {problem}")
        if sub.dtype not in schema.CODE_OF:
            raise ValueError(f"obs_space[{key!r}] has dtype {sub.dtype}; these can be stored: {sorted(schema.CODES)}")
