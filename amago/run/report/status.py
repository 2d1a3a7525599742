"""What a run does now: whether it still runs, how far it is, and when it will be done."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from amago.run.report.curves import recent_rate
from amago.run.report.runs import Run

LOCK_FILE = ".lock"
PATIENCE = 120.0
"""Seconds without a row after which a run of unknown process no longer counts as running, if its rows come faster than that."""
_MANY = 20
_CLOCK = 60.0  # clocks may have been set since


@dataclass(frozen=True)
class Status:
    """What a run does.

    Attributes:
        state: "running", "finished" (all its epochs are trained), "stopped", or "starting" (it runs, and has no row yet).
        why: how that is known, in words.
        epochs: how many the run will have; None if unknown.
        done: how many are done.
        left: seconds until it is done, at its present rate; None if it does not run or nothing is known.
    """

    state: str
    why: str
    epochs: int | None
    done: float
    left: float | None

    @property
    def share(self) -> float | None:
        """How much of the run is done, from 0 to 1; None if unknown."""
        return min(1.0, self.done / self.epochs) if self.epochs else None


def status_of(run: Run, now: float | None = None) -> Status:
    """What a run does.

    A run whose lock names a process of this machine is running while that process lives. Of another, only the time since its newest
    row is known: it counts as running for three of its longest pauses between rows, and for at least `PATIENCE` seconds.

    Args:
        now: seconds since 1970; None: the present.
    """
    now = time.time() if now is None else now
    epochs = (run.settings or {}).get("epochs")
    epochs = epochs if isinstance(epochs, int) and epochs > 0 else None
    done = _epochs_done(run)
    finished = epochs is not None and done >= epochs
    silent = max(0.0, now - run.changed)
    quiet = silent > max(PATIENCE, 3.0 * _longest_pause(run))
    holder = _holder(run.path)
    alive = _exists(*holder) if holder is not None else not quiet
    process = (
        "" if holder is None else f"process {holder[0]} since {holder[1]}, " if alive else f"process {holder[0]} has ended, "
    )
    if alive and not (finished and quiet):
        state = "running" if run.log.rows else "starting"
    else:
        state = "finished" if finished else "stopped"
    left = None
    if state == "running" and epochs is not None:
        seconds = run.log.highest[3]
        # of a few epochs, the share of the newest one that is over would decide
        rate = recent_rate(run, "epoch", share=0.25) if done >= _MANY else done / seconds if seconds > 0 else None
        left = max(0.0, (epochs - done) / rate) if rate else None
    return Status(state, f"{process}newest row {ago(silent)}", epochs, done, left)


def _epochs_done(run: Run) -> float:
    """Epochs of which the last phase has been logged: training, or collection if the run does not train."""
    epoch = run.log.highest[0]
    last = next((run.log.newest[s] for s in ("train", "rollout", "buffer") if s in run.log.newest), (-1.0,))
    return epoch + 1.0 if last[0] >= epoch else float(epoch)


def _longest_pause(run: Run) -> float:
    """The longest time between two rows, in seconds."""
    seconds = run.log.track.position[:, 3]
    return float((seconds[1:] - seconds[:-1]).max()) if len(seconds) > 1 else 0.0


def _holder(path: Path) -> tuple[int, str] | None:
    """Process id and start of the process that has the run's lock, or had it last; None if it is unknown or on another machine."""
    try:
        found = json.loads((path / LOCK_FILE).read_bytes())
        pid, since, host = int(found["pid"]), str(found["since"]), found["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (pid, since) if host == socket.gethostname() and pid > 0 else None


def _exists(pid: int, since: str) -> bool:
    """Whether a process lives that has this id since before a time: ids are used again, above all in containers."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        began = float(booted.split()[1]) + float(fields[19]) / os.sysconf("SC_CLK_TCK")
        return fields[0] not in "ZX" and began <= datetime.fromisoformat(since).timestamp() + _CLOCK
    except (OSError, ValueError, IndexError, StopIteration):
        return True  # not Linux


def duration(seconds: float) -> str:
    """ "3 d 04 h", "1 h 02 min", "3 min 20 s" or "12 s"."""
    whole = int(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def ago(seconds: float) -> str:
    """ "3 min 20 s ago", or "now"."""
    return "now" if seconds < 2 else f"{duration(seconds)} ago"
