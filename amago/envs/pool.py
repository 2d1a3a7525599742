"""One interface to all actors, wherever they live: in this process, in workers, or in one vectorised environment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.amago_env import innermost
from amago.envs.crew import Crew, CrewPlan, EnvMaker, check_recorder
from amago.envs.exploration import ExplorationWrapper
from amago.envs.faults import RestartBudget
from amago.envs.shared import Buffers, Layout
from amago.envs.statistics import PhaseStatistics
from amago.spaces import ActionSpec, action_spec, rl2_space

Array = NDArray[Any]
ENV_MODES = ("async", "sync", "already_vectorized")


class ActorPool(Protocol):
    """N actors that step side by side. Make one with `make_pool`, then call `reset`.

    A rollout that ends is followed by a new one at once: what the arrays hold is always what the policy must answer next.
    They are the pool's own memory: read them before the next `send` of their group, and copy what you keep.

    Attributes:
        num_actors: N.
        observation_space, action_spec, rl2_space: of each actor.
        groups: slices of actors that step independently: while one group steps, the policy computes for the next.
        obs: {key: (N, ...)}.
        rl2s: (N, 1 + A) float32, reward and previous action.
        time_idxs: (N, 1) int64.
        resets: (N,) bool, True where this observation opens a new rollout: clear the actor's memory before it acts.
    """

    num_actors: int
    observation_space: gym.spaces.Dict
    action_spec: ActionSpec
    rl2_space: gym.spaces.Box
    groups: list[slice]
    obs: dict[str, Array]
    rl2s: NDArray[np.float32]
    time_idxs: NDArray[np.int64]
    resets: NDArray[np.bool_]

    def reset(self) -> None:
        """Open a new rollout for every actor; unfinished ones are dropped. The first call seeds the environments."""

    def send(self, group: int, actions: Array) -> None:
        """Begin a step of a group with actions (its actors, S) in stored form; `wait` for it before reading its rows.

        Raises:
            ValueError: a wrong shape, or the group is stepping already.
        """

    def send_all(self, actions: Array) -> None:
        """`send` for every group at once, with actions (N, S): fewer messages. `wait` for each of them."""

    def wait(self, group: int) -> None:
        """Finish the step of a group.

        Raises:
            ActorError: more than ``max_env_restarts`` faults in an hour, or trajectories could not be written.
        """

    def step(self, actions: Array) -> None:
        """One step of every actor with actions (N, S)."""

    def drain(self) -> PhaseStatistics:
        """What has happened since the last call."""

    def flush(self, partial: bool = False) -> int:
        """Commit finished trajectories to disk (with ``partial``, what there is of unfinished ones too); returns how many."""

    def state_dict(self) -> dict[str, Any]:
        """Exploration schedules and generators of every actor, JSON-able. Environments' own states are not in it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exploring where `state_dict` was taken.

        Raises:
            ValueError: it is of another number of actors.
        """

    def render(self) -> Any:
        """Draw the first actor (not from worker processes)."""

    def close(self) -> None:
        """Commit finished trajectories, end every actor. Returns within 10 seconds; may be called again."""


class PoolBase:
    """What every kind of pool does alike."""

    def __init__(self, num_actors: int, observation_space: gym.spaces.Dict, action_space: gym.Space[Any], groups: list[slice]):
        self.num_actors, self.observation_space, self.groups = num_actors, observation_space, groups
        self.action_spec = action_spec(action_space)
        self.rl2_space = rl2_space(self.action_spec)
        self._in_flight = [False] * len(groups)

    def _adopt(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.obs, self.rl2s, self.time_idxs, self.resets = buffers.obs, buffers.rl2s, buffers.time_idxs, buffers.resets

    def send(self, group: int, actions: Array) -> None:
        self._take([group], self.groups[group], actions)
        self._begin(group)
        self._in_flight[group] = True

    def send_all(self, actions: Array) -> None:
        groups = range(len(self.groups))
        self._take(groups, slice(0, self.num_actors), actions)
        self._begin_all()
        for group in groups:
            self._in_flight[group] = True

    def _take(self, groups: Iterable[int], rows: slice, actions: Array) -> None:
        expected = (rows.stop - rows.start, self.action_spec.stored_dim)
        for group in groups:
            if self._in_flight[group]:
                raise ValueError(f"group {group} is stepping already; call wait({group}) first")
        if np.shape(actions) != expected:
            whose = "all actors" if expected[0] == self.num_actors else f"group {', '.join(map(str, groups))}"
            raise ValueError(
                f"actions of {whose} have shape {np.shape(actions)}, but must have {expected}, the stored form "
                f"({self.action_spec.stored_dtype}) of {self.action_spec.space}"
            )
        self._buffers.actions[rows] = actions

    def wait(self, group: int) -> None:
        if not self._in_flight[group]:
            raise ValueError(f"group {group} is not stepping; call send({group}, actions) first")
        self._end(group)
        self._in_flight[group] = False

    def step(self, actions: Array) -> None:
        self.send_all(actions)
        for g in range(len(self.groups)):
            self.wait(g)

    def _check_state(self, state: dict[str, Any]) -> dict[str, Any]:
        if state["num_actors"] != self.num_actors:
            raise ValueError(f"the saved state is of {state['num_actors']} actors, but this pool has {self.num_actors}")
        return state["actors"]  # type: ignore[no-any-return]

    def _begin(self, group: int) -> None:
        raise NotImplementedError

    def _begin_all(self) -> None:
        for group in range(len(self.groups)):
            self._begin(group)

    def _end(self, group: int) -> None:
        raise NotImplementedError


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
        self._adopt(Buffers.local(Layout.of(n, self.observation_space, self.action_spec, 1)))
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


def make_pool(
    make_envs: Sequence[EnvMaker] | EnvMaker,
    env_mode: str = "async",
    *,
    parallel_actors: int | None = None,
    workers: int | None = None,
    step_timeout: float = 60.0,
    start_timeout: float = 300.0,
    max_env_restarts: int = 100,
    exploration: type[ExplorationWrapper] | None = None,
    recorder: dict[str, Any] | None = None,
    seed: int | np.random.SeedSequence | None = None,
    mp_context: str | None = None,
    one_env_per_worker: bool = False,
) -> ActorPool:
    """Start the actors.

    Args:
        make_envs: one function for each actor, each returning an `AMAGOEnv`; a single function is used for all of them.
            "already_vectorized" takes one function, whose environment has ``batched_envs == parallel_actors``.
        env_mode: "async" (worker processes), "sync" (this process) or "already_vectorized".
        parallel_actors: N; by default as many as there are functions (or rows).
        workers: processes of "async"; default: the usable cores, at most N. An explicit 1 steps all actors as one group, and gives
            what "sync" gives, bit for bit.
        step_timeout: seconds after which a step counts as hung ("async" only: nothing can interrupt a step of this process).
        start_timeout: seconds in which a worker must have made its environments, and for a reset of all of them.
        max_env_restarts: environments and workers replaced within an hour before the pool gives up.
        exploration: a subclass of `ExplorationWrapper` put around each environment.
        recorder: ``save_trajs_to``, ``save_every``, ``save_trajs_as`` and ``stagger`` of `SequenceWrapper`, and
            ``writer_name`` (must be unique in the directory; default: random). None records returns and metrics only.
        seed: of the environments' first resets and of exploration; the same in every mode. None draws one.
        mp_context: how workers start: None ("forkserver"), "forkserver", "spawn" or "fork".
        one_env_per_worker: as many workers as actors.

    Raises:
        ValueError: an argument is wrong or contradicts another.
        ActorError: an environment could not be made; the message holds its traceback. (In this process its own exception.)
    """
    if env_mode not in ENV_MODES:
        raise ValueError(f"env_mode is {env_mode!r}, but must be one of {', '.join(map(repr, ENV_MODES))}")
    _check_positive(parallel_actors=parallel_actors, workers=workers, step_timeout=step_timeout, start_timeout=start_timeout)
    if one_env_per_worker and workers is not None:
        raise ValueError(f"workers is {workers}, but one_env_per_worker=True says it, too; give one of the two")
    if exploration is not None and not (isinstance(exploration, type) and issubclass(exploration, ExplorationWrapper)):
        raise TypeError(f"exploration is {exploration!r}, but must be a subclass of ExplorationWrapper, or None")
    makers = _makers(make_envs, env_mode, parallel_actors)
    batch = 1
    if env_mode == "already_vectorized":
        if parallel_actors is None:
            makers, batch = _measure(makers[0])
        else:
            batch = parallel_actors
    root = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    plan = CrewPlan(
        make_envs=dict(enumerate(makers)),
        batch=batch,
        groups=[list(range(len(makers)))],
        exploration=exploration,
        recorder=check_recorder(recorder),
        entropy=root.entropy,
        spawn_key=tuple(root.spawn_key),
    )
    if env_mode != "async":
        return InProcessPool(plan, max_env_restarts)
    from amago.envs.async_pool import AsyncPool  # not needed in workers, which import this module

    workers = len(makers) if one_env_per_worker else workers
    return AsyncPool(plan, workers, step_timeout, start_timeout, max_env_restarts, mp_context)


def _check_positive(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value!r}, but must be positive")


def _makers(make_envs: Sequence[EnvMaker] | EnvMaker, env_mode: str, parallel_actors: int | None) -> list[EnvMaker]:
    if callable(make_envs):
        copies = 1 if env_mode == "already_vectorized" else parallel_actors or 1
        makers: list[EnvMaker] = [make_envs] * copies
    else:
        makers = list(make_envs)
    for i, maker in enumerate(makers):
        if not callable(maker):
            raise TypeError(f"make_envs[{i}] is {maker!r}, but must be a function that returns an AMAGOEnv")
    if not makers:
        raise ValueError("make_envs is empty")
    if env_mode == "already_vectorized":
        if len(makers) != 1:
            raise ValueError(f"env_mode='already_vectorized' takes one function, but make_envs has {len(makers)}")
    elif parallel_actors is not None and len(makers) != parallel_actors:
        raise ValueError(f"parallel_actors is {parallel_actors}, but make_envs has {len(makers)} functions")
    return makers


def _measure(maker: EnvMaker) -> tuple[list[EnvMaker], int]:
    """Make the vectorised environment to see how many rows it has; the pool then gets this one first."""
    made = [maker()]
    batch = innermost(made[0], "the pool").batched_envs

    def first_made() -> Any:
        return made.pop() if made else maker()

    return [first_made], batch


__all__ = ["ENV_MODES", "ActorPool", "InProcessPool", "make_pool"]
