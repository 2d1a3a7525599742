"""The processes of one machine: started, watched, started again after growing pauses, and ended; and the transfer of collectors' files to a
bus, and of weights and orders from it."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tqdm import tqdm

from amago import __version__
from amago.launch.bundles import Spool
from amago.launch.bus import BEATS, EXPLORATION, ORDERS, POLICY, Bus, own_directory
from amago.run.launched import protocol
from amago.run.launched.protocol import LONG, RANKS_FILE, SHORT, STATE_FILE, Assignment, read_small, write_small
from amago.run.locks import HeldError, RunLock
from amago.store.files import replace_file

log = logging.getLogger(__name__)
START_SECONDS, STEP_SECONDS, STOP_SECONDS = 600.0, 180.0, 120.0
"""Longest time to a process's first sign of life, or while it saves; to the next sign while it collects or trains; to its end."""
TICK_SECONDS, FIRST_PAUSE, LONGEST_PAUSE, FAILURES = 0.1, 1.0, 60.0, 5
"""Seconds between two looks at processes; before a process is started again, doubled with each failure in a row; and the failures in a row that end a launch."""
BEAT_SECONDS, LONGEST_SECONDS = 5.0, 10.0
"""Between two signs of life of a machine; two attempts to reach a bus, at most."""
MOST_WAITING_BYTES = 10e9
# one thread, and no GPU unless the user sets it: a collector's products are small, and there are many collectors
_ALONE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ACCELERATE_USE_CPU": "true"}
_ALONE_SECONDS = 10.0  # that other ranks may go on for after one has ended
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_REAPER = """
import os, signal, sys, time
sys.stdin.read()
ends = time.monotonic() + 2.0
while time.monotonic() < ends:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                if sys.argv[1].encode() in f.read():
                    os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.02)
"""


class LaunchError(RuntimeError):
    """A process ends or hangs again and again, or may not be started again; the message ends with the end of its log."""


def start_reaper(control: Path) -> subprocess.Popen[bytes]:
    """Start a small process that ends everything with ``control`` in its environment when this process ends, however that ends. Kill it
    when nothing is left to end."""
    return subprocess.Popen(
        [sys.executable, "-ISc", _REAPER, str(control)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def run(control: Path, step: Callable[[], bool], end: Callable[[str, list[int]], None]) -> int:
    """Call ``step`` each `TICK_SECONDS` until it returns false or raises a `LaunchError`, or a signal arrives; then ``end``, with the
    error's text, if there is one, and the signals. Nothing with ``control`` in its environment is left, however this process ends.
    Returns the exit code: 128 + the signal, 1 after a `LaunchError`, otherwise 0."""
    signals: list[int] = []
    reaper = start_reaper(control)
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, lambda number, _: signals.append(number))
    failure = ""
    try:
        while not signals and step():
            time.sleep(TICK_SECONDS)
    except LaunchError as err:
        failure = str(err)
        say(failure)
    finally:
        end(failure, signals)
        reaper.kill()
        reaper.communicate()
        shutil.rmtree(control, ignore_errors=True)
    return 128 + signals[0] if signals else int(bool(failure))


def say(text: str) -> None:
    """Print a sentence, above a progress line if there is one."""
    tqdm.write(text, file=sys.stderr)


class Role:
    """A process of a launch, or the ranks of a learner, started again after a death or a hang.

    Each process has a session of its own, so that Ctrl-C reaches the launcher alone. The first rank gives the signs of life.

    Attributes:
        processes: of the ranks; empty while there is none.
        beat: the newest sign of life; empty before the first.
        replaced: how often it was started again.
    """

    def __init__(self, assignment: Assignment, command: Sequence[str], ranks: int = 1, hang_timeout: float = STEP_SECONDS):
        self.assignment, self.command, self.ranks, self.hang_timeout = assignment, list(command), ranks, hang_timeout
        self.name, self.learns = assignment.name, assignment.kind == "learner"
        self._first_log = None if self.learns else Path(assignment.control) / f"{self.name}.log"  # until its beat names another
        self.processes: list[subprocess.Popen[bytes]] = []
        self.beat: dict[str, Any] = {}
        self.replaced = self._failures = self._reached = self._stamp = 0
        self._due = self._silent_since = 0.0

    def start(self) -> None:
        """Start the processes."""
        self.assignment.beat_file.unlink(missing_ok=True)
        self._silent_since, self._stamp = time.monotonic(), 0
        shared = {**({} if self.learns else _ALONE), **os.environ, **self.assignment.variables()}
        if self.ranks > 1:  # as torchrun would set them; ranks meet through a file, and listen on this machine alone
            shared |= {
                "WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
                "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                RANKS_FILE: f"{self.assignment.control}/ranks-{self.replaced}",
            }  # fmt: skip
        with contextlib.nullcontext() if self._first_log is None else open(self._first_log, "ab") as out:
            for i in range(self.ranks):
                own = {"RANK": str(i), "LOCAL_RANK": str(i)} if self.ranks > 1 else {}
                self.processes.append(subprocess.Popen(
                    self.command, env={**shared, **own}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                ))  # fmt: skip

    @property
    def runs(self) -> bool:
        """True if any of its processes runs."""
        return any(process.poll() is None for process in self.processes)

    @property
    def code(self) -> int | None:
        """The exit code of the first rank, or of one that failed; None while one runs, or before the start."""
        codes = [process.poll() for process in self.processes] or [None]
        return None if None in codes else next((c for c in codes if c), 0)

    def read_beat(self) -> None:
        """Read the newest sign of life."""
        with contextlib.suppress(OSError):
            stamp = self.assignment.beat_file.stat().st_mtime_ns
            if stamp != self._stamp:
                self._stamp, self._silent_since = stamp, time.monotonic()
                self.beat = read_small(self.assignment.beat_file) or self.beat

    def send(self, number: int) -> None:
        """Send a signal to those that run."""
        for process in self.processes:
            process.send_signal(number)

    def kill(self) -> None:
        """End all processes, and all that they have started, at once."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def watch(self, progress: int) -> bool:
        """Start it if that is due; after a death or a hang, kill its remaining processes and let it start again.

        Args:
            progress: phases delivered or updates made so far; `LaunchError` if it fails again and again without any.

        Returns:
            False where a learner has ended by itself.
        """
        if not self.processes:
            if time.monotonic() >= self._due:
                self.start()
            return True
        self.read_beat()
        codes = [code for process in self.processes if (code := process.poll()) is not None]
        silent = time.monotonic() - self._silent_since
        if codes and self.learns and min(codes) >= 0:  # the other ranks are about to end, too
            end_all([self], _ALONE_SECONDS)
            return False
        if codes:
            self._fail(_describe_exit(min(codes)), progress)
        elif silent > self._longest_silence() and os.access(self.assignment.control, os.W_OK):  # else it cannot give one
            state = self.beat.get("state", "starting")
            self._fail(f"({state}) gave no sign of life for {silent:.0f} seconds and was killed", progress)
        return True

    def _longest_silence(self) -> float:
        """Seconds within which the next beat must come; infinity if unknown, such as before a learner's ``learn()``."""
        long = max(START_SECONDS, self.hang_timeout)
        if not self.beat:
            return long if self._failures or not self.learns else float("inf")
        return {SHORT: self.hang_timeout, LONG: long}.get(str(self.beat.get("silence")), float("inf"))

    def _fail(self, why: str, progress: int) -> None:
        """Kill it, and let it start again after a pause."""
        self.kill()
        self._failures = 1 if progress > self._reached else self._failures + 1
        self._reached = max(progress, self._reached)
        self.replaced += 1
        why = f"{'the learner' if self.learns else self.name} {why}"
        log, tail = Path(self.beat["log"]) if "log" in self.beat else self._first_log, ""  # None: the terminal has it
        if log is not None and log.is_file():
            with open(log, encoding="utf-8", errors="replace") as lines:
                tail = "".join(deque(lines, 15)).rstrip()
        if self.learns and not self.beat.get("resumes", self._failures > 1):
            raise LaunchError(
                f"{why}. It is not started again, because the program would not go on from its last training state: give the "
                "experiment resume='auto' (--resume auto). If it was only slow, give a longer --hang-timeout"
            )
        if self._failures >= FAILURES:
            what, end = "an update" if self.learns else "a delivered phase", f"; the end of {log}:\n{tail}" if tail else ""
            raise LaunchError(f"{why}, {self._failures} times in a row without {what}{end}")
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self._failures - 1))
        then = "starts again from its last training state" if self.learns else "is replaced"
        last = f": {tail.splitlines()[-1].strip()}" if tail else ""
        say(f"{why}{last}; it {then} in {pause:.0f} s" + (f" (log: {log})" if log else ""))
        self._due = time.monotonic() + pause
        self.processes, self.beat = [], {}


def end_all(roles: Sequence[Role], seconds: float) -> None:
    """Wait so long for processes to end, and kill those that have not."""
    until = time.monotonic() + seconds
    while any(role.runs for role in roles) and time.monotonic() < until:
        time.sleep(0.1)
    for role in roles:
        role.kill()


def _describe_exit(code: int) -> str:
    """An exit code in words; a signal by its name."""
    if code >= 0:
        return f"has ended with exit code {code}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    return f"was ended by {name}" + (", perhaps because memory ran out" if code == -signal.SIGKILL else "")


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
        orders: the newest ones; empty before there is a policy to act with.
        waiting: bytes that are not on the bus.
    """

    def __init__(self, task: Task):
        self.task, self.waiting = task, 0
        self.name = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self.control = Path(tempfile.mkdtemp(prefix="amago-launch-"))
        self.command = [sys.executable, *task.program]
        self.orders: dict[str, Any] = {}
        self._threads: list[Every] = []
        self._version = self._count = 0  # of the policy on this machine's disk; of beats
        self._full, self._failure = False, ""
        key, count = zlib.crc32(self.name.encode()), task.collectors
        parts = (Assignment("collector", i, count, str(self.control), None, task.max_policy_lag, key) for i in range(count))
        self.collectors = [Role(part, self.command, hang_timeout=task.hang_timeout) for part in parts]

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
            Every(self._count_waiting, 1.0, f"counting what waits in {self.home}"),
        ]

    def watch(self) -> None:
        """Pass orders on; start collectors that are due, and replace those that have died or hang."""
        if self.orders:
            self._pass_on()
        for role in self.collectors:
            role.watch(self.spool.delivered[role.name] if self.orders else 0)

    def send(self, number: int) -> None:
        """Send all collectors a signal."""
        for role in self.collectors:
            role.send(number)

    def report(self) -> dict[str, Any]:
        """The state of this machine: bytes that wait, processes replaced so far, and the newest sign of life of each collector."""
        replaced = sum(role.replaced for role in self.collectors)
        return {"waiting": self.waiting, "replaced": replaced, "collectors": {role.name: role.beat for role in self.collectors}}

    def end(self, failure: str = "") -> None:
        """End all collectors, and deliver what they have written, if the bus can be reached."""
        self._failure = failure
        self.send(signal.SIGTERM)
        end_all(self.collectors, STOP_SECONDS)
        for thread in self._threads:
            thread.end()
        if self._threads:
            try:
                self.spool.pump(flush=True, seconds=60.0)
                self._put_beat(ended=True)
            except Exception as err:
                log.warning("the last files are not delivered, and wait in %s: %s", self.home, err)

    def _count_waiting(self) -> None:
        self.waiting, most = self.spool.waiting, self.task.max_undelivered
        before, self._full = self._full, self.waiting >= most
        if self._full and not before:
            text = "%.3g GB wait to be delivered, and %.3g may: collectors pause until they are"
            log.warning(text, self.waiting / 1e9, most / 1e9)

    def _pass_on(self) -> None:
        """Write the orders for the collectors of this machine, where they have changed, or were tidied away with temporary files."""
        given = {
            "policy": str(self._source or self.home / "policy"), "collectors": str(self.home), "version": self.orders["version"],
            "pause": self.orders["pause"] or self._full, "evaluates": self.orders["evaluator"] == self.name,
        }  # fmt: skip
        if given != read_small(path := self.control / protocol.ORDERS):
            with contextlib.suppress(OSError):  # the disk is full: the next time
                write_small(path, given)

    def _follow(self) -> None:
        """Read the orders on the bus, and fetch the newest policy; collectors begin once there is one."""
        orders = self.bus.get_json(ORDERS)
        if orders is None or (orders["stop"] and not self.orders):  # of a launch that is over
            return
        if self._source is None and orders["version"] > self._version:
            with contextlib.suppress(FileNotFoundError):
                content, policy = self.bus.get(POLICY), own_directory(self.home / "policy") / "policy.pt"
                replace_file(policy, lambda tmp: tmp.write_bytes(content))
                self._version = orders["version"]
        if not self.orders:
            if not (self._source or self._version):
                return
            if (theirs := orders["amago"]) != __version__:
                say(f"this is amago {__version__}, and the learner's is {theirs}: install the same version if it fails")
            state = self.bus.get_json(EXPLORATION)  # of another collector, with which those that have none begin
            for role in self.collectors if state else ():
                path = own_directory(self.home / role.name) / STATE_FILE
                if not path.exists():
                    path.write_text(json.dumps(state), encoding="utf-8")
        self.orders = orders

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
    """Run collectors for the launch on a bus until it stops, or a signal arrives; returns the exit code as of `run`. Files that are not
    delivered yet are in ``home``, of which each process takes a part."""
    bus = Bus(url)
    claimed = _claim(own_directory(own_directory(home) / sha256(url.encode()).hexdigest()[:16]))
    node = Node(task)
    say(f"{task.collectors} collectors wait for the launch at {url}")
    node.begin(bus, [path for path, _ in claimed])

    def step() -> bool:
        if node.orders:
            node.watch()
        return not node.orders.get("stop")

    def end(failure: str, signals: list[int]) -> None:
        node.end(failure)
        for _, lock in claimed:
            lock.release()

    return run(node.control, step, end)


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
