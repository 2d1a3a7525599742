"""The role of a process in its run, as `amago.Experiment` sees it. Without a launcher a role changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from amago.envs.statistics import PhaseStatistics
from amago.run.signals import GracefulStop

if TYPE_CHECKING:
    from amago.run.persistence import PersistentRun


class Role:
    """The role of a process that nobody has launched: collect, train and evaluate as the settings say.

    Attributes:
        seed_key: what distinguishes the random streams of this process from those of others of the run.
        launched: whether a launcher has started this process.
    """

    seed_key: tuple[int, ...] = ()
    launched = False

    def apply(self, run: PersistentRun) -> None:
        """Change the settings of a run that is about to start."""

    def started(self, run: PersistentRun) -> None:
        """The run has started."""

    def log_dir(self, run_dir: Path) -> Path:
        """The directory of this process's log."""
        return run_dir

    def evaluates(self, epoch: int, interval: int | None, version: int) -> bool:
        """Whether an evaluation is due.

        Args:
            epoch: of this process.
            interval: ``val_interval``.
            version: of the published policy that this process has read.
        """
        return bool(interval) and epoch % (interval or 1) == 0

    def after_step(self, steps: int, stop: GracefulStop, collecting: bool) -> None:
        """The actors have taken a step. May wait.

        Args:
            steps: of all actors.
            stop: ends the wait.
            collecting: in a collection phase, rather than in an evaluation.
        """

    def report(self, run: PersistentRun, section: str, stats: PhaseStatistics) -> None:
        """A phase is over."""

    def may_update(self, run: PersistentRun, stop: GracefulStop) -> bool:
        """Wait until the next update may be made; False: not at all, as a signal has arrived."""
        return True

    def waiting(self, run: PersistentRun) -> None:
        """The run waits for data."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the section "buffer" of the log."""
        return {}

    def published(self, run: PersistentRun) -> None:
        """The policy's weights were published."""

    def ended(self, run: Any, state: str) -> None:
        """``learn()`` is over: "finished", or "stopped" by a signal."""
