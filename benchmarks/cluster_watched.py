"""A launch that writes down what its processes say of themselves, and ends some time after all collectors have begun.

    python -m benchmarks.cluster_watched RECORD SECONDS COLLECTORS MIN:MAX -m MODULE ARGS...

RECORD receives one line of JSON for each tick of the launcher: the time, the newest beat of the learner, and that of each collector.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from typing import Any

from amago.distributed.launcher import Launcher, Plan, run_plan
from amago.run.roles.limits import UpdateLimits


class Watched(Launcher):
    """A `Launcher` that keeps a record.

    Args:
        plan: what to launch.
        record: file for it.
        seconds: to go on after the last collector has begun.
    """

    def __init__(self, plan: Plan, record: str, seconds: float):
        super().__init__(plan)
        self._record = open(record, "w")
        self._seconds, self._end = seconds, math.inf

    def _tick(self) -> None:
        super()._tick()
        now, collectors = time.monotonic(), [child.beat for child in self.collectors.children]
        line: dict[str, Any] = {"time": now, "learner": self.learner.beat, "collectors": collectors}
        self._record.write(json.dumps(line) + "\n")
        if self._end == math.inf and all(beat.get("state") == "collecting" for beat in collectors):
            self._end = now + self._seconds
        if now >= self._end and self._signal is None:
            self._record.close()
            self._signal = signal.SIGTERM


def main() -> int:
    record, seconds, collectors, limits, *program = sys.argv[1:]
    plan = Plan(program, int(collectors), limits=UpdateLimits.parse(limits), quiet=True)
    return run_plan(plan, lambda plan: Watched(plan, record, float(seconds)))


if __name__ == "__main__":
    sys.exit(main())
