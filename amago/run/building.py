"""The parts of a run: built, saved, restored and logged by methods that may be called by themselves, and overridden."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

from amago.agent import BaseAgent
from amago.compat import accelerate_states
from amago.compat.parts import TextPath
from amago.envs.statistics import PhaseStatistics, ReturnHistory, SpecialMetricHistory
from amago.loading import RLDataset
from amago.run import console
from amago.run.callbacks import CallbackList
from amago.run.checkpoint import CheckpointError, epoch_of, identity, load_into
from amago.run.checks import check_required_extras
from amago.run.collect import ActingPhase, RunActors
from amago.run.console import COLLECT, TRAIN, Console
from amago.run.data import Batches
from amago.run.evaluate import mean_length, merge_returns, merge_specials, merge_values, summarise
from amago.run.group import Ranks, Signals
from amago.run.launched.join import join
from amago.run.launched.role import Launched
from amago.run.learner import Learner
from amago.run.metrics import MetricsLogger, RunLog, TensorBoardLogger, WandbLogger
from amago.run.optimizer import adamw, param_groups
from amago.run.process import FreedMemory, draw_seed, seed_process
from amago.run.record import flat
from amago.run.rollout import shares
from amago.run.rundir import RunCheckpoints, RunDir
from amago.run.settings import ExperimentSettings, check_settings
from amago.run.state import Position, local_state, refuse, restore, snapshot


def _of(part: str, name: str) -> Any:
    """An attribute of a part, under the name by which programs know it."""
    return property(lambda e: getattr(getattr(e, part), name), lambda e, value: setattr(getattr(e, part), name, value))


def _envs(kind: Any) -> Any:
    return property(lambda e: e.actors.envs(kind), lambda e, envs: e.actors.use(kind, envs), lambda e: e.actors.drop(kind))


class BuiltRun(ExperimentSettings):
    """Base class of `amago.Experiment`, which describes the attributes: its parts, its directory and its log."""

    init_checkpoints: Callable[..., None]  # these two are methods of Experiment, above this module
    load_checkpoint_from_path: Callable[..., None]
    policy, policy_aclr, accelerator = _of("learner", "policy"), _of("learner", "policy_aclr"), _of("learner", "accelerator")
    optimizer, lr_schedule, updater = _of("learner", "optimizer"), _of("learner", "lr_schedule"), _of("learner", "updater")
    grad_update_counter, train_dloader = _of("learner", "grad_steps"), _of("batches", "given")
    logger, frames_by_env = _of("run_log", "logger"), _of("position", "frames_by_env")
    train_envs, val_envs = _envs("train"), _envs("val")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.learner, self.batches, self.position, self.run_log = Learner(self), Batches(), Position(), RunLog()
        self.group, self.signals = Ranks(), Signals()
        self.console, self.moments = Console(speaks=False), CallbackList()
        self.rundir: RunDir | None = None
        self.should_stop = False
        self.phase_statistics: PhaseStatistics | None = None
        self._launch: Launched | None = None
        self._actors: RunActors | None = None
        self._freed_memory = FreedMemory()
        self._has_joined = self._prepared = self._started = self._closed = self._log_is_open = self._saved = False
        self._phase: ActingPhase | None = None  # the one that now calls `interact`
        self._restarts = self._trajs_saved = 0  # of environments; trajectories, at least; both by this process

    # ---- building ------------------------------------------------------------------------------------------------------------
    def _prepare(self) -> None:
        """Check the settings, before the first part is built."""
        self.resolve()
        if self._prepared:
            return
        self._join_launch()
        check_settings(self)
        self.learner.make_accelerator()
        factors = {COLLECT: float(self.accelerator.num_processes), TRAIN: 1 / self.batches_per_update}
        self.console = Console(self.progress, self.verbose and self.accelerator.is_main_process, factors)
        self.moments = CallbackList([self.console, *([self._launch] if self._launch else []), *self.callbacks])
        self.group = Ranks(self.accelerator)
        self.signals = Signals(self.group)
        self._seed(None)
        self._prepared = True

    def _join_launch(self) -> None:
        """Let the launch of which this process is a part change the settings, once, before anything is built."""
        if not self._has_joined:
            self._has_joined, self._launch = True, join(self)

    def _seed(self, resumed: Path | None) -> None:
        self.run_seed = self.group.of_first(draw_seed()) if self.seed is None else int(self.seed)
        key = (self.run_seed, self.accelerator.process_index, *(self._launch.process_key if self._launch else ()))
        if self.seed is not None:
            seed_process(key)
        # environments cannot be restored: after each resume they begin with new rollouts, from a new seed
        self._env_seed = (*key, *(identity(resumed) if resumed else ()))

    def _claim(self) -> Path | None:
        """Claim directory and buffer; returns the training state to resume from."""
        self.rundir = RunDir(self, self.data, self.accelerator.is_main_process)
        return self.rundir.claim(self.group)

    def _require_start(self, what: str, writes: bool = True) -> None:
        """Refuse a call that comes too early, or, if it writes, before the earlier run in the directory was loaded."""
        if self._closed or self.policy_aclr is None:
            raise RuntimeError(f"call Experiment.start() before {what}")
        if self._launch is not None:
            self._launch.check_call(what)
        if writes and self.rundir is not None and self.rundir.refusal is not None:
            raise self.rundir.refusal

    def init_dsets(self) -> RLDataset:
        """Configure the dataset."""
        self.resolve()
        self._join_launch()
        self.learner.make_accelerator()
        self.data.configure_from_experiment(self)
        return self.data

    def init_envs(self) -> str:
        """Start the training actors, or, if this run never collects, make one environment for its spaces.

        An override may make other environments: it sets ``train_envs``, ``val_envs`` or both.

        Returns:
            a description of the environments for `summary`.
        """
        self._prepare()
        spaces = self.actors.spaces
        shapes = ", ".join(f"{k} {v.shape}" for k, v in spaces.observation.spaces.items())
        return f"{self.parallel_actors} actors ({self.actors.mode}); observations: {shapes}; actions: {spaces.action}"

    def init_dloaders(self) -> Any:
        """Create the loader of training batches, ``train_dloader``. Called again before each training phase.

        Override it to draw batches in another way: set ``train_dloader`` to, or return, any iterable of `amago.loading.Batch`, such as
        a `torch.utils.data.DataLoader` with ``collate_fn=RLData_pad_collate``. If that has a length, each epoch trains on one pass over
        it; else on ``train_batches_per_epoch`` batches.
        """
        self._prepare()
        self.train_dloader = self.batches.make(self, self.data, self.run_seed, self.accelerator.process_index, self.DEVICE)
        return self.train_dloader

    def init_model(self) -> None:
        """Build the agent for ``rl2_space`` and the actions of the environments, its optimizer and schedule."""
        self._prepare()
        spaces = self.actors.spaces
        self.data.check_spaces(spaces.observation, spaces.action)
        self.learner.build(spaces, self.init_optimizer if self.builds_optimizer or self.resume != "never" else None)
        check_required_extras(self.policy, self.extra_fields)

    def init_optimizer(self, policy: BaseAgent) -> torch.optim.Optimizer:
        """Create the optimizer. Override to use another one than AdamW; ``amago.run.learner.param_groups(policy, self)`` in place of
        ``policy.trainable_params`` gives it the rates of ``actor_learning_rate`` and ``critic_learning_rate``."""
        return adamw(param_groups(policy, self), float(self.learning_rate), float(self.l2_coeff))

    def init_logger(self) -> None:
        """Open the log files; only the main process writes."""
        if self.rundir is not None and self.rundir.refusal is None and self.accelerator.is_main_process:
            settings = flat(self.rundir.settings_at_start)
            self.logger = MetricsLogger(
                self.run_dir,
                *([TensorBoardLogger(self.run_dir / "tensorboard", settings)] if self.log_to_tensorboard else []),
                *([WandbLogger(self, settings)] if self.log_to_wandb else []),
            )

    def _open_log(self) -> None:
        """Write how the run was started, and open its log, unless that is refused or was done."""
        if self.rundir is not None and self.rundir.refusal is None and not self._log_is_open:
            self._log_is_open = True
            self.rundir.note_start(self.policy, self.learner.calls, self.epoch, self.rundir.to_resume)
            if self.logger is None:
                self.init_logger()

    def summary(self, env_summary: str) -> None:
        """Print the most important settings.

        Args:
            env_summary: the description that `init_envs` returned.
        """
        processes = self.accelerator.num_processes
        self.print(
            console.summary(self, self.policy, env_summary, self.actors.exploration, processes, self.epoch, self.run_seed)
        )

    # ---- parts, under the names by which programs know them ------------------------------------------------------------------

    @property
    def data(self) -> RLDataset:
        """The dataset."""
        assert self.dataset is not None, "check_settings() refuses this"
        return self.dataset

    @property
    def actors(self) -> RunActors:
        """The actors of the run."""
        if self._actors is None:
            self._prepare()
            self._actors = RunActors(self, self.data.save_new_trajs_to, self._env_seed, self.DEVICE, self.caster)
        return self._actors

    @property
    def launched(self) -> bool:
        """True if a launcher started this process, so that it shares collection and evaluation with other processes."""
        return self._launch is not None

    @property
    def rl2_space(self) -> gym.spaces.Dict:
        """Dict {"obs": the flat observation space, "rl2": Box of the reward and the previous action}, which the agent is built for."""
        return gym.spaces.Dict({"obs": self.actors.spaces.observation, "rl2": self.actors.spaces.rl2})

    @rl2_space.setter
    def rl2_space(self, space: gym.spaces.Dict) -> None:
        self.actors.set_spaces(space)

    @property
    def hidden_state(self) -> Any:
        """The policy's memory of the training actors; None: empty."""
        return self.actors.pools["train"].hidden_state if "train" in self.actors.pools else None

    @hidden_state.setter
    def hidden_state(self, memory: object) -> None:
        if memory is not None:
            self.actors.train.take_hidden_state(self.policy, memory)
        elif "train" in self.actors.pools:  # there may be no agent yet
            self.actors.train.memory = None

    @property
    def DEVICE(self) -> torch.device:
        """The device of the policy."""
        return self.accelerator.device

    def caster(self) -> AbstractContextManager[Any]:
        """The context of mixed precision."""
        return self.accelerator.autocast()

    def acting_weights(self) -> AbstractContextManager[Any]:
        """In the block, the policy has the weights with which it acts: with ``ema_decay``, their average."""
        return self.learner.acting_weights()

    @property
    def checkpoints(self) -> RunCheckpoints:
        """The checkpoints on disk, from `init_checkpoints` on."""
        if self.rundir is None:
            raise AttributeError("checkpoints: call init_checkpoints() or start() first")
        return self.rundir.checkpoints

    @property
    def ckpt_dir(self) -> TextPath:
        """The directory of the checkpoints."""
        return TextPath(self.checkpoints.directory)

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
        """Environment steps collected, of all environments and ranks.

        In a process that never collects, the steps that others have delivered to its dataset, if that counts them.
        """
        delivered = None if self.collects or self.dataset is None else self.dataset.collected_steps
        return delivered or sum(self.frames_by_env.values())

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Save a complete training state, and a separate file with the policy's weights.

        If that fails, for example because the disk is full, a warning is logged; earlier checkpoints are intact.
        """
        self._require_start("save_checkpoint()")
        assert self.rundir is not None
        number = self.position.file_epoch
        with self.acting_weights():
            self.learner.average_gradients(self.group)
            ranks = self.group.gather([local_state(self)])
            if self.accelerator.is_main_process:
                content = snapshot(self, ranks, self.rundir.settings_now())
                self._saved = self.checkpoints.save(number, content, self.keep_training_states)
            self.accelerator.wait_for_everyone()
            if self._saved and self.accelerator.is_main_process:
                self.moments.call("on_save_checkpoint", self, self.checkpoints.path_of(number))

    def load_checkpoint(self, epoch: int, resume_training_state: bool = True) -> None:
        """Load a checkpoint of this run.

        Args:
            epoch: as in the file's name.
            resume_training_state: load the whole training state; otherwise only the policy's weights.
        """
        self._require_start("load_checkpoint()", writes=False)
        if self.rundir is None:
            self.init_checkpoints()
        of = self.checkpoints.of_epoch if resume_training_state else self.checkpoints.weights_of_epoch
        self.load_checkpoint_from_path(str(of(epoch)), is_accelerate_state=resume_training_state)

    def _resume(self) -> None:
        """Load the training state that ``resume`` has chosen, once."""
        if self.rundir is not None and self.rundir.to_resume is not None:
            resumed, self.rundir.to_resume = self.rundir.to_resume, None
            self.load_checkpoint_from_path(str(resumed))

    def _restore(self, path: Path) -> None:
        """Load a training state, and print the settings that differ from it and the state that is lost."""
        if self.optimizer is None or self.rundir is None:
            raise CheckpointError(
                "this process only collects, and has nothing into which a training state could be loaded: load the weights alone "
                "(resume_training_state=False)"
            )
        if accelerate_states.is_one(path):
            self.grad_update_counter = accelerate_states.load(path, self.policy, self.optimizer, self.lr_schedule)
            self.position.begin(1 + epoch_of(path))
            self.print(f"note: {path.name} was written by Accelerate: frames, batches and random numbers begin anew")
            return
        found = self.rundir.changes(path, self._started)
        refuse(found, path)
        notes = restore(self, path, frozenset(c.name.partition(".")[0] for c in found))
        self.checkpoints.skip_latest()
        if found:
            self.print(f"settings that differ from those of {path.name}:\n  " + "\n  ".join(map(str, found)))
        for note in notes:
            self.print(f"note: {note}")

    def write_latest_policy(self) -> None:
        """Publish the policy's weights for other processes."""
        self._require_start("write_latest_policy()")
        if self.accelerator.is_main_process:
            with self.acting_weights():
                self.checkpoints.publish(self.policy.state_dict())

    def write_best_policy(self, note: Mapping[str, Any] | None = None) -> bool:
        """Keep the policy's weights in ``ckpts/best/policy.pt``, which replaces those kept before (`amago.KeepBest`).

        Args:
            note: on these weights, as JSON types, kept in the same file (`amago.run.checkpoint.load_weight_file`).

        Returns:
            False if they could not be written, which is logged as a warning.
        """
        self._require_start("write_best_policy()")
        if not self.accelerator.is_main_process:
            return True
        with self.acting_weights():
            return self.checkpoints.keep_best(self.policy.state_dict(), note)

    def read_latest_policy(self) -> None:
        """Load the weights that another process published last, if they are newer than those read or published here."""
        self._require_start("read_latest_policy()", writes=False)
        weights = self.checkpoints.read_latest() if self.accelerator.is_main_process else None
        if weights is not None:
            load_into(self.policy, weights, self.checkpoints.latest)
        self.group.copy_from_first(list(self.policy.state_dict().values()))  # ranks might find different files
        if self.group.any(weights is not None):
            self.learner.restart_average()

    # ---- log -----------------------------------------------------------------------------------------------------------------

    def x_axis_metrics(self) -> dict[str, int | float]:
        """Numbers that curves may be drawn against."""
        by_env = {f"total_frames-{name}": frames for name, frames in self.frames_by_env.items()}
        return {"Epoch": self.epoch, "total_frames": self.env_steps, "gradient_steps": self.grad_update_counter, **by_env}

    def axes(self) -> dict[str, int]:
        """The place of the run: "epoch", "env_steps" and "grad_steps"."""
        return {"epoch": self.epoch, "env_steps": self.env_steps, "grad_steps": self.grad_update_counter}

    def print(self, text: str) -> None:
        """Print lines in the main process, above the progress bar; nothing with ``verbose=False``."""
        self.console.print(text)

    def log(self, metrics_dict: Mapping[str, Any], key: str) -> None:
        """Log numbers by name; no row for an empty dict.

        Args:
            key: "train-update", "dataset", "val", "test", "rollout" or another name. The first two are sections "train" and "buffer" of
                the log.

        Raises:
            RunExistsError: see `start`.
        """
        self.log_at(metrics_dict, key, self.axes())

    def log_at(self, metrics_dict: Mapping[str, Any], key: str, axes: Mapping[str, int]) -> None:
        """`log`, at another place of the run, given as by `axes`."""
        if self.rundir is not None and self.rundir.refusal is not None and (metrics_dict or self.run_log.speeds):
            raise self.rundir.refusal
        row = self.run_log.row(metrics_dict, key, axes, self.x_axis_metrics())
        if row is not None:
            self.moments.call("on_log", self, row)

    def policy_metrics(self, returns: Iterable[ReturnHistory], specials: Iterable[SpecialMetricHistory]) -> dict[str, float]:
        """The metrics of the rollouts of all processes (`amago.run.evaluate.summarise`); {} if none ended."""
        gathered = self.group.gather([(merge_returns(returns), merge_specials(specials))])
        all_returns, all_specials = zip(*gathered)
        return summarise(merge_values(all_returns), merge_values(all_specials))

    def _metrics(
        self, histories: tuple[list[ReturnHistory], list[SpecialMetricHistory]], stats: PhaseStatistics
    ) -> dict[str, float]:
        """The metrics of a phase, over all processes; {} if no rollout ended."""
        metrics = self.policy_metrics(*histories)
        lengths = mean_length(self.group.gather([[episode.length for episode in stats.episodes]]))
        return {**metrics, **lengths} if metrics else {}

    def _log_faults(self, stats: PhaseStatistics, key: str) -> None:
        self._restarts += stats.restarts
        if stats.restarts:
            self.log({"Restarted Environments": stats.restarts, "Dropped Rollouts": stats.dropped}, key)

    def _of_all_ranks(self, stats: PhaseStatistics) -> PhaseStatistics:
        """The statistics of a phase with the steps and faults of all ranks, and the rollouts of this one.

        Ranks end a phase at different times. Here they wait for each other, and decide whether to stop.
        """
        self.signals.decide()
        if self.group.count == 1:
            return stats
        total = PhaseStatistics(stats.episodes, exploration=stats.exploration)
        for part in self.group.gather([PhaseStatistics([], stats.frames, stats.restarts, stats.dropped)]):
            total.merge(part)
        return total

    def _own_share(self, episodes: int | None) -> int | None:
        """This process's share of a number of rollouts."""
        return None if episodes is None else shares(episodes, self.group.count)[self.group.index]
