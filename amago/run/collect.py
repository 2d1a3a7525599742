"""The actors of a run: their pools, their spaces, and the phases in which the policy acts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch

from amago.compat.envs import as_pool
from amago.data.extras import check_extra_fields
from amago.envs import AMAGOEnv
from amago.envs.exploration import ExplorationWrapper
from amago.envs.pool import ActorPool, PoolEnv, make_pool
from amago.envs.statistics import PhaseStatistics
from amago.run.checks import SettingsError, check_evaluation_spaces, unwritable
from amago.run.process import SharedProcess
from amago.run.rollout import Rollout
from amago.run.settings import EnvMakers, ExperimentSettings

Kind = Literal["train", "val", "test"]
_STREAMS = {"train": 5, "val": 3, "test": 99}  # keys of the random streams; changing one changes the results of a seed
_NEVER_SPLIT = 1e10  # from this traj_save_len on, trajectories are saved whole


class Spaces(NamedTuple):
    """The spaces of an agent (flat observations, actions, reward with previous action), and the environments' own
    observations."""

    observation: gym.spaces.Dict
    action: gym.Space[Any]
    rl2: gym.spaces.Box
    raw_observation: gym.Space[Any]


class RunActors:
    """The actors of a run. The pools "train" and "val" are started when first needed.

    Args:
        settings: of the run.
        save_trajs_to: directory for the trajectories of training; None saves none.
        seed: of all actors. Each pool has a separate random stream.
        device: of the policy.
        autocast: makes the context of mixed precision.

    Attributes:
        pools: the rollouts in the pools that were started, by "train" or "val".
        exploration: describes it, once the training actors were started.
    """

    def __init__(
        self,
        settings: ExperimentSettings,
        save_trajs_to: str | None,
        seed: tuple[int, ...],
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
    ):
        self.settings, self.save_trajs_to, self.seed = settings, save_trajs_to, seed
        self.device, self.autocast = device, autocast
        self.process = SharedProcess()
        self.pools: dict[str, Rollout] = {}
        self.exploration = "none"
        self._envs: dict[str, Any] = {}  # {"train" or "val": environment that steps all actors}
        self._spaces: Spaces | None = None
        self._given: gym.spaces.Dict | None = None  # by `set_spaces`

    @property
    def spaces(self) -> Spaces:
        """The spaces of the training actors, or, in a run that never collects, of one validation environment.

        Raises:
            TypeError: that environment is not an `AMAGOEnv`.
        """
        if self._spaces is None:
            given = [kind for kind in ("train", "val") if kind in self._envs]
            if given or self.settings.collects:
                found = _spaces_of((self.val if given == ["val"] else self.train).pool)
            else:
                with self.process.environments():
                    found = _spaces_of_first(self.settings.make_val_env)
            self._spaces = found if self._given is None else _with(found, self._given)
        return self._spaces

    def set_spaces(self, rl2_space: gym.spaces.Dict) -> None:
        """Build the agent for other observations than the environments'.

        Args:
            rl2_space: Dict {"obs": flat observations, "rl2": Box}.
        """
        self._given = rl2_space
        self._spaces = None if self._spaces is None else _with(self._spaces, rl2_space)

    def envs(self, kind: Literal["train", "val"]) -> Any:
        """The environments as one that steps them all: the environment given to `use`, or a `PoolEnv`."""
        if kind not in self._envs:
            self._envs[kind] = PoolEnv((self.train if kind == "train" else self.val).pool)
        return self._envs[kind]

    def use(self, kind: Literal["train", "val"], envs: object) -> None:
        """Act in environments that were made elsewhere; they are closed with the others.

        Args:
            envs: a pool of actors, a `PoolEnv`, or a vector environment of `SequenceWrapper`.
        """
        self._envs[kind] = envs
        self._spaces = self._spaces if kind in self.pools else None
        before = self.pools.pop(kind, None)
        pool = as_pool(envs)
        if before is not None and before.pool is not pool:
            before.pool.close()
        self.pools[kind] = self._rollout(pool)

    def drop(self, kind: Literal["train", "val"]) -> None:
        """Close the environments; others are started when they are needed."""
        envs, rollout = self._envs.pop(kind, None), self.pools.pop(kind, None)
        if rollout is not None:
            rollout.close()
        elif envs is not None:
            envs.close()

    def rollout_in(self, envs: object) -> Rollout:
        """The rollout of "train" or "val", if these are its environments, else a new one in them."""
        pool = as_pool(envs)
        known = [rollout for kind, rollout in self.pools.items() if rollout.pool is pool or self._envs.get(kind) is envs]
        return known[0] if known else self._rollout(pool)

    def _rollout(self, pool: ActorPool) -> Rollout:
        # entered in each step where environments share the process, and made anew each time
        autocast = contextlib.nullcontext if self.settings.mixed_precision == "no" else self.autocast
        return Rollout(pool, self.device, autocast, repeatable=self.settings.seed is not None, process=self.process)

    @property
    def mode(self) -> str:
        """The ``env_mode`` of the pools; "auto" is "sync" in a seeded run, which must not depend on the number of cores, else
        "async"."""
        if self.settings.env_mode != "auto":
            return self.settings.env_mode
        return "async" if self.settings.seed is None else "sync"

    @property
    def train(self) -> Rollout:
        """The training actors, with exploration; they save their trajectories."""
        if "train" not in self.pools:
            s = self.settings
            exploration: Any = s.exploration_wrapper_type  # `resolve` has replaced a name by its class
            self.pools["train"] = self.start("train", s.make_train_env, exploration, self.save_trajs_to)
            self.pools["train"].reset()
            if exploration is not None:
                self.exploration = str(self.pools["train"].pool.call("describe_schedule")[0])
        return self.pools["train"]

    @property
    def val(self) -> Rollout:
        """The validation actors."""
        if "val" not in self.pools:
            self.pools["val"] = self.start("val", self.settings.make_val_env)
            self.pools["val"].reset()
        return self.pools["val"]

    def start(
        self,
        kind: Kind,
        makers: EnvMakers,
        exploration: type[ExplorationWrapper] | None = None,
        save_trajs_to: str | None = None,
        env_mode: str | None = None,
    ) -> Rollout:
        """Start a pool of actors, not yet reset. The caller closes it.

        Args:
            kind: of the random stream.
            makers: as ``make_train_env`` of `ExperimentSettings`.
            exploration: wraps the environments.
            save_trajs_to: directory for trajectories; None saves none.
            env_mode: instead of `mode`.

        Raises:
            SettingsError: environments for evaluation have other spaces than the agent, or ``save_trajs_to`` cannot be written to.
        """
        s, mode = self.settings, env_mode or self.mode
        if save_trajs_to is not None:
            for problem in unwritable("save_trajs_to" if kind == "test" else "dset_root", save_trajs_to, "trajectories"):
                raise SettingsError(problem)
        copies, recorder = 1 if mode == "already_vectorized" else s.parallel_actors, None
        if save_trajs_to is not None:
            recorder = {
                "save_trajs_to": os.path.abspath(save_trajs_to), "save_trajs_as": s.save_trajs_as,
                "extra_fields": check_extra_fields(s.extra_fields), "stagger": s.stagger_traj_file_lengths,
                "save_every": None if s.traj_save_len >= _NEVER_SPLIT else int(s.traj_save_len),
            }  # fmt: skip
        with self.process.environments() if mode != "async" else contextlib.nullcontext():
            pool = make_pool(
                [makers] * copies if callable(makers) else list(makers),
                env_mode=mode,
                parallel_actors=s.parallel_actors,
                workers=s.env_workers,
                step_timeout=s.env_step_timeout,
                max_env_restarts=s.max_env_restarts,
                exploration=exploration,
                run=s.exploration_plan,
                recorder=recorder,
                seed=np.random.SeedSequence((*self.seed, _STREAMS[kind])),
                mp_context=s.async_env_mp_context,
            )
        try:
            if kind != "train":
                own = self.spaces
                check_evaluation_spaces(
                    f"make_{kind}_env", pool.observation_space, pool.action_spec.space, own.observation, own.action
                )
        except BaseException:
            pool.close()
            raise
        return self._rollout(pool)

    def close(self) -> None:
        """Stop the pools "train" and "val"."""
        for rollout in self.pools.values():
            rollout.close()
        self.pools, self._envs = {}, {}


def _with(spaces: Spaces, rl2_space: gym.spaces.Dict) -> Spaces:
    obs: Any = rl2_space["obs"]
    rl2: Any = rl2_space["rl2"]
    raw = spaces.raw_observation if obs == spaces.observation else obs
    return Spaces(obs, spaces.action, rl2, raw)


def _spaces_of(source: ActorPool | AMAGOEnv) -> Spaces:
    return Spaces(source.observation_space, source.action_spec.space, source.rl2_space, source.raw_observation_space)


def _spaces_of_first(makers: EnvMakers) -> Spaces:
    """The spaces of the first environment, which is made for this and closed."""
    env = (makers if callable(makers) else next(iter(makers)))()
    if not isinstance(env, AMAGOEnv):
        raise TypeError(
            f"make_val_env must return an AMAGOEnv, but returned {type(env).__name__}: wrap it in amago.envs.AMAGOEnv"
        )
    spaces = _spaces_of(env)
    with contextlib.suppress(Exception, SystemExit):
        env.close()
    return spaces


@dataclass
class ActingPhase:
    """A phase in which the policy acts, by one call of `Experiment.interact` or by several.

    Attributes:
        title: of the phase, on the console and for callbacks.
        stoppable: a signal ends it early.
        evaluation: as of `Rollout.run_phase`.
        taken: steps of each actor so far.
        statistics: of the rollouts that ended so far.
    """

    title: str
    stoppable: bool = False
    evaluation: bool = False
    taken: int = 0
    statistics: PhaseStatistics = field(default_factory=PhaseStatistics)

    def add(self, taken: int, statistics: PhaseStatistics) -> None:
        """Count one call."""
        self.taken += taken
        self.statistics.merge(statistics)
