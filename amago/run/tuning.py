"""Search for good settings: spaces to search in, and the callback between a run and a trial of an Optuna study."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amago.run.callbacks import Callback, Run
from amago.run.metric_names import AVERAGE_RETURN

if TYPE_CHECKING:
    import optuna

KINDS = {  # forms of a dimension after "NAME=" in a space, and the values drawn from each
    "uniform": "numbers between LOW and HIGH",
    "loguniform": "numbers between LOW and HIGH, whose logarithms are equally likely",
    "int": "whole numbers from LOW to HIGH",
    "logint": "whole numbers from LOW to HIGH, whose logarithms are equally likely",
    "choice": "one of the values",
}
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Dimension:
    """One setting to search over.

    Attributes:
        name: of the setting.
        kind: one of `KINDS`.
        values: (LOW, HIGH), or the values of a "choice".
        text: as it was written.
    """

    name: str
    kind: str
    values: tuple[Any, ...]
    text: str

    @classmethod
    def of(cls, name: str, values: Iterable[Any]) -> Dimension:
        """The choice between some values."""
        return cls(name, "choice", tuple(values), f"{name}=choice({', '.join(map(repr, values))})")

    def grid(self) -> list[Any]:
        """Every value, as Optuna stores it; a ValueError where they cannot be counted."""
        if self.kind not in ("choice", "int"):
            raise ValueError(
                f"{self.text!r} has no values that could all be tried: a grid takes choice(...), int(...) and lists"
            )
        return self._labels if self.kind == "choice" else list(range(self.values[0], self.values[1] + 1))

    @property
    def _labels(self) -> list[Any]:
        """The values of a choice as Optuna stores them."""
        return [v if isinstance(v, _SCALARS) else repr(v) for v in self.values]

    def value_of(self, stored: object) -> Any:
        """The value that a finished trial had, of ``trial.params``."""
        return self.values[self._labels.index(stored)] if self.kind == "choice" else stored

    def suggest(self, trial: optuna.trial.Trial) -> Any:
        """The value of a trial."""
        if self.kind == "choice":
            return self.value_of(trial.suggest_categorical(self.name, self._labels))
        draw: Any = trial.suggest_int if self.kind.endswith("int") else trial.suggest_float
        return draw(self.name, *self.values, log=self.kind.startswith("log"))


def parse_space(texts: Iterable[str]) -> list[Dimension]:
    """Read a search space, such as "learning_rate=loguniform(1e-5, 1e-3)", "Agent.gamma=choice(0.99, 0.999)"; `KINDS` has all forms.

    Raises:
        ValueError: quotes the text that cannot be read, and shows the valid forms.
    """
    found: dict[str, Dimension] = {}
    for dimension in map(_parse, texts):
        if dimension.name in found:
            raise ValueError(f"the space has {dimension.name} twice: {found[dimension.name].text!r} and {dimension.text!r}")
        found[dimension.name] = dimension
    return list(found.values())


def _parse(text: str) -> Dimension:
    match = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(\w+)\s*\((.*)\)\s*", text, re.DOTALL)
    if match is None or match[2] not in KINDS:
        raise ValueError(
            f"cannot read {text!r}: a part of the space is NAME=KIND(...), such as 'learning_rate=loguniform(1e-5,1e-3)', with one of "
            f"{', '.join(KINDS)}"
        )
    name, kind, inside = match.groups()
    try:
        values = tuple(ast.literal_eval(f"[{inside}]"))
    except (ValueError, SyntaxError):  # a value is text without quotes
        values = tuple(_literal(part.strip()) for part in inside.split(","))
    whole, numbers = all(type(v) is int for v in values), all(type(v) in (int, float) and math.isfinite(v) for v in values)
    if kind == "choice":
        mistake = "" if len({*map(repr, values)}) == len(values) > 1 else "a choice needs two values or more, each once"
    elif len(values) != 2 or not numbers:
        mistake = f"{kind} takes two numbers, {kind}(LOW, HIGH)"
    elif not values[0] < values[1]:
        mistake = "the first number must be below the second"
    elif kind.startswith("log") and values[0] <= 0:
        mistake = f"both numbers of {kind} must be positive"
    else:
        mistake = f"both numbers of {kind} must be whole" if kind.endswith("int") and not whole else ""
    if mistake:
        raise ValueError(f"{text!r}: {mistake}")
    return Dimension(name, kind, values, text)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class PruneTrial(Callback):
    """Reports each evaluation to a trial of an Optuna study. ``learn()`` raises `optuna.TrialPruned` if the study finds that the trial is
    not promising, and ValueError if an evaluation lacks the metric.

    Args:
        trial: of the study.
        metric: the metric's name in the section ``val`` of the log; by default the mean return.

    Attributes:
        value: of the newest evaluation; None before the first.
    """

    def __init__(self, trial: optuna.trial.Trial, metric: str = AVERAGE_RETURN):
        self._trial, self.metric = trial, metric
        self.value: float | None = None

    def on_validation_end(self, experiment: Run, metrics: Mapping[str, float]) -> None:
        import optuna

        if not metrics:
            return
        if self.metric not in metrics:
            raise ValueError(f"evaluations have no metric {self.metric!r}; there are {', '.join(map(repr, metrics))}")
        self.value = float(metrics[self.metric])
        if math.isnan(self.value):
            return
        if experiment.epoch not in self._reported():
            self._trial.report(self.value, step=experiment.epoch)
        if experiment.epoch < experiment.epochs and self._trial.should_prune():
            raise optuna.TrialPruned(f"{self.metric} was {self.value:.4g} at epoch {experiment.epoch}")

    def _reported(self) -> Container[int]:
        """Epochs whose evaluations the study has. A run that was stopped after an evaluation and before a checkpoint repeats it."""
        study = getattr(self._trial, "study", None)
        return () if study is None else study.get_trials(deepcopy=False)[self._trial.number].intermediate_values
