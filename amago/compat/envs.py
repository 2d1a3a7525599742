"""Environments as the original system has them: wrappers that take a policy's actions, and vector environments as pools of actors.

Facts served: `amago.envs.env_utils` has a wrapper for each kind of action space. `Experiment.init_envs` is overridden and sets ``train_envs`` and
``val_envs`` to objects with ``reset``, ``step``, ``call_async``, ``call_wait`` and ``single_action_space``, such as
`gymnasium.vector.AsyncVectorEnv` or `DummyAsyncVectorEnv` of `amago.envs.EnvCreator`; each of their environments is a
`amago.envs.SequenceWrapper`. `Experiment.interact` takes such objects too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.inner_env import PolicyActions
from amago.envs.pool import ActorPool
from amago.envs.pool.base import PoolEnv, Spaces
from amago.envs.pool.faults import RestartBudget
from amago.envs.pool.memory import Buffers, layout_of
from amago.envs.statistics import PhaseStatistics
from amago.spaces import action_spec

Array = NDArray[Any]
_METHODS = ("reset", "step", "call_async", "call_wait")


def as_pool(envs: Any) -> ActorPool:
    """The pool of actors of ``envs``: itself, the pool of a `amago.envs.pool.PoolEnv`, or a pool around a vector environment."""
    if isinstance(envs, ActorPool):
        return envs
    if isinstance(envs, PoolEnv):
        return envs.pool
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
    shares_process = True

    def __init__(self, envs: Any):
        self.envs_given = envs
        rows = [int(n) for n in self._each("batched_envs")]
        space, spec = self._each("rl2_space")[0], self._each("action_spec")[0]
        spaces = Spaces(space["obs"], spec.space, space["rl2"], space["obs"])
        n = sum(rows)
        super().__init__(n, spaces, [slice(0, n)], RestartBudget(0))
        ends = np.cumsum(rows).tolist()
        self._rows = [slice(end - count, end) for end, count in zip(ends, rows)]
        self._use_buffers(Buffers(layout_of(n, self.observation_space, self.action_spec, 1)))
        if all(self._each("has_begun")):
            self._read()
        else:
            self.reset()

    def _each(self, name: str, *args: object) -> list[Any]:
        self.envs_given.call_async(name, *args)
        return list(self.envs_given.call_wait())

    def _read(self) -> None:
        """Copy the observations for which actions are due."""
        for rows, (obs, rl2s, time_idxs) in zip(self._rows, self._each("current_timestep")):
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

    def call_async(self, name: str, *args: object, **kwargs: object) -> None:
        self.envs_given.call_async(name, *args, **kwargs)

    def call_wait(self) -> list[Any]:
        return list(self.envs_given.call_wait())

    def _ask(self, method: str, *args: object) -> list[Any]:
        if method == "flush":
            return [int(n or 0) for n in self._each("flush", *args)]
        if method != "drain":
            return []  # no state is saved
        out = PhaseStatistics()
        for rows, (episodes, frames) in zip(self._rows, self._each("drain")):
            out.add([replace(e, actor=rows.start + e.actor) for e in episodes], frames)
        self._each("reset_stats")
        return [out]

    def render(self) -> Any:
        return self.envs_given.render()

    def close(self) -> None:
        self.envs_given.close()


# ---- wrappers of actions ---------------------------------------------------------------------------------------------------


class _KindWrapper(PolicyActions):
    """An environment with an action space of the class's kind (else TypeError) that takes the actions of a policy."""

    kind: ClassVar[str]

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        spec = action_spec(env.action_space)
        if spec.kind != self.kind:
            raise TypeError(f"{type(self).__name__} needs an action space of kind {self.kind}, but env has {env.action_space}")
        super().__init__(env, spec, vectorized=False)

    def action(self, action: NDArray[Any]) -> Any:
        """The environment's form of a policy's action."""
        return self.own_form(action)


class DiscreteActionWrapper(_KindWrapper):
    """Indices from 0, as ints or arrays of one number."""

    kind = "discrete"


class ContinuousActionWrapper(_KindWrapper):
    """Numbers in [-1, 1], which are scaled to the bounds of the environment's Box."""

    kind = "continuous"


class MultiBinaryActionWrapper(_KindWrapper):
    """Bits of any dtype."""

    kind = "multibinary"


def extend_box_obs_space_by(box: gym.spaces.Box, by: int, low: float = -np.inf, high: float = np.inf) -> gym.spaces.Box:
    """A flat Box with ``by`` more numbers at its end, from ``low`` to ``high``."""
    lows, highs = np.append(box.low, np.full(by, low)), np.append(box.high, np.full(by, high))
    return gym.spaces.Box(lows.astype(box.dtype), highs.astype(box.dtype), dtype=box.dtype)  # type: ignore[arg-type]
