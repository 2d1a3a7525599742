"""One learner and its collectors: started, watched and stopped by one process without PyTorch."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from amago import __version__
from amago.launch.bundles import Ingest
from amago.launch.bus import BEATS, POLICY, Bus, own_directory
from amago.launch.node import BEAT_SECONDS, Every, Node, Task
from amago.launch.processes import STOP_SECONDS, TICK_SECONDS, Role, end_all, run, say
from amago.run.launched.protocol import LAUNCH, NO_SPACE, OLD_POLICY, ORDERS, PAUSED, Assignment

GONE_SECONDS, LEASE_SECONDS = 60.0, 30.0
"""Time without a new beat after which a machine is reported as gone; time for which a launch leads a bus unless it prolongs it."""
_LINE_SECONDS = 30.0  # between two progress lines in a file; on a terminal one line is rewritten
_LAST_SECONDS = 20.0  # for the last files of other machines
_DOING = ("collecting", PAUSED, OLD_POLICY, NO_SPACE, "starting")


class Leader:
    """The learner's side of a bus: its orders, policies, and the signs of life of machines. One launch leads a bus at a time.

    Attributes:
        nodes: signs of life of the machines that are there, by name.
        evaluator: the machine that evaluates; "": one of those that are there.
        version: of the newest policy that collectors may read.
        pause: whether collectors shall wait.
    """

    def __init__(self, bus: Bus):
        self.bus = bus
        self.nodes: dict[str, dict[str, Any]] = {}
        self.evaluator, self.version, self.pause = "", 0, False
        self._orders: dict[str, Any] = {}
        self._orders_at = 0.0
        self._seen: dict[str, tuple[int, float]] = {}  # of each: its last count, and since when; infinity: it is gone

    def publish(self, version: int, policy: Path | None) -> None:
        """Let collectors act with newer weights, which are put on the bus for other machines if there are any."""
        if version > self.version:
            if policy is not None:
                self.bus.put(POLICY, policy.read_bytes())
            self.version = version

    def give_orders(self, stop: bool = False) -> None:
        """Put orders on the bus, if they are others, and prolong the lease."""
        now, there = time.monotonic(), min((name for name, beat in self.nodes.items() if beat["collectors"]), default="")
        orders = {
            "pause": self.pause, "version": self.version, "stop": stop, "evaluator": self.evaluator or there, "amago": __version__,
        }  # fmt: skip
        if orders != self._orders or now >= self._orders_at:
            lease = {"host": socket.gethostname(), "pid": os.getpid(), "until": 0 if stop else time.time() + LEASE_SECONDS}
            self.bus.put(ORDERS, {**orders, "lease": lease})
            self._orders, self._orders_at = orders, now + BEAT_SECONDS

    def read_beats(self) -> None:
        """Read the signs of life of all machines."""
        now, found = time.monotonic(), {}
        for file in self.bus.names(BEATS):
            if (beat := self.bus.get_json(f"{BEATS}/{file}")) is None:
                continue
            name, host = file.removesuffix(".json"), beat["host"]
            count, since = self._seen.get(name, (-1, now))
            if since == math.inf:
                say(f"{host} is back")
            since = since if beat["count"] == count else now
            is_gone = now - since > GONE_SECONDS
            if is_gone or beat["ended"]:
                self.bus.delete(f"{BEATS}/{file}")
            else:
                found[name] = beat
            if is_gone:
                lost = "what it has collected arrives if it comes back with its disk"
                say(f"{host} has given no sign for {GONE_SECONDS:.0f} s; {lost}")
            elif beat["failure"]:
                say(f"{host} collects no more: {beat['failure']}")
            self._seen[name] = beat["count"], math.inf if is_gone else since
        self.nodes = found


def check_lease(bus: Bus) -> None:
    """Raise a `ValueError` where another launch leads the bus."""
    lease = (bus.get_json(ORDERS) or {}).get("lease") or {}
    pid, here = lease.get("pid"), lease.get("host") == socket.gethostname()
    ended = here and (pid == os.getpid() or not psutil.pid_exists(pid))
    if float(lease.get("until", 0)) > time.time() and not ended:
        raise ValueError(
            f"another launch, pid {pid} on {lease['host']}, leads the bus {bus.url}. Wait for its end (after a crash, for "
            f"{LEASE_SECONDS:.0f} s), or give this one a bus of its own"
        )


class Launcher:
    """A launch.

    Args:
        task: of the collectors on this machine.
        limits: "MIN:MAX", updates per environment step; None: a range around the script's own ratio.
        bus: URL, for collectors on other machines; None: a directory of the run.
    """

    def __init__(self, task: Task, learners: int = 1, limits: str | None = None, bus: str | None = None, quiet: bool = False):
        self.task, self.quiet, self.bus = task, quiet, None if bus is None else Bus(bus)
        if self.bus is not None:
            check_lease(self.bus)
        self.control = Path(tempfile.mkdtemp(prefix="amago-launch-"))
        part = Assignment("learner", 0, task.collectors, str(self.control), limits)
        self.learner = Role(part, [sys.executable, *task.program], learners, task.hang_timeout)
        self.node: Node | None = None
        self.leader: Leader | None = None
        self._ending = contextlib.ExitStack()  # of the collectors, and what serves them
        self._line_at, self._tty = 0.0, sys.stderr.isatty()
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=40 if self._tty else 2)  # time, updates, steps
        self._bar = tqdm(bar_format="{desc}", dynamic_ncols=True, disable=quiet or not self._tty)

    def run(self) -> int:
        """Run until the learner has ended, or a signal arrives.

        Returns:
            the exit code: the learner's; 128 + the number of the signal that stopped the launch; 1 if a process fails for good.
        """
        code = run(self.control, self.step, self.end)
        ended = next((c for process in self.learner.processes if (c := process.wait())), 0)  # of a rank that failed
        return code or (ended if ended >= 0 else 128 - ended)

    def step(self) -> bool:
        """Watch all processes once, pass the learner's wishes on, and show progress; False once the learner has ended."""
        if not self.learner.watch(int(self.learner.beat.get("updates", 0))):
            return False
        beat, nodes = self.learner.beat, {}
        if self.node is None and "run_dir" in beat:
            self._begin(Path(beat["run_dir"]), beat["save_to"], beat["arriving"], Path(beat["policy"]))
        if self.node is not None and self.leader is not None:
            self.node.watch()
            self.leader.pause = bool(beat.get("pause"))
            nodes = {**self.leader.nodes, self.node.name: self.node.report()}
        self._show(beat, list(nodes.values()))
        return True

    def _begin(self, run_dir: Path, save_to: str, arriving: str, policy: Path) -> None:
        """Begin to move files from the collectors to the learner's store, and start the collectors of this machine."""
        home = own_directory(run_dir / LAUNCH)
        own = Bus(str(home / "bus"))
        bus, pace, weights = (own, TICK_SECONDS, None) if self.bus is None else (self.bus, 1.0, policy / "policy.pt")
        if self.bus is not None:
            Ingest(own, save_to, arriving).pull()  # an earlier launch, without the shared bus, may have left files
        leader, ingest = Leader(bus), Ingest(bus, save_to, arriving)
        node = self.node = Node(self.task, bus, [home], self.control, policy, pace)
        self.leader, leader.evaluator = leader, node.name if self.task.collectors else ""
        publish = lambda: leader.publish(int(self.learner.beat.get("version", 0)), weights)  # noqa: E731
        threads = [
            Every(publish, min(0.5, pace), f"publishing weights at {bus.url}"),
            Every(leader.give_orders, min(0.5, pace), f"leading {bus.url}"),
            Every(leader.read_beats, BEAT_SECONDS, f"reading signs of life from {bus.url}"),
            Every(ingest.pull, pace, f"taking files from {bus.url}"),
        ]
        for end in (lambda: _take_last(leader, ingest), *(thread.end for thread in threads), node.end):  # the last one first
            self._ending.callback(end)

    def end(self, failure: str, signals: Sequence[int]) -> None:
        """Let all processes end, deliver the files that they write meanwhile, and kill the processes that do not end."""
        if signals:
            say("stopping: collectors end, the learner saves")
        first = signal.SIGINT if signals and signals[0] == signal.SIGINT else signal.SIGTERM
        end_all([self.learner, *([] if self.node is None else self.node.collectors)], STOP_SECONDS, first)
        self._ending.close()
        self._bar.close()

    def _show(self, beat: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> None:
        now = time.monotonic()
        if self.quiet or now < self._line_at or not (beat or self._tty):
            return
        self._line_at = now + (0.5 if self._tty else _LINE_SECONDS)
        mark = now, int(beat.get("updates", 0)), int(beat.get("steps", 0))
        if self._marks and min(a - b for a, b in zip(mark, self._marks[-1])) < 0:  # back at a training state
            self._marks.clear()
        self._marks.append(mark)
        seconds, *grown = (a - b for a, b in zip(mark, self._marks[0]))
        collectors = [beat for node in nodes for beat in node["collectors"].values()]
        replaced, waiting = (sum(int(node[what]) for node in nodes) for what in ("replaced", "waiting"))
        line = progress_line(beat, collectors, [n / seconds if seconds else 0.0 for n in grown], replaced, waiting)
        self._bar.set_description_str(line) if self._tty else say(line)


def _take_last(leader: Leader, ingest: Ingest) -> None:
    """Let the collectors of other machines end, and take their last files."""
    try:
        leader.give_orders(stop=True)
        leader.read_beats()
        until = time.monotonic() + _LAST_SECONDS
        while leader.nodes and time.monotonic() < until:
            time.sleep(0.5)
            leader.read_beats()
        ingest.pull()
    except Exception as err:  # each storage client has its own
        say(f"files that wait at {leader.bus.url} are taken by the next launch: {err}")


def progress_line(
    learner: Mapping[str, Any], collectors: Sequence[Mapping[str, Any]], speeds: Sequence[float], replaced: int = 0, waiting: int = 0
) -> str:  # fmt: skip
    """One line: the state of each role, by its newest sign of life (empty before its start), its speed a second, the ratio of updates to
    steps, and the lag of the weights behind the newest."""
    if not learner:
        return "learner starting"
    updates, steps, version = int(learner["updates"]), int(learner["steps"]), int(learner["version"])
    doing = [beat.get("paused") or beat.get("state", "starting") for beat in collectors]
    counts = ", ".join(f"{doing.count(what)} {what}" for what in _DOING if what in doing) or "none"
    lags = [version - int(beat["version"]) for beat in collectors if beat.get("version")]
    limits = learner.get("limits", "unlimited")
    parts = [
        f"learner {learner['state']}, epoch {learner['epoch']}/{learner['epochs']}, {updates:,} updates ({speeds[0]:.1f}/s)",
        f"collectors: {counts}" + (f", {replaced} replaced" if replaced else "") + f"; {steps:,} steps ({speeds[1]:,.0f}/s)",
        f"{updates / steps:.4g} updates/step" + ("" if limits == "unlimited" else f" in {limits}") if steps else "",
        f"policy {version}" + (f", lag {max(lags)}" if lags else ""),
        f"{waiting / 1e6:,.0f} MB not delivered" if waiting >= 1e6 else "",
    ]
    return " | ".join(filter(None, parts))
