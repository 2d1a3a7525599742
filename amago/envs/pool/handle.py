"""The learner's side of one worker process: starting it, talking to it, noticing that it is gone."""

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

from amago.envs.pool.actors import CrewPlan
from amago.envs.pool.faults import ActorError, RestartBudget
from amago.envs.pool.worker import pack, worker_main

_WITH_MESSAGE = frozenset((b"I", b"D", b"F", b"P", b"S", b"Q"))
_MESSAGE_SECONDS = 5.0  # the longest pause in the middle of a message
_SOON = 0.02  # seconds in which workers are awaited one after the other, which is cheaper than all at once
_private: set[int] = set()  # descriptors of all pools of this process, which a fork copies and must not keep
_starting = threading.Lock()


def _forget() -> None:
    """A forked process has started no worker, and none of its threads is starting one."""
    global _starting
    _private.clear()
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def keep_private(fd: int) -> None:
    """From now on, workers that are forked close their copies of this descriptor.

    A copy of another worker's socket would keep that worker from noticing that the learner is gone.
    """
    _private.add(fd)


def close_private(fd: int) -> None:
    """Close a descriptor that was kept private."""
    _private.discard(fd)
    os.close(fd)


class WorkerLost(Exception):
    """A worker is dead, hung or gave up; the message says which."""


class Worker:
    """The learner's side of one worker process.

    Raises:
        WorkerLost: the system would not start a process.
        ValueError: something in the plan cannot be sent to one.
    """

    def __init__(self, context: Any, plan: CrewPlan, budget: RestartBudget):
        self.plan, self._budget = plan, budget
        self.serving = False  # answers commands: has started, and has not been lost
        self._arrived: dict[bytes, Any] = {}
        forked = context.get_start_method() == "fork"
        payload = plan if forked else pack(plan)
        try:
            here, there = mp.Pipe(duplex=True)
        except OSError as err:
            raise WorkerLost(f"{self.who} could not be started: {err!r}") from err
        keep_private(here.fileno())
        fds = tuple(_private) if forked else ()
        try:
            self.process = context.Process(target=worker_main, args=(there, payload, fds), name=f"amago-actors-{plan.index}")
            with _main_hidden():
                self.process.start()
        except BaseException as err:
            _private.discard(here.fileno())
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
        self.be_patient(_MESSAGE_SECONDS)

    def be_patient(self, seconds: float) -> None:
        """How long to wait for the rest of a message that has begun."""
        pause = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self.fd)) as end:
            end.setblocking(True)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pause)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pause)

    @property
    def who(self) -> str:
        actors = ", ".join(map(str, self.plan.make_envs))
        return f"worker {self.plan.index} (actors {actors})"

    def tell(self, command: bytes, *message: Any) -> None:
        """Send a command; a dead worker is noticed when its answer is awaited."""
        self._arrived.pop(command, None)
        with contextlib.suppress(OSError):
            os.write(self.fd, command)
            for part in message:
                self._conn.send(part)

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):
            self._conn.send(message)

    def send_descriptor(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            reduction.send_handle(self._conn, fd, self.process.pid)

    def await_answer(self, command: bytes, deadline: float) -> Any:
        """The message of the answer to a command (None if it has none).

        Raises:
            WorkerLost: it died, hung or gave up.
            ActorError: it could not write trajectories, or one of its environments was replaced once too often.
        """
        while command not in self._arrived:
            self.read(deadline)
        return self._arrived[command]  # kept until the command is sent again: an interrupted wait can be repeated

    def has_answered(self, command: bytes) -> bool:
        """Whether `await_answer` would return at once."""
        return command in self._arrived

    def read(self, deadline: float, hung: bool = True) -> bool:
        """Take in one answer, or one fault that is told; errors as for `await_answer`.

        Returns:
            False if nothing has come until the deadline, unless that is to count as ``hung``.
        """
        try:
            return self._read(deadline, hung)
        except (EOFError, OSError, pickle.UnpicklingError) as err:
            self.serving = False
            raise WorkerLost(self._death(err)) from None
        except WorkerLost:
            self.serving = False
            raise

    def count_as_done(self, command: bytes) -> None:
        """Waiting for the answer to this command ends at once."""
        self._arrived[command] = None

    def _read(self, deadline: float, hung: bool) -> bool:
        if self._conn.closed:
            raise WorkerLost("was ended before")
        events = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events and not hung:
            return False
        if not events:
            raise WorkerLost(f"no answer in time: hung (process {self.process.pid})")
        if all(fd != self.fd for fd, _ in events):
            raise EOFError
        byte = os.read(self.fd, 1)
        if not byte:
            raise EOFError
        if byte == b"!":
            self._budget.note(self._conn.recv())
        elif byte == b"X":
            recording, trace = self._conn.recv()
            self.serving = False
            if recording:
                raise ActorError(f"{self.who} could not record: {trace}")
            raise WorkerLost(trace)
        else:
            self._arrived[byte] = self._conn.recv() if byte in _WITH_MESSAGE else None
            self.serving = byte != b"I"
        return True

    def _death(self, err: Exception) -> str:
        if isinstance(err, BlockingIOError):
            return f"stopped in the middle of a message: hung (process {self.process.pid})"
        self.process.join(1.0)
        code = self.process.exitcode
        return f"the process {self.process.pid} has died" + ("" if code is None else f" with exit code {code}")

    def signal_kill(self) -> None:
        """End the process, without waiting for its end."""
        if self._conn.closed:
            return
        # By its descriptor: where the forkserver has died, multiprocessing takes its children for dead, and would spare them.
        with contextlib.suppress(OSError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                self.process.kill()

    def kill(self) -> None:
        """End the process at once, and give back what this side holds of it."""
        if self._conn.closed:
            return
        self.signal_kill()
        if self._pidfd >= 0:
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            ended.poll(2000)
            close_private(self._pidfd)
        self.process.join(2.0)
        _private.discard(self.fd)
        self._conn.close()
        self.fd, self.fds = -1, ()
        with contextlib.suppress(ValueError):  # still running, in spite of SIGKILL: in a system call that does not end
            self.process.close()


def answers(workers: Sequence[Worker], command: bytes, deadline: float) -> Iterator[tuple[int, Any]]:
    """(index in ``workers``, its answer) in the order in which they come; the answer of one that is lost is a `WorkerLost`.

    None waits for another: that one has died is noticed while others still step.

    Raises:
        ActorError: as `Worker.await_answer`.
    """
    poll, owner = select.poll(), {}
    soon = min(deadline, time.monotonic() + _SOON)
    for i, worker in enumerate(workers):
        try:
            while not worker.has_answered(command) and worker.read(soon, hung=False):
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
    """A descriptor of the process, which no other process can come to stand for; -1 where the system has none."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal") or pid is None:
        return -1
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return -1
    keep_private(fd)
    return fd


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in the child: what is needed of it travels by value."""
    main = sys.modules["__main__"]
    with _starting:  # another thread that starts a worker would save what is hidden here
        saved: dict[str, Any] = {name: main.__dict__[name] for name in ("__spec__", "__file__") if name in main.__dict__}
        main.__dict__["__spec__"] = None
        main.__dict__.pop("__file__", None)
        try:
            yield
        finally:
            main.__dict__.update(saved)
