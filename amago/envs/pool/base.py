"""`ActorPlan`, from which actors are made; `ActorPool`, the interface of every pool of them; and `PoolEnv`, a pool with the methods
of a vector environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from amago.data.extras import ExtraField
from amago.envs.amago_env import AMAGOEnv
from amago.envs.env_utils import infos_of_rows
from amago.envs.exploration import ExplorationWrapper
from amago.envs.inner_env import policy_space
from amago.envs.pool.faults import PROVEN_STEPS, ActorError, RestartBudget
from amago.envs.pool.memory import Buffers
from amago.envs.statistics import PhaseStatistics
from amago.spaces import action_spec

Array = NDArray[Any]
EnvMaker = Callable[[], gym.Env[Any, Any]]
_PROCESS_KEY = 1 << 31  # in spawn keys: larger than any actor's number, so that actors and processes never share a seed


@dataclass(frozen=True)
class Spaces:
    """The flat observation space, the action space and the space of reward with previous action of one environment, which must be
    equal for all actors of a pool, and its own observation space."""

    observation: gym.spaces.Dict
    action: gym.Space[Any]
    rl2: gym.spaces.Box = field(repr=False)
    raw_observation: gym.Space[Any] = field(compare=False)

    @classmethod
    def of(cls, env: AMAGOEnv) -> Spaces:
        """The spaces of an environment."""
        return cls(env.observation_space, env.action_spec.space, env.rl2_space, env.raw_observation_space)

    def check(self, found: Spaces, who: str) -> None:
        """Raise ValueError if the spaces of another environment of the pool differ."""
        if found != self:
            raise ValueError(f"all environments of a pool must have the same spaces, but {who} has {found}, not {self}")


@dataclass
class ActorPlan:
    """The plan from which the actors of one process are made: the whole pool's, or one worker's share of it.

    Attributes:
        make_envs: {actor's number: function that makes its environment}, in order.
        batch: rows of each actor's environment; actor i has rows [i * batch, (i + 1) * batch) of the pool's arrays. None: as
            many as the first environment has.
        groups: for each group of the pool, the numbers of these actors that belong to it.
        exploration: class of the exploration wrapper, or None.
        run: arguments of `ExplorationWrapper.fit_to_run`; None: the actors belong to no run.
        recorder: options of the recorder, as of `amago.envs.make_pool`, or None to record only returns and metrics.
        entropy, spawn_key: of the run's `numpy.random.SeedSequence`.
        worker: number of the worker; 0 in the learner's process.
        generation: how often this worker was replaced before.
        steps: {actor's number: steps that it has taken}, from which the exploration schedules of a replaced worker continue.
    """

    make_envs: dict[int, EnvMaker]
    batch: int | None
    groups: list[list[int]]
    exploration: type[ExplorationWrapper] | None
    recorder: dict[str, Any] | None
    entropy: int | Sequence[int] | None
    spawn_key: tuple[int, ...]
    worker: int = 0
    generation: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    run: tuple[int, bool] | None = None

    @property
    def extra_fields(self) -> tuple[ExtraField, ...]:
        """The declared extra fields that are recorded."""
        return tuple((self.recorder or {}).get("extra_fields", ()))

    def actor_seeds(self, actor: int, generation: int) -> list[np.random.SeedSequence]:
        """Seeds of an actor's first reset, its exploration and its recorder, in whatever process it is."""
        return np.random.SeedSequence(self.entropy, spawn_key=(*self.spawn_key, actor, generation)).spawn(3)

    def process_seed(self) -> np.random.SeedSequence:
        """Seed of the global random generators of a worker process."""
        return np.random.SeedSequence(self.entropy, spawn_key=(*self.spawn_key, _PROCESS_KEY, self.worker, self.generation))


class Answer(NamedTuple):
    """The result of a call to an environment: its value, or what it raised."""

    value: object = None
    error: BaseException | None = None


class ActorPool(ABC):
    """N actors that step side by side. Make one with `make_pool`, then call `reset`.

    A rollout that ends is followed by a new one at once: the arrays always hold the observations for which actions are due.
    They are the pool's own memory: read them before the next `send` of their group, and copy what must be kept.

    Attributes:
        num_actors: N.
        spaces, observation_space, action_spec, rl2_space: of each actor.
        raw_observation_space: the observation space of the environments themselves.
        groups: slices of actors that step independently: while one group steps, the policy can compute for the next.
        obs: {key: (N, ...)}.
        rl2s: (N, 1 + A) float32, reward and previous action.
        time_idxs: (N, 1) int64.
        extras: {name: (N, ...)}, the extra fields with ``source="policy"``: write them before the `send` of their actions.
        resets: (N,) bool, True where the observation opens a new rollout: clear the actor's memory before it acts.
        idle: (N,) bool: actors whose rows you set to True, while their group is not stepping, skip their steps until you set
            them to False. Only where `can_idle`.
        shares_process: whether environments run in this process.
        can_idle: whether single actors can skip steps: not where they are the rows of one vectorised environment.
    """

    can_idle = True
    shares_process = False

    def __init__(self, num_actors: int, spaces: Spaces, groups: list[slice], budget: RestartBudget):
        self.num_actors, self.groups = num_actors, groups
        self.observation_space, self.raw_observation_space = spaces.observation, spaces.raw_observation
        self.spaces, self.action_spec, self.rl2_space = spaces, action_spec(spaces.action), spaces.rl2
        self._budget = budget
        self._in_flight = [False] * len(groups)
        self._calling: str | None = None  # what `call_async` has called

    def _use_buffers(self, buffers: Buffers) -> None:
        self._buffers, self.extras, self.idle = buffers, buffers.extras, buffers.idle
        self._budget.proven = lambda: bool(buffers.any_ended.any() or (buffers.time_idxs >= PROVEN_STEPS).any())
        self.obs, self.rl2s, self.time_idxs, self.resets = buffers.obs, buffers.rl2s, buffers.time_idxs, buffers.resets

    def reset(self) -> None:
        """Begin a new rollout for every actor; unfinished ones are dropped. The first call seeds the environments."""
        for group, stepping in enumerate(self._in_flight):
            if stepping:
                self.wait(group)
        self._ask("reset")

    def send(self, group: int | None, actions: Array) -> None:
        """Begin a step of one group; call `wait` before reading its rows of the arrays.

        Args:
            group: index in `groups`; None: all groups.
            actions: (actors of the group, S), in stored form (`amago.spaces`).

        Raises:
            ValueError: a wrong shape, or the group is stepping already.
        """
        groups = range(len(self.groups)) if group is None else (group,)
        rows = slice(0, self.num_actors) if group is None else self.groups[group]
        for g in groups:
            if self._in_flight[g]:
                raise ValueError(f"group {g} is stepping already; call wait({g}) first")
        expected = (rows.stop - rows.start, self.action_spec.stored_dim)
        if np.shape(actions) != expected:
            whose = "all actors" if expected[0] == self.num_actors else f"group {group}"
            raise ValueError(
                f"actions of {whose} have shape {np.shape(actions)}, but must have {expected}, the stored form "
                f"({self.action_spec.stored_dtype}) of {self.action_spec.space}"
            )
        self._buffers.actions[rows] = actions
        for g in groups:
            self._begin(g)
            self._in_flight[g] = True

    def send_all(self, actions: Array) -> None:
        """Begin a step of every group with actions (N, S); then call `wait` for each group."""
        self.send(None, actions)

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

    @abstractmethod
    def _finish(self, group: int) -> None:
        """Return when the group has taken its step."""

    def call_async(self, name: str, *args: object, **kwargs: object) -> None:
        """Call a method of each environment, or read an attribute; `call_wait` returns the results.

        Names are looked up in the environment with all its wrappers, and in the state of its rollouts, as `SequenceWrapper` has
        it. Arguments and results must be picklable where environments are in worker processes.

        Raises:
            ValueError: the results of the last call were not taken, or a group is stepping.
        """
        if self._calling is not None:
            raise ValueError(f"call_wait() must take the answers to {self._calling!r} first")
        if any(self._in_flight):
            raise ValueError("a group is stepping: wait() for it before calling environments")
        self._begin_ask("call", name, args, kwargs)
        self._calling = name

    def call_wait(self) -> list[Any]:
        """The results of the last `call_async`, one an environment, in order.

        Raises:
            AttributeError: an environment has no such method or attribute.
            ActorError: a worker was lost meanwhile, or an environment of a worker raised an error; with its traceback. (In this
                process, the environment's own exception is raised.)
        """
        if self._calling is None:
            raise ValueError("there is nothing to wait for: call call_async(name, *args) first")
        name, self._calling = self._calling, None
        answers: dict[int, Answer] = {}
        for found in self._end_ask():
            answers |= found
        values = []
        for n in range(self.num_actors if self.can_idle else len(answers)):
            if n not in answers:
                raise ActorError(f"actor {n} did not answer to {name!r}: its worker was lost and is replaced")
            value, error = answers[n]
            if error is not None:
                raise error
            values.append(value)
        return values

    def call(self, name: str, *args: object, **kwargs: object) -> list[Any]:
        """`call_async`, then `call_wait`."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    @property
    def envs(self) -> list[Any]:
        """The environments, one an actor; AttributeError if they are in worker processes."""
        raise AttributeError(
            "the environments are in worker processes: use call_async(name, *args) and call_wait(), or env_mode='sync'"
        )

    def drain(self) -> PhaseStatistics:
        """Statistics since the last call."""
        out = PhaseStatistics()
        for part in self._ask("drain"):
            out.add(part.episodes, part.frames)
            out.add_exploration(part.exploration)
        out.episodes.sort(key=lambda e: e.actor)  # stable: in order of time for each actor
        out.restarts, out.dropped = self._budget.drain()
        return out

    def flush(self, partial: bool = False) -> int:
        """Commit finished trajectories, with ``partial`` also what unfinished rollouts have reached; returns how many."""
        return sum(self._ask("flush", partial))

    def state_dict(self) -> dict[str, Any]:
        """Exploration schedules and random generators of every actor, JSON-able. States of environments are not included."""
        actors = {number: state for states in self._ask("state_dict") for number, state in states.items()}
        return {"num_actors": self.num_actors, "actors": {k: actors[k] for k in sorted(actors, key=int)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; ValueError if it is of another number of actors."""
        if state["num_actors"] != self.num_actors:
            raise ValueError(f"the saved state is of {state['num_actors']} actors, but this pool has {self.num_actors}")
        self._ask("load_state_dict", state["actors"])

    @property
    def disk_is_full(self) -> bool:
        """True if finished trajectories wait in memory because the disk had no space at the last attempt to write them."""
        return bool(self._buffers.no_space.any())

    @abstractmethod
    def _ask(self, method: str, *args: object) -> list[Any]:
        """The results of a method of each process's `amago.envs.pool.sync.ActorSet`, without the results of lost processes."""

    def _begin_ask(self, method: str, *args: object) -> None:
        """Begin `_ask`; `_end_ask` returns the results."""
        self._answers = self._ask(method, *args)

    def _end_ask(self) -> list[Any]:
        return self._answers

    @abstractmethod
    def render(self) -> Any:
        """Render the first actor's environment; ValueError if it is in a worker process."""

    @abstractmethod
    def close(self) -> None:
        """Commit finished trajectories and end every actor. Returns within 10 seconds; may be called again."""


class PoolEnv:
    """The environments of a pool, as one that steps them all: the type of `Experiment.train_envs` and `Experiment.val_envs`.

    A rollout that ends is followed by a new one at once, whose first observation is returned.

    Args:
        pool: `reset` was called.

    Attributes:
        num_envs: N.
        single_observation_space: of each environment, flat.
        single_action_space: of each environment, from which `Agent.get_actions` chooses.
        rl2_space: Dict {"obs": the observation space, "rl2": Box of the reward and the previous action}.
        envs: the pool's. The methods that are not described here are the pool's, too.
    """

    def __init__(self, pool: ActorPool):
        self.pool, self.num_envs = pool, pool.num_actors
        self.single_observation_space = pool.observation_space
        self.single_action_space = policy_space(pool.action_spec)
        self.rl2_space = gym.spaces.Dict({"obs": pool.observation_space, "rl2": pool.rl2_space})

    @property
    def envs(self) -> list[Any]:
        return self.pool.envs

    def reset(self, **options: object) -> tuple[dict[str, Array], dict[str, Any]]:
        """Begin a rollout in every environment; returns observations {key: (N, ...)}, and {}. ``options`` have no effect: actors are
        seeded by the run.
        """
        self.pool.reset()
        return self._observations(), {}

    def step(self, actions: object) -> tuple[dict[str, Array], Array, Array, Array, dict[str, Any]]:
        """Take one step of every environment.

        Args:
            actions: N actions as `Agent.get_actions` returns them; dimensions of length 1 may be left out, or be more.

        Returns:
            observations {key: (N, ...)}, rewards, terminated and truncated (N,), and the infos {key: (N,), _key: (N,)}. An
            environment that failed and was replaced has the reward 0 and is truncated.
        """
        chosen = _on_host(actions)
        wanted = (self.num_envs, self.pool.action_spec.stored_dim)
        if chosen.size != wanted[0] * wanted[1] or chosen.shape[:1] != wanted[:1]:
            raise ValueError(
                f"actions have shape {chosen.shape}, but there are {wanted[0]} environments with actions of {wanted[1]} numbers"
            )
        self.pool.step(chosen.reshape(wanted))
        outcomes = self.pool.call("outcome")
        rows = self.num_envs // len(outcomes)  # of each environment
        lost: tuple[Any, ...] = np.zeros(rows), np.zeros(rows, bool), np.ones(rows, bool), {}
        parts: list[Any] = [out or lost for out in outcomes]
        rewards, terminated, truncated = (
            np.concatenate([np.ravel(p[i]) for p in parts]).astype(d) for i, d in enumerate((np.float32, bool, bool))
        )
        infos = infos_of_rows([p[3] for p in parts]) if rows == 1 else dict(parts[0][3])
        return self._observations(), rewards, terminated, truncated, infos

    def _observations(self) -> dict[str, Array]:
        return {key: _on_host(array).copy() for key, array in self.pool.obs.items()}

    def call_async(self, name: str, *args: object, **kwargs: object) -> None:
        self.pool.call_async(name, *args, **kwargs)

    def call_wait(self) -> list[Any]:
        return self.pool.call_wait()

    def call(self, name: str, *args: object, **kwargs: object) -> list[Any]:
        return self.pool.call(name, *args, **kwargs)

    def render(self) -> Any:
        return self.pool.render()

    def close(self) -> None:
        self.pool.close()


def _on_host(array: Any) -> Array:
    """An array of numpy, also of a tensor on a device."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)
