"""Actors in this process: stepped one after the other, or one environment that is vectorised already."""

from __future__ import annotations

import weakref
from typing import Any

from amago.envs.pool.actors import Crew, CrewPlan
from amago.envs.pool.base import PoolBase
from amago.envs.pool.buffers import Buffers, Layout
from amago.envs.pool.faults import RestartBudget
from amago.envs.statistics import PhaseStatistics


class InProcessPool(PoolBase):
    """All actors in this process, stepped one after the other ("sync"), or one that is vectorised.

    Steps happen in `send`.
    """

    def __init__(self, plan: CrewPlan, max_env_restarts: int):
        self._budget = RestartBudget(max_env_restarts)
        self._crew: Crew | None = Crew(plan, self._budget.note)
        n, spaces = len(plan.make_envs) * plan.batch, self._crew.spaces
        super().__init__(n, spaces.observation_space, spaces.action_space, [slice(0, n)])
        self._finalizer = weakref.finalize(self, self._crew.close)
        self._adopt(Buffers.local(Layout.of(n, self.observation_space, self.action_spec, 1, plan.extra_fields)))
        self._crew.attach(self._buffers)
        self._buffers.resets[:] = True

    @property
    def _live(self) -> Crew:
        if self._crew is None:
            raise ValueError("the pool is closed")
        return self._crew

    def reset(self) -> None:
        self._live.reset()

    def _begin(self, group: int) -> None:
        self._live.step(group)

    def _end(self, group: int) -> None:
        """The step has been taken already."""

    def drain(self) -> PhaseStatistics:
        out = PhaseStatistics()
        episodes, frames = self._live.drain()
        for counted in frames:
            out.add((), counted)
        out.episodes = sorted(episodes, key=lambda e: e.actor)
        out.restarts, out.dropped = self._budget.drain()
        return out

    def flush(self, partial: bool = False) -> int:
        return self._live.flush(partial)

    def state_dict(self) -> dict[str, Any]:
        return {"num_actors": self.num_actors, "actors": self._live.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._live.load_state_dict(self._check_state(state))

    def render(self) -> Any:
        return self._live.render()

    def close(self) -> None:
        self._crew = None
        self._finalizer()
