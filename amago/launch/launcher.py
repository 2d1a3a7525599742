"""One learner and its collectors: started, watched and stopped by one process without PyTorch."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from amago import __version__
from amago.launch.bundles import Ingest
from amago.launch.bus import BEATS, ORDERS, POLICY, Bus, own_directory
from amago.launch.node import BEAT_SECONDS, Every, Node, Task
from amago.launch.processes import STOP_SECONDS, TICK_SECONDS, Role, end_all, run, say
from amago.run.launched.protocol import LAUNCH, NO_SPACE, OLD_POLICY, PAUSED, REPORTS, Assignment

GONE_SECONDS, LEASE_SECONDS = 60.0, 30.0
"""Time without a new beat after which a machine is reported as gone; time for which a launch leads a bus unless it prolongs it."""
_LINE_SECONDS = 30.0  # between two progress lines in a file; on a terminal one line is rewritten
_LAST_SECONDS = 20.0  # for the last files of other machines
_DOING = ("collecting", PAUSED, OLD_POLICY, NO_SPACE, "starting")


class Leader:
    """The learner's side of a bus: its orders, policies, and the signs of life of machines. One launch leads a bus at a time.

    Attributes:
        nodes: signs of life of the machines that are there, by name.
        version: of the newest policy on the bus.
        pause: whether collectors shall wait.
    """

    def __init__(self, bus: Bus):
        self.bus = bus
        self.nodes: dict[str, dict[str, Any]] = {}
        self.version, self.pause = 0, False
        self._orders: dict[str, Any] = {}
        self._orders_at = 0.0
        self._seen: dict[str, tuple[int, float, bool]] = {}  # of each: its last count, since when, whether it is gone

    def check_lease(self) -> None:
        """Raise a `ValueError` where the bus cannot be read, or another launch leads it."""
        try:
            lease = (self.bus.get_json(ORDERS) or {}).get("lease") or {}
        except Exception as err:  # each storage client has its own
            raise ValueError(f"the bus {self.bus.url} cannot be read: {type(err).__name__}: {err}") from err
        pid, here = lease.get("pid"), lease.get("host") == socket.gethostname()
        ended = here and (pid == os.getpid() or not psutil.pid_exists(pid))
        if float(lease.get("until", 0)) > time.time() and not ended:
            raise ValueError(
                f"another launch, pid {pid} on {lease['host']}, leads the bus {self.bus.url}. Wait for its end (after a crash, for "
                f"{LEASE_SECONDS:.0f} s), or give this one a bus of its own"
            )

    def publish(self, policy: Path, version: int) -> None:
        """Put weights on the bus, if they are newer than those there."""
        if version > self.version:
            self.bus.put(POLICY, policy.read_bytes())
            self.version = version

    def give_orders(self, evaluator: str = "", stop: bool = False) -> None:
        """Put orders on the bus, if they are others, and prolong the lease. Without an evaluator, one of the machines there is it."""
        now, evaluator = time.monotonic(), evaluator or min((n for n, b in self.nodes.items() if b["collectors"]), default="")
        orders = {"pause": self.pause, "version": self.version, "stop": stop, "evaluator": evaluator, "amago": __version__}
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
            count, since, gone = self._seen.get(name, (-1, now, False))
            since = since if beat["count"] == count else now
            silent = now - since
            if gone and not silent:
                say(f"{host} is back")
            if beat["ended"] or silent > 10 * GONE_SECONDS:
                self.bus.delete(f"{BEATS}/{file}")
                if beat["failure"]:
                    say(f"{host} collects no more: {beat['failure']}")
            elif silent <= GONE_SECONDS:
                found[name] = beat
            elif not gone:
                lost = "what it has collected arrives if it comes back with its disk"
                say(f"{host} has given no sign for {GONE_SECONDS:.0f} s; {lost}")
            self._seen[name] = beat["count"], since, silent > GONE_SECONDS
        self.nodes = found


class Launcher:
    """A launch.

    Args:
        task: of the collectors on this machine.
        limits: "MIN:MAX", updates per environment step; None: a range around the script's own ratio.
        bus: URL, for collectors on other machines; None: a directory of the run.
    """

    def __init__(
        self, task: Task, learners: int = 1, limits: str | None = None, bus: str | None = None, quiet: bool = False
    ):  # fmt: skip
        for name, value, least in (("collectors", task.collectors, 0 if bus else 1), ("learners", learners, 1)):
            if value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        self.task, self.quiet, self.shared = task, quiet, bus is not None
        self.leader = None if bus is None else Leader(Bus(bus))
        if self.leader is not None:
            self.leader.check_lease()
        self.control = Path(tempfile.mkdtemp(prefix="amago-launch-"))
        part = Assignment("learner", 0, task.collectors, str(self.control), limits)
        self.learner = Role(part, [sys.executable, *task.program], learners, task.hang_timeout)
        self.node: Node | None = None
        self._ingest: Ingest | None = None
        self._threads: list[Every] = []
        self._version = self._updates = 0
        self._line_at, self._tty = 0.0, sys.stderr.isatty()
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=40 if self._tty else 2)  # time, updates, steps
        self._bar = tqdm(bar_format="{desc}", dynamic_ncols=True, disable=quiet or not self._tty)

    def run(self) -> int:
        """Run until the learner has ended, or a signal arrives.

        Returns:
            the exit code: the learner's; 128 + the number of the signal that stopped the launch; 1 if a process fails for good.
        """
        code, learner = run(self.control, self.step, self.end), self.learner.code
        return code or (1 if learner is None else learner if learner >= 0 else 128 - learner)

    def step(self) -> bool:
        """Watch all processes once, pass the learner's wishes on, and show progress; False once the learner has ended."""
        learner, ends = self.learner, self.learner.beat.get("state") in ("finished", "stopped")
        if ends:  # it may still evaluate
            learner.read_beat()
        else:
            self._updates = max(self._updates, int(learner.beat.get("updates", 0)))
        if not (learner.runs if ends else learner.watch(self._updates)):
            return False
        beat = learner.beat
        if self.node is not None:
            self.node.send(signal.SIGTERM) if ends else self.node.watch()
        self._version = max(self._version, int(beat.get("version", 0)))  # a learner that was started again gives no sign yet
        if self.node is None and "run_dir" in beat:
            self.node = self._begin(Path(beat["run_dir"]), beat["save_to"], Path(beat["policy"]))
        nodes = {}
        if self.node is not None and self.leader is not None:
            self.leader.pause = bool(beat.get("pause")) and learner.runs
            nodes = {**self.leader.nodes, self.node.name: self.node.report()}
            if not self.shared:
                self.leader.version = self._version
        self._show(beat, list(nodes.values()))
        return True

    def _begin(self, run_dir: Path, save_to: str, policy: Path) -> Node:
        """Begin to move files from the collectors to the learner's store; returns the collectors of this machine."""
        home, key = own_directory(run_dir / LAUNCH, mend=True), sha256(str(run_dir).encode()).hexdigest()[:12]
        own = Bus(str(home / "bus"))
        self._ingest = Ingest(own, save_to, home / REPORTS, key)
        leader = self.leader = self.leader or Leader(own)
        url, pace = leader.bus.url, 1.0 if self.shared else TICK_SECONDS
        if self.shared:
            self._ingest.pull()  # an earlier launch, without the shared bus, may have left files
            self._ingest = Ingest(leader.bus, save_to, home / REPORTS, key)
            publish = lambda: leader.publish(policy / "policy.pt", self._version)  # noqa: E731
            self._threads.append(Every(publish, 0.5, f"publishing weights at {url}"))
        node = Node(self.task, leader.bus, [home], self.control, policy, pace)
        evaluator = node.name if self.task.collectors else ""
        self._threads += [
            Every(lambda: leader.give_orders(evaluator), min(0.5, pace), f"leading {url}"),
            Every(leader.read_beats, BEAT_SECONDS, f"reading signs of life from {url}"),
            Every(self._ingest.pull, pace, f"taking files from {url}"),
        ]
        return node

    def end(self, failure: str, signals: Sequence[int]) -> None:
        """Let all processes end, deliver the files that they write meanwhile, and kill the processes that do not end."""
        if signals:
            say("stopping: collectors end, the learner saves")
        first = signal.SIGINT if signals and signals[0] == signal.SIGINT else signal.SIGTERM
        roles = [self.learner, *(() if self.node is None else self.node.collectors)]
        for role in roles:
            role.send(first)
        end_all(roles, STOP_SECONDS)
        if self.node is not None:
            self.node.end()
        for thread in self._threads:
            thread.end()
        if self._ingest is not None and self.leader is not None:
            try:
                self.leader.give_orders(stop=True)  # collectors of other machines end, and deliver their last files
                until = time.monotonic() + _LAST_SECONDS
                self.leader.read_beats()
                while self.leader.nodes and time.monotonic() < until:
                    time.sleep(0.5)
                    self.leader.read_beats()
                self._ingest.pull()
            except Exception as err:  # each storage client has its own
                say(f"files that wait at {self.leader.bus.url} are taken by the next launch: {err}")
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
        line = progress_line(
            beat, collectors, [n / seconds if seconds else 0.0 for n in grown], replaced, self._version, waiting
        )
        self._bar.set_description_str(line) if self._tty else say(line)


def progress_line(
    learner: Mapping[str, Any], collectors: Sequence[Mapping[str, Any]], speeds: Sequence[float], replaced: int = 0,
    newest: int = 0, waiting: int = 0,
) -> str:  # fmt: skip
    """One line: the state of each role, by its newest sign of life (empty before its start), its speed a second, the ratio of updates to
    steps, and the lag of the weights behind the ``newest``."""
    if not learner:
        return "learner starting"
    updates, steps, version = int(learner["updates"]), int(learner["steps"]), max(newest, int(learner["version"]))
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
