"""The collectors of one machine; and the transfer of their files to a bus, and of weights and orders from it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from amago import __version__
from amago.launch.bundles import Spool
from amago.launch.bus import BEATS, POLICY, Bus, own_directory
from amago.launch.processes import STEP_SECONDS, STOP_SECONDS, Role, end_all, run, say
from amago.run.launched.protocol import ORDERS, Assignment, read_small, write_beat
from amago.run.locks import HeldError, RunLock
from amago.store.files import replace_file

log = logging.getLogger(__name__)
BEAT_SECONDS, LONGEST_SECONDS = 5.0, 10.0
"""Between two signs of life of a machine; two attempts to reach a bus, at most."""
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
    """Runs the collectors of a machine, led by the orders on a bus, to which it delivers what they collect.

    Args:
        homes: directories of collectors. This start's are in the first; others were left by earlier starts.
        control: directory of the small files through which processes are led.
        policy: directory with the newest ``policy.pt``; None: it is fetched from the bus.
        seconds: between two looks at the orders.

    Attributes:
        name: unique to this start.
        orders: the newest ones; empty before there is a policy to act with.
        waiting: bytes that are not on the bus.
    """

    def __init__(
        self, task: Task, bus: Bus, homes: Sequence[Path], control: Path, policy: Path | None = None, seconds: float = 1.0
    ):
        self.task, self.bus, self.home, self.control, self.waiting = task, bus, homes[0], control, 0
        self.name = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self.orders: dict[str, Any] = {}
        self._fetches, self._policy = policy is None, policy or own_directory(self.home / "policy")
        self._version = self._count = 0  # of the policy that was fetched; of beats
        places = zlib.crc32(self.name.encode()), str(self.home), str(self._policy)
        self.collectors = [
            Role(
                Assignment("collector", i, task.collectors, str(control), None, task.max_policy_lag, *places),
                [sys.executable, *task.program], hang_timeout=task.hang_timeout,
            ) for i in range(task.collectors)
        ]  # fmt: skip
        self.spool = Spool(bus, homes, self.name)
        self._threads = [
            Every(self.spool.pump, 0.25, f"delivery to {bus.url}"),
            Every(self._follow, seconds, f"reading orders from {bus.url}"),
            Every(self._put_beat, BEAT_SECONDS, f"writing to {bus.url}"),
            Every(self._count_waiting, 1.0, f"counting what waits in {self.home}"),
        ]

    def watch(self) -> bool:
        """Once there are orders, pass them on, start collectors that are due, and replace those that have died or hang; False after the last
        orders."""
        if self.orders:
            self._pass_on()
            for role in self.collectors:
                role.watch(self.spool.delivered[role.name])
        return not self.orders.get("stop")

    def report(self) -> dict[str, Any]:
        """The state of this machine: bytes that wait, processes replaced so far, and the newest sign of life of each collector."""
        replaced = sum(role.replaced for role in self.collectors)
        return {"waiting": self.waiting, "replaced": replaced, "collectors": {role.name: role.beat for role in self.collectors}}

    def end(self, failure: str = "") -> None:
        """End all collectors, and deliver what they have written, if the bus can be reached."""
        end_all(self.collectors, STOP_SECONDS, signal.SIGTERM)
        for thread in self._threads:
            thread.end()
        try:
            self.spool.pump(flush=True, seconds=60.0)
            self._put_beat(True, failure)
        except Exception as err:
            log.warning("the last files are not delivered, and wait in %s: %s", self.home, err)

    def _count_waiting(self) -> None:
        before, most, self.waiting = self.waiting, self.task.max_undelivered, self.spool.waiting
        if self.waiting >= most > before:
            text = "%.3g GB wait to be delivered, and %.3g may: collectors pause until they are"
            log.warning(text, self.waiting / 1e9, most / 1e9)

    def _pass_on(self) -> None:
        """Write the orders for the collectors of this machine, where they have changed, or were tidied away with temporary files."""
        given = {
            "version": self.orders["version"], "pause": self.orders["pause"] or self.waiting >= self.task.max_undelivered,
            "evaluates": self.orders["evaluator"] == self.name,
        }  # fmt: skip
        if given != read_small(path := self.control / ORDERS):
            write_beat(path, given)

    def _follow(self) -> None:
        """Read the orders on the bus, and fetch the newest policy; collectors begin once there is one."""
        orders = self.bus.get_json(ORDERS)
        if orders is None or (orders["stop"] and not self.orders):  # of a launch that is over
            return
        if self._fetches and orders["version"] > self._version:
            content = self.bus.get(POLICY)
            replace_file(self._policy / "policy.pt", lambda tmp: tmp.write_bytes(content))
            self._version = orders["version"]
        if not self.orders:
            if self._fetches and not self._version:
                return
            if (theirs := orders["amago"]) != __version__:
                say(f"this is amago {__version__}, and the learner's is {theirs}: install the same version if it fails")
        self.orders = orders

    def _put_beat(self, ended: bool = False, failure: str = "") -> None:
        """Put a sign of life on the bus."""
        self._count += 1
        beat = {"count": self._count, "host": socket.gethostname(), "ended": ended, "failure": failure, **self.report()}
        self.bus.put(f"{BEATS}/{self.name}.json", beat)


def collect(task: Task, url: str, home: Path) -> int:
    """Run collectors for the launch on a bus until it stops, or a signal arrives; returns the exit code as of `run`. Files that are not
    delivered yet are in ``home``, of which each process takes a part."""
    bus = Bus(url)
    claimed = _claim(own_directory(own_directory(home) / sha256(url.encode()).hexdigest()[:16]))
    say(f"{task.collectors} collectors wait for the launch at {url}")
    control = Path(tempfile.mkdtemp(prefix="amago-launch-"))
    node = Node(task, bus, [path for path, _ in claimed], control)
    return run(control, node.watch, lambda failure, _: node.end(failure))


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
