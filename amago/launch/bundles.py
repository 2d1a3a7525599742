"""Bundles: many finished files of a node in one, numbered without gaps, from its disk to the learner's store, each exactly once.

A bundle is an uncompressed zip archive of trajectories, and of reports, which end in ".json". Its life: files are moved into a directory of
the node, and put on the bus as one; the learner writes them and {writer: next number} into a directory, gives that its last name, and moves the
files into its store; the bundle is deleted. A process that is killed at any of these steps is followed by one that repeats the step with the
same names.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import logging
import os
import re
import shutil
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from amago.launch.bus import OUT, Bus, own_directory
from amago.run.launched.protocol import OUTBOX, REPORTS, SPOOL
from amago.store.files import TEMPORARY, is_stale, sync_directory

log = logging.getLogger(__name__)
BUNDLE_BYTES, BUNDLE_SECONDS, LOCAL_SECONDS = 8 << 20, 5.0, 0.25
"""Size of a bundle; longest time for which a file may wait for others, and that where the bus is a directory."""
_NAME = re.compile(r"(\d{9})-n\d+")
_MARK = ".arrived.json"  # with {writer: next number}, in a batch of files, none of which has this name
_AT_ONCE, _THREADS = 8, 4  # bundles in memory


class Spool:
    """The files of a node's collectors on their way to the bus.

    Args:
        homes: directories, on one disk, with those of collectors, "collector-*", and of bundles, "bundles". New ones are in the first.
        writer: unique to this start.

    Attributes:
        delivered: reports, of which there is one a phase, that were bundled, by the name of the collector's directory.
    """

    def __init__(self, bus: Bus, homes: Sequence[Path], writer: str):
        self.bus, self.homes = bus, list(homes)
        self.directory = own_directory(homes[0] / "bundles") / writer
        self.delivered: Counter[str] = Counter()
        self._next = 0
        for path in (p for home in homes for p in home.glob("bundles/*/.*")):  # on the bus
            shutil.rmtree(path)

    def pump(self, flush: bool = False, seconds: float = 1.0) -> None:
        """Bundle the files that are due, with ``flush`` all, and put bundles on the bus, one or for so long. After an exception they wait:
        call again."""
        until = time.monotonic() + seconds
        self._bundle(flush)
        while bundles := self._bundles():
            self._put(min(bundles))
            if time.monotonic() >= until:
                return
            self._bundle(flush)

    @property
    def waiting(self) -> int:
        """Bytes that are not on the bus."""
        return sum(info.st_size for _, info in self._files()) + sum(int(p.name.rpartition("-")[2]) for p in self._bundles())

    def _bundles(self) -> list[Path]:
        """Directories of bundles, NUMBER-BYTES, of this start and earlier ones."""
        return [path for home in self.homes for path in home.glob("bundles/*/[0-9]*")]

    def _bundle(self, flush: bool) -> None:
        part: list[Path] = []
        size, since = 0, 0.0
        for path, info in self._files():
            if part and size + info.st_size > BUNDLE_BYTES:
                self._gather(part, size)
                part, size = [], 0
            since = since if part else info.st_mtime
            part.append(path)
            size += info.st_size
        longest = LOCAL_SECONDS if self.bus.local else BUNDLE_SECONDS  # a clock that was set back ends the wait, too
        if part and (flush or size >= BUNDLE_BYTES or abs(time.time() - since) >= longest):
            self._gather(part, size)

    def _gather(self, files: Sequence[Path], size: int) -> None:
        """Move files into the directory of a new bundle, which needs no space on the disk."""
        folder = self.directory / f"{self._next:09d}-{size}"
        folder.mkdir(parents=True)
        self._next += 1  # what is there is put on the bus, even if not all can be moved
        for path in files:
            os.rename(path, folder / path.name)
        self.delivered.update(path.parent.parent.name for path in files if path.suffix == ".json")

    def _put(self, folder: Path) -> None:
        content, rollouts = io.BytesIO(), 0
        with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(folder.iterdir()):
                try:
                    archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes())
                    rollouts += sum(map(int, re.findall(r"-n(\d+)\.", path.name)))
                except OSError as err:  # one unreadable file must not stop the others
                    aside = folder.parent.parent / f".unreadable-{path.name}"
                    log.warning("%s cannot be read (%s) and stays behind as %s", path, err, aside)
                    os.rename(path, aside)
        self.bus.put(f"{OUT}/{folder.parent.name}/{folder.name[:9]}-n{rollouts}", content.getvalue())
        os.rename(folder, done := folder.with_name(f".{folder.name}"))  # at once, or a part of it might be put again
        shutil.rmtree(done)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Complete files, oldest name first; incomplete files of killed processes are deleted."""
        for path in (
            p for home in self.homes for folder in (SPOOL, OUTBOX) for p in sorted(home.glob(f"collector-*/{folder}/*"))
        ):
            if path.name.startswith(TEMPORARY) and is_stale(path.parent, path.name):
                path.unlink(missing_ok=True)
            elif not path.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.stat()


class Ingest:
    """Takes bundles from a bus into a learner's store, each once.

    Args:
        directory: receives the trajectories.
        staging: a directory of the run on the same disk, in which "reports" receives the reports of collectors.
    """

    def __init__(self, bus: Bus, directory: str | Path, staging: str | Path):
        self.bus, self.directory, self.staging = bus, Path(directory), Path(staging)
        for path in (self.directory, self.staging / REPORTS):
            path.mkdir(parents=True, exist_ok=True)
        self._mark = self.staging / "arrived.json"
        self._settle()
        self._next: dict[str, int] = json.loads(self._mark.read_text(encoding="utf-8"))["next"] if self._mark.exists() else {}

    def pull(self) -> int:
        """Take the bundles that are there; returns their number. After an exception nothing is lost: call again."""
        self._settle()
        due, after = [], dict(self._next)
        for writer in self.bus.names(OUT):
            for name in self.bus.names(f"{OUT}/{writer}"):
                number = int(name[:9]) if _NAME.fullmatch(name) else -1
                if number == after.get(writer, 0):
                    due.append((writer, name))
                    after[writer] = number + 1
                elif 0 <= number < after.get(writer, 0):  # taken, and not deleted
                    self.bus.delete(f"{OUT}/{writer}/{name}")
        if due:
            with ThreadPoolExecutor(_THREADS) as threads:
                for first in range(0, len(due), _AT_ONCE):
                    part = due[first : first + _AT_ONCE]
                    names = [f"{OUT}/{writer}/{name}" for writer, name in part]
                    self._take(part, [*threads.map(self.bus.get, names)])
                    list(threads.map(self.bus.delete, names))
        return len(due)

    def _take(self, part: Sequence[tuple[str, str]], contents: Sequence[bytes]) -> None:
        batch = self.staging / "batch"  # what has not got its last name is pulled again
        shutil.rmtree(batch, ignore_errors=True)
        batch.mkdir()
        for (writer, name), content in zip(part, contents, strict=True):
            try:
                for file, data in _unpack(content):
                    (batch / file).write_bytes(data)
            except (ValueError, zipfile.BadZipFile) as err:
                refused = self.staging / "refused"
                refused.mkdir(exist_ok=True)
                (refused / f"{writer}-{name}").write_bytes(content)
                log.warning("%s/%s/%s is no readable bundle (%s); it is kept in %s", OUT, writer, name, err, refused)
        after = self._next | {writer: int(name[:9]) + 1 for writer, name in part}
        (batch / _MARK).write_text(json.dumps({"next": after}), encoding="utf-8")
        _sync_all(self.staging)
        os.rename(batch, self.staging / "arrived")
        self._next = after
        sync_directory(self.staging)
        self._settle()

    def _settle(self) -> None:
        """Move the files of the batch that has arrived to where they belong, its mark last. A rename that is not durable leaves its file in
        the batch."""
        if (batch := self.staging / "arrived").exists():
            for path in sorted(batch.glob("[!.]*")):
                os.rename(path, (self.staging / REPORTS if path.suffix == ".json" else self.directory) / path.name)
            with contextlib.suppress(FileNotFoundError):
                os.replace(batch / _MARK, self._mark)
            batch.rmdir()


def _unpack(content: bytes) -> list[tuple[str, bytes]]:
    """The files of a bundle; `ValueError` or `zipfile.BadZipFile` if no node has written it."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if sum(e.file_size for e in entries) > len(content) or any(e.compress_type != zipfile.ZIP_STORED for e in entries):
            raise ValueError("it is compressed")
        for e in entries:
            if not re.fullmatch(r"[^./\\\0\n][^/\\\0\n]*", e.filename):
                raise ValueError(f"it holds {e.filename!r}")
        return [(e.filename, archive.read(e)) for e in entries]


def _sync_all(directory: Path) -> None:
    """Make all files below a directory durable by one call, which is six times as fast as one each."""
    if not sys.platform.startswith("linux"):
        os.sync()
        return
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "cannot make files durable", str(directory))
    finally:
        os.close(fd)
