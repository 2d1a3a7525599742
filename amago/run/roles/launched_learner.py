"""The learner of a launched run: it trains on what collectors deliver, and logs what they report."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amago.compat.datasets import collection_ended
from amago.run.evaluate import mean_length, merge_values, summarise
from amago.run.roles.limits import UpdateLimits
from amago.run.roles.modes import learn_only
from amago.run.roles.protocol import (
    HELLO,
    LONG,
    ORDERS,
    REPORTS,
    SHORT,
    Assignment,
    launch_dir,
    read_soon,
    write_beat,
    write_soon,
)
from amago.run.roles.role import LaunchedRole
from amago.run.signals import GracefulStop

if TYPE_CHECKING:
    from amago.run.persistence import PersistentRun

LOOK_SECONDS = 0.25
"""Between two looks at the store, and two beats."""
LOOKS_SHARE = 20  # a look takes a twentieth of the time at most
_AGAIN, _MEETING_SECONDS = 1, 60.0  # ranks that wait for the first meet it so often, long before a call between ranks times out
ROW_SECONDS = 20.0
"""Between two rows of rollouts in the log, at most; there is one at the end of each epoch."""


class LaunchedLearner(LaunchedRole):
    """Trains and publishes weights; never acts.

    Its beats say how soon the next follows, so that the launcher can tell a learner that hangs from one that saves.

    Args:
        assignment: from the launcher.
    """

    def __init__(self, assignment: Assignment):
        super().__init__(assignment)
        self.limits = UpdateLimits(assignment.least, math.inf if assignment.most is None else assignment.most)
        self._next_look = self._next_row = 0.0
        self._axes: dict[int, dict[str, int]] = {}  # of published versions of the policy
        self._waited, self._waits, self._count = 0.0, False, 0
        self._steps = self._updates = 0
        self._next_meeting, self._code = time.monotonic() + _MEETING_SECONDS, 0
        self._main = True
        self._first_update: int | None = None  # of this process in learn(); None before

    def apply(self, run: PersistentRun) -> None:
        super().apply(run)
        per_epoch = (run.train_timesteps_per_epoch or 0) * run.parallel_actors
        begins = run.start_learning_at_epoch
        warmup = int(begins * per_epoch) if 0 < begins < math.inf else 0
        self.limits = UpdateLimits(self.limits.least, self.limits.most, warmup)
        learn_only(run)
        if run.progress == "rich":
            run.progress = "plain"  # the launcher has the last line of the terminal

    def started(self, run: PersistentRun) -> None:
        super().started(run)
        self._main = run.accelerator.is_main_process
        if not self._main:
            return
        target = run._data.save_new_trajs_to
        if target is None:
            raise ValueError(
                f"{type(run._data).__name__} {run._data.dset_name!r} takes no new trajectories, so collectors have nowhere to deliver"
            )
        self._inbox(run).mkdir(parents=True, exist_ok=True)
        run.write_latest_policy()  # collectors shall not act with weights of their own
        self.published(run)
        hello = {"run_dir": str(run.run_dir.absolute()), "save_to": os.path.abspath(target)}
        self._say(run, "waiting")
        write_soon(Path(self.assignment.control) / HELLO, hello)

    def learns(self, run: PersistentRun) -> None:
        super().learns(run)
        self._first_update = run.grad_update_counter
        self.busy(run)

    def published(self, run: PersistentRun) -> None:
        self._axes[run.checkpoints.version] = {**run.axes(), "epoch": run.epoch + run._epoch_is_over}
        for old in sorted(self._axes)[:-1000]:
            del self._axes[old]
        if self._main and run.logger is not None:
            self._log_reports(run)

    # ---- while it trains -------------------------------------------------------------------------------------------------

    def may_update(self, run: PersistentRun, stop: GracefulStop) -> bool:
        self._look(run, "training")
        several = run.accelerator.num_processes > 1
        if not self.limits.make_learner_wait:
            return several or not stop.heard()
        while self._main and not stop.heard() and self.limits.learner_waits(run.grad_update_counter, run.env_steps):
            began = time.monotonic()
            self._waits = True
            stop.wait(0.1)
            self._look(run, "waiting")
            self._waited += time.monotonic() - began
            if several and time.monotonic() >= self._next_meeting:
                self._meet(stop, _AGAIN)
        self._waits = False
        # Ranks make this update together, and decide together afterwards. The others wait for the first here, where signals to them are
        # handled, rather than for its gradients.
        while several and self._meet(stop, 0) == _AGAIN:
            continue
        return several or not stop.heard()

    def _meet(self, stop: GracefulStop, verdict: int) -> int:
        self._next_meeting = time.monotonic() + _MEETING_SECONDS
        return stop.meet(verdict)

    def after_step(self, run: PersistentRun, steps: int, collecting: bool) -> None:
        """A callback evaluates."""
        if self._main and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            self._say(run, "evaluating", LONG)

    def busy(self, run: PersistentRun) -> None:
        if self._main:
            self._say(run, "preparing" if run.grad_update_counter == self._first_update else "saving", LONG)
            self._next_look = 0.0  # the end of it is said at once

    def waiting(self, run: PersistentRun) -> None:
        self._look(run, "waiting")

    def _look(self, run: PersistentRun, state: str) -> None:
        """Find new files, say how far the run is, and log what collectors have reported."""
        now = time.monotonic()
        if now < self._next_look:
            return
        collection_ended(run._data, run)
        self._next_look = now + max(LOOK_SECONDS, LOOKS_SHARE * (time.monotonic() - now))  # a look into many files takes longer
        if self._main:
            # the first update may compile, and choose algorithms
            self._say(run, state, LONG if run.grad_update_counter == self._first_update else SHORT)
            if now >= self._next_row:
                self._log_reports(run)

    def _say(self, run: PersistentRun, state: str, silence: str | None = None) -> None:
        """Write a beat.

        Args:
            state: for the progress line.
            silence: how long it may be until the next: `SHORT`, `LONG`, or None where nobody knows, outside of ``learn()``.
        """
        self._count += 1
        self._updates, self._steps = run.grad_update_counter, run.env_steps
        beat = {
            "state": state, "epoch": run.epoch, "epochs": run.epochs, "updates": self._updates, "steps": self._steps,
            "version": run.checkpoints.version, "pause": self.limits.collectors_pause(self._updates, self._steps),
            "waited": round(self._waited, 3), "pid": os.getpid(), "count": self._count,
            "silence": None if self._first_update is None else silence, "resumes": run.resume == "auto", "code": self._code,
        }  # fmt: skip
        write_beat(self.assignment.beat_file, beat)

    def metrics(self) -> dict[str, float]:
        if not self._main:
            return {}
        paused = (read_soon(Path(self.assignment.control) / ORDERS) or {}).get("paused_seconds", 0.0)
        per_step = {"Updates per Environment Step": self._updates / self._steps} if self._steps else {}
        return per_step | {"Learner Waited (s)": self._waited, "Collectors Paused (s)": float(paused)}

    # ---- reports of collectors -------------------------------------------------------------------------------------------

    @staticmethod
    def _inbox(run: PersistentRun) -> Path:
        return launch_dir(run.run_dir) / REPORTS

    def _log_reports(self, run: PersistentRun) -> None:
        """Log the reports that have arrived: rollouts of all collectors in one row, each evaluation in a row of its own."""
        self._next_row = time.monotonic() + ROW_SECONDS
        reports = list(self._take(self._inbox(run)))
        rollouts = [r for r in reports if r["section"] == "rollout"]
        for report in rollouts:
            for name, frames in report["frames"].items():
                run.frames_by_env[name] = run.frames_by_env.get(name, 0) + frames
        if rollouts:
            merged = _merged(rollouts, run.checkpoints.version)
            run.log(merged, "rollout")
            run._callbacks.call("on_collect_epoch_end", run, merged)
        for report in reports:
            if report["section"] != "rollout":
                metrics, axes = _merged([report]), self._axes.get(report["version"]) or run.axes()
                run.log_at(metrics, report["section"], axes)
                if report["section"] == "val":
                    run._callbacks.call("on_validation_end", run, metrics)

    @staticmethod
    def _take(inbox: Path) -> Iterable[dict[str, Any]]:
        for path in sorted(inbox.glob("*.json")):
            report = read_soon(path)
            with contextlib.suppress(OSError):
                path.unlink()
            if report is not None:
                yield report

    def ended(self, run: Any, state: str) -> None:
        self._code = run._stop.exit_code if state == "stopped" else 0
        if self._main:
            self._log_reports(run)
            self._say(run, state)


def _merged(reports: list[dict[str, Any]], version: int | None = None) -> dict[str, float]:
    """The metrics of several reports.

    Args:
        version: of the newest published policy, for how old the policies of the rollouts were; None: leave that out.
    """
    metrics = summarise(merge_values(r["returns"] for r in reports), merge_values(r["specials"] for r in reports))
    metrics |= mean_length([r["lengths"] for r in reports]) if metrics else {}
    exploration = merge_values(r["exploration"] for r in reports)
    metrics |= {name: sum(values) / len(values) for name, values in exploration.items() if values}
    for name, key in (("Restarted Environments", "restarts"), ("Dropped Rollouts", "dropped")):
        total = sum(r[key] for r in reports)
        metrics |= {name: float(total)} if total else {}
    if version is not None and metrics:
        metrics["Collectors"] = float(len({r["collector"] for r in reports}))
        lags = [version - r["version"] for r in reports]
        metrics["Policy Lag (Versions)"] = sum(lags) / len(lags)
        metrics["Largest Policy Lag (Versions)"] = float(max(lags))
        waited = sum(r.get("waited", 0.0) for r in reports)  # with a limit to the lag
        metrics |= {"Collectors Waited for Policy (s)": waited} if waited else {}
    return metrics
