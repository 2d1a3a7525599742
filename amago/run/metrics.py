"""Metrics of a run, written to ``metrics.jsonl``, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from amago.run.evaluate import AVERAGE_RETURN
from amago.run.settings import ExperimentSettings

log = logging.getLogger(__name__)
MAX_WAITING_BYTES = 64 << 20
X_AXES = ("epoch", "env_steps", "grad_steps")


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert tensors (to their mean) and NumPy scalars to floats, with one transfer from the device for all tensors."""
    tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
    if tensors:
        stacked = torch.stack([t.detach().float().mean() for t in tensors.values()]).cpu().tolist()
        values = {**values, **dict(zip(tensors, stacked, strict=True))}
    return {k: float(v) for k, v in values.items()}


class MetricsLogger:
    """Writes rows of metrics.

    ``metrics.jsonl`` is always written. A row is ``{"epoch", "env_steps", "grad_steps", "wall_time", "section", "values"}``,
    appended as one line without buffering, so that a killed run loses at most the line being written. If the disk is full,
    rows wait in memory.

    Args:
        run_dir: directory of the run.
        tensorboard: also write event files to ``run_dir/tensorboard`` (extra ``tensorboard``).
        wandb: also log to Weights & Biases (extra ``wandb``), with these arguments of ``wandb.init``.
        settings: of the run, for TensorBoard's table of hyperparameters.

    Raises:
        ImportError: TensorBoard or Weights & Biases is not installed; names the extra.
    """

    def __init__(
        self,
        run_dir: Path,
        tensorboard: bool = False,
        wandb: Mapping[str, Any] | None = None,
        settings: Mapping[str, bool | int | float | str] | None = None,
    ):
        run_dir.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        self._tensorboard = _tensorboard_writer(run_dir / "tensorboard", settings or {}) if tensorboard else None
        self._wandb = _wandb_run(run_dir, wandb) if wandb is not None else None
        self._file = open(run_dir / "metrics.jsonl", "ab", buffering=0)
        self._waiting = b"\n" if _is_torn(run_dir / "metrics.jsonl") else b""

    @property
    def wall_time(self) -> float:
        """Seconds of this run, including the time before a resume."""
        return time.monotonic() - self._began

    def rewind(self, wall_time: float) -> None:
        """Continue to count from ``wall_time`` seconds."""
        self._began = time.monotonic() - wall_time

    def log(self, values: Mapping[str, Any], section: str, x: Mapping[str, int], charts: Mapping[str, float]) -> None:
        """Write one row.

        Args:
            values: numbers by name; tensors are averaged, and what is not finite is written as null.
            section: "train", "val", "test", "buffer" or "rollout".
            x: epoch, env_steps and grad_steps.
            charts: further numbers for the x-axes of Weights & Biases.
        """
        numbers = to_floats(values)
        if not numbers:
            return
        row = {k: int(x[k]) for k in X_AXES} | {"wall_time": round(self.wall_time, 3), "section": section}
        row["values"] = {k: (v if math.isfinite(v) else None) for k, v in numbers.items()}
        self._append(f"{json.dumps(row, allow_nan=False)}\n".encode())
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(f"{section}/{name}", value, int(x["env_steps"]))
        if self._wandb is not None:
            self._wandb.log({f"{section}/{k}": v for k, v in numbers.items()} | {f"Charts/{k}": v for k, v in charts.items()})

    def _append(self, line: bytes) -> None:
        """Write a line, after the lines that a full disk has delayed."""
        before, self._waiting = len(self._waiting), self._waiting + line
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as err:
            if len(self._waiting) > MAX_WAITING_BYTES:
                raise
            if not before:  # one warning, not one with each row
                log.warning("%s: %s; rows wait in memory until they can be written", self._file.name, err)

    def close(self) -> None:
        """Write and close everything; twice is fine."""
        if not self._file.closed:
            self._append(b"")
            os.fsync(self._file.fileno())
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._tensorboard = self._wandb = None


def _is_torn(path: Path) -> bool:
    """Whether the last line is incomplete, because a process was killed while writing it."""
    with open(path, "rb") as f:
        if f.seek(0, os.SEEK_END) == 0:
            return False
        f.seek(-1, os.SEEK_END)
        return f.read(1) != b"\n"


def _tensorboard_writer(directory: Path, settings: Mapping[str, bool | int | float | str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams
    except ImportError as err:
        raise ImportError("log_to_tensorboard=True needs TensorBoard: pip install 'amago[tensorboard]'") from err
    writer = SummaryWriter(str(directory))
    if settings:  # add_hparams() would make a run of its own for the table
        for part in hparams(dict(settings), {f"val/{AVERAGE_RETURN}": None}):
            writer._get_file_writer().add_summary(part)
    return writer


def wandb_options(settings: ExperimentSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``wandb.init`` for a run.

    Args:
        config: settings by name, for its table.
    """
    return {
        "project": settings.wandb_project, "entity": settings.wandb_entity, "name": settings.run_name,
        "group": settings.wandb_group_name, "config": dict(config),
    }  # fmt: skip


def _wandb_run(run_dir: Path, options: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as err:
        raise ImportError("log_to_wandb=True needs Weights & Biases: pip install 'amago[wandb]'") from err
    return wandb.init(dir=str(run_dir), **options)


def mean_of_rows(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over the rows that have it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


class RunningMeans:
    """Means of training metrics between two rows of the log, accumulated on the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Add the numbers or tensors of one step."""
        for name, value in values.items():
            v = value.detach().float() if isinstance(value, torch.Tensor) else float(value)
            self._sums[name] = self._sums[name] + v if name in self._sums else v
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        means = {k: v / self._counts[k] for k, v in to_floats(self._sums).items()} if self._sums else {}
        self._sums, self._counts = {}, {}
        return means
