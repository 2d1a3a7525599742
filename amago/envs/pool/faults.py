"""Environment faults and the restart budget."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

logger = logging.getLogger(__name__)

HOUR = 3600.0
MIN_RETRY_PAUSE, MAX_RETRY_PAUSE = 0.05, 0.15
"""Seconds between attempts to replace an actor or a worker: short, so that a run in which every attempt fails ends soon."""


class ActorError(RuntimeError):
    """The actors cannot go on; the message contains the last traceback."""


@dataclass(frozen=True)
class Fault:
    """The failure of one environment or worker, which is then replaced.

    Attributes:
        who: "actor 3" or "worker 0 (actors 0, 1)".
        reason: a traceback, or how the worker ended.
        dropped: unfinished rollouts that were dropped with it.
        lost: finished trajectories that were lost with it because they were in no file yet.
    """

    who: str
    reason: str
    dropped: int = 0
    lost: int = 0


class RestartBudget:
    """Logs and counts faults, and ends the run when there are too many.

    Args:
        max_env_restarts: most faults allowed within an hour.

    Raises:
        ValueError: ``max_env_restarts`` is negative.
    """

    def __init__(self, max_env_restarts: int):
        if max_env_restarts < 0:
            raise ValueError(f"max_env_restarts is {max_env_restarts!r}, but must be at least 0")
        self.limit = max_env_restarts
        self._times: deque[float] = deque()
        self._restarts = self._dropped = 0

    def record(self, fault: Fault) -> None:
        """Log and count one fault.

        Raises:
            ActorError: it exceeds the budget.
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
        """Return (restarts, dropped rollouts) since the last call."""
        out = self._restarts, self._dropped
        self._restarts = self._dropped = 0
        return out
