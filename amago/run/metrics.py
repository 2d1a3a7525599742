"""Metrics of a run: rows of the log, and means of training metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from amago.run.callbacks import LogRow
from amago.run.loggers import JsonlLogger, TensorBoardLogger, WandbLogger
from amago.run.loggers import wandb_options as wandb_options

X_AXES = ("epoch", "env_steps", "grad_steps")


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert tensors (to their mean) and NumPy scalars to floats, with one transfer from the device for all tensors."""
    tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
    if tensors:
        stacked = torch.stack([t.detach().float().mean() for t in tensors.values()]).cpu().tolist()
        values = {**values, **dict(zip(tensors, stacked, strict=True))}
    return {k: float(v) for k, v in values.items()}


class MetricsLogger:
    """Makes the rows of the log, and hands them to `JsonlLogger`, and, where asked to, `TensorBoardLogger` and `WandbLogger`.

    Args:
        run_dir: directory of the run.
        tensorboard: also log to TensorBoard.
        wandb: also log to Weights & Biases, with these arguments of ``wandb.init``.
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
        self.loggers: list[JsonlLogger | TensorBoardLogger | WandbLogger] = []
        if tensorboard:
            self.loggers.append(TensorBoardLogger(run_dir / "tensorboard", settings or {}))
        if wandb is not None:
            self.loggers.append(WandbLogger(run_dir, wandb))
        self.loggers.insert(0, JsonlLogger(run_dir / "metrics.jsonl"))

    @property
    def wall_time(self) -> float:
        """Seconds of this run, including the time before a resume."""
        return time.monotonic() - self._began

    def rewind(self, wall_time: float) -> None:
        """Continue to count from ``wall_time`` seconds."""
        self._began = time.monotonic() - wall_time

    def log(
        self,
        values: Mapping[str, Any],
        section: str,
        x: Mapping[str, int],
        charts: Mapping[str, float],
        speeds: Mapping[str, float] | None = None,
    ) -> LogRow | None:
        """Write one row.

        Args:
            values: numbers by name; tensors are averaged.
            section: "train", "val", "test", "buffer" or "rollout".
            x: epoch, env_steps and grad_steps.
            charts: further numbers for the x-axes of Weights & Biases.
            speeds: numbers a second, which are not written to ``metrics.jsonl``.

        Returns:
            the row; None if there are no values.
        """
        numbers = to_floats(values)
        if not numbers and not speeds:
            return None
        axes = {k: int(x[k]) for k in X_AXES}
        row = LogRow(section, numbers, **axes, wall_time=round(self.wall_time, 3), charts=charts, speeds=speeds or {})
        for logger in self.loggers:
            logger.on_log(None, row)
        return row

    def log_video(self, tag: str, path: Path, pictures: Sequence[Any], fps: float, env_steps: int) -> None:
        """Show a film in TensorBoard and Weights & Biases, where the run logs to them.

        Args:
            tag: its name there.
            path: the file.
            pictures: its content (`amago.run.video.as_frames`).
            fps: pictures a second.
            env_steps: where the run is.
        """
        for logger in self.loggers:
            if not isinstance(logger, JsonlLogger):
                logger.log_video(tag, path, pictures, fps, env_steps)

    def close(self) -> None:
        """Write and close everything; twice is fine."""
        for logger in self.loggers:
            logger.on_close(None)
        self.loggers = []


def mean_of_rows(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over the rows that have it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


class RunningMeans:
    """Means of training metrics between two rows of the log, accumulated on the device, and over an epoch."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._epoch: dict[str, tuple[float, int]] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Add the numbers or tensors of one step."""
        for name, value in values.items():
            v = value.detach().float() if isinstance(value, torch.Tensor) else float(value)
            self._sums[name] = self._sums[name] + v if name in self._sums else v
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        sums, counts = to_floats(self._sums), self._counts
        self._sums, self._counts = {}, {}
        for name, value in sums.items():
            before, count = self._epoch.get(name, (0.0, 0))
            self._epoch[name] = before + value, count + counts[name]
        return {name: value / counts[name] for name, value in sums.items()}

    def take_epoch(self) -> dict[str, float]:
        """The means of all that `take` has returned since the last call."""
        epoch, self._epoch = self._epoch, {}
        return {name: value / count for name, (value, count) in epoch.items()}
