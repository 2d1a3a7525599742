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
from amago.launch.children import LaunchError, Patience, Role, reaper
from amago.run.launched.protocol import ORDERS as LOCAL_ORDERS
from amago.run.launched.protocol import STATE_FILE, Assignment, write_small
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
        max_policy_lag: versions by which the policy of a collector may be older than the newest; None: any number.
        max_undelivered: bytes that may wait on the machine while they cannot be delivered, before collectors pause.
    """

    program: Sequence[str]
    collectors: int
    patience: Patience = field(default_factory=Patience)
    max_policy_lag: int | None = None
    max_undelivered: float = MOST_WAITING_BYTES

    def __post_init__(self) -> None:
        if not self.program or (self.program[0] != "-m" and not Path(self.program[0]).is_file()):
            raise ValueError(f"program is {list(self.program)}, which is not a file: name a script, or '-m' and a module")

    @property
    def command(self) -> list[str]:
        """Of each process."""
        return [sys.executable, *self.program]


class Agent:
    """Runs the collectors of a machine. One thread calls `watch`: children die with the thread that started them. Another may call `pump`.

    Args:
        control: directory of the small files through which collectors are led.
        node: distinguishes them from collectors of machines without the learner's disk; 0: they share it.

    Attributes:
        spools: of this machine. The collectors' spool is the first; others are left of earlier starts.
        waiting: bytes that could not be delivered when that was last tried.
        news: sentences for the user.
    """

    def __init__(self, task: Task, control: Path, node: int = 0):
        self.task, self.control, self.waiting = task, control, 0
        self.news: list[str] = []
        self.collectors: list[Role] = []
        self.spools: list[Spool] = []
        self._places: dict[str, Any] = {}
        self._orders: dict[str, Any] = {}
        self._count_at = 0.0
        self._lock = threading.Lock()
        variables = {name: os.environ.get(name, value) for name, value in _ALONE.items()}
        for i in range(task.collectors):
            part = Assignment("collector", i, task.collectors, str(control), None, task.max_policy_lag, node)
            self.collectors.append(
                Role(part, task.command, [variables], task.patience, self.news, control / f"{part.name}.log")
            )

    def begin(self, spools: Sequence[Spool], policy: Path, collectors: Path) -> None:
        """Let collectors begin, each in its own directory within ``collectors``; ``policy`` is that of the newest ``policy.pt``."""
        directories = [collectors / role.name for role in self.collectors]
        spools[0].collectors += [d for d in directories if d not in spools[0].collectors]
        self.spools = list(spools)
        self._places = {"policy": str(policy), "collectors": str(collectors)}

    def watch(self) -> None:
        """Start collectors that are due, and replace those that have died or hang."""
        delivered = self.spools[0].delivered if self.spools else {}
        for role in self.collectors:
            role.watch(delivered.get(role.name, 0))

    def give_orders(self, **orders: object) -> None:
        """Pass orders on: "pause", "version", "evaluates". Collectors pause, too, while too much waits."""
        given = {**self._places, **orders, "pause": orders["pause"] or self.waiting >= self.task.max_undelivered}
        path = self.control / LOCAL_ORDERS
        if given != self._orders or not path.exists():  # temporary directories are tidied
            with contextlib.suppress(OSError):  # the disk is full: the next time
                write_small(path, given)
                self._orders = given

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
                    waits = f"{self.waiting / 1e9:.3g} GB wait to be delivered, and {most / 1e9:.3g} may"
                    log.warning("%s: collectors pause until they are", waits)

    def report(self) -> dict[str, Any]:
        """The state of this machine: bytes that wait, processes replaced so far, and the newest sign of life of each collector."""
        replaced = sum(role.replaced for role in self.collectors)
        return {"waiting": self.waiting, "replaced": replaced, "collectors": {role.name: role.beat for role in self.collectors}}


def end_all(roles: Sequence[Role], numbers: Mapping[str, int], seconds: float) -> None:
    """Let processes end by a signal, and kill those that have not ended in time; ``numbers`` has the signals by name, SIGTERM if none."""
    for role in roles:
        role.send(numbers.get(role.name, signal.SIGTERM))
    until = time.monotonic() + seconds
    while any(role.runs for role in roles) and time.monotonic() < until:
        time.sleep(0.1)
    for role in roles:
        role.kill()


class Every(threading.Thread):
    """Calls a function at once and then each so many seconds, until `end`. While it raises OSError, the pauses grow; the first error is
    logged, with a description of the call."""

    def __init__(self, call: Callable[[], object], seconds: float, what: str):
        super().__init__(daemon=True)
        self._call, self._seconds, self._what = call, seconds, what
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            try:
                self._call()
                pause = self._seconds
            except OSError as err:
                if pause <= self._seconds:
                    log.warning("%s failed, and is tried again: %s", self._what, err)
                pause = min(30.0, 2 * max(pause, self._seconds))

    def end(self) -> None:
        """Let the call in progress be the last one, and wait for it, a minute at most."""
        self._over.set()
        self.join(60.0)


class Collect:
    """``amago collect``: an `Agent` on another machine than the learner's, led by the orders on a bus.

    Files that are not delivered yet are in ``home``; each process takes a part of it.
    """

    def __init__(self, task: Task, url: str, home: Path):
        self.bus, self.task = Bus(url), task
        bases, self._locks = _claim(own_directory(own_directory(home) / sha256(url.encode()).hexdigest()[:16]))
        self.home = bases[0]
        self.name = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        shutil.rmtree(self.home / "control", ignore_errors=True)  # of a process that was killed
        self.agent = Agent(task, own_directory(self.home / "control"), zlib.crc32(self.name.encode()) or 1)
        self._spools = [
            Spool(self.bus, base, f"{self.name}-{i}", sorted(base.glob("collector-*"))) for i, base in enumerate(bases)
        ]
        self._version = self._count = 0  # of the policy on this machine's disk; of beats
        self._orders: dict[str, Any] = {}
        self._failure = ""

    def run(self) -> int:
        """Collect until the launch stops, or a signal arrives; the exit code is 0, 128 + the signal, or 1 if collectors fail for good."""
        self.agent.news.append(f"{self.task.collectors} collectors wait for the launch at {self.bus.url}")
        with note_signals() as signals:
            calls = (
                (self.agent.pump, 0.25), (self._follow_orders, ORDERS_SECONDS), (self._put_beat, BEAT_SECONDS),
                (lambda: share_exploration(self.bus, self.agent), EXPLORATION_SECONDS),
            )  # fmt: skip
            threads = [Every(call, seconds, f"talking to {self.bus.url}") for call, seconds in calls]
            try:
                while not signals and not (self.agent.spools and self._orders["stop"]):
                    if self.agent.spools:
                        self.agent.watch()
                    while self.agent.news:
                        print(self.agent.news.pop(0), file=sys.stderr, flush=True)
                    time.sleep(0.1)
            except LaunchError as err:
                self._failure = str(err)
            finally:
                end_all(self.agent.collectors, {}, self.task.patience.stop)
                for thread in threads:
                    thread.end()
                reaper.close()
                with contextlib.suppress(OSError):
                    self.agent.pump(flush=True)
                    self._put_beat(ended=True)
                for lock in self._locks:
                    lock.release()
        if self._failure:
            print(self._failure, file=sys.stderr, flush=True)
        return 128 + signals[0] if signals else int(bool(self._failure))

    def _follow_orders(self) -> None:
        """Read the orders on the bus, and the newest policy; pass the orders on, and let collectors begin once there is a policy."""
        begun, orders = bool(self.agent.spools), self.bus.get_json(ORDERS)
        if orders is None or (orders["stop"] and not begun):  # those of a launch that is over
            return
        if not self._orders and orders.get("amago") != __version__:
            self.agent.news.append(
                f"this is amago {__version__}, and the learner's is {orders.get('amago')}: install the same version if it fails"
            )
        self._orders = orders
        if orders["version"] > self._version:
            self._fetch()
        if self._version and not begun:
            self._begin_exploration()
            self.agent.begin(self._spools, self.home / "policy", self.home)
        evaluates = orders["evaluator"] == self.name
        self.agent.give_orders(pause=orders["pause"], version=max(self._version, orders["version"]), evaluates=evaluates)

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
        if newest is None or newest["version"] <= self._version:
            return
        with contextlib.suppress(FileNotFoundError):
            content = self.bus.get(f"{POLICY}/{newest['name']}")
            if sha256(content).hexdigest() == newest["sha256"]:
                policy = own_directory(self.home / "policy") / "policy.pt"
                replace_file(policy, lambda tmp: tmp.write_bytes(content))
                self._version = newest["version"]

    def _put_beat(self, ended: bool = False) -> None:
        self._count += 1
        self.bus.put_json(f"{BEATS}/{self.name}.json", {
            "count": self._count, "host": socket.gethostname(), "ended": ended, "failure": self._failure, **self.agent.report(),
        })  # fmt: skip


def share_exploration(bus: Bus, agent: Agent) -> None:
    """Put the exploration schedules of a collector on the bus, with which collectors of new machines begin."""
    for directory in agent.spools[0].collectors if agent.spools else ():
        with contextlib.suppress(FileNotFoundError):
            bus.put(EXPLORATION, (directory / STATE_FILE).read_bytes())
            return


def _claim(parent: Path) -> tuple[list[Path], list[RunLock]]:
    """Claim a directory for a process: the first below ``parent`` without a living owner; then others that dead processes left."""
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
