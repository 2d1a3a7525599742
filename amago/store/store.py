"""The buffer on disk: finds new files, checks each once, deletes the oldest, and provides views for reading."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago import system
from amago.data.extras import ExtraField
from amago.data.trajectory import StoredTraj
from amago.spaces import ActionSpec
from amago.store import formats
from amago.store import index as ix
from amago.store.files import TEMPORARY, BadFileError, EvictedError, PickleRefusedError, is_stale
from amago.store.index import FIFO, PARTITIONS, PROTECTED, Entry, RefusedFiles, Stamps
from amago.store.schema import Schema, schema_of, spaces_text
from amago.store.view import OpenFiles, StoreView

logger = logging.getLogger(__name__)
_stores: weakref.WeakSet[TrajectoryStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in list(_stores):  # another thread of the parent may have been refreshing
        store._lock = threading.RLock()


system.after_fork_in_child(_after_fork_in_child)


@dataclass
class RefreshReport:
    """The changes made by one `TrajectoryStore.refresh`.

    Attributes:
        added, added_files: trajectories and files that are new.
        evicted, evicted_files: deleted because ``fifo`` had grown past its limit.
        vanished_files: files that another process deleted or moved away.
        quarantined_files: files that are damaged or not trajectory files.
        temporary_files: deleted temporary files of writers that were killed.
    """

    added: int = 0
    added_files: int = 0
    evicted: int = 0
    evicted_files: int = 0
    vanished_files: int = 0
    quarantined_files: int = 0
    temporary_files: int = 0


def _excess(files: Iterable[Entry], *limits: float) -> list[Entry]:
    """The files to delete, oldest first: the fewest after which none of the remaining could go without falling below a limit
    that is exceeded. Whole files are deleted, so each sum may remain above its limit by less than one file.

    Args:
        files: the oldest first.
        limits: of trajectories, steps and bytes.
    """
    sizes = [(e, (e.n, e.total, e.size)) for e in files]
    have = [sum(column) for column in zip(*(size for _, size in sizes))] or [0, 0, 0]
    doomed = []
    for entry, size in sizes:
        after = [h - less for h, less in zip(have, size)]
        if not any(h > most and left >= most for h, left, most in zip(have, after, limits)):
            break
        doomed.append(entry)
        have = after
    return doomed


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
        max_trajectories, max_steps, max_bytes: limits of ``fifo``, which all hold at the same time. Whole files are deleted, so
            up to one file more may remain.
        edit: whether to delete files, move damaged ones to quarantine, and record the order.

    Raises:
        ValueError: a limit is negative or not a number.
    """

    def __init__(
        self,
        root: str | Path,
        max_trajectories: float = inf,
        *,
        max_steps: float = inf,
        max_bytes: float = inf,
        edit: bool = True,
    ) -> None:
        for name, limit in (("trajectories", max_trajectories), ("steps", max_steps), ("bytes", max_bytes)):
            if not limit >= 0:
                raise ValueError(f"max_{name} is {limit}, but must be at least 0")
        self.max_trajectories, self.max_steps, self.max_bytes = max_trajectories, max_steps, max_bytes
        self.root, self.edit = Path(root), edit
        for partition in PARTITIONS:
            (self.root / partition).mkdir(parents=True, exist_ok=True)
        self._open_files = OpenFiles(str(self.root))
        self._lock = threading.RLock()  # held to change the index, not to read
        _stores.add(self)
        self._refused = RefusedFiles(self.root, edit)
        self._given: Schema | None = None  # of files that record no spaces
        self._files: dict[str, dict[str, Entry]] = {p: {} for p in PARTITIONS}  # by name, in order of ingestion
        self._known = False  # True after the first refresh
        self._unsaved = 0  # files that the saved index lacks
        self._ingested = self._evicted = self._collected_steps = 0
        self._vanished = 0  # files that readers have missed since the last refresh
        self._peak = 0
        self._publish()

    def _publish(self) -> None:
        self._view = StoreView(self.root, self._live(), self._open_files, weakref.WeakMethod(self._take_out))
        self._peak = max(self._peak, len(self._view))

    def _live(self) -> list[Entry]:
        """All files, in their order."""
        return [e for p in PARTITIONS for e in self._files[p].values()]

    def _take_out(self, entry: Entry, reason: Exception) -> None:
        """Remove a file that a reader could not use from the index, and move it to quarantine if it is damaged."""
        with self._lock:
            files = self._files[entry.partition]
            if files.get(entry.name) is not entry:
                return  # deleted, or removed by another thread
            del files[entry.name]
            if not isinstance(reason, EvictedError):
                self._refused.set_aside(entry.partition, entry.name, reason)
            else:
                level = logging.WARNING if self.edit else logging.DEBUG  # another process edits, and may delete
                logger.log(level, "%s", reason)
                self._vanished += not os.path.lexists(self.root / entry.where)
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
            n = {p: sum(e.n for e in self._files[p].values()) for p in PARTITIONS}
            every = self._live()
            found = {
                "trajectories": sum(n.values()),
                "trajectories_fifo": n[FIFO],
                "trajectories_protected": n[PROTECTED],
                "timesteps": sum(e.total for e in every),
                "bytes": sum(e.size for e in every),
                "files": len(every),
                "ingested": self._ingested,
                "evicted": self._evicted,
                "quarantined": self._refused.count,
            }
        return {name: float(value) for name, value in found.items()}

    @property
    def collected_steps(self) -> int:
        """Transitions that have ever been found in ``fifo``, those deleted since included. `load_state_dict` goes on with the
        count of the state, to which it adds the files in ``fifo`` that came after it."""
        return self._collected_steps

    def refused(self) -> dict[str, str]:
        """{path: reason} of the files, as of the last `refresh`, that are not sampled: skipped, unreadable or in quarantine."""
        with self._lock:
            return self._refused.reasons()

    # Changing

    def set_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
        """The spaces of the files that do not record any (`amago.store.formats`), now and in later refreshes.

        Raises:
            ValueError: such a file does not fit them.
        """
        with self._lock:
            self._given = schema_of(spaces_text(obs_space, action_space))
            found = [e for e in self._live() if e.original]
            for entry in found:
                try:
                    ix.give_spaces(self._given, entry, self.root)
                except BadFileError as err:
                    raise ValueError(f"{self.root / entry.where} does not fit the environment: {err}") from err
            if found:
                self._publish()

    def refresh(self, *, evict: bool = True) -> RefreshReport:
        """Check and add new files, remove missing ones from the index, and delete the oldest beyond the limit.

        A file that is damaged or not a trajectory file is moved to ``{root}/quarantine`` (skipped if ``edit`` is False),
        counted, and logged with the reason. Files of the original system are never moved nor deleted.

        Args:
            evict: False: delete nothing; see `evict`.

        Raises:
            PickleRefusedError: the buffer has ``.traj`` files when it is first read. (Later ones are logged and skipped.)
        """
        with self._lock:
            report, new = RefreshReport(vanished_files=self._vanished), []
            self._vanished = 0
            refused, first = self._refused, not self._known
            refused.unreadable = {}
            refused.skipped = {path: reason for path, reason in refused.skipped.items() if os.path.lexists(path)}
            recorded: Stamps = ix.read_order(self.root) if first else {}
            saved = ix.read_index(self.root) if first else {}
            place = {key: i for i, key in enumerate(recorded)}
            if first:
                report.temporary_files += sum(self._remove_stale(".", name) for name in os.listdir(self.root))
            listed = {p: os.listdir(self.root / p) for p in PARTITIONS}
            pickles = sorted(
                self.root / p / n for p in PARTITIONS for n in listed[p] if n.endswith(formats.PICKLE) and n[0] != "."
            )
            if pickles and first:
                raise PickleRefusedError.of(pickles[0], len(pickles))
            for partition, files in self._files.items():
                for name in files.keys() - set(listed[partition]):
                    files.pop(name).gone = True
                    report.vanished_files += 1
                found = self._check(
                    partition, [name for name in listed[partition] if name not in files], recorded, saved, report
                )
                found.sort(key=lambda e: (place.get((e.partition, e.name), len(place)), e.sequence, e.writer, e.name))
                files.update((e.name, e) for e in found)
                new += found
                if partition == FIFO:
                    self._collected_steps += sum(e.total for e in found)
            self._known = True
            report.added_files, report.added = len(new), sum(e.n for e in new)
            self._ingested += report.added
            if self.edit and any(recorded.get((e.partition, e.name)) != (e.size, e.mtime_ns) for e in new):
                ix.write_order(self.root, self._live())
            self._unsaved += sum((e.partition, e.name) not in saved for e in new)
            if self.edit and self._unsaved >= max(
                ix.WORTH_SAVING, len(self._live()) / 4
            ):  # took longer to check than saving takes
                ix.write_index(self.root, self._live())
                self._unsaved = 0
            if evict:
                gone = self.evict()
                report.evicted, report.evicted_files = gone.evicted, gone.evicted_files
            if new or report.vanished_files:
                self._publish()
            return report

    def _check(
        self,
        partition: str,
        names: list[str],
        recorded: Stamps,
        saved: Mapping[tuple[str, str], Entry],
        report: RefreshReport,
    ) -> list[Entry]:
        """The entries of new files that can be sampled.

        Args:
            recorded: files that were compared with their checksums before, so that the header is enough.
            saved: entries of such files, which need not be opened.
        """
        found, directory = [], self.root / partition
        for name in names:
            if (path := f"{directory}/{name}") in self._refused.skipped:
                continue
            if name.startswith("."):
                report.temporary_files += self._remove_stale(partition, name)
                continue
            try:
                known = recorded.get((partition, name))
                entry = saved.get((partition, name))
                if entry is None or not (entry.size, entry.mtime_ns) == known == ix.stamp(path):
                    entry = ix.load(self.root, partition, name, known)
                if entry.original and self._given is not None:
                    ix.give_spaces(self._given, entry, self.root)
                found.append(entry)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except OSError as err:
                self._refused.unreadable[path] = f"it cannot be read now: {err}"
                logger.warning("%s cannot be read now: %s", path, err)
            except Exception as err:  # no file may stop the training, whatever error it causes
                report.quarantined_files += 1
                self._refused.set_aside(partition, name, err)
        return found

    def _remove_stale(self, partition: str, name: str) -> int:
        """Delete a file if it is a temporary one of a writer that was killed; returns how many were deleted."""
        directory = self.root / partition
        if not (self.edit and name.startswith(TEMPORARY) and is_stale(directory, name)):
            return 0
        try:
            os.unlink(directory / name)
        except OSError as err:
            logger.warning("%s/%s cannot be removed: %s", directory, name, err)
            return 0
        return 1

    def evict(self) -> RefreshReport:
        """Delete the oldest files beyond the limits, as of the last `refresh`."""
        with self._lock:
            files = self._files[FIFO]
            own = [e for e in files.values() if not e.original]
            doomed = _excess(own, self.max_trajectories, self.max_steps, self.max_bytes) if self.edit else []
            for entry in doomed:
                del files[entry.name]
            if doomed:
                self._publish()  # first, so that readers do not draw files that will be deleted
            self._unlink(doomed)
            report = RefreshReport(evicted=sum(e.n for e in doomed), evicted_files=len(doomed))
            self._evicted += report.evicted
            return report

    def _unlink(self, doomed: list[Entry]) -> None:
        """Delete files that are not in the index any more; one that cannot be deleted is skipped from now on."""
        for entry in doomed:
            entry.gone = True
            path = self.root / entry.where
            try:
                path.unlink(missing_ok=True)
            except OSError as err:
                self._refused.skip(path, f"it cannot be deleted: {err}")
        if doomed:
            self._open_files.clear()  # a deleted file takes space until it is closed

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
                doomed += [e for e in files.values() if not e.original]
                self._files[partition] = {name: e for name, e in files.items() if e.original}
            self._publish()  # first, so that readers do not draw files that will be deleted
            self._unlink(doomed)
            if delete_quarantine:
                self._refused.delete_quarantine()
            for name in (ix.JOURNAL, ix.CACHE):
                (self.root / name).unlink(missing_ok=True)
            if live := self._live():
                ix.write_order(self.root, live)

    def close(self) -> None:
        """Close all files. Reading opens them again."""
        self._open_files.clear()

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
                    "quarantined": self._refused.count,
                    "collected_steps": self._collected_steps,
                },
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refresh, restore the order of the files (those not in ``state`` come last), and restore the counters.

        Raises:
            ValueError: not a state of this class.
        """
        if state.get("version") != 1:
            raise ValueError(f"state has version {state.get('version')!r}, not 1")
        order, counters = state["order"], state["counters"]
        with self._lock:
            self.refresh(evict=False)  # the oldest of the saved order are the first to go
            for partition, files in self._files.items():
                known = {name: files[name] for name in order[partition] if name in files}
                self._files[partition] = known | files
            self._ingested, self._evicted, self._refused.count = (counters[k] for k in ("ingested", "evicted", "quarantined"))
            if "collected_steps" in counters:
                later = self._files[FIFO].keys() - order[FIFO]
                self._collected_steps = counters["collected_steps"] + sum(self._files[FIFO][name].total for name in later)
            self._publish()
            if self.edit:
                ix.write_order(self.root, self._live())

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {k: v for k, v in self.__dict__.items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()
        _stores.add(self)
        self._view.lost = weakref.WeakMethod(self._take_out)
