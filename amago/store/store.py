"""The buffer on disk: finds new files, checks each once, deletes the oldest, and provides views for reading."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from amago.data.extras import ExtraField
from amago.data.trajectory import StoredTraj
from amago.spaces import ActionSpec
from amago.store import index as ix
from amago.store import index_cache, legacy, original
from amago.store.errors import BadFileError, EvictedError
from amago.store.file_cache import FileCache
from amago.store.files import TEMPORARY, is_stale
from amago.store.index import Entry
from amago.store.limits import Limits
from amago.store.quarantine import Quarantine, reason_of
from amago.store.view import Lost, StoreView

logger = logging.getLogger(__name__)

FIFO, PROTECTED = "fifo", "protected"
PARTITIONS = (PROTECTED, FIFO)
"""In the order of their indices."""

WORTH_SAVING = 64
"""The index of fewer new files is not saved: checking that many headers takes some 10 ms."""


@dataclass
class RefreshReport:
    """What one `TrajectoryStore.refresh` did.

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
        self._journal, self.quarantine = ix.Journal(self.root), Quarantine(self.root)
        self._schemas = ix.Schemas()
        self._files: dict[str, dict[str, Entry]] = {p: {} for p in PARTITIONS}  # by name, in order of ingestion
        self._bad: dict[str, dict[str, str]] = {p: {} for p in PARTITIONS}  # files that are skipped: name -> reason
        self._unreadable: dict[str, str] = {}  # path -> reason, as of the last refresh
        self._recorded: dict[tuple[str, str], tuple[int, int]] | None = None  # the journal, until the first refresh has used it
        self._given: original.Spaces | None = None  # of files that record none
        self._shortcut: index_cache.IndexCache | None = None  # in use during the first refresh only
        self._looked_into = 0  # files that the saved index lacks
        self._ingested = self._evicted = self._quarantined = self._collected_steps = 0
        self._rewrite = False  # whether the journal is incomplete
        self._taken_out = 0  # files removed by readers since the index was published
        self._vanished = 0  # of these, files that were missing, since the last refresh
        self._peak = 0
        self._publish()

    def _publish(self) -> None:
        entries = [e for p in PARTITIONS for e in self._files[p].values()]
        self._view, self._taken_out = StoreView(str(self.root), entries, self._cache, self._listener()), 0
        self._peak = max(self._peak, len(self._view))

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
                self._quarantine(entry.partition, entry.name, reason)
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
                "quarantined": float(self._quarantined),
            }

    @property
    def collected_steps(self) -> int:
        """Transitions that have ever been found in ``fifo``, those deleted since included. `load_state_dict` goes on with the count of
        the state, to which it adds the files in ``fifo`` that came after it."""
        return self._collected_steps

    def refused(self) -> dict[str, str]:
        """{path: reason} of the files, as of the last `refresh`, that are not sampled: skipped, unreadable or in quarantine."""
        with self._lock:
            skipped = {str(self.root / p / name): reason for p in PARTITIONS for name, reason in self._bad[p].items()}
            return skipped | self._unreadable | self.quarantine.reasons()

    # Changing

    def set_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any]) -> None:
        """The spaces of the files that do not record any (`amago.store.original`), now and in later refreshes.

        Raises:
            ValueError: such a file does not fit them.
        """
        with self._lock:
            self._given = original.Spaces(obs_space, action_space, self._schemas)
            found = [e for p in PARTITIONS for e in self._files[p].values() if e.kind == ix.ORIGINAL]
            for entry in found:
                try:
                    self._given.give(entry, self.root)
                except BadFileError as err:
                    raise ValueError(f"{self.root / entry.partition / entry.name} does not fit the environment: {err}") from err
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
            self._unreadable = {}
            first = self._recorded is None
            recorded = self._journal.load() if self._recorded is None else self._recorded
            if first:
                self._shortcut = index_cache.IndexCache(self.root, self._schemas)
                report.temporary_files += sum(self._remove_stale(".", name) for name in os.listdir(self.root))
            listed = {p: os.listdir(self.root / p) for p in PARTITIONS}
            self._refuse_pickles(listed, first)
            for partition in PARTITIONS:
                self._forget_missing(partition, set(listed[partition]), report)
                found = self._ingest(partition, listed[partition], recorded, report)
                place = {key: i for i, key in enumerate(recorded)} if first else {}
                last = len(place)
                found.sort(key=lambda e: (place.get((e.partition, e.name), last), e.sequence, e.writer, e.name))
                self._files[partition].update((e.name, e) for e in found)
                new += found
                if partition == FIFO:
                    self._collected_steps += sum(e.total for e in found)
            self._recorded, self._shortcut = {}, None
            report.added_files, report.added = len(new), sum(e.n for e in new)
            self._ingested += report.added
            if self.edit:
                self._record(new, recorded)
            if evict:
                self._evict(report)
            if self.edit:
                self._save_shortcut()
            if new or report.evicted_files or report.vanished_files or self._taken_out:
                self._publish()
            return report

    def evict(self) -> RefreshReport:
        """Delete the oldest files beyond the limits, as of the last `refresh`."""
        with self._lock:
            report = RefreshReport()
            self._evict(report)
            return report

    def _refuse_pickles(self, listed: dict[str, list[str]], first: bool) -> None:
        if self.allow_pickle:
            return
        for partition, names in listed.items():
            bad = self._bad[partition]
            pickles = [n for n in names if n.endswith(legacy.SUFFIX) and not n.startswith(".") and n not in bad]
            if pickles and first:
                raise legacy.refuse(self.root / partition / min(pickles), len(pickles))
            for name in pickles:
                bad[name] = "a pickle"
                self._quarantined += 1
                logger.error("skipped: %s", legacy.refuse(self.root / partition / name))

    def _forget_missing(self, partition: str, present: set[str], report: RefreshReport) -> None:
        files, bad = self._files[partition], self._bad[partition]
        for name in [n for n in files if n not in present]:
            self._retire(files.pop(name))
            report.vanished_files += 1
        for name in [n for n in bad if n not in present]:
            del bad[name]

    def _ingest(
        self, partition: str, names: list[str], recorded: dict[tuple[str, str], tuple[int, int]], report: RefreshReport
    ) -> list[Entry]:
        directory, found = str(self.root / partition), []
        files, bad = self._files[partition], self._bad[partition]
        for name in names:
            if name in files or name in bad:
                continue
            if name.startswith("."):
                report.temporary_files += self._remove_stale(partition, name)
                continue
            checked = recorded.get((partition, name))
            try:
                entry = self._shortcut.entry(partition, name, checked) if self._shortcut else None
                if entry is None:
                    entry = ix.load(
                        directory, partition, name, self._schemas, lambda *now, was=checked: now == was, self.allow_pickle
                    )
                    self._looked_into += 1
                if entry.kind == ix.ORIGINAL and self._given is not None:
                    self._given.give(entry, self.root)
            except FileNotFoundError:
                continue  # deleted since it was listed
            except OSError as err:
                self._unreadable[os.path.join(directory, name)] = f"it cannot be read now: {err}"
                logger.warning("%s/%s cannot be read now: %s", directory, name, err)
                continue
            except Exception as err:  # no file may stop the training, whatever error it causes
                report.quarantined_files += 1
                self._quarantine(partition, name, err)
                continue
            found.append(entry)
        return found

    def _remove_stale(self, partition: str, name: str) -> int:
        directory = self.root / partition
        if not (self.edit and name.startswith(TEMPORARY) and is_stale(directory, name)):
            return 0
        try:
            os.unlink(directory / name)
        except OSError as err:
            logger.warning("%s/%s cannot be removed: %s", directory, name, err)
            return 0
        return 1

    def _quarantine(self, partition: str, name: str, err: Exception) -> None:
        source = self.root / partition / name
        reason = reason_of(err)
        self._quarantined += 1
        self._bad[partition][name] = reason
        others = isinstance(err, original.OriginalFileError) or original.NAME.fullmatch(name)
        if not self.edit or others or (source.is_dir() and not source.is_symlink()):
            logger.warning("%s is skipped: %s", source, reason)
            return
        try:
            target = self.quarantine.add(partition, name, reason)
        except OSError as problem:
            logger.warning("%s is skipped: %s (and it cannot be moved to quarantine: %s)", source, reason, problem)
            return
        del self._bad[partition][name]
        logger.warning("%s is moved to %s: %s", source, target, reason)

    def _record(self, new: list[Entry], recorded: dict[tuple[str, str], tuple[int, int]]) -> None:
        live = [e for p in PARTITIONS for e in self._files[p].values()]
        fresh = [e for e in new if (e.partition, e.name) not in recorded]
        touched = any(recorded.get((e.partition, e.name), (e.size, e.mtime_ns)) != (e.size, e.mtime_ns) for e in new)
        try:
            if touched or self._rewrite or self._journal.lines + len(fresh) > 2 * len(live) + 1024:
                self._journal.rewrite(live)
            elif fresh:
                self._journal.append(fresh)
            self._rewrite = False
        except OSError as err:
            self._rewrite = True  # the next refresh tries again
            logger.warning("the order of the files in %s could not be recorded: %s", self.root, err)

    def _save_shortcut(self) -> None:
        """Save the index when the saved one lacks a quarter of the files, which took longer to check than saving takes."""
        live = [e for p in PARTITIONS for e in self._files[p].values()]
        if self._looked_into < WORTH_SAVING or 4 * self._looked_into < len(live):
            return
        try:
            index_cache.save(self.root, live)
        except OSError as err:
            logger.warning("the index of %s could not be saved; the next process will open each file: %s", self.root, err)
        self._looked_into = 0

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
                self._bad[entry.partition][entry.name] = f"it could not be deleted: {err}"
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
            self._forget_deleted()

    def _forget_deleted(self) -> None:
        """Let the recorded order and the saved index hold the remaining files only."""
        live = [e for p in PARTITIONS for e in self._files[p].values()]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.root / index_cache.NAME)
        if not live:
            self._journal.delete()
            return
        self._journal.rewrite(live)
        self._looked_into = len(live)
        self._save_shortcut()

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
                    "quarantined": self._quarantined,
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
            self._ingested, self._evicted, self._quarantined = counters
            if steps is not None:
                later = set(self._files[FIFO]).difference(order[FIFO])
                self._collected_steps = int(steps) + sum(self._files[FIFO][name].total for name in later)
            self._publish()
            if self.edit:
                self._journal.rewrite([e for p in PARTITIONS for e in self._files[p].values()])

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {k: v for k, v in self.__dict__.items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()
        self._view._lost = self._listener()
        _stores.add(self)
