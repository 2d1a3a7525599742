"""The actors of a run: their pools, their spaces, and the phases in which the policy acts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch

from amago.compat.acting import as_actor
from amago.compat.vector_envs import as_pool
from amago.data.extras import check_extra_fields
from amago.envs import AMAGOEnv
from amago.envs.exploration import ExplorationWrapper
from amago.envs.pool import ActorPool, PoolEnv, make_pool
from amago.envs.pool.auto import ModeChoice, choose_mode
from amago.envs.pool.trial import random_state_kept, try_environment
from amago.envs.statistics import PhaseStatistics
from amago.run.checks import SettingsError, check_evaluation_spaces, unwritable
from amago.run.rollout import Rollout
from amago.run.settings import EnvMakers, ExperimentSettings

Kind = Literal["train", "val", "test"]
_STREAMS = {"train": 5, "val": 3, "test": 99}  # keys of the random streams; part of what a seed reproduces
_NEVER_SPLIT = 1e10  # from this traj_save_len on, trajectories are saved whole


class Spaces(NamedTuple):
    """What an agent is built for: flat observations, actions, and (reward, previous action); and the environments' own observations."""

    observation: gym.spaces.Dict
    action: gym.Space[Any]
    rl2: gym.spaces.Box
    raw_observation: gym.Space[Any]


class RunActors:
    """The actors of a run. The pools "train" and "val" are started when first needed.

    Args:
        settings: of the run.
        save_trajs_to: directory for the trajectories of training; None saves none.
        seed: of all actors. Each pool has a random stream of its own.
        device: of the policy.
        autocast: makes the context of mixed precision.

    Attributes:
        pools: the rollouts in the pools that were started, by "train" or "val".
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
        self.pools: dict[str, Rollout] = {}
        self._envs: dict[str, Any] = {}  # {"train" or "val": what steps all its environments}
        self._spaces: Spaces | None = None
        self._given: gym.spaces.Dict | None = None  # by `set_spaces`
        self._choice: ModeChoice | None = None

    def find_spaces(self) -> Spaces:
        """The spaces of the training actors, or, in a run that never collects, of one validation environment.

        Raises:
            TypeError: that environment is not an `AMAGOEnv`.
        """
        if self._spaces is not None:
            return self._spaces
        given = [kind for kind in ("train", "val") if kind in self._envs]
        if given or self.settings.collects:
            pool = (self.val if given == ["val"] else self.train).pool
            found = Spaces(pool.observation_space, pool.action_spec.space, pool.rl2_space, pool.raw_observation_space)
        else:
            found = spaces_of(self.settings.make_val_env, self.settings.env_trial_steps)
        self._spaces = found if self._given is None else _with(found, self._given)
        return self._spaces

    def set_spaces(self, rl2_space: gym.spaces.Dict) -> None:
        """Build the agent for other observations than those of the environments.

        Args:
            rl2_space: Dict {"obs": flat observations, "rl2": Box}.
        """
        self._given = rl2_space
        self._spaces = None if self._spaces is None else _with(self._spaces, rl2_space)

    @property
    def spaces(self) -> Spaces:
        """Those of `find_spaces`."""
        return self.find_spaces()

    def envs(self, kind: Literal["train", "val"]) -> Any:
        """The environments as one that steps them all: those of `use`, or a `PoolEnv`."""
        if kind not in self._envs:
            self._envs[kind] = PoolEnv((self.train if kind == "train" else self.val).pool)
        return self._envs[kind]

    def use(self, kind: Literal["train", "val"], envs: Any) -> None:
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

    def rollout_in(self, envs: Any) -> Rollout:
        """The rollout of "train" or "val", if these are its environments, else a new one in them."""
        pool = as_pool(envs)
        known = [rollout for kind, rollout in self.pools.items() if rollout.pool is pool or self._envs.get(kind) is envs]
        return known[0] if known else self._rollout(pool)

    def _rollout(self, pool: ActorPool) -> Rollout:
        return Rollout(pool, self.device, self.autocast, repeatable=self.settings.seed is not None)

    @property
    def mode(self) -> str:
        """The ``env_mode`` of the pools; that of "auto" is chosen once a run, so that it never changes in it."""
        if self.settings.env_mode != "auto":
            return self.settings.env_mode
        if self._choice is None:
            s = self.settings
            makers = s.make_train_env if s.collects else s.make_val_env
            maker = makers if callable(makers) else next(iter(makers))
            self._choice = choose_mode(maker, s.parallel_actors, s.env_workers, repeatable=s.seed is not None)
        return self._choice.mode

    @property
    def mode_text(self) -> str:
        """The mode for the summary, with the reason if it was chosen."""
        if self.settings.env_mode != "auto":
            return self.settings.env_mode
        mode = self.mode
        return f"auto: {mode}, {self._choice.reason}" if self._choice is not None else mode

    @property
    def train(self) -> Rollout:
        """The training actors, with exploration; they save their trajectories."""
        if "train" not in self.pools:
            s = self.settings
            exploration: Any = s.exploration_wrapper_type  # `resolve` has replaced a name by its class
            self.pools["train"] = self.start("train", s.make_train_env, exploration, self.save_trajs_to)
            self.pools["train"].reset()
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
        copies = 1 if mode == "already_vectorized" else s.parallel_actors
        pool = make_pool(
            [makers] * copies if callable(makers) else list(makers),
            env_mode=mode,
            parallel_actors=s.parallel_actors,
            workers=s.env_workers,
            step_timeout=s.env_step_timeout,
            max_env_restarts=s.max_env_restarts,
            exploration=exploration,
            recorder=None if save_trajs_to is None else recorder_settings(s, save_trajs_to),
            seed=np.random.SeedSequence((*self.seed, _STREAMS[kind])),
            mp_context=s.async_env_mp_context,
            trial_steps=s.env_trial_steps if kind == "train" and mode != "already_vectorized" else 0,
        )
        try:
            if kind != "train":
                check_evaluation_spaces(
                    f"make_{kind}_env",
                    pool.observation_space,
                    pool.action_spec.space,
                    self.spaces.observation,
                    self.spaces.action,
                )
        except BaseException:
            pool.close()
            raise
        return self._rollout(pool)

    def close(self) -> None:
        """Stop the pools "train" and "val"."""
        for rollout in self.pools.values():
            rollout.pool.close()
        self.pools, self._envs = {}, {}


def _with(spaces: Spaces, rl2_space: gym.spaces.Dict) -> Spaces:
    obs: Any = rl2_space["obs"]
    rl2: Any = rl2_space["rl2"]
    raw = spaces.raw_observation if obs == spaces.observation else obs
    return Spaces(obs, spaces.action, rl2, raw)


def recorder_settings(settings: ExperimentSettings, directory: str) -> dict[str, Any]:
    """How actors record their trajectories in a directory, for `amago.envs.pool.make_pool`."""
    return {
        "save_trajs_to": directory,
        "save_trajs_as": settings.save_trajs_as,
        "extra_fields": check_extra_fields(settings.extra_fields),
        "save_every": None if settings.traj_save_len >= _NEVER_SPLIT else int(settings.traj_save_len),
        "stagger": settings.stagger_traj_file_lengths,
    }


def spaces_of(makers: EnvMakers, trial_steps: int = 0) -> Spaces:
    """The spaces of the first environment, which is made for this and closed.

    Args:
        trial_steps: as in `amago.envs.make_pool`.

    Raises:
        TypeError: it is not an `AMAGOEnv`.
        EnvironmentMistake: it was tried, and raised an error of type or shape.
    """
    env = (makers if callable(makers) else next(iter(makers)))()
    if not isinstance(env, AMAGOEnv):
        raise TypeError(
            f"make_val_env must return an AMAGOEnv, but returned {type(env).__name__}: wrap it in amago.envs.AMAGOEnv"
        )
    spaces = Spaces(env.observation_space, env.action_spec.space, env.rl2_space, env.raw_observation_space)
    try:
        if trial_steps and not env.vectorized:
            with random_state_kept():
                try_environment(env, env, trial_steps, np.random.SeedSequence(0))
    finally:
        with contextlib.suppress(Exception, SystemExit):
            env.close()
    return spaces


def interact(
    rollout: Rollout,
    policy: Any,
    timesteps: int,
    sample: bool,
    on_step: Callable[[int], Any],
    episodes: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    render: bool = False,
    save_on_done: bool = False,
) -> tuple[int, PhaseStatistics]:
    """Let a policy act in a pool; see `Rollout.run_phase`.

    Args:
        policy: an agent, or any module that acts (`amago.compat.acting`).
        on_step: called after each step with the number of environment steps taken in it.
        render: draw each step.
        save_on_done: save trajectories as soon as a rollout ends.

    Returns:
        steps taken by each actor, and the statistics of the phase.
    """

    def after_step(steps: int) -> None:
        on_step(steps)
        if render:
            rollout.pool.render()
        if save_on_done and rollout.pool.resets.any():
            rollout.pool.flush()

    return rollout.run_phase(as_actor(policy), timesteps, sample, episodes, after_step, should_stop)
