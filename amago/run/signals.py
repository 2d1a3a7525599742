"""Finish the step, save, and leave with a documented exit code when asked to stop."""

from __future__ import annotations

import atexit
import signal
import threading
import time
import weakref
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(SystemExit):
    """The end of a run that a signal has stopped; ``code`` is 128 + the signal's number."""


class GracefulStop:
    """While active, SIGINT, SIGTERM and SIGUSR1 only set `requested`; a second signal changes nothing.

    Truth value: whether to stop. The exit code of a run stopped so is 128 + the signal's number (130, 143, 138). Outside
    the main thread, where handlers cannot be set, this does nothing.

    A process that leaves with `Stopped` goes on to ignore these signals until it has ended, or another would change its
    exit code. If the exception is caught and dropped instead, signals mean again what they meant before.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.requested is not None

    @property
    def exit_code(self) -> int:
        return 128 + (self.requested or 0)

    def wait(self, seconds: float) -> None:
        """Sleep, but not past a signal."""
        end = time.monotonic() + seconds
        while self.requested is None and time.monotonic() < end:
            time.sleep(0.05)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signum

    def __enter__(self) -> GracefulStop:
        self.requested = None
        if threading.current_thread() is threading.main_thread():
            before = {s: signal.signal(s, self._handle) for s in SIGNALS}
            self._previous = {s: signal.SIG_DFL if handler is None else handler for s, handler in before.items()}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        after: dict[int, Any] = self._previous
        if self._previous and isinstance(value, Stopped):
            after = dict.fromkeys(self._previous, _Deaf(weakref.ref(value), self._previous))
        for signum, handler in after.items():
            signal.signal(signum, handler)
        self._previous = {}


class _Deaf:
    """A handler that ignores signals for as long as a `Stopped` is on its way out of the process.

    Python itself takes handlers away at the very end, but leaves what the system ignores ignored.
    """

    def __init__(self, leaving: weakref.ref[Stopped], before: Mapping[int, Any]):
        self.leaving, self.before = leaving, dict(before)
        atexit.register(self._at_exit)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.leaving() is None:  # somebody has caught it, and the process goes on
            for number, handler in self.before.items():
                signal.signal(number, handler)
            signal.raise_signal(signum)

    def _at_exit(self) -> None:
        for number in self.before:
            if signal.getsignal(number) is self:
                signal.signal(number, signal.SIG_IGN)
