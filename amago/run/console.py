"""The output of a run: its settings, in a terminal one bar for the whole run, everywhere a line for each epoch, and tables of metrics."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from amago.describe import fit_width, format_duration, format_rate, natural_sort_key
from amago.run.callbacks import Callback, LogRow, Run
from amago.run.metric_names import AVERAGE_RETURN, ROLLOUT_LENGTH, SUCCESS
from amago.run.results import Evaluation, by_attempt
from amago.run.rules import findings

COLLECT, TRAIN, EVALUATE = "collect", "train", "evaluate"
UNITS = {COLLECT: "steps", TRAIN: "updates"}
_DOING = {COLLECT: "collecting", TRAIN: "training", EVALUATE: "evaluating"}


class Phase:
    """Some work in progress, made by `Console.phase`."""

    def __init__(self, bar: tqdm[Any]):
        self._bar, self.done, self._began = bar, 0, time.monotonic()
        self._lap = (0, self._began)

    def update(self, units: int) -> None:
        """Count more units as done."""
        self.done += units
        self._bar.update(units)

    @property
    def rate(self) -> float:
        """Units a second."""
        return self.done / max(time.monotonic() - self._began, 1e-9)

    def lap(self) -> float:
        """Units a second since the last call."""
        (done, began), self._lap = self._lap, (self.done, time.monotonic())
        return (self.done - done) / max(self._lap[1] - began, 1e-9)


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no thread


class Console(Callback):
    """Prints the progress of a run: lines to standard output, and a bar where there is a terminal or a notebook.

    Args:
        progress: "rich": a line for each epoch and a bar for each phase; "plain": the lines; "none": neither.
        speaks: print at all.
        factors: {kind of phase: factor that converts its units to the units of `UNITS`}.
    """

    def __init__(self, progress: str = "rich", speaks: bool = True, factors: Mapping[str, float] | None = None):
        self._factors = factors or {}
        self._speaks, self._lines = speaks, speaks and progress != "none"
        self._screen = _screen() if self._lines and progress == "rich" else None
        self._run: Run | None = None  # while `learn` runs
        self._rates: dict[str, float] = {}  # of the newest phase of each kind
        self._in_epoch: list[str] = []  # the kinds of phases that the epoch has had
        self._rows: deque[LogRow] = deque(maxlen=1_000)
        self._found: set[str] = set()  # rules whose line is printed
        self._began, self._first = 0.0, 0  # when `learn` began, and in which epoch

    def print(self, text: str) -> None:
        """Print lines, above the bar if there is one."""
        if text and self._speaks:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()  # a file or pipe shows each epoch when it is finished

    @contextmanager
    def learning(self, experiment: Run) -> Iterator[None]:
        """The context in which `learn` runs."""
        self._run, self._began, self._first = experiment, time.monotonic(), experiment.epoch
        try:
            yield
        finally:
            self._run = None

    @contextmanager
    def phase(self, kind: str, total: int | None, unit: str) -> Iterator[Phase]:
        """Show some work (``kind`` "collect", "train", "evaluate" or another title), which calls `Phase.update` for its units. ``total``
        of them is None if it is not known."""
        title = _DOING.get(kind, kind)
        if self._run is not None:
            title = f"epoch {self._run.epoch + 1}/{self._run.epochs} {title}"
        with _Bar(
            desc=title, total=total, unit=unit, file=self._screen, disable=self._screen is None, leave=False, dynamic_ncols=True,
            mininterval=0.5,
        ) as bar:  # fmt: skip
            phase = Phase(bar)
            try:
                yield phase
            finally:
                if phase.done:
                    self._rates[kind] = phase.rate * self._factors.get(kind, 1.0)
                    self._in_epoch.append(kind)

    def rate(self, kind: str) -> float:
        """Steps or updates a second in the newest phase of a kind; 0.0 if there was none."""
        return self._rates.get(kind, 0.0)

    def on_validation_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        if self._run is None and metrics:  # evaluate_val() was called by itself
            self.print(f"epoch {experiment.epoch} | {_evaluation(metrics)}")

    def on_log(self, experiment: Run, row: LogRow) -> None:
        self._rows.append(row)

    def on_epoch_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        if self._lines:
            for name, words, advice in findings(self._rows):
                if name not in self._found:
                    self._found.add(name)
                    self.print(fit_width(f"note: {words}: {advice} ({name!r} in docs/common_mistakes.md)"))
            done, left = experiment.epoch - self._first, None
            if self._run is not None and done > 0:
                left = (time.monotonic() - self._began) * (experiment.epochs - experiment.epoch) / done
            rates = [f"{format_rate(self._rates[kind])} {UNITS[kind]}/s" for kind in UNITS if kind in self._in_epoch]
            self.print(fit_width(epoch_line(experiment, metrics, rates, left)))
        self._in_epoch = []


def _screen() -> TextIO | None:
    """The stream that can show a bar: standard error in a terminal, in a notebook the output that has the lines, too; None elsewhere."""
    if type(sys.stdout).__module__.partition(".")[0] == "ipykernel":
        return sys.stdout
    try:
        return sys.stderr if sys.stderr.isatty() else None
    except (AttributeError, ValueError):  # no standard error, or closed
        return None


def epoch_line(experiment: Run, metrics: Mapping[str, float], rates: list[str], left: float | None) -> str:
    """The line of a finished epoch, from its metrics by "section/name", its rates ("1,230 steps/s"), and the seconds that are left of the
    run (None if that is not known)."""

    def of(section: str) -> dict[str, float]:
        return {k.removeprefix(f"{section}/"): v for k, v in metrics.items() if k.startswith(f"{section}/")}

    rollout, val, train = of("rollout"), of("val"), of("train")
    width = len(str(experiment.epochs))
    outcome = [f"return {rollout[AVERAGE_RETURN]:.4g}"] if AVERAGE_RETURN in rollout else []
    outcome += [_evaluation(val)] if AVERAGE_RETURN in val else []
    length = rollout.get(ROLLOUT_LENGTH, val.get(ROLLOUT_LENGTH))
    outcome += [f"length {length:.4g}"] if length is not None else []
    losses = [f"{n.lower()} {train[n]:.3g}" for n in ("Actor Loss", "Critic Loss") if n in train]
    left_text = "done" if left == 0.0 else f"{format_duration(left)} left"
    parts = [
        f"epoch {experiment.epoch:>{width}}/{experiment.epochs}", f"{experiment.env_steps:,} steps", ", ".join(rates), ", ".join(outcome),
        ", ".join(losses), left_text,
    ]  # fmt: skip
    return " | ".join(p for p in parts if p)


def _evaluation(metrics: Mapping[str, float]) -> str:
    """The outcome of an evaluation: its return, and the first and last success rate."""
    success = [k for k in metrics if SUCCESS in k]
    shown = [f"{k.removeprefix('Average ')} {metrics[k]:.3f}" for k in dict.fromkeys(success[:1] + success[-1:])]
    return f"val {metrics[AVERAGE_RETURN]:.4g}" + (f" ({', '.join(shown)})" if shown else "")


LARGE = 1_500_000  # parameters, from which an update on a CPU takes tenths of a second


def summary(s: Run, env_summary: str) -> str:
    """The most important settings of a run, in two columns: with descriptions of its environments, its exploration (or data, if it never
    collects) and its computation, and the first epoch to run."""
    policy = s.policy
    count, device = sum(p.numel() for p in policy.trainable_params), next((p.device for p in policy.trainable_params), "cpu")
    rows = {
        "run": f"{s.run_name} ({s.run_dir})",
        "environments": env_summary,
        "exploration": s.actors.exploration if s.collects else "",
        "data": "" if s.collects or s.dataset is None else s.dataset.describe(),
        "agent": f"{type(policy).__name__}: {type(policy.tstep_encoder).__name__} -> "
        f"{type(policy.traj_encoder).__name__}, {count:,} trainable parameters on {device}",
        "hint": 'this size is meant for a GPU; on a CPU, widths of 128 and 2 layers are about 4 times as fast ("Fast on a CPU" in '
        "docs/performance.md)"
        if count > LARGE and str(device) == "cpu"
        else "",
        "computation": s.learner.describe_computation(),
        "sequences": f"{s.batch_size * s.group.count} a batch, up to {s.max_seq_len} steps each",
        "an epoch": (f"{s.train_timesteps_per_epoch} steps of each actor, " if s.collects else "")
        + f"{s.train_batches_per_epoch} batches",
        "epochs": f"{s.epoch} to {s.epochs}; {_how_often('evaluation', s.val_interval)}, {_how_often('checkpoint', s.ckpt_interval)}",
        "seed": f"{s.run_seed}",
    }
    width = max(map(len, rows))
    return "\n".join(fit_width(f"  {k:<{width}}  {v}", width + 4) for k, v in rows.items() if v)


def _how_often(what: str, interval: int | None) -> str:
    return f"no {what}" if interval is None else f"{what} every {interval}" if interval > 1 else f"{what} every epoch"


def metrics_table(metrics: Mapping[str, float], title: str) -> str:
    """Two columns, names and values, sorted by name after the average return; below, the tables of an `Evaluation`."""
    if not metrics:
        return f"{title}: no rollout ended; evaluate for more timesteps"
    own = by_attempt(list(metrics.metrics)) if isinstance(metrics, Evaluation) else {}
    of_attempts = {f"Average {name}" for names in own.values() for name in names.values()}
    names = sorted(metrics.keys() - of_attempts, key=lambda k: (k != AVERAGE_RETURN, natural_sort_key(k)))
    width = max(map(len, names))
    lines = [f"{name:<{width}}  {metrics[name]:>12.4g}" for name in names]
    tables = ["", str(metrics)] if isinstance(metrics, Evaluation) else []
    return "\n".join([title, "-" * (width + 14), *lines, *tables])
