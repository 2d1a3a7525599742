"""The collectors of one machine: their processes, the transfer of their files to the learner, and of its weights to them."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from amago import __version__
from amago.launch.bundles import Spool
from amago.launch.bus import BEATS, EXPLORATION, ORDERS, POLICY, Bus, own_directory
from amago.launch.children import Child, LaunchError, Patience, Role, reaper
from amago.run.launched.protocol import HELLO, STATE_FILE, Assignment, write_small
from amago.run.launched.protocol import ORDERS as LOCAL_ORDERS
from amago.run.locks import HeldError, RunLock
from amago.store.files import replace_file

log = logging.getLogger(__name__)
BEAT_SECONDS, ORDERS_SECONDS, EXPLORATION_SECONDS = 5.0, 1.0, 30.0
MOST_WAITING_BYTES = 10e9
# one thread, and no GPU unless the user sets it: a collector's products are small, and there are many collectors
_ALONE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ACCELERATE_USE_CPU": "true"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def note_signals() -> Iterator[list[int]]:
    """A block in which signals that end a launch are only added to a list."""
    received: list[int] = []
    wanted = [s for s in _SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]  # nohup ignores it
    before = {s: signal.signal(s, lambda number, _: received.append(number)) for s in wanted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Task:
    """The program that the collectors of a machine run, with their number and limits.

    Attributes:
        program: of the user, with its arguments, after the interpreter: ["train.py", "--run_name", "a"] or ["-m", "module"].
        collectors: on this machine.
        patience: of the process that watches them.
        max_policy_lag: versions by which the policy of a collector may be older than the newest; None: any number.
        max_undelivered: bytes that may wait on the machine while they cannot be delivered, before collectors pause.

    Raises:
        ValueError: a field is out of its range, or there is no such program.
    """

    program: Sequence[str]
    collectors: int
    patience: Patience = field(default_factory=Patience)
    max_policy_lag: int | None = None
    max_undelivered: float = MOST_WAITING_BYTES

    def __post_init__(self) -> None:
        lag = self.max_policy_lag
        if lag is not None and (type(lag) is not int or lag < 0):
            raise ValueError(f"max_policy_lag counts versions and must be a whole number of at least 0, or None, got {lag!r}")
        if not self.max_undelivered > 0:
            raise ValueError(f"max_undelivered must be a number of bytes above 0, got {self.max_undelivered!r}")
        if not self.program or (self.program[0] != "-m" and not Path(self.program[0]).is_file()):
            raise ValueError(f"program is {list(self.program)}, which is not a file: name a script, or '-m' and a module")

    def collector(self, index: int, control: Path, node: int) -> Child:
        """The process of a collector, not started."""
        assignment = Assignment("collector", index, self.collectors, str(control), None, self.max_policy_lag, node)
        variables = {k: os.environ.get(k, v) for k, v in _ALONE.items()}
        return Child(assignment, [sys.executable, *self.program], variables, control / f"{assignment.name}.log")


class Agent:
    """Runs the collectors of a machine. One thread calls `watch`: children die with the thread that started them. Another may call `pump`.

    Args:
        task: of each collector.
        control: directory of the small files through which collectors are led.
        node: distinguishes them from collectors of machines without the learner's disk; 0: they share it.

    Attributes:
        collectors: their processes.
        waiting: bytes that could not be delivered when that was last tried.
        news: sentences for the user.
    """

    def __init__(self, task: Task, control: Path, node: int = 0):
        self.task, self.control, self.waiting = task, control, 0
        self.news: list[str] = []
        children = [task.collector(i, control, node) for i in range(task.collectors)]
        self.collectors = [Role([child], task.patience, "a delivered phase", self.news) for child in children]
        self.spools: list[Spool] = []
        self._hello: dict[str, Any] = {}
        self._orders: dict[str, Any] = {}
        self._hello_at = self._count_at = 0.0
        self._lock = threading.Lock()

    def begin(self, spools: Sequence[Spool], policy: Path, collectors: Path) -> None:
        """Let collectors begin.

        Args:
            spools: of this machine. The collectors' spool is the first; others are left of earlier starts.
            policy: directory of the newest ``policy.pt``.
            collectors: directory in which each has its own.
        """
        directories = [collectors / role.name for role in self.collectors]
        spools[0].collectors += [d for d in directories if d not in spools[0].collectors]
        self._hello = {"policy": str(policy), "collectors": str(collectors)}
        self.spools = list(spools)

    def watch(self) -> None:
        """Start collectors that are due, and replace those that have died or hang.

        Raises:
            LaunchError: one fails again and again without a delivery.
        """
        blind = False
        if self._hello and time.monotonic() >= self._hello_at:  # again and again: temporary directories are tidied
            self._hello_at = time.monotonic() + 60.0
            blind = not self._write(HELLO, self._hello)
        delivered = self.spools[0].delivered if self.spools else {}
        for role in self.collectors:
            role.watch(delivered.get(role.name, 0), blind)

    def give_orders(self, orders: Mapping[str, Any]) -> None:
        """Pass orders on: "pause", "version", "evaluates". Collectors pause, too, while too much waits."""
        given = {**orders, "pause": bool(orders.get("pause")) or self.waiting >= self.task.max_undelivered}
        if (given != self._orders or not (self.control / LOCAL_ORDERS).exists()) and self._write(LOCAL_ORDERS, given):
            self._orders = given

    def _write(self, name: str, value: Mapping[str, Any]) -> bool:
        try:
            write_small(self.control / name, value)
        except OSError:  # the disk is full: the next time
            return False
        return True

    def pump(self, flush: bool = False) -> None:
        """Put the collectors' files on the bus. Files that cannot be put now wait."""
        with self._lock:
            for spool in self.spools:
                spool.pump(flush)
            if not any(spool.failing for spool in self.spools):
                self.waiting, self._count_at = 0, 0.0
            elif (now := time.monotonic()) >= self._count_at:
                before, self.waiting = self.waiting, sum(spool.waiting for spool in self.spools)
                self._count_at = time.monotonic() + max(1.0, 10 * (time.monotonic() - now))
                if self.waiting >= (most := self.task.max_undelivered) > before:
                    log.warning(
                        "%.3g GB wait to be delivered, and %.3g may: collectors pause until they are",
                        self.waiting / 1e9,
                        most / 1e9,
                    )

    @property
    def beats(self) -> dict[str, dict[str, Any]]:
        """The newest sign of life of each collector, by name."""
        return {role.name: role.beat for role in self.collectors}

    @property
    def runs(self) -> bool:
        """True if any collector runs."""
        return any(role.runs for role in self.collectors)

    @property
    def replaced(self) -> int:
        """Processes that were replaced so far."""
        return sum(role.replaced for role in self.collectors)

    def send(self, number: int) -> None:
        """Send a signal to those that run, with which they end."""
        for role in self.collectors:
            role.send(number)

    def kill(self) -> None:
        """End all at once."""
        for role in self.collectors:
            role.kill()


class Every(threading.Thread):
    """Calls a function again and again until `end`. While it raises OSError, the pauses grow; the first error is logged.

    Args:
        call: the function.
        seconds: between two calls.
        what: description of the function, for the log.
    """

    def __init__(self, call: Callable[[], object], seconds: float, what: str):
        super().__init__(daemon=True)
        self._call, self._seconds, self._what = call, seconds, what
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        pause = self._seconds
        while not self._over.wait(pause):
            try:
                self._call()
                pause = self._seconds
            except OSError as err:
                if pause == self._seconds:
                    log.warning("%s failed, and is tried again: %s", self._what, err)
                pause = min(30.0, 2 * pause)

    def end(self) -> None:
        """Let the call in progress be the last one, and wait for it, a minute at most."""
        self._over.set()
        self.join(60.0)


class Collect:
    """``amago collect``: an `Agent` on another machine than the learner's, led by the orders on a bus.

    Args:
        task: of each collector.
        url: of the bus.
        home: directory for files that are not delivered yet; each process takes a part of it.

    Attributes:
        version: of the policy on this machine's disk.
    """

    def __init__(self, task: Task, url: str, home: Path):
        self.bus, self.task = Bus(url), task
        bases, self._locks = _claim(own_directory(own_directory(home) / sha256(url.encode()).hexdigest()[:16]))
        self.home = bases[0]
        self.name = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self.control = self.home / "control"
        shutil.rmtree(self.control, ignore_errors=True)  # of a process that was killed
        own_directory(self.control)
        self.agent = Agent(task, self.control, zlib.crc32(self.name.encode()) or 1)
        self._spools = [
            Spool(self.bus, base, f"{self.name}-{i}", sorted(base.glob("collector-*"))) for i, base in enumerate(bases)
        ]
        self.version = self._count = 0
        self._orders: dict[str, Any] = {}
        self._orders_at = self._beat_at = self._exploration_at = 0.0
        self._failure, self._begun = "", False

    def run(self) -> int:
        """Collect until the launch stops, or a signal arrives.

        Returns:
            the exit code: 0; 128 + the number of a signal; 1 if collectors fail again and again.
        """
        self.agent.news.append(f"{self.task.collectors} collectors wait for the launch at {self.bus.url}")
        with note_signals() as signals:
            exchange = Every(self.exchange, 0.25, f"talking to {self.bus.url}")
            try:
                while not signals and not self._failure and not (self._begun and self._orders.get("stop")):
                    self._watch()
                    time.sleep(0.1)
                self.agent.send(signal.SIGTERM)
                until = time.monotonic() + self.task.patience.stop
                while self.agent.runs and time.monotonic() < until:
                    time.sleep(0.1)
            finally:
                exchange.end()
                self.agent.kill()
                reaper.close()
                with contextlib.suppress(OSError):
                    self.agent.pump(flush=True)
                    self._put_beat(ended=True)
                for lock in self._locks:
                    lock.release()
        if self._failure:
            print(self._failure, file=sys.stderr, flush=True)
        return 128 + signals[0] if signals else int(bool(self._failure))

    def _watch(self) -> None:
        try:
            if self._begun:
                self.agent.watch()
        except LaunchError as err:
            self._failure = str(err)
        while self.agent.news:
            print(self.agent.news.pop(0), file=sys.stderr, flush=True)

    def exchange(self) -> None:
        """Put files and signs of life on the bus; read orders and weights."""
        now = time.monotonic()
        self.agent.pump()
        if now >= self._orders_at:
            self._orders_at = now + ORDERS_SECONDS
            orders = self.bus.get_json(ORDERS)
            if orders is not None and (self._begun or not orders.get("stop")):
                self._follow(orders)
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            self._put_beat()
        if now >= self._exploration_at and self._begun:
            self._exploration_at = now + EXPLORATION_SECONDS
            share_exploration(self.bus, self.agent)

    def _follow(self, orders: dict[str, Any]) -> None:
        version = int(orders.get("version", 0))
        if not self._orders and orders.get("amago") != __version__:
            self.agent.news.append(
                f"this is amago {__version__}, and the learner's is {orders.get('amago')}: install the same version if it fails"
            )
        self._orders = orders
        if version > self.version:
            self._fetch()
        self.agent.give_orders({
            "pause": bool(orders.get("pause")), "version": max(self.version, version), "evaluates": orders.get("evaluator") == self.name,
        })  # fmt: skip
        if self.version and not self._begun:
            self._begin_exploration()
            self.agent.begin(self._spools, self.home / "policy", self.home)
            self._begun = True

    def _begin_exploration(self) -> None:
        """Let collectors that have none begin with the exploration schedules on the bus."""
        state = self.bus.get_json(EXPLORATION)
        for role in self.agent.collectors if state else ():
            path = own_directory(self.home / role.name) / STATE_FILE
            if not path.exists():
                path.write_text(json.dumps(state), encoding="utf-8")

    def _fetch(self) -> None:
        """Fetch the newest policy; one that is torn or was just replaced is fetched the next time."""
        newest = self.bus.get_json(f"{POLICY}/latest.json")
        if newest is None or int(newest["version"]) <= self.version:
            return
        with contextlib.suppress(FileNotFoundError):
            content = self.bus.get(f"{POLICY}/{newest['name']}")
            if sha256(content).hexdigest() == newest["sha256"]:
                own_directory(self.home / "policy")
                replace_file(self.home / "policy" / "policy.pt", lambda tmp: tmp.write_bytes(content))
                self.version = int(newest["version"])

    def _put_beat(self, ended: bool = False) -> None:
        self._count += 1
        self.bus.put_json(f"{BEATS}/{self.name}.json", {
            "count": self._count, "host": socket.gethostname(), "ended": ended, "waiting": self.agent.waiting,
            "replaced": self.agent.replaced, "failure": self._failure, "collectors": self.agent.beats,
        })  # fmt: skip


def share_exploration(bus: Bus, agent: Agent) -> None:
    """Put the exploration schedules of a collector on the bus, with which collectors of new machines begin."""
    for directory in agent.spools[0].collectors if agent.spools else ():
        with contextlib.suppress(FileNotFoundError):
            bus.put(EXPLORATION, (directory / STATE_FILE).read_bytes())
            return


def _claim(parent: Path) -> tuple[list[Path], list[RunLock]]:
    """Claim a directory for a process: the first below ``parent`` without a living owner; then others that dead processes
    left."""
    bases: list[Path] = []
    locks: list[RunLock] = []
    left = sum(1 for _ in parent.glob("*/"))
    for slot in itertools.count():
        if bases and slot >= left:
            break
        lock = RunLock(own_directory(parent / str(slot)) / ".lock")
        with contextlib.suppress(HeldError):
            lock.acquire()
            bases.append(parent / str(slot))
            locks.append(lock)
    return bases, locks
