"""The processes that train one agent together (torchrun), and the signals that stop them after the current step."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from amago import system

T = TypeVar("T")
SIGNALS = system.signals("SIGINT", "SIGTERM", "SIGUSR1")
TIMEOUT = timedelta(hours=1)
"""Longest wait of a rank for the others in one call. Their times of collection may differ by so much."""


class Stopped(SystemExit):
    """Raised by ``learn()`` after a signal; ``code`` is 128 + the signal's number."""

    @property
    def is_interrupt(self) -> bool:
        """True for SIGINT in a notebook or at a prompt, where the process goes on and ``learn()`` returns."""
        return self.code == 128 + signal.SIGINT and "ps1" in vars(sys)


def ranks_on_cpus() -> bool:
    """True if this process is one of several (torchrun) on a machine without a GPU, which Accelerate would make separate runs."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and not (torch.cuda.is_available() or torch.xpu.is_available())


def meet_through(path: str) -> None:
    """Let this process, whose variables are as torchrun sets them, meet the others of its group through a file, so that nothing listens on a
    port. Accelerate takes the group that it finds."""
    on_cpus = ranks_on_cpus() or os.environ.get("ACCELERATE_USE_CPU") == "true"
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not on_cpus:
        torch.cuda.set_device(rank)
    backend = "gloo" if on_cpus else "nccl"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=ranks, timeout=TIMEOUT)


def leave_at_exit() -> None:
    """Let this process leave the group of ranks before the interpreter ends, if the group communicates by gloo.

    PyTorch's threads for the group are otherwise ended with the process, which can abort it when all is done (SIGABRT). With NCCL, leaving
    may wait for ranks that have failed.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


class Ranks:
    """The processes that train together: their ``count``, and the ``index`` of this one, of which 0 writes the log and the checkpoints. In a
    run of one process nothing here communicates."""

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self.count = 1 if accelerator is None else accelerator.num_processes
        self.index = 0 if accelerator is None else accelerator.process_index
        self._group: dist.ProcessGroup | None = None
        if self.count > 1 and dist.get_backend() != "gloo":  # numbers of the CPU, for which no GPU has to be waited for
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def gather(self, items: list[T]) -> list[T]:
        """The items of all ranks, rank 0's first."""
        return gather_object(items) if self.count > 1 else items  # type: ignore[no-any-return]

    def of_first(self, item: T) -> T:
        """The item of rank 0."""
        return self.gather([item])[0]

    def largest(self, number: int) -> int:
        """The largest number of all ranks, or a RuntimeError where one has ended. Until all are here, signals are handled."""
        if self.count == 1:
            return number
        value, wait = torch.tensor([number]), 5e-5
        try:
            work = dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            while not work.is_completed():
                time.sleep(wait)
                wait = min(2 * wait, 0.02)
            work.wait()
        except RuntimeError as err:
            raise RuntimeError(
                f"rank {self.index} has lost another of the {self.count} ranks, which failed or was killed (its own output says why); the "
                "run goes on from its last training state with resume='auto'"
            ) from err
        return int(value)

    def smallest(self, number: int) -> int:
        """The smallest number of all ranks."""
        return -self.largest(-number)

    def any(self, value: bool) -> bool:
        """True if ``value`` is true in any rank."""
        return bool(self.largest(int(value)))

    def all(self, value: bool) -> bool:
        """True if ``value`` is true in all ranks."""
        return not self.any(not value)

    def mean(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The mean of each number over the ranks that have it."""
        rows = [numbers] if self.count == 1 else self.gather([numbers])
        found = {name: [row[name] for row in rows if name in row] for row in rows for name in row}
        return {name: sum(values) / len(values) for name, values in found.items()}

    def copy_from_first(self, tensors: list[Tensor]) -> None:
        """Set tensors to their values in rank 0."""
        for tensor in tensors if self.count > 1 else ():
            dist.broadcast(tensor, 0)

    def average(self, tensors: list[Tensor]) -> None:
        """Set tensors to their means over all ranks."""
        for tensor in tensors if self.count > 1 else ():
            dist.all_reduce(tensor)
            tensor /= self.count


class Signals:
    """A context in which SIGINT, SIGTERM and SIGUSR1 only set `requested`; it is true if the run is to stop.

    Further signals change nothing. On exit the previous handlers are restored, with one exception: if the context is left by `Stopped`,
    signals are ignored until the process has ended, so that none changes its exit code; if `Stopped` is caught and discarded, the
    previous handlers apply again. Outside the main thread signals keep their handlers.

    A signal to one of several ranks reaches the others when all `decide` together: after each update, and at the end of each phase.

    Attributes:
        requested: number of the first signal that this process knows; None before.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.requested: int | None = None
        self._decided: int | None = None  # the signal for which all ranks stop
        self._ranks = ranks or Ranks()
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return (self.requested if self._ranks.count == 1 else self._decided) is not None

    def decide(self) -> bool:
        """True in all ranks if a signal has reached any of them, so that all stop. All ranks must call this together."""
        if self._ranks.count > 1 and self._decided is None:
            self._decided = self._ranks.largest(self.requested or 0) or None
        return bool(self)

    def check(self) -> None:
        """Raise `Stopped` if a signal has arrived; all ranks must call this together. The code is 130 (SIGINT), 143 (SIGTERM) or 138 (SIGUSR1).
        `amago.Experiment.learn` saves, and raises it again."""
        if self.decide():
            raise Stopped(128 + (self._decided or self.requested or 0))

    def wait(self, seconds: float) -> None:
        """Sleep until a signal arrives, for so many seconds at most."""
        end = time.monotonic() + seconds
        while self.requested is None and time.monotonic() < end:
            time.sleep(0.05)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signum

    def __enter__(self) -> Signals:
        self.requested = self._decided = None
        if threading.current_thread() is threading.main_thread():
            before = {s: signal.signal(s, self._handle) for s in SIGNALS}
            self._previous = {s: signal.SIG_DFL if handler is None else handler for s, handler in before.items()}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        after: dict[int, Any] = self._previous
        if self._previous and isinstance(value, Stopped) and not value.is_interrupt:
            after = dict.fromkeys(self._previous, _ignore_until_exit(weakref.ref(value), self._previous))
        for signum, handler in after.items():
            signal.signal(signum, handler)
        self._previous = {}


def _ignore_until_exit(stop: weakref.ref[Stopped], before: Mapping[int, Any]) -> Callable[[int, FrameType | None], None]:
    """A handler that ignores signals while a `Stopped` propagates, and restores the previous handlers if it was discarded.

    Python restores default handlers when the interpreter shuts down, but keeps SIG_IGN, which is therefore set at exit.
    """

    def ignore(signum: int, frame: FrameType | None) -> None:
        if stop() is None:  # it was caught, and the process continues
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.raise_signal(signum)

    def at_exit() -> None:
        for number in before:
            if signal.getsignal(number) is ignore:
                signal.signal(number, signal.SIG_IGN)

    atexit.register(at_exit)
    return ignore
