"""Read ``metrics.jsonl`` as it grows: what was appended is read, what was read is not read again, and damage ends nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from amago.run.report.log import LIMIT, PHASES, Log

METRICS_FILE = "metrics.jsonl"
SMALL = 256 << 10
"""Files up to this size are read as a whole when they are first seen; of larger ones, a sample."""
_PLACES = 40
_BLOCK = 64 << 10
_END = 24 << 10
_BACK = 1 << 20
_CHUNK = 1 << 20
_HEAD = 256
_decode = json.JSONDecoder().decode
_SECTIONS = (*PHASES, "buffer")


class Tail:
    """Reads lines of an open file from a place on.

    Attributes:
        log: where rows go.
        offset: bytes read, always whole lines.
        damaged: lines that were no rows, and what the first of them was.
    """

    def __init__(self, log: Log, offset: int = 0):
        self.log, self.offset = log, offset
        self.damaged, self.first_damage = 0, ""

    def read(self, fd: int, most: int = _CHUNK) -> int:
        """Read the complete lines among the next ``most`` bytes, or one line if that is longer; return how many bytes these were."""
        data = os.pread(fd, most, self.offset)
        end = data.rfind(b"\n") + 1
        while not end and len(data) == most:  # a line longer than a chunk
            most *= 2
            data = os.pread(fd, most, self.offset)
            end = data.rfind(b"\n") + 1
        for line in data[:end].split(b"\n"):
            self.take(line)
        self.offset += end
        return end

    def take(self, line: bytes) -> None:
        """Add a line to the log; what is no row is counted."""
        if not line.strip():
            return
        try:
            self.log.add(_decode(line.decode()))
        except (ValueError, RecursionError) as err:
            self.damaged += 1
            self.first_damage = self.first_damage or f"{line[:60]!r} ({err})"[:200]


class Follower:
    """One ``metrics.jsonl``, followed while it grows.

    A small file is read at once. Of a large one, `refresh` reads a sample that gives all curves their shape, within
    milliseconds, and `advance` reads all of it bit by bit; then the whole takes the place of the sample.

    Args:
        path: of the file.
        sample: False: `refresh` reads everything, however large.

    Attributes:
        log: what is known now.
        size: of the file, in bytes, when it was last looked at.
        changed: time of its last change (seconds since 1970).
    """

    def __init__(self, path: Path, sample: bool = True, limit: int = LIMIT):
        self.path, self.sample, self.limit = path, sample, limit
        self.size, self.changed = 0, 0.0
        self._identity: tuple[int, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self._whole = Tail(Log(self.limit))
        self._part: Tail | None = None
        self._head = b""

    @property
    def log(self) -> Log:
        return (self._part or self._whole).log

    @property
    def sampled(self) -> bool:
        """Whether only a sample has been read, and `advance` has more to read."""
        return self._part is not None

    @property
    def share(self) -> float:
        """How much of the file has been read as a whole."""
        return 1.0 if self._part is None or not self.size else self._whole.offset / self.size

    @property
    def problems(self) -> list[str]:
        """What could not be read."""
        tail = self._part or self._whole
        if not tail.damaged:
            return []
        lines = "an unreadable line was" if tail.damaged == 1 else f"{tail.damaged} unreadable lines were"
        return [f"{self.path}: {lines} left out: {tail.first_damage}"]

    def refresh(self) -> bool:
        """Read what was appended since the last call; whether there was anything.

        A file that was replaced or has become shorter is read anew. A last line without an end is left: it is being written.

        Raises:
            OSError: it cannot be read, for example because it was deleted.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            identity = info.st_dev, info.st_ino
            head = os.pread(fd, _HEAD, 0)
            anew = self._identity != identity or info.st_size < self.size or not head.startswith(self._head)
            if anew:
                self._begin()
            grown = anew or info.st_size != self.size
            self._identity, self._head, self.size, self.changed = identity, head, info.st_size, info.st_mtime
            if not grown:
                return False
            if anew and self.sample and info.st_size > SMALL:
                self._part = Tail(Log(self.limit))
                _sample(self._part, fd, info.st_size)
            tail = self._part or self._whole
            while tail.read(fd):
                pass
            return True
        finally:
            os.close(fd)

    def advance(self, seconds: float) -> bool:
        """Read on in the whole of a large file for so long; whether there is more to read.

        Raises:
            OSError: it cannot be read.
        """
        if self._part is None:
            return False
        until = time.monotonic() + seconds
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if (os.fstat(fd).st_dev, os.fstat(fd).st_ino) != self._identity:
                return False  # replaced: the next refresh begins anew
            while time.monotonic() < until:
                if not self._whole.read(fd, _CHUNK // 16):
                    self._part = None
                    return False
        finally:
            os.close(fd)
        return True

    def finish(self) -> None:
        """Also read a last line without an end, if it is a row: for a page that is made once."""
        try:
            data = self.path.read_bytes()[self._whole.offset :] if self.size > self._whole.offset else b""
            self._whole.log.add(json.loads(data))
        except (OSError, ValueError):
            return


def _sample(tail: Tail, fd: int, size: int) -> None:
    """Read the first row of each section at places spread over a file, and all rows near its end, and leave ``tail`` there."""
    tail.log.complete = False
    end = max(0, size - _END)
    block = min(_BLOCK, end // _PLACES)
    read = -1  # where the last row that was taken begins: blocks of a short file touch
    for i in range(_PLACES):
        at = end * i // _PLACES
        data = os.pread(fd, block, at)
        first = data.find(b"\n") + 1 if at else 0
        if at and not first:
            continue
        starts = set()
        for section in _SECTIONS:
            found = data.find(b'"section": "%b"' % section.encode(), first)
            if found >= 0:
                starts.add(max(first, data.rfind(b"\n", 0, found) + 1))
        for start in sorted(starts):
            stop = data.find(b"\n", start)
            if stop >= 0 and at + start > read:
                tail.take(data[start:stop])
                read = at + start
    _newest(tail, fd, max(read + 1, end - _BACK), end)
    data = os.pread(fd, size - end, end)
    first = data.find(b"\n") + 1
    if not first:  # lines longer than the end that is read: nothing to gain by a sample
        tail.log = Log(tail.log.limit)
    tail.offset = end + first if first else 0


def _newest(tail: Tail, fd: int, begin: int, end: int) -> None:
    """Read the last evaluation before the end of a file, which may be far from it."""
    data = os.pread(fd, end - begin, begin)
    found = data.rfind(b'"section": "val"')
    start, stop = data.rfind(b"\n", 0, found) + 1, data.find(b"\n", found)
    if found >= 0 and start and stop >= 0:
        tail.take(data[start:stop])
