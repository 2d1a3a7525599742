"""A collector of a launched run: it acts, and writes what it collects into a spool of its own."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amago.envs.statistics import PhaseStatistics
from amago.loading import DiskTrajDataset
from amago.run.carry_over import load_pool_state
from amago.run.evaluate import histories, merge_returns, merge_specials
from amago.run.roles.modes import collect_only
from amago.run.roles.protocol import (
    HELLO,
    NO_SPACE,
    OLD_POLICY,
    ORDERS,
    PAUSED,
    STATE_FILE,
    Assignment,
    collector_dir,
    outbox_of,
    read_soon,
    write_beat,
    write_soon,
)
from amago.run.roles.role import LaunchedRole
from amago.run.signals import GracefulStop
from amago.store.files import is_full

if TYPE_CHECKING:
    from amago.run.persistence import PersistentRun

logger = logging.getLogger(__name__)
BEAT_SECONDS = 0.25
_RETRY_SECONDS = 1.0  # after a full disk
_FOR_EVER = sys.maxsize // 2**16  # epochs: the launcher ends a collector
_STARTS_FILE = "starts.json"


class Collector(LaunchedRole):
    """Acts with the newest published policy until it is stopped.

    Trajectories go to a spool, from which the launcher takes them; rollouts go to reports, which the learner logs. Collector 0
    evaluates, each time that the learner has published ``val_interval`` policies. It waits, with what it has collected in memory, while
    the disk is full; while the learner is behind; and, with ``max_policy_lag``, while its policy is older than that.

    Args:
        assignment: from the launcher.
    """

    def __init__(self, assignment: Assignment):
        super().__init__(assignment)
        self._orders = Path(assignment.control) / ORDERS
        self._beat: dict[str, Any] = {
            "state": "starting",
            "steps": 0,
            "version": 0,
            "paused": "",
            "pid": os.getpid(),
            "count": 0,
        }
        self._next_look = 0.0
        self._reports = 0
        self._evaluated = -1  # the learner's epoch at the last evaluation, in intervals
        self._too_old = False  # the policy, for the phase to go on
        self._waited = 0.0  # seconds for a newer policy, since the last report
        self._directory: Path
        self._start = 0
        self._node: list[int] = []  # number of the node's directory, if that is not the learner's

    def apply(self, run: PersistentRun) -> None:
        super().apply(run)
        hello = self._wait_for_learner()
        if "node" in hello:  # the learner's directory is on another machine
            run.ckpt_base_dir, run.run_name = os.path.split(hello["run_dir"])
            self._node = [int(hello["node"])]
        self._begin(run.run_dir)
        self._write_to(self._directory / "log.txt")
        collect_only(run)
        run.dataset = DiskTrajDataset(self._directory, "spool")
        run.dset_root = run.dset_name = None
        run.dset_max_size = run.dset_max_steps = run.dset_max_bytes = float("inf")
        run.epochs, run.resume, run.overwrite, run.init_from, run.share_buffer = _FOR_EVER, "never", False, None, False
        run.callbacks = ()  # they are the learner's, which hears of all rollouts and evaluations
        run.verbose = run.log_to_wandb = run.log_to_tensorboard = False
        if self.assignment.index:
            run.val_interval = None
        if run.env_workers is None:
            run.env_workers = max(1, len(os.sched_getaffinity(0)) // self.assignment.collectors)

    def _begin(self, run_dir: Path) -> None:
        """Take the collector's directory."""
        self._directory = collector_dir(run_dir, self.assignment.index).absolute()
        outbox_of(self._directory).mkdir(parents=True, exist_ok=True)
        self._start = 1 + (read_soon(self._directory / _STARTS_FILE) or {"starts": 0})["starts"]
        self._write(self._directory / _STARTS_FILE, {"starts": self._start})
        # one that replaces another does not repeat its random numbers, nor one on another node
        self.seed_key = (1 + self.assignment.index, self._start, *self._node)

    def _write_to(self, log: Path) -> None:
        """From here on all output goes to a file in the run's directory."""
        sys.stdout.flush()
        sys.stderr.flush()
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        self._say(log=str(log))

    def _wait_for_learner(self) -> dict[str, Any]:
        """Until the learner has claimed the run, which this process then joins; returns where that is."""
        while (hello := read_soon(Path(self.assignment.control) / HELLO)) is None:
            self._say()
            time.sleep(0.1)
            if not self.assignment.launcher_lives:
                raise SystemExit("the launcher is gone")
        return hello

    def started(self, run: PersistentRun) -> None:
        super().started(run)
        saved = self._read_state()
        if saved is not None:
            load_pool_state(run._actors.train.pool, saved["pool"], saved["exploration"] != str(run.exploration_wrapper_type))
        self._say(state="collecting")

    def log_dir(self, run_dir: Path) -> Path:
        return self._directory

    def evaluates(self, epoch: int, interval: int | None, version: int) -> bool:
        since = max(0, version - 1)  # epochs of the learner: it publishes once before the first
        if not interval or since // interval == self._evaluated:
            return False
        self._evaluated = since // interval
        return True

    # ---- the age of the policy -------------------------------------------------------------------------------------------

    def policy_read(self, run: PersistentRun) -> None:
        self._beat["version"] = run.checkpoints.version
        if not self._is_old(self._read_orders()):
            return
        began, tried = time.monotonic(), None
        while self._is_old(self._read_orders()) and not run._stop:
            self._say(paused=OLD_POLICY)
            if (now := _identity(run.checkpoints.latest)) != tried:
                tried = now
                run.read_latest_policy()
                self._beat["version"] = run.checkpoints.version
            else:
                run._stop.wait(0.5)
        self._waited += time.monotonic() - began
        self._say(paused="")

    def _is_old(self, orders: Mapping[str, Any]) -> bool:
        """Whether the policy is older than the launch allows."""
        most = self.assignment.max_policy_lag
        self._too_old = most is not None and int(orders.get("version", 0)) - self._beat["version"] > most
        return self._too_old

    def ends_phase(self, stop: GracefulStop, collecting: bool) -> Callable[[], bool]:
        return (lambda: self._too_old or stop.heard()) if collecting else stop.heard

    # ---- in a phase ------------------------------------------------------------------------------------------------------

    def after_step(self, run: PersistentRun, steps: int, collecting: bool) -> None:
        if collecting:
            self._beat["steps"] += steps
        if time.monotonic() < self._next_look:
            return
        # not put off by the beat of a report, or it would never come in short phases
        self._next_look = time.monotonic() + BEAT_SECONDS
        self._say()
        if collecting:
            self._wait_for_space(run)
            self._is_old(self._pause(run._stop))

    def _read_orders(self) -> dict[str, Any]:
        return read_soon(self._orders) or {}

    def _pause(self, stop: GracefulStop) -> dict[str, Any]:
        """Wait while the launcher says so; returns its orders."""
        while (orders := self._read_orders()).get("pause") and not stop:
            self._say(paused=PAUSED)
            stop.wait(0.2)
        if self._beat["paused"]:
            self._say(paused="")
        return orders

    def _wait_for_space(self, run: PersistentRun) -> None:
        """Wait until finished trajectories, which are in memory, are on the disk."""
        pool = run._actors.train.pool
        if not pool.disk_is_full:
            return
        while pool.disk_is_full and not run._stop:
            self._say(paused=NO_SPACE)
            run._stop.wait(_RETRY_SECONDS)
            pool.flush()
        self._say(paused="")
        if not run._stop:
            logger.warning("%s: there is space again, and collection goes on", self._directory)

    def _write(self, path: Path, content: Mapping[str, Any], stop: GracefulStop | None = None) -> None:
        """`write_soon`, as soon as the disk has space. A signal ends the wait."""
        first = True
        while True:
            try:
                write_soon(path, content)
                break
            except OSError as err:
                if not is_full(err):
                    raise
                if first:
                    logger.warning("%s: %s; collection waits until it can be written", path, err)
                if stop:
                    return
                first = False
                self._say(paused=NO_SPACE)
                time.sleep(_RETRY_SECONDS) if stop is None else stop.wait(_RETRY_SECONDS)
        if not first:
            self._say(paused="")

    def _say(self, **news: Any) -> None:
        self._beat.update(news)
        self._beat["count"] += 1
        write_beat(self.assignment.beat_file, self._beat)

    # ---- between phases --------------------------------------------------------------------------------------------------

    def report(self, run: PersistentRun, section: str, stats: PhaseStatistics) -> None:
        returns, specials = histories(stats)
        content = {
            "section": section, "collector": self.assignment.index, "version": run.checkpoints.version,
            "returns": merge_returns([returns]), "specials": merge_specials([specials]), "frames": stats.frames,
            "restarts": stats.restarts, "dropped": stats.dropped, "lengths": [episode.length for episode in stats.episodes],
            "exploration": {name: list(map(float, values)) for name, values in stats.exploration.items()},
            "waited": self._waited,
        }  # fmt: skip
        self._waited = 0.0
        self._reports += 1
        place = "".join(f"-{node:08x}" for node in self._node)
        name = f"{self.assignment.name}{place}-{self._start:06d}-{self._reports:09d}.json"
        self._write(outbox_of(self._directory) / name, content, run._stop)
        if section == "rollout":
            state = {"pool": run._actors.train.pool.state_dict(), "exploration": str(run.exploration_wrapper_type)}
            self._write(self._directory / STATE_FILE, state, run._stop)
        self._say()

    def _read_state(self) -> dict[str, Any] | None:
        """The exploration schedules with which an earlier collector of this number has left off; None if there was none."""
        try:
            found = json.loads((self._directory / STATE_FILE).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.keys() == {"pool", "exploration"} else None

    def ended(self, run: Any, state: str) -> None:
        self._say(state=state)


def _identity(path: Path) -> tuple[int, int] | None:
    """What differs between two files of one name; None if there is no file."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_ino, info.st_mtime_ns
