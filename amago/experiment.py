"""`Experiment`: build, train and evaluate an agent. The loop is `Experiment.learn`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gin
import gymnasium as gym
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, gather_object
from torch import Tensor
from tqdm import tqdm

from amago import config
from amago.agent import BaseAgent
from amago.envs.exploration import ExplorationWrapper
from amago.envs.pool import ActorPool
from amago.envs.statistics import ReturnHistory, SpecialMetricHistory
from amago.loading import Batch, DatasetSettings, DiskTrajDataset, RLDataset, SequenceLoader
from amago.policy import acting_by, load_agent_weights, write_policy_spec
from amago.run import checkpoint, console
from amago.run.checks import check_buffer, check_evaluation_spaces, check_settings, warn_if_nothing_saved
from amago.run.collect import interact, make_rollout, recorder_settings, spaces_of
from amago.run.evaluate import merge_returns, merge_specials, summarise
from amago.run.metrics import MetricsLogger, RunningMeans
from amago.run.rollout import Rollout
from amago.run.settings import EnvMaker, ExperimentSettings
from amago.run.signals import GracefulStop, Stopped
from amago.run.state import Progress, RunCheckpoints, TrainingParts
from amago.run.update import Updater, adamw, lr_schedule, weighted_losses

_STREAMS = {"train": 5, "val": 3, "test": 99}  # of random numbers, after the run's own


@gin.configurable
@dataclass
class Experiment(ExperimentSettings):
    """Build, train and evaluate an agent.

    ``start()`` builds everything and ``learn()`` runs the epochs. The arguments are those of
    `amago.run.settings.ExperimentSettings`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epoch = 0
        self._collected = self._trained = 0  # progress within the epoch
        self.frames_by_env: dict[str, int] = {}
        self._started = self._saved = False
        self._pools: dict[str, Rollout] = {}
        self._stop = GracefulStop()

    # ---- start ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Check the settings, then build environments, data set, model, optimizer, loggers; resume if asked to.

        Raises:
            SettingsError: naming each field that is wrong, before any process is started.
        """
        if self._started:
            raise RuntimeError("start() was called before; build a new Experiment")
        if self.dataset is None and self.dset_root is not None and self.dset_name is not None:
            self.dataset = DiskTrajDataset(self.dset_root, self.dset_name, self.dset_max_size)
        check_settings(self)
        AcceleratorState._reset_state()  # else an earlier experiment of this process would decide the precision
        self.accelerator = Accelerator(
            gradient_accumulation_steps=self.batches_per_update,
            mixed_precision=self.mixed_precision,
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.init_checkpoints()
        found = self.checkpoints.choose(self.resume)
        self._seed_everything(found)
        dataset = self.init_dsets()
        try:
            env_summary = self.init_envs()
            check_buffer(dataset, *self._spaces[:2])
            self.init_dloaders()
            self.init_model()
            self.init_logger()
            self._started = True
            self._resume(found)
        except BaseException:
            self.close()
            raise
        if self.verbose and self.accelerator.is_main_process:
            self.summary(env_summary)

    def _seed_everything(self, resumed: Path | None) -> None:
        self.run_seed = int(np.random.SeedSequence().generate_state(1)[0]) if self.seed is None else int(self.seed)
        own = (self.run_seed, self.accelerator.process_index)
        if self.seed is not None:
            checkpoint.seed_process(own)
        # environments cannot be put back where they were: after a resume they begin with rollouts of their own
        self._env_seed = (*own, *(checkpoint.identity(resumed) if resumed else ()))

    @property
    def run_dir(self) -> Path:
        """``ckpt_base_dir/run_name``."""
        return Path(self.ckpt_base_dir).expanduser() / self.run_name

    @property
    def DEVICE(self) -> torch.device:
        """Where the policy lives."""
        return self.accelerator.device

    def init_checkpoints(self) -> None:
        """Create ``ckpts/training_states``, ``ckpts/policy_weights`` and ``ckpts/latest``."""
        self.checkpoints = RunCheckpoints(self.run_dir, self.run_name)
        self.checkpoints.prepare()
        self.ckpt_dir = self.checkpoints.directory

    def init_dsets(self) -> RLDataset:
        """Tell the data set what the experiment needs of it."""
        assert self.dataset is not None
        rights = self.has_dset_edit_rights and self.accelerator.is_main_process
        self.dataset.configure(DatasetSettings(self.max_seq_len, self.padded_sampling, rights, tuple(self.extra_fields)))
        return self.dataset

    @property
    def collects(self) -> bool:
        """Whether this process collects data in some epoch."""
        return bool(self.train_timesteps_per_epoch) and self.start_collecting_at_epoch < self.epochs

    def init_envs(self) -> str:
        """Start the training actors (or, where none are needed, one environment for its spaces) and describe them."""
        if self.collects:
            pool = self._pool("train")
            obs, act, rl2 = pool.observation_space, pool.action_spec.space, pool.rl2_space
        else:
            obs, act, rl2 = spaces_of(self.make_val_env)
        self._spaces: tuple[gym.spaces.Dict, gym.Space[Any], gym.spaces.Box] = (obs, act, rl2)
        shapes = ", ".join(f"{k} {v.shape}" for k, v in obs.spaces.items())
        return f"{self.parallel_actors} actors ({self.env_mode}); observations: {shapes}; actions: {act}"

    def _pool(self, kind: str) -> ActorPool:
        """The pool of "train" or "val", started when first needed."""
        if kind not in self._pools:
            makers = self.make_train_env if kind == "train" else self.make_val_env
            directory = self.dataset.save_new_trajs_to if kind == "train" and self.dataset is not None else None
            exploration = self.exploration_wrapper_type if kind == "train" else None
            self._pools[kind] = self._rollout(kind, makers, exploration, directory)
            self._pools[kind].reset()
        return self._pools[kind].pool

    def _rollout(
        self,
        kind: str,
        makers: EnvMaker | Iterable[EnvMaker],
        exploration: type[ExplorationWrapper] | None,
        directory: str | None,
        env_mode: str | None = None,
    ) -> Rollout:
        """Actors for "train", "val" or "test", of a random stream of their own, that record their trajectories in a directory."""
        seed, recorder = (*self._env_seed, _STREAMS[kind]), recorder_settings(self, directory)
        rollout = make_rollout(self, makers, exploration, recorder, seed, self.DEVICE, self.caster, env_mode)
        try:
            if kind != "train":
                check_evaluation_spaces(
                    f"make_{kind}_env", rollout.pool.observation_space, rollout.pool.action_spec.space, self._spaces[:2]
                )
        except BaseException:
            rollout.pool.close()
            raise
        return rollout

    def init_dloaders(self) -> SequenceLoader:
        """The source of training batches."""
        assert self.dataset is not None
        self.train_dloader = SequenceLoader(
            self.dataset, self.batch_size, self.dloader_workers, self.run_seed, self.accelerator.process_index, self.DEVICE
        )
        return self.train_dloader

    def init_model(self) -> None:
        """Build the agent for the environments' spaces, its optimizer and schedule."""
        obs, act, rl2 = self._spaces
        assert self.dataset is not None
        self.dataset.check_spaces(obs, act)
        agent = self.agent_type(
            obs_space=obs,
            rl2_space=rl2,
            action_space=act,
            max_seq_len=self.max_seq_len,
            tstep_encoder_type=self.tstep_encoder_type,
            traj_encoder_type=self.traj_encoder_type,
        ).to(self.DEVICE)
        self.policy_aclr, self.optimizer = self.accelerator.prepare(agent, self.init_optimizer(agent))
        learns = max(0, self.epochs - int(min(self.start_learning_at_epoch, self.epochs)))
        updates = learns * self.train_batches_per_epoch // self.batches_per_update
        self.lr_schedule = lr_schedule(self.optimizer, self.lr_warmup_steps, updates, self.lr_cooldown)
        self.updater = Updater(self.accelerator, self.policy, self.optimizer, self.lr_schedule, self.grad_clip)
        if self.accelerator.is_main_process:
            write_policy_spec(self.run_dir, self.policy)
            (self.run_dir / "config.txt").write_text(config.operative_config())

    def init_optimizer(self, policy: BaseAgent) -> torch.optim.Optimizer:
        """Override to use another optimizer than AdamW."""
        return adamw(policy.trainable_params, float(self.learning_rate), float(self.l2_coeff))

    def init_logger(self) -> None:
        """Open the log files; only the main process writes."""
        self._means = RunningMeans()
        self.logger: MetricsLogger | None = None
        if self.accelerator.is_main_process:
            wandb = console.wandb_options(self) if self.log_to_wandb else None
            self.logger = MetricsLogger(self.run_dir, self.log_to_tensorboard, wandb)

    def summary(self, env_summary: str) -> None:
        """Print the settings that matter most."""
        tqdm.write(console.summary(self, env_summary))

    # ---- the loop -------------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Run the epochs that are left.

        SIGINT, SIGTERM and SIGUSR1 finish the current step, save a training state and exit with code 128 + signal
        (130, 143, 138); ``resume="auto"`` goes on from there. Further signals change nothing.
        """
        self._require_start("learn()")
        assert self.dataset is not None
        with self._stop:
            while self.epoch < self.epochs and not self._stop:
                self._learn_epoch(self.dataset)
            if self._stop:
                self._leave()
        if self._stop:  # after the last look at it, while there still was somebody to notice
            self._leave()

    def _learn_epoch(self, dataset: RLDataset) -> None:
        """Evaluate, collect, train, save and publish; or return as soon as there is a signal."""
        begins = self._collected == 0 and self._trained == 0
        if self.always_load_latest:
            self.read_latest_policy()
        if begins and self._due(self.val_interval):
            self.evaluate_val()
        if self._stop:
            return
        if self.train_timesteps_per_epoch and self.epoch >= self.start_collecting_at_epoch:
            self.collect_new_training_data()
            collected = not self._stop
        else:
            collected = False
        self.log(dataset.on_end_of_collection(), "buffer")
        if collected:
            warn_if_nothing_saved(self)
        if not self._stop and self.epoch >= self.start_learning_at_epoch and self._wait_for_data():
            self.train_epoch()
        if self._stop:
            return
        if self._trained:  # once an epoch, and not where a stopped one will go on
            self.log(dataset.on_end_of_training(), "buffer")
        finished, self.epoch = self.epoch, self.epoch + 1
        self._collected = self._trained = 0
        if self.ckpt_interval and (finished % self.ckpt_interval == 0 or self.epoch == self.epochs):
            self.save_checkpoint()
        if self.always_save_latest:
            self.write_latest_policy()

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.epoch % interval == 0

    def _leave(self) -> None:
        """Save and exit, after a signal."""
        self._saved = False
        if self.ckpt_interval is not None:
            self.save_checkpoint()
        if self.always_save_latest:
            self.write_latest_policy()
        code = self._stop.exit_code
        if self.verbose and self.accelerator.is_main_process:
            saved = "saved; continue with resume='auto'" if self._saved else "nothing was saved"
            tqdm.write(f"stopped by a signal in epoch {self.epoch}; {saved} (exit code {code})")
        self.close()
        raise Stopped(code)

    def _wait_for_data(self) -> bool:
        """Whether there is data to train on; a process that only learns waits for those that collect."""
        assert self.dataset is not None
        if self.dataset.ready_for_training or self.collects or not self.dataset.can_become_ready:
            return self.dataset.ready_for_training
        bar = self._bar(None, "waiting for data", "s")
        while not self.dataset.ready_for_training and not self._stop:
            self._stop.wait(1.0)
            self.dataset.on_end_of_collection()
            bar.update(1)
        bar.close()
        return self.dataset.ready_for_training

    def collect_new_training_data(self) -> None:
        """Step each training actor ``train_timesteps_per_epoch`` times (less what a resumed epoch has done)."""
        self._require_start("collect_new_training_data()")
        pool, steps = self._pool("train"), (self.train_timesteps_per_epoch or 0) - self._collected
        if steps <= 0:
            return
        every = self.force_reset_train_envs_every
        if every is not None and self.epoch and self.epoch % every == 0 and self._collected == 0:
            self._pools["train"].reset()
        returns, specials = self._interact(self._pools["train"], steps, self.sample_actions_train, "collect", should_stop=True)
        pool.flush()
        self.log(self.policy_metrics([returns], [specials]), "rollout")

    def train_epoch(self) -> None:
        """Train on ``train_batches_per_epoch`` batches (less what a resumed epoch has done)."""
        self._require_start("train_epoch()")
        assert self.dataset is not None
        self.policy_aclr.train()
        bar = self._bar(self.train_batches_per_epoch - self._trained, "train", "batch")
        for batch in self._batches():
            log_step = self._trained % self.log_interval == 0
            self._means.add(self.train_step(batch, log_step))
            self._trained += 1
            bar.update(1)
            if log_step and self._trained > 1:
                self.log(self._means.take(), "train")
            if self._stop:
                break
        bar.close()
        self.log(self._means.take(), "train")

    def _batches(self) -> Iterator[Batch]:
        return self.train_dloader.batches(self.train_batches_per_epoch - self._trained)

    def train_step(self, batch: Batch, log_step: bool) -> dict[str, float | Tensor]:
        """One batch forward and backward, and a step of the optimizer once ``batches_per_update`` batches are through."""
        with self.accelerator.accumulate(self.policy_aclr):
            with self.caster():
                metrics = self.compute_loss(batch, log_step)
            loss = metrics["Actor Loss"] + self.critic_loss_weight * metrics["Critic Loss"]
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                metrics |= self.updater.step(log_step, loss)
        return metrics

    def compute_loss(self, batch: Batch, log_step: bool) -> dict[str, Any]:
        """The actor's and the critic's loss, averaged over what the masks leave, and metrics.

        Returns:
            "Actor Loss", "Critic Loss", "Sequence Length", "Batch Size (in Timesteps)", "Unmasked Batch Size (in
            Timesteps)", and what the agent adds.
        """
        loss = self.policy_aclr(batch, log_step)
        pad = batch.transition_mask[:, :, None]  # (B, L, 1, 1)
        actor_mask = self.edit_actor_mask(batch, loss.actor_loss, pad.expand_as(loss.actor_loss))
        critic_mask = None
        if loss.critic_loss is not None:
            critic_mask = self.edit_critic_mask(batch, loss.critic_loss, pad[:, :, None].expand_as(loss.critic_loss))
        return weighted_losses(loss, batch, actor_mask, critic_mask)

    def edit_actor_mask(self, batch: Batch, actor_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Override to leave timesteps out of the actor's loss.

        Args:
            actor_loss: (B, L, G, 1).
            pad_mask: bool, of the same shape; True where the transition is no padding.
        """
        return pad_mask

    def edit_critic_mask(self, batch: Batch, critic_loss: Tensor, pad_mask: Tensor) -> Tensor:
        """Override to leave timesteps out of the critics' loss; shapes are (B, L, C, G, 1)."""
        return pad_mask

    def caster(self) -> AbstractContextManager[Any]:
        """The context of mixed precision."""
        return self.accelerator.autocast()

    # ---- interaction and evaluation -------------------------------------------------------------------------------------

    def interact(
        self,
        envs: ActorPool,
        timesteps: int,
        hidden_state: Any = None,
        render: bool = False,
        save_on_done: bool = False,
        episodes: int | None = None,
    ) -> tuple[ReturnHistory, SpecialMetricHistory]:
        """Let the policy act in a pool of actors.

        Args:
            envs: from `amago.envs.make_pool`, reset.
            timesteps: steps of each actor.
            hidden_state: a list with the memory of each of ``envs.groups`` to begin with; None begins with none.
            render: draw each step.
            save_on_done: commit trajectories to disk as rollouts end, not only at the end.
            episodes: stop once so many rollouts have ended.

        Returns:
            returns and the environments' own metrics, of the rollouts that ended.
        """
        self._require_start("interact()")
        rollout = Rollout(envs, self.DEVICE, self.caster)
        rollout.memory = hidden_state
        return self._interact(rollout, timesteps, self.sample_actions, "interact", episodes, render, save_on_done)

    def _interact(
        self,
        rollout: Rollout,
        timesteps: int,
        sample: bool,
        title: str,
        episodes: int | None = None,
        render: bool = False,
        save_on_done: bool = False,
        should_stop: bool = False,
    ) -> tuple[ReturnHistory, SpecialMetricHistory]:
        bar = self._bar(timesteps * rollout.pool.num_actors, title, "step")
        stop = (lambda: bool(self._stop)) if should_stop else None
        taken, stats = interact(rollout, self.policy, timesteps, sample, episodes, bar.update, render, save_on_done, stop)
        bar.close()
        if title == "collect":
            self._collected += taken
            for name, frames in stats.frames.items():
                self.frames_by_env[name] = self.frames_by_env.get(name, 0) + frames
        if stats.restarts:
            faults = {"Restarted Environments": stats.restarts, "Dropped Rollouts": stats.dropped}
            self.log(faults, {"collect": "rollout", "evaluate": "val"}.get(title, "test"))
        return ReturnHistory(stats.episodes), SpecialMetricHistory(stats.episodes)

    def evaluate_val(self) -> None:
        """Evaluate on the validation environments without exploration, over all processes, and log it as ``val``."""
        self._require_start("evaluate_val()")
        self._pool("val")
        rollout = self._pools["val"]
        rollout.reset()
        returns, specials = self._interact(
            rollout, self.val_timesteps_per_epoch, self.sample_actions, "evaluate", should_stop=True
        )
        if self._stop:
            return  # it is made up for when the run goes on
        metrics = self.policy_metrics([returns], [specials])
        if not metrics:
            warnings.warn(
                f"no rollout ended within val_timesteps_per_epoch={self.val_timesteps_per_epoch} steps, so nothing was measured; "
                "make it longer than a rollout",
                stacklevel=2,
            )
        self.log(metrics, "val")
        if self.verbose and metrics and self.accelerator.is_main_process:
            tqdm.write(f"  epoch {self.epoch}: " + console.headline(metrics))

    def evaluate_test(
        self,
        make_test_env: EnvMaker | Iterable[EnvMaker],
        timesteps: int,
        render: bool = False,
        save_trajs_to: str | None = None,
        episodes: int | None = None,
        gamma: float | None = None,
    ) -> dict[str, float]:
        """Evaluate the policy on environments of your own, and log it as ``test``.

        Args:
            make_test_env: as ``make_val_env``.
            timesteps: steps of each actor.
            render: draw (steps the environments in this process).
            save_trajs_to: directory for the trajectories, as demonstrations for another run.
            episodes: stop once so many rollouts have ended.
            gamma: of the agent's discounts, the one that acts here; None: the one of all rollouts (``Agent.rollout_gamma_idx``).

        Returns:
            the metrics, by name.

        Raises:
            ValueError: the agent has no such discount.
        """
        self._require_start("evaluate_test()")
        mode = "sync" if render and self.env_mode == "async" else None
        with acting_by(self.policy, gamma):  # refuses a discount that there is not, before any actor starts
            rollout = self._rollout("test", make_test_env, None, save_trajs_to, mode)
            try:
                rollout.reset()
                histories = self._interact(rollout, timesteps, self.sample_actions, "test", episodes, render)
                rollout.pool.flush()
            finally:
                rollout.pool.close()
        metrics = self.policy_metrics([histories[0]], [histories[1]])
        self.log(metrics, "test")
        return metrics

    def policy_metrics(self, returns: Iterable[ReturnHistory], specials: Iterable[SpecialMetricHistory]) -> dict[str, float]:
        """Returns by environment name, and the environments' own metrics, over all processes; {} if nothing ended."""
        everywhere = self._gather([(merge_returns(returns), merge_specials(specials))])
        by_env: dict[str, list[float]] = {}
        special: dict[str, list[float]] = {}
        for process_returns, process_specials in everywhere:
            for merged, part in ((by_env, process_returns), (special, process_specials)):
                for name, values in part.items():
                    merged.setdefault(name, []).extend(values)
        return summarise(by_env, special)

    def _gather(self, items: list[Any]) -> list[Any]:
        return gather_object(items) if self.accelerator.num_processes > 1 else items  # type: ignore[no-any-return]

    # ---- checkpoints ----------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> BaseAgent:
        """The agent, free of Accelerate's wrapper."""
        return self.accelerator.unwrap_model(self.policy_aclr)  # type: ignore[no-any-return]

    @property
    def _parts(self) -> TrainingParts:
        assert self.dataset is not None
        return TrainingParts(
            self.accelerator, self.policy, self.optimizer, self.lr_schedule, self.updater, self.train_dloader, self.dataset,
            self.logger, self._pools, self.batches_per_update,
        )  # fmt: skip

    def save_checkpoint(self) -> None:
        """Save a complete training state, and the policy's weights by themselves.

        If that is not possible, as on a full disk, there is a warning, and earlier checkpoints are as they were.
        """
        self._require_start("save_checkpoint()")
        progress = Progress(self.epoch, self._collected, self._trained, self.run_seed, self.frames_by_env)
        ranks = self._gather([self._parts.local_state()])
        if self.accelerator.is_main_process:
            self._saved = self.checkpoints.save(
                progress.checkpoint_epoch, self._parts.snapshot(progress, ranks), self.keep_training_states
            )
        self.accelerator.wait_for_everyone()

    def load_checkpoint(self, epoch: int, resume_training_state: bool = True) -> None:
        """Load a checkpoint of this run by its epoch.

        Args:
            epoch: as in the file's name.
            resume_training_state: continue training from there; else load the policy's weights only.
        """
        self._require_start("load_checkpoint()")
        of = self.checkpoints.of_epoch if resume_training_state else self.checkpoints.weights_of_epoch
        self.load_checkpoint_from_path(str(of(epoch)), is_accelerate_state=resume_training_state)

    def load_checkpoint_from_path(self, path: str, is_accelerate_state: bool = True) -> None:
        """Load a training state (a directory), or weights only (``is_accelerate_state=False``; a ``.pt`` or ``.safetensors`` file).

        Weights may be a state dict that the original system has trained, for an agent of the same classes and sizes.

        Raises:
            CheckpointError: no such file, damaged, or it does not fit; every name that has no counterpart is listed.
        """
        self._require_start("load_checkpoint_from_path()")
        if not is_accelerate_state:
            load_agent_weights(self.policy, path)
            return
        found = self._parts.restore(Path(path))
        self.epoch, self._collected, self._trained = found.epoch, found.collected, found.trained
        self.frames_by_env, self.run_seed = found.frames_by_env, found.seed

    def _resume(self, found: Path | None) -> None:
        if found is not None:
            self.load_checkpoint_from_path(str(found))
        if not (self.verbose and self.accelerator.is_main_process):
            return
        if found is not None:
            steps = f"{self.updater.grad_steps} gradient steps, {self.env_steps} environment steps"
            tqdm.write(f"resumed {found} at epoch {self.epoch}, {steps}")
        elif self.resume != "never":
            tqdm.write(f"nothing to resume in {self.ckpt_dir}; starting at epoch 0")
        elif self.checkpoints.exist():
            tqdm.write(
                f"note: {self.run_dir} holds checkpoints of an earlier run and resume='never' starts afresh; 'auto' goes on"
            )

    def write_latest_policy(self) -> None:
        """Publish the policy's weights for processes that only act."""
        self._require_start("write_latest_policy()")
        if self.accelerator.is_main_process:
            self.checkpoints.publish(self.policy.state_dict())

    def read_latest_policy(self) -> None:
        """Take over the weights that another process published, if there are any yet, and never older ones than before."""
        self._require_start("read_latest_policy()")
        weights = self.checkpoints.read_latest()
        if weights is not None:
            checkpoint.load_into(self.policy, weights, self.checkpoints.latest)

    def delete_buffer_from_disk(self) -> None:
        """Clear the replay buffer (``dataset.delete()``), in the main process."""
        self._require_start("delete_buffer_from_disk()")
        assert self.dataset is not None
        if self.accelerator.is_main_process:
            self.dataset.delete()

    # ---- log ------------------------------------------------------------------------------------------------------------

    @property
    def env_steps(self) -> int:
        """Environment steps collected, over all environments (and, roughly, all processes)."""
        return sum(self.frames_by_env.values()) * self.accelerator.num_processes

    def x_axis_metrics(self) -> dict[str, int | float]:
        """What curves may be drawn against."""
        by_env = {f"total_frames-{name}": frames for name, frames in self.frames_by_env.items()}
        return {"Epoch": self.epoch, "total_frames": self.env_steps, "gradient_steps": self.updater.grad_steps, **by_env}

    def log(self, metrics_dict: Mapping[str, Any], key: str) -> None:
        """Log a dict of numbers as section ``key``, with the current x-axes."""
        if self.logger is not None and metrics_dict:
            x = {"epoch": self.epoch, "env_steps": self.env_steps, "grad_steps": self.updater.grad_steps}
            self.logger.log(metrics_dict, key, x, self.x_axis_metrics())

    def _bar(self, total: int | None, title: str, unit: str) -> tqdm:  # type: ignore[type-arg]
        hidden = not (self.verbose and self.accelerator.is_main_process)
        return console.progress_bar(f"epoch {self.epoch} {title}", total, unit, hidden)

    def _require_start(self, what: str) -> None:
        if not self._started:
            raise RuntimeError(f"call Experiment.start() before {what}")

    def close(self) -> None:
        """Stop actors, threads and loggers; twice is fine. The experiment cannot go on afterwards."""
        for rollout in self._pools.values():
            rollout.pool.close()
        self._pools = {}
        for name in ("train_dloader", "logger"):
            part = getattr(self, name, None)
            if part is not None:
                part.close()
        if isinstance(self.dataset, RLDataset):  # start() may have refused another thing
            self.dataset.close()
        self._started = False
