"""Whether groups of actors are stepped alternately or jointly, chosen by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median


class GroupTiming:
    """Chooses between alternate and joint steps of groups by timing both periodically.

    A trial takes some steps either way; the way with the shorter median is used until the next trial. A trial may extend over
    several runs, so that short runs need not begin with one.

    Args:
        clock: returns the time in seconds.
    """

    WARMUP_STEPS, TIMED_STEPS = 2, 8  # of each way in a trial: caches and pipelines settle; then steps are timed
    TRIAL_INTERVAL = 1000  # steps between trials: trials take 2% of all steps

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._joint = False
        self._steps = 0  # since the last trial
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._durations: tuple[list[float], list[float]] | None = (
            [],
            [],
        )  # of alternate and of joint steps; None between trials
        self._last: float | None = None  # when the step before began, if this step's beginning is its end

    def begin_run(self) -> None:
        """Say that a run begins: the time since the last step of the run before is not a step's."""
        self._last = None

    def joint(self) -> bool:
        """Whether to take the step that begins now jointly; call it once at the beginning of each step."""
        if self._durations is None:
            self._steps += 1
            if self._steps < self.TRIAL_INTERVAL:
                return self._joint
            self._steps = 0
            self._begin_trial()
        assert self._durations is not None
        now, durations = self._clock(), self._durations[self._joint]
        if self._last is not None:
            durations.append(now - self._last)
        self._last = now
        if len(durations) == self.WARMUP_STEPS + self.TIMED_STEPS:
            self._last = None
            self._joint = not self._joint
            if self._durations[self._joint]:  # both ways are timed
                alternate, joint = (median(d[self.WARMUP_STEPS :]) for d in self._durations)
                self._joint, self._durations = joint < alternate, None
        return self._joint
