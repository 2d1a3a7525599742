"""Actors in worker processes, with the arrays in shared memory: a step is one byte to each worker and one back."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing import util
from typing import Any

import numpy as np

from amago.envs.pool.actors import CrewPlan, Spaces
from amago.envs.pool.base import PoolBase
from amago.envs.pool.buffers import Buffers, Layout, shared_block
from amago.envs.pool.faults import LONGEST_PAUSE, ActorError, Fault, RestartBudget
from amago.envs.pool.handle import Worker, WorkerLost, answers, close_private, keep_private
from amago.envs.pool.worker import ALL_GROUPS
from amago.envs.statistics import PhaseStatistics

logger = logging.getLogger(__name__)

CONTEXTS = ("forkserver", "spawn", "fork")
_QUIT_SECONDS = 6.0


class _Resources:
    """What must not outlive the pool; knows nothing of the pool, so that it can be finalised for it."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.fd = -1
        self.closed = False

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        deadline = time.monotonic() + _QUIT_SECONDS
        serving = [worker for worker in self.workers if worker.serving]
        for worker in serving:
            worker.be_patient(0.5)
            worker.tell(b"Q")
        for worker in serving:
            _await_end(worker, deadline)
        _kill_all(self.workers)
        self.workers = []
        if self.fd >= 0:
            close_private(self.fd)
            self.fd = -1


def _await_end(worker: Worker, deadline: float) -> None:
    while worker.serving:
        try:
            error = worker.await_answer(b"Q", deadline)
        except ActorError:  # one more fault, told before it saw that it should quit
            continue
        except WorkerLost as err:
            logger.warning("%s did not end by itself: %s", worker.who, str(err))  # itself, it would keep the pool alive
            return
        if error is not None:
            logger.error("%s lost finished trajectories as it closed: %s", worker.who, error)
        worker.process.join(max(0.1, deadline - time.monotonic()))
        return


def _kill_all(workers: list[Worker]) -> None:
    for worker in workers:  # all first, so that waiting for them takes no longer than for one
        worker.signal_kill()
    for worker in workers:
        worker.kill()


class AsyncPool(PoolBase):
    """W worker processes hold the actors, N / W each. See `amago.envs.make_pool` for the arguments.

    With 2 or more actors a worker they form two groups, each spread over all workers: while the workers step one, the policy
    computes for the other. An explicit ``workers=1`` keeps them one group.
    """

    def __init__(
        self,
        plan: CrewPlan,
        workers: int | None,
        step_timeout: float,
        start_timeout: float,
        max_env_restarts: int,
        mp_context: str | None,
    ):
        if mp_context is not None and mp_context not in CONTEXTS:
            raise ValueError(f"mp_context is {mp_context!r}, but must be one of {', '.join(map(repr, CONTEXTS))}, or None")
        n = len(plan.make_envs)
        w = min(n, workers or usable_cores())
        self._context = mp.get_context(mp_context or "forkserver")
        if self._context.get_start_method() == "forkserver":
            self._context.set_forkserver_preload(["amago.envs.pool.worker"])
        self._step_timeout, self._start_timeout = step_timeout, start_timeout
        self._budget = RestartBudget(max_env_restarts)
        groups = [slice(0, n // 2), slice(n // 2, n)] if n >= 2 * w and n >= 2 and workers != 1 else [slice(0, n)]
        self._steps = np.zeros(n, dtype=np.int64)
        self._sent_at = [0.0] * len(groups)
        self._done_at = 0.0  # when a step was last awaited to its end
        self._joint = False  # every group is stepping at one command, and nobody has awaited the answer
        self._landed: set[int] = set()  # groups whose joint step has ended, and that nobody has waited for
        self._plan, self._resources = plan, _Resources()
        self._finalizer = util.Finalize(self, self._resources.close, exitpriority=100)
        try:
            spaces = self._start(_divide(plan, groups, w))
            super().__init__(n, spaces.observation_space, spaces.action_space, groups)
            self._layout = Layout.of(n, self.observation_space, self.action_spec, w, plan.extra_fields)
            self._resources.fd = shared_block(self._layout.size)
            keep_private(self._resources.fd)
            self._adopt(Buffers.attach(self._layout, self._resources.fd))
            for worker in self._workers:
                self._attach(worker)
            for _, answer in answers(self._workers, b"A", self._start_deadline()):
                _raise_lost(answer)
            self.resets[:] = True
        except WorkerLost as err:
            self._finalizer()
            raise ActorError(f"the actors could not be started: {err}") from None
        except BaseException:
            self._finalizer()
            raise

    @property
    def _workers(self) -> list[Worker]:
        if self._resources.closed:
            raise ValueError("the pool is closed")
        return self._resources.workers

    def _start_deadline(self) -> float:
        return time.monotonic() + self._start_timeout

    def _start(self, plans: list[CrewPlan]) -> Spaces:
        for plan in plans:
            self._resources.workers.append(Worker(self._context, plan, self._budget))
        told: dict[int, Spaces] = {}
        for i, answer in answers(self._workers, b"I", self._start_deadline()):
            _raise_lost(answer)
            told[i] = answer
        self._spaces = told[0]
        for i, worker in enumerate(self._workers):
            if told[i] != self._spaces:
                raise ValueError(
                    f"all environments of a pool must have the same spaces, but {worker.who} has {told[i]}, not {self._spaces}"
                )
        return self._spaces

    def _attach(self, worker: Worker) -> None:
        worker.send(self._layout)
        worker.send_descriptor(self._resources.fd)

    # ------------------------------------------------------------------ stepping

    def _begin(self, group: int) -> None:
        self._joint = False
        self._steps[self.groups[group]] += 1
        self._tell_step(b"%d" % group, [group])

    def _begin_all(self) -> None:
        self._joint = True
        self._steps += 1
        self._tell_step(ALL_GROUPS, range(len(self.groups)))

    def _tell_step(self, command: bytes, groups: Iterable[int]) -> None:
        now = time.monotonic()
        for group in groups:
            self._sent_at[group] = now
        for worker in self._workers:
            worker.tell(command)

    def _end(self, group: int) -> None:
        if self._joint:
            self._gather(ALL_GROUPS, self._sent_at[group] + len(self.groups) * self._step_timeout)
            self._joint, self._landed = False, set(range(len(self.groups)))
        elif group not in self._landed:
            # A worker takes up a group when it has done with the one before: no step is charged with the other's time.
            self._gather(b"%d" % group, max(self._sent_at[group], self._done_at) + self._step_timeout)
        self._landed.discard(group)
        self._done_at = time.monotonic()

    def reset(self) -> None:
        for g, busy in enumerate(self._in_flight):
            if busy:
                self.wait(g)
        self._ask(b"R", timeout=self._start_timeout)

    def _ask(self, command: bytes, timeout: float | None = None) -> list[Any]:
        for worker in self._workers:
            worker.tell(command)
        return self._gather(command, time.monotonic() + (timeout or max(self._step_timeout, 60.0)))

    def _gather(self, command: bytes, deadline: float) -> list[Any]:
        """Every worker's answer; a worker that is lost is replaced, and answers None."""
        out: list[Any] = [None] * len(self._workers)
        lost: list[int] = []
        for i, answer in answers(list(self._workers), command, deadline):
            if isinstance(answer, WorkerLost):  # its successor starts while the others still step
                old, rows = self._workers[i], list(self._workers[i].plan.make_envs)
                dropped, unsaved = int((self.time_idxs[rows] > 0).sum()), int(self._buffers.unsaved[i])
                old.signal_kill()
                self._succeed(i, Fault(old.who, str(answer), dropped, unsaved))
                lost.append(i)
            else:
                out[i] = answer
        if lost:
            self._welcome(lost)
        return out

    def _succeed(self, index: int, fault: Fault) -> None:
        """Start a new worker in the place of a lost one. Its actors open new rollouts."""
        old = self._workers[index]
        while True:
            old.kill()
            self._budget.note(fault)
            rows = list(old.plan.make_envs)
            plan = replace(old.plan, life=old.plan.life + 1, steps={row: int(self._steps[row]) for row in rows})
            old.plan = plan  # each attempt is a life of its own
            try:
                self._workers[index] = Worker(self._context, plan, self._budget)
                return
            except WorkerLost as err:
                fault = Fault(old.who, str(err))
                time.sleep(LONGEST_PAUSE)

    def _welcome(self, fresh: list[int]) -> None:
        """Wait until new workers have made and reset their environments; steps under way there count as done."""
        pause = 0.05
        while fresh:
            again: dict[int, WorkerLost] = {}
            begin, deadline = time.monotonic(), self._start_deadline()
            for command in (b"I", b"A", b"R"):
                present = [i for i in fresh if i not in again]
                for k, answer in answers([self._workers[i] for i in present], command, deadline):
                    i = present[k]
                    if isinstance(answer, WorkerLost):
                        again[i] = answer
                    elif command == b"I":
                        self._admit(i, answer)
                    elif command == b"A":
                        self._workers[i].tell(b"R")
            if again:
                time.sleep(max(0.0, begin + pause - time.monotonic()))
                pause = min(LONGEST_PAUSE, 2 * pause)
            for i in fresh:
                if i in again:
                    self._succeed(i, Fault(self._workers[i].who, str(again[i])))
                else:
                    if self._joint:
                        self._workers[i].count_as_done(ALL_GROUPS)
                    for g, busy in enumerate(self._in_flight):
                        if busy:
                            self._workers[i].count_as_done(b"%d" % g)
            fresh = list(again)

    def _admit(self, index: int, spaces: Spaces) -> None:
        worker = self._workers[index]
        if spaces != self._spaces:
            raise ActorError(f"{worker.who} was made anew with other spaces: {spaces}, not {self._spaces}")
        self._buffers.unsaved[index] = 0
        self._attach(worker)

    # ------------------------------------------------------------------ the rest

    def drain(self) -> PhaseStatistics:
        out = PhaseStatistics()
        for answer in self._ask(b"D"):
            episodes, frames = answer if answer is not None else ((), ())
            out.add(episodes, {})
            for counted in frames:
                out.add((), counted)
        out.episodes.sort(key=lambda e: e.actor)
        out.restarts, out.dropped = self._budget.drain()
        return out

    def flush(self, partial: bool = False) -> int:
        return sum(n for n in self._ask(b"P" if partial else b"F", self._start_timeout) if n is not None)

    def state_dict(self) -> dict[str, Any]:
        while None in (states := self._ask(b"S")):  # asked again of workers that were replaced meanwhile
            continue
        actors: dict[str, Any] = {}
        for part in states:
            actors |= part
        return {"num_actors": self.num_actors, "actors": {k: actors[k] for k in sorted(actors, key=int)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        actors = self._check_state(state)
        for worker in self._workers:
            worker.tell(b"L", {str(i): actors[str(i)] for i in worker.plan.make_envs})
        for i in range(self.num_actors):
            self._steps[i] = actors[str(i)].get("exploration", {}).get("global_step", 0)
        self._gather(b"L", self._start_deadline())

    def render(self) -> Any:
        raise ValueError("env_mode='async' cannot render: the environments live in other processes; use env_mode='sync'")

    def close(self) -> None:
        self._finalizer()
        if hasattr(self, "_buffers"):  # what is still read afterwards must not keep the shared memory
            local = Buffers.local(self._layout)
            for name, array in self.obs.items():
                local.obs[name][...] = array
            local.rl2s[...], local.time_idxs[...], local.resets[...] = self.rl2s, self.time_idxs, self.resets
            self._adopt(local)


def _raise_lost(answer: Any) -> None:
    if isinstance(answer, WorkerLost):
        raise answer


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _divide(plan: CrewPlan, groups: list[slice], workers: int) -> list[CrewPlan]:
    """Give every worker an equal share of each group (and, in all, actors that differ in number by one at most)."""
    shares: list[list[list[int]]] = [[] for _ in range(workers)]
    turn = 0
    for group in groups:
        mine: list[list[int]] = [[] for _ in range(workers)]
        for actor in range(group.start, group.stop):
            mine[(turn + actor - group.start) % workers].append(actor)
        turn += group.stop - group.start
        for share, part in zip(shares, mine):
            share.append(part)
    return [
        replace(plan, make_envs={a: plan.make_envs[a] for part in share for a in part}, groups=share, index=i)
        for i, share in enumerate(shares)
    ]


__all__ = ["AsyncPool", "usable_cores"]
