"""Bundles: many finished files of a node in one, numbered without gaps, from its disk to the learner's store, each exactly once.

A bundle is an uncompressed zip archive with "trajectories/NAME" and "reports/NAME". Its life: written beside the spools; the files in it
are deleted; it is put on the bus; the learner stages its files, notes {writer: next number}, and renames them into the store; it is
deleted. A process that is killed at any of these steps is followed by one that repeats the step with the same names.
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
from amago.run.launched.protocol import STAGING, collector_spool, outbox_of
from amago.store.files import TEMPORARY, is_full, is_stale, replace_file, sync

log = logging.getLogger(__name__)
BUNDLE_BYTES, BUNDLE_SECONDS = 8 << 20, 5.0
LOCAL_SECONDS = 0.25
"""Longest time for which a file may wait for others, where the bus is a directory."""
TRAJECTORIES, REPORTS = "trajectories", "reports"
_NAME = re.compile(r"(\d{9})-n\d+")
_AT_ONCE, _THREADS = 8, 4  # bundles in memory
_WRITERS = 20_000  # whose next number is remembered


class Spool:
    """The files of a node's collectors on their way to the bus.

    Args:
        homes: directories with those of collectors, "collector-*"; bundles wait in their directories "bundles". New ones are in the first.
        writer: unique to this start.

    Attributes:
        delivered: reports, of which there is one a phase, that were bundled, by the name of the collector's directory.
    """

    def __init__(self, bus: Bus, homes: Sequence[Path], writer: str):
        self.bus, self.homes, self.writer = bus, list(homes), writer
        self.directory = own_directory(homes[0] / "bundles")
        self.delivered: Counter[str] = Counter()
        self._next = 0
        bundled: set[str] = set()  # by an earlier start, which may not have deleted the files
        for path in self._bundles():
            # one that is damaged is reported by the learner
            with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
                bundled.update(archive.namelist())
        for source, name, _ in self._files():
            if name in bundled:
                source.unlink(missing_ok=True)

    def pump(self, flush: bool = False) -> None:
        """Bundle the files that are due, with ``flush`` all, and put all bundles on the bus. After an exception they wait: call again."""
        self._bundle(flush)
        for path in self._bundles():
            self.bus.move_in(path, f"{OUT}/{path.parent.name}/{path.name}")

    @property
    def waiting(self) -> int:
        """Bytes that are not on the bus; an `OSError` where files are moved meanwhile."""
        return sum(info.st_size for *_, info in self._files()) + sum(path.stat().st_size for path in self._bundles())

    def _bundle(self, flush: bool) -> None:
        part: list[tuple[Path, str, os.stat_result]] = []
        size = 0
        for file in self._files():
            if part and size + file[2].st_size > BUNDLE_BYTES:
                self._write(part)
                part, size = [], 0
            part.append(file)
            size += file[2].st_size
        longest = LOCAL_SECONDS if self.bus.local else BUNDLE_SECONDS  # a clock that was set back ends the wait, too
        if part and (flush or size >= BUNDLE_BYTES or abs(time.time() - part[0][2].st_mtime) >= longest):
            self._write(part)

    def _write(self, files: Sequence[tuple[Path, str, os.stat_result]]) -> None:
        content, sources, rollouts = io.BytesIO(), [], 0
        with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
            for path, name, _ in files:
                try:
                    archive.writestr(zipfile.ZipInfo(name), path.read_bytes())
                    sources.append(path)
                except FileNotFoundError:
                    continue
                except OSError as err:  # one unreadable file must not stop the others
                    if is_full(err):
                        raise
                    log.warning("%s cannot be read (%s) and stays behind as .unreadable-%s", path, err, path.name)
                    os.rename(path, path.with_name(f".unreadable-{path.name}"))
                    continue
                rollouts += sum(map(int, re.findall(r"-n(\d+)\.", name)))
        if not sources:
            return
        folder = self.directory / self.writer
        folder.mkdir(mode=0o700, exist_ok=True)
        replace_file(folder / f"{self._next:09d}-n{rollouts}", lambda tmp: tmp.write_bytes(content.getvalue()))
        self._next += 1
        for path in sources:
            path.unlink(missing_ok=True)
        self.delivered.update(path.parent.parent.name for path in sources if path.suffix == ".json")

    def _bundles(self) -> list[Path]:
        return sorted(p for home in self.homes for p in home.glob("bundles/*/*") if _NAME.fullmatch(p.name))

    def _files(self) -> Iterator[tuple[Path, str, os.stat_result]]:
        """Complete files, oldest name first; incomplete files of killed processes are deleted."""
        for directory in (d for home in self.homes for d in sorted(home.glob("collector-*"))):
            for folder, kind in ((collector_spool(directory), TRAJECTORIES), (outbox_of(directory), REPORTS)):
                for name in sorted(os.listdir(folder)) if folder.exists() else ():
                    path = folder / name
                    if name.startswith(TEMPORARY) and is_stale(folder, name):
                        path.unlink(missing_ok=True)
                    elif not name.startswith("."):
                        with contextlib.suppress(FileNotFoundError):
                            yield path, f"{kind}/{name}", path.stat()


class Ingest:
    """Takes bundles from a bus into a learner's store, each once.

    Args:
        directory: receives the trajectories.
        reports: receives the reports of collectors.
        key: of the run: launches of several runs may share a store.
    """

    def __init__(self, bus: Bus, directory: str | Path, reports: str | Path, key: str):
        self.bus, self.directory, self.reports = bus, Path(directory), Path(reports)
        self.staging = self.directory.parent / STAGING / key
        for path in (self.directory, self.reports, self.staging):
            path.mkdir(parents=True, exist_ok=True)
        self._mark, self._batch = self.staging / "arrived.json", 0
        self._next: dict[str, int] = {}
        if self._mark.exists():
            known = json.loads(self._mark.read_text(encoding="utf-8"))
            self._next, self._batch = known["next"], known["batch"]
        for path in self.staging.glob("batch-*"):  # noted: they are renamed; else they are pulled again
            if path.name == f"batch-{self._batch}":
                self._admit(path)
            shutil.rmtree(path, ignore_errors=True)

    def pull(self) -> int:
        """Take the bundles that are there; returns their number. After an exception nothing is lost: call again."""
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
        batch = self.staging / f"batch-{self._batch + 1}"
        shutil.rmtree(batch, ignore_errors=True)
        for kind in (TRAJECTORIES, REPORTS):
            (batch / kind).mkdir(parents=True)
        for (writer, name), content in zip(part, contents, strict=True):
            try:
                for file, data in _unpack(content):
                    (batch / file).write_bytes(data)
            except (ValueError, zipfile.BadZipFile) as err:
                refused = self.staging / "refused"
                refused.mkdir(exist_ok=True)
                (refused / f"{writer}-{name}").write_bytes(content)
                log.warning("%s/%s/%s is no readable bundle (%s); it is kept in %s", OUT, writer, name, err, refused)
        _sync_all(batch)
        new = {writer: int(name[:9]) + 1 for writer, name in part}
        after = dict([*((w, n) for w, n in self._next.items() if w not in new), *new.items()][-_WRITERS:])
        value = json.dumps({"next": after, "batch": self._batch + 1})
        replace_file(self._mark, lambda tmp: tmp.write_text(value, encoding="utf-8"))
        self._next, self._batch = after, self._batch + 1
        self._admit(batch)
        shutil.rmtree(batch, ignore_errors=True)

    def _admit(self, batch: Path) -> None:
        for path in sorted((batch / TRAJECTORIES).glob("*")):
            os.rename(path, self.directory / path.name)
        for path in (batch / REPORTS).glob("*"):
            shutil.move(path, self.reports / path.name)  # perhaps another disk
        sync(self.directory)


def _unpack(content: bytes) -> list[tuple[str, bytes]]:
    """The files of a bundle; `ValueError` or `zipfile.BadZipFile` if no node has written it."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if sum(e.file_size for e in entries) > len(content) or any(e.compress_type != zipfile.ZIP_STORED for e in entries):
            raise ValueError("it is compressed")
        for e in entries:
            if not re.fullmatch(rf"({TRAJECTORIES}|{REPORTS})/[^./\\\0\n][^/\\\0\n]*", e.filename):
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
