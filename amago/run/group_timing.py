"""Whether groups of actors take turns or act together, decided by the clock."""

from __future__ import annotations

import time
from statistics import median


class Pace:
    """How the next step is taken: each way is tried for some steps, then whichever took less time goes on, until it is tried again.

    It lasts for many runs, so that short ones need not begin with a trial.
    """

    SKIPPED, TIMED = 2, 8  # steps of each way: pipelines fill, caches warm up; then their median counts
    EVERY = 1000  # steps between trials: they take a fiftieth of all

    def __init__(self) -> None:
        self._now = False
        self._tried: list[list[float]] | None = [[], []]
        self._last = 0.0
        self._steps = 0

    def begin(self) -> None:
        """A run begins: the time since the last step of the one before does not count."""
        self._last = 0.0

    def together(self) -> bool:
        """Asked at the beginning of each step of which there is a choice."""
        if self._tried is None:
            self._steps += 1
            if self._steps < self.EVERY:
                return self._now
            self._tried, self._last, self._steps = [[], []], 0.0, 0
        now, times = time.perf_counter(), self._tried[self._now]
        if self._last:
            times.append(now - self._last)
        self._last = now
        if len(times) == self.SKIPPED + self.TIMED:
            self._now, self._last = not self._now, 0.0
            if self._tried[self._now]:
                turns, joint = (median(t[self.SKIPPED :]) for t in self._tried)
                self._now, self._tried = joint < turns, None
        return self._now
