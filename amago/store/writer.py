"""What an actor holds: validates finished trajectories and commits them to a directory of the store."""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import numpy as np

from amago.data.trajectory import StoredTraj
from amago.spaces import action_spec
from amago.store import npz, schema, segment
from amago.store.errors import StoreFullError
from amago.store.files import commit, free_bytes, is_full

logger = logging.getLogger(__name__)

KINDS = ("segments", "npz", "npz-compressed")
MAX_PENDING_BYTES = 64 << 20
RETRY_SECONDS = 5.0
"""After the disk was full, how long `TrajectoryWriter.write` only fills the queue before it tries again."""
_MAX_BATCH = 1 << 16  # trajectories in one segment
_MAX_TRAJECTORY_BYTES = 2 << 30


class TrajectoryWriter:
    """Writes trajectories of one process into one directory, ``{buffer}/fifo`` as a rule.

    What is visible in the directory is complete and durable: a file is written under a temporary name, fsynced and then
    renamed, never over another one. When the disk is full, trajectories wait in memory, up to ``max_pending_bytes`` of them;
    they are written, in order, as soon as there is space. Nothing is dropped without an error.

    Args:
        directory: made if it does not exist.
        writer: an id of letters, digits, "_" and "-", unique to this process and run.
        action_space: of the environment; the actions written are in stored form (`amago.spaces.ActionSpec`).
        obs_space: flat, boxes only, as `amago.spaces.obs_spec` gives it.
        save_as: "segments" (many trajectories a file; the default and the fastest), "npz" or "npz-compressed" (one a file).
        segment_bytes: a segment is closed when it has as many bytes.
        max_pending_bytes: what may wait in memory (64 MB; a segment at least).

    Attributes:
        committed: trajectories on disk so far.
        pending, pending_bytes: trajectories that wait for `flush`, for a segment to fill, or for space on the disk.
        refused: how often the disk had no space.

    Raises:
        ValueError: an argument is wrong; the message names it, and says what would be right.
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
    ) -> None:
        if save_as == "traj":
            raise ValueError(
                "save_as='traj' would write pickles, which run code when they are read; amago never writes them. "
                "Use 'segments' (the fastest), 'npz' or 'npz-compressed'."
            )
        if save_as not in KINDS:
            raise ValueError(f"save_as is {save_as!r}, but must be one of {', '.join(map(repr, KINDS))}")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}", writer):
            raise ValueError(f"writer is {writer!r}, but must be 1 to 80 letters, digits, '_' or '-'")
        if segment_bytes < 1:
            raise ValueError(f"segment_bytes is {segment_bytes}, but must be at least 1")
        if max_pending_bytes is not None and max_pending_bytes < 1:
            raise ValueError(f"max_pending_bytes is {max_pending_bytes}, but must be at least 1")
        at_least = segment_bytes if save_as == "segments" else 1
        self.max_pending_bytes = max(MAX_PENDING_BYTES if max_pending_bytes is None else max_pending_bytes, at_least)
        self.directory, self.writer, self.save_as, self.segment_bytes = Path(directory), writer, save_as, segment_bytes
        self._spec = action_spec(action_space)
        self._rows = _rows(obs_space)
        self._spaces = schema.spaces_text(obs_space, action_space)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._next = _next_sequence(self.directory, writer)
        self._queue: deque[tuple[StoredTraj, int]] = deque()
        self._retry_at = 0.0  # after a failure for lack of space: when write() tries again
        self._closed = False
        self.committed = self.pending_bytes = self.refused = 0

    @property
    def pending(self) -> int:
        return len(self._queue)

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, traj: StoredTraj) -> None:
        """Add one trajectory. Its arrays are copied, so the caller may use them again.

        Raises:
            ValueError: a field's length, shape, dtype or key is not what the spaces say, or the writer is closed.
            StoreFullError: the disk is full and so is the queue; this trajectory was not taken.
            OSError: writing failed for another reason; the trajectories are still pending.
        """
        if self._closed:
            raise ValueError(f"the writer {self.writer!r} is closed")
        size = self._check(traj)
        if self._queue and self.pending_bytes + size > self.max_pending_bytes:
            self.flush()
            if self._queue:
                raise self._full(size)
        self._queue.append((_copy(traj), size))
        self.pending_bytes += size
        limit = self.segment_bytes if self.save_as == "segments" else 1
        if (self.pending_bytes >= limit or len(self._queue) >= _MAX_BATCH) and time.monotonic() >= self._retry_at:
            self.flush()

    def flush(self) -> int:
        """Commit what is pending; returns how many trajectories this call committed.

        A full disk is no error here: it is logged, the rest stays pending, and the next call tries again.

        Raises:
            OSError: writing failed for a reason other than space; the trajectories are still pending.
        """
        before = self.committed
        while self._queue:
            batch, size = self._batch()
            try:
                self._commit([traj for traj, _ in batch])
            except OSError as err:
                if not is_full(err):
                    raise
                self._retry_at = time.monotonic() + RETRY_SECONDS
                self.refused += 1
                logger.warning(
                    "%s: no space for %d bytes; %d trajectories (%d of at most %d bytes) wait in memory until there is",
                    self.directory, size, len(self._queue), self.pending_bytes, self.max_pending_bytes,
                )  # fmt: skip
                break
            for _ in batch:
                self._queue.popleft()
            self.pending_bytes -= size
            self._retry_at = 0.0
            self.committed += len(batch)
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
            logger.error("%d trajectories are not saved: %s", len(self._queue), full)  # whatever becomes of the exception
            raise full
        self._closed = True

    def _batch(self) -> tuple[list[tuple[StoredTraj, int]], int]:
        if self.save_as != "segments":
            return [self._queue[0]], self._queue[0][1]
        batch: list[tuple[StoredTraj, int]] = []
        size = 0
        for item in itertools.islice(self._queue, _MAX_BATCH):
            if batch and size + item[1] > max(self.segment_bytes, _MAX_TRAJECTORY_BYTES // 2):
                break
            batch.append(item)
            size += item[1]
            if size >= self.segment_bytes:
                break
        return batch, size

    def _commit(self, trajs: list[StoredTraj]) -> None:
        first = self._next
        if self.save_as == "segments":
            buffers = segment.encode(trajs, self._spaces, self.writer, first)
        else:
            buffers = [npz.encode(trajs[0], self._spaces, self.writer, first, self.save_as == "npz-compressed")]
        commit(self.directory, buffers, self._names(len(trajs), trajs[0].env_name))

    def _names(self, n: int, env_name: str) -> Iterator[str]:
        while True:
            sequence, self._next = self._next, self._next + 1
            if self.save_as == "segments":
                yield segment.file_name(self.writer, sequence, n)
            else:
                yield npz.file_name(env_name, self.writer, sequence)

    def _full(self, size: int) -> StoreFullError:
        free, needed = free_bytes(self.directory), self.pending_bytes + size
        text = f"no space is left in {self.directory}: {needed} bytes are needed for {len(self._queue)} trajectories that wait"
        text += f" in memory (at most {self.max_pending_bytes} bytes may)" + (f" and one of {size} bytes" if size else "")
        if free is not None:
            text += f"; {free} bytes are free" + (", so it may be a quota that is used up" if free >= needed else "")
        return StoreFullError(text)

    def _check(self, traj: StoredTraj) -> int:
        """Raise ValueError unless the trajectory is what the spaces say; returns its size in bytes."""
        t = len(traj)
        if t < 1:
            raise ValueError("rews has 0 rows; a trajectory needs at least one transition")
        if traj.obs.keys() != self._rows.keys():
            raise ValueError(f"obs has keys {sorted(traj.obs)}, but the observation space has {sorted(self._rows)}")
        size = 64
        for key, (row, dtype) in self._rows.items():
            size += _check_array(f"obs[{key!r}]", traj.obs[key], (t + 1, *row), dtype)
        spec = self._spec
        size += _check_array("actions", traj.actions, (t, spec.stored_dim), spec.stored_dtype)
        size += _check_array("rews", traj.rews, (t, 1), np.dtype(np.float32))
        size += _check_array("dones", traj.dones, (t, 1), np.dtype(np.bool_))
        if traj.prev_action is not None:
            size += _check_array("prev_action", traj.prev_action, (spec.stored_dim,), spec.stored_dtype)
        if traj.start_time < 0:
            raise ValueError(f"start_time is {traj.start_time}, but must be at least 0")
        if size > _MAX_TRAJECTORY_BYTES:
            raise ValueError(f"a trajectory of {size} bytes is too long: save at most {_MAX_TRAJECTORY_BYTES} bytes a piece")
        return size


def _check_array(name: str, a: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> int:
    if a.shape != shape or a.dtype != dtype:
        raise ValueError(f"{name} has shape {a.shape} and dtype {a.dtype}, but must have {shape} and {dtype}")
    return a.nbytes


def _copy(traj: StoredTraj) -> StoredTraj:
    return StoredTraj(
        obs={k: v.copy() for k, v in traj.obs.items()},
        actions=traj.actions.copy(),
        rews=traj.rews.copy(),
        dones=traj.dones.copy(),
        start_time=int(traj.start_time),
        prev_reward=float(traj.prev_reward),
        prev_action=None if traj.prev_action is None else traj.prev_action.copy(),
        env_name=traj.env_name,
    )


def _rows(obs_space: gym.spaces.Dict) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    rows = {}
    for key, sub in obs_space.spaces.items():
        if not isinstance(sub, gym.spaces.Box):
            raise ValueError(f"obs_space[{key!r}] is {sub}, but must be a Box: pass amago.spaces.obs_spec(space).space")
        if problem := schema.key_problem(key):
            raise ValueError(f"observation key {key!r} {problem}")
        if np.dtype(sub.dtype) not in schema.CODE_OF:
            raise ValueError(f"obs_space[{key!r}] has dtype {sub.dtype}; these can be stored: {sorted(schema.CODES)}")
        if np.dtype(sub.dtype).itemsize * int(np.prod(sub.shape, dtype=np.int64)) > schema.MAX_ROW_BYTES:
            raise ValueError(f"one observation of obs_space[{key!r}] takes more than {schema.MAX_ROW_BYTES} bytes")
        rows[key] = (tuple(sub.shape), np.dtype(sub.dtype))
    return rows


def _next_sequence(directory: Path, writer: str) -> int:
    matches = (segment.NAME.fullmatch(name) for name in os.listdir(directory))
    last = max((int(m["sequence"]) for m in matches if m and m["writer"] == writer), default=-1)
    return max(last, npz.last_sequence(directory, writer)) + 1
