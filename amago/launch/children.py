"""The processes of a launch: started, watched, started again after growing pauses, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from amago.run.launched.protocol import LONG, RANKS_FILE, SHORT, Assignment, read_small

START_SECONDS, STEP_SECONDS, STOP_SECONDS = 600.0, 180.0, 120.0
"""Longest time to a process's first sign of life, or while it saves; to the next sign while it collects or trains; to its end."""
FIRST_PAUSE, LONGEST_PAUSE, FAILURES = 1.0, 60.0, 5
"""Seconds before a process is started again, doubled with each failure in a row; and the failures in a row that end a launch."""
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


class Role:
    """A process of a launch, or the ranks of a learner, started again after a death or a hang.

    Each process has a session of its own, so that Ctrl-C reaches the launcher alone. The first rank gives the signs of life.

    Args:
        news: receives sentences for the user.

    Attributes:
        processes: of the ranks; empty while there is none.
        beat: the newest sign of life; empty before the first.
        replaced: how often it was started again.
    """

    def __init__(
        self, assignment: Assignment, command: Sequence[str], news: list[str], ranks: int = 1, hang_timeout: float = STEP_SECONDS
    ):  # fmt: skip
        self.assignment, self.command, self.ranks = assignment, list(command), ranks
        self.news, self.hang_timeout = news, hang_timeout
        self.name, self.learns = assignment.name, assignment.kind == "learner"
        self._first_log = None if self.learns else Path(assignment.control) / f"{self.name}.log"  # until its beat names another
        self.processes: list[subprocess.Popen[bytes]] = []
        self.beat: dict[str, Any] = {}
        self.replaced = self._failures = self._reached = self._stamp = 0
        self._due = self._alone_since = self._silent_since = 0.0
        self._signalled = False

    def start(self) -> None:
        """Start the processes."""
        self.assignment.beat_file.unlink(missing_ok=True)
        self._silent_since, self._signalled, self._stamp = time.monotonic(), False, 0
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
        """Send a signal to those that run, the first time only."""
        if not self._signalled:
            self._signalled = self.runs
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
        if codes and len(codes) < len(self.processes) and min(codes) >= 0:  # the others are about to end, too
            self._alone_since = self._alone_since or time.monotonic()
            if time.monotonic() - self._alone_since < _ALONE_SECONDS:
                return True
        self._alone_since = 0.0
        silent = time.monotonic() - self._silent_since
        if codes and self.learns and min(codes) >= 0:
            self.kill()
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
        log = Path(self.beat["log"]) if "log" in self.beat else self._first_log
        tail = _end_of(log)
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
        self.news.append(f"{why}{last}; it {then} in {pause:.0f} s" + (f" (log: {log})" if log else ""))
        self._due = time.monotonic() + pause
        self.processes, self.beat = [], {}


def end_all(roles: Sequence[Role], learner: int, seconds: float) -> None:
    """Let processes end by SIGTERM, or the signal ``learner`` where they learn, and kill those that have not ended in time."""
    for role in roles:
        role.send(learner if role.learns else signal.SIGTERM)
    until = time.monotonic() + seconds
    while any(role.runs for role in roles) and time.monotonic() < until:
        time.sleep(0.1)
    for role in roles:
        role.kill()


def _end_of(log: Path | None, lines: int = 15) -> str:
    """The last lines of a process's output; empty where that is on the terminal."""
    if log is None or not log.is_file():
        return ""
    with open(log, "rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - 20_000))
        return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])


def _describe_exit(code: int) -> str:
    """An exit code in words; a signal by its name."""
    if code >= 0:
        return f"has ended with exit code {code}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    return f"was ended by {name}" + (", perhaps because memory ran out" if code == -signal.SIGKILL else "")
