"""One interface to all actors, wherever they live: in this process, in workers, or in one vectorised environment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.envs.pool.buffers import Buffers
from amago.envs.statistics import PhaseStatistics
from amago.spaces import ActionSpec, action_spec, rl2_space

Array = NDArray[Any]


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
        extras: {name: (N, ...)}, the extra fields with ``source="policy"``: write them before the `send` of their actions.
        resets: (N,) bool, True where this observation opens a new rollout: clear the actor's memory before it acts.
    """

    num_actors: int
    observation_space: gym.spaces.Dict
    action_spec: ActionSpec
    rl2_space: gym.spaces.Box
    groups: list[slice]
    obs: dict[str, Array]
    extras: dict[str, Array]
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
        self._buffers, self.extras = buffers, buffers.extras
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
