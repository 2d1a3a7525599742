"""The settings of an `Experiment`: every field with its default, its check, and its treatment on resume."""

# ruff: noqa: RUF009  # setting() makes fields of a dataclass

from __future__ import annotations

import difflib
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from amago.agent import BaseAgent
from amago.agent.agent import AGENTS
from amago.config import plain
from amago.data.batch import PADDED_SAMPLING
from amago.data.extras import ExtraField, check_extra_fields
from amago.describe import name_of
from amago.envs import AMAGOEnv
from amago.envs.exploration import EXPLORATION, EpsilonGreedy, ExplorationWrapper
from amago.envs.pool import ENV_MODES
from amago.fields import Check, Rule, declare, faults, number, one_of, optional, path, switch, text, whole, within
from amago.loading import DiskTrajDataset, RLDataset
from amago.loading.dataset import reads_files
from amago.nets.traj_base import TRAJ_ENCODERS
from amago.nets.traj_encoders import TrajEncoder
from amago.nets.tstep_encoders import TSTEP_ENCODERS, TstepEncoder
from amago.run.callbacks import Callback, mistakes_in


class SettingsError(ValueError):
    """One or more fields of an `Experiment` are wrong; the message has a line for each."""


def unwritable(name: str, path: object, purpose: str) -> Iterable[str]:
    """Reasons why a directory, given by the setting ``name`` for files of a kind, or its nearest existing parent cannot be written to."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        yield f"{name} must be the path of a directory, got {path!r}"
        return
    directory = Path(path).expanduser()
    existing = next((p for p in (directory, *directory.absolute().parents) if os.path.lexists(p)), directory)
    if not existing.is_dir():
        yield f"{name} is {os.fspath(path)!r}, for {purpose}, but {str(existing)!r} is a file: name a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{name} is {os.fspath(path)!r}, for {purpose}, but {str(existing)!r} cannot be written to: name another directory"


def subclass_of(base: type, named: Mapping[str, Any], or_none: bool = False) -> Check:
    """A class below ``base``, or a function in its place; names, which are in ``named``, were replaced before."""

    def check(name: str, value: object) -> str | None:
        if isinstance(value, str):
            near = difflib.get_close_matches(value, named, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"{name} must be {', '.join(map(repr, named))} or a subclass of {base.__name__}, got {value!r}{hint}"
        right = callable(value) and not (isinstance(value, type) and not issubclass(value, base))
        return None if right or (value is None and or_none) else f"{name} must be a subclass of {base.__name__}, got {value!r}"

    return check


def directory(name: str, value: object) -> str | None:
    """Check the path of a directory in which checkpoints and logs can be written."""
    return next(iter(unwritable(name, value, "checkpoints and logs")), None)


EnvMaker = Callable[[], AMAGOEnv]
EnvMakers = EnvMaker | Iterable[EnvMaker]
REQUIRED: Any = object()
REFUSE, IGNORE = "refuse", "ignore"
"""Treatments, on resume, of a setting that differs from the training state's, in place of a note on the loss."""
PROGRESS = ("rich", "plain", "none")
LOG_TO = ("csv", "mlflow", "tensorboard", "trackio", "wandb")
NAMED_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "tstep_encoder_type": TSTEP_ENCODERS, "traj_encoder_type": TRAJ_ENCODERS, "agent_type": AGENTS, "exploration_wrapper_type": EXPLORATION,
}  # fmt: skip
"""For each field that takes a part of an agent, the parts by name."""
_NAME = text("a name without '/'", r"(?!\.\.?$)[^/\\\0]+")
_RESUME = Rule(
    "'never', 'auto' or the number of an epoch", lambda v: (isinstance(v, str) and v in ("never", "auto")) or whole(0).ok(v)
)
_WEIGHTS = Rule("the path of a run, of a training state or of a file of weights", path.ok)
_OPTIONAL_TEXT = optional(text("a text"))
_LOG_TO = Rule(f"a list of names of {', '.join(LOG_TO)}", lambda v: isinstance(v, list | tuple) and all(x in LOG_TO for x in v))
_COMPILE = Rule("'auto', True or False", lambda v: isinstance(v, bool) or (isinstance(v, str) and v == "auto"))
_RATE = number(above=0, finite=True)
_TSTEP_ENCODER = subclass_of(TstepEncoder, TSTEP_ENCODERS)
_EXPLORATION = subclass_of(ExplorationWrapper, EXPLORATION, or_none=True)
# notes on lost state
_SCHEDULE = "the learning rate follows the new schedule from the current update on"
_ROLLOUTS = "for rollouts from now on"
_ACTORS = "actors keep their exploration schedules; new ones begin with the schedule of another"
_SEED = "batches, networks and actors are seeded anew"
_AVERAGE = "an average of the weights that was not kept before begins with the present ones"


setting = partial(declare, resume="", help="")
"""A field of `ExperimentSettings`: its default (`REQUIRED`: there is none) and ``check``, as of `declare`; ``resume``: a change is applied to a
run that resumes, with this note on lost state, or `REFUSE`, or `IGNORE`; ``help`` of its command-line argument, --NAME, in training scripts (empty:
there is none)."""


@dataclass
class ExperimentSettings:
    """The fields of `amago.Experiment`. All may be changed until ``start()``; gin sets their defaults (``Experiment.NAME``).

    Args:
        run_name: name of the run; its files are written to ``ckpt_base_dir/run_name``.
        ckpt_base_dir: directory of all runs. Where it is not given, ``dset_root/dset_name``: the run lies beside its buffer.
        max_seq_len: transitions in a training sequence, and steps of memory when acting.
        dataset: source of the training sequences. Alternatively ``dset_root`` and ``dset_name`` build a `DiskTrajDataset`
            that keeps at most ``dset_max_size`` trajectories, ``dset_max_steps`` transitions and ``dset_max_bytes`` bytes.
        tstep_encoder_type, traj_encoder_type, agent_type: classes, built with their (gin) defaults; or their names, as on the command line
            ("ff", "cnn", "goal"; "ff", "gru", "lstm", "mamba", "mingru", "transformer"; "agent", "multitask"; or registered by
            `amago.cli_utils.register`).
        val_timesteps_per_epoch: steps of each actor in an evaluation, at most; enough for at least one rollout to end. 0: no evaluation.
        val_episodes: rollouts in an evaluation, over all actors and processes, each of which takes its share and then waits. None: of each
            actor as many as end within ``val_timesteps_per_epoch``, regardless of their lengths: short rollouts are not
            favoured.
        make_train_env, make_val_env: a function that returns an `AMAGOEnv`, or a list with one function for each actor.

        parallel_actors: environments stepped in parallel.
        env_mode: "async" (worker processes), "sync" (this process), "already_vectorized" (one batched environment), or "auto": "sync"
            in a run with a ``seed``, else "async".
        async_env_mp_context: start method of the worker processes: "fork", "spawn" or "forkserver"; None means "forkserver".
        exploration_wrapper_type: wraps training environments: a class, "egreedy" or "bilevel"; with None only the policy's samples explore.
        sample_actions, sample_actions_val: evaluation samples from the policy, unless one of these is False; otherwise it takes the policy's
            mode. (Two names for one thing.)
        sample_actions_train: the same for collection.
        force_reset_train_envs_every: reset all training environments every so many epochs; None or 0: never.
        env_workers: worker processes of "async"; None: one for each core. 1 gives exactly the results of "sync".
        env_step_timeout: seconds after which a step counts as hung and its worker is replaced.
        max_env_restarts: environments that may be replaced within an hour before the run fails.

        log_to_wandb, wandb_project, wandb_entity, wandb_group_name: Weights & Biases. Project and entity default to the
            environment variables AMAGO_WANDB_PROJECT and AMAGO_WANDB_ENTITY.
        log_to_tensorboard: write event files to the run's directory.
        log_to: loggers by name, beside these: "csv" (``metrics.csv`` of the run's directory), "mlflow", "tensorboard", "trackio", "wandb".
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
            becomes "npz" for a `DiskTrajDataset` whose `sample_random_trajectory` takes no ``rng``, because it reads file by
            file.
        padded_sampling: which parts of rollouts longer than ``max_seq_len`` are trained on: "none", "left", "right" or "both"; see
            `amago.data.batch.subsequence`. Shorter ones are always trained on as a whole.
        cut_short_trajectories: ``padded_sampling`` also cuts rollouts that fit into ``max_seq_len``, as the original does.
        extra_fields: further fields to record with each trajectory (`amago.ExtraField`), which arrive as ``batch.extras``.
            "log_prob" may be declared by name.
        dloader_workers: threads that read batches ahead; 0 reads in the training thread.

        epochs: number of epochs, each of one collection phase and one training phase; 0: `learn` does nothing.
        total_steps: environment steps of all actors and processes; `learn` sets ``epochs`` to what the rest of them takes, and the last epoch
            collects only what is left (each actor takes as many: the number is rounded up to a multiple of theirs). A process that never collects
            ends with the epoch in which so many were delivered. None: ``epochs`` counts.
        start_learning_at_epoch, start_collecting_at_epoch: first epoch with training, or with collection; infinity: never.
        train_timesteps_per_epoch: steps of each actor in a collection phase; None or 0: no collection.
        train_batches_per_epoch: batches in a training phase.
        val_interval: evaluate every so many epochs; None or 0: never.
        ckpt_interval: save a training state every so many epochs; None or 0: never.
        keep_training_states, keep_policy_weights: number of training states, and of files of the policy's weights beside them, to keep, the
            newest; None keeps all.
        always_save_latest, always_load_latest: write, or read, ``ckpts/latest`` in every epoch, to pass weights between
            processes of one run.
        resume: "never"; "auto" (the newest complete training state, if there is any); or the number of an epoch. Settings that differ
            from the training state's are applied and reported, or refused (`amago.run.state`).
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
        actor_learning_rate, critic_learning_rate: of the actor and of the critics, with the same warm-up and cool-down; None:
            ``learning_rate``.
        lr_cooldown: share of all updates of ``epochs`` epochs, at the end, over which the learning rate falls linearly to 0.
        ema_decay: the policy that acts, is evaluated and is published has an exponential moving average of the trained weights, with this
            decay at each update: 0.99 looks back about 100 updates (`amago.run.learner`). 0: it has the trained weights themselves.
        critic_loss_weight: weight of the critic's loss; the actor's is 1. None: the agent's (``Agent.critic_loss_weight``, 10).
        mixed_precision: "no", "bf16" or "fp16".
        compile: compute losses by ``torch.compile``; "auto": on CUDA, with one process. Sequences are padded to ``max_seq_len``, or, with one
            process, to a half, a quarter or an eighth of it. Where compilation fails, a line in the log says so, and losses are computed without it.
        cuda_graphs: on CUDA, with one process and one batch an update, replay each update as one CUDA graph, captured after three ordinary ones
            of its shape (padded as with ``compile``). Overrides of `compute_loss` and masks must do the same in each update, on the device:
            their Python code runs in the capture alone. Updates that are logged, or drawn by priority, are ordinary ones. With any number of
            processes, steps of the policy are replayed, too (`amago.run.rollout.Rollout`).
        matmul_precision: of float32 matrix products on CUDA, as of ``torch.set_float32_matmul_precision``, until ``close()``: "high" is
            TF32, "highest" float32.
    """

    builds_optimizer = True  # no field: a process that only collects needs none

    run_name: str = setting(REQUIRED, check=_NAME, resume=IGNORE, help="name of the run")
    ckpt_base_dir: str = setting(REQUIRED, check=directory, resume=IGNORE)
    max_seq_len: int = setting(REQUIRED, check=whole(1))  # where weights depend on it, loading them refuses the shapes
    dataset: RLDataset | None = setting(None, resume="batches are others than those that the run would have drawn")
    tstep_encoder_type: type[TstepEncoder] | str = setting(REQUIRED, check=_TSTEP_ENCODER, resume=REFUSE)
    traj_encoder_type: type[TrajEncoder] | str = setting(REQUIRED, check=subclass_of(TrajEncoder, TRAJ_ENCODERS), resume=REFUSE)
    agent_type: type[BaseAgent] | str = setting(REQUIRED, check=subclass_of(BaseAgent, AGENTS), resume=REFUSE)
    val_timesteps_per_epoch: int = setting(REQUIRED, check=whole(0))
    make_train_env: EnvMakers = setting(REQUIRED)
    make_val_env: EnvMakers = setting(REQUIRED)

    parallel_actors: int = setting(12, check=whole(1), resume=_ACTORS)
    env_mode: str = setting("async", check=one_of(*ENV_MODES))
    async_env_mp_context: str | None = setting(None, check=one_of(None, "fork", "spawn", "forkserver"), resume=IGNORE)
    exploration_wrapper_type: type[ExplorationWrapper] | str | None = setting(
        EpsilonGreedy, check=_EXPLORATION, resume="schedules of exploration begin anew"
    )
    sample_actions: bool = setting(True, check=switch)
    force_reset_train_envs_every: int | None = setting(None, check=optional(whole(0)))

    log_to_wandb: bool = setting(False, check=switch, resume=IGNORE)
    wandb_project: str | None = setting(partial(os.environ.get, "AMAGO_WANDB_PROJECT"), check=_OPTIONAL_TEXT, resume=IGNORE)
    wandb_entity: str | None = setting(partial(os.environ.get, "AMAGO_WANDB_ENTITY"), check=_OPTIONAL_TEXT, resume=IGNORE)
    wandb_group_name: str | None = setting(None, check=_OPTIONAL_TEXT, resume=IGNORE)
    verbose: bool = setting(True, check=switch, resume=IGNORE)
    log_interval: int = setting(300, check=whole(0))

    traj_save_len: float = setting(1e10, check=number(1), resume=_ROLLOUTS)
    has_dset_edit_rights: bool = setting(True, check=switch)
    stagger_traj_file_lengths: bool = setting(True, check=switch)
    save_trajs_as: str = setting("segments", check=one_of("segments", "npz", "npz-compressed"), resume=_ROLLOUTS)
    padded_sampling: str = setting("none", check=one_of(*PADDED_SAMPLING))
    dloader_workers: int = setting(6, check=whole(0), resume=IGNORE)

    epochs: int = setting(1000, check=whole(0), help="epochs of collection and training")
    start_learning_at_epoch: float = setting(0, check=number(0))
    start_collecting_at_epoch: float = setting(0, check=number(0))
    train_timesteps_per_epoch: int | None = setting(1000, check=optional(whole(0)))
    train_batches_per_epoch: int = setting(1000, check=whole(0))
    val_interval: int | None = setting(20, check=optional(whole(0)), help="epochs between evaluations")
    ckpt_interval: int | None = setting(50, check=optional(whole(0)), help="epochs between training states")
    always_save_latest: bool = setting(True, check=switch)
    always_load_latest: bool = setting(False, check=switch)

    batch_size: int = setting(24, check=whole(1), help="sequences in a batch")
    batches_per_update: int = setting(1, check=whole(1), resume="an update that was begun with fewer batches begins anew")
    learning_rate: float = setting(1e-4, check=_RATE, help="learning rate of AdamW")
    critic_loss_weight: float | None = setting(None, check=optional(number(0, finite=True)))
    lr_warmup_steps: int = setting(500, check=whole(0), resume=_SCHEDULE)
    grad_clip: float = setting(1.0, check=number(above=0))
    l2_coeff: float = setting(1e-3, check=number(0, finite=True))
    mixed_precision: str = setting("no", check=one_of("no", "fp16", "bf16"), help="precision of the networks")

    sample_actions_train: bool = setting(True, check=switch)
    sample_actions_val: bool = setting(True, check=switch)
    lr_cooldown: float = setting(0.0, check=within("[0, 1]", lambda v: 0 <= v <= 1), resume=_SCHEDULE)
    seed: int | None = setting(
        None, check=optional(whole(0)), resume=_SEED, help="seed of all random numbers; if not given, a new one is drawn"
    )
    resume: str | int = setting("never", check=_RESUME, resume=IGNORE)
    log_to_tensorboard: bool = setting(False, check=switch, resume=IGNORE)
    env_workers: int | None = setting(None, check=optional(whole(1)), help="worker processes; if not given, one for each core")
    env_step_timeout: float = setting(60.0, check=number(above=0))
    max_env_restarts: int = setting(100, check=whole(0))
    keep_training_states: int | None = setting(None, check=optional(whole(1)), help="training states to keep; all if not given")
    dset_root: str | None = setting(None, check=optional(path), resume=IGNORE)
    dset_name: str | None = setting(None, check=_OPTIONAL_TEXT, resume=IGNORE)
    dset_max_size: float = setting(math.inf, check=number(1), resume=IGNORE)
    dset_max_steps: float = setting(math.inf, check=number(1), resume=IGNORE)
    dset_max_bytes: float = setting(math.inf, check=number(1), resume=IGNORE)
    val_episodes: int | None = setting(None, check=optional(whole(1)), help="rollouts in an evaluation, over all actors")
    extra_fields: Sequence[ExtraField | str] = setting((), resume=_ROLLOUTS)
    cut_short_trajectories: bool = setting(False, check=switch)
    overwrite: bool = setting(False, check=switch, resume=IGNORE)
    share_buffer: bool = setting(False, check=switch, resume=IGNORE)
    init_from: str | os.PathLike[str] | None = setting(None, check=optional(_WEIGHTS), resume=IGNORE)
    progress: str = setting("rich", check=one_of(*PROGRESS), resume=IGNORE)
    callbacks: Sequence[Callback] = setting((), resume=IGNORE)
    actor_learning_rate: float | None = setting(None, check=optional(_RATE))
    critic_learning_rate: float | None = setting(None, check=optional(_RATE))
    ema_decay: float = setting(0.0, check=within("[0, 1)", lambda v: 0 <= v < 1), resume=_AVERAGE)
    total_steps: int | None = setting(None, check=optional(whole(1)))
    keep_policy_weights: int | None = setting(100, check=optional(whole(1)))
    log_to: Sequence[str] = setting((), check=_LOG_TO, resume=IGNORE)
    compile: bool | str = setting("auto", check=_COMPILE, resume=IGNORE)
    cuda_graphs: bool = setting(False, check=switch, resume=IGNORE)
    matmul_precision: str = setting("high", check=one_of("highest", "high", "medium"), resume=IGNORE)

    def __post_init__(self) -> None:
        if self.ckpt_base_dir is REQUIRED and self.dset_root is not None and self.dset_name is not None:
            self.ckpt_base_dir = os.path.join(self.dset_root, self.dset_name)
        self._started_in = os.getcwd()  # an environment may change the working directory
        missing = [name for name, value in vars(self).items() if value is REQUIRED]
        if missing:
            raise TypeError(f"Experiment() needs {', '.join(missing)}")

    def resolve(self) -> None:
        """Replace shorthands: numbers of NumPy and PyTorch become Python's; build the dataset from ``dset_root`` and
        ``dset_name``; make lists of iterables of functions; replace names of parts by their classes; save one file for each
        trajectory where a dataset reads file by file."""
        scalars = {k: v for k, v in vars(self).items() if isinstance(v, np.generic | np.ndarray | torch.Tensor) and v.ndim == 0}
        vars(self).update({name: plain(value) for name, value in scalars.items()})
        root, dset = self.dset_root, self.dset_name
        if self.dataset is None and root is not None and dset is not None and not any(faults(self, "dset_")):
            size, steps, count = self.dset_max_size, self.dset_max_steps, self.dset_max_bytes
            self.dataset = DiskTrajDataset(root, dset, size, dset_max_steps=steps, dset_max_bytes=count)
        if isinstance(self.save_trajs_as, str) and self.save_trajs_as == "segments" and reads_files(self.dataset):
            self.save_trajs_as = "npz"
        for name, classes in NAMED_FIELDS.items():
            value = vars(self)[name]
            if isinstance(value, str):
                setattr(self, name, classes.get(value, value))
        for name in ("make_train_env", "make_val_env", "callbacks"):
            value = vars(self)[name]
            if isinstance(value, Iterable) and not callable(value) and not isinstance(value, str | bytes):
                setattr(self, name, list(value))  # an iterator can be read only once

    @property
    def run_dir(self) -> Path:
        """``ckpt_base_dir/run_name``, absolute."""
        return Path(self._started_in, os.path.expanduser(self.ckpt_base_dir), self.run_name)

    @property
    def learns(self) -> bool:
        """True if this process trains in some epoch."""
        return bool(self.train_batches_per_epoch) and self.start_learning_at_epoch < self.epochs

    @property
    def evaluates(self) -> bool:
        """True if there are evaluations between epochs."""
        return bool(self.val_interval) and bool(self.val_timesteps_per_epoch)

    @property
    def collects(self) -> bool:
        """True if this process collects data in some epoch."""
        return bool(self.train_timesteps_per_epoch) and self.start_collecting_at_epoch < self.epochs

    def plan_epochs(self, processes: int, epoch: int = 0, collected: int = 0, env_steps: int = 0) -> str:
        """Set ``epochs`` to those that ``total_steps`` takes, after finished epochs, steps of each actor in the current one, and steps in all.
        Returns a note where nothing is left to do."""
        each = int(self.parallel_actors) * processes
        per_epoch = int(self.train_timesteps_per_epoch or 0) * each
        if self.total_steps is not None and per_epoch and self.start_collecting_at_epoch < math.inf:
            left = max(0, int(self.total_steps) - env_steps) + collected * each
            self.epochs = max(epoch, int(self.start_collecting_at_epoch)) + -(-left // per_epoch)
        done = f"nothing is left to do: {epoch} epochs are finished, and epochs={self.epochs}; more of them go on"
        return done if epoch >= self.epochs > 0 else ""

    def has_delivered(self, env_steps: int) -> bool:
        """True in a process that never collects once its dataset got ``total_steps`` steps, with which its run ends."""
        return self.total_steps is not None and not self.collects and env_steps >= self.total_steps

    @functools.cached_property
    def exploration_plan(self) -> tuple[int, bool]:
        """The arguments of `ExplorationWrapper.fit_to_run`: steps of each actor in the whole run, and whether the run begins with trained
        weights. A launch's collector, whose epochs never end, keeps the run's values."""
        if not self.collects:
            return 0, self.init_from is not None
        epochs = self.epochs - max(0, int(self.start_collecting_at_epoch))
        return epochs * int(self.train_timesteps_per_epoch or 0), self.init_from is not None


def check_settings(s: ExperimentSettings) -> None:
    """Raise a `SettingsError` that lists every wrong field, its value and its valid values; after `ExperimentSettings.resolve`."""
    wrong = dict(faults(s))
    problems = [*wrong.values(), *mistakes_in(s.callbacks), *_extra_fields(s)]
    if s.dataset is not None and not isinstance(s.dataset, RLDataset):
        problems.append(f"dataset must be an amago.loading.RLDataset, got {s.dataset!r}")
    elif s.dataset is None and (s.dset_root is None or s.dset_name is None):
        problems.append("dataset must be given, or dset_root and dset_name to build a DiskTrajDataset")
    for name in ("make_train_env", "make_val_env"):
        problems += _env_makers(name, vars(s)[name], s)
    roles_are_known = not wrong.keys() & {"epochs", "start_collecting_at_epoch", "train_timesteps_per_epoch"}
    if isinstance(s.dataset, DiskTrajDataset) and roles_are_known and (s.collects or not s.dataset.buffer_dir.exists()):
        problems += unwritable("dset_root", s.dataset.buffer_dir, "the replay buffer")
    if not wrong:
        problems += _contradictions(s)
    if problems:
        raise SettingsError("this Experiment cannot start:\n  - " + "\n  - ".join(problems))


def _extra_fields(s: ExperimentSettings) -> Iterator[str]:
    try:
        fields = check_extra_fields(s.extra_fields)
    except (ValueError, TypeError) as err:
        yield str(err) if "extra_fields" in str(err) else f"extra_fields: {err}"
        return
    agent = s.agent_type
    known = agent.policy_extras if isinstance(agent, type) and issubclass(agent, BaseAgent) else ()
    for x in fields:
        if x.source != "info" and x.name not in known:
            yield (
                f"extra_fields has {x.name!r} with source={x.source!r}, but agent_type {name_of(agent)} computes only {list(known)}: "
                "override act_with_extras and policy_extras, or use source='info'"
            )


def _env_makers(name: str, value: object, s: ExperimentSettings) -> Iterator[str]:
    if not isinstance(value, list):
        if not callable(value):
            yield f"{name} must be a function that returns an AMAGOEnv, or a list of such functions, got {value!r}"
        return
    if s.env_mode == "already_vectorized" and len(value) != 1:
        yield (
            f"{name} lists {len(value)} functions, but env_mode='already_vectorized' takes one, whose environment has "
            f"batched_envs={s.parallel_actors} (parallel_actors)"
        )
    elif s.env_mode != "already_vectorized" and len(value) != s.parallel_actors:
        yield f"{name} lists {len(value)} functions, but parallel_actors={s.parallel_actors}: give one for each actor"
    for bad in [m for m in value if not callable(m)][:1]:
        yield f"{name} must list functions that return an AMAGOEnv, but holds {bad!r}"


def _contradictions(s: ExperimentSettings) -> Iterator[str]:
    """Problems of two settings, each of which is right by itself, or of one with the disk."""
    if s.traj_save_len < s.max_seq_len:
        yield (
            f"traj_save_len={s.traj_save_len:g} is less than max_seq_len={s.max_seq_len}: rollouts would be cut on disk into "
            "pieces shorter than a training sequence; make traj_save_len at least max_seq_len"
        )
    if s.dset_root is not None and s.dset_name is not None:
        wanted, given = (os.path.abspath(os.path.expanduser(s.dset_root)), s.dset_name), s.dataset
        if not isinstance(given, DiskTrajDataset) or (os.path.abspath(given.dset_root), given.dset_name) != wanted:
            yield f"dataset is given, and dset_root={s.dset_root!r}, dset_name={s.dset_name!r} would build another: give one of the two"
    for name in ("dset_max_size", "dset_max_steps", "dset_max_bytes"):
        value = vars(s)[name]
        own = vars(s.dataset)[name] if isinstance(s.dataset, DiskTrajDataset) else None
        if s.dataset is not None and value not in (math.inf, own):
            yield f"{name}={value} does not change the dataset that is given: give it to {type(s.dataset).__name__} instead"
    if s.overwrite and s.resume != "never":
        yield f"overwrite=True deletes the run that resume={s.resume!r} would continue: give one of the two"
    if s.mixed_precision == "fp16" and not torch.cuda.is_available():
        yield "mixed_precision='fp16' needs a GPU, and there is none: use 'bf16', or 'no'"
    if s.init_from is not None:
        path = Path(s.init_from).expanduser()
        if not path.exists():
            yield f"init_from is {os.fspath(s.init_from)!r}, which does not exist: name a run's directory, a training state or a file of weights"
        elif s.overwrite and path.resolve().is_relative_to(s.run_dir.resolve()):
            yield f"init_from is {os.fspath(s.init_from)!r}, which overwrite=True deletes: choose another run_name"


def warn_if_nothing_to_do(s: ExperimentSettings) -> None:
    """Warn at the start of a loop of empty epochs."""
    names = (
        "epochs", "start_collecting_at_epoch", "start_learning_at_epoch", "train_timesteps_per_epoch", "train_batches_per_epoch", "val_interval",
        "val_timesteps_per_epoch",
    )  # fmt: skip
    if s.epochs and not s.collects and not s.learns and not s.evaluates:
        given = ", ".join(f"{name}={vars(s)[name]}" for name in names)
        warnings.warn(f"learn() neither collects, nor learns, nor evaluates with {given}", stacklevel=3)


def collect_only(settings: ExperimentSettings) -> None:
    """Let a process act and evaluate with the newest published weights; never train, and delete nothing."""
    settings.start_learning_at_epoch = float("inf")
    settings.ckpt_interval = None
    settings.always_save_latest, settings.always_load_latest = False, True
    settings.has_dset_edit_rights = settings.builds_optimizer = False


def learn_only(settings: ExperimentSettings) -> None:
    """Let a process train and publish weights; never act."""
    settings.start_collecting_at_epoch = float("inf")
    settings.train_timesteps_per_epoch = 0
    settings.val_interval = None
    settings.always_save_latest, settings.always_load_latest = True, False
    settings.has_dset_edit_rights = True
