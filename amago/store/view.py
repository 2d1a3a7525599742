"""Reading slices: a view of the store as it was at one refresh."""

from __future__ import annotations

import errno
import functools
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from amago import system
from amago.data.extras import ExtraField
from amago.data.trajectory import StoredTraj
from amago.spaces import ActionSpec
from amago.store import index as ix
from amago.store import schema as sc
from amago.store.files import BadFileError, DamagedError, EvictedError, open_regular
from amago.store.formats import Member, read_original
from amago.store.index import Entry

_NONE = np.zeros(0, np.int64)
_preadv = system.preadv
_fstat = os.fstat
_ATTEMPTS = 3
_ERRORS = ("EIO", "ESTALE", "ENODATA", "EBADMSG", "EUCLEAN", "EREMOTEIO")
_UNREADABLE = {vars(errno)[name] for name in _ERRORS if name in vars(errno)}


Slots = tuple[sc.Slot, ...]
Arrays = list[np.ndarray]


class _OpenFile:
    """A file descriptor, closed when nothing refers to it."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class OpenFiles:
    """Open files, the least recently used closed first: a quarter of those that the process may open, between 8 and 512. They are
    read with ``pread``, which has no shared position, so that threads and forked processes may share one."""

    def __init__(self, root: str) -> None:
        self._root = root
        limit = int(max(8, min(512, system.most_open_files() // 4)))
        self.get = functools.lru_cache(limit)(functools.partial(self._open, root))  # no bound method, which would be a circle
        self.clear: Callable[[], None] = self.get.cache_clear  # closes all files that are not in use

    @staticmethod
    def _open(root: str, entry: Entry, size: int, mtime_ns: int) -> _OpenFile:
        """The file of an entry; FileNotFoundError or BadFileError if it is gone, or has another size or time."""
        fd, info = open_regular(os.path.join(root, entry.where))
        file = _OpenFile(fd)
        if (info.st_size, info.st_mtime_ns) != (size, mtime_ns):
            raise BadFileError("it was written to")
        return file

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[str]]:
        return OpenFiles, (self._root,)


class StoreView:
    """All trajectories as of one `TrajectoryStore.refresh`; an index means the same trajectory for the life of the view.

    Several threads and processes may read from one view at the same time. Later refreshes do not change it. `read` raises
    `EvictedError` where the trajectory's file has been deleted since.

    Damaged data is never returned: a file is compared with its checksums when it is first seen, and again whenever its size
    or modification time has changed.

    Args:
        files: open files, shared with other views.
        lost: refers to a method that is called, in the reading thread, with a file that is damaged, gone or unreadable, and the
            reason.

    Attributes:
        lengths: (n,) int64, transitions T of each trajectory (read-only).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        entries: Sequence[Entry],
        files: OpenFiles | None = None,
        lost: weakref.WeakMethod[Callable[[Entry, Exception], None]] | None = None,
    ) -> None:
        self._root, self._entries, self.lost = os.fspath(root), list(entries), lost
        self._open_files = OpenFiles(self._root) if files is None else files
        first = [0]
        for entry in self._entries:
            first.append(first[-1] + entry.n)
        self._first = first
        # one difference over the offsets of all files, without those between two files: a loop over 20,000 files is slow
        offsets = np.concatenate([_NONE, *(e.ep_offsets for e in self._entries)])
        between = np.array(first[1:-1], np.int64) + np.arange(max(0, len(first) - 2))
        self.lengths: np.ndarray = np.delete(np.diff(offsets), between)
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

    def schema(self, index: int) -> sc.Schema:
        """The fields of a trajectory; one object for all that have the same."""
        return self._find(index)[0].schema

    def env_name(self, index: int) -> str:
        """The environment's name."""
        entry, j = self._find(index)
        return entry.env_names[entry.env_id[j]]

    def env_ids(self) -> tuple[np.ndarray, list[str]]:
        """The environments' names without repetitions, and for each trajectory the place of its name among them, (n,) int64."""
        places: dict[str, int] = {}
        found = [np.array([places.setdefault(n, len(places)) for n in e.env_names])[e.env_id] for e in self._entries]
        used, ids = np.unique(
            np.concatenate([_NONE, *found]), return_inverse=True
        )  # a file may list a name that it does not use
        names = list(places)
        return ids, [names[i] for i in used]

    def files(self) -> list[tuple[str, int, int]]:
        """For each file, "partition/name" and the indices [first, stop) of its trajectories."""
        return [(e.where, i, i + e.n) for i, e in zip(self._first, self._entries)]

    def file_of(self, index: int) -> str:
        """The file that holds a trajectory, "partition/name"."""
        return self._find(index)[0].where

    def path(self, index: int) -> str:
        """The file that holds a trajectory."""
        return os.path.join(self._root, self.file_of(index))

    def indices_in(self, paths: Collection[str]) -> np.ndarray:
        """The indices, (n,) int64, of the trajectories in these files, given by their absolute paths."""
        root = os.path.abspath(self._root)
        found = [np.arange(first, stop) for where, first, stop in self.files() if os.path.join(root, where) in paths]
        return np.concatenate([_NONE, *found])

    def kinds(self) -> list[tuple[int, sc.Schema]]:
        """The different schemas of the files, and the index of a trajectory of each."""
        return list({id(e.schema): (first, e.schema) for first, e in zip(self._first, self._entries)}.values())

    def read(
        self,
        index: int,
        start: int = 0,
        stop: int | None = None,
        keys: Iterable[str] | None = None,
        extras: Iterable[ExtraField] | None = None,
    ) -> StoredTraj:
        """Transitions [start, stop) of a trajectory with the stop - start + 1 observations around them.

        ``start_time``, ``prev_reward`` and ``prev_action`` belong to the slice. The arrays are new and may be changed.

        Args:
            index: 0 to ``len(self) - 1``.
            start: 0 to T - 1.
            stop: start + 1 to T; more, or None, means T.
            keys: the observations wanted; None means all.
            extras: the extra fields wanted, with their defaults where the file lacks them; None means all of the file.

        Raises:
            IndexError, ValueError, KeyError: no such trajectory, slice or observation key, or an extra field that was
                recorded with other rows, shape or dtype.
            EvictedError: its file has been deleted since the view was made, or cannot be read now; draw another index.
            DamagedError: its file has been damaged since it was checked (an `EvictedError` too).
        """
        entry, j = self._find(index)
        length = entry.ep_offsets.item(j + 1) - entry.ep_offsets.item(j)
        stop = length if stop is None or stop > length else int(stop)
        start = int(start)
        if not 0 <= start < stop:
            raise ValueError(f"transitions [{start}, {stop}) of a trajectory of {length} are none")
        n, slots = stop - start, entry.schema.slots(keys, extras)
        arrays = [np.empty((s.take(n), *s.field.shape), s.field.dtype) for s in slots]
        start_time = self._fill(entry, j, start, slots, arrays)
        return _stored(slots, arrays, start_time, entry.env_names[entry.env_id.item(j)])

    def read_into(self, index: int, start: int, buffers: tuple[Slots, Arrays]) -> int:
        """Fill arrays of the caller with the transitions [start, start + steps).

        Args:
            index, start: as in `read`.
            buffers: (slots, arrays): the fields to read, of the trajectory's `schema`, and for each a contiguous array of
                steps + 1, steps or 1 rows, by the slot's ``rows``, and one more, in front, where the slot has a field ``before``
                (the reward and the action that came with the first observation).

        Returns:
            the time index of the first observation.

        Raises:
            EvictedError, DamagedError: as `read`; the content of ``arrays`` is then undefined.
        """
        slots, arrays = buffers
        return self._fill(*self._find(index), start, slots, arrays)

    def _fill(self, entry: Entry, j: int, start: int, slots: Slots, arrays: Arrays) -> int:
        problem = "it is being written to"
        for _ in range(_ATTEMPTS):
            if entry.gone:
                raise EvictedError(f"{entry.where} has been deleted from the buffer; draw another index")
            checked = entry.size, entry.mtime_ns  # now: another thread may check the file again while this one reads
            try:
                file = self._open_files.get(entry, *checked)
                if entry.original:
                    read_original(file.fd, entry.places, entry.schema, start, slots, arrays)
                else:
                    _read(file.fd, entry, j, start, slots, arrays)
                info = _fstat(file.fd)  # last: a write before or during the reading is seen
                if (info.st_size, info.st_mtime_ns) == checked:
                    return entry.start_time.item(j) + start  # type: ignore[no-any-return]
            except (BadFileError, FileNotFoundError):
                pass  # of what was read, nothing may be used
            except OSError as err:
                if err.errno not in _UNREADABLE:
                    raise
                problem = str(err)
            self._recheck(entry)
        raise self._give_up(entry, EvictedError(f"{entry.where} cannot be read now: {problem}; draw another index"))

    def _recheck(self, entry: Entry) -> None:
        self._open_files.clear()
        try:
            ix.recheck(self._root, entry)
        except EvictedError as err:
            raise self._give_up(entry, err) from None
        except Exception as err:
            problem = DamagedError(f"{os.path.join(self._root, entry.where)} has been damaged: {err}; draw another index")
            raise self._give_up(entry, problem, err) from err

    def _give_up(self, entry: Entry, problem: EvictedError, reason: Exception | None = None) -> EvictedError:
        """Exclude the file from sampling; returns the error to raise."""
        entry.gone = True
        self._open_files.clear()
        if self.lost is not None and (tell := self.lost()) is not None:
            tell(entry, reason or problem)
        return problem

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"lost": None}  # a copy elsewhere reads without the store


def _read(fd: int, entry: Entry, j: int, start: int, slots: Slots, arrays: Arrays) -> None:
    places, first = entry.places, entry.ep_offsets.item(j) + start
    for (_, _, field, i, before, size, _), out in zip(slots, arrays):
        rows = field.rows
        if i < 0:
            out[...] = field.default
        elif rows == "T+1":
            _fetch(fd, places[i], size, first + j, out)
        elif rows == "1":
            _fetch(fd, places[i], size, j, out)
        elif before < 0:
            _fetch(fd, places[i], size, first, out)
        elif start:  # the row before holds the reward and action that came with the first observation
            _fetch(fd, places[i], size, first - 1, out)
        else:
            _fetch(fd, places[i], size, first, out[1:])
            _fetch(fd, places[before], size, j, out[:1])


def _stored(slots: Slots, arrays: Arrays, start_time: int, env_name: str) -> StoredTraj:
    groups: dict[str, dict[str, Any]] = {"obs": {}, "extras": {}, "": {}}
    for slot, a in zip(slots, arrays):
        groups[slot[0]][slot[1]] = a
    fields = groups[""]
    rews, actions = fields["rews"], fields["actions"]
    fields["rews"], fields["actions"] = rews[1:], actions[1:]
    return StoredTraj(
        groups["obs"], start_time=start_time, prev_reward=rews.item(0), prev_action=actions[0], env_name=env_name,
        extras=groups["extras"], **fields,
    )  # fmt: skip


def _fetch(fd: int, place: int | Member, size: int, row: int, out: np.ndarray) -> None:
    """The rows of an array from ``row`` on, of ``size`` bytes each, into all of ``out``."""
    if isinstance(place, Member):
        out[...] = place.read(fd, row, row + len(out)).reshape(out.shape)
    elif size:
        at, wanted = place + row * size, out.nbytes
        got = _preadv(fd, (out,), at)
        while got < wanted:  # more than 2 GB, or the end of a file that was cut short
            more = _preadv(fd, (out.reshape(-1).view(np.uint8)[got:],), at + got)
            if not more:
                raise BadFileError(f"it ends at byte {at + got}, {wanted - got} bytes early")
            got += more
