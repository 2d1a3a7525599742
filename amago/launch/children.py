"""The processes of a launch: started, watched, started again after growing pauses, and ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from amago.run.launched.protocol import LONG, SHORT, Assignment, read_small

_prctl: Callable[..., int] | None
try:  # now: a process that was forked from one with threads had better load nothing
    _prctl = ctypes.CDLL(None).prctl
except (OSError, AttributeError, TypeError):
    _prctl = None
_ALONE_SECONDS = 10.0  # that other ranks may go on for after one has ended
_REAPER = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class LaunchError(RuntimeError):
    """A process ends or hangs again and again, or may not be started again; the message ends with the end of its log."""


class ProcessReaper:
    """A small process that kills process groups when this process ends, however that ends.

    On Linux the system kills children with this process. Their own children need not end: workers, and the process that forks
    them, import for many seconds on a busy machine, and notice only then.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def note(self, text: str) -> None:
        """Add ("+GROUP") or remove ("-GROUP") a process group."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _REAPER], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed
            self._process.stdin.write(f"{text}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Let it end, after the groups that are left."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


reaper = ProcessReaper()
"""Of the children of this process."""


@dataclass(frozen=True)
class Patience:
    """Waiting times of a launcher, in seconds, and the failures that it allows.

    Attributes:
        start: for the first sign of a process that starts, importing and making its environments, and for a learner that saves.
        step: for the next sign of one that collects or trains.
        stop: for the end of a process that is to end.
        first, longest: pause before a process is started again, the first time and at most; it doubles with each failure in a row.
        failures: deaths and hangs of one process in a row, without a delivery or an update between, after which the launch fails.
    """

    start: float = 600.0
    step: float = 180.0
    stop: float = 120.0
    first: float = 1.0
    longest: float = 60.0
    failures: int = 5


class Role:
    """A process of a launch, or the ranks of one, started again after a death or a hang. It dies with the launcher.

    Each process has a session of its own, so that Ctrl-C reaches the launcher alone. The first rank gives the signs of life.

    Args:
        ranks: variables of the environment of each rank, in addition to this process's.
        news: receives sentences for the user.
        log: file that takes the output; None: the launcher's output.

    Attributes:
        processes: of the ranks; empty while there is none.
        beat: the newest sign of life; empty before the first.
        silent_since: when that was read, or the process was started.
        replaced: how often it was started again.
    """

    def __init__(
        self, assignment: Assignment, command: Sequence[str], ranks: Sequence[Mapping[str, str]], patience: Patience, news: list[str],
        log: Path | None = None,
    ):  # fmt: skip
        self.assignment, self.command, self.ranks = assignment, list(command), list(ranks)
        self.patience, self.news = patience, news
        self.name, self.learns = assignment.name, assignment.kind == "learner"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.beat: dict[str, Any] = {}
        self.silent_since = 0.0
        self.replaced = self._failures = self._reached = self._stamp = 0
        self._due = self._alone_since = 0.0
        self._first_log, self._signalled = log, False

    def start(self) -> None:
        """Start the processes."""
        self.assignment.beat_file.unlink(missing_ok=True)
        self.silent_since, self._signalled, self._stamp, launcher = time.monotonic(), False, 0, os.getpid()

        def bind() -> None:
            if _prctl is not None:
                _prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: the system kills it when the launcher ends (Linux)
            if os.getppid() != launcher:  # it is gone already
                os._exit(1)

        with contextlib.ExitStack() as stack:
            out: IO[bytes] | None = None
            if self._first_log is not None:
                self._first_log.parent.mkdir(parents=True, exist_ok=True)
                out = stack.enter_context(open(self._first_log, "ab"))
            for rank in self.ranks:
                self.processes.append(subprocess.Popen(
                    self.command, env={**os.environ, **rank, **self.assignment.variables()}, stdin=subprocess.DEVNULL, stdout=out,
                    stderr=None if out is None else subprocess.STDOUT, start_new_session=True, preexec_fn=bind,
                ))  # fmt: skip
                reaper.note(f"+{self.processes[-1].pid}")

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
                self._stamp, self.silent_since = stamp, time.monotonic()
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
            reaper.note(f"-{process.pid}")

    @property
    def log(self) -> Path | None:
        """The file with its output: the one that its beat names, or the one that it was started with."""
        return Path(self.beat["log"]) if "log" in self.beat else self._first_log

    def _end_of_log(self, lines: int = 15) -> str:
        """The last lines of its output; empty where that is on the terminal."""
        if self.log is None or not self.log.is_file():
            return ""
        with open(self.log, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 20_000))
            return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])

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
        if codes and self.learns and min(codes) >= 0:
            self.kill()
            return False
        silent = time.monotonic() - self.silent_since
        if codes:
            self._fail(_describe_exit(min(codes)), progress)
        elif silent > self._longest_silence() and os.access(self.assignment.control, os.W_OK):  # else it cannot give one
            state = self.beat.get("state", "starting")
            self._fail(f"({state}) gave no sign of life for {silent:.0f} seconds and was killed", progress)
        return True

    def _longest_silence(self) -> float:
        """Seconds within which the next beat must come; infinity if unknown, such as before a learner's ``learn()``."""
        long = max(self.patience.start, self.patience.step)
        if not self.beat:
            return long if self._failures or not self.learns else float("inf")
        return {SHORT: self.patience.step, LONG: long}.get(str(self.beat.get("silence")), float("inf"))

    def _fail(self, why: str, progress: int) -> None:
        """Kill it, and let it start again after a pause."""
        self.kill()
        self._failures = 1 if progress > self._reached else self._failures + 1
        self._reached = max(progress, self._reached)
        self.replaced += 1
        why = f"{'the learner' if self.learns else self.name} {why}"
        tail, log = self._end_of_log(), self.log
        if self.learns and not self.beat.get("resumes", self._failures > 1):
            raise LaunchError(
                f"{why}. It is not started again, because the program would not go on from its last training state: give the "
                "experiment resume='auto' (--resume auto). If it was only slow, give a longer --hang-timeout"
            )
        if self._failures >= self.patience.failures:
            what, end = "an update" if self.learns else "a delivered phase", f"; the end of {log}:\n{tail}" if tail else ""
            raise LaunchError(f"{why}, {self._failures} times in a row without {what}{end}")
        pause = min(self.patience.longest, self.patience.first * 2.0 ** (self._failures - 1))
        then = "starts again from its last training state" if self.learns else "is replaced"
        last = f": {tail.splitlines()[-1].strip()}" if tail else ""
        self.news.append(f"{why}{last}; it {then} in {pause:.0f} s" + (f" (log: {log})" if log else ""))
        self._due = time.monotonic() + pause
        self.processes, self.beat = [], {}


def _describe_exit(code: int) -> str:
    """An exit code in words; a signal by its name."""
    if code >= 0:
        return f"has ended with exit code {code}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    return f"was ended by {name}" + (", perhaps because memory ran out" if code == -signal.SIGKILL else "")
