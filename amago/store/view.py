"""Reading slices: a view of the store as it was at one refresh."""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from amago.hindsight import StoredTraj
from amago.spaces import ActionSpec
from amago.store import index as ix
from amago.store import npz
from amago.store import schema as sc
from amago.store.errors import BadFileError, DamagedError, EvictedError
from amago.store.files import FileCache, open_regular
from amago.store.index import Entry

_empty = np.empty
_preadv: Callable[[int, Any, int], int] = os.preadv
_fstat = os.fstat
_ATTEMPTS = 3
_UNREADABLE = {errno.EIO, errno.ESTALE, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO}

Lost = Callable[[Entry, Exception], None]
"""Told of a file that must not be sampled any more, and why."""


class StoreView:
    """All trajectories as of one `TrajectoryStore.refresh`: indices mean the same as long as the view lives.

    Threads and processes may read from one view at the same time. Later refreshes do not change it; where a file that it
    knows has been deleted meanwhile, `read` raises `EvictedError`.

    What is read is what was written. A file is compared with its checksums when it is first seen, and again, before anything
    of it is handed out, when its size or time of change are not what they were.

    Args:
        lost: called in the reading thread with a file that is damaged, gone or unreadable.

    Attributes:
        lengths: (n,) int64, transitions T of each trajectory (read-only).
    """

    def __init__(self, root: str, entries: Sequence[Entry], cache: FileCache, lost: Lost | None = None) -> None:
        self._root, self._entries, self._cache, self._lost = root, list(entries), cache, lost
        first = [0]
        for entry in self._entries:
            first.append(first[-1] + entry.n)
        self._first = first
        parts = [np.diff(e.ep_offsets) for e in self._entries]
        self.lengths: np.ndarray = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        self.lengths.setflags(write=False)

    def __len__(self) -> int:
        return self._first[-1]

    def _find(self, index: int) -> tuple[Entry, int]:
        if not 0 <= index < self._first[-1]:
            raise IndexError(f"index is {index}, but there are {self._first[-1]} trajectories")
        i = bisect_right(self._first, index) - 1
        return self._entries[i], int(index) - self._first[i]

    def action_spec(self, index: int) -> ActionSpec:
        """The recorded action space of a trajectory; one object for all that have the same."""
        return self._find(index)[0].schema.action_spec

    def obs_space(self, index: int) -> gym.spaces.Dict:
        """The recorded observation space of a trajectory; one object for all that have the same."""
        return self._find(index)[0].schema.obs_space

    def env_name(self, index: int) -> str:
        """The environment's name."""
        entry, j = self._find(index)
        return entry.env_names[entry.env_id[j]]

    def path(self, index: int) -> str:
        """The file that holds a trajectory."""
        entry, _ = self._find(index)
        return os.path.join(self._root, entry.partition, entry.name)

    def read(self, index: int, start: int = 0, stop: int | None = None, keys: Iterable[str] | None = None) -> StoredTraj:
        """Transitions [start, stop) of a trajectory with the stop - start + 1 observations around them.

        ``start_time``, ``prev_reward`` and ``prev_action`` are those of the slice. The arrays are new and may be changed.

        Args:
            index: 0 to ``len(self) - 1``.
            start: 0 to T - 1.
            stop: start + 1 to T; more, or None, means T.
            keys: the observations wanted; None means all.

        Raises:
            IndexError, ValueError, KeyError: no such trajectory, slice or observation key.
            EvictedError: its file has been deleted since the view was made, or cannot be read now; draw another index.
            DamagedError: its file has been damaged since it was checked (an `EvictedError` too).
        """
        entry, j = self._find(index)
        begin = int(entry.ep_offsets[j])
        length = int(entry.ep_offsets[j + 1]) - begin
        stop = length if stop is None or stop > length else int(stop)
        start = int(start)
        if not 0 <= start < stop:
            raise ValueError(f"transitions [{start}, {stop}) of a trajectory of {length} are none")
        keys = None if keys is None else self._checked_keys(entry, keys)
        for _ in range(_ATTEMPTS):
            if entry.gone:
                raise self._evicted(entry)
            try:
                return self._slice(entry, j, begin, start, stop, keys)
            except BadFileError:
                self._recheck(entry)
        raise self._give_up(entry, EvictedError(f"{entry.partition}/{entry.name} is being written to; draw another index"))

    def _slice(self, entry: Entry, j: int, begin: int, start: int, stop: int, keys: list[str] | None) -> StoredTraj:
        """Raises BadFileError where the file is not what was checked; nothing that was read may be used then."""
        checked = entry.size, entry.mtime_ns  # now: another thread may check the file again while this one reads
        try:
            file = self._cache.acquire(entry, lambda: self._open(entry))
        except FileNotFoundError as err:
            raise self._give_up(entry, self._evicted(entry)) from err
        try:
            if entry.kind == ix.TRAJ:
                traj = ix.read_legacy(file.fd, entry, start, stop, keys)
            else:
                traj = _read(file.fd, entry, j, begin, start, stop, keys)
            info = _fstat(file.fd)  # last: a write before or during the reading is seen
            if (info.st_size, info.st_mtime_ns) != checked:
                raise BadFileError("it was written to")
            return traj
        except OSError as err:
            if err.errno not in _UNREADABLE:
                raise
            raise self._give_up(entry, EvictedError(f"{entry.partition}/{entry.name} cannot be read now: {err}")) from err
        finally:
            self._cache.release(file)
            if entry.gone:
                self._cache.drop(entry)

    def _recheck(self, entry: Entry) -> None:
        self._cache.drop(entry)
        try:
            ix.recheck(self._root, entry)
        except EvictedError as err:
            raise self._give_up(entry, err) from None
        except Exception as err:
            path = os.path.join(self._root, entry.partition, entry.name)
            problem = DamagedError(f"{path} has been damaged: {err}; draw another index")
            raise self._give_up(entry, problem, err) from err

    def _give_up(self, entry: Entry, problem: EvictedError, reason: Exception | None = None) -> EvictedError:
        """Nobody draws this file again; returns the error to raise."""
        entry.gone = True
        self._cache.drop(entry)
        if self._lost is not None:
            self._lost(entry, reason or problem)
        return problem

    def _checked_keys(self, entry: Entry, keys: Iterable[str]) -> list[str]:
        wanted = list(keys)
        for key in wanted:
            if sc.OBS + key not in entry.schema.at:
                raise KeyError(f"no observation {key!r}; there are {[k for k, _ in entry.schema.obs]}")
        return wanted

    def _open(self, entry: Entry) -> int:
        path = os.path.join(self._root, entry.partition, entry.name)
        fd, info = open_regular(path)
        if (info.st_size, info.st_mtime_ns) != (entry.size, entry.mtime_ns):
            os.close(fd)
            raise BadFileError("it was written to")
        return fd

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lost": None}  # a copy elsewhere reads without the store

    def _evicted(self, entry: Entry) -> EvictedError:
        return EvictedError(f"{entry.partition}/{entry.name} has been deleted from the buffer; draw another index")


def _read(fd: int, entry: Entry, j: int, begin: int, start: int, stop: int, keys: list[str] | None) -> StoredTraj:
    schema = entry.schema
    at = schema.at
    fetch = _fetch_packed if entry.kind == ix.PACKED else _fetch
    first, count = begin + start, stop - start
    wanted = schema.obs if keys is None else [(k, at[sc.OBS + k]) for k in keys]
    obs = {key: fetch(fd, entry, i, first + j, count + 1) for key, i in wanted}
    dones = fetch(fd, entry, at["dones"], first, count)
    if start:  # the row before says what came with the first observation
        rews = fetch(fd, entry, at["rews"], first - 1, count + 1)
        actions = fetch(fd, entry, at["actions"], first - 1, count + 1)
        prev_reward, prev_action, rews, actions = float(rews[0, 0]), actions[0].copy(), rews[1:], actions[1:]
    else:
        rews = fetch(fd, entry, at["rews"], first, count)
        actions = fetch(fd, entry, at["actions"], first, count)
        prev_reward = float(fetch(fd, entry, at["prev_reward"], j, 1)[0])
        prev_action = fetch(fd, entry, at["prev_action"], j, 1)[0]
    start_time = int(entry.start_time[j]) + start
    return StoredTraj(obs, actions, rews, dones, start_time, prev_reward, prev_action, entry.env_names[entry.env_id[j]])


def _fetch(fd: int, entry: Entry, i: int, row: int, count: int) -> np.ndarray:
    """Rows [row, row + count) of the i-th field."""
    _, dtype, shape, row_bytes = entry.schema.parts[i]
    out = _empty((count, *shape), dtype)
    if row_bytes:
        at = entry.places[i] + row * row_bytes
        got = _preadv(fd, (out,), at)
        if got != count * row_bytes:
            _fetch_rest(fd, out, at, got)
    return out


def _fetch_rest(fd: int, out: np.ndarray, at: int, got: int) -> None:
    view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    while got < len(view):
        more = _preadv(fd, (view[got:],), at + got)
        if not more:
            raise BadFileError(f"it ends at byte {at + got}, {len(view) - got} bytes early")
        got += more


def _fetch_packed(fd: int, entry: Entry, i: int, row: int, count: int) -> np.ndarray:
    _, dtype, shape, row_bytes = entry.schema.parts[i]
    at, packed, skip = entry.places[i]
    raw = npz.unpack(fd, at, packed, True, skip + (row + count) * row_bytes, skip + row * row_bytes)
    return np.frombuffer(bytearray(raw), dtype).reshape(count, *shape)
