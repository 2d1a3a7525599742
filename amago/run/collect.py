"""The actors of a run: their pools, their spaces, and the phases in which the policy acts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np
import torch

from amago.agent import BaseAgent
from amago.compat.envs import as_pool
from amago.compat.parts import as_actor
from amago.data.extras import check_extra_fields
from amago.envs import AMAGOEnv
from amago.envs.pool import ActorPool, PoolEnv, make_pool
from amago.envs.pool.base import Spaces
from amago.envs.statistics import PhaseStatistics, ReturnHistory, SpecialMetricHistory
from amago.run.callbacks import CallbackList
from amago.run.console import COLLECT, EVALUATE, Console
from amago.run.evaluate import mean_length, warn_if_too_short
from amago.run.group import Ranks, Signals
from amago.run.metric_names import STEPS_PER_SECOND
from amago.run.metrics import RunLog
from amago.run.process import SharedProcess
from amago.run.rollout import Rollout, shares
from amago.run.settings import EnvMakers, ExperimentSettings, SettingsError, unwritable
from amago.run.state import Position
from amago.spaces import space_differences

Kind = Literal["train", "val", "test"]
Histories = tuple[list[ReturnHistory], list[SpecialMetricHistory]]  # with one entry an environment each
_STREAMS = {"train": 5, "val": 3, "test": 99}  # keys of the random streams; changing one changes the results of a seed
_NEVER_SPLIT = 1e10  # from this traj_save_len on, trajectories are saved whole


@dataclass
class ActingPhase:
    """A phase in which the policy acts, by one call of `Experiment.interact` or by several."""

    title: str  # on the console and for callbacks
    stoppable: bool = False  # a signal ends it early
    evaluation: bool = False  # as of `Rollout.run_phase`
    taken: int = 0  # steps of each actor so far
    statistics: PhaseStatistics = field(default_factory=PhaseStatistics)  # of the rollouts that ended so far


class ActingRun(Protocol):
    """The fields of `amago.Experiment` that its actors use, and the methods that they call because a subclass may override them."""

    policy: BaseAgent
    DEVICE: torch.device
    group: Ranks
    signals: Signals
    console: Console
    moments: CallbackList
    position: Position
    run_log: RunLog

    @property
    def env_steps(self) -> int: ...
    def caster(self) -> AbstractContextManager[object]: ...
    def acting_weights(self) -> AbstractContextManager[object]: ...
    def log(self, metrics_dict: Mapping[str, float], key: str) -> None: ...
    def policy_metrics(
        self, returns: Iterable[ReturnHistory], specials: Iterable[SpecialMetricHistory]
    ) -> dict[str, float]: ...
    def interact(self, envs: object, timesteps: int, *args: Any, **options: Any) -> tuple[Any, Histories]: ...


class RunActors:
    """The actors of a run, and the phases in which the policy acts. The pools "train" and "val" are started when first needed; each has a
    separate random stream.

    Attributes:
        pools: the rollouts in the pools that were started, by "train" or "val".
        exploration: describes it, once the training actors were started.
        now: the phase that has called ``interact``.
        statistics: of the phase of collection or evaluation that has ended last; None before.
        restarts, saved: environments that were replaced, and trajectories that were saved, at least, in this process.
    """

    def __init__(self, run: ActingRun, settings: ExperimentSettings, save_trajs_to: str | None, seed: tuple[int, ...]):
        self.run, self.settings, self.save_trajs_to, self.seed = run, settings, save_trajs_to, seed
        self.process = SharedProcess()
        self.pools: dict[str, Rollout] = {}
        self.exploration = "none"
        self.now: ActingPhase | None = None
        self.statistics: PhaseStatistics | None = None
        self.restarts = self.saved = 0
        self._envs: dict[str, Any] = {}  # {"train" or "val": environment that steps all actors}
        self._spaces: Spaces | None = None
        self._given: gym.spaces.Dict | None = None  # by `rl2_space`

    @property
    def spaces(self) -> Spaces:
        """The spaces of the training actors, or, in a run that never collects, of one validation environment.

        Raises:
            TypeError: that environment is not an `AMAGOEnv`.
        """
        if self._spaces is None:
            given = [kind for kind in ("train", "val") if kind in self._envs]
            if given or self.settings.collects:
                self._spaces = (self.val if given == ["val"] else self.train).pool.spaces
            else:
                with self.process.environments():
                    self._spaces = _spaces_of_first(self.settings.make_val_env)
        if self._given is None:
            return self._spaces
        obs, rl2 = self._given["obs"], self._given["rl2"]
        assert isinstance(obs, gym.spaces.Dict) and isinstance(rl2, gym.spaces.Box)  # noqa: PT018
        raw = self._spaces.raw_observation if obs == self._spaces.observation else obs
        return Spaces(obs, self._spaces.action, rl2, raw)

    @property
    def rl2_space(self) -> gym.spaces.Dict:
        """Dict {"obs": flat observations, "rl2": Box}. It may be set, to build the agent for other observations than the environments'."""
        return gym.spaces.Dict({"obs": self.spaces.observation, "rl2": self.spaces.rl2})

    @rl2_space.setter
    def rl2_space(self, rl2_space: gym.spaces.Dict) -> None:
        self._given = rl2_space

    def describe(self) -> str:
        """Describe the environments, for `amago.Experiment.summary`."""
        shapes = ", ".join(f"{k} {v.shape}" for k, v in self.spaces.observation.spaces.items())
        return f"{self.settings.parallel_actors} actors ({self.mode}); observations: {shapes}; actions: {self.spaces.action}"

    def envs(self, kind: Literal["train", "val"]) -> Any:
        """One environment that steps all environments: the one given to `use`, or a `PoolEnv`."""
        if kind not in self._envs:
            self._envs[kind] = PoolEnv((self.train if kind == "train" else self.val).pool)
        return self._envs[kind]

    def use(self, kind: Literal["train", "val"], envs: object) -> None:
        """Act in environments that were made elsewhere: a pool of actors, a `PoolEnv`, or a vector environment of `SequenceWrapper`. They
        are closed with the others."""
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
        autocast = contextlib.nullcontext if self.settings.mixed_precision == "no" else self.run.caster
        s = self.settings
        return Rollout(pool, self.run.DEVICE, autocast, s.seed is not None, process=self.process, cuda_graphs=s.cuda_graphs)

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
            rollout = self.pools["train"] = self.start("train", self.settings.make_train_env, self.save_trajs_to)
            rollout.reset()
            if self.settings.exploration_wrapper_type is not None:
                self.exploration = str(rollout.pool.call("describe_schedule")[0])
        return self.pools["train"]

    @property
    def val(self) -> Rollout:
        """The validation actors."""
        if "val" not in self.pools:
            self.pools["val"] = self.start("val", self.settings.make_val_env)
            self.pools["val"].reset()
        return self.pools["val"]

    def start(self, kind: Kind, makers: EnvMakers, save_trajs_to: str | None = None, env_mode: str | None = None) -> Rollout:
        """Start a pool of actors, not yet reset, which the caller closes; "train" explores. ``env_mode`` replaces `mode`.

        Raises:
            SettingsError: environments for evaluation have other spaces than the agent, or ``save_trajs_to`` cannot be written to.
        """
        s, mode = self.settings, env_mode or self.mode
        if save_trajs_to is not None:
            for problem in unwritable("save_trajs_to" if kind == "test" else "dset_root", save_trajs_to, "trajectories"):
                raise SettingsError(problem)
        copies, recorder = 1 if mode == "already_vectorized" else s.parallel_actors, None
        exploration: Any = s.exploration_wrapper_type if kind == "train" else None  # `resolve` has replaced a name by its class
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
                own, found = self.spaces, pool.spaces
                if differences := space_differences((own.observation, own.action), (found.observation, found.action)):
                    text = "; ".join(f"{d.name}: {d.second}, not {d.first}" for d in differences)
                    raise SettingsError(
                        f"make_{kind}_env makes environments that the agent was not built for ({text}): give both the same spaces"
                    )
        except BaseException:
            pool.close()
            raise
        return self._rollout(pool)

    @property
    def hidden_state(self) -> Any:
        """The policy's memory of the training actors; None: empty."""
        return self.pools["train"].hidden_state if "train" in self.pools else None

    @hidden_state.setter
    def hidden_state(self, memory: object) -> None:
        if memory is not None:
            self.train.take_hidden_state(self.run.policy, memory)
        elif "train" in self.pools:  # there may be no agent yet
            self.train.memory = None

    def interact(
        self,
        envs: object,
        timesteps: int,
        hidden_state: object,
        render: bool,
        save_on_done: bool,
        episodes: int | None,
        sample: bool,
    ) -> tuple[Any, Histories]:
        """`amago.Experiment.interact`."""
        e, rollout = self.run, self.rollout_in(envs)
        agent, phase, ended = as_actor(e.policy), self.now or ActingPhase("interact"), False
        rollout.take_hidden_state(agent, hidden_state)

        def after_step(steps: int) -> None:
            nonlocal ended
            progress.update(steps)
            ended = e.moments.step(e, steps, phase.title)
            if render:
                rollout.pool.render()
            if save_on_done and rollout.pool.resets.any():
                rollout.pool.flush()

        stop = (lambda: ended or e.signals.requested is not None) if phase.stoppable else None
        with e.console.phase(phase.title, timesteps * rollout.pool.num_actors, "step") as progress, e.acting_weights():
            taken, stats = rollout.run_phase(agent, timesteps, sample, episodes, after_step, stop, phase.evaluation)
        phase.taken += taken
        phase.statistics.merge(stats)
        if self.now is None:  # no method of this class counts what happened
            if rollout is self.pools.get("train"):
                e.position.count(self.of_all_ranks(stats).frames)
            self.log_faults(stats, "test")
        return rollout.hidden_state, stats.by_actor(rollout.pool.num_actors)

    def collect(self) -> None:
        """`amago.Experiment.collect_new_training_data`."""
        e, s, position, every = self.run, self.settings, self.run.position, self.settings.force_reset_train_envs_every
        if position.has_collected:  # another call in this epoch, or a loop of one's own
            position.collected = 0
        steps = (s.train_timesteps_per_epoch or 0) - position.collected
        if s.total_steps is not None:
            steps = min(steps, -((e.env_steps - int(s.total_steps)) // (int(s.parallel_actors) * e.group.count)))
        if steps <= 0:
            return
        rollout, phase, sample = self.train, ActingPhase(COLLECT, stoppable=True), s.sample_actions_train
        if every and position.epoch and position.epoch % every == 0 and position.collected == 0:
            rollout.reset()
        memory = self.hidden_state
        self.hidden_state, metrics, stats = self.act(phase, "rollout", self.envs("train"), steps, sample, hidden_state=memory)
        self.saved += rollout.pool.flush() + len(stats.episodes)  # before ranks meet, so that each finds the files of all
        position.collected, position.has_collected = e.group.smallest(position.collected + phase.taken), True
        metrics |= {name: fmean(values) for name, values in stats.exploration.items()}
        speeds = e.run_log.speeds = {STEPS_PER_SECOND: e.console.rate(COLLECT)}
        e.log(metrics, "rollout")
        self.statistics = stats
        if not e.signals:
            e.moments.call("on_collect_epoch_end", e, {**metrics, **speeds})

    def evaluate(self) -> None:
        """`amago.Experiment.evaluate_val`."""
        e, s = self.run, self.settings
        self.val.reset()
        phase, sample = ActingPhase(EVALUATE, stoppable=True, evaluation=True), s.sample_actions and s.sample_actions_val
        steps, episodes = s.val_timesteps_per_epoch, self.share(s.val_episodes)
        _, metrics, stats = self.act(phase, "val", self.envs("val"), steps, sample, episodes=episodes)
        e.signals.check()  # the evaluation runs again after a resume
        self.statistics = stats
        warn_if_too_short(metrics, steps, s.val_episodes)
        e.log(metrics, "val")
        e.moments.call("on_validation_end", e, metrics)

    def act(
        self, phase: ActingPhase, key: str, envs: object, timesteps: int, sample: bool, **options: Any
    ) -> tuple[Any, dict[str, float], PhaseStatistics]:
        """Act for a phase, with ``options`` of ``interact``, and log its faults; of several ranks, all must call this together.

        Args:
            key: section of the log; "rollout" counts the steps as collected.

        Returns:
            the memory, the metrics over all processes ({} if no rollout ended), and the statistics, as of `of_all_ranks`.
        """
        self.now = phase
        try:  # an override may lack the argument ``sample``
            memory, histories = self.run.interact(envs, timesteps, **options, **({} if sample else {"sample": False}))
        finally:
            self.now = None
        stats = self.of_all_ranks(phase.statistics)
        if key == "rollout":
            self.run.position.count(stats.frames)
        self.log_faults(stats, key)
        metrics = self.run.policy_metrics(*histories)
        lengths = mean_length(self.run.group.gather([[episode.length for episode in stats.episodes]]))
        if metrics:
            metrics.update(lengths)
        return memory, metrics, stats

    def test(
        self,
        makers: EnvMakers,
        timesteps: int,
        render: bool,
        save_trajs_to: str | None,
        episodes: int | None,
    ) -> dict[str, float]:
        """`amago.Experiment.evaluate_test`."""
        s, mode = self.settings, "sync" if render and self.settings.env_mode in ("async", "auto") else None
        rollout = self.start("test", makers, save_trajs_to, mode)
        try:
            rollout.reset()
            phase, sample = ActingPhase("test", evaluation=True), s.sample_actions and s.sample_actions_val
            options: dict[str, Any] = {"episodes": self.share(episodes), "render": render}
            _, metrics, _ = self.act(phase, "test", PoolEnv(rollout.pool), timesteps, sample, **options)
            rollout.pool.flush()
        finally:
            rollout.close()
        warn_if_too_short(metrics, timesteps, episodes, "timesteps")
        self.run.log(metrics, "test")
        return metrics

    def of_all_ranks(self, stats: PhaseStatistics) -> PhaseStatistics:
        """The statistics of a phase with the steps and faults of all ranks, and the rollouts of this one. Ranks end a phase at different
        times: here they wait for each other, and decide whether to stop."""
        self.run.signals.decide()
        if self.run.group.count == 1:
            return stats
        total = PhaseStatistics(stats.episodes, exploration=stats.exploration)
        for part in self.run.group.gather([PhaseStatistics([], stats.frames, stats.restarts, stats.dropped)]):
            total.merge(part)
        return total

    def log_faults(self, stats: PhaseStatistics, key: str) -> None:
        """Count the environments that were replaced, and log them in a section, if there are any."""
        self.restarts += stats.restarts
        if stats.restarts:
            self.run.log({"Restarted Environments": stats.restarts, "Dropped Rollouts": stats.dropped}, key)

    def share(self, episodes: int | None) -> int | None:
        """This process's share of a number of rollouts."""
        return None if episodes is None else shares(episodes, self.run.group.count)[self.run.group.index]

    def close(self) -> None:
        """Stop the pools "train" and "val"."""
        for rollout in self.pools.values():
            rollout.close()
        self.pools, self._envs = {}, {}


def _spaces_of_first(makers: EnvMakers) -> Spaces:
    """The spaces of the first environment, which is made for this and closed."""
    env = (makers if callable(makers) else next(iter(makers)))()
    if not isinstance(env, AMAGOEnv):
        raise TypeError(
            f"make_val_env must return an AMAGOEnv, but returned {type(env).__name__}: wrap it in amago.envs.AMAGOEnv"
        )
    spaces = Spaces.of(env)
    with contextlib.suppress(Exception, SystemExit):
        env.close()
    return spaces
