"""Messages between a launcher and the processes of its run: one variable of the environment, and small JSON files.

A launcher has no PyTorch, so this module and all that it imports have none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from amago.store.files import temporary_file

VARIABLE, RANKS_FILE = "AMAGO_ROLE", "AMAGO_RANKS_FILE"
"""Variables of a process: its `Assignment`; the file through which the ranks of a learner meet, rather than through a port."""
PAUSED, OLD_POLICY, NO_SPACE = "paused", "waiting for a newer policy", "waiting for disk space"
"""Reasons for a collector's wait."""
SHORT, LONG = "short", "long"
"""Time until a learner's next beat: while it trains or waits; while it prepares, saves or runs callbacks."""
ORDERS, STATE_FILE, SPOOL, OUTBOX = "orders.json", "exploration.json", Path("spool", "buffer", "fifo"), "outbox"
"""Files with the orders to a machine's collectors, and the exploration schedules that a collector's successor goes on with; directories of
trajectories and of reports in a collector's."""
LAUNCH, REPORTS, STAGING = "launch", "reports", ".arriving"
"""Directories of launches in a run's, with what a later launch needs; in it, of reports that the learner has not read yet; beside a store's,
of files that are not in it yet."""


@dataclass(frozen=True)
class Assignment:
    """A process's part in a launch.

    Attributes:
        index: of the collector on its machine, from 0.
        collectors: of the launch on this machine.
        control: directory of the small files through which it talks to the launcher.
        limits: "MIN:MAX", updates per environment step; None: a range around the script's own ratio.
        max_policy_lag: versions by which a collector's policy may be older than the newest published one; None: any number.
        node: distinguishes collectors of several machines.
    """

    kind: Literal["learner", "collector"]
    index: int
    collectors: int
    control: str
    limits: str | None = None
    max_policy_lag: int | None = None
    node: int = 0

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
        """ "learner", or "collector-INDEX"."""
        return self.kind if self.kind != "collector" else f"{self.kind}-{self.index}"

    @property
    def beat_file(self) -> Path:
        """The file with its newest sign of life."""
        return Path(self.control) / f"{self.name}.json"


def write_small(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a small JSON file at once, but not durably: it is of use while its writer lives."""
    with temporary_file(path.parent) as source:
        source.write_text(json.dumps(value), encoding="utf-8")
        os.replace(source, path)


def write_beat(path: Path, value: Mapping[str, Any]) -> None:
    """`write_small`, or, where that is impossible, only a new time stamp: failing to write a beat never stops the process."""
    try:
        write_small(path, value)
    except OSError:
        with contextlib.suppress(OSError):
            os.utime(path)


def read_small(path: Path) -> dict[str, Any] | None:
    """The content of such a file; None if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
