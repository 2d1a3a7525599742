"""A collector of a launched run: it acts, and writes its trajectories into a private spool."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from amago.envs.pool.subprocess import usable_cores
from amago.loading import DiskTrajDataset
from amago.run.evaluate import outcomes
from amago.run.group import Stopped
from amago.run.launched.protocol import (
    LONG,
    NO_SPACE,
    OLD_POLICY,
    ORDERS,
    PAUSED,
    SHORT,
    STATE_FILE,
    Assignment,
    outbox_of,
    read_small,
    write_beat,
    write_small,
)
from amago.run.launched.role import Launched, LaunchedRun, collect_only
from amago.run.settings import ExperimentSettings
from amago.run.state import load_pool_state
from amago.store.files import is_full

logger = logging.getLogger(__name__)
BEAT_SECONDS = 0.25
_RETRY_SECONDS = 1.0  # after a full disk
_FOR_EVER = sys.maxsize // 2**16  # epochs: the launcher ends a collector


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
        self._too_old = False  # the policy, for the phase to go on
        self._waited = 0.0  # seconds for a newer policy, since the last report
        self._reported: object = None
        self._directory: Path

    def apply(self, settings: ExperimentSettings) -> None:
        part = self.assignment
        while "policy" not in (orders := self._orders()):  # until the learner has claimed the run
            self._write_beat()
            time.sleep(0.1)
        self._directory = Path(orders["collectors"]) / part.name
        outbox_of(self._directory).mkdir(parents=True, exist_ok=True)
        self.process_key = (
            1 + part.index,
            self._start,
            part.node,
        )  # one that replaces another does not repeat its random numbers
        with open(self._directory / "log.txt", "ab") as log:
            for number, stream in ((1, sys.stdout), (2, sys.stderr)):
                stream.flush()
                os.dup2(log.fileno(), number)
        self._write_beat(log=log.name)
        latest = self._directory / "ckpts" / "latest"
        latest.parent.mkdir(exist_ok=True)
        latest.unlink(missing_ok=True)
        latest.symlink_to(orders["policy"])
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

    def begin(self, experiment: LaunchedRun) -> None:
        self.begun = True
        saved = read_small(self._directory / STATE_FILE)  # an earlier collector of this number has left off with it
        if saved is not None and saved.keys() == {"pool", "exploration"}:
            same_wrapper = saved["exploration"] == str(experiment.exploration_wrapper_type)
            load_pool_state(experiment.train_envs.pool, saved["pool"], not same_wrapper)
        self._write_beat(state="collecting", silence=SHORT)

    def before_epoch(self, experiment: LaunchedRun) -> None:
        super().before_epoch(experiment)
        self._wait_for_policy(experiment)
        if self._interval:
            since = max(0, experiment.checkpoints.version - 1) // self._interval  # it publishes once before its first epoch
            due = since != self._evaluated and bool(self._orders().get("evaluates", True))
            experiment.val_interval = 1 if due else None
            self._evaluated = since if due else self._evaluated

    def _wait_for_policy(self, experiment: LaunchedRun) -> None:
        began, read = time.monotonic(), None
        self._beat["version"] = experiment.checkpoints.version

        def is_old() -> bool:
            nonlocal read
            newest = experiment.checkpoints.latest
            if self._is_old() and newest.exists() and (info := newest.stat()) != read:
                read = info
                experiment.read_latest_policy()
                self._beat["version"] = experiment.checkpoints.version
            return self._is_old()

        if self._is_old():
            self._wait(experiment, OLD_POLICY, 0.5, is_old)
            self._waited += time.monotonic() - began

    def _is_old(self) -> bool:
        """True if the policy is older than the launch allows."""
        most = self.assignment.max_policy_lag
        self._too_old = most is not None and int(self._orders().get("version", 0)) - self._beat["version"] > most
        return self._too_old

    def on_step(self, experiment: LaunchedRun, steps: int, phase: str) -> bool:
        collecting = phase == "collect"
        self._beat["steps"] += steps if collecting else 0
        if time.monotonic() >= self._next_beat:
            # not put off by the beat of a report, or it would never come in short phases
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self._write_beat()
            if collecting:
                if (pool := experiment.train_envs.pool).disk_is_full:  # finished trajectories are in memory
                    self._write(experiment, "a trajectory", lambda: pool.flush() or pool.disk_is_full)
                self._wait(experiment, PAUSED, 0.2, lambda: bool(self._orders().get("pause")))
                self._is_old()
        return collecting and self._too_old

    def _orders(self) -> dict[str, Any]:
        return read_small(Path(self.assignment.control) / ORDERS) or {}

    def _wait(self, experiment: LaunchedRun, reason: str, seconds: float, needed: Callable[[], bool]) -> None:
        """Wait, with beats, while this is needed, as is asked each so many seconds, and no signal has arrived."""
        while needed() and experiment.signals.requested is None:
            self._write_beat(paused=reason)
            experiment.signals.wait(seconds)
        if self._beat["paused"]:
            self._write_beat(paused="")

    def _write(self, experiment: LaunchedRun, what: object, write: Callable[[], object]) -> None:
        """Try to write, by a function that returns true or raises where the disk is full, until there is space, or a signal arrives."""

        def fails() -> bool:
            try:
                return bool(write())
            except OSError as err:
                if not is_full(err):
                    raise
                return True

        if fails():
            logger.warning("%s cannot be written, since no space is left: collection waits until it can", what)
            self._wait(experiment, NO_SPACE, _RETRY_SECONDS, fails)
            if experiment.signals.requested is None:
                logger.warning("%s is written, and collection goes on", what)

    def _write_beat(self, **changes: object) -> None:
        self._beat.update(changes)
        write_beat(self.assignment.beat_file, self._beat)

    # ---- between phases --------------------------------------------------------------------------------------------------

    def on_collect_epoch_end(self, experiment: LaunchedRun, metrics: Mapping[str, float]) -> None:
        self._report(experiment, "rollout")

    def on_validation_end(self, experiment: LaunchedRun, metrics: Mapping[str, float]) -> None:
        self._report(experiment, "val")

    def _report(self, experiment: LaunchedRun, section: str) -> None:
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
        files = {outbox_of(self._directory) / f"{part.name}-{part.node:08x}-{self._start}-{self._reports:09d}.json": content}
        if section == "rollout":
            pool = experiment.train_envs.pool.state_dict()
            files[self._directory / STATE_FILE] = {"pool": pool, "exploration": str(experiment.exploration_wrapper_type)}
        for path, value in files.items():
            self._write(experiment, path, lambda: write_small(path, value))  # noqa: B023
        self._write_beat()

    def on_exception(self, experiment: LaunchedRun, exception: BaseException) -> None:
        if isinstance(exception, Stopped):
            if experiment.phase_statistics is not None and experiment.phase_statistics is not self._reported:
                self._report(experiment, "rollout")  # of the phase that the signal has ended
            self._write_beat(state="stopped")
