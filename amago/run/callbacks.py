"""`Callback`, the base class of a user's code that runs at named moments of an experiment; and `EarlyStopping`."""

from __future__ import annotations

import difflib
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from amago.describe import format_value
from amago.run.checkpoint import CheckpointError, load_weight_file
from amago.run.metric_names import AVERAGE_RETURN

Run: TypeAlias = Any
"""An `amago.Experiment`, in the annotations of the library's callbacks: its module imports this one."""


@dataclass(frozen=True)
class LogRow:
    """One row of the log, of a section ("train", "val", "test", "buffer" or "rollout"), and the place of the run.

    ``speeds``, in steps or updates a second, are not in ``metrics.jsonl``, of which only ``wall_time`` and ``memory`` depend on the machine.
    """

    section: str
    values: Mapping[str, float]  # by name; they may be infinite or NaN
    epoch: int
    env_steps: int
    grad_steps: int
    wall_time: float  # seconds of the run, including the time before a resume
    charts: Mapping[str, float] = field(default_factory=dict)  # further numbers that curves may be drawn against
    speeds: Mapping[str, float] = field(default_factory=dict)
    memory: float = 0.0  # GiB of this process and its children; 0.0 where it was not measured


class Callback:
    """Base class of callbacks: override the methods that you need; each does nothing by default.

    Pass instances as ``amago.Experiment(callbacks=[...])``. They are called in this order, after the library's callbacks, in
    every process of the run; `on_log` and `on_save_checkpoint` in the main process alone. An exception of a callback is not
    caught: it ends the run like an error in the run itself. ``experiment.should_stop = True`` ends `Experiment.learn` when the
    epoch is finished; in `on_validation_end` before it collects and trains, so that the last weights are those that were evaluated.

    A subclass that has a state to go on with after a resume also overrides `state_dict` and `load_state_dict`. The state of the main
    process is saved in each training state, and restored in every process.
    """

    def on_start(self, experiment: Any) -> None:
        """``start()`` has built everything, and has resumed if requested. ``experiment.epoch`` is the first epoch to run."""

    def before_epoch(self, experiment: Any) -> None:
        """An epoch begins: with ``always_load_latest``, the newest policy was read; evaluation and collection follow. Called again for
        an epoch that a resume continues. It may wait, by ``experiment.signals.wait(seconds)``, which a signal ends."""

    def before_update(self, experiment: Any) -> None:
        """A batch is about to be trained on. It may wait, as `before_epoch`; after a signal, the run stops with this update."""

    def on_step(self, experiment: Any, steps: int, phase: str) -> bool | None:
        """The actors of this process have taken a step, of so many environment steps in all. It may wait, as `before_epoch`, and returns True
        to end a collection or an evaluation early, as if its steps were over.

        Args:
            phase: "collect", "evaluate", "test", "interact"; or "wait", with 0 steps, where a process that does not collect waits for data.
        """

    def on_collect_epoch_end(self, experiment: Any, metrics: Mapping[str, float]) -> None:
        """The collection phase of an epoch is finished; ``metrics`` of the rollouts that ended in it, over all processes, and its speed
        (section ``rollout``)."""

    def on_train_epoch_end(self, experiment: Any, metrics: Mapping[str, float]) -> None:
        """The training phase of an epoch is finished; ``metrics`` are means over it, of this process (section ``train``)."""

    def on_validation_end(self, experiment: Any, metrics: Mapping[str, float]) -> None:
        """An evaluation on the validation environments is finished, which is before the collection of its epoch; ``metrics`` over all
        processes (section ``val``), or {} if no rollout ended."""

    def on_epoch_end(self, experiment: Any, metrics: Mapping[str, float]) -> None:
        """An epoch is finished, and no checkpoint of it is saved yet. ``experiment.epoch`` counts the finished epochs; ``metrics`` has the
        newest value of everything that was logged in the epoch, by "section/name", and means over the epoch of training metrics."""

    def on_save_checkpoint(self, experiment: Any, path: Path) -> None:
        """A training state was saved in the directory ``path``; in the main process alone. ``experiment.epoch`` counts the finished epochs,
        and the name of the directory has the number of the last one, from 0."""

    def on_log(self, experiment: Any, row: LogRow) -> None:
        """A row is written to the log; in the main process alone."""

    def on_end(self, experiment: Any) -> None:
        """``learn()`` has run all epochs, or was ended by ``should_stop``; not after a signal or an exception."""

    def on_exception(self, experiment: Any, exception: BaseException) -> None:
        """An exception leaves ``learn()``, or a signal has stopped it (`amago.run.group.Stopped`). It is raised again afterwards."""

    def on_close(self, experiment: Any) -> None:
        """``close()`` was called: release the callback's resources. Only after `on_start`, and once."""

    @property
    def state_key(self) -> str:
        """The name of this callback's state in training states: by default the name of its class."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """The callback's state for a training state: tensors, numbers, strings, None, and lists, tuples and dicts of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, before `on_start`."""


MOMENTS = tuple(name for name in vars(Callback) if name.startswith(("on_", "before_")))


def mistakes_in(callbacks: object) -> Iterator[str]:
    """Mistakes in the field ``callbacks`` of an experiment, one line each."""
    if isinstance(callbacks, str | Mapping) or not isinstance(callbacks, Iterable):
        yield f"callbacks must be a list of amago.Callback instances, got {callbacks!r}"
        return
    for i, callback in enumerate(callbacks):
        if isinstance(callback, type) and issubclass(callback, Callback):
            yield f"callbacks[{i}] must be an instance, not the class {callback.__name__}: pass {callback.__name__}()"
        elif not isinstance(callback, Callback):
            yield f"callbacks[{i}] must be an instance of amago.Callback, got {callback!r}"
        else:
            for name in dir(type(callback)):
                near = difflib.get_close_matches(name, MOMENTS, n=1, cutoff=0.8)
                if near and name not in MOMENTS and name.startswith(("on_", "before_")):
                    yield f"callbacks[{i}]: {type(callback).__name__}.{name} is never called; did you mean {near[0]}?"


class CallbackList:
    """The callbacks of a run, called one after another in their order."""

    def __init__(self, callbacks: Iterable[Callback] = ()):
        self._callbacks = list(callbacks)
        self._with_steps = [c for c in self._callbacks if type(c).on_step is not Callback.on_step]
        self._open: list[Callback] = []  # `on_start` was called, and `on_close` was not

    def start(self, experiment: object) -> None:
        """Call `Callback.on_start`."""
        for callback in self._callbacks:
            self._open.append(callback)  # first, so that a callback that fails here is closed too
            callback.on_start(experiment)

    def call(self, moment: str, *args: object) -> None:
        """Call a method of all callbacks, one of `MOMENTS`."""
        for callback in self._callbacks:
            getattr(callback, moment)(*args)

    def step(self, experiment: object, steps: int, phase: str) -> bool:
        """Call `Callback.on_step` of those that override it; returns whether one of them ends the phase."""
        answers = [c.on_step(experiment, steps, phase) for c in self._with_steps]  # all are called
        return any(answers)

    def close(self, experiment: object) -> None:
        """Call `Callback.on_close` of all that were started, even after an exception, which is raised afterwards."""
        with ExitStack() as stack:
            for callback in reversed(self._open):
                stack.callback(callback.on_close, experiment)
            self._open = []

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The states that are not empty, by `Callback.state_key` ("KEY 2" of its second callback); a TypeError for one that could not be
        loaded again."""
        states = {key: state for key, callback in self._by_key() if (state := callback.state_dict())}
        for key, state in states.items():
            try:
                torch.save(state, written := io.BytesIO())
                torch.load(io.BytesIO(written.getvalue()), weights_only=True)
            except Exception as err:
                raise TypeError(
                    f"state_dict() of the callback {key} would not be loaded again: return tensors, numbers, strings, None, and lists, tuples "
                    f"and dicts of these (item() of a NumPy scalar, torch.from_numpy() of an array), got {format_value(state)}"
                ) from err
        return states

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> list[str]:
        """Restore the result of `state_dict`, and return the keys of states without a callback. A callback without a state keeps its own."""
        callbacks = dict(self._by_key())
        for key in states.keys() & callbacks.keys():
            callbacks[key].load_state_dict(states[key])
        return sorted(states.keys() - callbacks.keys())

    def _by_key(self) -> Iterator[tuple[str, Callback]]:
        seen: Counter[str] = Counter()
        for callback in self._callbacks:
            key = callback.state_key
            seen[key] += 1
            yield (key if seen[key] == 1 else f"{key} {seen[key]}"), callback


class Monitored(Callback):
    """Base of callbacks that follow a metric of the evaluations. ``best`` is its best value so far; None before the first evaluation.

    Args:
        monitor: the metric's name in the section ``val`` of the log; by default the mean return.
        min_delta: the smallest difference to the best value so far that counts as an improvement.
        mode: "max" or "min": which values are better.
    """

    def __init__(self, monitor: str = AVERAGE_RETURN, min_delta: float = 0.0, mode: str = "max"):
        if mode not in ("max", "min"):
            raise ValueError(f"mode must be 'max' or 'min', got {mode!r}")
        if not (isinstance(min_delta, int | float) and 0.0 <= min_delta < math.inf):
            raise ValueError(f"min_delta must be a finite number of 0 or more, got {min_delta!r}")
        self.monitor, self.min_delta, self.mode = monitor, min_delta, mode
        self.best: float | None = None

    def on_start(self, experiment: Run) -> None:
        if experiment.val_interval is None and not experiment.launched:  # of a launched run, collectors evaluate
            raise ValueError(f"{type(self).__name__} needs evaluations, but val_interval is None")

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """True if an evaluation is better than all before, which makes it the best one; a ValueError if it has no such metric."""
        if self.monitor not in metrics:
            near = difflib.get_close_matches(self.monitor, metrics, n=1, cutoff=0.0)
            raise ValueError(
                f"{type(self).__name__}(monitor={self.monitor!r}): no such metric in this evaluation; did you mean {near[0]!r}? "
                f"There are {', '.join(map(repr, metrics))}"
            )
        value = float(metrics[self.monitor])
        if math.isnan(value) or not (self.best is None or self._sign * (value - self.best) > self.min_delta):
            return False
        self.best = value
        return True

    @property
    def _sign(self) -> int:
        return 1 if self.mode == "max" else -1

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}({self.monitor}, {self.mode})"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


class KeepBest(Monitored):
    """Keeps the policy's weights of the best evaluation in ``ckpts/best/policy.pt`` of the run's directory.

    ``amago eval RUN/ckpts/best`` and `amago.load_policy` take them. The best of many noisy evaluations is too good by chance: judge
    the weights by new rollouts. Where collectors in other processes evaluate (``amago launch``), the learner's weights of the moment
    are kept, which may be some updates newer than those that were evaluated. The value of the evaluation is in the file, so that weights
    and value always belong together: training states are older after a kill.
    Arguments: see `Monitored`.
    """

    def on_start(self, experiment: Run) -> None:
        super().on_start(experiment)
        try:
            note = load_weight_file(experiment.checkpoints.best).note
        except CheckpointError:  # there is none, or it is damaged
            self.best = None
            return
        self.best = note["value"] if note is not None and note.get("of") == self.state_key else None

    def on_validation_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        before = self.best
        if metrics and self.improves(metrics) and not experiment.write_best_policy({"of": self.state_key, "value": self.best}):
            self.best = before  # the file is unchanged

    def state_dict(self) -> dict[str, Any]:
        return {}


class EarlyStopping(Monitored):
    """Ends the run when a metric of the evaluations does not improve any more.

    Args:
        monitor, min_delta, mode: see `Monitored`.
        patience: evaluations without an improvement after which the run ends.
        threshold: end the run at once when the metric is at least this good; None: never.

    ``waited`` counts the evaluations since the best one.
    """

    def __init__(
        self,
        monitor: str = AVERAGE_RETURN,
        patience: int = 10,
        min_delta: float = 0.0,
        mode: str = "max",
        threshold: float | None = None,
    ):
        super().__init__(monitor, min_delta, mode)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience must be a whole number of at least 1, got {patience!r}")
        self.patience, self.threshold = patience, threshold
        self.waited = 0

    def on_start(self, experiment: Run) -> None:
        super().on_start(experiment)
        if self._is_over():  # a resumed run had ended
            experiment.should_stop = True

    def on_validation_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        if not metrics:
            return
        self.waited = 0 if self.improves(metrics) else self.waited + 1
        if self._is_over():
            experiment.should_stop = True
            experiment.print(f"early stopping: the best {self.monitor!r} was {self.best}, {self.waited} evaluations ago")

    def _is_over(self) -> bool:
        reached = self.threshold is not None and self.best is not None and self._sign * (self.best - self.threshold) >= 0
        return reached or self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.waited = state["waited"]
