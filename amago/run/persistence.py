"""The part of an experiment that is written to disk: progress, log and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from amago import config
from amago.compat import accelerate_states
from amago.compat.loaders import ForeignLoader, as_loader
from amago.compat.paths import TextPath
from amago.envs.statistics import PhaseStatistics, ReturnHistory, SpecialMetricHistory
from amago.loading import RLDataset, SequenceLoader
from amago.run.callbacks import CallbackList
from amago.run.changes import Change, changes, refuse
from amago.run.checkpoint import CheckpointError, epoch_of, identity, settings_in
from amago.run.collect import RunActors
from amago.run.evaluate import histories, mean_length, merge_returns, merge_specials, merge_values, summarise
from amago.run.learner import Learner
from amago.run.metric_names import SECTIONS, STEPS_PER_SECOND, UPDATES_PER_SECOND
from amago.run.metrics import MetricsLogger, RunningMeans, mean_of_rows, to_floats, wandb_options
from amago.run.ownership import Ownership
from amago.run.pace import COLLECT, TRAIN
from amago.run.progress import Console, Phase
from amago.run.ranks import JointStop, Ranks
from amago.run.record import fields_of, flat, has_learned, note_start, read_record, role_of, settings_of
from amago.run.rng import draw_seed, seed_process
from amago.run.roles import Role
from amago.run.rollout import shares
from amago.run.run_checkpoints import RunCheckpoints
from amago.run.signals import GracefulStop
from amago.run.state import Progress, StateChange, TrainingParts
from amago.run.waiting import check_trained
from amago.run.weights import load_into


class PersistentRun(Learner):
    """Base class of `amago.Experiment`: progress, log and checkpoints.

    Attributes:
        frames_by_env: environment steps collected by all ranks, by environment name.
        run_seed: the seed of the run, given or drawn.
        checkpoints: on disk.
        logger: in the main process; None in others.
        ckpt_dir: directory of the checkpoints.
        should_stop: `Experiment.learn` ends when the epoch is finished; set by callbacks.
        train_dloader: source of batches: any iterable of them.
    """

    run_seed: int
    checkpoints: RunCheckpoints
    logger: MetricsLogger | None
    ckpt_dir: TextPath
    train_dloader: Any
    _stop: GracefulStop

    @property
    def _actors(self) -> RunActors:
        """The actors of the run."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ranks = Ranks()
        self._epoch = 0
        self.frames_by_env: dict[str, int] = {}
        self._begin_epoch()
        self._epoch_is_over = False  # and `epoch` is its number
        self._used_loader: SequenceLoader | ForeignLoader | None = None
        self._started = self._saved = self._ever_trained = False
        self._restarts = 0  # of environments, in this process
        self._closed = self._prepared = False
        self._ownership: Ownership | None = None
        self._role = Role()
        self._stop = GracefulStop()
        self.should_stop = False
        self._callbacks, self._console = CallbackList(), Console(speaks=False)
        self._speeds: dict[str, float] = {}  # for the next row of the log; not an argument, as subclasses override `log`
        self._epoch_metrics: dict[str, float] = {}  # the newest of the current epoch, by "section/name"
        self._refusal: Exception | None = None  # why nothing may be written
        self._to_resume: Path | None = None
        self._log_is_open = False
        self.logger, self._means = None, RunningMeans()
        self._settings: dict[str, Any] = {}  # as they were at the start

    @property
    def epoch(self) -> int:
        """Number of the current epoch, which is that of the finished ones. A loop of your own sets it to the number of the epoch that it
        has just finished, by which `save_checkpoint` names files."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._begin_epoch()
        self._epoch, self._epoch_is_over = int(epoch), True

    def _begin_epoch(self) -> None:
        self._collected = self._trained = 0  # steps of each actor, and batches
        self._has_collected = False  # by a call of this process

    def _require_start(self, what: str, writes: bool = True) -> None:
        """Refuse a call that comes too early.

        Args:
            what: was called.
            writes: it writes to the run's directory or its buffer.

        Raises:
            RuntimeError: the model is not built, or `close` was called.
            RunExistsError: there is an earlier run, which no checkpoint was loaded of.
        """
        if self._closed or getattr(self, "policy_aclr", None) is None:
            raise RuntimeError(f"call Experiment.start() before {what}")
        if writes and self._refusal is not None:
            raise self._refusal

    @property
    def _data(self) -> RLDataset:
        assert self.dataset is not None, "check_settings() refuses this"
        return self.dataset

    def _own_share(self, episodes: int | None) -> int | None:
        """This process's share of a number of rollouts."""
        if episodes is None:
            return None
        return shares(episodes, self._ranks.count)[self._ranks.index]

    def _gather(self, items: list[Any]) -> list[Any]:
        """The items of all processes."""
        return self._ranks.gather(items)

    def _of_all_ranks(self, stats: PhaseStatistics) -> PhaseStatistics:
        """The statistics of a phase with the steps and faults of all ranks, and the rollouts of this one.

        Ranks end a phase at different times. Here they wait for each other, and decide whether to stop.
        """
        self._stop.decide()
        if self._ranks.count == 1:
            return stats
        total = PhaseStatistics(stats.episodes, exploration=stats.exploration)
        for part in self._gather([PhaseStatistics([], stats.frames, stats.restarts, stats.dropped)]):
            total.merge(part)
        return total

    # ---- start ----------------------------------------------------------------------------------------------------------

    def _join_ranks(self) -> None:
        """If this process trains with others, let them stop together."""
        self._ranks = Ranks(self.accelerator)
        if self._ranks.count > 1:
            self._stop = JointStop(self._ranks)

    def _claim(self) -> Path | None:
        """Claim the run's directory and buffer, and find the training state to resume from; None to begin.

        Raises:
            SettingsError: the buffer is another's, or the training state is of other networks. (That there is an earlier run is
                refused when something is to be written, as `load_checkpoint` may continue it.)
            CheckpointError: there is no training state to resume from.
        """
        self._settings = settings_of(self)
        failed, refusal, resumed = None, None, None
        if self.accelerator.is_main_process:
            self._ownership = Ownership(self, self._data)
            try:
                self._ownership.claim()
                refusal = self._ownership.refusal
                self._make_checkpoints()
                resumed = self.checkpoints.choose(self.resume)
            except Exception as err:
                failed = err
        failed, self._refusal, resumed = self._ranks.of_first((failed, refusal, resumed))
        if failed is not None:
            raise failed
        if not self.accelerator.is_main_process:
            self._make_checkpoints()
        self._to_resume = resumed
        if resumed is not None:
            refuse(self._changes(resumed), resumed)
        return resumed

    def _init_seeds(self, resumed: Path | None) -> None:
        self.run_seed = self._ranks.of_first(draw_seed()) if self.seed is None else int(self.seed)
        process_seed = (self.run_seed, self.accelerator.process_index, *self._role.seed_key)
        if self.seed is not None:
            seed_process(process_seed)
        # environments cannot be restored: after each resume they begin with new rollouts, from a seed of their own
        self._env_seed = (*process_seed, *(identity(resumed) if resumed else ()))

    def _replace_earlier_run(self) -> None:
        """Delete the earlier run of this name, if ``overwrite`` asks for it."""
        if self._ownership is not None and self._ownership.replace(self._data):
            self._make_checkpoints()
            self.print(f"deleted the earlier run in {self.run_dir} (overwrite=True)")
        self.accelerator.wait_for_everyone()

    def _open_log(self) -> None:
        """Write how the run was started, and open its log, unless that is refused or was done."""
        if self._refusal is None and getattr(self, "checkpoints", None) is not None and not self._log_is_open:
            self._log_is_open = True
            self._record_start(self._to_resume)
            if self.logger is None:
                self.init_logger()

    def _resume(self) -> None:
        """Load the training state that ``resume`` has chosen, once."""
        resumed, self._to_resume = self._to_resume, None
        if resumed is not None:
            self.load_checkpoint_from_path(str(resumed))

    def load_checkpoint_from_path(self, path: str, is_accelerate_state: bool = True) -> None:
        """See `amago.Experiment.load_checkpoint_from_path`."""
        raise NotImplementedError

    def _continue_earlier_run(self, path: Path, is_state: bool) -> None:
        """If weights or a training state of the earlier run of this name were loaded, this process goes on with that run."""
        continues = self._refusal is not None and path.expanduser().resolve().is_relative_to(self.run_dir.resolve())
        if not continues:
            return
        self._refusal = None
        if self._ownership is not None:
            self._ownership.accept()
        loaded = self._epoch, self._epoch_is_over, self._collected, self._trained
        self.init_checkpoints()  # an override sets the epoch to 0
        self._epoch, self._epoch_is_over, self._collected, self._trained = loaded
        self._to_resume = path if is_state else None
        self._open_log()
        self._to_resume = None

    def init_checkpoints(self) -> None:
        """See `amago.Experiment.init_checkpoints`."""
        raise NotImplementedError

    def _record_start(self, resumed: Path | None) -> None:
        """Write ``settings.json``, ``config.txt``, and remember the settings for training states."""
        self._settings = {**settings_of(self, self.policy, self._calls), "fields": self._settings["fields"]}
        config.mark_as_used()
        if not self.accelerator.is_main_process:
            return
        self._write_config()
        record = read_record(self.run_dir) or {"starts": []}
        resumed = None if resumed is not None and accelerate_states.is_one(resumed) else resumed
        before = settings_in(resumed) if resumed is not None else record if has_learned(record) and not self.learns else None
        changed = {c.name: [c.before, c.now] for c in changes(before, self._settings)} if before is not None else {}
        epoch = self.epoch if resumed is None else identity(resumed)[0]
        note_start(self.run_dir, self._settings, role_of(self), epoch, None if resumed is None else resumed.name, changed)

    def _write_config(self) -> None:
        """Write the gin configuration where both this library and the original system have it."""
        text = config.operative_config()
        for directory in (self.run_dir, self.run_dir / "ckpts"):
            (directory / "config.txt").write_text(text)

    def _settings_now(self) -> dict[str, Any]:
        """The settings with the fields that were changed since the start."""
        now = fields_of(self)
        self._settings = self._settings or settings_of(self, self.policy, self._calls)
        return {**self._settings, "fields": {**now, "dataset": self._settings["fields"]["dataset"]}}

    def _changes(self, path: Path) -> list[Change]:
        """How the settings differ from those of a training state; nothing for one of a version that did not save them."""
        saved = settings_in(path)
        return (
            []
            if saved is None
            else changes(saved, self._settings if self._settings and not self._started else self._settings_now())
        )

    def _close_parts(self) -> None:
        """Close what `start` has opened, and release the run's directory."""
        for name in ("_made_actors", "_used_loader", "train_dloader", "logger"):
            part = getattr(self, name, None)
            if part is not None and hasattr(part, "close"):
                part.close()
        if isinstance(self.dataset, RLDataset):  # start() may have refused another type
            self.dataset.close()
        if self._ownership is not None:
            self._ownership.release()

    # ---- log ------------------------------------------------------------------------------------------------------------

    def _init_callbacks(self) -> None:
        """Make the console, and gather all callbacks but the loggers, which `log` calls first."""
        self._console = Console(self.progress, self.verbose and self.accelerator.is_main_process, self._per_unit())
        self._callbacks = CallbackList([self._console, *self.callbacks])

    def _per_unit(self) -> dict[str, float]:
        """By what the counts of phases in this process are multiplied to be environment steps and updates of the run."""
        return {COLLECT: self.accelerator.num_processes, TRAIN: 1 / self.batches_per_update}

    def _phase(self, kind: str, total: int | None, unit: str) -> AbstractContextManager[Phase]:
        return self._console.phase(kind, total, unit)

    def print(self, text: str) -> None:
        """Print lines in the main process, above the progress bar; nothing with ``verbose=False``."""
        self._console.print(text)

    def init_logger(self) -> None:
        """Open the log files; only the main process writes."""
        if self._refusal is None and self.accelerator.is_main_process:
            settings = flat(self._settings)
            wandb = wandb_options(self, settings) if self.log_to_wandb else None
            self.logger = MetricsLogger(self._role.log_dir(self.run_dir), self.log_to_tensorboard, wandb, settings)

    @property
    def done_in_epoch(self) -> tuple[int, int]:
        """Steps of each actor, and batches, that the current epoch has had so far."""
        return self._collected, self._trained

    @property
    def env_steps(self) -> int:
        """Environment steps collected, of all environments and ranks.

        In a process that never collects, the steps that others have delivered to its data set, if that counts them.
        """
        delivered = None if self.collects or self.dataset is None else self.dataset.collected_steps
        return delivered or sum(self.frames_by_env.values())

    def _count_frames(self, stats: PhaseStatistics) -> None:
        """Add the environment steps of a phase of collection, given those of all ranks."""
        for name, frames in stats.frames.items():
            self.frames_by_env[name] = self.frames_by_env.get(name, 0) + frames

    def x_axis_metrics(self) -> dict[str, int | float]:
        """Numbers that curves may be drawn against."""
        by_env = {f"total_frames-{name}": frames for name, frames in self.frames_by_env.items()}
        return {"Epoch": self.epoch, "total_frames": self.env_steps, "gradient_steps": self.grad_update_counter, **by_env}

    def axes(self) -> dict[str, int]:
        """Where the run is: "epoch", "env_steps" and "grad_steps"."""
        return {"epoch": self.epoch, "env_steps": self.env_steps, "grad_steps": self.grad_update_counter}

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
        speeds, self._speeds = self._speeds, {}
        if not metrics_dict and not speeds:
            return
        if self._refusal is not None:
            raise self._refusal
        key, numbers = SECTIONS.get(key, key), to_floats(metrics_dict)
        self._epoch_metrics.update({f"{key}/{name}": value for name, value in {**numbers, **speeds}.items()})
        if self.logger is not None:
            self._callbacks.call("on_log", self, self.logger.log(numbers, key, axes, self.x_axis_metrics(), speeds))

    def _end_collection(self, stats: PhaseStatistics, finished: bool) -> None:
        """Log a collection phase, and tell the callbacks if it is finished."""
        exploration = {name: fmean(values) for name, values in stats.exploration.items()}
        metrics = {**self._metrics(stats), **exploration}
        speeds = self._speeds = {STEPS_PER_SECOND: self._console.rate(COLLECT)}
        self.log(metrics, "rollout")
        if finished:
            self._callbacks.call("on_collect_epoch_end", self, {**metrics, **speeds})

    def _log_training(self, phase: Phase) -> None:
        """Log the means since the last row."""
        if means := self._train_metrics():
            self._speeds = {UPDATES_PER_SECOND: phase.lap() * self._per_unit()[TRAIN]}
            self.log(means, "train-update")

    def _end_training(self, phase: Phase, finished: bool) -> None:
        """Tell the callbacks of a training phase, if it is finished."""
        means = self._means.take_epoch()
        if finished and means:
            means[UPDATES_PER_SECOND] = self._console.rate(TRAIN)
            self._epoch_metrics.update({f"train/{name}": value for name, value in means.items()})
            self._callbacks.call("on_train_epoch_end", self, means)

    def _finish_epoch(self) -> None:
        """Tell the callbacks, and agree with other processes whether to stop."""
        metrics, self._epoch_metrics = self._epoch_metrics, {}
        self._callbacks.call("on_epoch_end", self, metrics)
        self.should_stop = any(self._gather([self.should_stop]))

    def _train_metrics(self) -> dict[str, float]:
        """The means of the training metrics since the last call, over all ranks."""
        means = self._means.take()
        return mean_of_rows(self._gather([means])) if self._ranks.count > 1 else means

    def _log_faults(self, stats: PhaseStatistics, key: str) -> None:
        self._restarts += stats.restarts
        if stats.restarts:
            self.log({"Restarted Environments": stats.restarts, "Dropped Rollouts": stats.dropped}, key)

    def _check_trained(self) -> None:
        skipped = 0 if self._updater is None else self._updater.skipped
        if not self.grad_update_counter and (skipped or not self._ever_trained):
            check_trained(self, self._data, skipped, self._restarts)

    def _metrics(self, stats: PhaseStatistics) -> dict[str, float]:
        """The metrics of a phase, over all processes; {} if no rollout ended."""
        returns, specials = histories(stats)
        metrics = self.policy_metrics([returns], [specials])
        lengths = mean_length(self._gather([[episode.length for episode in stats.episodes]]))
        return {**metrics, **lengths} if metrics else {}

    def policy_metrics(self, returns: Iterable[ReturnHistory], specials: Iterable[SpecialMetricHistory]) -> dict[str, float]:
        """The metrics of the rollouts of all processes (`amago.run.evaluate.summarise`); {} if none ended."""
        gathered = self._gather([(merge_returns(returns), merge_specials(specials))])
        all_returns, all_specials = zip(*gathered)
        return summarise(merge_values(all_returns), merge_values(all_specials))

    # ---- checkpoints ----------------------------------------------------------------------------------------------------

    def _make_checkpoints(self) -> None:
        self.checkpoints = RunCheckpoints(self.run_dir, self.run_name)
        self.checkpoints.prepare()
        self.ckpt_dir = TextPath(self.checkpoints.directory)

    @property
    def _loader(self) -> SequenceLoader | ForeignLoader:
        """What batches are drawn from: that of ``train_dloader``."""
        known = self._used_loader
        if known is None or (known is not self.train_dloader and getattr(known, "given", None) is not self.train_dloader):
            known = self._used_loader = as_loader(self.train_dloader, self.DEVICE)
        return known

    @property
    def _parts(self) -> TrainingParts:
        return TrainingParts(
            self.accelerator, self.policy, self.optimizer, self.lr_schedule, self.updater, self._loader, self._data,
            self.logger, self._actors.pools, self.batches_per_update, self._callbacks,
        )  # fmt: skip

    def save_checkpoint(self) -> None:
        """Save a complete training state, and a separate file with the policy's weights.

        If that fails, for example because the disk is full, a warning is logged; earlier checkpoints are intact.
        """
        self._require_start("save_checkpoint()")
        epoch, done = (self.epoch + 1, (0, 0)) if self._epoch_is_over else (self.epoch, self.done_in_epoch)
        progress = Progress(epoch, *done, self.run_seed, self.frames_by_env)
        ranks = self._gather([self._parts.local_state(self._ranks)])
        if self.accelerator.is_main_process:
            self._saved = self.checkpoints.save(
                progress.checkpoint_epoch,
                self._parts.snapshot(progress, ranks, self._settings_now()),
                self.keep_training_states,
            )
        self.accelerator.wait_for_everyone()
        if self._saved and self.accelerator.is_main_process:
            self._callbacks.call("on_save_checkpoint", self, self.checkpoints.path_of(progress.checkpoint_epoch))

    def _restore(self, path: Path) -> None:
        """Load a training state, and say which settings differ from it and what is lost."""
        if not hasattr(self, "optimizer"):
            raise CheckpointError(
                "this process only collects, and has nothing into which a training state could be loaded: load the weights alone "
                "(resume_training_state=False)"
            )
        if accelerate_states.is_one(path):
            parts = self.policy, self.optimizer, self.lr_schedule
            self.grad_update_counter = accelerate_states.load(path, *parts)
            self._begin_epoch()
            self._epoch, self._epoch_is_over = 1 + epoch_of(path), False
            self.print(f"note: {path.name} was written by Accelerate: frames, batches and random numbers begin anew")
            return
        found = self._changes(path)
        refuse(found, path)
        names = frozenset(c.name.partition(".")[0] for c in found)
        reseed = int(self.seed) if "seed" in names and self.seed is not None else None
        change = StateChange(names, self.run_name, reseed)
        if reseed is not None:
            seed_process((reseed, self.accelerator.process_index, *identity(path)))
        progress = self._parts.restore(path, change)
        self._epoch, self._collected, self._trained = progress.epoch, progress.collected, progress.trained
        self._epoch_is_over = self._has_collected = False
        self.frames_by_env, self.run_seed = progress.frames_by_env, progress.seed
        if found:
            self.print(f"settings that differ from those of {path.name}:\n  " + "\n  ".join(map(str, found)))
        for note in change.notes:
            self.print(f"note: {note}")

    def write_latest_policy(self) -> None:
        """Publish the policy's weights for other processes."""
        self._require_start("write_latest_policy()")
        if self.accelerator.is_main_process:
            self.checkpoints.publish(self.policy.state_dict())
            self._role.published(self)

    def read_latest_policy(self) -> None:
        """Load the weights that another process published last, if there are any; never older ones than before."""
        self._require_start("read_latest_policy()", writes=False)
        weights = self.checkpoints.read_latest()
        if weights is not None:
            load_into(self.policy, weights, self.checkpoints.latest)
        self._ranks.copy_from_first(
            list(self.policy.state_dict().values())
        )  # the others may have read an older or a newer file

    def _resume_note(self, resumed: Path | None) -> str:
        """What ``resume`` has found, for the console."""
        if self._refusal is not None:
            return f"run {self.run_name!r} exists in {self.run_dir}: load_checkpoint(N) continues it, and otherwise learn() is refused"
        if resumed is not None:
            steps = f"{self.grad_update_counter} gradient steps, {self.env_steps} environment steps"
            return f"resumed {resumed} at epoch {self.epoch}, {steps}"
        if self.resume != "never":
            return f"nothing to resume in {self.ckpt_dir}; starting at epoch 0"
        return ""

    def delete_buffer_from_disk(self, delete_protected: bool = False, delete_quarantine: bool = False) -> None:
        """Delete the collected trajectories, those in ``buffer/fifo``, in the main process (``dataset.delete()``).

        Args:
            delete_protected: also those in ``buffer/protected``: imported recordings, demonstrations.
            delete_quarantine: also damaged files in ``buffer/quarantine``.
        """
        self._require_start("delete_buffer_from_disk()")
        options = {"delete_protected": delete_protected, "delete_quarantine": delete_quarantine}
        if self.accelerator.is_main_process:
            self._data.delete(**{k: v for k, v in options.items() if v})  # a data set of the user's own may lack the options
