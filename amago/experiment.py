"""`Experiment`: build, train and evaluate an agent. The loop is `Experiment.learn`."""

from __future__ import annotations

import random
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

from amago import checkpoint, config
from amago.agent import BaseAgent
from amago.envs import AMAGOEnv
from amago.envs.exploration import ExplorationWrapper
from amago.envs.pool import ActorPool, make_pool
from amago.envs.statistics import ReturnHistory, SpecialMetricHistory
from amago.evaluation import merge_returns, merge_specials, summarise
from amago.experiment_checks import check_settings
from amago.loading import Batch, DatasetSettings, DiskTrajDataset, RLDataset, SequenceLoader
from amago.logging import MetricsLogger, RunningMeans
from amago.policy import write_policy_spec
from amago.rollout import Rollout
from amago.settings import EnvMaker, ExperimentSettings
from amago.shutdown import GracefulStop
from amago.training import Updater, adamw, linear_warmup, weighted_losses


@gin.configurable
@dataclass
class Experiment(ExperimentSettings):
    """Build, train and evaluate an agent.

    ``start()`` builds everything and ``learn()`` runs the epochs. The arguments are those of
    `amago.settings.ExperimentSettings`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epoch = 0
        self._collected = self._trained = 0  # progress within the epoch
        self.frames_by_env: dict[str, int] = {}
        self._started = False
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
        found = self._find_resume()
        self._seed_everything(found)
        self.init_dsets()
        try:
            env_summary = self.init_envs()
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
        # environments cannot be put back where they were: after a resume they begin with rollouts of their own
        self._env_seed = (self.run_seed, self.accelerator.process_index, *(_digits(resumed.name) if resumed else ()))
        torch_seed, numpy_seed, python_seed = np.random.SeedSequence(self._env_seed[:2]).generate_state(3).tolist()
        if self.seed is not None:
            torch.manual_seed(torch_seed)
            np.random.seed(numpy_seed)
            random.seed(python_seed)

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
        self.ckpt_dir = self.run_dir / "ckpts"
        for name in ("training_states", "policy_weights", "latest"):
            (self.ckpt_dir / name).mkdir(parents=True, exist_ok=True)

    def init_dsets(self) -> RLDataset:
        """Tell the data set what the experiment needs of it."""
        assert self.dataset is not None
        rights = self.has_dset_edit_rights and self.accelerator.is_main_process
        self.dataset.configure(DatasetSettings(self.max_seq_len, self.padded_sampling, rights))
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
            first = self.make_val_env if callable(self.make_val_env) else next(iter(self.make_val_env))
            env = first()
            if not isinstance(env, AMAGOEnv):
                raise TypeError(
                    f"make_val_env must return an AMAGOEnv, but returned {type(env).__name__}: wrap it in amago.envs.AMAGOEnv"
                )
            obs, act, rl2 = env.observation_space, env.action_spec.space, env.rl2_space
            env.close()
        self._spaces: tuple[gym.spaces.Dict, gym.Space[Any], gym.spaces.Box] = (obs, act, rl2)
        shapes = ", ".join(f"{k} {v.shape}" for k, v in obs.spaces.items())
        return f"{self.parallel_actors} actors ({self.env_mode}); observations: {shapes}; actions: {act}"

    def _pool(self, kind: str) -> ActorPool:
        """The pool of "train" or "val", started when first needed."""
        if kind not in self._pools:
            makers = self.make_train_env if kind == "train" else self.make_val_env
            recorder = self._recorder(self.dataset.save_new_trajs_to) if kind == "train" and self.dataset is not None else None
            exploration = self.exploration_wrapper_type if kind == "train" else None
            self._pools[kind] = self._rollout(makers, exploration, recorder, stream=len(kind))
            self._pools[kind].reset()
        return self._pools[kind].pool

    def _recorder(self, directory: str | None) -> dict[str, Any] | None:
        if directory is None:
            return None
        every = None if self.traj_save_len >= 1e10 else int(self.traj_save_len)
        return {
            "save_trajs_to": directory,
            "save_trajs_as": self.save_trajs_as,
            "save_every": every,
            "stagger": self.stagger_traj_file_lengths,
        }

    def _rollout(
        self,
        makers: EnvMaker | Iterable[EnvMaker],
        exploration: type[ExplorationWrapper] | None,
        recorder: dict[str, Any] | None,
        stream: int,
        env_mode: str | None = None,
    ) -> Rollout:
        mode = env_mode or self.env_mode
        copies = 1 if mode == "already_vectorized" else self.parallel_actors
        pool = make_pool(
            [makers] * copies if callable(makers) else list(makers),
            env_mode=mode,
            parallel_actors=self.parallel_actors,
            workers=self.env_workers,
            step_timeout=self.env_step_timeout,
            max_env_restarts=self.max_env_restarts,
            exploration=exploration,
            recorder=recorder,
            seed=np.random.SeedSequence((*self._env_seed, stream)),
            mp_context=self.async_env_mp_context,
        )
        return Rollout(pool, self.DEVICE, self.caster)

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
        agent = self.agent_type(
            obs_space=obs,
            rl2_space=rl2,
            action_space=act,
            max_seq_len=self.max_seq_len,
            tstep_encoder_type=self.tstep_encoder_type,
            traj_encoder_type=self.traj_encoder_type,
        ).to(self.DEVICE)
        self.policy_aclr, self.optimizer = self.accelerator.prepare(agent, self.init_optimizer(agent))
        self.lr_schedule = linear_warmup(self.optimizer, self.lr_warmup_steps)
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
            wandb = {
                "project": self.wandb_project,
                "entity": self.wandb_entity,
                "name": self.run_name,
                "group": self.wandb_group_name,
                "config": {k: str(v) for k, v in config.bindings().items()},
            }
            self.logger = MetricsLogger(self.run_dir, self.log_to_tensorboard, wandb if self.log_to_wandb else None)

    def summary(self, env_summary: str) -> None:
        """Print the settings that matter most."""
        count = sum(p.numel() for p in self.policy.trainable_params)
        rows = {
            "run": f"{self.run_name} ({self.run_dir})",
            "environments": env_summary,
            "exploration": getattr(self.exploration_wrapper_type, "__name__", "none"),
            "agent": f"{type(self.policy).__name__}: {type(self.policy.tstep_encoder).__name__} -> "
            f"{type(self.policy.traj_encoder).__name__}, {count:,} trainable parameters on {self.DEVICE}",
            "sequences": f"{self.batch_size * self.accelerator.num_processes} a batch, up to {self.max_seq_len} steps each",
            "an epoch": f"{self.train_timesteps_per_epoch or 0} steps of each actor, {self.train_batches_per_epoch} batches",
            "epochs": f"{self.epoch} to {self.epochs}; evaluation every {self.val_interval}, checkpoint every {self.ckpt_interval}",
            "seed": f"{self.run_seed}",
        }
        width = max(map(len, rows))
        tqdm.write("\n".join(f"  {k:<{width}}  {v}" for k, v in rows.items()))

    # ---- the loop -------------------------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Run the epochs that are left.

        SIGINT, SIGTERM and SIGUSR1 finish the current step, save a training state and exit with code 128 + signal
        (130, 143, 138); ``resume="auto"`` goes on from there.
        """
        self._require_start("learn()")
        assert self.dataset is not None
        with self._stop:
            while self.epoch < self.epochs and not self._stop:
                begins = self._collected == 0 and self._trained == 0
                if self.always_load_latest:
                    self.read_latest_policy()
                if begins and self._due(self.val_interval):
                    self.evaluate_val()
                if self._stop:
                    break
                if self.train_timesteps_per_epoch and self.epoch >= self.start_collecting_at_epoch:
                    self.collect_new_training_data()
                self.log(self.dataset.on_end_of_collection(), "buffer")
                if not self._stop and self.epoch >= self.start_learning_at_epoch and self._wait_for_data():
                    self.train_epoch()
                if self._stop:
                    break
                finished, self.epoch = self.epoch, self.epoch + 1
                self._collected = self._trained = 0
                if self.ckpt_interval and (finished % self.ckpt_interval == 0 or self.epoch == self.epochs):
                    self.save_checkpoint()
                if self.always_save_latest:
                    self.write_latest_policy()
            if self._stop:
                self._leave()

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.epoch % interval == 0

    def _leave(self) -> None:
        """Save and exit, after a signal."""
        if self.ckpt_interval is not None:
            self.save_checkpoint()
        if self.always_save_latest:
            self.write_latest_policy()
        code = self._stop.exit_code
        if self.verbose:
            tqdm.write(f"stopped by a signal in epoch {self.epoch}; saved; continue with resume='auto' (exit code {code})")
        self.close()
        raise SystemExit(code)

    def _wait_for_data(self) -> bool:
        """Whether there is data to train on; a process that only learns waits for those that collect."""
        assert self.dataset is not None
        if self.dataset.ready_for_training or self.collects:
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
        self.log(self.dataset.on_end_of_training(), "buffer")

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
                metrics |= self.updater.step(log_step)
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
        pool = rollout.pool
        bar = self._bar(timesteps * pool.num_actors, title, "step")

        def on_step(steps: int) -> None:
            bar.update(steps)
            if render:
                pool.render()
            if save_on_done and pool.resets.any():
                pool.flush()

        taken = rollout.run(
            self.policy, timesteps, sample, episodes, on_step, (lambda: bool(self._stop)) if should_stop else None
        )
        bar.close()
        stats = pool.drain()
        if title == "collect":
            self._collected += taken
            for name, frames in stats.frames.items():
                self.frames_by_env[name] = self.frames_by_env.get(name, 0) + frames
            if stats.restarts:
                self.log({"Restarted Environments": stats.restarts, "Dropped Rollouts": stats.dropped}, "rollout")
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
            tqdm.write(f"  epoch {self.epoch}: " + ", ".join(f"{k} {v:.3f}" for k, v in _headline(metrics).items()))

    def evaluate_test(
        self,
        make_test_env: EnvMaker | Iterable[EnvMaker],
        timesteps: int,
        render: bool = False,
        save_trajs_to: str | None = None,
        episodes: int | None = None,
    ) -> dict[str, float]:
        """Evaluate the policy on environments of your own, and log it as ``test``.

        Args:
            make_test_env: as ``make_val_env``.
            timesteps: steps of each actor.
            render: draw (steps the environments in this process).
            save_trajs_to: directory for the trajectories, as demonstrations for another run.
            episodes: stop once so many rollouts have ended.

        Returns:
            the metrics, by name.
        """
        self._require_start("evaluate_test()")
        mode = "sync" if render and self.env_mode == "async" else None
        rollout = self._rollout(make_test_env, None, self._recorder(save_trajs_to), stream=99, env_mode=mode)
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

    def save_checkpoint(self) -> None:
        """Save a complete training state, and the policy's weights by themselves."""
        self._require_start("save_checkpoint()")
        epoch = max(0, self.epoch - 1) if self._collected == self._trained == 0 else self.epoch
        local = {"rng": checkpoint.rng_state(), "pools": {k: r.pool.state_dict() for k, r in self._pools.items()}}
        ranks = self._gather([local])
        if not self.accelerator.is_main_process:
            self.accelerator.wait_for_everyone()
            return
        assert self.dataset is not None
        assert self.logger is not None
        state = {
            "epoch": self.epoch, "collected": self._collected, "trained": self._trained, "seed": self.run_seed,
            "frames_by_env": self.frames_by_env, "updater": self.updater.state_dict(), "schedule": self.lr_schedule.state_dict(),
            "next_batch": self.train_dloader.next_batch, "wall_time": self.logger.wall_time,
            "dataset": self.dataset.state_dict(), "processes": self.accelerator.num_processes, "ranks": ranks,
            "batches_in_update": self.accelerator.step % self.batches_per_update,
        }  # fmt: skip
        root = self.ckpt_dir / "training_states"
        weights = self.policy.state_dict()
        tensors = {"optimizer": self.optimizer.state_dict(), "gradients": self._unused_gradients()}
        if self.accelerator.scaler is not None:
            tensors["scaler"] = self.accelerator.scaler.state_dict()
        checkpoint.save_training_state(root / f"{self.run_name}_epoch_{epoch}", weights, tensors, state)
        checkpoint.save_weights(weights, self.ckpt_dir / "policy_weights" / f"policy_epoch_{epoch}.pt")
        checkpoint.prune(root, self.run_name, self.keep_training_states)
        self.accelerator.wait_for_everyone()

    def _unused_gradients(self) -> dict[str, Tensor]:
        """Those of an update that has not seen all of its ``batches_per_update`` yet."""
        if self.accelerator.step % self.batches_per_update == 0:
            return {}
        return {name: p.grad for name, p in self.policy.named_parameters() if p.grad is not None}

    def load_checkpoint(self, epoch: int, resume_training_state: bool = True) -> None:
        """Load a checkpoint of this run by its epoch.

        Args:
            epoch: as in the file's name.
            resume_training_state: continue training from there; else load the policy's weights only.
        """
        self._require_start("load_checkpoint()")
        if resume_training_state:
            self.load_checkpoint_from_path(str(self._training_state(epoch)), is_accelerate_state=True)
        else:
            path = self.ckpt_dir / "policy_weights" / f"policy_epoch_{epoch}.pt"
            self.load_checkpoint_from_path(str(path), is_accelerate_state=False)

    def load_checkpoint_from_path(self, path: str, is_accelerate_state: bool = True) -> None:
        """Load a training state (a directory) or weights only (a ``.pt`` or ``.safetensors`` file)."""
        self._require_start("load_checkpoint_from_path()")
        if not is_accelerate_state:
            checkpoint.load_into(self.policy, checkpoint.load_weights(path), path)
            return
        weights, tensors, state = checkpoint.load_training_state(Path(path))
        if state["processes"] != self.accelerator.num_processes:
            raise checkpoint.CheckpointError(
                f"{path} was saved by {state['processes']} processes and this run has {self.accelerator.num_processes}: start as many, "
                "or load the policy alone with resume_training_state=False"
            )
        checkpoint.load_into(self.policy, weights, path)
        for name, p in self.policy.named_parameters():
            p.grad = tensors["gradients"][name].to(p.device) if name in tensors["gradients"] else None
        self.optimizer.load_state_dict(tensors["optimizer"])
        if self.accelerator.scaler is not None and "scaler" in tensors:
            self.accelerator.scaler.load_state_dict(tensors["scaler"])
        self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        assert self.dataset is not None
        self.epoch, self._collected, self._trained = state["epoch"], state["collected"], state["trained"]
        self.frames_by_env = dict(state["frames_by_env"])
        self.updater.load_state_dict(state["updater"])
        self.lr_schedule.load_state_dict(state["schedule"])
        self.run_seed = self.train_dloader.seed = state["seed"]
        self.train_dloader.next_batch = state["next_batch"]
        self.accelerator.step = state["batches_in_update"]
        self.dataset.load_state_dict(state["dataset"])
        if self.logger is not None:
            self.logger.rewind(state["wall_time"])
        local = state["ranks"][self.accelerator.process_index]
        for kind, saved in local["pools"].items():
            if kind in self._pools:
                self._pools[kind].pool.load_state_dict(saved)
        checkpoint.set_rng_state(local["rng"])

    def _find_resume(self) -> Path | None:
        """The training state to go on from, as ``resume`` says; None to start afresh."""
        root = self.ckpt_dir / "training_states"
        states = checkpoint.training_states(root, self.run_name)
        if self.resume == "auto":
            return checkpoint.newest_complete(root, self.run_name)
        if self.resume != "never":
            return self._training_state(int(self.resume))
        if states and self.verbose:
            tqdm.write(
                f"note: {self.run_dir} holds checkpoints of an earlier run and resume='never' starts afresh; 'auto' goes on"
            )
        return None

    def _training_state(self, epoch: int) -> Path:
        states = checkpoint.training_states(self.ckpt_dir / "training_states", self.run_name)
        if epoch not in states:
            known = ", ".join(map(str, states)) or "none"
            raise checkpoint.CheckpointError(
                f"run {self.run_name!r} has no training state of epoch {epoch}; there are: {known}"
            )
        return states[epoch]

    def _resume(self, found: Path | None) -> None:
        if found is not None:
            self.load_checkpoint_from_path(str(found))
        if self.verbose and self.accelerator.is_main_process and self.resume != "never":
            if found is None:
                tqdm.write(f"nothing to resume in {self.ckpt_dir}; starting at epoch 0")
            else:
                steps = f"{self.updater.grad_steps} gradient steps, {self.env_steps} environment steps"
                tqdm.write(f"resumed {found} at epoch {self.epoch}, {steps}")

    def write_latest_policy(self) -> None:
        """Publish the policy's weights for processes that only act."""
        self._require_start("write_latest_policy()")
        if self.accelerator.is_main_process:
            checkpoint.save_weights(self.policy.state_dict(), self.ckpt_dir / "latest" / "policy.pt")
            link = self.run_dir / "policy.pt"
            if not link.is_symlink():
                link.unlink(missing_ok=True)
                link.symlink_to(Path("ckpts") / "latest" / "policy.pt")

    def read_latest_policy(self) -> None:
        """Take over the weights that another process published, if there are any yet."""
        self._require_start("read_latest_policy()")
        path = self.ckpt_dir / "latest" / "policy.pt"
        if path.is_file():
            checkpoint.load_into(self.policy, checkpoint.load_weights(path), path)

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
        title = f"epoch {self.epoch} {title}"
        return tqdm(
            total=total, desc=f"{title:<20}", unit=unit, disable=hidden, leave=False, dynamic_ncols=True, mininterval=0.5
        )

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
        self._started = False


def _headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """The few numbers worth a line on the console."""
    shown = {"return": metrics["Average Total Return (Across All Env Names)"], "rollouts": metrics["Number of Rollouts"]}
    extra = [k for k in metrics if "Success" in k]
    return shown | {k.removeprefix("Average "): metrics[k] for k in extra[:1] + extra[-1:]}


def _digits(name: str) -> tuple[int, ...]:
    """The epoch at the end of a training state's name."""
    return (1 + int(name.rpartition("_")[2]),)
