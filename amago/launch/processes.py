"""Processes that are started, watched, started again after growing pauses, and ended, so that none is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from amago import system
from amago.run.launched.protocol import RANKS_FILE, Assignment, read_small

START_SECONDS, STEP_SECONDS, STOP_SECONDS = 600.0, 180.0, 120.0
"""Longest time to a process's first sign of life, or while it saves; to the next sign while it collects or trains; to its end."""
TICK_SECONDS, FIRST_PAUSE, LONGEST_PAUSE, FAILURES = 0.1, 1.0, 60.0, 5
"""Seconds between two looks at processes; before a process is started again, doubled with each failure in a row; and the failures in a row that end a launch."""
# one thread, and no GPU unless the user sets it: a collector's products are small, and there are many collectors
_ALONE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ACCELERATE_USE_CPU": "true"}
_ALONE_SECONDS = 10.0  # that other ranks may go on for after one has ended
_SIGNALS = system.signals("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
_REAPER = """
import psutil, sys, time
sys.stdin.read()
ends = time.monotonic() + 2.0
while time.monotonic() < ends:
    for process in psutil.process_iter():
        try:
            if sys.argv[1] in process.environ().get("AMAGO_ROLE", ""):
                process.kill()
        except psutil.Error:
            pass
"""


class LaunchError(RuntimeError):
    """A process ends or hangs again and again, or may not be started again; the message ends with the end of its log."""


def start_reaper(control: Path) -> subprocess.Popen[bytes]:
    """Start a small process that ends everything with ``control`` in its environment when this process ends, however that ends. Kill it
    when nothing is left to end."""
    return subprocess.Popen(
        [sys.executable, "-Ic", _REAPER, str(control)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def run(control: Path, step: Callable[[], bool], end: Callable[[str, list[int]], None]) -> int:
    """Call ``step`` each `TICK_SECONDS` until it returns false or raises a `LaunchError`, or a signal arrives; then ``end``, with the
    error's text, if there is one, and the signals. Nothing with ``control`` in its environment is left, however this process ends.
    Returns the exit code: 128 + the signal, 1 after a `LaunchError`, otherwise 0."""
    signals: list[int] = []
    reaper = start_reaper(control)
    for number in _SIGNALS:
        if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
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
        self.log = None if self.learns else assignment.directory / "log.txt"  # a learner has the terminal
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
        if self.log is not None:
            self.log.parent.mkdir(exist_ok=True)
        with contextlib.nullcontext() if self.log is None else open(self.log, "ab") as out:
            for i in range(self.ranks):
                own = {"RANK": str(i), "LOCAL_RANK": str(i)} if self.ranks > 1 else {}
                self.processes.append(subprocess.Popen(
                    self.command, env={**shared, **own}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                ))  # fmt: skip

    def read_beat(self) -> None:
        """Read the newest sign of life."""
        with contextlib.suppress(OSError):
            stamp = self.assignment.beat_file.stat().st_mtime_ns
            if stamp != self._stamp:
                self._stamp, self._silent_since = stamp, time.monotonic()
                self.beat = read_small(self.assignment.beat_file) or self.beat

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
        if codes and self.learns and (min(codes) >= 0 or self.beat.get("over")):  # the other ranks are about to end, too
            end_all([self], _ALONE_SECONDS)
            return False
        if codes:
            self._fail(_describe_exit(min(codes)), progress)
        elif silent > self._longest_silence() and os.access(self.assignment.control, os.W_OK):  # else it cannot give one
            state = self.beat.get("state", "starting")
            self._fail(f"({state}) gave no sign of life for {silent:.0f} seconds and was killed", progress)
        return True

    def _longest_silence(self) -> float:
        """Seconds within which the next beat must come; infinity before the first ``learn()`` of a learner, and after it."""
        if self.beat.get("over") or (self.learns and not self.beat and not self._failures):
            return float("inf")
        return max(START_SECONDS, self.hang_timeout) if self.beat.get("long", True) else self.hang_timeout

    def _fail(self, why: str, progress: int) -> None:
        """Kill it, and let it start again after a pause."""
        self.kill()
        self._failures = 1 if progress > self._reached else self._failures + 1
        self._reached = max(progress, self._reached)
        self.replaced += 1
        why = f"{'the learner' if self.learns else self.name} {why}"
        tail = ""
        with contextlib.suppress(OSError), open(self.log or os.devnull, encoding="utf-8", errors="replace") as lines:
            tail = "".join(deque(lines, 15)).rstrip()
        if self.learns and not self.beat.get("resumes", self._failures > 1):
            raise LaunchError(
                f"{why}. It is not started again, because the program would not go on from its last training state: give the "
                "experiment resume='auto' (--resume auto). If it was only slow, give a longer --hang-timeout"
            )
        if self._failures >= FAILURES:
            what, end = "an update" if self.learns else "a delivered phase", f"; the end of {self.log}:\n{tail}" if tail else ""
            raise LaunchError(f"{why}, {self._failures} times in a row without {what}{end}")
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self._failures - 1))
        then = "starts again from its last training state" if self.learns else "is replaced"
        last = f": {tail.splitlines()[-1].strip()}" if tail else ""
        say(f"{why}{last}; it {then} in {pause:.0f} s" + (f" (log: {self.log})" if self.log else ""))
        self._due = time.monotonic() + pause
        self.processes, self.beat = [], {}


def end_all(roles: Sequence[Role], seconds: float, number: int = 0) -> None:
    """Send processes a signal, if there is one, wait so long for their end, and kill those that have not ended."""
    processes, until = [process for role in roles for process in role.processes], time.monotonic() + seconds
    for process in processes:
        process.send_signal(number)
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(0.1)
    for role in roles:
        role.kill()


def _describe_exit(code: int) -> str:
    """An exit code in words; a signal by its name."""
    if code >= 0:
        return f"has ended with exit code {code}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    return f"was ended by {name}" + (", perhaps because memory ran out" if code == -signal.SIGKILL else "")
