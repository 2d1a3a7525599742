"""The part of a process in a launch, as a callback of its experiment: learner or collector; and processes that only collect, or only learn
(``--mode``)."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from amago.envs.pool.subprocess import usable_cores
from amago.loading import DiskTrajDataset
from amago.loading.dataset import collection_ended
from amago.run.callbacks import Callback, Run
from amago.run.evaluate import mean_length, merge_values, outcomes, summarise
from amago.run.group import Stopped, meet_through
from amago.run.launched import protocol
from amago.run.launched.protocol import LAUNCH, LONG, OUTBOX, REPORTS, SHORT, STATE_FILE, Assignment, UpdateLimits, read_small
from amago.run.settings import ExperimentSettings, SettingsError, collect_only, learn_only
from amago.run.state import load_pool_state
from amago.store.files import is_full

log = logging.getLogger(__name__)
LOOK_SECONDS, LOOKS_SHARE, ROW_SECONDS = 0.25, 20, 20.0
"""Between two beats, and a learner's looks at the store; a look takes a twentieth of the time at most; between two rows of rollouts in the
log, of which there is also one at the end of each epoch."""
_FOR_EVER = sys.maxsize // 2**16  # epochs: the launcher ends a collector
_joined: list[str] = []


class Launched(Callback):
    """Base of the two roles, each of which changes the settings by ``apply``, before anything is built. ``process_key`` distinguishes the
    random streams of this process from other processes' streams."""

    process_key: tuple[int, ...] = ()

    def __init__(self, assignment: Assignment):
        self.assignment = assignment
        self.begun = False

    def begin(self, experiment: Run) -> None:
        """Begin, with the first epoch: everything is built then."""

    def before_epoch(self, experiment: Run) -> None:
        if not self.begun:
            self.begin(experiment)
        self.begun = True

    def check_call(self, what: str) -> None:
        """Refuse a loop of the program's own, such as a call of "train_epoch()" before ``learn()``, by a `RuntimeError`."""
        if what in ("collect_new_training_data()", "train_epoch()") and not self.begun:
            raise RuntimeError(
                f"a launched program calls learn(), in which each process does its part; {what} before it is a loop of the program's own, "
                f"which cannot be divided among processes (this one is {self.assignment.name}): call learn(), or run the program without a launcher"
            )


class Learner(Launched):
    """Trains and publishes weights; never acts. Its beats say how long the next may take, so that one that saves is no hang."""

    def __init__(self, assignment: Assignment):
        super().__init__(assignment)
        self.limits = UpdateLimits()
        self._callbacks: tuple[Callback, ...] = ()  # of the user
        self._next_look = self._next_row = 0.0
        self._axes: dict[int, dict[str, int]] = {}  # where the run was at published versions, for the log of evaluations
        self._places: dict[str, str] = {}
        self._waited = self._paused = 0.0  # seconds of this process, and of collectors
        self._pause_since = 0.0  # 0: they are not to pause
        self._main = os.environ.get("RANK", "0") == "0"
        self._first_update = 0  # of this process

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

    def begin(self, experiment: Run) -> None:
        self._first_update = experiment.grad_update_counter
        target = experiment.data.save_new_trajs_to
        if target is None:
            kind, name = type(experiment.data).__name__, experiment.data.dset_name
            raise ValueError(f"{kind} {name!r} takes no new trajectories, so collectors have nowhere to deliver")
        if not self._main:
            return
        (experiment.run_dir / LAUNCH / REPORTS).mkdir(parents=True, exist_ok=True)
        experiment.write_latest_policy()  # collectors shall not act with their initial weights
        places = {"run_dir": experiment.run_dir, "save_to": target, "policy": experiment.checkpoints.latest.parent}
        self._places = {name: os.path.abspath(p) for name, p in places.items()}  # with them, collectors may begin

    def before_epoch(self, experiment: Run) -> None:
        super().before_epoch(experiment)
        version = experiment.checkpoints.version  # published at the end of the epoch before
        if version not in self._axes:
            self._axes[version] = experiment.axes()
            self._axes.pop(min(self._axes) if len(self._axes) > 1000 else -1, None)
            self._log_reports(experiment)
        self._announce_pause(experiment)
        if self._main and experiment.env_steps:
            metrics = {
                "Updates per Environment Step": experiment.grad_update_counter / experiment.env_steps,
                "Learner Waited (s)": self._waited, "Collectors Paused (s)": self._paused,
            }  # fmt: skip
            experiment.log(metrics, "dataset")

    def before_update(self, experiment: Run) -> None:
        signals = experiment.signals
        self._look(experiment, "training")
        if self.limits.most == math.inf and not self.limits.warmup:
            return

        def verdict() -> int:
            if signals.requested is not None:
                return 2  # the largest: a signal to any rank ends the wait of all
            return int(self._main and self.limits.learner_waits(experiment.grad_update_counter, experiment.env_steps))

        # Ranks make this update together, and decide together afterwards: until the first goes on, they wait here, where signals to them
        # are handled, rather than for its gradients.
        while signals.meet(verdict()) == 1:
            began = time.monotonic()
            signals.wait(0.1)
            self._look(experiment, "waiting")
            self._waited += time.monotonic() - began

    def on_step(self, experiment: Run, steps: int, phase: str) -> None:
        if phase == "wait":
            self._look(experiment, "waiting")
        elif time.monotonic() >= self._next_look:  # a callback evaluates
            self._next_look = time.monotonic() + LOOK_SECONDS
            self._write_beat(experiment, "evaluating", LONG)

    def on_train_epoch_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        self._announce_pause(experiment)

    def _announce_pause(self, experiment: Run) -> None:
        """Announce a long time without a beat: preparing, saving, callbacks."""
        self._write_beat(experiment, "preparing" if experiment.grad_update_counter == self._first_update else "saving", LONG)
        self._next_look = 0.0  # its end is reported at once

    def _look(self, experiment: Run, state: str) -> None:
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

    def _write_beat(self, experiment: Run, state: str, silence: str | None = None) -> None:
        """Write a beat. Until the next it may be `SHORT`, `LONG`, or, after the end, nobody knows how long (None)."""
        if not self._main:
            return
        updates, steps, now = experiment.grad_update_counter, experiment.env_steps, time.monotonic()
        pause = self.limits.collectors_pause(updates, steps)
        self._paused += now - self._pause_since if self._pause_since else 0.0
        self._pause_since = now if pause else 0.0
        beat = {
            "state": state, "epoch": experiment.epoch, "epochs": experiment.epochs, "updates": updates, "steps": steps,
            "version": experiment.checkpoints.version, "pause": pause, "limits": str(self.limits), "silence": silence,
            "resumes": experiment.resume == "auto", **self._places,
        }  # fmt: skip
        protocol.write_beat(self.assignment.beat_file, beat)

    def _log_reports(self, experiment: Run) -> None:
        """Log the reports that have arrived: rollouts of all collectors in one row, each evaluation in a separate row."""
        if not self._main:
            return
        self._next_row = time.monotonic() + ROW_SECONDS
        reports = []
        for path in sorted((experiment.run_dir / LAUNCH / REPORTS).glob("*.json")):
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

    def on_end(self, experiment: Run) -> None:
        self._log_reports(experiment)
        self._write_beat(experiment, "finished")

    def on_exception(self, experiment: Run, exception: BaseException) -> None:
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


class Collector(Launched):
    """Acts with the newest published policy until it is stopped.

    Its run directory is its own, in which ``ckpts/latest`` leads to the published policy. Trajectories go to a spool, rollouts to
    reports, which the learner logs. One collector of a launch evaluates, each time that the learner has published ``val_interval``
    policies. It waits, with its trajectories in memory, while the disk is full; while the learner is behind; and, with
    ``max_policy_lag``, while its policy is older than that.
    """

    def __init__(self, assignment: Assignment):
        super().__init__(assignment)
        self._beat: dict[str, Any] = {"state": "starting", "steps": 0, "version": 0, "paused": "", "silence": LONG}
        self._next_beat = 0.0
        self._start, self._reports = time.time_ns(), 0
        self._interval: int | None = None
        self._evaluated = -1  # the learner's epoch at the last evaluation, in intervals
        self._waited = 0.0  # seconds for a newer policy, since the last report
        self._reported: object = None
        self._directory = assignment.directory

    def apply(self, settings: ExperimentSettings) -> None:
        part = self.assignment
        (self._directory / OUTBOX).mkdir(parents=True, exist_ok=True)
        self.process_key = 1 + part.index, self._start, part.node  # one that replaces another draws other random numbers
        latest = self._directory / "ckpts" / "latest"
        latest.parent.mkdir(exist_ok=True)
        latest.unlink(missing_ok=True)
        latest.symlink_to(part.policy)
        settings.ckpt_base_dir, settings.run_name = os.path.split(self._directory)
        collect_only(settings)
        settings.dataset = DiskTrajDataset(self._directory, "spool")
        settings.dset_root = settings.dset_name = None
        settings.dset_max_size = settings.dset_max_steps = settings.dset_max_bytes = float("inf")
        settings.exploration_plan = settings.exploration_plan  # of the run, whose epochs end; a collector's do not
        settings.epochs, settings.total_steps, settings.resume, settings.overwrite = _FOR_EVER, None, "never", False
        settings.init_from, settings.share_buffer = None, False
        settings.callbacks = ()  # they are the learner's, which logs all rollouts and evaluations
        settings.verbose = settings.log_to_wandb = settings.log_to_tensorboard = False
        settings.log_to = ()
        self._interval = settings.val_interval = None if part.index else settings.val_interval
        if settings.env_workers is None:
            settings.env_workers = max(1, usable_cores() // part.collectors)

    def begin(self, experiment: Run) -> None:
        # an earlier collector of this number has left off with it; or else one of another machine
        saved = read_small(self._directory / STATE_FILE) or read_small(self._directory.parent / STATE_FILE)
        if saved is not None and saved.keys() == {"pool", "exploration"}:
            same_wrapper = saved["exploration"] == str(experiment.exploration_wrapper_type)
            load_pool_state(experiment.train_envs.pool, saved["pool"], not same_wrapper)
        self._write_beat(state="collecting", silence=SHORT)

    def before_epoch(self, experiment: Run) -> None:
        super().before_epoch(experiment)
        self._wait_for_policy(experiment)
        if self._interval:
            since = max(0, experiment.checkpoints.version - 1) // self._interval  # it publishes once before its first epoch
            due = since != self._evaluated and bool(self._orders().get("evaluates", True))
            experiment.val_interval = 1 if due else None
            self._evaluated = since if due else self._evaluated

    def _wait_for_policy(self, experiment: Run) -> None:
        def is_still_old() -> bool:
            experiment.read_latest_policy()
            self._beat["version"] = experiment.checkpoints.version
            return self._is_old()

        self._beat["version"], began = experiment.checkpoints.version, time.monotonic()
        if self._is_old():
            self._wait(experiment, protocol.OLD_POLICY, 0.5, is_still_old)
            self._waited += time.monotonic() - began

    def _is_old(self) -> bool:
        """True if the policy is older than the launch allows."""
        most = self.assignment.max_policy_lag
        return most is not None and int(self._orders().get("version", 0)) - self._beat["version"] > most

    def on_step(self, experiment: Run, steps: int, phase: str) -> bool:
        self._beat["steps"] += steps if phase == "collect" else 0
        if time.monotonic() < self._next_beat:
            return False
        self._next_beat = (
            time.monotonic() + LOOK_SECONDS
        )  # not put off by the beat of a report, or it would never come in short phases
        self._write_beat()
        if phase != "collect":
            return False
        if (pool := experiment.train_envs.pool).disk_is_full:  # finished trajectories are in memory
            self._write(experiment, "a trajectory", lambda: pool.flush() or pool.disk_is_full)
        self._wait(experiment, protocol.PAUSED, 0.2, lambda: bool(self._orders().get("pause")))
        return self._is_old()

    def _orders(self) -> dict[str, Any]:
        return read_small(Path(self.assignment.control) / protocol.ORDERS) or {}

    def _wait(self, experiment: Run, reason: str, seconds: float, needed: Callable[[], bool]) -> None:
        """Wait, with beats, while this is needed, as is asked each so many seconds, and no signal has arrived."""
        while needed() and experiment.signals.requested is None:
            self._write_beat(paused=reason)
            experiment.signals.wait(seconds)
        if self._beat["paused"]:
            self._write_beat(paused="")

    def _write(self, experiment: Run, what: object, write: Callable[[], object]) -> None:
        """Try to write, by a function that returns true or raises where the disk is full, until there is space, or a signal arrives."""

        def fails() -> bool:
            try:
                return bool(write())
            except OSError as err:
                if not is_full(err):
                    raise
                return True

        if fails():
            log.warning("%s cannot be written, since no space is left: collection waits until it can", what)
            self._wait(experiment, protocol.NO_SPACE, 1.0, fails)

    def _write_beat(self, **changes: object) -> None:
        self._beat.update(changes)
        protocol.write_beat(self.assignment.beat_file, self._beat)

    # ---- between phases --------------------------------------------------------------------------------------------------

    def on_collect_epoch_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        self._report(experiment, "rollout")

    def on_validation_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        self._report(experiment, "val")

    def _report(self, experiment: Run, section: str) -> None:
        stats = self._reported = experiment.phase_statistics
        assert stats is not None
        part, (returns, specials) = self.assignment, outcomes(stats)
        content = {
            "section": section, "collector": [part.node, part.index], "version": experiment.checkpoints.version,
            "returns": returns, "specials": specials, "frames": stats.frames,
            "restarts": stats.restarts, "dropped": stats.dropped, "lengths": [episode.length for episode in stats.episodes],
            "exploration": {name: list(map(float, values)) for name, values in stats.exploration.items()},
            "waited": self._waited,
        }  # fmt: skip
        self._waited = 0.0
        self._reports += 1
        files = {self._directory / OUTBOX / f"{part.name}-{part.node:08x}-{self._start}-{self._reports:09d}.json": content}
        if section == "rollout":
            pool = experiment.train_envs.pool.state_dict()
            files[self._directory / STATE_FILE] = {"pool": pool, "exploration": str(experiment.exploration_wrapper_type)}
        for path, value in files.items():
            self._write(experiment, path, lambda: protocol.write_small(path, value))  # noqa: B023
        self._write_beat()

    def on_exception(self, experiment: Run, exception: BaseException) -> None:
        if isinstance(exception, Stopped):
            if experiment.phase_statistics is not None and experiment.phase_statistics is not self._reported:
                self._report(experiment, "rollout")  # of the phase that the signal has ended
            self._write_beat(state="stopped")


def join(settings: ExperimentSettings) -> Learner | Collector | None:
    """Give an experiment its part in a launch; None in a process that no launcher has started.

    Raises:
        RuntimeError: another experiment of this process has the part.
    """
    if (assignment := Assignment.of_this_process()) is None:
        return None
    if _joined:
        raise RuntimeError(
            f"a launched program starts one Experiment, and this one ({assignment.name}) starts a second: launch a program for each run "
            "(with --collectors, --trials must be 1)"
        )
    sys.excepthook = _without_traceback
    if meeting := os.environ.get(protocol.RANKS_FILE):
        meet_through(meeting)
    settings.plan_epochs(1)  # before the fields that it takes change
    callback = Learner(assignment) if assignment.kind == "learner" else Collector(assignment)
    callback.apply(settings)
    _joined.append(assignment.name)
    return callback


def _without_traceback(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """Print a mistake in the settings as its message alone, other errors in full."""
    if isinstance(value, SettingsError):
        print(f"{kind.__name__}: {value}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, value, trace)
