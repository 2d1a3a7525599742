"""The learner of a launched run: it trains on the collectors' trajectories, and logs their reports."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from amago.loading.dataset import collection_ended
from amago.run.callbacks import Callback
from amago.run.evaluate import mean_length, merge_values, summarise
from amago.run.group import Stopped
from amago.run.launched.limits import UpdateLimits
from amago.run.launched.protocol import LONG, REPORTS, SHORT, Assignment, launch_dir, read_small, write_beat
from amago.run.launched.role import Launched, LaunchedRun, learn_only
from amago.run.settings import ExperimentSettings

LOOK_SECONDS, LOOKS_SHARE, ROW_SECONDS = 0.25, 20, 20.0
"""Between two looks at the store, and two beats; a look takes a twentieth of the time at most; between two rows of rollouts in the log, of
which there is also one at the end of each epoch."""
_AGAIN, _MEETING_SECONDS = 1, 60.0  # ranks that wait for the first meet it so often, long before a call between ranks times out


class Learner(Launched):
    """Trains and publishes weights; never acts. Its beats say how long the next may take, so that one that saves is no hang."""

    def __init__(self, assignment: Assignment):
        super().__init__(assignment)
        self.limits = UpdateLimits()
        self._callbacks: tuple[Callback, ...] = ()  # of the user
        self._next_look = self._next_row = 0.0
        self._axes: dict[int, dict[str, int]] = {}  # of published versions of the policy
        self._places: dict[str, str] = {}
        self._waited = self._paused = self._pause_since = (
            0.0  # seconds of this process, and of collectors; 0: they are not to pause
        )
        self._next_meeting = time.monotonic() + _MEETING_SECONDS
        self._main = True
        self._first_update: int | None = None  # of this process in learn(); None before

    def apply(self, settings: ExperimentSettings) -> None:
        ranks = int(os.environ.get("WORLD_SIZE") or 1)  # each would collect
        per_epoch = (settings.train_timesteps_per_epoch or 0) * settings.parallel_actors
        begins, updates = settings.start_learning_at_epoch, settings.train_batches_per_epoch / settings.batches_per_update
        warmup = int(begins * per_epoch) if 0 < begins < math.inf else 0
        own = updates / (per_epoch * ranks) if per_epoch else 0.0  # the ratio of the same program in one process
        default = UpdateLimits(0.5 * own, 2.0 * own or math.inf, warmup)
        self.limits = default if self.assignment.limits is None else UpdateLimits.parse(self.assignment.limits, warmup)
        learn_only(settings)
        self._callbacks = tuple(settings.callbacks)
        if settings.progress == "rich":
            settings.progress = "plain"  # the launcher has the last line of the terminal

    def begin(self, experiment: LaunchedRun) -> None:
        self.begun = True
        self._main = experiment.accelerator.is_main_process
        target = experiment.data.save_new_trajs_to
        if target is None:
            raise ValueError(
                f"{type(experiment.data).__name__} {experiment.data.dset_name!r} takes no new trajectories, so collectors have "
                "nowhere to deliver"
            )
        if not self._main:
            return
        (launch_dir(experiment.run_dir) / REPORTS).mkdir(parents=True, exist_ok=True)
        experiment.write_latest_policy()  # collectors shall not act with their initial weights
        self._note_version(experiment)
        places = {"run_dir": experiment.run_dir, "save_to": target, "policy": experiment.checkpoints.latest.parent}
        self._places = {name: os.path.abspath(p) for name, p in places.items()}  # with them, collectors may begin
        self._write_beat(experiment, "waiting")

    def before_epoch(self, experiment: LaunchedRun) -> None:
        super().before_epoch(experiment)
        if self._first_update is None:
            self._first_update = experiment.grad_update_counter
        self._note_version(experiment)  # published at the end of the epoch before
        self._announce_pause(experiment)
        if self._main and experiment.env_steps:
            metrics = {
                "Updates per Environment Step": experiment.grad_update_counter / experiment.env_steps,
                "Learner Waited (s)": self._waited, "Collectors Paused (s)": self._paused,
            }  # fmt: skip
            experiment.log(metrics, "dataset")

    def _note_version(self, experiment: LaunchedRun) -> None:
        """Remember where the run is at a version of the policy, for the log of its evaluation."""
        version = experiment.checkpoints.version
        if version not in self._axes:
            self._axes[version] = experiment.axes()
            self._axes.pop(min(self._axes) if len(self._axes) > 1000 else -1, None)
            if experiment.logger is not None:
                self._log_reports(experiment)

    def before_update(self, experiment: LaunchedRun) -> None:
        signals, several = experiment.signals, experiment.accelerator.num_processes > 1
        self._look(experiment, "training")
        if self.limits.most == math.inf and not self.limits.warmup:
            return

        waits = self.limits.learner_waits
        while self._main and not signals.pending() and waits(experiment.grad_update_counter, experiment.env_steps):
            began = time.monotonic()
            signals.wait(0.1)
            self._look(experiment, "waiting")
            self._waited += time.monotonic() - began
            if several and time.monotonic() >= self._next_meeting:
                self._meet(experiment, _AGAIN)
        # Ranks make this update together, and decide together afterwards. The others wait for the first here, where signals to them are
        # handled, rather than for its gradients.
        while several and self._meet(experiment, 0) == _AGAIN:
            continue

    def _meet(self, experiment: LaunchedRun, verdict: int) -> int:
        self._next_meeting = time.monotonic() + _MEETING_SECONDS
        return experiment.signals.meet(verdict)

    def on_step(self, experiment: LaunchedRun, steps: int, phase: str) -> None:
        if phase == "wait":
            self._look(experiment, "waiting")
        elif time.monotonic() >= self._next_look:  # a callback evaluates
            self._next_look = time.monotonic() + LOOK_SECONDS
            self._write_beat(experiment, "evaluating", LONG)

    def on_train_epoch_end(self, experiment: LaunchedRun, metrics: Mapping[str, float]) -> None:
        self._announce_pause(experiment)

    def _announce_pause(self, experiment: LaunchedRun) -> None:
        """Announce a long time without a beat: preparing, saving, callbacks."""
        self._write_beat(experiment, "preparing" if experiment.grad_update_counter == self._first_update else "saving", LONG)
        self._next_look = 0.0  # its end is reported at once

    def _look(self, experiment: LaunchedRun, state: str) -> None:
        """Find new files, write the run's progress, and log the collectors' reports."""
        now = time.monotonic()
        if now < self._next_look:
            return
        collection_ended(experiment.data, experiment)
        self._next_look = now + max(LOOK_SECONDS, LOOKS_SHARE * (time.monotonic() - now))  # a look into many files takes longer
        # the first update may compile, and choose algorithms
        self._write_beat(experiment, state, LONG if experiment.grad_update_counter == self._first_update else SHORT)
        if now >= self._next_row:
            self._log_reports(experiment)

    def _write_beat(self, experiment: LaunchedRun, state: str, silence: str | None = None) -> None:
        """Write a beat. Until the next it may be `SHORT`, `LONG`, or, outside of ``learn()``, nobody knows how long (None)."""
        if not self._main:
            return
        updates, steps, now = experiment.grad_update_counter, experiment.env_steps, time.monotonic()
        pause = self.limits.collectors_pause(updates, steps)
        self._paused += now - self._pause_since if self._pause_since else 0.0
        self._pause_since = now if pause else 0.0
        beat = {
            "state": state, "epoch": experiment.epoch, "epochs": experiment.epochs, "updates": updates, "steps": steps,
            "version": experiment.checkpoints.version, "pause": pause,
            "limits": str(self.limits), "silence": None if self._first_update is None else silence,
            "resumes": experiment.resume == "auto", **self._places,
        }  # fmt: skip
        write_beat(self.assignment.beat_file, beat)

    def _log_reports(self, experiment: LaunchedRun) -> None:
        """Log the reports that have arrived: rollouts of all collectors in one row, each evaluation in a separate row."""
        if not self._main:
            return
        self._next_row = time.monotonic() + ROW_SECONDS
        reports = []
        for path in sorted((launch_dir(experiment.run_dir) / REPORTS).glob("*.json")):
            if (report := read_small(path)) is not None:
                reports.append(report)
            with contextlib.suppress(OSError):
                path.unlink()
        rollouts = [r for r in reports if r["section"] == "rollout"]
        for report in rollouts:
            for name, frames in report["frames"].items():
                experiment.frames_by_env[name] = experiment.frames_by_env.get(name, 0) + frames
        if rollouts:
            merged = _merge(rollouts, experiment.checkpoints.version)
            experiment.log(merged, "rollout")
            for callback in self._callbacks:
                callback.on_collect_epoch_end(experiment, merged)
        for report in reports:
            if report["section"] == "val":
                metrics, axes = _merge([report]), self._axes.get(report["version"]) or experiment.axes()
                experiment.log_at(metrics, "val", axes)
                for callback in self._callbacks:
                    callback.on_validation_end(experiment, metrics)

    def on_end(self, experiment: LaunchedRun) -> None:
        self._log_reports(experiment)
        self._write_beat(experiment, "finished")

    def on_exception(self, experiment: LaunchedRun, exception: BaseException) -> None:
        if isinstance(exception, Stopped):
            self._log_reports(experiment)
            self._write_beat(experiment, "stopped")


def _merge(reports: list[dict[str, Any]], version: int | None = None) -> dict[str, float]:
    """The metrics of several reports, with ``version`` of the newest policy also of how old the policies of the rollouts were."""
    metrics = summarise(merge_values(r["returns"] for r in reports), merge_values(r["specials"] for r in reports))
    metrics |= mean_length([r["lengths"] for r in reports]) if metrics else {}
    exploration = merge_values(r["exploration"] for r in reports)
    metrics |= {name: sum(values) / len(values) for name, values in exploration.items() if values}
    for name, key in (("Restarted Environments", "restarts"), ("Dropped Rollouts", "dropped")):
        total = sum(r[key] for r in reports)
        metrics |= {name: float(total)} if total else {}
    if version is not None and metrics:
        lags = [version - r["version"] for r in reports]
        metrics["Collectors"] = float(len({tuple(r["collector"]) for r in reports}))
        metrics["Policy Lag (Versions)"] = sum(lags) / len(lags)
        metrics["Largest Policy Lag (Versions)"] = float(max(lags))
        waited = sum(r["waited"] for r in reports)  # with a limit to the lag
        metrics |= {"Collectors Waited for Policy (s)": waited} if waited else {}
    return metrics
