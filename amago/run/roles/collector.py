"""A collector of a launched run: it acts, and writes what it collects into a spool of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amago.envs.statistics import PhaseStatistics
from amago.loading import DiskTrajDataset
from amago.run.carry_over import load_pool_state
from amago.run.evaluate import histories, merge_returns, merge_specials
from amago.run.roles.modes import collect_only
from amago.run.roles.protocol import (
    HELLO,
    ORDERS,
    STATE_FILE,
    Assignment,
    collector_dir,
    die_with_parent,
    outbox_of,
    read_soon,
    write_soon,
)
from amago.run.roles.role import Role
from amago.run.signals import GracefulStop

if TYPE_CHECKING:
    from amago.run.persistence import PersistentRun

BEAT_SECONDS = 0.25
_FOR_EVER = sys.maxsize // 2**16  # epochs: the launcher ends a collector
_STARTS_FILE = "starts.json"


class Collector(Role):
    """Acts with the newest published policy until it is stopped.

    Trajectories go to a spool, from which the launcher takes them; rollouts go to reports, which the learner logs. Collector 0
    evaluates, each time that the learner has published ``val_interval`` policies.

    Args:
        assignment: from the launcher.
    """

    launched = True

    def __init__(self, assignment: Assignment):
        self.assignment = assignment
        self._orders = Path(assignment.control) / ORDERS
        self._beat: dict[str, Any] = {
            "state": "starting",
            "steps": 0,
            "version": 0,
            "paused": False,
            "pid": os.getpid(),
            "count": 0,
        }
        self._next_beat = 0.0
        self._reports = 0
        self._evaluated = -1  # the learner's epoch at the last evaluation, in intervals
        self._directory: Path
        self._start = 0
        self._node: list[int] = []  # number of the node's directory, if that is not the learner's

    def apply(self, run: PersistentRun) -> None:
        die_with_parent()
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
        write_soon(self._directory / _STARTS_FILE, {"starts": self._start})
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
            if os.getppid() == 1:
                raise SystemExit("the launcher is gone")
        return hello

    def started(self, run: PersistentRun) -> None:
        saved = self._read_state()
        if saved is not None:
            load_pool_state(run._actors.train.pool, saved["pool"], saved["exploration"] != str(run.exploration_wrapper_type))
        self._say(state="collecting")

    def log_dir(self, run_dir: Path) -> Path:
        return self._directory

    def evaluates(self, epoch: int, interval: int | None, version: int) -> bool:
        self._beat["version"] = version
        since = max(0, version - 1)  # epochs of the learner: it publishes once before the first
        if not interval or since // interval == self._evaluated:
            return False
        self._evaluated = since // interval
        return True

    # ---- in a phase ------------------------------------------------------------------------------------------------------

    def after_step(self, steps: int, stop: GracefulStop, collecting: bool) -> None:
        if collecting:
            self._beat["steps"] += steps
        if time.monotonic() < self._next_beat:
            return
        self._say()
        if collecting:
            self._pause(stop)

    def _pause(self, stop: GracefulStop) -> None:
        """Wait while the launcher says that the learner is behind."""
        while (read_soon(self._orders) or {}).get("pause") and not stop:
            self._say(paused=True)
            stop.wait(0.2)
        if self._beat["paused"]:
            self._say(paused=False)

    def _say(self, **news: Any) -> None:
        self._beat.update(news)
        self._beat["count"] += 1
        self._next_beat = time.monotonic() + BEAT_SECONDS
        write_soon(self.assignment.beat_file, self._beat)

    # ---- between phases --------------------------------------------------------------------------------------------------

    def report(self, run: PersistentRun, section: str, stats: PhaseStatistics) -> None:
        returns, specials = histories(stats)
        content = {
            "section": section, "collector": self.assignment.index, "version": run.checkpoints.version,
            "returns": merge_returns([returns]), "specials": merge_specials([specials]), "frames": stats.frames,
            "restarts": stats.restarts, "dropped": stats.dropped, "lengths": [episode.length for episode in stats.episodes],
            "exploration": {name: list(map(float, values)) for name, values in stats.exploration.items()},
        }  # fmt: skip
        self._reports += 1
        place = "".join(f"-{node:08x}" for node in self._node)
        name = f"{self.assignment.name}{place}-{self._start:06d}-{self._reports:09d}.json"
        write_soon(outbox_of(self._directory) / name, content)
        if section == "rollout":
            state = {"pool": run._actors.train.pool.state_dict(), "exploration": str(run.exploration_wrapper_type)}
            write_soon(self._directory / STATE_FILE, state)
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
