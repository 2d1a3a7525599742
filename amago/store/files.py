"""Files: committing one so that what can be seen is complete, opening one without trust, and keeping few of them open."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import socket
import stat
import threading
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from amago.store.errors import BadFileError

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
STALE_SECONDS = 600.0
_TEMPORARY_NAME = re.compile(r"\.tmp-(?P<host>[0-9a-f]{8})-(?P<pid>[0-9]{1,10})-.*")


def _host() -> str:
    """Which process table a pid is looked up in: the host and, on Linux, the pid namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{zlib.crc32(f'{socket.gethostname()}:{namespace}'.encode()):08x}"


def temporary(directory: Path) -> Path:
    """A name for a file that is not complete yet, which says who is writing it (see `is_stale`)."""
    return directory / f"{TEMPORARY}{_host()}-{os.getpid()}-{os.urandom(6).hex()}"


def commit(directory: Path, buffers: Sequence[Any], names: Iterator[str]) -> tuple[str, int]:
    """Write a file so that it is either complete under its name or not there at all, and never over another one.

    Args:
        buffers: the content, contiguous buffers one after the other.
        names: names to try, in order; the next is taken where a file already has the one before.

    Returns:
        The name taken, and the file's size.

    Raises:
        OSError: writing failed; nothing is left behind.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return _commit(directory, buffers, names)
        except FileNotFoundError:  # a learner whose clock is hours ahead took the temporary file for a left-over
            continue
    return _commit(directory, buffers, names)


_ATTEMPTS = 5


def _commit(directory: Path, buffers: Sequence[Any], names: Iterator[str]) -> tuple[str, int]:
    source, size = temporary(directory), 0
    fd = os.open(source, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                size += len(view)
                while view:
                    view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        for name in names:
            try:
                _move_without_overwriting(source, directory / name)
                break
            except FileExistsError:
                continue
        else:
            raise FileExistsError(errno.EEXIST, "no free name is left", str(directory))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(source)
        raise
    sync_directory(directory)
    return name, size


_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


def _move_without_overwriting(source: Path, target: Path) -> None:
    """A rename that raises FileExistsError instead of replacing a file."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as err:
        if err.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):  # a file system without hard links: the check and the rename are two steps
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.rename(source, target)
    else:
        with contextlib.suppress(FileNotFoundError):  # it is visible: that its other name is gone already does no harm
            os.unlink(source)


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable. What is visible counts as committed, so a failure is only logged."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as err:
        if err.errno not in (errno.EINVAL, errno.ENOTSUP):
            logger.warning("could not sync the directory %s: %s", directory, err)


def free_bytes(directory: Path) -> int | None:
    """Space that is left where a directory lies; None where that cannot be told."""
    try:
        info = os.statvfs(directory)
    except OSError:
        return None
    return info.f_bavail * info.f_frsize


def is_full(err: OSError) -> bool:
    """No space, or no quota, is left."""
    return err.errno in (errno.ENOSPC, errno.EDQUOT)


def is_stale(directory: Path, name: str) -> bool:
    """Whether a ``.tmp-*`` file was left behind: its writer is gone, or nothing was written to it for ten minutes."""
    match = _TEMPORARY_NAME.fullmatch(name)
    if match and match["host"] == _host():
        try:
            os.kill(int(match["pid"]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass  # alive, and someone else's
    try:
        return time.time() - os.lstat(directory / name).st_mtime > STALE_SECONDS
    except FileNotFoundError:
        return False


def open_regular(path: str | Path) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; never follows a link, never blocks on a pipe.

    Raises:
        BadFileError: a link or a special file.
        FileNotFoundError: it is gone.
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
    """Rename ``source`` (a link itself, not what it points to) into ``directory``, under a name that is free there."""
    directory.mkdir(parents=True, exist_ok=True)
    target, i = directory / f"{prefix}{source.name}"[:240], 0
    while os.path.lexists(target):
        i += 1
        target = directory / f"{i}-{prefix}{source.name}"[:240]
    os.rename(source, target)
    return target


class _Open:
    __slots__ = ("dead", "fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd, self.users, self.dead = fd, 0, False


_caches: weakref.WeakSet[FileCache] = weakref.WeakSet()


class FileCache:
    """At most ``limit`` open files, least recently used closed first; a file in use is never closed.

    Safe between threads, and after a fork (positions are not shared: everything is read with pread).
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is None:
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            limit = 512 if soft == resource.RLIM_INFINITY else max(8, min(512, soft // 4))
        self.limit = limit
        self._files: OrderedDict[object, _Open] = OrderedDict()
        self._lock = threading.Lock()
        _caches.add(self)

    def __len__(self) -> int:
        return len(self._files)

    def acquire(self, key: Any, opener: Callable[[Any], int]) -> _Open:
        """The open file of ``key``; ``opener(key)`` is called if there is none. Give it back with `release`."""
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                self._files.move_to_end(key)
                file.users += 1
                return file
        fd = opener(key)
        with self._lock:
            file = self._files.get(key)
            if file is None:
                file = self._files[key] = _Open(fd)
            else:  # another thread was faster
                os.close(fd)
            file.users += 1
            while len(self._files) > self.limit:
                _, oldest = self._files.popitem(last=False)
                self._retire(oldest)
            return file

    def release(self, file: _Open) -> None:
        with self._lock:
            file.users -= 1
            if file.dead and not file.users:
                os.close(file.fd)

    def drop(self, key: object) -> None:
        """Forget a file; it is closed as soon as nobody reads it."""
        with self._lock:
            if (file := self._files.pop(key, None)) is not None:
                self._retire(file)

    def clear(self) -> None:
        """Forget all files."""
        with self._lock:
            while self._files:
                self._retire(self._files.popitem()[1])

    def _retire(self, file: _Open) -> None:
        file.dead = True
        if not file.users:
            os.close(file.fd)

    def __del__(self) -> None:
        try:
            self.clear()
        except (OSError, AttributeError, TypeError):  # the interpreter is on its way out, and its modules are gone
            return

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["limit"])  # type: ignore[misc]


def _after_fork_in_child() -> None:
    for cache in list(_caches):  # another thread of the parent may have held the lock, or have been reading
        cache._lock = threading.Lock()
        for file in cache._files.values():
            file.users = 0


os.register_at_fork(after_in_child=_after_fork_in_child)
