"""Files: writing one completely or not at all, and opening one that may be anything."""

from __future__ import annotations

import contextlib
import errno
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

from amago.store.errors import BadFileError

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
STALE_SECONDS = 600.0
_TEMPORARY_NAME = re.compile(r"\.tmp-(?P<host>[0-9a-f]{8})-(?P<pid>[0-9]{1,10})-.*")


def _host() -> str:
    """The host and, on Linux, the pid namespace: process ids of other hosts mean nothing here."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{zlib.crc32(f'{socket.gethostname()}:{namespace}'.encode()):08x}"


def temporary(directory: Path) -> Path:
    """A new name for a file that is not complete yet; it contains the host and the process id of its writer (see `is_stale`)."""
    return directory / f"{TEMPORARY}{_host()}-{os.getpid()}-{os.urandom(6).hex()}"


@contextlib.contextmanager
def temporary_file(directory: Path) -> Iterator[Path]:
    """A `temporary` name; a file that still has this name when the block ends is deleted."""
    path = temporary(directory)
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def write_all(fd: int, data: Any) -> None:
    """Write a contiguous buffer completely, however often `os.write` stops early."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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


def commit(directory: Path, buffers: Sequence[Any], names: Iterator[str]) -> tuple[str, int]:
    """Create a file so that it is either complete or not there at all; an existing file is never replaced.

    Args:
        buffers: the content, contiguous buffers one after the other.
        names: names to try, in order, until one is free.

    Returns:
        The file's name and its size in bytes.

    Raises:
        OSError: writing failed; nothing is left behind.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return _commit(directory, buffers, names)
        except FileNotFoundError:  # a learner whose clock is hours ahead deleted the temporary file as stale
            continue
    return _commit(directory, buffers, names)


_ATTEMPTS = 5


def _commit(directory: Path, buffers: Sequence[Any], names: Iterator[str]) -> tuple[str, int]:
    with temporary_file(directory) as source:
        fd = os.open(source, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            for buffer in buffers:
                write_all(fd, buffer)
            os.fsync(fd)
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        name = _move_to_free_name(source, directory, names)
    sync_directory(directory)
    return name, size


def _move_to_free_name(source: Path, directory: Path, names: Iterator[str]) -> str:
    for name in names:
        try:
            _move_without_overwriting(source, directory / name)
            return name
        except FileExistsError:
            continue
    raise FileExistsError(errno.EEXIST, "no free name is left", str(directory))


_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


def _move_without_overwriting(source: Path, target: Path) -> None:
    """Give a file the name ``target``, or raise FileExistsError; ``source`` may keep its name too."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as err:
        if err.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):  # without hard links, the check and the rename cannot be one step
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.rename(source, target)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. A failure is only logged, as readers may have seen the new names already."""
    try:
        sync(directory)
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.ENOTSUP):
            logger.warning("could not sync the directory %s: %s", directory, err)


def free_bytes(directory: Path) -> int | None:
    """Free space of the file system that holds a directory; None if it is unknown."""
    try:
        info = os.statvfs(directory)
    except OSError:
        return None
    return info.f_bavail * info.f_frsize


def is_full(err: OSError) -> bool:
    """Whether an error means that no space or no quota is left."""
    return err.errno in (errno.ENOSPC, errno.EDQUOT)


def is_stale(directory: Path, name: str) -> bool:
    """Whether a ``.tmp-*`` file was left behind: its writer has ended, or has not written to it for ten minutes."""
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


def open_regular(path: str | Path) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; symbolic links are not followed, and pipes do not block.

    Returns:
        The file descriptor and the file's status.

    Raises:
        BadFileError: a symbolic link or a special file.
        FileNotFoundError: there is no such file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
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


def move_aside(source: Path, directory: Path, prefix: str) -> Path:
    """Move ``source`` (a link, not its target) into ``directory``, under a name that is free there; returns the new path."""
    directory.mkdir(parents=True, exist_ok=True)
    target, i = directory / f"{prefix}{source.name}"[:240], 0
    while os.path.lexists(target):
        i += 1
        target = directory / f"{i}-{prefix}{source.name}"[:240]
    os.rename(source, target)
    return target
