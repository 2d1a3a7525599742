"""Environment faults, the restart budget, and mistakes in an environment, which restarts cannot mend."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from amago.spaces import NonFiniteError

logger = logging.getLogger(__name__)

HOUR = 3600.0
PROVEN_STEPS = 1000
RETRY_PAUSE = 0.1
"""Seconds between attempts to replace an actor or a worker: short, so that a run in which every attempt fails ends soon."""

_MISTAKES = (TypeError, ValueError, AttributeError, NameError, LookupError, NotImplementedError, AssertionError)
_ENVS = Path(__file__).parents[1]
_MOST_FRAMES = 6


class ActorError(RuntimeError):
    """Raised if the actors cannot continue; the message contains the last traceback."""


class EnvironmentMistake(ActorError):
    """An environment raised an error of type or shape before any rollout had ended: a mistake in its code rather than a
    crash."""


class Fault(NamedTuple):
    """The failure of one environment or worker, which is then replaced.

    Attributes:
        who: "actor 3" or "worker 0 (actors 0, 1)".
        reason: a traceback, or how the worker ended.
        dropped: unfinished rollouts that were dropped with it.
        lost: finished trajectories that were lost with it because they were in no file yet.
        mistake: `mistake_in` of the error; empty if the failure may be a crash.
    """

    who: str
    reason: str
    dropped: int = 0
    lost: int = 0
    mistake: str = ""


def mistake_in(err: BaseException) -> str:
    """An environment's error of type or shape as text: the error in one line, then its frames, without this library's. Empty for
    other errors, and for NaN and infinity, which may come and go with the state of an environment.
    """
    if not isinstance(err, _MISTAKES) or isinstance(err, NonFiniteError):
        return ""
    (headline, *more) = str(err).splitlines() or [""]
    lines = [f"{type(err).__name__}: {headline}", *more]
    own = _ENVS, _ENVS / "pool"  # the built-in environments are in neither
    frames = [f for f in traceback.extract_tb(err.__traceback__) if Path(f.filename).parent not in own]
    lines += [f"  at {f.filename}, line {f.lineno}, in {f.name}: {f.line}" for f in frames[-_MOST_FRAMES:]]
    return "\n".join(lines)


class RestartBudget:
    """Log and count faults, and end the run when there are more than ``max_env_restarts`` within an hour, or at the first mistake.

    The same fault is logged with its traceback once, then in one line, and ever less often.

    Attributes:
        proven: whether the environments have shown that they work: a rollout has ended, or has lasted `PROVEN_STEPS`. Until
            then, a `Fault.mistake` ends the run.
    """

    def __init__(self, max_env_restarts: int):
        if max_env_restarts < 0:
            raise ValueError(f"max_env_restarts is {max_env_restarts!r}, but must be at least 0")
        self.limit = max_env_restarts
        self.proven: Callable[[], bool] = lambda: False
        self._times: deque[float] = deque()
        self._seen: Counter[str] = Counter()
        self._restarts = self._dropped = 0

    def record(self, fault: Fault) -> None:
        """Log and count one fault; raises EnvironmentMistake if it is a mistake, and the environments are not `proven`, and ActorError
        if it exceeds the budget.
        """
        if fault.mistake and not self.proven():
            raise EnvironmentMistake(
                f"{fault.mistake}\n{fault.who} raised this before any rollout had ended. It looks like a mistake in the environment rather "
                "than a crash, so the environment is not replaced, and the run ends."
            ) from None
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > HOUR:
            self._times.popleft()
        self._restarts += 1
        self._dropped += fault.dropped
        last_line = fault.reason.rstrip().rpartition("\n")[2]
        self._seen[last_line] += 1
        times = self._seen[last_line]
        if fault.lost or not times & (times - 1):  # of many, the 2nd, 4th, 8th, ...
            lost = f"; {fault.lost} finished trajectories not yet in a file are lost" if fault.lost else ""
            reason = fault.reason if times == 1 else f"{last_line} ({times:,} times so far, not all of them shown)"
            logger.warning("%s is replaced, %d unfinished rollouts dropped%s: %s", fault.who, fault.dropped, lost, reason)
        if len(self._times) > self.limit:
            raise ActorError(
                f"{len(self._times)} environments were replaced within an hour, and max_env_restarts is {self.limit}. "
                f"The last was {fault.who}: {fault.reason}"
            ) from None

    def drain(self) -> tuple[int, int]:
        """Return (restarts, dropped rollouts) since the last call."""
        out = self._restarts, self._dropped
        self._restarts = self._dropped = 0
        return out
