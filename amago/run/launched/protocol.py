"""What a launcher and the processes of its run agree on: messages, which are one variable of the environment and small JSON files; and the
limits on updates.

A launcher has no PyTorch, so this module and all that it imports have none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
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
ORDERS, SPOOL, OUTBOX = "orders.json", Path("spool", "buffer", "fifo"), "outbox"
"""The file with the orders to a launch's machines, or to a machine's collectors; directories of trajectories and of reports in a collector's."""
LAUNCH, STAGING, REPORTS = "launch", ".arriving", "reports"
"""Directories of launches in a run's, with what a later launch needs; beside a store's, of files that are not in it yet; in a run's directory
there, of reports that the learner has not read yet."""


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
        home, policy: directories of a collector's machine: of the collectors' own directories, and of the newest ``policy.pt``.
    """

    kind: Literal["learner", "collector"]
    index: int
    collectors: int
    control: str
    limits: str | None = None
    max_policy_lag: int | None = None
    node: int = 0
    home: str = ""
    policy: str = ""

    @classmethod
    def of_this_process(cls) -> Assignment | None:
        """The assignment in the environment; None if no launcher has started this process."""
        text = os.environ.get(VARIABLE)
        return None if not text else cls(**json.loads(text))

    def variables(self) -> dict[str, str]:
        """The variables of the environment for the process."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self), ensure_ascii=False)}

    @property
    def name(self) -> str:
        """ "learner", or "collector-INDEX"."""
        return self.kind if self.kind != "collector" else f"{self.kind}-{self.index}"

    @property
    def directory(self) -> Path:
        """A collector's own directory."""
        return Path(self.home) / self.name

    @property
    def beat_file(self) -> Path:
        """The file with its newest sign of life."""
        return Path(self.control) / f"{self.name}.json"


@dataclass(frozen=True)
class UpdateLimits:
    """Keeps the number of updates between ``least`` and ``most`` times the number of environment steps.

    The learner waits while its next update would be too early, and in the first ``warmup`` steps; collectors pause while an update that is
    due is missing. With the same counters never both. A number out of its range is a ValueError.
    """

    least: float = 0.0
    most: float = math.inf
    warmup: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.least < math.inf and self.most > 0 and self.least <= self.most and self.warmup >= 0):
            raise ValueError(
                "updates per environment step are MIN:MAX, MIN finite and 0 or more, MAX above 0 and not below MIN, from a warmup of 0 or more "
                f"steps on; got {self.least}:{self.most} and {self.warmup}"
            )

    @classmethod
    def parse(cls, text: str, warmup: int = 0) -> UpdateLimits:
        """Limits from "MIN:MAX"; either side may be empty."""
        try:
            sides = zip(text.split(":"), (0.0, math.inf), strict=True)
            least, most = (float(part) if part.strip() else default for part, default in sides)
        except ValueError:
            raise ValueError(f"{text!r} is not of the form MIN:MAX, two numbers of updates per environment step") from None
        return cls(least, most, warmup)

    def learner_waits(self, updates: int, steps: int) -> bool:
        """True if the next update would be too early, after so many updates and environment steps that have arrived in the store."""
        return steps < self.warmup or (self.most < math.inf and updates + 1 > self.most * steps)

    def collectors_pause(self, updates: int, steps: int) -> bool:
        """True if collectors are ahead: an update is due that has not been made. Takes the arguments of `learner_waits`."""
        return steps >= self.warmup and updates + 1 <= self.least * steps

    def __str__(self) -> str:
        most = "" if self.most == math.inf else f"{self.most:g}"
        return f"{self.least:g}:{most}" if self.least or most else "unlimited"


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
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return None
