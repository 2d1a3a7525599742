"""`Actor`: one environment with its exploration and recorder, which reads actions from the pool's arrays and writes observations there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from amago.data.extras import BEHAVIOUR_LOG_PROB
from amago.data.trajectory import split_rl2
from amago.envs.behaviour import BehaviourLog, check_known
from amago.envs.environment import AMAGOEnv
from amago.envs.exploration import ExplorationWrapper
from amago.envs.pool.buffers import Buffers
from amago.envs.pool.plan import ActorPlan, EnvMaker, Spaces
from amago.envs.recorder import Recorder
from amago.envs.wrapper import innermost

if TYPE_CHECKING:
    from amago.store import TrajectoryWriter

_SEED_LIMIT = 2**31 - 1_000_000  # a vectorised environment adds the row to the seed, and the sum must fit into an int32


class Actor:
    """One environment with its wrappers, and its rows of the pool's arrays.

    Args:
        plan: what to make it from.
        number: of the actor in its pool.
        generation: how often the actor was replaced before; each time it gets new seeds.
        writer_for: returns the writer that records trajectories of this environment, or None.

    Attributes:
        made: what the user's function returned.
        base: the `AMAGOEnv` inside all wrappers.
        env: the outermost wrapper around it.
        recorder: records its rollouts.
        exploration: the exploration wrapper, or None.
        outcome: reward, terminated, truncated and info of the last step; None before the first.

    Raises:
        TypeError: the function did not return an `AMAGOEnv`.
        ValueError: its environment has the wrong number of rows, or exploration cannot say how likely its actions are, which is recorded.
        Exception: whatever the environment's constructor raises.
    """

    def __init__(
        self, plan: ActorPlan, number: int, generation: int, writer_for: Callable[[AMAGOEnv], TrajectoryWriter | None]
    ) -> None:
        self.number, self.generation, self._worker = number, generation, plan.worker
        made, self.base = make_env(plan.make_envs[number], plan.batch)
        self.made = made
        self._reset_seed, exploration_seed, recorder_seed = plan.actor_seeds(number, generation)
        self._seeded = False
        self.outcome: tuple[Any, ...] | None = None
        self.exploration: ExplorationWrapper | None = None
        if plan.exploration is not None:
            made = self.exploration = plan.exploration(made)
            self.exploration.seed(exploration_seed)
            if any(x.source == "behaviour" for x in plan.extra_fields):
                check_known(self.exploration)
        self.env = made
        options = {k: v for k, v in (plan.recorder or {}).items() if k in ("save_every", "stagger", "extra_fields")}
        first_row = number * plan.batch
        self.recorder = Recorder(self.base, writer_for(self.base), actor=first_row, seed=recorder_seed, **options)
        self._rows = slice(first_row, first_row + plan.batch)

    @property
    def spaces(self) -> Spaces:
        return Spaces(self.base.observation_space, self.base.action_spec.space, self.base.raw_observation_space)

    @property
    def rows(self) -> slice:
        """Its rows of the pool's arrays."""
        return self._rows

    def attach(self, buffers: Buffers) -> None:
        """Use these arrays from now on."""
        rows, self.buffers = self._rows, buffers
        self._obs = [(key, array[rows]) for key, array in buffers.obs.items()]
        self._rl2s, self._time, self._resets = buffers.rl2s[rows], buffers.time_idxs[rows, 0], buffers.resets[rows]
        reward, self._prev_action = split_rl2(self._rl2s)
        self._reward = reward[:, 0]
        self._action = buffers.actions[rows] if self.base.vectorized else buffers.actions[rows][0]
        self._any_ended = buffers.any_ended[self._worker : self._worker + 1]
        extras = {name: array[rows] for name, array in buffers.extras.items()}
        if BEHAVIOUR_LOG_PROB in extras:
            extras[BEHAVIOUR_LOG_PROB] = BehaviourLog(extras[BEHAVIOUR_LOG_PROB], self.exploration).log_prob
        self.recorder.attach_extras(extras)

    def reset(self) -> None:
        """Begin a new rollout; the first call seeds the environment."""
        seed = None if self._seeded else int(self._reset_seed.generate_state(1, np.uint64)[0] % _SEED_LIMIT)
        ts, info = self.env.reset(seed=seed)
        self.recorder.opened(ts, info)
        self._seeded = True
        for key, array in self._obs:
            array[...] = ts.obs[key]
        self._rl2s[...], self._time[...], self._resets[...] = 0.0, 0, True

    def step(self) -> None:
        """Take one step with the actions in the arrays; a rollout that ends is followed by a new one at once."""
        out = self.env.step(self._action)
        self.outcome = out[1:]  # without the observations, whose memory the next step uses again
        if self.recorder.stepped(*out):
            self._any_ended[0] = True
            self.reset()
            return
        ts, _, terminated, truncated, _ = out
        auto = self.base.auto
        if auto is None:
            self._resets[0] = False
        else:
            self._resets[...] = auto.opened
            if not self._any_ended[0] and (terminated.any() or truncated.any()):
                self._any_ended[0] = True
        for key, array in self._obs:
            array[...] = ts.obs[key]
        self._reward[...], self._prev_action[...], self._time[...] = ts.reward, ts.prev_action, ts.time_idx

    @property
    def lasted(self) -> int:
        """Steps that the longest rollout in progress has lasted."""
        return int(self._time.max())

    def close(self) -> None:
        """Close the environment; trajectories that are not finished are lost."""
        self.recorder.close()
        self.env.close()

    def state_dict(self) -> dict[str, Any]:
        """State of exploration and of the recorder's random generator, JSON-able."""
        state: dict[str, Any] = {"recorder_rng": self.recorder.rng.bit_generator.state}
        if self.exploration is not None:
            state["exploration"] = self.exploration.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.recorder.rng.bit_generator.state = state["recorder_rng"]
        if self.exploration is not None and "exploration" in state:
            self.exploration.load_state_dict(state["exploration"])


def make_env(maker: EnvMaker, batch: int) -> tuple[Any, AMAGOEnv]:
    """The environment that a user's function makes, and the `AMAGOEnv` inside it."""
    made = maker()
    base = env_of(made, maker)
    if base.batched_envs != batch:
        raise ValueError(
            f"{_name(maker)} made an environment with batched_envs={base.batched_envs}, but here it must be {batch}"
            + (" (its rows are the parallel_actors)" if batch > 1 else "; use env_mode='already_vectorized'")
        )
    return made, base


def env_of(made: Any, maker: EnvMaker) -> AMAGOEnv:
    """The `AMAGOEnv` inside what a user's function returned."""
    return innermost(made, f"{_name(maker)} must return an AMAGOEnv, but returned")


def _name(maker: EnvMaker) -> str:
    return getattr(maker, "__qualname__", None) or repr(maker)
