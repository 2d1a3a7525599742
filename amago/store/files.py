"""The errors of the store, and files: written completely or not at all, and opened safely."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import socket
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from amago import system

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
STALE_SECONDS = 600.0
_TEMPORARY_NAME = re.compile(r"\.tmp-(?P<host>[0-9a-f]{8})-(?P<pid>[0-9]{1,10})-.*")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class StoreError(Exception):
    """Base class of the store's errors."""


class BadFileError(StoreError, ValueError):
    """Raised for a file that is damaged or not a trajectory file of amago; the message has the fault."""


class PickleRefusedError(StoreError, ValueError):
    """Raised for a ``.traj`` pickle, which the store never reads."""

    @classmethod
    def of(cls, path: str | os.PathLike[str], count: int = 1) -> PickleRefusedError:
        """The error for a pickle, the first of ``count``."""
        more = f" (and {count - 1} more)" if count > 1 else ""
        return cls(
            f"{os.fspath(path)}{more} is a .traj pickle: reading one could run any code that its author put into it. If you "
            "trust where it comes from, convert it for good ('amago buffer import DIRECTORY RUN --allow-pickle') and move it away; "
            "otherwise move it away."
        )


class EvictedError(StoreError, LookupError):
    """Raised if the file of a trajectory was deleted after its index was drawn; draw another index."""


class DamagedError(BadFileError, EvictedError):
    """Raised if the file of a trajectory was damaged after its check; it is not sampled any more, so draw another index."""


class StoreFullError(StoreError, OSError):
    """Raised if the disk is full and no more trajectories can be kept in memory."""


def _host() -> str:
    """The host and, on Linux, the pid namespace: process ids of other hosts mean nothing here."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{zlib.crc32(f'{socket.gethostname()}:{namespace}'.encode()):08x}"


def temporary(directory: Path) -> Path:
    """A new name for a file that is not complete yet, with the host and the process id of its writer (see `is_stale`)."""
    return directory / f"{TEMPORARY}{_host()}-{os.getpid()}-{os.urandom(6).hex()}"


@contextlib.contextmanager
def temporary_file(directory: Path) -> Iterator[Path]:
    """A `temporary` name; a file that still has this name when the block ends is deleted."""
    path = temporary(directory)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def is_stale(directory: Path, name: str) -> bool:
    """True if a ``.tmp-*`` file was left behind: its writer has ended, or has not written to it for ten minutes."""
    match = _TEMPORARY_NAME.fullmatch(name)
    if match and match["host"] == _host():
        try:
            os.kill(int(match["pid"]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass  # it runs, as another user
    try:
        return time.time() - os.lstat(directory / name).st_mtime > STALE_SECONDS
    except FileNotFoundError:
        return False


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write a contiguous buffer completely, however often `os.write` stops early."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no directories
    fd = os.open(path, (os.O_RDWR if os.name == "nt" else os.O_RDONLY) | system.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. A failure is only logged, because readers may have seen the new names already."""
    try:
        sync(directory)
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.ENOTSUP):
            logger.warning("could not sync the directory %s: %s", directory, err)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Create a file, or replace it: readers find the old content or the new one, also after a crash.

    Args:
        write: called with a path in the same directory, where it creates the new file.

    Raises:
        OSError: writing failed; the old file is unchanged and no other is left behind.
    """
    with temporary_file(path.parent) as source:
        write(source)
        sync(source)
        os.replace(source, path)
    sync_directory(path.parent)


def commit(directory: Path, buffers: Sequence[Any], names: Iterator[str]) -> str:
    """Create a file so that it is either complete or not there at all; an existing file is never replaced.

    Args:
        buffers: the content, contiguous buffers one after the other.
        names: names to try, in order, until one is free.

    Returns:
        The file's name.

    Raises:
        OSError: writing failed; nothing is left behind.
    """
    for attempt in itertools.count(1):
        try:
            with temporary_file(directory) as source:
                fd = os.open(source, os.O_WRONLY | system.O_BINARY | os.O_CREAT | os.O_EXCL | system.O_CLOEXEC, 0o644)
                try:
                    for buffer in buffers:
                        write_all(fd, buffer)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                name = next(n for n in names if _move_without_overwriting(source, directory / n))
            break
        except FileNotFoundError:  # a learner whose clock is hours ahead deleted the temporary file as stale
            if attempt == 5:
                raise
    sync_directory(directory)
    return name


def _move_without_overwriting(source: Path, target: Path) -> bool:
    """Give a file the name ``target``, unless it is taken; ``source`` may keep its name too."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as err:
        if err.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):  # without hard links, the check and the rename cannot be one step
            return False
        os.rename(source, target)
    return True


def is_full(err: OSError) -> bool:
    """True if an error means that no space or no quota is left."""
    return err.errno in (errno.ENOSPC, errno.EDQUOT)


def open_regular(path: str | Path) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; symbolic links are not followed, and pipes do not block.

    Returns:
        The file descriptor and the file's status.

    Raises:
        BadFileError: a symbolic link or a special file.
        FileNotFoundError: there is no such file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | system.O_BINARY | system.O_NOFOLLOW | system.O_NONBLOCK | system.O_CLOEXEC)
    except OSError as err:
        if err.errno == errno.ELOOP:
            raise BadFileError("a symbolic link; links are not followed") from err
        if err.errno in (errno.ENXIO, errno.ENODEV):
            raise BadFileError("not a regular file") from err
        raise
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise BadFileError("not a regular file")
    return fd, info


def read_exactly(fd: int, count: int, offset: int) -> bytes:
    """``count`` bytes at ``offset``.

    Raises:
        BadFileError: the file ends before.
    """
    data = system.pread(fd, count, offset)
    while len(data) < count:
        more = system.pread(fd, count - len(data), offset + len(data))
        if not more:
            raise BadFileError(f"the file ends at byte {offset + len(data)}, {count - len(data)} bytes early")
        data += more
    return data
