"""Search for good settings: spaces to search in, and the callback between a run and a trial of an Optuna study."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from amago.run.callbacks import Callback, Run
from amago.run.metric_names import AVERAGE_RETURN

if TYPE_CHECKING:
    import optuna

KINDS = {  # forms of a setting after "NAME=" in a space, and the values that each takes
    "uniform": "LOW, HIGH: two numbers, the first below the second",
    "loguniform": "LOW, HIGH: two positive numbers, the first below the second",
    "int": "LOW, HIGH: two whole numbers, the first below the second",
    "logint": "LOW, HIGH: two positive whole numbers, the first below the second",
    "choice": "two values or more, each once",
}
Space = dict[str, "optuna.distributions.BaseDistribution"]


def parse_space(texts: Iterable[str]) -> Space:
    """Read a search space, such as "learning_rate=loguniform(1e-5, 1e-3)", "Agent.gamma=choice(0.99, 0.999)"; `KINDS` has all forms.

    Choices that Optuna does not store, such as lists, are texts there: `value_of` returns them.

    Raises:
        ValueError: quotes the text that cannot be read, and shows the valid forms.
    """
    found: dict[str, str] = {}
    space: Space = {}
    for text in texts:
        match = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(\w+)\s*\((.*)\)\s*", text, re.DOTALL)
        if match is None or match[2] not in KINDS:
            raise ValueError(
                f"cannot read {text!r}: a part of the space is NAME=KIND(...), such as 'learning_rate=loguniform(1e-5,1e-3)', with one of "
                f"{', '.join(KINDS)}"
            )
        name, kind, inside = match.groups()
        if name in found:
            raise ValueError(f"the space has {name} twice: {found[name]!r} and {text!r}")
        distribution = _distribution(kind, _values(inside))
        if distribution is None:
            raise ValueError(f"{text!r}: {kind} takes {KINDS[kind]}")
        found[name], space[name] = text, distribution
    return space


def _values(inside: str) -> list[Any]:
    try:
        return list(ast.literal_eval(f"[{inside}]"))
    except (ValueError, SyntaxError):  # a value is text without quotes
        return [_literal(part.strip()) for part in inside.split(",")]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _distribution(kind: str, values: list[Any]) -> optuna.distributions.BaseDistribution | None:
    """The distribution of a kind; None if it takes other values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if kind == "choice":
        fits = len({*map(repr, values)}) == len(values) > 1
        return CategoricalDistribution([repr(v) if isinstance(v, list | tuple | dict) else v for v in values]) if fits else None
    whole, log = kind.endswith("int"), kind.startswith("log")
    if len(values) != 2 or any(type(v) is not int and (whole or type(v) is not float or not math.isfinite(v)) for v in values):
        return None
    low, high = values
    if not low < high or (log and low <= 0):
        return None
    return IntDistribution(low, high, log=log) if whole else FloatDistribution(low, high, log=log)


def grid_of(distribution: optuna.distributions.BaseDistribution) -> list[Any] | None:
    """Every value of a setting, as Optuna stores it; None where they cannot be counted."""
    found = vars(distribution)
    return (
        list(found["choices"]) if "choices" in found else [*range(found["low"], found["high"] + 1)] if found["step"] else None
    )


def value_of(stored: Any) -> Any:
    """The value of a setting, given a trial's parameter."""
    return _literal(stored) if isinstance(stored, str) and stored[:1] in ("[", "(", "{") else stored


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
