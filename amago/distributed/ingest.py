"""Files arrive in the learner's store, each once, whatever is repeated and whoever is killed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from amago.run.roles.protocol import STAGING
from amago.store.files import TEMPORARY, sync, temporary_file, write_all

Content = Path | bytes | None
JOURNAL = "journal"
REMEMBERED = 1_000_000
"""Names of files that a journal holds at least, the newest."""


class Ingest:
    """Takes files into a directory: *staged* beside it, *journaled*, then *renamed* into it.

    A file that was journaled is never taken again, also when a reader has deleted it since. After a kill, a new `Ingest` of the same
    directory finishes what was staged; senders repeat what was not.

    Args:
        directory: which receives the files. One `Ingest` at a time may have it: the learner's lock of the run sees to that.
        reports: receives the reports; None: there are none.
    """

    def __init__(self, directory: str | Path, reports: str | Path | None = None):
        self.directory = Path(directory)
        self.reports = None if reports is None else Path(reports)
        self.staging = staging_of(self.directory)
        for path in (self.directory, self.staging, *([] if self.reports is None else [self.reports])):
            path.mkdir(parents=True, exist_ok=True)
        self.arrived: dict[str, None] = {}  # in order
        self.files = self.bytes = 0  # taken by this object
        self._staged: list[str] = []  # not in the directory yet
        self._journal = self._open_journal()
        self._finish()

    # ---- the journal -----------------------------------------------------------------------------------------------------

    def _open_journal(self) -> int:
        path = self.staging / JOURNAL
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be torn
        names = whole.decode().splitlines()
        if len(names) > 2 * REMEMBERED:
            names = names[-REMEMBERED:]
            with temporary_file(self.staging) as tmp:
                tmp.write_text("".join(f"{name}\n" for name in names))
                sync(tmp)
                os.replace(tmp, path)
            sync(self.staging)
        self.arrived = dict.fromkeys(names)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if len(names) <= 2 * REMEMBERED and len(whole) != len(text):
            os.ftruncate(fd, len(whole))
        return fd

    def _note(self, names: Sequence[str]) -> None:
        """Append names durably: all of them or, on an error, none."""
        size = os.fstat(self._journal).st_size
        try:
            write_all(self._journal, "".join(f"{name}\n" for name in names).encode())
            os.fsync(self._journal)
        except OSError:
            os.ftruncate(self._journal, size)
            raise
        self.arrived.update(dict.fromkeys(names))

    # ---- files -----------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Finish what an earlier `Ingest` has staged; remove what it has not staged completely."""
        for name in sorted(os.listdir(self.staging)):
            if name.startswith(TEMPORARY):
                (self.staging / name).unlink(missing_ok=True)
            elif name != JOURNAL:
                self._staged.append(name)
        self._admit()

    def take(self, files: Iterable[tuple[str, Content]]) -> int:
        """Take files that have not arrived before.

        Args:
            files: name, and the path or content of each. A file given by its path is moved, or deleted if it has arrived before.

        Returns:
            how many were taken.

        Raises:
            ValueError: a name is not that of a plain file.
            OSError: some were not taken: take all of them again. Nothing is lost.
        """
        for name, content in files:
            _check_name(name)
            if name in self.arrived or name in self._staged:
                if isinstance(content, Path):
                    content.unlink(missing_ok=True)
                continue
            if _place(content, self.staging / name):
                self._staged.append(name)
        return self._admit()

    def _admit(self) -> int:
        """Journal what is staged, and rename it into the directory; after an error, the next call goes on."""
        if not self._staged:
            return 0
        sync(self.staging)
        self._note([name for name in self._staged if name not in self.arrived])
        count = len(self._staged)
        while self._staged:
            name = self._staged[0]
            self.bytes += (self.staging / name).stat().st_size
            os.rename(self.staging / name, self.directory / name)
            self._staged.pop(0)
        sync(self.directory)
        self.files += count
        return count

    def take_reports(self, reports: Iterable[tuple[str, Content]]) -> None:
        """Take reports, of which a killed process may lose or repeat some."""
        for name, content in reports:
            _check_name(name)
            if self.reports is not None:
                _place(content, self.reports / name)

    def close(self) -> None:
        """Close the journal; twice is fine."""
        if self._journal >= 0:
            os.close(self._journal)
            self._journal = -1


def staging_of(directory: Path) -> Path:
    """Where files are before they are in a directory: beside it, on the same disk."""
    return directory.parent / STAGING


def _check_name(name: str) -> None:
    if not name or name.startswith(".") or "/" in name or "\n" in name or name == JOURNAL:
        raise ValueError(f"{name!r} is not the name of a file that can arrive")


def _place(content: Content, target: Path) -> bool:
    """Move or write a file to its complete form under a name; False if there is nothing to move."""
    if content is None:
        raise ValueError(f"{target.name} has neither a path nor a content")
    if isinstance(content, Path):
        try:
            os.rename(content, target)
            return True
        except FileNotFoundError:
            return False
        except OSError as err:
            if err.errno != errno.EXDEV:  # another disk
                raise
    with temporary_file(target.parent) as tmp:
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            write_all(fd, content.read_bytes() if isinstance(content, Path) else content)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(tmp, target)
    if isinstance(content, Path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(content)
    return True
