"""The part of a process in a launch, as a callback of its experiment: learner or collector; and processes that only collect, or only learn
(``--mode``)."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

from amago.envs.pool.subprocess import usable_cores
from amago.envs.statistics import EpisodeRecord, PhaseStatistics
from amago.loading.dataset import collection_ended
from amago.run.callbacks import Callback, Run
from amago.run.evaluate import mean_length, merge_values, outcomes, summarise
from amago.run.group import Stopped, meet_through
from amago.run.launched import protocol
from amago.run.launched.protocol import OUTBOX, REPORTS, STAGING, Assignment, UpdateLimits, read_small
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
    random streams of this process from other processes' streams; ``begun`` is true from the first epoch on."""

    process_key: tuple[int, ...] = ()
    begun = False

    def __init__(self, assignment: Assignment):
        self.assignment = assignment
        self._beat: dict[str, Any] = {}

    def check_call(self, what: str) -> None:
        """Refuse a loop of the program's own, such as a call of "train_epoch()" before ``learn()``, by a `RuntimeError`."""
        if what in ("collect_new_training_data()", "train_epoch()") and not self.begun:
            raise RuntimeError(
                f"a launched program calls learn(), in which each process does its part; {what} before it is a loop of the program's own, "
                f"which cannot be divided among processes (this one is {self.assignment.name}): call learn(), or run the program without a launcher"
            )

    def write_beat(self, **changes: object) -> None:
        """Write a sign of life: the last one with changes. With "long", the next may take long: the process prepares, saves or runs callbacks;
        with "over", ``learn()`` has ended."""
        self._beat |= changes
        protocol.write_beat(self.assignment.beat_file, self._beat)


class Learner(Launched):
    """Trains and publishes weights; never acts. Its beats say how long the next may take, so that one that saves is no hang."""

    def __init__(self, assignment: Assignment):
        super().__init__(assignment)
        self.limits = UpdateLimits()
        self._next_look = self._next_row = 0.0
        self._waited = self._paused = 0.0  # seconds of this process, and of collectors
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
        if settings.progress == "rich":
            settings.progress = "plain"  # the launcher has the last line of the terminal

    def _begin(self, experiment: Run) -> None:
        self.begun, self._first_update, run_dir = True, experiment.grad_update_counter, os.path.abspath(experiment.run_dir)
        target = experiment.data.save_new_trajs_to
        if target is None:
            kind, name = type(experiment.data).__name__, experiment.data.dset_name
            raise ValueError(f"{kind} {name!r} takes no new trajectories, so collectors have nowhere to deliver")
        arriving = Path(target).parent / STAGING / sha256(run_dir.encode()).hexdigest()[:12]  # several runs may share a store
        places = {"run_dir": run_dir, "save_to": target, "arriving": arriving, "policy": experiment.checkpoints.latest.parent}
        self._beat = {name: os.path.abspath(path) for name, path in places.items()}  # with them, collectors may begin
        experiment.write_latest_policy()  # they shall not act with their initial weights

    def before_epoch(self, experiment: Run) -> None:
        if not self.begun:
            self._begin(experiment)
        self._log_reports(experiment)
        self._report(experiment, "saving")
        if self._main and experiment.env_steps:
            metrics = {
                "Updates per Environment Step": experiment.grad_update_counter / experiment.env_steps,
                "Learner Waited (s)": self._waited, "Collectors Paused (s)": self._paused,
            }  # fmt: skip
            experiment.log(metrics, "dataset")

    def before_update(self, experiment: Run) -> None:
        signals = experiment.signals
        self._look(experiment, "training")

        def verdict() -> int:
            waits = self._main and self.limits.learner_waits(experiment.grad_update_counter, experiment.env_steps)
            return int(waits) if signals.requested is None else 2  # the largest: a signal to any rank ends the wait of all

        # Ranks make this update together, and decide together afterwards: until the first goes on, they wait here, where signals to them
        # are handled, rather than for its gradients.
        while experiment.group.largest(verdict()) == 1:
            began = time.monotonic()
            signals.wait(0.1)
            self._look(experiment, "waiting")
            self._waited += time.monotonic() - began

    def on_step(self, experiment: Run, steps: int, phase: str) -> None:
        if phase == "wait":
            self._look(experiment, "waiting")
        elif time.monotonic() >= self._next_look:  # a callback evaluates
            self._report(experiment, "evaluating")

    def on_train_epoch_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        self._report(experiment, "saving")

    def _look(self, experiment: Run, state: str) -> None:
        """Find new files, write the run's progress, and log the collectors' reports."""
        now = time.monotonic()
        if now < self._next_look:
            return
        collection_ended(experiment.data, experiment)
        next_look = now + LOOKS_SHARE * (time.monotonic() - now)  # a look into many files takes longer
        self._report(experiment, state)
        self._next_look = max(self._next_look, next_look)
        if now >= self._next_row:
            self._log_reports(experiment)

    def _report(self, experiment: Run, state: str) -> None:
        """Write a beat. The end of "saving" is reported at once, and nothing after the end of the run before another ``learn()``."""
        is_over, now = state in ("finished", "stopped"), time.monotonic()
        self._next_look = math.inf if is_over else 0.0 if state == "saving" else now + LOOK_SECONDS
        if not self._main:
            return
        updates, steps = experiment.grad_update_counter, experiment.env_steps
        first = updates == self._first_update  # which may compile, and choose algorithms
        self._paused += now - self._beat["time"] if self._beat.get("pause") else 0.0
        self.write_beat(
            state="preparing" if first and state == "saving" else state, long=first or state in ("saving", "evaluating"), over=is_over,
            time=now, epoch=experiment.epoch, epochs=experiment.epochs, updates=updates, steps=steps, version=experiment.checkpoints.version,
            pause=is_over or self.limits.collectors_pause(updates, steps), limits=str(self.limits), resumes=experiment.resume == "auto",
        )  # fmt: skip

    def _log_reports(self, experiment: Run) -> None:
        """Log the reports that have arrived: rollouts of all collectors in one row, each evaluation in a separate row."""
        if not (self._main and self.begun):
            return
        self._next_row = time.monotonic() + ROW_SECONDS
        reports = []
        for path in sorted(Path(self._beat["arriving"], REPORTS).glob("*.json")):
            reports += [] if (report := read_small(path)) is None else [report]
            with contextlib.suppress(OSError):
                path.unlink()
        if rollouts := [r for r in reports if r["section"] == "rollout"]:
            stats, metrics = _merge(rollouts)
            experiment.position.count(stats.frames)
            for report in rollouts:
                experiment.position.explored |= Counter(report["explored"])  # the larger numbers
            lags = [experiment.checkpoints.version - r["version"] for r in rollouts]
            waited = sum(r["waited"] for r in rollouts)  # with a limit to the lag
            if metrics:
                metrics |= {
                    "Collectors": float(len({r["collector"] for r in rollouts})), "Policy Lag (Versions)": fmean(lags),
                    "Largest Policy Lag (Versions)": float(max(lags)), **({"Collectors Waited for Policy (s)": waited} if waited else {}),
                }  # fmt: skip
            experiment.log(metrics, "rollout")
            experiment.moments.call("on_collect_epoch_end", experiment, metrics)
        for report in (r for r in reports if r["section"] == "val"):
            metrics = _merge([report])[1]
            experiment.log_at(metrics, "val", report["axes"])
            experiment.moments.call("on_validation_end", experiment, metrics)

    def on_end(self, experiment: Run) -> None:
        self._log_reports(experiment)
        self._report(experiment, "finished")

    def on_exception(self, experiment: Run, exception: BaseException) -> None:
        if isinstance(exception, Stopped):
            self._log_reports(experiment)
            self._report(experiment, "stopped")


def _merge(reports: Sequence[Mapping[str, Any]]) -> tuple[PhaseStatistics, dict[str, float]]:
    """The statistics of several phases together, and their metrics."""
    total, exploration = PhaseStatistics(), merge_values(r["statistics"]["exploration"] for r in reports)
    for stats in (r["statistics"] for r in reports):
        total.merge(PhaseStatistics(**stats | {"episodes": [EpisodeRecord(**episode) for episode in stats["episodes"]]}))
    faults = {"Restarted Environments": total.restarts, "Dropped Rollouts": total.dropped}
    return total, {
        **summarise(*outcomes(total)), **mean_length([[episode.length for episode in total.episodes]]),
        **{name: fmean(values) for name, values in exploration.items() if values},
        **{name: float(number) for name, number in faults.items() if number},
    }  # fmt: skip


class Collector(Launched):
    """Acts with the newest published policy until it is stopped.

    Its run directory is its own, in which ``ckpts/latest`` leads to the published policy. Trajectories go to a spool, rollouts to
    reports, which the learner logs. One collector of a launch evaluates, each time that the learner has published ``val_interval``
    policies. It waits, with its trajectories in memory, while the disk is full; while the learner is behind; and, with
    ``max_policy_lag``, while its policy is older than that.
    """

    def __init__(self, assignment: Assignment):
        super().__init__(assignment)
        self._beat = {"state": "starting", "steps": 0, "version": 0, "paused": "", "long": True}
        self._next_beat = self._waited = 0.0  # seconds of waiting for a newer policy, since the last report
        self._interval: int | None = None
        self._evaluated = -1  # the learner's epoch at the last evaluation, in intervals
        self._directory = assignment.directory

    def apply(self, settings: ExperimentSettings) -> None:
        part = self.assignment
        (self._directory / OUTBOX).mkdir(parents=True, exist_ok=True)
        self.process_key = 1 + part.index, time.time_ns(), part.node  # one that replaces another draws other random numbers
        latest = self._directory / "ckpts" / "latest"
        latest.parent.mkdir(exist_ok=True)
        latest.unlink(missing_ok=True)
        latest.symlink_to(part.policy)
        settings.ckpt_base_dir, settings.run_name = os.path.split(self._directory)
        collect_only(settings)
        settings.dataset, settings.dset_root, settings.dset_name = None, str(self._directory), "spool"
        settings.resolve()
        settings.exploration_plan = settings.exploration_plan  # of the run, whose epochs end; a collector's do not
        settings.epochs, settings.total_steps, settings.resume, settings.overwrite = _FOR_EVER, None, "never", False
        settings.init_from, settings.share_buffer = None, False
        settings.callbacks = settings.log_to = ()  # they are the learner's, which logs all rollouts and evaluations
        settings.verbose = settings.log_to_wandb = settings.log_to_tensorboard = False
        self._interval = settings.val_interval = None if part.index else settings.val_interval
        if settings.env_workers is None:
            settings.env_workers = max(1, usable_cores() // part.collectors)

    def _begin(self, experiment: Run) -> None:
        self.begun = True
        steps = experiment.checkpoints.note["explored"].get(str(experiment.exploration_wrapper_type), 0)
        load_pool_state(experiment.train_envs.pool, {"actors": {"": {"exploration": {"global_step": steps}}}}, False)
        self.write_beat(state="collecting", long=False)

    def before_epoch(self, experiment: Run) -> None:
        if not self.begun:
            self._begin(experiment)
        began = time.monotonic()
        if self._is_old(experiment):
            self._wait(experiment, protocol.OLD_POLICY, 0.5, lambda: self._is_old(experiment, read=True))
            self._waited += time.monotonic() - began
        if self._interval:
            since = max(0, experiment.checkpoints.version - 1) // self._interval  # it publishes once before its first epoch
            due = since != self._evaluated and bool(self._orders().get("evaluates", True))
            experiment.val_interval = 1 if due else None
            self._evaluated = since if due else self._evaluated

    def _is_old(self, experiment: Run, read: bool = False) -> bool:
        """True if the policy, which with ``read`` is read again, is older than the launch allows."""
        if read:
            experiment.read_latest_policy()
        self._beat["version"], most = experiment.checkpoints.version, self.assignment.max_policy_lag
        return most is not None and int(self._orders().get("version", 0)) - self._beat["version"] > most

    def on_step(self, experiment: Run, steps: int, phase: str) -> bool:
        self._beat["steps"] += steps if phase == "collect" else 0
        if time.monotonic() < self._next_beat:
            return False
        # not put off by the beat of a report, or it would never come in short phases
        self._next_beat = time.monotonic() + LOOK_SECONDS
        self.write_beat()
        if phase != "collect":
            return False
        if (pool := experiment.train_envs.pool).disk_is_full:  # finished trajectories are in memory
            self._write(experiment, "a trajectory", lambda: pool.flush() or pool.disk_is_full)
        self._wait(experiment, protocol.PAUSED, 0.2, lambda: bool(self._orders().get("pause")))
        return self._is_old(experiment)

    def _orders(self) -> dict[str, Any]:
        return read_small(Path(self.assignment.control) / protocol.ORDERS) or {}

    def _wait(self, experiment: Run, reason: str, seconds: float, needed: Callable[[], bool]) -> None:
        """Wait, with beats, while this is needed, as is asked each so many seconds, and no signal has arrived."""
        while needed() and experiment.signals.requested is None:
            self.write_beat(paused=reason)
            experiment.signals.wait(seconds)
        self.write_beat(paused="")

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

    def on_collect_epoch_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        self._report(experiment, "rollout")

    def on_validation_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        self._report(experiment, "val")

    def _report(self, experiment: Run, section: str) -> None:
        stats, experiment.phase_statistics = experiment.phase_statistics, None
        assert stats is not None
        name, checkpoints = f"{self.assignment.name}-{self.assignment.node:08x}", experiment.checkpoints
        actors = experiment.train_envs.pool.state_dict()["actors"].values()
        steps = max(actor.get("exploration", {}).get("global_step", 0) for actor in actors)
        report = {
            "section": section, "collector": name, "version": checkpoints.version, "axes": checkpoints.note["axes"], "waited": self._waited,
            "statistics": asdict(stats), "explored": {str(experiment.exploration_wrapper_type): steps},
        }  # fmt: skip
        path, self._waited = self._directory / OUTBOX / f"{name}-{time.time_ns()}.json", 0.0
        self._write(experiment, path, lambda: protocol.write_small(path, report))
        self.write_beat()

    def on_exception(self, experiment: Run, exception: BaseException) -> None:
        if isinstance(exception, Stopped):
            if experiment.phase_statistics is not None:
                self._report(experiment, "rollout")  # of the phase that the signal has ended
            self.write_beat(state="stopped")


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
