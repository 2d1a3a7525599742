"""`Callback`: what a user adds to a run without subclassing `amago.Experiment`, at a few named moments; and `EarlyStopping`."""

from __future__ import annotations

import difflib
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from amago.run.metric_names import AVERAGE_RETURN
from amago.run.signals import Stopped

if TYPE_CHECKING:
    from amago.experiment import Experiment


@dataclass(frozen=True)
class LogRow:
    """One row of the log.

    Attributes:
        section: "train", "val", "test", "buffer" or "rollout".
        values: numbers by name; they may be infinite or NaN.
        epoch, env_steps, grad_steps: where the run is.
        wall_time: seconds of the run, including the time before a resume.
        charts: further numbers that curves may be drawn against.
        speeds: steps or updates a second. They are not in ``metrics.jsonl``, of which only ``wall_time`` depends on the clock.
    """

    section: str
    values: Mapping[str, float]
    epoch: int
    env_steps: int
    grad_steps: int
    wall_time: float
    charts: Mapping[str, float] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)


class Callback:
    """Base class of callbacks: override the moments that you need; each does nothing by default.

    Pass instances as ``amago.Experiment(callbacks=[...])``. They are called in this order, after those of the library, in every process
    of the run; `on_log` and `on_save_checkpoint` in the main process alone. What a callback raises is not caught: it ends the run as an error in the run itself would.
    ``experiment.should_stop = True`` ends `Experiment.learn` when the epoch is finished.

    A subclass that has a state to go on with after a resume also overrides `state_dict` and `load_state_dict`. The state of the main
    process is saved in each training state, and restored in every process.
    """

    def on_start(self, experiment: Experiment) -> None:
        """``start()`` has built everything, and has resumed if it was to. ``experiment.epoch`` is the first epoch to run."""

    def on_collect_epoch_end(self, experiment: Experiment, metrics: Mapping[str, float]) -> None:
        """The collection phase of an epoch is finished.

        Args:
            metrics: of the rollouts that ended in it, over all processes, and its speed (section ``rollout`` of the log).
        """

    def on_train_epoch_end(self, experiment: Experiment, metrics: Mapping[str, float]) -> None:
        """The training phase of an epoch is finished.

        Args:
            metrics: means over the phase, of this process (section ``train``).
        """

    def on_validation_end(self, experiment: Experiment, metrics: Mapping[str, float]) -> None:
        """An evaluation on the validation environments is finished, which is before the collection of its epoch.

        Args:
            metrics: over all processes (section ``val``); {} if no rollout ended.
        """

    def on_epoch_end(self, experiment: Experiment, metrics: Mapping[str, float]) -> None:
        """An epoch is finished, and no checkpoint of it is saved yet. ``experiment.epoch`` counts the finished epochs.

        Args:
            metrics: the newest value of everything that was logged in the epoch, by "section/name". Training metrics are means
                over the epoch.
        """

    def on_save_checkpoint(self, experiment: Experiment, path: Path) -> None:
        """A training state was saved; in the main process alone. ``experiment.epoch`` is the number of the epoch, from 0, as in the name of
        the directory.

        Args:
            path: its directory.
        """

    def on_log(self, experiment: Experiment, row: LogRow) -> None:
        """A row is written to the log; in the main process alone."""

    def on_end(self, experiment: Experiment) -> None:
        """``learn()`` has run all epochs, or was ended by ``should_stop``; not after a signal or an exception."""

    def on_exception(self, experiment: Experiment, exception: BaseException) -> None:
        """An exception leaves ``learn()``, or a signal has stopped it (`amago.run.signals.Stopped`). It is raised again afterwards."""

    def on_close(self, experiment: Experiment) -> None:
        """``close()`` was called: release what the callback holds. Only after `on_start`, and once."""

    @property
    def state_key(self) -> str:
        """The name of this callback's state in training states: by default the name of its class."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What to save in a training state: tensors, numbers, strings, None, and lists, tuples and dicts of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, before `on_start`."""


MOMENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def mistakes_in(callbacks: Any) -> Iterator[str]:
    """What is wrong with the field ``callbacks`` of an experiment, one line each."""
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
                near = difflib.get_close_matches(name, MOMENTS, n=1, cutoff=0.8) if name.startswith("on_") else []
                if near and name not in MOMENTS:
                    yield f"callbacks[{i}]: {type(callback).__name__}.{name} is never called; did you mean {near[0]}?"


class CallbackList:
    """The callbacks of a run, called one after another.

    Args:
        callbacks: in the order of the calls.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()):
        self._callbacks = list(callbacks)
        self._open: list[Callback] = []  # `on_start` was called, and `on_close` was not

    def start(self, experiment: Experiment) -> None:
        """Call `Callback.on_start`."""
        for callback in self._callbacks:
            self._open.append(callback)  # first: what it has opened before it failed is closed, too
            callback.on_start(experiment)

    def call(self, moment: str, *args: Any) -> None:
        """Call a method of all callbacks.

        Args:
            moment: one of `MOMENTS`.
        """
        for callback in self._callbacks:
            getattr(callback, moment)(*args)

    @contextmanager
    def told_of_exceptions(self, experiment: Experiment) -> Iterator[None]:
        """Within the block, call `Callback.on_exception` of whatever is raised but `Stopped`, of which `Experiment` tells them itself."""
        try:
            yield
        except BaseException as err:
            if not isinstance(err, Stopped):
                self.call("on_exception", experiment, err)
            raise

    def close(self, experiment: Experiment) -> None:
        """Call `Callback.on_close` of all that were started, whatever one of them raises; then raise the first exception."""
        waiting, self._open = self._open, []
        failed: list[BaseException] = []
        for callback in waiting:
            try:
                callback.on_close(experiment)
            except BaseException as err:
                failed.append(err)
        if failed:
            raise failed[0]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The states that are not empty, by `Callback.state_key`; a second callback of a key gets "KEY 2", and so on.

        Raises:
            TypeError: a state holds something that could not be loaded again.
        """
        states = {key: state for key, callback in self._by_key() if (state := callback.state_dict())}
        for key, state in states.items():
            _check_state(state, f"state_dict() of the callback {key}")
        return states

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> list[str]:
        """Restore what `state_dict` returned. A callback without a saved state keeps its own.

        Returns:
            the keys of states that no callback has taken.
        """
        left = dict(states)
        for key, callback in self._by_key():
            if key in left:
                callback.load_state_dict(left.pop(key))
        return sorted(left)

    def _by_key(self) -> Iterator[tuple[str, Callback]]:
        seen: dict[str, int] = {}
        for callback in self._callbacks:
            key = callback.state_key
            seen[key] = seen.get(key, 0) + 1
            yield (key if seen[key] == 1 else f"{key} {seen[key]}"), callback


def _check_state(value: Any, where: str) -> None:
    """Refuse what ``torch.load(weights_only=True)`` would not load, before it is written."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _check_state(key, f"a key in {where}")
            _check_state(item, f"{where}, {key!r}")
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            _check_state(item, f"{where}[{i}]")
    elif not (isinstance(value, Tensor) or type(value) in (str, bool, int, float, bytes, NoneType)):
        raise TypeError(
            f"{where} is {type(value).__module__}.{type(value).__qualname__}, which would not be loaded again: return tensors, numbers, "
            "strings, None, and lists, tuples and dicts of these (item() of a NumPy scalar, torch.from_numpy() of an array)"
        )


class Monitored(Callback):
    """Base of callbacks that follow a metric of the evaluations, and know its best value so far.

    Args:
        monitor: the metric's name in the section ``val`` of the log; by default the mean return.
        min_delta: by how much a value must be better than the best one so far to count as an improvement.
        mode: "max" or "min": which values are better.

    Attributes:
        best: the best value so far; None before the first evaluation.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(self, monitor: str = AVERAGE_RETURN, min_delta: float = 0.0, mode: str = "max"):
        if mode not in ("max", "min"):
            raise ValueError(f"mode must be 'max' or 'min', got {mode!r}")
        if not (isinstance(min_delta, int | float) and 0.0 <= min_delta < math.inf):
            raise ValueError(f"min_delta must be a finite number of 0 or more, got {min_delta!r}")
        self.monitor, self.min_delta, self.mode = monitor, min_delta, mode
        self.best: float | None = None

    def on_start(self, experiment: Experiment) -> None:
        if experiment.val_interval is None and not experiment.launched:  # of a launched run, collectors evaluate
            raise ValueError(f"{type(self).__name__} needs evaluations, but val_interval is None")

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than all before, which makes it the best one.

        Raises:
            ValueError: it has no such metric.
        """
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
    are kept, which may be some updates newer than those that were evaluated.

    Args, attributes and errors are those of `Monitored`.
    """

    def on_validation_end(self, experiment: Experiment, metrics: Mapping[str, float]) -> None:
        if metrics and self.improves(metrics):
            experiment.write_best_policy()


class EarlyStopping(Monitored):
    """Ends the run when a metric of the evaluations does not improve any more.

    Args:
        monitor, min_delta, mode: see `Monitored`.
        patience: evaluations without an improvement after which the run ends.
        threshold: end the run at once when the metric is at least this good; None: never.

    Attributes:
        best: the best value so far; None before the first evaluation.
        waited: evaluations since then.

    Raises:
        ValueError: an argument is outside its range.
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

    def on_start(self, experiment: Experiment) -> None:
        super().on_start(experiment)
        if self._is_over():  # a resumed run had ended
            experiment.should_stop = True

    def on_validation_end(self, experiment: Experiment, metrics: Mapping[str, float]) -> None:
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
