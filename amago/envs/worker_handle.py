"""The learner's side of one worker process: starting it, talking to it, noticing that it is gone."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import select
import sys
import time
from collections.abc import Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from amago.envs.crew import CrewPlan
from amago.envs.faults import ActorError, RestartBudget
from amago.envs.worker import pack, worker_main

_WITH_MESSAGE = frozenset((b"I", b"D", b"F", b"P", b"S", b"Q"))


class WorkerLost(Exception):
    """A worker is dead, hung or gave up; the message says which."""


class Worker:
    """The learner's side of one worker process."""

    def __init__(self, context: Any, plan: CrewPlan, foreign_fds: tuple[int, ...], budget: RestartBudget):
        self.plan, self._budget = plan, budget
        self.serving = False  # answers commands: has started, and has not been lost
        self._arrived: dict[bytes, Any] = {}
        here, there = mp.Pipe(duplex=True)
        try:
            forked = context.get_start_method() == "fork"
            payload = plan if forked else pack(plan)
            fds = (*foreign_fds, here.fileno()) if forked else ()
            self.process = context.Process(target=worker_main, args=(there, payload, fds), name=f"amago-actors-{plan.index}")
            with _main_hidden():
                self.process.start()
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
        self._conn: Connection = here
        self.fd = here.fileno()
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._poll.register(self.process.sentinel, select.POLLIN)

    @property
    def who(self) -> str:
        actors = ", ".join(map(str, self.plan.make_envs))
        return f"worker {self.plan.index} (actors {actors})"

    def tell(self, command: bytes, *message: Any) -> None:
        """Send a command; a dead worker is noticed when its answer is awaited."""
        self._arrived.pop(command, None)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            os.write(self.fd, command)
            for part in message:
                self._conn.send(part)

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._conn.send(message)

    def send_descriptor(self, fd: int) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            reduction.send_handle(self._conn, fd, self.process.pid)

    def await_answer(self, command: bytes, deadline: float) -> Any:
        """The message of the answer to a command (None if it has none).

        Raises:
            WorkerLost: it died, hung or gave up.
            ActorError: it could not write trajectories, or one of its environments was replaced once too often.
        """
        while command not in self._arrived:
            try:
                self._read(deadline)
            except (EOFError, ConnectionResetError, BrokenPipeError, pickle.UnpicklingError):
                self.serving = False
                raise WorkerLost(self._death()) from None
            except WorkerLost:
                self.serving = False
                raise
        return self._arrived[command]  # kept until the command is sent again: an interrupted wait can be repeated

    def count_as_done(self, command: bytes) -> None:
        """Waiting for the answer to this command ends at once."""
        self._arrived[command] = None

    def _read(self, deadline: float) -> None:
        events = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
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

    def _death(self) -> str:
        self.process.join(1.0)
        code = self.process.exitcode
        return f"the process {self.process.pid} has died" + ("" if code is None else f" with exit code {code}")

    def kill(self) -> None:
        """End the process at once, and give back what this side holds of it."""
        if self._conn.closed:
            return
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.join(2.0)
        self._conn.close()
        with contextlib.suppress(ValueError):  # still running, in spite of SIGKILL: in a system call that does not end
            self.process.close()


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in the child: what is needed of it travels by value."""
    main = sys.modules["__main__"]
    saved: dict[str, Any] = {name: main.__dict__[name] for name in ("__spec__", "__file__") if name in main.__dict__}
    main.__dict__["__spec__"] = None
    main.__dict__.pop("__file__", None)
    try:
        yield
    finally:
        main.__dict__.update(saved)
