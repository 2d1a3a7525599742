"""The part of a process in a launch, as a callback of its experiment; and processes that only collect, or only learn (``--mode``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator

from amago.envs.statistics import PhaseStatistics
from amago.loading import RLDataset
from amago.run.callbacks import Callback, Run
from amago.run.group import TIMEOUT, Signals, ranks_on_cpus
from amago.run.launched.protocol import RANKS_FILE, Assignment
from amago.run.settings import ExperimentSettings, SettingsError

_joined: list[str] = []


class LaunchedRun(Run, Protocol):
    """The further fields of `amago.Experiment` that the roles use."""

    frames_by_env: dict[str, int]
    grad_update_counter: int
    signals: Signals
    resume: str
    exploration_wrapper_type: object
    phase_statistics: PhaseStatistics | None
    accelerator: Accelerator
    data: RLDataset
    run_dir: Path
    train_envs: Any

    def read_latest_policy(self) -> None: ...
    def write_latest_policy(self) -> None: ...
    def axes(self) -> dict[str, int]: ...
    def log(self, metrics_dict: Mapping[str, Any], key: str) -> None: ...
    def log_at(self, metrics_dict: Mapping[str, Any], key: str, axes: Mapping[str, int]) -> None: ...


class Launched(Callback):
    """Base of the two roles. ``process_key`` distinguishes the random streams of this process from other processes' streams."""

    process_key: tuple[int, ...] = ()

    def __init__(self, assignment: Assignment):
        self.assignment = assignment
        self.begun = self.in_learn = False

    def apply(self, settings: ExperimentSettings) -> None:
        """Change the settings of an experiment of which nothing is built."""

    def begin(self, experiment: LaunchedRun) -> None:
        """Begin, after the experiment was built. A program that calls the parts of ``start()`` begins with its first epoch."""

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


def join(settings: ExperimentSettings, roles: Mapping[str, type[Launched]]) -> Launched | None:
    """Give an experiment its part in a launch, one of ``roles``; None in a process that no launcher has started.

    Raises:
        RuntimeError: another experiment of this process has the part.
    """
    if (assignment := Assignment.of_this_process()) is None:
        return None
    if _joined:
        raise RuntimeError(
            f"a launched program starts one Experiment, and this one ({assignment.name}) starts a second: launch a program for each run "
            "(with --collectors, --trials must be 1)"
        )
    sys.excepthook = _without_traceback
    if os.environ.get(
        RANKS_FILE
    ):  # nothing listens for ranks that meet through a file; Accelerate takes the group that it finds
        cpus = ranks_on_cpus() or os.environ.get("ACCELERATE_USE_CPU") == "true"
        if not cpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "gloo" if cpus else "nccl", init_method=f"file://{os.environ[RANKS_FILE]}", rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]), timeout=TIMEOUT,
        )  # fmt: skip
    settings.plan_epochs(1)  # before the fields that it takes change
    callback = roles[assignment.kind](assignment)
    callback.apply(settings)
    _joined.append(assignment.name)
    return callback


def _without_traceback(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """Print a mistake in the settings as its message alone, other errors in full."""
    if isinstance(value, SettingsError):
        print(f"{kind.__name__}: {value}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, value, trace)


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
