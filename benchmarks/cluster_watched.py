"""A launch that writes down the signs of life of its processes, and ends some time after all collectors have begun.

    python -m benchmarks.cluster_watched RECORD SECONDS COLLECTORS MIN:MAX -m MODULE ARGS...

RECORD receives one line of JSON for each tick of the launcher: the time, the newest beat of the learner, and that of each collector.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from amago.launch.launcher import Launcher
from amago.launch.node import Task


class Watched(Launcher):
    """A `Launcher` that keeps a record.

    Args:
        task, limits: of the launch.
        record: file for it.
        seconds: to go on after the last collector has begun.
    """

    def __init__(self, task: Task, limits: str, record: str, seconds: float):
        super().__init__(task, limits=limits, quiet=True)
        self._record = open(record, "w")
        self._seconds, self._end = seconds, math.inf

    def step(self) -> bool:
        goes_on, now = super().step(), time.monotonic()
        collectors = [] if self.node is None else list(self.node.report()["collectors"].values())
        line: dict[str, Any] = {"time": now, "learner": self.learner.beat, "collectors": collectors}
        self._record.write(json.dumps(line) + "\n")
        if self._end == math.inf and collectors and all(beat.get("state") == "collecting" for beat in collectors):
            self._end = now + self._seconds
        return goes_on and now < self._end

    def end(self, failure: str, signals: Sequence[int]) -> None:
        self._record.close()
        super().end(failure, signals)


def main() -> int:
    record, seconds, collectors, limits, *program = sys.argv[1:]
    return Watched(Task(program, int(collectors)), limits, record, float(seconds)).run()


if __name__ == "__main__":
    sys.exit(main())
