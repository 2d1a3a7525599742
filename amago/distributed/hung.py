"""A learner that hangs: killed, and started again where the program resumes."""

from __future__ import annotations

import time

from amago.distributed.children import Child, Patience
from amago.run.roles.protocol import LONG, SHORT


class LearnerError(RuntimeError):
    """The learner hangs, and starting it again does not help or is not possible."""


class HungLearner:
    """Watches the beats of the learner's first process. While one of several ranks hangs, the others wait for it, and so there are none.

    A learner that has not reached ``learn()`` may take as long as it likes, unless it was started again.

    Args:
        child: the learner.
        patience: of the launcher.

    Attributes:
        news: for the user, until somebody takes them.
    """

    def __init__(self, child: Child, patience: Patience):
        self.child, self.patience = child, patience
        self.news: list[str] = []
        self._hangs, self._updates = 0, -1  # in a row; most updates that the learner has reached

    def watch(self) -> None:
        """Read what the learner says. If it hangs, kill it and start it again.

        Raises:
            LearnerError: the program does not resume; or the learner hangs again and again, without an update between.
        """
        child = self.child
        child.listen()
        silent, limit = time.monotonic() - child.heard, self._limit()
        if not child.runs or limit is None or silent <= limit:
            return
        updates = int(child.beat.get("updates", -1))
        self._hangs = self._hangs + 1 if updates <= self._updates else 1
        self._updates = max(self._updates, updates)
        resumes, doing = child.beat.get("resumes", self._hangs > 1), child.beat.get("state", "starting")
        child.kill()
        what = (
            f"the learner ({doing}, after {max(0, updates):,} updates) has said nothing for {silent:.0f} seconds and was killed"
        )
        if not resumes:
            raise LearnerError(
                f"{what}. It is not started again, as the program would not go on from its last training state: give the experiment "
                "resume='auto' (--resume auto). If it was only slow, give a longer --hang-timeout"
            )
        if self._hangs >= self.patience.deaths:
            raise LearnerError(
                f"{what}, {self._hangs} times in a row without an update between. If it was only slow, give a longer --hang-timeout"
            )
        self.news.append(f"{what}; it starts again from its last training state")
        child.start()

    def _limit(self) -> float | None:
        """Seconds within which the next sign must come; None if nobody knows."""
        if not self.child.beat:
            return self.patience.start if self._hangs else None
        long = max(self.patience.start, self.patience.step)
        return {SHORT: self.patience.step, LONG: long}.get(str(self.child.beat.get("silence")))
