"""The part of an experiment that counts and logs: where the run is, the processes that share it, its log and its callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from statistics import fmean
from typing import Any

from amago.envs.statistics import PhaseStatistics, ReturnHistory, SpecialMetricHistory
from amago.loading import RLDataset
from amago.run.callbacks import CallbackList
from amago.run.evaluate import histories, mean_length, merge_returns, merge_specials, merge_values, summarise
from amago.run.learner import Learner
from amago.run.metric_names import SECTIONS, STEPS_PER_SECOND, UPDATES_PER_SECOND
from amago.run.metrics import MetricsLogger, RunningMeans, mean_of_rows, to_floats, wandb_options
from amago.run.pace import COLLECT, TRAIN
from amago.run.progress import Console, Phase
from amago.run.ranks import JointStop, Ranks
from amago.run.record import flat
from amago.run.roles import Role
from amago.run.rollout import shares
from amago.run.signals import GracefulStop
from amago.run.waiting import check_trained


class LoggedRun(Learner):
    """Base class of `amago.Experiment`: counts, log and callbacks.

    Attributes:
        frames_by_env: environment steps collected by all ranks, by environment name.
        logger: in the main process; None in others.
        should_stop: `Experiment.learn` ends when the epoch is finished; set by callbacks.
    """

    logger: MetricsLogger | None
    _stop: GracefulStop

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ranks = Ranks()
        self._role = Role()
        self._stop = GracefulStop()
        self.should_stop = False
        self._epoch = 0
        self._epoch_is_over = False  # and `epoch` is its number
        self._begin_epoch()
        self._ever_trained = False
        self._restarts = 0  # of environments, in this process
        self.frames_by_env: dict[str, int] = {}
        self._callbacks, self._console = CallbackList(), Console(speaks=False)
        self._speeds: dict[str, float] = {}  # for the next row of the log; not an argument, as subclasses override `log`
        self._epoch_metrics: dict[str, float] = {}  # the newest of the current epoch, by "section/name"
        self.logger, self._means = None, RunningMeans()
        self._settings: dict[str, Any] = {}  # as they were at the start
        self._refusal: Exception | None = None  # why nothing may be written

    @property
    def launched(self) -> bool:
        """Whether a launcher started this process, so that other processes collect and evaluate for it, or it for them."""
        return self._role.launched

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

    @property
    def _data(self) -> RLDataset:
        assert self.dataset is not None, "check_settings() refuses this"
        return self.dataset

    # ---- ranks ------------------------------------------------------------------------------------------------------------

    def _join_ranks(self) -> None:
        """If this process trains with others, let them stop together."""
        self._ranks = Ranks(self.accelerator)
        if self._ranks.count > 1:
            self._stop = JointStop(self._ranks)

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
