"""What a launcher and the processes of its run tell each other: one variable of the environment, and small JSON files.

A launcher has no PyTorch, so this module and all that it imports have none.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import itertools
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

VARIABLE = "AMAGO_ROLE"
ORDERS = "orders.json"
HELLO = "hello.json"
PAUSED, OLD_POLICY, NO_SPACE = "paused", "waiting for a newer policy", "waiting for disk space"
"""Why a collector waits: the launcher says so; its policy is too old; the disk is full. In its beats, as "paused"."""
SHORT, LONG = "short", "long"
"""How long it may be until a learner's next beat: while it trains or waits; while it prepares, saves or runs callbacks."""
STATE_FILE = "exploration.json"
"""File, in a collector's directory, with the exploration schedules that its successor goes on with."""
STAGING = ".arriving"
"""Directory, beside a store's, where files are before they are in the store."""
OUTBOX = "outbox"
"""Directory, in that of a collector, with its reports that are not delivered yet."""
REPORTS = "reports"
"""Directory, in the directory of a launch, with the reports of collectors that the learner has not read yet."""


@dataclass(frozen=True)
class Assignment:
    """What a process of a launch is to do.

    Attributes:
        kind: "learner" or "collector"; "nodes" is the process that talks to a cluster.
        index: of the collector, from 0.
        collectors: of the launch on this machine.
        control: directory of the small files through which it talks to the launcher.
        least, most: updates per environment step.
        max_policy_lag: versions by which a collector's policy may be older than the newest published one; None: any number.
        launcher: process id of what has started the process; 0: not known.
    """

    kind: Literal["learner", "collector", "nodes"]
    index: int
    collectors: int
    control: str
    least: float = 0.0
    most: float | None = None
    max_policy_lag: int | None = None
    launcher: int = 0

    @classmethod
    def of_this_process(cls) -> Assignment | None:
        """The assignment in the environment; None if no launcher has started this process."""
        text = os.environ.get(VARIABLE)
        return None if not text else cls(**json.loads(text))

    def variables(self) -> dict[str, str]:
        """The variables of the environment for the process."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    @property
    def name(self) -> str:
        """Of the process: "learner", "nodes" or "collector-INDEX"."""
        return self.kind if self.kind != "collector" else f"{self.kind}-{self.index}"

    @property
    def launcher_lives(self) -> bool:
        """Whether what has started the process runs."""
        return not self.launcher or _runs(self.launcher)

    @property
    def beat_file(self) -> Path:
        """What the process says of itself, again and again."""
        return Path(self.control) / f"{self.name}.json"


def launch_dir(run_dir: Path) -> Path:
    """The directory of a run in which its launches keep what a later one goes on with."""
    return run_dir / "launch"


def collector_dir(run_dir: Path, index: int) -> Path:
    """The directory of one collector: its spool, its reports, its log."""
    return launch_dir(run_dir) / f"collector-{index}"


def spool_of(directory: Path) -> Path:
    """Where a collector with this directory writes trajectories."""
    return directory / "spool" / "buffer" / "fifo"


def outbox_of(directory: Path) -> Path:
    """Where a collector with this directory writes reports."""
    return directory / OUTBOX


_count = itertools.count()


def write_soon(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a small JSON file; readers see the old content or the new one. Not made durable: it is of use while its writer lives."""
    tmp = path.with_name(f".tmp-{path.name}-{os.getpid()}-{next(_count)}")
    try:
        tmp.write_text(json.dumps(value))
        os.replace(tmp, path)
    except OSError:
        tmp.unlink(missing_ok=True)
        raise


def write_beat(path: Path, value: Mapping[str, Any]) -> None:
    """`write_soon`, or, where the disk is full, only a new time stamp: a sign of life needs no space."""
    try:
        write_soon(path, value)
    except OSError as err:
        if err.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with contextlib.suppress(OSError):
            os.utime(path)


def read_soon(path: Path) -> dict[str, Any] | None:
    """The content of such a file; None if there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _runs(pid: int) -> bool:
    """Whether a process exists that is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return not os.path.isdir("/proc/self")  # no such file system: the signal has told


def _prctl() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError, TypeError):
        return None


_PRCTL = _prctl()  # found now: a process that was forked from one with threads had better load nothing


def die_with_parent() -> None:
    """Let the system kill this process when its parent ends, however that ends (Linux; elsewhere without effect)."""
    if _PRCTL is not None:
        _PRCTL(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
