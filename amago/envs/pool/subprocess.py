"""`AsyncPool`: actors in worker processes, with the arrays in shared memory. A step is one byte to each worker and one back."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing import util
from multiprocessing.reduction import ForkingPickler
from typing import Any

from amago.envs.pool import protocol
from amago.envs.pool.base import ActorPool
from amago.envs.pool.buffers import Buffers, Layout
from amago.envs.pool.faults import ActorError, RestartBudget
from amago.envs.pool.handle import WorkerHandle, WorkerLost
from amago.envs.pool.plan import ActorPlan
from amago.envs.pool.supervisor import Supervisor
from amago.envs.pool.view import Answer
from amago.envs.statistics import PhaseStatistics

CONTEXTS = ("forkserver", "spawn", "fork")
_ANSWER_SECONDS = 60.0  # shortest time-out for statistics and states, however short that of a step is


class AsyncPool(ActorPool):
    """W worker processes host the actors, N / W each. See `amago.envs.make_pool` for the arguments.

    With at least 2 actors a worker they form two groups, each spread over all workers: while the workers step one group, the policy
    computes for the other. An explicit ``workers=1`` keeps them one group.
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
        self._step_timeout, self._start_timeout = step_timeout, start_timeout
        self._sent_at = [0.0] * len(groups)
        self._finished_at = 0.0  # when the latest step was finished
        self._joint = False  # the step in flight was sent to all groups at once, and no group of it was awaited
        self._finished: set[int] = set()  # groups whose joint step is finished, and that were not awaited
        budget = RestartBudget(max_env_restarts)
        self._supervisor = Supervisor(_context(mp_context), budget, start_timeout, n)
        self._finalizer = util.Finalize(self, self._supervisor.close, exitpriority=100)
        try:
            spaces = self._supervisor.start(_divide(plan, groups, w))
            super().__init__(n, spaces, groups, budget)
            self._layout = Layout.of(n, self.observation_space, self.action_spec, w, plan.extra_fields)
            self._use_buffers(self._supervisor.share_buffers(self._layout))
            self.resets[:] = True
        except WorkerLost as err:
            self._finalizer()
            raise ActorError(f"the actors could not be started: {err}") from None
        except BaseException:
            self._finalizer()
            raise

    @property
    def _workers(self) -> list[WorkerHandle]:
        return self._supervisor.workers

    # ------------------------------------------------------------------ stepping

    def _begin(self, group: int) -> None:
        self._supervisor.check_open()
        self._joint = False
        self._supervisor.actor_steps[self.groups[group]] += 1
        self._sent_at[group] = time.monotonic()
        self._supervisor.broadcast(protocol.STEP_GROUP[group])

    def _begin_all(self) -> None:
        self._supervisor.check_open()
        self._joint = True
        self._supervisor.actor_steps += 1
        self._sent_at = [time.monotonic()] * len(self.groups)
        self._supervisor.broadcast(protocol.STEP_ALL)

    def _finish(self, group: int) -> None:
        if self._joint:
            self._supervisor.gather(protocol.STEP_ALL, self._sent_at[group] + len(self.groups) * self._step_timeout)
            self._joint, self._finished = False, set(range(len(self.groups)))
        elif group not in self._finished:
            # A worker steps one group after the other: a group's time begins when the one before is finished.
            deadline = max(self._sent_at[group], self._finished_at) + self._step_timeout
            self._supervisor.gather(protocol.STEP_GROUP[group], deadline)
        self._finished.discard(group)
        self._finished_at = time.monotonic()

    def reset(self) -> None:
        for group, stepping in enumerate(self._in_flight):
            if stepping:
                self.wait(group)
        self._ask(protocol.RESET, self._start_timeout)

    # ------------------------------------------------------------------ statistics, files, state

    def _ask(self, command: bytes, timeout: float) -> list[Any]:
        """Every worker's answer; None of those that were replaced."""
        self._supervisor.broadcast(command)
        return self._supervisor.gather(command, time.monotonic() + timeout)

    @property
    def _answer_timeout(self) -> float:
        return max(self._step_timeout, _ANSWER_SECONDS)

    def _drain(self) -> Iterable[PhaseStatistics]:
        return [answer for answer in self._ask(protocol.DRAIN, self._answer_timeout) if answer is not None]

    def flush(self, partial: bool = False) -> int:
        counts = self._ask(protocol.FLUSH_PARTIAL if partial else protocol.FLUSH, self._start_timeout)
        return sum(n for n in counts if n is not None)

    def _actor_states(self) -> dict[str, Any]:
        while None in (answers := self._ask(protocol.GET_STATE, self._answer_timeout)):  # a worker was replaced: ask again
            continue
        return {number: state for answer in answers for number, state in answer.items()}

    def _load_actor_states(self, states: dict[str, Any]) -> None:
        for i in range(self.num_actors):
            self._supervisor.actor_steps[i] = states[str(i)].get("exploration", {}).get("global_step", 0)
        self._supervisor.set_states(states)

    def _begin_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        message = (name, args, kwargs)
        try:
            ForkingPickler.dumps(message)
        except Exception as err:
            raise ValueError(f"the arguments of {name!r} cannot be sent to a worker process: {err}") from err
        self._supervisor.broadcast(protocol.CALL, message)

    def _end_call(self) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        for found in self._supervisor.gather(protocol.CALL, time.monotonic() + self._start_timeout):
            answers |= found or {}
        return answers

    def render(self) -> Any:
        raise ValueError("env_mode='async' cannot render: the environments live in other processes; use env_mode='sync'")

    def close(self) -> None:
        self._finalizer()
        if hasattr(self, "_buffers"):  # the arrays may still be read, but must not keep the shared memory allocated
            local = Buffers.local(self._layout)
            for name, array in self.obs.items():
                local.obs[name][...] = array
            local.rl2s[...], local.time_idxs[...], local.resets[...] = self.rl2s, self.time_idxs, self.resets
            self._use_buffers(local)


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _context(name: str | None) -> Any:
    """The `multiprocessing` context of this name; the default is "forkserver", which imports this package once for all workers."""
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
