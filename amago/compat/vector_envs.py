"""Vector environments of a client's own, as pools of actors.

Fact served: `Experiment.init_envs` is overridden and sets ``train_envs`` and ``val_envs`` to objects with ``reset``, ``step``,
``call_async``, ``call_wait`` and ``single_action_space``, such as `gymnasium.vector.AsyncVectorEnv` or `DummyAsyncVectorEnv` of
`amago.envs.EnvCreator`; each of their environments is a `amago.envs.SequenceWrapper`. `Experiment.interact` takes such objects too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago.envs.pool import ActorPool
from amago.envs.pool.buffers import Buffers, Layout
from amago.envs.pool.faults import RestartBudget
from amago.envs.pool.plan import Spaces
from amago.envs.pool.view import Answer
from amago.envs.statistics import PhaseStatistics

Array = NDArray[Any]
_METHODS = ("reset", "step", "call_async", "call_wait")


def as_pool(envs: Any) -> ActorPool:
    """The pool of actors behind ``envs``: itself, that of a `amago.envs.pool.PoolEnv`, or one around a vector environment.

    Raises:
        TypeError: it is none of these; names the methods that it lacks.
    """
    if isinstance(envs, ActorPool):
        return envs
    if isinstance(getattr(envs, "pool", None), ActorPool):
        return envs.pool  # type: ignore[no-any-return]
    missing = [name for name in _METHODS if not callable(getattr(envs, name, None))]
    if missing:
        raise TypeError(
            f"{type(envs).__name__} is no vector environment of SequenceWrappers: it lacks {', '.join(missing)}. Use "
            "amago.envs.env_utils.DummyAsyncVectorEnv([EnvCreator(...), ...]), or amago.envs.make_pool(...)"
        )
    return VectorEnvPool(envs)


class VectorEnvPool(ActorPool):
    """A vector environment whose environments are `SequenceWrapper`, as one group of actors that are stepped together.

    Rollouts are seeded, explored, recorded and saved by these environments; a fault in one of them ends the run. Their state is in no
    checkpoint.

    Args:
        envs: stays open, and is reset if that was not done.
    """

    can_idle = False

    def __init__(self, envs: Any):
        self.envs_given = envs
        rows = [int(n) for n in self._ask("batched_envs")]
        space, spec = self._ask("rl2_space")[0], self._ask("action_spec")[0]
        spaces = Spaces(space["obs"], spec.space, space["obs"])
        n = sum(rows)
        super().__init__(n, spaces, [slice(0, n)], RestartBudget(0))
        ends = np.cumsum(rows).tolist()
        self._rows = [slice(end - count, end) for end, count in zip(ends, rows)]
        self._use_buffers(Buffers.local(Layout.of(n, self.observation_space, self.action_spec, 1)))
        if all(self._ask("has_begun")):
            self._read()
        else:
            self.reset()

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.envs_given.call_async(name, *args, **kwargs)
        return list(self.envs_given.call_wait())

    def _read(self) -> None:
        """Copy the observations for which actions are due."""
        for rows, (obs, rl2s, time_idxs) in zip(self._rows, self._ask("current_timestep")):
            for key, array in self.obs.items():
                array[rows] = obs[key]
            self.rl2s[rows], self.time_idxs[rows] = rl2s, time_idxs
        self.resets[:] = self.time_idxs[:, 0] == 0

    def reset(self) -> None:
        self.envs_given.reset()
        self._read()

    def _begin(self, group: int) -> None:
        self.envs_given.step(self._buffers.actions.copy())

    def _finish(self, group: int) -> None:
        self._read()

    def _begin_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.envs_given.call_async(name, *args, **kwargs)

    def _end_call(self) -> dict[int, Answer]:
        return {i: Answer(value) for i, value in enumerate(self.envs_given.call_wait())}

    def _drain(self) -> Iterable[PhaseStatistics]:
        out = PhaseStatistics()
        for rows, (episodes, frames) in zip(self._rows, self._ask("drain")):
            out.add([replace(e, actor=rows.start + e.actor) for e in episodes], frames)
        self._ask("reset_stats")
        return [out]

    def flush(self, partial: bool = False) -> int:
        return sum(int(n or 0) for n in self._ask("flush", partial))

    def _actor_states(self) -> dict[str, Any]:
        return {}

    def _load_actor_states(self, states: dict[str, Any]) -> None:
        """Nothing was saved."""

    def render(self) -> Any:
        return self.envs_given.render()

    def close(self) -> None:
        self.envs_given.close()
