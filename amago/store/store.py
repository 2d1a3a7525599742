"""The buffer on disk: finds new files, checks each once, deletes the oldest, and provides views for reading."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago.data.extras import ExtraField
from amago.data.trajectory import StoredTraj
from amago.spaces import ActionSpec
from amago.store import index as ix
from amago.store.errors import EvictedError
from amago.store.file_cache import FileCache
from amago.store.index import Entry
from amago.store.intake import FIFO, PARTITIONS, PROTECTED, Intake, RefreshReport
from amago.store.limits import Limits
from amago.store.quarantine import Quarantine
from amago.store.record import Record, Stamps
from amago.store.view import Lost, StoreView

logger = logging.getLogger(__name__)


_stores: weakref.WeakSet[TrajectoryStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in list(_stores):  # another thread of the parent may have been refreshing
        store._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


class TrajectoryStore:
    """The trajectories in ``{root}/fifo`` (oldest deleted past a limit) and ``{root}/protected`` (never deleted).

    Indices run over protected files, then fifo files, oldest first, and stay as they are until the next `refresh`, or until
    a file is found damaged or missing when it is read. Such a file is removed from the index; a damaged one is moved to
    quarantine. Age is the order in which files were found, which is kept in ``{root}/order.journal``; files found at the same
    time are ordered by sequence number and writer. Clocks and time stamps do not matter.

    Every method may be called from any thread. A thread that draws indices while another refreshes should use one `view`
    throughout. One process edits a buffer; others, with ``edit=False``, may read it and write into it.

    Args:
        root: the buffer's directory, ``{dset_root}/{dset_name}/buffer``; created if it does not exist.
        max_trajectories, max_steps, max_bytes: limits of ``fifo`` (`amago.store.limits.Limits`). Whole files are deleted, so up to
            one file more may remain.
        edit: whether to delete files, move damaged ones to quarantine, and record the order.
        allow_pickle: also read ``.traj`` pickles; otherwise the first `refresh` refuses a buffer that has any.
    """

    def __init__(
        self,
        root: str | Path,
        max_trajectories: float = inf,
        *,
        max_steps: float = inf,
        max_bytes: float = inf,
        edit: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        Limits(max_trajectories, max_steps, max_bytes)  # refuses what is not a limit
        self.max_trajectories, self.max_steps, self.max_bytes = max_trajectories, max_steps, max_bytes
        self.root, self.edit, self.allow_pickle = Path(root), edit, allow_pickle
        for partition in PARTITIONS:
            (self.root / partition).mkdir(parents=True, exist_ok=True)
        self._cache = FileCache()
        self._lock = threading.RLock()  # held to change the index, not to read
        _stores.add(self)
        self._record = Record(self.root)
        self._intake = Intake(self.root, edit, allow_pickle, self._record)
        self._files: dict[str, dict[str, Entry]] = {p: {} for p in PARTITIONS}  # by name, in order of ingestion
        self._recorded: Stamps | None = None  # the journal, until the first refresh has used it
        self._ingested = self._evicted = self._collected_steps = 0
        self._taken_out = 0  # files removed by readers since the index was published
        self._vanished = 0  # of these, files that were missing, since the last refresh
        self._peak = 0
        self._publish()

    @property
    def quarantine(self) -> Quarantine:
        """The directory of damaged files."""
        return self._intake.quarantine

    def _publish(self) -> None:
        self._view, self._taken_out = StoreView(str(self.root), self._live(), self._cache, self._listener()), 0
        self._peak = max(self._peak, len(self._view))

    def _live(self) -> list[Entry]:
        """All files, in their order."""
        return [e for p in PARTITIONS for e in self._files[p].values()]

    def _listener(self) -> Lost:
        store = weakref.ref(self)

        def lost(entry: Entry, reason: Exception) -> None:
            if (owner := store()) is not None:
                owner._take_out(entry, reason)

        return lost

    def _take_out(self, entry: Entry, reason: Exception) -> None:
        """Remove a file that a reader could not use from the index, and move it to quarantine if it is damaged."""
        with self._lock:
            files = self._files[entry.partition]
            if files.get(entry.name) is not entry:
                return  # deleted, or removed by another thread
            del files[entry.name]
            if not isinstance(reason, EvictedError):
                self._intake.set_aside(entry.partition, entry.name, reason)
            else:
                logger.log(
                    logging.WARNING if self.edit else logging.DEBUG, "%s", reason
                )  # another process edits, and may delete
                self._vanished += not os.path.lexists(self.root / entry.partition / entry.name)
            self._taken_out += 1
            if 20 * self._taken_out >= sum(map(len, self._files.values())):  # with fewer, readers draw again
                self._publish()

    # Reading

    def view(self) -> StoreView:
        """The current trajectories, with indices that later refreshes do not change."""
        return self._view

    def __len__(self) -> int:
        return len(self._view)

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64, transitions of each trajectory."""
        return self._view.lengths

    def read(
        self,
        index: int,
        start: int = 0,
        stop: int | None = None,
        keys: Iterable[str] | None = None,
        extras: Iterable[ExtraField] | None = None,
    ) -> StoredTraj:
        """`StoreView.read` of the current view; an index beyond its end that was valid before raises `EvictedError`."""
        view = self._view
        if len(view) <= index < self._peak:
            raise EvictedError(f"index {index} was drawn before files were deleted; there are {len(view)} trajectories now")
        return view.read(index, start, stop, keys, extras)

    def action_spec(self, index: int) -> ActionSpec:
        """The recorded action space of a trajectory."""
        return self._view.action_spec(index)

    def obs_space(self, index: int) -> gym.spaces.Dict:
        """The recorded observation space of a trajectory."""
        return self._view.obs_space(index)

    def env_name(self, index: int) -> str:
        """The environment's name during a trajectory."""
        return self._view.env_name(index)

    def paths_in(self, partition: str) -> list[str]:
        """Absolute paths of the files in ``fifo`` or ``protected`` that are sampled, the oldest first."""
        directory = os.path.abspath(self.root / partition)
        with self._lock:
            return [f"{directory}/{name}" for name in self._files[partition]]

    def paths(self) -> set[str]:
        """Absolute paths of all files that are sampled."""
        return {path for p in PARTITIONS for path in self.paths_in(p)}

    def info(self) -> dict[str, float]:
        """Sizes and counters, for logging. `load_state_dict` restores the counters."""
        with self._lock:
            fifo, protected = (list(self._files[p].values()) for p in (FIFO, PROTECTED))
            every = fifo + protected
            return {
                "trajectories": float(sum(e.n for e in every)),
                "trajectories_fifo": float(sum(e.n for e in fifo)),
                "trajectories_protected": float(sum(e.n for e in protected)),
                "timesteps": float(sum(e.total for e in every)),
                "bytes": float(sum(e.size for e in every)),
                "files": float(len(every)),
                "ingested": float(self._ingested),
                "evicted": float(self._evicted),
                "quarantined": float(self._intake.refused_files),
            }

    @property
    def collected_steps(self) -> int:
        """Transitions that have ever been found in ``fifo``, those deleted since included. `load_state_dict` goes on with the count of
        the state, to which it adds the files in ``fifo`` that came after it."""
        return self._collected_steps

    def refused(self) -> dict[str, str]:
        """{path: reason} of the files, as of the last `refresh`, that are not sampled: skipped, unreadable or in quarantine."""
        with self._lock:
            return self._intake.refused()

    # Changing

    def set_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
        """The spaces of the files that do not record any (`amago.store.original`), now and in later refreshes.

        Raises:
            ValueError: such a file does not fit them.
        """
        with self._lock:
            found = [e for e in self._live() if e.kind == ix.ORIGINAL]
            self._intake.set_spaces(obs_space, action_space, found)
            if found:
                self._publish()

    def refresh(self, *, evict: bool = True) -> RefreshReport:
        """Check and add new files, remove missing ones from the index, and delete the oldest beyond the limit.

        A file that is damaged or not a trajectory file is moved to ``{root}/quarantine`` (skipped if ``edit`` is False), counted,
        and logged with the reason. Files of the original system are never moved nor deleted.

        Args:
            evict: False: delete nothing; see `evict`.

        Raises:
            PickleRefusedError: the buffer has ``.traj`` files when it is first read, and ``allow_pickle`` is False. (Later
                ones are logged and skipped.)
        """
        with self._lock:
            report, new = RefreshReport(vanished_files=self._vanished), []
            self._vanished = 0
            self._intake.unreadable = {}
            first = self._recorded is None
            recorded = self._record.load() if self._recorded is None else self._recorded
            if first:
                self._intake.open_index()
                report.temporary_files += sum(self._intake.remove_stale(".", name) for name in os.listdir(self.root))
            listed = {p: os.listdir(self.root / p) for p in PARTITIONS}
            self._intake.refuse_pickles(listed, first)
            for partition in PARTITIONS:
                self._forget_missing(partition, set(listed[partition]), report)
                unknown = [name for name in listed[partition] if name not in self._files[partition]]
                found = self._intake.check(partition, unknown, recorded, report)
                place = {key: i for i, key in enumerate(recorded)} if first else {}
                last = len(place)
                found.sort(key=lambda e: (place.get((e.partition, e.name), last), e.sequence, e.writer, e.name))
                self._files[partition].update((e.name, e) for e in found)
                new += found
                if partition == FIFO:
                    self._collected_steps += sum(e.total for e in found)
            self._recorded = {}
            self._intake.close_index()
            report.added_files, report.added = len(new), sum(e.n for e in new)
            self._ingested += report.added
            if self.edit:
                self._record.add(self._live(), new, recorded)
            if evict:
                self._evict(report)
            if self.edit:
                self._record.save_index(self._live())
            if new or report.evicted_files or report.vanished_files or self._taken_out:
                self._publish()
            return report

    def evict(self) -> RefreshReport:
        """Delete the oldest files beyond the limits, as of the last `refresh`."""
        with self._lock:
            report = RefreshReport()
            self._evict(report)
            return report

    def _forget_missing(self, partition: str, present: set[str], report: RefreshReport) -> None:
        files = self._files[partition]
        for name in [n for n in files if n not in present]:
            self._retire(files.pop(name))
            report.vanished_files += 1
        self._intake.forget_missing(partition, present)

    def _evict(self, report: RefreshReport) -> None:
        files = self._files[FIFO]
        own = [e for e in files.values() if e.kind != ix.ORIGINAL]
        doomed = Limits(self.max_trajectories, self.max_steps, self.max_bytes).excess(own) if self.edit else []
        for entry in doomed:
            del files[entry.name]
        if doomed:
            self._publish()  # first, so that readers do not draw files that will be deleted
        self._unlink(doomed)
        report.evicted, report.evicted_files = sum(e.n for e in doomed), len(doomed)
        self._evicted += report.evicted

    def _unlink(self, doomed: list[Entry]) -> None:
        """Delete files that are not in the index any more; one that cannot be deleted is skipped from now on."""
        for entry in doomed:
            self._retire(entry)
            path = self.root / entry.partition / entry.name
            try:
                path.unlink(missing_ok=True)
            except OSError as err:
                self._intake.bad[entry.partition][entry.name] = f"it could not be deleted: {err}"
                logger.warning("%s cannot be deleted: %s", path, err)

    def _retire(self, entry: Entry) -> None:
        entry.gone = True
        self._cache.drop(entry)

    def delete(self, *, delete_protected: bool = False, delete_quarantine: bool = False) -> None:
        """Delete the trajectories in ``fifo`` from disk.

        Only files of the store are deleted: those that it can read, after a `refresh`, and in quarantine those that are named
        as it names files.

        Args:
            delete_protected: also those in ``protected``, where data lies that is sampled but never deleted otherwise.
            delete_quarantine: also damaged files in ``quarantine``.

        Raises:
            PermissionError: the store was opened with ``edit=False``.
            PickleRefusedError: as `refresh`.
        """
        if not self.edit:
            raise PermissionError(f"the buffer {self.root} was opened with edit=False and cannot be deleted")
        with self._lock:
            self.refresh()
            doomed: list[Entry] = []
            for partition in PARTITIONS if delete_protected else (FIFO,):
                files = self._files[partition]
                doomed += [e for e in files.values() if e.kind != ix.ORIGINAL]
                self._files[partition] = {name: e for name, e in files.items() if e.kind == ix.ORIGINAL}
            self._publish()  # first, so that readers do not draw files that will be deleted
            self._unlink(doomed)
            if delete_quarantine:
                self.quarantine.clear()
            self._record.forget_deleted(self._live())

    def close(self) -> None:
        """Close all files. Reading opens them again."""
        self._cache.clear()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The order of the files and the counters, as JSON types."""
        with self._lock:
            return {
                "version": 1,
                "order": {p: list(self._files[p]) for p in PARTITIONS},
                "counters": {
                    "ingested": self._ingested,
                    "evicted": self._evicted,
                    "quarantined": self._intake.refused_files,
                    "collected_steps": self._collected_steps,
                },
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refresh, restore the order of the files (those not in ``state`` come last), and restore the counters.

        Raises:
            ValueError: not a state of this class.
        """
        try:
            if state["version"] != 1:
                raise ValueError(f"state has version {state['version']!r}, not 1")
            order = {p: list(state["order"][p]) for p in PARTITIONS}
            counters = [int(state["counters"][k]) for k in ("ingested", "evicted", "quarantined")]
            steps = state["counters"].get("collected_steps")
        except (KeyError, TypeError) as err:
            raise ValueError(f"not the state of a TrajectoryStore: {err!r}") from err
        with self._lock:
            self.refresh(evict=False)  # the oldest of the saved order are the first to go
            for partition in PARTITIONS:
                files = self._files[partition]
                known = {name: files[name] for name in order[partition] if name in files}
                self._files[partition] = known | {name: entry for name, entry in files.items() if name not in known}
            self._ingested, self._evicted, self._intake.refused_files = counters
            if steps is not None:
                later = set(self._files[FIFO]).difference(order[FIFO])
                self._collected_steps = int(steps) + sum(self._files[FIFO][name].total for name in later)
            self._publish()
            if self.edit:
                self._record.replace(self._live())

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {k: v for k, v in self.__dict__.items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()
        self._view._lost = self._listener()
        _stores.add(self)
