"""The collectors of a Ray cluster, as the launcher sees them: through a process of its own, as Ray ends whom its cluster has left."""

from __future__ import annotations

import dataclasses
import importlib.util
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amago.distributed.children import Child, CollectorError
from amago.distributed.link import Answer, Beats
from amago.distributed.place import Work
from amago.run.roles.protocol import Assignment, write_soon

CONFIG, ORDERS = "nodes-config.json", "nodes-orders.json"
_CONNECT_SECONDS, _END_SECONDS = 180.0, 15.0
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0


class RayPlace:
    """Collectors on the nodes of a Ray cluster (a `amago.distributed.place.Place`).

    A process beside the launcher (`amago.distributed.ray_driver`) talks to the cluster. When it ends, because the cluster is gone, it is started
    again and again, and the learner goes on with what it has.

    Args:
        work: of the collectors.
        address: of the cluster: "auto", or "HOST:PORT". This machine must be one of its nodes.
        node_dir: template of the directory in which nodes keep what is not delivered yet (`amago.distributed.ray_actors.node_home`); None:
            below the temporary directory.

    Raises:
        ImportError: Ray is not installed; names the extra.
        ValueError: there is no such cluster, or the program's files are too large.
    """

    def __init__(self, work: Work, address: str = "auto", node_dir: str | None = None):
        require_ray()
        check_reachable(address)
        self.work, self.news = work, []  # type: ignore[var-annotated]
        config = {
            "task": dataclasses.asdict(work.task), "collectors": work.collectors, "learners": work.learners, "address": address,
            "node_dir": node_dir,
        }  # fmt: skip
        write_soon(work.control / CONFIG, config)
        assignment = Assignment("nodes", 0, work.collectors, str(work.control))
        words = [sys.executable, "-m", "amago.distributed.ray_driver", str(work.control)]
        self._driver = Child(assignment, words, {}, work.control / "nodes.log")
        self._seen = self._replaced = 0
        self._met = self._ends = False
        self._pause, self._due, self._told = _FIRST_PAUSE, 0.0, ""
        try:
            self._start()
            self._wait_for_cluster()
        except BaseException:
            self._driver.kill()
            raise

    def _start(self) -> None:
        self._seen = 0
        self._order()
        self._driver.start()

    def _wait_for_cluster(self) -> None:
        until = time.monotonic() + _CONNECT_SECONDS
        while self._driver.beat.get("state") != "connected":
            if not self._driver.runs or time.monotonic() > until:
                self._driver.listen()
                raise ValueError(
                    self._driver.beat.get("error") or f"the Ray cluster does not answer:\n{self._driver.last_words()}"
                )
            time.sleep(0.1)
            self._driver.listen()

    def _order(self) -> None:
        write_soon(self.work.control / ORDERS, {"end": self._ends, "seen": self._seen})

    # ---- what a Place is -------------------------------------------------------------------------------------------------

    def meet_learner(self, hello: Mapping[str, Any]) -> None:
        self._met = True  # the driver reads it by itself

    def watch(self) -> None:
        self._listen()
        failure = self._driver.beat.get("failure")
        if failure:
            raise CollectorError(failure)
        if self._driver.runs:
            return
        now = time.monotonic()
        if self._driver.process is not None:  # it has just ended
            if now > self._driver.began + 2 * _LONGEST_PAUSE:
                self._pause, self._told = _FIRST_PAUSE, ""
            why = self._driver.beat.get("error") or (self._driver.last_words(1) or f"exit code {self._driver.code}")
            if why != self._told:
                self.news.append(
                    f"the Ray cluster is lost, and the learner goes on with what it has; it is looked for again and again: {why}"
                )
            self._replaced += int(self._driver.beat.get("replaced", 0))
            self._told, self._driver.process, self._driver.beat = why, None, {}
            self._due, self._pause = now + self._pause, min(_LONGEST_PAUSE, 2 * self._pause)
        elif now >= self._due:
            self._start()

    def deliver(self) -> Answer | None:
        self._listen()
        return self.work.answer(self.beats) if self._met else None

    def _listen(self) -> None:
        self._driver.listen()
        beat = self._driver.beat
        news = beat.get("news", [])[max(0, self._seen - beat.get("first", 0)) :]
        if news:
            self.news += news
            self._seen = beat["first"] + len(beat["news"])
            self._order()

    @property
    def beats(self) -> Beats:
        found = self._driver.beat.get("beats", {})
        return {name: found.get(name, {}) for name in (f"collector-{i}" for i in range(self.work.collectors))}

    @property
    def replaced(self) -> int:
        return self._replaced + int(self._driver.beat.get("replaced", 0))

    @property
    def waiting(self) -> int:
        return int(self._driver.beat.get("waiting", 0))

    @property
    def run(self) -> int:
        return int(self._driver.beat.get("run", 0)) if self._driver.runs else 0

    def tell(self, number: int) -> None:
        if not self._ends:
            self._ends = True
            self._order()

    def kill(self) -> None:
        if self._driver.runs:
            self._driver.tell(15)
            until = time.monotonic() + _END_SECONDS
            while self._driver.runs and time.monotonic() < until:
                time.sleep(0.05)
        self._driver.kill()

    def close(self) -> None:
        self.kill()


def require_ray() -> None:
    """Refuse to go on without Ray.

    Raises:
        ImportError: it is not installed; names the extra.
    """
    try:
        spec = importlib.util.find_spec("ray")
    except ValueError:  # it is a module that somebody has made
        spec = None
    if spec is None or spec.origin is None:  # a directory of this name is no package
        raise ImportError("--ray needs Ray, on each node: pip install 'amago[ray]'")


def check_reachable(address: str) -> None:
    """Refuse an address at which nobody listens, for which Ray would wait for minutes.

    Raises:
        ValueError: it is neither "auto" nor of the form HOST:PORT, or nobody listens there.
    """
    if address == "auto":
        return
    if "://" in address:
        raise ValueError(
            f"--ray is {address!r}, a connection from outside: run the launcher on a node of the cluster, with --ray auto"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--ray is {address!r}, and must be auto or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as err:
        raise ValueError(no_cluster(address, err)) from err


def no_cluster(address: str, err: Exception) -> str:
    """The message about a cluster that is not there."""
    where = "on this machine" if address == "auto" else f"at {address}, of which this machine is a node"
    return (
        f"there is no Ray cluster {where} ({err}): 'ray start --head' begins one, and 'ray start --address HOST:6379' on other machines "
        "joins it"
    )


def config_of(control: Path) -> Path:
    """The file with the settings of a driver."""
    return control / CONFIG
