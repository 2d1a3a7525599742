"""The first step of a process in a launch: it becomes a collector or one of the learner's ranks, as a callback of its experiment."""

from __future__ import annotations

import os
import sys
from types import TracebackType

import torch
import torch.distributed as dist

from amago.run.group import TIMEOUT, ranks_on_cpus
from amago.run.launched.collector import Collector
from amago.run.launched.learner import Learner
from amago.run.launched.protocol import RANKS_FILE, Assignment
from amago.run.launched.role import Launched
from amago.run.settings import ExperimentSettings, SettingsError

_joined: list[str] = []


def join(settings: ExperimentSettings) -> Launched | None:
    """Give an experiment its part in a launch; None in a process that no launcher has started.

    Raises:
        RuntimeError: another experiment of this process has the part.
    """
    assignment = Assignment.of_this_process()
    if assignment is None:
        return None
    if _joined:
        raise RuntimeError(
            f"a launched program starts one Experiment, and this one ({assignment.name}) starts a second: launch a program for each run "
            "(with --collectors, --trials must be 1)"
        )
    sys.excepthook = _without_traceback
    callback = Collector(assignment) if assignment.kind == "collector" else Learner(assignment)
    if os.environ.get(RANKS_FILE):
        _join_ranks()
    settings.plan_epochs(1)  # before the fields that it takes change
    callback.apply(settings)
    _joined.append(assignment.name)
    return callback


def _without_traceback(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """Print a mistake in the settings as its message alone, other errors in full."""
    if isinstance(value, SettingsError):
        print(f"{kind.__name__}: {value}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, value, trace)


def _join_ranks() -> None:
    """Meet the other ranks through a file, so that nothing listens for them; Accelerate takes the group that it finds."""
    cpus = ranks_on_cpus() or os.environ.get("ACCELERATE_USE_CPU") == "true"
    if not cpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "gloo" if cpus else "nccl", init_method=f"file://{os.environ[RANKS_FILE]}", rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]), timeout=TIMEOUT,
    )  # fmt: skip
