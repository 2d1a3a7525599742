"""The collectors of one machine: their processes, the transfer of their files to a bus, and of weights and orders from it."""

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
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from amago import __version__
from amago.launch.bundles import Spool
from amago.launch.bus import BEATS, EXPLORATION, ORDERS, POLICY, Bus, own_directory
from amago.launch.children import STEP_SECONDS, STOP_SECONDS, LaunchError, Role, end_all, note_signals, start_reaper
from amago.run.launched.protocol import ORDERS as LOCAL_ORDERS
from amago.run.launched.protocol import STATE_FILE, Assignment, write_small
from amago.run.locks import HeldError, RunLock
from amago.store.files import replace_file

log = logging.getLogger(__name__)
TICK_SECONDS, BEAT_SECONDS, LONGEST_SECONDS = 0.1, 5.0, 10.0
"""Between two looks at processes; two signs of life of a machine; two attempts to reach a bus, at most."""
MOST_WAITING_BYTES = 10e9


@dataclass(frozen=True)
class Task:
    """The program that the collectors of a machine run, with their number and limits.

    Attributes:
        program: of the user, with its arguments, after the interpreter: ["train.py", "--run_name", "a"] or ["-m", "module"].
        hang_timeout: seconds without a sign of life after which a process is started again.
        max_policy_lag: versions by which the policy of a collector may be older than the newest; None: any number.
        max_undelivered: bytes that may wait on the machine while they cannot be delivered, before collectors pause.
    """

    program: Sequence[str]
    collectors: int
    hang_timeout: float = STEP_SECONDS
    max_policy_lag: int | None = None
    max_undelivered: float = MOST_WAITING_BYTES

    def __post_init__(self) -> None:
        if not self.program or (self.program[0] != "-m" and not Path(self.program[0]).is_file()):
            raise ValueError(f"program is {list(self.program)}, which is not a file: name a script, or '-m' and a module")


class Every:
    """Calls a function at once and then each so many seconds, until `end`. While it raises an exception, the pauses grow; the first one
    is logged, with a description of the call, and the end of the failures."""

    def __init__(self, call: Callable[[], object], seconds: float, what: str):
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(call, seconds, what), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object], seconds: float, what: str) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            try:
                call()
                if pause > seconds:
                    log.warning("%s succeeds again", what)
                pause = seconds
            except Exception as err:  # each storage client has its own
                if pause <= seconds:
                    log.warning("%s failed, and is tried again: %s: %s", what, type(err).__name__, err)
                pause = max(2 * seconds, min(LONGEST_SECONDS, 2 * pause))

    def end(self) -> None:
        """Let the call in progress be the last one, and wait for it, a minute at most."""
        self._over.set()
        self._thread.join(60.0)


class Node:
    """Runs the collectors of a machine, led by the orders on a bus.

    Attributes:
        name: unique to this start.
        control: directory of the small files through which processes are led.
        news: sentences for the user.
        orders: the newest ones; empty before there is a policy to act with.
        waiting: bytes that are not on the bus.
    """

    def __init__(self, task: Task, news: list[str]):
        self.task, self.news, self.waiting = task, news, 0
        self.name = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self.control = Path(tempfile.mkdtemp(prefix="amago-launch-"))
        self.command = [sys.executable, *task.program]
        self.orders: dict[str, Any] = {}
        self._reaper = start_reaper(self.control)
        self._given: dict[str, Any] = {}
        self._threads: list[Every] = []
        self._version = self._count = 0  # of the policy on this machine's disk; of beats
        self._count_at, self._full, self._failure = 0.0, False, ""
        key, count = zlib.crc32(self.name.encode()), task.collectors
        parts = (Assignment("collector", i, count, str(self.control), None, task.max_policy_lag, key) for i in range(count))
        self.collectors = [Role(part, self.command, self.news, hang_timeout=task.hang_timeout) for part in parts]

    def begin(self, bus: Bus, homes: Sequence[Path], policy: Path | None = None, seconds: float = 1.0) -> None:
        """Deliver to a bus, and follow its orders.

        Args:
            homes: directories of collectors. This start's are in the first; others were left by earlier starts.
            policy: directory with the newest ``policy.pt``; None: it is fetched from the bus.
            seconds: between two looks at the orders.
        """
        self.bus, self.home, self._source = bus, homes[0], policy
        self.spool = Spool(bus, homes, self.name)
        self._threads = [
            Every(self.spool.pump, 0.25, f"delivery to {bus.url}"),
            Every(self._follow, seconds, f"reading orders from {bus.url}"),
            Every(self._put_beat, BEAT_SECONDS, f"writing to {bus.url}"),
        ]

    def watch(self) -> None:
        """Pass orders on; start collectors that are due, and replace those that have died or hang."""
        if self.orders:
            self._count_waiting()
            self._pass_on()
        for role in self.collectors:
            role.watch(self.spool.delivered[role.name] if self.orders else 0)

    def report(self) -> dict[str, Any]:
        """The state of this machine: bytes that wait, processes replaced so far, and the newest sign of life of each collector."""
        replaced = sum(role.replaced for role in self.collectors)
        return {"waiting": self.waiting, "replaced": replaced, "collectors": {role.name: role.beat for role in self.collectors}}

    def end(self, failure: str = "") -> None:
        """End all collectors, and deliver what they have written, if the bus can be reached."""
        self._failure = failure
        end_all(self.collectors, signal.SIGTERM, STOP_SECONDS)
        for thread in self._threads:
            thread.end()
        if self._threads:
            try:
                self.spool.pump(flush=True)
                self._put_beat(ended=True)
            except Exception as err:
                log.warning("the last files are not delivered, and wait in %s: %s", self.home, err)
        self._reaper.kill()
        self._reaper.communicate()
        shutil.rmtree(self.control, ignore_errors=True)

    def _count_waiting(self) -> None:
        """Count what waits, for a tenth of the time at most: there may be many files."""
        if (began := time.monotonic()) < self._count_at:
            return
        with contextlib.suppress(OSError):
            self.waiting = self.spool.waiting
        self._count_at = time.monotonic() + max(1.0, 10 * (time.monotonic() - began))
        before, self._full = self._full, self.waiting >= self.task.max_undelivered
        if self._full and not before:
            size, most = self.waiting / 1e9, self.task.max_undelivered / 1e9
            log.warning("%.3g GB wait to be delivered, and %.3g may: collectors pause until they are", size, most)

    def _pass_on(self) -> None:
        """Write the orders for the collectors of this machine, where they have changed."""
        given = {
            "policy": str(self._source or self.home / "policy"), "collectors": str(self.home), "version": self.orders["version"],
            "pause": self.orders["pause"] or self._full, "evaluates": self.orders["evaluator"] == self.name,
        }  # fmt: skip
        path = self.control / LOCAL_ORDERS
        if given != self._given or not path.exists():  # temporary directories are tidied
            with contextlib.suppress(OSError):  # the disk is full: the next time
                write_small(path, given)
                self._given = given

    def _follow(self) -> None:
        """Read the orders on the bus, and fetch the newest policy; collectors begin once there is one."""
        orders = self.bus.get_json(ORDERS)
        if orders is None or (orders["stop"] and not self.orders):  # of a launch that is over
            return
        if self._source is None and orders["version"] > self._version:
            self._fetch()
        if not self.orders:
            if not (self._source or self._version):
                return
            if orders["amago"] != __version__:
                text = (
                    f"this is amago {__version__}, and the learner's is {orders['amago']}: install the same version if it fails"
                )
                self.news.append(text)
            state = self.bus.get_json(EXPLORATION)  # of another collector, with which those that have none begin
            for role in self.collectors if state else ():
                path = own_directory(self.home / role.name) / STATE_FILE
                if not path.exists():
                    path.write_text(json.dumps(state), encoding="utf-8")
        self.orders = orders

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
        """Put a sign of life on the bus, and now and then the exploration schedules, with which collectors of new machines begin."""
        self._count += 1
        self.bus.put(f"{BEATS}/{self.name}.json", {
            "count": self._count, "host": socket.gethostname(), "ended": ended, "failure": self._failure, **self.report(),
        })  # fmt: skip
        path = self.home / "collector-0" / STATE_FILE
        if self._count % 6 == 1 and path.exists():
            self.bus.put(EXPLORATION, path.read_bytes())


def collect(task: Task, url: str, home: Path) -> int:
    """Run collectors for the launch on a bus until it stops, or a signal arrives.

    Args:
        home: directory for files that are not delivered yet; each process takes a part of it.

    Returns:
        the exit code: 0, 128 + the signal, or 1 if collectors fail for good.
    """
    bus = Bus(url)
    claimed = _claim(own_directory(own_directory(home) / sha256(url.encode()).hexdigest()[:16]))
    node, failure = Node(task, [f"{task.collectors} collectors wait for the launch at {url}"]), ""
    with note_signals() as signals:
        try:
            node.begin(bus, [path for path, _ in claimed])
            while not signals and not node.orders.get("stop"):
                if node.orders:
                    node.watch()
                while node.news:
                    print(node.news.pop(0), file=sys.stderr, flush=True)
                time.sleep(TICK_SECONDS)
        except LaunchError as err:
            failure = str(err)
            print(failure, file=sys.stderr, flush=True)
        finally:
            node.end(failure)
            for _, lock in claimed:
                lock.release()
    return 128 + signals[0] if signals else int(bool(failure))


def _claim(parent: Path) -> list[tuple[Path, RunLock]]:
    """Lock the first numbered directory below ``parent`` that no living process has, and all others that dead processes left."""
    claimed: list[tuple[Path, RunLock]] = []
    for slot in itertools.count():
        path = parent / str(slot)
        if claimed and not path.exists():
            break
        lock = RunLock(own_directory(path) / ".lock")
        with contextlib.suppress(HeldError):
            lock.acquire()
            claimed.append((path, lock))
    return claimed
