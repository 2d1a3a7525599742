"""One learner and its collectors: started, watched and stopped by one process without PyTorch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

from amago import __version__
from amago.launch.agent import BEAT_SECONDS, EXPLORATION_SECONDS, Agent, Every, Task, note_signals, share_exploration
from amago.launch.bundles import Ingest, Spool
from amago.launch.bus import BEATS, ORDERS, POLICY, Bus, own_directory
from amago.launch.children import Child, LaunchError, Role, reaper
from amago.launch.progress import Rates, old_policies, progress_line
from amago.run.launched.limits import UpdateLimits
from amago.run.launched.protocol import HELLO, RANKS_FILE, REPORTS, Assignment, launch_dir, read_small

TICK_SECONDS = 0.1
GONE_SECONDS = 60.0
"""Seconds without a new beat after which a machine is reported as gone."""
LEASE_SECONDS = 30.0
_LINE_SECONDS = 30.0  # between two progress lines in a file; on a terminal one line is rewritten
_LAST_SECONDS = 20.0  # for the last files of other machines


class Remote:
    """The bus to collectors on other machines, from the learner's side.

    Args:
        bus: to them.

    Attributes:
        beats: of their collectors, by machine and name.
        nodes: signs of life of the machines that are there, by name.
        news: sentences for the user.

    Raises:
        ValueError: another launch leads the bus, and its lease is not over.
    """

    def __init__(self, bus: Bus):
        self.bus = bus
        self.news: list[str] = []
        self.beats: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.published = 0
        self._orders: dict[str, Any] = {}
        self._orders_at = self._beats_at = 0.0
        self._seen: dict[str, tuple[int, float]] = {}  # of each machine: its last count, and when that was new
        self._gone: set[str] = set()
        lease = (self.bus.get_json(ORDERS) or {}).get("lease") or {}
        pid, here = lease.get("pid"), lease.get("host") == socket.gethostname()
        ended = here and (pid == os.getpid() or not os.path.exists(f"/proc/{pid}"))
        if float(lease.get("until", 0)) > time.time() and not ended:
            raise ValueError(
                f"another launch, pid {pid} on {lease['host']}, leads the bus {self.bus.url}. Wait for its end (after a crash, for "
                f"{LEASE_SECONDS:.0f} s), or give this one a bus of its own"
            )

    def lead(self, policy: Path, version: int, pause: bool, stop: bool = False, evaluator: str = "") -> None:
        """Put orders and newer weights on the bus, and read the machines' signs of life.

        Args:
            policy: file of the newest weights.
            evaluator: machine that evaluates; "": one of those on the bus.
        """
        now = time.monotonic()
        if version > self.published:
            content = policy.read_bytes()
            name = f"{version:09d}.pt"
            self.bus.put(f"{POLICY}/{name}", content)
            self.bus.put_json(
                f"{POLICY}/latest.json", {"version": version, "sha256": sha256(content).hexdigest(), "name": name}
            )
            self.published = version
            for old in self.bus.names(POLICY):
                if old.endswith(".pt") and old < f"{version - 2:09d}.pt":
                    self.bus.delete(f"{POLICY}/{old}")
        evaluator = evaluator or min(self.nodes, default="")
        orders = {"pause": pause, "version": self.published, "stop": stop, "evaluator": evaluator, "amago": __version__}
        if orders != self._orders or now >= self._orders_at:
            lease = {"host": socket.gethostname(), "pid": os.getpid(), "until": 0 if stop else time.time() + LEASE_SECONDS}
            self.bus.put_json(ORDERS, {**orders, "lease": lease})
            self._orders, self._orders_at = orders, now + BEAT_SECONDS
        if now >= self._beats_at:
            self._beats_at = now + BEAT_SECONDS
            self.read_beats()

    def read_beats(self) -> None:
        """Read the signs of life of other machines."""
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
                self.news.append(
                    f"{beat['host']} has given no sign for {GONE_SECONDS:.0f} s; what it has collected arrives if it comes back with its disk"
                )
        self.nodes = found
        self.beats = {f"{n}/{c}": b for n, node in found.items() for c, b in node["collectors"].items()}

    def total(self, name: str) -> int:
        """A sum over machines: "replaced" (processes) or "waiting" (bytes)."""
        return sum(int(node[name]) for node in self.nodes.values())


class Launcher:
    """A launch. Processes are started and watched in the main thread, since children die with the thread that started them.

    Args:
        task: of the collectors on this machine.
        learners: processes that train.
        limits: "MIN:MAX", updates per environment step; None: a range around the script's own ratio.
        bus: URL, for collectors on other machines; None: there are none.
        starter: starts collectors on other machines, and returns a function that ends them.
        quiet: no progress line.
        out: for the progress line; None: standard error.

    Raises:
        ValueError: an argument is out of its range, or the bus cannot be used.
    """

    def __init__(
        self,
        task: Task,
        learners: int = 1,
        limits: str | None = None,
        bus: str | None = None,
        starter: Callable[[], Callable[[], None]] | None = None,
        quiet: bool = False,
        out: TextIO | None = None,
    ):
        for name, value, least in (("collectors", task.collectors, 0 if bus else 1), ("learners", learners, 1)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        UpdateLimits.parse(limits or ":")
        self.task, self.starter, self.quiet, self.out = task, starter, quiet, out or sys.stderr
        self.remote = None if bus is None else Remote(Bus(bus))
        self.control = Path(tempfile.mkdtemp(prefix="amago-launch-"))
        self.agent = Agent(task, self.control)
        ranks = [self._rank(i, learners, limits) for i in range(learners)]
        self.learner = Role(ranks, task.patience, "an update", self.agent.news)
        self.signals: list[int] = []
        self._ingests: list[Ingest] = []
        self._threads: list[Every] = []
        self._policy = Path()
        self._rates, self._version, self._updates = Rates(), 0, 0
        self._pause, self._paused_seconds = False, 0.0
        self._old: set[str] = set()
        self._line_at, self._width = 0.0, 0

    def _rank(self, index: int, count: int, limits: str | None) -> Child:
        variables = {}
        if count > 1:  # as torchrun would set them; ranks meet through a file, and nothing listens but on this machine
            variables = {
                "RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), RANKS_FILE: str(self.control / "ranks"),
            }  # fmt: skip
        assignment = Assignment("learner", index, self.task.collectors, str(self.control), limits)
        return Child(assignment, [sys.executable, *self.task.program], variables)

    # ---- the loop --------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until the learner has ended, or a signal arrives.

        Returns:
            the exit code: the learner's; 128 + the number of the signal that stopped the launch; 1 if a process fails again and
            again.
        """
        failure, end_starter = "", None
        with note_signals() as self.signals:
            try:
                end_starter = self.starter() if self.starter is not None else None
                try:
                    while not self.signals and self._watch():
                        self._tick()
                        time.sleep(TICK_SECONDS)
                except LaunchError as err:
                    failure = str(err)
                self._stop_all()
                self._clear_line()
                if failure:
                    print(failure, file=self.out, flush=True)
            finally:
                self.learner.kill()
                self.agent.kill()
                reaper.close()
                if end_starter is not None:
                    end_starter()
                shutil.rmtree(self.control, ignore_errors=True)
        if self.signals:
            return 128 + self.signals[0]
        code = self.learner.code
        return 1 if failure or code is None else code if code >= 0 else 128 - code

    def _watch(self) -> bool:
        """Watch all processes; False once the learner has ended."""
        learner = self.learner
        if learner.beat.get("state") in ("finished", "stopped"):
            self.agent.send(signal.SIGTERM)  # the learner still evaluates
            learner.first.read_beat()
            return learner.runs
        if learner.first.process is None:
            for name in ("ranks", "ranks.keys"):
                (self.control / name).unlink(missing_ok=True)
        self._updates = max(self._updates, int(learner.beat.get("updates", 0)))
        goes_on = learner.watch(self._updates, not os.access(self.control, os.W_OK))
        if goes_on:
            self.agent.watch()
        return goes_on

    def _tick(self) -> None:
        """Pass the learner's orders on, and show progress."""
        beat = self.learner.beat
        self._version = max(self._version, int(beat.get("version", 0)))  # a learner that was started again gives no sign yet
        self._pause = bool(beat.get("pause")) and self.learner.runs
        self._paused_seconds += TICK_SECONDS * self._pause
        beats = self.agent.beats | (self.remote.beats if self.remote else {})
        news = self.agent.news
        news += old_policies(self._version, beats, self.task.max_policy_lag, self._old)
        for source in (news, self.remote.news if self.remote else []):
            while source:
                self._print(source.pop(0))
        if not self._ingests and (hello := read_small(self.control / HELLO)) is not None:
            self._begin(hello)
        self._give_orders()
        self._show(beats)

    def _give_orders(self) -> None:
        paused = round(self._paused_seconds, 1) if self._pause else int(self._paused_seconds)
        self.agent.give_orders({"pause": self._pause, "version": self._version, "evaluates": True, "paused_seconds": paused})

    def _begin(self, hello: dict[str, Any]) -> None:
        """Begin to move files from the collectors to the learner's store."""
        run_dir, policy = Path(hello["run_dir"]), Path(hello["policy"])
        home, key = own_directory(launch_dir(run_dir), mend=True), sha256(str(run_dir).encode()).hexdigest()[:12]
        bus = Bus(str(home / "bus"))
        self._ingests = [Ingest(bus, hello["save_to"], home / REPORTS, f"{key}-here")]
        # collectors that an earlier launch had and this one has not may have left files
        spool = Spool(bus, home, f"here-{os.getpid()}-{os.urandom(4).hex()}", sorted(home.glob("collector-*")))
        self.agent.begin([spool], policy, home)
        self._threads.append(Every(self._deliver_here, TICK_SECONDS, "delivery"))
        if self.remote is not None:
            remote, url = self.remote.bus, self.remote.bus.url
            self._policy = policy / "policy.pt"
            self._ingests.append(Ingest(remote, hello["save_to"], home / REPORTS, f"{key}-bus"))
            self._threads += [
                Every(self._ingests[1].pull, 1.0, f"taking files from {url}"),
                Every(self._lead, 0.5, f"leading {url}"),
                Every(lambda: share_exploration(remote, self.agent), EXPLORATION_SECONDS, f"writing to {url}"),
            ]

    def _deliver_here(self, flush: bool = False) -> None:
        self.agent.pump(flush)
        self._ingests[0].pull()

    def _lead(self, stop: bool = False) -> None:
        assert self.remote is not None
        self.remote.lead(self._policy, self._version, self._pause, stop, "here" if self.task.collectors else "")

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def _stop_all(self) -> None:
        """Let all processes end, deliver the files that they write meanwhile, and kill the processes that do not end."""
        self._pause = False
        self._give_orders()
        if self.signals:
            self._print("stopping: collectors end, the learner saves")
        self.learner.send(signal.SIGINT if self.signals[:1] == [signal.SIGINT] else signal.SIGTERM)
        self.agent.send(signal.SIGTERM)
        until = time.monotonic() + self.task.patience.stop
        while (self.learner.runs or self.agent.runs) and time.monotonic() < until:
            time.sleep(TICK_SECONDS)
        self.agent.kill()
        self.learner.kill()
        for thread in self._threads:
            thread.end()
        with contextlib.suppress(OSError):
            if self._ingests:
                self._deliver_here(flush=True)
            if self.remote is not None:  # end the collectors of other machines, and take their last files
                self._lead(stop=True)
                until = time.monotonic() + _LAST_SECONDS
                while self.remote.nodes and time.monotonic() < until:
                    time.sleep(0.5)
                    self.remote.read_beats()
                for ingest in self._ingests[1:]:
                    ingest.pull()

    # ---- the screen ------------------------------------------------------------------------------------------------------

    def _show(self, beats: dict[str, dict[str, Any]]) -> None:
        now, beat, tty = time.monotonic(), self.learner.beat, self.out.isatty()
        if self.quiet or now < self._line_at:
            return
        self._line_at = now + (0.5 if tty else _LINE_SECONDS if beat else 2.0)
        if not beat and not tty:
            return
        speeds = self._rates.add(now, int(beat.get("updates", 0)), int(beat.get("steps", 0)))
        replaced = self.agent.replaced + (self.remote.total("replaced") if self.remote else 0)
        waiting = self.agent.waiting + (self.remote.total("waiting") if self.remote else 0)
        line = progress_line(beat, list(beats.values()), speeds, replaced, self._version, waiting)
        if tty:
            line = line[: shutil.get_terminal_size().columns - 1]
            self.out.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self.out.write(line + "\n")
        self.out.flush()

    def _clear_line(self) -> None:
        if self._width:
            self.out.write("\r" + " " * self._width + "\r")
            self._width = 0

    def _print(self, text: str) -> None:
        self._clear_line()
        print(text, file=self.out, flush=True)
