"""`Console`: what a run prints: in a terminal one bar for the whole run, everywhere a line for each epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from amago.run import pace
from amago.run.callbacks import Callback
from amago.run.layout import fitted
from amago.run.metric_names import AVERAGE_RETURN, ROLLOUT_LENGTH, SUCCESS

if TYPE_CHECKING:
    from amago.experiment import Experiment

PROGRESS = ("rich", "plain", "none")
_REDRAW_SECONDS = 0.5
_DOING = {pace.COLLECT: "collecting", pace.TRAIN: "training", pace.EVALUATE: "evaluating"}


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no thread


class Phase:
    """Some work in progress, made by `Console.phase`.

    Attributes:
        kind: what is done: "collect", "train", "evaluate" or another title.
        total: units of work; None if that is not known.
        unit: the name of one unit.
        done: units done so far.
    """

    __slots__ = ("_began", "_console", "_due", "_lap", "done", "kind", "total", "unit")

    def __init__(self, console: Console, kind: str, total: int | None, unit: str):
        self._console, self.kind, self.total, self.unit = console, kind, total, unit
        self.done = 0
        self._began = time.monotonic()
        self._lap = (0, self._began)
        self._due = self._began if console.draws else float("inf")

    def update(self, units: int) -> None:
        """Count more units as done."""
        self.done += units
        if self._due < (now := time.monotonic()):
            self._due = now + _REDRAW_SECONDS
            self._console.draw(self)

    @property
    def seconds(self) -> float:
        """Since the phase began."""
        return time.monotonic() - self._began

    @property
    def rate(self) -> float:
        """Units a second."""
        return self.done / max(self.seconds, 1e-9)

    def lap(self) -> float:
        """Units a second since the last call."""
        (done, began), self._lap = self._lap, (self.done, time.monotonic())
        return (self.done - done) / max(self._lap[1] - began, 1e-9)


class Console(Callback):
    """Prints what a run does. Nothing is printed in processes other than the main one.

    Lines go to standard output; the bar goes to standard error, where that is a terminal or a notebook, so that files and pipes hold
    no carriage returns.

    Args:
        progress: "rich": a line for each epoch and the bar; "plain": the lines; "none": neither.
        speaks: print at all.
        factors: {kind of phase: by what its units are multiplied to be those of `amago.run.pace.UNITS`}.

    Attributes:
        draws: whether there is a bar.
    """

    def __init__(self, progress: str = "rich", speaks: bool = True, factors: Mapping[str, float] | None = None):
        self._factors = factors or {}
        self.speaks, self._lines = speaks, speaks and progress != "none"
        self.draws = self._lines and progress == "rich" and _can_draw()
        self._pace = pace.Pace()
        self._bar: _Bar | None = None
        self._run: Experiment | None = None  # while `learn` runs
        self._newest: dict[str, str] = {}  # parts of the bar's text
        self._rates: dict[str, float] = {}  # of the newest phase of each kind
        self._in_epoch: list[str] = []  # the kinds of phases that the epoch has had
        self._epoch_began = self._in_phases = 0.0

    def print(self, text: str) -> None:
        """Print lines, above the bar if there is one."""
        if text and self.speaks:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()  # a file or pipe shows each epoch when it is finished

    # ---- the run --------------------------------------------------------------------------------------------------------

    @contextmanager
    def learning(self, experiment: Experiment) -> Iterator[None]:
        """Within the block, the bar is that of the whole run."""
        self._run, self._epoch_began, self._in_phases = experiment, time.monotonic(), 0.0
        if self.draws:
            self._bar = _Bar(total=1.0, file=sys.stderr, leave=False, dynamic_ncols=True, delay=1e-9, mininterval=0, miniters=0)
        try:
            yield
        finally:
            self._run = None
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    @contextmanager
    def phase(self, kind: str, total: int | None, unit: str) -> Iterator[Phase]:
        """Show some work; call `Phase.update` within the block.

        Args:
            kind: what is done: "collect", "train", "evaluate" or another title.
            total: units of work; None if that is not known.
            unit: the name of one unit, such as "step".
        """
        phase = Phase(self, kind, total, unit)
        own = self.draws and self._bar is None
        if own:
            self._bar = _Bar(
                total=total, file=sys.stderr, leave=False, dynamic_ncols=True, delay=1e-9, desc=kind, unit=unit, mininterval=0
            )
        try:
            self.draw(phase)
            yield phase
        finally:
            if own and self._bar is not None:
                self._bar.close()
                self._bar = None
            self._note(phase)

    def _note(self, phase: Phase) -> None:
        """Remember how fast a phase was."""
        self._in_phases += phase.seconds
        self._pace.add(phase.kind, 1 if phase.kind == pace.EVALUATE else phase.done, phase.seconds)
        if phase.done:
            self._rates[phase.kind] = phase.rate * self._factors.get(phase.kind, 1.0)
            self._in_epoch.append(phase.kind)

    def rate(self, kind: str) -> float:
        """Steps or updates a second in the newest phase of a kind; 0.0 if there was none."""
        return self._rates.get(kind, 0.0)

    # ---- moments --------------------------------------------------------------------------------------------------------

    def on_collect_epoch_end(self, experiment: Experiment, metrics: Mapping[str, float]) -> None:
        self._note_return("return", metrics)

    def on_validation_end(self, experiment: Experiment, metrics: Mapping[str, float]) -> None:
        self._note_return("val", metrics)
        if self._run is None and metrics:  # evaluate_val() was called by itself
            self.print(f"epoch {experiment.epoch} | {_evaluation(metrics)}")

    def _note_return(self, name: str, metrics: Mapping[str, float]) -> None:
        if AVERAGE_RETURN in metrics:
            self._newest[name] = f"{name} {metrics[AVERAGE_RETURN]:.4g}"

    def on_epoch_end(self, experiment: Experiment, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._pace.add("rest", 1, max(0.0, now - self._epoch_began - self._in_phases))
        self._epoch_began, self._in_phases = now, 0.0
        if self._lines:
            left = self._left(None) if experiment.epoch < experiment.epochs else 0.0
            rates = [_speed(kind, self._rates[kind]) for kind in pace.UNITS if kind in self._in_epoch]
            self.print(fitted(epoch_line(experiment, metrics, rates, left)))
        self._in_epoch = []

    # ---- the bar --------------------------------------------------------------------------------------------------------

    def draw(self, phase: Phase) -> None:
        """Draw the bar anew."""
        bar, run = self._bar, self._run
        if bar is None:
            return
        if run is None:
            bar.n = phase.done
            bar.refresh()
            return
        left = self._left(phase)
        whole = self._pace.time(pace.work(run, 0, run.epochs))
        known = left is not None and whole
        bar.n = min(1.0, max(0.0, 1.0 - left / whole if known else run.epoch / run.epochs))  # type: ignore[operator]
        rates = {**self._rates}
        if phase.done and phase.seconds > _REDRAW_SECONDS:
            rates[phase.kind] = phase.rate * self._factors.get(phase.kind, 1.0)
        parts = [self._newest[k] for k in ("return", "val") if k in self._newest]
        parts += [_speed(kind, rates[kind]) for kind in pace.UNITS if kind in rates]
        title = f"epoch {run.epoch + 1}/{run.epochs} {_DOING.get(phase.kind, phase.kind)}"
        text = " | ".join([*parts, f"{pace.duration(left)} left"])
        braces = str.maketrans({"{": "{{", "}": "}}"})
        bar.bar_format = f"{title.translate(braces)} {{percentage:3.0f}}%|{{bar:10}}| {text.translate(braces)}"
        bar.refresh()

    def _left(self, phase: Phase | None) -> float | None:
        """Seconds that are left of the run; None if that is not known yet."""
        run = self._run
        if run is None:
            return None
        waiting = pace.work(run, run.epoch, run.epochs)
        collected, trained = run.done_in_epoch
        done = {pace.COLLECT: collected * run.parallel_actors, pace.TRAIN: trained, pace.EVALUATE: 0}
        if phase is None:
            return self._pace.time(waiting)
        if phase.kind == pace.COLLECT:
            done[pace.COLLECT] += phase.done
        evaluated = run.val_interval is not None and run.epoch % run.val_interval == 0
        done[pace.EVALUATE] = int(evaluated and phase.kind != pace.EVALUATE)
        rest = {kind: max(0.0, units - done.get(kind, 0)) for kind, units in waiting.items()}
        return self._pace.time(rest, (phase.kind, phase.done, phase.seconds))


def _can_draw() -> bool:
    """Whether standard error shows a bar: in a terminal or a notebook, not in a file or pipe."""
    try:
        return sys.stderr.isatty() or type(sys.stderr).__module__.partition(".")[0] == "ipykernel"
    except (AttributeError, ValueError):  # no standard error, or closed
        return False


def _speed(kind: str, per_second: float) -> str:
    """Such as "1,230 steps/s"."""
    return f"{pace.rate(per_second)} {pace.UNITS[kind]}/s"


def epoch_line(experiment: Experiment, metrics: Mapping[str, float], rates: list[str], left: float | None) -> str:
    """The line of a finished epoch.

    Args:
        metrics: of the epoch, by "section/name".
        rates: such as "1,230 steps/s".
        left: seconds that are left of the run; None if that is not known.
    """

    def of(section: str) -> dict[str, float]:
        return {k.removeprefix(f"{section}/"): v for k, v in metrics.items() if k.startswith(f"{section}/")}

    rollout, val, train = of("rollout"), of("val"), of("train")
    width = len(str(experiment.epochs))
    outcome = [f"return {rollout[AVERAGE_RETURN]:.4g}"] if AVERAGE_RETURN in rollout else []
    outcome += [_evaluation(val)] if AVERAGE_RETURN in val else []
    length = rollout.get(ROLLOUT_LENGTH, val.get(ROLLOUT_LENGTH))
    outcome += [f"length {length:.4g}"] if length is not None else []
    losses = [f"{n.lower()} {train[n]:.3g}" for n in ("Actor Loss", "Critic Loss") if n in train]
    left_text = "done" if left == 0.0 else f"{pace.duration(left)} left"
    parts: list[Any] = [
        f"epoch {experiment.epoch:>{width}}/{experiment.epochs}", f"{experiment.env_steps:,} steps", ", ".join(rates), ", ".join(outcome),
        ", ".join(losses), left_text,
    ]  # fmt: skip
    return " | ".join(p for p in parts if p)


def _evaluation(metrics: Mapping[str, float]) -> str:
    """The outcome of an evaluation: its return, and the first and last success rate."""
    success = [k for k in metrics if SUCCESS in k]
    shown = [f"{k.removeprefix('Average ')} {metrics[k]:.3f}" for k in dict.fromkeys(success[:1] + success[-1:])]
    return f"val {metrics[AVERAGE_RETURN]:.4g}" + (f" ({', '.join(shown)})" if shown else "")
