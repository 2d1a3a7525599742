"""The files of a buffer that are not sampled."""

from __future__ import annotations

import itertools
import logging
import os
import re
from pathlib import Path

from amago.store import formats
from amago.store.files import BadFileError

logger = logging.getLogger(__name__)

FIFO, PROTECTED = "fifo", "protected"
PARTITIONS = (PROTECTED, FIFO)
"""The directories of a buffer, in the order of their indices."""
QUARANTINE = "quarantine"
_QUARANTINED = re.compile(r"([0-9]+-)?(fifo|protected)-(?P<name>.*)", re.DOTALL)


class RefusedFiles:
    """The files of a buffer that are not sampled: damaged ones are moved to ``{root}/quarantine`` as ``{partition}-{name}``.

    Attributes:
        bad: by partition, {name: reason} of the files that are skipped where they lie.
        unreadable: {path: reason} of the files that could not be read when they were last tried.
        count: number of files that were moved or skipped so far.
    """

    def __init__(self, root: Path, edit: bool) -> None:
        self._root, self._edit = root, edit
        self.bad: dict[str, dict[str, str]] = {p: {} for p in PARTITIONS}
        self.unreadable: dict[str, str] = {}
        self._moved: dict[str, str] = {}  # by name in quarantine
        self.count = 0

    def set_aside(self, partition: str, name: str, err: Exception) -> None:
        """Move a file that cannot be used to quarantine, or skip it from now on. Files of the original system are never
        moved."""
        source = self._root / partition / name
        reason = str(err) if isinstance(err, BadFileError) else f"unexpected {err!r:.200}"
        self.count += 1
        self.bad[partition][name] = reason
        others = formats.ORIGINAL_NAME.fullmatch(name) is not None
        if not self._edit or others or (source.is_dir() and not source.is_symlink()):
            logger.warning("%s is skipped: %s", source, reason)
            return
        directory = self._root / QUARANTINE
        names = (f"{n}{partition}-{name}"[:240] for n in itertools.chain([""], (f"{i}-" for i in itertools.count(1))))
        target = next(directory / n for n in names if not os.path.lexists(directory / n))
        try:
            directory.mkdir(exist_ok=True)
            os.rename(source, target)
        except OSError as problem:
            logger.warning("%s is skipped: %s (and it cannot be moved to quarantine: %s)", source, reason, problem)
            return
        del self.bad[partition][name]
        self._moved[target.name] = reason
        logger.warning("%s is moved to %s: %s", source, target, reason)

    def reasons(self) -> dict[str, str]:
        """{path: reason} of all of them."""
        skipped = {str(self._root / p / name): reason for p in PARTITIONS for name, reason in self.bad[p].items()}
        unknown = "an earlier process moved it to quarantine, and has logged the reason"
        return skipped | self.unreadable | {str(f): self._moved.get(f.name, unknown) for f in self._quarantined()}

    def delete_quarantine(self) -> None:
        """Delete the files in quarantine that are named as a `amago.store.TrajectoryWriter` names them; others stay."""
        for path in self._quarantined():
            match = _QUARANTINED.fullmatch(path.name)
            if match and any(pattern.fullmatch(match["name"]) for pattern in (formats.SEGMENT_NAME, formats.NPZ_NAME)):
                path.unlink(missing_ok=True)
        directory = self._root / QUARANTINE
        if directory.is_dir() and not directory.is_symlink() and not any(directory.iterdir()):
            directory.rmdir()

    def _quarantined(self) -> list[Path]:
        directory = self._root / QUARANTINE
        if not directory.is_dir() or directory.is_symlink():
            return []
        return sorted(p for p in directory.iterdir() if p.is_symlink() or p.is_file())
