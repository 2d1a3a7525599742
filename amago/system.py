"""Functions of the operating system that macOS or Windows lack, with what takes their place there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

O_CLOEXEC, O_NOFOLLOW, O_NONBLOCK = (vars(os).get(f"O_{name}", 0) for name in ("CLOEXEC", "NOFOLLOW", "NONBLOCK"))
O_BINARY: int = vars(os).get("O_BINARY", 0)
_moving = threading.Lock()


def after_fork_in_child(function: Callable[[], None]) -> None:
    """Call a function in each forked child; without effect where processes do not fork."""
    if "register_at_fork" in vars(os):
        os.register_at_fork(after_in_child=function)


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """The signals with these names that the system has."""
    return tuple(signal.Signals[name] for name in names if name in signal.Signals.__members__)


def _pread(fd: int, count: int, offset: int) -> bytes:
    with _moving:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, count)


def _preadv(fd: int, buffers: Any, offset: int) -> int:
    (buffer,) = buffers
    data = pread(fd, memoryview(buffer).nbytes, offset)
    memoryview(buffer).cast("B")[: len(data)] = data
    return len(data)


def _pwrite(fd: int, data: bytes, offset: int) -> int:
    with _moving:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


pread: Callable[[int, int, int], bytes] = vars(os).get("pread", _pread)
preadv: Callable[[int, Any, int], int] = vars(os).get("preadv", _preadv)
pwrite: Callable[[int, bytes, int], int] = vars(os).get("pwrite", _pwrite)


def most_open_files() -> float:
    """The soft limit of this process."""
    try:
        import resource
    except ImportError:
        return 512
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def lock(fd: int, wait: bool) -> None:
    """Lock an open file for this process until it closes it; OSError if another one holds it, or the disk has no locks."""
    try:
        import fcntl
    except ImportError:
        try:
            import msvcrt
        except ImportError:
            raise OSError("the system has no locks") from None
        msvcrt.locking(fd, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
