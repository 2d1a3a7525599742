"""Signals that stop a run after its current step, with a documented exit code."""

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
    """Raised by ``learn()`` after a signal; ``code`` is 128 + the signal's number."""


class GracefulStop:
    """A context in which SIGINT, SIGTERM and SIGUSR1 only set `requested`; further signals change nothing.

    It is true if a signal has arrived. On exit the previous handlers are restored, with one exception: if the context is left
    by `Stopped`, the signals are ignored until the process has ended, so that none changes its exit code; if `Stopped` is caught
    and discarded, the previous handlers apply again. Outside the main thread, where handlers cannot be set, signals keep their
    handlers.

    Attributes:
        requested: number of the first signal; None before.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.requested is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number: 130 (SIGINT), 143 (SIGTERM) or 138 (SIGUSR1)."""
        return 128 + (self.requested or 0)

    def decide(self) -> bool:
        """Whether to stop; where several ranks train together, all of them get the same answer (`amago.run.ranks.JointStop`)."""
        return bool(self)

    def heard(self) -> bool:
        """Whether a signal has arrived, for phases that several ranks pass each at its own pace."""
        return bool(self)

    def meet(self, number: int = 0) -> int:
        """Wait until all ranks are here, handling signals meanwhile; all ranks must call this together.

        Returns:
            the largest number that a rank came with.
        """
        return number

    def wait(self, seconds: float) -> None:
        """Sleep until a signal arrives, for so many seconds at most."""
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
            after = dict.fromkeys(self._previous, _IgnoredUntilExit(weakref.ref(value), self._previous))
        for signum, handler in after.items():
            signal.signal(signum, handler)
        self._previous = {}


class _IgnoredUntilExit:
    """A handler that ignores signals while a `Stopped` propagates, and restores the previous handlers if it was discarded.

    Python restores default handlers when the interpreter shuts down, but keeps SIG_IGN, which is therefore set at exit.
    """

    def __init__(self, exception: weakref.ref[Stopped], before: Mapping[int, Any]):
        self.exception, self.before = exception, dict(before)
        atexit.register(self._at_exit)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.exception() is None:  # it was caught, and the process continues
            for number, handler in self.before.items():
                signal.signal(number, handler)
            signal.raise_signal(signum)

    def _at_exit(self) -> None:
        for number in self.before:
            if signal.getsignal(number) is self:
                signal.signal(number, signal.SIG_IGN)
