"""A cache of open files."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class _Open:
    __slots__ = ("dead", "fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd, self.users, self.dead = fd, 0, False


_caches: weakref.WeakSet[FileCache] = weakref.WeakSet()


class FileCache:
    """At most ``limit`` open files; the least recently used is closed first, but no file while it is in use.

    Safe to use from several threads and after a fork, as files are read with ``pread``, which has no shared position.

    Args:
        limit: default: a quarter of the process's limit, between 8 and 512.
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
        """The open file of ``key``, opened with ``opener(key)`` if necessary; `release` it afterwards."""
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
        """Remove a file; it is closed when nobody uses it any more."""
        with self._lock:
            if (file := self._files.pop(key, None)) is not None:
                self._retire(file)

    def clear(self) -> None:
        """Remove all files."""
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
        except (OSError, AttributeError, TypeError):  # the interpreter is shutting down, and modules are gone
            return

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["limit"])  # type: ignore[misc]


def _after_fork_in_child() -> None:
    for cache in list(_caches):  # a thread of the parent may have held the lock or a file
        cache._lock = threading.Lock()
        for file in cache._files.values():
            file.users = 0


os.register_at_fork(after_in_child=_after_fork_in_child)
