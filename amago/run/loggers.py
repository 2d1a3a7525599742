"""Loggers: callbacks that write the rows of the log to ``metrics.jsonl``, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amago.run.callbacks import Callback, LogRow
from amago.run.metric_names import AVERAGE_RETURN
from amago.run.settings import ExperimentSettings
from amago.run.video import add_to_events

if TYPE_CHECKING:
    from amago.experiment import Experiment

log = logging.getLogger(__name__)
MAX_WAITING_BYTES = 64 << 20


class JsonlLogger(Callback):
    """Writes each row as a line of JSON: ``{"epoch", "env_steps", "grad_steps", "wall_time", "section", "values"}``.

    Lines are appended without buffering, so that a killed run loses at most the line being written. If the disk is full, rows wait in
    memory. What is not finite is written as null.

    Args:
        path: of the file, which a run calls ``metrics.jsonl``.
    """

    def __init__(self, path: Path):
        self._file = open(path, "ab", buffering=0)
        self._waiting = b"\n" if _is_torn(path) else b""

    def on_log(self, experiment: Experiment | None, row: LogRow) -> None:
        if not row.values:
            return
        line: dict[str, Any] = {
            "epoch": row.epoch, "env_steps": row.env_steps, "grad_steps": row.grad_steps, "wall_time": row.wall_time,
            "section": row.section, "values": {k: (v if math.isfinite(v) else None) for k, v in row.values.items()},
        }  # fmt: skip
        self._append(f"{json.dumps(line, allow_nan=False)}\n".encode())

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

    def on_close(self, experiment: Experiment | None) -> None:
        if not self._file.closed:
            self._append(b"")
            os.fsync(self._file.fileno())
            self._file.close()


def _is_torn(path: Path) -> bool:
    """Whether the last line is incomplete, because a process was killed while writing it."""
    with open(path, "rb") as f:
        if f.seek(0, os.SEEK_END) == 0:
            return False
        f.seek(-1, os.SEEK_END)
        return f.read(1) != b"\n"


class TensorBoardLogger(Callback):
    """Writes event files, with the environment steps as the axis.

    Args:
        directory: of the event files.
        settings: of the run, for the table of hyperparameters.

    Raises:
        ImportError: TensorBoard is not installed; names the extra.
    """

    def __init__(self, directory: Path, settings: Mapping[str, bool | int | float | str]):
        try:
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard.summary import hparams
        except ImportError as err:
            raise ImportError("log_to_tensorboard=True needs TensorBoard: pip install 'amago[tensorboard]'") from err
        self._writer = SummaryWriter(str(directory))
        if settings:  # add_hparams() would make a run of its own for the table
            for part in hparams(dict(settings), {f"val/{AVERAGE_RETURN}": None}):
                self._writer._get_file_writer().add_summary(part)

    def on_log(self, experiment: Experiment | None, row: LogRow) -> None:
        for name, value in {**row.values, **row.speeds}.items():
            self._writer.add_scalar(f"{row.section}/{name}", value, row.env_steps)

    def log_video(self, tag: str, path: Path, pictures: Sequence[Any], fps: float, env_steps: int) -> None:
        """Show a film under the tab of images; see `amago.run.metrics.MetricsLogger.log_video`."""
        add_to_events(self._writer, tag, pictures, fps, env_steps)
        self._writer.flush()

    def on_close(self, experiment: Experiment | None) -> None:
        self._writer.close()


class WandbLogger(Callback):
    """Logs to Weights & Biases.

    Args:
        run_dir: directory of the run, in which its files are.
        options: arguments of ``wandb.init`` (`wandb_options`).

    Raises:
        ImportError: Weights & Biases is not installed; names the extra.
    """

    def __init__(self, run_dir: Path, options: Mapping[str, Any]):
        try:
            import wandb
        except ImportError as err:
            raise ImportError("log_to_wandb=True needs Weights & Biases: pip install 'amago[wandb]'") from err
        self._video = wandb.Video
        self._run: Any = wandb.init(dir=str(run_dir), **options)

    def on_log(self, experiment: Experiment | None, row: LogRow) -> None:
        numbers = {f"{row.section}/{k}": v for k, v in {**row.values, **row.speeds}.items()}
        self._run.log(numbers | {f"Charts/{k}": v for k, v in row.charts.items()})

    def log_video(self, tag: str, path: Path, pictures: Sequence[Any], fps: float, env_steps: int) -> None:
        """Upload a film; see `amago.run.metrics.MetricsLogger.log_video`."""
        self._run.log({tag: self._video(str(path)), "Charts/total_frames": env_steps})

    def on_close(self, experiment: Experiment | None) -> None:
        self._run.finish()


def wandb_options(settings: ExperimentSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``wandb.init`` for a run.

    Args:
        config: settings by name, for its table.
    """
    return {
        "project": settings.wandb_project, "entity": settings.wandb_entity, "name": settings.run_name,
        "group": settings.wandb_group_name, "config": dict(config),
    }  # fmt: skip
