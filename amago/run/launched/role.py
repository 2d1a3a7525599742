"""The base of the two roles of a launch, as a callback of an experiment; and processes that only collect, or only learn (``--mode``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator

from amago.envs.statistics import PhaseStatistics
from amago.loading import RLDataset
from amago.run.callbacks import Callback, Run
from amago.run.group import Signals
from amago.run.launched.protocol import Assignment
from amago.run.settings import ExperimentSettings


class LaunchedRun(Run, Protocol):
    """The further fields of `amago.Experiment` that the roles use."""

    frames_by_env: dict[str, int]
    grad_update_counter: int
    signals: Signals
    resume: str
    exploration_wrapper_type: object
    phase_statistics: PhaseStatistics | None

    def read_latest_policy(self) -> None: ...
    def write_latest_policy(self) -> None: ...
    def axes(self) -> dict[str, int]: ...
    def log(self, metrics_dict: Mapping[str, Any], key: str) -> None: ...
    def log_at(self, metrics_dict: Mapping[str, Any], key: str, axes: Mapping[str, int]) -> None: ...

    @property
    def accelerator(self) -> Accelerator: ...
    @property
    def data(self) -> RLDataset: ...
    @property
    def run_dir(self) -> Path: ...
    @property
    def train_envs(self) -> Any: ...


class Launched(Callback):
    """Base of the two roles: the checks that both need."""

    process_key: tuple[int, ...] = ()
    """Distinguishes the random streams of this process from other processes' streams."""

    def __init__(self, assignment: Assignment):
        self.assignment = assignment
        self.begun = self.in_learn = False

    def apply(self, settings: ExperimentSettings) -> None:
        """Change the settings of an experiment of which nothing is built."""
        raise NotImplementedError

    def begin(self, experiment: LaunchedRun) -> None:
        """Begin, after the experiment was built. A program that calls the parts of ``start()`` begins with its first epoch."""
        raise NotImplementedError

    def on_start(self, experiment: LaunchedRun) -> None:
        self.begin(experiment)

    def before_epoch(self, experiment: LaunchedRun) -> None:
        self.in_learn = True
        if not self.begun:
            self.begin(experiment)

    def check_call(self, what: str) -> None:
        """Refuse a loop of the program's own, such as a call of "train_epoch()" before ``learn()``, by a `RuntimeError`."""
        if what in ("collect_new_training_data()", "train_epoch()") and not self.in_learn:
            raise RuntimeError(
                f"a launched program calls learn(), in which each process does its part; {what} before it is a loop of the program's own, "
                f"which cannot be divided among processes (this one is {self.assignment.name}): call learn(), or run the program without a launcher"
            )


def collect_only(settings: ExperimentSettings) -> None:
    """Let a process act and evaluate with the newest published weights; never train, and delete nothing."""
    settings.start_learning_at_epoch = float("inf")
    settings.ckpt_interval = None
    settings.always_save_latest, settings.always_load_latest = False, True
    settings.has_dset_edit_rights = False
    settings.builds_optimizer = False


def learn_only(settings: ExperimentSettings) -> None:
    """Let a process train and publish weights; never act."""
    settings.start_collecting_at_epoch = float("inf")
    settings.train_timesteps_per_epoch = 0
    settings.val_interval = None
    settings.always_save_latest, settings.always_load_latest = True, False
    settings.has_dset_edit_rights = True
