"""One learner and its collectors: started, watched and stopped by one process without PyTorch."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TextIO

from amago.distributed.children import Child, CollectorError, Patience
from amago.distributed.hung import HungLearner, LearnerError
from amago.distributed.lag import OldPolicies
from amago.distributed.link import Answer, Beats
from amago.distributed.mirror import MOST_WAITING_BYTES
from amago.distributed.place import Place, Task, ThisMachine, Work
from amago.distributed.progress import Rates, progress_line
from amago.run.roles.limits import UpdateLimits
from amago.run.roles.protocol import HELLO, ORDERS, Assignment, read_soon, write_soon

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
TICK_SECONDS = 0.1
_LINE_SECONDS = 30.0  # between two progress lines in a file; on a terminal one line is rewritten


@dataclass
class Plan:
    """What to launch.

    Attributes:
        program: the user's program and its arguments, after the interpreter: ["train.py", "--run_name", "a"] or ["-m", "module"].
        collectors, learners: processes of each role.
        limits: of updates per environment step.
        patience: of the launcher.
        quiet: no progress line.
        out: for the progress line.
        max_policy_lag: versions by which the policy of a collector may be older than the newest; None: any number.
        max_undelivered: bytes that may wait while they cannot be delivered, before collectors pause.
        place: where the collectors run.
    """

    program: Sequence[str]
    collectors: int
    learners: int = 1
    limits: UpdateLimits = field(default_factory=UpdateLimits)
    patience: Patience = field(default_factory=Patience)
    quiet: bool = False
    out: TextIO = field(default_factory=lambda: sys.stderr)
    max_policy_lag: int | None = None
    max_undelivered: float = MOST_WAITING_BYTES
    place: Callable[[Work], Place] = ThisMachine

    def __post_init__(self) -> None:
        for name in ("collectors", "learners"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        lag = self.max_policy_lag
        if lag is not None and (not isinstance(lag, int) or isinstance(lag, bool) or lag < 0):
            raise ValueError(f"max_policy_lag counts versions and must be a whole number of at least 0, or None, got {lag!r}")
        if not self.max_undelivered > 0:
            raise ValueError(f"max_undelivered must be a number of bytes above 0, got {self.max_undelivered!r}")
        if not self.program:
            raise ValueError("program is empty: name a script, such as train.py")
        if self.program[0] != "-m" and not Path(self.program[0]).is_file():
            raise ValueError(f"program is {self.program[0]!r}, which is not a file: name a script, or '-m' and a module")


class Launcher:
    """Runs a `Plan`. Everything happens in one loop of the main thread: children die with the thread that started them.

    Args:
        plan: what to launch.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.control = Path(tempfile.mkdtemp(prefix="amago-launch-"))
        most = None if plan.limits.most == math.inf else plan.limits.most
        assignment = Assignment("learner", 0, plan.collectors, str(self.control), plan.limits.least, most)
        self.learner = Child(assignment, self._learner_command(), {})
        task = Task(
            plan.program,
            plan.limits.least,
            most,
            plan.patience,
            max_policy_lag=plan.max_policy_lag,
            max_undelivered=plan.max_undelivered,
        )
        try:
            self.collectors = plan.place(Work(task, plan.collectors, plan.learners, self.control, self._answer))
        except BaseException:
            shutil.rmtree(self.control, ignore_errors=True)
            raise
        self._met = False
        self.guard = HungLearner(self.learner, plan.patience)
        self.old_policies = OldPolicies(plan.max_policy_lag)
        self._signal: int | None = None
        self._rates, self._version = Rates(), 0
        self._orders, self._paused_seconds = {"pause": False, "version": 0}, 0.0
        self._pump_at = self._line_at = 0.0
        self._width = 0

    def _learner_command(self) -> list[str]:
        if self.plan.learners == 1:
            return [sys.executable, *self.plan.program]
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.plan.learners}"]
        return [sys.executable, *ranks, *self.plan.program]

    # ---- the loop --------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until the learner has ended, or a signal arrives.

        Returns:
            the exit code: that of the learner; 128 + the number of the signal that stopped the launch; 1 if collectors fail.
        """
        heard = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]  # nohup ignores it
        before = {s: signal.signal(s, self._on_signal) for s in heard}
        try:
            self.learner.start()
            failure = self._loop()
            self._stop_all()
            self._clear_line()
            if failure:
                print(failure, file=self.plan.out, flush=True)
            return self._exit_code(bool(failure))
        finally:
            self.learner.kill()
            self.collectors.close()
            shutil.rmtree(self.control, ignore_errors=True)
            for s, handler in before.items():
                signal.signal(s, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal = number

    def _exit_code(self, failed: bool) -> int:
        if self._signal is not None:
            return 128 + self._signal
        if failed:
            return 1
        code = self.learner.code
        if self.plan.learners > 1:  # torchrun's code says less than that of its first rank
            code = self.learner.beat.get("code") or code
        return 1 if code is None else code if code >= 0 else 128 - code

    def _loop(self) -> str:
        """Returns what went wrong, if the learner was not the one to end."""
        while self._signal is None and self.learner.runs:
            self.learner.listen()
            if self.learner.beat.get("state") in ("finished", "stopped"):
                self.collectors.tell(signal.SIGTERM)  # the learner still evaluates
            else:
                try:
                    self.guard.watch()
                    self.collectors.watch()
                except (CollectorError, LearnerError) as err:
                    return str(err)
            self._tick()
            time.sleep(TICK_SECONDS)
        return ""

    def _tick(self) -> None:
        """Deliver, give orders, and show progress."""
        for news in (self.collectors.news, self.guard.news, self.old_policies.news(self._version, self.collectors.beats)):
            for text in news:
                self._say(text)
            news.clear()
        if not self._met and (hello := read_soon(self.control / HELLO)) is not None:
            self._met = True
            self.collectors.meet_learner(hello)
        answer = self.collectors.deliver()
        if answer is not None:
            self._order(answer)
        self._show()

    def _answer(self, beats: Beats) -> Answer:
        beat = self.learner.beat
        self._version = max(self._version, int(beat.get("version", 0)))  # a learner that was started again has said nothing yet
        return Answer(self._version, bool(beat.get("pause")) and self.learner.runs)

    def _order(self, answer: Answer) -> None:
        orders = {"pause": answer.pause, "version": answer.version}
        self._paused_seconds += TICK_SECONDS * self._orders["pause"]
        if orders != self._orders or not (self.control / ORDERS).exists() or answer.pause:
            self._orders = orders
            with contextlib.suppress(OSError):  # the disk is full: the next orders, or the same ones again
                write_soon(self.control / ORDERS, {**orders, "paused_seconds": round(self._paused_seconds, 1)})

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def _stop_all(self) -> None:
        """Ask all to end, deliver what they write meanwhile, and end those that do not."""
        with contextlib.suppress(OSError):
            write_soon(self.control / ORDERS, {"pause": False})
        if self._signal is not None:
            self._say("stopping: collectors end, the learner saves")
        self.learner.tell(signal.SIGINT if self._signal == signal.SIGINT else signal.SIGTERM)
        self.collectors.tell(signal.SIGTERM)
        deadline = time.monotonic() + self.plan.patience.stop
        while (self.learner.runs or self.collectors.run) and time.monotonic() < deadline:
            self.learner.listen()
            self.collectors.deliver()
            time.sleep(TICK_SECONDS)
        self.learner.listen()
        self.collectors.kill()
        self.learner.kill()
        self.collectors.deliver()

    # ---- the screen ------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        now, beat = time.monotonic(), self.learner.beat
        tty = self.plan.out.isatty()
        if self.plan.quiet or now < self._line_at:
            return
        self._line_at = now + (0.5 if tty else _LINE_SECONDS if beat else 2.0)
        if not beat and not tty:
            return
        speeds = self._rates.add(now, int(beat.get("updates", 0)), int(beat.get("steps", 0)))
        collectors, moved = list(self.collectors.beats.values()), self.collectors
        line = progress_line(beat, collectors, speeds, self.plan.limits, moved.replaced, self._version, moved.waiting)
        if tty:
            line = line[: shutil.get_terminal_size().columns - 1]
            self.plan.out.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self.plan.out.write(line + "\n")
        self.plan.out.flush()

    def _clear_line(self) -> None:
        if self._width:
            self.plan.out.write("\r" + " " * self._width + "\r")
            self._width = 0

    def _say(self, text: str) -> None:
        self._clear_line()
        print(text, file=self.plan.out, flush=True)


def run_plan(plan: Plan, launcher: Callable[[Plan], Launcher] = Launcher) -> int:
    """Launch, and wait for the end; returns the exit code (`Launcher.run`)."""
    return launcher(plan).run()
