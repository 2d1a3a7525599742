"""One learner and its collectors: started, watched and stopped by one process without PyTorch."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from tqdm import tqdm

from amago import __version__
from amago.launch.agent import BEAT_SECONDS, TICK_SECONDS, Every, Node, Task
from amago.launch.bundles import Ingest
from amago.launch.bus import BEATS, ORDERS, POLICY, Bus, own_directory
from amago.launch.children import STOP_SECONDS, LaunchError, Role, end_all, note_signals
from amago.launch.progress import Rates, progress_line
from amago.run.launched.protocol import REPORTS, Assignment, launch_dir

GONE_SECONDS, LEASE_SECONDS = 60.0, 30.0
"""Time without a new beat after which a machine is reported as gone; time for which a launch leads a bus unless it prolongs it."""
_LINE_SECONDS = 30.0  # between two progress lines in a file; on a terminal one line is rewritten
_LAST_SECONDS = 20.0  # for the last files of other machines


class Leader:
    """The learner's side of a bus: its orders, policies, and the signs of life of machines. One launch leads a bus at a time.

    Attributes:
        nodes: signs of life of the machines that are there, by name.
        news: sentences for the user.
        version: of the newest policy on the bus.
        pause: whether collectors shall wait.
    """

    def __init__(self, bus: Bus, news: list[str]):
        self.bus, self.news = bus, news
        self.nodes: dict[str, dict[str, Any]] = {}
        self.version, self.pause = 0, False
        self._orders: dict[str, Any] = {}
        self._orders_at = 0.0
        self._seen: dict[str, tuple[int, float]] = {}  # of each machine: its last count, and when that was new
        self._gone: set[str] = set()

    def check_lease(self) -> None:
        """Raise a `ValueError` where the bus cannot be read, or another launch leads it."""
        try:
            lease = (self.bus.get_json(ORDERS) or {}).get("lease") or {}
        except Exception as err:  # each storage client has its own
            raise ValueError(f"the bus {self.bus.url} cannot be read: {type(err).__name__}: {err}") from err
        pid, here = lease.get("pid"), lease.get("host") == socket.gethostname()
        ended = here and (pid == os.getpid() or not os.path.exists(f"/proc/{pid}"))
        if float(lease.get("until", 0)) > time.time() and not ended:
            raise ValueError(
                f"another launch, pid {pid} on {lease['host']}, leads the bus {self.bus.url}. Wait for its end (after a crash, for "
                f"{LEASE_SECONDS:.0f} s), or give this one a bus of its own"
            )

    def publish(self, policy: Path, version: int) -> None:
        """Put weights on the bus, if they are newer than those there."""
        if version <= self.version:
            return
        content, name = policy.read_bytes(), f"{version:09d}.pt"
        self.bus.put(f"{POLICY}/{name}", content)
        newest = {"version": version, "sha256": sha256(content).hexdigest(), "name": name}
        self.bus.put(f"{POLICY}/latest.json", newest)
        self.version = version
        for old in self.bus.names(POLICY):
            if old.endswith(".pt") and old < f"{version - 2:09d}.pt":
                self.bus.delete(f"{POLICY}/{old}")

    def give_orders(self, evaluator: str = "", stop: bool = False) -> None:
        """Put orders on the bus, if they are others, and prolong the lease. Without an evaluator, one of the machines there is it."""
        now, evaluator = (
            time.monotonic(),
            evaluator or min((n for n, node in self.nodes.items() if node["collectors"]), default=""),
        )
        orders = {"pause": self.pause, "version": self.version, "stop": stop, "evaluator": evaluator, "amago": __version__}
        if orders != self._orders or now >= self._orders_at:
            lease = {"host": socket.gethostname(), "pid": os.getpid(), "until": 0 if stop else time.time() + LEASE_SECONDS}
            self.bus.put(ORDERS, {**orders, "lease": lease})
            self._orders, self._orders_at = orders, now + BEAT_SECONDS

    def read_beats(self) -> None:
        """Read the signs of life of all machines."""
        now, found = time.monotonic(), {}
        for file in self.bus.names(BEATS):
            name, beat = file.removesuffix(".json"), self.bus.get_json(f"{BEATS}/{file}")
            if beat is None:
                continue
            count, since = self._seen.get(name, (-1, now))
            if beat["count"] != count:
                self._seen[name], since = (beat["count"], now), now
                if name in self._gone:
                    self._gone.remove(name)
                    self.news.append(f"{beat['host']} is back")
            if beat["ended"] or now - since > 10 * GONE_SECONDS:
                self.bus.delete(f"{BEATS}/{file}")
                if beat["failure"]:
                    self.news.append(f"{beat['host']} collects no more: {beat['failure']}")
            elif now - since <= GONE_SECONDS:
                found[name] = beat
            elif name not in self._gone:
                self._gone.add(name)
                lost = "what it has collected arrives if it comes back with its disk"
                self.news.append(f"{beat['host']} has given no sign for {GONE_SECONDS:.0f} s; {lost}")
        self.nodes = found


class Launcher:
    """A launch.

    Args:
        task: of the collectors on this machine.
        limits: "MIN:MAX", updates per environment step; None: a range around the script's own ratio.
        bus: URL, for collectors on other machines; None: a directory of the run.
        starter: starts collectors on other machines, and returns a function that ends them.
    """

    def __init__(
        self, task: Task, learners: int = 1, limits: str | None = None, bus: str | None = None,
        starter: Callable[[], Callable[[], None]] | None = None, quiet: bool = False,
    ):  # fmt: skip
        for name, value, least in (("collectors", task.collectors, 0 if bus else 1), ("learners", learners, 1)):
            if value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        self.task, self.starter, self.quiet, self.shared = task, starter, quiet, bus is not None
        news: list[str] = []
        self.leader = None if bus is None else Leader(Bus(bus), news)
        if self.leader is not None:
            self.leader.check_lease()
        self.node, self.news = Node(task, news), news
        part = Assignment("learner", 0, task.collectors, str(self.node.control), limits)
        self.learner = Role(part, self.node.command, news, learners, hang_timeout=task.hang_timeout)
        self.signals: list[int] = []
        self._ingest: Ingest | None = None
        self._threads: list[Every] = []
        self._rates, self._version, self._updates = Rates(), 0, 0
        self._line_at, self._bar = 0.0, tqdm(bar_format="{desc}", dynamic_ncols=True, disable=quiet or not sys.stderr.isatty())

    def run(self) -> int:
        """Run until the learner has ended, or a signal arrives.

        Returns:
            the exit code: the learner's; 128 + the number of the signal that stopped the launch; 1 if a process fails for good.
        """
        failure, end_starter = "", None
        with note_signals() as self.signals:
            try:
                end_starter = None if self.starter is None else self.starter()
                while not self.signals and self._watch():
                    self._tick()
                    time.sleep(TICK_SECONDS)
            except LaunchError as err:
                failure = str(err)
            finally:
                self._stop()
                if end_starter is not None:
                    end_starter()
                self._bar.close()
        if failure:
            _print(failure)
        if self.signals:
            return 128 + self.signals[0]
        code = self.learner.code
        return 1 if failure or code is None else code if code >= 0 else 128 - code

    def _watch(self) -> bool:
        """Watch all processes; False once the learner has ended."""
        learner = self.learner
        if learner.beat.get("state") in ("finished", "stopped"):
            for role in self.node.collectors:  # the learner still evaluates
                role.send(signal.SIGTERM)
            learner.read_beat()
            return learner.runs
        self._updates = max(self._updates, int(learner.beat.get("updates", 0)))
        if not learner.watch(self._updates):
            return False
        self.node.watch()
        return True

    def _tick(self) -> None:
        """Pass the learner's wishes on, and show progress."""
        beat = self.learner.beat
        self._version = max(self._version, int(beat.get("version", 0)))  # a learner that was started again gives no sign yet
        if self._ingest is None and "run_dir" in beat:
            self._begin(Path(beat["run_dir"]), beat["save_to"], Path(beat["policy"]))
        nodes = {self.node.name: self.node.report()}
        if self.leader is not None:
            self.leader.pause = bool(beat.get("pause")) and self.learner.runs
            nodes = {**self.leader.nodes, **nodes}
            if not self.shared:
                self.leader.version = self._version
        beats = [beat for node in nodes.values() for beat in node["collectors"].values()]
        while self.news:
            _print(self.news.pop(0))
        replaced, waiting = (sum(int(node[what]) for node in nodes.values()) for what in ("replaced", "waiting"))
        self._show(beats, replaced, waiting)

    def _begin(self, run_dir: Path, save_to: str, policy: Path) -> None:
        """Begin to move files from the collectors to the learner's store."""
        home, key = own_directory(launch_dir(run_dir), mend=True), sha256(str(run_dir).encode()).hexdigest()[:12]
        own = Bus(str(home / "bus"))
        self._ingest = Ingest(own, save_to, home / REPORTS, key)
        leader = self.leader = self.leader or Leader(own, self.news)
        url, pace = leader.bus.url, 1.0 if self.shared else TICK_SECONDS
        if self.shared:
            self._ingest.pull()  # an earlier launch, without the shared bus, may have left files
            self._ingest = Ingest(leader.bus, save_to, home / REPORTS, key)
            publish = lambda: leader.publish(policy / "policy.pt", self._version)  # noqa: E731
            self._threads.append(Every(publish, 0.5, f"publishing weights at {url}"))
        evaluator = self.node.name if self.task.collectors else ""
        self._threads += [
            Every(lambda: leader.give_orders(evaluator), min(0.5, pace), f"leading {url}"),
            Every(leader.read_beats, BEAT_SECONDS, f"reading signs of life from {url}"),
            Every(self._ingest.pull, pace, f"taking files from {url}"),
        ]
        self.node.begin(leader.bus, [home], policy, pace)

    def _stop(self) -> None:
        """Let all processes end, deliver the files that they write meanwhile, and kill the processes that do not end."""
        if self.signals:
            _print("stopping: collectors end, the learner saves")
        first = signal.SIGINT if self.signals[:1] == [signal.SIGINT] else signal.SIGTERM
        end_all([self.learner, *self.node.collectors], first, STOP_SECONDS)
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
                _print(f"files that wait at {self.leader.bus.url} are taken by the next launch: {err}")

    def _show(self, beats: list[dict[str, Any]], replaced: int, waiting: int) -> None:
        now, beat, tty = time.monotonic(), self.learner.beat, sys.stderr.isatty()
        if self.quiet or now < self._line_at or not (beat or tty):
            return
        self._line_at = now + (0.5 if tty else _LINE_SECONDS)
        speeds = self._rates.add(now, int(beat.get("updates", 0)), int(beat.get("steps", 0)))
        line = progress_line(beat, beats, speeds, replaced, self._version, waiting)
        self._bar.set_description_str(line) if tty else _print(line)


def _print(text: str) -> None:
    """Print a sentence above the progress line."""
    tqdm.write(text, file=sys.stderr)
