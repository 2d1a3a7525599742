"""What goes wrong with environments, and how much of it a run puts up with."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

logger = logging.getLogger(__name__)

HOUR = 3600.0
LONGEST_PAUSE = 0.15
"""Seconds from one attempt to make actors anew to the next: short, so that what never succeeds ends the run soon."""


class ActorError(RuntimeError):
    """The actors cannot go on; the message holds the last traceback."""


@dataclass(frozen=True)
class Fault:
    """One environment or worker that was replaced.

    Attributes:
        who: "actor 3" or "worker 0 (actors 0, 1)".
        reason: a traceback, or how the worker ended.
        dropped: unfinished rollouts that went with it.
        lost: finished trajectories that went with it before they were in a file.
    """

    who: str
    reason: str
    dropped: int = 0
    lost: int = 0


class RestartBudget:
    """Logs and counts faults, and ends the run when there are too many.

    Args:
        max_env_restarts: faults within any hour that are put up with.
    """

    def __init__(self, max_env_restarts: int):
        if max_env_restarts < 0:
            raise ValueError(f"max_env_restarts is {max_env_restarts!r}, but must be at least 0")
        self.limit = max_env_restarts
        self._times: deque[float] = deque()
        self._restarts = self._dropped = 0

    def note(self, fault: Fault) -> None:
        """Count one fault.

        Raises:
            ActorError: it was one too many.
        """
        now = time.monotonic()
        self._times.append(now)
        while self._times and now - self._times[0] > HOUR:
            self._times.popleft()
        self._restarts += 1
        self._dropped += fault.dropped
        lost = f"; {fault.lost} finished trajectories not yet in a file are lost" if fault.lost else ""
        logger.warning("%s is replaced, %d unfinished rollouts dropped%s: %s", fault.who, fault.dropped, lost, fault.reason)
        if len(self._times) > self.limit:
            raise ActorError(
                f"{len(self._times)} environments were replaced within an hour, and max_env_restarts is {self.limit}. "
                f"The last was {fault.who}: {fault.reason}"
            )

    def drain(self) -> tuple[int, int]:
        """(restarts, dropped rollouts) since the last call."""
        out = self._restarts, self._dropped
        self._restarts = self._dropped = 0
        return out
