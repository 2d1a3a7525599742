"""`ActorPlan`: what the actors of one process are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from amago.data.extras import ExtraField
from amago.envs.exploration import ExplorationWrapper

EnvMaker = Callable[[], Any]
RECORDER_OPTIONS = ("save_trajs_to", "save_every", "save_trajs_as", "stagger", "writer_name", "extra_fields")
_PROCESS_KEY = 1 << 31  # in spawn keys: larger than any actor's number, so that actors and processes never share a seed
_TRIAL_KEY = _PROCESS_KEY + 1


@dataclass
class ActorPlan:
    """What the actors of one process are made from: the whole pool's, or one worker's share of it.

    Attributes:
        make_envs: {actor's number: function that makes its environment}, in order.
        batch: rows of each actor's environment; actor i has rows [i * batch, (i + 1) * batch) of the pool's arrays.
        groups: for each group of the pool, the numbers of these actors that belong to it.
        exploration: class of the exploration wrapper, or None.
        recorder: options of the recorder (`RECORDER_OPTIONS`), or None to record only returns and metrics.
        entropy, spawn_key: of the run's `numpy.random.SeedSequence`.
        worker: number of the worker; 0 in the learner's process.
        generation: how often this worker was replaced before.
        steps: {actor's number: steps that it has taken}, from which the exploration schedules of a replaced worker continue.
        trial_steps: try an environment for so many steps before the actors are made (`amago.envs.pool.trial`); 0: do not.
    """

    make_envs: dict[int, EnvMaker]
    batch: int
    groups: list[list[int]]
    exploration: type[ExplorationWrapper] | None
    recorder: dict[str, Any] | None
    entropy: Any
    spawn_key: tuple[int, ...]
    worker: int = 0
    generation: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    trial_steps: int = 0

    @property
    def extra_fields(self) -> tuple[ExtraField, ...]:
        """The declared extra fields that are recorded."""
        return tuple((self.recorder or {}).get("extra_fields", ()))

    def actor_seeds(self, actor: int, generation: int) -> list[np.random.SeedSequence]:
        """Seeds of an actor's first reset, its exploration and its recorder; they do not depend on the process that hosts it."""
        root = np.random.SeedSequence(self.entropy, spawn_key=(*self.spawn_key, actor, generation))
        return root.spawn(3)

    def trial_seed(self, actor: int) -> np.random.SeedSequence:
        """Seed of an environment that is tried before the run."""
        return np.random.SeedSequence(self.entropy, spawn_key=(*self.spawn_key, _TRIAL_KEY, actor))

    def process_seed(self) -> np.random.SeedSequence:
        """Seed of the global random generators of a worker process."""
        return np.random.SeedSequence(self.entropy, spawn_key=(*self.spawn_key, _PROCESS_KEY, self.worker, self.generation))


@dataclass(frozen=True)
class Spaces:
    """Observation and action space of one environment, which must be equal for all actors of a pool.

    Attributes:
        observation_space: flat.
        raw_observation_space: as the environment has it.
    """

    observation_space: gym.spaces.Dict
    action_space: gym.Space[Any]
    raw_observation_space: gym.Space[Any] = field(compare=False)


def check_recorder(recorder: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the options unchanged; raise ValueError for an option that a recorder does not have."""
    unknown = sorted(set(recorder or ()) - set(RECORDER_OPTIONS))
    if unknown:
        raise ValueError(f"recorder has unknown options {unknown}; it takes {', '.join(RECORDER_OPTIONS)}")
    return recorder
