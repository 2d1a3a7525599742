"""`WorkerHandle`: the learner's side of one worker process: starting it, sending commands, reading answers, noticing its end.

The messages are listed in `amago.envs.pool.protocol`.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from amago.envs.pool import protocol
from amago.envs.pool.faults import ActorError, EnvironmentMistake, RestartBudget
from amago.envs.pool.plan import ActorPlan
from amago.envs.pool.worker import pack, worker_main

_MESSAGE_SECONDS = 5.0  # longest pause in the middle of a message
_SEQUENTIAL_SECONDS = 0.02  # workers are first polled one after the other, which is cheaper than polling all at once
_private_fds: set[int] = set()  # descriptors of all pools of this process: a fork copies them, and must close its copies
_starting = threading.Lock()


def _reset_after_fork() -> None:
    """Forget the parent's workers, and a lock that one of its threads may have held."""
    global _starting
    _private_fds.clear()
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


def keep_private(fd: int) -> None:
    """Let workers that are forked from now on close their copies of this descriptor.

    A worker notices that the learner is gone when the learner's end of its socket closes, that is, when every copy of it is closed.
    """
    _private_fds.add(fd)


def close_private(fd: int) -> None:
    """Close a descriptor that was given to `keep_private`."""
    _private_fds.discard(fd)
    os.close(fd)


class WorkerLost(Exception):
    """A worker died, hangs or gave up; the message says which."""


class WorkerHandle:
    """The learner's side of one worker process, which starts here.

    Args:
        context: of `multiprocessing`.
        plan: the worker's actors.
        budget: counts the faults that the worker reports.

    Attributes:
        serving: True while the worker answers commands: it has started and was not lost.
        fds: descriptors to poll for answers and for the worker's end.

    Raises:
        WorkerLost: the system could not start a process.
        ValueError: something in the plan cannot be sent to it.
    """

    def __init__(self, context: Any, plan: ActorPlan, budget: RestartBudget):
        self.plan, self._budget = plan, budget
        self.serving = False
        self._answers: dict[bytes, Any] = {}  # {command: its answer}, until the command is sent again
        forked = context.get_start_method() == "fork"
        payload = plan if forked else pack(plan)
        try:
            here, there = mp.Pipe(duplex=True)
        except OSError as err:
            raise WorkerLost(f"{self.who} could not be started: {err!r}") from err
        keep_private(here.fileno())
        fds = tuple(_private_fds) if forked else ()
        try:
            self.process = context.Process(target=worker_main, args=(there, payload, fds), name=f"amago-actors-{plan.worker}")
            with _main_module_hidden():
                self.process.start()
        except BaseException as err:
            _private_fds.discard(here.fileno())
            here.close()
            if isinstance(err, (OSError, EOFError)):
                raise WorkerLost(f"{self.who} could not be started: {err!r}") from err
            raise
        finally:
            there.close()
        self._conn: Connection = here
        self.fd = here.fileno()
        self._pidfd = _open_pidfd(self.process.pid)
        self.fds: tuple[int, ...] = (self.fd, self._pidfd if self._pidfd >= 0 else self.process.sentinel)
        self._poll = select.poll()
        for fd in self.fds:
            self._poll.register(fd, select.POLLIN)
        self.set_message_timeout(_MESSAGE_SECONDS)

    @property
    def who(self) -> str:
        actors = ", ".join(map(str, self.plan.make_envs))
        return f"worker {self.plan.worker} (actors {actors})"

    def set_message_timeout(self, seconds: float) -> None:
        """Set how long to wait for the rest of a message that has begun, in either direction."""
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self.fd)) as end:
            end.setblocking(True)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    # ------------------------------------------------------------------ messages

    def send_command(self, command: bytes, *message: Any) -> None:
        """Send a command and its message, if any. That the worker is dead is noticed later, when its answer is awaited."""
        self._answers.pop(command, None)
        with contextlib.suppress(OSError):
            os.write(self.fd, command)
            for part in message:
                self._conn.send(part)

    def send_message(self, message: Any) -> None:
        """Send a message without a command."""
        with contextlib.suppress(OSError):
            self._conn.send(message)

    def send_descriptor(self, fd: int) -> None:
        """Send a copy of a file descriptor."""
        with contextlib.suppress(OSError):
            reduction.send_handle(self._conn, fd, self.process.pid)

    def await_answer(self, command: bytes, deadline: float) -> Any:
        """Wait for the answer to a command; may be repeated until the command is sent again, after an interrupt for example.

        Args:
            command: the command.
            deadline: on the clock of `time.monotonic`.

        Returns:
            the message of the answer, None if it has none.

        Raises:
            WorkerLost: the worker died, hangs or gave up.
            ActorError: it could not write trajectories, or one of its environments exceeded the restart budget.
        """
        while command not in self._answers:
            self.read(deadline)
        return self._answers[command]

    def has_answered(self, command: bytes) -> bool:
        """Whether `await_answer` would return at once."""
        return command in self._answers

    def count_as_answered(self, command: bytes) -> None:
        """Let `await_answer` return None at once for this command."""
        self._answers[command] = None

    def read(self, deadline: float, must_answer: bool = True) -> bool:
        """Receive one answer, or the report of one fault.

        Args:
            deadline: on the clock of `time.monotonic`.
            must_answer: whether a worker that sends nothing until the deadline counts as hung.

        Returns:
            whether something was received.

        Raises:
            WorkerLost, ActorError: as `await_answer`.
        """
        try:
            return self._read(deadline, must_answer)
        except (EOFError, OSError, pickle.UnpicklingError) as err:
            self.serving = False
            raise WorkerLost(self._cause_of_end(err)) from None
        except WorkerLost:
            self.serving = False
            raise

    def _read(self, deadline: float, must_answer: bool) -> bool:
        if self._conn.closed:
            raise WorkerLost("was ended before")
        events = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events and not must_answer:
            return False
        if not events:
            raise WorkerLost(f"no answer in time: hung (process {self.process.pid})")
        if all(fd != self.fd for fd, _ in events):
            raise EOFError
        byte = os.read(self.fd, 1)
        if not byte:
            raise EOFError
        if byte == protocol.FAULT:
            self._budget.record(self._conn.recv())
        elif byte == protocol.FAILED:
            kind, text = self._conn.recv()
            self.serving = False
            if kind is EnvironmentMistake:
                raise EnvironmentMistake(text)
            if kind is not None:
                raise ActorError(f"{self.who} could not record: {text}")
            raise WorkerLost(text)
        else:
            self._answers[byte] = self._conn.recv() if byte in protocol.ANSWERED_WITH_MESSAGE else None
            self.serving = byte != protocol.READY
        return True

    def _cause_of_end(self, err: Exception) -> str:
        if isinstance(err, BlockingIOError):
            return f"stopped in the middle of a message: hung (process {self.process.pid})"
        self.process.join(1.0)
        code = self.process.exitcode
        return f"the process {self.process.pid} has died" + ("" if code is None else f" with exit code {code}")

    # ------------------------------------------------------------------ the end

    def signal_kill(self) -> None:
        """Kill the process without waiting for its end."""
        if self._conn.closed:
            return
        # By its descriptor: if the forkserver has died, multiprocessing takes its children for dead and does not kill them.
        with contextlib.suppress(OSError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                self.process.kill()

    def kill(self) -> None:
        """Kill the process, wait for its end, and close this side's descriptors."""
        if self._conn.closed:
            return
        self.signal_kill()
        if self._pidfd >= 0:
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            ended.poll(2000)
            close_private(self._pidfd)
        self.process.join(2.0)
        _private_fds.discard(self.fd)
        self._conn.close()
        self.fd, self.fds = -1, ()
        with contextlib.suppress(ValueError):  # still running in spite of SIGKILL: in a system call that does not return
            self.process.close()


def collect_answers(workers: Sequence[WorkerHandle], command: bytes, deadline: float) -> Iterator[tuple[int, Any]]:
    """Yield (index in ``workers``, answer) in order of arrival, so that one worker's death is noticed while others still step.

    The answer of a worker that is lost is the `WorkerLost`.

    Raises:
        ActorError: as `WorkerHandle.await_answer`.
    """
    poll, owner = select.poll(), {}
    soon = min(deadline, time.monotonic() + _SEQUENTIAL_SECONDS)
    for i, worker in enumerate(workers):
        try:
            while not worker.has_answered(command) and worker.read(soon, must_answer=False):
                continue
            if worker.has_answered(command):
                yield i, worker.await_answer(command, deadline)
                continue
        except WorkerLost as err:
            yield i, err
            continue
        for fd in worker.fds:
            owner[fd] = i
            poll.register(fd, select.POLLIN)
    while owner:
        events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        for i in dict.fromkeys([owner[fd] for fd, _ in events] or owner.values()):
            worker, answer = workers[i], None
            try:
                worker.read(deadline)
                if not worker.has_answered(command):
                    continue
                answer = worker.await_answer(command, deadline)
            except WorkerLost as err:
                answer = err
            for fd in worker.fds:
                poll.unregister(fd)
                del owner[fd]
            yield i, answer


def _open_pidfd(pid: int | None) -> int:
    """A descriptor of the process, valid even if its id is reused; -1 where the system has none."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal") or pid is None:
        return -1
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return -1
    keep_private(fd)
    return fd


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in the child: `pack` sends what is needed of it by value."""
    main = sys.modules["__main__"]
    with _starting:  # two threads at once would save each other's hidden state
        saved: dict[str, Any] = {name: main.__dict__[name] for name in ("__spec__", "__file__") if name in main.__dict__}
        main.__dict__["__spec__"] = None
        main.__dict__.pop("__file__", None)
        try:
            yield
        finally:
            main.__dict__.update(saved)
