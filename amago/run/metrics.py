"""The log of a run: means of training metrics, rows, and loggers: ``metrics.jsonl``, and those of the setting ``log_to``."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from amago.registry import require
from amago.run.callbacks import LogRow
from amago.run.metric_names import AVERAGE_RETURN, SECTIONS
from amago.run.plots import read_metrics
from amago.run.record import flat, masked, run_id
from amago.run.settings import ExperimentSettings
from amago.run.video import add_to_events

log = logging.getLogger(__name__)
MAX_WAITING_BYTES = 64 << 20


class Logger:
    """Base of the loggers of a run."""

    resumed = False  # True where the next row goes on from a training state

    def on_log(self, row: LogRow) -> None:
        """Write a row."""

    def on_close(self) -> None:
        """Finish, and close files; twice is fine."""

    def log_video(self, tag: str, path: Path, pictures: Sequence[Any], fps: float, env_steps: int) -> None:
        """Show a film, under a name: the file, and its pictures (`amago.run.video.as_frames`), so many a second."""


class JsonlLogger(Logger):
    """Writes each row as a line of JSON: ``{"epoch", "env_steps", "grad_steps", "wall_time", "section", "values"}``, and "memory" once an epoch.

    Lines are appended without buffering, so that a killed run loses at most the line being written. If the disk is full, rows wait in
    memory. A value that is not finite is written as null.
    """

    def __init__(self, path: Path):
        self._file = open(path, "a+b", buffering=0)
        self._waiting = b""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # a process was killed while writing the last line
                self._waiting = b"\n"

    def on_log(self, row: LogRow) -> None:
        if not row.values:
            return
        line: dict[str, Any] = {
            "epoch": row.epoch, "env_steps": row.env_steps, "grad_steps": row.grad_steps, "wall_time": row.wall_time,
            "section": row.section, "values": {k: (v if math.isfinite(v) else None) for k, v in row.values.items()},
            **({"memory": row.memory} if row.memory else {}),
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

    def on_close(self) -> None:
        if not self._file.closed:
            self._append(b"")
            os.fsync(self._file.fileno())
            self._file.close()


def _numbers(row: LogRow) -> dict[str, float]:
    """The values and speeds of a row, by "section/name"."""
    return {f"{row.section}/{name}": value for name, value in {**row.values, **row.speeds}.items()}


def _package(name: str, module: str = "") -> Any:
    other = f", log_to_{name}=True" if name in ("tensorboard", "wandb") else ""
    return require(module or name, name, f"log_to=[{name!r}] (--log_to {name}{other})")


class TensorBoardLogger(Logger):
    """Writes event files, with the environment steps as the axis, and a table of hyperparameters if it is given ``settings``.

    After a resume from an earlier epoch, curves go on there: the steps after it are removed from them (``purge_step``).
    """

    def __init__(self, directory: Path, settings: Mapping[str, bool | int | float | str] | None = None):
        package = _package("tensorboard", "torch.utils.tensorboard")
        self._directory = directory
        self._writer = package.SummaryWriter(str(directory))
        if settings:  # add_hparams() would make a separate run for the table
            for part in package.summary.hparams(dict(settings), {f"val/{AVERAGE_RETURN}": None}):
                self._writer._get_file_writer().add_summary(part)

    def _purge(self, first: LogRow) -> None:
        """Remove what was written from the steps of the first row on; rows of earlier epochs at this very step are written again."""
        run_dir = self._directory.parent
        self._writer.close()
        self._writer = type(self._writer)(str(self._directory), purge_step=first.env_steps)
        for row in read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else ():
            if row["env_steps"] == first.env_steps and row["epoch"] < first.epoch:
                for name, value in row["values"].items():
                    number = float("nan") if value is None else value
                    self._writer.add_scalar(f"{row['section']}/{name}", number, first.env_steps)

    def on_log(self, row: LogRow) -> None:
        if self.resumed:
            self.resumed = False
            self._purge(row)
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row.env_steps)

    def log_video(self, tag: str, path: Path, pictures: Sequence[Any], fps: float, env_steps: int) -> None:
        add_to_events(self._writer, tag, pictures, fps, env_steps)
        self._writer.flush()

    def on_close(self) -> None:
        self._writer.close()


class WandbLogger(Logger):
    """Logs to Weights & Biases, with ``config``, settings by name, as its table.

    The id of a run never changes, so that a resumed run continues its curves. Processes that only collect are
    separate runs.
    """

    def __init__(self, settings: ExperimentSettings, config: Mapping[str, Any]):
        wandb = _package("wandb")
        self._video = wandb.Video
        identity: dict[str, Any] = {"id": run_id(settings.run_dir), "resume": "allow"} if settings.learns else {}
        self._run = wandb.init(
            dir=str(settings.run_dir), project=settings.wandb_project, entity=settings.wandb_entity, name=settings.run_name,
            group=settings.wandb_group_name, config=dict(config), **identity,
        )  # fmt: skip

    def on_log(self, row: LogRow) -> None:
        self._run.log(_numbers(row) | {f"Charts/{k}": v for k, v in row.charts.items()})

    def log_video(self, tag: str, path: Path, pictures: Sequence[Any], fps: float, env_steps: int) -> None:
        self._run.log({tag: self._video(str(path)), "Charts/total_frames": env_steps})

    def on_close(self) -> None:
        self._run.finish()


def memory_in_use() -> float:
    """GiB of this process and its children."""
    total, own = 0, psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            total += process.memory_info().rss
    return round(total / 2**30, 3)


class MLflowLogger(Logger):
    """Logs to MLflow, where ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` say: by default to files here, as "amago".

    A resumed run goes on with its MLflow run, whose parameters are those of its first start. MLflow's own telemetry is off.
    """

    def __init__(self, settings: ExperimentSettings, config: Mapping[str, Any]):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = _package("mlflow")
        self._client, self._metric = mlflow.MlflowClient(), mlflow.entities.Metric
        name, tag = os.environ.get("MLFLOW_EXPERIMENT_NAME", "amago"), {"amago.run": run_id(settings.run_dir)}
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        earlier = self._client.search_runs([experiment], f"tags.`amago.run` = '{tag['amago.run']}'") if settings.learns else []
        run = earlier[0] if earlier else self._client.create_run(experiment, tags=tag, run_name=settings.run_name)
        self._id = run.info.run_id
        params = [mlflow.entities.Param(k[:250], str(v)[:6000]) for k, v in config.items()]
        for i in range(0, 0 if earlier else len(params), 100):  # as many as MLflow takes at once
            self._client.log_batch(self._id, params=params[i : i + 100])

    def on_log(self, row: LogRow) -> None:
        now, step = int(time.time() * 1000), row.env_steps
        # the names that MLflow takes
        numbers = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in _numbers(row).items()}
        self._client.log_batch(self._id, metrics=[self._metric(k, v, now, step) for k, v in numbers.items()])

    def log_video(self, tag: str, path: Path, pictures: Sequence[Any], fps: float, env_steps: int) -> None:
        self._client.log_artifact(self._id, str(path), tag)

    def on_close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioLogger(Logger):
    """Logs to Trackio, a database on this machine (``TRACKIO_DIR``) that ``trackio show`` draws; no account, no server."""

    def __init__(self, settings: ExperimentSettings, config: Mapping[str, Any]):
        name = f"{settings.run_name}-{run_id(settings.run_dir)[:6]}"  # a name is a run's identity in a project
        self._run = _package("trackio").init(
            project=settings.wandb_project or "amago", name=name, group=settings.wandb_group_name, config=dict(config),
            resume="allow" if settings.learns else "never", embed=False,
        )  # fmt: skip

    def on_log(self, row: LogRow) -> None:
        self._run.log(_numbers(row), step=row.env_steps)

    def on_close(self) -> None:
        self._run.finish()


class CSVLogger(Logger):
    """Appends to a table with a line for each number of each row; a run that resumes appends, too."""

    def __init__(self, path: Path):
        self._file = open(path, "a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        if not self._file.tell():
            self._writer.writerow(("epoch", "env_steps", "grad_steps", "wall_time", "section", "name", "value"))

    def on_log(self, row: LogRow) -> None:
        place = row.epoch, row.env_steps, row.grad_steps, row.wall_time, row.section
        self._writer.writerows((*place, *number) for number in {**row.values, **row.speeds}.items())
        self._file.flush()

    def on_close(self) -> None:
        self._file.close()


LOGGERS: Mapping[str, Callable[[ExperimentSettings, Mapping[str, Any]], Logger]] = {
    "csv": lambda settings, table: CSVLogger(settings.run_dir / "metrics.csv"),
    "mlflow": MLflowLogger,
    "tensorboard": lambda settings, table: TensorBoardLogger(settings.run_dir / "tensorboard", table),
    "trackio": TrackioLogger,
    "wandb": WandbLogger,
}
"""The loggers that ``log_to`` names."""


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert tensors (to their mean) and NumPy scalars to floats, with one transfer from the device for all tensors."""
    tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
    if tensors:
        stacked = torch.stack([t.detach().float().mean() for t in tensors.values()]).cpu().tolist()
        values = {**values, **dict(zip(tensors, stacked, strict=True))}
    return {k: float(v) for k, v in values.items()}


def extra_loggers(s: ExperimentSettings, settings: dict[str, Any]) -> Iterator[Logger]:
    """The loggers of the setting ``log_to``, with tables of ``settings`` (`amago.run.record.settings_of`)."""
    asked = {*s.log_to, *(["tensorboard"] if s.log_to_tensorboard else ()), *(["wandb"] if s.log_to_wandb else ())}
    return (make(s, flat(masked(settings))) for name, make in LOGGERS.items() if name in asked)


class RunLog:
    """The log of a run: its rows, and means of training metrics.

    Attributes:
        loggers: to which rows are written; none before `open`, and in all processes but the main one.
        speeds: numbers a second for the next row. They are no argument of `row`, as subclasses of `amago.Experiment` override ``log``.
    """

    def __init__(self) -> None:
        self.loggers: list[Logger] = []
        self.speeds: dict[str, float] = {}
        self._began: float | None = None
        self._newest: dict[str, float] = {}
        self._since_row: dict[str, tuple[Any, int]] = {}  # sums, on the device, and numbers of their terms
        self._in_epoch: dict[str, tuple[float, int]] = {}

    def open(self, run_dir: Path, *others: Logger) -> None:
        """Write rows to `JsonlLogger` and to others."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic() if self._began is None else self._began
        self.loggers = [*others, JsonlLogger(run_dir / "metrics.jsonl")]

    @property
    def logger(self) -> RunLog | None:
        """This log, where it is written: in the main process."""
        return self if self.loggers else None

    @property
    def wall_time(self) -> float:
        """Seconds of this run, including the time before a resume."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def rewind(self, wall_time: float) -> None:
        """Go on from a training state that was saved after ``wall_time`` seconds."""
        self._began = time.monotonic() - wall_time
        for logger in self.loggers:
            logger.resumed = True

    def row(
        self, metrics: Mapping[str, Any], key: str, axes: Mapping[str, int], charts: Mapping[str, float] | None = None
    ) -> LogRow | None:
        """Write a row, and return it; None if it would be empty, or there are no loggers.

        Args:
            metrics: numbers by name; tensors are averaged.
            key: the section ("train", "val", "test", "buffer", "rollout"), or its name in `amago.Experiment.log`.
            axes: of the run (`amago.Experiment.axes`).
            charts: further numbers for the x-axes of Weights & Biases.
        """
        speeds, self.speeds = self.speeds, {}
        if not metrics and not speeds:
            return None
        section, numbers = SECTIONS.get(key, key), to_floats(metrics)
        self.note(section, {**numbers, **speeds})
        if not self.loggers:
            return None
        memory = memory_in_use() if section == "buffer" else 0.0  # once an epoch, as it takes milliseconds
        row = LogRow(
            section, numbers, **axes, wall_time=round(self.wall_time, 3), charts=charts or {}, speeds=speeds, memory=memory
        )
        for logger in self.loggers:
            logger.on_log(row)
        return row

    def note(self, section: str, numbers: Mapping[str, float]) -> None:
        """Remember the newest numbers of an epoch."""
        self._newest.update({f"{section}/{name}": value for name, value in numbers.items()})

    def take_newest(self) -> dict[str, float]:
        """The newest value of everything since the last call, by "section/name"."""
        newest, self._newest = self._newest, {}
        return newest

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the numbers or tensors of one training step to the means."""
        for name, value in metrics.items():
            total, count = self._since_row.get(name, (0.0, 0))
            self._since_row[name] = (
                total + (value.detach().float() if isinstance(value, torch.Tensor) else float(value)),
                count + 1,
            )

    def take_means(self) -> dict[str, float]:
        """The means of training metrics since the last call."""
        sums, self._since_row = self._since_row, {}
        totals = to_floats({name: total for name, (total, _) in sums.items()})
        for name, total in totals.items():
            before, count = self._in_epoch.get(name, (0.0, 0))
            self._in_epoch[name] = before + total, count + sums[name][1]
        return {name: total / sums[name][1] for name, total in totals.items()}

    def take_epoch_means(self) -> dict[str, float]:
        """The means of all that `take_means` has included since the last call."""
        epoch, self._in_epoch = self._in_epoch, {}
        return {name: total / count for name, (total, count) in epoch.items()}

    def log_video(self, tag: str, path: Path, pictures: Sequence[Any], fps: float, env_steps: int) -> None:
        """Show a film in the loggers that can; see `Logger.log_video`."""
        for logger in self.loggers:
            logger.log_video(tag, path, pictures, fps, env_steps)

    def close(self) -> None:
        """Write and close everything; twice is fine."""
        for logger in self.loggers:
            logger.on_close()
        self.loggers = []
