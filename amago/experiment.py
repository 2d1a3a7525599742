"""`Experiment`: build, train and evaluate an agent. The loop is `Experiment.learn`."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import gin
import torch
from torch import Tensor

from amago.agent import BaseAgent
from amago.compat.names import attributes
from amago.compat.parts import as_actor
from amago.data.batch import Batch
from amago.envs.pool import PoolEnv
from amago.envs.statistics import ReturnHistory, SpecialMetricHistory
from amago.loading import RLDataset
from amago.loading.dataset import collection_ended
from amago.nets.ranks import joint_batch
from amago.policy import acting_by, find_run, load_agent_weights, write_policy_spec
from amago.run.building import BuiltRun
from amago.run.checks import check_buffer, warn_if_nothing_saved, warn_of_faulty_parts
from amago.run.collect import ActingPhase
from amago.run.console import COLLECT, EVALUATE, TRAIN, Phase
from amago.run.data import REFUSED_SECONDS, check_trained, wait_for_data
from amago.run.evaluate import warn_if_too_short
from amago.run.group import Stopped
from amago.run.metric_names import STEPS_PER_SECOND, UPDATES_PER_SECOND
from amago.run.metrics import mean_of_rows
from amago.run.settings import EnvMakers, warn_if_nothing_to_do

__getattr__ = attributes(__name__)
Histories = tuple[list[ReturnHistory], list[SpecialMetricHistory]]  # with one entry an environment each


@gin.configurable
@dataclass
class Experiment(BuiltRun):
    """Build, train and evaluate an agent.

    ``start()`` builds everything and ``learn()`` runs the epochs. The arguments are the fields of
    `amago.run.settings.ExperimentSettings`. ``start()`` calls `init_dsets`, `init_envs`, `init_dloaders`, `init_model`,
    `init_checkpoints`, `init_logger` and `summary`. Each may be overridden. A program may also call them by itself in place of ``start()``,
    in this order or with the model before the loaders, and leave out those that it does not need; files are written from
    `init_checkpoints` on.

    Attributes:
        policy, policy_aclr: the agent, without and in Accelerate's wrapper; any module that acts may replace the latter (`amago.compat.parts`).
        optimizer, lr_schedule, updater: of the agent; without ``builds_optimizer``, there are no optimizer and schedule.
        accelerator: device, precision and processes. It is made on first use; set it to use another.
        grad_update_counter: updates so far. A `train_step` that replaces this class's counts its own here.
        builds_optimizer: whether this process may train. One that only collects need not have an optimizer.
        train_envs, val_envs: the environments as one that steps them all (`PoolEnv`), started when first needed, until `close`. A program
            may set them to its own: a `PoolEnv`, a pool of actors, or a vector environment of `amago.envs.SequenceWrapper`.
        train_dloader: source of batches: any iterable of them.
        run_seed: the seed of the run, given or drawn.
        frames_by_env: environment steps collected by all ranks, by environment name.
        logger: in the main process; None in others.
        should_stop: `learn` ends when the epoch is finished; set by callbacks.
        position, signals, group: epoch, phase and step counts; what stops the run; the processes that train together.
        learner, batches, run_log, rundir: agent and updates; loader; log; directory and checkpoints.
        phase_statistics: of the phase of collection or evaluation that has ended last.
    """

    # ---- start and end -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Check the settings; build environments, dataset, model, optimizer and loggers; resume according to ``resume``.

        Raises:
            SettingsError: lists all wrong fields, before any process is started; or the buffer holds another run, the directory
                is being written (`amago.run.rundir`), or a changed field cannot change on resume (`amago.run.state`).
            CheckpointError: there is no training state to resume from, or ``init_from`` does not fit.
        """
        if self._started:
            raise RuntimeError("start() was called before; build a new Experiment")
        self._prepared = False  # settings may have changed since parts were built
        self._prepare()
        try:
            resumed = self._claim()
            self._seed(resumed)
            dataset = self.init_dsets()
            env_summary = self.init_envs()
            if self.rundir is not None and self.rundir.replace():
                self.print(f"deleted the earlier run in {self.run_dir} (overwrite=True)")
            self.accelerator.wait_for_everyone()
            check_buffer(dataset, self.actors.spaces.observation, self.actors.spaces.action)
            self.batches.renew(self.init_dloaders, self.DEVICE)
            self.init_model()
            if self.init_from is not None and resumed is None:
                load_agent_weights(self.policy, find_run(str(self.init_from))[1])
            self.init_checkpoints()
            if self.DEVICE.type == "cpu" and self.train_batches_per_epoch:
                self._freed_memory.keep()
            self._open_log()
            self._started = True
            self._resume()
            if self.rundir is not None:
                steps = f"{self.grad_update_counter} gradient steps, {self.env_steps} environment steps"
                self.print(self.rundir.describe_start(resumed, self.epoch, steps))
            self.moments.start(self)
        except BaseException:
            self.close()
            raise
        if self.verbose and self.accelerator.is_main_process:
            self.summary(env_summary=env_summary)

    def close(self) -> None:
        """Stop actors and threads, close loggers and the dataset; twice is fine. The experiment cannot be used afterwards."""
        try:
            self.moments.close(self)
        finally:
            for part in (
                self._actors,
                self.batches,
                self.run_log,
                self.dataset if isinstance(self.dataset, RLDataset) else None,
            ):
                if part is not None:
                    part.close()
            if self.rundir is not None:
                self.rundir.release()
            self._freed_memory.restore()
            self._started, self._closed = False, True

    def init_checkpoints(self) -> None:
        """Create ``ckpts/training_states``, ``ckpts/policy_weights`` and ``ckpts/latest`` in ``ckpt_dir``, and describe the policy there."""
        self._prepare()
        if self.rundir is None:
            self._claim()
        if self.accelerator.is_main_process and isinstance(self.policy, BaseAgent):
            warn_of_faulty_parts(self.policy)
            if self.rundir is not None and self.rundir.refusal is None:
                raw = self.actors.spaces.raw_observation
                self.checkpoints.description = write_policy_spec(self.run_dir, self.policy, raw)

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
        if self.rundir is None:
            self.init_checkpoints()
        if is_accelerate_state:
            self._restore(Path(path))
        else:
            load_agent_weights(self.policy, path)
            self.learner.restart_average()
        self.policy.on_checkpoint_loaded(is_resume=is_accelerate_state)
        if self.rundir is not None and self.rundir.continues(Path(path)):
            loaded = copy.copy(self.position)
            self.init_checkpoints()  # an override sets the epoch to 0
            self.position = loaded
            self.rundir.to_resume = Path(path) if is_accelerate_state else None
            self._open_log()
            self.rundir.to_resume = None

    def delete_buffer_from_disk(self, delete_protected: bool = False, delete_quarantine: bool = False) -> None:
        """Delete the collected trajectories, those in ``buffer/fifo``, in the main process (``dataset.delete()``).

        Args:
            delete_protected: also those in ``buffer/protected``: imported recordings, demonstrations.
            delete_quarantine: also damaged files in ``buffer/quarantine``.
        """
        self._require_start("delete_buffer_from_disk()")
        options = {"delete_protected": delete_protected, "delete_quarantine": delete_quarantine}
        if self.accelerator.is_main_process:
            self.data.delete(**{k: v for k, v in options.items() if v})  # a dataset of the user's own may lack the options

    # ---- the loop ------------------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Run the remaining epochs.

        SIGINT, SIGTERM and SIGUSR1 finish the current step, save a training state and exit with code 128 + signal
        (130, 143, 138); ``resume="auto"`` continues from there. Further signals change nothing. ``should_stop``, which callbacks set, ends
        it when the epoch is finished.
        A run that was to train and has made no update raises `amago.run.data.NothingTrainedError`.
        """
        self._require_start("learn()")
        warn_if_nothing_to_do(self)
        self._open_log()
        self._resume()
        with self.moments.report_exceptions(self):
            try:
                with self.signals, self.console.learning(self):
                    while self.epoch < self.epochs and not self.should_stop:
                        self.signals.check()
                        self._epoch()
                self.signals.check()
            except Stopped as stop:
                self._leave(stop)
                raise
            if not self.grad_update_counter and (self.learner.skipped or not self.position.has_trained):
                check_trained(self, self.data, self.learner.skipped, self._restarts)
            self.moments.call("on_end", self)

    def _epoch(self) -> None:
        """Evaluate, collect, train, save and publish."""
        n, begins = self.epoch, not self.position.has_begun
        if self.always_load_latest:
            self.read_latest_policy()
        self.moments.call("before_epoch", self)
        if begins and self.val_interval and n % self.val_interval == 0:
            self.evaluate_val()
        if self.train_timesteps_per_epoch is not None and n >= self.start_collecting_at_epoch:
            self.collect_new_training_data()
        self.log(collection_ended(self.data, self), "dataset")
        self.signals.check()
        if self.train_timesteps_per_epoch and n >= self.start_collecting_at_epoch:
            phases = n + 1 - max(0, self.start_collecting_at_epoch)
            warn_if_nothing_saved(self.data, phases, self.train_timesteps_per_epoch, self.max_seq_len, self._trajs_saved)
        if n >= self.start_learning_at_epoch and self._wait_for_data():
            self.batches.renew(self.init_dloaders, self.DEVICE)
            self.train_epoch()
            self.position.has_trained = True
        if self.position.trained and (metrics := self.data.on_end_of_training()):
            self.log(metrics, "dataset")
        self.position.begin(n + 1)
        self.moments.call("on_epoch_end", self, self.run_log.take_epoch())
        self.should_stop = any(self.group.gather([self.should_stop]))
        if self.ckpt_interval and (n % self.ckpt_interval == 0 or self.epoch == self.epochs or self.should_stop):
            self.save_checkpoint()
        if self.always_save_latest:
            self.write_latest_policy()

    def _leave(self, stop: Stopped) -> None:
        """Save, call the callbacks, and close, after a signal."""
        try:
            self._saved = False
            if self.ckpt_interval:
                self.save_checkpoint()
            if self.always_save_latest:
                self.write_latest_policy()
            saved = "saved; continue with resume='auto'" if self._saved else "nothing was saved"
            self.print(f"stopped by a signal in epoch {self.epoch}; {saved} (exit code {stop.code})")
            self.moments.call("on_exception", self, stop)
        finally:
            self.close()

    def collect_new_training_data(self) -> None:
        """Step each training actor ``train_timesteps_per_epoch`` times, less the steps of a resumed epoch."""
        self._require_start("collect_new_training_data()")
        position = self.position
        if position.has_collected:  # another call in this epoch, or a loop of one's own
            position.collected = 0
        steps, every = (self.train_timesteps_per_epoch or 0) - position.collected, self.force_reset_train_envs_every
        if steps <= 0:
            return
        rollout = self.actors.train
        if every and self.epoch and self.epoch % every == 0 and position.collected == 0:
            rollout.reset()
        phase = ActingPhase(COLLECT, stoppable=True)
        memory, histories = self._act(phase, self.train_envs, steps, self.sample_actions_train, hidden_state=self.hidden_state)
        self.hidden_state = memory
        stats = self._of_all_ranks(phase.statistics)
        position.collected, position.has_collected = self.group.smallest(position.collected + phase.taken), True
        position.count(stats.frames)
        self._log_faults(stats, "rollout")
        self._trajs_saved += rollout.pool.flush() + len(stats.episodes)
        metrics = {**self._metrics(histories, stats), **{name: fmean(values) for name, values in stats.exploration.items()}}
        speeds = self.run_log.speeds = {STEPS_PER_SECOND: self.console.rate(COLLECT)}
        self.log(metrics, "rollout")
        self.phase_statistics = stats
        if not self.signals:
            self.moments.call("on_collect_epoch_end", self, {**metrics, **speeds})

    def train_epoch(self) -> None:
        """Train on ``train_batches_per_epoch`` batches, less the batches of a resumed epoch."""
        self._require_start("train_epoch()")
        count = self.batches.count(self.train_batches_per_epoch - self.position.trained, self.train_batches_per_epoch)
        self.policy_aclr.train()
        with self.console.phase(TRAIN, count, "batch") as phase, joint_batch(self.group.count):
            for batch in self.batches.take(count):
                self.moments.call("before_update", self)
                if self.group.count == 1 and self.signals:  # it has waited
                    break
                log_step = bool(self.log_interval) and self.position.trained % self.log_interval == 0
                self.run_log.means.add(self.train_step(batch, log_step))
                self.position.trained += 1
                phase.update(1)
                if log_step and self.position.trained > 1:
                    self._log_training(phase)
                if self.signals.decide():
                    break
            self._log_training(phase)
        means = self.run_log.means.take_epoch()
        self.signals.check()
        if means:
            means[UPDATES_PER_SECOND] = self.console.rate(TRAIN)
            self.run_log.note("train", means)
            self.moments.call("on_train_epoch_end", self, means)

    def _log_training(self, phase: Phase) -> None:
        """Log the means since the last row."""
        means = self.run_log.means.take()
        means = mean_of_rows(self.group.gather([means])) if self.group.count > 1 else means
        if means:
            self.run_log.speeds = {UPDATES_PER_SECOND: phase.lap() / self.batches_per_update}
            self.log(means, "train-update")

    def _wait_for_data(self) -> bool:
        """True if all ranks have data to train on. A process that never collects waits for the data of other processes."""
        ready = self.group.all(self.data.ready_for_training)
        if ready or self.collects or not self.data.can_become_ready:
            return ready
        with self.console.phase("waiting for data", None, "s") as phase:

            def pause() -> None:
                self.signals.wait(1.0)
                self.moments.step(self, 0, "wait")
                phase.update(1)
                self.signals.check()

            wait_for_data(self.data, REFUSED_SECONDS, pause, self.group)
        return True

    # ---- updates -------------------------------------------------------------------------------------------------------------

    def train_step(self, batch: Batch, log_step: bool) -> dict[str, float | Tensor]:
        """Forward and backward of one batch, and an update after every ``batches_per_update`` batches.

        Args:
            log_step: also compute costly metrics.

        Returns:
            the metrics of `compute_loss`, "Loss", and, with an update, the metrics of `amago.run.learner.Updater.step`.
        """
        with torch.enable_grad(), joint_batch(self.accelerator.num_processes), self.accelerator.accumulate(self.policy_aclr):
            with self.caster():
                metrics = self.compute_loss(batch, log_step)
            return self.learner.step(batch, metrics, log_step)

    def compute_loss(self, batch: Batch, log_step: bool) -> dict[str, Any]:
        """Losses of actor and critics, averaged over their masks, and metrics.

        Args:
            log_step: also compute costly metrics.

        Returns:
            "Actor Loss", "Critic Loss", "Auxiliary Loss" (the rest of the result of `BaseAgent.forward`), "Sequence Length",
            "Batch Size (in Timesteps)", "Unmasked Batch Size (in Timesteps)", and the other metrics of the agent. The update
            minimises "Loss" where an override sets it, else the weighted sum of the losses.
        """
        return self.learner.loss_of(batch, log_step, self)

    def edit_actor_mask(self, batch: Batch, actor_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Override to exclude timesteps from the actor's loss.

        Args:
            actor_loss: (B, L, G, 1).
            pad_mask: bool, of the same shape; False at padding.

        Returns:
            bool, of the same shape; True where the loss counts.
        """
        return pad_mask

    def edit_critic_mask(self, batch: Batch, critic_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Override to exclude timesteps from the critics' loss; as `edit_actor_mask`, for (B, L, C, G, 1)."""
        return pad_mask

    # ---- interaction and evaluation ------------------------------------------------------------------------------------------

    def interact(
        self,
        envs: object,
        timesteps: int,
        hidden_state: object = None,
        render: bool = False,
        save_on_done: bool = False,
        episodes: int | None = None,
        sample: bool = True,
    ) -> tuple[Any, Histories]:
        """Let the policy act in several environments, which must have been reset.

        Args:
            envs: ``train_envs``, whose steps count as collected, in all ranks; ``val_envs``, a pool of `amago.envs.make_pool`, or a vector
                environment of `SequenceWrapper`.
            timesteps: steps of each environment.
            hidden_state: the policy's memory, as returned by an earlier call, or a list with one memory for each group of a
                pool; None: empty memory.
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
        rollout = self.actors.rollout_in(envs)
        agent, phase, ended = as_actor(self.policy), self._phase or ActingPhase("interact"), False
        rollout.take_hidden_state(agent, hidden_state)

        def after_step(steps: int) -> None:
            nonlocal ended
            progress.update(steps)
            ended = self.moments.step(self, steps, phase.title)
            if render:
                rollout.pool.render()
            if save_on_done and rollout.pool.resets.any():
                rollout.pool.flush()

        stop = (lambda: ended or self.signals.pending()) if phase.stoppable else None
        with self.console.phase(phase.title, timesteps * rollout.pool.num_actors, "step") as progress, self.acting_weights():
            taken, stats = rollout.run_phase(agent, timesteps, sample, episodes, after_step, stop, phase.evaluation)
        phase.add(taken, stats)
        if self._phase is None:  # no method of this class counts what happened
            if rollout is self.actors.pools.get("train"):
                self.position.count(self._of_all_ranks(stats).frames)
            if stats.restarts:
                self._log_faults(stats, "test")
        return rollout.hidden_state, stats.by_actor(rollout.pool.num_actors)

    def _act(self, phase: ActingPhase, envs: object, timesteps: int, sample: bool, **options: Any) -> tuple[Any, Histories]:
        """Call `interact`, which a subclass may override, for a phase. An override may lack the argument ``sample``."""
        self._phase = phase
        try:
            return self.interact(envs, timesteps, **options, **({} if sample else {"sample": False}))
        finally:
            self._phase = None

    def evaluate_val(self) -> None:
        """Evaluate without exploration on the validation environments of all processes; log the metrics as ``val``."""
        self._require_start("evaluate_val()")
        steps, episodes = self.val_timesteps_per_epoch, self._own_share(self.val_episodes)
        if not steps:
            return
        self.actors.val.reset()
        phase = ActingPhase(EVALUATE, stoppable=True, evaluation=True)
        sample = self.sample_actions and self.sample_actions_val
        _, histories = self._act(phase, self.val_envs, steps, sample, episodes=episodes)
        stats = phase.statistics
        self._log_faults(self._of_all_ranks(stats), "val")
        self.signals.check()  # the evaluation runs again after a resume
        metrics = self._metrics(histories, stats)
        warn_if_too_short(metrics, self.val_timesteps_per_epoch, self.val_episodes)
        self.log(metrics, "val")
        self.phase_statistics = stats
        self.moments.call("on_validation_end", self, metrics)

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
            rollout = self.actors.start("test", make_test_env, None, save_trajs_to, mode)
            try:
                rollout.reset()
                phase, sample = ActingPhase("test", evaluation=True), self.sample_actions and self.sample_actions_val
                options: dict[str, Any] = {"episodes": self._own_share(episodes), "render": render}
                _, histories = self._act(phase, PoolEnv(rollout.pool), timesteps, sample, **options)
                stats = phase.statistics
                self._log_faults(self._of_all_ranks(stats), "test")
                rollout.pool.flush()
            finally:
                rollout.close()
        metrics = self._metrics(histories, stats)
        warn_if_too_short(metrics, timesteps, episodes, "timesteps")
        self.log(metrics, "test")
        return metrics
