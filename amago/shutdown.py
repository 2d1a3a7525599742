"""Finish the step, save, and leave with a documented exit code when asked to stop."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class GracefulStop:
    """While active, SIGINT, SIGTERM and SIGUSR1 only set `requested`; a second signal changes nothing.

    Truth value: whether to stop. The exit code of a run stopped so is 128 + the signal's number (130, 143, 138). Outside
    the main thread, where handlers cannot be set, this does nothing.
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
            self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}
