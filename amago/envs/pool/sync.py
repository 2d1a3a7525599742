"""`InProcessPool`: actors in this process, stepped one after the other, or one environment that is vectorised already."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from amago.envs.pool.actor_set import ActorSet
from amago.envs.pool.base import ActorPool
from amago.envs.pool.buffers import Buffers, Layout
from amago.envs.pool.faults import RestartBudget
from amago.envs.pool.plan import ActorPlan
from amago.envs.pool.view import ActorView, Answer
from amago.envs.statistics import PhaseStatistics


class InProcessPool(ActorPool):
    """All actors in this process, as one group whose steps are taken in `send`."""

    def __init__(self, plan: ActorPlan, max_env_restarts: int):
        budget = RestartBudget(max_env_restarts)
        self._open_actors: ActorSet | None = ActorSet(plan, budget.record)
        actors, num_actors = self._open_actors, len(plan.make_envs) * plan.batch
        super().__init__(num_actors, actors.spaces, [slice(0, num_actors)], budget)
        self.can_idle = plan.batch == 1
        self._finalizer = weakref.finalize(self, actors.close)
        self._use_buffers(Buffers.local(Layout.of(num_actors, self.observation_space, self.action_spec, 1, plan.extra_fields)))
        actors.attach(self._buffers)
        self.resets[:] = True

    @property
    def _actors(self) -> ActorSet:
        if self._open_actors is None:
            raise ValueError("the pool is closed")
        return self._open_actors

    def reset(self) -> None:
        self._actors.reset()

    def _begin(self, group: int) -> None:
        self._actors.step(group)

    def _finish(self, group: int) -> None:
        """Nothing is left to do: `_begin` has taken the step."""

    def _drain(self) -> Iterable[PhaseStatistics]:
        return [self._actors.drain()]

    def flush(self, partial: bool = False) -> int:
        return self._actors.flush(partial)

    def _actor_states(self) -> dict[str, Any]:
        return self._actors.state_dict()

    def _load_actor_states(self, states: dict[str, Any]) -> None:
        self._actors.load_state_dict(states)

    def _begin_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._answers = self._actors.call(name, args, kwargs)

    def _end_call(self) -> dict[int, Answer]:
        return self._answers

    @property
    def envs(self) -> list[ActorView]:
        """The environments, one an actor."""
        return self._actors.views

    def render(self) -> Any:
        return self._actors.render()

    def close(self) -> None:
        self._open_actors = None
        self._finalizer()
