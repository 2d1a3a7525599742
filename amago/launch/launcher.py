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
from typing import Any

from amago import __version__
from amago.launch.agent import BEAT_SECONDS, EXPLORATION_SECONDS, Agent, Every, Task, end_all, note_signals, share_exploration
from amago.launch.bundles import Ingest, Spool
from amago.launch.bus import BEATS, ORDERS, POLICY, Bus, own_directory
from amago.launch.children import LaunchError, Role, reaper
from amago.launch.progress import Rates, old_policies, progress_line
from amago.run.launched.protocol import RANKS_FILE, REPORTS, Assignment, launch_dir

TICK_SECONDS = 0.1
GONE_SECONDS = 60.0
"""Seconds without a new beat after which a machine is reported as gone."""
LEASE_SECONDS = 30.0
_LINE_SECONDS = 30.0  # between two progress lines in a file; on a terminal one line is rewritten
_LAST_SECONDS = 20.0  # for the last files of other machines


class Remote:
    """The bus to collectors on other machines, from the learner's side. One launch leads a bus, as long as it prolongs its lease.

    Attributes:
        nodes: signs of life of the machines that are there, by name.
        news: sentences for the user.
    """

    def __init__(self, bus: Bus):
        self.bus = bus
        self.news: list[str] = []
        self.nodes: dict[str, dict[str, Any]] = {}
        self._published = 0
        self._orders: dict[str, Any] = {}
        self._orders_at = 0.0
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

    def publish(self, policy: Path, version: int) -> None:
        """Put weights on the bus, if they are newer than those there."""
        if version <= self._published:
            return
        content, name = policy.read_bytes(), f"{version:09d}.pt"
        self.bus.put(f"{POLICY}/{name}", content)
        newest = {"version": version, "sha256": sha256(content).hexdigest(), "name": name}
        self.bus.put_json(f"{POLICY}/latest.json", newest)
        self._published = version
        for old in self.bus.names(POLICY):
            if old.endswith(".pt") and old < f"{version - 2:09d}.pt":
                self.bus.delete(f"{POLICY}/{old}")

    def give_orders(self, pause: bool, stop: bool, evaluator: str) -> None:
        """Put orders on the bus, if they are others, and prolong the lease. Without an evaluator, one of the machines there is it."""
        now, evaluator = time.monotonic(), evaluator or min(self.nodes, default="")
        orders = {"pause": pause, "version": self._published, "stop": stop, "evaluator": evaluator, "amago": __version__}
        if orders != self._orders or now >= self._orders_at:
            lease = {"host": socket.gethostname(), "pid": os.getpid(), "until": 0 if stop else time.time() + LEASE_SECONDS}
            self.bus.put_json(ORDERS, {**orders, "lease": lease})
            self._orders, self._orders_at = orders, now + BEAT_SECONDS

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
                lost = "what it has collected arrives if it comes back with its disk"
                self.news.append(f"{beat['host']} has given no sign for {GONE_SECONDS:.0f} s; {lost}")
        self.nodes = found


class Launcher:
    """A launch. Processes are started and watched in the main thread, since children die with the thread that started them.

    Args:
        task: of the collectors on this machine.
        limits: "MIN:MAX", updates per environment step; None: a range around the script's own ratio.
        bus: URL, for collectors on other machines; None: there are none.
        starter: starts collectors on other machines, and returns a function that ends them.
    """

    def __init__(
        self, task: Task, learners: int = 1, limits: str | None = None, bus: str | None = None,
        starter: Callable[[], Callable[[], None]] | None = None, quiet: bool = False,
    ):  # fmt: skip
        for name, value, least in (("collectors", task.collectors, 0 if bus else 1), ("learners", learners, 1)):
            if value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        self.task, self.starter, self.quiet = task, starter, quiet
        self.remote = None if bus is None else Remote(Bus(bus))
        self.control = Path(tempfile.mkdtemp(prefix="amago-launch-"))
        self.agent = Agent(task, self.control)
        assignment = Assignment("learner", 0, task.collectors, str(self.control), limits)
        self.learner = Role(assignment, task.command, self._ranks(learners), task.patience, self.agent.news)
        self.signals: list[int] = []
        self._ingests: list[Ingest] = []
        self._threads: list[Every] = []
        self._rates, self._version, self._updates = Rates(), 0, 0
        self._pause, self._paused_seconds = False, 0.0
        self._old: set[str] = set()
        self._line_at, self._width = 0.0, 0

    def _ranks(self, count: int) -> list[dict[str, str]]:
        """Variables as torchrun would set them. Ranks meet through a file, and nothing listens but on this machine."""
        if count == 1:
            return [{}]
        shared = {
            "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
            "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            RANKS_FILE: str(self.control / "ranks"),
        }  # fmt: skip
        return [{**shared, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(count)]

    # ---- the loop --------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until the learner has ended, or a signal arrives.

        Returns:
            the exit code: the learner's; 128 + the number of the signal that stopped the launch; 1 if a process fails for good.
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
                if failure:
                    self._print(failure)
            finally:
                end_all([self.learner, *self.agent.collectors], {}, 0.0)
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
            for role in self.agent.collectors:  # the learner still evaluates
                role.send(signal.SIGTERM)
            learner.read_beat()
            return learner.runs
        if not learner.processes:
            for name in ("ranks", "ranks.keys"):
                (self.control / name).unlink(missing_ok=True)
        self._updates = max(self._updates, int(learner.beat.get("updates", 0)))
        goes_on = learner.watch(self._updates)
        if goes_on:
            self.agent.watch()
        return goes_on

    def _tick(self) -> None:
        """Pass the learner's orders on, and show progress."""
        beat = self.learner.beat
        self._version = max(self._version, int(beat.get("version", 0)))  # a learner that was started again gives no sign yet
        self._pause = bool(beat.get("pause")) and self.learner.runs
        self._paused_seconds += TICK_SECONDS * self._pause
        nodes = {"": self.agent.report(), **(self.remote.nodes if self.remote else {})}
        beats = {f"{n}/{c}".lstrip("/"): beat for n, node in nodes.items() for c, beat in node["collectors"].items()}
        news = self.agent.news
        if self.task.max_policy_lag is None:
            news += old_policies(self._version, beats, self._old)
        for source in (news, self.remote.news if self.remote else []):
            while source:
                self._print(source.pop(0))
        if not self._ingests and "run_dir" in beat:
            self._begin(Path(beat["run_dir"]), beat["save_to"], Path(beat["policy"]))
        self._give_orders()
        replaced, waiting = (sum(int(node[what]) for node in nodes.values()) for what in ("replaced", "waiting"))
        self._show(list(beats.values()), replaced, waiting)

    def _give_orders(self) -> None:
        paused = round(self._paused_seconds, 1) if self._pause else int(self._paused_seconds)
        self.agent.give_orders(pause=self._pause, version=self._version, evaluates=True, paused_seconds=paused)

    def _begin(self, run_dir: Path, save_to: str, policy: Path) -> None:
        """Begin to move files from the collectors to the learner's store."""
        home, key = own_directory(launch_dir(run_dir), mend=True), sha256(str(run_dir).encode()).hexdigest()[:12]
        bus = Bus(str(home / "bus"))
        self._ingests = [Ingest(bus, save_to, home / REPORTS, f"{key}-here")]
        # collectors that an earlier launch had and this one has not may have left files
        spool = Spool(bus, home, f"here-{os.getpid()}-{os.urandom(4).hex()}", sorted(home.glob("collector-*")))
        self.agent.begin([spool], policy, home)
        self._threads.append(Every(self._deliver_here, TICK_SECONDS, "delivery"))
        if self.remote is not None:
            remote, url = self.remote, self.remote.bus.url
            self._ingests.append(Ingest(remote.bus, save_to, home / REPORTS, f"{key}-bus"))
            self._threads += [
                Every(self._ingests[1].pull, 1.0, f"taking files from {url}"),
                Every(lambda: remote.publish(policy / "policy.pt", self._version), 0.5, f"publishing weights at {url}"),
                Every(self._lead, 0.5, f"leading {url}"),
                Every(remote.read_beats, BEAT_SECONDS, f"reading from {url}"),
                Every(lambda: share_exploration(remote.bus, self.agent), EXPLORATION_SECONDS, f"writing to {url}"),
            ]

    def _deliver_here(self, flush: bool = False) -> None:
        self.agent.pump(flush)
        self._ingests[0].pull()

    def _lead(self, stop: bool = False) -> None:
        assert self.remote is not None
        self.remote.give_orders(self._pause, stop, "here" if self.task.collectors else "")

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def _stop_all(self) -> None:
        """Let all processes end, deliver the files that they write meanwhile, and kill the processes that do not end."""
        self._pause = False
        self._give_orders()
        if self.signals:
            self._print("stopping: collectors end, the learner saves")
        number = signal.SIGINT if self.signals[:1] == [signal.SIGINT] else signal.SIGTERM
        end_all([self.learner, *self.agent.collectors], {"learner": number}, self.task.patience.stop)
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

    def _show(self, beats: list[dict[str, Any]], replaced: int, waiting: int) -> None:
        now, beat, tty = time.monotonic(), self.learner.beat, sys.stderr.isatty()
        if self.quiet or now < self._line_at or not (beat or tty):
            return
        self._line_at = now + (0.5 if tty else _LINE_SECONDS)
        speeds = self._rates.add(now, int(beat.get("updates", 0)), int(beat.get("steps", 0)))
        line = progress_line(beat, beats, speeds, replaced, self._version, waiting)
        if tty:
            line = line[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write("\r" + line.ljust(self._width))
            self._width = len(line)
            sys.stderr.flush()
        else:
            print(line, file=sys.stderr, flush=True)

    def _print(self, text: str) -> None:
        """Print a sentence in place of the progress line."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            self._width = 0
        print(text, file=sys.stderr, flush=True)
