"""Actors in worker processes: `AsyncPool`, and a `WorkerHandle` for each of its workers.

Observations and actions are in shared memory; a step is one byte to each worker and one back. The messages are listed in
`amago.envs.pool.worker`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import pickle
import select
import socket
import struct
import time
from dataclasses import replace
from multiprocessing import reduction, util
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import psutil

from amago import system
from amago.envs.pool import worker as protocol
from amago.envs.pool.base import ActorPlan, ActorPool, Spaces
from amago.envs.pool.faults import RETRY_PAUSE, ActorError, EnvironmentMistake, Fault, RestartBudget
from amago.envs.pool.memory import Buffers, Layout, layout_of, shared_memory_for

logger = logging.getLogger(__name__)

CONTEXTS = ("forkserver", "spawn", "fork")
_BRIEF = ("drain", "state_dict")  # methods that take no environment's time
_ANSWER_SECONDS = 60.0  # shortest time-out for statistics and states, however short the time-out of a step is
_QUIT_SECONDS = 6.0  # for all workers to commit their trajectories and end
_QUIT_MESSAGE_SECONDS = 0.5
_MESSAGE_SECONDS = 5.0  # longest pause in the middle of a message
_private_fds: set[int] = set()  # descriptors of all pools of this process: a fork copies them, and must close its copies
system.after_fork_in_child(_private_fds.clear)


class WorkerLost(Exception):
    """Raised when a worker died, hangs or gave up; the message names the case."""


class WorkerHandle:
    """The learner's side of one worker process, which starts here.

    Args:
        context: of `multiprocessing`.
        plan: the worker's actors.
        budget: counts the faults that the worker reports.

    Attributes:
        serving: True while the worker answers commands: it has started and was not lost.

    Raises:
        WorkerLost: the system could not start a process.
        ValueError: something in the plan cannot be sent to it.
    """

    def __init__(self, context: Any, plan: ActorPlan, budget: RestartBudget):
        self.plan, self._budget, self.serving = plan, budget, False
        self._answers: dict[bytes | int, Any] = {}  # {command, or number of what was asked: its answer}, until it is sent again
        forked = context.get_start_method() == "fork"
        payload = plan if forked else protocol.pack(plan)
        try:
            here, there = mp.Pipe(duplex=True)
        except OSError as err:
            raise WorkerLost(f"{self.who} could not be started: {err!r}") from err
        _private_fds.add(here.fileno())
        arguments = (there, payload, tuple(_private_fds) if forked else ())
        try:
            self.process = context.Process(target=protocol.worker_main, args=arguments, name=f"amago-actors-{plan.worker}")
            with protocol.main_module_hidden():
                self.process.start()
            # multiprocessing takes the children of a forkserver that has died for dead, and neither kills them nor waits for them
            self._own = psutil.Process(self.process.pid)
        except BaseException as err:
            _private_fds.discard(here.fileno())
            here.close()
            if isinstance(err, (OSError, EOFError, psutil.Error)):
                raise WorkerLost(f"{self.who} could not be started: {err!r}") from err
            raise
        finally:
            there.close()
        self._conn: Connection = here
        self._fd = here.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)  # which its end closes
        self.set_message_timeout(_MESSAGE_SECONDS)

    @property
    def who(self) -> str:
        return f"worker {self.plan.worker} (actors {', '.join(map(str, self.plan.make_envs))})"

    def set_message_timeout(self, seconds: float) -> None:
        """Set how long to wait for the rest of a message that has begun, in either direction."""
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self._fd)) as end:
            end.setblocking(True)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def send_command(self, command: bytes, *message: object) -> None:
        """Send a command and its message, if any. That the worker is dead is noticed later, when its answer is awaited."""
        self._answers.pop(command, None)
        with contextlib.suppress(OSError):
            os.write(self._fd, command)
            for part in message:
                self._conn.send(part)

    def attach(self, layout: Layout, fd: int) -> None:
        """Send the layout of the shared arrays, and a copy of their memory's descriptor."""
        with contextlib.suppress(OSError):
            self._conn.send(layout)
            reduction.send_handle(self._conn, fd, self.process.pid)

    def await_answer(self, command: bytes | int, deadline: float) -> Any:
        """The message of the answer to a command, None if it has none.

        May be repeated until the command is sent again, after an interrupt for example.

        Args:
            deadline: on the clock of `time.monotonic`.

        Raises:
            WorkerLost: the worker died, gave up, or has not answered by the deadline.
            ActorError: it could not write trajectories, or one of its environments exceeded the restart budget.
        """
        try:
            while command not in self._answers:
                if not self._read(deadline):
                    raise WorkerLost(f"no answer in time: hung (process {self.process.pid})")
        except (EOFError, OSError, pickle.UnpicklingError) as err:
            self.serving = False
            raise WorkerLost(self._cause_of_end(err)) from None
        except WorkerLost:
            self.serving = False
            raise
        return self._answers[command]

    def count_as_answered(self, asked: int) -> None:
        """Let steps, and what was asked last, count as answered, by None: the worker before this one has received them."""
        self._answers = {**dict.fromkeys(protocol.STEP_GROUP), asked: None, **self._answers}

    def _read(self, until: float) -> bool:
        """Receive one answer, or the report of one fault; False if nothing arrives."""
        if self._conn.closed:
            raise WorkerLost("was ended before")
        if not self._poll.poll(max(0.0, until - time.monotonic()) * 1000):
            return False
        byte = os.read(self._fd, 1)
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
        elif byte == protocol.ASK:
            number, self._answers[number] = self._conn.recv()
        else:
            self._answers[byte] = self._conn.recv() if byte in (protocol.READY, protocol.QUIT) else None
            self.serving = byte != protocol.READY
        return True

    def _cause_of_end(self, err: Exception) -> str:
        if isinstance(err, BlockingIOError):
            return f"stopped in the middle of a message: hung (process {self.process.pid})"
        self.process.join(1.0)
        code = self.process.exitcode
        return f"the process {self.process.pid} has died" + ("" if code is None else f" with exit code {code}")

    def signal_kill(self) -> None:
        """Kill the process without waiting for its end."""
        if not self._conn.closed:
            with contextlib.suppress(psutil.Error):
                self._own.kill()

    def kill(self) -> None:
        """Kill the process, wait for its end, and close this side's descriptors."""
        if self._conn.closed:
            return
        self.signal_kill()
        self.process.join(2.0)  # first: what psutil has waited for, multiprocessing takes for running
        with contextlib.suppress(psutil.Error):
            self._own.wait(2.0)
        _private_fds.discard(self._fd)
        self._conn.close()
        with contextlib.suppress(ValueError):  # still running in spite of SIGKILL: in a system call that does not return
            self.process.close()


def _close(workers: list[WorkerHandle], memory: list[int]) -> None:
    """Let workers commit their trajectories and end, kill those that do not, and free the shared memory.

    It holds no reference to the pool, so that a pool that is no longer used can be collected, which closes it.
    """
    deadline = time.monotonic() + _QUIT_SECONDS
    serving = [worker for worker in workers if worker.serving]
    for worker in serving:
        worker.set_message_timeout(_QUIT_MESSAGE_SECONDS)
        worker.send_command(protocol.QUIT)
    for worker in serving:
        _await_end(worker, deadline)
    for worker in workers:  # signal all first, then wait for all
        worker.signal_kill()
    for worker in workers:
        worker.kill()
    workers.clear()
    while memory:
        _private_fds.discard(memory[0])
        os.close(memory.pop())


def _await_end(worker: WorkerHandle, deadline: float) -> None:
    """Wait until a worker that received `QUIT` has ended, and log the trajectories that it could not commit."""
    while True:
        try:
            error = worker.await_answer(protocol.QUIT, deadline)
            break
        except ActorError:  # a fault that it reported before it read the command
            if not worker.serving:
                return
        except WorkerLost as err:  # as text: the traceback would keep the pool alive
            logger.warning("%s did not end by itself: %s", worker.who, str(err))
            return
    if error is not None:
        logger.error("%s lost finished trajectories as it closed: %s", worker.who, error)
    worker.process.join(max(0.1, deadline - time.monotonic()))


class AsyncPool(ActorPool):
    """W worker processes host the actors, N / W each. See `amago.envs.make_pool` for the arguments.

    With at least 2 actors a worker they form two groups, each spread over all workers: while the workers step one group, the
    policy computes for the other. An explicit ``workers=1`` keeps them one group.
    """

    def __init__(
        self,
        plan: ActorPlan,
        workers: int | None,
        step_timeout: float,
        start_timeout: float,
        max_env_restarts: int,
        mp_context: str | None,
    ):
        n = len(plan.make_envs)
        w = min(n, workers or usable_cores())
        groups = [slice(0, n // 2), slice(n // 2, n)] if n >= 2 * w and n >= 2 and workers != 1 else [slice(0, n)]
        self._context = _context(mp_context)
        self._step_timeout, self._start_timeout = step_timeout, start_timeout
        self._answer_timeout = max(step_timeout, _ANSWER_SECONDS)
        self._sent_at = [0.0] * len(groups)
        self._asked = 0  # number of what was asked last
        self._finished_at = 0.0  # when the latest step was finished
        self._steps = np.zeros(n, dtype=np.int64)  # of each actor: where the exploration of a replaced worker goes on
        self._workers: list[WorkerHandle] = []
        self._memory: list[int] = []  # the descriptor of the shared arrays
        self._finalizer = util.Finalize(self, _close, (self._workers, self._memory), exitpriority=100)
        budget = RestartBudget(max_env_restarts)
        try:
            for share in _divide(plan, groups, w):
                self._workers.append(WorkerHandle(self._context, share, budget))
            deadline = self._start_deadline()
            spaces: list[Spaces] = [worker.await_answer(protocol.READY, deadline) for worker in self._workers]
            for worker, its in zip(self._workers, spaces):
                spaces[0].check(its, worker.who)
            super().__init__(n, spaces[0], groups, budget)
            self._layout = layout_of(n, self.observation_space, self.action_spec, w, plan.extra_fields)
            self._memory.append(shared_memory_for(self._layout))
            _private_fds.add(self._memory[0])
            self._use_buffers(Buffers(self._layout, self._memory[0]))
            self.resets[:] = True
            for worker in self._workers:
                worker.attach(self._layout, self._memory[0])
            for worker in self._workers:
                worker.await_answer(protocol.ATTACHED, self._start_deadline())
        except WorkerLost as err:
            self._finalizer()
            raise ActorError(f"the actors could not be started: {err}") from None
        except BaseException:
            self._finalizer()
            raise

    def _start_deadline(self) -> float:
        return time.monotonic() + self._start_timeout

    def _broadcast(self, command: bytes, *message: object) -> None:
        """Send a command, and its message if it has one, to every worker; then call `_gather`."""
        if not self._workers:
            raise ValueError("the pool is closed")
        for worker in self._workers:
            worker.send_command(command, *message)

    def _gather(self, command: bytes | int, deadline: float) -> list[Any]:
        """Every worker's answer to a command; a worker that is lost is replaced, and its answer is None.

        May be repeated after an interrupt.

        Raises:
            ActorError: the restart budget is exceeded, or trajectories could not be written.
        """
        out: list[Any] = [None] * len(self._workers)
        lost = []
        for i, worker in enumerate(self._workers):
            try:
                out[i] = worker.await_answer(command, deadline)
            except WorkerLost as err:
                dropped = int((self.time_idxs[list(worker.plan.make_envs)] > 0).sum())
                self._restart(i, Fault(worker.who, str(err), dropped, int(self._buffers.unsaved[i])))
                lost.append(i)  # the replacements of several start side by side
        for i in lost:
            self._admit(i)
        return out

    def _restart(self, index: int, fault: Fault) -> None:
        """Start a new worker in place of a lost one. Its actors begin new rollouts."""
        old = self._workers[index]
        while True:
            old.kill()
            self._budget.record(fault)
            steps = {actor: int(self._steps[actor]) for actor in old.plan.make_envs}
            old.plan = replace(old.plan, generation=old.plan.generation + 1, steps=steps)  # each attempt has its own seeds
            try:
                self._workers[index] = WorkerHandle(self._context, old.plan, self._budget)
                return
            except WorkerLost as err:
                fault = Fault(old.who, str(err))
                time.sleep(RETRY_PAUSE)

    def _admit(self, index: int) -> None:
        """Let a new worker make its environments, attach to the arrays, and reset; replace it if it is lost meanwhile."""
        while True:
            worker, deadline = self._workers[index], self._start_deadline()
            try:
                self.spaces.check(worker.await_answer(protocol.READY, deadline), f"the replaced {worker.who}")
                self._buffers.unsaved[index], self._buffers.no_space[index] = 0, False
                worker.attach(self._layout, self._memory[0])
                worker.await_answer(protocol.ATTACHED, deadline)
                worker.send_command(protocol.ASK, (-1, "reset", ()))
                worker.await_answer(-1, deadline)
                worker.count_as_answered(self._asked)
                return
            except WorkerLost as err:
                time.sleep(RETRY_PAUSE)
                self._restart(index, Fault(worker.who, str(err)))

    def _begin(self, group: int) -> None:
        self._broadcast(protocol.STEP_GROUP[group])
        self._steps[self.groups[group]] += 1
        self._sent_at[group] = time.monotonic()

    def _finish(self, group: int) -> None:
        # A worker steps one group after the other: a group's time begins when the one before is finished.
        deadline = max(self._sent_at[group], self._finished_at) + self._step_timeout
        self._gather(protocol.STEP_GROUP[group], deadline)
        self._finished_at = time.monotonic()

    def _ask(self, method: str, *args: object) -> list[Any]:
        self._begin_ask(method, *args)
        return self._end_ask()

    def _begin_ask(self, method: str, *args: object) -> None:
        if self._calling is not None:
            raise ValueError(f"call_wait() must take the answers to {self._calling!r} first")
        message = (self._asked + 1, method, args)
        try:
            reduction.ForkingPickler.dumps(message)
        except Exception as err:
            raise ValueError(f"the arguments of {args[0]!r} cannot be sent to a worker process: {err}") from err
        self._broadcast(protocol.ASK, message)
        self._asked += 1
        self._ask_deadline = time.monotonic() + (self._answer_timeout if method in _BRIEF else self._start_timeout)

    def _end_ask(self) -> list[Any]:
        return [answer for answer in self._gather(self._asked, self._ask_deadline) if answer is not None]

    def state_dict(self) -> dict[str, Any]:
        while len((state := super().state_dict())["actors"]) < self.num_actors:  # a worker was replaced
            continue
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for i in range(self.num_actors):
            self._steps[i] = state["actors"][str(i)].get("exploration", {}).get("global_step", 0)

    def render(self) -> Any:
        raise ValueError("env_mode='async' cannot render: the environments live in other processes; use env_mode='sync'")

    def close(self) -> None:
        self._finalizer()
        local = Buffers(self._layout)  # the arrays may still be read, but must not keep the shared memory allocated
        for name, array in self.obs.items():
            local.obs[name][...] = array
        local.rl2s[...], local.time_idxs[...], local.resets[...] = self.rl2s, self.time_idxs, self.resets
        self._use_buffers(local)


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if "sched_getaffinity" in vars(os) else os.cpu_count() or 1


def _context(name: str | None) -> BaseContext:
    """The `multiprocessing` context of this name; "forkserver", the default, imports this package once for all workers."""
    if name is not None and name not in CONTEXTS:
        raise ValueError(f"mp_context is {name!r}, but must be one of {', '.join(map(repr, CONTEXTS))}, or None")
    context = mp.get_context(name or "forkserver")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["amago.envs.pool.worker"])
    return context


def _divide(plan: ActorPlan, groups: list[slice], workers: int) -> list[ActorPlan]:
    """Deal out the actors to workers in turn, group by group: shares of a group, and of all actors, differ by one at most."""
    shares: list[list[list[int]]] = [[[] for _ in groups] for _ in range(workers)]
    for g, group in enumerate(groups):
        for actor in range(group.start, group.stop):
            shares[actor % workers][g].append(actor)
    return [
        replace(plan, make_envs={a: plan.make_envs[a] for part in share for a in part}, groups=share, worker=i)
        for i, share in enumerate(shares)
    ]
