"""The role of a process in its run, as `amago.Experiment` sees it. Without a launcher a role changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amago.envs.statistics import PhaseStatistics
from amago.run.roles.protocol import Assignment, die_with_parent
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

    def learns(self, run: PersistentRun) -> None:
        """``learn()`` begins. A program that calls the parts of ``start()`` one by one has not called `started`."""

    def check_call(self, what: str) -> None:
        """Refuse a call that this role cannot serve, such as "train_epoch()".

        Raises:
            RuntimeError: a loop of the program's own, in a launched process.
        """

    def busy(self, run: PersistentRun) -> None:
        """What follows in ``learn()`` may take long without a sign: preparing, saving, callbacks."""

    def policy_read(self, run: PersistentRun) -> None:
        """The newest published policy was read, before a phase of collection. May wait for a newer one."""

    def ends_phase(self, stop: GracefulStop, collecting: bool) -> Callable[[], bool]:
        """What is asked after each step: whether the phase shall end early.

        Args:
            stop: of the run.
            collecting: in a collection phase, rather than in an evaluation.
        """
        return stop.heard

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

    def after_step(self, run: PersistentRun, steps: int, collecting: bool) -> None:
        """The actors have taken a step. May wait.

        Args:
            run: whose signals end the wait.
            steps: of all actors.
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


class LaunchedRole(Role):
    """What learners and collectors of a launch have in common.

    Args:
        assignment: from the launcher.
    """

    launched = True

    def __init__(self, assignment: Assignment):
        self.assignment = assignment
        self._has_started = self._in_learn = False

    def apply(self, run: PersistentRun) -> None:
        die_with_parent()
        if not self.assignment.launcher_lives:  # it ended before that was bound to happen with this process, too
            raise SystemExit("the launcher is gone")

    def learns(self, run: PersistentRun) -> None:
        if not self._has_started:
            if not hasattr(run, "checkpoints"):
                run.init_checkpoints()
            self.started(run)
        self._in_learn = True

    def started(self, run: PersistentRun) -> None:
        self._has_started = True

    def check_call(self, what: str) -> None:
        if what in ("collect_new_training_data()", "train_epoch()") and not self._in_learn:
            raise RuntimeError(
                f"a launched program calls learn(), in which each process does its part; {what} before it is a loop of the program's own, "
                f"which cannot be divided among processes (this one is {self.assignment.name}): call learn(), or run the program without a launcher"
            )
