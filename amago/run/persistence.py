"""The part of an experiment that is written to disk: progress, log and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from accelerate.utils import gather_object

from amago import config
from amago.envs.statistics import PhaseStatistics, ReturnHistory, SpecialMetricHistory
from amago.loading import RLDataset, SequenceLoader
from amago.run.callbacks import CallbackList
from amago.run.changes import Change, changes, refuse
from amago.run.checkpoint import CheckpointError, identity, settings_in
from amago.run.collect import RunActors
from amago.run.evaluate import histories, mean_length, merge_returns, merge_specials, merge_values, summarise
from amago.run.learner import Learner
from amago.run.metric_names import STEPS_PER_SECOND, UPDATES_PER_SECOND
from amago.run.metrics import MetricsLogger, RunningMeans, to_floats, wandb_options
from amago.run.ownership import Ownership
from amago.run.pace import COLLECT, TRAIN
from amago.run.progress import Console, Phase
from amago.run.record import fields_of, flat, has_learned, note_start, read_record, role_of, settings_of
from amago.run.rng import draw_seed, seed_process
from amago.run.roles import Role
from amago.run.rollout import shares
from amago.run.run_checkpoints import RunCheckpoints
from amago.run.signals import GracefulStop
from amago.run.state import Progress, StateChange, TrainingParts
from amago.run.waiting import check_trained, wait_for_data
from amago.run.weights import load_into


class PersistentRun(Learner):
    """Base class of `amago.Experiment`: progress, log and checkpoints.

    Attributes:
        epoch: epochs that are finished.
        frames_by_env: environment steps collected by this process, by environment name.
        run_seed: the seed of the run, given or drawn.
        checkpoints: on disk.
        logger: in the main process; None in others.
        should_stop: `Experiment.learn` ends when the epoch is finished; set by callbacks.
        train_dloader: source of batches.
    """

    run_seed: int
    checkpoints: RunCheckpoints
    logger: MetricsLogger | None
    train_dloader: SequenceLoader
    _actors: RunActors

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epoch = 0
        self.frames_by_env: dict[str, int] = {}
        self._collected = self._trained = 0  # in the current epoch: steps of each actor, and batches
        self._started = self._saved = self._ever_trained = False
        self._restarts = 0  # of environments, in this process
        self._ownership: Ownership | None = None
        self._role = Role()
        self._stop = GracefulStop()
        self.should_stop = False
        self._callbacks, self._console = CallbackList(), Console(speaks=False)
        self._speeds: dict[str, float] = {}  # for the next row of the log; not an argument, as subclasses override `log`
        self._epoch_metrics: dict[str, float] = {}  # the newest of the current epoch, by "section/name"
        self._settings: dict[str, Any] = {}  # as they were at the start

    def _require_start(self, what: str) -> None:
        if not self._started:
            raise RuntimeError(f"call Experiment.start() before {what}")

    @property
    def _data(self) -> RLDataset:
        assert self.dataset is not None, "check_settings() refuses this"
        return self.dataset

    def _own_share(self, episodes: int | None) -> int | None:
        """This process's share of a number of rollouts."""
        if episodes is None:
            return None
        return shares(episodes, self.accelerator.num_processes)[self.accelerator.process_index]

    def _gather(self, items: list[Any]) -> list[Any]:
        """The items of all processes."""
        return gather_object(items) if self.accelerator.num_processes > 1 else items  # type: ignore[no-any-return]

    # ---- start ----------------------------------------------------------------------------------------------------------

    def _claim(self) -> Path | None:
        """Claim the run's directory and buffer, and find the training state to resume from; None to begin.

        Raises:
            SettingsError: they are another's, or the training state is of other networks.
            CheckpointError: there is no training state to resume from.
        """
        self._settings = settings_of(self)
        failed: Exception | None = None
        if self.accelerator.is_main_process:
            self._ownership = Ownership(self, self._data)
            try:
                self._ownership.claim()
            except Exception as err:
                failed = err
        failed = next((f for f in self._gather([failed]) if f is not None), None)
        if failed is not None:
            raise failed
        self.init_checkpoints()
        resumed = self.checkpoints.choose(self.resume)
        if resumed is not None:
            refuse(self._changes(resumed), resumed)
        return resumed

    def _init_seeds(self, resumed: Path | None) -> None:
        self.run_seed = draw_seed() if self.seed is None else int(self.seed)
        process_seed = (self.run_seed, self.accelerator.process_index, *self._role.seed_key)
        if self.seed is not None:
            seed_process(process_seed)
        # environments cannot be restored: after each resume they begin with new rollouts, from a seed of their own
        self._env_seed = (*process_seed, *(identity(resumed) if resumed else ()))

    def _replace_earlier_run(self) -> None:
        """Delete the earlier run of this name, if ``overwrite`` asks for it."""
        if self._ownership is not None and self._ownership.replace(self._data):
            self.init_checkpoints()
            self.print(f"deleted the earlier run in {self.run_dir} (overwrite=True)")
        self.accelerator.wait_for_everyone()

    def _record_start(self, resumed: Path | None) -> None:
        """Write ``settings.json``, ``config.txt``, and remember the settings for training states."""
        self._settings = {**settings_of(self, self.policy, self._calls), "fields": self._settings["fields"]}
        config.mark_as_used()
        if not self.accelerator.is_main_process:
            return
        (self.run_dir / "config.txt").write_text(config.operative_config())
        record = read_record(self.run_dir) or {"starts": []}
        before = settings_in(resumed) if resumed is not None else record if has_learned(record) and not self.learns else None
        changed = {c.name: [c.before, c.now] for c in changes(before, self._settings)} if before is not None else {}
        epoch = 0 if resumed is None else identity(resumed)[0]
        note_start(self.run_dir, self._settings, role_of(self), epoch, None if resumed is None else resumed.name, changed)

    def _settings_now(self) -> dict[str, Any]:
        """The settings with the fields that were changed since the start."""
        now = fields_of(self)
        return {**self._settings, "fields": {**now, "dataset": self._settings["fields"]["dataset"]}}

    def _changes(self, path: Path) -> list[Change]:
        """How the settings differ from those of a training state; nothing for one of a version that did not save them."""
        saved = settings_in(path)
        return [] if saved is None else changes(saved, self._settings_now() if self._started else self._settings)

    def _close_parts(self) -> None:
        """Close what `start` has opened, and release the run's directory."""
        for name in ("_actors", "train_dloader", "logger"):
            part = getattr(self, name, None)
            if part is not None:
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
        self._means = RunningMeans()
        self.logger = None
        if self.accelerator.is_main_process:
            settings = flat(self._settings)
            wandb = wandb_options(self, settings) if self.log_to_wandb else None
            self.logger = MetricsLogger(self._role.log_dir(self.run_dir), self.log_to_tensorboard, wandb, settings)

    @property
    def done_in_epoch(self) -> tuple[int, int]:
        """Steps of each actor, and batches, that the current epoch has had so far."""
        return self._collected, self._trained

    @property
    def env_steps(self) -> int:
        """Environment steps collected, of all environments; with several processes, an estimate from this one.

        In a process that never collects, the steps that others have delivered to its data set, if that counts them.
        """
        delivered = None if self.collects or self.dataset is None else self.dataset.collected_steps
        if delivered:
            return delivered
        return sum(self.frames_by_env.values()) * self.accelerator.num_processes

    def x_axis_metrics(self) -> dict[str, int | float]:
        """Numbers that curves may be drawn against."""
        by_env = {f"total_frames-{name}": frames for name, frames in self.frames_by_env.items()}
        return {"Epoch": self.epoch, "total_frames": self.env_steps, "gradient_steps": self.grad_steps, **by_env}

    @property
    def grad_steps(self) -> int:
        """Updates so far."""
        return self.updater.grad_steps if hasattr(self, "updater") else 0

    def axes(self) -> dict[str, int]:
        """Where the run is: "epoch", "env_steps" and "grad_steps"."""
        return {"epoch": self.epoch, "env_steps": self.env_steps, "grad_steps": self.grad_steps}

    def log(self, metrics_dict: Mapping[str, Any], key: str) -> None:
        """Log numbers by name in section ``key`` ("train", "val", "test", "buffer" or "rollout"); no row for an empty dict."""
        self.log_at(metrics_dict, key, self.axes())

    def log_at(self, metrics_dict: Mapping[str, Any], key: str, axes: Mapping[str, int]) -> None:
        """`log`, at another place of the run, given as by `axes`."""
        speeds, self._speeds = self._speeds, {}
        if not metrics_dict and not speeds:
            return
        numbers = to_floats(metrics_dict)
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
        if means := self._means.take():
            self._speeds = {UPDATES_PER_SECOND: phase.lap() * self._per_unit()[TRAIN]}
            self.log(means, "train")

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

    def _log_faults(self, stats: PhaseStatistics, key: str) -> None:
        self._restarts += stats.restarts
        if stats.restarts:
            self.log({"Restarted Environments": stats.restarts, "Dropped Rollouts": stats.dropped}, key)

    def _check_trained(self) -> None:
        skipped = self.updater.skipped if hasattr(self, "updater") else 0
        if not self.grad_steps and (skipped or not self._ever_trained):
            check_trained(self, self._data, skipped, self._restarts)

    def _wait_for_data(self) -> bool:
        """Whether there is data to train on. A process that never collects waits for the data of others.

        Raises:
            NoReadableDataError: for ``refused_data_timeout`` seconds there were refused files and no others.
        """
        dataset = self._data
        if dataset.ready_for_training or self.collects or not dataset.can_become_ready:
            return dataset.ready_for_training
        with self._phase("waiting for data", None, "s") as phase:

            def pause() -> bool:
                self._stop.wait(1.0)
                self._role.waiting(self)
                phase.update(1)
                return not self._stop

            wait_for_data(dataset, self.refused_data_timeout, pause)
        return dataset.ready_for_training

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

    def init_checkpoints(self) -> None:
        """Create ``ckpts/training_states``, ``ckpts/policy_weights`` and ``ckpts/latest``."""
        self.checkpoints = RunCheckpoints(self.run_dir, self.run_name)
        self.checkpoints.prepare()
        self.ckpt_dir = self.checkpoints.directory

    @property
    def _parts(self) -> TrainingParts:
        return TrainingParts(
            self.accelerator, self.policy, self.optimizer, self.lr_schedule, self.updater, self.train_dloader, self._data,
            self.logger, self._actors.pools, self.batches_per_update, self._callbacks,
        )  # fmt: skip

    def save_checkpoint(self) -> None:
        """Save a complete training state, and a separate file with the policy's weights.

        If that fails, for example because the disk is full, a warning is logged; earlier checkpoints are intact.
        """
        self._require_start("save_checkpoint()")
        progress = Progress(self.epoch, self._collected, self._trained, self.run_seed, self.frames_by_env)
        ranks = self._gather([self._parts.local_state()])
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
        if not hasattr(self, "updater"):
            raise CheckpointError(
                "this process only collects, and has nothing into which a training state could be loaded: load the weights alone "
                "(resume_training_state=False)"
            )
        found = self._changes(path)
        refuse(found, path)
        names = frozenset(c.name.partition(".")[0] for c in found)
        reseed = int(self.seed) if "seed" in names and self.seed is not None else None
        change = StateChange(names, self.run_name, reseed)
        if reseed is not None:
            seed_process((reseed, self.accelerator.process_index, *identity(path)))
        progress = self._parts.restore(path, change)
        self.epoch, self._collected, self._trained = progress.epoch, progress.collected, progress.trained
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
        self._require_start("read_latest_policy()")
        weights = self.checkpoints.read_latest()
        if weights is not None:
            load_into(self.policy, weights, self.checkpoints.latest)

    def _resume_note(self, resumed: Path | None) -> str:
        """What ``resume`` has found, for the console."""
        if resumed is not None:
            steps = f"{self.grad_steps} gradient steps, {self.env_steps} environment steps"
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
