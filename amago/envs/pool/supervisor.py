"""`Supervisor`: starts the worker processes of a pool, sends them commands, collects their answers and replaces those that are lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from amago.envs.pool import protocol
from amago.envs.pool.buffers import Buffers, Layout, shared_block
from amago.envs.pool.faults import MAX_RETRY_PAUSE, MIN_RETRY_PAUSE, ActorError, Fault, RestartBudget
from amago.envs.pool.handle import WorkerHandle, WorkerLost, close_private, collect_answers, keep_private
from amago.envs.pool.plan import ActorPlan, Spaces

logger = logging.getLogger(__name__)

_QUIT_SECONDS = 6.0  # for all workers to commit their trajectories and end
_QUIT_MESSAGE_SECONDS = 0.5


class Supervisor:
    """The worker processes of one pool, and the memory that they share with the learner.

    It holds no reference to the pool, so that a pool that is no longer used can be collected, which closes its supervisor.

    Args:
        context: of `multiprocessing`.
        budget: counts the faults.
        start_timeout: seconds within which a worker must have made its environments.
        num_actors: N, of the pool.

    Attributes:
        workers: one handle each.
        actor_steps: (N,) steps that each actor has taken, from which a replaced worker's exploration schedules continue.
    """

    def __init__(self, context: Any, budget: RestartBudget, start_timeout: float, num_actors: int):
        self._context, self._budget, self._start_timeout = context, budget, start_timeout
        self.workers: list[WorkerHandle] = []
        self.actor_steps = np.zeros(num_actors, dtype=np.int64)
        self._pending: set[bytes] = set()  # commands that were sent, and whose answers were not all collected
        self._fd = -1
        self._closed = False

    def start(self, plans: Sequence[ActorPlan]) -> Spaces:
        """Start one worker a plan; returns the spaces of their environments.

        Raises:
            WorkerLost: a worker did not start.
            ValueError: workers have environments with different spaces, or a plan cannot be sent to a worker.
        """
        for plan in plans:
            self.workers.append(WorkerHandle(self._context, plan, self._budget))
        found: dict[int, Spaces] = {}
        for i, answer in collect_answers(self.workers, protocol.READY, self._start_deadline()):
            _raise_if_lost(answer)
            found[i] = answer
        self._spaces = found[0]
        for i, worker in enumerate(self.workers):
            if found[i] != self._spaces:
                raise ValueError(
                    f"all environments of a pool must have the same spaces, but {worker.who} has {found[i]}, not {self._spaces}"
                )
        return self._spaces

    def share_buffers(self, layout: Layout) -> Buffers:
        """Allocate shared arrays and attach every worker to them.

        Raises:
            WorkerLost: a worker did not answer.
            MemoryError: there is too little memory.
        """
        self._layout, self._fd = layout, shared_block(layout.size)
        keep_private(self._fd)
        self._buffers = Buffers.attach(layout, self._fd)
        for worker in self.workers:
            self._attach(worker)
        for _, answer in collect_answers(self.workers, protocol.ATTACHED, self._start_deadline()):
            _raise_if_lost(answer)
        return self._buffers

    def _attach(self, worker: WorkerHandle) -> None:
        worker.send_message(self._layout)
        worker.send_descriptor(self._fd)

    def _start_deadline(self) -> float:
        return time.monotonic() + self._start_timeout

    def check_open(self) -> None:
        """Raise ValueError after `close`."""
        if self._closed:
            raise ValueError("the pool is closed")

    # ------------------------------------------------------------------ commands

    def broadcast(self, command: bytes, *message: Any) -> None:
        """Send a command, and its message if it has one, to every worker; then call `gather`."""
        self.check_open()
        self._pending.add(command)
        for worker in self.workers:
            worker.send_command(command, *message)

    def set_states(self, states: dict[str, Any]) -> None:
        """Let every worker load {actor's number: its state}."""
        self.check_open()
        for worker in self.workers:
            worker.send_command(protocol.SET_STATE, {str(i): states[str(i)] for i in worker.plan.make_envs})
        self.gather(protocol.SET_STATE, self._start_deadline())

    def gather(self, command: bytes, deadline: float) -> list[Any]:
        """Every worker's answer to a command; a worker that is lost is replaced, and its answer is None.

        May be repeated after an interrupt.

        Raises:
            ActorError: the restart budget is exceeded, or trajectories could not be written.
        """
        self.check_open()
        out: list[Any] = [None] * len(self.workers)
        lost: list[int] = []
        for i, answer in collect_answers(list(self.workers), command, deadline):
            if isinstance(answer, WorkerLost):  # its replacement starts while the other workers still step
                worker = self.workers[i]
                actors = list(worker.plan.make_envs)
                dropped, unsaved = int((self._buffers.time_idxs[actors] > 0).sum()), int(self._buffers.unsaved[i])
                worker.signal_kill()
                self._replace(i, Fault(worker.who, str(answer), dropped, unsaved))
                lost.append(i)
            else:
                out[i] = answer
        if lost:
            self._await_replacements(lost)
        self._pending.discard(command)
        return out

    # ------------------------------------------------------------------ replacements

    def _replace(self, index: int, fault: Fault) -> None:
        """Start a new worker in place of a lost one. Its actors begin new rollouts."""
        old = self.workers[index]
        while True:
            old.kill()
            self._budget.record(fault)
            steps = {actor: int(self.actor_steps[actor]) for actor in old.plan.make_envs}
            old.plan = replace(old.plan, generation=old.plan.generation + 1, steps=steps)  # each attempt has its own seeds
            try:
                self.workers[index] = WorkerHandle(self._context, old.plan, self._budget)
                return
            except WorkerLost as err:
                fault = Fault(old.who, str(err))
                time.sleep(MAX_RETRY_PAUSE)

    def _await_replacements(self, indices: list[int]) -> None:
        """Wait until new workers are ready, replacing those that are lost meanwhile.

        They owe no answer to commands that their predecessors received: these count as answered.
        """
        pause = MIN_RETRY_PAUSE
        while indices:
            begin = time.monotonic()
            lost = self._start_up(indices)
            if lost:
                time.sleep(max(0.0, begin + pause - time.monotonic()))
                pause = min(MAX_RETRY_PAUSE, 2 * pause)
            for i in indices:
                if i in lost:
                    self._replace(i, Fault(self.workers[i].who, str(lost[i])))
                else:
                    for command in self._pending:
                        self.workers[i].count_as_answered(command)
            indices = list(lost)

    def _start_up(self, indices: list[int]) -> dict[int, WorkerLost]:
        """Let new workers make their environments, attach to the arrays, and reset; returns those that were lost."""
        lost: dict[int, WorkerLost] = {}
        deadline = self._start_deadline()
        for command in (protocol.READY, protocol.ATTACHED, protocol.RESET):
            present = [i for i in indices if i not in lost]
            for k, answer in collect_answers([self.workers[i] for i in present], command, deadline):
                i = present[k]
                if isinstance(answer, WorkerLost):
                    lost[i] = answer
                elif command == protocol.READY:
                    self._admit(i, answer)
                elif command == protocol.ATTACHED:
                    self.workers[i].send_command(protocol.RESET)
        return lost

    def _admit(self, index: int, spaces: Spaces) -> None:
        """Attach a new worker if its environments have the spaces of the pool."""
        worker = self.workers[index]
        if spaces != self._spaces:
            raise ActorError(
                f"{worker.who} was replaced, but its new environments have other spaces: {spaces}, not {self._spaces}"
            )
        self._buffers.unsaved[index], self._buffers.no_space[index] = 0, False
        self._attach(worker)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Let workers commit their trajectories and end, and kill those that do not; free the memory. May be called again."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + _QUIT_SECONDS
        serving = [worker for worker in self.workers if worker.serving]
        for worker in serving:
            worker.set_message_timeout(_QUIT_MESSAGE_SECONDS)
            worker.send_command(protocol.QUIT)
        for worker in serving:
            _await_end(worker, deadline)
        for worker in self.workers:  # signal all first, then wait for all
            worker.signal_kill()
        for worker in self.workers:
            worker.kill()
        self.workers = []
        if self._fd >= 0:
            close_private(self._fd)
            self._fd = -1
            del self._buffers


def _await_end(worker: WorkerHandle, deadline: float) -> None:
    """Wait until a worker that was told to quit has ended, and log what it could not commit."""
    while worker.serving:
        try:
            error = worker.await_answer(protocol.QUIT, deadline)
        except ActorError:  # a fault that the worker reported before it read the command
            continue
        except WorkerLost as err:
            logger.warning(
                "%s did not end by itself: %s", worker.who, str(err)
            )  # text: the traceback would keep the pool alive
            return
        if error is not None:
            logger.error("%s lost finished trajectories as it closed: %s", worker.who, error)
        worker.process.join(max(0.1, deadline - time.monotonic()))
        return


def _raise_if_lost(answer: Any) -> None:
    if isinstance(answer, WorkerLost):
        raise answer
