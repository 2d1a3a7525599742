"""The settings of an `Experiment`: every field, its meaning and its default."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amago.agent import BaseAgent
from amago.compat.datasets import reads_files
from amago.config import NamedArguments
from amago.data.extras import ExtraField
from amago.envs import AMAGOEnv
from amago.envs.exploration import EpsilonGreedy, ExplorationWrapper
from amago.loading import DiskTrajDataset, RLDataset
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TstepEncoder
from amago.run.callbacks import Callback
from amago.run.parts import NAMED_FIELDS

EnvMaker = Callable[[], AMAGOEnv]
EnvMakers = EnvMaker | Iterable[EnvMaker]
REQUIRED: Any = object()


@dataclass
class ExperimentSettings(NamedArguments):
    """The fields of `amago.Experiment`. All may be changed until ``start()``; gin sets their defaults (``Experiment.NAME``).

    Args:
        run_name: name of the run; its files are written to ``ckpt_base_dir/run_name``.
        ckpt_base_dir: directory of all runs. Where it is not given, ``dset_root/dset_name``: the run lies beside its buffer.
        max_seq_len: transitions in a training sequence, and steps of memory when acting.
        dataset: source of the training sequences. Alternatively ``dset_root`` and ``dset_name`` build a `DiskTrajDataset`
            that keeps at most ``dset_max_size`` trajectories, ``dset_max_steps`` transitions and ``dset_max_bytes`` bytes.
        tstep_encoder_type, traj_encoder_type, agent_type: classes, built with their (gin) defaults; or their names, as on the command line
            ("ff", "cnn", "goal"; "ff", "gru", "mamba", "mingru", "transformer"; "agent", "multitask"; and those of `amago.cli_utils.register`).
        val_timesteps_per_epoch: steps of each actor in an evaluation, at most; enough for at least one rollout to end. 0: no evaluation.
        val_episodes: rollouts in an evaluation, over all actors and processes, each of which takes its share and then waits. None: as many
            as end within ``val_timesteps_per_epoch``.
        make_train_env, make_val_env: a function that returns an `AMAGOEnv`, or a list with one function for each actor.

        parallel_actors: environments stepped in parallel.
        env_mode: "async" (worker processes), "sync" (this process), "already_vectorized" (one batched environment), or "auto": "sync"
            in a run with a ``seed``, else "sync" or "async" by the measured speed of one environment.
        async_env_mp_context: start method of the worker processes: "fork", "spawn" or "forkserver"; None means "forkserver".
        exploration_wrapper_type: wraps training environments: a class, "egreedy" or "bilevel"; with None only the policy's samples explore.
        sample_actions, sample_actions_val: evaluation samples from the policy, unless one of these is False; otherwise it takes the policy's
            mode. (Two names for one thing.)
        sample_actions_train: the same for collection.
        force_reset_train_envs_every: reset all training environments every so many epochs; None or 0: never.
        env_workers: worker processes of "async"; None: one for each core. 1 gives exactly the results of "sync".
        env_step_timeout: seconds after which a step counts as hung and its worker is replaced.
        env_trial_steps: ``start()`` takes so many random steps in the first environment, a second's worth at most, before its first
            rollout, to find mistakes in its code at once; 0: it does not. Never with "already_vectorized".
        max_env_restarts: environments that may be replaced within an hour before the run fails.

        log_to_wandb, wandb_project, wandb_entity, wandb_group_name: Weights & Biases. Project and entity default to the
            environment variables AMAGO_WANDB_PROJECT and AMAGO_WANDB_ENTITY.
        log_to_tensorboard: write event files to the run's directory.
        verbose: print a summary, notes and progress.
        progress: "rich": a line for each epoch, and, in a terminal or a notebook, a bar with the time left of the whole run; "plain": the
            lines alone; "none": neither.
        callbacks: called at named moments of the run (`amago.Callback`), in this order.
        log_interval: compute costly training metrics every so many batches; 0: never.

        traj_save_len: save a rollout in pieces of so many steps; the last piece ends with the rollout.
        has_dset_edit_rights: this process deletes the oldest trajectories.
        stagger_traj_file_lengths: the first piece of each rollout has a random length, so that actors do not all save at once.
        save_trajs_as: "segments" (many trajectories in a file, written at the end of each collection phase or when 8 MB are full), "npz" or
            "npz-compressed" (a file for each trajectory, written when it ends: slower, but `numpy.load` reads it). "segments"
            becomes "npz" for a `DiskTrajDataset` whose `sample_random_trajectory` takes no ``rng``, as it reads file by file.
        padded_sampling: which parts of rollouts longer than ``max_seq_len`` are trained on: "none", "left", "right" or "both"; see
            `amago.data.windows.subsequence`. Shorter ones are always trained on as a whole.
        refused_data_timeout: a process that never collects waits for data of others as long as nothing was found. If files were
            found and all were refused, it waits so many seconds for others, and then fails with the reasons.
        cut_short_trajectories: ``padded_sampling`` also cuts rollouts that fit into ``max_seq_len``, as the original does.
        extra_fields: further fields to record with each trajectory (`amago.ExtraField`), which arrive as ``batch.extras``.
            "behaviour_log_prob" and "log_prob" may be declared by name.
        dloader_workers: threads that read batches ahead; 0 reads in the training thread.

        epochs: number of epochs, each of one collection phase and one training phase; 0: `learn` does nothing.
        start_learning_at_epoch, start_collecting_at_epoch: first epoch with training, or with collection; infinity: never.
        train_timesteps_per_epoch: steps of each actor in a collection phase; None or 0: no collection.
        train_batches_per_epoch: batches in a training phase.
        val_interval: evaluate every so many epochs; None or 0: never.
        ckpt_interval: save a training state every so many epochs; None or 0: never.
        keep_training_states: number of training states to keep, the newest; None keeps all.
        always_save_latest, always_load_latest: write, or read, ``ckpts/latest`` in every epoch, to pass weights between
            processes of one run.
        resume: "never"; "auto" (the newest complete training state, if there is any); or the number of an epoch. Settings that differ
            from those of the training state are applied, and said, or refused (`amago.run.changes`).
        overwrite: with ``resume="never"``, delete the earlier run of this name: its checkpoints, its metrics, and the trajectories that it
            collected (``buffer/fifo``, never ``buffer/protected``). Without it, a process that learns does not start over an earlier run.
        share_buffer: collect into, and train on, a buffer that holds the trajectories of another run.
        init_from: begin with the weights of another run: its directory, one of its training states, or a file of weights. Not used by a
            run that resumes.
        seed: of all random numbers; None draws one and records it in the training state. Actors of a seeded run act in an
            order that does not depend on the clock, which can be slower with several workers.

        batch_size: sequences in a batch, for each process.
        batches_per_update: batches whose gradients are accumulated for one step of the optimizer.
        learning_rate, lr_warmup_steps, grad_clip, l2_coeff: AdamW's learning rate, updates of linear warm-up, largest norm
            of the gradient, and weight decay.
        l2_weights_only: no weight decay on biases, gains of norms, and other vectors and scalars.
        actor_learning_rate, critic_learning_rate, traj_learning_rate: of the actor, the critics and the sequence model, with the same warm-up
            and cool-down; None: ``learning_rate``.
        lr_cooldown: share of all updates (those of ``epochs`` epochs), at the end, over which the learning rate falls linearly to 0.
        ema_decay: the policy that acts, is evaluated and is published has an exponential moving average of the trained weights, with this
            decay at each update: 0.99 looks back about 100 updates (`amago.run.averaging`). 0: it has the trained weights themselves.
        critic_loss_weight: weight of the critic's loss; the actor's is 1. None: that of the agent (``Agent.critic_loss_weight``, 10).
        mixed_precision: "no", "bf16" or "fp16".
    """

    run_name: str = REQUIRED
    ckpt_base_dir: str = REQUIRED
    max_seq_len: int = REQUIRED
    dataset: RLDataset | None = None
    tstep_encoder_type: type[TstepEncoder] | str = REQUIRED
    traj_encoder_type: type[TrajEncoder] | str = REQUIRED
    agent_type: type[BaseAgent] | str = REQUIRED
    val_timesteps_per_epoch: int = REQUIRED
    make_train_env: EnvMakers = REQUIRED
    make_val_env: EnvMakers = REQUIRED

    parallel_actors: int = 12
    env_mode: str = "async"
    async_env_mp_context: str | None = None
    exploration_wrapper_type: type[ExplorationWrapper] | str | None = EpsilonGreedy
    sample_actions: bool = True
    force_reset_train_envs_every: int | None = None

    log_to_wandb: bool = False
    wandb_project: str | None = field(default_factory=lambda: os.environ.get("AMAGO_WANDB_PROJECT"))
    wandb_entity: str | None = field(default_factory=lambda: os.environ.get("AMAGO_WANDB_ENTITY"))
    wandb_group_name: str | None = None
    verbose: bool = True
    log_interval: int = 300

    traj_save_len: float = 1e10
    has_dset_edit_rights: bool = True
    stagger_traj_file_lengths: bool = True
    save_trajs_as: str = "segments"
    padded_sampling: str = "none"
    dloader_workers: int = 6

    epochs: int = 1000
    start_learning_at_epoch: float = 0
    start_collecting_at_epoch: float = 0
    train_timesteps_per_epoch: int | None = 1000
    train_batches_per_epoch: int = 1000
    val_interval: int | None = 20
    ckpt_interval: int | None = 50
    always_save_latest: bool = True
    always_load_latest: bool = False

    batch_size: int = 24
    batches_per_update: int = 1
    learning_rate: float = 1e-4
    critic_loss_weight: float | None = None
    lr_warmup_steps: int = 500
    grad_clip: float = 1.0
    l2_coeff: float = 1e-3
    mixed_precision: str = "no"

    sample_actions_train: bool = True
    sample_actions_val: bool = True
    lr_cooldown: float = 0.0
    seed: int | None = None
    resume: str | int = "never"
    log_to_tensorboard: bool = False
    env_workers: int | None = None
    env_step_timeout: float = 60.0
    max_env_restarts: int = 100
    keep_training_states: int | None = None
    dset_root: str | None = None
    dset_name: str | None = None
    dset_max_size: float = float("inf")
    dset_max_steps: float = float("inf")
    dset_max_bytes: float = float("inf")
    env_trial_steps: int = 20
    val_episodes: int | None = None
    extra_fields: Sequence[ExtraField | str] = ()
    cut_short_trajectories: bool = False
    refused_data_timeout: float = 60.0
    overwrite: bool = False
    share_buffer: bool = False
    init_from: str | os.PathLike[str] | None = None
    progress: str = "rich"
    callbacks: Sequence[Callback] = ()
    l2_weights_only: bool = False
    actor_learning_rate: float | None = None
    critic_learning_rate: float | None = None
    traj_learning_rate: float | None = None
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.ckpt_base_dir is REQUIRED and self.dset_root is not None and self.dset_name is not None:
            self.ckpt_base_dir = os.path.join(self.dset_root, self.dset_name)
        missing = [name for name, value in vars(self).items() if value is REQUIRED]
        if missing:
            raise TypeError(f"Experiment() needs {', '.join(missing)}")

    def resolve(self) -> None:
        """Replace shorthands: build the data set from ``dset_root`` and ``dset_name``; make lists of iterables of functions;
        replace names of parts by their classes; save what a data set reads file by file as one file each."""
        if self.dataset is None and self.dset_root is not None and self.dset_name is not None:
            self.dataset = DiskTrajDataset(
                self.dset_root,
                self.dset_name,
                self.dset_max_size,
                dset_max_steps=self.dset_max_steps,
                dset_max_bytes=self.dset_max_bytes,
            )
        if self.save_trajs_as == "segments" and reads_files(self.dataset):
            self.save_trajs_as = "npz"
        for name, classes in NAMED_FIELDS.items():
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, classes.get(value, value))
        for name in ("make_train_env", "make_val_env", "callbacks"):
            value = getattr(self, name)
            if isinstance(value, Iterable) and not callable(value) and not isinstance(value, str | bytes):
                setattr(self, name, list(value))  # an iterator can be read only once

    @property
    def run_dir(self) -> Path:
        """``ckpt_base_dir/run_name``."""
        return Path(self.ckpt_base_dir).expanduser() / self.run_name

    @property
    def learns(self) -> bool:
        """Whether this process trains in some epoch."""
        return bool(self.train_batches_per_epoch) and self.start_learning_at_epoch < self.epochs

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluations between epochs."""
        return bool(self.val_interval) and bool(self.val_timesteps_per_epoch)

    @property
    def collects(self) -> bool:
        """Whether this process collects data in some epoch."""
        return bool(self.train_timesteps_per_epoch) and self.start_collecting_at_epoch < self.epochs
