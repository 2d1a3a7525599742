"""`Experiment`: build, train and evaluate an agent. The loop is `Experiment.learn`."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import gin
import torch
from torch import Tensor

from amago.agent import BaseAgent
from amago.agent.checking import warn_of_faulty_parts
from amago.compat.names import attributes
from amago.data.batch import Batch
from amago.envs.statistics import ReturnHistory, SpecialMetricHistory
from amago.loading.dataset import RLDataset, collection_ended
from amago.nets.ranks import joint_batch
from amago.policy import acting_by, find_run, load_agent_weights, write_policy_spec
from amago.run import console
from amago.run.building import Building
from amago.run.callbacks import CallbackList
from amago.run.checkpoint import load_into
from amago.run.collect import Histories
from amago.run.console import TRAIN, Console, Phase
from amago.run.data import Batches, check_trained, warn_if_nothing_saved
from amago.run.evaluate import merge_returns, merge_specials, merge_values, summarise
from amago.run.group import Ranks, Signals, Stopped
from amago.run.learner import Learner
from amago.run.metric_names import UPDATES_PER_SECOND
from amago.run.metrics import RunLog, extra_loggers
from amago.run.optimizer import adamw, param_groups
from amago.run.rundir import RunDir
from amago.run.settings import EnvMakers, ExperimentSettings, warn_if_nothing_to_do
from amago.run.state import Position

__getattr__ = attributes(__name__)


def _of(part: str, name: str) -> Any:
    """An attribute of a part, under the name by which programs know it."""
    return property(attrgetter(f"{part}.{name}"), lambda e, value: setattr(attrgetter(part)(e), name, value))


def _envs(kind: Literal["train", "val"]) -> Any:
    return property(lambda e: e.actors.envs(kind), lambda e, envs: e.actors.use(kind, envs), lambda e: e.actors.drop(kind))


@gin.configurable
@dataclass
class Experiment(ExperimentSettings):
    """Build, train and evaluate an agent.

    ``start()`` builds everything and ``learn()`` runs the epochs. The arguments are the fields of
    `amago.run.settings.ExperimentSettings`. ``start()`` calls `init_dsets`, `init_envs`, `init_dloaders`, `init_model`,
    `init_checkpoints`, `init_logger` and `summary`. Each may be overridden. A program may also call them by itself in place of ``start()``,
    in this order or with the model before the loaders, and leave out those that it does not need; files are written from
    `init_checkpoints` on.

    Attributes:
        policy, policy_aclr: the agent, without and in Accelerate's wrapper; any module that acts may replace the latter (`amago.compat.parts`).
        optimizer, lr_schedule: of the agent; None without ``builds_optimizer``.
        accelerator, DEVICE: device, precision and processes, made on first use, or set to another; the device of the policy.
        grad_update_counter: updates so far. A `train_step` that replaces this class's counts its own here.
        train_envs, val_envs: the environments as one that steps them all (`PoolEnv`), started when first needed, until `close`. A program
            may set them to its own: a `PoolEnv`, a pool of actors, or a vector environment of `amago.envs.SequenceWrapper`.
        rl2_space: Dict {"obs": flat observations, "rl2": Box of the reward and the previous action}, for which the agent is built.
        hidden_state: the policy's memory of the training actors; None: empty.
        train_dloader: source of batches: any iterable of them.
        run_seed, frames_by_env: the seed of the run, given or drawn; environment steps collected by all ranks, by environment name.
        logger: the log in the main process; None in others.
        checkpoints, ckpt_dir: on disk, and their directory, from `init_checkpoints` on.
        should_stop: `learn` ends with the epoch, or with the evaluation that sets it; set by callbacks.
        position, signals, group: epoch, phase and step counts; what stops the run; the processes that train together.
        learner, actors, batches, run_log, rundir: agent and updates; environments; loader; log; directory and checkpoints.
        phase_statistics: of the phase of collection or evaluation that has ended last.
    """

    policy, accelerator = _of("learner", "policy"), _of("learner", "accelerator")
    policy_aclr = property(attrgetter("learner.policy_aclr"), lambda e, wrapped: e.learner.use(wrapped))
    optimizer, lr_schedule = _of("learner", "optimizer"), _of("learner", "lr_schedule")
    grad_update_counter, train_dloader = _of("learner", "grad_steps"), _of("batches", "given")
    logger, frames_by_env = _of("run_log", "logger"), _of("position", "frames_by_env")
    actors, rl2_space, hidden_state = _of("building", "actors"), _of("actors", "rl2_space"), _of("actors", "hidden_state")
    train_envs, val_envs, launched = _envs("train"), _envs("val"), property(lambda e: e.building.launch is not None)
    phase_statistics = _of("actors", "statistics")
    DEVICE, checkpoints, ckpt_dir = _of("accelerator", "device"), _of("rundir", "checkpoints"), _of("checkpoints", "directory")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.learner, self.batches, self.position, self.run_log = Learner(self), Batches(), Position(), RunLog()
        self.rundir, self.group, self.signals = RunDir(self), Ranks(), Signals()
        self.console, self.moments = Console(speaks=False), CallbackList()
        self.building, self.should_stop, self.run_seed = Building(self, self), False, 0

    def __repr__(self) -> str:
        progress = f"epoch {self.epoch} of {self.epochs}, {self.env_steps:,} steps, {self.grad_update_counter:,} updates"
        return f"<{type(self).__name__} {self.run_name} ({self.run_dir}): {progress}{', closed' * self.building.closed}>"

    def start(self) -> None:
        """Check the settings; build environments, dataset, model, optimizer and loggers; resume according to ``resume``.

        Raises:
            SettingsError: lists all wrong fields, before any process is started; or the buffer holds another run, the directory
                is being written (`amago.run.rundir`), or a changed field cannot change on resume (`amago.run.state`).
            CheckpointError: there is no training state to resume from, or ``init_from`` does not fit.
        """
        self.building.start(lambda: load_agent_weights(self.policy, find_run(str(self.init_from))[1]))

    def close(self) -> None:
        """Stop actors and threads, close loggers and the dataset; twice is fine. The experiment cannot be used afterwards."""
        try:
            self.moments.close(self)
        finally:
            if isinstance(self.dataset, RLDataset):
                self.dataset.close()
            self.building.close()

    # ---- building ------------------------------------------------------------------------------------------------------------

    def init_dsets(self) -> RLDataset:
        """Configure the dataset."""
        self.resolve()
        _ = self.building.launch  # it may change the settings
        self.learner.renew_accelerator()
        self.data.configure_from_experiment(self)
        return self.data

    def init_envs(self) -> str:
        """Start the training actors, or, if this run never collects, make one environment for its spaces. An override may make other
        environments: it sets ``train_envs``, ``val_envs`` or both. Returns a description for `summary`."""
        self.building.prepare()
        return self.actors.describe()

    def init_dloaders(self) -> Any:
        """Create the loader of training batches, ``train_dloader``. Called again before each training phase.

        Override it to draw batches in another way: set ``train_dloader`` to, or return, any iterable of `amago.loading.Batch`, such as
        a `torch.utils.data.DataLoader` with ``collate_fn=RLData_pad_collate``. If that has a length, each epoch trains on one pass over
        it; else on ``train_batches_per_epoch`` batches.
        """
        self.building.prepare()
        self.train_dloader = self.batches.make(self, self.data, self.run_seed, self.group.index, self.DEVICE)
        return self.train_dloader

    def init_model(self) -> None:
        """Build the agent for ``rl2_space`` and the actions of the environments, its optimizer and schedule."""
        self.building.prepare()
        spaces = self.actors.spaces
        self.data.check_spaces(spaces.observation, spaces.action)
        self.learner.build(spaces, self.init_optimizer if self.builds_optimizer or self.resume != "never" else None)

    def init_optimizer(self, policy: BaseAgent) -> torch.optim.Optimizer:
        """Create the optimizer. Override to use another one than AdamW; ``amago.run.learner.param_groups(policy, self)`` in place of
        ``policy.trainable_params`` gives it the rates of ``actor_learning_rate`` and ``critic_learning_rate``."""
        return adamw(param_groups(policy, self), float(self.learning_rate), float(self.l2_coeff))

    def init_checkpoints(self) -> None:
        """Create ``ckpts/training_states``, ``ckpts/policy_weights`` and ``ckpts/latest`` in ``ckpt_dir``, and describe the policy there."""
        self.building.prepare()
        if not self.rundir.claimed:
            self.rundir.claim(self.data, self.group)
        if self.accelerator.is_main_process and isinstance(self.policy, BaseAgent):
            warn_of_faulty_parts(self.policy)
            if self.rundir.is_open:
                self.checkpoints.description = write_policy_spec(self.run_dir, self.policy, self.actors.spaces.raw_observation)

    def init_logger(self) -> None:
        """Open the log files; only the main process writes."""
        if self.rundir.is_open and self.accelerator.is_main_process:
            self.run_log.open(self.run_dir, *extra_loggers(self, self.rundir.settings_at_start))

    def summary(self, env_summary: str) -> None:
        """Print the most important settings, and the description of the environments that `init_envs` returned."""
        self.print(console.summary(self, env_summary))

    @property
    def data(self) -> RLDataset:
        """The dataset."""
        assert self.dataset is not None, "check_settings() refuses this"
        return self.dataset

    def caster(self) -> AbstractContextManager[Any]:
        """The context of mixed precision."""
        return self.accelerator.autocast()

    def acting_weights(self) -> AbstractContextManager[Any]:
        """In the block, the policy has the weights with which it acts: with ``ema_decay``, their average."""
        return self.learner.acting_weights()

    @property
    def epoch(self) -> int:
        """Finished epochs, which is the number of the current one. A loop of your own sets it to the number of the epoch that it has
        just finished, by which `save_checkpoint` names files."""
        return self.position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.position.begin(epoch, set_by_program=True)

    @property
    def env_steps(self) -> int:
        """Environment steps collected, of all environments and ranks; in a process that never collects, the steps that others have
        delivered to its dataset, if that counts them."""
        delivered = None if self.collects or self.dataset is None else self.dataset.collected_steps
        return delivered or sum(self.frames_by_env.values())

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Save a complete training state, and a separate file with the policy's weights. If that fails, for example because the disk is
        full, a warning is logged; earlier checkpoints are intact."""
        self.building.require("save_checkpoint()")
        with self.acting_weights():
            if (saved := self.building.save()) is not None:
                self.moments.call("on_save_checkpoint", self, saved)

    def load_checkpoint(self, epoch: int, resume_training_state: bool = True) -> None:
        """Load a checkpoint of this run, by the epoch in its name: the training state, or only the policy's weights."""
        self.building.require("load_checkpoint()", writes=False)
        of = self.checkpoints.of_epoch if resume_training_state else self.checkpoints.weights_of_epoch
        self.load_checkpoint_from_path(str(of(epoch)), is_accelerate_state=resume_training_state)

    def load_checkpoint_from_path(self, path: str, is_accelerate_state: bool = True) -> None:
        """Load a training state, from its directory; or, unless ``is_accelerate_state``, weights only, from a ``.pt`` or ``.safetensors``
        file. They may be a state dict trained by the original system, for an agent of the same classes and sizes.

        Raises:
            CheckpointError: no such file, damaged, or it does not fit; lists every name without counterpart.
        """
        self.building.load(path, None if is_accelerate_state else lambda: load_agent_weights(self.policy, path))

    def write_latest_policy(self) -> None:
        """Publish the policy's weights for other processes, with the run's place (`axes`)."""
        self.building.require("write_latest_policy()")
        if self.accelerator.is_main_process:
            with self.acting_weights():
                self.checkpoints.publish(self.policy.state_dict(), {"axes": self.axes(), "explored": self.position.explored})

    def write_best_policy(self, note: Mapping[str, Any] | None = None) -> bool:
        """Keep the policy's weights in ``ckpts/best/policy.pt`` in place of those kept before (`amago.KeepBest`), with a note on them, as JSON
        types, in the same file. Returns False if they could not be written, which is logged as a warning."""
        self.building.require("write_best_policy()")
        if not self.accelerator.is_main_process:
            return True
        with self.acting_weights():
            return self.checkpoints.keep_best(self.policy.state_dict(), note)

    def read_latest_policy(self) -> None:
        """Load the weights that another process published last, if they are newer than those read or published here."""
        self.building.require("read_latest_policy()", writes=False)
        weights = self.checkpoints.read_latest() if self.accelerator.is_main_process else None
        if weights is not None:
            load_into(self.policy, weights, self.checkpoints.latest)
        self.group.copy_from_first(list(self.policy.state_dict().values()))  # ranks might find different files
        if self.group.any(weights is not None):
            self.learner.restart_average()

    def delete_buffer_from_disk(self, delete_protected: bool = False, delete_quarantine: bool = False) -> None:
        """Delete the collected trajectories, those in ``buffer/fifo``, in the main process (``dataset.delete()``); with
        ``delete_protected`` also those in ``buffer/protected``: imported recordings, demonstrations; with ``delete_quarantine`` also
        damaged files in ``buffer/quarantine``."""
        self.building.require("delete_buffer_from_disk()")
        options = {"delete_protected": delete_protected, "delete_quarantine": delete_quarantine}
        if self.accelerator.is_main_process:
            self.data.delete(**{k: v for k, v in options.items() if v})  # a dataset of the user's own may lack the options

    # ---- the loop ------------------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Run the remaining epochs.

        SIGINT, SIGTERM and SIGUSR1 finish the current step, save a training state and exit with code 128 + signal
        (130, 143, 138); ``resume="auto"`` continues from there. Further signals change nothing. In a notebook and at a prompt, SIGINT
        saves and returns, and another call goes on. ``should_stop``, set by callbacks, ends it with the epoch or the evaluation.
        A run that was to train and has made no update raises `amago.run.data.NothingTrainedError`.
        """
        self.building.require("learn()")
        warn_if_nothing_to_do(self)
        self.building.resume()
        self.print(self.plan_epochs(self.group.count, self.epoch, self.position.collected, self.env_steps))
        try:
            with self.signals, self.console.learning(self):
                while self.epoch < self.epochs and not self.should_stop:
                    self.signals.check()
                    self._epoch()
            self.signals.check()
            check_trained(self)
            self.moments.call("on_end", self)
        except Stopped as stop:
            self.building.leave(stop)
            if not stop.is_interrupt:
                raise
        except BaseException as err:
            self.moments.call("on_exception", self, err)
            raise

    def _epoch(self) -> None:
        """Evaluate, collect, train, save and publish."""
        n, begins, collects = self.epoch, not self.position.has_begun, self.epoch >= self.start_collecting_at_epoch
        if self.always_load_latest:
            self.read_latest_policy()
        self.moments.call("before_epoch", self)
        if begins and self.val_interval and n % self.val_interval == 0:
            self.evaluate_val()
        self.should_stop = self.group.any(self.should_stop)
        self.position.has_trained |= self.should_stop and n <= self.start_learning_at_epoch
        if not self.should_stop:  # else the last weights are those that were evaluated
            if self.train_timesteps_per_epoch is not None and collects:
                self.collect_new_training_data()
            self.log(collection_ended(self.data, self), "dataset")
            self.signals.check()
            warn_if_nothing_saved(self)
            if n >= self.start_learning_at_epoch and self.building.wait_for_data():
                self.batches.renew(self.init_dloaders, self.DEVICE)
                self.train_epoch()
                self.position.has_trained = True
        if self.position.trained and (metrics := self.data.on_end_of_training()):
            self.log(metrics, "dataset")
        self.position.begin(n + 1)
        self.should_stop |= self.has_delivered(self.env_steps)
        self.moments.call("on_epoch_end", self, self.run_log.take_newest())
        self.should_stop = self.group.any(self.should_stop)
        if self.ckpt_interval and (n % self.ckpt_interval == 0 or self.epoch == self.epochs or self.should_stop):
            self.save_checkpoint()
        if self.always_save_latest:
            self.write_latest_policy()

    def collect_new_training_data(self) -> None:
        """Step each training actor ``train_timesteps_per_epoch`` times, less the steps of a resumed epoch."""
        self.building.require("collect_new_training_data()")
        self.actors.collect()

    def train_epoch(self) -> None:
        """Train on ``train_batches_per_epoch`` batches, less the batches of a resumed epoch."""
        self.building.require("train_epoch()")
        self.print(self.learner.begin_training(from_records=not self.collects and not self.env_steps))
        count = self.batches.count(self.train_batches_per_epoch - self.position.trained, self.train_batches_per_epoch)
        with self.console.phase(TRAIN, count, "batch") as phase, joint_batch(self.group.count):
            for batch in self.batches.take(count):
                self.moments.call("before_update", self)
                log_step = bool(self.log_interval) and self.position.trained % self.log_interval == 0
                self.run_log.add(self.train_step(batch, log_step))
                self.position.trained += 1
                phase.update(1)
                if log_step and self.position.trained > 1:
                    self._log_training(phase)
                if self.signals.decide():
                    break
            self._log_training(phase)
        means = self.run_log.take_epoch_means()
        self.signals.check()
        if means:
            means[UPDATES_PER_SECOND] = self.console.rate(TRAIN)
            self.run_log.note("train", means)
            self.moments.call("on_train_epoch_end", self, means)

    def _log_training(self, phase: Phase) -> None:
        if means := self.group.mean(self.run_log.take_means()):
            self.run_log.speeds = {UPDATES_PER_SECOND: phase.lap() / self.batches_per_update}
            self.log(means, "train-update")

    # ---- updates -------------------------------------------------------------------------------------------------------------

    def train_step(self, batch: Batch, log_step: bool) -> dict[str, float | Tensor]:
        """Forward and backward of one batch, and an update after every ``batches_per_update`` batches; with ``log_step`` also compute costly
        metrics. Returns the metrics of `compute_loss`, "Loss", and, with an update, the metrics of `amago.run.learner.Learner.update`."""

        def update(batch: Batch) -> dict[str, float | Tensor]:
            with (
                torch.enable_grad(),
                joint_batch(self.accelerator.num_processes),
                self.accelerator.accumulate(self.policy_aclr),
            ):
                with self.caster():
                    metrics = self.compute_loss(batch, log_step)
                return self.learner.step(batch, metrics, log_step)

        return self.learner.train(update, batch, log_step) if self.cuda_graphs else update(batch)

    def compute_loss(self, batch: Batch, log_step: bool) -> dict[str, Any]:
        """Losses of actor and critics, averaged over their masks, and metrics; with ``log_step`` also costly ones.

        Returns:
            "Actor Loss", "Critic Loss", "Auxiliary Loss" (the rest of the result of `BaseAgent.forward`), "Sequence Length",
            "Batch Size (in Timesteps)", "Unmasked Batch Size (in Timesteps)", and the other metrics of the agent. The update
            minimises "Loss" where an override sets it, else the weighted sum of the losses.
        """
        return self.learner.loss_of(batch, log_step, self)

    def edit_actor_mask(self, batch: Batch, actor_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Override to exclude timesteps from the actor's loss, (B, L, G, 1): returns a bool of this shape, True where the loss counts;
        ``pad_mask`` is False at padding."""
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
            render, save_on_done: draw each step; save trajectories as soon as a rollout ends.
            episodes: take exactly so many rollouts, divided equally among the actors (`Rollout.run_phase`), or fewer if
                ``timesteps`` are over first.
            sample: draw actions from the policy; else take its mode.

        Returns:
            the memory, to go on with, and a pair of lists with one entry an environment: returns, and the environments' own metrics, of
            the rollouts that ended.
        """
        self.building.require("interact()", writes=False)
        return self.actors.interact(envs, timesteps, hidden_state, render, save_on_done, episodes, sample)

    def evaluate_val(self) -> None:
        """Evaluate without exploration on the validation environments of all processes; log the metrics as ``val``."""
        self.building.require("evaluate_val()")
        if self.val_timesteps_per_epoch:
            self.actors.evaluate()

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
            make_test_env, timesteps: as ``make_val_env``; steps of each actor.
            render: draw each step ("async" environments run in this process then).
            save_trajs_to: directory for the trajectories, for example as demonstrations for another run.
            episodes: take exactly so many rollouts, over all processes, divided equally among the actors (`Rollout.run_phase`), or
                fewer if ``timesteps`` are over first.
            gamma: the discount whose policy acts; None: the one that acts in training (``Agent.rollout_gamma_idx``).

        Returns:
            the metrics by name, and ``returns``, ``metrics`` and ``attempts`` of the rollouts of all processes, with intervals
            (`amago.run.results.Evaluation`); a ValueError where the agent has no such discount.
        """
        self.building.require("evaluate_test()")
        with acting_by(self.policy, gamma):  # refuses an unknown discount before any actor starts
            return self.actors.test(make_test_env, timesteps, render, save_trajs_to, episodes)

    def policy_metrics(self, returns: Iterable[ReturnHistory], specials: Iterable[SpecialMetricHistory]) -> dict[str, float]:
        """The metrics of the rollouts of all processes (`amago.run.evaluate.summarise`); {} if none ended."""
        all_returns, all_specials = zip(*self.group.gather([(merge_returns(returns), merge_specials(specials))]))
        return summarise(merge_values(all_returns), merge_values(all_specials))

    def x_axis_metrics(self) -> dict[str, int | float]:
        """Numbers that curves may be drawn against."""
        by_env = {f"total_frames-{name}": frames for name, frames in self.frames_by_env.items()}
        return {"Epoch": self.epoch, "total_frames": self.env_steps, "gradient_steps": self.grad_update_counter, **by_env}

    def axes(self) -> dict[str, int]:
        """The progress of the run: "epoch", "env_steps" and "grad_steps"."""
        return {"epoch": self.epoch, "env_steps": self.env_steps, "grad_steps": self.grad_update_counter}

    def print(self, text: str) -> None:
        """Print lines in the main process, above the progress bar; nothing with ``verbose=False``."""
        self.console.print(text)

    def log(self, metrics_dict: Mapping[str, Any], key: str) -> None:
        """Log numbers by name; no row for an empty dict. ``key`` is "train-update", "dataset", "val", "test", "rollout" or another name; the
        first two are sections "train" and "buffer" of the log."""
        self.log_at(metrics_dict, key, self.axes())

    def log_at(self, metrics_dict: Mapping[str, Any], key: str, axes: Mapping[str, int]) -> None:
        """`log` for another point of the run, given like the result of `axes`."""
        if metrics_dict or self.run_log.speeds:
            self.rundir.check_writable()
        if (row := self.run_log.row(metrics_dict, key, axes, self.x_axis_metrics())) is not None:
            self.moments.call("on_log", self, row)


gc.freeze()  # of 190,000 objects that imports leave, none is garbage: not to look at them when the process ends saves half a second
