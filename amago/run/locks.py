"""Locks on files that end with the process that holds them, also if it is killed."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import socket
import weakref
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from amago import system
from amago.run.launched.protocol import read_small

log = logging.getLogger(__name__)


class HeldError(RuntimeError):
    """A lock is held by another `RunLock`; the message names the holder."""


class RunLock:
    """The right to write a run, which one process at a time has: a ``flock``, which ends with its holder. Where a network disk does not
    support locks, a warning is logged and the run goes on without. Its file ``path`` stays, and holds process id, host and start of the
    last holder."""

    _held: weakref.WeakSet[RunLock] = weakref.WeakSet()

    def __init__(self, path: Path):
        self.path = path
        self._close: weakref.finalize | None = None  # also when nobody refers to the lock any more
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock, or raise a `HeldError`: "being written by pid N on HOST since TIME"."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | system.O_CLOEXEC, 0o644)
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            if not self._take():
                gc.collect()  # in a notebook: an experiment that was replaced without close()
                if not self._take():
                    raise HeldError(_holder(self.path))
            self._held.add(self)
            os.ftruncate(self._fd, 0)
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            system.pwrite(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0)
        except BaseException:
            self.release()
            raise

    def _take(self) -> bool:
        try:
            system.lock(self._fd, wait=False)
        except OSError as err:
            if err.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            warning = "%s cannot be locked (%s): two processes with this run name would damage each other's files unnoticed"
            log.warning(warning, self.path, err)
        return True

    def release(self) -> None:
        """Give the lock back; twice is fine."""
        if self._close is not None:
            self._close()


def _release_in_child() -> None:
    """In a forked child: close the files, which would otherwise keep the locks beyond the end of their holder."""
    for lock in list(RunLock._held):
        lock.release()


system.after_fork_in_child(_release_in_child)


def _holder(path: Path) -> str:
    found = read_small(path)
    if found is None:
        return "being written by another process"  # which has taken the lock in this moment
    pid, host, since = (found.get(k) for k in ("pid", "host", "since"))
    if (pid, host) != (os.getpid(), socket.gethostname()):
        return f"being written by pid {pid} on {host} since {since}"
    return f"being written by another Experiment of this process (pid {pid} on {host}) since {since}: close() that one first"


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Only one process at a time is in this block; others wait. Without effect where a disk does not support locks."""
    try:
        fd = os.open(directory, os.O_RDONLY | system.O_CLOEXEC)
    except PermissionError:  # Windows opens no directories
        yield
        return
    try:
        with contextlib.suppress(OSError):
            system.lock(fd, wait=True)
        yield
    finally:
        os.close(fd)
