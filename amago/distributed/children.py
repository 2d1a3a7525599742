"""The processes of a launch: started, watched, replaced with growing pauses, and ended."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from amago.run.roles.protocol import Assignment, die_with_parent, read_soon

STOPPED_CODES = {128 + s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


_UNDERTAKER = """
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


class Undertaker:
    """A small process that kills the process groups of this process's children when this process ends, however that ends.

    The children themselves die with it (`die_with_parent`). What they have started need not: workers, and what starts workers, take many
    seconds to import on a busy machine, and notice only then.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _UNDERTAKER], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        atexit.register(self._close)

    def _close(self) -> None:
        if self.owner == os.getpid():
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)

    def say(self, text: str) -> None:
        """Add ("+GROUP") or remove ("-GROUP") a process group."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed; there is still `die_with_parent`
            self._process.stdin.write(f"{text}\n".encode())
            self._process.stdin.flush()

    @classmethod
    def of_this_process(cls) -> Undertaker:
        """The one of this process, which has one for all of its children."""
        global _undertaker
        if _undertaker is None or _undertaker.owner != os.getpid():
            _undertaker = cls()
        return _undertaker


_undertaker: Undertaker | None = None


@dataclass(frozen=True)
class Patience:
    """How long a launcher waits, in seconds.

    Attributes:
        start: for the first sign of a process that starts, importing and making its environments, and for a learner that saves.
        step: for the next sign of one that collects or trains.
        stop: for the end of a process that was told to end.
        first, longest: pause before a collector is replaced, the first time and at most; it doubles with each early death.
        early: a collector that dies sooner than this after its start has died early.
        deaths: early deaths of one collector in a row, after which the launch fails; and hangs of the learner without an update between.
    """

    start: float = 600.0
    step: float = 180.0
    stop: float = 120.0
    first: float = 1.0
    longest: float = 60.0
    early: float = 60.0
    deaths: int = 5


class Child:
    """One process of a launch, in a session of its own, so that Ctrl-C reaches the launcher alone. It dies with the launcher.

    Args:
        assignment: of the process.
        command: to run.
        log: file that takes its output; None: that of the launcher.
    """

    def __init__(self, assignment: Assignment, command: Sequence[str], variables: Mapping[str, str], log: Path | None = None):
        self.assignment, self.command, self.log = assignment, list(command), log
        assignment = dataclasses.replace(assignment, launcher=os.getpid())
        self._variables = {**os.environ, **variables, **assignment.variables()}
        self.process: subprocess.Popen[bytes] | None = None
        self.beat: dict[str, Any] = {}
        self.began = self.heard = 0.0
        self._told, self._stamp = False, 0

    def start(self) -> None:
        """Start the process."""
        self.assignment.beat_file.unlink(missing_ok=True)
        self.beat, self._told, self._stamp = {}, False, 0
        self.began = self.heard = time.monotonic()
        with contextlib.ExitStack() as stack:
            out: IO[bytes] | None = None
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                out = stack.enter_context(open(self.log, "ab"))
            launcher = os.getpid()

            def bind() -> None:
                die_with_parent()
                if os.getppid() != launcher:  # it is gone already
                    os._exit(1)

            self.process = subprocess.Popen(
                self.command,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=bind,
            )
        Undertaker.of_this_process().say(f"+{self.process.pid}")

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs, or before its start."""
        return None if self.process is None else self.process.poll()

    @property
    def runs(self) -> bool:
        """Whether it has been started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def listen(self) -> None:
        """Read what it says of itself."""
        try:
            stamp = self.assignment.beat_file.stat().st_mtime_ns
        except OSError:
            return
        if stamp != self._stamp:
            self._stamp, self.heard = stamp, time.monotonic()
            self.beat = read_soon(self.assignment.beat_file) or self.beat

    @property
    def was_stopped(self) -> bool:
        """Whether it has ended as asked, rather than crashed."""
        return self.code == 0 or (self.code in STOPPED_CODES and self.beat.get("state") == "stopped")

    def tell(self, number: int) -> None:
        """Send a signal, the first time only."""
        if self.runs and not self._told:
            self._told = True
            assert self.process is not None
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill(self) -> None:
        """End it and all that it has started, at once."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        Undertaker.of_this_process().say(f"-{self.process.pid}")

    @property
    def own_log(self) -> Path | None:
        """The file with its output: the one that it names, or what it has written before it could."""
        return Path(self.beat["log"]) if "log" in self.beat else self.log

    def last_words(self, lines: int = 15) -> str:
        """The end of its log."""
        log = self.own_log
        if log is None or not log.is_file():
            return ""
        with open(log, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 20_000))
            return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])


class Collectors:
    """The collectors of a node: replaced when they die or hang.

    Args:
        children: of the collectors, not started.
        patience: of the launcher.

    Attributes:
        replaced: processes that were replaced so far.
    """

    def __init__(self, children: Sequence[Child], patience: Patience):
        self.children, self.patience = list(children), patience
        self.replaced = 0
        self.news: list[str] = []  # for the user, until somebody takes them
        self._due = dict.fromkeys(range(len(self.children)), 0.0)  # when the next process of each may start
        self._early = dict.fromkeys(self._due, 0)
        self._steps = dict.fromkeys(self._due, 0)  # of earlier processes

    def watch(self) -> None:
        """Start those that are due, and replace those that have died or hang.

        Raises:
            CollectorError: one dies again and again, soon after its start.
        """
        now = time.monotonic()
        for i, child in enumerate(self.children):
            child.listen()
            if child.runs:
                silent = now - child.heard
                limit = self.patience.start if child.beat.get("state", "starting") == "starting" else self.patience.step
                if silent <= limit:
                    continue
                child.kill()
                self._bury(i, f"has said nothing for {silent:.0f} seconds")
            elif child.process is not None and child.code is not None:
                child.kill()  # its environments, if they are left
                self._bury(i, f"has ended with exit code {child.code}")
            if child.process is None and now >= self._due[i]:
                child.start()

    def _bury(self, i: int, why: str) -> None:
        child, now = self.children[i], time.monotonic()
        early = now - child.began < self.patience.early and not child.beat.get("steps")
        self._early[i] = self._early[i] + 1 if early else 0
        self._steps[i] += int(child.beat.get("steps", 0))
        self.replaced += 1
        if self._early[i] >= self.patience.deaths:
            raise CollectorError(
                f"{child.assignment.name} {why}, {self._early[i]} times in a row before its first step; the end of {child.own_log}:\n"
                f"{child.last_words()}"
            )
        pause = 0.0 if not early else min(self.patience.longest, self.patience.first * 2.0 ** (self._early[i] - 1))
        self._due[i] = now + pause
        self.news.append(
            f"{child.assignment.name} {why}; it is replaced{f' in {pause:.0f} s' if pause else ''} (log: {child.own_log})"
        )
        child.process, child.beat = None, {}

    @property
    def steps(self) -> int:
        """Environment steps that they have taken."""
        return sum(self._steps.values()) + sum(int(c.beat.get("steps", 0)) for c in self.children)

    @property
    def beats(self) -> dict[str, dict[str, Any]]:
        return {c.assignment.name: c.beat for c in self.children}

    def tell(self, number: int) -> None:
        """Send a signal to those that run."""
        for child in self.children:
            child.tell(number)

    @property
    def run(self) -> int:
        """How many run."""
        return sum(child.runs for child in self.children)

    def kill(self) -> None:
        """End all at once."""
        for child in self.children:
            child.kill()


class CollectorError(RuntimeError):
    """A collector dies soon after each start; the message ends with the end of its log."""
