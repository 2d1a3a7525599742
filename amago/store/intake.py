"""Which files of a buffer are sampled: each is checked once, and those that cannot be used are moved to quarantine or skipped."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym

from amago.store import index as ix
from amago.store import index_cache, legacy, original
from amago.store.errors import BadFileError
from amago.store.files import TEMPORARY, is_stale
from amago.store.index import Entry
from amago.store.quarantine import Quarantine, reason_of
from amago.store.record import Record, Stamps

logger = logging.getLogger(__name__)

FIFO, PROTECTED = "fifo", "protected"
PARTITIONS = (PROTECTED, FIFO)
"""In the order of their indices."""


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


class Intake:
    """Checks the files of a buffer.

    Args:
        root: the buffer's directory.
        edit: whether to move damaged files to quarantine, and to delete temporary files of writers that were killed.
        allow_pickle: also read ``.traj`` pickles.
        record: where files are counted that the saved index lacks.

    Attributes:
        quarantine: the directory of damaged files.
        bad: by partition, {name: reason} of the files that are skipped.
        unreadable: {path: reason} of the files that could not be read when they were last tried.
        refused_files: how many files were moved or skipped so far.
    """

    def __init__(self, root: Path, edit: bool, allow_pickle: bool, record: Record) -> None:
        self._root, self._edit, self._allow_pickle, self._record = root, edit, allow_pickle, record
        self.quarantine = Quarantine(root)
        self.bad: dict[str, dict[str, str]] = {p: {} for p in PARTITIONS}
        self.unreadable: dict[str, str] = {}
        self.refused_files = 0
        self._schemas = ix.Schemas()
        self._given: original.Spaces | None = None  # of files that record none
        self._shortcut: index_cache.IndexCache | None = None

    def open_index(self) -> None:
        """Use the saved index until `close_index`."""
        self._shortcut = index_cache.IndexCache(self._root, self._schemas)

    def close_index(self) -> None:
        """Check files by opening them from now on."""
        self._shortcut = None

    def set_spaces(self, obs_space: gym.spaces.Dict, action_space: gym.Space[Any], found: list[Entry]) -> None:
        """The spaces of files that do not record any, of those in ``found`` and of later ones.

        Raises:
            ValueError: one of ``found`` does not fit them.
        """
        self._given = original.Spaces(obs_space, action_space, self._schemas)
        for entry in found:
            try:
                self._given.give(entry, self._root)
            except BadFileError as err:
                raise ValueError(f"{self._root / entry.partition / entry.name} does not fit the environment: {err}") from err

    def refused(self) -> dict[str, str]:
        """{path: reason} of all files that are not sampled: skipped, unreadable or in quarantine."""
        skipped = {str(self._root / p / name): reason for p in PARTITIONS for name, reason in self.bad[p].items()}
        return skipped | self.unreadable | self.quarantine.reasons()

    def refuse_pickles(self, listed: dict[str, list[str]], first: bool) -> None:
        """Skip pickles among the names by partition, unless they are allowed.

        Raises:
            PickleRefusedError: there are some, and this is the ``first`` look into the buffer.
        """
        if self._allow_pickle:
            return
        for partition, names in listed.items():
            bad = self.bad[partition]
            pickles = [n for n in names if n.endswith(legacy.SUFFIX) and not n.startswith(".") and n not in bad]
            if pickles and first:
                raise legacy.refuse(self._root / partition / min(pickles), len(pickles))
            for name in pickles:
                bad[name] = "a pickle"
                self.refused_files += 1
                logger.error("skipped: %s", legacy.refuse(self._root / partition / name))

    def forget_missing(self, partition: str, present: set[str]) -> None:
        """Forget the skipped files that are not present any more."""
        bad = self.bad[partition]
        for name in [n for n in bad if n not in present]:
            del bad[name]

    def check(self, partition: str, names: list[str], recorded: Stamps, report: RefreshReport) -> list[Entry]:
        """Check files.

        Args:
            names: of those that are new.
            recorded: files that were compared with their checksums before, so that the header is enough.
            report: in which the files that are damaged or temporary are counted.

        Returns:
            an entry for each file that can be sampled.
        """
        directory, found = str(self._root / partition), []
        for name in names:
            if name in self.bad[partition]:
                continue
            if name.startswith("."):
                report.temporary_files += self.remove_stale(partition, name)
                continue
            try:
                found.append(self._entry(directory, partition, name, recorded.get((partition, name))))
            except FileNotFoundError:
                continue  # deleted since it was listed
            except OSError as err:
                self.unreadable[os.path.join(directory, name)] = f"it cannot be read now: {err}"
                logger.warning("%s/%s cannot be read now: %s", directory, name, err)
            except Exception as err:  # no file may stop the training, whatever error it causes
                report.quarantined_files += 1
                self.set_aside(partition, name, err)
        return found

    def _entry(self, directory: str, partition: str, name: str, checked: tuple[int, int] | None) -> Entry:
        entry = self._shortcut.entry(partition, name, checked) if self._shortcut else None
        if entry is None:
            entry = ix.load(directory, partition, name, self._schemas, lambda *now: now == checked, self._allow_pickle)
            self._record.looked_into += 1
        if entry.kind == ix.ORIGINAL and self._given is not None:
            self._given.give(entry, self._root)
        return entry

    def remove_stale(self, partition: str, name: str) -> int:
        """Delete a file if it is a temporary one of a writer that was killed; returns how many were deleted."""
        directory = self._root / partition
        if not (self._edit and name.startswith(TEMPORARY) and is_stale(directory, name)):
            return 0
        try:
            os.unlink(directory / name)
        except OSError as err:
            logger.warning("%s/%s cannot be removed: %s", directory, name, err)
            return 0
        return 1

    def set_aside(self, partition: str, name: str, err: Exception) -> None:
        """Move a file that cannot be used to quarantine, or skip it from now on. Those of the original system are never moved."""
        source = self._root / partition / name
        reason = reason_of(err)
        self.refused_files += 1
        self.bad[partition][name] = reason
        others = isinstance(err, original.OriginalFileError) or original.NAME.fullmatch(name)
        if not self._edit or others or (source.is_dir() and not source.is_symlink()):
            logger.warning("%s is skipped: %s", source, reason)
            return
        try:
            target = self.quarantine.add(partition, name, reason)
        except OSError as problem:
            logger.warning("%s is skipped: %s (and it cannot be moved to quarantine: %s)", source, reason, problem)
            return
        del self.bad[partition][name]
        logger.warning("%s is moved to %s: %s", source, target, reason)
