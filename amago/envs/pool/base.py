"""`ActorPool`: one interface to all actors, in this process, in worker processes, or in one vectorised environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.pool.buffers import Buffers
from amago.envs.pool.faults import PROVEN_STEPS, RestartBudget
from amago.envs.pool.plan import Spaces
from amago.envs.pool.view import Answer, take
from amago.envs.statistics import PhaseStatistics
from amago.spaces import ActionSpec, action_spec, rl2_space

Array = NDArray[Any]


class ActorPool(ABC):
    """N actors that step side by side. Make one with `make_pool`, then call `reset`.

    A rollout that ends is followed by a new one at once: the arrays always hold the observations for which actions are due.
    They are the pool's own memory: read them before the next `send` of their group, and copy what must be kept.

    Attributes:
        num_actors: N.
        observation_space, action_spec, rl2_space: of each actor.
        raw_observation_space: the observation space of the environments themselves.
        groups: slices of actors that step independently: while one group steps, the policy can compute for the next.
        obs: {key: (N, ...)}.
        rl2s: (N, 1 + A) float32, reward and previous action.
        time_idxs: (N, 1) int64.
        extras: {name: (N, ...)}, the extra fields with ``source="policy"``: write them before the `send` of their actions.
        resets: (N,) bool, True where the observation opens a new rollout: clear the actor's memory before it acts.
        idle: (N,) bool: actors whose rows you set to True, while their group is not stepping, skip their steps until you set them to
            False. Only where `can_idle`.
        can_idle: whether single actors can skip steps: not where they are the rows of one vectorised environment.
    """

    num_actors: int
    observation_space: gym.spaces.Dict
    raw_observation_space: gym.Space[Any]
    action_spec: ActionSpec
    rl2_space: gym.spaces.Box
    groups: list[slice]
    obs: dict[str, Array]
    extras: dict[str, Array]
    rl2s: NDArray[np.float32]
    time_idxs: NDArray[np.int64]
    resets: NDArray[np.bool_]
    idle: NDArray[np.bool_]
    can_idle = True

    def __init__(
        self,
        num_actors: int,
        spaces: Spaces,
        groups: list[slice],
        budget: RestartBudget,
    ):
        self.num_actors, self.groups = num_actors, groups
        self.observation_space, self.raw_observation_space = spaces.observation_space, spaces.raw_observation_space
        self.action_spec = action_spec(spaces.action_space)
        self.rl2_space = rl2_space(self.action_spec)
        self._budget = budget
        self._in_flight = [False] * len(groups)
        self._calling: str | None = None  # what `call_async` has called

    def _use_buffers(self, buffers: Buffers) -> None:
        self._buffers, self.extras, self.idle = buffers, buffers.extras, buffers.idle
        self._budget.proven = lambda: bool(buffers.any_ended.any() or (buffers.time_idxs >= PROVEN_STEPS).any())
        self.obs, self.rl2s, self.time_idxs, self.resets = buffers.obs, buffers.rl2s, buffers.time_idxs, buffers.resets

    # ------------------------------------------------------------------ stepping

    @abstractmethod
    def reset(self) -> None:
        """Begin a new rollout for every actor; unfinished ones are dropped. The first call seeds the environments."""

    def send(self, group: int, actions: Array) -> None:
        """Begin a step of one group; call `wait` before reading its rows of the arrays.

        Args:
            group: index in `groups`.
            actions: (actors of the group, S), in stored form (`amago.spaces`).

        Raises:
            ValueError: a wrong shape, or the group is stepping already.
        """
        self._accept([group], self.groups[group], actions)
        self._begin(group)
        self._in_flight[group] = True

    def send_all(self, actions: Array) -> None:
        """Begin a step of every group with actions (N, S), with fewer messages than `send`; then call `wait` for each group."""
        groups = range(len(self.groups))
        self._accept(groups, slice(0, self.num_actors), actions)
        self._begin_all()
        for group in groups:
            self._in_flight[group] = True

    def _accept(self, groups: Iterable[int], rows: slice, actions: Array) -> None:
        """Check actions and copy them to the arrays."""
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
        """Finish the step of a group.

        Raises:
            ValueError: the group is not stepping.
            ActorError: more than ``max_env_restarts`` faults in an hour, or trajectories could not be written.
        """
        if not self._in_flight[group]:
            raise ValueError(f"group {group} is not stepping; call send({group}, actions) first")
        self._finish(group)
        self._in_flight[group] = False

    def step(self, actions: Array) -> None:
        """Take one step of every actor with actions (N, S)."""
        self.send_all(actions)
        for group in range(len(self.groups)):
            self.wait(group)

    @abstractmethod
    def _begin(self, group: int) -> None:
        """Begin a step of a group, whose actions are in the arrays."""

    def _begin_all(self) -> None:
        for group in range(len(self.groups)):
            self._begin(group)

    @abstractmethod
    def _finish(self, group: int) -> None:
        """Return when the group has taken its step."""

    # ------------------------------------------------------------------ calls

    def call_async(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of each environment, or read an attribute; `call_wait` returns what they answer.

        Names are looked up in the environment with all its wrappers, and what `SequenceWrapper` has of a rollout's state is there too
        (`amago.envs.pool.view.ActorView`). Arguments and answers must be picklable where environments are in worker processes.

        Raises:
            ValueError: the answers of the last call were not taken, or a group is stepping.
        """
        if self._calling is not None:
            raise ValueError(f"call_wait() must take the answers to {self._calling!r} first")
        if any(self._in_flight):
            raise ValueError("a group is stepping: wait() for it before calling environments")
        self._begin_call(name, args, kwargs)
        self._calling = name

    def call_wait(self) -> list[Any]:
        """The answers to the last `call_async`, one an environment, in order.

        Raises:
            ValueError: there was no `call_async`.
            AttributeError: an environment has no such method or attribute.
            ActorError: a worker was lost meanwhile, or an environment of a worker raised an error; with its traceback. (In this
                process, the environment's own exception is raised.)
        """
        if self._calling is None:
            raise ValueError("there is nothing to wait for: call call_async(name, *args) first")
        name, self._calling = self._calling, None
        answers = self._end_call()
        numbers = range(len(answers) if not self.can_idle else self.num_actors)
        return [take(answers.get(n), name, n) for n in numbers]

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`call_async`, then `call_wait`."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    @abstractmethod
    def _begin_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin `call_async`."""

    @abstractmethod
    def _end_call(self) -> dict[int, Answer]:
        """{actor's number: its answer}."""

    # ------------------------------------------------------------------ statistics, files, state

    def drain(self) -> PhaseStatistics:
        """Statistics since the last call."""
        out = PhaseStatistics()
        for part in self._drain():
            out.add(part.episodes, part.frames)
            out.add_exploration(part.exploration)
        out.episodes.sort(key=lambda e: e.actor)
        out.restarts, out.dropped = self._budget.drain()
        return out

    @abstractmethod
    def _drain(self) -> Iterable[PhaseStatistics]:
        """Statistics of each process that hosts actors, without restarts."""

    @abstractmethod
    def flush(self, partial: bool = False) -> int:
        """Commit finished trajectories to disk.

        Args:
            partial: also commit the part that unfinished rollouts have reached.

        Returns:
            how many trajectories were committed.
        """

    def state_dict(self) -> dict[str, Any]:
        """Exploration schedules and random generators of every actor, JSON-able. States of environments are not included."""
        actors = self._actor_states()
        return {"num_actors": self.num_actors, "actors": {k: actors[k] for k in sorted(actors, key=int)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: it is of another number of actors.
        """
        if state["num_actors"] != self.num_actors:
            raise ValueError(f"the saved state is of {state['num_actors']} actors, but this pool has {self.num_actors}")
        self._load_actor_states(state["actors"])

    @property
    def disk_is_full(self) -> bool:
        """Whether finished trajectories wait in memory because the disk had no space for them when that was last tried."""
        buffers = getattr(self, "_buffers", None)  # rows of a vector environment that others have made have none
        return buffers is not None and bool(buffers.no_space.any())

    @abstractmethod
    def _actor_states(self) -> dict[str, Any]:
        """{actor's number: its state}."""

    @abstractmethod
    def _load_actor_states(self, states: dict[str, Any]) -> None:
        """Restore what `_actor_states` returned."""

    @abstractmethod
    def render(self) -> Any:
        """Render the first actor's environment.

        Raises:
            ValueError: the environments are in worker processes.
        """

    @abstractmethod
    def close(self) -> None:
        """Commit finished trajectories and end every actor. Returns within 10 seconds; may be called again."""
