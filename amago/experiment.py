"""`Experiment`: build, train and evaluate an agent. The loop is `Experiment.learn`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gin

from amago.agent import BaseAgent
from amago.compat.acting import as_actor
from amago.compat.datasets import collection_ended
from amago.envs.statistics import PhaseStatistics, ReturnHistory, SpecialMetricHistory
from amago.loading import SequenceLoader
from amago.nets.ranks import joint_batch
from amago.policy import acting_by, find_run, load_agent_weights, write_policy_spec
from amago.run.allocator import FreedMemory
from amago.run.batch_memory import check_batch_memory
from amago.run.building import BuiltRun
from amago.run.checks import check_buffer, warn_if_nothing_saved, warn_if_nothing_to_do
from amago.run.collect import interact
from amago.run.evaluate import warn_if_too_short
from amago.run.own_parts import warn_of_faulty_parts
from amago.run.pace import COLLECT, EVALUATE, TRAIN
from amago.run.rollout import Rollout
from amago.run.settings import EnvMakers
from amago.run.signals import Stopped


@gin.configurable
@dataclass
class Experiment(BuiltRun):
    """Build, train and evaluate an agent.

    ``start()`` builds everything and ``learn()`` runs the epochs. The arguments are those of
    `amago.run.settings.ExperimentSettings`. Losses and updates are in `amago.run.learner.Learner`, counts and log in
    `amago.run.logged.LoggedRun`, the claim to the run's directory in `amago.run.claimed.ClaimedRun`, checkpoints in
    `amago.run.persistence.PersistentRun`, and the parts that ``start()`` builds in `amago.run.building.BuiltRun`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._trajs_saved = 0  # at least, by this process
        self._freed_memory = FreedMemory()

    # ---- start ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Check the settings; build environments, data set, model, optimizer and loggers; resume as ``resume`` says.

        Calls `init_dsets`, `init_envs`, `init_dloaders`, `init_model`, `init_checkpoints`, `init_logger` and `summary`, in this order.

        Raises:
            SettingsError: lists all wrong fields, before any process is started; or says that the buffer holds another run, that the
                directory is being written (`amago.run.ownership`), or what cannot change on resume (`amago.run.changes`).
            CheckpointError: there is no training state to resume from, or ``init_from`` does not fit.
        """
        if self._started:
            raise RuntimeError("start() was called before; build a new Experiment")
        self._prepared = False  # settings may have changed since parts were built
        self._prepare()
        try:
            resumed = self._claim()
            self._init_seeds(resumed)
            dataset = self.init_dsets()
            env_summary = self.init_envs()
            self._replace_earlier_run()
            check_buffer(dataset, self._actors.spaces.observation, self._actors.spaces.action)
            self._renew_loader()
            self.init_model()
            if self.init_from is not None and resumed is None:
                load_agent_weights(self.policy, find_run(str(self.init_from))[1])
            self.init_checkpoints()
            if self.DEVICE.type == "cpu" and self.train_batches_per_epoch:
                self._freed_memory.keep()
            self._open_log()
            self._started = True
            self._resume()
            self.print(self._resume_note(resumed))
            self._role.started(self)
            self._callbacks.start(self)
        except BaseException:
            self.close()
            raise
        if self.verbose and self.accelerator.is_main_process:
            self.summary(env_summary=env_summary)

    def init_checkpoints(self) -> None:
        """Create ``ckpts/training_states``, ``ckpts/policy_weights`` and ``ckpts/latest`` in ``ckpt_dir``, and describe the policy there."""
        self._prepare()
        if not hasattr(self, "checkpoints"):
            self._claim()
        policy: Any = getattr(self, "policy_aclr", None) and self.policy
        if self.accelerator.is_main_process and isinstance(policy, BaseAgent):
            warn_of_faulty_parts(policy)
            if self._refusal is None:
                raw = self._actors.spaces.raw_observation
                self.checkpoints.description = write_policy_spec(self.run_dir, policy, raw)

    # ---- the loop -------------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Run the remaining epochs.

        SIGINT, SIGTERM and SIGUSR1 finish the current step, save a training state and exit with code 128 + signal
        (130, 143, 138); ``resume="auto"`` continues from there. Further signals change nothing. ``should_stop``, which callbacks set, ends
        it when the epoch is finished.
        A run that was to train and has made no update raises `amago.run.waiting.NothingTrainedError`.
        """
        self._require_start("learn()")
        warn_if_nothing_to_do(self)
        self._open_log()
        self._resume()
        self._role.learns(self)
        with self._callbacks.told_of_exceptions(self), self._stop:
            with self._console.learning(self):
                while self.epoch < self.epochs and not self._stop.decide() and not self.should_stop:
                    self._learn_epoch()
            if self._stop:
                self._leave()
        if self._stop.decide():  # a signal between the last check and the removal of the handlers
            self._leave()
        self._role.ended(self, "finished")
        with self._callbacks.told_of_exceptions(self):
            self._check_trained()
            self._callbacks.call("on_end", self)

    def _learn_epoch(self) -> None:
        """Evaluate, collect, train, save and publish; after a signal, return as soon as possible."""
        self._epoch_is_over = False
        begins = self._collected == self._trained == 0
        if self.always_load_latest:
            self.read_latest_policy()
            self._role.policy_read(self)
        if begins and self._role.evaluates(self.epoch, self.val_interval, self.checkpoints.version):
            self.evaluate_val()
        if self._stop:
            return
        collects = self.train_timesteps_per_epoch is not None and self.epoch >= self.start_collecting_at_epoch
        if collects:
            self.collect_new_training_data()
        self.log(collection_ended(self._data, self) | self._role.metrics(), "dataset")
        if collects and self.train_timesteps_per_epoch and not self._stop:
            phases = self.epoch + 1 - max(0, self.start_collecting_at_epoch)
            warn_if_nothing_saved(self._data, phases, self.train_timesteps_per_epoch or 0, self.max_seq_len, self._trajs_saved)
        if not self._stop and self.epoch >= self.start_learning_at_epoch and self._wait_for_data():
            self._renew_loader()
            self.train_epoch()
            self._role.busy(self)
            self._ever_trained = True
        if self._stop:
            return
        if self._trained and (metrics := self._data.on_end_of_training()):
            self.log(metrics, "dataset")
        self._begin_epoch()
        finished, self._epoch = self._epoch, self._epoch + 1  # callbacks count the finished epochs
        self._finish_epoch()
        self._epoch, self._epoch_is_over = finished, True  # while files are named by its number
        last = finished + 1 == self.epochs or self.should_stop
        if self.ckpt_interval and (finished % self.ckpt_interval == 0 or last):
            self.save_checkpoint()
        if self.always_save_latest:
            self.write_latest_policy()
        self._epoch, self._epoch_is_over = finished + 1, False

    def _leave(self) -> None:
        """Save and exit, after a signal."""
        self._role.busy(self)
        self._saved = False
        if self.ckpt_interval:
            self.save_checkpoint()
        if self.always_save_latest:
            self.write_latest_policy()
        code = self._stop.exit_code
        saved = "saved; continue with resume='auto'" if self._saved else "nothing was saved"
        self.print(f"stopped by a signal in epoch {self.epoch}; {saved} (exit code {code})")
        self._role.ended(self, "stopped")
        try:
            raise Stopped(code)
        except Stopped as stopped:
            self._callbacks.call("on_exception", self, stopped)
            raise
        finally:
            self.close()

    def collect_new_training_data(self) -> None:
        """Step each training actor ``train_timesteps_per_epoch`` times, less the steps of a resumed epoch."""
        self._require_start("collect_new_training_data()")
        if self._has_collected:  # another call in this epoch, or a loop of one's own
            self._collected = 0
        steps, every = (self.train_timesteps_per_epoch or 0) - self._collected, self.force_reset_train_envs_every
        if steps <= 0:
            return
        rollout = self._actors.train
        if every and self.epoch and self.epoch % every == 0 and self._collected == 0:
            rollout.reset()
        taken, stats = self._interact(rollout, steps, COLLECT, self.sample_actions_train, stoppable=True)
        stats = self._of_all_ranks(stats)
        self._collected = self._ranks.smallest(self._collected + taken)
        self._has_collected = True
        self._count_frames(stats)
        self._log_faults(stats, "rollout")
        self._trajs_saved += rollout.pool.flush() + len(stats.episodes)
        self._end_collection(stats, finished=not self._stop)
        self._role.report(self, "rollout", stats)

    def train_epoch(self) -> None:
        """Train on ``train_batches_per_epoch`` batches, less the batches of a resumed epoch."""
        self._require_start("train_epoch()")
        loader, count = self._loader, self.train_batches_per_epoch - self._trained
        if isinstance(loader, SequenceLoader):
            check_batch_memory(self.policy, loader, self.max_seq_len)
        else:
            count = loader.count(count, self.train_batches_per_epoch)
        self.policy_aclr.train()
        with self._phase(TRAIN, count, "batch") as phase, joint_batch(self._ranks.count):
            for batch in loader.batches(count):
                if not self._role.may_update(self, self._stop):
                    break
                log_step = bool(self.log_interval) and self._trained % self.log_interval == 0
                self._means.add(self.train_step(batch, log_step))
                self._trained += 1
                phase.update(1)
                if log_step and self._trained > 1:
                    self._log_training(phase)
                if self._stop.decide():
                    break
            self._log_training(phase)
        self._end_training(phase, finished=not self._stop)

    # ---- interaction and evaluation -------------------------------------------------------------------------------------

    def interact(
        self,
        envs: Any,
        timesteps: int,
        hidden_state: Any = None,
        render: bool = False,
        save_on_done: bool = False,
        episodes: int | None = None,
        sample: bool = True,
    ) -> tuple[Any, tuple[list[ReturnHistory], list[SpecialMetricHistory]]]:
        """Let the policy act in several environments, which must have been reset.

        Args:
            envs: ``train_envs``, whose steps count as collected, in all ranks; ``val_envs``, a pool of `amago.envs.make_pool`, or a vector
                environment of `SequenceWrapper`.
            timesteps: steps of each environment.
            hidden_state: the policy's memory, as returned by an earlier call, or a list with that of each of the groups of a pool; None:
                empty memory.
            render: draw each step.
            save_on_done: save trajectories as soon as a rollout ends.
            episodes: take exactly so many rollouts, divided equally among the actors (`Rollout.run_phase`), or fewer if
                ``timesteps`` are over first.
            sample: draw actions from the policy; else take its mode.

        Returns:
            the memory, to go on with, and a pair of lists with one entry an environment: returns, and the environments' own metrics, of
            the rollouts that ended.
        """
        self._require_start("interact()", writes=False)
        rollout = self._actors.rollout_in(envs)
        rollout.take_hidden_state(as_actor(self.policy), hidden_state)
        options: dict[str, Any] = {"render": render, "save_on_done": save_on_done, "episodes": episodes}
        _, stats = self._interact(rollout, timesteps, "interact", sample, **options)
        if rollout is self._actors.pools.get("train"):
            self._count_frames(self._of_all_ranks(stats))
        if stats.restarts:
            self._log_faults(stats, "test")
        return rollout.hidden_state, stats.by_actor(rollout.pool.num_actors)

    def _interact(
        self, rollout: Rollout, timesteps: int, title: str, sample: bool, *, stoppable: bool = False, **options: Any
    ) -> tuple[int, PhaseStatistics]:
        """`amago.run.collect.interact`, whose progress is shown.

        Args:
            title: of the phase.
            stoppable: a signal ends the phase early.
        """
        should_stop = self._role.ends_phase(self._stop, title == COLLECT) if stoppable else None
        with self._phase(title, timesteps * rollout.pool.num_actors, "step") as phase:

            def after_step(steps: int) -> None:
                phase.update(steps)
                self._role.after_step(self, steps, collecting=title == COLLECT)

            on_step = after_step if self.launched else phase.update
            with self.acting_weights():
                return interact(rollout, self.policy, timesteps, sample, on_step, should_stop=should_stop, **options)

    def evaluate_val(self) -> None:
        """Evaluate without exploration on the validation environments of all processes; log the metrics as ``val``."""
        self._require_start("evaluate_val()")
        steps, episodes = self.val_timesteps_per_epoch, self._own_share(self.val_episodes)
        if not steps:
            return
        rollout, sample = self._actors.val, self.sample_actions and self.sample_actions_val
        rollout.reset()
        _, stats = self._interact(rollout, steps, EVALUATE, sample, stoppable=True, episodes=episodes)
        self._log_faults(self._of_all_ranks(stats), "val")
        if self._stop:
            return  # the evaluation runs again after a resume
        metrics = self._metrics(stats)
        warn_if_too_short(metrics, self.val_timesteps_per_epoch, self.val_episodes)
        self.log(metrics, "val")
        self._role.report(self, "val", stats)
        self._callbacks.call("on_validation_end", self, metrics)

    def evaluate_test(
        self,
        make_test_env: EnvMakers,
        timesteps: int,
        render: bool = False,
        save_trajs_to: str | None = None,
        episodes: int | None = None,
        gamma: float | None = None,
    ) -> dict[str, float]:
        """Evaluate the policy on other environments, and log the metrics as ``test``.

        Args:
            make_test_env: as ``make_val_env``.
            timesteps: steps of each actor.
            render: draw each step ("async" environments run in this process then).
            save_trajs_to: directory for the trajectories, for example as demonstrations for another run.
            episodes: take exactly so many rollouts, over all processes, divided equally among the actors (`Rollout.run_phase`), or
                fewer if ``timesteps`` are over first.
            gamma: the discount whose policy acts; None: the one that acts in training (``Agent.rollout_gamma_idx``).

        Returns:
            the metrics, by name.

        Raises:
            ValueError: the agent has no such discount.
        """
        self._require_start("evaluate_test()")
        mode = "sync" if render and self.env_mode in ("async", "auto") else None
        with acting_by(self.policy, gamma):  # refuses an unknown discount before any actor starts
            rollout = self._actors.start("test", make_test_env, None, save_trajs_to, mode)
            try:
                rollout.reset()
                options: dict[str, Any] = {"episodes": self._own_share(episodes), "render": render}
                sample = self.sample_actions and self.sample_actions_val
                _, stats = self._interact(rollout, timesteps, "test", sample, **options)
                self._log_faults(self._of_all_ranks(stats), "test")
                rollout.pool.flush()
            finally:
                rollout.pool.close()
        metrics = self._metrics(stats)
        warn_if_too_short(metrics, timesteps, episodes, "timesteps")
        self.log(metrics, "test")
        return metrics

    # ---- checkpoints ----------------------------------------------------------------------------------------------------

    def load_checkpoint(self, epoch: int, resume_training_state: bool = True) -> None:
        """Load a checkpoint of this run.

        Args:
            epoch: as in the file's name.
            resume_training_state: load the whole training state; otherwise only the policy's weights.
        """
        self._require_start("load_checkpoint()", writes=False)
        if not hasattr(self, "checkpoints"):
            self.init_checkpoints()
        of = self.checkpoints.of_epoch if resume_training_state else self.checkpoints.weights_of_epoch
        self.load_checkpoint_from_path(str(of(epoch)), is_accelerate_state=resume_training_state)

    def load_checkpoint_from_path(self, path: str, is_accelerate_state: bool = True) -> None:
        """Load a training state, or weights only.

        Args:
            path: the directory of a training state; or, for weights, a ``.pt`` or ``.safetensors`` file. Weights may be a
                state dict trained by the original system, for an agent of the same classes and sizes.
            is_accelerate_state: ``path`` is a training state.

        Raises:
            CheckpointError: no such file, damaged, or it does not fit; lists every name without counterpart.
        """
        self._require_start("load_checkpoint_from_path()", writes=False)
        if is_accelerate_state:
            self._restore(Path(path))
        else:
            load_agent_weights(self.policy, path)
            self._weights_loaded()
        self.policy.on_checkpoint_loaded(is_resume=is_accelerate_state)
        self._continue_earlier_run(Path(path), is_accelerate_state)

    def close(self) -> None:
        """Stop actors and threads, close loggers and the data set; twice is fine. The experiment cannot be used afterwards."""
        try:
            self._callbacks.close(self)
        finally:
            self._close_parts()
            self._freed_memory.restore()
            self._started, self._closed = False, True
