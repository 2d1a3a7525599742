"""Locks on files that end with the process that holds them, also if it is killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import logging
import os
import socket
import weakref
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

log = logging.getLogger(__name__)
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM}
_open: weakref.WeakSet[RunLock] = weakref.WeakSet()
_hooked = False


class HeldError(RuntimeError):
    """A lock is held by another `RunLock`; the message says by whom."""


class RunLock:
    """The right to write a run: one process at a time has it.

    The lock is that of the operating system (``flock``), which ends with its holder. Where a network disk knows no locks, a
    warning is logged and the run goes on without.

    Args:
        path: file of the lock. It stays, and holds the process id, the host and the start of the last holder.
    """

    def __init__(self, path: Path):
        self.path = path
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            HeldError: it is held; "being written by pid N on HOST since TIME".
            OSError: the file cannot be opened.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not self._take():
                gc.collect()  # in a notebook: an experiment that was replaced without close()
                if not self._take():
                    raise HeldError(_holder(self.path))
            _close_in_children(self)
            self._finalizer = weakref.finalize(self, os.close, self._fd)
            os.ftruncate(self._fd, 0)
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0)
        except BaseException:
            fd, self._fd = self._fd, None
            if not hasattr(self, "_finalizer"):
                os.close(fd)
            raise

    def _take(self) -> bool:
        assert self._fd is not None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            if err.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                return False
            if err.errno not in _NO_LOCKS:
                raise
            log.warning(
                "%s cannot be locked (%s): two processes with this run name would damage each other's files unnoticed",
                self.path, err,
            )  # fmt: skip
        return True

    def release(self) -> None:
        """Give the lock back; twice is fine."""
        if self._fd is not None:
            self._fd = None
            self._finalizer()

    def _forget(self) -> None:
        """In a forked child: close the file, which would otherwise keep the lock beyond the end of its holder."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._finalizer.detach()
            os.close(fd)


def _close_in_children(lock: RunLock) -> None:
    global _hooked
    _open.add(lock)
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for lock in list(_open):
        lock._forget()


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_bytes())
        pid, host, since = found["pid"], found["host"], found["since"]
    except (OSError, ValueError, KeyError, TypeError):
        return "being written by another process"  # which has taken the lock in this moment
    if (pid, host) == (os.getpid(), socket.gethostname()):
        return (
            f"being written by another Experiment of this process (pid {pid} on {host}) since {since}: close() that one first"
        )
    return f"being written by pid {pid} on {host} since {since}"


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Only one process at a time is in this block; others wait. Without effect where a disk knows no locks."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
