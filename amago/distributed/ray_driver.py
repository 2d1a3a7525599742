"""The process beside a launcher that talks to a Ray cluster: ``python -m amago.distributed.ray_driver CONTROL_DIRECTORY``.

It reads what the launcher and the learner have written into the directory, and says of itself what `RayPlace` reads. It may wait for the
cluster, or be ended by Ray when the cluster is gone, without harm to the launcher and the learner.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from amago.distributed.children import CollectorError, Patience
from amago.distributed.place import Task
from amago.distributed.ray_place import ORDERS, check_reachable, config_of
from amago.run.roles.protocol import HELLO, Assignment, die_with_parent, read_soon, write_soon

_TICK_SECONDS = 0.2


class Driver:
    """Passes on orders to a cluster, and its state to the launcher.

    Args:
        control: directory of the small files.
    """

    def __init__(self, control: Path):
        self.control = control
        self._beat_file = Assignment("nodes", 0, 0, str(control)).beat_file
        self._count = self._first = 0
        self._news: list[str] = []
        self._stops = False

    def run(self) -> int:
        """Until the launcher says so; returns the exit code."""
        config = json.loads(config_of(self.control).read_text())
        task = Task(**config["task"] | {"patience": Patience(**config["task"]["patience"])})
        from amago.distributed.ray_cluster import RayCluster  # loads Ray, which takes a second

        try:
            check_reachable(config["address"])  # again: it may have been lost since
            cluster = RayCluster(
                task, config["collectors"], config["learners"], self.control, config["address"], config["node_dir"]
            )
        except (ImportError, ValueError) as err:
            self._say(state="failed", error=str(err))
            return 2
        signal.signal(signal.SIGTERM, self._on_signal)  # Ray has set its own
        try:
            self._serve(cluster)
        finally:
            cluster.close()
        return 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stops = True

    def _serve(self, cluster: Any) -> None:
        met = ended = False
        failure = ""
        while not self._stops:
            orders = read_soon(self.control / ORDERS) or {}
            del self._news[: max(0, orders.get("seen", 0) - self._first)]
            self._first = max(self._first, orders.get("seen", 0))
            if not met and (hello := read_soon(self.control / HELLO)) is not None:
                met = True
                cluster.meet_learner(hello)
            if orders.get("end") and not ended:
                ended = True
                cluster.end()
            try:
                cluster.tend()
            except CollectorError as err:
                failure = str(err)
            self._news += cluster.news
            cluster.news.clear()
            self._say(
                state="connected", beats=cluster.beats, replaced=cluster.replaced, waiting=cluster.waiting, run=cluster.run, failure=failure, first=self._first,
                news=self._news,
            )  # fmt: skip
            time.sleep(_TICK_SECONDS)

    def _say(self, **beat: Any) -> None:
        self._count += 1
        write_soon(self._beat_file, {**beat, "count": self._count, "pid": os.getpid()})


def main(argv: list[str]) -> int:
    """Run the driver; returns its exit code."""
    die_with_parent()
    if len(argv) != 1:
        print("usage: python -m amago.distributed.ray_driver CONTROL_DIRECTORY, as amago launch --ray does", file=sys.stderr)
        return 2
    return Driver(Path(argv[0])).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
